"""Meet the other machines of a job, and watch over the round: a process of its own, forked from the zygote.

It is the only part of the launcher that uses torch, and of torch only its stores: keys with values, in the memory of
one machine (``TCPStore``) or in a file that all share (``FileStore``). What the machines write there is JSON. Who takes
part is decided as Note [Membership] in ``membership.py`` says.

Note [A round]
~~~~~~~~~~~~~~
The machines that have met form a round. Machine 0 opens a new store on a free port, at which the ranks meet, so that it
holds nothing of an earlier round (in torch's own agent, ranks read addresses of the round before). Each machine counts
up its signs of life twice a second, from when it comes until it leaves.

A round ends by one *verdict*: the first machine that has a reason to end it writes it down (compare-and-set), and all
act on it. A failure that reads like the echo of another (a lost peer) is held back until every other machine that is
needed has given a sign of life since, for the peer may have been lost with its whole machine.

When all ranks of a machine have succeeded it says so, and the last machine to say so writes the verdict DONE. A machine
that has said so is no longer needed: it may be silent, or gone, until the others have ended. The machine that serves
the store leaves last.

Between two rounds there are no ranks, and no round that a verdict could end: a machine of the last round that is told
to stop then writes down the job's result, and the others read the job's end there.

No machine blocks inside the store: while it waits, it polls the store, hears its launcher, and gives signs of life.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import socket
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not in torch's stubs

from lockstep import _proc, knobs
from lockstep.job.messages import Channel
from lockstep.rendezvous.addresses import interface_of
from lockstep.rendezvous.clocks import Look, ahead
from lockstep.rendezvous.endpoint import Knock, check_file
from lockstep.rendezvous.membership import (
    Card,
    RoundAttempt,
    decode_card,
    differences,
    encode_card,
    enough,
    misfits_end_it,
    objection,
    proof,
)
from lockstep.rendezvous.messages import (
    SKEW,
    Alive,
    Command,
    End,
    Ended,
    EndKind,
    Leave,
    Looking,
    Looks,
    Meet,
    Met,
    Options,
    Refused,
    Round,
    Verdict,
)
from lockstep.rendezvous.signs import Signs
from lockstep.text import counted, sentence
from lockstep.version import __version__

#: Seconds between two looks at the verdict, and, while machines meet, between two signs of life.
_TICK = 0.1
#: The number of times that the machines that have met compare their clocks.
_CLOCKS = 4
#: Seconds that an operation of a store may take. (A connection that is cut shows as silence long before.)
_OPERATION = 30.0
#: Seconds that the machine with the store waits for the others to leave where no job can begin, as long as they give
#: signs of life.
_DISMISSAL = 60.0
#: The advice when the store is lost in the middle of a job.
_AGAIN = (
    ". Is that machine up and reachable, and does the same command run there? Start the command again on all machines "
    "to resume from the last checkpoint; --rdzv file:FOLDER, on a shared disk, survives any of them"
)


def main(fd: int, options: dict[str, Any]) -> NoReturn:
    """Serve a launcher until it says to leave, or is gone.

    Args:
        fd: this end of the socket to the launcher.
        options: the fields of :class:`~lockstep.rendezvous.messages.Options`.
    """
    channel: Channel[Command] = Channel(socket.socket(fileno=fd), Command.__args__)
    client = _Client(channel, Options(**options))
    try:
        client.serve()
    except (EOFError, BrokenPipeError):
        pass  # the launcher is gone
    except _Refusal as error:
        channel.send(Refused(str(error), error.exit_code))
        client.say_gone()
    except Exception as error:  # noqa: BLE001  (whatever it is, the launcher tells the user; no one reads this process)
        # torch's stores have no type of their own for all that goes wrong in them.
        again = isinstance(error, (RuntimeError, ConnectionError)) and client.is_connected
        channel.send(Refused(_words(error, client.endpoint, cut_off=again), 1, again))
    os._exit(0)  # nothing here needs torch's teardown


class _Left(Exception):
    """The launcher said to leave."""


class _Refusal(Exception):
    """This machine can't take part: the text for the user, and the exit code for its launcher."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class _Client:
    def __init__(self, channel: Channel[Command], options: Options) -> None:
        self._channel = channel
        self._options = options
        self._times = knobs.times()
        self._commands: list[Command] = []
        self.endpoint = options.endpoint
        #: True if the store at which the machines meet has answered.
        self.is_connected = False
        self._name = secrets.token_hex(8)
        self._base: Store | None = None
        self._address = ""
        self._serves = False
        #: The server of the round's store, if it is here; ranks of other machines may need it until the next round.
        self._server: Store | None = None
        #: The number of the last round that this machine took part in; -1: none.
        self._last = -1
        #: That round and the attempt that made it, if this process took part in it.
        self._round: Round | None = None
        self._attempt: RoundAttempt | None = None
        #: The monotonic time by which the attempt must succeed; the reason why the one before it failed.
        self._form_by, self._why_not = float("inf"), ""
        #: True while this machine waits for the next round.
        self._meets = False
        self._verdict_key = ""
        #: This machine's count of signs of life; the time of the next one; the states of its ranks.
        self._count, self._next_beat = 0, 0.0
        self._ranks: list[list[Any]] = []
        self._signs = Signs(self._times.silent)
        #: Ticket -> the card, and True if its machine has proved that it knows the key.
        self._cards: dict[int, tuple[Card, bool]] = {}
        #: Tickets that were drawn and whose cards are still to be read; the last ticket that was drawn.
        self._unread: set[int] = set()
        self._drawn = 0
        #: Tickets of the misfits that the launcher was told of.
        self._named: set[int] = set()
        #: This machine's first ticket; the time since which too few machines fit, though enough have come.
        self._first = 0
        self._hopeless_since: float | None = None
        #: The job's result that existed when this machine came; None: it has not looked yet.
        self._found_result: str | None = None
        #: The attempt whose machines this one waits for; the time since which it waits.
        self._waits_for, self._waits_since = 0, 0.0
        #: The time at which the search ends; the last message about it.
        self._limit = float("inf")
        self._next_word, self._said = 0.0, ""

    def serve(self) -> None:
        meet = self._wait_for_meet()
        try:
            self._connect(meet)
            while True:
                self._tell_the_last_round(meet)
                self._round = self._meet(meet)
                self._attend(self._round)
                meet = self._wait_for_meet()
        except _Left:
            return

    def say_gone(self) -> None:
        """Tell the others that this machine no longer takes part, so that they do not wait for its signs of life, and
        how many tickets were drawn by then: who came later never met it."""
        if self._base is not None:
            with suppress(RuntimeError):  # the store has gone, and with it whoever looks there
                self._write(f"gone/{self._name}", self._base.add(self._key("tickets"), 0))

    # Commands ----------------------------------------------------------------------------------------------------

    def _hear(self, seconds: float) -> Iterator[Command]:
        """Yield what the launcher says within some seconds, if anything; leave if it says so. Give signs of life."""
        self._beat()
        if not self._commands and select.select([self._channel], [], [], max(0.0, seconds))[0]:
            self._commands.extend(command for command, _ in self._channel.receive())
        while self._commands:
            command = self._commands.pop(0)
            if isinstance(command, Leave):
                self._leave(command)
            yield command

    def _idle(self, seconds: float) -> None:
        """Let some time pass, during which the launcher's only message can be to leave."""
        for _ in self._hear(seconds):
            pass

    def _wait_for_meet(self) -> Meet:
        while True:
            try:
                for command in self._hear(self._times.beat):
                    if isinstance(command, Meet):
                        return command
            except RuntimeError:
                # The store is gone, which ends the next meeting, with what to do about it. Until then there is nothing
                # to tell the others.
                self._next_beat = float("inf")

    def _say(self, message: object) -> None:
        self._channel.send(message)

    def _look_on(self, text: str) -> None:
        """Tell the launcher that this client is still looking, and the user what for, if that has changed."""
        now = time.monotonic()
        new = text if text != self._said else ""
        if new or now >= self._next_word:
            self._next_word, self._said = now + self._times.beat, text or self._said
            self._say(Looking(self._limit - now, new))

    # The store ---------------------------------------------------------------------------------------------------

    def _connect(self, meet: Meet) -> None:
        """Reach the store, or open it where it is to be. Others may start earlier than the machine that serves it, and
        its name may be known only later, so this tries again until the time for all is over."""
        began = time.monotonic()
        self._limit = began + (self._options.join_timeout if meet.seconds is None else meet.seconds)
        doubtful, why = False, f"no answer from {self._options.endpoint} yet"
        while True:
            knock = Knock(self._options.endpoint, self._options.local_addr, doubtful=doubtful)
            knock.start()
            abandoned = min(self._limit, time.monotonic() + self._times.answer)
            while knock.is_alive() and time.monotonic() < abandoned:
                self._look_on(self._said)
                for _ in self._hear(0.005):
                    pass
            if not knock.is_alive() and knock.error is not None:
                raise knock.error
            if not knock.is_alive() and knock.store is not None:
                break
            doubtful, why, now = knock.connected, knock.why or why, time.monotonic()
            if now >= self._limit:
                raise _Refusal(
                    f"the rendezvous at {self.endpoint} failed: {why}; this lasted until --join-timeout"
                    + (_AGAIN if meet.last >= 0 else "")
                )
            self._look_on(
                self._said
                if now - began < self._times.searching
                else f"{sentence(why)} Trying again until --join-timeout"
            )
            self._idle(_TICK)
        self._base, self._address, self._serves = knock.store, knock.address, knock.serves
        self._base.set_timeout(timedelta(seconds=_OPERATION))
        self.is_connected = True
        self._said = ""

    @property
    def _shared(self) -> Store:
        """The store that all machines of the job meet at."""
        assert self._base is not None, "it was reached"
        return self._base

    def _key(self, name: str) -> str:
        return f"lockstep/{self._options.job}/{name}"

    def _has(self, name: str) -> bool:
        return bool(self._shared.check([self._key(name)]))

    def _write(self, name: str, value: object) -> None:
        """Write a value down, unless another machine was first."""
        self._shared.compare_set(self._key(name), "", json.dumps(value))

    def _beat(self) -> None:
        """Give a sign of life, if it is time."""
        now = time.monotonic()
        if self._base is None or now < self._next_beat:
            return
        if self._count and now - self._next_beat > self._times.silent / 2:  # it stood still, and read nothing
            self._signs.pause(now - self._next_beat)
        self._count += 1
        self._base.set(self._key(f"beat/{self._name}"), json.dumps([self._count, self._ranks]))
        self._next_beat = time.monotonic() + (min(_TICK, self._times.beat) if self._meets else self._times.beat)

    def _listen(self, names: Sequence[str]) -> list[list[Any]]:
        """Take other machines' signs of life. Return how their ranks are."""
        # (A machine gives its first sign before it draws a ticket. A get() of a sign that was never given would wait.)
        others = [name for name in names if name != self._name]
        if others and not self._shared.check([self._key(f"beat/{name}") for name in others]):
            others = [name for name in others if self._has(f"beat/{name}")]
        ranks: list[list[Any]] = []
        if others:
            values = self._shared.multi_get([self._key(f"beat/{name}") for name in others])
            now = time.monotonic()
            for name, value in zip(others, values, strict=True):
                count, theirs = json.loads(value)
                self._signs.hear(name, count, now)
                ranks += theirs
        return ranks

    # Who is here -------------------------------------------------------------------------------------------------

    def _read_cards(self) -> None:
        """Read the cards that have come since."""
        if self._has("tickets"):
            drawn = int(self._shared.get(self._key("tickets")))
            self._unread |= set(range(self._drawn + 1, drawn + 1))
            self._drawn = drawn
        for ticket in sorted(self._unread):
            if self._has(f"card/{ticket}"):
                self._unread.discard(ticket)
                written = self._shared.get(self._key(f"card/{ticket}"))
                self._cards[ticket] = decode_card(written, key=self._options.key, ticket=ticket)

    def _waiting(self, spent: Sequence[int]) -> dict[int, Card]:
        """Return the newest cards of all machines that wanted to take part and have not, by ticket; also of those that
        do not fit. ``spent``: tickets of rounds that were made."""
        newest = {card.name: ticket for ticket, (card, _) in sorted(self._cards.items())}
        return {ticket: self._cards[ticket][0] for ticket in newest.values() if ticket not in spent}

    def _here(self, spent: Sequence[int]) -> dict[int, Card]:
        """Return the cards of :meth:`_waiting` whose machines give signs of life."""
        waiting, now = self._waiting(spent), time.monotonic()
        self._listen([card.name for card in waiting.values()])
        return {
            ticket: card
            for ticket, card in waiting.items()
            if card.name == self._name or (self._signs.lives(card.name, now) and not self._has(f"gone/{card.name}"))
        }

    def _objection(self, mine: Card, ticket: int) -> str:
        card, proved = self._cards[ticket]
        return objection(mine, card, proved=proved)

    def _read_attempt(self) -> RoundAttempt | None:
        return RoundAttempt.decode(self._shared.get(self._key("attempt"))) if self._has("attempt") else None

    def _fate(self, attempt: RoundAttempt) -> dict[str, Any] | None:
        """Return the fate of an attempt: ``{"failed": why}`` or ``{"made": …}``; None: it has none yet."""
        name = f"attempt/{attempt.count}/fate"
        fate: dict[str, Any] | None = json.loads(self._shared.get(self._key(name))) if self._has(name) else None
        return fate

    def _fail(self, attempt: RoundAttempt, why: str) -> None:
        self._write(f"attempt/{attempt.count}/fate", {"failed": why})

    def _missing(self, attempt: RoundAttempt) -> list[int]:
        """Return which machines of an attempt, by node rank, have left or are silent."""
        now = time.monotonic()
        for name in attempt.names:
            if name != self._name:
                self._signs.expect(name, now)
        self._listen(attempt.names)
        return [
            node
            for node, name in enumerate(attempt.names)
            if name != self._name and (self._signs.is_silent(name, now) or self._has(f"gone/{name}"))
        ]

    def _is_over(self, attempt: RoundAttempt, fate: dict[str, Any] | None) -> bool:
        """Return whether an attempt that this machine does not wait for has failed, or has become a round that all its
        machines have left."""
        if fate is not None and "failed" in fate:
            return True
        missing = self._missing(attempt)
        if fate is None:
            if missing:
                self._fail(attempt, "a machine that had joined is gone")
            return False
        newest = {card.name: ticket for ticket, (card, _) in sorted(self._cards.items())}
        members = enumerate(zip(attempt.names, attempt.tickets, strict=True))
        return all(node in missing or newest.get(name, 0) > ticket for node, (name, ticket) in members)

    # The next round ----------------------------------------------------------------------------------------------

    def _tell_the_last_round(self, meet: Meet) -> None:
        """Let the other machines of a round that this one can't go on with know it, if they are still in it."""
        if meet.lost and meet.last >= 0:
            self._write(f"{meet.last}/verdict", Verdict(EndKind.LOST, -1, meet.lost).to_json())

    def _meet(self, meet: Meet) -> Round:
        """Take part in the next round; see Note [Membership]."""
        self._last, self._meets, self._ranks = meet.last, True, []
        self._next_beat = min(self._next_beat, time.monotonic())
        self._limit = time.monotonic() + (self._options.join_timeout if meet.seconds is None else meet.seconds)
        round_, warnings = self._gather(meet)
        if round_.node_rank:
            self._server = None  # of an earlier round
        self._last, self._meets = round_.number, False
        self._verdict_key = f"{round_.number}/verdict"
        self._say(Met(vars(round_), warnings))
        return round_

    def _card(self, meet: Meet) -> Card:
        options = self._options
        versions = {"torch": torch.__version__, "Python": platform.python_version()}
        return Card(
            name=self._name,
            started=_proc.started(os.getpid()) or 0,
            host=socket.gethostname(),
            address=self._address,
            ranks=options.ranks,
            least=options.min_nodes,
            most=options.max_nodes,
            last=meet.last,
            job=meet.job,
            history=meet.history,
            serves=self._serves,
            keyed=bool(options.key),
            challenge=secrets.token_hex(32),
            backend=options.backend,
            lockstep=__version__,
            others=meet.alike | versions,
            stepped=meet.stepped,
            closed=meet.closed,
        )

    def _gather(self, meet: Meet) -> tuple[Round, list[str]]:
        """Wait until there are enough machines, and make a round with them."""
        mine = self._card(meet)
        self._beat()
        ticket = self._shared.add(self._key("tickets"), 1)
        self._shared.set(self._key(f"card/{ticket}"), encode_card(mine, key=self._options.key, ticket=ticket))
        self._first = self._first or ticket
        self._hopeless_since, self._why_not = None, ""
        came = time.monotonic()
        since: float | None = None
        while True:
            self._read_cards()
            attempt = self._read_attempt()
            fate = None if attempt is None else self._fate(attempt)
            if attempt is not None and ticket in attempt.tickets and not (fate and "failed" in fate):
                made = self._form(attempt, ticket, mine)
                if made is not None:
                    return made
                since = None
                self._tell_failure(attempt)
                continue
            now = time.monotonic()
            if not self._has(f"card/{ticket}"):  # the last machine of another job has removed the file as it left
                raise RuntimeError("this machine's entries were removed together with those of a job that has ended")
            if ticket in self._cards and (attempt is None or self._is_over(attempt, fate)):
                here = self._here(() if attempt is None else self._spent(attempt, fate))
                fitting = {each: card for each, card in here.items() if not self._objection(mine, each)}
                since = (since or now) if len(fitting) >= mine.least else None
                unclear = self._end_if_over(meet, attempt, fate)
                tickets = enough(fitting, since=since, now=now, last_call=self._times.last_call)
                if tickets and not unclear and now >= self._limit and self._why_not:
                    raise _Refusal(
                        f"the machines that met at {self.endpoint} could not start together until --join-timeout: "
                        f"{self._why_not}"
                    )
                if tickets and not unclear:
                    self._propose(attempt, fate, tickets)
                    continue
                self._consider(mine, ticket, fitting, here)
                if now >= self._limit:
                    raise _Refusal(
                        f"too few machines came to {self.endpoint} in time (--join-timeout): "
                        f"{_are_here(fitting, mine)}; run the same command on each of them"
                    )
                quiet = now - came < self._times.searching or len(fitting) >= mine.least
                self._look_on(self._said if quiet else _are_here(fitting, mine))
            elif attempt is not None:
                # A round may last for any time: a machine that waits for a place in it does not run out of time.
                self._end_if_over(meet, attempt, fate)
                self._keep_out_of(attempt, mine)
                self._limit, came = now + self._options.join_timeout, now
                self._look_on(self._place_to_come(attempt, now))
            self._idle(_TICK / 2)

    def _tell_failure(self, attempt: RoundAttempt) -> None:
        """Say why machines that had met could not start together."""
        self._why_not = (self._fate(attempt) or {}).get("failed", "")
        self._look_on(f"the machines could not start together, and meet again: {self._why_not}")

    def _spent(self, attempt: RoundAttempt, fate: dict[str, Any] | None) -> tuple[int, ...]:
        """Return the tickets of rounds that were made, this attempt's too if it was."""
        return attempt.spent + (attempt.tickets if fate is not None and "made" in fate else ())

    def _propose(self, last: RoundAttempt | None, fate: dict[str, Any] | None, tickets: Sequence[int]) -> None:
        """Write down who is to make the next round, unless another machine was first."""
        cards = [self._cards[ticket][0] for ticket in tickets]
        number = 0 if last is None else last.number + int(fate is not None and "made" in fate)
        spent: tuple[int, ...] = ()
        if last is not None:
            newest = {card.name: ticket for ticket, (card, _) in sorted(self._cards.items())}
            spent = tuple(ticket for ticket in self._spent(last, fate) if ticket in newest.values())
        attempt = RoundAttempt(
            count=1 if last is None else last.count + 1,
            number=max(number, *(card.last + 1 for card in cards)),  # the cards know more if a store was lost
            tickets=tuple(tickets),
            names=tuple(card.name for card in cards),
            spent=spent,
        )
        self._shared.compare_set(self._key("attempt"), "" if last is None else last.encode(), attempt.encode())

    def _form(self, attempt: RoundAttempt, ticket: int, mine: Card) -> tuple[Round, list[str]] | None:
        """Make a round with the machines of an attempt, within one limit for all its waits; None: it has failed."""
        self._attempt, self._form_by = attempt, time.monotonic() + self._times.forming
        self._store = PrefixStore(self._key(f"attempt/{attempt.count}"), self._shared)
        while missing := [each for each in attempt.tickets if each not in self._cards]:
            if time.monotonic() >= self._form_by:
                self._fail(attempt, f"{len(missing)} of them have not described themselves")
                return None
            self._look_on(self._said)
            self._idle(0.001)
            self._read_cards()
        node, cards = attempt.tickets.index(ticket), [self._cards[each][0] for each in attempt.tickets]
        if not mine.least <= len(cards) <= mine.most:
            self._fail(attempt, f"{len(cards)} machines are not as many as --nnodes says")
            return None
        challenges = [card.challenge for card in cards]
        self._store.set(f"proof/{node}", proof(self._options.key, node, challenges))
        if not self._await(attempt, "proof"):
            return None
        for other, each in enumerate(attempt.tickets):
            if self._store.get(f"proof/{other}").decode() != proof(self._options.key, other, challenges):
                self._cards[each] = cards[other], False
                self._fail(attempt, f"machine {other} ({cards[other].place}) does not know the job's key")
                return None
        seen = self._look_at_clocks(attempt, node)
        if seen is None:
            return None
        walls, looks = seen
        if node == 0:
            self._open(attempt, cards)
        if not self._await(attempt, "fate"):
            return None
        fate = self._fate(attempt)
        if fate is None or "made" not in fate:
            return None
        address, port, job = fate["made"]
        round_ = Round(
            node_rank=node,
            ranks=tuple(card.ranks for card in cards),
            address=address,
            port=port,
            number=attempt.number,
            job=job,
            hosts=tuple(card.place for card in cards),
            history=max(
                (card.history for card in cards), key=lambda said: (said.get("used", 0), said.get("spared", 0))
            ),
            interface=interface_of(self._address),
            served=True,
            clock=ahead(looks[node], looks[0]),
            stepped=tuple(card.stepped for card in cards),
        )
        return round_, [each for each in (_skew(walls, round_), *differences(cards)) if each]

    def _await(self, attempt: RoundAttempt, what: str) -> bool:
        """Wait until every machine of an attempt has written ``what`` (of fates there is one). False: it has failed."""
        keys = [what] if what == "fate" else [f"{what}/{node}" for node in range(len(attempt.names))]
        pause, next_look = 0.0005, 0.0
        while not self._store.check(keys):
            self._idle(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + _TICK
            self._look_on(self._said)
            missing = self._missing(attempt)
            if not missing and now >= self._form_by:
                missing = [node for node, key in enumerate(keys) if not self._store.check([key])]
            if missing:
                hosts = ", ".join(self._cards[attempt.tickets[node]][0].place for node in missing)
                self._fail(attempt, f"waited for {hosts}")
            fate = self._fate(attempt)
            if fate is not None and "failed" in fate:
                return False
        return True

    def _open(self, attempt: RoundAttempt, cards: Sequence[Card]) -> None:
        """Open the store at which the ranks meet, and make the round."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        try:
            listener = socket.create_server((self._address, 0), family=family)
        except OSError as error:
            why = f"can't listen at {self._address}: {os.strerror(error.errno or 0)}"
            self._fail(attempt, f"machine 0 ({cards[0].place}) {why}")
            raise _Refusal(
                f"this machine {why}; --local-addr says at which of its own addresses the ranks meet"
            ) from error
        port = listener.getsockname()[1]
        self._server = TCPStore(
            self._address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        job = max(cards, key=lambda card: card.last).job or secrets.token_hex(16)
        self._write(f"attempt/{attempt.count}/fate", {"made": [self._address, port, job]})

    def _look_at_clocks(self, attempt: RoundAttempt, node: int) -> tuple[list[float], list[list[Look]]] | None:
        """Return what the machines' wall clocks show at one moment, to within the time that a message takes, and what
        each has seen of :func:`ahead`'s looks; None: the attempt has failed."""
        looks = []
        for number in range(_CLOCKS):
            before = time.monotonic_ns()
            self._store.set(f"here/{number}/{node}", "")
            if not self._await(attempt, f"here/{number}"):
                return None
            looks.append((before, time.monotonic_ns()))
        self._store.set(f"clock/{node}", json.dumps([time.time(), looks]))
        if not self._await(attempt, "clock"):
            return None
        said = [json.loads(self._store.get(f"clock/{other}")) for other in range(len(attempt.names))]
        return [wall for wall, _ in said], [[(first, last) for first, last in seen] for _, seen in said]

    # Where there will be none ------------------------------------------------------------------------------------

    def _end_if_over(self, meet: Meet, attempt: RoundAttempt | None, fate: dict[str, Any] | None) -> bool:
        """End with the job's result, if it has one. Return True if there is one, and it is not clear yet whose it is.

        A file may hold the result of an earlier job, whose machines were killed as they left. It counts no longer once
        they all have been silent for long enough; before that, they may be about to remove the file.
        """
        if attempt is None or not self._has(result := f"{_newest(attempt, fate)}/result"):
            self._found_result = ""
            return False
        if self._found_result is None:
            self._found_result = result if meet.last < 0 and self.endpoint.startswith("file:") else ""
        if self._found_result == result:
            now = time.monotonic()
            self._listen(attempt.names)
            made = fate is not None and "made" in fate  # else others of this job have found the same before
            if not made or all(self._signs.is_silent(name, now) for name in attempt.names):
                return False
            if not any(self._signs.lives(name, now) for name in attempt.names):
                return True
        exit_code, why = json.loads(self._shared.get(self._key(result)))
        # The last word of a machine lets the one with the store leave, and that removes the file.
        self.say_gone()
        if meet.last >= 0:
            left = self._shared.add(self._key(f"{meet.last}/left"), 1)
            if self._serves:  # the others have yet to find the result
                self._see_off(self._shared, left)
        raise _Refusal(why or f"the job at {self.endpoint} has ended, and no longer needed this machine", exit_code)

    def _place_to_come(self, attempt: RoundAttempt, now: float) -> str:
        """Say what this machine waits for, once it has waited for a while: a running round of other machines."""
        if self._waits_for != attempt.count:
            self._waits_for, self._waits_since = attempt.count, now
        if now - self._waits_since < self._times.searching:
            return self._said
        cards = [self._cards[ticket][0] for ticket in attempt.tickets if ticket in self._cards]
        machines = counted(len(attempt.names), "machine")
        who = "; ".join(card.place for card in cards)
        if any(card.closed for card in cards):
            return (
                f"this machine is spare: a job of {machines} is running ({who}), and lets none in while it has enough: "
                "too many have left without a step (--max-restarts)"
            )
        if len(attempt.names) < self._options.max_nodes:
            return f"this machine waits to join a running job of {machines} ({who})"
        return (
            f"this machine is spare: a job of {machines}, as many as --nnodes allows, is running ({who}); it takes the "
            "place of one that is lost"
        )

    def _keep_out_of(self, attempt: RoundAttempt, mine: Card) -> None:
        """End if this machine does not fit those of a running round."""
        misfits = [ticket for ticket in attempt.tickets if ticket in self._cards and self._objection(mine, ticket)]
        if len(misfits) == len(attempt.tickets):
            self._dismiss(mine, misfits[:1])

    def _misfits(self, mine: Card, here: dict[int, Card]) -> list[int]:
        """Return the tickets of machines that do not fit this one, also of those that have seen it and left again.

        A store in memory is as old as its server; a file may hold what came of an earlier start.
        """
        older = self._first if self.endpoint.startswith("file:") else 0
        newest = {card.name: ticket for ticket, (card, _) in sorted(self._cards.items())}
        came = [ticket for ticket in newest.values() if ticket in here or ticket > older]
        return [ticket for ticket in came if self._objection(mine, ticket)]

    def _left(self, tickets: Sequence[int], here: dict[int, Card]) -> dict[int, int]:
        """Return, for those of some machines that are not here, how many tickets were drawn when they left; 0: nothing
        is heard of one, and it has not said that it leaves."""
        gone = {each: f"gone/{self._cards[each][0].name}" for each in tickets if each not in here}
        return {each: int(self._shared.get(self._key(name)) if self._has(name) else 0) for each, name in gone.items()}

    def _consider(self, mine: Card, ticket: int, fitting: dict[int, Card], here: dict[int, Card]) -> None:
        """Name machines that do not fit, and end if too few are left because of them; see Note [Membership]."""
        misfits = self._misfits(mine, here)
        for text in self._strangers(mine, misfits):
            self._look_on(text)
        if mine.last >= 0:
            return
        theirs = [each for each in misfits if self._cards[each][0].serves or self._cards[each][0].last >= 0]
        if theirs:
            self._dismiss(mine, theirs)
        if len(fitting) < mine.least and self._has(f"refused/{ticket}"):
            self._read_cards()
            self._dismiss(mine, json.loads(self._shared.get(self._key(f"refused/{ticket}"))))
        now = time.monotonic()
        strangers = {each: self._cards[each][0] for each in misfits}
        if not misfits_end_it(fitting, strangers, left=self._left(misfits, here)):
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now
        elif now - self._hopeless_since >= self._times.last_call:
            told = {each: misfits for each in fitting if each != ticket} | {each: [ticket] for each in misfits}
            self._dismiss(mine, misfits, told=told)

    def _strangers(self, mine: Card, misfits: Sequence[int]) -> list[str]:
        """Return a sentence about each machine that does not fit and was not named yet."""
        new = [ticket for ticket in misfits if ticket not in self._named]
        self._named |= set(new)
        return [f"a machine was not admitted: {self._objection(mine, ticket)}" for ticket in new]

    def _dismiss(
        self, mine: Card, misfits: Sequence[int], *, told: Mapping[int, Sequence[int]] | None = None
    ) -> NoReturn:
        """End because others do not fit. The machine with the store leaves after them, since they would miss it.

        Args:
            mine: this machine's card.
            misfits: the others' tickets.
            told: where the others can't begin either: their tickets, and of each those that do not fit it.
        """
        text = "; ".join(self._objection(mine, ticket) for ticket in misfits)
        limit = time.monotonic() + _DISMISSAL
        with suppress(RuntimeError):  # if the store is gone, so is the machine that served it
            for ticket, why in (told or {}).items():
                self._shared.set(self._key(f"refused/{ticket}"), json.dumps(why))
            self.say_gone()
            while self._serves and self._is_awaited() and time.monotonic() < limit:
                self._look_on(self._said)
                self._idle(_TICK)
        raise _Refusal(f"the rendezvous at {self.endpoint} failed: {text}")

    # The round ---------------------------------------------------------------------------------------------------

    def _attend(self, round_: Round) -> None:
        """Watch over the round until it has a verdict."""
        attempt = self._attempt
        assert attempt is not None, "the round was made of it"
        mine = self._cards[attempt.tickets[round_.node_rank]][0]
        others = [name for name in attempt.names if name != self._name]
        next_look = time.monotonic()
        echo: tuple[Verdict, float] | None = None
        while True:
            now = time.monotonic()
            if now >= next_look:
                next_look = now + self._times.beat
                others_ranks = self._listen(others)
                waiting, refused = self._newcomers(attempt, mine) if round_.node_rank == 0 else (0, [])
                self._say(Alive(waiting, others_ranks, refused))
                silent = [node for node, name in enumerate(attempt.names) if self._signs.is_silent(name, now)]
                lost = [node for node in silent if not self._store.check([f"done/{node}"])]
                if lost:
                    who = ", ".join(round_.host(node) for node in lost)
                    text = f"{who} gave no sign of life for {self._times.silent:g} s"
                    self._write(self._verdict_key, Verdict(EndKind.LOST, round_.node_rank, text).to_json())
            # A machine may be heard up to one interval after its sign of life. So only signs that are heard some time
            # after the echo show that the others have outlived it. One that is done needs not outlive anything.
            if echo is not None and self._signs.heard_since(self._needed(attempt), echo[1] + self._times.echo):
                self._write(self._verdict_key, echo[0].to_json())
            if self._has(self._verdict_key):
                if round_.node_rank == 0:  # whoever came meanwhile is named
                    self._say(Alive(0, [], self._newcomers(attempt, mine)[1]))
                self._say(Ended(json.loads(self._shared.get(self._key(self._verdict_key)))))
                return
            for command in self._hear(_TICK):
                if isinstance(command, Looks):
                    self._ranks = command.ranks
                if isinstance(command, End):
                    verdict = Verdict.from_json(command.verdict)
                    if verdict.kind is EndKind.DONE:
                        self._store.set(f"done/{round_.node_rank}", "")
                        if self._store.check([f"done/{node}" for node in range(len(round_.ranks))]):
                            self._write(self._verdict_key, verdict.to_json())
                    elif verdict.echo:
                        echo = verdict, time.monotonic()
                    else:
                        self._write(self._verdict_key, verdict.to_json())

    def _needed(self, attempt: RoundAttempt) -> list[str]:
        """Return the other machines of the round whose ranks have not all succeeded."""
        names = [(node, name) for node, name in enumerate(attempt.names) if name != self._name]
        return [name for node, name in names if not self._store.check([f"done/{node}"])]

    def _newcomers(self, attempt: RoundAttempt, mine: Card) -> tuple[int, list[str]]:
        """Return how many machines wait that may join, and messages about those that do not fit, each once."""
        self._read_cards()
        here = self._here((*attempt.spent, *attempt.tickets))
        here = {ticket: card for ticket, card in here.items() if card.name not in attempt.names}
        waiting = [ticket for ticket in here if not self._objection(mine, ticket)]
        return 0 if mine.closed else len(waiting), self._strangers(mine, self._misfits(mine, here))

    def _leave(self, command: Leave) -> NoReturn:
        """Leave; the machine that serves the store does so when the others have, and those that wait to join."""
        if self._base is not None:
            with suppress(RuntimeError):  # the store has gone, and with it whoever looks there
                self._part(self._base, command)
        raise _Left

    def _part(self, base: Store, command: Leave) -> None:
        """Tell the other machines that this one leaves, and wait for them where they need it."""
        over = command.over and self._is_current()
        if over:  # written before this machine counts as gone: a machine that sees it gone finds the result
            base.set(self._key(f"{self._last}/result"), json.dumps([command.exit_code, command.why]))
        self.say_gone()
        if over:
            kind, _, path = self._options.endpoint.partition(":")
            left = base.add(self._key(f"{self._last}/left"), 1)
            stays = self._serves or self._server is not None or (kind == "file" and self._meets)
            # Only a machine that waits for the others removes the file: one that opened it later would make it anew.
            if stays and self._see_off(base, left) and kind == "file":
                Path(path).unlink(missing_ok=True)

    def _see_off(self, base: Store, left: int) -> bool:
        """Wait until the other machines of the last round have left, and those that wait for another one know that
        there will be none. Return whether all of the last round have left.

        Args:
            base: the store that they meet at.
            left: machines of the round that have left, this one too.
        """
        machines = 1 if self._round is None else len(self._round.ranks)
        limit = time.monotonic() + self._times.farewell
        while time.monotonic() < limit and (left < machines or self._is_awaited()):
            self._beat()
            select.select([], [], [], 0.02)
            left = base.add(self._key(f"{self._last}/left"), 0)
        return left >= machines

    def _is_awaited(self) -> bool:
        """Return whether a machine waits for a round, or to join one, and has not read yet that there will be none."""
        self._read_cards()
        attempt = self._read_attempt()
        waiting = self._waiting(() if attempt is None else self._spent(attempt, self._fate(attempt)))
        names = [card.name for card in waiting.values() if card.name != self._name]
        now = time.monotonic()
        for name in names:
            self._signs.expect(name, now)
        self._listen(names)
        return any(not self._signs.is_silent(name, now) and not self._has(f"gone/{name}") for name in names)

    def _is_current(self) -> bool:
        """Return whether this machine took part in the job's last round, so that it may speak for the job."""
        attempt = self._read_attempt()
        if attempt is None or self._last < 0:
            return False
        return self._last == _newest(attempt, self._fate(attempt))


def _newest(attempt: RoundAttempt, fate: dict[str, Any] | None) -> int:
    """Return the number of the last round that was made; -1: none was."""
    return attempt.number if fate is not None and "made" in fate else attempt.number - 1


def _are_here(here: dict[int, Card], mine: Card) -> str:
    """Return in words how many machines have come, and which."""
    machines = f"{counted(mine.least, 'machine')} {'is' if len(here) == 1 else 'are'} here"
    return f"{len(here)} of {machines}: {'; '.join(card.place for card in here.values())}"


def _skew(clocks: list[float], round_: Round) -> str:
    """Say by how much the machines' clocks differ, if it is too much."""
    fastest, slowest = max(clocks), min(clocks)
    if fastest - slowest <= SKEW:
        return ""
    return (
        f"the clock of {round_.host(clocks.index(fastest))} is {fastest - slowest:.0f} s ahead of that of "
        f"{round_.host(clocks.index(slowest))}: training does not depend on it, but times in logs and of files do; set "
        "them (chrony, ntpd)"
    )


def _words(error: Exception, endpoint: str, *, cut_off: bool) -> str:
    """Say why the machines could not meet."""
    what = str(error)
    if isinstance(error, DistError):  # its own words name addresses that the store was never given
        what = "the connection to the launchers' store has ended"
        if endpoint.startswith("file:"):  # no connection is involved: the file has changed
            try:
                what = check_file(endpoint.partition(":")[2]) or "the launchers' file did not answer"
            except ValueError as wrong:
                what = str(wrong)
    if cut_off and not endpoint.startswith("file:"):
        what += _AGAIN
    elif not isinstance(error, (DistError, OSError, ValueError)):
        return "".join(traceback.format_exception(error))
    return f"the rendezvous at {endpoint} failed: {what}"
