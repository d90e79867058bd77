"""What the commands print with --json, held to the tables of docs/json.md."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lockstep.cli import main
from lockstep.cli.terminal import as_json
from lockstep.job.account import Progress
from lockstep.job.page import Cell, Pages, Phase
from lockstep.runs.record import Recorder
from tests.launching import LIMIT
from tests.recorded import BEGAN, write_log, write_record, write_series
from tests.schemas import described, holds

TESTS = Path(__file__).parents[1]


def _runs(*words: object) -> Result:
    return CliRunner().invoke(main, ["runs", *map(str, words)])


def _recorded(folder: Path, *, step: float = 0.01, **about: Any) -> Path:
    write_record(folder, **about)
    write_series(folder / "series-0.bin", step=step)
    return folder


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A run of one rank that goes on, whose rank is a process that sleeps, and which has logged a number."""
    folder = tmp_path / "live"
    folder.mkdir()
    recorder = Recorder(lambda: folder, program=["train.py"], tell=print)
    pages = Pages(folder, 1)
    pages.set(0, Cell.STEPS, 301)
    pages.close()
    rank = subprocess.Popen(["sleep", "60"])
    try:
        recorder.begin(number=0, node=0, world_size=1, ranks=[0], job_folder=folder)
        recorder.add({0: Progress(300, (1.0,) * len(Phase))}, {0: rank.pid})
        about = json.loads((folder / "run.json").read_text())
        log = write_log(folder / "metrics.jsonl", {"loss": lambda step: 1 / step})
        (folder / "run.json").write_text(json.dumps({**about, "logs": [str(log)]}))
        yield folder
    finally:
        rank.kill()
        rank.wait(timeout=LIMIT)


def _pid(live: Path) -> int:
    """Return the process of a live run's rank, from its record."""
    (pid,) = json.loads((live / "run.json").read_text())["starts"][0]["ranks"].values()
    return int(pid)


def test_the_list_of_runs(tmp_path: Path) -> None:
    _recorded(tmp_path / "a", exit_code=75, nonfinite={"loss": {"first": 4, "since": None}})
    write_record(tmp_path / "b", began=BEGAN + 1)  # its series is not there
    done = _runs("ls", "--json", tmp_path)
    assert done.exit_code == 0
    newest, oldest = holds(done.stdout, "lockstep.runs.ls/1")["runs"]
    assert (newest["name"], newest["number"], newest["steps"], newest["verdict"]) == ("b", None, None, None)
    assert (oldest["end"], oldest["verdict"]) == ({"code": "run-saved", "exit_code": 75}, "compute-straggler")
    assert (oldest["steps"], oldest["seconds"]) == (6000, 62.0)
    assert oldest["step_seconds"] == pytest.approx(0.01)
    assert oldest["remarks"] == ["loss: some NaN or infinite, first at step 4"]
    assert "b: its steps are not known" in done.stderr
    assert holds(_runs("ls", "--json", tmp_path / "nowhere").stdout, "lockstep.runs.ls/1") == {"runs": []}


def test_two_runs_compared(tmp_path: Path) -> None:
    a, b = _recorded(tmp_path / "a"), _recorded(tmp_path / "b", step=0.012, host="there")
    done = _runs("compare", a, b, "--json", "--fail-over", "5%")
    told = holds(done.stdout, "lockstep.runs.compare/1")
    assert (told["differs"], told["fails"], done.exit_code) == (True, True, 1)
    assert told["change"] == pytest.approx(0.2, abs=0.01)
    assert told["changed"] == [{"what": "host", "a": "here", "b": "there"}]
    assert sum(told["a"]["phases_seconds"].values()) == pytest.approx(told["a"]["step_seconds"])
    done = _runs("compare", a, a, "--json")
    assert holds(done.stdout, "lockstep.runs.compare/1")["fails"] is False
    assert done.exit_code == 0


def test_one_look_at_a_run_that_goes_on(live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    told = holds(_runs("top", live, "--json").stdout, "lockstep.runs.top/1")
    (rank,) = told["ranks"]
    assert (rank["rank"], rank["pid"], rank["step"], rank["doing"]) == (0, _pid(live), 300, "start")
    assert told["logged"]["loss"] == pytest.approx(1 / 6000)
    assert [told[key] for key in ("samples_per_second", "tokens_per_second", "flops_per_second", "mfu")] == [None] * 4


def test_a_look_tells_what_the_ranks_get_done(live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of 8 samples while somebody looks; 500 FLOPs a sample, which take 1 ns at the peak."""

    def ten_steps(_seconds: float) -> None:
        pages = Pages(live, 1)
        counts = {
            Cell.STEPS: 311,
            Cell.SAMPLES: 80,
            Cell.TOKENS: 560,
            Cell.FLOPS: 4000,
            Cell.FLOPS_SAMPLES: 8,
            Cell.FLOPS_AT_PEAK: 8000,
        }
        for cell, value in counts.items():
            pages.set(0, cell, value)
        pages.close()

    monkeypatch.setattr(time, "sleep", ten_steps)
    told = holds(_runs("top", live, "--json").stdout, "lockstep.runs.top/1")
    samples = told["samples_per_second"]
    assert samples > 0
    assert told["tokens_per_second"] == pytest.approx(7 * samples)
    assert told["flops_per_second"] == pytest.approx(500 * samples)
    assert told["mfu"] == pytest.approx(1e-9 * samples)


def test_the_stacks_of_a_run_that_goes_on(live: Path) -> None:
    (rank,) = holds(_runs("stack", live, "--json").stdout, "lockstep.runs.stack/1")["ranks"]
    assert (rank["rank"], rank["pid"]) == (0, _pid(live))
    assert rank["stack"].endswith("does not answer: it has not begun yet, or is leaving")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["explain", "./nowhere"], "unknown-run"),
        (["compare", "./a", "./b", "--fail-over", "x"], "invalid-argument"),
        (["plan", "./nowhere"], "unknown-run"),
        (["top", "https://host/run"], "no-local-path"),
    ],
)
def test_an_error_is_an_object_as_well(words: list[str], code: str) -> None:
    done = _runs(*words, "--json")
    told = holds(done.stdout, "lockstep.error/1")
    assert (told["code"], told["exit_code"], done.exit_code) == (code, 2, 2)
    assert done.stderr.strip().endswith(told["message"])


def test_an_error_of_the_system_has_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_folder: str) -> None:
        raise PermissionError(13, "Permission denied", "/runs")

    monkeypatch.setattr("lockstep.checkpoint.inspect.find", fail)
    done = CliRunner().invoke(main, ["checkpoint", "ls", str(tmp_path), "--json"])
    assert holds(done.stdout, "lockstep.error/1")["code"] == "system-error"
    assert CliRunner().invoke(main, ["checkpoint", "ls", str(tmp_path)]).stdout == "", "without --json"


def test_numbers_that_json_does_not_have_are_null() -> None:
    told = {"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), "d": {1: (True, None)}}
    assert json.loads(as_json("x", told)) == {
        "schema": "lockstep.x/1", "a": None, "b": [None, 1.5], "c": "x", "d": {"1": [True, None]},
    }  # fmt: skip


def test_every_schema_of_the_page_is_held_to_a_command_by_some_test() -> None:
    assert len(described()) > 10
    words = "".join(file.read_text() for file in TESTS.glob("*/test_*.py"))
    assert {*re.findall(r"holds\([^\n]*\"(lockstep\.[a-z.]+/\d+)\"", words)} == {*described()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 3}, "name is of the type integer, and on the page string"),
        ({"name": ...}, "name is missing"),
        ({"new": 3}, "new is not on the page"),
        ({"ranks": [{"rank": "0", "stack": ""}]}, "ranks[].rank is of the type string, and on the page integer"),
        ({"ranks": {}}, "ranks is of the type object, and on the page list"),
    ],
)
def test_what_is_not_as_the_page_has_it_is_found(change: dict[str, Any], said: str) -> None:
    told = {"schema": "lockstep.runs.stack/1", "name": "a", "folder": "b", "ranks": [], **change}
    with pytest.raises(AssertionError, match=re.escape(said)):
        holds(json.dumps({name: value for name, value in told.items() if value is not ...}), "lockstep.runs.stack/1")
