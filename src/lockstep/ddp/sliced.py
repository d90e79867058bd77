"""A replica's gradients over the slices of a step: added up in one order, whichever rank has which slice.

Note [What becomes of a slice]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
When a slice is done, its gradients in ``grad`` are taken away, multiplied by the slice's weight and added to the sums
that wait for them (Note [One tree] in ``step/tree_sum.py``). The tensors that autograd made are kept, so that adding
them up costs the same as accumulating them in ``grad``, and the parameters get the first of them in the end. Half
precision is added up in float32. The value of ``grad`` before the step is put aside, and the average is added to it, as
backward does it. For buffers see Note [Buffers in slices] in ``sliced_buffers.py``.

Note [Cleared in a slice]
~~~~~~~~~~~~~~~~~~~~~~~~~
``zero_grad()`` inside the inner loop clears the ``grad`` from before the step, and no gradient of a slice: it must not
matter in which slice it is called, and on how many ranks. So the old gradient must not come back if any rank has
cleared it. A rank detects that by a placeholder: in place of an old gradient, an empty sparse tensor stands in ``grad``
from the beginning of each slice until a backward begins. It is gone if ``grad`` was set to None, and has another
version if it was zeroed. (It is sparse because autograd does not write to a sparse tensor: a backward that begins
unannounced, with the first gradient, puts a new tensor in its place.) At the end the ranks exchange what was cleared.

Note [Parameters that move]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A parameter that changes inside a slice, trained or frozen, makes the slices after it another model's, on this rank and
for as many slices as it has. torch counts writes to a parameter, but not writes to its ``data`` (by a model that
maintains a moving average in its own forward). So some elements of each are compared as well: after each slice of the
first steps, and of ever fewer later ones, since a parameter that moves does so from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep import _torch, callsite
from lockstep.comm.memory import RowOrder
from lockstep.comm.ordered import Rows
from lockstep.ddp.bucket import shaped
from lockstep.ddp.finite import FiniteCheck
from lockstep.ddp.members import parameters_of
from lockstep.ddp.sliced_buffers import Leaf, SlicedBuffers, as_summed, unlike
from lockstep.errors import LockstepError
from lockstep.step.slicing import SlicedStep
from lockstep.step.tree_sum import Carries, Node, additions

#: Fates of a gradient from before the step.
_KEPT, _ZEROED, _GONE = 0, 1, 2
#: Number of elements of a parameter that are compared.
_PROBES = 4

_foreach_add, _foreach_mul, _foreach_copy = _torch.foreach_add(), _torch.foreach_mul(), _torch.foreach_copy()


class PartialSums:
    """The sums of the slices that a rank has been through."""

    def __init__(self, slices: int) -> None:
        self._carries = Carries(slices)
        #: The sums of the complete nodes, in order.
        self.sums: list[Leaf] = []

    def push(self, number: int, leaf: Leaf) -> None:
        """Add the leaf of slice ``number``; the sums own its tensors from now on."""
        self.sums.append(leaf)
        for _ in range(self._carries.push(Node(0, number))):
            last = self.sums.pop()
            self.sums[-1] = _joined(self.sums[-1], last)


def _joined(left: Leaf, right: Leaf) -> Leaf:
    """Return the sum of two leaves, in the first's memory if it has any; for missing tensors see Note [One tree]."""
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
    """The layout of a row: gradients, their flags, buffers."""

    #: Positions in a leaf of the gradients and of the buffers.
    grads: Sequence[int]
    buffers: Sequence[int]
    #: Number of elements of each gradient and buffer in a row, in this order.
    sizes: Sequence[int]
    rows: Rows
    #: For each row, views of its gradients and buffers, and its flags: 1 for each gradient that is present.
    views: Sequence[Sequence[Tensor]]
    flags: Sequence[Tensor]


class GradientsBefore:
    """The gradients in ``grad`` when a step began, and their fates in its slices; see Note [Cleared in a slice].

    Args:
        params: the parameters that are trained.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self.grads = [param.grad for param in params]
        self.fates = [_KEPT] * len(params)
        #: The placeholders until a backward begins; None where there is none.
        self._stands: list[Tensor | None] = []
        self._has_any = any(grad is not None for grad in self.grads)
        for param in params:
            param.grad = None
        self.stand_in()

    def stand_in(self) -> None:
        """Put placeholders in place of gradients that were not cleared; ``grad`` is None everywhere."""
        if not self._has_any:
            return
        self._stands = [
            torch.empty(grad.shape, dtype=grad.dtype, device=grad.device, layout=torch.sparse_coo)
            if grad is not None and fate == _KEPT
            else None
            for grad, fate in zip(self.grads, self.fates, strict=True)
        ]
        for param, stand in zip(self._params, self._stands, strict=True):
            if stand is not None:
                param.grad = stand

    def look(self, *, unannounced: bool = False) -> None:
        """Find what was cleared, and remove the placeholders; called when a backward begins, and when a slice ends.

        Args:
            unannounced: whether a first gradient has already come, in place of its placeholder.
        """
        stands, self._stands = self._stands, []
        for index, stand in enumerate(stands):
            if stand is None:
                continue
            param = self._params[index]
            if param.grad is stand:
                self.fates[index] = _ZEROED if stand._version else _KEPT
                param.grad = None
            elif param.grad is None or not unannounced:  # otherwise the script has put a gradient there
                self.fates[index] = _GONE

    def cleared(self) -> list[list[int]]:
        """Return runs of (fate, number of consecutive parameters) for the other ranks; empty if nothing was cleared."""
        return [[fate, len([*same])] for fate, same in groupby(self.fates)] if any(self.fates) else []

    def take_over(self, cleared: Sequence[Sequence[int]]) -> None:
        """Treat the gradients that another rank has cleared as cleared here."""
        fates = [fate for fate, count in cleared for _ in range(count)]
        if fates:
            self.fates = [*map(max, self.fates, fates)]

    def put_back(self) -> None:
        """Restore every ``grad`` from before the step."""
        for param, grad in zip(self._params, self.grads, strict=True):
            param.grad = grad

    def add(self, index: int, grad: Tensor | None) -> None:
        """Set a parameter's ``grad`` after the step: the average, added to the old gradient unless it was cleared."""
        param, before, fate = self._params[index], self.grads[index], self.fates[index]
        if before is None or fate == _GONE:
            param.grad = grad
        elif fate == _ZEROED:
            param.grad = before.zero_() if grad is None else before.copy_(grad)
        else:
            param.grad = before if grad is None else before.add_(grad)


class Unmoved:
    """Detects parameters that change in a slice; see Note [Parameters that move].

    Args:
        named: names and parameters, trained or not.
        probes: whether some elements are compared as well.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], *, probes: bool) -> None:
        self._named = named
        self._versions = [param._version for _, param in named]
        self._addresses = [param.data_ptr() for _, param in named]
        self._probed = self._probe() if probes else None

    def find_moved(self) -> str | None:
        """Return the name of a parameter that has changed since, or None."""
        versions, addresses = self._versions, self._addresses
        for (name, param), version, address in zip(self._named, versions, addresses, strict=True):
            if param._version != version or param.data_ptr() != address:
                return name
        if self._probed is not None and not _are_same(self._probed, now := self._probe()):
            for (name, _), one, two in zip(self._named, self._probed, now, strict=True):
                if not torch.equal(one, two):
                    return name
        return None

    def _probe(self) -> list[Tensor]:
        return [_some_bytes(param) for _, param in self._named]


def _are_same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether tensors of bytes, each on the same device as the other one, are the same; one wait per device."""
    devices = {each.device for each in ones}
    joined = (
        [torch.cat([each for each in them if each.device == place]) for place in devices] for them in (ones, others)
    )
    return all(map(torch.equal, *joined))


def _some_bytes(param: Parameter) -> Tensor:
    """Return a few elements, bit by bit; a copy."""
    if param.layout != torch.strided or not param.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    data = param.detach()
    flat = data.view(-1) if data.is_contiguous() else data.flatten()[:_PROBES]
    return flat[:: max(1, len(flat) // _PROBES)].clone().view(torch.uint8)


#: The values between steps.
_NO_GRADIENTS, _NO_BUFFERS = GradientsBefore([]), SlicedBuffers(nn.Module(), [])
_NOTHING_MOVES = Unmoved([], probes=False)


class SlicedGradients:
    """One replica's gradients and buffers of the step in hand.

    Args:
        params: the parameters that are trained.
        names: the parameters' names.
        group: the ranks.
        finite: the check of the averages, if any.
    """

    def __init__(
        self, params: Sequence[Parameter], names: Sequence[str], *, group: dist.ProcessGroup, finite: FiniteCheck | None
    ) -> None:
        self._params, self._names = list(params), list(names)
        self._group, self._finite = group, finite
        self._rank = dist.get_rank(group)
        self._layouts: list[_Layout] = []
        self._laid_out_for: object = None
        #: The sums of the step in hand; None between steps. ``_next``: the number of the slice after the last one.
        self._partial: PartialSums | None = None
        self._next = 0
        self._before, self._unmoved = _NO_GRADIENTS, _NOTHING_MOVES
        #: The parameters' version counters when the step in hand began, and when the one before it did.
        self._versions: list[int] = []
        self._versions_before: list[int] = []
        self._buffers = _NO_BUFFERS
        #: The gradients of the last step, with their version counters; None once the user was warned of stale ones.
        self._written: list[tuple[Tensor | None, int]] | None = []
        #: Number of steps so far.
        self._steps = 0
        #: True if a backward has begun in the step in hand, and if the user was warned that one left no gradient.
        self._has_backward = self._has_said = False

    def begin(self, module: nn.Module, step: SlicedStep, buffers: Sequence[Tensor]) -> None:
        """Begin a step: put the present gradients aside, and remember parameters and buffers.

        **Collective** where the step may fail and the layout of its sums has changed.
        """
        self._partial = PartialSums(step.cut.slices)
        self._next = step.cut.runs[self._rank][0]
        self._before = GradientsBefore(self._params)
        if not self._steps and self._rank == 0:
            _warn_of_small_slices(module, step)
        self._versions_before = self._versions
        self._versions = [param._version for param in self._params]
        self._steps += 1
        self._unmoved = Unmoved([*parameters_of(module)], probes=self._steps & (self._steps - 1) == 0)
        self._buffers = SlicedBuffers(module, buffers)
        self._has_backward = False
        if step.may_fail and step.world.world_size > 1:
            self._lay_out(max(map(len, step.cut.nodes())))

    def backward_begins(self, *, unannounced: bool) -> None:
        """Make way for the gradients of a backward in a slice."""
        self._has_backward = True
        self._before.look(unannounced=unannounced)

    def _warn_of_stale(self) -> None:
        """Warn once if an optimizer has stepped with the last step's gradients, and they are still in ``grad``."""
        if not self._written:
            return
        before = zip(self._before.grads, self._before.fates, strict=True)
        pairs = zip(before, self._written, self._versions, self._versions_before, strict=True)
        # Gradients that were written to since (zeroed, most likely) are the script's own affair.
        if any(
            now is not None and fate == _KEPT and now is then and now._version == written and version != old
            for (now, fate), (then, written), version, old in pairs
        ):
            self._written = None
            if self._rank == 0:
                callsite.warn(
                    "the gradients of the last step were still there in this step, after the optimizer had stepped "
                    "with them, so this step's were added to them: call optimizer.zero_grad() after optimizer.step()"
                )

    def forget(self) -> None:
        """Throw the step away: restore gradients and buffers from its beginning."""
        if self._partial is None:
            return
        self._before.put_back()
        self._buffers.put_back()
        self._close()

    def _close(self) -> None:
        self._partial, self._before, self._buffers, self._unmoved = None, _NO_GRADIENTS, _NO_BUFFERS, _NOTHING_MOVES

    @torch.no_grad()
    def take(
        self, step: SlicedStep, number: int, module: nn.Module, buffers: Sequence[Tensor], *, forwards: int
    ) -> bool:
        """Take the gradients and buffers that slice ``number`` has left. Return whether there is a gradient.

        The step is told if a gradient is sparse, a parameter has changed, or a buffer is refused.

        Args:
            step: the step in hand.
            number: the slice's number.
            module: the replica's module.
            buffers: the module's buffers, as they are now.
            forwards: the number of forwards of the replica in the slice.
        """
        assert self._partial is not None  # a step has begun
        self._before.look()
        grads = self._take_gradients(step, number)
        moved = self._buffers.take(step, number, module, buffers, forwards=forwards)
        self._skip_to(number)
        self._partial.push(number, [*grads, *moved])
        self._next = number + 1
        self._before.stand_in()
        return any(grad is not None for grad in grads)

    def say(self) -> dict[str, object]:
        """Return this rank's record of its slices for the other ranks."""
        return {"cleared": self._before.cleared(), "buffers": self._buffers.marks, "backward": self._has_backward}

    @property
    def has_cleared(self) -> bool:
        """Return whether gradients from before the step were cleared in it."""
        return any(self._before.fates)

    def _take_gradients(self, step: SlicedStep, number: int) -> Leaf:
        moved = self._unmoved.find_moved()
        if moved is not None:
            step.note_mistake(
                f"parameter '{moved}' was changed inside slice {number}, so the slices after it are of other "
                "parameters, and each rank has another number of them: step the optimizer, move averages that "
                "follow the model (a momentum encoder), and rescale embeddings (`layer.max_norm = None`, then "
                "`layer.weight.renorm_(2, 0, max_norm)` under torch.no_grad), after the inner loop"
            )
        grads: Leaf = []
        for param, name in zip(self._params, self._names, strict=True):
            grad, param.grad = param.grad, None
            if grad is not None and grad.layout != torch.strided:
                step.note_mistake(
                    f"parameter '{name}' got a sparse gradient, and slices add up dense ones: make the embedding with "
                    "sparse=False"
                )
                grad = None
            grads.append(None if grad is None else as_summed(grad))
        weight = step.weight(number)
        if weight == 0:
            return [None] * len(grads)
        present = [grad for grad in grads if grad is not None]
        if weight is not None and present:
            _foreach_mul(present, float(weight))
        return grads

    def _skip_to(self, number: int) -> None:
        """Count slices without samples, which no rank goes through."""
        assert self._partial is not None  # a step has begun
        for empty in range(self._next, number):
            self._partial.push(empty, [None] * self._width())
        self._next = number

    def _width(self) -> int:
        return len(self._params) + len(self._buffers.averaged)

    # At the end -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end(self, step: SlicedStep, says: Sequence[dict[str, Any]]) -> None:
        """**Collective.** Add up the ranks' sums, and write the gradients and buffers.

        Args:
            step: the step in hand.
            says: the records that :meth:`say` returned on the ranks that had something to do.

        Raises:
            LockstepError: slices of different ranks have done different things to a buffer; on all ranks.
            NonFiniteGradient: as :meth:`~lockstep.ddp.finite.FiniteCheck.verdict`, on all ranks.
            CollectiveMismatch, CollectiveTimeout, PeerLost: as a backward that averages.
        """
        assert self._partial is not None  # a step has begun
        wrong = unlike(
            [each["buffers"] for each in says], ["slices of one rank"] + ["those of another"] * (len(says) - 1)
        )
        if wrong is not None:
            self.forget()
            raise LockstepError(f"{step.whoami()}: {wrong}")
        for each in says:
            self._before.take_over(each["cleared"])
        self._skip_to(step.cut.runs[self._rank][1])
        try:
            self._finish(step, says, self._partial.sums)
        except BaseException:
            self.forget()
            raise
        self._close()

    def _finish(self, step: SlicedStep, says: Sequence[dict[str, Any]], sums: list[Leaf]) -> None:
        """**Collective.** Do as :meth:`end`, from this rank's sums."""
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
            self._warn_of_none(total, says)
        self._buffers.write(step, total[len(self._params) :], self._group)

    def _is_skipped(self, step: SlicedStep, sums: Sequence[Leaf], *, finite: bool) -> bool:
        assert self._finite is not None  # called only if there is one
        if not finite:
            self._finite.inspect_sums(sums, self._names)
        return self._finite.verdict(flagged=not finite, whoami=lambda: step.whoami())

    def _exchange(self, step: SlicedStep, sums: list[Leaf]) -> tuple[Leaf, bool]:
        """**Collective.** Return the sum of all ranks' sums, divided, and whether the gradients are finite."""
        nodes = step.cut.nodes()
        everyones = [(rank, row) for rank, each in enumerate(nodes) for row in range(len(each))]
        pairs = tuple(additions([node for each in nodes for node in each], step.cut.slices))
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
        """Copy the result into the memory of this rank's own first sum, or into new memory."""
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
        """**Collective** where the layout or the number of rows has changed. Return the layouts of the exchange."""
        originals = [*self._params, *self._buffers.averaged]
        key = (max(count, 1), [(each.shape, each.stride(), each.dtype, each.device) for each in originals])
        if key == self._laid_out_for:
            return self._layouts
        self._layouts.clear()
        tensors = [as_summed(torch.empty_like(each, device="meta")) for each in originals]
        of = [(tensor.dtype, original.device) for tensor, original in zip(tensors, originals, strict=True)]
        for dtype, device in dict.fromkeys(of):
            of_kind = [at for at, kind in enumerate(of) if kind == (dtype, device)]
            grads = [at for at in of_kind if at < len(self._params)]
            buffers = [at for at in of_kind if at >= len(self._params)]
            sizes = [tensors[at].numel() for at in (*grads, *buffers)]
            width = sum(sizes) + len(grads)
            rows = Rows(self._group, width=width, count=max(count, 1), dtype=dtype, device=device)
            offsets = [*accumulate([*sizes[: len(grads)], len(grads), *sizes[len(grads) :]], initial=0)]
            starts = [*offsets[: len(grads)], *offsets[len(grads) + 1 : -1]]
            views = [
                [
                    shaped(row[start : start + size], tensors[at])
                    for start, size, at in zip(starts, sizes, (*grads, *buffers), strict=True)
                ]
                for row in rows.rows
            ]
            flags = [row[offsets[len(grads)] : offsets[len(grads)] + len(grads)] for row in rows.rows]
            self._layouts.append(_Layout(grads, buffers, sizes, rows, views, flags))
        self._laid_out_for = key
        return self._layouts

    def _write_gradients(self, total: Leaf) -> None:
        self._warn_of_stale()
        for index, (param, grad) in enumerate(zip(self._params, total, strict=False)):
            if grad is not None:
                grad = (torch.view_as_complex(grad) if param.is_complex() else grad).to(param.dtype)
            self._before.add(index, grad)
        if self._written is not None:
            grads = [param.grad for param in self._params]
            self._written = [(grad, 0 if grad is None else grad._version) for grad in grads]

    def _warn_of_none(self, total: Leaf, says: Sequence[dict[str, Any]]) -> None:
        """Warn once if backwards have left no gradient, most likely because it was cleared after them."""
        if self._has_said:  # A script that clears them does so from its first step on, so others need not be looked at.
            return
        left = [grad for grad in total[: len(self._params)] if grad is not None]
        if any(bool(grad.any()) for grad in left):
            self._has_said = True
        elif any(each["backward"] for each in says):
            self._has_said = True
            if self._rank == 0:
                callsite.warn(
                    "backwards came through this replica in the slices of a step, but "
                    f"{'all its gradients are zero' if left else 'none of its gradients is left'}: zero_grad() after "
                    "backward() inside the inner loop discards the slice's gradients. Call it after optimizer.step(), "
                    "or before backward()"
                )


def _warn_of_small_slices(module: nn.Module, step: SlicedStep) -> None:
    """Warn before torch's batch norm refuses a slice of one sample, most likely at the end of an epoch."""
    norm = next((name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm1d)), None)
    if norm is None or step.cut.smallest > 1:
        return
    where = "slices" if min(filter(None, step.cut.sizes)) == 1 else "the last batch of an epoch"
    callsite.warn(
        f"{where} will have 1 sample, of which the batch norm '{norm}' can't take statistics: torch raises an error "
        "there, if it gets one value for each channel. Take fewer slices or a larger batch size; for a last batch of "
        "one sample, drop_last=True or another batch size"
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
    flags.fill_(1) if all(present) else flags.copy_(torch.tensor(present, dtype=flags.dtype, device="cpu"))
