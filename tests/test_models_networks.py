"""GoogLeNet, MobileNetV2, the CSI networks and ResNet-18's width: counts by formula, sizes, levels, stacks, training."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from protofed import models
from protofed.models.base import LOW, Stages, adapt
from protofed.models.mobilenet import divisible
from support.errors import refusal
from support.networks import assert_fits_a_small_batch, assert_stack_equals_loop, count

CONVNETS = ["tinyconvnet4", "middleconvnet4", "largeconvnet4"]
SMALL: list[tuple[str, dict]] = [
    ("cnn", {}),
    ("mlp", {}),
    ("resnet18", {"width": 0.1}),
    ("resnet18", {"width": 0.1, "stem": "imagenet", "embedding": 9}),
    ("googlenet", {"width": 0.05}),
    ("googlenet", {"width": 0.05, "stem": "imagenet", "embedding": 9}),
    ("mobilenetv2", {"width": 0.1}),
    ("mobilenetv2", {"width": 0.1, "stem": "imagenet", "embedding": 9}),
    *[(name, {}) for name in CONVNETS],
    ("tinyconvnet4", {"embedding": 9}),
]


pytestmark = pytest.mark.usefixtures("seeded")


# --- counts -------------------------------------------------------------------------------------------------------


def conv(before: int, after: int, kernel: int) -> int:
    """A convolution without bias and its batch norm."""
    return before * after * kernel**2 + 2 * after


def googlenet_parameters(channels: int, classes: int, stem: str, width: float) -> int:
    def w(n: int) -> int:
        return max(1, round(n * width))

    if stem == "cifar":
        total = conv(channels, w(192), 3)
    else:
        total = conv(channels, w(64), 7) + conv(w(64), w(64), 1) + conv(w(64), w(192), 3)
    before = w(192)
    for row in (  # Szegedy et al., Table 1
        *((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
        *((192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64)),
        *((112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128)),
        *((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
    ):
        a, b, c, d, e, f = map(w, row)
        total += conv(before, a, 1) + conv(before, b, 1) + conv(b, c, 3) + conv(before, d, 1) + conv(d, e, 3)
        total += conv(before, f, 1)
        before = a + c + e + f
    return total + (before + 1) * classes


def mobilenet_parameters(channels: int, classes: int, widths: list[int]) -> int:
    """`widths` of the first convolution, the seven stages and the last convolution."""
    first, *stages, last = widths
    total, before = conv(channels, first, 3), first
    for after, repeats, t in zip(stages, (1, 2, 3, 4, 3, 3, 1), (1, 6, 6, 6, 6, 6, 6), strict=True):
        for _ in range(repeats):
            inner = before * t
            total += (conv(before, inner, 1) if t > 1 else 0) + 9 * inner + 2 * inner + conv(inner, after, 1)
            before = after
    return total + conv(before, last, 1) + (last + 1) * classes


def test_googlenet_has_torchvisions_parameters() -> None:
    assert count("googlenet", (3, 224, 224), 1000, stem="imagenet") == 6_624_904
    for channels, classes, stem, width in ((3, 10, "cifar", 1.0), (1, 7, "imagenet", 0.25), (3, 5, "cifar", 0.3)):
        expected = googlenet_parameters(channels, classes, stem, width)
        assert count("googlenet", (channels, 32, 32), classes, stem=stem, width=width) == expected


def test_mobilenetv2_has_torchvisions_parameters() -> None:
    full = [32, 16, 24, 32, 64, 96, 160, 320, 1280]
    assert mobilenet_parameters(3, 1000, full) == 3_504_872
    for stem in ("imagenet", "cifar"):  # strides have no parameters
        assert count("mobilenetv2", (3, 224, 224), 1000, stem=stem) == 3_504_872
    half = [16, 8, 16, 16, 32, 48, 80, 160, 640]  # 12 would be the second stage's: the nearest multiple is 16
    assert count("mobilenetv2", (1, 32, 32), 10, width=0.5) == mobilenet_parameters(1, 10, half)
    wide = [48, 24, 32, 48, 88, 136, 224, 448, 1792]  # 1.4 × 24 = 33.6 → 32, 1.4 × 32 = 44.8 → 48, 1.4 × 96 = 134.4
    assert count("mobilenetv2", (3, 32, 32), 10, width=1.4) == mobilenet_parameters(3, 10, wide)


@given(st.integers(1, 2000), st.floats(0.01, 4))
def test_mobilenets_channels_are_multiples_of_8_near_what_was_asked(channels: int, width: float) -> None:
    found = divisible(channels, width)
    assert found % 8 == 0 and found >= 8
    assert found >= 0.9 * channels * width and found <= max(8, channels * width + 8)


def test_the_csi_networks_have_the_parameters_of_fedapa_table_2() -> None:
    assert [count(name, (1, 1000, 242), 20) for name in CONVNETS] == [7_956, 18_436, 463_748]
    assert count("tinyconvnet4", (3, 9, 9), 20) == 7_956 + 2 * 256 * 9
    assert count("tinyconvnet4", (1, 9, 9), 20, embedding=10) == 7_956 - 5_140 + 257 * 10 + 11 * 20
    for name, last in (("middleconvnet4", 32), ("largeconvnet4", 256)):  # the 1×1 convolution is the linear layer
        without = count(name, (1, 9, 9), 20) - (last + 1) * 256 - 257 * 20
        assert count(name, (1, 9, 9), 20, embedding=10) == without + (last + 1) * 10 + 11 * 20


def test_resnet18s_width_leaves_names_and_halves_channels() -> None:
    def state(**options: object) -> dict[str, Tensor]:
        with torch.device("meta"):
            return models.build("resnet18", (3, 32, 32), 10, **options).state_dict()

    whole, half = state(), state(width=0.5)
    assert list(whole) == list(half)
    assert half["encoder.layer4.1.conv2.weight"].shape == (256, 256, 3, 3) and half["head.weight"].shape == (10, 256)
    assert list(state(embedding=512)) == list(whole)
    assert state(width=0.5, embedding=512)["encoder.project.weight"].shape == (512, 256)
    text = refusal(lambda: models.ResNet18(pretrained="file.pt", width=0.5))
    assert "width=0.5; expected 1.0 with pretrained=file.pt" in text


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "mobilenetv2"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"width": 0}, "width=0.0; expected a number above 0"),
        ({"width": -1.5}, "width=-1.5"),
        ({"width": float("nan")}, "width=nan"),
        ({"width": float("inf")}, "width=inf"),
        ({"stem": "large"}, "stem='large'"),
        ({"embedding": 0}, "embedding=0; expected at least 1"),
    ],
)
def test_wrong_settings_are_one_line(name: str, options: dict, says: str) -> None:
    text = refusal(lambda: models.build(name, (3, 32, 32), 4, **options))
    assert says in text and f"model {name!r}" in text


@pytest.mark.parametrize("name", [*CONVNETS, "googlenet", "mobilenetv2"])
def test_samples_that_are_no_images(name: str) -> None:
    assert f"model {name!r} needs images" in refusal(lambda: models.build(name, (30, 20), 4))


def test_a_csi_networks_embedding_of_nothing() -> None:
    assert "model 'tinyconvnet4': embedding=0" in refusal(
        lambda: models.build("tinyconvnet4", (1, 9, 9), 4, embedding=0)
    )


# --- what they compute --------------------------------------------------------------------------------------------


def pixels(name: str, shape: tuple[int, ...], **options: object) -> list[int]:
    """The side of the image at the output of the early stage and before the pooling at the end."""
    encoder = models.build(name, shape, 3, width=0.05, **options).encoder.eval()
    sides: list[int] = []
    last = encoder.inception5b if name == "googlenet" else encoder.features[-1]
    last.register_forward_hook(lambda module, args, out: sides.append(out.shape[-1]))
    encoder(torch.randn(1, *shape))
    return [encoder.early(torch.randn(1, *shape)).shape[-1], *sides]


@pytest.mark.parametrize(
    ("name", "stem", "side", "sides"),
    [
        ("googlenet", "cifar", 32, [32, 8]),
        ("googlenet", "cifar", 64, [64, 16]),
        ("googlenet", "imagenet", 64, [8, 2]),
        ("googlenet", "imagenet", 224, [28, 7]),
        ("mobilenetv2", "cifar", 32, [32, 4]),
        ("mobilenetv2", "imagenet", 64, [32, 2]),
        ("mobilenetv2", "imagenet", 224, [112, 7]),
    ],
)
def test_where_the_image_gets_smaller(name: str, stem: str, side: int, sides: list[int]) -> None:
    assert pixels(name, (3, side, side), stem=stem) == sides


def test_the_smallest_images_of_googlenet() -> None:
    for stem, side in (("cifar", 2), ("imagenet", 15)):
        model = models.build("googlenet", (1, side, side), 3, stem=stem, width=0.05).eval()
        assert bool(model(torch.randn(2, 1, side, side)).logits.isfinite().all())
        text = refusal(lambda s=stem, n=side: models.build("googlenet", (1, n - 1, 40), 3, stem=s))
        assert f"at least {side}x{side}" in text


def test_an_inception_block_is_its_four_branches() -> None:
    block = models.build("googlenet", (3, 8, 8), 3, width=0.1).encoder.inception3a.eval()
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    s = block.state_dict()

    def unit(x: Tensor, at: str) -> Tensor:
        weight = s[f"{at}.conv.weight"]
        h = F.conv2d(x, weight, padding=weight.shape[-1] // 2)
        mean, var, gain, shift = (
            s[f"{at}.bn.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")
        )
        return ((h - mean) / (var + 0.001).sqrt() * gain + shift).clamp(min=0)

    x = torch.randn(2, 19, 8, 8)
    branches = [
        unit(x, "branch1"),
        unit(unit(x, "branch2.0"), "branch2.1"),
        unit(unit(x, "branch3.0"), "branch3.1"),
        unit(F.max_pool2d(x, 3, 1, 1), "branch4.1"),
    ]
    torch.testing.assert_close(block(x), torch.cat(branches, 1), atol=1e-5, rtol=1e-4)


def test_mobilenets_blocks_have_a_shortcut_where_the_shape_stays() -> None:
    features = models.build("mobilenetv2", (3, 32, 32), 3, width=0.1, stem="imagenet").encoder.features
    wide = models.build("mobilenetv2", (3, 32, 32), 3, stem="imagenet").encoder.features
    blocks = list(wide)[1:-1]
    assert [i for i, block in enumerate(blocks, 1) if block.shortcut] == [3, 5, 6, 8, 9, 10, 12, 13, 15, 16]
    block, x = features[3].eval(), torch.randn(2, 8, 6, 6)
    with torch.no_grad():
        block.conv[-1].weight.zero_()  # the last batch norm: nothing is left but the shortcut
    torch.testing.assert_close(block(x), x)
    assert wide[2].conv[1][0].groups == 96 and isinstance(wide[2].conv[1][2], nn.ReLU6)
    assert isinstance(wide[2].conv[-1], nn.BatchNorm2d)  # narrow without activation


@pytest.mark.parametrize("name", CONVNETS)
def test_a_csi_network_by_hand(name: str) -> None:
    model = models.build(name, (2, 37, 21), 5).eval()
    s, x = model.state_dict(), torch.randn(3, 2, 37, 21)
    h, i = x, 1
    while f"encoder.conv{i}.weight" in s:
        h = F.conv2d(h, s[f"encoder.conv{i}.weight"], stride=2, padding=1)
        h = (h / (1 + 1e-5) ** 0.5).relu()  # batch norm as it begins
        i += 1
    z = h.mean((2, 3))
    if name != "tinyconvnet4":
        z = F.conv2d(z[:, :, None, None], s["encoder.project.weight"][:, :, None, None], s["encoder.project.bias"])
        z = z.flatten(1)
    output = model(x)
    assert i - 1 == {"tinyconvnet4": 1, "middleconvnet4": 2, "largeconvnet4": 5}[name]
    torch.testing.assert_close(output.embedding, z, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, z @ s["head.weight"].T + s["head.bias"], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONVNETS)
@pytest.mark.parametrize("shape", [(1, 1000, 242), (3, 1, 1), (3, 32, 32)])
def test_csi_of_any_size(name: str, shape: tuple[int, ...]) -> None:
    model = models.build(name, shape, 20).eval()
    with torch.no_grad():
        output = model(torch.randn(1, *shape), levels=True)
    assert output.embedding.shape == (1, 256) == (1, model.dim)
    assert output.logits.shape == (1, 20) and output.low.shape == (1, LOW)


def test_the_paper_s_sizes_of_csi() -> None:
    with torch.device("meta"):
        model = models.build("largeconvnet4", (1, 1000, 242), 20)
        h, sides = torch.empty(1, 1, 1000, 242), []
        for name, layer in model.encoder.named_children():
            h = layer(h)
            if name.startswith("relu"):
                sides.append(tuple(h.shape[1:]))
    assert sides == [(16, 500, 121), (32, 250, 61), (64, 125, 31), (128, 63, 16), (256, 32, 8)]  # Table II


# --- levels -------------------------------------------------------------------------------------------------------


def pooled(row: list[float]) -> list[float]:
    """The mean of each of 64 neighbouring, nearly equal pieces."""
    n, out = len(row), []
    for i in range(LOW):
        start, end = i * n // LOW, -(-(i + 1) * n // LOW)
        out.append(sum(row[start:end]) / (end - start))
    return out


@pytest.mark.parametrize(("name", "options"), SMALL)
def test_levels_are_the_output_and_64_low_level_numbers(name: str, options: dict) -> None:
    model = models.build(name, (3, 17, 19), 4, **options).eval()
    x = torch.randn(3, 3, 17, 19)
    with torch.no_grad():
        levels, output = model(x, levels=True), model(x)
        h = model.encoder.early(x)
    assert isinstance(levels, models.Levels) and isinstance(output, models.Output)
    assert torch.equal(levels.embedding, output.embedding) and torch.equal(levels.logits, output.logits)
    assert levels.low.shape == (3, LOW) and isinstance(model.encoder, Stages)
    expected = torch.tensor([pooled(row) for row in h.flatten(1).double().tolist()])
    torch.testing.assert_close(levels.low.double(), expected.double(), atol=1e-5, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 300))
def test_a_first_layer_of_any_width_gives_64_numbers(width: int) -> None:
    with torch.random.fork_rng():
        model = models.build("mlp", (3,), 2, hidden=(width, 5))
        low = model(torch.randn(2, 3), levels=True).low
        assert low.shape == (2, LOW) and bool((low >= 0).all())


def test_the_low_level_comes_from_where_it_should() -> None:
    x = torch.randn(2, 3, 16, 16)
    cnn = models.build("cnn", (3, 16, 16), 2).encoder
    torch.testing.assert_close(cnn.early(x), F.relu(F.max_pool2d(cnn.conv1(x), 2)))
    mlp = models.build("mlp", (3, 16, 16), 2).encoder
    torch.testing.assert_close(mlp.early(x), F.relu(mlp[1](x.flatten(1))))
    resnet = models.build("resnet18", (3, 16, 16), 2, width=0.1).encoder.eval()
    torch.testing.assert_close(resnet.early(x), resnet.layer1(F.relu(resnet.bn1(resnet.conv1(x)))))


def test_an_own_network_has_no_levels() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.fc(x)

    x = torch.randn(2, 4)
    for module in (Pair(), nn.Linear(4, 5)):  # the second gives flat features
        model = adapt(module, (4,), 3, "model 'mine'")
        model = copy.deepcopy(adapt(model, (4,), 3, "model 'mine'"))  # twice is the same as once
        assert isinstance(model(x, levels=False), models.Output)
        text = refusal(lambda model=model: model(x, levels=True))
        assert text.startswith("model 'mine' gives no low-level features; fedmps needs ")
    plain = models.Classifier(nn.Linear(4, 2), 2, 3)
    assert refusal(lambda: plain(x, levels=True)).startswith("this model gives no low-level features")


def test_an_own_classifier_in_stages_keeps_its_levels() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 5)

        def early(self, x: Tensor) -> Tensor:
            return self.first(x)

        def late(self, h: Tensor) -> Tensor:
            return self.second(h)

        def forward(self, x: Tensor) -> Tensor:
            return self.late(self.early(x))

    x = torch.randn(2, 4)
    for made in (models.Classifier(Encoder(), 5, 3), Encoder()):
        model = adapt(made, (4,), 3)
        levels = model(x, levels=True)
        torch.testing.assert_close(levels.low, F.adaptive_avg_pool1d(model.encoder.first(x), LOW))
        torch.testing.assert_close(levels.logits, model(x).logits)


# --- a stack of clients, and training -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), SMALL)
@pytest.mark.slow
def test_vmap_over_clients_equals_a_loop(name: str, options: dict) -> None:
    shape, classes, clients, batch = (3, 17, 19), 3, 2, 4
    # double: few values stand behind a batch norm at the end, which magnifies rounding
    nets = [models.build(name, shape, classes, **options).double() for _ in range(clients)]
    x = torch.randn(clients, batch, *shape, dtype=torch.double)
    y = torch.randint(classes, (clients, batch))
    assert_stack_equals_loop(nets, x, y, levels=True)


@pytest.mark.parametrize(
    ("name", "width"),
    [("resnet18", 0.125), ("googlenet", 0.125), ("mobilenetv2", 0.25), *[(n, None) for n in CONVNETS]],
)
@pytest.mark.slow
def test_training_from_scratch_fits_a_small_batch(name: str, width: float | None) -> None:
    model = models.build(name, (3, 32, 32), 4, **({} if width is None else {"width": width}))
    assert_fits_a_small_batch(model)
