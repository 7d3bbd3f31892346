"""Compression: what comes back, how wrong it is, how many bytes it saves, and that no message can lie about it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed import methods, wire
from protofed.bank import PrototypeBank
from protofed.errors import ProtofedError
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.parts import BFloat16, Changed, Clip, Filter, Float16, Quantise, TopK
from protofed.parts.compression import compressed
from protofed.parts.filters import restored
from protofed.wire import Bundle, WireError
from support.departure import departure
from support.engines import ENGINES, LOOP, assert_same, finish
from support.errors import refusal
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

ROOT = Path(__file__).parent.parent
C, D = 5, 12
FILTERS = ["float16", "bfloat16", "top-k?share=0.2", "changed?tolerance=0.05"]
COMPOSED = ["changed?tolerance=0.05,top-k?share=0.3,quantise?bits=8", "clip?norm=2,top-k?share=0.3,float16"]
EXCHANGING = [name for name in methods.available() if methods.get(name).exchange.up]
PROTOTYPES_BOTH_WAYS = ["compose", "fedapa", "fedarpl", "fedmps", "fedpagr", "fedproc", "fedproto", "fedsap", "fedtgp"]


def message(seed=0, known=None, scale=1.0, near=None):
    """What travels: a bank of some classes and a small model; with `near` a little away from another message."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.tensor([3.0, 0.0, 4.0, 1.0, 0.0]) if known is None else torch.tensor(known)
    means = scale * torch.randn(C, D, generator=g) * (counts > 0)[:, None]
    weights = {"a": scale * torch.randn(40, 30, generator=g), "b": scale * torch.randn(6, generator=g)}
    if near is not None:
        means = torch.where((counts > 0)[:, None], near.bank.means + 0.1 * means, 0.0)
        weights = {n: near.weights[n] + 0.1 * v for n, v in weights.items()}
    return Bundle(bank=PrototypeBank(means, counts), weights=weights, scalars={"samples": 8.0})


SENT = message(1, [1.0, 2.0, 3.0, 0.0, 0.0])  # classes 0, 1 and 2


def there_and_back(filters, upload, sent=SENT):
    """What the server reads of an upload, through the wire, and the message."""
    gone, measures = compressed(filters, upload, departure(bank=sent.bank, weights=sent.weights))
    text = wire.encode(gone)
    return restored(filters, wire.decode(text), "client 3", sent), text, measures


def values(bundle):
    return torch.cat([bundle.bank.means.flatten(), *(v.flatten() for v in bundle.weights.values())])


def error(one, other):
    return float((values(one) - values(other)).norm() / values(other).norm())


# --- each filter ------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize(("part", "bits"), [(Float16(), 11), (BFloat16(), 8)])
def test_shorter_numbers_lose_half_a_unit_of_the_last_place(part, bits, seed, scale):
    one = message(seed, scale=scale)
    back, _, measures = there_and_back([part], one)
    bound = values(one).abs() * 2.0**-bits + 2.0**-25  # below 2⁻¹⁴ half precision has steps of 2⁻²⁴
    assert bool(((values(back) - values(one)).abs() <= bound).all())
    assert measures["compression_error"] == pytest.approx(error(back, one), rel=1e-5)
    assert torch.equal(back.bank.counts, one.bank.counts) and back.scalars == one.scalars


def test_numbers_beyond_half_precision_become_the_largest_one_and_not_infinite():
    back, _, _ = there_and_back([Float16()], message(scale=1e6))
    assert bool(torch.isfinite(values(back)).all()) and float(values(back).abs().max()) == 65504


@given(seed=st.integers(0, 10**6), shares=st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2))
@settings(max_examples=60, deadline=None)
def test_more_of_the_changes_never_makes_it_worse_and_all_of_them_are_exact(seed, shares):
    one = message(seed, near=SENT)
    few, many = sorted(shares)
    assert error(there_and_back([TopK(many)], one)[0], one) <= error(there_and_back([TopK(few)], one)[0], one) + 1e-9
    exact, _, measures = there_and_back([TopK(1.0)], one)
    assert torch.equal(values(exact), values(one)) and measures["compression_error"] == 0


def test_top_k_sends_the_largest_changes_and_new_classes_in_full():
    one = message(5, near=SENT)
    back, text, _ = there_and_back([TopK(0.1)], one)
    for name, value in one.weights.items():  # by a loop of its own
        change = (value - SENT.weights[name]).abs().flatten()
        number = max(1, round(0.1 * len(change)))
        kept = set(change.sort(descending=True).indices[:number].tolist())
        for i, (now, new, old) in enumerate(
            zip(back.weights[name].flatten(), value.flatten(), SENT.weights[name].flatten(), strict=True)
        ):
            assert float(now) == float(new if i in kept else old)
    assert torch.equal(back.bank.means[3], one.bank.means[3])  # class 3 was not in what was sent
    changed = (back.bank.means[[0, 2]] != SENT.bank.means[[0, 2]]).sum()
    assert int(changed) == round(0.1 * 2 * D) and torch.equal(back.bank.counts, one.bank.counts)
    sizes = wire.sizes(text)
    assert sizes["weights"] == 4 * (120 + 1) and sizes["prototypes"] == 4 * (D + round(0.1 * 2 * D))
    assert sizes["scalars"] >= 2 * (120 + 1 + 2)  # the places, two bytes each


def test_only_changed_classes_travel_and_the_others_are_known_to_be_there():
    one = message(2, [3.0, 0.0, 4.0, 1.0, 0.0], near=SENT)
    means = one.bank.means.clone()
    means[0] = SENT.bank.means[0] * 1.001
    one = replace(one, bank=replace(one.bank, means=means))
    back, text, measures = there_and_back([Changed(0.01)], one)
    assert torch.equal(back.bank.means[0], SENT.bank.means[0]) and torch.equal(back.bank.means[2:], means[2:])
    assert torch.equal(back.bank.counts, one.bank.counts)
    assert wire.sizes(text)["prototypes"] == 4 * D * 2 and 0 < measures["compression_error"] < 0.01
    exact, _, _ = there_and_back([Changed(0.0)], one)
    assert torch.equal(values(exact), values(one))
    same, text, _ = there_and_back([Changed(0.0)], replace(one, bank=replace(SENT.bank, counts=2 * SENT.bank.counts)))
    assert torch.equal(same.bank.means, SENT.bank.means) and wire.sizes(text)["prototypes"] == 0


def test_what_was_not_sent_is_sent_in_full():
    one, nothing = message(3), Bundle()
    for part in (TopK(0.1), Changed(0.5)):
        back, _, measures = there_and_back([part], one, nothing)
        assert torch.equal(values(back), values(one)) and measures["compression_error"] == 0


@pytest.mark.parametrize(
    "chosen",
    [
        [Changed(0.2), TopK(0.2), Quantise(8)],
        [TopK(0.2), Changed(0.1), Float16()],
        [Clip(1.0), TopK(0.2), Quantise(16)],
    ],
)
def test_filters_compose(chosen):
    one = message(4, near=SENT)
    back, text, measures = there_and_back(chosen, one)
    assert back.weights.keys() == one.weights.keys() and torch.equal(back.bank.known, one.bank.known)
    assert not back.tensors and back.bank.means.dtype == torch.float32
    assert len(text) < len(wire.encode(one)) and measures["compression"] > 1
    if not isinstance(chosen[0], Clip):
        assert error(back, one) == pytest.approx(measures["compression_error"], rel=1e-5)
        assert error(back, one) < 0.2


# --- runs -------------------------------------------------------------------------------------------------------------
def keys(method, **changes):
    phases = {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0} if method == "fedarpl" else {}
    return {**SMALL, "data": blobs(), **labels_for(method), **phases, "silhouette": False, "snapshots": 0, **changes}


@pytest.mark.parametrize("text", slow_but(FILTERS[2], [*FILTERS, *COMPOSED]))
@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto"), methods.available()))
def test_every_method_runs_with_every_compression_or_refuses_it_in_one_line(method, text):
    bounded = method not in ("fedmatch", "fedmatch-server", "pfedknow") or "clip" not in text
    runs = method in EXCHANGING and bounded and ("changed" not in text or method in PROTOTYPES_BOTH_WAYS)
    runs &= "top-k" not in text or method != "constellation"  # what it sends is not what it is sent
    if not runs:
        assert "filters: " in refusal(lambda: resolve(method, keys(method, filters=text)))
        return
    _, _, records = finish(resolve(method, keys(method, filters=text, lr=0.01)), LOOP)
    assert not any(record.dropped or record.notes for record in records)
    measures = [(r.measures["compression_error"], r.measures["compression"]) for r in records]
    most = math.inf if method == "fedtgp" else 1  # its server sends prototypes of its own, far from the clients'
    assert all(0 <= error < most and ratio > 0 for error, ratio in measures)


@pytest.mark.parametrize("engine", slow_but("stack", ["stack", "workers"]))
@pytest.mark.parametrize("text", ["top-k?share=0.3,quantise?bits=16", "changed?tolerance=0.001,float16"])
def test_every_engine_equals_the_plain_loop(text, engine):
    """A number near the edge of the largest changes may fall to either side, so few rounds are compared."""
    loop, other = assert_same(resolve("fedproc", keys("fedproc", filters=text, rounds=2)), ENGINES[engine])
    for one, two in zip(loop, other, strict=True):
        assert two.measures["compression_error"] == pytest.approx(one.measures["compression_error"], rel=1e-3)


def test_clients_of_several_architectures():
    one_model = ("model", "embedding", "hidden")
    given = {k: v for k, v in keys("fedproc").items() if k not in one_model}
    several = {"models": ["mlp?hidden=7", "mlp?hidden=3,3"], "dim": 6, "filters": "top-k?share=0.2,float16"}
    _, _, records = finish(resolve("fedproc", {**given, **several}), LOOP)
    assert not any(record.dropped for record in records)


def test_bytes_on_the_wire_are_fewer():
    sent, plain = {}, 0
    for text in ("", *FILTERS[:3], "quantise?bits=8", "top-k?share=0.1,quantise?bits=8"):
        federation = build(resolve("fedavg", keys("fedavg", filters=text, rounds=2, hidden=[64])).with_engine(LOOP))[1]
        record = [*federation][1]
        sent[text] = sum(record.up.values()) - record.up["framing"]
        whole = sum(record.up.values())
        if text:  # all clients have one architecture, so the mean of their ratios is the ratio of the sums
            assert record.measures["compression"] == pytest.approx(plain / whole, rel=1e-6)
        else:
            plain = whole
    assert sent["float16"] == sent["bfloat16"] < 0.51 * sent[""]
    assert sent["top-k?share=0.2"] < 0.35 * sent[""] and sent["quantise?bits=8"] < 0.5 * sent[""]
    assert sent["top-k?share=0.1,quantise?bits=8"] < 0.1 * sent[""]


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "text", "reason"),
    [
        ("local", "float16", "send nothing"),
        ("fedavg", "changed", "prototypes"),
        ("protofssl", "changed", "prototypes"),
        ("fedproto", "top-k?share=0", "share"),
        ("fedproto", "top-k?share=1.5", "share"),
        ("fedproto", "changed?tolerance=1", "tolerance"),
        ("fedproto", "changed?tolerance=-1", "tolerance"),
        ("fedproto", "float16,clip?norm=1", "clip must stand before float16"),
        ("fedproto", "quantise,top-k", "top-k must stand before quantise"),
        ("fedproto", "top-k,top-k", "twice"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(method, text, reason):
    assert reason in refusal(lambda: resolve(method, keys(method, filters=text)))


def test_a_filter_needs_its_own_order_in_python_too():
    with pytest.raises(ProtofedError, match="clip must stand before"):
        resolve("fedproto", keys("fedproto", filters=["float16", "clip?norm=1"]))


LIES = {
    "places beyond the end": lambda t: {"top-k/weight/a": t["top-k/weight/a"] + 1199},
    "negative places": lambda t: {"top-k/weight/a": t["top-k/weight/a"] - 1200},
    "the same place twice": lambda t: {"top-k/weight/a": torch.zeros_like(t["top-k/weight/a"])},
    "fewer places than numbers": lambda t: {"top-k/weight/a": t["top-k/weight/a"][:-1]},
    "no places": lambda t: {"top-k/weight/a": t["top-k/weight/a"][:0]},
    "places of another type": lambda t: {"top-k/weight/a": t["top-k/weight/a"].float()},
    "places in a square": lambda t: {"top-k/weight/a": t["top-k/weight/a"][None]},
    "a weight that nobody has": lambda t: {"top-k/weight/z": t["top-k/weight/a"]},
    "a bank that nobody has": lambda t: {"top-k/bank/z": t["top-k/bank/"]},
    "classes beyond the end": lambda t: {"top-k/rows/": t["top-k/rows/"] + 4},
    "a class that was not sent": lambda t: {"top-k/rows/": torch.tensor([0, 4], dtype=torch.int32)},
    "a class that is there already": lambda t: {"top-k/rows/": torch.tensor([0, 3], dtype=torch.int32)},
    "a count too few": lambda t: {"top-k/rows//counts": t["top-k/rows//counts"][:1]},
    "negative counts": lambda t: {"top-k/rows//counts": -t["top-k/rows//counts"]},
    "counts of another type": lambda t: {"top-k/rows//counts": t["top-k/rows//counts"].double()},
    "numbers of another type": lambda t: {"prototypes/": t["prototypes/"].double()},
    "too many numbers": lambda t: {"prototypes/": torch.ones(1, 99)},
}


@pytest.mark.parametrize("lie", LIES)
def test_a_message_that_lies_about_what_it_left_out_is_refused(lie):
    gone, _ = compressed([TopK(0.1)], message(6, near=SENT), departure(bank=SENT.bank, weights=SENT.weights))
    false = replace(gone, tensors={**gone.tensors, **LIES[lie](gone.tensors)})
    with pytest.raises(WireError, match="client 3"):
        restored([TopK(0.1)], wire.decode(wire.encode(false)), "client 3", SENT)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_a_message_holds_it_is_read_or_refused(data):
    """Some entries of an honest message are replaced, removed or exchanged."""
    chosen = data.draw(st.sampled_from([[TopK(0.1)], [Changed(0.3), TopK(0.2), Quantise(8)], [TopK(0.3), Float16()]]))
    gone, _ = compressed(chosen, message(7, near=SENT), departure(bank=SENT.bank, weights=SENT.weights))
    tensors, weights = dict(gone.tensors), dict(gone.weights)
    dtypes = [torch.float32, torch.float16, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([tensors, weights]))
        name = data.draw(st.sampled_from(sorted(place) or ["a"]))
        action = data.draw(st.sampled_from(["remove", "replace", "move"]))
        if action == "remove":
            place.pop(name, None)
        elif action == "move" and name in place:
            place[data.draw(st.sampled_from(sorted([*tensors, "top-k/bank/low", "changed/", "prototypes/x"])))] = place[
                name
            ]
        else:
            shape = data.draw(st.lists(st.integers(0, 9), max_size=3))
            fill = data.draw(st.sampled_from([0, 1, -1, 100]))
            place[name] = torch.full(shape, fill).to(data.draw(st.sampled_from(dtypes)))
    form = data.draw(st.sampled_from([gone.bank, None, replace(gone.bank, means=gone.bank.means.to(torch.float16))]))
    try:
        back = restored(
            chosen,
            wire.decode(wire.encode(replace(gone, bank=form, tensors=tensors, weights=weights))),
            "client 3",
            SENT,
        )
    except WireError as refused:
        assert "client 3" in str(refused) or "message" in str(refused)
    else:
        assert isinstance(back, Bundle)


def test_a_site_that_sends_nonsense_is_dropped_and_named():
    federation = build(resolve("fedproto", keys("fedproto", filters="top-k?share=0.2")).with_engine(LOOP))[1]
    original = federation.engine.train

    def train(downloads):
        for client, outcome in original(downloads):
            if client == 2 and downloads.round == 2:
                content = wire.decode(outcome.upload)
                places = {n: v + 100 if n.startswith("top-k/bank") else v for n, v in content.tensors.items()}
                outcome = replace(outcome, upload=wire.encode(replace(content, tensors=places)))
            yield client, outcome

    federation.engine.train = train
    assert [list(record.dropped) for record in federation] == [[], [2], []]


def test_all_compressing_filters_are_registered():
    assert {"float16", "bfloat16", "quantise", "top-k", "changed"} <= set(Filter.registry.names())


def test_the_table_in_the_documentation_is_that_of_the_file():
    rows = json.loads((ROOT / "docs" / "results" / "compression.json").read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    for row in rows:
        filters = row["filters"] if row["filters"] == "none" else f"`{row['filters']}`"
        figures = f"{100 * row['accuracy']:.1f} ± {100 * row['accuracy_std']:.1f}"
        sizes = f"{row['payload_up'] / 1e3:,.0f} | {row['bytes_up'] / 1e3:,.0f}"
        assert f"| {row['method']} | {filters} | {figures} | {sizes} | {100 * row['error']:.2f} % |" in text
