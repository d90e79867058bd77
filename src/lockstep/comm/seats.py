"""Let each rank take its seat where ranks meet at a port, so that two jobs never mix there.

Note [Seats]
~~~~~~~~~~~~
Ranks that meet at an address and a port know each other by their numbers alone. Where two jobs have the same port, the
second rank 0 fails, since the port is in use. But the other ranks of that job find the rank 0 of the first one, and
would take the places of ranks that come later: models of two jobs would train as one. So each process writes under its
number who it is, before anything else, and one that finds another process there is refused. Where a scheduler has a
name for the world (``LOCKSTEP_WORLD``), each compares it with rank 0's before, so that no stranger takes a seat.

A rank that is started again while rank 0 still waits takes the seat of the process before, if that was on the same
machine, where it can be seen to be gone.

The store of an agent (torchrun's, or that of our launchers) has no seats: the agents have found each other by the name
of their job.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep import _proc
from lockstep.comm.group.meeting import Whereabouts, get
from lockstep.errors import EnvironmentMismatch
from lockstep.identity import Identity


@dataclass(frozen=True)
class Seat:
    """The process that is a rank."""

    #: The scheduler's name for the rank's world; empty: it has none.
    world: str
    host: str
    process: Whereabouts

    @classmethod
    def mine(cls, world: str) -> Seat:
        """Return this process's."""
        return cls(world, socket.gethostname(), Whereabouts.mine())

    @classmethod
    def parse(cls, text: str) -> Seat:
        """Read what :meth:`to_text` has written."""
        told = json.loads(text)
        return cls(told["world"], told["host"], Whereabouts(**told["process"]))

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    def is_deserted(self) -> bool:
        """Return whether the process can be seen to be gone, which it can on this machine alone."""
        if self.process.why_apart(Whereabouts.mine()) is not None:
            return False
        return _proc.started(self.process.pid) != self.process.started


def take(store: Store, identity: Identity, *, where: str, world: str, timeout: float) -> None:
    """**Collective.** Take this rank's seat, once in a process and store.

    Args:
        store: where the ranks meet; for this alone.
        identity: this rank's.
        where: the store's address and port, for messages.
        world: the scheduler's name for the rank's world; empty: it has none.
        timeout: seconds to wait for rank 0.

    Raises:
        EnvironmentMismatch: another process has it, or rank 0 belongs to another world.
        RendezvousError: rank 0 did not come.
    """
    me = f"rank {identity.rank} of {identity.world_size}"
    if identity.rank:
        _compare_worlds(store, me, where, world, timeout)  # first: the seat of another world's rank is not for this one
    key, mine = str(identity.rank), Seat.mine(world).to_text()
    found = bytes(store.compare_set(key, "", mine)).decode()
    if found != mine and Seat.parse(found).is_deserted():
        found = bytes(store.compare_set(key, found, mine)).decode()
    if found != mine:
        other = Seat.parse(found)
        raise EnvironmentMismatch(
            f"{me} is there already at {where}: process {other.process.pid} on {other.host}. Two jobs meet at one "
            f"port, or two processes have RANK={identity.rank}. {advice(world)}"
        )


def _compare_worlds(store: Store, me: str, where: str, world: str, timeout: float) -> None:
    silent = f"{me}: a store answers at {where}, but rank 0 wrote nothing there (it waits for other ranks, or the store"
    limit = time.monotonic() + timeout
    theirs = Seat.parse(get(store, "0", limit, f"{silent} is another program's)").decode()).world
    if theirs != world:
        raise EnvironmentMismatch(
            f"{me} belongs to {world or 'a job without a name'}, and found rank 0 of "
            f"{theirs or 'a job without a name'} at {where}: two jobs meet at one port. {advice(world)}"
        )


def advice(world: str) -> str:
    """Say what to do about a port that is in use.

    Args:
        world: as for :func:`take`.
    """
    if world:
        return (
            "Set MASTER_PORT to a free port for all tasks (srun --export=ALL,MASTER_PORT=PORT …). Where none is set, "
            "the step's number gives the port, so it is enough to start the step again"
        )
    return "Choose another with --master_port, or start with lockstep run, which needs no port on one machine"
