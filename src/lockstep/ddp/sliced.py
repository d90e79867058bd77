"""A replica's gradients and buffers over the slices of a step: added up in one order, whoever has which slice.

Note [What becomes of a slice]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When a slice is done, what has accumulated in ``grad`` is taken away, multiplied by the slice's weight and added to the
sums that wait for it (Note [One tree] in ``slices.py``). The tensors that autograd made are kept, so that adding them
up costs what accumulating them in ``grad`` does, and the first of them are what the parameters get in the end. Half
precision is added up in float32. What was in ``grad`` before the step is put aside, and the average is added to it, as
backward does it.

A buffer that a forward changes would hand on from slice to slice what the slices' order is. So every slice begins with
the buffers of the step's beginning, and in the end a buffer has moved by the mean of what the slices have moved it by,
each weighing as many samples as it has. What does not move does not change by a bit, infinite values included; what
begins as an infinite value, as a smallest value seen so far does, becomes the mean itself. A forward may put another
tensor in a buffer's place: its values count, and the buffer stays where it was. Whole numbers (counts of batches) are
those after the first slice: a step counts as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep import _torch, callsite
from lockstep.comm.memory import RowOrder
from lockstep.comm.ordered import Rows
from lockstep.comm.slicing import SlicedStep
from lockstep.ddp.bucket import shaped
from lockstep.ddp.buffers import broadcast_tensors
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.members import buffers_of
from lockstep.errors import LockstepError
from lockstep.slices import Carries, Node, additions

#: One for each tensor of a step; None: nothing, which counts as zeros.
Leaf = list[Tensor | None]

_foreach_add, _foreach_mul, _foreach_copy = _torch.foreach_add(), _torch.foreach_mul(), _torch.foreach_copy()


class PartialSums:
    """The sums of the slices that a rank has been through."""

    def __init__(self, slices: int) -> None:
        self._carries = Carries(slices)
        #: Of the nodes that are complete, in order.
        self.sums: list[Leaf] = []

    def push(self, number: int, leaf: Leaf) -> None:
        """Add what slice ``number`` gave; the sums own its tensors from now on."""
        self.sums.append(leaf)
        for _ in range(self._carries.push(Node(0, number))):
            last = self.sums.pop()
            self.sums[-1] = _joined(self.sums[-1], last)


def _joined(left: Leaf, right: Leaf) -> Leaf:
    """Return the sum of two, in the memory of the first where it has any; see Note [One tree] for what is not there."""
    both = [(one, two) for one, two in zip(left, right, strict=True) if one is not None and two is not None]
    if both:
        _foreach_add([one for one, _ in both], [two for _, two in both])
    if len(both) == len(left):
        return left
    return [_with_nothing(one, two) for one, two in zip(left, right, strict=True)]


def _with_nothing(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None:
        return None if two is None else two.add_(0.0)
    return one.add_(0.0) if two is None else one


@dataclass(frozen=True)
class _Layout:
    """What lies where in a row: gradients, their flags, buffers."""

    #: Positions in a leaf of the gradients and of the buffers.
    grads: Sequence[int]
    buffers: Sequence[int]
    #: Of each in a row, in this order.
    sizes: Sequence[int]
    rows: Rows
    #: For each row, views of its gradients and buffers, and its flags: which gradients there are.
    views: Sequence[Sequence[Tensor]]
    flags: Sequence[Tensor]


class SlicedGradients:
    """What one replica has of the step in hand.

    Args:
        params: the parameters that are trained.
        names: theirs.
        group: the ranks.
        finite: looks at the averages.
    """

    def __init__(
        self, params: Sequence[Parameter], names: Sequence[str], *, group: dist.ProcessGroup, finite: FiniteCheck | None
    ) -> None:
        self._params, self._names = list(params), list(names)
        self._group, self._finite = group, finite
        self._rank = dist.get_rank(group)
        self._layouts: list[_Layout] = []
        self._laid_out_for: object = None
        #: Of the step in hand; None between steps.
        self._partial: PartialSums | None = None
        self._next = 0
        self._before: list[Tensor | None] = []
        self._versions: list[int] = []
        #: What the parameters got in the last step; None once it was warned that they have it still.
        self._written: list[tuple[Tensor | None, int]] | None = []
        self._buffers: list[Tensor] = []
        self._base: list[Tensor] = []
        #: Whole-number buffers after the step's first slice, on the rank that has it.
        self._counts: dict[int, Tensor] = {}

    def begin(self, step: SlicedStep, buffers: Sequence[Tensor]) -> None:
        """Begin a step: put what is in ``grad`` aside, and remember the buffers."""
        self._partial = PartialSums(step.slices)
        self._next = step.runs[self._rank][0]
        self._before = [param.grad for param in self._params]
        self._warn_of_stale()
        for param in self._params:
            param.grad = None
        self._versions = [param._version for param in self._params]
        self._buffers = list(buffers)
        self._base = [buffer.detach().clone() for buffer in buffers]
        self._counts = {}

    def _warn_of_stale(self) -> None:
        """Say so once if an optimizer has stepped with the last step's gradients, and they are there still."""
        if not self._written:
            return
        pairs = zip(self._before, self._written, self._params, self._versions, strict=True)
        # (What was written to since, zeros most likely, is the script's own affair.)
        if any(
            now is not None and now is then and now._version == written and param._version != old
            for now, (then, written), param, old in pairs
        ):
            self._written = None
            if self._rank == 0:
                callsite.warn(
                    "the gradients of the last step are there still as this one begins, although the optimizer has "
                    "stepped with them, so they are added to: call optimizer.zero_grad() after optimizer.step(), or "
                    "before the inner loop. Within that loop it has nothing to clear"
                )

    def forget(self) -> None:
        """Throw the step away: gradients and buffers are as they were at its beginning."""
        if self._partial is None:
            return
        self._partial = None
        for param, grad in zip(self._params, self._before, strict=True):
            param.grad = grad
        self._put_buffers_back()
        self._close()

    def _close(self) -> None:
        self._partial, self._before, self._buffers, self._base, self._counts = None, [], [], [], {}

    @torch.no_grad()
    def take(self, step: SlicedStep, number: int, module: nn.Module, buffers: Sequence[Tensor]) -> bool:
        """Take what slice ``number`` has left. Return whether that is a gradient.

        Args:
            step: the step in hand.
            number: of the slice.
            module: the replica's.
            buffers: its own, as they are now.

        Raises:
            LockstepError: a gradient is sparse, a parameter has changed, or a buffer its shape.
        """
        assert self._partial is not None  # a step has begun
        grads = self._take_gradients(step, number)
        self._take_replaced(step, number, module, buffers)
        moved = self._take_buffers(step, number)
        self._skip_to(number)
        self._partial.push(number, [*grads, *moved])
        self._next = number + 1
        return any(grad is not None for grad in grads)

    def _take_gradients(self, step: SlicedStep, number: int) -> Leaf:
        grads: Leaf = []
        for param, name, version in zip(self._params, self._names, self._versions, strict=True):
            grad, param.grad = param.grad, None
            if param._version != version:
                raise LockstepError(
                    f"{step.whoami()}: parameter '{name}' was changed inside slice {number}, so the slices after it "
                    "are of other parameters: step the optimizer after the inner loop"
                )
            if grad is not None and grad.layout != torch.strided:
                raise LockstepError(
                    f"{step.whoami()}: parameter '{name}' got a sparse gradient, and slices add up dense ones: make "
                    "the embedding with sparse=False"
                )
            grads.append(None if grad is None else _as_summed(grad))
        weight = step.weight(number)
        if weight == 0:
            return [None] * len(grads)
        present = [grad for grad in grads if grad is not None]
        if weight is not None and present:
            _foreach_mul(present, float(weight))
        return grads

    def _take_replaced(self, step: SlicedStep, number: int, module: nn.Module, buffers: Sequence[Tensor]) -> None:
        """Take the values of tensors that a forward has put in buffers' places, and put the buffers back there."""
        if len(buffers) != len(self._buffers):
            return  # the forward has registered more of them: the step to come begins with those
        replaced: dict[int, Tensor] = {}
        for index, (now, buffer, base) in enumerate(zip(buffers, self._buffers, self._base, strict=True)):
            if now.shape != base.shape:
                name = [name for name, _ in buffers_of(module)][index]
                raise LockstepError(
                    f"{step.whoami()}: buffer '{name}' was of shape {list(base.shape)} and is of {list(now.shape)} "
                    f"after slice {number}, so there is no mean of it: let a forward before the first step give it its "
                    "size, make it a plain attribute, or name it in model._ddp_params_and_buffers_to_ignore"
                )
            if now is not buffer:
                replaced[id(now)] = buffer
                buffer.data.copy_(now.detach())
        if replaced:
            for part in module.modules():
                for name, hanging in part._buffers.items():
                    part._buffers[name] = replaced.get(id(hanging), hanging)

    def _take_buffers(self, step: SlicedStep, number: int) -> Leaf:
        moved: Leaf = []
        is_first = number == next(each for each, size in enumerate(step.sizes) if size)
        part = step.sizes[number] / sum(step.sizes)
        for index, (buffer, base) in enumerate(zip(self._buffers, self._base, strict=True)):
            if _is_averaged(buffer):
                now, then = _as_summed(buffer.detach()), _as_summed(base)
                change = torch.where(now == then, 0.0, now - then)
                moved.append(torch.where(then.isinf(), now, change).mul_(part))
            elif is_first:
                self._counts[index] = buffer.detach().clone()
        self._put_buffers_back()
        return moved

    def _put_buffers_back(self) -> None:
        # (Through .data: autograd may have saved a buffer, and this write must not count as a modification.)
        for buffer, base in zip(self._buffers, self._base, strict=True):
            if buffer.shape == base.shape:
                buffer.data.copy_(base)
            else:  # resized, which has been refused
                buffer.data = base

    def _skip_to(self, number: int) -> None:
        """Count slices without samples, which nobody goes through."""
        assert self._partial is not None  # a step has begun
        for empty in range(self._next, number):
            self._partial.push(empty, [None] * self._width())
        self._next = number

    def _width(self) -> int:
        return len(self._params) + sum(map(_is_averaged, self._buffers))

    # At the end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end(self, step: SlicedStep) -> None:
        """**Collective.** Add up what the ranks have, and make it the gradients and buffers.

        Raises:
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveMismatch, CollectiveTimeout, PeerLost: as a backward that averages.
        """
        assert self._partial is not None  # a step has begun
        self._skip_to(step.runs[self._rank][1])
        sums = self._partial.sums
        if step.world.world_size == 1:
            total = sums[0]
            present = [grad for grad in total[: len(self._params)] if grad is not None]
            if present:
                _foreach_mul(present, 1 / step.total)
            finite = self._finite is None or all(bool(grad.isfinite().all()) for grad in present)
        else:
            total, finite = self._exchange(step, sums)
        if self._finite is not None and self._is_skipped(step, sums, finite=finite):
            for param in self._params:
                param.grad = None
        else:
            self._write_gradients(total)
        self._write_buffers(step, total[len(self._params) :])
        self._close()

    def _is_skipped(self, step: SlicedStep, sums: Sequence[Leaf], *, finite: bool) -> bool:
        assert self._finite is not None  # asked where there is one
        if not finite:
            self._finite.inspect_sums(sums, self._names)
        return self._finite.verdict(flagged=not finite, whoami=lambda: step.whoami())

    def _exchange(self, step: SlicedStep, sums: list[Leaf]) -> tuple[Leaf, bool]:
        """**Collective.** Return the sum of all ranks' sums, divided, and whether the gradients are finite."""
        nodes = step.nodes()
        everyones = [(rank, row) for rank, each in enumerate(nodes) for row in range(len(each))]
        pairs = tuple(additions([node for each in nodes for node in each], step.slices))
        total: Leaf = [None] * self._width()
        finite = True
        for layout in self._lay_out(max(map(len, nodes))):
            for row, leaf in enumerate(sums):
                _pack(layout, row, leaf)
            gradients = sum(layout.sizes[: len(layout.grads)]) + len(layout.grads)
            factors = ((gradients, 1 / step.total), (gradients + sum(layout.sizes[len(layout.grads) :]), 1.0))
            order = RowOrder(factors[1][0], tuple(everyones), pairs, factors)
            result = layout.rows.add_up(order, lambda: f"{step.whoami()}: averaging the gradients of its slices")
            if self._finite is not None:
                finite = finite and bool(result[:gradients].isfinite().all())
            self._unpack(layout, sums, total)
        return total, finite

    def _unpack(self, layout: _Layout, sums: Sequence[Leaf], total: Leaf) -> None:
        """Copy the result to where it stays: the memory of this rank's own first sum, or new one."""
        own = sums[0] if sums else total
        positions = [*layout.grads, *layout.buffers]
        missing = {at for at in layout.grads if all(leaf[at] is None for leaf in sums)}
        unused: set[int] = set()
        if missing:
            flags = zip(layout.grads, layout.flags[0].tolist(), strict=True)
            unused = {at for at, used in flags if not used and at in missing}
        targets, sources = [], []
        for at, view in zip(positions, layout.views[0], strict=True):
            if at not in unused:
                mine = own[at]
                total[at] = torch.empty_like(view) if mine is None else mine
                targets.append(total[at])
                sources.append(view)
        if targets:
            _foreach_copy(targets, sources)

    def _lay_out(self, count: int) -> Sequence[_Layout]:
        """**Collective** where the layout or the number of rows has changed. Return where sums are exchanged."""
        originals = [*self._params, *(buffer for buffer in self._buffers if _is_averaged(buffer))]
        key = (max(count, 1), [(each.shape, each.stride(), each.dtype, each.device) for each in originals])
        if key == self._laid_out_for:
            return self._layouts
        self._layouts.clear()
        tensors = [_as_summed(torch.empty_like(each, device="meta")) for each in originals]
        of = [(tensor.dtype, original.device) for tensor, original in zip(tensors, originals, strict=True)]
        for dtype, device in dict.fromkeys(of):
            of_kind = [at for at, kind in enumerate(of) if kind == (dtype, device)]
            grads = [at for at in of_kind if at < len(self._params)]
            buffers = [at for at in of_kind if at >= len(self._params)]
            sizes = [tensors[at].numel() for at in (*grads, *buffers)]
            width = sum(sizes) + len(grads)
            rows = Rows(self._group, width=width, count=max(count, 1), dtype=dtype, device=device)
            places = [*accumulate([*sizes[: len(grads)], len(grads), *sizes[len(grads) :]], initial=0)]
            starts = [*places[: len(grads)], *places[len(grads) + 1 : -1]]
            views = [
                [
                    shaped(row[start : start + size], tensors[at])
                    for start, size, at in zip(starts, sizes, (*grads, *buffers), strict=True)
                ]
                for row in rows.rows
            ]
            flags = [row[places[len(grads)] : places[len(grads)] + len(grads)] for row in rows.rows]
            self._layouts.append(_Layout(grads, buffers, sizes, rows, views, flags))
        self._laid_out_for = key
        return self._layouts

    def _write_gradients(self, total: Leaf) -> None:
        for param, before, grad in zip(self._params, self._before, total, strict=False):
            if grad is None:
                param.grad = before
                continue
            if param.is_complex():
                grad = torch.view_as_complex(grad)
            grad = grad.to(param.dtype)
            param.grad = grad if before is None else before.add_(grad)
        if self._written is not None:
            grads = [param.grad for param in self._params]
            self._written = [(grad, 0 if grad is None else grad._version) for grad in grads]

    def _write_buffers(self, step: SlicedStep, moved: Leaf) -> None:
        averaged = [index for index, buffer in enumerate(self._buffers) if _is_averaged(buffer)]
        for index, by in zip(averaged, moved, strict=True):
            if by is not None:
                buffer, base = self._buffers[index], self._base[index]
                then = _as_summed(base)
                mean = torch.where(then.isinf(), by, then + by)
                buffer.data.copy_(torch.view_as_complex(mean) if buffer.is_complex() else mean)
        others = [index for index in range(len(self._buffers)) if index not in set(averaged)]
        for index in others:
            if index in self._counts:
                self._buffers[index].data.copy_(self._counts[index])
        if others and step.world.world_size > 1:
            first = next(number for number, size in enumerate(step.sizes) if size)
            source = next(rank for rank, (start, end) in enumerate(step.runs) if start <= first < end)
            broadcast_tensors(
                [self._buffers[index] for index in others],
                group=self._group,
                source=source,
                what=lambda: f"{step.whoami()}: sending the buffers",
            )


def _pack(layout: _Layout, row: int, leaf: Leaf) -> None:
    views, flags = layout.views[row], layout.flags[row]
    there, sources = [], []
    for at, view in zip((*layout.grads, *layout.buffers), views, strict=True):
        tensor = leaf[at]
        if tensor is None:
            view.zero_()
        else:
            there.append(view)
            sources.append(tensor)
    if there:
        _foreach_copy(there, sources)
    present = [leaf[at] is not None for at in layout.grads]
    flags.fill_(1) if all(present) else flags.copy_(torch.tensor(present, dtype=flags.dtype))


def _as_summed(tensor: Tensor) -> Tensor:
    """Return a tensor in the dtype that it is added up in; complex numbers as pairs of real ones."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.contiguous())
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _is_averaged(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
