"""The guides from other libraries: their diffs are those of the programs, and what is ported trains the same.

``tests/ecosystem/test_guides.py`` runs the programs as they were before. The task files for SkyPilot and dstack start
two nodes on this machine; ``make tasks`` holds them to the classes that read them there.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import knobs
from lockstep.job.files import EXIT_SAVED
from lockstep.launch.ports import free_port
from tests import warm
from tests.faults.machines import SOON
from tests.launching import LIMIT, PATIENT, python_path, run, start

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
LIBRARIES = sorted(path.name.removesuffix("_after.py") for path in (GUIDES / "programs").glob("*_after.py"))


def difference(library: str) -> str:
    """The diff of a library's program and what it was ported to."""
    before, after = (
        (GUIDES / "programs" / f"{library}_{when}.py").read_text().splitlines() for when in ("before", "after")
    )
    lines = difflib.unified_diff(before, after, f"{library}_before.py", f"{library}_after.py", n=1, lineterm="")
    return "\n".join(lines)


def printed(text: str) -> list[tuple[str, ...]]:
    """The figures of each epoch: its number, the test loss, and how many are right."""
    return re.findall(r"^epoch (\d+): test loss ([\d.]+), (.+)$", text, re.MULTILINE)


def near(found: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> None:
    """Assert that figures of two ranks are those of one, but for how far some hundred steps take rounding."""
    assert [number for number, *_ in found] == [number for number, *_ in expected]
    losses, others = ([float(loss) for _, loss, _ in each] for each in (found, expected))
    assert losses == pytest.approx(others, rel=0.01)


def test_there_are_guides() -> None:
    assert LIBRARIES == ["accelerate", "composer", "fabric", "horovod", "lightning"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_shows_the_difference_of_the_programs(library: str) -> None:
    text = (GUIDES / f"{library}.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
    assert shown == [difference(library)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_ported_trains_the_same_on_one_rank_and_on_two_and_resumes(tmp_path: Path, library: str) -> None:
    script, found = str(GUIDES / "programs" / f"{library}_after.py"), []
    for ranks, until in ((1, []), (2, ["--until", "1"]), (2, [])):
        folder = str(tmp_path / f"on-{ranks}")
        words = ["--in-order", "--epochs", "2", "--folder", folder, *until]
        done = run(["lockstep", "run", "-n", str(ranks), script, *words], tmp_path, torch=True, OMP_NUM_THREADS="1")
        assert done.code == 0, done
        found.append(printed(done.out))
    whole, first, rest = found
    assert [number for number, *_ in whole] == ["0", "1"]
    near(first + rest, whole)  # stopped after an epoch, the run resumes with the next one


def test_the_program_for_horovod_has_the_figures_of_the_ported_one_where_it_is_alone(tmp_path: Path) -> None:
    """Horovod itself is not at hand: its last release does not compile beside this torch."""
    programs, found = GUIDES / "programs", []
    words = ["--in-order", "--epochs", "2", "--folder"]
    paths = python_path(ROOT, Path(__file__).parent / "stand_ins")
    for until in (["--until", "1"], []):  # stopped after an epoch, it resumes with the next one
        command = [
            "tests.ecosystem.alone",
            str(programs / "horovod_before.py"),
            *words,
            str(tmp_path / "before"),
            *until,
        ]
        with start(command, tmp_path, torch=True, cold=True, OMP_NUM_THREADS="1", PYTHONPATH=paths) as job:
            done = job.finish()
        assert done.code == 0, done
        found.append(done.out.splitlines())
    command = ["lockstep", "run", "-n", "1", str(programs / "horovod_after.py"), *words, str(tmp_path / "after")]
    after = run(command, tmp_path, torch=True, OMP_NUM_THREADS="1")
    assert after.code == 0, after
    first, rest = found
    assert [*first[:-1], *rest] == after.out.splitlines(), "the same bits in all weights"


#: The file that a guide shows, and the variables that each node of its run sees.
_TASKS = {"skypilot": "digits.sky.yaml", "dstack": "digits.dstack.yml"}

#: A run that is asked to stop at its seventh step, on the second machine, the first time.
_TRAIN = """
import argparse
import os
import pathlib
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=pathlib.Path)
folder = parser.parse_args().folder
world = lockstep.init()
model = lockstep.replicate(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=4))
saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
began = None
for epoch in saved.epochs(4):
    began = saved.step if began is None else began
    for (inputs,) in loader:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saved.step == 7 and world.node_rank == 1 and began == 0:
            os.kill(os.getpid(), getattr(signal, os.environ["ASKED_BY"]))
world.print(f"{world.world_size} ranks, steps {began} to {saved.step}")
"""


def _read_task(name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with kubernetes-validate, which is not installed")
    task: dict[str, Any] = yaml.safe_load((GUIDES / "programs" / _TASKS[name]).read_text())
    return task


@pytest.mark.parametrize("name", _TASKS)
def test_the_page_shows_the_task_as_it_is(name: str) -> None:
    shown = re.findall(r"^```yaml\n(.*?)```$", (GUIDES / f"{name}.md").read_text(), re.MULTILINE | re.DOTALL)
    assert (GUIDES / "programs" / _TASKS[name]).read_text() in shown


def test_a_task_is_started_again_after_a_save() -> None:
    recovery = _read_task("skypilot")["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [EXIT_SAVED]}
    assert _read_task("dstack")["retry"]["on_events"] == ["no-capacity", "interruption", "error"]  # any exit code


def _section(name: str) -> tuple[str, dict[str, str]]:
    """What a node of the task runs, and the variables that the task itself sets."""
    task = _read_task(name)
    if name == "skypilot":
        return task["run"], task["envs"]
    install, start = task["commands"]
    assert install.startswith("pip install")
    return f"true && {start}", dict(each.split("=") for each in task["env"])


def _node(name: str, rank: int) -> dict[str, str]:
    """The variables of a node, of two on this machine."""
    if name == "skypilot":
        return {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank)}
    return {"DSTACK_MASTER_NODE_IP": "127.0.0.1", "DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": str(rank)}


@pytest.mark.parametrize(("name", "asked_by"), [("skypilot", "SIGTERM"), ("dstack", "SIGINT")])
def test_two_nodes_of_a_task_save_when_one_is_told_to_leave_and_resume(
    tmp_path: Path, name: str, asked_by: str
) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    section, variables = _section(name)
    assert variables["RUNS"] == "/runs"
    assert variables["RDZV_PORT"] == "29400"
    found = []
    for _ in range(2):
        variables |= {
            "RUNS": str(tmp_path),
            "RDZV_PORT": str(free_port()),
            "ASKED_BY": asked_by,
            knobs.TIMES: f"{SOON},{PATIENT}",
        }
        variables |= {"PYTHONPATH": python_path(), "XDG_STATE_HOME": str(tmp_path / "state"), knobs.QUIET: "1"}
        path = [str(warm.server().commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        variables["PATH"] = os.pathsep.join(path)
        nodes = [
            subprocess.Popen(
                ["bash", "-c", section],
                cwd=tmp_path,
                env={**os.environ, **variables, **_node(name, rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        outputs = [node.communicate(timeout=LIMIT)[0] for node in nodes]
        found.append(([node.returncode for node in nodes], "".join(outputs)))
    (codes, first), (others, second) = found
    assert codes == [EXIT_SAVED, EXIT_SAVED], first
    assert others == [0, 0], second
    resumed_at = re.search(r"^\d+ ranks, steps (\d+) to 40$", second, re.MULTILINE)
    assert resumed_at, second
    assert 7 <= int(resumed_at[1]) < 40


def test_what_interrupts_a_task_of_dstack_reaches_the_launcher(tmp_path: Path) -> None:
    """The shell is interrupted, and not what it waits for; sh, for images of one's own, stays in between unasked."""
    command = tmp_path / "lockstep"
    command.write_text("#!/bin/sh\necho $$\n")
    command.chmod(0o700)
    section, variables = _section("dstack")
    env = {**os.environ, **variables, **_node("dstack", 0), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", "-c", section], env=env, stdout=subprocess.PIPE, text=True) as node:
        assert node.communicate(timeout=LIMIT)[0].split() == [str(node.pid)]
