"""Wi-Fi captures: channel state information of six formats, a signal chain, windows, labels and splits.

    from protofed.data.csi import read_capture
    read_capture("office.pcap").csi.shape

Each format has a small reader that follows its framing, so that a capture of any size needs the memory of one window,
damage is reported with its byte, and what is left out is counted.
"""

from __future__ import annotations

from .labels import Capture, read_manifest
from .nexmon import CHIPS, TONES, used
from .packets import Bandwidth, Chip, Damaged, Format, Packet, Tally
from .read import ENDINGS, FORMATS, Recording, Wanted, packets, read_capture
from .signal import Scale, Signal, Step, scaled
from .source import CSI, Account, Stage
from .windows import Sample, Window, cut, resampled, stretches

__all__ = [
    "CHIPS",
    "CSI",
    "ENDINGS",
    "FORMATS",
    "TONES",
    "Account",
    "Bandwidth",
    "Capture",
    "Chip",
    "Damaged",
    "Format",
    "Packet",
    "Recording",
    "Sample",
    "Scale",
    "Signal",
    "Stage",
    "Step",
    "Tally",
    "Wanted",
    "Window",
    "cut",
    "packets",
    "read_capture",
    "read_manifest",
    "resampled",
    "scaled",
    "stretches",
    "used",
]
