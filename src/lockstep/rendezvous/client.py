"""Meet the other machines of a job, and watch over the round: a process of its own, forked from the zygote.

It is the only part of the launcher that uses torch. Membership is torch's: ``DynamicRendezvousHandler`` over a c10d
store (torch.distributed.elastic, documented as an extension point); it decides who takes part, and nothing else.
What goes on within a round is ours, in keys of the round's own store.

Note [A round]
~~~~~~~~~~~~~~
The machines that have met form a round. Each writes who it is, and reads all others; machine 0 opens a new store on a
free port, at which the ranks meet, so that nothing of an earlier round can be found there (in torch's own agent, ranks
read addresses of the round before). Then each machine counts up its heartbeat twice a second.

A round ends by one *verdict*: the first machine that has a reason to end it writes it down (compare-and-set), and all
act on it. A failure that reads like the echo of another (a lost peer) waits for the real one: until every other machine
has been heard of since, for the peer may have been lost because its whole machine was.

When all ranks of a machine have ended well it says so, and the last machine to say so writes the verdict DONE. The
machine that serves the store leaves last.

Between two rounds there are no ranks, and nobody to write a verdict to: a machine of the last round that is told to
stop then closes the rendezvous, and the others read the job's end there.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import DistError, FileStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from lockstep._torch import quicken_rendezvous
from lockstep.job.messages import Channel, encode
from lockstep.rendezvous.addresses import interface_of, is_only_here, own_address
from lockstep.rendezvous.beats import Beats
from lockstep.rendezvous.clocks import Look, ahead
from lockstep.rendezvous.messages import (
    DEFAULT_PORT,
    SKEW,
    Alive,
    Command,
    End,
    Ended,
    Kind,
    Leave,
    Looks,
    Meet,
    Met,
    Options,
    Refused,
    Round,
    Verdict,
    decode,
)

#: Seconds between two heartbeats, and between two looks at the verdict.
_BEAT, _TICK = 0.5, 0.1
#: How often the machines that have met look at their clocks together.
_CLOCKS = 4
#: Seconds without a sign of life after which a machine is lost.
SILENT = 4.0
#: Seconds that a failure which reads like an echo waits for the real one, at least; more than between two heartbeats.
_ECHO = 1.0
#: Seconds that an operation of a store may take. (A connection that is cut shows as silence long before.)
_OPERATION = 30.0
#: Seconds that the machines which have met wait for each other's word: one of them may have died as it came.
_CARDS = 10.0
#: Seconds within which a store that could not be reached has refused or dropped the connection: it may be going.
_EARLY = 2.0
#: Seconds that the machine with the store waits for the others to leave.
_FAREWELL = 5.0
#: Seconds to wait for more machines once there are enough.
_LAST_CALL = 2.0
#: What torch's handler raises in machines that wait when the job ends: for a place among the others, or as a spare.
_OVER = (RendezvousClosedError, RendezvousGracefulExitError)
#: What comes of a machine that has gone: the one with the store, or another one that was waited for.
_CUT_OFF = (RendezvousConnectionError, RendezvousStateError, DistError, ConnectionError)


def main(fd: int, options: dict[str, Any]) -> NoReturn:
    """Serve a launcher until it says to leave, or is gone.

    Args:
        fd: this end of the socket to the launcher.
        options: the fields of :class:`~lockstep.rendezvous.messages.Options`.
    """
    channel = Channel(socket.socket(fileno=fd))
    client = _Client(channel, Options(**options))
    began = time.monotonic()
    try:
        client.serve()
    except EOFError:
        pass  # the launcher is gone
    except Exception as error:  # noqa: BLE001  (whatever it is, the launcher tells the user; nobody reads this process)
        again = isinstance(error, _CUT_OFF) and (client.is_connected or time.monotonic() - began < _EARLY)
        channel.send(encode(Refused(_words(error, client.endpoint, client.ended), client.exit_code, again)))
    os._exit(0)  # nothing here needs torch's teardown


class _Left(Exception):
    """The launcher said to leave."""


class _Client:
    def __init__(self, channel: Channel, options: Options) -> None:
        self._channel = channel
        self._options = options
        self._commands: list[Command] = []
        self.endpoint = options.endpoint
        #: What the launcher is to end with if the machines can't meet.
        self.exit_code = 1
        #: Why the job is over that did not need this machine any more, where there is more to say.
        self.ended = ""
        #: Whether the store that the machines meet at has answered.
        self.is_connected = False
        #: The number of the last round that this machine took part in, and the round, if this process was there.
        self._last = -1
        self._round: Round | None = None
        #: Whether it waits for the next one.
        self._meets = False
        self._serves = False
        self._server: Store | None = None

    def serve(self) -> None:
        meet = self._wait_for_meet()
        self._connect()
        try:
            while True:
                self._tell_the_last_round(meet)
                self._round = self._meet(meet)
                self._attend(self._round)
                meet = self._wait_for_meet()
        except _Left:
            return

    # Commands ----------------------------------------------------------------------------------------------------

    def _hear(self, seconds: float) -> Iterator[Command]:
        """Yield what the launcher says within some seconds, if anything; leave if it says so."""
        if not self._commands and select.select([self._channel], [], [], max(0.0, seconds))[0]:
            for fields, _ in self._channel.receive():
                command = decode(fields)
                assert isinstance(command, Command)
                self._commands.append(command)
        while self._commands:
            command = self._commands.pop(0)
            if isinstance(command, Leave):
                self._leave(command)
            yield command

    def _wait_for_meet(self) -> Meet:
        while True:
            for command in self._hear(3600.0):
                if isinstance(command, Meet):
                    return command

    def _say(self, message: object) -> None:
        self._channel.send(encode(message))

    # The rendezvous ----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        options = self._options
        limit = timedelta(seconds=options.join_timeout)
        kind, _, path = options.endpoint.partition(":")
        if kind == "file":
            self._base: Store = FileStore(path)
            self._address = options.local_addr or own_address(None)
        else:
            host, port = _split(options.endpoint)
            if is_only_here(host, port):
                host = options.local_addr or own_address(None)
            self._address = options.local_addr or own_address((host, port))
            listener = _listen(host, port)
            self._serves = listener is not None
            self._base = TCPStore(
                host,
                port,
                is_master=self._serves,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        self._base.set_timeout(timedelta(seconds=_OPERATION))
        self.is_connected = True
        # torch's agent shares one store between all rounds unless this is set; then its handler remembers the address
        # of a machine that may have left (it reads the variable at each round).
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._handler = DynamicRendezvousHandler.from_backend(
            options.job,
            self._base,
            C10dRendezvousBackend(self._base, options.job),
            options.min_nodes,
            options.max_nodes,
            self._address,
            RendezvousTimeout(join=timedelta(seconds=options.join_timeout), last_call=timedelta(seconds=_LAST_CALL)),
            keep_alive_interval=1,
            keep_alive_max_attempt=4,
        )
        quicken_rendezvous(self._handler, self._wait_for_others)

    def _key(self, name: str) -> str:
        return f"lockstep/{self._options.job}/{name}"

    def _tell_the_last_round(self, meet: Meet) -> None:
        """Let the other machines of a round that this one can't go on with know it, if they are still in it."""
        if meet.lost and meet.last >= 0:
            verdict = Verdict(Kind.LOST, -1, meet.lost)
            self._base.compare_set(self._key(f"{meet.last}/verdict"), "", json.dumps(verdict.to_json()))

    def _meet(self, meet: Meet) -> Round:
        """Take part in the next round; see Note [A round]."""
        self._server = None  # of the round before
        self._last, self._meets = meet.last, True
        self._base.add(self._key("waiting"), 1)
        try:
            info = self._handler.next_rendezvous()
        except _OVER:
            self.exit_code, self.ended = json.loads(self._base.get(self._key("result")))
            self._base.add(self._key(f"{meet.last}/left"), 1)
            raise
        finally:
            self._base.add(self._key("waiting"), -1)
        self._store, self._node, nodes = info.store, info.rank, info.world_size
        card = {
            "ranks": self._options.ranks,
            "host": f"{socket.gethostname()}, {self._address}",
            "last": meet.last,
            "job": meet.job,
            "history": meet.history,
            "challenge": secrets.token_hex(32),
        }
        self._store.set(f"card/{self._node}", json.dumps(card))
        try:
            self._store.wait([f"card/{node}" for node in range(nodes)], timedelta(seconds=_CARDS))
        except DistError as error:
            raise ConnectionError("a machine that had come has gone before the ranks could start") from error
        cards = [json.loads(self._store.get(f"card/{node}")) for node in range(nodes)]
        self._prove([card["challenge"] for card in cards], [card["host"] for card in cards])
        if self._node == 0:
            listener = socket.create_server(
                (self._address, 0), family=socket.AF_INET6 if ":" in self._address else socket.AF_INET
            )
            port = listener.getsockname()[1]
            self._server = TCPStore(
                self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            counted = self._base.add(self._key("rounds"), 1) - 1
            newest = max(card["last"] for card in cards) + 1  # more where a store was lost with its counter
            if newest > counted:
                self._base.add(self._key("rounds"), newest - counted)
            number = max(counted, newest)
            job = max(cards, key=lambda card: int(card["last"]))["job"] or secrets.token_hex(16)
            self._store.set("round", json.dumps([number, self._address, port, job]))
        number, address, port, job = json.loads(self._store.get("round"))
        walls, looks = self._look_at_clocks(nodes)
        known = max((card["history"] for card in cards), key=lambda history: int(history.get("used", 0)))
        round_ = Round(
            node_rank=self._node,
            ranks=tuple(card["ranks"] for card in cards),
            address=address,
            port=port,
            number=number,
            job=job,
            hosts=tuple(card["host"] for card in cards),
            history=known,
            interface=interface_of(self._address),
            served=True,
            clock=ahead(looks[self._node], looks[0]),
        )
        self._last, self._meets = number, False
        self._verdict_key = self._key(f"{number}/verdict")
        self._say(Met(vars(round_), _skew(walls, round_)))
        return round_

    def _wait_for_others(self, seconds: float) -> None:
        """Wait a moment until torch's rendezvous looks again, or leave if the launcher says so."""
        for _ in self._hear(min(seconds, _TICK)):
            pass  # nothing else is said meanwhile

    def _prove(self, challenges: list[str], hosts: list[str]) -> None:
        """Show that this machine knows the job's key, and that the others do: a keyed digest (HMAC, RFC 2104) of what
        all of them have drawn for this round."""
        key = bytes.fromhex(self._options.key)

        def proof(node: int) -> str:
            return hmac.new(key, json.dumps([node, challenges]).encode(), hashlib.sha256).hexdigest()

        self._store.set(f"proof/{self._node}", proof(self._node) if key else "none")
        for node, host in enumerate(hosts):
            given = self._store.get(f"proof/{node}").decode()
            if not hmac.compare_digest(given, proof(node) if key else "none"):
                raise ValueError(
                    f"machine {node} ({host}) does not know the job's key that this machine has"
                    if key
                    else f"machine {node} ({host}) has a key for this job, and this machine has none"
                )

    def _look_at_clocks(self, nodes: int) -> tuple[list[float], list[list[Look]]]:
        """Return what the machines' wall clocks show at one moment, to within the time that a message takes, and what
        each has seen of :func:`ahead`'s looks."""
        looks = []
        for number in range(_CLOCKS):
            before = time.monotonic_ns()
            self._store.set(f"here/{number}/{self._node}", "")
            self._store.wait([f"here/{number}/{node}" for node in range(nodes)])
            looks.append((before, time.monotonic_ns()))
        self._store.set(f"clock/{self._node}", json.dumps([time.time(), looks]))
        said = [json.loads(self._store.get(f"clock/{node}")) for node in range(nodes)]
        return [wall for wall, _ in said], [[(first, last) for first, last in seen] for _, seen in said]

    # The round ---------------------------------------------------------------------------------------------------

    def _attend(self, round_: Round) -> None:
        """Watch over the round until it has a verdict."""
        now = time.monotonic()
        others = [node for node in range(len(round_.ranks)) if node != self._node]
        beats, count, next_beat = Beats(others, now, silent=SILENT), 0, now
        echo: tuple[Verdict, float] | None = None
        ranks: list[list[Any]] = []
        while True:
            now = time.monotonic()
            if now >= next_beat:
                if now - next_beat > SILENT / 2:  # this process stood still, and heard nobody
                    beats.pause(now - next_beat)
                next_beat, count = now + _BEAT, count + 1
                others_ranks = self._beat(beats, [count, ranks], now)
                waiting = self._handler.num_nodes_waiting() if self._node == 0 else 0
                self._say(Alive(waiting, others_ranks))
                lost = beats.lost(now)
                if lost:
                    who = ", ".join(round_.host(node) for node in lost)
                    self._write(Verdict(Kind.LOST, self._node, f"{who} gave no sign of life for {SILENT:g} s"))
            # What was counted up before is read up to a heartbeat later; so what counts is what is heard after a while.
            if echo is not None and beats.heard_since(echo[1] + _ECHO):
                self._write(echo[0])
            if self._base.check([self._verdict_key]):
                self._say(Ended(json.loads(self._base.get(self._verdict_key))))
                return
            for command in self._hear(_TICK):
                if isinstance(command, Looks):
                    ranks = command.ranks
                if isinstance(command, End):
                    verdict = Verdict.from_json(command.verdict)
                    if verdict.kind is Kind.DONE:
                        if self._store.add("done", 1) == len(round_.ranks):
                            self._write(verdict)
                    elif verdict.echo:
                        echo = verdict, time.monotonic()
                    else:
                        self._write(verdict)

    def _beat(self, beats: Beats, beat: list[Any], now: float) -> list[list[Any]]:
        """Give a sign of life and take the others'. Return how their ranks are."""
        self._store.set(f"alive/{self._node}", json.dumps(beat))
        known = [node for node in beats.nodes if self._store.check([f"alive/{node}"])]
        ranks: list[list[Any]] = []
        if known:
            for node, value in zip(known, self._store.multi_get([f"alive/{node}" for node in known]), strict=True):
                count, theirs = json.loads(value)
                beats.hear(node, count, now)
                ranks += theirs
        return ranks

    def _write(self, verdict: Verdict) -> None:
        self._base.compare_set(self._verdict_key, "", json.dumps(verdict.to_json()))

    def _leave(self, command: Leave) -> NoReturn:
        """Leave; the machine that serves the store does so when the others have, and those that wait to join."""
        if command.over and self._is_current():
            self._base.set(self._key("result"), json.dumps([command.exit_code, command.why]))
            self._handler.set_closed()
            machines = 1 if self._round is None else len(self._round.ranks)
            kind, _, path = self._options.endpoint.partition(":")
            left = self._base.add(self._key(f"{self._last}/left"), 1)
            limit = time.monotonic() + _FAREWELL
            stays = self._serves or self._server is not None or (kind == "file" and self._meets)
            while stays and time.monotonic() < limit:
                if left >= machines and self._base.add(self._key("waiting"), 0) <= int(self._meets):
                    break
                select.select([], [], [], 0.02)
                left = self._base.add(self._key(f"{self._last}/left"), 0)
            # Only who waits for the others removes the file: one that looked into it later would make it anew.
            if kind == "file" and stays and left >= machines:
                Path(path).unlink(missing_ok=True)
        raise _Left

    def _is_current(self) -> bool:
        """Return whether this machine took part in the job's last round, so that it may speak for the job."""
        return self._last >= 0 and self._base.add(self._key("rounds"), 0) == self._last + 1


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(DEFAULT_PORT))
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket | None:
    """Listen at ``host``, on that address only, if it is one of this machine and nobody does so yet."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        server = socket.socket(family, kind, protocol)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
            server.listen(1024)
        except OSError as error:
            server.close()
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
                raise
        else:
            return server
    return None


def _skew(clocks: list[float], round_: Round) -> str:
    """Say by how much the machines' clocks differ, if it is too much."""
    fastest, slowest = max(clocks), min(clocks)
    if fastest - slowest <= SKEW:
        return ""
    return (
        f"the clock of {round_.host(clocks.index(fastest))} is {fastest - slowest:.0f} s ahead of that of "
        f"{round_.host(clocks.index(slowest))}: torch's rendezvous compares them, and loses machines that are more "
        "than 4 s behind; set them (chrony, ntpd)"
    )


def _words(error: Exception, endpoint: str, ended: str) -> str:
    """Say why the machines could not meet; ``ended`` is why the job is over, where there is more to say."""
    if isinstance(error, RendezvousTimeoutError):
        return f"too few machines came to {endpoint} in time (--join-timeout): run the same command on each of them"
    if isinstance(error, _OVER):
        if ended:
            return ended
        kind, _, path = endpoint.partition(":")
        again = f" (to run it again: remove {path}, or give it another --rdzv-id)" if kind == "file" else ""
        return f"the job at {endpoint} is over, and did not need this machine any more{again}"
    if not isinstance(error, (RendezvousError, RuntimeError, OSError, ValueError)):
        return "".join(traceback.format_exception(error))
    cause: BaseException = error
    while cause.__cause__ is not None and not isinstance(cause, ConnectionError):
        cause = cause.__cause__
    what = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
    hint = ""
    if not endpoint.startswith("file:") and isinstance(error, _CUT_OFF):
        hint = (
            ". Is that machine up and reachable, and does the same command run there? Start the command again on all "
            "machines to go on from the last checkpoint; --rdzv file:FOLDER, on a shared disk, survives any one of them"
        )
    return f"the rendezvous at {endpoint} failed: {what}{hint}"
