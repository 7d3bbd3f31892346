"""The commands of a federation between real sites: keys, serve, join, try."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ProtofedError
from .console import RunWatch, make_console
from .options import Config, Load, Method, Out, Pairs, given_settings, load_files, nothing_left, out_folder, writing_to

if TYPE_CHECKING:
    from ..data import Dataset
    from ..federation import Record
    from ..outcome import Result

log = logging.getLogger("protofed")
Seconds = Annotated[float, typer.Option(min=0.1, help="The time limit of a round; a site that is late is left out.")]
Quorum = Annotated[int | None, typer.Option(min=1, help="The fewest sites that make a round; default: all.")]
Patience = Annotated[float, typer.Option(min=0, help="How many seconds to wait for sites to connect.")]


def keys(
    sites: Annotated[list[str] | None, typer.Argument(help="The sites' names.")] = None,
    project: Annotated[
        Path | None, typer.Option(help="A file with name, host, port and sites, in place of these.")
    ] = None,
    name: Annotated[str, typer.Option(help="The project's name.")] = "federation",
    host: Annotated[str, typer.Option(help="The server's name or address, as sites reach it.")] = "localhost",
    port: Annotated[int, typer.Option(help="The one port that the server opens.")] = 8002,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder for the kits.")] = Path("kits"),
    add: Annotated[str | None, typer.Option(help="Add a site of this name to the kits that are there.")] = None,
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Without TLS: anybody on the way can read and change messages.")
    ] = False,
    renew: Annotated[str | None, typer.Option(help="Sign a new certificate for this participant.")] = None,
) -> None:
    """Make certificates and start-up kits for a server and its sites: `protofed keys north south --host fl.example.org`."""
    from ..deploy import keys as kits

    kits.need_flare()
    console = make_console()
    if add is not None:
        console.print(str(kits.add_site(out, add)), soft_wrap=True, markup=False)
        return
    if renew is not None:
        console.print(str(kits.renew(out, renew)), soft_wrap=True, markup=False)
        return
    if project is None and not sites:
        raise ProtofedError("no sites given; name them, or give --project FILE")
    chosen = kits.read_project(project) if project else kits.Project(name, host, tuple(sites or ()), port)
    if plain_text:
        chosen = dataclasses.replace(chosen, encrypted=False)
    if not chosen.encrypted:
        log.warning("messages will travel as plain text: anybody on the way can read and change them")
    for participant, kit in kits.make_kits(chosen, out).items():
        console.print(f"{participant}: {kit}", soft_wrap=True, markup=False)


def serve(
    method: Annotated[str | None, typer.Argument(help="The method; not with --resume.")] = None,
    settings: Pairs = None,
    config: Config = None,
    out: Out = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    kits: Annotated[Path, typer.Option(help="The folder that `protofed keys` wrote.")] = Path("kits"),
    data: Annotated[
        Path | None, typer.Option(help="Samples of the server's own, for methods whose server trains.")
    ] = None,
    seconds: Seconds = 600,
    quorum: Quorum = None,
    patience: Patience = 3600,
    metrics: Annotated[
        int | None, typer.Option(help="Serve /metrics (Prometheus) and /health on this port of this machine.")
    ] = None,
    load: Load = None,
) -> None:
    """Run a method between real sites: `protofed serve fedsap rounds=50 --out runs/study`."""
    from ..deploy.flare import Server
    from ..deploy.keys import PROJECT_FILE, need_flare, read_project
    from ..deploy.metrics import Metrics
    from ..deploy.remote import Limits
    from ..deploy.serve import serve as serve_run

    need_flare()
    load_files(load)
    given = given_settings(config, settings)
    if (method is None and "method" not in given) == (resume is None):
        raise ProtofedError("expected a method, or --resume FOLDER to go on with a run")
    project = read_project(kits / PROJECT_FILE)
    limits = Limits(seconds, quorum or len(project.sites), patience)
    folder = writing_to(resume) if resume is not None else out_folder(out, f"{method or 'run'}-sites")
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left(folder))
        samples = None if data is None else _samples(data)
        transport = stack.enter_context(Server(kits / "server", kits / "admin"))
        watch = stack.enter_context(RunWatch(make_console(), method or folder.name).live())
        numbers = None
        if metrics is not None:
            numbers = stack.enter_context(Metrics(transport, len(project.sites), metrics))

        def watch_round(record: Record, rounds: int) -> None:
            watch(record, rounds)
            if numbers is not None:
                numbers.round(record, rounds)

        result = serve_run(
            method, given, transport, project.sites, folder, limits=limits, data=samples, watch=watch_round
        )
    _print_run(result)


def _samples(file: Path) -> Dataset:
    from ..data.sources import load

    return load(str(file))


def _print_run(result: Result) -> None:
    from ..report.page import write_page
    from .run import print_result

    assert result.folder is not None
    page = write_page(result.folder)
    make_console().print(f"report: {page}", soft_wrap=True, markup=False)
    print_result(result)


def join(
    kit: Annotated[Path, typer.Argument(help="This site's start-up kit.")],
    data: Annotated[str, typer.Option(help="This site's data: a file, a folder of images, or a name.")],
    model: Annotated[str, typer.Option(help="This site's network: auto, mlp, cnn?embedding=64 and so on.")] = "auto",
    policy: Annotated[Path | None, typer.Option(help="What may leave this site, a TOML file.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the site keeps its own; default: beside the kit.")] = None,
    load: Load = None,
) -> None:
    """Take part with this site's own data and network, until Ctrl-C: `protofed join kits/north --data north.npz`."""
    import signal
    import threading

    import torch

    from ..data.sources import load as load_data
    from ..deploy.flare import Site
    from ..deploy.keys import check_kit, need_flare
    from ..deploy.node import Node, network_for
    from ..deploy.policy import Policy

    need_flare()
    load_files(load)
    name = check_kit(kit, "client")
    torch.set_num_threads(1)  # as in a simulation: sums depend on it, so it may not depend on the number of cores
    samples = load_data(data)
    rules = Policy.read(policy) if policy else Policy()
    node = Node(name, folder or kit / "node", samples, network_for(samples, model), rules)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    with Site(kit, node):
        make_console().print(f"{name} has joined with {node.model}; Ctrl-C leaves", soft_wrap=True, markup=False)
        ended.wait()


def try_(
    method: Method,
    settings: Pairs = None,
    sites: Annotated[int, typer.Option(min=1, max=20, help="How many sites.")] = 3,
    config: Config = None,
    out: Out = None,
    load: Load = None,
) -> None:
    """Run a federation of real processes on this machine, with certificates: `protofed try fedsap --sites 3 rounds=10`."""
    from ..deploy.trial import try_out
    from ..results.folder import check_free

    load_files(load)
    folder = out_folder(out, f"{method}-trial")
    own = folder.with_name(f"{folder.name}-sites")
    check_free(own)
    given = given_settings(config, settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(nothing_left(folder))
        watch = stack.enter_context(RunWatch(make_console(), method).live())
        result = try_out(method, given, sites, folder, own, watch)
    _print_run(result)
