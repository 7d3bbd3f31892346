"""Keys, transports, and a real federation of three sites over NVIDIA FLARE on loopback with mutual TLS.

One federation serves all the tests that need one. Its sites are processes of their own, so that they can be killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protofed.deploy.channel import Desk, Refused, ask
from protofed.deploy.flare import MISSED_AT_WORK, Job
from protofed.deploy.keys import ALLOWED_CLASSES, Project, add_site, check_kit, expiry, make_kits, read_project, renew
from protofed.deploy.transport import Failure, LocalTransport
from protofed.errors import ProtofedError

SITES = ("east", "north-1", "west")
SITE = """
import sys, time, logging, threading
from pathlib import Path
from protofed.deploy.flare import Site

class Service:
    done = 0
    def handle(self, function, message):
        self.done += 1
        if function == "sleep":
            time.sleep(float(message))
        if function == "raise":
            raise ValueError("the policy allows\\nno such thing")
        return str(self.done).encode() if function == "count" else message

logging.basicConfig(level="INFO")
with Site(Path(sys.argv[1]), Service()):
    sys.stdin.read()
"""


class Echo:
    """A service that answers with what it was sent, and counts."""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    def handle(self, function: str, message: bytes) -> bytes:
        if function == "sleep":
            time.sleep(float(message))
        if function == "raise":
            raise ValueError("no\n such thing")
        self.done.append(message)
        return message


# Transports in one process


def test_local_transport_gives_each_site_its_own_message():
    transport = LocalTransport({name: Echo() for name in SITES})
    assert transport.sites() == sorted(SITES)
    messages = {name: os.urandom(100) for name in SITES}
    assert transport.call("echo", messages, 5.0) == messages
    assert transport.call("echo", {}, 5.0) == {}


def test_local_transport_names_late_lost_and_refusing_sites():
    services = {name: Echo() for name in SITES}
    transport = LocalTransport(services)
    transport.delays["east"] = 0.3
    transport.lost["west"] = "its link is down"
    assert transport.sites() == ["east", "north-1"]
    replies = transport.call("echo", dict.fromkeys([*SITES, "nobody"], b"x"), 0.1)
    assert replies["north-1"] == b"x"
    assert replies["east"] == Failure("no answer within 0.1 s", "late")
    assert replies["west"] == Failure("its link is down", "lost")
    assert replies["nobody"] == Failure("not connected", "lost")
    assert transport.call("raise", {"north-1": b""}, 5.0) == {"north-1": Failure("no such thing", "refused")}


def test_a_site_does_one_thing_at_a_time_and_nothing_that_nobody_waits_for():
    service = Echo()
    transport = LocalTransport({"east": service})
    assert transport.call("sleep", {"east": b"0.5"}, 0.1)["east"] == Failure("no answer within 0.1 s", "late")
    assert isinstance(transport.call("echo", {"east": b"in vain"}, 0.1)["east"], Failure)
    assert transport.call("echo", {"east": b"after"}, 5.0) == {"east": b"after"}
    assert service.done == [b"0.5", b"after"]


def test_channel_passes_bytes_reasons_and_limits(tmp_path: Path):
    def answer(about: dict[str, object], message: bytes) -> bytes:
        if about["do"] == "wait":
            time.sleep(0.5)
        if about["do"] == "refuse":
            raise Refused("gone", "lost")
        return message[::-1]

    path = tmp_path / "desk"
    with Desk(path, answer):
        for message in (b"", b"\n", os.urandom(3_000_000)):
            assert ask(path, {"do": "turn"}, message, 5.0) == message[::-1]
        with pytest.raises(Refused, match="gone") as error:
            ask(path, {"do": "refuse"}, b"", 5.0)
        assert error.value.kind == "lost"
        with pytest.raises(TimeoutError):
            ask(path, {"do": "wait"}, b"", 0.1)
        assert ask(path, {"do": "turn"}, b"ab", 5.0) == b"ba"  # whoever gave up has left nothing behind
    with pytest.raises(OSError):
        ask(path, {"do": "turn"}, b"", 1.0)


def test_a_job_knows_who_is_alive():
    late, gone = Failure("", "late"), Failure("", "lost")
    job = Job("1", Path("relay"), ["a", "b"], 0.0)
    job.note({"a": late, "b": gone})
    assert (job.alive, job.started) == (set(), False)  # nobody has answered yet
    job.note({"a": b"", "b": b""})
    assert (job.alive, job.started) == ({"a", "b"}, True)
    job.note({"a": late, "b": gone})
    assert job.alive == {"a"}  # a may have been slow, b is gone
    job.note({"a": late, "b": late}, patient=["a"])
    assert job.alive == {"a"}  # its line may be busy
    for _ in range(MISSED_AT_WORK):
        job.note({"a": late, "b": late}, patient=["a"])
    assert job.alive == set()
    job.note({"a": b"", "b": late})
    assert job.alive == {"a"}


# Keys


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sites": ()}, "has no sites"),
        ({"sites": ("a", "a")}, "named twice"),
        ({"sites": ("server",)}, "reserved"),
        ({"sites": ("a/b",)}, "letters, digits"),
        ({"sites": ("a_b",)}, "letters, digits"),
        ({"sites": ("-a",)}, "letters, digits"),
        ({"name": ""}, "letters, digits"),
        ({"port": 0}, "port=0"),
    ],
)
def test_a_project_is_checked(changes: dict, message: str):
    with pytest.raises(ProtofedError, match=message):
        Project(**{"name": "study", "host": "localhost", "sites": ("a",), **changes})


def test_a_project_is_read_from_its_file(tmp_path: Path):
    file = tmp_path / "project.toml"
    file.write_text('name = "study"\nhost = "fl.example.org"\nsites = ["a", "b"]\n')
    assert read_project(file) == Project("study", "fl.example.org", ("a", "b"))
    file.write_text('name = "study"\nsites = ["a"]\n')
    with pytest.raises(ProtofedError, match=r"project\.toml: not a project.*host"):
        read_project(file)


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'protofed[deploy]'")
    out = tmp_path_factory.mktemp("federation") / "kits"
    make_kits(Project("study", "localhost", SITES, port=free_port()), out)
    return out


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_kits_are_private_and_allow_no_code(kits: Path):
    for kit in (kits, *(kits / name for name in ("server", "admin", "authority", *SITES))):
        assert kit.stat().st_mode & 0o077 == 0
    for name in ("server", *SITES):
        local = kits / name / "local"
        resources = json.loads((local / "resources.json").read_text())
        assert resources["class_allow_list"] == list(ALLOWED_CLASSES)
        assert resources["class_list_enforcement_mode"] == "enforce"
        permissions = json.loads((local / "authorization.json").read_text())["permissions"]
        assert list(permissions) == ["project_admin"]
        assert {permissions["project_admin"][right] for right in ("byoc", "shell_commands")} == {"none"}
    with pytest.raises(ProtofedError, match="has the keys of a project already"):
        make_kits(read_project(kits / "project.toml"), kits)


@pytest.mark.slow
def test_sites_are_added_and_certificates_renewed(tmp_path: Path):
    pytest.importorskip("nvflare")
    out = tmp_path / "kits"
    make_kits(Project("study", "localhost", ("a", "b")), out)
    old = {file: file.read_bytes() for file in out.rglob("*") if file.is_file() and "authority" not in file.parts}
    add_site(out, "c")
    assert check_kit(out / "c", "client") == "c"
    assert (out / "c/startup/rootCA.pem").read_bytes() == (out / "a/startup/rootCA.pem").read_bytes()
    (out / "a/local/resources.json").write_text("{}")
    renew(out, "a")
    changed = {str(file.relative_to(out)) for file, content in old.items() if file.read_bytes() != content}
    keys = {f"a/startup/{role}.{part}" for role in ("client", "server") for part in ("crt", "key")}
    assert changed == {"project.toml", "a/local/resources.json", *keys}
    assert check_kit(out / "a", "client") == "a"
    assert expiry(out / "a") >= expiry(out / "b")
    assert read_project(out / "project.toml").sites == ("a", "b", "c")
    with pytest.raises(ProtofedError, match="no kit 'd'"):
        renew(out, "d")
    with pytest.raises(ProtofedError, match="named twice"):
        add_site(out, "c")
    with pytest.raises(ProtofedError, match=r"fed_server\.json"):
        check_kit(out / "a", "server")
    make_kits(Project("study", "localhost", ("a", "b")), tmp_path / "other")
    shutil.copy(tmp_path / "other/b/startup/client.crt", out / "b/startup/client.crt")
    with pytest.raises(ProtofedError, match=r"client\.crt: not a certificate of this project"):
        check_kit(out / "b", "client")


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(kits: Path):
    from protofed.deploy.flare import Server

    port = read_project(kits / "project.toml").port
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ProtofedError, match=f"server: port {port} cannot be opened"),
    ):
        Server(kits / "server", kits / "admin")


def test_a_missing_engine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProtofedError, match=r"NVIDIA FLARE is not installed; install protofed\[deploy\]"):
        make_kits(Project("study", "localhost", ("a",)), tmp_path)


# A real federation


class Federation:
    """A server in this process, and sites in processes of their own."""

    def __init__(self, kits: Path) -> None:
        from protofed.deploy.flare import Server

        self.kits = kits
        self.sites: dict[str, subprocess.Popen[bytes]] = {}
        for name in SITES:
            self.join(name)
        self.server = Server(kits / "server", kits / "admin")

    def join(self, name: str, kit: Path | None = None) -> None:
        kit = kit or self.kits / name
        with (kit / "join.txt").open("ab") as log:
            command = [sys.executable, "-c", SITE, str(kit)]
            self.sites[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def leave(self, name: str) -> None:
        process = self.sites.pop(name)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)

    def close(self) -> None:
        for name in list(self.sites):
            self.leave(name)
        self.server.close()


@pytest.fixture(scope="module")
def federation(kits: Path) -> Iterator[Federation]:
    import psutil

    federation = Federation(kits)
    try:
        assert federation.server.wait_for(SITES, 90) == []
        yield federation
        family = psutil.Process().children(recursive=True)
    finally:
        federation.close()
    assert psutil.wait_procs(family, 10)[1] == [], "a process is left"


@pytest.fixture
def whole(federation: Federation) -> Iterator[Federation]:
    """The federation with all its sites, before and after the test."""
    assert federation.server.wait_for(SITES, 60) == []
    yield federation
    assert federation.server.wait_for(SITES, 60) == []


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.1)


def knock(context: ssl.SSLContext, port: int) -> None:
    """Try to talk to a port of this machine with TLS."""
    with (
        socket.create_connection(("localhost", port), 5.0) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        if connection.recv(1) == b"":
            raise ConnectionError("closed by the server")


def flare_processes(kit: Path) -> list:
    """FLARE's own process of a kit, and those of its jobs."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        line = process.cmdline()
        if str(kit) in line and ("protofed.deploy.relay" in line or any("nvflare" in word for word in line)):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1, 20_000, 2_000_000, 50_000_000])
def test_bytes_pass_unchanged(whole: Federation, size: int):
    messages = {name: os.urandom(size) for name in SITES}
    replies = whole.server.call("echo", messages, 60.0)
    assert {name: reply == messages[name] for name, reply in replies.items()} == dict.fromkeys(SITES, True)


@pytest.mark.slow
def test_late_and_refusing_sites_are_named_and_the_others_answer(whole: Federation):
    call = whole.server.call
    before = time.monotonic()
    replies = call("sleep", {"east": b"3", "north-1": b"0"}, 1.0)
    assert time.monotonic() - before < 2.9
    assert replies["north-1"] == b"0"
    assert isinstance(replies["east"], Failure) and replies["east"].kind == "late"
    done = int(call("count", {"east": b""}, 10.0)["east"])
    assert call("raise", {"east": b""}, 5.0) == {"east": Failure("the policy allows no such thing", "refused")}
    assert int(call("count", {"east": b""}, 10.0)["east"]) == done + 2
    assert call("echo", {"nobody": b""}, 1.0) == {"nobody": Failure("not connected", "lost")}


@pytest.mark.slow
def test_a_killed_site_is_left_out_and_comes_back(whole: Federation, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "protofed")
    process = whole.sites.pop("west")
    threading.Timer(1.0, process.kill).start()
    before = time.monotonic()
    replies = whole.server.call("sleep", {"east": b"2", "north-1": b"0", "west": b"50"}, 60.0)
    assert time.monotonic() - before < 40.0  # nobody waits for a site that is gone
    process.wait()
    assert (replies["east"], replies["north-1"]) == (b"2", b"0")
    assert isinstance(replies["west"], Failure) and replies["west"].kind == "lost"
    until(lambda: whole.server.sites() == ["east", "north-1"])
    until(lambda: not flare_processes(whole.kits / "west"))
    whole.join("west")
    assert whole.server.wait_for(SITES, 60) == []
    assert whole.server.call("count", {"west": b""}, 5.0) == {"west": b"1"}  # a new process
    assert [r.getMessage() for r in caplog.records] == ["site west is lost", "site west is connected"]


@pytest.mark.slow
def test_a_killed_job_and_a_killed_server_of_flare_lose_nothing(whole: Federation, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "protofed")
    before = {name: int(reply) for name, reply in whole.server.call("count", dict.fromkeys(SITES, b""), 5.0).items()}
    (job,) = [p for p in flare_processes(whole.kits / "east") if any("worker_process" in w for w in p.cmdline())]
    job.kill()
    until(lambda: "east" not in whole.server.sites())
    assert whole.server.wait_for(SITES, 60) == []
    whole.server.process.popen.kill()
    until(lambda: whole.server.sites() == [])
    assert whole.server.wait_for(SITES, 90) == []
    after = {name: int(reply) for name, reply in whole.server.call("count", dict.fromkeys(SITES, b""), 5.0).items()}
    assert after == {name: count + 1 for name, count in before.items()}  # the sites' own processes have lived on
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "site east is lost"
    assert "FLARE's server has ended (code -9) and is started again" in lines


@pytest.mark.slow
def test_a_site_that_is_added_joins_the_running_federation(whole: Federation):
    whole.join("late", add_site(whole.kits, "late"))
    assert whole.server.wait_for(["late"], 60) == []
    assert whole.server.call("echo", {"late": b"here", "east": b"too"}, 5.0) == {"late": b"here", "east": b"too"}
    whole.leave("late")
    until(lambda: "late" not in whole.server.sites())


@pytest.mark.slow
def test_unknown_certificates_and_wrong_names_are_refused(
    whole: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from protofed.deploy.flare import Process

    port = read_project(whole.kits / "project.toml").port
    strangers = make_kits(Project("study", "localhost", ("stranger",), port=port), tmp_path / "other")
    whole.join("stranger", strangers["stranger"])
    impostor = shutil.copytree(whole.kits / "east", tmp_path / "impostor", ignore=shutil.ignore_patterns("lock"))
    process = Process(impostor, {}, "uid=mallory")
    try:
        until(lambda: "refused: the site east called itself mallory" in caplog.messages)
        log = strangers["stranger"] / "join.txt"
        until(lambda: "the server's certificate is not of this kit's project" in log.read_text())
    finally:
        process.close()
        whole.leave("stranger")
    assert whole.server.sites() == sorted(SITES)

    context = ssl.create_default_context(cafile=whole.kits / "server/startup/rootCA.pem")
    for startup in (None, strangers["stranger"] / "startup"):  # no certificate, and one of another project
        if startup:
            context.load_cert_chain(startup / "client.crt", startup / "client.key")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            knock(context, port)
    until(lambda: "refused: somebody without a certificate of this project" in caplog.messages)


@pytest.mark.slow
def test_jobs_that_bring_code_or_name_other_classes_are_refused(whole: Federation, tmp_path: Path):
    from protofed.deploy.flare import write_job

    session = whole.server._connect(30.0)
    try:
        job = write_job(tmp_path / "code" / "relay", ["east"])
        (job / "relay" / "custom").mkdir()
        (job / "relay" / "custom" / "own.py").write_text("print('here')")
        code = session.submit_job(str(job))
        job = write_job(tmp_path / "class" / "relay", ["east"])
        config = job / "relay" / "config" / "config_fed_client.json"
        config.write_text(
            config.read_text().replace("protofed.deploy.relay.SiteRelay", "protofed.deploy.flare.Process")
        )
        other = session.submit_job(str(job))
        until(lambda: session.get_job_status(code) == "FINISHED:FAILED_TO_RUN")
        assert "BYOC not permitted" in str(session.get_job_meta(code))
        log = whole.kits / "east" / other / "log.txt"
        until(lambda: log.exists() and "ComponentNotAuthorized" in log.read_text())
        with pytest.raises(Exception, match="not authorized"):
            session.ls_target("east")
        session.abort_job(other)
    finally:
        session.close()


@pytest.mark.slow
def test_a_kit_is_used_once_and_nothing_listens_that_need_not(whole: Federation):
    import psutil

    from protofed.deploy.flare import Site

    with pytest.raises(ProtofedError, match="in use by another process"):
        Site(whole.kits / "east", Echo())
    port = read_project(whole.kits / "project.toml").port
    context = ssl.create_default_context(cafile=whole.kits / "server/startup/rootCA.pem")
    public = set()
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1")
                with pytest.raises((ssl.SSLError, ConnectionError)):  # no port talks to those without a certificate
                    knock(context, connection.laddr.port)
                if str(whole.kits / "server") in process.cmdline():
                    public.add(connection.laddr.port)
    assert port in public
    assert len(public) == 2  # the federation's port, and one for the server's own job processes


@pytest.mark.slow
def test_many_calls_at_once_are_kept_apart(whole: Federation):
    replies: dict[int, object] = {}

    def call(number: int) -> None:
        message = str(number).encode()
        replies[number] = whole.server.call("echo", dict.fromkeys(SITES, message), 30.0)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {n: dict.fromkeys(SITES, str(n).encode()) for n in range(20)}
