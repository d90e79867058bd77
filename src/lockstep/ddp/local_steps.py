"""Rounds of local steps: training of replicas whose link is too slow to average every gradient.

The scheme is DiLoCo's (A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv 2311.08105). Each rank takes ``every`` optimizer steps with its own gradients. Then its way, the difference
between the parameters that all ranks had at the beginning of the round (the anchors) and its own, is averaged over the
ranks, and an outer optimizer takes this average as a gradient of the anchors. All ranks begin the next round from
there.

Note [Overlapped rounds]
~~~~~~~~~~~~~~~~~~~~~~~~
With ``overlap`` a rank goes on training from its own parameters while the average is under way, and the result of a
round is applied after a quarter of the steps of the next one: always after the same step, and not when it happens to
arrive, so that a run can be repeated. (Later would hide more of the exchange, but the steps until then see parameters
that lack what the others have learned.) By then the rank has moved on from p, the parameters that it sent, to q. It
continues from a + (q - p), where a are the new anchors: its newest steps are kept, as if they had been taken from the
anchors, and their progress is part of the next round's way. (Streaming DiLoCo, arXiv 2501.18512, takes a weighted mean
of a and q; that undoes some of either, and has one more number to choose.)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lockstep.comm import apart
from lockstep.comm.exchange import all_gather_records, group_device
from lockstep.ddp.compression import Compression
from lockstep.ddp.outer import OuterExchange, RoundOutcome, Standing
from lockstep.errors import CheckpointMismatch, ReplicaMismatch

#: Makes the outer optimizer of the anchors.
MakeOuter = Callable[[list[Parameter]], torch.optim.Optimizer]


#: Elements of anchors on a device that are copied together.
_TOGETHER = 1 << 22


@dataclass(frozen=True)
class LocalSteps:
    """Train replicas apart for some steps, then average the changes of their parameters: for links of some Mbit/s.

    For ``lockstep.replicate(model, sync=lockstep.LocalSteps())``. A step is a backward outside ``no_sync``, with
    whatever optimizers and scalers step after it. After ``every`` of them the round ends, before the next training
    forward of the model: the movement of the parameters is averaged over the ranks, and the outer optimizer steps with
    it. docs/local_steps.md says what that means for a training script.

    Args:
        every: steps of a round; the same on all ranks.
        outer: takes a list of parameters and returns a torch optimizer of them; the same on all ranks. None: SGD with
            Nesterov's momentum of 0.9 and a learning rate of 0.7.
        compress: "int8" sends a byte for each parameter, and keeps the rounding error for the next round
            (see Note [Error feedback] in ``ddp/compression.py``); None sends float32.
        overlap: continue training while the average is under way. Its result is applied a quarter of a round later; see
            Note [Overlapped rounds].

    Raises:
        TypeError, ValueError: an argument is of another type, or out of range.
    """

    every: int = 32
    outer: MakeOuter | None = None
    compress: Compression | None = "int8"
    overlap: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"every={self.every!r}: expected a number of steps")
        if self.every < 1:
            raise ValueError(f"every={self.every}: expected at least one step")
        if self.outer is not None and not callable(self.outer):
            raise TypeError(
                f"outer={type(self.outer).__name__}: expected a callable that makes an optimizer of a list of "
                "parameters, such as lambda params: torch.optim.SGD(params, lr=0.7)"
            )
        if self.compress is not None and self.compress not in get_args(Compression):
            raise ValueError(f"compress={self.compress!r}: expected 'int8' or None")
        if not isinstance(self.overlap, bool):
            raise TypeError(f"overlap={self.overlap!r}: expected True or False")

    def _words(self) -> str:
        """Return the options that must match on every rank; the outer optimizer is compared once it is made."""
        return f"LocalSteps(every={self.every}, compress={self.compress!r}, overlap={self.overlap})"

    def _make_outer(self, anchors: list[Parameter]) -> torch.optim.Optimizer:
        """Return the outer optimizer of ``anchors``.

        Raises:
            TypeError: ``outer`` returned something else.
            ValueError: the optimizer does not have exactly the parameters ``anchors``.
        """
        if self.outer is None:
            return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
        outer = self.outer(anchors)
        if not isinstance(outer, torch.optim.Optimizer):
            raise TypeError(f"LocalSteps: outer returned a {type(outer).__name__}: expected a torch.optim.Optimizer")
        taken = [id(param) for group in outer.param_groups for param in group["params"]]
        if sorted(taken) != sorted(map(id, anchors)):
            raise ValueError(
                f"LocalSteps: the optimizer that outer returned has {len(taken)} parameters, and was given "
                f"{len(anchors)}: give it exactly those"
            )
        return outer


class LocalRounds:
    """One rank's rounds: its anchors, its way from there, and the outer optimizer.

    Args:
        rule: the options that the user chose.
        params: the parameters that are trained; equal on all ranks now.
        names: the parameters' names.
        group: the ranks.
        channel: a process group of the same ranks for messages that are under way during training; ``group`` without
            overlap.
    """

    def __init__(
        self,
        rule: LocalSteps,
        params: Sequence[Parameter],
        names: Sequence[str],
        *,
        group: dist.ProcessGroup,
        channel: dist.ProcessGroup,
    ) -> None:
        self.rule = rule
        self._params, self._names, self._group, self._channel = list(params), list(names), group, channel
        self._anchors = [_anchor_of(param) for param in params]
        #: See :class:`~lockstep.step.local_training.LocalTraining`.
        self.outer = rule._make_outer(self._anchors)
        apart.leave_alone(self.outer)
        self._refuse_other_outer()
        self._exchange = self._new_exchange()
        #: Number of steps of this round that this rank has taken, and whether any of them had samples.
        self.steps, self._counts = 0, False
        #: Number of exchanges begun.
        self.rounds = 0
        #: Copies of the parameters when the exchange under way began; None if none is under way.
        self._left: list[Tensor] | None = None
        #: The parameters' versions when they were looked at for loaded values in this round; None: they were not yet.
        self._taken: list[int] | None = None

    def _refuse_other_outer(self) -> None:
        """**Collective.** Raise on all ranks if their outer optimizers differ."""
        told = all_gather_records(_describe(self.outer), self._group)
        for rank, record in enumerate(told):
            if record != told[0]:
                whoami = f"rank {dist.get_rank(self._group)} of {len(told)}"
                raise ReplicaMismatch(
                    f"{whoami}: the outer optimizers differ: rank 0 has {told[0]}, rank {rank} has {record}. Nothing "
                    "was sent. Make the same on every rank"
                )

    def _new_exchange(self) -> OuterExchange:
        return OuterExchange(
            self._channel,
            group_device(self._channel),
            length=sum(anchor.numel() for anchor in self._anchors),
            compression=self.rule.compress,
            names=self._names,
        )

    # During a round -------------------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Return whether the steps of this round are done."""
        return self.steps >= self.rule.every

    @property
    def sent(self) -> int:
        """Return the bytes that this rank has sent to others for the averages so far."""
        return self._exchange.sent

    def count_step(self, *, has_samples: bool) -> None:
        """Count a step; one without samples makes the way of this rank no part of the average."""
        self.steps += 1
        self._counts |= has_samples

    def between_steps(self) -> RoundOutcome | None:
        """**Collective** if something is due: end the round, or with overlap continue to end the last one.

        Returns:
            The outcome if the round has ended here.
        """
        if self._left is not None:
            self._exchange.advance()
            if self.steps >= max(1, self.rule.every // 4):
                self.apply_pending()
        if not self.is_due:
            return None
        if not self.rule.overlap:
            return self.end()
        self.apply_pending()
        self._left = [param.detach().clone() for param in self._params]
        self._begin(final=False)
        return None

    @torch.no_grad()
    def apply_pending(self) -> None:
        """**Collective** if an exchange is under way: wait for it, and continue from the anchors that it brings."""
        left, self._left = self._left, None
        if left is None or not self._exchange.is_under_way:  # (a round that failed brings nothing)
            return
        outcome = self._exchange.finish()
        self._step_outer(outcome)
        if outcome.has_steps:
            for param, anchor, before in zip(self._params, self._anchors, left, strict=True):
                param.copy_(anchor + (param.to(anchor.dtype) - before.to(anchor.dtype)))

    @torch.no_grad()
    def end(self, *, final: bool = False) -> RoundOutcome:
        """**Collective.** End the round here: all ranks continue from the new anchors.

        Args:
            final: whether this rank takes no further step before all ranks have ended their rounds.
        """
        self.apply_pending()
        self.adopt_loaded()
        self._begin(final=final)
        outcome = self._exchange.finish()
        self._step_outer(outcome)
        if outcome.has_steps:  # otherwise the model may hold what was loaded
            for param, anchor in zip(self._params, self._anchors, strict=True):
                param.copy_(anchor)
        return outcome

    @torch.no_grad()
    def _begin(self, *, final: bool) -> None:
        values, ends = self._exchange.zeros(), 0
        for run in self._runs():
            ways = [(self._anchors[at] - self._params[at].to(self._anchors[at].dtype)).reshape(-1) for at in run]
            start, ends = ends, ends + sum(map(torch.numel, ways))
            values[start:ends].copy_(ways[0] if len(ways) == 1 else torch.cat(ways))
        parts = values[:ends].split([anchor.numel() for anchor in self._anchors])
        finite = torch.stack([torch.isfinite(part).all() for part in parts]).tolist() if parts else []
        bad = finite.index(False) if False in finite else -1
        if not self._counts:
            values.zero_()  # where momentum or a decay has moved the parameters without samples
        values += self._exchange.error
        counts, mask = int(self._counts), self._mask()
        standing = Standing(self.rounds, self.steps, counts, int(final), bad, _bits(self._anchors), mask)
        self.steps, self._counts, self._taken, self.rounds = 0, False, None, self.rounds + 1
        self._exchange.begin(values, standing)

    def _step_outer(self, outcome: RoundOutcome) -> None:
        """Let the outer optimizer step, unless no rank has trained on samples."""
        if outcome.average is None:
            return
        ends = 0
        for run in self._runs():
            sizes = [self._anchors[at].numel() for at in run]
            start, ends = ends, ends + sum(sizes)
            ways = outcome.average[start:ends].to(self._anchors[run[0]].device).split(sizes)
            for at, way in zip(run, ways, strict=True):
                anchor = self._anchors[at]
                # A parameter that is frozen now has no gradient, so neither momentum nor decay moves it.
                anchor.grad = way.view_as(anchor).to(anchor.dtype) if self._params[at].requires_grad else None
        self.outer.step()
        self.outer.zero_grad()

    def _runs(self) -> Iterator[range]:
        """Yield the positions of neighbours that go to another device in one copy, for which their own is waited for
        once: of one device and dtype, and not so many that a second copy of them matters. On the CPU each is alone."""
        first, elements = 0, 0
        for at, anchor in enumerate(self._anchors):
            before = self._anchors[first]
            is_other = (anchor.device, anchor.dtype) != (before.device, before.dtype)
            if at > first and (is_other or anchor.is_cpu or elements + anchor.numel() > _TOGETHER):
                yield range(first, at)
                first, elements = at, 0
            elements += anchor.numel()
        if self._anchors:
            yield range(first, len(self._anchors))

    def _mask(self) -> int:
        return zlib.crc32(bytes(param.requires_grad for param in self._params))

    # Changes from outside -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt_loaded(self) -> None:
        """Make values that were loaded into the model between two rounds the anchors, instead of a part of the way.

        To be called before the first step of a round. The values themselves are taken, once in a round: versions do not
        tell of a ``param.data.copy_(...)``.
        """
        if self.steps or self._left is not None:
            return
        versions = [param._version for param in self._params]
        if versions == self._taken:
            return
        self._taken = versions
        for param, anchor in zip(self._params, self._anchors, strict=True):
            if param.dtype == anchor.dtype:
                anchor.copy_(param)
            else:  # where nothing was loaded the anchor may have more digits
                anchor.copy_(torch.where(param == anchor.to(param.dtype), anchor, param.to(anchor.dtype)))

    def extend(self, params: Sequence[Parameter], names: Sequence[str]) -> None:
        """**Collective.** Train more parameters: those of ``params`` that were frozen before."""
        self.apply_pending()
        known = {id(param) for param in self._params}
        fresh = [(param, name) for param, name in zip(params, names, strict=True) if id(param) not in known]
        if not fresh:
            return
        anchors = [_anchor_of(param) for param, _ in fresh]
        self.outer.add_param_group({"params": anchors})
        error, sent = self._exchange.error[: self._length()], self.sent
        self._params += [param for param, _ in fresh]
        self._names += [name for _, name in fresh]
        self._anchors += anchors
        self._exchange = self._new_exchange()
        self._exchange.error[: len(error)] = error
        self._exchange.sent = sent
        self._taken = None

    def _length(self) -> int:
        return sum(anchor.numel() for anchor in self._anchors)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def common_state(self) -> dict[str, Any]:
        """Return the anchors that hold more digits than their parameters, by name."""
        pairs = zip(self._names, self._params, self._anchors, strict=True)
        return {"anchors": {name: anchor.detach() for name, param, anchor in pairs if param.dtype != anchor.dtype}}

    def own_state(self) -> dict[str, Any]:
        """Return this rank's error, which it has still to send."""
        return {"error": self._exchange.error[: self._length()]}

    @torch.no_grad()
    def load_state(self, common: Mapping[str, Any], owns: Sequence[Mapping[str, Any]]) -> None:
        """Resume; see :class:`~lockstep.step.local_training.LocalTraining`.

        If the number of ranks has changed, each takes over the mean of the saved errors, so the next average has them
        all.
        """
        if self._left is not None:
            self._exchange.discard()
        anchors: Mapping[str, Tensor] = common.get("anchors", {})
        for name, param, anchor in zip(self._names, self._params, self._anchors, strict=True):
            anchor.copy_(anchors.get(name, param))
        errors = [own["error"] for own in owns]
        rank, length = dist.get_rank(self._group), self._length()
        if any(error.shape != (length,) for error in errors):
            raise CheckpointMismatch(
                f"the checkpoint's rounds are of {errors[0].numel()} parameter values, and this run trains {length}: "
                "freeze the same parameters before restore()"
            )
        error = self._exchange.zeros()
        if len(errors) == dist.get_world_size(self._group):
            error[:length] = errors[rank]
        elif errors:
            error[:length] = torch.stack(errors).mean(dim=0)
        self._exchange.error = error
        self._left, self.steps, self._counts, self._taken = None, 0, False, None


def _anchor_of(param: Parameter) -> Parameter:
    """Return a copy of ``param`` to accumulate in, in float32 at least."""
    dtype = torch.promote_types(param.dtype, torch.float32)
    return Parameter(param.detach().to(dtype, copy=True))


def _bits(anchors: Sequence[Tensor]) -> int:
    """Return a sum over the bits of tensors, which differs if the tensors do, but for a rare accident."""
    kinds = {4: torch.int32, 8: torch.int64}
    sums = [anchor.detach().contiguous().view(kinds[anchor.element_size()]).sum() for anchor in anchors]
    return int(torch.stack([each.to(sums[0].device) for each in sums]).sum()) if sums else 0


def _describe(optimizer: torch.optim.Optimizer) -> str:
    groups = [
        {key: value for key, value in sorted(group.items()) if key != "params"} for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__} with {groups}"
