"""FedPAGR, FedTGP, FedProc and FedMPS against naive loops, torch modules and exact numbers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn

from protofed import PrototypeBank, aggregate, losses, methods, seeds, wire
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.checkpoint import packed, unpacked
from protofed.methods import Setup, Shared, fedtgp
from protofed.methods.fedmps import FedMPS
from protofed.methods.fedpagr import FedPAGR
from protofed.methods.fedproc import FedProc
from protofed.methods.fedtgp import FedTGP, Generator
from protofed.models.base import LOW, Levels, Output
from protofed.parts import Batch, Received, Upload
from protofed.pieces import on_cores
from protofed.wire import Bundle
from support.engines import ENGINES, LOOP, assert_same, finish, updated
from support.small import SMALL, blobs

torch.set_num_threads(1)

C, D, F_IN = 4, 5, 6


# --- stand-ins --------------------------------------------------------------------------------------------------------
class Net:
    """One layer to the unit sphere (FedPAGR's consensus space) or not, and a linear head."""

    def __init__(self, params, sphere=False):
        self.params, self.sphere = params, sphere

    def __call__(self, x: Tensor, params=None) -> Output:
        p = self.params if params is None else params
        z = torch.tanh(x @ p["body"])
        z = z / z.norm(dim=-1, keepdim=True) if self.sphere else z
        return Output(z, z @ p["head.weight"].T + p["head.bias"])

    def levels(self, x: Tensor) -> Levels:
        low = (x @ self.params["body"])[:, :1] * torch.linspace(-1, 1, LOW) + torch.linspace(0, 1, LOW)
        return Levels(low, *self(x))


@dataclass(frozen=True)
class Trained:
    """A trained client: its model over its whole set."""

    net: Net
    x: Tensor
    y: Tensor

    @property
    def weights(self):
        return self.net.params

    def outputs(self):
        return self.net(self.x), Batch(self.x, self.y, torch.ones(len(self.y)))

    def bank(self):
        return PrototypeBank.from_embeddings(self.net(self.x).embedding, self.y, C)

    def low_bank(self):
        return PrototypeBank.from_embeddings(self.net.levels(self.x).low, self.y, C)


def weights(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "body": torch.randn(F_IN, D, generator=g) / 2,
        "head.weight": torch.randn(C, D, generator=g),
        "head.bias": torch.randn(C, generator=g),
    }


def samples(seed, classes, n=9):
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.arange(n) % len(classes)]
    return torch.randn(n, F_IN, generator=g) + y[:, None], y


def setup(classes=C, dim=D, clients=3, seed=7):
    return Setup(classes, dim, clients, weights(), seed)


def bank(seed, classes=C, dim=D, known=None):
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 6, (classes,), generator=g).float()
    if known is not None:
        counts = counts * torch.tensor([float(c in known) for c in range(classes)])
    return PrototypeBank(torch.randn(classes, dim, generator=g) * (counts > 0)[:, None], counts)


def received(content: Bundle) -> Received:
    return Received(
        bank=content.bank,
        banks=content.banks,
        weights=content.weights,
        tensors=content.tensors,
        scalars=content.scalars,
        models=content.models,
    )


def names(parts):
    """What a direction of an exchange holds."""
    return tuple(part.name for part in parts)


def with_padding(batch: Batch, filler: float) -> Batch:
    return Batch(
        torch.cat([batch.x, torch.full((2, F_IN), filler)]),
        torch.cat([batch.y, torch.tensor([0, C - 1])]),
        torch.cat([batch.weight, torch.zeros(2)]),
    )


# --- FedPAGR ----------------------------------------------------------------------------------------------------------
def naive_fedpagr(method, data, present, rounds, lr, start, first):
    """Algorithm 1 by dictionaries, loops over samples and torch's SGD; one full batch a round, momentum 0."""
    protos = {c: first[c].clone() for c in range(C)}
    models = [{n: w.clone() for n, w in start.items()} for _ in data]
    for t in range(rounds):
        sent = {}
        for k in present[t]:
            model, (x, y) = models[k], data[k]
            if method.anchor:
                model["head.weight"] = torch.stack([protos[c] / protos[c].norm() for c in range(C)])
                model["head.bias"] = torch.zeros(C)
            leaves = {n: w.clone().requires_grad_() for n, w in model.items()}
            loss = torch.zeros(())
            for i in range(len(y)):
                z = torch.tanh(x[i] @ leaves["body"])
                z = z / z.norm()
                logits = torch.stack([leaves["head.weight"][c] @ z + leaves["head.bias"][c] for c in range(C)])
                loss = loss - torch.log(torch.exp(logits[y[i]]) / torch.exp(logits).sum())
                ell = torch.stack([z @ protos[c] / method.temperature for c in range(C)])
                log_p = ell - torch.log(torch.exp(ell).sum())
                loss = loss - log_p[y[i]] - method.entropy * log_p.sum() / C
            (loss / len(y)).backward()
            models[k] = {n: (w - lr * w.grad).detach() for n, w in leaves.items()}
            if not method.train_classifier:
                models[k] |= {n: w for n, w in model.items() if n.startswith("head.")}
            z = torch.tanh(x @ models[k]["body"])
            z = z / z.norm(dim=1, keepdim=True)
            for c in y.unique().tolist():
                mean = sum(z[i] for i in range(len(y)) if y[i] == c) / int((y == c).sum())
                sent.setdefault(c, []).append(mean / mean.norm())
        for c, reports in sent.items():
            mean = sum(reports) / len(reports)
            protos[c] = mean / mean.norm()
        matrix = torch.stack([protos[c] for c in range(C)]).requires_grad_()
        optimiser = torch.optim.SGD([matrix], lr=0.01, momentum=0.9)
        for _ in range(5):
            loss = torch.zeros(())
            unit_rows = [matrix[c] / matrix[c].norm() for c in range(C)]
            for c, reports in sent.items():
                for p in reports:
                    loss = loss + 1 - p @ unit_rows[c]
            for c in range(C):
                for other in range(C):
                    if other != c:
                        loss = loss + 0.5 * torch.clamp(unit_rows[c] @ unit_rows[other] - 0.3, min=0)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        protos = {c: (matrix[c] / matrix[c].norm()).detach() for c in range(C)}
    return protos, models


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("switches", [{}, {"anchor": False}, {"train_classifier": False}])
def test_fedpagr_rounds_equal_a_naive_federation(clients, switches):
    """Two rounds; with three clients one sits out each time, and no client holds class 3."""
    method, about, lr = FedPAGR(**switches), setup(), 0.3
    data = [samples(0, [0, 1, 2]), samples(1, [1, 2]), samples(2, [0, 2], n=4)][:clients]
    present = [[0], [0]] if clients == 1 else [[0, 1], [1, 2]]
    state = method.start(about)
    models = [weights()] * clients
    for t, who in enumerate(present):
        uploads = []
        for k in who:
            x, y = data[k]
            has = received(method.exchange.message(state, k, t + 1))
            begin = {n: w.clone().requires_grad_() for n, w in method.begin(models[k], has).items()}
            terms = method.terms(Net(begin, sphere=True), Batch(x, y, torch.ones(len(y))), has, t + 1)
            assert set(terms) == {"ce", "global", "entropy"}
            total = sum(terms.values())
            gradients = torch.autograd.grad(total, list(begin.values()), allow_unused=True, materialize_grads=True)
            models[k] = {n: (w - lr * g).detach() for (n, w), g in zip(begin.items(), gradients, strict=True)}
            content = method.returned(Trained(Net(models[k], sphere=True), x, y), has, t + 1)
            uploads.append(Upload(k, len(y), content))
        state = updated(method, state, uploads, t + 1, about)
    first = method.start(about).bank.means
    protos, naive = naive_fedpagr(method, data, present, 2, lr, weights(), first)
    torch.testing.assert_close(state.bank.means, torch.stack([protos[c] for c in range(C)]), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(models, naive, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


def test_fedpagr_starts_from_random_unit_vectors_that_are_all_known():
    one, same, other = (FedPAGR().start(setup(seed=s)).bank for s in (1, 1, 2))
    assert bool(one.known.all()) and torch.equal(one.means, same.means) and not torch.equal(one.means, other.means)
    torch.testing.assert_close(one.means.norm(dim=1), torch.ones(C))


def test_fedpagr_anchors_the_classifier():
    begin = {**weights(), "head.running": torch.ones(2)}
    prototypes = bank(3)
    after = FedPAGR().begin(begin, received(Bundle(bank=prototypes)))
    torch.testing.assert_close(after["head.weight"], prototypes.means / prototypes.means.norm(dim=1, keepdim=True))
    assert not bool(after["head.bias"].any())
    assert after["body"] is begin["body"] and after["head.running"] is begin["head.running"]
    assert bool(begin["head.bias"].any())  # its input is left alone
    bare = {n: w for n, w in begin.items() if n != "head.bias"}
    assert "head.bias" not in FedPAGR().begin(bare, received(Bundle(bank=prototypes)))


def test_fedpagr_with_neither_anchors_nor_alignment_is_local_training():
    keys = {**SMALL, "data": blobs(), "projection": "consensus", "projection_dropout": 0.0}
    pagr = finish(resolve("fedpagr", {**keys, "temperature": 0, "anchor": False}), LOOP)[1]
    anchored = finish(resolve("fedpagr", {**keys, "temperature": 0}), LOOP)[1]
    local = finish(resolve("local", keys), LOOP)[1]
    for client, (weights_of_client, *_) in local.items():
        assert all(torch.equal(value, pagr[client][0][name]) for name, value in weights_of_client.items())
    assert not torch.equal(local[0][0]["head.weight"], anchored[0][0]["head.weight"])


@pytest.mark.parametrize(("head", "came"), [(None, "got none"), (torch.zeros(C, D + 1), r"got \[4, 6\]")])
def test_fedpagr_needs_a_head_it_can_anchor(head, came):
    own = {"body": torch.zeros(2)} if head is None else {"head.weight": head}
    with pytest.raises(ProtofedError, match=rf"'head.weight' \[4, 5\], {came}; use projection=consensus"):
        FedPAGR().begin(own, received(Bundle(bank=bank(0))))


def test_fedpagr_without_temperature_has_no_alignment_terms():
    x, y = samples(0, [0, 1])
    batch, has = Batch(x, y, torch.ones(len(y))), received(Bundle(bank=bank(0)))
    net = Net(weights(), sphere=True)
    terms = FedPAGR(temperature=0.0).terms(net, batch, has, 1)
    assert set(terms) == {"ce"}
    torch.testing.assert_close(terms["ce"], F.cross_entropy(net(x).logits, y))
    scores = FedPAGR(temperature=0.0).predict.scores(x[:, :D], bank(0))
    torch.testing.assert_close(scores, F.cosine_similarity(x[:, None, :D], bank(0).means, dim=-1))


def test_fedpagr_scores_are_the_ensembles_logits():
    z, b = torch.randn(6, D, generator=torch.Generator().manual_seed(0)), bank(1, known={0, 2})
    scores = FedPAGR(temperature=0.2).predict.scores(z, b)
    assert bool((scores[:, [1, 3]] == -math.inf).all())
    torch.testing.assert_close(scores.softmax(-1), losses.prototype_softmax(z, b, 0.2))


def test_fedpagr_unreported_classes():
    """The aggregate keeps what nobody reported; refinement moves it only where it is too near another class."""
    method, about = FedPAGR(separation=2.0, refine_lr=0.1), setup()
    axes = torch.eye(C, D)
    near = F.normalize(axes[0] + axes[3], dim=0)  # a cosine of 0.71 with class 0
    state = Shared(PrototypeBank(torch.stack([axes[0], axes[1], axes[2], near]), torch.ones(C)))
    report = PrototypeBank(axes[:C] * torch.tensor([1.0, 0, 0, 0])[:, None], torch.tensor([5.0, 0, 0, 0]))
    after = updated(method, state, [Upload(0, 5, Bundle(bank=report))], 1, about).bank
    torch.testing.assert_close(after.means[1:3], axes[1:3])  # apart from all others: not moved
    assert float(after.means[3] @ after.means[0]) < float(near @ axes[0]) - 0.05
    assert bool(after.known.all()) and after.counts.tolist() == [5, 1, 1, 1]
    torch.testing.assert_close(after.means.norm(dim=1), torch.ones(C))
    kept = updated(replace(method, refine_steps=0), state, [Upload(0, 5, Bundle(bank=report))], 1, about).bank
    torch.testing.assert_close(kept.means, state.bank.means)


def test_fedpagr_a_client_off_the_sphere_weighs_no_more():
    method, about, state = FedPAGR(), setup(), FedPAGR().start(setup())
    one, two = bank(1), bank(2)
    results = [
        updated(method, state, [Upload(0, 1, Bundle(bank=b)), Upload(1, 1, Bundle(bank=two))], 1, about).bank.means
        for b in (one, replace(one, means=1000 * one.means))
    ]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("classes", "given", "expected"),
    [
        (10, {}, (0.3, 5)),
        (99, {}, (0.3, 5)),
        (100, {}, (0.1, 3)),
        (200, {}, (0.1, 3)),
        (200, {"margin": 0.3}, (0.3, 3)),
        (10, {"refine_steps": 0, "margin": 0.0}, (0.0, 0)),
    ],
)
def test_fedpagr_margin_and_steps_go_by_the_number_of_classes(classes, given, expected):
    method = methods.registry.make("fedpagr", given)
    assert method.refinement.chosen(classes) == expected
    state = method.start(setup(classes))
    upload = Upload(0, 1, Bundle(bank=bank(3, classes).normalised()))
    after = updated(method, state, [upload], 1, setup(classes)).bank
    banks = PrototypeBank.stack([upload.content.bank])
    start = aggregate.normalised_mean(banks)
    margin, steps = expected
    torch.testing.assert_close(after.means, aggregate.refine(banks, start, steps, 0.01, margin, 0.5).means)


def test_fedpagr_costs_c_times_d_floats_each_way():
    method, about = FedPAGR(), setup(10, 512)
    state = method.start(about)
    assert wire.sizes(wire.encode(method.exchange.message(state, 0, 1)))["prototypes"] == 20_480
    full = bank(0, 10, 512)

    class Client:
        def bank(self):
            return full

    content = method.returned(Client(), received(method.exchange.message(state, 0, 1)), 1)
    size = wire.sizes(wire.encode(content))
    assert size["prototypes"] == 20_480 and size["weights"] == 0
    state = updated(method, state, [Upload(0, 10, content)], 1, about)
    assert wire.sizes(wire.encode(method.exchange.message(state, 0, 2)))["prototypes"] == 20_480


# --- FedTGP -----------------------------------------------------------------------------------------------------------
class TrainablePrototypes(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        classes, d = tensors["classes"].shape
        self.classes, self.hidden, self.output = nn.Embedding(classes, d), nn.Linear(d, d), nn.Linear(d, d)
        with torch.no_grad():
            self.classes.weight.copy_(tensors["classes"])
            for layer, name in ((self.hidden, "hidden"), (self.output, "output")):
                layer.weight.copy_(tensors[f"{name}.weight"])
                layer.bias.copy_(tensors[f"{name}.bias"])

    def forward(self):
        return self.output(torch.relu(self.hidden(self.classes(torch.arange(self.classes.num_embeddings)))))


def naive_margin(banks, most):
    """The class means over clients, then a double loop."""
    means = {}
    for c in range(banks.num_classes):
        rows = [banks.means[k, c] for k in range(len(banks.counts)) if banks.counts[k, c] > 0]
        if rows:
            means[c] = sum(rows) / len(rows)
    gaps = [min(float((means[c] - means[o]).norm()) for o in means if o != c) for c in means if len(means) > 1]
    return min(max(gaps), most) if gaps else 0.0


def naive_fedtgp(tensors, contents, known, epochs, batch, lr, seed, round, most=100.0):
    banks = PrototypeBank.stack(contents)
    pairs = [(b.means[c], c) for b in contents for c in range(b.num_classes) if b.counts[c] > 0]
    margin = naive_margin(banks, most)
    model = TrainablePrototypes(tensors)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    stream = seeds.torch_stream(seed, "server", round)
    for _ in range(epochs):
        order = torch.randperm(len(pairs), generator=stream).tolist()
        for i in range(0, len(order), batch):
            loss = torch.zeros(())
            chosen = [pairs[j] for j in order[i : i + batch]]
            p = model()
            for z, y in chosen:
                scores = torch.stack([-(torch.dist(z, p[c]) + margin * (c == y)) for c in known])
                loss = loss - scores.log_softmax(0)[known.index(y)]
            optimiser.zero_grad()
            (loss / len(chosen)).backward()
            optimiser.step()
    return model


@pytest.mark.parametrize(("classes", "rows", "cores"), [(50, 128, 1), (3, 2, 1), (1, 2, 3)])
def test_fedtgp_server_equals_a_module_two_rounds(monkeypatch, classes, rows, cores):
    """Class 2 is reported in the first round alone, class 3 never; in one piece, and in several."""
    monkeypatch.setattr(fedtgp, "CLASSES", classes)
    monkeypatch.setattr(fedtgp, "ROWS", rows)
    with on_cores(cores):
        check_fedtgp_two_rounds()


def test_fedtgp_bits_do_not_depend_on_the_number_of_cores(monkeypatch):
    monkeypatch.setattr(fedtgp, "CLASSES", 1)
    monkeypatch.setattr(fedtgp, "ROWS", 2)
    uploads = [Upload(k, 5, Bundle(bank=bank(k))) for k in range(4)]
    method, states = FedTGP(server_epochs=5), []
    for cores in (1, 2, 4):
        with on_cores(cores):
            states.append(updated(method, method.start(setup()), uploads, 1, setup()))
    for other in states[1:]:
        assert torch.equal(states[0].bank.means, other.bank.means)
        assert all(torch.equal(states[0].network[name], value) for name, value in other.network.items())


def check_fedtgp_two_rounds():
    method, about = FedTGP(server_epochs=3, server_batch=2, server_lr=0.1), setup()
    state = method.start(about)
    first = [bank(1, known={0, 1}), bank(2, known={1, 2}), bank(3, known={0})]
    second = [bank(4, known={0, 1}), bank(5, known={1})]
    for round, contents, known in ((1, first, [0, 1, 2]), (2, second, [0, 1, 2])):
        before = {n: v.clone() for n, v in state.network.items()}
        uploads = [Upload(k, 5, Bundle(bank=b)) for k, b in enumerate(contents)]
        after = updated(method, state, uploads, round, about)
        for name, value in before.items():
            assert torch.equal(state.network[name], value)  # the old state is left alone
        model = naive_fedtgp(before, contents, known, 3, 2, 0.1, about.seed, round)
        expected = dict(model.named_parameters())
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(after.network["classes"], expected["classes.weight"].detach(), **close)
        for name in ("hidden.weight", "hidden.bias", "output.weight", "output.bias"):
            torch.testing.assert_close(after.network[name], expected[name].detach(), **close)
            assert not torch.equal(after.network[name], before[name])
        torch.testing.assert_close(after.bank.means[known], model().detach()[known], **close)
        assert after.bank.known.tolist() == [True, True, True, False]
        assert not bool(after.bank.means[3].any())  # zeros, as an unknown row is restored from a checkpoint
        state = after


def test_fedtgp_gradient_where_a_prototype_is_met_exactly():
    """The square root's gradient at 0 is infinite; here it is 0, and everything stays finite."""
    network = FedTGP().start(setup()).network
    network = {n: torch.zeros_like(v) if n.startswith("output") else v.clone() for n, v in network.items()}
    own = F.one_hot(torch.tensor([0, 1]), C).float()
    generator = Generator(network, 0.1)
    generator.descend(torch.zeros(2, D), torch.zeros(2, 1), own, -2.0 * own)
    assert all(bool(torch.isfinite(v).all()) for v in generator.network.values())
    assert not bool(generator.prototypes().any())  # all distances are 0: nothing moves


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [100.0, 1.5])
def test_fedtgp_margin(seed, most):
    g = torch.Generator().manual_seed(seed)
    banks = PrototypeBank.stack(
        [bank(10 * seed + k, known=set(torch.randperm(C, generator=g)[:2].tolist())) for k in range(3)]
    )
    ours = aggregate.margin(aggregate.mean(banks), most)
    assert float(ours) == pytest.approx(naive_margin(banks, most), rel=1e-5)


def test_fedtgp_margin_by_hand():
    means = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0], [99.0, 99.0]])
    assert float(aggregate.margin(PrototypeBank(means, torch.tensor([1.0, 1, 1, 0])))) == pytest.approx(5.0)
    assert float(aggregate.margin(PrototypeBank(means, torch.ones(4)), 1000.0)) == pytest.approx(math.hypot(96, 94))
    assert float(aggregate.margin(PrototypeBank(means, torch.ones(4)))) == 100.0
    assert float(aggregate.margin(PrototypeBank(means, torch.tensor([0.0, 2, 0, 0])))) == 0.0
    assert float(aggregate.margin(PrototypeBank.empty(4, 2))) == 0.0


def test_fedtgp_training_pulls_prototypes_to_their_classes():
    method, about = FedTGP(), setup()
    centres = 3 * torch.eye(C, D)
    uploads = [Upload(k, 5, Bundle(bank=PrototypeBank(centres + 0.1 * bank(k).means, torch.ones(C)))) for k in range(3)]
    state = method.start(about)
    for round in (1, 2):
        state = updated(method, state, uploads, round, about)
    assert state.bank.nearest(centres).tolist() == list(range(C))


def test_fedtgp_sends_the_bank_alone():
    method = FedTGP()
    state = method.start(setup(10, 64))
    assert sorted(state.network) == ["classes", "hidden.bias", "hidden.weight", "output.bias", "output.weight"]
    state = updated(method, state, [Upload(0, 5, Bundle(bank=bank(0, 10, 64)))], 1, setup(10, 64))
    size = wire.sizes(wire.encode(method.exchange.message(state, 0, 2)))
    assert size["prototypes"] == 10 * 64 * 4 and size["scalars"] == 10 * 8 and size["weights"] == 0


def test_fedtgp_client_loss():
    x, y = samples(0, [0, 1, 2])
    b, net = bank(1, known={0, 2}), Net(weights())
    terms = FedTGP().terms(net, Batch(x, y, torch.ones(len(y))), received(Bundle(bank=b)), 1)
    z, logits = net(x)
    rows = [i for i in range(len(y)) if int(y[i]) in (0, 2)]
    expected = 10 * sum(float(((z[i] - b.means[y[i]]) ** 2).mean()) for i in rows) / len(rows)
    assert float(terms["align"]) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(logits, y))


# --- FedProc ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("round", "share"), [(1, 0.01), (2, 0.02), (50, 0.5), (100, 1.0), (101, 1.0), (500, 1.0)])
def test_fedproc_schedule(round, share):
    assert FedProc().ce_share(round) == pytest.approx(share)
    assert FedProc(rounds_to_ce=10).ce_share(round) == pytest.approx(min(round / 10, 1))


def test_fedproc_loss_against_a_loop():
    x, y = samples(0, [0, 1, 2])
    b, net = bank(1, known={0, 1, 3}), Net(weights())
    batch = Batch(x, y, torch.ones(len(y)))
    terms = FedProc().terms(net, batch, received(Bundle(bank=b)), 30)
    z, logits = net(x)
    total, n = 0.0, 0
    for i in range(len(y)):
        if int(y[i]) in (0, 1):
            cos = {c: float(F.cosine_similarity(z[i], b.means[c], dim=0)) for c in (0, 1, 3)}
            total -= math.log(math.exp(cos[int(y[i])]) / sum(math.exp(v) for v in cos.values()))
            n += 1
    assert float(terms["contrast"]) == pytest.approx(0.7 * total / n, rel=1e-5)
    assert float(terms["ce"]) == pytest.approx(0.3 * float(F.cross_entropy(logits, y)), rel=1e-5)


def test_fedproc_first_round_is_cross_entropy_alone():
    x, y = samples(0, [0, 1, 2])
    method, net = FedProc(), Net(weights())
    has = received(method.exchange.message(method.start(setup()), 0, 1))
    terms = method.terms(net, Batch(x, y, torch.ones(len(y))), has, 1)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(net(x).logits, y))
    assert float(terms["contrast"]) == 0


def test_fedproc_centres_are_of_unit_embeddings_and_weighed_by_size():
    method, about = FedProc(), setup()
    state = method.start(about)
    nets, data = [Net(weights(k)) for k in range(2)], [samples(0, [0, 1]), samples(1, [1, 2], n=5)]
    uploads, gathered = [], {c: [] for c in range(C)}
    for k, (net, (x, y)) in enumerate(zip(nets, data, strict=True)):
        has = received(method.exchange.message(state, k, 1))
        uploads.append(Upload(k, len(y), method.returned(Trained(net, x, y), has, 1)))
        for i in range(len(y)):
            z = net(x[i : i + 1]).embedding[0]
            gathered[int(y[i])].append(z / z.norm())
    after = updated(method, state, uploads, 1, about)
    for c in range(3):  # weighed by size, the mean of the clients' means is the mean over all samples
        torch.testing.assert_close(after.bank.means[c], sum(gathered[c]) / len(gathered[c]))
    assert after.bank.counts.tolist() == [len(gathered[c]) for c in range(C)]
    for name in weights():
        expected = (len(data[0][1]) * nets[0].params[name] + len(data[1][1]) * nets[1].params[name]) / 14
        torch.testing.assert_close(after.weights[name], expected)
    kept = updated(method, after, uploads[:1], 2, about)
    torch.testing.assert_close(kept.bank.means[2], after.bank.means[2])


def test_fedproc_what_travels_goes_by_the_setting():
    both, centres = FedProc(), FedProc(average_weights=False)
    assert names(both.exchange.down) == names(both.exchange.up) == ("weights", "bank") and not both.exchange.keeps_model
    assert names(centres.exchange.down) == names(centres.exchange.up) == ("bank",) and centres.exchange.keeps_model
    assert not any(part.optional for method in (both, centres) for part in method.exchange.up)
    assert both.start(setup()).weights.keys() == weights().keys() and not centres.start(setup()).weights
    x, y = samples(0, [0, 1])
    has = received(centres.exchange.message(centres.start(setup()), 0, 1))
    content = centres.returned(Trained(Net(weights()), x, y), has, 1)
    assert not content.weights
    after = updated(centres, centres.start(setup()), [Upload(0, 9, content)], 1, setup())
    assert not after.weights and after.bank.known.tolist() == [True, True, False, False]


def test_fedproc_scores_by_cosine():
    z, b = torch.randn(3, D, generator=torch.Generator().manual_seed(0)), bank(2, known={1, 2})
    scores = FedProc().predict.scores(z, b)
    torch.testing.assert_close(scores[:, 1:3], F.cosine_similarity(z[:, None], b.means[1:3], dim=-1))
    assert bool((scores[:, [0, 3]] == -math.inf).all())


# --- FedMPS: losses ---------------------------------------------------------------------------------------------------
def naive_contrast(z, y, b, temperature, weight):
    def cos(a, c):
        return float(a @ c) / (float(a.norm()) * float(c.norm()))

    known = [c for c in range(b.num_classes) if b.counts[c] > 0]
    top = bottom = 0.0
    for i in range(len(y)):
        if int(y[i]) not in known or weight[i] == 0:
            continue
        others = [(cos(z[i], z[j]), int(y[j])) for j in range(len(y)) if j != i and weight[j] > 0]
        others += [(cos(z[i], b.means[c]), c) for c in known]
        total = sum(math.exp(v / temperature) for v, _ in others)
        terms = [-math.log(math.exp(v / temperature) / total) for v, c in others if c == y[i]]
        top += float(weight[i]) * sum(terms) / len(terms)
        bottom += float(weight[i])
    return top / bottom if bottom else 0.0


def naive_soft(logits, y, targets, known, temperature, weight):
    top = bottom = 0.0
    for i in range(len(y)):
        if known[y[i]]:
            p, q = ((v.double() / temperature).softmax(0) for v in (targets[y[i]], logits[i]))
            top += float(weight[i]) * sum(float(a) * math.log(float(a) / float(c)) for a, c in zip(p, q, strict=True))
            bottom += float(weight[i])
    return top / bottom if bottom else 0.0


def case(seed, known, n=7):
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, D, generator=g, dtype=torch.float64)
    y = torch.randint(C, (n,), generator=g)
    weight = torch.randint(3, (n,), generator=g).double() / 2
    b = bank(seed + 100, known=known)
    targets = torch.randn(C, C, generator=g, dtype=torch.float64)
    return z, y, PrototypeBank(b.means.double(), b.counts.double()), weight, targets


KNOWN = [{0, 1, 2, 3}, {0, 2}, set()]


@pytest.mark.parametrize("known", KNOWN)
@given(seed=st.integers(0, 10_000), n=st.integers(1, 8), temperature=st.sampled_from([0.1, 0.5, 5.0]))
@examples(max_examples=15, deadline=None)
def test_fedmps_losses_equal_loops(known, seed, n, temperature):
    z, y, b, weight, targets = case(seed, known, n)
    logits = z[:, :C]
    for given_weight, w in ((None, torch.ones(n)), (weight, weight), (0 * weight, 0 * weight)):
        ours = losses.supervised_contrast(z, y, b, temperature, given_weight)
        assert float(ours) == pytest.approx(naive_contrast(z, y, b, temperature, w), abs=1e-9)
        ours = losses.soft_labels(logits, y, targets, b.known, temperature, given_weight)
        assert float(ours) == pytest.approx(naive_soft(logits, y, targets, b.known, temperature, w), abs=1e-9)


def contrast(z, y, b, weight, targets):
    return losses.supervised_contrast(z, y, b, 0.5, weight)


def soft(z, y, b, weight, targets):
    return losses.soft_labels(z[:, :C], y, targets, b.known, 5.0, weight)


both = pytest.mark.parametrize("loss", [contrast, soft])


@both
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("filler", [0.0, 1e200, math.nan])
def test_fedmps_padding_and_unknown_rows_touch_nothing(loss, known, filler):
    z, y, b, _, targets = case(1, known)
    spoilt = PrototypeBank(torch.where(b.known[:, None], b.means, filler), b.counts)
    dirty = torch.where(b.known[:, None], targets, filler)
    z.requires_grad_()
    full = torch.cat([z.detach(), torch.full((2, D), filler, dtype=z.dtype)]).requires_grad_()
    bare = loss(z, y, b, torch.ones(len(y)), targets)
    padded = loss(full, torch.cat([y, torch.tensor([0, 1])]), spoilt, torch.tensor([1.0] * len(y) + [0, 0]), dirty)
    torch.testing.assert_close(padded, bare)
    (clean,), (other,) = torch.autograd.grad(bare, z), torch.autograd.grad(padded, full)
    torch.testing.assert_close(other[: len(y)], clean)
    assert not bool(other[len(y) :].any())
    if not known:
        assert float(bare.detach()) == 0 and not bool(clean.any())


@both
def test_fedmps_losses_under_vmap(loss):
    cases = [case(s, k) for s, k in zip(range(3), KNOWN, strict=True)]
    z, y, weight, targets = (torch.stack([c[i] for c in cases]) for i in (0, 1, 3, 4))
    banks = PrototypeBank.stack([c[2] for c in cases])
    together = torch.func.vmap(loss)(z, y, banks, weight, targets)
    gradients = torch.func.vmap(torch.func.grad(loss))(z, y, banks, weight, targets)
    for k, one in enumerate(cases):
        torch.testing.assert_close(together[k], loss(*one))
        torch.testing.assert_close(gradients[k], torch.func.grad(loss)(*one))


@both
def test_fedmps_losses_gradcheck(loss):
    z, y, b, weight, targets = case(3, {0, 2, 3})
    assert torch.autograd.gradcheck(lambda z: loss(z, y, b, weight, targets), z.requires_grad_())


def test_soft_labels_by_hand():
    """Two classes, T = 1: KL((3/4, 1/4) ‖ (1/2, 1/2)); equal logits give 0; no factor T²."""
    targets = torch.tensor([[math.log(3), 0.0], [0.0, 0.0]])
    value = losses.soft_labels(torch.zeros(1, 2), torch.tensor([0]), targets, torch.tensor([True, True]), 1.0)
    assert float(value) == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert float(losses.soft_labels(targets[:1], torch.tensor([0]), targets, torch.tensor([True, True]), 5.0)) == 0
    warm = losses.soft_labels(torch.zeros(1, 2), torch.tensor([0]), 5 * targets, torch.tensor([True, True]), 5.0)
    torch.testing.assert_close(warm, value)


def test_supervised_contrast_by_hand():
    """One sample on its prototype, one other prototype at a right angle, temperature 1: log(1 + e⁻¹)."""
    b = PrototypeBank(torch.eye(2, 3) * 7, torch.ones(2))
    value = losses.supervised_contrast(torch.tensor([[2.0, 0, 0]]), torch.tensor([0]), b, 1.0)
    assert float(value) == pytest.approx(math.log(1 + math.exp(-1)))


# --- FedMPS: client and server ----------------------------------------------------------------------------------------
def mps_upload(client, seed, known):
    low = bank(seed + 50, dim=LOW, known=known)
    return Upload(client, 5, Bundle(bank=bank(seed, known=known), banks={"low": low}))


def test_fedmps_first_round_is_cross_entropy_alone():
    x, y = samples(0, [0, 1, 2])
    method, net = FedMPS(), Net(weights())
    has = received(method.exchange.message(method.start(setup()), 0, 1))
    terms = method.terms(net, Batch(x, y, torch.ones(len(y))), has, 1)
    torch.testing.assert_close(terms["ce"], F.cross_entropy(net(x).logits, y))
    assert [float(terms[name]) for name in ("high", "low", "soft")] == [0, 0, 0]


def test_fedmps_client_loss_against_loops():
    x, y = samples(0, [0, 1, 2])
    method = FedMPS(high_weight=2.0, low_weight=0.2, soft_weight=5.0)
    state = updated(method, method.start(setup()), [mps_upload(0, 1, {0, 1}), mps_upload(1, 2, {0, 3})], 1, setup())
    net, ones = Net(weights()), torch.ones(len(y))
    has = received(method.exchange.message(state, 0, 2))
    terms = method.terms(net, Batch(x, y, ones), has, 2)
    low, z, logits = net.levels(x)
    assert float(terms["high"]) == pytest.approx(2 * naive_contrast(z, y, state.bank, 0.5, ones), rel=1e-4)
    assert float(terms["low"]) == pytest.approx(0.2 * naive_contrast(low, y, state.low, 0.5, ones), rel=1e-4)
    expected = 5 * naive_soft(logits, y, state.soft_labels, state.bank.known, 5.0, ones)
    assert float(terms["soft"]) == pytest.approx(expected, rel=1e-4)
    assert expected > 0


def test_fedmps_server_head_equals_a_module_two_rounds():
    """The head goes on from its last state; a class not reported keeps its row, one never reported is masked."""
    method, about = FedMPS(server_lr=0.05), setup()
    state = method.start(about)
    head = nn.Linear(D, C)
    with torch.no_grad():
        head.weight.copy_(state.head)
        head.bias.copy_(state.head_bias)
    rounds = [
        [mps_upload(0, 1, {0, 1}), mps_upload(1, 2, {0, 2}), mps_upload(2, 3, {1})],
        [mps_upload(0, 4, {0, 1}), mps_upload(1, 5, {0})],
    ]
    rows = torch.zeros(C, C)
    for round, uploads in enumerate(rounds, start=1):
        state = updated(method, state, uploads, round, about)
        pairs = [(u.content.bank.means[c], c) for u in uploads for c in range(C) if u.content.bank.counts[c] > 0]
        optimiser = torch.optim.Adam(head.parameters(), lr=0.05)
        stream = seeds.torch_stream(about.seed, "server", round)
        for _ in range(6):
            order = torch.randperm(len(pairs), generator=stream).tolist()
            for i in range(0, len(order), 4):
                chosen = [pairs[j] for j in order[i : i + 4]]
                loss = F.cross_entropy(head(torch.stack([z for z, _ in chosen])), torch.tensor([c for _, c in chosen]))
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        for c in {c for _, c in pairs}:
            logits = [head(z).detach() for z, k in pairs if k == c]
            rows[c] = sum(logits) / len(logits)
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(state.head, head.weight.detach(), **close)
        torch.testing.assert_close(state.head_bias, head.bias.detach(), **close)
        torch.testing.assert_close(state.soft_labels, rows, **close)
        assert state.bank.known.tolist() == state.low.known.tolist() == [True, True, True, False]
    first, second = (u.content.banks["low"].means for u in rounds[1])
    torch.testing.assert_close(state.low.means[0], (first[0] + second[0]) / 2)
    torch.testing.assert_close(state.low.means[2], rounds[0][1].content.banks["low"].means[2])


def test_fedmps_what_travels():
    method, about = FedMPS(), setup()
    state = updated(method, method.start(about), [mps_upload(0, 1, {0, 1})], 1, about)
    sent = method.exchange.message(state, 0, 2)
    assert set(sent.tensors) == {"soft_labels"} and not sent.weights
    assert wire.sizes(wire.encode(sent))["prototypes"] == 4 * 2 * (D + LOW)
    sizes = {"classes": C, "dim": D, "others": 2}
    expected = method.exchange.expected("up", sizes, weights())
    assert expected.shapes["low"] == (C, LOW) and expected.shapes["bank"] == (C, D)
    assert names(method.exchange.up) == ("bank", "low") and method.exchange.keeps_model
    assert names(method.exchange.down) == ("bank", "low", "soft_labels")
    averaged = FedMPS(average_weights=True)
    assert names(averaged.exchange.up) == ("bank", "low", "weights") and not averaged.exchange.keeps_model
    assert names(averaged.exchange.down) == ("bank", "low", "weights", "soft_labels")
    assert not any(part.optional for part in (*method.exchange.up, *averaged.exchange.up))
    x, y = samples(0, [0, 1])
    begin = averaged.start(about)
    content = averaged.returned(Trained(Net(weights(3)), x, y), received(averaged.exchange.message(begin, 0, 1)), 1)
    after = updated(averaged, begin, [Upload(0, 9, content)], 1, about)
    torch.testing.assert_close(dict(after.weights), weights(3))
    counted = {"samples": 9.0}  # every upload says how many samples it is of
    good = Bundle(bank=content.bank, banks=content.banks, scalars=counted)
    wire.decode(wire.encode(good), "client 0", expected)
    with pytest.raises(wire.WireError, match="'weights', which this method does not exchange"):
        wire.decode(wire.encode(replace(content, scalars=counted)), "client 0", expected)
    with pytest.raises(wire.WireError, match="sent no low, which this method needs"):
        wire.decode(wire.encode(replace(good, banks={})), "client 0", expected)


# --- all four ---------------------------------------------------------------------------------------------------------
NAMES = ["fedpagr", "fedtgp", "fedproc", "fedmps"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("filler", [0.0, 1e30])
def test_padding_of_a_batch_changes_no_term(name, filler):
    x, y = samples(0, [0, 1, 2])
    method, about = methods.registry.make(name), setup()
    state = updated(method, method.start(about), [mps_upload(0, 1, {0, 1})], 1, about)
    has, batch = received(method.exchange.message(state, 0, 2)), Batch(x, y, torch.ones(len(y)))
    net = Net(weights(), sphere=name == "fedpagr")
    bare, padded = (method.terms(net, b, has, 2) for b in (batch, with_padding(batch, filler)))
    assert bare.keys() == padded.keys()
    for term, value in bare.items():
        torch.testing.assert_close(padded[term], value)


def content_of(state):
    """Everything in a server's state, value by value."""
    tensors: dict[str, Tensor] = {}
    return packed(state, "", tensors), {name: (value.dtype, value.tolist()) for name, value in tensors.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_message_survives_the_wire_and_the_state_a_checkpoint(name):
    method, about = methods.registry.make(name), setup()
    state = updated(method, method.start(about), [mps_upload(0, 1, {0, 1})], 1, about)
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(packed(state, "", tensors))
    restored = unpacked(json.loads(tree), tensors, state)
    sent, sent_after = (wire.encode(method.exchange.message(s, 0, 2)) for s in (state, restored))
    assert sent == sent_after == wire.encode(wire.decode(sent))
    uploads = [mps_upload(0, 2, {1, 2}), mps_upload(1, 3, {2})]
    one, other = (content_of(updated(method, s, uploads, 2, about)) for s in (state, restored))
    assert one == other


BAD = [
    ("fedpagr", {"separation": -1}, "separation must be 0 or more"),
    ("fedpagr", {"entropy": -1}, "entropy must be 0 or more"),
    ("fedpagr", {"margin": 2}, "margin is a cosine"),
    ("fedpagr", {"refine_steps": -1}, "refine_steps must be 0 or more"),
    ("fedpagr", {"refine_lr": 0}, "refine_lr must be above 0"),
    ("fedpagr", {"temperature": -0.1}, "temperature must be 0 or more"),
    ("fedtgp", {"weight": -1}, "weight must be 0 or more"),
    ("fedtgp", {"max_margin": -1}, "max_margin must be 0 or more"),
    ("fedtgp", {"server_epochs": 0}, "server_epochs must be 1 or more"),
    ("fedtgp", {"server_batch": 0}, "server_batch must be 1 or more"),
    ("fedproc", {"rounds_to_ce": 0}, "rounds_to_ce must be 1 or more"),
    ("fedmps", {"soft_weight": -1}, "soft_weight must be 0 or more"),
    ("fedmps", {"soft_temperature": 0}, "temperature and soft_temperature must be above 0"),
    ("fedmps", {"server_lr": 0}, "server_lr must be above 0"),
    ("fedmps", {"alpha": 1}, "unknown setting of method 'fedmps': 'alpha'"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_bad_settings_are_named(name, options, message):
    with pytest.raises(ProtofedError, match=message):
        methods.registry.make(name, options)


@pytest.fixture
def no_dropout(monkeypatch):
    """The consensus head's dropout draws other numbers in a stack than one client at a time."""
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)


SETTINGS = [
    ("fedpagr", {}),
    ("fedpagr", {"temperature": 0.0}),
    ("fedpagr", {"train_classifier": False, "anchor": False}),
    ("fedtgp", {"server_epochs": 3}),
    ("fedproc", {"rounds_to_ce": 4}),
    ("fedproc", {"rounds_to_ce": 4, "average_weights": False}),
    ("fedmps", {}),
    ("fedmps", {"average_weights": True}),
]


@pytest.mark.parametrize(("name", "options"), SETTINGS)
@pytest.mark.slow
def test_the_stack_gives_the_plain_loops_numbers(name, options, no_dropout):
    """Ragged clients, batches that do not divide, partial participation."""
    changes = {"rounds": 3, "batch": 5, "shot_spread": 3.0, "participation": 0.8, **options}
    assert_same(resolve(name, {**SMALL, "data": blobs(), **changes}), ENGINES["stack"])


@pytest.mark.parametrize(("name", "options"), [s for s in SETTINGS if not s[1].get("average_weights")])
def test_clients_of_two_architectures(name, options):
    changes = {"models": ["mlp?hidden=7", "mlp?hidden=6,4"], "dim": 5, "rounds": 2, "batch": 8}
    keys = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")}
    server, _, records = finish(resolve(name, {**keys, "data": blobs(), **changes, **options}), LOOP)
    assert not any(r.dropped for r in records)
    assert all(math.isfinite(r.loss) for r in records)
    assert server.bank.means.shape == (4, 5) and bool(torch.isfinite(server.bank.means).all())


def test_fedpagr_trains_a_model_without_a_consensus_space():
    """projection=none leaves embeddings off the sphere; losses, prototypes and scores normalise them."""
    server, _, records = finish(resolve("fedpagr", {**SMALL, "data": blobs(), "projection": "none", "rounds": 2}), LOOP)
    assert not any(r.dropped for r in records)
    torch.testing.assert_close(server.bank.means.norm(dim=1), torch.ones(4))


@pytest.mark.slow
def test_fedpagr_learns():
    """With the paper's optimiser. A network of 7 hidden units and 5 dimensions, as in SMALL, leaves classes merged."""
    changes = {"rounds": 20, "shot": 12, "lr": 0.01, "momentum": 0.9, "hidden": [64], "embedding": 32}
    _, federation = build(resolve("fedpagr", {**SMALL, "data": blobs(), **changes}).with_engine(LOOP))
    records = list(federation)
    federation.engine.close()
    assert records[-1].loss < records[0].loss
    assert records[-1].metrics["accuracy_prototype"] > 0.95 and records[-1].metrics["accuracy_head"] > 0.95
