"""Weak and strong views of samples, for methods that learn from samples without labels.

All randomness is passed in as random draws, so a view is a pure function of samples and draws, and each row depends on
its own draws alone. One call may transform the batches of many clients, and each gets what a call of its own would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, get_args

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ProtofedError, unknown

AugmentationName = Literal["auto", "none", "image", "csi", "features", "tokens"]
Flip = Literal["auto", "on", "off"]
PoolName = Literal["signed", "semifl"]

ENHANCE, ROTATE, SHEAR, TRANSLATE = (
    0.9,
    math.radians(30),
    0.3,
    150 / 331,
)  # the changes at the largest magnitude, as is usual
POSTERIZE = 4  # the most bits that are removed
SMALLEST = 8  # samples with fewer pixels on a side are not images
JITTER, STRONG_JITTER = 0.05, 0.2  # standard deviations of the noise, where the data's is 1
SHIFT, BAND, GAIN = 0.05, 0.2, 0.2  # changes of a CSI window, as shares of an axis and of the amplitude
DROPPED, DELETED = 0.2, 0.2  # the probabilities that a feature is masked and that a token is deleted


class View(Protocol):
    """A view: a pure function of samples `x [n, ...]` and random draws `u [n, num_draws]`, uniform in `[0, 1)`.

    It returns samples of the same shape, type and device.
    """

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""

    def __call__(self, x: Tensor, u: Tensor) -> Tensor: ...


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


def draw(view: View, n: int, generator: torch.Generator) -> Tensor:
    """The random draws of a view.

    Args:
        view: the view.
        n: the number of samples.
        generator: the stream to draw from.

    Returns:
        `[n, num_draws]`, on the CPU, so that every device sees the same views.

    >>> draw(Jitter(0.1), 3, torch.Generator()).shape
    torch.Size([3, 1])
    """
    return torch.rand(n, view.num_draws, generator=generator)


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


# --- draws ------------------------------------------------------------------------------------------------------------
def whole(u: Tensor, count: int | Tensor) -> Tensor:
    """Uniform draws as whole numbers. A float below 1 times `count` never rounds up to `count`.

    Args:
        u: Uniform draws in `[0, 1)`.
        count: The number of whole numbers to choose from.

    Returns:
        Whole numbers in `0 … count − 1`.

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
    """Many uniform draws from one draw for each row, by a hash of the row's draw and the position.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: the shape of the draws of each row.

    Returns:
        `[n, *shape]`, inside (0, 1).

    >>> spread(torch.tensor([0.25, 0.75]), (3,)).shape
    torch.Size([2, 3])
    """
    seed = _mix((u * 2**24).long())  # as many values as a float32 draw has
    position = _mix(torch.arange(1, 1 + math.prod(shape), device=u.device))
    bits = _mix(seed[:, None] ^ position).bitwise_right_shift_(9)
    return bits.float().add_(0.5).div_(2**23).reshape(len(u), *shape)


def normal(u: Tensor, shape: Sequence[int]) -> Tensor:
    """Many normal draws from one uniform draw for each row.

    Args:
        u: `[n]`, uniform in `[0, 1)`.
        shape: the shape of the draws of each row.

    Returns:
        `[n, *shape]`.
    """
    return spread(u, shape).mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2))


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


# --- images -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class FlipCrop:
    """Mirrors an image left to right with probability ½, and shifts it on both axes by at most `crop` of its side.

    The border is filled by reflection.
    """

    flip: bool
    crop: float

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return 3

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        height, width = x.shape[2:]
        rows, columns = self._source_pixels(u[:, 1], height), self._source_pixels(u[:, 2], width)
        if self.flip:
            columns = torch.where(u[:, :1] < 0.5, width - 1 - columns, columns)
        pixel = rows[:, :, None] * width + columns[:, None, :]
        return x.flatten(2).gather(2, pixel.flatten(1)[:, None].expand(-1, x.shape[1], -1)).reshape(x.shape)

    def _source_pixels(self, u: Tensor, side: int) -> Tensor:
        """The position from which each pixel of a side is taken, `[n, side]`."""
        largest_shift = round(self.crop * side)
        position = torch.arange(side, device=u.device) + (whole(u, 2 * largest_shift + 1) - largest_shift)[:, None]
        return (side - 1) - ((side - 1) - position.abs()).abs()


def grey(levels: Tensor) -> Tensor:
    """The brightness `[n, h, w]` as a level, computed in whole numbers, so that it is the same in any batch."""
    if levels.shape[1] == 1:
        return levels[:, 0].int()
    red, green, blue = levels.int().unbind(1)
    return (19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16


def autocontrast(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Stretch each channel so that its darkest level becomes 0 and its brightest 255."""
    low, high = (edge[..., None].float() for edge in levels.flatten(2).aminmax(dim=2))
    return torch.where(high > low, (255 * (table - low) / (high - low)).floor(), table)


def equalize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Make the levels of each channel as equally frequent as whole levels can be."""
    values = levels.flatten(2).long()
    unit_counts = torch.ones(1, dtype=torch.int64, device=levels.device).expand(values.shape)
    counts = torch.zeros(table.shape, dtype=torch.int64, device=levels.device).scatter_add_(2, values, unit_counts)
    brightest = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - brightest) // 255
    cumulative = counts.cumsum(2) - counts
    return torch.where(step > 0, ((step // 2 + cumulative) // step.clamp(min=1)).float(), table)


def invert(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Invert all levels."""
    return 255 - table


def solarize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Invert the bright levels; the larger the amount, the lower the threshold."""
    return torch.where(table < 256 * (1 - amount.abs()), table, 255 - table)


def posterize(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Remove the lowest bits."""
    size = 2 ** (POSTERIZE * amount.abs()).round()
    return (table / size).floor() * size


def brightness(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Move levels away from black, or towards it."""
    return table * (1 + ENHANCE * amount)


def contrast(levels: Tensor, table: Tensor, amount: Tensor) -> Tensor:
    """Move levels away from the image's mean brightness, or towards it."""
    shades = grey(levels).flatten(1)
    pixels = shades.shape[1]
    middle = ((shades.sum(1) + pixels // 2) // pixels)[:, None, None]
    return middle + (1 + ENHANCE * amount) * (table - middle)


Table = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of images `levels [n, c, h, w]`, the identity `table [n, c, 256]` and `amount [n, 1, 1]` to a new table."""
TABLES: dict[str, Table] = {  # operations that map each level of each channel to another level
    "autocontrast": autocontrast,
    "equalize": equalize,
    "solarize": solarize,
    "posterize": posterize,
    "contrast": contrast,
    "brightness": brightness,
    "invert": invert,
}
WARPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = ("identity", *TABLES, "sharpness", *WARPS, "color", "cutout")
IDENTITY, CUTOUT = OPERATIONS.index("identity"), OPERATIONS.index("cutout")


@dataclass(frozen=True)
class Choice:
    """One operation that RandAugment may choose: by how much it changes an image, and whether the sign is random."""

    name: str
    amount: float
    signed: bool = False


@dataclass(frozen=True)
class Pool:
    """The operations that RandAugment chooses from, and the probability that a chosen one is applied.

    `black` says that pixels from outside an image are black; otherwise they have the mean. `square` is the side of the
    square that the operation `cutout` makes grey, as a share of the image's side.
    """

    choices: tuple[Choice, ...]
    chance: float = 1.0
    black: bool = False
    square: float = 0.0

    @property
    def num_draws(self) -> int:
        """The number of random draws of one operation: which, its sign, whether it is applied, and two for cutout."""
        return 2 if self.chance == 1 and not self.square else 5

    def without(self, name: str) -> Pool:
        """The pool without one of its operations."""
        return replace(self, choices=tuple(choice for choice in self.choices if choice.name != name))


def signed_pool(share: float) -> Pool:
    """Fourteen operations, each changed by ± `share` of the largest change, always applied."""
    tables = ("autocontrast", "equalize", "solarize", "posterize", "contrast", "brightness")
    names = ("identity", *tables, "sharpness", *WARPS, "color")
    return Pool(tuple(Choice(name, share, signed=True) for name in names))


def semifl_pool(share: float) -> Pool:
    """The fifteen operations of SemiFL's published code, each applied with probability ½.

    Brightness, contrast, color and sharpness are multiplied by 0.1 + 1.8 · `share`. Posterize keeps 4 · `share` bits,
    rounded down. The published translation and square are 100 and 40 pixels of 32: three sides and more than one side.
    """
    enhanced = 2 * share - 1
    kept_bits = math.floor(4 * share)
    moved = share * (100 / 32) / TRANSLATE
    choices = (
        Choice("autocontrast", share),
        Choice("brightness", enhanced),
        Choice("color", enhanced),
        Choice("contrast", enhanced),
        Choice("cutout", share),
        Choice("equalize", share),
        Choice("invert", share),
        Choice("posterize", (8 - kept_bits) / POSTERIZE),
        Choice("rotate", share, signed=True),
        Choice("sharpness", enhanced),
        Choice("shear_x", share, signed=True),
        Choice("shear_y", share, signed=True),
        Choice("solarize", share),
        Choice("translate_x", moved, signed=True),
        Choice("translate_y", moved, signed=True),
    )
    return Pool(choices, chance=0.5, black=True, square=share * 40 / 32)


POOLS: dict[str, Callable[[float], Pool]] = {"signed": signed_pool, "semifl": semifl_pool}


def matrices(operation: Tensor, amount: Tensor, height: int, width: int) -> Tensor:
    """Affine maps `[n, 2, 3]` from the old to the new position of pixels. Rotation and shear are about the centre."""

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
    """Apply one operation to each image.

    Args:
        levels: Images `[n, c, h, w]` of bytes.
        operation: `[n]`, the index of each image's operation in `OPERATIONS`.
        amount: `[n]`, from −1 to 1: the sign and the share of the largest change.
        fill: `[c, 1, 1]`, the levels of pixels that come from outside an image.

    Returns:
        The changed images.
    """
    from kornia.enhance import adjust_saturation_with_gray_subtraction, sharpness
    from kornia.geometry.transform import warp_affine

    out = levels.clone()

    def rows(*names: str) -> Tensor:
        codes = torch.tensor([OPERATIONS.index(name) for name in names], device=levels.device)
        return torch.isin(operation, codes).nonzero()[:, 0]

    for name, make in TABLES.items():
        selected = rows(name)
        if len(selected):
            part = levels[selected]
            table = torch.arange(256.0, device=levels.device).repeat(*part.shape[:2], 1)
            table = make(part, table, amount[selected][:, None, None]).round().clamp(0, 255).byte()
            out[selected] = table.gather(2, part.flatten(2).long()).reshape(part.shape)
    for name, blend in (("color", adjust_saturation_with_gray_subtraction), ("sharpness", sharpness)):
        selected = rows(name)
        if len(selected):
            blended = blend(levels[selected].float() / 255, 1 + ENHANCE * amount[selected])
            out[selected] = (255 * blended).round_().byte()
    selected = rows(*WARPS)
    if len(selected):
        height, width = levels.shape[2:]
        moves = matrices(operation[selected], amount[selected], height, width)
        warped = warp_affine(levels[selected] - fill, moves, (height, width)) + fill  # kornia fills with 0
        out[selected] = warped.round_().clamp_(0, 255).byte()
    return out


@dataclass(frozen=True, eq=False)
class RandAugment:
    """The weak view, then `count` random operations of a pool, then cutout.

    Samples are converted to 256 levels by `mean` and `std`, and are standardised again at the end. `fill` has the
    values of pixels from outside an image. All three are `[c]`.
    """

    weak: FlipCrop
    count: int
    pool: Pool
    cutout: float
    mean: Tensor
    std: Tensor
    fill: Tensor

    @property
    def num_draws(self) -> int:
        """The number of random draws that one sample needs."""
        return self.weak.num_draws + 2 + self.pool.num_draws * self.count

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        u = u.to(x.device)
        mean, std, fill = (t.to(x.device, torch.float32)[:, None, None] for t in (self.mean, self.std, self.fill))
        strong_draws = u[:, self.weak.num_draws :]
        levels = self.weak(x, u).float().mul_(255 * std).add_(255 * mean).round_().clamp_(0, 255).byte()
        fill = (255 * fill).round().clamp(0, 255)
        for step in range(self.count):
            draws = strong_draws[:, 2 + self.pool.num_draws * step :]
            levels = self._operate(levels, draws, torch.zeros_like(fill) if self.pool.black else fill)
        if self.cutout:
            rows, columns = self._near(strong_draws[:, 0], x.shape[2]), self._near(strong_draws[:, 1], x.shape[3])
            levels = torch.where(rows[:, None, :, None] & columns[:, None, None, :], fill.byte(), levels)
        return levels.float().div_(255).sub_(mean).div_(std).to(x.dtype)

    def _operate(self, levels: Tensor, draws: Tensor, fill: Tensor) -> Tensor:
        """Apply to each image one operation of the pool, by the first `pool.num_draws` of the image's draws."""
        choices = self.pool.choices
        codes = draws.new_tensor([OPERATIONS.index(choice.name) for choice in choices], dtype=torch.int64)
        chosen = whole(draws[:, 0], len(choices))
        operation, amount = codes[chosen], draws.new_tensor([choice.amount for choice in choices])[chosen]
        turned = draws.new_tensor([choice.signed for choice in choices], dtype=torch.bool)[chosen] & (draws[:, 1] < 0.5)
        amount = torch.where(turned, -amount, amount)
        if self.pool.chance < 1:
            operation = torch.where(draws[:, 2] < self.pool.chance, operation, IDENTITY)
        levels = apply(levels, operation, amount, fill)
        if self.pool.square:
            rows, columns = self._grey(draws[:, 3], levels.shape[2]), self._grey(draws[:, 4], levels.shape[3])
            square = rows[:, None, :, None] & columns[:, None, None, :] & (operation == CUTOUT)[:, None, None, None]
            levels = levels.masked_fill(square, 127)
        return levels

    def _near(self, u: Tensor, side: int) -> Tensor:
        """Whether each position `[n, side]` is in the square around the drawn pixel, which may reach over the border."""
        size = round(self.cutout * side)
        start = whole(u, side)[:, None] - size // 2
        position = torch.arange(side, device=u.device)
        return (position >= start) & (position < start + size)

    def _grey(self, u: Tensor, side: int) -> Tensor:
        """Whether each position `[n, side]` is in the pool's square.

        As published, a square that would begin before the image is moved into it, and its last pixel belongs to it.
        """
        size = int(self.pool.square * side)
        start = (u * side - size / 2).clamp_min(0).long()[:, None]
        position = torch.arange(side, device=u.device)
        return (position >= start) & (position <= start + size)
