"""Where two recorded runs part: after which step they still held the same bits, and whether it was the data.

Note [Where runs part]
~~~~~~~~~~~~~~~~~~~~~~
Two records have digests after some common steps (Note [Digest chain] in ``ddp/digest_chain.py``). The runs part between
two of these: at one the parameters are still equal, at the next they differ. Both records tell the samples of each step
in between (samples.py), so the first step with other samples is known. Other samples make other parameters one step
later, so they are the reason if there are any; if there are none, the runs differ in something else that takes part in
a step, of which the records know a little.

Where the optimizers' state differs at a step and the parameters don't yet, the state came first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.codes import CodedEnum
from lockstep.errors import LockstepError
from lockstep.runs.digests import Held, digests_of
from lockstep.runs.history import Run
from lockstep.text import joined
from lockstep.tools.again import samples
from lockstep.tools.again.samples import RecordedBatch, UnknownBatch

#: The most steps between two digests whose samples are compared.
_MOST = 4096


class NothingInCommon(LockstepError):
    """Two runs have no step of which both records have digests."""

    code = "nothing-in-common"


class Parting(CodedEnum):
    """What differs first between two runs."""

    NOTHING = "nothing", "runs-equal"
    DATA = "data", "runs-part-data"
    STATE = "the optimizer's state", "runs-part-state"
    PARAMETERS = "parameters", "runs-part-parameters"


@dataclass(frozen=True)
class Bisection:
    """Where two runs part."""

    a: Run
    b: Run
    kind: Parting
    #: Steps after which both have digests.
    compared: int
    #: The last of them at which all was equal, before they part; None if there is none.
    equal_at: int | None
    #: The first after which something differed; None: nothing does.
    differ_at: int | None
    #: The names of what differed then: parameters, the optimizer's state.
    differing: list[str]
    #: The first step with other samples, of those since ``equal_at``; None: none is known.
    other_samples: int | None
    #: The number of steps since ``equal_at`` of which the samples are not known of both.
    unknown_samples: int
    #: The differences between the runs that the records show, in words.
    differences: list[str]

    def describe(self) -> str:
        """Return the result for people."""
        lines = [f"A: {self.a.name}: {self.a.program}", f"B: {self.b.name}: {self.b.program}"]
        if self.differ_at is None:
            lines.append(f"equal in all {self.compared:,} steps that both have digests of, to step {self.equal_at:,}")
            return "\n".join(lines)
        since = "not equal from the first step on that both have digests of" if self.equal_at is None else ""
        lines.append(since or f"equal to step {self.equal_at:,}")
        if self.other_samples is not None:
            lines.append(
                f"step {self.other_samples:,}: other samples (lockstep runs batch --step {self.other_samples})"
            )
        lines.append(f"after step {self.differ_at:,}: {joined(self.differing)} differ")
        if self.other_samples is None:
            lines.append(self._on_samples())
        lines += [f"different in the records: {each}" for each in self.differences]
        return "\n".join(lines)

    def _on_samples(self) -> str:
        assert self.differ_at is not None
        first = (self.equal_at or 0) + 1
        which = f"step {first:,}" if first == self.differ_at else f"steps {first:,} to {self.differ_at:,}"
        if self.unknown_samples:
            return f"the samples of {self.unknown_samples} of the {which} are not known of both runs"
        return (
            f"the samples of {which} were the same: what the dataset returned for them, the program or the machine "
            "differs"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON's types."""
        return {
            **{
                name: {"name": run.name, "folder": run.path.parent, "program": run.about["program"]}
                for name, run in (("a", self.a), ("b", self.b))
            },
            "code": self.kind.code,
            "compared_steps": self.compared,
            "equal_at": self.equal_at,
            "differ_at": self.differ_at,
            "differing": self.differing,
            "other_samples": self.other_samples,
            "unknown_samples": self.unknown_samples,
            "differences": self.differences,
        }


def bisect(a: Run, b: Run) -> Bisection:
    """Return where two runs part; see Note [Where runs part].

    Raises:
        NothingInCommon: there are no digests of one step of both.
    """
    first, second = digests_of(a.about["starts"]), digests_of(b.about["starts"])
    common = sorted(first.keys() & second.keys())
    if not common:
        raise NothingInCommon(_why_nothing(a, b, first, second))
    equal_at: int | None = None
    for step in common:
        differing = _differing(first[step], second[step])
        if differing:
            other, unknown = _first_other(a, b, range((equal_at or 0) + 1, step + 1))
            kind = (
                Parting.DATA
                if other is not None
                else Parting.STATE
                if Parting.PARAMETERS.value not in differing
                else Parting.PARAMETERS
            )
            found = [*_differences(a, b)]
            return Bisection(a, b, kind, len(common), equal_at, step, differing, other, unknown, found)
        equal_at = step
    return Bisection(a, b, Parting.NOTHING, len(common), equal_at, None, [], None, 0, [*_differences(a, b)])


def _differing(first: Held, second: Held) -> list[str]:
    found = []
    if first.parameters != second.parameters:
        found.append(Parting.PARAMETERS.value)
    if first.state != second.state:
        found.append(Parting.STATE.value)
    return found


def _first_other(a: Run, b: Run, steps: Iterable[int]) -> tuple[int | None, int]:
    """Return the first step with other samples, and of how many before it the samples are not known."""
    unknown = 0
    for place, step in enumerate(steps):
        pair = None if place >= _MOST else _samples(a, step), _samples(b, step)
        if None in pair:
            unknown += 1
        elif pair[0] != pair[1]:
            return step, unknown
    return None, unknown


def _samples(run: Run, step: int) -> list[tuple[object, ...]] | None:
    """Return what must be equal for a step to have the same samples; None: it is not known."""
    try:
        wanted = samples.ask_step(run, step).wanted
        return [_identity(batch) for each in wanted for batch in samples.compute(each)]
    except UnknownBatch:
        return None


def _identity(batch: RecordedBatch) -> tuple[object, ...]:
    """Return the indices of a batch with their positions, and the epoch: random numbers of samples depend on both."""
    placed = sorted(
        zip(
            (position for part in batch.parts for position in part.positions),
            (index for part in batch.parts for index in part.indices),
            strict=True,
        )
    )
    return batch.loader, batch.epoch, tuple(placed)


def _differences(a: Run, b: Run) -> Iterator[str]:
    """Yield what the records know to be different."""
    for name, one, other in _facts(a, b):
        if one != other:
            yield f"{name}: {one} in A, {other} in B"


def _facts(a: Run, b: Run) -> Iterator[tuple[str, object, object]]:
    yield "the program and its arguments", a.program, b.program
    yield "ranks", a.world_size, b.world_size
    yield "seeds of the loaders", _of_loaders(a, "seed"), _of_loaders(b, "seed")
    yield "slices of the loaders", _of_loaders(a, "slices"), _of_loaders(b, "slices")
    yield "lockstep", a.about.get("lockstep"), b.about.get("lockstep")
    one, other = (run.about.get("environment") or {} for run in (a, b))
    for name in ("python", "torch", "processor", "gpus", "variables"):
        yield name, one.get(name), other.get(name)


def _of_loaders(run: Run, setting: str) -> str:
    found = [each.get(setting) for start in run.about["starts"] for each in start.get("loaders", ())]
    return ", ".join(dict.fromkeys("none" if each is None else str(each) for each in found)) or "none"


def _why_nothing(a: Run, b: Run, first: dict[int, Held], second: dict[int, Held]) -> str:
    for run, digests in ((a, first), (b, second)):
        if not digests:
            return (
                f"{run.name} has no digests: they are recorded of models that lockstep.replicate has replicated, from "
                "the second step on, in runs of this version of lockstep or a later one"
            )
    return (
        f"{a.name} has digests of the steps {min(first):,} to {max(first):,} and {b.name} of {min(second):,} to "
        f"{max(second):,}, and of none both: name runs that took the same steps"
    )
