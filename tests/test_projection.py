"""Projection into a common space: what it computes, its names, own networks, stacks of clients, errors in one line."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from protofed import models
from support.errors import refusal

SHAPE, CLASSES = (3, 16, 16), 4
SPECS = [
    models.CNN(),
    models.MLP(embedding=8),
    models.ResNet18(width=0.05),
    models.GoogLeNet(width=0.05),
    models.MobileNetV2(width=0.1),
    models.TinyConvNet4(),
]


class Pair(nn.Module):
    """Someone's own network, which gives a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(768, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc(x.flatten(1)).tanh()
        return z, self.out(z)


class Flat(nn.Module):
    """Someone's own network, which gives features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).mean((-2, -1))


pytestmark = pytest.mark.usefixtures("seeded")


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + shift


def by_hand(model: nn.Module, features: Tensor, kind: str) -> Tensor:
    s = model.state_dict()
    z = features
    if "match.weight" in s:
        z = z @ s["match.weight"].T + s["match.bias"]
    if kind == "consensus":
        z = z @ s["consensus.0.weight"].T + s["consensus.0.bias"]
        z = layer_norm(z, s["consensus.1.weight"], s["consensus.1.bias"]).clamp(min=0)
        z = z @ s["consensus.4.weight"].T + s["consensus.4.bias"]
        z = layer_norm(z, s["consensus.5.weight"], s["consensus.5.bias"])
        z = z / z.square().sum(-1, keepdim=True).sqrt()
    return z


@pytest.mark.parametrize("kind", ["linear", "consensus"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_models_meet_in_one_space(spec: models.ModelSpec, kind: str) -> None:
    model = models.Projected(spec, kind, dim=12).build(SHAPE, CLASSES).eval()
    x = torch.randn(3, *SHAPE)
    with torch.no_grad():
        for parameter in model.consensus.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # a layer norm begins as the identity
        output, levels, features = model(x), model(x, levels=True), model.backbone(x)
    assert isinstance(output, models.Output) and isinstance(levels, models.Levels)
    assert model.dim == 12 and output.embedding.shape == (3, 12) and output.logits.shape == (3, CLASSES)
    torch.testing.assert_close(output.embedding, by_hand(model, features, kind), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        output.logits, output.embedding @ model.head.weight.T + model.head.bias, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close((levels.embedding, levels.logits), tuple(output))
    expected = F.adaptive_avg_pool1d(model.backbone.early(x).flatten(1), 64)
    torch.testing.assert_close(levels.low, expected)
    if kind == "consensus":
        torch.testing.assert_close(output.embedding.norm(dim=1), torch.ones(3))


def test_names_and_counts() -> None:
    inner = models.MLP(embedding=8, hidden=())
    linear = models.Projected(inner, "linear", dim=5).build((6,), 3)
    assert {k: tuple(v.shape) for k, v in linear.named_parameters()} == {
        "backbone.1.weight": (8, 6),
        "backbone.1.bias": (8,),
        "match.weight": (5, 8),
        "match.bias": (5,),
        "head.weight": (3, 5),
        "head.bias": (3,),
    }
    same = models.Projected(inner, "linear", dim=8).build((6,), 3)  # no layer where the width is the same
    assert models.parameter_count(same) == models.parameter_count(inner.build((6,), 3))
    consensus = models.Projected(inner, "consensus", dim=8).build((6,), 3)
    d = 8
    extra = d * 2 * d + 2 * d + 4 * d + 2 * d * d + d + 2 * d
    assert models.parameter_count(consensus) == models.parameter_count(same) + extra
    assert "match.weight" not in consensus.state_dict()


def test_a_classifiers_own_head_is_left_out() -> None:
    inner = models.build("cnn", SHAPE, 9, dropout=0.5)
    model = models.project(inner, "linear", 7, CLASSES, SHAPE)
    assert model.backbone is inner.encoder
    assert not any(tuple(p.shape) == (9, 50) for p in model.parameters())


@pytest.mark.parametrize("network", [Pair, Flat])
@pytest.mark.parametrize("kind", ["linear", "consensus"])
def test_an_own_network_in_the_space(network: type[nn.Module], kind: str) -> None:
    own = network()
    plain = copy.deepcopy(own).eval()
    model = models.project(own, kind, 5, CLASSES, SHAPE, "model 'mine'").eval()
    assert model.backbone is own and model.dim == 5
    x = torch.randn(4, *SHAPE)
    features = plain(x)[0] if network is Pair else plain(x)
    output = model(x)
    torch.testing.assert_close(output.embedding, by_hand(model, features, kind), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, model.head(output.embedding))
    assert "model 'mine' gives no low-level features" in refusal(lambda: model(x, levels=True))
    if network is Pair:  # its logits are not used
        with torch.no_grad():
            own.out.weight.add_(1)
        torch.testing.assert_close(model(x), output)


@pytest.mark.usefixtures("own_names")
def test_an_own_network_registered_by_name() -> None:
    models.register_module("mine", lambda shape, classes: Pair())
    spec = models.Projected(models.make("mine", SHAPE), "consensus", dim=6)
    model = spec.build(SHAPE, CLASSES)
    assert spec.name == "mine" and model(torch.randn(2, *SHAPE)).embedding.shape == (2, 6)
    assert "model 'mine' gives no" in refusal(lambda: model(torch.randn(2, *SHAPE), levels=True))


def test_a_network_without_flat_features_is_refused() -> None:
    text = refusal(lambda: models.project(nn.Conv2d(3, 4, 3), "linear", 5, CLASSES, SHAPE, "model 'mine'"))
    assert "model 'mine'" in text and "got [2, 4, 14, 14]; end it with a global pooling or flatten" in text


def test_dropout_is_on_in_training_only() -> None:
    model = models.Projected(models.MLP(), "consensus", dim=16, dropout=0.5).build(SHAPE, CLASSES)
    x = torch.randn(4, *SHAPE)
    assert not torch.equal(model(x).embedding, model(x).embedding)
    torch.testing.assert_close(model(x).embedding.norm(dim=1), torch.ones(4))  # dropped before the sphere
    model.eval()
    assert torch.equal(model(x).embedding, model(x).embedding)
    for kind, dropout in (("consensus", 0.0), ("linear", 0.5)):
        still = models.Projected(models.MLP(), kind, dim=16, dropout=dropout).build(SHAPE, CLASSES).train()
        assert torch.equal(still(x).embedding, still(x).embedding)


def test_dropout_differs_between_the_clients_of_a_stack() -> None:
    model = models.Projected(models.MLP(), "consensus", dim=16, dropout=0.5).build(SHAPE, CLASSES)
    params, buffers = stack_module_state([model, copy.deepcopy(model)])
    x = torch.randn(4, *SHAPE).expand(2, -1, -1, -1, -1)

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(model, {**p, **b}, (x,))
        return output.logits.square().mean(), output.embedding

    params = {k: v.detach() for k, v in params.items()}
    grads, z = vmap(grad(loss, has_aux=True), randomness="different")(params, buffers, x)
    assert not torch.equal(z[0], z[1])
    assert all(bool(g.isfinite().all()) for g in grads.values())


@pytest.mark.parametrize("made", ["cnn", "pair", "flat"])
def test_vmap_over_clients_equals_a_loop(made: str) -> None:
    def net() -> nn.Module:
        inner = {"cnn": lambda: models.build("cnn", SHAPE, CLASSES), "pair": Pair, "flat": Flat}[made]()
        return models.project(inner, "consensus", 10, CLASSES, SHAPE, dropout=0.0).double()

    nets = [net(), net()]
    params, buffers = stack_module_state(nets)
    params = {k: v.detach() for k, v in params.items()}
    x, y = torch.randn(2, 5, *SHAPE, dtype=torch.double), torch.randint(CLASSES, (2, 5))

    def loss(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        output = functional_call(nets[0], {**p, **{k: v.clone() for k, v in b.items()}}, (x,))
        return F.cross_entropy(output.logits, y), output.embedding

    grads, z = vmap(grad(loss, has_aux=True))(params, buffers, x, y)
    for i, alone in enumerate(nets):
        output = alone(x[i])
        F.cross_entropy(output.logits, y[i]).backward()
        torch.testing.assert_close(z[i], output.embedding)
        for key, parameter in alone.named_parameters():
            wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(grads[key][i], wanted, msg=key)


def test_it_stands_where_settings_stand() -> None:
    spec = models.Projected(models.MLP(embedding=8), "linear")
    assert (spec.name, spec.dim, spec.dropout) == ("mlp", 512, 0.1)
    assert models.make(spec, SHAPE) is spec
    assert models.make(spec, SHAPE, hidden="16") == models.Projected(models.MLP(embedding=8, hidden=(16,)), "linear")
    assert "did you mean 'hidden'" in refusal(lambda: models.make(spec, SHAPE, hiden=3))
    assert models.build(spec, SHAPE, CLASSES).dim == 512
    assert pickle.loads(pickle.dumps(spec)) == spec and hash(spec) == hash(copy.deepcopy(spec))
    with pytest.raises(FrozenInstanceError):
        spec.dim = 3  # type: ignore[misc]
    assert "Projected" not in models.registry and set(models.available()) == set(models.registry.names())


def test_a_seed_builds_the_same_network_on_the_meta_device_too() -> None:
    spec = models.Projected(models.CNN(), "consensus", dim=9)

    def built() -> dict[str, Tensor]:
        torch.manual_seed(3)
        return spec.build(SHAPE, CLASSES).state_dict()

    first = built()
    assert all(torch.equal(first[k], v) for k, v in built().items())
    with torch.device("meta"):
        assert {k: v.shape for k, v in spec.build(SHAPE, CLASSES).state_dict().items()} == {
            k: v.shape for k, v in first.items()
        }


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "cubic"}, "projection='cubic'; expected 'linear' or 'consensus'"),
        ({"kind": "linear", "dim": 0}, "projection: dim=0; expected at least 1"),
        ({"kind": "consensus", "dropout": 1.0}, "projection: dropout=1.0; expected at least 0 and below 1"),
        ({"kind": "consensus", "dropout": float("nan")}, "dropout=nan"),
    ],
)
def test_wrong_settings_are_one_line(options: dict, says: str) -> None:
    assert says in refusal(lambda: models.Projected(models.MLP(), **options))
    arguments = {"dim": 4, **options}
    assert says in refusal(lambda: models.project(Pair(), num_classes=CLASSES, sample_shape=SHAPE, **arguments))
