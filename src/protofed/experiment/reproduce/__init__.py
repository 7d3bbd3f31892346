"""The papers' tables and figures as presets: one command runs one, and sets ours beside the paper's.

`preset.py` reads and checks a preset's file, `planning.py` resolves the settings of every cell, `run.py` runs the plan in a
folder, `table.py` sets our numbers beside the paper's, and `ledger.py` collects what has been measured of all presets. The
presets themselves, and the arithmetic of the tables that are counted and not trained, are in `experiment/presets/`.
"""

from .ledger import folder_name, ledger_pages, measured_in, write_ledger
from .planning import Plan, plan
from .preset import PRESETS, SIZES, Preset, Size, available, load_preset, read_preset
from .run import TABLE, begin_plan, is_reproduction, parts_of_columns, resumed_plan, run_plan, stored_reproduction
from .table import Reproduction, differences

__all__ = [
    "PRESETS",
    "SIZES",
    "TABLE",
    "Plan",
    "Preset",
    "Reproduction",
    "Size",
    "available",
    "begin_plan",
    "differences",
    "folder_name",
    "is_reproduction",
    "ledger_pages",
    "load_preset",
    "measured_in",
    "parts_of_columns",
    "plan",
    "read_preset",
    "resumed_plan",
    "run_plan",
    "stored_reproduction",
    "write_ledger",
]
