"""What runs inside NVIDIA FLARE's processes: two relays that pass bytes on, and the start of a process from its kit.

A FLARE job has a process at the server and one at each site. Ours do no work: the server's relay takes messages from the
process that runs the federation and sends them to the sites' relays, and a site's relay hands them to the process that
holds the site's data and model. So neither end is lost with a job, and a job names only these two classes, which are
installed at every participant. Nothing here loads torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
from nvflare.collab import collab

from .channel import SERVER_FOLDER, SITE_SOCKET, Desk, Refused, ask

sys.modules.setdefault("nvflare.app_opt.pt.decomposers", None)  # type: ignore[arg-type]  # else a relay loads torch

POLL = 0.2  # seconds between looks at whether a job is to end


class ServerRelay:
    """The server's end of a job: it calls the sites for the process that runs the federation."""

    @collab.main
    def relay(self) -> None:
        sites = {proxy.name: proxy for proxy in collab.clients}
        context, stop = collab.context, threading.Event()

        def answer(about: dict[str, Any], message: bytes) -> bytes:
            if "stop" in about:
                stop.set()
                return b""
            return _call(sites[about["site"]], about, message)

        path = Path(os.environ[SERVER_FOLDER]) / collab.fl_ctx.get_job_id()
        with Desk(path, answer):
            while not stop.wait(POLL) and not context.is_aborted() and path.exists():
                pass


def _call(site: Any, about: dict[str, Any], message: bytes) -> bytes:
    """Call a site. `Refused` says what went wrong there or on the way."""
    try:
        reply = site(timeout=about["timeout"]).handle(about["function"], message, about["timeout"])
    except Exception as error:  # also RunAborted: the job is ending
        if isinstance(getattr(error, "cause", None), TimeoutError):
            raise Refused("no answer in time", "late") from None
        raise Refused("cannot be reached", "lost") from None
    if "reason" in reply:
        raise Refused(reply["reason"], reply["kind"])
    return reply["reply"]


class SiteRelay:
    """A site's end of a job: it hands what the server sends to the site's own process."""

    @collab.publish
    def handle(self, function: str, message: bytes, timeout: float) -> dict[str, Any]:
        if collab.caller != "server":
            raise PermissionError(f"only the server may call a site, and this is {collab.caller}")
        try:
            about = {"function": function, "timeout": timeout} if function else {}
            return {"reply": ask(os.environ[SITE_SOCKET], about, message, timeout)}
        except Refused as error:
            return {"reason": str(error), "kind": error.kind}
        except TimeoutError:
            return {"reason": "no answer in time", "kind": "late"}
        except OSError as error:
            return {"reason": f"the site's own process is not there ({error.strerror or error})", "kind": "lost"}


def main() -> None:
    """Run FLARE's server or client from a kit, as its start.sh does, until standard input ends."""
    from nvflare.fuel.f3.mpm import MainProcessMonitor

    kit = Path(sys.argv[1])
    role = "server" if (kit / "startup" / "fed_server.json").exists() else "client"
    if role == "server":
        from nvflare.private.fed.app.server import server_train as program
    else:
        from nvflare.private.fed.app.client import client_train as program
    settings = ["secure_train=true", "org=federation", "config_folder=config", *sys.argv[2:]]
    arguments = argparse.Namespace(workspace=str(kit), set=settings, local_rank=0)
    setattr(arguments, f"fed_{role}", f"fed_{role}.json")

    def watch() -> None:
        sys.stdin.buffer.read()  # ends with the process that started this one
        for job in psutil.Process().children(recursive=True):
            job.kill()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    sys.exit(MainProcessMonitor.run(main_func=program.main, run_dir=str(kit), args=arguments))


if __name__ == "__main__":
    main()
