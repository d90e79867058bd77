"""``lockstep verify`` on scripts with one planted mistake each, and on some without: the verdict, and the reason."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import LIMIT, Finished, gone_within, killed_afterwards, run, start, wait_for
from tests.schemas import holds

_SCRIPTS = Path(__file__).with_name("verified")

#: Script -> the cause that comes first, whether that is sure, and what the evidence has to name.
_PLANTED = {
    "batch_norm": ("plain batch norm", True, "24 of 24 samples"),
    "dropout_loss_sum": ("a loss that is a sum, or divided by the number of ranks", True, "0.5 times"),
    "dropout_one_rank_writes": ("a step that is not the same on all ranks", True, "and others when step 4 begins"),
    "loss_sum": ("a loss that is a sum, or divided by the number of ranks", True, "0.5 times"),
    "loss_over_ranks": ("a loss that is a sum, or divided by the number of ranks", True, "divided by the number of"),
    "loss_times_ranks": (
        "gradients that are scaled by the number of ranks",
        True,
        "multiplied by the number of ranks?",
    ),
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
    "masked_mean": ("a loss that is not a mean over samples", True, "weighed by their samples"),
    "token_mean": ("a loss that is not a mean over samples", True, "weighed by their samples"),
    "head_of_zeros": ("a loss that is not a mean over samples", False, "all ranks have the loss 3.91202"),
    "class_weights": ("a loss that is not a mean over samples", True, "weighed by their samples"),
    "normalised": ("statistics of each rank's part of the batch", True, "have a mean of 0"),
    "scaled_by_part": ("statistics of each rank's part of the batch", True, "shifted or scaled by a number of its own"),
    "mixup": ("samples mixed within each rank's part", True, "their sum is the same"),
    "cutmix": ("samples mixed within each rank's part", True, "their sum is the same"),
    "padded_texts": ("samples padded to the longest of each rank's part", False, "a sample is of shape"),
    "gathered": ("a loss over what is gathered from all ranks", True, "they have 8 and 7 samples"),
    "gathered_equally": ("a loss over what is gathered from all ranks", False, "and the loss is that of one rank"),
    "centred": ("a loss over what is gathered from all ranks", False, "and had 7 and 8 samples"),
    "one_rank_writes": ("a step that is not the same on all ranks", True, "and others when step 2 begins"),
    "rate_by_rank": (
        "options of the optimizer that differ between the ranks",
        True,
        "lr is 0.1 on rank 0 and 0.05 on rank 1",
    ),
}


def _verify(folder: Path, script: str | Path, *options: str, **env: str) -> tuple[Finished, dict[str, Any]]:
    command = ["lockstep", "verify", "--steps", "8", "--json", str(folder / "found.json"), *options, str(script)]
    done = run(command, folder, torch=True, **env)
    report = folder / "found.json"
    return done, holds(report.read_text(), "lockstep.verify/1") if report.exists() else {}


def _reason(found: dict[str, Any]) -> str:
    """The evidence that the first reason names."""
    return str(found["contrasts"][0]["reasons"][0]["evidence"])


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


@pytest.mark.parametrize("script", ["right_lockstep", "right_ddp", "right_uneven", "right_lbfgs"])
def test_a_script_without_a_mistake_is_equal_within_rounding(tmp_path: Path, script: str) -> None:
    done, found = _verify(tmp_path, _SCRIPTS / f"{script}.py", "-n", "2", "-n", "3")
    assert done.code == 0, done
    assert [each["verdict"] for each in found["contrasts"]] == ["equal within rounding"] * 2, done.out
    assert all(not each["reasons"] for each in found["contrasts"])


@pytest.mark.parametrize(
    ("script", "cause", "words"),
    [
        ("dropout", "dropout-per-rank", "drawn in the forward, in 2 (Dropout)"),
        ("time_first", "dropout-per-rank", "drawn in the forward, in dropout (Dropout)"),
        ("noise", "random-numbers-per-rank", "between the loader and the model"),
        ("noise_in_the_loss", "random-numbers-per-rank", "between the model and the backward"),
    ],
)
def test_random_numbers_of_each_rank_are_no_mistake(tmp_path: Path, script: str, cause: str, words: str) -> None:
    done, found = _verify(tmp_path, _SCRIPTS / f"{script}.py")
    assert (done.code, found["code"]) == (0, "equal-but-for-random-numbers"), done
    (contrast,) = found["contrasts"]
    assert contrast["all_but_random"] == "equal-within-rounding", done.out
    assert contrast["growth"][-1]["gradients"] < 1e-4, "the second pair of runs is as close as rounding leaves it"
    first = contrast["reasons"][0]
    assert (first["code"], words in first["evidence"]) == (cause, True), done.out
    assert "2 ranks: equal but for random numbers of each rank" in done.out
    assert "for step in loader.steps():" in done.out, "the advice is all that has to be written"


_ADDING = """
extra = torch.nn.Linear(5, 5)
lockstep.replicate(extra)
count = 0
def add():
    global count
    count += 1
    if count == 3 and ALSO:
        optimizer.add_param_group({"params": extra.parameters()})
    return 1.0 + (count > 3 and WRONG) * lockstep.world().rank
"""


@pytest.mark.parametrize(
    ("also", "wrong", "verdict", "words"),
    [
        ("True", "False", "equal within rounding", ""),
        ("True", "True", "different", ""),
        ("lockstep.world().rank == 0", "False", "different", "the optimizers hold"),
    ],
)
def test_parameters_that_are_added_are_compared(
    tmp_path: Path, also: str, wrong: str, verdict: str, words: str
) -> None:
    text = (_SCRIPTS / "right_lockstep.py").read_text()
    adding = _ADDING.replace("ALSO", also).replace("WRONG", wrong)
    text = text.replace("for _ in range(4):\n", f"{adding}\nfor _ in range(4):\n")
    text = text.replace("(model(images), targets)", "(model(images), targets) + add() * extra(torch.ones(5)).sum()")
    (tmp_path / "adds.py").write_text(text)
    done, found = _verify(tmp_path, "adds.py")
    assert found["verdict"] == verdict, done
    if words:
        assert words in _reason(found), done.out


def test_a_script_whose_loss_is_nan_has_no_verdict(tmp_path: Path) -> None:
    text = (_SCRIPTS / "right_lockstep.py").read_text()
    (tmp_path / "lost.py").write_text(text.replace(".backward()", ".neg().sqrt().backward()"))
    done, found = _verify(tmp_path, "lost.py")
    assert (done.code, found) == (2, {}), done
    assert "the loss and the gradients of step 1 are NaN" in " ".join(done.err.split())


def test_a_mistake_under_dropout_is_told_beside_the_dropout(tmp_path: Path) -> None:
    done, found = _verify(tmp_path, _SCRIPTS / "dropout_one_rank_writes.py")
    (contrast,) = found["contrasts"]
    assert (contrast["stage_code"], contrast["first_step"]) == ("differs-between-ranks", 4), done.out
    assert "found with random numbers made alike" in done.out
    assert "from step 1 on (dropout per rank), which is no mistake" in " ".join(done.out.split())


def test_the_lines_that_the_advice_names_give_equal_bits(tmp_path: Path) -> None:
    """The loop of a script with dropout, replaced by the one that the report of the script has."""
    done, _ = _verify(tmp_path, _SCRIPTS / "dropout.py")
    lines = done.out.split("(docs/exactness.md):\n")[1].splitlines()[:6]
    loop = textwrap.dedent("\n".join(lines)).replace("loss_function", "nn.functional.cross_entropy")
    text = (_SCRIPTS / "dropout.py").read_text().replace("lockstep.shard(DataLoader", "(DataLoader")
    advised = text.split("for _ in range(4):")[0] + loop
    done, found = _verify(tmp_path, _write(tmp_path, advised))
    assert (done.code, found["verdict"]) == (0, "equal bits"), done


def test_numbers_that_cannot_be_made_alike_are_said_to_be_in_the_way(tmp_path: Path) -> None:
    text = (_SCRIPTS / "dropout.py").read_text().replace("nn.Dropout(0.2)", "Masked()")
    module = (
        "class Masked(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * torch.poisson(torch.full_like(x, 1.0))\n\n"
    )
    script = _write(tmp_path, text.replace("lockstep.init()", module + "lockstep.init()"))
    done, found = _verify(tmp_path, script)
    assert (done.code, found["code"]) == (1, "different"), done
    assert found["contrasts"][0]["reasons"][0]["code"] == "dropout-per-rank"
    assert "could not be made alike" in done.out


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
    assert "train.py: the first 8 steps on one rank and on 2, " in done.out
    assert "every rank computed the whole batch" in done.out
    assert "the end" not in done.out + done.err


def test_a_script_that_ends_early_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    done, found = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=3)), "--show-output")
    assert (done.code, found["verdict"], found["steps"]) == (0, "equal bits", 3)
    assert "train.py: 3 steps on one rank and on 2, " in done.out
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


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
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


# Scripts that train nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (
            "[each.detach().clone().requires_grad_() for each in model.parameters()]",
            "no parameter that SGD holds had a gradient in 8 steps. None of them is of a model",
        ),
        (
            "torch.nn.Linear(4, 2).parameters()",
            "no parameter that SGD holds had a gradient in 8 steps. None of them is of a model",
        ),
        ("model.parameters(), momentum=0.0, weight_decay=0.0 * 0.0", None),
    ],
)
def test_an_optimizer_of_other_parameters_trains_nothing(tmp_path: Path, held: str, words: str | None) -> None:
    done, _ = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=100).replace("model.parameters()", held)))
    assert done.code == (0 if words is None else 2), done
    assert (words or "equal bits") in done.out + done.err
    assert ("trains nothing" in done.err) is (words is not None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("    optimizer.zero_grad()\n    optimizer.step", "no parameter that SGD holds had a gradient in 8 steps"),
        (
            "    optimizer.zero_grad(False)\n    optimizer.step",
            "has moved in 8 steps, and all gradients are 0. Is a zero",
        ),
        (
            "    optimizer.param_groups[0]['lr'] = 0.0\n    optimizer.step",
            "has moved in 8 steps. Is the learning rate 0",
        ),
    ],
)
def test_steps_that_change_no_parameter_train_nothing(tmp_path: Path, line: str, words: str) -> None:
    done, _ = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=100).replace("    optimizer.step", line)))
    assert done.code == 2, done
    assert words in done.err


def test_an_optimizer_that_holds_one_copy_is_told(tmp_path: Path) -> None:
    held = "[model.weight, model.bias.detach().clone().requires_grad_()]"
    done, _ = _verify(tmp_path, _write(tmp_path, _ALONE.format(steps=100).replace("model.parameters()", held)))
    assert done.code == 0, done
    assert "SGD holds parameters that never had a gradient, and that are of no model" in " ".join(done.out.split())


# Files ----------------------------------------------------------------------------------------------------------------

_RESUMES = """
import os, shutil, sys
import numpy as np
import torch
import lockstep
from safetensors.torch import save_file
world = lockstep.init()
if world.rank == 0:
    os.makedirs("made/deep")  # strictly
    os.rename("older", "oldest")
    os.mkdir("older")
    os.remove("notes.txt")
    shutil.rmtree("cleared")
    os.remove("alias.txt")
    os.link("data.txt", "alias.txt")
    with open("alias.txt", "a") as file:
        file.write("and theirs")
world.barrier()
model = torch.nn.Linear(4, 2)
if os.path.exists("last.pt"):
    model.load_state_dict(torch.load("last.pt"))
lockstep.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = lockstep.shard(torch.utils.data.DataLoader(data, batch_size=8))
for epoch in range(2):
    for (inputs,) in loader:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if world.rank == 0:
            torch.save(model.state_dict(), "last.pt")
            save_file(dict(model.state_dict()), "last.safetensors")
            with open("log.txt", "a") as log:
                log.write(f"{loss.item()}\\n")
            np.save("made/deep/loss.npy", loss.item())
            torch.save(model.state_dict(), "made/new.pt")
            os.replace("made/new.pt", "best.pt")
            os.replace("link.pt", "made/link.pt") if os.path.lexists("link.pt") else None
        optimizer.step()
"""


def _all_files(folder: Path) -> dict[str, tuple[str, bytes | str]]:
    found: dict[str, tuple[str, bytes | str]] = {}
    for path in sorted(folder.rglob("*")):
        if "state" not in path.parts and path.name != "found.json":
            name = str(path.relative_to(folder))
            if path.is_symlink():
                found[name] = ("link", os.readlink(path))
            else:
                found[name] = ("file", path.read_bytes()) if path.is_file() else ("folder", "")
    return found


def test_what_the_script_writes_is_put_back_and_every_run_begins_alike(tmp_path: Path) -> None:
    script = _write(tmp_path, _RESUMES)
    first = torch.nn.Linear(4, 2).state_dict()
    for name in ("last.pt", "best.pt"):
        torch.save(first, tmp_path / name)
    (tmp_path / "last.safetensors").write_bytes(b"mine")
    (tmp_path / "log.txt").write_text("an earlier line\n")
    for name in ("notes.txt", "data.txt", "alias.txt"):
        (tmp_path / name).write_text(f"keep me: {name}")
    (tmp_path / "link.pt").symlink_to("best.pt")
    for folder in ("older", "cleared/below"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "kept.txt").write_text(folder)
    before = _all_files(tmp_path)
    done, found = _verify(tmp_path, script)
    assert (done.code, found["verdict"]) == (0, "equal within rounding"), done
    assert _all_files(tmp_path) == before
    assert found["files_left"] == []
    assert str(tmp_path / "last.pt") in found["files_put_back"]
    assert "put back after each run as before it" in " ".join(done.out.split())


def test_files_are_put_back_after_a_failure_and_an_interrupt_as_well(tmp_path: Path) -> None:
    (tmp_path / "last.pt").write_text("mine")
    fails = "open('last.pt', 'w').write('theirs')\nraise ValueError('no')\n"
    done, _ = _verify(tmp_path, _write(tmp_path, fails))
    assert (done.code, (tmp_path / "last.pt").read_text()) == (2, "mine"), done
    waits = "import time\nopen('last.pt', 'w').write('theirs')\nopen('here', 'w').close()\ntime.sleep(600)\n"
    with start(["lockstep", "verify", str(_write(tmp_path, waits))], tmp_path, torch=True) as job:
        wait_for((tmp_path / "here").exists, "the script's start")
        os.kill(job.pid, signal.SIGINT)
        assert job.finish().code == 128 + signal.SIGINT
    assert (tmp_path / "last.pt").read_text() == "mine"
    assert not (tmp_path / "here").exists()


#: The command with another program for launcher, rank and script, and with ``CHANGE`` before it begins.
_COMMAND = """
import os, signal, subprocess, sys
from lockstep import _proc
from lockstep.cli import main
from lockstep.tools.verify import putback, runs
runs.COMMAND = (sys.executable, "-c", LAUNCHER)
CHANGE
main(["verify", *sys.argv[1:]], prog_name="lockstep")
"""

#: It changes last.pt as a script would.
_LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from lockstep.tools.verify.putback import Journal, journal_of
home = Path(sys.argv[sys.argv.index("lockstep.tools.verify.observed") + 1]).parent
Journal(journal_of(home)).will_write("last.pt")
Path("last.pt").write_text("theirs")
"""


def _verify_by(launcher: str, change: str, folder: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    (folder / "last.pt").write_text("mine")
    script = _write(folder, "")
    command = _COMMAND.replace("LAUNCHER", repr(_LAUNCHER + launcher)).replace("CHANGE", change)
    words = [sys.executable, "-c", command, str(script)]
    env = os.environ | {"TMPDIR": str(temporary)}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=LIMIT)


def test_a_second_ctrl_c_waits_until_the_ranks_have_ended_and_files_are_put_back(
    tmp_path: Path, temporary: Path
) -> None:
    """It comes when the launcher was asked to end, which is free to do so by what the command does after that."""
    os.mkfifo(tmp_path / "free")
    launcher = """
def leave(*_):
    open("free").close()
    Path("last.pt").write_text("theirs, at the end")
    os._exit(75)
signal.signal(signal.SIGTERM, leave)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
    change = """
class Popen(subprocess.Popen):
    def terminate(self):
        super().terminate()
        self.asked = True
    def wait(self, timeout=None):
        if hasattr(self, "asked"):
            signal.raise_signal(signal.SIGINT)
            open("free", "w").close()
        return super().wait(timeout)
subprocess.Popen = Popen
def put_back(folder):
    assert not _proc.children(os.getpid()), "there is somebody who may write yet"
    return putback.put_back(folder)
runs.put_back = put_back
"""
    done = _verify_by(launcher, change, tmp_path, temporary)
    assert (done.returncode, (tmp_path / "last.pt").read_text()) == (128 + signal.SIGINT, "mine"), done
    assert "ending the run on one rank, and putting back the files" in done.stderr
    assert "somebody" not in done.stderr
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_while_a_file_is_put_back_waits_until_it_is(
    tmp_path: Path, temporary: Path, asked: signal.Signals
) -> None:
    change = f"""
copy = putback.shutil.copyfileobj
def copyfileobj(*args):
    signal.raise_signal({asked:d})
    copy(*args)
putback.shutil.copyfileobj = copyfileobj
"""
    done = _verify_by("", change, tmp_path, temporary)
    assert (done.returncode, (tmp_path / "last.pt").read_text()) == (128 + asked, "mine"), done


def test_a_file_that_cannot_be_put_back_is_kept_and_told(tmp_path: Path, temporary: Path) -> None:
    launcher = """
os.unlink("last.pt")
os.makedirs("last.pt/made by another program")
"""
    done = _verify_by(launcher, "", tmp_path, temporary)
    assert done.returncode == 2, done
    (words,) = (shlex.split(line) for line in done.stderr.splitlines() if line.startswith("  cp"))
    (folder,) = temporary.iterdir()
    assert f"{folder} has the copies of files that were not put back" in done.stderr
    assert [*folder.iterdir()] == [Path(words[2]).parent], "only the journal is left"
    shutil.rmtree(tmp_path / "last.pt")
    subprocess.run(words, check=True)
    assert (tmp_path / "last.pt").read_text() == "mine"


def test_no_run_begins_without_a_folder_that_could_not_be_moved_back(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "run").mkdir()
    launcher = """
Journal(journal_of(home)).will_move("run", "run.old")
os.rename("run", "run.old")
os.makedirs("run/made by another program")
"""
    done = _verify_by(launcher, "", tmp_path, temporary)
    assert done.returncode == 2, done
    told = f"  {tmp_path / 'run'}: Directory not empty; it is now at {tmp_path / 'run.old'}"
    assert told in done.stderr.splitlines(), done
    assert (tmp_path / "last.pt").read_text() == "mine"
    assert list(temporary.iterdir()) == []


def test_ranks_without_a_launcher_have_ended_when_files_are_put_back(tmp_path: Path, temporary: Path) -> None:
    launcher = """
rank = os.fork()
if rank:
    Path("rank").write_text(str(rank))
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    change = """
def put_back(folder):
    print("writes yet" if _proc.started(int(open("rank").read())) else "has ended")
    return putback.put_back(folder)
runs.put_back = put_back
"""
    done = _verify_by(launcher, change, tmp_path, temporary)
    assert done.stdout == "has ended\n", done


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_processes_that_a_shell_left_to_the_command_are_left_alone(tmp_path: Path, temporary: Path, end: str) -> None:
    change = """
users = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $! && wait"], stdout=subprocess.PIPE, text=True)
below = int(users.stdout.readline())
def put_back(folder):
    print("lives" if users.poll() is None and _proc.started(below) else "was ended")
    users.kill()
    os.kill(below, signal.SIGKILL)
    return putback.put_back(folder)
runs.put_back = put_back
"""
    done = _verify_by(end, change, tmp_path, temporary)
    assert done.stdout == "lives\n", done


def test_what_other_programs_write_is_told(tmp_path: Path) -> None:
    text = "import subprocess\nsubprocess.run(['sh', '-c', 'echo >> others.txt'], check=True)\n" + _ALONE
    done, found = _verify(tmp_path, _write(tmp_path, text.format(steps=9)))
    assert done.code == 0, done
    assert found["files_left"] == [str(tmp_path / "others.txt")]
    assert "not as before: others.txt, written by another program" in " ".join(done.out.split())


# Scripts that do it their own way -------------------------------------------------------------------------------------

_SPAWNS = """
import {module}
import torch
def work(rank):
    exec(open("inner.py").read())
if __name__ == "__main__":
    {module}.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize("module", [pytest.param("torch.multiprocessing", marks=pytest.mark.campaign), "lockstep"])
def test_ranks_that_a_script_spawns_are_said_not_to_be_seen(tmp_path: Path, module: str) -> None:
    (tmp_path / "inner.py").write_text(_ALONE.format(steps=2))
    done, _ = _verify(tmp_path, _write(tmp_path, _SPAWNS.format(module=module)))
    assert done.code == 2, done
    assert f"it starts ranks by itself ({module}.spawn of work), and these are not seen" in done.err


def test_a_script_that_trains_in_another_process_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(_ALONE.format(steps=2))
    done, _ = _verify(
        tmp_path,
        _write(tmp_path, "import subprocess, sys\nsubprocess.run([sys.executable, 'inner.py'], check=True)\n"),
    )
    assert done.code == 2, done
    assert "It starts processes (subprocess " in done.err
    assert "what they train is not seen" in done.err
    forks = "import os\nif os.fork() == 0:\n    exec(open('inner.py').read())\n    os._exit(0)\nos.wait()\n"
    done, _ = _verify(tmp_path, _write(tmp_path, forks))
    assert done.code == 2, done
    assert "It starts processes (os.fork)" in done.err


def test_scripts_with_arguments_and_modules(tmp_path: Path) -> None:
    text = "import sys\nassert sys.argv[1:] == ['--lr', '0.1', '-n', '7'], sys.argv\n" + _ALONE.format(steps=3)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(text)
    script = _write(tmp_path, text)
    for words in ([str(script)], ["-m", "package"]):
        done = run(["lockstep", "verify", *words, "--lr", "0.1", "-n", "7"], tmp_path, torch=True)
        assert (done.code, "equal bits" in done.out) == (0, True), done


@pytest.mark.parametrize("text", ["import sys\nsys.exit(0)\n", "import os\nos._exit(0)\n"])
def test_scripts_that_leave_at_once(tmp_path: Path, text: str) -> None:
    done, _ = _verify(tmp_path, _write(tmp_path, text))
    assert done.code == 2, done
    assert "ended without a step of any torch.optim optimizer" in done.err


def test_a_script_that_catches_the_end_of_its_run_ends_all_the_same(tmp_path: Path) -> None:
    text = _ALONE.format(steps=100).replace(
        "    optimizer.step()", "    try:\n        optimizer.step()\n    except BaseException:\n        pass"
    )
    done, found = _verify(tmp_path, _write(tmp_path, text))
    assert (done.code, found["steps"]) == (0, 8), done


_FAILS_LATER = """
if world.rank == 0:
    open("done", "w").close()
else:
    import os
    while world.world_size > 1 and not os.path.exists("done"):
        pass
    raise ValueError("too late")
"""


def test_ranks_that_take_different_numbers_of_steps_are_told_apart(tmp_path: Path) -> None:
    text = "import lockstep\nworld = lockstep.init()\n" + _ALONE.format(steps="3 + 2 * (world.world_size - world.rank)")
    done, found = _verify(tmp_path, _write(tmp_path, text))
    assert done.code == 1, done
    assert "rank 0 takes 7 steps, rank 1 takes 5 steps, and one rank alone takes 5" in _reason(found), done.out
    late = text.replace("3 +", "1 +").replace("print(", _FAILS_LATER + "print(")
    done, _ = _verify(tmp_path, _write(tmp_path, late))
    assert done.code == 2, done
    assert "its ranks did not end together: rank 0 took 5 steps, rank 1 took 3 steps" in done.err


@pytest.mark.parametrize("name", ["s3://bucket/train.py", "https://host/train.py", ".", "train.py\n"])
def test_what_is_no_script_is_refused(tmp_path: Path, name: str) -> None:
    done, _ = _verify(tmp_path, name)
    assert done.code == 2, done
    assert "Traceback" not in done.err
    assert done.err.startswith("lockstep verify: ")
