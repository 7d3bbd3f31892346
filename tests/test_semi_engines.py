"""Methods that read unlabelled samples: every engine equals the plain loop, and nobody reads a held-back label."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from protofed import methods
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.batches import all_samples
from protofed.models.skeleton import Skeleton
from support.engines import ENGINES, LOOP, assert_same, images, leaves
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

SEMI = [name for name in methods.available() if methods.get(name).feed.reads_unlabelled]
CHANGES = {
    "rounds": 3,
    "batch": 5,
    "participation": 0.8,
    "epochs": 2,
    "labels": "client",
    "labels_per_class": 4,
    "shot": 16,
}


def settings_of(method, **more):
    changes = {**SMALL, "data": blobs(per_class=60), **CHANGES, **labels_for(method), **more}
    if method == "fedarpl":  # a phase a round
        changes |= {"fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0}
    if method == "fedsap":
        changes |= {"alignment": {"start": 0, "end": 2}, "supervised_rounds": 1}
    if method == "fedmatch":
        changes |= {"refresh": 2, "lr": 0.001, "threshold": 0.3}
    if method.startswith("fixmatch") or method == "fedrgd":
        changes |= {"threshold": 0.3}
    return resolve(method, changes)


@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))
@pytest.mark.parametrize("method", slow_but(("fedsap", "protofssl", "fedarpl"), SEMI))
def test_unlabelled_samples_on_every_engine_equal_the_plain_loop(method, engine):
    settings = settings_of(method, shot_spread=3.0)
    one, other = assert_same(settings, ENGINES[engine])
    assert one[-1].measures
    for a, b in zip(one, other, strict=True):
        assert a.measures == pytest.approx(b.measures, abs=0.02), a.round


SERVER = {"keep_server_optimiser": True, "server_batch": 3, "momentum": 0.9}


@pytest.mark.parametrize("engine", slow_but("stack", ENGINES))
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fl2", {"thresholds": "batch", **SERVER}),
        ("semifl", {"threshold": 0.4, **SERVER}),
        ("fedarpl", {"labelled_each": "round", "threshold_view": "weak", **SERVER}),
        ("fixmatch-fedavg", {"labelled_view": "none"}),
        ("fedsap", {"returned_classes": "all", "normalise": False}),
    ],
)
def test_settings_of_the_published_code_on_every_engine_equal_the_plain_loop(method, options, engine):
    one, other = assert_same(settings_of(method, shot_spread=3.0, **options), ENGINES[engine])
    for a, b in zip(one, other, strict=True):
        assert a.measures == pytest.approx(b.measures, abs=0.02), a.round


@pytest.mark.parametrize("method", slow_but(("fedsap", "protofssl"), SEMI))
def test_no_method_reads_a_held_back_label(method):
    """With every held-back label replaced, all that is trained, sent and predicted stays the same to the bit."""

    def run(wrong):
        _, federation = build(settings_of(method).with_engine(LOOP))
        if wrong:
            federation.engine.task = replace(
                federation.engine.task, held_back=[(h + 1) % 3 for h in federation.data.held_back]
            )
        records = list(federation)
        return records, federation.state, federation.engine.export()

    one, state, clients = run(False)
    other, same_state, same_clients = run(True)
    for a, b in zip(one, other, strict=True):
        assert (a.terms, a.up, a.down, a.scores) == (b.terms, b.up, b.down, b.scores)
    assert one[-1].measures != other[-1].measures
    mine, its = leaves(state), leaves(same_state)
    assert mine.keys() == its.keys() and any(isinstance(value, torch.Tensor) for value in mine.values())
    for place, value in mine.items():
        same = torch.equal(value, its[place]) if isinstance(value, torch.Tensor) else value == its[place]
        assert same, place
    assert clients.keys() == same_clients.keys()
    for client, kept in clients.items():
        assert all(torch.equal(v, same_clients[client].weights[n]) for n, v in kept.weights.items())


@pytest.mark.parametrize("engine", ["stack", "workers stack"])
@pytest.mark.parametrize("norm", ["batch", "static", "group"])
@pytest.mark.slow
def test_normalisation_with_unlabelled_samples(norm, engine):
    changes = {k: v for k, v in SMALL.items() if k not in ("hidden", "embedding", "model")}
    changes |= {**CHANGES, "model": "cnn", "channels": [2, 3], "embedding": 6, "norm": norm, "clients": 3, "rounds": 2}
    changes |= {"shot": 12, "shot_spread": 2.0, "lr": 0.005, "threshold": 0.3}
    assert_same(resolve("fixmatch-fedavg", {**changes, "data": images(per_class=40)}), ENGINES[engine])


@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_static_statistics_are_of_the_model_that_the_parts_stand_for(engine):
    """FedMatch trains σ and ψ and predicts by σ + ψ, whose statistics are not σ's: the kept model's are those of the sum."""
    changes = {k: v for k, v in SMALL.items() if k not in ("hidden", "embedding", "model")}
    changes |= {**CHANGES, "model": "cnn", "channels": [2, 3], "embedding": 6, "norm": "static", "clients": 3}
    changes |= {"shot": 12, "lr": 0.005, "rounds": 1, "participation": 1.0, "data": images(per_class=40)}
    settings = resolve("fedmatch", changes)
    _, federation = build(settings.with_engine(LOOP if engine == "loop" else ENGINES[engine]))
    federation.step()
    skeleton = federation.engine.skeleton
    own = federation.state.candidates[0]
    shape = federation.data.sample_shape
    whole = Skeleton(settings.model.build(shape, federation.data.num_classes))  # a plain model, not in two halves
    assert whole.slots.keys() < own.keys() == skeleton.slots.keys()
    whole.load({name: own[name] + own[f"psi.{name}"] if f"psi.{name}" in own else own[name] for name in whole.slots})
    whole.collect(all_samples(federation.data.clients[0]))
    statistics = [name for name in own if name.endswith(("running_mean", "running_var"))]
    assert statistics
    for name in statistics:
        torch.testing.assert_close(own[name], whole.slots[name])
