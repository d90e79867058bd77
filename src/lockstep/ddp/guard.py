"""Averages that are not finite, kept from the parameters: what ``check_finite="step"`` does.

Note [Averages that are not finite]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
One rank's NaN is in everybody's average, and after the optimizer's step in everybody's parameters, for good. So each
average is looked at (Note [Looking at gradients] in ``finite.py``), and nothing is done to it: ``grad`` holds what
torch's DDP would leave there. Scripts know what to do with that. A GradScaler unscales the gradients, finds what is
wrong and never calls ``step``; others clip them, replace NaN by numbers, or look at the loss and ``continue``.

Only when an optimizer is about to step with gradients that are not finite still, the step is left out: the optimizer
sees no gradients, so that neither parameters nor momenta, step counts and decay move, and after the step they are there
again. That is what GradScaler does, for any script; a run stops where so many steps in a row were left out that it goes
nowhere. Averages are the same on all ranks, and so is what is decided by them.

Who has begun it: over "shm" the rank that adds up a piece of a bucket sees all ranks' values of it (``comm/looks.py``);
else each rank looks at what it is about to send, and says so in a flag. After steps in slices, and alone in the world,
the gradients are looked at in front of the optimizer's step.

On a GPU to read a flag would wait for the device. There the flag is copied to memory of the host behind the work that
is queued and read a backward later, so a step with it has been taken. Then the parameters are looked at: if they are
not finite all ranks raise. The same goes for parameters that were stepped by other means than a torch optimizer.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep import callsite
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.looks import total_of
from lockstep.ddp.bucket import SMALL, Bucket
from lockstep.ddp.finite import MOST_SKIPPED, is_finite, words_for
from lockstep.ddp.rider import BackwardState
from lockstep.ddp.stepping import alert, alerted, leave_out, params_of, quiet, watch_steps
from lockstep.errors import NonFiniteGradient
from lockstep.text import listed

#: Names that a rank tells the others.
_MOST_NAMES = 100
#: Stands for a rank where rank 0 may be one.
_UNCLEAR = -1


class StepGuard:
    """Keeps one replica's optimizers from averages that are not finite.

    It guards nothing before :meth:`turn_to`.

    Args:
        group: the ranks that hold replicas.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        watch_steps()
        self._group, self._rank, self._world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self._params: list[Parameter] = []
        self._names: dict[int, str] = {}
        #: Parameters that were not finite before the last average came that is not: some are infinite on purpose.
        self._not_finite: set[int] = set()
        #: By rank, names of parameters whose gradients were seen to be bad in the backward under way.
        self._seen: dict[int, set[str]] = {}
        #: Names of those that rank 0 may have had as well.
        self._unclear: set[str] = set()
        #: Whether any rank has seen one; the same on all ranks.
        self._is_flagged = False
        #: Where the last average came from, if it is not finite, and what all ranks know of its origin.
        self._whoami = ""
        self._found: dict[int, list[str]] = {}
        self._perhaps: list[str] = []
        self._is_suspect = False
        #: Flags of the last average on their way from a GPU, and where that was.
        self._unread: list[_Unread] = []
        #: Averages in a row that some step was left out for, and whether that of now is one of them.
        self._in_a_row = 0
        self._is_counted = False

    def turn_to(self, params: Sequence[Parameter], names: Sequence[str]) -> None:
        """From now on guard these parameters."""
        self._not_finite |= _not_finite(param for param in params if id(param) not in self._names)
        self._params = list(params)
        self._names = {id(param): name for param, name in zip(params, names, strict=True)}

    def close(self) -> None:
        """Guard nothing any more."""
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
        elif bucket.flat.device.type != "cpu":
            flags.copy_(_doubt(bucket.values))
        elif not cmath.isfinite(total_of(bucket.values).item()):
            bad = {sending.name_of(bucket, slot) for slot, view in enumerate(bucket.views) if not is_finite(view)}
            if bad:
                flags.fill_(1)
                self._seen.setdefault(self._rank, set()).update(bad)

    def read(self, bucket: Bucket, flags: Tensor, sending: BackwardState) -> None:
        """See :class:`~lockstep.ddp.rider.Rider`. On a GPU what is flagged is found in the next backward.

        Raises:
            NonFiniteGradient: as :meth:`_conclude`.
        """
        if bucket.look is not None and not sending.is_hooked:
            self._is_flagged |= bucket.look.is_suspicious
            for rank, slots in bucket.look.found.items():
                # Flags lie behind the gradients, and no rank's are infinite.
                bad = {sending.name_of(bucket, slot) for slot in slots if slot < len(bucket)}
                self._seen.setdefault(rank, set()).update(bad)
            self._unclear |= {sending.name_of(bucket, slot) for slot in bucket.look.unclear if slot < len(bucket)}
        elif bucket.flat.device.type != "cpu":
            self._read_later(_doubt(bucket.values) if sending.is_hooked else flags, of_this=True)
        else:  # (What a comm hook returns need not be finite, whatever it was given.)
            self._is_flagged |= flags.item() != 0 or (sending.is_hooked and not is_finite(bucket.values))
        if bucket.is_last:
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
        """**Collective** if a gradient was flagged. Note what to look at in front of the optimizer's step.

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
        """Note an average that was not looked at: in front of the optimizer's step it is."""
        self._refuse_reached(lambda: whoami)
        self._found, self._perhaps, self._whoami = {}, [], whoami
        self._is_suspect = self._is_counted = False
        alert(self)

    def _read_later(self, flag: Tensor, *, of_this: bool) -> None:
        """Read a flag that is on a GPU at the end of the next backward; ``of_this``: one is under way."""
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self._unread.append(_Unread(flag, is_older=not of_this))

    def _refuse_reached(self, whoami: Callable[[], str]) -> None:
        """Raise if an earlier average was not finite, and parameters are not either."""
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

    # In front of an optimizer's step ---------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Leave the step out if the gradients are not finite.

        Raises:
            NonFiniteGradient: too many steps in a row were; on all ranks.
        """
        if getattr(optimizer, "found_inf", None) is not None:
            return  # a GradScaler has looked, and a fused optimizer leaves the step out by itself
        mine = [param for param in params_of(optimizer) if id(param) in self._names and param.grad is not None]
        if not mine:
            return
        if not all(param.is_cpu for param in mine):
            if not self._unread:  # else each bucket has been looked at
                self._read_later(_doubts(_dense(mine)), of_this=False)
            return
        if _are_sound(mine):
            self._in_a_row = 0
            return
        bad = [self._names[id(param)] for param in mine if any(not is_finite(grad) for grad in _dense([param]))]
        if bad:
            self._leave_out(optimizer, bad)

    def _leave_out(self, optimizer: Optimizer, bad: Sequence[str]) -> None:
        found = self._found or ({self._rank: [*bad]} if self._world_size == 1 else {})
        what = f"{self._whoami}: the averaged gradients are infinite or NaN"
        if found:
            what = f"{what}, because the gradients {words_for(found)} are"
        else:  # too large a sum, or a comm hook's doing, or slices, in which each rank has had several
            what = f"{what}, in {listed([*map(repr, bad)], most=5)}"
        self._in_a_row += not self._is_counted
        self._is_counted = True
        if self._in_a_row == MOST_SKIPPED:
            raise NonFiniteGradient(
                f"{what}. That was the {MOST_SKIPPED}th step in a row to be left out, so training stops here. Look at "
                "the batches and the loss, go back to a checkpoint, or lower the learning rate"
            )
        self._is_suspect = False  # it reaches nothing
        leave_out(optimizer)
        if self._rank in (0, *found):  # the others' warnings would be the same
            callsite.warn(
                f"{what}. This step of {type(optimizer).__name__} was left out on every rank: neither parameters nor "
                "the optimizer's state have changed. check_finite= of lockstep.replicate and DistributedDataParallel "
                f"says what else can be done{self._whether_rank_0()}",
                RuntimeWarning,
            )


def _not_finite(params: Iterable[Parameter]) -> set[int]:
    """Return the ids of those that are not finite."""
    return {id(param) for param in params if not is_finite(param.detach())}


def _dense(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the values in the parameters' gradients."""
    grads = [param.grad.detach() for param in params if param.grad is not None]
    return [grad if grad.layout == torch.strided else grad._values() for grad in grads]


def _are_sound(params: Iterable[Tensor]) -> bool:
    """Return whether the parameters' gradients, on a CPU, are finite for certain. Called in each step of a rank that is
    alone, so it does no more than it must: small gradients are joined, which takes less than to add up each of them."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for grad in [param.grad for param in params]:
        assert grad is not None  # (for the type checker)
        values = grad if grad.layout is torch.strided else grad._values()
        if values.numel() < SMALL:
            small.setdefault(values.dtype, []).append(values.flatten())
        elif not cmath.isfinite(total_of(values).item()):
            return False
    return all(cmath.isfinite(total_of(torch.cat(those)).item()) for those in small.values())


def _doubt(values: Tensor) -> Tensor:
    """Return a number that is not 0 if any of ``values`` may not be finite (0-dim); waits for nothing."""
    total = total_of(values)
    total = torch.view_as_real(total).sum() if total.is_complex() else total
    return (total * 0).nan_to_num(nan=1.0)


def _doubts(grads: Sequence[Tensor]) -> Tensor:
    """Do the same for several (0-dim, float32, on the first one's device)."""
    small = [grad.reshape(-1) for grad in grads if grad.numel() < SMALL]
    kinds = dict.fromkeys((grad.dtype, grad.device) for grad in small)
    joined = [torch.cat([grad for grad in small if (grad.dtype, grad.device) == kind]) for kind in kinds]
    doubts = [_doubt(each) for each in (*joined, *(grad for grad in grads if grad.numel() >= SMALL))]
    if len(doubts) == 1:
        return doubts[0]
    return torch.stack([each.to(doubts[0].device, torch.float32) for each in doubts]).sum()


class _Unread:
    """A flag on its way from a GPU to the host."""

    def __init__(self, flag: Tensor, *, is_older: bool) -> None:
        #: Whether it is not of the backward under way.
        self.is_older = is_older
        copy = torch.empty(flag.shape, dtype=flag.dtype, device="cpu", pin_memory=True)
        self._flag = copy.copy_(flag.detach(), non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def read(self) -> bool:
        """Return whether it is set."""
        self._event.synchronize()  # the work of an earlier step
        return bool(self._flag.any())
