"""Weak and strong views of samples, for methods that learn from samples without labels.

All randomness is passed in as random draws, so a view is a pure function of samples and draws, and each row depends on
its own draws alone. One call may transform the batches of many clients, and each gets what a call of its own would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ProtofedError, unknown
from .draws import View, normal, spread, whole
from .randaugment import POOLS, FlipCrop, RandAugment

AugmentationName = Literal["auto", "none", "image", "csi", "features", "tokens"]
Flip = Literal["auto", "on", "off"]
PoolName = Literal["signed", "semifl"]

SMALLEST = 8  # samples with fewer pixels on a side are not images
JITTER, STRONG_JITTER = 0.05, 0.2  # standard deviations of the noise, where the data's is 1
SHIFT, BAND, GAIN = 0.05, 0.2, 0.2  # changes of a CSI window, as shares of an axis and of the amplitude
DROPPED, DELETED = 0.2, 0.2  # the probabilities that a feature is masked and that a token is deleted


@dataclass(frozen=True)
class Augmentation:
    """The weak and the strong view of one kind of data."""

    weak: View
    strong: View


@dataclass(frozen=True)
class AugmentSettings:
    """The settings of augmentation. What is `auto` follows from the data."""

    augmentation: Annotated[
        AugmentationName,
        Field(description="what samples are to it: auto (by the data), none, image, csi, features or tokens"),
    ] = "auto"
    flip: Annotated[Flip, Field(description="mirror images: auto (where the data allows it), on or off")] = "auto"
    """Whether images are mirrored left to right; `auto` mirrors colour images only, as digits have a direction."""
    crop: Annotated[float, Field(description="share of the side by which an image is shifted")] = 0.125
    """The largest shift of an image, as a share of its side; the border is filled by reflection."""
    randaugment: Annotated[tuple[int, int], Field(description="operations of a strong view, and magnitude")] = (2, 10)
    """The number of operations, and their magnitude from 0 to `randaugment_scale`."""
    randaugment_scale: Annotated[int, Field(ge=1, description="the magnitude of the largest change")] = 30
    """Magnitude 10 is a third of the largest change by default; in SemiFL's and (FL)²'s published code it is all of it."""
    randaugment_pool: Annotated[
        PoolName, Field(description="operations: signed (14, random sign), or semifl (15 with invert and cutout)")
    ] = "signed"
    """Which operations there are, and how a magnitude acts in them."""
    cutout: Annotated[float, Field(description="side of the square cut out of a strong view; 0: none")] = 0.0
    """The side of the square that is cut out of a strong view, as a share of the image's side; 0 cuts none."""

    def __post_init__(self) -> None:
        if self.augmentation not in get_args(AugmentationName):
            raise unknown("augmentation", str(self.augmentation), get_args(AugmentationName))
        if self.flip not in get_args(Flip):
            raise unknown("flip", str(self.flip), get_args(Flip))
        if not 0 <= self.crop <= 0.5:
            raise ProtofedError(f"crop={self.crop}; expected a share of the side from 0 to 0.5")
        if not 0 <= self.cutout <= 1:
            raise ProtofedError(f"cutout={self.cutout}; expected a share of the side from 0 to 1")
        if self.randaugment_pool not in get_args(PoolName):
            raise unknown("randaugment_pool", str(self.randaugment_pool), get_args(PoolName))
        if self.randaugment_scale < 1:
            raise ProtofedError(f"randaugment_scale={self.randaugment_scale}; expected a whole number from 1 on")
        is_pair = len(self.randaugment) == 2 and all(type(number) is int for number in self.randaugment)
        if not is_pair or self.randaugment[0] < 0 or not 0 <= self.randaugment[1] <= self.randaugment_scale:
            raise ProtofedError(
                f"randaugment={list(self.randaugment)}; expected [operations, magnitude]: two whole numbers, "
                f"from 0, and from 0 to randaugment_scale={self.randaugment_scale}"
            )


def augmentation(
    kind: str,
    sample_shape: Sequence[int],
    mean: Tensor | None,
    std: Tensor | None,
    settings: AugmentSettings,
    *,
    tokens: bool = False,
) -> Augmentation:
    """The views for samples of one shape.

    The user's setting decides first, then the source's `kind`, then the shape.

    Args:
        kind: What the data set says its samples are, `auto` where it does not.
        sample_shape: The shape of one sample.
        mean: The mean of each channel that standardisation subtracted; None where samples are not standardised.
        std: The standard deviation of each channel, likewise.
        settings: The user's settings.
        tokens: Whether samples are integers.

    Returns:
        The weak and the strong view.
    """
    if kind not in get_args(AugmentationName):
        raise unknown("augmentation", kind, get_args(AugmentationName))
    shape = tuple(sample_shape)
    name = next((k for k in (settings.augmentation, kind) if k != "auto"), _by_shape(shape, tokens))
    _check(name, shape, tokens)
    if name == "none":
        return Augmentation(Unchanged(), Unchanged())
    if name == "tokens":
        return Augmentation(Unchanged(), Deletion(DELETED))
    if name == "features":
        return Augmentation(Jitter(JITTER), MaskedJitter(STRONG_JITTER, DROPPED))
    if name == "csi":
        offset = None if mean is None or std is None else mean.flatten() / std.flatten()
        window = Window(JITTER, SHIFT)
        return Augmentation(window, MaskedWindow(window, BAND, GAIN, offset))
    flip = settings.flip == "on" or (settings.flip == "auto" and shape[0] == 3)
    weak = FlipCrop(flip, settings.crop)
    no_offset, unit_scale = torch.zeros(shape[0]), torch.ones(shape[0])
    count, magnitude = settings.randaugment
    pool = POOLS[settings.randaugment_pool](magnitude / settings.randaugment_scale)
    return Augmentation(
        weak,
        RandAugment(
            weak,
            count,
            pool if shape[0] == 3 else pool.without("color"),
            settings.cutout,
            no_offset if mean is None else mean.flatten().expand(shape[0]),
            unit_scale if std is None else std.flatten().expand(shape[0]),
            no_offset + 0.5 if mean is None else mean.flatten().expand(shape[0]),
        ),
    )


def _by_shape(shape: tuple[int, ...], tokens: bool) -> str:
    if tokens:
        return "tokens"
    if _is_image(shape):
        return "image"
    return "csi" if len(shape) == 3 else "features"


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[0] in (1, 3) and min(shape[1:]) >= SMALLEST


def _check(kind: str, shape: tuple[int, ...], tokens: bool) -> None:
    for requirement, wrong in (
        ("token ids [length]", kind == "tokens" and not (tokens and len(shape) == 1)),
        ("samples of floating numbers", kind in ("image", "csi", "features") and tokens),
        (f"images [1 or 3, height, width] of at least {SMALLEST} pixels", kind == "image" and not _is_image(shape)),
        ("windows [antennas, time, subcarriers]", kind == "csi" and len(shape) != 3),
    ):
        if wrong:
            number_type = "integers" if tokens else "floating numbers"
            raise ProtofedError(
                f"augmentation={kind} needs {requirement}; a sample has shape {list(shape)} of {number_type}"
            )


# --- all kinds, features, tokens --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Unchanged:
    """The samples without any change."""

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Jitter:
    """Adds normal noise to every value."""

    deviation: float

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 1

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x + (self.deviation * normal(u[:, 0].to(x.device), x.shape[1:])).to(x.dtype)


@dataclass(frozen=True)
class MaskedJitter:
    """Adds normal noise, and sets each feature to 0, its mean, with probability `dropped`."""

    deviation: float
    dropped: float

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 2

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        mask = spread(u[:, 1].to(x.device), x.shape[1:]) < self.dropped
        return Jitter(self.deviation)(x, u).masked_fill(mask, 0)


@dataclass(frozen=True)
class Deletion:
    """Deletes each token but the first with probability `deleted`; later tokens move up."""

    deleted: float

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 1

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        mask = spread(u[:, 0].to(x.device), x.shape[1:]) < self.deleted
        mask[:, :1] = False
        order = mask.byte().argsort(dim=1, stable=True)
        return x.masked_fill(mask, -1).gather(1, order)  # −1 is padding


# --- channel state information ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """Adds normal noise and shifts a window `[antennas, time, subcarriers]` circularly in time, by at most `shift` of it."""

    deviation: float
    shift: float

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 2

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        time = x.shape[2]
        largest_shift = round(self.shift * time)
        shift = whole(u[:, 1], 2 * largest_shift + 1) - largest_shift
        rows = (torch.arange(time, device=x.device) - shift[:, None]) % time
        shifted = x.gather(2, rows[:, None, :, None].expand(x.shape))
        return Jitter(self.deviation)(shifted, u)


@dataclass(frozen=True, eq=False)
class MaskedWindow:
    """The weak view with another amplitude, and with a band of time and a band of subcarriers set to 0, the mean.

    Before standardisation the amplitude would be multiplied by s, from 1 − gain to 1 + gain. On standardised samples
    this is s·x + (s − 1)·`offset`, where `offset` is the mean divided by the standard deviation.
    """

    weak: Window
    band: float
    gain: float
    offset: Tensor | None

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return self.weak.num_draws + 5

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        strong_draws = u[:, self.weak.num_draws :]
        scale = (1 + self.gain * (2 * strong_draws[:, 0] - 1)).to(x.dtype)[:, None, None, None]
        out = scale * self.weak(x, u)
        if self.offset is not None:
            out = out + (scale - 1) * self.offset.to(x)[:, None, None]
        time = self._inside(strong_draws[:, 1], strong_draws[:, 2], x.shape[2])[:, None, :, None]
        subcarriers = self._inside(strong_draws[:, 3], strong_draws[:, 4], x.shape[3])[:, None, None, :]
        return out.masked_fill(time | subcarriers, 0)

    def _inside(self, u: Tensor, v: Tensor, length: int) -> Tensor:
        """Whether each position `[n, length]` is in the row's band, whose width is at most `band` of the length."""
        width = whole(u, round(self.band * length) + 1)
        start = whole(v, length - width + 1)
        position = torch.arange(length, device=u.device)
        return (position >= start[:, None]) & (position < (start + width)[:, None])
