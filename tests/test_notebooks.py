"""The notebooks run from the first cell to the last, and hold what was printed when they were run last."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.marks import soak_but

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
QUICK = tuple(NOTEBOOKS[3:])


def sources(file: Path, kind: str) -> list[str]:
    return [
        "".join(cell["source"]) for cell in json.loads(file.read_text("utf-8"))["cells"] if cell["cell_type"] == kind
    ]


def test_there_are_four():
    assert len(NOTEBOOKS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("file", soak_but(QUICK, NOTEBOOKS), ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path):
    """The code of all cells, one after another in a process of its own; what a cell ends with is shown, as in a notebook."""
    cells = sources(file, "code")
    program = (
        "import ast, json, sys, matplotlib\n"
        "matplotlib.use('Agg')\n"
        "space = {'__name__': '__main__'}\n"
        "for number, source in enumerate(json.load(sys.stdin)):\n"
        "    tree = ast.parse(source)\n"
        "    shown = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None\n"
        "    exec(compile(tree, f'cell {number}', 'exec'), space)\n"
        "    if shown is not None:\n"
        "        value = eval(compile(shown, f'cell {number}', 'eval'), space)\n"
        "        text = (value._repr_html_() if hasattr(value, '_repr_html_') else None) or repr(value)\n"
        "        assert text\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(cells),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_shows_what_came_out_and_its_links_lead_somewhere(file):
    content = json.loads(file.read_text("utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code if "import" not in "".join(cell["source"]) or len(code) == 1)
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    for text in sources(file, "markdown"):
        for link in text.split("](")[1:]:
            assert (file.parent / link.split(")")[0].split("#")[0]).is_file()
