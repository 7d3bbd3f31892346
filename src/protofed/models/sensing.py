"""The networks for Wi-Fi sensing of the SenseFi benchmark (Yang et al., Patterns 2023): LeNet, GRU, BiLSTM and ViT.

Samples are windows `[antennas, time, subcarriers]`. Where a benchmark's network takes them in another form (antennas beside
each other in one matrix, or time as channels), it brings them into it, so that it is the same network. ResNet-18 is
`resnet18`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import ProtofedError
from .base import Classifier, Staged, at_least, image_shape, register

UT_HAR, NTU_FI, WIDAR = "ut-har", "ntu-fi", "widar"
_PLANS: dict[tuple[int, ...], str] = {
    (3, 250, 30): UT_HAR,
    (1, 250, 90): UT_HAR,
    (3, 500, 114): NTU_FI,
    (1, 22, 400): WIDAR,
    (22, 20, 20): WIDAR,
}
"""The benchmark's data set that windows of a shape come from."""
_PATCHES = {UT_HAR: (50, 18), NTU_FI: (25, 9), WIDAR: (2, 40)}


class Joined(nn.Module):
    """The numbers of each moment in one row: `[n, antennas, time, subcarriers]` to `[n, time, antennas · subcarriers]`."""

    def forward(self, x: Tensor) -> Tensor:
        """The rows of a batch."""
        return x.transpose(1, 2).flatten(2)


class Reshaped(nn.Module):
    """Windows in another shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        """A batch in the shape."""
        return x.reshape(len(x), *self.shape)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of moments of a window, and of numbers at each."""
    antennas, time, tones = image_shape(name, shape)
    return (22, 400) if (antennas, time, tones) == (22, 20, 20) else (time, antennas * tones)


def _rows(shape: tuple[int, ...]) -> nn.Module:
    return Reshaped(22, 400) if tuple(shape) == (22, 20, 20) else Joined()


@register("lenet")
@dataclass(frozen=True)
class LeNet:
    """SenseFi's LeNet for windows of CSI: three convolutions, then a linear layer to the embedding."""

    name: ClassVar[str]
    embedding: int = 128

    def __post_init__(self) -> None:
        at_least("lenet", 1, embedding=self.embedding)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for windows of one shape."""
        antennas, time, tones = image_shape("lenet", sample_shape)
        plan = _PLANS.get((antennas, time, tones), "")
        layers = _LAYERS[plan](antennas) if plan else _any_size(antennas, time, tones)
        if plan == UT_HAR and antennas == 3:
            layers = [Joined(), Reshaped(1, 250, 90), *layers]
        if plan == WIDAR and antennas == 1:
            layers = [Reshaped(22, 20, 20), *layers]
        size = 96 * (6 * 4 if plan == NTU_FI else 4 * 4)  # what the convolutions leave of a window
        cut = next(i for i, layer in enumerate(layers) if isinstance(layer, nn.ReLU)) + 1
        tail = [nn.Flatten(), nn.Linear(size, self.embedding), nn.ReLU()]
        names = OrderedDict((f"layer{i}", layer) for i, layer in enumerate([*layers, *tail]))
        return Classifier(Staged(names, cut=cut), self.embedding, num_classes)


def _ut_har(antennas: int) -> list[nn.Module]:
    return [
        *(nn.Conv2d(1, 32, 7, (3, 1)), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, (5, 4), 2, padding=(1, 0)), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(2)),
    ]


def _ntu_fi(antennas: int) -> list[nn.Module]:
    """The benchmark's windows have subcarriers before time, so its kernels are turned."""
    return [
        *(nn.Conv2d(antennas, 32, (23, 15), 9), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, (3, 1)), nn.ReLU()),
        *(nn.Conv2d(64, 96, (3, 7), (3, 1)), nn.ReLU()),
    ]


def _widar(antennas: int) -> list[nn.Module]:
    return [
        *(nn.Conv2d(22, 32, 6, 2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.Conv2d(64, 96, 3), nn.ReLU()),
    ]


_LAYERS = {UT_HAR: _ut_har, NTU_FI: _ntu_fi, WIDAR: _widar}


def _any_size(antennas: int, time: int, tones: int) -> list[nn.Module]:
    """The same three convolutions for windows of another size: strides bring them to about 64, and a mean to 4 × 4."""
    strides = (max(1, round(time / 64)), max(1, round(tones / 64)))
    return [
        *(nn.Conv2d(antennas, 32, 7, strides, padding=3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)),
    ]


class Recurrent(nn.Module):
    """A recurrent layer over the moments of a window; the embedding is its last state."""

    def __init__(self, rows: nn.Module, layer: nn.GRU | nn.LSTM) -> None:
        super().__init__()
        self.rows = rows
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """The last state of each window; of two directions that of the one that runs backwards."""
        _, state = self.layer(self.rows(x))
        return (state[0] if isinstance(state, tuple) else state)[-1]


@register("gru")
@dataclass(frozen=True)
class GRU:
    """SenseFi's GRU: one layer over time; the embedding is its last state."""

    name: ClassVar[str]
    embedding: int = 64

    def __post_init__(self) -> None:
        at_least("gru", 1, embedding=self.embedding)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for windows of one shape."""
        _, width = _moments("gru", sample_shape)
        layer = nn.GRU(width, self.embedding, batch_first=True)
        return Classifier(Recurrent(_rows(sample_shape), layer), self.embedding, num_classes, owner="gru")


@register("bilstm")
@dataclass(frozen=True)
class BiLSTM:
    """SenseFi's BiLSTM: one layer over time in both directions; the embedding is the last state of the backward one."""

    name: ClassVar[str]
    embedding: int = 64

    def __post_init__(self) -> None:
        at_least("bilstm", 1, embedding=self.embedding)

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for windows of one shape."""
        _, width = _moments("bilstm", sample_shape)
        layer = nn.LSTM(width, self.embedding, batch_first=True, bidirectional=True)
        return Classifier(Recurrent(_rows(sample_shape), layer), self.embedding, num_classes, owner="bilstm")


class Patches(nn.Module):
    """Rectangles of the matrix `[time, antennas · subcarriers]` as tokens, after a token for the whole."""

    def __init__(self, rows: nn.Module, size: tuple[int, int], patch: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.project = nn.Conv2d(1, dim, patch, patch)
        count = (size[0] // patch[0]) * (size[1] // patch[1])
        self.whole = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(count + 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens `[n, patches + 1, dim]`."""
        tokens = self.project(self.rows(x).unsqueeze(1)).flatten(2).transpose(1, 2)
        return torch.cat([self.whole.expand(len(x), 1, -1), tokens], dim=1) + self.position


class Block(nn.Module):
    """Attention and a perceptron, each after a normalisation and added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """The tokens `[n, tokens, dim]` after the block."""
        n, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(n, tokens, dim))
        return x + self.feed(self.norm2(x))


class MeanOfTokens(nn.Module):
    """The normalised mean of all tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """The embedding of a batch of tokens."""
        return self.norm(x.mean(dim=1))


@register("vit")
@dataclass(frozen=True)
class ViT:
    """SenseFi's vision transformer: one block over patches of time × subcarriers, then the mean of its tokens."""

    name: ClassVar[str]
    patch: tuple[int, int] | None = None
    """The size of a patch in moments and columns; by default the benchmark's, or a fifth of either side."""
    heads: int = 5
    depth: int = 1

    def __post_init__(self) -> None:
        at_least("vit", 1, heads=self.heads, depth=self.depth, patch=min(self.patch or (1,)))

    def build(self, sample_shape: tuple[int, ...], num_classes: int) -> Classifier:
        """Build the network, with random initial weights, for windows of one shape."""
        size = _moments("vit", sample_shape)
        patch = self.patch or self._usual(tuple(sample_shape), size)
        if any(side % part for side, part in zip(size, patch, strict=True)):
            raise ProtofedError(
                f"model 'vit': patch={list(patch)} does not divide windows of {size[0]} moments × {size[1]} columns"
            )
        dim = patch[0] * patch[1]
        heads = next(h for h in range(min(self.heads, dim), 0, -1) if dim % h == 0)
        encoder = nn.Sequential(
            Patches(_rows(sample_shape), size, patch, dim),
            *(Block(dim, heads) for _ in range(self.depth)),
            MeanOfTokens(dim),
        )
        return Classifier(encoder, dim, num_classes, owner="vit")

    def _usual(self, shape: tuple[int, ...], size: tuple[int, int]) -> tuple[int, int]:
        """The benchmark's patches, or for another shape the largest that divide it into at least five on each side."""
        plan = _PLANS.get(shape)
        if plan is not None:
            return _PATCHES[plan]
        time, columns = (next(p for p in range(max(side // 5, 1), 0, -1) if side % p == 0) for side in size)
        return time, columns
