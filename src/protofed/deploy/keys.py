"""Certificates and start-up kits: who may take part in a federation, and what each of them is handed.

A project has one root certificate. It signs a certificate for the server, for the admin and for every site; both ends of
every connection show theirs (mutual TLS). A kit is one participant's folder: `startup/` with the certificate and the
address of the server, and `local/` with what its owner decides. NVIDIA FLARE's provisioning makes them.

No code travels in a federation of ours. So a kit allows a job to name four installed classes and no other, and refuses
jobs that bring code, remote shell commands and the streaming of logs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import tomli_w

from .. import disk
from ..errors import ProtofedError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALLOWED_CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "protofed.deploy.relay.ServerRelay",
    "protofed.deploy.relay.SiteRelay",
)
ADMIN = "admin@federation.local"  # FLARE wants an e-mail address as an admin's name
NAME = re.compile("[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")  # as in host names: certificates have them
RESERVED = ("admin", "authority", "server")  # folders beside the sites' kits
ROOT_DAYS = 3650  # the root certificate's life; a participant's certificate lives 360 days
PROJECT_FILE = "project.toml"
# What the admin of the project may do at a server or site: run jobs and look. All else is refused.
PERMISSIONS = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {
            **dict.fromkeys(("submit_job", "clone_job", "manage_job", "download_job", "view", "operate"), "any"),
            **dict.fromkeys(("byoc", "shell_commands", "server-predeployed-flwr"), "none"),
        }
    },
}


@dataclass(frozen=True)
class Project:
    """A federation's participants.

    `host` is the name or address at which the sites reach the server; `port` is the one port it opens. Without
    `encrypted` the messages travel as plain text, which anybody on the way can read and change.

    Example: `Project("study", "fl.hospital.org", sites=("north", "south"))`
    """

    name: str
    host: str
    sites: tuple[str, ...]
    port: int = 8002
    encrypted: bool = True

    def __post_init__(self) -> None:
        for kind, name in (("project", self.name), *(("site", site) for site in self.sites)):
            if not NAME.fullmatch(name):
                raise ProtofedError(f"{kind} {name!r}: a name has up to 63 letters, digits and, between them, '-'")
        for site in self.sites:
            if site in RESERVED or self.sites.count(site) > 1:
                raise ProtofedError(f"site {site!r}: {'is named twice' if site not in RESERVED else 'a reserved name'}")
        if not self.sites:
            raise ProtofedError(f"project {self.name!r}: it has no sites")
        if not 0 < self.port < 65536:
            raise ProtofedError(f"project {self.name!r}: port={self.port} is not between 1 and 65535")


def need_flare() -> None:
    """Say in one line what is missing where NVIDIA FLARE is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise ProtofedError("NVIDIA FLARE is not installed; install protofed[deploy]")


def read_project(path: Path) -> Project:
    """Read a project from its TOML file: `name`, `host`, `sites`, and if need be `port` and `encrypted`."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        return Project(**{**content, "sites": tuple(content.get("sites", ()))})
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        raise ProtofedError(f"{path}: not a project ({error}); expected name, host, sites, port") from None


def make_kits(project: Project, out: Path) -> dict[str, Path]:
    """Make the root certificate and a kit for the server, the admin and every site.

    Args:
        project: Who takes part.
        out: The folder for the kits. It is made readable for its owner alone; `out/authority` holds the keys of all
            and stays with whoever made it.

    Returns:
        The folder of each kit, by the names `server`, `admin` and those of the sites.
    """
    if (out / "authority").exists():
        raise ProtofedError(f"{out}: has the keys of a project already; add a site or renew a certificate there")
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)
    kits = _provision(project, out, ("server", "admin", *project.sites))
    _write_project(project, out)
    return kits


def add_site(out: Path, site: str) -> Path:
    """Make a kit for one more site, under the root certificate that is there. No other kit changes.

    Returns:
        The folder of the new kit.
    """
    project = read_project(out / PROJECT_FILE)
    project = replace(project, sites=(*project.sites, site))
    kit = _provision(project, out, [site])[site]
    _write_project(project, out)
    return kit


def renew(out: Path, name: str) -> Path:
    """Sign a new certificate with a new key for one participant: `server`, `admin` or a site. `local/` is not touched.

    Returns:
        The folder of the kit.
    """
    project = read_project(out / PROJECT_FILE)
    if name not in ("server", "admin", *project.sites):
        raise ProtofedError(f"{out}: has no kit {name!r}; expected server, admin, {', '.join(project.sites)}")
    state = out / "authority" / project.name / "state" / "cert.json"
    certificates = json.loads(state.read_text(encoding="utf-8"))
    certificates.pop(_subjects(project)[name])
    disk.write_atomically(state, json.dumps(certificates).encode())
    return _provision(project, out, [name])[name]


def check_kit(kit: Path, role: Literal["server", "client", "admin"]) -> str:
    """See that a kit is one of the right sort, that its certificate is its project's, and that it is valid today.

    Returns:
        The name in the certificate: a site's name, or the host name of the server.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.x509.oid import NameOID

    need_flare()
    startup = kit / "startup"
    file = startup / ("server.crt" if role == "server" else "client.crt")
    if not (startup / f"fed_{role}.json").exists():
        raise ProtofedError(f"{kit}: not a kit of a {role} (no startup/fed_{role}.json)")
    try:
        certificate = x509.load_pem_x509_certificate(file.read_bytes())
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes()))
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        raise ProtofedError(f"{file}: not a certificate of this project ({type(error).__name__})") from None
    if not certificate.not_valid_before_utc <= datetime.now(timezone.utc) <= certificate.not_valid_after_utc:
        days = f"{certificate.not_valid_before_utc.date()} to {certificate.not_valid_after_utc.date()}"
        raise ProtofedError(f"{file}: the certificate is valid from {days}; have it renewed")
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def expiry(kit: Path) -> str:
    """The day on which a kit's certificate ends, as `2027-03-31`."""
    from cryptography import x509

    for file in (kit / "startup" / "server.crt", kit / "startup" / "client.crt"):
        if file.exists():
            return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc.date().isoformat()
    raise ProtofedError(f"{kit}: not a kit (no startup/server.crt or startup/client.crt)")


def _subjects(project: Project) -> dict[str, str]:
    """The name in each participant's certificate."""
    return {"server": project.host, "admin": ADMIN, **{site: site for site in project.sites}}


def _write_project(project: Project, out: Path) -> None:
    content = {**asdict(project), "sites": list(project.sites)}
    disk.write_atomically(out / PROJECT_FILE, tomli_w.dumps(content).encode())


def _provision(project: Project, out: Path, wanted: Iterable[str]) -> dict[str, Path]:
    """Let FLARE make every kit anew from the keys in `authority`, and put the wanted ones in their places."""
    authority = out / "authority"
    authority.mkdir(mode=0o700, exist_ok=True)
    subjects = _subjects(project)
    fresh = _flare_kits(project, authority)
    kits = {}
    for name in wanted:
        kit = kits[name] = out / name
        if kit.exists():  # a renewal: what its owner wrote stays
            shutil.rmtree(kit / "startup")
            shutil.move(fresh / subjects[name] / "startup", kit / "startup")
        else:
            shutil.move(fresh / subjects[name], kit)
            if name != "admin":
                _set_local(kit / "local")
        kit.chmod(0o700)
    shutil.rmtree(fresh)
    return kits


def _flare_kits(project: Project, authority: Path) -> Path:
    """The folder of the kits as FLARE's provisioning makes them."""
    need_flare()
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.entity import Project as FlareProject
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provisioner import Provisioner

    sort = "mtls" if project.encrypted else "clear"
    security = {"connection_security": sort}
    flare = FlareProject(project.name, "", props={"api_version": 3, **security})
    # A server or site talks with its own job processes through a port of this machine, which is guarded like the other.
    inside = {"listening_host": {"default_host": "localhost", "scheme": "tcp", "port": 0, "connection_security": sort}}
    ports = {"fed_learn_port": project.port, "admin_port": project.port}
    flare.set_server(project.host, "federation", {"host_names": ["localhost"], **ports, **inside, **security})
    for site in project.sites:
        flare.add_client(site, "federation", {**inside, **security})
    # The admin's kit is used where the server runs, which may not reach itself under its outer name.
    flare.add_admin(ADMIN, "federation", {"role": "project_admin", "connect_to": "localhost", **security})
    builders = [
        WorkspaceBuilder("master_template.yml"),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(ROOT_DAYS),
    ]
    log = io.StringIO()
    with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
        context = Provisioner(str(authority), builders).provision(flare)
    if context.get(CtxKey.BUILD_ERROR):
        raise ProtofedError(f"{authority}: FLARE made no kits: {log.getvalue().strip().splitlines()[-1]}")
    return Path(context[CtxKey.CURRENT_PROD_DIR])


def _set_local(local: Path) -> None:
    """Write what a server or site allows, and what it logs."""
    resources: dict[str, Any] = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources["class_allow_list"] = list(ALLOWED_CLASSES)
    resources["allow_log_streaming"] = False
    resources["components"] = [c for c in resources["components"] if "log" not in c["id"]]
    if "servers" in resources:
        resources["servers"][0] |= {"max_num_clients": 1000, "heart_beat_timeout": 30}
        for component in resources["components"]:
            if component["id"] == "job_scheduler":
                component["args"] = {"max_jobs": 100, "min_schedule_interval": 1.0, "max_schedule_interval": 10.0}
    log: dict[str, Any] = json.loads((local / "log_config.json.default").read_text(encoding="utf-8"))
    log["handlers"]["consoleHandler"]["level"] = "WARNING"
    log["loggers"]["root"]["handlers"] = ["consoleHandler", "logFileHandler", "errorFileHandler"]
    log["loggers"]["nvflare.collab"] = {"level": "WARNING"}  # else it has two lines for every message
    files = {"resources.json": resources, "authorization.json": PERMISSIONS, "log_config.json": log}
    for name, content in files.items():
        (local / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
