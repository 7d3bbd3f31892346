"""Feature shift: clients whose samples look different, because each has a camera, a sensor or a hand of its own.

`shift="rotation?most=90"` gives every client one fixed look, drawn from a stream of its own, and shows it all its
samples that way: those it trains on, its validation part and its own view of the test set. The server's samples and the
central test set stay as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ProtofedError
from ..registry import Registry
from ..seeds import numpy_stream
from .types import ClientData, FederatedData, SampleKind, Samples, Unlabelled, composed, statistics

Look = Callable[[Tensor], Tensor]


class Samplewise(NamedTuple):
    """What the samples are that a look is drawn for."""

    shape: tuple[int, ...]
    kind: SampleKind
    tokens: bool = False

    @property
    def images(self) -> bool:
        """Whether samples are pictures in grey or colour."""
        return not self.tokens and len(self.shape) == 3 and self.shape[0] in (1, 3) and self.kind in ("auto", "image")

    @property
    def windows(self) -> bool:
        """Whether samples are windows of CSI `[antennas, time, subcarriers]`."""
        return not self.tokens and len(self.shape) == 3 and not self.images

    def __str__(self) -> str:
        return f"{'token ids' if self.tokens else 'samples'} of shape {list(self.shape)}"


@dataclass(frozen=True)
class Shift:
    """How clients' samples differ. Each client's `look` is drawn once and is the same for all its samples."""

    registry: ClassVar[Registry[Shift]] = Registry("shift")
    name: ClassVar[str]
    in_levels: ClassVar[bool] = True
    """Whether a look is a function of images from black, 0, to white, 1; otherwise of samples as a network sees them."""

    def check(self, samples: Samplewise) -> None:
        """Refuse samples that cannot be shifted in this way. By default images are needed."""
        if not samples.images:
            raise ProtofedError(f"shift={self.name} is for images [1 or 3, height, width]; the data has {samples}")

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        """Draw one client's look.

        Args:
            samples: What the samples are.
            rng: The client's own stream.

        Returns:
            A function of samples `[n, ...]` that returns them as this client sees them, in the same shape.
        """
        raise TypeError(f"{type(self).__name__} defines no look")


register = Shift.registry.register


@register("rotation")
@dataclass(frozen=True)
class Rotation(Shift):
    """Each client's images are turned by an angle of its own, up to `most` degrees to either side."""

    most: float = 90.0

    def __post_init__(self) -> None:
        _between(0, self.most, 180, "most")

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        _, height, width = samples.shape
        angle = math.radians(rng.uniform(-self.most, self.most))
        cos, sin = math.cos(angle), math.sin(angle)
        matrix = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])

        def turned(x: Tensor) -> Tensor:
            grid = F.affine_grid(matrix.to(x).expand(len(x), 2, 3), list(x.shape), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)  # black comes in from outside

        return turned


@register("colour", "color")
@dataclass(frozen=True)
class Colour(Shift):
    """Each client's images have a tint: every channel is scaled by 1 ± `most` and moved by ± `most` / 2."""

    most: float = 0.5

    def __post_init__(self) -> None:
        _between(0, self.most, 1, "most")

    def check(self, samples: Samplewise) -> None:
        super().check(samples)
        if samples.shape[0] != 3:
            raise ProtofedError("shift=colour needs images of three channels; image_channels=3 gives grey ones three")

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        gain = _column(1 + rng.uniform(-self.most, self.most, 3))
        offset = _column(rng.uniform(-self.most, self.most, 3) / 2)
        return lambda x: (x * gain.to(x) + offset.to(x)).clamp(0, 1)


@register("style")
@dataclass(frozen=True)
class Style(Shift):
    """Each client's images have a contrast, a brightness and a blur of their own, and some clients' are negatives.

    Contrast is scaled by a factor from e^−most to e^most about the middle grey, brightness moved by ± `most` / 2, and
    the blur is Gaussian of up to 2 · `most` pixels. A client's images are inverted with the probability `inverted`.
    """

    most: float = 0.5
    inverted: float = 0.25

    def __post_init__(self) -> None:
        _between(0, self.most, 2, "most")
        _between(0, self.inverted, 1, "inverted")

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        contrast = math.exp(rng.uniform(-self.most, self.most))
        brightness = rng.uniform(-self.most, self.most) / 2
        kernel = _gaussian(rng.uniform(0, 2 * self.most))
        negative = rng.random() < self.inverted

        def styled(x: Tensor) -> Tensor:
            x = 1 - x if negative else x
            return ((_blurred(x, kernel) - 0.5) * contrast + 0.5 + brightness).clamp(0, 1)

        return styled


@register("noise")
@dataclass(frozen=True)
class Noise(Shift):
    """Each client's samples have Gaussian noise, of a deviation of its own from 0 to `most` (that of the data is 1)."""

    in_levels: ClassVar[bool] = False

    most: float = 0.5

    def __post_init__(self) -> None:
        _between(0, self.most, math.inf, "most")

    def check(self, samples: Samplewise) -> None:
        _refuse_tokens(self, samples)

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        deviation = rng.uniform(0, self.most)
        stream = torch.Generator().manual_seed(int(rng.integers(2**63)))
        return lambda x: x + deviation * torch.randn(x.shape, generator=stream).to(x)


@register("gain")
@dataclass(frozen=True)
class Gain(Shift):
    """Each client's sensors are calibrated differently: every feature is scaled by 1 ± `most` and moved by ± `most`.

    Of CSI windows, every subcarrier of every antenna is. Deviations of standardised data are 1.
    """

    in_levels: ClassVar[bool] = False

    most: float = 0.5

    def __post_init__(self) -> None:
        _between(0, self.most, math.inf, "most")

    def check(self, samples: Samplewise) -> None:
        _refuse_tokens(self, samples)
        if samples.images:
            raise ProtofedError(
                f"shift=gain is for features and CSI windows; the data has images {list(samples.shape)}"
            )

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        shape = (samples.shape[0], 1, samples.shape[2]) if samples.windows else samples.shape
        gain = torch.from_numpy(1 + rng.uniform(-self.most, self.most, shape))
        offset = torch.from_numpy(rng.uniform(-self.most, self.most, shape))
        return lambda x: x * gain.to(x) + offset.to(x)


@register("permutation")
@dataclass(frozen=True)
class Permutation(Shift):
    """Each client's sensor is wired differently: a `share` of the pixels or features change places, the same in all.

    The channels of a pixel stay together. Of CSI windows, subcarriers change places and time does not.
    """

    in_levels: ClassVar[bool] = False

    share: float = 1.0

    def __post_init__(self) -> None:
        _between(0, self.share, 1, "share")

    def check(self, samples: Samplewise) -> None:
        _refuse_tokens(self, samples)

    def look(self, samples: Samplewise, rng: np.random.Generator) -> Look:
        width = samples.shape[-1] if samples.windows else math.prod(samples.shape[1:] or samples.shape)
        order = np.arange(width)
        moved = rng.choice(width, round(self.share * width), replace=False)
        order[np.sort(moved)] = moved
        wires = torch.from_numpy(order)
        if samples.windows or len(samples.shape) == 1:
            return lambda x: x[..., wires.to(x.device)]
        return lambda x: x.flatten(2)[..., wires.to(x.device)].reshape(x.shape)


def _between(low: float, value: float, high: float, key: str) -> None:
    if not low <= value <= high or math.isinf(value):
        most = f" and at most {high:g}" if math.isfinite(high) else ""
        raise ValueError(f"{key} must be at least {low:g}{most}, got {value}")


def _refuse_tokens(shift: Shift, samples: Samplewise) -> None:
    if samples.tokens:
        raise ProtofedError(f"shift={shift.name} is for numbers, and the data has {samples}")


def _column(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values)[:, None, None]


def _gaussian(sigma: float) -> Tensor:
    """The weights of a Gaussian blur over neighbouring pixels."""
    reach = math.ceil(3 * sigma)
    weights = torch.exp(-(torch.arange(-reach, reach + 1.0) ** 2) / (2 * max(sigma, 1e-6) ** 2))
    return weights / weights.sum()


def _blurred(x: Tensor, kernel: Tensor) -> Tensor:
    """Images blurred along both axes; at the border the last pixel is repeated."""
    reach, channels = len(kernel) // 2, x.shape[1]
    weights = kernel.to(x).expand(channels, 1, -1)
    padded = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    rows = F.conv2d(padded, weights[:, :, None, :], groups=channels)
    return F.conv2d(rows, weights[:, :, :, None], groups=channels)


class _Levels(NamedTuple):
    """The way from samples as a network sees them to levels from 0 to 1, and back."""

    scale: Tensor
    offset: Tensor

    @classmethod
    def of(cls, data: FederatedData) -> list[_Levels]:
        """Of each client: standardisation is undone; images whose values are not 0 to 1 then are scaled by their range."""
        channels = data.sample_shape[0]
        ways, ends = [], []
        for client, own in enumerate(data.clients if data.site_mean is not None else data.clients[:1]):
            mean, std = data.scaling(client)
            x = own.labelled.x if data.site_mean is None else torch.cat([p.x[p.index] for p in _training(own)])
            scale = x.new_ones(channels) if std is None else std.to(x).expand(channels)
            offset = x.new_zeros(channels) if mean is None else mean.to(x).expand(channels)
            ways.append((scale, offset))
            ends += [end * scale + offset for end in (x.amin((0, 2, 3)), x.amax((0, 2, 3)))]
        bottom, top = map(float, torch.stack(ends).aminmax())
        if bottom < -1e-3 or top > 1 + 1e-3:
            ways = [(scale / (top - bottom), (offset - bottom) / (top - bottom)) for scale, offset in ways]
        levels = [cls(scale[:, None, None], offset[:, None, None]) for scale, offset in ways]
        return levels if len(levels) > 1 else levels * len(data.clients)

    def through(self, look: Look) -> Look:
        """A look at levels as one at samples as a network sees them."""
        return lambda x: (look(x * self.scale + self.offset) - self.offset) / self.scale


def shifted(data: FederatedData, shift: Shift, seed: int) -> FederatedData:
    """The data as each client sees it.

    Training tensors are copied once, because no two clients hold one row of them. The clients' views of the test set
    are rows of one new tensor, which holds for each client the rows that it is tested on.

    Args:
        data: The data of all clients.
        shift: How clients differ.
        seed: The run's seed; client c's look is drawn from the stream `"shift", c`.

    Returns:
        The same data with other samples. `shifted(data, Rotation(most=45), seed=1)`
    """
    x = data.clients[0].labelled.x
    samples = Samplewise(data.sample_shape, data.kind, not x.is_floating_point())
    shift.check(samples)
    looks = [shift.look(samples, numpy_stream(seed, "shift", client)) for client in range(len(data.clients))]
    if shift.in_levels:
        looks = [levels.through(look) for levels, look in zip(_Levels.of(data), looks, strict=True)]
    copies: dict[int, Tensor] = {}
    clients = []
    tests: list[Tensor] = []
    for client, look in zip(data.clients, looks, strict=True):
        parts = {name: getattr(client, name) for name in ("labelled", "unlabelled", "validation")}
        for name, part in parts.items():
            if part is not None:
                if id(part.x) not in copies:
                    copies[id(part.x)] = part.x.clone()
                if len(part):
                    copies[id(part.x)][part.index] = look(part.x[part.index])
                parts[name] = replace(part, x=copies[id(part.x)])
        clients.append(replace(client, **parts))
        tests.append(look(client.test.take()[0]))
    if data.site_mean is None:
        return replace(data, clients=_with_tests(clients, tests))
    clients = [
        replace(c, test=Samples(x, c.test.labels, torch.arange(len(x)))) for c, x in zip(clients, tests, strict=True)
    ]
    return _scaled_by_site(replace(data, clients=clients))


def _scaled_by_site(data: FederatedData) -> FederatedData:
    """Each client's samples standardised by what its own training rows look like now; their tensors are changed."""
    clients, scales = [], []
    for number, client in enumerate(data.clients):
        parts = _training(client)
        x, rows = parts[0].x, torch.cat([part.index for part in parts]).unique()
        before = data.scaling(number)
        mean, std = statistics(x[rows], before[1])
        x[rows] = (x[rows] - mean).div_(std)
        test, unseen = (
            None if p is None else replace(p, x=(p.x - mean).div_(std)) for p in (client.test, client.unseen)
        )
        assert test is not None
        clients.append(replace(client, test=test, unseen=unseen))
        scales.append(composed(*before, mean, std))
    means, stds = (torch.stack(column) for column in zip(*scales, strict=True))
    return replace(data, clients=clients, site_mean=means, site_std=stds)


def _training(client: ClientData) -> list[Samples | Unlabelled]:
    """The rows that a client has beside its test rows; all are of one tensor."""
    return [part for part in (client.labelled, client.unlabelled, client.validation) if part is not None]


def _with_tests(clients: list[ClientData], views: list[Tensor]) -> list[ClientData]:
    """The clients with their views of the test set, as rows of one tensor."""
    x = torch.cat(views)
    y = torch.cat([client.test.labels for client in clients])
    index = torch.arange(len(x), device=x.device).split([len(view) for view in views])
    return [replace(client, test=Samples(x, y, rows)) for client, rows in zip(clients, index, strict=True)]
