"""Where everything lies in a group's shared segment: offsets and sizes, computed without any memory.

::

    identity        nonce, world size, chunk size                         one page
    failure         claim, one notice per rank, kind, text                one page and a bit
    presence        one word per rank: 0 = in the group, 1 = left it
    tokens          world_size x world_size semaphores: [from][to]
    mail            world_size x world_size x 2 semaphores: [from][to] full and free; one wake-up per rank
    headers         world_size x BUFFERS fingerprints
    last_waits      world_size texts: the last send or receive that the rank waited in
    stages          world_size x BUFFERS x chunk bytes                    for collectives
    boxes           world_size x world_size x MAIL_SLOTS x mail bytes     for send and recv

The segment is sparse: a page takes memory when it is first written. A rank that only all-reduces small tensors uses a
few pages; one that all-reduces large ones uses its stages (``BUFFERS * chunk`` bytes); boxes cost memory only
between pairs that send to each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from lockstep.comm.group.fingerprint import HEADER

PAGE = 4096
#: A POSIX semaphore takes 32 bytes on every 64-bit Linux; a cache line of its own keeps neighbours from slowing it.
SEMAPHORE = 64
#: Stages per rank. See Note [Rounds] in rounds.py for why three.
BUFFERS = 3
#: Bytes of the text of the error that has ended the group.
FAILURE_TEXT = 8192
#: Fragments that the box of an ordered pair of ranks holds, and bytes before each one's content.
MAIL_SLOTS = 2
MAIL_HEADER = 256

#: Every dtype's item size divides the chunk, so that views of any dtype cover it.
CHUNK_QUANTUM = 64


@dataclass(frozen=True)
class Layout:
    """Offsets in the segment of a group of ``world_size`` ranks with stages of ``chunk`` bytes."""

    world_size: int
    chunk: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size}: expected at least 1")
        if self.chunk < CHUNK_QUANTUM * self.world_size or self.chunk % CHUNK_QUANTUM:
            raise ValueError(
                f"chunk={self.chunk}: expected a multiple of {CHUNK_QUANTUM}, "
                f"at least {CHUNK_QUANTUM} per rank ({CHUNK_QUANTUM * self.world_size})"
            )

    # The offsets follow one another in the order of the picture above.

    @property
    def identity(self) -> int:
        return 0

    @property
    def failure(self) -> int:
        return PAGE

    @property
    def failure_claim(self) -> int:
        return self.failure

    def failure_notice(self, rank: int) -> int:
        return self.failure + SEMAPHORE * (1 + rank)

    @property
    def failure_record(self) -> int:
        return self.failure + SEMAPHORE * (1 + self.world_size)

    @property
    def _presence(self) -> int:
        return _page(self.failure_record + 16 + FAILURE_TEXT)

    def presence(self, rank: int) -> int:
        return self._presence + 64 * rank

    @property
    def _tokens(self) -> int:
        return _page(self._presence + 64 * self.world_size)

    def token(self, source: int, destination: int) -> int:
        return self._tokens + SEMAPHORE * (source * self.world_size + destination)

    @property
    def _mail(self) -> int:
        return _page(self._tokens + SEMAPHORE * self.world_size**2)

    def mail_full(self, source: int, destination: int) -> int:
        return self._mail + SEMAPHORE * 2 * (source * self.world_size + destination)

    def mail_free(self, source: int, destination: int) -> int:
        return self.mail_full(source, destination) + SEMAPHORE

    def wakeup(self, rank: int) -> int:
        return self._mail + SEMAPHORE * (2 * self.world_size**2 + rank)

    @property
    def _headers(self) -> int:
        return _page(self.wakeup(self.world_size))

    def header(self, rank: int, buffer: int) -> int:
        return self._headers + HEADER * (rank * BUFFERS + buffer)

    def last_wait(self, rank: int) -> int:
        return self.header(self.world_size, 0) + HEADER * rank

    @cached_property
    def _stages(self) -> int:
        return _page(self.last_wait(self.world_size))

    def stage(self, rank: int, buffer: int) -> int:
        return self._stages + self._stage_bytes * (rank * BUFFERS + buffer)

    @property
    def _stage_bytes(self) -> int:
        return _page(self.chunk)

    @cached_property
    def _boxes(self) -> int:
        return self.stage(self.world_size, 0)

    def box(self, source: int, destination: int, slot: int) -> int:
        """Return the offset of a fragment: its header, then its payload."""
        pair = source * self.world_size + destination
        return self._boxes + (MAIL_HEADER + _page(self.chunk)) * (pair * MAIL_SLOTS + slot)

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return _page(self.box(self.world_size, 0, 0))

    def semaphores(self) -> Iterator[tuple[int, int]]:
        """Yield every semaphore: its offset and first value."""
        everyone = range(self.world_size)
        yield self.failure_claim, 1
        for rank in everyone:
            yield self.failure_notice(rank), 0
            yield self.wakeup(rank), 0
        for source in everyone:
            for destination in everyone:
                yield self.token(source, destination), 0
                yield self.mail_full(source, destination), 0
                yield self.mail_free(source, destination), MAIL_SLOTS


def _page(offset: int) -> int:
    return -(-offset // PAGE) * PAGE
