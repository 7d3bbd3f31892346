"""Differential privacy as a filter: what a client contributes is bounded, and Gaussian noise that fits the bound is added.

A client's contribution is, for each class, the sum of what is averaged and how often it counts. Both are bounded and both
carry noise, for all classes, so that neither counts nor the choice of rows give away which classes a client holds. The
number of its samples does not travel. Noise is added by the server to the sum over all clients (`placement=central`), or
by each client to its own contribution (`placement=local`). What follows (a quotient, a threshold on noisy counts, a clip
of the result) reads noisy numbers alone and therefore costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..bank import PrototypeBank
from ..errors import ProtofedError
from ..parts.filters import Arrival, Departure, Filter
from ..parts.reduce import Mean, Reduce, Reduced, Sums
from ..registry import Registry
from ..seeds import Normals
from ..wire import Bundle, Exchange, WireError
from ..wire.exchange import SAMPLES, PartKind
from . import accountant

GRID = 1024
"""What carries noise is rounded to so many steps in one standard deviation, because the last bits of a floating sum could
give away more than the sum in exact arithmetic does."""
MARGIN = 1 - 1e-6  # of bounds, for rounding in single precision


class SphereMean(Mean):
    """The mean by counts, put on the unit sphere."""

    def finish(self, total: Sums, uploads: object, sent: Mapping[str, Tensor]) -> Reduced:
        reduced = super().finish(total, (), sent)
        banks = {name: bank.normalised() for name, bank in reduced.banks.items()}
        return replace(reduced, bank=None if reduced.bank is None else reduced.bank.normalised(), banks=banks)


@dataclass(frozen=True)
class Privacy(Filter):
    """Bounded contributions with Gaussian noise. The subclasses say whom it protects."""

    setting: ClassVar[str] = "privacy"
    guarded: ClassVar[bool] = False  # who is dropped may not depend on the others, and bounds do what a guard does

    placement: Literal["central", "local"] = "central"
    clip: float = 1.0  # bound on the norm of an embedding or a prototype
    update: float = 1.0  # bound on the norm of the change of a shared model's weights
    noise: float | None = None  # the noise multiplier; none: what `epsilon` asks for over all rounds
    epsilon: float | None = None  # the budget ε; the run stops before it would be exceeded
    delta: float = 1e-5
    least: float | None = (
        None  # a class whose noisy count is below this is taken as absent; none: the noise's deviation
    )

    def __post_init__(self) -> None:
        for name in ("clip", "update", "epsilon", "least"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be above 0")
        if self.noise is not None and not (self.noise >= 0 and math.isfinite(self.noise)):
            raise ValueError("noise must not be negative")
        if not 0 < self.delta < 1:
            raise ValueError("delta must be between 0 and 1")
        if self.noise is None and self.epsilon is None:
            raise ValueError("set epsilon, the budget, or noise, the noise multiplier")

    # --- what is refused, what is planned -------------------------------------------------------------------------
    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        super().check(exchange, owner, rule)
        for part in exchange.up:
            if part.kind in ("tensor", "scalar", "models"):
                raise ProtofedError(
                    f"privacy={self.name} bounds prototypes and weights, and {owner} also sends {part.name}"
                )
            if part.kind == "weights" and exchange.keeps_model:
                raise ProtofedError(
                    f"privacy={self.name} bounds the change of a shared model; {owner}'s clients keep their own"
                )
        if self.placement == "central" and not any(part.kind in rule.summed for part in exchange.up):
            raise ProtofedError(
                f"privacy={self.name}: the server of {owner} needs each upload by itself, so noise on their sum "
                "protects nobody; set placement=local"
            )

    def rule(self, rule: Reduce) -> Reduce:
        """What clients contribute counts by its own bounded count, whatever the method's rule weighs by."""
        if self.placement == "local" or not isinstance(rule, Mean):
            return rule
        return SphereMean("size") if rule.by == "directions" else Mean("size")

    def planned(self, exchange: Exchange, rounds: int, most: Callable[[int], int]) -> tuple[Privacy, int]:
        """The noise and the number of rounds that the budget allows.

        Args:
            exchange: what the method exchanges. Each bank and each model is a release.
            rounds: the number of rounds that are asked for.
            most: in how many of the first so many rounds the client that takes part most often takes part.

        Returns:
            the mechanism with its noise multiplier, and the number of rounds.
        """
        parts = len(exchange.up)
        mechanism = self
        if self.noise is None:
            assert self.epsilon is not None
            mechanism = replace(self, noise=accountant.noise_for(self.epsilon, parts * most(rounds), self.delta))
        if self.epsilon is None:
            return mechanism, rounds
        assert mechanism.noise is not None
        budget = self.epsilon * (1 + 1e-9)
        affordable = accountant.releases_within(budget, mechanism.noise, self.delta, parts * most(rounds)) // parts
        while rounds and most(rounds) > affordable:
            rounds -= 1
        if rounds == 0:
            raise ProtofedError(
                f"privacy: one round with noise={mechanism.noise:g} costs more than the budget, ε = {self.epsilon:g}"
            )
        return mechanism, rounds

    def describe(self, rounds: int, exchange: Exchange) -> Mapping[str, float]:
        """ε after so many rounds of the client that took part most often."""
        assert self.noise is not None
        return {"epsilon": accountant.epsilon(self.noise, len(exchange.up) * rounds, self.delta)}

    # --- at the client --------------------------------------------------------------------------------------------
    def sensitivity(self, classes: int) -> float:
        """By how much, in units of the clip, one protected unit changes the sums and counts of so many classes."""
        raise NotImplementedError

    def contribution(self, bank: PrototypeBank, departure: Departure) -> tuple[Tensor, Tensor]:
        """A client's bounded sums `[C, d]` and counts `[C]`."""
        raise NotImplementedError

    def leave(self, upload: Bundle, departure: Departure) -> Bundle:
        banks = {name: self._left(bank, departure) for name, bank in upload.all_banks().items()}
        weights = self._bounded_weights(upload.weights, departure) if upload.weights else {}
        main = banks.pop("", None)
        return replace(upload, bank=main, banks=banks, weights=weights, scalars={**upload.scalars, SAMPLES: 1.0})

    def _left(self, bank: PrototypeBank, departure: Departure) -> PrototypeBank:
        sums, counts = self.contribution(bank, departure)
        if self._noisy_at_client("bank", departure):
            sums, counts = self._noised(sums, counts, departure.normals)
        means = sums / torch.where(counts > 0, counts, 1.0)[:, None]
        return PrototypeBank(means.to(bank.means.dtype), counts.to(bank.counts.dtype))

    def _noisy_at_client(self, kind: PartKind, departure: Departure) -> bool:
        """Whether the client itself adds the noise to a part: the server is not trusted with it, or needs it by itself."""
        return self.placement == "local" or kind not in departure.rule.summed

    def _bounded_weights(self, weights: Mapping[str, Tensor], departure: Departure) -> dict[str, Tensor]:
        sent = departure.received.weights
        change = {name: value.double() - sent[name].double() for name, value in weights.items()}
        norm = float(torch.stack([c.norm() for c in change.values()]).norm())
        share = min(1.0, MARGIN * self.update / norm) if norm > 0 else 1.0
        bounded = {name: sent[name].double() + share * c for name, c in change.items()}
        if self._noisy_at_client("weights", departure):
            bounded = {name: self._with_noise(v, self.update, departure.normals) for name, v in bounded.items()}
        return {name: value.to(weights[name].dtype) for name, value in bounded.items()}

    def inspect(self, upload: Bundle, source: str, sent: Bundle, rule: Reduce) -> None:
        """Refuse what exceeds its bound: a client that does not keep to it would count for more than others.

        What carries its client's noise has no bound that can be checked.
        """
        if self.placement == "local":
            return
        slack = 1 + 1e-4  # for rounding in single precision
        for name, bank in upload.all_banks().items() if "bank" in rule.summed else ():
            norms, counts = bank.means.double().norm(dim=-1), bank.counts.double()
            if bool((norms > slack * self.clip).any()) or not self.is_bounded(norms / self.clip, counts / slack):
                raise WireError(f"{source}: bank {name!r} exceeds the bound of privacy={self.name}")
        if upload.weights and "weights" in rule.summed and upload.weights.keys() == sent.weights.keys():
            norm = torch.stack(
                [(v.double() - sent.weights[n].double()).norm() for n, v in upload.weights.items()]
            ).norm()
            if not float(norm) <= slack * self.update:
                raise WireError(f"{source}: the change of its weights exceeds the bound of privacy={self.name}")

    def is_bounded(self, norms: Tensor, counts: Tensor) -> bool:
        """Whether prototypes of these norms, in units of the clip, and counts are a contribution that keeps its bound."""
        return True

    # --- noise ----------------------------------------------------------------------------------------------------
    def _with_noise(self, value: Tensor, sensitivity: float, normals: Normals) -> Tensor:
        """A float64 tensor with noise, rounded to the grid."""
        assert self.noise is not None
        deviation = self.noise * sensitivity
        if deviation == 0:
            return value
        step = 2.0 ** math.floor(math.log2(deviation / GRID))  # a power of 2, so that multiples of it are exact
        noisy = value.cpu() + deviation * normals.draw(*value.shape)
        return ((noisy / step).round() * step).to(value.device)

    def _noised(self, sums: Tensor, counts: Tensor, normals: Normals) -> tuple[Tensor, Tensor]:
        """Noisy sums and counts; a class whose noisy count is too small is absent, and no mean exceeds the clip."""
        assert self.noise is not None
        sensitivity = self.sensitivity(len(counts))
        counts = self._with_noise(counts, sensitivity, normals)
        sums = self._with_noise(sums, sensitivity * self.clip, normals)
        least = max(self.noise * sensitivity, 0.5) if self.least is None else self.least
        counts = torch.where(counts >= least, counts, 0.0)
        norms = sums.norm(dim=-1)
        share = (self.clip * counts / norms.clamp_min(1e-30)).clamp_max(1.0)
        return sums * share[:, None], counts

    # --- at the server --------------------------------------------------------------------------------------------
    def total(self, sums: Sums, arrival: Arrival) -> Sums:
        if self.placement == "local":
            return sums
        tensors = dict(sums.tensors)
        for key in sorted(tensors):  # the order of the draws does not depend on who arrived first
            kind, _, name = key.partition("/")
            if kind == "means":
                counts = tensors[f"counts/{name}"]
                noisy = self._noised(tensors[key].double(), counts.double(), arrival.normals)
                tensors[key], tensors[f"counts/{name}"] = (t.to(tensors[key].dtype) for t in noisy)
                tensors[f"holders/{name}"] = tensors[f"counts/{name}"]
            elif kind == "weight":
                tensors[key] = self._with_noise(tensors[key], self.update, arrival.normals)
        return Sums(tensors, sums.numbers, sums.dtypes)


mechanisms: Registry[Privacy] = Registry("privacy")


@mechanisms.register("client")
@dataclass(frozen=True)
class ClientPrivacy(Privacy):
    """Hides whether a client took part, with all its samples.

    Every client counts the same, whatever the method's rule. Whatever a client did with its samples, training included,
    is covered, because all that leaves it is bounded.
    """

    classes: int = 0  # the most classes for which one client counts in full; 0: all

    def sensitivity(self, classes: int) -> float:
        return math.sqrt(2 * min(self.classes or classes, classes))

    def contribution(self, bank: PrototypeBank, departure: Departure) -> tuple[Tensor, Tensor]:
        known = bank.known.double()
        means = bank.means.double() * known[:, None]
        norms = means.norm(dim=-1, keepdim=True)
        means = means * (MARGIN * self.clip / norms.clamp_min(MARGIN * self.clip))
        norm = float(torch.cat([(means / self.clip).flatten(), known]).norm())
        share = min(1.0, MARGIN * self.sensitivity(len(known)) / norm) if norm > 0 else 1.0
        return share * means, share * known

    def is_bounded(self, norms: Tensor, counts: Tensor) -> bool:
        return float(torch.cat([norms * counts, counts]).norm()) <= self.sensitivity(len(counts))


@mechanisms.register("sample")
@dataclass(frozen=True)
class SamplePrivacy(Privacy):
    """Hides whether a sample is among a client's samples, in the prototypes that the client sends.

    Embeddings are clipped, each sample counts once. The bound holds only if the encoder does not depend on the sample: it
    is frozen, or was trained on other data.
    """

    encoder: Literal["trained", "fixed"] = "trained"  # fixed: it was not trained on these samples

    def check(self, exchange: Exchange, owner: str, rule: Reduce) -> None:
        super().check(exchange, owner, rule)
        if any(part.kind != "bank" or part.name != "bank" for part in exchange.up):
            raise ProtofedError(
                f"privacy=sample is for methods that send class prototypes alone; {owner} sends "
                f"{', '.join(part.name for part in exchange.up)}: privacy=client covers all of it"
            )
        if self.encoder == "trained":
            raise ProtofedError(
                "privacy=sample: an encoder that was trained on a sample gives it away in every embedding, so noise on "
                "sums of embeddings is no guarantee; use privacy=client, or encoder=fixed where the encoder has not seen "
                "these samples"
            )

    def sensitivity(self, classes: int) -> float:
        return math.sqrt(2)

    def contribution(self, bank: PrototypeBank, departure: Departure) -> tuple[Tensor, Tensor]:
        output, batch = departure.trained.outputs()
        z = output.embedding.double()
        norms = z.norm(dim=-1, keepdim=True)
        z = z * (MARGIN * self.clip / norms.clamp_min(MARGIN * self.clip))
        member = (batch.y[:, None] == torch.arange(bank.num_classes, device=z.device)).double()
        member = member * (batch.weight[:, None] > 0)
        return member.T @ z, member.sum(0)
