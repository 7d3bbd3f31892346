"""NVIDIA FLARE as the transport: its processes are started from their kits, and jobs of relays join server and sites.

`Server` is the `Transport` of a federation. It starts FLARE's server, and whenever a site is connected that no running
job covers, it submits a job for it. A site that is lost takes at most its job along; the federation, which runs in this
process, goes on, and the site is called again as soon as it is back. `Site` is a site's side: it starts FLARE's client
and answers with a `Service` of this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .channel import SERVER_FOLDER, SITE_SOCKET, Desk, Refused, ask
from .keys import ADMIN, check_kit
from .transport import Failure, Service, Turns, reason_of, together

logger = logging.getLogger(__name__)

APP = "relay"
ENDED = ("FINISHED", "FAILED", "ABANDONED", "REJECTED")  # how the names of a job's last states begin
PATIENCE = 1.0  # seconds that FLARE may take to say that a site is late
SOON = 0.3  # seconds between looks at which sites can be reached, while a job is starting
LOOK = 1.0  # the same while sites come and go
CALM = 5.0  # the same at other times; a look leaves a line in FLARE's audit.log
BUSY = 30.0  # seconds after the last change of the sites that count as coming and going
MISSED = 2  # pings that a site leaves unanswered before it counts as lost
MISSED_AT_WORK = 10  # the same for a site that has a call under way and still sends heartbeats: its line is busy
HEARTBEAT = 2.0  # seconds between the heartbeats of FLARE's clients
PING = 3.0  # seconds that a site's relay may take to say that it is there
SILENCE = 30.0  # seconds without a sign of the server after which a site starts FLARE's client anew
SHOWN = 3.0  # seconds after a site's last answer from which on a heartbeat shows that it has come back
MOST_JOBS = 4  # with so many jobs the next one is for all sites, and the others end
STOP = 3.0  # seconds that a process may take to let go of its port
START = 60.0  # seconds that FLARE's server, and a job, may take to start
REFUSED_NAME = re.compile(r"authenticated as '([^']*)' but claimed endpoint '([^']*)'")
STRANGER = re.compile(r"Handshake failed.*(CERTIFICATE_VERIFY_FAILED|PEER_DID_NOT_RETURN_A_CERTIFICATE)")


class Process:
    """One of FLARE's long-lived processes, started from its kit. It ends with this process, however that ends.

    Only one process can be started from a kit at a time. FLARE's own log is `log.txt` in the kit, a job's is in the
    folder of the job's name, and what goes to standard output and error is in `console.txt`.
    """

    def __init__(self, kit: Path, variables: Mapping[str, str], *settings: str) -> None:
        self.kit, self.variables, self.settings = kit.resolve(), variables, settings
        self.console = self.kit / "console.txt"
        self._lock = (self.kit / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ProtofedError(f"{kit}: is in use by another process") from None
        self._read = {name: _size(self.kit / name) for name in ("console.txt", "log.txt")}
        self.start()

    def start(self) -> None:
        """Start the process, or start it again."""
        command = [sys.executable, "-m", "protofed.deploy.relay", str(self.kit), *self.settings]
        with self.console.open("ab") as log:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.variables},
                start_new_session=True,
            )

    def running(self) -> bool:
        return self.popen.poll() is None

    def news(self) -> str:
        """What has been logged since the last time."""
        news = []
        for name, start in self._read.items():
            path = self.kit / name
            size = _size(path)
            if size != start:
                with path.open("rb") as file:
                    file.seek(start if size > start else 0)  # a log that is shorter has been begun anew
                    content = file.read()
                self._read[name] = (start if size > start else 0) + len(content)
                news.append(content.decode(errors="replace"))
        return "".join(news)

    def stop(self, seconds: float = 10.0) -> None:
        """Let the process end, and end it if it does not; its job processes go with it."""
        if self.popen.stdin:
            self.popen.stdin.close()
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def close(self) -> None:
        """End the process and let others use the kit."""
        self.stop()
        self._lock.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def keep_at_home(kit: Path) -> None:
    """Let FLARE's server keep its jobs inside its kit, wherever that stands now, and begin without any."""
    path = kit / "local" / "resources.json"
    resources = json.loads(path.read_text(encoding="utf-8"))
    storage = resources["snapshot_persistor"]["args"]["storage"]
    storage["args"]["root_dir"] = str(kit.resolve() / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(kit.resolve() / "jobs")
    for folder in ("jobs", "snapshots"):
        shutil.rmtree(kit / folder, ignore_errors=True)
    disk.write_atomically(path, (json.dumps(resources, indent=2) + "\n").encode())


def need_port(kit: Path) -> None:
    """See that the server's port is free; FLARE's server would start without it and wait for ever."""
    settings = json.loads((kit / "startup" / "fed_server.json").read_text(encoding="utf-8"))
    port = int(settings["servers"][0]["service"]["target"].rpartition(":")[2])
    end = time.monotonic() + STOP  # a server that was just killed may still have it
    while True:
        try:
            return socket.create_server(("", port)).close()
        except OSError as error:
            if time.monotonic() > end:
                raise ProtofedError(f"{kit}: port {port} cannot be opened ({error.strerror})") from None
            time.sleep(0.1)


def write_job(folder: Path, sites: list[str]) -> Path:
    """Write a job of relays between the server and some sites: it holds names of installed classes and no code."""
    controller = {
        "id": "controller",
        "path": "nvflare.collab.runtime.controller.CollabController",
        "args": {"server_obj_id": "relay", "sync_task_timeout": 45},
    }
    executor = {"path": "nvflare.collab.runtime.executor.CollabExecutor", "args": {"client_obj_id": "relay"}}
    relays = [
        {"id": "relay", "path": f"protofed.deploy.relay.{name}", "args": {}} for name in ("ServerRelay", "SiteRelay")
    ]
    files: dict[str, Any] = {
        "meta.json": {
            "name": APP,
            "resource_spec": {},
            "min_clients": 1,
            "deploy_map": {APP: ["server", *sites]},
        },
        f"{APP}/config/config_fed_server.json": {
            "format_version": 2,
            "server": {"task_request_interval": 1.0},  # two tasks start a relay, and none follows
            "workflows": [controller],
            "components": relays[:1],
        },
        f"{APP}/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": relays[1:],
        },
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    return folder


@dataclass
class Job:
    """A job of relays: the sites it was submitted for, and those of them that answer through it now."""

    id: str
    relay: Path
    sites: list[str]
    submitted: float
    started: bool = False  # whether a site has ever answered through it
    alive: set[str] = field(default_factory=set)
    missed: dict[str, int] = field(default_factory=dict)  # pings that a site has not answered, one after the other
    calls: list[str] = field(default_factory=list)  # the sites that have a call under way

    def note(self, replies: Mapping[str, bytes | Failure], patient: Collection[str] = ()) -> None:
        """Note who has answered a ping. A site may miss some, more in `patient`, unless it is known to be gone."""
        for site, reply in replies.items():
            if not isinstance(reply, Failure):
                self.missed[site] = 0
            elif reply.kind == "late" and site in self.missed:
                self.missed[site] += 1
            else:
                self.missed[site] = MISSED_AT_WORK
        self.alive = {s for s, missed in self.missed.items() if missed < (MISSED_AT_WORK if s in patient else MISSED)}
        self.started |= bool(self.alive)


class Server:
    """The server's side of a federation over FLARE: a `Transport`.

    Args:
        kit: The server's kit.
        admin: The admin's kit, with which jobs are submitted.

    Example: `with Server(kits / "server", kits / "admin") as transport: transport.wait_for(["north", "south"], 60)`
    """

    def __init__(self, kit: Path, admin: Path) -> None:
        check_kit(kit, "server")
        check_kit(admin, "admin")
        self.kit, self.admin = kit.resolve(), admin.resolve()
        self.folder = Path(tempfile.mkdtemp(prefix="protofed-"))
        self.jobs: dict[str, Job] = {}
        self.last_seen: dict[str, float] = {}  # when a site last answered through a job
        self._waiting: list[str] = []
        self._changed = time.monotonic()  # when a site last came, went or was slow to answer
        self._warned: set[str] = set()
        self._session: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True, name="flare")
        keep_at_home(self.kit)
        need_port(self.kit)
        self.process = Process(self.kit, {SERVER_FOLDER: str(self.folder)})
        try:
            self._session = self._connect(START)
        except BaseException:
            self.close()
            raise
        self._thread.start()

    def sites(self) -> list[str]:
        return sorted(set[str]().union(*(job.alive for job in list(self.jobs.values()))))

    def call(self, function: str, messages: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        routes = {site: self._route(site) for site in messages}

        def answer(site: str, function: str, message: bytes, timeout: float) -> bytes | Failure:
            job = routes[site]
            if job is None:
                return Failure("not connected")
            job.calls.append(site)
            try:
                return self._ask(job, site, function, message, timeout)
            finally:
                job.calls.remove(site)

        def lost(site: str) -> bool:
            job = routes[site]
            return job is not None and (job.id not in self.jobs or site not in job.alive)

        return together(answer, function, messages, timeout, PATIENCE, lost)

    def wait_for(self, sites: Collection[str], timeout: float) -> list[str]:
        """Wait until these sites can be called, or the time is over. Returns those that are missing."""
        end = time.monotonic() + timeout
        while missing := sorted(set(sites) - set(self.sites())):
            if time.monotonic() > end or self._stop.wait(0.1):
                return missing
        return []

    def close(self) -> None:
        """End the jobs and FLARE's server."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(START)
        self._leave()
        self.process.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self) -> None:
        session, self._session = self._session, None
        with contextlib.suppress(Exception):
            session.close()

    def _connect(self, timeout: float) -> Any:
        """Log in with the admin's kit as soon as the server listens."""
        from nvflare.fuel.flare_api.flare_api import Session

        logging.getLogger("nvflare").setLevel(logging.CRITICAL)  # its state is looked at here every second
        address = json.loads((self.admin / "startup" / "fed_admin.json").read_text(encoding="utf-8"))["admin"]
        end = time.monotonic() + timeout
        while True:
            try:
                socket.create_connection((address["host"], address["port"]), 1.0).close()
                session = Session(ADMIN, str(self.admin))
                session.api._print_hci = lambda message: None
                session.try_connect(5.0)
                return session
            except Exception as error:
                if not self.process.running():
                    raise ProtofedError(f"{self.kit}: FLARE's server has ended; see {self.process.console}") from None
                if time.monotonic() > end or self._stop.wait(0.1):
                    raise ProtofedError(f"{self.kit}: FLARE's server cannot be reached ({reason_of(error)})") from None

    def _route(self, site: str) -> Job | None:
        """The newest job in which a site is alive."""
        return next((job for job in reversed(list(self.jobs.values())) if site in job.alive), None)

    def _ask(self, job: Job, site: str, function: str, message: bytes, timeout: float) -> bytes | Failure:
        try:
            return ask(job.relay, {"site": site, "function": function, "timeout": timeout}, message, timeout + PATIENCE)
        except Refused as error:
            return Failure(str(error), error.kind)
        except TimeoutError:
            return Failure(f"no answer within {timeout:g} s", "late")
        except OSError:
            return Failure("connection lost")

    def _supervise(self) -> None:
        while not self._stop.wait(self._pause()):
            try:
                self._look()
            except Exception as error:  # FLARE's own trouble: try again at the next look
                logger.warning("FLARE: %s", reason_of(error))
                self._leave()

    def _pause(self) -> float:
        """The seconds until the next look."""
        if not all(job.started for job in self.jobs.values()):
            return SOON
        return LOOK if time.monotonic() - self._changed < BUSY else CALM

    def _look(self) -> None:
        """See which sites answer, forget jobs that have ended, and submit one for sites that have none."""
        if not self.process.running():
            logger.warning("FLARE's server has ended (code %s) and is started again", self.process.popen.returncode)
            self._leave()
            self.jobs.clear()
            keep_at_home(self.kit)
            self.process.start()
        if self._session is None:
            self._session = self._connect(START)
        self._report_refusals()
        self._ping()
        heartbeats = self._heartbeats()
        self._forget()
        starting = {site for job in self.jobs.values() if not job.started for site in job.sites}
        reached = set(self.sites()) | starting
        # A site that was lost is still listed for a while: it gets a new job when it has shown itself since.
        shown = {site for site, seen in heartbeats.items() if seen > self.last_seen.get(site, 0.0) + SHOWN}
        waiting = sorted(shown - reached)
        if waiting and waiting == self._waiting:  # nobody has come since the last look: one job for all of them
            self._submit(waiting if len(self.jobs) < MOST_JOBS else sorted({*waiting, *self.sites()}))
        if waiting != self._waiting:
            self._changed = time.monotonic()
        self._waiting = waiting

    def _heartbeats(self) -> dict[str, float]:
        """When each site that FLARE counts as connected last sent a heartbeat."""
        return {client.name: client.last_connect_time for client in self._session.get_connected_client_list()}

    def _report_refusals(self) -> None:
        """Say once of each what FLARE's log tells of those who were not let in."""
        news = self.process.news()
        refused = {f"refused: the site {a} called itself {b}" for a, b in REFUSED_NAME.findall(news)}
        if STRANGER.search(news):
            refused.add("refused: somebody without a certificate of this project")
        for line in sorted(refused - self._warned):
            logger.warning(line)
        self._warned |= refused

    def _ping(self) -> None:
        """Ask every relay of every job whether it is there. Sites that come or go are logged."""
        before = set(self.sites())
        for job in list(self.jobs.values()):
            if job.relay.exists():
                replies = together(functools.partial(self._ask, job), "", dict.fromkeys(job.sites, b""), PING, PATIENCE)
                late = {s for s, reply in replies.items() if isinstance(reply, Failure) and reply.kind == "late"}
                at_work = late.intersection(job.calls, job.alive)
                heartbeats = self._heartbeats() if at_work else {}
                job.note(replies, {s for s in at_work if time.time() - heartbeats.get(s, 0.0) < 5 * HEARTBEAT})
            else:
                job.note(dict.fromkeys(job.sites, Failure("no relay")))
        after = set(self.sites())
        self.last_seen |= dict.fromkeys(after, time.time())
        if before != after or any(job.missed[site] for job in self.jobs.values() for site in job.alive):
            self._changed = time.monotonic()
        for site in sorted(after - before):
            logger.info("site %s is connected", site)
        for site in sorted(before - after):
            logger.warning("site %s is lost", site)

    def _forget(self) -> None:
        """Forget jobs that have ended, and end those whose sites all answer through a newer one."""
        newer: set[str] = set()
        for job in reversed(list(self.jobs.values())):
            age = time.monotonic() - job.submitted
            over = not job.alive and (age > START or str(self._session.get_job_status(job.id)).startswith(ENDED))
            if over or (job.alive and job.alive <= newer and not job.calls):
                del self.jobs[job.id]
                with contextlib.suppress(OSError, Refused):
                    ask(job.relay, {"stop": True}, b"", 1.0)
                if over and age < START:
                    logger.info("the job of %s has ended", ", ".join(job.sites))
            newer |= job.alive

    def _submit(self, sites: list[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            id = self._session.submit_job(str(write_job(Path(folder) / APP, sites)))
        self.jobs[id] = Job(id, self.folder / id, sites, time.monotonic())


class Site:
    """A site's side: FLARE's client, and the service of this process that answers the server.

    Args:
        kit: The site's kit.
        service: What answers. It is handed one message at a time.

    Example: `with Site(kit, service) as site: finished.wait()`
    """

    def __init__(self, kit: Path, service: Service) -> None:
        self.name = check_kit(kit, "client")
        self.kit = kit.resolve()
        self.folder = Path(tempfile.mkdtemp(prefix="protofed-"))
        self.heard = time.monotonic()  # when the server last gave a sign
        turns = Turns(service)

        def answer(about: dict[str, Any], message: bytes) -> bytes:
            self.heard = time.monotonic()
            return turns.handle(about["function"], message, about["timeout"]) if about else b""

        socket = self.folder / "service"
        self._desk = Desk(socket, answer)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._supervise, daemon=True, name="flare")
        try:
            self.process = Process(
                self.kit, {SITE_SOCKET: str(socket)}, f"uid={self.name}", f"heart_beat_interval={HEARTBEAT}"
            )
        except BaseException:
            self._desk.close()
            raise
        self._thread.start()

    def _supervise(self) -> None:
        """Start FLARE's client again when it has ended, or has been without the server for long."""
        warned = False
        while not self._stop.wait(LOOK):
            if not warned and STRANGER.search(self.process.news()):
                logger.error("%s: the server's certificate is not of this kit's project", self.kit)
                warned = True
            if not self.process.running():
                logger.warning("FLARE's client has ended (see %s) and is started again", self.process.console)
                self._stop.wait(LOOK)
                self.process.start()
            elif time.monotonic() - self.heard > SILENCE:
                logger.info("nothing heard of the server for %g s; connecting anew", SILENCE)
                self.process.stop()
                self.process.start()
                self.heard = time.monotonic()

    def close(self) -> None:
        """End FLARE's client and answer no more."""
        self._stop.set()
        self._thread.join()
        self.process.close()
        self._desk.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
