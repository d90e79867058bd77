"""Decide why an attempt is over, and how a job ends: its exit code and last message. Decisions only, no I/O."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from signal import Signals

from lockstep.job.files import EXIT_SAVED
from lockstep.rendezvous.messages import EndKind
from lockstep.runs.record import RunEnd


class LastWord(enum.Enum):
    """The last message of a launcher."""

    #: Nothing needs to be said.
    NOTHING = enum.auto()
    #: The machines could not meet, or could not continue together, or the ranks could not be started.
    REFUSED = enum.auto()
    #: The ranks were asked to stop, and have saved.
    SAVED = enum.auto()
    #: The ranks were asked to stop when there was nothing left to do.
    CAME_LATE = enum.auto()
    STOPPED = enum.auto()
    #: The verdict's own text.
    VERDICT = enum.auto()
    #: The zygote has ended, and with it all ranks of this machine.
    ZYGOTE_LOST = enum.auto()
    #: First the verdict, which is that the connection to the other machines was lost, then the zygote's end.
    VERDICT_AND_ZYGOTE_LOST = enum.auto()


@dataclass(frozen=True)
class Closing:
    """How a job ends."""

    word: LastWord
    #: The job's exit code; None: it follows from the zygote's end.
    exit_code: int | None

    @property
    def end(self) -> RunEnd:
        """How the run ended, for its record."""
        if self.word in (LastWord.SAVED, LastWord.STOPPED):
            return RunEnd.SAVED if self.word is LastWord.SAVED else RunEnd.STOPPED
        return RunEnd.DONE if self.exit_code == 0 else RunEnd.FAILED


@dataclass(frozen=True)
class JobEnd:
    """The facts about a job that is over, on one machine."""

    #: The reason why the last attempt is over; None: unknown, since the zygote ended before.
    kind: EndKind | None = None
    #: The exit code of the first rank that failed, here or on the machine whose verdict it is.
    failed_with: int = 1
    #: The signal that stopped the job; None: no signal did.
    stopped_by: Signals | None = None
    #: True if that signal reached ranks that save and leave by themselves.
    asked_listeners: bool = False
    #: True if a rank of this machine failed before the job was asked to end.
    failing: bool = False
    #: True if the ranks of this machine have saved because they were asked to stop, or to let machines join.
    saved: bool = False
    #: True if all of them left with exit code 0.
    completed: bool = False
    #: True if none of them is left to wait for.
    done: bool = False
    #: True while the launchers wait for each other.
    meeting: bool = False
    #: The exit code where the machines could not meet, or continue together, or start their ranks; None: they could.
    refused_with: int | None = None


def why_over(*, stopped_by: Signals | None, failing: bool, failed: bool, saved: bool) -> EndKind:
    """Return why an attempt is over, as far as one machine can know whose ranks have all ended.

    Args:
        stopped_by: the signal that was to stop the job.
        failing: whether a rank failed before the job was asked to end.
        failed: whether a rank failed by itself, before that or after it.
        saved: whether the ranks have saved because they were asked to.
    """
    if saved or (stopped_by is not None and not failing):
        return EndKind.STOPPED
    return EndKind.FAILED if failed else EndKind.DONE


def decide(end: JobEnd) -> Closing:
    """Return how a job ends on this machine."""
    if end.refused_with is not None:
        return Closing(LastWord.REFUSED, end.refused_with)
    if end.saved and (end.stopped_by is not None or not (end.meeting or end.kind is EndKind.JOINING)):
        return Closing(LastWord.SAVED, EXIT_SAVED)  # else it was for machines that join, and nobody asked for an end
    if end.kind is EndKind.DONE and end.completed and not end.meeting:
        return Closing(LastWord.NOTHING if end.stopped_by is None else LastWord.CAME_LATE, 0)
    # Where a round has ended for another reason, a rank's failure is not why it is over.
    if end.stopped_by is not None and (not end.failing or end.kind not in (None, EndKind.FAILED, EndKind.DONE)):
        late = end.asked_listeners and end.completed
        return Closing(LastWord.CAME_LATE, 0) if late else Closing(LastWord.STOPPED, 128 + end.stopped_by)
    if end.meeting:  # the end of the last attempt is reported already, and the zygote has ended since
        return Closing(LastWord.ZYGOTE_LOST, None)
    if end.kind is EndKind.FAILED:
        return Closing(LastWord.VERDICT, end.failed_with)
    if end.kind is EndKind.LOST:
        return Closing(LastWord.VERDICT, 0) if end.completed else Closing(LastWord.VERDICT_AND_ZYGOTE_LOST, None)
    is_over = end.completed if end.kind is EndKind.JOINING else end.done
    return Closing(LastWord.NOTHING, 0) if is_over else Closing(LastWord.ZYGOTE_LOST, None)


def for_the_others(end: JobEnd) -> int:
    """Return the exit code for machines that wait for a round which won't come, since this machine's part is over.

    Those machines have no ranks that could have saved, or that a signal could have stopped, so a failure comes first.
    """
    if end.kind is EndKind.FAILED:
        return end.failed_with
    return decide(end).exit_code or 0


def of_hosts(codes: Sequence[int | None], *, pressed: Sequence[int] = (), stopped_by: Signals | None) -> int:
    """Return the exit code of a job from those of its hosts' launchers, of which each has decided for itself.

    As there, saved comes before stopped, and stopped before failed.

    Args:
        codes: of the hosts that ended by themselves, in the order of their ends; None: the connection to one was lost.
        pressed: of those that were told to end because others had ended before.
        stopped_by: the signal that the user has sent to all; None: there was none.
    """
    known = [code for code in (*codes, *pressed) if code is not None]
    asked = 0 if stopped_by is None else 128 + stopped_by
    if EXIT_SAVED in known:
        return EXIT_SAVED
    if asked and asked in known:
        return asked
    failed = _first(code for code in codes if code is not None)
    if failed:
        return failed
    if None in codes or not known:  # whatever the others say, not all is known to be done
        return asked or int(None in codes)
    return _first(pressed)


def _first(codes: Iterable[int]) -> int:
    """Return the first exit code that is not 0; 0: there is none."""
    return next((code for code in codes if code), 0)
