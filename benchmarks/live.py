"""From packet to class on one core: `python benchmarks/live.py docs/results/live.json [FOLDER]`.

Captures are replayed at their own speed, as a source and to a UDP port of this host, and classified ten times a second by
LargeConvNet4 after one round of training: a made-up one of 20 s with 100 packets a second of 80 MHz, and the genuine ones
of FOLDER that have enough packets. The process is bound to one core. The made-up capture has windows of the paper's size,
1000 × 242, the genuine ones of 100 packets. Beside the file, `live.md` has its rows as a table.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import protofed as pf
from protofed.data.csi import read_capture
from protofed.data.csi.replay import send
from protofed.live import Feed, Live, Replay, Udp

STEPS = "hampel,lowpass?cutoff=20"


def made_up(file: Path, seconds: int, rate: int = 100) -> None:
    """A capture in the layout of Nexmon's extractor: 256 tones, one core."""
    rng = np.random.default_rng(0)
    out = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
    for number in range(seconds * rate):
        values = (2000 + 500 * np.sin(number / 20) + rng.normal(0, 200, (256, 2))).astype("<i2").tobytes()
        body = b"\x11\x11\xd5\x80" + bytes(6) + struct.pack("<HHHH", number % 4096, 0, 0xE02A, 0x0065) + values
        ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + len(body), 1, 0, 1, 17, 0, b"\x0a" * 4, b"\xff" * 4)
        frame = b"\xff" * 6 + b"NEXMON\x08\x00" + ip + struct.pack(">HHHH", 5500, 5500, 8 + len(body), 0) + body
        second, part = divmod(number, rate)
        out += struct.pack("<4I", second, part * 1_000_000 // rate, len(frame), len(frame)) + frame
    file.write_bytes(out)


def trained(file: Path, times: np.ndarray, window: int, steps: str, out: Path) -> Any:
    """A run of one round on the two halves of a capture's packets, as two classes."""
    half, end = times[len(times) // 2] - times[0], times[-1] - times[0] + 1
    rows = (f"{file},room,early,0,{half}", f"{file},room,late,{half},{end}")
    manifest = out.with_suffix(".csv")
    manifest.write_text("file,room,activity,start,end\n" + "\n".join(rows) + "\n", encoding="utf-8")
    data = {"name": "csi", "manifest": str(manifest), "label": "activity", "window": window, "step": window // 4}
    data["steps"] = steps.split(",") if steps else []
    network = {"name": "largeconvnet4", "embedding": 256}
    given = {"partition": "natural", "clients": 0, "test": "local", "workers": 1, "threads": 1, "snapshots": 0}
    return pf.run("fedapa", data=data, model=network, rounds=1, silhouette=False, out=out, **given)


def followed(result: Any, feed: Feed, step: int, file: Path | None = None) -> dict[str, Any]:
    """The latencies of a feed; with a file, of one that is sent to it meanwhile."""
    live = Live(result.model(0), result.settings.data, feed, step=step)
    stop = threading.Event()
    with live:
        began = time.monotonic()
        if isinstance(feed, Udp) and file is not None:

            def sent() -> None:
                send(file, feed.address, stop=stop)
                time.sleep(0.5)
                feed.stop.set()

            threading.Thread(target=sent, daemon=True).start()
        for _ in live:
            pass
        took = time.monotonic() - began
    stop.set()
    milliseconds = 1000 * np.array(live.latencies)
    return {
        "packets": live.account.tally.given,
        "dropped": feed.dropped,
        "seconds": round(took, 2),
        "windows": live.account.windows,
        "latency_ms": {
            "median": round(float(np.median(milliseconds)), 1),
            "p95": round(float(np.quantile(milliseconds, 0.95)), 1),
            "longest": round(float(milliseconds.max()), 1),
        },
    }


def measured(file: Path, name: str, window: int, steps: str, folder: Path) -> list[dict[str, Any]]:
    """A capture as a source of its own and, where its device sends datagrams, to a port."""
    recorded = read_capture(file).time
    seconds = float(recorded[-1] - recorded[0])
    result = trained(file, recorded, window, steps, folder / f"run-{len(list(folder.iterdir()))}")
    step = max(1, round(0.1 / float(np.median(np.diff(recorded)))))
    rows = []
    for kind in ("replay", "udp") if file.suffix in (".pcap", ".csv") else ("replay",):
        feed: Feed = Replay(file) if kind == "replay" else Udp("127.0.0.1", 0)
        shape = list(result.model(0).design.sample_shape)
        row = {"capture": name, "source": kind, "recorded_seconds": round(seconds, 2), "window": shape, "steps": steps}
        row |= {"recorded_rate": round((len(recorded) - 1) / seconds, 1), "step": step}
        rows.append(row | followed(result, feed, step, file))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    names = (
        "capture",
        "from",
        "packets",
        "recorded s",
        "took s",
        "window",
        "steps",
        "classes",
        "median ms",
        "95 % ms",
        "longest ms",
    )
    lines = ["| " + " | ".join(names) + " |", "| --- | --- | ---: | ---: | ---: | --- | --- |" + " ---: |" * 4]
    for row in rows:
        shape, latency = " × ".join(map(str, row["window"])), row["latency_ms"].values()
        cells = [row["capture"], row["source"], f"{row['packets']:,}", row["recorded_seconds"], row["seconds"], shape]
        cells += [row["steps"].replace(",", ", ") or "–", row["windows"], *latency]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main(out: Path, genuine: Path | None = None) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made_up(folder / "made-up.pcap", 20)
        for steps in ("", STEPS):
            rows += measured(folder / "made-up.pcap", "made up, Nexmon 80 MHz", 1000, steps, folder)
        for file in sorted(genuine.iterdir()) if genuine is not None else ():
            if len(read_capture(file).time) >= 250:
                rows += measured(file, file.name, 100, STEPS.partition(",")[0], folder)
    out.write_text(json.dumps({"cores": 1, "model": "largeconvnet4", "rows": rows}, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(table(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None)
