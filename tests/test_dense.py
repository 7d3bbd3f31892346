"""Stacks of multilayer perceptrons without gradient: the bits of `vmap`, and every other network is left to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

from protofed.federation.stack import outputs
from protofed.models.base import Classifier
from protofed.models.dense import DenseNetwork
from protofed.models.mlp import MLP
from protofed.models.precision import with_precision
from protofed.models.skeleton import Skeleton

CLIENTS, CLASSES = 5, 3


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = Skeleton(module).slots.items()
    return {name: 0.2 * torch.randn(CLIENTS, *v.shape, generator=generator) for name, v in slots}


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    unbiased = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 4))
    return {
        "mlp": (MLP(embedding=16, hidden=(32,)).build((64,), CLASSES), (64,)),
        "images": (MLP(embedding=64, hidden=(128, 96)).build((1, 28, 28), CLASSES), (1, 28, 28)),
        "one layer": (MLP(embedding=8, hidden=()).build((700,), CLASSES), (700,)),
        "unbiased": (Classifier(unbiased, 4, CLASSES, dropout=0.5), (6,)),
    }


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("shared", [True, False])
def test_dense_networks_give_the_bits_of_vmap(name: str, shared: bool) -> None:
    module, shape = networks()[name]
    weights = weights_of(module)
    x = torch.randn(1 if shared else CLIENTS, 37, *shape).expand(CLIENTS, 37, *shape)
    kept = x.clone()
    network = DenseNetwork.of(module.eval(), weights)
    assert network is not None
    with torch.no_grad():
        expected = vmap(lambda w, b: functional_call(module, dict(w), (b,)))(weights, x)
        assert all(torch.equal(*pair) for pair in zip(network.outputs(weights, x), expected, strict=True))
    assert torch.equal(x, kept)


def test_an_evaluation_in_stacks_runs_dense_networks_without_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    module, shape = networks()["mlp"]
    weights, x = weights_of(module), torch.randn(20, *shape)
    expected = outputs.stacked_outputs(Skeleton(module), weights, x, torch.arange(20)[None])
    monkeypatch.setattr(outputs, "functional_call", None)
    found = outputs.stacked_outputs(Skeleton(module), weights, x, torch.arange(20)[None])
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with pytest.raises(TypeError):
        outputs.stacked_levels(Skeleton(module), weights, x, torch.arange(20)[None])


def test_other_networks_are_left_to_vmap() -> None:
    def mlp() -> Classifier:
        return MLP().build((6,), CLASSES)

    hooked, frozen = mlp(), mlp()
    hooked.encoder[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    frozen.head.bias.requires_grad_(False)
    tied = Classifier(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 4, CLASSES)
    tied.encoder[1].weight = tied.encoder[0].weight
    others = [hooked, frozen, tied, with_precision(mlp(), "bf16")]
    for layers in (
        [nn.ReLU(), nn.Linear(6, 4)],
        [nn.Flatten(0), nn.Linear(6, 4)],
        [nn.Linear(6, 4), nn.Tanh()],
        [nn.Linear(6, 4), nn.ReLU(), nn.ReLU()],
    ):
        others.append(Classifier(nn.Sequential(*layers), 4, CLASSES))
    others.append(Classifier(nn.Linear(6, 4), 4, CLASSES))
    others.append(Classifier(nn.Sequential(nn.Linear(6, 4)), 4, CLASSES, head=nn.Sequential(nn.Linear(4, CLASSES))))
    for module in others:
        assert DenseNetwork.of(module, Skeleton(module).slots) is None
