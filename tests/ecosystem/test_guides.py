"""The programs of the guides, as they are written for other libraries and as they are ported: equal figures."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_guides import GUIDES, LIBRARIES, ROOT, near, printed
from tests.launching import python_path, run

pytestmark = pytest.mark.ecosystem

#: Libraries that are not to be had beside this torch, unless somebody installs them by hand; their guides say why.
_BY_HAND = ("composer", "horovod")


def weights(text: str) -> str:
    """The digest of the trained weights."""
    return text.splitlines()[-1].removeprefix("weights ")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_ported_program_has_the_figures_of_the_one_before(tmp_path: Path, library: str) -> None:
    if library in _BY_HAND and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: docs/guides/{library}.md says why")
    programs = GUIDES / "programs"
    words = ["--in-order", "--epochs", "3", "--folder"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT / "tests" / "site")}
    before = subprocess.run(
        [sys.executable, str(programs / f"{library}_before.py"), *words, str(tmp_path / "before")],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert before.returncode == 0, before
    found = printed(before.stdout)
    assert [number for number, *_ in found] == ["0", "1", "2"]
    for ranks in (1, 2):
        command = ["lockstep", "run", "-n", str(ranks), str(programs / f"{library}_after.py"), *words]
        after = run([*command, str(tmp_path / f"after-{ranks}")], tmp_path, torch=True, OMP_NUM_THREADS="1")
        assert after.code == 0, after
        if ranks == 1:
            assert printed(after.out) == found
            assert weights(after.out) == weights(before.stdout), "the same bits"
        else:
            near(printed(after.out), found)
