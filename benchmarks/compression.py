"""What compression costs and saves: `python benchmarks/compression.py [FILE.json]`.

FedProto and FedAvg on digits, three seeds, with each filter. `bytes_up` are those of all rounds, headers of messages
included; `payload_up` are those without headers, which do not grow with the model. `error` is the mean over the rounds of
the relative error that clients measure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import protofed as pf

FILTERS = (
    "",
    "float16",
    "bfloat16",
    "quantise?bits=8",
    "top-k?share=0.3",
    "top-k?share=0.1",
    "changed?tolerance=0.05",
    "changed?tolerance=0.2",
    "top-k?share=0.1,quantise?bits=8",
)
SEEDS = (1, 2, 3)
KEYS = {"data": "digits", "rounds": 30, "clients": 10, "shot": 15, "lr": 0.05, "snapshots": 0, "silhouette": False}


def row(method: str, filters: str) -> dict[str, object]:
    """One line of the table."""
    measured: dict[str, list[float]] = {"accuracy": [], "bytes_up": [], "payload_up": [], "error": []}
    for seed in SEEDS:
        errors: list[float] = []
        result = pf.run(
            method,
            seed=seed,
            filters=filters,
            watch=lambda record, rounds, errors=errors: errors.append(record.measures.get("compression_error", 0.0)),
            **KEYS,
        )
        sent = result.summary["bytes_up"]
        measured["accuracy"].append(result.accuracy)
        measured["bytes_up"].append(sum(sent.values()))
        measured["payload_up"].append(sum(sent.values()) - sent["framing"])
        measured["error"].append(fmean(errors))
    means = {name: round(fmean(values), 5) for name, values in measured.items()}
    return {
        "method": method,
        "filters": filters or "none",
        **means,
        "accuracy_std": round(stdev(measured["accuracy"]), 5),
    }


if __name__ == "__main__":
    rows = []
    for method in ("fedproto", "fedavg"):
        for filters in FILTERS:
            if method == "fedavg" and "changed" in filters:
                continue  # it sends no prototypes
            rows.append(row(method, filters))
            print(json.dumps(rows[-1]), flush=True)
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
