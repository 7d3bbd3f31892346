"""Weak and strong views of samples, for methods that learn from samples without labels.

All randomness comes in as numbers, so a view is a pure function of samples and numbers, and each row depends on its own
alone: one call may transform the batches of many clients, and gives each what it would have got by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, get_args

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ProtofedError, unknown

Kind = Literal["auto", "none", "image", "csi", "features", "tokens"]
Flip = Literal["auto", "on", "off"]

MAGNITUDES = 30  # RandAugment's scale: 0 changes nothing, 30 is the most
ENHANCE, ROTATE, SHEAR, TRANSLATE = 0.9, math.radians(30), 0.3, 150 / 331  # the most, as is usual
POSTERIZE = 4  # bits taken away at most
SMALLEST = 8  # pixels of a side, below which a sample is no image
JITTER, STRONG_JITTER = 0.05, 0.2  # deviations of the noise, where the data's is 1
SHIFT, BAND, GAIN = 0.05, 0.2, 0.2  # of a CSI window: shares of an axis, and of the amplitude
DROPPED, DELETED = 0.2, 0.2  # probabilities: a feature is masked, a token is left out


class View(Protocol):
    """A view: a pure function of samples `x [n, ...]` and random draws `u [n, numbers]`, uniform in `[0, 1)`.

    It gives samples of the same shape, type and device.
    """

    @property
    def numbers(self) -> int:
        """How many random draws one sample needs."""

    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Augmentation:
    """The two views of one kind of data."""

    weak: View
    strong: View


@dataclass(frozen=True)
class AugmentSettings:
    """What a person may choose; the data decides what `auto` is."""

    augmentation: Annotated[
        Kind, Field(description="what samples are to it: auto (by the data), none, image, csi, features or tokens")
    ] = "auto"
    flip: Annotated[Flip, Field(description="mirror images: auto (where the data allows it), on or off")] = "auto"
    """Mirror images left to right: `auto` only those in colour, for digits and letters have a direction."""
    crop: Annotated[float, Field(description="share of the side by which an image is shifted")] = 0.125
    """Share of the side by which an image is shifted at most; what it leaves is filled by reflection."""
    randaugment: Annotated[tuple[int, int], Field(description="operations of a strong view, and magnitude")] = (2, 10)
    """N operations of magnitude M, from 0 to 30."""
    cutout: Annotated[float, Field(description="side of the square cut out of a strong view; 0: none")] = 0.0
    """Side of the square that is cut out of a strong view, as a share of the image's; 0: none."""

    def __post_init__(self) -> None:
        if self.augmentation not in get_args(Kind):
            raise unknown("augmentation", str(self.augmentation), get_args(Kind))
        if self.flip not in get_args(Flip):
            raise unknown("flip", str(self.flip), get_args(Flip))
        if not 0 <= self.crop <= 0.5:
            raise ProtofedError(f"crop={self.crop}; expected a share of the side from 0 to 0.5")
        if not 0 <= self.cutout <= 1:
            raise ProtofedError(f"cutout={self.cutout}; expected a share of the side from 0 to 1")
        two = len(self.randaugment) == 2 and all(type(number) is int for number in self.randaugment)
        if not two or self.randaugment[0] < 0 or not 0 <= self.randaugment[1] <= MAGNITUDES:
            raise ProtofedError(
                f"randaugment={list(self.randaugment)}; expected [operations, magnitude]: two whole numbers, "
                f"from 0, and from 0 to {MAGNITUDES}"
            )


def draw(view: View, n: int, generator: torch.Generator) -> Tensor:
    """The random draws of a view.

    Args:
        view: the view.
        n: how many samples.
        generator: the stream to draw from.

    Returns:
        `[n, numbers]`, on the CPU, so that every device sees the same views.

    >>> draw(Jitter(0.1), 3, torch.Generator()).shape
    torch.Size([3, 1])
    """
    return torch.rand(n, view.numbers, generator=generator)


def augmentation(
    kind: str,
    sample_shape: Sequence[int],
    mean: Tensor | None,
    std: Tensor | None,
    settings: AugmentSettings,
    *,
    tokens: bool = False,
) -> Augmentation:
    """The views for samples of this shape. A person's choice comes first, then the source's `kind`, then the shape.

    `mean` and `std`, one number a channel, are what samples were standardised by; None where they are as they were.
    `tokens` says that samples are integers.
    """
    if kind not in get_args(Kind):
        raise unknown("augmentation", kind, get_args(Kind))
    shape = tuple(sample_shape)
    chosen = next((k for k in (settings.augmentation, kind) if k != "auto"), _by_shape(shape, tokens))
    _check(chosen, shape, tokens)
    if chosen == "none":
        return Augmentation(Unchanged(), Unchanged())
    if chosen == "tokens":
        return Augmentation(Unchanged(), Deletion(DELETED))
    if chosen == "features":
        return Augmentation(Jitter(JITTER), MaskedJitter(STRONG_JITTER, DROPPED))
    if chosen == "csi":
        offset = None if mean is None or std is None else mean.flatten() / std.flatten()
        window = Window(JITTER, SHIFT)
        return Augmentation(window, MaskedWindow(window, BAND, GAIN, offset))
    mirrored = settings.flip == "on" or (settings.flip == "auto" and shape[0] == 3)
    weak = FlipCrop(mirrored, settings.crop)
    zeros, ones = torch.zeros(shape[0]), torch.ones(shape[0])
    return Augmentation(
        weak,
        RandAugment(
            weak,
            *settings.randaugment,
            settings.cutout,
            zeros if mean is None else mean.flatten().expand(shape[0]),
            ones if std is None else std.flatten().expand(shape[0]),
            zeros + 0.5 if mean is None else mean.flatten().expand(shape[0]),
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
    for needs, wrong in (
        ("token ids [length]", kind == "tokens" and not (tokens and len(shape) == 1)),
        ("samples of floating numbers", kind in ("image", "csi", "features") and tokens),
        (f"images [1 or 3, height, width] of at least {SMALLEST} pixels", kind == "image" and not _is_image(shape)),
        ("windows [antennas, time, subcarriers]", kind == "csi" and len(shape) != 3),
    ):
        if wrong:
            what = "integers" if tokens else "floating numbers"
            raise ProtofedError(f"augmentation={kind} needs {needs}; a sample has shape {list(shape)} of {what}")


# --- numbers ----------------------------------------------------------------------------------------------------------
def whole(u: Tensor, count: int | Tensor) -> Tensor:
    """Uniform numbers as whole ones; a float below 1 times `count` never rounds up to `count`.

    Args:
        u: uniform in `[0, 1)`.
        count: how many whole numbers there are.

    Returns:
        whole numbers in `0 … count − 1`.

    >>> whole(torch.tensor([0.0, 0.5, 0.99]), 4).tolist()
    [0, 2, 3]
    """
    return (u * count).long()


def _mix(h: Tensor) -> Tensor:
    """A hash of 32 bits, in place, in 64-bit integers; the multipliers are below 2³¹, so that no product overflows."""
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        h.bitwise_xor_(h >> shift).mul_(multiplier).bitwise_and_(0xFFFFFFFF)
    return h.bitwise_xor_(h >> 15)


def spread(u: Tensor, shape: Sequence[int]) -> Tensor:
    """Many uniform numbers from one for each row: a hash of the row's number and the position.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: of what each row becomes.

    Returns:
        `[n, *shape]`, inside (0, 1).

    >>> spread(torch.tensor([0.25, 0.75]), (3,)).shape
    torch.Size([2, 3])
    """
    seed = _mix((u * 2**24).long())  # as many values as a drawn number has
    position = _mix(torch.arange(1, 1 + math.prod(shape), device=u.device))
    bits = _mix(seed[:, None] ^ position).bitwise_right_shift_(9)
    return bits.float().add_(0.5).div_(2**23).reshape(len(u), *shape)


def normal(u: Tensor, shape: Sequence[int]) -> Tensor:
    """Many normal numbers from one uniform number for each row.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: of what each row becomes.

    Returns:
        `[n, *shape]`.
    """
    return spread(u, shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


# --- all kinds, features, tokens --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Unchanged:
    """The samples as they are."""

    @property
    def numbers(self) -> int:
        return 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Jitter:
    """Normal noise is added to every number."""

    deviation: float

    @property
    def numbers(self) -> int:
        return 1

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x + (self.deviation * normal(u[:, 0].to(x.device), x.shape[1:])).to(x.dtype)


@dataclass(frozen=True)
class MaskedJitter:
    """Normal noise is added, and each feature is set to 0, its mean, with probability `dropped`."""

    deviation: float
    dropped: float

    @property
    def numbers(self) -> int:
        return 2

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        gone = spread(u[:, 1].to(x.device), x.shape[1:]) < self.dropped
        return Jitter(self.deviation)(x, u).masked_fill(gone, 0)


@dataclass(frozen=True)
class Deletion:
    """Each token but the first is left out with probability `deleted`, and those after it move up."""

    deleted: float

    @property
    def numbers(self) -> int:
        return 1

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        gone = spread(u[:, 0].to(x.device), x.shape[1:]) < self.deleted
        gone[:, :1] = False
        order = gone.byte().argsort(dim=1, stable=True)
        return x.masked_fill(gone, -1).gather(1, order)  # −1: no token


# --- channel state information ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Window:
    """Normal noise, and a circular shift in time by at most `shift` of the window `[antennas, time, subcarriers]`."""

    deviation: float
    shift: float

    @property
    def numbers(self) -> int:
        return 2

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        time = x.shape[2]
        most = round(self.shift * time)
        back = whole(u[:, 1], 2 * most + 1) - most
        rows = (torch.arange(time, device=x.device) - back[:, None]) % time
        shifted = x.gather(2, rows[:, None, :, None].expand(x.shape))
        return Jitter(self.deviation)(shifted, u)


@dataclass(frozen=True, eq=False)
class MaskedWindow:
    """The weak view with another amplitude, and a band of time and one of subcarriers set to 0, the mean.

    The amplitude is scaled by s from 1 − gain to 1 + gain before standardisation, which afterwards is
    s·x + (s − 1)·`offset`, with `offset` the mean in deviations.
    """

    weak: Window
    band: float
    gain: float
    offset: Tensor | None

    @property
    def numbers(self) -> int:
        return self.weak.numbers + 5

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        strong_draws = u[:, self.weak.numbers :]
        scale = (1 + self.gain * (2 * strong_draws[:, 0] - 1)).to(x.dtype)[:, None, None, None]
        out = scale * self.weak(x, u)
        if self.offset is not None:
            out = out + (scale - 1) * self.offset.to(x)[:, None, None]
        time = self._inside(strong_draws[:, 1], strong_draws[:, 2], x.shape[2])[:, None, :, None]
        subcarriers = self._inside(strong_draws[:, 3], strong_draws[:, 4], x.shape[3])[:, None, None, :]
        return out.masked_fill(time | subcarriers, 0)

    def _inside(self, u: Tensor, v: Tensor, length: int) -> Tensor:
        """Whether each position `[n, length]` is in the row's band, of any width up to `band` of the length."""
        width = whole(u, round(self.band * length) + 1)
        start = whole(v, length - width + 1)
        position = torch.arange(length, device=u.device)
        return (position >= start[:, None]) & (position < (start + width)[:, None])


# --- images -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FlipCrop:
    """Mirrored left to right half of the time, and shifted both ways by at most `crop` of the side, with reflection."""

    flip: bool
    crop: float

    @property
    def numbers(self) -> int:
        return 3

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        height, width = x.shape[2:]
        rows, columns = self._places(u[:, 1], height), self._places(u[:, 2], width)
        if self.flip:
            columns = torch.where(u[:, :1] < 0.5, width - 1 - columns, columns)
        pixel = rows[:, :, None] * width + columns[:, None, :]
        return x.flatten(2).gather(2, pixel.flatten(1)[:, None].expand(-1, x.shape[1], -1)).reshape(x.shape)

    def _places(self, u: Tensor, side: int) -> Tensor:
        """Where each pixel of a side comes from, `[n, side]`."""
        most = round(self.crop * side)
        position = torch.arange(side, device=u.device) + (whole(u, 2 * most + 1) - most)[:, None]
        return (side - 1) - ((side - 1) - position.abs()).abs()


def grey(levels: Tensor) -> Tensor:
    """Brightness `[n, h, w]` as a level, in whole numbers: the same in any batch."""
    if levels.shape[1] == 1:
        return levels[:, 0].int()
    red, green, blue = levels.int().unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def autocontrast(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Each channel's darkest level to 0 and its brightest to 255."""
    low, high = (edge[..., None].float() for edge in levels.flatten(2).aminmax(dim=2))
    return torch.where(high > low, (255 * (table - low) / (high - low)).floor(), table)


def equalize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Each channel's levels made equally frequent, as nearly as whole levels can be."""
    values = levels.flatten(2).long()
    ones = torch.ones(1, dtype=torch.int64, device=levels.device).expand(values.shape)
    counts = torch.zeros(table.shape, dtype=torch.int64, device=levels.device).scatter_add_(2, values, ones)
    brightest = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - brightest) // 255
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, ((step // 2 + below) // step.clamp(min=1)).float(), table)


def solarize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Bright levels inverted; the more, the lower the threshold."""
    return torch.where(table < 256 * (1 - amount.abs()), table, 255 - table)


def posterize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """The lowest bits taken away."""
    size = 2 ** (POSTERIZE * amount.abs()).round()
    return (table / size).floor() * size


def brightness(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Away from black, or towards it."""
    return table * (1 + ENHANCE * amount)


def contrast(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Away from the image's mean brightness, or towards it."""
    shades = grey(levels).flatten(1)
    pixels = shades.shape[1]
    middle = ((shades.sum(1) + pixels // 2) // pixels)[:, None, None]
    return middle + (1 + ENHANCE * amount) * (table - middle)


Table = Callable[[Tensor, Tensor, Tensor], Tensor]
TABLES: dict[str, Table] = {  # what becomes of each level of each channel
    "autocontrast": autocontrast,
    "equalize": equalize,
    "solarize": solarize,
    "posterize": posterize,
    "contrast": contrast,
    "brightness": brightness,
}
WARPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
GREY_OPERATIONS = ("identity", *TABLES, "sharpness", *WARPS)
OPERATIONS = (*GREY_OPERATIONS, "color")


def matrices(operation: Tensor, amount: Tensor, height: int, width: int) -> Tensor:
    """Affine maps `[n, 2, 3]` of pixels, from where they are to where they go. Rotation and shear are about the centre."""

    def only(name: str, most: float) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), most * amount, 0)

    angle = only("rotate", ROTATE)
    cos, sin = angle.cos(), angle.sin()
    a, b, c, d = cos, only("shear_x", SHEAR) - sin, only("shear_y", SHEAR) + sin, cos
    x, y = (width - 1) / 2, (height - 1) / 2
    right = x - a * x - b * y + only("translate_x", TRANSLATE * width)
    down = y - c * x - d * y + only("translate_y", TRANSLATE * height)
    return torch.stack([a, b, right, c, d, down], dim=1).reshape(-1, 2, 3)


def apply(levels: Tensor, operation: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """One operation on each image: levels 0 … 255 in bytes `[n, c, h, w]`, `operation [n]` of `OPERATIONS`.

    `amount [n]` from −1 to 1 is the sign and the share of the most; `fill [c, 1, 1]`, in levels, comes in from outside.
    """
    from kornia.enhance import adjust_saturation_with_gray_subtraction, sharpness
    from kornia.geometry.transform import warp_affine

    out = levels.clone()

    def rows(*names: str) -> Tensor:
        wanted = torch.tensor([OPERATIONS.index(name) for name in names], device=levels.device)
        return torch.isin(operation, wanted).nonzero()[:, 0]

    for name, make in TABLES.items():
        chosen = rows(name)
        if len(chosen):
            part = levels[chosen]
            table = torch.arange(256.0, device=levels.device).repeat(*part.shape[:2], 1)
            table = make(part, table, amount[chosen][:, None, None]).round().clamp(0, 255).byte()
            out[chosen] = table.gather(2, part.flatten(2).long()).reshape(part.shape)
    for name, blend in (("color", adjust_saturation_with_gray_subtraction), ("sharpness", sharpness)):
        chosen = rows(name)
        if len(chosen):
            blended = blend(levels[chosen].float() / 255, 1 + ENHANCE * amount[chosen])
            out[chosen] = (255 * blended).round_().byte()
    chosen = rows(*WARPS)
    if len(chosen):
        height, width = levels.shape[2:]
        moves = matrices(operation[chosen], amount[chosen], height, width)
        warped = warp_affine(levels[chosen] - fill, moves, (height, width)) + fill  # it fills with 0
        out[chosen] = warped.round_().clamp_(0, 255).byte()
    return out


@dataclass(frozen=True, eq=False)
class RandAugment:
    """The weak view, then `count` operations drawn for each sample, of one magnitude and random sign, then cutout.

    Samples are taken back to 256 levels by `mean` and `std` and are standardised again at the end; `fill` is what comes
    in from outside an image. All are `[c]`.
    """

    weak: FlipCrop
    count: int
    magnitude: int
    cutout: float
    mean: Tensor
    std: Tensor
    fill: Tensor

    @property
    def numbers(self) -> int:
        return self.weak.numbers + 2 + 2 * self.count

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        mean, std, fill = (t.to(x.device, torch.float32)[:, None, None] for t in (self.mean, self.std, self.fill))
        strong_draws = u[:, self.weak.numbers :]
        levels = self.weak(x, u).float().mul_(255 * std).add_(255 * mean).round_().clamp_(0, 255).byte()
        fill = (255 * fill).round().clamp(0, 255)
        operations = len(OPERATIONS if x.shape[1] == 3 else GREY_OPERATIONS)
        for step in range(self.count):
            which, sign = strong_draws[:, 2 + 2 * step], strong_draws[:, 3 + 2 * step]
            amount = torch.where(sign < 0.5, -1.0, 1.0) * (self.magnitude / MAGNITUDES)
            levels = apply(levels, whole(which, operations), amount, fill)
        if self.cutout:
            rows, columns = self._near(strong_draws[:, 0], x.shape[2]), self._near(strong_draws[:, 1], x.shape[3])
            levels = torch.where(rows[:, None, :, None] & columns[:, None, None, :], fill.byte(), levels)
        return levels.float().div_(255).sub_(mean).div_(std).to(x.dtype)

    def _near(self, u: Tensor, side: int) -> Tensor:
        """Whether each position `[n, side]` is within the square around the pixel that was drawn; it may reach outside."""
        size = round(self.cutout * side)
        start = whole(u, side)[:, None] - size // 2
        position = torch.arange(side, device=u.device)
        return (position >= start) & (position < start + size)
