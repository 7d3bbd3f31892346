"""FedSAP's unlabelled phase: which pseudo-labels are taken, mixed prototypes, thresholds, start_from, open pools."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import protofed as pf
from protofed import PrototypeBank
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.methods.fedsap import FedSAP
from protofed.models.base import Output
from protofed.parts import Batch, Received
from protofed.parts.unlabelled import nearest
from protofed.wire import Bundle
from support.small import SMALL, blobs

C, D = 4, 5
SEMI = {**SMALL, "labels": "client", "labels_per_class": 4, "shot": 16, "lr": 0.05, "silhouette": False, "snapshots": 0}


def bank(seed=0, known=(1.0, 2, 0, 3)):
    counts = torch.tensor(known)
    means = torch.randn(C, D, generator=torch.Generator().manual_seed(seed)) * (counts > 0)[:, None]
    return PrototypeBank(means, counts)


def embeddings(n=30, seed=1):
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed))


def cosine_distance(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return 1 - dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def holding(protos, margin=None, distance=None):
    limits = {} if margin is None else {"margin": torch.tensor(margin), "distance": torch.tensor(distance)}
    return Received(bank=protos, memory=Bundle(tensors=limits))


# --- Eq. 10 and 11 ------------------------------------------------------------------------------------------------------
def test_nearest_equals_a_loop():
    protos, z = bank(), embeddings()
    found = nearest(z, protos)
    for k, sample in enumerate(z.tolist()):
        each = {c: cosine_distance(sample, protos.means[c].tolist()) for c in (0, 1, 3)}
        first, second = sorted(each, key=lambda c: each[c])[:2]
        assert int(found.label[k]) == first
        assert float(found.distance[k]) == pytest.approx(each[first], abs=1e-5)
        assert float(found.margin[k]) == pytest.approx(each[second] - each[first], abs=1e-5)


def test_a_sample_is_accepted_when_its_margin_is_large_and_its_prototype_near():
    found, method = nearest(embeddings(200), bank()), FedSAP()
    accepted, score = method.unlabelled.acceptance(found, holding(bank(), 0.3, 0.5))
    kinds = set()
    for k in range(200):
        clear, near = float(found.margin[k]) > 0.3, float(found.distance[k]) < 0.5
        kinds.add((clear, near))
        assert bool(accepted[k]) == (clear and near)
        assert float(score[k]) == pytest.approx(
            min(float(found.margin[k]) - 0.3, 0.5 - float(found.distance[k])), abs=1e-6
        )
    assert len(kinds) == 4, "each of the two conditions decides for some samples"
    nothing, _ = method.unlabelled.acceptance(found, holding(bank()))
    assert not nothing.any(), "without thresholds no label is taken"


def test_a_bank_of_one_class_has_an_endless_margin_and_distance_decides():
    alone = bank(known=(1.0, 0, 0, 0))
    found = nearest(embeddings(50), alone)
    assert found.label.unique().tolist() == [0] and torch.isinf(found.margin).all()
    accepted, score = FedSAP().unlabelled.acceptance(found, holding(alone, 0.3, 0.8))
    assert accepted.tolist() == [float(d < 0.8) for d in found.distance] and 0 < accepted.sum() < 50
    assert torch.isfinite(score).all()


# --- Eq. 12 and 13 ------------------------------------------------------------------------------------------------------
class Identity:
    """A network whose embedding is the sample itself."""

    params: dict = {}

    def __call__(self, x, params=None):
        return Output(x, x[:, :C])


def test_the_consistency_term_equals_a_loop():
    g = torch.Generator().manual_seed(3)
    protos, weak, strong = bank(), embeddings(20, 4), torch.randn(20, D, generator=g)
    weight = torch.tensor([1.0] * 19 + [0.0])
    y = torch.tensor([0, 1, 3])
    batch = Batch(embeddings(3), y, torch.ones(3), None, weak, weak, strong, weight)
    received = holding(protos, 0.2, 0.7)
    terms, pseudo = FedSAP(consistency=0.6).terms(Identity(), batch, received, 101)
    distances = [
        cosine_distance(strong[k].tolist(), protos.means[int(pseudo.label[k])].tolist())
        for k in range(19)
        if pseudo.accepted[k]
    ]
    assert 2 < len(distances) < 19
    assert float(terms["consistency"]) == pytest.approx(0.6 * sum(distances) / len(distances), rel=1e-4)
    assert set(terms) == {"ce", "align", "proxy", "consistency"}
    nobody, _ = FedSAP().terms(Identity(), batch, holding(protos), 101)
    assert float(nobody["consistency"]) == 0, "nothing accepted, nothing added"


# --- Eq. 14 and the thresholds ------------------------------------------------------------------------------------------
class Trained:
    """A client after training whose embeddings are given."""

    weights: dict = {}

    def __init__(self, labelled, y, weak, strong):
        self.views = {"weak": weak, "strong": strong}
        self.labelled = Output(labelled, labelled[:, :C]), Batch(labelled, y, torch.ones(len(y)))
        self.num_unlabelled = len(weak)

    def outputs(self):
        return self.labelled

    def unlabelled(self, view="none"):
        return Output(self.views[view], self.views[view][:, :C])

    def bank(self):
        output, batch = self.labelled
        return PrototypeBank.from_embeddings(output.embedding, batch.y, C)


def client(n=12, m=40, held=(0, 1, 3)):
    y = torch.tensor(list(held) * (n // len(held)))
    return Trained(embeddings(n, 5), y, embeddings(m, 6), embeddings(m, 7))


@pytest.mark.parametrize("returned_classes", ["own", "all"])
@pytest.mark.parametrize("normalise", [True, False])
def test_mixed_prototypes_by_hand(returned_classes, normalise):
    trained, received = client(held=[0, 1]), holding(bank(), 0.2, 0.7)
    method = FedSAP(supervised_rounds=3, mix=0.5, returned_classes=returned_classes, normalise=normalise)
    made = method.returned(trained, received, 4).bank
    found = nearest(trained.unlabelled("weak").embedding, bank())
    accepted, _ = method.unlabelled.acceptance(found, received)
    (z, _), batch = trained.outputs()
    mixed_in = without_labels = 0
    for c in range(C):
        own = [z[k].tolist() for k in range(len(z)) if batch.y[k] == c]
        more = [trained.views["strong"][k].tolist() for k in range(40) if accepted[k] and int(found.label[k]) == c]
        mixed_in += len(more)
        if not own and (returned_classes == "own" or not more):
            assert not made.known[c]
            without_labels += len(more)
            continue
        total = len(own) + 0.5 * len(more)
        mean = [(sum(r[d] for r in own) + 0.5 * sum(r[d] for r in more)) / total for d in range(D)]
        norm = math.sqrt(sum(v * v for v in mean)) if normalise else 1.0
        assert made.means[c].tolist() == pytest.approx([v / norm for v in mean], rel=1e-4, abs=1e-5)
        assert float(made.counts[c]) == pytest.approx(total)
    assert mixed_in > 3 and (without_labels > 0) == (returned_classes == "own")
    plain = method.returned(trained, received, 3).bank
    assert torch.equal(plain.means, trained.bank().means), "in the supervised phase: the plain means"


def test_thresholds_are_quantiles_of_the_labelled_samples():
    trained, method = client(30), FedSAP(supervised_rounds=3, margin_quantile=0.25, distance_quantile=0.9)
    kept = method.remember(trained, holding(bank()), 3).tensors
    (z, _), batch = trained.outputs()
    margins, own = [], []
    for sample, c in zip(z.tolist(), batch.y.tolist(), strict=True):
        each = {k: cosine_distance(sample, bank().means[k].tolist()) for k in (0, 1, 3)}
        first, second = sorted(each.values())[:2]
        margins.append(second - first)
        own.append(each[c])
    assert float(kept["margin"]) == pytest.approx(np.quantile(margins, 0.25), abs=1e-5)
    assert float(kept["distance"]) == pytest.approx(np.quantile(own, 0.9), abs=1e-5)


def test_thresholds_stay_as_they_were_at_the_end_of_the_supervised_phase():
    method, trained = FedSAP(supervised_rounds=3), client()
    before = holding(bank(), 0.11, 0.22)
    assert method.remember(trained, before, 4) is before.memory
    assert method.remember(trained, before, 3) is not before.memory
    late = method.remember(trained, holding(bank()), 9)
    assert set(late.tensors) == {"margin", "distance", "classes"}, (
        "a client that comes late calibrates in its first round"
    )
    unknown = holding(bank(known=(0.0, 0, 1, 0)))
    assert method.remember(trained, unknown, 3).empty, "no prototype of its classes: nothing to calibrate by"
    assert method.remember(Trained(embeddings(6), torch.zeros(6).long(), *[embeddings(0)] * 2), before, 3) is (
        before.memory
    )


def test_the_phase_begins_after_the_supervised_rounds():
    method = FedSAP(supervised_rounds=3)
    for round, there in ((1, False), (3, False), (4, True)):
        steps = list(method.feed.steps(torch.zeros(6).long(), 10, 1, 4, round, torch.Generator().manual_seed(0)))
        assert all((s.unlabelled is not None) == there for s in steps)


# --- whole runs ---------------------------------------------------------------------------------------------------------
PHASES = {**SEMI, "rounds": 6, "supervised_rounds": 3, "alignment": {"start": 0, "end": 3}}


def rows(folder, name="rounds.jsonl"):
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("phases")
    data = blobs(per_class=60)
    whole = pf.run("fedsap", out=place / "whole", **{**PHASES, "data": data})
    pf.run("fedsap", out=place / "first", **{**PHASES, "data": data, "rounds": 3})
    return place, data, whole


def test_a_run_records_its_pseudo_labels_once_they_are_used(phases):
    place, _, whole = phases
    recorded = rows(place / "whole")
    assert all("measures" not in row and "consistency" not in row["terms"] for row in recorded[:3])
    for row in recorded[3:]:
        assert set(row["measures"]) == {"acceptance", "pseudo_accuracy"} and row["terms"]["consistency"] > 0
    assert 0 < whole.summary["measures"]["acceptance"] < 1 and whole.summary["measures"]["pseudo_accuracy"] > 0.7


def test_start_from_continues_and_equals_one_run_of_both_phases(phases):
    place, data, whole = phases
    second = pf.run("fedsap", out=place / "second", start_from=str(place / "first"), **{**PHASES, "data": data})
    assert rows(place / "first") + rows(place / "second") == rows(place / "whole")
    assert rows(place / "second", "metrics.jsonl") == rows(place / "whole", "metrics.jsonl")[3:]
    one, other = (place / name / "checkpoint" / "round-000006" for name in ("whole", "second"))
    files = ("state.json", "server.safetensors", "clients.safetensors")
    assert [(one / name).read_bytes() for name in files] == [(other / name).read_bytes() for name in files]
    assert second.summary["rounds"] == 6 and [row["round"] for row in second.metrics] == [4, 5, 6]
    assert second.summary["last_round"] == whole.summary["last_round"]


@pytest.mark.parametrize("cut", [4, 5])
def test_a_run_that_starts_from_another_resumes(cut, phases, tmp_path):
    """Also where it was stopped before its first checkpoint."""
    place, data, _ = phases

    def stop(record, rounds):
        if record.round == cut:
            raise KeyboardInterrupt

    keys = {**PHASES, "data": data, "start_from": str(place / "first"), "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        pf.run("fedsap", out=tmp_path / "cut", watch=stop, **keys)
    pf.resume(tmp_path / "cut", data=data)
    assert rows(tmp_path / "cut") == rows(place / "whole")[3:]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"seed": 7}, "its seed is 1234, here it is 7"),
        ({"clients": 4}, "its clients is 5, here it is 4"),
        ({"way": 1}, "its partition is"),
        ({"test": "local"}, "its test is 'central'"),
        ({"rounds": 3}, "rounds=3 leaves none to run"),
        ({"embedding": 6}, "does not fit"),
    ],
)
def test_what_start_from_refuses(changes, says, phases):
    place, data, _ = phases
    with pytest.raises(pf.ProtofedError) as error:
        pf.run("fedsap", **{**PHASES, "data": data, "start_from": str(place / "first"), **changes})
    assert says in str(error.value) and "first" in str(error.value) and "\n" not in str(error.value)


def test_start_from_another_method_or_a_folder_that_is_none(phases, tmp_path):
    place, data, _ = phases
    with pytest.raises(pf.ProtofedError, match="a run of fedsap; fedproto cannot go on from it"):
        pf.run("fedproto", **{**SEMI, "data": data, "rounds": 6, "start_from": str(place / "first")})
    with pytest.raises(pf.ProtofedError, match="no such run folder"):
        pf.run("fedsap", **{**PHASES, "data": data, "start_from": str(tmp_path / "nowhere")})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "settings.toml").write_text((place / "first" / "settings.toml").read_text())
    with pytest.raises(pf.ProtofedError, match="it has no checkpoint"):
        pf.run("fedsap", **{**PHASES, "data": data, "start_from": str(tmp_path / "empty")})


def test_without_unlabelled_samples_more_rounds_are_more_of_the_same(tmp_path):
    keys = {**SMALL, "data": blobs(), "rounds": 4, "alignment": {"start": 0, "end": 3}}
    one = pf.run("fedsap", supervised_rounds=2, **keys)
    other = pf.run("fedsap", supervised_rounds=100, **keys)
    assert [r["loss"] for r in one.metrics] == [r["loss"] for r in other.metrics] and "measures" not in one.summary


# --- open pools ---------------------------------------------------------------------------------------------------------
def test_open_pools_measure_how_foreign_samples_are_kept_out():
    keys = {**PHASES, "data": blobs(per_class=90), "unlabelled": "open", "open_share": 0.4, "rounds": 5}
    _, federation = build(resolve("fedsap", keys))
    foreign = total = 0
    for own, truth in zip(federation.data.clients, federation.data.held_back, strict=True):
        foreign, total = foreign + int((~own.classes[truth]).sum()), total + len(truth)
    assert 0 < foreign / total <= 0.4
    records = list(federation)
    names = {"acceptance", "pseudo_accuracy", "acceptance_known", "acceptance_unknown", "rejection_auroc"}
    last = records[-1].measures
    assert set(last) == names and all(0 <= value <= 1 for value in last.values())
    weighted = (foreign * last["acceptance_unknown"] + (total - foreign) * last["acceptance_known"]) / total
    assert last["acceptance"] == pytest.approx(weighted, abs=1e-6), "each sample is seen once in an epoch"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("supervised_rounds", 0),
        ("mix", -1.0),
        ("consistency", -1.0),
        ("margin_quantile", 1.5),
        ("distance_quantile", -0.1),
    ],
)
def test_bad_settings_are_one_line(option, value):
    with pytest.raises(pf.ProtofedError) as error:
        resolve("fedsap", {option: value})
    assert option in str(error.value) and "\n" not in str(error.value)


def test_pseudo_labels_of_own_classes_alone_keep_more_of_the_foreign_samples_out():
    keys = {**PHASES, "data": blobs(per_class=90), "unlabelled": "open", "open_share": 0.4, "rounds": 5}
    found = {}
    for which in ("all", "own"):
        _, federation = build(resolve("fedsap", {**keys, "pseudo_labels": which}))
        found[which] = list(federation)[-1].measures
    assert found["own"]["rejection_auroc"] > found["all"]["rejection_auroc"]
    assert found["own"]["acceptance_unknown"] < found["all"]["acceptance_unknown"]


def test_pseudo_labels_of_own_classes_are_of_own_classes():
    method = FedSAP(supervised_rounds=1, pseudo_labels="own")
    received = holding(bank(), 0.0, 2.0)
    received.memory.tensors["classes"] = torch.tensor([1.0, 0.0, 0.0, 1.0])
    known = method.unlabelled.candidates(bank(), received).known.tolist()
    assert known == [k and own for k, own in zip(bank().known.tolist(), [True, False, False, True], strict=True)]
