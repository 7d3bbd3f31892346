"""Genuine captures, whole and damaged: `python benchmarks/captures.py FOLDER docs/results/captures.json [COPIES]`.

FOLDER has captures of any format. Each is read by protofed and, where csiread knows the format, by csiread, and the largest
difference of amplitudes is recorded. Then COPIES damaged copies (1,000) are read: cut off, with changed bits, or spliced
from two places or files. Each must give windows or one line that names the file; anything else stops the script.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import csiread
import numpy as np

from protofed.data.csi import CSI, Recording, read_capture, used
from protofed.data.csi.esp32 import TONES as LEGACY
from protofed.data.csi.read import format_of
from protofed.errors import ProtofedError

DAMAGES = ("cut", "flipped", "spliced")


def of_csiread(file: Path, form: str, ours: Recording) -> np.ndarray | None:
    """The amplitudes `[packets, antennas, subcarriers]` as csiread reads them, in our order; None where it cannot."""
    _, antennas, tones = ours.csi.shape
    if form == "Nexmon":
        chip = "4366c0" if "4366c0" in file.name else "43455c0"
        whole = csiread.Nexmon(str(file), chip=chip, bw=80, if_report=False)
        whole.read()
        return np.abs(whole.csi)[:, None, used(256, 2, 122)]
    if form in ("Intel 5300", "Atheros"):
        kind = csiread.Intel if form == "Intel 5300" else csiread.Atheros
        more = {} if form == "Intel 5300" else {"tones": tones}
        whole = kind(str(file), nrxnum=3, ntxnum=antennas // 3, if_report=False, **more)
        whole.read()
        return np.abs(whole.csi).transpose(0, 2, 3, 1).reshape(len(whole.csi), antennas, tones)
    if form == "ESP32":
        return esp32(file)
    if form == "PicoScenes":
        return picoscenes(file, ours)
    return None


def esp32(file: Path) -> np.ndarray:
    """csiread takes a line at a time; lines that it refuses are the ones that we leave out."""
    rows = []
    reader = csiread.ESP32(None, if_report=False)
    for line in file.read_text(encoding="ascii", errors="replace").splitlines():
        if not line.startswith("CSI_DATA,") or not line.endswith("]"):
            continue
        try:
            reader.pmsg(line.removesuffix("]").rstrip() + " ]")
        except (ValueError, IndexError):
            continue
        if reader.csi.shape[1] >= 64:
            rows.append(np.abs(reader.csi[0, LEGACY % 64]))
    return np.array(rows)[:, None]


def picoscenes(file: Path, ours: Recording) -> np.ndarray:
    """The frames of our shape. Of an AX200, csiread's choice of tones is put in the places that it took them from."""
    whole = csiread.Picoscenes(str(file), {"CSI": [2048, 4, 4]}, if_report=False)
    whole.read()
    info, channel = whole.raw["CSI"]["Info"], whole.raw["CSI"]["CSI"]
    mvm = info["DeviceType"][0] in (0x2000, 0x2100)
    counts = Counter(zip(info["NumTones"].tolist(), info["NumRx"].tolist(), info["NumTx"].tolist(), strict=True))
    tones, receive, send = counts.most_common(1)[0][0]
    rows = (info["NumTones"] == tones) & (info["NumRx"] == receive) & (info["NumTx"] == send)
    found = np.abs(channel[rows][:, :tones, :receive, :send]).transpose(0, 2, 3, 1).reshape(rows.sum(), -1, tones)
    return mvm_places(found, ours) if mvm else found


def mvm_places(found: np.ndarray, ours: Recording) -> np.ndarray:
    """csiread 1.4.1 skips tones by the number of those it has kept, and goes on in the table of pilots from antenna to
    antenna: so it drops tones of data. What it kept is put where it comes from, and the rest is NaN."""
    table = [7, 21, 34, 48, 5, 33, 47, 66, 80, 108]  # its tables of 20 and 40 MHz stand one after the other
    all_tones = np.concatenate([np.arange(-28, 0), np.arange(1, 29)])
    filled = np.full(ours.csi.shape, np.nan)
    skipped = 0
    for antenna in range(found.shape[1]):
        kept: list[int] = []
        for tone in range(len(all_tones)):
            if len(kept) == table[skipped]:
                skipped += 1
                continue
            kept.append(tone)
        for place, tone in enumerate(kept):
            where = np.flatnonzero(ours.tones == all_tones[tone])
            if len(where):
                filled[:, antenna, where[0]] = found[:, antenna, place]
    return filled


def compare(file: Path) -> dict[str, Any]:
    """One file as we and csiread read it."""
    ours = read_capture(file)
    with file.open("rb") as stream:
        form = format_of(file, stream).name
    amplitude = np.abs(ours.csi)
    theirs = of_csiread(file, form, ours)
    row: dict[str, Any] = {
        "file": file.name,
        "format": form,
        "packets": len(ours.csi),
        "shape": list(ours.csi.shape[1:]),
    }
    row["left out"] = dict(ours.tally.left_out)
    if theirs is not None:
        both = np.isfinite(theirs)
        difference = float(np.abs(theirs - amplitude)[both].max())
        row["csiread"] = {"packets": len(theirs), "values": int(both.sum()), "largest difference": difference}
        assert len(theirs) == len(amplitude) and row["csiread"]["largest difference"] <= 1e-6, row
    return row


def damaged(contents: list[bytes], rng: np.random.Generator) -> tuple[int, str, bytes]:
    """A damaged copy of one of the files: which, how, and its bytes."""
    number = int(rng.integers(len(contents)))
    content, how = contents[number], DAMAGES[int(rng.integers(len(DAMAGES)))]
    if how == "cut":
        return number, how, content[: int(rng.integers(len(content)))]
    if how == "flipped":
        changed = bytearray(content)
        share = 10 ** rng.uniform(-6, -2)
        for at in rng.integers(len(content), size=max(1, round(share * len(content)))):
            changed[at] ^= 1 << int(rng.integers(8))
        return number, how, bytes(changed)
    other = contents[int(rng.integers(len(contents)))] if rng.random() < 0.5 else content
    a, b = int(rng.integers(len(content))), int(rng.integers(len(other)))
    return number, how, content[:a] + other[b:]


def endure(files: list[Path], copies: int) -> dict[str, Any]:
    """What damaged copies give: windows of all the chain, or one line."""
    contents = [file.read_bytes() for file in files]
    rng = np.random.default_rng(0)
    outcomes: dict[str, Counter[str]] = {how: Counter() for how in DAMAGES}
    reasons: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for copy in range(copies):
            number, how, content = damaged(contents, rng)
            file = Path(folder) / f"copy{files[number].suffix}"
            file.write_bytes(content)
            steps = ("hampel", "pca?components=3", "summary") if copy % 4 == 0 else ()
            strict = copy % 3 == 0
            source = CSI(
                manifest="",
                window=16,
                rate=100.0 if copy % 2 else None,
                damaged="error" if strict else "keep",
                steps=steps,
            )
            try:
                windows = source.windows(file)
            except ProtofedError as error:
                assert "\n" not in str(error) and file.name in str(error), error
                outcomes[how]["one line"] += 1
                reasons[" ".join(str(error).partition(": ")[2].split()[:2])] += 1
            else:
                assert all(np.isfinite(window).all() for window in windows)
                outcomes[how]["windows" if windows else "packets, but no window"] += 1
    return {
        "copies": copies,
        "outcomes": {how: dict(counts) for how, counts in outcomes.items()},
        "lines": dict(reasons),
    }


def main(folder: Path, out: Path, copies: int) -> None:
    logging.disable(logging.WARNING)
    files = sorted(file for file in folder.iterdir() if file.suffix in (".pcap", ".dat", ".csv", ".csi"))
    result = {
        "csiread": csiread.__version__,
        "files": [compare(file) for file in files],
        "damaged": endure(files, copies),
    }
    out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in result["files"]:
        print(row)
    print(result["damaged"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1000)
