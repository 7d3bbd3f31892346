"""A federation on disk: safetensors and JSON, written so that a kill at any moment leaves whole checkpoints.

Each checkpoint is a folder of its own, `round-000042`, that gets its name when everything in it is on the disk. Its
`manifest.json` holds a digest of every file and an account of what the run had written at that time. Two checkpoints
are kept: where the newer one is damaged, the older one is used. Random streams are derived from seed, purpose and
round, so no generator has to be saved.

`Checkpoints` writes while the next round trains, and writes only the states that have changed: a file of states that are
still current is linked from the checkpoint before last. The two checkpoints that are kept therefore share no file, and
damage to one does not reach the other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import disk, wire
from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..wire.frame import DTYPES
from . import scale
from .local import ClientState, Snapshot
from .rounds import Federation

log = logging.getLogger("protofed")
FORMAT = 4
READ = (3, 4)  # the formats that this version reads; the third has all states in one file
STARTING = 10.0  # seconds after which a thread has not been started and never will be
CHECKPOINTS_KEPT = 2  # where the newer one is damaged, the older one is used
MANIFEST, STATE, SERVER, CLIENTS = "manifest.json", "state.json", "server.safetensors", "clients.safetensors"
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
    with Checkpoints(folder) as checkpoints:
        checkpoints.begin(federation, written)


@dataclass(frozen=True)
class StatesFile:
    """A file with the states of some clients, as one checkpoint refers to it."""

    path: Path
    digest: str
    versions: Mapping[int, int]
    """Of each client whose state is read from this file, the version of the state."""
    sizes: Mapping[int, int]
    """The bytes of each state in the file, also of those that are outdated."""

    def current(self, versions: Mapping[int, int]) -> dict[int, int]:
        """The versions of those states that are still current."""
        return {client: version for client, version in self.versions.items() if versions.get(client) == version}

    def mostly(self, clients: Collection[int]) -> bool:
        """Whether the states of these clients are at least half of the file."""
        return 2 * sum(self.sizes[client] for client in clients) >= sum(self.sizes.values())


@dataclass(frozen=True)
class Moment:
    """A federation between two rounds: everything that a checkpoint of it holds."""

    round: int
    trees: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    states: Snapshot
    written: Mapping[str, Any]

    @classmethod
    def of(cls, federation: Federation, states: Snapshot, written: Mapping[str, Any] | None) -> Moment:
        """The moment that it is now. The server's tensors are copied, and clients' states are not."""
        tensors: dict[str, Tensor] = {}
        trees = {"server": packed(federation.state, "", tensors)}
        if federation.trusted is not None:
            trees["trusted"] = packed(federation.trusted, "trusted", tensors)
        copies = {name: value.clone() for name, value in tensors.items()}
        return cls(federation.round, trees, copies, states, written or {})


class Checkpoints:
    """The writer of a run's checkpoints, which writes in a thread of its own.

    A checkpoint must be written by the end of the round after it, because the round after that may overwrite states that
    it reads: `wait` is called after every round. An error of the thread is raised there, or at the end of the context.

    Example: `with Checkpoints(run / "checkpoint") as checkpoints: checkpoints.begin(federation)`
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()  # an interrupt may come before a thread that was made is started
        self._error: BaseException | None = None
        self._last: tuple[list[StatesFile], list[StatesFile]] = ([], [])  # of the checkpoint before last, and the last

    def begin(
        self,
        federation: Federation,
        written: Mapping[str, Any] | None = None,
        first: Callable[[], None] | None = None,
        whole: bool = False,
    ) -> None:
        """Begin to write the federation's state after its current round. With ranks, all take part and the first writes.

        Args:
            federation: The federation.
            written: An account of what the run has written beside its checkpoints.
            first: Called before anything is written: it makes durable what the account counts.
            whole: Whether all states are written, as those of a run's last checkpoint are.
        """
        self.wait()
        states = federation.engine.export()
        if scale.rank() != 0:
            return
        moment = Moment.of(federation, Snapshot.of(states), written)

        begun = self._begun = threading.Event()

        def work() -> None:
            begun.set()
            try:
                if first is not None:
                    first()
                with disk.writing(self.folder / f"round-{moment.round:06d}"):
                    self._write(moment, whole)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=work, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the checkpoint that was begun is on the disk, and raise the error where it could not be written."""
        if self._thread is not None and self._begun.wait(STARTING):
            self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except ProtofedError as failure:
            if error is None:
                raise
            log.warning("%s", failure)

    def _write(self, moment: Moment, whole: bool) -> None:
        """Write a checkpoint beside the others, name it, and remove those that are not kept."""
        name = f"round-{moment.round:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary, final = self.folder / f".{name}.tmp", self.folder / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        state = json.dumps({"round": moment.round, **moment.trees}, indent=1).encode()
        disk.write_durably(temporary / STATE, state)
        files = [] if whole else self._linked(moment.states.versions, temporary)
        linked = {client for file in files for client in file.versions}
        files.append(_written(temporary / CLIENTS, moment.states, linked))
        digests = {
            STATE: hashlib.sha256(state).hexdigest(),
            SERVER: write_tensors(temporary / SERVER, lambda: iter(moment.tensors.items())),
            **{file.path.name: file.digest for file in files},
        }
        manifest = {
            "format": FORMAT,
            "round": moment.round,
            "files": digests,
            "clients": {file.path.name: sorted(file.versions) for file in files},
            "written": moment.written,
        }
        disk.write_durably(temporary / MANIFEST, disk.sealed(manifest))
        disk.sync_folder(temporary)
        if final.exists():  # the round was repeated, with the same bits
            shutil.rmtree(final)
        temporary.rename(final)
        disk.sync_folder(self.folder)
        self._last = self._last[1], [replace(file, path=final / file.path.name) for file in files]
        for outdated in rounds_in(self.folder)[CHECKPOINTS_KEPT:]:
            shutil.rmtree(outdated, ignore_errors=True)

    def _linked(self, versions: Mapping[int, int], place: Path) -> list[StatesFile]:
        """Links to files of the checkpoint before last that are still current for at least their half."""
        links = []
        for file in self._last[0]:
            current = file.current(versions)
            name = file.path.name if file.path.name != CLIENTS else f"clients-{file.path.parent.name[6:]}.safetensors"
            if current and file.mostly(current):
                try:
                    os.link(file.path, place / name)
                except OSError:  # a file system without links, or the file is gone: the states are written again
                    continue
                links.append(replace(file, path=place / name, versions=current))
        return links


def _written(path: Path, states: Snapshot, but: Collection[int]) -> StatesFile:
    """Write the states of all clients but some."""
    sizes: dict[int, dict[str, int]] = {client: {} for client in sorted(states) if client not in but}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for client, by_name in sizes.items():
            for name, value in _pack(client, states[client]):
                by_name[name] = value.nbytes
                yield name, value

    digest = write_tensors(path, tensors)
    versions = {
        client: states.versions.get(client, 0) for client, by_name in sizes.items() if by_name
    }  # not empty ones
    return StatesFile(path, digest, versions, {client: sum(by_name.values()) for client, by_name in sizes.items()})


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
        if manifest.get("format") not in READ:
            raise ProtofedError(f"{path}: checkpoint format {manifest.get('format')!r}; this version reads {FORMAT}")
        for name, digest in manifest["files"].items():
            if disk.digest_of(path / name) != digest:
                raise ProtofedError(f"{path / name}: damaged (its content does not match the digest in {MANIFEST})")
        state = json.loads((path / STATE).read_bytes())
        if not int(state["round"]) == manifest["round"] == int(path.name.removeprefix("round-")):
            raise ProtofedError(f"{path}: a checkpoint of round {manifest['round']}, and its folder says otherwise")
        with safe_open(path / SERVER, "pt") as file:
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
        server = unpacked(state["server"], tensors, federation.state)
        trusted = unpacked(state["trusted"], tensors, federation.state) if "trusted" in state else None
        holders = manifest.get("clients", {CLIENTS: None})
        clients = StoredStates(path / CLIENTS, {path / name: holders[name] for name in sorted(holders)})
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
    with path.open("wb", buffering=0) as file:  # a process that is forked meanwhile has nothing to flush
        for block in (len(text).to_bytes(8, "little"), text):
            digest.update(block)
            _write_all(file, block)
        for width in widest_first:
            for _, value in tensors():
                if value.dtype.itemsize == width and value.numel():
                    flat = value.detach().cpu().reshape(-1)
                    flat = flat if flat.stride(0) == 1 else flat.clone()
                    content = flat.view(torch.uint8).numpy().data
                    digest.update(content)
                    _write_all(file, content)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _write_all(file: IO[bytes], content: Any) -> None:
    """Write all of a buffer, which the system may take in pieces."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


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
    """The clients' states in a file or in several, each read when it is needed."""

    def __init__(self, path: Path, holders: Mapping[Path, Collection[int] | None] | None = None) -> None:
        """
        Args:
            path: The file, which errors name.
            holders: Where there are several, the clients whose states are read from each file; None: all that are in it.
        """
        self.path = path
        self._names: dict[int, list[str]] = {}
        self._holders: dict[int, Path] = {}
        for holder, clients in (holders or {path: None}).items():
            chosen = None if clients is None else set(clients)
            with self._open(holder) as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    client = int(key.partition("/")[0])
                    if chosen is None or client in chosen:
                        self._names.setdefault(client, []).append(key)
                        self._holders[client] = holder
            if chosen is not None and not chosen <= self._names.keys():
                raise ProtofedError(f"{holder}: states of clients are missing")

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise ProtofedError(f"{path}: unreadable states of clients ({error})") from None

    def shapes(self, client: int) -> dict[str, tuple[int, ...]]:
        """The shapes of a client's weights by name."""
        prefix = f"{client}/weights/"
        with self._open(self._holders[client]) as file:
            return {
                name.removeprefix(prefix): tuple(file.get_slice(name).get_shape())
                for name in self._names[client]
                if name.startswith(prefix)
            }

    def __getitem__(self, client: int) -> ClientState:
        parts: dict[str, dict[str, Tensor]] = {}
        with self._open(self._holders[client]) as file:
            for key in self._names[client]:
                _, part, name = key.split("/", 2)
                parts.setdefault(part, {})[name] = file.get_tensor(key).clone()  # a copy, which is aligned
        extras = parts["beside"][""].numpy().tobytes() if "beside" in parts else b""
        bank = PrototypeBank(parts["bank"]["means"], parts["bank"]["counts"]) if "bank" in parts else None
        return ClientState.of(
            parts.get("weights", {}), wire.decode(extras, f"{self._holders[client]}: client {client}"), bank
        )

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
