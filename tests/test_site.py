"""Sites that know nothing but messages and their own folder give the plain loop's bits, for every method."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protofed import methods, wire
from protofed.evaluate import Confusion, Scores, Snapshot
from protofed.experiment.architectures import architectures
from protofed.experiment.build import build, prepare_data, views_of
from protofed.experiment.settings import resolve
from protofed.federation.choose import EngineInputs
from protofed.federation.rounds import Federation
from protofed.federation.site import FolderStates, Site, SiteEngine, bundle_of, opened, scores_of, sealed
from protofed.wire import WireError
from support.engines import LOOP
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for


def settings_of(method, **more):
    changes = {**SMALL, "data": blobs(per_class=60), "rounds": 3, "participation": 0.8, "epochs": 2, "shot": 16}
    changes |= {"labels": "client", "labels_per_class": 4, **labels_for(method), **more}
    if method == "fedarpl":  # a phase a round
        changes |= {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0}
    if method == "fedsap":
        changes |= {"alignment": {"start": 0, "end": 2}, "supervised_rounds": 1}
    return resolve(method, changes)


def plan_of(settings):
    data = prepare_data(settings)
    method = settings.method
    if method.feed.augments or (method.teacher is not None and method.teacher.feed.augments):
        data = replace(data, augmentation=views_of(data, settings))
    mix = architectures(settings, data)
    g = settings.general
    return EngineInputs(method, mix.specs, mix.owner, data, settings.local, g.seed, g.initial, len(data.clients))


class Restarted:
    """A site that is started anew for every message, from its folder alone."""

    def __init__(self, plan, client, folder):
        self.plan, self.client, self.folder = plan, client, folder

    def _site(self):
        return Site(self.plan.inputs(self.plan.owner[self.client]), self.client, FolderStates(self.folder))

    def train(self, message):
        return self._site().train(message)

    def evaluate(self, message):
        return self._site().evaluate(message)


def federation_of_sites(settings, sites, plan):
    engine = SiteEngine(sites, plan.engine(LOOP))
    g = settings.general
    shared = {"rounds": g.rounds, "seed": g.seed, "participation": g.participation}
    return Federation(settings.method, engine, plan.data, **shared, silhouette=True, snapshots=1)


def compared(settings, sites, plan):
    """The records of both federations, round by round, and the end."""
    _, loop = build(settings.with_engine(LOOP))
    remote = federation_of_sites(settings, sites, plan)
    for one, other in zip(loop, remote, strict=True):
        assert (one.loss == other.loss or not one.participants) and one.terms == other.terms
        assert (one.up, one.down, one.measures, one.dropped) == (other.up, other.down, other.measures, other.dropped)
        assert [(s.by_head, s.by_prototype) for s in one.scores] == [(s.by_head, s.by_prototype) for s in other.scores]
    one, other = (torch.utils._pytree.tree_leaves(f.state) for f in (loop, remote))
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True) if a is not None
    )
    return loop


@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto", "fedarpl"), methods.available()))
def test_sites_give_the_bits_of_the_plain_loop(method, tmp_path):
    """Each site is restarted before every message: it takes nothing from memory."""
    settings = settings_of(method)
    plan = plan_of(settings)
    sites = {c: Restarted(plan, c, tmp_path / f"site-{c}") for c in range(len(plan.data.clients))}
    loop = compared(settings, sites, plan)
    for client, state in loop.engine.export().items():
        kept = FolderStates(tmp_path / f"site-{client}")[client]
        assert kept.weights.keys() == state.weights.keys()
        assert all(torch.equal(kept.weights[n], w) for n, w in state.weights.items())


@pytest.mark.slow
def test_sites_of_different_architectures(tmp_path):
    mix = {"models": ["mlp?hidden=7&embedding=5", "mlp?hidden=3&embedding=4"], "dim": 6, "projection_dropout": 0.0}
    given = {k: v for k, v in SMALL.items() if k not in ("model", "embedding", "hidden")}
    for method in ("fedsap", "fedavg", "fedmatch"):
        settings = resolve(method, {**given, **mix, "data": blobs()})
        plan = plan_of(settings)
        sites = {c: Restarted(plan, c, tmp_path / method / f"{c}") for c in range(len(plan.data.clients))}
        compared(settings, sites, plan)


def test_a_site_refuses_what_is_no_message():
    plan = plan_of(settings_of("fedproto"))
    site = Site(plan.inputs(0), 0)
    for message in (b"", b"abc", b"\xff" * 40, sealed({"round": 1}, b"rubbish"), sealed({"round": 1}, b"")):
        with pytest.raises(WireError, match="server's message to client 0"):
            site.train(message)
    assert not site.engine.states


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"\xff" * 50,
        sealed({"round": 1}, b""),
        sealed({"round": 7, "terms": {}, "failure": "", "pseudo": {}, "returned": True}, b""),
        sealed({"round": 1, "terms": [], "failure": "", "pseudo": {}, "returned": True}, b""),
        sealed({"round": 1, "terms": {"ce": "x"}, "failure": "", "pseudo": {}, "returned": True}, b""),
        sealed({"round": 1, "terms": {}, "failure": "", "pseudo": {}, "returned": True}, b"rubbish"),
    ],
)
def test_a_site_that_answers_nonsense_is_dropped_and_named(reply):
    settings = settings_of("fedproto", participation=1.0)
    plan = plan_of(settings)
    sites = {c: Site(plan.inputs(0), c) for c in range(len(plan.data.clients))}
    sites[2].train = lambda message: reply
    record = federation_of_sites(settings, sites, plan).step()
    assert set(record.dropped) == {2} and record.dropped[2].startswith("client 2: ")
    assert "\n" not in record.dropped[2] and record.dropped[2].count("client 2") == 1


def test_a_site_refuses_what_names_no_round_or_no_way_to_evaluate():
    site = Site(plan_of(settings_of("fedproto")).inputs(0), 0)
    for about in ({}, {"round": "1"}, {"round": None}):
        with pytest.raises(WireError, match="names no round"):
            site.train(sealed(about, b""))
    for how in ({}, {"how": 3}, {"how": {"part": "test", "more": 1}}):
        with pytest.raises(WireError, match="no way to evaluate"):
            site.evaluate(sealed({"round": 1, **how}, b""))


def test_envelopes_come_back():
    about, payload = opened(sealed({"round": 3, "terms": {"ce": 0.25}}, b"abc"), "x")
    assert about == {"round": 3, "terms": {"ce": 0.25}} and payload == b"abc"
    for wrong in (b"", b"\x01\x00\x00\x00[", b"\x02\x00\x00\x00[]", b"\xff\xff\xff\xff{}"):
        with pytest.raises(WireError, match="x: not an envelope"):
            opened(wrong, "x")


def test_scores_come_back():
    y, p = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, 1, 1])
    bank = torch.ones(3, 2)
    snapshot = Snapshot(bank.numpy(), y[:3].numpy(), bank.numpy(), (y[:3] > 0).numpy())
    scores = Scores(Confusion.of(y, p), Confusion.of(y, y), torch.rand(2, 4, 3).numpy(), 0.5, snapshot)
    back = scores_of(wire.decode(wire.encode(bundle_of(scores))), "client 0")
    assert back == scores and (back.votes == scores.votes).all() and (back.snapshot.z == snapshot.z).all()
    bare = Scores(Confusion.of(y, p), None)
    assert scores_of(wire.decode(wire.encode(bundle_of(bare))), "client 0") == bare
    for wrong in (wire.Bundle(), wire.Bundle(tensors={"head": torch.ones(2)})):
        with pytest.raises(WireError, match="client 0: not an evaluation"):
            scores_of(wrong, "client 0")
