"""A group: an engine, and the order of the collectives that are issued over it; closed together."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

from lockstep.comm.group.engine import Engine
from lockstep.comm.group.failures import in_words
from lockstep.comm.group.work import GroupWork, Turns
from lockstep.errors import LockstepError

#: The work of a collective with the engine, once its turn has come.
Move = Callable[[Engine], None]

#: Seconds for what was issued to complete where the group is destroyed because of an error. (Otherwise it would wait
#: as long as for any late rank, and the error would not be shown meanwhile.)
_FAILING = 5.0

#: The id of this process, kept because ``os.getpid()`` would be a system call in each collective.
_process = os.getpid()


def _after_fork() -> None:
    global _process
    _process = os.getpid()


os.register_at_fork(after_in_child=_after_fork)


#: The groups of this process.
_living: weakref.WeakSet[Group] = weakref.WeakSet()


def open_groups() -> list[Group]:
    """Return the groups of this process that were not destroyed."""
    return [group for group in _living if not group.is_closed]


class Group:
    """One process group, on one rank: its engine, and the order of its collectives."""

    def __init__(self, engine: Engine, *, timeout: float, name: str) -> None:
        """Order what is issued over ``engine``, which belongs to the group from now on.

        Args:
            engine: what moves the data.
            timeout: seconds that a rank may be late, unless a call says otherwise.
            name: the group's name, and its thread's; the same on all ranks.
        """
        self.engine = engine
        self.name = name
        self.timeout = timeout
        self._process = _process
        self._closed = False
        self._released = False
        self._turns = Turns(name)
        _living.add(self)

    @property
    def is_closed(self) -> bool:
        """Whether the group was destroyed, or belongs to the process that this one was forked from."""
        return self._closed or self._process != _process

    @property
    def is_at_rest(self) -> bool:
        """Whether all that was issued on this rank is complete."""
        return not self._turns.is_busy and self.engine.is_at_rest()

    def stop(self, reason: str, limit: float) -> bool:
        """End the group on all ranks, and wait until no collective that was issued here runs; return whether that is
        so.

        Args:
            reason: the message for the ranks that are in a collective.
            limit: seconds to wait at most.
        """
        self.engine.end(LockstepError(reason))
        return self._turns.settle(limit)

    def renew(self) -> None:
        """Begin anew after :meth:`stop` on all ranks; see :meth:`Engine.renew`."""
        self.engine.renew()

    def issue(
        self, name: str, fingerprint: bytes, move: Move, result: list[Any], timeout: float, asynchronous: bool
    ) -> GroupWork:
        """**Collective.** Run a collective in its turn. Returns complete, or with an error raised, if synchronous.

        Args:
            name: the operation, for messages.
            fingerprint: its header without the sequence number (``fingerprint.take``).
            move: moves the data.
            result: the output tensors.
            timeout: seconds that another rank may be late.
            asynchronous: return at once (the caller has a Work to wait for), or when it is complete.

        Raises:
            LockstepError: the group has failed before, was destroyed, or belongs to the process this was forked from.
        """
        if self._closed or self._process != _process or self.engine.known() is not None:
            self.check(name)
        if not asynchronous and self._run_at_once(name, fingerprint, move, timeout):
            return GroupWork(name, result)

        def run() -> None:
            self.engine.check()  # an error may have come since the call was issued
            self._run(name, fingerprint, move, timeout)

        work = GroupWork(name, result, run)
        self._turns.put(work)
        if not asynchronous:
            work.wait()
        return work

    def complete(self, name: str, fingerprint: bytes, move: Move, timeout: float) -> None:
        """**Collective.** Do as :meth:`issue`, for a caller that waits and needs no Work."""
        if self._closed or self._process != _process or self.engine.known() is not None:
            self.check(name)
        if not self._run_at_once(name, fingerprint, move, timeout):
            self.issue(name, fingerprint, move, [], timeout, False)

    def _run_at_once(self, name: str, fingerprint: bytes, move: Move, timeout: float) -> bool:
        """Run a collective if it is its turn; return whether it was."""
        turns = self._turns
        if turns.queue or turns.in_use:
            return False
        held: bool = False
        try:
            held = turns.lock.acquire(False)
            if held:
                turns.in_use = True
                self._run(name, fingerprint, move, timeout)
        finally:
            if held or turns.lock._is_owned():  # (a signal handler may raise before the answer is kept)
                turns.in_use = False
                turns.lock.release()
        return held

    def check(self, name: str) -> None:
        """Refuse to begin the operation ``name`` where the group can't be used.

        Raises:
            LockstepError: the group has failed, was destroyed, or belongs to the process this was forked from.
        """
        if self._process != _process:
            raise LockstepError(
                f"{name}: this process ({_process}) was forked from rank {self.engine.rank} (process {self._process}), "
                "whose process group it can't use; call init_process_group in the child, or start ranks with lockstep "
                "run"
            )
        if self._closed:
            raise LockstepError(f"{name}: rank {self.engine.rank} has destroyed this process group")
        self.engine.check()

    def _run(self, name: str, fingerprint: bytes, move: Move, timeout: float) -> None:
        engine = self.engine
        if self._released:
            raise LockstepError(f"{name}: rank {engine.rank} has destroyed this process group")
        try:
            engine.begin(fingerprint, timeout=timeout)
            move(engine)
        except LockstepError:
            raise
        except BaseException as error:  # whatever it is, the others must not wait for this rank
            engine.end(LockstepError(f"rank {engine.rank} failed inside {name}: {in_words(error)}"))
            raise

    def close(self) -> None:
        """Complete the collectives that were issued and release everything. A second call does nothing.

        Ranks that still wait for this one get an error. If an exception is on its way through the caller, as in a
        ``finally:``, the issued collectives have only a few seconds: the other ranks may never reach them, and wait for
        this rank. A signal handler may call this in the middle of a collective, which fails then, on all ranks."""
        if self._closed:
            return
        self._closed = True
        if self._process != _process:  # a forked child has a copy of this object, and no part in the group
            return
        error = _on_its_way()
        limit = self.timeout if error is None else min(self.timeout, _FAILING)
        why: str | None = None
        if self._turns.is_interrupted:
            why = "in the middle of a collective, as a signal handler does"
        elif error is not None and not self._turns.settle(limit):
            why = f"because of an error of its own: {in_words(error)}"
        if why is not None:
            self.engine.end(LockstepError(f"rank {self.engine.rank} destroyed the group {why}"))
        self._turns.close(None if why is None else _FAILING)
        self._released = True
        self.engine.close(limit)

    def abort(self, reason: str) -> None:
        """End the group on all ranks: everything in flight raises."""
        if not self._closed and self._process == _process:
            self.engine.end(LockstepError(f"rank {self.engine.rank} aborted the process group: {reason}"))


def _on_its_way() -> BaseException | None:
    """Return the exception that the caller handles or that passes through its ``finally:``, unless it ends well."""
    error = sys.exc_info()[1]
    return None if isinstance(error, SystemExit) and not error.code else error
