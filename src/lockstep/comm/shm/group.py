"""A group: its memory, its health, its rounds and the order of its collectives; opened together, closed together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.shm.health import Health
from lockstep.comm.shm.p2p import Messages
from lockstep.comm.shm.rendezvous import meet
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.shared_tensors import SharedTensors
from lockstep.comm.shm.work import ShmWork, Turns
from lockstep.errors import LockstepError

#: What a collective does with the rounds, once its turn has come.
Move = Callable[[Rounds], None]

#: This process, kept so that asking costs nothing.
_process = os.getpid()


def _after_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


class Group:
    """One process group's engine, on one rank."""

    def __init__(
        self, store: Store, *, rank: int, size: int, timeout: float, chunk: int, name: str, members: Sequence[int] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        #: Seconds a round may wait, unless the call says otherwise.
        self.timeout = timeout
        self._process = _process
        self._closed = False
        self._segment, self._layout, whereabouts = meet(store, rank=rank, size=size, timeout=timeout, chunk=chunk)
        self.health = Health(self._segment, self._layout, whereabouts, rank=rank, members=members)
        self._rounds: Rounds | None = Rounds(self._segment, self._layout, rank=rank, health=self.health)
        self._turns = Turns(name)
        self._messages: Messages | None = None
        self._making = threading.Lock()
        #: Tensors in memory that all ranks share.
        self.shared = SharedTensors(rank=rank)

    def issue(
        self, name: str, fingerprint: bytes, move: Move, result: list[Any], timeout: float, asynchronous: bool
    ) -> ShmWork:
        """**Collective.** Run a collective in its turn. Returns complete, or with an error raised, if synchronous.

        Args:
            name: what it is, for messages.
            fingerprint: its header without the sequence number (``fingerprint.take``).
            move: moves the data.
            result: the output tensors.
            timeout: seconds each round may wait.
            asynchronous: return at once (the caller has a Work to wait for), or when it is complete.

        Raises:
            LockstepError: the group has failed before, was destroyed, or belongs to the process this was forked from.
        """
        if self._closed or self._process != _process or self.health.known() is not None:
            self.check(name)
        turns = self._turns
        if not asynchronous and not turns.queue and turns.lock.acquire(False):
            try:
                self._run(name, fingerprint, move, timeout)
            finally:
                turns.lock.release()
            return ShmWork(name, result)

        def run() -> None:
            self.health.check()  # an error may have come since the call was issued
            self._run(name, fingerprint, move, timeout)

        work = ShmWork(name, result, run)
        turns.put(work)
        if not asynchronous:
            work.wait()
        return work

    @property
    def messages(self) -> Messages:
        """Its messages, made when first used."""
        if self._messages is None:
            with self._making:  # several threads may send their first message at once, and two would count apart
                if self._messages is None:
                    self._messages = Messages(self._segment, self._layout, rank=self.rank, health=self.health)
        return self._messages

    def check(self, name: str) -> None:
        """Refuse to begin ``name`` where it can't work."""
        if self._process != _process:
            raise LockstepError(
                f"{name}: this process ({_process}) was forked from rank {self.rank} (process {self._process}), whose "
                "process group it can't use; call init_process_group in the child, or start ranks with lockstep run"
            )
        if self._closed:
            raise LockstepError(f"{name}: rank {self.rank} has destroyed this process group")
        self.health.check()

    def _run(self, name: str, fingerprint: bytes, move: Move, timeout: float) -> None:
        rounds = self._rounds
        if rounds is None:
            raise LockstepError(f"{name}: rank {self.rank} has destroyed this process group")
        rounds.begin(fingerprint, timeout=timeout)
        try:
            move(rounds)
        except LockstepError:
            raise
        except BaseException as error:  # whatever it was, the others must not wait for this rank
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self.health.end(LockstepError(f"rank {self.rank} failed inside {name}: {what}"))
            raise

    def close(self) -> None:
        """Complete what was issued and give everything back. A second call does nothing.

        Ranks that still wait for this one get an error. The memory itself goes when the last tensor on it does.
        """
        if self._closed:
            return
        self._closed = True
        if self._process != _process:  # a forked child has a copy of this object, and no part in the group
            return
        self._turns.close()
        if self._messages is not None:
            self._messages.close(self.timeout)
        self._rounds = None
        self.shared.close()
        self.health.close()

    def abort(self, reason: str) -> None:
        """End the group on all ranks: everything in flight raises."""
        if not self._closed and self._process == _process:
            self.health.end(LockstepError(f"rank {self.rank} aborted the process group: {reason}"))
