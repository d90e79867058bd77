"""Breakpoints on any rank, on a real terminal: a pty, whose other end is the user's keyboard and screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lockstep import _proc
from tests import launching
from tests.launching import LIMIT, environment, gone_within, killed_afterwards, run, wait_for

_CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class _Terminal:
    """A terminal, and the first process of its session."""

    def __init__(self, leader: int, screen: int) -> None:
        self.leader, self.screen = leader, screen
        #: All that was shown, and how much of it has been looked at.
        self.shown, self._read = "", 0
        self._code: int | None = None

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.screen, keys.encode())

    def until(self, text: str) -> str:
        """Wait until ``text`` is shown, and return what came since the last look, ``text`` included."""
        limit = min(time.monotonic() + LIMIT, launching.test_ends - 10.0)
        while (place := self.shown.find(text, self._read)) < 0:
            shows = time.monotonic() < limit and self._show(1.0)
            assert shows, f"no {text!r} in\n{self.shown[self._read :]}"
        found, self._read = self.shown[self._read : place + len(text)], place + len(text)
        return found

    def interrupt(self, prompt: str) -> str:
        """Press Ctrl-C until the prompt comes, and return what is shown up to it. (One that falls between a prompt and
        Python's wait for a key is acted on with the next one: so it is in readline under ``python``, too.)"""
        limit = min(time.monotonic() + LIMIT, launching.test_ends - 10.0)
        pressed = 0.0
        while self.shown.find(prompt, self._read) < 0:
            now = time.monotonic()
            assert now < limit, f"no {prompt!r} in\n{self.shown[self._read :]}"
            if now - pressed > 2.0:
                self.type("\x03")
                pressed = now
            self._show(0.1)
        return self.until(prompt)

    def command(self, line: str, prompt: str) -> str:
        """Type a command, and return what is shown up to the next prompt."""
        self.type(f"{line}\n")
        return self.until(prompt)

    def foreground(self) -> int:
        """The process group that has the terminal."""
        return os.tcgetpgrp(self.screen)

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self.screen)
        self.screen = -1

    def end(self) -> int:
        """Read to the end, and return the leader's exit code."""
        limit = min(time.monotonic() + LIMIT, launching.test_ends - 10.0)
        while self.code() is None:
            assert time.monotonic() < limit, f"no end after\n{self.shown}"
            self._show(0.05)
        while self._show(0.0, ended=True):
            pass
        assert self._code is not None
        return self._code

    def code(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.leader, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def _show(self, seconds: float, *, ended: bool = False) -> bool:
        """Take what has come; return False at the end."""
        if self.screen < 0:
            time.sleep(seconds)
            return False
        if not select.select([self.screen], [], [], seconds)[0]:
            return not ended
        try:
            data = os.read(self.screen, 1 << 16)
        except OSError:
            return False
        self.shown += _CODES.sub("", data.decode(errors="replace"))
        return bool(data)


@contextmanager
def _terminal(folder: Path, command: list[str], *, torch: bool = False, **env: str) -> Iterator[_Terminal]:
    """Start a command in a terminal of its own, whose window has 40 rows and 100 columns."""
    screen, keyboard = pty.openpty()
    fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    environ = environment(folder, torch=torch, TERM="xterm", **env)
    leader = os.fork()
    if leader == 0:
        os.setsid()
        fcntl.ioctl(keyboard, termios.TIOCSCTTY, 0)
        for fd in range(3):
            os.dup2(keyboard, fd)
        os.closerange(3, 100)
        os.chdir(folder)
        os.execvpe(command[0], command, environ)
    os.close(keyboard)
    terminal = _Terminal(leader, screen)
    try:
        yield terminal
    finally:
        if terminal.code() is None:
            with killed_afterwards([leader, *_proc.descendants(leader)]):
                pass
            with suppress(ChildProcessError):
                os.waitpid(leader, 0)
        if terminal.screen >= 0:
            terminal.hang_up()


def _run(*words: str) -> list[str]:
    return [sys.executable, "-m", "lockstep", "run", *words]


_ON_RANK_1 = """
import os
rank = int(os.environ["RANK"])
def step(answer):
    if rank == 1:
        breakpoint()
    return answer + 1
print(rank, "says", step(41))
"""
_PROMPT = "(Pdb, rank 1) "
#: How many lines after a breakpoint pdb stops.
_AFTER = 0 if sys.version_info >= (3, 13) else 1


def _next(terminal: _Terminal, prompt: str = _PROMPT) -> str:
    """Wait for the prompt of a breakpoint, and return what is shown until that of the line after it."""
    shown = terminal.until(prompt)
    return shown if _AFTER else shown + terminal.command("n", prompt)


def _log(tmp_path: Path, rank: int) -> str:
    (log,) = (tmp_path / "state").rglob(f"rank{rank}.log")
    return log.read_text()


def test_a_breakpoint_on_rank_1_has_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ON_RANK_1)
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        told = _next(terminal)
        assert "lockstep: rank 1 is at a breakpoint (train.py:6 in step); the others wait." in told
        assert "\n-> return answer + 1\n" in told
        assert "\n41\n" in terminal.command("p answer", _PROMPT)
        frames = terminal.command("w", _PROMPT)
        assert frames.count("train.py(") == frames.count("-> ") == 2, "the program's frames, and none of the launcher's"
        assert "columns=100, lines=40" in terminal.command("!import os; print(os.get_terminal_size())", _PROMPT)
        terminal.type("p answer * 20\x1b[D\x1b[D\x1b[D\x1b[D\x1b[D-\x1b[C\x1b[C1\n")  # p answer- *120 …
        assert "SyntaxError" in terminal.until(_PROMPT)
        terminal.type("\x1b[A\x1b[A\x1b[A\x1b[A\n")  # the first one again
        assert terminal.until(_PROMPT).endswith(f"p answer\n41\n{_PROMPT}")
        assert "--Return--\n" in terminal.command("n", _PROMPT)
        assert "train.py(8)<module>()->None\n" in terminal.command("n", _PROMPT), "past a print"
        terminal.type("n\n")
        assert terminal.end() == 0
    assert terminal.shown.count("lockstep: rank 1 is at") == 1
    assert _log(tmp_path, 1) == "1 says 42\n", "what it prints by itself goes where it always goes"


def test_q_ends_the_job_and_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('begins')" + _ON_RANK_1 + "if rank == 0: import time; time.sleep(600)\n")
    with _terminal(tmp_path, _run("-n", "2", "--max-restarts", "3", "train.py")) as terminal:
        terminal.until(_PROMPT)
        terminal.type("q\n")
        assert terminal.end() == 128 + signal.SIGINT
    assert f"\nlockstep: ended at a breakpoint, on rank 1 (train.py:{6 + _AFTER} in step)\n" in terminal.shown
    assert "Traceback" not in terminal.shown
    assert _log(tmp_path, 1) == "begins\n"


_BOTH = """
import os, sys
rank = int(os.environ["RANK"])
def meet(name):
    open(f"{name}-{rank}", "w").close()
    while not os.path.exists(f"{name}-{1 - rank}"):
        pass
breakpoint()
meet("first")
meet("second")
print("met")
"""


def test_two_ranks_take_turns(tmp_path: Path) -> None:
    """Also where one runs on into what needs the other, which waits for its turn."""
    (tmp_path / "train.py").write_text(_BOTH)
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        terminal.until("(Pdb, rank ")
        first = int(terminal.until(") ")[0])
        if not _AFTER:
            terminal.command("n", f"(Pdb, rank {first}) ")
        prompts = {rank: f"(Pdb, rank {rank}) " for rank in range(2)}
        terminal.type("n\n")
        there = _next(terminal, prompts[1 - first])  # the first waits in meet() for the second
        assert '-> meet("first")' in there
        assert f"lockstep: rank {1 - first} is at a breakpoint" in there
        terminal.type("c\n")
        assert '-> meet("second")' in terminal.until(prompts[first])
        assert "p rank" in terminal.command("p rank", prompts[first])
        terminal.type("c\n")
        assert terminal.end() == 0
    assert "met" in terminal.shown


def test_an_interrupt_at_the_prompt_is_the_debuggers(tmp_path: Path) -> None:
    """After c it is the job's again."""
    (tmp_path / "train.py").write_text(
        _ON_RANK_1
        + "try:\n    open(f'goes-on-{rank}', 'w').close()\n    while True: pass\n"
        + "except KeyboardInterrupt:\n    open(f'interrupted-{rank}', 'w').close()\n    raise\n"
    )
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        terminal.until(_PROMPT)
        wait_for((tmp_path / "goes-on-0").exists, "the end of what rank 0 does by itself")
        terminal.type("half a line")
        terminal.until("half a line")  # (an interrupt takes what is typed and not yet read from under readline's hands)
        assert "--KeyboardInterrupt--" in terminal.interrupt(_PROMPT)
        terminal.type("!open('evaluates', 'w').close()\n!while True: pass\n")
        wait_for((tmp_path / "evaluates").exists, "the command")
        terminal.until("while True: pass\n")
        assert "KeyboardInterrupt" in terminal.interrupt(_PROMPT)
        assert "41" in terminal.command("p answer", _PROMPT)
        assert not (tmp_path / "interrupted-0").exists()
        terminal.type("c\n")
        wait_for((tmp_path / "goes-on-1").exists, "the rest of the program")
        wait_for(lambda: terminal.foreground() == terminal.leader, "the terminal's return")
        terminal.type("\x03")
        assert terminal.end() == 128 + signal.SIGINT
    assert "lockstep: stopped by SIGINT" in terminal.shown
    assert all((tmp_path / f"interrupted-{rank}").exists() for rank in range(2))


def test_an_interrupt_reaches_the_line_that_a_rank_runs_on_to(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\n"
        "rank = int(os.environ['RANK'])\n"
        "def spin():\n"
        "    open(f'spins-{rank}', 'w').close()\n"
        "    while True: pass\n"
        "if rank == 1: breakpoint()\n"
        "try: spin()\n"
        "except KeyboardInterrupt: open(f'interrupted-{rank}', 'w').close()\n"
        "last = 'line'\n"
    )
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        assert "-> try: spin()\n" in _next(terminal)
        terminal.type("n\n")
        wait_for((tmp_path / "spins-1").exists, "the line")
        terminal.type("\x03")
        assert "KeyboardInterrupt" in terminal.until(_PROMPT)
        while "-> last = 'line'" not in terminal.command("n", _PROMPT):
            pass
        assert sorted(path.name for path in tmp_path.glob("interrupted-*")) == ["interrupted-1"]
        terminal.type("q\n")
        assert terminal.end() == 128 + signal.SIGINT


def test_a_rank_that_dies_at_its_prompt_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ON_RANK_1 + "if rank == 0: import time; time.sleep(600)\n")
    look = 'stty -a > before; "$@"; echo "code $?"; stty -a > after; read line; echo "read $line"'
    with _terminal(tmp_path, ["bash", "-c", look, "bash", *_run("-n", "2", "train.py")]) as terminal:
        terminal.until(_PROMPT)
        terminal.command("!open('pid', 'w').write(str(__import__('os').getpid()))", _PROMPT)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        terminal.until(f"code {128 + signal.SIGKILL}\n")
        terminal.type("a line\n")
        terminal.until("read a line\n")
        assert terminal.end() == 0
    # By words: stty breaks its lines by a width that bash finds out in between.
    assert (tmp_path / "before").read_text().split() == (tmp_path / "after").read_text().split()
    assert "rank 1 of 2 failed: killed by signal 9 (SIGKILL)" in terminal.shown


def test_what_another_rank_prints_waits_for_the_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "def wait(name):\n"
        "    while not os.path.exists(name): time.sleep(0.01)\n"
        "if rank == 1: breakpoint()\n"
        "else:\n"
        "    wait('at-the-prompt')\n"
        "    open('prints', 'w').close()\n"
        "    print('a line of rank 0')\n"
        "    open('printed', 'w').close()\n"
        "open(f'ends-{rank}', 'w').close()\n"
    )
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        terminal.until(_PROMPT)
        (tmp_path / "at-the-prompt").touch()
        wait_for((tmp_path / "prints").exists, "the print")
        terminal.type("p 6 * 7")
        terminal.until("p 6 * 7")
        assert not (tmp_path / "printed").exists()
        terminal.type(" + 1\n!wait('ends-0')\n")
        wait_for((tmp_path / "ends-0").exists, "what follows the print")
        terminal.type("c\n")
        assert terminal.end() == 0
    assert "(Pdb, rank 1) p 6 * 7 + 1\n" in terminal.shown
    assert "a line of rank 0\n" in terminal.shown


_TRAINS = """
import datetime, time
import lockstep, torch, torch.distributed as dist
from lockstep.job import flight
world = lockstep.init(timeout=60)
world.group.set_timeout(datetime.timedelta(seconds=1))
while world.rank == 0 and not flight.current.pages.debugging:
    time.sleep(0.01)
if world.rank == 1:
    breakpoint()
{meet}
mean = world.mean(torch.tensor(float(world.rank)))
print("the mean is", float(mean))
"""


@pytest.mark.parametrize(
    "meet", ["world.barrier(timeout=1)", "dist.send(torch.ones(1), 0) if world.rank else dist.recv(torch.zeros(1), 1)"]
)
def test_the_others_wait_without_an_alarm_and_past_their_limit(tmp_path: Path, meet: str) -> None:
    (tmp_path / "train.py").write_text(_TRAINS.format(meet=meet))
    command = _run("-n", "2", "train.py")
    with _terminal(tmp_path, command, torch=True, LOCKSTEP_LATE="0.2", LOCKSTEP_TIMES="0.2") as terminal:
        assert f"-> {meet}" in _next(terminal)
        terminal.command("!import time; time.sleep(2.5)", _PROMPT)
        assert "-> mean = " in terminal.command("n", _PROMPT)
        assert "-> print" in terminal.command("n", _PROMPT)
        terminal.type("c\n")
        assert terminal.end() == 0
    assert "the mean is 0.5" in terminal.shown
    assert "held up" not in terminal.shown


_COMES_LATE = """
import os, time
import lockstep, torch
world = lockstep.init()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for step in range(3):
    optimizer.step()
if world.rank == 1:
    while not os.path.exists("reported"):
        time.sleep(0.01)
    breakpoint()
world.barrier()
"""


def test_a_rank_that_was_late_and_comes_to_a_breakpoint_is_not_late_any_more(tmp_path: Path) -> None:
    """So that --on-hang does not end the job under its user's hands."""
    (tmp_path / "train.py").write_text(_COMES_LATE)
    command = _run("-n", "2", "--on-hang", "restart:5", "--max-restarts", "1", "train.py")
    with _terminal(tmp_path, command, torch=True, LOCKSTEP_TIMES="0.2") as terminal:
        terminal.until("rank 1 of 2 has held up the others")
        (tmp_path / "reported").touch()
        _next(terminal)
        terminal.command("!import time; time.sleep(6)", _PROMPT)
        terminal.type("c\n")
        assert terminal.end() == 0
    assert "rank 1 has moved on" in terminal.shown


_FAILS = """
import os
rank = int(os.environ["RANK"])
def share(total, ranks):
    return total / ranks
if {where}:
    print(os.getpid(), end="", file=open(f"process-{{rank}}", "w"), flush=True); share(100, 0)
else:
    import time; time.sleep(600)
"""


def _waits_for_its_turn(noted: Path) -> bool:
    """Whether a rank that has failed waits to be looked at: a SIGTERM does not end it at once."""
    return noted.exists() and noted.read_text() != "" and _proc.catches(int(noted.read_text()), signal.SIGTERM)


@pytest.mark.parametrize("where", ["rank == 1", "True"])
def test_pdb_holds_the_first_rank_that_fails(tmp_path: Path, where: str) -> None:
    """And no other; then the job ends as without it."""
    (tmp_path / "train.py").write_text(_FAILS.format(where=where))
    with _terminal(tmp_path, _run("-n", "2", "--pdb", "--all-output", "train.py")) as terminal:
        told = terminal.until("(Pdb, rank ")
        rank = int(terminal.until(") ")[0])
        assert rank == 1 or where == "True"
        assert f"lockstep: rank {rank} has failed (train.py:5 in share)" in told
        assert "ZeroDivisionError: division by zero" in told
        assert "train.py(5)share()\n-> return total / ranks\n" in told
        prompt = f"(Pdb, rank {rank}) "
        assert "\n100\n" in terminal.command("p total", prompt)
        assert "train.py(7)<module>()" in terminal.command("u", prompt)
        assert "Oldest frame" in terminal.command("u", prompt)
        before = len(terminal.shown)
        if where == "True":
            wait_for(lambda: _waits_for_its_turn(tmp_path / f"process-{1 - rank}"), "the other rank's failure")
        terminal.type("q\n")
        assert terminal.end() == 1
    rest = terminal.shown[before:]
    assert "(Pdb, " not in rest
    assert f"lockstep: rank {rank} of 2 failed: exit code 1\nZeroDivisionError: division by zero" in rest
    assert rest.count("Traceback (most recent call last)") == (2 if where == "True" else 1), "as without --pdb"


def test_pdb_needs_a_terminal(tmp_path: Path) -> None:
    done = run(["lockstep", "run", "-n", "2", "--pdb", "train.py"], tmp_path)
    assert done.code == 2
    assert done.err.startswith("lockstep run: --pdb: standard input is not a terminal")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_breakpoint_without_a_terminal_says_so(tmp_path: Path, rank: int) -> None:
    (tmp_path / "train.py").write_text(f"import os\nif os.environ['RANK'] == '{rank}':\n    breakpoint()\n")
    done = run(["lockstep", "run", "-n", "2", "--all-output", "train.py"], tmp_path)
    assert done.code == 1, done
    assert f"NoTerminal: rank {rank} is at a breakpoint (train.py:3 in <module>), and there is no terminal" in done.err
    assert "PYTHONBREAKPOINT=0" in done.err
    gone_on = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, PYTHONBREAKPOINT="0")
    assert (gone_on.code, gone_on.err) == (0, "")


def test_another_debugger_is_called_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import sys\ndef stop(*, header=''): print(header, 'in', sys._getframe(1).f_code.co_name)\n"
    )
    (tmp_path / "train.py").write_text(
        "import os\ndef here(): breakpoint(header='mine')\nhere()\nos.environ['PYTHONBREAKPOINT'] = '0'\nhere()\n"
    )
    done = run(["lockstep", "run", "-n", "2", "--all-output", "train.py"], tmp_path, PYTHONBREAKPOINT="mine.stop")
    assert sorted(done.out.splitlines()) == ["[1] mine in here", "mine in here"], done


def test_rank_0_reads_commands_from_a_pipe_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nanswer = 6 * 7\nif os.environ['RANK'] == '0': breakpoint()\nleft = 1\n"
    )
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, stdin="p answer\n!import time; time.sleep(1)\nq\n")
    assert done.code == 128 + signal.SIGINT, done
    assert "42" in done.out
    assert f"lockstep: rank 0 is at a breakpoint (train.py:{3 + _AFTER} in <module>)" in done.err
    assert f"lockstep: ended at a breakpoint, on rank 0 (train.py:{3 + _AFTER} in <module>)" in done.err
    assert "Traceback" not in done.err


def test_a_job_in_the_background_stops_until_it_is_in_front(tmp_path: Path) -> None:
    """As python does, in a shell with job control."""
    (tmp_path / "train.py").write_text(_ON_RANK_1)
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with _terminal(tmp_path, shell, PS1="$ ", HISTFILE="") as terminal:
        terminal.until("$ ")
        terminal.type(f"{' '.join(_run('-n', '2', 'train.py'))} &\n")
        terminal.until("[1] ")
        stopped = lambda: "Stopped" in terminal.command("jobs", "jobs\n") + terminal.until("$ ")  # noqa: E731
        wait_for(stopped, "the job's stop")
        terminal.type("fg\n")
        terminal.until(_PROMPT)
        assert "41" in terminal.command("p answer", _PROMPT)
        terminal.type("c\n")
        terminal.until("$ ")
        terminal.type("exit 7\n")
        assert terminal.end() == 7


def test_a_job_that_was_stopped_meanwhile_gives_the_terminal_again(tmp_path: Path) -> None:
    """Another rank reads from the background, say: the shell takes the terminal, and fg gives it to the whole job."""
    (tmp_path / "train.py").write_text("open(f'pid-{__import__(\"os\").getpid()}', 'w')" + _ON_RANK_1)
    shell = ["bash", "--norc", "--noprofile", "-i"]
    with _terminal(tmp_path, shell, PS1="$ ", HISTFILE="") as terminal:
        terminal.until("$ ")
        terminal.type(f"{' '.join(_run('-n', '2', 'train.py'))}\n")
        terminal.until(_PROMPT)
        rank_1 = terminal.foreground()
        assert (tmp_path / f"pid-{rank_1}").exists(), "a group of its own"
        job = next(pid for pid in _proc.children(terminal.leader) if os.getpgid(pid) == pid)
        os.killpg(job, signal.SIGTSTP)
        terminal.until("Stopped")
        terminal.until("$ ")
        assert terminal.foreground() == terminal.leader
        terminal.type("fg\n")
        wait_for(lambda: terminal.foreground() == rank_1, "the rank's turn")
        assert "\n41\n" in terminal.command("p answer", _PROMPT)
        terminal.type("c\n")
        terminal.until("$ ")
        terminal.type("exit 7\n")
        assert terminal.end() == 7


@pytest.mark.parametrize("how", ["the terminal goes", "the launcher is asked to stop", "the launcher is killed"])
def test_nothing_is_left_of_a_job_that_ends_at_a_prompt(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(_ON_RANK_1 + "if rank == 0: import time; time.sleep(600)\n")
    with _terminal(tmp_path, _run("-n", "2", "train.py")) as terminal:
        terminal.until(_PROMPT)
        everyone = _proc.descendants(terminal.leader)
        assert len(everyone) == 3
        if how == "the terminal goes":
            terminal.hang_up()
        else:
            os.kill(terminal.leader, signal.SIGTERM if how.endswith("stop") else signal.SIGKILL)
        with killed_afterwards(everyone):
            assert terminal.end() in (-signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
            assert gone_within(everyone, 20.0) == []


_SPAWNS = """
import lockstep
def work(rank, answer):
    if rank == 1:
        breakpoint()
    return rank + answer
if __name__ == "__main__":
    print(lockstep.spawn(work, (40,), nprocs=2))
"""


def test_ranks_of_a_program_have_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SPAWNS)
    with _terminal(tmp_path, [sys.executable, "train.py"]) as terminal:
        terminal.until(_PROMPT)
        assert "work()" in terminal.command("w", _PROMPT)
        terminal.command("answer = 100", _PROMPT)
        terminal.type("c\n")
        assert terminal.end() == 0
    assert "[40, 101]" in terminal.shown


def test_a_process_of_a_ranks_is_told_who_can_have_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import multiprocessing, os\n"
        "def work(): breakpoint()\n"
        "if os.environ['RANK'] == '1':\n"
        "    worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "    worker.start(); worker.join(); raise SystemExit(worker.exitcode + 1)\n"
    )
    done = run(["lockstep", "run", "-n", "2", "--all-output", "train.py"], tmp_path)
    assert done.code == 2, done
    assert "a process that rank 1 started is at a breakpoint (train.py:2 in work)" in done.err


_PAGE = Path(__file__).parents[2] / "docs" / "breakpoints.md"
_SESSIONS = re.findall(r"```text\n\$ (lockstep run [^\n]+)\n(.*?)```", _PAGE.read_text(), re.DOTALL)


@pytest.mark.skipif(not _AFTER, reason="from Python 3.13 on pdb stops in the breakpoint's own line")
@pytest.mark.parametrize(("command", "session"), _SESSIONS, ids=["a breakpoint", "a failure"])
def test_the_page_shows_what_is_shown(tmp_path: Path, command: str, session: str) -> None:
    """Its commands are typed, and its lines come in their order."""
    for block in re.findall(r"```python\n(# (?:train|mean)\.py\n.*?)```", _PAGE.read_text(), re.DOTALL):
        (tmp_path / block.split()[1]).write_text(block)
    commands = [line.removeprefix(_PROMPT) for line in session.splitlines() if line.startswith(_PROMPT)]
    with _terminal(tmp_path, _run(*command.split()[2:]), torch=True) as terminal:
        for line in commands:
            terminal.until(_PROMPT)
            terminal.type(f"{line}\n")
        terminal.end()
    shown = terminal.shown.replace(str(tmp_path), "/home/you").splitlines()
    place = 0
    for line in session.splitlines():
        if line != "…":
            assert line in shown[place:], f"{line!r} does not come after {shown[:place]}\n{terminal.shown}"
            place = shown.index(line, place) + 1
