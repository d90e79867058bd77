"""Where the workers of this rank go on in a stream that has a state, as part of the loader's position."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep import callsite
from lockstep.comm.world import World
from lockstep.data.fetch import Fetched
from lockstep.data.streams.reading import StreamMark
from lockstep.errors import CheckpointMismatch


class StreamMarks:
    """The marks of the batches that the loop was given last, one for each worker; see Note [States of streams] in
    ``reading.py``.

    Args:
        world: the ranks.
        in_parts: whether each rank reads a part of the stream, so that its marks are its own.
    """

    def __init__(self, world: World, *, in_parts: bool) -> None:
        self._world, self._in_parts = world, in_parts
        self.by_worker: dict[int, StreamMark] = {}

    def note(self, handed_out: Fetched) -> None:
        """Note that the loop is given a batch, and warn of what its worker has to say."""
        mark = handed_out.mark
        if mark is not None:
            self.by_worker[mark.worker] = mark
        self._warn(handed_out)

    def unused(self, fetched: Iterator[Fetched], number: int) -> Iterator[Fetched]:
        """Yield what comes after the first ``number`` batches, and warn of what their workers have to say.

        Raises:
            CheckpointMismatch: the states lead past more batches than were used.
        """
        for each in fetched:
            if number and not each.is_end:
                number -= 1
                self._warn(each)
            elif each.is_passed_over:
                raise CheckpointMismatch(
                    f"{self._whoami()}: the states of the stream in the loaded position are not those of its number of "
                    "batches: the position was put together from two, or edited"
                )
            else:
                yield each

    def _warn(self, read: Fetched) -> None:
        if read.warning and (self._in_parts or self._world.is_main):
            callsite.warn(f"{self._whoami()}: {read.warning}")

    def _whoami(self) -> str:
        return f"rank {self._world.rank} of {self._world.world_size}"

    def to_json(self) -> dict[str, Any] | None:
        """Return the marks in JSON types; None: there are none."""
        if not self.by_worker:
            return None
        workers = {
            str(number): {**mark._asdict(), "state": json.loads(mark.state)} for number, mark in self.by_worker.items()
        }
        return {"rank": self._world.rank if self._in_parts else None, "workers": workers}

    def load(self, marks: Mapping[int, StreamMark], *, rank: int | None) -> None:
        """Go on where a position says; where that is another rank's, by counting, of which the user is warned.

        Args:
            marks: by worker.
            rank: whose they are; None: every rank's.
        """
        is_mine = rank == (self._world.rank if self._in_parts else None)
        self.by_worker = dict(marks) if is_mine else {}
        if marks and not is_mine:
            callsite.warn(
                f"{self._whoami()}: the loaded position has the states of the stream "
                f"on rank {rank} alone, so this rank reads its part from the beginning of the epoch, and passes over "
                "what was used. Save loader.state_dict() on every rank, as lockstep.Checkpointer does"
            )


def read_marks(state: Any) -> tuple[dict[int, StreamMark], int | None]:
    """Read back what :meth:`StreamMarks.to_json` wrote: the marks by worker, and whose they are.

    Raises:
        CheckpointMismatch: it is something else.
    """
    if state is None:
        return {}, None
    try:
        rank, marks = state["rank"], {}
        for number, fields in state["workers"].items():
            mark = StreamMark(**{**fields, "state": json.dumps(fields["state"])})
            numbers = [mark.worker, mark.batches, mark.samples, mark.drawn, *([] if rank is None else [rank])]
            if any(type(each) is not int or each < 0 for each in numbers) or mark.worker != int(number):
                raise ValueError(f"expected whole numbers of 0 or more, got {tuple(numbers)}")
            marks[mark.worker] = mark
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointMismatch(
            f"these are not the states of a stream ({type(error).__name__}: {error}): {str(state)[:200]}"
        ) from None
    return marks, rank
