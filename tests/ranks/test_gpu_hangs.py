"""A rank that holds up the others is named where they wait on their devices, and no host says that it waits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep import _proc
from lockstep.job.page import STACK_SIGNAL
from lockstep.launch.processes import signal_thread
from tests.launching import Running, run, start, wait_for

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

#: Times of a launcher that looks for a late rank sooner, and more often.
_SOON = "late=1.5,heartbeat=0.2,unmoved=0.2"

_TRAINING = """
import os, signal, sys, time
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader

torch.set_num_threads(1)  # before autograd's two threads, which would make torch's pool anew at once after a fork
where, waits, fifo, spins = sys.argv[1:]
world = lockstep.init()
if spins == "spins":
    from tests.device.simulation import Stress, stress
    stress(Stress(spins=True))
step = 0

def hang(here):
    global where
    if here == where and step == 5 and world.rank == 1:
        where = ""  # once, though a loader comes here for each sample
        if fifo == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            open(fifo, "rb", buffering=0).read(1)

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        hang("loader")
        return torch.ones(4)

model = lockstep.replicate(nn.Linear(4, 2).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in lockstep.shard(DataLoader(Data(), batch_size=8), seed_samples=False):
    hang("between steps")
    loss = model(batch.to(world.device)).sum()
    optimizer.zero_grad()
    hang("before backward")
    loss.backward()
    if waits == "item":
        loss.item(), next(model.parameters()).grad.sum().item()
    elif waits == "synchronize":
        torch.cuda.synchronize()
    elif waits == "cpu":
        next(model.parameters()).grad.cpu()
    optimizer.step()
    step += 1
print("done", flush=True)
"""


def _report(job: Running) -> list[str]:
    """The launcher's next message on a late rank, line by line; nothing else may come before it."""
    lines = [job.read_error()]
    while lines[-1] and not lines[-1].startswith("next: "):
        lines.append(job.read_error())
    return lines


@contextmanager
def _training(
    tmp_path: Path,
    where: str,
    waits: str,
    *,
    fifo: str = "stopped",
    spins: str = "",
    times: str = _SOON,
    ras: str = "",
) -> Iterator[Running]:
    (tmp_path / "train.py").write_text(_TRAINING)
    argv = ["lockstep", "run", "-n", "2", "train.py", where, waits, fifo, spins or "sleeps"]
    with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=times, NCCL_RAS_ADDR=ras) as job:
        yield job


def _require_named(report: list[str]) -> None:
    assert re.fullmatch(r"lockstep: rank 1 of 2 has held up the others for \d+ s", report[0]), report
    waits = next(line for line in report if line.startswith("  rank 0 waits in "))
    assert "its device, which has not finished averaging the gradients of the latest backward at " in waits
    assert re.search(r"/train\.py:\d+ in <module>, for \d+ s$", waits), waits


@pytest.mark.parametrize(
    ("where", "waits", "spins", "times"),
    [
        ("between steps", "item", "spins", ""),
        ("before backward", "synchronize", "sleeps", _SOON),
        ("loader", "cpu", "spins", _SOON),
        ("between steps", "cpu", "sleeps", _SOON),
    ],
)
def test_a_rank_that_sleeps_is_named_while_another_waits_for_its_device(
    where: str, waits: str, spins: str, times: str, gpus: str, tmp_path: Path
) -> None:
    if gpus == "real":
        spins = "sleeps"  # the driver decides how a host waits
    fifo = tmp_path / "end"
    os.mkfifo(fifo)
    with ExitStack() as stack:
        end = os.open(fifo, os.O_RDWR)  # for reading too, so that the rank gets as far as the read
        stack.callback(os.close, end)
        job = stack.enter_context(_training(tmp_path, where, waits, fifo=str(fifo), spins=spins, times=times))
        report = _report(job)
        os.write(end, b"x")
        over = job.read_error()
        done = job.finish()
    _require_named(report)
    assert f"is sleeping in read of {fifo}" in report[1]
    assert "5 steps taken" in report[2]
    assert any(re.search(r"train\.py:\d+ in hang$", line) for line in report)
    seconds = int(report[0].split()[-2])
    assert seconds <= 9, "named within ten seconds"
    assert re.fullmatch(r"lockstep: rank 1 has moved on after \d+ s", over), over
    assert done.code == 0, done
    assert "held up" not in done.err


def test_a_stopped_rank_is_named_while_another_waits_for_its_device(gpus: str, tmp_path: Path) -> None:  # noqa: ARG001
    with _training(tmp_path, "before backward", "item") as job:
        report = _report(job)
        found = re.match(r"  rank 1 \(process (\d+)\) is stopped by a signal", report[1])
        assert found is not None, report
        os.kill(int(found[1]), signal.SIGCONT)
        done = job.finish()
    _require_named(report)
    assert report[-1].startswith(f"next: kill -CONT {found[1]} resumes rank 1")
    assert done.code == 0, done


_TRAINS = """
import os, torch, lockstep
from torch import nn

torch.set_num_threads(1)  # as above
world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
going_on = True
while going_on:
    loss = model(torch.ones(8, 4, device=world.device)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if not os.path.exists(f"trains{world.rank}"):
        with open(f"trains{world.rank}", "w") as file:
            file.write(f"{os.getpid()}\\n")
    going_on = world.all(not os.path.exists("enough"))  # for all ranks at the same step
"""


def test_a_rank_that_was_asked_for_its_stack_while_it_was_stopped_lives(gpus: str, tmp_path: Path) -> None:  # noqa: ARG001
    """One that wrote the stacks of all threads in one handler did not live through twenty."""
    (tmp_path / "train.py").write_text(_TRAINS)
    pids = [tmp_path / f"trains{rank}" for rank in range(2)]
    with start(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True) as job:
        wait_for(lambda: all(each.exists() and each.read_text().endswith("\n") for each in pids), "their first steps")
        ranks = [int(each.read_text()) for each in pids]
        for number in range(200):
            rank = ranks[number % 2]
            os.kill(rank, signal.SIGSTOP)
            signal_thread(rank, rank, STACK_SIGNAL)
            os.kill(rank, signal.SIGCONT)
            wait_for(
                lambda rank=rank: "SigPnd" not in _proc.signal_sets(rank, STACK_SIGNAL),  # type: ignore[misc]
                f"the answer to question {number}",
            )
        told = run(["lockstep", "runs", "stack"], tmp_path)
        (tmp_path / "enough").touch()
        done = job.finish()
    assert told.out.count("Main thread (most recent call first):") == 2, told
    assert done.code == 0, done


_LONG = """
import torch, lockstep
from torch import nn
from tests.device.simulation import delay

torch.set_num_threads(1)  # as above
world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 2).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.ones(8, 4, device=world.device)).sum()
    optimizer.zero_grad()
    if step == 5:
        delay(torch.accelerator.current_stream(), 4000)
    loss.backward()
    next(model.parameters()).grad.cpu()
    optimizer.step()
print("done", flush=True)
"""


def test_ranks_whose_devices_all_have_a_long_kernel_raise_no_alarm(gpus: str, tmp_path: Path) -> None:
    if gpus == "real":
        pytest.skip("only a simulated stream can be told how long to take")
    (tmp_path / "train.py").write_text(_LONG)
    with start(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True, LOCKSTEP_TIMES=_SOON) as job:
        done = job.finish()
    assert done.code == 0, done
    assert done.out == "done\n", "of rank 0; what the other writes goes to its log"
    assert "held up" not in done.err
    assert "waited" not in done.err


_TIMED_OUT = """
import signal, sys
import torch, lockstep
from torch import nn

torch.set_num_threads(1)  # as above
late, fifo = int(sys.argv[1]), sys.argv[2]
world = lockstep.init(timeout=5)
model = lockstep.replicate(nn.Linear(4, 2).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    loss = model(torch.ones(8, 4, device=world.device)).sum()
    optimizer.zero_grad()
    if step == 5 and world.rank == late:
        open(fifo, "rb").read(1)
    loss.backward()
    loss.item(), next(model.parameters()).grad.sum().item()
    optimizer.step()
"""


@pytest.mark.parametrize("late", [0, 1])
def test_the_end_by_the_watchdog_is_told_as_a_timeout_with_who_is_late(late: int, gpus: str, tmp_path: Path) -> None:
    """Also of the rank whose words the launcher does not see: rank 0 writes to the terminal."""
    (tmp_path / "train.py").write_text(_TIMED_OUT)
    fifo = tmp_path / "never"
    os.mkfifo(fifo)
    with ExitStack() as stack:
        stack.callback(os.close, os.open(fifo, os.O_RDWR))
        argv = ["lockstep", "run", "-n", "2", "train.py", str(late), str(fifo)]
        job = stack.enter_context(start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_SOON))
        done = job.finish()
    waited = 1 - late
    assert done.code == 134, done
    assert f"lockstep: rank {waited} of 2 failed: killed by signal 6 (SIGABRT)" in done.err
    told = re.search(rf"lockstep\.CollectiveTimeout: rank {waited} of 2, after 5 steps: (.*)", done.err)
    assert told is not None, done.err
    what = (
        r"a collective over NCCL did" if waited == 0 else r"collective \d+ over NCCL \(ALLREDUCE of \d+ elements\) did"
    )
    assert re.match(rf"{what} not end (with)?in ", told[1]), told[1]
    assert "and the watchdog of torch's process group ended the process. A rank did not arrive in time" in told[1]
    after = done.err.partition("lockstep.CollectiveTimeout")[2]
    assert re.search(rf"^rank {late} of 2 has held up the others for \d+ s$", after, re.MULTILINE), after
    assert f"rank {late}: stopped because rank {waited} failed" in after
    kept = re.search(r"by torch's flight recorder: (\S+)…; torchfrtrace (\S+) --prefix (\S+) compares", after)
    assert kept is not None, after
    file = Path(f"{kept[1]}{waited}")
    assert file == Path(kept[2], f"{kept[3]}{waited}")
    assert file.stat().st_size > 0
    assert file.stat().st_mode & 0o777 == 0o600
    events = json.loads(file.with_name("run.json").read_text())["events"]
    failure = next(event["failure"] for event in events if "failure" in event)
    assert (failure["code"], failure["signal"]) == ("rank-killed", "SIGABRT")
    assert failure["error"]["code"] == "collective-timeout"
    if gpus == "simulated":
        assert "Watchdog caught collective operation timeout" in (
            done.err if waited == 0 else file.with_name("rank1.log").read_text()
        )


_RAS = b"""Communicators... (0.00s)
=============

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 4711 on node 127.0.0.1 managing GPU 1

Warnings
========

"""


def test_nccl_is_asked_about_ranks_that_are_late(gpus: str, tmp_path: Path) -> None:
    if gpus == "real":
        pytest.skip("NCCL itself answers there")

    def serve(server: socket.socket) -> None:
        client, _ = server.accept()
        with client, client.makefile("rb") as commands:
            for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", _RAS):
                commands.readline()
                client.sendall(answer)

    fifo = tmp_path / "end"
    os.mkfifo(fifo)
    with ExitStack() as stack:
        end = os.open(fifo, os.O_RDWR)
        stack.callback(os.close, end)
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        asked = threading.Thread(target=serve, args=[server])
        asked.start()
        stack.callback(asked.join)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job = stack.enter_context(_training(tmp_path, "before backward", "item", fifo=str(fifo), ras=address))
        _require_named(_report(job))
        said = [job.read_error() for _ in range(4)]
        os.write(end, b"x")
        done = job.finish()
    assert said == [
        "lockstep: NCCL itself (its RAS) says:",
        "  INCOMPLETE",
        "    Missing communicator data from 1 job process",
        "    Process 4711 on node 127.0.0.1 managing GPU 1",
    ]
    assert done.code == 0, done
