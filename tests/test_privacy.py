"""Differential privacy: the accountant against integrals of our own, bounds that nothing escapes, noise that is there."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scipy import integrate, stats

import protofed as pf
from protofed.bank import PrototypeBank
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import selection
from protofed.models.base import Output
from protofed.parts import Batch, Mean, Running, Upload
from protofed.parts.filters import Arrival
from protofed.privacy import accountant
from protofed.privacy.mechanism import ClientPrivacy, SamplePrivacy, SphereMean
from protofed.seeds import SeededNormals, SystemNormals
from protofed.wire import Bundle, WireError
from support.departure import departure
from support.engines import ENGINES, LOOP, assert_same, finish
from support.small import SMALL, blobs, labels_for

C, D = 5, 3


def given_to(method, **changes):
    return {**SMALL, "data": blobs(), "rounds": 2, **labels_for(method), **changes}


# --- the accountant ---------------------------------------------------------------------------------------------------
def delta_by_integral(epsilon: float, noise: float, releases: int) -> float:
    """∫ max(0, p − e^ε q): what n releases, taken as one vector of independent noisy numbers, give away beyond ε.

    Only the sum of the n numbers tells the two cases apart, and it is N(n, n z²) or N(0, n z²).
    """
    deviation = noise * math.sqrt(releases)
    p, q = stats.norm(releases, deviation), stats.norm(0, deviation)
    start = noise**2 * epsilon + releases / 2  # from here on p is above e^ε q

    def excess(x: float) -> float:
        return p.pdf(x) - math.exp(epsilon + q.logpdf(x))

    value, _ = integrate.quad(excess, start, start + 40 * deviation, epsabs=0, epsrel=1e-10, limit=500)
    return value


@pytest.mark.parametrize("noise", [0.4, 0.7, 1.0, 2.0, 5.0, 30.0])
@pytest.mark.parametrize("releases", [1, 7, 100])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-7])
def test_epsilon_is_that_of_a_numerical_integral(noise, releases, delta):
    epsilon = accountant.epsilon(noise, releases, delta)
    if epsilon > 200:
        pytest.skip("e^ε leaves the range of a float")
    assert delta_by_integral(epsilon * 1.01, noise, releases) < delta * (1 + 1e-6)
    assert delta_by_integral(epsilon * 0.99, noise, releases) > delta * (1 - 1e-6)


def test_epsilon_is_that_of_an_accountant_that_composes_distributions():
    import dp_accounting

    for noise, releases in ((1.0, 4), (2.0, 30), (8.0, 100)):
        composed = dp_accounting.pld.PLDAccountant()
        composed.compose(dp_accounting.GaussianDpEvent(noise), releases)
        assert accountant.epsilon(noise, releases, 1e-5) == pytest.approx(composed.get_epsilon(1e-5), rel=0.01)


def test_calibrated_noise_spends_the_budget_and_no_more():
    for budget in (0.5, 1.0, 8.0):
        for releases in (1, 13, 200):
            noise = accountant.noise_for(budget, releases, 1e-5)
            assert budget * 0.999 < accountant.epsilon(noise, releases, 1e-5) <= budget
            assert accountant.releases_within(budget, noise, 1e-5, 1000) == releases
    assert accountant.epsilon(0.0, 3, 1e-5) == math.inf and accountant.epsilon(1.0, 0, 1e-5) == 0


# --- bounds -----------------------------------------------------------------------------------------------------------
class Trained:
    """A client whose embeddings and labels are given."""

    def __init__(self, z, y):
        self.z, self.y = torch.as_tensor(z, dtype=torch.float32), torch.as_tensor(y)

    def outputs(self):
        return Output(self.z, self.z), Batch(self.z, self.y, torch.ones(len(self.y)))


def bank_of(z, y):
    return PrototypeBank.from_embeddings(torch.as_tensor(z, dtype=torch.float32), torch.as_tensor(y), C)


numbers = st.floats(-1e6, 1e6, width=32)
samples = st.lists(st.tuples(st.lists(numbers, min_size=D, max_size=D), st.integers(0, C - 1)), min_size=1, max_size=12)


def summed(rule, contents):
    running = Running(rule)
    running.add([Upload(k, content.scalars["samples"], content) for k, content in enumerate(contents)])
    return running.total.tensors


@given(samples, st.floats(0.1, 10), st.integers(0, C))
@examples(deadline=None, max_examples=60)
def test_a_client_changes_the_sums_by_no_more_than_the_sensitivity(rows, clip, classes):
    mechanism = ClientPrivacy(clip=clip, noise=1.0, classes=classes)
    z, y = [r[0] for r in rows], [r[1] for r in rows]
    left = mechanism.leave(Bundle(bank_of(z, y), scalars={"samples": float(len(y))}), departure(Trained(z, y)))
    tensors = summed(mechanism.rule(Mean("holders")), [left])
    change = torch.cat([(tensors["means/"] / clip).flatten().double(), tensors["counts/"].double()])
    assert float(change.norm()) <= mechanism.sensitivity(C)
    assert bool((left.bank.means.double().norm(dim=-1) <= clip).all())
    assert left.scalars["samples"] == 1  # how many samples a client has does not leave it


@given(samples, st.floats(0.1, 10))
@examples(deadline=None, max_examples=60)
def test_a_sample_changes_the_sums_by_no_more_than_the_sensitivity(rows, clip):
    mechanism = SamplePrivacy(clip=clip, noise=1.0, encoder="fixed")
    totals = []
    for part in (rows, rows[1:]):
        z, y = [r[0] for r in part], [r[1] for r in part]
        z, y = np.asarray(z, dtype=np.float32).reshape(-1, D), np.asarray(y, dtype=np.int64)
        sums, counts = mechanism.contribution(bank_of(z, y), departure(Trained(z, y)))
        totals.append(torch.cat([(sums / clip).flatten(), counts]))
    assert float((totals[0] - totals[1]).norm()) <= mechanism.sensitivity(C) + 1e-9


def test_the_change_of_weights_is_bounded_and_everybody_counts_the_same():
    g = torch.Generator().manual_seed(0)
    sent = {"a": torch.randn(4, 3, generator=g), "b": torch.randn(3, generator=g)}
    for scale in (1e-3, 1.0, 1e20):
        trained = {n: v + scale * torch.randn(v.shape, generator=g) for n, v in sent.items()}
        upload = Bundle(weights=trained, scalars={"samples": 500.0})
        left = ClientPrivacy(update=0.5, noise=1.0).leave(upload, departure(weights=sent))
        change = torch.cat([(left.weights[n].double() - sent[n].double()).flatten() for n in sent])
        assert float(change.norm()) <= 0.5 * (1 + 1e-5)
        assert left.scalars["samples"] == 1
        if scale == 1e-3:
            assert all(torch.equal(left.weights[n], trained[n]) for n in sent)


@given(samples, st.floats(0.1, 10), st.integers(0, C))
@examples(deadline=None, max_examples=30)
def test_the_server_accepts_what_keeps_its_bound_and_refuses_the_rest(rows, clip, classes):
    mechanism = ClientPrivacy(clip=clip, noise=1.0, classes=classes)
    z, y = [r[0] for r in rows], [r[1] for r in rows]
    sent = {"w": torch.zeros(4)}
    upload = Bundle(bank_of(z, y), weights={"w": torch.full((4,), 3.0)}, scalars={"samples": 4.0})
    left = mechanism.leave(upload, departure(Trained(z, y), weights=sent))
    mechanism.inspect(left, "client 1", Bundle(weights=sent), Mean())
    bank = left.bank
    for lie in (
        replace(left, bank=replace(bank, counts=bank.counts * 1e9)),
        replace(left, bank=replace(bank, means=bank.means + 1e30)),
        replace(left, bank=replace(bank, counts=torch.full((C,), 2.0))),
        replace(left, weights={"w": torch.full((4,), 1e30)}),
    ):
        with pytest.raises(WireError, match=r"client 1.*exceeds the bound"):
            mechanism.inspect(lie, "client 1", Bundle(weights=sent), Mean())


# --- noise ------------------------------------------------------------------------------------------------------------
def test_noise_on_the_total_has_the_deviation_that_the_accountant_counts():
    mechanism = ClientPrivacy(clip=2.0, noise=1.5, classes=3, least=1e-9)
    bank = PrototypeBank(torch.full((400, 8), 0.1), torch.full((400,), 5.0))
    clients = [mechanism.leave(Bundle(bank, scalars={"samples": 1.0}), departure()) for _ in range(3)]
    running = Running(mechanism.rule(Mean()))
    running.add([Upload(k, 1.0, c) for k, c in enumerate(clients)])
    plain = dict(running.total.tensors)
    # a large offset keeps every class above the threshold and every mean below the clip
    offset = {"means/": plain["means/"], "counts/": plain["counts/"] + 1e4, "holders/": plain["holders/"] + 1e4}
    noisy = mechanism.total(replace(running.total, tensors=offset), Arrival(1, SeededNormals(0, "x"))).tensors
    sensitivity = math.sqrt(2 * 3)
    for key, deviation in (("means/", 1.5 * sensitivity * 2.0), ("counts/", 1.5 * sensitivity)):
        difference = (noisy[key].double() - offset[key].double()).flatten().numpy()
        assert stats.kstest(difference / deviation, "norm").pvalue > 1e-3
        assert difference.std() == pytest.approx(deviation, rel=0.1)
    assert torch.equal(noisy["holders/"], noisy["counts/"])


def test_noise_on_weights_is_added_once_to_their_sum():
    mechanism = ClientPrivacy(update=0.3, noise=2.0)
    sent = {"w": torch.zeros(5000)}
    left = mechanism.leave(Bundle(weights={"w": torch.zeros(5000)}, scalars={"samples": 9.0}), departure(weights=sent))
    running = Running(mechanism.rule(Mean("size")))
    running.add([Upload(k, left.scalars["samples"], left) for k in range(10)])
    running.total = mechanism.total(running.total, Arrival(1, SeededNormals(0, "x")))
    noise = running.result().weights["w"].double().numpy() * 10
    assert stats.kstest(noise / 0.6, "norm").pvalue > 1e-3


def test_local_noise_covers_classes_that_a_client_does_not_hold():
    """What leaves says nothing certain about which classes there are: absent and present ones overlap."""
    mechanism = ClientPrivacy(noise=2.0, placement="local", classes=1, least=0.5)
    bank = PrototypeBank(torch.eye(C)[:, :D].clone() * torch.tensor([1.0, 0, 0, 0, 0])[:, None], torch.eye(C)[0] * 7)
    sent = torch.zeros(C)
    trials = 400
    for seed in range(trials):
        sent += mechanism.leave(Bundle(bank, scalars={"samples": 7.0}), departure(seed=seed)).bank.known
    rate = stats.norm.sf((0.5 - torch.eye(C)[0].numpy()) / (2.0 * math.sqrt(2)))
    assert np.allclose(sent.numpy() / trials, rate, atol=0.09)
    assert rate[0] < math.exp(1) * rate[1]  # one release with this noise has ε below 1 for such a test


def test_without_a_server_that_sums_the_client_adds_the_noise():
    from protofed.parts import Each

    mechanism = ClientPrivacy(noise=1.0)
    bank = PrototypeBank(torch.ones(C, D), torch.full((C,), 3.0))
    upload = Bundle(bank, weights={"w": torch.zeros(3)}, scalars={"samples": 3.0})
    received = {"weights": {"w": torch.zeros(3)}}
    apart = mechanism.leave(upload, departure(rule=Each(averages=True), **received))
    summed_bank = mechanism.leave(upload, departure(rule=Mean(), **received))
    assert not torch.equal(apart.bank.counts, summed_bank.bank.counts)  # noise at the client
    assert torch.equal(apart.weights["w"], torch.zeros(3))  # these are summed, so the server adds it
    assert float(summed_bank.bank.counts.max()) <= 1


def test_system_noise_is_normal_and_never_the_same():
    draws = SystemNormals().draw(200, 50).flatten().numpy()
    assert stats.kstest(draws, "norm").pvalue > 1e-4
    assert not np.array_equal(draws, SystemNormals().draw(200, 50).flatten().numpy())


def test_a_mean_of_directions_ends_on_the_sphere():
    mechanism = ClientPrivacy(noise=0.01)
    rule = mechanism.rule(Mean("directions"))
    assert isinstance(rule, SphereMean)
    bank = PrototypeBank(torch.eye(3), torch.ones(3))
    running = Running(rule)
    running.add(
        [Upload(k, 1.0, mechanism.leave(Bundle(bank, scalars={"samples": 1.0}), departure())) for k in range(3)]
    )
    running.total = mechanism.total(running.total, Arrival(1, SeededNormals(0, "x")))
    means = running.result().bank.means
    torch.testing.assert_close(means.norm(dim=-1), torch.ones(3))


# --- runs -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedproto", "fedsap", "fedpagr", "fedavg", "fedproc", "protofssl"])
def test_without_noise_and_with_wide_bounds_a_run_is_that_of_equal_clients(method):
    wide = "client?noise=0&clip=1e6&update=1e6"
    same_weight = {"reduce": "mean?by=holders"} if method in ("fedproto", "fedavg", "fedproc") else {}
    plain, _, _ = finish(resolve(method, given_to(method, **same_weight)), LOOP)
    private, _, records = finish(resolve(method, given_to(method, privacy=wide)), LOOP)
    assert records[-1].measures["epsilon"] == math.inf
    for name, value in plain.weights.items() if method in ("fedavg", "fedproc") else ():
        torch.testing.assert_close(private.weights[name], value, rtol=1e-4, atol=1e-5)
    if method in ("fedproto", "fedsap", "fedpagr"):
        torch.testing.assert_close(private.bank.means, plain.bank.means, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["stack", "workers"])
@pytest.mark.parametrize("placement", ["central", "local"])
def test_engines_draw_the_same_noise(engine, placement):
    privacy = f"client?noise=0.05&placement={placement}"
    assert_same(resolve("fedproto", given_to("fedproto", privacy=privacy)), ENGINES[engine])


def test_epsilon_stands_in_the_record_and_the_run_ends_at_the_budget(tmp_path):
    result = pf.run(
        "fedproto", **given_to("fedproto", rounds=30, privacy="client?noise=4&epsilon=3"), out=tmp_path / "run"
    )
    rows = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    spent = [row["measures"]["epsilon"] for row in rows]
    allowed = accountant.releases_within(3.0, 4.0, 1e-5, 30)
    assert 1 < len(rows) == allowed < 30 and result.summary["rounds"] == allowed
    assert spent == [accountant.epsilon(4.0, n + 1, 1e-5) for n in range(allowed)]
    assert spent[-1] <= 3 < accountant.epsilon(4.0, allowed + 1, 1e-5)
    assert result.summary["privacy"] == {
        "epsilon": spent[-1],
        "delta": 1e-5,
        "unit": "client",
        "placement": "central",
        "noise": 4.0,
    }


def test_the_table_has_a_column_and_a_line_for_epsilon(tmp_path):
    given = given_to("fedproto", rounds=3)
    pf.compare(["fedproto", "fedproto?privacy=client?epsilon=20"], seeds=[0], jobs=1, out=tmp_path / "c", **given)
    text = (tmp_path / "c/table.md").read_text()
    assert "ε" in text and "20.00" in text and "δ = 1e-05 hides the presence of one client" in text


def test_a_budget_alone_sets_the_noise_for_all_rounds(tmp_path):
    given = given_to("fedproto", rounds=6, participation=0.5, privacy="client?epsilon=2&delta=1e-4")
    settings, federation = build(resolve("fedproto", given))
    mechanism = federation.filters[0]
    most = selection.most_often(given.get("seed", settings.general.seed), len(federation.data.clients), 0.5, 6)
    assert most <= 6 and federation.rounds == 6
    assert accountant.epsilon(mechanism.noise, most, 1e-4) == pytest.approx(2, rel=1e-3)
    counted = [0] * len(federation.data.clients)
    for record in federation:
        for client in record.participants:
            counted[client] += 1
        assert record.measures["epsilon"] == accountant.epsilon(mechanism.noise, max(counted), 1e-4)
    federation.engine.close()


def test_a_private_run_that_was_stopped_goes_on_with_the_same_noise(tmp_path):
    given = given_to("fedsap", rounds=4, checkpoint_every=2, privacy="client?epsilon=50")
    whole = pf.run("fedsap", **given, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(record, rounds):
        if record.round == 3:
            raise Stop

    with pytest.raises(Stop):
        pf.run("fedsap", **given, out=tmp_path / "stopped", watch=stop)
    resumed = pf.resume(tmp_path / "stopped", data=given["data"])
    assert resumed.summary["last_five"] == whole.summary["last_five"]


@pytest.mark.parametrize(
    ("method", "privacy", "message"),
    [
        ("fedapa", "client?epsilon=1", "placement=local"),
        ("fedtgp", "client?epsilon=1", "placement=local"),
        ("local", "client?epsilon=1", "send nothing"),
        ("fedmps", "client?epsilon=1", "by itself"),
        ("caring", "client?epsilon=1", "performance"),
        ("fedavg", "sample?epsilon=1&encoder=fixed", "prototypes alone"),
        ("fedproto", "sample?epsilon=1", "encoder=fixed"),
        ("fedproto", "client", "epsilon"),
        ("fedproto", "client?epsilon=0", "above 0"),
        ("fedproto", "client?epsilon=1&delta=2", "delta"),
        ("fedproto", "nobody?epsilon=1", "nobody"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(method, privacy, message):
    with pytest.raises(ProtofedError, match=message) as refused:
        resolve(method, given_to(method, privacy=privacy))
    assert "\n" not in str(refused.value)


def test_a_budget_that_not_even_one_round_fits_is_refused():
    with pytest.raises(ProtofedError, match=r"one round with noise=0\.5 costs more"):
        build(resolve("fedproto", given_to("fedproto", privacy="client?noise=0.5&epsilon=1")))


@pytest.mark.parametrize(
    ("method", "placement"),
    [("fedapa", "local"), ("fedtgp", "local"), ("protofssl", "local"), ("protofssl", "central")],
)
def test_methods_that_need_each_upload_run_with_noise_at_the_clients(method, placement):
    privacy = f"client?noise=10&placement={placement}"
    _, _, records = finish(resolve(method, given_to(method, privacy=privacy)), LOOP)
    assert all(math.isfinite(r.measures["epsilon"]) and not r.dropped for r in records)
