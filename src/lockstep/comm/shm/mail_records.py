"""What is in flight between two ranks: a send, a receive that waits for its message, a message that is arriving."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from lockstep import _torch
from lockstep.comm.shm.fingerprint import dtype_code
from lockstep.comm.shm.mailbox import Envelope
from lockstep.comm.shm.work import ShmWork
from lockstep.errors import CollectiveTimeout
from lockstep.job import flight


class Driver(Protocol):
    """What moves messages (mail.Mail), as a work sees it."""

    def poll(self) -> None: ...

    def drive(self, work: MailWork, limit: float | None) -> None: ...

    def completed(self, work: MailWork) -> None: ...


@_torch.untraced
class MailWork(ShmWork):
    """A send or a receive in flight."""

    def __init__(self, mail: Driver, name: str, *, place: str, timeout: float, result: list[Any]) -> None:
        super().__init__(name, lambda: None, result)
        self._shm_mail = mail
        #: The line of the program that issued it.
        self.shm_place = place
        #: Seconds that whoever waits for it may wait ...
        self.shm_limit = timeout
        #: ... and when they have passed: a receive that nobody waits for yet may be for a message to come much later.
        self.shm_deadline: float | None = None

    def __str__(self) -> str:
        return f"{self.shm_name} at {self.shm_place}"

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._shm_awaited()
        limit = timeout.total_seconds() if timeout is not None else 0.0
        with flight.waiting(str(self)):
            self._shm_mail.drive(self, limit if limit > 0 else None)
        if not self.shm_ready():
            raise CollectiveTimeout(f"{self.shm_name} was not complete after {limit:g} s; it goes on in the background")
        return super().wait()

    def is_completed(self) -> bool:
        self._shm_mail.poll()
        return super().is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        self._shm_awaited()
        return super().get_future()

    def shm_finish(self, error: BaseException | None) -> None:
        super().shm_finish(error)
        self._shm_mail.completed(self)

    def shm_ready(self) -> bool:
        """As is_completed, without doing any work."""
        return super().is_completed()

    def shm_arrived_from(self, rank: int) -> None:
        self._shm_source = rank

    def _shm_awaited(self) -> None:
        if self.shm_deadline is None:
            self.shm_deadline = time.monotonic() + self.shm_limit


@dataclass
class Outgoing:
    """A send."""

    work: MailWork
    destination: int
    envelope: Envelope
    content: torch.Tensor
    sent: int = 0
    begun: bool = False


@dataclass
class Expected:
    """A receive that was posted."""

    work: MailWork
    source: int | None
    tag: int
    #: The memory to fill, as bytes, and what brings it into the caller's tensor.
    content: torch.Tensor
    finish: Callable[[], None]
    dtype: torch.dtype

    def fits(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (None, source)

    def accepts(self, envelope: Envelope) -> bool:
        return (self.content.numel(), dtype_code(self.dtype)) == (envelope.size, envelope.dtype)


@dataclass
class Message:
    """A message that is arriving, or has arrived."""

    source: int
    envelope: Envelope
    content: torch.Tensor
    received: int = 0
    claimed: Expected | None = None

    @property
    def complete(self) -> bool:
        return self.received >= self.envelope.size
