"""Samples, tokens and FLOPs of a real run, against what can be counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.runs import history
from lockstep.tools.explanation import Explanation
from lockstep.tools.report import numbers, page
from tests.harness import run_ranks
from tests.launching import Finished, run
from tests.ranks.counted import BATCH, TOKENS, WIDTHS

_SCRIPT = Path(__file__).with_name("counted.py")
_PEAK = 1e9
#: What a look at a page in the middle of a step makes of hundreds of steps.
_LOOK = 0.05
#: Of a sample: both products forward, both by the weights, and the last one by its inputs.
_A_SAMPLE = 2 * (2 * (WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]) + WIDTHS[1] * WIDTHS[2])


def _train(folder: Path, kind: str, *options: str) -> tuple[Finished, dict[str, Any]]:
    folder.mkdir()
    command = ["lockstep", "run", "-n", "2", "--log-dir", str(folder), *options, str(_SCRIPT), kind]
    done = run(command, folder, torch=True, LOCKSTEP_QUIET="", LOCKSTEP_TIMES="0.2")
    assert done.code == 0, done
    return done, json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize("kind", ["plain", "slices", "accumulated", "autocast"])
def test_the_flops_of_a_step_are_those_counted_by_hand(tmp_path: Path, kind: str) -> None:
    done, about = _train(tmp_path / "counted", kind, "--peak-flops", "1G")
    summary = about["summary"]
    a_step = _A_SAMPLE * BATCH * (2 if kind == "accumulated" else 1)
    assert summary["flops"] == a_step
    assert "uncounted" not in about
    samples = summary["samples_per_second"]
    assert samples * summary["watched"]["seconds"] == pytest.approx(round(samples * summary["watched"]["seconds"]))
    tokens = summary["tokens_per_second"]
    assert tokens == pytest.approx(TOKENS * samples, rel=_LOOK)
    assert summary["flops_per_second"] == pytest.approx(_A_SAMPLE * samples / 2)
    assert summary["mfu"] == pytest.approx(_A_SAMPLE * samples / 2 / _PEAK, rel=1e-5)
    assert f"{samples:,.0f} samples/s, {tokens:,.0f} tokens/s on 2 ranks" in done.err
    assert "of its peak (MFU)" in done.err
    plain, silent = _train(tmp_path / "plain", kind)
    assert plain.out == done.out, "the same bits"
    assert (silent["summary"]["flops"], silent["summary"]["mfu"]) == (None, None)
    assert "FLOP" not in plain.err


def test_what_looks_at_the_record_tells_it_too(tmp_path: Path) -> None:
    _, about = _train(tmp_path / "counted", "plain", "--peak-flops", "1G")
    found = history.find(str(tmp_path / "counted"), [])
    verdict = Explanation.of(found).to_json()["verdict"]
    for key in ("samples_per_second", "tokens_per_second", "flops", "flops_per_second", "mfu"):
        assert verdict[key] == about["summary"][key]
    assert "of its peak (MFU)" in Explanation.of(found).describe()
    drawn = page.build(numbers.collect(found))
    for shown in ("<dt>tokens</dt>", "<dt>a device</dt>", "<dt>MFU</dt>", "Tokens a second"):
        assert shown in drawn


def test_what_is_compiled_is_not_counted_and_that_is_said(tmp_path: Path) -> None:
    done, about = _train(tmp_path / "counted", "compiled", "--flops")
    assert "FLOPs not counted: torch.compile has compiled parts of the program" in done.err
    assert (about["summary"]["flops"], about["summary"]["mfu"]) == (None, None)
    assert about["summary"]["tokens_per_second"] == pytest.approx(
        TOKENS * about["summary"]["samples_per_second"], rel=_LOOK
    )
    assert _train(tmp_path / "plain", "compiled")[0].out == done.out, "the same bits"


def _refusals() -> list[str]:
    world, said = lockstep.init(), []
    given: list[Any] = [-1, 2**48, 1.5, True]
    for tokens in given:
        with pytest.raises((TypeError, ValueError)) as refused:
            world.count_tokens(tokens)
        said.append(str(refused.value))
    return said


def test_what_is_no_number_of_tokens_is_refused() -> None:
    (said,) = run_ranks(_refusals, 1)
    assert said == [
        "rank 0 of 1: world.count_tokens(-1): expected 0 or more, and less than 2**48",
        "rank 0 of 1: world.count_tokens(281474976710656): expected 0 or more, and less than 2**48",
        "rank 0 of 1: world.count_tokens(1.5): expected a whole number of tokens",
        "rank 0 of 1: world.count_tokens(True): expected a whole number of tokens",
    ]
