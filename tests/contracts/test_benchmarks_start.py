"""The benchmarks start as the Makefile starts them, so that a broken import is found before a long run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests import warm
from tests.launching import LIMIT

ROOT = Path(__file__).parents[2]
MODULES = re.findall(r"python -m (benchmarks\.\w+)", (ROOT / "Makefile").read_text())


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_of_the_makefile_shows_its_help(module: str) -> None:
    with warm.Process(["-m", module, "--help"], cwd=ROOT, env=os.environ) as process:
        out, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, err
    assert "usage:" in out


def test_the_makefile_has_benchmarks() -> None:
    assert {"benchmarks.launch", "benchmarks.step"} <= set(MODULES)
