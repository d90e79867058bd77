"""Which rank failed first, and how to say it: one report, whatever the number of ranks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.job.files import FailureRecord
from lockstep.launch.policy import FAILURE_GRACE, RankState
from lockstep.launch.signals import name

#: A death without a record is noticed some time after it happened, a record carries the time of its exception.
_NOTICED_LATE = 0.1
#: How other ranks' exceptions read when a peer has gone: consequences, not causes.
_ECHOES = ("PeerLost", "CollectiveTimeout", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Ending:
    """How one rank ended."""

    state: RankState
    record: FailureRecord | None
    #: Its log, or None if its output went elsewhere.
    log: Path | None = None
    #: Whether what it wrote to standard error was seen by the user.
    shown: bool = False

    @property
    def rank(self) -> int:
        return self.state.rank

    @property
    def exit_code(self) -> int:
        """As a shell reports it; the record knows better than the signal by which we ended the rank afterwards."""
        if self.record is not None:
            return self.record.exit_code
        code = self.state.exit_code
        if code is None:
            return 1  # it could not even be killed
        return code if code >= 0 else 128 - code

    @property
    def failed_by_itself(self) -> bool:
        stopped = self.state.stopped_at
        if self.record is not None:
            return stopped is None or self.record.at < stopped
        return self.state.exit_code not in (None, 0) and (stopped is None or self._seen < stopped)

    @property
    def when(self) -> float:
        """When it failed; an echo of another's failure comes after everything within the same half second."""
        at = self.record.at if self.record is not None else self._seen - _NOTICED_LATE
        return at + FAILURE_GRACE if self.is_echo else at

    @property
    def cause(self) -> str:
        """One phrase: an exit code, a signal's name, or the exception."""
        if self.record is not None and self.record.type != "SystemExit":
            return self.record.summary
        return self.status

    @property
    def status(self) -> str:
        code = self.state.exit_code
        if self.record is not None or code is None or code >= 0:
            return f"exit code {self.exit_code}"
        return f"killed by signal {-code} ({name(-code)})"

    @property
    def _seen(self) -> float:
        return self.state.ended_at if self.state.ended_at is not None else float("inf")

    @property
    def is_echo(self) -> bool:
        """Whether its exception reads like the consequence of another rank's end."""
        return self.record is not None and any(
            echo in self.record.type or echo in self.record.message for echo in _ECHOES
        )


def first_failure(endings: Sequence[Ending]) -> Ending | None:
    """The rank that failed before the others, or None if none failed by itself."""
    return min((e for e in endings if e.failed_by_itself), key=lambda e: e.when, default=None)


def describe(
    endings: Sequence[Ending], first: Ending, *, world_size: int, explanation: Sequence[str] | None = None
) -> str:
    """The report: the first rank to fail in full, the others in a line each.

    Args:
        endings: every rank's.
        first: the one that failed first.
        world_size: ranks of the job.
        explanation: what killed it, in words; None: nobody looked.
    """
    lines = [f"rank {first.rank} of {world_size} failed: {first.status}"]
    if explanation is None and first.state.exit_code == -signal.SIGKILL and first.record is None:
        lines.append("  (unless somebody sent it, the kernel's out-of-memory killer did: see dmesg)")
    lines += explanation or []
    record = first.record
    if record is not None and record.type == "SystemExit" and record.message:
        lines.append(f"  {record.message}")
    elif record is not None and record.traceback:
        lines.append(f"{record.summary} (its traceback is above)" if first.shown else record.traceback.rstrip())
    if first.log is not None:
        lines.append(f"rank {first.rank}'s log: {first.log}")
    lines += [_other(ending, first) for ending in endings if ending is not first and _concerned(ending, first)]
    return "\n".join(lines)


def _concerned(ending: Ending, first: Ending) -> bool:
    # A rank that left with exit code 0 is of interest if the failure is that of ranks which waited for it.
    return ending.failed_by_itself or ending.state.stopped_at is not None or first.is_echo


def _other(ending: Ending, first: Ending) -> str:
    if ending.state.exit_code is None:
        return f"rank {ending.rank}: still there (process {ending.state.pid}), stuck in the kernel even after SIGKILL"
    if ending.state.exit_code == 0:
        return f"rank {ending.rank} had ended by itself, with exit code 0"
    if ending.failed_by_itself:
        return f"rank {ending.rank} failed too: {ending.cause}"
    return f"rank {ending.rank}: stopped because rank {first.rank} failed"
