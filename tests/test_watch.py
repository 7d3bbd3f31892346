"""The live view: what it serves, what it refuses, and that it ends cleanly."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from protofed.errors import ProtofedError
from protofed.report.content import content
from protofed.report.live import ContentCache, LiveServer, serve
from protofed.results.lock import FolderLock
from protofed.serving import PageHandler
from support.run_folders import make_comparison, make_run


@contextmanager
def serving(folder, host="127.0.0.1"):
    with LiveServer(folder, 0, host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body.decode()


def test_serves_the_page_and_its_content(tmp_path):
    run = make_run(tmp_path / "r")
    with serving(run) as server:
        answer, page = ask(server, "/")
        assert answer.status == 200 and answer.getheader("Content-Type") == "text/html; charset=utf-8"
        assert "const LIVE = true;" in page
        answer, text = ask(server, "/content.json?now=1")
        assert answer.status == 200 and json.loads(text) == content(run)
        again, nothing = ask(server, "/content.json", If_None_Match=answer.getheader("ETag"))
        assert again.status == 304 and nothing == ""


def test_new_rounds_are_seen(tmp_path):
    run = make_run(tmp_path / "r", rounds=1, planned=9, finished=False)
    lock = FolderLock(run).acquire()
    with serving(run) as server:
        first, text = ask(server, "/content.json")
        assert json.loads(text)["status"]["under_way"][0]["round"] == 1
        with (run / "rounds.jsonl").open("a") as file:
            file.write(json.dumps({"round": 2, "loss": 0.7, "terms": {}, "up": {}, "down": {}}) + "\n")
        second, text = ask(server, "/content.json", If_None_Match=first.getheader("ETag"))
        assert second.status == 200 and json.loads(text)["status"]["under_way"][0]["round"] == 2
        assert json.loads(text)["curves"][0]["series"][0]["y"] == [2, 0.7]
        lock.release()
        third, text = ask(server, "/content.json", If_None_Match=second.getheader("ETag"))
        assert third.status == 200 and json.loads(text)["status"]["interrupted"][0]["round"] == 2


def test_a_comparison_before_its_first_run_and_after_it(tmp_path):
    place = make_comparison(tmp_path / "c", seeds=1, finished=False)
    with serving(place) as server:
        assert json.loads(ask(server, "/content.json")[1])["status"] == {
            "finished": 0,
            "failed": 0,
            "runs": 3,
            "under_way": [],
            "interrupted": [],
        }
        make_run(place / "fedsap-seed1")
        assert json.loads(ask(server, "/content.json")[1])["status"]["finished"] == 1


def test_content_is_made_anew_only_when_a_file_changes(tmp_path):
    run = make_run(tmp_path / "r")
    cache = ContentCache(run)
    assert cache.content() is cache.content()
    before = cache.content()
    (run / "summary.json").unlink()
    assert cache.content() is not before


@pytest.mark.parametrize(
    "path",
    [
        "/settings.toml",
        "/summary.json",
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/..%2fsecret.txt",
        "//etc/passwd",
        "/content.json/../../secret.txt",
        "/static/page.js",
        "/checkpoint/latest.json",
    ],
)
def test_nothing_else_is_served(tmp_path, path):
    (tmp_path / "secret.txt").write_text("secret")
    with serving(make_run(tmp_path / "r")) as server:
        answer, text = ask(server, path)
        assert answer.status == 404 and "secret" not in text


def test_other_ways_and_names_are_refused(tmp_path):
    with serving(make_run(tmp_path / "r")) as server:
        assert ask(server, "/", method="POST")[0].status == 501
        assert ask(server, "/", method="DELETE")[0].status == 501
        assert ask(server, "/", Host="evil.example")[0].status == 403
        assert ask(server, "/", Host="localhost.evil.example")[0].status == 403
        assert ask(server, "/", Host="localhost:1")[0].status == 200
        assert ask(server, "/", Host="LocalHost:1")[0].status == 200
        assert ask(server, "/", Host="[::1]:80")[0].status == 200


ASKED = b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"


def request(server, text=ASKED):
    connection = socket.create_connection(server.server_address[:2], timeout=60)
    connection.sendall(text)
    return connection


def reset(connection):
    """Go away at once: the other side's next write fails."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.fixture
def errors_of():
    """The errors that reach the server's `handle_error`, which handles them, as they come."""

    def watch(server):
        def handle_error(*given):
            LiveServer.handle_error(server, *given)
            seen.put(sys.exc_info()[1])

        seen, server.handle_error = queue.Queue(), handle_error
        return seen

    return watch


def test_a_client_that_goes_away_leaves_no_word(tmp_path, capfd, errors_of):
    run = make_run(tmp_path / "r")
    with serving(run) as server:
        seen, shown = errors_of(server), server.cache.content
        for text in (ASKED, b"GET / HTTP/1.0\r\nHost: loc", b""):
            gone = threading.Event()
            server.cache.content = lambda gone=gone: (gone.wait(20), shown())[1]  # no answer before the client is gone
            reset(request(server, text))
            gone.set()
            assert isinstance(seen.get(timeout=60), ConnectionError), text
        assert capfd.readouterr() == ("", "")


def test_a_bug_in_the_server_shows(tmp_path, capfd, errors_of):
    with serving(make_run(tmp_path / "r")) as server:
        seen, server.cache.content = errors_of(server), lambda: {}["a bug"]
        with request(server) as connection:
            assert connection.recv(100) == b""
        assert isinstance(seen.get(timeout=60), KeyError)
    assert capfd.readouterr().err.count("KeyError: 'a bug'") == 1


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.0\r\nHost: loc"])
def test_a_connection_that_says_nothing_more_is_closed(tmp_path, monkeypatch, begun):
    assert 0 < PageHandler.timeout <= 60
    monkeypatch.setattr(PageHandler, "timeout", 0.2)
    with serving(make_run(tmp_path / "r")) as server, request(server, begun) as connection:
        assert connection.recv(100) == b""


def test_a_hundred_at_once_are_answered(tmp_path):
    """They all connect and ask before the first is accepted."""
    with LiveServer(make_run(tmp_path / "r"), 0, "127.0.0.1") as server:
        waiting = [request(server, b"GET /nothing HTTP/1.0\r\n\r\n") for _ in range(100)]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            for connection in waiting:
                with connection:
                    assert connection.recv(100).startswith(b"HTTP/1.0 403")  # without a Host
        finally:
            server.shutdown()
            thread.join()


def test_a_folder_that_vanishes_is_said(tmp_path):
    run = make_run(tmp_path / "r")
    with serving(run) as server:
        assert ask(server, "/")[0].status == 200
        run.rename(tmp_path / "gone")
        answer, text = ask(server, "/content.json")
        assert answer.status == 503 and "no such run folder" in text
        (tmp_path / "gone").rename(run)
        assert ask(server, "/content.json")[0].status == 200


def test_bad_input_is_named(tmp_path):
    with pytest.raises(ProtofedError, match="no such run folder"):
        serve(tmp_path / "none", port=0)
    run = make_run(tmp_path / "r")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ProtofedError, match="cannot be served there"):
            serve(run, port=taken.getsockname()[1])
    with pytest.raises(ProtofedError, match="cannot be served there"):
        serve(run, port=99999)
    with pytest.raises(ProtofedError, match="expected one of pca, tsne"):
        serve(run, port=0, projection="umap")


def listen():
    """A shell that starts tests in the background has them ignore Ctrl-C, and their children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_ctrl_c_ends_it_cleanly(tmp_path):
    run = make_run(tmp_path / "r")
    code = "import sys; from protofed.report.live import serve; serve(sys.argv[1], port=0, say=tell)"
    tell = "def tell(url):\n print(url, flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", tell + code, str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    )
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and errors == ""
