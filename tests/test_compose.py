"""Compositions: the papers' methods written as parts are these methods, and what makes no sense is refused."""

import json
import math

import pytest
import torch

import protofed as pf
from protofed import ProtofedError, methods
from protofed.bank import PrototypeBank
from protofed.methods.compose import Compose
from protofed.parts import Forget, Momentum, Reduced, ServerRound, ServerStep, Sphere, Term, ages
from protofed.registry import as_options
from support.marks import slow_but
from support.small import SMALL, blobs

RAMP = "weight.shape=linear&weight.start=1&weight.end=3&weight.maximum=0.7"
PAIRS = {
    "fedproto": (
        {"weight": 0.7, "reduction": "sum"},
        {"loss": ["ce", "align?weight=0.7&reduction=sum"], "predict": "prototype"},
    ),
    "fedproto robust": (
        {"reduce": "median"},
        {"loss": ["ce", "align"], "predict": "prototype", "reduce": "median"},
    ),
    "fedsap": (
        {"alignment": {"shape": "linear", "start": 1, "end": 3, "maximum": 0.7}},
        {"loss": ["ce", f"align?{RAMP}", "proxy?scale=32"], "reduce": "mean?by=holders"},
    ),
    "fedpagr": (
        {},
        {
            "loss": ["ce", "contrast?temperature=0.1", "spread?weight=0.1&temperature=0.1"],
            "anchor": True,
            "returned_prototypes": "directions",
            "initial_bank": "random",
            "reduce": "mean?by=directions",
            "after": ["refine"],
            "predict": "prototype?metric=cosine&temperature=0.1&space=consensus",
        },
    ),
    "fedapa": (
        {"warm_up": {"shape": "cosine", "start": 0, "end": 3, "maximum": 1.0}},
        {
            "loss": [
                f"{term}?weight.shape=cosine&weight.start=0&weight.end=3&weight.maximum=1.0&temperature=0.5"
                for term in ("contrast", "peers")
            ],
            "reduce": "personal?temperature=0.5",
            "predict": "head?prefers=own",
        },
    ),
    "fedapa global": (
        {"variant": "global", "warm_up": 1.0},
        {
            "loss": ["ce", "contrast?temperature=0.5"],
            "reduce": "personal?similar=false&peers=false",
            "predict": "head?prefers=own",
        },
    ),
}
PAIRS["fedapa"][1]["loss"].insert(0, "ce")
ENGINES = ("loop", "stack")


def small(**changes):
    return {**SMALL, "data": blobs(), "rounds": 4, "participation": 0.7, **changes}


def rows(result):
    """What a run measured, without its seconds."""
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in result.metrics]


@pytest.mark.parametrize("engine", slow_but("loop", ENGINES))
@pytest.mark.parametrize("name", PAIRS)
def test_a_paper_written_as_a_composition_is_the_paper_bit_by_bit(name, engine, tmp_path):
    own, composed = PAIRS[name]
    first = pf.run(name.split()[0], out=tmp_path / "own", **small(engine=engine, **own))
    second = pf.run("compose", out=tmp_path / "composed", **small(engine=engine, **composed))
    assert rows(first) == rows(second) and first.summary["per_client"] == second.summary["per_client"]
    for k in range(SMALL["clients"]):
        weights, others = (r.model(k).state_dict() for r in (first, second))
        assert weights.keys() == others.keys() and all(torch.equal(weights[n], others[n]) for n in weights)


@pytest.mark.parametrize("engine", slow_but("loop", ENGINES))
@pytest.mark.parametrize(
    "changes", [{}, {"mix": 2.0, "consistency": 0.3}, {"returned_classes": "all", "normalise": False}]
)
def test_fedsap_with_unlabelled_samples_is_a_composition_too(changes, engine, tmp_path):
    semi = {"labels": "client", "labels_per_class": 4, "shot": 13, "lr": 0.05}
    part = {"after": 2, "weight": 1.0, **{k: v for k, v in changes.items() if k != "consistency"}}
    part["weight"] = changes.get("consistency", 1.0)
    text = "nearest?" + "&".join(f"{k}={json.dumps(v) if not isinstance(v, str) else v}" for k, v in part.items())
    given = {"loss": ["ce", f"align?{RAMP}", "proxy"], "reduce": "mean?by=holders", "unlabelled_samples": text}
    own = {**PAIRS["fedsap"][0], "supervised_rounds": 2, **changes}
    first = pf.run("fedsap", out=tmp_path / "own", **small(engine=engine, **semi, **own))
    second = pf.run("compose", out=tmp_path / "composed", **small(engine=engine, **semi, **given))
    assert rows(first) == rows(second) and first.summary["per_client"] == second.summary["per_client"]
    terms, others = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("own", "composed")
    )
    assert [r["terms"] for r in terms] == [r["terms"] for r in others] and terms[-1]["terms"]["consistency"] != 0
    assert [r.get("measures") for r in terms] == [r.get("measures") for r in others]
    assert "acceptance" in terms[-1]["measures"]
    assert [r["up"] for r in terms] == [r["up"] for r in others]
    for k in range(SMALL["clients"]):
        weights, others = (r.model(k).state_dict() for r in (first, second))
        assert all(torch.equal(weights[n], others[n]) for n in weights)


@pytest.mark.parametrize("name", PAIRS)
def test_a_composition_survives_its_settings_file(name):
    made = methods.get("compose", **PAIRS[name][1])
    assert methods.get("compose", **as_options(made)) == made


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"loss": []}, "a client would learn nothing"),
        ({"loss": "ce,align,align?weight=2"}, "2 terms called 'align'"),
        ({"loss": "ce,peers"}, "reduce=personal sends them"),
        ({"loss": "ce,peers", "reduce": "personal?peers=false"}, "reduce=personal sends them"),
        ({"loss": "ce,prox"}, "set average_weights=true"),
        ({"loss": "ce,aling"}, "did you mean 'align'"),
        ({"loss": "align?wieght=2"}, "did you mean 'weight'"),
        ({"reduce": "personal", "after": "refine"}, "each client has its own"),
        ({"reduce": "personal", "average_weights": True}, "each client has its own"),
        ({"reduce": "personal?temperature=0"}, "temperature must be above 0"),
        ({"after": "momentum?share=1"}, "share must be from 0 to below 1"),
        ({"after": "forget?after=0"}, "after must be 1 or more"),
        ({"predict": "nearest"}, "unknown prediction 'nearest'"),
        ({"reduce": "personal", "unlabelled_samples": "nearest"}, "each client has its own"),
        ({"unlabelled_samples": "nearest?after=0"}, "after must be 1 or more"),
        ({"unlabelled_samples": "nearest?mix=-1"}, "mix must be 0 or more"),
        ({"unlabelled_samples": "nearest?margin_quantile=2"}, "margin_quantile must be from 0 to 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(given, reason):
    with pytest.raises(ProtofedError, match=reason) as caught:
        methods.get("compose", **given)
    assert "\n" not in str(caught.value)


def test_personal_prototypes_are_for_methods_that_send_each_client_its_own():
    with pytest.raises(ProtofedError, match="fedproto sends all clients the same prototypes"):
        pf.run("fedproto", reduce="personal", **small())


@pytest.mark.parametrize("term", Term.registry.names())
def test_every_term_can_be_composed(term, tmp_path):
    given = {"loss": ["ce", term] if term != "ce" else ["ce"]}
    if term == "peers":
        given["reduce"] = "personal"
    if term == "prox":
        given["average_weights"] = True
    pf.run("compose", out=tmp_path / "run", **small(**given))
    terms = [json.loads(line)["terms"] for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    entry = Term.registry[term]
    assert all(math.isfinite(row[entry.key or entry.name]) for row in terms)
    assert terms[-1][entry.key or entry.name] != 0  # there are prototypes and a model from the second round on


def test_weights_within_an_architecture_and_prototypes_across_all():
    given = small(loss="ce,align", models=["mlp?hidden=[16]&embedding=5", "mlp?hidden=[24]&embedding=5"])
    for key in ("model", "embedding", "hidden"):
        del given[key]
    alone, shared = (pf.run("compose", **given, average_weights=on) for on in (False, True))
    assert shared.metrics[-1]["bytes_up"] > alone.metrics[-1]["bytes_up"] > 0
    weights = [shared.model(k).state_dict() for k in range(SMALL["clients"])]  # round-robin: 0, 2, 4 and 1, 3 are alike
    network = [name for name in weights[0] if name.startswith("network.")]
    assert network and all(torch.equal(weights[0][name], weights[2][name]) for name in network)
    assert any(weights[0][name].shape != weights[1][name].shape for name in network)


def test_a_schedule_of_a_term_needs_no_more_than_that_of_a_method():
    short = methods.get("compose", loss="ce,align?weight=0.5,proxy?weight.shape=linear&weight.end=50").loss[2]
    assert short.weight == pf.schedules.ramp("linear", 0, 50, 1.0)
    with pytest.raises(ProtofedError, match="given as a value and by its parts"):
        methods.get("compose", loss=["align?weight=1&weight.end=2"])


def test_counts_can_stay_at_the_client(monkeypatch):
    seen = []
    update = Compose.update

    def watched(self, state, reduced, round, setup):
        seen.append(reduced.bank.counts)
        return update(self, state, reduced, round, setup)

    monkeypatch.setattr(Compose, "update", watched)
    pf.run("compose", **small(returned_counts=False, participation=1.0, rounds=1))
    assert float(seen[0].max()) <= SMALL["clients"]  # a client counts once in each class


# --- server steps -----------------------------------------------------------------------------------------------------
def bank(values, counts=None):
    means = torch.tensor(values)
    return PrototypeBank(means, torch.ones(len(means)) if counts is None else torch.tensor(counts))


def test_momentum_keeps_a_share_of_what_was_there():
    now = ServerRound(bank([[1.0], [5.0], [0.0]], [1.0, 1.0, 0.0]), Reduced())
    moved = Momentum(0.75)(bank([[3.0], [5.0], [2.0]]), now)
    assert moved.means.flatten().tolist() == [1.5, 5.0, 2.0]  # a class that was not there is taken as it is


def test_the_sphere_gives_length_one():
    made = Sphere()(bank([[3.0, 4.0], [0.0, 0.0]], [2.0, 0.0]), ServerRound(bank([[0.0, 0.0]] * 2), Reduced()))
    torch.testing.assert_close(made.means, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_a_class_nobody_reports_any_more_is_forgotten():
    method = methods.get("compose", after="forget?after=2")
    setup = pf.methods.Setup(2, 1, 1, {}, 0)
    state = method.start(setup)
    both, one = bank([[1.0], [2.0]]), bank([[1.0], [0.0]], [1.0, 0.0])
    known = []
    for uploaded in (both, one, one, one, both):
        state = method.update(state, Reduced(bank=uploaded), 1, setup)
        known.append(state.bank.known.tolist())
    assert [k[1] for k in known] == [True, True, True, False, True] and all(k[0] for k in known)


def test_ages_count_rounds_without_a_report():
    age = torch.zeros(2)
    for _ in range(3):
        age = ages(age, None)
    assert age.tolist() == [3, 3] and Forget(2)(bank([[1.0]]), ServerRound(bank([[1.0]]), Reduced())).known.all()


def test_the_command_lists_every_part(call):
    code, out, _ = call("parts")
    assert code == 0
    for name in (*Term.registry.names(), *ServerStep.registry.names(), "personal", "krum", "prototype", "quantise"):
        assert name in out
