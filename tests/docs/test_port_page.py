"""The page about porting shows what the command prints of the script that it shows."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.tools.port.port import port_text
from lockstep.tools.port.remarks import PortVerdict
from lockstep.tools.port.report import describe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "port.md"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-25-port.md"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_shows_the_diff_and_the_remarks_as_they_are_printed() -> None:
    script = next(each for each in _blocks("python") if each.startswith("# train.py\n"))
    found = port_text(f"{script}\n", Path("train.py"))
    assert found.verdict is PortVerdict.FULLY
    (diff,), (remarks, _) = _blocks("diff"), _blocks("text")
    assert describe(found, []) == f"train.py: ported fully: 9 places changed\n\n{diff}\n\n{remarks}"


def test_the_table_of_public_scripts_adds_up() -> None:
    """What the page says of them is what the table has."""
    rows = re.findall(r"^\| .+? \| .+? \| (fully|partly|refused) \|", RESULTS.read_text(), re.MULTILINE)
    counts = {verdict: rows.count(verdict) for verdict in ("fully", "partly", "refused")}
    told = re.search(
        r"Of (\d+) scripts (\d+) are ported fully, (\d+) partly, and (\d+) are refused", RESULTS.read_text()
    )
    assert told is not None
    assert [int(each) for each in told.groups()] == [len(rows), *counts.values()]
    assert len(rows) >= 20
