"""Settings: one typed schema for Python, TOML and the command line. An unknown key is an error.

A run is described by its general keys (`rounds`, `lr`, …) and four choices (`method`, `data`, `partition`, `model`), each
of which has settings of its own. The modules `grammar` and `keys` say how keys are written.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from .. import methods, models
from ..data import Dataset
from ..data.augment import AugmentSettings
from ..data.partitions import Partition
from ..data.shift import Shift
from ..data.sources import IN_MEMORY, source_of
from ..data.types import FederatedData
from ..errors import ProtofedError, unknown
from ..federation import selection
from ..federation.choose import EngineSettings
from ..federation.optimiser import LocalSettings
from ..federation.secure import check_participants, check_secure
from ..grammar import parse_pairs
from ..methods.base import Method
from ..methods.control import controlled
from ..models.base import ModelSpec
from ..parts.attacks import Attack, Backdoor
from ..parts.filters import Filter, check_order
from ..privacy.mechanism import mechanisms
from ..privacy.protocol import secure
from ..registry import as_options, coerce, parse_part
from . import architectures
from .general import General, general_keys
from .keys import GENERAL, PARTS, REGISTRIES, combine, find_group, flatten, hint_for_option, with_dataset

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "PARTS",
    "REGISTRIES",
    "AutoModel",
    "General",
    "Settings",
    "combine",
    "general_keys",
    "hint_for_option",
    "parse_pairs",
    "read_toml",
    "resolve",
    "with_dataset",
]


@dataclass(frozen=True)
class AutoModel:
    """A model that is chosen by the shape of the data once it has been loaded, with the options it will have."""

    options: Mapping[str, Any]
    name: str = "auto"

    def for_data(self, data: FederatedData) -> ModelSpec:
        """The model for this data."""
        tokens = not data.clients[0].labelled.x.is_floating_point()
        name = models.default_for(data.sample_shape, tokens)
        return models.registry.make(name, self.options)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's result, and nothing else.

    Example: `resolve("fedsap", {"rounds": 20}).general.rounds`
    """

    general: General
    method: Method
    data: Any  # a data source, or a Dataset in memory
    partition: Partition
    model: ModelSpec | AutoModel

    @property
    def federated(self) -> Method:
        """The method as it is run: itself, or its control where the settings ask for one."""
        return controlled(self.method, self.general.control, self.general.seed)

    @property
    def local(self) -> LocalSettings:
        """The settings of local training."""
        return self.general.group(LocalSettings)

    @property
    def augmentation(self) -> AugmentSettings:
        """The settings of augmentation."""
        return self.general.group(AugmentSettings)

    @property
    def engine(self) -> EngineSettings:
        """The settings of the engine."""
        return self.general.group(EngineSettings)

    def with_engine(self, engine: EngineSettings) -> Settings:
        """These settings with other settings of the engine."""
        return self.with_general(**dataclasses.asdict(engine))

    def with_general(self, **changes: Any) -> Settings:
        """These settings with other general settings: `settings.with_general(rounds=5)`."""
        return dataclasses.replace(self, general=dataclasses.replace(self.general, **changes))

    def to_dict(self) -> dict[str, Any]:
        """All settings as nested mappings, as `settings.toml` holds them."""
        result: dict[str, Any] = dataclasses.asdict(self.general)
        for kind in REGISTRIES:
            choice = getattr(self, kind)
            if kind == "model" and self.general.models:
                continue  # the setting `models` replaces it
            if isinstance(choice, Dataset):
                result[kind] = {"name": IN_MEMORY, **choice.options}
            elif isinstance(choice, AutoModel):
                result[kind] = {"name": choice.name, **choice.options}
            else:
                result[kind] = {"name": choice.name, **as_options(choice)}
        return _without_none(result)

    def to_toml(self) -> str:
        """The text of `settings.toml`."""
        return tomli_w.dumps(self.to_dict())


def _without_none(value: Any) -> Any:
    """The value without keys that are None. TOML has no null, and an absent key has its default, which is None for these."""
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, tuple | list):
        return [_without_none(v) for v in value]
    return value


EXAMPLES = Path(__file__).parent.parent / "examples"


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file of settings, or, where there is no such file, the example of that name that comes with protofed.

    Args:
        path: A TOML file, as `mine.toml`, or the name of an example, as `digits` or `sweeps/fedapa-weight`.

    Returns:
        What the file says, as nested mappings.
    """
    examples = {file.relative_to(EXAMPLES).with_suffix("").as_posix(): file for file in EXAMPLES.rglob("*.toml")}
    file = path if path.is_file() else examples.get(path.as_posix().removesuffix(".toml"), path)
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.suffix == ".toml":
            raise ProtofedError(f"{path}: no such settings file") from None
        raise unknown("settings file or example", str(path), examples) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ProtofedError(f"{path}: not a readable TOML file ({error})") from None


def read_run(path: Path) -> dict[str, Any]:
    """Read a file of settings for one run: as `read_toml`, without the list of methods that a comparison would run."""
    return {key: value for key, value in read_toml(path).items() if key != "methods"}


def resolve(method: str | None, given: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """Make complete settings from keys as a person writes them.

    Args:
        method: The method's name; None where `given` has it.
        given: Keys and values, flat or nested.
        also: Further methods of a comparison, whose keys may appear and are ignored.

    Returns:
        Complete settings. An unknown key, or a value that does not fit, is an error of one line.

    >>> resolve("fedsap", {"rounds": 20, "partition.way": 3}).general.rounds
    20
    """
    flat = flatten(given)
    names = _choices(method, flat)
    options = _short_forms(names, flat)
    known = {kind: _options_of(kind, name) for kind, name in names.items()}
    chosen = dict(names)
    if flat.get("models"):
        known["model"] = set()  # each of several models is written with its settings: cnn?embedding=32
        del chosen["model"]
    others = {name: set(methods.registry.options(name)) for name in also}
    general: dict[str, Any] = {}
    for key, value in flat.items():
        group, rest = find_group(key, known, chosen, others)
        if group == "general":
            general[rest] = value
        elif group:
            _put(options[group], rest.split("."), value, f"{group}.{rest}")
    entries = {kind: _make_choice(kind, names[kind], options[kind]) for kind in REGISTRIES}
    if entries["partition"].name == "natural":
        general.setdefault("clients", 0)  # one for each natural id
    settings = Settings(coerce(General, general, "settings"), **entries)
    for entry in settings.general.models:
        architectures.make(entry)  # a wrong entry is an error before anything runs
    chosen_method = settings.federated
    if settings.general.control:
        _check_control(settings.general)
    if settings.general.new_clients and settings.general.capability:
        raise ProtofedError("new_clients: capability has a number for each client that trains; leave one of them out")
    filters: list[Filter] = [parse_part(Filter.registry, entry) for entry in settings.general.filters]
    check_order(filters)
    if settings.general.privacy:
        filters.append(parse_part(mechanisms, settings.general.privacy))
    for filter in filters:
        filter.check(chosen_method.exchange, chosen_method.name, chosen_method.reduce)
    if settings.general.attack:
        parse_part(Attack.registry, settings.general.attack).check(chosen_method.exchange, chosen_method.name)
    chosen_method.reduce.check(chosen_method.exchange, chosen_method.name)
    if settings.general.shift:
        parse_part(Shift.registry, settings.general.shift)
        if settings.general.ensemble:
            raise ProtofedError(
                f"shift={settings.general.shift}: ensemble=true votes on one test set for all, and every client sees another"
            )
    _check_training(settings)
    if settings.general.secure:
        _check_secure(settings, filters)
    return settings


def _check_control(general: General) -> None:
    """Refuse a control with what would change the exchange that it is a control of."""
    for key in ("attack", "privacy", "secure"):
        if value := getattr(general, key):
            raise ProtofedError(f"control={general.control}: a control is of the method alone; leave out {key}={value}")
    if general.control == "own" and general.choice == "diverse":
        raise ProtofedError("control=own: choice=diverse compares the clients' prototypes, and nothing is exchanged")


def _check_training(settings: Settings) -> None:
    """Refuse features of a frozen encoder where there is none, or where a sample is not always the same."""
    g, method = settings.general, settings.method
    if g.train == "all" and g.features != "once":
        raise ProtofedError(f"features={g.features} needs train=head; with train=all there are no fixed features")
    if g.train == "all" or g.features == "each":
        return
    if method.feed.augments or (method.teacher is not None and method.teacher.feed.augments):
        raise ProtofedError(
            f"train=head: {method.name} trains on augmented samples, whose features cannot be computed once; "
            "use features=each, or a method that does not augment"
        )
    if g.attack and isinstance(parse_part(Attack.registry, g.attack), Backdoor):
        raise ProtofedError(f"train=head: attack={g.attack} looks for its trigger in samples; use features=each")


def _check_secure(settings: Settings, filters: Iterable[Filter]) -> None:
    """Refuse secure sums where they make no sense, or where what they are made of is not installed."""
    from ..privacy import masks  # noqa: F401, an error of one line where a library is missing

    g, method, rules = settings.general, settings.method, parse_part(secure, settings.general.secure)
    check_secure(method.exchange, method.name, method.reduce, filters, g.choice)
    if g.clients:  # otherwise the data says how many there are
        check_participants(rules, selection.participants_per_round(g.participation, g.clients))


def _choices(method: str | None, flat: dict[str, Any]) -> dict[str, Any]:
    """Take the four choices out of flat keys; those that are not given have their defaults."""
    names: dict[str, Any] = {"data": "digits", "partition": "n-way", "model": "auto"}
    if flat.get("models"):
        for key in flat:
            if key == "model" or key.startswith("model."):
                raise ProtofedError(
                    f"{key}: models={_text(flat['models'])} stands in place of one model; use one of the two"
                )
    for kind in REGISTRIES:
        for key in (kind, f"{kind}.name"):
            if key in flat:
                names[kind] = flat.pop(key)
    if method is not None:
        names["method"] = method
    if "method" not in names:
        raise ProtofedError("no method given; `protofed methods` lists them")
    return names


def _make_choice(kind: str, name: Any, options: Mapping[str, Any]) -> Any:
    """Make one of the four choices with its settings. A model `auto` is chosen later, by the data."""
    if isinstance(name, Dataset):
        return name
    if kind == "model" and name == "auto":
        return AutoModel(options)
    return REGISTRIES[kind].make(name, options)


def _short_forms(names: dict[str, Any], given: Collection[str]) -> dict[str, dict[str, Any]]:
    """Replace short forms of choices (`data=mine.npz`, `model=bert:PATH?key=value`) by names, and return their settings."""
    options: dict[str, dict[str, Any]] = {kind: {} for kind in REGISTRIES}
    if isinstance(names["model"], str):
        names["model"], options["model"] = architectures.parse(names["model"])
    if not isinstance(names["data"], Dataset):
        names["data"], options["data"] = source_of(names["data"], [key for key in given if key not in GENERAL])
    return options


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _options_of(kind: str, name: Any) -> set[str]:
    if isinstance(name, Dataset):
        return set()
    if kind == "model" and name == "auto":
        return {option for choice in ("cnn", "mlp") for option in models.registry.options(choice)}
    if not isinstance(name, str):
        raise ProtofedError(f"{kind}={name!r}: expected a name")
    return set(REGISTRIES[kind].options(name))


def _put(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ProtofedError(f"{key}: {part!r} is given both as a value and as a group")
    tree[path[-1]] = value
