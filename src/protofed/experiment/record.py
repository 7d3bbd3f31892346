"""The files of a comparison: what it is made of (`comparison.json`), and which of its runs failed (`failed.json`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ProtofedError
from ..federation.checkpoint import write_atomically
from .folder import make_folder

FILE = "comparison.json"
FAILED = "failed.json"


@dataclass(frozen=True)
class Variant:
    """A method and the settings that make this variant differ; its runs are in `FOLDER-seed…`."""

    label: str
    method: str
    settings: dict[str, Any]
    folder: str

    def cell(self, seed: int) -> str:
        """The name of one run's folder."""
        return f"{self.folder}-seed{seed}"


@dataclass(frozen=True)
class ComparisonRecord:
    """What `comparison.json` holds: the variants, the seeds, each cell's settings as written, the tables' columns."""

    variants: list[Variant]
    seeds: list[int]
    settings: dict[str, Any]
    columns: list[str] | None = None

    def to_json(self) -> str:
        chosen = {} if self.columns is None else {"columns": self.columns}
        variants = [dataclasses.asdict(variant) for variant in self.variants]
        return json.dumps({"variants": variants, "seeds": self.seeds, **chosen, "settings": self.settings}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ComparisonRecord:
        """Version 0.1 wrote `methods` in place of `variants`: one for each method."""
        record = json.loads(text)
        if "variants" in record:
            variants = [Variant(**variant) for variant in record["variants"]]
        else:
            variants = [Variant(name, name, {}, name) for name in record["methods"]]
        return cls(variants, list(record["seeds"]), dict(record["settings"]), record.get("columns"))


@dataclass(frozen=True)
class ComparisonFolder:
    """The files of a comparison that are not those of its runs: `comparison.json` and `failed.json`."""

    path: Path

    def exists(self) -> bool:
        return (self.path / FILE).is_file()

    @classmethod
    def create(cls, path: Path, record: ComparisonRecord) -> ComparisonFolder:
        """Make a new folder; one that exists already is an error."""
        make_folder(path, {FILE: record.to_json()})
        return cls(path)

    def read(self) -> ComparisonRecord:
        file = self.path / FILE
        try:
            record = ComparisonRecord.from_json(file.read_text(encoding="utf-8"))
            cells = [v.cell(seed) for v in record.variants for seed in record.seeds]
        except FileNotFoundError:
            raise ProtofedError(f"{self.path}: not a comparison's folder (it has no {FILE})") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None
        missing = [cell for cell in cells if cell not in record.settings]
        if missing:
            raise ProtofedError(f"{file}: not readable (settings of the cell {missing[0]!r} are missing)")
        return record

    def write(self, record: ComparisonRecord) -> None:
        """Write the record anew, where it has other seeds than before."""
        write_atomically(self.path / FILE, record.to_json().encode())

    def failures(self) -> dict[str, str]:
        """The cells that have failed, and why."""
        file = self.path / FAILED
        try:
            failures = json.loads(file.read_text(encoding="utf-8"))
            return {str(cell): str(reason) for cell, reason in failures.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError) as error:
            raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None

    def write_failures(self, failures: Mapping[str, str]) -> None:
        """Write the cells that have failed; where there are none the file goes."""
        if failures:
            write_atomically(self.path / FAILED, (json.dumps(failures, indent=1) + "\n").encode())
        else:
            (self.path / FAILED).unlink(missing_ok=True)
