"""Which failures a job is started again after, with made-up endings."""

from __future__ import annotations

import signal

import pytest

from lockstep.job.files import FailureRecord
from lockstep.job.flight import Flight
from lockstep.job.page import Cell, Pages
from lockstep.launch.policy import Ending, Failure, RankState, Restarts
from lockstep.launch.report import not_restarted
from lockstep.rendezvous.messages import Round


def _raised(kind: str = "ValueError", message: str = "bad batch", *, rank: int = 1, code: int = 1) -> Ending:
    state = RankState(rank, exit_code=code, ended_at=1.0)
    return Ending(state, FailureRecord(rank, 0.9, code, kind, message, "Traceback …"))


def _died(signum: int, *, rank: int = 1) -> Ending:
    return Ending(RankState(rank, exit_code=-signum, ended_at=1.0), None)


def _failure(ending: Ending, *, step: int | None = 5, taken: int | None = 2, out_of_memory: bool = False) -> Failure:
    return Failure.of(ending, step=step, taken=taken, out_of_memory=out_of_memory)


def _refusal(restarts: Restarts, failure: Failure) -> str | None:
    """What is said of why the job does not start again, or None: it does."""
    why = restarts.refusal(failure)
    return None if why is None else not_restarted(why, failure, limit=restarts.limit)


def test_restarts_are_counted() -> None:
    restarts = Restarts(2)
    assert [_refusal(restarts, _failure(_died(signal.SIGKILL), step=step)) for step in (1, 2)] == [None, None]
    assert restarts.used == 2
    assert _refusal(restarts, _failure(_died(signal.SIGKILL), step=3)) == (
        "not restarted: all 2 restarts are used up (--max-restarts)"
    )
    assert restarts.used == 2


def test_without_restarts_nothing_is_said_of_them() -> None:
    assert _refusal(Restarts(0), _failure(_raised(), taken=0)) == ""


@pytest.mark.parametrize("ending", [_raised(), _raised("SystemExit", "", code=2)])
def test_a_users_error_before_the_first_step_is_final(ending: Ending) -> None:
    refusal = _refusal(Restarts(5), _failure(ending, step=40, taken=0))
    assert refusal == "not restarted: it failed before its first step, and would fail again"
    assert _refusal(Restarts(5), _failure(ending, taken=1)) is None
    assert _refusal(Restarts(5), _failure(ending, taken=None)) is None, "nobody counted"


@pytest.mark.parametrize("ending", [_died(signal.SIGKILL), _died(signal.SIGSEGV), _raised("lockstep.errors.PeerLost")])
def test_what_is_no_error_of_the_user_is_worth_a_restart_at_any_time(ending: Ending) -> None:
    assert _refusal(Restarts(5), _failure(ending, taken=0)) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_raised(message="loss is nan (process 123, 0x7f01)"), _raised(message="loss is nan (process 4567, 0x7f99)")),
        (_died(signal.SIGSEGV), _died(signal.SIGSEGV)),
        (_raised("SystemExit", "", code=3), _raised("SystemExit", "", code=3)),
    ],
)
def test_the_same_failure_twice_is_final(one: Ending, other: Ending) -> None:
    restarts = Restarts(5)
    assert _refusal(restarts, _failure(one)) is None
    assert _refusal(restarts, _failure(other)) == (
        "not restarted: the same failure happened twice, on rank 1 at step 5, and would happen again"
    )


@pytest.mark.parametrize(
    "other",
    [
        _failure(_raised(), step=6),
        _failure(_raised(rank=0)),
        _failure(_raised(message="another")),
        _failure(_raised("KeyError")),
        _failure(_raised("SystemExit", "", code=3)),
    ],
)
def test_another_step_rank_or_error_is_another_failure(other: Failure) -> None:
    restarts = Restarts(5)
    assert _refusal(restarts, _failure(_raised())) is None
    assert _refusal(restarts, other) is None
    assert _refusal(restarts, _failure(_raised())) is None, "not twice in a row"


def test_a_kill_from_outside_is_never_the_same_unless_memory_was_out() -> None:
    restarts = Restarts(5)
    for _ in range(3):
        assert _refusal(restarts, _failure(_died(signal.SIGKILL))) is None
    assert _refusal(restarts, _failure(_died(signal.SIGKILL), out_of_memory=True)) is None
    refusal = _refusal(restarts, _failure(_died(signal.SIGKILL), out_of_memory=True))
    assert refusal is not None
    assert "happened twice" in refusal


def test_a_machine_that_came_to_others_that_had_taken_steps_leaves() -> None:
    def to_spare(*stepped: bool, node: int, least: int = 1, mutual: bool = False) -> tuple[int, ...]:
        round_ = Round(0, (1,) * len(stepped), "", 0, stepped=stepped)
        return round_.to_spare(node, least=least, mutual=mutual)

    assert to_spare(True, False, node=1) == (1,)
    assert to_spare(True, False, node=0) == (), "it fails of itself"
    assert to_spare(True, False, False, node=0, mutual=True) == (1, 2)
    assert to_spare(True, False, False, node=0, mutual=True, least=2) == ()
    assert to_spare(True, False, False, node=2, mutual=True, least=2) == (2,)
    assert to_spare(True, False, node=1, least=2) == (), "the others are too few"
    assert to_spare(False, False, node=1) == (), "the program may be broken for all"
    assert to_spare(True, True, node=1, mutual=True) == ()
    assert Round(0, (1, 1), "", 0).to_spare(1, least=1, mutual=True) == (), "nobody knows"


def test_a_job_is_closed_once_machines_left_more_often_than_it_may_start_again() -> None:
    restarts, other = Restarts(1), Restarts(1)
    for spared, closed in ((1, False), (2, True)):
        restarts.spared += 1
        other.adopt(restarts.history)
        assert (other.spared, other.closed) == (spared, closed)
    other.adopt(Restarts(1).history)
    assert other.closed, "a machine that comes knows less"
    assert other.used == 0


def test_a_slot_says_where_a_rank_stands(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("job")
    watched = Pages(folder, 3)
    page = watched.page(1)
    own = Flight(page)
    assert watched.all(Cell.STEPS) == [0, 0, 0], "nobody counts yet"
    own.count()
    assert watched.all(Cell.STEPS) == [0, 1, 0]
    own.took_step()
    assert (watched.get(1, Cell.STEPS), watched.get(1, Cell.RUN_STEPS)) == (2, 0)
    own.at_step(40)
    own.took_step()
    assert (watched.get(1, Cell.STEPS), watched.get(1, Cell.RUN_STEPS)) == (3, 41), "a Checkpointer knows better"
    own._cells.release()
    page.release()
    watched.close()
