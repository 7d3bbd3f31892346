"""What a run has learnt, used: predictions are the judge's own, from memory and from a folder, and files are compared."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import protofed as pf
from protofed.classifier import Classifier, load, save
from protofed.classifier.core import radii_of
from protofed.classifier.export import FORMATS, example_samples, export
from protofed.classifier.store import MODELS, PROTOTYPES, RECORD
from protofed.data.samples import as_samples, read_samples
from protofed.errors import ProtofedError
from protofed.experiment.build import prepare_data
from support.marks import slow_but
from support.small import SMALL, blobs, labels_for

DATA = blobs()


def run(method="fedproto", out=None, **changes):
    return pf.run(method, **{"data": DATA, "out": out, **SMALL, **labels_for(method), **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small run, which tests copy before they change it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    run(out=path)
    return path


# --- predictions are the judge's --------------------------------------------------------------------------------------
def accuracies(result, by):
    """Each client's accuracy from its predictions alone, on the test samples that the judge scores it by."""
    data = prepare_data(result.settings)
    clients = [data.clients[c].test.take() for c in range(len(data.clients))]
    return [float(np.mean(result.predict(x, c, by).labels == y.numpy())) for c, (x, y) in enumerate(clients)]


@pytest.mark.parametrize("method", slow_but(("fedavg", "fedproto", "protofssl", "semifl"), pf.methods.available()))
def test_predictions_have_the_accuracies_that_the_judge_measured(method, tmp_path):
    changes = {"clients": 3, "rounds": 2}
    written = run(method, tmp_path / "run", **changes)
    row = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    measured = {by: row[f"accuracy_{by}"] for by in ("head", "prototype", "mix") if f"accuracy_{by}" in row}
    assert measured
    for by, wanted in measured.items():
        assert accuracies(written, by) == wanted, by
    by = written.settings.method.predict.by
    assert accuracies(run(method, **changes), by) == measured[by], "from memory"
    stored = pf.load(tmp_path / "run").model(1)
    shutil.rmtree(tmp_path / "run" / MODELS)  # then they are made again from the checkpoint, which needs the data
    remade = pf.load(tmp_path / "run", data=DATA).model(1)
    for one, other in zip(stored.outputs(DATA.x_test), remade.outputs(DATA.x_test), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_several_architectures_and_engines(method, tmp_path):
    changes = {"models": ["mlp?hidden=7", "mlp?hidden=9"], "model": None, "embedding": None, "hidden": None, "dim": 5}
    changes = {**{k: v for k, v in SMALL.items() if k not in changes}, **{k: v for k, v in changes.items() if v}}
    result = pf.run(method, data=DATA, out=tmp_path / "run", **{**changes, "engine": "stack"})
    last = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    assert accuracies(result, "head") == last["accuracy_head"]
    assert {m.network.backbone[1].out_features for m in map(result.model, range(2))} == {7, 9}


def test_scaling_is_inside(tmp_path):
    np.savez(tmp_path / "mine.npz", x_train=100 + 7 * DATA.x_train.numpy(), y_train=DATA.y_train.numpy())
    result = run(data=str(tmp_path / "mine.npz"))
    data = prepare_data(result.settings)
    raw = pf.data.load(tmp_path / "mine.npz", standardise=False)
    for c in range(5):
        test = data.clients[c].test
        predicted = result.predict(raw.x_train[test.index], client=c).labels
        assert np.array_equal(predicted, result.model(c).predict(test.take()[0] * data.std + data.mean).labels)
    row = result.metrics[-1]["accuracy_prototype"]
    right = [
        result.predict(raw.x_train[c.test.index], k).labels == c.test.labels.numpy() for k, c in enumerate(data.clients)
    ]
    assert np.mean([r.mean() for r in right]) == pytest.approx(row)


def test_probabilities_distances_and_names(folder):
    classifier, x = pf.load(folder).model("client 2"), DATA.x_test
    head, prototype, both = (classifier.predict(x, by=by) for by in ("head", "prototype", "ensemble"))
    out = classifier.outputs(x)
    assert np.allclose(head.probabilities, torch.softmax(out.logits, -1))
    assert np.allclose(both.probabilities, (head.probabilities + prototype.probabilities) / 2)
    assert np.array_equal(both.labels, both.probabilities.argmax(-1))
    own = classifier.candidates.numpy()
    assert np.isfinite(prototype.distances[:, own]).all() and np.isinf(prototype.distances[:, ~own]).all()
    z, mean = out.embedding.numpy(), classifier.means.numpy()
    squared = ((z[:, None] - mean[None]) ** 2).sum(-1)
    assert np.allclose(prototype.distances[:, own], squared[:, own], atol=1e-4)
    assert np.array_equal(prototype.labels, prototype.distances.argmin(-1))
    assert prototype.classes == [classifier.classes[k] for k in prototype.labels]
    assert (prototype.probabilities[:, ~own] == 0).all() and np.allclose(prototype.probabilities.sum(-1), 1)
    nearest = prototype.distances.argmin(-1)
    far = prototype.distances.min(-1) > classifier.radii.numpy()[nearest]
    assert np.array_equal(prototype.unlike, far) and classifier.predict(x + 1000).unlike.all()


def test_radii_against_plain_loops():
    from scipy.stats import t

    g = torch.Generator().manual_seed(0)
    d, y = torch.rand(40, 4, generator=g) + 0.1, torch.arange(40) % 3
    radii = radii_of(d, y, torch.tensor([True, True, True, True]))
    logs = [[np.log(float(d[n, k])) for n in range(40) if y[n] == k] for k in range(3)]
    spread = sum((v - np.mean(part)) ** 2 for part in logs for v in part) / 37
    limits = [np.exp(np.mean(p) + t.ppf(0.99, 37) * np.sqrt(spread * (1 + 1 / len(p)))) for p in logs]
    assert np.allclose(radii[:3], limits, rtol=1e-5) and float(radii[3]) == pytest.approx(max(limits), rel=1e-5)
    assert torch.isinf(radii_of(d[:3], y[:3], torch.ones(4, dtype=torch.bool))).all(), "one sample a class says nothing"


def test_new_samples_of_a_known_class_are_seldom_flagged():
    """On validation samples the radius is what it says: about one sample in a hundred is beyond it."""
    data = blobs(per_class=300, test_per_class=300)
    result = pf.run("local", data=data, **{**SMALL, "clients": 2, "shot": 100, "validation_share": 0.4})
    flags = []
    for c in range(2):
        own = result.model(c).candidates[data.y_test]
        flags.append(result.predict(data.x_test[own], c, "prototype").unlike.mean())
    assert np.mean(flags) < 0.05


# --- the result -------------------------------------------------------------------------------------------------------
def test_clients_by_name_and_number(folder):
    result = pf.load(folder)
    assert result.clients == tuple(f"client {c}" for c in range(5))
    assert result.model(3).name == result.model("3").name == result.model("client 3").name == "client 3"
    for client, words in ((None, "5 clients"), ("bob", "unknown client 'bob'"), (9, "clients 0 to 4"), (-1, "0 to 4")):
        with pytest.raises(ProtofedError, match=words):
            result.model(client)


def test_what_cannot_be_predicted_is_said(folder):
    result = pf.load(folder)
    for x, words in (
        (np.zeros((3, 5)), r"shape \[5\], and it was trained on \[6\]"),
        (np.full((1, 6), np.nan), "NaN"),
        ([["a"] * 6], "numbers"),
    ):
        with pytest.raises(ProtofedError, match=words):
            result.predict(x, client=0)
    with pytest.raises(ProtofedError, match="unknown prediction 'both'"):
        result.predict(DATA.x_test, client=0, by="both")
    with pytest.raises(ProtofedError, match="trains no head"):
        run("protofssl").predict(DATA.x_test, client=0, by="ensemble")
    semi = run("semifl")
    assert semi.predict(DATA.x_test, client=0).unlike is None
    with pytest.raises(ProtofedError, match="has no prototypes"):
        semi.predict(DATA.x_test, client=0, by="prototype")


def test_models_that_were_not_kept(tmp_path):
    result = run(out=tmp_path / "few", keep_models=2)
    files = {f.name for f in (tmp_path / "few" / MODELS).iterdir()}
    assert files == {RECORD, PROTOTYPES, "network-0.safetensors", "network-1.safetensors"}
    assert result.model(4).name == "client 4", "made again from the checkpoint"
    with pytest.raises(ProtofedError, match="given in Python"):
        pf.load(tmp_path / "few").model(4)
    run(out=tmp_path / "none", keep_models=0)
    assert not (tmp_path / "none" / MODELS).exists() and pf.load(tmp_path / "none", data=DATA).model(4)
    comparison = pf.compare(["fedproto"], local=False, seeds=1, jobs=1, data=DATA, **SMALL)
    with pytest.raises(ProtofedError, match="no models were kept"):
        comparison.results["fedproto"][0].model(0)


def test_clients_that_share_a_model_share_its_file(tmp_path):
    run("fedavg", tmp_path / "run")
    assert len(list((tmp_path / "run" / MODELS).glob("network-*"))) == 1


def test_attackers_have_no_classifier(tmp_path):
    given = {"attack": "sign-flip?share=0.2", "out": tmp_path / "run"}
    written = run("fedproto", **given)
    attacker = written.summary["attackers"][0]
    for result in (written, run("fedproto", attack=given["attack"])):
        assert result.model((attacker + 1) % 5)
        with pytest.raises(ProtofedError, match="attacks in this run"):
            result.model(attacker)


def truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", [RECORD, PROTOTYPES, "network-0.safetensors"])
def test_a_damaged_file_is_one_line(name, damage, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    damage(tmp_path / "run" / MODELS / name)
    with pytest.raises(ProtofedError, match=r"damaged|not readable|missing|given in Python") as error:
        pf.load(tmp_path / "run").model(0)
    assert "\n" not in str(error.value)


# --- a new class ------------------------------------------------------------------------------------------------------
def test_a_new_class_from_five_samples_without_training():
    raw = pf.data.load("digits", standardise=False)
    old = raw.y_train < 8
    data = pf.data.Dataset.from_arrays(raw.x_train[old], raw.y_train[old], name="eight digits")
    result = pf.run("local", data=data, partition="iid", clients=1, rounds=8, lr=0.05, model="mlp", engine="loop")
    before = result.model()
    after = before.add_class("nine", raw.x_train[raw.y_train == 9][:5])
    x, y = raw.x_test[raw.y_test != 8], raw.y_test[raw.y_test != 8].numpy()
    y = np.where(y == 9, 8, y)
    assert after.classes == (*"01234567", "nine") and before.classes == tuple("01234567")
    head = after.predict(x, by="head")
    assert np.array_equal(head.labels, before.predict(x, by="head").labels) and (head.probabilities[:, 8] == 0).all()
    for by, nines, others in (("prototype", 0.6, 0.85), ("ensemble", 0.5, 0.85)):
        found = after.predict(x, by=by)
        assert np.allclose(found.probabilities.sum(-1), 1, atol=1e-5)
        assert (found.labels == y)[y == 8].mean() > nines and (found.labels == y)[y < 8].mean() > others, by
    assert not after.predict(raw.x_train[raw.y_train == 9][:5]).unlike.any()
    with pytest.raises(ProtofedError, match="knows 'nine' already"):
        after.add_class("nine", x[:1])


def test_a_class_that_is_known_by_name_gets_its_prototype(folder):
    classifier = pf.load(folder).model(0)
    missing = int((~classifier.candidates).nonzero()[0])
    after = classifier.add_class(str(missing), DATA.x_train[DATA.y_train == missing][:5])
    assert after.classes == classifier.classes and bool(after.candidates[missing])
    assert (after.predict(DATA.x_test[DATA.y_test == missing], by="prototype").labels == missing).mean() > 0.5


def test_helpers_learn_a_new_class_too(tmp_path):
    after = run("protofssl").model(0).add_class("new", DATA.x_test[:1] + 50)
    assert after.means.ndim == 3 and after.predict(DATA.x_test[:1] + 50).classes == ["new"]
    save(after, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").predict(DATA.x_test[:1] + 50).classes == ["new"]


# --- export -----------------------------------------------------------------------------------------------------------
IMAGES = {"partition": "iid", "clients": 2, "rounds": 1, "batch": 8, "engine": "loop"}


def pictures():
    g = torch.Generator().manual_seed(0)
    return pf.data.Dataset.from_arrays(torch.rand(24, 1, 16, 16, generator=g), torch.arange(24) % 3, name="pictures")


NETWORKS = {
    "cnn": lambda: pf.run("fedproto", data=pictures(), model="cnn", **IMAGES),
    "batch norm": lambda: pf.run("local", data=pictures(), model="resnet9?width=0.0625&norm=batch", **IMAGES),
    "mixed": lambda: pf.run("fedpagr", data=pictures(), models=["mlp", "cnn"], dim=8, **IMAGES),
    "helpers": lambda: pf.run("protofssl", data=pictures(), model="resnet8?width=0.0625", **IMAGES),
    "halves": lambda: run("fedmatch"),
}


IN_ONNX = ("batch norm", "mixed", "helpers")  # of the others only what is quick


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_an_exported_file_computes_the_same(name, tmp_path):
    result = NETWORKS[name]()
    classifier = result.model(1)
    x = example_samples(classifier, 3)
    ours = classifier.outputs(x)
    formats = [format for format in FORMATS if format != "onnx" or name in IN_ONNX]
    for format in formats:
        assert export(classifier, tmp_path / f"model.{format}", format) <= 1e-5
    assert all(torch.equal(a, b) for a, b in zip(load(tmp_path / "model.safetensors").outputs(x), ours, strict=True))
    found = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert all(np.allclose(found[key].numpy(), getattr(ours, key).numpy(), atol=1e-5) for key in ours._fields)
    if "onnx" in formats:
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "model.onnx")
        for key, value in zip(ours._fields, session.run(list(ours._fields), {"x": x.numpy()}), strict=True):
            assert np.allclose(value, getattr(ours, key).numpy(), rtol=1e-5, atol=1e-5), key


@pytest.mark.slow
def test_text_is_exported_too(tmp_path):
    rows = [f"word{k % 2} text {k},{'ab'[k % 2]}" for k in range(30)]
    (tmp_path / "notes.csv").write_text("text,label\n" + "\n".join(rows))
    given = {"data": str(tmp_path / "notes.csv"), "length": 8, "partition": "iid", "clients": 2, "rounds": 1}
    result = pf.run("fedavg", out=tmp_path / "run", engine="loop", **given)
    (tmp_path / "new.csv").write_text("text\nword0 again\nword1 again\n")
    unseen = read_samples(tmp_path / "new.csv", result.settings.data, (8,), True)
    assert unseen.labels is None and len(result.predict(unseen.x, client=0)) == 2
    for format in ("safetensors", "onnx"):
        assert export(pf.load(tmp_path / "run").model(0), tmp_path / f"m.{format}", format) <= 1e-5


def test_a_network_that_cannot_be_exported_is_one_line(tmp_path, own_names):
    class Branching(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.head = nn.Linear(shape[0], classes)

        def forward(self, x):
            return (x, self.head(x)) if float(x.sum()) > 0 else (-x, self.head(x))

    pf.models.register_module("branching", Branching)
    settings = {key: value for key, value in SMALL.items() if key not in ("embedding", "hidden")}
    result = pf.run("local", data=DATA, **{**settings, "model": "branching"})
    with pytest.raises(ProtofedError, match="network 'branching' cannot be exported as pt2"):
        export(result.model(0), tmp_path / "m.pt2", "pt2")
    assert not list(tmp_path.iterdir())
    assert export(result.model(0), tmp_path / "m.safetensors", "safetensors") == 0


def test_a_wrong_file_is_not_kept(tmp_path, folder, monkeypatch):
    classifier = pf.load(folder).model(0)
    other = pf.load(folder).model(1)
    monkeypatch.setitem(FORMATS, "safetensors", (lambda _, x, file: save(other, file), FORMATS["safetensors"][1]))
    with pytest.raises(ProtofedError, match="differ from ours"):
        export(classifier, tmp_path / "m.safetensors", "safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [truncate, flip, lambda file: file.write_bytes(b"no"), Path.unlink])
def test_a_damaged_classifier_is_one_line(damage, folder, tmp_path):
    file = tmp_path / "m.safetensors"
    save(pf.load(folder).model(0), file)
    assert isinstance(load(file), Classifier)
    damage(file)
    with pytest.raises(ProtofedError, match=r"m\.safetensors: ") as error:
        load(file)
    assert "\n" not in str(error.value)


# --- samples of files -------------------------------------------------------------------------------------------------
def test_forms_of_samples():
    image = np.arange(64, dtype=np.uint8).reshape(1, 8, 8)
    assert torch.allclose(as_samples(image, (1, 8, 8), False, "x")[0, 0] * 255, torch.from_numpy(image[0]).float())
    flat = np.arange(128.0).reshape(2, 64)
    assert as_samples(flat, (1, 8, 8), False, "x").shape == (2, 1, 8, 8)
    assert as_samples([1, 2, 3], (3,), False, "x").shape == (1, 3)
    with pytest.raises(ProtofedError, match="token ids, which are integers"):
        as_samples(np.zeros((1, 3)), (3,), True, "x")


def test_files_of_samples(tmp_path):
    x, y = np.arange(12.0).reshape(4, 3), np.array([0, 1, 1, 0])
    np.save(tmp_path / "a.npy", x)
    np.savez(tmp_path / "b.npz", x=x, y=y)
    (tmp_path / "c.csv").write_text("u,label,v,w,site\n" + "".join(f"{a},cat,{b},{c},s\n" for a, b, c in x))
    for name in ("a.npy", "b.npz", "c.csv"):
        read = read_samples(tmp_path / name, None, (3,))
        assert np.array_equal(np.asarray(read.x), x), name
    labelled = read_samples(tmp_path / "b.npz", None, (3,))
    assert labelled.accuracy(["no", "yes", "no", "no"], ["no", "yes"], [True, False]) == [0.75, 1.0]
    from PIL import Image

    (tmp_path / "photos" / "cat").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 255, np.uint8)).save(tmp_path / "photos" / "cat" / "1.png")
    images = read_samples(tmp_path / "photos", None, (3, 4, 4))
    assert images.labels == ["cat"] and images.x.shape == (1, 3, 4, 4) and bool((images.x == 1).all())
    assert read_samples(tmp_path / "photos" / "cat" / "1.png", None, (1, 4, 4)).labels is None


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.csv", None, "no such file"),
        ("a.doc", b"x", "expected .npz"),
        ("a.npz", b"x", "plain arrays, or damaged"),
        ("a.csv", b"u,v\n1,2\n", "2 columns of features; expected"),
        ("a.csv", b"u,v,w\n1,2,red\n", "column 'w' must be numbers"),
        ("a.csv", b"u,v,w\n1,2\n", "2 fields"),
        ("a.parquet", b"x", "not a parquet file"),
        ("a.png", b"x", "trained on samples of shape"),
    ],
)
def test_files_that_are_no_samples(name, content, words, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ProtofedError, match=re.escape(words)):
        read_samples(tmp_path / name, None, (3,))


# --- the estimator ----------------------------------------------------------------------------------------------------
def test_scikit_learn_accepts_the_estimator():
    from sklearn.utils.estimator_checks import check_estimator

    for report in check_estimator(pf.PrototypeClassifier(), on_fail=None, on_skip=None):
        assert report["status"] in ("passed", "skipped"), report["check_name"]


def test_the_estimator_in_portions_is_the_estimator_of_all():
    x, y = DATA.x_train.numpy(), np.array(["cat", "dog", "eel", "fox"])[DATA.y_train]
    whole = pf.PrototypeClassifier().fit(x, y)
    parts = pf.PrototypeClassifier()
    for label in ("fox", "cat", "dog", "eel"):  # a new class each time
        parts.partial_fit(x[y == label], y[y == label])
    assert list(parts.classes_) == list(whole.classes_)
    assert np.allclose(parts.predict_proba(x), whole.predict_proba(x)) and whole.score(x, y) > 0.9
    means = np.stack([x[y == label].mean(0) for label in whole.classes_])
    assert np.allclose(whole.bank_.means, means, atol=1e-5)


def test_the_estimator_with_an_encoder_and_a_bank(folder):
    classifier = pf.load(folder).model(0)
    y = DATA.y_train.numpy()
    network = pf.PrototypeClassifier(encoder=classifier.network).fit(DATA.x_train, y)
    function = pf.PrototypeClassifier(encoder=lambda x: classifier.outputs(x).embedding).fit(DATA.x_train, y)
    assert np.allclose(network.predict_proba(DATA.x_test), function.predict_proba(DATA.x_test), atol=1e-4)
    made = pf.PrototypeClassifier.from_bank(classifier.bank, classifier.classes, classifier.network)
    assert list(made.predict(DATA.x_test)) == classifier.predict(DATA.x_test, by="prototype").classes
    with pytest.raises(ValueError, match="2 classes for a bank of 4"):
        pf.PrototypeClassifier.from_bank(classifier.bank, ["a", "b"])


def test_the_quantile_is_that_of_scipy():
    from scipy.special import stdtrit

    from protofed.classifier.core import student_quantile

    for share in (0.9, 0.99, 0.999):
        for freedom in (1, 2, 3, 4, 5, 9, 30, 1000, 100_000):
            assert student_quantile(share, freedom) == pytest.approx(stdtrit(freedom, share), rel=1e-4)
