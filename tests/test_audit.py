"""The audit: its numbers against independent ones, cases whose answer is known, and the command on a real run."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.metrics import roc_auc_score, roc_curve

import protofed as pf
from protofed.auditing import audit_numbers
from protofed.auditing.disclosure import disclosure
from protofed.auditing.inversion import inversions, nearer, similarity
from protofed.auditing.membership import candidate_scores, membership, strongest
from protofed.auditing.message import ClientMessage, Sent, next_message
from protofed.auditing.statistics import auc, auc_estimate, mean_estimate, true_positives
from protofed.auditing.words import summary
from protofed.data.types import ClientData, Samples
from protofed.experiment.run import reopen
from protofed.models.skeleton import Skeleton
from protofed.wire import Bundle, sizes
from protofed.wire.codec import encode
from support import small
from support.small import blobs

NOTHING_OPEN = {"inner": "loop", "convolution": "grouped"}  # of the engine, so that no line says what was chosen
DIGITS = {
    **NOTHING_OPEN,
    **{"data": "digits", "clients": 4, "way": 2, "shot": 3, "rounds": 2, "lr": 0.05, "snapshots": 0},
    **{"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1},
}
SMALL = {**small.SMALL, **NOTHING_OPEN}
scores = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=25).map(np.array)


# --- statistics -------------------------------------------------------------------------------------------------------
@given(scores, scores)
def test_auc_is_that_of_scikit_learn(members, others):
    truth = [1] * len(members) + [0] * len(others)
    assert auc(members, others) == pytest.approx(roc_auc_score(truth, np.concatenate([members, others])), abs=1e-12)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.integers(100, 400))
def test_true_positives_are_those_of_the_roc_curve(seed, n):
    rng = np.random.default_rng(seed)
    members, others = rng.normal(0.7, 1, n).round(1), rng.normal(0, 1, n).round(1)
    false, true, _ = roc_curve([1] * n + [0] * n, np.concatenate([members, others]), drop_intermediate=False)
    assert true_positives(members, others) == pytest.approx(true[false <= 0.01].max())


def test_true_positives_need_enough_samples():
    assert true_positives(np.ones(500), np.zeros(99)) is None
    assert true_positives(np.ones(500), np.zeros(100)) == 1


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    truth = 0.5 * (1 + math.erf(0.8 / 2))  # P(N(0.8, 1) > N(0, 1))
    estimates = [auc_estimate(rng.normal(0.8, 1, 40), rng.normal(0, 1, 40), rng, 300) for _ in range(120)]
    covered = np.mean([e.low <= truth <= e.high for e in estimates])
    assert 0.86 <= covered <= 1
    assert np.mean([e.value for e in estimates]) == pytest.approx(truth, abs=0.02)
    assert all(e.low <= e.value <= e.high for e in estimates)


def test_the_interval_is_that_of_a_plain_bootstrap():
    rng = np.random.default_rng(1)
    members, others = rng.normal(0.5, 1, 30).round(1), rng.normal(0, 1, 20).round(1)
    draws = [auc(rng.choice(members, 30), rng.choice(others, 20)) for _ in range(3000)]
    found = auc_estimate(members, others, rng, 3000)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=0.01)
    assert (found.value, found.samples) == (auc(members, others), 50)


def test_the_interval_of_a_mean_shrinks_with_the_root_of_its_number():
    rng = np.random.default_rng(0)
    few, many = (mean_estimate(rng.uniform(size=n), rng) for n in (25, 2500))
    assert (few.high - few.low) / (many.high - many.low) == pytest.approx(10, rel=0.3)
    assert not many.beyond_guessing or many.low > 0.5


few = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=6)


@given(few, few)
def test_nearer_is_the_mean_over_all_draws_of_equal_size(own, others):
    n = min(len(own), len(others))
    pairs = [(max(a), max(b)) for a in itertools.combinations(own, n) for b in itertools.combinations(others, n)]
    wins = np.mean([(a > b) + 0.5 * (a == b) for a, b in pairs])
    best = np.mean([a for a, _ in pairs]), np.mean([b for _, b in pairs])
    assert nearer(own, others) == pytest.approx((*best, wins))


def test_nearer_without_others_and_with_many():
    assert nearer([0.2, 0.7], []) == (0.7, None, None)
    rng = np.random.default_rng(0)
    shares = [nearer(rng.normal(size=60), rng.normal(size=900))[2] for _ in range(200)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.07)  # more samples of others are no advantage


def test_similarity_is_the_correlation(seeded):
    x, others = torch.randn(1, 4, 5), torch.randn(7, 1, 4, 5)
    wanted = [np.corrcoef(x.flatten(), o.flatten())[0, 1] for o in others]
    np.testing.assert_allclose(similarity(x, others), wanted, rtol=1e-5)
    assert similarity(torch.zeros(3), torch.randn(2, 3)).tolist() == [0, 0]


# --- planted cases ----------------------------------------------------------------------------------------------------
FEATURES, CLASSES = 12, 3


class Turned(torch.nn.Module):
    """An encoder that can be inverted: a rotation; the head's logits are the first numbers of the embedding."""

    def __init__(self, features, dim):
        super().__init__()
        self.dim = dim
        self.turn = torch.nn.Parameter(torch.linalg.qr(torch.randn(features, features))[0][:, :dim].clone())

    def forward(self, x, levels=False):
        z = x.flatten(1) @ self.turn
        return pf.models.base.Output(z, z[:, :CLASSES])


def planted(members, labels, tests, test_labels, means, counts=None, dim=FEATURES, sent=None):
    """A message with the prototypes `means` of a client that trained on `members`."""
    own = Samples(members, labels, torch.arange(len(labels)))
    test = Samples(tests, test_labels, torch.arange(len(test_labels)))
    held = torch.bincount(labels, minlength=CLASSES)
    skeleton = Skeleton(Turned(members[0].numel(), dim))
    if means is None:  # its own prototypes
        bank = pf.PrototypeBank.from_embeddings(skeleton.outputs(members).embedding, labels, CLASSES)
    else:
        bank = pf.PrototypeBank(means, held.float() if counts is None else counts)
    content = Bundle(bank=bank, scalars={"samples": float(len(labels))})
    version = Sent(content, sizes(encode(content)))
    data = ClientData(own, test, held > 0)
    message = ClientMessage(0, "client 0", data, own, len(labels), skeleton.weights(), skeleton, version, version)
    return message, version


def drawn(n, g):
    return torch.randn(n, FEATURES, generator=g), torch.arange(n) % CLASSES


def planted_scores(g, members, means, tests=30):
    (x, y), (tx, ty), others = drawn(members, g), drawn(tests, g), drawn(120, g)
    message, sent = planted(x, y, tx, ty, means)
    return candidate_scores(message, sent, others, True, np.random.default_rng(0))


def test_a_prototype_of_one_sample_gives_that_sample_away():
    found = planted_scores(torch.Generator().manual_seed(0), members=CLASSES, means=None)
    measures = membership([found], False, np.random.default_rng(0))
    assert measures["distance"].auc.value == measures["angle"].auc.value == 1
    assert strongest(measures) in ("distance", "angle")
    assert not measures["elsewhere"].from_message and not measures["loss"].from_message
    assert all(measure.from_message for measure in membership([found], True, np.random.default_rng(0)).values())


def test_prototypes_of_other_people_and_a_random_encoder_give_nobody_away():
    values = {name: [] for name in ("distance", "angle", "elsewhere", "loss")}
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        found = planted_scores(g, members=30, means=torch.randn(CLASSES, FEATURES, generator=g))
        for name, measured in values.items():
            measured.append(auc(found[name].members, found[name].others))
    for name, measured in values.items():
        assert np.mean(measured) == pytest.approx(0.5, abs=0.03), name


def test_members_and_non_members_are_as_many_of_each_class():
    g = torch.Generator().manual_seed(1)
    x, y = drawn(30, g)
    tx, ty = drawn(9, g)
    message, sent = planted(x, y, tx, ty, None)
    found = candidate_scores(message, sent, drawn(60, g), False, np.random.default_rng(0))
    assert set(found) == {"distance", "angle", "elsewhere"}
    assert all(len(s.members) == len(s.others) == 9 for s in found.values())
    message, sent = planted(x[y == 0], y[y == 0], tx[ty == 1], ty[ty == 1], None)  # no class is in both
    assert candidate_scores(message, sent, drawn(60, g), False, np.random.default_rng(0)) == {}


def planted_inversions(seed, members, means=None, steps=80):
    torch.manual_seed(seed)
    g = torch.Generator().manual_seed(seed)
    x, y = drawn(members, g)
    if means is not None:
        means = torch.randn(CLASSES, FEATURES, generator=g)
    message, sent = planted(x, y, *drawn(30, g), means)
    found = inversions(message, sent, drawn(600, g), g, steps)
    assert [i.samples for i in found] == [members // CLASSES] * CLASSES
    return found, x, y


def test_an_encoder_that_can_be_inverted_gives_the_sample_of_a_prototype_away():
    found, x, y = planted_inversions(0, members=3, steps=200)
    for inversion in found:
        own = x[y == inversion.label][0]
        assert torch.equal(inversion.shown.nearest_own, own) and torch.equal(inversion.shown.class_mean, own)
        assert inversion.match > 0.99 and inversion.own > 0.95 and inversion.own_nearer > 0.99


def test_an_inversion_of_somebody_elses_prototype_is_no_nearer_to_the_clients_samples():
    shares = [i.own_nearer for seed in range(12) for i in planted_inversions(seed, 12, means="others", steps=40)[0]]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.15)  # three standard deviations


def test_disclosure_of_noisy_counts_for_all_classes():
    g = torch.Generator().manual_seed(0)
    x, y = drawn(30, g)
    x, y = x[y < 2], y[y < 2]  # ten each of two classes
    counts = torch.tensor([12.0, 7.0, 9.0])
    message, sent = planted(x, y, *drawn(9, g), torch.zeros(CLASSES, FEATURES), counts)
    told = disclosure(message, sent, CLASSES)
    assert (told.classes_held, told.counts_held) == ([0, 1], [10, 10])
    assert (told.classes_sent, told.counts_sent) == ([0, 1, 2], [12, 7, 9])
    assert told.count_error == 2.5 and told.class_auc == 0.5
    assert (told.samples, told.samples_sent) == (20, 20)
    assert sum(told.bytes.values()) == len(encode(sent.content))


# --- real runs --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on pictures."""
    folder = tmp_path_factory.mktemp("audited") / "plain"
    pf.run("fedproto", out=folder, **DIGITS)
    return folder


@pytest.fixture(scope="module")
def filtered(tmp_path_factory):
    """The same run with filters."""
    folder = tmp_path_factory.mktemp("audited") / "filtered"
    pf.run("fedproto", out=folder, filters=["clip?norm=1", "quantise?bits=8"], **DIGITS)
    return folder


def content_of(folder, without="audit"):
    """The digest and the time of every file of a folder."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.relative_to(folder).parts[0] != without]
    return {str(f): (hashlib.sha256(f.read_bytes()).hexdigest(), f.stat().st_mtime_ns) for f in files}


def test_the_command_writes_a_page_and_numbers_and_nothing_else(call, run):
    before = content_of(run)
    code, out, err = call("audit", run, "--clients", "2")
    assert (code, err) == (0, "")
    assert content_of(run) == before
    assert sorted(p.name for p in (run / "audit").iterdir()) == ["audit.json", "index.html"]
    stored = json.loads((run / "audit" / "audit.json").read_text())
    (audited,) = stored["runs"]
    assert [c["name"] for c in audited["sent"]["clients"]] == ["client 0", "client 3"]
    assert audited["unprotected"] is None and audited["round"] == 2
    assert "shown" not in json.dumps(stored)  # no sample
    page = (run / "audit" / "index.html").read_text()
    best = audited["sent"]["membership"][audited["numbers"]["auc_score"]]["auc"]
    assert best["value"] == audited["numbers"]["auc"]
    for estimate in (best, audited["sent"]["own_nearer"]):
        text = f"{100 * estimate['value']:.0f}\u00a0% ({100 * estimate['low']:.0f} to {100 * estimate['high']:.0f})"
        assert text in page and text in out
    for sentence in (
        "learns which classes it holds, and exactly how many samples of each",
        "models stay with the clients",
    ):
        assert sentence in page and sentence in out
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert "shows true samples" in page and "shows true samples" in out
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    inverted = sum(len(c["inversions"]) for c in audited["sent"]["clients"])
    assert len(pictures) == 4 * inverted > 0
    assert {Image.open(io.BytesIO(base64.b64decode(p))).size for p in pictures} == {(8, 8)}


def test_what_the_message_says_is_what_the_client_holds(run):
    _, federation = reopen(run)
    counts = federation.data.class_counts()
    (audited,) = pf.audit(run, clients=[1, "client 2"], out=run.parent / "told").runs
    for client in audited.sent.clients:
        told = client.disclosure
        held = {k: int(n) for k, n in enumerate(counts[client.client]) if n}
        assert dict(zip(told.classes_held, told.counts_held, strict=True)) == held
        assert dict(zip(told.classes_sent, told.counts_sent, strict=True)) == held
        assert told.samples == told.samples_sent == sum(held.values())
        assert (told.count_error, told.class_auc) == (0, 1)
    assert "Nothing protects" in " ".join(summary(audited)["What the message says"])


@pytest.mark.parametrize("folder", ["run", "filtered"])
def test_the_audited_message_is_the_one_that_is_sent_next(folder, request, monkeypatch):
    path = request.getfixturevalue(folder)
    _, federation = reopen(path)
    before = federation.engine.states[1].weights["head.weight"].clone()
    audited = [next_message(federation, client) for client in (1, 3)]
    assert torch.equal(before, federation.engine.states[1].weights["head.weight"])
    uploads = {}
    for client, outcome in federation.engine.train(federation.downloads(range(4), federation.round + 1)[0]):
        uploads[client] = outcome.upload
    for message in audited:
        assert sizes(uploads[message.client]) == message.leaves.bytes
        assert message.protected == (folder == "filtered")
        sent = pf.wire.decode(uploads[message.client], "client").bank
        if folder == "run":
            assert torch.equal(sent.means, message.leaves.content.bank.means)
        else:
            assert sent.means.dtype == torch.int8 and message.leaves.content.bank.means.norm(dim=1).max() < 1.01
            assert message.returned.content.bank.means.norm(dim=1).max() > 1.01


def test_runs_stand_side_by_side_with_and_without_protection(call, run, filtered, tmp_path):
    code, out, _ = call("audit", filtered, run, "--clients", "1,", "--out", tmp_path / "both")
    assert code == 0 and not (filtered / "audit").exists()
    page = (tmp_path / "both" / "index.html").read_text()
    assert "Runs side by side" in page and "right, without protection" in page
    assert "clip?norm=1, quantise?bits=8" in page and "computed without protection" in page
    first, second = json.loads((tmp_path / "both" / "audit.json").read_text())["runs"]
    assert first["unprotected"] is not None and second["unprotected"] is None
    assert (
        first["sent"]["clients"][0]["disclosure"]["bytes"]["prototypes"]
        < (first["unprotected"]["clients"][0]["disclosure"]["bytes"]["prototypes"])
    )
    assert "changed by filters=clip?norm=1, quantise?bits=8" in out and "Nothing protects" in out


def test_the_same_audit_gives_the_same_numbers(run, tmp_path):
    one, two = (pf.audit(run, clients=1, out=tmp_path / name).folder / "audit.json" for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    assert audit_numbers(run, clients=1) == json.loads(one.read_text())["runs"][0]["numbers"]


def test_a_stopped_run_is_audited_and_resumed_as_if_nothing_had_happened(tmp_path):
    data = blobs()
    common = {**SMALL, "data": data, "rounds": 4, "checkpoint_every": 2}
    whole = pf.run("fedproto", out=tmp_path / "whole", **common)

    def stop(record, rounds):
        if record.round == 3:
            raise KeyboardInterrupt

    with pytest.raises(BaseException, match="stopped"):
        pf.run("fedproto", out=tmp_path / "stopped", watch=stop, **common)
    (audited,) = pf.audit(tmp_path / "stopped", data=data, clients=1).runs
    assert audited.round == 2
    page = (tmp_path / "stopped" / "audit" / "index.html").read_text()
    assert "feature " in page and "<img" not in page  # no pictures of what is no picture
    resumed = pf.resume(tmp_path / "stopped", data=data)
    assert [{**row, "seconds": 0} for row in resumed.metrics] == [{**row, "seconds": 0} for row in whole.metrics]


def test_names_are_text_on_the_page(tmp_path):
    data = blobs()
    data = pf.data.Dataset.from_arrays(
        data.x_train, data.y_train, data.x_test, data.y_test, class_names=("<b>a", "b", "c&d", "e"), name="<i>"
    )
    pf.run("fedproto", out=tmp_path / "r", **{**SMALL, "data": data, "rounds": 1})
    page = (pf.audit(tmp_path / "r", data=data, clients=1).folder / "index.html").read_text()
    assert "&lt;b&gt;a" in page and "<b>a" not in page and "c&d" not in page and "<i>" not in page


def test_a_method_that_sends_weights_alone(tmp_path):
    data = blobs()
    pf.run("fedavg", out=tmp_path / "r", **{**SMALL, "data": data, "rounds": 1})
    (audited,) = pf.audit(tmp_path / "r", data=data).runs
    numbers = audited.numbers()
    assert numbers["auc_score"] in ("loss", "elsewhere") and numbers["auc_without_message"] is None
    assert numbers["own_nearer"] is None and numbers["count_error"] is None
    told = summary(audited)
    assert (
        "no class is named" in told["What the message says"][0] and "weights travel" in told["What the message says"][2]
    )
    assert "shows true samples" not in (tmp_path / "r" / "audit" / "index.html").read_text()
    assert "No inversion was tried" in told["What the samples look like"][0]


def test_bad_input_is_one_line(call, run, tmp_path):
    pf.run("local", out=tmp_path / "alone", **{**DIGITS, "rounds": 1})
    pf.run("fedproto", out=tmp_path / "memory", **{**SMALL, "data": blobs(), "rounds": 1})
    pf.run("fedproto", out=tmp_path / "sums", **{**DIGITS, "rounds": 1, "secure": "sums"})
    shutil.copytree(run, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoint")
    (tmp_path / "file").touch()
    for words, problem in (
        (["nowhere"], "nowhere: no such run folder"),
        (["."], "not a run folder (it has no settings.toml)"),
        (["empty"], "empty: it has no checkpoint"),
        (["alone"], "clients of local send nothing"),
        (["memory"], "this run's data was given in Python"),
        (["sums"], "uploads were summed securely"),
        ([run, "--clients", "client 9"], "unknown client 'client 9'"),
        ([run, "--clients", "0"], "at least one client"),
        ([run, "--clients", ","], "a number of clients, or their names"),
        ([run, "--clients", "1", "--out", "file/page"], "cannot be written"),
    ):
        code, out, err = call("audit", *words)
        assert (code, out) == (2, "") and len(err.splitlines()) == 1, (words, err)
        assert err.startswith("error: ") and problem in err


# --- documentation ----------------------------------------------------------------------------------------------------
def test_the_table_in_the_documentation_is_that_of_its_file():
    docs = Path(__file__).parent.parent / "docs"
    table = (docs / "audit.md").read_text(encoding="utf-8").split("<!-- audit digits -->")[1].split("\n\n")[1]
    runs = json.loads((docs / "results" / "audit" / "digits.json").read_text())["runs"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == [run["settings"]["partition.shot"] for run in runs] == ["1", "5", "40"]
    for row, run in zip(rows, runs, strict=True):
        n = run["numbers"]
        interval = [
            f"{100 * n[k]:.0f} % ({100 * n[f'{k}_low']:.0f} to {100 * n[f'{k}_high']:.0f})"
            for k in ("auc", "own_nearer")
        ]
        similarity = [f"{n[key]:.2f}" for key in ("similarity_own", "similarity_others")]
        assert row[1:] == [interval[0], f"{100 * n['auc_without_message']:.0f} %", interval[1], *similarity]
