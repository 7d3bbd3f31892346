"""ProtoFSSL: its loss against plain loops, episodes, helpers, what is sent, and the bytes of the paper's Table 2."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import protofed as pf
from protofed import PrototypeBank, wire
from protofed.evaluate.cost import client_bytes
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.methods import Setup
from protofed.methods.protofssl import ModelAndHelpers, ProtoFSSL
from protofed.models.skeleton import Skeleton, TrainingNetwork
from protofed.parts import Batch, Each, Received, Reduce, Upload
from protofed.wire import Bundle
from support.engines import ENGINES, LOOP, updated
from support.small import SMALL, blobs

C, D = 4, 5
SEMI = {**SMALL, "labels": "client", "labels_per_class": 4, "shot": 16}


def network(seed=0):
    torch.manual_seed(seed)
    skeleton = Skeleton(pf.models.build("mlp", (6,), C, hidden=[7], embedding=D))
    return TrainingNetwork(skeleton, skeleton.params)


def helper_banks(seed=1):
    """Three helpers: one knows all, one lacks a class, one knows nothing."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.tensor([[1.0, 2, 3, 1], [0, 2, 1, 4], [0, 0, 0, 0]])
    return PrototypeBank(torch.randn(3, C, D, generator=g) * (counts > 0)[..., None], counts)


def episode(unlabelled=True, seed=2):
    """Classes 0 and 1 with support and queries, class 2 with support alone; the last row of each set is padding."""
    g = torch.Generator().manual_seed(seed)
    y = torch.tensor([0, 0, 0, 1, 1, 1, 2, 0])
    support = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 1])
    weight = torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 0])
    batch = Batch(torch.randn(8, 6, generator=g), y, weight, support)
    if not unlabelled:
        return batch
    return batch._replace(unlabelled=torch.randn(4, 6, generator=g), unlabelled_weight=torch.tensor([1.0, 1, 1, 0]))


# --- the loss -----------------------------------------------------------------------------------------------------------
def distance(a, b, metric):
    square = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
    return {"mean": square / len(a), "squared": square, "euclidean": math.sqrt(square)}[metric]


def probabilities(z, prototypes, metric):  # Eq. 6
    weights = {k: math.exp(-distance(z, p, metric)) for k, p in prototypes.items()}
    return {k: w / sum(weights.values()) for k, w in weights.items()}


def naive_loss(z, u, batch, helpers, method):
    """Eq. 2, 5, 6, 7 and 8, sample by sample, in plain Python."""
    rows = [k for k in range(len(z)) if batch.weight[k] > 0]
    held = [k for k in rows if batch.support[k] > 0] if method.support == "local" else []
    known = [{k: h.means[k].tolist() for k in range(C) if h.counts[k] > 0} for h in helpers]
    own = {}
    if method.support == "local":
        for k in {int(batch.y[r]) for r in held}:
            mine = [z[r] for r in held if batch.y[r] == k]
            own[k] = [sum(column) / len(mine) for column in zip(*mine, strict=True)]  # Eq. 2
    else:
        for k in range(C):
            having = [h[k] for h in known if k in h]
            if having:
                own[k] = [sum(column) / len(having) for column in zip(*having, strict=True)]
    queries = [r for r in rows if r not in held and int(batch.y[r]) in own]
    query = 0.0
    for r in queries:
        query -= math.log(probabilities(z[r], own, method.metric)[int(batch.y[r])]) / len(queries)
    total, mass, labels = 0.0, 0.0, []
    for r, sample in enumerate(u):
        voters = [probabilities(sample, h, method.metric) for h in known if h]
        mean = {k: sum(p.get(k, 0.0) for p in voters) for k in range(C)}  # Eq. 7 up to a factor
        sharp = {k: v ** (1 / method.temperature) for k, v in mean.items()}  # Eq. 5
        target = {k: v / sum(sharp.values()) for k, v in sharp.items()}
        labels.append(max(target, key=lambda k: target[k]))
        if batch.unlabelled_weight[r] > 0:
            p = probabilities(sample, own, method.metric)
            total -= sum(target[k] * math.log(p[k]) for k in own)
            mass += sum(target[k] for k in own)
    return query, method.unlabelled_weight * total / mass if u else 0.0, labels


@pytest.mark.parametrize("support", ["local", "global"])
@pytest.mark.parametrize("metric", ["mean", "squared", "euclidean"])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_loss_equals_plain_loops(support, metric, temperature):
    method = ProtoFSSL(metric=metric, temperature=temperature, support=support, unlabelled_weight=0.7)
    net, batch, helpers = network(), episode(), helper_banks()
    z = net(batch.x).embedding.tolist()
    u = net(batch.unlabelled).embedding.tolist()
    made = method.terms(net, batch, Received(banks={"helpers": helpers}), 1)
    query, unlabelled, labels = naive_loss(z, u, batch, helpers, method)
    assert set(made.terms) == {"query", "unlabelled"}
    assert float(made.terms["query"]) == pytest.approx(query, rel=1e-4)
    assert float(made.terms["unlabelled"]) == pytest.approx(unlabelled, rel=1e-4)
    assert made.pseudo.label.tolist() == labels and made.pseudo.accepted.tolist() == [1, 1, 1, 1]


def gradients(method, net, batch, helpers):
    terms = method.terms(net, batch, Received(banks={"helpers": helpers}), 1).terms
    return torch.autograd.grad(sum(terms.values()), list(net.params.values()), allow_unused=True)


def test_no_gradient_goes_through_the_target_unless_asked_for():
    net, batch, helpers = network(), episode(), helper_banks()
    u = net(batch.unlabelled).embedding
    own = PrototypeBank.from_embeddings(net(batch.x).embedding, batch.y, C, batch.weight * batch.support)
    for through in (False, True):
        seen = u if through else u.detach()
        p = torch.stack([pf.losses.distance_softmax(seen, helpers[k]) for k in range(3)]).sum(0)
        target = p**2 / (p**2).sum(-1, keepdim=True)
        loss = 0.3 * pf.losses.distance_cross_entropy(u, target, own, weight=batch.unlabelled_weight)
        expected = torch.autograd.grad(loss, net.params["encoder.1.weight"], retain_graph=True)[0]
        method = ProtoFSSL(target_gradient=through, metric="mean")
        term = method.terms(net, batch, Received(banks={"helpers": helpers}), 1).terms["unlabelled"]
        made = torch.autograd.grad(term, net.params["encoder.1.weight"])[0]
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(
        gradients(ProtoFSSL(), net, batch, helpers)[0],
        gradients(ProtoFSSL(target_gradient=True), net, batch, helpers)[0],
    )


def test_helpers_that_know_nothing_leave_the_unlabelled_samples_out():
    """The first round: nobody has sent a prototype yet."""
    nobody = PrototypeBank(torch.zeros(2, C, D), torch.zeros(2, C))
    made = ProtoFSSL().terms(network(), episode(), Received(banks={"helpers": nobody}), 1)
    assert float(made.terms["unlabelled"]) == 0 and made.pseudo.accepted.tolist() == [0, 0, 0, 0]
    assert all(torch.isfinite(g).all() for g in gradients(ProtoFSSL(), network(), episode(), nobody) if g is not None)


def test_the_head_takes_no_part_and_the_proximal_term_does():
    net, batch, helpers = network(), episode(False), helper_banks()
    there = {name: torch.zeros_like(p) for name, p in net.params.items()}
    received = Received(banks={"helpers": helpers}, weights=there)
    plain = ProtoFSSL().terms(net, batch, received, 1).terms
    assert set(plain) == {"query"}
    head = [p for name, p in net.params.items() if name.startswith("head")]
    assert torch.autograd.grad(plain["query"], head, allow_unused=True) == (None, None)
    terms = ProtoFSSL(mu=0.2).terms(net, batch, received, 1).terms
    norm = sum(float((p**2).sum()) for p in net.params.values())
    assert float(terms["prox"]) == pytest.approx(0.1 * norm, rel=1e-5) and terms["query"] == plain["query"]


# --- episodes -----------------------------------------------------------------------------------------------------------
def steps_of(method, labels, unlabelled=0, epochs=1, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return list(method.feed.steps(torch.tensor(labels), unlabelled, epochs, 8, 1, stream))


def test_an_episode_has_one_support_and_two_queries_of_each_class():
    labels = [3] * 7 + [0] * 5 + [1] * 3
    steps = steps_of(ProtoFSSL(unlabelled_queries=6), labels, unlabelled=20, epochs=10)
    assert len(steps) == 10, "a local epoch is one episode"
    for step in steps:
        y = torch.tensor(labels)[step.labelled]
        assert sorted(y.tolist()) == [0, 0, 0, 1, 1, 1, 3, 3, 3]
        assert sorted(y[step.support].tolist()) == [0, 1, 3]
        assert len(step.labelled.unique()) == 9 and len(step.unlabelled.unique()) == 6
    assert len({tuple(s.labelled.tolist()) for s in steps}) > 5
    seen = torch.cat([s.labelled[s.support] for s in steps]).unique()
    assert len(seen) > 6, "the support set is drawn anew each time"


@pytest.mark.parametrize(("has", "support", "queries"), [(1, 1, 0), (2, 1, 1), (3, 1, 2), (9, 1, 2)])
def test_a_class_with_too_few_samples_gives_what_it_has_support_first(has, support, queries):
    (step,) = steps_of(ProtoFSSL(), [2] * has + [0] * 3)
    y = torch.tensor([2] * has + [0] * 3)[step.labelled]
    assert int((y[step.support] == 2).sum()) == support and int((y[~step.support] == 2).sum()) == queries


def test_a_small_pool_is_taken_whole_and_an_empty_one_left_out():
    (step,) = steps_of(ProtoFSSL(), [0, 0, 0, 1], unlabelled=7)
    assert sorted(step.unlabelled.tolist()) == list(range(7))
    assert steps_of(ProtoFSSL(), [0, 0, 0, 1])[0].unlabelled is None
    assert steps_of(ProtoFSSL(unlabelled_queries=0), [0, 0, 0, 1], unlabelled=7)[0].unlabelled is None


def test_a_client_with_one_sample_of_a_class_trains():
    result = pf.run("protofssl", **{**SEMI, "labels_per_class": 1, "data": blobs(per_class=60), "rounds": 2})
    assert all(math.isfinite(row["loss"]) for row in result.metrics)
    assert all(row["loss"] == 0 for row in result.metrics[:1]), "no query and no helper: nothing to learn from"


# --- server -------------------------------------------------------------------------------------------------------------
SETUP = Setup(C, D, 6, {"w": torch.zeros(2)}, seed=3)


def upload(client, samples=10, value=None):
    bank = PrototypeBank(torch.full((C, D), float(client)), torch.ones(C))
    return Upload(client, samples, Bundle(bank=bank, weights={"w": torch.full((2,), float(value or 0))}))


def test_helpers_are_drawn_among_the_rounds_clients():
    method = ProtoFSSL(helpers=2)
    state = method.start(SETUP)
    assert not state.helpers.known.any() and state.helpers.means.shape == (2, C, D)
    drawn = []
    for round in range(1, 30):
        state = updated(method, state, [upload(c) for c in (0, 2, 3, 5)], round, SETUP)
        chosen = state.helpers.means[:, 0, 0].tolist()
        assert len(set(chosen)) == 2 and set(chosen) <= {0, 2, 3, 5}
        drawn += chosen
    assert set(drawn) == {0, 2, 3, 5}
    state = updated(method, state, [upload(4)], 30, SETUP)
    assert state.helpers.means[:, 0, 0].tolist() == [4], "fewer clients than helpers: all of them"


def test_helpers_change_every_so_many_rounds():
    method = ProtoFSSL(helpers=1, refresh=3)
    state, seen = method.start(SETUP), []
    for round in range(1, 8):
        state = updated(method, state, [upload(round, value=round)], round, SETUP)
        seen.append(state.helpers.means[0, 0, 0].item())
        assert state.weights["w"].tolist() == [round, round]
    assert seen == [1, 1, 1, 4, 4, 4, 7]


def test_weights_are_averaged_by_labelled_and_unlabelled_samples():
    nothing = ModelAndHelpers({}, PrototypeBank(torch.zeros(1, C, D), torch.zeros(1, C)))
    made = updated(ProtoFSSL(), nothing, [upload(0, 10, 1.0), upload(1, 30, 5.0)], 1, SETUP)
    assert made.weights["w"].tolist() == [4.0, 4.0]
    (first,), federation, _ = uploads_of()
    own = [(len(c.labelled), len(c.unlabelled)) for c in federation.data.clients]
    assert [u.client for u in first] == list(range(len(own)))
    assert [u.samples for u in first] == [n + m for n, m in own] and all(m > n for n, m in own)


@dataclass(frozen=True)
class Overheard(Each):
    """Notes what comes up, before weights are averaged and gone."""

    def lift(self, uploads, total):
        coming.extend(uploads)
        super().lift(uploads, total)


@dataclass(frozen=True)
class Watched(ProtoFSSL):
    """Keeps what came up."""

    reduce: ClassVar[Reduce] = Overheard(averages=True)

    def update(self, state, reduced, round, setup):
        assert reduced.clients == len(coming)
        came.append(list(coming))
        coming.clear()
        return super().update(state, reduced, round, setup)


came: list = []
coming: list = []
Watched.name = "watched"


def uploads_of(engine=LOOP, rounds=1, **options):
    came.clear()
    coming.clear()
    keys = {k: v for k, v in SEMI.items() if k not in ("embedding", "hidden")}
    settings = resolve(
        "protofssl", {**keys, "data": blobs(per_class=60), "rounds": rounds, "embedding": 64, "lr": 0.05}
    )
    settings = replace(settings, method=Watched(**options)).with_engine(engine)
    _, federation = build(settings)
    try:
        records = list(federation)
    finally:
        federation.engine.close()
    return list(came), federation, records


def test_noise_has_its_deviation_and_leaves_weights_alone():
    plain, noisy = uploads_of()[0][0], uploads_of(noise=0.5)[0][0]
    differences = []
    for one, other in zip(plain, noisy, strict=True):
        assert torch.equal(one.content.weights["head.weight"], other.content.weights["head.weight"])
        a, b = one.content.bank, other.content.bank
        assert torch.equal(a.counts, b.counts) and a.known.any()
        assert not b.means[~b.known].any()
        differences.append((b.means - a.means)[a.known].flatten())
    drawn = torch.cat(differences)
    assert len(drawn) >= 500
    assert abs(float(drawn.mean())) < 4 * 0.5 / math.sqrt(len(drawn))
    assert float(drawn.std()) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(2 * len(drawn)))
    assert len({round(float(d[0]), 6) for d in differences}) == len(differences), "each client draws its own"


def test_noise_is_the_same_on_every_engine_and_new_each_round():
    one, federation, _ = uploads_of(noise=0.5, rounds=2)
    other = uploads_of(ENGINES["stack"], noise=0.5, rounds=2)[0]
    plain = uploads_of(rounds=1)[0]
    for a, b in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(a.content.bank.means, b.content.bank.means, rtol=1e-4, atol=1e-4)
    first = one[0][0].content.bank.means - plain[0][0].content.bank.means
    stream = pf.seeds.torch_stream(federation.seed, "return", 0, 1)
    torch.testing.assert_close(
        first[one[0][0].content.bank.known],
        0.5 * torch.randn(C, 64, generator=stream)[one[0][0].content.bank.known],
        rtol=1e-4,
        atol=1e-5,
    )


def test_prototypes_of_too_few_samples_are_not_sent():
    data = blobs(per_class=60)
    _, federation = build(resolve("protofssl", {**SEMI, "data": data, "labels_per_class": 4}))
    for upload in uploads_of(min_samples=4)[0][0]:
        assert int(upload.content.bank.known.sum()) == int(federation.data.clients[upload.client].classes.sum())
    for upload in uploads_of(min_samples=5)[0][0]:
        assert not upload.content.bank.known.any() and upload.content.weights


# --- prediction ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("metric", ["mean", "squared", "euclidean"])
def test_prediction_is_the_largest_mean_of_the_helpers_probabilities(metric):
    method, helpers = ProtoFSSL(metric=metric), helper_banks()
    z = 2 * torch.randn(200, D, generator=torch.Generator().manual_seed(5))
    known = [{k: h.means[k].tolist() for k in range(C) if h.counts[k] > 0} for h in helpers]
    expected = []
    for sample in z.tolist():
        votes = [probabilities(sample, h, metric) for h in known if h]
        expected.append(max(range(C), key=lambda k: sum(p.get(k, 0.0) for p in votes)))
    assert method.predict.scores(z, helpers).argmax(-1).tolist() == expected
    assert len(set(expected)) == C


def test_evaluation_uses_the_latest_helpers_and_has_no_head():
    _, federation, records = uploads_of(rounds=2)
    helpers = federation.state.helpers
    assert helpers.means.shape == (5, C, 64)
    assert not any(name.endswith("_head") for name in records[-1].metrics)
    assert records[-1].metrics["accuracy"] == records[-1].metrics["accuracy_prototype"]
    skeleton = federation.engine.skeleton
    skeleton.load({**federation.engine.start, **federation.state.weights})
    right = []
    for client in federation.data.clients:
        x, y = client.test.take()
        scores = ProtoFSSL().predict.scores(skeleton.outputs(x).embedding, helpers.restricted(client.classes))
        right.append(float((scores.argmax(-1) == y).float().mean()))
    assert records[-1].metrics["accuracy"] == pytest.approx(sum(right) / len(right))


def test_before_there_are_helpers_a_clients_own_prototypes_predict():
    own = PrototypeBank(torch.eye(C, D), torch.ones(C))
    method = ProtoFSSL()
    received = method.exchange.message(method.start(SETUP), 0, 1)
    assert method.predict.bank(received, lambda: own, own.known) is own
    helped = replace(received, banks={"helpers": helper_banks()})
    assert method.predict.bank(helped, lambda: own, own.known) is helped.banks["helpers"]
    assert method.predict.scores(torch.eye(C, D), own).argmax(-1).tolist() == list(range(C))


@pytest.mark.slow
def test_it_learns_from_unlabelled_samples():
    keys = {**SEMI, "data": blobs(per_class=60), "rounds": 15, "lr": 0.003, "optimiser": "rmsprop", "momentum": 0.0}
    keys |= {"epochs": 5, "partition": "iid", "silhouette": False, "snapshots": 0, "evaluate_every": 5}
    keys = {k: v for k, v in keys.items() if k not in ("way", "shot")}
    result = pf.run("protofssl", **keys)
    assert result.accuracy_head is None and result.accuracy > 0.9
    assert result.summary["measures"]["pseudo_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("shots", 0),
        ("queries", 0),
        ("helpers", 0),
        ("refresh", 0),
        ("min_samples", 0),
        ("temperature", 0.0),
        ("unlabelled_weight", -1.0),
        ("noise", -0.1),
        ("mu", -1.0),
        ("metric", "cosine"),
        ("support", "none"),
    ],
)
def test_bad_settings_are_one_line(option, value):
    with pytest.raises(pf.ProtofedError) as error:
        resolve("protofssl", {option: value})
    assert option in str(error.value) and "\n" not in str(error.value)


# --- the paper's Table 2 ------------------------------------------------------------------------------------------------
def sent(*bundles):
    sizes = [wire.sizes(wire.encode(b)) for b in bundles]
    return sum(s["weights"] for s in sizes), sum(s["prototypes"] for s in sizes)


def empty_weights(module: nn.Module):
    return {name: torch.zeros(p.shape) for name, p in module.named_parameters()}


def test_a_round_of_protofssl_on_cifar10_is_52_6_mb():
    with torch.device("meta"):
        model = pf.models.build("resnet8", (3, 32, 32), 10)
    weights = empty_weights(model)
    method = ProtoFSSL(helpers=2)
    setup = Setup(10, 512, 5, weights, seed=0)
    bank = PrototypeBank(torch.zeros(10, 512), torch.ones(10))
    up = Bundle(bank=bank, weights=weights)
    state = updated(method, method.start(setup), [Upload(c, 540, up) for c in range(2)], 1, setup)
    of_weights, of_prototypes = sent(up, method.exchange.message(state, 0, 2))
    formula = client_bytes("protofssl", 6_563_520, helpers=2, refresh=1, classes=10, dim=512)
    assert pf.models.parameter_count(model) == 6_563_520
    assert of_weights == 2 * 4 * 6_563_520 and of_prototypes == 3 * 10 * 2048
    assert of_weights + of_prototypes == formula and round(formula / 1e6, 1) == 52.6
