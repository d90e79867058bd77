"""The launcher's side of a trace: put together what the ranks have recorded, once they are through, or have ended."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lockstep import knobs
from lockstep.job.trace import Head, is_over, read_head, remove
from lockstep.rendezvous.messages import Round
from lockstep.runs import trace as traces
from lockstep.runs.timeline import Measured
from lockstep.runs.trace import Origin, Trace
from lockstep.text import counted, which_ranks

#: Seconds that the trace may keep the launcher at the end, and that machine 0 waits there for the other machines' part.
LIMIT, OTHERS = 60.0, 5.0


class Tracer:
    """Writes the trace of one start of this machine's ranks, in a thread: the launcher goes on with what it does.

    Args:
        folder: makes the folder of the run's logs, or returns it.
        home: the private folder of this start.
        round_: the machines that have started together.
        asked: the number of steps to trace, and of steps before them; None: no trace was requested, and the trace of
            the steps which are traced anyway is written without a message.
    """

    def __init__(self, folder: Callable[[], Path], *, home: Path, round_: Round, asked: tuple[int, int] | None) -> None:
        self._folder, self._home, self._round = folder, home, round_
        self._on_demand, self._asked = asked is not None, asked or knobs.TRACED_ANYWAY
        #: The name of the trace's file; None: it is not written yet.
        self.written: str | None = None
        self._thread: threading.Thread | None = None
        #: Messages of the thread; the profiles that existed when it began.
        self._said: list[str] = []
        self._profiles = -1
        self._began = time.time()

    def look(self) -> list[str]:
        """Begin to write once all ranks of this machine are through, and return the messages for the user.

        To be called once a second.
        """
        if self._thread is None:
            if all(is_over(self._home, rank) for rank in self._round.local_ranks):
                self._begin()
        elif not self._thread.is_alive():
            return self._take_said()
        return []

    def conclude(self, *, steps: int) -> list[str]:
        """Write what was recorded, now that the ranks have ended, unless it was written; return the messages for the
        user.

        Args:
            steps: the number of steps that the ranks have taken, for the message that says why there is no trace.
        """
        if not any(self._opened(rank) for rank in self._round.local_ranks):
            if not self._on_demand:
                return []
            count, first = self._asked
            if steps > first:
                return [f"no trace: the ranks took {steps:,} steps and could not write it; their messages say why"]
            least = max(0, steps - count)
            better = f"; --trace {min(count, steps)}:{least} would have traced the last ones" if steps else ""
            return [f"no trace: --trace {count}:{first} begins after {first:,} steps, and {steps:,} were taken{better}"]
        until = time.monotonic() + LIMIT
        if self._thread is not None and self._count_profiles() > self._profiles:
            self._thread.join(LIMIT)  # what torch.profiler has exported since then goes in as well
            if not self._thread.is_alive():  # two would write the same file
                self._said.clear()
                self._thread = None
        if self._thread is None:
            self._begin()
        assert self._thread is not None
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            return [f"the trace was not written within {LIMIT:g} s, and is left out"]
        if not self._on_demand:
            return self._take_said()
        return [*self._take_said(), *self._merge_with_others()]

    def _begin(self) -> None:
        self._profiles = self._count_profiles()
        self._thread = threading.Thread(target=self._write, name="lockstep-trace", daemon=True)
        self._thread.start()

    def _opened(self, rank: int) -> bool:
        try:
            head = read_head(self._home, rank)
        except OSError:
            return True  # as far as is known; who reads the rest will say what is wrong
        return head is not None and bool(head[Head.OPENED])

    def _count_profiles(self) -> int:
        return len([*self._home.glob("profile-*.json")])

    def _take_said(self) -> list[str]:
        said, self._said = self._said, []
        return said

    # In the thread -----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        round_ = self._round
        measured = None if round_.clock is None else Measured(*round_.clock)
        origin = Origin(
            node=round_.node_rank,
            nodes=len(round_.ranks),
            host=socket.gethostname(),
            world_size=round_.world_size,
            start=f"{round_.job} {round_.number}".strip(),
            measured=measured,
        )
        try:
            trace = traces.collect(self._home, round_.local_ranks, origin)
            if trace is not None:
                path = self._path(round_.node_rank)
                trace.write(path)
                self.written = path.name
                if self._on_demand:
                    self._said += _describe(trace, path, alone=len(round_.ranks) == 1)
                else:
                    remove(self._home, round_.local_ranks)
        except (OSError, ValueError) as error:
            self._said.append(f"the trace can't be written: {error}")

    def _path(self, node: int | None) -> Path:
        # The name is the same on all machines. Of traces that were not requested, only the last start's is kept.
        again = f"-restart{self._round.number}" if self._round.number and self._on_demand else ""
        of = f"-node{node}" if node is not None and len(self._round.ranks) > 1 else ""
        return self._folder() / f"trace{again}{of}.json.gz"

    # Several machines --------------------------------------------------------------------------------------------

    def _merge_with_others(self) -> list[str]:
        """On machine 0: merge the machines' files where all of them write into one folder."""
        nodes = len(self._round.ranks)
        if nodes == 1 or self._round.node_rank:
            return []
        paths = [self._path(node) for node in range(nodes)]
        until = time.monotonic() + OTHERS
        while not all(self._is_new(path) for path in paths) and time.monotonic() < until:
            time.sleep(0.05)
        there = [path for path in paths if self._is_new(path)]
        if len(there) < nodes:
            return [
                f"the trace of {nodes - len(there)} of {nodes} machines is not in {paths[0].parent}: copy it here, and "
                "lockstep runs trace FILE… merges them; if all machines share the folder of --log-dir, they are "
                "merged automatically"
            ]
        try:
            trace, path = traces.merge([traces.read(each) for each in there]), self._path(None)
            trace.write(path)
        except (OSError, traces.BadTrace) as error:
            return [f"the machines' traces can't be merged: {error}"]
        return _describe(trace, path, alone=True)

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime > self._began - 1.0
        except OSError:
            return False


def _describe(trace: Trace, path: Path, *, alone: bool) -> list[str]:
    """Return in words which steps a trace has, and what it lacks."""
    about, ranks = trace.about, trace.ranks
    whole = "" if alone else " of this machine"
    said = [
        f"the trace of steps {trace.first_step} to {trace.last_step} on {counted(len(ranks), 'rank')}"
        f"{whole} is in {path}; https://ui.perfetto.dev opens it"
    ]
    if about["missing_ranks"]:
        said.append(f"it lacks {which_ranks(about['missing_ranks'])}, which did not reach these steps")
    if about["cut_off"]:
        said.append(f"it ends early for {which_ranks(about['cut_off'])}, which ended within it")
    if about["lost_events"]:
        lost = sum(about["lost_events"].values())
        said.append(f"there was no room for {lost:,} of its events: trace fewer steps")
    for name, told in about["profiles"].items():
        rank = name.partition("/")[0]
        if "trouble" in told:
            said.append(f"the profile of rank {rank} is left out of it: {told['trouble']}")
        elif not told["events"]:
            said.append(f"the profile of rank {rank} is left out of it: it is of other steps")
    return said
