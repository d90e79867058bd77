"""What a launcher does about ranks that hold up the others, besides the report."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lockstep.job.files import JobFiles
from lockstep.job.hang import HangKind, HangVerdict
from lockstep.launch import watchdog
from lockstep.launch.hangs import ReportedHang
from lockstep.launch.on_hang import HangAction, HangResponse, OnHang, dump
from lockstep.launch.policy import Failure, Refusal, Restarts
from lockstep.launch.spec import JobSpec, Program

DUMP, RESTART = HangAction.DUMP, HangAction.RESTART


def _reported(at: float, **stacks: int) -> ReportedHang:
    verdict = HangVerdict(HangKind.LATE, late=(1,), waiting=(0,), since=at - 5)
    return ReportedHang(verdict, at, "rank 1 of 2 has held up the others", {int(r[1:]): b for r, b in stacks.items()})


def test_the_users_words_are_understood() -> None:
    assert OnHang.parse("report") == OnHang()
    assert OnHang.parse("dump").action is DUMP
    assert OnHang.parse("restart") == OnHang(RESTART, 60.0)
    assert OnHang.parse("restart:2.5") == OnHang(RESTART, 2.5)
    for wrong in (
        "",
        "kill",
        "dump:3",
        "report:",
        "restart:",
        "restart:soon",
        "restart:-1",
        "restart:inf",
        "restart:nan",
    ):
        with pytest.raises(ValueError, match=rf"--on-hang={wrong}: expected 'report', 'dump'"):
            OnHang.parse(wrong)


def test_a_restart_needs_to_be_allowed() -> None:
    with pytest.raises(ValueError, match="--max-restarts"):
        JobSpec(Program("train.py"), nproc=2, on_hang=OnHang(RESTART))
    JobSpec(Program("train.py"), nproc=2, on_hang=OnHang(RESTART), max_restarts=1)
    JobSpec(Program("train.py"), nproc=2, on_hang=OnHang(DUMP))


def test_each_report_is_answered_once_and_a_restart_waits() -> None:
    first, second = _reported(10.0), _reported(100.0)
    response = HangResponse(OnHang(RESTART, 20.0))
    assert response.due(None, 5.0) == []
    assert response.due(first, 10.0) == [DUMP]
    assert response.due(first, 29.9) == []
    assert response.due(None, 30.0) == []  # it moves again
    assert response.due(second, 100.0) == [DUMP]
    assert response.due(second, 120.0) == [RESTART]
    assert response.due(second, 121.0) == []
    assert HangResponse(OnHang(RESTART, 0.0)).due(first, 10.0) == [DUMP, RESTART]
    dumps = HangResponse(OnHang(DUMP, 20.0))
    assert [dumps.due(first, now) for now in (10.0, 11.0, 1000.0)] == [[DUMP], [], []]
    assert HangResponse(OnHang()).due(first, 1000.0) == []


def test_a_dump_has_the_report_and_what_each_rank_has_answered(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.stack(0).write_text("an old stack\nThread 0x1:\n  File train.py\n")
    files.stack(1).write_text("an old stack\n")
    reported = _reported(10.0, r0=13, r1=13, r2=0)
    folder = dump(tmp_path, reported, files, {0: None, 1: None, 2: None})
    assert folder == tmp_path / "hang-1"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {
        "report.txt": "rank 1 of 2 has held up the others\n",
        "stacks-rank0.txt": "Thread 0x1:\n  File train.py\n",
        "stacks-rank1.txt": "rank 1 has not answered: it is stopped, leaving, or has not begun\n",
        "stacks-rank2.txt": "rank 2 has not answered: it is stopped, leaving, or has not begun\n",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert dump(tmp_path, reported, files, {}) == tmp_path / "hang-2"


def test_flight_recorders_are_asked_where_there_are_some(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    watchdog.ask_flight_recorders(files)
    stem = watchdog.variables(tmp_path, {})["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    listens, deaf = Path(f"{stem}0.pipe"), Path(f"{stem}1.pipe")
    os.mkfifo(listens)
    os.mkfifo(deaf)
    reader = os.open(listens, os.O_RDONLY | os.O_NONBLOCK)
    try:
        watchdog.ask_flight_recorders(files)
        assert os.read(reader, 10) == b"1\n"
    finally:
        os.close(reader)


def test_a_hang_is_tried_again_unless_it_is_the_same() -> None:
    restarts = Restarts(3)
    assert restarts.refusal(Failure.of_hang(1, step=0, taken=0)) is None  # also before the first step
    assert restarts.refusal(Failure.of_hang(1, step=40, taken=40)) is None
    assert restarts.refusal(Failure.of_hang(1, step=40, taken=12)) is Refusal.SAME_AGAIN
    assert restarts.refusal(Failure.of_hang(1, step=41, taken=12)) is None
    assert restarts.refusal(Failure.of_hang(0, step=50, taken=9)) is Refusal.USED_UP
