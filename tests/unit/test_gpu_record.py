"""The record of a machine with GPUs: what is read of pytest's output, and the whole of it on simulated GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import gpu_record
from scripts.gpu_record import Outcomes

from lockstep import accelerator
from tests.launching import environment, python_path

ROOT = Path(__file__).parents[2]

_FAILED = """\
..F.s                                                                    [100%]
=================================== FAILURES ===================================
=========================== short test summary info ============================
FAILED tests/ranks/test_gpu_hangs.py::test_named[real] - AssertionError: assert 3 == 4
ERROR tests/unit/test_dp_gpu.py::test_arrive - RuntimeError: CUDA error: out of memory
1 failed, 3 passed, 1 skipped, 7 deselected, 1 error in 12.34s
"""


def test_what_did_not_pass_is_named_with_why() -> None:
    tests = Outcomes.of(1, _FAILED)
    assert tests.counts == {"failed": 1, "passed": 3, "skipped": 1, "deselected": 7, "error": 1}
    assert tests.describe() == [
        "1 failed, 3 passed, 1 skipped, 1 error (pytest ended with 1)",
        "",
        "- `tests/ranks/test_gpu_hangs.py::test_named[real]`: AssertionError: assert 3 == 4",
        "- `tests/unit/test_dp_gpu.py::test_arrive`: RuntimeError: CUDA error: out of memory",
    ]


def test_tests_that_were_not_run_to_the_end_show_what_was_said() -> None:
    tests = Outcomes.of(4, "ERROR: usage: pytest\nno such option: --x\n")
    assert "none was run (pytest ended with 4)" in tests.describe()
    assert "no such option: --x" in "\n".join(tests.describe())
    killed = Outcomes.of(-9, "....")
    assert killed.trouble == "...."


def test_the_page_has_all_of_it() -> None:
    text = gpu_record.page([("GPUs", "2 x Simulated")], Outcomes.of(0, "3 passed in 1.0s"), "| a | b |")
    assert "- GPUs: 2 x Simulated\n" in text
    assert "\n3 passed (pytest ended with 0)\n" in text
    assert text.endswith("## Benchmark\n\n| a | b |\n")


def test_files_with_tests_for_gpus_are_found() -> None:
    found = gpu_record.needing_gpus(ROOT / "tests")
    assert str(ROOT / "tests/ranks/test_gpu_training.py") in found
    assert str(ROOT / "tests/ranks/test_slices.py") in found
    assert str(ROOT / "tests/unit/test_text.py") not in found


@pytest.mark.skipif(accelerator.kind() is not None, reason="this machine has GPUs, real or simulated")
@pytest.mark.parametrize("module", ["scripts.gpu_record", "benchmarks.gpu"])
def test_without_a_gpu_it_says_so_and_writes_nothing(module: str, tmp_path: Path) -> None:
    env = environment(tmp_path, torch=True, PYTHONPATH=python_path(ROOT))
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no GPU here that torch")
    assert os.listdir(tmp_path) == []


@pytest.mark.gpu(2)
@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_all_of_it_on_gpus(gpus: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import tests  # and with them simulated GPUs, where there are some\n")
    env = environment(tmp_path, torch=True, PYTHONPATH=python_path(tmp_path, ROOT))
    out = tmp_path / "made" / "record.md"
    options = ["--quick", "--ranks", "2", "--out", str(out), "tests/unit/test_job_device.py"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_record", *options],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    text = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == text + "\n"
    if gpus == "simulated":
        assert "- GPUs: 4 x Simulated\n" in text
    assert " passed" in text.partition("## Tests marked gpu")[2].partition("## Benchmark")[0]
    for said in (
        "| GPT-2 of 2 layers, bf16, 2 x 16 tokens | 1 | ",
        "| GPT-2 of 2 layers, bf16, 2 x 16 tokens | 2 | ",
        "- a step in a CUDA graph: ",
        "until the second save was on the disk ",
        "- a rank that is stopped: named after ",
        "- a rank that is killed: named after ",
    ):
        assert said in text
