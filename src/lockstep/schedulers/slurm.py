"""Read what Slurm's srun tells the tasks of a step.

A batch script and a shell of salloc have ``SLURM_PROCID`` and ``SLURM_NTASKS`` as well, but they are no tasks of a step
that srun started: those have ``SLURM_STEP_ID`` and the step's own variables. Only these count, since the job's say how
large the allocation is, and a step may be smaller. Slurm gives neither an address nor a port. All tasks work out the
same ones: the first host of the step, and a port computed from the numbers of job, step and restart, so that a requeued
job never meets ranks that are left of the start before.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import EnvironmentMismatch

#: Slurm's own steps (the batch script, a shell of salloc …) have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
#: Ports for meeting: below those that Linux hands out for outgoing connections (32768 on).
_FIRST_PORT, _PORTS = 10000, 20000
#: The variables of every task of a step, with Slurm 20.11 or later.
_NUMBERS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")
_LISTS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


@dataclass(frozen=True)
class SlurmTask:
    """One task of a step that srun started."""

    job: int
    step: int
    #: The number of times that the job was requeued.
    restart: int
    #: The cluster's name; empty: not known.
    cluster: str
    #: The task's rank in the step, from 0.
    rank: int
    #: The task's rank on its node, from 0.
    local_rank: int
    node: int
    #: Node -> its number of tasks.
    tasks_per_node: tuple[int, ...]
    #: Node -> its name.
    hosts: tuple[str, ...]

    @property
    def tasks(self) -> int:
        """Tasks of the step."""
        return sum(self.tasks_per_node)

    @property
    def address(self) -> str:
        """The address at which the tasks meet: the step's first host."""
        return self.hosts[0] if len(self.hosts) > 1 else "127.0.0.1"

    @property
    def port(self) -> int:
        """The port there, the same on all tasks and another one when the job is requeued."""
        return _FIRST_PORT + (self.job * 1009 + self.step * 101 + self.restart) % _PORTS

    @property
    def title(self) -> str:
        """The name of this start of the step, which no other step of its cluster has."""
        start = f", restart {self.restart}" if self.restart else ""
        cluster = f" of the cluster {self.cluster}" if self.cluster else ""
        return f"Slurm's job {self.job}, step {self.step}{start}{cluster}"


def is_task(env: Mapping[str, str]) -> bool:
    """Return whether this process is a task of a step that srun started."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in env


def read(env: Mapping[str, str]) -> SlurmTask | None:
    """Read this process's task; None if it is none, or the only one of its step.

    Raises:
        EnvironmentMismatch: only some of the variables are there, or they contradict each other.
    """
    if not is_task(env) or env.get("SLURM_STEP_NUM_TASKS") == "1":
        return None
    missing = [name for name in (*_NUMBERS, *_LISTS) if not env.get(name)]
    if missing:
        raise EnvironmentMismatch(
            f"srun's SLURM_STEP_ID={env['SLURM_STEP_ID']} is set but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not: pass on all of srun's variables or none (env -u "
            "SLURM_STEP_ID to run alone)"
        )
    job, step, rank, tasks, local_rank, node = (_number(env, name) for name in _NUMBERS)
    restart = _number(env, "SLURM_RESTART_COUNT") if env.get("SLURM_RESTART_COUNT") else 0
    per_node = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    hosts = expand(env["SLURM_STEP_NODELIST"])
    found = SlurmTask(job, step, restart, env.get("SLURM_CLUSTER_NAME", ""), rank, local_rank, node, per_node, hosts)
    fits = (
        found.tasks == tasks
        and len(hosts) == len(per_node)
        and rank < tasks
        and node < len(per_node)
        and local_rank < per_node[node]
    )
    if not fits:
        said = ", ".join(f"{name}={env[name]}" for name in (*_NUMBERS[2:], *_LISTS))
        raise EnvironmentMismatch(
            f"srun's variables contradict each other ({said}): are some left from another step or set by hand? "
            "Start again with srun, or env -u SLURM_STEP_ID to run alone"
        )
    return found


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Expand ``2(x3),1`` to 2, 2, 2, 1.

    Raises:
        EnvironmentMismatch: it is not written so.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise EnvironmentMismatch(f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected counts like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def expand(nodelist: str) -> tuple[str, ...]:
    """Expand ``gpu[07-09,12],login`` to the names of the hosts. Brackets may come in several places of a name.

    Raises:
        EnvironmentMismatch: it is not written so.
    """
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodelist)
    if ",".join(words) != nodelist:
        raise EnvironmentMismatch(f"SLURM_STEP_NODELIST={nodelist!r}: expected names like gpu[07-09,12],login")
    hosts: list[str] = []
    for word in words:
        pieces = re.split(r"\[([^\]]*)\]", word)
        choices = [[piece] if index % 2 == 0 else _range(piece, nodelist) for index, piece in enumerate(pieces)]
        hosts += ["".join(each) for each in itertools.product(*choices)]
    return tuple(hosts)


def _range(text: str, nodelist: str) -> list[str]:
    names: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            raise EnvironmentMismatch(f"SLURM_STEP_NODELIST={nodelist!r}: expected names like gpu[07-09,12],login")
        names += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return names


def _number(env: Mapping[str, str], name: str) -> int:
    text = env[name]
    if not text.isdecimal():
        raise EnvironmentMismatch(f"{name}={text!r}: expected a whole number")
    return int(text)
