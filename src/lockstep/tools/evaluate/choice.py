"""Which checkpoint is evaluated next, and which were removed before they could be. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from lockstep.checkpoint import folders
from lockstep.checkpoint.evaluations import Evaluated


@dataclass(frozen=True)
class Candidate:
    """A checkpoint in the run's folder."""

    #: The name of its folder, and its identity.
    name: str
    digest: str

    @property
    def age(self) -> tuple[int, int]:
        """Its step, and the number of the save at that step."""
        return folders.age(PurePath(self.name))


def next_one(there: Iterable[Candidate], results: Mapping[tuple[str, str], Evaluated]) -> Candidate | None:
    """Return the checkpoint to evaluate next; None: all have been.

    The newest comes first: what is wanted soonest is how training does now. One that failed before is tried again once
    nothing else is left to do.

    Args:
        there: the complete checkpoints in the run's folder.
        results: what is known, by name and identity.
    """
    waiting = [each for each in there if (known := results.get((each.name, each.digest))) is None or not known.is_final]
    return max(waiting, key=lambda each: ((each.name, each.digest) not in results, each.age), default=None)


def left_out(
    known: Iterable[Candidate],
    there: Collection[Candidate],
    results: Mapping[tuple[str, str], Evaluated],
    *,
    after: tuple[int, int],
) -> list[Candidate]:
    """Return the checkpoints that were removed before they were evaluated, or tried again, oldest first.

    Args:
        known: those that this evaluator has seen, and those that the run says it has saved.
        there: those in the run's folder.
        results: what is known, by name and identity.
        after: only those that are younger than this (:attr:`Candidate.age`): it was there before.
    """
    gone = (each for each in known if each not in there and each.age > after)
    waiting = (each for each in gone if (last := results.get((each.name, each.digest))) is None or not last.is_final)
    return sorted(waiting, key=lambda each: each.age)
