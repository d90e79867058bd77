"""Run a module in a process of its own, which has a time limit and leaves nothing behind when this one is killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.text import last_lines

#: Seconds that a process has to end after SIGTERM.
_PATIENCE = 10.0
#: The last lines of its output that are repeated.
_LINES = 6
#: The child has the kernel end it with its parent, which can't do so when it is killed; a launcher's ranks end with it.
_BOOT = (
    "import runpy, sys; sys.path[:] = filter(None, sys.path); "
    "from lockstep.launch.processes import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "sys.argv[:] = sys.argv[2:]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)

_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class ChildResult:
    """A process that has ended."""

    #: The exit code, as in subprocess; None: the process was ended at its time limit.
    code: int | None
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last lines of its output."""
        text = self.err if self.err.strip() else self.out
        return "\n".join(last_lines(text, _LINES)) or "it said nothing"


def run(module: str, *args: str, limit: float, env: Mapping[str, str] | None = None) -> ChildResult:
    """Run a module as ``python -m`` does, and return how it has ended.

    Args:
        module: its name.
        args: its arguments.
        limit: seconds that it has.
        env: variables that are set beside those of this process.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _BOOT, str(os.getpid()), module, *args],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process)
    in_time = True
    try:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            in_time = False
            out, err = _end(process)
    except BaseException:
        _end(process)
        raise
    finally:
        _running.discard(process)
    return ChildResult(process.returncode if in_time else None, out, err)


def end_all() -> None:
    """End all processes that run; called from another thread."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    for process in list(_running):
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.terminate()
    try:
        return process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()  # a launcher's zygote ends the ranks
    try:
        return process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return "", "it can't be ended, and does not answer"
