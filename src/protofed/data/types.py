"""The types of data in protofed: tensors in memory, and indices into them.

Clients do not copy the data set. Each set of samples is a list of row numbers into the shared tensors, so a thousand
clients cost a thousand index lists.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..errors import ProtofedError
from .augment import Augmentation

SampleKind = Literal["auto", "image", "csi", "features", "tokens"]
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
    ) -> Dataset:
        """Check and convert a user's own arrays.

        Features keep their scale, but 8-bit images are scaled to 0 … 1. Images come out channels first: `[n, H, W, 3]`
        is turned, and 8-bit `[n, H, W]` gets its one channel. Group ids may be integers or text. Where neither the
        number of classes nor their names are given, every class from 0 to the largest label must have a sample.

        Example: `Dataset.from_arrays(x, y, x_test, y_test, name="mine")`
        """
        labels = [_labels(y_train, f"{name}: y_train")]
        if y_test is not None:
            labels.append(_labels(y_test, f"{name}: y_test"))
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

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.x_train.shape[1:])

    def standardised(self) -> Dataset:
        """The data set with mean 0 and standard deviation 1 per channel (images) or feature (flat samples) of the
        training part."""
        if not self.x_train.is_floating_point():
            return self  # tokens
        axes = (0,) if self.x_train.ndim == 2 else (0, *range(2, self.x_train.ndim))
        mean = self.x_train.mean(axes, keepdim=True)
        std = self.x_train.std(axes, correction=0, keepdim=True)
        std = torch.where(std > 1e-6, std, torch.ones_like(std))
        test, unlabelled = (None if x is None else (x - mean).div_(std) for x in (self.x_test, self.x_unlabelled))
        whole_mean, whole_std = mean.flatten(), std.flatten()
        if self.mean is not None and self.std is not None:  # these undo both standardisations together
            whole_mean, whole_std = self.mean + self.std * whole_mean, self.std * whole_std
        return replace(
            self,
            x_train=(self.x_train - mean).div_(std),
            x_test=test,
            x_unlabelled=unlabelled,
            mean=whole_mean,
            std=whole_std,
        )


def _check_finite(x: Tensor, source: str) -> None:
    if not bool(torch.isfinite(x).all()):
        raise ProtofedError(f"{source} hold NaN or infinity")


def _labels(y: np.ndarray | Tensor, source: str) -> np.ndarray:
    array = np.asarray(y)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ProtofedError(f"{source} must be a list of integer labels, got shape {array.shape} of {array.dtype}")
    if array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ProtofedError(f"{source} has the label {int(array.max())}; expected small integers from 0 on")
    return array.astype(np.int64)


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
        return len(self.index)

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
        return len(self.index)

    def take(self, rows: Tensor | slice = slice(None)) -> Tensor:
        """The samples of some rows; by default of all."""
        return self.x[self.index[rows]]


@dataclass(frozen=True)
class ClientData:
    """One client's data: labelled samples for training, unlabelled ones, test samples, and validation samples if there
    are any. `triggered` are test samples with an attacker's trigger, labelled as the attacker wants them taken."""

    labelled: Samples
    test: Samples
    classes: Tensor  # bool [C]: the classes in its training data
    unlabelled: Unlabelled | None = None
    validation: Samples | None = None
    triggered: Samples | None = None


@dataclass(frozen=True)
class FederatedData:
    """All data of a federation. `held_back` has the labels of unlabelled samples, and is for measuring only.

    A label held back is `UNKNOWN` where the data set has none. `mean`, `std`, `kind` and `flips` are those of the data set.
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

    def to(self, device: torch.device | str) -> FederatedData:
        """The data on a device. Tensors that clients share are still shared."""
        tensors_on_device: dict[int, Tensor] = {}

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return tensors_on_device.setdefault(id(value), value.to(device))
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
