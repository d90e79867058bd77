"""Rounds: all ranks write, all hand over, all read. Every collective is a sequence of rounds.

Note [Rounds]
~~~~~~~~~~~~~
In round k each rank

1. writes what the others need into its own stage number ``k % 3`` (never into another rank's),
2. posts one token to every other rank, and takes one token from every other rank,
3. reads the others' stages of this round.

The tokens make step 3 see step 1 of every rank (Note [Memory ordering] in semaphore.py).

*Reuse.* A rank writes stage ``k % 3`` again in round k + 3. It has then taken every rank's token of round k + 2, which
a rank posts after its step 3 of round k + 1, and so after its step 3 of round k. No rank reads the stage any more. With
two rounds of distance a collective may also read the stage of round k until it posts round k + 2: the pipelined
all-reduce reads the reduced chunk k after the tokens of round k + 1. Two stages would not allow that; three do.

*No lost or extra token.* Before the first round's data is used the ranks compare fingerprints, so they agree on the
collective and hence on its number of rounds. A rank that finds a difference ends the group (health.py), and no token
counts afterwards.

*Waiting.* A rank first polls for a few microseconds, then offers its core to others for a while, then sleeps in the
kernel, and looks every NAP seconds whether a rank died or reported an error. So a rank that waits long takes hardly
any CPU time, and a dead rank is noticed within a nap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Container
from operator import itemgetter

import torch

from lockstep import machine
from lockstep.comm.group import fingerprint
from lockstep.comm.group.fingerprint import HEADER
from lockstep.comm.shm import semaphore
from lockstep.comm.shm.health import Health
from lockstep.comm.shm.layout import BUFFERS, Layout
from lockstep.comm.shm.segment import Segment
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.job import flight
from lockstep.job.patience import Patience

#: Seconds between two looks at the health of the group while a rank sleeps.
NAP = 0.05
#: Polls before a rank offers its core, where every rank can have a core of its own (about 20 microseconds) ...
_POLLS = 40
#: ... and seconds for which it keeps offering it before it sleeps; the longer ones where ranks share cores.
_YIELDING = 300e-6
_YIELDING_CROWDED = 2e-3

#: Bytes (of all ranks together) that each rank combines for itself, in one round. Below torch's grain for threads, so
#: that every rank runs one and the same loop over the elements and gets the same bits.
DIRECT_BYTES = 64 * 1024
#: The most sizes of small tensors for which views are kept, since the same few come again.
_KEPT = 256

#: Buffer -> rank -> tensor.
_Views = list[list[torch.Tensor]]


class Small:
    """The views that a rank needs to combine a small tensor by itself, kept from call to call."""

    def __init__(self, views: _Views, rank: int) -> None:
        #: Buffer -> rank -> the elements in the stage.
        self.views = views
        #: Buffer -> address of this rank's own stage.
        self.own = [stages[rank].data_ptr() for stages in views]
        #: Memory of this process for the result.
        with torch.inference_mode(False):  # else it could be written in inference mode only
            self.result = torch.empty_like(views[0][rank])
        self.result_address = self.result.data_ptr()
        self.nbytes = self.result.nbytes


_first = itemgetter(0)


class Rounds:
    """The rounds of one group, seen from one rank. Used by one thread at a time (group/work.py)."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, health: Health) -> None:
        self.rank = rank
        self.size = layout.world_size
        #: The size of one stage, in bytes.
        self.chunk = layout.chunk
        self._segment = segment
        self._layout = layout
        self._health = health
        others = [peer for peer in range(self.size) if peer != rank]
        self._posts = [segment.address + layout.token(rank, peer) for peer in others]
        self._waits = [(peer, segment.address + layout.token(peer, rank)) for peer in others]
        #: Buffer -> rank -> header; then the same for the part of it that must be equal on all ranks.
        self._headers = [[self._header(peer, buffer) for peer in range(self.size)] for buffer in range(BUFFERS)]
        self._keys = [[header[: fingerprint.KEY].cast("Q") for header in headers] for headers in self._headers]
        self._round = 0
        #: The number of the current round's stage.
        self.buffer = 0
        self._sequence = 0
        self._stages: dict[torch.dtype, _Views] = {}
        self._small: dict[tuple[torch.dtype, int], Small | None] = {}
        # These four are of the collective that runs.
        self._current = memoryview(b"")  # its header
        self._key = memoryview(b"")
        self._fresh = False  # its fingerprint has not been compared yet
        self._timeout = 0.0
        crowded = self.size > machine.cores_of_all_ranks()
        self._polls = 1 if crowded else _POLLS
        self._yielding = _YIELDING_CROWDED if crowded else _YIELDING

    def begin(self, body: bytes, *, timeout: float) -> None:
        """Start the group's next collective; its fingerprint goes out with the first :meth:`sync`.

        Args:
            body: from :func:`fingerprint.take`.
            timeout: seconds each round may wait.
        """
        self._sequence += 1
        self._timeout = timeout
        self._fresh = True
        header = self._current = self._headers[self.buffer][self.rank]
        self._key = self._keys[self.buffer][self.rank]
        header[:8] = self._sequence.to_bytes(8, "little")
        header[8:] = body

    def renew(self) -> None:
        """Begin with the first collective again; see :meth:`Engine.renew`."""
        for _, token in self._waits:
            semaphore.drain(token)
        self._round = self.buffer = self._sequence = 0

    def allow(self, timeout: float) -> None:
        """Change how many seconds each round of the collective under way may wait from now on."""
        self._timeout = timeout

    @property
    def number(self) -> int:
        """The number of the collective that was begun last, from 1."""
        return self._sequence

    @property
    def header(self) -> bytes:
        """This rank's fingerprint of the collective under way."""
        return bytes(self._current)

    def stages(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the stages of the current round, by rank: 1-d tensors of ``dtype`` that cover ``chunk`` bytes."""
        views = self._stages.get(dtype)
        if views is None:
            views = self._stages[dtype] = [self._view(buffer, dtype) for buffer in range(BUFFERS)]
        return views[self.buffer]

    def small(self, dtype: torch.dtype, count: int) -> Small | None:
        """Return the views to combine ``count`` elements in one round, or None if they are too many."""
        try:
            return self._small[dtype, count]
        except KeyError:
            pass
        if len(self._small) >= _KEPT:
            self._small.clear()
        small: Small | None = None
        if count * dtype.itemsize * self.size <= DIRECT_BYTES and count <= self.capacity(dtype):
            self.stages(dtype)
            small = Small([[stage[:count] for stage in stages] for stages in self._stages[dtype]], self.rank)
        self._small[dtype, count] = small
        return small

    def capacity(self, dtype: torch.dtype) -> int:
        """Return how many elements of ``dtype`` fit into one stage."""
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
            if trywait(token) != 0 and not self._poll(token):
                self._sleep(self._waits[index:])
                break
        if self._fresh:
            self._compare(range(self.size))
            self._fresh = False
        self._round += 1
        self.buffer = self._round % BUFFERS

    def sync_with(self, flag: bool) -> bool:
        """**Collective.** Do as :meth:`sync`, and return whether ``flag`` is True on any rank.

        The flag travels in the header of this round's stage, so a collective's first round, which has the fingerprint
        there, can't carry it.
        """
        headers = self._headers[self.buffer]
        headers[self.rank][0] = int(flag)
        self.sync()
        return 1 in map(_first, headers)

    def _header(self, rank: int, buffer: int) -> memoryview:
        offset = self._layout.header(rank, buffer)
        return self._segment.view[offset : offset + HEADER]

    def _view(self, buffer: int, dtype: torch.dtype) -> list[torch.Tensor]:
        offsets = [self._layout.stage(peer, buffer) for peer in range(self.size)]
        with torch.inference_mode(False):  # else it could be written in inference mode only
            return [self._segment.bytes[offset : offset + self.chunk].view(dtype) for offset in offsets]

    # --- waiting ---------------------------------------------------------------------------------------------------

    def _poll(self, token: int) -> bool:
        """Wait for a short while without sleeping; return True if the token came."""
        trywait = semaphore.trywait
        for _ in range(self._polls):
            if trywait(token) == 0:
                return True
        # From here on the rank's page says that it waits: where ranks share cores, this may be a good part of a wait.
        with flight.waiting(""):
            limit = time.monotonic() + self._yielding
            while time.monotonic() < limit:
                os.sched_yield()
                if trywait(token) == 0:
                    return True
        return False

    def _sleep(self, pending: list[tuple[int, int]]) -> None:
        """Take the tokens that are not there yet, and sleep until they come."""
        begun, patience = time.monotonic(), Patience()
        what = fingerprint.describe(self._current)
        with flight.waiting(what):
            while pending:
                self._health.check()
                if semaphore.wait(pending[0][1], min(NAP, max(0.0, self._timeout - (time.monotonic() - begun)))):
                    pending = pending[1:]
                    continue
                self._look(pending, what)
                pending = [each for each in pending if semaphore.trywait(each[1]) != 0]
                now = time.monotonic()
                begun += patience.excused(now)
                over = now - begun >= self._timeout or (self._fresh and self._health.asked())
                if pending and over:
                    raise self._health.late(what, self._timeout, [peer for peer, _ in pending])

    def _look(self, pending: list[tuple[int, int]], what: str) -> None:
        """Look, after a nap without a token, whether the group has failed, or a rank died, left or is elsewhere."""
        self._health.check()
        missing = {peer for peer, _ in pending}
        gone, left = self._health.gone() & missing, self._health.left() & missing
        if gone or left:
            # What they posted before they went is there by now: look once more.
            still = {peer for peer, token in pending if semaphore.trywait(token) != 0 or self._put_back(token)}
            away = sorted((gone | left) & still)
            if away:
                raise self._health.lost(what, away, ended=bool(gone & still))
        if self._fresh:
            self._compare({peer for peer in range(self.size) if peer not in missing})

    @staticmethod
    def _put_back(token: int) -> bool:
        """Undo a successful trywait of a token that the caller will take later. Returns False."""
        semaphore.post(token)
        return False

    # --- errors ----------------------------------------------------------------------------------------------------

    def disagree(self, what: str) -> LockstepError:
        """End the group because the ranks' arguments do not fit together; returns what to raise."""
        said = f"{self._health.name} in {fingerprint.describe(self._current)}: {what}; nothing was moved"
        return self._health.end(CollectiveMismatch(said))

    def _compare(self, arrived: Container[int]) -> None:
        """Compare the fingerprints of the ranks whose tokens were taken with this rank's."""
        key = self._key
        for peer, theirs in enumerate(self._keys[self.buffer]):
            if theirs != key and peer in arrived:
                raise self._health.end(CollectiveMismatch(self._mismatch(arrived)))

    def _mismatch(self, arrived: Container[int]) -> str:
        lines = [
            f"  {self._health.names([rank])}: {fingerprint.describe(header)}\n"
            for rank, header in enumerate(self._headers[self.buffer])
            if rank in arrived or rank == self.rank
        ]
        return (
            f"{self._health.name}: the ranks are in different collectives, or in one with different arguments; "
            f"nothing was moved:\n{''.join(lines)}"
            "Every rank must issue the same collectives in the same order, with tensors of equal size and dtype."
        )
