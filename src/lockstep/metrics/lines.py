"""The lines of a log: when one is due, what the ranks say to each other then, and who writes it.

Note [When a line is due]
~~~~~~~~~~~~~~~~~~~~~~~~~
A line needs all ranks, and none may ask the others in each step whether it is time. So it is due at a call that every
rank knows by itself, and all ranks call the log equally often:

- every k steps: at the first call whose step is beyond the next multiple of k. The ranks count the same steps.
- every s seconds: clocks differ, and no rank may decide by its own. When the ranks meet they hear rank 0's clock, and
  all compute from it at which call they meet next: as many calls on as fit into the seconds that are left at the rate
  so far, but no more than twice as many as there were since the last line. If it is not time yet when they meet, they
  only plan the next meeting. So a line comes at the end of its seconds where steps take as long as before, and later
  where they have become slower, but never on some ranks alone.
- before a save, at the end of ``Checkpointer.epochs``, and when the script asks for one: all ranks are there together.

Note [What is wrong waits for a line]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that raised at once what only it finds wrong would leave the others waiting. So it keeps what is wrong, with the
line of the script, until the ranks meet, and then every rank raises it. They meet at the first call too, before
anything is due, so that what is wrong from the start is said at the start. What is right is written first: an error
loses no number but the one that is wrong.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lockstep import _files, callsite
from lockstep.comm.calls import of_all_ranks
from lockstep.comm.labels import labelled
from lockstep.comm.peers import OverGroup, Peers
from lockstep.comm.together import together
from lockstep.comm.world import World
from lockstep.errors import LockstepError
from lockstep.job import notes
from lockstep.metrics import sinks as to
from lockstep.metrics.file import LogFile
from lockstep.metrics.series import Numbers, SeriesSummary, merged, readable
from lockstep.step import slicing
from lockstep.text import counted, listed, which_ranks

#: What a line says besides what was logged, and the words that the call has for itself.
RESERVED = ("step", "time", "nonfinite", "samples")
_NUMBER, _TEXT = "a number", "a text"
#: What collectives of ours carry, so that they are told from the others.
_LABEL = "lockstep.Log"
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError, "LockstepError": LockstepError}
#: Notes on numbers that are not finite which a log leaves at most.
_NOTES = 100
#: Seconds before the end of its time at which a line is due already, as a part of the whole time.
_EARLY = 0.05


@dataclass(frozen=True)
class Target:
    """What a log was made with: where its lines go and how often."""

    path: Path
    #: Steps, seconds; None: not by these.
    every: int | None
    seconds: float | None
    sinks: Sequence[Any] = ()
    #: Raises, on rank 0, if the run that the file belongs to is not this one.
    check: Callable[[], None] = lambda: None


@dataclass
class _Told:
    """What one rank tells the others when they meet."""

    step: int
    #: By key what it is, ``_NUMBER`` or ``_TEXT``, of all that were logged since the last line.
    kinds: dict[str, str]
    numbers: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    #: Names of classes of errors, and their words.
    wrong: list[list[str]] = field(default_factory=list)


class Lines:
    """One rank's part in the lines of a log."""

    def __init__(self, world: World, target: Target, *, after: int | None = None) -> None:
        self._world = world
        self._peers: Peers = OverGroup(world) if world.world_size > 1 else _Alone()
        self._process = os.getpid()
        self._target = target
        #: The step that the run resumes from, None if it begins; and whether the file is open.
        self._after = after
        self._begun = False
        self._closed = False
        self._file: LogFile | None = None
        self._sinks: list[to.Sink] | None = None
        #: Of the last call.
        self.step = after or 0
        #: What was logged in the slices of the step in hand (step/slicing.py), which may be thrown away again.
        self._in_step: dict[str, Numbers] = {}
        self.is_in_step = self._has_slices = False
        self._step_before = self.step
        self._member = slicing.join(self)
        #: Since the last line.
        self._numbers: dict[str, Numbers] = {}
        self._texts: dict[str, str] = {}
        self._wrong: list[list[str]] = []
        #: What the ranks have found wrong together, and did not raise yet.
        self._owed: Exception | None = None
        #: Of the whole log.
        self._kinds: dict[str, str] = {}
        #: Of the keys that had numbers which were not finite: whether the last line had no others.
        self._nonfinite: dict[str, bool] = {}
        #: Of those that the last line had: the step of the first of them in the lines that follow each other.
        self._streaks: dict[str, int] = {}
        #: The step of the last line, and when it was written.
        self._last_step = self.step
        self._last_time = time.monotonic()
        #: Notes on numbers that are not finite which this log may leave still: they come and go in some runs.
        self._notes_left = _NOTES
        #: Calls so far, at the last line, and at the next meeting about time.
        self._calls = self._line_at = 0
        self._meets_at = 1
        #: No call before this step, and before so many calls, has anything to do but add its values.
        self._due_step = self._due_call = 0.0

    # What is logged --------------------------------------------------------------------------------------------------

    def add(self, values: Mapping[str, Any], step: int, weight: float) -> None:
        """**Collective** when a line is due. Add what one call logs."""
        if self._closed:
            self._refuse_closed()
        if step < self.step:
            error = ValueError(f"step={step} after step={self.step}: steps do not go back")
            self._find_wrong(error, step, sys._getframe(1))
        else:
            self.step = step
        in_slice = slicing.in_slice()
        numbers = self._in_step if in_slice else self._numbers
        for key, value in values.items():
            series = numbers.get(key)
            if series is None or not series.add_at_hand(value, weight, step):
                self._add_unusual(key, value, weight, step)
        if in_slice:
            self.is_in_step = True
            return
        self._calls += 1
        if self.step >= self._due_step or self._calls >= self._due_call:
            self._attend()

    def _count_call(self) -> None:
        """**Collective** when a line is due. Count a call, which every rank makes."""
        self._calls += 1
        self._attend()

    def _attend(self) -> None:
        """**Collective** when a line is due, and at the first call. Do what is due, and see when the next thing is."""
        if not self._begun:
            self._begin()
        every, seconds = self._target.every, self._target.seconds
        if every is not None and self.step > self._last_step and self.step // every > self._last_step // every:
            self.line()
        elif seconds is not None and self._calls >= self._meets_at:
            self._meet_about_time(seconds)
        self._raise_owed()
        self._due_step = math.inf if every is None else (self._last_step // every + 1) * every
        self._due_call = math.inf if seconds is None else self._meets_at

    def _add_unusual(self, key: str, value: Any, weight: float, step: int) -> None:
        try:
            self._add_one(key, value, weight, step)
        except (TypeError, ValueError) as unfit:
            self._find_wrong(unfit, step, sys._getframe(1))

    def _add_one(self, key: str, value: Any, weight: float, step: int) -> None:
        if type(value) is float:  # (to ask whether it is a Real takes ten times as long)
            self._series(key).add(value, weight, step)
        elif isinstance(value, torch.Tensor):
            if value.numel() != 1 or not readable(value):
                raise ValueError(
                    f"{key}: a tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}: expected one "
                    "real number; log its mean(), or each of its elements under a name of its own"
                )
            self._series(key).add_tensor(value, weight, step)
        elif isinstance(value, str):
            self._refuse_kind(key, _TEXT)
            self._texts[key] = value
        elif isinstance(value, Real):
            self._series(key).add(_plain(value), weight, step)
        else:
            raise TypeError(
                f"{key}: expected a number, a text or a tensor with one element, not {type(value).__name__}"
            )

    def _series(self, key: str) -> Numbers:
        """Return where the numbers of ``key`` go."""
        numbers = self._in_step if slicing.in_slice() else self._numbers
        series = numbers.get(key)
        if series is None:
            self._refuse_kind(key, _NUMBER)
            series = numbers[key] = Numbers()
        return series

    def _refuse_kind(self, key: str, kind: str) -> None:
        if not isinstance(key, str) or not key or key in RESERVED:
            raise ValueError(f"{key!r}: expected a name, but none of {', '.join(RESERVED)}, which lines have already")
        before = self._kinds.setdefault(key, kind)
        if before != kind:
            raise TypeError(f"{key}: {kind} here and {before} before: use two names")

    def find_wrong(self, error: Exception, step: int) -> None:
        """Keep an error of the call until the ranks meet. See Note [What is wrong waits for a line]."""
        self._find_wrong(error, step, sys._getframe(1))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LockstepError(f"rank {self._world.rank}: this lockstep.Log is closed: {self._target.path}")

    def _find_wrong(self, error: Exception, step: int, frame: FrameType) -> None:
        user = callsite.user_frame(frame)
        where = "" if user is None else f" at {callsite.words(user.f_code, user.f_lineno)}"
        self._wrong.append([type(error).__name__, f"{error} (logged at step {step}{where})"])

    # Steps in slices, in which the ranks log as often as they have slices ---------------------------------------------

    def step_begins(self, step: slicing.SlicedStep) -> None:  # noqa: ARG002
        """See :class:`~lockstep.step.slicing.Member`."""
        self.forget()
        self._step_before = self.step

    def slice_ends(self, step: slicing.SlicedStep, number: int) -> None:  # noqa: ARG002
        """See :class:`~lockstep.step.slicing.Member`."""
        if self.is_in_step:
            step.touch(self._member, self.step)

    def step_ends(self, step: slicing.SlicedStep) -> None:
        """See :class:`~lockstep.step.slicing.Member`. All the slices' calls are one."""
        self.step = step.said[self._member]  # which a rank without slices has not been told
        self._has_slices = True
        for key, numbers in self._in_step.items():
            self._numbers.setdefault(key, Numbers()).extend(numbers)
        self._in_step, self.is_in_step = {}, False
        self._count_call()

    def forget(self) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        if self.is_in_step:
            self.step = self._step_before  # it is taken again, and is no other step then
        self._in_step, self.is_in_step = {}, False

    # Meetings --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """**Collective.** Open the file on rank 0, and compare what the ranks log."""
        with labelled(_LABEL):
            _, told = together(self._peers, self._open, lambda _: vars(self._tell()), what="lockstep.Log")
        self._begun, self._last_time, self._wrong = True, time.monotonic(), []
        self._owed = self._wrong_with([_Told(**each) for each in told])
        self._raise_owed()

    def _open(self) -> None:
        if not self._world.is_main:
            return
        self._target.check()
        if self._file is not None:
            self._file.close()
        try:
            self._file = LogFile(self._target.path, after=self._after)
        except OSError as error:
            raise LockstepError(_files.describe(error)) from error
        notes.tell(notes.LOG, path=str(self._target.path))
        if self._sinks is None:
            self._sinks = to.make(self._target.sinks)

    def _meet_about_time(self, seconds: float) -> None:
        """**Collective.** Write a line if it is time by rank 0's clock, and plan the next meeting."""
        elapsed = float(self._gather(time.monotonic() - self._last_time)[0])
        rate = (self._calls - self._line_at) / max(elapsed, 1e-9)
        is_due = elapsed >= (1 - _EARLY) * seconds and self.step > self._last_step
        left = seconds if is_due else max(seconds - elapsed, 0.0)
        most = 2 * (self._calls - self._line_at)
        self._meets_at = self._calls + max(1, min(math.ceil(min(rate * left, most)), most))
        if is_due:
            self.line()

    @of_all_ranks("a line of lockstep.Log")
    def line(self) -> None:
        """**Collective.** Write what was logged since the last line, if anything was.

        Raises:
            TypeError, ValueError, LockstepError: what some rank has found wrong since then; or rank 0 could not write
                the line before this one, nor now. The same on every rank.
        """
        self._write_line()
        self._raise_owed()

    def _write_line(self) -> None:
        """**Collective.** As :meth:`line`, and owe what it would raise."""
        if self._file is not None and self._file.failure is not None:
            self._file.write()
            if self._file.failure is not None:
                self._wrong.append(["LockstepError", self._file.failure])
        told = self._tell()
        for key, series in self._numbers.items():
            try:
                told.numbers[key] = series.take().to_json()
            except Exception as error:  # noqa: BLE001  (the other ranks wait: they must get any failure)
                told.wrong.append(["LockstepError", f"{key} can't be read: {type(error).__name__}: {error}"])
                del told.kinds[key]
        self._numbers, self._texts, self._wrong = {}, {}, []
        self._due_step = 0
        everyones = [_Told(**each) for each in self._gather(vars(told))]
        self._last_step = max(each.step for each in everyones)
        self._last_time, self._line_at = time.monotonic(), self._calls
        if self._file is not None and any(each.kinds for each in everyones):
            self._write(everyones, self._file)
        self._owed = self._wrong_with(everyones) or self._owed

    def line_now(self) -> None:
        """**Collective.** As :meth:`line`, for a script that asks for it at any time."""
        self._refuse_closed()
        if self._begun:
            self.line()

    def line_on_disk(self) -> None:
        """**Collective.** As :meth:`line`, and return once the lines are on the disk itself.

        Raises:
            LockstepError: rank 0 can't write them; on every rank.
        """
        if self._is_open:
            self._sync()
            self._raise_owed()

    @property
    def _is_open(self) -> bool:
        """Whether anything was logged and can be written; the same on all ranks."""
        return self._begun and not self._closed

    def _sync(self) -> None:
        """**Collective.** Write a line, and force all to the disk."""

        def sync() -> None:
            if self._file is not None:
                self._file.sync()
                if self._file.failure is not None:
                    raise LockstepError(self._file.failure)
            for sink in self._sinks or []:
                sink.flush()

        self._write_line()
        with labelled(_LABEL):
            together(self._peers, sync, lambda _: None, what="lockstep.Log")

    def _gather(self, record: Any) -> list[Any]:
        with labelled(_LABEL):
            return self._peers.gather(record)

    def _tell(self) -> _Told:
        kinds = {key: kind for key, kind in self._kinds.items() if key in self._numbers or key in self._texts}
        return _Told(self.step, kinds, texts=self._texts, wrong=self._wrong)

    def _write(self, told: Sequence[_Told], file: LogFile) -> None:
        """**Rank 0.** Put together what the ranks have told, and write it."""
        values: dict[str, to.Value] = {}
        known = set(self._nonfinite)
        nonfinite: dict[str, int] = {}
        since: dict[str, int] = {}
        for key in dict.fromkeys(key for each in told for key in each.kinds):
            summaries = [_summary(each, key) for each in told if key in each.numbers]
            texts = [each.texts[key] for each in told if key in each.texts]
            if texts:
                values[key] = texts[0]
                continue
            summary = merged(summaries)
            values[key] = summary.value
            if summary.nonfinite:
                nonfinite[key], since[key] = summary.nonfinite, summary.since or 0
            self._note_nonfinite(key, summary)
        line = {"step": self._last_step, "time": round(time.time(), 3), **values}
        file.append(line | ({"nonfinite": nonfinite} if nonfinite else {}))
        for sink in self._sinks or []:
            sink.write(values, self._last_step)
        for key in [key for key in nonfinite if key not in known]:
            ranks = [rank for rank, each in enumerate(told) if key in each.numbers and _summary(each, key).nonfinite]
            callsite.warn(
                f"{key}: up to step {self._last_step}, {counted(nonfinite[key], 'number')} infinite or NaN, the first "
                f"at step {since[key]}, on {which_ranks(ranks, most=5)}. The line's mean is that of the others, and "
                "'nonfinite' in it counts them, from now on without a warning",
                RuntimeWarning,
            )

    def _note_nonfinite(self, key: str, summary: SeriesSummary) -> None:
        """**Rank 0.** Leave a note for the record of the run where numbers begin not to be finite, and where they are
        again."""
        alone = bool(summary.nonfinite) and summary.value is None
        if not summary.nonfinite:
            self._streaks.pop(key, None)
        if key in self._nonfinite or summary.nonfinite:
            step = self._streaks.setdefault(key, summary.since or 0) if summary.nonfinite else self._last_step
            if self._nonfinite.get(key) != alone and self._notes_left:
                self._notes_left -= 1
                notes.tell(notes.NONFINITE, name=key, step=step, alone=int(alone))
            self._nonfinite[key] = alone

    def _raise_owed(self) -> None:
        owed, self._owed = self._owed, None
        if owed is not None:
            raise owed

    def _wrong_with(self, told: Sequence[_Told]) -> Exception | None:
        """Return what is wrong with what the ranks have told, alike on every rank."""
        wrong = [(kind, f"rank {rank}: {words}") for rank, each in enumerate(told) for kind, words in each.wrong]
        steps = [each.step for each in told]
        if any(step != steps[0] for step in steps):
            listing = ", ".join(f"rank {rank}: {step}" for rank, step in enumerate(steps))
            wrong.append(
                ("LockstepError", f"the ranks are at different steps ({listing}): call the log equally often on all")
            )
        failed = {rank for rank, each in enumerate(told) if each.wrong}
        for key in dict.fromkeys(key for each in told for key in each.kinds):
            # A rank may have had no slice since the last line.
            telling = {rank: each for rank, each in enumerate(told) if each.kinds or not self._has_slices}
            kinds = {rank: each.kinds.get(key, "not there") for rank, each in telling.items()}
            missing = {rank for rank, kind in kinds.items() if kind == "not there"}
            if len(set(kinds.values())) > 1 and not failed & missing:
                listing = ", ".join(f"rank {rank}: {kind}" for rank, kind in kinds.items())
                wrong.append(
                    (
                        "ValueError",
                        f"{key!r} is not logged alike on all ranks ({listing}): give each rank's number, also of an "
                        "empty batch, which counts for nothing",
                    )
                )
        if not wrong:
            return None
        words = listed([words for _, words in wrong], most=5)
        return _KINDS[wrong[0][0]](f"rank {self._world.rank} of {self._world.world_size}: lockstep.Log: {words}")

    # Where the run is ------------------------------------------------------------------------------------------------

    def resumed(self, step: int | None) -> None:
        """Note that the run resumes from ``step``; None: it begins. What was logged and is in no line is void."""
        if step is None and self._begun:
            return
        self._begun, self._after, self._due_step = False, step, 0
        self.step = self._last_step = step or 0
        self._numbers, self._texts, self._wrong = {}, {}, []

    def before_save(self, step: int) -> None:
        """**Collective.** Write what was logged up to the checkpoint at ``step``.

        A value that can't be logged keeps no run from being saved: the next call says what was wrong with it.
        """
        if self._is_open:
            self.step = max(self.step, step)
            self._sync()

    def at_end(self, step: int) -> None:
        """**Collective.** Write what was logged since the last line: the training is over."""
        if self._is_open:
            self.step = max(self.step, step)
            self.line_on_disk()

    def close(self) -> None:
        """**Collective.** Write what was logged since the last line, and give the file up."""
        if self._closed:
            return
        self.line_on_disk()
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()
        for sink in self._sinks or []:
            sink.close()

    def leave(self) -> None:
        """End without the other ranks: the log or the process is gone. A world of one has nobody to ask."""
        if self._closed or os.getpid() != self._process:
            return
        if self._begun and self._world.world_size == 1:
            self._write_line()
        words = [] if self._owed is None else [str(self._owed)]
        if self._file is not None and self._file.failure is not None:
            words.append(self._file.failure)
        left = (sum(map(len, self._numbers.values())) + len(self._texts)) * self._begun
        if left and getattr(sys, "last_value", None) is None:
            words.append(
                f"{self._target.path} lacks {counted(left, 'value')} logged after step {self._last_step}: call "
                "close() of the lockstep.Log on every rank, or use it in a with statement"
            )
        if words and self._world.is_main:
            print(*(f"lockstep: {each}" for each in words), sep="\n", file=sys.stderr, flush=True)
        self._end()


def _summary(told: _Told, key: str) -> SeriesSummary:
    return SeriesSummary.from_json(told.numbers[key])


class _Alone:
    """The peers of a world of one, also after the world was left."""

    rank = 0
    world_size = 1

    def gather(self, record: Any) -> list[Any]:
        return [record]


def _plain(value: Any) -> float:
    """Return a number as Python's own int or float: NumPy's are none that JSON knows.

    Raises:
        ValueError: it is too large for a float.
    """
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError(
            f"an int of {int(value).bit_length()} bits: expected a number that a float can hold"
        ) from error
    return int(value) if isinstance(value, Integral) else number
