"""Steps in slices: the training loop over a loader that was sharded with ``slices``.

Note [Random numbers of a slice]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model's random numbers in a slice must depend neither on the rank that has the slice, nor on that rank's earlier
slices. So before each slice the generators of torch (the CPU's and the rank's own GPU's), Python and NumPy are seeded
from (seed, epoch, batch, slice), and after the last one they are restored to their states before the step: a script's
random numbers between steps stay the same on all ranks.

Note [Passes over a step]
~~~~~~~~~~~~~~~~~~~~~~~~~
Some methods need a batch several times: a GAN's two players, the second gradient of SAM, each evaluation of LBFGS.
Iterating over the step again is another pass over the same slices, with its own sums, average and random numbers (which
are seeded from the pass as well), as in a single process that goes through its batch again. Changes between the passes
(of parameters, by an optimizer or by hand) are the same on all ranks. The batch counts once for the loader's position,
and a rank's pace is that of all passes.

Note [Memory for a retake]
~~~~~~~~~~~~~~~~~~~~~~~~~~
When memory has run out, the ranks need some more: to tell each other, and to fetch the batch again in other slices. If
a step may be taken again, they allocate it before the first slice: the memory that they share for the step's sums,
whose size does not depend on the cut (twice as many slices in the same order end in as many sums), and that of the
first message of this kind. Besides, the block of :meth:`Step.attempt` begins with a reserve, which it frees when memory
runs out (the next reserve is only made when the next block begins: until then the script may hold too much). The slices
that did not fit are dropped before their batch is fetched again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lockstep import accelerator
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.labels import labelled
from lockstep.comm.world import World
from lockstep.data.mixing import mix
from lockstep.data.seeding import seed_generators
from lockstep.errors import LockstepError
from lockstep.job import flight
from lockstep.job.page import Phase
from lockstep.step import streams
from lockstep.step.generators import NUMPY, PYTHON
from lockstep.step.share import BatchShare
from lockstep.step.slicing import Cut, SlicedStep

#: The key that makes mix() give slices other seeds than samples.
_SLICE = 2**62 + 2
#: Bytes that are reserved for a retake: the message, stacks and allocations of libraries.
_RESERVE = 8 << 20


#: The number and the batch of each non-empty slice of a rank.
Batches = Sequence[tuple[int, Any]]


@dataclass(frozen=True)
class StepKey:
    """The global batch of a step: the loader's seed, the epoch, the batch's number in it, and the epoch's length."""

    seed: int
    epoch: int
    batch: int
    #: The samples of the epoch's order, where each rank makes that for itself; else 0.
    length: int


class Step:
    """One global batch and one optimizer step: iterate over it for this rank's slices, one after the other.

    When the inner loop ends, gradients are averaged over all slices of all ranks, and buffers are made equal. To
    iterate again is another pass over the same slices, averaged by itself: Note [Passes over a step] in
    ``data/steps.py``. Made by :meth:`ShardedLoader.steps`.
    """

    def __init__(
        self,
        loader: object,
        world: World,
        *,
        key: StepKey,
        cut: Cut,
        batches: Batches,
        recut: Callable[[], tuple[Cut, Batches]] | None,
        measures: bool = False,
    ) -> None:
        """Wrap the fetched slices of a batch.

        Args:
            loader: the loader of the batch.
            world: the ranks.
            key: identifies the batch.
            cut: its slices.
            batches: this rank's slices.
            recut: cuts the batch into twice as many slices; None: the number stays.
            measures: as for :class:`~lockstep.step.slicing.SlicedStep`.
        """
        self._loader, self._world, self._key = loader, world, key
        self._cut, self._batches, self._recut = cut, batches, recut
        self._measures = measures
        self._sliced: SlicedStep | None = None
        self._failure: str | None = None
        #: The reserve of Note [Memory for a retake].
        self._reserve: torch.Tensor | None = None
        #: The number of passes that have begun.
        self._passes = 0
        #: True if the latest pass went through all slices.
        self.is_done = False
        #: The seconds that each rank spent on its slices in all passes; known once the step is done.
        self.seconds: Sequence[float] = ()

    @property
    def samples(self) -> int:
        """The number of samples of the global batch."""
        return self._cut.samples

    @property
    def slices(self) -> int:
        """The number of slices of the global batch, over all ranks."""
        return self._cut.slices

    @property
    def number(self) -> int:
        """The number of the global batch in its epoch, from 0."""
        return self._key.batch

    @property
    def loss(self) -> float:
        """The mean over all samples of all ranks of the losses given to :meth:`add_loss` in the last pass.

        The losses are added up in the order of the slices, so the mean has the same bits on every rank, and on any
        number of ranks.

        Raises:
            LockstepError: the inner loop is not over, or nothing was added.
        """
        if not self.is_done or self._sliced is None or self._sliced.loss is None:
            raise LockstepError(
                f"{self._whoami()}: there is no loss of this step: call step.add_loss(loss) in each of its slices, and "
                "ask for step.loss after the inner loop"
            )
        return self._sliced.loss

    def add_loss(self, loss: float | torch.Tensor) -> None:
        """Add to the slice's loss, for :attr:`loss`: a mean over the slice's samples, or over :meth:`weigh`'s items.

        Raises:
            LockstepError: no slice of this step is in hand.
        """
        if self._sliced is None or self._sliced.number is None:
            raise LockstepError(f"{self._whoami()}: add_loss() was called outside of the step's inner loop")
        self._sliced.add_loss(loss)

    def __len__(self) -> int:
        """Return the number of this rank's non-empty slices; it may be 0."""
        return len(self._batches)

    def __repr__(self) -> str:
        return f"<step {self._key.batch} of epoch {self._key.epoch}: {len(self)} of {self.slices} slices>"

    def weigh(self, items: int) -> None:
        """Declare, before ``backward()``, that the slice's loss is a mean over ``items`` items, for instance tokens.

        The average is then exact over all items of all slices and ranks. Call it in every slice of a step or in none. 0
        discards the slice's results. (:meth:`World.weigh <lockstep.World.weigh>` does the same in here.)

        Raises:
            TypeError, ValueError: as ``World.weigh``.
            LockstepError: no slice of this step is in hand.
        """
        if self._sliced is None or self._sliced.number is None:
            raise LockstepError(f"{self._whoami()}: weigh() was called outside of the step's inner loop")
        self._world.weigh(items)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Retry the step if the block runs out of memory: ``with step.attempt(): loss(model(x), y).backward()``

        Once a rank has run out of memory, all ranks discard their results of the step and take it again, cut into twice
        as many slices, if the loader was sharded with ``slices="auto"``; the cut stays for the steps to come. All work
        on the slice belongs into the block. Errors other than for memory pass through.

        Raises:
            LockstepError: at the end of the inner loop, on all ranks, if the number of slices is fixed, or each sample
                has its own slice already.
        """
        if self._recut is not None and self._reserve is None:
            self._reserve = _reserve()
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._note_failure(error)

    def _note_failure(self, error: BaseException) -> None:
        error.__traceback__ = None  # its frames hold what did not fit
        self._reserve = None
        self._failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"

    def __iter__(self) -> Iterator[Any]:
        """Go through this rank's slices. **Collective** at its end, where the ranks average the results.

        All ranks may iterate again: Note [Passes over a step].

        Raises:
            LockstepError: the last pass was left early; only some slices were weighed; or memory ran out,
                see :meth:`attempt`.
            CollectiveTimeout, PeerLost, CollectiveMismatch: as in a backward that averages.
        """
        if self._sliced is not None and not self.is_done:
            raise LockstepError(
                f"{self._whoami()}: another pass over this step begins, and the last one was left before its last slice"
            )
        return self._run()

    def _run(self) -> Iterator[Any]:
        generators = _Generators(self._world)
        number, self._passes, self.is_done, self._failure = self._passes, self._passes + 1, False, None
        try:
            while True:
                step = self._sliced = SlicedStep(
                    self._world,
                    self._gather,
                    key=(self._key.epoch, self._key.batch, number, self._key.length),
                    cut=self._cut,
                    measures=self._measures,
                    may_fail=self._recut is not None,
                )
                step.begin()
                try:
                    yield from self._go_through(step)
                    self._give_back(generators)
                    with flight.phase(Phase.REDUCE):
                        failure = step.end(self._failure)
                except BaseException:
                    step.abandon()
                    raise
                if failure is None:
                    break
                self._cut_again(failure)
            self._world._in_hand.hand_out(self._loader, self._cut.share_of(self._world.rank))
            before = self.seconds or [0.0] * len(step.seconds)
            self.seconds = [one + two for one, two in zip(before, step.seconds, strict=True)]
            self.is_done = True
        finally:
            self._reserve = None
            self._give_back(generators)

    def _gather(self, record: Any, what: str) -> list[Any]:
        with labelled(what):
            return all_gather_records(record, self._world.group)

    def _go_through(self, step: SlicedStep) -> Iterator[Any]:
        sizes, total = self._cut.sizes, self.samples
        for number, batch in self._batches:
            self._seed(number)
            self._world._in_hand.hand_out(self._loader, BatchShare(sizes[number], total))
            try:
                with step.slice(number):
                    yield batch
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                # (Raised when the slice's context ends; an error of the loop's body does not come here.)
                if self._recut is None or not is_out_of_memory(error):
                    raise
                self._note_failure(error)
            if self._failure is not None:
                return

    def _seed(self, number: int) -> None:
        passes = self._passes - 1
        key = self._key.seed, self._key.epoch, self._key.batch, number, _SLICE
        seed = mix(*key, passes) if passes else mix(*key)
        streams.current.set_aside(self._loader)
        seed_generators(seed)
        if self._world.device.type != "cpu":
            accelerator.seed(seed & (2**63 - 1), self._world.device)

    def _give_back(self, generators: _Generators) -> None:
        streams.current.finish(self._loader)
        generators.restore()

    def _cut_again(self, failure: str) -> None:
        """Cut the batch into more slices, or raise on all ranks."""
        what = f"{self._whoami()}: memory ran out in a slice ({failure})"
        if self._recut is None:
            raise LockstepError(
                f"{what}. The step was not taken and is discarded. Cut the batches into more slices than "
                f'{self.slices}, or let lockstep do so: lockstep.shard(loader, slices="auto")'
            )
        if max(self._cut.sizes) == 1:
            raise LockstepError(
                f"{what}, and there is a slice for each of the {self.samples} samples already: the model itself does "
                "not fit. Checkpoint activations, or use a smaller model"
            )
        self._failure = None
        accelerator.free_cached(self._world.device)
        self._batches = []  # frees the memory of the old slices
        self._cut, self._batches = self._recut()

    def _whoami(self) -> str:
        world, key = self._world, self._key
        return f"rank {world.rank} of {world.world_size}, epoch {key.epoch}, batch {key.batch}"


class Source(Protocol):
    """A loader that can begin passes in steps, for :class:`Steps`."""

    def __len__(self) -> int: ...

    def _begin_steps(self) -> Iterator[Step]:
        """Begin a pass."""
        ...


class Steps:
    """The steps of an epoch, as :meth:`lockstep.ShardedLoader.steps` returns them; their number is the length."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        """Return the number of steps of a full epoch."""
        return len(self._source)

    def __iter__(self) -> Iterator[Step]:
        """Begin a pass over the next epoch, or the rest of a loaded one."""
        return self._source._begin_steps()


class _Generators:
    """The states of Python's, NumPy's and the device's generators before a step. (torch's on the CPU:
    step/streams.py.)"""

    def __init__(self, world: World) -> None:
        self._python, self._numpy = PYTHON.state(), NUMPY.state()
        self._device, self._of_device = world.device, accelerator.rng_state(world.device)

    def restore(self) -> None:
        PYTHON.set_state(self._python)
        NUMPY.set_state(self._numpy)
        if self._of_device is not None:
            accelerator.set_rng_state(self._of_device, self._device)


def _reserve() -> torch.Tensor | None:
    """Return memory to free later, or None if there is none: a retake may do with the memory that is left."""
    try:
        return torch.empty(_RESERVE, dtype=torch.uint8, device="cpu")
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that a GPU or this process ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # torch's allocator for the CPU raises a plain RuntimeError.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
