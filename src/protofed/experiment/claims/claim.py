"""A claim of a paper, and the comparisons of rows that test it: `claims/PAPER.toml`, read and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pydantic

from ...errors import ProtofedError, first_problem, unknown
from ..reproduce.preset import Preset, load_preset, measure_column
from ..settings import read_toml

CLAIMS = Path(__file__).parent
PAPERS = {"fedsap": "FedSAP", "fedpagr": "FedPAGR", "fedapa": "FedAPA", "fedarpl": "Fed-ARPL", "protofssl": "ProtoFSSL"}


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Comparison(_Strict):
    """A test: rows of a preset's columns, or of folders of results, that a claim says to differ.

    A row is named by its label; `LABEL @ COLUMN` is one of another column.
    """

    preset: str = ""
    """The preset, `PAPER/TABLE`; its columns are looked for where the ledger looks for them."""
    columns: tuple[str, ...] = ()
    """The columns of the preset; none: all of them."""
    folders: tuple[str, ...] = ()
    """In place of a preset: folders of results, whose rows are taken together."""
    measure: str = "accuracy_head"
    worse_measure: str = ""
    """The measure of the rows that are compared with, where it is another: each method by its own way to predict."""
    better: str
    """The row that the claim says to be the better one."""
    worse: tuple[str, ...]
    """The rows that the paper compares it with."""
    stronger: tuple[str, ...] = ()
    """Rows that the paper has not, and that the better one must be above if its gain is to be the method's: Local, the
    control, a baseline with its own head, more rounds with labels alone."""
    least: float = 0.0
    """The difference that must be passed, in the unit of the table."""
    within: float | None = None
    """In place of a difference: the rows are to differ by no more than this."""
    less_in: str = ""
    """A column in which the same difference is to be smaller."""
    round: int | None = None
    """The round at which rows are compared, in place of the mean of the last five."""


class Claim(_Strict):
    """What a paper says in our words, where it says it, and what would show it."""

    id: str
    where: str
    claim: str
    tests: tuple[Comparison, ...] = ()
    cannot: str = ""
    """Why it cannot be tested here, where it cannot."""
    note: str = ""
    """What a reader should know of the test: setting and size, and what it does not say."""


class ClaimsFile(_Strict):
    """The content of a paper's file."""

    claims: tuple[Claim, ...]


@cache
def load_claims(paper: str) -> tuple[Claim, ...]:
    """Read the claims of one paper: `load_claims("fedsap")[0].claim`."""
    if paper not in PAPERS:
        raise unknown("paper", paper, PAPERS)
    return read_claims(CLAIMS / f"{paper}.toml")


def read_claims(file: Path) -> tuple[Claim, ...]:
    """Read and check a file of claims.

    Args:
        file: The file.

    Returns:
        Its claims. One that names a preset, row, column or measure that does not exist is an error.
    """
    try:
        claims = ClaimsFile(**read_toml(file)).claims
    except pydantic.ValidationError as error:
        raise ProtofedError(f"{file}: {first_problem(error)}") from None
    names = [claim.id for claim in claims]
    if len(set(names)) < len(names):
        raise ProtofedError(
            f"{file}: claims with one id: {', '.join(sorted({n for n in names if names.count(n) > 1}))}"
        )
    presets = cache(load_preset)
    for claim in claims:
        if bool(claim.cannot) == bool(claim.tests):
            raise ProtofedError(f"{file}: {claim.id}: expected either tests, or in `cannot` why there are none")
        for test in claim.tests:
            try:
                _check(test, presets)
            except ProtofedError as error:
                raise ProtofedError(f"{file}: {claim.id}: {error}") from None
    return claims


def _check(test: Comparison, presets: Callable[[str], Preset]) -> None:
    if bool(test.preset) == bool(test.folders):
        raise ProtofedError("a test: expected a preset, or folders of results")
    if not test.worse and not test.stronger:
        raise ProtofedError("a test: expected rows to compare with, in worse or stronger")
    if not test.preset:
        measure_column(test.measure)
        return
    preset = presets(test.preset)
    if preset.file.counted:
        if test.measure not in preset.file.measures:
            raise unknown("measure", test.measure, preset.file.measures)
    else:
        measure_column(test.measure), measure_column(test.worse_measure or test.measure)
    for name in (test.better, *test.worse, *test.stronger):
        label, _, column = name.partition(" @ ")
        if label not in preset.labels:
            raise unknown("row", label, preset.labels)
        if column and column not in preset.file.columns:
            raise unknown("column", column, preset.file.columns)
    for column in (*test.columns, *([test.less_in] if test.less_in else [])):
        if column not in preset.file.columns:
            raise unknown("column", column, preset.file.columns)
