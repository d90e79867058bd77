"""What torch's watchdog of collectives over NCCL leaves behind is recognised, by torch's own words."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import CollectiveTimeout, PeerLost
from lockstep.job.files import FailureRecord, JobFiles
from lockstep.launch import watchdog
from lockstep.launch.policy import Ending, Failure, FailureKind, RankState, Restarts, failure_facts
from lockstep.launch.watchdog import Words

#: As torch 2.4, 2.6 and 2.9 write it, with their prefixes.
LATE = [
    "[rank1]:[E1003 18:37:01.838048403 ProcessGroupNCCL.cpp:1515] [PG 0 (default_pg) Rank 1] Process group watchdog "
    "thread terminated with exception: [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6463, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800017 milliseconds before timing out.\n"
    "Exception raised from checkTimeout at ProcessGroupNCCL.cpp:609 (most recent call first):\nframe #0: c10::Error\n",
    "[rank1]:[E1118 20:32:23.955028747 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=6463, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800024 "
    "milliseconds before timing out.\n"
    "[rank1]:[E1118 20:32:23.957372583 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank 1]  failure "
    "detected by watchdog at work sequence id: 6463 PG status: last enqueued work: 6463, last completed work: 6462\n"
    "[rank1]:[E1118 20:32:23.957506340 ProcessGroupNCCL.cpp:695] [Rank 1] To avoid data inconsistency, we are taking "
    "the entire process down.\n",
]
GONE = (
    "[rank1]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 1] Process group watchdog thread terminated with exception: NCCL "
    "error: remote process exited or there was a network error, NCCL version 2.20.5\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
)
#: Of a rank's own, and no other's fault.
OWN = (
    "[rank1]:[E ProcessGroupNCCL.cpp:2168] [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: "
    "CUDA error: an illegal memory access was encountered\n"
)


@pytest.mark.parametrize("text", LATE)
def test_a_time_limit_is_told_with_the_collective(text: str) -> None:
    found = Words.find(f"loss 0.25\n{text}terminate called after throwing an instance of 'c10::DistBackendError'\n")
    assert found is not None
    assert found.kind is CollectiveTimeout
    assert found.what == "collective 6,463 over NCCL (ALLREDUCE of 1 element) did not end within 1800 s"


def test_the_last_of_several_is_told() -> None:
    assert Words.find(LATE[0].replace("6463", "17") + LATE[1]) == Words.find(LATE[1])


def test_a_peer_that_is_gone_is_told_as_one() -> None:
    found = Words.find(GONE)
    assert found is not None
    assert found.kind is PeerLost
    assert "remote process exited or there was a network error" in found.what


@pytest.mark.parametrize("text", ["", "loss 0.25\n", OWN])
def test_what_is_no_others_fault_is_left_alone(text: str) -> None:
    assert Words.find(text) is None


def _record(tmp_path: Path, text: str | None = LATE[0], **changes: Any) -> FailureRecord | None:
    log = None
    if text is not None:
        log = tmp_path / "rank1.log"
        log.write_text(text)
    state = RankState(1, pid=7, exit_code=changes.pop("exit_code", -signal.SIGABRT), ended_at=4.0)
    told = {"is_recorded": False, "waited": False, "about": "rank 1 of 2, after 3 steps", "late": "", **changes}
    return watchdog.record(state, log=log, **told)


def test_the_record_is_that_of_an_error_of_ours(tmp_path: Path) -> None:
    record = _record(tmp_path, late="rank 0 of 2 has held up the others for 600 s")
    assert record is not None
    assert (record.rank, record.at, record.exit_code) == (1, 4.0, 134)
    assert (record.type, record.code) == ("lockstep.CollectiveTimeout", "collective-timeout")
    assert record.message.startswith("rank 1 of 2, after 3 steps: collective 6,463 over NCCL (ALLREDUCE of 1 element)")
    assert record.message.endswith("\nrank 0 of 2 has held up the others for 600 s")
    gone = _record(tmp_path, GONE)
    assert gone is not None
    assert gone.code == "peer-lost"


def test_only_what_the_watchdog_ends_has_one(tmp_path: Path) -> None:
    assert _record(tmp_path, exit_code=-signal.SIGSEGV) is None
    assert _record(tmp_path, exit_code=1) is None
    assert _record(tmp_path, OWN, is_recorded=True, waited=True) is None
    assert _record(tmp_path, "torch.OutOfMemoryError\n", is_recorded=True, waited=True) is None


def test_a_rank_without_a_log_is_told_by_its_flight_recorder_and_its_wait(tmp_path: Path) -> None:
    record = _record(tmp_path, None, is_recorded=True, waited=True)
    assert record is not None
    assert record.code == "collective-timeout"
    assert _record(tmp_path, None, is_recorded=True) is None
    assert _record(tmp_path, None, waited=True) is None


def test_words_behind_much_output_are_found_at_the_logs_end(tmp_path: Path) -> None:
    assert _record(tmp_path, "x" * 300_000 + LATE[1]) is not None


def test_flight_recorders_write_into_the_jobs_folder_unless_the_user_says_where(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    assert watchdog.variables(tmp_path, {}) == {
        "TORCH_FR_DUMP_TEMP_FILE": str(files.flight_recorder(3)).removesuffix("3"),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(files.flight_recorder_pipes),
    }
    own = {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/mine",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/pipe",
    }
    assert watchdog.variables(tmp_path, own) == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in watchdog.variables(tmp_path, {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"})


def test_an_aborted_rank_counts_as_killed_by_what_others_did(tmp_path: Path) -> None:
    """Its failure is the consequence of another rank's, so that it does not stand in the way of a restart."""
    state = RankState(1, pid=7, exit_code=-signal.SIGABRT, ended_at=4.0)
    ending = Ending(state, _record(tmp_path), was_aborted=True)
    assert ending.is_echo
    assert ending.status == "killed by signal 6 (SIGABRT)"
    facts = failure_facts(ending, step=3, taken=3)
    assert (facts["code"], facts["signal"]) == (FailureKind.KILLED.code, "SIGABRT")
    assert facts["error"]["code"] == "collective-timeout"
    restarts = Restarts(2)
    failure = Failure.of(ending, step=3, taken=3)
    assert restarts.refusal(failure) is None
    assert restarts.refusal(failure) is None
