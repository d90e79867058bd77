"""The engine of the backend ``"shm"``: a group, its messages and memory; collectives.py has its verbs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.comm.group import tensors
from lockstep.comm.group.engine import SharedPart
from lockstep.comm.group.meeting import Whereabouts
from lockstep.comm.group.work import GroupWork
from lockstep.comm.shm.collectives import VerbsInRounds
from lockstep.comm.shm.health import Health
from lockstep.comm.shm.p2p import Messages, empty_boxes
from lockstep.comm.shm.rendezvous import meet
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.shared_tensors import SharedTensors
from lockstep.errors import LockstepError


class MemoryEngine(VerbsInRounds):
    """Ranks that are processes on one host and share memory."""

    backend = "shm"
    reduces_in_place = True

    def __init__(
        self, store: Store, *, rank: int, size: int, timeout: float, chunk: int, members: Sequence[int] = ()
    ) -> None:
        """**Collective.** Map the group's memory on every rank.

        Args:
            store: where the ranks meet.
            rank: of the group.
            size: ranks of the group.
            timeout: seconds to wait for the other ranks.
            chunk: bytes of a stage; rank 0's counts.
            members: the ranks' numbers in the world, where they are known.

        Raises:
            ApartError: a rank can't share memory with rank 0; on all ranks.
            RendezvousError: a rank did not come.
        """
        super().__init__(rank=rank, size=size)
        self._segment, self._layout, whereabouts = meet(store, rank=rank, size=size, timeout=timeout, chunk=chunk)
        self._health = self._make_health(whereabouts, members)
        self._rounds = Rounds(self._segment, self._layout, rank=rank, health=self._health)
        self._shared = SharedTensors(rank=rank)
        self._messages: Messages | None = None
        self._making = threading.RLock()

    def _make_health(self, whereabouts: list[Whereabouts], members: Sequence[int]) -> Health:
        return Health(self._segment, self._layout, whereabouts, rank=self.rank, members=members)

    # --- the group -------------------------------------------------------------------------------------------------

    def begin(self, body: bytes, *, timeout: float) -> None:
        """See :class:`Engine`."""
        self._rounds.begin(body, timeout=timeout)

    @property
    def number(self) -> int:
        """See :class:`Engine`."""
        return self._rounds.number

    def known(self) -> LockstepError | None:
        """See :class:`Engine`."""
        return self._health.known()

    def end(self, error: LockstepError) -> LockstepError:
        """See :class:`Engine`."""
        return self._health.end(error)

    def disagree(self, what: str) -> LockstepError:
        """See :class:`Engine`."""
        return self._rounds.disagree(what)

    def allow(self, timeout: float) -> None:
        """Change how many seconds a rank may be late from now on in the collective under way."""
        self._rounds.allow(timeout)

    @property
    def header(self) -> bytes:
        """This rank's fingerprint of the collective under way (comm/group/fingerprint.py)."""
        return self._rounds.header

    @property
    def chunk(self) -> int:
        """Bytes of a stage."""
        return self._rounds.chunk

    def is_at_rest(self) -> bool:
        """See :class:`Engine`."""
        return self._messages is None or not self._messages.in_flight()

    def renew(self) -> None:
        """See :class:`Engine`."""
        if self._messages is not None:
            self._messages.close(0.0)
            self._messages = None
        empty_boxes(self._segment, self._layout, rank=self.rank)
        self._rounds.renew()
        self._health.renew()

    def close(self, timeout: float) -> None:
        """See :class:`Engine`. Ranks that still wait for this one get an error. The memory itself goes when the last
        tensor on it does."""
        if self._messages is not None:
            self._messages.close(timeout)
        self._shared.close()
        self._health.close()

    # --- messages, and memory --------------------------------------------------------------------------------------

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._mail().send(tensor, to=to, tag=tag, timeout=timeout)

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> GroupWork:
        """See :class:`Engine`."""
        return self._mail().receive(tensor, source=source, tag=tag, timeout=timeout)

    def _mail(self) -> Messages:
        """Return the group's messages, which are made when first used."""
        if self._messages is None:
            with self._making:  # several threads may send their first message at once, and two would count apart
                made = Messages(self._segment, self._layout, rank=self.rank, health=self._health)
                self._messages = self._messages or made
        return self._messages

    def find(self, tensor: torch.Tensor) -> SharedPart | None:
        """See :class:`Engine`."""
        return self._shared.find(tensor) if self._shared.allocations and tensors.is_flat(tensor) else None

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """See :class:`Engine`.

        Raises:
            RendezvousError: some rank has no memory, or can't map another's.
        """
        return self._shared.allocate(self, count, dtype)
