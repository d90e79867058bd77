"""Decide who takes part in a round: what machines say of themselves, which fit, and when there are enough. Pure.

Note [Membership]
~~~~~~~~~~~~~~~~~
A machine that wants to take part draws a *ticket* (a counter in the store), writes its *card*, and counts up its signs
of life. A round begins as an *attempt*: the first machine that sees enough others writes down who is in it, by a
compare-and-set of the last attempt, so there is one order of attempts that all machines read alike. It may do so only
when the last attempt is over: it has failed, or each of its machines is back with a newer ticket, has left, or is
silent.

An attempt has one *fate*, written once as well. All machines in it have to come and show that they know the job's key;
then the first of them writes that it is made. Any machine that waits for one in vain writes that it has failed, and all
meet again without that one. So either all start a round, or none does, and none with fewer machines than the minimum.

No clocks are compared: a machine counts as alive if its counter changes while another machine watches, by the monotonic
clock of the one that watches. A machine that stood still finds the attempt decided when it wakes up, and takes part in
the next.

A machine whose card does not fit (another key, another ``--nnodes``) is not counted. It ends when it sees that it does
not fit the machine with the store, or a round that others have made; machine 0 names it, and a job that runs goes on.
Where as many as a job needs are here together and too few of them fit, it can't begin, and all of them end, each saying
why; the first to find that out tells the others, and if it has the store, it leaves after them.

A misfit that has left still counts among those that it met: of two machines with different keys, one is gone before the
other has heard it twice, and a stranger leaves in the store what one of their own with a mistyped key would leave. Its
last word is how many tickets were drawn by then, so all know alike whom it met. With a machine that came later it does
not count, since there were never enough together: they wait on. Nor does one that ends without a last word.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Card:
    """A machine's description of itself when it wants to take part."""

    #: The identity of its rendezvous client, which stays from round to round.
    name: str
    #: The time at which the client was started, in the kernel's ticks since its host was booted.
    started: int
    host: str
    address: str
    #: The number of ranks on this machine.
    ranks: int
    #: The bounds of ``--nnodes``.
    least: int
    most: int
    #: The last round that it took part in (-1: none), the job, and its knowledge of the job's restarts.
    last: int
    job: str
    history: dict[str, Any]
    #: True if it has the store at which all meet: a machine that does not fit this one can't take part.
    serves: bool
    #: True if it has a key for the job; random digits about which the others prove that they know the key.
    keyed: bool
    challenge: str
    #: The default backend that the user has chosen there; empty: none.
    backend: str
    #: The version of lockstep there.
    lockstep: str
    #: Name in messages -> another value that should be the same on all machines.
    others: dict[str, str] = field(default_factory=dict)
    #: True if its ranks have taken steps in a round; True if, as it knows, the job lets in no machine any more.
    stepped: bool = False
    closed: bool = False

    @property
    def place(self) -> str:
        """The host and its address, for messages."""
        return f"{self.host}, {self.address}"


#: The values of fields that the card of another version of lockstep lacks.
_BLANK = Card(
    name="",
    started=0,
    host="",
    address="",
    ranks=0,
    least=1,
    most=1,
    last=-1,
    job="",
    history={},
    serves=False,
    keyed=False,
    challenge="",
    backend="",
    lockstep="of an unknown version",
)


@dataclass(frozen=True)
class RoundAttempt:
    """Machines that are to make a round, in order of their node ranks."""

    #: The number of the attempt, from 1.
    count: int
    #: The number that the round will have if it is made.
    number: int
    tickets: tuple[int, ...]
    names: tuple[str, ...]
    #: Tickets of earlier rounds whose machines have no newer ones.
    spent: tuple[int, ...] = ()

    def encode(self) -> str:
        """Return what :meth:`decode` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> RoundAttempt:
        """Read what another machine wrote."""
        fields: dict[str, Any] = json.loads(text)
        lists: dict[str, Any] = {name: tuple(fields.pop(name)) for name in ("tickets", "names", "spent")}
        return cls(**fields, **lists)


def proof(key: str, *what: object) -> str:
    """Return a keyed digest (HMAC with SHA-256, RFC 2104) of ``what``, or "none" where there is no key."""
    if not key:
        return "none"
    return hmac.new(bytes.fromhex(key), json.dumps(what).encode(), hashlib.sha256).hexdigest()


def encode_card(card: Card, *, key: str, ticket: int) -> str:
    """Return a card as it is written down, with the proof that its machine knows the key."""
    text = json.dumps(asdict(card))
    return json.dumps([text, proof(key, ticket, text)])


def decode_card(written: str | bytes, *, key: str, ticket: int) -> tuple[Card, bool]:
    """Return a card, and whether its machine knows the key.

    The card of another version of lockstep may hold more or less. It is read nevertheless, so that its machine can be
    refused by name, and does not end the job of those that read it. Text that is not a card counts as that of a machine
    without a name, which does not know the key.
    """
    try:
        text, given = json.loads(written)
        values = json.loads(text)
        said = {each.name: values[each.name] for each in fields(Card) if each.name in values}
        fits = all(type(value) is type(getattr(_BLANK, name)) for name, value in said.items())
        proved = hmac.compare_digest(given.encode(), proof(key, ticket, text).encode())
    except (ValueError, TypeError, AttributeError):  # it is not JSON, or JSON of something else
        fits, proved = False, False
    if not fits:
        return replace(_BLANK, name=f"ticket {ticket}", host="unknown", address="its card can't be read"), False
    return replace(_BLANK, **said), proved


def objection(mine: Card, card: Card, *, proved: bool) -> str:
    """Say why a machine and this one can't train together; empty if they can."""
    who = f"the machine {card.host} ({card.address})"
    if not proved:
        if mine.keyed:
            return f"{who} does not know the job's key that this machine has"
        return f"{who} has a key for this job, and this machine has none"
    if card.lockstep != mine.lockstep:
        return f"{who} has lockstep {card.lockstep}, and this machine {mine.lockstep}: install the same version"
    if (card.least, card.most) != (mine.least, mine.most):
        return f"{who} was started with --nnodes {_nodes(card)}, and this machine with --nnodes {_nodes(mine)}"
    if card.backend != mine.backend:
        return f"{who} {_backend(card)}, and this machine {_backend(mine)}: set LOCKSTEP_BACKEND alike on all machines"
    return ""


def _nodes(card: Card) -> str:
    return str(card.least) if card.least == card.most else f"{card.least}:{card.most}"


def _backend(card: Card) -> str:
    return f"asks for the backend {card.backend}" if card.backend else "leaves the choice of a backend to lockstep"


def differences(cards: Sequence[Card]) -> list[str]:
    """Return a line for each value that differs between the machines of a round and should be the same on all."""
    lines = []
    for what in cards[0].others:
        said: dict[str, list[str]] = {}
        for node, card in enumerate(cards):
            said.setdefault(card.others.get(what, "not said"), []).append(f"machine {node} ({card.host})")
        if len(said) > 1:
            each = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in said.items())
            lines.append(f"the machines differ in {what}: {each}")
    return lines


def enough(cards: Mapping[int, Card], *, since: float | None, now: float, last_call: float) -> list[int]:
    """Return the tickets that a new attempt is to have, in order of node ranks; none: not yet.

    Args:
        cards: by ticket, of all that fit, live and want to take part: at least one, this machine's own.
        since: the time since when there have been enough of them, on this machine's clock; None: there are not enough.
        now: the same clock.
        last_call: seconds that further machines have to come.
    """
    any_card = next(iter(cards.values()))
    members = {ticket: card for ticket, card in cards.items() if card.last >= 0}
    if len(members) >= any_card.least and any(card.closed for card in members.values()):
        cards = members
    if len(cards) < any_card.least or (len(cards) < any_card.most and (since is None or now - since < last_call)):
        return []
    # Those of the last round keep their places before others that wait for one.
    chosen = sorted(cards, key=lambda ticket: (-cards[ticket].last, ticket))[: any_card.most]
    # On one host the order is that of the clients' starts, whichever came back first. (Process ids are used again.)
    return sorted(chosen, key=lambda ticket: (cards[ticket].address, cards[ticket].started, ticket))


def misfits_end_it(cards: Mapping[int, Card], misfits: Mapping[int, Card], *, left: Mapping[int, int]) -> bool:
    """Return whether enough machines for a job to begin were here together, but too few of them fit each other.

    Args:
        cards: by ticket, of all that fit, live and want to take part: at least one, this machine's own.
        misfits: the same of those that do not fit, also of those that are not here any more.
        left: ticket -> the number of tickets that were drawn when its machine left; those that are here have none.
    """
    newest = max(cards)
    met = {ticket: card for ticket, card in misfits.items() if left.get(ticket, newest) >= newest}
    everyone = [*cards.values(), *met.values()]
    if not met or any(card.last >= 0 for card in cards.values()):
        return False
    return len(cards) < next(iter(cards.values())).least and len(everyone) >= min(card.least for card in everyone)
