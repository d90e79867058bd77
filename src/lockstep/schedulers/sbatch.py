"""A batch script for Slurm: it starts a launcher on each machine, is told before its time is over, and resumes later.

Slurm's manual pages of sbatch and srun say what the options do. What a site's slurm.conf would otherwise decide
(WaitTime, KillOnBadExit, JobRequeue, how files are opened), the script sets itself.
"""

from __future__ import annotations

import enum
import re
import shlex
from dataclasses import dataclass

from lockstep.schedulers.start import SAVED, StartCommand

#: Seconds between the end of --grace and that of the job, to kill and report the last ranks and queue the job again.
_MARGIN = 30
#: Seconds by which Slurm may send a signal too early.
_EARLY = 60
#: The most seconds before its limit at which Slurm sends a job a signal (sbatch's manual page).
_MOST = 65535
#: Options that the script needs as they are; they can't be given as --sbatch.
_OWN = frozenset(
    {"N", "n", "c", "t", "o", "J", "p", "A", "nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "time"}
)
_OWN |= {"gpus-per-node", "mem", "signal", "requeue", "no-requeue", "open-mode", "output", "job-name"}
_OWN |= {"partition", "account"}


class Requeue(enum.Enum):
    """What queues the job again when it has saved and left."""

    #: The script requeues, by ``scontrol requeue`` at its end.
    SCRIPT = "script"
    #: Slurm requeues, if its slurm.conf has ``RequeueExit=75``.
    SLURM = "slurm"
    #: The job is not requeued, not even after the failure of a machine.
    NEVER = "never"


@dataclass(frozen=True)
class BatchJob:
    """A job for Slurm. Sizes and times are as sbatch takes them.

    Raises:
        ValueError: an option makes no sense, or two contradict each other.
    """

    start: StartCommand
    #: The time limit, as ``[DAYS-]HOURS:MINUTES:SECONDS`` or in sbatch's other forms.
    time: str
    name: str
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    #: Memory of each machine; None: the site's default.
    memory: str | None = None
    partition: str | None = None
    account: str | None = None
    #: Seconds before the limit at which the ranks are asked to stop; None: enough for --grace.
    signal_before: int | None = None
    requeue: Requeue = Requeue.SCRIPT
    #: The folder of the ranks' logs, which has a folder for each start.
    logs: str = "logs"
    #: More options of sbatch, each as on its command line.
    more: tuple[str, ...] = ()
    #: Lines of shell that come before srun.
    setup: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, text in (("--name", self.name), ("--partition", self.partition), ("--account", self.account)):
            if text is not None and not re.fullmatch(r"[\w.,@:+-]+", text):
                raise ValueError(f"{option} {text!r}: expected a word without spaces or quotes")
        if self.memory is not None and not re.fullmatch(r"\d+[KMGT]?", self.memory):
            raise ValueError(f"--mem {self.memory}: expected a size for each machine, such as 64G")
        for text in self.more:
            self._check(text)
        for line in self.setup:
            if "\n" in line:
                raise ValueError(f"--setup {line!r}: expected one line of shell; give the option once for each line")
        self._check_times()

    @property
    def before(self) -> int:
        """Seconds before the limit at which the ranks are asked to stop."""
        return int(self.start.grace) + 2 * _MARGIN if self.signal_before is None else self.signal_before

    def text(self) -> str:
        """Return the script."""
        return "\n".join([*self._directives(), *self._setup(), "", *self._srun(), ""])

    def _check(self, option: str) -> None:
        name = re.match(r"--?([A-Za-z][\w-]*)", option)
        if name is None or "\n" in option:
            raise ValueError(f"--sbatch {option!r}: expected an option of sbatch, such as --sbatch=--constraint=a100")
        if (name[1] if option.startswith("--") else name[1][0]) in _OWN:
            raise ValueError(
                f"--sbatch {option}: the script sets this itself; lockstep submit slurm --help says with what"
            )

    def _check_times(self) -> None:
        limit, grace = seconds(self.time), self.start.grace
        if self.before < grace + _MARGIN:
            raise ValueError(
                f"--signal-before {self.before} does not leave --grace {grace:g} s and {_MARGIN} s to end the job: "
                f"expected {int(grace) + _MARGIN} or more, or a shorter --grace"
            )
        if self.before > _MOST:
            raise ValueError(f"the ranks would be asked to stop {self.before} s before the limit; Slurm takes {_MOST}")
        if self.before + _EARLY >= limit:
            raise ValueError(
                f"--time {self.time} is {limit} s, and {self.before} s before its end the ranks are asked to stop "
                f"(Slurm may do so up to {_EARLY} s earlier), which leaves no time to train: ask for more time, or for "
                "a shorter --grace"
            )

    def _directives(self) -> list[str]:
        start = self.start
        options = [
            f"--job-name={self.name}",
            f"--nodes={start.machines}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self._cpus}",
            *([f"--gpus-per-node={start.ranks * self.gpus_per_rank}"] if self.gpus_per_rank else []),
            *([f"--mem={self.memory}"] if self.memory is not None else []),
            f"--time={self.time}",
            f"--signal=TERM@{self.before}",
            "--no-requeue" if self.requeue is Requeue.NEVER else "--requeue",
            "--open-mode=append",
            f"--output={self.name}-%j.out",
            *([f"--partition={self.partition}"] if self.partition is not None else []),
            *([f"--account={self.account}"] if self.account is not None else []),
            *self.more,
        ]
        return ["#!/bin/bash", *(f"#SBATCH {option}" for option in options)]

    def _setup(self) -> list[str]:
        return ["", *self.setup] if self.setup else []

    def _srun(self) -> list[str]:
        # srun does not take --cpus-per-task over from sbatch; --wait=0 lets rank 0 take its time after the others' end.
        srun = f"srun --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpus-per-task={self._cpus} \\"
        logs = f'{shlex.quote(self.logs)}/"$SLURM_JOB_ID"/start-"${{SLURM_RESTART_COUNT:-0}}"'
        run = f"    lockstep run {shlex.join(self.start.options())} --log-dir {logs} \\"
        command = [srun, run, f"    {shlex.join(self.start.target())}"]
        asked = (
            f"# {self.before} s before the limit the ranks are asked to stop. They finish a step and save within "
            f"{self.start.grace:g} s."
        )
        if self.requeue is not Requeue.SCRIPT:
            what = {
                Requeue.SLURM: f"The job ends with {SAVED}, and RequeueExit={SAVED} in slurm.conf queues it again.",
                Requeue.NEVER: f"The job ends with {SAVED}; submitted again, it resumes.",
            }[self.requeue]
            return [asked, f"# {what}", f"exec {command[0]}", *command[1:]]
        return [
            asked,
            *command,
            "code=$?",
            "",
            f"# {SAVED}: all have saved and left. The job is queued again, and a Checkpointer resumes.",
            f'[ "$code" -eq {SAVED} ] && exec scontrol requeue "$SLURM_JOB_ID"',
            'exit "$code"',
        ]

    @property
    def _cpus(self) -> int:
        return self.start.ranks * self.cpus_per_rank


def seconds(time: str) -> int:
    """Return a time limit in seconds, from one of sbatch's forms.

    Raises:
        ValueError: it is none of them.
    """
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 3 or (dash and not days.isdecimal()):
        raise ValueError(f"--time {time}: expected [DAYS-]HOURS:MINUTES:SECONDS, MINUTES …, as for sbatch")
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, rest_seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + rest_seconds
    hours, minutes, rest_seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    return (hours * 60 + minutes) * 60 + rest_seconds


def default_grace(time: str) -> float:
    """Return a ``--grace`` that suits a time limit, in seconds: four minutes, or a quarter of the limit if less.

    Raises:
        ValueError: as for :func:`seconds`.
    """
    return float(min(240, seconds(time) // 4))
