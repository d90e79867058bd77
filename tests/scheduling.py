"""Which of several workers (pytest-xdist) runs which file: tests that mostly wait run beside tests that compute.

Some files sleep through what the product waits for: five seconds until a rank is late, four until a machine is lost,
ten of a run that is sampled. Half of the workers take these and no others, so that the processors are never shared by
more than the other half, which helps once it has nothing else left. With two workers or fewer each takes every file.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

#: Files that take much longer than the processor time of their processes.
WAITING = frozenset(
    f"tests/{name}.py"
    for name in (
        "docs/test_symptoms",
        "faults/test_machines",
        "faults/test_nothing_left",
        "ranks/test_doctor",
        "ranks/test_gpu_hangs",
        "ranks/test_hosts",
        "ranks/test_interactive",
        "ranks/test_job_phases",
        "ranks/test_meeting",
        "ranks/test_notebooks",
        "ranks/test_rendezvous",
        "ranks/test_run_failures",
        "ranks/test_run_hosts",
        "ranks/test_run_late",
        "ranks/test_run_orphans",
        "ranks/test_run_restarts",
        "ranks/test_run_stops",
        "ranks/test_run_summary",
        "ranks/test_saved_aside",
        "ranks/test_saved_aside_kinds",
        "ranks/test_shm_faults",
        "ranks/test_spawn",
        "ranks/test_trace",
        "ranks/test_verify",
    )
)


class Overlapping(LoadScopeScheduling):  # type: ignore[misc]  # (Any: it comes without types)
    """Gives a worker one file after the other, of those that are for it, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Producer | None = None, waiting: frozenset[str] = WAITING) -> None:
        super().__init__(config, log)
        self._waiting = waiting

    def _next_for(self, node: WorkerController) -> str | None:
        """Name the file that a worker should run next; None: there is none for it."""
        waiting = next((scope for scope in self.workqueue if scope in self._waiting), None)
        # The workers are called gw0, gw1, …; the later half waits.
        if self.numnodes > 2 and int(node.gateway.id[2:]) >= (self.numnodes + 1) // 2:
            return waiting
        computing = next((scope for scope in self.workqueue if scope not in self._waiting), None)
        if self.numnodes > 2:
            return computing or waiting
        return next(iter(self.workqueue), None)

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next_for(node)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)  # from where it is taken
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not node.shutting_down and self._next_for(node) is None:
            node.shutdown()  # when it has done what it has
            return
        super()._reschedule(node)
