"""Read a trace again, and check that it is what a viewer expects."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from lockstep.job.page import Phase
from lockstep.job.trace import EventKind, EventWriter, Head
from lockstep.runs.trace import Origin, Trace, collect

Event = dict[str, Any]
#: What a replica says of itself where nothing else is said.
ABOUT = {
    "why_not": "",
    "backend": "gloo",
    "ranks": 2,
    "device": "cpu",
    "threads": 1,
    "cores": 1,
    "overlaps": True,
    "buckets": [1000, 3000, 2000],
    "replica": 1,
}
_MS = 1_000_000


class Steps:
    """Records steps of one rank as it would itself, but at made-up times: of 100 ms from one average to the next.

    These are 5 ms of optimizer, 21 before the backward with 4 of waiting between them, 40 of backward with a bucket
    ready when a half, three quarters and all of it are over, and 10 beside 20 of all-reduce.

    Args:
        folder: the job's.
        rank: whose they are.
        steps: there is room for so many.
        about: what differs from :data:`ABOUT`.
    """

    def __init__(self, folder: Path, *, rank: int = 0, steps: int = 1, **about: Any) -> None:
        self._writer = EventWriter(folder, rank=rank, steps=steps)
        self._writer._head[Head.PID] = 100 + rank
        self._writer.open(steps=0)
        self._about, self._at, self._taken = {**ABOUT, **about}, 1000 * _MS, 0

    def take(self, count: int = 1, *, longer: float = 0.0, samples: float | None = None, **about: Any) -> None:
        """Take steps, each of which computes so many milliseconds longer before its backward."""
        for _ in range(count):
            begun = self._at
            self._add(EventKind.PHASE, begun + 1 * _MS, number=Phase.OPTIMIZER)
            self._add(EventKind.PHASE, begun + 6 * _MS, number=Phase.OWN)
            self._around("barrier #1", "collective", begun + 10 * _MS, begun + 14 * _MS, backend="shm")
            self.begin_backward(begun + round((30 + longer) * _MS), **about)
            at = begun + round(longer * _MS)
            for bucket in range(3):
                self._add(EventKind.MARK, at + (50 + 10 * bucket) * _MS, "bucket ready", number=bucket + 1)
            self._taken += 1
            said: dict[str, Any] = {} if samples is None else {"local_samples": samples, "global_samples": 2 * samples}
            self._add(EventKind.BEGIN, at + 70 * _MS, "averaging gradients", number=self._taken, **said)
            self._around("all_reduce", "collective", at + 75 * _MS, at + 80 * _MS, backend="gloo (cpu)")
            self._around("wait for all_reduce", "wait", at + 80 * _MS, at + 95 * _MS)
            self._at = at + 100 * _MS
            self._add(EventKind.END, self._at)

    def begin_backward(self, at: int | None = None, *, averages: bool = True, **about: Any) -> None:
        """Begin a backward, in the middle of what comes before the next one."""
        about = {**self._about, **about, "averages": averages}
        self._add(EventKind.MARK, at or self._at + 20 * _MS, "backward begins", **about)

    def close(self) -> None:
        """Close the window."""
        self._writer.close()

    def _add(
        self, kind: EventKind, at: int, name: str = "", *, cat: str = "gradients", number: int = 0, **of: Any
    ) -> None:
        self._writer.add(kind, self._writer.name(name, cat, **of) if name else 0, number, at=at)

    def _around(self, name: str, category: str, begun: int, ended: int, **about: Any) -> None:
        self._add(EventKind.BEGIN, begun, name, cat=category, **about)
        self._add(EventKind.END, ended)


def steps_of(folder: Path, ranks: int) -> Trace:
    """Put together what these ranks have recorded."""
    trace = collect(folder, range(ranks), Origin(node=0, nodes=1, host="here", world_size=ranks, start=""))
    assert trace is not None
    return trace


class Checked:
    """A trace whose form is right: JSON, in order of time, slices inside of each other, arrows between slices."""

    def __init__(self, path: Path) -> None:
        self.data = json.loads(gzip.decompress(path.read_bytes()))
        self.events: list[Event] = self.data["traceEvents"]
        self.about = self.data["lockstep"]
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self.ranks = {int(pid): rank for pid, rank in self.about["processes"].items()}
        self._check_order()
        self._check_names()
        self._check_nesting()
        self.arrows = self._check_arrows()

    def of(self, category: str, rank: int | None = None) -> list[Event]:
        """The slices of a category, of a rank or of all."""
        return [
            each
            for each in self.slices
            if each["cat"] == category and (rank is None or self.ranks.get(each["pid"]) == rank)
        ]

    def lane(self, rank: int, title: str) -> list[Event]:
        """The slices of a lane."""
        named = {
            (event["pid"], event["tid"])
            for event in self.events
            if event["name"] == "thread_name" and event["args"]["name"] == title
        }
        return [
            each for each in self.slices if (each["pid"], each["tid"]) in named and self.ranks.get(each["pid"]) == rank
        ]

    def call(self, rank: int, number: int) -> Event:
        """A rank's part of the collective with this number."""
        (found,) = [each for each in self.of("collective", rank) if each["args"].get("number") == number]
        return found

    def _check_order(self) -> None:
        timed = [event for event in self.events if event["ph"] != "M"]
        assert self.events == [event for event in self.events if event["ph"] == "M"] + timed, "metadata comes first"
        assert all(a["ts"] <= b["ts"] for a, b in itertools.pairwise(timed)), "in order of time"
        assert all(event["ts"] >= 0 and event.get("dur", 1) > 0 for event in timed)
        assert {event["ph"] for event in timed} <= {"X", "s", "f", "b", "e", "i", "t", "C", "n"}

    def _check_names(self) -> None:
        named = {(event["name"], event["pid"], event["tid"]) for event in self.events if event["ph"] == "M"}
        for event in self.slices:
            assert ("thread_name", event["pid"], event["tid"]) in named, event
            assert ("process_name", event["pid"], 0) in named, event

    def _check_nesting(self) -> None:
        lanes: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in self.slices:
            lanes[event["pid"], event["tid"]].append(event)
        for lane in lanes.values():
            ends: list[float] = []
            for event in lane:
                begun, ended = round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)
                while ends and ends[-1] <= begun:
                    ends.pop()
                assert not ends or ended <= ends[-1], f"{event} is half inside of what began before it"
                ends.append(ended)

    def _check_arrows(self) -> list[Event]:
        heads = {event["id"]: event for event in self.events if event["ph"] == "s" and event["cat"] == "late"}
        tails = [event for event in self.events if event["ph"] == "f" and event["cat"] == "late"]
        lanes: dict[tuple[int, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], [-math.inf]))
        for each in self.slices:  # in order of time
            begun, latest_ends = lanes[each["pid"], each["tid"]]
            begun.append(each["ts"])
            latest_ends.append(max(latest_ends[-1], each["ts"] + each["dur"]))
        assert len(heads) == len(tails) == len({event["id"] for event in tails}), "each arrow has its own number"
        for tail in tails:
            head = heads[tail["id"]]
            assert head["ts"] <= tail["ts"]
            assert (head["cat"], head["name"], head["args"]) == (tail["cat"], tail["name"], tail["args"])
            assert tail["bp"] == "e"
            for end in (head, tail):
                begun, latest_ends = lanes[end["pid"], end["tid"]]
                before = bisect.bisect_right(begun, end["ts"])
                assert end["ts"] < latest_ends[before], f"{end} is in no slice"
        return tails

    def check_against_collectives(self, *, least: float = 20.0) -> None:
        """Check each arrow against the collectives' numbers, worked out here once more.

        Args:
            least: microseconds of waiting that have an arrow.
        """
        calls: dict[tuple[object, ...], dict[int, Event]] = defaultdict(dict)
        waits: dict[tuple[object, ...], dict[int, Event]] = defaultdict(dict)
        for category, found in (("collective", calls), ("wait", waits)):
            for event in self.of(category):
                args = event["args"]
                if "number" in args:
                    of: tuple[Any, ...] = args["group"], args["operation"], args["number"]
                    found[of][self.ranks[event["pid"]]] = event
        expected = set()
        for key, by_rank in calls.items():
            size = next(iter(by_rank.values()))["args"]["ranks"]
            if len(by_rank) < size:
                continue
            late = max(by_rank, key=lambda rank: by_rank[rank]["ts"])
            came = by_rank[late]["ts"]
            for rank, call in by_rank.items():
                issues = call["args"]["backend"].endswith("(cpu)")  # gloo, whose call comes back at once
                stay = waits[key].get(rank) if issues else call
                if rank != late and stay is not None and stay["ts"] + least <= came < stay["ts"] + stay["dur"]:
                    expected.add((late, rank, key[2]))
        told = {(each["args"]["late"], each["args"]["waits"], each["args"]["number"]) for each in self.arrows}
        assert told == expected
        for each in self.arrows:
            assert self.ranks[each["pid"]] == each["args"]["waits"]
