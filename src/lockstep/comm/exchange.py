"""Small records from every rank to every rank: how ranks compare notes before they do anything expensive.

Records travel as JSON, never as pickle: what arrives from a peer is data, not code.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm.waiting import wait_for


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """**Local.** A device whose tensors ``group`` can carry: the CPU where it can, else the current CUDA device."""
    resolved = group if group is not None else dist.group.WORLD
    if resolved is None:
        raise ValueError("no process group is open: call lockstep.init() or torch.distributed.init_process_group first")
    served = _torch.device_types(resolved)
    if "cpu" in served:
        return torch.device("cpu")
    if "cuda" in served:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(served[0])


def all_gather_records(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """**Collective.** Every rank's ``record``, in order of rank.

    Args:
        record: anything JSON can say; it may differ in length from rank to rank.
        group: the process group; the default group if None.

    Raises:
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    device = group_device(group)
    payload = torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8)
    world_size = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world_size)]
    rank = dist.get_rank(group)

    def gather(parts: list[torch.Tensor], mine: torch.Tensor) -> None:
        wait_for(
            lambda: dist.all_gather(parts, mine, group=group),
            lambda: f"rank {rank} of {world_size}: exchanging records with the other ranks",
            name="exchanging records with the other ranks",
        )

    gather(sizes, torch.tensor([payload.numel()], dtype=torch.int64, device=device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: payload.numel()] = payload
    rows = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in range(world_size)]
    gather(rows, padded.to(device))
    return [json.loads(row.cpu().numpy().tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)]
