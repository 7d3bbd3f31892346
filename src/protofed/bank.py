"""The prototype bank: one mean embedding per class and how many samples stand behind it.

A class is known where its count is above 0. Unknown classes have a row of zeros that nothing may read: every function
masks by `known`. A stack of banks (one per client, per helper, per layer) is a bank with leading axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

TINY = 1e-12
LARGE = 2**17  # numbers of a bank from which unknown rows are not held where they need not be
MANY = 512  # classes from which class means may be sums by class and not a matrix product


def single(x: Tensor) -> Tensor:
    """Half precision as single precision, because the square of a small number would be 0 in float16.

    Args:
        x: any tensor.

    Returns:
        the tensor in float32 where it was in float16 or bfloat16, else the tensor itself.

    >>> single(torch.zeros(2, dtype=torch.float16)).dtype
    torch.float32
    """
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit(x: Tensor) -> Tensor:
    """Put rows on the unit sphere. A row of zeros stays zero, and its gradient stays finite.

    Args:
        x: `[..., d]`.

    Returns:
        `[..., d]`, of the same dtype.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    wide = single(x)
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True).clamp_min(TINY))).to(x.dtype)


@dataclass(frozen=True)
class PrototypeBank:
    """One prototype for each class: the mean embedding, and how many samples stand behind it.

    Attributes:
        means: `[..., C, d]`, zeros where a class is unknown.
        counts: `[..., C]`. They are floating, because a weighted mean may stand behind a prototype.

    >>> bank = PrototypeBank.from_embeddings(torch.tensor([[0.0, 2.0], [2.0, 2.0]]), torch.tensor([1, 1]), num_classes=3)
    >>> bank.known.tolist(), bank.means[1].tolist()
    ([False, True, False], [1.0, 2.0])
    """

    means: Tensor
    counts: Tensor

    @property
    def known(self) -> Tensor:
        """`[..., C]`: whether any sample stands behind a class's prototype."""
        return self.counts > 0

    @property
    def num_classes(self) -> int:
        """The number of classes C, known or not."""
        return self.means.shape[-2]

    @property
    def dim(self) -> int:
        """The width d of the embeddings."""
        return self.means.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `[..., C, d]` of the means."""
        return tuple(self.means.shape)

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The means and counts that are held in memory: all rows, or in a `SparseBank` the known ones."""
        return self.means, self.counts

    @property
    def known_means(self) -> Tensor:
        """The prototypes of the known classes, one after another `[number, d]`."""
        return self.means[self.known]

    def compact(self) -> PrototypeBank:
        """The same bank; one of many classes, of which it knows few, as a `SparseBank`."""
        if self.means.ndim != 2 or self.means.numel() < LARGE:
            return self
        rows = self.counts.nonzero().squeeze(1)
        return (
            self
            if 2 * len(rows) > self.num_classes
            else SparseBank(rows, self.means[rows], self.counts[rows], self.num_classes)
        )

    @classmethod
    def empty(cls, num_classes: int, dim: int, like: Tensor | None = None) -> PrototypeBank:
        """A bank that knows no class.

        Args:
            num_classes: C.
            dim: d.
            like: a tensor whose dtype and device the bank gets; without it float32 on the CPU.

        >>> PrototypeBank.empty(3, 2).known.any().item()
        False
        """
        source = torch.zeros(()) if like is None else like
        return cls(source.new_zeros(num_classes, dim), source.new_zeros(num_classes))

    @classmethod
    def from_embeddings(cls, z: Tensor, y: Tensor, num_classes: int, weight: Tensor | None = None) -> PrototypeBank:
        """The class means of embeddings.

        It is a matrix product in place of a scatter; with many classes, of which most have no sample, it is a sum by
        class. Both run under `vmap` and have a gradient.

        Args:
            z: embeddings `[n, d]`.
            y: labels `[n]`.
            num_classes: C.
            weight: `[n]`, how much each sample counts; 1 where it is not given.

        Returns:
            a bank whose counts are the sums of the weights.
        """
        if z.ndim != 2 or y.ndim != 1 or z.shape[0] != y.shape[0]:
            raise ValueError(f"expected z [n, d] and y [n], got {tuple(z.shape)} and {tuple(y.shape)}")
        if num_classes > max(MANY, len(y)):
            n = z.new_ones(len(y)) if weight is None else weight.to(z.dtype)
            counts = z.new_zeros(num_classes).index_add(0, y, n)
            summed = z.new_zeros(num_classes, z.shape[1]).index_add(0, y, z if weight is None else n[:, None] * z)
            return cls(summed / torch.where(counts > 0, counts, torch.ones_like(counts))[:, None], counts)
        member = (y[:, None] == torch.arange(num_classes, device=y.device)).to(z.dtype)
        if weight is not None:
            member = member * weight[:, None].to(z.dtype)
        counts = member.sum(0)
        means = (member.T @ z) / torch.where(counts > 0, counts, torch.ones_like(counts))[:, None]
        return cls(means, counts)

    @classmethod
    def stack(cls, banks: Sequence[PrototypeBank]) -> PrototypeBank:
        """One bank with a leading axis, from banks of one shape."""
        if not banks:
            raise ValueError("cannot stack an empty list of banks")
        return cls(torch.stack([b.means for b in banks]), torch.stack([b.counts for b in banks]))

    def __getitem__(self, index: int | slice | Tensor) -> PrototypeBank:
        """A bank, or a smaller stack, from the leading axis of a stack."""
        if self.means.ndim < 3:
            raise IndexError("a single bank has no leading axis to index; use .means and .counts")
        return PrototypeBank(self.means[index], self.counts[index])

    def joined(self, other: PrototypeBank) -> PrototypeBank:
        """The stack of this stack's banks and those of `other`."""
        return PrototypeBank(torch.cat([self.means, other.means]), torch.cat([self.counts, other.counts]))

    def normalised(self) -> PrototypeBank:
        """The same bank with its known prototypes on the unit sphere."""
        return replace(self, means=unit(self.means))

    def combine(self, other: PrototypeBank) -> PrototypeBank:
        """The bank of both sets of samples together: means weighted by their counts.

        >>> one, three = (PrototypeBank(torch.tensor([[v]]), torch.tensor([n])) for v, n in ((0.0, 1.0), (4.0, 3.0)))
        >>> one.combine(three).means.item()
        3.0
        """
        counts = self.counts + other.counts
        total = self.means * self.counts[..., None] + other.means * other.counts[..., None]
        return PrototypeBank(total / torch.where(counts > 0, counts, torch.ones_like(counts))[..., None], counts)

    def filled_from(self, other: PrototypeBank) -> PrototypeBank:
        """The same bank, with the prototypes and counts of `other` for classes that are unknown here."""
        known = self.known
        return PrototypeBank(
            torch.where(known[..., None], self.means, other.means), torch.where(known, self.counts, other.counts)
        )

    def restricted(self, keep: Tensor) -> PrototypeBank:
        """The same bank, in which only the classes of the boolean mask `keep[..., C]` stay known."""
        keep = keep.to(self.counts.dtype)
        return PrototypeBank(self.means * keep[..., None], self.counts * keep)

    def distances(self, z: Tensor, metric: str = "squared") -> Tensor:
        """The distance of embeddings to each prototype.

        Args:
            z: embeddings `[n, d]`.
            metric: `"squared"` (squared Euclidean), `"euclidean"` or `"cosine"`.

        Returns:
            `[..., n, C]`, infinite where a class is unknown.

        >>> bank = PrototypeBank(torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([1.0, 0.0]))
        >>> bank.distances(torch.tensor([[3.0, 4.0]]))
        tensor([[25., inf]])
        """
        if metric == "cosine":
            d = 1 - unit(z) @ unit(self.means).transpose(-1, -2)
        elif metric in ("squared", "euclidean"):
            z, p = single(z), single(self.means)
            d = (
                torch.sub((z * z).sum(-1)[..., :, None], z @ p.transpose(-1, -2), alpha=2)
                + (p * p).sum(-1)[..., None, :]
            )
            d = d.clamp_min(0)
            d = torch.sqrt(d + TINY) if metric == "euclidean" else d
        else:
            raise ValueError(f"metric must be squared, euclidean or cosine, not {metric!r}")
        return torch.where(self.known[..., None, :], d, float("inf"))

    def nearest(self, z: Tensor, metric: str = "squared") -> Tensor:
        """The nearest known class of each embedding.

        Args:
            z: embeddings `[n, d]`.
            metric: as in `distances`.

        Returns:
            `[..., n]`, class numbers.
        """
        return self.distances(z, metric).argmin(-1)


class SparseBank(PrototypeBank):
    """A bank of which the known rows alone are held. Whoever reads `means` or `counts` gets whole tensors, made for it.

    >>> bank = SparseBank(torch.tensor([2]), torch.ones(1, 4), torch.tensor([5.0]), num_classes=3)
    >>> bank.counts.tolist(), bank.means.shape
    ([0.0, 0.0, 5.0], torch.Size([3, 4]))
    """

    def __init__(self, rows: Tensor, row_means: Tensor, row_counts: Tensor, num_classes: int) -> None:
        """
        Args:
            rows: the numbers of the known classes `[k]`, rising.
            row_means: their prototypes `[k, d]`.
            row_counts: their counts `[k]`, none of which is 0.
            num_classes: C.
        """
        values = {"rows": rows, "row_means": row_means, "row_counts": row_counts, "classes": num_classes}
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the class is frozen

    rows: Tensor
    row_means: Tensor
    row_counts: Tensor
    classes: int

    @property
    def means(self) -> Tensor:
        """`[C, d]`, zeros where a class is unknown."""
        return self.row_means.new_zeros(self.shape).index_copy_(0, self.rows, self.row_means)

    @property
    def counts(self) -> Tensor:
        """`[C]`."""
        return self.row_counts.new_zeros(self.classes).index_copy_(0, self.rows, self.row_counts)

    @property
    def num_classes(self) -> int:
        """The number of classes C, known or not."""
        return self.classes

    @property
    def dim(self) -> int:
        """The width d of the embeddings."""
        return self.row_means.shape[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `[C, d]` of the means."""
        return self.classes, self.dim

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        """The means and counts of the known rows."""
        return self.row_means, self.row_counts

    @property
    def known_means(self) -> Tensor:
        """The prototypes of the known classes."""
        return self.row_means

    def compact(self) -> PrototypeBank:
        """The same bank."""
        return self

    def normalised(self) -> PrototypeBank:
        """The same bank with its prototypes on the unit sphere."""
        return SparseBank(self.rows, unit(self.row_means), self.row_counts, self.classes)


pytree.register_dataclass(PrototypeBank)
