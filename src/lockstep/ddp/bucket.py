"""A bucket: many parameters' gradients in one flat tensor, with room for what the ranks must know about them.

Note [Bucket layout]
~~~~~~~~~~~~~~~~~~~~
::

    | gradient of parameter 0 | 1 | ... | used 0 | used 1 | ... | flags of one rider | of another | ...

``used i`` is 1 where this rank has a gradient for parameter i since the last reduction and 0 where it has none. It is
summed over the ranks together with the gradients, so that every rank can know which parameters no rank used, without a
second collective. So are the flags of what else the ranks tell each other in a backward, most of it in the last bucket:
see ``rider.py``. Flags are read only when the answer matters, because reading them waits for the device. A rank sets
them to 0 or 1, so that even in bfloat16 their sums tell 0 from more than 0.

Note [Gradients held elsewhere]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A gradient that is a view of its bucket lies in memory that the next step writes to. Who keeps it (``[p.grad for p in
params]``, a slice or a NumPy array of it) and then lets the parameters have new gradients must find it as it was, as in
one process. So when a backward begins, a bucket looks whether a gradient that is no parameter's any more has another
owner: the references to its views say so for each, and the owners of its storage for aliases, of whose place nothing is
known. (What is a parameter's still is accumulated into, and changes for everybody, as in one process.) If so,

- what is held is put aside while the sums are made in its place, and put back afterwards, and those parameters get a
  copy of their average;
- but where much of a bucket is held that lies in memory of its own (memory that the ranks share can't be changed by one
  rank alone), it takes new memory and leaves the old to its holder. That makes all its views anew, which costs more
  than to copy one gradient that a loop's variable holds still.
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

#: One call for a whole bucket.
_foreach_copy = _torch.foreach_copy()
_owners_of_tensor = _torch.tensor_use_count()

#: Below this many elements for each parameter, the cost of a copy is the call and not the memory.
SMALL = 32 * 1024
#: Held elements are put aside if they are less than one in so many; see Note [Gradients held elsewhere].
_FEW = 8


@dataclass(frozen=True)
class ParameterSpec:
    """What the plan needs to know of one parameter."""

    #: Elements.
    numel: int
    #: Bytes of one element.
    element_size: int
    #: Parameters with equal kinds may share a bucket: (dtype, device).
    kind: Hashable

    @classmethod
    def of(cls, param: Tensor) -> ParameterSpec:
        """Return what the plan needs to know of ``param``."""
        return cls(param.numel(), param.element_size(), (param.dtype, param.device))

    @property
    def nbytes(self) -> int:
        return self.numel * self.element_size


def plan_buckets(specs: Sequence[ParameterSpec], *, caps: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut the parameters into buckets, in the order in which the buckets are to be reduced.

    Gradients come roughly in the reverse of the order in which parameters were registered, so buckets are filled from
    the last parameter to the first. Each holds one dtype on one device, and is closed as soon as it holds its cap, so
    it exceeds the cap by less than its last parameter.

    Args:
        specs: the parameters.
        caps: bytes that the first bucket of each kind may hold (few, so that communication starts early), the second,
            and so on; the last of them is for all that follow.

    Returns:
        Indices into ``specs``, each exactly once. Buckets are ordered by their last member to arrive: the plan depends
        on nothing but its arguments, hence it is the same on every rank.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    made: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in reversed(range(len(specs))):
        kind = specs[index].kind
        open_buckets.setdefault(kind, []).append(index)
        filled[kind] = filled.get(kind, 0) + specs[index].nbytes
        if filled[kind] >= caps[min(made.get(kind, 0), len(caps) - 1)]:
            closed.append(open_buckets.pop(kind))
            filled[kind], made[kind] = 0, made.get(kind, 0) + 1
    closed.extend(open_buckets.values())
    # A bucket is complete when its lowest index has arrived.
    return [tuple(bucket) for bucket in sorted(closed, key=min, reverse=True)]


class Bucket:
    """The flat memory of some parameters' gradients.

    **Collective** to construct if ``memory`` is given: the group's own, which it reduces in place.

    Args:
        index: its place in the order in which buckets are reduced; ``is_last``: no other follows.
        positions: of the parameters in the reducer's list.
        params: the parameters.
        widths: how many flags each rider has in it.
        memory: where it is to lie; None: in this process's own.
        looks: have such memory looked at while it is added up.
    """

    #: All of it, gradients and flags; what is all-reduced. 1-D, the parameters' dtype and device; owned here.
    flat: Tensor
    #: The gradients only. 1-D view of ``flat``.
    values: Tensor
    #: Flag per parameter; see Note [Bucket layout]. 1-D view of ``flat``.
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
        real = 2 if params[0].is_complex() else 1
        #: Where each parameter's gradient ends in ``message``.
        self.ends = [end * real for end in accumulate(self._sizes)]
        total, count = sum(self._sizes), len(params)
        self._parts = [total, count, *widths]
        self._small = total < SMALL * count
        #: Of the backward under way: positions of the parameters whose gradient has come, in order; more than once if
        #: it came in portions. Always the same list.
        self.arrived: list[int] = []
        #: How many had come when the bucket was issued.
        self.counted = 0
        #: Slots that are packed already, before the others have come.
        self.packed: set[int] = set()
        #: Slots for which this rank has no gradient, once it is issued.
        self.missing: list[int] = []
        #: What waits for it, if it was sent, and what then returns a comm hook's result.
        self.wait: Callable[[], object] | None = None
        self.result: Callable[[], object] | None = None
        #: What others hold and find again when the backward has ended, by slot; see Note [Gradients held elsewhere].
        self._put_aside: dict[int, Tensor] = {}
        allocate: Callable[..., Tensor] = torch.zeros if memory is None else memory.allocate_tensor
        self._lay_out(allocate(sum(self._parts), dtype=params[0].dtype, device=params[0].device))
        #: What looks at the sum while it is made.
        self.look = SumLook(self.ends) if looks and memory is not None else None
        #: **Collective.** Adds it up over all ranks, at once, if it lies in the group's own memory.
        self.sum_up = None if memory is None else memory.in_place_sum(self.message, self.look)
        self._count_owners()

    def _lay_out(self, flat: Tensor) -> None:
        self.flat = flat
        parts = flat.split_with_sizes(self._parts)
        self.values, self.used, *self.flags = parts
        #: All flags. 1-D view of ``flat``.
        self.tail = flat[self._parts[0] :]
        self.views = [
            shaped(part, param)
            for part, param in zip(self.values.split_with_sizes(self._sizes), self.params, strict=True)
        ]
        #: What is all-reduced: ``flat``, as real numbers if it is complex, since backends know no others.
        self.message = torch.view_as_real(flat) if flat.is_complex() else flat
        _, used, *others = self._parts
        #: What ``tail`` is at first.
        self._fresh_flags = torch.tensor([1] * used + [0] * sum(others), dtype=flat.dtype).to(flat.device)
        self._storage = flat.untyped_storage()
        self._owners = _torch.storage_use_count(self._storage)

    def _count_owners(self) -> None:
        """Count while only the bucket holds anything of it."""
        self._owners_alone = self._owners()
        self._references_alone, self._references_of_one = _references_to(self.views), _references_to(self.views[:1])

    def begin(self) -> None:
        """Begin a backward."""
        self.counted, self.missing, self.result = 0, [], None
        self.packed.clear()

    def find_missing(self, pending: set[int]) -> list[int]:
        """Return the slots without a gradient; see Note [Unused parameters].

        Args:
            pending: positions of parameters that got one in unsynchronised backwards before this one.
        """
        present = set(self.arrived)
        if len(present) == len(self.params):
            return []
        return [
            slot
            for slot, position in enumerate(self.positions)
            if position not in present and (position not in pending or self.params[slot].grad is None)
        ]

    def leave_to_holders(self) -> None:
        """Begin a backward: let what others hold of the last one stay as it is."""
        held = self._held()
        if not held:
            return
        with torch.no_grad():
            if self.sum_up is not None or _FEW * sum(self._sizes[slot] for slot in held) < self._parts[0]:
                self._put_aside = {slot: self.views[slot].clone() for slot in held}
            else:
                self._lay_out(torch.empty_like(self.flat))
                self._count_owners()

    def reset_flags(self) -> None:
        """Begin anew: all parameters are used, and riders have said nothing."""
        self.tail.copy_(self._fresh_flags)

    def put_back(self) -> None:
        """End a backward: restore what others hold."""
        if not self._put_aside:
            return  # (to switch gradients off takes longer than to look)
        with torch.no_grad():
            for slot, values in self._put_aside.items():
                self.views[slot].copy_(values)
        self._put_aside.clear()

    def leave(self) -> None:
        """Replace every gradient that is a view of the bucket by a separate tensor."""
        for param, view in zip(self.params, self.views, strict=True):
            if param.grad is view:
                param.grad = view.clone()

    def _held(self) -> list[int]:
        """Return the slots whose view is no parameter's gradient, but may be held by somebody else."""
        aliased = self._owners() > self._owners_alone
        if not aliased and _references_to(self.views) == self._references_alone:
            return []
        pairs = zip(self.params, self.views, strict=True)
        loose = [slot for slot, (param, view) in enumerate(pairs) if param.grad is not view]
        if aliased:
            return loose
        return [slot for slot in loose if _references_to(self.views[slot : slot + 1]) > self._references_of_one]

    def __len__(self) -> int:
        return len(self.params)

    def pack(self, grads: list[Tensor], scale: Tensor | None) -> None:
        """Copy one gradient per parameter into the bucket, multiplied by ``scale`` (0-dim) on the way."""
        views = self.views
        if grads[0] is views[0] and all(grad is view for grad, view in zip(grads, views, strict=True)):
            if scale is not None:
                self.values.mul_(scale)
        elif self._small:
            _foreach_copy(views, grads)
            if scale is not None:
                self.values.mul_(scale)
        elif scale is not None:
            for grad, view in zip(grads, views, strict=True):
                torch.mul(grad, scale, out=view)
        else:
            _foreach_copy(views, grads)

    def pack_some(self, grads: Sequence[Tensor | None], scale: Tensor | None) -> None:
        """Do as :meth:`pack`, with zeros where there is no gradient, and without what is packed already."""
        for slot, grad in enumerate(grads):
            if slot in self.packed:
                continue
            if grad is None:
                self.views[slot].zero_()
            else:
                self._pack_one(slot, grad, scale)

    def pack_early(self, slot: int, scale: Tensor | None, *, as_view: bool) -> None:
        """Pack one gradient while it is in the cache, and give its memory back if ``as_view``."""
        param = self.params[slot]
        if slot in self._put_aside:
            return  # until backward has ended, hooks of the user may read it
        if param.grad is not None and param.grad.layout == torch.strided:
            self._pack_one(slot, param.grad, scale)
            self.packed.add(slot)
            if as_view:
                param.grad = self.views[slot]

    def _pack_one(self, slot: int, grad: Tensor, scale: Tensor | None) -> None:
        if scale is not None:
            torch.mul(grad, scale, out=self.views[slot])
        else:
            self.views[slot].copy_(grad)

    def unpack_as_views(self) -> None:
        """Make every parameter's ``grad`` its view of the bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view
        for slot in self._put_aside:
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
        if as_view and slot not in self._put_aside:
            param.grad = view
        elif as_view or param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)


def _references_to(views: Sequence[Tensor]) -> int:
    """Count references from Python, and from C++ (which Python counts as one, or not at all, as torch's version has
    it)."""
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
