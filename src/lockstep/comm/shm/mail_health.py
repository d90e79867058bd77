"""Can what is in flight still complete? Asked every slice by a rank that waits for a message."""

from __future__ import annotations

from lockstep.comm.shm import messages
from lockstep.comm.shm.failure import Failure
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.mail_matching import Matching
from lockstep.comm.shm.mail_records import MailWork
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.segment import Segment
from lockstep.comm.shm.standing import Standing
from lockstep.errors import CollectiveTimeout, LockstepError, PeerLost


class Health:
    """What there is to know about the partners of one rank's messages."""

    def __init__(
        self,
        segment: Segment,
        layout: Layout,
        matching: Matching,
        *,
        rank: int,
        peers: Peers,
        standing: Standing,
        failure: Failure,
    ) -> None:
        self._presence = [(peer, layout.presence(peer)) for peer in range(layout.world_size) if peer != rank]
        self._segment = segment
        self._matching = matching
        self._rank = rank
        self._peers = peers
        self._standing = standing
        self._failure = failure

    def error(self, now: float) -> LockstepError | None:
        """**Local.** Why it can't: the group has failed, a partner is gone, a time limit has passed; else None."""
        return self._failure.known() or self._lost() or self._late(now)

    def _late(self, now: float) -> LockstepError | None:
        everyone = [peer for peer, _ in self._presence]
        late: list[tuple[MailWork, list[int]]] = [
            (each.work, [each.destination]) for queue in self._matching.outgoing for each in queue
        ]
        late += [(each.work, everyone if each.source is None else [each.source]) for each in self._matching.receives()]
        late = [pair for pair in late if pair[0].shm_deadline is not None and now >= pair[0].shm_deadline]
        if not late:
            return None
        missing = sorted({peer for _, partners in late for peer in partners})
        what = ", ".join(str(work) for work, _ in late)
        where = self._standing.describe([*missing, *(peer for peer in everyone if peer not in missing)])
        seconds = max(work.shm_limit for work, _ in late)
        return self._failure.report(CollectiveTimeout(messages.late(self._rank, what, seconds, missing, where)))

    def _lost(self) -> LockstepError | None:
        gone = set(self._peers.gone())
        left = {peer for peer, offset in self._presence if self._segment.view[offset]}
        if not gone and not left:
            return None
        self._matching.progress()  # what they sent before they went is there by now
        away = gone | left
        for outgoing in (each for queue in self._matching.outgoing for each in queue):
            if outgoing.destination in away:
                return self._report_lost(outgoing.work, outgoing.destination, gone)
        for expected in self._matching.expected:
            if expected.source is None and (gone or len(away) >= len(self._presence)):
                return self._report_lost(expected.work, min(gone or away), gone)
            if expected.source in away:
                return self._report_lost(expected.work, expected.source, gone)
        for source in away:
            message = self._matching.arriving[source]
            if message is not None and message.claimed is not None:
                return self._report_lost(message.claimed.work, source, gone)
        return None

    def _report_lost(self, work: MailWork, peer: int, gone: set[int]) -> LockstepError:
        ended, left = ([peer], []) if peer in gone else ([], [peer])
        where = self._standing.describe([peer])
        return self._failure.report(PeerLost(messages.lost(self._rank, str(work), ended, left, where)))
