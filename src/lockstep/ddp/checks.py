"""The checks of one replica while it trains: gradients are finite and averaged, and replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from lockstep import accelerator, callsite
from lockstep.comm.labels import compares_labels
from lockstep.ddp.batches import BatchFlags
from lockstep.ddp.digest_chain import DigestedReplica
from lockstep.ddp.drift import DriftCheck
from lockstep.ddp.finite import FiniteCheck, NanBuffers
from lockstep.ddp.guard import StepGuard
from lockstep.ddp.hooks import Forward
from lockstep.ddp.kept_count import KeptCount
from lockstep.ddp.later import RankComparison, ReadLater
from lockstep.ddp.left_out import LeftOut
from lockstep.ddp.members import parameters_of
from lockstep.ddp.options import ReplicaOptions
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.rider import Rider
from lockstep.ddp.same_batches import InputLook, SameBatches
from lockstep.ddp.unaveraged import Unaveraged
from lockstep.job import flight
from lockstep.step.share import Items
from lockstep.step.slicing import SlicedStep
from lockstep.step.stepping import alerted
from lockstep.text import counted, listed


class GradientChecks:
    """The checks of one replica, as its options ask for them.

    Nothing is checked before :meth:`turn_to` and :meth:`look_at` are called.

    Args:
        group: the ranks that hold replicas.
        options: the replica's options.
        reducer: returns the current reducer.
    """

    def __init__(self, group: dist.ProcessGroup, options: ReplicaOptions, reducer: Callable[[], Reducer]) -> None:
        self._group, self._options, self._reducer = group, options, reducer
        self._world_size = dist.get_world_size(group)
        #: True if the ranks' replicas are compared.
        self.compares = options.compares and self._world_size > 1
        #: Compares the replicas of all ranks from time to time; None if they are not compared.
        self.drift: DriftCheck | None = None
        #: The check of ``check_finite="step"``, before an optimizer's step; ``finite``: that of the other policies.
        self._guard: StepGuard | None = None
        self.finite: FiniteCheck | None = None
        #: Finds buffers that forwards make NaN.
        self._nan_buffers = NanBuffers()
        self._unaveraged: Unaveraged | None = None
        #: Has digests of the replica recorded; None: another rank's are, or there is no record.
        self._recorded: DigestedReplica | None = None
        self._later: ReadLater | None = None
        #: Those who look at what the model is given.
        self.looks: list[InputLook] = []
        tells = options.tells_same_batches and self._world_size > 1
        self._same_batches = SameBatches(group, self.looks) if tells else None
        #: True if a warning is due for parameters that no rank uses in the first averaged backward.
        self.warns_of_unused = not options.find_unused_parameters and dist.get_rank(group) == 0
        self._kept_count = KeptCount(f"rank {dist.get_rank(group)} of {self._world_size}")

    def turn_to(self, module: nn.Module) -> None:
        """Compare the parameters that ``module`` has now, record digests of them, and look at its buffers."""
        if flight.current.pages is not None and dist.get_rank() == 0:  # with a launcher, which keeps the record
            self._recorded = DigestedReplica(list(parameters_of(module)))
        if self._options.check_finite != "off":
            self._nan_buffers.turn_to(module)
        if self.compares:
            if self.drift is None:
                self.drift = DriftCheck(self._group, self._options.compared_within)
            self.drift.turn_to(list(parameters_of(module)))

    def look_at(self, params: Sequence[Parameter], names: Sequence[str]) -> None:
        """Look at the gradients of ``params`` from now on."""
        policy = self._options.check_finite
        if policy == "step":
            self._guard = self._guard or StepGuard(self._group, self._nan_buffers)
            self._guard.turn_to(params, names)
        else:
            self.finite = None if policy == "off" else FiniteCheck(policy, self._group, self._nan_buffers)
        if self._unaveraged is None and self.compares:
            self._unaveraged = Unaveraged(self._group, self._reducer)

    @property
    def in_sums(self) -> StepGuard | FiniteCheck | None:
        """Return the check that looks at gradients while they are averaged."""
        if self._guard is not None:
            return self._guard if self._world_size > 1 else None
        return self.finite

    @property
    def looks_at_sums(self) -> bool:
        """Return whether each rank's share of a sum is looked at while it is made; see ``comm/looks.py``."""
        return self._guard is not None

    @property
    def has_accumulated(self) -> bool:
        """Return whether a backward has ended without an average."""
        return self._unaveraged is not None and self._unaveraged.has_seen

    def riders(self, param: Parameter | None, *, batches: bool) -> list[Rider]:
        """Return the riders, which travel with the gradients.

        Args:
            param: a parameter of the last bucket, whose dtype the flags have; None: there is no bucket.
            batches: whether the ranks have batches that they can compare.
        """
        riders: list[Rider] = [] if self.in_sums is None else [self.in_sums]
        if self._world_size > 1 and param is not None and param.device.type == "cpu":
            if not compares_labels(self._group, param.device):
                riders.insert(0, LeftOut(self._group, param.dtype))
            if batches:
                riders.append(BatchFlags(self._group, param.dtype))
        elif self._world_size > 1 and param is not None:
            riders.insert(0, self._read_later(param, batches=batches))
        same = self._same_batches
        if self._world_size > 1 and param is not None and same is not None and not same.is_over:
            riders.append(same)
        return riders if self.drift is None else [*riders, self.drift]

    def _read_later(self, param: Parameter, *, batches: bool) -> ReadLater:
        """Return the comparisons for an accelerator: always the same, since one of their looks is still to be read."""
        if self._later is None:
            device = accelerator.with_index(param.device)
            compared: list[RankComparison] = [LeftOut(self._group, param.dtype, device)]
            if batches:
                compared.append(BatchFlags(self._group, param.dtype, device))
            self._later = ReadLater(compared, device)
        return self._later

    # In training ----------------------------------------------------------------------------------------------------

    def weighs(self, items: Items) -> None:
        """Note that a backward is weighed by a number of items that was given outside of a sharded loop."""
        self._kept_count.weighs(items)

    def backward_ended(self, forward: Forward, where: Callable[[], str]) -> None:
        """Note what to look at when an optimizer steps with these gradients; ``where`` describes them."""
        if forward.slice is not None:
            return
        if self._unaveraged is not None and (alerted or not forward.sync):
            self._unaveraged.backward_ended(is_averaged=forward.sync)
        if self._guard is not None and self._world_size == 1:
            self._guard.averaged_unseen(where())

    def warn_of_unused(self, names: Sequence[str]) -> None:
        """Warn once of the parameters that no rank has used in the first averaged backward."""
        self.warns_of_unused = False
        if names:
            callsite.warn(
                f"no rank used {counted(len(names), 'parameter')} in the first backward: "
                f"{listed([*map(repr, names)], most=10)}. The other parameters' gradients are not affected. If this is "
                "intended, find_unused_parameters=True silences this warning"
            )

    def sliced_step_ended(self, step: SlicedStep) -> None:
        """**Collective** in some steps. Look at the averages in front of the optimizer's step; compare the replicas.

        Raises:
            ReplicaMismatch: they differ.
        """
        if self._guard is not None:
            self._guard.averaged_unseen(step.whoami())
        mismatch = None if self.drift is None else self.drift.compare_alone()
        if mismatch is not None:
            raise mismatch

    def expect_differences(self) -> None:
        """Stop comparing the replicas: they are trained in a way that need not keep them equal."""
        if self.drift is not None:
            self.drift.stop()  # see Note [A rank's own]
        if self._unaveraged is not None:
            self._unaveraged.stop()

    def stop(self) -> None:
        """Stop all checks."""
        if self._guard is not None:
            self._guard.close()
        if self._unaveraged is not None:
            self._unaveraged.stop()
        self._kept_count.stop()
        self._recorded = None
