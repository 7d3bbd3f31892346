"""A federation on disk: safetensors and JSON, written so that a kill at any moment leaves a whole checkpoint.

Each checkpoint is a folder of its own, `round-000042`; `latest.json` names the one to use and is replaced in one atomic
step after the folder is complete. Random streams are derived from seed, purpose and round, so there is no generator to save.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import wire
from ..errors import ProtofedError
from . import scale
from .local import ClientState
from .rounds import Federation

FORMAT = 1


def save(federation: Federation, folder: Path) -> None:
    """Write the federation's state after its current round. With ranks, all take part and the first one writes."""
    states = federation.engine.export()
    if scale.rank() != 0:
        return
    name = f"round-{federation.round:06d}"
    work = folder / f".{name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _write(work / "server.safetensors", wire.encode(federation.state))
    keep_weights = federation.method.private_model
    clients = {k: v for c, state in states.items() for k, v in _pack(c, state, keep_weights)}
    _write(work / "clients.safetensors", safetensors.torch.save(clients))
    _write(work / "state.json", json.dumps({"format": FORMAT, "round": federation.round}, indent=1).encode())
    final = folder / name
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    _sync(folder)
    write_atomically(folder / "latest.json", json.dumps({"checkpoint": name}).encode())
    for old in folder.glob("*round-*"):
        if old.name != name:
            shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Saved:
    round: int
    server: bytes
    clients: dict[int, ClientState]


def load(federation: Federation, folder: Path) -> None:
    """Restore the latest checkpoint into a new federation; where there is none yet, it starts from the beginning."""
    saved = scale.on_first(lambda: _read(federation, folder))
    if saved is not None:
        federation.round = saved.round
        federation.state = wire.decode(saved.server, f"{folder}: server state")
        federation.engine.restore(saved.clients)


def _read(federation: Federation, folder: Path) -> Saved | None:
    pointer = folder / "latest.json"
    if not pointer.exists():
        return None
    try:
        place = folder / str(json.loads(pointer.read_text())["checkpoint"])
        state = json.loads((place / "state.json").read_text())
        if state.get("format") != FORMAT:
            raise ProtofedError(f"{place}: checkpoint format {state.get('format')!r}; this version reads {FORMAT}")
        server = (place / "server.safetensors").read_bytes()
        wire.decode(server, str(place / "server.safetensors"))
        clients = _unpack(place / "clients.safetensors", federation)
        return Saved(int(state["round"]), server, clients)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ProtofedError(f"{folder}: unreadable checkpoint ({type(error).__name__}: {error})") from None


def _pack(client: int, state: ClientState, keep_weights: bool) -> Iterator[tuple[str, Tensor]]:
    parts = {"weights": state.weights if keep_weights else {}, "optimiser": state.optimiser}
    for part, tensors in parts.items():
        for name, value in tensors.items():
            yield f"{client}/{part}/{name}", value.contiguous()
    if not state.memory.empty:
        yield f"{client}/memory/", torch.frombuffer(bytearray(wire.encode(state.memory)), dtype=torch.uint8)


def _unpack(file: Path, federation: Federation) -> dict[int, ClientState]:
    engine = federation.engine
    clients: dict[int, ClientState] = {}
    weights: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, value in safetensors.torch.load_file(file).items():
        client, part, name = key.split("/", 2)
        start = engine.starts[engine.owner[int(client)]]
        state = clients.setdefault(int(client), ClientState({}))
        if part == "memory":
            state.memory = wire.decode(value.numpy().tobytes(), f"{file}: client {client}")
        elif part == "optimiser":
            state.optimiser[name] = value
        elif name not in start or start[name].shape != value.shape:
            raise ProtofedError(f"{file}: weight {name!r} does not fit the model in the run's settings")
        else:
            weights[int(client)][name] = value
    for number, state in clients.items():
        state.weights = weights[number] or engine.starts[engine.owner[number]]
    return clients


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    _write(temporary, content)
    temporary.replace(path)
    _sync(path.parent)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
