"""The parts of a method: reduces that stream, filters that run or refuse, schedules for every weight, true contracts."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import protofed as pf
from protofed import aggregate, methods, models, wire
from protofed.bank import PrototypeBank
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation import rounds
from protofed.methods.base import Method, registry
from protofed.models.skeleton import Skeleton
from protofed.parts import (
    CE,
    Bounded,
    Clip,
    Each,
    Filter,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Quantise,
    Reduce,
    Running,
    Term,
    Trimmed,
    Upload,
)
from protofed.schedules import Ramp
from protofed.wire import Bundle, WireError
from support.departure import departure
from support.engines import ENGINES, LOOP, assert_same, finish
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

SRC = Path(pf.__file__).parent
C, D = 4, 3
SETTABLE = [name for name in methods.available() if "reduce" in registry.options(name)]


def given_to(method, **changes):
    return {**SMALL, "data": blobs(), "rounds": 2, **labels_for(method), **changes}


# --- the interface ----------------------------------------------------------------------------------------------------
def test_a_method_has_at_most_twelve_members():
    members = [name for name in vars(Method) if not name.startswith("_")]
    parts = {"exchange", "feed", "reduce", "predict", "teacher"}
    equations = {"terms", "begin", "returned", "remember", "start", "update", "describe"}
    assert set(members) == parts | equations and len(members) <= 12


def test_no_type_check_is_switched_off_for_an_override():
    for file in SRC.rglob("*.py"):
        assert "ignore[override]" not in file.read_text(encoding="utf-8"), file


def test_files_are_short():
    lines = {name: len((SRC / f"methods/{name}.py").read_text().splitlines()) for name in FIVE}
    assert max(lines.values()) <= 200, lines
    assert len((SRC / "methods/fedproto.py").read_text().splitlines()) <= 30
    example = Path(__file__).parent.parent / "examples" / "own_method.py"
    assert len(example.read_text().splitlines()) <= 25


FIVE = ("fedsap", "fedpagr", "fedapa", "fedarpl", "protofssl")


def test_every_method_names_its_parts_and_paper():
    from typer.testing import CliRunner

    from protofed.cli import app

    shown = CliRunner().invoke(app, ["methods"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    for word in ("reduce:", "predict:", "teacher:", "down:", "up:", "feed:", "Tan et al."):
        assert word in shown.output
    without = {name for name in methods.available() if not registry.papers[name]}
    assert without == {"compose", "constellation", "local", "server-only"}  # which are no paper's


# --- reduce -----------------------------------------------------------------------------------------------------------
def upload(client, seed, weights=True, bank=True):
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (C,), generator=g).float()
    own = PrototypeBank(torch.randn(C, D, generator=g) * (counts > 0)[:, None], counts) if bank else None
    model = {"a": torch.randn(2, 3, generator=g), "b": torch.randn(4, generator=g)} if weights else {}
    return Upload(client, float(1 + seed % 5), Bundle(own, weights=model, scalars={"n": float(seed)}))


def reduced(rule, uploads, cuts=(), sent=None):
    running = Running(rule, sent)
    edges = [0, *sorted(cuts), len(uploads)]
    for begin, end in pairwise(edges):
        if begin < end:
            running.add(uploads[begin:end])
    return running.result()


ROBUST = {
    Median(): aggregate.median,
    Trimmed(0.3): lambda banks: aggregate.trimmed_mean(banks, 0.3),
    GeometricMedian(): aggregate.geometric_median,
    Krum(): aggregate.krum,
    MultiKrum(0.3): lambda banks: aggregate.multi_krum(banks, 0.3),
    Bounded(): aggregate.bounded_mean,
}
RULES = [Mean("size"), Mean("holders"), Mean("directions"), *ROBUST]
BY_HAND = {
    "size": aggregate.weighted_mean,
    "holders": aggregate.mean,
    "directions": aggregate.normalised_mean,
}


@pytest.mark.parametrize("rule", RULES, ids=str)
@examples(max_examples=25, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=4), st.integers(0, 100))
def test_a_reduction_does_not_depend_on_how_uploads_arrive(rule, n, cuts, seed):
    uploads = [upload(k, seed + k) for k in range(n)]
    whole, streamed = reduced(rule, uploads), reduced(rule, uploads, [c for c in cuts if c <= n])
    torch.testing.assert_close(streamed.bank.means, whole.bank.means)
    assert torch.equal(streamed.bank.counts, whole.bank.counts)
    for name, value in whole.weights.items():
        torch.testing.assert_close(streamed.weights[name], value, rtol=1e-6, atol=1e-7)
    assert streamed.scalars == pytest.approx(whole.scalars) and streamed.clients == whole.clients == n


@pytest.mark.parametrize("by", BY_HAND)
def test_a_mean_is_the_rule_on_the_whole_stack(by):
    uploads = [upload(k, 7 * k) for k in range(6)]
    banks = PrototypeBank.stack([u.content.bank for u in uploads])
    result, expected = reduced(Mean(by), uploads), BY_HAND[by](banks)
    torch.testing.assert_close(result.bank.means, expected.means)
    assert torch.equal(result.bank.counts, expected.counts)
    total = sum(u.samples if by == "size" else 1.0 for u in uploads)
    for name in ("a", "b"):
        naive = sum(u.content.weights[name].double() * (u.samples if by == "size" else 1.0) for u in uploads) / total
        torch.testing.assert_close(result.weights[name], naive.float())
    assert result.scalars["n"] == pytest.approx(sum(7 * k for k in range(6)) / 6)


@pytest.mark.parametrize("rule", ROBUST, ids=str)
def test_robust_rules_take_weights_too(rule):
    """The whole model is one vector, and what is looked at is how it changed from what was sent."""
    uploads = [upload(k, 3 * k + 1) for k in range(7)]
    sent = {name: torch.full_like(value, 0.5) for name, value in uploads[0].content.weights.items()}
    result = reduced(rule, uploads, sent=sent)
    banks = PrototypeBank.stack([u.content.bank for u in uploads])
    assert not bool((banks.known.sum(0) == 2).any())
    torch.testing.assert_close(result.bank.means, ROBUST[rule](banks).means)
    vectors = [torch.cat([u.content.weights[n].flatten() - 0.5 for n in ("a", "b")]) for u in uploads]
    expected = 0.5 + ROBUST[rule](PrototypeBank(torch.stack(vectors)[:, None], torch.ones(7, 1))).means[0]
    torch.testing.assert_close(torch.cat([result.weights[n].flatten() for n in ("a", "b")]), expected)
    assert result.scalars == {"n": 10.0}  # the median of 1, 4, …, 19


@pytest.mark.parametrize("rule", ROBUST, ids=str)
def test_robust_rules_reduce_each_architecture_by_itself(rule):
    def marked(k, u):
        return u._replace(content=replace(u.content, weights={f"{k}:{n}": v for n, v in u.content.weights.items()}))

    ones, twos = ([upload(10 * k + j, 17 * k + j) for j in range(4)] for k in range(2))
    both = reduced(rule, [marked(k, u) for pair in zip(ones, twos, strict=True) for k, u in enumerate(pair)])
    for k, uploads in enumerate((ones, twos)):
        for name, value in reduced(rule, uploads).weights.items():
            torch.testing.assert_close(both.weights[f"{k}:{name}"], value)


@pytest.mark.parametrize("rule", ROBUST, ids=str)
def test_of_two_clients_the_smaller_change_is_taken(rule):
    sent = {"a": torch.full((2, 3), 7.0), "b": torch.full((4,), -7.0)}
    near, far = ({n: v + by for n, v in sent.items()} for by in (0.1, -50.0))
    pair = [Upload(0, 1.0, Bundle(weights=far)), Upload(1, 1.0, Bundle(weights=near))]
    for name, value in reduced(rule, pair, sent=sent).weights.items():
        torch.testing.assert_close(value, near[name])


@pytest.mark.parametrize("rule", ROBUST, ids=str)
def test_one_client_is_taken_as_it_is(rule):
    one = upload(0, 5)
    result = reduced(rule, [one])
    torch.testing.assert_close(result.bank.means, one.content.bank.means)
    assert all(torch.equal(v, one.content.weights[n]) for n, v in result.weights.items())


@pytest.mark.parametrize("text", ["krum?attackers=0.5", "multi-krum?attackers=-1", "bounded?factor=0", "median?x=1"])
def test_a_wrong_rule_is_said_in_one_line(text):
    with pytest.raises(ProtofedError) as refused:
        resolve("fedproto", given_to("fedproto", reduce=text))
    assert "\n" not in str(refused.value)


def test_additive_rules_keep_nothing_and_the_others_say_so():
    uploads = [upload(k, k) for k in range(5)]
    for rule in RULES:
        running = Running(rule)
        running.add(uploads)
        assert bool(running.kept) != rule.additive
    running = Running(Each(averages=True))
    running.add(uploads)
    assert all(not u.content.weights and u.content.bank is not None for u in running.kept)
    torch.testing.assert_close(running.result().weights["b"], reduced(Mean("size"), uploads).weights["b"])


def test_weights_are_averaged_within_each_architecture():
    one, two = upload(0, 1), upload(1, 2)
    marked = [
        u._replace(content=replace(u.content, weights={f"{k}:{n}": v for n, v in u.content.weights.items()}))
        for k, u in enumerate((one, two))
    ]
    result = reduced(Mean("size"), marked)
    for k, u in enumerate((one, two)):
        torch.testing.assert_close(result.weights[f"{k}:a"], u.content.weights["a"])


@pytest.mark.parametrize(
    "rule",
    slow_but(
        ("median", "krum"),
        [
            *("median", "trimmed?share=0.3", "geometric-median", "krum", "multi-krum", "bounded"),
            *("mean?by=holders", "mean?by=size", "mean?by=directions"),
        ],
    ),
)
@pytest.mark.parametrize("method", methods.available())
def test_every_rule_with_every_method_runs_or_is_refused_in_one_line(method, rule):
    changes = given_to(method, reduce=rule, rounds=1, labels_per_class=4)
    weights = any(part.kind == "weights" for part in methods.get(method).exchange.up)
    if method not in SETTABLE or (rule.endswith("directions") and weights):
        with pytest.raises(ProtofedError) as refused:
            resolve(method, changes)
        assert "\n" not in str(refused.value) and "reduce" in str(refused.value)
        return
    settings = resolve(method, changes)
    assert resolve(None, settings.to_dict() | {"data": changes["data"]}).method == settings.method
    _, federation = build(settings.with_engine(LOOP))
    record = federation.step()
    assert not record.dropped and record.metrics


@pytest.mark.usefixtures("own_names")
def test_an_absurd_client_does_not_move_a_median(tiny):
    """One of five clients sends prototypes a thousand times too long: the median stays, the mean does not."""

    @methods.register("liar")
    @dataclass(frozen=True)
    class Liar(methods.fedproto.FedProto):
        """FedProto whose client 0 lies."""

        def returned(self, trained, received, round):
            content = super().returned(trained, received, round)
            return (
                replace(content, bank=replace(content.bank, means=1000 * content.bank.means))
                if trained.client == 0
                else content
            )

    norms = {}
    for rule in ("mean?by=holders", "median"):
        _, federation = build(resolve("liar", given_to("fedproto", reduce=rule, way=4, guard=0)).with_engine(LOOP))
        federation.step()
        norms[rule] = float(federation.state.bank.means.norm())
    assert norms["mean?by=holders"] > 50 * norms["median"]


def test_a_server_that_averages_holds_a_few_uploads_however_many_come():
    """The engine's uploads are read a chunk at a time, and none is kept."""
    settings = resolve("fedavg", given_to("fedavg", clients=12, way=2, shot=4, rounds=1))
    _, federation = build(settings.with_engine(LOOP))
    alive, most = [0], [0]
    original = federation.engine.train

    class Counted(bytes):
        """A message that knows how many of its kind there are."""

        def __new__(cls, content):
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            return super().__new__(cls, content)

        def __del__(self):
            alive[0] -= 1

    def train(downloads):
        for client, outcome in original(downloads):
            counted = replace(outcome, upload=Counted(outcome.upload))
            del outcome
            yield client, counted
            del counted

    federation.engine.train = train
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "CHUNK_BYTES", 1)
        federation.step()
    assert most[0] <= rounds.CHUNK + 1 and not alive[0]


def test_the_number_of_uploads_that_are_read_together_changes_no_bit_of_averaged_weights():
    states = []
    for size in (1, rounds.CHUNK_BYTES):
        settings = resolve("fedavg", given_to("fedavg", clients=7, way=2, shot=4, rounds=2))
        _, federation = build(settings.with_engine(LOOP))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rounds, "CHUNK_BYTES", size)
            federation.step()
            federation.step()
        states.append(federation.state.weights)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sums_are_the_mean_times_the_holders(rule):
    uploads = [upload(k, 11 * k + 2) for k in range(5)]
    result = reduced(rule, uploads)
    holders = torch.stack([u.content.bank.known for u in uploads]).sum(0)
    if rule == Mean("directions"):  # of directions the mean goes back to the sphere, and the sum does not
        expected = sum(u.content.bank.normalised().means for u in uploads)
    else:
        expected = holders[:, None] * result.bank.means
    torch.testing.assert_close(result.sums[""].means, expected)


def test_weights_keep_their_precision():
    one = Upload(0, 3.0, Bundle(weights={"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2)}))
    for rule in (Mean("size"), *ROBUST, Each(averages=True)):
        weights = reduced(rule, [one, one._replace(client=1)]).weights
        assert {n: w.dtype for n, w in weights.items()} == {"a": torch.float64, "b": torch.float32}


# --- schedules --------------------------------------------------------------------------------------------------------
def scheduled():
    for name in methods.available():
        hints = typing.get_type_hints(registry[name])
        for field in dataclasses.fields(registry[name]):
            if Ramp in typing.get_args(hints[field.name]):
                yield name, field.name


@pytest.mark.parametrize(("method", "field"), list(scheduled()))
@pytest.mark.slow
def test_every_loss_weight_may_be_a_schedule(method, field):
    """A constant schedule is the number; one that grows is 0 in the first round and not after."""
    full = 0.5
    changes = given_to(method, rounds=2)
    if "unlabelled" in methods.get(method).feed.__class__.__name__.lower() or method in ("fedsap", "protofssl"):
        changes |= {"shot": 16, "labels_per_class": 4, "data": blobs(per_class=60)}
    results = []
    for weight in (full, {"shape": "constant", "start": 0, "end": 0, "maximum": full}):
        _, federation = build(resolve(method, {**changes, field: weight}).with_engine(LOOP))
        results.append([r.terms for r in federation])
    assert results[0] == results[1]
    step = {"shape": "step", "start": 1, "end": 1, "maximum": full}
    settings = resolve(method, {**changes, field: step})
    assert getattr(settings.method, field) == Ramp(**step)


def test_weights_that_methods_multiply_by_are_all_schedules():
    """No field that is called a weight, or is known as one, is a plain number."""
    known = {"mu", "weight", "entropy", "consistency", "l1", "l2", "distillation", "alignment", "warm_up"}
    for name in methods.available():
        hints = typing.get_type_hints(registry[name])
        for field in dataclasses.fields(registry[name]):
            if (field.name in known or field.name.endswith("_weight")) and hints[field.name] is not bool:
                assert Ramp in typing.get_args(hints[field.name]), (name, field.name)


def test_terms_are_parts_with_a_name_and_a_weight():
    assert {"ce", "align", "proxy", "contrast", "spread", "peers", "prox"} <= set(Term.registry.names())
    batch = methods.get("local")
    assert isinstance(batch, Method) and CE(weight=0.5).weight == 0.5


# --- filters ----------------------------------------------------------------------------------------------------------
CLIPPED = [
    m for m in methods.available() if m not in ("local", "server-only", "fedmatch", "fedmatch-server", "pfedknow")
]


@pytest.mark.parametrize("text", slow_but("quantise?bits=8", ["clip?norm=0.5", "quantise?bits=8", "quantise?bits=16"]))
@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto", "local", "pfedknow"), methods.available()))
def test_every_filter_with_every_method_runs_or_is_refused_in_one_line(method, text):
    changes = given_to(method, filters=[text], rounds=2, epochs=2)
    runs = method in CLIPPED if text.startswith("clip") else method not in ("local", "server-only")
    if not runs:
        with pytest.raises(ProtofedError) as refused:
            resolve(method, changes)
        assert "\n" not in str(refused.value) and text.partition("?")[0] in str(refused.value)
        return
    server, _, records = finish(resolve(method, changes), LOOP)
    assert not any(r.dropped for r in records) and server is not None


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers", "workers stack"]))
@pytest.mark.parametrize("method", ["fedproto", "fedavg", "fedapa"])
def test_filters_on_every_engine_equal_the_plain_loop(method, engine):
    assert_same(resolve(method, given_to(method, filters="clip?norm=0.5,quantise?bits=16")), ENGINES[engine])


def test_clip_bounds_prototypes_and_the_change_of_weights():
    g = torch.Generator().manual_seed(0)
    before = {"a": torch.randn(3, 3, generator=g), "b": torch.randn(3, generator=g)}
    bank = PrototypeBank(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]), torch.tensor([2.0, 1.0, 0.0]))
    after = {n: v + torch.randn(v.shape, generator=g) for n, v in before.items()}
    left = Clip(0.7).leave(Bundle(bank, {"low": bank}, after), departure(weights=before))
    for one in (left.bank, left.banks["low"]):
        torch.testing.assert_close(one.means, torch.tensor([[0.42, 0.56], [0.3, 0.4], [0.0, 0.0]]))
    change = torch.cat([(left.weights[n] - before[n]).flatten() for n in before])
    assert float(change.norm()) == pytest.approx(0.7, rel=1e-5)
    near = {n: v + 1e-3 for n, v in before.items()}
    assert all(
        torch.equal(v, near[n])
        for n, v in Clip(0.7).leave(Bundle(weights=near), departure(weights=before)).weights.items()
    )


@pytest.mark.parametrize(("bits", "error"), [(8, 1 / 127), (16, 1 / 32767)])
def test_quantised_values_come_back_within_half_a_step(bits, error):
    one = upload(0, 3).content
    sent = Quantise(bits).leave(one, departure())
    message = wire.encode(sent)
    back = Quantise(bits).restore(wire.decode(message), "client 0", Bundle())
    assert back.bank.means.dtype == torch.float32 and back.tensors.keys() == one.tensors.keys()
    step = one.bank.means.abs().amax(-1, keepdim=True) * error
    assert bool(((back.bank.means - one.bank.means).abs() <= step / 2 + 1e-7).all())
    assert torch.equal(back.bank.counts, one.bank.counts) and torch.equal(back.weights["b"], one.weights["b"])
    rows = int(one.bank.known.sum())
    assert wire.sizes(message)["prototypes"] == rows * D * bits // 8


def test_a_quantised_message_that_lies_is_refused():
    one = Quantise(8).leave(upload(0, 3).content, departure())
    for tensors in (
        {"scale/bank/": torch.ones(C + 1), "scale/weight/a": one.tensors["scale/weight/a"]},
        {"scale/bank/": torch.ones(C, dtype=torch.float64), "scale/weight/a": one.tensors["scale/weight/a"]},
    ):
        with pytest.raises(WireError, match="client 0: bank"):
            Quantise(8).restore(replace(one, tensors=tensors), "client 0", Bundle())


def test_an_unquantised_upload_in_a_quantised_run_is_dropped_and_named():
    _, federation = build(resolve("fedproto", given_to("fedproto", filters="quantise?bits=8")).with_engine(LOOP))
    original = federation.engine.train

    def train(downloads):
        for client, outcome in original(downloads):
            if client == 2:
                content = wire.decode(outcome.upload)
                bank = replace(content.bank, means=content.bank.means.double())
                outcome = replace(outcome, upload=wire.encode(replace(content, bank=bank)))
            yield client, outcome

    federation.engine.train = train
    record = federation.step()
    assert set(record.dropped) == {2} and "client 2" in record.dropped[2]


@pytest.mark.parametrize(
    "text", ["clip?norm=0", "clip?norm=x", "quantise?bits=4", "squeeze", "clip?size=1", "clip?norm"]
)
def test_a_wrong_filter_is_said_in_one_line(text):
    with pytest.raises(ProtofedError) as refused:
        resolve("fedproto", given_to("fedproto", filters=text))
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("own_names")
def test_an_own_filter_wraps_any_method():
    @Filter.registry.register("halve")
    @dataclass(frozen=True)
    class Halve(Filter):
        """Halves every prototype that leaves, and doubles what is reduced."""

        def leave(self, upload, departure):
            return replace(upload, bank=replace(upload.bank, means=upload.bank.means / 2))

        def arrive(self, reduced):
            return replace(reduced, bank=replace(reduced.bank, means=reduced.bank.means * 2))

    plain, wrapped = (
        finish(resolve("fedproto", given_to("fedproto", filters=text)), LOOP)[0] for text in ((), "halve")
    )
    torch.testing.assert_close(wrapped.bank.means, plain.bank.means)


# --- contracts --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Branching(methods.fedproto.FedProto):
    """Branches on values of tensors everywhere but in its terms, which is allowed."""

    def begin(self, weights, received):
        return super().begin(weights, received) if float(received.bank.means.sum()) < 1e9 else weights

    def returned(self, trained, received, round):
        content = super().returned(trained, received, round)
        return content if float(content.bank.counts.sum()) > 0 else Bundle()

    def remember(self, trained, received, round):
        return Bundle(scalars={"seen": float(bool(trained.bank().known.any()))})


@dataclass(frozen=True)
class Forbidden(methods.fedproto.FedProto):
    """Branches on a value inside its terms, which is not."""

    def terms(self, net, batch, received, round):
        terms = super().terms(net, batch, received, round)
        return terms if float(terms["ce"].detach()) > 0 else {"ce": terms["ce"]}


@pytest.fixture
def branching(own_names):
    registry.register("branching")(Branching)
    registry.register("forbidden")(Forbidden)


@pytest.mark.parametrize("engine", ["stack", "workers stack"])
@pytest.mark.slow
def test_only_terms_must_be_free_of_branches(branching, engine):
    assert_same(resolve("branching", given_to("fedproto")), ENGINES[engine])
    with pytest.raises((RuntimeError, ProtofedError), match=r"item|vmap|stack"):
        finish(resolve("forbidden", given_to("fedproto")), ENGINES[engine])
    finish(resolve("forbidden", given_to("fedproto")), LOOP)


def test_downloads_are_checked_as_uploads_are():
    _, federation = build(resolve("fedproto", given_to("fedproto")).with_engine(LOOP))
    downloads, _ = federation.downloads([0], 1)
    classes, dim = federation.state.bank.means.shape
    wrong = {
        "has shape": Bundle(bank=PrototypeBank(torch.ones(9, dim), torch.ones(9))),
        "NaN": Bundle(bank=PrototypeBank(torch.full((classes, dim), torch.nan), torch.ones(classes))),
        "sent no bank": Bundle(),
        "does not exchange": Bundle(bank=federation.state.bank, scalars={"more": 1.0}),
    }
    for said, content in wrong.items():
        with pytest.raises(WireError, match=rf"server's message to client 0.*{said}"):
            list(federation.engine.train(replace(downloads, messages=[wire.encode(content)])))
        federation.engine.decoded.clear()


def test_a_message_for_the_same_round_is_read_anew():
    """What was decoded for one call is not taken for what another call brings."""
    _, federation = build(resolve("fedproto", given_to("fedproto")).with_engine(LOOP))
    federation.step()
    first, _ = federation.downloads([0], 2)
    one = next(federation.engine.train(first))[1]
    _, fresh = build(resolve("fedproto", given_to("fedproto")).with_engine(LOOP))
    fresh.step()
    fresh.state = replace(fresh.state, bank=replace(fresh.state.bank, means=fresh.state.bank.means + 1))
    other, _ = fresh.downloads([0], 2)
    assert next(fresh.engine.train(other))[1].terms != one.terms
    federation.engine.restore(fresh.engine.export())
    assert federation.engine.message(other, 0).bank is not federation.engine.message(first, 0).bank


def test_bytes_of_an_upload_that_is_dropped_are_counted():
    _, federation = build(resolve("fedproto", given_to("fedproto")).with_engine(LOOP))
    original = federation.engine.train
    sent = []

    def train(downloads):
        for client, outcome in original(downloads):
            if client == 1:
                content = wire.decode(outcome.upload)
                outcome = replace(outcome, upload=wire.encode(replace(content, scalars={"samples": -1.0})))
            sent.append(len(outcome.upload))
            yield client, outcome

    federation.engine.train = train
    record = federation.step()
    assert set(record.dropped) == {1} and "-1 samples" in record.dropped[1]
    assert sum(record.up.values()) == sum(sent)


def test_the_number_of_samples_travels_and_is_counted():
    _, federation = build(resolve("fedavg", given_to("fedavg", shot_spread=3.0)).with_engine(LOOP))
    downloads, _ = federation.downloads(range(5), 1)
    for client, outcome in federation.engine.train(downloads):
        content = wire.decode(outcome.upload)
        assert content.scalars == {"samples": len(federation.data.clients[client].labelled)}
        assert wire.sizes(outcome.upload)["scalars"] == 8
        bare = replace(content, scalars={})
        with pytest.raises(WireError, match="sent no samples"):
            wire.decode(wire.encode(bare), "client", federation.expected[0])


def test_what_is_the_same_for_all_is_one_message_and_what_is_not_is_said():
    for method, messages in (("fedproto", 1), ("fedavg", 1), ("fedapa", 1 + 5), ("fedrgd", 1)):
        _, federation = build(resolve(method, given_to(method)).with_engine(LOOP))
        downloads, _ = federation.downloads(range(5), 1)
        assert len(downloads.messages) == messages, method
    federation.step()  # of fedrgd: groups are apart after the first round
    downloads, _ = federation.downloads(range(5), 2)
    groups = {federation.state.group(c, 2) for c in range(5)}
    assert len(downloads.messages) == len(groups)


@pytest.mark.usefixtures("own_names")
def test_the_model_is_built_at_most_twice_before_the_first_round():
    built = []

    def factory(shape, classes):
        built.append(shape)
        return torch.nn.Sequential(torch.nn.Linear(shape[0], 5), torch.nn.ReLU())

    models.register_module("counted", factory)
    changes = {k: v for k, v in SMALL.items() if k not in ("model", "hidden", "embedding", "engine", "layout")}
    _, federation = build(resolve("fedproto", {**changes, "data": blobs(), "model": "counted", "engine": "auto"}))
    federation.engine.close()
    assert len(built) <= 2


def test_a_clients_prototypes_are_computed_once_a_round(monkeypatch):
    """After training FedProto's client has its prototypes: evaluation runs its test samples and nothing else."""
    calls = []
    original = Skeleton.outputs
    monkeypatch.setattr(
        Skeleton, "outputs", lambda self, x, weights=None: calls.append(len(x)) or original(self, x, weights)
    )
    _, federation = build(resolve("fedproto", given_to("fedproto", rounds=1)).with_engine(LOOP))
    federation.step()
    assert len(calls) == 2 * len(federation.data.clients)


def test_a_first_training_that_fails_breaks_nothing(tmp_path):
    """Every client of FedProto goes to NaN: the run ends, its checkpoint is whole, and it can be resumed."""
    result = pf.run("fedproto", **given_to("fedproto", lr=1e30, rounds=3), out=tmp_path / "r")
    assert result.summary["dropped_clients"] == 15
    again = pf.resume(tmp_path / "r", data=blobs())
    assert again.summary["dropped_clients"] == 15


def test_engines_own_what_they_return():
    """States and uploads of one client are not changed by the next one's training."""
    _, federation = build(resolve("fedproto", given_to("fedproto")).with_engine(LOOP))
    downloads, _ = federation.downloads(range(5), 1)
    seen = {}
    for client, outcome in federation.engine.train(downloads):
        state = federation.engine.states[client]
        seen[client] = (bytes(outcome.upload), {n: w.clone() for n, w in state.weights.items()}, outcome.upload)
    for client, (upload, weights, same) in seen.items():
        assert bytes(same) == upload
        assert all(torch.equal(w, federation.engine.states[client].weights[n]) for n, w in weights.items())


def test_nobody_asks_whether_a_function_is_overridden():
    pattern = re.compile(r"type\([a-z_.]+\)\.\w+ (is|==) Method\.|__func__ is|is not Method\.|in vars\(type")
    for file in SRC.rglob("*.py"):
        assert not pattern.search(file.read_text(encoding="utf-8")), file


def test_parts_are_what_settings_say():
    assert inspect.isclass(Reduce) and registry.make("fedproto", {"reduce": "trimmed?share=0.2"}).reduce == Trimmed(0.2)
    assert registry.make("fedprox", {"mu": 0.5}).mu == 0.5
