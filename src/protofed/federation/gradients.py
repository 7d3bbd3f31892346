"""How large clients' gradients are in a round, of the loss and of each of its terms (FedSAP's Eq. 6, FedAPA's Eq. 24)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .optimiser import Rows

NORM = "gradient_norm"


class GradientNorms:
    """Sums of squared gradient norms over the steps of a round, for one client or for a stack of clients.

    `like` is any tensor on the device of the parameters, with a leading client axis where they are stacked.
    """

    def __init__(self, like: Tensor, stacked: bool = False) -> None:
        self.taken = torch.zeros(len(like) if stacked else (), device=like.device)
        self.squares: dict[str, Tensor] = {}

    def add(self, terms: Mapping[str, Tensor], params: Sequence[Tensor], rows: Rows = None) -> None:
        """Add one step, before the gradient that is followed is taken: its graph is kept.

        Args:
            terms: The terms of the loss with the weights that they have in it; in a stack a number for each client.
            params: What is trained.
            rows: Which clients of a stack take the step; None where the parameters are not stacked.
        """
        total = [torch.zeros_like(p) for p in params]
        for name, term in terms.items():
            if not term.requires_grad:  # as of a pull to prototypes that nobody has sent yet
                self._add(f"{NORM}_{name}", [], rows)
                continue
            gradient = torch.autograd.grad(
                term.sum(), params, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            self._add(f"{NORM}_{name}", gradient, rows)
            torch._foreach_add_(total, gradient)
        self._add(NORM, total, rows)
        self.taken[... if rows is None else rows] += 1

    def _add(self, name: str, gradient: Sequence[Tensor], rows: Rows) -> None:
        sums = self.squares.setdefault(name, torch.zeros_like(self.taken))
        for part in gradient:
            if rows is None:
                sums += part.square().sum()
            else:
                sums[rows] += part.square().flatten(1).sum(1)

    def measures(self, k: int | None = None) -> dict[str, float]:
        """Root mean squares over the steps, by name; in a stack, those of client `k`."""
        row = ... if k is None else k
        if not float(self.taken[row]):
            return {}
        return {name: float((sums[row] / self.taken[row]).sqrt()) for name, sums in self.squares.items()}
