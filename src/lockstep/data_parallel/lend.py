"""How gradients find their way from the replicas' copies to the original parameters.

Note [Lent parameters]
~~~~~~~~~~~~~~~~~~~~~~
A forward that records a graph lends the copies to the replicas through one autograd function: its inputs are the
original parameters, its outputs the copies, and its backward adds the replicas' gradients up, in the order of the
replicas. So ``backward``, ``torch.autograd.grad``, hooks on parameters and gradients of gradients mean what they mean
without replicas. The first replica is the original module; its gradients take the ordinary way, and autograd adds the
two, in either order the same.

Note [Backward in threads]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd has a thread for each accelerator, so replicas on accelerators go backward side by side by themselves. On
the CPU it uses the caller's thread alone. There, if the loss is computed on the replicas, each replica but the first
has a graph of its own, cut off from the caller's at both ends. In the caller's graph stand two functions for it:
``Leave`` behind the loss, whose backward starts a thread that runs the replica's graph, and ``Lend`` before the
parameters, whose backward waits for the threads. A ticket, a tensor with nothing to say, runs from one to the other
so that they come in this order; autograd runs what was recorded last first, so that the first replica goes backward in
the caller's thread in between. ``Lend`` waits for the replicas whose tickets came back: a replica's own thread may come
by as well, where a function of the user's calls ``backward`` inside its own, and then brings no ticket.

If the first replica's backward fails, autograd never calls ``Lend``. It drops the tickets' gradients then, and the
memory of each tells of that (:func:`_return_ticket`), so that no thread outlives the call that failed. For that the
tickets must lie with ``Lend`` and not in the queue of what can run, which is left as it is until the next backward. So
``Lend`` waits for one thing more, a bell, which is recorded before the replicas run and so rings after the first one's
backward.

A graph that leads to tensors that were not lent (a parameter that no module has
registered) or that can't be run by ``torch.autograd.grad`` (re-entrant checkpointing) is not cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep import _torch
from lockstep.data_parallel.threads import Task

_keeps_graph = _torch.keeps_graph()


@dataclass
class Loan:
    """What one forward lends, and the backwards of its replicas that are under way.

    Lend's node holds it, so it must not hold what has that node as its ``grad_fn``: no tensor that was lent, no ticket.
    """

    #: For each lent copy: the position of its original among the inputs, and the replica it is lent to.
    origins: list[tuple[int, int]]
    #: Replicas whose graphs may be cut off, in order.
    cut_off: list[int]
    #: Replica -> its backward, started and not yet waited for.
    running: dict[int, Task[tuple[Tensor | None, ...]]] = field(default_factory=dict)
    #: Called when they have ended.
    ended: Callable[[], None] = lambda: None

    def take(self, replica: int) -> Task[tuple[Tensor | None, ...]]:
        """The backward of a replica, which has ended."""
        task = self.running[replica]
        self.end(replica, task)
        return task

    def end(self, replica: int, task: Task[tuple[Tensor | None, ...]]) -> None:
        """Wait for a replica's backward, unless that was done before."""
        if self.running.get(replica) is not task:
            return
        task.wait()
        del self.running[replica]
        if not self.running:
            self.ended()

    def positions(self, replica: int) -> list[int]:
        """Where in ``origins`` the loans to a replica are."""
        return [i for i, (_, to) in enumerate(self.origins) if to == replica]


@dataclass
class Lent:
    """The copies as autograd knows them, in the order of ``loan.origins``."""

    loan: Loan
    tensors: list[Tensor]
    #: Replica -> its ticket.
    tickets: dict[int, Tensor]
    bell: Tensor | None


def lend(loan: Loan, sources: Sequence[Tensor], copies: Sequence[Tensor]) -> Lent:
    """**Local.** Lend ``copies`` of ``sources``."""
    given: tuple[Tensor, ...] = _Lend.apply(loan, copies, *sources)  # type: ignore[no-untyped-call]
    tensors, tickets = list(given[: len(copies)]), given[len(copies) :]
    if not loan.cut_off:
        return Lent(loan, tensors, {}, None)
    return Lent(loan, tensors, dict(zip(loan.cut_off, tickets[:-1], strict=True)), tickets[-1].clone())


class _Lend(torch.autograd.Function):
    @staticmethod
    @_torch.mark_untraced
    def forward(ctx: Any, loan: Loan, copies: Sequence[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.loan, ctx.devices = loan, [source.device for source in sources]
        ctx.set_materialize_grads(False)
        tickets = [torch.zeros(1) for _ in loan.cut_off]
        bell = [torch.zeros(1)] if tickets else []
        return (*(copy.detach() for copy in copies), *tickets, *bell)

    @staticmethod
    @_torch.mark_untraced
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loan: Loan = ctx.loan
        count = len(loan.origins)
        own = list(grads[:count])
        # The bell comes last and says nothing more.
        tickets = zip(loan.cut_off, grads[count:-1], strict=True) if loan.cut_off else ()
        returned = [replica for replica, ticket in tickets if ticket is not None]
        ended = {replica: loan.take(replica) for replica in returned}
        for replica, task in ended.items():
            for position, grad in zip(loan.positions(replica), task.result(), strict=True):
                own[position] = _plus(own[position], grad)
        totals: list[Tensor | None] = [None] * len(ctx.devices)
        for (origin, _), grad in zip(loan.origins, brought(loan.origins, own, ctx.devices), strict=True):
            totals[origin] = _plus(totals[origin], grad)
        return (None, None, *totals)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def brought(
    origins: Sequence[tuple[int, int]], grads: Sequence[Tensor | None], devices: Sequence[torch.device]
) -> list[Tensor | None]:
    """**Local.** The gradients on the devices of the originals; small ones from one device travel in one piece."""
    brought = list(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, ((origin, _), grad) in enumerate(zip(origins, grads, strict=True)):
        if grad is None or grad.device == devices[origin]:
            continue
        if torch.is_grad_enabled() or grad.layout != torch.strided or grad.nbytes >= 2**20:
            brought[i] = grad.to(devices[origin])
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for positions in together.values():
        chosen = [grad for i in positions if (grad := grads[i]) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in chosen]).to(devices[origins[positions[0]][0]])
        parts = flat.split([grad.numel() for grad in chosen])
        for i, part, grad in zip(positions, parts, chosen, strict=True):
            brought[i] = part.view(grad.shape)
    return brought


Backward = Callable[[], tuple[Tensor | None, ...]]
StartBackward = Callable[[int, Backward], Task[tuple[Tensor | None, ...]]]


def leave(lent: Lent, replica: int, loss: Any, start: StartBackward) -> Any:
    """**Local.** The loss of a replica in the caller's graph; its own graph runs backward by ``start``.

    See Note [Backward in threads]; a graph that must not be cut, or has several ends, is left as it is.
    """
    if replica not in lent.tickets or not isinstance(loss, Tensor) or not loss.requires_grad:
        return loss
    tensors = [lent.tensors[i] for i in lent.loan.positions(replica)]
    if not _can_be_cut(loss, tensors):
        return loss
    departure = _Departure(lent.loan, replica, loss, tensors, start)
    return _Leave.apply(departure, lent.tickets[replica], lent.bell)  # type: ignore[no-untyped-call]


@dataclass
class _Departure:
    loan: Loan
    replica: int
    loss: Tensor
    lent: list[Tensor]
    start: StartBackward

    def begin(self, grad: Tensor) -> Tensor:
        """Start the backward of the replica's own graph; what comes back is for its ticket."""
        creates = torch.is_grad_enabled()
        keeps = _keeps_graph()  # (the replica's graph must then live as long as the caller's)

        def run() -> tuple[Tensor | None, ...]:
            return torch.autograd.grad(
                self.loss, self.lent, grad, retain_graph=keeps or creates, create_graph=creates, allow_unused=True
            )

        try:
            task = self.loan.running[self.replica] = self.start(self.replica, run)
        except BaseException:
            if not self.loan.running:
                self.loan.ended()
            raise
        return _return_ticket(self.loan, self.replica, task)


class _TicketMemory(bytearray):
    """Bytes that know when nobody needs them any more."""


def _return_ticket(loan: Loan, replica: int, task: Task[tuple[Tensor | None, ...]]) -> Tensor:
    """The gradient of a ticket. When it goes and Lend has not seen it, backward has failed: wait for the replica."""
    memory = _TicketMemory(torch.float32.itemsize)
    weakref.finalize(memory, loan.end, replica, task).atexit = False
    return torch.frombuffer(memory, dtype=torch.float32)


class _Leave(torch.autograd.Function):
    @staticmethod
    @_torch.mark_untraced
    def forward(ctx: Any, departure: _Departure, *_ticket_and_bell: Tensor) -> Tensor:
        ctx.departure = departure
        ctx.set_materialize_grads(False)
        return departure.loss.detach()

    @staticmethod
    @_torch.mark_untraced
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        return None, ctx.departure.begin(grad), torch.zeros(1)


def _can_be_cut(loss: Tensor, lent: Sequence[Tensor]) -> bool:
    """Whether all of the graph behind ``loss`` leads to ``lent``."""
    ends = {tensor.grad_fn for tensor in lent}
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node = todo.pop()
        if node is None or node in ends:
            continue
        # AccumulateGrad is a leaf that was not lent; CheckpointFunction is torch's re-entrant checkpointing.
        if hasattr(node, "variable") or node.name() == "CheckpointFunctionBackward":
            return False
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return True
