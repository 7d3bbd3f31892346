"""The named workloads. Their data is random, because speed depends on sizes and not on values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import models
from ..data import Dataset

FOREVER = 10**9  # the number of rounds, and of rounds between evaluations, so that a measured round never evaluates
SEED = 1234
Say = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """A federation whose rounds are timed. Every contender trains on the same samples with the same settings."""

    name: str
    method: str  # fedproto or fedavg, which the hand-written loop has
    clients: int
    per_round: int
    samples: int  # of each client
    shape: tuple[int, ...]
    model: str
    options: dict[str, Any]
    batch: int
    classes: int = 10
    lr: float = 0.01
    momentum: float = 0.5
    over_plain: float | None = None  # the goal for `auto`: its speed in units of the best plain loop
    of_limit: float | None = None  # the goal for `auto`: its speed as a share of the limit's
    overhead: float | None = None  # the goal for `auto`: the largest share of a round that is not computation
    smaller: dict[str, Any] = field(default_factory=dict)  # what --quick changes

    @property
    def samples_per_round(self) -> int:
        """The number of samples that the clients of a round train on."""
        return self.per_round * self.samples

    @property
    def prototypes(self) -> bool:
        """Whether clients compute their class means at the end of a round."""
        return self.method == "fedproto"

    def quick(self) -> Training:
        """The same workload in a tiny size."""
        return replace(self, **self.smaller)

    def describe(self) -> str:
        """The workload's sizes in one line."""
        participation = "" if self.per_round == self.clients else f", {self.per_round:,} per round"
        return (
            f"{self.clients:,} clients × {self.samples} samples {'×'.join(map(str, self.shape))}{participation}, "
            f"{self.model}, batch {self.batch}, {self.method}"
        )

    def build_model(self) -> nn.Module:
        """The network with its initial weights."""
        torch.manual_seed(SEED)
        return models.build(self.model, self.shape, self.classes, **self.options)

    def write_samples(self, folder: Path) -> None:
        """Write the samples into one file that all contenders map into memory, so that they hold them once."""
        rng = np.random.default_rng(SEED)
        with (folder / "samples").open("wb") as file:
            for _ in range(self.clients):
                file.write(rng.standard_normal((self.samples, *self.shape), dtype=np.float32).tobytes())

    def load(self, folder: str | None) -> tuple[Tensor, Tensor]:
        """All samples, client after client, and their labels. Without a folder they are drawn in this process."""
        count = self.clients * self.samples
        generator = torch.Generator().manual_seed(SEED)
        y = torch.randint(self.classes, (count,), generator=generator)
        if folder is None:
            return torch.randn(count, *self.shape, generator=generator), y
        size = int(np.prod((count, *self.shape)))
        return torch.from_file(str(Path(folder) / "samples"), shared=True, size=size).view(count, *self.shape), y

    def settings(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """The same federation as settings of `protofed run`."""
        owner = torch.arange(self.clients).repeat_interleave(self.samples)
        test = torch.arange(self.classes)
        data = Dataset.from_arrays(
            x, y, x[: self.classes], test, num_classes=self.classes, group_train=owner, name=self.name
        )
        return {
            "data": data,
            "partition": "natural",
            "clients": self.clients,
            "participation": self.per_round / self.clients,
            "rounds": FOREVER,
            "evaluate_every": FOREVER,
            "batch": self.batch,
            "lr": self.lr,
            "momentum": self.momentum,
            "model": {"name": self.model, **self.options},
            **({"reduce": "mean?by=holders"} if self.method == "fedproto" else {}),
        }


CNN = {"channels": (32, 64), "kernel": 5, "embedding": 512}
SMALL_CNN = {"channels": (4, 8), "kernel": 5, "embedding": 16}

TRAINING: dict[str, Training] = {
    w.name: w
    for w in (
        Training(
            "cnn28",
            "fedproto",
            clients=20,
            per_round=20,
            samples=300,
            shape=(1, 28, 28),
            model="cnn",
            options=CNN,
            batch=8,
            over_plain=1.7,
            of_limit=0.75,
            overhead=0.05,
            smaller={"clients": 4, "per_round": 4, "samples": 16, "options": SMALL_CNN},
        ),
        Training(
            "cifar-cohort",
            "fedavg",
            clients=1000,
            per_round=50,
            samples=50,
            shape=(3, 32, 32),
            model="cnn",
            options=CNN,
            batch=10,
            over_plain=1.6,
            smaller={"clients": 12, "per_round": 4, "samples": 20, "options": SMALL_CNN},
        ),
        Training(
            "cifar-cohort-pfl",
            "fedavg",
            clients=1000,
            per_round=50,
            samples=50,
            shape=(3, 32, 32),
            model="dropout-cnn",
            options={},
            batch=10,
            over_plain=1.6,
            smaller={"clients": 12, "per_round": 4, "samples": 20, "options": {"channels": (4, 8), "embedding": 16}},
        ),
        Training(
            "resnet18",
            "fedproto",
            clients=8,
            per_round=8,
            samples=40,
            shape=(3, 32, 32),
            model="resnet18",
            options={"stem": "imagenet"},
            batch=8,
            over_plain=1.8,
            of_limit=0.75,
            smaller={"clients": 2, "per_round": 2, "samples": 8, "batch": 4},
        ),
        Training(
            "mlp-digits",
            "fedproto",
            clients=100,
            per_round=100,
            samples=60,
            shape=(64,),
            model="mlp",
            options={"hidden": (128,), "embedding": 64},
            batch=8,
            over_plain=8.0,
            smaller={"clients": 6, "per_round": 6, "samples": 20},
        ),
    )
}


@dataclass(frozen=True)
class Server:
    """One server rule on a stack of banks.

    With `close`, all classes are within the margin of each other, as they are early in training, which is the most
    expensive case of refinement; otherwise they are far apart.
    """

    rule: str
    clients: int
    classes: int
    dim: int
    close: bool = False
    memory: float | None = None  # the goal in GiB, an upper bound

    @property
    def label(self) -> str:
        """The rule and its sizes."""
        distance = (", classes close" if self.close else ", classes apart") if self.rule == "refine" else ""
        return f"{self.rule}{distance}: {self.clients:,} clients × {self.classes:,} classes × {self.dim}"

    def quick(self) -> Server:
        """The same rule in a tiny size."""
        return replace(self, clients=min(self.clients, 10), classes=self.classes // 10, dim=32)


SERVER: tuple[Server, ...] = (
    Server("mean", 1000, 100, 512),
    Server("weighted_mean", 1000, 100, 512),
    Server("personalised", 1000, 100, 512),
    Server("personalised", 1000, 21, 256),  # FedAPA's rooms
    Server("refine", 1000, 100, 512),
    Server("refine", 1000, 100, 512, close=True),
    Server("refine", 20, 10_000, 512, memory=4.0),
    Server("refine", 20, 10_000, 512, close=True, memory=4.0),
)


@dataclass(frozen=True)
class Many:
    """The same number of clients per round, out of few and out of many, to measure what idle clients cost."""

    few: int = 1000
    many: int = 10_000
    per_round: int = 100
    rounds: int = 20
    samples: int = 20
    memory: float = 4.0  # the goal in GiB, an upper bound

    def quick(self) -> Many:
        """The same comparison in a tiny size."""
        return replace(self, few=20, many=200, per_round=4, rounds=2)

    def federation(self, clients: int) -> Training:
        """The workload with a number of clients."""
        return Training(
            f"many-{clients}",
            "fedproto",
            clients=clients,
            per_round=self.per_round,
            samples=self.samples,
            shape=(64,),
            model="mlp",
            options={"hidden": (128,), "embedding": 64},
            batch=8,
        )


@dataclass(frozen=True)
class Startup:
    """The time from `protofed run` to its first round, beyond the import of Python and torch."""

    clients: tuple[int, ...] = (20, 1000)
    samples: int = 60
    seconds: float = 3.0  # the goal, an upper bound

    def quick(self) -> Startup:
        """The same measurement in a tiny size."""
        return replace(self, clients=(3, 12))


NAMES: tuple[str, ...] = (*TRAINING, "server", "servers", "many", "startup", "evaluation", "around")
BESIDE = frozenset({"around", "evaluation", "servers"})
"""The workloads beside training that take turns with another checkout themselves."""


def goal(description: str, value: float | None, target: float, at_least: bool) -> dict[str, Any]:
    """A goal, with the value that was measured and whether it holds."""
    met = None if value is None else value >= target if at_least else value <= target
    return {"what": description, "value": value, "at_least" if at_least else "at_most": target, "met": met}
