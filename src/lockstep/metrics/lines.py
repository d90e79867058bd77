"""The lines of a log: when one is due, the records that the ranks exchange then, and how rank 0 writes it.

Note [When a line is due]
~~~~~~~~~~~~~~~~~~~~~~~~~
A line needs all ranks, and no rank may ask the others in each step whether it is time. So a line is due at a call that
every rank can tell by itself, and all ranks call the log equally often:

- every k steps: at the first call whose step is beyond the next multiple of k. The ranks count the same steps, unless
  they train apart and their GradScalers leave out steps of one rank alone. Then they meet, and tell their steps, of
  which the largest counts. They plan the next meeting as for seconds, with steps in their place.
- every s seconds: clocks differ, and no rank may decide by its own. When the ranks meet, rank 0 sends its time, and all
  compute from it the call at which they meet next: after as many calls as fit into the remaining seconds at the rate so
  far, but no more than twice as many as there were since the last line. If it is not time yet when they meet, they only
  plan the next meeting. So a line comes at the end of its seconds if steps take as long as before, and later if they
  have become slower, but never on some ranks alone.
- before a save, at the end of ``Checkpointer.epochs``, and when the script asks for one: all ranks are there together.

Note [What is wrong waits for a line]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that raised its own error at once would leave the others waiting. So it keeps the error, with the line of the
script, until the ranks meet, and then every rank raises it. They meet at the first call too, before anything is due, so
that an error from the start is reported at the start. Valid values are written first: an error loses no number but the
invalid one.
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
from typing import Any, Protocol

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
from lockstep.metrics.file import EVALUATION, LogFile, evaluation_line, result_key
from lockstep.metrics.series import Numbers, SeriesSummary, Weight, merged, readable
from lockstep.step import slicing
from lockstep.text import counted, listed, which_ranks

#: Names that can't be logged: keys that lines have already, and parameters of the call.
RESERVED = ("step", "time", "nonfinite", "samples", EVALUATION)
_NUMBER, _TEXT = "a number", "a text"
#: The label of the log's collectives, which tells them from the others.
_LABEL = "lockstep.Log"
_KINDS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError, "LockstepError": LockstepError}
#: The most notes on non-finite numbers that a log leaves in the run's record.
_NOTES = 100
#: A line is due this fraction of its interval early.
_EARLY = 0.05


class EvaluationResult(Protocol):
    """What an evaluation has found of a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def time(self) -> float: ...

    @property
    def numbers(self) -> Mapping[str, float] | None: ...


@dataclass(frozen=True)
class Target:
    """The options of a log: where its lines go and how often."""

    path: Path
    #: The interval between two lines in steps and in seconds; None: lines are not due by it.
    every: int | None
    seconds: float | None
    sinks: Sequence[Any] = ()
    #: Called on rank 0; raises if the file belongs to another run.
    check: Callable[[], None] = lambda: None
    #: Called on rank 0; returns all that evaluations have found of the run's checkpoints so far.
    evaluated: Callable[[], Sequence[EvaluationResult]] = tuple
    #: Whether the ranks train apart, so that they may count different numbers of steps; the same on all.
    trains_apart: Callable[[], bool] = lambda: False


@dataclass
class _Told:
    """The record that one rank sends to the others when they meet."""

    step: int
    #: Key -> ``_NUMBER`` or ``_TEXT``, for the keys that were logged since the last line.
    kinds: dict[str, str]
    numbers: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    #: Pairs of an error's class name and its message.
    wrong: list[list[str]] = field(default_factory=list)


class Lines:
    """One rank's part in the lines of a log."""

    def __init__(self, world: World, target: Target, *, after: int | None = None) -> None:
        self._world = world
        self._peers: Peers = OverGroup(world) if world.world_size > 1 else _Alone()
        self._process = os.getpid()
        self._target = target
        #: The step that the run resumes from, or None if it begins; and True once the ranks have opened the file.
        self._after = after
        self._begun = False
        self._closed = False
        self._file: LogFile | None = None
        self._sinks: list[to.Sink] | None = None
        #: The step of the last call.
        self.step = after or 0
        #: The numbers of the slices of the current step (step/slicing.py), which may still be discarded.
        self._in_step: dict[str, Numbers] = {}
        self.is_in_step = self._has_slices = False
        self._step_before = self.step
        self._member = slicing.join(self)
        #: The numbers, texts and errors since the last line.
        self._numbers: dict[str, Numbers] = {}
        self._texts: dict[str, str] = {}
        self._wrong: list[list[str]] = []
        #: The error that all ranks have agreed on and not raised yet.
        self._owed: Exception | None = None
        #: What rank 0 has to warn of, once no rank waits for it.
        self._held: list[callsite.HeldWarning] = []
        #: Key -> ``_NUMBER`` or ``_TEXT``, for all keys of the log.
        self._kinds: dict[str, str] = {}
        #: Key that had non-finite numbers -> True if it had no finite ones in the last line.
        self._nonfinite: dict[str, bool] = {}
        #: Key with non-finite numbers in the last line -> the first step of its current streak of such lines.
        self._streaks: dict[str, int] = {}
        #: The step of the last line, and the time at which it was written.
        self._last_step = self.step
        self._last_time = time.monotonic()
        #: The number of notes on non-finite numbers that this log may still leave: in some runs they come and go.
        self._notes_left = _NOTES
        #: The number of calls so far, at the last line, and at the next meeting about time.
        self._calls = self._line_at = 0
        self._meets_at = 1
        #: True if the ranks may count different steps, and the number of calls at the next meeting about these.
        self._trains_apart = False
        self._meets_about_steps_at = 1
        #: The step and the number of calls before which a call only adds its values.
        self._due_step = self._due_call = 0.0

    # What is logged --------------------------------------------------------------------------------------------------

    def add(self, values: Mapping[str, Any], step: int, weight: Weight) -> None:
        """**Collective** when a line is due. Add the values of one call."""
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
        """**Collective** when a line is due, and at the first call. Do what is due, and find out when to come back."""
        if not self._begun:
            self._begin()
        every, seconds = self._target.every, self._target.seconds
        if every is not None and self._is_due_by_steps(every):
            self.line()
        elif seconds is not None and self._calls >= self._meets_at:
            self._meet_about_time(seconds)
        self._raise_owed()
        by_steps = every is not None and not self._trains_apart
        self._due_step = (self._last_step // every + 1) * every if every is not None and by_steps else math.inf
        self._due_call = math.inf if seconds is None else self._meets_at
        if every is not None and not by_steps:
            self._due_call = min(self._due_call, self._meets_about_steps_at)

    def _add_unusual(self, key: str, value: Any, weight: Weight, step: int) -> None:
        try:
            self._add_one(key, value, weight, step)
        except (TypeError, ValueError) as unfit:
            self._find_wrong(unfit, step, sys._getframe(1))

    def _add_one(self, key: str, value: Any, weight: Weight, step: int) -> None:
        if type(value) is float:  # (isinstance(value, Real) takes ten times as long)
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
        """Return the series to which numbers of ``key`` are added."""
        numbers = self._in_step if slicing.in_slice() else self._numbers
        series = numbers.get(key)
        if series is None:
            self._refuse_kind(key, _NUMBER)
            series = numbers[key] = Numbers()
        return series

    def _refuse_kind(self, key: str, kind: str) -> None:
        if not isinstance(key, str) or not key or key in RESERVED:
            raise ValueError(f"{key!r}: expected a name other than {', '.join(RESERVED)}, which every line has")
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
        """See :class:`~lockstep.step.slicing.Member`. The calls in all slices count as one."""
        self.step = step.said[self._member]  # a rank without slices has made no call that says it
        self._has_slices = True
        for key, numbers in self._in_step.items():
            self._numbers.setdefault(key, Numbers()).extend(numbers)
        self._in_step, self.is_in_step = {}, False
        self._count_call()

    def forget(self) -> None:
        """See :class:`~lockstep.step.slicing.Member`."""
        if self.is_in_step:
            self.step = self._step_before  # the step is taken again, and is the same one then
        self._in_step, self.is_in_step = {}, False

    # Meetings --------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """**Collective.** Open the file on rank 0, and compare the keys that the ranks log."""
        with labelled(_LABEL):
            _, told = together(self._peers, self._open, lambda _: vars(self._tell()), what="lockstep.Log")
        self._begun, self._last_time, self._wrong = True, time.monotonic(), []
        self._trains_apart = self._target.trains_apart()
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
        told = self._gather([time.monotonic() - self._last_time, self.step])
        elapsed = float(told[0][0])
        rate = (self._calls - self._line_at) / max(elapsed, 1e-9)
        is_due = elapsed >= (1 - _EARLY) * seconds and max(step for _, step in told) > self._last_step
        left = seconds if is_due else max(seconds - elapsed, 0.0)
        most = 2 * (self._calls - self._line_at)
        self._meets_at = self._calls + max(1, min(math.ceil(min(rate * left, most)), most))
        if is_due:
            self.line()

    def _is_due_by_steps(self, every: int) -> bool:
        """**Collective** where the ranks train apart, if it is time to meet: then plan the next meeting, too."""
        if not self._trains_apart:
            return self.step // every > self._last_step // every
        if self._calls < self._meets_about_steps_at:
            return False
        reached: int = max(self._gather(self.step))
        calls, passed = self._calls - self._line_at, reached - self._last_step
        left = every - reached % every
        wanted = -(-left * calls // passed) if passed > 0 else 2 * calls
        self._meets_about_steps_at = self._calls + max(1, min(wanted, 2 * calls))
        return reached // every > self._last_step // every

    @of_all_ranks("a line of lockstep.Log")
    def line(self) -> None:
        """**Collective.** Write the values since the last line, if there are any.

        Raises:
            TypeError, ValueError, LockstepError: an error that a rank has kept since then, or rank 0 could write the
                line before this one neither then nor now. The same on every rank.
        """
        self._write_line()
        self._raise_owed()

    def _write_line(self) -> None:
        """**Collective.** Do as :meth:`line`, but keep its error in ``_owed``."""
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
        if self._file is not None:
            with callsite.holding_warnings() as held:
                if any(each.kinds for each in everyones):
                    self._write(everyones, self._file)
                self._write_evaluated(self._file)
            self._held += held
        self._owed = self._wrong_with(everyones) or self._owed

    def line_now(self) -> None:
        """**Collective.** Do as :meth:`line`, for a script that asks for it at any time."""
        self._refuse_closed()
        if self._begun:
            self.line()

    def line_on_disk(self) -> None:
        """**Collective.** Do as :meth:`line`, and return once the lines are on the disk itself.

        Raises:
            LockstepError: rank 0 can't write them; on every rank.
        """
        if self._is_open:
            self._sync()
            self._raise_owed()

    @property
    def _is_open(self) -> bool:
        """True if the log has begun and is not closed; the same on all ranks."""
        return self._begun and not self._closed

    def _sync(self) -> None:
        """**Collective.** Write a line, and force the file to the disk."""

        def sync() -> None:
            if self._file is not None:
                self._file.sync()
                if self._file.failure is not None:
                    raise LockstepError(self._file.failure)
            for sink in self._sinks or []:
                sink.flush()

        self._write_line()
        with labelled(_LABEL), callsite.holding_warnings() as held:
            together(self._peers, sync, lambda _: None, what="lockstep.Log")
        self._held += held

    def _gather(self, record: Any) -> list[Any]:
        with labelled(_LABEL):
            return self._peers.gather(record)

    def _tell(self) -> _Told:
        kinds = {key: kind for key, kind in self._kinds.items() if key in self._numbers or key in self._texts}
        return _Told(self.step, kinds, texts=self._texts, wrong=self._wrong)

    def _write(self, told: Sequence[_Told], file: LogFile) -> None:
        """**Rank 0.** Combine the ranks' records into a line, and write it."""
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

    def _write_evaluated(self, file: LogFile) -> None:
        """**Rank 0.** Write the lines of evaluations that are new. See Note [Lines of evaluations]."""
        for each in self._target.evaluated():
            if each.numbers is None or result_key(each.name, each.time) in file.evaluations:
                continue
            file.append(evaluation_line(each.name, step=each.step, time=each.time, numbers=each.numbers))
            for sink in self._sinks or []:
                sink.write_late(each.numbers, each.step, now=self._last_step)

    def _note_nonfinite(self, key: str, summary: SeriesSummary) -> None:
        """**Rank 0.** Leave a note for the run's record where numbers become non-finite, and where they are finite
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
        held, self._held = self._held, []
        try:
            callsite.warn_all(held)
        finally:
            if owed is not None:
                raise owed

    def _wrong_with(self, told: Sequence[_Told]) -> Exception | None:
        """Return the error in the ranks' records, or None; the same on every rank."""
        wrong = [(kind, f"rank {rank}: {words}") for rank, each in enumerate(told) for kind, words in each.wrong]
        steps = [each.step for each in told]
        if any(step != steps[0] for step in steps) and not self._trains_apart:
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
                        f"{key!r} is not logged the same way on all ranks ({listing}): give each rank's number, also "
                        "of an empty batch, which counts for nothing",
                    )
                )
        if not wrong:
            return None
        words = listed([words for _, words in wrong], most=5)
        return _KINDS[wrong[0][0]](f"rank {self._world.rank} of {self._world.world_size}: lockstep.Log: {words}")

    # Where the run is ------------------------------------------------------------------------------------------------

    def resumed(self, step: int | None) -> None:
        """Note that the run resumes from ``step``; None: it begins. Values that are in no line are dropped."""
        if step is None and self._begun:
            return
        self._begun, self._after, self._due_step = False, step, 0
        self.step = self._last_step = step or 0
        self._numbers, self._texts, self._wrong = {}, {}, []

    def before_save(self, step: int) -> None:
        """**Collective.** Write the values up to the checkpoint at ``step``.

        A value that can't be logged does not prevent the save: the next call raises its error.
        """
        if self._is_open:
            self.step = max(self.step, step)
            self._sync()

    def at_end(self, step: int) -> None:
        """**Collective.** Write the values since the last line at the end of training."""
        if self._is_open:
            self.step = max(self.step, step)
            self.line_on_disk()

    def close(self) -> None:
        """**Collective.** Write the values since the last line, and close the file."""
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
        """End without the other ranks, when the log or the process is gone. A world of one still writes its line."""
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
        callsite.tell_all(self._held)


def _summary(told: _Told, key: str) -> SeriesSummary:
    return SeriesSummary.from_json(told.numbers[key])


class _Alone:
    """The peers of a world of one, even after the world was left."""

    rank = 0
    world_size = 1

    def gather(self, record: Any) -> list[Any]:
        return [record]


def _plain(value: Any) -> float:
    """Return a number as Python's own int or float: JSON does not know NumPy's.

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
