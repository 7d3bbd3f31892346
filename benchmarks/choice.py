"""What the rule for engines costs: `python benchmarks/choice.py FILE.json`, where `engine=auto` follows the rule.

Every way to train clients in one process, with one thread, on a number of workloads: the ways take turns, and the best of
a way's rounds counts. Seconds are the processor's, so that other work on the machine disturbs less. Of each workload FILE
holds the seconds of every way, which of them the rule chooses, and its seconds over those of the fastest way. Workloads that
are in FILE already are not measured again.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protofed.bench.measure import machine
from protofed.bench.workloads import TRAINING, Training
from protofed.evaluate.cost import forward_flops
from protofed.experiment.build import build
from protofed.experiment.settings import resolve
from protofed.federation.choose import EngineSettings

TURNS, SECONDS = 5, 15.0  # rounds of each way, after one to warm up; no further turn after so many seconds
HOPELESS = 4.0  # a way that takes so many times the best is not timed again
WAYS = {
    "loop": EngineSettings("loop", "loop", "contiguous", "grouped", 1, 1),
    "loop channels_last": EngineSettings("loop", "loop", "channels_last", "grouped", 1, 1),
    "loop channels_last lean": EngineSettings("loop", "loop", "channels_last", "lean", 1, 1),
    "stack": EngineSettings("stack", "stack", "contiguous", "grouped", 1, 1),
    "stack unfold": EngineSettings("stack", "stack", "contiguous", "unfold", 1, 1),
}


class Text(Training):
    """Samples are token ids, of texts of different lengths."""

    def settings(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        given = super().settings(x, y)
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(5, 8000, x.shape, generator=rng)
        length = torch.randint(x.shape[1] // 3, x.shape[1], (len(x), 1), generator=rng)
        tokens = torch.where(torch.arange(x.shape[1]) < length, tokens, -1)
        return {**given, "data": replace(given["data"], x_train=tokens, x_test=tokens[:10])}


def workloads() -> list[Training]:
    """Those of `protofed bench`, some with fewer clients, and more sizes of the same kinds."""
    bench = {name: replace(w, clients=w.per_round) for name, w in TRAINING.items()}
    bench["cnn28"] = replace(bench["cnn28"], clients=10, per_round=10, samples=80)
    bench["cifar-cohort"] = replace(bench["cifar-cohort"], clients=12, per_round=12)
    bench["cifar-cohort-pfl"] = replace(bench["cifar-cohort-pfl"], clients=6, per_round=6)
    bench["resnet18"] = replace(bench["resnet18"], clients=3, per_round=3, samples=24)
    found = list(bench.values())

    def more(
        kind: type[Training], model: str, shape: tuple[int, ...], clients: int, batch: int, **options: Any
    ) -> None:
        words = [f"{k} {'-'.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in options.items()]
        name = ", ".join([f"{model} {'×'.join(map(str, shape))}", *words, f"batch {batch}", f"{clients} clients"])
        found.append(kind(name, "fedproto", clients, clients, 4 * batch, shape, model, options, batch))

    for clients, batch in ((2, 8), (5, 8), (20, 8), (20, 32), (20, 64)):
        more(Training, "mlp", (64,), clients, batch, hidden=(128,), embedding=64)
    more(Training, "mlp", (16,), 100, 8, hidden=(16,), embedding=8)
    for batch in (8, 64):
        more(Training, "mlp", (784,), 20, batch, hidden=(200,), embedding=100)
        more(Training, "mlp", (784,), 20, batch, hidden=(512,), embedding=256)
    more(Training, "mlp", (3072,), 10, 16, hidden=(512,), embedding=256)
    for batch in (8, 32):
        more(Training, "cnn", (1, 28, 28), 20, batch, channels=(4, 8), embedding=16)
        more(Training, "cnn", (1, 28, 28), 20, batch, channels=(10, 20), embedding=50)
    more(Training, "cnn", (1, 28, 28), 6, 32, channels=(32, 64), embedding=512)
    more(Training, "cnn", (3, 32, 32), 10, 10, channels=(10, 20), embedding=50)
    for model in ("tinyconvnet4", "middleconvnet4", "largeconvnet4"):  # Wi-Fi CSI
        more(Training, model, (3, 64, 30), 6, 8)
    more(Training, "resnet9", (3, 32, 32), 3, 8, width=0.25)
    more(Training, "resnet18", (3, 32, 32), 3, 8, width=0.125)
    more(Training, "wideresnet", (3, 32, 32), 3, 8, depth=10, widen=1)
    for layers, length in ((0, 32), (1, 32), (2, 64)):
        more(Text, "bert", (length,), 6, 8, trainable_layers=layers)
    return found


def measured(workload: Training) -> dict[str, Any]:
    """The seconds of every way, and the rule's among them."""
    x, y = workload.load(None)
    settings = resolve(workload.method, workload.settings(x, y))
    chosen = build(settings.with_engine(EngineSettings(workers=1)))[0].engine.recipe(0).label
    convolves = any(isinstance(layer, nn.Conv2d) for layer in workload.build_model().modules())
    ways = {
        name: way for name, way in WAYS.items() if convolves or name in ("loop", "stack")
    }  # the others are the same
    federations = {name: build(settings.with_engine(way))[1] for name, way in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for turn in range(TURNS + 1):
        for name, federation in federations.items():
            best = min((min(times) for times in seconds.values() if times), default=0.0)
            hopeless = seconds[name] and min(seconds[name]) > HOPELESS * best
            if turn > 1 and (hopeless or time.perf_counter() - began > SECONDS):
                continue
            downloads, _ = federation.downloads(range(workload.clients), 1)
            start = time.process_time()
            for _ in federation.engine.train(downloads):
                pass
            if turn:  # the first one warms up
                seconds[name].append(time.process_time() - start)
    best_of = {name: min(times) for name, times in seconds.items()}
    fastest = min(best_of, key=lambda name: best_of[name])
    sample = forward_flops(workload.build_model(), workload.shape, tokens=isinstance(workload, Text))
    return {
        "parameters": federations["loop"].engine.parameters[0],
        "operations_per_step": sample * workload.batch,
        "clients": workload.clients,
        "seconds": {name: round(value, 5) for name, value in best_of.items()},
        "fastest": fastest,
        "rule": chosen,
        "rule_over_fastest": round(best_of[chosen] / best_of[fastest], 3),
    }


def main(file: Path) -> None:
    torch.set_num_threads(1)
    result = json.loads(file.read_text()) if file.exists() else {"machine": machine(), "workloads": {}}
    for workload in workloads():
        if workload.name not in result["workloads"]:
            row = measured(workload)
            result["workloads"][workload.name] = row
            print(f"{workload.name}: {row['rule']}, {row['rule_over_fastest']} of {row['fastest']}", flush=True)
        costs = sorted(row["rule_over_fastest"] for row in result["workloads"].values())
        result["rule_over_fastest"] = {
            "geometric_mean": round(float(torch.tensor(costs).log().mean().exp()), 3),
            "median": costs[len(costs) // 2],
            "largest": costs[-1],
        }
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(result["rule_over_fastest"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
