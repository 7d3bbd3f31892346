"""Computed cost: operations counted by hand, and ProtoFSSL's Tables 1 and 2."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from protofed import models
from protofed.errors import ProtofedError
from protofed.evaluate.cost import client_bytes, client_flops, forward_flops

pytestmark = pytest.mark.usefixtures("seeded")


# --- operations of a forward pass -----------------------------------------------------------------------------------


def resnet9_by_hand(classes: int) -> int:
    """From Table 6 alone: kernel, channels and the side of each convolution's output."""
    layers = [
        *((3, 64, 32), (64, 128, 32), (128, 128, 16), (128, 128, 16)),
        *((128, 256, 16), (256, 512, 8), (512, 512, 4), (512, 512, 4)),
    ]
    multiply_adds = sum(9 * before * after * side**2 for before, after, side in layers) + 512 * classes
    activations = sum(after * side**2 for _, after, side in layers)
    pooled = 128 * 32**2 + 256 * 16**2 + 512 * 8**2 + 512 * 4**2
    sums = 128 * 16**2 + 512 * 4**2
    return 2 * multiply_adds + activations + pooled + sums


@pytest.fixture(scope="module")
def resnet9() -> int:
    return forward_flops(models.build("resnet9", (3, 32, 32), 10), (3, 32, 32))


def test_resnet9_by_hand(resnet9: int) -> None:
    assert resnet9 == resnet9_by_hand(10) == 759_179_264
    assert forward_flops(models.build("resnet8", (3, 32, 32), 10), (3, 32, 32)) == resnet9 - 2 * 5120


@pytest.mark.parametrize(
    ("module", "shape", "flops"),
    [
        (nn.Linear(7, 5), (7,), 70),
        (nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Flatten()), (7,), 75),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 9, 7), 2 * 27 * 4 * 5 * 4),
        (nn.Conv2d(6, 6, 3, groups=6), (6, 5, 5), 2 * 9 * 6 * 9),
        (nn.MaxPool2d(3, 1, padding=1), (2, 5, 6), 9 * 60),
        (nn.AvgPool2d(2), (2, 4, 6), 48),
        (nn.AvgPool2d((1, 3)), (2, 4, 6), 48),
        (nn.AdaptiveAvgPool2d(1), (2, 4, 6), 48),
        (nn.AdaptiveAvgPool2d(2), (2, 4, 6), 48),
        (nn.BatchNorm2d(2), (2, 4, 6), 96),
        (nn.GroupNorm(1, 2), (2, 4, 6), 96),
        (nn.LayerNorm(6), (4, 6), 48),
        (nn.Identity(), (3,), 0),
    ],
)
def test_each_kind_of_layer(module: nn.Module, shape: tuple[int, ...], flops: int) -> None:
    assert forward_flops(module, shape) == flops


def test_cnn_by_hand() -> None:
    convolutions = 2 * (75 * 10 * 28**2 + 250 * 20 * 10**2)
    pools, activations = 10 * 28**2 + 20 * 10**2, 10 * 14**2 + 20 * 5**2 + 50
    expected = convolutions + pools + activations + 2 * (500 * 50 + 50 * 10)
    assert forward_flops(models.build("cnn", (3, 32, 32), 10), (3, 32, 32)) == expected


@pytest.mark.slow
def test_attention_is_counted_and_grows_with_the_square_of_the_length() -> None:
    pytest.importorskip("transformers")
    model = models.build("bert", (64,), 3)
    n = [forward_flops(model, (length,), tokens=True) for length in (16, 32, 48)]
    layers, width = 2, 64
    # the second difference has no linear part: two products of length × length × width in each layer, and what is done
    # to each of the attention's length × length values in each of two heads
    assert n[2] - 2 * n[1] + n[0] >= layers * 2 * 2 * width * 2 * 16**2


def test_counting_changes_nothing() -> None:
    model = models.build("wideresnet", (3, 8, 8), 3, depth=10, widen=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert forward_flops(model, (3, 8, 8)) == forward_flops(model, (3, 8, 8)) > 0
    assert model.training and torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    forward_flops(model.eval(), (3, 8, 8))
    assert not model.training


def test_the_training_mode_comes_back_when_the_model_fails() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(RuntimeError):
        forward_flops(model, (5,))
    assert model.training


# --- a client and round -----------------------------------------------------------------------------------------------

TABLE = {"labelled": 50, "unlabelled": 490, "epochs": 1, "helpers": 2, "classes": 10, "dim": 512}


@pytest.mark.parametrize(("kind", "giga"), [("fixmatch", 782.0), ("fedmatch", 1526.0), ("protofssl", 447.9)])
def test_operations_of_table_2(kind: str, giga: float, resnet9: int) -> None:
    assert round(client_flops(kind, resnet9, **TABLE) / 1e9, 1) == giga  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "mega"), [("fixmatch", 52.6), ("fedmatch", 115.6), ("protofssl", 52.6)])
def test_bytes_of_table_2(kind: str, mega: float) -> None:
    found = client_bytes(kind, 6_568_640, helpers=2, refresh=10, classes=10, dim=512) / 1e6  # type: ignore[arg-type]
    assert found == pytest.approx(mega, rel=0.001)  # 52.549 for fixmatch: the paper doubles a rounded 26.3


def test_bytes_exactly() -> None:
    options = {"helpers": 3, "refresh": 4, "classes": 7, "dim": 5}
    assert client_bytes("supervised", 100, **options) == client_bytes("fixmatch", 100, **options) == 800
    assert client_bytes("fedmatch", 100, **options) == 5.5 * 400
    assert client_bytes("protofssl", 100, **options) == 800 + 4 * 5 * 4 * 7


@given(*[st.integers(0, 60)] * 4, st.integers(1, 5), st.integers(1, 9))
def test_operations_against_a_loop(
    labelled: int, unlabelled: int, helpers: int, classes: int, epochs: int, dim: int
) -> None:
    forward = 1000.0
    totals = dict.fromkeys(("supervised", "fixmatch", "fedmatch", "protofssl"), 0.0)
    for _ in range(epochs):
        for kind in totals:
            totals[kind] += forward * labelled
        for _ in range(unlabelled):
            totals["fixmatch"] += 2 * forward  # weak and strong
            totals["fedmatch"] += 2 * forward + helpers * forward
            totals["protofssl"] += forward + helpers * classes * dim
    totals["protofssl"] += labelled * forward  # the prototypes that are sent
    for kind, total in totals.items():
        found = client_flops(
            kind,  # type: ignore[arg-type]
            forward,
            labelled,
            unlabelled,
            epochs,
            helpers=helpers,
            classes=classes,
            dim=dim,
        )
        assert found == total


def test_what_has_no_formula() -> None:
    with pytest.raises(ProtofedError, match=r"'fedavg'; expected one of supervised, fixmatch, fedmatch, protofssl"):
        client_flops("fedavg", 1.0, **TABLE)  # type: ignore[arg-type]
    with pytest.raises(ProtofedError, match="'fedavg'"):
        client_bytes("fedavg", 1, helpers=2, refresh=1, classes=1, dim=1)  # type: ignore[arg-type]
    with pytest.raises(ProtofedError, match="refresh=0; expected at least 1"):
        client_bytes("fedmatch", 1, helpers=2, refresh=0, classes=1, dim=1)
