"""A group: its memory, its peers, its rounds and the order of its collectives; opened together, closed together."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.shm import messages
from lockstep.comm.shm.executor import Executor
from lockstep.comm.shm.failure import Failure, again
from lockstep.comm.shm.layout import Layout
from lockstep.comm.shm.mail import Mail
from lockstep.comm.shm.peers import Peers
from lockstep.comm.shm.rendezvous import meet
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.shared_tensors import SharedTensors
from lockstep.comm.shm.work import ShmWork
from lockstep.errors import LockstepError

#: What a collective does with the rounds, once its turn has come.
Move = Callable[[Rounds], None]


@dataclass(slots=True)  # (not frozen: that alone would cost a microsecond per collective)
class Call:
    """A collective as it was issued. Not changed afterwards."""

    name: str
    #: Its header without the sequence number (fingerprint.take).
    fingerprint: bytes
    move: Move
    #: The output tensors.
    result: list[Any]
    #: Seconds each round may wait.
    timeout: float
    #: Return at once (the caller has a Work to wait for), or when it is complete.
    asynchronous: bool


class Group:
    """One process group's engine, on one rank."""

    def __init__(
        self, store: Store, *, rank: int, size: int, timeout: float, chunk: int, name: str, members: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        #: Seconds a round may wait, unless the call says otherwise.
        self.timeout = timeout
        self._pid = os.getpid()
        self._closed = False
        segment, layout, whereabouts = meet(store, rank=rank, size=size, timeout=timeout, chunk=chunk)
        self.segment = segment
        self.layout: Layout = layout
        self.peers = Peers(whereabouts, rank=rank)
        self.failure = Failure(segment, layout, rank=rank, note=messages.numbering(members))
        self._rounds: Rounds | None = Rounds(segment, layout, rank=rank, peers=self.peers, failure=self.failure)
        self._executor = Executor(name)
        self._mail: Mail | None = None
        #: Tensors in memory that all ranks share.
        self.shared = SharedTensors(rank=rank)

    def issue(self, call: Call) -> ShmWork:
        """**Collective.** Run ``call`` in its turn. Returns complete, or with an error raised, if it is synchronous.

        Raises:
            LockstepError: the group has failed before, was destroyed, or belongs to the process this was forked from.
        """
        self.check(call.name)
        if not call.asynchronous and self._executor.enter():
            try:
                self._run(call)
            finally:
                self._executor.leave()
            return ShmWork(call.name, None, call.result)
        work = ShmWork(call.name, lambda: self._run_queued(call), call.result)
        self._executor.put(work)
        if not call.asynchronous:
            work.wait()
        return work

    @property
    def mail(self) -> Mail:
        """Its messages, made when first used."""
        if self._mail is None:
            self._mail = Mail(self.segment, self.layout, rank=self.rank, peers=self.peers, failure=self.failure)
        return self._mail

    def check(self, name: str) -> None:
        """**Local.** Refuse to begin ``name`` where it can't work."""
        if os.getpid() != self._pid:
            raise LockstepError(
                f"{name}: this process ({os.getpid()}) was forked from rank {self.rank} (process {self._pid}), whose "
                "process group it can't use; call init_process_group in the child, or start ranks with lockstep run"
            )
        if self._closed:
            raise LockstepError(f"{name}: rank {self.rank} has destroyed this process group")
        error = self.failure.known()
        if error is not None:
            raise again(error)

    def _run_queued(self, call: Call) -> None:
        error = self.failure.known()  # it may have come since the call was issued
        if error is not None:
            raise again(error)
        self._run(call)

    def _run(self, call: Call) -> None:
        rounds = self._rounds
        if rounds is None:
            raise LockstepError(f"{call.name}: rank {self.rank} has destroyed this process group")
        rounds.begin(call.fingerprint, timeout=call.timeout)
        try:
            call.move(rounds)
        except LockstepError:
            raise
        except BaseException as error:  # whatever it was, the others must not wait for this rank
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.failure.report(LockstepError(f"rank {self.rank} failed inside {call.name}: {what}"))
            raise

    def close(self) -> None:
        """**Local.** Complete what was issued and give everything back. A second call does nothing.

        Ranks that still wait for this one get an error. The memory itself goes when the last tensor on it does.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:  # a forked child has a copy of this object, and no part in the group
            return
        self._executor.close()
        if self._mail is not None:
            self._mail.close(self.timeout)
        # Order matters not: it is one word that says "don't wait for me" (Note [Memory ordering]).
        self.segment.view[self.layout.presence(self.rank)] = 1
        self._rounds = None
        self.shared.close()
        self.peers.close()

    def abort(self, reason: str) -> None:
        """**Local.** End the group on all ranks: everything in flight raises."""
        if not self._closed and os.getpid() == self._pid:
            self.failure.report(LockstepError(f"rank {self.rank} aborted the process group: {reason}"))


def seconds(limit: timedelta, default: float) -> float:
    """An option's time limit in seconds; torch says "not given" with a negative one."""
    value = limit.total_seconds()
    return value if value > 0 else default
