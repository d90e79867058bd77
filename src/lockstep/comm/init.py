"""Open and close the world: set up the process group, the device, threads and seeds by the environment."""

from __future__ import annotations

import atexit
import os
import queue
import random
import secrets
import socket
import sys
import threading
import time
from datetime import timedelta
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    FileStore,
    HashStore,
    PrefixStore,
    Store,
)
from torch.distributed.rendezvous import rendezvous
from torch.optim import optimizer as optimizers

from lockstep import accelerator, callsite, knobs, machine
from lockstep.comm import apart, ending, gloo_threads, guests, mpirun
from lockstep.comm import tracing as _  # noqa: F401  (a trace sees collectives by it)
from lockstep.comm.allocator import keep_freed_memory
from lockstep.comm.choose import Choice, compare_choices, open_fastest
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.gpu import Gpu
from lockstep.comm.group.register import register
from lockstep.comm.roll_call import advice, call_roll
from lockstep.comm.world import World
from lockstep.errors import EnvironmentMismatch, LockstepError, RendezvousError
from lockstep.identity import Identity, adopt
from lockstep.job import device as gpu_time
from lockstep.job import device_wait, flight, tracing
from lockstep.step import deterministic as determinism
from lockstep.step import flops, streams
from lockstep.text import counted, joined

register()  # the backend "shm", where torch has not done it
atexit.register(gloo_threads.await_rest)  # on import, and so after all that is registered from here on

_world: World | None = None
#: True if shutdown() may destroy the default group: the user's own code has not opened it.
_owns_group = False
#: The backend and the seconds that the default group was opened with.
_opened_with: tuple[str | None, float] | None = None
#: Groups opened in this process so far, the same number on every rank.
_groups_opened = 0


def init(
    backend: str | None = None,
    *,
    timeout: float | timedelta | None = None,
    seed: int | None = 0,
    deterministic: bool = False,
) -> World:
    """**Collective.** Join the job this process was launched in, or make a world of one.

    Opens torch's default process group (or takes the one that is open already), gives this rank its device, divides
    the CPU threads among the ranks of this machine, lets a rank on the CPU keep the memory that it frees
    (``LOCKSTEP_KEEP_MEMORY``), and seeds the random number generators of Python, NumPy and torch.

    Args:
        backend: any backend torch knows by name; ``"mpi"`` uses mpi4py if torch was built without MPI. None:
            ``LOCKSTEP_BACKEND``, or if that is not set, the first of these that is possible. With an accelerator for
            every rank of this machine: the backend that torch has for its tensors (NCCL for CUDA and ROCm, XCCL for
            XPU, what a plugin has registered), and gloo for CPU tensors. Otherwise, on the CPU: ``"shm"`` if all ranks
            can share memory, which they try; ``"hierarchical"`` (shared memory inside a machine, gloo between them) if
            the job has several machines and one of them several ranks; otherwise gloo (a warning says why, unless each
            machine has one rank). With an accelerator whose tensors no backend of torch's carries (MPS), ranks are on
            the CPU, and a warning says so.
        timeout: how long a collective may wait before it is an error, in seconds or as a timedelta.
            None: ``LOCKSTEP_TIMEOUT``, or 600 s.
        seed: the seed of the job, the same on all ranks. Every rank's generators are seeded with it as those of a
            single process would be, so that a script draws the same numbers on all ranks (a split of its data, initial
            weights). While a model computes, each rank draws its own: Note [Random numbers of a rank] in
            ``step/streams.py``. None: rank 0 draws a seed. False: the generators stay as they are on each rank, also
            while a model computes, and what depends on the job's seed (a loader's order) is that of seed 0.
        deterministic: set torch's switches so that the same inputs give the same bits in each run; the same on all
            ranks. An operation that has no deterministic algorithm raises RuntimeError with its name. On CPUs this
            costs nothing measurable; on GPUs its cost depends on the operations, and it takes 32 MiB of memory. Note
            [Deterministic algorithms] in ``step/deterministic.py`` lists the switches. False: they stay as they are.

    Raises:
        EnvironmentMismatch: the launcher's variables are incomplete or contradict each other, hosts ask for different
            backends, there are more ranks than GPUs or two ranks have the same one, this process's parent or another
            process of this machine is this rank already, or rank 0 belongs to another job.
        RendezvousError: the ranks could not meet within ``timeout``, or the port is taken.
        ValueError: the backend is unknown or not available here, the timeout is not positive, or the seed is negative
            or 2**63 or more.
        LockstepError: ``init`` was called in this process already, or the ranks passed different values of ``seed`` or
            ``deterministic``.
    """
    global _world, _owns_group, _opened_with
    if _world is not None and dist.is_initialized():
        raise LockstepError("lockstep.init() was already called in this process; lockstep.world() returns its World")
    identity = Identity.from_environment()
    adopt()
    limit = _seconds(timeout)
    if deterministic:
        determinism.switch_on()  # before the first use of a GPU
    backend = _with_mpi(backend or knobs.backend())
    device = _choose_device(backend, identity)
    _divide_threads(identity)
    if device.type == "cpu":
        keep_freed_memory()
    if dist.is_initialized():
        identity = _identity_of_open_group(identity)
    else:
        guests.refuse(identity)
        with flight.waiting("lockstep.init(), where the ranks meet"):
            _open_group(backend, identity, limit, device)
        _owns_group, _opened_with = True, (backend, limit)
        atexit.register(_shutdown_at_exit)
    group = dist.group.WORLD
    assert group is not None  # just opened
    guests.compare(group, identity)
    agreed_seed = _agree_on_seed(seed, group, deterministic=deterministic)
    if seed is False:
        streams.begin(rank=identity.rank, world_size=1)  # streams that leave the generators alone
    else:
        _seed_everything(agreed_seed, identity, device)
    _world = World(identity, device=device, group=group, seed=agreed_seed, timeout=limit)
    _count_steps()
    apart.watch(_world._in_hand, rank=identity.rank, world_size=identity.world_size)
    if accelerator.has_times(device):
        gpu, is_watched = Gpu(device), flight.current.pages is not None
        gpu_time.watch(gpu, backward_ended=device_wait.begin(gpu).mark if is_watched else None)
        tracing.watch(gpu)
        tracing.settle()
    if knobs.flops() and flight.current.pages is not None:
        flops.count(device=device, peak=knobs.peak_flops())
    guests.mark(identity)
    return _world


def _count_steps() -> None:
    """Tell the launcher how many steps this rank takes, if the launcher had no torch yet to count them itself."""
    if flight.current.pages is not None and not flight.current.counts:
        flight.watch_optimizers(optimizers)


def world() -> World:
    """Return the World that :func:`init` made in this process.

    Raises:
        LockstepError: ``init`` has not been called.
    """
    if _world is None:
        raise LockstepError("no world yet: call lockstep.init() first")
    return _world


def reopen() -> None:
    """**Collective.** Open the default group of the world anew, after the one before was destroyed; the World stays.

    Raises:
        LockstepError: :func:`init` has not opened the one before, so it is not known how.
        RendezvousError: as :func:`init`.
    """
    here = world()
    if _opened_with is None or not _owns_group:
        raise LockstepError(
            f"rank {here.rank} of {here.world_size}: the process group has ended, and the program has opened it itself "
            "(torch.distributed.init_process_group): call lockstep.shutdown(), and open another"
        )
    backend, limit = _opened_with
    identity = Identity.from_environment()
    with flight.waiting("where the ranks open their process group anew"):
        _open_group(backend, identity, limit, here.device)
    group = dist.group.WORLD
    assert group is not None  # just opened
    here._move_to(group)


def current_world() -> World | None:
    """Return the World of this process, or None before :func:`init`."""
    return _world


def shutdown() -> None:
    """Leave the world and close what :func:`init` opened. A process that ends without an exception does so by itself.

    The last rank to leave compares all replicas, and warns if they differ (comm/ending.py); no rank waits for that.
    """
    global _world, _owns_group
    if _world is not None:
        if dist.is_initialized():
            ending.compare()
        _world._release()
        apart.end()
        device_wait.end()
        guests.unmark()
        streams.begin(rank=0, world_size=1)
    _world = None
    if _owns_group:
        _owns_group = False
        atexit.unregister(_shutdown_at_exit)
        if dist.is_initialized():
            dist.destroy_process_group()


def _shutdown_at_exit() -> None:
    # After an uncaught exception the peers may be gone or stuck in a collective; closing a group politely can wait for
    # them. The process is about to end, and the kernel closes everything at once.
    if getattr(sys, "last_value", None) is None:
        shutdown()


def _seconds(timeout: float | timedelta | None) -> float:
    if timeout is None:
        return knobs.timeout()
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds")
    return seconds


def _with_mpi(backend: str | None) -> str | None:
    """Return ``backend``, with lockstep's own MPI in place of torch's, which torch's wheels come without."""
    if backend != "mpi" or dist.is_mpi_available():
        return backend
    if find_spec("mpi4py") is None:
        raise ValueError(
            f"backend={backend!r}: this build of torch ({torch.__version__}) comes without MPI, and mpi4py, which "
            "lockstep uses instead, is not installed: pip install 'torch-lockstep[mpi]', or mpi4py for the MPI that "
            "you have"
        )
    return "mpi4py"


def _choose_device(backend: str | None, identity: Identity) -> torch.device:
    """Return the device of this rank, made current if it is an accelerator."""
    names = _known_backends()
    wanted = None if backend is None else [part.split(":")[-1] for part in backend.lower().split(",")]
    for name in wanted or []:
        if name not in names:
            raise ValueError(f"backend={backend!r}: unknown; torch knows {', '.join(names)}")
    here = accelerator.kind()
    kind = here if wanted is None else next(filter(None, map(accelerator.kind_of, wanted)), None)
    if kind is None:
        _require_available(backend, wanted or [])
        return accelerator.CPU
    if kind != here:
        name = accelerator.title(kind)
        raise ValueError(
            f"backend={backend!r} needs {name}, and torch {torch.__version__} sees no {name} device on this machine; "
            "use backend='gloo' for the CPU, or leave backend unset to let lockstep choose"
        )
    own = accelerator.backend_for(kind)
    if own is None:
        _warn_of_no_collectives(kind, identity)
        return accelerator.CPU
    _require_available(backend, wanted or [own, "gloo"])
    count = accelerator.count()
    # A scheduler may show each rank devices of its own, which are fewer than the ranks here and begin with number 0.
    device = torch.device(kind, identity.local_rank % count)
    if identity.local_world_size > count and accelerator.identity(device) is None:
        _refuse_too_few(kind, own, identity)
    accelerator.use(device)
    return device


def _refuse_too_few(kind: str, backend: str, identity: Identity) -> None:
    """Refuse more ranks than devices, where the ranks can't find out whether each has one of its own."""
    count, noun = accelerator.count(), accelerator.noun(kind)
    seen = [f"{name}={os.environ.get(name, 'unset')}" for name in accelerator.hiding_variables(kind)]
    hidden = f" ({', '.join(seen)})" if seen else ""
    raise EnvironmentMismatch(
        f"rank {identity.rank}: {identity.local_world_size} ranks on this machine but "
        f"{counted(count, f'visible {noun}')}{hidden}; {backend.upper()} needs one {noun} for each rank: start at most "
        f"{counted(count, 'rank')}, or pass backend='gloo' to train on the CPU"
    )


def _warn_of_no_collectives(kind: str, identity: Identity) -> None:
    """Say that an accelerator stays idle, once on each machine."""
    if identity.local_rank == 0:
        name = accelerator.title(kind)
        callsite.warn(
            f"torch {torch.__version__} sees {joined(accelerator.devices())}, but has no backend that carries {name} "
            "tensors from rank to rank: every rank trains on the CPU. One process can train on the device without "
            "lockstep.replicate and lockstep.DistributedDataParallel, with model and batches moved to "
            f"'{kind}'; lockstep.init(\"gloo\") ends this warning"
        )


def _require_available(backend: str | None, names: list[str]) -> None:
    for name in names:
        if not dist.is_backend_available(name):
            raise ValueError(f"backend={backend!r}: this build of torch ({torch.__version__}) comes without {name}")


def _known_backends() -> list[str]:
    return [name for name in dist.Backend.backend_list if name != "undefined"]


def _divide_threads(identity: Identity) -> None:
    """Take this rank's share of the cores, unless the launcher or the user has set a number; fewer stay fewer."""
    if not any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        share = max(1, machine.cores_of_all_ranks() // identity.local_world_size)
        torch.set_num_threads(min(torch.get_num_threads(), share))


def _identity_of_open_group(identity: Identity) -> Identity:
    """Return the identity in a group that the user's own code opened; the environment must not contradict it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if identity.launched:
        if (identity.rank, identity.world_size) != (rank, world_size):
            raise EnvironmentMismatch(
                f"the open process group says rank {rank} of {world_size}, the environment says rank "
                f"{identity.rank} of {identity.world_size}"
            )
        return identity
    return Identity(rank, world_size, rank, world_size, 0, launched=world_size > 1)


def _open_group(backend: str | None, identity: Identity, timeout: float, device: torch.device) -> None:
    global _groups_opened
    limit = timedelta(seconds=timeout)
    try:
        _groups_opened += 1
        store = _rendezvous_store(identity, limit)
        on_device = device.type != "cpu"
        if identity.local_world_size < identity.world_size or (on_device and identity.world_size > 1):
            chosen = Choice(
                "that of its GPUs" if backend is None and on_device else backend,
                device=accelerator.identity(device) if on_device else None,
            )
            compare_choices(PrefixStore("choices", store), chosen, identity, timeout)
        if backend is None and device.type == "cpu":
            open_fastest(store, identity, timeout)
            return
        backend = backend or f"cpu:gloo,{device.type}:{accelerator.backend_for(device.type)}"
        dist.init_process_group(
            backend,
            store=store,
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=limit,
            device_id=None if device.type == "cpu" else device,
        )
    except EnvironmentMismatch:
        raise
    except (RuntimeError, ValueError, TimeoutError) as error:
        where = knobs.store() or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RendezvousError(
            f"rank {identity.rank} of {identity.world_size} could not join the world at {where} "
            f"(backend {backend or 'not chosen yet'}, timeout {timeout:g} s): {error}{_hint(error, backend)}"
        ) from error


def _rendezvous_store(identity: Identity, timeout: timedelta) -> Store:
    """Return where the ranks meet: memory for a world of one, a file on one host, else ``MASTER_ADDR:MASTER_PORT``, or
    what mpirun's ranks find (mpirun.py)."""
    if not identity.launched:
        return HashStore()
    path = knobs.store()
    if path is not None and not guests.described_anew():
        # A separate file for each group: torch removes the file when the last rank closes it, which may be after
        # the first rank has come back for the next group.
        store = FileStore(f"{path}-{_groups_opened}", identity.world_size)
        store.set_timeout(timeout)
        return store
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if "MASTER_PORT" in missing and mpirun.started_here():
        return mpirun.meet(identity, timeout, number=_groups_opened)
    if missing:
        raise EnvironmentMismatch(
            f"rank {identity.rank} of {identity.world_size}: {joined(missing)} not set, so the ranks can't "
            "find each other: start with lockstep run or torchrun, which set them"
        )
    return _connect(identity, timeout)


def _connect(identity: Identity, timeout: timedelta) -> Store:
    """Return the store of torch's own ``env://`` rendezvous, under a time limit that always holds.

    A client of torch's TCPStore that reaches some other program's port waits for an answer without any limit, so it
    waits in a separate thread, which is abandoned if it does not come back: the caller gets the error and will end.
    """
    answer: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()
    until = time.monotonic() + timeout.total_seconds()
    _wait_for_rank_0(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), until, is_rank_0=not identity.rank)

    def meet() -> None:
        try:
            answer.put(next(iter(rendezvous("env://", identity.rank, identity.world_size, timeout=timeout)))[0])
        except Exception as error:  # noqa: BLE001  (handed to the caller, whatever it is)
            answer.put(error)

    threading.Thread(target=meet, name="lockstep-rendezvous", daemon=True).start()
    try:
        # torch's own limit comes first wherever it works; its errors say more.
        store = answer.get(timeout=timeout.total_seconds() + 2.0)
    except queue.Empty:
        raise TimeoutError(
            "a program at that port accepts connections, but does not answer like the store of rank 0: it is another "
            "program, or rank 0 hangs"
        ) from None
    if isinstance(store, Exception):
        raise store
    return call_roll(
        store,
        identity,
        where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        world=_world_name(),
        is_agents=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        timeout=timeout.total_seconds(),
    )


def _world_name() -> str:
    return "" if guests.described_anew() else knobs.world()


def _wait_for_rank_0(host: str, port: int, until: float, *, is_rank_0: bool) -> None:
    """Wait until something listens where rank 0 serves the store: hosts start in any order, and a name may be known
    only later, also on the host that has it, which is to be rank 0's. torch would wait as well, but prints a stack of
    C++ frames for each try."""
    lacks, at = ("has no address", "under") if is_rank_0 else ("does not listen", "at")
    began, told = time.monotonic(), False
    while True:
        try:
            if is_rank_0:
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            else:
                socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            why = f"{host}:{port}: {error.strerror or error}"
        now = time.monotonic()
        if now >= until:
            raise TimeoutError(f"rank 0 {lacks} {at} {why}")
        if now - began > knobs.times().searching and not told:
            told = True
            callsite.warn(f"waiting for rank 0, which {lacks} yet {at} {why}")
        time.sleep(0.05)


def _hint(error: Exception, backend: str | None) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "already in use" in text:
        return f"\nPort {os.environ.get('MASTER_PORT')} is taken by another process. {advice(_world_name())}"
    if backend in ("shm", "hierarchical"):
        return f'\nlockstep.init("gloo") or {knobs.BACKEND}=gloo goes through the network instead'
    return ""


def _agree_on_seed(seed: int | None, group: dist.ProcessGroup, *, deterministic: bool) -> int:
    """**Collective.** Return rank 0's seed, once all ranks have asked for the same one, and ``deterministic``."""
    if seed is True or (seed is not None and not 0 <= seed < 2**63):
        raise ValueError(f"seed={seed}: expected 0 <= seed < 2**63, None to draw one, or False to seed nothing")
    proposals = all_gather_records([seed, deterministic, secrets.randbits(63) if seed is None else seed], group)
    for position, name in enumerate(("seed", "deterministic")):
        asked = [proposal[position] for proposal in proposals]
        if any(other != asked[0] for other in asked):
            raise LockstepError(f"lockstep.init({name}=…) must be the same on every rank; the ranks passed {asked}")
    return int(proposals[0][2])


def _seed_everything(seed: int, identity: Identity, device: torch.device) -> None:
    """Seed every rank as a lone process would be; see Note [Random numbers of a rank]. The accelerator of each rank but
    0 gets a seed of its own, derived from (seed, rank)."""
    streams.begin(rank=identity.rank, world_size=identity.world_size)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device.type != "cpu" and identity.rank > 0:
        own = np.random.SeedSequence([seed, identity.rank]).generate_state(1, np.uint64)[0] >> 1
        accelerator.seed(int(own), device)
