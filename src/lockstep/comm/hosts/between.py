"""Move bytes between ranks of different hosts by gloo, and tell other hosts when something is wrong.

Note [Waiting for another host]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that waits for bytes of another host sleeps inside gloo, where it sees nothing of what its own host's memory or
the other hosts say. So a thread of the group, the *watch*, looks for it, a few times a second while a wait lasts:

- Has the group ended on this host (another rank of it died, or found a difference)? Then the watch breaks gloo's
  connections, which ends every wait in it, here and at the other ends.
- Has it ended on another host? The rank that ends a group writes why under a key of the store, and what stands there
  first counts for all hosts: so each rank of the job raises the same error, which names the rank that is to blame.
- Has the wait's limit come? Which rank is late only its own host knows, whose other ranks may have been there for less
  time than this one, and have time left. So the watch asks, by another key. A rank that waits at the begin of a
  collective for a rank of its own host, and finds the question, ends the group and names that rank. If none does within
  a second, the other host as a whole is late, and the error says that.

Only the watch asks the store, never a thread that the program waits for: a store whose host is cut off answers when the
kernel gives up, a quarter of an hour later. Then gloo's own limit ends the wait, a few seconds after this one's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    PrefixStore,
    ProcessGroupGloo,
    Store,
)

from lockstep.comm.group.failures import again, dumps, loads
from lockstep.comm.group.fingerprint import HEADER, KEY, describe
from lockstep.comm.hosts.grouping import Hosts
from lockstep.comm.shm.health import Health
from lockstep.errors import CollectiveMismatch, CollectiveTimeout, LockstepError, PeerLost
from lockstep.job import fates, files, flight
from lockstep.text import which_ranks

#: Seconds between two looks of the watch, and how long a wait lasts before it asks the store.
_TICK = 0.1
_PATIENCE = 0.3
#: Seconds that the watch stays awake after the last wait: shorter than a step, so that training does not wake it up.
_AWAKE = 5.0
#: Seconds for an answer of the other hosts, to a question and after a connection broke ...
_ANSWER = 1.0
#: ... for the store to take what is written to it, and that gloo's own limit comes later than ours.
_TELLING = 2.0
_LATER = 5.0
#: Bytes that go with a greeting: a tensor that is no larger needs no message of its own.
EAGER = 4096
#: Tags: of greetings; of all other bytes between ranks, which are counted; and one under which nothing is ever sent.
_GREETING = 1
_COUNTED, _COUNTS = 1 << 29, 1 << 28
_NEVER = (1 << 30) - 1
#: The first of the tags for messages, and the number of them.
_MAIL = 1 << 28
#: gloo's limit for a wait that has none of its own.
_ANY = timedelta(days=1)


@dataclass
class Wait:
    """One thread's wait for ranks of other hosts."""

    #: The ranks of the group that it waits for.
    ranks: Sequence[int]
    what: str
    #: The limit in seconds; None: none is set yet.
    limit: float | None
    begun: float = field(default_factory=time.monotonic)
    asked: float | None = None


class _Failed:
    """A transfer that gloo refused to begin, since a connection is broken: waiting for it raises the error."""

    def __init__(self, error: Exception) -> None:
        self._error = RuntimeError(str(error))

    def wait(self, _timeout: timedelta) -> None:
        raise self._error


class _Closed:
    """Takes gloo's place once the connections are closed."""

    def send(self, *_: Any) -> None:
        raise RuntimeError("the connections are closed")

    recv = recv_anysource = send


class Between:
    """Sends bytes to ranks of other hosts, and receives theirs, for one rank."""

    def __init__(self, store: Store, hosts: Hosts, *, timeout: float) -> None:
        """**Collective.** Connect every rank with every other.

        Args:
            store: where the ranks meet; kept, for what hosts tell each other.
            hosts: which ranks share one.
            timeout: seconds to wait for the other ranks.
        """
        self._hosts = hosts
        self._store = store
        size = sum(map(len, hosts.members))
        # Made from the store: new_group(use_local_synchronization=True) names a group by how many this process has, and
        # ranks that have different numbers of groups never meet.
        self._gloo: Any = ProcessGroupGloo(PrefixStore("gloo", store), hosts.rank, size, timedelta(seconds=timeout))
        self._sent = [0] * size
        self._received = [0] * size
        #: Greetings to come, by leader: asked for in advance, so that the first bytes need no question.
        self._coming: dict[int, tuple[torch.Tensor, Any]] = {}
        self._going: list[tuple[torch.Tensor, Any]] = []
        self._health: Health | None = None
        self._waits: dict[int, Wait] = {}
        self._wake = threading.Event()
        self._awake_until = 0.0
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()
        self._broken = False
        self._closed = False
        #: The beginning and end of this rank's last wait for a rank of its own host.
        self._waiting_here = (0.0, 0.0)
        #: True if a connection broke and the reason is asked for.
        self._urgent = False
        self._asked = False

    def watch(self, health: Health) -> None:
        """End the host's group, from now on, when another host's has ended."""
        self._health = health
        if self._hosts.leads:
            self._expect_greetings()

    # --- greetings -------------------------------------------------------------------------------------------------

    def greet(self, header: bytes, limit: float, payload: torch.Tensor | None = None) -> None:
        """**Leaders.** Say which collective this host is in, with the bytes of a small tensor.

        Args:
            header: what the ranks of the host have agreed on (group/fingerprint.py).
            limit: seconds that another host may be late.
            payload: at most :data:`EAGER` bytes.
        """
        self.wait([work for _, work in self._going], self._hosts.other_leaders, header, limit=limit)
        message = torch.zeros(HEADER + EAGER, dtype=torch.uint8, device="cpu")
        message[:HEADER] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        if payload is not None:
            message[HEADER : HEADER + payload.numel()] = payload
        self._going = [(message, self._send(message, leader, _GREETING)) for leader in self._hosts.other_leaders]

    def greeted(self, header: bytes, limit: float) -> dict[int, torch.Tensor]:
        """**Leaders.** Return what came with the other leaders' greetings, by leader, when all have greeted.

        Raises:
            CollectiveMismatch: another host is in another collective.
            CollectiveTimeout, PeerLost: another host, or a rank there, is late or gone.
        """
        coming, self._coming = self._coming, {}
        for leader, (_, work) in coming.items():
            self.wait([work], [leader], header, limit=limit)
        self._expect_greetings()
        said = {self._hosts.rank: header}
        said |= {leader: bytes(message[:HEADER].numpy()) for leader, (message, _) in coming.items()}
        if any(theirs[:KEY] != header[:KEY] for theirs in said.values()):
            lines = "".join(f"  rank {leader}: {describe(said[leader])}\n" for leader in sorted(said))
            raise self._end(
                CollectiveMismatch(
                    f"rank {self._hosts.rank}: the hosts' ranks are in different collectives, or in one with different "
                    f"arguments:\n{lines}"
                    "Every rank must issue the same collectives in the same order, with tensors of equal size and "
                    "dtype."
                )
            )
        return {leader: message[HEADER:] for leader, (message, _) in coming.items()}

    def _expect_greetings(self) -> None:
        for leader in self._hosts.other_leaders:
            message = torch.empty(HEADER + EAGER, dtype=torch.uint8, device="cpu")
            self._coming[leader] = message, self._receive(message, leader, _GREETING)

    # --- bytes -----------------------------------------------------------------------------------------------------

    def send(self, content: torch.Tensor, to: int) -> Any:
        """Begin to send bytes, which must not change until gloo's work is complete; the other end asks for as many."""
        self._sent[to] += 1
        return self._send(content, to, _COUNTED + self._sent[to] % _COUNTS)

    def receive(self, content: torch.Tensor, source: int) -> Any:
        """Begin to receive what :meth:`send` sends there, in the same order."""
        self._received[source] += 1
        return self._receive(content, source, _COUNTED + self._received[source] % _COUNTS)

    def _send(self, content: torch.Tensor, to: int, tag: int) -> Any:
        try:
            return self._gloo.send([content], to, tag)
        except RuntimeError as error:
            return _Failed(error)

    def _receive(self, content: torch.Tensor, source: int | None, tag: int) -> Any:
        try:
            if source is None:
                return self._gloo.recv_anysource([content], tag)
            return self._gloo.recv([content], source, tag)
        except RuntimeError as error:
            return _Failed(error)

    @property
    def numbers(self) -> int:
        """See :class:`Transport`."""
        return _MAIL

    def message(self, content: torch.Tensor, number: int, *, to: int | None = None, source: int | None = None) -> Any:
        """Begin to send bytes to a rank, or to receive them from ``source`` or (neither) any rank, by a number of the
        caller's, below :attr:`numbers`, that only messages use."""
        if to is not None:
            return self._send(content, to, _MAIL + number)
        return self._receive(content, source, _MAIL + number)

    def wait(self, works: Sequence[Any], ranks: Sequence[int], header: bytes, *, limit: float) -> None:
        """Wait for gloo's works.

        Args:
            works: begun with :meth:`send` and :meth:`receive`.
            ranks: whose bytes they wait for.
            header: what this rank is in.
            limit: seconds that the ranks may be late.

        Raises:
            LockstepError: the group has ended; see Note [Waiting for another host].
        """
        if works:
            self.wait_as(Wait(ranks, describe(header), limit), works)

    def wait_as(self, wait: Wait, works: Sequence[Any]) -> None:
        """Do as :meth:`wait`, for a wait whose limit another thread may set."""
        key = id(wait)
        self._waits[key] = wait
        self._stay_awake()
        patience = _ANY if wait.limit is None else timedelta(seconds=wait.limit + _ANSWER + _LATER)
        try:
            with flight.waiting(wait.what):
                for work in works:
                    work.wait(patience)
        except RuntimeError as error:
            raise self._why(error, wait) from error
        finally:
            del self._waits[key]
        if self._health is not None:  # the watch may have ended the group, and not yet broken the connections
            self._health.check()

    def _why(self, error: RuntimeError, wait: Wait) -> LockstepError:
        """Return the error to raise for gloo's: what a host has said, if one says it soon, else gloo's own words."""
        health = self._health
        assert health is not None  # set when the engine was made
        if self._closed:
            return LockstepError(f"rank {self._hosts.rank} destroyed the process group")
        self._urgent = True
        until = time.monotonic() + _ANSWER + _PATIENCE
        while health.known() is None and time.monotonic() < until:
            time.sleep(_TICK / 5)
        known = health.known()
        if known is not None:
            return again(known)
        if "timed out" in str(error).lower():
            return self._end(self._late(wait))
        ended = fates.told(wait.ranks)
        return self._end(
            PeerLost(
                (f"{ended} " if ended else "")
                + f"rank {self._hosts.rank} waits in {wait.what} for {which_ranks(wait.ranks)} on another host, which "
                "is gone or can't be reached. The error to look for is that rank's own, or its host's; this group "
                f"can't be used any more. gloo says: {error}"
            )
        )

    def _late(self, wait: Wait) -> CollectiveTimeout:
        hosts = sorted({self._hosts.where(rank)[0] for rank in wait.ranks})
        where = "; ".join(f"host {host}, with {which_ranks(self._hosts.members[host])}" for host in hosts)
        return CollectiveTimeout(
            f"{which_ranks(wait.ranks)} on another host did not come: rank {self._hosts.rank} timed out after "
            f"{time.monotonic() - wait.begun:.3g} s in {wait.what}. No rank there waits in this collective for another "
            f"one of its host ({where}), or the host can't be reached. Find out what keeps it, or allow more time "
            "(timeout=… of init_process_group or lockstep.init)." + files.told()
        )

    def _end(self, error: LockstepError) -> LockstepError:
        assert self._health is not None  # set when the engine was made
        return self._health.end(error)

    # --- what hosts tell each other --------------------------------------------------------------------------------

    def tell(self, error: LockstepError) -> None:
        """Tell the other hosts what has ended the group; the first error that a host tells counts for all."""
        telling = threading.Thread(target=self._write, args=("ended", dumps(error)), name="lockstep-tells", daemon=True)
        with contextlib.suppress(RuntimeError):  # no room for a thread: the others find out by themselves
            telling.start()
            telling.join(_TELLING)

    def _write(self, key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store's host is gone, as others see as well
            self._store.compare_set(key, "", text)

    def asked(self) -> bool:
        """Return whether another host asks which rank is late; to be called now and then in a wait for one of ours."""
        now = time.monotonic()
        since, until = self._waiting_here
        self._waiting_here = (since if now - until < _PATIENCE else now), now
        self._stay_awake()
        return self._asked

    def _stay_awake(self) -> None:
        """Keep the watch awake: this rank waits."""
        self._awake_until = time.monotonic() + _AWAKE
        if self._wake.is_set():
            return
        with self._starting:
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._watch, name="lockstep-between", daemon=True)
                thread.start()
                self._thread = thread
        self._wake.set()

    def _watch(self) -> None:
        """Run the watch; see Note [Waiting for another host]."""
        flight.in_background()
        while not self._closed:
            self._wake.wait()
            time.sleep(_TICK)
            if self._closed or self._broken:
                return
            if time.monotonic() > self._awake_until and not self._waits:
                self._wake.clear()
                continue
            try:
                self._look()
            except RuntimeError:  # the store's host is gone, as others see as well
                continue

    def _look(self) -> None:
        health = self._health
        assert health is not None  # set when the engine was made
        now = time.monotonic()
        since, until = self._waiting_here
        lasting = now - until < _PATIENCE < now - since
        waits = list(self._waits.values())
        if health.known() is None and (lasting or self._urgent or any(now - w.begun > _PATIENCE for w in waits)):
            self._ask(now, waits)
        if health.known() is not None:
            self._break()

    def _ask(self, now: float, waits: Sequence[Wait]) -> None:
        health = self._health
        assert health is not None  # set when the engine was made
        if self._store.check(["ended"]):
            health.end(loads(self._store.get("ended")))
            return
        if self._store.check(["asked"]):
            self._asked = int(self._store.get("asked")) != self._hosts.host
        for wait in waits:
            if wait.limit is None or now - wait.begun < wait.limit:
                continue
            if wait.asked is None:
                wait.asked = now
                self._write("asked", str(self._hosts.host))
            elif now - wait.asked >= _ANSWER:
                health.end(self._late(wait))

    def _break(self) -> None:
        """End every wait in gloo, here and at the other ends: gloo does so when any of its waits takes too long."""
        self._broken = True
        if not self._hosts.other_leaders:
            return
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        work = self._receive(nothing, self._hosts.other_leaders[0], _NEVER)
        with contextlib.suppress(RuntimeError):  # as intended
            work.wait(timedelta(milliseconds=1))

    def close(self) -> None:
        """End the watch, and the connections; what still waits gets an error."""
        if self._health is not None and self._health.known() is None:
            for _, work in self._going:  # the last greetings, which other hosts wait for
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=_LATER))
        self._closed = True
        if self._waits:
            self._break()
        self._wake.set()
        self._gloo = _Closed()
        self._coming.clear()
        self._going.clear()
