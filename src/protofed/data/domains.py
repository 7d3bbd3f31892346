"""Several data sets of one task side by side: each is a domain, and each client belongs to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from ..grammar import parse_entry
from ..registry import parse_part
from ..seeds import numpy_stream
from .partitions import Partition, partitions
from .rows import hold_out
from .sources import DataSource, limited, register, shaped, source_of, sources
from .types import Dataset

HELD_OUT = 0.2  # of a domain that comes without a test part


@register("domains")
@dataclass(frozen=True, kw_only=True)
class DomainsSource(DataSource):
    """Several data sets with the same classes as one: `of=mnist,usps,digits`.

    Images are brought to one size, by default the largest, and to three channels where one domain is in colour. Samples
    have their domain as group id. `limit_train` and `limit_test` hold for each domain; samples without labels are left
    out.
    """

    of: tuple[str, ...]
    """The domains: names of data sets with settings of their own, or files: `mnist,post=usps?path=FOLDER`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.of) < 2:
            raise ValueError(f"of must name at least two data sets, got {', '.join(self.of) or 'none'}")
        self.domains()

    def domains(self) -> dict[str, DataSource]:
        """The source of each domain, by the domain's name."""
        found: dict[str, DataSource] = {}
        for text in self.of:
            entry = parse_entry(text)
            name, settings = source_of(entry.name)
            label = entry.label or (Path(entry.name).stem if settings else name)
            if name == self.name:
                raise ProtofedError(f"data domains: {text!r} is no data set but several; name them all in one list")
            if label in found:
                raise ProtofedError(f"data domains: {label!r} is named twice; write NAME=DATA to tell them apart")
            found[label] = sources.make(name, {**settings, **entry.settings})
        return found

    def unscaled(self) -> Dataset:
        """The domains one after another, limited and brought to one shape."""
        parts = {
            label: limited(_with_test(source.unscaled(), label), self.limit_train, self.limit_test)
            for label, source in self.domains().items()
        }
        images = [part.sample_shape for part in parts.values() if part.x_train.ndim == 4]
        side, channels = self.resize, self.image_channels
        if len(images) == len(parts):
            if side is None and len({shape[1:] for shape in images}) > 1:
                side = max(max(shape[1:]) for shape in images)
            channels = channels or max(shape[0] for shape in images)
        return _joined({label: shaped(part, side, channels) for label, part in parts.items()})


def _with_test(data: Dataset, label: str) -> Dataset:
    """The data set with a test part: its own, or a fifth of the training part, always the same."""
    if data.x_test is not None:
        return data
    if len(data.y_train) < 2:
        raise ProtofedError(f"{label}: one sample cannot be split into a training and a test part")
    held = torch.from_numpy(hold_out(data.y_train.numpy(), HELD_OUT, numpy_stream(0, "domains")))
    return replace(
        data,
        x_train=data.x_train[~held],
        y_train=data.y_train[~held],
        x_test=data.x_train[held],
        y_test=data.y_train[held],
    )


def _joined(parts: dict[str, Dataset]) -> Dataset:
    """The domains as one data set whose groups they are."""
    first_label, first = next(iter(parts.items()))
    labels: list[tuple[Tensor, Tensor]] = []
    for label, part in parts.items():
        order = _class_numbers(first_label, first, label, part)
        if part.sample_shape != first.sample_shape or part.x_train.dtype != first.x_train.dtype:
            raise ProtofedError(
                f"data domains: a sample of {first_label} has shape {list(first.sample_shape)}, one of {label} "
                f"{list(part.sample_shape)}; domains need samples of one shape (images are resized)"
            )
        assert part.y_test is not None
        labels.append((order[part.y_train], order[part.y_test]))
    train, test = (torch.cat([pair[k] for pair in labels]) for k in (0, 1))
    sizes = [[len(pair[k]) for pair in labels] for k in (0, 1)]
    groups = [torch.arange(len(parts)).repeat_interleave(torch.tensor(n)) for n in sizes]
    kinds, flips = {part.kind for part in parts.values()}, {part.flips for part in parts.values()}
    data = replace(
        first,
        x_train=torch.cat([part.x_train for part in parts.values()]),
        y_train=train,
        x_test=torch.cat([part.x_test for part in parts.values() if part.x_test is not None]),
        y_test=test,
        group_train=groups[0],
        group_test=groups[1],
        group_names=tuple(parts),
        name="+".join(parts),
        x_unlabelled=None,
        class_names=next((part.class_names for part in parts.values() if part.class_names), ()),
        kind=kinds.pop() if len(kinds) == 1 else "auto",
        flips=False if False in flips else (True if flips == {True} else None),
    )
    data.check()
    return data


def _class_numbers(first_label: str, first: Dataset, label: str, part: Dataset) -> Tensor:
    """The number in the first domain of each class of another one, by name where both have names."""
    same = torch.arange(part.num_classes)
    if first.class_names and part.class_names:
        if set(first.class_names) == set(part.class_names):
            return torch.tensor([first.class_names.index(name) for name in part.class_names])
        lost = sorted(set(first.class_names) ^ set(part.class_names))
        problem = f"{lost[0]!r} is a class of only one of them"
    elif first.num_classes == part.num_classes:
        return same
    else:
        problem = f"they have {first.num_classes} and {part.num_classes} classes"
    raise ProtofedError(f"data domains: {first_label} and {label} have different classes: {problem}")


@partitions.register("domains")
@dataclass(frozen=True)
class Domains(Partition):
    """Each client has samples of one domain (natural group); a domain's clients share it by another partition.

    Every domain has equally many clients, the first ones one more where they do not divide. A client is tested on its
    own domain's test rows.
    """

    complete: ClassVar[bool] = False  # it is complete where the partition inside is
    by_groups: ClassVar[bool] = True

    inside: str = "iid"
    """How the clients of one domain share it, as a partition is written: `n-way?way=10&shot=3`."""

    def __post_init__(self) -> None:
        if self._inside.by_groups:
            raise ValueError(f"inside={self.inside!r} divides by groups again; use iid, n-way, dirichlet or the like")

    @property
    def _inside(self) -> Partition:
        return parse_part(partitions, self.inside)

    def rows(
        self, labels: np.ndarray, clients: int, rng: np.random.Generator, groups: np.ndarray | None
    ) -> list[np.ndarray]:
        if groups is None:
            raise ProtofedError(
                "partition 'domains' needs domains: data=domains, or data with group ids; there are none"
            )
        ids = np.unique(groups)
        if clients < len(ids):
            raise ProtofedError(
                f"partition 'domains': clients={clients}, but there are {len(ids)} domains; each needs a client at least"
            )
        shares: list[np.ndarray] = []
        for domain, number in zip(ids, _shared_out(clients, len(ids)), strict=True):
            own = np.flatnonzero(groups == domain)
            shares += [own[share] for share in self._inside.split(labels[own], number, rng)]
        return shares


def _shared_out(clients: int, domains: int) -> list[int]:
    return [clients // domains + (domain < clients % domains) for domain in range(domains)]


def domain_names(names: Sequence[str], domains: Sequence[int]) -> tuple[str, ...]:
    """The names of clients, each of one domain: that of the domain, with a number where it has several clients.

    Args:
        names: The name of each domain.
        domains: The domain of each client.

    Returns:
        One name for each client.

    >>> domain_names(["mnist", "usps"], [0, 1, 1])
    ('mnist', 'usps 1', 'usps 2')
    """
    return tuple(
        names[domain] if domains.count(domain) == 1 else f"{names[domain]} {domains[: client + 1].count(domain)}"
        for client, domain in enumerate(domains)
    )
