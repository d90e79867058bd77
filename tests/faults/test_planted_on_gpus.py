"""Faults planted in the lines about GPUs, one at a time: on simulated devices some test must notice each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.planted_on_gpus import GPU_FAULTS
from tests.faults.planting import Fault, changed, plant, run_tests

_LIMIT = 300.0


def test_every_fault_has_its_place() -> None:
    for fault in GPU_FAULTS:
        compile(changed(fault), fault.file, "exec")


@pytest.mark.gpu(2)
@pytest.mark.campaign
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in GPU_FAULTS])
def test_somebody_notices(fault: Fault, tmp_path: Path) -> None:
    outcome = run_tests(plant(fault, tmp_path), fault.noticed_by, limit=_LIMIT)
    assert outcome.failed, outcome.text


@pytest.mark.gpu(2)
@pytest.mark.campaign
@pytest.mark.parametrize("tests", sorted({fault.noticed_by for fault in GPU_FAULTS}), ids=" and ".join)
def test_without_a_fault_they_pass(tests: tuple[str, ...]) -> None:
    """Or a test that fails anyhow would be said to have noticed."""
    outcome = run_tests(None, tests, limit=_LIMIT)
    assert outcome.passed
    assert not outcome.failed, outcome.text
