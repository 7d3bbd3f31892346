"""Memory that forked processes share: the clients' states, and messages on their way."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .. import wire
from ..bank import LARGE, PrototypeBank, SparseBank
from ..wire import Bundle, Message
from .local import ClientState, Snapshot

ARENA = 1 << 30  # bytes reserved for messages, per direction and worker; only written pages take memory
PIPE = 1 << 16  # a message of fewer bytes is sent through the pipe itself


def reserve(size: int) -> mmap.mmap:
    """Memory that forked processes share. A page takes memory only when it is written."""
    lazily = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    return mmap.mmap(-1, max(1, size), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | lazily)


class SharedStates(MutableMapping[int, ClientState]):
    """The clients' states in shared memory: two slots for each model and its prototypes, one of which is current.

    Only written pages take memory, so a client that never took part costs nothing.
    """

    def __init__(
        self, starts: Sequence[Mapping[str, Tensor]], owner: Sequence[int], with_weights: bool, bank: tuple[int, int]
    ) -> None:
        """
        Args:
            starts: The initial weights of each architecture.
            owner: The architecture of each client.
            with_weights: Whether clients keep a model.
            bank: The number of classes and the dimension of the clients' prototypes.
        """
        self.starts, self.owner, self.with_weights, self.bank_shape = starts, owner, with_weights, bank
        bank_pieces = [bank[0] * bank[1], bank[0]]  # means and counts
        self.large = bank_pieces[0] >= LARGE
        self.pieces = [[*(value.numel() for value in start.values()), *bank_pieces] for start in starts]
        self.sizes = [sum(pieces) for pieces in self.pieces]
        self.begin = [0, *accumulate(2 * self.sizes[architecture] for architecture in owner)]
        self.memory = reserve(self.begin[-1] * 4 if with_weights else 1)
        self.current = mmap.mmap(
            -1, len(owner)
        )  # per client: 0 where it has no state yet, otherwise the current slot, 1 or 2
        self.banked = mmap.mmap(-1, 3 * len(owner))  # per client and slot: 1 where the slot holds prototypes too
        self.extras: dict[int, bytes] = {}  # encoded optimiser state and memory, which are sent with the job
        self.pending: dict[int, int] = {}
        self.versions: dict[int, int] = {}
        """How often each client's state has been replaced."""

    def _slot(self, client: int, slot: int) -> Tensor:
        """The values of a client in one slot: those of its model, then those of its prototypes."""
        size = self.sizes[self.owner[client]]
        offset = (self.begin[client] + (slot - 1) * size) * 4
        return torch.frombuffer(self.memory, dtype=torch.float32, count=size, offset=offset)

    def __getitem__(self, client: int) -> ClientState:
        return self.at(client, self.current[client], self.extras.get(client))

    def at(self, client: int, slot: int, encoded: bytes | None) -> ClientState:
        """The state of a client in one of its slots, with its optimiser's state and memory."""
        if slot == 0:
            raise KeyError(client)
        extra = _decoded(client, encoded)
        if not self.with_weights:
            return ClientState.of({}, extra, None)
        weights, means, counts = self._model(client, slot)
        if not self.banked[3 * client + slot]:
            return ClientState.of(weights, extra, None)
        # copies, because the last bits of a product depend on the alignment of its operands
        if self.large:
            rows = counts.nonzero().squeeze(1)
            bank: PrototypeBank = SparseBank(rows, means.view(self.bank_shape)[rows], counts[rows], self.bank_shape[0])
        else:
            bank = PrototypeBank(means.view(self.bank_shape).clone(), counts.clone())
        return ClientState.of(weights, extra, bank)

    def _model(self, client: int, slot: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """The model of a client in one slot, and the means and counts of its prototypes: views."""
        architecture = self.owner[client]
        *pieces, means, counts = self._slot(client, slot).split(self.pieces[architecture])
        start = self.starts[architecture].items()
        return {name: p.view(value.shape) for (name, value), p in zip(start, pieces, strict=True)}, means, counts

    def for_training(self, clients: Sequence[int]) -> dict[int, ClientState]:
        """The states of those of some clients of one architecture that have one. Prototypes, which training does not read,
        are left out."""
        held = [client for client in clients if self.current[client]]
        models = self._weights(held) if held and self.with_weights else [{} for _ in held]
        extras = [_decoded(client, self.extras.get(client)) for client in held]
        return {c: ClientState.of(w, extra, None) for c, w, extra in zip(held, models, extras, strict=True)}

    def _weights(self, clients: Sequence[int]) -> list[dict[str, Tensor]]:
        """The models of some clients of one architecture, which all have one."""
        if len(clients) == 1:  # which need not be copied
            return [self._model(clients[0], self.current[clients[0]])[0]]
        models = self.stacked(clients, self.starts[self.owner[clients[0]]])
        return [
            dict(zip(models, values, strict=True)) for values in zip(*map(Tensor.unbind, models.values()), strict=True)
        ]

    def holders(self, clients: Iterable[int]) -> frozenset[int]:
        """Those of the clients that have a state."""
        slots = self.current[:]
        return frozenset([client for client in clients if slots[client]])

    def stacked(self, clients: Sequence[int], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The models of some clients of one architecture with a leading axis; `start` for those that have none."""
        architecture = self.owner[clients[0]]
        slots = [self.current[client] for client in clients]
        table, rows = self._table(clients, [slot or 1 for slot in slots])
        *pieces, _, _ = table.split(self.pieces[architecture], dim=1)
        # copies, because the last bits of a product depend on the alignment of its operands
        shapes = {name: (len(clients), *value.shape) for name, value in self.starts[architecture].items()}
        models = {n: p.index_select(0, rows).view(shape) for (n, shape), p in zip(shapes.items(), pieces, strict=True)}
        if not all(slots):
            without = [k for k, slot in enumerate(slots) if not slot]
            for name, values in models.items():
                values[without] = start[name]
        return models

    def _table(self, clients: Sequence[int], slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A tensor of which some rows have the values of clients of one architecture in their slots, and these rows. Where
        no client of another architecture lies between them, it is a view."""
        size = self.sizes[self.owner[clients[0]]]
        places = [self.begin[client] + (slot - 1) * size for client, slot in zip(clients, slots, strict=True)]
        first = min(places)
        if any((place - first) % size for place in places):
            members = zip(clients, slots, strict=True)
            return torch.stack([self._slot(*member) for member in members]), torch.arange(len(clients))
        count = max(places) + size - first
        memory = torch.frombuffer(self.memory, dtype=torch.float32, count=count, offset=4 * first)
        return memory.view(-1, size), torch.tensor([(place - first) // size for place in places])

    def __setitem__(self, client: int, state: ClientState) -> None:
        """Write into the slot that is not current; `commit` makes it the current one."""
        slot = 2 if self.current[client] == 1 else 1
        if self.with_weights:
            values = [state.weights[name].reshape(-1) for name in self.starts[self.owner[client]]]
            size = self.sizes[self.owner[client]]
            if state.bank is None or self.large:
                size -= sum(self.pieces[self.owner[client]][-2:])
            else:
                values += [state.bank.means.reshape(-1), state.bank.counts]
            torch.cat(values, out=self._slot(client, slot)[:size])
            if state.bank is not None and self.large:
                means, counts = self._slot(client, slot)[size:].split(self.pieces[self.owner[client]][-2:])
                counts.copy_(state.bank.counts)  # rows that it does not know are neither written nor read
                means.view(self.bank_shape).index_copy_(0, counts.nonzero().squeeze(1), state.bank.known_means)
            self.banked[3 * client + slot] = state.bank is not None
        self._keep(client, wire.encode(state.extras()))
        self.pending[client] = slot

    def _keep(self, client: int, extra: bytes) -> None:
        if extra:
            self.extras[client] = extra
        else:
            self.extras.pop(client, None)

    def commit(self, client: int, slot: int, extra: bytes) -> None:
        """Make a slot the current one of a client."""
        self.current[client] = slot
        self._keep(client, extra)
        self.versions[client] = self.versions.get(client, 0) + 1

    def snapshot(self) -> Snapshot:
        """The states as they are now. Nothing is copied: the next round writes into the slots that are not current."""
        return Snapshot(FixedSlots(self), self.versions)

    def __delitem__(self, client: int) -> None:
        self.current[client] = 0
        self.extras.pop(client, None)

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int) and self.current[client] != 0

    def __iter__(self) -> Iterator[int]:
        return (client for client in range(len(self.current)) if self.current[client])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _decoded(client: int, encoded: bytes | None) -> Bundle:
    """A client's optimiser state and memory."""
    return Bundle() if encoded is None else wire.decode(encoded, f"client {client}'s state")


class FixedSlots(Mapping[int, ClientState]):
    """The states in the slots that were current at one moment; they are valid until the next round has ended."""

    def __init__(self, states: SharedStates) -> None:
        self._states, self._slots, self._extras = states, states.current[:], dict(states.extras)

    def __getitem__(self, client: int) -> ClientState:
        return self._states.at(client, self._slots[client], self._extras.get(client))

    def __iter__(self) -> Iterator[int]:
        return (client for client, slot in enumerate(self._slots) if slot)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Arena:
    """Shared memory for messages: one process writes, then the other one reads."""

    def __init__(self, size: int = ARENA) -> None:
        self.memory, self.size, self.used = reserve(size), size, 0

    def put(self, message: Message) -> tuple[int, int] | Message:
        """Write a message and return its offset and length, or the message itself where it is small or does not fit."""
        if len(message) < PIPE or self.used + len(message) > self.size:
            return message
        begin = self.used
        self.memory[begin : begin + len(message)] = message
        self.used += len(message)
        return begin, len(message)

    def get(self, location: tuple[int, int] | Message) -> bytes:
        """The message at a location, as bytes."""
        return self.memory[location[0] : location[0] + location[1]] if isinstance(location, tuple) else bytes(location)

    def take(self, location: tuple[int, int] | Message) -> Message:
        """The message at a location as a buffer of its own, in which it is decoded without another copy."""
        if not isinstance(location, tuple):
            return location
        with memoryview(self.memory) as whole:
            return bytearray(whole[location[0] : location[0] + location[1]])
