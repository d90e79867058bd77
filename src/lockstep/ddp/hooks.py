"""Autograd's events, turned into those of a replica: its forwards, and when their backwards begin and end.

Note [When a backward begins and ends]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A hook on the tensors that ``forward`` returned fires when a backward reaches the module, before any of its parameters
has a gradient. It begins a backward of ours and asks autograd to call back when the whole backward has ended. So

- a rank takes part even if none of its parameters gets a gradient;
- a nested backward (re-entrant checkpointing) does not end it: the callback belongs to the outer one;
- a second backward through the same graph is a backward of its own;
- forward keeps no state: an exception between forward and backward has nothing to clean up;
- ``torch.autograd.grad``, which accumulates nothing, is told apart and sends nothing.

If forward returned no tensor that can be found (nor do we search for ever in large Python structures), or the gradients
do not come through its outputs (another method of the module was called, or the loss has a term of the parameters
alone), the first gradient begins it: when it has come or, where that has happened before, when it is about to (Note
[Unannounced gradients] in ``accumulated.py``). Then, under re-entrant checkpointing, ours ends with the nested
backward, and there may be several: right, but slower. (A rank none of whose parameters gets a gradient from such a
backward does not take part in it, and the others wait for it.)

If a backward ends with an error, autograd drops the callback without calling it. We hold it weakly and see it die, so
the next backward starts from a clean state. Its death proves an error only because nothing else drops it: compiled
autograd does, after backwards that went well, and has no other way to report their end. So a replica must refuse a
backward that it runs, before it is given a callback; a test checks on every version of torch that this is still so.

Note [Left-out backwards]
~~~~~~~~~~~~~~~~~~~~~~~~~
A rank that skips one backward (``if loss.isnan(): continue``) has its next one averaged with the others' present one,
and so on until the end, where the others wait for one that never comes. Until then the number of backwards is the same
on all ranks, and the number of forwards may rightly differ: a recurrent cell is called as often as a sequence is long.
What differs is the number of forwards since the last averaged backward that no backward has come through. So it is sent
with every average, and if it differs all ranks raise: in the label, before any data moves, over a backend that compares
labels, otherwise in flags that are summed with the gradients (on an accelerator they are read a backward later).

Only forwards for training count: in training mode, with gradients, outside ``no_sync`` and ``join``, with an output
through which a backward can come. ``torch.autograd.grad`` through it counts as a backward. A forward that failed does
not count, since a rank may try it again.

And forwards may rightly have no backward: those of an agent that plays without ``torch.no_grad``, or the second forward
of a step whose batch has no targets for it. So a rank reports only forwards that look like a whole step without its
backward, with a whole step after it: the forwards left out come before all others, and both kinds are at least as many
as belonged to some earlier backward. A rank that leaves other forwards out, or any before its first averaged backward,
has the habit, and reports none from then on.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter

from lockstep import _torch
from lockstep.errors import LockstepError
from lockstep.step.share import BatchId, Items

_queue_callback = _torch.queue_callback()
_will_execute = _torch.will_execute()

#: Most parts of an output's containers that are searched for tensors; at most a quarter of them in one container.
MOST_PARTS = 5_000
#: Types that hold no tensors that a backward comes through.
_LEAVES = (str, bytes, int, float, complex, type, torch.nn.Module)


class Forward(NamedTuple):
    """The state at a forward, for the backward that comes through it."""

    #: True if its backward averages: the forward was not inside no_sync.
    sync: bool
    #: The weight of this rank's batch; see Note [Exact mean].
    weight: float
    #: True if buffers go to all ranks at the end of its backward.
    sends_buffers: bool
    #: Divisor of the sum of gradients; None: the world size.
    divisor: int | None = None
    #: The forward's number if a backward is to come through it, else 0; see Note [Left-out backwards].
    number: int = 0
    #: The items counted for its batch; see Note [Counted items].
    items: Items | None = None
    #: The slice that it was in: the key of its step, then its number.
    slice: tuple[int, ...] | None = None
    #: The batch that it is of; see Note [Batches compared].
    batch: BatchId | None = None


class BackwardListener(Protocol):
    """Is told of a module's backwards; all but the last method are called inside of one."""

    @property
    def is_in_backward(self) -> bool:
        """Return whether a backward has begun and not ended."""
        ...

    def gradient_unannounced(self, *, has_come: bool) -> None:
        """Handle a gradient of a backward that has not begun: it passes none of forward's outputs.

        Args:
            has_come: whether it is in ``grad`` already; see Note [Unannounced gradients] in ``accumulated.py``.
        """
        ...

    def parameters_unreached(self) -> None:
        """Handle a backward that has reached an output of forward and will reach none of the parameters."""
        ...

    def backward_begins(self, forward: Forward) -> None:
        """Begin the backward of ``forward``."""
        ...

    def backward_joins(self, forward: Forward) -> None:
        """Take ``forward`` into the backward that is under way."""
        ...

    def backward_ends(self) -> None:
        """End the backward: all its gradients have come."""
        ...

    def backward_dies(self) -> None:
        """Forget a backward that ended with an error, some time ago."""
        ...


class Reached(Protocol):
    """Is told when a backward has reached a forward's output."""

    def reached(self) -> None:
        """Note that a backward has reached the output."""
        ...


@dataclass
class Forwards:
    """The forwards of one replica that a backward is to come through; see Note [Left-out backwards]."""

    #: The number of the next forward.
    next: int = 1
    #: Numbers of the forwards for training that no backward has come through.
    _waiting: set[int] = field(default_factory=set)
    #: Numbers of all forwards for training since the last averaged backward, in order.
    _expected: list[int] = field(default_factory=list)
    #: Least number of forwards for training that came with an averaged backward; None before the first.
    _fewest: int | None = None
    #: True if forwards were left out that did not make up a whole step.
    _has_habit: bool = False

    def expect(self, number: int) -> None:
        """Note that a backward is to come through forward ``number``."""
        self.next = number + 1
        self._waiting.add(number)
        self._expected.append(number)

    def reached(self, number: int) -> None:
        """Note that a backward has come through forward ``number``."""
        self._waiting.discard(number)

    def settle(self) -> int:
        """End an averaged backward; return the number of forwards without a backward since the last one, to report."""
        left_out, expected = len(self._waiting), len(self._expected)
        if left_out and not self._is_whole_step(left_out):
            self._has_habit = True
        if expected:
            self._fewest = expected if self._fewest is None else min(self._fewest, expected)
        self._waiting.clear()
        self._expected.clear()
        return 0 if self._has_habit else left_out

    def _is_whole_step(self, left_out: int) -> bool:
        """Return whether the forwards left out look like an earlier step; see Note [Left-out backwards]."""
        return (
            self._fewest is not None
            and self._fewest <= left_out <= len(self._expected) - self._fewest
            and self._waiting.issubset(self._expected[:left_out])
        )


class BackwardWatch:
    """Tells a replica of its backwards; see Note [When a backward begins and ends]."""

    def __init__(self, listener: BackwardListener, params: Sequence[Parameter]) -> None:
        self._listener = listener
        self.turn_to(params)
        #: The forwards that are still to be followed by a backward.
        self.forwards = Forwards()
        self._callback: weakref.ref[partial[None]] | None = None
        self._lock = threading.Lock()
        self._has_ended = False

    def turn_to(self, params: Sequence[Parameter]) -> None:
        """Watch ``params`` from now on, in backwards through earlier forwards too."""
        # The order is reversed: the last parameters are likeliest to be reached, and the first hit ends the search.
        self._nodes = [get_gradient_edge(param).node for param in reversed(params)]

    def watch(self, output: Any, forward: Forward, stand_ins: Reached | None = None, *, expects: bool = False) -> None:
        """Look out for a backward through ``output``.

        Args:
            output: what forward returned.
            forward: the state at that forward.
            stand_ins: the leaves that it used instead of parameters.
            expects: whether such a backward is to come.
        """
        on_output = partial(self.reach, forward, stand_ins)
        watched = False
        for tensor in (output,) if isinstance(output, Tensor) else tensors_in(output):
            # A leaf (forward returned a parameter or its input) would keep the hook for ever.
            if tensor.grad_fn is not None:
                tensor.register_hook(on_output)
                watched = True
        if watched and expects:
            self.forwards.expect(forward.number)

    @_torch.mark_untraced
    def reach(self, forward: Forward, stand_ins: Reached | None, gradient: object = None) -> None:
        """Note that a backward has reached an output of ``forward``: called by autograd."""
        del gradient
        if self._listener.is_in_backward or accumulates(self._nodes):
            self.open(forward)
        else:
            self.forwards.reached(forward.number)
            self._listener.parameters_unreached()  # torch.autograd.grad, or the module has other parameters by now
        if stand_ins is not None:
            stand_ins.reached()

    def open(self, forward: Forward) -> None:
        """Begin a backward, or join the one that is under way; called inside a backward."""
        self.forwards.reached(forward.number)
        if self._has_ended:
            raise LockstepError(
                "this backward goes through a forward of a replica that was released since, or whose "
                "DistributedDataParallel is gone, so its gradients would stay on this rank: keep it until its last "
                "backward has ended"
            )
        with self._lock:
            if self._listener.is_in_backward:
                self._listener.backward_joins(forward)
                return
            self._listener.backward_begins(forward)
            callback = partial(self._ended)  # a new object, which nothing else holds
            self._callback = weakref.ref(callback, self._on_dead_callback)
            _queue_callback(callback)

    def accumulates(self) -> bool:
        """Return whether the backward under way accumulates into a parameter."""
        return accumulates(self._nodes)

    def end(self) -> None:
        """Stop watching; a backward that comes through an earlier forward raises."""
        self._has_ended = True

    def close(self) -> None:
        """Drop the parameters."""
        self._nodes.clear()

    @_torch.mark_untraced
    def _on_dead_callback(self, callback: weakref.ref[partial[None]]) -> None:
        if callback is self._callback and self._listener.is_in_backward:
            self._listener.backward_dies()

    @_torch.mark_untraced
    def _ended(self) -> None:
        self._callback = None  # it was called, so its death now means nothing
        self._listener.backward_ends()


def accumulates(nodes: Sequence[Node]) -> bool:
    """Return whether the backward under way accumulates into a leaf of ``nodes``, unlike torch.autograd.grad."""
    try:
        return any(map(_will_execute, nodes))
    except RuntimeError:  # raised for a leaf whose gradient torch.autograd.grad returns
        return False


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module returned: in mappings, sequences, sets, dataclasses and plain objects.

    Containers are looked at level by level, and no more than :data:`MOST_PARTS` parts of them, so that an output with a
    large Python structure in it costs milliseconds. A backward that comes through none of the tensors found begins with
    the first gradient; see Note [When a backward begins and ends].
    """
    if isinstance(output, Tensor):
        yield output
        return
    level, left = [output], MOST_PARTS
    seen: dict[int, Any] = {}  # it holds the objects, since the id of a dead object is given to another
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
