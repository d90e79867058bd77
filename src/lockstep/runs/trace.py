"""The file of a trace: put together from what the ranks of a machine have recorded, read again, merged, split.

It is Chrome's trace format in JSON, gzip: https://ui.perfetto.dev opens it. Beside the events it has
``distributedInfo``, by which Holistic Trace Analysis finds a file's rank, and under ``lockstep`` which ranks and steps
it is of, what is missing, and how the machines' clocks stand to each other.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep._files import write_whole
from lockstep.errors import LockstepError
from lockstep.job.files import JobFiles
from lockstep.job.trace import RankTrace, batches
from lockstep.runs.timeline import (
    NOTICEABLE,
    Clock,
    Event,
    Measured,
    arrows,
    clock_between,
    end_of,
    events_of,
    in_flight,
    meetings,
    profile_events,
)
from lockstep.version import __version__

#: The version of the data under ``lockstep``.
VERSION = 1
#: Offset between the process numbers of one machine and of the next.
_PER_MACHINE = 10_000_000


class BadTrace(LockstepError):
    """A file is not a trace of lockstep's, or the given files do not belong together."""

    code = "bad-trace"


@dataclass(frozen=True)
class Origin:
    """Which part of which job a trace is of."""

    #: The machine's number, from 0; the number of machines; its name.
    node: int
    nodes: int
    host: str
    world_size: int
    #: The identity of this start of the job, if several machines have met; otherwise empty.
    start: str
    #: The machine's measurement of its clock when it met the others; None if there is none.
    measured: Measured | None = None


@dataclass
class Trace:
    """A trace in memory."""

    #: The data under ``lockstep`` in the file.
    about: dict[str, Any]
    #: The events without arrows; times in nanoseconds on the clock of the first machine.
    events: list[Event]
    #: Nanoseconds by which that machine's wall clock is ahead of that clock.
    wall: int
    #: Arrows from one rank to another.
    arrows: list[Event]

    @property
    def ranks(self) -> dict[int, int]:
        """The rank of each process."""
        return {int(pid): rank for pid, rank in self.about["processes"].items()}

    @property
    def first_step(self) -> int:
        """The first step that was traced, from 0."""
        return int(self.about["steps"][0])

    @property
    def last_step(self) -> int:
        """The last one."""
        return int(self.about["steps"][1])

    def write(self, path: Path) -> None:
        """Write the file (0600), whole or not at all.

        Raises:
            OSError: it can't be written.
        """
        write_whole(path, _pack(self, rank=min(self.ranks.values())))


# From what the ranks have left ---------------------------------------------------------------------------------------


def collect(folder: Path, ranks: Iterable[int], origin: Origin) -> Trace | None:
    """Put together what the ranks of a machine have recorded so far; None: no rank's window was opened.

    Args:
        folder: the private folder of this start of the job.
        ranks: of this machine.
        origin: which part of the job it is.
    """
    files, events, parts = JobFiles(folder), [], []
    wanted = list(ranks)
    profiles: dict[str, Any] = {}
    for rank in wanted:
        part = RankTrace.read(folder, rank)
        if part is None:
            continue
        parts.append(part)
        events += events_of(part, batches(folder, rank))
        for number, path in enumerate(files.profiles(rank), start=1):
            profiles[f"{rank}/{number}"] = _add_profile(path, part, number, events)
    if not parts:
        return None
    steps = [event for event in events if event["name"].startswith("ProfilerStep#")]
    taken = [int(event["name"].partition("#")[2]) for event in steps] or [parts[0].steps]
    about = {
        "trace": VERSION,
        "lockstep": __version__,
        "node": origin.node,
        "nodes": origin.nodes,
        "start": origin.start,
        "world_size": origin.world_size,
        "processes": {str(part.pid): part.rank for part in parts},
        "hosts": {str(part.rank): origin.host for part in parts},
        "steps": [min(part.steps for part in parts), max(taken)],
        "cut_off": [part.rank for part in parts if part.closed is None],
        "lost_events": {str(part.rank): part.lost for part in parts if part.lost},
        "missing_ranks": sorted(set(wanted) - {part.rank for part in parts}),
        "profiles": profiles,
        "measured": None if origin.measured is None else vars(origin.measured),
        "at": max(end_of(part) for part in parts),
        "clocks": {str(origin.node): Clock(0, 0, "all ranks of one machine share it").to_json()},
    }
    trace = Trace(about, events, parts[0].wall, [])
    trace.events = _ordered([*events, *in_flight(events, trace.ranks)])
    trace.arrows = arrows(trace.events, trace.ranks)
    return trace


def _add_profile(path: Path, part: RankTrace, number: int, events: list[Event]) -> dict[str, Any]:
    """Add what torch.profiler has exported in a rank; return what became of it."""
    try:
        data = path.read_bytes()
        profile = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        found, outside = profile_events(profile, part, number)
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        return {"events": 0, "trouble": f"{type(error).__name__}: {error}"}
    events += found
    return {"events": len(found), "outside": outside}


# Reading, merging, splitting -----------------------------------------------------------------------------------------


def read(path: Path) -> Trace:
    """Read a trace that was written.

    Raises:
        BadTrace: it is none, or of a later version.
    """
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
    except FileNotFoundError:
        raise BadTrace(f"{path}: there is no such file") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise BadTrace(f"{path}: not a trace: {error}") from None
    about = data.get("lockstep") if isinstance(data, dict) else None
    if not isinstance(about, dict) or not isinstance(about.get("trace"), int):
        raise BadTrace(f"{path}: not a trace that lockstep run --trace has written")
    if about["trace"] != VERSION:
        raise BadTrace(f"{path}: written by lockstep {about.get('lockstep')}, which this lockstep can't read")
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadTrace(f"{path}: not a whole trace ({type(error).__name__}: {error})") from error


#: The data under ``lockstep`` that other code relies on.
_KINDS: dict[str, type] = {
    **dict.fromkeys(("node", "world_size", "base_ns", "at"), int),
    **dict.fromkeys(("hosts", "lost_events", "profiles", "clocks", "processes"), dict),
    "start": str,
    "steps": list,
    "cut_off": list,
}


def _parse(data: dict[str, Any]) -> Trace:
    about = data["lockstep"]
    for name, kind in _KINDS.items():
        if not isinstance(about[name], kind):
            raise TypeError(f"{name} is a {type(about[name]).__name__}")
    if about["measured"] is not None:
        Measured(**about["measured"])
    about["processes"] = {str(int(pid)): int(rank) for pid, rank in about["processes"].items()}
    about["cut_off"] = [int(rank) for rank in about["cut_off"]]
    first, last = about["steps"]
    about["steps"] = [int(first), int(last)]
    base = about["base_ns"]
    events: list[Event] = []
    flows: list[Event] = []
    for event in data["traceEvents"]:
        if not isinstance(event["pid"], int) or not isinstance(event["name"], str):
            raise TypeError("an event without a process or a name")
        if event["name"] == "process_name":
            event["args"]["name"] = str(event["args"]["name"])
        event["ts"] = 0 if event["ph"] == "M" else base + round(event["ts"] * 1000)
        if "dur" in event:
            event["dur"] = round(event["dur"] * 1000)
        (flows if event.get("cat") == "late" else events).append(event)
    return Trace(about, events, int(data["baseTimeNanoseconds"]) - base, flows)


def merge(traces: Sequence[Trace]) -> Trace:
    """Merge the traces of the machines of one job, by the clock of the first one.

    See Note [Clocks of several machines] in timeline.py.

    Raises:
        BadTrace: they are of different jobs, or two of the same machine.
    """
    first, *others = traces = sorted(traces, key=lambda trace: int(trace.about["node"]))
    for trace in traces:
        if "merged" in trace.about:
            raise BadTrace("one of these is merged already: name the machines' own files, trace-node0.json.gz and on")
    if len({(trace.about["start"], trace.about["world_size"]) for trace in traces}) > 1:
        raise BadTrace("these traces are of different jobs, or of different starts of one")
    nodes = [trace.about["node"] for trace in traces]
    if len(set(nodes)) < len(nodes):
        raise BadTrace(f"two of these traces are of the same machine: {nodes}")
    for trace in others:
        _move(trace, int(trace.about["node"]) * _PER_MACHINE)
    processes = {pid: rank for trace in traces for pid, rank in trace.ranks.items()}
    found = meetings([event for trace in traces for event in trace.events], processes)
    clocks = {str(nodes[0]): Clock(0, 0, "the others are told by it")}
    for trace in others:
        measured, of_first = trace.about["measured"], first.about["measured"]
        clock = clock_between(
            (found, set(first.ranks.values())),
            set(trace.ranks.values()),
            measured=None if measured is None or of_first is None else _between(measured, of_first),
            at=trace.about["at"],
            by_wall=first.wall - trace.wall,
        )
        clocks[str(trace.about["node"])] = clock
        for event in trace.events:
            if event["ph"] != "M":
                event["ts"] -= clock.ahead
    about = {
        **first.about,
        "merged": nodes,
        "processes": {str(pid): rank for pid, rank in processes.items()},
        "hosts": {rank: host for trace in traces for rank, host in trace.about["hosts"].items()},
        "steps": [min(trace.first_step for trace in traces), max(trace.last_step for trace in traces)],
        "lost_events": {rank: lost for trace in traces for rank, lost in trace.about["lost_events"].items()},
        "profiles": {name: told for trace in traces for name, told in trace.about["profiles"].items()},
        "missing_ranks": sorted(set(range(first.about["world_size"])) - set(processes.values())),
        "cut_off": sorted({rank for trace in traces for rank in trace.about["cut_off"]}),
        "clocks": {node: clock.to_json() for node, clock in clocks.items()},
    }
    merged = Trace(about, _ordered(event for trace in traces for event in trace.events), first.wall, [])
    errors = [clock.error or 0 for clock in clocks.values()]
    merged.arrows = arrows(merged.events, processes, noticeable=max(NOTICEABLE, 2 * max(errors)))
    return merged


def split(trace: Trace, folder: Path) -> list[Path]:
    """Write a file for each rank, as torch.profiler would have left them; return these.

    Raises:
        OSError: they can't be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    names = {event["pid"]: event["args"]["name"] for event in trace.events if event["name"] == "process_name"}
    for own, rank in trace.ranks.items():
        of_rank = {pid for pid, name in names.items() if name.startswith(f"rank {rank}:")} | {own}
        events = [event for event in trace.events if event["pid"] in of_rank]
        path = folder / f"trace-rank{rank}.json.gz"
        write_whole(path, _pack(Trace(trace.about, events, trace.wall, []), rank=rank))
        written.append(path)
    return written


def _between(measured: Mapping[str, int], of_first: Mapping[str, int]) -> Measured:
    return Measured(measured["ahead"] - of_first["ahead"], measured["error"] + of_first["error"], measured["at"])


def _move(trace: Trace, by: int) -> None:
    """Give the processes of a trace other numbers, which no other machine's have."""
    for event in trace.events:
        event["pid"] += by
    trace.about["processes"] = {str(int(pid) + by): rank for pid, rank in trace.about["processes"].items()}


def _ordered(events: Iterable[Event]) -> list[Event]:
    """Return metadata first, then all by time; of two that begin together the longer one, which is around the other."""
    return sorted(events, key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0)))


# The format ----------------------------------------------------------------------------------------------------------


def _pack(trace: Trace, *, rank: int) -> bytes:
    timed = [event for event in trace.events if event["ph"] != "M"]
    base = min((event["ts"] for event in timed), default=0)
    backends = {event["args"]["backend"] for event in timed if event.get("cat") == "collective"}
    head = {
        "schemaVersion": 1,
        "distributedInfo": {
            "backend": ", ".join(sorted(backends)) or None,
            "rank": rank,
            "world_size": trace.about["world_size"],
        },
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base + trace.wall,
        "lockstep": {**trace.about, "base_ns": base},
    }
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as file:
        # Line by line, for people and for tools that look for the rank in the first line that has one.
        lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items()]
        file.write(("{" + "".join(lines) + '"traceEvents": [\n').encode())
        ordered = _ordered([*trace.events, *trace.arrows])
        for place, event in enumerate(ordered):
            shown = dict(event)
            shown["ts"] = 0 if event["ph"] == "M" else (event["ts"] - base) / 1000
            if "dur" in event:
                shown["dur"] = event["dur"] / 1000
            file.write((json.dumps(shown) + (",\n" if place < len(ordered) - 1 else "\n")).encode())
        file.write(b"]}\n")
    return buffer.getvalue()
