"""A prediction that mixes head and prototypes: equal to loops, the same on every engine, and what a user takes away."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import protofed as pf
from protofed import ProtofedError, methods
from protofed.bank import PrototypeBank
from protofed.classifier import load
from protofed.classifier.card import export_with_card
from protofed.evaluate import Confusion, Scores
from protofed.experiment.build import prepare_data
from protofed.federation.judge import Mixture
from protofed.federation.site import bundle_of, scores_of
from protofed.parts import Mix
from protofed.results.columns import default_columns
from protofed.results.confusions import read_confusions
from protofed.wire import Bundle, decode, encode
from support.marks import slow_but
from support.small import SMALL, blobs

INF = float("inf")


def softmax(values, allowed):
    exps = [math.exp(v) if a else 0.0 for v, a in zip(values, allowed, strict=True)]
    return [e / sum(exps) if sum(exps) else 0.0 for e in exps]


def mixed_by_loops(logits, scores, trained, share):
    """The probabilities of one sample, by plain numbers: who does not know a class takes the other's word for it."""
    known = [s > -INF for s in scores]
    heads = trained
    head, prototype = softmax(logits, heads), softmax(scores, known)
    unknown_to_head = sum(p for p, may in zip(prototype, heads, strict=True) if not may)
    unknown_to_bank = sum(p for p, may in zip(head, known, strict=True) if not may)
    result = []
    for c in range(len(logits)):
        by_head = head[c] * (1 - unknown_to_head) if heads[c] else prototype[c]
        by_prototype = prototype[c] * (1 - unknown_to_bank) if known[c] else head[c]
        result.append(share * by_head + (1 - share) * by_prototype)
    return result


def drawn(seed, n=6, classes=5):
    g = torch.Generator().manual_seed(seed)
    logits, scores = torch.randn(n, classes, generator=g), 3 * torch.randn(n, classes, generator=g)
    known, trained = torch.rand(2, classes, generator=g) < 0.6
    known[0] = trained[-1] = True
    return logits, scores.masked_fill(~known, -INF), trained


@pytest.mark.parametrize("seed", range(20))
def test_a_mix_is_that_of_plain_loops(seed):
    logits, scores, trained = drawn(seed)
    for share in (0.0, 0.3, 1.0):
        found = Mix().mixed(logits, scores, trained, share).exp()
        expected = [
            mixed_by_loops(one.tolist(), other.tolist(), trained.tolist(), share)
            for one, other in zip(logits, scores, strict=True)
        ]
        torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.sum(-1), torch.ones(len(found)))


def test_who_does_not_know_a_class_takes_the_others_word():
    logits = torch.tensor([[4.0, 0.0, 9.0]])
    no_bank = torch.full((1, 3), -INF)
    mix, everything = Mix(), torch.ones(3, dtype=torch.bool)
    torch.testing.assert_close(mix.mixed(logits, no_bank, everything, 0.2), logits.log_softmax(-1))
    scores, trained = torch.tensor([[0.0, 0.0, 5.0]]), torch.tensor([True, True, False])
    p = mix.mixed(logits, scores, trained, 0.5).exp()  # class 2 was never seen: its logit says nothing
    torch.testing.assert_close(p[0, 2], scores.softmax(-1)[0, 2])
    nobody = mix.mixed(logits, scores, torch.zeros(3, dtype=torch.bool), 0.5)
    torch.testing.assert_close(nobody, scores.log_softmax(-1))


@pytest.mark.parametrize("seed", range(10))
def test_the_share_is_the_best_on_validation_and_of_equal_ones_the_most_even(seed):
    logits, scores, trained = drawn(seed, n=12)
    labels = torch.randint(0, 5, (12,), generator=torch.Generator().manual_seed(seed))
    share = Mix().chosen(logits, scores, trained, labels)
    right = {}
    for tenth in range(11):
        predicted = Mix().mixed(logits, scores, trained, tenth / 10).argmax(-1)
        right[tenth / 10] = sum(int(p == y) for p, y in zip(predicted.tolist(), labels.tolist(), strict=True))
    best = [s for s, number in right.items() if number == max(right.values())]
    assert share in best and abs(share - 0.5) == min(abs(s - 0.5) for s in best)


def small(**changes):
    return {**SMALL, "data": blobs(), "rounds": 4, "loss": ["ce", "align"], "predict": "mix", **changes}


@pytest.mark.parametrize("changes", [{}, {"validation_share": 0.3}, {"average_weights": True, "candidates": "all"}])
def test_engines_agree_and_the_mix_is_the_methods_own_accuracy(changes):
    loop, stack = (pf.run("compose", **small(engine=engine, **changes)).metrics for engine in ("loop", "stack"))
    for one, other in zip(loop, stack, strict=True):
        assert one["accuracy"] == one["accuracy_mix"]
        for key in ("accuracy_mix", "accuracy_head", "accuracy_prototype", "mix_share"):
            assert one[key] == pytest.approx(other[key], abs=0.02)
    assert ("validation_mix" in loop[-1]) == ("validation_share" in changes)
    if "validation_share" not in changes:
        assert {row["mix_share"] for row in loop} == {0.5}


@pytest.mark.parametrize("share", ["0", "1"])
def test_the_ends_of_the_mix_are_prototypes_and_head(share):
    row = pf.run("compose", **small(predict=f"mix?share={share}", candidates="all")).metrics[-1]
    alone = pf.run("compose", **small(predict="prototype?metric=cosine&temperature=0.1", candidates="all")).metrics[-1]
    assert row["accuracy_prototype"] == alone["accuracy_prototype"] and row["mix_share"] == float(share)
    if share == "0":
        assert row["accuracy_mix"] == row["accuracy_prototype"]


@pytest.mark.parametrize("candidates", ["own", "all"])
def test_what_is_measured_is_what_a_user_takes_away(candidates, tmp_path):
    result = pf.run("compose", out=tmp_path / "run", **small(validation_share=0.3, candidates=candidates))
    row = json.loads((tmp_path / "run/clients.jsonl").read_text().splitlines()[-1])
    data, stored = prepare_data(result.settings), pf.load(tmp_path / "run")
    assert "mix" in repr(result) and result.accuracy == result.accuracy_mix == stored.accuracy_mix
    for k, client in enumerate(data.clients):
        x, y = client.test.take()
        for classifier in (result.model(k), stored.model(k)):
            found = classifier.predict(x)
            assert found.by == "mix" and float(np.mean(found.labels == y.numpy())) == row["accuracy_mix"][k]
            assert np.allclose(found.probabilities.sum(-1), 1, atol=1e-5)
    with pytest.raises(ProtofedError, match="does not mix"):
        pf.run("fedproto", **{**SMALL, "data": blobs()}).predict(blobs().x_test, 0, by="mix")


@pytest.mark.parametrize("format", slow_but("safetensors", ["safetensors", "pt2", "onnx"]))
def test_an_exported_mix_is_the_same(format, tmp_path):
    if format == "onnx":
        pytest.importorskip("onnxscript")
    result = pf.run("compose", **small())
    classifier, x = result.model(0), blobs().x_test
    assert export_with_card(classifier, tmp_path / f"model.{format}") < 1e-5
    card = (tmp_path / "model.md").read_text()
    assert "predicts by | mix" in card and (format == "safetensors" or "`mix`" in card)
    if format == "safetensors":
        assert np.array_equal(load(tmp_path / "model.safetensors").predict(x).labels, classifier.predict(x).labels)
    if format == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model.onnx")
        (mix,) = session.run(["mix"], {"x": x.numpy()})
        assert np.array_equal(mix.argmax(-1), classifier.predict(x).labels)


def test_a_class_that_is_added_is_the_prototypes_alone():
    result = pf.run("compose", **small(candidates="all"))
    x = blobs().x_test
    more = result.model(0).add_class("new", x[:3] + 50)
    found = more.predict(torch.cat([x, x[:3] + 50]))
    assert found.by == "mix" and found.probabilities.shape[1] == len(more.classes)
    assert found.classes[-3:] == ["new"] * 3
    assert np.allclose(found.probabilities.sum(-1), 1, atol=1e-5)


def test_tables_have_the_mix_where_it_was_measured(tmp_path, capsys):
    mixed, plain = pf.run("compose", **small()).summary, pf.run("fedproto", **{**SMALL, "data": blobs()}).summary
    assert "accuracy_mix" not in default_columns([plain])
    assert default_columns([plain, mixed])[:3] == ["accuracy_head", "accuracy_prototype", "accuracy_mix"]
    pf.run("compose", out=tmp_path / "run", **small())
    assert read_confusions(tmp_path / "run", by="mix").predictions == ("head", "prototype", "mix")


def test_votes_of_mixes_are_an_ensemble():
    row = pf.run("compose", **small(ensemble=True)).metrics[-1]
    assert {"ensemble_head", "ensemble_prototype", "ensemble_mix"} <= row.keys()


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("mix?share=1.5", "share must be from 0 to 1"),
        ("mix?share=half", "share"),
        ("mix?temperature=0", "temperature must be above 0"),
        ("mix?trains_head=false", "a mix needs the head"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(given, reason):
    with pytest.raises(ProtofedError, match=reason) as caught:
        methods.get("compose", predict=given)
    assert "\n" not in str(caught.value)


def test_a_mix_travels_from_a_site():
    y = [0, 1, 1]
    scores = Scores(
        Confusion.of(y, [0, 0, 1]), Confusion.of(y, y), measures={"mix_share": 0.3}, by_mix=Confusion.of(y, [1, 1, 1])
    )
    sent = scores_of(decode(encode(bundle_of(scores)), "a site"), "a site")
    assert (
        sent == scores
        and sent.accuracy_mix == pytest.approx(2 / 3)
        and sent.measures == {"mix_share": pytest.approx(0.3)}
    )


@pytest.mark.parametrize("candidates", ["own", "all"])
def test_a_shared_head_is_asked_of_the_classes_that_are_chosen_among(candidates):
    """A shared model knows all classes; where a client chooses among its own, the head's word for others counts nothing."""
    classes = torch.tensor([True, True, False])
    bank = PrototypeBank(torch.eye(3), torch.ones(3))
    own = candidates == "own"
    visit = SimpleNamespace(client=0, received=Bundle(weights={"w": torch.zeros(1)}))
    data = SimpleNamespace(clients=[SimpleNamespace(classes=classes, validation=None)])
    mixture = Mixture.of(
        visit, Mix(share=0.7), data, bank.restricted(classes) if own else bank, classes if own else None
    )
    p = mixture(torch.eye(3)[:1], torch.tensor([[0.0, -1.0, 9.0]])).exp()[0]
    assert (p[2] == 0) == own and float(p.sum()) == pytest.approx(1)
    assert int(p.argmax()) == (0 if own else 2)
