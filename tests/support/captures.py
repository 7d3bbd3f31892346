"""Writers of small captures in the genuine byte layouts of all formats."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

PCAP = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)


def record(frame: bytes, order: str = "<", number: int = 0, seconds: int = 1_700_000_000) -> bytes:
    return struct.pack(f"{order}4I", seconds, number, len(frame), len(frame)) + frame


def udp(payload: bytes) -> bytes:
    """Ethernet, IPv4 and UDP as Nexmon's firmware makes them up: from 10.10.10.10 to all, port 5500."""
    ethernet = b"\xff" * 6 + b"NEXMON" + b"\x08\x00"
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 1, 0, 1, 17, 0, b"\x0a" * 4, b"\xff" * 4)
    return ethernet + ip + struct.pack(">HHHH", 5500, 5500, 8 + len(payload), 0) + payload


SENDER = b"\x02\x00\x5e\x00\x00\x01"
CHIPS = {"43455c0": 0x0065, "4339": 0x0001, "4358": 0xDEAD, "4366c0": 0x006A}


def nexmon(
    iq: np.ndarray,
    mark: bytes = b"\x11\x11\xd5\x80",
    core: int = 0,
    chip: int = 0x0065,
    sequence: int = 7,
    sender: bytes = SENDER,
) -> bytes:
    """One packet: `iq [tones, 2]` 16-bit numbers (or 32-bit words of a packing chip)."""
    head = mark + sender + struct.pack("<HHHH", sequence, core, 0xE02A, chip)
    return udp(head + iq.tobytes())


def samples(packets: int, tones: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3000, 3000, (packets, tones, 2)).astype("<i2")


def pcap(iq: np.ndarray, **how: object) -> bytes:
    """Packets a hundredth of a second apart."""
    parts = [nexmon(packet, **how) for packet in iq]  # type: ignore[arg-type]
    return PCAP + b"".join(
        record(part, number=number % 100 * 10_000, seconds=1_700_000_000 + number // 100)
        for number, part in enumerate(parts)
    )


def intel(
    packets: int, receive: int = 3, send: int = 1, perm: int = 0b100100, seed: int = 0, apart: int = 10_000
) -> bytes:
    rng = np.random.default_rng(seed)
    size = 60 * receive * send + 12
    out = b""
    for number in range(packets):
        time = number * apart % 2**32
        head = struct.pack("<IHHBBBBBbBBHH", time, number, 0, receive, send, 33, 33, 33, -92, 40, perm, size, 0x4101)
        body = head + rng.integers(0, 256, size).astype(np.uint8).tobytes()
        out += struct.pack(">HB", len(body) + 1, 0xBB) + body
    return out


def esp32(packets: int, values: int = 128, secondary: int = 0, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lines = ["type,role,mac,rssi,rate,…\n", "I (305) wifi: a message of the board\n"]
    for number in range(packets):
        numbers = " ".join(map(str, rng.integers(-128, 128, values)))
        head = f"CSI_DATA,AP,3C:61:05:4C:36:CD,-32,11,1,7,0,1,0,1,0,0,1,-92,0,6,{secondary},{10_000 * number},0,101,0,0,1.25"
        lines.append(f"{head},{values},[{numbers} ]\n")
    return "".join(lines)


def segment(name: bytes, body: bytes, version: int = 1) -> bytes:
    inner = bytes([len(name)]) + name + struct.pack("<H", version) + body
    return struct.pack("<I", len(inner)) + inner


def picoscenes(packets: int, receive: int = 2, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    out = b""
    for number in range(packets):
        bits = rng.integers(0, 256, 60 * receive + 12).astype(np.uint8).tobytes()
        basic = struct.pack(
            "<HQhBHHBBBBbbbbb", 0x5300, 10_000 * number, 5180, 1, 20, 800, 0, 1, 0, receive, -90, -40, -40, -41, 0
        )
        matrix = struct.pack(
            "<HbHQQIHBBBBI", 0x5300, 1, 20, 5_180_000_000, 20_000_000, 312_500, 30, 1, receive, 0, 0, len(bits)
        )
        parts = segment(b"RxSBasic", basic) + segment(b"ExtraInfo", bytes(4)) + segment(b"CSI", matrix + bits)
        inner = struct.pack("<IHB", 0x20150315, 1, 3) + parts + bytes(40)
        out += struct.pack("<I", len(inner)) + inner
    return out


def intel_ax(packets: int, tones: int = 56, receive: int = 2, seed: int = 0, efficient: bool = False) -> bytes:
    """PicoScenes with an AX200, whose segments' names end in NUL, as its newer versions write them."""
    rng = np.random.default_rng(seed)
    out = b""
    for number in range(packets):
        values = rng.integers(-3000, 3000, (receive, tones, 2)).astype("<i2").tobytes()
        form = 3 if efficient else 1
        basic = struct.pack(
            "<HQhhHBHHBBBBBBbbbbb", 0x2000, 0, 5180, 5180, 20, form, 20, 800, 0, 1, 0, receive, 1, 0, -90, -40, 0, 0, 0
        )
        extra = struct.pack("<H", 272) + bytes(88) + struct.pack("<I", 10_000 * number) + bytes(180)
        matrix = struct.pack(
            "<HBbHQQIHBBBHBhI",
            *(0x2000, 67, form, 20, 5_180_000_000, 20_000_000, 312_500, tones, 1, receive, 0, 1, 0, 0, len(values)),
        )
        parts = segment(b"RxSBasic\0", basic, version=3) + segment(b"MVMExtra\0", extra)
        out += framed(parts + segment(b"CSI\0", matrix + values, version=4), 3)
    return out


def framed(parts: bytes, number: int) -> bytes:
    mac = b"\x88\x02\x30\x00" + b"\xff" * 6 + SENDER + bytes(24)
    inner = struct.pack("<IHB", 0x20150315, 1, number) + parts + mac
    return struct.pack("<I", len(inner)) + inner


def usrp(packets: int, tones: int = 52, seed: int = 0) -> bytes:
    """PicoScenes with a software radio: the numbers of the subcarriers, and a matrix of doubles."""
    rng = np.random.default_rng(seed)
    index = np.array([k for k in range(-tones // 2, tones // 2 + 1) if k]).astype("<i2").tobytes()
    out = b""
    for number in range(packets):
        matrix = b"BBM1\x03" + struct.pack("<3I", tones, 1, 1) + b"CF\x40C" + rng.normal(size=2 * tones).tobytes()
        head = struct.pack(
            "<HbHQQIHBBBBhI",
            *(0x1234, 0, 20, 2_417_000_000, 20_000_000, 312_500, tones, 1, 1, 0, 0, 0, len(index + matrix)),
        )
        stamp = 1_600_000_000_000_000_000 + number * 10_000_000
        basic = struct.pack("<HQhBHHBBBBBBbbbbb", 0x1234, stamp, 2417, 0, 20, 800, 4, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0)
        out += framed(segment(b"RxSBasic", basic, version=2) + segment(b"CSI", head + index + matrix, version=2), 2)
    return out


def atheros(packets: int, tones: int = 56, receive: int = 3, send: int = 2, seed: int = 0, order: str = "<") -> bytes:
    rng = np.random.default_rng(seed)
    size = 20 * tones * receive * send // 8
    mac = b"\x08\x00\x00\x00" + b"\xff" * 6 + SENDER + bytes(14)
    out = b""
    for number in range(packets):
        numbers = (10_000 * number, size, 2437, 0, 0, 143, 0, tones, receive, send, 52, 38, 52, 36, len(mac))
        body = struct.pack(f"{order}QHHBBBBBBBBBBBH", *numbers)
        body += rng.integers(0, 256, size).astype(np.uint8).tobytes() + mac
        out += struct.pack(f"{order}H", len(body)) + body
    return out


def feitcsi(
    packets: int, tones: int = 56, receive: int = 2, send: int = 1, seed: int = 0, rate: int = 0x10C207
) -> bytes:
    rng = np.random.default_rng(seed)
    out = b""
    for number in range(packets):
        values = rng.integers(-3000, 3000, (receive, send, tones, 2)).astype("<i2").tobytes()
        head = bytearray(272)
        struct.pack_into("<I", head, 0, len(values))
        struct.pack_into("<BB", head, 46, receive, send)
        struct.pack_into("<I", head, 52, tones)
        struct.pack_into("<II", head, 60, 41, 39)
        head[68:74] = SENDER
        struct.pack_into("<II", head, 88, 10_000 * number, rate)
        out += bytes(head) + values
    return out


def put(file: Path, content: bytes | str) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file
