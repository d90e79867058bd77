"""A trace of some steps: recorded in the ranks, put together by the launcher, read again here."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.launch.ports import free_port
from tests.launching import Finished, environment, run, start, wait_for
from tests.namespaces import skip_unless
from tests.ranks.spawned import spawn_stragglers
from tests.traces import Checked

_SCRIPT = Path(__file__).with_name("stragglers.py")


def _run(folder: Path, *words: str, ranks: int = 2, trace: str = "6:3", **env: str) -> Finished:
    command = ["lockstep", "run", "-n", str(ranks), "--log-dir", "logs", "--trace", trace, *words]
    return run(command, folder, torch=True, **env)


@pytest.mark.parametrize(("backend", "ranks"), [("shm", 2), ("shm", 3), ("gloo", 2), ("gloo", 3)])
def test_arrows_lead_from_the_slow_rank_to_those_that_wait(tmp_path: Path, backend: str, ranks: int) -> None:
    # 450 ms late in each step: far longer than the others are ever kept from a processor, on any machine.
    command = [str(_SCRIPT), "forward", "5", "0.5", "10"]
    done = _run(tmp_path, *command, ranks=ranks, LOCKSTEP_BACKEND=backend, STRAGGLERS_WORK="0.03")
    assert done.code == 0, done
    assert f"the trace of steps 3 to 8 on {ranks} ranks is in {tmp_path}/logs/trace.json.gz" in done.err
    path = tmp_path / "logs/trace.json.gz"
    assert path.stat().st_mode & 0o777 == 0o600
    trace = Checked(path)
    trace.check_against_collectives()
    assert trace.data["distributedInfo"]["world_size"] == ranks
    assert (trace.about["steps"], trace.about["cut_off"], trace.about["missing_ranks"]) == ([3, 8], [], [])
    late = [each["args"] for each in trace.arrows if each["args"]["late"] == 1]
    assert len(late) >= 6 * (ranks - 1), "in each of the steps rank 1 is the last in forward"
    for rank in range(ranks):
        steps = [each["name"] for each in trace.lane(rank, "steps")]
        assert steps == [f"ProfilerStep#{number}" for number in range(3, 9)]
        phases = [each["name"] for each in trace.lane(rank, "phases")]
        assert [name for name in phases if name != "your code"] == [
            name for _ in range(6) for name in ("data", "forward", "backward", "reduce", "optimizer")
        ]
    forward = {
        rank: sum(each["dur"] for each in trace.of("phase", rank) if each["name"] == "forward") for rank in (0, 1)
    }
    assert forward[1] - forward[0] == pytest.approx(6 * 450e3, rel=0.5), "five times three times 30 ms, in six steps"


@pytest.mark.timed
@pytest.mark.campaign
@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("phase", ["data", "forward"])
def test_the_summary_has_the_shares_of_the_trace_to_three_points(
    tmp_path: Path, phase: str, ranks: int, backend: str
) -> None:
    # The looks of 45 s have a standard deviation of 1.3 points in data: too many for three points in 18 ranks.
    done = _run(tmp_path, str(_SCRIPT), phase, "0.5", "90", ranks=ranks, trace="1800:10", LOCKSTEP_BACKEND=backend)
    assert done.code == 0, done
    trace = Checked(tmp_path / "logs/trace.json.gz")
    summed = json.loads((tmp_path / "logs/run.json").read_text())["summary"]["ranks"]
    for rank in range(ranks):
        seen = _shares(summed[str(rank)]["seconds"])
        timed = _shares(_spent(trace, rank))
        errors = {name: round(seen.get(name, 0.0) - part, 4) for name, part in timed.items()}
        print(f"rank {rank}: {errors}")
        assert max(map(abs, errors.values())) <= 0.03, (rank, seen, timed)


def _spent(trace: Checked, rank: int) -> dict[str, float]:
    """Microseconds by phase, without the waits in it; and those."""
    waits = sorted((each["ts"], each["ts"] + each["dur"]) for each in trace.of("wait", rank))
    latest_ends = list(itertools.accumulate((end for _, end in waits), max))
    spent: dict[str, float] = {"wait": 0.0}
    for each in trace.of("phase", rank):
        begun, ended, at, waited = each["ts"], each["ts"] + each["dur"], each["ts"], 0.0
        for start_, end in waits[bisect.bisect_right(latest_ends, begun) : bisect.bisect_left(waits, (ended,))]:
            at, end = max(at, start_), min(end, ended)
            if begun <= at < end:
                waited, at = waited + end - at, end
        name = "own" if each["name"] == "your code" else str(each["name"])
        spent[name] = spent.get(name, 0.0) + each["dur"] - waited
        spent["wait"] += waited
    return spent


def _shares(spent: dict[str, float]) -> dict[str, float]:
    whole = sum(spent.values())
    return {name: each / whole for name, each in spent.items() if each > 0}


def _phases_of(trace: Checked, rank: int) -> set[str]:
    return {each["name"] for each in trace.of("phase", rank)}


_KILLED = """
import os, signal, sys, threading, time, traceback
from pathlib import Path
import torch
import lockstep

world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
life = int(os.environ["LOCKSTEP_RESTART"])
waits = Path("rank 0 waits")

def tell_once_it_waits(thread):
    while "comm/shm/semaphore.py" not in "".join(traceback.format_stack(sys._current_frames()[thread])):
        time.sleep(0.001)
    waits.write_text(str(os.getpid()))

for step in range(12):
    if step == 5 and life == 0:
        if world.rank == 0:
            threading.Thread(target=tell_once_it_waits, args=[threading.get_ident()], daemon=True).start()
        else:
            while not (waits.exists() and waits.read_text()):
                time.sleep(0.001)
            os.kill(int(waits.read_text()), signal.SIGKILL)  # at once: it might see that this rank is gone
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_a_killed_rank_leaves_its_events_and_a_restart_is_traced_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_KILLED)
    words = ["--max-restarts", "1", "train.py"]
    done = _run(tmp_path, *words, trace="6:3")
    assert done.code == 0, done
    assert f"the trace of steps 3 to 4 on 2 ranks is in {tmp_path}/logs/trace.json.gz" in done.err
    assert "it ends early for ranks 0 and 1, which ended within it" in done.err
    assert f"the trace of steps 3 to 8 on 2 ranks is in {tmp_path}/logs/trace-restart1.json.gz" in done.err
    cut, whole = Checked(tmp_path / "logs/trace.json.gz"), Checked(tmp_path / "logs/trace-restart1.json.gz")
    assert (cut.about["cut_off"], whole.about["cut_off"]) == ([0, 1], [])
    last = cut.of("collective", 0)[-1]
    assert last["args"]["unfinished"], "rank 0 was in the collective that rank 1 did not come to"
    assert not cut.of("collective", 1)[-1]["args"].get("unfinished")
    assert last["args"]["number"] == cut.of("collective", 1)[-1]["args"]["number"] + 1
    events = json.loads((tmp_path / "logs/run.json").read_text())["events"]
    assert sum(event["kind"] == "trace" for event in events) == 3


def test_a_run_of_fewer_steps_says_so(tmp_path: Path) -> None:
    done = _run(tmp_path, str(_SCRIPT), "none", "0", "0", trace="20:100")
    assert done.code == 0, done
    assert "no trace: --trace 20:100 begins after 100 steps, and 50 were taken; --trace 20:30 would have" in done.err
    assert not [*tmp_path.rglob("trace*")]


def test_parameters_that_were_frozen_meanwhile_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import torch, lockstep
lockstep.init()
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
model = lockstep.replicate(net, find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(12):
    net[0].requires_grad_(step < 2)
    model(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    done = _run(tmp_path, "train.py")
    assert done.code == 0, done
    assert f"the trace of steps 3 to 8 on 2 ranks is in {tmp_path}/logs/trace.json.gz" in done.err


@pytest.mark.parametrize("text", ["", "0", "x", "5:", "5:x", "-3", "1.5", "20:-1", "10001"])
def test_bad_values_are_refused_before_anything_starts(tmp_path: Path, text: str) -> None:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", f"--trace={text}", str(_SCRIPT)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done
    assert re.fullmatch(r"lockstep run: --trace .*: expected STEPS or STEPS:FROM, .*\n", done.stderr), done.stderr


def test_a_bad_variable_is_refused_as_well(tmp_path: Path) -> None:
    done = run(["lockstep", "run", "-n", "2", str(_SCRIPT)], tmp_path, LOCKSTEP_TRACE="many")
    assert (done.code, done.err.splitlines()[-1][:50]) == (
        2,
        "lockstep run: LOCKSTEP_TRACE=many: expected STEPS or "[:50],
    )


_EVERYTHING = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import lockstep

class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((4,), float(index))

def main():
    world = lockstep.init()
    model = lockstep.replicate(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = lockstep.shard(DataLoader(Data(), batch_size=8, num_workers=2))
    saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for epoch in saved.epochs(2):
            for batch in loader:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
                world.mean(1.0)
                profile.step()
                if loader.batches_left % 4 == 0:
                    saved.async_save()
    profile.export_chrome_trace(f"profile{world.rank}.json")

if __name__ == "__main__":
    main()
"""


def _trains_everything(folder: Path) -> Checked:
    (folder / "train.py").write_text(_EVERYTHING)
    done = _run(folder, "train.py", trace="10:2")
    assert done.code == 0, done
    assert "the trace of steps 2 to 11 on 2 ranks" in done.err
    trace = Checked(folder / "logs/trace.json.gz")
    trace.check_against_collectives()
    return trace


def test_workers_saves_and_profiles_are_in_it(tmp_path: Path) -> None:
    trace = _trains_everything(tmp_path)
    own = json.loads((tmp_path / "profile1.json").read_text())
    for rank in range(2):
        assert {"data", "forward", "backward", "reduce", "optimizer", "save", "your code"} <= _phases_of(trace, rank)
        made = trace.of("worker", rank)
        assert len(made) >= 8
        beside = [each["name"] for each in trace.of("lockstep", rank)]
        assert beside, "saving in the background has a lane of its own"
        assert all(name.startswith("saving step ") for name in beside)
        assert all(each["args"]["samples"] == 4 and each["dur"] > 4 * 2000 for each in made)
        names = {each["name"] for each in trace.of("cpu_op", rank)}
        assert {"aten::addmm", "aten::mean"} <= names
        # The profiler's clock and the launcher's are one: what backward computes lies in backward or reduce.
        around = [each for each in trace.of("phase", rank) if each["name"] in ("backward", "reduce")]
        backward = [each for each in trace.of("cpu_op", rank) if each["name"] == "AddmmBackward0"]
        inside = [
            each
            for each in backward
            if any(b["ts"] - 50 <= each["ts"] and each["ts"] + each["dur"] <= b["ts"] + b["dur"] + 50 for b in around)
        ]
        assert len(backward) == 10
        assert len(inside) == 10, (backward, around)
    told = trace.about["profiles"]
    assert told.keys() == {"0/1", "1/1"}
    assert 0 < told["1/1"]["events"] < len(own["traceEvents"])


def test_it_is_split_into_files_of_single_ranks(tmp_path: Path) -> None:
    trace = _trains_everything(tmp_path)
    command = [sys.executable, "-m", "lockstep", "runs", "trace", "logs/trace.json.gz", "--split", "ranks"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, [f"ranks/trace-rank{rank}.json.gz" for rank in range(2)]), done
    for rank in range(2):
        one = Checked(tmp_path / f"ranks/trace-rank{rank}.json.gz")
        assert one.data["distributedInfo"]["rank"] == rank
        assert len(one.of("cpu_op")) == len(trace.of("cpu_op", rank)) > 0
        assert not one.arrows
    hta = os.environ.get("HTA_PYTHON")
    if hta is None:
        pytest.skip("no Holistic Trace Analysis: HTA_PYTHON is to name a Python that has it")
    told = subprocess.run(
        [hta, "-c", _HTA, "ranks"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True
    )
    print(told.stdout)
    said = json.loads(told.stdout.splitlines()[-1])
    assert said["ranks"] == [0, 1]
    assert said["steps"] == {"0": [*range(2, 11)], "1": [*range(2, 11)]}, "it leaves out the last one, as documented"
    assert all(count > 100 for count in said["events"].values())


_HTA = """
import json, sys
from hta.trace_analysis import TraceAnalysis
trace = TraceAnalysis(trace_dir=sys.argv[1]).t
ranks = trace.get_ranks()
print(json.dumps({
    "ranks": ranks,
    "events": {rank: len(trace.get_trace(rank)) for rank in ranks},
    "steps": {rank: [int(step) for step in trace.get_iterations(rank)] for rank in ranks},
}))
"""


def test_it_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    command = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "--trace", "5:3", str(_SCRIPT), "none", "0", "60"]
    with start(command, tmp_path, torch=True) as job:
        wait_for(lambda: (tmp_path / "logs/trace.json.gz").exists(), "the trace")
        assert job.process.poll() is None
        job.process.kill()
    assert Checked(tmp_path / "logs/trace.json.gz").about["cut_off"] == []


_APART = """
import torch
import lockstep

world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("shares", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_machines_whose_clocks_differ_are_aligned(tmp_path: Path, shares: bool) -> None:
    """The second machine's CLOCK_MONOTONIC is a hundred seconds ahead."""
    skip_unless("unshare --time --fork --monotonic 100 true", "a clock of the test's own")
    (tmp_path / "train.py").write_text(_APART)
    port = free_port()
    env = environment(tmp_path, torch=True, LOCKSTEP_BACKEND="gloo")
    jobs = []
    for node in range(2):
        before = ["unshare", "--time", "--fork", "--monotonic", "100"] if node else []
        logs = "logs" if shares else f"logs{node}"
        command = [sys.executable, "-m", "lockstep", "run", "-n", "1", "--nnodes", "2", "--rdzv", f"127.0.0.1:{port}"]
        command += ["--log-dir", logs, "--trace", "8:5", "train.py"]
        jobs.append(subprocess.Popen([*before, *command], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True))
    try:
        said = [job.communicate(timeout=90)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    assert [job.returncode for job in jobs] == [0, 0], said
    parts = sorted(tmp_path.rglob("trace-node*.json.gz"))
    assert len(parts) == 2, said
    merged = tmp_path / "logs/trace.json.gz"
    if not shares:
        assert "lockstep runs trace FILE… merges them" in "".join(said)
        merged = tmp_path / "trace.json.gz"
        command = [sys.executable, "-m", "lockstep", "runs", "trace", *map(str, parts), "-o", str(merged)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
        assert "µs ahead, to " in done.stdout
    whole = Checked(merged)
    assert sorted(whole.ranks.values()) == [0, 1]
    clock = whole.about["clocks"]["1"]
    # Which of the two came first and is machine 0 is a matter of chance.
    assert abs(abs(clock["ahead_us"]) - 100e6) <= clock["error_us"] < 100e3, clock
    assert clock["by"].endswith("what was measured when the machines met")
    whole.check_against_collectives(least=max(20.0, 2 * clock["error_us"]))
    calls = [
        {rank: whole.call(rank, number) for rank in (0, 1)}
        for number in {
            each["args"]["number"] for each in whole.of("collective") if each["args"]["operation"] == "all_reduce"
        }
    ]
    assert len(calls) >= 8
    for call in calls:
        assert abs(call[0]["ts"] - call[1]["ts"]) < 5e6


@pytest.mark.campaign  # a run that is spawned is recorded in every run of the tests, in the same way
def test_spawned_ranks_are_traced_by_the_variable(tmp_path: Path) -> None:
    done = spawn_stragglers(tmp_path, "none", "0", "0", LOCKSTEP_TRACE="4")
    assert done.returncode == 0, done
    (path_of_trace,) = (tmp_path / "state").rglob("trace.json.gz")
    trace = Checked(path_of_trace)
    trace.check_against_collectives()
    assert trace.about["steps"] == [10, 13]
