"""To which cores the ranks of a real job are bound, and what they start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from lockstep.topology import Topology, format_cpus, parse_cpus
from tests.launching import python_path, run

#: Each rank leaves what it may run on: itself, a thread of torch's pool, a loader worker, and a plain child process.
_LOOK = """
import json, os, subprocess, sys, warnings
import torch
import lockstep
from torch.utils.data import DataLoader, Dataset

class Affinity(Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): return torch.tensor(sorted(os.sched_getaffinity(0)))

def look(rank, folder):
    torch.set_num_threads(2)
    torch.ones(1 << 20).sin_()  # its pool is there now
    threads = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are more workers than cores
        (worker,) = DataLoader(Affinity(), num_workers=1)
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout
    told = {"own": sorted(os.sched_getaffinity(0)), "threads": threads, "worker": worker[0].tolist(),
            "child": json.loads(child), "omp": os.environ.get("OMP_NUM_THREADS"),
            "cores": os.environ.get("LOCKSTEP_CORES")}
    with open(os.path.join(folder, f"{rank}.json"), "w") as file: json.dump(told, file)
"""
_SCRIPT = """
import os, sys, torch, lockstep
from look import look
world = lockstep.init()
look(world.rank, sys.argv[1])
model = lockstep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
if "again" in sys.argv and os.environ["LOCKSTEP_RESTART"] == "0": raise RuntimeError("once")
"""
_SPAWNS = """
import sys, lockstep
from look import look
if __name__ == "__main__": lockstep.spawn(look, (sys.argv[1],), nprocs=int(sys.argv[2]))
"""

ALLOWED = os.sched_getaffinity(0)
CORES = Topology.read().within(ALLOWED)
#: Two where there are two cores; a job of one rank is bound like any other.
RANKS = min(2, len(CORES))


def _told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def _prepare(tmp_path: Path) -> list[str]:
    (tmp_path / "look.py").write_text(_LOOK)
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "spawns.py").write_text(_SPAWNS)
    return ["lockstep", "run", "-n", str(RANKS), "--log-dir", "logs"]


def _check_apart(tmp_path: Path) -> list[str]:
    """Check that each rank has cores of its own, with whatever it starts; return them by rank."""
    seen: list[str] = []
    for told in _told(tmp_path):
        own = told["own"]
        assert own
        assert {*own} <= ALLOWED
        assert len(own) == len({cpu for core in CORES if {*core.cpus} & {*own} for cpu in core.cpus}), "whole cores"
        assert told["threads"] == [own] * len(told["threads"])
        assert len(told["threads"]) >= 2
        assert told["worker"] == told["child"] == own
        assert told["cores"] == str(len(ALLOWED))
        seen.append(format_cpus(own))
    owned = [parse_cpus(text) for text in seen]
    assert len(frozenset().union(*owned)) == sum(map(len, owned)), "no core is two ranks'"
    return seen


def test_each_rank_and_what_it_starts_has_cores_of_its_own(tmp_path: Path) -> None:
    command = _prepare(tmp_path)
    done = run([*command, "--bind", "cores", "train.py", str(tmp_path), "2"], tmp_path, torch=True, OMP_NUM_THREADS="")
    assert done.code == 0, done
    seen = _check_apart(tmp_path)
    (start,) = json.loads((tmp_path / "logs/run.json").read_text())["starts"]
    assert start["bound"] == {str(rank): cpus for rank, cpus in enumerate(seen)}
    shares = {told["omp"] or str(len(ALLOWED)) for told in _told(tmp_path)}
    assert shares == {str(min(len(parse_cpus(cpus)) for cpus in seen))}
    done = run(["lockstep", "runs", "report", "logs", "-o", "report.html"], tmp_path)
    assert done.code == 0, done
    assert f"rank 0 to {seen[0]}" in (tmp_path / "report.html").read_text()


def test_a_restart_is_bound_as_before(tmp_path: Path) -> None:
    command = [*_prepare(tmp_path), "--max-restarts", "1", "--bind", "cores"]
    done = run([*command, "train.py", str(tmp_path), "2", "again"], tmp_path, torch=True)
    assert done.code == 0, done
    _check_apart(tmp_path)
    starts = json.loads((tmp_path / "logs/run.json").read_text())["starts"]
    assert [start["bound"] for start in starts] == [starts[0]["bound"]] * 2


def test_spawn_binds_as_the_variable_says(tmp_path: Path) -> None:
    _prepare(tmp_path)
    command = ["spawns", str(tmp_path), str(RANKS)]
    done = run(command, tmp_path, torch=True, LOCKSTEP_BIND="cores", PYTHONPATH=python_path(tmp_path))
    assert done.code == 0, done
    _check_apart(tmp_path)


@pytest.mark.parametrize("arguments", [["--bind", "none"], []], ids=["none", "auto"])
def test_an_affinity_that_is_set_stays(tmp_path: Path, arguments: list[str]) -> None:
    """With one core allowed, as by ``taskset``, ``auto`` has nothing to say, and says nothing."""
    one = min(ALLOWED)
    command = [*_prepare(tmp_path), *arguments, "--quiet", "train.py", str(tmp_path), "1"]
    done = run(command, tmp_path, torch=True, before=f"import os; os.sched_setaffinity(0, {{{one}}})")
    assert (done.code, done.err) == (0, ""), done
    for told in _told(tmp_path):
        assert told["own"] == told["worker"] == [one]
        assert told["cores"] is None
    (start,) = json.loads((tmp_path / "logs/run.json").read_text())["starts"]
    assert start["bound"] == {}


def test_more_ranks_than_cores_can_not_have_cores_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    ranks = len(CORES) + 1
    done = run(["lockstep", "run", "-n", str(ranks), "--bind", "cores", "train.py"], tmp_path)
    assert (done.code, done.out) == (2, ""), done
    assert f"--bind cores: {ranks} ranks and " in done.err
    done = run(["lockstep", "run", "-n", str(ranks), "--bind", "numa", "--quiet", "train.py"], tmp_path)
    assert (done.code, done.out) == (0, "started\n"), done


def test_what_contradicts_binding_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    command = ["lockstep", "run", "-n", "1"]
    for done, text in (
        (run([*command, "train.py"], tmp_path, LOCKSTEP_BIND="close"), "LOCKSTEP_BIND='close': expected auto, none, "),
        (
            run([*command, "--bind", "cores", "train.py"], tmp_path, OMP_PROC_BIND="close"),
            "--bind cores: OMP_PROC_BIND",
        ),
    ):
        assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1), done
        assert text in done.err


def test_cores_that_are_gone_when_a_rank_starts_are_told(tmp_path: Path) -> None:
    """A cgroup may take cores away while the ranks' process imports torch; stands for it: cores that never were."""
    from lockstep.launch.channel import Fork
    from tests.launching import start

    absent = max(parse_cpus(Path("/sys/devices/system/cpu/possible").read_text())) + 1
    (tmp_path / "train.py").write_text("print('started')")
    patch = (
        "from lockstep.launch import launcher; from lockstep.launch.binding import Binding; "
        f"launcher.bind_ranks = lambda how, ranks: Binding((frozenset({{{absent}}}),) * ranks, 1, 1)"
    )
    assert Fork(0, {}, {}).cpus is None
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path, before=patch) as job:
        done = job.finish()
    assert (done.code, done.out) == (1, ""), done
    assert f"rank 0 can't be bound to the cores {absent}: Invalid argument. The job had them when it st" in done.err
