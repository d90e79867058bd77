"""``lockstep verify`` on scripts with one planted mistake each, and on some without: the verdict, and the reason."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launching import Finished, gone_within, killed_afterwards, run, start, wait_for

_SCRIPTS = Path(__file__).with_name("verified")

#: Script -> the cause that comes first, whether that is sure, and what the evidence has to name.
_PLANTED = {
    "batch_norm": ("plain batch norm", True, "24 of 24 samples"),
    "dropout": ("dropout per rank", True, "drawn in the forward, in 2 (Dropout)"),
    "loss_sum": ("a loss that is a sum", True, "0.5 times"),
    "outside": ("a parameter outside the replica", True, "parameter 4 of SGD"),
    "not_replicated": ("a parameter outside the replica", True, "no gradient is averaged"),
    "numpy_by_rank": ("random numbers drawn apart", True, "NumPy's generator"),
    "drawn_on_one_rank": ("random numbers drawn apart", True, "Python's generator"),
    "unseeded": ("random numbers without a seed", True, "other samples in step 1"),
    "operation": ("an operation that is not deterministic", True, "put_"),
    "data_by_rank": ("data that depends on the rank", True, "samples of 24"),
    "batch_per_rank": ("a batch size per rank", True, "48 samples on 2 ranks, 24 on each"),
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


def test_batches_in_slices_have_equal_bits(tmp_path: Path) -> None:
    done, found = _verify(tmp_path, _SCRIPTS / "right_slices.py", "-n", "2", "-n", "3")
    assert (done.code, found["verdict"]) == (0, "equal bits"), done
    assert len(found["runs"]) == 3, "bits that are equal need no other run"


_ALONE = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    model(torch.ones(4, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("the end")
"""


def _write(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_a_script_that_nothing_cuts_has_equal_bits_and_is_told_so(tmp_path: Path) -> None:
    done, found = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=100)))
    assert (done.code, found["verdict"], found["steps"]) == (0, "equal bits", 8)
    assert len(found["runs"]) == 2
    assert "every rank computed the whole batch" in done.out
    assert "the end" not in done.out + done.err


def test_a_script_that_ends_early_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    done, found = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=3)), "--show-output")
    assert (done.code, found["verdict"], found["steps"]) == (0, "equal bits", 3)
    assert "the script ended by itself after 3 of 8 steps" in done.out
    assert done.err.count("the end") == 2


def test_a_script_without_steps_is_told_so(tmp_path: Path) -> None:
    done, _ = _verify(tmp_path, _write(tmp_path, "print('no training here')"))
    assert done.code == 2
    assert "the run on one rank ended without a step of any torch.optim optimizer" in done.err


def test_a_script_that_fails_is_told_with_its_last_lines(tmp_path: Path) -> None:
    text = _ALONE.format(steps=9).replace(
        "    optimizer.step", "    assert step < 2, 'labels.csv is gone'\n    optimizer.step"
    )
    done, _ = _verify(tmp_path, _write(tmp_path, text))
    assert done.code == 2
    assert "the run on one rank failed with exit code 1, after 2 steps; its last lines:" in done.err
    assert "AssertionError: labels.csv is gone" in done.err
    assert "lockstep-verify-" not in done.err, "a folder that is gone is named"


def test_commands_that_make_no_sense(tmp_path: Path) -> None:
    for options, words in ((["-n", "1"], "-n: expected 2 ranks"), (["--steps", "0"], "--steps 0")):
        done = run(["lockstep", "verify", *options, "train.py"], tmp_path, torch=True)
        assert (done.code, words in done.err) == (2, True), done
    done, _ = _verify(tmp_path, "nowhere.py")
    assert (done.code, "nowhere.py" in done.err) == (2, True), done


_SAVING = """
import torch
import lockstep
world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = lockstep.shard(torch.utils.data.DataLoader(data, batch_size=8))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
log = lockstep.Log(saved, every=1)
for epoch in saved.epochs(2):
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
        saved.save()
"""


def test_what_the_script_has_saved_before_is_neither_read_nor_written(tmp_path: Path) -> None:
    script = _write(tmp_path, _SAVING)
    assert run(["lockstep", "run", "-n", "2", str(script)], tmp_path, torch=True).code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    done, found = _verify(tmp_path, script)
    assert (done.code, found["steps"]) == (0, 8), done
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_large_models_are_compared_by_every_nth_number_and_digests_of_all(tmp_path: Path) -> None:
    script = _write(tmp_path, _ALONE.format(steps=100).replace("Linear(4, 2)", "Linear(4, 200_000)"))
    done, found = _verify(tmp_path, script, "--keep", "1")
    assert (done.code, found["verdict"]) == (0, "equal bits"), done


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_it(tmp_path: Path, temporary: Path, asked: signal.Signals) -> None:
    script = _write(tmp_path, "import time\nopen('here', 'w').close()\ntime.sleep(600)\n")
    with start(["lockstep", "verify", str(script)], tmp_path, torch=True, cold=True, TMPDIR=str(temporary)) as job:
        wait_for((tmp_path / "here").exists, "the script's start")
        processes = job.tree()
        assert len(processes) >= 3
        with killed_afterwards(processes):
            os.kill(job.pid, asked)
            done = job.finish()
            assert done.code == 128 + asked, done
            assert not gone_within(processes, 10)
    assert list(temporary.iterdir()) == []


def test_a_run_that_takes_too_long_is_stopped(tmp_path: Path, temporary: Path) -> None:
    script = _write(tmp_path, "import time\ntime.sleep(600)\n")
    words = ["lockstep", "verify", "--timeout", "6", str(script)]
    with start(words, tmp_path, torch=True, cold=True, TMPDIR=str(temporary)) as job:
        done = job.finish()
    assert done.code == 2
    assert "the run on one rank was stopped after 6 s, the limit (--timeout), and 0 steps" in done.err
    assert list(temporary.iterdir()) == []
