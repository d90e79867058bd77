"""Read a trace again, and check that it is what a viewer expects."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


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
        assert len(heads) == len(tails) == len({event["id"] for event in tails}), "each arrow has its own number"
        for tail in tails:
            head = heads[tail["id"]]
            assert head["ts"] <= tail["ts"]
            assert (head["cat"], head["name"], head["args"]) == (tail["cat"], tail["name"], tail["args"])
            assert tail["bp"] == "e"
            for end in (head, tail):
                around = [
                    each
                    for each in self.slices
                    if (each["pid"], each["tid"]) == (end["pid"], end["tid"])
                    and each["ts"] <= end["ts"] < each["ts"] + each["dur"]
                ]
                assert around, f"{end} is in no slice"
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
