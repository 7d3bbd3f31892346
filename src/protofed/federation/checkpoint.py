"""A federation on disk: safetensors and JSON, written so that a kill at any moment leaves whole checkpoints.

Each checkpoint is a folder of its own, `round-000042`, that gets its name when everything in it is on the disk. Its
`manifest.json` holds a digest of every file and what the run had written when it was made. Two are kept: where the newer
one is damaged, the older one serves. Random streams are derived from seed, purpose and round, so there is no generator to
save.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
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
KEPT = 2  # checkpoints: a damaged one does not mean starting again
MANIFEST = "manifest.json"
NamedTensors = Callable[[], Iterator[tuple[str, Tensor]]]
"""Tensors by name, one after another, as often as they are asked for: never all of them in memory a second time."""
Fits = Callable[[int, Mapping[str, Any]], None]
"""Raises a `ProtofedError` where what a run had written at a round does not fit that round's checkpoint any more."""


def save(federation: Federation, folder: Path, written: Mapping[str, Any] | None = None) -> None:
    """Write the federation's state after its current round. With ranks, all take part and the first one writes.

    Args:
        federation: What is saved: its round, the server's state, and the states of the clients that keep something.
        folder: Where the run's checkpoints are.
        written: What the run has written beside its checkpoints so far; `load` gives it back to be checked.
    """
    states = federation.engine.export()
    if scale.rank() != 0:
        return
    name = f"round-{federation.round:06d}"
    with disk.writing(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        work = folder / f".{name}.tmp"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        tensors: dict[str, Tensor] = {}
        tree = packed(federation.state, "", tensors)
        state = json.dumps({"round": federation.round, "server": tree}, indent=1).encode()
        disk.write_durably(work / "state.json", state)
        digests = {
            "state.json": hashlib.sha256(state).hexdigest(),
            "server.safetensors": write_tensors(work / "server.safetensors", lambda: iter(tensors.items())),
            "clients.safetensors": write_states(work / "clients.safetensors", states),
        }
        about = {"format": FORMAT, "round": federation.round, "files": digests, "written": written or {}}
        disk.write_durably(work / MANIFEST, disk.sealed(about))
        disk.sync_folder(work)
        final = folder / name
        if final.exists():  # a repeated round: the same bits
            shutil.rmtree(final)
        work.rename(final)
        disk.sync_folder(folder)
        for old in rounds_in(folder)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)


def rounds_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.glob("round-*") if p.is_dir()), key=lambda p: p.name, reverse=True)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been read and checked. `clients` reads each client's state when it is asked for."""

    round: int
    server: Any
    clients: Mapping[int, ClientState]
    written: Mapping[str, Any]


def load(federation: Federation, folder: Path, fits: Fits | None = None) -> Saved | None:
    """Restore the newest checkpoint that is whole into a new federation.

    Args:
        federation: A federation before its first round, with the settings that the checkpoint was written with.
        folder: Where the run's checkpoints are.
        fits: Refuses a checkpoint that the rest of the run folder does not fit any more.

    Returns:
        What was restored, or None where there is no checkpoint yet: the federation then starts from the beginning.
    """
    saved = scale.on_first(lambda: _newest(federation, folder, fits))
    if saved is not None:
        federation.round = saved.round
        federation.state = saved.server
        federation.engine.restore(saved.clients)
    return saved


def _newest(federation: Federation, folder: Path, fits: Fits | None) -> Saved | None:
    problems = []
    for place in rounds_in(folder):
        try:
            saved = _read(federation, place)
            if fits is not None:
                fits(saved.round, saved.written)
        except ProtofedError as error:
            problems.append(error)
            continue
        for problem in problems:
            log.warning("%s; going on from the checkpoint before, of round %d", problem, saved.round)
        if scale.asked_for():  # the other ranks cannot read this host's files
            saved = Saved(saved.round, saved.server, dict(saved.clients), saved.written)
        return saved
    if problems:
        more = f" (and {len(problems) - 1} older)" if len(problems) > 1 else ""
        raise ProtofedError(f"{problems[0]}{more}; there is no whole checkpoint to go on from: start the run again")
    return None


def _read(federation: Federation, place: Path) -> Saved:
    """One checkpoint, after every file in it was compared with its digest."""
    manifest = place / MANIFEST
    try:
        about = disk.opened(manifest.read_bytes(), manifest)
        if about.get("format") != FORMAT:
            raise ProtofedError(f"{place}: checkpoint format {about.get('format')!r}; this version reads {FORMAT}")
        for name, digest in about["files"].items():
            if disk.digest_of(place / name) != digest:
                raise ProtofedError(f"{place / name}: damaged (its content does not match the digest in {MANIFEST})")
        state = json.loads((place / "state.json").read_bytes())
        if not int(state["round"]) == about["round"] == int(place.name.removeprefix("round-")):
            raise ProtofedError(f"{place}: a checkpoint of round {about['round']}, and its folder says otherwise")
        with safe_open(place / "server.safetensors", "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        server = type(federation.state)(**unpacked(state["server"], tensors))
        clients = StoredStates(place / "clients.safetensors")
        _check_states(clients, federation)
        return Saved(about["round"], server, clients, about["written"])
    except FileNotFoundError as error:
        raise ProtofedError(f"{error.filename}: this file of the checkpoint is missing") from None
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ProtofedError(f"{place}: unreadable checkpoint ({type(error).__name__}: {error})") from None


def packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A server's state as JSON, with its tensors put aside by name."""
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


def unpacked(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `packed` made JSON of; of the state itself, its fields by name."""
    if isinstance(tree, list):
        return tuple(unpacked(v, tensors) for v in tree)
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$bank" in tree:
        return PrototypeBank(*(unpacked(v, tensors) for v in tree["$bank"]))
    if "$map" in tree:
        return {key: unpacked(v, tensors) for key, v in tree["$map"]}
    return {name: unpacked(v, tensors) for name, v in tree.items()}


def write_tensors(path: Path, tensors: NamedTensors) -> str:
    """Write a safetensors file tensor by tensor, and wait until the disk has it.

    Args:
        path: The file.
        tensors: Gives the tensors by name; it is called twice, for the header and for the content.

    Returns:
        The SHA-256 of the file.
    """
    forms = {name: (value.dtype, tuple(value.shape), value.nbytes) for name, value in tensors()}
    widest_first = sorted({dtype.itemsize for dtype, _, _ in forms.values()}, reverse=True)  # so that all is aligned
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
    """Write clients' states into one file, one after another; the result is the file's SHA-256."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for client in sorted(states):
            yield from _pack(client, states[client])

    return write_tensors(path, tensors)


def _pack(client: int, state: ClientState) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(state.weights):  # in one order, whatever the order they were read in
        yield f"{client}/weights/{name}", state.weights[name]
    if state.bank is not None:
        yield f"{client}/bank/means", state.bank.means
        yield f"{client}/bank/counts", state.bank.counts
    beside = wire.encode(state.beside_weights())
    if beside:
        yield f"{client}/beside/", torch.frombuffer(bytearray(beside), dtype=torch.uint8)


class StoredStates(Mapping[int, ClientState]):
    """The clients' states in a file, each read when it is asked for."""

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
                parts.setdefault(part, {})[name] = file.get_tensor(key).clone()  # aligned, as fresh memory is
        beside = parts["beside"][""].numpy().tobytes() if "beside" in parts else b""
        bank = PrototypeBank(parts["bank"]["means"], parts["bank"]["counts"]) if "bank" in parts else None
        return ClientState.of(parts.get("weights", {}), wire.decode(beside, f"{self.path}: client {client}"), bank)

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
