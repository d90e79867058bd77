"""What a record tells of a run that ended well, failed, was stopped, goes on; and what it does not tell."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lockstep import _proc
from lockstep.cli import main
from lockstep.job.files import FailureRecord
from lockstep.launch.policy import Ending, FailureKind, RankState, failure_facts
from tests.recorded import write_record, write_series
from tests.schemas import holds

_HERE = socket.gethostname()
_ENDING = Ending(
    RankState(1, exit_code=1, ended_at=1.0),
    FailureRecord(
        1, 0.9, 1, "lockstep.ReplicaMismatch", "rank 1 differs\nin weight", "Traceback …", "replica-mismatch"
    ),
    log=Path("/logs/rank1.log"),
)
_LATE = {
    "at": 30.0,
    "kind": "late",
    "text": "rank 1 is late\nits stack",
    "code": "rank-late",
    "ranks": [1],
    "waiting": [0],
    "over": False,
}
_OVER = {"at": 36.0, "kind": "late", "text": "rank 1 goes on", "over": True}
_ALIVE = {
    "host": _HERE,
    "launcher": os.getpid(),
    "launcher_began": _proc.started(os.getpid()),
    "ended": ...,
    "exit_code": ...,
}


def _failed(ending: Ending = _ENDING, *, again: bool = False, **facts: Any) -> dict[str, Any]:
    facts = {"step": 2_300, "taken": 2_300, **facts}
    text = f"rank {ending.rank} of 2 failed\nTraceback …"
    return {"at": 40.0, "kind": "failed", "text": text, "failure": failure_facts(ending, **facts), "again": again}


def _explained(folder: Path, *words: str) -> str:
    done = CliRunner().invoke(main, ["runs", "explain", str(folder), *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def _told(folder: Path) -> Any:
    return holds(_explained(folder, "--json"), "lockstep.runs.explain/1")


def _run(folder: Path, **about: Any) -> Path:
    write_record(folder, **about)
    write_series(folder / "series-0.bin")
    return folder


def test_a_run_that_ended_well_has_its_verdict_with_the_evidence(tmp_path: Path) -> None:
    told = _told(_run(tmp_path / "run", checkpoints=[{"at": 20.0, "step": 2000}]))
    assert told["end"] == {"code": "run-done", "exit_code": 0, "text": "done"}
    verdict = told["verdict"]
    assert verdict["code"] == "compute-straggler"
    assert verdict["straggler"]["rank"] == 1
    assert verdict["straggler"]["costs_seconds"] == pytest.approx(0.2 * verdict["step_seconds"], rel=0.2)
    assert sum(verdict["shares"].values()) == pytest.approx(1)
    assert (told["failures"], told["late"], told["unknown"]) == ([], [], [])
    assert told["checkpoints"] == {"noted": 1, "last": {"step": 2000, "at_seconds": 20.0}}
    (line,) = told["next"]
    assert line.startswith("lockstep doctor on its machine finds other programs and limits")
    text = _explained(tmp_path / "run")
    assert "\ndone, 1:02, 6,000 steps on 2 ranks\n" in text
    assert "\ncompute straggler: rank 1, " in text
    assert f"\nnext: {line}\n" in text


def test_a_run_that_failed_names_rank_step_and_error(tmp_path: Path) -> None:
    folder = _run(
        tmp_path / "run",
        exit_code=1,
        end={"code": "run-failed", "text": ""},
        events=[_LATE, _OVER, _failed()],
        checkpoints=[{"at": 20.0, "step": 2000}],
    )
    told = _told(folder)
    assert told["end"]["code"] == "run-failed"
    (failure,) = told["failures"]
    assert (failure["code"], failure["rank"], failure["step"]) == ("rank-raised", 1, 2_300)
    assert failure["error"] == {
        "type": "lockstep.ReplicaMismatch",
        "message": "rank 1 differs\nin weight",
        "code": "replica-mismatch",
    }
    assert (failure["log"], failure["restarted"], failure["signal"]) == ("/logs/rank1.log", False, None)
    (late,) = told["late"]
    assert (late["code"], late["ranks"], late["over"], late["until_seconds"]) == ("rank-late", [1], True, 36.0)
    assert late["text"] == "rank 1 is late\nits stack\nrank 1 goes on"
    mend, again = told["next"]
    assert mend == "fix what the error of rank 1 says: lockstep.ReplicaMismatch: rank 1 differs"
    assert again.startswith(
        "then run the same command again: it passes over checkpoints in which a save saw the difference"
    )
    assert "lockstep checkpoint rewind FOLDER --to STEP" in again
    assert "2,000 or later" in again
    text = _explained(folder)
    assert "\nfailed at 0:40: rank 1 after step 2,300: lockstep.ReplicaMismatch: rank 1 differs\n" in text
    assert "\nlate at 0:30: rank 1 is late; over at 0:36\n" in text
    assert "rank 1 goes on" not in text


def test_each_lateness_is_told_once_whether_it_is_over_or_not(tmp_path: Path) -> None:
    again = {**_LATE, "at": 50.0}
    told = _told(_run(tmp_path / "run", exit_code=1, events=[_LATE, _OVER, again, _failed()]))
    assert [(each["at_seconds"], each["over"], each["until_seconds"]) for each in told["late"]] == [
        (30.0, True, 36.0),
        (50.0, False, None),
    ]


def test_a_run_that_failed_otherwise_is_to_be_resumed(tmp_path: Path) -> None:
    ending = Ending(_ENDING.state, FailureRecord(1, 0.9, 1, "ValueError", "bad batch", "Traceback …"))
    noted = [{"at": 20.0, "step": 2000}]
    run = _run(tmp_path / "run", exit_code=1, events=[_failed(ending)], checkpoints=noted)
    assert _told(run)["next"] == [
        "fix what the error of rank 1 says: ValueError: bad batch",
        "run the same command again: it resumes from the newest sound checkpoint, of step 2,000 or later",
    ]


@pytest.mark.parametrize(
    ("exit_code", "out_of_memory", "kind", "said"),
    [
        (
            -9,
            False,
            FailureKind.KILLED,
            "find out what sent SIGKILL to rank 1; --max-restarts 3 starts the ranks again",
        ),
        (-9, True, FailureKind.MEMORY, "take a smaller batch, fewer ranks or fewer workers"),
        (
            3,
            False,
            FailureKind.EXITED,
            "read why rank 1 left with exit code 3: the program did so itself; the end of its",
        ),
        (None, False, FailureKind.STUCK, "look at the disk or the driver that rank 1 waited for"),
    ],
)
def test_each_kind_of_failure_has_its_advice(
    tmp_path: Path, exit_code: int | None, out_of_memory: bool, kind: FailureKind, said: str
) -> None:
    ending = Ending(RankState(1, exit_code=exit_code, ended_at=1.0), None, log=Path("/logs/rank1.log"))
    event = _failed(ending, step=None, taken=None, out_of_memory=out_of_memory)
    told = _told(_run(tmp_path / "run", exit_code=1, events=[event]))
    assert (told["failures"][0]["code"], told["failures"][0]["error"]) == (kind.code, None)
    assert told["failures"][0]["signal"] == ("SIGKILL" if exit_code == -9 else None)
    assert told["next"][0].startswith(said)
    assert "at which step rank 1 failed: its steps are not counted" in told["unknown"]


def test_a_restart_is_told(tmp_path: Path) -> None:
    starts = [{"steps": 2300}, {"number": 1, "at": 61.0, "series": "series-1.bin", "world_size": 2, "steps": 3000}]
    folder = _run(tmp_path / "run", starts=starts, ended=..., exit_code=0, events=[_failed(again=True)])
    write_series(folder / "series-1.bin", first=61.0, seconds=30)
    told = _told(folder)
    assert [each["steps"] for each in told["starts"]] == [2300, 3000]
    assert told["failures"][0]["restarted"] is True
    text = _explained(folder)
    assert "; all ranks started again\n" in text
    assert "\n1 restart, the last on 2 ranks\n" in text


@pytest.mark.parametrize(
    ("about", "code", "unknown"),
    [
        ({"exit_code": 75, "end": {"code": "run-saved", "text": "stopped by SIGTERM; saved"}}, "run-saved", ""),
        ({"exit_code": 75}, "run-saved", ""),  # an earlier version wrote no code
        ({"exit_code": 143, "end": {"code": "run-stopped", "text": "stopped by SIGTERM"}}, "run-stopped", ""),
        (
            {"host": _HERE, "ended": ..., "exit_code": ...},
            "run-killed",
            "what ended it: its launcher left no record of its end",
        ),
        (_ALIVE, "run-running", "how it ends: this is the run so far"),
        (
            {"ended": ..., "exit_code": ...},
            "run-unknown",
            "how it ended, or whether it is still running: it was started on here",
        ),
        (
            {"exit_code": 1, "end": {"code": "new", "text": ""}},
            "run-failed",
            "which rank failed: the record names none",
        ),
    ],
)
def test_every_way_to_end_is_explained(tmp_path: Path, about: dict[str, Any], code: str, unknown: str) -> None:
    told = _told(_run(tmp_path / "run", **about))
    assert told["end"]["code"] == code
    assert any(line.startswith(unknown) for line in told["unknown"]), told["unknown"]
    assert told["next"], "there is always something to try"
    assert told["verdict"]["code"] == "compute-straggler"
    if code in ("run-saved", "run-stopped", "run-killed", "run-failed"):
        assert told["next"][-1] == "run the same command again; this run noted no checkpoint to resume from"
        assert "whether it saved: no Checkpointer reported a checkpoint" in told["unknown"]


def test_a_rank_that_is_late_now_is_to_be_looked_at(tmp_path: Path) -> None:
    folder = _run(tmp_path / "run", **_ALIVE, events=[_LATE])
    assert f"lockstep runs stack {folder} 1 shows where the late rank is" in _told(folder)["next"]
    folder = _run(tmp_path / "other", **_ALIVE, events=[_LATE, _OVER])
    assert not any("runs stack" in line for line in _told(folder)["next"][:-1])


def test_what_is_damaged_or_missing_is_said_to_be_unknown(tmp_path: Path) -> None:
    told = _told(write_record(tmp_path / "run"))  # no series
    assert (told["steps"], told["verdict"], told["useful"]) == (None, None, None)
    assert told["unknown"][0].startswith("steps and times: UnknownRun: [Errno 2] No such file")
    folder = write_record(tmp_path / "none", exit_code=1)
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "starts": []}))
    told = _told(folder)
    assert (told["ranks"], told["steps"]) == (0, 0)
    assert "where its time went: fewer than two steps were seen" in told["unknown"]
    assert "which rank failed: the record names none" in told["unknown"]
    assert "not known: " in _explained(tmp_path / "none")


def test_numbers_that_were_not_finite_are_told(tmp_path: Path) -> None:
    told = _told(_run(tmp_path / "run", nonfinite={"loss": {"first": 43, "since": 51}}, logs=["/runs/metrics.jsonl"]))
    assert told["nonfinite"] == [{"name": "loss", "first_step": 43, "since_step": 51}]
    assert told["logs"] == ["/runs/metrics.jsonl"]
    assert "loss: NaN or infinite from step 51 on" in _explained(tmp_path / "run")
