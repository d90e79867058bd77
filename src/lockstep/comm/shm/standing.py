"""Where each rank of a group was last seen, for the messages of others.

Hints: what is read here was handed over by nothing and may be from a moment ago, or torn. No decision rests on it.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.comm.shm import messages
from lockstep.comm.shm.layout import BUFFERS, HEADER, Layout
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import Segment


class Standing:
    """The newest header of each rank, and the last message it waited for."""

    def __init__(self, segment: Segment, layout: Layout, *, rank: int, peers: Peers) -> None:
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._peers = peers

    def waits_in(self, text: str) -> None:
        """**Local.** Tell the others that this rank waits in ``text``, a send or a receive."""
        offset = self._layout.errand(self._rank)
        self._segment.view[offset : offset + HEADER] = text.encode()[:HEADER].ljust(HEADER, b"\0")

    def describe(self, ranks: Iterable[int]) -> list[str]:
        """**Local.** A line for each of ``ranks``."""
        return [messages.standing(rank, self._peers.pid(rank), self._last(rank), self._errand(rank)) for rank in ranks]

    def _last(self, rank: int) -> bytes:
        offsets = [self._layout.header(rank, buffer) for buffer in range(BUFFERS)]
        headers = [bytes(self._segment.view[offset : offset + HEADER]) for offset in offsets]
        return max(headers, key=lambda header: int.from_bytes(header[:8], "little"))

    def _errand(self, rank: int) -> str:
        offset = self._layout.errand(rank)
        return bytes(self._segment.view[offset : offset + HEADER]).rstrip(b"\0").decode(errors="replace")
