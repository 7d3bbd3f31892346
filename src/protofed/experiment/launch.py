"""Comparisons as array jobs: each task of the array runs one part of the runs, in one folder that all tasks see.

`submitit` submits the tasks, to Slurm or, to try it, to processes of this host. A task runs `protofed resume FOLDER
--part i/n`, so a task that is started again goes on from the checkpoints of its runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ..errors import ProtofedError
from ..registry import Registry

LOGS = "jobs"  # the folder, inside the comparison's, of what the tasks print


@dataclass(frozen=True)
class Launcher:
    """Where the parts of a comparison run, and how many there are."""

    registry: ClassVar[Registry[Launcher]] = Registry("launcher")
    name: ClassVar[str] = ""
    cluster: ClassVar[str]
    command: ClassVar[str] = ""  # a program without which nothing can be submitted
    waits: ClassVar[bool] = False  # whether the command waits until all tasks have ended

    parts: Annotated[int, Field(ge=0)] = 0
    """The number of tasks; 0: one for each run."""

    def options(self) -> dict[str, Any]:
        """What a task needs, under submitit's names."""
        return {}

    def check(self) -> None:
        """Raise an error where what submits is not installed: the package and, for a cluster, its commands."""
        if importlib.util.find_spec("submitit") is None:
            raise ProtofedError(f"--launcher {self.name}: needs the package submitit: pip install 'protofed[slurm]'")
        if self.command and shutil.which(self.command) is None:
            raise ProtofedError(f"--launcher {self.name}: there is no command {self.command} on this host")

    def submit(self, folder: Path, cells: int, words: Sequence[str] = ()) -> list[Any]:
        """Submit one array of tasks that run a comparison whose folder has been made.

        Args:
            folder: The folder of the comparison or reproduction, which all hosts must see under the same path.
            cells: The number of its runs.
            words: Further words of each task's command, such as `--jobs 2`.

        Returns:
            The jobs, as submitit gives them.

        Example: `Launcher.registry.make("local", {"parts": 2}).submit(Path("runs/digits"), cells=6)`
        """
        self.check()
        import submitit

        folder = folder.resolve()
        count = min(self.parts or cells, cells)
        tasks = [PartTask((str(folder), "--part", f"{number}/{count}", *words)) for number in range(1, count + 1)]
        try:
            executor = submitit.AutoExecutor(folder=folder / LOGS, cluster=self.cluster)
            executor.update_parameters(name=f"protofed-{folder.name}", **self.options())
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
        except (RuntimeError, OSError, NameError, submitit.core.utils.FailedJobError) as error:
            raise ProtofedError(f"--launcher {self.name}: {' '.join(str(error).split())}") from None
        if self.waits:
            for job in jobs:
                job.wait()
        return jobs


@Launcher.registry.register("slurm")
@dataclass(frozen=True)
class Slurm(Launcher):
    """One array job of Slurm. A task that comes to its time limit is queued again and goes on."""

    cluster: ClassVar[str] = "slurm"
    command: ClassVar[str] = "sbatch"

    minutes: Annotated[int, Field(ge=1)] = 240
    """The time limit of a task."""
    cpus: Annotated[int, Field(ge=1)] = 2
    """Cores of a task."""
    memory: Annotated[float, Field(gt=0)] = 8.0
    """Memory of a task, in GB."""
    gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of a task."""
    partition: str = ""
    """The partition of the cluster; empty: its default."""
    account: str = ""
    """The account that pays; empty: the user's default."""
    at_once: Annotated[int, Field(ge=1)] = 256
    """The most tasks that run at the same time."""

    def options(self) -> dict[str, Any]:
        """What a task needs, under submitit's names."""
        chosen: dict[str, Any] = {
            "timeout_min": self.minutes,
            "cpus_per_task": self.cpus,
            "mem_gb": self.memory,
            "slurm_array_parallelism": self.at_once,
        }
        optional = {"gpus_per_node": self.gpus, "slurm_partition": self.partition, "slurm_account": self.account}
        return chosen | {key: value for key, value in optional.items() if value}


@Launcher.registry.register("local")
@dataclass(frozen=True)
class LocalProcesses(Launcher):
    """The same tasks as processes of this host, to try what will be submitted elsewhere."""

    cluster: ClassVar[str] = "local"
    waits: ClassVar[bool] = True

    parts: Annotated[int, Field(ge=0)] = 2
    """The number of tasks; 0: one for each run."""


@dataclass(frozen=True)
class PartTask:
    """A task: the command that runs one part. submitit pickles it, and calls it on the host of the task."""

    words: tuple[str, ...]

    def __call__(self) -> int:
        """Run the command. A part whose runs failed says so in its folder, and the task has then failed too."""
        command = [sys.executable, "-m", "protofed", "resume", *self.words]
        code = subprocess.run(command, env=dict(os.environ), check=False).returncode
        if code:
            raise RuntimeError(f"`{' '.join(command[1:])}` ended with code {code}")
        return code

    def checkpoint(self, *args: Any) -> Any:
        """What submitit queues again where the time of a task is up: the same command, which resumes its runs."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)
