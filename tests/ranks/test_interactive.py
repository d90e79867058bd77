"""Ranks that live on and run cells, as a program uses them."""

from __future__ import annotations

import json
import os
import signal
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import lockstep
from lockstep import knobs
from lockstep.interactive.cell import RemoteValue, RunningCell
from lockstep.interactive.messages import RunCell
from lockstep.interactive.output import CellText
from lockstep.interactive.pool import RankPool
from lockstep.interactive.ranks import follow
from tests.launching import gone_within

#: A cell after which ranks can train, and know a collective.
TRAINING = """
    import os, time, torch, lockstep
    import torch.distributed as dist
    world = lockstep.init()
    model = lockstep.replicate(torch.nn.Linear(4, 4))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    done = 0

    def step():
        global done
        model(torch.randn(2, 4) + world.rank).sum().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        done += 1

    def of_all(number):
        found = [None] * world.world_size
        dist.all_gather_object(found, number)
        return found
"""


@contextmanager
def _ranks(count: int = 2, *, first: str = "import os; rank = int(os.environ['RANK'])") -> Iterator[_Ranks]:
    with _Ranks(count) as ranks:
        ranks.cell(first)
        yield ranks


class _Ranks(lockstep.InteractiveRanks):
    """The same, with cells that may be indented."""

    def cell(self, source: str) -> object:
        return self.run(textwrap.dedent(source))

    def interrupted(self, source: str, *, times: int = 1) -> BaseException:
        """Run a cell, interrupt it as a terminal would once each rank has printed "now", and return what it raises."""
        running = self.begin(textwrap.dedent(source))
        said: set[int] = set()
        for each in follow(running):
            said |= _says_now(each)
            if len(said) == self.nprocs:
                said.clear()
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
        return _raised(running)

    def begun(self, source: str) -> RunningCell:
        """Begin a cell, and return once each rank has printed "now"."""
        running = self.begin(textwrap.dedent(source))
        said: set[int] = set()
        while len(said) < self.nprocs:
            assert not running.is_over, _raised(running)
            said = said.union(*map(_says_now, running.turn()))
        return running

    def not_stopped(self, source: str) -> BaseException:
        """Run a cell that only rank 0 leaves when it is interrupted, and return what it raises. The time until all are
        ended begins when rank 0 has left."""
        running = self.begun(source)
        running.interrupt()
        while 0 not in running._ended:
            running.turn()
        running._next_way = 0.0
        while not running.is_over:
            running.turn()
        return _raised(running)


def _says_now(each: object) -> set[int]:
    return {each.rank} if isinstance(each, CellText) and "now" in each.text.split() else set()


def _raised(running: RunningCell) -> BaseException:
    with pytest.raises((lockstep.LockstepError, KeyboardInterrupt)) as raised:
        running.result()
    return raised.value


@pytest.mark.usefixtures("bare")
def test_variables_stay_and_the_value_of_the_last_line_comes_back(capfd: pytest.CaptureFixture[str]) -> None:
    with _ranks() as ranks:
        assert ranks.run("x = [rank + 40]\nx.append('ü')") is None
        assert ranks.run("x") == [40, "ü"]
        assert ranks.run("x;") is None
        assert ranks.run("def twice(n):\n    return 2 * n\nprint('said', twice(rank))\ntwice(21)") == 42
    assert capfd.readouterr().out == "said 0\n"


@pytest.mark.usefixtures("bare")
def test_each_rank_has_its_own_output_whoever_writes_it() -> None:
    source = """
        import subprocess, sys
        print("python", rank, end="")
        print("error", rank, file=sys.stderr)
        subprocess.run(["echo", f"child {rank}"])
        print("\\r10%\\r100%")
    """
    with _ranks() as ranks:
        running = ranks.begin(textwrap.dedent(source))
        heard = list(follow(running))
        assert running.result() is None
    live = "".join(each.text for each in heard if isinstance(each, CellText) and (each.rank, each.stream) == (0, 1))
    assert live == "child 0\npython 0\r10%\r100%\n"  # a child writes past what Python holds until a line ends
    assert sorted(running.output[1].text.splitlines()) == ["100%", "child 1", "error 1"]


@pytest.mark.usefixtures("bare")
def test_an_error_has_the_frames_of_the_cells_alone() -> None:
    with _ranks() as ranks:
        ranks.run("def g():\n    raise KeyError(rank)")
        with pytest.raises(lockstep.CellFailed) as raised:
            ranks.run("x = 1\nif rank == 1:\n    g()")
        assert raised.value.rank == 1
        assert list(raised.value.errors) == [1]
        assert str(raised.value) == (
            "rank 1 failed: KeyError: 1\nTraceback (most recent call last):\n"
            '  File "<cell 3>", line 3, in <module>\n    g()\n'
            '  File "<cell 2>", line 2, in g\n    raise KeyError(rank)\nKeyError: 1'
        )
        with pytest.raises(
            lockstep.CellFailed, match=r"^all ranks failed: SyntaxError: .*\n  File \"<cell 4>\", line 1"
        ):
            ranks.run("def (")
        with pytest.raises(lockstep.CellFailed, match="all ranks failed: SystemExit: 3"):
            ranks.run("import sys; sys.exit(3)")
        assert ranks.run("x") == 1
        with pytest.raises(
            lockstep.CellFailed, match=r"NoTerminal: rank 1 is at a breakpoint .<cell 7>:1 in <module>.,"
        ):
            ranks.run("breakpoint() if rank == 1 else None")
        assert ranks.run("x") == 1


@pytest.mark.usefixtures("bare")
def test_what_cannot_be_sent_is_shown_as_rank_0_shows_it() -> None:
    with _ranks() as ranks:
        value = ranks.run("import threading\n[threading.Lock()]")
        assert isinstance(value, RemoteValue)
        assert repr(value).startswith("[<unlocked _thread.lock object at")
        assert "pickle" in value.reason
        point = ranks.run("class Point:\n    def __init__(self, x): self.x = x\nPoint(3)")
        assert getattr(point, "x") == 3  # noqa: B009  (a class that only the ranks know comes along)
        assert ranks.run("class Odd:\n    def __repr__(self): raise ValueError('no')\nOdd()") is not None


@pytest.mark.usefixtures("bare")
def test_an_interrupt_ends_the_cell_on_all_ranks_which_live_on() -> None:
    with _ranks() as ranks:
        pids = ranks.pids()
        source = "import time\nx = 7\n\ntry:\n    print('now', flush=True); time.sleep(1000)\nfinally:\n    x = 8"
        error = ranks.interrupted(source)
        assert isinstance(error, lockstep.CellInterrupted)
        assert error.traceback.splitlines()[1] == '  File "<cell 2>", line 5, in <module>'
        assert ranks.run("x") == 8
        assert ranks.pids() == pids


@pytest.mark.usefixtures("bare")
def test_sigint_that_a_kernel_sends_to_its_whole_group_asks_ranks_for_nothing() -> None:
    with _ranks() as ranks:
        for pid in ranks.pids():
            os.kill(pid, signal.SIGINT)  # between cells
        assert ranks.run("os.kill(os.getpid(), 2)\nrank") == 0  # and in one


@pytest.mark.usefixtures("bare")
def test_a_handler_that_a_cell_sets_lasts_for_the_cell() -> None:
    with _ranks() as ranks:
        ranks.run("import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)")
        for pid in ranks.pids():
            os.kill(pid, signal.SIGINT)
        error = ranks.interrupted("import time\nprint('now', flush=True)\ntime.sleep(1000)")
        assert isinstance(error, lockstep.CellInterrupted)
        assert ranks.run("rank") == 0


@pytest.mark.usefixtures("bare")
def test_several_interrupts_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "stranded=0.1,parting=120")
    source = """
        import time
        try:
            print('now', flush=True)
            time.sleep(1000)
        finally:
            time.sleep(0.5)  # tidies up
    """
    with _ranks() as ranks:
        error = ranks.interrupted(source, times=4)
        assert isinstance(error, lockstep.CellInterrupted), error
        assert ranks.run("rank") == 0


@pytest.mark.usefixtures("bare")
def test_interrupts_that_go_on_end_ranks_that_do_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "stranded=0.1,parting=1000")
    with _ranks() as ranks:
        running = ranks.begun("""
            import time
            while True:
                try: print('now', flush=True); time.sleep(1000)
                except KeyboardInterrupt: pass
        """)
        while not running.is_over:
            running.turn()
            running.interrupt()
        with pytest.raises(lockstep.RankFailed, match="did not stop when the cell was interrupted"):
            running.result()


@pytest.mark.usefixtures("bare")
def test_an_interrupt_while_a_cell_begins_is_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with _ranks() as ranks:
        send = RankPool.send

        def interrupted(pool: RankPool, rank: int, message: object, fds: Sequence[int] = ()) -> None:
            send(pool, rank, message, fds)
            if isinstance(message, RunCell) and rank == 0:
                signal.raise_signal(signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(RankPool, "send", interrupted)
            with pytest.raises(lockstep.CellInterrupted, match="on ranks 0 and 1"):
                ranks.run("import time; time.sleep(1000)")
        assert ranks.run("rank") == 0


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("last", ["'of the fork'", "raise ValueError('in the fork')", "raise SystemExit(3)"])
def test_a_process_that_a_cell_forks_ends_with_the_cell(last: str, capfd: pytest.CaptureFixture[str]) -> None:
    source = f"""
        pid, value = os.fork() if rank == 0 else None, 9
        if pid:
            value = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        elif pid == 0:
            print('said by the fork')
            {last}
        value
    """
    with _ranks() as ranks:
        assert ranks.cell(source) == {"'": 0, "r": 1 if "Value" in last else 3}[last[0]]
        assert ranks.run("'next'") == "next"
    written = capfd.readouterr()
    assert written.out == "said by the fork\n"
    assert ("ValueError: in the fork" in written.err) == ("Value" in last)


@pytest.mark.usefixtures("bare")
def test_a_rank_that_does_not_stop_is_ended_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "stranded=1000,parting=1")
    source = """
        import time
        while rank == 1 or 'said' not in globals():
            try:
                said = True
                print('now', flush=True)
                time.sleep(1000)
            except KeyboardInterrupt:
                pass
    """
    with _ranks() as ranks:
        pids = ranks.pids()
        error = ranks.not_stopped(source)
        assert isinstance(error, lockstep.RankFailed)
        assert "rank 1 did not stop when the cell was interrupted: all ranks were ended" in str(error)
        assert gone_within(pids, 1.0) == []
        assert not ranks.is_alive


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("if rank == 1: os.kill(os.getpid(), 9)\nelse: __import__('time').sleep(1000)", "killed by signal 9"),
        ("if rank == 1: os._exit(0)\nelse: __import__('time').sleep(1000)", "rank 1 left with exit code 0"),
        ("if rank == 1: os._exit(7)", "rank 1 of 2 failed: exit code 7"),
    ],
)
def test_a_rank_that_dies_is_named_and_ends_the_others(source: str, said: str) -> None:
    with _ranks() as ranks:
        pids = ranks.pids()
        with pytest.raises(lockstep.RankFailed, match=said) as raised:
            ranks.run(source)
        assert raised.value.rank == 1
        assert gone_within(pids, 1.0) == []
        with pytest.raises(lockstep.RankFailed, match=said):
            ranks.run("1")


@pytest.mark.usefixtures("bare")
def test_the_last_words_of_a_rank_are_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with _ranks() as ranks, pytest.raises(lockstep.RankFailed, match="killed by signal 9"):
        # rank 0 alone: were rank 1 the first to die, rank 0 would be ended before it has said anything
        ranks.run("if rank == 0:\n    print('last words')\n    os.kill(os.getpid(), 9)")
    assert capfd.readouterr().out == "last words\n"


@pytest.mark.usefixtures("bare")
def test_a_death_between_cells_is_noticed_before_the_next() -> None:
    with _ranks() as ranks:
        os.kill(ranks.pids()[1], signal.SIGKILL)
        assert gone_within([ranks.pids()[1]], 30.0) == []
        with pytest.raises(lockstep.RankFailed, match="rank 1 of 2 failed: killed by signal 9"):
            ranks.run("1")


@pytest.mark.usefixtures("bare")
def test_closed_ranks_leave_as_programs_do() -> None:
    with _ranks() as ranks:
        pids = ranks.pids()
        ranks.run("import atexit\natexit.register(lambda: open('/dev/null').close())")
    assert gone_within(pids, 0.0) == []
    with pytest.raises(lockstep.LaunchError, match="the ranks were closed"):
        ranks.run("1")
    ranks.close()


@pytest.mark.usefixtures("bare")
def test_a_hundred_cells_leave_nothing_behind() -> None:
    held = "import os\n(len(os.listdir('/proc/self/fd')), __import__('threading').active_count())"
    with _ranks() as ranks:
        ours, theirs = len(os.listdir("/proc/self/fd")), ranks.run(held)
        for number in range(100):
            ranks.run(f"x = {number}\nprint(x)\nx")
        assert (len(os.listdir("/proc/self/fd")), ranks.run(held)) == (ours, theirs)


def test_the_number_of_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match="nprocs=0: expected at least 1"):
        lockstep.InteractiveRanks(0)


# With torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("warm_zygote")
def test_ranks_make_a_world_and_train_on_from_cell_to_cell() -> None:
    with _ranks(3, first=TRAINING) as ranks:
        assert ranks.run("of_all(world.rank)") == [0, 1, 2]
        for _ in range(3):
            ranks.run("step()")
        assert ranks.run("of_all(done)") == [3, 3, 3]
        assert ranks.run("model.weight.detach()").shape == (4, 4)
        assert ranks.run("len(set(of_all(model.weight.sum().item())))") == 1


@pytest.mark.usefixtures("warm_zygote")
def test_an_interrupt_in_training_comes_after_the_same_step_on_all_ranks() -> None:
    with _ranks(first=TRAINING) as ranks:
        error = ranks.interrupted("while True:\n    step()\n    if done == 20: print('now', flush=True)")
        assert isinstance(error, lockstep.CellInterrupted)
        assert "line 12, in step" in error.traceback  # opt.step()
        done = ranks.run("of_all(done)")
        assert done[0] == done[1] >= 20
        ranks.run("step()")
        assert ranks.run("len(set(of_all(model.weight.sum().item())))") == 1


@pytest.mark.usefixtures("warm_zygote")
def test_an_interrupt_waits_for_the_same_step_of_ranks_whose_steps_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "to_a_step=0.1")
    with _ranks(first=TRAINING) as ranks:
        slow = "import time\nwhile True:\n    time.sleep(0.4); step()\n    if done == 3: print('now', flush=True)"
        error = ranks.interrupted(slow)
        assert isinstance(error, lockstep.CellInterrupted)
        assert "in step" in error.traceback, "a KeyboardInterrupt where the ranks are would come in time.sleep()"
        done = ranks.run("of_all(done)")
        assert done[0] == done[1] >= 3


@pytest.mark.usefixtures("warm_zygote")
@pytest.mark.parametrize("way", ["raised", "left out", "interrupted"])
def test_ranks_that_wait_for_one_that_will_not_come_are_freed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2")
    total = "t = torch.tensor([world.rank + 1.0])\ndist.all_reduce(t)\nt.item()"
    with _ranks(3, first=TRAINING) as ranks:
        ranks.run("for _ in range(3): step()")
        if way == "raised":
            with pytest.raises(lockstep.CellFailed) as raised:
                ranks.run(f"if world.rank == 1: raise ValueError('bad')\n{total}")
            assert raised.value.rank == 1
            assert str(raised.value).startswith("rank 1 failed: ValueError: bad\n")
            assert sorted(raised.value.errors) == [0, 1, 2]
            assert "rank 1 has ended the cell by ValueError: bad" in raised.value.errors[0]
        elif way == "left out":
            with pytest.raises(lockstep.CellFailed) as raised:
                ranks.run("if world.rank == 0:\n    dist.barrier()")
            assert "rank 0 waits for all ranks (rank 0 in barrier" in str(raised.value)
            assert "<cell 3>:2" in str(raised.value)
            assert "ranks 1 and 2 have come to the end of the cell without that call" in str(raised.value)
        else:
            error = ranks.interrupted(f"print('now', flush=True)\nif world.rank == 2: time.sleep(1000)\n{total}")
            assert isinstance(error, lockstep.CellInterrupted)
        assert ranks.run(total) == 6.0  # the process group is a new one,
        ranks.run("step()")  # and the replica as it was
        assert ranks.run("of_all(done)") == [4, 4, 4]
        assert ranks.run("len(set(of_all(model.weight.sum().item())))") == 1


@pytest.mark.usefixtures("warm_zygote")
def test_messages_of_a_failed_cell_do_not_reach_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2")
    with _ranks(first=TRAINING) as ranks:
        with pytest.raises(lockstep.CellFailed, match="rank 1 failed: ZeroDivisionError"):
            ranks.cell("""
                if world.rank == 1:
                    1 / 0
                sent = [dist.isend(torch.tensor([float(n)]), 1) for n in range(5)]
                dist.recv(torch.zeros(1), 1)
            """)
        found = ranks.cell("""
            sent, t = None, torch.zeros(5, 1)
            for number, each in enumerate(t):
                if world.rank == 0: dist.send(each + number + 10, 1)
                else: dist.recv(each, 0)
            of_all(t.flatten().tolist())
        """)
        assert found == [[0.0] * 5, [10.0, 11.0, 12.0, 13.0, 14.0]]


@pytest.mark.usefixtures("warm_zygote")
@pytest.mark.parametrize("rest", ["opt.step()", "opt.step()\nstep()"], ids=["ends", "waits for the one that failed"])
def test_steps_that_only_some_ranks_took_are_told(
    rest: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2")
    with (
        _ranks(first=TRAINING) as ranks,
        pytest.raises(lockstep.CellFailed, match="rank 1 failed: ZeroDivisionError"),
    ):
        ranks.run(f"step()\nif world.rank: 1 / 0\n{rest}")
    assert "different numbers of optimizer steps in this cell (rank 0: 2 and rank 1: 1)" in capfd.readouterr().err


@pytest.mark.usefixtures("warm_zygote")
def test_a_late_rank_is_reported_in_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2")
    flag = tmp_path / "goes on"
    source = f"if world.rank == 1:\n    while not os.path.exists({str(flag)!r}): time.sleep(0.01)\ndist.barrier()"
    with _ranks(first=TRAINING) as ranks:
        ranks.run("for _ in range(3): step()")
        running = ranks.begin(source)
        said: list[str] = []
        for each in follow(running):
            if isinstance(each, str):
                said.append(each)
                flag.touch()
        assert running.result() is None
    assert "rank 1 of 2 has held up the others" in said[0]
    assert "<cell 3>:2 in <module>" in said[0]


@pytest.mark.usefixtures("warm_zygote")
def test_a_rank_at_the_end_of_a_cell_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2")  # late after a second
    with _ranks(first=TRAINING) as ranks:
        ranks.run("for _ in range(3): step()")
        running = ranks.begin("if world.rank == 0:\n    for _ in range(4): time.sleep(1)")
        assert [each for each in follow(running) if isinstance(each, str)] == []
        assert running.result() is None


@pytest.mark.usefixtures("warm_zygote")
def test_over_gloo_a_wait_that_cannot_be_freed_ends_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(knobs.TIMES, "0.2,stranded=1000,parting=1")
    monkeypatch.setenv(knobs.BACKEND, "gloo")
    flag = str(tmp_path / "flag")
    source = f"""
        pid = of_all(os.getpid())[1]
        if world.rank == 1:
            print("now", flush=True)
            open({flag!r}, "w").close()
            dist.barrier()
        while not os.path.exists({flag!r}) or open(f"/proc/{{pid}}/stat").read().rpartition(") ")[2][0] != "S":
            pass  # until rank 1 sleeps in the barrier
        print("now", flush=True)
        time.sleep(1000)
    """
    with _ranks(first=TRAINING) as ranks:
        error = ranks.not_stopped(source)
        assert isinstance(error, lockstep.RankFailed)
        assert "rank 1 did not stop when the cell was interrupted" in str(error)


@pytest.mark.usefixtures("warm_zygote")
def test_over_gloo_the_ranks_open_another_process_group(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(knobs.BACKEND, "gloo")
    with _ranks(first=TRAINING) as ranks:
        ranks.run("step()")
        with pytest.raises(lockstep.CellFailed, match="rank 1 failed: ZeroDivisionError"):
            ranks.run("t = torch.ones(1)\nif world.rank: 1 / 0\nwork = dist.all_reduce(t, async_op=True)")
        assert "run the cells with lockstep.replicate" in capfd.readouterr().err
        assert ranks.run("world.all_reduce(world.rank + 1)") == 3
        ranks.run("lockstep.release(model)\nmodel = lockstep.replicate(model)\nstep()")
        assert ranks.run("len(set(of_all(model.weight.sum().item())))") == 1


@pytest.mark.usefixtures("bare")
def test_an_interrupt_before_the_ranks_have_started_ends_the_first_cell() -> None:
    with _Ranks(2) as ranks:
        running = ranks.begin("import time\ntime.sleep(1000)")
        running.interrupt()
        list(follow(running))
        with pytest.raises(lockstep.CellInterrupted):
            running.result()
        assert ranks.run("1 + 1") == 2


@pytest.mark.usefixtures("warm_zygote")
def test_the_record_of_the_run_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with _ranks(first=TRAINING) as ranks:
        ranks.run("for _ in range(20): step()")
    (record,) = tmp_path.rglob("run.json")
    assert json.loads(record.read_text())["end"]["code"] == "run-done"


def test_a_fork_of_the_program_that_ends_leaves_its_ranks_alone() -> None:
    with _ranks() as ranks:
        pid = os.fork()
        if not pid:
            ranks.close()  # as Python does in a fork that comes to its end
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert ranks.cell("rank") == 0
