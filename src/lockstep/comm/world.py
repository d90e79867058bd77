"""World: this process's place in the job, its device, and the small collectives a training script needs."""

from __future__ import annotations

import json
import operator
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from lockstep import _torch, callsite
from lockstep.comm import waiting
from lockstep.comm.calls import calling, of_all_ranks, refuse_apart
from lockstep.comm.exchange import all_gather_records, all_gather_tensors, broadcast_tensor, carrier, group_device
from lockstep.comm.in_order.gathering import Per, gather_in_order
from lockstep.comm.labels import compares_labels
from lockstep.comm.peers import OverGroup
from lockstep.comm.together import together
from lockstep.comm.waiting import wait_for
from lockstep.errors import LockstepError, named
from lockstep.identity import Identity
from lockstep.job import flight
from lockstep.job.flight import expect_slow
from lockstep.step import slicing
from lockstep.step.share import MOST_ITEMS, BatchesInHand, BatchShare, Items

ReduceOp = Literal["sum", "mean", "min", "max"]
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

Reducible = TypeVar("Reducible", int, float, torch.Tensor)


class World:
    """All the ranks of a job, seen from one of them. Made by :func:`lockstep.init`."""

    def __init__(
        self, identity: Identity, *, device: torch.device, group: dist.ProcessGroup, seed: int, timeout: float
    ) -> None:
        self._identity = identity
        #: The device this rank trains on: its own GPU, or the CPU.
        self.device = device
        self._group: dist.ProcessGroup | None = group
        #: The seed of the job, the same on every rank.
        self.seed = seed
        #: Seconds a collective may wait.
        self.timeout = timeout
        #: The batches that sharded loaders have handed out; see Note [Batches in hand].
        self._in_hand = BatchesInHand(rank=identity.rank, world_size=identity.world_size)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of all ranks.

        Raises:
            LockstepError: the world was left, by ``lockstep.shutdown()``.
        """
        if self._group is None:
            raise LockstepError(f"rank {self.rank} of {self.world_size}: lockstep.shutdown() has closed this world")
        return self._group

    def _release(self) -> None:
        """Let go of the process group, for :func:`lockstep.shutdown`.

        A script's own ``world`` variable lives until the interpreter is torn down, and the group must end before that:
        its threads can't end once Python is gone.
        """
        self._group = None

    def _move_to(self, group: dist.ProcessGroup) -> None:
        """Take another process group of the same ranks, since the one before has ended."""
        self._group = group

    @property
    def share(self) -> BatchShare | None:
        """This rank's share of the global batch in hand, set by the sharded loader; see Note [Exact mean].

        Set it if the mean is not over samples and :meth:`weigh` can't express it either (class weights). The share then
        holds for all backwards and means until the loader hands out its next batch, or outside of a loader's loop until
        you set it again. docs/weights.md shows how. After :meth:`weigh` its ``global_samples`` is NaN: not known yet.
        """
        return self._in_hand.share

    @share.setter
    def share(self, share: BatchShare | None) -> None:
        self._in_hand.say(share)

    def weigh(self, items: int) -> None:
        """Say before ``backward()`` that this rank's loss is the mean over ``items`` items: tokens, say.

        The gradients that :func:`lockstep.replicate` averages are then those of the mean over all items of all ranks:
        one small all-reduce at the beginning of the averaging backward adds up the ranks' counts. Backwards inside
        :func:`lockstep.no_sync` are weighed in the same way, and all accumulated ones make one mean: let each loss be
        the mean over its own items. Every rank must call this, or none. docs/weights.md shows how.

        The count holds for ``World.mean`` and ``lockstep.Log`` as well, until the sharded loader hands out its next
        batch, or outside of a loader's loop until you give another one.

        Args:
            items: 0 or more. 0: this rank's gradients are discarded, whatever they are (the mean over nothing is NaN).
                If all ranks pass 0, the backward ends with an error on all of them.

        Raises:
            TypeError: it is not a whole number.
            ValueError: it is less than 0, or 2**48 or more.
        """
        other = "; for other weights there is world.share = lockstep.BatchShare(here, everywhere)"
        count = self._checked("weigh", items, "items", more=other)
        step = slicing.current
        if step is not None:
            step.weigh(count)
        self._in_hand.say(Items(count))

    def count_tokens(self, tokens: int) -> None:
        """Count the tokens of this rank's batch, for the tokens per second of the summary and of ``lockstep runs``.

        You decide what a token is: with padding or without, inputs or targets. lockstep can't know that, so it reports
        tokens only if you call this: once for each batch that a rank trains on, or with accumulation or slices once
        for each piece, anywhere before the optimizer's step. The counts up to that step are added up. The call does
        not influence the training, costs no collective, and is independent of :meth:`weigh`.

        Args:
            tokens: 0 or more, of this rank.

        Raises:
            TypeError: it is not a whole number.
            ValueError: it is less than 0, or 2**48 or more.
        """
        flight.current.tokens += self._checked("count_tokens", tokens, "tokens")

    @property
    def rank(self) -> int:
        """This process's number among all: 0 to ``world_size - 1``."""
        return self._identity.rank

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self._identity.world_size

    @property
    def local_rank(self) -> int:
        """This process's number among those on its machine, from 0."""
        return self._identity.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of the job's processes on this machine."""
        return self._identity.local_world_size

    @property
    def node_rank(self) -> int:
        """This machine's number among those of the job, from 0."""
        return self._identity.node_rank

    def _checked(self, call: str, given: Any, what: str, *, more: str = "") -> int:
        """Return a number of items that the script has given, and refuse what is none."""
        where = f"rank {self.rank} of {self.world_size}: world.{call}"
        if isinstance(given, bool) or not hasattr(given, "__index__"):
            raise TypeError(f"{where}({given!r}): expected a whole number of {what}{more}")
        count = operator.index(given)
        if not 0 <= count < MOST_ITEMS:
            raise ValueError(f"{where}({count}): expected 0 or more, and less than 2**48")
        return count

    @property
    def hosts(self) -> list[list[int]] | None:
        """The ranks of each machine, if the process group adds up each machine's ranks first; otherwise None.

        The bits of a sum depend on it: a run repeats bit for bit only if the same ranks share a machine.
        """
        hosts = getattr(self.group, "hosts", None)
        return None if hosts is None else [list(ranks) for ranks in hosts]

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def launched(self) -> bool:
        """True if a launcher started this process, False if it runs alone."""
        return self._identity.launched

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, world_size={self.world_size}, device={str(self.device)!r})"

    def print(self, *values: object, **options: Any) -> None:
        """**Rank 0.** Call ``print``, flushed so that lines keep their order in a log; do nothing on other ranks."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    @_torch.mark_untraced
    @of_all_ranks("World.barrier()")
    def barrier(self, *, timeout: float | None = None) -> None:
        """**Collective.** Wait until every rank has arrived.

        Args:
            timeout: seconds to wait; the world's timeout if None.

        Raises:
            CollectiveTimeout: a rank did not arrive in time. The message names the missing ranks: over shm on
                every rank, over gloo on rank 0.
            PeerLost: a rank is gone; named by the ranks that name a missing one.
        """
        limit = timedelta(seconds=self.timeout if timeout is None else timeout)
        ours = compares_labels(self.group, torch.device("cpu"))  # errors of lockstep's own backends name the ranks

        def meet() -> None:
            if "cpu:gloo" in dist.get_backend_config(self.group).split(","):
                waiting.meet_over_gloo(self.group, limit)
            elif ours:
                options = dist.BarrierOptions()
                options.timeout, options.asyncOp = limit, False
                self.group.barrier(options)
            else:
                index = group_device(self.group).index
                work = dist.barrier(self.group, async_op=True, device_ids=None if index is None else [index])
                if work is not None:
                    work.wait(limit)

        name = None if ours else "World.barrier()"
        wait_for(meet, lambda: f"rank {self.rank} of {self.world_size}: World.barrier()", name=name)

    @_torch.mark_untraced
    @of_all_ranks("World.all_reduce()")
    def all_reduce(self, value: Reducible, op: ReduceOp = "sum") -> Reducible:
        """**Collective.** Combine a number, or a tensor of numbers, over all ranks.

        Args:
            value: an int, a float, or a tensor of any shape (the same shape, dtype and kind of device on every rank).
                It is not changed. Floats are combined in float64. A tensor on a GPU stays there, and this rank does
                not wait for it.
            op: ``"sum"``, ``"mean"`` (over ranks: for a mean over samples use :meth:`mean`), ``"min"`` or ``"max"``.

        Returns:
            The same type as ``value``; for a tensor a new one on the same device. The mean of ints is a float.

        Raises:
            ValueError: ``op`` is none of these.
            TypeError: ``value`` is not a number or a tensor.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        if op not in _REDUCE_OPS:
            raise ValueError(f"op={op!r}: expected one of {', '.join(map(repr, _REDUCE_OPS))}")
        if isinstance(value, torch.Tensor):
            # (As it is indexed: backends go by memory, and some take no strides.)
            dense = value.detach().resolve_conj().resolve_neg()
            total = dense.to(carrier(value.device.type, self.group), copy=True, memory_format=torch.contiguous_format)
        elif isinstance(value, (int, float)):
            dtype = torch.float64 if isinstance(value, float) or op == "mean" else torch.int64
            total = torch.tensor(value, dtype=dtype, device=group_device(self.group))
        else:
            raise TypeError(f"all_reduce takes an int, a float or a tensor, not {type(value).__name__}")
        if op == "mean" and not (total.is_floating_point() or total.is_complex()):
            total = total.to(torch.float64)
        self._all_reduce(total, _REDUCE_OPS[op], "all_reduce")
        if op == "mean":
            total /= self.world_size
        if isinstance(value, torch.Tensor):
            return total.to(value.device)
        return total.item()  # type: ignore[return-value]

    @_torch.mark_untraced
    @of_all_ranks("World.any()")
    def any(self, flag: bool | torch.Tensor) -> bool:
        """**Collective.** Return whether ``flag`` is true on some rank, for example to leave a loop together.

        Args:
            flag: a bool, or a tensor of dtype bool with one element.

        Returns:
            The same on every rank.

        Raises:
            TypeError: it is neither.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        return self._agreed(flag, dist.ReduceOp.MAX, "any")

    @_torch.mark_untraced
    @of_all_ranks("World.all()")
    def all(self, flag: bool | torch.Tensor) -> bool:
        """**Collective.** Return whether ``flag`` is true on every rank.

        Args:
            flag: as for :meth:`any`.

        Returns:
            The same on every rank.

        Raises:
            TypeError: it is neither a bool nor a tensor of dtype bool with one element.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        return self._agreed(flag, dist.ReduceOp.MIN, "all")

    def _agreed(self, flag: Any, op: Any, name: str) -> bool:
        """**Collective.** Combine one flag of each rank."""
        is_tensor = isinstance(flag, torch.Tensor)
        is_flag = flag.dtype == torch.bool and flag.numel() == 1 if is_tensor else isinstance(flag, (bool, np.bool_))
        if not is_flag:  # a number would count as true where a comparison was forgotten
            given = f"a tensor of {flag.dtype} and shape {tuple(flag.shape)}" if is_tensor else repr(flag)
            raise TypeError(
                f"rank {self.rank} of {self.world_size}: world.{name}() was given {given}: expected a bool, or a "
                "tensor of dtype bool with one element; pass a comparison, as in loss > limit"
            )
        total = torch.tensor(int(flag), dtype=torch.int64, device=group_device(self.group))
        self._all_reduce(total, op, name)
        return bool(total.item())

    @_torch.mark_untraced
    @of_all_ranks("World.mean()")
    def mean(self, value: float | torch.Tensor, *, samples: int | None = None) -> Any:
        """**Collective.** Return the mean over all samples of all ranks, of numbers that are means on each rank.

        Args:
            value: this rank's mean (a loss, an accuracy): a number or a tensor with one element. Or a tensor of any
                other shape (accuracies by class, a gradient), the same on all ranks, as its kind of device is: each
                element is averaged.
            samples: the number of samples that ``value`` is the mean of. If None: this rank's share of the batch in
                hand, which the sharded loader handed out last (if a loop reads ahead, which the model was given
                last), or 1 if no batch is in hand. After the end of a loop none is: a warning says so if the ranks'
                shares of the loop's last batch differ.

        A rank with no samples does not count, whatever its value (the mean over nothing is NaN).

        Returns:
            A float for a number or one element. Else a new tensor, without gradients, on the same device and of the
            same shape and dtype (float64 for whole numbers). Sums are made in float64 (complex128).

        Raises:
            ValueError: ``samples`` is negative, or no rank has any sample.
            LockstepError: ``samples`` is None and several sharded loaders' batches are in hand, with different shares.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        if samples is None:
            self._in_hand.refuse_contested("World.mean() without samples=")
        count = samples if samples is not None else 1 if self.share is None else self.share.local_samples
        if count < 0:
            raise ValueError(f"samples={count}: expected 0 or more")
        mean = self._mean(value, count)
        if samples is None and self.share is None:  # no rank waits any more, should the warning be an error
            self._warn_after_a_loop()
        return mean

    def _mean(self, value: float | torch.Tensor, count: float) -> Any:
        """**Collective.** Do as :meth:`mean` for a value that counts as ``count`` samples."""
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            return self._mean_of_elements(value.detach(), float(count))
        own = float(value.detach() if isinstance(value, torch.Tensor) else value)
        number = own * count if count else 0.0
        sums = torch.tensor([number, float(count)], dtype=torch.float64, device=group_device(self.group))
        self._all_reduce(sums, dist.ReduceOp.SUM, "mean")
        total, samples_in_all = sums.tolist()
        _refuse_no_samples(samples_in_all)
        return float(total / samples_in_all)

    def _warn_after_a_loop(self) -> None:
        """Warn, on rank 0, that the loop is over whose last batch this mean is likely of."""
        over, self._in_hand.over = self._in_hand.over, None
        if self.rank == 0 and over is not None and not over.is_even(self.world_size):
            callsite.warn(
                "World.mean() after the end of the loop counts every rank once, but their shares of its last batch "
                f"differ (rank 0 had {over.words()}), so a mean of that batch is not exact, and NaN if a rank had no "
                "sample. Call it in the loop, or say how many samples the value is a mean of: world.mean(value, "
                "samples=…); samples=1 if each rank's value is to count once"
            )

    def _mean_of_elements(self, value: torch.Tensor, count: float) -> torch.Tensor:
        """**Collective.** Do as :meth:`mean` for each element."""
        dense = value.to_dense() if value.layout != torch.strided else value
        sums = torch.zeros(
            dense.numel() + 1,
            dtype=torch.complex128 if dense.is_complex() else torch.float64,
            device=carrier(dense.device.type, self.group),
        )
        if count:
            sums[:-1] = dense.reshape(-1)
            sums *= count
        sums[-1] = count
        self._all_reduce(torch.view_as_real(sums) if sums.is_complex() else sums, dist.ReduceOp.SUM, "mean")
        samples = float(sums[-1].real)
        _refuse_no_samples(samples)
        mean = (sums[:-1] / samples).view(dense.shape).to(value.device)
        return mean.to(value.dtype) if value.is_floating_point() or value.is_complex() else mean

    def _all_reduce(self, total: torch.Tensor, op: Any, name: str) -> None:
        wait_for(
            lambda: dist.all_reduce(total, op=op, group=self.group),
            lambda: f"rank {self.rank} of {self.world_size}: World.{name}()",
            name=f"World.{name}()",
        )

    @_torch.mark_untraced
    @of_all_ranks("World.gather()")
    def gather(self, value: Any) -> list[Any]:
        """**Collective.** Return every rank's ``value``, in order of rank, on every rank.

        Args:
            value: a dense tensor of any shape, dtype and device, which may differ from rank to rank; or what JSON can
                hold: None, a bool, a number, a str, or lists and dicts of them (a tuple arrives as a list, and a dict's
                keys as strings). For other objects there is ``torch.distributed.all_gather_object``, which pickles.

        Returns:
            One entry for each rank, also this one's own, equal on all ranks. Tensors are new ones on the device of this
            rank, without gradients.

        Raises:
            TypeError: JSON can't hold some rank's value, or its tensor is sparse; on every rank.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        values = self._shared(value, "World.gather()", range(self.world_size))
        places = {place for kind, place in values if kind == "tensor"}
        if not places:
            return [plain for _, plain in values]
        mine = value if isinstance(value, torch.Tensor) else None
        tensors = all_gather_tensors(mine, self.group, device=self._carrier(places))
        return [
            plain if tensor is None else tensor.to(self.device)
            for (_, plain), tensor in zip(values, tensors, strict=True)
        ]

    @_torch.mark_untraced
    @of_all_ranks("World.broadcast()")
    def broadcast(self, value: Any = None, *, source: int = 0) -> Any:
        """**Collective.** Return the ``value`` of rank ``source`` on every rank; what the others pass does not matter.

        Args:
            value: as for :meth:`gather`.
            source: the rank that has it.

        Raises:
            ValueError: there is no rank ``source``.
            TypeError: JSON can't hold its value, or its tensor is sparse; on every rank.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        if not 0 <= source < self.world_size:
            raise ValueError(f"source={source}: expected a rank, 0 to {self.world_size - 1}")
        kind, plain = self._shared(value, "World.broadcast()", [source])[source]
        if kind == "plain":
            return plain
        mine = value if self.rank == source else None
        return broadcast_tensor(mine, source, self.group, device=self._carrier({plain})).to(self.device)

    def _carrier(self, places: Collection[str]) -> torch.device:
        """Return the device on which tensors travel that lie on these kinds of device; the same kind on every rank."""
        first, *others = places
        return group_device(self.group) if others else carrier(first, self.group)

    @_torch.mark_untraced
    @of_all_ranks("World.gather_in_order()")
    def gather_in_order(
        self, outputs: Sequence[Any], source: Any, *, per: Per | None = None, path: str | Path | None = None
    ) -> Any:
        """**Collective.** Return on rank 0 the outputs of all ranks, in the order of the data set.

        ::

            loader = lockstep.shard(DataLoader(data, batch_size=64))
            outputs = [model(images) for images, _ in loader]     # one for each batch
            predictions = world.gather_in_order(outputs, loader)  # on rank 0: row i is of sample i; elsewhere None

        Each sample has one row, whatever the number of ranks: nothing was padded, so nothing is cut off. Rows are in
        the order of their samples' indices, also after a shuffled pass. With a sampler they are in ascending order
        of the indices that it drew, those of a sample drawn twice next to each other; with a stream in the order in
        which they came.

        Args:
            outputs: a list with one output for each batch that the loop was given, also where a batch has no samples.
                An output is a tensor or a NumPy array with one row for each sample of the batch, a list of plain values
                with one for each (texts, say), or dicts, tuples, lists and dataclasses of these. Rows have the same
                shape in all outputs of all ranks. For a :func:`lockstep.split`: one output for each item.
            source: the loader from :func:`lockstep.shard` whose last pass these are the outputs of, or the
                :func:`lockstep.split`, or a plain DataLoader over that.
            per: ``"sample"``: there is one output for each sample of a loader instead, all in one list, for outputs
                that differ in shape (boxes in images). Outputs of single samples are tensors, arrays, and what JSON can
                hold, in lists and dicts (a tuple becomes a list).
            path: a file that rank 0 writes, for outputs that are larger than its memory: ``.npy`` for one tensor, which
                ``numpy.load(path, mmap_mode="r")`` maps, or ``.safetensors`` for several, named by their keys
                (``"logits"``, ``"0.boxes"``; one alone: ``"outputs"``). It appears when it is complete and
                replaces one of this name. Outputs of single samples then are tensors of one shape.

        Returns:
            None on all ranks but 0, and everywhere with ``path``. On rank 0: with one output per batch, an output of
            all samples, with tensors on the CPU and without gradients; with one per sample or item, the list of all.

        Raises:
            TypeError: the outputs can't be put together, or ``source`` divides nothing among the ranks.
            ValueError: the pass left samples out (``drop_last``, a ``break``), there is not one output for each batch,
                the outputs' parts or shapes differ, or a format can't hold them; on every rank.
            LockstepError: the file can't be written; on every rank.
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        return gather_in_order(self, outputs, source, per=per, path=path)

    def _shared(self, value: Any, what: str, sources: Container[int]) -> list[Any]:
        """**Collective.** Return kind and value of what each of ``sources`` shares; raise on all ranks if one can't.

        For a tensor the value is the kind of device on which it lies.
        """

        def attempt() -> list[Any]:
            if self.rank not in sources:
                return ["nothing", None]
            if isinstance(value, torch.Tensor):
                if value.layout != torch.strided:
                    raise TypeError(f"{what} takes dense tensors, not one of layout {value.layout}")
                return ["tensor", value.device.type]
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"{what} takes tensors and what JSON can hold ({error}); torch.distributed's object collectives "
                    "send other objects, by pickle"
                ) from error
            return ["plain", value]

        return together(OverGroup(self), attempt, lambda shared: shared, what=what)[1]

    @contextmanager
    def main_first(self, *, per: Literal["job", "machine"] = "job") -> Iterator[None]:
        """**Collective.** Run the block on rank 0 first, and then on the others: to prepare a file once, then read it.

        If the block fails on rank 0, the other ranks raise instead of running it. They wait for rank 0 no longer than
        the world's timeout: raise that for a long download.

        Args:
            per: ``"machine"``: the first rank of each machine goes first, for machines that have a disk of their own.

        Raises:
            ValueError: ``per`` is neither.
            LockstepError: a rank that goes first failed; the message has its error.
        """
        if per not in ("job", "machine"):
            raise ValueError(f"per={per!r}: expected 'job' or 'machine'")
        refuse_apart("World.main_first()")  # before the block, on the rank that goes first as well
        goes_first = self.is_main if per == "job" else self.local_rank == 0
        failures: list[str | None] = []
        if not goes_first:
            with calling("World.main_first()"):
                failures = all_gather_records(None, self.group)
            self._raise_if_failed(failures)
        failure: str | None = None
        try:
            with expect_slow("main_first()"):
                yield
        except BaseException as error:
            failure = named(error)
            raise
        finally:
            if goes_first:
                with calling("World.main_first()"):
                    failures = all_gather_records(failure, self.group)
        self._raise_if_failed(failures)

    def _raise_if_failed(self, failures: list[str | None]) -> None:
        for rank, failure in enumerate(failures):
            if failure is not None:
                raise LockstepError(
                    f"rank {self.rank} of {self.world_size}: rank {rank} failed in the main_first() block: {failure}"
                )


def _refuse_no_samples(samples: float) -> None:
    if samples == 0:
        raise ValueError("mean over no samples: every rank passed samples=0")
