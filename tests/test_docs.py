"""What the documentation says is so: its Python runs, its commands and keys exist, its tables hold the defaults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import typer

import protofed as pf
from protofed import methods, wire
from protofed.cli import app
from protofed.experiment.compare import make_grid, parse_axes, parse_words
from protofed.experiment.settings import PARTS, REGISTRIES, combine, general_keys, parse_pairs, read_toml, resolve
from protofed.parts import Reduce
from protofed.parts.attacks import Attack
from protofed.parts.filters import Filter
from protofed.privacy.mechanism import mechanisms
from protofed.privacy.protocol import secure
from protofed.registry import as_options, as_text, is_part, parse_part
from protofed.schedules import Ramp, Weight

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "methods").glob("*.md"))
NOT_RUN = "<!-- not run -->"
QUICK = {"engine": "loop", "layout": "contiguous", "workers": 1, "threads": 1}  # nothing to choose by timing


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if line.startswith("```") and start is None:
            start = number
        elif line.startswith("```") and start is not None:
            text = "\n".join(lines[start + 1 : number])
            yield Block(page, start + 1, lines[start][3:].strip(), text, start == 0 or lines[start - 1] != NOT_RUN)
            start = None
    assert start is None, f"{page}: a code block is not closed"


ALL = [block for page in PAGES for block in blocks(page)]
EXAMPLE = (ROOT / "examples" / "own_method.py").read_text(encoding="utf-8")
PYTHON = [b for b in ALL if b.language == "python" and b.run and "--8<--" not in b.text and b.text + "\n" != EXAMPLE]
README = [b for b in PYTHON if b.page.name == "README.md"]


# --- Python -----------------------------------------------------------------------------------------------------------
SITES = [("north", "south", "west")[k % 3] for k in range(150)]


@pytest.fixture
def place(tmp_path, monkeypatch, own_names):
    """A folder to work in, with a small mine.npz; runs are short, and what a page registers is forgotten afterwards."""
    rng = np.random.default_rng(0)
    y = np.arange(150) % 4
    x = rng.normal(size=(150, 6)) + 2 * np.eye(6)[y]
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y)
    rows = [
        ",".join(map(str, (*values.round(3), "abcd"[k], site))) for values, k, site in zip(x, y, SITES, strict=True)
    ]
    for name in ("wards.csv", "new.csv"):
        (tmp_path / name).write_text("\n".join(["u,v,w,x,y,z,label,site", *rows]))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    run, compare, sweep = pf.run, pf.compare, pf.sweep

    def short(given: dict[str, Any]) -> dict[str, Any]:
        few = {} if given.get("partition") == "natural" else {"clients": min(given.get("clients", 5), 5)}
        return {**given, "rounds": 2, **few, **QUICK}

    monkeypatch.setattr(pf, "run", lambda method, **given: run(method, **short(given)))
    monkeypatch.setattr(pf, "compare", lambda names, **given: compare(names, **{**short(given), "seeds": 1, "jobs": 1}))
    monkeypatch.setattr(pf, "sweep", lambda names, **given: sweep(names, **{**given, **QUICK}))
    return tmp_path


@pytest.mark.parametrize("block", [b for b in PYTHON if b not in README], ids=str)
@pytest.mark.slow
def test_python_on_a_page_runs(block, place, monkeypatch):
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    exec(compile(block.text, str(block), "exec"), module.__dict__)


def test_own_data_in_the_readme_is_ten_lines_and_measures(place, capsys):
    assert len(README) == 1 and len([line for line in README[0].text.splitlines() if line]) <= 10
    module = types.ModuleType("page")
    exec(compile(README[0].text, "README.md", "exec"), module.__dict__)
    assert 0 <= module.result.accuracy <= 1 and (place / "runs" / "wards" / "summary.json").is_file()
    assert "north" in capsys.readouterr().out and set(module.found.classes) <= set("abcd")
    assert isinstance(module.model, pf.Classifier)


@pytest.mark.parametrize("name", ["own_data", "own_method"])
def test_an_example_runs(name, place, capsys):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    methods = {"own_data": ["local", "fedproto", "fedsap"], "own_method": ["local", "fedproto", "fedproto-cosine"]}
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == methods[name] and all("prototype" in row for row in rows)


def test_the_example_method_is_the_one_in_contributing_and_runs_on_the_command_line(place, capsys):
    assert EXAMPLE in [b.text + "\n" for b in ALL if b.page.name == "CONTRIBUTING.md"]
    assert len(EXAMPLE.splitlines()) <= 25
    runpy.run_path("examples/own_method.py", run_name="mine")
    words = ["run", "fedproto-cosine", "weight=0.5", "rounds=1", "clients=3", "--out", "cosine"]
    typer.main.get_command(app)(words, standalone_mode=False)
    assert read_toml(Path("cosine/settings.toml"))["method"] == {"name": "fedproto-cosine", "weight": 0.5}


# --- commands and keys ------------------------------------------------------------------------------------------------
def commands(page: Path) -> Iterator[str]:
    for block in blocks(page):
        if block.language == "console":
            yield from (line for line in block.text.splitlines() if line.startswith("protofed "))
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    yield from (code for code in re.findall(r"`(protofed [^`]+)`", text))


COMMANDS = [pytest.param(c, id=f"{p.name}: {c}") for p in PAGES for c in dict.fromkeys(commands(p))]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_uses_what_exists(line, place):
    words = shlex.split(line, comments=True)[1:]
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    placeholder = any(re.fullmatch(r"[A-Z]+", word.split("=")[-1]) for word in words)
    there = (
        "demo",
        "run",
        "compare",
        "sweep",
        "table",
        "resume",
        "advise",
        "audit",
        "bench",
        "pack",
        "confusion",
        "predict",
        "export",
        "report",
        "reproduce",
        "claims",
        "watch",
        "figures",
        "methods",
        "parts",
        "models",
        "settings",
        "data",
        "show",
        "keys",
        "serve",
        "join",
        "try",
    )
    assert command.name in there
    if not words:  # a command spoken of
        return
    parsed = command.make_context(command.name, list(words)).params
    if command.name not in ("run", "compare", "sweep", "show") or placeholder:
        return
    for file in parsed.get("load") or ():
        runpy.run_path(str(ROOT / file), run_name="mine")
    (place / "pictures").mkdir()
    written = [Path(file) for file in parsed["config"] or ()]
    files = [file for file in written if file.name != "settings.toml"]  # which another command has written
    if command.name in ("compare", "sweep"):
        names, given = parse_words(parsed["methods_and_settings"] or ())
        if command.name == "sweep":
            make_grid(names, over=parse_axes(parsed["over"] or ()), seeds=1, config=files, given=given)
        else:
            make_grid(
                names, local=not parsed["no_local"], controls=parsed["controls"], seeds=1, config=files, given=given
            )
        return
    given = {}
    for file in files:
        given = combine(given, read_toml(file))
    resolve(parsed.get("method") or "local", {**given, **parse_pairs(parsed["settings"] or ())})


def is_weight(entry: type, option: str) -> bool:
    """Whether a setting is the weight of a loss term, which may be a schedule."""
    return typing.get_type_hints(entry)[option] == Weight


def test_commands_were_found():
    assert len(COMMANDS) > 30


def test_keys_in_running_text_exist():
    known = {*general_keys(), *REGISTRIES, "key", "out", "jobs", "config"}
    for kind, registry in REGISTRIES.items():
        for name in registry.names():
            for option in registry.options(name):
                known |= {option, f"{kind}.{option}", f"{name}.{option}"}
                if is_weight(REGISTRIES[kind][name], option):
                    known |= {f"{option}.{f.name}" for f in dataclasses.fields(Ramp)}
    known |= {option for registry in (mechanisms, secure) for name in registry for option in registry.options(name)}
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for code in re.findall(r"`([^`]+)`", text):
            words = code.split()
            if all(re.fullmatch(r"[a-z_.]+=\S*", word) for word in words):
                wrong = [word for word in words if word.split("=")[0] not in known]
                assert not wrong, f"{page.name}: `{code}`"


# --- tables -----------------------------------------------------------------------------------------------------------
def settings_tables() -> Iterator[tuple[str, str, dict[str, str]]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for what, table in re.findall(r"<!-- settings: (.+?) -->\n+((?:\|.*\n)+)", text):
            rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", table, flags=re.M)
            assert len(rows) == len(table.splitlines()) - 2, f"{page.name}: {what}"
            yield page.name, what, dict(rows)


def written(value: str) -> Any:
    return None if value == "none" else tomllib.loads(f"v = {value}")["v"]


def as_toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def actual(what: str) -> dict[str, Any]:
    if what == "general":
        return {name: as_toml(field.default) for name, field in general_keys().items()}
    kind, name = what.split()
    result: dict[str, Any] = {}
    for option, spec in REGISTRIES[kind].options(name).items():
        if is_part(spec.default) or (isinstance(spec.default, tuple) and any(map(is_part, spec.default))):
            result[option] = as_options(methods.get(name))[option]
        elif dataclasses.is_dataclass(spec.default):
            result |= {f"{option}.{k}": v for k, v in dataclasses.asdict(spec.default).items()}  # type: ignore[arg-type]
        else:
            result[option] = as_toml(spec.default)
    return result


TABLES = list(settings_tables())


@pytest.mark.parametrize(("page", "what", "rows"), TABLES, ids=[t[1] for t in TABLES])
def test_a_table_of_settings_is_complete_and_has_the_defaults(page, what, rows):
    assert {name: written(default) for name, default in rows.items()} == actual(what), page


def test_everything_with_settings_has_its_table():
    there = {what for _, what, _ in TABLES}
    wanted = {"general"}
    for kind in ("method", "partition", "model"):
        wanted |= {f"{kind} {name}" for name in REGISTRIES[kind].names() if REGISTRIES[kind].options(name)}
    assert wanted <= there
    data = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8").split("## Data")[1].split("## Models")[0]
    for name in REGISTRIES["data"].names():
        assert all(f"`{option}`" in data for option in REGISTRIES["data"].options(name)), name


HEADINGS = [
    "What is implemented",
    "Data",
    "Settings",
    "Command",
    "Expected results (ours, measured)",
    "Known deviations and decisions",
]


def page_of(method: str) -> str:
    """Two forms of one method share a page: that of fixmatch-fedavg is fixmatch. A lower bound is with its method."""
    if method == "server-only":
        return "fedarpl"
    there = (ROOT / "docs" / "methods" / f"{method}.md").is_file()
    return method if there else method.rpartition("-")[0]


def test_every_method_has_its_page_and_its_row():
    pages = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "methods").glob("*.md")}
    assert set(pages) == {page_of(name) for name in pf.methods.available()}
    for name, text in pages.items():
        assert re.findall(r"^## (.+)$", text, flags=re.M) == HEADINGS, name
        assert f"methods/{name}.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    overview = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[`(.+?)`\]\(methods/(.+?)\.md\)", overview, flags=re.M)
    assert sorted(rows) == [(name, page_of(name)) for name in pf.methods.available()]


def test_numbers_in_the_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    words = (
        "three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    )
    words += "nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five twenty-six twenty-seven"
    count = {word: number for number, word in enumerate(words.split(), 3)}
    for pattern, number in (
        (r"\[([\w-]+) methods\]", len(pf.methods.available())),
        (r"(\w+) partitions", len(REGISTRIES["partition"].names())),
        (r"(\w+) models", len(pf.models.available())),
        (r"([\w-]+) sources of data", len(pf.data.available())),
    ):
        found = re.search(pattern, text)
        assert found is not None and count[found[1]] == number, pattern
    assert f"in {len(EXAMPLE.splitlines())} lines" in text
    assert "<!-- first run -->" in text and "<!-- /first run -->" in text


@pytest.mark.parametrize(
    ("way", "dim", "classes", "numbers"), [(3, 50, 62, 3000), (3, 512, 10, 30720), (10, 512, 100, 102400)]
)
def test_fedsap_table_2(way, dim, classes, numbers):
    bank = pf.PrototypeBank(torch.zeros(classes, dim), (torch.arange(classes) < way).float())
    up: Counter[str] = Counter()
    for _ in range(20):
        up.update(wire.sizes(wire.encode(wire.Bundle(bank=bank))))
    assert up["prototypes"] == 4 * numbers
    assert f"| {way} | {dim} | {numbers:,} |" in (ROOT / "docs" / "methods" / "fedsap.md").read_text(encoding="utf-8")


def test_parameters_on_fedsaps_page():
    page = (ROOT / "docs" / "methods" / "fedsap.md").read_text(encoding="utf-8")
    with torch.device("meta"):
        networks = [
            pf.models.build("cnn", (1, 128, 128), 62),
            pf.models.build("cnn", (1, 28, 28), 10),
            pf.models.build("resnet18", (3, 224, 224), 10, stem="imagenet"),
            pf.models.build("resnet18", (3, 224, 224), 100, stem="imagenet"),
        ]
    for network in networks:
        assert f"{pf.models.parameter_count(network):,}" in page


# --- links ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_outside_the_site_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text(encoding="utf-8")):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1].split("\nmarkdown_extensions:")[0]
    listed = re.findall(r": (\S+\.md)$", nav, flags=re.M)
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in PAGES if (ROOT / "docs") in p.parents)


def test_every_method_is_on_the_pages_that_list_them():
    for page in ("index.md", "settings.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert [name for name in pf.methods.available() if f"(methods/{page_of(name)}.md)" not in text] == [], page


def test_included_files_exist():
    for page in PAGES:
        for name in re.findall(r'^--8<-- "(.+?)"$', page.read_text(encoding="utf-8"), flags=re.M):
            file = ROOT / name
            measured = file.is_relative_to(ROOT / "docs" / "results")
            assert file.is_file() or (measured and not file.parent.exists()), f"{page.name}: {name}"


WORDS = {  # of what travels, on the page about privacy
    "weights": "weights",
    "bank": "prototypes",
    "low": "two levels",
    "peers": "other clients",
    "helpers": "other clients",
    "models": "other clients",
    "response": "response",
    "psi.": "half of",
    "soft_labels": "soft labels",
    "confident": "confident",
}


def test_the_page_about_privacy_says_what_travels():
    page = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[([\w-]+)\]\([^)]*\) \| (.*) \|$", page, re.MULTILINE))
    assert set(rows) == set(methods.available())
    for name, row in rows.items():
        exchange = methods.registry[name]().exchange
        sent, own = row.split(" | ")
        assert (own == "stays") == exchange.keeps_model, name
        assert sent.startswith("nothing") == (not exchange.up), name
        parts = {what for part in (*exchange.down, *exchange.up) for what in (part.name, part.prefix) if what}
        for what in parts:
            assert WORDS.get(what, what) in sent, (name, what)
        for word in ("weights", "prototypes", "response", "soft labels", "half of"):
            assert (word in sent) == any(word in WORDS.get(what, "") for what in parts), (name, word)


# --- methods ----------------------------------------------------------------------------------------------------------
def rows_under(mark: str) -> list[list[str]]:
    """The cells of the table under a mark on the page about the architecture."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- {mark} -->\n\n")[1].split("\n\n")[0]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def test_the_table_of_a_methods_members_is_complete():
    listed = [re.match(r"`(\w+)", row[0])[1] for row in rows_under("members")]  # type: ignore[index]
    members = [name for name, value in vars(methods.Method).items() if callable(value) or isinstance(value, property)]
    assert sorted(listed) == sorted(name for name in members if not name.startswith("_")) and len(listed) == 12
    assert listed[:5] == list(PARTS)
    for row, name in zip(rows_under("members")[5:], listed[5:], strict=True):
        wanted = list(inspect.signature(getattr(methods.Method, name)).parameters)[1:]
        assert row[0] == f"`{name}({', '.join(wanted)})`"


def test_which_methods_are_additive():
    listed = [re.findall(r"`([\w-]+)`", row[1]) for row in rows_under("reduces")]
    kinds: dict[str, int] = {}
    for name in methods.available():
        method = methods.registry[name]()
        averages = getattr(method.reduce, "averages", False)
        kinds[name] = 3 if not method.exchange.up else 0 if method.reduce.additive else 1 if averages else 2
    assert listed == [[name for name in kinds if kinds[name] == kind] for kind in range(4)]


def test_what_is_said_of_reduces_and_filters_works():
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    reduces = re.findall(r"^\| `([^`]+)`", text.split("| `reduce=` |")[1].split("\n\n")[0], flags=re.M)
    assert {entry.split("?")[0] for entry in reduces} == set(Reduce.registry.names())
    for entry in reduces:
        assert as_text(resolve("compose", {"reduce": entry}).method.reduce) == entry
    filters = re.findall(r"^\| `([^`]+)`", text.split("| filter |")[1].split("\n\n")[0], flags=re.M)
    assert {entry.split("?")[0] for entry in filters} == set(Filter.registry.names())
    assert resolve("fedproto", {"filters": filters}).general.filters == tuple(filters)
    attacks = re.findall(r"^\| `([^`]+)`", text.split("| attack |")[1].split("\n\n")[0], flags=re.M)
    assert {entry.split("?")[0] for entry in attacks} == set(Attack.registry.names())
    for entry in attacks:
        attack = parse_part(Attack.registry, entry)
        assert attack == type(attack)()  # what is shown are the defaults
    having = [name for name in methods.available() if "reduce" in methods.registry.options(name)]
    assert len(having) == 11  # as pages say
    shares = {"constellation", "fl2", "semifl"}
    additive = {name for name in methods.available() if methods.registry[name]().reduce.additive}
    assert set(having) == additive - shares


def test_every_page_of_a_method_names_its_parts_and_what_exists():
    """A name in code of a class, and of a function of it, is one that there is."""
    homes = [importlib.import_module(f"protofed.methods.{m.name}") for m in pkgutil.iter_modules(methods.__path__)]
    classes = {n: value for home in homes for n, value in vars(home).items() if isinstance(value, type)}
    for page in (ROOT / "docs" / "methods").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert "**Parts.**" in text, page.name
        for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
            if owner in classes:
                assert hasattr(classes[owner], name), f"{page.name}: `{owner}.{name}`"
        for room, name in re.findall(r"`(parts|losses|aggregate|schedules)\.(\w+)", text):
            assert hasattr(importlib.import_module(f"protofed.{room}"), name), f"{page.name}: `{room}.{name}`"


def test_no_page_speaks_of_the_earlier_interface():
    old = (
        "client_loss client_start client_return client_remember server_start server_update server_loss server_trained "
    )
    old += (
        "server_training_epochs private_model evaluation_bank prototype_scores bank_shapes tensor_shapes client_banks "
    )
    old += "tuning_epochs paired_epochs uploaded_banks( SharedBank SharedModel aggregation= num_samples wire.py"
    for page in (*PAGES, ROOT / "examples" / "own_method.py", *(ROOT / "benchmarks").glob("*.py")):
        text = page.read_text(encoding="utf-8")
        assert [word for word in old.split() if word in text] == [], page.name


# --- real federations -------------------------------------------------------------------------------------------------
def deployment() -> str:
    return (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")


def test_the_policy_on_the_page_has_all_keys_and_can_be_read(tmp_path):
    from protofed.deploy.policy import KINDS, Policy

    [example] = [b.text for b in ALL if b.page.name == "deployment.md" and "max_rounds" in b.text]
    (tmp_path / "policy.toml").write_text(example, encoding="utf-8")
    Policy.read(tmp_path / "policy.toml")
    names = [field.name for field in dataclasses.fields(Policy)]
    assert list(tomllib.loads(example)) == names
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", deployment().split("<!-- policy -->")[1], flags=re.M)
    assert [name for name, _, _ in rows][: len(names)] == names
    defaults = {name: default for name, default, _ in rows}
    texts = {name: text for name, _, text in rows}
    assert int(defaults["min_samples"]) == Policy().min_samples
    assert int(defaults["max_rounds"].replace(",", "")) == Policy().max_rounds
    assert (defaults["measures"] == "true") is Policy().measures
    assert all(f"`{kind}`" in texts["kinds"] for kind in KINDS)


def test_the_project_on_the_page_can_be_read(tmp_path):
    from protofed.deploy.keys import read_project

    [example] = [b.text for b in ALL if b.page.name == "deployment.md" and "sites = [" in b.text]
    (tmp_path / "project.toml").write_text(example, encoding="utf-8")
    project = read_project(tmp_path / "project.toml")
    line = f"protofed keys {' '.join(project.sites)} --name {project.name} --host {project.host} --port {project.port} "
    assert line in deployment(), "the file says the same as the command before it"


def test_limits_on_the_page_are_the_defaults_of_serve():
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    defaults = {option.opts[0]: option.default for option in serve.params if option.opts}
    rows = dict(re.findall(r"^\| `(--\w+)` \| (.+?) \|", deployment(), flags=re.M))
    assert rows.keys() == {"--seconds", "--quorum", "--patience"}
    assert float(rows["--seconds"]) == defaults["--seconds"] and float(rows["--patience"]) == defaults["--patience"]
    assert rows["--quorum"] == "all sites" and defaults["--quorum"] is None


def test_names_of_files_at_a_site_are_those_of_its_code():
    from protofed.deploy import node

    for file in re.findall(r"^\| `(card\.json|runs/RUN/[^`]+)` \|", deployment(), flags=re.M):
        assert file.removeprefix("runs/RUN/") in (node.__doc__ or ""), file
