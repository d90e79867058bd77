"""Memory that a process group reduces in place: the small interface between its users and the backend.

torch's backends have two methods for memory of their own, ``supports_tensor_alloc(device)`` and
``allocate_tensor(size, dtype=, device=)`` (FSDP2 uses NCCL's). A backend that also says ``reduces_in_place`` promises
that an all-reduce of such a tensor, or of the same part of it on every rank, copies nothing in or out. The backend
"shm" does; a backend of torch's that did would need nothing more than the attribute.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from lockstep import _torch


class InPlaceMemory(Protocol):
    """A backend with memory that it reduces in place."""

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """**Collective.** Return a 1-D tensor of ``size`` zeros."""


def in_place_memory(group: dist.ProcessGroup, device: torch.device) -> InPlaceMemory | None:
    """Return the backend of ``group`` for ``device``, if it has memory there that it reduces in place."""
    try:
        backend: Any = _torch.backend_for(group, device)
    except RuntimeError:  # the group serves no tensors of this device
        return None
    if getattr(backend, "reduces_in_place", False) and backend.supports_tensor_alloc(device):
        memory: InPlaceMemory = backend
        return memory
    return None
