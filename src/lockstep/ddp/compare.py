"""Compare the replicas before anything is sent: a difference is an error on every rank, never a wrong sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.comm.exchange import all_gather_records
from lockstep.errors import ReplicaMismatch


def compare_replicas(module: nn.Module, agreement: dict[str, Any], group: dist.ProcessGroup) -> None:
    """**Collective.** Check that every rank has the same parameters, buffers and options.

    Args:
        module: the module to compare, by name, shape, dtype, strides and ``requires_grad`` of its parameters and by
            name, shape and dtype of its buffers.
        agreement: options that must be equal.
        group: the ranks that compare.

    Raises:
        ReplicaMismatch: on every rank, naming the first parameter that differs and the first rank where it does.
    """
    mine = {
        "options": sorted([name, str(value)] for name, value in agreement.items()),
        "parameters": [_describe_parameter(name, param) for name, param in module.named_parameters()],
        "buffers": [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in module.named_buffers()],
    }
    records = all_gather_records(mine, group)
    for kind in ("parameters", "buffers", "options"):
        difference = first_difference([record[kind] for record in records])
        if difference is not None:
            whoami = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
            raise ReplicaMismatch(
                f"{whoami}: {_explain(kind, records, *difference)}. Nothing was sent. Build the same model with the "
                "same options on every rank"
            )


def first_difference(lists: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """**Local.** (position, rank) of the first entry in which a rank's list differs from rank 0's, or None."""
    found: list[tuple[int, int]] = []
    for rank, entries in enumerate(lists[1:], start=1):
        for position in range(max(len(lists[0]), len(entries))):
            if lists[0][position : position + 1] != entries[position : position + 1]:
                found.append((position, rank))
                break
    return min(found, default=None)


def _describe_parameter(name: str, param: nn.Parameter) -> list[Any]:
    layout = None if param.is_contiguous() else list(param.stride())
    return [name, list(param.shape), str(param.dtype), param.requires_grad, layout]


def _explain(kind: str, records: Sequence[Any], position: int, rank: int) -> str:
    singular = {"parameters": "parameter", "buffers": "buffer", "options": "option"}[kind]
    expected, came = records[0][kind][position : position + 1], records[rank][kind][position : position + 1]
    name = (expected or came)[0][0]
    counts = ""
    if len(records[0][kind]) != len(records[rank][kind]):
        counts = f" (rank 0 has {len(records[0][kind])} {kind}, rank {rank} has {len(records[rank][kind])})"
    return (
        f"the replicas differ at {singular} {position}, '{name}': rank 0 has {_say(kind, expected)}, "
        f"rank {rank} has {_say(kind, came)}{counts}"
    )


def _say(kind: str, entry: Sequence[Any]) -> str:
    if not entry:
        return "none at this place"
    name, first, *rest = entry[0]
    if kind == "options":
        return f"{name}={first}"
    words = f"'{name}' of shape {tuple(first)}, {rest[0]}"
    if kind == "parameters":
        words += "" if rest[1] else ", requires_grad=False"
        words += "" if rest[2] is None else f", strides {tuple(rest[2])}"
    return words
