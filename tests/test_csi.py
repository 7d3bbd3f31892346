"""Windows, the signal chain, labels and splits of captures, each against a computation of its own."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from protofed.cli.main import app
from protofed.data import Dataset, csi, federate, load
from protofed.data.augment import AugmentSettings, MaskedWindow, Window, augmentation
from protofed.data.csi import signal
from protofed.data.csi.labels import last_windows
from protofed.data.csi.packets import NAN, Packet
from protofed.data.csi.picture import draw_stages
from protofed.data.layout import arranged
from protofed.data.remarks import beside
from protofed.data.samples import read_samples
from protofed.errors import ProtofedError
from protofed.registry import parse_part
from support.captures import PCAP, atheros, intel, nexmon, pcap, put, record, samples
from support.errors import refusal

TONES = csi.used(64, 1, 28)


def source(**options: Any) -> csi.CSI:
    return csi.CSI(manifest="unused.csv", **options)


def amplitudes(packets: int, seed: int) -> np.ndarray:
    """What `pcap(samples(packets, 64, seed))` holds, `[packets, 56]`."""
    return np.linalg.norm(samples(packets, 64, seed).astype(float), axis=2)[:, TONES]


# --- windows ----------------------------------------------------------------------------------------------------------
@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    window=st.integers(1, 12),
    step=st.integers(1, 15),
    every=st.integers(1, 4),
)
def test_windows_are_slices_of_stretches(lengths: list[int], window: int, step: int, every: int) -> None:
    values = np.arange(sum(lengths) * 2, dtype=float).reshape(-1, 1, 2)
    stretch = np.repeat(np.arange(len(lengths)), lengths)
    stream = [csi.Sample(float(i), value, int(s)) for i, (value, s) in enumerate(zip(values, stretch, strict=True))]
    expected = []
    for number in range(len(lengths)):
        thin = values[stretch == number][::every]
        expected += [thin[a : a + window] for a in range(0, len(thin) - window + 1, step)]
    found = list(csi.cut(iter(stream), window, step, every))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.value.dtype == np.float32
        np.testing.assert_array_equal(one.value, other.transpose(1, 0, 2))


def test_windows_come_while_the_capture_is_read() -> None:
    """Nothing beyond the window is asked for, so the length of a capture does not matter."""
    drawn: list[int] = []

    def endless():  # type: ignore[no-untyped-def]
        while True:
            drawn.append(len(drawn))
            yield csi.Sample(len(drawn), np.full((1, 3), float(len(drawn))))

    stream = csi.cut(endless(), 10, 10)
    next(stream)
    assert len(drawn) == 10
    assert next(stream).value[0, 0, 0] == 11 and len(drawn) == 20


@given(st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=30), st.floats(0.01, 3))
def test_a_gap_or_a_step_back_ends_a_stretch(steps: list[float], gap: float) -> None:
    times = np.cumsum(steps)
    found = [s.stretch for s in csi.stretches([(float(t), np.zeros((1, 1))) for t in times], gap)]
    naive = [0]
    for a, b in pairwise(times):
        naive.append(naive[-1] + (not 0 <= b - a <= gap))
    assert found == naive


@settings(deadline=None)
@given(st.lists(st.floats(0.001, 0.5), min_size=1, max_size=20), st.floats(1, 50))
def test_resampling_is_linear_interpolation(steps: list[float], rate: float) -> None:
    times = np.cumsum(steps)
    values = np.sin(7 * times)
    stream = [csi.Sample(float(t), np.array([[v]])) for t, v in zip(times, values, strict=True)]
    found = list(csi.resampled(stream, rate))
    grid = [times[0] + k / rate for k in range(int((times[-1] - times[0]) * rate) + 2)]
    grid = grid[: len(found)]
    np.testing.assert_allclose([s.time for s in found], grid)
    np.testing.assert_allclose([s.value[0, 0] for s in found], np.interp(grid, times, values), atol=1e-9)
    assert found[-1].time <= times[-1] < found[-1].time + 1 / rate + 1e-9


def test_no_window_bridges_a_gap(tmp_path: Path) -> None:
    """25 packets, 8 s of silence, 25 packets: windows of ten are four, and none holds both sides."""
    parts = [nexmon(packet) for packet in samples(50, 64)]
    times = [(number // 25 * 8 * 100 + number) * 10_000 for number in range(50)]  # µs
    body = b"".join(
        record(part, number=time % 10**6, seconds=10 + time // 10**6) for part, time in zip(parts, times, strict=True)
    )
    file = put(tmp_path / "a.pcap", PCAP + body)
    account = csi.Account("a")
    found = source(window=10).windows(file, account)
    expected = amplitudes(50, 0)
    assert len(found) == 4 and account.gaps == 1
    np.testing.assert_allclose(np.stack(found)[:, 0].reshape(-1, 56), np.concatenate([expected[:20], expected[25:45]]))
    assert len(source(window=10, gap=10.0).windows(file)) == 5
    assert len(source(window=10, rate=50.0).windows(file)) == 2  # 12 samples and a bit on each side


def test_antennas_are_channels(tmp_path: Path) -> None:
    file = put(tmp_path / "a.dat", intel(6, receive=3, send=2))
    [window] = source(window=6).windows(file)
    assert window.shape == (6, 6, 30)
    recording = csi.read_capture(file)
    np.testing.assert_allclose(window, np.abs(recording.csi).transpose(1, 0, 2), rtol=1e-6)


# --- the signal chain -------------------------------------------------------------------------------------------------
def channel(antennas: int = 3, tones: int = 30, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(antennas, tones)) + 1j * rng.normal(size=(antennas, tones))


def packet(csi_values: np.ndarray, **more: float) -> Packet:
    return Packet(0.0, len(csi_values), np.arange(csi_values.shape[1]), lambda: csi_values, **more)


def test_scale_takes_the_gain_away(tmp_path: Path) -> None:
    iq = samples(3, 64)
    iq[2] = 0
    [window] = source(window=3, scale="packet").windows(put(tmp_path / "a.pcap", pcap(iq)))
    np.testing.assert_allclose(np.mean(window[0] ** 2, axis=1), [1, 1, 0], rtol=1e-5)
    [loud] = source(window=3, scale="packet").windows(put(tmp_path / "b.pcap", pcap(iq * 3)))
    np.testing.assert_allclose(loud, window, rtol=1e-5)


def test_scaling_by_received_power() -> None:
    h = channel()
    found = signal.scaled(h, packet(h, rssi=-40.0), "rssi")
    assert np.mean(np.abs(found) ** 2) == pytest.approx(1e-4)
    np.testing.assert_allclose(found / h, (found / h)[0, 0])
    said = refusal(lambda: signal.scaled(h, packet(h, rssi=NAN), "rssi"))
    assert "scale=rssi needs the received power" in said
    assert "scale=snr needs the noise" in refusal(lambda: signal.scaled(h, packet(h, rssi=-40.0), "snr"))


@pytest.mark.parametrize("send", [1, 2, 3])
def test_scaling_by_rssi_agc_and_noise_is_that_of_the_intel_tool(tmp_path: Path, send: int) -> None:
    csiread = pytest.importorskip("csiread")
    file = put(tmp_path / "a.dat", intel(4, receive=3, send=send))
    whole = csiread.Intel(str(file), nrxnum=3, ntxnum=send, if_report=False)
    whole.read()
    # It multiplies by the power of several transmit antennas, a constant of the capture.
    expected = whole.get_scaled_csi() / {1: 1, 2: np.sqrt(2), 3: np.sqrt(10**0.45)}[send]
    found = [signal.scaled(p.decode(), p, "snr") for p in csi.packets(file)]
    np.testing.assert_allclose(np.stack(found), expected.transpose(0, 2, 3, 1).reshape(4, 3 * send, 30), rtol=1e-9)


def test_the_sanitised_phase_has_no_line() -> None:
    tones = np.array([*range(-28, 0), *range(1, 29)])
    room = 0.3 * np.sin(tones / 9.0)
    offsets = np.array([[1.0], [-2.0]]) + np.array([[0.4], [0.11]]) * tones  # of the clocks, another in each packet
    found = parse_part(signal.Signal.registry, "phase").of(5 * np.exp(1j * (room + offsets)), tones)
    line = np.polyfit(tones, room, 1)
    np.testing.assert_allclose(found, np.stack([room - np.polyval(line, tones)] * 2), atol=1e-9)


def test_the_ratio_cancels_what_both_antennas_share() -> None:
    h = channel()
    tones = np.arange(30)
    common = np.exp(1j * np.linspace(0, 40, 30)) * 7
    for part, compute in (("amplitude", np.abs), ("phase", np.angle)):
        step = parse_part(signal.Signal.registry, f"ratio?reference=1&part={part}")
        np.testing.assert_allclose(step.of(h * common, tones), compute(h[[0, 2]] / h[1]), atol=1e-9)
    both = parse_part(signal.Signal.registry, "ratio").of(h * common, tones)
    assert both.shape == (4, 30)
    np.testing.assert_allclose(both[:2] + 1j * both[2:], h[1:] / h[0], atol=1e-9)
    h[0] = 0
    assert np.isfinite(parse_part(signal.Signal.registry, "ratio").of(h, tones)).all()
    assert "this capture has 1" in refusal(lambda: parse_part(signal.Signal.registry, "ratio").of(h[:1], tones))


def test_hampel_by_loops() -> None:
    rng = np.random.default_rng(0)
    window = rng.normal(size=(2, 40, 3))
    window[0, 17, 1] += 50
    found = signal.Hampel(width=3, threshold=2.5).on(window, 100.0)
    expected = window.copy()
    for antenna in range(2):
        for tone in range(3):
            line = window[antenna, :, tone]
            padded = np.concatenate([line[:3][::-1], line, line[-3:][::-1]])
            for t in range(40):
                around = padded[t : t + 7]
                middle = np.median(around)
                if abs(line[t] - middle) > 2.5 * 1.4826 * np.median(np.abs(around - middle)):
                    expected[antenna, t, tone] = middle
    np.testing.assert_allclose(found, expected)
    assert abs(found[0, 17, 1]) < 5


@pytest.mark.parametrize("size", [1, 3, 5, 7, 9, 11, 13])
def test_the_median_of_arrays(size: int) -> None:
    """What is right for all zeros and ones is right for all numbers (the 0-1 principle of networks of comparisons)."""
    ones = (np.arange(2**size)[None] >> np.arange(size)[:, None] & 1).astype(float)
    np.testing.assert_array_equal(signal.median_of(ones), ones.sum(0) > size // 2)
    numbers = np.random.default_rng(0).integers(0, 9, (4 * size + 1, 50)).astype(np.float32)
    np.testing.assert_array_equal(signal.median_of(numbers), np.median(numbers, axis=0))


def test_the_low_pass_keeps_slow_and_takes_fast() -> None:
    t = np.arange(400) / 200
    slow, fast = np.sin(2 * np.pi * 3 * t), np.sin(2 * np.pi * 60 * t)
    window = np.stack([slow + fast, slow], axis=1)[None]
    found = signal.LowPass(cutoff=15).on(window, 200.0)
    np.testing.assert_allclose(found[0, 50:-50, 0], slow[50:-50], atol=0.02)
    np.testing.assert_allclose(found[0, 50:-50, 1], slow[50:-50], atol=0.02)
    said = refusal(lambda: signal.LowPass(cutoff=100).on(window, 200.0))
    assert "below half the rate, which is 200 packets a second" in said
    signal.LowPass(cutoff=15).on(window[:, :4], 200.0)  # shorter than the filter's padding


def test_principal_components_rebuild_what_is_common() -> None:
    rng = np.random.default_rng(0)
    motion, shape = rng.normal(size=(50, 2)), rng.normal(size=(2, 3 * 10))
    clean = (motion @ shape + 4).reshape(50, 3, 10).transpose(1, 0, 2)
    noisy = clean + 0.01 * rng.normal(size=clean.shape)
    np.testing.assert_allclose(signal.PCA(components=2).on(clean, 1.0), clean, atol=1e-9)
    assert np.abs(signal.PCA(components=2).on(noisy, 1.0) - clean).std() < np.abs(noisy - clean).std()
    full = signal.PCA(components=100).on(noisy, 1.0)
    np.testing.assert_allclose(full, noisy, atol=1e-9)
    without = signal.PCA(components=100, skip=1).on(noisy, 1.0)
    np.testing.assert_allclose(signal.PCA(components=1).on(noisy, 1.0) + without - noisy.mean(1, keepdims=True), noisy)


def test_dynamic_and_summary() -> None:
    window = np.random.default_rng(0).normal(size=(2, 9, 4)) + 7
    np.testing.assert_allclose(signal.Dynamic().on(window, 1.0).mean(axis=1), 0, atol=1e-12)
    found = signal.Summary().on(window, 1.0)
    assert found.shape == (2, 3, 4)
    line = window[1, :, 2]
    np.testing.assert_allclose(found[1, :, 2], [line.mean(), line.std(), np.mean(np.abs(np.diff(line)))])
    assert np.isfinite(signal.Summary().on(window[:, :1], 1.0)).all()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"step": 0}, "step must be at least 1, got 0"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"rate": 0}, "rate must be above 0"),
        ({"gap": -1}, "gap must be above 0"),
        ({"test_part": 1}, "test_part must be between 0 and 1"),
        ({"rate": 100, "every": 2}, "both say which packets count"),
        ({"test_session": 2, "test_by": "time"}, "test_session=2 is test_by=session"),
        ({"steps": "hampel,median"}, "unknown step 'median'"),
        ({"steps": "hampel?width=0"}, "width must be at least 1"),
        ({"steps": "lowpass"}, "cutoff is missing"),
        ({"signal": "power"}, "unknown signal 'power'"),
    ],
)
def test_settings_that_are_not_right(options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(lambda: load("csi", manifest="x", **options))


# --- the data set -----------------------------------------------------------------------------------------------------
@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Two rooms, a capture for 0, 2 and 3 people, 25 packets each, in two sessions."""
    lines = ["file, room, people, session, activity"]
    (tmp_path / "data").mkdir()
    for number, (room, people, session, activity) in enumerate(
        [
            ("office", 0, "1", "sit down"),
            ("office", 3, "2", "walk"),
            ("bus", 2, "1", "sit down"),
            ("bus", 0, "2", "fall"),
        ]
    ):
        put(tmp_path / "data" / f"{number}.pcap", pcap(samples(25, 64, seed=number)))
        lines.append(f"data/{number}.pcap, {room}, {people}, {session}, {activity}")
    return put(tmp_path / "captures.csv", "\ufeff" + "\n".join(lines) + "\n")


def test_a_data_set_of_captures(captures: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "protofed"):
        data = load("csi", manifest=str(captures), window="10", standardise=False)
    assert data.x_train.shape == (8, 1, 10, 56) and data.x_train.dtype == torch.float32
    assert data.y_train.tolist() == [0, 0, 3, 3, 2, 2, 0, 0] and data.num_classes == 4
    assert data.class_values == (0, 1, 2, 3) and data.class_names == ("0", "1", "2", "3")
    assert data.group_names == ("bus", "office") and data.group_train is not None
    assert data.group_train.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert data.x_test is None and data.name == "captures.csv" and data.kind == "csi"
    assert data.sequence_train is not None and data.sequence_train.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    np.testing.assert_allclose(data.x_train[3, 0], amplitudes(25, 1)[10:20], rtol=1e-6)
    assert float(load("csi", manifest=str(captures), window=10).x_train.mean()) == pytest.approx(0, abs=1e-5)
    assert "3.pcap: 25 packets; 1 × 56, 2 windows" in caplog.text


def test_overlap_and_thinning(captures: Path) -> None:
    assert len(load("csi", manifest=str(captures), window=10, step=5).y_train) == 4 * 4
    assert load("csi", manifest=str(captures), window=10, every=2).x_train.shape == (4, 1, 10, 56)


def test_any_label_and_any_group(captures: Path) -> None:
    data = load("csi", manifest=str(captures), window=10, label="activity", group="room,session")
    assert data.class_names == ("fall", "sit down", "walk") and data.class_values == ()
    assert data.y_train.tolist() == [1, 1, 2, 2, 1, 1, 0, 0]
    assert data.group_names == ("bus, 1", "bus, 2", "office, 1", "office, 2")
    counted = load("csi", manifest=str(captures), window=10, label="session")
    assert counted.class_values == (0, 1, 2)


def test_parts_of_a_capture_have_labels_of_their_own(tmp_path: Path) -> None:
    put(tmp_path / "a.pcap", pcap(samples(40, 64)))
    manifest = put(tmp_path / "m.csv", "file,room,label,start,end\na.pcap,hall,sit,,0.2\na.pcap,hall,walk,0.2,\n")
    data = load("csi", manifest=str(manifest), window=10, label="label", standardise=False)
    assert data.y_train.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(data.x_train[2, 0], amplitudes(40, 0)[20:30], rtol=1e-6)
    put(manifest, "file,room,label,start,end\na.pcap,hall,sit,3,2\n")
    assert "line 2: start=3 and end=2" in refusal(lambda: load("csi", manifest=str(manifest), label="label"))
    put(manifest, "file,room,label,start\na.pcap,hall,sit,soon\n")
    assert "start='soon': expected seconds" in refusal(lambda: load("csi", manifest=str(manifest), label="label"))


@pytest.mark.parametrize("session", [2, "2"])
def test_one_session_as_the_test_part(captures: Path, session: str | int) -> None:
    data = load("csi", manifest=str(captures), window=10, test_session=session)
    assert data.y_train.tolist() == [0, 0, 2, 2] and data.y_test is not None and data.y_test.tolist() == [3, 3, 0, 0]
    assert data.group_test is not None and data.group_test.tolist() == [1, 1, 0, 0] and data.num_classes == 4


def test_any_column_divides(captures: Path) -> None:
    by_room = load("csi", manifest=str(captures), window=10, test_by="room", test_values="bus")
    assert by_room.y_train.tolist() == [0, 0, 3, 3] and by_room.y_test is not None
    last = load("csi", manifest=str(captures), window=10, test_by="session")
    assert last.y_test is not None and last.y_test.tolist() == [3, 3, 0, 0]
    text = refusal(lambda: load("csi", manifest=str(captures), window=10, test_by="room", test_values="attic"))
    assert "no capture of room=attic; found bus, office" in text
    text = refusal(lambda: load("csi", manifest=str(captures), window=10, test_by="subject"))
    assert "no column subject; found file, room, people, session, activity" in text


def test_by_capture_needs_two_of_a_kind(captures: Path) -> None:
    assert "test_by=capture needs two" in refusal(
        lambda: load("csi", manifest=str(captures), window=10, test_by="capture")
    )
    lines = captures.read_text(encoding="utf-8-sig") + "data/1.pcap, office, 0, 1, sit down\n"
    put(captures, lines)
    data = load("csi", manifest=str(captures), window=10, test_by="capture", standardise=False)
    assert data.y_test is not None and data.y_test.tolist() == [0, 0] and data.x_test is not None
    np.testing.assert_allclose(data.x_test[0, 0], amplitudes(25, 1)[:10], rtol=1e-6)


def test_by_time_nothing_is_on_both_sides(captures: Path) -> None:
    data = load("csi", manifest=str(captures), window=6, step=2, test_by="time", test_part=0.3, standardise=False)
    assert data.x_test is not None
    for number in range(4):
        whole = amplitudes(25, number)
        starts = {whole[a, 0].astype(np.float32): a for a in range(25)}
        train = [starts[v] for v in data.x_train[:, 0, 0, 0].numpy() if v in starts]
        test = [starts[v] for v in data.x_test[:, 0, 0, 0].numpy() if v in starts]
        assert train and test and max(train) + 6 <= min(test)


@given(st.integers(1, 60), st.floats(0.05, 0.9), st.integers(0, 5))
def test_the_last_windows(count: int, share: float, overlap: int) -> None:
    train, test = last_windows(count, share, overlap)
    assert len(test) == round(share * count) and test.tolist() == list(range(count - len(test), count))
    assert all(count - len(test) - row > overlap for row in train)
    assert len(train) == max(count - len(test) - overlap, 0)


def test_a_session_that_is_not_there(captures: Path) -> None:
    text = refusal(lambda: load("csi", manifest=str(captures), window=10, test_session=5))
    assert "captures.csv" in text and "session=5" in text and "found 1, 2" in text
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
        ("file,room,people\ndata/0.pcap,office\n", "line 2: no people"),
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
    put(captures.parent / "data" / "3.dat", atheros(12))
    put(captures, "file,room,people\ndata/0.pcap,a,0\ndata/3.dat,a,1\n")
    assert "3.dat: 6 antennas" in refusal(lambda: load("csi", manifest=str(captures), window=10))


def test_a_capture_shorter_than_a_window(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "a.pcap", pcap(samples(9, 64)))
    put(tmp_path / "b.pcap", pcap(samples(10, 64)))
    manifest = put(tmp_path / "m.csv", "file,room,people\na.pcap,hall,1\nb.pcap,hall,0\n")
    said = refusal(lambda: load("csi", manifest=str(manifest), window=10))
    assert "a.pcap: fewer packets than one window takes (10 × every=1)" in said and "(9 packets)" in said
    with caplog.at_level(logging.WARNING, "protofed"):
        data = load("csi", manifest=str(manifest), window=10, damaged="keep")
    assert data.y_train.tolist() == [0] and "a.pcap: 9 packets; 1 × 56, 0 windows" in caplog.text
    put(manifest, "file,room,people\na.pcap,hall,1\n")
    said = refusal(lambda: load("csi", manifest=str(manifest), window=10, damaged="keep"))
    assert "m.csv: no window of 10 packets for the training part" in said


# --- training and test apart ------------------------------------------------------------------------------------------
def test_neighbours_on_both_sides_are_remarked_on(captures: Path) -> None:
    data = load("csi", manifest=str(captures), window=5)
    remarks = federate(data, "natural", seed=0, test="local").remarks
    assert any("test windows stand beside a training window of the same capture" in said for said in remarks)
    apart = load("csi", manifest=str(captures), window=5, test_by="time", test_part=0.4)
    assert not federate(apart, "natural", seed=0, test="local").remarks


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("ab-")), min_size=1, max_size=20))
def test_neighbours_by_loops(rows: list[tuple[int, str]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    test = [i for i, (_, side) in enumerate(rows) if side == "a"]
    training = [i for i, (_, side) in enumerate(rows) if side == "b"]
    naive = sum(
        any(0 <= j < len(rows) and rows[j][0] == rows[i][0] and j in training for j in (i - 1, i + 1)) for i in test
    )
    sequence = torch.tensor([number for number, _ in rows])
    assert beside(sequence, torch.tensor(test, dtype=torch.long), torch.tensor(training, dtype=torch.long)) == naive


@pytest.mark.parametrize("test", ["local", "central"])
def test_csi_is_standardised_without_test_rows(test: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (40, 2, 6, 4)) * rng.uniform(1, 9, (40, 1, 1, 1))
    y = np.arange(40) % 2
    data = Dataset.from_arrays(x, y, kind="csi", group_train=np.arange(40) // 20).standardised()
    found = federate(data, "natural", seed=0, test=test)
    rows = torch.cat([client.labelled.index for client in found.clients])
    raw = torch.from_numpy(x).float()
    mean, std = (getattr(raw[rows], f)((0, 2, 3), keepdim=True) for f in ("mean", "std"))
    std = raw[rows].std((0, 2, 3), correction=0, keepdim=True)
    for client in found.clients:
        for part in (client.labelled, client.test):
            torch.testing.assert_close(part.take()[0], (raw[part.index] - mean) / std, rtol=1e-4, atol=1e-5)
    assert found.mean is not None and found.std is not None
    torch.testing.assert_close(found.mean, mean.flatten(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.std, std.flatten(), rtol=1e-4, atol=1e-5)
    assert found.clients[0].labelled.x is found.clients[1].labelled.x


# --- the layout -------------------------------------------------------------------------------------------------------
def test_an_npz_file_says_what_its_axes_are(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(6, 3, 30, 20)).astype(np.float32)
    y = np.arange(6) % 2
    file = tmp_path / "windows.npz"
    np.savez(file, x_train=x, y_train=y, axes=np.array(["antennas", "subcarriers", "time"]))
    data = load(file, standardise=False)
    assert data.kind == "csi" and data.sample_shape == (3, 20, 30)
    np.testing.assert_array_equal(data.x_train, x.transpose(0, 1, 3, 2))
    np.savez(file, x_train=x[:, 0], y_train=y, axes="subcarriers, time")
    assert load(file).sample_shape == (1, 20, 30)
    np.savez(file, x_train=x, y_train=y, kind="csi")
    assert load(file).kind == "csi" and load(file, kind="image").kind == "image"
    np.savez(file, x_train=x, y_train=y, kind="csy")
    assert "windows.npz: kind" in refusal(lambda: load(file)) and "csi" in refusal(lambda: load(file))
    np.savez(file, x_train=x, y_train=y, axes="time, subcarriers")
    said = refusal(lambda: load(file))
    assert "windows.npz: x_train: axes are time, subcarriers and a sample has 3" in said


def test_arranged_moves_axes_only() -> None:
    x = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    found = arranged(x, ("subcarriers", "antennas", "time"), "x")
    assert found.shape == (2, 4, 5, 3) and found[1, 2, 3, 1] == x[1, 1, 2, 3]
    assert "expected one name for each" in refusal(lambda: arranged(x, ("time", "time", "antennas"), "x"))


def test_views_of_own_windows_shift_in_time(tmp_path: Path) -> None:
    """Windows stored with subcarriers before time have the shape of an image; their views act on time none the less."""
    x = np.random.default_rng(0).normal(size=(4, 3, 30, 200)).astype(np.float32)
    np.savez(tmp_path / "w.npz", x_train=x, y_train=np.arange(4) % 2, axes="antennas,subcarriers,time")
    data = load(tmp_path / "w.npz")
    views = augmentation(data.kind, data.sample_shape, data.mean, data.std, AugmentSettings())
    assert isinstance(views.weak, Window) and isinstance(views.strong, MaskedWindow)
    quiet = Window(deviation=0.0, shift=views.weak.shift)
    draws = torch.tensor([[0.5, 0.0], [0.5, 0.5], [0.5, 0.999], [0.5, 0.2]])
    for row, shifted in enumerate(quiet(data.x_train, draws)):
        offsets = [s for s in range(-10, 11) if torch.equal(shifted, data.x_train[row].roll(s, dims=1))]
        assert len(offsets) == 1 and (offsets[0] != 0) == (row != 1)


# --- pictures ---------------------------------------------------------------------------------------------------------
def test_the_chain_has_a_picture_of_each_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a.dat", atheros(60))
    put(tmp_path / "b.dat", atheros(60, seed=1))
    put(tmp_path / "m.csv", "file,room,activity\na.dat,hall,walk\nb.dat,hall,sit\n")
    chain = source(
        window=20, scale="rssi", rate=50.0, signal=signal.Ratio(), steps=("hampel", "lowpass?cutoff=10", "pca")
    )
    stages = chain.stages(csi.Capture(tmp_path / "a.dat", "", "", {}))
    assert [s.setting for s in stages] == [
        "amplitude",
        "scale=rssi",
        "signal=ratio",
        "rate=50",
        "hampel",
        "lowpass?cutoff=10",
        "pca",
    ]
    np.testing.assert_array_equal(stages[-1].window, chain.windows(tmp_path / "a.dat")[0])
    assert "expected a file name ending in" in refusal(lambda: draw_stages(stages, tmp_path / "a.txt", "x"))
    monkeypatch.chdir(tmp_path)
    words = "data show data=csi manifest=m.csv label=activity window=6 steps=hampel partition=natural test=local"
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "a.dat" in result.output and "left out" in result.output
    assert (tmp_path / "runs" / "clients-csi-natural-signal.png").stat().st_size > 5000


# --- captures to classify ---------------------------------------------------------------------------------------------
def test_a_capture_can_be_read_to_be_classified(tmp_path: Path) -> None:
    file = put(tmp_path / "a.pcap", pcap(samples(9)))
    unseen = read_samples(file, source(window=4), (1, 4, 242))
    assert unseen.labels is None and np.array_equal(unseen.x, np.stack(source(window=4).windows(file)))
    with pytest.raises(ProtofedError, match=r"expected \.npz"):
        read_samples(file, None, (1, 4, 242))
