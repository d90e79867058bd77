"""Let the ranks of ``mpirun -n 4 python train.py`` meet: mpirun gives each its number, but no address.

On one host they meet at a file in a folder of the user's, named after the process of MPI's that started them all; it is
removed by the last rank that leaves, or, if the job was killed, by a later job in the same container. On several hosts
rank 0 listens at a free port, and tells the others by MPI, if mpi4py is there.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import stat
import tempfile
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    FileStore,
    Store,
    TCPStore,
)

from lockstep import _proc
from lockstep.errors import EnvironmentMismatch
from lockstep.identity import Identity
from lockstep.schedulers.place import mpi_variables

#: Names of the processes by which MPI's launchers start a host's ranks.
_STARTERS = ("hydra_pmi_proxy", "prterun", "prted", "orted", "orterun", "mpirun", "mpiexec")


def started_here() -> bool:
    """Return whether mpirun started this process, or one that it comes from, as a rank."""
    return "LOCAL_RANK" in mpi_variables(os.environ)


def meet(identity: Identity, timeout: timedelta, *, number: int) -> Store:
    """**Collective.** Return a store that all ranks share.

    Args:
        identity: this rank's.
        timeout: how long to wait for the others.
        number: counts the meetings of this process; the same on every rank.

    Raises:
        EnvironmentMismatch: the ranks are on several hosts and mpi4py is not installed, or the user's folder belongs to
            somebody else.
    """
    if identity.local_world_size < identity.world_size:
        return _by_broadcast(identity, timeout)
    folder = _folder()
    starter = _starter()
    if identity.rank == 0:
        _tidy(folder)
    # One starter may start several jobs at once (prun), which have names then.
    job = re.sub(r"\W", "_", os.environ.get("PMIX_NAMESPACE", ""))
    name = f"{_place()}-{starter}-{_proc.started(starter)}-{job}-{number}"
    store = FileStore(str(folder / name), identity.world_size)
    store.set_timeout(timeout)
    return store


def _by_broadcast(identity: Identity, timeout: timedelta) -> Store:
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except ImportError as error:
        raise EnvironmentMismatch(
            f"rank {identity.rank} of {identity.world_size}: mpirun started ranks on several machines, but gives no "
            "address at which they can meet. Install mpi4py (pip install 'torch-lockstep[mpi]'), with which rank 0 "
            "sends its address to the others, or set MASTER_ADDR to its host and MASTER_PORT to a free port there, for "
            "all of them: "
            f"mpirun -x MASTER_ADDR -x MASTER_PORT (Open MPI) or -genvall (MPICH). {error}"
        ) from error
    if identity.rank == 0:
        store = TCPStore(_host(), 0, identity.world_size, True, timeout, wait_for_workers=False)
        mpi.COMM_WORLD.bcast([_host(), store.port], root=0)
        return store
    host, port = mpi.COMM_WORLD.bcast(None, root=0)
    return TCPStore(host, port, identity.world_size, False, timeout, wait_for_workers=False)


def _host() -> str:
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _starter() -> int:
    """Return the process that started the ranks of this host: the nearest of MPI's above this one, or its parent."""
    pid = os.getppid()
    while pid > 1 and (found := _proc.stat(pid)) is not None:
        if _proc.read(pid, "comm").strip() in _STARTERS:
            return pid
        pid = found.parent
    return os.getppid()


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"lockstep-mpi-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentMismatch(
            f"{folder} is not a folder of this user's alone, so ranks can't meet there: remove it, or set TMPDIR"
        )
    return folder


def _place() -> str:
    """Return what tells which processes a number is of, without a hyphen: the boot and the pid namespace."""
    return re.sub(r"\W+", "_", f"{_proc.boot_id()} {_proc.pid_namespace()}")


def _tidy(folder: Path) -> None:
    """Remove the files of jobs that were killed, which are those whose starter is gone. Those of other containers or
    hosts that share the folder stay: whether their starters live can't be seen from here."""
    for file in folder.glob(f"{_place()}-*"):
        pid, started = file.name.split("-")[1:3]
        if str(_proc.started(int(pid))) != started:
            file.unlink(missing_ok=True)
