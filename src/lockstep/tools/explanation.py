"""Explain a run by its record: how it ended, where its time went, what failed, what to try next. Pure.

It also lists what the record does not tell, so that no reader takes silence for an answer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ReplicaMismatch, named
from lockstep.launch.policy import FailureKind
from lockstep.runs import reckoning
from lockstep.runs.history import Run, UnknownRun
from lockstep.runs.record import RunEnd
from lockstep.text import NEXT, as_clock, counted, first_line

#: The advice about a rank that failed, by what ended it.
_REMEDIES = {
    FailureKind.RAISED: "fix what the error of rank {rank} says: {error}",
    FailureKind.EXITED: "read why rank {rank} left with exit code {exit_code}: the program did so itself{log}",
    FailureKind.KILLED: "find out what sent {signal} to rank {rank}; --max-restarts 3 starts the ranks again after it",
    FailureKind.MEMORY: "take a smaller batch, fewer ranks or fewer workers of the loader: memory ran out",
    FailureKind.HUNG: "look at where rank {rank} stood: the report and all stacks are in hang-1 in the run's folder",
    FailureKind.STUCK: "look at the disk or the driver that rank {rank} waited for: it could not be killed",
}


@dataclass(frozen=True)
class Explanation:
    """What is known of a run."""

    run: Run
    #: Seconds, and optimizer steps of each rank; None: not known.
    seconds: float | None
    steps: int | None
    #: The result of :meth:`lockstep.job.summary.RunSummary.to_json`; None: not known.
    summary: dict[str, Any] | None
    #: The reasons why something is not known, a sentence each without its full stop.
    troubles: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run) -> Explanation:
        """Gather what a record tells. Damaged files are no error: what they would tell is missing."""
        seconds: float | None = None
        steps: int | None = None
        summary, troubles = None, []
        try:
            seconds, steps = run.seconds, run.steps
            summary = reckoning.summary_of(run)
        except (UnknownRun, AttributeError, KeyError, TypeError, ValueError) as error:
            troubles.append(f"steps and times: {named(error)}")
        return cls(run, seconds, steps, summary, tuple(troubles))

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The ranks that failed first, one for each start that ended by a failure, in order."""
        return [_failure(event) for event in self.run.events if event.get("kind") in ("failed", "lost")]

    @property
    def late(self) -> list[dict[str, Any]]:
        """The reports on ranks that held up the others, in order."""
        return [
            {
                "at_seconds": _seconds(event.get("at")),
                "code": event.get("code"),
                "over": event.get("over"),
                "until_seconds": _seconds(event.get("until")),
                "ranks": event.get("ranks"),
                "waiting": event.get("waiting"),
                "text": str(event.get("text", "")),
            }
            for event in self.run.events
            if event.get("kind") == "late"
        ]

    @property
    def checkpoint(self) -> dict[str, Any] | None:
        """The last checkpoint that was noted: its step and when that was; None: none was."""
        noted = self.run.about.get("checkpoints") or [None]
        last = noted[-1]
        return None if last is None else {"step": last.get("step"), "at_seconds": last.get("at")}

    def next(self) -> list[str]:
        """Return what to try next, a line each: commands, and lines to change."""
        run, end = self.run, self.run.end
        lines: list[str] = []
        if end is RunEnd.RUNNING:
            lines.append(f"lockstep runs top {run.reference} shows the ranks live")
            late = self.late[-1] if self.late else None
            if late is not None and late["over"] is False:
                rank = (late["ranks"] or [""])[0]
                lines.append(f"lockstep runs stack {run.reference} {rank}".rstrip() + " shows where the late rank is")
        elif end is RunEnd.UNKNOWN:
            lines.append(f"lockstep runs explain {run.reference} on {run.about.get('host')} tells how it ended")
        elif end is RunEnd.FAILED:
            lines += self._after_a_failure()
        if end in (RunEnd.SAVED, RunEnd.STOPPED, RunEnd.KILLED, RunEnd.FAILED):
            lines.append(self._resume())
        if end in (RunEnd.RUNNING, RunEnd.DONE) and self.summary is not None and self.summary.get("next"):
            lines.append(str(self.summary["next"]))
        return lines

    def _after_a_failure(self) -> list[str]:
        failure = self.failures[-1] if self.failures else None
        kinds = {each.code: each for each in FailureKind}
        if failure is None or failure["code"] not in kinds:
            return [f"read the messages at its end: {self.run.path.name} in {self.run.path.parent}"]
        log = f"; the end of its log, {failure['log']}, may say more" if failure["log"] else ""
        words = {**failure, "log": log, "error": _error_in_words(failure)}
        return [_REMEDIES[kinds[failure["code"]]].format(**words)]

    def _resume(self) -> str:
        last = self.checkpoint
        if last is None:
            return "run the same command again; this run noted no checkpoint to resume from"
        if self._replicas_differed:
            return (
                "then run the same command again: it passes over checkpoints in which a save saw the difference (the "
                f"newest is of step {last['step']:,} or later). If the error says that it began before those, go back "
                "further: lockstep checkpoint rewind FOLDER --to STEP"
            )
        return (
            "run the same command again: it resumes from the newest sound checkpoint, "
            f"of step {last['step']:,} or later"
        )

    @property
    def _replicas_differed(self) -> bool:
        last = self.failures[-1]["error"] if self.failures else None
        return last is not None and last.get("code") == ReplicaMismatch.code

    def unknown(self) -> list[str]:
        """Return what the record does not tell, a line each."""
        run, end = self.run, self.run.end
        lines = list(self.troubles)
        if end is RunEnd.RUNNING:
            lines.append("how it ends: this is the run so far")
        elif end is RunEnd.KILLED:
            lines.append("what ended it: its launcher left no record of its end, and its last second is not recorded")
        elif end is RunEnd.UNKNOWN:
            lines.append(f"how it ended, or whether it is still running: it was started on {run.about.get('host')}")
        if end is RunEnd.FAILED and not any(each["rank"] is not None for each in self.failures):
            lines.append("which rank failed: the record names none")
        lines += [
            f"at which step rank {each['rank']} failed: its steps are not counted"
            for each in self.failures
            if each["rank"] is not None and each["step"] is None
        ]
        if self.summary is None and not self.troubles:
            lines.append("where its time went: fewer than two steps were seen")
        last = run.about["starts"][-1] if run.about["starts"] else {}
        here, whole = len(last.get("ranks") or ()), int(last.get("world_size") or 0)
        if self.summary is not None and len(self.summary["ranks"]) < whole and here < whole:
            lines.append("what the ranks of other machines did: this record is that of one machine")
        if not run.about.get("checkpoints"):
            lines.append("whether it saved: no Checkpointer reported a checkpoint")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return all of it in JSON's types; times are seconds, sizes bytes."""
        run, about = self.run, self.run.about
        return {
            "name": run.name,
            "folder": str(run.path.parent),
            "program": about["program"],
            "directory": about.get("directory"),
            "host": about.get("host"),
            "lockstep": about.get("lockstep"),
            "began": run.began,
            "seconds": self.seconds,
            "end": {
                "code": run.end.code,
                "exit_code": about.get("exit_code"),
                "text": (about.get("end") or {}).get("text") or run.ending,
            },
            "ranks": run.world_size,
            "steps": self.steps,
            "verdict": None if self.summary is None else _verdict(self.summary),
            "useful": None if self.summary is None else self.summary.get("useful"),
            "starts": [
                {
                    "number": start.get("number"),
                    "at_seconds": start.get("at"),
                    "ranks": start.get("world_size"),
                    "steps": start.get("steps"),
                }
                for start in about["starts"]
            ],
            "failures": self.failures,
            "late": self.late,
            "checkpoints": {"noted": len(about.get("checkpoints", ())), "last": self.checkpoint},
            "nonfinite": [
                {"name": name, "first_step": each["first"], "since_step": each.get("since")}
                for name, each in about.get("nonfinite", {}).items()
            ],
            "left_out": _left_out(about.get("left_out")),
            "costs": _costs(about.get("costs")),
            "logs": about.get("logs", []),
            "next": self.next(),
            "unknown": self.unknown(),
        }

    def describe(self) -> str:
        """Return the explanation in words, some lines."""
        run, told = self.run, (self.run.about.get("end") or {}).get("text")
        took = "" if self.seconds is None else f", {as_clock(self.seconds)}"
        steps = "" if self.steps is None else f", {counted(self.steps, 'step')}"
        lines = [
            f"{run.name}: {run.program}",
            f"{run.ending}{took}{steps} on {counted(run.world_size, 'rank')}",
            *([told] if told else []),
            *self._verdict_in_words(),
            *(line for each in self.failures for line in _failure_in_words(each)),
            *self._restarts_in_words(),
            *self._late_in_words(),
        ]
        if self.checkpoint is not None:
            lines.append(f"last checkpoint that was noted: step {self.checkpoint['step']:,}")
        lines += run.remarks
        lines += [f"{NEXT} {line}" for line in self.next()]
        return "\n".join([*lines, *(f"not known: {line}" for line in self.unknown())])

    def _verdict_in_words(self) -> Iterator[str]:
        if self.summary is not None:
            yield from map(str, (self.summary["headline"], self.summary["verdict"], *self.summary["remarks"]))

    def _restarts_in_words(self) -> Iterator[str]:
        again = len(self.run.about["starts"]) - 1
        if again > 0:
            ranks = self.run.about["starts"][-1].get("world_size")
            yield f"{counted(again, 'restart')}, the last on {counted(int(ranks or 0), 'rank')}"

    def _late_in_words(self) -> Iterator[str]:
        reports = self.late
        for each in reports[:3]:
            until = "" if each["until_seconds"] is None else f"; over{_moment(each['until_seconds'])}"
            yield f"late{_moment(each['at_seconds'])}: {first_line(each['text'])}{until}"
        if len(reports) > 3:
            yield f"(and {len(reports) - 3} more reports of late ranks)"


def _failure(event: dict[str, Any]) -> dict[str, Any]:
    """Return what an event tells of a failure; what it does not tell is None."""
    found = event.get("failure") or {}
    return {
        "at_seconds": _seconds(event.get("at")),
        "code": found.get("code"),
        "rank": found.get("rank"),
        "step": found.get("step"),
        "exit_code": found.get("exit_code"),
        "signal": found.get("signal"),
        "error": found.get("error"),
        "log": found.get("log"),
        "restarted": event.get("again"),
        "text": str(event.get("text", "")),
    }


def _error_in_words(failure: dict[str, Any]) -> str:
    error = failure["error"]
    if not error:
        return first_line(failure["text"])
    return f"{error.get('type')}: {first_line(error.get('message'))}" if error.get("message") else str(error["type"])


def _failure_in_words(failure: dict[str, Any]) -> list[str]:
    if failure["rank"] is None:
        return [first_line(failure["text"])]
    where = "" if failure["step"] is None else f" after step {failure['step']:,}"
    how = failure["signal"] or (_error_in_words(failure) if failure["error"] else f"exit code {failure['exit_code']}")
    then = "; all ranks started again" if failure["restarted"] else ""
    return [f"failed{_moment(failure['at_seconds'])}: rank {failure['rank']}{where}: {how}{then}"]


def _verdict(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the verdict on where the time went, with its evidence."""
    ranks = summary["ranks"].values()
    phases: dict[str, float] = {}
    for name in {name: None for rank in ranks for name in rank["seconds"]}:
        phases[name] = statistics.mean(
            rank["seconds"].get(name, 0.0) / (sum(rank["seconds"].values()) or 1.0) for rank in ranks
        )
    straggler = summary["straggler"]
    return {
        "code": reckoning.code_of(summary),
        "text": summary["verdict"],
        "headline": summary["headline"],
        "step_seconds": summary["step"] or None,
        "samples_per_second": summary["samples_per_second"],
        # earlier versions told none of these
        "tokens_per_second": summary.get("tokens_per_second"),
        "flops": summary.get("flops"),
        "flops_per_second": summary.get("flops_per_second"),
        "mfu": summary.get("mfu"),
        "starting_seconds": summary.get("starting"),
        "watched_steps": summary["watched"]["steps"],
        "watched_seconds": summary["watched"]["seconds"],
        "shares": phases,
        "memory_bytes": max((rank["memory"] or 0 for rank in ranks), default=0) or None,
        "straggler": None
        if straggler is None
        else {"rank": straggler["rank"], "phase": straggler["phase"], "costs_seconds": straggler["costs"]},
        "stretches": [
            {
                "rank": each["rank"],
                "phase": each["phase"],
                "from_seconds": each["from"],
                "to_seconds": each["to"],
                "lost_seconds": each["lost"],
                "is_pause": each.get("pause", False),
            }
            for each in summary["stretches"]
        ],
        "remarks": summary["remarks"],
    }


def _left_out(noted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if noted is None:
        return None
    return {"steps": noted["steps"], "first_step": noted["first"], "last_step": noted["last"], "of": noted["of"]}


def _costs(noted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if noted is None or not noted["exact"]:
        return None
    by_cost, by_number = (noted[name] / noted["exact"] for name in ("by_cost", "by_number"))
    return {"batches": noted["batches"], "dearest": by_cost, "dearest_by_number": by_number}


def _seconds(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


def _moment(seconds: float | None) -> str:
    return "" if seconds is None else f" at {as_clock(seconds)}"
