"""The check that replicas stay equal while they train: a digest of a part of them, compared in some of the steps.

Note [Replicas compared]
~~~~~~~~~~~~~~~~~~~~~~~~
Averaged gradients keep replicas equal only as long as nothing else happens to one of them: a bit that flips in memory,
an optimizer with another learning rate on one rank, a line that only rank 0 runs. It goes unnoticed, since the averages
go on, and the loss falls. So each rank takes digests of its parameters and of its optimizers' state (Note [What is
compared] in ``digest.py``), at the end of a backward, where all ranks have taken the same optimizer steps and nothing
is under way that would change them. These holdings are cut into parts, one or a few of which are compared at a time,
and all of them once in a *round*.

A rank's digest travels in the flags of the last bucket (Note [Bucket layout] in ``bucket.py``), with the gradients:
each bit of the digest has a flag for "it is 1" and one for "it is 0". If both flags of a bit are set in the sum over
the ranks, ranks have found different values of it, whatever the dtype of the bucket and the number of ranks; all ranks
read the same sums, so all know at once and proceed alike. In the steps in between these flags are 0 and are not read.
Where no bucket is sent (all gradients are sparse, or a step is cut into slices, whose sums are no plain sums over the
ranks) the flags are summed by themselves, in the steps in which something is compared.

Only if ranks differ do they exchange more, to find the items, ranks and bytes that differ (``difference.py``).

Note [What comparing may cost]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank measures its comparisons and its steps; it asks for as many steps between two comparisons as keep their
quotient below a limit, in powers of two, by one more flag for each possible answer. All ranks take the slowest pace
that any of them asks for: they read the same sums, so they compare in the same steps. A round takes ``MOST_STEPS``
steps at most, and parts are made large enough for that; so a difference is found within that many steps, however slow
comparing is. Where a step is slow and a comparison is not, several parts are compared in each step.

On a GPU the flags are not read in the step in which they were summed, for that would wait for the device: they are
copied to host memory behind the queued work, and read in the next backward, on every rank. (Not at the next comparison:
as long as they are not read, the ranks don't know whether they have the same parts, and so the same next comparison.)

Note [A rank's own]
~~~~~~~~~~~~~~~~~~~
An optimizer that shards its state over the ranks (ZeroRedundancyOptimizer) keeps on each rank state that the others
lack. So the list of items is part of the digests, too. If the lists differ, the ranks exchange them, and items that not
all ranks hold are left out from then on. (The next step begins a new round on all ranks: by the parts of what each has
held, they would compare in different steps from then on.) So are items that differ when first compared and have another
shape than their parameter: a part of a flat tensor, an error that is fed back. Items of the parameter's shape must be
equal from the start. A comm hook may leave replicas apart on purpose (torch's ``post_localSGD_hook`` does), so with one
that is not known to keep them equal they are compared only if a number of steps was asked for.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep import accelerator, callsite
from lockstep.comm.exchange import all_gather_records, group_device
from lockstep.comm.waiting import wait_for
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.difference import Difference, advise, describe, find_difference
from lockstep.ddp.digest import BITS, DigestPart, Holdings, watch_optimizers
from lockstep.ddp.rider import BackwardState
from lockstep.errors import ReplicaMismatch
from lockstep.trees import moved

#: Fraction of the time of a step that comparing may take, and the most steps of a round.
TARGET, MOST_STEPS = 0.004, 1024
#: Least bytes of a part: what a CPU reads in the time that the rest of a comparison takes.
PART = 1 << 20
#: Exponents of two that a rank may ask for: of steps between two comparisons; if negative, of parts in each.
_LEAST, _MOST = -10, 10
#: Number of flags in the last bucket.
FLAGS = 2 * BITS + _MOST - _LEAST + 1
#: Number of the backward with the first comparison; the optimizer has taken a step by then.
_FIRST = 2


class Schedule:
    """The schedule of the parts that each backward compares, the same on every rank.

    Args:
        every: steps within which all parts must be compared; None: as Note [What comparing may cost] says.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        #: Number of backwards counted.
        self.step = 0
        #: The exponent of two that the ranks have agreed on.
        self.exponent = 2
        self._due, self._parts, self._next = _FIRST, 1, 1

    @property
    def limit(self) -> int:
        """Return the steps within which all parts are compared."""
        return self._every or MOST_STEPS

    def count(self) -> bool:
        """Count a backward. Return whether something is compared in it."""
        self.step += 1
        return self.step >= self._due

    @property
    def begins_round(self) -> bool:
        """Return whether all parts of the round have been compared."""
        return self._next >= self._parts

    def begin_round(self, parts: int) -> None:
        """Begin a round of ``parts`` parts, with the first."""
        self._parts, self._next = parts, 0

    def start_over(self) -> None:
        """Begin a new round in the next step, whatever was settled by parts that ranks do not have in common."""
        self.begin_round(0)
        self._due = self.step + 1

    def take(self) -> range:
        """Return the parts that are compared now, and settle when the next ones are."""
        count, steps = self._pace()
        first, self._next = self._next, min(self._next + count, self._parts)
        self._due = self.step + steps
        return range(first, self._next)

    def _pace(self) -> tuple[int, int]:
        """Return how many parts are compared at once, and the steps from there to the next comparison."""
        parts = max(1, self._parts)
        if self._every is not None:
            return math.ceil(parts / self._every), max(1, self._every // parts)
        count = max(1 << max(0, -self.exponent), math.ceil(parts / MOST_STEPS))
        return count, min(1 << max(0, self.exponent), max(1, MOST_STEPS // parts))


class Costs:
    """The times of comparisons and steps on this rank, in seconds."""

    def __init__(self) -> None:
        self._parts: deque[float] = deque(maxlen=3)
        self._steps: deque[float] = deque(maxlen=3)

    def add(self, seconds: float, *, parts: int, step: float | None) -> None:
        """Note a comparison of ``parts`` parts, and the mean time of a step since the comparison before."""
        self._parts.append(seconds / parts)
        if step is not None:
            self._steps.append(step)

    def wanted(self) -> int | None:
        """Return the exponent of two that this rank asks for; None: it does not know yet."""
        if not self._steps:
            return None
        # The minimum leaves out a step that an evaluation has interrupted.
        ratio = statistics.median(self._parts) / (TARGET * max(min(self._steps), 1e-9))
        return max(_LEAST, min(_MOST, math.ceil(math.log2(max(ratio, 1e-9)))))


class DriftCheck:
    """Compares a replica with those of the other ranks; see Note [Replicas compared].

    Nothing is compared before :meth:`turn_to` is called.

    Args:
        group: the ranks that hold replicas.
        every: as for :class:`Schedule`.
    """

    def __init__(self, group: dist.ProcessGroup, every: int | None) -> None:
        watch_optimizers()
        self._group, self._rank, self._world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self._holdings = Holdings([])
        self._parts: list[DigestPart] = []
        self._schedule, self._costs = Schedule(every), Costs()
        #: True if nothing is compared for now; ``_is_stopped``: for good.
        self.is_paused = self._is_stopped = False
        #: True if replicas are compared in the backward under way.
        self._is_due = False
        #: For each part, the step in which it was last found equal; 0: when the replicas were made.
        self._equal_at: list[int] = []
        #: Identities of items that are a rank's own, and of those once equal on all ranks; see Note [A rank's own].
        self._own: frozenset[str] = frozenset()
        self._was_equal: frozenset[str] = frozenset()
        self._has_joined = False
        self._compared: range = range(0)
        #: The summed flags of the last comparison on a GPU, not read yet.
        self._unread: _Unread | None = None
        self._began, self._spent = 0.0, 0.0
        #: Times the last comparison's work on a GPU; None on a CPU, and where events tell no time.
        self._stopwatch: accelerator.Stopwatch | None = None
        #: True if the parameters are on accelerators whose events tell how long work took.
        self._has_times = False
        #: Tells whether a graph is being captured; None on the CPU.
        self._captures: Callable[[], bool] | None = None
        self._is_settled = False
        self._before: tuple[int, float] | None = None

    def turn_to(self, named: Sequence[tuple[str, Parameter]]) -> None:
        """Compare these parameters, all of the replica by name, and their optimizer state from now on."""
        self._holdings = Holdings(named)
        used = [param.device for _, param in named]
        self._captures = accelerator.capture_test(used)
        self._has_times = any(accelerator.has_times(device) for device in set(used))
        self._schedule.begin_round(0)
        if self._unread is not None:
            self._schedule.start_over()  # what it would have told is not known
        self._parts, self._unread = [], None

    def stop(self) -> None:
        """Compare nothing from now on; the same on every rank."""
        self.is_paused = True
        self._is_stopped, self._unread = True, None

    def count(self) -> bool:
        """Count a backward that is averaged. Return whether replicas are compared in it, the same on every rank."""
        is_due = not self.is_paused and self._schedule.count()
        return is_due and (self._captures is None or not self._captures())

    def pause(self, joins: bool) -> None:
        """Compare nothing while ranks are not in the same step, as within join."""
        if joins is not self.is_paused and not self._is_stopped:
            self.is_paused, self._has_joined = joins, True

    # With the gradients: see Rider -----------------------------------------------------------------------------------

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return FLAGS if is_last else 0

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if self._is_due:  # a backward has failed on all ranks before this was read
            self._schedule.start_over()
        self._is_due = self.count()
        if self._is_due:
            self.fill(flags)

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> ReplicaMismatch | None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if self._is_due:
            self._is_due = False
            return self._judge(self._now_told(flags))
        return None if self._unread is None else self._read_late()

    def alone(self, sending: BackwardState) -> ReplicaMismatch | None:  # noqa: ARG002
        """See :class:`~lockstep.ddp.rider.Rider`."""
        return self.compare_alone()

    # Sending --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, flags: Tensor) -> None:
        """Write the flags of this rank: 1-D [FLAGS], of any dtype and device."""
        self._began = time.perf_counter()
        times_device = self._has_times and not flags.is_cpu
        self._stopwatch = accelerator.Stopwatch(flags.device) if times_device else None
        if self._schedule.begins_round:
            self._begin_round()
        self._compared = self._schedule.take()
        digest: int | Tensor = self._holdings.signature & ((1 << BITS) - 1)
        for index in self._compared:
            part = self._holdings.digest(self._parts[index], salt=self._holdings.signature ^ index)
            digest = _combine(digest, part, flags.device)
        wanted = self._costs.wanted()
        votes = [int(power == wanted) for power in range(_LEAST, _MOST + 1)]
        if isinstance(digest, Tensor):
            bits = (digest >> torch.arange(BITS, device=flags.device)) & 1
            vote = moved(torch.tensor(votes, dtype=flags.dtype, device="cpu"), flags.device)
            flags.copy_(torch.cat([bits.to(flags.dtype), (1 - bits).to(flags.dtype), vote]))
        else:
            ones = [(digest >> bit) & 1 for bit in range(BITS)]
            own = torch.tensor([*ones, *[1 - one for one in ones], *votes], dtype=flags.dtype, device="cpu")
            flags.copy_(own, non_blocking=not flags.is_cpu)
        if self._stopwatch is not None:
            self._stopwatch.stop()
        self._spent = time.perf_counter() - self._began

    def _begin_round(self) -> None:
        is_new = self._holdings.refresh(without=self._own)
        if is_new or not self._parts:
            total = sum(item.nbytes for item in self._holdings.items)
            self._parts = self._holdings.cut(max(PART, -(-total // self._schedule.limit)))
            self._equal_at = [min(self._equal_at, default=0)] * len(self._parts)
            self._is_settled = False
            if self._unread is not None:
                self._unread.parts = range(0)  # it was of other parts
        self._schedule.begin_round(len(self._parts))

    # Reading --------------------------------------------------------------------------------------------------------

    def _now_told(self, flags: Tensor) -> _Unread | None:
        """Return the comparison whose flags are to be read now: this one, or on a GPU the one before, if it was not."""
        now = _Unread(flags, self._compared, self._schedule.step, self._stopwatch, began=self._began, spent=self._spent)
        if flags.is_cpu:
            return now
        before, self._unread = self._unread, now
        return before

    def _read_late(self) -> ReplicaMismatch | None:
        """**Collective** if the replicas differ. Read what an earlier backward has told, but while a graph is
        captured."""
        if self._captures is not None and self._captures():
            return None
        unread, self._unread = self._unread, None
        return self._judge(unread)

    def _judge(self, unread: _Unread | None) -> ReplicaMismatch | None:
        """**Collective** if the replicas differ. Read the sums of all ranks' flags.

        Returns:
            The error to raise, on every rank, if the replicas differ.
        """
        if unread is None:
            return None
        begun = time.perf_counter()
        sums = unread.read()
        ones, zeros, votes = sums[:BITS], sums[BITS : 2 * BITS], sums[2 * BITS :]
        if any(votes):
            self._schedule.exponent = max(power for power, vote in enumerate(votes) if vote) + _LEAST
        differs = any(one and zero for one, zero in zip(ones, zeros, strict=True))
        if differs:
            return self._settle(unread)
        for index in unread.parts:
            self._equal_at[index] = unread.step
        if not self._is_settled and len(self._parts) - 1 in unread.parts:
            self._is_settled, self._was_equal = True, frozenset(item.identity for item in self._holdings.items)
        on_device = 0.0 if unread.stopwatch is None else unread.stopwatch.seconds()
        self._note_cost(unread, max(unread.spent + time.perf_counter() - begun, on_device))
        return None

    def _note_cost(self, unread: _Unread, seconds: float) -> None:
        step, now = unread.step, unread.began
        passed = None
        if self._before is not None and step > self._before[0]:
            passed = (now - self._before[1]) / (step - self._before[0])
        self._before = (step, now)
        self._costs.add(seconds, parts=max(1, len(unread.parts)), step=passed)

    def compare_alone(self) -> ReplicaMismatch | None:
        """**Collective** in some steps. Compare, if it is time, by a message of its own: there is no bucket.

        Returns:
            The error to raise, on every rank, if the replicas differ.

        Raises:
            CollectiveTimeout, PeerLost: another rank is late or gone.
        """
        # (First of all, since it may settle that the ranks compare now.)
        late = None if self._unread is None else self._read_late()
        if not self.count() or late is not None:
            return late
        flags = torch.zeros(FLAGS, device=group_device(self._group))
        self.fill(flags)
        what = f"rank {self._rank} of {self._world_size}: comparing the replicas"
        wait_for(lambda: dist.all_reduce(flags, group=self._group), lambda: what, name="comparing the replicas")
        self._spent = time.perf_counter() - self._began  # the time since includes waiting for other ranks
        return self._judge(self._now_told(flags))

    # A difference ---------------------------------------------------------------------------------------------------

    def _settle(self, unread: _Unread) -> ReplicaMismatch | None:
        """**Collective.** Find the difference and return the error to raise, or leave out a rank's own items."""
        self._unread = None
        if self._leave_out_what_others_lack():
            return None
        difference = find_difference(self._holdings, self._group)
        if difference is None:
            if self._rank == 0:
                callsite.warn(
                    f"the replicas' digests differed in step {unread.step}, and the replicas are equal now: either a "
                    "difference has disappeared since, for example in the optimizer's state, or a digest was "
                    "corrupted in transit. If it happens again, have the machines' memory tested"
                )
            return None
        items = self._holdings.items
        identities = [items[index].identity for index in difference.items]
        if all(
            not items[index].is_like_parameter and items[index].identity not in self._was_equal
            for index in difference.items
        ):
            self._own |= frozenset(identities)
            self._start_over()
            return None
        return ReplicaMismatch(self._explain(difference, unread))

    def _leave_out_what_others_lack(self) -> bool:
        """**Collective.** Compare the lists of items. Return whether they differed; they don't in the next round."""
        mine = self._holdings.signature
        if len(set(all_gather_records(mine, self._group))) == 1:
            return False
        lists = all_gather_records([item.identity for item in self._holdings.items], self._group)
        common = frozenset(lists[0]).intersection(*lists)
        self._own |= frozenset(item.identity for item in self._holdings.items) - common
        self._start_over()
        return True

    def _start_over(self) -> None:
        """Begin a new round in the next step; the same on every rank."""
        self._parts = []
        self._schedule.start_over()

    def _explain(self, difference: Difference, unread: _Unread) -> str:
        """Return the message about a difference."""
        since = min((self._equal_at[index] for index in unread.parts), default=0)
        start = f"step {since}, when it was equal on all ranks," if since else "the beginning"
        before = f"before step {since} of these" if since else "by an earlier run"
        whoami = f"rank {self._rank} of {self._world_size}, step {unread.step}"
        return (
            f"{whoami}: the replicas differ. {describe(difference, self._holdings)} It happened between {start} and "
            f"step {unread.step} (of this process's averaged backwards). "
            f"{advise(difference, self._holdings, since=before, has_joined=self._has_joined)}"
        )


class _Unread:
    """The summed flags of one comparison, on their way to the host.

    Args:
        flags: the flags.
        parts: the parts that were compared.
        step: the step in which they were.
        stopwatch: times the work on a GPU, if there is any.
        began: when the comparison began; ``spent``: the seconds of the host that it took so far.
    """

    def __init__(
        self,
        flags: Tensor,
        parts: range,
        step: int,
        stopwatch: accelerator.Stopwatch | None,
        *,
        began: float,
        spent: float,
    ) -> None:
        self.parts, self.step, self.stopwatch = parts, step, stopwatch
        self.began, self.spent = began, spent
        self._sums = accelerator.HostCopy((flags.detach().abs() > 0).to(torch.uint8))

    def read(self) -> list[int]:
        """Return 1 for each flag that some rank has set, and 0 for the others."""
        read: list[int] = self._sums.read().tolist()  # which waits for work of an earlier step
        return read


def _combine(first: int | Tensor, second: int | Tensor, device: torch.device) -> int | Tensor:
    """Return one digest for both, which depends on their order; a tensor on ``device`` if one of them is a tensor."""
    if isinstance(first, int) and isinstance(second, int):
        return (first * 31 + second) & ((1 << BITS) - 1)
    tensors = [
        moved(each, device) if isinstance(each, Tensor) else torch.full((), each, device=device)
        for each in (first, second)
    ]
    return (tensors[0] * 31 + tensors[1]) & ((1 << BITS) - 1)
