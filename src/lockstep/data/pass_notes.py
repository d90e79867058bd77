"""The notes of a loader in the record of its run: enough to find the samples of any step afterwards.

Note [Passes in the record]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Which samples a global batch has follows from the loader's settings and the batch's place (Note [Global order] in
``data/order.py``), so no batch is written down. It can't be computed which batch a step took: a script decides how many
batches make a step, when it leaves a loop, and what it evaluates in between. So rank 0 notes for a pass at which step
and position it began, what the first batches did to the count of steps, and how many steps and batches it had in the
end.

Passes are mostly alike: each begins where the one before ended, and has as many steps and batches. Of these only their
number is noted: at 1, 2, 4, 8 and so on, once a second if passes are long, and before anything else is. Of passes in
which no step was taken (evaluations) only the first is noted. So the record has a few lines, however long the run, and
a step costs nothing: the first batches of a pass that is unlike the one before come through an iterator that is gone
after them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from lockstep import knobs
from lockstep.data.cursor import Cursor
from lockstep.job import flight, notes

Fetched = TypeVar("Fetched")

#: The numbers of batches of a pass after which is noted which steps they went to; after the last that is over.
_NOTED_AFTER = (2, 5, 17, 65, 257)
#: Seconds after which the number of passes that are alike is noted again.
_SECONDS = 1.0
#: So many batches are enough if a step was taken among them.
_ENOUGH = 17


class _Begun(NamedTuple):
    """Where a pass began: the number of the step under way, from 1, and the loader's position."""

    step: int
    epoch: int
    batch: int
    samples: int


class PassNotes:
    """Leaves notes of one loader's passes; see Note [Passes in the record].

    Args:
        number: of the loader, in the order in which a process has sharded them.
        tells: whether this rank leaves notes; only one does.
    """

    def __init__(self, number: int, *, tells: bool) -> None:
        self._number = number
        self._tells = tells and knobs.job_dir() is not None
        self._settings: Mapping[str, Any] | None = None
        #: The pass under way; None: there is none.
        self._begun: _Begun | None = None
        #: The step that each of its first batches went to, while they are watched; None: they are not.
        self._steps: list[int] | None = None
        #: The last pass that was noted, its steps and batches, and how many that are like it have followed.
        self._noted: _Begun | None = None
        self._size = 0, 0
        self._again, self._told_at = 0, 0.0
        #: The place where the next pass begins if it is like the last one.
        self._expected: _Begun | None = None

    def begin(self, cursor: Cursor, settings: Mapping[str, Any], *, in_hand: bool = False) -> None:
        """A pass begins, or continues with other settings.

        Args:
            cursor: the position of its first batch.
            settings: the settings that decide the samples of its batches, in JSON's types.
            in_hand: whether the loop has the first batch already.
        """
        if not self._tells:
            return
        self._begun = _Begun(flight.current.step, cursor.epoch, cursor.batches, cursor.samples)
        is_new = settings != self._settings
        self._steps = None
        if is_new or self._begun != self._expected:
            self._tell_repetitions()
            self._steps = [self._begun.step] if in_hand else []
        if is_new:
            self._settings, self._noted, self._expected = dict(settings), None, None
            notes.tell(notes.LOADER, loader=self._number, settings=self._settings)
            self._tell(self._begun)

    def watched(self, fetched: Iterator[Fetched]) -> Iterator[Fetched]:
        """Return the batches as they come, of which the first are noted with their steps if need be."""
        return fetched if self._steps is None else chain(self._first(fetched, self._steps), fetched)

    def end(self, cursor: Cursor) -> None:
        """The pass is over, at this position."""
        begun, self._begun, self._steps = self._begun, None, None
        if begun is None:
            return
        step = flight.current.step
        size = step - begun.step, cursor.batches - begun.batch
        if size[0] <= 0:
            if self._noted is None:  # its beginning was told
                self._tell(begun, steps=0, batches=size[1])
                self._noted, self._size = begun, size
            self._expected = None
            return
        if begun == self._expected and size == self._size:
            self._again += 1
            if self._again & (self._again - 1) == 0 or time.monotonic() > self._told_at + _SECONDS:
                self._tell_repetitions()
        else:
            self._tell_repetitions()
            self._tell(begun, steps=size[0], batches=size[1])
            self._noted, self._size, self._again = begun, size, 0
        self._expected = _Begun(step, begun.epoch + 1, 0, 0)

    def _first(self, fetched: Iterator[Fetched], steps: list[int]) -> Iterator[Fetched]:
        """Yield the first batches, and note the step that each goes to."""
        while len(steps) < _NOTED_AFTER[-1]:
            batch = next(fetched, None)
            if batch is None:
                return
            steps.append(flight.current.step)
            took_step, begun = steps[-1] > steps[0], self._begun
            if took_step and begun is not None and len(steps) in _NOTED_AFTER:
                self._tell(begun, first=steps)
            yield batch
            if took_step and len(steps) >= _ENOUGH:
                return

    def _tell_repetitions(self) -> None:
        if self._noted is not None and self._again:
            self._told_at = time.monotonic()
            self._tell(self._noted, again=self._again)

    def _tell(self, begun: _Begun, **facts: Any) -> None:
        notes.tell(notes.PASS, loader=self._number, **begun._asdict(), **facts)
