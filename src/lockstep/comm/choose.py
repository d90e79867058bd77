"""Choose the default group's backend for CPU ranks that name none: "shm" if it opens on all of them, else
"hierarchical" if that does (the job spans hosts, and some host has several ranks), else gloo.

Note [All ranks or none]
~~~~~~~~~~~~~~~~~~~~~~~~
The ranks open the group's memory first, by themselves, and tell each other whether that went well; torch's part comes
afterwards, waits for no other rank, and its outcome is told as well. So a rank on which the backend fails, for whatever
reason, keeps no other rank waiting: all learn of it and take the next backend together.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    HashStore,
    PrefixStore,
    Store,
)

from lockstep import _proc, callsite, knobs
from lockstep.comm.group.group import Group
from lockstep.comm.group.meeting import ApartError, say_and_hear
from lockstep.comm.group.register import make_engine
from lockstep.errors import EnvironmentMismatch, RendezvousError
from lockstep.identity import Identity
from lockstep.text import sentence, which_ranks

#: Seconds that rank 0 waits for the others to read why there will be no group.
_FAREWELL = 10.0


def open_fastest(store: Store, identity: Identity, timeout: float) -> None:
    """**Collective.** Open torch's default group, for CPU tensors. Warns if ranks of one host can't share memory.

    Raises:
        RendezvousError: a rank did not come within ``timeout`` seconds.
    """
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


@dataclass(frozen=True)
class Choice:
    """A rank's decisions before the ranks meet."""

    #: The backend that the program, ``LOCKSTEP_BACKEND`` or the rank's device asks for; None: none of them asks for
    #: one.
    backend: str | None
    #: The rank's accelerator, in the words of :func:`lockstep.accelerator.identity`; None: it has none, or can't tell.
    device: str | None = None
    host: str = field(default_factory=socket.gethostname)
    boot_id: str = field(default_factory=_proc.boot_id)


def compare_choices(store: Store, chosen: Choice, identity: Identity, timeout: float) -> None:
    """**Collective.** Refuse choices with which the ranks would not open a group, each in its own way, or never.

    Hosts that ask for different backends would wait for each other until ``timeout``. Two ranks on one accelerator are
    refused by its backend's library, in words of its own, or hang. The index of a device does not show that: if a
    scheduler gives each rank a device of its own, each of them is number 0. So the ranks compare the identities of
    their devices.

    Args:
        store: where the ranks meet; for this alone.
        chosen: this rank's choice.
        identity: this rank's.
        timeout: seconds to wait for the other ranks.

    Raises:
        EnvironmentMismatch: hosts ask for different backends, or ranks have the same device; on all ranks.
        RendezvousError: a rank did not come.
    """
    said = say_and_hear(store, "chosen", asdict(chosen), identity.rank, identity.world_size, timeout)
    choices = [Choice(**each) for each in said]
    why = _differing_backends(choices) or _shared_device(choices)
    if why:
        # Rank 0 may have the store, so it is the last to leave.
        store.add("read", 1)
        limit = time.monotonic() + _FAREWELL
        while identity.rank == 0 and store.add("read", 0) < identity.world_size and time.monotonic() < limit:
            time.sleep(0.01)
        raise EnvironmentMismatch(f"rank {identity.rank} of {identity.world_size}: {why}")


def _differing_backends(choices: Sequence[Choice]) -> str:
    """Say which ranks ask for which backends, if they differ."""
    asked: dict[str | None, list[str]] = {}
    for rank, choice in enumerate(choices):
        asked.setdefault(choice.backend, []).append(f"rank {rank} on {choice.host}")
    if len(asked) == 1:
        return ""
    each = "; ".join(f"{', '.join(ranks)}: {name or 'not chosen'}" for name, ranks in asked.items())
    return (
        f"the ranks ask for different backends ({each}). Pass the same one to lockstep.init(), or set {knobs.BACKEND} "
        "to the same value on all hosts"
    )


def _shared_device(choices: Sequence[Choice]) -> str:
    """Say which ranks have the same accelerator, if some have."""
    users: dict[tuple[str, str], list[int]] = {}
    for rank, choice in enumerate(choices):
        if choice.device is not None:
            users.setdefault((choice.boot_id, choice.device), []).append(rank)
    shared = {device: ranks for (_, device), ranks in users.items() if len(ranks) > 1}
    if not shared:
        return ""
    each = "; ".join(f"{which_ranks(ranks)} on {choices[ranks[0]].host}: {which}" for which, ranks in shared.items())
    return (
        f"several ranks have the same device ({each}), and each needs one of its own. Start at most as many ranks as "
        "there are devices; if each rank sees only devices of its own (srun --gpus-per-task=1), make sure that they "
        "differ; or pass backend='gloo' to train on the CPU"
    )


def _warn(what: str) -> None:
    callsite.warn(f'{sentence(what)} lockstep.init("gloo") or {knobs.BACKEND}=gloo does the same without this warning')


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
