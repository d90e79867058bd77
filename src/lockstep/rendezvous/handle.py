"""The launcher's side of the rendezvous: start the client, read its messages, and notice when it is cut off."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any

from lockstep import knobs
from lockstep.job.messages import Channel
from lockstep.rendezvous.messages import (
    Alive,
    Command,
    End,
    Ended,
    Event,
    Leave,
    Looking,
    Looks,
    Meet,
    Met,
    Options,
    Refused,
)


class Rendezvous:
    """The client process, as the launcher sees it. If it dies or is cut off, :meth:`start` another one.

    Args:
        options: the client's options.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        #: The client's process id; None: it does not run yet.
        self.pid: int | None = None
        self._channel: Channel[Event] | None = None
        self._deadline: float | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on; only between :meth:`start` and :meth:`close`."""
        assert self._channel is not None, "a client was started"
        return self._channel.fileno()

    @property
    def is_open(self) -> bool:
        """Whether a client runs, as far as is known."""
        return self._channel is not None

    @property
    def due(self) -> float | None:
        """The time on the monotonic clock at which the client counts as cut off, unless it sends a message before;
        None: never."""
        return self._deadline

    def start(self) -> tuple[dict[str, Any], list[int]]:
        """Make room for a client. Return what it runs, as ``Fork.job``, and descriptors that the caller closes."""
        self.close()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, Event.__args__)
        job = {"kind": "rendezvous", "options": vars(self.options)}
        # torch's store logs every lost connection with a stack of C++ frames; what matters comes as a message.
        return job, [os.open(os.devnull, os.O_RDWR) for _ in range(3)] + [theirs.detach()]

    def meet(self, meet: Meet) -> None:
        """Have the client take part in the next round; the answer is :class:`Met` or :class:`Refused`."""
        self._deadline = time.monotonic() + knobs.times().stuck
        self._send(meet)

    def end(self, end: End) -> None:
        """Have the client write down why the round ends; :class:`Ended` answers, also if another machine was first."""
        self._send(end)

    def tell(self, looks: Looks) -> None:
        """Have the client tell the other machines how this one's ranks are, with its next sign of life."""
        self._send(looks)

    def excuse(self, seconds: float) -> None:
        """Give the client so many seconds more: the launcher itself stood still, and heard nothing."""
        if self._deadline is not None:
            self._deadline += seconds

    def leave(self, leave: Leave) -> None:
        """Have the client leave; it is gone once it has done what the other machines need of it."""
        self._deadline = None
        self._send(leave)

    def receive(self) -> list[Event]:
        """Return the client's messages. Raises EOFError if it is gone."""
        assert self._channel is not None, "a client was started"
        events = [event for event, _ in self._channel.receive()]
        for event in events:
            if isinstance(event, Looking):
                self._deadline = time.monotonic() + knobs.times().stuck
            elif isinstance(event, Met | Alive):
                self._deadline = time.monotonic() + knobs.times().cut_off
            elif isinstance(event, Ended | Refused):
                self._deadline = None
        return events

    def close(self) -> None:
        """Close the connection, at which the client leaves. Does nothing the second time."""
        if self._channel is not None:
            self._channel.close()
        self._channel, self.pid, self._deadline = None, None, None

    def _send(self, command: Command) -> None:
        # If the client is gone, receive() says so.
        if self._channel is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._channel.send(command)
