"""The c10d backend ``"shm"``: torch's interface, translated into collectives over rounds.

torch calls a Python process group in two ways: ``torch.distributed`` calls these methods directly; C++ (DDP's reducer,
functional collectives) calls them through torch's PyProcessGroup, by the same names.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.shm.group import Group
from lockstep.comm.shm.interface.messages import Messages
from lockstep.comm.shm.interface.moves import Moves
from lockstep.comm.shm.interface.reductions import Reductions

# torch's stubs list these methods with overloads and argument names that change from version to version.
_Base: Any = dist.ProcessGroup


@_torch.untraced
class ProcessGroupShm(Reductions, Moves, Messages, _Base):  # type: ignore[misc]
    """A process group whose ranks are processes on one host that share memory."""

    def __init__(self, store: Any, group: Group, *, name: str) -> None:
        # (The constructor with a store can't be used by Python subclasses.)
        _Base.__init__(self, group.rank, group.size)
        self._shm_store = store
        self._shm_group = group
        self._shm_name = name
        self._shm_description = ""
        self._shm_rank = group.rank
        self._shm_size = group.size
        self._shm_reductions = {}

    # --- who this is -----------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "shm"

    # torch keeps a group's name in its C++ backends; this group has none of these, so it keeps its own. C++ calls the
    # first four methods, Python reads the properties.

    def getGroupName(self) -> str:
        return self._shm_name

    def setGroupName(self, name: str) -> None:
        self._shm_name = name

    def getGroupDesc(self) -> str:
        return self._shm_description

    def setGroupDesc(self, description: str) -> None:
        self._shm_description = description

    @property
    def group_name(self) -> str:
        return self._shm_name

    @property
    def group_desc(self) -> str:
        return self._shm_description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ProcessGroupShm:  # noqa: ARG002  (one backend for all there is)
        return self

    # As above, under the public name that torch 2.15 gave it.
    get_backend = _get_backend

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def get_group_store(self) -> Any:
        return self._shm_store

    def set_timeout(self, timeout: timedelta) -> None:
        """**Local.** Change how long collectives may wait from now on."""
        self._shm_group.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """**Local.** What destroy_process_group calls: complete what was issued, then let go of everything."""
        self._shm_group.close()

    def abort(self) -> None:
        """**Local.** End the group on every rank; whatever is in flight raises."""
        self._shm_group.abort("abort() was called")
