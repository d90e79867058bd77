"""Read a rank's timetable from a trace: the parts of its steps, and when each bucket was ready. Pure.

A step goes from one moment at which all ranks have met, the end of an averaged backward, to the next. The time that a
rank waits in between is for others, so it is taken off; the rest is its own. On a GPU all of it is by the GPU's time:
when its stream began and ended what the rank had queued (Note [Two clocks] in ``job/device.py``), and what the stream
waited for is what the rank waits for.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from lockstep.errors import LockstepError
from lockstep.job.page import NAMES, Phase
from lockstep.runs.timeline import Event
from lockstep.runs.trace import Trace

#: The fewest steps of all ranks from which medians are taken.
LEAST = 3
_OPTIMIZER = NAMES[Phase.OPTIMIZER]
_NS = 1e-9


class NoTimetable(LockstepError):
    """A trace is not enough for a plan; the message says why, and may be empty."""

    code = "no-timetable"


@dataclass(frozen=True)
class Timetable:
    """The parts of one rank's steps. Times are seconds, of one step after the other, without the waits for other
    ranks."""

    rank: int
    backend: str = ""
    #: The number of ranks that averaged.
    world_size: int = 0
    #: The device of the gradients: ``cpu``, or the kind of GPU.
    device: str = "cpu"
    #: Threads that torch computes with, and cores that this rank may run on.
    threads: int = 1
    cores: int = 1
    #: True if buckets were sent during backward; False: all at its end, and :attr:`buckets` are those that would
    #: have been.
    overlaps: bool = False
    #: Samples of this rank in a step, and of all ranks; 0: they are not counted.
    local_samples: float = 0.0
    global_samples: float = 0.0
    #: Bytes of each bucket, in the order in which they are reduced.
    buckets: tuple[int, ...] = ()
    #: The fraction of the backward that was over when each bucket was ready, in the median step.
    ready: tuple[float, ...] = ()
    #: The time of the optimizers' steps.
    optimizer: tuple[float, ...] = ()
    #: All else before the backward: data, forward, own code, backwards that only accumulate.
    before: tuple[float, ...] = ()
    #: Seconds from the beginning of the backward to its end, for each step.
    backward: tuple[float, ...] = ()
    #: After the backward, beside the averaging itself: gradients copied into buckets and out of them.
    handling: tuple[float, ...] = ()
    #: After the backward, in the averaging: waiting for others and for the network, and adding up.
    averaging: tuple[float, ...] = ()
    #: Seconds in other collectives, for each step.
    waiting: tuple[float, ...] = ()

    @property
    def columns(self) -> tuple[tuple[float, ...], ...]:
        """The parts of a step, each as its seconds by step."""
        return self.optimizer, self.before, self.backward, self.handling, self.averaging, self.waiting


def timetables(trace: Trace) -> tuple[Timetable, ...]:
    """Return the timetables of the ranks that a trace has, of the steps that all of them have.

    Raises:
        NoTimetable: there are too few such steps, or they can't be planned with.
    """
    found = [_Rank(trace, pid, rank) for pid, rank in sorted(trace.ranks.items(), key=lambda item: item[1])]
    if not found:
        raise NoTimetable
    steps = sorted(set.intersection(*(set(each.steps) for each in found)))
    if len(steps) < LEAST:
        raise NoTimetable
    return tuple(each.timetable(steps) for each in found)


@dataclass(frozen=True)
class _Step:
    """A step, from the end of one averaged backward to the end of the next; its moments are in nanoseconds."""

    begun: float
    backward: float
    averaging: float
    over: float
    #: Bucket -> the time at which it was ready.
    ready: dict[int, float]
    #: The facts of the averaging.
    about: dict[str, Any]


class _Rank:
    """One rank's part of a trace.

    Raises:
        NoTimetable: it can't be planned with.
    """

    def __init__(self, trace: Trace, pid: int, rank: int) -> None:
        self._rank = rank
        own = sorted((event for event in trace.events if event["pid"] == pid and event["ph"] in "Xi"), key=_time)
        gradients = [event for event in own if event.get("cat") == "gradients"]
        begins = [event for event in gradients if event["name"] == "backward begins"]
        for event in begins:
            if event["args"]["why_not"]:
                raise NoTimetable(f"{event['args']['why_not']} (rank {rank})")
        averaging = [event for event in gradients if event["ph"] == "X"]
        begins = self._last_replica(begins)
        if not begins:
            self.steps: dict[int, _Step] = {}
            return
        self._about = begins[-1]["args"]
        self._on_gpu = self._about["device"] != "cpu"
        threads = {event["tid"] for event in averaging}
        calls = [event for event in own if event["tid"] in threads and event.get("cat") in ("collective", "wait")]
        own_phases = [event for event in own if event.get("cat") == ("phase on the GPU" if self._on_gpu else "phase")]
        calls = [event for event in calls if self._is_timed(event)]
        self._stepping = _union(_span(event) for event in own_phases if event["name"] == _OPTIMIZER)
        self._calls = _union(map(self._span, calls))
        self._stays = _union(self._span(event) for event in calls if self._on_gpu or _stays(event))
        ready = [event for event in gradients if event["name"].startswith("bucket ready")]
        first = begins[0]["ts"]
        self.steps = self._find_steps(
            [event for event in averaging if event["ts"] >= first and "unfinished" not in event["args"]], begins, ready
        )

    def _last_replica(self, begins: list[Event]) -> list[Event]:
        """Return the backwards of the replica that averaged last, with the buckets that it had in the end.

        Raises:
            NoTimetable: several averaged in turn.
        """
        replicas = [event["args"]["replica"] for event in begins if event["args"]["averages"]]
        if not replicas:
            return []
        turns = [replicas[0], *(after for before, after in pairwise(replicas) if after != before)]
        if len(turns) > len(set(turns)):
            raise NoTimetable(
                f"several replicas averaged their gradients in turn, and a plan is of one (rank {self._rank})"
            )
        return [event for event in begins if event["args"]["replica"] == turns[-1]]

    def _find_steps(self, averaging: list[Event], begins: list[Event], ready: list[Event]) -> dict[int, _Step]:
        """Return the steps that are whole by the numbers of their averages; one in which a backward failed does not
        count.

        Raises:
            NoTimetable: for no step is its time known, by the clock that counts.
        """
        steps: dict[int, _Step] = {}
        missing: list[str] = []
        for before, after in pairwise(averaging):
            begun, over = before["ts"] + before["dur"], after["ts"] + after["dur"]
            inside = _between(begins, begun, after["ts"])
            if not inside or sum(event["args"]["averages"] for event in inside) > 1:
                continue
            untimed = [event["name"] for event in (before, inside[-1], after) if not self._is_timed(event)]
            if untimed:
                missing = untimed
                continue
            marks = [event for event in _between(ready, inside[-1]["ts"], over) if self._is_timed(event)]
            steps[after["args"]["number"]] = _Step(
                self._span(before)[1],
                self._span(inside[-1])[0],
                *self._span(after),
                {event["args"]["number"] - 1: self._span(event)[0] for event in marks},
                after["args"],
            )
        if missing and not steps:
            raise NoTimetable(
                f"its gradients are on a GPU, and when that came to '{missing[0]}' is not known (rank {self._rank}): "
                "the GPU's clock is read for 16,384 events of a trace, and for none in the capture of a CUDA graph"
            )
        return steps

    def _is_timed(self, event: Event) -> bool:
        """Return whether it is known when an event began and ended, by the clock that counts."""
        moments = 2 if "dur" in event else 1
        return not self._on_gpu or len(event["args"].get("gpu_after_us", ())) == moments

    def _span(self, event: Event) -> tuple[float, float]:
        """Return when an event began and ended, by the clock that counts."""
        begun, ended = _span(event)
        if not self._on_gpu:
            return begun, ended
        after = event["args"]["gpu_after_us"]
        return begun + after[0] * 1000, ended + after[-1] * 1000

    def timetable(self, numbers: Sequence[int]) -> Timetable:
        """Return the timetable of these steps."""
        steps = [self.steps[number] for number in numbers]
        rows = [self._row(step) for step in steps]
        columns = {name: tuple(_NS * row[name] for row in rows) for name in rows[0]}
        about, last = self._about, steps[-1].about
        buckets = about["buckets"]
        parts = [[self._part_over(step, bucket) for step in steps] for bucket in range(len(buckets))]
        return Timetable(
            self._rank,
            backend=about["backend"],
            world_size=about["ranks"],
            device=about["device"],
            threads=about["threads"],
            cores=about["cores"],
            overlaps=about["overlaps"],
            local_samples=last.get("local_samples", 0.0),
            global_samples=last.get("global_samples", 0.0),
            buckets=tuple(buckets),
            ready=tuple(map(statistics.median, parts)),
            **columns,
        )

    def _row(self, step: _Step) -> dict[str, float]:
        stepping = _overlapping(self._stepping, step.begun, step.over)
        optimizer = sum(self._own(max(begin, step.begun), min(end, step.over)) for begin, end in stepping)
        averaging = _within(self._calls, step.averaging, step.over)
        return {
            "optimizer": optimizer,
            "before": max(0.0, self._own(step.begun, step.backward) - optimizer),
            "backward": self._own(step.backward, step.averaging),
            "handling": step.over - step.averaging - averaging,
            "averaging": averaging,
            "waiting": _within(self._stays, step.begun, step.averaging),
        }

    def _own(self, begin: float, end: float) -> float:
        """Return the time between two moments without what was waited for others; 0 if the second is not later."""
        return end - begin - _within(self._stays, begin, end) if begin < end else 0.0

    @staticmethod
    def _part_over(step: _Step, bucket: int) -> float:
        """Return the fraction of the backward that was over when a bucket was ready; 0 for one that was not used."""
        length = step.averaging - step.backward
        if length <= 0:
            return 1.0
        return min(1.0, max(0.0, (step.ready.get(bucket, step.backward) - step.backward) / length))


_begin: Callable[[tuple[float, float]], float] = itemgetter(0)
_end: Callable[[tuple[float, float]], float] = itemgetter(1)
_time: Callable[[Event], float] = itemgetter("ts")


def _span(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"] + event.get("dur", 0))


def _stays(event: Event) -> bool:
    """Return whether the rank stays in an event until others have come, unlike in a call that only issues."""
    return event["cat"] == "wait" or not event["args"]["backend"].endswith(")")


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return spans that do not overlap, in order, which cover what these cover."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _overlapping(spans: Sequence[tuple[float, float]], begin: float, end: float) -> Sequence[tuple[float, float]]:
    """Return those of a union's spans that have something in common with the time from ``begin`` to ``end``."""
    return spans[bisect_right(spans, begin, key=_end) : bisect_left(spans, end, key=_begin)]


def _within(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Return how much of the time from ``begin`` to ``end`` a union's spans cover."""
    return sum(min(end, last) - max(begin, first) for first, last in _overlapping(spans, begin, end))


def _between(events: Sequence[Event], begin: float, end: float) -> Sequence[Event]:
    """Return the events that begin from ``begin`` on and before ``end``; they are in order."""
    return events[bisect_left(events, begin, key=_time) : bisect_left(events, end, key=_time)]
