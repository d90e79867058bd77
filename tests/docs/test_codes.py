"""The page of codes has every code of the source, and no other."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lockstep
from lockstep.cli.terminal import OtherError
from lockstep.codes import CodedEnum
from lockstep.errors import LockstepError, code_of
from lockstep.job import summary
from lockstep.job.page import Phase
from lockstep.tools.doctor.findings import Problem
from lockstep.tools.report.numbers import phase_name

PAGE = Path(__file__).parents[2] / "docs" / "codes.md"
PACKAGE = Path(lockstep.__file__).parent
#: Section of the page -> the enumeration of its codes.
SECTIONS = {
    "How a run ended": "RunEnd",
    "Why a rank failed": "FailureKind",
    "Ranks that hold up the others": "HangKind",
    "What a command is told of": "Notice",
    "Verdicts of the summary": "Bottleneck",
    "Where two runs part": "Parting",
    "What became of an evaluation": "EvaluationEnd",
    "Verify: the verdict": "FindingKind",
    "Verify: where runs begin to differ": "Stage",
    "Verify: why they differ": "Cause",
    "Port: the verdict": "PortVerdict",
    "Port: what became of a line": "RemarkKind",
}


def sections() -> dict[str, list[list[str]]]:
    """Section of the page -> the cells of its rows, without the backticks of the code."""
    found: dict[str, list[list[str]]] = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        rows = re.findall(r"^\| (`.+) \|$", text, re.MULTILINE)
        found[title] = [[cell.strip("`") for cell in row.split(" | ")] for row in rows]
    return found


@cache
def _enumerations() -> dict[str, type[CodedEnum]]:
    """Import the modules that define an error or an enumeration with codes; return the latter by name."""
    for file in PACKAGE.rglob("*.py"):
        if re.search(r"^class \w+\((CodedEnum|.*Error|.*Mismatch|.*Corrupt)\b", file.read_text(), re.MULTILINE):
            importlib.import_module(".".join(["lockstep", *file.relative_to(PACKAGE).with_suffix("").parts]))
    return {each.__name__: each for each in CodedEnum.__subclasses__()}


def _below(cls: type[LockstepError]) -> Iterator[type[LockstepError]]:
    for each in cls.__subclasses__():
        yield each
        yield from _below(each)


def _ours(cls: type) -> bool:
    return (getattr(cls, "__module__", "") or "").startswith("lockstep")


def test_every_error_class_is_on_the_page_with_its_code() -> None:
    _enumerations()
    classes: list[type[LockstepError]] = [LockstepError, *filter(_ours, _below(LockstepError))]
    assert [each.__name__ for each in classes if "code" not in vars(each)] == [], "without a code of their own"
    expected = {each.code: each.__name__ for each in classes}
    assert len(expected) == len(classes), "two classes have one code"
    expected |= {each.code: name for each, name in zip(OtherError, ("OSError", "ValueError"), strict=True)}
    assert {row[0]: row[1] for row in sections()["Errors"]} == expected


@pytest.mark.parametrize("section", SECTIONS)
def test_every_member_is_on_the_page(section: str) -> None:
    enums = _enumerations()
    assert {*enums} == {*SECTIONS.values(), "OtherError"}, "an enumeration has no section"
    assert [row[0] for row in sections()[section]] == [each.code for each in enums[SECTIONS[section]]]


def test_every_finding_of_the_doctor_is_on_the_page_and_found_somewhere() -> None:
    assert [row[0] for row in sections()["Findings of the doctor"]] == [each.value for each in Problem]
    said = "".join(file.read_text() for file in (PACKAGE / "tools" / "doctor").glob("*.py"))
    assert [each.name for each in Problem if f"Problem.{each.name}" not in said] == []


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    for title, rows in sections().items():
        codes = [row[0] for row in rows]
        assert len({*codes}) == len(codes), f"{title}: a code stands there twice"
        for row in rows:
            assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row[0]), row
            assert len(row) == (4 if title == "Errors" else 3), row
            assert all(len(cell) > 5 and cell.endswith((".", ":")) for cell in row[-2:]), row
    assert {*sections()} == {"Errors", *SECTIONS, "Findings of the doctor"}


def test_a_class_of_a_users_has_the_code_of_ours() -> None:
    class Derived(lockstep.ReplicaMismatch):
        code = 3  # type: ignore[assignment]

    assert code_of(Derived("x")) == lockstep.ReplicaMismatch("x").code == "replica-mismatch"
    assert code_of(ValueError("x")) is None


def test_each_phase_has_its_key_and_its_words() -> None:
    text = (PAGE.parent / "json.md").read_text()
    part = text.partition("**Phases.**")[2].partition("##")[0]
    table = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| ([\w –]+) \|$", part, re.MULTILINE)
    columns = {phase: name for name, phases in summary._COLUMNS.items() for phase in phases}
    assert table == [(phase.name.lower(), phase_name(phase), columns.get(phase, "–")) for phase in Phase]
