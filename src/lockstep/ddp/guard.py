"""Averages that are not finite, kept from the parameters: what ``check_finite="step"`` does.

Note [Averages that are not finite]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
One rank's NaN spreads to every rank's average, and by the optimizer's step to every rank's parameters, for good. So
each average is looked at (Note [Looking at gradients] in ``finite.py``), but not changed: ``grad`` holds what torch's
DDP would leave there. Scripts know what to do with that. A GradScaler unscales the gradients, finds that they are not
finite and never calls ``step``; others clip them, replace NaN by numbers, or look at the loss and ``continue``.

Only if an optimizer is about to step with gradients that still are not finite, the step is left out: the optimizer sees
no gradients, so that parameters, momenta and step counts do not change, and after the step the gradients are there
again. That is what GradScaler does, for any script; a run stops after ``MOST_SKIPPED`` such steps in a row. Averages
are the same on all ranks, and so are the decisions that depend on them.

The origin of the value: over "shm" the rank that adds up a piece of a bucket sees all ranks' values of it
(``comm/looks.py``); otherwise each rank looks at its own gradients before it sends them, and sets a flag. After steps
in slices, and alone in the world, the gradients are looked at in front of the optimizer's step.

On a GPU, reading a flag would wait for the device. There the greatest magnitude of all averages, by one kernel for all
buckets, is copied to host memory behind the queued work and read a backward later, when the step has been taken. Then
the parameters are looked at: if they are not finite, all ranks raise. The same goes for parameters that were stepped by
other means than a torch optimizer.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep import accelerator, callsite
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.looks import total_of
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.finite import (
    MOST_SKIPPED,
    NanBuffers,
    are_sound,
    dense_grads,
    is_finite,
    magnitude,
    note_left_out,
    words_for,
)
from lockstep.ddp.rider import BackwardState
from lockstep.errors import NonFiniteGradient
from lockstep.step.stepping import alert, alerted, leave_out, params_of, quiet, watch_steps
from lockstep.text import listed

#: Most names that a rank tells the others.
_MOST_NAMES = 100
#: Key, in place of a rank, of the names of gradients that may have been rank 0's.
_UNCLEAR = -1


class StepGuard:
    """Keeps one replica's optimizers from averages that are not finite.

    Nothing is guarded before :meth:`turn_to` is called.

    Args:
        group: the ranks that hold replicas.
        buffers: finds buffers that became NaN.
    """

    def __init__(self, group: dist.ProcessGroup, buffers: NanBuffers) -> None:
        watch_steps()
        self._buffers = buffers
        self._group, self._rank, self._world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self._params: list[Parameter] = []
        self._names: dict[int, str] = {}
        #: Ids of parameters that were not finite before the last bad average came: some are infinite on purpose.
        self._not_finite: set[int] = set()
        #: Rank -> names of the parameters whose gradients were not finite in the current backward.
        self._seen: dict[int, set[str]] = {}
        #: Names of parameters whose gradients may have been bad on rank 0 as well.
        self._unclear: set[str] = set()
        #: True if any rank has seen a bad gradient in the current backward; the same on all ranks.
        self._is_flagged = False
        #: Rank and step of the last average that was not finite, the bad gradients by rank, and perhaps rank 0's.
        self._whoami = ""
        self._found: dict[int, list[str]] = {}
        self._perhaps: list[str] = []
        self._is_suspect = False
        #: Tells whether a graph is being captured; None on the CPU.
        self._captures: Callable[[], bool] | None = None
        #: The magnitude of the last averages, on its way from a GPU.
        self._unread: list[_Unread] = []
        #: The averages on devices in the buckets that were read so far in the current backward.
        self._on_devices: list[Tensor] = []
        #: Number of averages in a row for which a step was left out, and whether the current one is counted in it.
        self._in_a_row = 0
        self._is_counted = False

    def turn_to(self, params: Sequence[Parameter], names: Sequence[str]) -> None:
        """Guard these parameters from now on."""
        self._not_finite |= _not_finite(param for param in params if id(param) not in self._names)
        self._params = list(params)
        self._captures = accelerator.capture_test(param.device for param in params)
        self._names = {id(param): name for param, name in zip(params, names, strict=True)}

    def close(self) -> None:
        """Stop guarding."""
        quiet(self)
        self._params = []

    # While gradients are averaged: see Rider and RowLook --------------------------------------------------------------

    def width(self, parameters: int, *, is_last: bool) -> int:  # noqa: ARG002  (as the protocol has it)
        """See :class:`~lockstep.ddp.rider.Rider`: one flag for all parameters of a bucket."""
        return min(parameters, 1)

    def write(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        if bucket.look is not None and not sending.is_hooked:
            if bucket.look.is_suspicious:
                bucket.look.begin()  # it looks while the sum is made
        elif bucket.flat.is_cpu and not cmath.isfinite(total_of(bucket.values).item()):
            bad = {sending.name_of(bucket, slot) for slot, view in enumerate(bucket.views) if not is_finite(view)}
            if bad:
                flags.fill_(1)
                self._seen.setdefault(self._rank, set()).update(bad)

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`. What a GPU sees in the averages is read in the next backward.

        Raises:
            NonFiniteGradient: as :meth:`_conclude`.
        """
        if bucket.look is not None and not sending.is_hooked:
            self._is_flagged |= bucket.look.is_suspicious
            for rank, slots in bucket.look.found.items():
                # Slots beyond the gradients are the flags, which are never infinite.
                bad = {sending.name_of(bucket, slot) for slot in slots if slot < len(bucket)}
                self._seen.setdefault(rank, set()).update(bad)
            self._unclear |= {sending.name_of(bucket, slot) for slot in bucket.look.unclear if slot < len(bucket)}
        elif not bucket.flat.is_cpu:
            self._on_devices.append(bucket.values)
        else:  # a comm hook may return values that are not finite, whatever it was given
            self._is_flagged |= flags.item() != 0 or (sending.is_hooked and not is_finite(bucket.values))
        if bucket.is_last:
            averages, self._on_devices = self._on_devices, []
            if averages:
                self._look_later(averages, of_this=True)
            self._conclude(sending.whoami)

    def alone(self, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`."""
        self._conclude(sending.whoami)

    def inspect_rows(self, rows: Tensor, name: str) -> bool:
        """See :class:`~lockstep.ddp.sparse.RowLook`."""
        if is_finite(rows):
            return False
        self._seen.setdefault(self._rank, set()).add(name)
        return True

    def note_flagged_rows(self) -> None:
        """See :class:`~lockstep.ddp.sparse.RowLook`."""
        self._is_flagged = True

    def _conclude(self, whoami: Callable[[], str]) -> None:
        """**Collective** if a gradient was flagged. Note the origin, and ask to be told of the optimizer's step.

        Raises:
            NonFiniteGradient: an earlier average that was not finite has reached the parameters; on all ranks.
        """
        if self._is_suspect or self._unread:
            self._refuse_reached(whoami)
        seen, self._seen = self._seen, {}
        unclear, self._unclear = self._unclear, set()
        self._is_suspect, self._is_flagged, self._is_counted = self._is_flagged, False, False
        if not self._is_suspect:
            self._in_a_row = 0
            if alerted:
                quiet(self)
            return
        self._not_finite = _not_finite(self._params)
        mine = {str(rank): sorted(names)[:_MOST_NAMES] for rank, names in (*seen.items(), (_UNCLEAR, unclear))}
        found: dict[int, set[str]] = {}
        for rank, names in chain.from_iterable(each.items() for each in all_gather_records(mine, self._group)):
            found.setdefault(int(rank), set()).update(names)
        self._perhaps = sorted(found.pop(_UNCLEAR) - found.get(0, set()))
        self._found, self._whoami = {rank: sorted(names) for rank, names in found.items()}, whoami()
        alert(self)

    def averaged_unseen(self, whoami: str) -> None:
        """Note an average that was not looked at yet, to look at it in front of the optimizer's step."""
        self._refuse_reached(lambda: whoami)
        self._found, self._perhaps, self._whoami = {}, [], whoami
        self._is_suspect = self._is_counted = False
        alert(self)

    def _look_later(self, averages: Sequence[Tensor], *, of_this: bool) -> None:
        """Have a GPU look at averages, to hear at the end of the next backward; ``of_this``: they are of this one."""
        if not self._is_captured():
            self._unread.append(_Unread(averages, is_older=not of_this))

    def _is_captured(self) -> bool:
        """Return whether a graph is being captured, while which nothing may be read."""
        return self._captures is not None and self._captures()

    def _refuse_reached(self, whoami: Callable[[], str]) -> None:
        """Raise if an earlier average was not finite, and has made parameters not finite either.

        While a graph is captured nothing may be read; the next backward that is not captured does it.
        """
        if self._is_captured():
            return
        unread, self._unread = self._unread, [each for each in self._unread if not each.is_older]
        was_flagged = any(each.read() for each in unread if each.is_older)
        for each in self._unread:
            each.is_older = True
        if not self._is_suspect and not was_flagged:
            return
        reached = _not_finite(self._params) - self._not_finite
        bad = [name for each, name in self._names.items() if each in reached]
        if bad:
            quiet(self)
            raise NonFiniteGradient(
                f"{whoami()}: an average of gradients was infinite or NaN{self._origin()}, and it has reached the "
                f"parameters: {listed([*map(repr, bad)], most=5)}, on every rank. Resume from a checkpoint before that "
                "step. Look at the batches and the loss, or lower the learning rate"
            )

    def _origin(self) -> str:
        return f" ({self._whoami}: {words_for(self._found)})" if self._found else ""

    def _whether_rank_0(self) -> str:
        if not self._perhaps:
            return ""
        return (
            f". Rank 0 may have had such gradients of {listed([*map(repr, self._perhaps)], most=5)} as well: its own "
            'values are overwritten by the sum before it is checked ("warn", "skip" and "raise" check earlier)'
        )

    def _of_parameters(self) -> str:
        lost = _not_finite(self._params)
        bad = [name for each, name in self._names.items() if each in lost]
        if not bad:
            return ""
        return (
            f". Parameters hold infinite or NaN values themselves: {listed([*map(repr, bad)], most=5)}. If they should "
            "not, something else than an average has put them there (the optimizer, a line that divides gradients by "
            "a norm of 0), and no step can help any more: resume from a checkpoint"
        )

    # In front of an optimizer's step ---------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Leave the step out if the gradients are not finite.

        Raises:
            NonFiniteGradient: too many steps in a row were left out; on all ranks.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler has looked, and a fused optimizer leaves the step out by itself
        mine = [param for param in params_of(optimizer) if id(param) in self._names and param.grad is not None]
        if not mine:
            return
        if not all(param.is_cpu for param in mine):
            if not self._unread:  # otherwise each bucket has been looked at
                self._look_later(dense_grads(mine), of_this=False)
            return
        if are_sound(mine):
            self._in_a_row = 0
            return
        bad = [self._names[id(param)] for param in mine if any(not is_finite(grad) for grad in dense_grads([param]))]
        if bad:
            self._leave_out(optimizer, bad)

    def _leave_out(self, optimizer: Optimizer, bad: Sequence[str]) -> None:
        found = self._found or ({self._rank: [*bad]} if self._world_size == 1 else {})
        what = f"{self._whoami}: the averaged gradients are infinite or NaN"
        if found:
            what = f"{what}, because the gradients {words_for(found)} are"
        else:  # the sum overflowed, a comm hook returned it, or each rank had several slices
            what = f"{what}, in {listed([*map(repr, bad)], most=5)}"
        if not self._is_counted:  # (more than one optimizer may step after a backward)
            self._in_a_row += 1
            self._is_counted = True
            if self._rank == 0:
                note_left_out(found, bad)
        if self._in_a_row == MOST_SKIPPED:
            raise NonFiniteGradient(
                f"{what}. That was the {MOST_SKIPPED}th step in a row to be left out, so training stops here. Look at "
                "the batches and the loss, resume from a checkpoint, or lower the learning rate"
            )
        self._is_suspect = False  # the average does not reach the parameters
        leave_out(optimizer)
        if self._rank in (0, *found):  # the others' warnings would be the same
            callsite.warn(
                f"{what}. This step of {type(optimizer).__name__} was left out on every rank: neither parameters nor "
                "the optimizer's state have changed. check_finite= of lockstep.replicate and DistributedDataParallel "
                f"says what else can be done{self._whether_rank_0()}{self._buffers.words()}{self._of_parameters()}",
                RuntimeWarning,
            )


def _not_finite(params: Iterable[Parameter]) -> set[int]:
    """Return the ids of the parameters that are not finite."""
    return {id(param) for param in params if not is_finite(param.detach())}


class _Unread:
    """The magnitude of averages, on its way from a GPU to the host.

    Args:
        averages: of any shapes and dtypes.
        is_older: whether they are of an earlier backward than the one under way.
    """

    def __init__(self, averages: Iterable[Tensor], *, is_older: bool) -> None:
        #: True if they are of an earlier backward than the one under way.
        self.is_older = is_older
        self._magnitude = accelerator.HostCopy(magnitude(averages))

    def read(self) -> bool:
        """Return whether one of the averages is not finite."""
        return not math.isfinite(self._magnitude.read())  # which waits for work of an earlier step
