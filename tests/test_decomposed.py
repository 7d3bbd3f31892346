"""Models in two halves σ + ψ: their names, their sum, who gets a gradient, and clients side by side under `vmap`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import protofed as pf
from protofed.models import mlp
from protofed.models.base import Output
from protofed.models.convolution import LeanConv2d, UnfoldConv2d, with_convolutions
from protofed.models.decomposed import PSI, Decomposed, Halved
from protofed.models.skeleton import Skeleton, TrainingNetwork

C = 4
MODELS = {
    "mlp": ((6,), {"hidden": [7], "embedding": 5}),
    "cnn": ((1, 16, 16), {"channels": [2, 3], "embedding": 6, "norm": "batch"}),
    "resnet9": ((3, 32, 32), {"width": 0.25}),
    "direct": ((6,), {}),
}


class Direct(nn.Module):
    """Parameters and a buffer of the module's own beside a layer's, and a frozen parameter."""

    dim = 3

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("shift", torch.randn(3))
        self.head = nn.Linear(3, C)

    def forward(self, x):
        z = self.scale * (x @ self.matrix) + self.shift + self.frozen
        return Output(z, self.head(z))


def plain(name, seed=0):
    torch.manual_seed(seed)
    shape, options = MODELS[name]
    return Direct() if name == "direct" else pf.models.build(name, shape, C, **options)


def decomposed(name, start=0.2, seed=0):
    """The model in two halves, ψ no longer a multiple of σ."""
    made = Decomposed(plain(name, seed), start)
    g = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for parameter in made.psi.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=g)
    return made


def samples(name, n=5, seed=3):
    return torch.randn(n, *MODELS[name][0], generator=torch.Generator().manual_seed(seed))


def trained(module):
    return [name for name, p in module.named_parameters() if p.requires_grad]


def summed(values, names):
    """What a plain model takes for both halves: sums, and everything that has no ψ as it is."""
    return {n: v + values[PSI + n] if n in names else v for n, v in values.items() if not n.startswith(PSI)}


def values_of(module):
    """Copies of parameters and buffers."""
    return {n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())}


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# --- names and how ψ starts -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MODELS)
def test_the_names_of_sigma_are_the_models_and_those_of_psi_begin_with_psi(name):
    model, made = plain(name), Decomposed(plain(name), 0.2)
    own = dict(made.named_parameters())
    assert PSI == "psi." and [n for n in own if not n.startswith(PSI)] == [n for n, _ in model.named_parameters()]
    assert [n for n in own if n.startswith(PSI)] == [PSI + n for n in trained(model)], "in the model's order"
    assert [n for n, _ in made.named_buffers()] == [n for n, _ in model.named_buffers()], "buffers are not halved"
    assert set(made.state_dict()) == set(model.state_dict()) | {PSI + n for n in trained(model)}
    assert made.dim == model.dim
    assert set(Skeleton(made).params) == {*trained(model), *(PSI + n for n in trained(model))}


@pytest.mark.parametrize("start", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_psi_starts_as_a_share_of_sigma_and_shares_no_memory_with_it(name, start):
    made, model = Decomposed(plain(name), start), dict(plain(name).named_parameters())
    own = dict(made.named_parameters())
    for n in trained(plain(name)):
        assert torch.equal(own[n], model[n]) and torch.equal(own[PSI + n], start * model[n])
        assert own[PSI + n].requires_grad and own[PSI + n].data_ptr() != own[n].data_ptr()
    assert made.names == tuple(trained(plain(name)))


def test_a_frozen_parameter_has_no_other_half():
    made = Decomposed(plain("direct"), 0.2)
    own = dict(made.named_parameters())
    assert not own["frozen"].requires_grad and PSI + "frozen" not in own


def test_settings_build_the_same_sigma_as_those_of_the_model():
    settings = mlp.MLP(hidden=(7,), embedding=5)
    halved = Halved(settings, 0.3)
    assert halved.name == settings.name
    torch.manual_seed(0)
    model = settings.build((6,), C)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    made = halved.build((6,), C)
    assert torch.equal(torch.rand(1), drawn), "no random number is drawn for ψ"
    own = dict(made.named_parameters())
    for n, p in model.named_parameters():
        assert torch.equal(own[n], p) and torch.equal(own[PSI + n], 0.3 * p)


# --- the sum ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_that_of_the_model_with_summed_parameters(name, mode):
    made, x = decomposed(name).train(mode), samples(name)
    model = plain(name).train(mode)
    expected = functional_call(model, summed(values_of(made), trained(model)), (x,))
    found = made(x)
    close(found.embedding, expected.embedding)
    close(found.logits, expected.logits)
    sigma_alone = model(x)
    assert not torch.allclose(found.logits, sigma_alone.logits, atol=1e-4)


def test_options_go_on_to_the_model():
    made, model, x = decomposed("cnn").eval(), plain("cnn").eval(), samples("cnn")
    expected = functional_call(model, summed(values_of(made), trained(model)), (x,), {"levels": True})
    for one, other in zip(made(x, levels=True), expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_given_weights_stand_in_for_both_halves(name):
    """As `functional_call` gives a helper's, and as a skeleton loads a client's."""
    made, others = decomposed(name).eval(), values_of(decomposed(name, seed=7))
    x, model = samples(name), plain(name).eval()
    expected = functional_call(model, summed(others, trained(model)), (x,)).logits
    before = values_of(made)
    close(functional_call(made, others, (x,)).logits, expected)
    assert all(torch.equal(v, before[n]) for n, v in values_of(made).items()), "for this call alone"
    skeleton = Skeleton(made)
    close(skeleton.outputs(x, others).logits, expected)
    skeleton.load(others)
    kept = dict(model.named_parameters()).get("frozen")  # the same for all clients: it is not loaded
    loaded = {**others, **({} if kept is None else {"frozen": kept.detach()})}
    expected = functional_call(model, summed(loaded, trained(model)), (x,)).logits
    close(skeleton.outputs(x).logits, expected)


def test_parameters_under_two_names_stay_one():
    class Tied(nn.Module):
        """An encoder and a head of one matrix."""

        dim = 4

        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.head.weight = self.encoder.weight

        def forward(self, x):
            z = self.encoder(x)
            return Output(z, self.head(z))

    made = Decomposed(Tied(), 0.5)
    assert [n for n, _ in made.named_parameters()] == ["encoder.weight", "psi.encoder.weight"]
    x, w = torch.randn(3, 4), 1.5 * made.encoder.weight
    close(made(x).logits, x @ w.T @ w.T)


# --- gradients --------------------------------------------------------------------------------------------------------
def gradients(network, params, x):
    loss = (network(x, params).logits ** 2).sum()
    return torch.autograd.grad(loss, list(network.params.values()), allow_unused=True)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_both_halves_or_the_one_that_is_not_detached(name):
    made, x = decomposed(name), samples(name)
    skeleton = Skeleton(made)
    network = TrainingNetwork(skeleton, skeleton.params)
    model = plain(name)
    theta = {n: v.requires_grad_(n in trained(model)) for n, v in summed(values_of(made), trained(model)).items()}
    loss = (functional_call(model, theta, (x,)).logits ** 2).sum()
    expected = dict(zip(made.names, torch.autograd.grad(loss, [theta[n] for n in made.names]), strict=True))
    assert all(bool(g.any()) for g in expected.values())

    def detached(half):
        return {n: p.detach() if n.startswith(PSI) == (half == "psi") else p for n, p in network.params.items()}

    for params, reached in (
        (None, ("sigma", "psi")),
        (dict(network.params), ("sigma", "psi")),
        (detached("psi"), ("sigma",)),
        (detached("sigma"), ("psi",)),
    ):
        for n, found in zip(network.params, gradients(network, params, x), strict=True):
            if ("psi" if n.startswith(PSI) else "sigma") not in reached:
                assert found is None, n
                continue
            wanted = expected[n.removeprefix(PSI)]
            assert float((found - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-6, n


# --- batch norm -------------------------------------------------------------------------------------------------------
def test_running_statistics_are_those_of_the_model():
    """Training moves them, under the model's names, as it does those of the model with summed parameters."""
    made, model = decomposed("cnn"), plain("cnn")
    model.load_state_dict(summed(made.state_dict(), trained(model)))
    names = [n for n, b in model.named_buffers() if b.is_floating_point()]
    assert names and all(n.endswith(("running_mean", "running_var")) for n in names)
    before = values_of(made)
    for seed in range(3):
        made.train()(samples("cnn", 8, seed))
        model.train()(samples("cnn", 8, seed))
    after, expected = values_of(made), values_of(model)
    for n in names:
        close(after[n], expected[n])
        assert not torch.equal(after[n], before[n])
    x = samples("cnn")
    close(made.eval()(x).logits, model.eval()(x).logits)
    skeleton = Skeleton(made)
    assert set(names) <= set(skeleton.weights()) and not set(names) & set(skeleton.params)


def test_buffers_that_are_given_are_the_ones_written_to():
    """As a stack of clients has it: each client's statistics, none of the module's own."""
    made = decomposed("cnn").train()
    before = values_of(made)
    given = values_of(decomposed("cnn", seed=5))
    kept = {n: v.clone() for n, v in given.items()}
    functional_call(made, given, (samples("cnn"),))
    for n, _ in made.named_buffers():
        assert torch.equal(dict(made.named_buffers())[n], before[n]), n
        if n.endswith("running_mean"):
            assert not torch.equal(given[n], kept[n]), n


def test_a_buffer_of_the_module_itself_follows_what_is_loaded():
    made = decomposed("direct").eval()
    x, others = samples("direct"), {"shift": torch.full((3,), 50.0)}
    z = made(x).embedding
    shift = made.shift.clone()
    close(functional_call(made, others, (x,)).embedding, z - shift + 50)
    Skeleton(made).load({**values_of(made), **others})
    close(made(x).embedding, z - shift + 50)


def test_the_module_itself_knows_whether_it_trains():
    class Noisy(nn.Module):
        """Dropout as a function, which asks the module itself."""

        dim = 6

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(6, C)

        def forward(self, x):
            return Output(x, self.head(nn.functional.dropout(x, 0.5, self.training)))

    made, x = Decomposed(Noisy(), 0.2), torch.ones(4, 6)
    made.eval()
    assert torch.equal(made(x).logits, made(x).logits)
    made.train()
    assert not torch.equal(made(x).logits, made(x).logits)


# --- many clients at once ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["mlp", "cnn", "direct"])
def test_clients_side_by_side_equal_one_after_another(name):
    """Outputs, gradients of both halves and statistics under `vmap`."""
    made = decomposed(name).train()
    clients = [values_of(decomposed(name, seed=k)) for k in range(3)]
    skeleton = Skeleton(made)
    names, buffers = list(skeleton.params), [n for n in skeleton.slots if n not in skeleton.params]
    x = torch.stack([samples(name, seed=k) for k in range(3)])

    def loss(params, own, x):
        own = {n: v.clone() for n, v in own.items()}
        logits = functional_call(made, {**own, **params}, (x,)).logits
        return (logits**2).mean(), (logits, own)

    stacked = [{n: torch.stack([c[n] for c in clients]) for n in part} for part in (names, buffers)]
    found, (logits, moved) = vmap(grad(loss, has_aux=True))(*stacked, x)
    for k, client in enumerate(clients):
        parts = [{n: client[n] for n in part} for part in (names, buffers)]
        expected, (own_logits, own_moved) = grad(loss, has_aux=True)(*parts, x[k])
        close(logits[k], own_logits)
        for n in names:
            assert bool(expected[n].any()) or n.endswith("bias"), n
            torch.testing.assert_close(found[n][k], expected[n], rtol=1e-4, atol=1e-5)
        for n in buffers:
            close(moved[n][k], own_moved[n])
        model = plain(name).train()
        whole = summed({**values_of(made), **parts[0], **parts[1]}, trained(model))
        close(own_logits, functional_call(model, whole, (x[k],)).logits)


@pytest.mark.parametrize("kind", [LeanConv2d, UnfoldConv2d])
def test_copies_and_other_convolutions(kind):
    """A copy's layers are its own, and a copy with other convolutions computes with them."""
    made, x = decomposed("cnn").eval(), samples("cnn")
    before = made(x).logits
    twin = with_convolutions(made, kind)
    assert sum(type(layer) is kind for layer in twin.whole[0].modules()) == 2
    torch.testing.assert_close(twin(x).logits, before, rtol=1e-4, atol=1e-5)
    for other in (twin, copy.deepcopy(made)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        assert torch.equal(made(x).logits, before) and not other(x).logits.any()
