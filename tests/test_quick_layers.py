"""Layers for small steps: the same numbers as torch's own, or the same distribution, by independent computations."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from protofed import models
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.optimiser import LocalSettings, Optimiser
from protofed.models import quick
from protofed.models.convolution import has_few_outputs
from protofed.parts.feed import Epochs, epoch_sizes
from protofed.registry import parse_part
from support.engines import LOOP, images

LAST = torch.channels_last


def test_flatten_has_torchs_bits_and_a_gradient_with_channels_last(monkeypatch):
    monkeypatch.setattr(quick, "FLATTENED", 300)
    x = torch.randn(3, 4, 5, 6).contiguous(memory_format=LAST).requires_grad_()
    weights = torch.randn(3, 120)
    found, gradients = [], []
    for layer in (nn.Flatten(), quick.with_quick_layers(nn.Sequential(nn.Flatten()))[0]):
        found.append(layer(x))
        gradients += torch.autograd.grad((found[-1] * weights).sum(), x)
    assert torch.equal(*found) and torch.equal(*gradients)
    assert gradients[1].is_contiguous(memory_format=LAST)


def test_a_pooled_relu_has_the_bits_of_a_relu_that_is_pooled():
    torch.manual_seed(2)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten()]
    plain = nn.Sequential(*layers).to(memory_format=LAST)
    twin = quick.with_quick_layers(plain)
    kinds = [type(layer).__name__ for layer in twin]
    assert kinds == ["Conv2d", "ReLU", "Conv2d", "MaxPool2d", "ReLU", "ChannelsLastFlatten"]
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in plain.named_parameters()]
    x = torch.randn(5, 3, 17, 16).contiguous(memory_format=LAST)
    found = []
    for network in (plain, twin):
        y = network(x)
        g = torch.Generator().manual_seed(7)
        gradients = torch.autograd.grad((y * torch.randn(y.shape, generator=g)).sum(), list(network.parameters()))
        found.append([y, *gradients])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    early = models.build("dropout-cnn", (3, 16, 16), 4)
    early.encoder.cut = 4  # between ReLU and pooling: what is before it is read as a low-level feature
    eased = quick.with_quick_layers(early).eval()
    assert torch.equal(eased(x, levels=True).low, early.eval()(x, levels=True).low)


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.1])
@pytest.mark.parametrize("last", [False, True])
def test_dropout_keeps_values_at_its_rate_and_their_mean(rate, last):
    layer = quick.with_quick_layers(nn.Sequential(nn.Dropout(rate)))[0]
    assert type(layer) is quick.BitDropout
    x = torch.ones(40, 8, 11, 13)
    x = (x.contiguous(memory_format=LAST) if last else x).requires_grad_()
    torch.manual_seed(5)
    y = layer(x)
    torch.manual_seed(5)
    assert torch.equal(y, layer(x)) and not torch.equal(y, layer(x))
    kept = round(rate * 2**16) / 2**16
    assert set(y.detach().unique().tolist()) == {0.0, y.max().item()} and y.max().item() == pytest.approx(
        1 / (1 - kept)
    )
    share = (y == 0).float().mean().item()
    assert abs(share - rate) < 5 * (rate * (1 - rate) / x.numel()) ** 0.5
    by_channel = (y == 0).float().mean((0, 2, 3))
    assert (by_channel - rate).abs().max() < 6 * (rate * (1 - rate) / (x.numel() / 8)) ** 0.5
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    layer.eval()
    assert layer(x) is x


@pytest.mark.parametrize("proximal", [False, True])
def test_a_step_with_a_product_is_a_step_with_its_gradient(proximal, monkeypatch):
    monkeypatch.setattr(quick, "LARGE", 50)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(9, 40), nn.ReLU(), nn.Linear(40, 3))
    twin = quick.with_quick_layers(plain)
    layers = dict(quick.product_layers(twin))
    assert set(layers) == {"0.weight", "2.weight"}
    from protofed.federation.local import _gradients

    start = [p.detach().clone() for p in plain.parameters()]
    local = LocalSettings(lr=0.1, momentum=0.7)
    for network, product in ((plain, {}), (twin, layers)):
        params = dict(network.named_parameters())
        optimiser = Optimiser(local, params, {})
        generator = torch.Generator().manual_seed(3)
        with quick.factors_of(product):
            for _ in range(4):
                x, y = torch.randn(2, 5, 9, generator=generator), torch.randint(3, (2, 5), generator=generator)
                loss = sum(nn.functional.cross_entropy(network(a), b) for a, b in zip(x, y, strict=True))  # used twice
                if proximal:  # the weight has a gradient of its own beside the product
                    loss = loss + sum((p - s).square().sum() for p, s in zip(params.values(), start, strict=True))
                optimiser.step(*_gradients(loss, params, product))
    assert all(layer.factors is None for layer in layers.values())
    for a, b in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(not torch.equal(p, s) for p, s in zip(twin.parameters(), start, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        {"optimiser": "adam"},
        {"momentum": 0.0},
        {"nesterov": True},
        {"clip": 1.0},
        {"weight_decay": 0.1},
        {"gradients": True},
    ],
)
def test_products_are_for_sgd_that_reads_no_gradient(other):
    params = {"w": torch.zeros(2, 2)}
    assert Optimiser(LocalSettings(), params, {}).takes_products
    assert not Optimiser(LocalSettings(**other), params, {}).takes_products


def test_a_run_with_products_equals_the_contiguous_loop(monkeypatch):
    monkeypatch.setattr(quick, "LARGE", 100)
    keys = {
        "data": images(), "clients": 2, "rounds": 2, "shot": 6, "batch": 3, "mu": 0.1,
        "model": {"name": "dropout-cnn", "channels": (4, 5), "embedding": 8, "dropout": (0.0, 0.0)},
    }  # fmt: skip
    found = []
    for engine in (LOOP, replace(LOOP, layout="channels_last")):
        _, federation = build(resolve("fedprox", keys).with_engine(engine))
        assert bool(dict(quick.product_layers(federation.engine.skeleton.module))) == (engine is not LOOP)
        for _ in range(2):
            federation.step()
        found.append(federation.state.weights)
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "shape", "batch", "few"),
    [
        ("dropout-cnn", (3, 32, 32), 10, False),
        ("cnn?channels=32,64", (1, 28, 28), 8, False),
        ("cnn?channels=32,64", (1, 28, 28), 2, True),  # 2 × 8 × 8 output positions
        ("resnet18?stem=imagenet&width=0.125", (3, 32, 32), 8, True),
    ],
)
def test_where_lean_convolutions_differ(model, shape, batch, few):
    network = parse_part(models.registry, model).build(shape, 10)
    assert has_few_outputs(network, shape, batch) is few and network.training
    assert not any(layer._forward_pre_hooks for layer in network.modules())


@given(st.integers(0, 40), st.integers(1, 9))
def test_batch_sizes_of_an_epoch(n, batch):
    rows = list(range(n))
    cut = [rows[k : k + batch] for k in range(0, n, batch)] or [[]]
    if batch > 1 and len(cut) > 1 and len(cut[-1]) == 1:
        cut[-2:] = [cut[-2] + cut[-1]]
    assert epoch_sizes(n, batch) == [len(rows) for rows in cut]


def test_epochs_as_one_order_and_as_steps():
    labels = torch.zeros(11)
    steps = Epochs().steps(labels, 0, 2, 5, 1, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    first, second = torch.randperm(11, generator=generator), torch.randperm(11, generator=generator)
    expected = [first[:5], first[5:], second[:5], second[5:]]
    assert len(steps) == 4 and all(torch.equal(s.labelled, e) for s, e in zip(steps, expected, strict=True))
    assert torch.equal(steps[2].labelled, expected[2]) and torch.equal(steps.order, torch.cat([first, second]))
