"""The papers' ablations, examples named `sweeps/...`: each gives the grid it says, over any base file, without any data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protofed.errors import ProtofedError
from protofed.experiment.compare import Grid, make_grid
from protofed.experiment.settings import EXAMPLES, read_toml, resolve

# preset → the setting it varies, and the values
FEDPAGR = {
    "fedpagr-separation": ("method.separation", [0.0, 0.5, 1.0]),
    "fedpagr-margin": ("method.margin", [0.1, 0.3, 0.5]),
    "fedpagr-temperature": ("method.temperature", [0.0, 0.1, 0.5]),
    "fedpagr-entropy": ("method.entropy", [0.0, 0.05, 0.1]),
    "fedpagr-steps": ("method.refine_steps", [1, 3, 5, 10]),
}
FEDAPA = {
    "fedapa-temperature": ("method.temperature", [0.1, 0.5, 0.7, 1.5]),
    "fedapa-embedding": ("model.embedding", [128, 256, 512]),
    "fedapa-warm-up": ("method.warm_up", [{"end": end} for end in (25, 50, 100)]),
    "fedapa-weight": (
        "method.warm_up",
        [{"shape": "cosine", "maximum": 1.0}, *({"shape": "constant", "maximum": w} for w in (0.1, 0.5, 1.0))],
    ),
    "fedapa-variant": ("method.variant", ["global", "global+clients", "fedapa"]),
}
PROTOFSSL = {
    "protofssl-helpers": ("method.helpers", [1, 2]),
    "protofssl-noise": ("method.noise", [0.0, 0.01, 0.1, 1.0, 10.0]),
    "protofssl-refresh": ("method.refresh", [5, 20]),
}
PRESETS = FEDPAGR | FEDAPA | PROTOFSSL
BESIDE = {"protofssl-helpers", "protofssl-refresh"}  # what is compared with, the default, is in the sweep of noise
BASES = {
    "fedpagr": ["fedpagr-cifar10", "fedpagr-fashion-mnist", "fedpagr-mtsamples"],
    "fedapa": ["fedapa-csi-sim", "fedapa-csi-activity", "fedapa-csi-crowd", "fedapa-csi-sim-models"],
    "protofssl": ["protofssl-cifar10"],
}
PAIRS = [
    (base, preset)
    for preset in PRESETS
    for base in BASES[preset.partition("-")[0]]
    if (base, preset) != ("fedapa-csi-sim-models", "fedapa-embedding")
]


def grid_of(base: str, preset: str) -> Grid:
    files = [base, f"sweeps/{preset}"]
    return make_grid([], over={}, seeds=2, config=files, given={})


def test_every_preset_is_known_here():
    assert sorted(path.stem for path in (EXAMPLES / "sweeps").iterdir()) == sorted(PRESETS)


@pytest.mark.parametrize(("base", "preset"), PAIRS)
@pytest.mark.slow
def test_a_preset_varies_its_setting_and_nothing_else(base, preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no data here
    method = preset.partition("-")[0]
    key, values = PRESETS[preset]
    group, _, name = key.partition(".")
    grid = grid_of(base, preset)
    assert [variant.method for variant in grid.variants] == [method] * len(values)
    assert len(grid.cells) == 2 * len(values) and grid.seeds == [1234, 1235]
    plain = resolve(method, read_toml(Path(base))).to_dict()
    for variant, value in zip(grid.variants, values, strict=True):
        for seed in grid.seeds:
            cell = grid.cells[variant.cell(seed)].to_dict()
            wanted = {**plain[group][name], **value} if isinstance(value, dict) else value  # the rest is the base's
            assert cell == {**plain, "seed": seed, group: {**plain[group], name: wanted}}


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - BESIDE))
def test_the_papers_default_is_among_the_values(preset):
    """So that every other value can be read against it. A margin and steps that are not set are those of ten classes."""
    method = preset.partition("-")[0]
    key, values = PRESETS[preset]
    defaults = {"method.margin": 0.3, "method.refine_steps": 5, "model.embedding": 256}
    default = defaults.get(key) or resolve(method, {}).to_dict()["method"][key.partition(".")[2]]
    assert any(({**default, **v} if isinstance(v, dict) else v) == default for v in values)


def test_two_presets_make_a_product():
    files = ["fedpagr-cifar10", *(f"sweeps/fedpagr-{n}" for n in ("margin", "steps"))]
    grid = make_grid([], over={}, seeds=1, config=files, given={})
    chosen = [(cell.method.margin, cell.method.refine_steps) for cell in grid.cells.values()]
    assert chosen == [(margin, steps) for margin in (0.1, 0.3, 0.5) for steps in (1, 3, 5, 10)]


def test_the_width_of_one_model_is_none_of_several():
    with pytest.raises(ProtofedError, match=r"model\.embedding: models=tinyconvnet4,\S+ stands in place of one model"):
        grid_of("fedapa-csi-sim-models", "fedapa-embedding")


TINY = ["rounds=1", "engine=loop", "layout=contiguous", "threads=1", "workers=1"]


@pytest.mark.parametrize(
    ("base", "preset", "tiny"),
    [
        ("fedapa-csi-sim", "fedapa-weight", ["rooms=2", "packets=12", "subcarriers=8", "model=middleconvnet4"]),
        (
            "fedpagr-cifar10",
            "fedpagr-temperature",
            ["data=digits", "limit_train=200", "clients=4", "models=mlp,mlp?hidden=16"],
        ),
    ],
)
@pytest.mark.slow
def test_a_preset_runs(base, preset, tiny, tmp_path, call):
    words = ["sweep", "-c", base, "-c", f"sweeps/{preset}", *TINY, *tiny, "--seeds", "1", "--jobs", "1", "--out", "s"]
    code, out, _ = call(*words)
    assert code == 0
    variants = json.loads((tmp_path / "s/comparison.json").read_text())["variants"]
    key, values = PRESETS[preset]
    group, _, name = key.partition(".")
    assert len(variants) == len(values)
    for variant, value in zip(variants, values, strict=True):
        run = tmp_path / "s" / f"{variant['folder']}-seed1234"
        written = read_toml(run / "settings.toml")[group][name]
        assert written == ({**written, **value} if isinstance(value, dict) else value)
        assert json.loads((run / "summary.json").read_text())["rounds"] == 1
        assert variant["label"] in out
    assert len((tmp_path / "s/results.csv").read_text().splitlines()) == 1 + len(values)
