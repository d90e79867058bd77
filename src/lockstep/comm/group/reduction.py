"""Reduce ops as torch operators: which operator combines which op and dtype.

Note [Reduction order]
~~~~~~~~~~~~~~~~~~~~~~
Elements are combined in order of rank: ((x0 op x1) op x2) op … Each element of the result is computed by one rank and
copied to all, or computed by every rank with the same operator over the same elements; so all ranks end with the same
bits, and the same inputs give the same bits again, whatever the timing. An average is the sum divided by the number of
ranks; one of integers is rounded toward zero, as NCCL does: gloo has no averages, and libraries that treat gloo apart
by name average their counters over every other backend. Half and bfloat16 round after every step, as torch's own
operators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.group.fingerprint import REDUCE_OPS

_SUM, _AVG, _PRODUCT, _MIN, _MAX, _BAND, _BOR, _BXOR, _PREMUL_SUM = range(len(REDUCE_OPS))

_NUMBERS: dict[int, Callable[..., Any]] = {
    _SUM: torch.add,
    _AVG: torch.add,
    _PREMUL_SUM: torch.add,
    _PRODUCT: torch.mul,
    _MIN: torch.minimum,
    _MAX: torch.maximum,
    _BAND: torch.bitwise_and,
    _BOR: torch.bitwise_or,
    _BXOR: torch.bitwise_xor,
}
#: The operators for bool: a sum is "any", a product is "all".
_TRUTHS: dict[int, Callable[..., Any]] = {
    _SUM: torch.logical_or,
    _PRODUCT: torch.logical_and,
    _MIN: torch.logical_and,
    _MAX: torch.logical_or,
    _BAND: torch.logical_and,
    _BOR: torch.logical_or,
    _BXOR: torch.logical_xor,
}
#: Dtypes for which torch has few operators -> the signed dtype of their size, whose sums, products and bitwise
#: operations give the same bits.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True)
class Reduction:
    """How to combine the ranks' elements of one dtype by one op."""

    combine: Callable[..., Any]
    #: The dtype the operator works on; of the same size as the tensor's.
    dtype: torch.dtype
    #: Divide the result by this (an average); 1 for all else.
    divisor: int = 1
    #: Multiply each rank's input by this (PREMUL_SUM); 1 for all else.
    factor: float = 1

    @property
    def truncates(self) -> bool:
        """Whether an average is rounded toward zero."""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def exact(self) -> bool:
        """Whether an element's result has the same bits in whichever loop it is computed (Note [Reduction order])."""
        if self.combine not in (torch.add, torch.mul):
            return False
        # torch has a loop over vectors and one over the elements left at its end, which depends on the number of
        # threads. They make different NaNs of 16 bits, and may round a complex product differently.
        if self.dtype.is_complex:
            return self.combine is torch.add
        return not self.dtype.is_floating_point or self.dtype.itemsize > 2

    def load(self, source: torch.Tensor, stage: torch.Tensor) -> None:
        """Put this rank's elements into its stage."""
        if self.factor == 1:
            stage.copy_(source)
        else:
            torch.mul(source, self.factor, out=stage)

    def over(self, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Combine ``inputs``, in order of rank, into ``out``, which may be the first of them."""
        if len(inputs) == 1:
            if inputs[0] is not out:
                out.copy_(inputs[0])
        else:
            self.combine(inputs[0], inputs[1], out=out)
            for each in inputs[2:]:
                self.combine(out, each, out=out)
        if self.divisor != 1:
            self.divide(out)

    def divide(self, total: torch.Tensor) -> None:
        """Turn a sum into the average, in place."""
        total.div_(self.divisor, rounding_mode="trunc" if self.truncates else None)


def reduction(op: int, dtype: torch.dtype, world_size: int, factor: float = 1.0) -> Reduction:
    """Return the reduction for torch's reduce op number ``op``.

    Raises:
        RuntimeError: the op makes no sense for the dtype (the type of error that gloo raises).
    """
    name = REDUCE_OPS[op]
    if dtype.is_floating_point or dtype.is_complex:
        if op in (_BAND, _BOR, _BXOR):
            raise RuntimeError(f"Cannot use ReduceOp.{name} with non-integral dtype {dtype}")
        if dtype.is_complex and op in (_MIN, _MAX):
            raise RuntimeError(f"Cannot use ReduceOp.{name} with {dtype}: complex numbers have no order")
        if dtype.itemsize == 1:
            raise RuntimeError(f"Cannot use ReduceOp.{name} with {dtype}: convert to bfloat16 or float32 first")
    elif op == _PREMUL_SUM or (op == _AVG and (dtype is torch.bool or dtype in _SIGNED)):
        raise RuntimeError(f"Cannot use ReduceOp.{name} with dtype {dtype}: use SUM, or convert to float first")
    if dtype in _SIGNED and op in (_MIN, _MAX):
        raise RuntimeError(f"Cannot use ReduceOp.{name} with {dtype}: torch does not order it; convert to int64 first")
    if op == _AVG:
        return Reduction(torch.add, dtype, divisor=world_size)
    if dtype is torch.bool:
        return Reduction(_TRUTHS[op], dtype)
    return Reduction(_NUMBERS[op], _SIGNED.get(dtype, dtype), factor=factor)
