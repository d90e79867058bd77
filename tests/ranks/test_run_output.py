"""What ranks print: where it goes, and that nothing of it is lost or mixed."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment, run, wait_for

_TALK = """
import os, sys
rank = os.environ["RANK"]
for number in range({lines}):
    print(f"out {{rank}} {{number}}")
    if number % 100 == 0: print(f"err {{rank}} {{number}}", file=sys.stderr)
"""


def _expected(rank: int, lines: int) -> list[str]:
    return [
        text
        for number in range(lines)
        for text in [f"out {rank} {number}", *([f"err {rank} {number}"] if number % 100 == 0 else [])]
    ]


def _logs(tmp_path: Path) -> dict[str, list[str]]:
    return {log.name: log.read_text().splitlines() for log in (tmp_path / "state").rglob("*.log")}


def test_rank_0_has_the_terminal_and_the_others_a_log_each(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(_TALK.format(lines=10_000))
    done = run(["lockstep", "run", "-n", "4", "talk.py"], tmp_path)
    assert done.out.splitlines() == [line for line in _expected(0, 10_000) if line.startswith("out")]
    *errors, last = done.err.splitlines()
    assert errors == [line for line in _expected(0, 10_000) if line.startswith("err")]
    assert _logs(tmp_path) == {f"rank{rank}.log": _expected(rank, 10_000) for rank in (1, 2, 3)}
    (folder,) = (tmp_path / "state" / "lockstep" / "logs").iterdir()
    assert last == f"lockstep: what ranks 1 to 3 wrote is in {folder}"


def test_all_output_is_prefixed_whole_and_complete(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(_TALK.format(lines=10_000))
    done = run(["lockstep", "run", "-n", "4", "--all-output", "talk.py"], tmp_path)
    for shown, stream in ((done.out.splitlines(), "out"), (done.err.splitlines(), "err")):
        for rank in range(4):
            prefix = f"[{rank}] " if rank else ""
            own = [line for line in shown if line.startswith(f"{prefix}{stream} {rank} ")]
            assert own == [prefix + line for line in _expected(rank, 10_000) if line.startswith(stream)]
        assert all(line.split("] ")[-1].startswith(stream) for line in shown), "a stream has nothing of the other"
    logs = {name: sorted(lines) for name, lines in _logs(tmp_path).items()}  # two pipes: each is in order
    assert logs == {f"rank{rank}.log": sorted(_expected(rank, 10_000)) for rank in (1, 2, 3)}


def test_where_both_streams_are_one_a_ranks_lines_stay_in_order(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(_TALK.format(lines=1_000))
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", "--all-output", "talk.py"]
    shown = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    expected = _expected(1, 1_000)
    assert [line[4:] for line in shown.splitlines() if line.startswith("[1] ")] == expected
    assert _logs(tmp_path) == {"rank1.log": expected}


def test_a_log_folder_has_every_rank(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(_TALK.format(lines=200))
    done = run(["lockstep", "run", "-n", "2", "--log-dir", "logs", "talk.py"], tmp_path)
    assert done.out.splitlines() == [line for line in _expected(0, 200) if line.startswith("out")]
    # Standard output and error of rank 0 are two pipes to the terminal: each is in order, not one with the other.
    assert sorted((tmp_path / "logs/rank0.log").read_text().splitlines()) == sorted(_expected(0, 200))
    assert (tmp_path / "logs/rank1.log").read_text().splitlines() == _expected(1, 200)
    assert not (tmp_path / "state").exists()


_BYTES = """
import os, sys
rank = int(os.environ["RANK"])
os.write(1, bytes(range(11, 256)) * 2000)
if rank: os.write(1, b"the end without a newline")
"""


@pytest.mark.parametrize("options", [[], ["--all-output"], ["--log-dir", "state"]])
def test_bytes_that_are_no_text_arrive_as_they_are(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "noise.py").write_text(_BYTES)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", *options, "noise.py"]
    out = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, check=True).stdout
    noise = bytes(range(11, 256)) * 2000
    (log,) = (tmp_path / "state").rglob("rank1.log")
    assert log.read_bytes() == noise + b"the end without a newline"
    assert out.count(noise[:245]) >= 2000
    if options != ["--all-output"]:
        assert out == noise


def test_a_killed_rank_has_logged_every_whole_line(tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text(
        "import os\nif os.environ['RANK'] == '1':\n  for n in range(1000): print(n)\n  os.kill(os.getpid(), 9)\n"
    )
    run(["lockstep", "run", "-n", "2", "die.py"], tmp_path)
    assert _logs(tmp_path) == {"rank1.log": [str(n) for n in range(1000)]}


def test_a_reader_that_leaves_early_does_not_end_rank_0(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(_TALK.format(lines=100_000))
    command = f"{sys.executable} -m lockstep run -n 2 talk.py | head -n 1"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout == "out 0 0\n"
    assert "BrokenPipeError" not in done.stderr


_AT_THE_END = """
import sys, lockstep.job.terminal
class Late:
    def __init__(self):
        self.out, self.err = sys.stdout, sys.stderr
    def __del__(self):
        self.out.write("late out\\n")
        self.err.write("late err\\n")
        raise ValueError("late")
lockstep.job.terminal.late = Late()  # goes with the module, whose names are None by then
"""


def test_what_is_written_while_the_modules_are_taken_apart_arrives(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(_AT_THE_END)
    done = run(["lockstep", "run", "-n", "1", "late.py"], tmp_path)
    assert (done.code, done.out) == (0, "late out\n"), done
    assert done.err.startswith("late err\n")
    assert "ValueError: late" in done.err
    assert "TypeError" not in done.err


_TERMINAL = """
import os, shutil, sys
print(os.environ["RANK"], sys.stdout.isatty(), sys.stderr.isatty(), shutil.get_terminal_size().columns)
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["0 True True 93"]),
        (["--all-output"], ["0 True True 93", "[1] 1 False False 80"]),
        (["--log-dir", "logs"], ["0 True True 93"]),
    ],
)
def test_rank_0_knows_that_it_has_a_terminal(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    (tmp_path / "look.py").write_text(_TERMINAL)
    shown = _in_a_terminal(["lockstep", "run", "-n", "2", *options, "look.py"], tmp_path, columns=93)
    lines = [line for line in shown.splitlines() if not line.startswith("lockstep: what rank 1 wrote is in ")]
    assert sorted(lines) == expected
    if "--log-dir" in options:
        assert (tmp_path / "logs/rank0.log").read_bytes() == b"0 True True 93\n"


def _in_a_terminal(argv: list[str], tmp_path: Path, *, columns: int) -> str:
    """Run ``python -m argv`` on a terminal of its own, and return what is on the screen at the end."""
    import fcntl
    import struct
    import termios

    screen, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    env = {k: v for k, v in environment(tmp_path).items() if k != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, "-m", *argv],
        cwd=tmp_path,
        env=env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    try:
        while select.select([screen], [], [], LIMIT)[0]:
            try:
                data = os.read(screen, 65536)
            except OSError:
                break  # everybody has closed it
            shown += data
    finally:
        process.kill() if process.poll() is None else None
        process.wait(LIMIT)
        os.close(screen)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_the_cursor_comes_back_when_a_bar_is_cut_off(tmp_path: Path) -> None:
    (tmp_path / "bar.py").write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    sys.stderr.write('\\x1b[?25lhalf a bar')\n"
        "    sys.stderr.flush()\n"
        "    open('drawn', 'w').close()\n"
        "    time.sleep(60)\n"
        "while not os.path.exists('drawn'):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(3)\n"
    )
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "lockstep", "run", "-n", "2", "bar.py"]
    job = subprocess.Popen(
        argv,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how Linux says that nobody has the other end open
        while chunk := os.read(ours, 4096):
            seen += chunk
    os.close(ours)
    assert job.wait(timeout=LIMIT) == 3
    assert seen.index(b"half a bar") < seen.index(b"\x1b[?25h\r\n") < seen.index(b"rank 1 of 2 failed")


_BEGUN = """
import os, sys, time
if os.environ["RANK"] == {rank!r}:
    os.write(1, b"a line\\n") if {bare} else None
    print("\\x1b[32mhalf a line\\x1b[0m", end="", flush=True)
    open("begun", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    print(" and the rest")
"""

_SAID = "lockstep: SIGUSR1: no rank can save now; only a Checkpointer with the training loader can, in its loop\n"


@pytest.mark.parametrize("sink", ["pipe", "terminal", "file"])
@pytest.mark.parametrize(("options", "rank"), [([], "0"), (["--all-output"], "0"), (["--all-output"], "1")])
def test_the_launchers_messages_begin_a_line(tmp_path: Path, sink: str, options: list[str], rank: str) -> None:
    """Each of them once, and none of them an empty one."""
    (tmp_path / "talk.py").write_text(_BEGUN.format(rank=rank, bare=sink == "file"))
    if sink == "terminal":
        reading, writing = pty.openpty()
    elif sink == "pipe":
        reading, writing = os.pipe()
    else:
        reading = os.open(tmp_path / "shown", os.O_RDONLY | os.O_CREAT)
        writing = os.open(tmp_path / "shown", os.O_WRONLY)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", *options, "talk.py"]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), stdout=writing, stderr=writing, start_new_session=True
    )
    os.close(writing)
    shown = b""
    try:
        wait_for((tmp_path / "begun").exists, "half a line", limit=60)
        for _ in range(2):
            while b"half a line\x1b[0m" not in shown:
                shown += os.read(reading, 4096)
            said = shown.count(b"lockstep: ")
            job.send_signal(signal.SIGUSR1)
            while shown.count(b"lockstep: ") == said or not shown.endswith(b"\n"):
                shown += os.read(reading, 4096)
        (tmp_path / "go").touch()
        with contextlib.suppress(OSError):  # how Linux says that nobody has the other end of a terminal open
            while chunk := os.read(reading, 4096) or (b"" if job.poll() is not None else b"\0"):
                shown += chunk.strip(b"\0")
        assert job.wait(LIMIT) == 0
    finally:
        job.kill()
        job.wait(LIMIT)
        os.close(reading)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")
    prefix = "[1] " if rank == "1" else ""
    first = "a line\n" if sink == "file" else ""
    first = f"{prefix}{first}" if first else ""
    assert text.startswith(f"{first}{prefix}half a line\n{_SAID}{_SAID}{prefix} and the rest\n"), text


def test_a_log_that_the_report_names_is_not_named_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nif os.environ['RANK'] == '1': print('mine'); sys.exit(3)\n")
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert done.code == 3, done
    assert done.err.count("rank1.log") == 1, done
    assert "what rank 1 wrote" not in done.err
