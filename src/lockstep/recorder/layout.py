"""A rank's page: which number and which text stands where.

Note [Torn pages]
~~~~~~~~~~~~~~~~~
A rank writes its numbers by one ``pack_into`` whose first and last number are the same count of events, and a reader
reads them from the last to the first: where both are equal, nothing was written between. Texts are written before the
numbers that refer to them, so a reader that finds the count unchanged behind the texts has texts that fit. On
processors that reorder stores a mixed page may pass; therefore nothing is decided on one look: a rank counts as stuck
when many looks, each a second after the one before, have found the same page.

A page costs its rank some hundred nanoseconds an event and is never locked, so a rank may die at any instruction.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

#: Bytes of a rank's page.
PAGE = 4096


class Phase(enum.IntEnum):
    """What a rank is doing, as lockstep sees it."""

    #: Before the first event: importing, building the model.
    START = 0
    #: The sharded loader fetches the next batch.
    DATA = 1
    #: From a replica's forward in training on, until its backward begins: the loss as well.
    FORWARD = 2
    BACKWARD = 3
    #: Sending gradients, and waiting for the other ranks' ones.
    REDUCE = 4
    OPTIMIZER = 5
    SAVE = 6
    RESTORE = 7
    #: torch.compile compiles.
    COMPILE = 8
    #: A replica's forward in eval mode, and what follows it.
    EVALUATE = 9
    #: Between the others: the user's own code.
    OWN = 10
    #: The program is over, and the interpreter is being taken down.
    LEAVING = 11
    #: Waiting for other ranks in a collective, whatever the phase around it. Only among the sums of seconds.
    WAIT = 12


#: How a phase is called in messages.
NAMES = {
    Phase.START: "start",
    Phase.DATA: "data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCE: "reduce",
    Phase.OPTIMIZER: "optimizer",
    Phase.SAVE: "save",
    Phase.RESTORE: "restore",
    Phase.COMPILE: "compile",
    Phase.EVALUATE: "evaluation",
    Phase.OWN: "own code",
    Phase.LEAVING: "leaving",
    Phase.WAIT: "wait",
}

#: In native order and alignment: each number is copied whole.
#: Events, phase, the last phase whose line is known, when the phase began, steps, when the wait under way began (0:
#: none), events noted in short since, events.
NUMBERS = struct.Struct("@8Q")
#: Those that are also written alone, by their place; see Note [Short steps] in writer.py.
PHASE_CELL, ENTERED_CELL, STEPS_CELL, SHORT_CELL = 1, 2, 4, 6
#: More events than are noted in short between two that are written whole.
_SHORT_EVENTS = 1 << 10
#: Seconds spent in each phase.
SUMS = struct.Struct(f"@{len(Phase)}d")
SUMS_AT = 64
_TEXTS_AT = 256
#: Bytes of the line at which a phase was entered ...
PLACE = 192
#: ... and of what the rank waits in, and of why it expects to be slow.
WORDS = 512
WAITS_IN_AT = _TEXTS_AT + len(Phase) * PLACE
REASON_AT = WAITS_IN_AT + WORDS
assert REASON_AT + WORDS <= PAGE


def place_at(phase: int) -> int:
    """Where the line stands at which ``phase`` was entered last."""
    return _TEXTS_AT + phase * PLACE


def encode(text: str, size: int) -> bytes:
    """``text`` as it stands in a page: cut to fit, and padded with zeros."""
    return text.encode(errors="replace")[: size - 1].ljust(size, b"\0")


@dataclass(frozen=True)
class Look:
    """A rank's page at one moment. Times are seconds on the monotonic clock, which all processes of a machine share."""

    #: Grows with every event.
    events: int
    phase: Phase
    #: When the phase began, or went on behind a wait.
    since: float
    #: The last phase that began at a line of the user's program, and this line; own code has none of its own.
    entered: Phase
    place: str
    #: Optimizer steps taken.
    steps: int
    #: When the wait under way began; None: the rank does not wait for others.
    waiting_since: float | None
    #: What it waits in, or waited in last, and at which line.
    waits_in: str
    #: Why the rank expects to be slow, inside ``expect_slow``.
    reason: str
    #: Seconds spent so far, by phase; brought up to date a few times a second.
    seconds: tuple[float, ...]

    @property
    def waiting(self) -> bool:
        """Whether the rank waits for others."""
        return self.waiting_since is not None


def decode(page: memoryview | bytes) -> Look | None:
    """What a page says, or None if it was written to meanwhile; see Note [Torn pages]."""
    last = NUMBERS.unpack_from(page)[-1]
    events, number, entered, since, steps, waiting_since, short, _ = NUMBERS.unpack_from(page)
    phase, entered = Phase(min(number, max(Phase))), Phase(min(entered, max(Phase)))

    def text(start: int, size: int) -> str:
        return bytes(page[start : start + size]).partition(b"\0")[0].decode(errors="replace")

    look = Look(
        events=events * _SHORT_EVENTS + short,
        phase=phase,
        since=since / 1e9,
        entered=entered,
        place=text(place_at(entered), PLACE),
        steps=steps,
        waiting_since=waiting_since / 1e9 if waiting_since else None,
        waits_in=text(WAITS_IN_AT, WORDS),
        reason=text(REASON_AT, WORDS),
        seconds=SUMS.unpack_from(page, SUMS_AT),
    )
    return look if NUMBERS.unpack_from(page)[0] == events == last else None
