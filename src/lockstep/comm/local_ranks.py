"""Connect the ranks of a machine: its leader, which is the first of them, and each of the others, by a socket.

Note [Connected ranks]
~~~~~~~~~~~~~~~~~~~~~~
Descriptors of memory (parcels.py) go through Unix sockets only. The leader listens at a name that it draws, in the
abstract namespace: no file is made, and the name goes with the leader, however it ends. Every process on the machine
can see these names, so both ends ask the kernel which user's process the other is, and a follower sends a random word
that only the ranks know. A socket reports the other end's death at once, since a process that is forked later (a
DataLoader's worker) closes its copy first.

Which ranks share a machine is what their launcher and the kernel say (hosts/grouping.py), as for shared memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lockstep.comm.exchange import all_gather_records
from lockstep.comm.hosts.grouping import Hosts, my_host
from lockstep.comm.peers import Members
from lockstep.errors import CollectiveTimeout, LockstepError, PeerLost, named
from lockstep.job import fates, files, flight
from lockstep.job.messages import Channel

Received = TypeVar("Received")

#: The kernel's description of the process at the other end: its process id, user and group (SO_PEERCRED).
_CREDENTIALS = struct.Struct("=iII")
#: Seconds of a wait that are not told to the launcher as one: it takes them for work in the phase that the rank is in,
#: which is to fetch data, and the rank that all wait for is in that as well.
_SHORT = 1.0


class LimitedMembers(Members, Protocol):
    """The part of a World that connecting needs."""

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""
        ...


class RankLine(Generic[Received]):
    """The connection to another rank of this machine.

    Args:
        rank: that rank.
        here: this rank, for messages.
        endpoint: the socket.
        kinds: the dataclasses of which messages may come.
    """

    def __init__(self, rank: int, here: int, endpoint: socket.socket, kinds: Iterable[type[Received]]) -> None:
        self.rank = rank
        self._here = here
        self._channel = Channel(endpoint, kinds)
        self._come: deque[tuple[Received, list[int]]] = deque()
        #: False once all has been read that comes from the other end, which is closed, or whose process is gone.
        self.is_open = True
        _lines.add(self)

    def send(self, message: object, fds: Sequence[int] = ()) -> None:
        """Send a message, which is small. The descriptors stay open here.

        Nothing is sent to an end that is closed, and no error is raised: messages that came from there before can still
        be read.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(message, fds)

    def receive(self) -> tuple[Received, list[int]] | None:
        """Return the next message that has come, with its descriptors; None if none has come, or the end is closed."""
        while not self._come and self.is_open and self._is_readable(0):
            self._read()
        return self._come.popleft() if self._come else None

    def wait(self, what: str, seconds: float) -> tuple[Received, list[int]]:
        """Return the next message with its descriptors, once there is one.

        Args:
            what: what has not come, for messages: "rank 0 has not …".
            seconds: the limit.

        Raises:
            CollectiveTimeout: there was none in time.
            PeerLost: the other rank has gone, or has closed its end without a message.
        """
        found = self.wait_unless_closed(what, seconds)
        if found is None:
            known = fates.told([self.rank]) or f"rank {self.rank} ended, or was killed."
            raise PeerLost(f"rank {self._here}: {what}: {known}")
        return found

    def wait_unless_closed(self, what: str, seconds: float) -> tuple[Received, list[int]] | None:
        """Do as :meth:`wait`, but return None if the other end is closed."""
        found = self.receive()
        if found is not None or not self.is_open:
            return found
        limit = time.monotonic() + seconds
        if not self._is_readable(min(_SHORT, seconds)):
            with flight.waiting(f"a message of rank {self.rank}"):
                self._is_readable(limit - time.monotonic())
        while (found := self.receive()) is None and self.is_open:
            left = limit - time.monotonic()
            if left <= 0 or not self._is_readable(left):
                raise CollectiveTimeout(
                    f"rank {self._here}: {what} within {seconds:g} s: it may be stuck or slow, or at another batch or "
                    f"call of the program than this rank{files.told()}"
                )
        return found

    def close(self) -> None:
        """Close this end. Messages that were sent before still arrive."""
        self.is_open = False
        self._channel.close()
        for _, fds in self._come:
            for fd in fds:
                os.close(fd)
        self._come.clear()
        _lines.discard(self)

    def _is_readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        return bool(poll.poll(max(0.0, seconds * 1e3)))

    def _read(self) -> None:
        try:
            self._come.extend(self._channel.receive())
        except EOFError:
            self.is_open = False


#: The open lines of this process, which a forked child closes.
_lines: weakref.WeakSet[RankLine[Any]] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    for line in list(_lines):
        line.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of a machine, as one of them sees them.

    They are not connected if there is only one rank, if one of them does not want it, or if it is not possible.
    """

    #: The ranks of the machine, in order.
    members: tuple[int, ...]
    rank: int
    #: On the leader a line to each other rank, in order, on the others one to the leader; none: they are not connected.
    lines: tuple[RankLine[Any], ...] = ()
    #: The reason why they can't be connected, though all want it; empty: they are connected, or did not try.
    why_not: str = ""

    @property
    def leader(self) -> int:
        """The first rank of the machine."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.leader

    def close(self) -> None:
        """Close this rank's ends of the lines."""
        for line in self.lines:
            line.close()


@dataclass(frozen=True)
class Hello:
    """A follower's first message."""

    rank: int
    word: str


def connect(world: LimitedMembers, kinds: Iterable[type[Any]], *, wants: bool = True) -> LocalRanks:
    """**Collective.** Connect the ranks of this machine, if all of them want it. See Note [Connected ranks].

    Args:
        world: all ranks.
        kinds: the dataclasses of which messages may come, on either end.
        wants: whether this rank wants to be connected; the ranks of another machine may want otherwise.

    Raises:
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    rank = world.rank
    listener: socket.socket | None = None
    name, word, why = "", secrets.token_hex(16), ""
    lines: list[RankLine[Any]] = []
    try:
        if wants:
            listener, name, why = _listen(world.world_size)
        offers = all_gather_records([my_host(), wants, name, word, why], world.group)
        hosts = Hosts.of([offer[0] for offer in offers], rank)
        members = hosts.mine
        _, _, name, word, why = offers[members[0]]
        tries = len(members) > 1 and all(offers[peer][1] for peer in members)
        if tries and name and rank != members[0]:
            line, why = _call(name, Hello(rank, word), members[0], kinds)
            lines += [] if line is None else [line]
        refusals = all_gather_records(why if tries else "", world.group)
        why = next((refusals[peer] for peer in members if refusals[peer]), "")
        if not tries or why:
            for line in lines:
                line.close()
            return LocalRanks(members, rank, why_not=why)
        if rank == members[0]:
            assert listener is not None  # its name was offered
            lines = _take(listener, members[1:], word, rank, kinds, world.timeout)
        return LocalRanks(members, rank, tuple(lines))
    finally:
        if listener is not None:
            listener.close()


def _listen(most: int) -> tuple[socket.socket | None, str, str]:
    """Return a socket that listens, and its name; or None, and the reason why none could be made."""
    name = f"lockstep-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.bind(f"\0{name}")
        listener.listen(most)
    except OSError as error:
        listener.close()
        return None, "", f"no Unix socket can be made here ({error})"
    return listener, name, ""


def _call(name: str, hello: Hello, leader: int, kinds: Iterable[type[Any]]) -> tuple[RankLine[Any] | None, str]:
    """Return the line to the leader that listens at ``name``; or None, and the reason why none could be made."""
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        endpoint.connect(f"\0{name}")
        owner = _owner(endpoint)
        if owner != os.getuid():
            raise PermissionError(f"it is of user {owner}, this one of user {os.getuid()}")
    except OSError as error:
        endpoint.close()
        return None, f"rank {hello.rank} can't reach rank {leader} by a Unix socket ({named(error)})"
    line: RankLine[Any] = RankLine(leader, hello.rank, endpoint, kinds)
    line.send(hello)
    return line, ""


def _take(
    listener: socket.socket, others: Sequence[int], word: str, here: int, kinds: Iterable[type[Any]], seconds: float
) -> list[RankLine[Any]]:
    """Return the lines to ``others``, all of whom have called; other callers are sent away."""
    found: dict[int, RankLine[Any]] = {}
    limit = time.monotonic() + seconds
    while len(found) < len(others):
        listener.settimeout(max(0.001, limit - time.monotonic()))
        try:
            endpoint, _ = listener.accept()
        except TimeoutError:
            missing = [rank for rank in others if rank not in found]
            raise CollectiveTimeout(f"rank {here}: {missing} did not connect within {seconds:g} s") from None
        if _owner(endpoint) != os.getuid():
            endpoint.close()
            continue
        line: RankLine[Any] = RankLine(-1, here, endpoint, [*kinds, Hello])
        try:
            hello, _ = line.wait("another rank has connected, and said nothing", max(0.001, limit - time.monotonic()))
        except LockstepError:  # a process of this user that is no rank
            line.close()
            continue
        if not isinstance(hello, Hello) or not secrets.compare_digest(hello.word, word) or hello.rank not in others:
            line.close()
            continue
        line.rank = hello.rank
        found[hello.rank] = line
    return [found[rank] for rank in others]


def _owner(endpoint: socket.socket) -> int:
    """Return the user whose process is at the other end."""
    _, user, _ = _CREDENTIALS.unpack(endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(user)
