"""Views of images: flips and crops, and RandAugment with its pools of operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .draws import whole

ENHANCE, ROTATE, SHEAR, TRANSLATE = (
    0.9,
    math.radians(30),
    0.3,
    150 / 331,
)  # the changes at the largest magnitude, as is usual
POSTERIZE = 4  # the most bits that are removed


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
