"""The pauses and limits, in seconds, of waits that only time can end, and the reasons for their lengths.

A time is here if a test of the product would have to sit through it, or if it must be longer or shorter than one that
is. Other times stay where they are used, as do sizes and counts; users choose some by options or variables.

Note [Pauses and limits]
~~~~~~~~~~~~~~~~~~~~~~~~
A *pause* passes before something is checked again, reported, or taken as settled. A shorter pause costs processor time
or reports trifles, and breaks nothing. After a *limit* something is given up. With a shorter limit a machine that is
only busy is taken for lost. Therefore ``LOCKSTEP_TIMES``, which is for tests, may begin with a factor for all
pauses, and names each limit that it changes: ``0.2``, ``silent=1.5``, ``0.2,silent=1.5,cut_off=2``.
Every process of a job reads it from its environment, which the launcher passes on to its ranks and ``--hosts`` to the
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
    """All pauses and limits, in seconds. See Note [Pauses and limits]."""

    # Ranks on a machine.
    #: The time that a rank may hold up the others before the launcher reports it: longer than a checkpoint of a small
    #: model, shorter than a user's patience. Users set it with ``LOCKSTEP_LATE``.
    late: float = _pause(5.0)
    #: The interval between two comparisons of the ranks, and between two checks for ranks that failed but do not end.
    heartbeat: float = _pause(1.0)
    #: The time without a sign of life after which a process is looked up in /proc, which costs more than its page.
    unmoved: float = _pause(1.0)
    #: The initial interval between two rows of a run's series. (A comparison of the ranks adds a row if one is due.)
    row: float = _pause(1.0)
    #: The time within which ranks that are asked to save mostly reach a step; then a late one is reported.
    to_a_step: float = _pause(2.0)

    #: The time that ranks have from another rank's failure to print an exception of their own: a program's excepthook
    #: may import what formats it.
    telling: float = _limit(5.0)

    #: The time without a step after which ranks that are asked to save do so from the side: most loops come to a step
    #: sooner, and then save more.
    aside: float = _pause(1.0)
    #: The interval between two looks whether another rank wants to save from the side.
    aside_look: float = _pause(0.4)
    #: The interval between two looks how full the disk of the checkpoints is.
    aside_room: float = _pause(10.0)
    #: The time for a rank that saves from the side to come to the step of the others, and for its answer to them, which
    #: is more.
    aside_step: float = _limit(3.0)
    aside_answer: float = _limit(6.0)
    #: The time that a rank's main thread has to hear that the run was saved and is left: it may be in compiled code.
    aside_heard: float = _limit(1.0)

    #: The time that a command of ``--notify`` may take: a message takes seconds, and the end of a job waits for it.
    notify: float = _limit(15.0)

    # Ranks that run cells.
    #: The time that ranks wait for one which is at the end of the cell before they are freed: a message from it may
    #: still be on its way.
    stranded: float = _pause(1.0)
    #: The time that a rank has to come to the end of a cell once it is interrupted or freed. Users whose code tidies up
    #: after a KeyboardInterrupt need some seconds.
    parting: float = _limit(10.0)

    # Machines that meet.
    #: The interval between two signs of life, and between two checks of the other machines' signs.
    beat: float = _pause(0.5)
    #: The least time that a failure which may be an echo waits for its cause: longer than a sign of life takes.
    echo: float = _pause(1.0)
    #: The wait for more machines once there are enough.
    last_call: float = _pause(2.0)
    #: The time that a machine searches for the others, and a rank for rank 0, before it says so: they rarely start at
    #: the same moment.
    searching: float = _pause(5.0)

    #: The time without a sign of life after which a machine is lost: a few signs may be late on a busy network.
    silent: float = _limit(4.0)
    #: The silence after which a client in a round counts as cut off: a little more than ``silent``, so that the other
    #: machines report first that this one is lost.
    cut_off: float = _limit(5.0)
    #: The same for a client that searches for the store and the others: an operation on a lost store may take long.
    stuck: float = _limit(15.0)
    #: The time without a turn of its loop after which a launcher counts as suspended, and grants others the time that
    #: it has missed. Less than ``cut_off``, which would otherwise be over.
    still: float = _limit(2.0)
    #: The validity of another machine's report on its ranks: a few signs of life.
    heard: float = _limit(3.0)
    #: The time for one attempt to reach the store: torch's client sets no limit of its own to its wait for the first
    #: answer at the port.
    answer: float = _limit(8.0)
    #: The time that the machines of an attempt have to form a round, as long as all give signs of life.
    forming: float = _limit(30.0)
    #: The time that the machine with the store waits at the job's end for the others to leave.
    farewell: float = _limit(5.0)
    #: The time that a client has to leave once told to: more than ``farewell``.
    leaving: float = _limit(7.0)

    # Evaluation beside training.
    #: The interval between two looks for a checkpoint that is new; in an object store, where each look is a request
    #: that some stores bill, the other one.
    evaluate_look: float = _pause(1.0)
    evaluate_look_in_store: float = _pause(10.0)
    #: The time that the launcher of an evaluation has to end its ranks once it is told to.
    evaluate_end: float = _limit(15.0)
    #: The time for an evaluator that writes lines into metrics.jsonl, while a log waits for its lock: milliseconds, on
    #: a disk that is not stuck.
    log_lock: float = _limit(5.0)

    # Checkpoints in an object store.
    #: The interval between two signs of life of a run's owner. Each is a request, and some stores bill those.
    lease_beat: float = _pause(10.0)

    #: The time without a sign of life of a run's owner after which another job may take its folder: long enough for a
    #: busy machine and for an outage of the store that a save would survive.
    lease: float = _limit(90.0)
    #: The time for one request to a store: an object of 32 MiB passes a link of half a megabyte a second.
    request: float = _limit(75.0)
    #: The time after a request's first failure in which it is sent again: a store that is restarted is back by then.
    outage: float = _limit(60.0)

    @classmethod
    def parse(cls, text: str) -> Times:
        """Return the times that ``[FACTOR][,NAME=SECONDS…]`` asks for.

        Raises:
            ValueError: ``text`` is not of this form; the message says what is expected.
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
        """Return a copy with all pauses multiplied by ``factor``; the limits stay the same."""
        pauses = [each.name for each in fields(self) if each.metadata["pause"]]
        return replace(self, **{name: factor * getattr(self, name) for name in pauses})


def positive(text: str) -> float:
    """Return a positive number of seconds, or a positive factor.

    Raises:
        ValueError: ``text`` is neither.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text!r}: expected a positive number")
    return value
