"""Secure sums: equal to plain sums whoever drops out, and nothing that the server sees of a client tells of its upload."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from protofed.bank import PrototypeBank
from protofed.errors import ProtofedError
from protofed.parts.reduce import Mean, Running, Sums, Upload
from protofed.privacy import masks
from protofed.privacy.fixed import LIMIT, MOST_CLIENTS, STEP, Layout
from protofed.privacy.party import Party
from protofed.privacy.protocol import (
    ANSWER,
    HEADER,
    NUMBER,
    REQUEST,
    STEPS,
    Rules,
    SecureFailure,
    digest,
    frame,
    unframe,
)
from protofed.privacy.secure import LocalParties, Total, ring, secure_total
from protofed.wire import Bundle

ROOT = Path(__file__).parent.parent
CONTEXT = b"run 1, round 1"
LENGTH = 5


def drawn(clients, length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    return {client: rng.integers(0, 2**64, length, dtype=np.uint64) for client in clients}


def plain(vectors, contributors, length=LENGTH):
    """The sum modulo 2⁶⁴ in Python's own integers."""
    return [sum(int(vectors[client][at]) for client in contributors) % 2**64 for at in range(length)]


def run(vectors, rules=None, absent=None, change=None, length=LENGTH) -> tuple[Total, LocalParties, list]:
    """A secure sum in this process; `change(step, client, answer)` may change what arrives, None for nothing."""
    parties = LocalParties(vectors, length, CONTEXT, rules, absent)
    transcript: list[tuple[str, int, bytes, bytes]] = []

    def ask(step, messages):
        for client, answer in parties.ask(step, messages):
            sent = answer if change is None else change(step, client, answer)
            if sent is not None:
                transcript.append((step, client, messages[client], sent))
                yield client, sent

    return secure_total(ask, list(vectors), length, CONTEXT, rules), parties, transcript


def third(clients, seed):
    """A third of the clients, drawn at random."""
    clients = sorted(clients)
    return set(np.random.default_rng(seed).permutation(clients)[: len(clients) // 3].tolist())


# --- fixed point ------------------------------------------------------------------------------------------------------
values = st.floats(-LIMIT, LIMIT, allow_nan=False, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(values, st.floats(-LIMIT, LIMIT), st.integers(0, 2**24)), min_size=1, max_size=20))
def test_a_sum_of_words_is_the_plain_sum_to_half_a_step_a_client(rows):
    clients = [
        Sums({"b": torch.tensor([single]), "a": torch.tensor([[double], [single]], dtype=torch.float64)}, {"n": count})
        for single, double, count in rows
    ]
    layout = Layout.of(clients[0])
    with np.errstate(over="ignore"):
        total = sum((layout.pack(client) for client in clients), np.zeros(layout.length, np.uint64))
    exact = [sum(Fraction(row[which]) for row in rows) for which in (1, 0, 0, 2)]  # a, a, b, n
    found = [Fraction(int(word)) * Fraction(STEP) for word in total.view(np.int64)]
    for wanted, got in zip(exact, found, strict=True):
        assert abs(got - wanted) <= len(rows) * Fraction(STEP) / 2
    sums = layout.unpack(total)
    assert sums.tensors["a"].dtype == torch.float64 and sums.tensors["a"].shape == (2, 1)
    assert sums.tensors["b"].dtype == torch.float32 and sums.numbers["n"] == float(found[3])
    assert sums.tensors["a"][0, 0].item() == pytest.approx(float(found[0]), rel=2**-52)


def test_the_largest_sum_does_not_wrap():
    layout = Layout.of(Sums({"low": torch.tensor([-LIMIT]), "high": torch.tensor([LIMIT])}))
    word = layout.pack(Sums({"low": torch.tensor([-LIMIT]), "high": torch.tensor([LIMIT])}))
    total = layout.unpack(word * np.uint64(MOST_CLIENTS))
    assert total.tensors["high"].item() == LIMIT * MOST_CLIENTS == -total.tensors["low"].item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), LIMIT + 2, -LIMIT * 2, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_value_out_of_range_is_refused_by_name(value, dtype):
    layout = Layout.of(Sums({"means/": torch.zeros(3, dtype=dtype)}, {"share": 0.0}))
    with pytest.raises(ProtofedError, match="means/"):
        layout.pack(Sums({"means/": torch.tensor([0.0, value, 0.0], dtype=dtype)}))
    with pytest.raises(ProtofedError, match="share"):
        layout.pack(Sums(numbers={"share": value}))


def test_a_layout_is_held_to():
    layout = Layout.of(Sums({"a": torch.zeros(2, 2)}, {"n": 0.0}))
    with pytest.raises(ProtofedError, match="'b'"):
        layout.pack(Sums({"b": torch.zeros(1)}))
    with pytest.raises(ProtofedError, match=r"\(4,\)"):
        layout.pack(Sums({"a": torch.zeros(4)}))
    with pytest.raises(ProtofedError, match="6 words"):
        layout.unpack(np.zeros(6, np.uint64))
    assert not layout.pack(Sums()).any()
    others = [
        Layout.of(Sums({"a": torch.zeros(4, 1)}, {"n": 0.0})),
        Layout.of(Sums({"a": torch.zeros(2, 2, dtype=torch.float64)}, {"n": 0.0})),
        Layout.of(Sums({"a": torch.zeros(2, 2)}, {"m": 0.0})),
    ]
    assert len({layout.fingerprint(), *(other.fingerprint() for other in others)}) == 4
    assert layout.fingerprint() == Layout.of(Sums({"a": torch.ones(2, 2)}, {"n": 3.0})).fingerprint()


@pytest.mark.parametrize("by", ["size", "holders", "directions"])
def test_an_additive_reduce_finishes_the_same_from_a_secure_sum(by):
    """Of class sums with counts and, where the rule takes them, of weights; one client lacks classes, one lacks weights."""
    rng = torch.Generator().manual_seed(0)
    uploads = []
    for client in range(5):
        counts = torch.randint(0, 3, (4,), generator=rng)
        content = Bundle(bank=PrototypeBank(torch.randn(4, 3, generator=rng), counts), scalars={"loss": 0.1 * client})
        if by != "directions" and client != 2:
            content = Bundle(
                bank=content.bank, weights={"w": torch.randn(2, 2, generator=rng)}, scalars=content.scalars
            )
        uploads.append(Upload(client, 10.0 + client, content))
    rule = Mean(by)
    lifted = {}
    for upload in uploads:
        lifted[upload.client] = Sums()
        rule.lift([upload], lifted[upload.client])
    layout = Layout.of(lifted[0])
    vectors = {client: layout.pack(sums) for client, sums in lifted.items()}
    total, _, _ = run(vectors, length=layout.length)
    secure = rule.finish(layout.unpack(total.values), [], {})
    running = Running(rule)
    running.add(uploads)
    wanted = running.result()
    torch.testing.assert_close(secure.bank.means, wanted.bank.means, rtol=1e-5, atol=1e-6)
    assert secure.bank.counts.equal(wanted.bank.counts) and secure.bank.counts.dtype == wanted.bank.counts.dtype
    assert secure.weights.keys() == wanted.weights.keys() == (set() if by == "directions" else {"w"})
    for name, value in wanted.weights.items():
        torch.testing.assert_close(secure.weights[name], value, rtol=1e-5, atol=1e-6)
    assert secure.scalars == pytest.approx(wanted.scalars, abs=STEP) and secure.share == wanted.share


# --- totals, whoever drops out ----------------------------------------------------------------------------------------
@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 2**32 - 1), min_size=3, max_size=9), st.integers(0, 20), st.integers(0, 1000))
def test_a_total_is_the_sum_of_all_vectors(clients, length, seed):
    vectors = drawn(clients, length, seed)
    total, _, transcript = run(vectors, length=length)
    assert total.values.tolist() == plain(vectors, clients, length)
    assert total.contributors == tuple(sorted(clients)) and not total.dropped
    for client in clients:
        mine = [(request, answer) for _, who, request, answer in transcript if who == client]
        assert total.down[client] == sum(len(request) for request, _ in mine)
        assert total.up[client] == sum(len(answer) for _, answer in mine)


def test_vectors_longer_than_a_block_are_masked_to_their_end():
    length = 2 * masks.BLOCK + 3
    vectors = drawn(range(3), length)
    total, _, transcript = run(vectors, length=length)
    with np.errstate(over="ignore"):
        assert np.array_equal(total.values, vectors[0] + vectors[1] + vectors[2])
    for step, client, _, answer in transcript:
        if step == "masked":
            sent = np.frombuffer(answer, "<u8", offset=HEADER.size)
            assert len(np.unique(sent - vectors[client])) == length  # no word of the mask is zero or comes twice


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("clients", [3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 17, 20, 23, 24, 30, 40])
def test_a_third_may_drop_out_at_any_step(step, clients):
    vectors = drawn(range(clients), seed=clients)
    gone = third(vectors, clients)
    total, _, _ = run(vectors, Rules(least=2), {step: gone})
    there = set(vectors) if step == "unmask" else set(vectors) - gone
    assert total.contributors == tuple(sorted(there))
    assert total.values.tolist() == plain(vectors, there)
    assert set(total.dropped) == gone and all(reason == f"{step}: no answer" for reason in total.dropped.values())


@pytest.mark.parametrize("clients", [9, 16, 27, 40])
def test_a_third_may_drop_out_at_every_step_where_the_threshold_is_low(clients):
    """Of those that are still there: 8/27 of the ring are left in the end, so a majority could not be asked for."""
    vectors, left, absent = drawn(range(clients)), set(range(clients)), {}
    for number, step in enumerate(STEPS):
        absent[step] = third(left, number)
        left -= absent[step]
    total, _, _ = run(vectors, Rules(least=2, degree=40, share=0.1), absent)
    there = left | absent["unmask"]
    assert total.contributors == tuple(sorted(there)) and total.values.tolist() == plain(vectors, there)
    assert set(total.dropped) == set(vectors) - left


@pytest.mark.parametrize("step", STEPS)
def test_too_many_drop_out_and_there_is_no_total(step):
    with pytest.raises(SecureFailure, match=r"no secure sum in this round: [1-9]") as failure:
        run(drawn(range(10)), absent={step: range(8)})
    assert failure.value.dropped.keys() >= set(range(8)) and failure.value.up and failure.value.down


@pytest.mark.parametrize("step", ["masked", "unmask"])
def test_one_fewer_than_the_threshold_is_too_few_and_the_threshold_is_enough(step):
    threshold = Rules().threshold(9)
    assert threshold == 5
    vectors = drawn(range(9))
    total, _, _ = run(vectors, absent={step: range(9 - threshold)})
    assert total.values.tolist() == plain(vectors, total.contributors)
    with pytest.raises(SecureFailure, match=r"4 of 9 clients .* 5 are needed|4 holders"):
        run(vectors, absent={step: range(9 - threshold + 1)})


def test_fewer_than_the_minimum_have_no_total():
    with pytest.raises(SecureFailure, match="2 clients are left after 'keys'; at least 3"):
        run(drawn(range(2)))
    with pytest.raises(SecureFailure, match="at least 4"):
        run(drawn(range(5)), Rules(least=4), {"masked": [0, 1]})
    with pytest.raises(ProtofedError, match="least=1"):
        Rules(least=1)


# --- the graph --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", [2, 3, 16, 23, 24, 25, 40, 101])
def test_a_ring_is_symmetric_and_as_the_rules_say(clients):
    rules = Rules()
    order = np.random.default_rng(0).permutation(clients).tolist()
    holders = ring(order, rules.neighbours(clients))
    for client, group in holders.items():
        assert client in group and len(set(group)) == len(group) == rules.neighbours(clients) + 1
        assert list(group) == sorted(group) and all(client in holders[other] for other in group)
    whole = rules.neighbours(clients) == clients - 1
    assert whole == (clients <= 23)
    assert rules.threshold(clients) > (rules.neighbours(clients) + 1) * (0.5 if whole else 0.25)


@pytest.mark.parametrize("clients", [24, 33, 40, 64, 100, 128, 200, 256, 510, 1000, 5000, MOST_CLIENTS])
def test_a_ring_outlives_the_loss_of_a_third(clients):
    """The chance that some secret is lost with a third of the clients, by a bound over all of them: one in 100 000."""
    rules, gone = Rules(), clients // 3
    neighbours, threshold = rules.neighbours(clients), rules.threshold(clients)
    present = stats.hypergeom(clients - 1, clients - 1 - gone, neighbours).cdf(threshold - 2)
    absent = stats.hypergeom(clients - 1, clients - gone, neighbours).cdf(threshold - 1)
    assert (clients - gone) * present + gone * absent < 1e-5


# --- what the server sees ---------------------------------------------------------------------------------------------
def sent_by(client, transcript, step):
    return next(answer for name, who, _, answer in transcript if name == step and who == client)


@pytest.mark.parametrize("value", [0, 1, 2**48, 2**64 - 1])
def test_masked_words_are_uniform_whatever_the_upload(value):
    length = 4000
    vectors = {client: np.full(length, value, np.uint64) for client in range(4)}
    _, _, transcript = run(vectors, length=length)
    words = np.frombuffer(sent_by(2, transcript, "masked"), "<u8", offset=HEADER.size)
    for place in range(8):
        counts = np.bincount(words.view(np.uint8)[place::8], minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("value", [0, 2**48])
def test_a_vector_stays_masked_with_all_that_the_server_can_reconstruct(value):
    """Of a client whose vector has arrived, the self-mask; of one whose vector is late, the masks in common with others."""
    length = 4000
    vectors = {client: np.full(length, value, np.uint64) for client in range(4)}
    parties = LocalParties(vectors, length, CONTEXT)
    secrets, sent, keys = {}, {}, {}

    def ask(step, messages):
        for client, answer in parties.ask(step, messages):
            if step == "keys":
                keys[client] = answer[HEADER.size + 32 :]
            if step == "masked":
                secrets[client] = parties.parties[client]._secrets
                sent[client] = np.frombuffer(answer, "<u8", offset=HEADER.size).copy()
                if client == 3:
                    continue  # arrives after all others are unmasked
            yield client, answer

    assert secure_total(ask, range(4), length, CONTEXT).contributors == (0, 1, 2)
    where = digest(CONTEXT)
    masks.add_masks(sent[0], [(masks.self_key(secrets[0].self_seed, where), True)])
    late = masks.mask_key(secrets[3].mask_seed, where)
    common = [masks.pair_key(masks.agree(late, keys[other]), where, 3, other) for other in range(3)]
    masks.add_masks(sent[0], [(common[0], True)])
    masks.add_masks(sent[3], [(key, False) for key in common])
    for left in (sent[0], sent[3]):
        for place in range(8):
            counts = np.bincount(left.view(np.uint8)[place::8], minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-6
    masks.add_masks(sent[3], [(masks.self_key(secrets[3].self_seed, where), True)])  # what neither side may have
    assert np.array_equal(sent[3], vectors[3])


def correlations(rows, upload):
    """Of each column with the upload."""
    columns = np.array(rows, dtype=float)
    columns = (columns - columns.mean(0)) / columns.std(0)
    return np.abs(columns.T @ ((upload - upload.mean()) / upload.std()) / len(upload))


def test_nothing_that_a_client_sends_correlates_with_its_upload():
    """Over many rounds: no byte of any answer of client 1 goes with what it uploads, zeros or large numbers."""
    rounds, length = 300, 8
    rng = np.random.default_rng(0)
    upload = rng.integers(0, 2, rounds)
    masked, bare = [], []
    for large in upload:
        vectors = {client: np.zeros(length, np.uint64) for client in range(3)}
        vectors[1] = np.full(length, 2**48 if large else 0, np.uint64) + rng.integers(0, 2**49, length, dtype=np.uint64)
        _, _, transcript = run(vectors, length=length)
        answers = [sent_by(1, transcript, step)[HEADER.size :] for step in STEPS]
        masked.append(np.frombuffer(b"".join(answers), np.uint8))
        bare.append(vectors[1].view(np.uint8)[6::8])
    assert len(set(map(len, masked))) == 1
    bound = stats.norm.isf(1e-6 / len(masked[0])) / np.sqrt(rounds)
    assert correlations(masked, upload).max() < bound
    assert correlations(bare, upload).min() > bound  # a vector without its masks would be found, noisy as it is


def test_fewer_shares_than_the_threshold_tell_nothing_about_a_secret():
    """The shares of two secrets have the same distribution, and every secret fits to them."""
    first, second = bytes(16), bytes([255] * 16)
    counts = {secret: np.zeros(256) for secret in (first, second)}
    for secret, found in counts.items():
        for _ in range(300):
            below = masks.split(secret, 3, 5)[:2]
            found += np.bincount(np.frombuffer(b"".join(below), np.uint8), minlength=256)
    assert stats.chi2_contingency(np.array(list(counts.values()))).pvalue > 1e-6
    shares = masks.split(first, 3, 5)
    assert masks.combine([(1, shares[0]), (4, shares[3]), (5, shares[4])]) == first
    assert masks.combine([(1, shares[0]), (4, shares[3])]) != first


def test_every_purpose_round_and_direction_has_a_key_of_its_own():
    """AES-GCM is used with a constant nonce, so the two directions between two clients must not have one key."""
    one, other, secret = digest(b"round 1"), digest(b"round 2"), bytes(32)
    keys = [
        masks.derive(secret, p, r, *c) for p in ("seal", "mask") for r in (one, other) for c in ((), (1, 2), (2, 1))
    ]
    keys += [masks.self_key(secret, one), masks.commitment(secret, one), masks.pair_key(secret, one, 1, 2)]
    assert len(set(keys)) == len(keys) == 15
    assert masks.pair_key(secret, one, 1, 2) == masks.pair_key(secret, one, 2, 1)
    sealed = masks.seal(secret, bytes(32), one, 1, 2)
    assert masks.unseal(secret, sealed, one, 1, 2) == bytes(32) and len(sealed) == masks.SEALED
    assert masks.seal(secret, bytes(32), one, 2, 1)[:32] != sealed[:32]
    for wrong in ((other, 1, 2), (one, 2, 1), (one, 3, 2), (one, 1, 3)):
        with pytest.raises(ValueError, match="changed on the way"):
            masks.unseal(secret, sealed, *wrong)


def test_two_rounds_with_the_same_uploads_have_nothing_in_common():
    vectors = drawn(range(3))
    pieces = []
    for _ in range(2):
        _, _, transcript = run(vectors)
        pieces.append(
            {answer[at : at + 16] for _, _, _, answer in transcript for at in range(HEADER.size, len(answer) - 15)}
        )
    assert not pieces[0] & pieces[1]


def test_the_server_gets_one_share_of_each_owner_and_never_both():
    """Client 0 masks and leaves: the shares that the others give are those of its mask key alone."""
    vectors = drawn(range(5))
    parties = LocalParties(vectors, LENGTH, CONTEXT)
    held = {}

    def ask(step, messages):
        for client, answer in parties.ask(step, messages):
            if step == "masked":
                secrets = parties.parties[client]._secrets
                held[client] = dict(secrets.shares), secrets.self_seed, secrets.mask_seed
            if step == "unmask":
                given = {o: answer[HEADER.size + 16 * o : HEADER.size + 16 * (o + 1)] for o in range(5)}
                for owner, share in given.items():
                    both = held[client][0][owner]
                    assert share == (both[16:] if owner == 0 else both[:16])
                assert parties.parties[client]._secrets is None
            if not (step == "masked" and client == 0):  # what client 0 sends is lost on the way
                yield client, answer

    total = secure_total(ask, range(5), LENGTH, CONTEXT)
    assert total.contributors == (1, 2, 3, 4) and total.values.tolist() == plain(vectors, [1, 2, 3, 4])


# --- what a party refuses ---------------------------------------------------------------------------------------------
class Table:
    """Parties that have come to a step, and the honest request of that step, for a server that errs from there on."""

    def __init__(self, clients, step, rules=None):
        self.parties = LocalParties(drawn(range(clients)), LENGTH, CONTEXT, rules)
        self.requests: dict[str, dict[int, bytes]] = {}
        self.answers: dict[str, dict[int, bytes]] = defaultdict(dict)

        def ask(name, messages):
            self.requests[name] = dict(messages)
            if name == step:
                return
            for client, answer in self.parties.ask(name, messages):
                self.answers[name][client] = answer
                yield client, answer

        with pytest.raises(SecureFailure):
            secure_total(ask, range(clients), LENGTH, CONTEXT, rules)
        self.step = step

    def __getitem__(self, client) -> Party:
        return self.parties.parties[client]

    def request(self, client=0):
        return self.requests[self.step][client]

    def refuses(self, message, match, client=0, step=None):
        party = self[client]
        answer = party.answer(step or self.step, message)
        assert party.refusal is not None and party._secrets is None
        with pytest.raises(ValueError, match=match):
            unframe(answer, step or self.step, ANSWER, client, digest(CONTEXT))
        assert party.answer(self.step, self.request(client)) != b"" and party.refusal  # it does not come back
        with pytest.raises(ValueError, match="refused"):
            unframe(party.answer(self.step, self.request(client)), self.step, ANSWER, client, digest(CONTEXT))


def request(step, count, *entries, client=0, context=CONTEXT):
    return frame(step, REQUEST, client, digest(context), count, b"".join(entries))


def entries(message, width):
    body = message[HEADER.size :]
    return [body[at : at + width] for at in range(0, len(body), width)]


PUBLIC, SEALED = 4 + 64, 4 + masks.SEALED


def test_a_party_refuses_a_list_of_neighbours_that_is_none():
    def listed():
        table = Table(5, "shares")
        return table, entries(table.request(), PUBLIC)

    table, good = listed()
    table.refuses(request("shares", 5, *good[1:], good[0]), "ascending")
    table, good = listed()
    table.refuses(request("shares", 5, *good[:4]), "entries")  # one neighbour is missing
    table, good = listed()
    table.refuses(request("shares", 5, good[1], *good[1:]), "ascending")  # itself missing, another one twice
    table, good = listed()
    table.refuses(request("shares", 4, *good[1:]), "its own keys")  # itself missing
    table, good = listed()
    table.refuses(request("shares", 5, good[0], NUMBER.pack(1) + good[2][4:], *good[2:]), "key twice")  # a Sybil's copy
    table, good = listed()
    table.refuses(request("shares", 5, good[0][:4] + good[1][4:], *good[1:]), "its own keys")
    table, good = listed()
    table.refuses(request("shares", 5, good[0], good[1][:4] + bytes(32) + good[1][36:], *good[2:]), "low order")
    table, good = listed()
    table.refuses(request("shares", 2, *good[:2]), "2 clients take part where this client requires 3")
    table, good = listed()
    table.refuses(request("shares", 40, *good), "entries")  # so many clients would have more neighbours
    table, good = listed()
    table.refuses(request("shares", MOST_CLIENTS + 1, *good), "up to 16384")


def test_a_party_refuses_too_few_or_strange_shares():
    good = entries((table := Table(5, "masked")).request(), SEALED)
    assert [NUMBER.unpack_from(entry)[0] for entry in good] == [1, 2, 3, 4]
    table.refuses(request("masked", 5, good[0]), "2 holders .* threshold is 3")
    good = entries((table := Table(5, "masked")).request(), SEALED)
    table.refuses(request("masked", 2, *good), "requires 3")
    good = entries((table := Table(5, "masked")).request(), SEALED)
    table.refuses(request("masked", 5, *good, NUMBER.pack(9) + good[0][4:]), "no neighbour")
    good = entries((table := Table(5, "masked")).request(), SEALED)
    table.refuses(request("masked", 5, good[0], *good), "ascending")
    good = entries((table := Table(5, "masked")).request(), SEALED)
    table.refuses(request("masked", 6, *good), "no neighbour")  # more clients than before
    good = entries((table := Table(5, "masked")).request(), SEALED)
    table.refuses(
        request("masked", 5, good[1][:4].replace(b"\2", b"\1") + good[1][4:], *good[1:]), "client 1 were changed"
    )


def test_a_party_refuses_to_unmask_for_a_list_that_would_open_a_vector():
    names = [NUMBER.pack(client) for client in range(5)]
    Table(5, "unmask").refuses(request("unmask", 4, *names[1:]), "lists this client as dropped")
    Table(5, "unmask").refuses(request("unmask", 5, *names[:2]), "2 holders .* threshold is 3")
    Table(5, "unmask").refuses(request("unmask", 2, *names[:3]), "requires 3")
    Table(5, "unmask").refuses(request("unmask", 5, *names, NUMBER.pack(7)), "sent no shares")
    Table(5, "unmask").refuses(request("unmask", 5, names[0], *names), "ascending")
    Table(5, "unmask").refuses(request("unmask", 6, *names), "sent no shares")


def test_a_party_unmasks_once_whatever_the_server_says_the_second_time():
    """Client 4 is told to be there in one list and gone in the other: no holder gives both of its shares."""
    table = Table(5, "unmask")
    first = table.request(1)
    answer = table[1].answer("unmask", first)
    assert table[1].answer("unmask", first) == answer and table[1].refusal is None  # sent twice by the network
    names = [NUMBER.pack(client) for client in range(4)]
    table.refuses(request("unmask", 4, *names, client=1), "where 'nothing' comes next", client=1)


def test_two_lists_at_once_do_not_open_a_client():
    """A server that tells some holders that client 4 has left, and others that it has not, gets a majority of neither."""
    table = Table(5, "unmask")
    without = [NUMBER.pack(client) for client in range(4)]
    told = {0: True, 1: True, 2: False, 3: False}
    shares = {True: [], False: []}
    for client, gone in told.items():
        message = request("unmask", 4, *without, client=client) if gone else table.request(client)
        body = table[client].answer("unmask", message)[HEADER.size :]
        shares[gone].append((client + 1, body[16 * 4 : 16 * 5]))
    assert table[4].answer("unmask", table.request(4)) and all(
        len(got) < Rules().threshold(5) for got in shares.values()
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_party_refuses_messages_of_other_rounds_runs_clients_and_steps(step):
    message = Table(4, step).request()
    body, count = message[HEADER.size :], HEADER.unpack(message[: HEADER.size])[6]
    Table(4, step).refuses(request(step, count, body, context=b"run 1, round 2"), "another run or round")
    Table(4, step).refuses(request(step, count, body, context=b"run 2, round 1"), "another run or round")
    Table(4, step).refuses(request(step, count, body, client=3), "another step or client")
    Table(4, step).refuses(request(STEPS[STEPS.index(step) - 1], count, body), "another step or client")
    Table(4, step).refuses(message, "comes next", step=STEPS[STEPS.index(step) - 1])
    Table(4, step).refuses(frame(step, ANSWER, 0, digest(CONTEXT), count, body), "wrong direction")
    Table(4, step).refuses(b"", "0 bytes")
    Table(4, step).refuses(message[:20], "20 bytes")
    Table(4, step).refuses(b"X" + message[1:], "not a message")
    Table(4, step).refuses(message + b"\0", "bytes")
    Table(4, step).refuses(message[:-1], "bytes")


@pytest.mark.parametrize(("step", "reason"), [("shares", "its own keys"), ("masked", "changed on the way")])
def test_a_replayed_request_is_refused_even_where_run_and_round_are_named_the_same(step, reason):
    """Keys are fresh, so neither an old list of keys nor an old share fits."""
    Table(4, step).refuses(Table(4, step).request(), reason)


def test_a_party_refuses_another_length_and_a_vector_that_does_not_fit():
    party = Party(0, CONTEXT, 7, lambda: np.zeros(7, np.uint64))
    party.answer("keys", request("keys", 8))
    assert "8 words where this client has 7" in party.refusal

    def out_of_range():
        raise ProtofedError("'means/' holds 1e+30")

    vectors = drawn(range(4))
    parties = LocalParties(vectors, LENGTH, CONTEXT)
    parties.parties[2]._vector = out_of_range
    parties.parties[3]._vector = lambda: np.zeros(LENGTH + 1, np.uint64)
    with pytest.raises(SecureFailure) as failure:
        secure_total(parties.ask, range(4), LENGTH, CONTEXT)
    assert failure.value.dropped[2] == "masked: refused: 'means/' holds 1e+30"
    assert "6 words" in failure.value.dropped[3]


# --- what the server drops --------------------------------------------------------------------------------------------
BROKEN = {
    "empty": lambda answer: b"",
    "short": lambda answer: answer[:-1],
    "long": lambda answer: answer + b"\0",
    "header alone": lambda answer: answer[: HEADER.size],
    "letters": lambda answer: b"XXXX" + answer[4:],
    "version": lambda answer: answer[:4] + b"\x09" + answer[5:],
    "step": lambda answer: answer[:5] + b"\x09" + answer[6:],
    "sender": lambda answer: answer[:8] + NUMBER.pack(7) + answer[12:],
    "count": lambda answer: answer[:12] + NUMBER.pack(2**32 - 1) + answer[16:],
    "round": lambda answer: answer[:16] + bytes(16) + answer[32:],
    "text": lambda answer: "text",
    "nothing": lambda answer: 17,
    "refusal": lambda answer: frame("keys", 3, 0, digest(CONTEXT), 0, b"\x1b[31m\n\xff" * 999),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("damage", BROKEN)
def test_a_malformed_answer_drops_its_client_and_never_raises(step, damage):
    vectors = drawn(range(5))

    def change(name, client, answer):
        return BROKEN[damage](answer) if name == step and client == 0 else answer

    total, _, _ = run(vectors, change=change)
    assert list(total.dropped) == [0] and total.dropped[0].startswith(f"{step}: ")
    assert total.dropped[0].isprintable() and len(total.dropped[0]) < 500
    there = range(0 if step == "unmask" else 1, 5)
    assert total.contributors == tuple(there) and total.values.tolist() == plain(vectors, there)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(STEPS), st.binary(max_size=200))
def test_any_bytes_are_an_answer_that_drops_its_client(step, junk):
    vectors = drawn(range(4))
    total, _, _ = run(vectors, change=lambda name, client, answer: junk if (name, client) == (step, 3) else answer)
    assert list(total.dropped) == [3] and total.values.tolist() == plain(vectors, total.contributors)


def test_keys_that_open_or_copy_others_are_dropped():
    vectors, first = drawn(range(5)), {}

    def change(name, client, answer):
        if name == "keys":
            first.setdefault("keys", answer[HEADER.size :])
            if client == 1:
                return answer[: HEADER.size] + first["keys"]
            if client == 2:
                return answer[: HEADER.size] + bytes(64)
        return answer

    total, _, _ = run(vectors, change=change)
    assert "already" in total.dropped[1] and "low order" in total.dropped[2] and total.contributors == (0, 3, 4)


def test_tampered_shares_make_their_receivers_drop_out():
    vectors = drawn(range(7))

    def change(name, client, answer):
        if (name, client) == ("shares", 6):  # the shares for client 0
            at = HEADER.size + masks.COMMITMENT
            return answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]
        return answer

    total, _, _ = run(vectors, change=change)
    assert total.dropped == {
        0: "masked: refused: the shares of client 6 were changed on the way, or are of another round"
    }
    assert total.values.tolist() == plain(vectors, range(1, 7))


def test_a_wrong_share_gives_no_total_rather_than_a_wrong_one():
    def change(name, client, answer):
        return answer[:-1] + bytes([answer[-1] ^ 1]) if (name, client) == ("unmask", 0) else answer

    with pytest.raises(SecureFailure, match="client 4's self-mask do not fit together"):
        run(drawn(range(5)), change=change)
    with pytest.raises(SecureFailure, match="client 4's mask key do not fit together"):
        run(drawn(range(5)), absent={"masked": [4]}, change=change)


def test_answers_of_strangers_and_second_answers_do_not_count():
    vectors = drawn(range(4))
    parties = LocalParties(vectors, LENGTH, CONTEXT)

    def ask(step, messages):
        for client, answer in parties.ask(step, messages):
            yield from [(client, answer), (client, answer), (77, answer)]

    total = secure_total(ask, range(4), LENGTH, CONTEXT)
    assert total.values.tolist() == plain(vectors, range(4)) and not total.dropped and 77 not in total.up


def test_what_cannot_be_a_secure_sum_is_said_in_one_line():
    parties = LocalParties(drawn(range(3)), LENGTH, CONTEXT)
    with pytest.raises(ProtofedError, match="different numbers"):
        secure_total(parties.ask, [1, 1, 2], LENGTH, CONTEXT)
    with pytest.raises(ProtofedError, match="up to 16384"):
        secure_total(parties.ask, range(MOST_CLIENTS + 1), LENGTH, CONTEXT)
    with pytest.raises(ProtofedError, match="no step 'sending'"):
        LocalParties({}, LENGTH, CONTEXT, absent={"sending": [1]})
    with pytest.raises(ProtofedError, match="share=1"):
        Rules(share=1)
    with pytest.raises(ProtofedError, match="degree=1"):
        Rules(degree=1)


def test_a_missing_package_is_named():
    code = """
import sys
from protofed.errors import ProtofedError
for package in ("Crypto", "cryptography"):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None
    try:
        import protofed.privacy.secure
    except ProtofedError as error:
        print(error)
    del sys.modules[package]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (
        done.stdout.splitlines()
        == ["secure sums need cryptography and pycryptodome: pip install 'protofed[privacy]'"] * 2
    )


def test_the_page_has_the_numbers_of_the_file_and_the_bytes_of_the_protocol():
    page = (ROOT / "docs" / "secure-sums.md").read_text(encoding="utf-8")
    measured = json.loads((ROOT / "docs" / "results" / "secure.json").read_text(encoding="utf-8"))
    rows, compared = measured["sum"], measured["round"]
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "secure.py"))
    assert benchmark["table"](rows) in page and benchmark["round_table"](compared) in page
    assert compared["largest ratio"] < 2 and (compared["clients"], compared["classes"], compared["dim"]) == (
        100,
        100,
        512,
    )
    total, _, _ = run(drawn(range(30)))
    neighbours = Rules().neighbours(30)
    assert set(total.up.values()) == {8 * LENGTH + 64 * neighbours + 240} and "8·L + 64·k + 240" in page
    assert set(total.down.values()) == {124 * neighbours + 200} and "124·k + 200" in page
    assert rows[0]["bytes up"] == 413368 and "413 368" in page and rows[0]["bytes down"] == 3920 and "3 920" in page
