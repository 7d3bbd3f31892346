"""Normalisation as a choice, static batch norm, ResNet8, ResNet9 and the wide residual network."""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from protofed import models
from protofed.models.base import LOW, Stages
from protofed.models.norm import (
    BatchNorm2d,
    Norm,
    StaticBatchNorm2d,
    collecting,
    collects,
    is_static,
    norm_layer,
)
from support.errors import refusal
from support.marks import slow_but
from support.networks import assert_fits_a_small_batch, assert_stack_equals_loop, count, draw_statistics

NORMS = get_args(Norm)
TINY: dict[str, dict] = {
    "cnn": {"channels": (4, 6)},
    "resnet18": {"width": 0.1},
    "googlenet": {"width": 0.05},
    "mobilenetv2": {"width": 0.1},
    "tinyconvnet4": {},
    "middleconvnet4": {},
    "largeconvnet4": {},
    "resnet8": {"width": 0.05},
    "resnet9": {"width": 0.05},
    "wideresnet": {"depth": 10, "widen": 1},
}


pytestmark = pytest.mark.usefixtures("seeded")


# --- the choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_every_convolutional_model_has_the_choice(name: str) -> None:
    kinds = {"batch": BatchNorm2d, "static": StaticBatchNorm2d, "group": nn.GroupNorm}
    keys, counts = {}, {}
    for norm in NORMS:
        model = models.build(name, (3, 16, 16), 3, norm=norm, **TINY[name])
        layers = [m for m in model.modules() if isinstance(m, (*kinds.values(), nn.GroupNorm))]
        assert {type(m) for m in layers} == ({kinds[norm]} if norm in kinds else set())
        convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
        if norm != "none" and name != "wideresnet":  # where a shortcut convolves without a norm
            assert len(layers) == len(convolutions)
        keys[norm], counts[norm] = set(model.state_dict()), models.parameter_count(model)
        assert bool(model(torch.randn(2, 3, 16, 16)).embedding.isfinite().all())
    assert keys["batch"] == keys["static"] > keys["group"] > keys["none"]
    assert counts["batch"] == counts["static"] == counts["group"] > counts["none"]


@pytest.mark.parametrize("name", TINY)
def test_the_default_is_the_published_network(name: str) -> None:
    default = "none" if name in ("cnn", "resnet8", "resnet9") else "batch"
    assert models.make(name, (3, 16, 16)).norm == default  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", TINY)
def test_an_unknown_kind_is_one_line(name: str) -> None:
    assert "norm" in refusal(lambda: models.build(name, (3, 16, 16), 3, norm="layer"))
    kind = models.registry[name]
    text = refusal(lambda: kind(norm="layer"))  # type: ignore[call-arg]
    assert text == f"model {name!r}: norm='layer'; expected one of 'none', 'batch', 'group', 'static'"


@given(st.integers(1, 700))
def test_groups_divide_the_channels(channels: int) -> None:
    layer = norm_layer("group", channels)
    assert isinstance(layer, nn.GroupNorm)
    assert layer.num_groups == max(n for n in range(1, 33) if channels % n == 0)


def test_group_norm_by_hand() -> None:
    layer, x = norm_layer("group", 64), torch.randn(2, 64, 3, 5)
    pairs = x.reshape(2, 32, 2, 3, 5)  # 64 channels in 32 groups
    mean, var = pairs.mean((2, 3, 4), keepdim=True), pairs.var((2, 3, 4), unbiased=False, keepdim=True)
    torch.testing.assert_close(layer(x), ((pairs - mean) / (var + 1e-5).sqrt()).reshape(x.shape))


def test_googlenets_layers_keep_their_epsilon() -> None:
    for norm in ("batch", "group", "static"):
        block = models.build("googlenet", (3, 16, 16), 3, width=0.05, norm=norm).encoder.conv1
        assert block.bn.eps == 0.001


def test_cnn_normalises_before_it_pools() -> None:
    model = models.build("cnn", (1, 16, 16), 2, norm="group", channels=(3, 4)).double()
    e, x = model.encoder, torch.randn(2, 1, 16, 16).double()
    h = F.relu(F.max_pool2d(F.group_norm(e.conv1(x), 3), 2))
    torch.testing.assert_close(e.early(x), h)
    h = F.relu(F.max_pool2d(F.group_norm(e.conv2(h), 4), 2))
    torch.testing.assert_close(model(x).embedding, F.relu(e.fc1(h.flatten(1))))


def test_pretrained_files_need_batch_norm_s_statistics(tmp_path: object) -> None:
    for norm in ("none", "group"):
        text = refusal(lambda n=norm: models.ResNet18(pretrained="file.pt", norm=n))
        assert text == f"model 'resnet18': norm='{norm}'; expected 'batch' or 'static' with pretrained=file.pt"
    file = f"{tmp_path}/weights.pt"
    published = models.build("resnet18", (3, 32, 32), 3)
    published.encoder.bn1.running_mean.normal_()
    torch.save({k.removeprefix("encoder."): v for k, v in published.encoder.state_dict().items()}, file)
    model = models.build("resnet18", (3, 32, 32), 3, pretrained=file, norm="static")
    assert torch.equal(model.encoder.bn1.running_mean, published.encoder.bn1.running_mean)


# --- static batch norm ------------------------------------------------------------------------------------------------


def test_training_normalises_by_the_batch_and_keeps_nothing() -> None:
    ours, theirs = StaticBatchNorm2d(3), nn.BatchNorm2d(3)
    for _ in range(2):
        x = torch.randn(5, 3, 4, 4) * 3 + 1
        torch.testing.assert_close(ours(x), theirs(x))
    assert torch.equal(ours.running_mean, torch.zeros(3)) and torch.equal(ours.running_var, torch.ones(3))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, nn.modules.batchnorm._BatchNorm)  # what an engine looks for


@pytest.mark.parametrize("training", [True, False])
def test_collected_statistics_are_the_mean_over_the_passes(training: bool) -> None:
    layer = StaticBatchNorm2d(3).double().train(training)
    layer.running_mean.fill_(1e6)  # what was there is replaced
    nn.init.normal_(layer.weight)
    batches = [torch.randn(n, 3, 4, 5).double() * (n + 1) + n for n in (6, 6, 2)]
    for k, x in enumerate(batches, 1):
        with torch.no_grad(), collecting(layer, k):
            out = layer(x)
        torch.testing.assert_close(out, F.batch_norm(x, None, None, layer.weight, layer.bias, True))
    mean = sum(x.mean((0, 2, 3)) for x in batches) / 3
    var = sum(x.var((0, 2, 3), unbiased=True) for x in batches) / 3
    torch.testing.assert_close(layer.running_mean, mean, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(layer.running_var, var)
    x, layer = torch.randn(1, 3, 2, 2).double(), layer.eval()
    column = [t[:, None, None] for t in (mean, var, layer.weight, layer.bias)]
    expected = (x - column[0]) / (column[1] + 1e-5).sqrt() * column[2] + column[3]
    torch.testing.assert_close(layer(x), expected)


def test_collecting_agrees_with_pytorch_s_cumulative_average() -> None:
    ours, theirs = StaticBatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
    for k in range(1, 5):
        x = torch.randn(7, 4, 3, 3) + k
        with collecting(ours, k):
            ours(x)
        theirs(x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_collecting_ends_even_after_an_error() -> None:
    model = models.build("cnn", (1, 16, 16), 2, norm="static")
    with pytest.raises(RuntimeError), collecting(model, 1):
        model(torch.randn(2, 5, 16, 16))
    before = {k: v.clone() for k, v in model.named_buffers()}
    model(torch.randn(2, 1, 16, 16))
    assert all(torch.equal(before[k], v) for k, v in model.named_buffers())
    with pytest.raises(ValueError, match="counted from 1, not 0"), collecting(model, 0):
        pass


def test_who_collects() -> None:
    for norm in NORMS:
        model = models.build("wideresnet", (3, 8, 8), 2, depth=10, widen=1, norm=norm)
        assert collects(model) == any(is_static(m) for m in model.modules()) == (norm == "static")
    assert not collects(models.build("mlp", (4,), 2))


def test_only_static_layers_collect() -> None:
    model = nn.Sequential(BatchNorm2d(2), StaticBatchNorm2d(2)).eval()
    with collecting(model, 1):
        model(torch.randn(4, 2, 3, 3) + 5)
    assert torch.equal(model[0].running_mean, torch.zeros(2))
    assert not torch.equal(model[1].running_mean, torch.zeros(2))


@pytest.mark.parametrize("name", ["cnn", "resnet9", "wideresnet"])
def test_collecting_in_a_stack_equals_a_loop(name: str) -> None:
    clients = 3
    nets = [models.build(name, (3, 16, 16), 3, norm="static", **TINY[name]).double() for _ in range(clients)]
    x = torch.randn(2, clients, 4, 3, 16, 16).double()
    params, buffers = stack_module_state(nets)
    running = {k: v for k, v in buffers.items() if v.is_floating_point()}
    skeleton = copy.deepcopy(nets[0]).eval()

    def one(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        own = {k: v.clone() for k, v in b.items()}
        functional_call(skeleton, {**p, **own}, (x,))
        return own

    with torch.no_grad():
        for k in (1, 2):
            with collecting(skeleton, k):
                running = vmap(one)(params, running, x[k - 1])
            for i, net in enumerate(nets):
                with collecting(net, k):
                    net.eval()(x[k - 1, i])
    for i, net in enumerate(nets):
        for key, value in net.named_buffers():
            if value.is_floating_point():
                torch.testing.assert_close(running[key][i], value, msg=key)
                assert not torch.equal(value, torch.zeros_like(value))


# --- ResNet8 and ResNet9 ------------------------------------------------------------------------------------------------


def test_the_parameters_of_protofssl_table_6() -> None:
    assert count("resnet8", (3, 32, 32), 10) == 6_563_520
    assert count("resnet9", (3, 32, 32), 10) == 6_568_640
    assert count("resnet9", (1, 28, 28), 7) == 6_563_520 - 2 * 64 * 9 + 7 * 512
    model = models.build("resnet9", (3, 32, 32), 10, width=0.25)
    assert [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)] == [16, 32, 32, 32, 64, 128, 128, 128]
    assert model.dim == 128 and model.head.bias is None
    with torch.device("meta"):
        sizes = [p.numel() for p in models.build("resnet9", (3, 32, 32), 10).parameters()]
    assert sizes == [1728, 73_728, 147_456, 147_456, 294_912, 1_179_648, 2_359_296, 2_359_296, 5_120]


@pytest.mark.parametrize("name", ["resnet8", "resnet9"])
@pytest.mark.parametrize(
    ("shape", "pools"),
    [(shape, (2, 2, 2)) for shape in ((3, 32, 32), (1, 28, 28), (3, 16, 16), (2, 17, 40))]
    + [((3, 96, 96), (3, 2, 4)), ((1, 48, 36), (4, 1, 3))],
)
def test_resnet9_by_hand(name: str, shape: tuple[int, ...], pools: tuple[int, int, int]) -> None:
    model = models.build(name, shape, 4, width=0.1, **({"pools": pools} if pools == (4, 1, 3) else {}))
    w = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    x = torch.randn(2, *shape)

    def unit(h: Tensor, i: int) -> Tensor:
        return F.conv2d(h, w[i - 1], padding=1).clamp(min=0)

    low = F.max_pool2d(unit(unit(x, 1), 2), pools[0])
    h = unit(unit(low, 3), 4) + low
    h = F.max_pool2d(unit(h, 5), pools[1])
    h = F.max_pool2d(unit(h, 6), pools[2])
    h = unit(unit(h, 7), 8) + h
    z = h.amax((2, 3))
    levels = model(x, levels=True)
    torch.testing.assert_close(levels.embedding, z)
    torch.testing.assert_close(levels.low, F.adaptive_avg_pool1d(low.flatten(1), LOW))
    if shape in ((3, 32, 32), (3, 96, 96)):
        assert model.encoder.pool4.kernel_size == (4, 4)
    logits = torch.zeros(2, 4) if name == "resnet8" else z @ model.head.weight.T
    torch.testing.assert_close(levels.logits, logits)
    assert isinstance(model.encoder, Stages)


def test_embeddings_do_not_shrink_without_normalisation() -> None:
    z = models.build("resnet8", (3, 32, 32), 10)(torch.randn(4, 3, 32, 32)).embedding.detach()
    assert 0.3 < float(z.std()) < 3  # PyTorch's own start gives 0.06


def test_resnet8_has_no_head_but_its_logits_have_a_gradient() -> None:
    model = models.build("resnet8", (3, 16, 16), 5, width=0.05)
    assert not [k for k in model.state_dict() if k.startswith("head")]
    output = model(torch.randn(3, 3, 16, 16))
    loss = F.cross_entropy(output.logits, torch.tensor([0, 1, 4]))
    torch.testing.assert_close(loss.detach(), torch.tensor(5.0).log())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)
    wrong = torch.full((2, model.dim), float("inf"))
    assert torch.equal(model.head(wrong), torch.zeros(2, 5))


def test_a_projection_gives_resnet8_a_head() -> None:
    model = models.Projected(models.ResNet8(width=0.05), "linear", dim=7).build((3, 16, 16), 5)
    output = model(torch.randn(2, 3, 16, 16))
    assert output.embedding.shape == (2, 7) and bool((output.logits != 0).all())


@pytest.mark.parametrize("name", ["resnet8", "resnet9"])
def test_wrong_settings_and_samples_are_one_line(name: str) -> None:
    for width in (0, -1.0, float("nan"), float("inf")):
        assert f"model {name!r}: width=" in refusal(lambda w=width: models.build(name, (3, 32, 32), 4, width=w))
    assert "at least 16x16" in refusal(lambda: models.build(name, (3, 15, 32), 4))
    assert "a sample has shape [64]" in refusal(lambda: models.build(name, (64,), 4))


# --- the wide residual network --------------------------------------------------------------------------------------------


def wideresnet_parameters(channels: int, classes: int, n: int, widen: int) -> int:
    total, before = channels * 16 * 9, 16
    for width in (16 * widen, 32 * widen, 64 * widen):
        for _ in range(n):
            total += 2 * before + 9 * before * width + 2 * width + 9 * width**2
            total += before * width if before != width else 0
            before = width
    return total + 2 * before + (before + 1) * classes


def test_wrn_28_2_has_the_usual_parameters() -> None:
    assert count("wideresnet", (3, 32, 32), 10) == 1_467_610
    assert count("wideresnet", (3, 32, 32), 10, depth=28, widen=10) == 36_479_194  # WRN-28-10 of its paper
    assert models.build("wideresnet", (3, 8, 8), 10).dim == 128  # Fed-ARPL's prototypes


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 3]), st.integers(2, 30), st.integers(1, 3), st.integers(1, 3))
def test_wideresnet_parameters_by_formula(channels: int, classes: int, n: int, widen: int) -> None:
    found = count("wideresnet", (channels, 9, 9), classes, depth=6 * n + 4, widen=widen)
    assert found == wideresnet_parameters(channels, classes, n, widen)


@pytest.mark.parametrize("widen", [1, 2])
def test_wideresnet_by_hand(widen: int) -> None:
    """Against an independent forward that reads the state dict only."""
    model = models.build("wideresnet", (2, 13, 10), 4, depth=16, widen=widen).double()
    draw_statistics(model)
    model.eval()
    s = {k.removeprefix("encoder."): v for k, v in model.state_dict().items()}

    def active(at: str, x: Tensor) -> Tensor:
        column = {k: s[f"{at}.{k}"][:, None, None] for k in ("running_mean", "running_var", "weight", "bias")}
        x = (x - column["running_mean"]) / (column["running_var"] + 1e-5).sqrt()
        return (x * column["weight"] + column["bias"]).clamp(min=0)

    x = torch.randn(3, 2, 13, 10).double()
    h = F.conv2d(x, s["conv1.weight"], padding=1)
    for group, stride in ((1, 1), (2, 2), (3, 2)):
        for block in (0, 1):
            at = f"group{group}.{block}"
            step = stride if block == 0 else 1
            inner = active(f"{at}.bn1", h)
            out = F.conv2d(inner, s[f"{at}.conv1.weight"], stride=step, padding=1)
            out = F.conv2d(active(f"{at}.bn2", out), s[f"{at}.conv2.weight"], padding=1)
            key = f"{at}.shortcut.weight"
            assert (key in s) == (block == 0 and (group > 1 or widen > 1))
            h = out + (F.conv2d(inner, s[key], stride=step) if key in s else h)
        if group == 1:
            low = h
    z = active("bn", h).mean((2, 3))
    levels = model(x, levels=True)
    torch.testing.assert_close(levels.embedding, z)
    torch.testing.assert_close(levels.low, F.adaptive_avg_pool1d(low.flatten(1), LOW))
    torch.testing.assert_close(levels.logits, z @ s["head.weight"].T + s["head.bias"])
    assert z.shape[1] == model.dim == 64 * widen


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"depth": 27}, "depth=27; expected 10, 16, 22, 28 and so on"),
        ({"depth": 4}, "depth=4; expected 10"),
        ({"depth": -2}, "depth=-2; expected 10"),
        ({"widen": 0}, "widen=0; expected at least 1"),
        ({"widen": 1.5}, "widen"),
    ],
)
def test_wideresnets_wrong_settings_are_one_line(options: dict, says: str) -> None:
    text = refusal(lambda: models.build("wideresnet", (3, 32, 32), 4, **options))
    assert says in text and "model 'wideresnet'" in text


# --- a stack of clients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", slow_but("static", NORMS))
@pytest.mark.parametrize("name", TINY)
def test_vmap_over_clients_equals_a_loop(name: str, norm: str) -> None:
    shape, classes, clients, batch = (3, 16, 18), 3, 2, 4
    # double: few values stand behind a normalisation at the end, which magnifies rounding
    nets = [models.build(name, shape, classes, norm=norm, **TINY[name]).double() for _ in range(clients)]
    x = torch.randn(clients, batch, *shape, dtype=torch.double)
    y = torch.randint(classes, (clients, batch))
    assert_stack_equals_loop(nets, x, y, levels=True)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet9", {"width": 0.25}),
        ("resnet9", {"width": 0.25, "norm": "static"}),
        ("wideresnet", {"depth": 10, "norm": "static"}),
        ("wideresnet", {"depth": 10, "norm": "group"}),
    ],
)
@pytest.mark.slow
def test_training_from_scratch_fits_a_small_batch(name: str, options: dict) -> None:
    model = models.build(name, (3, 32, 32), 4, **options)
    x, y = assert_fits_a_small_batch(model)
    if collects(model):  # evaluation by the collected statistics agrees with what was learned
        model.eval()
        with torch.no_grad(), collecting(model, 1):
            model(x)
        with torch.no_grad():
            assert torch.equal(model(x).logits.argmax(1), y)
