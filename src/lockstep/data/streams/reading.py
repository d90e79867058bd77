"""Read the samples of a stream, a batch at a time: by counting, or with a state that the stream keeps itself.

Note [States of streams]
~~~~~~~~~~~~~~~~~~~~~~~~
A stream that is interrupted has to be read again from its beginning, since its samples can only be counted. Some
datasets know a shorter way: ``state_dict()`` says where they are, and after ``load_state_dict()`` the next ``iter()``
begins there (the protocol of torchdata's StatefulDataLoader). Such states are kept with the position, one for each
worker process, since each reads with a dataset of its own.

They are not trusted: states that skip, repeat or forget samples are a frequent bug of libraries (a shuffle buffer that
begins empty, a second resume that begins anew: issues 7447, 7538 and 8308 of Hugging Face's datasets). So a worker
reads one batch ahead, and the position has a digest of the next batch beside the state, and how many batches and
samples were read. A resume loads the state into a copy of the dataset and reads the next batch; if that is another one,
or anything fails, the copy is dropped, the dataset is read from its beginning as one without a state, and this is said.
If counting leads to another batch as well, nobody knows which samples were used, and that is an error.

A worker that goes on by a state gives for each batch that it read before the interruption a mark without samples, so
that the workers' batches come in the turns in which they came before.

A ``state_dict`` that takes arguments (LitData's, MosaicML's) belongs to a loader of the same library, which alone knows
what to pass; such a stream is counted. So is one whose state is not made of JSON types, or can't be asked for.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from lockstep.data.contents import fingerprint
from lockstep.data.dead_workers import tells_of_a_death
from lockstep.data.mixing import mix
from lockstep.data.seeding import ALL_GENERATORS, StreamSeeds, seed_generators
from lockstep.data.streams import pipes
from lockstep.errors import CheckpointMismatch, named
from lockstep.job.workers import AtWork

#: The key for mix() of the numbers that are drawn where a stream is opened.
_OPEN_STREAM = 2**62 + 1


class StreamMark(NamedTuple):
    """How a worker goes on after a batch; see Note [States of streams]."""

    #: The number of the worker process; 0 where there is none.
    worker: int
    #: The batches and samples that it has read, these included.
    batches: int
    samples: int
    #: The state of its dataset, in JSON.
    state: str
    #: A digest of the samples of its next batch; None: there is none.
    following: str | None
    #: The generators that its samples were seen to draw from, a bit for each; see Note [Sample seeds].
    drawn: int = ALL_GENERATORS


class StreamBatch(NamedTuple):
    """The samples that were read for a batch."""

    #: Empty: they were used before the interruption, and not read again.
    samples: list[Any]
    #: The position of the first of them among those that this process reads.
    position: int
    #: The mark from which to go on after it; None: by counting.
    mark: StreamMark | None = None
    #: What the user must be told of how the stream is read.
    warning: str = ""


class Rule(Protocol):
    """How many samples make a batch, and from what they are seeded: a part of
    :class:`~lockstep.data.streams.dataset.StreamCut`."""

    @property
    def samples(self) -> int: ...

    def key_at(self, key: int, position: int) -> int: ...


class Samples:
    """Takes samples out of a stream, seeded; see Note [Sample seeds] in ``data/seeding.py``.

    Args:
        rule: how many at a time, and from what they are seeded.
        key: that of the epoch and the worker.
        epoch_key: that of the epoch, the same for all workers.
        seeded: whether each of them is; the first two always are.
        at_work: told which sample is read.
    """

    def __init__(self, rule: Rule, *, key: int, epoch_key: int, seeded: bool, at_work: AtWork | None) -> None:
        self._key, self._epoch_key, self._at_work = key, epoch_key, at_work
        #: The number of samples of a full batch.
        self.full = rule.samples
        # (The first sample may decide how a stream splits itself by rank, so ranks that read parts draw alike for it.)
        self._seeds = StreamSeeds(lambda position: rule.key_at(key, position), seeded=seeded)

    @property
    def drawn(self) -> int:
        """The generators that samples were seen to draw from since the dataset was opened, a bit for each."""
        return self._seeds.seen

    def open(self, dataset: Iterable[Any], *, drawn: int = 0) -> Iterator[Any]:
        """Begin to read a dataset.

        Args:
            dataset: the dataset, at its beginning or in a state.
            drawn: the generators that the samples before that state were seen to draw from, a bit for each.
        """
        self._seeds.begin(drawn)
        seed_generators(mix(self._key, _OPEN_STREAM))
        pipes.set_up(dataset, seed=mix(self._epoch_key, _OPEN_STREAM))
        return iter(dataset)

    def take(self, stream: Iterator[Any], position: int) -> list[Any]:
        """Return the samples of the next batch, fewer at the end of the stream.

        Args:
            stream: what :meth:`open` returned.
            position: that of the first of them.
        """
        if self._at_work is not None:
            stream = _noting(stream, position, self._at_work)
        return self._seeds.take(stream, position, self.full)


def _noting(stream: Iterator[Any], position: int, at_work: AtWork) -> Iterator[Any]:
    while True:
        at_work.note(position)
        try:
            sample = next(stream)
        except StopIteration:
            return
        yield sample
        position += 1


def has_state(dataset: object) -> bool:
    """Return whether a dataset tells its state, and takes one, without further arguments."""
    try:
        inspect.signature(dataset.state_dict).bind()  # type: ignore[attr-defined]  # (if it has none: not stateful)
        inspect.signature(dataset.load_state_dict).bind({})  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return False
    return True


def read_by_counting(samples: Samples, dataset: Iterable[Any]) -> Iterator[StreamBatch]:
    """Yield the batches of a stream from its beginning."""
    stream, position, short = samples.open(dataset), 0, False
    while not short:
        taken = samples.take(stream, position)
        short = len(taken) < samples.full
        if taken:
            yield StreamBatch(taken, position)
        position += len(taken)


class StatefulReading:
    """Reads a dataset that has a state; see Note [States of streams].

    Args:
        samples: what takes its samples.
        dataset: the dataset, which stays in the state in which it is unless it changes by being read.
        worker: the number of this worker process.
        mark: where to go on; None: at the beginning.
    """

    def __init__(self, samples: Samples, dataset: Any, *, worker: int, mark: StreamMark | None) -> None:
        self._samples, self._dataset, self._worker = samples, dataset, worker
        self._mark = mark
        self._warning, self._keeps_states = "", True

    def batches(self) -> Iterator[StreamBatch]:
        """Yield the batches of the epoch; of those that were used, if the state leads past them, marks alone.

        Raises:
            CheckpointMismatch: the state leads to other samples than before the interruption, and so does counting.
        """
        mark, counted = self._mark, StreamMark(self._worker, 0, 0, "", None)
        found = None if mark is None or mark.following is None else self._continued(mark)
        if found is not None and mark is not None:
            for _ in range(mark.batches):
                yield StreamBatch([], 0)
            counted, mark = mark, None
            self._dataset, stream, taken = found
        else:
            stream = self._samples.open(self._dataset)
            taken = self._samples.take(stream, 0)
        while taken:
            position, end = counted.samples, counted.samples + len(taken)
            state, drawn = self._state(), self._samples.drawn
            following = self._samples.take(stream, end) if len(taken) == self._samples.full else []
            counted = StreamMark(
                self._worker,
                counted.batches + 1,
                end,
                state or "",
                fingerprint(following) if following else None,
                drawn,
            )
            if mark is not None and counted.batches == mark.batches:
                self._compare(counted, mark)
            yield StreamBatch(taken, position, None if state is None else counted, self._warning)
            self._warning, taken = "", following

    def _continued(self, mark: StreamMark) -> tuple[Any, Iterator[Any], list[Any]] | None:
        """Return a copy of the dataset in the state of ``mark``, how it is read, and its next batch; None: the state
        does not lead to that, of which the user is warned."""
        if mark.following:
            found, why = self._by_state(mark)
        else:
            found, why = None, "leads to objects that can't be compared with the samples that came next"
        if found is None:
            self._warning = (
                f"the saved state of {type(self._dataset).__name__} {why}, so it is not used: the stream is read from "
                f"the beginning of the epoch, and {mark.samples} samples are passed over"
            )
        return found

    def _by_state(self, mark: StreamMark) -> tuple[tuple[Any, Iterator[Any], list[Any]] | None, str]:
        """Do as :meth:`_continued`, and return the reason instead of warning."""
        try:
            dataset = copy.deepcopy(self._dataset)
            dataset.load_state_dict(json.loads(mark.state))
            stream = self._samples.open(dataset, drawn=mark.drawn)
            taken = self._samples.take(stream, mark.samples)
        except Exception as error:  # (whatever a state leads to: there is another way, and it is said)
            if tells_of_a_death(error):
                raise
            return None, f"could not be used ({named(error)})"
        if taken and fingerprint(taken) == mark.following:
            return (dataset, stream, taken), ""
        return None, "led to other samples than came next before the interruption"

    def _compare(self, counted: StreamMark, mark: StreamMark) -> None:
        if (counted.samples, counted.following) == (mark.samples, mark.following):
            return
        raise CheckpointMismatch(
            f"{type(self._dataset).__name__} gave other samples than before the interruption, by its saved state and "
            f"also from the beginning of the epoch, so the {mark.samples} samples already used are not known. Give it "
            "the files and the seed with which it was saved, and let it draw from generators that are seeded for each "
            "epoch, or leave loader= out to begin the epoch anew"
        )

    def _state(self) -> str | None:
        """Return the state of the dataset now; None: it can't be kept, of which the user is warned once."""
        if not self._keeps_states:
            return None
        try:
            return json.dumps(self._dataset.state_dict())
        except Exception as error:  # (training needs no state: it goes on without, and that is said)
            if tells_of_a_death(error):
                raise
            self._keeps_states = False
            self._warning = (
                f"the state_dict() of {type(self._dataset).__name__} failed, or is not made of JSON types "
                f"({named(error)}), so that it is kept no longer with the loader's position: a resume reads the stream "
                "again from where it was kept last, or from the beginning of the epoch"
            )
            return None
