"""Weak and strong views against naive loops and PIL, and the promise that a row depends on its own numbers alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from protofed.data import augment, draws, randaugment
from protofed.data.augment import AugmentSettings, augmentation
from protofed.data.draws import View, draw
from protofed.data.randaugment import OPERATIONS, FlipCrop
from protofed.errors import ProtofedError

SIGNED = tuple(choice.name for choice in randaugment.signed_pool(1.0).choices)
LAST = 1 - 2**-24  # the largest number torch.rand gives
MEAN, STD = torch.tensor([0.49, 0.48, 0.45]), torch.tensor([0.25, 0.24, 0.26])


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 24, channels: int = 3, side: int = 16, seed: int = 0) -> Tensor:
    """Smooth 8-bit images with noise on them, in bytes: neither flat nor all noise."""
    rng = np.random.default_rng(seed)
    slope = rng.uniform(-1, 1, (n, channels, 2))
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, side)] * 2, indexing="ij"))
    values = 120 + 70 * np.einsum("ncd,dhw->nchw", slope, grid) + rng.normal(0, 15, (n, channels, side, side))
    return torch.from_numpy(values.clip(0, 255).astype(np.uint8))


def standardised(levels: Tensor) -> Tensor:
    return (levels.float() / 255 - MEAN[:, None, None]) / STD[:, None, None]


def views(kind: str) -> tuple[augment.Augmentation, Tensor]:
    """The views of a kind, with samples for them."""
    options: dict[str, Any] = {"settings": AugmentSettings(randaugment=(3, 14), cutout=0.4)}
    if kind == "semifl":
        semifl = AugmentSettings(randaugment=(3, 8), randaugment_scale=10, randaugment_pool="semifl")
        return augmentation("image", (3, 16, 16), MEAN, STD, semifl), standardised(images(60))
    if kind == "colour":
        return augmentation("image", (3, 16, 16), MEAN, STD, **options), standardised(images(60))
    if kind == "grey":
        return augmentation("image", (1, 12, 9), None, None, **options), images(60, 1)[:, :, :12, :9].float() / 255
    x = torch.randn(40, 2, 30, 11, generator=stream(5))
    if kind == "csi":
        return augmentation("csi", (2, 30, 11), torch.tensor([1.0, 3.0]), torch.tensor([0.5, 2.0]), **options), x
    if kind == "features":
        return augmentation("auto", (50,), None, None, **options), x.flatten(1)[:, :50]
    ids = torch.randint(0, 900, (40, 20), generator=stream(6)).int()
    ids[torch.arange(20) >= torch.randint(1, 21, (40, 1), generator=stream(7))] = -1
    return augmentation("auto", (20,), None, None, tokens=True, **options), ids


KINDS = ("colour", "grey", "semifl", "csi", "features", "tokens")


# --- what every view promises -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("strength", ["weak", "strong"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_its_own_numbers_alone(kind: str, strength: str) -> None:
    both, x = views(kind)
    view: View = getattr(both, strength)
    u = draw(view, len(x), stream())
    before = x.clone(), u.clone()
    whole = view(x, u)
    assert whole.shape == x.shape and whole.dtype == x.dtype
    assert torch.equal(x, before[0]) and torch.equal(u, before[1])  # nothing was changed in place
    assert torch.equal(view(x, u), whole)
    order = torch.randperm(len(x), generator=stream(1))
    assert torch.equal(view(x[order], u[order]), whole[order])
    parts = [view(a, b) for a, b in zip(x.split(7), u.split(7), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.cat([view(x[i : i + 1], u[i : i + 1]) for i in range(len(x))]), whole)
    assert view(x[:0], u[:0]).shape == x[:0].shape


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_from_the_generator(kind: str) -> None:
    both, x = views(kind)
    for view in (both.weak, both.strong):
        u = draw(view, len(x), stream(3))
        assert u.shape == (len(x), view.num_draws) and u.device.type == "cpu" and bool(((u >= 0) & (u < 1)).all())
        assert torch.equal(u, draw(view, len(x), stream(3)))
    assert not torch.equal(both.strong(x, u), both.strong(x, draw(both.strong, len(x), stream(4))))


@pytest.mark.parametrize("edge", [0.0, LAST])
@pytest.mark.parametrize("kind", KINDS)
def test_the_extreme_numbers_are_no_exception(kind: str, edge: float) -> None:
    both, x = views(kind)
    for view in (both.weak, both.strong):
        out = view(x, torch.full((len(x), view.num_draws), edge))
        assert out.shape == x.shape and bool(torch.isfinite(out.float()).all())


@pytest.mark.parametrize("kind", ["colour", "csi", "features"])
def test_other_floating_types_are_kept(kind: str) -> None:
    both, x = views(kind)
    for view in (both.weak, both.strong):
        u = draw(view, len(x), stream())
        out = view(x.double(), u)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out.float(), view(x, u), atol=1e-5, rtol=1e-5)


def test_none_is_the_samples_themselves() -> None:
    x = torch.randn(4, 3, 8, 8)
    both = augmentation("image", (3, 8, 8), None, None, AugmentSettings(augmentation="none"))
    for view in (both.weak, both.strong):
        u = draw(view, 4, stream())
        assert u.shape == (4, 0) and torch.equal(view(x, u), x)


# --- which views ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("hint", "chosen", "shape", "tokens", "strong"),
    [
        ("auto", "auto", (3, 8, 8), False, randaugment.RandAugment),
        ("auto", "auto", (1, 28, 28), False, randaugment.RandAugment),
        ("auto", "auto", (3, 8, 7), False, augment.MaskedWindow),
        ("auto", "auto", (2, 30, 30), False, augment.MaskedWindow),
        ("csi", "auto", (1, 200, 64), False, augment.MaskedWindow),
        ("csi", "image", (1, 200, 64), False, randaugment.RandAugment),
        ("image", "features", (1, 28, 28), False, augment.MaskedJitter),
        ("auto", "auto", (64,), False, augment.MaskedJitter),
        ("auto", "auto", (20, 5), False, augment.MaskedJitter),
        ("auto", "auto", (64,), True, augment.Deletion),
        ("auto", "none", (64,), True, augment.Unchanged),
    ],
)
def test_the_person_chooses_first_then_the_source_then_the_shape(
    hint: str, chosen: Any, shape: tuple[int, ...], tokens: bool, strong: type
) -> None:
    both = augmentation(hint, shape, None, None, AugmentSettings(augmentation=chosen), tokens=tokens)
    assert type(both.strong) is strong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augmentation": "images"}, "unknown augmentation 'images'; did you mean 'image'?"),
        ({"flip": "yes"}, "unknown flip 'yes'"),
        ({"crop": 0.6}, "crop=0.6; expected a share of the side from 0 to 0.5"),
        ({"crop": math.nan}, "crop=nan"),
        ({"cutout": -0.1}, "cutout=-0.1; expected a share"),
        ({"randaugment": (2, 31)}, "randaugment=[2, 31]; expected [operations, magnitude]"),
        ({"randaugment": (2, 11), "randaugment_scale": 10}, "and from 0 to randaugment_scale=10"),
        ({"randaugment_scale": 0}, "randaugment_scale=0; expected a whole number from 1 on"),
        ({"randaugment_pool": "semi"}, "unknown randaugment_pool 'semi'"),
        ({"randaugment": (-1, 3)}, "randaugment=[-1, 3]"),
        ({"randaugment": (2,)}, "randaugment=[2]"),
        ({"randaugment": (2, 1.5)}, "randaugment=[2, 1.5]"),
    ],
)
def test_bad_settings_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtofedError) as error:
        AugmentSettings(**options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "shape", "tokens", "message"),
    [
        ("picture", (3, 8, 8), False, "unknown augmentation 'picture'"),
        ("image", (64,), False, "augmentation=image needs images [1 or 3, height, width] of at least 8 pixels"),
        ("image", (2, 8, 8), False, "a sample has shape [2, 8, 8] of floating numbers"),
        ("image", (3, 8, 4), False, "augmentation=image needs images"),
        ("csi", (64,), False, "augmentation=csi needs windows [antennas, time, subcarriers]"),
        ("tokens", (64,), False, "augmentation=tokens needs token ids [length]"),
        ("features", (64,), True, "augmentation=features needs samples of floating numbers"),
    ],
)
def test_views_that_do_not_fit_the_samples(kind: str, shape: tuple[int, ...], tokens: bool, message: str) -> None:
    with pytest.raises(ProtofedError) as error:
        augmentation(kind, shape, None, None, AugmentSettings(), tokens=tokens)
    assert message in str(error.value) and "\n" not in str(error.value)


# --- flip and crop ----------------------------------------------------------------------------------------------------
def flip_crop_of_one(x: np.ndarray, u: list[float], flip: bool, crop: float) -> np.ndarray:
    x = x[:, :, ::-1] if flip and u[0] < 0.5 else x
    height, width = x.shape[1:]
    tall, wide = round(crop * height), round(crop * width)
    padded = np.pad(x, ((0, 0), (tall, tall), (wide, wide)), mode="reflect")
    top, left = int(u[1] * (2 * tall + 1)), int(u[2] * (2 * wide + 1))
    return padded[:, top : top + height, left : left + width]


@given(
    st.integers(0, 2**31), st.sampled_from([(8, 8), (9, 14)]), st.booleans(), st.sampled_from([0.0, 0.125, 0.3, 0.5])
)
@settings(max_examples=25, deadline=None)
def test_flip_and_crop_against_padding_and_cutting(seed: int, size: tuple[int, int], flip: bool, crop: float) -> None:
    x = torch.randn(6, 3, *size, generator=stream(seed))
    view = FlipCrop(flip, crop)
    u = draw(view, 6, stream(seed))
    for one, numbers, out in zip(x.numpy(), u.tolist(), view(x, u).numpy(), strict=True):
        assert np.array_equal(out, flip_crop_of_one(one, numbers, flip, crop))


def test_all_shifts_and_both_directions_occur() -> None:
    x = torch.arange(64.0).reshape(1, 1, 8, 8).repeat(4000, 1, 1, 1)
    out = FlipCrop(True, 0.125)(x, draw(FlipCrop(True, 0.125), 4000, stream()))
    _, counts = torch.unique(out.flatten(1), dim=0, return_counts=True)
    assert len(counts) == 2 * 3 * 3  # with one pixel of shift
    assert int(counts.min()) > 4000 / 18 * 0.75 and int(counts.max()) < 4000 / 18 * 1.25


@pytest.mark.parametrize(("flip", "channels", "mirrors"), [("auto", 3, 1), ("auto", 1, 0), ("on", 1, 1), ("off", 3, 0)])
def test_who_is_mirrored(flip: Any, channels: int, mirrors: int) -> None:
    both = augmentation("auto", (channels, 8, 8), None, None, AugmentSettings(flip=flip, crop=0.0))
    x = torch.rand(1, channels, 8, 8)
    u = torch.tensor([[0.4, 0.0, 0.0]])
    assert torch.equal(both.weak(x, u), x.flip(3) if mirrors else x)
    assert torch.equal(both.weak(x, u + 0.2), x)


# --- RandAugment's operations -----------------------------------------------------------------------------------------
def applied(name: str, levels: Tensor, amount: float, fill: float = 128.0) -> Tensor:
    n, channels = levels.shape[:2]
    which = torch.full((n,), OPERATIONS.index(name))
    return randaugment.apply(levels, which, torch.full((n,), amount), torch.full((channels, 1, 1), fill))


def pil(levels: Tensor) -> Image.Image:
    array = levels.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def from_pil(image: Image.Image) -> Tensor:
    array = np.asarray(image)
    return torch.from_numpy(np.array(array[None] if array.ndim == 2 else array.transpose(2, 0, 1)))


def odd_images(channels: int) -> Tensor:
    """Usual images, and some that formulae stumble over: flat, two levels, black and white, full range, few levels."""
    x = images(10, channels, 40, seed=1)
    x[0] = 77
    x[1] = (x[1] > 120).byte() * 9 + 30
    x[2] = (x[2] > 120).byte() * 255
    x[3, :, 0, :2] = torch.tensor([0, 255], dtype=torch.uint8)
    x[4] = x[4] // 60 * 60
    x[5, 0] = 200
    return x


PIL_EXACT = [
    ("equalize", 0.5, ImageOps.equalize),
    ("solarize", 0.25, lambda im: ImageOps.solarize(im, 192)),
    ("solarize", -1.0, lambda im: ImageOps.solarize(im, 0)),
    ("posterize", 0.5, lambda im: ImageOps.posterize(im, 6)),
    ("posterize", -1.0, lambda im: ImageOps.posterize(im, 4)),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "amount", "reference"), PIL_EXACT)
def test_tables_are_those_of_pil(name: str, amount: float, reference: Any, channels: int) -> None:
    x = odd_images(channels)
    for one, out in zip(x, applied(name, x, amount), strict=True):
        assert torch.equal(out, from_pil(reference(pil(one))))


@pytest.mark.parametrize("channels", [1, 3])
def test_autocontrast_in_whole_numbers_and_in_pil(channels: int) -> None:
    x = odd_images(channels)
    for one, out in zip(x, applied("autocontrast", x, 0.5), strict=True):
        for plane, got in zip(one.long(), out.long(), strict=True):
            low, high = int(plane.min()), int(plane.max())
            assert torch.equal(got, 255 * (plane - low) // (high - low) if high > low else plane)
        expected = from_pil(
            ImageOps.autocontrast(pil(one))
        )  # whose 255 / (high − low) is rounded: now and then a level less
        assert int((out.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize("side", [8, 16, 100])
def test_equalize_of_other_sizes_is_that_of_pil(side: int) -> None:
    x = torch.cat([images(3, 3, side), torch.randint(0, 256, (3, 3, side, side), dtype=torch.uint8)])
    for one, out in zip(x, applied("equalize", x, 0.0), strict=True):
        assert torch.equal(out, from_pil(ImageOps.equalize(pil(one))))


@pytest.mark.parametrize("amount", [-1.0, -0.4, 1 / 3, 1.0])
@pytest.mark.parametrize(
    ("name", "enhance"),
    [
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("sharpness", ImageEnhance.Sharpness),
        ("color", ImageEnhance.Color),
    ],
)
def test_enhancements_are_those_of_pil_to_a_level_or_two(name: str, enhance: Any, amount: float) -> None:
    for channels in (1, 3) if name != "color" else (3,):
        x = odd_images(channels)
        for one, out in zip(x, applied(name, x, amount), strict=True):
            expected = from_pil(enhance(pil(one)).enhance(1 + 0.9 * amount))
            assert (
                int((out.int() - expected.int()).abs().max()) <= 2
            )  # PIL cuts off where we round, twice for sharpness


def bilinear(image: np.ndarray, y: float, x: float, fill: float) -> float:
    def pixel(i: int, j: int) -> float:
        inside = 0 <= i < image.shape[0] and 0 <= j < image.shape[1]
        return float(image[i, j]) if inside else fill

    i, j = math.floor(y), math.floor(x)
    v, w = y - i, x - j
    top = (1 - w) * pixel(i, j) + w * pixel(i, j + 1)
    return (1 - v) * top + v * ((1 - w) * pixel(i + 1, j) + w * pixel(i + 1, j + 1))


@pytest.mark.parametrize("amount", [-0.7, 1 / 3])
@pytest.mark.parametrize("name", randaugment.WARPS)
def test_warps_against_a_loop_over_pixels(name: str, amount: float) -> None:
    x = images(2, 3, 14)[:, :, :9]
    height, width = 9, 14
    out = applied(name, x, amount, fill=31.0)
    turn = math.radians(30 * amount) if name == "rotate" else 0.0
    for i in range(height):
        for j in range(width):
            y, z = i - (height - 1) / 2, j - (width - 1) / 2
            if name == "rotate":  # where the pixel comes from: turned back
                y, z = math.cos(turn) * y - math.sin(turn) * z, math.sin(turn) * y + math.cos(turn) * z
            elif name == "shear_x":
                z -= 0.3 * amount * y
            elif name == "shear_y":
                y -= 0.3 * amount * z
            elif name == "translate_x":
                z -= 150 / 331 * amount * width
            else:
                y -= 150 / 331 * amount * height
            for n in range(2):
                for c in range(3):
                    value = bilinear(x[n, c].numpy(), y + (height - 1) / 2, z + (width - 1) / 2, 31.0)
                    assert abs(int(out[n, c, i, j]) - value) <= 0.51


@pytest.mark.parametrize("name", SIGNED)
def test_magnitude_0_changes_nothing_but_for_the_two_without_magnitude(name: str) -> None:
    x = odd_images(3)
    if name in ("autocontrast", "equalize"):
        assert torch.equal(applied(name, x, 0.0), applied(name, x, 1.0))
    else:
        assert torch.equal(applied(name, x, 0.0), x)


@pytest.mark.parametrize("name", [name for name in SIGNED if name != "identity"])
def test_signs(name: str) -> None:
    x = images(6)
    same = torch.equal(applied(name, x, 0.5), applied(name, x, -0.5))
    assert same == (name in ("autocontrast", "equalize", "solarize", "posterize"))
    assert not torch.equal(applied(name, x, 0.5), x)


# --- the strong view of an image --------------------------------------------------------------------------------------
def strong(channels: int, side: int = 16, **options: Any) -> View:
    fixed = {"flip": "off", "crop": 0.0, **options}
    return augmentation("image", (channels, side, side), None, None, AugmentSettings(**fixed)).strong


@pytest.mark.parametrize(("channels", "operations"), [(3, SIGNED), (1, SIGNED[:-1])])
def test_each_operation_occurs_equally_often_with_both_signs(channels: int, operations: tuple[str, ...]) -> None:
    """What the view does to copies of one image is what some operation does, and each is about as frequent."""
    assert len(SIGNED) == 14 and len(set(SIGNED)) == 14 and SIGNED[-1] == "color"
    n = 2800
    x = images(1, channels)
    view = strong(channels, randaugment=(1, 15))
    out = (255 * view(x.expand(n, -1, -1, -1).float() / 255, draw(view, n, stream()))).round().byte()
    found = {}
    for name in operations:
        for sign in (-1, 1):
            image = applied(name, x, sign * 0.5, fill=128.0)
            found[name, sign] = int((out == image).flatten(1).all(1).sum())
    share = n / len(operations)
    for name in operations:
        count = found[name, 1] + found[name, -1]
        one_sided = name in ("identity", "autocontrast", "equalize", "solarize", "posterize")
        assert found[name, 1] > 0.3 * share and found[name, -1] > 0.3 * share
        assert 0.75 * share < (count / 2 if one_sided else count) < 1.25 * share, name


def test_samples_of_one_batch_draw_their_own_policies() -> None:
    x = images(1).expand(200, -1, -1, -1).float() / 255
    view = strong(3, randaugment=(2, 10))
    out = view(x, draw(view, 200, stream()))
    assert len(torch.unique(out.flatten(1), dim=0)) > 100


def test_operations_follow_each_other() -> None:
    x = images(30)
    view = strong(3, randaugment=(2, 30))
    u = draw(view, 30, stream(2))
    out = (255 * view(x.float() / 255, u)).round().byte()
    fill = torch.full((3, 1, 1), 128.0)
    expected = x
    for which, sign in ((5, 6), (7, 8)):
        operation = torch.tensor([OPERATIONS.index(SIGNED[int(v * 14)]) for v in u[:, which].tolist()])
        expected = randaugment.apply(expected, operation, torch.where(u[:, sign] < 0.5, -1.0, 1.0), fill)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("magnitude", [0, 10, 30])
def test_values_stay_in_range_and_standardised(magnitude: int) -> None:
    x = images(100)
    both = augmentation("auto", (3, 16, 16), MEAN, STD, AugmentSettings(randaugment=(3, magnitude)))
    u = draw(both.strong, 100, stream())
    out = both.strong(standardised(x), u) * STD[:, None, None] + MEAN[:, None, None]
    assert float(out.min()) > -1e-5 and float(out.max()) < 1 + 1e-5
    levels = 255 * out
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)


def test_standardisation_as_the_data_sets_do_it_is_undone_and_redone() -> None:
    """The means and deviations may keep their axes, and what is done to an image does not depend on them."""
    x = images(60)
    options = AugmentSettings(randaugment=(2, 12))
    raw = augmentation("auto", (3, 16, 16), None, None, options).strong
    same = augmentation("auto", (3, 16, 16), torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.2), options)
    u = draw(raw, 60, stream())
    out = same.strong((x.float() / 255 - 0.5) / 0.2, u)
    torch.testing.assert_close(out * 0.2 + 0.5, raw(x.float() / 255, u), atol=1e-5, rtol=0)


def test_no_operations_leave_the_weak_view() -> None:
    both = augmentation("auto", (3, 16, 16), MEAN, STD, AugmentSettings(randaugment=(0, 10)))
    x = standardised(images(20))
    u = draw(both.strong, 20, stream())
    torch.testing.assert_close(both.strong(x, u), both.weak(x, u[:, :3]), atol=1e-5, rtol=0)


def test_what_comes_in_from_outside_is_the_mean() -> None:
    view = augmentation(
        "auto", (3, 16, 16), MEAN, STD, AugmentSettings(flip="off", crop=0.0, randaugment=(1, 30))
    ).strong
    u = torch.zeros(1, view.num_draws)
    u[0, 5], u[0, 6] = (SIGNED.index("translate_x") + 0.5) / 14, 0.9
    out = view(torch.full((1, 3, 16, 16), 1.0), u)
    assert float(out[..., :7].abs().max()) < 0.01 and float((out[..., 8:] - 1).abs().max()) < 0.01


@pytest.mark.parametrize(("share", "side"), [(0.5, 8), (0.2, 3), (1.0, 16)])
def test_cutout_against_a_loop(share: float, side: int) -> None:
    x = images(40).clamp(min=200).float() / 255
    view = strong(3, randaugment=(0, 0), cutout=share)
    u = draw(view, 40, stream())
    for one, numbers, out in zip(x, u.tolist(), view(x, u), strict=True):
        expected = one.clone()
        for i in range(16):
            for j in range(16):
                top, left = int(numbers[3] * 16) - side // 2, int(numbers[4] * 16) - side // 2
                if top <= i < top + side and left <= j < left + side:
                    expected[:, i, j] = 128 / 255
        torch.testing.assert_close(out, expected)


# --- SemiFL's pool, against PIL as its published code calls it ----------------------------------------------------------
SEMIFL = ["autocontrast", "brightness", "color", "contrast", "cutout", "equalize", "invert", "posterize", "rotate"]
SEMIFL += ["sharpness", "shear_x", "shear_y", "solarize", "translate_x", "translate_y"]


def semifl_operation(x: Tensor, name: str, magnitude: int, **draws: float) -> Tensor:
    """What the pool does to one image where it applies the operation of this name."""
    view = strong(3, x.shape[-1], randaugment=(1, magnitude), randaugment_scale=10, randaugment_pool="semifl")
    u = torch.zeros(1, view.num_draws)
    which = {"sign": 6, "chance": 7, "row": 8, "column": 9}
    u[0, 5] = (SEMIFL.index(name) + 0.5) / len(SEMIFL)
    for key, value in draws.items():
        u[0, which[key]] = value
    return (255 * view(x[None].float() / 255, u))[0].round().byte()


@pytest.mark.parametrize("magnitude", [1, 3, 5, 8, 10])
@pytest.mark.parametrize(
    ("name", "reference", "tolerance"),
    [
        ("autocontrast", lambda i, m: ImageOps.autocontrast(i), 1),
        ("equalize", lambda i, m: ImageOps.equalize(i), 0),
        ("invert", lambda i, m: ImageOps.invert(i), 0),
        ("posterize", lambda i, m: i.point(lambda v: v & ~(2 ** (8 - int(m * 4 / 10)) - 1)), 0),
        ("solarize", lambda i, m: ImageOps.solarize(i, 256 - int(m * 256 / 10)), 0),
        ("brightness", lambda i, m: ImageEnhance.Brightness(i).enhance(m * 1.8 / 10 + 0.1), 1),
        ("color", lambda i, m: ImageEnhance.Color(i).enhance(m * 1.8 / 10 + 0.1), 2),
        ("contrast", lambda i, m: ImageEnhance.Contrast(i).enhance(m * 1.8 / 10 + 0.1), 2),
        ("sharpness", lambda i, m: ImageEnhance.Sharpness(i).enhance(m * 1.8 / 10 + 0.1), 2),
    ],
)
@pytest.mark.parametrize("sign", [0.1, 0.9])
def test_semifls_pool_is_that_of_its_code(
    name: str, reference: Any, tolerance: int, magnitude: int, sign: float
) -> None:
    for x in images(3, side=32):
        out, expected = semifl_operation(x, name, magnitude, sign=sign), from_pil(reference(pil(x), magnitude))
        assert int((out.int() - expected.int()).abs().max()) <= tolerance


@pytest.mark.parametrize("magnitude", [3, 6, 10])
def test_semifls_square_is_grey_and_moves_into_the_image(magnitude: int) -> None:
    x = images(1, side=32)[0].clamp(min=180)
    for row, column in ((0.0, 0.99), (0.4, 0.7), (0.9, 0.1)):
        out = semifl_operation(x, "cutout", magnitude, row=row, column=column)
        image, size = pil(x), int(magnitude * 40 / 10)
        left, top = (int(max(0, share * 32 - size / 2)) for share in (column, row))
        box = left, top, int(min(32, left + size)), int(min(32, top + size))
        ImageDraw.Draw(image).rectangle(box, (127, 127, 127))
        assert torch.equal(out, from_pil(image))


@pytest.mark.parametrize(("sign", "name"), [(0.1, "translate_x"), (0.9, "translate_y")])
def test_semifls_largest_translation_leaves_a_black_image(sign: float, name: str) -> None:
    x = images(1, side=32)[0].clamp(min=50)
    assert int(semifl_operation(x, name, 10, sign=sign).max()) == 0
    tenth = semifl_operation(x, name, 1, sign=sign)  # 10 of 32 pixels
    black = (tenth == 0).all(0).all(0 if name == "translate_x" else 1)
    assert int(black.sum()) in (9, 10) and bool(black[0 if sign > 0.5 else -1])


def test_semifls_operations_are_applied_to_one_image_in_two() -> None:
    x = images(1, side=16)[0]
    assert torch.equal(semifl_operation(x, "invert", 10, chance=0.5), x)
    assert torch.equal(semifl_operation(x, "invert", 10, chance=0.49), 255 - x)
    view = strong(3, randaugment=(1, 10), randaugment_scale=10, randaugment_pool="semifl")
    out = view(x.expand(2000, -1, -1, -1).float() / 255, draw(view, 2000, stream()))
    same = ((255 * out).round().byte() == x).flatten(1).all(1).float().mean()
    assert 0.45 < float(same) < 0.55
    grey = strong(1, randaugment=(1, 10), randaugment_scale=10, randaugment_pool="semifl")
    assert isinstance(grey, randaugment.RandAugment) and [c.name for c in grey.pool.choices] == [
        name for name in SEMIFL if name != "color"
    ]


def test_the_scale_divides_the_magnitude() -> None:
    x = images(40).float() / 255
    one, other = strong(3, randaugment=(2, 10)), strong(3, randaugment=(2, 3), randaugment_scale=9)
    u = draw(one, 40, stream())
    assert torch.equal(one(x, u), other(x, u))
    assert not torch.equal(one(x, u), strong(3, randaugment=(2, 10), randaugment_scale=10)(x, u))


def test_settings_leave_the_other_draws_as_they_were() -> None:
    x = images(30).float() / 255
    some, others = strong(3, crop=0.125), strong(3, crop=0.125, cutout=0.3)
    u = draw(some, 30, stream())
    assert torch.equal(u, draw(others, 30, stream()))
    a, b = some(x, u), others(x, u)
    kept = (b - 128 / 255).abs() > 1e-6
    assert torch.equal(a[kept], b[kept]) and 0.8 < float(kept.float().mean()) < 1


# --- noise ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [*range(1, 66), 129, 1000, 2**20 + 1])
def test_whole_numbers_stay_below_their_count(count: int) -> None:
    u = torch.tensor([0.0, 0.5, LAST])
    expected = [0, count // 2, count - 1]
    assert draws.whole(u, count).tolist() == expected
    assert draws.whole(u, torch.full((3,), count)).tolist() == expected


def test_spread_numbers_are_uniform_and_unrelated() -> None:
    u = torch.rand(200, generator=stream())
    x = draws.spread(u, (500,)).double()
    assert float(x.min()) > 0 and float(x.max()) < 1
    counts = torch.histc(x, 20, 0, 1)
    assert (
        float(((counts - 5000) ** 2 / 5000).sum()) < 50
    )  # chi-square with 19 degrees of freedom: 1 in 10,000 is above
    centred = x - 0.5
    between_rows = (centred @ centred.T / 500 * 12).fill_diagonal_(0)
    between_places = (centred.T @ centred / 200 * 12).fill_diagonal_(0)
    assert float(between_rows.abs().max()) < 5.5 / math.sqrt(500)
    assert float(between_places.abs().max()) < 5.5 / math.sqrt(200)
    neighbours = draws.spread(torch.tensor([0.5, 0.5 + 2**-24]), (20000,)).double() - 0.5
    assert abs(float((neighbours[0] * neighbours[1]).mean() * 12)) < 4 / math.sqrt(20000)


def test_noise_is_normal() -> None:
    z = draws.normal(torch.rand(100, generator=stream()), (10, 100)).double().flatten()
    n = len(z)
    assert abs(float(z.mean())) < 4 / math.sqrt(n) and abs(float(z.var()) - 1) < 4 * math.sqrt(2 / n)
    for edge, below in ((-1.959964, 0.025), (0.674490, 0.75), (2.326348, 0.99)):
        assert abs(float((z < edge).double().mean()) - below) < 4 * math.sqrt(below * (1 - below) / n)


# --- features, windows, tokens ----------------------------------------------------------------------------------------
def test_features_are_jittered_and_masked() -> None:
    both = augmentation("auto", (300,), None, None, AugmentSettings())
    x = torch.randn(200, 300, generator=stream()) + 5
    weak = both.weak(x, draw(both.weak, 200, stream(1))) - x
    assert abs(float(weak.std()) - 0.05) < 0.001 and abs(float(weak.mean())) < 0.001
    out = both.strong(x, draw(both.strong, 200, stream(1)))
    gone = out == 0
    assert abs(float(gone.float().mean()) - 0.2) < 0.01
    assert abs(float((out - x)[~gone].std()) - 0.2) < 0.005
    assert len(torch.unique(gone, dim=0)) == 200  # each sample loses its own


def test_windows_shift_in_time_by_at_most_a_twentieth() -> None:
    view = augment.Window(0.0, 0.05)
    x = torch.randn(300, 2, 40, 5, generator=stream())
    u = draw(view, 300, stream())
    shifts = [int(v * 5) - 2 for v in u[:, 1].tolist()]
    assert set(shifts) == {-2, -1, 0, 1, 2}
    for one, shift, out in zip(x, shifts, view(x, u), strict=True):
        assert torch.equal(out, one.roll(shift, 1))


def test_windows_are_jittered() -> None:
    both = augmentation("csi", (1, 50, 20), None, None, AugmentSettings())
    flat = torch.ones(100, 1, 50, 20)
    noise = both.weak(flat, draw(both.weak, 100, stream())) - 1
    assert abs(float(noise.std()) - 0.05) < 0.001


def test_the_strong_view_of_a_window_against_a_loop() -> None:
    mean, std = torch.tensor([2.0, 1.0]), torch.tensor([0.5, 4.0])
    both = augmentation("csi", (2, 40, 15), mean, std, AugmentSettings())
    x = torch.randn(60, 2, 40, 15, generator=stream())
    u = draw(both.strong, 60, stream())
    weak = both.weak(x, u[:, :2])
    out = both.strong(x, u)
    widths = set()
    for one, numbers, got in zip(weak, u[:, 2:].tolist(), out, strict=True):
        scale = 0.8 + 0.4 * numbers[0]
        raw = one * std[:, None, None] + mean[:, None, None]
        expected = (scale * raw - mean[:, None, None]) / std[:, None, None]
        for axis, length, (a, b) in ((1, 40, numbers[1:3]), (2, 15, numbers[3:5])):
            width = int(a * (round(0.2 * length) + 1))
            start = int(b * (length - width + 1))
            expected.narrow(axis, start, width).zero_()
            widths.add((axis, width))
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert {(1, 0), (1, 8), (2, 0), (2, 3)} <= widths


def test_without_standardisation_a_window_is_scaled_as_it_is() -> None:
    view = augmentation("csi", (1, 4, 4), None, None, AugmentSettings()).strong
    u = torch.zeros(1, view.num_draws)  # no bands
    x = torch.full((1, 1, 4, 4), 1000.0)
    torch.testing.assert_close(view(x, u), torch.full_like(x, 800.0), atol=1, rtol=0)


def test_tokens_are_left_out_in_order_and_never_the_first() -> None:
    both, x = views("tokens")
    assert torch.equal(both.weak(x, draw(both.weak, len(x), stream())), x)
    u = draw(both.strong, len(x), stream())
    out = both.strong(x, u)
    gone = draws.spread(u[:, 0], (20,)) < 0.2
    lost = 0
    for row, left_out, got in zip(x.tolist(), gone.tolist(), out.tolist(), strict=True):
        kept = [token for i, token in enumerate(row) if token >= 0 and (i == 0 or not left_out[i])]
        assert got == kept + [-1] * (20 - len(kept))
        lost += sum(token >= 0 for token in row) - len(kept)
    assert 0.1 < lost / int((x[:, 1:] >= 0).sum()) < 0.3
