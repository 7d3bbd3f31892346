"""Runs between real sites over NVIDIA FLARE on loopback with mutual TLS give the bits of a simulation, faults included.

One federation serves all the tests: each site is a `protofed join` process with a data file, a network and a folder of its
own. The server's transport is in the test's process, except where the server itself is killed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protofed.data import Dataset
from protofed.data.sources import load
from protofed.data.types import Samples
from protofed.deploy.keys import Project, make_kits
from protofed.deploy.node import Node, RoundStates, site_data
from protofed.deploy.remote import Limits
from protofed.deploy.serve import PLAIN, serve
from protofed.deploy.transport import LocalTransport
from protofed.experiment.build import engine_inputs, make_federation
from protofed.experiment.run import run_federation
from protofed.experiment.settings import resolve
from protofed.federation.checkpoint import rounds_in
from protofed.results.read import read_folder
from support.small import blobs
from test_deploy import KEYS, MODELS, NAMES, part, run_of, without_clock

pytestmark = pytest.mark.slow

ROUNDS = 3
CLASSES = ("ant", "bee", "cat", "dog")
METHODS: dict[str, dict] = {
    "fedsap": {"alignment": {"start": 0, "end": 2}},
    "fedpagr": {},
    "fedapa": {},
    "protofssl": {"labels": "client", "labels_per_class": 4},
    "fedarpl": {"labels": "server", "fss_window": 1, "fss_mean": 0.0, "gcplca_window": 1, "gcplca_mean": 0.0},
    "fedavg": {},
}
AT_SERVER = ("fedarpl",)  # a server that trains has samples of its own, and needs one architecture at all sites
LIMITS = Limits(seconds=30, quorum=3, patience=90)

# What a test can do to a site, by files in the site's folder. `RUN-ROUND`: after it has trained in this round, and before
# its state is kept, the site sleeps for so many seconds; with 0, it is killed. `network`: it has this network from now on.
FAULTS = """
import os, signal, time
from protofed.deploy.node import Node, RoundStates

keep, describe = RoundStates.__setitem__, Node._describe

def with_fault(self, client, state):
    fault = self.folder.parent.parent / f"{self.folder.name.rpartition('-')[0]}-{self.round}"
    if fault.exists():
        seconds = float(fault.read_text())
        fault.unlink()
        if seconds == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
    keep(self, client, state)

def with_network(self, message):
    if (self.folder / "network").exists():
        self.model = (self.folder / "network").read_text()
    return describe(self, message)

RoundStates.__setitem__, Node._describe = with_fault, with_network
"""


class Federation:
    """Three sites in processes of their own, their files, and the server's transport in this process."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", place: Mapping[str, Sequence[str]] | None = None) -> None:
        """`place` has the words before a site's command, which start it elsewhere."""
        self.place = place or {}
        self.folder, self.kits = folder, folder / "kits"
        self.files = [folder / f"{name}.npz" for name in NAMES]
        for k, file in enumerate(self.files):
            write_data(part(k), file)
        write_data(blobs(per_class=6), folder / "server.npz")
        (folder / "faults.py").write_text(FAULTS)
        make_kits(Project("study", host, NAMES, port=free_port()), self.kits)
        self.sites: dict[str, subprocess.Popen[bytes]] = {}

    def join(self, name: str) -> None:
        """Start a site, or start it again."""
        which = NAMES.index(name)
        words = ["join", self.kits / name, "--data", self.files[which], "--model", MODELS[which]]
        words += ["--folder", self.folder / name, "--load", self.folder / "faults.py"]
        self.sites[name] = self.start(words, name)

    def start(self, words: list, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{log}.log").open("ab") as file:
            command = [*self.place.get(log, ()), sys.executable, "-m", "protofed", *map(str, words)]
            return subprocess.Popen(command, stdout=file, stderr=file, cwd=self.folder)

    def serve(self, method: str | None, given: dict, run: str, **more):
        more = {"limits": LIMITS, **more}
        return serve(method, given, self.server, NAMES, self.folder / run, **more)

    def fault(self, name: str, run: str, round: int, seconds: float) -> None:
        """Let a site sleep in a round of a run, or end where it sleeps for 0 seconds."""
        (self.folder / name / f"{run}-{round}").write_text(str(seconds))

    def networks(self, models: Sequence[str]) -> None:
        """Let the sites have other networks than those with which they have joined."""
        for name, model in zip(NAMES, models, strict=True):
            (self.folder / name / "network").write_text(model)

    def __enter__(self) -> Federation:
        from protofed.deploy.flare import Server

        for name in NAMES:
            self.join(name)
        self.server = Server(self.kits / "server", self.kits / "admin")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.sites.values():
            process.terminate()
        for process in self.sites.values():
            process.wait(30)
        self.server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def write_data(data: Dataset, file: Path) -> None:
    tensors = {key: getattr(data, key) for key in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(file, class_names=np.array(CLASSES), **{key: value.numpy() for key, value in tensors.items()})


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'protofed[deploy]'")
    import psutil

    with Federation(tmp_path_factory.mktemp("federation")) as federation:
        assert federation.server.wait_for(NAMES, 90) == []
        yield federation
        family = psutil.Process().children(recursive=True)
    assert psutil.wait_procs(family, 10)[1] == [], "a process is left"


@pytest.fixture
def federation(started: Federation) -> Federation:
    assert started.server.wait_for(NAMES, 90) == []
    return started


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come to pass"
        time.sleep(0.05)


def simulation(
    method: str, given: dict, files: list[Path], out: Path, own: Dataset | None = None, models: Sequence[str] = MODELS
):
    """A run of the same sites in one process, on the loop engine: its result and its federation.

    `own` are samples of the server's own.
    """
    data = [load(str(file)) for file in files]
    cards = [Node(name, out / "cards", data[k], models[k]).card() for k, name in enumerate(NAMES)]
    shared = {"clients": 3, "models": list(models), "assignment": "round-robin", "data": data[0]}
    settings = resolve(method, {**given, **shared})
    views = [site_data(data[k], settings, cards, k, CLASSES, 4) for k in range(3)]
    clients = [view.clients[k] for k, view in enumerate(views)]
    whole = replace(views[0], clients=clients, held_back=[view.held_back[k] for k, view in enumerate(views)])
    if own is not None:
        whole = replace(whole, server=Samples(own.x_train, own.y_train, torch.arange(len(own.y_train))))
    settings, inputs, names = engine_inputs(settings, whole)
    federation = make_federation(settings.with_engine(PLAIN), inputs.engine(PLAIN), inputs, names)
    result = run_federation(settings.with_engine(PLAIN), federation, out / "run", {"data": "simulation"})
    return result, federation


def states_of(folder: Path, run: str, rounds: int) -> list[dict]:
    """The weights that each site keeps after the last round."""
    states = []
    for client, name in enumerate(NAMES):
        kept = RoundStates(run_of(folder / name, run), client)
        kept.round = rounds + 1
        states.append(dict(kept[client].weights) if client in kept else {})
    return states


def assert_same_weights(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], value) for name, value in other.items())


def assert_same_runs(one: Path, other: Path, but: tuple[str, ...] = ()) -> None:
    """The same rows, and the same state of the server after the last round."""
    [first], [second] = read_folder(one).runs, read_folder(other).runs
    for rows, others in ((first.rounds, second.rounds), (first.clients, second.clients)):
        clean = [[{k: v for k, v in row.items() if k not in but} for row in without_clock(r)] for r in (rows, others)]
        assert clean[0] == clean[1]
    assert first.rounds
    ends = [rounds_in(folder / "checkpoint")[0] / "server.safetensors" for folder in (one, other)]
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.parametrize("method", METHODS)
def test_sites_over_flare_give_the_bits_of_a_simulation(method: str, federation: Federation, tmp_path: Path):
    given = {**KEYS, **METHODS[method], "rounds": ROUNDS}
    data, models = None, MODELS
    if method in AT_SERVER:
        data, models = load(str(federation.folder / "server.npz")), MODELS[:1] * 3
    federation.networks(models)
    result = federation.serve(method, given, method, data=data)
    federation.networks(MODELS)
    expected, loop = simulation(method, given, federation.files, tmp_path, data, models)
    assert without_clock(result.metrics) == without_clock(expected.metrics)
    assert len(result.metrics) == ROUNDS and result.summary["dropped_clients"] == 0
    assert_same_runs(federation.folder / method, tmp_path / "run")
    kept = loop.engine.export()
    for client, weights in enumerate(states_of(federation.folder, method, ROUNDS)):
        assert_same_weights(weights, dict(kept[client].weights) if client in kept else {})


@pytest.mark.parametrize("method", ["fedproto", "fedavg"])
def test_secure_sums_over_flare_give_the_bits_of_a_simulation(method: str, federation: Federation, tmp_path: Path):
    """The sums are of integers, so keys that nobody chose twice change no bit."""
    given, run = {**KEYS, "rounds": 2, "secure": "sums"}, f"secure-{method}"
    result = federation.serve(method, given, run)
    expected, _ = simulation(method, given, federation.files, tmp_path)
    assert without_clock(result.metrics) == without_clock(expected.metrics)
    assert_same_runs(federation.folder / run, tmp_path / "run")
    [read] = read_folder(federation.folder / run).runs
    assert all(row["up"]["secure"] > 0 and row["up"]["prototypes"] == row["up"]["weights"] == 0 for row in read.rounds)
    assert result.summary["dropped_clients"] == 0


def assert_like_a_run_without(lost: str, federation: Federation, run: str, given: dict, folder: Path) -> None:
    """A run is that of sites in one process, of which one cannot be reached in rounds 2 and 3."""
    data = [load(str(file)) for file in federation.files]
    local = LocalTransport({name: Node(name, folder / name, data[k], MODELS[k]) for k, name in enumerate(NAMES)})

    def cut(record, rounds):
        local.lost = {lost: "its link is down"} if record.round in (1, 2) else {}

    serve("fedproto", given, local, NAMES, folder / run, limits=replace(LIMITS, quorum=2), watch=cut)
    assert_same_runs(federation.folder / run, folder / run, but=("dropped",))
    rounds = given["rounds"]
    for one, other in zip(states_of(federation.folder, run, rounds), states_of(folder, run, rounds), strict=True):
        assert one
        assert_same_weights(one, other)


def test_a_site_that_is_killed_while_it_trains_comes_back_with_its_state(
    federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The run is that of a federation which does without this site for two rounds."""
    caplog.set_level(logging.INFO, "protofed")
    given = {**KEYS, "rounds": 5}
    limits = replace(LIMITS, quorum=2)
    federation.fault("south", "killed", 2, 0)

    def bring_back(record, rounds):
        if record.round == 2:
            assert federation.sites["south"].wait(10) == -9
            assert RoundStates(run_of(federation.folder / "south", "killed"), 1).rounds() == [1]
        if record.round == 3:
            federation.join("south")
            assert federation.server.wait_for(NAMES, 60) == []

    federation.serve("fedproto", given, "killed", limits=limits, watch=bring_back)
    [run] = read_folder(federation.folder / "killed").runs
    assert [list(row["dropped"]) for row in run.rounds] == [[], ["1"], ["1"], [], []]
    assert run.rounds[2]["dropped"]["1"] == "south: not connected"
    assert sum(message.startswith("round 2: dropped south: ") for message in caplog.messages) == 1
    assert [m for m in caplog.messages if "south" in m and "site " in m] == [
        "site south is lost",
        "site south is connected",
    ]

    assert_like_a_run_without("south", federation, "killed", given, tmp_path)


def test_a_slow_site_is_left_out_and_named(federation: Federation):
    federation.fault("west", "slow", 2, 4.0)

    def wait(record, rounds):
        if record.round == 2:
            time.sleep(2.0)

    limits = Limits(seconds=3, quorum=2, patience=60)
    result = federation.serve("fedproto", {**KEYS, "rounds": 4}, "slow", limits=limits, watch=wait)
    [run] = read_folder(federation.folder / "slow").runs
    assert [list(row["dropped"]) for row in run.rounds] == [[], ["2"], [], []]
    assert "west: no answer" in run.rounds[1]["dropped"]["2"]
    assert result.summary["rounds"] == 4


def test_a_server_that_is_killed_goes_on_with_the_same_bits(started: Federation, tmp_path: Path):
    """The last test of the federation: its server becomes a `protofed serve` process."""
    given = {**KEYS, "rounds": 6}
    _, loop = simulation("fedproto", given, started.files, tmp_path)
    started.server.close()
    out, kits = started.folder / "cut", ["--kits", started.kits, "--patience", "90", "--seconds", "30"]
    started.fault("north", "cut", 4, 3.0)  # the server waits for it when it is killed
    pairs = [f"{key}={value}" for key, value in given.items()]
    process = started.start(["serve", "fedproto", *pairs, "--out", out, *kits], "serve")
    log = started.folder / "serve.log"
    try:
        until(lambda: (out / "checkpoint" / "round-000003").exists() or process.poll() is not None, 90)
        assert process.poll() is None, log.read_text()
        until(lambda: not (started.folder / "north" / "cut-4").exists())
    finally:
        process.kill()
        process.wait()
    assert json.loads((out / "rounds.jsonl").read_text().splitlines()[-1])["round"] == 3
    process = started.start(["serve", "--resume", out, *kits], "resume")
    try:
        assert process.wait(120) == 0, (started.folder / "resume.log").read_text()
    finally:
        process.kill()
        process.wait()
    assert_same_runs(out, tmp_path / "run")
    assert [row["round"] for row in read_folder(out).runs[0].rounds] == [1, 2, 3, 4, 5, 6]
    for client, weights in enumerate(states_of(started.folder, "cut", 6)):
        assert_same_weights(weights, dict(loop.engine.export()[client].weights))


# --- sites with addresses of their own --------------------------------------------------------------------------------
SERVER = "10.77.0.1"
VETH = "ip link add name one type veth peer name two"


def test_sites_in_network_namespaces_and_one_whose_link_is_down_for_two_rounds(tmp_path: Path):
    """The server and each site have a network of their own, joined by links of which one is taken down."""
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'protofed[deploy]'")
    try:
        probe = subprocess.run(["unshare", "-rn", *VETH.split()], capture_output=True, text=True)
    except FileNotFoundError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    if probe.returncode:
        pytest.skip(f"network namespaces are not allowed here: {probe.stderr.strip()}")
    code = "import sys, pathlib, test_federation_flare as t; t.run_in_namespaces(pathlib.Path(sys.argv[1]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def run_in_namespaces(folder: Path) -> None:
    """Run the federation from the namespace of the server, which this process is in."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    ip("link set lo up")
    holders = {name: subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for name in NAMES}
    try:
        for name, holder in holders.items():
            connect(name, holder.pid)
        place = {name: ["nsenter", "-t", str(holder.pid), "-n"] for name, holder in holders.items()}
        (folder / "sites").mkdir()
        with Federation(folder / "sites", SERVER, place) as federation:
            assert federation.server.wait_for(NAMES, 90) == []
            given = {**KEYS, "rounds": ROUNDS}
            federation.serve("fedsap", given, "whole")
            simulation("fedsap", given, federation.files, folder)
            assert_same_runs(federation.folder / "whole", folder / "run")
            cut_a_link(federation)
    finally:
        for holder in holders.values():
            holder.kill()
            holder.wait()


def cut_a_link(federation: Federation) -> None:
    """A site is out of reach for two rounds. What was sent to it meanwhile may still come, when the link is up again."""
    given = {**KEYS, "rounds": 5}

    def cut(record, rounds):
        if record.round == 1:
            ip("link set west down")
        if record.round == 3:
            ip("link set west up")
            ip(f"route replace {address('west')} dev west")
            assert federation.server.wait_for(NAMES, 90) == []

    federation.serve("fedproto", given, "cut", limits=Limits(seconds=5, quorum=2, patience=60), watch=cut)
    [run] = read_folder(federation.folder / "cut").runs
    assert [list(row["dropped"]) for row in run.rounds] == [[], ["2"], ["2"], [], []]
    assert run.clients[1]["accuracy_head"][2] is None and None not in run.clients[4]["accuracy_head"]
    assert max(RoundStates(run_of(federation.folder / "west", "cut"), 2).rounds()) == 5


def ip(words: str, *before: str) -> None:
    subprocess.run([*before, "ip", *words.split()], check=True)


def address(name: str) -> str:
    return f"10.77.0.{NAMES.index(name) + 2}"


def connect(name: str, pid: int) -> None:
    """Join the namespace of a process to this one by a link, with an address at each end."""
    own = Path("/proc/self/ns/net").readlink()
    until(lambda: Path(f"/proc/{pid}/ns/net").readlink() != own)
    inside = ("nsenter", "-t", str(pid), "-n")
    ip(f"link add name {name} type veth peer name uplink netns {pid}")
    ip(f"addr add {SERVER}/32 dev {name}")
    ip(f"link set {name} up")
    ip(f"route add {address(name)} dev {name}")
    ip("link set lo up", *inside)
    ip(f"addr add {address(name)}/32 dev uplink", *inside)
    ip("link set uplink up", *inside)
    ip(f"route add {SERVER} dev uplink", *inside)
