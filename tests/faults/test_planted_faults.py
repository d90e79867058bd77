"""Faults planted in a copy of the package, one at a time: some test must notice each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted_aside import ASIDE_FAULTS
from tests.faults.planted_in_checkpoints import CHECKPOINT_FAULTS
from tests.faults.planted_in_gradients import GRADIENT_FAULTS
from tests.faults.planted_in_jobs import JOB_FAULTS
from tests.faults.planted_in_recorder import RECORDER_FAULTS
from tests.faults.planted_in_runs import RUN_FAULTS
from tests.faults.planted_on_gpus import GPU_FAULTS
from tests.faults.planting import Fault, changed, plant, run_tests

_LIMIT = 300.0

FAULTS = [*CHECKPOINT_FAULTS, *RUN_FAULTS, *JOB_FAULTS, *RECORDER_FAULTS, *GRADIENT_FAULTS, *ASIDE_FAULTS]
QUICK = {"each rank stops at a step of its own"}


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.name, marks=() if f.name in QUICK else pytest.mark.campaign) for f in FAULTS],
)
def test_somebody_notices(fault: Fault, tmp_path: Path) -> None:
    outcome = run_tests(plant(fault, tmp_path), fault.noticed_by, limit=_LIMIT)
    assert outcome.failed, outcome.text


def test_every_fault_has_its_place() -> None:
    for fault in FAULTS:
        compile(changed(fault), fault.file, "exec")


def test_the_document_says_how_many_there_are() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "reliability.md").read_text().split())
    assert f"plants {len(FAULTS)} faults in copies of the package" in page
    assert f"and {len(GPU_FAULTS)} more in the lines about GPUs" in page
    assert f"copies of the checkpoint code, of which there are {len(CHECKPOINT_FAULTS)} now" in page


@pytest.mark.campaign
@pytest.mark.parametrize("tests", sorted({fault.noticed_by for fault in FAULTS}), ids=" and ".join)
def test_without_a_fault_they_pass(tests: tuple[str, ...]) -> None:
    """Or a test that fails anyhow would be said to have noticed."""
    outcome = run_tests(None, tests, limit=_LIMIT)
    assert outcome.passed
    assert not outcome.failed, outcome.text
