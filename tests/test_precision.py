"""precision=bf16: networks compute in bfloat16, everything that is kept, sent and measured is float32."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import protofed as pf
from protofed import methods, models
from protofed.data import Dataset
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.models.convolution import LeanConv2d, with_convolutions
from protofed.models.precision import with_precision
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for


def pictures():
    g = torch.Generator().manual_seed(0)
    y = torch.arange(160) % 4
    x = 2 * torch.randn(4, 1, 16, 16, generator=g)[y] + torch.randn(160, 1, 16, 16, generator=g)
    return Dataset.from_arrays(x[:120], y[:120], x[120:], y[120:], num_classes=4, name="pictures")


KEYS = {"clients": 3, "way": 2, "shot": 6, "batch": 4, "threads": 1, "snapshots": 0, "silhouette": False, "rounds": 2}


def after_a_round(method, **given):
    federation = build(resolve(method, {"data": pictures(), "model": "lenet", **KEYS, **labels_for(method), **given}))[
        1
    ]
    try:
        record = federation.step()
        states = dict(federation.engine.export())
        return record, {c: {n: w.clone() for n, w in s.weights.items()} for c, s in states.items()}, states
    finally:
        federation.engine.close()


@pytest.mark.parametrize("method", slow_but(("fedproto", "fedavg"), methods.available()))
def test_every_method_trains_and_keeps_float32(method):
    loop, stack = (after_a_round(method, precision="bf16", engine=e, workers=1) for e in ("loop", "stack"))
    exact = after_a_round(method, engine="loop", workers=1)
    for record, weights, states in (loop, stack):
        assert all(value.dtype == torch.float32 for values in weights.values() for value in values.values())
        assert all(state.bank is None or state.bank.means.dtype == torch.float32 for state in states.values())
        assert {"accuracy", "accuracy_head"} & record.metrics.keys()
        for name, value in record.terms.items():
            assert math.isfinite(value), name
            if not method.startswith("fedmatch"):  # whose steep loss turns a small difference into a large one
                assert value == pytest.approx(exact[0].terms[name], rel=0.1, abs=0.05), name
    moved = any(not torch.equal(v, exact[1][c][n]) for c, values in loop[1].items() for n, v in values.items())
    assert moved or not loop[1]  # it is another computation


@pytest.mark.slow
def test_workers_give_the_bits_of_one_process():
    one = after_a_round("fedproto", precision="bf16", engine="loop", layout="contiguous", workers=1)
    two = after_a_round("fedproto", precision="bf16", engine="workers", inner="loop", layout="contiguous", workers=2)
    assert all(torch.equal(v, two[1][c][n]) for c, values in one[1].items() for n, v in values.items())


def test_a_network_rounds_its_products_and_gives_float32():
    network = models.registry.make("mlp", {"hidden": [16]}).build((6,), 3)
    reduced = with_precision(copy.deepcopy(network), "bf16")
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    out, exact = reduced(x), network(x)
    assert type(out) is type(exact) and all(t.dtype == torch.float32 for t in out)
    assert not torch.equal(out.logits, exact.logits)
    assert torch.allclose(out.logits, exact.logits, atol=0.05)
    by_hand = x.bfloat16()  # the same, written out
    layers = [m for m in network.modules() if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        by_hand = F.linear(by_hand, layer.weight.bfloat16(), layer.bias.bfloat16()).relu()
    assert torch.allclose(out.embedding, by_hand.float(), atol=1e-2)
    out.logits.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in reduced.parameters() if p.grad is not None)
    assert with_precision(network, "float32") is network and type(network) is not type(reduced)


@pytest.mark.parametrize(("size", "batch"), [(1, 4), (2, 3), (6, 5)])
def test_lean_convolutions_have_torchs_gradients_in_bfloat16(size, batch):
    torch.manual_seed(0)
    plain = nn.Conv2d(32, 8, 3, padding=1).to(memory_format=torch.channels_last)
    lean = with_convolutions(nn.Sequential(plain), LeanConv2d)[0]
    x = torch.randn(batch, 32, size, size).contiguous(memory_format=torch.channels_last)
    for layer in (plain, lean):
        layer.x = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(layer.x)
        assert y.dtype == torch.bfloat16
        (y.float() ** 2).sum().backward()
    for ours, theirs in ((lean.x.grad, plain.x.grad), (lean.weight.grad, plain.weight.grad)):
        assert ours.dtype == torch.float32
        assert torch.allclose(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))


def test_lean_convolutions_under_transforms_of_torch():
    layer = with_convolutions(nn.Sequential(nn.Conv2d(32, 4, 3, padding=1)), LeanConv2d)[0]
    x = torch.randn(2, 32, 1, 1)
    ours = torch.func.grad(lambda w: F.mse_loss(torch.func.functional_call(layer, {"weight": w}, (x,)), x[:, :4]))
    theirs = torch.func.grad(lambda w: F.mse_loss(F.conv2d(x, w, layer.bias, padding=1), x[:, :4]))
    assert torch.allclose(ours(layer.weight.detach()), theirs(layer.weight.detach()))


def test_it_is_recorded_and_refused_where_it_makes_no_sense(tmp_path):
    assert resolve("local", {}).general.precision == "float32"
    result = pf.run("local", out=tmp_path / "run", data=blobs(), **{**SMALL, "rounds": 1}, precision="bf16")
    assert 'precision = "bf16"' in (tmp_path / "run/settings.toml").read_text()
    assert result.summary["last_round"]["accuracy_head"] > 0
    with pytest.raises(ProtofedError, match="precision"):
        resolve("local", {"precision": "fp8"})
    with pytest.raises(ProtofedError, match="precision=bf16: with train=head"):
        resolve("local", {"precision": "bf16", "train": "head"})
    with pytest.raises(ProtofedError, match="precision=bf16: needs device=cpu or device=cuda"):
        resolve("local", {"precision": "bf16", "device": "mps"})
