"""FedAPA against a federation of plain loops, its ablations and its bytes; and the two baselines of its paper."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap
from torch.utils import _pytree as pytree

import protofed as pf
from protofed import methods, seeds, wire
from protofed.bank import PrototypeBank
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.methods import Setup, Shared
from protofed.models.base import Output
from protofed.parts import Batch, Received, Upload
from protofed.wire import Bundle
from support.engines import updated
from support.marks import slow_but
from support.small import SMALL, blobs

FAST = {"warm_up": {"start": 0, "end": 3}}  # λ reaches its maximum within a short run
TAU = 0.5


def finish(method, **changes):
    settings, federation = build(resolve(method, {**SMALL, "data": blobs(), **changes}))
    return settings, federation, list(federation)


# --- an independent FedAPA: dicts of vectors, sample by sample ----------------------------------------------------------
def average_of(protos, c, padding):
    """The mean of class c over those that hold it; None where nobody does."""
    held = [p[c] for p in protos.values() if c in p]
    if not held:
        return None
    counts = [n if padding == "size-weighted" else 1.0 for _, n in held]
    return sum(n * v for (v, _), n in zip(held, counts, strict=True)) / sum(counts)


def padded_of(protos, j, classes, padding):
    full = {c: average_of(protos, c, padding) for c in range(classes)}
    full = {c: v for c, v in full.items() if v is not None}
    return full | {c: v for c, (v, _) in protos.get(j, {}).items()}


def personal_of(protos, i, classes, padding, variant):
    """Q_i, by Eq. 5-8; the plain average for the ablations."""
    q = padded_of(protos, None, classes, padding)
    if variant != "fedapa":
        return q
    for c, (own, _) in protos.get(i, {}).items():
        peers = [p[c][0] for p in protos.values() if c in p]
        e = [math.exp(float(own @ v / (own.norm() * v.norm())) / TAU) for v in peers]
        q[c] = sum(w * v for w, v in zip(e, peers, strict=True)) / sum(e)
    return q


def contrast(z, y, protos):
    """Mean over the samples whose class has a prototype of −log softmax(cos / τ); 0 where there is none."""
    names, terms = sorted(protos), []
    for i in range(len(y)):
        if int(y[i]) in protos:
            scores = torch.stack([F.cosine_similarity(z[i], protos[c], dim=0) / TAU for c in names])
            terms.append(-F.log_softmax(scores, 0)[names.index(int(y[i]))])
    return sum(terms) / len(terms) if terms else torch.zeros(())


def naive_loss(model, x, y, q, everyone, weight):
    z, logits = model(x)
    loss = F.cross_entropy(logits, y) + weight * contrast(z, y, q)
    known = [p for p in everyone if any(int(c) in p for c in y)]
    return loss + weight * sum(contrast(z, y, p) for p in known) / max(len(known), 1)


def naive(federation, general, participants, variant, padding):
    """Every client's model and last prototypes, after the rounds in which `participants` took part."""
    data, classes = federation.data, federation.data.num_classes
    models, protos = {}, {}
    for t, chosen in enumerate(participants, start=1):
        u = min(t, 3) / 3
        weight = 0 + (1 - 0) / 2 * (1 - math.cos(math.pi * u))  # Eq. 11 with λ_min = 0, λ_max = 1
        reports = {}
        for i in chosen:
            if i not in models:
                models[i] = pf.models.build("mlp", data.sample_shape, classes, embedding=5, hidden=[7])
                models[i].load_state_dict(federation.setup.weights, strict=False)
            model = models[i]
            seen = {j: p for j, p in protos.items() if variant != "own" or j == i}
            q = personal_of(seen, i, classes, padding, variant)
            everyone = [padded_of(seen, j, classes, padding) for j in seen] if variant != "global" else []
            optimiser = torch.optim.SGD(model.parameters(), general.lr, momentum=general.momentum)
            x, y = data.clients[i].labelled.take()
            order = torch.randperm(len(y), generator=seeds.torch_stream(general.seed, "batches", i, t))
            for rows in order.split(general.batch):
                optimiser.zero_grad()
                naive_loss(model, x[rows], y[rows], q, everyone, weight).backward()
                optimiser.step()
            with torch.no_grad():
                z = model(x)[0]
            reports[i] = {int(c): (z[y == c].mean(0), float((y == c).sum())) for c in y.unique()}
        protos |= reports
    return models, protos


@pytest.mark.parametrize("participation", slow_but(0.6, [1.0, 0.6]))
@pytest.mark.parametrize(
    ("variant", "padding"),
    [("fedapa", "mean"), ("fedapa", "size-weighted"), ("global", "mean"), ("global+clients", "mean")],
)
def test_a_run_equals_plain_loops(variant, padding, participation):
    settings, federation, records = finish(
        "fedapa", **FAST, variant=variant, padding=padding, participation=participation, rounds=4, batch=7, lr=0.05
    )
    who = [r.participants for r in records]
    if participation < 1:
        assert len({len(w) for w in who}) == 1 and len(who[0]) == 3 and set(who[1]) - set(who[0])  # a newcomer later
    models, protos = naive(federation, settings.general, who, variant, padding)
    close = {"rtol": 1e-3, "atol": 2e-5}
    states = federation.engine.export()
    assert set(states) == set(models)
    for i, model in models.items():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(states[i].weights[name], value, **close)
    state = federation.state
    classes = range(federation.data.num_classes)
    for c in classes:
        expected = average_of(protos, c, padding)
        assert bool(state.average.known[c]) == (expected is not None)
        if expected is not None:
            torch.testing.assert_close(state.average.means[c], expected, **close)
    wanted = (
        {"reported"} | ({"padded"} if variant != "global" else set()) | ({"personal"} if variant == "fedapa" else set())
    )
    banks = {name: getattr(state, name) for name in ("reported", "padded", "personal")}
    assert {name for name, bank in banks.items() if bank is not None} == wanted
    for i in range(len(federation.data.clients)):
        rows = {"reported": {c: v for c, (v, _) in protos.get(i, {}).items()}}
        rows["padded"] = padded_of(protos, i, len(classes), padding) if i in protos else {}
        rows["personal"] = personal_of(protos, i, len(classes), padding, variant)
        for name in wanted:
            bank = banks[name][i]
            assert set(torch.nonzero(bank.known).flatten().tolist()) == set(rows[name]), name
            for c, v in rows[name].items():
                torch.testing.assert_close(bank.means[c], v, **close)


def test_the_first_round_is_cross_entropy_alone_and_the_terms_then_grow():
    _, _, records = finish("fedapa", **FAST, rounds=3)
    assert records[0].terms["global"] == records[0].terms["clients"] == 0
    assert all(r.terms["global"] > 0 and r.terms["clients"] > 0 for r in records[1:])
    _, _, records = finish("fedapa", **FAST, rounds=2, variant="global")
    assert set(records[1].terms) == {"ce", "global"} and records[1].terms["global"] > 0


def test_warm_up_is_equation_11():
    warm = methods.get("fedapa").warm_up
    for t in range(1, 121):
        u = min(t, 50) / 50
        assert warm(t) == pytest.approx(0.0 + (1.0 - 0.0) / 2 * (1 - math.cos(math.pi * u)), abs=1e-12)
    assert warm(25) == pytest.approx(0.5) and warm(50) == warm(500) == 1.0


# --- what travels -----------------------------------------------------------------------------------------------------
def full_uploads(n, c, d, held=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    held = torch.ones(n, c) if held is None else held
    means = torch.randn(n, c, d, generator=g) * held[..., None]
    return [Upload(i, 10, Bundle(bank=PrototypeBank(means[i], held[i] * (i + 2)))) for i in range(n)]


def after(method, uploads, n, c, d):
    setup = Setup(c, d, n, {}, 0)
    return updated(method, method.start(setup), uploads, 1, setup), setup


@pytest.mark.parametrize(
    ("variant", "size"),
    [("fedapa", 150_528), ("global+clients", 150_528), ("global", 2 * 4 * 256 * 21)],
)
def test_table_5_bytes_of_a_client_and_round(variant, size):
    """4 B · d · C · (N + 1) for d 256, C 21, N 6: the paper's 150.53 KB."""
    method = methods.get("fedapa", variant=variant)
    uploads = full_uploads(6, 21, 256)
    state, _ = after(method, uploads, 6, 21, 256)
    for client in range(6):
        up, down = (wire.encode(b) for b in (uploads[client].content, method.exchange.message(state, client, 2)))
        assert wire.sizes(up)["prototypes"] + wire.sizes(down)["prototypes"] == size
        assert wire.sizes(down)["weights"] == 0
        expected = method.exchange.expected("down", {"classes": 21, "dim": 256, "clients": 6}, {})
        wire.decode(down, expected=expected)  # of the shapes it says


def test_table_5_bytes_of_fedavg():
    """LargeConvNet4 has 463,748 parameters; up and down they are the paper's 3,710 KB."""
    channels = [1, 16, 32, 64, 128, 256]
    layers: list[nn.Module] = []
    for before, behind in pairwise(channels):
        layers += [nn.Conv2d(before, behind, 3, 2, 1, bias=False), nn.BatchNorm2d(behind)]
    model = nn.Sequential(*layers, nn.Conv2d(256, 256, 1), nn.Linear(256, 20))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    method = methods.get("fedavg")
    state = method.start(Setup(20, 256, 6, weights, 0))
    down, up = (
        wire.sizes(wire.encode(method.exchange.message(state, 0, 1))),
        wire.sizes(wire.encode(Bundle(weights=weights))),
    )
    assert down["weights"] + up["weights"] == 2 * 4 * 463_748 == 3_709_984


def test_bytes_of_a_run():
    """Padded banks travel whole; up goes what a client holds."""
    _, federation, records = finish("fedapa", **FAST, rounds=2)
    held = [len(c.labelled.labels.unique()) for c in federation.data.clients]
    known = len(torch.cat([c.labelled.labels for c in federation.data.clients]).unique())
    assert records[0].down["prototypes"] == 0
    assert records[1].up["prototypes"] == 4 * 5 * sum(held)
    assert records[1].down["prototypes"] == 5 * (4 * 5 * known * 5)  # Q_i and four peers, five clients
    _, _, records = finish("fedapa", **FAST, rounds=2, variant="global")
    assert records[1].down["prototypes"] == 5 * (4 * 5 * known)


def test_what_is_shared_is_encoded_once_and_counted_for_each():
    """In one process nothing of the stack is copied; a site elsewhere is sent the whole message."""
    _, federation, _ = finish("fedapa", **FAST, rounds=2)
    clients = range(len(federation.data.clients))
    downloads, down = federation.downloads(clients, 3)
    assert downloads.common is not None and len(downloads.messages) == 1 + len(clients)
    whole = {c: federation.exchange.message(federation.state, c, 3) for c in clients}
    places = set()
    for c in clients:
        assert not whole[c].banks["peers"].known[c].any()
        assert whole[c].banks["peers"].means is federation.state.padded.means
        assert downloads[c] == wire.encode(whole[c])
        assert wire.sizes(downloads[c]) == wire.encoded_sizes(whole[c])
        here = federation.engine.inner.message(downloads, c) if hasattr(federation.engine, "inner") else None
        here = federation.engine.message(downloads, c) if here is None else here
        assert torch.equal(here.banks["peers"].known, whole[c].banks["peers"].known)
        assert torch.equal(here.bank.means, whole[c].bank.means)
        places.add(here.banks["peers"].means.data_ptr())
    assert len(places) == 1
    assert down == sum((wire.sizes(downloads[c]) for c in clients), start=Counter())


# --- partial participation --------------------------------------------------------------------------------------------
class Plain:
    """A network that gives its input as the embedding."""

    params: dict = {}

    def __call__(self, x, params=None):
        return Output(x, torch.zeros(len(x), 3))


def batch_of(n=6, d=4, c=3, seed=5):
    g = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(n, d, generator=g), torch.arange(n) % c, torch.ones(n))


def test_who_never_reported_is_sent_the_average_and_is_no_peer():
    method = methods.get("fedapa")
    held = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1]])
    uploads = full_uploads(4, 3, 4, held)[:2]  # clients 2 and 3 stay silent
    state, setup = after(method, uploads, 4, 3, 4)
    sent = method.exchange.message(state, 3, 2)
    torch.testing.assert_close(sent.bank.means, state.average.means)
    assert sent.bank.known.all()
    assert sent.banks["peers"].known.tolist() == [[True] * 3, [True] * 3, [False] * 3, [False] * 3]
    batch = batch_of()
    newcomer = method.terms(Plain(), batch, Received(bank=sent.bank, banks=sent.banks), 50)
    peers = [sent.banks["peers"][j] for j in range(2)]
    alone = sum(contrast(batch.x, batch.y, dict(enumerate(p.means))) for p in peers) / 2
    torch.testing.assert_close(newcomer["clients"], alone)
    # one that did report counts itself among the clients
    sent, own = method.exchange.message(state, 0, 2), uploads[0].content
    terms = method.terms(Plain(), batch, Received(bank=sent.bank, banks=sent.banks, memory=own), 50)
    both = [state.padded[j].means for j in range(2)]
    torch.testing.assert_close(terms["clients"], sum(contrast(batch.x, batch.y, dict(enumerate(p))) for p in both) / 2)
    # who does not take part keeps what it said last
    later = updated(method, state, [uploads[1]._replace(content=uploads[0].content)], 2, setup)
    clients = later.clients
    assert torch.equal(clients.means[0], own.bank.means) and torch.equal(clients.means[1], own.bank.means)
    assert clients.known.any(-1).tolist() == [True, True, False, False]


def test_a_federation_of_one():
    method = methods.get("fedapa")
    uploads = full_uploads(1, 3, 4)
    state, _ = after(method, uploads, 1, 3, 4)
    sent = wire.decode(wire.encode(method.exchange.message(state, 0, 2)))
    assert not sent.banks["peers"].known.any()
    torch.testing.assert_close(sent.bank.means, uploads[0].content.bank.means)  # alone, Q is P
    batch = batch_of()
    terms = method.terms(Plain(), batch, Received(bank=sent.bank, banks=sent.banks, memory=uploads[0].content), 50)
    torch.testing.assert_close(terms["clients"], terms["global"])
    terms = method.terms(Plain(), batch, Received(bank=sent.bank, banks=sent.banks), 50)
    assert terms["clients"] == 0 and terms["global"] > 0


def test_counts_of_another_precision_are_taken():
    method = methods.get("fedapa")
    uploads = full_uploads(2, 3, 4)
    bank = uploads[0].content.bank
    wide = uploads[0]._replace(content=Bundle(bank=PrototypeBank(bank.means, bank.counts.double())))
    (mixed, _), (same, _) = (after(method, u, 2, 3, 4) for u in ([wide, uploads[1]], uploads))
    assert torch.equal(mixed.personal.means, same.personal.means)
    assert mixed.reported.counts.dtype == torch.float32


@pytest.mark.parametrize("variant", ["fedapa", "global", "global+clients"])
def test_the_loss_runs_for_a_stack_of_clients(variant):
    method = methods.get("fedapa", variant=variant)
    held = (torch.rand(4, 3, generator=torch.Generator().manual_seed(1)) < 0.6).float()
    held[:, 0] = 1
    uploads = full_uploads(4, 3, 4, held)
    state, _ = after(method, uploads, 4, 3, 4)
    has = []
    for u in uploads:
        sent = method.exchange.message(state, u.client, 2)
        has.append(Received(bank=sent.bank, banks=sent.banks, memory=u.content))
    batches = [batch_of(seed=s) for s in range(4)]
    stacked = pytree.tree_map(lambda *t: torch.stack(t), *has)
    x, y, w = (torch.stack([b[k] for b in batches]) for k in range(3))
    together = vmap(lambda x, y, w, r: method.terms(Plain(), Batch(x, y, w), r, 20))(x, y, w, stacked)
    for i in range(4):
        for name, value in method.terms(Plain(), batches[i], has[i], 20).items():
            torch.testing.assert_close(together[name][i], value)


def test_evaluation_uses_the_clients_own_prototypes_first():
    method = methods.get("fedapa")
    held = torch.ones(3, 3)
    held[0, 1] = 0  # client 0 has no sample of class 1
    state, _ = after(method, full_uploads(3, 3, 4, held), 3, 3, 4)
    own = PrototypeBank(torch.full((3, 4), 9.0), torch.tensor([2.0, 0.0, 1.0]))
    bank = method.predict.bank(method.exchange.message(state, 0, 2), lambda: own, own.known)
    assert bank.means[0].eq(9).all() and bank.means[2].eq(9).all()
    torch.testing.assert_close(bank.means[1], state.average.means[1])
    assert bank.known.all()


def test_similar_clients_weigh_more():
    """Two pairs of alike clients: Q lies nearer to the pair's mean than the plain average does."""
    means = torch.tensor([[[1.0, 0.0]], [[0.9, 0.1]], [[0.0, 1.0]], [[0.1, 0.9]]])
    uploads = [Upload(i, 1, Bundle(bank=PrototypeBank(m, torch.ones(1)))) for i, m in enumerate(means)]
    sharp, _ = after(methods.get("fedapa", temperature=0.1), uploads, 4, 1, 2)
    mild, _ = after(methods.get("fedapa"), uploads, 4, 1, 2)
    pair = torch.tensor([0.95, 0.05])
    gaps = [float((b - pair).norm()) for b in (sharp.personal.means[0, 0], mild.personal.means[0, 0])]
    assert gaps[0] < 0.01 < gaps[1] < float((mild.average.means[0] - pair).norm())


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("fedapa", {"temperature": 0}, "temperature"),
        ("fedapa", {"variant": "best"}, "variant"),
        ("fedapa", {"padding": "median"}, "padding"),
        ("fedapa", {"warm_up": {"shape": "cosine", "start": 5, "end": 1, "maximum": 1.0}}, "end=1"),
        ("wifederated", {"fine_tune": -1}, "fine_tune"),
        ("caring", {"low": 0}, "low"),
        ("caring", {"low": 2.0}, "low"),
    ],
)
def test_bad_settings_are_named(name, options, word):
    with pytest.raises(ProtofedError, match=word):
        methods.get(name, **options)


# --- WiFederated and CARING -------------------------------------------------------------------------------------------
def test_wifederated_trains_as_fedavg_and_tunes_before_it_is_evaluated():
    assert methods.get("wifederated").predict.tuning == 5
    assert methods.get("wifederated", fine_tune=2).predict.tuning == 2
    assert methods.get("fedavg").predict.tuning == 0
    _, plain, _ = finish("fedavg")
    _, tuned, _ = finish("wifederated", fine_tune=1)
    for name, value in plain.state.weights.items():
        assert torch.equal(tuned.state.weights[name], value)


class Done:
    """A trained client with fixed outputs."""

    weights = {"w": torch.ones(2)}

    def outputs(self):
        logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 0.0], [9.0, 0.0]])
        return Output(logits, logits), Batch(logits, torch.tensor([0, 1, 1, 1]), torch.tensor([1.0, 1.0, 1.0, 0.0]))


def upload(client, performance, value, samples=10):
    return Upload(client, samples, Bundle(weights={"w": torch.tensor(value)}, scalars={"performance": performance}))


def test_caring_weighs_by_two_values():
    method = methods.get("caring")
    returned = method.returned(Done(), Received(), 1)
    assert returned.scalars["performance"] == pytest.approx(2 / 3)  # the padding sample does not count
    uploads = [upload(0, 0.9, 1.0, 1), upload(1, 0.5, 2.0, 1000), upload(2, 0.7, 6.0)]
    assert method.shares(uploads) == [1.0, 0.3, 1.0]  # the mean is 0.7
    state = updated(method, Shared(weights={"w": torch.zeros(())}), uploads, 1, Setup(2, 1, 1, {}, 0))
    assert float(state.weights["w"]) == pytest.approx((1 * 1 + 0.3 * 2 + 1 * 6) / 2.3, rel=1e-6)
    alike = [upload(i, 0.1, float(i)) for i in range(3)]
    assert method.shares(alike) == [1.0] * 3
    state = updated(method, Shared(weights={"w": torch.zeros(())}), alike, 1, Setup(2, 1, 1, {}, 0))
    assert float(state.weights["w"]) == pytest.approx(1.0)
    assert methods.get("caring", low=0.5, high=2.0).shares(uploads) == [2.0, 0.5, 2.0]


def test_caring_in_a_run():
    """Its models' mean by its own rule, from what clients returned; and an upload without performance is refused."""
    _, federation, records = finish("caring", rounds=3)
    assert all(not r.dropped and r.up["weights"] == r.down["weights"] > 0 for r in records)
    _, plain, _ = finish("fedavg", rounds=3)
    names = list(plain.state.weights)
    assert not all(torch.allclose(federation.state.weights[n], plain.state.weights[n]) for n in names)
    method = methods.get("caring")
    expected = method.exchange.expected("up", {"classes": 2, "dim": 1, "clients": 5}, {"w": torch.zeros(2)})
    good = Bundle(weights={"w": torch.ones(2)}, scalars={"samples": 4.0, "performance": 0.5})
    wire.decode(wire.encode(good), "client 3", expected)
    with pytest.raises(wire.WireError, match="client 3: sent no performance"):
        wire.decode(wire.encode(replace(good, scalars={"samples": 4.0})), "client 3", expected)


# --- the control, and what the theory speaks of ---------------------------------------------------------------------------
@pytest.mark.parametrize("engine", ["loop", "stack"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_the_control_is_fedapa_in_a_federation_of_one(engine, participation):
    """With nothing exchanged a client contrasts with its own prototypes, twice: as Q_i and as all of P."""
    settings, federation, records = finish(
        "fedapa", **FAST, control="own", participation=participation, rounds=4, batch=7, lr=0.05, engine=engine
    )
    models, _ = naive(federation, settings.general, [r.participants for r in records], "own", "mean")
    states = federation.engine.export()
    for i, model in models.items():
        for name, value in model.state_dict().items():
            torch.testing.assert_close(states[i].weights[name], value, rtol=1e-3, atol=2e-5)
    assert not any(sum((r.up + r.down).values()) for r in records)


def test_movement_and_gradients_are_recorded():
    _, _, records = finish("fedapa", **FAST, rounds=3, gradients=True, batch=1000, momentum=0.0, lr=0.1)
    assert "client_movement" not in records[0].measures and records[0].measures["gradient_norm"] > 0
    assert records[2].measures["personal_movement"] > 0 and records[2].measures["client_movement"] > 0
    banks = []
    for rounds in (2, 3):
        _, part, _ = finish("fedapa", **FAST, rounds=rounds, batch=1000, momentum=0.0, lr=0.1)
        banks.append(part.state.reported)
    both = banks[0].known & banks[1].known
    naive = [float((banks[1].means[i, c] - banks[0].means[i, c]).norm()) for i, c in both.nonzero().tolist()]
    assert records[2].measures["client_movement"] == pytest.approx(sum(naive) / len(naive), rel=1e-4)
    plain = finish("fedapa", **FAST, rounds=3)[2]
    assert "gradient_norm" not in plain[0].measures


@pytest.mark.parametrize("engine", ["loop", "stack", "workers"])
def test_gradient_norms_are_those_of_the_steps(engine):
    """One step of plain SGD a round: the update is the gradient times the learning rate."""
    given = {"batch": 1000, "momentum": 0.0, "lr": 0.1, "rounds": 1, "gradients": True}
    _, federation, [record] = finish("local", engine=engine, **given)
    norms = []
    for state in federation.engine.export().values():
        start = federation.setup.weights
        change = [(state.weights[k] - start[k]).flatten() / 0.1 for k in start]
        norms.append(float(torch.cat(change).norm()))
    assert record.measures["gradient_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-4)
