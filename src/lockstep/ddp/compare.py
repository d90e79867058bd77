"""Compare the replicas before anything is sent: a difference is an error on every rank, never a wrong sum."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.exchange import all_gather_records
from lockstep.ddp.members import buffers_of, parameters_of
from lockstep.errors import ReplicaMismatch


def compare_replicas(
    module: nn.Module,
    agreement: dict[str, Any],
    group: dist.ProcessGroup,
    *,
    sparse: Set[int] = frozenset(),
    buffers: bool = True,
    unfit: str | None = None,
) -> None:
    """**Collective.** Check that every rank has the same parameters, buffers and options.

    Args:
        module: the module to compare, by name, shape, dtype, strides, ``requires_grad`` and kind of gradient of its
            parameters, by name, shape and dtype of its buffers, and by which of them share a device; what it ignores is
            left out.
        agreement: options that must be equal.
        group: the ranks that compare.
        sparse: ids of the parameters whose gradients are expected to be sparse.
        buffers: whether buffers must be equal; each rank may have its own if they are never sent.
        unfit: why this rank's module can't be a replica, if so.

    Raises:
        ValueError: on every rank, if some rank's module can't be a replica.
        ReplicaMismatch: on every rank, naming the first parameter that differs and the first rank where it does.
    """
    # A device's number is its place among the module's: "cuda:0" here is "cuda:1" on the next rank.
    places: dict[torch.device, int] = {}
    mine = {
        "options": sorted([name, str(value)] for name, value in agreement.items()),
        "parameters": [
            _describe_parameter(name, param, places.setdefault(param.device, len(places)), id(param) in sparse)
            for name, param in (parameters_of(module) if unfit is None else ())
        ],
        "buffers": [
            [name, list(tensor.shape), str(tensor.dtype), places.setdefault(tensor.device, len(places))]
            for name, tensor in (buffers_of(module) if buffers and unfit is None else ())
        ],
        "unfit": unfit,
    }
    records = all_gather_records(mine, group)
    refusals = {rank: record["unfit"] for rank, record in enumerate(records) if record["unfit"] is not None}
    if refusals:
        rank, why = min(refusals.items())
        raise ValueError(unfit if unfit is not None else f"rank {rank} has a model that can't be a replica: {why}")
    for kind in ("parameters", "options", "buffers"):
        difference = first_difference([record[kind] for record in records])
        if difference is not None:
            whoami = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
            raise ReplicaMismatch(
                f"{whoami}: {explain_difference(kind, records, *difference)}. Nothing was sent. Build the same model "
                "with the same options on every rank"
            )


def first_difference(lists: Sequence[Sequence[Any]]) -> tuple[int, int] | None:
    """Return (position, rank) of the first entry in which a rank's list differs from rank 0's, or None."""
    found: list[tuple[int, int]] = []
    for rank, entries in enumerate(lists[1:], start=1):
        for position in range(max(len(lists[0]), len(entries))):
            if lists[0][position : position + 1] != entries[position : position + 1]:
                found.append((position, rank))
                break
    return min(found, default=None)


def _describe_parameter(name: str, param: nn.Parameter, place: int, sparse: bool) -> list[Any]:
    layout = None if param.is_contiguous() else list(param.stride())
    return [name, list(param.shape), str(param.dtype), place, param.requires_grad, layout, sparse]


def explain_difference(kind: str, records: Sequence[Any], position: int, rank: int) -> str:
    """Return what :func:`first_difference` has found, in words."""
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
    words += "" if rest[1] == 0 else f", on the module's device {rest[1]} (counted from 0)"
    if kind == "parameters":
        words += "" if rest[2] else ", requires_grad=False"
        words += "" if rest[3] is None else f", strides {tuple(rest[3])}"
        words += ", with sparse gradients" if rest[4] else ""
    return words
