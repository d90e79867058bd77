"""Call the roll where ranks meet at a port: agree on which processes are the ranks of this meeting, and no others.

Note [Roll call]
~~~~~~~~~~~~~~~~
The store at an address and a port may hold more than this meeting. torchrun's outlives ranks that it starts again; a
rank 0 that leaves the world and joins anew may find its own store; a rank that waits may be replaced, by a pod on
another machine; and where two jobs have the same port, the ranks of one find the rank 0 of the other, since their own
could not listen there. So nothing counts that stands under a rank's number alone. Rank 0 opens a meeting under a name
that it draws; every other rank writes under this name who it is; when all have, rank 0 writes down one process for each
number, and these have met. All that they write from then on has the meeting's name in front.

A process that finds itself left out has come to a meeting of before, and waits for the next one as long as the store is
there; or another process has its number. Where rank 0 serves the store itself, it is an error at once to find another
process there that can be seen to live on this machine: two jobs meet at one port, and the first process has the place,
whichever job it belongs to. (In an agent's store it may be left of a start before, and the last one counts, as it does
between machines and containers.) Only where a scheduler has a name for the world (``LOCKSTEP_WORLD``) can ranks tell:
one whose name is not rank 0's is refused before it writes anything.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    PrefixStore,
    Store,
)

from lockstep import _proc
from lockstep.comm.group.meeting import PAUSES, Whereabouts, get
from lockstep.errors import EnvironmentMismatch, LockstepError, RendezvousError
from lockstep.identity import Identity
from lockstep.text import which_ranks


@dataclass(frozen=True)
class _Opened:
    """A meeting that rank 0 has opened."""

    #: The scheduler's name for its world; empty: it has none.
    world: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> _Opened:
        told = json.loads(text)
        return cls(told["world"], told["name"])


@dataclass(frozen=True)
class _Member:
    """A process that comes to a meeting. It is another one each time that it comes."""

    process: Whereabouts = field(default_factory=Whereabouts.mine)
    host: str = field(default_factory=socket.gethostname)
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def parse(cls, text: str) -> _Member:
        told = json.loads(text)
        return cls(Whereabouts(**told["process"]), told["host"], told["token"])

    def is_another_here(self) -> bool:
        """Return whether this is a process on this machine that lives, and not the one that asks."""
        me = Whereabouts.mine()
        if self.process == me or self.process.why_apart(me) is not None:
            return False
        return _proc.lives(self.process.pid, self.process.started)


def call_roll(store: Store, identity: Identity, *, where: str, world: str, is_agents: bool, timeout: float) -> Store:
    """**Collective.** Return a part of the store that the ranks of this meeting have for themselves.

    Args:
        store: where the ranks meet.
        identity: this rank's.
        where: the store's address and port, for messages.
        world: the scheduler's name for the rank's world; empty: it has none.
        is_agents: an agent serves the store, and not rank 0, so it may outlive the ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        EnvironmentMismatch: another process that lives on this machine is this rank, in a store that rank 0 serves; or
            rank 0 belongs to another world.
        RendezvousError: not all ranks came, or the store is gone, or another program's.
    """
    if identity.rank == 0:
        return _open(store, identity.world_size, world, time.monotonic() + timeout)
    try:
        return _join(store, identity, where, world, is_agents, timeout)
    except LockstepError:
        raise
    except RuntimeError as error:  # torch's stores have no type of their own for what goes wrong in them
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size}: the store at {where} answers no more, most likely because "
            f"the rank 0 or the launcher that served it has ended: look for the error there. {error}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size}: what the store at {where} holds is of another program, or "
            f"of another version of lockstep ({type(error).__name__}: {error})"
        ) from error


def _key(world_size: int) -> str:
    return f"lockstep/meeting/{world_size}"


def _open(store: Store, world_size: int, world: str, until: float) -> Store:
    opened = _Opened(world)
    store.set(_key(world_size), json.dumps(asdict(opened)))
    ours = PrefixStore(opened.name, store)
    ours.set("members", json.dumps(_all_here(ours, world_size, until)))
    return ours


def _all_here(ours: Store, world_size: int, until: float) -> dict[int, str]:
    """Wait until every rank has come and none has given up since. Keys stay, so that no ``get`` of torch's waits."""
    while True:
        for rank in range(1, world_size):
            get(ours, f"here/{rank}", until, f"rank 0 of {world_size}: rank {rank} did not come")
        # Read together: one that came early may have been replaced since, or have given up.
        told = {rank: ours.get(f"here/{rank}").decode() for rank in range(1, world_size)}
        left = [rank for rank, text in told.items() if not text]
        if not left:
            return told
        if time.monotonic() >= until:
            raise RendezvousError(
                f"rank 0 of {world_size}: {which_ranks(left)} came, and gave up before all were there"
            )
        time.sleep(PAUSES[1])


def _join(store: Store, identity: Identity, where: str, world: str, is_agents: bool, timeout: float) -> Store:
    me, here = f"rank {identity.rank} of {identity.world_size}", json.dumps(asdict(_Member()))
    ours: Store | None = None
    opened, taken = "", ""
    key, until, pause = _key(identity.world_size), time.monotonic() + timeout, PAUSES[0]

    def refuse_another_here(told: str) -> None:
        if is_agents or not told:
            return
        other = _Member.parse(told)
        if other.is_another_here():
            raise EnvironmentMismatch(
                f"{me} is there already at {where}, as process {other.process.pid} of this machine: two jobs meet at "
                f"one port, or two processes have RANK={identity.rank}. {advice(world)}"
            )

    while True:
        newest = store.get(key).decode() if store.check([key]) else ""
        if newest != opened:
            meeting = _Opened.parse(newest)
            if meeting.world != world:
                raise EnvironmentMismatch(
                    f"{me} belongs to {world or 'a job without a name'}, and found rank 0 of "
                    f"{meeting.world or 'a job without a name'} at {where}: two jobs meet at one port. {advice(world)}"
                )
            opened, ours, taken = newest, PrefixStore(meeting.name, store), ""
            until, pause = time.monotonic() + timeout, PAUSES[0]  # rank 0 waits as long from now on
            if ours.check([f"here/{identity.rank}"]):
                refuse_another_here(ours.get(f"here/{identity.rank}").decode())
            ours.set(f"here/{identity.rank}", here)
        if ours is not None and ours.check(["members"]):
            taken = json.loads(ours.get("members"))[str(identity.rank)]
            if taken == here:
                return ours
            refuse_another_here(taken)
        now = time.monotonic()
        if now >= until:
            if ours is not None and not taken:
                ours.compare_set(f"here/{identity.rank}", here, "")  # rank 0 must not count on this process
            raise RendezvousError(f"{me}: {_missing(opened, taken, where)}")
        time.sleep(min(pause, until - now))
        pause = min(2 * pause, PAUSES[1])


def _missing(opened: str, taken: str, where: str) -> str:
    if not opened:
        return (
            f"a store answers at {where}, but no rank 0 of a world of this size has opened a meeting: it waits for "
            "other ranks to connect, did not come, has another WORLD_SIZE, or the store is another program's"
        )
    if not taken:
        return f"rank 0 has opened a meeting at {where}, and not all ranks have come; or it has ended since"
    other = _Member.parse(taken)
    return (
        f"rank 0 at {where} has begun with another process in this one's place, {other.process.pid} on {other.host}. "
        "If that one has ended, start rank 0 again; if not, two jobs meet at one port, or two processes have one rank"
    )


def advice(world: str) -> str:
    """Say what to do about a port that is in use.

    Args:
        world: as for :func:`call_roll`.
    """
    if world:
        return (
            "Set MASTER_PORT to a free port for all tasks (srun --export=ALL,MASTER_PORT=PORT …). Where none is set, "
            "the step's number gives the port, so it is enough to start the step again"
        )
    return (
        "Choose another port (--master_port, or MASTER_PORT where nothing else sets it), or start with lockstep run, "
        "which needs none on one machine"
    )
