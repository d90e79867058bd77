"""Engines, which move a process group's data. One class of process groups (process_group.py), several engines.

The process group checks what torch's callers pass, makes fingerprints, and issues each collective in its turn
(group.py); then it calls the verbs of its engine. These know nothing of torch's API: they take *flat* tensors,
one-dimensional and contiguous (tensors.py makes them), of one dtype in a call, and a :class:`Reduction` where elements
are combined. Every engine guarantees the following to its group:

- the ranks' fingerprints are compared before a collective ends; a difference is a CollectiveMismatch on all ranks;
- no verb waits longer than the limit that :meth:`Engine.begin` was given for a rank that does not come: that is a
  CollectiveTimeout which names it, and a rank that is gone is a PeerLost;
- after an error the group has ended, on every rank;
- each element's result has the same bits on all ranks, and again when the same ranks combine the same elements.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.comm.group import tensors
from lockstep.comm.group.failures import again
from lockstep.comm.group.reduction import Reduction
from lockstep.comm.group.work import GroupWork
from lockstep.comm.looks import SumLook
from lockstep.comm.memory import RowOrder
from lockstep.errors import LockstepError

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class SharedPart:
    """The same part of one allocation on all ranks."""

    #: The allocation, counted from 0 in the order of the collective calls that made them.
    number: int
    #: Bytes from the allocation's begin.
    offset: int
    #: The other ranks' memory in order of rank (1-d, the dtype that was asked for), and None for this rank's own.
    others: tuple[torch.Tensor | None, ...]
    #: This rank's own memory, which the tensors on it keep alive.
    memory: weakref.ref[Any]

    def views(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' memory, in order of rank."""
        return [mine if other is None else other for other in self.others]


class Engine(ABC):
    """One rank's view of its group, and the verbs. Used by one thread at a time, except for messages and ends."""

    #: torch's name for the backend.
    backend = ""
    #: True if the engine has its own memory, in which an all-reduce copies nothing; see lockstep.comm.memory.
    reduces_in_place = False
    #: Host -> its ranks, if those of a host are combined first; None: results do not depend on the hosts.
    grouping: tuple[tuple[int, ...], ...] | None = None

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    # --- the group -------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, body: bytes, *, timeout: float) -> None:
        """Start the group's next collective; at least one verb follows.

        Args:
            body: from :func:`fingerprint.take`.
            timeout: seconds that another rank may be late.
        """

    @property
    @abstractmethod
    def number(self) -> int:
        """The number of the collective that was begun last, from 1; the same on all ranks."""

    @abstractmethod
    def known(self) -> LockstepError | None:
        """Return the error that has ended the group, if any rank has reported one. It must be cheap: each call asks."""

    @abstractmethod
    def end(self, error: LockstepError) -> LockstepError:
        """End the group with ``error``, on all ranks; returns the error to raise here, the first one there was."""

    @abstractmethod
    def disagree(self, what: str) -> LockstepError:
        """End the group because the ranks' arguments do not fit together; returns what to raise."""

    @abstractmethod
    def close(self, timeout: float) -> None:
        """Complete the messages that were sent, then release everything. To be called once."""

    def is_at_rest(self) -> bool:
        """Return whether no message of this rank is on its way."""
        return True

    def renew(self) -> None:
        """Begin anew where the group has ended, or its ranks have begun different numbers of collectives. Shared memory
        stays shared. See Note [A world begins anew] in comm/renewal.py, which says when this may be called.

        Raises:
            NotImplementedError: the engine can't; a new group is needed.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise the error that has ended the group, if there is one."""
        error = self.known()
        if error is not None:
            raise again(error)

    # --- combined elements -----------------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, flat: torch.Tensor, how: Reduction) -> None:
        """**Collective.** Combine ``flat`` over all ranks, in place. Its dtype is ``how.dtype``."""

    def reduce(self, flat: torch.Tensor, how: Reduction, *, root: int) -> None:
        """**Collective.** Combine ``flat`` over all ranks into that of ``root``; the others keep theirs."""
        total = flat.clone()
        self.all_reduce(total, how)
        if self.rank == root:
            flat.copy_(total)

    @abstractmethod
    def reduce_scatter(self, flat: torch.Tensor, inputs: Tensors, how: Reduction) -> None:
        """**Collective.** Combine every rank's ``inputs[r]`` into the ``flat`` of rank r."""

    # --- elements as they are --------------------------------------------------------------------------------------

    @abstractmethod
    def barrier(self) -> None:
        """**Collective.** Return when every rank has come."""

    @abstractmethod
    def broadcast(self, flat: torch.Tensor, *, root: int) -> None:
        """**Collective.** Give every rank the elements of the root's ``flat``, in place."""

    @abstractmethod
    def gather(
        self, outputs: Tensors, flat: torch.Tensor, *, root: int | None = None, longest: int | None = None
    ) -> None:
        """**Collective.** Put each rank's ``flat`` into ``outputs[rank]``.

        Args:
            outputs: by rank; empty on a rank that receives nothing.
            flat: this rank's elements.
            root: the one rank that receives; None: all do.
            longest: the largest number of elements of any rank, the same number everywhere; None: all have as many.
        """

    @abstractmethod
    def scatter(self, flat: torch.Tensor, inputs: Tensors, *, root: int) -> None:
        """**Collective.** Put the root's ``inputs[rank]`` into each rank's ``flat``; elsewhere ``inputs`` is empty."""

    @abstractmethod
    def all_to_all(self, outputs: Tensors, inputs: Tensors, sizes: Sequence[Sequence[int]]) -> None:
        """**Collective.** Put each rank's ``inputs[r]`` into ``outputs[rank]`` of rank r.

        Args:
            outputs: by the rank that it comes from.
            inputs: by the rank that it goes to.
            sizes: elements that rank s sends to rank r, as ``sizes[s][r]``: from :meth:`agreed_sizes`.
        """

    # --- messages --------------------------------------------------------------------------------------------------

    @abstractmethod
    def send(self, tensor: torch.Tensor, *, to: int, tag: int, timeout: float) -> GroupWork:
        """Begin to send ``tensor``, which must not change until the work is complete."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, *, source: int | None, tag: int, timeout: float) -> GroupWork:
        """Begin to receive into ``tensor``, from ``source`` or (None) the rank that sends first."""

    # --- what an engine may do better than this --------------------------------------------------------------------

    def all_reduce_tensor(self, tensor: torch.Tensor, how: Reduction, part: SharedPart | None) -> None:  # noqa: ARG002
        """**Collective.** Combine a caller's tensor over all ranks, in place.

        Args:
            tensor: dense, as the caller has it.
            how: how to combine.
            part: what :meth:`find` said of it.
        """
        flat = tensors.target(tensor)
        self.all_reduce(flat if flat.dtype is how.dtype else flat.view(how.dtype), how)
        tensors.restore(tensor, flat)

    def find(self, tensor: torch.Tensor) -> SharedPart | None:  # noqa: ARG002  (an engine without memory has no parts)
        """Return the part of the engine's own memory that ``tensor`` is; None if it lies elsewhere."""
        return None

    def allocate(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """**Collective.** Make a 1-d tensor of ``count`` zeros, in memory that the engine reduces in place.

        Raises:
            RuntimeError: the engine has no such memory.
        """
        raise RuntimeError(f'allocate_tensor: the backend "{self.backend}" has no memory for {count} x {dtype}')

    def in_place_sum(
        self, tensor: torch.Tensor, how: Reduction, part: SharedPart, look: SumLook | None
    ) -> Callable[[Engine], None]:
        """Return a function that adds up ``tensor`` once its turn has come; see
        :class:`~lockstep.comm.memory.InPlaceMemory`."""
        raise NotImplementedError  # an engine that finds no part is not asked

    def add_rows(self, rows: torch.Tensor, order: RowOrder, part: SharedPart) -> None:
        """**Collective.** See :class:`~lockstep.comm.memory.InPlaceMemory`.

        Args:
            rows: memory that :meth:`allocate` made.
            order: what is added to what.
            part: what :meth:`find` said of it.
        """
        raise NotImplementedError

    # --- made of the verbs -----------------------------------------------------------------------------------------

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """**Collective.** Return a few whole numbers of every rank, by rank, which uneven data needs to be moved."""
        mine = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        outputs = [torch.empty_like(mine) for _ in range(self.size)]
        self.gather(outputs, mine)
        return [output.tolist() for output in outputs]

    def agreed_sizes(self, outputs: Tensors, inputs: Tensors) -> list[list[int]]:
        """**Collective.** Return how many elements rank s sends to rank r, as ``sizes[s][r]``, for :meth:`all_to_all`.

        Raises:
            CollectiveMismatch: some rank sends another size than its receiver expects; on every rank.
        """
        size = self.size
        numbers = self.gather_numbers([t.numel() for t in inputs] + [t.numel() for t in outputs])
        sent, expected = [n[:size] for n in numbers], [n[size:] for n in numbers]
        for source in range(size):
            for target in range(size):
                if sent[source][target] != expected[target][source]:
                    raise self.disagree(
                        f"rank {source} sends {sent[source][target]} elements to rank {target}, "
                        f"which expects {expected[target][source]} from it"
                    )
        return sent

    def all_reduce_sparse(self, tensor: torch.Tensor) -> torch.Tensor:
        """**Collective.** Return the sum over ranks of a coalesced COO tensor, as a new coalesced tensor.

        Every rank's indices and values are gathered; ranks may hold different numbers of them. Every rank adds the same
        entries in the same order, so all end with the same bits.
        """
        indices, values = tensor.indices(), tensor.values()
        counts = [numbers[0] for numbers in self.gather_numbers([values.shape[0]])]
        all_indices = [indices.new_empty(indices.shape[0], count) for count in counts]
        all_values = [values.new_empty(count, *values.shape[1:]) for count in counts]
        for outputs, mine in ((all_indices, indices), (all_values, values)):
            flats = [each.view(-1) for each in outputs]
            self.gather(flats, mine.contiguous().view(-1), longest=max(each.numel() for each in flats))
        total = torch.sparse_coo_tensor(
            torch.cat(all_indices, dim=1),
            torch.cat(all_values),
            tensor.shape,
            is_coalesced=False,
            check_invariants=False,
        )
        return total.coalesce()
