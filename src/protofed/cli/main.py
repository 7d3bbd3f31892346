"""The command `protofed`: all its commands, and the one line that it prints where one of them ends early."""

from __future__ import annotations

import errno
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from ..errors import ProtofedError, Stopped
from ..version import __version__
from . import deploy, report, run, show, use
from .advise import advise
from .audit import audit
from .bench import bench
from .console import log_to, make_console
from .demo import demo
from .options import FOLDER

BAD_INPUT, INTERRUPTED = 2, 130  # exit codes


class Ended(Exception):
    """The end of a command that was stopped, or that lacked disk or memory: the line to print, if any, and the exit code."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


class Commands(TyperGroup):
    """The group of all commands. An interrupt or a system error becomes `Ended`, where typer would print nothing."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command of a context."""
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, MemoryError, OSError) as error:
            raise _ended(error, ctx.meta.get(FOLDER)) from error
        except click.NoSuchOption as error:
            raise _hinted(error) from None


def _ended(error: BaseException, folder: Path | None) -> BaseException:
    """The `Ended` for an error in a command that writes `folder`; an error that only a bug can cause stays as it is."""
    advice = ""
    if folder is not None and folder.is_dir():
        advice = f"; `protofed resume {shlex.quote(str(folder))}` goes on from the last checkpoint"
    if isinstance(error, Stopped):
        return Ended(str(error), error.code)
    if isinstance(error, KeyboardInterrupt):
        return Ended(f"stopped{advice}", INTERRUPTED)
    if isinstance(error, MemoryError):
        return Ended(f"error: the memory is not enough ({str(error) or 'no more can be had'}){advice}", BAD_INPUT)
    if isinstance(error, OSError) and error.errno == errno.EPIPE:
        return Ended("", 1)  # the reader of the output has gone
    if isinstance(error, OSError) and error.errno is not None:
        path = error.filename or folder
        return Ended(f"error: {f'{path}: ' if path else ''}{error.strerror}{advice}", BAD_INPUT)
    return error


def _hinted(error: click.NoSuchOption) -> click.NoSuchOption:
    """The error with a hint how a setting is written, where one was given as an option: `--rounds 3`."""
    from ..experiment.settings import hint_for_option

    hint = hint_for_option(error.option_name)
    return click.NoSuchOption(error.option_name, f"{error.message}\n{hint}", ctx=error.ctx) if hint else error


app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        make_console().print(f"protofed {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Prototype-based federated learning: compare methods fairly, simulate quickly."""


COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, run.run, run.compare, run.sweep, run.reproduce, run.claims),
    *(report.table, report.confusion, report.report, report.watch, report.figures, report.pack),
    *(use.predict, use.export),
    *(run.resume, advise, audit, bench, show.methods, show.parts, show.models, show.settings),
    *(deploy.keys, deploy.serve, deploy.join),
)
for command in COMMANDS:
    app.command()(command)
app.command("try")(deploy.try_)
app.add_typer(show.data, name="data")


def main() -> None:
    """Run the command line. A command that ends early prints one line and has an exit code; a traceback is a bug.

    The exit codes are 0: done; 1: something in a result failed; 2: bad input, or no more disk or memory;
    130 and 143: stopped by Ctrl-C and by SIGTERM.
    """
    errors = make_console(stderr=True)
    log_to(errors)
    line, code = "", 0
    try:
        app()
    except ProtofedError as error:
        line, code = f"error: {error}", BAD_INPUT
    except Ended as ended:
        line, code = str(ended), ended.code
    except KeyboardInterrupt:  # before a command began
        line, code = "stopped", INTERRUPTED
    if line:
        style = "red" if line.startswith("error: ") else None
        errors.print(" ".join(line.split()), style=style, markup=False, soft_wrap=True)
    sys.exit(code)
