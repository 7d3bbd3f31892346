"""Measuring: contenders take turns (A B C A B C …), and everything in the result follows from their seconds."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..federation.choose import cores
from ..version import __version__
from .around import measure_around
from .evaluation import measure_evaluation
from .processes import Failed, Field, Process
from .servers import measure_servers
from .workloads import NAMES, SERVER, TRAINING, Many, Say, Startup, Training, goal

FORMAT = 1
ENGINES: tuple[str, ...] = ("loop", "stack", "workers", "auto")
IN_PROCESS = ("loop", "stack")  # engines of one process, which are measured with one thread and with all
DEFAULT = "auto"  # the engine that the goals are for
FINALISTS = 3  # the best of the limit's sweep, which are then measured in the turns
SWEEP_SECONDS = 0.4  # for each combination of the sweep
GIB = 2**30

Specs = dict[str, dict[str, Any]]


def measure(
    names: Iterable[str],
    *,
    repeats: int = 3,
    quick: bool = False,
    say: Say = lambda text: None,
    beside: Path | None = None,
) -> dict[str, Any]:
    """Measure workloads.

    Args:
        names: The names of the workloads.
        repeats: The number of turns.
        quick: Whether tiny sizes are measured.
        say: A function that reports progress.
        beside: Another checkout, with whose code those workloads take turns that can.

    Returns:
        All results, as `--json` writes them.
    """
    results: dict[str, Any] = {}
    for name in names:
        if name in TRAINING:
            results[name] = _training(TRAINING[name].quick() if quick else TRAINING[name], repeats, quick, say)
        elif name == "server":
            results[name] = _server(repeats, quick, say)
        elif name == "servers":
            say("servers: rounds without their training")
            results[name] = measure_servers(repeats, quick, say, beside)
        elif name == "many":
            results[name] = _many(quick, say)
        elif name == "startup":
            results[name] = _startup(repeats, quick, say)
        elif name == "evaluation":
            results[name] = measure_evaluation(repeats, quick, say, beside)
        elif name == "around":
            results[name] = measure_around(repeats, quick, say, beside)
        else:
            raise ValueError(f"no workload {name!r}; there are {', '.join(NAMES)}")
    return {"format": FORMAT, "machine": machine(), "repeats": repeats, "quick": quick, "workloads": results}


def machine() -> dict[str, Any]:
    """The machine and the versions that results belong to."""
    return {
        "cores": cores(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "protofed": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


# --- training ---------------------------------------------------------------------------------------------------------
def _training(workload: Training, repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    say(f"{workload.name}: {workload.describe()}")
    counts = [1] if quick else sorted({1, cores()})
    with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
        workload.write_samples(Path(folder))
        common = {"workload": workload.name, "quick": quick, "folder": folder}
        sweep = _sweep(workload, common, counts, quick, say)
        specs = _contenders(workload, common, counts, sweep[: 1 if quick else FINALISTS])
        say(f"  starting {len(specs)} contenders")
        with Field() as field:
            for label, spec in specs.items():
                field.add(label, spec)
            warm_up = field.turn()
            turns = []
            for turn in range(1, repeats + 1):
                say(f"  turn {turn} of {repeats}")
                turns.append(field.turn())
    contenders = {
        label: {
            "kind": specs[label]["kind"],
            "about": runner.about,
            "settings": runner.engine_settings,
            "first_seconds": warm_up[label]["seconds"],
            **_timed(workload, [turn[label] for turn in turns]),
        }
        for label, runner in field.runners.items()
    }
    result: dict[str, Any] = {
        "kind": "training",
        "description": workload.describe(),
        "clients_per_round": workload.per_round,
        "samples_per_round": workload.samples_per_round,
        "contenders": contenders,
        "skipped": field.skipped,
        "limit_sweep": sweep,
    }
    return result | derive(workload, contenders)


def _timed(workload: Training, replies: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [reply["seconds"] for reply in replies]
    best = min(seconds)
    timed = {
        "seconds": seconds,
        "best": best,
        "median": statistics.median(seconds),
        "samples_per_second": workload.samples_per_round / best,
        "clients_per_second": workload.per_round / best,
    }
    for key in ("training_seconds", "compute_seconds"):
        if key in replies[0]:
            timed[key] = [reply[key] for reply in replies]
    return timed


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _contenders(
    workload: Training, common: dict[str, Any], counts: list[int], finalists: list[dict[str, Any]]
) -> Specs:
    """What each contender is started with, by label."""
    specs: Specs = {}
    for count in counts:
        specs[f"plain loop, {_threads(count)}"] = {**common, "kind": "plain", "threads": count}
    engine_common = {**common, "kind": "engine", "clock": workload.overhead is not None}
    for engine in ENGINES:
        if engine in IN_PROCESS:
            for count in counts:
                settings = {"engine": engine, "threads": count}
                specs[f"{engine}, {_threads(count)}"] = {**engine_common, "settings": settings}
        else:
            specs[engine] = {**engine_common, "settings": {"engine": engine}}
    for rank, row in enumerate(finalists, 1):
        choice = {key: row[key] for key in ("batch", "layout", "threads", "keep_pages")}
        specs[f"limit {rank}"] = {**common, **choice, "kind": "limit"}
    choice_of_steps = {
        "kind": "own-batch",
        "threads": 1,
        "keep_pages": True,
        "processes": min(counts[-1], workload.per_round),
    }
    specs[f"steps of {workload.batch} alone"] = {**common, **choice_of_steps}
    return specs


def _sweep(
    workload: Training, common: dict[str, Any], counts: list[int], quick: bool, say: Say
) -> list[dict[str, Any]]:
    """Every combination of batch, layout, threads and allocator for a moment each, fastest first."""
    rows: list[dict[str, Any]] = []
    say("  looking for the limit: batch, layout, threads, allocator")
    for threads in counts:
        for keep_pages in [True] if quick else [False, True]:
            choice = {"threads": threads, "keep_pages": keep_pages}
            try:
                sweep = _alone({**common, **choice, "kind": "limit-sweep", "cap": 0.01 if quick else SWEEP_SECONDS})
            except Failed as reason:
                say(f"  limit at {_threads(threads)}{', pages kept' if keep_pages else ''}: {reason}")
                continue
            rows += [row | choice for row in sweep["rows"]]
    return sorted(rows, key=lambda row: row["seconds"])


def chosen_settings(spec: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings with what the rule chose."""
    process = Process(spec)
    try:
        process.ready()
        return process.engine_settings
    finally:
        process.close()


def _alone(spec: dict[str, Any]) -> dict[str, Any]:
    """One answer of a process that is then closed."""
    process = Process(spec)
    try:
        process.ready()
        return process.ask()
    finally:
        process.close()


# --- ratios and goals ---------------------------------------------------------------------------------------------------
def derive(workload: Training, contenders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios, goals and overhead of the measured seconds. Ratios are of the best seconds, and also of the medians."""

    def of(kind: str) -> dict[str, dict[str, Any]]:
        return {label: c for label, c in contenders.items() if c["kind"] == kind}

    result: dict[str, Any] = {"ratios": {}, "goals": []}
    plain, limits, steps = of("plain"), of("limit"), of("own-batch")
    if plain:
        result["best_plain"] = _fastest(plain)
    if limits:
        result["limit"] = _fastest(limits)
    for label, engine in of("engine").items():
        ratios: dict[str, float] = {}
        if plain:
            ratios["over_plain"] = min(c["best"] for c in plain.values()) / engine["best"]
            ratios["over_plain_median"] = min(c["median"] for c in plain.values()) / engine["median"]
        if limits:
            ratios["of_limit"] = min(c["best"] for c in limits.values()) / engine["best"]
            ratios["of_limit_median"] = min(c["median"] for c in limits.values()) / engine["median"]
            training = min(min(c["training_seconds"]) for c in limits.values())
            ratios["of_training_limit"] = training / engine["best"]
        if steps:
            ratios["of_own_batch"] = min(c["best"] for c in steps.values()) / engine["best"]
        result["ratios"][label] = ratios
    if workload.overhead is not None:
        result["overhead"] = {label: _overhead(engine) for label, engine in of("engine").items()}
    default_ratios = result["ratios"].get(DEFAULT, {})
    for key, target, description in (
        ("over_plain", workload.over_plain, "times the best plain loop"),
        ("of_limit", workload.of_limit, "of the limit, which does the round's work"),
        ("of_training_limit", workload.of_limit, "of the limit, its training steps alone"),
    ):
        if target is not None:
            result["goals"].append(goal(f"{DEFAULT}: {description}", default_ratios.get(key), target, at_least=True))
    if workload.overhead is not None:
        share = result["overhead"].get(DEFAULT)
        result["goals"].append(goal(f"{DEFAULT}: overhead", share, workload.overhead, at_least=False))
    return result


def _fastest(contenders: dict[str, dict[str, Any]]) -> str:
    return min(contenders, key=lambda label: contenders[label]["best"])


def _overhead(engine: Mapping[str, Any]) -> float:
    """The share of the processes' time in a round that is not computation; it includes waiting."""
    pairs = zip(engine["seconds"], engine["compute_seconds"], strict=True)
    return statistics.median(1 - statistics.fmean(spent) / whole for whole, spent in pairs)


# --- server -----------------------------------------------------------------------------------------------------------
def _server(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    """Each rule in fresh processes, at one thread and at all; memory is that of the process with one thread."""
    say("server: aggregation and refinement")
    rows, goals = [], []
    for number, case in enumerate(SERVER):
        case = case.quick() if quick else case
        say(f"  {case.label}")
        row: dict[str, Any] = {"rule": case.rule, "label": case.label, "seconds": {}, "best": {}, "median": {}}
        for threads in [1] if quick else sorted({1, cores()}):
            process = Process({"kind": "server", "case": number, "quick": quick, "threads": threads})
            try:
                process.ready()
                replies = [process.ask() for _ in range(repeats + 1)]
            finally:
                process.close()
            seconds = [reply["seconds"] for reply in replies[1:]]  # the first call warms up
            row["seconds"][str(threads)] = seconds
            row["best"][str(threads)] = min(seconds)
            row["median"][str(threads)] = statistics.median(seconds)
            row.setdefault("inputs_bytes", replies[0]["inputs_bytes"])
            row.setdefault("peak_bytes", replies[-1]["peak_bytes"])
        rows.append(row)
        if case.memory is not None:
            goals.append(goal(f"{case.label}: GiB", row["peak_bytes"] / GIB, case.memory, at_least=False))
    return {"kind": "server", "rows": rows, "goals": goals}


# --- many clients -----------------------------------------------------------------------------------------------------
def _many(quick: bool, say: Say) -> dict[str, Any]:
    case = Many().quick() if quick else Many()
    say(f"many: {case.per_round} clients a round, of {case.few:,} and of {case.many:,}")
    labels = {f"{clients:,} clients": clients for clients in (case.many, case.few)}
    many_label, few_label = labels
    spec: dict[str, Any] = {"kind": "many", "clients": case.many, "quick": quick, "settings": {}}
    # both use the engine that is chosen for many clients, so that they differ in nothing but their idle clients
    spec["settings"] = {"engine": "loop"} if quick else chosen_settings(spec)
    with Field() as field:
        for label, clients in labels.items():
            field.add(label, {**spec, "clients": clients})
        field.turn()
        early_memory = field.turn(
            "memory"
        )  # both have trained the same number of clients, and differ in idle ones only
        turns = [field.turn() for _ in range(case.rounds)]
        memory = field.turn("memory")
    rows = {}
    for label, runner in field.runners.items():
        seconds = [turn[label]["seconds"] for turn in turns]
        rows[label] = {
            "clients": labels[label],
            "about": runner.about,
            "settings": runner.engine_settings,
            "seconds": seconds,
            "best": min(seconds),
            "median": statistics.median(seconds),
            **memory[label],
        }
    result: dict[str, Any] = {"kind": "many", "rounds": case.rounds, "rows": rows, "skipped": field.skipped}
    if len(rows) == 2:
        overhead_bytes = {
            label: early_memory[label]["now_bytes"] - early_memory[label]["data_bytes"] for label in labels
        }
        result["bytes_per_idle_client"] = (overhead_bytes[many_label] - overhead_bytes[few_label]) / (
            case.many - case.few
        )
    value = rows[many_label]["peak_bytes"] / GIB if many_label in rows else None
    result["goals"] = [goal(f"{case.many:,} clients: GiB", value, case.memory, at_least=False)]
    return result


# --- start-up ---------------------------------------------------------------------------------------------------------
def _startup(repeats: int, quick: bool, say: Say) -> dict[str, Any]:
    """From `protofed run` to its first round, less `import torch`.

    A round's line is printed when it ends. What lies before the first line is the start and one round; what lies
    between the first and the second is one round; so the difference is the start, also of an engine that gets ready lazily.
    """
    case = Startup().quick() if quick else Startup()
    say(f"startup: {' and '.join(f'{n:,}' for n in case.clients)} clients")
    import_seconds: list[float] = []
    start_seconds: dict[int, list[float]] = {clients: [] for clients in case.clients}
    with tempfile.TemporaryDirectory(prefix="protofed-bench-") as folder:
        for clients in case.clients:
            _startup_data(Path(folder), clients, case.samples)
        for turn in range(repeats):
            import_seconds.append(_seconds([sys.executable, "-c", "import torch"]))
            for clients in case.clients:
                start_seconds[clients].append(_until_first_round(Path(folder), clients, turn))
    rows: dict[str, dict[str, Any]] = {}
    for clients in case.clients:
        seconds = statistics.median(start_seconds[clients]) - statistics.median(import_seconds)
        rows[f"{clients:,} clients"] = {"seconds": start_seconds[clients], "beyond_import": seconds}
    goals = [
        goal(f"{label}: seconds beyond import torch", row["beyond_import"], case.seconds, at_least=False)
        for label, row in rows.items()
    ]
    return {"kind": "startup", "import_torch_seconds": import_seconds, "rows": rows, "goals": goals}


def _startup_data(folder: Path, clients: int, samples: int) -> None:
    rng = np.random.default_rng(0)
    n, test = clients * samples, 100
    np.savez(
        folder / f"{clients}.npz",
        x_train=rng.standard_normal((n, 64), dtype=np.float32),
        y_train=rng.integers(0, 10, n),
        x_test=rng.standard_normal((test, 64), dtype=np.float32),
        y_test=np.arange(test) % 10,
    )


def _seconds(command: list[str]) -> float:
    start_time = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - start_time


def _until_first_round(folder: Path, clients: int, turn: int) -> float:
    command = [sys.executable, "-m", "protofed", "run", "fedproto", f"data={folder / f'{clients}.npz'}"]
    command += ["partition=iid", f"clients={clients}", "rounds=3", "evaluate_every=1000", "checkpoint_every=1000"]
    command += ["--out", str(folder / f"run-{clients}-{turn}")]
    times: list[float] = []
    start_time = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if " round " in line:
                times.append(time.perf_counter() - start_time)
        process.wait()
        errors.seek(0)
        message = errors.read().decode(errors="replace").strip()
    if process.returncode or len(times) < 2:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} after {len(times)} rounds: {message}")
    first_line, second_line = times[:2]
    return first_line - (second_line - first_line)
