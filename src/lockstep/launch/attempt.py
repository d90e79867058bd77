"""One start of a job's ranks, from the fork to the last exit: its policy, its private folder, what it left behind."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep import knobs
from lockstep.job import workers
from lockstep.job.files import FailureRecord, JobFiles, StopNote
from lockstep.job.page import Cell, Pages
from lockstep.launch import report
from lockstep.launch.evidence import memory_group
from lockstep.launch.hangs import HangWatch
from lockstep.launch.output import LogFolder, Streams
from lockstep.launch.policy import Policy
from lockstep.launch.report import Facts
from lockstep.launch.spec import JobSpec, is_loopback, rank_environment


class Attempt:
    """The ranks of this node, started once. A restart is another attempt, in a folder of its own.

    Args:
        spec: the job.
        home: the job's private folder.
        restart: how many attempts came before.
    """

    def __init__(self, spec: JobSpec, *, home: str, restart: int) -> None:
        self.restart = restart
        #: Private to this attempt, so that it meets no rendezvous and no record of an earlier one.
        self.folder = Path(home) / str(restart)
        self.folder.mkdir(mode=0o700)
        self._spec = spec
        self.local_rank = {spec.identity(k).rank: k for k in range(spec.nproc)}
        self.policy = Policy(self.local_rank, grace=spec.grace)
        self._files = JobFiles(self.folder)
        self._pages = Pages(self.folder, spec.world_size)
        #: Says which rank holds up the others.
        self.hangs = HangWatch(
            self._files,
            self._pages,
            range(spec.nproc * spec.node_rank, spec.nproc * (spec.node_rank + 1)),
            world_size=spec.world_size,
            shortest=knobs.late(),
        )
        self._memory = memory_group()
        self._kills_before = self._memory.kills() if self._memory is not None else None
        self._outcome: report.Outcome | None = None

    def environment(self, local_rank: int, master: tuple[str, int]) -> dict[str, str | None]:
        """The variables that one rank of this node sees changed.

        Args:
            local_rank: which.
            master: address and port for scripts that open a process group themselves.
        """
        return rank_environment(
            self._spec.identity(local_rank),
            nnodes=self._spec.nnodes,
            master=master,
            folder=str(self.folder),
            loopback=is_loopback(master[0]) and "GLOO_SOCKET_IFNAME" not in os.environ,
            restart=self.restart,
        )

    def steps(self, rank: int) -> tuple[int | None, int | None]:
        """The optimizer steps of the whole run, and those that ``rank`` has taken since this start; None where nobody
        counts."""
        taken = self._pages.get(rank, Cell.STEPS)
        run = self._pages.get(rank, Cell.RUN_STEPS) or taken
        return (run - 1 if run else None), (taken - 1 if taken else None)

    @property
    def listening(self) -> bool:
        """Whether ranks save and leave by themselves when they are asked to stop."""
        return any(self._pages.all(Cell.LISTENS))

    def stop_note(self) -> StopNote | None:
        """Where the run goes on, if its ranks were asked to stop and have saved."""
        return StopNote.read(self.folder)

    def mark_failed(self) -> None:
        """Tell the ranks that the signal to stop which follows comes from a failure."""
        self._files.mark_failed()

    def record(self, rank: int) -> FailureRecord | None:
        """A rank's last words."""
        return FailureRecord.read(self.folder, rank)

    def outcome(self, streams: Streams | None = None, logs: LogFolder | None = None) -> report.Outcome:
        """How this attempt has ended, as it was when first asked: records and counters are read once.

        Args:
            streams: where the ranks' output went; None: where the caller's goes.
            logs: their logs; None: there are none.
        """
        if self._outcome is None:
            endings = []
            for rank, local_rank in self.local_rank.items():
                logged = logs is not None and streams is not None and streams.logged(local_rank)
                endings.append(
                    report.Ending(
                        self.policy.states[rank],
                        self.record(rank),
                        log=logs.log(rank) if logs is not None and logged else None,
                        shown=streams is not None and streams.shown(local_rank),
                    )
                )
            facts = Facts.collect(
                self._memory, kills_before=self._kills_before, worker=lambda pid: workers.find(self.folder, pid)
            )
            self._outcome = report.Outcome(tuple(endings), facts, self._spec.world_size, late=self.hangs.text)
        return self._outcome

    def close(self) -> None:
        """Let go of the mapped memory; the folder stays until the job's goes."""
        self._pages.close()
