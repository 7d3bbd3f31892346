"""Features of a frozen body in place of samples: computed once, for the rows that somebody holds, and kept where asked."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..data.types import ClientData, FederatedData, Samples, Unlabelled
from ..disk import write_atomically, writing
from ..models.frozen import Frozen

log = logging.getLogger("protofed")
PIECE = 64  # samples that go through the body at once


def with_features(data: FederatedData, frozen: Frozen, folder: Path | None = None) -> FederatedData:
    """The data as a model sees it whose body is frozen: features in place of samples.

    Args:
        data: The data of all clients.
        frozen: The model, whose body computes the features.
        folder: Where features are kept for other runs with the same body and the same samples; None: nowhere.

    Returns:
        The same rows, labels and parts. Rows that nobody holds have no features.
    """
    views = _Views(frozen, folder)
    for part in _parts(data):
        views.add(part)
    views.compute()
    clients = []
    for client in data.clients:
        parts = {name: views.of(part) for name, part in _parts_of(client)}
        clients.append(replace(client, **parts))
    return replace(
        data,
        clients=clients,
        central_test=None if data.central_test is None else views.of(data.central_test),
        server=None if data.server is None else views.of(data.server),
        sample_shape=views.shape,
        mean=None,
        std=None,
        site_mean=None,
        site_std=None,
        kind="features",
        flips=None,
    )


def _parts(data: FederatedData) -> Iterator[Samples | Unlabelled]:
    """All sets of samples of a federation."""
    for client in data.clients:
        yield from (part for _, part in _parts_of(client))
    yield from (part for part in (data.central_test, data.server) if part is not None)


def _parts_of(client: ClientData) -> Iterator[tuple[str, Samples | Unlabelled]]:
    """All sets of samples of a client, by name."""
    for entry in dataclasses.fields(client):
        value = getattr(client, entry.name)
        if isinstance(value, Samples | Unlabelled):
            yield entry.name, value


@dataclass
class _Views:
    """Features of the used rows of each tensor of samples."""

    frozen: Frozen
    folder: Path | None
    rows: dict[int, list[Tensor]] = field(default_factory=dict)  # by tensor
    tensors: dict[int, Tensor] = field(default_factory=dict)
    used: dict[int, Tensor] = field(default_factory=dict)
    features: dict[int, Tensor] = field(default_factory=dict)
    labels: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def add(self, part: Samples | Unlabelled) -> None:
        """Ask for the features of a set of samples."""
        self.tensors[id(part.x)] = part.x
        self.rows.setdefault(id(part.x), []).append(part.index)

    def compute(self) -> None:
        """Compute all features that were asked for, or read them."""
        for key, x in self.tensors.items():
            if len(x):
                self.used[key] = torch.cat(self.rows[key]).unique()
            rows = x[self.used[key]] if len(x) else x
            self.features[key] = features_of(self.frozen, rows, self.folder if len(x) else None)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's features."""
        return tuple(next(iter(self.features.values())).shape[1:])

    def of(self, part: Any) -> Any:
        """A set of samples with its features."""
        key = id(part.x)
        if key not in self.used:  # samples of another site, of which only their number is known here
            return replace(part, x=self.features[key])
        index = torch.searchsorted(self.used[key], part.index)
        if not isinstance(part, Samples):
            return replace(part, x=self.features[key], index=index)
        labels = key, id(part.y)
        if labels not in self.labels:
            self.labels[labels] = part.y[self.used[key]]
        return replace(part, x=self.features[key], y=self.labels[labels], index=index)


def features_of(frozen: Frozen, x: Tensor, folder: Path | None = None) -> Tensor:
    """The features `[n, width]` of samples.

    Args:
        frozen: The model, whose body computes them.
        x: Samples `[n, ...]`.
        folder: Where they are kept and sought, by the digests of the body and of the samples; None: nowhere.

    Returns:
        The features.
    """
    file = None if folder is None else folder / f"{_digest(frozen, x)}.safetensors"
    if file is not None and (stored := _stored(file, len(x))) is not None:
        log.info("features: %s of %d samples read from %s", frozen.name, len(x), file)
        return stored.to(x.device)
    log.info("features: %s of %d samples", frozen.name, len(x))
    body = frozen.body if x.device.type == "cpu" else copy.deepcopy(frozen.body).to(x.device)
    with torch.no_grad():
        none = body(x.new_zeros(1, *x.shape[1:]))[:0]
        features = torch.cat([none, *(body(piece) for piece in x.split(PIECE) if len(piece))])
    if file is not None:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, save({"features": features.cpu().contiguous()}))
    return features


def _stored(file: Path, samples: int) -> Tensor | None:
    """Features that an earlier run has kept; None, with a warning, where the file is damaged."""
    if not file.is_file():
        return None
    try:
        features = load_file(file)["features"]
    except (OSError, SafetensorError, KeyError) as error:
        log.warning("%s: damaged (%s); its features are computed again", file, type(error).__name__)
        return None
    return features if features.ndim == 2 and len(features) == samples else None


def _digest(frozen: Frozen, x: Tensor) -> str:
    """The SHA-256 of what features follow from: the model's settings, the body's weights and the samples."""
    digest = hashlib.sha256(repr((frozen.model, frozen.shape, tuple(x.shape), x.dtype)).encode())
    for tensor in (*_tensors(frozen.body), x):
        digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    return digest.hexdigest()


def _tensors(body: nn.Module) -> Iterator[Tensor]:
    """All weights of a body, those too that a text encoder shares between models and keeps apart."""
    yield from body.state_dict().values()
    for module in body.modules():
        for block in getattr(module, "frozen", ()):
            yield from block.state_dict().values()
