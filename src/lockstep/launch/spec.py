"""What the user asked for, checked: the program, how many ranks, on how many nodes, and where their output goes."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep import knobs
from lockstep.identity import Identity

#: torch.distributed.launch's default, which the nodes of a job must agree on without talking to each other.
DEFAULT_MASTER_PORT = 29500
DEFAULT_GRACE = 10.0


class Output(enum.Enum):
    """Whose output is on the terminal."""

    #: The first rank's, plain; the others' goes to their logs.
    FIRST = "first"
    #: Everybody's, line by line, the others' with a prefix; and to the logs.
    ALL = "all"
    #: Everybody's, plain, as torch.distributed.launch has it; no logs unless a folder is given.
    SHARED = "shared"


@dataclass(frozen=True)
class Program:
    """What every rank runs: a script, or a module as ``python -m`` would."""

    target: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """A short word for it, fit for a folder's name."""
        stem = self.target if self.is_module else Path(self.target).stem
        return "".join(c if c.isalnum() or c in "._-" else "_" for c in stem)[:60]


@dataclass(frozen=True)
class JobSpec:
    """One node's part of a job. With several nodes, each starts its own part and they meet at the master's port."""

    program: Program
    #: Ranks on this node.
    nproc: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    #: The option that passes the local rank as the first argument, as torch.distributed.launch does, or None.
    local_rank_option: str | None = None
    #: Where the user wants the logs; None: a folder of our own.
    log_dir: Path | None = None
    output: Output = Output.FIRST
    #: Seconds between asking the ranks to stop and killing them.
    grace: float = DEFAULT_GRACE
    #: How often all ranks are started again after one failed.
    max_restarts: int = 0

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"{self.nproc} ranks: expected at least 1")
        if self.nnodes < 1:
            raise ValueError(f"--nnodes={self.nnodes}: expected at least 1")
        if not 0 <= self.node_rank < self.nnodes:
            raise ValueError(
                f"--node_rank={self.node_rank} does not fit --nnodes={self.nnodes}: expected 0 to {self.nnodes - 1}"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise ValueError(f"--master_port={self.master_port}: expected 1 to 65535")
        if not (math.isfinite(self.grace) and self.grace >= 0):
            raise ValueError(f"--grace={self.grace}: expected a number of seconds, 0 or more")
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts={self.max_restarts}: expected 0 or more")
        if self.max_restarts and self.nnodes > 1:
            raise ValueError(
                f"--max-restarts={self.max_restarts} with --nnodes={self.nnodes}: only jobs on one machine are "
                "restarted, since the launchers of several machines do not talk to each other; leave --max-restarts "
                "away, and let what starts the launchers (a scheduler) start all of them again, or use torchrun: a "
                "lockstep.Checkpointer goes on from the newest checkpoint either way"
            )

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nproc * self.nnodes

    def identity(self, local_rank: int) -> Identity:
        """The place of one of this node's ranks in the job."""
        return Identity(
            rank=self.nproc * self.node_rank + local_rank,
            world_size=self.world_size,
            local_rank=local_rank,
            local_world_size=self.nproc,
            node_rank=self.node_rank,
            launched=True,
        )

    def arguments(self, local_rank: int) -> list[str]:
        """What follows the program's name in this rank's ``sys.argv``."""
        own = [f"{self.local_rank_option}={local_rank}"] if self.local_rank_option is not None else []
        return [*own, *self.program.args]


def rank_environment(
    identity: Identity, *, nnodes: int, master: tuple[str, int], folder: str, loopback: bool, restart: int = 0
) -> dict[str, str | None]:
    """The variables that one rank sees changed; None means unset.

    Args:
        identity: the rank's place.
        nnodes: how many machines the job spans.
        master: address and port for scripts that call ``torch.distributed.init_process_group`` themselves.
        folder: the private folder of this start of the job.
        loopback: let gloo use the loopback device, whatever the host's name resolves to; for a job on one machine.
        restart: how often the job's ranks were started before.
    """
    env: dict[str, str | None] = dict(identity.to_environment())
    env["MASTER_ADDR"], env["MASTER_PORT"] = master[0], str(master[1])
    env[knobs.JOB_DIR] = folder
    env[knobs.RESTART] = env["TORCHELASTIC_RESTART_COUNT"] = str(restart)  # the latter is what torchrun sets
    env[knobs.STORE] = f"{folder}/store" if nnodes == 1 else None
    if loopback:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def parse_ranks(text: str, *, cores: int, gpus: int, option: str = "-n", auto: int | None = None) -> int:
    """How many ranks ``option`` asks for: a number, ``gpu`` (one for each), ``cpu`` (one for each core), or ``auto``.

    Args:
        text: what the user wrote.
        cores: of this machine.
        gpus: of this machine.
        option: the option's name, for messages.
        auto: what ``auto`` is where there is no GPU. None: one rank for two cores, at least one.
    """
    if text == "auto":
        return gpus or (max(1, cores // 2) if auto is None else auto)
    if text == "cpu":
        return cores
    if text == "gpu":
        if not gpus:
            raise ValueError(f"{option} gpu: there is no GPU on this machine, or CUDA_VISIBLE_DEVICES hides it")
        return gpus
    try:
        count = int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise ValueError(f"{option} {text}: expected a whole number of ranks, at least 1, or 'auto', 'gpu' or 'cpu'")
    return count


def parse_nodes(text: str, *, standalone: bool = False) -> int:
    """How many machines ``--nnodes`` asks for: ``N``, or torch's ``MIN:MAX`` where both are the same.

    Args:
        text: what the user wrote.
        standalone: the user also said that it is one.
    """
    least, _, most = text.partition(":")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ValueError(f"--nnodes={text}: expected a whole number of machines")
    if most and int(most) != int(least):
        raise ValueError(
            f"--nnodes={text}: the number of machines does not change while a job runs; say --nnodes={most} "
            "and start the launcher on each"
        )
    if standalone and int(least) > 1:
        raise ValueError(f"--standalone is for jobs on one machine, and --nnodes={text}: leave one away")
    return int(least)


def local_rank_option(sources: Iterable[str]) -> str:
    """The option that a program's parser knows: ``--local_rank`` (torch 1) if that is all it names, else
    ``--local-rank``, which torch passes today.

    Args:
        sources: the program's text, then that of the files around it, where its parser may be; the first that names
            either decides.
    """
    for text in sources:
        named = set(re.findall(r"[\"'](--local[-_]rank)\b", text))
        if named:
            return "--local-rank" if "--local-rank" in named else "--local_rank"
    return "--local-rank"
