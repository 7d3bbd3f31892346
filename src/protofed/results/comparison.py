"""A comparison's folder: `comparison.json` says which variants and seeds it has, `failed.json` which cells failed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import disk
from ..errors import ProtofedError
from .folder import COMPARISON

FAILED = "failed.json"


@dataclass(frozen=True)
class Variant:
    """A method and the settings that make this variant differ; its runs are in `FOLDER-seed…`."""

    label: str
    method: str
    settings: dict[str, Any]
    folder: str

    def cell(self, seed: int) -> str:
        """The name of the folder of this variant's run with a seed."""
        return f"{self.folder}-seed{seed}"


@dataclass(frozen=True)
class Record:
    """What `comparison.json` holds: variants, seeds, each cell's settings, and the columns of the tables."""

    variants: list[Variant]
    seeds: list[int]
    settings: dict[str, dict[str, Any]]
    columns: list[str] | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """As the file holds it."""
        chosen = {} if self.columns is None else {"columns": self.columns}
        content = {
            "variants": [dataclasses.asdict(variant) for variant in self.variants],
            "seeds": self.seeds,
            **chosen,
            "settings": self.settings,
        }
        return json.dumps(content, indent=1).encode()

    def failures_of(self, which: int) -> dict[int, str]:
        """Why cells of a variant failed, by seed."""
        variant = self.variants[which]
        return {seed: self.failed[variant.cell(seed)] for seed in self.seeds if variant.cell(seed) in self.failed}


def is_comparison(folder: Path) -> bool:
    """Whether a folder is a comparison's."""
    return (folder / COMPARISON).is_file()


def read_record(folder: Path) -> Record:
    """Read `comparison.json`, and which cells failed.

    Folders of before variants had names of their own have `methods` in place of `variants`: one for each method.
    """
    file = folder / COMPARISON
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        entries = content.get("variants") or [
            {"label": name, "method": name, "settings": {}, "folder": name} for name in content["methods"]
        ]
        variants = [Variant(**entry) for entry in entries]
        seeds, settings = [int(seed) for seed in content["seeds"]], dict(content.get("settings", {}))
        for variant in variants:
            if (folder / variant.cell(0)).parent != folder:
                raise ValueError(f"folder {variant.folder!r} is not in this folder")
        columns = content.get("columns")
    except FileNotFoundError:
        raise ProtofedError(f"{folder}: not a comparison's folder (it has no {COMPARISON})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtofedError(f"{file}: not readable ({type(error).__name__}: {error})") from None
    return Record(variants, seeds, settings, columns, read_failures(folder))


def read_failures(folder: Path) -> dict[str, str]:
    """Why cells of a comparison failed, by the name of the cell."""
    try:
        content = json.loads((folder / FAILED).read_text(encoding="utf-8"))
        return {str(cell): str(reason) for cell, reason in content.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        raise ProtofedError(f"{folder / FAILED}: not readable ({error})") from None


def write_failures(folder: Path, failures: Mapping[str, str]) -> None:
    """Write which cells failed and why; without any, the file goes."""
    if failures:
        disk.write_atomically(folder / FAILED, (json.dumps(dict(failures), indent=1) + "\n").encode())
    else:
        (folder / FAILED).unlink(missing_ok=True)
