"""Which rank is shown as the first to fail, and what is said of each."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from signal import SIGABRT, SIGINT, SIGKILL, SIGQUIT, SIGSEGV, SIGTERM

import pytest

from lockstep.job.files import EXIT_SAVED, FailureRecord, StopNote
from lockstep.launch import causes
from lockstep.launch.evidence import MachineFacts
from lockstep.launch.policy import Ending, KilledFor, Policy, RankState
from lockstep.launch.report import Outcome, describe, stopped

_NOT_KNOWN = MachineFacts(
    memory_kills=None, memory_limit=None, machine=None, shared=None, files=1024, worker=lambda _: None
)


def _outcome(*endings: Ending, world_size: int = 2) -> Outcome:
    return Outcome(endings, _NOT_KNOWN, world_size)


def _ending(
    rank: int,
    code: int,
    at: float,
    *,
    raised: str | None = None,
    raised_at: float = 0.0,
    stopped_at: float | None = None,
) -> Ending:
    record = None
    if raised is not None:
        kind, _, message = raised.partition(": ")
        record = FailureRecord(rank, raised_at, 1, kind, message, f"Traceback of rank {rank}\n{raised}\n")
    return Ending(RankState(rank, 1000 + rank, code, at, stopped_at), record, log=Path(f"/logs/rank{rank}.log"))


def _first(*endings: Ending) -> int:
    first = _outcome(*endings).first
    assert first is not None
    return first.rank


def test_nobody_failed() -> None:
    assert _outcome(_ending(0, 0, 1.0), _ending(1, 0, 2.0)).first is None


def test_a_job_that_a_user_has_quit_is_told_by_where() -> None:
    ending = _ending(1, 130, 1.0, raised="bdb.BdbQuit: train.py:3 in f", raised_at=0.9)
    outcome = Outcome((_ending(0, -SIGTERM, 1.1), ending), _NOT_KNOWN, 2, quit_by=(1, "train.py:3 in f"))
    assert stopped(outcome, SIGINT) == "ended at a breakpoint, on rank 1 (train.py:3 in f)"


def test_the_exception_counts_from_when_it_was_raised() -> None:
    slow = _ending(1, 1, 9.0, raised="ValueError: cause", raised_at=5.0)
    quick = _ending(0, 1, 5.2, raised="KeyError: later", raised_at=5.1)
    assert _first(quick, slow) == 1


def test_a_rank_that_was_stopped_while_its_exception_was_on_the_way_out_failed_by_itself() -> None:
    cause = _ending(1, -SIGTERM, 5.3, raised="ValueError: cause", raised_at=5.0, stopped_at=5.2)
    echo = _ending(0, 1, 5.2, raised="RuntimeError: [gloo] Connection closed by peer [127.0.0.1]", raised_at=5.1)
    assert _first(echo, cause) == 1
    assert cause.exit_code == 1


def test_an_echo_that_was_written_first_is_still_an_echo() -> None:
    cause = _ending(1, 1, 5.3, raised="ValueError: cause", raised_at=5.15)
    echo = _ending(0, 1, 5.2, raised="lockstep.errors.PeerLost: rank 1 is gone", raised_at=5.1)
    assert _first(echo, cause) == 1


def test_an_error_of_the_rank_that_reads_a_stream_is_an_echo_on_the_others() -> None:
    cause = _ending(0, 1, 5.3, raised="ValueError: sample 3 is broken", raised_at=5.15)
    told = "rank 1: rank 0, which reads the stream for this machine, failed to read batch 4. Its traceback: …"
    assert _first(cause, _ending(1, 1, 5.2, raised=f"ValueError: {told}", raised_at=5.1)) == 0


def test_a_death_by_signal_comes_before_what_it_caused() -> None:
    killed = _ending(1, -SIGSEGV, 5.05)
    echo = _ending(0, 1, 5.1, raised="RuntimeError: peer left", raised_at=5.0)
    assert _first(echo, killed) == 1


def test_a_death_that_is_noticed_together_with_its_echo_comes_before_it() -> None:
    policy = Policy(range(2), grace=10)
    policy.exited(0, 1, at=5.3)  # in the order in which they were forked
    policy.exited(1, -SIGKILL, at=5.3)
    error = FailureRecord(0, 5.1, 1, "lockstep.errors.PeerLost", "rank 1 is gone", "")
    assert _first(Ending(policy.states[0], error), Ending(policy.states[1], None)) == 1


def test_an_echo_comes_after_a_death_that_is_noticed_late() -> None:
    echo = _ending(0, 1, 9.1, raised="lockstep.errors.PeerLost: rank 1 is gone", raised_at=5.1, stopped_at=9.0)
    assert _first(echo, _ending(1, -SIGKILL, 9.0)) == 1


def test_ranks_that_were_stopped_did_not_fail() -> None:
    assert _first(_ending(0, -SIGTERM, 5.2, stopped_at=5.1), _ending(1, 3, 5.1)) == 1
    assert _first(_ending(0, 1, 5.2, raised="RuntimeError: x", raised_at=5.15, stopped_at=5.1), _ending(1, 3, 5.1)) == 1


def test_the_report_of_an_exception() -> None:
    endings = [
        _ending(0, -SIGTERM, 5.2, stopped_at=5.1),
        _ending(1, 1, 5.1, raised="ValueError: bad batch", raised_at=5.0),
        _ending(2, 1, 5.1, raised="KeyError: 'x'\nmore", raised_at=5.05),
        _ending(3, 0, 1.0),
    ]
    assert describe(_outcome(*endings, world_size=8)).splitlines() == [
        "rank 1 of 8 failed: exit code 1",
        "Traceback of rank 1",
        "ValueError: bad batch",
        "rank 1's log: /logs/rank1.log",
        "rank 0: stopped because rank 1 failed",
        "rank 2 failed too: KeyError: 'x'",
    ]


def test_a_traceback_that_was_on_the_terminal_is_not_repeated() -> None:
    shown = _ending(0, 1, 5.1, raised="ValueError: bad batch", raised_at=5.0)
    shown = Ending(shown.state, shown.record, log=None, shown=True)
    text = describe(_outcome(shown, world_size=1))
    assert text == "rank 0 of 1 failed: exit code 1\nValueError: bad batch (its traceback is above)"


def test_the_report_of_a_kill_names_the_signal_and_a_suspect() -> None:
    killed = _ending(1, -SIGKILL, 5.1)
    text = describe(_outcome(killed))
    assert text.startswith("rank 1 of 2 failed: killed by signal 9 (SIGKILL)\n")
    assert "out-of-memory killer" in text
    assert killed.exit_code == 137


def test_who_was_late_is_said_unless_the_error_says_it() -> None:
    late = "rank 0 of 2 has held up the others for 6 s\n  …"
    died, told = _ending(1, -SIGKILL, 5.1), _ending(1, 1, 5.1, raised=f"CollectiveTimeout: x\n{late}", raised_at=5.0)
    assert describe(Outcome((died,), _NOT_KNOWN, 2, late=late)).count(late) == 1
    assert describe(Outcome((told,), _NOT_KNOWN, 2, late=late)).count(late) == 1


def test_sys_exit_with_a_text() -> None:
    left = _ending(1, 1, 5.1, raised="SystemExit: no data", raised_at=5.0)
    assert describe(_outcome(left)).splitlines()[:2] == ["rank 1 of 2 failed: exit code 1", "  no data"]


def test_a_rank_stuck_in_the_kernel_is_named() -> None:
    failed = _ending(1, 1, 5.1)
    stuck = Ending(RankState(0, 1000, None, None, 5.2), None)
    assert "rank 0: still there (process 1000)" in describe(_outcome(stuck, failed))


def test_records_survive_the_disk(tmp_path: Path) -> None:
    record = FailureRecord(3, 1.5, 1, "ValueError", "naïve\nmessage", "Traceback …\n", shared_memory=(1 << 26, 4096))
    record.write(str(tmp_path))
    assert FailureRecord.read(tmp_path, 3) == record
    assert FailureRecord.read(tmp_path, 2) is None
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert record.summary == "ValueError: naïve"


def test_a_huge_traceback_is_cut_in_the_middle(tmp_path: Path) -> None:
    FailureRecord(0, 1.0, 1, "RecursionError", "deep", "a" * 100_000 + "end").write(str(tmp_path))
    record = FailureRecord.read(tmp_path, 0)
    assert record is not None
    assert len(record.traceback) < 60_000
    assert record.traceback.endswith("end")
    assert "characters left out" in record.traceback


def test_an_error_that_names_one_rank_to_all_is_told_once() -> None:
    told = "lockstep.CheckpointError: rank 0: rng.json: File too large"
    hidden, shown = (_ending(rank, 1, 5.1, raised=told, raised_at=5.0 - rank / 100) for rank in (0, 1))
    shown = Ending(shown.state, shown.record, log=None, shown=True)
    assert describe(_outcome(shown, hidden)).splitlines()[1:] == [
        "lockstep.CheckpointError: rank 0: rng.json: File too large (its traceback is above)",
        "rank 0 failed too, by the same error",
    ]


def test_an_error_that_comes_as_the_rank_is_told_to_stop_is_its_own_all_the_same() -> None:
    told = "lockstep.CheckpointError: rank 0: rng.json: File too large"
    shown = _ending(0, 1, 5.9, raised=told, raised_at=5.8, stopped_at=5.7)
    shown = Ending(shown.state, shown.record, log=None, shown=True)
    assert describe(_outcome(shown, _ending(1, 1, 5.1, raised=told, raised_at=5.0))).splitlines()[1:] == [
        "lockstep.CheckpointError: rank 0: rng.json: File too large (its traceback is above)",
        "rank 1 failed too, by the same error",
    ]


def test_a_rank_that_left_early_is_named_beside_those_that_waited_for_it() -> None:
    waiting = _ending(0, 1, 5.2, raised="lockstep.errors.PeerLost: a rank is gone", raised_at=5.1)
    left = _ending(1, 0, 5.3, stopped_at=5.25)
    text = describe(_outcome(waiting, left))
    assert "rank 1 had ended by itself, with exit code 0" in text
    assert "stopped because" not in text
    cause = _ending(0, 1, 5.2, raised="ValueError: my own", raised_at=5.1)
    assert "rank 1" not in describe(_outcome(cause, _ending(1, 0, 5.0)))


def test_ranks_with_one_cause_are_one_line() -> None:
    failed = _ending(0, 1, 5.1, raised="ValueError: bad batch", raised_at=5.0)
    others = [_ending(rank, -SIGTERM, 5.2, stopped_at=5.1) for rank in range(1, 63)]
    late = _ending(63, 1, 5.1, raised="KeyError: 'x'", raised_at=5.05)
    lines = describe(_outcome(failed, *others, late, world_size=64)).splitlines()
    assert lines[-2:] == ["ranks 1 to 62: stopped because rank 0 failed", "rank 63 failed too: KeyError: 'x'"]


#: What each of many ranks says of the same end of another one, in words of its own.
_OVER_GLOO = (
    "lockstep.PeerLost: rank {0} of 64, step 3: averaging bucket 0 of 1: a rank is gone, or sent something else. The "
    "backend says: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.{0}]:{1}"
)
_BETWEEN_HOSTS = (
    "lockstep.CollectiveTimeout: rank 63 on another host did not come: rank {0} timed out after {1:.3g} s in an "
    "all-reduce. No rank there waits in this collective for another one of its host"
)
_KNOWS_MORE = (
    "lockstep.PeerLost: rank {0} of 64: ranks 0 to {0} failed: lockstep.PeerLost: rank 63 is gone. It says: {1}"
)


@pytest.mark.parametrize("words", [_OVER_GLOO, _BETWEEN_HOSTS, _KNOWS_MORE])
def test_ranks_that_tell_of_one_end_in_words_of_their_own_are_one_line(words: str) -> None:
    kind, _, _ = words.partition(": ")
    waiting = [
        _ending(rank, 1, 5.2, raised=words.format(rank, 60 + rank * 137), raised_at=5 + rank / 1e3)
        for rank in range(63)
    ]
    headline, *told = describe(_outcome(*waiting, _ending(63, 0, 4.0), world_size=64)).splitlines()
    assert headline.endswith("rank 0 of 64 failed: exit code 1")
    assert words.format(0, 60) in told, "the first of them is told in full"
    assert told[-2:] == [
        f"ranks 1 to 62 failed too: {kind}, each as it waited for others",
        "rank 63 had ended by itself, with exit code 0",
    ]
    assert len(told) == 5
    alone = describe(_outcome(*waiting[:2], _ending(2, 0, 4.0), world_size=3)).splitlines()
    assert f"rank 1 failed too: {words.format(1, 197)}" in alone, "there is room for the words of one"
    cause = _ending(63, 1, 5.1, raised="ValueError: bad batch", raised_at=4.0)
    assert len(describe(_outcome(*waiting, cause, world_size=64)).splitlines()) == 5, "nor beside a cause"


def test_echoes_whose_first_lines_agree_keep_their_words() -> None:
    first = _ending(0, 1, 5.2, raised="CollectiveTimeout: rank 3 did not come", raised_at=5.0)
    told = "PeerLost: rank {0} of 4: a rank is gone\nrank {0} saw it"
    others = [_ending(rank, 1, 5.2, raised=told.format(rank), raised_at=5.1) for rank in (1, 2)]
    stopped_before = _ending(3, 1, 5.4, raised="PeerLost: rank 3 of 4: another", raised_at=5.3, stopped_at=5.25)
    lines = describe(_outcome(first, *others, stopped_before, world_size=4)).splitlines()
    assert lines[-2:] == [
        "ranks 1 and 2 failed too: PeerLost: rank # of 4: a rank is gone",
        "rank 3: stopped because rank 0 failed",
    ]


def test_errors_that_are_no_echo_keep_their_words() -> None:
    own = [_ending(rank, 1, 5.1, raised=f"KeyError: {rank}", raised_at=5 + rank / 100) for rank in range(3)]
    lines = describe(_outcome(*own, world_size=3)).splitlines()
    assert lines[-2:] == ["rank 1 failed too: KeyError: 1", "rank 2 failed too: KeyError: 2"]


def test_a_rank_that_finds_out_before_it_is_stopped_is_told_as_one_that_is_stopped() -> None:
    lost = "lockstep.PeerLost: rank 1 of 3, step 12: averaging bucket 0 of 1: rank 2 failed: ValueError: bad batch"
    failed = _ending(2, 1, 5.1, raised="ValueError: bad batch", raised_at=5.0)
    finds_out = _ending(1, 1, 5.2, raised=lost, raised_at=5.05, stopped_at=5.1)
    is_stopped = _ending(0, -SIGTERM, 5.2, stopped_at=5.1)
    lines = describe(_outcome(is_stopped, finds_out, failed, world_size=3)).splitlines()
    assert lines[-1] == "ranks 0 and 1: stopped because rank 2 failed"
    (_, *others) = describe(_outcome(_ending(0, 0, 5.3, stopped_at=5.2), finds_out)).splitlines()
    assert "stopped because" not in "".join(others), "there is nothing else to blame"
    own = _ending(1, 1, 5.2, raised="OSError: Connection reset by peer", raised_at=5.05, stopped_at=5.1)
    lines = describe(_outcome(is_stopped, own, failed, world_size=3)).splitlines()
    assert "rank 1 failed too: OSError: Connection reset by peer" in lines, "it may be something else"


def test_what_all_ranks_have_alike_is_told_once() -> None:
    told = "lockstep.ReplicaMismatch: rank {} of 3: the replicas differ\n  in a\n  in b"
    shown, *others = [_ending(rank, 1, 5.1, raised=told.format(rank), raised_at=5.0 - rank / 100) for rank in range(3)]
    shown = Ending(shown.state, shown.record, log=None, shown=True)
    assert describe(_outcome(shown, *others, world_size=3)).splitlines() == [
        "rank 0 of 3 failed: exit code 1",
        "lockstep.ReplicaMismatch: rank 0 of 3: the replicas differ (its traceback is above)",
        "ranks 1 and 2 failed too, by the same error",
    ]


def test_an_abort_while_ranks_wait_in_different_collectives_names_them() -> None:
    died = replace(_ending(0, -SIGABRT, 5.0), waited_in="adding up the items of all ranks at train.py:8")
    other = replace(_ending(1, -SIGTERM, 6.0, stopped_at=5.1), waited_in="averaging gradients at train.py:9")
    told = describe(_outcome(died, other)).splitlines()
    assert "  rank 0 waited in adding up the items of all ranks at train.py:8" in told
    assert "  rank 1 waited in averaging gradients at train.py:9" in told
    alike = replace(other, waited_in="adding up the items of all ranks at train.py:12")
    assert "collectives" not in describe(_outcome(died, alike))
    assert "collectives" not in describe(_outcome(replace(died, waited_in=""), other))


def _killed(rank: int, why: KilledFor | None) -> Ending:
    ending = _ending(rank, -SIGKILL, 5.1, stopped_at=5.0)
    ending.state.killed_for = why
    return ending


def test_who_killed_a_rank_that_was_asked_to_stop() -> None:
    told = {
        KilledFor.AT_ONCE: "a second signal killed rank 0 at once",
        KilledFor.GRACE: "rank 0 did not leave in time (--grace) and was killed",
        KilledFor.FAILURE: "rank 0 did not leave within 0.5 s of another rank's failure and was killed",
        None: "rank 0 was killed by signal 9 (SIGKILL), which lockstep did not send",
    }
    for why, words in told.items():
        assert stopped(_outcome(_killed(0, why)), SIGINT) == f"stopped by SIGINT; {words}"
    assert stopped(_outcome(_killed(0, KilledFor.AT_ONCE)), SIGQUIT) == "stopped by SIGQUIT; it killed rank 0 at once"
    facts = replace(_NOT_KNOWN, memory_kills=1)
    several = Outcome((_killed(0, KilledFor.GRACE), _killed(1, None), _killed(2, KilledFor.GRACE)), facts, 3)
    assert stopped(several, SIGTERM) == (
        "stopped by SIGTERM; ranks 0 and 2 did not leave in time (--grace) and were killed; "
        "the kernel killed rank 1 because memory ran out"
    )


def test_how_ranks_left_once_all_had_saved() -> None:
    note = StopNote(40, "/run/step-00000040")
    ways = [
        _ending(0, EXIT_SAVED, 5.0),
        _ending(1, 0, 5.0),
        _ending(2, 3, 5.0),
        _ending(3, -SIGTERM, 5.0),
        _ending(4, 1, 5.4, raised="ValueError: in finally", raised_at=5.2),
        _ending(5, 1, 5.4, raised="PeerLost: rank 4 is gone", raised_at=5.1),
    ]
    assert stopped(replace(_outcome(*ways), note=note), None) == (
        "stopped by a signal to the ranks; saved at step 40 in /run/step-00000040; rank 2 left with exit code 3; "
        "rank 3 died on its way out: signal 15 (SIGTERM); rank 4 failed on its way out: ValueError: in finally"
    )
    assert stopped(_outcome(*ways[:4]), SIGTERM) == "stopped by SIGTERM", "who has not saved may end in these ways"
    crashed = stopped(_outcome(_ending(0, -SIGSEGV, 5.0), _ending(1, -SIGSEGV, 5.0)), SIGTERM)
    assert crashed == "stopped by SIGTERM; ranks 0 and 1 died on their way out: signal 11 (SIGSEGV)"


def test_no_room_for_a_semaphore_is_told() -> None:
    facts = replace(_NOT_KNOWN, shared=(1 << 26, 0))
    failed = _ending(0, 1, 5.1, raised="OSError: [Errno 28] No space left on device", raised_at=5.0)
    assert "/dev/shm (64 MiB, of which 0 bytes are free now) was full" in describe(Outcome((failed,), facts, 1))
    freed = replace(facts, shared=(1 << 26, 1 << 25))
    assert "/dev/shm" not in describe(Outcome((failed,), freed, 1))
    assert failed.record is not None
    seen = replace(failed, record=replace(failed.record, shared_memory=(1 << 26, 0)))
    assert "/dev/shm (64 MiB, of which 0 bytes were free then) was full" in describe(Outcome((seen,), freed, 1))
    other = replace(failed, record=replace(failed.record, shared_memory=(1 << 26, 1 << 25)))
    assert "/dev/shm" not in describe(Outcome((other,), facts, 1)), "it was full only later"


def test_a_file_over_the_users_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = _ending(0, 1, 5.1, raised="OSError: [Errno 27] File too large", raised_at=5.0)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    assert "this user's limit, 1 MiB (ulimit -f)" in describe(_outcome(failed, world_size=1))


_CRASHED = """{before}Fatal Python error: Segmentation fault

Thread 0x00007f00aaaaaaaa (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/other.py", line 2 in watch

Current thread 0x00007f00bbbbbbbb (most recent call first):
  File "/home/me/.venv/lib/python3.11/site-packages/torch/_tensor.py", line 9 in add_
  File "/home/me/data.py", line 7 in normalise
  File "{ours}/launch/rank.py", line 343 in _run
  File "/home/me/train.py", line 30 in <module>
  File "<frozen runpy>", line 88 in _run_code

Extension modules: numpy._core._multiarray_umath, {modules} (total: 90)
"""


def test_of_a_crash_that_python_has_shown_the_users_lines_are_repeated(tmp_path: Path) -> None:
    ours, modules = str(Path(causes.__file__).parents[1]), ", ".join(f"torch._C{number}" for number in range(300))
    log = tmp_path / "rank1.log"
    log.write_text(_CRASHED.format(before="step 1\n" * 5000, ours=ours, modules=modules))
    crashed = _ending(1, -SIGSEGV, 5.0)
    lines = describe(_outcome(_ending(0, -SIGTERM, 6.0), Ending(crashed.state, None, log=log))).splitlines()
    begin = lines.index("  Fatal Python error: Segmentation fault")
    assert lines[begin + 1 : begin + 4] == [
        '    File "/home/me/data.py", line 7 in normalise',
        '    File "/home/me/train.py", line 30 in <module>',
        f"rank 1's log: {log}",
    ]
    log.write_text("Fatal Python error: none that it has shown\nlast\n")
    assert "  last" in describe(_outcome(Ending(crashed.state, None, log=log)))
    log.write_text(f"step 9\nFatal Python error: Segmentation fault\n\n\nExtension modules: {modules} (total: 300)\n")
    lines = describe(_outcome(Ending(crashed.state, None, log=log))).splitlines()
    begin = lines.index("  step 9")
    assert lines[begin + 1 : begin + 3] == ["  Fatal Python error: Segmentation fault", f"rank 1's log: {log}"]


def test_a_crash_that_a_rank_has_left_in_its_folder_names_the_users_line() -> None:
    ours = str(Path(causes.__file__).parents[1])
    text = _CRASHED.format(before="", ours=ours, modules="torch._C")
    crashed = Ending(_ending(1, -SIGSEGV, 5.0).state, None, shown=True, crash=text)
    lines = describe(_outcome(_ending(0, -SIGTERM, 6.0), crashed)).splitlines()
    begin = lines.index("  Fatal Python error: Segmentation fault")
    assert lines[begin + 1] == '    File "/home/me/data.py", line 7 in normalise'


def test_of_a_crash_in_a_thread_without_python_the_main_threads_line_is_told() -> None:
    text = (
        "Fatal Python error: Aborted\n\nThread 0x00007f00aaaaaaaa (most recent call first):\n"
        '  File "/home/me/other.py", line 2 in watch\n\nThread 0x00007f00bbbbbbbb (most recent call first):\n'
        '  File "/home/me/train.py", line 30 in <module>\n\nExtension modules: a (total: 1)\n'
    )
    assert causes.stack_of_crash(text) == [
        "Fatal Python error: Aborted, in a thread that runs no Python; the main thread was here:",
        '  File "/home/me/train.py", line 30 in <module>',
    ]
    assert causes.stack_of_crash("Fatal Python error: Aborted\n\n<no Python frame>\n") == []
