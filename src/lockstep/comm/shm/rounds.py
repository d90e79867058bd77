"""Rounds: all ranks write, all hand over, all read. Every collective is a sequence of rounds.

Note [Rounds]
~~~~~~~~~~~~~
In round k each rank

1. writes what the others need into its own stage number ``k % 3`` (nobody else's),
2. posts one token to every other rank, and takes one token from every other rank,
3. reads the others' stages of this round.

The tokens make step 3 see step 1 of every rank (Note [Memory ordering] in semaphore.py).

*Reuse.* A rank writes stage ``k % 3`` again in round k + 3. It has then taken every rank's token of round k + 2, which
a rank posts after its step 3 of round k + 1, and so after its step 3 of round k. Nobody reads the stage any more. With
two rounds of distance a collective may also read the stage of round k until it posts round k + 2: the pipelined
all-reduce reads the reduced chunk k after the tokens of round k + 1. Two stages would not allow that; three do.

*No lost or extra token.* Before the first round's data is used the ranks compare fingerprints, so they agree on the
collective and hence on its number of rounds. A rank that finds a difference ends the group (failure.py), and no token
counts afterwards.

*Waiting.* A rank first polls for a few microseconds, then offers its core to others for a while, then sleeps in the
kernel, and looks every SLICE seconds whether a rank died or reported an error. So a rank that waits long takes no CPU
time to speak of, and a dead rank is noticed within a slice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container

import torch

from lockstep import machine
from lockstep.comm.shm import fingerprint, messages, semaphore
from lockstep.comm.shm.failure import Failure, again
from lockstep.comm.shm.layout import BUFFERS, HEADER, Layout
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.standing import Standing
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import files, flight

#: Seconds between two looks at the health of the group while a rank sleeps.
SLICE = 0.05
#: Polls before a rank offers its core, where every rank can have a core of its own (about 20 microseconds) ...
_POLLS = 40
#: ... and seconds it goes on offering it before it sleeps.
_YIELDING = 300e-6
_YIELDING_CROWDED = 2e-3

#: Tensors by buffer, then by rank.
_Views = list[list[torch.Tensor]]


class Rounds:
    """The rounds of one group, seen from one rank. Used by one thread at a time (executor.py)."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, peers: Peers, failure: Failure) -> None:
        self.rank = rank
        self.size = layout.world_size
        #: Bytes of one stage.
        self.chunk = layout.chunk
        self.peers = peers
        self._segment = segment
        self._layout = layout
        self._failure = failure
        self._standing = Standing(segment, layout, rank=rank, peers=peers)
        others = [peer for peer in range(self.size) if peer != rank]
        self._posts = [segment.address + layout.token(rank, peer) for peer in others]
        self._waits = [(peer, segment.address + layout.token(peer, rank)) for peer in others]
        self._headers = [
            [(peer, layout.header(peer, buffer)) for peer in range(self.size)] for buffer in range(BUFFERS)
        ]
        self._round = 0
        self._buffer = 0
        self._sequence = 0
        self._stages: dict[torch.dtype, _Views] = {}
        self._slices: dict[tuple[torch.dtype, int], _Views] = {}
        # Of the collective that runs.
        self._current = b""
        self._fresh = False  # its fingerprint has not been compared yet
        self._timeout = 0.0
        crowded = self.size > machine.cores()
        self._polls = 1 if crowded else _POLLS
        self._yielding = _YIELDING_CROWDED if crowded else _YIELDING

    def begin(self, body: bytes, *, timeout: float) -> None:
        """**Local.** Start the group's next collective; its fingerprint goes out with the first :meth:`sync`.

        Args:
            body: from :func:`fingerprint.take`.
            timeout: seconds each round may wait.
        """
        self._sequence += 1
        self._timeout = timeout
        header = self._current = self._sequence.to_bytes(8, "little") + body
        self._fresh = True
        offset = self._headers[self._buffer][self.rank][1]
        self._segment.view[offset : offset + HEADER] = header

    def stages(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The stages of the current round, by rank: 1-d tensors of ``dtype`` that cover ``chunk`` bytes."""
        views = self._stages.get(dtype)
        if views is None:
            views = self._stages[dtype] = [self._view(buffer, dtype) for buffer in range(BUFFERS)]
        return views[self._buffer]

    def slices(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """The first ``count`` elements of the current round's stages, by rank. Kept, since small sizes come again."""
        views = self._slices.get((dtype, count))
        if views is None:
            if len(self._slices) >= 64:
                self._slices.clear()
            self.stages(dtype)
            views = [[stage[:count] for stage in self._stages[dtype][buffer]] for buffer in range(BUFFERS)]
            self._slices[dtype, count] = views
        return views[self._buffer]

    def capacity(self, dtype: torch.dtype) -> int:
        """Elements of ``dtype`` in one stage."""
        return self.chunk // dtype.itemsize

    def sync(self) -> None:
        """**Collective.** End the writing of this round and begin its reading: returns when every rank has posted.

        After it the next round's stage is current; hold on to what :meth:`stages` returned before.

        Raises:
            CollectiveMismatch, CollectiveTimeout, PeerLost: the group has ended; see the message.
        """
        for token in self._posts:
            semaphore.post(token)
        trywait = semaphore.trywait
        for index, (_, token) in enumerate(self._waits):
            if trywait(token) != 0:
                self._wait(index)
                break
        if self._fresh:
            self._compare(range(self.size))
            self._fresh = False
        self._round += 1
        self._buffer = self._round % BUFFERS

    def disagree(self, what: str) -> LockstepError:
        """**Local.** End the group because the ranks' arguments do not fit together; returns what to raise."""
        return self._end(CollectiveMismatch(messages.disagreement(self.rank, self._current, what)))

    def _view(self, buffer: int, dtype: torch.dtype) -> list[torch.Tensor]:
        offsets = [self._layout.stage(peer, buffer) for peer in range(self.size)]
        return [self._segment.bytes[offset : offset + self.chunk].view(dtype) for offset in offsets]

    # --- waiting ---------------------------------------------------------------------------------------------------

    def _wait(self, index: int) -> None:
        """Take the tokens that are not there yet: all from ``index`` on."""
        pending = self._poll(self._waits[index:])
        if pending:
            with flight.waiting(fingerprint.describe(self._current)):
                self._sleep(pending)

    def _sleep(self, pending: list[tuple[int, int]]) -> None:
        begun = time.monotonic()
        while pending:
            error = self._failure.known()
            if error is not None:
                raise again(error)
            if semaphore.wait(pending[0][1], min(SLICE, max(0.0, self._timeout - (time.monotonic() - begun)))):
                pending = pending[1:]
                continue
            self._look(pending)
            pending = [each for each in pending if semaphore.trywait(each[1]) != 0]
            if pending and time.monotonic() - begun >= self._timeout:
                raise self._end(CollectiveTimeout(self._late(pending)))

    def _poll(self, pending: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Without sleeping: what is still missing after a short while."""
        trywait = semaphore.trywait
        for _ in range(self._polls):
            pending = [each for each in pending if trywait(each[1]) != 0]
            if not pending:
                return pending
        limit = time.monotonic() + self._yielding
        while time.monotonic() < limit:
            os.sched_yield()
            pending = [each for each in pending if trywait(each[1]) != 0]
            if not pending:
                break
        return pending

    def _look(self, pending: list[tuple[int, int]]) -> None:
        """A slice has passed without a token: has the group failed, a rank died, or left, or come to another place?"""
        error = self._failure.known()
        if error is not None:
            raise again(error)
        missing = {peer for peer, _ in pending}
        gone = [peer for peer in self.peers.gone() if peer in missing]
        left = [peer for peer in missing if self._segment.view[self._layout.presence(peer)]]
        if gone or left:
            # What they posted before they went is there by now: look once more.
            still = {peer for peer, token in pending if semaphore.trywait(token) != 0 or self._put_back(token)}
            gone, left = [p for p in gone if p in still], [p for p in left if p in still and p not in gone]
            if gone or left:
                raise self._end(PeerLost(self._lost(gone, left)))
        if self._fresh:
            self._compare({peer for peer in range(self.size) if peer not in missing})

    @staticmethod
    def _put_back(token: int) -> bool:
        """Undo a successful trywait of a token that the caller will take later. Returns False."""
        semaphore.post(token)
        return False

    # --- errors ----------------------------------------------------------------------------------------------------

    def _compare(self, arrived: Container[int]) -> None:
        """Compare the fingerprints of the ranks whose tokens were taken with this rank's."""
        key = self._current[: fingerprint.KEY]
        view = self._segment.view
        for peer, offset in self._headers[self._buffer]:
            if view[offset : offset + fingerprint.KEY] != key and peer in arrived:
                ranks = [rank for rank in range(self.size) if rank in arrived or rank == self.rank]
                raise self._end(CollectiveMismatch(messages.mismatch(self.rank, {r: self._seen(r) for r in ranks})))

    def _late(self, pending: list[tuple[int, int]]) -> str:
        late = [peer for peer, _ in pending]
        others = [peer for peer, _ in self._waits if peer not in late]
        where = self._standing.describe([*late, *others])
        said = messages.late(self.rank, fingerprint.describe(self._current), self._timeout, late, where)
        return said + files.told()

    def _lost(self, gone: list[int], left: list[int]) -> str:
        where = self._standing.describe([*gone, *left])
        return messages.lost(self.rank, fingerprint.describe(self._current), gone, left, where)

    def _seen(self, rank: int) -> bytes:
        """The header of this round."""
        offset = self._headers[self._buffer][rank][1]
        return bytes(self._segment.view[offset : offset + HEADER])

    def _end(self, error: LockstepError) -> LockstepError:
        """Report ``error`` and return what to raise: the first error that any rank reported."""
        return again(self._failure.report(error))
