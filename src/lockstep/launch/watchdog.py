"""The end of a rank by the watchdog of its process group over NCCL: recognise it, and keep what it leaves.

Note [The watchdog of NCCL]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Over NCCL no wait raises: the host goes on, and the device waits. So a thread of torch's process group watches the time
limit of each collective. When it has passed, the thread prints what it knows and aborts the process: no ``except`` sees
it, no exit function runs, and the rank leaves no record of its failure. The launcher writes one in its place, the
``CollectiveTimeout`` that a rank over another backend raises, or ``PeerLost`` where NCCL says that another process is
gone (torch's ProcessGroupNCCL.cpp has the words).

Before it aborts, the watchdog writes the process group's flight recorder to a file: the latest collectives of this rank
with their sizes and Python stacks. torch would put it into the user's cache, where the next run overwrites it. Here
it goes to the job's private folder, and from there to the run's logs. It is pickled, and nobody here reads it;
``torchfrtrace`` compares the files of all ranks.

The first rank of a machine writes to the terminal, and the launcher does not see what. There the file tells that the
watchdog was at work, and that the rank was waiting on its device for one that is late by the launcher's own account
tells that it was a time limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import CollectiveTimeout, LockstepError, PeerLost
from lockstep.job.files import FailureRecord, JobFiles
from lockstep.launch.policy import RankState
from lockstep.text import counted

#: Collectives that a flight recorder keeps; torch's own default.
_COLLECTIVES = "2000"
#: Setting -> its names in torch; of several the first is not deprecated.
_PLACE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZE = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)
_PIPES = ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE",)
#: Bytes at the end of a log in which the words are looked for; the C++ stacks after them are some thousands.
_LAST_BYTES = 1 << 17

_LATE = re.compile(
    r"Watchdog caught collective operation timeout: "
    r"Work\w+\(SeqNum=(?P<number>\d+), OpType=(?P<kind>\w+), NumelIn=(?P<elements>\d+), NumelOut=\d+, "
    r"Timeout\(ms\)=(?P<limit>\d+)\)"
)
_ERROR = re.compile(r"watchdog thread terminated with exception: .*?(?P<error>NCCL error: [^\n]+)", re.DOTALL)
#: NCCL's message if another process has ended (ncclRemoteError).
_REMOTE = "remote process exited"


def variables(folder: str | Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables by which a rank's flight recorder writes into the folder of this start of the job.

    Args:
        folder: that folder.
        env: the launcher's; what the user has set there stays.
    """
    files = JobFiles(folder)
    wanted = (
        (_PLACE, str(files.flight_recorders)),
        (_SIZE, _COLLECTIVES),
        (_DUMPS, "1"),
        (_PIPES, str(files.flight_recorder_pipes)),
    )
    return {names[0]: value for names, value in wanted if not any(name in env for name in names)}


def ask_flight_recorders(files: JobFiles) -> None:
    """Ask the flight recorders of a start's ranks, where they have some, to write their files now.

    A thread of torch's process group over NCCL listens at a named pipe of its rank, and writes at its next look, so the
    files come later; they are kept when their ranks end.
    """
    for pipe in files.flight_recorder_pipes.parent.glob(f"{files.flight_recorder_pipes.name}*.pipe"):
        with contextlib.suppress(OSError):  # nobody listens any more
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(fd, b"1\n")
            finally:
                os.close(fd)


@dataclass(frozen=True)
class Words:
    """What the watchdog says of the collective at which it ended a rank."""

    #: The error that this is in lockstep's words.
    kind: type[LockstepError]
    #: The collective and what became of it.
    what: str

    @classmethod
    def find(cls, text: str) -> Words | None:
        """Return the last words of a watchdog in what a rank has written, or None if there are none."""
        late = [*_LATE.finditer(text)]
        if late:
            found = late[-1]
            return cls(
                CollectiveTimeout,
                f"collective {int(found['number']):,} over NCCL ({found['kind']} of "
                f"{counted(int(found['elements']), 'element')}) did not end within {int(found['limit']) / 1e3:g} s",
            )
        errors = [found["error"] for found in _ERROR.finditer(text) if _REMOTE in found["error"]]
        return cls(PeerLost, f"a collective over NCCL failed ({errors[-1].strip()})") if errors else None


def record(
    state: RankState, *, log: Path | None, is_recorded: bool, waited: bool, about: str, late: str
) -> FailureRecord | None:
    """Return the account of a rank's failure that the watchdog left it no time for; None: it ended in another way.

    Args:
        state: of the rank, which has ended.
        log: what it has written; None: that went elsewhere.
        is_recorded: whether the watchdog has written the flight recorder's file.
        waited: whether the rank waited for one that is late, by the launcher's account.
        about: describes the rank and its step.
        late: the launcher's report on the late rank; empty if there is none.
    """
    if state.exit_code != -signal.SIGABRT or state.ended_at is None:
        return None
    found = None if log is None else Words.find(_end_of(log))
    if found is None and log is None and is_recorded and waited:
        found = Words(CollectiveTimeout, "a collective over NCCL did not end in time (its watchdog's words are above)")
    if found is None:
        return None
    advice = (
        " A rank did not arrive in time. It may be stuck or slow, in another collective, or out of data (see "
        "lockstep.join)."
        if found.kind is CollectiveTimeout
        else " Look at the first rank that failed for the cause."
    )
    message = f"{about}: {found.what}, and the watchdog of torch's process group ended the process.{advice}"
    name = f"{found.kind.__module__}.{found.kind.__qualname__}"
    return FailureRecord(
        state.rank,
        state.ended_at,
        128 + signal.SIGABRT,
        name,
        f"{message}\n{late}" if late else message,
        traceback="",
        code=found.kind.code,
    )


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""  # the log is named in the report, as far as there is one
