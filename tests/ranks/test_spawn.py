"""``lockstep.spawn``: torch.multiprocessing.spawn's meaning, with lockstep's reports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context, resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep import knobs
from lockstep._proc import descendants
from lockstep.launch.folders import JobFolder
from lockstep.launch.returned import Returned, send
from tests import warm
from tests.launching import LIMIT, environment, gone_within, killed_afterwards, wait_for
from tests.ranks import functions


def _sum_with_lockstep(rank: int, total: torch.Tensor) -> None:
    w = lockstep.init()
    assert (w.rank, w.local_rank, w.world_size) == (rank, rank, 3)
    value = torch.tensor([10.0**rank])
    dist.all_reduce(value)
    total[rank] += value.item()


@pytest.mark.usefixtures("warm_zygote")
def test_ranks_make_a_world_and_tensors_are_shared() -> None:
    total = torch.arange(3.0)
    assert lockstep.spawn(_sum_with_lockstep, (total,), nprocs=3) == [None] * 3
    assert total.tolist() == [111.0, 112.0, 113.0]


def _as_the_documents_do(rank: int, world_size: int, port: str, total: torch.Tensor) -> None:
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    total[rank] = value.item()
    dist.destroy_process_group()


def test_a_function_that_opens_torchs_group_itself() -> None:
    from lockstep.launch.ports import free_port

    total = torch.zeros(2)
    lockstep.spawn(_as_the_documents_do, (2, str(free_port()), total), 2)
    assert total.tolist() == [3.0, 3.0]


@pytest.mark.usefixtures("bare")
def test_functions_get_their_rank_and_arguments(tmp_path: Path) -> None:
    lockstep.spawn(functions.write, (str(tmp_path), "ü"), nprocs=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["ü 0 2 ''", "ü 1 2 ''"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", 1, "KeyError: 'no such sample'"),
        ("exit", 7, "rank 1 of 3 failed: exit code 7"),
        ("kill", 137, "rank 1 of 3 failed: killed by signal 9 (SIGKILL)"),
    ],
)
def test_the_first_failure_is_raised_here(how: str, code: int, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(lockstep.RankFailed) as raised:
        lockstep.spawn(functions.fail, (how,), nprocs=3)
    error = raised.value
    assert (error.rank, error.exit_code) == (1, code)
    assert text in str(error)
    assert "ranks 0 and 2: stopped because rank 1 failed" in str(error)
    if how == "raise":
        assert error.traceback is not None
        lines = error.traceback.splitlines()
        assert lines[0] == "Traceback (most recent call last):"
        assert lines[1].startswith(f'  File "{functions.__file__}"')  # no frame of the launcher's
    else:
        assert error.traceback is None
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("bare")
def test_without_join_there_is_a_context(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ranks = lockstep.spawn(functions.wait, (str(fifo),), nprocs=2, join=False)
    assert ranks is not None
    pids = ranks.pids()
    assert len(set(pids)) == 2
    assert ranks.join(timeout=0.05) is False
    fifo.write_text("go")
    assert ranks.join() is True
    assert ranks.join() is True
    assert gone_within(pids, 0.0) == []


@pytest.mark.usefixtures("bare")
def test_a_failure_is_raised_again_by_every_join() -> None:
    ranks = lockstep.spawn(functions.fail, ("exit",), nprocs=2, join=False)
    assert ranks is not None
    for _ in range(2):
        with pytest.raises(lockstep.RankFailed, match="exit code 7"):
            ranks.join()


@pytest.mark.usefixtures("bare")
def test_from_a_thread(tmp_path: Path) -> None:
    thread = threading.Thread(target=lockstep.spawn, args=(functions.write, (str(tmp_path), "t"), 2))
    thread.start()
    thread.join(LIMIT)
    assert {path.name for path in tmp_path.iterdir()} == {"rank0", "rank1"}


@pytest.mark.usefixtures("bare")
def test_what_the_ranks_return_comes_back_in_their_order() -> None:
    assert lockstep.spawn(functions.give, ("ü",), nprocs=3) == [(0, "ü"), (1, "ü"), (2, "ü")]
    much = lockstep.spawn(functions.give, ("much",), nprocs=2)
    assert much == [{"rank": rank, "bytes": bytes([rank]) * (8 << 20)} for rank in range(2)]
    assert lockstep.spawn(functions.give, ("leaves",), nprocs=2) == [None, None], "sys.exit(0) returns nothing"


def _forks(rank: int) -> int:
    pid = os.fork()
    if not pid:
        return -1
    os.waitpid(pid, 0)
    return rank


def test_a_process_that_a_rank_forks_returns_nothing_in_its_place() -> None:
    assert lockstep.spawn(_forks, nprocs=2) == [0, 1]


def _waits(rank: int, path: str) -> int:
    with open(path):  # until the program lets it go
        return rank


def test_a_fork_of_the_program_that_ends_leaves_its_ranks_alone(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ranks = lockstep.spawn(_waits, (str(fifo),), nprocs=1, join=False)
    pid = os.fork()
    if not pid:
        ranks._at_exit()  # as Python calls it in a fork that comes to its end
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with open(fifo, "w"):
        assert ranks.join(LIMIT)
    assert [value for _, value in ranks.results()] == [0]


@pytest.mark.usefixtures("bare")
def test_values_come_as_ranks_end_and_again_when_asked_again(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    ranks = lockstep.spawn(functions.give, ("early", str(fifo)), nprocs=3, join=False)
    results = ranks.results()
    assert sorted(next(results) for _ in range(2)) == [(1, (1, "early")), (2, (2, "early"))]
    assert ranks.join(timeout=0.0) is False, "rank 0 runs on"
    fifo.write_text("go")
    assert list(results) == [(0, (0, "early"))]
    assert ranks.join() is True
    assert dict(ranks.results()) == {rank: (rank, "early") for rank in range(3)}


@pytest.mark.usefixtures("bare")
def test_what_ranks_returned_before_one_failed_has_come(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    results = lockstep.spawn(functions.give, ("fails", str(fifo)), nprocs=2, join=False).results()
    assert next(results) == (1, (1, "fails"))
    fifo.write_text("go")
    with pytest.raises(lockstep.RankFailed, match="no such sample"):
        next(results)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("a file", "TypeError: cannot pickle '_io.TextIOWrapper' object"),
        ("unreadable", "ValueError: invalid literal for int\\(\\) with base 10: 'no number'"),
    ],
)
def test_what_can_not_be_sent_fails_nothing_and_is_told(what: str, why: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"what rank 1 returned from give did not arrive, .*: {why}") as told:
        assert lockstep.spawn(functions.give, (what,), nprocs=2) == [(0, what), None]
    assert told[0].filename == __file__
    ranks = lockstep.spawn(functions.give, (what,), nprocs=2, join=False)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match=why):
            assert dict(ranks.results()) == {0: (0, what), 1: None}


def _give_tensors(rank: int) -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)))
    return {
        "model": torch.nn.Linear(2, 2),
        "weight": weight,
        "loss": (2 * weight).sum(),
        "part": torch.arange(6)[2:4],
        "shape": torch.empty(3, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
    }


@pytest.mark.usefixtures("warm_zygote")
def test_tensors_and_models_come_as_copies() -> None:
    for rank, given in enumerate(lockstep.spawn(_give_tensors, nprocs=2)):
        assert isinstance(given["weight"], torch.nn.Parameter)
        assert given["weight"].tolist() == [[float(rank)] * 3] * 2
        assert given["loss"].item() == 12.0 * rank
        assert given["part"].tolist() == [2, 3]
        assert given["model"](torch.ones(1, 2)).shape == (1, 2)
        assert (given["shape"].is_meta, given["shape"].shape) == (True, (3,))
        assert given["sparse"].to_dense().tolist() == [[1.0, 0.0], [0.0, 1.0]]


@pytest.mark.gpu
def test_tensors_of_a_device_come_to_the_cpu() -> None:
    weight = torch.nn.Parameter(torch.ones(2, device="cuda"), requires_grad=False)
    model, returned = torch.nn.Linear(2, 2).cuda(), Returned()
    send(os.dup(returned.descriptor), {"model": model, "weight": weight, "tensor": torch.arange(3, device="cuda")})
    given = returned.take()
    assert {value.device.type for value in (*given["model"].parameters(), given["weight"], given["tensor"])} == {"cpu"}
    assert isinstance(given["weight"], torch.nn.Parameter)
    assert not given["weight"].requires_grad
    assert all(value.requires_grad for value in given["model"].parameters())
    torch.testing.assert_close(given["model"].weight, model.weight.detach().cpu(), rtol=0, atol=0)
    assert given["tensor"].tolist() == [0, 1, 2]


def _use_primitives(rank: int, queue: Any, lock: Any, tensors: dict[str, torch.Tensor]) -> None:
    with lock:
        queue.put((rank, float(sum(float(tensor[rank]) for tensor in tensors.values()))))


@pytest.mark.usefixtures("warm_zygote")
def test_queues_locks_and_many_tensors() -> None:
    context = get_context("spawn")
    queue, lock = context.Queue(), context.Lock()
    tensors = {f"parameter {n}": torch.full((2,), float(n)) for n in range(300)}  # a descriptor each
    lockstep.spawn(_use_primitives, (queue, lock, tensors), nprocs=2)
    assert sorted(queue.get(timeout=LIMIT) for _ in range(2)) == [(0, 44850.0), (1, 44850.0)]
    queue.close()
    queue.join_thread()
    resource_sharer.stop()


@pytest.mark.parametrize(
    ("options", "text"),
    [({"nprocs": 0}, "nprocs=0: expected at least 1"), ({"start_method": "fork"}, "lockstep.spawn has only 'spawn'")],
)
def test_arguments_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lockstep.spawn(functions.write, ("", ""), **options)


async def _coroutine(rank: int) -> None: ...


def _generator(rank: int) -> Iterator[int]:
    yield rank


@pytest.mark.parametrize("fn", [_coroutine, _generator])
def test_a_function_of_which_a_call_runs_nothing_is_refused(fn: Callable[[int], object]) -> None:
    with pytest.raises(TypeError, match=f"a call of {fn.__name__} only makes a coroutine or a generator"):
        lockstep.spawn(fn, nprocs=2)


@pytest.mark.usefixtures("bare")
def test_a_function_that_can_not_be_sent_is_refused_here() -> None:
    with pytest.raises((AttributeError, TypeError), match="lambda"):
        lockstep.spawn(lambda rank: None, nprocs=2)  # noqa: ARG005


def _stop_one(rank: int) -> None:
    world = lockstep.init()
    for turn in range(3):
        if (turn, rank) == (2, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()


@pytest.mark.usefixtures("warm_zygote")
def test_a_rank_that_holds_up_the_others_is_named_and_the_callers_signals_stay_its_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(knobs.LATE, "1")
    monkeypatch.setenv(knobs.TIMES, "heartbeat=0.2")
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    ranks = lockstep.spawn(_stop_one, nprocs=2, join=False)
    assert ranks is not None
    said, deadline = "", time.monotonic() + LIMIT
    while "Nothing was stopped" not in said and time.monotonic() < deadline:
        assert not ranks.join(0.1)
        said += capfd.readouterr().err
    os.kill(ranks.pids()[1], signal.SIGCONT)
    assert ranks.join()
    said += capfd.readouterr().err
    assert "lockstep: rank 1 of 2 has held up the others for " in said
    assert "is stopped by a signal" in said
    assert "rank 0 waits in " in said
    assert "lockstep: rank 1 has moved on" in said
    assert before == {signum: signal.getsignal(signum) for signum in before}
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _of_the_rank(rank: int, given: torch.Tensor) -> dict[str, torch.Tensor]:
    given[rank] = 1.0
    return {"tensor": torch.full((3,), float(rank))}


@pytest.mark.usefixtures("warm_zygote")
def test_tensors_of_typed_functions_are_shared_as_arguments_and_copied_as_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lockstep.launch.spawn._is_typed", lambda *_: True)
    given = torch.zeros(2)
    found = lockstep.spawn(_of_the_rank, (given,), nprocs=2)  # the ranks have ended when their results are read
    assert [each["tensor"].tolist() for each in found] == [[0.0] * 3, [1.0] * 3]
    assert given.tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("bare")
def test_a_dead_zygote_is_an_error() -> None:
    ranks = lockstep.spawn(functions.fail, ("wait",), nprocs=1, join=False)
    assert ranks is not None
    (pid,) = ranks.pids()
    os.kill(ranks._ranks.launcher.zygote.pid, signal.SIGKILL)
    with pytest.raises(lockstep.LaunchError, match="the process that forks the ranks"):
        ranks.join()
    assert gone_within([pid], 1.0) == []


def _program(tmp_path: Path, text: str) -> subprocess.Popen[str]:
    (tmp_path / "main.py").write_text(text)
    env = os.environ | {knobs.PRELOAD: ""}
    return subprocess.Popen(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


_IN_MAIN = """
import os, sys, lockstep
class Thing:
    def __init__(self, n): self.n = n
def work(rank, thing, outer=None):
    print(rank, thing.n, __name__, os.environ["RANK"], flush=True)
    if outer: lockstep.spawn(work, (Thing(3),), nprocs=1)
    return Thing(rank)
if __name__ == "__main__":
    print([type(thing) is Thing and thing.n for thing in lockstep.spawn(work, (Thing(5), True), nprocs=2)])
"""


def test_functions_and_classes_of_main_and_ranks_that_spawn(tmp_path: Path) -> None:
    with _program(tmp_path, _IN_MAIN) as process:
        out, err = process.communicate(timeout=LIMIT)
    *lines, returned = out.splitlines()
    assert returned == "[0, 1]", (out, err)
    assert sorted(lines) == ["0 3 __mp_main__ 0"] * 2 + ["0 5 __mp_main__ 0", "1 5 __mp_main__ 1"], err


def test_a_program_on_standard_input_is_refused_with_a_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-"]
    done = subprocess.run(
        command, cwd=tmp_path, input=_IN_MAIN, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert (
        "LaunchError: the ranks of lockstep.spawn import the main program again, and <stdin> is not a file"
        in done.stderr
    )


def test_a_port_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("MASTER_PORT", "http")
    with pytest.raises(lockstep.EnvironmentMismatch, match="MASTER_PORT='http': expected 1 to 65535"):
        lockstep.spawn(functions.write, ("", ""), nprocs=2)


def test_a_script_without_the_main_guard_is_told_so(tmp_path: Path) -> None:
    with _program(tmp_path, "import lockstep\ndef f(rank): pass\nlockstep.spawn(f, nprocs=2)\n") as process:
        _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert "if __name__ == '__main__':" in err


_ENDLESS = """
import subprocess, time, lockstep
def work(rank):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(f"ready-{rank}", "w").close()
    while True: time.sleep(0.05)  # not pause(), which a signal that comes right before it does not end
if __name__ == "__main__":
    lockstep.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_ranks_do_not_outlive_their_caller(tmp_path: Path, signum: signal.Signals) -> None:
    with _program(tmp_path, _ENDLESS) as process:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "the ranks")
        everyone = descendants(process.pid)
        assert len(everyone) == 5
        if signum == signal.SIGINT:
            os.killpg(process.pid, signum)
        else:
            process.kill()
        assert gone_within(everyone, 1.0) == []
        _, err = process.communicate(timeout=LIMIT)
    if signum == signal.SIGINT:
        assert err.count("KeyboardInterrupt") == 1  # the caller's own


_SAVES = """
import functools, os, signal, sys, time
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lockstep.launch import called

called.JobSpec = functools.partial(called.JobSpec, grace=1000.0)  # no machine is too slow

def work(rank):
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4))
    saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
    for epoch in saved.epochs(10**6):
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if saved.step == 5:
                with open(f"begins-{rank}", "w") as file:
                    file.write(f"{os.getpid()} {os.environ['LOCKSTEP_JOB_DIR']}")
                os.rename(f"begins-{rank}", f"trains-{rank}")

def leave(signum, frame):
    sys.exit(3)

if __name__ == "__main__":
    if sys.argv[1] == "handles":
        signal.signal(signal.SIGTERM, leave)
    if sys.argv[1] == "polls":
        ranks = lockstep.spawn(work, nprocs=2, join=False)
        try:
            while not ranks.join(0.01):
                pass
        except KeyboardInterrupt:
            try:
                sys.exit(f"all is well: {ranks.join()}")
            except lockstep.RankFailed as error:
                assert (error.rank, error.exit_code) == (0, 75)
            raise
    if sys.argv[1] == "iterates":
        list(lockstep.spawn(work, nprocs=2, join=False).results())
    lockstep.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize(
    ("how", "signum", "whom", "code"),
    [
        ("waits", signal.SIGTERM, "caller", -signal.SIGTERM),
        ("waits", signal.SIGHUP, "group", -signal.SIGHUP),
        ("iterates", signal.SIGINT, "group", -signal.SIGINT),
        ("polls", signal.SIGINT, "caller", -signal.SIGINT),
        ("handles", signal.SIGTERM, "caller", 3),
        ("waits", signal.SIGKILL, "caller", -signal.SIGKILL),
    ],
)
def test_ranks_save_before_they_end_with_their_caller(
    tmp_path: Path, how: str, signum: signal.Signals, whom: str, code: int
) -> None:
    """Which ends as it would have, once they have ended, if it can wait for that."""
    (tmp_path / "main.py").write_text(_SAVES)
    with warm.Process(["main.py", how], cwd=tmp_path, env=environment(tmp_path, torch=True)) as process:
        wait_for(lambda: all((tmp_path / f"trains-{rank}").exists() for rank in range(2)), "the training")
        everyone = descendants(process.pid)
        with killed_afterwards(everyone):
            (os.killpg if whom == "group" else os.kill)(process.pid, signum)
            assert process.wait(LIMIT) == code
            waits = signum != signal.SIGKILL
            wait_for(lambda: gone_within(everyone, 0.0) == [], "the end of the ranks", 0.0 if waits else LIMIT)
        _, err = process.communicate(timeout=LIMIT)
    (saved,) = (tmp_path / "run").glob("step-*")
    told = f"lockstep: stopped by {signum.name}; saved at step {int(saved.name[5:])} in {saved}"
    assert (told in err.splitlines()) == (how != "handles" and waits), err
    assert err.count("KeyboardInterrupt") == (signum == signal.SIGINT), err


def test_another_job_that_starts_leaves_the_folder_of_ranks_that_save(tmp_path: Path) -> None:
    """Their caller was killed, and they meet at a file in that folder as they leave."""
    (tmp_path / "main.py").write_text(_SAVES)
    with warm.Process(["main.py", "waits"], cwd=tmp_path, env=environment(tmp_path, torch=True)) as process:
        marks = [tmp_path / f"trains-{rank}" for rank in range(2)]
        wait_for(lambda: all(mark.exists() for mark in marks), "the training")
        everyone = descendants(process.pid)
        with killed_afterwards(everyone):
            ranks, folders = zip(*(mark.read_text().split() for mark in marks), strict=True)
            for rank in ranks:
                os.kill(int(rank), signal.SIGSTOP)
            process.kill()
            process.wait(LIMIT)
            JobFolder().remove()
            assert Path(folders[0]).is_dir()
            for rank in ranks:
                os.kill(int(rank), signal.SIGCONT)
            wait_for(lambda: gone_within(everyone, 0.0) == [], "the end of the ranks")
    assert not Path(folders[0]).exists()
    assert len([*(tmp_path / "run").glob("step-*")]) == 1


_STAYS = """
import functools, signal, sys, time, lockstep
from lockstep.launch import called

called.JobSpec = functools.partial(called.JobSpec, grace=float(sys.argv[1]))

def work(rank):
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: open(f"asked-{rank}", "w").close())
    open(f"ready-{rank}", "w").close()
    while True: time.sleep(0.05)

if __name__ == "__main__":
    lockstep.spawn(work, nprocs=2)
"""


@pytest.mark.parametrize("ends", ["a second signal", "the time", "the time, without the caller"])
def test_ranks_that_do_not_end_when_their_caller_is_asked_to_are_killed(tmp_path: Path, ends: str) -> None:
    grace = "1000" if ends == "a second signal" else "1"
    (tmp_path / "main.py").write_text(_STAYS)
    with warm.Process(["main.py", grace], cwd=tmp_path, env=environment(tmp_path)) as process:
        wait_for(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)), "the ranks")
        everyone = descendants(process.pid)
        with killed_afterwards(everyone):
            process.send_signal(signal.SIGKILL if ends.endswith("without the caller") else signal.SIGINT)
            asked = [tmp_path / f"asked-{rank}" for rank in range(2)]
            wait_for(lambda: all(map(Path.exists, asked)) or gone_within(everyone, 0.0) == [], "the request")
            assert all(map(Path.exists, asked))
            while ends == "a second signal" and process.poll() is None:
                time.sleep(0.3)  # two that come within a quarter of a second are one
                process.send_signal(signal.SIGINT)
            wait_for(lambda: gone_within(everyone, 0.0) == [], "the end of the ranks")
        _, err = process.communicate(timeout=LIMIT)
    if ends == "a second signal":
        assert "stopped by SIGINT; a second signal killed ranks 0 and 1 at once" in err
    elif ends == "the time":
        assert "stopped by SIGINT; ranks 0 and 1 did not leave in time (--grace) and were killed" in err


_LEAVES = """
import time, lockstep
def work(rank, fifo):
    open(f"ready-{{rank}}", "w").close()
    open(fifo).read()
    print("done", flush=True)
if __name__ == "__main__":
    lockstep.spawn(work, ("fifo",), nprocs=1, join=False, daemon={daemon}).pids()
"""


@pytest.mark.parametrize("daemon", [False, True])
def test_a_caller_that_leaves_waits_for_ranks_unless_they_are_daemons(tmp_path: Path, daemon: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    with _program(tmp_path, _LEAVES.format(daemon=daemon)) as process:
        if not daemon:
            wait_for((tmp_path / "ready-0").exists, "the rank")
            time.sleep(0.05)  # nothing to wait for: the caller must still be there
            assert process.poll() is None
            (tmp_path / "fifo").write_text("go")
        out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (0, "" if daemon else "done\n"), err
