"""The end of a round: one average over all ranks, compressed, of which every rank decodes the same bytes.

Note [The end of a round]
~~~~~~~~~~~~~~~~~~~~~~~~~
Four things happen, and each needs the result of the one before:

1. Every rank sends all others its :class:`Standing`. Nothing is averaged if they do not fit together, and no values are
   sent if no rank has trained on samples.
2. The values are cut into as many chunks as there are ranks. Each rank sends each chunk, compressed, to the rank that
   owns it.
3. The owner decodes the chunks received, adds them up in the order of the ranks, divides by the number of ranks that
   have trained on samples, and compresses the average.
4. The owner sends that to all, and all decode the same bytes, the owner too.

So the traffic of a rank does not grow with their number: twice the compressed values, less its own chunk. An all-gather
of all values would be simpler, and with 8 ranks four times as much. And the average is the same on all ranks, bit for
bit, whatever the backend does.

Each of the three messages may be under way while the rank trains: :meth:`OuterExchange.advance` sends the next if the
last is complete. No thread is involved, and the messages go through a separate process group, so that they do not
meet the program's own messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.exchange import issue_gather
from lockstep.comm.labels import labelled
from lockstep.comm.waiting import wait_for
from lockstep.ddp.compression import BLOCK, Compression, decode, encode
from lockstep.errors import CollectiveMismatch, NonFiniteGradient, ReplicaMismatch
from lockstep.text import counted

#: Sends a message and returns the work to wait for.
_Send = Callable[[], Any]


class Standing(NamedTuple):
    """The state of a rank at the end of a round."""

    #: Number of rounds before this one.
    round: int
    #: Number of steps that the rank has taken in this round.
    steps: int
    #: 1 if any of these steps had samples, so that the rank's values count; else 0.
    counts: int
    #: 1 if the rank takes no further step before all ranks have ended their rounds, else 0.
    final: int
    #: The position of the first parameter that is not finite; -1 if all are.
    bad: int
    #: A sum over the bits of the parameters that all ranks had at the beginning of the round.
    anchors: int
    #: A digest of which parameters are trained.
    trained: int


class RoundOutcome(NamedTuple):
    """The result of a round."""

    #: The ranks' standings, by rank.
    standings: tuple[Standing, ...]
    #: The average, float32 [values], the same bits on all ranks; None if no rank has trained on samples.
    average: Tensor | None
    #: This rank's error to send next, float32 [padded values]; see Note [Error feedback] in ``compression.py``.
    error: Tensor

    @property
    def is_final(self) -> bool:
        """Return whether no rank takes a further step before all have ended the round."""
        return all(standing.final for standing in self.standings)

    @property
    def has_steps(self) -> bool:
        """Return whether any rank has taken a step, if only without samples."""
        return any(standing.steps for standing in self.standings)

    @property
    def is_even(self) -> bool:
        """Return whether all ranks have taken the same number of steps."""
        return len({standing.steps for standing in self.standings}) == 1


class OuterExchange:
    """Averages values over the ranks; see Note [The end of a round].

    Args:
        group: the ranks.
        device: the device of the tensors that ``group`` sends.
        length: the number of values.
        compression: the encoding of the values on their way.
        names: the parameters' names, for errors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        length: int,
        compression: Compression | None,
        names: Sequence[str],
    ) -> None:
        self._group, self._device, self._compression, self._names = group, device, compression, list(names)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._length = length
        self._chunk = max(1, -(-length // (self._world_size * BLOCK))) * BLOCK
        #: The rounding error that this rank has not sent yet.
        self.error = self.zeros()
        #: Number of bytes that this rank has sent to others.
        self.sent = 0
        self._stages: Generator[_Send, None, RoundOutcome] | None = None
        self._work: Any = None
        self._outcome: RoundOutcome | None = None
        self._round = 0

    def zeros(self) -> Tensor:
        """Return zeros for the values of this rank: float32, padded so that all chunks are equal."""
        return torch.zeros(self._chunk * self._world_size, device=self._device)

    def begin(self, values: Tensor, standing: Standing) -> None:
        """**Collective.** Send the first message.

        Args:
            values: as :meth:`zeros`, filled; with :attr:`error` added. Kept until the outcome is known.
            standing: this rank's standing.
        """
        self._outcome, self._round = None, standing.round
        self._stages = self._run(values, standing)
        self._send_next()

    def advance(self) -> None:
        """Send the next message if the one before has arrived; wait for nothing."""
        while self._work is not None and self._work.is_completed():
            self._wait()

    def finish(self) -> RoundOutcome:
        """Wait for the outcome.

        Raises:
            CollectiveMismatch, ReplicaMismatch, NonFiniteGradient: on all ranks, if they do not fit together.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        while self._work is not None:
            self._wait()
        assert self._outcome is not None, "nothing has begun"
        outcome, self._outcome = self._outcome, None
        self.error = outcome.error
        return outcome

    @property
    def is_under_way(self) -> bool:
        """Return whether a round has begun whose outcome nobody has taken, and that has not failed."""
        return self._work is not None or self._outcome is not None

    def discard(self) -> None:
        """Complete what is under way for the sake of the other ranks, whatever comes of it.

        Raises:
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        # (What is found in it is of a state that is replaced now, on all ranks.)
        with suppress(CollectiveMismatch, ReplicaMismatch, NonFiniteGradient):
            while self._work is not None:
                self._wait()
        self._outcome = None

    def _wait(self) -> None:
        work, self._work = self._work, None
        wait_for(work.wait, self._what, name="ending a round of local steps")
        self._send_next()

    def _send_next(self) -> None:
        assert self._stages is not None, "nothing has begun"
        stages, self._stages = self._stages, None
        try:
            send = next(stages)
        except StopIteration as end:
            self._outcome = end.value
            return
        self._stages = stages
        works: list[Any] = []
        with labelled("the end of a round of local steps"):
            # A backend that works in this rank's own time waits here, and reports that by itself.
            wait_for(lambda: works.append(send()), self._what, name=None)
        self._work = works[0]

    def _what(self) -> str:
        return f"rank {self._rank} of {self._world_size}: ending round {self._round + 1} of local steps"

    @torch.no_grad()
    def _run(self, values: Tensor, standing: Standing) -> Generator[_Send, None, RoundOutcome]:
        count, group = self._world_size, self._group
        mine = torch.tensor(standing, dtype=torch.int64, device=self._device)
        told = torch.empty(count, len(standing), dtype=torch.int64, device=self._device)
        self.sent += (count - 1) * mine.nbytes
        yield lambda: issue_gather(told, mine, group)
        standings = tuple(Standing(*row) for row in told.tolist())
        self._refuse(standings)
        trained = sum(standing.counts for standing in standings)
        if not trained:
            return RoundOutcome(standings, None, self.error)

        rows = values.view(count, self._chunk)
        sending = encode(rows, self._compression)
        error = rows - decode(sending, self._compression)
        received = torch.empty_like(sending)
        self.sent += (count - 1) * sending[0].nbytes
        yield lambda: dist.all_to_all_single(received, sending, group=group, async_op=True)
        total = decode(received[:1], self._compression)
        for rank in range(1, count):
            total += decode(received[rank : rank + 1], self._compression)
        total /= trained

        average = encode(total, self._compression)
        error[self._rank] += (total - decode(average, self._compression))[0] * trained
        gathered = torch.empty_like(sending)
        self.sent += (count - 1) * average.nbytes
        yield lambda: issue_gather(gathered, average[0], group)
        decoded = decode(gathered, self._compression).view(-1)[: self._length]
        return RoundOutcome(standings, decoded, error.view(-1))

    def _refuse(self, standings: Sequence[Standing]) -> None:
        """Raise on every rank if the ranks do not fit together; nothing has been averaged then."""
        for kind, error, words in (
            ("round", CollectiveMismatch, "the ranks end different rounds, counted from 0"),
            ("trained", ReplicaMismatch, "the ranks train different parameters (requires_grad); digests"),
            (
                "anchors",
                ReplicaMismatch,
                "the parameters that the ranks had in common at the beginning of the round differ. If weights were "
                "loaded after replicate, load the same on every rank; sums over their bits",
            ),
        ):
            values = [getattr(standing, kind) for standing in standings]
            if len(set(values)) > 1:
                told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
                raise error(f"{self._what()}: {words}: {told}. Nothing was averaged")
        for rank, standing in enumerate(standings):
            if standing.bad >= 0:
                raise NonFiniteGradient(
                    f"{self._what()}: after {counted(standing.steps, 'step')} of this round the parameter "
                    f"'{self._names[standing.bad]}' of rank {rank} is infinite or NaN, and an average would spread "
                    "that to all ranks. Resume from the last checkpoint with a smaller learning rate, or clip gradients"
                )
