"""The guides from other libraries: their diffs are those of the programs, and what is ported trains the same.

``tests/ecosystem/test_guides.py`` runs the programs as they were before.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from tests.launching import run

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
LIBRARIES = sorted(path.name.removesuffix("_after.py") for path in (GUIDES / "programs").glob("*_after.py"))


def difference(library: str) -> str:
    """The diff of a library's program and what it was ported to."""
    before, after = (
        (GUIDES / "programs" / f"{library}_{when}.py").read_text().splitlines() for when in ("before", "after")
    )
    lines = difflib.unified_diff(before, after, f"{library}_before.py", f"{library}_after.py", n=1, lineterm="")
    return "\n".join(lines)


def printed(text: str) -> list[tuple[str, ...]]:
    """The figures of each epoch: its number, the test loss, and how many are right."""
    return re.findall(r"^epoch (\d+): test loss ([\d.]+), (.+)$", text, re.MULTILINE)


def near(found: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> None:
    """Assert that figures of two ranks are those of one, but for how far some hundred steps take rounding."""
    assert [number for number, *_ in found] == [number for number, *_ in expected]
    losses, others = ([float(loss) for _, loss, _ in each] for each in (found, expected))
    assert losses == pytest.approx(others, rel=0.01)


def test_there_are_guides() -> None:
    assert LIBRARIES == ["accelerate", "lightning"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_shows_the_difference_of_the_programs(library: str) -> None:
    text = (GUIDES / f"{library}.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert shown == [difference(library)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_ported_trains_the_same_on_one_rank_and_on_two_and_resumes(tmp_path: Path, library: str) -> None:
    script, found = str(GUIDES / "programs" / f"{library}_after.py"), []
    for ranks, until in ((1, []), (2, ["--until", "1"]), (2, [])):
        folder = str(tmp_path / f"on-{ranks}")
        words = ["--in-order", "--epochs", "2", "--folder", folder, *until]
        done = run(["lockstep", "run", "-n", str(ranks), script, *words], tmp_path, torch=True, OMP_NUM_THREADS="1")
        assert done.code == 0, done
        found.append(printed(done.out))
    whole, first, rest = found
    assert [number for number, *_ in whole] == ["0", "1"]
    near(first + rest, whole)  # stopped after an epoch, the run resumes with the next one
