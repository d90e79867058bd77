"""Replay a step of a recorded run in one process; see Note [A step replayed] in replayed.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep import machine
from lockstep.runs.history import Run
from lockstep.text import counted, listed, which_ranks
from lockstep.tools.again import program, samples
from lockstep.tools.again.samples import UnknownBatch

#: Gradients that are shown, the largest.
_LARGEST = 5
#: The differences between a global batch on one process and its parts on several ranks.
_UP_TO = "rounding and the random numbers that each rank draws (dropout)"


@dataclass(frozen=True)
class Replay:
    """A step of a run, computed once more."""

    run: Run
    step: int
    #: The ranks of the run in that step, and the one whose part was computed; None: the whole batch was.
    world_size: int
    rank: int | None
    #: True if the run cut its batches into slices.
    in_slices: bool
    #: The answer of replayed.py.
    told: Mapping[str, Any]

    @property
    def exactness(self) -> str:
        """How far what was computed is what the ranks had computed, in words."""
        resumed = self.told["resumed_from"]
        since = "from the beginning" if resumed is None else f"from the checkpoint of step {resumed:,}"
        ranks = counted(self.world_size, "rank")
        if self.in_slices:
            return f"{since}, in slices: bit by bit what {ranks} did, on a machine of the same kind"
        if self.world_size == 1:
            return f"{since}, on one rank as the run"
        if self.rank is None:
            return f"{since}, on the whole global batch: what {ranks} did up to {_UP_TO} (without slices=)"
        others = which_ranks(rank for rank in range(self.world_size) if rank != self.rank)
        missing = f"the gradients of {others} are missing, so those here are rank {self.rank}'s own, before the average"
        if (resumed or 0) == self.step - 1:
            own = f"rank {self.rank}'s own forward and backward, with the same bits on a machine of the same kind"
            return f"{since}, the step before: {own}; {missing}"
        return (
            f"{since}; the steps between on the whole global batch, which is what {ranks} did up to {_UP_TO}, and this "
            f"one on rank {self.rank}'s part; {missing}"
        )

    def describe(self) -> str:
        """Return the result for people."""
        return f"{self.run.name}: {self.run.program}, step {self.step:,}\n{self.exactness}\n{in_words(self.told)}"

    def to_json(self) -> dict[str, Any]:
        """Return the result in JSON's types."""
        return {
            "name": self.run.name,
            "folder": self.run.path.parent,
            "program": self.run.about["program"],
            "step": self.step,
            "ranks": self.world_size,
            "rank": self.rank,
            "in_slices": self.in_slices,
            "exactness": self.exactness,
            **self.told,
        }


def replay(run: Run, step: int, *, rank: int | None = None, debug: bool = False) -> Replay:
    """Run the program of a run up to a step, in one process.

    Args:
        run: the record.
        step: its number, from 1.
        rank: the rank whose part of the batch is computed in that step; None: the whole batch is.
        debug: open the debugger in the step.

    Raises:
        CannotRepeat: the program failed or ended before the step.
        UnknownBatch: the record does not tell how many ranks took the step.
        ValueError: there is no such step or rank.
    """
    question = samples.ask_step(run, step, rank=rank)
    wanted = question.wanted
    in_slices = any(each.settings["slices"] is not None for each in wanted)
    if rank is not None and any(each.why_program for each in wanted):
        raise UnknownBatch(f"--rank {rank}: {wanted[0].why_program}, so the part of a rank is not known before it runs")
    if rank is not None and not in_slices:
        for batch in (batch for each in wanted for batch in samples.compute(each)):
            if not any(part.indices for part in batch.parts):
                raise ValueError(f"--rank {rank}: it had no sample of batch {batch.batch} of epoch {batch.epoch}")
    world_size = wanted[0].world_size
    alone = rank if world_size > 1 and not in_slices else None
    asked = {
        "step": step,
        "rank": alone,
        "world_size": world_size,
        "debug": debug,
        "wanted": [asdict(each) for each in wanted],
    }
    threads = None if alone is None else machine.share_of_cores(_neighbours(run, question.start))
    told = program.ask(run, {"replay": asked}, interactive=debug, threads=threads)
    if rank is not None and in_slices:
        told = {**told, "findings": [*_of_rank(told["findings"], rank)]}
    return Replay(run, step, world_size, rank, in_slices, told)


def _neighbours(run: Run, number: int) -> int:
    """Return how many ranks a machine had in a start."""
    start = next(each for each in run.about["starts"] if each["number"] == number)
    return max((ranks for _, ranks in start.get("machines") or ()), default=int(start["world_size"]))


def in_words(told: Mapping[str, Any]) -> str:
    """Return what replayed.py has answered, for people."""
    lines = [
        f"batch {each['batch']:,} of epoch {each['epoch']:,} of loader {each['loader']}" for each in told["batches"]
    ]
    if told["losses"]:
        lines.append(f"loss: {listed([f'{loss:.6g}' for loss in told['losses']])}")
    if told["gradient_norm"] is not None:
        largest = sorted(told["gradients"], key=lambda each: _by_norm(each["norm"]), reverse=True)[:_LARGEST]
        names = ", ".join(f"{each['name']} {each['norm']:.4g}" for each in largest)
        lines.append(f"norm of the gradients: {told['gradient_norm']:.6g} (the largest: {names})")
    if told["at"]:
        lines.append(f"stopped at {told['at']}")
    if told["raised"]:
        lines.append(f"ended by {told['raised']}")
    lines += [_finding_in_words(each) for each in told["findings"]] or ["all values that were looked at are finite"]
    return "\n".join(lines)


def _by_norm(norm: float) -> float:
    return float("inf") if norm != norm else norm


def _finding_in_words(found: Mapping[str, Any]) -> str:
    words = f"NaN or infinite: {found['what']}, {found['numbers']:,} of {counted(found['of'], 'number')}"
    if not found["samples"]:
        return words
    return f"{words}: of {listed([_sample_in_words(each) for each in found['samples']])}"


def _sample_in_words(sample: Mapping[str, Any]) -> str:
    where = [f"position {sample['position']:,}"]
    where += [] if sample["slice"] is None else [f"slice {sample['slice']}"]
    where += [] if sample["rank"] is None else [f"rank {sample['rank']}"]
    return f"sample {sample['index']} ({', '.join(where)})"


def _of_rank(findings: list[dict[str, Any]], rank: int) -> Iterator[dict[str, Any]]:
    """Yield findings, of those with samples only the samples of one rank."""
    for found in findings:
        mine = [each for each in found["samples"] if each["rank"] in (rank, None)]
        if mine or not found["samples"]:
            yield {**found, "samples": mine}
