"""Exchange small records between all ranks, with which they compare facts before they do anything expensive.

Records travel as JSON, never as pickle: what arrives from a peer is data, not code.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lockstep import _torch, accelerator
from lockstep.comm.waiting import wait_for
from lockstep.errors import CollectiveMismatch
from lockstep.job import flight
from lockstep.text import which_ranks

#: Bytes of the first message, which has a record's length and its beginning.
_FIRST = 1024
_LENGTH = struct.Struct("<q")
#: torch 2.13 has renamed it.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return a device whose tensors ``group`` can carry: the CPU where it can, else the current accelerator."""
    resolved = group if group is not None else dist.group.WORLD
    if resolved is None:
        raise ValueError("no process group is open: call lockstep.init() or torch.distributed.init_process_group first")
    served = _torch.device_types(resolved)
    if "cpu" in served:
        return torch.device("cpu")
    here = accelerator.kind()
    return accelerator.current(here if here is not None and here in served else served[0])


def carrier(kind: str, group: dist.ProcessGroup) -> torch.device:
    """Return the device on which ``group`` carries tensors of a kind of device ("cpu", "cuda").

    Where the kind has a backend of its own, the current device of that kind: nothing is copied to the host then, and no
    host waits for its device. Elsewhere that of :func:`group_device`.
    """
    if kind != "cpu" and kind in _torch.device_types(group):
        own = accelerator.current(kind)
        carried = group_device(group)
        if carried == own or _torch.backend_for(group, own) is not _torch.backend_for(group, carried):
            return own
    return group_device(group)


def all_gather_tensors(
    tensor: torch.Tensor | None, group: dist.ProcessGroup, *, device: torch.device | None = None
) -> list[torch.Tensor | None]:
    """**Collective.** Return every rank's ``tensor``, in order of rank, on a device that ``group`` can carry.

    Args:
        tensor: dense, of any shape, dtype and device, which may differ from rank to rank; or None.
        group: the process group.
        device: the device, of the same kind on every rank; that of :func:`group_device` if None.

    Raises:
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    device = group_device(group) if device is None else device
    mine = None if tensor is None else _as_indexed(tensor, device)
    kinds = [_TensorSpec.loads(record) for record in all_gather_records(_TensorSpec.dumps(mine), group)]
    padded = torch.zeros(max(0 if kind is None else kind.nbytes for kind in kinds), dtype=torch.uint8, device=device)
    if mine is not None:
        padded[: mine.nbytes] = mine.reshape(-1).view(torch.uint8)
    rows = padded.new_empty(len(kinds), len(padded))
    if len(padded):
        gather: Callable[[], object] = lambda: issue_gather(rows, padded, group).wait()  # noqa: E731
        _wait(gather, "exchanging tensors with the other ranks", group)
    return [
        None if kind is None else row[: kind.nbytes].clone().view(kind.dtype).reshape(kind.shape)
        for kind, row in zip(kinds, rows, strict=True)
    ]


def issue_gather(rows: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None) -> Any:
    """**Collective.** Begin to gather every rank's ``own`` into its row of ``rows``; return the work to wait for.

    Args:
        rows: [world size, *size of ``own``], contiguous.
        own: of any shape, the same on every rank; it must stay until the work is done.
        group: the process group; the default group if None.
    """
    if own.is_cpu:
        return dist.all_gather([*rows.unbind(0)], own, group=group, async_op=True)
    # Backends of accelerators gather into one tensor, and would copy each rank's part out of it into a list.
    return _all_gather_single(rows, own, group=group, async_op=True)


def broadcast_tensor(
    tensor: torch.Tensor | None, source: int, group: dist.ProcessGroup, *, device: torch.device | None = None
) -> torch.Tensor:
    """**Collective.** Return the tensor of rank ``source``, on a device that ``group`` can carry; a new one.

    Args:
        tensor: as for :func:`all_gather_tensors`; None on all ranks but ``source``.
        source: a rank of ``group``.
        group: the process group.
        device: as for :func:`all_gather_tensors`.

    Raises:
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    device = group_device(group) if device is None else device
    mine = None if tensor is None else _as_indexed(tensor, device)
    kind = _TensorSpec.loads(all_gather_records(_TensorSpec.dumps(mine), group)[source])
    assert kind is not None  # rank ``source`` has it
    result = torch.empty(kind.shape, dtype=kind.dtype, device=device) if mine is None else mine.clone()
    message = result.reshape(-1).view(torch.uint8)
    if len(message):
        _wait(lambda: dist.broadcast(message, group_src=source, group=group), f"sending rank {source}'s tensor", group)
    return result


def _as_indexed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a device, with its elements in memory in the order of their indices."""
    return tensor.detach().resolve_conj().resolve_neg().to(device).contiguous()


class _TensorSpec(NamedTuple):
    """The facts that a rank must know of a tensor before it receives it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def dumps(tensor: torch.Tensor | None) -> list[Any] | None:
        return None if tensor is None else [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]

    @classmethod
    def loads(cls, record: list[Any] | None) -> _TensorSpec | None:
        return None if record is None else cls(getattr(torch, record[0]), tuple(record[1]))


def _wait(call: Callable[[], object], name: str, group: dist.ProcessGroup | None) -> None:
    wait_for(call, lambda: f"{_whoami(group)}: {name}", name=name)


def _whoami(group: dist.ProcessGroup | None) -> str:
    return f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"


def all_gather_records(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """**Collective.** Return every rank's ``record``, in order of rank.

    Args:
        record: anything JSON can hold; it may differ in length from rank to rank.
        group: the process group; the default group if None.

    Raises:
        CollectiveMismatch: the script of another rank is in another call: this exchange belongs to neither.
        CollectiveTimeout, PeerLost: another rank is late or gone.
    """
    device = group_device(group)
    payload = json.dumps([flight.present_call(), record]).encode()
    world_size = dist.get_world_size(group)

    def gather(mine: bytes, size: int) -> list[bytes]:
        """Exchange ``size`` bytes of each rank; a shorter part is padded."""
        row = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8).to(device)
        rows = [torch.empty_like(row) for _ in range(world_size)]
        name = "exchanging records with the other ranks"
        _wait(lambda: dist.all_gather(rows, row, group=group), name, group)
        return [row.cpu().numpy().tobytes() for row in rows]

    # Nearly all records fit into the message that tells their length, and one exchange is half the time of two.
    head = _FIRST - _LENGTH.size
    first = gather(_LENGTH.pack(len(payload)) + payload[:head], _FIRST)
    lengths = [_LENGTH.unpack_from(row)[0] for row in first]
    rest = max(lengths) - head
    second = gather(payload[head:], rest) if rest > 0 else [b""] * world_size
    told = [
        json.loads((row[_LENGTH.size :] + more)[:length])
        for row, more, length in zip(first, second, lengths, strict=True)
    ]
    _compare_calls([call for call, _ in told], group)
    return [each for _, each in told]


def _compare_calls(calls: list[str], group: dist.ProcessGroup | None) -> None:
    """Raise if the records of two calls have met. (One that is in no call may well be in the same exchange.)"""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        if call:
            ranks.setdefault(call, []).append(rank)
    if len(ranks) > 1:
        where = "; ".join(
            f"{which_ranks(each)} {'is' if len(each) == 1 else 'are'} in {call}" for call, each in ranks.items()
        )
        raise CollectiveMismatch(f"{_whoami(group)}: the ranks have made different calls: {where}")
