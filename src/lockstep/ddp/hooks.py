"""Autograd's events, turned into the reducer's.

Note [When a backward begins and ends]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook on the tensors that ``forward`` returned fires when a backward reaches the module, before any of its parameters
has a gradient. It opens the cycle and asks autograd to call back when the whole backward has ended. So

- a rank takes part even if none of its parameters gets a gradient;
- a nested backward (re-entrant checkpointing) does not end the cycle: the callback belongs to the outer one;
- a second backward through the same graph is a cycle of its own;
- forward leaves nothing behind: an exception between forward and backward has nothing to clean up;
- ``torch.autograd.grad``, which accumulates nothing, is told apart and sends nothing.

If forward returned no tensor that can be found (nor do we search for ever in large Python structures), or the gradients
do not come through its outputs (another method of the module was called, or the loss has a term of the parameters
alone), the first gradient opens the cycle. Then, under re-entrant checkpointing, the cycle ends with the nested
backward, and there may be several: right, but slower. (Only a rank none of whose parameters gets a gradient from such a
backward does not take part in it, and the others wait for it.)

If a backward ends with an error, autograd drops the callback without calling it. We hold it weakly and see it die, so
the next backward starts from a clean state. Its death proves an error only because nothing else drops it: compiled
autograd does, after backwards that went well, and has no other way to tell of their end. So ``begin`` must refuse a
backward that it runs, before it is given a callback; a test asks every version of torch whether that is still so.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn import Parameter

from lockstep import _torch
from lockstep.ddp.parameters import StandIns, accumulates
from lockstep.errors import LockstepError

_queue_callback = _torch.queue_callback()

#: Parts of an output's containers that are searched for tensors, a quarter of them at most in one container.
MOST_PARTS = 5_000
#: What has no tensors in it that a backward comes through.
_LEAVES = (str, bytes, int, float, complex, type, torch.nn.Module)


class _Forward(Protocol):
    """What a forward knew, for the backward that comes through it."""

    def reached(self) -> None: ...


Context = TypeVar("Context", bound=_Forward)


class _Cycle(Protocol):
    """What :class:`BackwardWatch` drives."""

    @property
    def is_open(self) -> bool: ...


class BackwardWatch(Generic[Context]):
    """Tells when a backward begins and ends; see Note [When a backward begins and ends]."""

    def __init__(
        self,
        cycle: _Cycle,
        params: Sequence[Parameter],
        *,
        begin: Callable[[Context], None],
        join_in: Callable[[Context], None],
        end: Callable[[], None],
        abandon: Callable[[], None],
        unreached: Callable[[], None],
    ) -> None:
        self._begin, self._join_in, self._end, self._abandon = begin, join_in, end, abandon
        self._unreached = unreached
        self.turn_to(cycle, params)
        self._callback: weakref.ref[_EndOfBackward] | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    def turn_to(self, cycle: _Cycle, params: Sequence[Parameter]) -> None:
        """**Local.** Drive ``cycle`` from now on, in backwards through earlier forwards too, for ``params``."""
        self._cycle = cycle
        # Reversed: the last parameters are the likeliest to be reached, and the first one that is ends the search.
        self._nodes = [get_gradient_edge(param).node for param in reversed(params)]

    def watch(self, output: Any, context: Context, stand_ins: StandIns | None = None) -> bool:
        """**Local.** Look out for a backward through ``output``.

        Args:
            output: what forward returned.
            context: what its forward knew.
            stand_ins: what this forward used instead of parameters.

        Returns:
            Whether there is anything in ``output`` through which one can come.
        """
        on_output = _OnOutput(self, context, stand_ins)
        watched = False
        for tensor in tensors_in(output):
            # A leaf (forward returned a parameter or its input) would keep the hook for ever.
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output)
                watched = True
        return watched

    def reach(self, context: Context, stand_ins: StandIns | None) -> None:
        """**Local.** A backward has reached an output of the forward that knew ``context``."""
        context.reached()
        if self._cycle.is_open or accumulates(self._nodes):
            self.open(context)
        else:
            self._unreached()  # torch.autograd.grad, or the module has other parameters by now
        if stand_ins is not None:
            stand_ins.reached()

    def open(self, context: Context) -> None:
        """**Local.** Open a cycle, or join the one that is open; called inside a backward."""
        context.reached()
        if self._has_ended:
            raise LockstepError(
                "this backward goes through a forward of a replica that was released since, or whose "
                "DistributedDataParallel is gone, so its gradients would stay on this rank: keep it until its last "
                "backward has ended"
            )
        with self._lock:
            if self._cycle.is_open:
                self._join_in(context)
                return
            self._begin(context)
            callback = _EndOfBackward(self._end)
            self._callback = weakref.ref(callback, self._on_dead_callback)
            _queue_callback(callback)

    def end(self) -> None:
        """**Local.** Watch no more; a backward that comes through an earlier forward raises."""
        self._has_ended = True

    def close(self) -> None:
        """**Local.** Let go of the parameters."""
        self._nodes.clear()

    @_torch.mark_untraced
    def _on_dead_callback(self, callback: weakref.ref[_EndOfBackward]) -> None:
        if callback is self._callback and self._cycle.is_open:
            self._abandon()


class _OnOutput(Generic[Context]):
    """What autograd calls when a backward has reached an output."""

    def __init__(self, watch: BackwardWatch[Context], context: Context, stand_ins: StandIns | None) -> None:
        self._watch, self._context, self._stand_ins = watch, context, stand_ins

    @_torch.mark_untraced
    def __call__(self, _: Tensor) -> None:
        self._watch.reach(self._context, self._stand_ins)


class _EndOfBackward:
    """What autograd calls when a backward has ended. An object of its own, so that it can be held weakly."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    @_torch.mark_untraced
    def __call__(self) -> None:
        self._end()


def tensors_in(output: Any) -> Iterator[Tensor]:
    """**Local.** The tensors in what a module returned: in mappings, sequences, sets, dataclasses and plain objects.

    Containers are looked at level by level, and no more than :data:`MOST_PARTS` parts of them, so that an output with a
    large Python structure in it costs milliseconds. A backward that comes through none of the tensors found begins with
    the first gradient; see Note [When a backward begins and ends].
    """
    if isinstance(output, Tensor):
        yield output
        return
    level, left = [output], MOST_PARTS
    seen: dict[int, Any] = {}  # holding them, since the id of an object that is gone is given to another
    while level:
        following: list[Any] = []
        for value in level:
            if isinstance(value, Tensor):
                yield value
            elif not isinstance(value, _LEAVES) and value is not None and id(value) not in seen:
                seen[id(value)] = value
                parts = list(islice(_parts(value), min(left, MOST_PARTS // 4)))
                left -= len(parts)
                following += parts
        level = following


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, AbstractSet)):
        return value
    if dataclasses.is_dataclass(value):
        return (getattr(value, field.name, None) for field in dataclasses.fields(value))
    return getattr(value, "__dict__", {}).values()
