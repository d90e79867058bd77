"""A bucket: many parameters' gradients in one flat tensor, with room for what the ranks must know about them.

Note [Bucket layout]
~~~~~~~~~~~~~~~~~~~~
::

    | gradient of parameter 0 | gradient of parameter 1 | ... | used 0 | used 1 | ... | bad 0 | bad 1 | ... |

``used i`` is 1 where this rank has a gradient for parameter i since the last reduction and 0 where it has none;
``bad i`` (only with ``check_finite``) is 1 where that gradient is not finite. They are summed over the ranks together
with the gradients, so that every rank can know which parameters nobody used, and which were bad, without a second
collective. They are read only when the answer matters, because reading them waits for the device. They never exceed
the world size, so that even bfloat16 tells 0 from more than 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep import _torch
from lockstep.comm.memory import InPlaceMemory

#: One call for a whole bucket.
_foreach_copy = _torch.foreach_copy()

#: Below this many elements for each parameter, the cost of a copy is the call and not the memory.
SMALL = 32 * 1024


class Bucket:
    """The flat memory of some parameters' gradients.

    **Collective** to construct if ``memory`` is given: the group's own, which it reduces in place.
    """

    #: All of it, gradients and flags; what is all-reduced. 1-D, the parameters' dtype and device; owned here.
    flat: Tensor
    #: The gradients only. 1-D view of ``flat``.
    values: Tensor
    #: Flag per parameter; see Note [Bucket layout]. 1-D view of ``flat``.
    used: Tensor
    #: Flag per parameter, or empty. 1-D view of ``flat``.
    bad: Tensor
    #: One view of ``values`` per parameter, with its shape and strides.
    views: list[Tensor]

    def __init__(
        self,
        index: int,
        positions: Sequence[int],
        params: Sequence[Parameter],
        *,
        flag_finite: bool = False,
        memory: InPlaceMemory | None = None,
    ) -> None:
        self.index = index
        #: The parameters' positions in the reducer's list.
        self.positions = tuple(positions)
        self.params = list(params)
        sizes = [param.numel() for param in params]
        total, count = sum(sizes), len(params)
        tail = [count, count if flag_finite else 0]
        allocate: Callable[..., Tensor] = torch.zeros if memory is None else memory.allocate_tensor
        self.flat = allocate(total + sum(tail), dtype=params[0].dtype, device=params[0].device)
        self.values, self.used, self.bad = self.flat.split_with_sizes([total, *tail])
        #: All flags. 1-D view of ``flat``.
        self.tail = self.flat[total:]
        self.views = [
            _shaped(part, param) for part, param in zip(self.values.split_with_sizes(sizes), params, strict=True)
        ]
        self._small = total < SMALL * count
        #: Slots that are packed already, before the others have come.
        self.packed: set[int] = set()
        #: What is all-reduced: ``flat``, as real numbers if it is complex, since backends know no others.
        self.message = torch.view_as_real(self.flat) if self.flat.is_complex() else self.flat

    def __len__(self) -> int:
        return len(self.params)

    def pack(self, grads: list[Tensor], scale: Tensor | None) -> None:
        """**Local.** Copy one gradient per parameter into the bucket, multiplied by ``scale`` (0-dim) on the way."""
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
        """**Local.** As :meth:`pack`, with zeros where there is no gradient, and without what is packed already."""
        for slot, grad in enumerate(grads):
            if slot in self.packed:
                continue
            if grad is None:
                self.views[slot].zero_()
            else:
                self._pack_one(slot, grad, scale)

    def pack_early(self, slot: int, scale: Tensor | None, *, as_view: bool) -> None:
        """**Local.** Pack one gradient while it is in the cache, and give its memory back if ``as_view``."""
        param = self.params[slot]
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
        """**Local.** Make every parameter's ``grad`` its view of the bucket."""
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view

    def unpack_by_copy(self) -> None:
        """**Local.** Copy the bucket into every parameter's ``grad``."""
        grads = [param.grad for param in self.params if param.grad is not None]
        if len(grads) == len(self.params):
            _foreach_copy(grads, self.views)
        else:
            for slot in range(len(self.params)):
                self.unpack_one(slot, as_view=False)

    def unpack_one(self, slot: int, *, as_view: bool) -> None:
        """**Local.** Hand one parameter its part of the bucket."""
        param, view = self.params[slot], self.views[slot]
        if as_view:
            param.grad = view
        elif param.grad is None:
            param.grad = view.clone()
        else:
            param.grad.copy_(view)


def _shaped(part: Tensor, param: Parameter) -> Tensor:
    """``part`` (1-D) as a tensor of the parameter's shape, and of its strides where they leave no gaps."""
    if param.is_contiguous() or not _gapless(param):
        return part.view(param.shape)
    return part.as_strided(param.shape, param.stride())


def _gapless(param: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
