"""Send and receive between any two ranks of a group, over what moves bytes by numbers: gloo between hosts, or MPI.

An envelope goes before each message. It says the message's size, its dtype and where it was sent, so that one that does
not fit is an error on both ranks before anything is written. Envelopes of a sender and tag come in the order in which
they were sent; the content has a number of its own, since receives are completed by threads, in any order.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from lockstep import _torch
from lockstep.comm.group import tensors
from lockstep.comm.group.engine import Engine
from lockstep.comm.group.fingerprint import dtype_code, dtype_name, encoded, place
from lockstep.comm.group.work import GroupWork
from lockstep.comm.hosts.between import Wait
from lockstep.errors import CollectiveMismatch, LockstepError
from lockstep.job import flight

#: Bytes of the content, code of its dtype, its number; then the line that sent it, as text.
_ENVELOPE = struct.Struct("<qqq")
_BYTES = 256


class Transport(Protocol):
    """Moves the bytes of messages."""

    @property
    def numbers(self) -> int:
        """How many numbers there are for messages, from 0: what :meth:`message` is given is less."""

    def message(self, content: torch.Tensor, number: int, *, to: int | None = None, source: int | None = None) -> Any:
        """Begin to send bytes to a rank, or to receive them from ``source`` or (neither) any rank."""

    def wait_as(self, wait: Wait, works: Sequence[Any]) -> None:
        """Wait for what :meth:`message` began, and raise what has ended the group."""


@_torch.untraced
class RemoteMessage(GroupWork):
    """A message in flight, which a thread of its own completes."""

    def __init__(self, name: str, tensor: torch.Tensor, limit: float) -> None:
        super().__init__(name, [tensor], self._shm_move)
        self.shm_place = place()
        self._shm_limit = limit
        #: The wait for it, which has no limit until a thread waits: the message may come much later.
        self.shm_wait = Wait([], f"{name} at {self.shm_place}", None)

    def _shm_move(self) -> None:
        raise NotImplementedError

    def shm_begin(self) -> None:
        """Start the thread that completes it."""
        threading.Thread(target=self._shm_complete, name="lockstep-message", daemon=True).start()

    def _shm_complete(self) -> None:
        flight.in_background()
        self.shm_execute()
        self.shm_fulfil()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.shm_wait.limit is None:
            self.shm_wait.limit = time.monotonic() - self.shm_wait.begun + self._shm_limit
        return super().wait(timeout)


class _Sending(RemoteMessage):
    def __init__(self, transport: Transport, name: str, tensor: torch.Tensor, limit: float) -> None:
        super().__init__(name, tensor, limit)
        self._shm_transport = transport
        self.shm_works: list[Any] = []

    def _shm_move(self) -> None:
        self._shm_transport.wait_as(self.shm_wait, self.shm_works)


class _Receiving(RemoteMessage):
    def __init__(self, messages: Messages, name: str, tensor: torch.Tensor, limit: float) -> None:
        super().__init__(name, tensor, limit)
        self._shm_messages = messages
        self._shm_tensor = tensor
        self.shm_envelope = torch.empty(_BYTES, dtype=torch.uint8, device="cpu")
        self.shm_coming: Any = None
        self.shm_asked_source: int | None = None

    def _shm_move(self) -> None:
        transport = self._shm_messages.transport
        transport.wait_as(self.shm_wait, [self.shm_coming])
        source = self.shm_asked_source
        if source is None:
            source = self.shm_coming._source_rank()
        self._shm_source = source
        flat = tensors.target(self._shm_tensor)
        content = _bytes(flat)
        size, code, number = _ENVELOPE.unpack_from(bytes(self.shm_envelope.numpy()))
        if (size, code) != (content.numel(), dtype_code(flat.dtype)):
            where = bytes(self.shm_envelope[_ENVELOPE.size :].numpy()).rstrip(b"\0").decode(errors="replace")
            raise self._shm_messages.engine.end(
                CollectiveMismatch(
                    f"rank {source} sent {size} bytes of {dtype_name(code)} at {where}; rank "
                    f"{self._shm_messages.engine.rank} receives {content.numel()} bytes ({flat.numel()} elements of "
                    f"{flat.dtype}) in {self.shm_wait.what}"
                )
            )
        if size:
            transport.wait_as(self.shm_wait, [transport.message(content, number, source=source)])
        tensors.restore(self._shm_tensor, flat)


class Messages:
    """One group's messages, on one rank."""

    def __init__(self, engine: Engine, transport: Transport) -> None:
        self.engine = engine
        self.transport = transport
        self._numbers = itertools.count()
        #: As many numbers of the transport are for callers' tags; those of the contents follow.
        self._tags = transport.numbers // 2
        self._sends: list[_Sending] = []
        self._lock = threading.RLock()

    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> RemoteMessage:
        """Begin to send ``tensor``, which must not change until the work is complete."""
        work = _Sending(self.transport, f"send to rank {to} (tag {tag})", tensor, timeout)
        work.shm_wait.ranks = [to]
        flat = tensors.source(tensor)
        content = _bytes(flat)
        number = self._tags + next(self._numbers) % self._tags
        envelope = bytearray(_BYTES)
        _ENVELOPE.pack_into(envelope, 0, content.numel(), dtype_code(flat.dtype), number)
        where = encoded(work.shm_place, _BYTES - _ENVELOPE.size)
        envelope[_ENVELOPE.size : _ENVELOPE.size + len(where)] = where
        said = torch.frombuffer(envelope, dtype=torch.uint8)
        work.shm_works = [self.transport.message(said, self._number(tag), to=to)]
        if content.numel():
            work.shm_works.append(self.transport.message(content, number, to=to))
        with self._lock:
            self._sends = [*(each for each in self._sends if not each.is_completed()), work]
        self._begin(work)
        return work

    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> RemoteMessage:
        """Begin to receive into ``tensor``, from ``source`` or (None) the rank that sends first."""
        whom = "any rank" if source is None else f"rank {source}"
        work = _Receiving(self, f"recv from {whom} (tag {tag})", tensor, timeout)
        work.shm_wait.ranks = [source] if source is not None else list(range(self.engine.size))
        work.shm_asked_source = source
        work.shm_coming = self.transport.message(work.shm_envelope, self._number(tag), source=source)
        self._begin(work)
        return work

    def close(self, timeout: float) -> None:
        """Complete the sends in flight, in ``timeout`` seconds altogether."""
        until = time.monotonic() + timeout
        for work in list(self._sends):
            left = until - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(LockstepError):  # a thread that waits for it gets the error
                work.wait(timedelta(seconds=left))

    def _begin(self, work: RemoteMessage) -> None:
        try:
            work.shm_begin()
        except RuntimeError as error:
            # What was given to the transport can't be taken back, and nobody would wait for it.
            said = f"rank {self.engine.rank} can't start a thread for {work.shm_wait.what}: {error}"
            work.shm_finish(self.engine.end(LockstepError(said)))
            raise

    def _number(self, tag: int) -> int:
        if not 0 <= tag < self._tags:
            raise RuntimeError(f"tag={tag}: expected 0 to {self._tags - 1}")
        return tag


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)
