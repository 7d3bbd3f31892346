"""The types of data in protofed: tensors in memory, and indices into them.

Clients do not copy the data set. Each set of samples is a list of row numbers into the shared tensors, so a thousand
clients cost a thousand index lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from .augment import Augmentation
from .labels import numbered
from .summary import dataset_html, dataset_line, federated_html, federated_line
from .table import Columns

SampleKind = Literal["auto", "image", "csi", "features", "tokens"]
Scale = tuple[Tensor | None, Tensor | None]
Scaling = Literal["all", "site", "none"]
UNKNOWN = -1  # the label of a sample whose class is hidden or unknown


@dataclass(frozen=True)
class Dataset:
    """A classification data set as tensors: `x [n, ...]` floating, `y [n]` integers in `0 … num_classes − 1`.

    `x` may be integers where they are tokens of text. `class_values` says what a class means as a number (how many
    people), where it does; errors are then measured in it too. `group_train` and `group_test` are optional natural
    client ids (writer, room, patient), one integer a sample, and `group_names` what to call them.
    A data set may come without a test part (`x_test=None`); one is then held out from the training part.

    `x_unlabelled` are further samples whose class nobody knows. `mean` and `std` undo the standardisation, one number a
    channel (images) or feature (flat samples), and are None without standardisation. `kind` says what a sample is where
    its shape does not, and `flips` whether its mirror image has the same class (None where this is unknown).
    `sequence_train` is the recording that each training sample was cut from, where samples were: two samples of one
    recording that stand side by side were recorded side by side.

    `scaling` says by whose statistics samples are standardised. Rows that are held out for tests later do not count among
    them: `federate` sees to it. `columns` says how the rows of a table became samples, and `options` are the settings with
    which data in memory became this data set.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    num_classes: int = 0
    group_train: Tensor | None = None
    group_test: Tensor | None = None
    class_names: tuple[str, ...] = ()
    name: str = "in-memory"
    class_values: tuple[float, ...] = ()
    group_names: tuple[str, ...] = ()
    x_unlabelled: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None
    kind: SampleKind = "auto"
    flips: bool | None = None
    scaling: Scaling = "none"
    columns: Columns | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sequence_train: Tensor | None = None

    def __repr__(self) -> str:
        return dataset_line(self)

    def _repr_html_(self) -> str:
        return dataset_html(self)

    @classmethod
    def from_arrays(
        cls,
        x_train: np.ndarray | Tensor,
        y_train: np.ndarray | Tensor,
        x_test: np.ndarray | Tensor | None = None,
        y_test: np.ndarray | Tensor | None = None,
        *,
        num_classes: int | None = None,
        group_train: np.ndarray | Tensor | None = None,
        group_test: np.ndarray | Tensor | None = None,
        class_names: tuple[str, ...] = (),
        name: str = "in-memory",
        class_values: tuple[float, ...] = (),
        x_unlabelled: np.ndarray | Tensor | None = None,
        kind: SampleKind = "auto",
        flips: bool | None = None,
        sequence_train: np.ndarray | Tensor | None = None,
    ) -> Dataset:
        """Check and convert a user's own arrays.

        Features keep their scale, but 8-bit images are scaled to 0 … 1. Images come out channels first: `[n, H, W, 3]`
        is turned, and 8-bit `[n, H, W]` gets its one channel. Labels are integers from 0 on, words, which become the names
        of the classes in alphabetical order, or booleans. Group ids may be integers or text. Where neither the number of
        classes nor their names are given, every class from 0 to the largest label must have a sample.

        Example: `Dataset.from_arrays(x, y, x_test, y_test, name="mine")`
        """
        given = [y_train] if y_test is None else [y_train, y_test]
        labels, class_names = numbered(given, class_names, [f"{name}: y_train", f"{name}: y_test"][: len(given)])
        if num_classes is None and not class_names and not class_values:
            _check_complete(labels, name)
        top = max((int(y.max()) for y in labels if y.size), default=-1) + 1
        groups, group_names = _groups(group_train, group_test, name)
        data = cls(
            _features(x_train, f"{name}: x_train"),
            torch.from_numpy(labels[0]),
            None if x_test is None else _features(x_test, f"{name}: x_test"),
            None if y_test is None else torch.from_numpy(labels[1]),
            num_classes if num_classes is not None else max(top, len(class_names)),
            groups[0],
            groups[1],
            tuple(class_names),
            name,
            tuple(class_values),
            group_names,
            None if x_unlabelled is None else _features(x_unlabelled, f"{name}: x_unlabelled"),
            kind=kind,
            flips=flips,
            sequence_train=None if sequence_train is None else torch.as_tensor(sequence_train),
        )
        data.check()
        return data

    def check(self) -> None:
        """Raise a `ProtofedError` where the parts do not fit together."""
        if self.num_classes < 1:
            raise ProtofedError(f"{self.name}: num_classes={self.num_classes}; at least one class is needed")
        if self.class_names and len(self.class_names) != self.num_classes:
            raise ProtofedError(f"{self.name}: {len(self.class_names)} class names for {self.num_classes} classes")
        if self.class_values and len(self.class_values) != self.num_classes:
            raise ProtofedError(f"{self.name}: {len(self.class_values)} class values for {self.num_classes} classes")
        if (self.x_test is None) != (self.y_test is None):
            raise ProtofedError(f"{self.name}: x_test and y_test come together; only one is there")
        parts = [("train", self.x_train, self.y_train, self.group_train)]
        if self.x_test is not None and self.y_test is not None:
            parts.append(("test", self.x_test, self.y_test, self.group_test))
        for part, other in (("a test", self.x_test), ("an unlabelled", self.x_unlabelled)):
            if other is not None and other.shape[1:] != self.x_train.shape[1:]:
                raise ProtofedError(
                    f"{self.name}: {part} sample has shape {tuple(other.shape[1:])}, "
                    f"a training sample {tuple(self.x_train.shape[1:])}; they must be the same"
                )
        for part, x, y, group in parts:
            if len(x) == 0:
                raise ProtofedError(f"{self.name}: the {part} part is empty")
            for field_name, other in (("labels", y), ("group ids", group)):
                if other is not None and other.shape != (len(x),):
                    raise ProtofedError(
                        f"{self.name}: {len(x)} {part} samples but {field_name} of shape {tuple(other.shape)}"
                    )
            low, high = int(y.min()), int(y.max())
            if low < 0 or high >= self.num_classes:
                raise ProtofedError(
                    f"{self.name}: {part} labels run from {low} to {high}; expected 0 to {self.num_classes - 1}"
                )
            _check_finite(x, f"{self.name}: the {part} samples")
        if self.x_unlabelled is not None:
            _check_finite(self.x_unlabelled, f"{self.name}: the unlabelled samples")

    def class_name(self, label: int) -> str:
        """The name of a class, or its number where classes have no names."""
        return self.class_names[label] if self.class_names else str(label)

    def group_name(self, group: int) -> str:
        """The name of a natural client, or its id where they have no names."""
        return self.group_names[group] if self.group_names else str(group)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x_train.shape[1:])

    def standardised(self, scaling: Scaling = "all", rows: Tensor | None = None) -> Dataset:
        """The data set with mean 0 and standard deviation 1 per channel (images) or feature (flat samples).

        Args:
            scaling: By whose statistics `federate` is to see to it: those of `all` training rows, or of each `site`'s own.
            rows: The training rows whose statistics are taken; by default all.
        """
        if not self.x_train.is_floating_point():
            return self  # tokens
        mean, std = statistics(self.x_train if rows is None else self.x_train[rows], self.std)
        test, unlabelled = (None if x is None else (x - mean).div_(std) for x in (self.x_test, self.x_unlabelled))
        whole_mean, whole_std = composed(self.mean, self.std, mean, std)
        return replace(
            self,
            x_train=(self.x_train - mean).div_(std),
            x_test=test,
            x_unlabelled=unlabelled,
            mean=whole_mean,
            std=whole_std,
            scaling=scaling,
        )


def statistics(x: Tensor, unit: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean and deviation of samples per channel or feature, in the shape in which they can be subtracted and divided by.

    Args:
        x: Samples `[n, ...]`.
        unit: What 1 in `x` stands for where it was standardised before. What does not vary is left in its first unit.
    """
    axes = (0,) if x.ndim == 2 else (0, *range(2, x.ndim))
    mean, std = x.mean(axes, keepdim=True), x.std(axes, correction=0, keepdim=True)
    before = torch.ones_like(std) if unit is None else unit.reshape(std.shape)
    return mean, torch.where(std * before > 1e-6, std, 1 / before)


def composed(mean: Tensor | None, std: Tensor | None, then_mean: Tensor, then_std: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and deviation that undo two standardisations together, one number a channel or feature."""
    then_mean, then_std = then_mean.flatten(), then_std.flatten()
    return (then_mean, then_std) if mean is None or std is None else (mean + std * then_mean, std * then_std)


def rescaled(x: Tensor, before: Scale, after: Scale) -> Tensor:
    """Samples in another scale than they are in.

    Args:
        x: Samples `[n, ...]`.
        before: The mean and deviation, one number a channel or feature, that they are standardised by.
        after: Those that they are to be standardised by.

    Returns:
        The samples themselves where both are the same, or where nothing is standardised.
    """
    if before[0] is None or before[1] is None or after[0] is None or after[1] is None:
        return x
    if torch.equal(before[0], after[0]) and torch.equal(before[1], after[1]):
        return x
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    mean, std = (after[0] - before[0]) / before[1], after[1] / before[1]
    return (x - mean.reshape(shape)).div_(std.reshape(shape))


def _check_finite(x: Tensor, source: str) -> None:
    if not bool(torch.isfinite(x).all()):
        raise ProtofedError(f"{source} hold NaN or infinity")


def _check_complete(parts: list[np.ndarray], name: str) -> None:
    """Refuse labels that leave out a class, such as labels that count from 1, or ids in the place of classes."""
    labels = np.unique(np.concatenate(parts))
    labels = labels[labels >= 0]  # negative labels are refused by `check`
    gaps = np.flatnonzero(labels != np.arange(len(labels)))
    if len(gaps):
        raise ProtofedError(
            f"{name}: labels run from {labels[0]} to {labels[-1]}, which would be {int(labels[-1]) + 1} classes, "
            f"and no sample has the label {gaps[0]}; "
            f"expected {len(labels)} classes from 0 to {len(labels) - 1}, or class_names for all"
        )


def _features(x: np.ndarray | Tensor, source: str) -> Tensor:
    if not isinstance(x, Tensor):
        x = np.asarray(x)
        if x.dtype.kind not in "uif":
            raise ProtofedError(f"{source} must be numbers, got {x.dtype}")
        x = torch.from_numpy(np.array(x, dtype=np.uint8 if x.dtype == np.uint8 else np.float32))
    if x.ndim < 2:
        raise ProtofedError(f"{source} must be [samples, ...], got shape {tuple(x.shape)}")
    if x.dtype == torch.bool or x.is_complex():
        raise ProtofedError(f"{source} must be numbers, got {x.dtype}")
    if x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.permute(0, 3, 1, 2).contiguous()
    if x.dtype != torch.uint8:
        return x.to(torch.float32)
    return (x.unsqueeze(1) if x.ndim == 3 else x).to(torch.float32) / 255


def _groups(
    train: np.ndarray | Tensor | None, test: np.ndarray | Tensor | None, name: str
) -> tuple[tuple[Tensor | None, Tensor | None], tuple[str, ...]]:
    """Group ids as integers, and their names. Text is numbered in alphabetical order, the same in both parts."""
    names: tuple[str, ...] = ()
    parts = [None if ids is None else np.asarray(ids) for ids in (train, test)]
    present = [ids for ids in parts if ids is not None]
    if any(ids.dtype.kind in "US" for ids in present):
        group_ids = np.unique(np.concatenate([ids.astype(str).ravel() for ids in present]))
        parts = [None if ids is None else np.searchsorted(group_ids, ids.astype(str)) for ids in parts]
        names = tuple(map(str, group_ids))
    for field_name, ids in zip(("group_train", "group_test"), parts, strict=True):
        if ids is not None and not np.issubdtype(ids.dtype, np.integer):
            raise ProtofedError(f"{name}: {field_name} must be integers or text, got {ids.dtype}")
    train_ids, test_ids = (None if ids is None else torch.from_numpy(ids.astype(np.int64)) for ids in parts)
    return (train_ids, test_ids), names


@dataclass(frozen=True)
class Samples:
    """Labelled samples: rows `index` of the shared tensors `x`, `y`; other rows of `y` may be `UNKNOWN`."""

    x: Tensor
    y: Tensor
    index: Tensor

    def __len__(self) -> int:
        return self.index.shape[0]

    def take(self, rows: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor]:
        """The samples and labels of some rows; by default of all."""
        selected = self.index[rows]
        return self.x[selected], self.y[selected]

    @property
    def labels(self) -> Tensor:
        """The labels of all rows."""
        return self.y[self.index]

    def subset(self, rows: Tensor) -> Samples:
        """Some of the rows as samples of their own."""
        return replace(self, index=self.index[rows])


@dataclass(frozen=True)
class Unlabelled:
    """Unlabelled samples. They have no `y`, so that a method cannot read their labels."""

    x: Tensor
    index: Tensor

    def __len__(self) -> int:
        return self.index.shape[0]

    def take(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The samples of some rows; by default of all."""
        return self.x[self.index[rows]]


@dataclass(frozen=True)
class ClientData:
    """One client's data: labelled samples for training, unlabelled ones, test samples, and validation samples if there
    are any. `triggered` are test samples with an attacker's trigger, labelled as the attacker wants them taken, and `unseen`
    samples of a domain that no client holds."""

    labelled: Samples
    test: Samples
    classes: Tensor  # bool [C]: the classes in its training data
    unlabelled: Unlabelled | None = None
    validation: Samples | None = None
    triggered: Samples | None = None
    unseen: Samples | None = None

    @cached_property
    def class_bytes(self) -> bytes:
        """The mask of classes as bytes, which are the same for clients with the same classes."""
        return bytes(self.classes.cpu().numpy())


def name_of(client: int, names: Sequence[str]) -> str:
    """The name of a client among `names`, or its number where it has none.

    >>> name_of(1, ["hall", "kitchen"]), name_of(3, ())
    ('kitchen', 'client 3')
    """
    return names[client] if 0 <= client < len(names) else f"client {client}"


@dataclass(frozen=True)
class FederatedData:
    """All data of a federation. `held_back` has the labels of unlabelled samples, and is for measuring only.

    A label held back is `UNKNOWN` where the data set has none. `newcomers` are held out of the federation, to join it
    when it has finished. `kind`, `flips` and `columns` are those of the data set. `mean` and `std` are the statistics of
    all training rows by which samples are standardised; where each client's own are taken, these are the rows of
    `site_mean` and `site_std`, the newcomers' after the clients', and `scaling(client)` gives what holds for a client. The
    central test set is in the scale of all. `remarks` is what a person should know before a run, one sentence each.
    """

    clients: list[ClientData]
    num_classes: int
    sample_shape: tuple[int, ...]
    central_test: Samples | None = None
    server: Samples | None = None
    held_back: list[Tensor | None] = field(default_factory=list)
    class_names: tuple[str, ...] = ()
    name: str = ""
    class_values: tuple[float, ...] = ()
    client_names: tuple[str, ...] = ()
    mean: Tensor | None = None
    std: Tensor | None = None
    kind: SampleKind = "auto"
    flips: bool | None = None
    augmentation: Augmentation | None = None
    newcomers: list[ClientData] = field(default_factory=list)
    newcomer_names: tuple[str, ...] = ()
    site_mean: Tensor | None = None
    site_std: Tensor | None = None
    columns: Columns | None = None
    remarks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return federated_line(self)

    def _repr_html_(self) -> str:
        return federated_html(self)

    def name_of(self, client: int) -> str:
        """The name of a client: its site's, where clients are sites with names, or its number, `client 3`."""
        return name_of(client, self.client_names)

    @property
    def names(self) -> list[str]:
        """The names of all clients."""
        return [self.name_of(client) for client in range(len(self.clients))]

    def scaling(self, client: int) -> tuple[Tensor | None, Tensor | None]:
        """The mean and the deviation by which a client's samples were standardised, one number a channel or feature.

        `x * std + mean` is the scale that the data came in. Both are None where samples are not standardised.
        """
        if self.site_mean is None or self.site_std is None:
            return self.mean, self.std
        return self.site_mean[client], self.site_std[client]

    def central_for(self, client: int) -> Samples | None:
        """The central test set in a client's own scale."""
        central = self.central_test
        if central is None or self.site_mean is None or self.site_std is None or self.mean is None or self.std is None:
            return central
        x, y = central.take()
        x = rescaled(x, (self.mean, self.std), self.scaling(client))
        return Samples(x, y, torch.arange(len(y), device=y.device))

    def to(self, device: torch.device | str) -> FederatedData:
        """The data on a device."""
        return self.mapped(lambda tensor: tensor.to(device))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> FederatedData:
        """The data with each tensor changed by a function. Tensors that clients share are still shared."""
        changed: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in changed:
                    changed[id(value)] = change(value)
                return changed[id(value)]
            if isinstance(value, list):
                return [move(v) for v in value]
            if is_dataclass(value) and not isinstance(value, type):
                return replace(value, **{f.name: move(getattr(value, f.name)) for f in fields(value)})
            return value

        return move(self)

    def class_counts(self, unlabelled: bool = False) -> Tensor:
        """The numbers of labelled training samples `[clients, classes]`, with `unlabelled` those of unlabelled samples too.

        The true classes of unlabelled samples are read from `held_back`, so these numbers are for display only. Samples
        whose class is `UNKNOWN` are not counted.
        """
        counts = torch.stack([torch.bincount(c.labelled.labels, minlength=self.num_classes) for c in self.clients])
        if unlabelled:
            for client, labels in enumerate(self.held_back):
                if labels is not None:
                    counts[client] += torch.bincount(labels[labels != UNKNOWN], minlength=self.num_classes)
        return counts
