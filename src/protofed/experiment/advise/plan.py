"""The plan of a race: its entries, how the data is divided, and a view of the data that has no test rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from ... import methods as all_methods
from ...data import Dataset
from ...data.federate import without_test_rows
from ...data.fingerprint import fingerprint
from ...data.partitions import Natural
from ...data.types import FederatedData
from ...errors import ProtofedError
from ...grammar import write_value
from ...methods.base import Method
from ...results.comparison import Variant
from ...results.tables import setting_text
from ..build import load_data, prepare_data
from ..keys import plain, same_setting
from ..settings import Settings, resolve
from ..variants import make_grid

VALIDATION = 0.2  # the share of a site's training rows, unless a person says otherwise
FEW = 5  # a site with fewer validation samples is named
DIVISION = {"partition": "dirichlet", "alpha": 0.5, "clients": 10}  # where the data has no sites and nobody says how
EVALUATIONS = 50  # of a whole run
STEP = 5.0  # the other learning rate is so many times the first


# --- what is raced ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Candidate:
    """A method of the race.

    Attributes:
        base: The settings that follow from the number of rounds: a weight that grows has its full size at the second rung.
        other: The settings of further entries, each of which goes over `base`.
        ripe: The share of the rounds after which what the method does is fully at work.
    """

    base: Callable[[int], dict[str, Any]] | None = None
    other: tuple[Mapping[str, Any], ...] = ()
    ripe: float = 0.0


def _third(rounds: int) -> int:
    return max(1, rounds // 3)


CANDIDATES: dict[str, Candidate] = {
    "local": Candidate(),
    "fedavg": Candidate(),
    "fedproto": Candidate(other=({"weight": 10},)),
    "fedsap": Candidate(
        lambda rounds: {"alignment.start": rounds // 9, "alignment.end": max(rounds // 9 + 1, _third(rounds))},
        other=({"alignment.maximum": 3},),
        ripe=1 / 3,
    ),
    "fedapa": Candidate(lambda rounds: {"warm_up.end": _third(rounds)}, other=({"warm_up.maximum": 3},), ripe=1 / 3),
    "fedpagr": Candidate(),
    "constellation": Candidate(),
}
WITH_UNLABELLED = ("fixmatch-fedavg", "protofssl")  # raced too where clients have samples without labels


@dataclass(frozen=True)
class Entry:
    """An entry of the race: a variant of a method, with the settings that a run of it would have."""

    variant: Variant
    settings: Settings
    ripe: int

    @property
    def label(self) -> str:
        """The label of the variant."""
        return self.variant.label

    @property
    def method(self) -> str:
        """The name of its method."""
        return self.variant.method


def sends_weights(method: Method) -> bool:
    """Whether weights or whole models travel, up or down."""
    return any(part.kind in ("weights", "models") for part in (*method.exchange.up, *method.exchange.down))


def chosen_methods(
    wanted: Sequence[str], weights: bool, labels: str, own: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """The methods of the race, and why each of the others is not in it.

    Args:
        wanted: The methods that a person asks for; none takes the usual ones.
        weights: Whether weights may travel.
        labels: Who has labels.
        own: Settings of the person, one of which may already name a method.

    Returns:
        The methods, Local first, and a reason for each that is left out.
    """
    if "method" in own or "method.name" in own:
        raise ProtofedError("method=…: advise chooses the method; --methods a,b says which may be chosen")
    names = [all_methods.registry[name].name for name in wanted]
    usual = [*CANDIDATES, *(WITH_UNLABELLED if labels != "all" else ())]
    names = list(dict.fromkeys(["local", *(names or usual)]))
    left_out: dict[str, str] = {}
    for name in all_methods.available():
        method = all_methods.registry.make(name)
        if name in names and (weights or not sends_weights(method)) and method.teacher is None:
            continue
        if method.teacher is not None:
            left_out[name] = "it needs labels at the server"
        elif not weights and sends_weights(method):
            left_out[name] = "weights would travel"
        elif wanted:
            left_out[name] = "it was not asked for"
        elif method.feed.reads_unlabelled and labels == "all":
            left_out[name] = "it is for sites with samples without labels"
        else:
            left_out[name] = f"it is not among the usual ones; --methods {name},… races it"
    return _kept(names, left_out), left_out


def _kept(names: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
    """The methods that are not left out; without one beside Local there is no race."""
    kept = [name for name in names if name not in left_out]
    if kept == ["local"]:
        reasons = "; ".join(f"{name}: {left_out[name]}" for name in names if name in left_out)
        raise ProtofedError(f"nothing is left to race against Local ({reasons or 'only Local was asked for'})")
    return kept


def fitting_methods(names: Sequence[str], division: Division) -> tuple[list[str], dict[str, str]]:
    """The methods that the data allows, and why each of the others is not raced.

    Args:
        names: The methods of the race.
        division: The data.
    """
    if not division.view.x_train.is_floating_point():
        reason = "it compares samples as they are, and tokens are no numbers"
    elif division.base.general.train == "head":
        reason = "it compares samples as they are, and train=head is about a network's features of them"
    else:
        return list(names), {}
    left_out = {name: reason for name in names if all_methods.registry.make(name).predict.common}
    return _kept(names, left_out), left_out


def entries_of(names: Sequence[str], given: Mapping[str, Any], rounds: int, lr: float) -> list[Entry]:
    """The entries of the race: defaults, then other learning rates, then other weights.

    Args:
        names: The methods.
        given: The settings of the person, without `rounds`. A key that is among them is no setting to try.
        rounds: The number of rounds.
        lr: The first learning rate.

    Returns:
        The entries.
    """
    made: dict[str, list[tuple[str, str, dict[str, Any]]]] = {"default": [], "lr": [], "other": []}
    for name in names:
        candidate = CANDIDATES.get(name, Candidate())
        base = _free(candidate.base(rounds) if candidate.base else {}, name, given)
        made["default"].append((name, name, base))
        for change in ({"lr": _rounded(STEP * lr)}, *candidate.other):
            if free := _free(change, name, given):
                label = " ".join([name, *(f"{key}={setting_text(value)}" for key, value in free.items())])
                made["lr" if "lr" in free else "other"].append((label, name, {**base, **free}))
    texts = [
        f"{label}={name}" + ("?" + "&".join(f"{k}={write_value(v)}" for k, v in own.items()) if own else "")
        for label, name, own in chain.from_iterable(made.values())
    ]
    grid = make_grid(texts, local=False, seeds=1, given={**given, "rounds": rounds})
    return [
        Entry(variant, grid.cells[variant.cell(grid.seeds[0])], round(_ripe(variant.method) * rounds))
        for variant in grid.variants
    ]


def _ripe(method: str) -> float:
    return CANDIDATES[method].ripe if method in CANDIDATES else 0.0


def _free(settings: Mapping[str, Any], owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a method, or of another choice, that a person has not set, neither by themselves nor as a group."""

    def is_set(key: str) -> bool:
        group = f"{owner}.{key.partition('.')[0]}"
        return any(same_setting(f"{owner}.{key}", one) or same_setting(group, one) for one in given)

    return {key: value for key, value in settings.items() if not is_set(key)}


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


# --- the budget -------------------------------------------------------------------------------------------------------
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_budget(text: str | float) -> float:
    """Read a time budget.

    Args:
        text: Seconds, as a number, or a text such as `90s`, `10m`, `1.5h` or `1h30m`.

    Returns:
        The seconds.

    >>> parse_budget("10m"), parse_budget("1h30m"), parse_budget(45)
    (600.0, 5400.0, 45.0)
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", str(text).strip())
        whole = "".join(number + unit for number, unit in parts) == str(text).strip()
        seconds = sum(float(number) * UNITS[unit] for number, unit in parts) if whole else 0.0
    if not 0 < seconds < float("inf"):
        raise ProtofedError(f"budget {text!r}: expected a time such as 90s, 10m or 1h30m")
    return seconds


# --- the data ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Division:
    """The data of a race, and how it is divided.

    Attributes:
        given: The settings of the person, with those that say how the data is divided.
        base: The complete settings, of Local.
        view: The data set without any test row. The race sees nothing else.
        share: The share of a site's rows in its validation part.
        natural: Whether the sites are those of the data, and not assumed.
        sites: The names of the sites.
        samples: The number of validation samples of each site.
        identity: A digest of what the sites hold in the race.
        notes: What has to be said of it, as sentences.
    """

    given: dict[str, Any]
    base: Settings
    view: Dataset
    share: float
    natural: bool
    sites: tuple[str, ...]
    samples: tuple[int, ...]
    identity: str
    notes: tuple[str, ...]

    def raced(self, settings: Settings, seed: int) -> Settings:
        """The settings with which an entry is raced: a part of each site's own rows stands where its test rows would be."""
        return replace(
            settings.with_general(
                seed=seed,
                test="local",
                test_share=self.share,
                validation_share=0.0,
                silhouette=False,
                score_prototypes="always",
                snapshots=0,
                ensemble=False,
                track="",
                evaluate_every=max(1, settings.general.rounds // EVALUATIONS),
            ),
            data=self.view,
        )


def divide(given: Mapping[str, Any], methods: Sequence[str]) -> Division:
    """Load the data, decide how it is divided, and take the test rows out of it.

    Args:
        given: The settings of the person, `data` among them.
        methods: The methods of the race, whose own settings may be among `given`.

    Returns:
        The data of the race.
    """
    own = dict(given)
    if own.get("labels") == "server":
        raise ProtofedError(
            "labels=server: no site has labels, so there is no Local to compare with; `protofed compare` has other baselines"
        )
    if own.get("unlabelled") == "open":
        raise ProtofedError("unlabelled=open: advise races on samples of the sites' own classes only")
    if own.get("unseen"):
        raise ProtofedError("unseen: advise chooses for the sites that train; leave the unseen group out of the data")
    share = float(own.pop("validation_share", 0.0) or VALIDATION)
    dataset = load_data(resolve("local", _with_division(own, None), also=methods))
    dataset.check()
    if dataset.num_classes < 2:
        raise ProtofedError(f"{dataset.name}: one class only; there is nothing to tell apart")
    complete = _with_division(own, dataset)
    base = resolve("local", complete, also=methods)
    g = base.general
    view = without_test_rows(
        dataset,
        base.partition,
        g.clients or None,
        seed=g.seed,
        test=g.test,
        test_share=g.test_share,
        server_labels=g.server_labels,
    )
    natural = isinstance(base.partition, Natural)
    division = Division(complete, base, view, share, natural, (), (), "", ())
    raced = prepare_data(division.raced(base, g.seed))
    sites = raced.client_names or tuple(f"client {c}" for c in range(len(raced.clients)))
    if len(sites) < 2:
        raise ProtofedError(f"{dataset.name}: one site only ({sites[0]}); there is nobody to exchange anything with")
    samples = tuple(len(client.test) for client in raced.clients)
    notes = (*_about(own, base), *_few(sites, samples), *_single(raced))
    return replace(division, sites=sites, samples=samples, identity=fingerprint(raced), notes=notes)


def _with_division(own: Mapping[str, Any], dataset: Dataset | None) -> dict[str, Any]:
    """The settings with a partition and a test part where a person has named none; without data, as if it had no sites."""
    given = plain(own)
    if "partition" not in given:
        has_sites = dataset is not None and dataset.group_train is not None
        given = {**({"partition": "natural"} if has_sites else _free(DIVISION, "partition", given)), **given}
    if "test" not in given and dataset is not None:
        foreign = given["partition"] == "natural" and dataset.y_test is not None and dataset.group_test is None
        given["test"] = "central" if foreign else "local"  # by site, as validation is, unless test rows name no site
    return given


def _about(own: Mapping[str, Any], base: Settings) -> list[str]:
    """What has to be said of sites that are assumed, and of a test that is not by site."""
    other = (
        "Validation is on each site's own rows, but the test is on rows of all sites with the site's classes; the two need "
        "not agree."
    )
    central = [other] if base.general.test == "central" else []
    return [*_assumed(own, base), *central]


def _assumed(own: Mapping[str, Any], base: Settings) -> list[str]:
    if isinstance(base.partition, Natural):
        return []
    if any(key in ("partition", "partition.name") for key in own):
        return ["The sites are assumed, as your settings divide the data; the answer holds for such a division only."]
    return [
        f"The data names no sites, so {base.general.clients} were assumed, among which the classes are shared out unevenly "
        f"(partition=dirichlet alpha={base.partition.alpha:g}); the answer holds for such a division only."  # type: ignore[attr-defined]
    ]


def _few(sites: Sequence[str], samples: Sequence[int]) -> list[str]:
    small = [f"{name} ({number})" for name, number in zip(sites, samples, strict=True) if number < FEW]
    if not small:
        return []
    shown = ", ".join(small[:6]) + (f" and {len(small) - 6} more" if len(small) > 6 else "")
    who, whose = ("Some sites have", "their") if len(small) > 1 else ("One site has", "its")
    return [f"{who} fewer than {FEW} validation samples, so {whose} own figures say little: {shown}."]


def _single(raced: FederatedData) -> list[str]:
    """A sentence where sites hold one class only: their figures are then easily perfect."""
    single = sum(int(client.classes.sum()) < 2 for client in raced.clients)
    return [f"{single} of {len(raced.clients)} sites hold a single class, which is no task for them."] if single else []
