"""A loader's position: one position in the global order, the same on every rank and at every world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from lockstep.data.order import read_shares, share_bounds
from lockstep.errors import CheckpointMismatch
from lockstep.text import counted, joined


@dataclass(frozen=True)
class Cursor:
    """A position in the sequence of all epochs."""

    epoch: int = 0
    #: The number of samples of this epoch that the user's loop has been given, over all ranks.
    samples: int = 0
    #: The number of global batches of this epoch that the user's loop has been given.
    batches: int = 0
    #: True while a pass over this epoch is under way, even after its last batch; False between passes.
    in_epoch: bool = False


class PositionNow(NamedTuple):
    """A loader's position at one moment."""

    cursor: Cursor
    #: Returns the loader's state of that moment, in JSON types.
    state: Callable[[], dict[str, Any]]

    @property
    def epoch(self) -> int:
        """As the loader's."""
        return self.cursor.epoch

    @property
    def in_epoch(self) -> bool:
        """As the loader's."""
        return self.cursor.in_epoch


@dataclass(frozen=True)
class LoaderState:
    """The saved state: the cursor, and the settings that must stay the same for it to mean the same position."""

    cursor: Cursor
    seed: int
    order: str
    length: int | None
    batch_size: int | None
    drop_last: bool
    num_workers: int | None
    #: The digest of the order that the user's sampler drew for the epoch under way, or of the batches that a batch
    #: sampler drew before the cursor; or None.
    drawn: str | None
    #: The number of slices of each global batch and of threads that compute them, or None without slices; the bits of
    #: a run depend on them.
    slices: int | None = None
    threads: int | None = None
    #: What the costs are by which slices are cut, or None.
    costs: str | None = None
    #: The state of a batch sampler with a memory of its own, before the epoch under way or after the last one that is
    #: over, in JSON types; or None.
    sampler: Any = None
    #: The number of ranks among which a stream splits itself, or None.
    parts: int | None = None
    #: Each rank's proportion of a full batch of such a stream, or None: all are equal.
    shares: list[float] | None = None
    #: The state from which to go on in a stream with one of its own, in JSON types: that of every rank, or, if the
    #: stream splits itself, of one rank; or None.
    stream: Any = None
    #: True if the pass under way has come to its end: nothing is asked for any more, and nothing is drawn for that; or
    #: None.
    over: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the state in JSON types."""
        # (What not every loader has.)
        later = ("slices", "threads", "costs", "sampler", "parts", "shares", "stream", "over")
        return {"format": 1, **{k: v for k, v in asdict(self).items() if v is not None or k not in later}}

    def common(self) -> dict[str, Any]:
        """Return in JSON types what is the same on all ranks."""
        return {**self.to_json(), "stream": None}

    @classmethod
    def from_json(cls, state: Any) -> LoaderState:
        """Read back what :meth:`to_json` wrote.

        Raises:
            CheckpointMismatch: ``state`` is not that of a sharded loader.
        """
        try:
            fields = dict(state)
            if fields.pop("format") != 1:
                raise ValueError(f"format {state['format']!r} is unknown to this version of lockstep")
            cursor = Cursor(**fields.pop("cursor"))
            restored = cls(cursor=cursor, **fields)
            numbers: list[Any] = [cursor.epoch, cursor.samples, cursor.batches, restored.seed]
            numbers += [] if restored.order == "batches" else [restored.batch_size]
            if restored.shares is not None:
                read_shares(restored.shares, world_size=restored.parts or 0)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError(f"expected whole numbers of 0 or more, got {tuple(numbers)}")
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointMismatch(
                f"this is not the state of a sharded loader ({type(error).__name__}: {error}): {str(state)[:200]}"
            ) from None
        return restored

    def other_bits_than(self, mine: LoaderState) -> str:
        """Return why a loader with the state ``mine`` computes other bits than this one; empty if it does not."""
        names = {"slices": "slices=", "threads": "threads=", "costs": "costs="}
        differ = [
            f"{said}{getattr(self, name)} before, {said}{getattr(mine, name)} now"
            for name, said in names.items()
            if getattr(self, name) != getattr(mine, name)
        ]
        return "; ".join(differ)

    def refuse_unless_continued_by(self, mine: LoaderState) -> None:
        """Check that a loader with the state ``mine`` can resume from here.

        Raises:
            CheckpointMismatch: the data or its order differs, so that the position means nothing.
        """
        names, is_inside = ["order", "length"], self.cursor.in_epoch and not self.over
        if is_inside:
            self._refuse_other_parts(mine)
            names += ["drop_last"]
            # A position in a list of samples can be reached with any batch size; a stream is counted in batches.
            names += ["batch_size", "num_workers"] if self.order == "stream" else []
        for name in names:
            if getattr(self, name) != getattr(mine, name):
                raise CheckpointMismatch(
                    f"the saved loader has {name}={getattr(self, name)!r}, this one {getattr(mine, name)!r}: its "
                    f"position (epoch {self.cursor.epoch}, sample {self.cursor.samples}) means nothing here. "
                    "Give the loader the data it was saved with, or leave loader= out to begin with new data"
                )
        if is_inside:
            self._refuse_other_shares(mine)

    def _refuse_other_parts(self, mine: LoaderState) -> None:
        if self.parts == mine.parts:
            return
        before, now = (
            "was read whole by every rank"
            if parts is None
            else f"was read by {counted(parts, 'rank')}, each its own part"
            for parts in (self.parts, mine.parts)
        )
        raise CheckpointMismatch(
            f"the stream {before}, when this position (epoch {self.cursor.epoch}, batch {self.cursor.batches}) was "
            f"saved, and it {now} in this run. Which samples were used is known only where it is read in the same way. "
            "Resume so, or from a checkpoint at the end of an epoch, or leave loader= out to begin the epoch anew"
        )

    def _refuse_other_shares(self, mine: LoaderState) -> None:
        before, now = self._samples_by_rank(), mine._samples_by_rank()
        if before == now or self.shares is None:  # (an earlier version did not note them)
            return
        raise CheckpointMismatch(
            f"the ranks read {joined(before)} samples of each full batch from their own parts of the stream, by order "
            f"of rank, when this position (epoch {self.cursor.epoch}, batch {self.cursor.batches}) was saved, and "
            f"{joined(now)} in this run (shares={self.shares} before, shares={mine.shares} now). What was used "
            "of a part is counted in batches of one size: with another, some samples would come twice and others "
            "never. Resume with the shares of before, or from a checkpoint at the end of an epoch, or leave loader= "
            "out to begin the epoch anew"
        )

    def _samples_by_rank(self) -> list[int]:
        """Return how many samples of a full batch each rank reads of a stream in parts; empty for other loaders."""
        if self.parts is None or self.batch_size is None:
            return []
        shares = None if self.shares is None else tuple(self.shares)
        ranks, size = self.parts, self.batch_size
        cuts = (share_bounds(size, rank=rank, world_size=ranks, shares=shares) for rank in range(ranks))
        return [stop - start for start, stop in cuts]
