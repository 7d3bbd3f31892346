"""Settings: one typed schema for Python, TOML and the command line. An unknown key is an error.

A run is described by its general keys (`rounds`, `lr`, …) and four choices (`method`, `data`, `partition`, `model`), each
of which has settings of its own. A key may be written in full (`partition.way=3`) or short (`way=3`) where only one of the
four has it. A method may also be named (`fedsap.scale=16`), which in a comparison speaks to that method alone.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w

from .. import methods, models
from ..data import Dataset, partitions, sources
from ..data.augment import AugmentSettings, Flip
from ..data.augment import Kind as AugmentKind
from ..data.partitions import Partition
from ..data.sources import is_table
from ..data.types import FederatedData
from ..errors import ProtofedError, unknown
from ..federation.choose import Convolution, EngineSettings, Inner, Layout
from ..federation.optimiser import LocalSettings
from ..methods.base import Method
from ..models.base import ModelSpec
from ..parts import Reduce
from ..parts.filters import Filter
from ..registry import Registry, as_options, as_text, first_problem, parse_part
from ..schedules import Ramp
from . import architectures

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REGISTRIES: dict[str, Registry[Any]] = {
    "method": methods.registry,
    "data": sources,
    "partition": partitions,
    "model": models.registry,
}

IN_MEMORY = "in-memory"
PARTS = ("exchange", "feed", "reduce", "predict", "teacher")  # of a method; some are settings of some methods


class General(pydantic.BaseModel):
    """The keys that are neither the method's nor the data's, partition's or model's."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    rounds: int = pydantic.Field(100, ge=1, description="communication rounds")
    clients: int = pydantic.Field(20, ge=0, description="number of clients; 0 with partition=natural: one for each id")
    participation: float = pydantic.Field(1.0, gt=0, le=1, description="share of the clients that take part in a round")
    choice: Literal["random", "diverse"] = pydantic.Field(
        "random", description="who takes part: random, or diverse (by prototypes and capability; fedapa)"
    )
    seed: int = pydantic.Field(1234, ge=0, description="the run's one seed; every random stream is derived from it")
    # local training
    epochs: int = pydantic.Field(1, ge=1, description="local epochs a round")
    batch: int = pydantic.Field(8, ge=1, description="local batch size")
    optimiser: Literal["sgd", "adam", "rmsprop"] = pydantic.Field("sgd", description="sgd, adam or rmsprop")
    lr: float = pydantic.Field(0.01, gt=0, description="learning rate")
    momentum: float = pydantic.Field(0.5, ge=0, lt=1, description="of SGD and RMSprop")
    weight_decay: float = pydantic.Field(0.0, ge=0, description="L2 penalty")
    nesterov: bool = pydantic.Field(False, description="Nesterov's momentum, with SGD")
    lr_schedule: Literal["constant", "cosine"] = pydantic.Field(
        "constant", description="constant, or cosine: the learning rate falls to 0 over the rounds"
    )
    clip: float = pydantic.Field(0.0, ge=0, description="largest norm of a client's gradient; 0: any")
    keep_optimiser: bool = pydantic.Field(False, description="keep the optimiser's state between rounds")
    initial: Literal["same", "own"] = pydantic.Field(
        "same", description="same: all clients start from one model; own: each from its own"
    )
    # who has which model, and what stands between encoder and head
    models: tuple[str, ...] = pydantic.Field(
        (), description="several models in place of one: dealt round, or one for each client (cnn,mlp?embedding=32)"
    )
    assignment: Literal["round-robin", "capability"] = pydantic.Field(
        "round-robin", description="how models are dealt: round-robin, or capability (the first listed to the weakest)"
    )
    capability: tuple[Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)], ...] = pydantic.Field(
        (), description="one number per client, larger is stronger; none: its number of training samples"
    )
    projection: Literal["auto", "none", "linear", "consensus"] = pydantic.Field(
        "auto", description="between encoder and head: auto (the method's; linear for several models), or one of three"
    )
    dim: int = pydantic.Field(
        0, ge=0, description="width of the projected embedding; 0: the model's own, or 512 (images) and 128 for several"
    )
    projection_dropout: float = pydantic.Field(0.1, ge=0, lt=1, description="dropout inside projection=consensus")
    # what is held out, and who has labels
    test: Literal["central", "local"] = pydantic.Field(
        "central", description="central: own classes of the central test set; local: a part of the client's own data"
    )
    test_share: float = pydantic.Field(0.2, gt=0, lt=1, description="share held out for testing where it is split off")
    validation_share: float = pydantic.Field(
        0.0, ge=0, lt=1, description="share of a client's training data for validation; 0: none"
    )
    labels: Literal["all", "client", "server"] = pydantic.Field(
        "all", description="who has labels: all, client or server"
    )
    labels_per_class: int = pydantic.Field(
        5, ge=1, description="labelled samples per class and client, with labels=client"
    )
    server_labels: int = pydantic.Field(0, ge=0, description="labelled samples at the server")
    server_label_noise: float = pydantic.Field(
        0.0, ge=0, le=1, description="share of the server's labels replaced by another class"
    )
    unlabelled_limit: int = pydantic.Field(0, ge=0, description="unlabelled samples a client, at most; 0: no limit")
    unlabelled: Literal["own", "open"] = pydantic.Field(
        "own", description="unlabelled samples: of the client's own classes, or open (of other classes too)"
    )
    open_share: float = pydantic.Field(
        0.5, gt=0, lt=1, description="share of other classes among the unlabelled samples, with unlabelled=open"
    )
    filters: tuple[str, ...] = pydantic.Field(
        (), description="what is done to every upload before it leaves a client: clip?norm=1, quantise?bits=8"
    )
    # views of samples, for methods that learn from unlabelled ones
    augmentation: AugmentKind = pydantic.Field(
        "auto", description="what samples are to it: auto (by the data), none, image, csi, features or tokens"
    )
    flip: Flip = pydantic.Field("auto", description="mirror images: auto (where the data allows it), on or off")
    crop: float = pydantic.Field(0.125, ge=0, le=0.5, description="share of the side by which an image is shifted")
    randaugment: tuple[int, int] = pydantic.Field((2, 10), description="operations of a strong view, and magnitude")
    cutout: float = pydantic.Field(0.0, ge=0, le=1, description="side of the square cut out of a strong view; 0: none")
    # what is recorded, and how
    start_from: str = pydantic.Field(
        "", description="folder of a finished run whose server and clients this run starts from"
    )
    track: Literal["", "tensorboard", "mlflow", "wandb"] = pydantic.Field(
        "", description="also tell tensorboard, mlflow or wandb about each round (needs an --out folder)"
    )
    silhouette: bool = pydantic.Field(True, description="measure the embedding space at each evaluation")
    snapshots: int = pydantic.Field(
        8, ge=0, description="of how many evaluations embeddings are kept, for pictures; 0: none"
    )
    evaluate_every: int = pydantic.Field(1, ge=1, description="evaluate every so many rounds, and at the last")
    candidates: Literal["own", "all"] = pydantic.Field(
        "own", description="the nearest prototype is one of the client's own classes, or of all"
    )
    ensemble: bool = pydantic.Field(False, description="also score the mean vote of all clients on the shared test set")
    checkpoint_every: int = pydantic.Field(
        10, ge=1, description="write a checkpoint every so many rounds, and at the last"
    )
    device: str = pydantic.Field("cpu", description="cpu, cuda, cuda:N or mps")
    # how clients are trained: `auto` parts are settled by measurement; 0 means as many as fit
    engine: Literal["auto", "loop", "stack", "workers"] = pydantic.Field(
        "auto", description="auto (measured), loop, stack or workers"
    )
    inner: Inner | tuple[Inner, ...] = pydantic.Field(
        "auto", description="what a worker does: auto, loop or stack; with several models also one for each"
    )
    layout: Layout | tuple[Layout, ...] = pydantic.Field(
        "auto", description="memory layout of a loop: auto, contiguous or channels_last"
    )
    convolution: Convolution | tuple[Convolution, ...] = pydantic.Field(
        "auto", description="auto; of a loop grouped or lean, of a stack grouped or unfold"
    )
    workers: int = pydantic.Field(0, ge=0, le=512, description="worker processes; 0: as many as cores")
    threads: int = pydantic.Field(0, ge=0, le=512, description="torch threads of one process; 0: chosen by measurement")

    @pydantic.field_validator("models", "capability", "filters", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part.strip() for part in value.split(",") if part.strip()]
        return [value] if isinstance(value, int | float) else value


@dataclass(frozen=True)
class AutoModel:
    """The model is chosen by the data's shape when the data is there; its options wait until then."""

    options: Mapping[str, Any]
    name: str = "auto"

    def for_data(self, data: FederatedData) -> ModelSpec:
        tokens = not data.clients[0].labelled.x.is_floating_point()
        name = models.default_for(data.sample_shape, tokens)
        return models.registry.make(name, _merged(models.registry, name, self.options))


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run's result, and nothing else."""

    general: General
    method: Method
    data: Any  # a data source, or a Dataset in memory
    partition: Partition
    model: ModelSpec | AutoModel

    @property
    def local(self) -> LocalSettings:
        names = [f.name for f in dataclasses.fields(LocalSettings)]
        return LocalSettings(**{name: getattr(self.general, name) for name in names})

    @property
    def augmentation(self) -> AugmentSettings:
        names = [f.name for f in dataclasses.fields(AugmentSettings)]
        return AugmentSettings(**{name: getattr(self.general, name) for name in names})

    @property
    def engine(self) -> EngineSettings:
        names = [f.name for f in dataclasses.fields(EngineSettings)]
        return EngineSettings(**{name: getattr(self.general, name) for name in names})

    def with_engine(self, engine: EngineSettings) -> Settings:
        return self.with_general(**dataclasses.asdict(engine))

    def with_general(self, **changes: Any) -> Settings:
        return dataclasses.replace(self, general=self.general.model_copy(update=changes))

    def to_dict(self) -> dict[str, Any]:
        """Complete and nested, as `settings.toml` holds it."""
        result: dict[str, Any] = self.general.model_dump()
        for kind in REGISTRIES:
            choice = getattr(self, kind)
            if kind == "model" and self.general.models:
                continue  # several stand in its place
            if isinstance(choice, Dataset):
                result[kind] = {"name": IN_MEMORY}
            elif isinstance(choice, AutoModel):
                result[kind] = {"name": choice.name, **choice.options}
            else:
                result[kind] = {"name": choice.name, **as_options(choice)}
        return _without_none(result)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key means the default, which for these is none."""
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


def parse_pairs(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` words of a command line. A value is read as TOML where it is TOML, else as text; `a,b` is a list."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ProtofedError(f"expected key=value, got {pair!r}")
        result[key.strip()] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        pass
    if "," in text and not Path(text).exists():
        return [_value(part) for part in text.split(",")]
    return text


def combine(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `over` on top of those of `base`. Another choice by name leaves the old choice's settings behind."""
    low, high = _flatten(base), _flatten(over)
    for kind in REGISTRIES:
        name = high.get(kind, high.get(f"{kind}.name"))
        if name is not None:
            old = low.pop(kind, low.pop(f"{kind}.name", None))
            if old != name:
                low = {k: v for k, v in low.items() if not k.startswith(f"{kind}.")}
    return {**low, **high}


def resolve(method: str | None, given: Mapping[str, Any], also: Iterable[str] = ()) -> Settings:
    """Settings from keys as a person writes them. `also` names further methods whose keys may appear and are skipped."""
    flat = _flatten(given)
    names: dict[str, Any] = {"data": "digits", "partition": "n-way", "model": "auto"}
    if flat.get("models"):
        for key in flat:
            if key == "model" or key.startswith("model."):
                raise ProtofedError(
                    f"{key}: models={_shown(flat['models'])} stands in place of one model; use one of the two"
                )
    for kind in ("method", "data", "partition", "model"):
        for key in (kind, f"{kind}.name"):
            if key in flat:
                names[kind] = flat.pop(key)
    if method is not None:
        names["method"] = method
    if "method" not in names:
        raise ProtofedError("no method given; `protofed methods` lists them")
    options = _initial_options(names)
    general: dict[str, Any] = {}
    known = {kind: _options_of(kind, name) for kind, name in names.items()}
    if flat.get("models"):
        known["model"] = set()  # each has its own, written with it: cnn?embedding=32
    others = {name: set(methods.registry.options(name)) for name in also}
    for key, value in flat.items():
        group, rest = _place(key, known, names["method"], others)
        if group == "general":
            general[rest] = value
        elif group:
            _put(options[group], rest.split("."), value, f"{group}.{rest}")
    made: dict[str, Any] = {}
    for kind, registry in REGISTRIES.items():
        if isinstance(names[kind], Dataset):
            made[kind] = names[kind]
        elif kind == "model" and names[kind] == "auto":
            made[kind] = AutoModel(options[kind])
        else:
            made[kind] = registry.make(names[kind], _merged(registry, names[kind], options[kind]))
    if made["partition"].name == "natural":
        general.setdefault("clients", 0)  # one for each natural id
    try:
        settings = Settings(General(**general), **made)
    except pydantic.ValidationError as error:
        raise ProtofedError(f"settings: {first_problem(error)}") from None
    _ = settings.local  # keys that contradict each other are known before anything runs
    for entry in settings.general.models:
        architectures.make(entry)  # a wrong one is known before anything runs
    for entry in settings.general.filters:
        parse_part(Filter.registry, entry).check(settings.method.exchange, settings.method.name)
    settings.method.reduce.check(settings.method.exchange, settings.method.name)
    return settings


def _initial_options(names: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Short forms: a file, a folder or `hub:NAME` in place of a data set's name; `bert:PATH?key=value` for a model."""
    options: dict[str, dict[str, Any]] = {kind: {} for kind in REGISTRIES}
    if isinstance(names["model"], str):
        names["model"], options["model"] = architectures.parse(names["model"])
    chosen = names["data"]
    if isinstance(chosen, Dataset):
        return options
    chosen = str(chosen)
    if chosen.startswith("hub:"):
        names["data"], options["data"] = "hub", {"path": chosen.removeprefix("hub:")}
    elif chosen.endswith(".npz"):
        names["data"], options["data"] = "npz", {"path": chosen}
    elif is_table(chosen):
        names["data"], options["data"] = "text", {"path": chosen}
    elif chosen not in sources and Path(chosen).is_dir():
        names["data"], options["data"] = "folder", {"path": chosen}
    return options


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _flatten(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, Reduce):
            flat[f"{prefix}{key}"] = as_text(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type | Dataset):
            flat |= _flatten(dataclasses.asdict(value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _options_of(kind: str, name: Any) -> set[str]:
    if isinstance(name, Dataset):
        return set()
    if kind == "model" and name == "auto":
        return {option for choice in ("cnn", "mlp") for option in models.registry.options(choice)}
    if not isinstance(name, str):
        raise ProtofedError(f"{kind}={name!r}: expected a name")
    return set(REGISTRIES[kind].options(name))


def _place(key: str, known: Mapping[str, set[str]], method: str, others: Mapping[str, set[str]]) -> tuple[str, str]:
    """Which group a key belongs to and its name there; an empty group: it speaks to another method of a comparison."""
    head, _, rest = key.partition(".")
    if rest and head in REGISTRIES:
        return head, rest
    if rest and head in methods.registry:
        if methods.registry[head] is methods.registry[method]:
            return "method", rest
        options = methods.registry.options(head)
        if rest.split(".")[0] not in options:
            raise unknown(f"setting of method {head!r}:", rest, options)
        return "", ""
    if key in General.model_fields:
        return "general", key
    owners = [kind for kind, names in known.items() if head in names]
    if len(owners) == 1:
        return owners[0], key
    if len(owners) > 1:
        raise ProtofedError(f"{head!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{key} for one of them")
    if any(head in names for names in others.values()):
        return "", ""
    if head in PARTS:
        having = [name for name in methods.available() if head in methods.registry.options(name)]
        why = ""
        if head == "reduce":
            made = methods.registry.make(method)
            if not made.exchange.up:
                why = " (its clients send nothing)"
            elif not made.reduce.additive:
                why = " (it needs each upload by itself)"
        raise ProtofedError(
            f"{key}: the {head} of {method} is fixed by the method{why}; it is a setting of {', '.join(having) or 'none'}"
        )
    choices = {*General.model_fields, *REGISTRIES, *(n for names in known.values() for n in names)}
    raise unknown("setting", key, choices | {n for names in others.values() for n in names})


def _put(tree: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ProtofedError(f"{key}: {part!r} is given both as a value and as a group")
    tree[path[-1]] = value


def _merged(registry: Registry[Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A group given in part (`alignment.shape`) keeps the rest of its default; one number becomes a list of one."""
    merged = dict(options)
    fields = registry.options(name)
    for key, value in options.items():
        spec = fields.get(key)
        if spec is None:
            continue
        if isinstance(value, Mapping) and isinstance(spec.default, Ramp):
            defaults = dataclasses.asdict(spec.default)
            for part in value:
                if part not in defaults:
                    raise unknown(f"setting of {key!r}:", part, defaults)
            merged[key] = {**defaults, **value}
        elif isinstance(value, Mapping) and isinstance(spec.default, int | float):  # a weight becomes a schedule
            merged[key] = {"start": 0, "maximum": spec.default, **value}
        elif isinstance(value, int | float) and isinstance(spec.default, tuple):
            merged[key] = [value]
    return merged
