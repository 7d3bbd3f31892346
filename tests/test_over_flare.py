"""Federations over NVIDIA FLARE, in a network of their own where that is allowed: nothing but loopback."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.marks import soak_but

TESTS = Path(__file__).parent / "flare"
ALONE = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def alone() -> list[str]:
    """The words that give a command a network of its own; none where the system does not allow it."""
    try:
        allowed = subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    except OSError:
        allowed = False
    return ALONE if allowed else []


@pytest.mark.slow
@pytest.mark.parametrize("file", soak_but("test_flare.py", sorted(file.name for file in TESTS.glob("test_*.py"))))
def test_federations_over_flare(file, tmp_path):
    if importlib.util.find_spec("nvflare") is None:
        pytest.skip("NVIDIA FLARE is not installed (protofed[deploy])")
    home = {"HOME": str(tmp_path), "NVFLARE_POC_WORKSPACE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS / file)]
    for _ in range(2):  # time limits of real processes on a busy machine deserve a second try
        done = subprocess.run(
            [*alone(), *words],
            env={**os.environ, **home},
            capture_output=True,
            text=True,
            timeout=420,
            cwd=TESTS.parent.parent,
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
