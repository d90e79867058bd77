"""A bucket: the gradients of many parameters in one flat tensor, with flags that tell the ranks about them.

Note [Bucket layout]
~~~~~~~~~~~~~~~~~~~~
::

    | gradient of parameter 0 | 1 | ... | used 0 | used 1 | ... | flags of one rider | of another | ...

``used i`` is 1 where this rank has a gradient for parameter i since the last reduction and 0 where it has none. It is
summed over the ranks together with the gradients, so that every rank can know which parameters no rank used, without a
second collective. So are the flags of the riders, most of them in the last bucket: see ``rider.py``. Flags are read
only when the answer matters, because reading them waits for the device. A rank sets them to 0, 1 or NaN, so that even
in bfloat16 their sums tell 0 from more than 0.

On an accelerator each gradient begins at a multiple of ``ALIGNMENT`` bytes, since the kernels of optimizers read
several elements at once only from there. The gaps hold zeros: they are set once, and neither a sum nor a factor changes
them. What a comm hook leaves there is removed.

Note [Gradients held elsewhere]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gradient that is a view of its bucket lies in memory that the next step writes to. A script that keeps it (``[p.grad
for p in params]``, a slice or a NumPy array of it) and then lets the parameters have new gradients must find it as it
was, as in one process. So when a backward begins, a bucket checks whether a gradient that no parameter has any more has
another owner: the reference counts of its views tell for each of them, and the owners of its storage for aliases, whose
place is unknown. (A gradient that a parameter still has is accumulated into, and changes for all its holders, as in one
process.) If it has,

- the held values are put aside while the sums are made in their place, and put back afterwards, and those parameters
  get a copy of their average;
- but if much of a bucket is held and the bucket lies in private memory (memory that the ranks share can't be replaced
  by one rank alone), the bucket takes new memory and leaves the old to the holder. That remakes all its views, which
  costs more than copying one gradient that a loop variable still holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.comm.looks import SumLook
from lockstep.comm.memory import InPlaceMemory

#: Copy, multiply or zero all gradients of a bucket in one call.
_foreach_copy, _foreach_mul, _foreach_zero = _torch.foreach_copy(), _torch.foreach_mul(), _torch.foreach_zero()
_owners_of_tensor = _torch.tensor_use_count()

#: Mean number of elements per parameter below which the cost of a copy is the call and not the memory.
SMALL = 32 * 1024
#: Bytes to a multiple of which gradients on an accelerator are laid out; see Note [Bucket layout].
ALIGNMENT = 128
#: Held elements are put aside if they are fewer than 1 in ``_FEW``; see Note [Gradients held elsewhere].
_FEW = 8


@dataclass(frozen=True)
class ParameterSpec:
    """The size and kind of one parameter, for the plan."""

    numel: int
    #: Bytes of one element.
    element_size: int
    #: (dtype, device); parameters of equal kinds may share a bucket.
    kind: Hashable

    @classmethod
    def of(cls, param: Tensor) -> ParameterSpec:
        """Return the spec of ``param``."""
        return cls(param.numel(), param.element_size(), (param.dtype, param.device))

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size


def plan_buckets(
    specs: Sequence[ParameterSpec], *, caps: Sequence[int], order: Sequence[int] | None = None
) -> list[tuple[int, ...]]:
    """Cut the parameters into buckets, in the order in which the buckets are to be reduced.

    Gradients come roughly in the reverse of the order in which parameters were registered, so buckets are filled from
    the last parameter to the first, unless another order was learned (Note [Order of gradients]). Each holds one dtype
    on one device, and is closed as soon as it holds its cap, so it exceeds the cap by less than its last parameter.

    Args:
        specs: the parameters.
        caps: bytes that the first bucket of each kind may hold (few, so that communication starts early), the second,
            and so on; the last of them is for all that follow.
        order: indices into ``specs``, each once, in the order in which the gradients come; None: from the last.

    Returns:
        Indices into ``specs``, each exactly once. Buckets are ordered by their last member to arrive. The plan depends
        on its arguments only, so it is the same on every rank.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    made: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    order = range(len(specs) - 1, -1, -1) if order is None else order
    for index in order:
        kind = specs[index].kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + specs[index].nbytes
        if filled[kind] >= caps[min(made.get(kind, 0), len(caps) - 1)]:
            closed.append(open_buckets.pop(kind))
            filled[kind], made[kind] = 0, made.get(kind, 0) + 1
    closed.extend(open_buckets.values())
    # A bucket, which is filled in this order, is complete when its last member has arrived.
    place = {index: at for at, index in enumerate(order)}
    return [tuple(bucket) for bucket in sorted(closed, key=lambda bucket: place[bucket[-1]])]


class BucketTurn:
    """What has come and been sent of one bucket in the backward under way.

    Args:
        positions: the parameters' positions in the reducer's list.
        params: the parameters.
    """

    def __init__(self, positions: Sequence[int], params: Sequence[Parameter]) -> None:
        self._positions, self._params = positions, params
        #: Positions of the parameters whose gradient has come, in order; a position is repeated if its gradient came in
        #: portions. Always the same list.
        self.arrived: list[int] = []
        #: Number of gradients that are to come; see Note [Absent gradients].
        self.expected = len(params)
        #: Length of ``arrived`` when the bucket was issued.
        self.counted = 0
        #: Slots that were packed before all gradients of the bucket had come.
        self.packed: set[int] = set()
        #: Slots for which this rank has no gradient; known once the bucket is issued.
        self.missing: list[int] = []
        #: Waits for the reduction under way, None if there is none; ``result`` then returns a comm hook's result.
        self.wait: Callable[[], object] | None = None
        self.result: Callable[[], object] | None = None

    def begin(self) -> None:
        """Begin a backward."""
        self.counted, self.missing, self.result, self.expected = 0, [], None, len(self._params)
        self.packed.clear()

    def issue(self, pending: set[int]) -> list[int]:
        """Note that the bucket is issued with what has come; return the slots without a gradient. See Note [Unused
        parameters].

        Args:
            pending: positions of parameters that got a gradient in unsynchronised backwards before this one.
        """
        self.counted, present = len(self.arrived), set(self.arrived)
        if len(present) == len(self._params):
            self.missing = []
            return self.missing
        self.missing = [
            slot
            for slot, position in enumerate(self._positions)
            if position not in present and (position not in pending or self._params[slot].grad is None)
        ]
        return self.missing

    def is_complete(self, absent: set[int]) -> bool:
        """Return whether all gradients have come but for those at the positions ``absent``."""
        return absent.issuperset(set(self._positions).difference(self.arrived))

    def in_portions(self) -> bool:
        """Return whether the gradient of a parameter has come in portions."""
        return len(set(self.arrived)) < len(self.arrived)

    def find_late(self, *, is_issued: bool) -> list[int]:
        """Return the positions whose gradient changed after it was sent or packed; see Note [More than one event]."""
        arrived = self.arrived
        late = arrived[self.counted :] if is_issued else []
        if self.packed and self.in_portions():
            packed = sorted(self._positions[slot] for slot in self.packed)
            late += [position for position in packed if arrived.count(position) > 1]
        return late


class HeldGradients:
    """The gradients in a bucket's memory that others hold as well; see Note [Gradients held elsewhere].

    Made while nothing but the bucket holds that memory.

    Args:
        params: the parameters.
        views: the bucket's own list of views, one for each parameter.
    """

    def __init__(self, params: Sequence[Parameter], views: list[Tensor]) -> None:
        self._params, self._views = params, views
        #: Slot -> values that others hold, to put back when the backward ends.
        self.aside: dict[int, Tensor] = {}
        self._storage = views[0].untyped_storage()
        self._owners = _torch.storage_use_count(self._storage)
        self._owners_alone = self._owners()
        self._references_alone, self._references_of_one = _references_to(views), _references_to(views[:1])

    def find(self) -> list[int]:
        """Return the slots whose view is not the parameter's gradient, but may be held elsewhere."""
        aliased = self._owners() > self._owners_alone
        if not aliased and _references_to(self._views) == self._references_alone:
            return []
        # (No iterator over the views outlives this line: it may hold one of them, which then counts as held.)
        loose = [slot for slot, param in enumerate(self._params) if param.grad is not self._views[slot]]
        if aliased:
            return loose
        return [slot for slot in loose if _references_to(self._views[slot : slot + 1]) > self._references_of_one]

    def put_aside(self, slots: Sequence[int]) -> None:
        """Keep the values of some slots until :meth:`put_back`."""
        self.aside = {slot: self._views[slot].clone() for slot in slots}

    def put_back(self) -> None:
        """End a backward: restore the values that others hold."""
        if not self.aside:
            return  # entering no_grad takes longer than this check
        with torch.no_grad():
            for slot, values in self.aside.items():
                self._views[slot].copy_(values)
        self.aside.clear()


class Bucket:
    """The flat memory of some parameters' gradients.

    **Collective** to construct if ``memory`` is given: the group's own, which it reduces in place.

    Args:
        index: the bucket's place in the order in which buckets are reduced; ``is_last``: no other follows.
        positions: the parameters' positions in the reducer's list.
        params: the parameters.
        widths: the number of flags of each rider.
        memory: the memory to allocate the bucket in; None: this process's own.
        looks: whether sums in such memory are looked at while they are made.
    """

    #: The whole bucket, gradients and flags. 1-D, of the parameters' dtype and device; owned here.
    flat: Tensor
    #: The gradients. 1-D view of ``flat``.
    values: Tensor
    #: One flag per parameter; see Note [Bucket layout]. 1-D view of ``flat``.
    used: Tensor
    #: The flags of each rider. 1-D views of ``flat``.
    flags: list[Tensor]
    #: One view of ``values`` per parameter, with its shape and strides.
    views: list[Tensor]

    def __init__(
        self,
        index: int,
        positions: Sequence[int],
        params: Sequence[Parameter],
        *,
        widths: Sequence[int] = (),
        is_last: bool = False,
        memory: InPlaceMemory | None = None,
        looks: bool = False,
    ) -> None:
        self.index, self.is_last = index, is_last
        #: The parameters' positions in the reducer's list.
        self.positions = tuple(positions)
        self.params = list(params)
        self._sizes = [param.numel() for param in params]
        is_on_cpu, real = params[0].device.type == "cpu", 2 if params[0].is_complex() else 1
        unit = 1 if is_on_cpu else ALIGNMENT // params[0].element_size()
        #: Elements from the beginning of each parameter's gradient to that of the next.
        self._slots = [-(-size // unit) * unit for size in self._sizes]
        #: End of each parameter's gradient in ``message``.
        self.ends = [end * real for end in accumulate(self._slots)]
        total, count = sum(self._slots), len(params)
        #: Number of elements of all gradients; ``has_gaps``: ``values`` holds more than these.
        self.numel = sum(self._sizes)
        self.has_gaps = self.numel < total
        self._parts = [total, count, *widths, -(count + sum(widths)) % unit]
        #: True if all gradients are copied by one call: they are small, or each call launches a kernel.
        self._at_once = not is_on_cpu or total < SMALL * count
        #: What has come and been sent in the backward under way.
        self.turn = BucketTurn(self.positions, self.params)
        allocate: Callable[..., Tensor] = torch.zeros if memory is None else memory.allocate_tensor
        self._lay_out(allocate(sum(self._parts), dtype=params[0].dtype, device=params[0].device))
        #: Looks at the sum while it is made; None if the bucket is not in the group's memory, or not looked at.
        self.look = SumLook(self.ends) if looks and memory is not None else None
        #: **Collective.** Sums the bucket over all ranks in place, blocking; None if it is not in the group's memory.
        self.sum_up = None if memory is None else memory.in_place_sum(self.message, self.look)
        #: The gradients that others hold as well.
        self.held = HeldGradients(self.params, self.views)

    def _lay_out(self, flat: Tensor) -> None:
        self.flat = flat
        parts = flat.split_with_sizes(self._parts)
        self.values, self.used, *self.flags, _ = parts
        #: All flags. 1-D view of ``flat``.
        self.tail = flat[self._parts[0] :]
        self.views = [shaped(part, param) for part, param in zip(self.split(self.values), self.params, strict=True)]
        #: The tensor that is all-reduced: ``flat``, viewed as real numbers if it is complex, as backends require.
        self.message = torch.view_as_real(flat) if flat.is_complex() else flat
        _, used, *others = self._parts
        #: The initial values of ``tail``: all parameters are used, and no rider has set a flag.
        self.fresh_flags = torch.tensor([1] * used + [0] * sum(others), dtype=flat.dtype, device="cpu").to(flat.device)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return each parameter's part (1-D) of a tensor that is laid out as :attr:`values` is, without the gaps."""
        pairs = zip(values.split_with_sizes(self._slots), self._sizes, strict=True)
        return [part if len(part) == size else part[:size] for part, size in pairs]

    def clear_gaps(self) -> None:
        """Make what lies between the gradients zero, after a comm hook has written there."""
        pairs = zip(self.values.split_with_sizes(self._slots), self._sizes, strict=True)
        _foreach_zero([part[size:] for part, size in pairs if len(part) > size])

    def leave_to_holders(self) -> None:
        """Begin a backward: let gradients of the last one that others hold stay as they are."""
        slots = self.held.find()
        if not slots:
            return
        with torch.no_grad():
            if self.sum_up is not None or _FEW * sum(self._sizes[slot] for slot in slots) < self._parts[0]:
                self.held.put_aside(slots)
            else:
                self._lay_out(torch.zeros_like(self.flat) if self.has_gaps else torch.empty_like(self.flat))
                self.held = HeldGradients(self.params, self.views)

    def mark_unused(self, slots: Sequence[int]) -> None:
        """Say in the flags that this rank has no gradient for these slots.

        By runs of neighbours: a list of indices would be copied to the device, which would be waited for.
        """
        ordered = sorted(slots)
        start = ordered[0]
        for slot, after in zip(ordered, [*ordered[1:], -1], strict=True):
            if after != slot + 1:
                self.used[start : slot + 1].zero_()
                start = after

    def leave(self) -> None:
        """Replace every gradient that is a view of the bucket by a separate tensor."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def __len__(self) -> int:
        return len(self.params)

    def pack(self, grads: list[Tensor], scale: Tensor | None) -> None:
        """Copy one gradient per parameter into the bucket, multiplied by ``scale`` (0-dim) on the way."""
        views = self.views
        if grads[0] is views[0] and all(grad is view for grad, view in zip(grads, views, strict=True)):
            if scale is not None:
                self.values.mul_(scale)
        elif self._at_once:
            _foreach_copy(views, grads)
            if scale is not None:
                self.values.mul_(scale)
        elif scale is not None:
            for grad, view in zip(grads, views, strict=True):
                torch.mul(grad, scale, out=view)
        else:
            _foreach_copy(views, grads)

    def pack_some(self, grads: Sequence[Tensor | None], scale: Tensor | None) -> None:
        """Do as :meth:`pack`, with zeros for missing gradients, and without the slots that are packed already."""
        left = [(slot, grad) for slot, grad in enumerate(grads) if slot not in self.turn.packed]
        absent = [self.views[slot] for slot, grad in left if grad is None]
        present = [(slot, grad) for slot, grad in left if grad is not None]
        if absent:
            _foreach_zero(absent)
        if self._at_once and present:
            views = [self.views[slot] for slot, _ in present]
            _foreach_copy(views, [grad for _, grad in present])
            if scale is not None:
                _foreach_mul(views, scale)
        else:
            for slot, grad in present:
                self._pack_one(slot, grad, scale)

    def pack_early(self, slot: int, scale: Tensor | None, *, as_view: bool) -> None:
        """Pack one gradient while it is in the cache, and give its memory back if ``as_view``."""
        param = self.params[slot]
        if slot in self.held.aside:
            return  # until backward has ended, hooks of the user may read it
        if param.grad is not None and param.grad.layout == torch.strided:
            self._pack_one(slot, param.grad, scale)
            self.turn.packed.add(slot)
            if as_view:
                param.grad = self.views[slot]

    def adopt(self, slot: int) -> None:
        """Move one gradient into the bucket, as it is: autograd adds there what still comes of it."""
        param, view = self.params[slot], self.views[slot]
        grad = param.grad
        if grad is not None and grad is not view and grad.layout == torch.strided and slot not in self.held.aside:
            view.copy_(grad)
            param.grad = view

    def _pack_one(self, slot: int, grad: Tensor, scale: Tensor | None) -> None:
        if scale is not None:
            torch.mul(grad, scale, out=self.views[slot])
        else:
            self.views[slot].copy_(grad)

    def unpack_as_views(self) -> None:
        """Make every parameter's ``grad`` its view of the bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view
        for slot in self.held.aside:
            self.params[slot].grad = self.views[slot].clone()

    def unpack_by_copy(self) -> None:
        """Copy the bucket into every parameter's ``grad``."""
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) == len(self.params):
            _foreach_copy(grads, self.views)
        else:
            for slot in range(len(self.params)):
                self.unpack_one(slot, as_view=False)

    def unpack_one(self, slot: int, *, as_view: bool) -> None:
        """Hand one parameter its part of the bucket."""
        param, view = self.params[slot], self.views[slot]
        if as_view and slot not in self.held.aside:
            param.grad = view
        elif as_view or param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)


def _references_to(views: Sequence[Tensor]) -> int:
    """Count references from Python and from C++ (Python counts the latter as one or none, depending on torch)."""
    return sum(map(sys.getrefcount, views)) + sum(map(_owners_of_tensor, views))


def shaped(part: Tensor, param: Tensor) -> Tensor:
    """Return ``part`` (1-D) as a tensor of the parameter's shape, and of its strides where they leave no gaps."""
    if param.is_contiguous() or not gapless(param):
        return part.view(param.shape)
    return part.as_strided(param.shape, param.stride())


def gapless(param: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
