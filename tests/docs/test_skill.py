"""The skill for coding agents: its front matter, and its steps, run as test_code_blocks.py runs all others."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_code_blocks import blocks, run_document
from tests.schemas import holds

SKILL = Path(__file__).parents[2] / "docs" / "SKILL.md"


def test_the_front_matter_has_a_name_and_says_when_to_use_it() -> None:
    head = re.match(r"---\nname: ([a-z-]{1,64})\ndescription: (.{1,1024})\n---\n", SKILL.read_text())
    assert head is not None
    assert head[1] == "lockstep"
    assert "Use it to" in head[2]


def test_its_steps_come_in_order() -> None:
    titles = re.findall(r"^## (\d)\. (.+)$", SKILL.read_text(), re.MULTILINE)
    assert [int(number) for number, _ in titles] == [1, 2, 3, 4, 5, 6]


def test_its_steps_lead_to_what_it_says(tmp_path: Path) -> None:
    """Its blocks are run as a reader would run them, and each step leaves what the next one reads."""
    assert sum(block.reason is None for block in blocks(SKILL)) >= 8
    run_document(SKILL, tmp_path)
    holds((tmp_path / "doctor.json").read_text(), "lockstep.doctor/1")
    verified = holds((tmp_path / "verified.json").read_text(), "lockstep.verify/1")
    assert verified["code"] in ("equal-bits", "equal-within-rounding")
    explained = holds((tmp_path / "explained.json").read_text(), "lockstep.runs.explain/1")
    assert (explained["end"]["code"], explained["program"], explained["steps"]) == ("run-done", ["train.py", "1"], 8)
    assert explained["checkpoints"]["last"]["step"] == 8
    newest = holds((tmp_path / "checkpoints.json").read_text(), "lockstep.checkpoint.ls/1")["checkpoints"][0]
    assert (newest["step"], newest["epoch"]) == (24, 3), "resumed, and not begun again"


def test_every_code_it_names_is_on_the_page_of_codes() -> None:
    page = (SKILL.parent / "codes.md").read_text()
    named = re.findall(r"`((?:run|equal)-[a-z-]+)`", SKILL.read_text())
    assert named
    assert [code for code in named if f"| `{code}` |" not in page] == []
