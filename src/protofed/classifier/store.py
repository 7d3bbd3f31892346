"""Classifiers on disk: those of a run, in its folder `models`, and one alone in a file.

| file | what is in it |
| --- | --- |
| `models.json` | what all classifiers have in common, and of each client its network, its files and their digests |
| `network-N.safetensors` | the trained weights of a network; clients that share a model share the file |
| `body-N.safetensors` | what does not train of a network, once for all clients that have it: a frozen body |
| `prototypes.safetensors` | of each client its prototypes, candidates, radii and scaling; equal ones once |
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .. import disk
from ..errors import ProtofedError
from ..version import __version__
from .core import Classifier
from .design import Design, Learnt, model_from_json, model_to_json
from .shelf import Classifiers

FORMAT = 1
MODELS, RECORD, PROTOTYPES = "models", "models.json", "prototypes.safetensors"
CLASSIFIER = "classifier.safetensors"  # the file of one classifier alone, as `save` writes it, in the folder of a site
METADATA = "protofed"  # the key of a safetensors file's metadata under which a classifier's description stands


def write_models(run: Path, design: Design, clients: Sequence[str], learnt: Iterable[tuple[int, Learnt]]) -> bool:
    """Write the classifiers of a run into its folder.

    Args:
        run: The run folder.
        design: What they have in common.
        clients: The names of all clients.
        learnt: What some of the clients have learnt, by number.

    Returns:
        Whether they were written: those of a network or a prediction of a person's own may have no name to read them
        back by.
    """
    folder, described = run / MODELS, design.to_json()
    if described is None:
        return False
    entries: dict[str, Any] = {}
    small: dict[str, Tensor] = {}
    shared: dict[Any, str] = {}
    digests: dict[str, str] = {}
    last: tuple[Any, str] = None, ""
    bodies: dict[int, tuple[Any, str]] = {}  # by identity, with the tensors, so that they live as long as their entry
    with disk.writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for client, one in learnt:
            model = model_to_json(one.model)
            if model is None:
                shutil.rmtree(folder)
                return False
            if one.weights is not last[0]:
                name = f"network-{len(digests) - len(bodies)}.safetensors"
                digests[name] = _write(folder / name, one.weights)
                last = one.weights, name
            if one.body and id(one.body) not in bodies:
                name = f"body-{len(bodies)}.safetensors"
                digests[name] = _write(folder / name, one.body)
                bodies[id(one.body)] = one.body, name
            keys = {}
            for part, value in one.tensors().items():
                place = value.data_ptr(), tuple(value.shape), value.dtype  # what clients share is written once
                keys[part] = shared.setdefault(place, f"{client}/{part}")
                small.setdefault(keys[part], value)
            body = {"body": bodies[id(one.body)][1]} if one.body else {}
            entries[str(client)] = {"model": model, "network": last[1], **body, "tensors": keys}
        digests[PROTOTYPES] = _write(folder / PROTOTYPES, small)
    record = {"format": FORMAT, "protofed": __version__, **described, "clients": list(clients), "models": entries}
    disk.write_atomically(folder / RECORD, disk.sealed({**record, "files": digests}))
    return True


def _write(file: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, and return its SHA-256."""
    content = safetensors.torch.save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
    file.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def stored_models(run: Path, otherwise: Callable[[], Classifiers] | None = None) -> Classifiers | None:
    """The classifiers that a run folder holds, each of which is read when it is asked for.

    Args:
        run: The run folder.
        otherwise: Gives the classifiers of clients whose models were not written.

    Returns:
        The classifiers; None where the folder has none.
    """
    file = run / MODELS / RECORD
    if not file.is_file():
        return None
    record = _record(file)
    design = Design.from_json(record, str(file))

    def make(client: int) -> Classifier:
        entry = record["models"].get(str(client))
        if entry is None and otherwise is not None:
            return otherwise()[client]
        if entry is None:
            raise ProtofedError(f"{run}: no model of {record['clients'][client]} was written; `pf.load` makes it again")
        model = model_from_json(entry["model"], str(file))
        weights, body = (
            _read(file.parent / entry[part], record["files"][entry[part]]) if part in entry else {}
            for part in ("network", "body")
        )
        stored = _read(file.parent / PROTOTYPES, record["files"][PROTOTYPES], set(entry["tensors"].values()))
        tensors = {part: stored[key] for part, key in entry["tensors"].items()}
        learnt = Learnt.of(record["clients"][client], model, weights, body, tensors)
        return Classifier(design, learnt, str(file.parent / entry["network"]))

    return Classifiers(record["clients"], make)


def _record(file: Path) -> dict[str, Any]:
    try:
        record = disk.opened(file.read_bytes(), file)
    except OSError as error:
        raise ProtofedError(f"{file}: not readable ({error.strerror})") from None
    if record.get("format") != FORMAT:
        raise ProtofedError(f"{file}: format {record.get('format')!r}; this version reads {FORMAT}")
    return record


def _read(file: Path, digest: str, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file, by default all, after the file was compared with its digest."""
    try:
        if disk.digest_of(file) != digest:
            raise ProtofedError(f"{file}: damaged (its content does not match the digest in {RECORD})")
        with safe_open(file, "pt") as stored:
            return {name: stored.get_tensor(name) for name in names or stored.keys()}
    except FileNotFoundError:
        raise ProtofedError(f"{file}: missing, although {RECORD} names it") from None
    except (OSError, SafetensorError) as error:
        raise ProtofedError(f"{file}: not readable ({error})") from None


def save(classifier: Classifier, file: Path) -> None:
    """Write one classifier into a safetensors file, from which `load` makes an equal one.

    Args:
        classifier: The classifier.
        file: The file to write.

    Example: `save(result.model("ward 3"), Path("ward-3.safetensors"))`
    """
    learnt = classifier.learnt()
    design, model = classifier.design.to_json(), model_to_json(learnt.model)
    if design is None or model is None:
        raise ProtofedError(
            f"{file}: a network or a prediction of your own has no name to read it back by; export it as pt2 or onnx"
        )
    about = {**design, "format": FORMAT, "client": learnt.name, "model": model, "added": list(learnt.added)}
    tensors = {f"weights.{name}": value for name, value in learnt.weights.items()}
    tensors |= {f"body.{name}": value for name, value in learnt.body.items()}
    tensors |= {f"tensors.{name}": value for name, value in learnt.tensors().items()}
    content = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    about["digest"] = _digest(content)
    disk.write_atomically(file, safetensors.torch.save(content, {METADATA: json.dumps(about)}))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """A SHA-256 of tensors and their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def load(file: str | Path) -> Classifier:
    """Read a classifier that `save` or `protofed export --format safetensors` wrote.

    Args:
        file: The file.

    Returns:
        The classifier.

    Example: `protofed.classifier.load("ward-3.safetensors").predict(x).classes`
    """
    path = Path(file)
    try:
        with safe_open(path, "pt") as stored:
            about = json.loads((stored.metadata() or {})[METADATA])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a mapping
        if about.get("format") != FORMAT:
            raise ProtofedError(f"{path}: format {about.get('format')!r}; this version reads {FORMAT}")
        if about["digest"] != _digest(tensors):
            raise ProtofedError(f"{path}: damaged (its content does not match the digest in it)")
        design, model = Design.from_json(about, str(path)), model_from_json(about["model"], str(path))
        parts: dict[str, dict[str, Tensor]] = {"weights": {}, "body": {}, "tensors": {}}
        for name, value in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        learnt = Learnt.of(about["client"], model, added=tuple(about["added"]), **parts)
    except FileNotFoundError:
        raise ProtofedError(f"{path}: no such file") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(
            f"{path}: not a classifier of protofed, or damaged ({type(error).__name__}: {error})"
        ) from None
    return Classifier(design, learnt, str(path))
