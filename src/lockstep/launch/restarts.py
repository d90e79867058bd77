"""Whether a job is started again after a failure: decisions only, no process in sight.

Note [What only repeats]
~~~~~~~~~~~~~~~~~~~~~~~~
A restart helps against what happens to a job (a kill, a machine's hiccup), not against what the job does. So a failure
is final

- if it is a Python error (or an exit code) of a rank that had not taken a step since it was started: a wrong import, a
  wrong path, a checkpoint of another model. What other ranks' ends cause (a lost peer, a collective's timeout) is
  not counted as one.
- if it is the last one once more: the same rank, the same step, the same error. Numbers in a message are not compared:
  they are process ids and losses. What someone sends from outside (SIGKILL, SIGTERM) is no error of the job and never
  the same, unless the kernel sent it because memory was out.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from lockstep.launch.report import Ending

#: Signals that somebody sends; the others are what a process brings upon itself.
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Failure:
    """The failure of one start of a job, as far as the next start is concerned."""

    rank: int
    #: The error's type and message with its numbers left out, the exit code or the signal.
    cause: str
    #: Whether the rank ended by an exception or an exit code of its own.
    by_itself: bool
    #: Whether it came from outside, or from another rank's end.
    from_outside: bool
    #: Optimizer steps of the whole run, and those since this start; None where nobody counted.
    step: int | None
    taken: int | None

    @classmethod
    def of(cls, ending: Ending, *, step: int | None, taken: int | None, out_of_memory: bool = False) -> Failure:
        """From how the first rank to fail ended."""
        code = ending.state.exit_code
        sent = ending.record is None and code is not None and -code in _SENT and not out_of_memory
        text = ending.cause if ending.record is None else f"{ending.record.type}: {ending.record.message}"
        return cls(
            rank=ending.rank,
            cause=re.sub(r"0x[0-9a-f]+|\d+", "#", text) if ending.record is not None else text,
            by_itself=ending.record is not None or (code is not None and code > 0),
            from_outside=sent or ending.is_echo,
            step=step,
            taken=taken,
        )


class Restarts:
    """How often a job may still start again."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._last: Failure | None = None

    def refusal(self, failure: Failure) -> str | None:
        """Why the job is not started again after ``failure``, or None: then one more restart is used."""
        last, self._last = self._last, failure
        if self.limit == 0:
            return ""
        if failure.by_itself and not failure.from_outside and failure.taken == 0:
            return "not restarted: it failed before its first step, as it would again"
        if last is not None and _same(last, failure):
            at = "" if failure.step is None else f" at step {failure.step}"
            return f"not restarted: the same failure came twice, on rank {failure.rank}{at}, and would come again"
        if self.used == self.limit:
            times = "the one restart is" if self.limit == 1 else f"all {self.limit} restarts are"
            return f"not restarted: {times} used up (--max-restarts)"
        self.used += 1
        return None


def _same(one: Failure, other: Failure) -> bool:
    if one.from_outside or other.from_outside:
        return False
    return (one.rank, one.step, one.cause) == (other.rank, other.step, other.cause)
