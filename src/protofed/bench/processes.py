"""Contenders as the measuring process sees them: they are started once and run one round at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from .memory import tree_seconds

_ELSEWHERE = str(Path(__file__).with_name("elsewhere.py"))
PATIENCE = 20.0  # seconds that a process has to end before it is killed


class Failed(Exception):
    """A contender cannot take part, or has ended early; the message says why."""


def _program(spec: dict[str, Any]) -> list[str]:
    """What Python runs: the contender of the code that is measured, or the program that the spec names."""
    if "program" not in spec:
        return [_ELSEWHERE] if "source" in spec else ["-m", "protofed.bench.contender"]
    return ["-c", f"import runpy; runpy.run_path({spec['program']!r}, run_name='__main__')"]


class Process:
    """One contender process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        """`spec["source"]`, if it is present, is another checkout whose code the contender runs (`elsewhere.py`)."""
        self.about = ""
        self.engine_settings: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *_program(spec), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, **({"PYTHONPATH": str(Path(spec["source"]) / "src")} if "source" in spec else {})},
        )

    def ready(self) -> None:
        """Wait until the contender is ready; raise `Failed` where it cannot take part."""
        answer = self._read()
        if "skip" in answer:
            raise Failed(answer["skip"])
        self.about, self.engine_settings = answer["about"], answer["settled"]

    def ask(self, command: str = "run") -> dict[str, Any]:
        """Send a command (`run` or `memory`) and return the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the process ended with {self._process.returncode}"

    def processor_seconds(self) -> float:
        """The processor's time that the contender and the processes it started have taken; 0 where it is not known."""
        return tree_seconds(self._process.pid)

    def close(self) -> None:
        """End the process, by force where it does not end by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes it has started
            self._process.wait()
        self._errors.close()


class Field:
    """The contenders of one workload by label. A contender that fails is removed, and `skipped` has the reason."""

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}
        self.runners: dict[str, Process] = {}

    def add(self, label: str, spec: dict[str, Any]) -> None:
        """Start a contender and wait until it is ready."""
        self.runners[label] = Process(spec)
        try:
            self.runners[label].ready()
        except Failed as reason:
            self._drop(label, str(reason))

    def __enter__(self) -> Field:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for runner in self.runners.values():
            runner.close()

    def _drop(self, label: str, reason: str) -> None:
        self.skipped[label] = reason
        self.runners.pop(label).close()

    def turn(self, command: str = "run", backwards: bool = False) -> dict[str, dict[str, Any]]:
        """Send a command to all contenders, one after another, and return their answers with their processor's time."""
        replies = {}
        for label, runner in list(self.runners.items())[:: -1 if backwards else 1]:
            try:
                before = runner.processor_seconds()
                replies[label] = runner.ask(command)
                replies[label]["processor_seconds"] = runner.processor_seconds() - before
            except Failed as reason:
                self._drop(label, str(reason))
        return replies
