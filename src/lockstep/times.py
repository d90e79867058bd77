"""How long the product waits where only time can tell: these times, in seconds, and why they are so long.

A time is here if somebody who tests the product would have to sit through it, or if it stands in an order with one that
is. Others stay where they are used, as do sizes and counts; those that users choose are options or variables.

Note [Pauses and limits]
~~~~~~~~~~~~~~~~~~~~~~~~
A *pause* passes before something is looked at again, said, or taken as settled. A shorter one costs processor time, or
says what was not worth it, and breaks nothing. After a *limit* something is given up. With a shorter one a machine that
is only busy is taken for one that is lost. Therefore ``LOCKSTEP_TIMES``, which is for tests, begins with a number if it
is to multiply all pauses, and names each limit that it changes: ``0.2``, ``silent=1.5``, ``0.2,silent=1.5,cut_off=2``.
Every process of a job reads it from its environment, which a launcher hands down to its ranks and ``--hosts`` to the
other hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace


def _pause(seconds: float) -> float:
    return field(default=seconds, metadata={"pause": True})


def _limit(seconds: float) -> float:
    return field(default=seconds, metadata={"pause": False})


@dataclass(frozen=True)
class Times:
    """All of them, in seconds. See Note [Pauses and limits]."""

    # Ranks on a machine.
    #: A rank may hold up the others for so long before the launcher says so: longer than a checkpoint of a small model,
    #: shorter than the patience of who looks on. ``LOCKSTEP_LATE`` is the user's.
    late: float = _pause(5.0)
    #: Between two comparisons of the ranks, and two looks for one that left a failure record but does not end.
    heartbeat: float = _pause(1.0)
    #: A process without a sign of life for so long is looked at in /proc, which costs more than its page.
    unmoved: float = _pause(1.0)
    #: Between two rows of a run's series, at first. (A comparison of the ranks brings one, if it is time.)
    row: float = _pause(1.0)
    #: Ranks that are asked to save mostly come to a step within this time; then it is said that one has not.
    to_a_step: float = _pause(2.0)

    # Machines that meet.
    #: Between two signs of life, and between two looks at those of the others.
    beat: float = _pause(0.5)
    #: A failure that reads like an echo waits so long for the real one, at least: more than a sign of life takes.
    echo: float = _pause(1.0)
    #: More machines are waited for once there are enough.
    last_call: float = _pause(2.0)
    #: A machine looks for the others, and a rank for rank 0, before it says so: they are rarely started at one moment.
    searching: float = _pause(5.0)

    #: A machine without a sign of life for so long is lost: some of them may be late on a network that is busy.
    silent: float = _limit(4.0)
    #: A client in a round that has not said a word for so long counts as cut off: a little more than ``silent``, so
    #: that the others say first that this machine is lost.
    cut_off: float = _limit(5.0)
    #: The same while it looks for the store and the others: an operation of a store that has gone may take long.
    stuck: float = _limit(15.0)
    #: A launcher whose loop did not turn for so long stood still, and gives others the time that it has missed. Less
    #: than ``cut_off``, which would else be over.
    still: float = _limit(2.0)
    #: What another machine has told of its ranks counts for so long: some signs of life.
    heard: float = _limit(3.0)
    #: A whole try to reach the store: a client of torch's store waits for the first answer of whatever listens at the
    #: port without a limit of its own.
    answer: float = _limit(8.0)
    #: The machines of an attempt have so long to make a round of it, where all give signs of life.
    forming: float = _limit(30.0)
    #: The machine with the store waits so long for the others to leave, at the job's end.
    farewell: float = _limit(5.0)
    #: A client that was told to leave has so long: more than ``farewell``.
    leaving: float = _limit(7.0)

    @classmethod
    def parse(cls, text: str) -> Times:
        """Return the times that ``[FACTOR][,NAME=SECONDS…]`` asks for.

        Raises:
            ValueError: it is not of this form; the message says what is expected.
        """
        times = cls()
        names = [each.name for each in fields(cls)]
        for place, part in enumerate(text.split(",") if text else ()):
            name, equals, seconds = part.strip().rpartition("=")
            if (equals and name not in names) or (not equals and place):
                raise ValueError(f"{part.strip()!r}: expected NAME=SECONDS, NAME one of {', '.join(names)}")
            value = positive(seconds)
            times = replace(times, **{name: value}) if equals else times.scaled(value)
        return times

    def scaled(self, factor: float) -> Times:
        """Return the same limits, and all pauses times ``factor``."""
        pauses = [each.name for each in fields(self) if each.metadata["pause"]]
        return replace(self, **{name: factor * getattr(self, name) for name in pauses})


def positive(text: str) -> float:
    """Return a positive number of seconds, or a positive factor.

    Raises:
        ValueError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r}: expected a positive number")
    return value
