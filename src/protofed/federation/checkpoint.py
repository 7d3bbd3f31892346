"""A federation on disk: safetensors and JSON, written so that a kill at any moment leaves whole checkpoints.

Each checkpoint is a folder of its own, `round-000042`, that gets its name when everything in it is on the disk. Its
`manifest.json` holds a digest of every file and an account of what the run had written at that time. Two checkpoints
are kept: where the newer one is damaged, the older one is used. Random streams are derived from seed, purpose and
round, so no generator has to be saved.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import disk, wire
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..wire.frame import DTYPES
from . import scale
from .local import ClientState
from .rounds import Federation

log = logging.getLogger("protofed")
FORMAT = 3
CHECKPOINTS_KEPT = 2  # where the newer one is damaged, the older one is used
MANIFEST = "manifest.json"
NamedTensors = Callable[[], Iterator[tuple[str, Tensor]]]
"""A function that yields tensors by name, one after another, so that they are never copied all at once."""
Fits = Callable[[int, Mapping[str, Any]], None]
"""A function that raises a `ProtofedError` where the run folder no longer fits the account of it in a checkpoint."""


def save(federation: Federation, folder: Path, written: Mapping[str, Any] | None = None) -> None:
    """Write the federation's state after its current round. With ranks, all take part and the first one writes.

    Args:
        federation: The federation: its round, the server's state, and the states of the clients that keep something.
        folder: The folder of the run's checkpoints.
        written: An account of what the run has written beside its checkpoints; `load` passes it to `fits`.

    Example:
        `save(federation, run / "checkpoint")`
    """
    states = federation.engine.export()
    if scale.rank() != 0:
        return
    name = f"round-{federation.round:06d}"
    with disk.writing(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".{name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        tensors: dict[str, Tensor] = {}
        trees = {"server": packed(federation.state, "", tensors)}
        if federation.trusted is not None:
            trees["trusted"] = packed(federation.trusted, "trusted", tensors)
        state = json.dumps({"round": federation.round, **trees}, indent=1).encode()
        disk.write_durably(temporary / "state.json", state)
        digests = {
            "state.json": hashlib.sha256(state).hexdigest(),
            "server.safetensors": write_tensors(temporary / "server.safetensors", lambda: iter(tensors.items())),
            "clients.safetensors": write_states(temporary / "clients.safetensors", states),
        }
        manifest = {"format": FORMAT, "round": federation.round, "files": digests, "written": written or {}}
        disk.write_durably(temporary / MANIFEST, disk.sealed(manifest))
        disk.sync_folder(temporary)
        final = folder / name
        if final.exists():  # the round was repeated, with the same bits
            shutil.rmtree(final)
        temporary.rename(final)
        disk.sync_folder(folder)
        for outdated in rounds_in(folder)[CHECKPOINTS_KEPT:]:
            shutil.rmtree(outdated, ignore_errors=True)


def rounds_in(folder: Path) -> list[Path]:
    """The folders of the checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.glob("round-*") if p.is_dir()), key=lambda p: p.name, reverse=True)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been read and checked. `clients` reads a client's state when it is needed."""

    round: int
    server: Any
    clients: Mapping[int, ClientState]
    written: Mapping[str, Any]
    trusted: Any = None


def load(federation: Federation, folder: Path, fits: Fits | None = None) -> Saved | None:
    """Restore the newest checkpoint that is whole into a new federation.

    Args:
        federation: A federation before its first round, with the settings that the checkpoint was written with.
        folder: The folder of the run's checkpoints.
        fits: Raises an error where the run folder does not fit the checkpoint's account of it.

    Returns:
        The restored checkpoint, or None where there is none yet and the federation starts from the beginning.
    """
    saved = scale.on_first(lambda: _newest(federation, folder, fits))
    if saved is not None:
        federation.round = saved.round
        federation.state, federation.trusted = saved.server, saved.trusted
        federation.engine.restore(saved.clients)
    return saved


def _newest(federation: Federation, folder: Path, fits: Fits | None) -> Saved | None:
    """The newest checkpoint that is whole and fits; a warning names those that are not."""
    problems = []
    for path in rounds_in(folder):
        try:
            saved = _read(federation, path)
            if fits is not None:
                fits(saved.round, saved.written)
        except ProtofedError as error:
            problems.append(error)
            continue
        for problem in problems:
            log.warning("%s; going on from the checkpoint before, of round %d", problem, saved.round)
        if scale.asked_for():  # the other ranks cannot read this host's files
            saved = replace(saved, clients=dict(saved.clients))
        return saved
    if problems:
        older = f" (and {len(problems) - 1} older)" if len(problems) > 1 else ""
        raise ProtofedError(f"{problems[0]}{older}; there is no whole checkpoint to go on from: start the run again")
    return None


def _read(federation: Federation, path: Path) -> Saved:
    """One checkpoint. Every file of it is compared with its digest first."""
    manifest_file = path / MANIFEST
    try:
        manifest = disk.opened(manifest_file.read_bytes(), manifest_file)
        if manifest.get("format") != FORMAT:
            raise ProtofedError(f"{path}: checkpoint format {manifest.get('format')!r}; this version reads {FORMAT}")
        for name, digest in manifest["files"].items():
            if disk.digest_of(path / name) != digest:
                raise ProtofedError(f"{path / name}: damaged (its content does not match the digest in {MANIFEST})")
        state = json.loads((path / "state.json").read_bytes())
        if not int(state["round"]) == manifest["round"] == int(path.name.removeprefix("round-")):
            raise ProtofedError(f"{path}: a checkpoint of round {manifest['round']}, and its folder says otherwise")
        with safe_open(path / "server.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        server = unpacked(state["server"], tensors, federation.state)
        trusted = unpacked(state["trusted"], tensors, federation.state) if "trusted" in state else None
        clients = StoredStates(path / "clients.safetensors")
        _check_states(clients, federation)
        return Saved(manifest["round"], server, clients, manifest["written"], trusted)
    except FileNotFoundError as error:
        raise ProtofedError(f"{error.filename}: this file of the checkpoint is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ProtofedError(f"{path}: unreadable checkpoint ({type(error).__name__}: {error})") from None


def packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A server's state as JSON. Its tensors are moved into `tensors` and replaced by their names."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, PrototypeBank):
        return {
            "$bank": [packed(value.means, f"{path}/means", tensors), packed(value.counts, f"{path}/counts", tensors)]
        }
    if is_dataclass(value):
        return {f.name: packed(getattr(value, f.name), f"{path}/{f.name}", tensors) for f in fields(value)}
    if isinstance(value, Mapping):
        return {"$map": [[key, packed(v, f"{path}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, tuple | list):
        return [packed(v, f"{path}/{k}", tensors) for k, v in enumerate(value)]
    return value


def unpacked(tree: Any, tensors: Mapping[str, Tensor], like: Any = None) -> Any:
    """The inverse of `packed`; `like` is a state of the same form, whose dataclasses the result has too."""
    if isinstance(tree, list):
        forms = like if isinstance(like, tuple) and len(like) == len(tree) else (None,) * len(tree)
        return tuple(unpacked(v, tensors, form) for v, form in zip(tree, forms, strict=True))
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$bank" in tree:
        return PrototypeBank(*(unpacked(v, tensors) for v in tree["$bank"]))
    if "$map" in tree:
        return {key: unpacked(v, tensors) for key, v in tree["$map"]}
    return type(like)(**{name: unpacked(v, tensors, getattr(like, name, None)) for name, v in tree.items()})


def write_tensors(path: Path, tensors: NamedTensors) -> str:
    """Write a safetensors file tensor by tensor, and wait until the disk has it.

    Args:
        path: The file.
        tensors: Yields the tensors by name. It is called once for the header and again for the content.

    Returns:
        The SHA-256 of the file.
    """
    forms = {name: (value.dtype, tuple(value.shape), value.nbytes) for name, value in tensors()}
    widest_first = sorted(
        {dtype.itemsize for dtype, _, _ in forms.values()}, reverse=True
    )  # so that all values are aligned
    header: dict[str, Any] = {}
    end = 0
    for width in widest_first:
        for name, (dtype, shape, size) in forms.items():
            if dtype.itemsize == width:
                header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
                end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            file.write(block)
        for width in widest_first:
            for _, value in tensors():
                if value.dtype.itemsize == width and value.numel():
                    flat = value.detach().cpu().reshape(-1)
                    flat = flat if flat.stride(0) == 1 else flat.clone()
                    content = flat.view(torch.uint8).numpy().data
                    digest.update(content)
                    file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_states(path: Path, states: Mapping[int, ClientState]) -> str:
    """Write clients' states into one file, one after another, and return the file's SHA-256."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for client in sorted(states):
            yield from _pack(client, states[client])

    return write_tensors(path, tensors)


def _pack(client: int, state: ClientState) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(state.weights):  # sorted, so that the order in which they were read does not matter
        yield f"{client}/weights/{name}", state.weights[name]
    if state.bank is not None:
        yield f"{client}/bank/means", state.bank.means
        yield f"{client}/bank/counts", state.bank.counts
    extras = wire.encode(state.extras())
    if extras:
        yield f"{client}/beside/", torch.frombuffer(bytearray(extras), dtype=torch.uint8)


class StoredStates(Mapping[int, ClientState]):
    """The clients' states in a file, each read when it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[int, list[str]] = {}
        with self._open() as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                self._names.setdefault(int(key.partition("/")[0]), []).append(key)

    def _open(self) -> Any:
        try:
            return safe_open(self.path, "pt")
        except (OSError, SafetensorError) as error:
            raise ProtofedError(f"{self.path}: unreadable states of clients ({error})") from None

    def shapes(self, client: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a client's weights by name."""
        prefix = f"{client}/weights/"
        with self._open() as file:
            return {
                name.removeprefix(prefix): tuple(file.get_slice(name).get_shape())
                for name in self._names[client]
                if name.startswith(prefix)
            }

    def __getitem__(self, client: int) -> ClientState:
        parts: dict[str, dict[str, Tensor]] = {}
        with self._open() as file:
            for key in self._names[client]:
                _, part, name = key.split("/", 2)
                parts.setdefault(part, {})[name] = file.get_tensor(key).clone()  # a copy, which is aligned
        extras = parts["beside"][""].numpy().tobytes() if "beside" in parts else b""
        bank = PrototypeBank(parts["bank"]["means"], parts["bank"]["counts"]) if "bank" in parts else None
        return ClientState.of(parts.get("weights", {}), wire.decode(extras, f"{self.path}: client {client}"), bank)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._names))

    def __len__(self) -> int:
        return len(self._names)


def _check_states(states: StoredStates, federation: Federation) -> None:
    engine = federation.engine
    for client in states:
        if not 0 <= client < len(engine.owner):
            raise ProtofedError(f"{states.path}: client {client} is none of this run's {len(engine.owner)} clients")
        start = engine.starts[engine.owner[client]]
        for name, shape in states.shapes(client).items():
            if name not in start or tuple(start[name].shape) != shape:
                raise ProtofedError(f"{states.path}: weight {name!r} does not fit the model in the run's settings")
