"""Scaling by training rows alone, once it is known which rows are for tests: of all clients, or of each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .types import ClientData, Dataset, FederatedData, Samples, Scaling, composed, statistics


def apart(dataset: Dataset, held_out: bool) -> Dataset:
    """The data set with samples that may be scaled in place, where they will be; otherwise the data set itself.

    Args:
        dataset: The data set.
        held_out: Whether test rows may be taken from its training part.
    """
    if not dataset.x_train.is_floating_point() or dataset.scaling == "none":
        return replace(dataset, scaling="none") if dataset.scaling != "none" else dataset
    if dataset.scaling == "all" and not held_out:
        return dataset
    return replace(
        dataset, x_train=dataset.x_train.clone(), x_test=None if dataset.x_test is None else dataset.x_test.clone()
    )


@dataclass
class Scaler:
    """The samples of a data set, and what undoes their scaling so far."""

    x: Tensor  # training samples, and then those without labels
    x_test: Tensor | None
    mean: Tensor | None
    std: Tensor | None
    scaling: Scaling

    @classmethod
    def of(cls, dataset: Dataset, x: Tensor) -> Scaler:
        """The scaler of the samples `x` of a data set, which it may change where `apart` has made them."""
        return cls(x, dataset.x_test, dataset.mean, dataset.std, dataset.scaling)

    def without(self, tests: np.ndarray, number: int) -> None:
        """Standardise all samples by the first `number` rows but test rows; nothing is done where there are none."""
        if self.scaling == "none" or not len(tests):
            return
        training = np.setdiff1d(np.arange(number), tests)
        mean, std = statistics(self.x[torch.from_numpy(training)], self.std)
        for x in (self.x, self.x_test):
            if x is not None:
                x.sub_(mean).div_(std)
        self.mean, self.std = composed(self.mean, self.std, mean, std)

    def by_site(self, data: FederatedData, training: Sequence[np.ndarray]) -> FederatedData:
        """Standardise each client's samples by its own training rows, and the server's by the server's.

        Args:
            data: The data of all clients, in the scale of all.
            training: Each client's training rows, validation rows among them.
        """
        if self.scaling != "site":
            return data
        clients, means, stds = [], [], []
        for client, rows in zip(data.clients, training, strict=True):
            mean, std = statistics(self.x[torch.from_numpy(rows)], self.std)
            clients.append(self._client(client, rows, mean, std))
            both = composed(self.mean, self.std, mean, std)
            means.append(both[0])
            stds.append(both[1])
        if data.server is not None:
            mean, std = statistics(data.server.take()[0], self.std)
            self._scale(data.server.index, mean, std)
        return replace(data, clients=clients, site_mean=torch.stack(means), site_std=torch.stack(stds))

    def _client(self, client: ClientData, rows: np.ndarray, mean: Tensor, std: Tensor) -> ClientData:
        # test rows are copied: clients may share them, and all clients' together stay in the scale of all
        x, y = client.test.take()
        test = Samples((x - mean).div_(std), y, torch.arange(len(y)))
        own = torch.from_numpy(rows)
        if client.unlabelled is not None:
            own = torch.cat([own, client.unlabelled.index]).unique()
        self._scale(own, mean, std)
        return replace(client, test=test)

    def _scale(self, rows: Tensor, mean: Tensor, std: Tensor) -> None:
        self.x[rows] = (self.x[rows] - mean).div_(std)
