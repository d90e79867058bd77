"""Saving in the background: one copy of the state in memory, written by a thread.

Note [Saving in the background]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Before training continues, the ranks agree on the step and on the bytes that each writes, over the training's process
group, and make the copy. A GPU makes it in its turn, before it changes anything, and the thread waits for that, chunk
by chunk, while training goes on. From there on the thread owns everything: the copy, the records that the ranks
exchange (over the store: Note [Records in the background]), the files. The state may change meanwhile.

Each rank copies only what it writes, so the ranks together hold the state once more, whatever their number. The memory
is kept for the next save: fresh memory costs more than the copy itself, in page faults. See Note [Chunks] in
``chunks.py``.

At most one save is under way. All ranks get the same failure, since they write together; a rank raises it at the next
save or wait. The thread is not a daemon: a process that ends waits for it, and ends with exit code 1 if it failed, the
error was not raised, and no save from the side was complete since.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import PurePath

from lockstep import _torch
from lockstep.checkpoint.at_exit import before_threads_end
from lockstep.checkpoint.chunks import Chunks
from lockstep.checkpoint.plan import WritePlan
from lockstep.checkpoint.together import together
from lockstep.comm.peers import OverStore, Peers
from lockstep.comm.world import World
from lockstep.errors import CheckpointError
from lockstep.job import flight

#: A function that carries out a plan with these peers and returns the checkpoint's folder.
Writer = Callable[[WritePlan, Peers], PurePath]

#: The number of conversations begun in this process, the same on every rank.
_conversations = 0
_all: weakref.WeakSet[Background] = weakref.WeakSet()
#: The process that has ``_at_exit`` registered.
_registered_in: int | None = None


class Background:
    """One rank's saves in the background, of which one at most is under way. See Note [Saving in the background]."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: The copy's memory. It grows to the largest plan so far.
        self._chunks = Chunks(pinned=world.device.type != "cpu")
        self._thread: threading.Thread | None = None
        self._peers: OverStore | None = None
        self._step = 0
        self._folder: PurePath | None = None
        self._error: BaseException | None = None
        self._is_made_good = False
        self._pid = os.getpid()

    def begin(self, plan: WritePlan, *, step: int, write: Writer) -> None:
        """**Collective.** Copy the state that this rank is to write, and start the thread that writes the copy.

        No save may be under way: call :meth:`wait` first. Training may continue when this returns.
        """
        peers = self._peers = self._new_peers()
        try:
            copied = plan.copied(self._chunks)
            task = partial(write, copied, peers)
        except Exception as error:  # noqa: BLE001  (the other ranks' threads wait: they must get the error)
            task = partial(_fail_together, error, peers)
        self._step, self._folder, self._error, self._is_made_good = step, None, None, False
        self._thread = threading.Thread(
            target=self._run, args=(task, peers), name=f"lockstep-save-{step}", daemon=False
        )
        _watch_exit(self)
        self._thread.start()

    def wait(self) -> PurePath | None:
        """Wait for the save that is under way. Return its folder, or None if there is none.

        Raises:
            CheckpointError: it failed; raised once.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"saving step {self._step} in the background failed: {error}") from error
        return self._folder

    @property
    def is_writing(self) -> bool:
        """Whether a save is under way."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def made_good(self) -> None:
        """Note that a later checkpoint is complete: a process that leaves by it has lost nothing if this one failed."""
        self._is_made_good = True

    def forget_records(self) -> None:
        """Remove this rank's records of the last save from the store; all ranks must have waited for it."""
        if self._peers is not None:
            self._peers.forget()
            self._peers = None

    def _new_peers(self) -> OverStore:
        global _conversations
        _conversations += 1
        return OverStore(
            _torch.default_store(),
            rank=self._world.rank,
            world_size=self._world.world_size,
            key=f"lockstep/save/{_conversations}",
            timeout=self._world.timeout,
        )

    def _run(self, task: Callable[[], PurePath], peers: OverStore) -> None:
        flight.current.begin(f"saving step {self._step}")
        try:
            self._folder = task()
        except BaseException as error:  # noqa: BLE001  (raised in the thread that trains, at its next call)
            self._error = error
            if self._world.is_main:  # printed now, because that call may be hours away
                print(f"lockstep: saving step {self._step} in the background failed: {error}", file=sys.stderr)
        finally:
            flight.current.end()
            peers.leave()

    def failed_unheard(self) -> bool:
        """Wait for the last save. Return whether it failed, the error was not raised, and no later one is complete."""
        if self._pid != os.getpid() or self._thread is None:
            return False
        self._thread.join()
        return self._error is not None and not self._is_made_good


def _fail_together(error: Exception, peers: Peers) -> PurePath:
    """Take part in the others' ``write``, so that it fails on all ranks with ``error``."""

    def fail() -> PurePath:
        raise error

    try:
        return together(peers, fail, str)[0]
    except CheckpointError:
        peers.gather(None)  # they meet once more, when rank 0 has cleaned up
        raise


def _watch_exit(background: Background) -> None:
    global _registered_in
    _all.add(background)
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        before_threads_end(_end_saves)
        atexit.register(_at_exit)


def _end_saves() -> None:
    """Wait for the saves under way; see Note [The end of a process]."""
    for each in [*_all]:
        each.failed_unheard()


def _at_exit() -> None:
    """End the process with exit code 1 if its last save failed, so that it does not look successful."""
    failed = [each.failed_unheard() for each in _all]
    if any(failed) and getattr(sys, "last_value", None) is None:
        print("lockstep: the last save failed, so this process ends with exit code 1", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
