"""A cell that runs on all ranks, as the program sees it: its messages, when to interrupt and to free ranks, its end.

Note [Ranks that nobody will meet]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that has come to the end of a cell enters no collective before the next one begins, and that begins only when all
are at the end. So once every rank that is still in the cell waits in a collective, and some rank is not, they wait in
vain: the rank that is missing has raised an error, or its program leads past the collective (``if rank == 0:``). They
are freed after a moment, by ending the process groups, with words that say who waits where for whom.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Mapping
from typing import Any

from lockstep import knobs
from lockstep.errors import CellFailed, CellInterrupted, LaunchError
from lockstep.interactive.messages import (
    CellEnded,
    CellError,
    FigureDrawn,
    FreeWaiting,
    GroupsDone,
    InterruptCell,
    RenewGroups,
    RunCell,
    StopGroups,
    must_renew,
)
from lockstep.interactive.output import CellFigure, CellText, KeptOutput, RankPipe
from lockstep.interactive.pool import RankPool
from lockstep.job.messages import Channel
from lockstep.launch import console
from lockstep.launch.returned import NotReturned, Returned
from lockstep.text import joined, sentence, which_ranks

#: Seconds between two looks at what has been asked for meanwhile.
_TURN = 0.05
#: Seconds that the ranks have to begin their process groups anew.
_RENEWING = 60.0
#: Ranks that are interrupted stop two steps after the one under way; they have the time of one more.
_STEPS_TO_STOP = 4
#: The most seconds that they have for these.
_LONGEST_WAY = 60.0


class _CellStage(enum.Enum):
    """Where a cell is."""

    RUNNING = enum.auto()
    #: All ranks have come to its end, and their process groups are stopped, then renewed.
    STOPPING = enum.auto()
    RENEWING = enum.auto()
    #: A rank has died, and the others end.
    DYING = enum.auto()
    OVER = enum.auto()


class RemoteValue:
    """A placeholder for a value that stays on rank 0, since it can't be sent to this program; it is shown as rank 0
    shows the value."""

    def __init__(self, shown: str, reason: str) -> None:
        #: The value as Python shows it on rank 0, and why it is not here.
        self.shown, self.reason = shown, reason

    def __repr__(self) -> str:
        return self.shown


class _CellPace:
    """How long a step of this cell takes, by the rank that has taken the fewest; looked at while the cell runs."""

    def __init__(self) -> None:
        self._steps = 0
        self._since: float | None = None
        #: The seconds of the last one; 0.0 before there are two.
        self.of_a_step = 0.0

    def look(self, steps: int, now: float) -> None:
        """Note that the ranks have taken so many steps."""
        if steps > self._steps:
            if self._since is not None:
                self.of_a_step = (now - self._since) / (steps - self._steps)
            self._steps, self._since = steps, now


class RunningCell:
    """A cell on all ranks, from its beginning to its end; made by :meth:`lockstep.InteractiveRanks.begin`.

    Its owner calls :meth:`start`, :meth:`turn` until :attr:`is_over`, and then :meth:`result`.
    """

    def __init__(self, pool: RankPool, number: int, source: str) -> None:
        self._pool, self._number, self._source = pool, number, source
        self._stage = _CellStage.RUNNING
        self._returned = Returned()
        self._ended: dict[int, CellEnded] = {}
        #: The output of each rank.
        self.output = {rank: KeptOutput() for rank in pool.ranks}
        self._notes: list[str] = []
        self._begun_at = {rank: pool.steps(rank) for rank in pool.ranks}
        self._pace = _CellPace()
        #: The interrupts so far, and those that had come when the last way to stop the ranks was begun.
        self._asked = self._asked_before = 0
        self._asked_at_once = False
        #: The monotonic time of the next, harder way to interrupt; None: none is due.
        self._next_way: float | None = None
        #: Rank -> why it was freed; the monotonic time by which those ranks should have come to the end.
        self._freed: dict[int, str] = {}
        self._free_by: float | None = None
        self._told = False
        self._stopped: set[int] = set()
        self._done: dict[int, GroupsDone] = {}
        self._renew_by = 0.0
        #: Rank -> its mark, and since when it is the same, while it waits for others.
        self._waits: dict[int, tuple[int, float]] = {}
        self._error: LaunchError | None = None
        console.say_on(self)

    def start(self) -> None:
        """Tell the ranks to run it."""
        for rank in self._pool.ranks:
            fds = [self._returned.descriptor] if rank == 0 else []
            self._pool.send(rank, RunCell(self._number, self._source), fds)

    # What is heard --------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to wait for."""
        return self._stage is _CellStage.OVER

    def show(self, text: str) -> None:
        """Take a message of the launcher's own: a rank is late, say. (See ``say_on`` in launch/console.py.)"""
        self._notes.append(text)

    def turn(self) -> list[CellText | CellFigure | str]:
        """Wait for something to happen, for some hundredths of a second at most, and act on it.

        Returns:
            the output and figures of the ranks, and lockstep's messages.
        """
        heard: list[CellText | CellFigure | str] = []
        ready = self._pool.turn(time.monotonic() + _TURN)
        for each in ready:
            if isinstance(each, RankPipe):
                heard += self._pool.read(each)
            elif isinstance(each, Channel):
                for rank, told in self._pool.receive(each):
                    if isinstance(told, FigureDrawn):
                        heard += [*self._pool.drain(), CellFigure(rank, told.png)]  # after what was printed before it
                    else:
                        self._hear(rank, told)
        now = time.monotonic()
        if self._pool.is_dead and self._stage is not _CellStage.DYING:
            self._stage = _CellStage.DYING
            self._pool.end_all(now)
        if self._pool.has_ended:
            heard += self._pool.drain()  # before the pipes are closed
        self._act(now)
        if self.is_over:
            heard += self._pool.drain()
            console.say_on(None)
        for each in heard:
            if isinstance(each, CellText):
                self.output[each.rank].add(each)
        heard += self._notes
        self._notes.clear()
        return heard

    def interrupt(self) -> None:
        """Interrupt the ranks: the first time after a step on which they agree, else or the second time where they are.
        One that does not stop by then is ended, and so are the others. May be called by a signal's handler."""
        self._asked += 1

    def _hear(self, rank: int, told: CellEnded | GroupsDone) -> None:
        if isinstance(told, CellEnded):
            self._ended[rank] = told
        else:
            self._done[rank] = told

    # What is done ---------------------------------------------------------------------------------------------------

    def _act(self, now: float) -> None:
        match self._stage:
            case _CellStage.RUNNING:
                self._go_on(now)
            case _CellStage.STOPPING | _CellStage.RENEWING:
                self._renew(now)
            case _CellStage.DYING if self._pool.has_ended:
                self._error = self._pool.conclude()
                self._stage = _CellStage.OVER
            case _:
                pass

    def _go_on(self, now: float) -> None:
        if len(self._ended) == len(self._pool.ranks):
            standings = [each.standing for each in self._ended.values()]
            if self._freed or must_renew(standings, failed=bool(self._errors)):
                self._stage = _CellStage.STOPPING
                self._renew_by = now + _RENEWING
                self._stop("the cell has ended by an error on some rank")
            else:
                self._conclude()
            return
        self._pace.look(min(map(self._steps_of, self._running)), now)
        self._interrupt(now)
        self._free(now)

    def _renew(self, now: float) -> None:
        failed = [f"rank {rank}: {done.error}" for rank, done in sorted(self._done.items()) if done.error]
        if failed or now > self._renew_by:
            missing = [rank for rank in self._pool.ranks if rank not in self._done or self._done[rank].error]
            why = "\n".join(failed) or f"{which_ranks(missing)} did not answer within {_RENEWING:g} s"
            self._give_up(missing, f"the ranks could not begin their process group anew:\n{why}", now)
            return
        if len(self._done) < len(self._pool.ranks):
            return
        if self._stage is _CellStage.STOPPING:
            self._stage = _CellStage.RENEWING
            self._done.clear()
            for rank in self._pool.ranks:
                self._pool.send(rank, RenewGroups())
            return
        self._notes += sorted({f"lockstep: {done.todo}" for done in self._done.values() if done.todo})
        self._conclude()

    def _conclude(self) -> None:
        """Be over, with the ranks at rest, and say so if an error has left their models apart."""
        apart = self._steps_apart() if self._errors or self._freed else ""
        if apart:
            self._notes.append(f"lockstep: {apart}")
        self._stage = _CellStage.OVER

    def _steps_of(self, rank: int) -> int:
        """Return the optimizer steps that a rank has taken in this cell."""
        return self._pool.steps(rank) - self._begun_at[rank]

    def _steps_apart(self) -> str:
        """Say so if the ranks have taken different numbers of steps in this cell, so that their models differ."""
        steps = {rank: self._steps_of(rank) for rank in self._pool.ranks}
        if len(set(steps.values())) == 1:
            return ""
        each = joined([f"rank {rank}: {count}" for rank, count in steps.items()])
        return (
            f"the ranks have taken different numbers of optimizer steps in this cell ({each}), so their models may "
            "differ: run the cells that make model and optimizer again before you continue training"
        )

    def _stop(self, reason: str) -> None:
        """Have the ranks that are at the end of the cell stop their process groups."""
        for rank in self._ended.keys() - self._stopped:
            self._stopped.add(rank)
            self._pool.send(rank, StopGroups(reason))

    @property
    def _running(self) -> list[int]:
        return [rank for rank in self._pool.ranks if rank not in self._ended]

    @property
    def _errors(self) -> dict[int, CellError]:
        found = {rank: each.error for rank, each in sorted(self._ended.items())}
        return {rank: CellError(**error) for rank, error in found.items() if error is not None}

    # Interrupts -----------------------------------------------------------------------------------------------------

    def _interrupt(self, now: float) -> None:
        """Act on what :meth:`interrupt` asks for, step by step: see Note [An interrupt] in interrupt.py."""
        if self._asked == 0:
            return
        if not self._asked_at_once:
            trains = all(self._steps_of(rank) > 0 for rank in self._running)
            if self._next_way is None and self._asked == 1 and trains:
                self._next_way = now + self._time_to_a_step()
                self._ask_running(InterruptCell(self._number, False))
            elif self._next_way is None or self._asked > 1 or now > self._next_way:
                self._asked_at_once, self._next_way = True, now + knobs.times().stranded
                self._ask_running(InterruptCell(self._number, True))
            return
        if self._next_way is None or not (now > self._next_way or self._insists):
            return
        if not self._freed:  # one that waits in compiled code hears of the interrupt only when the wait ends
            self._free_those(self._running, "the cell was interrupted")
            self._next_way, self._asked_before = now + knobs.times().parting, self._asked
            return
        self._give_up(self._running, f"{which_ranks(self._running)} did not stop when the cell was interrupted", now)

    def _time_to_a_step(self) -> float:
        """Return the seconds that the ranks have to stop after a step, and say so if a user may be waiting for it."""
        usual, needed = knobs.times().to_a_step, min(_STEPS_TO_STOP * self._pace.of_a_step, _LONGEST_WAY)
        if needed <= usual:
            return usual
        self._notes.append(
            f"lockstep: the ranks stop after the same step, which may take {math.ceil(needed)} s; interrupt the cell "
            "again to stop them where they are"
        )
        return needed

    @property
    def _insists(self) -> bool:
        """Whether one more interrupt has come since the ranks were freed. (Interrupts in quick succession count as one,
        and ranks that tidy up after it keep their time.)"""
        return 0 < self._asked_before < self._asked

    def _give_up(self, ranks: list[int], why: str, now: float) -> None:
        """End all ranks, because some of them must be ended."""
        self._pool.give_up(why, rank=ranks[0], now=now)
        self._stage = _CellStage.DYING

    def _ask_running(self, request: object) -> None:
        for rank in self._running:
            self._pool.send(rank, request)

    # Ranks that wait in vain ----------------------------------------------------------------------------------------

    def _free(self, now: float) -> None:
        """Free the ranks that wait for one which is not in the cell any more: Note [Ranks that nobody will meet]."""
        if self._free_by is not None and now > self._free_by:
            begun = sentence(next(iter(self._freed.values())))
            self._give_up(self._running, f"{begun} {which_ranks(self._running)} can't be freed over this backend", now)
        if not self._ended or self._freed:
            return
        self._tell_of_the_rest(now)
        looks = {rank: self._pool.look(rank) for rank in self._running}
        for rank, look in looks.items():
            if not look.mark.waiting:  # by itself: a device may have a long kernel of its own
                self._waits.pop(rank, None)
            elif rank not in self._waits or self._waits[rank][0] != look.mark.serial:
                self._waits[rank] = look.mark.serial, now
        in_vain = [self._waits.get(rank) for rank in looks]
        if all(each is not None and now - each[1] > knobs.times().stranded for each in in_vain):
            self._free_by = now + knobs.times().parting
            self._free_those(list(looks), self._why_in_vain({rank: look.waits_in for rank, look in looks.items()}))

    def _tell_of_the_rest(self, now: float) -> None:
        """Say once that some ranks have failed and others run on, whose pages do not say what they wait for, if they
        wait: a collective of torch's own over gloo is on no page."""
        errors = self._errors
        if self._told or not errors or now - min(error.at for error in errors.values()) < knobs.late():
            return
        self._told = True
        failed = joined([f"rank {rank} has ended the cell by {error.summary}" for rank, error in errors.items()])
        still = "still runs" if len(self._running) == 1 else "still run"
        self._notes.append(f"lockstep: {failed}; {which_ranks(self._running)} {still} it. Interrupt it to end it there")

    def _why_in_vain(self, waits_in: Mapping[int, str]) -> str:
        places = "; ".join(f"rank {rank} in {place or 'a collective'}" for rank, place in sorted(waits_in.items()))
        verb = "waits" if len(waits_in) == 1 else "wait"
        waiting = f"{which_ranks(list(waits_in))} {verb} for all ranks ({places})"
        errors = self._errors
        if errors:
            told = joined([f"rank {rank} has ended the cell by {error.summary}" for rank, error in errors.items()])
            return f"{waiting}, and {told}"
        gone = which_ranks(sorted(self._ended))
        has = "has" if len(self._ended) == 1 else "have"
        return (
            f"{waiting}, but {gone} {has} come to the end of the cell without that call: every rank must make it, so "
            "take it out of code that only some ranks run (if rank == 0:)"
        )

    def _free_those(self, ranks: list[int], reason: str) -> None:
        for rank in ranks:
            self._freed[rank] = reason
            self._pool.send(rank, FreeWaiting(reason))
        self._stop(reason)  # over gloo a rank waits until another closes its connection

    # The end --------------------------------------------------------------------------------------------------------

    def result(self) -> Any:
        """Return the value of the last line on rank 0, once the cell is over; None: it has none.

        A value that can't be sent to this program is a :class:`RemoteValue`, which is shown as rank 0 shows it.

        Raises:
            CellFailed: an exception has ended the cell on some rank; the ranks stay alive.
            CellInterrupted: it was interrupted; a KeyboardInterrupt.
            RankFailed: a rank has died, or had to be ended; so are the others.
            LaunchError: the ranks could not be started.
        """
        assert self.is_over, "a cell has a result when it is over"
        if self._error is not None:
            self._returned.close()
            raise self._error
        errors = self._errors
        if errors:
            self._returned.close()
            raise self._failure(errors)
        shown = self._ended[0].shown
        try:
            value = self._returned.take()
        except NotReturned as why:
            return RemoteValue(shown or "", str(why))
        return value

    def _failure(self, errors: dict[int, CellError]) -> CellFailed | CellInterrupted:
        if any(error.type == "KeyboardInterrupt" for error in errors.values()) and self._asked:
            rank = min(errors, key=lambda rank: (errors[rank].type != "KeyboardInterrupt", rank))
            return CellInterrupted(_headline(errors, rank, "was interrupted"), traceback=errors[rank].traceback)
        causes = {rank: error for rank, error in errors.items() if rank not in self._freed} or errors
        first = min(causes, key=lambda rank: (causes[rank].at, rank))
        alike = [rank for rank, error in causes.items() if error.summary == causes[first].summary]
        if alike == [*self._pool.ranks] or 0 in alike:
            first = min(alike)
        text = _told(causes, first, alike, len(self._pool.ranks))
        reason = self._freed.get(first, "")
        text = text if reason in text else f"{reason}\n{text}"
        return CellFailed(text, rank=first, errors={rank: error.traceback for rank, error in errors.items()})


def _headline(errors: Mapping[int, CellError], rank: int, what: str) -> str:
    return f"the cell {what} on {which_ranks(list(errors))} (rank {rank}: {errors[rank].summary})"


def _told(causes: Mapping[int, CellError], first: int, alike: list[int], count: int) -> str:
    """Return in words why a cell has ended: the first error, on which ranks, and the errors of the others."""
    where = "all ranks" if len(alike) == count > 1 else which_ranks(alike)
    lines = [f"{where} failed: {causes[first].summary}", causes[first].traceback.rstrip()]
    lines += [f"rank {rank} raised {error.summary}" for rank, error in causes.items() if rank not in alike]
    return "\n".join(lines)
