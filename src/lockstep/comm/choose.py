"""Choose the default group's backend for CPU ranks that name none: "shm" if it opens on all of them, else
"hierarchical" if that does (the job spans hosts, and some host has several ranks), else gloo.

Note [All ranks or none]: the ranks open the group's memory first, by themselves, and tell each other whether that
went well; what torch has to do afterwards waits for nobody, and is told as well. So a rank where the backend fails,
whatever fails in it, keeps no other waiting: all hear of it and take the next backend together.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    HashStore,
    PrefixStore,
    Store,
)

from lockstep import callsite, knobs
from lockstep.comm.group.group import Group
from lockstep.comm.group.meeting import ApartError, say_and_hear
from lockstep.comm.group.register import make_engine
from lockstep.errors import EnvironmentMismatch, RendezvousError
from lockstep.identity import Identity
from lockstep.text import sentence

#: Seconds that rank 0 waits for the others to read why there will be no group.
_FAREWELL = 10.0


def open_fastest(store: Store, identity: Identity, timeout: float) -> None:
    """**Collective.** Open torch's default group, for CPU tensors. Warns if ranks of one host can't share memory.

    Raises:
        RendezvousError: a rank did not come within ``timeout`` seconds.
    """
    # The store may be the one of an earlier world (init, shutdown, init): each meeting has keys of its own.
    store = PrefixStore(f"world/{store.add(f'worlds/{identity.rank}', 1)}", store)
    why = _try("shm", PrefixStore("shm", store), identity, timeout)
    if why is None:
        return
    if identity.local_world_size == identity.world_size:
        if identity.rank == 0:
            _warn(f"the ranks can't share memory, so gradients go through the network, by gloo, which is slower: {why}")
    elif (
        max(say_and_hear(store, "ranks here", identity.local_world_size, identity.rank, identity.world_size, timeout))
        > 1
    ):
        why = _try("hierarchical", PrefixStore("hierarchical", store), identity, timeout)
        if why is None:
            return
        if identity.rank == 0:
            _warn(f"ranks of one machine can't share memory, so all gradients go through the network, by gloo: {why}")
    _hand_to_torch("gloo", PrefixStore("gloo", store), identity, timeout)


def compare_choices(store: Store, chosen: str | None, identity: Identity, timeout: float) -> None:
    """**Collective.** Refuse backends that differ between hosts: each of them would wait for the other hosts in its own
    way until ``timeout``.

    Args:
        store: where the ranks meet; for this alone.
        chosen: what the program, ``LOCKSTEP_BACKEND`` or this rank's device asks for; None: nothing does.
        identity: this rank's.
        timeout: seconds to wait for the other ranks.

    Raises:
        EnvironmentMismatch: hosts ask for different backends; on all ranks.
        RendezvousError: a rank did not come.
    """
    words = say_and_hear(store, "chosen", [chosen, socket.gethostname()], identity.rank, identity.world_size, timeout)
    asked: dict[str | None, list[str]] = {}
    for rank, (name, host) in enumerate(words):
        asked.setdefault(name, []).append(f"rank {rank} on {host}")
    if len(asked) > 1:
        # Rank 0 may have the store, so it is the last to leave.
        store.add("read", 1)
        limit = time.monotonic() + _FAREWELL
        while identity.rank == 0 and store.add("read", 0) < identity.world_size and time.monotonic() < limit:
            time.sleep(0.01)
        each = "; ".join(f"{', '.join(ranks)}: {name or 'not chosen'}" for name, ranks in asked.items())
        raise EnvironmentMismatch(
            f"rank {identity.rank} of {identity.world_size}: the ranks ask for different backends ({each}). Pass the "
            f"same one to lockstep.init(), or set {knobs.BACKEND} to the same value on all hosts"
        )


def _warn(what: str) -> None:
    callsite.warn(f'{sentence(what)} lockstep.init("gloo") or {knobs.BACKEND}=gloo chooses that, and ends this warning')


def _try(backend: str, store: Store, identity: Identity, timeout: float) -> str | None:
    """Open the group over ``backend`` on all ranks, or on none and say why, in the same words on every rank."""
    rank, size = identity.rank, identity.world_size
    group: Group | None = None
    why: str | None = None
    try:
        engine = make_engine(backend, store, rank=rank, size=size, timeout=timeout)
        group = Group(engine, timeout=timeout, name="world")
        _hand_to_torch(backend, store, identity, timeout, group)
    except ApartError as error:
        return str(error)  # all ranks raised the same error
    except RendezvousError:
        raise  # a rank did not come
    except Exception as error:  # noqa: BLE001  (told to all ranks, and to the user by the warning)
        why = f"{type(error).__name__}: {error}"
    heard = say_and_hear(store, "opened", why, rank, size, timeout)
    refusals = [f"rank {peer}: {each}" for peer, each in enumerate(heard) if each]
    if not refusals:
        return None
    if not dist.is_initialized():
        # torch has counted the group that failed, and names of groups come from that number, which must be the same on
        # all ranks; closing a default group resets it.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    if group is not None:
        group.close()
    return "\n".join(refusals)


def _hand_to_torch(backend: str, store: Store, identity: Identity, timeout: float, group: Group | None = None) -> None:
    dist.init_process_group(
        backend,
        store=store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=timeout),
        pg_options=group,
    )
