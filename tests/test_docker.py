"""The image and the compose file, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from protofed.cli import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent
KEYWORDS = {"FROM", "RUN", "COPY", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}  # what our image needs; no ADD, ARG, ENV


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments; comments are left out, continued lines are joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n", " ", lines)
    pairs = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(keyword.upper(), rest.strip()) for keyword, _, rest in pairs]


STEPS = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = [name for name in SERVICES if name != "server"]


def arguments(keyword: str) -> list[str]:
    return [rest for name, rest in STEPS if name == keyword]


def sources() -> set[str]:
    """What the image copies from the checkout."""
    return {source for rest in arguments("COPY") for source in shlex.split(rest)[:-1]}


# --- the image --------------------------------------------------------------------------------------------------------
def test_the_image_uses_known_instructions_alone():
    assert {keyword for keyword, _ in STEPS} == KEYWORDS
    assert STEPS[0] == ("FROM", "python:3.11-slim")


def test_what_the_image_copies_is_there_and_is_all_that_docker_is_given():
    assert sources() == {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "src"}
    assert all((ROOT / source).exists() for source in sources())
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in ignored if line and not line.startswith("#")]
    assert rules[0] == "*" and {rule[1:] for rule in rules if rule.startswith("!")} == sources()


def test_what_building_needs_is_copied_before():
    """setuptools reads the files that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    install = next(k for k, (word, rest) in enumerate(STEPS) if word == "RUN" and ".[deploy]" in rest)
    copied = {s for word, rest in STEPS[:install] if word == "COPY" for s in shlex.split(rest)[:-1]}
    named = {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"}
    assert named | set(project["tool"]["setuptools"]["packages"]["find"]["where"]) <= copied
    assert "deploy" in project["project"]["optional-dependencies"]


def test_versions_are_pinned_as_in_the_makefile():
    installs = [rest for rest in arguments("RUN") if "pip install" in rest]
    assert len(installs) == 2 and all("-c constraints.txt" in rest for rest in installs)
    torch = re.search(r"torch==[\d.]+", installs[0])
    assert torch is not None
    assert f'"{torch[0]}"' in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert torch[0] in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_the_image_runs_protofed_and_not_as_root():
    assert arguments("USER") == ["protofed"] and "useradd" in " ".join(arguments("RUN"))
    order = [keyword for keyword, _ in STEPS]
    assert "RUN" not in order[order.index("USER") :] and "COPY" not in order[order.index("USER") :]
    assert [json.loads(rest) for rest in arguments("ENTRYPOINT")] == [["protofed"]]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert "protofed" in scripts


def test_a_dockerfile_is_read_as_docker_reads_it():
    text = "# a comment\nFROM x\nRUN a && \\\n    # inside\n    b\nuser root\n"
    assert instructions(text) == [("FROM", "x"), ("RUN", "a &&      b"), ("USER", "root")]


# --- the services -----------------------------------------------------------------------------------------------------
def mounts(service: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """By the place inside, the place outside and the mode."""
    found = {}
    for volume in service["volumes"]:
        outside, inside, *mode = volume.split(":")
        found[inside] = outside, mode[0] if mode else "rw"
    assert len(found) == len(service["volumes"])
    return found


def test_there_are_a_server_and_three_sites():
    assert len(SITES) == 3 and len(SERVICES) == 4
    known = {"build", "image", "init", "user", "environment", "hostname", "command", "volumes", "restart"}
    for service in SERVICES.values():
        assert service.keys() <= known, "no ports, no privileges, no secrets in variables"
        assert service["build"] == "." and service["environment"].keys() == {"HOME"}
        default = re.fullmatch(r"\$\{PROTOFED_USER:-(\d+):(\d+)\}", service["user"])
        assert default is not None and "0" not in default.groups()


@pytest.mark.parametrize("name", SERVICES)
def test_a_services_command_is_one_of_ours_with_options_that_exist(name):
    words = list(SERVICES[name]["command"])
    command: Any = typer.main.get_command(app).commands[words.pop(0)]  # type: ignore[attr-defined]
    assert command.name == ("serve" if name == "server" else "join")
    parsed = command.make_context(command.name, words).params
    for key in ("kit", "data", "policy"):
        if parsed.get(key) is not None:
            assert f"/federation/{parsed[key]}" in mounts(SERVICES[name]), key


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_given_its_own_kit_and_nobody_the_authority(name):
    outside = {place for place, _ in mounts(SERVICES[name]).values()}
    kits = {place for place in outside if place.startswith("./kits")}
    own = {"./kits/server", "./kits/admin", "./kits/project.toml"} if name == "server" else {f"./kits/{name}"}
    assert kits == own
    others = [site for site in SITES if site != name]
    assert not [place for place in outside if any(other in place for other in others)]


def test_a_sites_data_and_policy_cannot_be_changed_from_inside():
    for site in SITES:
        there = mounts(SERVICES[site])
        assert (
            there["/federation/data.npz"] == (f"./data/{site}.npz", "ro")
            and there["/federation/policy.toml"][1] == "ro"
        )


def test_the_server_is_reached_by_the_name_that_the_guide_gives_the_kits():
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    line = f"protofed keys {' '.join(SITES)} --host {SERVICES['server']['hostname']}"
    assert line in page and SERVICES["server"]["hostname"] == "server"
