"""SGD, Adam and RMSprop as torch defines them, for one client or for a stack of clients.

torch's own optimisers have no client axis: clients of a stack may be at different steps, and some may have finished.
The plain loop and the stack both use this one, which is tested against torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ProtofedError
from ..models.precision import Precision
from ..schedules import cosine_decay

Rows = slice | Tensor | None  # the clients of a stack; None where parameters are not stacked
Products = Mapping[str, Sequence[tuple[Tensor, Tensor]]]  # factors g and x of gradients Σ gᵀ x by parameter
NO_PRODUCTS: Products = MappingProxyType({})
PRODUCT_ROWS = 32


@dataclass(frozen=True)
class RunLength:
    """How many rounds a run has."""

    rounds: Annotated[int, Field(ge=1, description="communication rounds")] = 100


@dataclass(frozen=True)
class LocalSettings(RunLength):
    """How a client trains, whatever the method. The learning rate may fall over the rounds of the run."""

    epochs: Annotated[int, Field(ge=1, description="local epochs a round")] = 1
    batch: Annotated[int, Field(ge=1, description="local batch size")] = 8
    optimiser: Annotated[Literal["sgd", "adam", "rmsprop"], Field(description="sgd, adam or rmsprop")] = "sgd"
    lr: Annotated[float, Field(gt=0, description="learning rate")] = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1, description="of SGD and RMSprop")] = 0.5
    weight_decay: Annotated[float, Field(ge=0, description="L2 penalty")] = 0.0
    nesterov: Annotated[bool, Field(description="Nesterov's momentum, with SGD")] = False
    lr_schedule: Annotated[
        Literal["constant", "cosine"],
        Field(description="constant, or cosine: the learning rate falls to 0 over the rounds"),
    ] = "constant"
    smoothing: Annotated[
        float,
        Field(ge=0, lt=1, description="ρ of RMSprop's mean of squares: 0.99 as torch has it, 0.9 as Keras has it"),
    ] = 0.99
    clip: Annotated[float, Field(ge=0, description="largest norm of a client's gradient; 0: any")] = 0.0
    keep_optimiser: Annotated[bool, Field(description="keep the optimiser's state between rounds")] = False
    shared_optimiser: Annotated[
        bool, Field(description="pass one optimiser state on from client to client, as some published simulations do")
    ] = False

    gradients: Annotated[
        bool, Field(description="record how large clients' gradients are, of the loss and of each of its terms")
    ] = False
    precision: Annotated[
        Precision,
        Field(description="float32, or bf16: networks compute in bfloat16, and weights and prototypes stay float32"),
    ] = "float32"

    def __post_init__(self) -> None:
        if self.nesterov and (self.optimiser != "sgd" or not self.momentum):
            raise ProtofedError(
                "nesterov=true needs optimiser=sgd and momentum above 0, "
                f"got optimiser={self.optimiser} and momentum={self.momentum:g}"
            )
        if self.shared_optimiser and self.keep_optimiser:
            raise ProtofedError("keep_optimiser=true and shared_optimiser=true: clients have their own, or share one")

    @property
    def exports_optimiser(self) -> bool:
        """Whether the optimiser's state outlives a client's training, for this client or for the next one."""
        return self.keep_optimiser or self.shared_optimiser

    def lr_at(self, round: int) -> float:
        """The learning rate of a round. Tuning before an evaluation is round 0 and has the rate of the first round."""
        return self.lr * cosine_decay(max(round, 1), self.rounds) if self.lr_schedule == "cosine" else self.lr


def _same_memory_order(*lists: Sequence[Tensor]) -> bool:
    """Whether the tensors of all lists lie in memory in the same order and without gaps, as the fused update requires."""
    orders = ([_order(t.shape, t.stride()) for t in tensors] for tensors in lists)
    reference, *other_orders = orders
    return (
        hasattr(torch, "_fused_sgd_")
        and all(order is not None for order in reference)
        and all(order == reference for order in other_orders)
        and all(a.dtype == b.dtype for a, b in zip(*lists[:2], strict=True))
    )


@lru_cache(maxsize=4096)
def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Stride and size of each axis with more than one entry; None where the tensor has gaps or overlaps itself."""
    axes = [(step, size) for step, size in zip(stride, shape, strict=True) if size > 1]
    reached = 1
    for step, size in sorted(axes):
        if step != reached:
            return None
        reached *= size
    return tuple(axes)


def _in_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Dense tensors as one-dimensional views of their memory, because the fused update copies tensors of other strides."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def _clipped(grads: list[Tensor], max_norm: float, stacked: bool) -> list[Tensor]:
    """Gradients whose norm over all parameters is at most `max_norm`, as torch's `clip_grad_norm_` makes them. In a
    stack, each client is clipped by its own norm."""
    norms = [torch.linalg.vector_norm(g.reshape(len(g) if stacked else 1, -1), dim=1) for g in grads]
    factor = (max_norm / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1)
    return [g * (factor.view(-1, *[1] * (g.ndim - 1)) if stacked else factor[0]) for g in grads]


class Optimiser:
    """Updates `params` in place.

    `saved` is what `export` returned before: one mapping, or one for each client of a stack.
    """

    def __init__(
        self,
        local: LocalSettings,
        params: Mapping[str, Tensor],
        saved: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = (),
        round: int = 1,
    ) -> None:
        self.lr = local.lr_at(round)
        self.local, self.params = local, {name: p.detach() for name, p in params.items()}
        names = {
            "sgd": ["momentum_buffer"] if local.momentum else [],
            "adam": ["exp_avg", "exp_avg_sq"],
            "rmsprop": ["square_avg"] + (["momentum_buffer"] if local.momentum else []),
        }[local.optimiser]
        self.state = {buffer: {n: torch.zeros_like(p) for n, p in self.params.items()} for buffer in names}
        param = next(iter(self.params.values()))
        single = isinstance(saved, Mapping)
        self.steps = torch.zeros(() if single else len(param), device=param.device)  # for Adam's bias correction
        for k, tensors in enumerate([saved] if isinstance(saved, Mapping) else saved):
            row = ... if single else k
            for key, value in tensors.items():
                index, _, buffer = key.partition(".")
                if buffer == "step":
                    self.steps[row] = value
                else:
                    self.state[buffer][list(self.params)[int(index)]][row] = value

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rows: Rows = None, products: Products = NO_PRODUCTS) -> None:
        """Take one step.

        Args:
            grads: The gradients, in the order of the parameters.
            rows: Which clients of a stack take the step; None where the parameters are not stacked.
            products: Gradients that are products, by the name of their parameter, which has none in `grads`.
        """
        local, selected = self.local, ... if rows is None else rows
        self.steps[selected] += 1
        names = [name for name in self.params if name not in products]
        p, g = [self.params[name][selected] for name in names], list(grads)
        for name, factors in products.items():
            self._add_product(name, factors)
        if local.clip:
            g = _clipped(g, local.clip, stacked=rows is not None)
        if local.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=local.weight_decay))
        state = {buffer: [tensors[name][selected] for name in names] for buffer, tensors in self.state.items()}
        if local.optimiser == "sgd":
            if local.momentum and _same_memory_order(p, g, state["momentum_buffer"]):
                torch._fused_sgd_(  # one pass over memory, not three
                    _in_order(p),
                    _in_order(g),
                    _in_order(state["momentum_buffer"]),
                    weight_decay=0.0,
                    momentum=local.momentum,
                    lr=self.lr,
                    dampening=0.0,
                    nesterov=local.nesterov,
                    maximize=False,
                    is_first_step=False,
                )
            elif local.momentum:
                torch._foreach_mul_(state["momentum_buffer"], local.momentum)
                torch._foreach_add_(state["momentum_buffer"], g)
                if local.nesterov:
                    torch._foreach_add_(p, g, alpha=-self.lr)
                ahead = local.momentum if local.nesterov else 1.0
                torch._foreach_add_(p, state["momentum_buffer"], alpha=-self.lr * ahead)
            else:
                torch._foreach_add_(p, g, alpha=-self.lr)
        elif local.optimiser == "adam":
            self._adam(p, g, state["exp_avg"], state["exp_avg_sq"], self.steps[selected])
        else:
            self._rmsprop(p, g, state["square_avg"], state.get("momentum_buffer"))
        if isinstance(rows, Tensor):  # indexing by a list has copied, so values are written back
            for tensors, values in ((self.params, p), *((self.state[name], v) for name, v in state.items())):
                for name, value in zip(names, values, strict=True):
                    tensors[name][rows] = value

    @property
    def takes_products(self) -> bool:
        """Whether gradients may be products: SGD adds them to its momentum, and nothing else reads a gradient."""
        local = self.local
        others = local.nesterov or local.clip or local.weight_decay or local.gradients
        return local.optimiser == "sgd" and local.momentum > 0 and not others

    def _add_product(self, name: str, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """A step of SGD with the gradient `Σ gᵀ x`, which is added to the momentum without being written out."""
        weight, momentum, decay = self.params[name], self.state["momentum_buffer"][name], self.local.momentum
        for begin in range(0, len(weight), PRODUCT_ROWS):  # few rows at a time, which then are in the cache
            rows = slice(begin, begin + PRODUCT_ROWS)
            for k, (g, x) in enumerate(factors):
                momentum[rows].addmm_(g[:, rows].t(), x, beta=1.0 if k else decay)
            weight[rows].add_(momentum[rows], alpha=-self.lr)

    def _adam(self, p: list[Tensor], g: list[Tensor], means: list[Tensor], squares: list[Tensor], t: Tensor) -> None:
        torch._foreach_lerp_(means, g, 1 - 0.9)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, g, g, 1 - 0.999)
        size, scale = self.lr / (1 - 0.9**t), (1 - 0.999**t).sqrt()
        for weight, m, v in zip(p, means, squares, strict=True):
            shape = (-1, *[1] * (weight.ndim - 1)) if t.ndim else ()
            weight -= size.view(shape) * m / (v.sqrt() / scale.view(shape) + 1e-8)

    def _rmsprop(self, p: list[Tensor], g: list[Tensor], squares: list[Tensor], buffer: list[Tensor] | None) -> None:
        torch._foreach_mul_(squares, self.local.smoothing)
        torch._foreach_addcmul_(squares, g, g, 1 - self.local.smoothing)
        root = torch._foreach_sqrt(squares)
        torch._foreach_add_(root, 1e-8)
        if buffer is None:
            torch._foreach_addcdiv_(p, g, root, -self.lr)
        else:
            torch._foreach_mul_(buffer, self.local.momentum)
            torch._foreach_addcdiv_(buffer, g, root)
            torch._foreach_add_(p, buffer, alpha=-self.lr)

    def export(self, k: int | None = None) -> dict[str, Tensor]:
        """The state to keep, under the names torch gives it; in a stack, that of client `k`."""
        row = ... if k is None else k
        saved = {f"{i}.{name}": t[n][row].clone() for name, t in self.state.items() for i, n in enumerate(self.params)}
        if self.local.optimiser != "sgd":
            saved |= {f"{i}.step": self.steps[row].clone() for i in range(len(self.params))}
        return saved
