"""Captures written here in the genuine byte layouts, read back and compared with csiread's own reading of whole files."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.data import csi
from protofed.data.csi.packets import Clock, bits_of
from protofed.data.csi.pilots import data_tones
from protofed.errors import ProtofedError
from support.captures import (
    CHIPS,
    PCAP,
    SENDER,
    atheros,
    esp32,
    feitcsi,
    intel,
    intel_ax,
    nexmon,
    pcap,
    picoscenes,
    put,
    record,
    samples,
    usrp,
)
from support.errors import refusal

csiread = pytest.importorskip("csiread")


def read(file: Path, **wanted: object) -> csi.Recording:
    return csi.read_capture(file, csi.Wanted(**wanted))  # type: ignore[arg-type]


def rows(file: Path, **wanted: object) -> np.ndarray:
    """Amplitudes `[packets, antennas, subcarriers]`."""
    return np.abs(read(file, **wanted).csi)


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


@pytest.mark.parametrize(
    ("efficient", "count", "pilots"),
    [
        (False, 52, [5, 19, 32, 46]),
        (False, 56, [7, 21, 34, 48]),
        (False, 114, [5, 33, 47, 66, 80, 108]),
        (False, 242, [19, 47, 83, 111, 130, 158, 194, 222]),
        (True, 242, [6, 32, 74, 100, 141, 167, 209, 235]),
    ],
)
def test_pilots_are_where_the_standard_has_them(efficient: bool, count: int, pilots: list[int]) -> None:
    found = data_tones(efficient, count)
    assert found is not None
    places, tones = found
    assert sorted(set(range(count)) - set(places.tolist())) == pilots
    assert len(tones) == len(places) and (np.diff(tones) > 0).all()


@pytest.mark.parametrize(("efficient", "count"), [(False, 484), (True, 484), (True, 996), (True, 1992)])
def test_wide_packets_have_all_their_tones(efficient: bool, count: int) -> None:
    found = data_tones(efficient, count)
    assert found is not None and count - len(found[0]) == (32 if count == 1992 else 16)
    assert data_tones(efficient, count + 1) is None


# --- Nexmon -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tones", "bandwidth"), [(64, 20), (128, 40), (256, 80)])
@pytest.mark.parametrize("mark", [b"\x11\x11\x11\x11", b"\x11\x11\xd5\x80"])
def test_nexmon_is_what_csiread_reads(tmp_path: Path, tones: int, bandwidth: int, mark: bytes) -> None:
    iq = samples(7, tones)
    file = put(tmp_path / "a.pcap", pcap(iq, mark=mark))
    whole = csiread.Nexmon(str(file), chip="43455c0", bw=bandwidth, if_report=False)
    whole.read()
    found = read(file)
    shifted = np.fft.fftshift(whole.csi, axes=1)
    k = np.arange(-tones // 2, tones // 2)
    _, low, high = csi.TONES[tones]
    kept = (abs(k) >= low) & (abs(k) <= high)
    np.testing.assert_array_equal(found.csi[:, 0], shifted[:, kept])
    assert found.tones.tolist() == k[kept].tolist() and set(found.sender) == {"02:00:5e:00:00:01"}
    np.testing.assert_allclose(np.diff(found.time), 0.01, atol=1e-6)
    assert np.isnan(found.rssi).all() if mark == b"\x11" * 4 else (found.rssi == -43).all()


@pytest.mark.parametrize("chip", ["4358", "4366c0"])
@pytest.mark.parametrize(("mark", "kind"), [(b"\x11" * 4, "Nexmon"), (b"\x11\x11\xd5\x80", "NexmonPull46")])
def test_chips_that_pack_floats_are_read_from_the_packet(tmp_path: Path, chip: str, mark: bytes, kind: str) -> None:
    words = np.random.default_rng(1).integers(0, 2**32, (5, 256), dtype=np.uint64).astype("<u4")
    file = put(tmp_path / "a.pcap", pcap(words, mark=mark, chip=CHIPS[chip]))
    whole = getattr(csiread, kind)(str(file), chip=chip, bw=80, if_report=False)
    whole.read()
    expected = np.abs(whole.csi)[:, None, csi.used(256, 2, 122)]
    np.testing.assert_array_equal(rows(file), expected)
    assert not np.array_equal(rows(file, chip="43455c0"), expected)  # the setting overrules the packet


def test_a_chip_nobody_knows(tmp_path: Path) -> None:
    file = put(tmp_path / "a.pcap", pcap(samples(3, 64), chip=0x7777))
    text = refusal(lambda: rows(file))
    assert "no packet" in text and "3 of an unknown chip (7777); chip= names it" in text
    assert rows(file, chip="43455c0").shape == (3, 1, 56)


def test_bodies_are_cut_by_the_length_that_udp_gives(tmp_path: Path) -> None:
    """Frames of some captures have four bytes more than their UDP packet, a check sequence."""
    iq = samples(3, 64)
    parts = [nexmon(packet) + b"\xaa\xbb\xcc\xdd" for packet in iq]
    file = put(tmp_path / "a.pcap", PCAP + b"".join(map(record, parts)))
    np.testing.assert_array_equal(rows(file), rows(put(tmp_path / "b.pcap", pcap(iq))))


def test_cores_are_antennas_and_other_traffic_is_counted(tmp_path: Path) -> None:
    iq = samples(5)
    arp = b"\xff" * 6 + b"\x02\x00\x00\x00\x00\x01" + b"\x08\x06" + bytes(28)
    parts = [arp, nexmon(iq[0], core=1), nexmon(iq[1]), b"\x01" * 20, nexmon(iq[2]), nexmon(iq[3], core=1)]
    lone = nexmon(iq[4], sequence=8)
    file = put(tmp_path / "a.pcap", PCAP + b"".join(map(record, [*parts, lone])))
    found = read(file)
    expected = np.linalg.norm(iq[[1, 0, 2, 3]].astype(float), axis=2)[:, csi.used(256, 2, 122)].reshape(2, 2, -1)
    np.testing.assert_allclose(np.abs(found.csi), expected)
    assert found.tally.left_out == {
        "of other traffic": 2,
        "of 1 × 242 antennas and subcarriers, not 2 × 242": 1,
    }


def test_byte_orders_and_nanoseconds(tmp_path: Path) -> None:
    iq = samples(2)
    plain = rows(put(tmp_path / "a.pcap", pcap(iq)))
    for order, magic, fraction in (("<", 0xA1B23C4D, 999_999_999), (">", 0xA1B2C3D4, 5), (">", 0xA1B23C4D, 10**6)):
        head = struct.pack(f"{order}IHHiIII", magic, 2, 4, 0, 0, 65535, 1)
        body = b"".join(record(nexmon(packet), order, fraction) for packet in iq)
        np.testing.assert_array_equal(rows(put(tmp_path / "b.pcap", head + body)), plain)


def test_the_most_common_shape_or_the_first(tmp_path: Path) -> None:
    wide, narrow = samples(2), samples(3, 64)
    file = put(tmp_path / "a.pcap", pcap(wide) + pcap(narrow)[24:])
    found = read(file)
    assert found.csi.shape == (3, 1, 56)
    assert found.tally.text() == "3 packets, 2 left out: 2 of 1 × 242 antennas and subcarriers, not 1 × 56"
    assert rows(file, shapes="first").shape == (2, 1, 242)
    assert rows(file, bandwidth=80).shape == (2, 1, 242)
    text = refusal(lambda: rows(file, bandwidth=40))
    assert "for bandwidth=40" in text and "5 of another bandwidth" in text


def test_the_sender_is_chosen(tmp_path: Path) -> None:
    iq = samples(4, 64)
    other = b"\x02\x00\x5e\x00\x00\x02"
    parts = [nexmon(packet, sender=other if i % 2 else SENDER) for i, packet in enumerate(iq)]
    file = put(tmp_path / "a.pcap", PCAP + b"".join(map(record, parts)))
    found = read(file, sender="02-00-5E-00-00-02")
    assert set(found.sender) == {"02:00:5e:00:00:02"} and found.tally.left_out == {"of another sender": 2}
    text = refusal(lambda: rows(file, sender="ff:ff:ff:ff:ff:ff"))
    assert "for sender=ff:ff:ff:ff:ff:ff" in text and "4 of another sender" in text
    text = refusal(lambda: rows(put(tmp_path / "a.dat", intel(3)), sender="02:00:5e:00:00:02"))
    assert "3 without a sender's address" in text


# --- the other formats ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("receive", "send", "perm"), [(3, 1, 0b100100), (3, 2, 0b011000), (2, 3, 0b0110), (1, 1, 2)])
def test_intel_is_what_csiread_reads(tmp_path: Path, receive: int, send: int, perm: int) -> None:
    other = struct.pack(">HB", 31, 0xC1) + bytes(30)
    file = put(tmp_path / "a.dat", intel(4, receive, send, perm) + other + intel(1, receive, send, perm, seed=1))
    whole = csiread.Intel(str(file), nrxnum=3, ntxnum=3, if_report=False)
    whole.read()
    places = sorted(perm >> 2 * antenna & 3 for antenna in range(receive))
    expected = whole.csi[:, :, places, :send].transpose(0, 2, 3, 1).reshape(5, receive * send, 30)
    found = read(file)
    np.testing.assert_array_equal(found.csi, expected)
    np.testing.assert_allclose(found.rssi, whole.get_total_rss())


@pytest.mark.parametrize("tones", [56, 114])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("marked", [False, True])
def test_atheros_is_what_csiread_reads(tmp_path: Path, tones: int, order: str, marked: bool) -> None:
    mark = (b"\x00" if order == "<" else b"\xff") if marked else b""
    file = put(tmp_path / "a.dat", mark + atheros(4, tones, order=order))
    kind = csiread.AtherosPull10 if marked else csiread.Atheros
    whole = kind(str(file), nrxnum=3, ntxnum=2, tones=tones, if_report=False)
    whole.read() if marked else whole.read(endian="little" if order == "<" else "big")
    found = read(file)
    np.testing.assert_array_equal(found.csi, whole.csi.transpose(0, 2, 3, 1).reshape(4, 6, tones))
    assert set(found.sender) == {"02:00:5e:00:00:01"} and (found.rssi == -43).all()
    np.testing.assert_allclose(np.diff(found.time), 0.01)


@pytest.mark.parametrize("values", [128, 384])
def test_esp32_is_what_csiread_reads(tmp_path: Path, values: int) -> None:
    text = esp32(5, values)
    file = put(tmp_path / "a.csv", text)
    bare = put(tmp_path / "bare.csv", "".join(text.splitlines(keepends=True)[2:]))  # csiread takes no other lines
    whole = csiread.ESP32(str(bare), if_report=False)
    whole.read()
    k = [*range(-26, 0), *range(2, 27)]  # the first word, which holds 0 and +1, is not valid
    found = read(file)
    np.testing.assert_array_equal(found.csi[:, 0], whole.csi[:, :64][:, k])
    assert found.tones.tolist() == k and (found.rssi == -32).all() and set(found.sender) == {"3c:61:05:4c:36:cd"}


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


def test_esp32_lines_that_say_more_values_than_they_have_and_garbled_ones(tmp_path: Path) -> None:
    lines = esp32(6).splitlines(keepends=True)
    plain = rows(put(tmp_path / "a.csv", "".join(lines)))
    lines[3] = lines[3].replace(",128,[", ",384,[")  # the tool's own field
    lines[4] = lines[4][:90] + lines[5]  # two lines in one: the second is whole
    lines[5] = lines[5].replace(" ]", " 3x ]")
    lines[6] = lines[6].replace("CSI_DATA,AP", "CSI_DATA,AP,\ufffd")
    found = read(put(tmp_path / "b.csv", "".join(lines)))
    np.testing.assert_array_equal(np.abs(found.csi), plain[[0, 1, 3, 5]])
    assert found.tally.text() == "4 packets, 2 left out: 2 garbled or cut short"


def test_picoscenes_is_what_csiread_reads(tmp_path: Path) -> None:
    for content, shape in ((picoscenes(4), [30, 2, 1]), (usrp(3), [52, 1, 1])):
        file = put(tmp_path / "a.csi", content)
        whole = csiread.Picoscenes(str(file), {"CSI": shape}, if_report=False)
        whole.read()
        expected = whole.raw["CSI"]["CSI"].transpose(0, 2, 3, 1)
        found = read(file)
        np.testing.assert_array_equal(found.csi, expected.reshape(found.csi.shape))
        np.testing.assert_allclose(np.diff(found.time), 0.01, rtol=1e-4)


@pytest.mark.parametrize(("tones", "efficient", "kept"), [(56, False, 52), (52, False, 48), (242, True, 234)])
def test_picoscenes_of_an_ax200_without_its_pilots(tmp_path: Path, tones: int, efficient: bool, kept: int) -> None:
    """csiread 1.4.1 drops the wrong tones from the second pilot on, so the raw numbers are the measure."""
    found = read(put(tmp_path / "a.csi", intel_ax(3, tones, efficient=efficient)))
    rng = np.random.default_rng(0)
    raw = np.stack([rng.integers(-3000, 3000, (2, tones, 2)).astype(float) for _ in range(3)])
    places = data_tones(efficient, tones)
    assert places is not None and found.csi.shape == (3, 2, kept)
    np.testing.assert_array_equal(found.csi, (raw[..., 0] + 1j * raw[..., 1])[:, :, places[0]])
    np.testing.assert_allclose(np.diff(found.time), 0.01)
    assert (found.rssi == -40).all() and set(found.sender) == {"02:00:5e:00:00:01"}


@pytest.mark.parametrize("send", [1, 2])
def test_feitcsi_by_hand(tmp_path: Path, send: int) -> None:
    found = read(put(tmp_path / "a.csi", feitcsi(3, send=send)))
    rng = np.random.default_rng(0)
    for packet in range(3):
        raw = rng.integers(-3000, 3000, (2, send, 56, 2))
        for receive in range(2):
            for transmit in range(send):
                signal = raw[receive, transmit]
                expected = [complex(*signal[i]) for i in range(56) if i not in (7, 21, 34, 48)]
                assert found.csi[packet, receive * send + transmit].tolist() == expected
    assert found.rssi[0] == pytest.approx(10 * np.log10(10**-4.1 + 10**-3.9))
    np.testing.assert_allclose(np.diff(found.time), 0.01)


def test_a_counter_that_begins_again() -> None:
    clock = Clock(32, 1e-6)
    assert clock(2**32 - 1) < clock(4) == pytest.approx((2**32 + 4) * 1e-6)
    assert clock(3) < clock(4)  # a step back is no new turn


@given(st.lists(st.integers(-512, 511), min_size=1, max_size=20))
def test_packed_numbers(numbers: list[int]) -> None:
    bits = "".join(format(number & 1023, "010b")[::-1] for number in numbers)
    content = int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    assert bits_of(content, 10)[: len(numbers)].tolist() == numbers


# --- reading ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_large_capture_takes_the_memory_of_a_window(tmp_path: Path) -> None:
    block = pcap(samples(50))[24:]
    file = tmp_path / "large.pcap"
    with file.open("wb") as stream:
        stream.write(PCAP)
        for _ in range(220):
            stream.write(block)
    size = file.stat().st_size
    assert size > 11e6
    source = csi.CSI(manifest="unused.csv", window=50)
    windows = source.cut(csi.Capture(file, "", "", {}), csi.Account("large"))
    next(windows)
    tracemalloc.start()
    try:
        count = sum(1 for _ in windows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 219 and peak < 1e6 < size / 10  # time goes back at each block, which ends a window


def test_without_csiread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "csiread", None)
    assert rows(put(tmp_path / "a.pcap", pcap(samples(2)))).shape == (2, 1, 242)
    packed = put(tmp_path / "b.pcap", pcap(samples(2), chip=CHIPS["4358"]))
    text = refusal(lambda: rows(packed))
    assert "pip install 'protofed[csi]'" in text and "4358" in text


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("pcap", "not a pcap file: it begins '504b0304"),
        ("dat", "not a capture of the Intel 5300 nor a capture of the Atheros CSI Tool nor a capture of FeitCSI"),
        ("csv", "no packet with channel state information in it"),
        ("csi", "not a PicoScenes capture nor a capture of FeitCSI: it begins '504b0304"),
    ],
)
def test_files_that_are_no_captures(tmp_path: Path, ending: str, expected: str) -> None:
    empty = put(tmp_path / f"empty.{ending}", b"")
    assert refusal(lambda: rows(empty)).endswith(f"empty.{ending}: empty")
    foreign = put(tmp_path / f"a.{ending}", b"PK\x03\x04 something else altogether, longer than any header\n" * 4)
    assert f"a.{ending}: {expected}" in refusal(lambda: rows(foreign))


def test_a_pcap_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "a.pcap"
    put(file, b"\x0a\x0d\x0d\x0a" + bytes(40))
    assert "a.pcap: a pcapng file" in refusal(lambda: rows(file))
    put(file, PCAP[:20] + struct.pack("<I", 127))
    assert "a.pcap: link type 127" in refusal(lambda: rows(file))
    put(file, PCAP + record(b"\x01" * 60) * 3)
    assert "no packet with channel state information in it (0 packets, 3 left out" in refusal(lambda: rows(file))
    put(file, PCAP[:10])
    assert "not a pcap file" in refusal(lambda: rows(file))


def test_an_unknown_ending_and_no_file(tmp_path: Path) -> None:
    said = refusal(lambda: rows(put(tmp_path / "a.mat", b"x")))
    assert "a.mat" in said and ".pcap, .dat, .csv, .csi" in said
    assert "none.pcap: unreadable" in refusal(lambda: rows(tmp_path / "none.pcap"))


def test_picoscenes_frames_of_unknown_versions_and_hardware(tmp_path: Path) -> None:
    for at, change, reason in (
        (4, b"\x63\x00", "1 of an unknown version (99)"),
        (6, b"\x63\x00", "1 of unknown hardware"),
    ):
        frame = bytearray(picoscenes(1))
        start = frame.index(b"\x03CSI") + at
        frame[start : start + 2] = change
        said = refusal(lambda: rows(put(tmp_path / "a.csi", bytes(frame))))  # noqa: B023
        assert "a.csi: no packet" in said and reason in said


# --- damage -----------------------------------------------------------------------------------------------------------
def cut_pcap() -> tuple[bytes, int]:
    whole = pcap(samples(5, 64))
    return whole[:-1], 24 + (len(whole) - 24) // 5 * 4


def cut_header() -> tuple[bytes, int]:
    content, at = cut_pcap()
    return content[: at + 9], at


def garbage_in_pcap() -> tuple[bytes, int]:
    _, at = cut_pcap()
    sound = pcap(samples(6, 64))
    return sound[:at] + b"\xa5" * 500 + sound[at + 500 :], at


def cut_dat() -> tuple[bytes, int]:
    return intel(5)[:-10], len(intel(4))


def cut_dat_header() -> tuple[bytes, int]:
    return intel(4) + b"\x00", len(intel(4))


def garbage_in_dat() -> tuple[bytes, int]:
    return intel(4) + b"\xff" * 300 + intel(1), len(intel(4))


def cut_atheros() -> tuple[bytes, int]:
    return atheros(5)[:-10], len(atheros(4))


def garbage_in_atheros() -> tuple[bytes, int]:
    return atheros(4) + b"\x20\x00" * 300, len(atheros(4))


def cut_csi() -> tuple[bytes, int]:
    return picoscenes(5)[:-1], len(picoscenes(4))


def garbage_in_csi() -> tuple[bytes, int]:
    return picoscenes(4) + b"\x77" * 400, len(picoscenes(4))


def segments_in_csi() -> tuple[bytes, int]:
    broken = bytearray(picoscenes(1))
    broken[11:15] = b"\xff\xff\x00\x00"
    return picoscenes(4) + bytes(broken), len(picoscenes(4))


def cut_feitcsi() -> tuple[bytes, int]:
    return feitcsi(5)[:-1], len(feitcsi(4))


def garbage_in_feitcsi() -> tuple[bytes, int]:
    return feitcsi(4) + b"\x77" * 900, len(feitcsi(4))


DAMAGE = [
    ("pcap", cut_pcap),
    ("pcap", cut_header),
    ("pcap", garbage_in_pcap),
    ("dat", cut_dat),
    ("dat", cut_dat_header),
    ("dat", garbage_in_dat),
    ("dat", cut_atheros),
    ("dat", garbage_in_atheros),
    ("csi", cut_csi),
    ("csi", garbage_in_csi),
    ("csi", segments_in_csi),
    ("csi", cut_feitcsi),
    ("csi", garbage_in_feitcsi),
]


@pytest.mark.parametrize(("ending", "make"), DAMAGE, ids=[make.__name__ for _, make in DAMAGE])
def test_damage_is_named_by_its_byte_and_the_rest_kept_on_request(
    tmp_path: Path, ending: str, make: Callable[[], tuple[bytes, int]]
) -> None:
    content, offset = make()
    file = put(tmp_path / f"a.{ending}", content)
    said = refusal(lambda: csi.CSI(manifest="", window=2).windows(file))
    assert f"a.{ending}: damaged at byte {offset:,}: " in said and "damaged=keep" in said
    account = csi.Account("a")
    assert len(csi.CSI(manifest="", window=2, damaged="keep").windows(file, account)) == 2
    assert f"damaged at byte {offset:,}" in account.text() and "kept 2 windows" in account.text()
    assert f"damaged at byte {offset:,}" in refusal(lambda: rows(file))


def short_packet() -> bytes:
    """A packet captured in part: the tool's limit was too low."""
    return pcap(samples(4, 64)) + record(nexmon(samples(1, 64)[0])[:100])


def bad_mark() -> bytes:
    return pcap(samples(4, 64)) + record(nexmon(samples(1, 64)[0], mark=b"\x22\x11\x11\x11"))


def antennas_in_dat() -> bytes:
    return intel(4) + intel(1, perm=0b111111)


def sizes_in_dat() -> bytes:
    broken = bytearray(intel(1))
    broken[3 + 8] = 2  # fewer antennas than its order names are whole; more values than they need are not read
    broken[3 + 9] = 3
    return intel(4) + bytes(broken)


def length_in_csi() -> bytes:
    broken = bytearray(picoscenes(1))
    at = broken.index(b"\x03CSI") + 6  # after 27 bytes of its numbers: antennas that send, that receive
    broken[at + 28] = 0
    return picoscenes(4) + bytes(broken)


@pytest.mark.parametrize(
    ("ending", "make"),
    [
        ("pcap", short_packet),
        ("pcap", bad_mark),
        ("dat", antennas_in_dat),
        ("dat", sizes_in_dat),
        ("csi", length_in_csi),
    ],
)
def test_a_garbled_packet_in_sound_frames_is_left_out(tmp_path: Path, ending: str, make: Callable[[], bytes]) -> None:
    found = read(put(tmp_path / f"a.{ending}", make()))
    assert found.tally.text() == "4 packets, 1 left out: 1 garbled or cut short"


SOUND: dict[str, tuple[str, bytes]] = {
    "nexmon": ("pcap", pcap(samples(4, 64))),
    "nexmon-packed": ("pcap", pcap(samples(4, 64), chip=CHIPS["4366c0"])),
    "intel": ("dat", intel(4)),
    "atheros": ("dat", atheros(3, receive=2, send=1)),
    "esp32": ("csv", esp32(4).encode()),
    "picoscenes": ("csi", picoscenes(4)),
    "picoscenes-ax": ("csi", intel_ax(4)),
    "picoscenes-usrp": ("csi", usrp(4)),
    "feitcsi": ("csi", feitcsi(4)),
}


def endures(file: Path, number: int) -> None:
    """A damaged capture is read, or refused in one line; nothing else happens."""
    strict, rate = number % 3 == 0, 200.0 if number % 2 else None
    source = csi.CSI(manifest="", window=2, damaged="error" if strict else "keep", rate=rate)
    try:
        found = source.windows(file)
    except ProtofedError as error:
        assert file.name in str(error) and "\n" not in str(error)
    else:
        assert all(np.isfinite(window).all() for window in found)


@pytest.mark.parametrize("kind", SOUND)
def test_a_thousand_damaged_copies(tmp_path: Path, kind: str) -> None:
    """Cut off, with changed bits, or spliced with another capture; `benchmarks/captures.py` does it to genuine ones."""
    ending, sound = SOUND[kind]
    rng = np.random.default_rng(sum(kind.encode()))
    others = [content for _, content in SOUND.values()]
    for number in range(112):
        content = bytearray(sound)
        how = number % 3
        if how == 0:
            content = content[: int(rng.integers(len(content)))]
        elif how == 1:
            for at in rng.integers(len(content), size=int(rng.integers(1, 30))):
                content[at] ^= 1 << int(rng.integers(8))
        else:
            other = others[int(rng.integers(len(others)))]
            content = content[: int(rng.integers(len(content)))] + other[int(rng.integers(len(other))) :]
        endures(put(tmp_path / f"a.{ending}", bytes(content)), number)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_no_bytes_are_a_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A sound capture with some bytes changed, most of them where the numbers of a packet stand."""
    ending, sound = data.draw(st.sampled_from(list(SOUND.values())))
    content = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    endures(put(tmp_path_factory.mktemp("changed") / f"a.{ending}", bytes(content)), data.draw(st.integers(0, 5)))
