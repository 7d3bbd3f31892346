"""A federation on disk: safetensors and JSON, written so that a kill at any moment leaves a whole checkpoint.

Each checkpoint is a folder of its own, `round-000042`; `latest.json` names the one to use and is replaced in one atomic
step after the folder is complete. Random streams are derived from seed, purpose and round, so there is no generator to save.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from .. import wire
from ..bank import PrototypeBank
from ..errors import ProtofedError
from . import scale
from .local import ClientState
from .rounds import Federation

FORMAT = 2


def save(federation: Federation, folder: Path) -> None:
    """Write the federation's state after its current round. With ranks, all take part and the first one writes."""
    states = federation.engine.export()
    if scale.rank() != 0:
        return
    name = f"round-{federation.round:06d}"
    work = folder / f".{name}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    tree = packed(federation.state, "", tensors)
    _write(work / "server.safetensors", safetensors.torch.save(tensors))
    _write(work / "clients.safetensors", written_states(states))
    about = {"format": FORMAT, "round": federation.round, "server": tree}
    _write(work / "state.json", json.dumps(about, indent=1).encode())
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
    server: Any
    clients: dict[int, ClientState]


def load(federation: Federation, folder: Path) -> None:
    """Restore the latest checkpoint into a new federation; where there is none yet, it starts from the beginning."""
    saved = scale.on_first(lambda: _read(federation, folder))
    if saved is not None:
        federation.round = saved.round
        federation.state = saved.server
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
        tensors = _tensors(place / "server.safetensors")
        server = type(federation.state)(**unpacked(state["server"], tensors))
        clients = read_states(place / "clients.safetensors")
        _check_states(clients, federation, place / "clients.safetensors")
        return Saved(int(state["round"]), server, clients)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ProtofedError(f"{folder}: unreadable checkpoint ({type(error).__name__}: {error})") from None


def packed(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A server's state as JSON, with its tensors put aside by name."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
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


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except SafetensorError as error:
        raise ProtofedError(f"{file}: unreadable checkpoint ({error})") from None


def written_states(states: Mapping[int, ClientState]) -> bytes:
    """Clients' states as one file."""
    return safetensors.torch.save({k: v for client, state in states.items() for k, v in _pack(client, state)})


def _pack(client: int, state: ClientState) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.weights.items():
        yield f"{client}/weights/{name}", value.contiguous()
    if state.bank is not None:
        yield f"{client}/bank/means", state.bank.means.clone()
        yield f"{client}/bank/counts", state.bank.counts.clone()
    beside = wire.encode(state.beside_weights())
    if beside:
        yield f"{client}/beside/", torch.frombuffer(bytearray(beside), dtype=torch.uint8)


def read_states(file: Path) -> dict[int, ClientState]:
    """The states in a file, by client."""
    parts: dict[int, dict[str, dict[str, Tensor]]] = {}
    for key, value in _tensors(file).items():
        client, part, name = key.split("/", 2)
        parts.setdefault(int(client), {}).setdefault(part, {})[name] = value
    states = {}
    for number, own in parts.items():
        beside = own["beside"][""].numpy().tobytes() if "beside" in own else b""
        bank = PrototypeBank(own["bank"]["means"], own["bank"]["counts"]) if "bank" in own else None
        extra = wire.decode(beside, f"{file}: client {number}")
        states[number] = ClientState.of(own.get("weights", {}), extra, bank)
    return states


def _check_states(states: Mapping[int, ClientState], federation: Federation, file: Path) -> None:
    engine = federation.engine
    for client, state in states.items():
        start = engine.starts[engine.owner[client]]
        for name, value in state.weights.items():
            if name not in start or start[name].shape != value.shape:
                raise ProtofedError(f"{file}: weight {name!r} does not fit the model in the run's settings")


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
