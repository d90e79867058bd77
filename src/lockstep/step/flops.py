"""Count the FLOPs of one training step of this rank.

Note [A step that is counted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
From the end of one optimizer step to the end of the next, a dispatch mode of torch sees every operation, as in
``torch.utils.flop_counter``, whose formulas it takes: products of matrices, convolutions and attention count, what is
done element by element does not. Every operation is run as it would be otherwise, so the step has the same bits; it
takes longer by the way of each operation through Python. All other steps know nothing of it.

It counts what trains: not the evaluation in between, nor the optimizer. What activation checkpointing computes again
counts again.

Operations inside what torch.compile has compiled can't be seen, and neither can those of other threads. So where
anything was compiled nothing is told, and neither is it where the program itself is in a dispatch mode at the end of
a step: that mode's end would end ours. An operation without a formula is told by its name.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any, cast

import torch

from lockstep import _torch, accelerator
from lockstep.job import flight, notes
from lockstep.job.page import Phase
from lockstep.job.peaks import peak_of
from lockstep.job.throughput import StepFlops
from lockstep.text import listed

#: Optimizer steps of a process before the one that is counted: the first ones compile, and allocate.
BEFORE = 2
#: Phases that are no training.
_LEFT_OUT = frozenset({Phase.EVALUATE, Phase.OPTIMIZER, Phase.SAVE, Phase.RESTORE})
#: Libraries of operations that lockstep and torch use for other things than models.
_OTHERS = frozenset(
    {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor", "debugprims", "rngprims"}
)
#: Operations of aten that multiply matrices and have no formula.
_WITHOUT = frozenset(
    {
        "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "mv", "addmv",
        "dot", "vdot", "addr", "_grouped_mm", "_scaled_grouped_mm", "_int_mm", "_addmm_activation", "_sparse_addmm",
        "_sparse_semi_structured_mm", "_transformer_encoder_layer_fwd", "_native_multi_head_attention",
        "_scaled_dot_product_fused_attention_overrideable", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    }
)  # fmt: skip


#: The reason why a step is not counted.
_COMPILED = "torch.compile has compiled parts of the program, inside which no operation is seen"
_COVERED = "a dispatch mode of the program's is active at the end of a step"


class OperationCounter:
    """Adds up the FLOPs of the operations that it sees run."""

    def __init__(self) -> None:
        self._formulas = _torch.flop_formulas()
        #: Operations that have no parts.
        self._whole: set[Any] = set()
        #: Dtype of the inputs -> FLOPs; "tf32" is float32 that may be multiplied in TF32.
        self.flops: defaultdict[str, int] = defaultdict(int)
        #: Operations that may have FLOPs and have no formula.
        self.unknown: set[str] = set()
        self.mode = _torch.mode_that_sees(self.run)

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, count it, and return its result."""
        packet = getattr(operation, "_overloadpacket", operation)
        formula = self._formulas.get(packet)
        if formula is None and operation not in self._whole and packet is not operation:
            with self.mode:  # in inference mode some come whole that have parts
                result = operation.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._whole.add(operation)
        result = operation(*args, **kwargs)
        if flight.current.phase in _LEFT_OUT:
            return result
        if formula is not None:
            self.flops[_dtype(packet, args)] += formula(*args, **kwargs, out_val=result)
        elif self._may_have_some(operation, packet):
            self.unknown.add(str(packet))
        return result

    def _may_have_some(self, operation: Any, packet: Any) -> bool:
        if packet is operation:  # an operator of a higher order, which has a graph inside
            return True
        library, _, name = operation.name().partition("::")
        base = name.partition(".")[0].removesuffix("_backward")
        return library not in _OTHERS or base in _WITHOUT


def _dtype(packet: Any, args: Any) -> str:
    tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
    if tensor is None:
        return ""
    if tensor.dtype is torch.float32 and tensor.device != accelerator.CPU:
        return "tf32" if _torch.multiplies_in_tf32(convolution="conv" in str(packet)) else "float32"
    return str(tensor.dtype).removeprefix("torch.")


class StepCount:
    """Counts the FLOPs of one step, and writes them to this process's page.

    Args:
        device: that the rank computes on.
        peak: its FLOPs a second at its peak; None: what is published of it, if anything is.
    """

    def __init__(self, *, device: torch.device, peak: float | None) -> None:
        self._device, self._peak = device, peak
        self._steps = 0
        self._counter: OperationCounter | None = None
        #: The samples of all steps when the step began.
        self._samples = 0
        #: The reason why the step can't be counted; empty: it can, as far as is known.
        self._why = ""

    def after_step(self) -> bool:
        """Begin or end, if it is time to; return whether it is over."""
        self._steps += 1
        if self._steps < BEFORE:
            return False
        return self._end() if self._counter is not None else not self._begin()

    def _begin(self) -> bool:
        """Begin to count, if that is possible."""
        global _under_way
        why = _COMPILED if _torch.graphs_compiled() else "" if _torch.innermost_mode() is None else _COVERED
        if why:
            self._tell(why)
            return False
        self._counter, self._samples, _under_way = OperationCounter(), flight.current.samples, self
        self._counter.mode.__enter__()
        os.register_at_fork(after_in_child=self._leave)
        return True

    def give_up(self, why: str) -> None:
        """Note why the step under way can't be counted."""
        self._why = self._why or why

    def _leave(self) -> bool:
        """Leave the mode, also in a child process (a loader's worker) that was forked meanwhile; return whether it was
        possible: not while the program is in another one."""
        global _under_way
        counter = self._counter
        if counter is None or _torch.innermost_mode() is not counter.mode:
            return False
        counter.mode.__exit__(None, None, None)
        self._counter = _under_way = None
        return True

    def _end(self) -> bool:
        counter = cast(OperationCounter, self._counter)
        if not self._leave():
            self.give_up(_COVERED)
            return False
        if _torch.graphs_compiled():
            self.give_up(_COMPILED)
        elif not counter.flops:
            self.give_up("no operation was seen that has any, on the thread that takes the optimizer's steps")
        if self._why:
            self._tell(self._why)
        else:
            step = StepFlops(
                sum(counter.flops.values()), flight.current.samples - self._samples, self._at_peak(counter.flops)
            )
            flight.current.counted_flops(step)
        if counter.unknown:
            notes.tell(notes.FLOPS, why=f"without those of {listed(sorted(counter.unknown))}, which have no formula")
        return True

    def _at_peak(self, flops: dict[str, int]) -> float:
        """Return the seconds that the FLOPs take at the peak; 0: that is not known of all of them."""
        if self._peak is not None:
            return sum(flops.values()) / self._peak
        if self._device == accelerator.CPU:
            return 0.0
        name = accelerator.name_of(self._device)
        peaks = {dtype: peak_of(name, dtype) for dtype in flops}
        return 0.0 if None in peaks.values() else sum(count / (peaks[dtype] or 1.0) for dtype, count in flops.items())

    def _tell(self, why: str) -> None:
        notes.tell(notes.FLOPS, why=f"not counted: {why}")


#: The count of the step under way; None: it is not counted.
_under_way: StepCount | None = None


def compute_unseen(what: str) -> None:
    """Say that a model now computes where its operations can't be seen, so that this step is not counted.

    Args:
        what: computes there, and why that can't be seen.
    """
    if _under_way is not None:
        _under_way.give_up(what)


def count(*, device: torch.device, peak: float | None) -> None:
    """Count the FLOPs of one of this process's next steps; see Note [A step that is counted].

    Args:
        device: that the rank computes on.
        peak: as for :class:`StepCount`.
    """
    flight.after_each_step(StepCount(device=device, peak=peak).after_step)
