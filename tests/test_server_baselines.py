"""Baselines whose labels are at the server: SemiFL, (FL)², FedMatch with labels at the server, pFedKnow."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta as beta_distribution
from torch import nn
from torch.func import functional_call

import protofed as pf
from protofed import losses, wire
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.batches import batches
from protofed.methods import at_server
from protofed.methods.fedmatch import FedMatch, FedMatchServer, fixed_input
from protofed.methods.fl2 import FL2, thresholds
from protofed.methods.pfedknow import PFedKnow, masked, pruned
from protofed.methods.semifl import SemiFL, beta, partners
from protofed.methods.server import Setup
from protofed.models.decomposed import PSI, Decomposed
from protofed.models.skeleton import Skeleton, TrainingNetwork
from protofed.parts import Batch, Received, Unlabelled, Upload
from protofed.wire import Bundle
from support.engines import ENGINES, LOOP, assert_same, finish, images, updated
from support.small import SMALL, blobs
from test_fedmatch import collapsed

C = 4
AT_SERVER = {
    **SMALL,
    "clients": 4,
    "rounds": 3,
    "epochs": 2,
    "batch": 5,
    "shot": 12,
    "participation": 0.8,
    "labels": "server",
    "server_labels": 16,
}
METHODS = {
    "semifl": {"threshold": 0.3, "lr": 0.02},
    "fl2": {"threshold": 0.3, "lr": 0.02},
    "fedmatch-server": {"threshold": 0.3, "refresh": 2, "lr": 0.001, "weight_decay": 0.01},
    "pfedknow": {"threshold": 0.4, "lr": 0.02, "prune_times": 1},
}


def settings_of(method, **more):
    return resolve(method, {**AT_SERVER, "data": blobs(per_class=60), **METHODS[method], **more})


def module(seed=0, dims=6):
    torch.manual_seed(seed)
    return pf.models.build("mlp", (dims,), C, hidden=[7], embedding=5)


def network(seed=0):
    skeleton = Skeleton(module(seed))
    return TrainingNetwork(skeleton, skeleton.params)


def weights_of(seed, times=1.0):
    return {n: times * v.detach() for n, v in module(seed).named_parameters()}


def batch_of(n=8, padding=1, draws=2):
    g = torch.Generator().manual_seed(3)
    u = 4 * torch.randn(n + padding, 6, generator=g)
    nothing = torch.zeros(0)
    return Batch(
        torch.zeros(0, 6),
        nothing.long(),
        nothing,
        unlabelled=u,
        weak=u + 0.1 * torch.randn(u.shape, generator=g),
        strong=u + torch.randn(u.shape, generator=g),
        unlabelled_weight=torch.tensor([1.0] * n + [0.0] * padding),
        draws=torch.rand(n + padding, draws, generator=g),
    )


def probabilities(weights, x):
    with torch.no_grad():
        return functional_call(module().eval(), dict(weights), (x,)).logits.softmax(-1)


def setup_of(weights, clients=3):
    return Setup(C, 5, clients, weights, 0, (0,) * clients)


def cross_entropies(logits, labels):
    return [-math.log(float(row.softmax(-1)[int(y)])) for row, y in zip(logits.detach(), labels, strict=True)]


class Done:
    """A trained client that answers what a method asks for."""

    def __init__(self, logits=None, weights=None):
        self.logits, self.weights = logits, weights or {}

    def unlabelled(self, view="none", weights=None):
        assert weights is not None, "asked of the received model"
        return pf.models.Output(torch.zeros(len(self.logits), 5), self.logits)


# --- all of them ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_stack_equals_the_plain_loop(method):
    """Ragged clients, last batches that are shorter, a round somebody misses."""
    settings = settings_of(method, shot_spread=3.0)
    assert_same(settings, ENGINES["stack"])
    state, _, records = finish(settings, LOOP)
    assert all(torch.isfinite(v).all() for v in state.weights.values()) and not any(r.dropped for r in records)
    assert all("server ce" in r.terms and r.measures["acceptance"] > 0 for r in records)


@pytest.mark.slow
def test_workers_equal_the_plain_loop():
    assert_same(settings_of("pfedknow"), ENGINES["workers stack"])


@pytest.mark.parametrize("method", ["semifl", "fl2"])
def test_batch_norm(method):
    """Sharpness needs a gradient within the loss, where batch norm's running statistics must not be written to."""
    changes = {
        "model": "cnn",
        "channels": [2, 3],
        "embedding": 6,
        "norm": "batch",
        "clients": 2,
        "rounds": 1,
        "epochs": 1,
    }
    plain = {k: v for k, v in AT_SERVER.items() if k not in ("hidden", "model", "embedding")}
    data = images(per_class=40)
    settings = resolve(method, {**plain, **METHODS[method], **changes, "data": data, "lr": 0.005})
    assert_same(settings, ENGINES["stack"])


@pytest.mark.parametrize("method", METHODS)
def test_without_labels_at_the_server_or_samples_at_the_clients_an_error_says_so(method):
    with pytest.raises(ProtofedError, match="server_labels"):
        build(settings_of(method, labels="client", labels_per_class=2, server_labels=0).with_engine(LOOP))[1].step()
    with pytest.raises(ProtofedError, match="client 0 has no unlabelled sample"):
        build(settings_of(method, labels="all").with_engine(LOOP))[1].step()


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("semifl", {"threshold": 1.5}),
        ("semifl", {"mixup": 0}),
        ("semifl", {"server_momentum": 1}),
        ("fl2", {"radius": -0.1}),
        ("fl2", {"epochs_at_server": 0}),
        ("fedmatch-server", {"epochs_at_server": 0}),
        ("fedmatch-server", {"helpers": -1}),
        ("pfedknow", {"prune_rate": 1}),
        ("pfedknow", {"temperature": 0}),
        ("pfedknow", {"prune_times": -1}),
    ],
)
def test_settings_that_make_no_sense(method, wrong):
    with pytest.raises(ProtofedError, match=next(iter(wrong))):
        resolve(method, {**AT_SERVER, **wrong})


def test_steps_go_over_the_unlabelled_set_alone():
    made = list(Unlabelled().steps(torch.zeros(0).long(), 11, 2, 4, 1, torch.Generator().manual_seed(0)))
    assert [len(step.unlabelled) for step in made] == [4, 4, 3] * 2 and not any(len(step.labelled) for step in made)
    assert sorted(torch.cat([step.unlabelled for step in made[:3]]).tolist()) == list(range(11))


@pytest.mark.parametrize("method", [SemiFL(threshold=1.0), FL2(threshold=1.0), PFedKnow(threshold=1.0)])
def test_no_sure_sample_and_one_class_leave_no_nan(method):
    """No sample is certain; and with one class every sample is, whatever the model."""
    net = network()
    made = method.terms(net, batch_of(), Received(weights=weights_of(1)), 1)
    gradient = torch.autograd.grad(
        sum(made.terms.values()), list(net.params.values()), allow_unused=True, materialize_grads=True
    )
    assert all(torch.isfinite(g).all() for g in gradient)
    if isinstance(method, SemiFL):
        assert not made.pseudo.accepted.any() and not any(g.any() for g in gradient)
    if isinstance(method, FL2):
        assert float(made.terms["sharpness"].detach()) == 0 and made.pseudo.accepted.any()
    single = Skeleton(pf.models.build("mlp", (6,), 1, hidden=[7], embedding=5))
    net = TrainingNetwork(single, single.params)
    made = method.terms(net, batch_of(), Received(weights=single.weights()), 1)
    assert made.pseudo.accepted.all() and float(sum(made.terms.values()).detach()) == pytest.approx(0, abs=1e-6)


# --- SemiFL ---------------------------------------------------------------------------------------------------------
def test_semifl_loss_equals_a_plain_loop():
    method, batch, received = SemiFL(threshold=0.5, mix_weight=0.7), batch_of(), weights_of(1, 2.0)
    net = network()
    made = method.terms(net, batch, Received(weights=received), 1)
    p = probabilities(received, batch.unlabelled)
    sure = [i for i in range(8) if float(p[i].max()) >= 0.5]
    assert 0 < len(sure) < 8
    label = p.argmax(-1)
    share = float(beta_distribution.ppf(float(batch.draws[0, 1]), 0.75, 0.75))
    other = [math.floor(8 * float(batch.draws[i, 0])) for i in range(8)]
    mixed = torch.stack([share * batch.weak[i] + (1 - share) * batch.weak[other[i]] for i in sure])
    with torch.no_grad():
        strong, mix = net(batch.strong[sure]).logits, net(mixed).logits
    fix = sum(cross_entropies(strong, label[sure])) / 8
    own = sum(cross_entropies(mix, label[sure])) / 8
    its = sum(cross_entropies(mix, [label[other[i]] for i in sure])) / 8
    assert made.terms["fix"].item() == pytest.approx(fix, rel=1e-5)
    assert made.terms["mix"].item() == pytest.approx(0.7 * (share * own + (1 - share) * its), rel=1e-5)
    assert made.pseudo.accepted[:8].nonzero().flatten().tolist() == sure


@given(u=st.integers(0, 10000).map(lambda k: k / 10000), a=st.sampled_from([0.2, 0.75, 1.0, 4.0]))
def test_beta_quantiles(u, a):
    exact = float(beta_distribution.ppf(u, a, a))
    near = 3e-4 if a <= 1 or 0.01 < u < 0.99 else 0.05  # above 1 the ends are steep
    assert float(beta(torch.tensor([u], dtype=torch.float64), a)[0]) == pytest.approx(exact, abs=near)


@given(u=st.lists(st.floats(0, 1), min_size=1, max_size=9), padding=st.integers(0, 3))
def test_partners_are_never_padding(u, padding):
    weight = torch.tensor([1.0] * len(u) + [0.0] * padding)
    chosen = partners(torch.tensor(u + [0.5] * padding), weight)
    assert int(chosen.min()) >= 0 and int(chosen.max()) < len(u)


def test_partners_are_uniform():
    chosen = partners(torch.rand(20000, generator=torch.Generator().manual_seed(0)), torch.ones(20000))
    assert float(chosen.float().mean()) == pytest.approx(9999.5, rel=0.02)
    assert len(chosen.unique()) == pytest.approx(20000 * (1 - math.exp(-1)), rel=0.02)  # with replacement


def test_semifl_who_is_sure_of_nothing_sits_out():
    method = SemiFL(server_momentum=0.5)
    start = {"w": torch.tensor([10.0]), "bn.running_var": torch.tensor([4.0])}
    setup = setup_of(start)
    state = method.start(setup)

    def upload(client, value, confident):
        weights = {"w": torch.tensor([value]), "bn.running_var": torch.tensor([value])}
        return Upload(client, 100 * (client + 1), Bundle(weights=weights, scalars={"confident": confident}))

    state = updated(method, state, [upload(0, 4.0, 3.0), upload(1, 8.0, 1.0), upload(2, 900.0, 0.0)], 1, setup)
    assert state.weights["w"].tolist() == [6.0] and method.describe(state, 1).numbers == {
        "active": 2.0
    }  # plain mean of two
    same = updated(method, state, [upload(2, 900.0, 0.0)], 2, setup)
    assert same.weights is state.weights and same.velocity is state.velocity and same.active == 0
    again = updated(method, same, [upload(0, 5.0, 2.0)], 3, setup)
    assert again.weights["w"].tolist() == [3.0]  # v = 0.5 · 4 + (6 − 5)
    assert again.weights["bn.running_var"].tolist() == [5.0]  # a variance has no momentum
    sent = method.exchange.message(again, 0, 4)
    assert set(sent.weights) == set(start) and replace(sent, weights={}).empty


def test_semifl_counts_the_confident():
    logits = torch.tensor([[9.0, 0, 0, 0], [1.0, 0, 0, 0], [0, 9.0, 0, 0]])
    assert SemiFL().returned(Done(logits), Received(), 1).scalars == {"confident": 2.0}


def test_semifl_a_federation_in_which_all_sit_out_keeps_the_servers_model():
    _, federation = build(settings_of("semifl", threshold=1.0).with_engine(LOOP))
    record = federation.step()
    assert record.measures["active"] == 0 and record.terms["fix"] == record.terms["mix"] == 0
    assert not federation.state.velocity
    assert record.up["weights"] == record.down["weights"] > 0


# --- what is prepared once a round ------------------------------------------------------------------------------------
def prepared_batches(name, **more):
    """A client's steps of a round, with its data and the model that it was sent."""
    _, federation = build(settings_of(name, **more).with_engine(LOOP))
    engine, data = federation.engine, federation.data.clients[1]
    received = Received(weights=weights_like(engine.start, 5))
    return list(batches(engine.task, engine.skeleton, data, received, 1, 2)), data, engine, received


def weights_like(start, seed):
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=g) for name, value in start.items()}


@pytest.mark.parametrize("name, more", [("semifl", {}), ("fl2", {"thresholds": "batch"})])
def test_labels_made_once_a_round_are_those_of_the_received_model(name, more):
    steps, data, engine, received = prepared_batches(name, **more)
    net = TrainingNetwork(engine.skeleton, engine.skeleton.params)
    seen = 0
    for step, batch in steps:
        now = net.frozen(batch.unlabelled, received.weights).logits.softmax(-1)
        torch.testing.assert_close(batch.prepared["p"], now)
        assert torch.equal(batch.unlabelled, data.unlabelled.take(step.unlabelled))
        seen += len(now)
        made = engine.method.terms(net, batch, received, 2)
        again = engine.method.terms(net, batch._replace(prepared=None), received, 2)
        for term, value in made.terms.items():
            torch.testing.assert_close(value, again.terms[term])
    assert seen == 2 * len(data.unlabelled), "two epochs"


def test_fl2_thresholds_of_a_round_equal_a_loop_over_all_samples():
    steps, data, engine, received = prepared_batches("fl2")  # the default
    net = TrainingNetwork(engine.skeleton, engine.skeleton.params)
    p = net.frozen(data.unlabelled.take(), received.weights).logits.softmax(-1).tolist()
    tau = sum(max(row) for row in p) / len(p)
    mean = [sum(row[c] for row in p) / len(p) for c in range(C)]
    accepted, differs = 0, 0
    for step, batch in steps:
        made = engine.method.terms(net, batch, received, 2).pseudo
        by_batch = replace(engine.method, thresholds="batch")
        of_batch = by_batch.terms(net, batch._replace(prepared={"p": batch.prepared["p"]}), received, 2).pseudo
        for k, row in enumerate(step.unlabelled.tolist()):
            label = p[row].index(max(p[row]))
            assert float(made.accepted[k]) == (max(p[row]) >= tau * mean[label] / max(mean))
        accepted += int(made.accepted.sum())
        differs += int((made.accepted != of_batch.accepted).sum())
    assert accepted and differs


@pytest.mark.parametrize("each", ["step", "round"])
def test_fedarpl_labels_a_sample_once_a_step_or_once_a_round(each):
    keys = {**AT_SERVER, "data": blobs(per_class=60), "labelled_each": each, "augmentation": "features"}
    _, federation = build(resolve("fedarpl", keys).with_engine(LOOP))
    engine, data = federation.engine, federation.data.clients[1]
    received = Received(weights=weights_like(engine.start, 5), scalars={"threshold": 0.3, "phase": 1})
    net = TrainingNetwork(engine.skeleton, engine.skeleton.params)
    scores = {}
    for step, batch in batches(engine.task, engine.skeleton, data, received, 1, 2):
        assert engine.skeleton.module.training
        if each == "step":  # computed for many steps in one call, of the view that the step sees
            now = net.frozen(batch.weak, received.weights).logits.softmax(-1)
            torch.testing.assert_close(batch.prepared["p"], now)
        pseudo = engine.method.terms(net, batch, received, 2).pseudo
        for row, score in zip(step.unlabelled.tolist(), pseudo.score.tolist(), strict=True):
            scores.setdefault(row, set()).add(round(score, 5))
    assert len(scores) == len(data.unlabelled)
    assert all(len(s) == 1 for s in scores.values()) == (each == "round")
    raw = net.frozen(data.unlabelled.take(), received.weights).logits.softmax(-1).amax(-1).tolist()
    assert any(abs(raw[row] - min(s)) > 1e-4 for row, s in scores.items()), "of a weak view, not of the sample itself"


# --- how the server trains --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("name", ["server-only", "semifl", "fedarpl"])
def test_the_servers_optimiser_is_torchs_new_or_kept(name, keep):
    """Full batches, so that the order of samples does not matter; clients that change nothing (τ = 1)."""
    keys = {**AT_SERVER, "data": blobs(per_class=60), "augmentation": "none", "epochs_at_server": 2, "rounds": 2}
    keys |= {"keep_server_optimiser": keep, "server_batch": 64, "momentum": 0.9, "lr": 0.05}
    keys |= {} if name == "server-only" else {"threshold": 1.0, "server_momentum": 0.0}
    _, federation = build(resolve(name, keys).with_engine(LOOP))
    network, (x, y) = copy.deepcopy(federation.engine.skeleton.module), federation.data.server.take()
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    list(federation)
    for _ in range(3):  # before the first round, and after each of two
        if not keep:
            optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
        for _ in range(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x).logits, y).backward()
            optimiser.step()
    for parameter, value in network.named_parameters():
        torch.testing.assert_close(federation.state.weights[parameter], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [0, 4, 7])
def test_the_servers_batch(batch):
    _, federation = build(
        settings_of("semifl", server_batch=batch, epochs_at_server=1, augmentation="none").with_engine(LOOP)
    )
    sizes = []
    terms = federation.method.teacher.terms
    with mock.patch.object(
        at_server, "cross_entropy", lambda net, b, *rest: sizes.append(len(b.x)) or terms(net, b, *rest)
    ):
        federation.engine.teach(federation.state, 0)
    assert sum(sizes) == 16 and max(sizes) == {0: 5, 4: 4, 7: 7}[batch] + (batch == 0)


@pytest.mark.parametrize("whose", ["server", "all"])
def test_static_statistics_of_the_server_or_of_all(whose):
    keys = {k: v for k, v in AT_SERVER.items() if k not in ("hidden", "embedding", "model")}
    keys |= {"model": "cnn", "channels": [2, 3], "embedding": 6, "norm": "static", "server_statistics": whose}
    _, federation = build(resolve("semifl", {**keys, "data": images(per_class=40), "rounds": 1}).with_engine(LOOP))
    federation.step()
    data, network = federation.data, federation.engine.skeleton.module
    parts = [data.server.take()[0]] + [c.unlabelled.take() for c in data.clients if whose == "all"]
    first = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    name = next(n for n in federation.state.weights if n.endswith("running_mean")).removesuffix(".running_mean")
    weights = {n.removeprefix("x."): v for n, v in federation.state.weights.items()}
    conv = next(n for n, m in network.named_modules() if m is first)
    out = nn.functional.conv2d(
        torch.cat(parts), weights[f"{conv}.weight"], weights.get(f"{conv}.bias"), first.stride, first.padding
    )
    torch.testing.assert_close(weights[f"{name}.running_mean"], out.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert len(torch.cat(parts)) < 250, "one pass over the data"
    torch.testing.assert_close(
        weights[f"{name}.running_var"], out.transpose(0, 1).flatten(1).var(1), rtol=1e-4, atol=1e-5
    )


# --- (FL)² ----------------------------------------------------------------------------------------------------------
def test_fl2_thresholds_equal_a_plain_loop():
    p = torch.rand(7, C, generator=torch.Generator().manual_seed(0)).softmax(-1)
    weight = torch.tensor([1.0] * 5 + [0.0] * 2)
    overall, by_class = thresholds(p, weight)
    tau = sum(max(row) for row in p[:5].tolist()) / 5
    mean = [sum(row[c] for row in p[:5].tolist()) / 5 for c in range(C)]
    assert float(overall) == pytest.approx(tau)
    assert by_class.tolist() == pytest.approx([tau * m / max(mean) for m in mean])
    assert thresholds(p[:5])[1].tolist() == pytest.approx(by_class.tolist())


def test_asam_step_by_hand():
    params = {"a.weight": torch.tensor([[3.0, -1.0]]), "a.bias": torch.tensor([5.0])}
    gradient = {"a.weight": torch.tensor([[1.0, 2.0]]), "a.bias": torch.tensor([-2.0])}
    step = losses.ascent(params, gradient, 0.1, 0.01)
    norm = math.sqrt((3.01 * 1) ** 2 + (1.01 * 2) ** 2 + 2**2)
    assert step["a.weight"].flatten().tolist() == pytest.approx([0.1 * 3.01**2 / norm, 0.1 * 1.01**2 * 2 / norm])
    assert step["a.bias"].tolist() == pytest.approx([-0.2 / norm])
    still = losses.ascent(params, {n: torch.zeros_like(g) for n, g in gradient.items()}, 0.1, 0.01)
    assert not any(v.any() for v in still.values())


def test_fl2_loss_and_gradient_equal_torch_step_by_step():
    """ASAM as an optimiser does it: up, the gradient there, back."""
    method, batch, received = FL2(threshold=0.6, radius=0.5), batch_of(), weights_of(1, 2.0)
    net = network()
    made = method.terms(net, batch, Received(weights=received), 1)
    gradient = torch.autograd.grad(sum(made.terms.values()), list(net.params.values()))
    p = probabilities(received, batch.unlabelled[:8])
    sure, label = p.max(-1)
    by_class = thresholds(p)[1]
    taken = [i for i in range(8) if float(sure[i]) >= float(by_class[label[i]])]
    surest = [i for i in range(8) if float(sure[i]) >= 0.6]
    assert 0 < len(surest) < 8 and 0 < len(taken) < 8

    model = module()
    here = model(batch.strong).logits.detach().softmax(-1)
    nn.functional.cross_entropy(model(batch.strong[surest]).logits, label[surest]).backward()
    scaled = {n: q.abs() + 0.01 if n.endswith("weight") else torch.ones_like(q) for n, q in model.named_parameters()}
    norm = torch.sqrt(sum(((scaled[n] * q.grad) ** 2).sum() for n, q in model.named_parameters()))
    up = {n: (0.5 * scaled[n] ** 2 * q.grad / norm).detach() for n, q in model.named_parameters()}
    model.zero_grad()
    with torch.no_grad():
        for n, q in model.named_parameters():
            q += up[n]
    there = model(batch.strong).logits.log_softmax(-1)
    apart = sum((here[i] * (here[i].log() - there[i])).sum() for i in surest) / 8
    apart.backward()
    with torch.no_grad():
        for n, q in model.named_parameters():
            q -= up[n]
    plain = nn.functional.cross_entropy(model(batch.strong[taken]).logits, label[taken], reduction="sum") / 8
    plain.backward()
    assert made.terms["unlabelled"].item() == pytest.approx(plain.item(), rel=1e-5)
    assert made.terms["sharpness"].item() == pytest.approx(apart.item(), rel=1e-4) and apart.item() > 1e-4
    for mine, q in zip(gradient, model.parameters(), strict=True):
        torch.testing.assert_close(mine, q.grad, rtol=1e-4, atol=1e-6)


def test_fl2_clients_count_by_what_they_do_not_know():
    method, setup = FL2(server_momentum=0.0), setup_of({"w": torch.zeros(1)})
    state = method.start(setup)

    def upload(client, value, status):
        return Upload(client, 1 + 99 * client, Bundle(weights={"w": torch.tensor([value])}, scalars={"status": status}))

    after = updated(method, state, [upload(0, 1.0, 0.4), upload(1, 5.0, 0.8)], 1, setup)
    assert after.weights["w"].tolist() == pytest.approx([(0.6 * 1 + 0.2 * 5) / 0.8])
    certain = updated(method, state, [upload(0, 1.0, 1.0), upload(1, 5.0, 1.0)], 1, setup)
    assert certain.weights["w"].tolist() == [3.0]
    logits = torch.randn(6, C, generator=torch.Generator().manual_seed(0))
    status = method.returned(Done(logits), Received(), 1).scalars["status"]
    assert status == pytest.approx(sum(float(row.softmax(-1).max()) for row in logits) / 6)


# --- FedMatch with labels at the server -----------------------------------------------------------------------------
def halves_network(method, seed=0):
    skeleton = Skeleton(Decomposed(module(seed), method.predict.halves))
    return TrainingNetwork(skeleton, skeleton.params)


def test_fedmatch_server_each_half_learns_in_its_place():
    method, net = FedMatchServer(threshold=0.3), halves_network(FedMatchServer())
    names = list(net.params)
    received = Received(weights={n: p.detach() for n, p in net.params.items()})
    made = method.terms(net, batch_of(), received, 1)
    assert set(made.terms) == {"l1", "l2", "agreement", "helpers"}
    at_client = torch.autograd.grad(
        sum(made.terms.values()), list(net.params.values()), allow_unused=True, materialize_grads=True
    )
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 3, 0])
    state = method.start(setup_of(received.weights))
    terms = method.teacher.terms(net, Batch(x, y, torch.ones(5)), state, 1)
    at_server = torch.autograd.grad(terms["ce"], list(net.params.values()), allow_unused=True, materialize_grads=True)
    for name, client, server in zip(names, at_client, at_server, strict=True):
        assert bool(client.any()) == name.startswith(PSI) and bool(server.any()) != name.startswith(PSI), name
    whole = functional_call(module(), collapsed(received.weights), (x,)).logits
    assert terms["ce"].item() == pytest.approx(10 * float(nn.functional.cross_entropy(whole, y)), rel=1e-5)
    psi = [p for n, p in net.params.items() if n.startswith(PSI)]
    assert made.terms["l1"].item() == pytest.approx(1e-5 * sum(p.abs().sum().item() for p in psi), rel=1e-5)


def test_fedmatch_server_only_psi_returns():
    """Bytes of messages really sent: σ + ψ down, ψ and the response up, and helpers' ψ in the second round."""
    _, federation = build(settings_of("fedmatch-server", participation=1.0).with_engine(LOOP))
    size = sum(v.numel() for n, v in federation.state.weights.items() if n.startswith(PSI))
    first, second = federation.step(), federation.step()
    assert first.down["weights"] == 4 * 4 * 2 * size and second.down["weights"] == 4 * 4 * (2 + 2) * size
    assert first.up["weights"] == 4 * 4 * size and first.up["scalars"] == 4 * (4 * C + 8)  # 8 bytes: how many samples
    kept = federation.engine.states[0].memory.models
    assert set(kept) == {"helper0", "helper1"} and all(n.startswith(PSI) for own in kept.values() for n in own)


def test_fedmatch_server_averages_psi_and_leaves_sigma():
    method = FedMatchServer()
    start = {"b": torch.ones(2), "a": torch.ones(2, 2), "buffer": torch.ones(1)}
    start |= {PSI + n: 0.2 * start[n] for n in ("b", "a")}
    setup = setup_of(start)
    expected = method.exchange.expected("up", {"classes": C, "dim": 5, "others": 2}, start)
    state = method.start(setup)
    uploads = []
    for client, size in ((0, 1), (2, 3)):
        psi = {PSI + "a": torch.full((2, 2), float(client)), PSI + "b": torch.tensor([client + 0.5, 7.0])}
        done = Done(weights={**start, **psi, "a": torch.full((2, 2), 99.0)})
        done.outputs = lambda: (None, Batch(torch.zeros(0, 6), torch.zeros(0), torch.zeros(0)))
        done.run = lambda x: pf.models.Output(x, torch.ones(len(x), C))
        sent = method.returned(done, Received(), 1)
        assert set(sent.weights) == set(psi)
        sent = wire.decode(wire.encode(replace(sent, scalars={"samples": float(size)})), "client", expected)
        uploads.append(Upload(client, size, sent))
    after = updated(method, state, uploads, 1, setup)
    assert after.weights[PSI + "a"].tolist() == [[1.5, 1.5]] * 2 and after.weights[PSI + "b"].tolist() == [2.0, 7.0]
    assert all(torch.equal(after.weights[n], start[n]) for n in ("a", "b", "buffer"))
    sent = method.exchange.message(after, 1, 2)
    assert set(sent.weights) == set(start)
    assert {k: set(own) for k, own in sent.models.items()} == {f"helper{k}": {PSI + "a", PSI + "b"} for k in (0, 1)}
    models = method.helper_models(Received(weights=sent.weights, models=sent.models))
    assert torch.equal(models[1]["a"], start["a"]) and models[1][PSI + "b"].tolist() == [2.5, 7.0]
    trained = Done(weights={**{n: v + 1 for n, v in start.items()}})
    own = method.teacher.learnt(after, trained, 2).weights
    assert torch.equal(own["a"], start["a"] + 1) and torch.equal(own[PSI + "a"], after.weights[PSI + "a"])


def test_fixed_input_of_clients_without_labels():
    assert fixed_input(torch.zeros(0, 6)).shape == (1, 6) and fixed_input(torch.zeros(0, 6)).any()
    tokens = fixed_input(torch.zeros(0, 9, dtype=torch.int64))
    assert tokens.shape == (1, 9) and tokens.dtype == torch.int64 and not tokens.any()
    assert FedMatch().l1 == 1e-4 and FedMatchServer().l1 == 1e-5


# --- pFedKnow -------------------------------------------------------------------------------------------------------
@given(
    values=st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=24).filter(lambda v: len(v) % 2 == 0),
    rate=st.floats(0, 0.99),
)
@pytest.mark.slow
def test_pruning_takes_the_smallest_of_what_is_left(values, rate):
    weight = torch.tensor(values).reshape(2, -1)
    after = pruned({"w": weight, "b": torch.tensor([0.1, -9.0])}, rate)
    alive = sorted(abs(v) for v in weight.flatten().tolist() if v != 0)
    left = alive[int(rate * len(alive)) :]
    assert sorted(abs(v) for v in after["w"].flatten().tolist() if v != 0) == left
    assert bool(((after["w"] == weight) | (after["w"] == 0)).all()) and after["b"].tolist() == pytest.approx(
        [0.1, -9.0]
    )


def test_pfedknow_loss_equals_a_plain_loop():
    method, batch = PFedKnow(threshold=0.8, distillation=0.6, temperature=2.0), batch_of()
    server, own = weights_of(1, 1.5), pruned(weights_of(2, 2.0), 0.3)
    neighbours = [weights_of(5, 2.0), weights_of(6, 2.0)]
    sent = {f"helper{k}": model for k, model in enumerate(neighbours)}
    received = Received(weights=server, models=sent, memory=Bundle(weights=own, scalars={"pruned": 1.0}))
    net = network()
    made = method.terms(net, batch, received, 2)
    p = probabilities(own, batch.unlabelled[:8])
    sure = [i for i in range(8) if float(p[i].max()) >= 0.8]
    assert 0 < len(sure) < 8
    params = {n: v.detach() * (own[n] != 0) if v.ndim > 1 else v.detach() for n, v in net.params.items()}
    logits = functional_call(module(), params, (batch.weak[:8],)).logits
    own_ce = cross_entropies(logits[sure], p[sure].argmax(-1))
    assert made.terms["pseudo"].item() == pytest.approx(sum(own_ce) / len(sure), rel=1e-5)

    def soft(weights):
        return (functional_call(module(), weights, (batch.weak[:8],)).logits / 2).softmax(-1)

    mean = (soft(neighbours[0]) + soft(neighbours[1])) / 2
    for term, target in (("server", soft(server)), ("neighbours", mean)):
        apart = (target * (target.log() - (logits / 2).log_softmax(-1))).sum().item()
        assert made.terms[term].item() == pytest.approx(0.6 * apart / 8, rel=1e-4), term


def test_pfedknow_takes_all_samples_where_it_is_sure_of_none():
    net, received = network(), Received(weights=weights_of(1))
    made = PFedKnow(threshold=1.0).terms(net, batch_of(), received, 1)
    assert made.pseudo.accepted.all() and made.terms["pseudo"].item() > 0 and made.terms["neighbours"].item() == 0


@pytest.mark.slow
def test_pfedknow_what_is_pruned_stays_so():
    """Every client starts from the server's model once; each of its first rounds prunes what it keeps."""
    _, federation = build(settings_of("pfedknow", prune_times=2, rounds=4, participation=1.0).with_engine(LOOP))
    densities = []
    for _ in range(4):
        before = {c: s.memory.weights for c, s in federation.engine.states.items()}
        record = federation.step()
        densities.append(record.measures["density"])
        for client, state in federation.engine.states.items():
            for name, value in state.weights.items():
                if client in before and value.ndim > 1:
                    assert not value[before[client][name] == 0].any(), name
                    assert value[before[client][name] != 0].all(), name
    assert densities[0] == 1 and densities[3] == densities[2] < densities[1] < densities[0]
    assert densities[1] == pytest.approx(0.8, abs=0.02) and densities[2] == pytest.approx(0.64, abs=0.04)
    models = [s.weights["head.weight"] for s in federation.engine.states.values()]
    assert not any(torch.equal(models[0], other) for other in models[1:])  # each has its own


def test_pfedknow_starts_from_the_server_once_and_averages_nothing():
    method = PFedKnow()
    first = method.begin(
        {"w": torch.zeros(1)}, Received(weights={"w": torch.ones(1)}, models={"helper0": {"w": torch.full((1,), 9.0)}})
    )
    assert set(first) == {"w"} and first["w"].tolist() == [1.0]
    memory = Bundle(weights={"w": torch.full((1,), 5.0)})
    assert method.begin(first, Received(weights={"w": torch.ones(1)}, memory=memory))["w"].tolist() == [5.0]
    setup = setup_of({"w": torch.ones(1)})
    uploads = [
        Upload(
            c,
            10,
            Bundle(weights={"w": torch.full((1,), float(c))}, tensors={"response": torch.full((C,), float(c * c))}),
        )
        for c in range(3)
    ]
    state = updated(method, method.start(setup), uploads, 1, setup)
    assert state.weights["w"].tolist() == [1.0]
    sent = method.exchange.message(state, 2, 2)  # the nearest by response first, never its own
    assert {n: v.tolist() for n, v in sent.weights.items()} == {"w": [1.0]}
    assert {k: own["w"].tolist() for k, own in sent.models.items()} == {"helper0": [1.0], "helper1": [0.0]}
    assert masked({"w": torch.ones(2, 2)}, {})["w"].sum() == 4
