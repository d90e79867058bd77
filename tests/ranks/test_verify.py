"""``lockstep verify`` on scripts with one planted mistake each, and on some without: the verdict, and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Finished, run

_SCRIPTS = Path(__file__).with_name("verified")

#: Script -> the cause that comes first, whether that is sure, and what the evidence has to name.
_PLANTED = {
    "batch_norm": ("plain batch norm", True, "24 of 24 samples"),
    "dropout": ("dropout per rank", True, "numbers are drawn in the forward (2)"),
    "loss_sum": ("a loss that is a sum", True, "0.5 times"),
    "outside": ("a parameter outside the replica", True, "parameter 4 of SGD"),
    "not_replicated": ("a parameter outside the replica", True, "no gradient is averaged"),
    "numpy_by_rank": ("random numbers drawn apart", True, "NumPy's generator"),
    "drawn_on_one_rank": ("random numbers drawn apart", True, "Python's generator"),
    "unseeded": ("random numbers without a seed", True, "other samples in step 1"),
    "operation": ("an operation that is not deterministic", True, "put_"),
    "data_by_rank": ("data that depends on the rank", True, "samples of 24"),
    "batch_per_rank": ("a batch size per rank", True, "48 samples, 24 on each"),
    "padded": ("data that depends on the rank", True, "step 6 trains on 24 samples on 2 ranks, and on 23 on one"),
    "uneven_ddp": ("ranks of unequal batches that count alike", True, "8 and 16 samples"),
    "rate_by_ranks": ("options of the optimizer that depend on the number of ranks", True, "lr is 0.2 on 2 ranks"),
    "masked_mean": ("a loss that is no mean over samples", True, "weighed by their samples"),
}


def _verify(folder: Path, script: str | Path, *options: str, **env: str) -> tuple[Finished, dict[str, Any]]:
    command = ["lockstep", "verify", "--steps", "8", "--json", str(folder / "found.json"), *options, str(script)]
    done = run(command, folder, torch=True, **env)
    report = folder / "found.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize("script", _PLANTED)
def test_a_planted_mistake_is_found_and_named(tmp_path: Path, script: str) -> None:
    cause, sure, words = _PLANTED[script]
    done, found = _verify(tmp_path, _SCRIPTS / f"{script}.py")
    assert done.code == 1, done
    assert found["verdict"] == "different", done.out
    (contrast,) = found["contrasts"]
    first = contrast["reasons"][0]
    assert (first["cause"], first["sure"]) == (cause, sure), done.out
    assert words in first["evidence"], done.out
    assert cause in done.out


@pytest.mark.parametrize("script", ["right_lockstep", "right_ddp", "right_uneven"])
def test_a_script_without_a_mistake_is_equal_within_rounding(tmp_path: Path, script: str) -> None:
    done, found = _verify(tmp_path, _SCRIPTS / f"{script}.py", "-n", "2", "-n", "3")
    assert done.code == 0, done
    assert [each["verdict"] for each in found["contrasts"]] == ["equal within rounding"] * 2, done.out
    assert all(not each["reasons"] for each in found["contrasts"])
