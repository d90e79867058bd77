"""What all operations of the group have in common: how one is issued, and the checks that several make."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lockstep import _torch
from lockstep.comm.shm import tensors
from lockstep.comm.shm.group import Call, Group, Move, seconds
from lockstep.comm.shm.rounds import Rounds
from lockstep.comm.shm.work import ShmWork

Tensors = list[torch.Tensor]

_profiler_enabled = _torch.profiler_enabled()


def recorded(name: str) -> AbstractContextManager[object]:
    """A context that the profiler shows as ``shm:name``, while it records."""
    return torch.profiler.record_function(f"shm:{name}") if _profiler_enabled() else nullcontext()


class Operations:
    """The part of :class:`ProcessGroupShm` that its operations use."""

    _shm_group: Group
    _shm_rank: int
    _shm_size: int

    def _issue(self, name: str, body: bytes, move: Move, result: list[Any], opts: Any) -> ShmWork:
        group = self._shm_group
        call = Call(name, body, move, result, seconds(opts.timeout, group.timeout), opts.asyncOp)
        if _profiler_enabled():
            with torch.profiler.record_function(f"shm:{name}"):
                return group.issue(call)
        return group.issue(call)

    def _root(self, name: str, root: int) -> int:
        if not 0 <= root < self._shm_size:
            raise RuntimeError(f"ProcessGroupShm::{name}: invalid root rank: {root}")
        return root

    def _split(self, name: str, whole: torch.Tensor, piece: torch.Tensor) -> Tensors:
        """The ranks' pieces, as views, of the larger tensor of all_gather_single and reduce_scatter_single."""
        if whole.numel() != piece.numel() * self._shm_size:
            raise RuntimeError(
                f"{name}: the larger tensor has {whole.numel()} elements, expected {self._shm_size} (ranks) times "
                f"the {piece.numel()} of the smaller one"
            )
        tensors.check(name, [whole, piece], dtype=piece.dtype)
        if tensors.is_flat(whole):
            return (
                list(whole.data.view(-1).split(piece.numel()))
                if piece.numel()
                else [whole.data.view(-1)] * self._shm_size
            )
        if whole.dim() == 0 or whole.shape[0] % self._shm_size:
            raise RuntimeError(
                f"{name}: the larger tensor (shape {tuple(whole.shape)}) must be contiguous, or its first dimension "
                f"a multiple of {self._shm_size}, the number of ranks"
            )
        return (
            list(whole.data.split(whole.shape[0] // self._shm_size))
            if whole.shape[0]
            else [whole.data] * self._shm_size
        )


def single(name: str, list_: list[Any]) -> Any:
    if len(list_) != 1:
        raise RuntimeError(f"{name}: expected one tensor (or list of tensors) per rank, got {len(list_)}")
    return list_[0]


def finish(finishes: Sequence[tensors.Finish]) -> None:
    for finish in finishes:
        finish()


def sync_if_none(rounds: Rounds, list_: Sequence[object]) -> None:
    """A coalesced collective of no tensors still compares fingerprints."""
    if not list_:
        rounds.sync()


def sizes(list_: Tensors) -> tuple[Any, ...]:
    return tuple((tensor.dtype, tensor.numel()) for tensor in list_)
