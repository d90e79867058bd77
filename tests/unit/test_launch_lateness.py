"""What is found out about a rank that is late, and how it is said."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TextIO

import pytest
import torch

import lockstep.comm.world
from lockstep import _proc
from lockstep.job import flight
from lockstep.job.files import JobFiles
from lockstep.job.hang import HangKind, HangVerdict, Standstill
from lockstep.job.page import STACK_SIGNAL, Cell, Look, Pages, Phase
from lockstep.launch import evidence, lateness
from lockstep.launch.evidence import Frame, Stillness
from lockstep.launch.hangs import HangWatch
from lockstep.launch.lateness import Known
from lockstep.launch.policy import RankState
from tests.launching import python, wait_for
from tests.unit.test_job_hang import NOW, _look

_DUMP = """\
Stack (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 4165 in barrier
  File "/home/me/train.py", line 12 in evaluate
  File "/home/me/train.py", line 40 in <module>
  File "/site-packages/lockstep/launch/rank.py", line 150 in _run_script
  File "/site-packages/lockstep/launch/zygote.py", line 60 in main
  File "<string>", line 6 in <module>
Stack (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
"""


def test_a_stack_is_the_main_threads_without_the_launchers_own_frames() -> None:
    stack = evidence.parse_stack(_DUMP)
    assert stack is not None
    assert [frame.line for frame in stack.frames] == ["4165", "12", "40"]
    assert stack.in_collective
    assert stack.users == Frame("/home/me/train.py", "12", "evaluate")
    assert not stack.in_debugger
    assert evidence.parse_stack("") is None


def test_a_stack_ends_above_what_pytest_does() -> None:
    lines = [
        "a.py",
        "/site-packages/_pytest/python.py",
        "/site-packages/pluggy/_callers.py",
        "/site-packages/lockstep/launch/rank.py",
    ]
    text = "Stack (most recent call first):\n" + "".join(f'  File "{file}", line 1 in f\n' for file in lines)
    found = evidence.parse_stack(text)
    assert found is not None
    assert [frame.file for frame in found.frames] == ["a.py"]
    itself = evidence.parse_stack(text.replace('  File "a.py", line 1 in f\n', ""))
    assert itself is not None
    assert len(itself.frames) == 2, "pytest itself is where it is"


def test_a_stack_that_can_not_be_read_is_none(tmp_path: Path) -> None:
    assert evidence.read_stack(tmp_path, 0, start=0) is None
    JobFiles(tmp_path).stack(0).mkdir()
    assert evidence.read_stack(tmp_path, 0, start=0) is None


def test_a_model_outside_of_a_step_and_a_debugger_are_seen() -> None:
    def stack(*files: str) -> evidence.Stack:
        return evidence.Stack(tuple(Frame(file, "1", "f") for file in files))

    modules = "/x/site-packages/torch/nn/modules"
    assert stack(f"{modules}/conv.py", f"{modules}/module.py", "/me/eval.py").in_model
    assert not stack("/me/model.py", f"{modules}/module.py").in_model, "a loop in the user's own forward"
    assert stack("/usr/lib/python3.12/pdb.py", "/usr/lib/python3.12/bdb.py", "/me/eval.py").in_debugger


@pytest.mark.parametrize("folder", ["torch/distributed", "torch/autograd", "lockstep/comm", "lib/python", "lockstep"])
def test_a_users_folder_that_is_named_like_a_library_is_the_users(folder: str) -> None:
    users, library = Frame(f"/home/me/{folder}/train.py", "3", "load"), Frame(torch.nn.__file__, "1", "f")
    stack = evidence.Stack((users, library))
    assert stack.users == evidence.Stack((library, Frame(contextlib.__file__, "1", "f"), users)).users == users
    assert not any([stack.in_collective, stack.in_engine, stack.in_model])


def test_the_libraries_of_this_environment_are_no_users() -> None:
    """However they are installed."""

    def stack(*modules: ModuleType) -> evidence.Stack:
        return evidence.Stack(tuple(Frame(str(module.__file__), "1", "f") for module in modules))

    assert stack(torch.distributed.distributed_c10d).in_collective
    assert stack(lockstep.comm.world).in_collective
    assert stack(torch.autograd.graph).in_engine
    assert stack(torch.nn.functional, torch.nn.modules.conv).in_model
    assert stack(torch, lockstep.comm.world, contextlib, pytest).users is None


def _describe(pid: int) -> str:
    facts = evidence.facts(pid)
    assert facts is not None
    return facts.describe()


def test_a_blocked_read_names_its_file_and_a_stopped_process_is_stopped(tmp_path: Path) -> None:
    fifo = tmp_path / "shard-7"
    os.mkfifo(fifo)
    code = "import os, sys; fd = os.open(sys.argv[1], os.O_RDWR); print('ready', flush=True); os.read(fd, 1)"
    with python(code, str(fifo)) as pid:
        wait_for(lambda: f"sleeping in read of {fifo}" in _describe(pid), "the read")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: _describe(pid) == "stopped by a signal (SIGCONT resumes it)", "the stop")
    assert evidence.facts(pid) is None


def test_a_busy_process_runs_and_uses_the_processor() -> None:
    with python("print('ready', flush=True)\nwhile True: pass") as pid:
        wait_for(lambda: _describe(pid) == "running", "the loop")
        before = evidence.facts(pid)
        assert before is not None
        wait_for(lambda: (now := evidence.facts(pid)) is not None and now.processor > before.processor, "a tick")


def test_only_a_process_with_a_handler_is_asked_for_its_stack() -> None:
    number = int(signal.SIGRTMIN) + 11
    with python("print('ready', flush=True)\nwhile True: pass") as pid:
        assert not _proc.catches(pid, number)
    code = f"import faulthandler; faulthandler.register({number}); print('ready', flush=True)\nwhile True: pass"
    with python(code) as pid:
        assert _proc.catches(pid, number)


def _standstill(pid: int, *, announced: bool) -> Standstill | None:
    """What is said of a process after a while of looking once in a while."""
    still = Stillness()
    found = [still.look(pid, now, announced=announced, waits=False) for now in (0.0, 2.0, 4.0)]
    assert found[0] in (None, Standstill.STOPPED), "a moment is no standstill"
    return found[-1]


_LOCKED = """
import threading
lock = threading.Lock()
lock.acquire()
{before}
print("ready", flush=True)
lock.acquire()
"""


def _until_asleep(pid: int) -> None:
    wait_for(lambda: (stat := _proc.stat(pid)) is not None and stat.state == "S", "the process to sleep")


@pytest.mark.parametrize("announced", [False, True])
def test_a_process_whose_threads_all_wait_for_each_other_cannot_go_on(announced: bool) -> None:
    before = "other = threading.Lock(); other.acquire(); threading.Thread(target=other.acquire).start()"
    with python(_LOCKED.format(before=before)) as pid:
        _until_asleep(pid)
        wait_for(lambda: _standstill(pid, announced=announced) is Standstill.LOCKED, "both locks")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: _standstill(pid, announced=announced) is Standstill.STOPPED, "the stop")


def test_what_was_announced_may_wait_for_a_thread_that_wakes_by_itself() -> None:
    before = "threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()"
    with python(_LOCKED.format(before=before)) as pid:
        _until_asleep(pid)
        wait_for(
            lambda: _standstill(pid, announced=False) is Standstill.LOCKED, "the lock; a progress bar goes on, say"
        )
        assert _standstill(pid, announced=True) is None


@pytest.mark.parametrize(
    "code",
    [
        "import time; print('ready', flush=True); time.sleep(60)",
        "import os; a, b = os.pipe(); print('ready', flush=True); os.read(a, 1)",
        "import threading; print('ready', flush=True); threading.Event().wait(60)",
        "import subprocess; print('ready', flush=True); subprocess.run(['sleep', '60'])",
        _LOCKED.format(before="import time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"),
    ],
    ids=["sleep", "read", "event", "child", "thread"],
)
def test_a_process_that_may_go_on_by_itself_is_not_at_a_standstill(code: str) -> None:
    with python(code) as pid:
        _until_asleep(pid)
        assert _standstill(pid, announced=False) is None


def test_who_is_ready_to_run_is_starved_if_its_processor_time_stands_still() -> None:
    with python("print('ready', flush=True)\nwhile True: pass") as pid:
        # Four seconds, by our clock, in no time, unless this process has none itself.
        wait_for(lambda: _standstill(pid, announced=False) is Standstill.STARVED, "four seconds in no time")
        still = Stillness()
        assert still.look(pid, 0.0, announced=False, waits=True) is None
        before = evidence.facts(pid)
        assert before is not None
        wait_for(lambda: (now := evidence.facts(pid)) is not None and now.processor > before.processor + 0.1, "work")
        assert still.look(pid, 4.0, announced=False, waits=True) is None, "it has worked meanwhile"
        facts = evidence.facts(pid)
        assert facts is not None
        assert "ready to run, but " in replace(facts, standstill=Standstill.STARVED).describe()


def test_threads_that_wait_for_each_other_are_no_standstill_in_a_collective() -> None:
    with python(_LOCKED.format(before="")) as pid:
        _until_asleep(pid)
        wait_for(lambda: _standstill(pid, announced=False) is Standstill.LOCKED, "the lock")
        still = Stillness()
        assert [still.look(pid, now, announced=False, waits=True) for now in (0.0, 5.0)] == [None, None]
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: still.look(pid, 6.0, announced=False, waits=True) is Standstill.STOPPED, "the stop")


def test_a_debugger_holds_and_a_zombie_is_dead() -> None:
    traced = (
        "import ctypes, os, signal\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n"  # PTRACE_TRACEME
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.waitpid(pid, 0)\n"
        "print('ready', flush=True)\nsignal.pause()"
    )
    with python(traced) as parent:
        (pid,) = _proc.children(parent)
        assert _standstill(pid, announced=True) is Standstill.TRACED
    with python("import os, time\nif os.fork() == 0: os._exit(0)\nprint('ready', flush=True)\ntime.sleep(60)") as pid:
        (child,) = _proc.children(pid)
        still = Stillness()
        wait_for(lambda: still.look(child, 0.0, announced=True, waits=True) is Standstill.DEAD, "the child's end")


def test_a_process_of_a_frozen_cgroup_is_frozen() -> None:
    group = Path(f"/sys/fs/cgroup/freezer/lockstep-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup of its own can be frozen here: {error}")
    try:
        with python("import time; print('ready', flush=True); time.sleep(60)") as pid:
            (group / "cgroup.procs").write_text(str(pid))
            (group / "freezer.state").write_text("FROZEN")
            try:
                still = Stillness()
                wait_for(lambda: still.look(pid, 0.0, announced=True, waits=True) is Standstill.FROZEN, "the freeze")
            finally:
                (group / "freezer.state").write_text("THAWED")
    finally:
        group.rmdir()


def _known(rank: int, **changes: object) -> Known:
    fields: dict[str, object] = {
        "pid": 4000 + rank, "exit_code": None, "look": _look(), "since": NOW - 7, "facts": None, "stack": None
    }  # fmt: skip
    return Known(rank, **{**fields, **changes})  # type: ignore[arg-type]


def test_the_report_names_the_late_rank_its_place_and_where_the_others_wait() -> None:
    late = _known(
        1,
        look=_look(entered=Phase.OPTIMIZER),
        facts=evidence.ProcessFacts("S", 1.0, "read of /data/7", "pipe_read"),
        stack=evidence.parse_stack(_DUMP),
    )
    waits = _known(0, look=_look(waiting=True, waits_in="all_reduce #12 at train.py:30 in step"))
    text = lateness.describe_late(
        HangVerdict(HangKind.LATE, (1,), (0,), NOW - 7), {0: waits, 1: late}, now=NOW, world_size=2
    )
    assert text.splitlines()[:5] == [
        "rank 1 of 2 has held up the others for 7 s",
        "  rank 1 (process 4001) is sleeping in read of /data/7 (pipe_read)",
        "  in your code for 7 s, after optimizer.step() at train.py:3 in step, 10 steps taken",
        "  its Python stack, the innermost line first:",
        "    /site-packages/torch/distributed/distributed_c10d.py:4165 in barrier",
    ]
    assert "  rank 0 waits in all_reduce #12 at train.py:30 in step, for 7 s" in text
    assert "expect_slow" in text


def test_a_rank_is_placed_by_its_stack_or_by_what_it_waited_in_last() -> None:
    def said(**changes: object) -> str:
        verdict = HangVerdict(HangKind.LATE, (1,), (0,), NOW - 7)
        ranks = {0: _known(0, look=_look(waiting=True, waits_in="barrier at train.py:3")), 1: _known(1, **changes)}
        return lateness.describe_late(verdict, ranks, now=NOW, world_size=2)

    stack = evidence.parse_stack(_DUMP)
    assert "  in forward for 7 s, at /home/me/train.py:12 in evaluate, 1 step taken" in said(
        look=_look(Phase.FORWARD, steps=1), stack=stack
    )
    assert "  in your code for 7 s, after fetching data, 10 steps taken" in said(look=_look(entered=Phase.DATA))
    assert "  it has not reported yet" in said(look=_look(Phase.START, serial=0, steps=None))
    stopped = said(look=_look(Phase.SAVE, waits_in="all_reduce #3 at train.py:25", reason="a long save"))
    assert "  in save for 7 s, 10 steps taken" in stopped
    assert "  it waited last in all_reduce #3 at train.py:25" in stopped
    assert "  inside lockstep.expect_slow('a long save')" in stopped
    assert stopped.splitlines()[-1].startswith("next: lockstep runs stack ")
    halted = said(facts=evidence.ProcessFacts("T", 1.0, "", ""))
    assert halted.splitlines()[-1] == "next: kill -CONT 4001 resumes rank 1"


def test_ranks_that_all_wait_are_told_apart_and_from_other_machines() -> None:
    one = _known(0, look=_look(waiting=True, waits_in="barrier at train.py:3"))
    other = _known(1, look=_look(waiting=True, waits_in="all_reduce at train.py:9", steps=11))
    verdict = HangVerdict(HangKind.APART, (), (0, 1), NOW - 7)
    text = lateness.describe_late(verdict, {0: one, 1: other}, now=NOW, world_size=2)
    assert text.startswith(
        "rank 1 of 2 has left out the collective that the others wait in, or they have one too many: "
        "all ranks have waited for 7 s\n"
    )
    assert "rank 0 waits in barrier at train.py:3" in text
    assert "it waits in all_reduce at train.py:9" in text
    elsewhere = lateness.describe_late(verdict, {0: one, 1: other}, now=NOW, world_size=4)
    assert elsewhere.startswith("all ranks of this machine have waited for 7 s: the late one is on another machine")


class _Dumps:
    """Writes its thread's stack when the garbage collector finds it."""

    def __init__(self, file: TextIO, look: Callable[[], None]) -> None:
        self.itself, self._file, self._look = self, file, look

    def __del__(self) -> None:
        self._look()
        faulthandler.dump_traceback(self._file, all_threads=False)


def test_a_rank_in_the_garbage_collector_is_named_so_and_keeps_its_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Look] = []
    with closing(Pages(tmp_path, 1)) as pages, open(tmp_path / "stack", "w") as file, pages.page(0) as page:
        own = flight.Flight(page)
        monkeypatch.setattr(flight, "current", own)
        gc.callbacks.append(flight._collects)
        try:
            _Dumps(file, lambda: looks.append(pages.look(0)))
            gc.collect()
        finally:
            gc.callbacks.remove(flight._collects)
        looks.append(pages.look(0))
        own._cells.release()
    stack = evidence.parse_stack((tmp_path / "stack").read_text())
    assert stack is not None
    assert [look.collects for look in looks] == [True, False]
    assert [frame.name for frame in stack.frames[:2]] == [
        "__del__",
        "test_a_rank_in_the_garbage_collector_is_named_so_and_keeps_its_stack",
    ]
    late = _known(1, look=looks[0], stack=stack)
    text = lateness.describe_late(HangVerdict(HangKind.LATE, (1,), (), NOW - 7), {1: late}, now=NOW, world_size=2)
    assert "  Python's garbage collector is running" in text
    assert text.splitlines()[-1].startswith("next: call gc.freeze() ")


_TAKES_STEPS = """
import os, sys, threading
from lockstep.job import flight
from lockstep.job.page import STACK_SIGNAL, Phase
page = flight.take(sys.argv[1], rank=int(sys.argv[2]), world_size=2)
for _ in range(3):
    page.took_step()
"""
_WAITS = f"""{_TAKES_STEPS}
page.begin_wait("averaging gradients")
print("ready", flush=True)
threading.Event().wait(300)
"""
_LOCKS = """
page.enter(Phase.SAVE)
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
lock.acquire()
"""


class _Watched:
    """Two ranks, each a process, and their launcher's watch over them; the clock and the question are the test's."""

    def __init__(self, hangs: HangWatch, pids: list[int]) -> None:
        self.hangs, self.pids = hangs, pids
        self.asked: list[int] = []
        self._states = {rank: RankState(rank, pid) for rank, pid in enumerate(pids)}
        self._now = time.monotonic()

    def look(self, seconds: float) -> list[str]:
        """What is said so many seconds after the look before."""
        self._now += seconds
        return self.hangs.look(self._states, self._now, ask=self._ask)

    def until_asked(self) -> None:
        """Look once a second until the ranks are asked for their stacks, which nobody sends on."""
        for _ in range(20):
            assert self.look(1.0) == []
            if self.asked:
                break
        assert self.asked == [0, 1]

    def answer(self, *ranks: int) -> None:
        """Send the question on, and wait until it is answered."""
        for rank in ranks:
            os.kill(self.pids[rank], STACK_SIGNAL)
            file = self.hangs._files.stack(rank)
            wait_for(lambda file=file: "in <module>" in file.read_text(), "the stack")  # type: ignore[misc]

    def _ask(self, ranks: Iterable[int], signum: int) -> None:
        assert signum == STACK_SIGNAL
        self.asked += ranks


@contextmanager
def _watched(folder: Path, *programs: str) -> Iterator[_Watched]:
    with ExitStack() as stack:
        pages = stack.enter_context(closing(Pages(folder, 2)))
        pids = [stack.enter_context(python(each, str(folder), str(rank))) for rank, each in enumerate(programs)]
        for pid in pids:
            _until_asleep(pid)
        yield _Watched(HangWatch(JobFiles(folder), pages, range(2), world_size=2, shortest=1.0), pids)


def _lines(said: list[str]) -> list[str]:
    (text,) = said
    assert text.startswith("rank 1 of 2 has held up the others for "), text
    return text.splitlines()


_NO_ANSWER = "  (it did not answer when asked for its Python stack)"
_SLEEPS = f"{_TAKES_STEPS}\nprint('ready', flush=True)\nthreading.Event().wait(300)"


def test_steps_are_dated_by_when_they_were_counted_also_if_the_launcher_lost_its_turn_before(tmp_path: Path) -> None:
    with _watched(tmp_path, _SLEEPS, _SLEEPS) as ranks:
        before = time.monotonic()
        for steps, late in ((3, 0.0), (13, 100.0)):
            for rank in range(2):
                ranks.hangs._pages.set(rank, Cell.STEPS, steps + 1)
            ranks.look(-late)  # which began so much earlier
        summary = ranks.hangs.summary(number=0, begin=before, machines=[("here", 2)], restarts=0, before=None)
        assert summary is not None
        assert summary.steps == 10
        assert 0.0 < summary.seconds < time.monotonic() - before


def test_a_report_waits_for_all_stacks_that_were_asked_for(tmp_path: Path) -> None:
    with _watched(tmp_path, _WAITS, _SLEEPS) as ranks:
        ranks.until_asked()
        assert ranks.look(0.5) == [], "the question has not come to any rank"
        ranks.answer(0)
        assert [ranks.look(0.5), ranks.look(0.5)] == [[], []]
        ranks.answer(1)
        assert ranks.look(0.01) == [], "more may come"
        lines = _lines(ranks.look(0.2))
        assert any(line.endswith("in <module>") for line in lines), lines
        assert _NO_ANSWER not in lines


def test_a_report_does_not_wait_for_a_rank_that_can_not_answer(tmp_path: Path) -> None:
    with _watched(tmp_path, _WAITS, _SLEEPS) as ranks:
        os.kill(ranks.pids[1], signal.SIGSTOP)
        wait_for(lambda: (stat := _proc.stat(ranks.pids[1])) is not None and stat.state == "T", "the stop")
        ranks.until_asked()
        ranks.answer(0)
        assert ranks.look(0.01) == []
        assert _NO_ANSWER in _lines(ranks.look(0.2))


def test_a_report_does_not_wait_long_for_a_rank_that_does_not_answer(tmp_path: Path) -> None:
    with _watched(tmp_path, _WAITS, _SLEEPS) as ranks:
        ranks.until_asked()
        assert ranks.look(1.9) == []
        assert _NO_ANSWER in _lines(ranks.look(0.2))


def test_a_rank_that_is_locked_stays_so_while_it_answers(tmp_path: Path) -> None:
    answers = """
import faulthandler, signal
def answer(*_):
    faulthandler.dump_traceback(stacks, all_threads=False)
    while True:
        pass
stacks = open(os.path.join(sys.argv[1], "stack-1"), "a")
signal.signal(STACK_SIGNAL, answer)
"""
    with _watched(tmp_path, _WAITS, _TAKES_STEPS + answers + _LOCKS) as ranks:
        ranks.until_asked()
        ranks.answer(0, 1)
        assert _proc.stat(ranks.pids[1]).state == "R"  # type: ignore[union-attr]
        assert ranks.look(0.01) == []
        assert any(line.endswith("in <module>") for line in _lines(ranks.look(0.2)))


def test_ranks_that_did_not_answer_are_asked_again_soon(tmp_path: Path) -> None:
    with _watched(tmp_path, _SLEEPS, _SLEEPS) as ranks:
        ranks.until_asked()
        assert [ranks.look(0.5) for _ in range(5)] == [[]] * 5, "nobody waits for anybody, as far as is known"
        ranks.asked.clear()
        ranks.until_asked()
