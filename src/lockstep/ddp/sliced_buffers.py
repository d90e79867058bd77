"""A replica's buffers over the slices of a step: moved by the mean of the slices if that is meaningful, or refused.

Note [Buffers in slices]
~~~~~~~~~~~~~~~~~~~~~~~~
A buffer that a forward changes would make the result depend on the order of the slices. So every slice begins with the
buffers of the step's beginning, and in the end a buffer has moved by the mean of the slices' movements, weighted by
their samples. Elements that do not move do not change by a bit, infinite values included. A forward may put another
tensor in a buffer's place: its values count, and the buffer stays where it was. Whole numbers (counts of batches) are
those after the first slice: a step counts as one.

That is right for statistics, which are means over samples (or decaying means of such), and for buffers that every slice
changes alike. It is wrong for values that a forward stores sample by sample: a queue of keys, codes that are replaced,
the smallest value seen. The buffers of torch's norm layers are taken as statistics. Other buffers are judged by what
the slices do to them. A buffer is refused

- of whole numbers that the slices change differently, or by something else than a count of forwards: a queue's place;
- that a slice moves by the number of its samples: a count of them, which a mean over slices makes too small;
- that begins as an infinite value: a smallest or largest value seen so far;
- of which the slices write different elements, or write some to different values and leave others: codes, queues;
- whose rows a slice has moved along: a queue again.

The last two are not looked for in a buffer whose name begins with ``running_``, which says that it holds means.

Each slice leaves a mark of what it did to a buffer. The marks of all slices of all ranks must be the same, so whether a
buffer is refused does not depend on which rank had which slice, and all ranks refuse it together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import _torch, bits
from lockstep.ddp.buffers import broadcast_tensors
from lockstep.ddp.members import buffers_of
from lockstep.step.slicing import SlicedStep

#: One tensor for each parameter and averaged buffer of a step; None counts as zeros.
Leaf = list[Tensor | None]
#: Name of a buffer -> what a slice did to it, as a text that can be compared.
Marks = dict[str, str]

_NormBase = _torch.norm_base()
_ADVICE = (
    "Change it after the inner loop, in the same way on all ranks, or train this model in a plain loop, where the "
    "buffers of rank 0 count. docs/exactness.md says which buffers work in slices"
)


class SlicedBuffers:
    """The changes that the slices of one step make to the buffers.

    Args:
        module: the replica's module.
        buffers: the module's buffers, as they are when the step begins.
    """

    def __init__(self, module: nn.Module, buffers: Sequence[Tensor]) -> None:
        self.buffers = list(buffers)
        self._base = [buffer.detach().clone() for buffer in buffers]
        self._names, self._means = _names_of(module, self.buffers)
        #: Index -> whole-number buffer after the step's first slice, on the rank that has it.
        self._counts: dict[int, Tensor] = {}
        #: The marks of this rank's first slice, and that slice's number.
        self.marks: Marks = {}
        self._first: int | None = None

    @property
    def averaged(self) -> list[Tensor]:
        """Return the buffers that are averaged."""
        return [buffer for buffer in self.buffers if _is_averaged(buffer)]

    # In a slice -----------------------------------------------------------------------------------------------------

    def take(self, step: SlicedStep, number: int, module: nn.Module, now: Sequence[Tensor], *, forwards: int) -> Leaf:
        """Take the values that slice ``number`` has left in the buffers, and restore the buffers.

        Args:
            step: the step in hand; it is told of buffers that are refused.
            number: the slice's number.
            module: the replica's module.
            now: the module's buffers, as they are now.
            forwards: the number of forwards of the replica in the slice.

        Returns:
            The movements of the averaged buffers, times the slice's part of the batch.
        """
        if not self._take_replaced(step, number, module, now):
            self.put_back()
            return [None] * len(self.averaged)
        part = step.cut.sizes[number] / step.cut.samples
        moved: Leaf = []
        marks: Marks = {}
        is_first = number == step.cut.filled[0]
        for index, (buffer, base) in enumerate(zip(self.buffers, self._base, strict=True)):
            name = self._names[index]
            if _is_averaged(buffer):
                now_, then = as_summed(buffer.detach()), as_summed(base)
                change = torch.where(now_ == then, 0.0, now_ - then)
                moved.append(torch.where(then.isinf(), now_, change).mul_(part))
                if name:
                    self._mark_real(step, number, index, now_, then, marks, forwards=forwards)
            else:
                if is_first:
                    self._counts[index] = buffer.detach().clone()
                if name:
                    self._mark_whole(step, number, name, buffer.detach(), base, marks, forwards=forwards)
        self._compare(step, number, marks)
        self.put_back()
        return moved

    def _take_replaced(self, step: SlicedStep, number: int, module: nn.Module, now: Sequence[Tensor]) -> bool:
        """Take the values of tensors that a forward has put in buffers' places, and put the buffers back there.

        Returns:
            Whether all still have their shapes; the step is told of one that has not.
        """
        if len(now) != len(self.buffers):
            return True  # the forward has registered more buffers: the next step begins with those
        replaced: dict[int, Tensor] = {}
        fits = True
        for index, (current, buffer, base) in enumerate(zip(now, self.buffers, self._base, strict=True)):
            if current.shape != base.shape:
                name = [name for name, _ in buffers_of(module)][index]
                step.note_mistake(
                    f"buffer '{name}' was of shape {list(base.shape)} and is of {list(current.shape)} after slice "
                    f"{number}, so there is no mean of it: let a forward before the first step give it its size, or "
                    "train this model in a plain loop"
                )
                fits = False
                replaced[id(current)] = buffer
            elif current is not buffer:
                replaced[id(current)] = buffer
                buffer.data.copy_(current.detach())
        if replaced:
            for part in module.modules():
                for name, hanging in part._buffers.items():
                    part._buffers[name] = replaced.get(id(hanging), hanging)
        return fits

    def put_back(self) -> None:
        """Restore the buffers from the beginning of the step."""
        # Autograd may have saved a buffer, so this writes through .data, which does not count as a modification.
        for buffer, base in zip(self.buffers, self._base, strict=True):
            if buffer.shape == base.shape:
                buffer.data.copy_(base)
            else:  # it was resized, which has been refused
                buffer.data = base

    # Refusals -------------------------------------------------------------------------------------------------------

    def _mark_real(
        self, step: SlicedStep, number: int, index: int, now: Tensor, then: Tensor, marks: Marks, *, forwards: int
    ) -> None:
        same = (now == then) | (now.isnan() & then.isnan())
        if bool(same.all()):
            return
        name, size = self._names[index], step.cut.sizes[number]
        if bool((then.isinf() & ~same).any()):
            step.note_mistake(
                f"buffer {name} began as an infinite value and was changed in slice {number}, as a smallest or largest "
                "value seen so far is, and the mean of such values is not another one. Let a forward outside of "
                "the steps give it its first value if it is a moving average of them; else leave it fixed while you "
                f"train in slices (an observer of quantization: disable_observer). {_ADVICE}"
            )
        elif not bool(same.any()) and any(_moved_by(now, then, size * times) for times in (1, forwards)):
            step.note_mistake(
                f"buffer {name} counts samples: slice {number} of {size} has increased it by that number. "
                "The mean over slices is the size of a slice, not of the batch, so what is weighed by that count "
                f"would be wrong. {_ADVICE}"
            )
        elif index in self._means:
            return
        elif bool(same.any()):
            marks[name] = f"some:{bits.hexdigest(same)}:{bits.hexdigest(now)}"
        else:
            marks[name] = "all"
            if self._first is None and _rows_moved(now, then):
                step.note_mistake(
                    f"buffer {name} is a queue: slice {number} has moved its rows along. Every slice of a step begins "
                    "with the same buffers, so a queue would get the mean over slices of what belongs to different "
                    f"samples. {_ADVICE}"
                )

    def _mark_whole(
        self, step: SlicedStep, number: int, name: str, now: Tensor, then: Tensor, marks: Marks, *, forwards: int
    ) -> None:
        if torch.equal(now, then):
            return
        marks[name] = f"whole:{bits.hexdigest(now)}"
        by = int(now) - int(then) if now.numel() == 1 else 1
        if by not in (1, forwards):
            step.note_mistake(
                f"buffer {name} holds a whole number that slice {number} changed by {by}: it counts no batches, as a "
                "place in a queue does not. Every slice of a step begins with the same buffers, and of whole numbers "
                f"those after the first slice stay. {_ADVICE}"
            )

    def _compare(self, step: SlicedStep, number: int, marks: Marks) -> None:
        if self._first is None:
            self._first, self.marks = number, marks
        elif marks != self.marks:
            words = unlike([self.marks, marks], [f"slice {self._first}", f"slice {number}"])
            if words is not None:
                step.note_mistake(words)

    # At the end -----------------------------------------------------------------------------------------------------

    def write(self, step: SlicedStep, moved: Leaf, group: dist.ProcessGroup) -> None:
        """**Collective.** Move the buffers by the mean, and send the whole numbers of the first slice."""
        averaged = [index for index, buffer in enumerate(self.buffers) if _is_averaged(buffer)]
        for index, by in zip(averaged, moved, strict=True):
            if by is not None:
                buffer, base = self.buffers[index], self._base[index]
                then = as_summed(base)
                mean = torch.where(then.isinf(), by, then + by)
                buffer.data.copy_(torch.view_as_complex(mean) if buffer.is_complex() else mean)
        others = [index for index in range(len(self.buffers)) if index not in set(averaged)]
        for index in others:
            if index in self._counts:
                self.buffers[index].data.copy_(self._counts[index])
        if others and step.world.world_size > 1:
            first = step.cut.filled[0]
            source = next(rank for rank, (start, end) in enumerate(step.cut.runs) if start <= first < end)
            broadcast_tensors(
                [self.buffers[index] for index in others],
                group=group,
                source=source,
                what=lambda: f"{step.whoami()}: sending the buffers",
            )


def unlike(marks: Sequence[Marks], whose: Sequence[str]) -> str | None:
    """Return a message if slices did different things to a buffer, else None.

    Args:
        marks: the marks of several slices or ranks.
        whose: descriptions of these slices or ranks.
    """
    for other, who in zip(marks[1:], whose[1:], strict=True):
        for name in sorted({*marks[0], *other}):
            one, two = marks[0].get(name), other.get(name)
            if one != two:
                what = "to different whole numbers" if "whole" in f"{one}{two}" else "in different elements"
                done = f"changed {what} by {whose[0]} and by {who}" if one and two else "changed by some slices only"
                return (
                    f"buffer {name} was {done}, so the mean over slices would mix what does not belong together (of a "
                    "queue, of codes, of smallest and largest values). If it is a statistic all the same, a mean over "
                    f"samples, begin its name with running_. {_ADVICE}"
                )
    return None


def as_summed(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype that it is added up in; complex numbers as pairs of real ones."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.contiguous())
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _names_of(module: nn.Module, buffers: Sequence[Tensor]) -> tuple[list[str], set[int]]:
    """Return the name of each buffer for messages, "" for those of torch's norm layers, which need not be looked at.

    Returns:
        The names, and the indices of the buffers whose names say that they hold means.
    """
    said: dict[int, str] = {}
    means: set[int] = set()
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in said:
                full = f"{path}.{name}" if path else name
                said[id(buffer)] = "" if isinstance(part, _NormBase) else f"'{full}' of {type(part).__name__}"
                means.update([id(buffer)] if name.startswith("running_") else ())
    return [said.get(id(buffer), "") for buffer in buffers], {i for i, each in enumerate(buffers) if id(each) in means}


def _moved_by(now: Tensor, then: Tensor, samples: int) -> bool:
    """Return whether all elements have moved by ``samples``, to rounding; False for 1, which counts batches."""
    most = 4 * torch.finfo(now.dtype).eps * max(float(now.abs().max()), 1.0)
    return samples > 1 and bool(((now - then - samples).abs() <= most).all())


def _rows_moved(now: Tensor, then: Tensor) -> bool:
    """Return whether the rows of one are those of the other, shifted, along the first or the last dimension."""
    for dim in {0, now.dim() - 1} if now.dim() > 1 else ():
        new, old = (each.movedim(dim, 0).flatten(1) for each in (now, then))
        for moved, stayed in ((new, old), (old, new)):
            offsets = (moved == stayed[0]).all(1).nonzero().flatten().tolist()
            if any(each and torch.equal(moved[each:], stayed[:-each]) for each in offsets[:3]):
                return True
    return False
