"""SGD, Adam and RMSprop as torch defines them, for one client or for a stack of clients.

torch's own optimisers know no client axis: clients of a stack may be at different steps, and some may have finished. These
few lines serve the plain loop and the stack alike, and are tested against torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ProtofedError
from ..schedules import cosine_decay

Rows = slice | Tensor | None  # which clients of a stack; None: not a stack


@dataclass(frozen=True)
class RunLength:
    """How many rounds a run has."""

    rounds: Annotated[int, Field(ge=1, description="communication rounds")] = 100


@dataclass(frozen=True)
class LocalSettings(RunLength):
    """How a client trains, whatever the method; the learning rate may fall over the run's rounds."""

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
    clip: Annotated[float, Field(ge=0, description="largest norm of a client's gradient; 0: any")] = 0.0
    keep_optimiser: Annotated[bool, Field(description="keep the optimiser's state between rounds")] = False

    def __post_init__(self) -> None:
        if self.nesterov and (self.optimiser != "sgd" or not self.momentum):
            raise ProtofedError(
                "nesterov=true needs optimiser=sgd and momentum above 0, "
                f"got optimiser={self.optimiser} and momentum={self.momentum:g}"
            )

    def lr_at(self, round: int) -> float:
        """The learning rate of a round; tuning before an evaluation is round 0 and has the first round's."""
        return self.lr * cosine_decay(max(round, 1), self.rounds) if self.lr_schedule == "cosine" else self.lr


def _alike(*lists: Sequence[Tensor]) -> bool:
    """Whether tensors lie in memory in the same order without gaps, as the fused update takes for granted."""
    orders = ([_order(t.shape, t.stride()) for t in tensors] for tensors in lists)
    first, *others = orders
    return (
        hasattr(torch, "_fused_sgd_")
        and all(order is not None for order in first)
        and all(other == first for other in others)
        and all(a.dtype == b.dtype for a, b in zip(*lists[:2], strict=True))
    )


@lru_cache(maxsize=4096)
def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Stride and size of each axis that has more than one entry; None where there are gaps or numbers lie twice."""
    axes = [(step, size) for step, size in zip(stride, shape, strict=True) if size > 1]
    reached = 1
    for step, size in sorted(axes):
        if step != reached:
            return None
        reached *= size
    return tuple(axes)


def _in_order(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Dense tensors as they lie in memory, whatever the order of their axes: of others the fused update makes copies."""
    return [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,)) for t in tensors]


def _clipped(grads: list[Tensor], most: float, stacked: bool) -> list[Tensor]:
    """Gradients whose norm over all parameters is at most `most`, as torch's `clip_grad_norm_`; each client of a stack
    by its own norm."""
    norms = [torch.linalg.vector_norm(g.reshape(len(g) if stacked else 1, -1), dim=1) for g in grads]
    share = (most / (torch.linalg.vector_norm(torch.stack(norms), dim=0) + 1e-6)).clamp_max(1)
    return [g * (share.view(-1, *[1] * (g.ndim - 1)) if stacked else share[0]) for g in grads]


class Optimiser:
    """Updates `params` in place. `kept` is what `export` gave before: one mapping, or one per client of a stack."""

    def __init__(
        self,
        local: LocalSettings,
        params: Mapping[str, Tensor],
        kept: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] = (),
        round: int = 1,
    ) -> None:
        self.lr = local.lr_at(round)
        self.local, self.params = local, {name: p.detach() for name, p in params.items()}
        names = {
            "sgd": ["momentum_buffer"] if local.momentum else [],
            "adam": ["exp_avg", "exp_avg_sq"],
            "rmsprop": ["square_avg"] + (["momentum_buffer"] if local.momentum else []),
        }[local.optimiser]
        self.state = {kind: {n: torch.zeros_like(p) for n, p in self.params.items()} for kind in names}
        some = next(iter(self.params.values()))
        single = isinstance(kept, Mapping)
        self.steps = torch.zeros(() if single else len(some), device=some.device)  # Adam corrects its averages by it
        for k, tensors in enumerate([kept] if isinstance(kept, Mapping) else kept):
            where = ... if single else k
            for key, value in tensors.items():
                index, _, kind = key.partition(".")
                if kind == "step":
                    self.steps[where] = value
                else:
                    self.state[kind][list(self.params)[int(index)]][where] = value

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rows: Rows = None) -> None:
        local, chosen = self.local, ... if rows is None else rows
        self.steps[chosen] += 1
        p, g = [t[chosen] for t in self.params.values()], list(grads)
        if local.clip:
            g = _clipped(g, local.clip, stacked=rows is not None)
        if local.weight_decay:
            g = list(torch._foreach_add(g, p, alpha=local.weight_decay))
        state = {kind: [t[chosen] for t in tensors.values()] for kind, tensors in self.state.items()}
        if local.optimiser == "sgd":
            if local.momentum and _alike(p, g, state["momentum_buffer"]):
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
            self._adam(p, g, state["exp_avg"], state["exp_avg_sq"], self.steps[chosen])
        else:
            self._rmsprop(p, g, state["square_avg"], state.get("momentum_buffer"))
        if isinstance(rows, Tensor):  # indexing by a list copied: put back
            for tensors, values in ((self.params, p), *((self.state[kind], values) for kind, values in state.items())):
                for name, value in zip(tensors, values, strict=True):
                    tensors[name][rows] = value

    def _adam(self, p: list[Tensor], g: list[Tensor], first: list[Tensor], second: list[Tensor], t: Tensor) -> None:
        torch._foreach_lerp_(first, g, 1 - 0.9)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, g, g, 1 - 0.999)
        size, scale = self.lr / (1 - 0.9**t), (1 - 0.999**t).sqrt()
        for weight, m, v in zip(p, first, second, strict=True):
            shape = (-1, *[1] * (weight.ndim - 1)) if t.ndim else ()
            weight -= size.view(shape) * m / (v.sqrt() / scale.view(shape) + 1e-8)

    def _rmsprop(self, p: list[Tensor], g: list[Tensor], average: list[Tensor], buffer: list[Tensor] | None) -> None:
        torch._foreach_mul_(average, 0.99)
        torch._foreach_addcmul_(average, g, g, 0.01)
        root = torch._foreach_sqrt(average)
        torch._foreach_add_(root, 1e-8)
        if buffer is None:
            torch._foreach_addcdiv_(p, g, root, -self.lr)
        else:
            torch._foreach_mul_(buffer, self.local.momentum)
            torch._foreach_addcdiv_(buffer, g, root)
            torch._foreach_add_(p, buffer, alpha=-self.lr)

    def export(self, k: int | None = None) -> dict[str, Tensor]:
        """The state to keep, under the names torch gives it; of client `k` of a stack."""
        where = ... if k is None else k
        kept = {f"{i}.{kind}": t[n][where].clone() for kind, t in self.state.items() for i, n in enumerate(self.params)}
        if self.local.optimiser != "sgd":
            kept |= {f"{i}.step": self.steps[where].clone() for i in range(len(self.params))}
        return kept
