"""The study of methods that send prototypes, in real settings: `python benchmarks/study.py [SETTING …]`, or `--table`.

`--choice` runs Constellation with several settings on files that are made of the training parts alone, by which its
defaults are chosen, and writes docs/results/study-choice.md.

Needs data/study, which benchmarks/study_data.py makes. Each setting of benchmarks/study is a comparison of three seeds,
which is continued where it was cut off, and is packed into docs/results/study; then docs/results/study.md is written.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from protofed.results.gains import gain_text, half_interval

HERE, OUT = Path(__file__).parent / "study", Path("docs/results/study")
PRIVATE = ["fedproto", "fedsap", "fedpagr", "fedapa", "fedmps"]
OURS, CONTROL, SHARED = "constellation", "constellation control", "constellation shared"
OUR_ROWS = [OURS, f"{CONTROL}=constellation?control=own", f"{SHARED}=constellation?average_weights=true"]
CHANGED = {  # what is changed of it, in the settings that take seconds a run
    "64 features": "width=64",
    "256 features": "width=256",
    "trust 0.3": "trust=0.3",
    "share 0.5": "share=0.5",
    "shrinkage 0.3": "shrinkage=0.3",
    "wrong prototypes": "control=shuffled",
}
CHOICES = {  # among which the defaults are chosen
    "trust 0.1, share 0.5": "trust=0.1&share=0.5",
    "trust 0.1, share 0.3": "trust=0.1&share=0.3",
    "trust 0.1, share 0.1": "trust=0.1&share=0.1",
    "trust 0.3, share 0.5": "trust=0.3&share=0.5",
    "trust 0.3, share 0.1": "trust=0.3&share=0.1",
}
IN_PARTS = ("text", "activity", "fashion")
SITUATIONS = ("alike", "enough", "wired")  # of `protofed demo`, whose other rows are in docs/results/first
Figures = dict[str, dict[int, float]]  # by row and seed


def compared(config: str, rows: list[str], folder: Path, *more: str, seeds: str = "3") -> None:
    """Run a comparison, or what is left of it, and pack it."""
    if not (OUT / folder.name).exists():
        words = ["--config", config, "--seeds", seeds, "--jobs", "1", "--out", str(folder), *more]
        subprocess.run([sys.executable, "-m", "protofed", "compare", *rows, *words], check=True)
        subprocess.run([sys.executable, "-m", "protofed", "pack", str(folder), str(OUT / folder.name)], check=True)


def figures(folder: Path) -> tuple[Figures, dict[str, float]]:
    """The accuracy of each row and seed, in %, and the MB of a run: by the better of head and prototype, by its mean over
    the seeds. A method that mixes has that as a row `…, better way`, and its own row by mix."""
    labels = {v["folder"]: v["label"] for v in json.loads((folder / "comparison.json").read_text())["variants"]}
    found: dict[str, dict[str, dict[int, float]]] = {}
    sent: dict[str, float] = {}
    for key, summary in json.loads((folder / "summaries.json").read_text()).items():
        label = labels[key.rpartition("-seed")[0]]
        for way in ("head", "prototype", "mix"):
            if f"accuracy_{way}" in summary["last_five"]:
                value = 100 * summary["last_five"][f"accuracy_{way}"]
                found.setdefault(label, {}).setdefault(way, {})[summary["seed"]] = value
        sent[label] = sum(sum(summary[way].values()) for way in ("bytes_up", "bytes_down")) / 1e6
    best = {}
    for label, ways in found.items():
        better = max((w for w in ways if w != "mix"), key=lambda w: mean(ways[w]))
        best[label] = ways.get("mix", ways[better])
        if "mix" in ways:
            best[f"{label}, better way"] = ways[better]
    return best, sent


def joined(
    one: tuple[Figures, dict[str, float]], other: tuple[Figures, dict[str, float]]
) -> tuple[Figures, dict[str, float]]:
    """The rows of two comparisons in one setting."""
    return {**one[0], **other[0]}, {**one[1], **other[1]}


def mean(values: dict[int, float]) -> float:
    return statistics.fmean(values.values())


def gain(one: dict[int, float], other: dict[int, float]) -> str:
    """The difference of two rows, seed by seed, ± half of its 95 % interval."""
    differences = [one[seed] - other[seed] for seed in one if seed in other]
    return gain_text(statistics.fmean(differences), half_interval(differences), 1)


def write_tables() -> None:
    """Write docs/results/study.md, study-parts.md and study-situations.md from the packed comparisons."""
    names = [p.stem for p in sorted(HERE.glob("*.toml")) if (OUT / f"{p.stem}-constellation").exists()]
    measured = {name: joined(figures(OUT / name), figures(OUT / f"{name}-constellation")) for name in names}
    both = [name for row in (CONTROL, OURS, SHARED) for name in (row, f"{row}, better way")]
    rows = ["local", *PRIVATE, "fedavg", *both]
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " ---: |" * len(names)]
    for row in rows:
        cells = [f"{mean(measured[n][0][row]):.1f}" if row in measured[n][0] else "–" for n in names]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    for way in ("", ", better way"):
        for ours, what, others in (
            (OURS, "the best other that keeps models", PRIVATE),
            (OURS, "Local", ["local"]),
            (OURS, "the control", [CONTROL + way]),
            (SHARED, "the best of all others", ["local", *PRIVATE, "fedavg"]),
        ):
            cells = []
            for name in names:
                found = measured[name][0]
                other = max(others, key=lambda o: mean(found[o]))
                cells.append(gain(found[ours + way], found[other]) + (f" ({other})" if len(others) > 1 else ""))
            lines.append(f"| *{ours}{way} − {what}* | " + " | ".join(cells) + " |")
    for row in ("fedproto", OURS, SHARED):
        lines.append(f"| MB of {row} | " + " | ".join(f"{measured[n][1][row]:.1f}" for n in names) + " |")
    write(lines, "study")
    names = [name for name in IN_PARTS if (OUT / f"{name}-parts").exists()]
    lines = ["| | " + " | ".join(f"{name}, MB" for name in names) + " |", "| --- |" + " ---: |" * len(names)]
    parts = {name: joined(measured[name], figures(OUT / f"{name}-parts")) for name in names}
    for row in (OURS, *CHANGED):
        cells = [f"{mean(parts[name][0][row]):.1f}, {parts[name][1][row]:.1f}" for name in names]
        lines.append(f"| {'as it is' if row == OURS else row} | " + " | ".join(cells) + " |")
    write(lines, "study-parts")
    first = {name: OUT / f"first-{name}" for name in SITUATIONS if (OUT / f"first-{name}").exists()}
    found = {
        name: joined(figures(Path("docs/results/first") / name), figures(folder))[0] for name, folder in first.items()
    }
    lines = ["| | " + " | ".join(first) + " |", "| --- |" + " ---: |" * len(first)]
    for row in ("local", "fedavg", "fedproto", "fedsap", CONTROL, OURS):
        lines.append(f"| {row} | " + " | ".join(f"{mean(found[name][row]):.1f}" for name in first) + " |")
    for other in ("local", CONTROL):
        cells = [gain(found[name][OURS], found[name][other]) for name in first]
        lines.append(f"| *constellation − {other}* | " + " | ".join(cells) + " |")
    write(lines, "study-situations")


def choose(names: list[str]) -> None:
    """Run Constellation with other settings on the choice files, and write docs/results/study-choice.md."""
    for name in names:
        config = HERE / f"{name}.toml"
        data = "data.path=" + config.read_text().partition('path = "')[2].partition(".npz")[0] + "-choice.npz"
        rows = [f"{label}=constellation?{settings}" for label, settings in CHOICES.items()]
        compared(str(config), rows, Path("runs/study") / f"{name}-choice", "--no-local", data, seeds="11,12")
    names = [p.stem for p in sorted(HERE.glob("*.toml")) if (OUT / f"{p.stem}-choice").exists()]
    found = {name: figures(OUT / f"{name}-choice")[0] for name in names}
    lines = [
        "| by its own prediction | " + " | ".join([*names, "mean"]) + " |",
        "| --- |" + " ---: |" * (len(names) + 1),
    ]
    for row in CHOICES:
        means = [mean(found[name][row]) for name in names]
        lines.append(f"| {row} | " + " | ".join(f"{value:.1f}" for value in [*means, statistics.fmean(means)]) + " |")
    write(lines, "study-choice")


def write(lines: list[str], name: str) -> None:
    """Write a table of docs/results."""
    Path(f"docs/results/{name}.md").write_text("\n".join(lines) + "\n")


def main(words: list[str]) -> None:
    if "--choice" in words:
        named = [word for word in words if word != "--choice"]
        choose(named or [path.stem for path in sorted(HERE.glob("*.toml"))])
        return
    if "--table" not in words:
        for name in words or [path.stem for path in sorted(HERE.glob("*.toml"))]:
            config = str(HERE / f"{name}.toml")
            compared(config, [*PRIVATE, "fedavg"], Path("runs/study") / name)
            compared(config, OUR_ROWS, Path("runs/study") / f"{name}-constellation", "--no-local")
            if name in IN_PARTS:
                rows = [f"{label}=constellation?{settings}" for label, settings in CHANGED.items()]
                compared(config, rows, Path("runs/study") / f"{name}-parts", "--no-local")
        for name in () if words else SITUATIONS:
            compared(f"situations/{name}", OUR_ROWS[:2], Path("runs/study") / f"first-{name}", "--no-local")
    write_tables()


if __name__ == "__main__":
    main(sys.argv[1:])
