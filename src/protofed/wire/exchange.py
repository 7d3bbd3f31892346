"""What a method exchanges: the parts that go down and those that come up, and what a message must therefore look like."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..bank import PrototypeBank
from .bundle import Bundle, WireError

SAMPLES = "samples"  # the number every upload carries: how many samples its client trained on
Size = int | str | None  # a number, "classes", "dim" or "clients" (the number of all clients), or None for any
PartKind = Literal["bank", "weights", "models", "tensor", "scalar"]


@dataclass(frozen=True)
class Part:
    """One named value of a message.

    A part that goes down is the server state's attribute of that name; with `each` the attribute is a function of the
    client and the round. An `optional` part may be absent from a message (the attribute is None). A bank of the `others`
    is a stack with a place for each client, of which each client is sent all but what is in its own place.
    """

    kind: PartKind
    name: str
    shape: tuple[Size, ...] = ()
    each: bool = False
    optional: bool = False
    others: bool = False
    prefix: str = ""  # of weights: only those whose names begin with it
    most: float | None = None
    """Of a number that comes up: it is from 0 to this. Of a bank: how often a sample may count; once where it is None."""

    def __str__(self) -> str:
        return self.name + (" for each client" if self.each else "")


def bank(name: str = "bank", shape: tuple[Size, ...] = ("classes", "dim"), **options: Any) -> Part:
    """A part that is a prototype bank, or a stack of them.

    Args:
        name: the attribute of the server's state, and the name in the bundle.
        shape: in numbers or in words: `"classes"`, `"dim"`, `"clients"` (their number), None for any size.
        **options: `each`, `optional` and `others` of `Part`.

    >>> bank("peers", ("clients", "classes", "dim"), others=True).name
    'peers'
    """
    return Part("bank", name, shape, **options)


def weights(**options: Any) -> Part:
    """A part that is a model's parameters and buffers.

    Args:
        **options: `each`, `optional` and `prefix` of `Part`; with a prefix only weights whose names begin with it travel.

    >>> str(weights(each=True))
    'weights for each client'
    """
    return Part("weights", "weights", **options)


def models(name: str = "models", **options: Any) -> Part:
    """A part that is the weights of further models of the client's architecture.

    Args:
        name: the attribute of the server's state.
        **options: `each`, `optional` and `prefix` of `Part`.
    """
    return Part("models", name, **options)


def array(name: str, *shape: Size, **options: Any) -> Part:
    """A part that is a tensor of any other kind.

    Args:
        name: the attribute of the server's state, and the name in the bundle.
        *shape: as in `bank`.
        **options: `each` and `optional` of `Part`.

    >>> array("soft_labels", "classes", "classes").shape
    ('classes', 'classes')
    """
    return Part("tensor", name, shape, **options)


def number(name: str, **options: Any) -> Part:
    """A part that is a single number.

    Args:
        name: the attribute of the server's state, and the name in the bundle.
        **options: `each`, `optional` and `most` of `Part`.

    >>> number("threshold").kind
    'scalar'
    """
    return Part("scalar", name, **options)


class Sender(Protocol):
    """A server's state as an exchange sees it."""

    def audience(self, client: int, round: int) -> Hashable:
        """Clients of one audience are sent the same message."""
        ...


@dataclass(frozen=True)
class Exchange:
    """What goes down, what comes up, and whether each client keeps a model of its own between rounds.

    Where nothing `travels`, messages stay at the client, in a control of a method, and their bytes are not counted.

    >>> fedavg = Exchange(down=(weights(),), up=(weights(),), keeps_model=False)
    >>> fedavg.prototypes, fedavg.asks_clients
    (False, True)
    """

    down: tuple[Part, ...] = ()
    up: tuple[Part, ...] = ()
    keeps_model: bool = True
    travels: bool = True

    @property
    def asks_clients(self) -> bool:
        """Whether clients take part in rounds: they return something, or train a model that they keep."""
        return bool(self.up) or self.keeps_model

    @property
    def prototypes(self) -> bool:
        """Whether clients are sent prototypes."""
        return any(part.kind == "bank" for part in self.down)

    def audience(self, state: Sender, client: int, round: int, names: Collection[str] | None = None) -> Hashable:
        """Who is sent the same message as a client.

        Args:
            state: the server's state.
            client: the client's number.
            round: the round, counted from 1.
            names: the parts that are sent; all of them where it is not given.

        Returns:
            a key that clients of one audience share. Where everything is broadcast it is one for all; otherwise the state
            says it.
        """
        return state.audience(client, round) if self.addressed(names) else None

    def addressed(self, names: Collection[str] | None = None) -> bool:
        """Whether some part of a message, of those that are sent, is not the same for all clients."""
        return any((part.each or part.others) and (names is None or part.name in names) for part in self.down)

    def message(self, state: Sender, client: int, round: int, names: Collection[str] | None = None) -> Bundle:
        """What a client is sent.

        Args:
            state: the server's state, which has an attribute for each part.
            client: the client's number.
            round: the round, counted from 1.
            names: the parts to send; all of them where it is not given.

        Returns:
            the bundle. Parts whose attribute is None are absent.
        """
        own = self.own_message(state, client, round, names)
        return own.with_others(self.common_message(state, names), client)

    def common_message(self, state: Sender, names: Collection[str] | None = None) -> Bundle:
        """The stacks of which each client is sent all but what is in its own place, as they are.

        Args:
            state: the server's state.
            names: the parts to send; all of them where it is not given.
        """
        wanted = (part for part in self.down if part.others and (names is None or part.name in names))
        banks = {part.name: getattr(state, part.name) for part in wanted}
        return Bundle(banks={name: stack for name, stack in banks.items() if stack is not None})

    def own_message(self, state: Sender, client: int, round: int, names: Collection[str] | None = None) -> Bundle:
        """What a client is sent beside the `common_message`; the arguments are those of `message`."""
        values: dict[str, Any] = {}
        further: dict[str, dict[str, Any]] = {"banks": {}, "tensors": {}, "scalars": {}}
        for part in self.down:
            if part.others or (names is not None and part.name not in names):
                continue
            value = getattr(state, part.name)
            value = value(client, round) if part.each else value
            if value is None:
                continue
            if part.kind in ("weights", "models") or part.name == "bank":
                values["models" if part.kind == "models" else part.name] = value
            else:
                further[f"{part.kind}s"][part.name] = float(value) if part.kind == "scalar" else value
        values |= further
        return Bundle(**values)

    def expected(
        self,
        direction: Literal["down", "up"],
        sizes: Mapping[str, int | None],
        template: Mapping[str, Tensor],
    ) -> Expected:
        """What a message of one direction must look like.

        Args:
            direction: `"down"` or `"up"`.
            sizes: the numbers that the words in shapes stand for.
            template: a model of the client's architecture.

        Returns:
            the expectation, which `decode` checks messages against.
        """
        parts = self.up if direction == "up" else self.down
        if direction == "up" and parts:
            parts = (*parts, number(SAMPLES))
        shapes = {p.name: tuple(sizes[n] if isinstance(n, str) else n for n in p.shape) for p in parts}
        return Expected({p.name: p for p in parts}, shapes, template)

    def zeros(self, sizes: Mapping[str, int | None], template: Mapping[str, Tensor]) -> Bundle:
        """An upload of zeros with every part that may come up, for the shapes of what is made of uploads.

        Args:
            sizes: the numbers that the words in shapes stand for.
            template: a model of the client's architecture.

        Returns:
            the bundle; parts that are tensors or further models are left out.
        """
        banks, weights, scalars = {}, {}, {SAMPLES: 0.0}
        for part in self.up:
            if part.kind == "bank":
                shape = [sizes[n] if isinstance(n, str) else n for n in part.shape]
                means = torch.zeros([n or 0 for n in shape])
                banks["" if part.name == "bank" else part.name] = PrototypeBank(
                    means, means.new_zeros(means.shape[:-1])
                )
            elif part.kind == "weights":
                weights = {n: torch.zeros_like(v) for n, v in template.items() if n.startswith(part.prefix)}
            elif part.kind == "scalar":
                scalars[part.name] = 0.0
        return Bundle(banks.pop("", None), banks, weights, {}, scalars)


@dataclass(frozen=True)
class Expected:
    """What a message must look like to be accepted.

    `shapes` are those of banks and tensors, None standing for any size. `template` is a model: names, shapes and dtypes
    of weights count, values do not, so it may lie on the meta device.
    """

    parts: Mapping[str, Part]
    shapes: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    template: Mapping[str, Tensor] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    partial: bool = False  # parts may be missing: what is sent for an evaluation is what a prediction needs
    shapes_only: bool = False  # the rest is checked later, once filters have restored the message

    def check(self, bundle: Bundle, source: str) -> None:
        """Check names, shapes, dtypes, finite values, and that counts are not negative.

        Args:
            bundle: what was sent.
            source: the sender's name.

        Raises:
            WireError: the error names the sender and the part.
        """
        if self.shapes_only:
            return
        if "bank" in bundle.banks:
            raise WireError(f"{source}: sent 'bank', which this method does not exchange, among further banks")
        parts = _parts(bundle)
        for kind, name in parts:
            self._allow(kind, name, source)
        for name, part in self.parts.items():
            if not part.optional and not self.partial and (part.kind, name) not in parts:
                raise WireError(f"{source}: sent no {name}, which this method needs")
        for name, bank in bundle.all_banks().items():
            self._check_bank(name or "bank", bank, source)
        if bundle.weights:
            self._check_weights("weight", bundle.weights, self.parts["weights"], source)
        for model, model_weights in bundle.models.items():
            self._check_weights(f"model {model!r}: weight", model_weights, self.parts["models"], source)
        for name, value in bundle.tensors.items():
            self._check_form(f"{source}: tensor {name!r}", value, self.shapes[name], self.dtype)
        for name, number in bundle.scalars.items():
            if not math.isfinite(number):
                raise WireError(f"{source}: scalar {name!r} is {number}; expected a finite number")
            if name == SAMPLES and number < 0:
                raise WireError(f"{source}: it claims to have trained on {number:g} samples")

    def _check_bank(self, name: str, bank: PrototypeBank, source: str) -> None:
        what = _bank_name(name, source)
        self.check_shape(name, bank.shape, source)
        means, counts = bank.held
        if counts.shape != means.shape[:-1]:
            raise WireError(f"{what} has counts of shape {_list(counts.shape)} for {_list(means.shape)}")
        if means.dtype != self.dtype or not counts.is_floating_point():
            raise WireError(f"{what} is {means.dtype} with counts {counts.dtype}; expected {self.dtype} and floating")
        _check_finite(what, means)
        _check_finite(f"{what} counts", counts)
        if bool((counts < 0).any()):
            raise WireError(f"{what} has a negative count")

    def _check_weights(self, kind: str, values: Mapping[str, Tensor], part: Part, source: str) -> None:
        template = {n: v for n, v in self.template.items() if n.startswith(part.prefix)}
        for name in sorted(template.keys() ^ values.keys()):
            state = "is missing" if name in template else "was not asked for"
            raise WireError(f"{source}: {kind} {name!r} {state}")
        for name, value in values.items():
            like = template[name]
            self._check_form(f"{source}: {kind} {name!r}", value, tuple(like.shape), like.dtype)

    def _check_form(self, what: str, value: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> None:
        if not _fits(value.shape, shape):
            raise WireError(f"{what} has shape {_list(value.shape)}; expected {_list(shape)}")
        if value.dtype != dtype:
            raise WireError(f"{what} is {value.dtype}; expected {dtype}")
        _check_finite(what, value)

    def check_shape(self, name: str, shape: Sequence[int], source: str) -> None:
        """Check the shape of one bank, before or after memory is taken for it."""
        name = name or "bank"
        self._allow("bank", name, source)
        wanted = self.shapes[name]
        if not _fits(shape, wanted):
            raise WireError(f"{_bank_name(name, source)} has shape {_list(shape)}; expected {_list(wanted)}")

    def _allow(self, kind: str, name: str, source: str) -> None:
        part = self.parts.get(name)
        if part is None or part.kind != kind:
            raise WireError(f"{source}: sent {name!r}, which this method does not exchange")


def is_finite(value: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    Args:
        value: any tensor.

    >>> is_finite(torch.tensor([1.0, float("inf")]))
    False
    """
    # a finite sum is cheap proof; an infinite one may also come of large values
    return not value.is_floating_point() or math.isfinite(float(value.sum())) or bool(torch.isfinite(value).all())


def _parts(bundle: Bundle) -> set[tuple[str, str]]:
    """The kind and the name of everything in a bundle."""
    return {
        *(("bank", name or "bank") for name in bundle.all_banks()),
        *([("weights", "weights")] if bundle.weights else []),
        *([("models", "models")] if bundle.models else []),
        *(("tensor", name) for name in bundle.tensors),
        *(("scalar", name) for name in bundle.scalars),
    }


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def _bank_name(name: str, source: str) -> str:
    return f"{source}: bank" + ("" if name == "bank" else f" {name!r}")


def _list(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if n is None else str(n) for n in shape)}]"


def _check_finite(what: str, value: Tensor) -> None:
    if not is_finite(value):
        raise WireError(f"{what} holds NaN or infinity")
