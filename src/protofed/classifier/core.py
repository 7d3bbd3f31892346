"""A client's classifier: its network with classes, scaling and prototypes, as a torch module that takes raw samples."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..bank import TINY, PrototypeBank
from ..data.samples import as_samples
from ..errors import ProtofedError, unknown
from ..models.frozen import values_of
from ..models.skeleton import EVAL_BATCH
from ..parts import Mix
from .design import Design, Learnt, network_of

By = Literal["head", "prototype", "ensemble", "mix"]
SHARE = 0.99  # of new samples of a class that are expected within its radius


class Outputs(NamedTuple):
    """What a classifier computes of a batch.

    `logits [n, C]` are those of the head, `embedding [n, d]` is what prototypes are compared with, `scores [n, C]` are
    the prototypes' (the highest wins, −∞ for a class without one), `distances [n, C]` are those to each class's nearest
    prototype (∞ without one), and `unlike [n]` says whether a sample is unlike anything known.
    """

    logits: Tensor
    embedding: Tensor
    scores: Tensor
    distances: Tensor
    unlike: Tensor


class MixedOutputs(NamedTuple):
    """The outputs where the method mixes head and prototypes: `mix [n, C]` are the logarithms of their probabilities."""

    logits: Tensor
    embedding: Tensor
    scores: Tensor
    distances: Tensor
    unlike: Tensor
    mix: Tensor


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of some samples.

    Attributes:
        names: The names of the classes, in the order of the columns below.
        labels: `[n]`, the numbers of the predicted classes.
        probabilities: `[n, C]`.
        distances: `[n, C]`, to the nearest prototype of each class; infinite for a class without one.
        unlike: `[n]`, whether a sample is unlike anything known; None where the client has no prototypes to tell by.
        by: How they were made.
    """

    names: tuple[str, ...]
    labels: np.ndarray
    probabilities: np.ndarray
    distances: np.ndarray
    unlike: np.ndarray | None
    by: By

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def classes(self) -> list[str]:
        """The name of each sample's predicted class."""
        return [self.names[label] for label in self.labels]

    def header(self) -> list[str]:
        """The columns of `rows`: the class, then probabilities, distances and the flag."""
        columns = [f"{what}_{name}" for what in ("probability", "distance") for name in self.names]
        return ["class", *columns, "unlike_known"]

    def rows(self) -> Iterator[list[str]]:
        """Each sample as texts, for a table. A distance that does not exist and an unknown flag are empty."""
        for n, name in enumerate(self.classes):
            probabilities = [f"{p:.6g}" for p in self.probabilities[n]]
            distances = [f"{d:.6g}" if np.isfinite(d) else "" for d in self.distances[n]]
            flag = "" if self.unlike is None else str(bool(self.unlike[n])).lower()
            yield [name, *probabilities, *distances, flag]


class Classifier(nn.Module):
    """A client's network with its classes, its scaling and its prototypes.

    It takes samples as they are before any scaling. `forward` gives tensors, and can be exported; `predict` gives names,
    probabilities and distances. `classes` are the names of the classes, and `name` is the client's.

    Example: `pf.run("fedproto", data="digits").model(0).predict(x).classes`
    """

    means: Tensor
    counts: Tensor
    candidates: Tensor
    radii: Tensor
    mean: Tensor | None
    std: Tensor | None
    share: Tensor | None
    trained_classes: Tensor | None

    def __init__(self, design: Design, learnt: Learnt, source: str = "classifier") -> None:
        """
        Args:
            design: What all classifiers of the run have in common.
            learnt: What the client has learnt.
            source: What the parts come from, for errors.
        """
        super().__init__()
        self.design, self.name, self.model = design, learnt.name, learnt.model
        self.network, self.trained = network_of(learnt, design, source), frozenset(learnt.weights)
        self.classes: tuple[str, ...] = (*design.classes, *learnt.added)
        tensors = learnt.tensors()
        for name in ("means", "counts", "candidates", "radii"):
            self.register_buffer(name, tensors[name].clone())
        shape = (-1, *[1] * (len(design.sample_shape) - 1))
        for name in ("mean", "std"):
            self.register_buffer(name, tensors[name].reshape(shape).clone() if name in tensors else None)
        self.register_buffer("share", tensors["share"].clone() if "share" in tensors else None)
        self.register_buffer("trained_classes", tensors["trained"].clone() if "trained" in tensors else None)
        self.eval()

    def learnt(self) -> Learnt:
        """What this classifier is made of, from which an equal one can be made."""
        bank, scaling = PrototypeBank(self.means, self.counts), (self.mean, self.std)
        mean, std = (None if value is None else value.flatten() for value in scaling)
        values, added = dict(values_of(self.network)), self.classes[len(self.design.classes) :]
        weights, body = ({n: v for n, v in values.items() if (n in self.trained) == own} for own in (True, False))
        scales, mixing = (mean, std), (self.share, self.trained_classes)
        return Learnt(self.name, self.model, weights, body, bank, self.candidates, self.radii, *scales, added, *mixing)

    @property
    def bank(self) -> PrototypeBank:
        """The prototypes that predictions choose among."""
        return PrototypeBank(self.means, self.counts).restricted(self.candidates)

    @property
    def has_prototypes(self) -> bool:
        """Whether there is any prototype to choose."""
        return bool(self.bank.known.any())

    def forward(self, x: Tensor) -> Outputs | MixedOutputs:
        """Logits, embedding, scores and distances of raw samples.

        Args:
            x: `[n, *sample_shape]`: numbers as the data has them before scaling, or token ids.

        Returns:
            The outputs.
        """
        if self.mean is not None and self.std is not None:
            x = (x - self.mean) / self.std
        output = self.network(x)
        return self.compared(output.embedding, output.logits)

    def compared(self, z: Tensor, logits: Tensor) -> Outputs | MixedOutputs:
        """The outputs of embeddings and logits: what comparing them with the prototypes adds."""
        bank, predict = self.bank, self.design.predict
        distances = predict.distances(z, bank)
        distances = distances.amin(0) if distances.ndim > 2 else distances
        nearest, which = distances.min(-1)
        outputs = Outputs(logits, z, predict.scores(z, bank), distances, nearest > self.radii[which])
        if not isinstance(predict, Mix) or self.share is None or self.trained_classes is None:
            return outputs
        padded = nn.functional.pad(logits, (0, len(self.classes) - logits.shape[-1]), value=float("-inf"))
        return MixedOutputs(*outputs, predict.mixed(padded, outputs.scores, self.trained_classes, self.share))

    def inputs(self, x: Any) -> Tensor:
        """Samples in any form that `predict` takes, as `forward` and an exported file take them.

        Args:
            x: The samples.

        Returns:
            `[n, *sample_shape]`, before scaling. The words of a table's columns are numbers in it.

        Example: `session.run(None, {"x": classifier.inputs("new.csv").numpy()})`
        """
        if self.design.columns is not None and (hasattr(x, "columns") or isinstance(x, Mapping | str | Path)):
            x = self.design.columns.encode(x)
        return as_samples(x, self.design.sample_shape, self.design.tokens, f"{self.name}'s classifier")

    def outputs(self, x: Any) -> Outputs | MixedOutputs:
        """The outputs of samples in any form that `predict` takes, in pieces and without gradient."""
        samples = self.inputs(x)
        self.eval()
        device = self.means.device
        with torch.no_grad():
            parts = [self(piece.to(device)) for piece in samples.split(EVAL_BATCH)]
        return type(parts[0])(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def predict(self, x: Any, by: By | None = None) -> Predictions:
        """Classify samples.

        Args:
            x: The samples, as they are before scaling: an array or a tensor `[n, *sample_shape]`; 8-bit images too, and
                where it was trained on a table, a frame or a file with the same columns.
            by: `"head"`, `"prototype"`, `"ensemble"`, the mean of both probabilities, or `"mix"`, both in the shares that
                the client has chosen, where the method mixes them; None is as the method's paper predicts.

        Returns:
            The classes with their names, probabilities, distances to prototypes, and which samples are unlike anything
            known.

        Example: `classifier.predict(x, by="ensemble").classes`
        """
        by = self.checked(by)
        out = self.outputs(x)
        if by == "head":
            p, deciding = self._by_head(out), out.logits
        elif by == "mix" and isinstance(out, MixedOutputs):
            p, deciding = out.mix.exp(), out.mix
        else:
            p, deciding = out.scores.softmax(-1), out.scores
        if by == "ensemble":
            p = deciding = (self._scaled_head(out, p) + p) / 2
        flags = out.unlike.cpu().numpy() if self.has_prototypes else None
        labels, probabilities, distances = (t.cpu().numpy() for t in (deciding.argmax(-1), p, out.distances))
        return Predictions(self.classes, labels, probabilities, distances, flags, by)

    def checked(self, by: By | None) -> By:
        """How predictions are made where nobody says, and an error where this client cannot predict so."""
        predict = self.design.predict
        chosen: By = predict.by if by is None else by
        if chosen not in get_args(By):
            raise unknown("prediction", str(chosen), get_args(By))
        if chosen == "mix":
            if self.share is None:
                raise ProtofedError(f"by=mix: {self.design.method} does not mix head and prototypes; use by=ensemble")
            return chosen
        if chosen != "prototype" and not predict.trains_head:
            raise ProtofedError(f"by={chosen}: {self.design.method} trains no head; use by=prototype")
        if chosen != "head" and not self.has_prototypes:
            raise ProtofedError(f"by={chosen}: {self.name} has no prototypes ({self.design.method}); use by=head")
        return chosen

    def _by_head(self, out: Outputs | MixedOutputs) -> Tensor:
        """The head's probabilities, 0 for classes that it does not have."""
        return nn.functional.pad(out.logits.softmax(-1), (0, len(self.classes) - out.logits.shape[-1]))

    def _scaled_head(self, out: Outputs | MixedOutputs, p: Tensor) -> Tensor:
        """The head's probabilities with those that the prototypes give to classes which the head does not have."""
        new = torch.arange(p.shape[-1], device=p.device) >= out.logits.shape[-1]
        added = torch.where(new, p, torch.zeros_like(p))
        return self._by_head(out) * (1 - added.sum(-1, keepdim=True)) + added

    def add_class(self, name: str, x: Any) -> Classifier:
        """A classifier that knows one more class by its prototype, from some samples and without training.

        The head has no such class: predictions by head stay as they were. A class that is known by name and has no
        prototype here gets one.

        Args:
            name: The name of the class.
            x: Samples of it, one or more, in the form that `predict` takes.

        Returns:
            A new classifier; this one stays as it is.

        Example: `classifier.add_class("nine", x[:5]).predict(x, by="prototype")`
        """
        if not isinstance(name, str) or not name:
            raise ProtofedError(f"the name of a class must be a text, got {name!r}")
        place = self.classes.index(name) if name in self.classes else len(self.classes)
        if place < len(self.classes) and bool((self.bank.known[..., place]).any()):
            raise ProtofedError(f"{self.name}'s classifier knows {name!r} already; a new class needs a name of its own")
        z = self.outputs(x).embedding
        if not len(z):
            raise ProtofedError(f"{name}: expected at least one sample of the new class")
        new = copy.deepcopy(self)
        if place == len(self.classes):
            new.classes = (*self.classes, name)
            new.means = nn.functional.pad(self.means, (0, 0, 0, 1))
            new.counts, new.candidates = (nn.functional.pad(t, (0, 1)) for t in (self.counts, self.candidates))
            new.radii = nn.functional.pad(self.radii, (0, 1), value=float("inf"))
            if self.trained_classes is not None:
                new.trained_classes = nn.functional.pad(self.trained_classes, (0, 1))
        new.means[..., place, :], new.counts[..., place] = z.mean(0), float(len(z))
        new.candidates[place] = True
        own = new.compared(z, z.new_zeros(len(z), len(self.design.classes))).distances[:, place].max()
        others = self.radii[self.candidates & self.radii.isfinite()]
        new.radii[place] = torch.maximum(own, others.median()) if len(others) else float("inf")
        return new


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's t, by Hill's algorithm 396 (1970), to five digits; SciPy would take long to load.

    >>> round(student_quantile(0.99, 10), 3)
    2.764
    """
    tails, n = 2 * (1 - share), freedom
    if n == 1:
        return 1 / math.tan(tails * math.pi / 2)
    if n == 2:
        return math.sqrt(2 / (tails * (2 - tails)) - 2)
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * tails) ** (2 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tails / 2)
        c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * x**2 + 6.3) * x**2 + 36) * x**2 + 94.5) / c - x**2 - 3) / b + 1) * x
        return math.sqrt(n * math.expm1(a * y**2))
    first = 1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)
    return math.sqrt(n * ((first * y - 1) * (n + 1) / (n + 2) + 1 / y))


def radii_of(distances: Tensor, labels: Tensor, candidates: Tensor) -> Tensor:
    """The distance to each class's prototype beyond which a sample is unlike the class.

    It is the upper 99 % prediction limit for the distance of one new sample of the class. The logarithms of distances are
    taken as normal, with a mean for each class and one deviation for all, so that classes of few samples have one too.

    Args:
        distances: `[n, C]`, from a client's labelled samples to all prototypes.
        labels: `[n]`, their classes.
        candidates: `[C]`, the classes with a prototype that may be chosen.

    Returns:
        `[C]`. A class of which the client has no labelled sample gets the largest of the others' limits. All are infinite
        where there are too few samples to say anything: no class has two.

    >>> radii_of(torch.tensor([[1.0], [2.0], [4.0]]), torch.zeros(3, dtype=torch.long), torch.tensor([True]))
    tensor([526.5009])
    """
    known = candidates.cpu()
    own = distances.gather(1, labels[:, None])[:, 0].double().cpu()
    used = known[labels] & own.isfinite()
    y, logs = labels[used].cpu(), (own[used] + TINY).log()
    counts = torch.bincount(y, minlength=len(known))
    freedom = int(counts.sum() - (counts > 0).sum())
    radii = torch.full((len(known),), float("inf"))
    if freedom < 1:
        return radii
    means = torch.zeros(len(known), dtype=torch.double).index_add_(0, y, logs) / counts.clamp_min(1)
    deviation = ((logs - means[y]).square().sum() / freedom).sqrt()
    limits = means + student_quantile(SHARE, freedom) * deviation * (1 + 1 / counts.clamp_min(1)).sqrt()
    measured = (counts > 0) & known
    radii[measured] = limits[measured].exp().float()
    return torch.where(known & ~measured, radii[measured].max(), radii)
