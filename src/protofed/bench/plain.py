"""The baseline: federated rounds as a person writes them in plain PyTorch, one client after another.

Samples are tensors in memory and batches are cut by index, so no time is spent in a `DataLoader`. Nothing here uses
protofed's methods, losses or engines; only the networks are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .workloads import SEED, Training

EVAL_BATCH = 512


def fedproto_loss(model: nn.Module, x: Tensor, y: Tensor, prototypes: Tensor | None, known: Tensor | None) -> Tensor:
    """Cross-entropy, and the mean squared error between embeddings and their classes' global prototypes."""
    z, logits = model(x)
    loss = F.cross_entropy(logits, y)
    if prototypes is not None and known is not None:
        target = torch.where(known[y].unsqueeze(1), prototypes[y], z.detach())
        loss = loss + F.mse_loss(z, target)
    return loss


class PlainLoop:
    """What the rounds of both methods share: the clients' samples, participation and the optimiser."""

    def __init__(self, workload: Training, x: Tensor, y: Tensor) -> None:
        self.workload = workload
        self.x = x.split(workload.samples)
        self.y = y.split(workload.samples)
        self.generator = torch.Generator().manual_seed(SEED)

    def participants(self) -> list[int]:
        """The cohort of a round."""
        w = self.workload
        if w.per_round == w.clients:
            return list(range(w.clients))
        return torch.randperm(w.clients, generator=self.generator)[: w.per_round].tolist()

    def optimiser(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimiser for a client's model."""
        return torch.optim.SGD(model.parameters(), lr=self.workload.lr, momentum=self.workload.momentum)

    def round(self) -> None:
        """Run one round."""
        raise NotImplementedError


class PlainFedProto(PlainLoop):
    """FedProto: each client has a model, sends its class means and receives their average."""

    def __init__(self, workload: Training, x: Tensor, y: Tensor) -> None:
        super().__init__(workload, x, y)
        initial_model = workload.build_model()
        self.models = [copy.deepcopy(initial_model) for _ in range(workload.clients)]
        self.prototypes: dict[int, Tensor] = {}

    def round(self) -> None:
        """Train the cohort and average its prototypes."""
        table, known = self._table()
        collected = []
        for client in self.participants():
            model, x, y = self.models[client], self.x[client], self.y[client]
            optimiser = self.optimiser(model)
            model.train()
            for rows in torch.randperm(len(y), generator=self.generator).split(self.workload.batch):
                loss = fedproto_loss(model, x[rows], y[rows], table, known)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            collected.append(class_means(model, x, y))
        self.prototypes = average_prototypes(collected)

    def _table(self) -> tuple[Tensor | None, Tensor | None]:
        """The global prototypes as a matrix, made once a round, so that a batch selects its rows in one call."""
        if not self.prototypes:
            return None, None
        any_prototype = next(iter(self.prototypes.values()))
        table = torch.zeros(self.workload.classes, len(any_prototype))
        known = torch.zeros(self.workload.classes, dtype=torch.bool)
        for label, prototype in self.prototypes.items():
            table[label] = prototype
            known[label] = True
        return table, known


def class_means(model: nn.Module, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """The mean embedding of each class."""
    model.eval()
    with torch.no_grad():
        z = torch.cat([model(piece)[0] for piece in x.split(EVAL_BATCH)])
    return {label: z[y == label].mean(0) for label in y.unique().tolist()}


def average_prototypes(collected: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """The mean of the clients' prototypes of each class."""
    by_label: dict[int, list[Tensor]] = {}
    for prototypes in collected:
        for label, prototype in prototypes.items():
            by_label.setdefault(label, []).append(prototype)
    return {label: torch.stack(rows).mean(0) for label, rows in by_label.items()}


class PlainFedAvg(PlainLoop):
    """FedAvg: each client starts from the global weights, and the results are averaged by sample count."""

    def __init__(self, workload: Training, x: Tensor, y: Tensor) -> None:
        super().__init__(workload, x, y)
        self.model = workload.build_model()
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def round(self) -> None:
        """Train the cohort and average its weights."""
        cohort = self.participants()
        total = sum(len(self.y[client]) for client in cohort)
        average = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        for client in cohort:
            x, y = self.x[client], self.y[client]
            self.model.load_state_dict(self.weights)
            self.model.train()
            optimiser = self.optimiser(self.model)
            for rows in torch.randperm(len(y), generator=self.generator).split(self.workload.batch):
                _, logits = self.model(x[rows])
                loss = F.cross_entropy(logits, y[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            for name, value in self.model.state_dict().items():
                average[name].add_(value, alpha=len(y) / total)
        self.weights = average


def plain_loop(workload: Training, x: Tensor, y: Tensor) -> PlainLoop:
    """The loop for a workload's method."""
    return (PlainFedProto if workload.method == "fedproto" else PlainFedAvg)(workload, x, y)
