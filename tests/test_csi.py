"""Captures written here in the genuine byte layouts, read back and compared with csiread's own reading of whole files."""

from __future__ import annotations

import logging
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.data import csi, load
from protofed.errors import ProtofedError
from support.errors import refusal

csiread = pytest.importorskip("csiread")


# --- writers ----------------------------------------------------------------------------------------------------------
PCAP = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)


def record(frame: bytes, order: str = "<", number: int = 0) -> bytes:
    return struct.pack(f"{order}4I", 1_700_000_000, number, len(frame), len(frame)) + frame


def udp(payload: bytes) -> bytes:
    """Ethernet, IPv4 and UDP as Nexmon's firmware makes them up: from 10.10.10.10 to all, port 5500."""
    ethernet = b"\xff" * 6 + b"NEXMON" + b"\x08\x00"
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, 28 + len(payload), 1, 0, 1, 17, 0, b"\x0a" * 4, b"\xff" * 4)
    return ethernet + ip + struct.pack(">HHHH", 5500, 5500, 8 + len(payload), 0) + payload


def nexmon(iq: np.ndarray, mark: bytes = b"\x11\x11\xd5\x80", core: int = 0) -> bytes:
    """One packet: `iq [tones, 2]` 16-bit numbers (or 32-bit words of a packing chip)."""
    head = mark + b"\x02\x00\x5e\x00\x00\x01" + struct.pack("<HHHH", 7, core, 0xE02A, 0x0065)
    return udp(head + iq.tobytes())


def samples(packets: int, tones: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3000, 3000, (packets, tones, 2)).astype("<i2")


def pcap(iq: np.ndarray, **how: object) -> bytes:
    return PCAP + b"".join(record(nexmon(packet, **how)) for packet in iq)  # type: ignore[arg-type]


def intel(packets: int, receive: int = 3, send: int = 1, perm: int = 0b100100, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    size = 60 * receive * send + 12
    out = b""
    for number in range(packets):
        head = struct.pack("<IHHBBBBBbBBHH", number, number, 0, receive, send, 33, 33, 33, -92, 40, perm, size, 0x4101)
        body = head + rng.integers(0, 256, size).astype(np.uint8).tobytes()
        out += struct.pack(">HB", len(body) + 1, 0xBB) + body
    return out


def esp32(packets: int, values: int = 128, secondary: int = 0, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    lines = ["type,role,mac,rssi,rate,…\n", "I (305) wifi: a message of the board\n"]
    for number in range(packets):
        numbers = " ".join(map(str, rng.integers(-128, 128, values)))
        head = f"CSI_DATA,AP,3C:61:05:4C:36:CD,-32,11,1,7,0,1,0,1,0,0,1,-92,0,6,{secondary},{number},0,101,0,0,1.25"
        lines.append(f"{head},{values},[{numbers} ]\n")
    return "".join(lines)


def segment(name: bytes, body: bytes) -> bytes:
    inner = bytes([len(name)]) + name + struct.pack("<H", 1) + body
    return struct.pack("<I", len(inner)) + inner


def picoscenes(packets: int, receive: int = 2, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    out = b""
    for number in range(packets):
        bits = rng.integers(0, 256, 60 * receive + 12).astype(np.uint8).tobytes()
        basic = struct.pack(
            "<HQhBHHBBBBbbbbb", 0x5300, number, 5180, 1, 20, 800, 0, 1, 0, receive, -90, -40, -40, -41, 0
        )
        matrix = struct.pack(
            "<HbHQQIHBBBBI", 0x5300, 1, 20, 5_180_000_000, 20_000_000, 312_500, 30, 1, receive, 0, 0, len(bits)
        )
        parts = segment(b"RxSBasic", basic) + segment(b"ExtraInfo", bytes(4)) + segment(b"CSI", matrix + bits)
        inner = struct.pack("<IHB", 0x20150315, 1, 3) + parts + bytes(40)
        out += struct.pack("<I", len(inner)) + inner
    return out


def source(**options: object) -> csi.CSI:
    return csi.CSI(manifest="unused.csv", **options)  # type: ignore[arg-type]


def rows(file: Path, **options: object) -> np.ndarray:
    return np.stack(list(source(**options).packets(file)))


def put(file: Path, content: bytes | str) -> Path:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


# --- null subcarriers -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tones", "bandwidth", "kept"), [(64, 20, 56), (128, 40, 114), (256, 80, 242)])
def test_the_subcarriers_of_the_standard_are_kept(tones: int, bandwidth: int, kept: int) -> None:
    width, low, high = csi.TONES[tones]
    bins = csi.used(tones, low, high)
    signed = np.where(bins < tones // 2, bins, bins - tones)
    naive = [k for k in range(-tones // 2, tones // 2) if low <= abs(k) <= high]
    assert width == bandwidth and len(bins) == kept and signed.tolist() == naive


def test_of_80_mhz_eleven_guards_and_three_at_the_centre_go() -> None:
    gone = sorted(set(range(256)) - set(csi.used(256, 2, 122).tolist()))
    assert gone == [0, 1, *range(123, 134), 255]


# --- Nexmon -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tones", "bandwidth"), [(64, 20), (128, 40), (256, 80)])
@pytest.mark.parametrize("mark", [b"\x11\x11\x11\x11", b"\x11\x11\xd5\x80"])
def test_nexmon_is_what_csiread_reads(tmp_path: Path, tones: int, bandwidth: int, mark: bytes) -> None:
    iq = samples(7, tones)
    file = put(tmp_path / "a.pcap", pcap(iq, mark=mark))
    whole = csiread.Nexmon(str(file), chip="43455c0", bw=bandwidth, if_report=False)
    whole.read()
    found = rows(file)
    shifted = np.fft.fftshift(np.abs(whole.csi), axes=1)
    k = np.arange(-tones // 2, tones // 2)
    _, low, high = csi.TONES[tones]
    np.testing.assert_array_equal(found, shifted[:, (abs(k) >= low) & (abs(k) <= high)])
    by_hand = np.hypot(iq[:, 1, 0].astype(float), iq[:, 1, 1])  # bin 1, used at 20 MHz only
    if tones == 64:
        np.testing.assert_allclose(found[:, 28], by_hand)


@pytest.mark.parametrize("chip", ["4358", "4366c0"])
@pytest.mark.parametrize(("mark", "kind"), [(b"\x11" * 4, "Nexmon"), (b"\x11\x11\xd5\x80", "NexmonPull46")])
def test_chips_that_pack_floats(tmp_path: Path, chip: str, mark: bytes, kind: str) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (5, 256), dtype=np.uint64).astype("<u4")
    file = put(tmp_path / "a.pcap", pcap(words, mark=mark))
    whole = getattr(csiread, kind)(str(file), chip=chip, bw=80, if_report=False)
    whole.read()
    np.testing.assert_array_equal(rows(file, chip=chip), np.abs(whole.csi)[:, csi.used(256, 2, 122)])


def test_other_traffic_and_other_cores_are_passed_over(tmp_path: Path) -> None:
    iq = samples(4)
    arp = b"\xff" * 6 + b"\x02\x00\x00\x00\x00\x01" + b"\x08\x06" + bytes(28)
    parts = [arp, nexmon(iq[0]), b"\x01" * 20, nexmon(iq[1], core=1), nexmon(iq[2]), nexmon(iq[3], core=1)]
    file = put(tmp_path / "a.pcap", PCAP + b"".join(map(record, parts)))
    expected = np.linalg.norm(iq[[0, 2]].astype(float), axis=2)[:, csi.used(256, 2, 122)]
    np.testing.assert_allclose(rows(file), expected)


def test_byte_orders_and_nanoseconds(tmp_path: Path) -> None:
    iq = samples(2)
    plain = rows(put(tmp_path / "a.pcap", pcap(iq)))
    for order, magic, fraction in (("<", 0xA1B23C4D, 999_999_999), (">", 0xA1B2C3D4, 5), (">", 0xA1B23C4D, 10**6)):
        head = struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 65535, 1)
        body = b"".join(record(nexmon(packet), order, fraction) for packet in iq)
        np.testing.assert_array_equal(rows(put(tmp_path / "b.pcap", head + body)), plain)


def test_two_bandwidths_in_one_capture(tmp_path: Path) -> None:
    wide, narrow = samples(3), samples(2, 64)
    file = put(tmp_path / "a.pcap", pcap(wide) + pcap(narrow)[24:])
    text = refusal(lambda: rows(file))
    assert "80 MHz" in text and "20 MHz" in text and "bandwidth=" in text and "a.pcap" in text
    assert rows(file, bandwidth=80).shape == (3, 242) and rows(file, bandwidth=20).shape == (2, 56)
    assert "of 40 MHz" in refusal(lambda: rows(file, bandwidth=40))


# --- the other formats ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("receive", "send", "perm"), [(3, 1, 0b100100), (3, 2, 0b011000), (2, 3, 0b0110), (1, 1, 2)])
def test_intel_is_what_csiread_reads(tmp_path: Path, receive: int, send: int, perm: int) -> None:
    other = struct.pack(">HB", 31, 0xC1) + bytes(30)
    file = put(tmp_path / "a.dat", intel(4, receive, send, perm) + other + intel(1, receive, send, perm, seed=1))
    whole = csiread.Intel(str(file), nrxnum=3, ntxnum=3, if_report=False)
    whole.read()
    places = sorted(perm >> 2 * antenna & 3 for antenna in range(receive))
    expected = np.concatenate([np.abs(whole.csi[:, :, place, 0]) for place in places], axis=1)
    found = rows(file)
    assert found.shape == (5, 30 * receive)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("values", [128, 384])
def test_esp32_is_what_csiread_reads(tmp_path: Path, values: int) -> None:
    text = esp32(5, values)
    file = put(tmp_path / "a.csv", text)
    bare = put(tmp_path / "bare.csv", "".join(text.splitlines(keepends=True)[2:]))  # csiread takes no other lines
    whole = csiread.ESP32(str(bare), if_report=False)
    whole.read()
    k = [*range(-26, 0), *range(1, 27)]
    np.testing.assert_array_equal(rows(file), np.abs(whole.csi[:, :64])[:, k])
    assert rows(file).shape == (5, 52)


def test_esp32_with_a_second_channel_has_its_centre_in_the_middle(tmp_path: Path) -> None:
    plain = rows(put(tmp_path / "a.csv", esp32(3)))
    numbers = [line.split("[")[1].split("]")[0].split() for line in esp32(3).splitlines()[2:]]
    shifted = np.array(numbers, int).reshape(3, 64, 2)
    text = esp32(3, secondary=1).splitlines()[2:]
    moved = [
        f"{line.split('[')[0]}[{' '.join(map(str, np.roll(values, 32, axis=0).ravel()))}]"  # and no last blank
        for line, values in zip(text, shifted, strict=True)
    ]
    np.testing.assert_array_equal(rows(put(tmp_path / "b.csv", "\n".join(moved))), plain)


def test_picoscenes_is_what_csiread_reads(tmp_path: Path) -> None:
    file = put(tmp_path / "a.csi", picoscenes(4))
    whole = csiread.Picoscenes(str(file), {"CSI": [30, 2, 1]}, if_report=False)
    whole.read()
    expected = np.concatenate([np.abs(whole.raw["CSI"]["CSI"][:, :, rx, 0]) for rx in range(2)], axis=1)
    np.testing.assert_array_equal(rows(file), expected)
    assert rows(file).shape == (4, 60) and np.ptp(expected) > 0


# --- windows ----------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(
    packets=st.integers(0, 40),
    window=st.integers(1, 12),
    step=st.integers(1, 15),
    every=st.integers(1, 4),
)
def test_windows_as_slices(packets: int, window: int, step: int, every: int) -> None:
    stream = np.arange(packets * 2, dtype=float).reshape(packets, 2)
    thin = stream[::every]
    expected = [thin[a : a + window] for a in range(0, len(thin) - window + 1, step)]
    found = list(csi.cut(iter(stream), window, step, every))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_windows_come_while_the_capture_is_read() -> None:
    """Nothing beyond the window is asked for, so the length of a capture does not matter."""
    drawn = []

    def endless():  # type: ignore[no-untyped-def]
        while True:
            drawn.append(len(drawn))
            yield np.full(3, float(len(drawn)))

    stream = csi.cut(endless(), 10, 10, 1)
    next(stream)
    assert len(drawn) == 10
    assert next(stream)[0, 0] == 11 and len(drawn) == 20


@pytest.mark.slow
def test_a_large_capture_takes_the_memory_of_a_window(tmp_path: Path) -> None:
    block = pcap(samples(50))[24:]
    file = tmp_path / "large.pcap"
    with file.open("wb") as stream:
        stream.write(PCAP)
        for _ in range(1100):
            stream.write(block)
    size = file.stat().st_size
    assert size > 60e6
    setting = source(window=100)
    packets = setting.packets(file)
    next(packets)  # csiread is imported, its buffers are there
    tracemalloc.start()
    try:
        windows = sum(1 for _ in csi.cut(packets, 100, 100, 1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert windows == (55_000 - 1) // 100
    assert peak < 1e6 < size / 50


def test_scale_takes_the_gain_away(tmp_path: Path) -> None:
    iq = samples(3)
    iq[2] = 0
    found = rows(put(tmp_path / "a.pcap", pcap(iq)), scale="packet")
    np.testing.assert_allclose(np.mean(found**2, axis=1), [1, 1, 0])
    loud = rows(put(tmp_path / "b.pcap", pcap(iq * 3)), scale="packet")
    np.testing.assert_allclose(loud, found)


# --- the data set -----------------------------------------------------------------------------------------------------
@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Two rooms, a capture for 0, 2 and 3 people, 25 packets each, in two sessions."""
    lines = ["file, room, people, session"]
    (tmp_path / "data").mkdir()
    for number, (room, people, session) in enumerate(
        [("office", 0, "1"), ("office", 3, "2"), ("bus", 2, "1"), ("bus", 0, "2")]
    ):
        put(tmp_path / "data" / f"{number}.pcap", pcap(samples(25, 64, seed=number)))
        lines.append(f"data/{number}.pcap, {room}, {people}, {session}")
    return put(tmp_path / "captures.csv", "\ufeff" + "\n".join(lines) + "\n")


def test_a_data_set_of_captures(captures: Path) -> None:
    data = load("csi", manifest=str(captures), window="10", standardise=False)
    assert data.x_train.shape == (8, 1, 10, 56) and data.x_train.dtype == torch.float32
    assert data.y_train.tolist() == [0, 0, 3, 3, 2, 2, 0, 0] and data.num_classes == 4
    assert data.class_values == (0, 1, 2, 3) and data.class_names == ("0", "1", "2", "3")
    assert data.group_names == ("bus", "office") and data.group_train is not None
    assert data.group_train.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert data.x_test is None and data.name == "captures.csv"
    expected = np.linalg.norm(samples(25, 64, seed=1).astype(float), axis=2)[10:20][:, csi.used(64, 1, 28)]
    np.testing.assert_allclose(data.x_train[3, 0], expected, rtol=1e-6)
    assert float(load("csi", manifest=str(captures), window=10).x_train.mean()) == pytest.approx(0, abs=1e-5)


def test_overlap_and_thinning(captures: Path) -> None:
    assert len(load("csi", manifest=str(captures), window=10, step=5).y_train) == 4 * 4
    assert load("csi", manifest=str(captures), window=10, every=2).x_train.shape == (4, 1, 10, 56)


@pytest.mark.parametrize("session", [2, "2"])
def test_one_session_as_the_test_part(captures: Path, session: str | int) -> None:
    data = load("csi", manifest=str(captures), window=10, test_session=session)
    assert data.y_train.tolist() == [0, 0, 2, 2] and data.y_test is not None and data.y_test.tolist() == [3, 3, 0, 0]
    assert data.group_test is not None and data.group_test.tolist() == [1, 1, 0, 0] and data.num_classes == 4


def test_a_session_that_is_not_there(captures: Path) -> None:
    text = refusal(lambda: load("csi", manifest=str(captures), window=10, test_session=5))
    assert "captures.csv" in text and "test_session=5" in text and "found 1, 2" in text
    put(captures, "file,room,people\ndata/0.pcap,office,0\n")
    assert "no column session" in refusal(lambda: load("csi", manifest=str(captures), test_session=5))


def test_all_captures_in_the_test_session(captures: Path) -> None:
    put(captures, "file,room,people,session\ndata/0.pcap,office,0,1\n")
    assert "training part" in refusal(lambda: load("csi", manifest=str(captures), window=10, test_session=1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("file,people\na.pcap,1\n", "no column room; found file, people"),
        ("", "no column file, room, people; found nothing"),
        ("file,room,people\n", "names no capture"),
        ("file,room,people\ndata/0.pcap,office,-1\n", "line 2: people='-1': expected a whole number, 0 or more"),
        ("file,room,people\ndata/0.pcap,office,2.5\n", "line 2: people='2.5'"),
        ("file,room,people\ndata/0.pcap,office\n", "line 2: people=''"),
        ("file,room,people\ndata/0.pcap,,1\n", "line 2: no room"),
        ("file,room,people\ndata/0.pcap,office,1,2\n", "line 2: more values than columns"),
        ("file,room,people\ndata/0.pcap,office,1\nnone.pcap,office,1\n", "line 3: no file "),
    ],
)
def test_a_manifest_that_is_not_right(captures: Path, text: str, expected: str) -> None:
    put(captures, text)
    said = refusal(lambda: load("csi", manifest=str(captures), window=10))
    assert expected in said and "captures.csv" in said


def test_no_manifest(tmp_path: Path) -> None:
    said = refusal(lambda: load("csi", manifest=str(tmp_path / "none.csv")))
    assert "none.csv: no such manifest" in said and "file, room, people" in said
    put(tmp_path / "binary.csv", b"\xff\xfe\x00\x80")
    assert "binary.csv: not a readable CSV" in refusal(lambda: load("csi", manifest=str(tmp_path / "binary.csv")))
    assert "manifest is missing" in refusal(lambda: load("csi"))


def test_captures_that_do_not_fit_together(captures: Path) -> None:
    put(captures.parent / "data" / "2.pcap", pcap(samples(25, 128)))
    said = refusal(lambda: load("csi", manifest=str(captures), window=10))
    assert "2.pcap: 114 subcarriers" in said and "0.pcap has 56" in said


@pytest.mark.parametrize("setting", ["window", "step", "every"])
def test_settings_that_are_not_right(setting: str) -> None:
    assert f"{setting} must be at least 1, got 0" in refusal(lambda: load("csi", manifest="x", **{setting: 0}))


def test_without_csiread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "csiread", None)
    file = put(tmp_path / "a.pcap", pcap(samples(2)))
    assert "pip install 'protofed[csi]'" in refusal(lambda: rows(file))


# --- damage -----------------------------------------------------------------------------------------------------------
PACKET = 16 + 42 + 18 + 4 * 64  # bytes of one packet of 20 MHz in a capture
DAT = 2 + 1 + 20 + 60 * 3 + 12
CSV_START = len("".join(esp32(0)).encode())


def cut_pcap() -> tuple[bytes, int]:
    return pcap(samples(5, 64))[:-1], 24 + 4 * PACKET


def cut_header() -> tuple[bytes, int]:
    return pcap(samples(5, 64))[: 24 + 4 * PACKET + 9], 24 + 4 * PACKET


def garbage_in_pcap() -> tuple[bytes, int]:
    sound = pcap(samples(6, 64))
    at = 24 + 4 * PACKET
    return sound[:at] + b"\xa5" * 500 + sound[at + 500 :], at


def short_packet() -> tuple[bytes, int]:
    """A packet captured in part: the tool's limit was too low."""
    return pcap(samples(4, 64)) + record(nexmon(samples(1, 64)[0])[:100]), 24 + 4 * PACKET


def bad_mark() -> tuple[bytes, int]:
    return pcap(samples(4, 64)) + record(nexmon(samples(1, 64)[0], mark=b"\x22\x11\x11\x11")), 24 + 4 * PACKET


def changed_mark() -> tuple[bytes, int]:
    first = pcap(samples(4, 64), mark=b"\x11" * 4)
    return first + record(nexmon(samples(1, 64)[0])), 24 + 4 * PACKET


def cut_dat() -> tuple[bytes, int]:
    return intel(5)[:-10], 4 * DAT


def cut_dat_header() -> tuple[bytes, int]:
    return intel(4) + b"\x00", 4 * DAT


def garbage_in_dat() -> tuple[bytes, int]:
    return intel(4) + b"\xff" * 300 + intel(1), 4 * DAT


def antennas_in_dat() -> tuple[bytes, int]:
    return intel(4) + intel(1, perm=0b111111), 4 * DAT


def sizes_in_dat() -> tuple[bytes, int]:
    broken = bytearray(intel(1))
    broken[3 + 8] = 2
    return intel(4) + bytes(broken) + intel(1), 4 * DAT


def cut_csv() -> tuple[bytes, int]:
    whole = esp32(5).encode()
    return whole[:-40], whole.rindex(b"CSI_DATA")


def text_in_csv() -> tuple[bytes, int]:
    head, tail = esp32(4).encode(), esp32(1).encode()
    return head + tail[tail.index(b"CSI_DATA") :].replace(b"[", b"[x", 1), len(head)


def cut_csi() -> tuple[bytes, int]:
    one = len(picoscenes(1))
    return picoscenes(5)[:-1], 4 * one


def garbage_in_csi() -> tuple[bytes, int]:
    return picoscenes(4) + b"\x77" * 400, 4 * len(picoscenes(1))


def segments_in_csi() -> tuple[bytes, int]:
    broken = bytearray(picoscenes(1))
    broken[11:15] = b"\xff\xff\x00\x00"
    return picoscenes(4) + bytes(broken), 4 * len(picoscenes(1))


DAMAGE = [
    ("pcap", cut_pcap),
    ("pcap", cut_header),
    ("pcap", garbage_in_pcap),
    ("pcap", short_packet),
    ("pcap", bad_mark),
    ("pcap", changed_mark),
    ("dat", cut_dat),
    ("dat", cut_dat_header),
    ("dat", garbage_in_dat),
    ("dat", antennas_in_dat),
    ("dat", sizes_in_dat),
    ("csv", cut_csv),
    ("csv", text_in_csv),
    ("csi", cut_csi),
    ("csi", garbage_in_csi),
    ("csi", segments_in_csi),
]


@pytest.mark.parametrize(("ending", "make"), DAMAGE, ids=[make.__name__ for _, make in DAMAGE])
def test_damage_is_named_by_its_byte_and_the_rest_kept_on_request(
    tmp_path: Path, ending: str, make: Callable[[], tuple[bytes, int]], caplog: pytest.LogCaptureFixture
) -> None:
    content, offset = make()
    put(tmp_path / f"a.{ending}", content)
    manifest = put(tmp_path / "m.csv", f"file,room,people\na.{ending},hall,1\n")
    said = refusal(lambda: load("csi", manifest=str(manifest), window=2))
    assert f"a.{ending}: damaged at byte {offset:,}: " in said and "damaged=keep" in said
    with caplog.at_level(logging.WARNING, "protofed"):
        data = load("csi", manifest=str(manifest), window=2, damaged="keep")
    assert len(data.y_train) == 2
    assert (
        f"damaged at byte {offset:,}" in caplog.text
        and f"a.{ending}" in caplog.text
        and "kept 2 windows" in caplog.text
    )


@pytest.mark.parametrize("damaged", ["error", "keep"])
@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("pcap", "not a pcap file: it begins '504b0304'"),
        ("dat", "not a capture of the Intel 5300: it begins '504b03'"),
        ("csv", "no packet with channel state information in it"),
        ("csi", "not a PicoScenes capture csiread can read: it begins '504b0304"),
    ],
)
def test_files_that_are_no_captures(tmp_path: Path, ending: str, expected: str, damaged: str) -> None:
    setting = source(damaged=damaged)
    empty = put(tmp_path / f"empty.{ending}", b"")
    assert refusal(lambda: setting.windows(empty)).endswith(f"empty.{ending}: empty")
    foreign = put(tmp_path / f"a.{ending}", b"PK\x03\x04 something else altogether, longer than any header\n" * 4)
    assert f"a.{ending}: {expected}" in refusal(lambda: setting.windows(foreign))


def test_a_pcap_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    put(file, b"\x0a\x0d\x0d\x0a" + bytes(40))
    assert "pcapng" in refusal(lambda: rows(file))
    put(file, PCAP[:20] + struct.pack("<I", 127))
    assert "link type 127" in refusal(lambda: rows(file))
    put(file, PCAP + record(b"\x01" * 60) * 3)
    assert "no packet with channel state information in it" in refusal(lambda: rows(file))
    put(file, PCAP[:10])
    assert "not a pcap file" in refusal(lambda: rows(file))


def test_an_unknown_ending(tmp_path: Path) -> None:
    said = refusal(lambda: rows(put(tmp_path / "a.mat", b"x")))
    assert "a.mat" in said and ".pcap, .dat, .csv, .csi" in said


def test_picoscenes_frames_csiread_does_not_know(tmp_path: Path) -> None:
    frame = bytearray(picoscenes(1))
    at = frame.index(b"\x03CSI") + 4
    frame[at : at + 2] = b"\x63\x00"  # version 99 of the segment
    said = refusal(lambda: rows(put(tmp_path / "a.csi", bytes(frame))))
    assert "a.csi" in said and "does not know this version" in said


def test_picoscenes_frames_without_antennas(tmp_path: Path) -> None:
    frames = bytearray(picoscenes(3, receive=2))
    at = frames.rindex(b"\x03CSI") + 6  # after 27 bytes of its numbers: antennas that send, that receive
    assert frames[at + 28] == 2
    frames[at + 28] = 0
    said = refusal(lambda: rows(put(tmp_path / "a.csi", bytes(frames))))
    assert "a.csi: csiread could not read a frame (" in said


def test_antennas_that_change(tmp_path: Path) -> None:
    said = refusal(lambda: rows(put(tmp_path / "a.dat", intel(2) + intel(1, receive=2, perm=0b0100))))
    assert "3 receive antennas" in said and f"at byte {2 * DAT:,}, 2" in said
    said = refusal(lambda: rows(put(tmp_path / "a.csi", picoscenes(2) + picoscenes(1, receive=1))))
    assert "frame 2 has other" in said


def test_a_capture_shorter_than_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "a.pcap", pcap(samples(9, 64)))
    put(tmp_path / "b.pcap", pcap(samples(10, 64)))
    manifest = put(tmp_path / "m.csv", "file,room,people\na.pcap,hall,1\nb.pcap,hall,0\n")
    said = refusal(lambda: load("csi", manifest=str(manifest), window=10))
    assert "a.pcap: fewer packets than one window takes (10 × every=1)" in said
    with caplog.at_level(logging.WARNING, "protofed"):
        data = load("csi", manifest=str(manifest), window=10, damaged="keep")
    assert data.y_train.tolist() == [0] and "a.pcap" in caplog.text
    put(manifest, "file,room,people\na.pcap,hall,1\n")
    said = refusal(lambda: load("csi", manifest=str(manifest), window=10, damaged="keep"))
    assert "m.csv: no window of 10 packets for the training part" in said


@settings(deadline=None)
@given(st.data())
def test_no_bytes_are_a_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A sound capture with some bytes changed is read, or refused in one line; nothing else happens."""
    ending, sound = data.draw(
        st.sampled_from(
            [("pcap", pcap(samples(3, 64))), ("dat", intel(3)), ("csv", esp32(3).encode()), ("csi", picoscenes(3))]
        )
    )
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = put(tmp_path_factory.mktemp("changed") / f"a.{ending}", bytes(content))
    try:
        found = source(window=1, damaged="keep").windows(file)
    except ProtofedError as error:
        assert f"a.{ending}" in str(error) and "\n" not in str(error)
    else:
        assert all(np.isfinite(window).all() for window in found)
