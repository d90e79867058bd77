"""The messages between a launcher and its rendezvous client, and what the machines of a round tell each other."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.identity import Identity

#: The port at which the launchers meet, unless the user names one.
DEFAULT_PORT = 29400
#: Seconds by which the machines' clocks may differ before the user is told.
SKEW = 2.0

# The round -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """The machines that start their ranks together, and this machine's place among them.

    A job on one machine, or on a fixed list of machines, has one; others have a new one after each change.
    """

    #: This machine's number, from 0.
    node_rank: int
    #: The number of ranks on each machine.
    ranks: tuple[int, ...]
    #: The address at which the ranks meet, for scripts that open a process group themselves, and without a shared file.
    address: str
    port: int
    #: The number of earlier starts of this job's ranks, as all machines know it.
    number: int = 0
    #: The identity of the job.
    job: str = ""
    #: The scheduler's name for the job's ranks; empty: it has none.
    world: str = ""
    #: Machine -> its name in messages.
    hosts: tuple[str, ...] = ()
    #: The restarts that the job has used, and its last failure; see ``Restarts`` in launch/policy.py.
    history: dict[str, Any] = field(default_factory=dict)
    #: This machine's network device on the route to the others; None: any.
    interface: str | None = None
    #: True if the store at ``address`` is served already, so that no rank must serve it.
    served: bool = False
    #: How far this machine's CLOCK_MONOTONIC was ahead of machine 0's, by how much that may be wrong, and when that was
    #: on this clock, in nanoseconds; None: not known.
    clock: tuple[int, int, int] | None = None
    #: Machine -> True if its ranks had taken steps in a round before; empty: not known.
    stepped: tuple[bool, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return sum(self.ranks)

    @property
    def local_ranks(self) -> range:
        """The ranks of this machine."""
        first = sum(self.ranks[: self.node_rank])
        return range(first, first + self.ranks[self.node_rank])

    def identity(self, local_rank: int) -> Identity:
        """Return the place of one of this machine's ranks in the job."""
        return Identity(
            rank=self.local_ranks[local_rank],
            world_size=self.world_size,
            local_rank=local_rank,
            local_world_size=self.ranks[self.node_rank],
            node_rank=self.node_rank,
            launched=True,
        )

    def host(self, node: int) -> str:
        """Return what a machine is called, for messages."""
        return f"machine {node} ({self.hosts[node]})" if self.hosts else f"machine {node}"

    def to_spare(self, node: int, *, least: int, mutual: bool) -> tuple[int, ...]:
        """Return the machines without which the others go on though a machine's ranks can't take a step; none: they
        can't. See Note [Machines that can be spared] in launch/policy.py.

        Args:
            node: the machine, which leaves if it came to others that had taken steps.
            least: how many have to be left.
            mutual: whether it may fail only because of those that came, if it is none of them: then they leave.
        """
        came = tuple(each for each, stepped in enumerate(self.stepped) if not stepped)
        leave = (node,) if node in came else came if mutual else ()
        return leave if any(self.stepped) and len(self.ranks) - len(leave) >= least else ()


class EndKind(str, enum.Enum):
    """Why a round ended."""

    #: A rank failed.
    FAILED = "failed"
    #: A machine gave no sign of life, or its rendezvous client had to be started anew.
    LOST = "lost"
    #: Other machines want to take part: the ranks save, and all start again.
    JOINING = "joining"
    #: The job was asked to end.
    STOPPED = "stopped"
    #: All ranks have ended well.
    DONE = "done"


@dataclass(frozen=True)
class Verdict:
    """Why a round ended, as the first machine to know has written it down: all machines act on the same one."""

    kind: EndKind
    #: The machine that wrote the verdict.
    node: int
    #: The message for the user; complete for FAILED, with the traceback.
    text: str = ""
    #: FAILED: True if all ranks start again; the message about that; the exit code of the first rank to fail.
    again: bool = True
    what_now: str = ""
    exit_code: int = 1
    #: FAILED: True if it reads like the consequence of another rank's end. Such a verdict waits for the cause.
    echo: bool = False
    #: The signal, if the job was STOPPED.
    signum: int = 0
    #: The history, as in :class:`Round`, with this failure counted.
    history: dict[str, Any] = field(default_factory=dict)
    #: FAILED: how the first rank to fail ended; see ``failure_facts`` in launch/policy.py.
    failure: dict[str, Any] = field(default_factory=dict)
    #: FAILED: machines that leave; only the others start again.
    leave: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Verdict:
        """Read what another machine wrote."""
        return cls(**{**fields, "kind": EndKind(fields["kind"]), "leave": tuple(fields["leave"])})


# Launcher to client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The options of a client, in the environment that the zygote gives it."""

    #: ``HOST:PORT``, or ``file:PATH`` on a disk that all machines share.
    endpoint: str
    #: The identity of the job among those at the same endpoint.
    job: str
    min_nodes: int
    max_nodes: int
    #: The number of ranks on this machine.
    ranks: int
    #: Seconds to wait for ``min_nodes`` machines.
    join_timeout: float
    #: This machine's address for the others; None: its address on the route to the endpoint.
    local_addr: str | None = None
    #: The job's key, as hexadecimal digits; empty: none.
    key: str = ""
    #: The default backend that the user has chosen; empty: none. All machines must have chosen the same.
    backend: str = ""


@dataclass(frozen=True)
class Meet:
    """Take part in the next round."""

    #: The number of the last round that this machine took part in (-1: none); the job's identity and its history.
    last: int = -1
    job: str = ""
    history: dict[str, Any] = field(default_factory=dict)
    #: The reason why that round can't continue, if the others may not know it.
    lost: str = ""
    #: Seconds that are left to meet, after an earlier client has used some; None: all of them.
    seconds: float | None = None
    #: Name in messages -> value that should be the same on all machines.
    alike: dict[str, str] = field(default_factory=dict)
    #: True if ranks of this machine have taken steps in a round; True if the job lets no machine in any more.
    stepped: bool = False
    closed: bool = False


@dataclass(frozen=True)
class End:
    """Write down why the round ends, unless another machine was first; if DONE, that these ranks have ended."""

    verdict: dict[str, Any]


@dataclass(frozen=True)
class Looks:
    """The state of this machine's ranks, for the launchers of the others; see ``HangWatch.told``."""

    ranks: list[list[Any]]


@dataclass(frozen=True)
class Leave:
    """Leave for good."""

    #: True if the job is over for all machines.
    over: bool
    #: The exit code for machines that wait for the next round or to join; then the reason, if they don't know it.
    exit_code: int = 0
    why: str = ""


# Client to launcher --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Met:
    """The machines have met."""

    round: dict[str, Any]
    #: Warnings for the user, one message each: clocks that differ, versions.
    warnings: list[str] = field(default_factory=list)

    @property
    def place(self) -> Round:
        """The round."""
        fields = self.round
        clock = None if fields["clock"] is None else tuple(fields["clock"])
        lists = {name: tuple(fields[name]) for name in ("ranks", "hosts", "stepped")}
        return Round(**{**fields, **lists, "clock": clock})


@dataclass(frozen=True)
class Looking:
    """This client looks for the store or the other machines. Sent at least twice a second until they have met."""

    #: The number of seconds that are left.
    seconds: float
    #: The message for the user: the machines that are here, are awaited or were refused; empty: none.
    text: str = ""


@dataclass(frozen=True)
class Alive:
    """This client and the store are alive. Sent twice a second while a round is running."""

    #: Machines that wait to join; only machine 0 looks.
    waiting: int = 0
    #: The states of the other machines' ranks.
    ranks: list[list[Any]] = field(default_factory=list)
    #: Sentences about machines that wanted to join and may not.
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """The round has ended."""

    verdict: dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """The machines can't meet; or the job is over, and did not need this one."""

    error: str
    #: The exit code of the launcher.
    exit_code: int = 1
    #: True if another client may succeed: the machine with the store has gone, or one that had just come.
    again: bool = False


Command = Meet | End | Looks | Leave
Event = Looking | Met | Alive | Ended | Refused
