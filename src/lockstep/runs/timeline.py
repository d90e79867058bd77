"""Make a timeline of what ranks have recorded: events as Chrome's trace format has them, arrows, clocks. Pure.

An event is a dictionary in the words of that format, but its times are whole nanoseconds (``ts``, ``dur``); trace.py
turns them into the format's microseconds. Ranks are processes there, and what a rank does is in
lanes, the format's threads: its steps, its phases, and for each thread the collectives and waits, each inside of what
began there before. Between two slices of a lane there is nothing but nesting. Where it is known when a GPU came to what
the rank had queued, phases have a lane by the GPU's time, and all else says how much later that was (``gpu_after_us``).

Note [Who waited for whom]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A collective in which each rank needs something of every other one can't end anywhere before the last rank has come. Its
number says which call of one rank belongs to which of another. So the arrow goes from the last rank's call, where it
begins, to every rank that was in its call then, or in the wait for it, and had been for longer than is worth an arrow.
If a rank's part of a collective is not known there is no arrow, since it is not known which rank was last.

Note [Clocks of several machines]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
For such a collective, no rank's end is before another one's beginning. Each pair of machines has that twice, once for
each of their clocks, so each collective in the window says between which bounds the one clock is ahead of the other:
beginning there, less end here, and end there, less beginning here. The narrowest bounds of all are the error that
remains, and the middle is taken. No message is sent for it, and it holds for the moment of the trace. Where the one
machine always comes last the bounds are as wide as the wait for it. The machines that meet in rounds have measured
their clocks when they met, in the same way (``rendezvous/clocks.py``), and what they found holds with a hundredth of a
per cent of the time since then; so the bounds are those of both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.job.page import NAMES, Phase
from lockstep.job.trace import Event as Recorded
from lockstep.job.trace import EventKind, RankTrace, WorkerBatch
from lockstep.text import joined

#: An event in the words of Chrome's trace format, its times in nanoseconds.
Event = dict[str, Any]

#: Lanes and processes of our own have numbers beyond those that a kernel gives to processes.
_BEYOND = 5_000_000
#: Nanoseconds that a rank is in a collective before the last one comes, to be worth an arrow.
NOTICEABLE = 20_000
#: The rate by which a clock may gain on another one.
_DRIFT = 1e-4
#: Backends whose collectives all begin with a comparison of what all ranks are in.
_COMPARING = frozenset({"shm", "hierarchical", "mpi4py"})
#: Collectives in which each rank needs data of every other one.
_MUTUAL = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier", "allocate_tensor")


# A rank --------------------------------------------------------------------------------------------------------------


def events_of(part: RankTrace, workers: Mapping[str, Sequence[WorkerBatch]]) -> list[Event]:
    """Return the events of one rank, its metadata included.

    Args:
        part: what it has recorded.
        workers: what the workers of its loaders have made, by name.
    """
    end = end_of(part)
    found = [event for event in part.events if event.at <= end]
    lanes = _Lanes(part.pid)
    events = [*_steps(part, lanes), *_phases(part, end, lanes), *_phases_on_device(part, lanes)]
    names = {event.thread: event.about["name"] for event in found if event.kind is EventKind.THREAD}
    # The thread that trains is the first to be seen.
    for thread, name in names.items():
        own = [event for event in found if event.thread == thread and event.kind in _NESTED]
        if own:
            title = "collectives and waits" if name == "main" else f"collectives and waits of {name}"
            events += _nested(own, end, lanes.lane(f"{title}", thread))
    for name, batches in workers.items():
        shown = [batch for batch in batches if batch.ended > part.opened and batch.begun < end]
        if shown:
            lane = lanes.lane(name)
            events += [_batch(batch, lane) for batch in shown]
    about = {"name": f"rank {part.rank}"}
    return [
        _about("process_name", part.pid, None, about),
        _about("process_sort_index", part.pid, None, {"sort_index": part.rank}),
        *lanes.about(),
        *events,
    ]


#: Events that are in the lane of their thread.
_NESTED = frozenset({EventKind.BEGIN, EventKind.END, EventKind.MARK})


def end_of(part: RankTrace) -> int:
    """Return when a rank's window ended; that of a rank that ended before it, with its last event."""
    return part.closed or max((event.at for event in part.events), default=part.opened)


class _Lanes:
    """The lanes of one process, in the order in which they are first asked for."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._numbers: dict[object, int] = {}
        self._titles: list[str] = []

    def lane(self, title: str, key: object = None) -> Event:
        """Return what an event in the lane of this title has of it."""
        key = title if key is None else (title, key)
        if key not in self._numbers:
            self._numbers[key] = _BEYOND + len(self._numbers)
            self._titles.append(title)
        return {"pid": self._pid, "tid": self._numbers[key]}

    def about(self) -> Iterator[Event]:
        """Yield the lanes' names and their order, before all others of the process."""
        for place, (number, title) in enumerate(zip(self._numbers.values(), self._titles, strict=True)):
            yield _about("thread_name", self._pid, number, {"name": title})
            yield _about("thread_sort_index", self._pid, number, {"sort_index": place - len(self._titles) - 1})


def _steps(part: RankTrace, lanes: _Lanes) -> Iterator[Event]:
    lane, begun = lanes.lane("steps"), part.opened
    for event in part.events:
        if event.kind is EventKind.STEP:
            # The name that torch.profiler gives to a step, which other tools look for.
            yield _slice(f"ProfilerStep#{event.number - 1}", "user_annotation", begun, event.at, lane)
            begun = event.at


def _phases(part: RankTrace, end: int, lanes: _Lanes) -> Iterator[Event]:
    lane = lanes.lane("phases")
    phase, begun = None, part.opened
    for event in part.events:
        if event.kind is not EventKind.PHASE or event.at > end or event.number == phase:
            continue
        if phase is not None and event.at > begun:
            yield _slice(NAMES[Phase(phase)], "phase", begun, event.at, lane)
        phase, begun = event.number, event.at
    if phase is not None and end > begun:
        yield _slice(NAMES[Phase(phase)], "phase", begun, end, lane)


def _phases_on_device(part: RankTrace, lanes: _Lanes) -> Iterator[Event]:
    """Yield from when to when the GPU was at what the rank had queued in its phases."""
    known = [event for event in part.events if event.kind is EventKind.PHASE and event.device]
    if not known:
        return
    lane = lanes.lane("phases on the GPU")
    phase, begun = known[0].number, known[0].device
    for event in known[1:]:
        if event.number != phase and event.device > begun:  # (streams differ, and with them what comes first)
            yield _slice(NAMES[Phase(phase)], "phase on the GPU", begun, event.device, lane)
            begun = event.device
        phase = event.number


def _nested(events: Iterable[Recorded], end: int, lane: Event) -> list[Event]:
    """Return marks and slices of one thread, each inside of what began before it and had not ended."""
    made: list[Event] = []
    under_way: list[Event] = []
    for event in events:
        if event.kind is EventKind.END:
            if under_way:  # else it began before the window
                slice_ = under_way.pop()
                slice_["dur"] = event.at - slice_["ts"]
                del slice_["args"]["unfinished"]
                if "gpu_after_us" in slice_["args"] and event.device:
                    slice_["args"]["gpu_after_us"].append((event.device - event.at) / 1000)
            continue
        about = dict(event.about)
        name, category = about.pop("name"), about.pop("cat")
        args = {"operation": name.removeprefix("wait for "), **about} if "group" in about else about
        if event.number:
            name, args = f"{name} #{event.number}", args | {"number": event.number}
        if event.device:
            args = args | {"gpu_after_us": [(event.device - event.at) / 1000]}
        if event.kind is EventKind.MARK:
            common = {"name": name, "cat": category, "ts": event.at, **lane, "args": args}
            made.append({"ph": "i", "s": "t", **common})
        else:
            slice_ = _slice(name, category, event.at, end, lane, args | {"unfinished": True})
            made.append(slice_)
            under_way.append(slice_)
    return [event for event in made if event.get("dur", 1) > 0]


def _batch(batch: WorkerBatch, lane: Event) -> Event:
    args = {"position": batch.position, "samples": batch.samples}
    return _slice("batch", "worker", batch.begun, batch.ended, lane, args)


def _slice(name: str, category: str, begun: int, ended: int, lane: Event, args: Event | None = None) -> Event:
    return {"ph": "X", "name": name, "cat": category, "ts": begun, "dur": ended - begun, **lane, "args": args or {}}


def _about(name: str, pid: int, tid: int | None, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": 0 if tid is None else tid, "ts": 0, "args": args}


# What torch.profiler has recorded ------------------------------------------------------------------------------------


def profile_events(profile: Mapping[str, Any], part: RankTrace, number: int) -> tuple[list[Event], int]:
    """Return what a profile has of the window, in this timeline's words, and how many of its events are outside of it.

    Its times are the wall clock's. Its processes other than the rank's own (GPUs) get numbers of their own.

    Args:
        profile: what torch.profiler has exported in the rank.
        part: what the rank has recorded.
        number: tells this profile from others of the rank.
    """
    base = int(profile.get("baseTimeNanoseconds", 0)) - part.wall
    begun, ended = part.opened, end_of(part)
    others: dict[object, int] = {}

    def process(pid: object) -> int:
        if pid == part.pid:
            return part.pid
        return others.setdefault(pid, _BEYOND + (part.rank * 8 + number) * 256 + len(others))

    events: list[Event] = []
    about: list[Event] = []
    outside = 0
    for event in profile["traceEvents"]:
        kind, pid, tid = event.get("ph"), event.get("pid"), event.get("tid", 0)
        if not (isinstance(pid, int) and isinstance(tid, int)):
            continue  # the profiler's spans, which say when it ran
        if kind == "M":
            if not (pid == part.pid and str(event["name"]).startswith("process_")):
                about.append({**event, "ts": 0, "pid": process(pid), "tid": tid})
            continue
        at = base + round(float(event["ts"]) * 1000)
        lasts = round(float(event.get("dur", 0)) * 1000)
        if at + lasts < begun or at > ended:
            outside += 1
            continue
        made = {**event, "ts": at, "pid": process(pid), "tid": tid}
        if "dur" in event:
            made["dur"] = lasts
        if "id" in event:  # (bound by their numbers: those of another rank are others)
            made["id"] = _own_id(event["id"], part.rank * 8 + number)
        events.append(made)
    used = {(event["pid"], event["tid"]) for event in events}
    processes = {pid for pid, _ in used} - {part.pid}
    kept = [
        each
        for each in about
        if (each["pid"], each["tid"]) in used or (each["pid"] in processes and each["name"].startswith("process_"))
    ]
    for each in kept:
        if each["name"] == "process_name":
            each["args"] = {"name": f"rank {part.rank}: {each['args'].get('name', '')}"}
    named = {(each["pid"], each["tid"]) for each in kept if each["name"] == "thread_name"}
    kept += [_about("thread_name", pid, tid, {"name": f"thread {tid}"}) for pid, tid in sorted(used - named)]
    if any(str(event["name"]).startswith("ProfilerStep#") for event in events):
        for event in events:
            event["name"] = str(event["name"]).replace("ProfilerStep#", "profiler.step() #")
    return kept + events, outside


def _own_id(number: object, profile: int) -> int | str:
    if isinstance(number, int) and 0 <= number < 1 << 32:
        return (profile << 32) + number
    return f"{profile}/{number}"


# Who waited for whom -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One rank's part of a collective."""

    call: Event
    waits: tuple[Event, ...]

    @property
    def stays(self) -> Sequence[Event]:
        """Where the rank stays until the others have come. (The call that issues a collective comes back at once, but
        over lockstep's own engines, where it is all of it.)"""
        return (self.call,) if _compares(self.call["args"]["backend"]) else self.waits

    @property
    def end(self) -> int | None:
        """When the rank knew that it was complete; None: nothing tells. (A wait for a GPU's collective is none of the
        CPU's.)"""
        last, backend = self.waits[-1] if self.waits else self.call, self.call["args"]["backend"]
        known = _compares(backend) or (self.waits and backend.endswith("(cpu)"))
        return None if not known or "unfinished" in last["args"] else last["ts"] + last["dur"]


def meetings(events: Iterable[Event], ranks: Mapping[int, int]) -> list[dict[int, _Call]]:
    """Return the collectives of which each rank's part is known, as these parts by rank.

    Args:
        events: of all ranks.
        ranks: the rank of each process.
    """
    calls: dict[tuple[object, ...], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    waits: dict[tuple[object, ...], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    sizes: dict[tuple[object, ...], int] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") not in ("collective", "wait") or not args.get("number") or event["pid"] not in ranks:
            continue
        key = args["group"], args["backend"], args["operation"], args["number"]
        (calls if event["cat"] == "collective" else waits)[key][ranks[event["pid"]]].append(event)
        sizes[key] = args["ranks"]
    return [
        {rank: _Call(call, tuple(sorted(waits[key][rank], key=_begin))) for rank, (call,) in by_rank.items()}
        for key, by_rank in calls.items()
        if len(by_rank) == sizes[key] and all(len(each) == 1 for each in by_rank.values())
    ]


def in_flight(events: Iterable[Event], ranks: Mapping[int, int]) -> list[Event]:
    """Return, for each collective that was issued and waited for later, an event from the one to the end of the other:
    of what happens in between, only the waits are anybody's time. (Several can be under way, so these are the format's
    asynchronous events, which need not be inside of each other.)
    """
    made: list[Event] = []
    for meeting in meetings(events, ranks):
        for each in meeting.values():
            end = each.end
            if each.waits and end is not None:
                args = each.call["args"]
                common = {"cat": "in flight", "name": f"{args['operation']} in flight", "args": args}
                common |= {"pid": each.call["pid"], "tid": each.call["tid"], "id2": {"local": hex(len(made) + 1)}}
                made += [{"ph": "b", **common, "ts": each.call["ts"]}, {"ph": "e", **common, "ts": end}]
    return made


def arrows(events: Iterable[Event], ranks: Mapping[int, int], *, noticeable: int = NOTICEABLE) -> list[Event]:
    """Return the arrows from ranks that came last to those that waited; see Note [Who waited for whom].

    Args:
        events: of all ranks, by one clock.
        ranks: the rank of each process.
        noticeable: nanoseconds of waiting that are worth one, and more than clocks are wrong.
    """
    made: list[Event] = []
    for meeting in meetings(events, ranks):
        late = max(meeting, key=lambda rank: meeting[rank].call["ts"])
        call = meeting[late].call
        args = call["args"]
        if not (_is_mutual(args["operation"]) or _compares(args["backend"])):
            continue
        for rank, each in meeting.items():
            stays = [stay for stay in each.stays if _contains(stay, call["ts"], noticeable)]
            if rank != late and stays:
                stay, number = stays[0], len(made) // 2 + 1
                told = {
                    "late": late,
                    "waits": rank,
                    "number": args["number"],
                    "waited_ns": call["ts"] - each.call["ts"],
                }
                common = {"cat": "late", "name": f"rank {late} came last", "id": number, "args": told}
                made.append({"ph": "s", **common, "pid": call["pid"], "tid": call["tid"], "ts": call["ts"]})
                at = max(call["ts"], stay["ts"] + stay["dur"] - 1)
                made.append({"ph": "f", "bp": "e", **common, "pid": stay["pid"], "tid": stay["tid"], "ts": at})
    return made


def _contains(stay: Event, at: int, noticeable: int) -> bool:
    return bool(stay["ts"] + noticeable <= at < stay["ts"] + stay["dur"])


def _begin(event: Event) -> int:
    return int(event["ts"])


def _is_mutual(operation: str) -> bool:
    return operation.startswith(_MUTUAL)


def _compares(backend: str) -> bool:
    return backend in _COMPARING


# Clocks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clock:
    """How a machine's clock stands to that of the first one. Nanoseconds."""

    #: The time by which the clock is ahead.
    ahead: int
    #: The error bound of the offset; None: unknown.
    error: int | None
    #: The method that found it.
    by: str

    def to_json(self) -> dict[str, Any]:
        """Return it in JSON's types, in microseconds."""
        error = None if self.error is None else self.error / 1000
        return {"ahead_us": self.ahead / 1000, "error_us": error, "by": self.by}


@dataclass(frozen=True)
class Measured:
    """What machines that met have found out of a clock. Nanoseconds."""

    #: Nanoseconds that it was ahead of machine 0's, the most that this may be wrong, and the time on this clock.
    ahead: int
    error: int
    at: int


def clock_between(
    here: tuple[Sequence[dict[int, _Call]], set[int]],
    there: set[int],
    *,
    measured: Measured | None,
    at: int,
    by_wall: int,
) -> Clock:
    """Find out how far a machine's clock is ahead; see Note [Clocks of several machines].

    Args:
        here: the collectives of all machines, by the clocks as they are; the ranks of the first machine.
        there: the ranks of the other one.
        measured: what it has found out when the machines met.
        at: when the window was, on its clock.
        by_wall: how far it is ahead if the two wall clocks agree.
    """
    found, first = here
    least, most = -math.inf, math.inf
    for meeting in found:
        if not any(_is_mutual(each.call["args"]["operation"]) for each in meeting.values()):
            continue
        ours = [each for rank, each in meeting.items() if rank in first]
        theirs = [each for rank, each in meeting.items() if rank in there]
        our_ends = [each.end for each in ours if each.end is not None]
        their_ends = [each.end for each in theirs if each.end is not None]
        if theirs and our_ends:
            least = max(least, max(each.call["ts"] for each in theirs) - min(our_ends))
        if ours and their_ends:
            most = min(most, min(their_ends) - max(each.call["ts"] for each in ours))
    known = ["the collectives in the window"] if least > -math.inf and most < math.inf else []
    if measured is not None:
        error = measured.error + abs(at - measured.at) * _DRIFT
        low, high = max(least, measured.ahead - error), min(most, measured.ahead + error)
        if low <= high:  # else it was too long ago: clocks are set, and machines sleep
            least, most = low, high
            known.append("what was measured when the machines met")
    if math.isinf(least) or math.isinf(most) or least > most:
        return Clock(by_wall, None, "the wall clocks, which may differ")
    return Clock(round((least + most) / 2), math.ceil((most - least) / 2), joined(known))
