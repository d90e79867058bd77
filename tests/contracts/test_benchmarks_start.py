"""The benchmarks start as the Makefile starts them, so that a broken import is found before a long run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = re.findall(r"python -m (benchmarks\.\w+)", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_of_the_makefile_shows_its_help(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


def test_the_makefile_has_benchmarks() -> None:
    assert {"benchmarks.launch", "benchmarks.step"} <= set(MODULES)
