"""Live packets: what comes over loopback UDP, a pseudo-terminal or a replay is classified as the recorded capture is."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import protofed as pf
from protofed.data.csi import CSI, Tally, esp32, nexmon
from protofed.data.csi.packets import Options
from protofed.data.csi.replay import _main, datagrams, paced, send
from protofed.data.samples import read_samples
from protofed.errors import ProtofedError
from protofed.live import Feed, Live, Replay, Serial, Udp, feed_of
from protofed.live.page import LivePage
from support.captures import esp32 as esp32_lines
from support.captures import nexmon as nexmon_packet
from support.captures import pcap, put, samples

WINDOW = 10


def trained(folder: Path, ending: str, **data: Any) -> Any:
    """A run of one round on two small captures."""
    for number, name in enumerate(("walk", "sit")):
        content = pcap(samples(60, 64, number)) if ending == "pcap" else esp32_lines(60, seed=number)
        put(folder / f"{name}.{ending}", content)
    rows = f"file,room,activity\nwalk.{ending},hall,walk\nsit.{ending},hall,sit\n"
    given = {"name": "csi", "manifest": str(put(folder / "m.csv", rows)), "label": "activity", "window": WINDOW, **data}
    network = {"name": "mlp", "hidden": [8], "embedding": 4}
    small = {"partition": "natural", "clients": 0, "test": "local", "rounds": 1, "snapshots": 0, "silhouette": False}
    return pf.run("fedproto", data=given, model=network, workers=1, out=folder / "run", **small)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("live")


@pytest.fixture(scope="module")
def run(folder: Path) -> Any:
    return trained(folder, "pcap")


def recorded(run: Any, file: Path) -> Any:
    unseen = read_samples(file, run.settings.data, run.model(0).design.sample_shape)
    return run.predict(unseen.x)


def follow(run: Any, feed: Feed, file: Path | None = None, extra: tuple[bytes, ...] = (), **given: Any) -> Any:
    """All moments of a feed; a file is sent to it, and what else is to be sent before each tenth datagram."""
    live = Live(run.model(0), run.settings.data, feed, **given)
    with live:
        if file is not None:
            assert isinstance(feed, Udp)
            address = feed.address

            def work() -> None:
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
                    for number, (_, content) in enumerate(datagrams(file)):
                        for other in extra if number % 10 == 0 else ():
                            out.sendto(other, address)
                        out.sendto(content, address)
                        time.sleep(0.001)
                time.sleep(0.3)
                feed.stop.set()

            threading.Thread(target=work, daemon=True).start()
        return live, list(live)


# --- the same classes as of the recording -----------------------------------------------------------------------------
def test_a_replay_gives_what_the_recording_gives(run: Any, folder: Path) -> None:
    file = folder / "walk.pcap"
    live, moments = follow(run, feed_of(f"replay:{file}@50"))
    found = recorded(run, file)
    assert [m.name for m in moments] == found.classes and [m.number for m in moments] == list(range(6))
    np.testing.assert_allclose([m.probabilities for m in moments], found.probabilities, atol=1e-6)
    assert [m.unlike for m in moments] == found.unlike.tolist()
    assert live.account.tally.given == 60 and live.feed.dropped == 0 and all(m.latency < 5 for m in moments)
    assert "60 packets; 6 windows; packet to class" in live.status()


def test_one_thread_computes_while_packets_come(run: Any, folder: Path) -> None:
    """On a busy host, threads that wait for each other took seconds for a window."""
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with Live(run.model(0), run.settings.data, feed_of(f"replay:{folder / 'walk.pcap'}@50")) as live:
            assert torch.get_num_threads() == 1
            assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} <= {1}
            next(iter(live))
        assert torch.get_num_threads() == 3
        with pytest.raises(ProtofedError), Live(run.model(0), run.settings.data, feed_of("replay:nowhere.pcap")):
            pass
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_datagrams_give_what_the_recording_gives_whatever_else_comes(run: Any, folder: Path) -> None:
    file = folder / "sit.pcap"
    garbage = (b"", b"\x11", b"\x11\x11" + bytes(40), os.urandom(300), b"CSI_DATA,x\n", b"\xff" * 1500)
    live, moments = follow(run, feed_of("udp:127.0.0.1:0"), file, garbage)
    found = recorded(run, file)
    assert [m.name for m in moments] == found.classes
    np.testing.assert_allclose([m.probabilities for m in moments], found.probabilities, atol=1e-6)
    left_out = live.account.tally.left_out
    assert live.account.tally.given == 60 and left_out.total() == 36, left_out
    assert left_out["of neither Nexmon nor an ESP32"] >= 18 and left_out["garbled or cut short"] >= 12


def test_steps_between_windows(run: Any, folder: Path) -> None:
    _, moments = follow(run, Replay(folder / "walk.pcap", 50), step=5)
    assert len(moments) == 11
    np.testing.assert_allclose(
        [m.probabilities for m in moments[::2]], recorded(run, folder / "walk.pcap").probabilities, atol=1e-6
    )


def test_lines_of_an_esp32(tmp_path: Path) -> None:
    run = trained(tmp_path, "csv", steps=["dynamic"], rate=50.0)
    file = tmp_path / "walk.csv"
    expected = recorded(run, file)
    _, moments = follow(run, Udp("127.0.0.1", 0), file)
    assert [m.name for m in moments] == expected.classes and len(moments) == 3
    np.testing.assert_allclose([m.probabilities for m in moments], expected.probabilities, atol=1e-6)
    if importlib.util.find_spec("serial") is None:
        return
    ours, theirs = os.openpty()
    feed = feed_of(f"serial:{os.ttyname(theirs)}@115200")
    assert isinstance(feed, Serial)

    def write() -> None:
        time.sleep(0.3)
        os.write(ours, b"rst:0x1 (POWERON_RESET)\r\nCSI_DATA,cut")
        for _, line in datagrams(file):
            os.write(ours, line)
            time.sleep(0.002)
        time.sleep(0.5)
        feed.stop.set()

    threading.Thread(target=write, daemon=True).start()
    _, moments = follow(run, feed)
    np.testing.assert_allclose([m.probabilities for m in moments], expected.probabilities, atol=1e-6)


def test_a_serial_line_needs_pyserial_and_a_device(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("serial")
    with (
        pytest.raises(ProtofedError, match=r"serial:/dev/nothing@921600: cannot be opened"),
        feed_of("serial:/dev/nothing"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "serial", None)
    with (
        pytest.raises(ProtofedError, match=r"needs pyserial: pip install 'protofed\[serial\]'"),
        Serial("/dev/nothing"),
    ):
        pass


# --- frames of several antennas ---------------------------------------------------------------------------------------
def pieces(count: int, cores: int) -> list[nexmon.Piece]:
    found = []
    for number in range(count):
        for core in range(cores):
            body = nexmon_packet(samples(1, 64, number)[0], core=core, sequence=number)[42:]
            piece = nexmon.piece_of(body, number + 0.001 * core, Tally(), Options())
            assert piece is not None
            found.append(piece)
    return found


@pytest.mark.parametrize(
    ("cores", "expected", "given", "extra"), [(2, 2, 5, 0), (2, None, 5, 0), (3, 2, 5, 5), (1, 2, 5, 0)]
)
def test_frames_are_whole_as_soon_as_they_can_be(cores: int, expected: int | None, given: int, extra: int) -> None:
    frames, tally, found, early = nexmon.Frames(expected), Tally(), [], 0
    for number, piece in enumerate(pieces(5, cores), 1):
        whole = list(frames.add(piece, tally))
        found += whole
        early += len(whole) and number % cores == 0
    assert list(frames.rest(4.05)) == [] and (early == given or cores != expected)
    found += frames.rest()
    assert len(found) == given and tally.left_out.total() == extra
    assert {p.antennas for p in found} == {min(cores, expected or cores)}


# --- at its own speed -------------------------------------------------------------------------------------------------
def test_items_come_when_they_are_due() -> None:
    found = [(due, item, time.monotonic()) for due, item in paced([(5.0, 1), (5.2, 2), (4.0, 3)], 2)]
    assert [item for _, item, _ in found] == [1, 2, 3]
    np.testing.assert_allclose([due - found[0][0] for due, *_ in found], [0, 0.1, 0.1], atol=1e-6)
    assert all(came >= due for due, _, came in found)
    stop = threading.Event()
    stop.set()
    assert list(paced([(0.0, 1)], 1, stop)) == []


def test_a_sender_for_tests(folder: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(5)
        assert send(folder / "walk.pcap", listener.getsockname(), 1000) == 60
        assert listener.recv(65535) == nexmon_packet(samples(60, 64, 0)[0])[42:]
    put(tmp_path / "a.csi", b"\x00" * 100)
    with pytest.raises(ProtofedError, match=r"a\.csi"):
        send(tmp_path / "a.csi", ("127.0.0.1", 9))
    with pytest.raises(SystemExit, match=r"usage: python -m protofed\.data\.csi\.replay"):
        _main(["nothing"])


# --- what a person may write ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5500", "expected udp:PORT"),
        ("tcp:5500", "expected udp:PORT"),
        ("udp:", "expected udp:PORT"),
        ("udp:many", "expected a port from 0 to 65535, got 'many'"),
        ("udp:70000", "expected a port from 0 to 65535, got '70000'"),
        ("replay:a.pcap@0", "expected a speed above 0 after @, got '0'"),
        ("replay:a.pcap@fast", "expected a speed above 0 after @, got 'fast'"),
        ("serial:/dev/x@9600.5", "expected a whole number of baud after @"),
    ],
)
def test_feeds_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ProtofedError, match=message):
        feed_of(text)


def test_feeds(tmp_path: Path) -> None:
    udp, replay, serial = feed_of("udp:5500"), feed_of("replay:a.pcap"), feed_of("serial:/dev/ttyUSB0")
    assert isinstance(udp, Udp) and udp.address == ("0.0.0.0", 5500)
    assert isinstance(replay, Replay) and replay.speed == 1 and isinstance(serial, Serial) and serial.baud == 921_600
    put(tmp_path / "a@2.pcap", b"")
    named = feed_of(f"replay:{tmp_path / 'a@2.pcap'}")
    assert isinstance(named, Replay) and named.speed == 1 and named.file.name == "a@2.pcap"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(ProtofedError, match="cannot be listened to"):
            feed_of(f"udp:127.0.0.1:{taken.getsockname()[1]}").open()


def test_what_waits_beyond_the_limit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.live.feeds.WAITING", 3)
    feed = Udp("127.0.0.1", 0)
    for _ in range(5):
        feed.keep((0.0, b""))
    assert feed.dropped == 2


def test_bad_input_in_one_line(run: Any, folder: Path, call: Any) -> None:
    name = str(folder / "run")
    for words, message in (
        ([name], "expected one of FILE and --live"),
        ([name, "a.npz", "--live", "udp:5500"], "expected one of FILE and --live"),
        ([name, "--live", "tcp:1"], "--live tcp:1: expected udp:PORT"),
        ([name, "--live", "replay:nothing.pcap", "--no-page"], "nothing.pcap: no such file"),
        ([name, "--live", f"replay:{folder / 'walk.pcap'}", "--no-page", "--out", "no/a.csv"], "cannot be written"),
    ):
        code, _, err = call("predict", *words)
        assert code != 0 and message in err and "Traceback" not in err, err
    with pytest.raises(ProtofedError, match="need a run on captures, data=csi; this one's data is digits"):
        Live(run.model(0), pf.data.sources.make("digits"), Replay("a.pcap"))


# --- the command and its page -----------------------------------------------------------------------------------------
def test_the_command_replays(run: Any, folder: Path, call: Any, tmp_path: Path) -> None:
    file = folder / "walk.pcap"
    words = ["predict", folder / "run", "--live", f"replay:{file}@20", "--port", "0", "--out", "live.csv"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "page: http://127.0.0.1:" in out and "60 packets; 6 windows; packet to class" in out
    with (tmp_path / "live.csv").open(newline="") as table:
        header, *rows = csv.reader(table)
    assert header == ["clock", "class", "probability_sit", "probability_walk", "unlike_known", "latency_ms"]
    assert [row[1] for row in rows] == recorded(run, file).classes


def test_the_page_shows_the_last_windows(run: Any, folder: Path) -> None:
    live = Live(run.model(0), run.settings.data, Replay(folder / "walk.pcap", 100))
    with live, LivePage(live, 0) as page:
        for moment in live:
            page.show(moment)
        page.say(live.status(), ended=True)
        with urllib.request.urlopen(page.url) as answer:
            text = answer.read().decode()
        with urllib.request.urlopen(page.url + "state.json") as answer:
            state = json.loads(answer.read())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(page.url + "other")
    assert "<title>Live: hall</title>" in text and '["sit", "walk"]' in text and "http" not in text.split("<body>")[1]
    assert state["ended"] and len(state["moments"]) == 6 and abs(sum(state["probabilities"]) - 1) < 1e-3
    assert state["moments"][-1][2] == moment.label and "6 windows" in state["status"]


@pytest.mark.slow
def test_ctrl_c_is_the_usual_end(run: Any, folder: Path) -> None:
    words = [sys.executable, "-m", "protofed", "predict", str(folder / "run"), "--live", "udp:127.0.0.1:0", "--no-page"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("udp:127.0.0.1:"), line
        port = int(line.split(":")[2])
        send(folder / "walk.pcap", ("127.0.0.1", port), 20)
        windows = 0
        while windows < 6 and (line := process.stdout.readline()):
            windows += " ms" in line
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in errors and "60 packets; 6 windows" in out, (out, errors)


def test_a_source_keeps_to_its_packets(folder: Path) -> None:
    """Of another shape than the run's, or of another sender, they are left out and counted."""
    source = CSI(manifest="unused.csv", window=WINDOW, sender="02:00:5e:00:00:01")
    assert source.wanted.options == Options(None, None) and esp32.MARK == b"CSI_DATA,"
    assert source.signal.antennas(3) == 3
    assert CSI(manifest="m.csv", signal=pf.data.csi.signal.Ratio()).signal.antennas(4) == 3
