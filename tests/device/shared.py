"""Let the ranks of a job share one real GPU, so that a machine with a single one runs the tests that need several.

NCCL refuses two ranks on one device of one machine, and ``lockstep.init`` does before it, in words. Here every process
is a machine of its own for NCCL, which then goes through sockets, and lockstep takes its device for one that no other
process has. What streams, events, memory and NCCL's kernels do is real; only the time of collectives means nothing,
since the GPU gives each process its turn. Tests that need several devices in one process (``gpu(2, apart=True)``) are
not run so.

A process has this if it imports ``tests`` and ``SHARED_GPU`` is in its environment: ``make gpu`` sets it where there is
one GPU.
"""

from __future__ import annotations

import os

from tests.device.before import BeforeImports, install

#: For how many devices the shared one stands.
STANDS_FOR = 4


def is_on() -> bool:
    """Whether ranks share a GPU."""
    return "SHARED_GPU" in os.environ


def index(local_rank: int) -> int:
    """The index of the GPU that a rank has."""
    return 0 if is_on() else local_rank


def share() -> None:
    """Have this process, and those that it forks, share the GPU."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    _be_a_machine()
    os.register_at_fork(after_in_child=_be_a_machine)
    install(BeforeImports({"lockstep.comm.init": _own_device}))


def _be_a_machine() -> None:
    os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"  # read when a process opens its first communicator


def _own_device() -> None:
    from lockstep import accelerator

    known = accelerator.identity

    def identity(device: object) -> str | None:
        found = known(device)  # type: ignore[arg-type]
        return None if found is None else f"{found}, for process {os.getpid()}"

    accelerator.identity = identity
