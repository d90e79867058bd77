"""How a job ends: every path of the policy, with made-up events and times."""

from __future__ import annotations

import signal
from signal import SIGHUP, SIGINT, SIGKILL, SIGQUIT, SIGTERM

import pytest

from lockstep.job.stop_signals import TIME_LIMIT
from lockstep.launch.policy import FAILURE_GRACE, KilledFor, Order, Policy


def test_a_job_is_done_when_every_rank_ended_well() -> None:
    policy = Policy(range(2), grace=10)
    assert policy.exited(0, 0, at=1.0) == []
    assert not policy.done
    assert policy.exited(1, 0, at=2.0) == []
    assert policy.done
    assert policy.deadline is None


def test_the_first_failure_stops_the_others_and_then_kills_them() -> None:
    policy = Policy(range(3), grace=10)
    assert policy.exited(1, 1, at=5.0) == [Order(SIGTERM, (0, 2))]
    assert policy.deadline == 5.0 + FAILURE_GRACE
    assert policy.exited(2, -SIGTERM, at=5.1) == []
    assert policy.tick(5.4) == []
    assert policy.tick(5.5) == [Order(SIGKILL, (0,))]
    policy.exited(0, -SIGKILL, at=5.6)
    assert policy.done
    assert [policy.states[rank].stopped_at for rank in range(3)] == [5.0, None, 5.0]


def test_ranks_get_the_time_in_which_the_launcher_itself_stood_still() -> None:
    policy = Policy(range(2), grace=10)
    policy.excuse(60.0)
    assert policy.deadline is None
    policy.signalled(SIGTERM, delivered=False, now=1.0)
    policy.excuse(60.0)
    assert policy.tick(70.9) == []
    assert policy.tick(71.0) == [Order(SIGKILL, (0, 1))]


def test_a_user_who_quits_a_debugger_stops_the_others_and_fails_nobody() -> None:
    policy = Policy(range(3), grace=10)
    assert policy.quit(1, now=5.0) == [Order(SIGTERM, (0, 2))]
    assert (policy.stopped_by, policy.failing, policy.has_quit) == (SIGINT, False, True)
    assert policy.exited(1, 130, at=5.1) == policy.exited(0, -SIGTERM, at=5.2) == []
    assert policy.quit(2, now=5.3) == [], "once is enough"
    assert policy.tick(15.0) == [Order(SIGKILL, (2,))]
    failing = Policy(range(2), grace=10)
    failing.exited(0, 1, at=5.0)
    assert failing.quit(1, now=5.1) == []
    assert not failing.has_quit, "that is not why it ends"


def test_a_failure_of_the_only_rank_has_nobody_to_stop() -> None:
    policy = Policy([0], grace=10)
    assert policy.exited(0, 3, at=5.0) == []
    assert policy.done


@pytest.mark.parametrize("signum", [SIGINT, SIGTERM, SIGHUP])
def test_a_signal_is_passed_on_once_and_the_grace_period_kept(signum: signal.Signals) -> None:
    policy = Policy(range(2), grace=10)
    assert policy.signalled(signum, delivered=False, now=1.0) == [Order(signum, (0, 1))]
    assert policy.stopped_by == signum
    policy.exited(0, 130, at=1.5)
    assert policy.tick(10.9) == []
    assert policy.tick(11.0) == [Order(SIGKILL, (1,))]


def _running(ranks: int) -> Policy:
    policy = Policy(range(ranks), grace=10)
    for rank in range(ranks):
        policy.started(rank, 1000 + rank)
    return policy


def test_a_signal_from_the_terminal_reaches_ranks_that_were_not_there_yet() -> None:
    policy = Policy(range(3), grace=10)
    policy.started(0, 1000)
    assert policy.signalled(SIGINT, delivered=True, now=1.0) == [Order(SIGINT, (1, 2))]
    assert [policy.states[rank].stopped_at for rank in range(3)] == [1.0, 1.0, 1.0]


def test_a_signal_from_the_terminal_is_there_already() -> None:
    policy = _running(2)
    assert policy.signalled(SIGINT, delivered=True, now=1.0) == []
    assert policy.deadline == 11.0


def test_the_second_signal_kills_at_once() -> None:
    policy = Policy(range(2), grace=10)
    policy.signalled(SIGINT, delivered=True, now=1.0)
    assert policy.signalled(SIGINT, delivered=True, now=1.5) == [Order(SIGKILL, (0, 1))]


def test_an_echo_of_the_first_signal_is_not_a_second_one() -> None:
    policy = Policy(range(2), grace=10)
    policy.signalled(SIGINT, delivered=False, now=1.0)
    assert policy.signalled(SIGINT, delivered=False, now=1.1) == []
    assert policy.signalled(SIGINT, delivered=False, now=1.6) == [Order(SIGKILL, (0, 1))]


def test_the_end_of_a_terminal_is_told_several_times_and_counts_once() -> None:
    policy = _running(2)
    assert policy.signalled(signal.SIGHUP, delivered=False, now=1.0) == [Order(signal.SIGHUP, (0, 1))]
    assert policy.signalled(signal.SIGHUP, delivered=False, now=2.0) == []
    assert policy.signalled(signal.SIGTERM, delivered=False, now=3.0) == [], "what ends the session sends both"
    assert policy.signalled(signal.SIGHUP, delivered=False, now=4.0) == []
    assert policy.signalled(signal.SIGTERM, delivered=False, now=5.0) == [Order(signal.SIGKILL, (0, 1))]


def test_a_schedulers_signal_after_the_jobs_own_limit_is_no_second_one() -> None:
    policy = _running(2)
    assert policy.signalled(TIME_LIMIT, delivered=False, now=1.0) == [Order(SIGTERM, (0, 1))], "no rank knows the other"
    assert policy.deadline == 11.0
    assert policy.signalled(SIGTERM, delivered=False, now=5.0) == []
    assert policy.stopped_by == SIGTERM
    assert policy.signalled(SIGTERM, delivered=False, now=8.0) == [Order(SIGKILL, (0, 1))]


def test_sigquit_is_never_polite() -> None:
    assert Policy([0], grace=10).signalled(SIGQUIT, delivered=True, now=1.0) == [Order(SIGKILL, (0,))]


def test_a_failure_while_stopping_changes_nothing() -> None:
    policy = Policy(range(2), grace=10)
    policy.signalled(SIGTERM, delivered=False, now=1.0)
    assert policy.exited(0, 1, at=1.1) == []
    assert policy.deadline == 11.0
    assert not policy.failing


def test_an_impatient_user_need_not_wait_for_a_failed_job() -> None:
    policy = _running(2)
    policy.exited(1, 1, at=1.0)
    assert policy.signalled(SIGINT, delivered=True, now=1.1) == []
    assert policy.signalled(SIGINT, delivered=True, now=1.4) == [Order(SIGKILL, (0,))]
    assert policy.failing  # so the failure is what the user is told


def test_ranks_that_can_not_even_be_killed_are_given_up() -> None:
    policy = Policy([0], grace=1)
    policy.signalled(SIGTERM, delivered=False, now=0.0)
    policy.tick(1.0)
    assert not policy.done
    assert policy.deadline is not None
    policy.tick(policy.deadline)
    assert policy.done
    assert policy.alive == (0,)


def test_ranks_that_have_saved_have_the_grace_period_whichever_way_the_first_leaves() -> None:
    for code in (0, 3, 75, -signal.SIGSEGV):
        policy = Policy(range(2), grace=10)
        assert policy.exited(0, code, at=1.0, agreed=True) == []
        assert not policy.failing
        assert policy.tick(10.9) == []
        assert policy.tick(11.0) == [Order(SIGKILL, (1,))]


def test_a_rank_that_tells_of_its_own_failure_is_not_killed_meanwhile() -> None:
    policy = Policy(range(4), grace=10)
    policy.exited(1, 1, at=5.0)
    assert policy.tick(5.5, telling=[1, 2]) == [Order(SIGKILL, (0, 3))]
    for rank in (0, 3):
        policy.exited(rank, -SIGKILL, at=5.51)
    assert policy.deadline is not None
    assert policy.deadline < 6.0, "it is looked at again soon"
    assert policy.tick(5.7, telling=[2]) == []
    assert not policy.gave_up
    assert policy.tick(9.0) == [Order(SIGKILL, (2,))]
    endless = Policy(range(2), grace=100)
    assert endless.exited(1, 1, at=5.0) == [Order(SIGTERM, (0,))]
    endless.excuse(7.0)
    endless.signalled(SIGINT, delivered=True, now=12.4)  # by a user who wants it gone, and no later
    assert endless.tick(12.5, telling=[0]) == []
    assert endless.tick(16.9, telling=[0]) == []
    assert endless.tick(17.1, telling=[0]) == [Order(SIGKILL, (0,))]
    assert [policy.states[rank].killed_for for rank in (0, 1, 2)] == [KilledFor.FAILURE, None, KilledFor.FAILURE]
    asked = Policy(range(2), grace=10)
    asked.signalled(SIGTERM, delivered=False, now=1.0)
    assert asked.tick(11.0, telling=[1]) == [Order(SIGKILL, (0, 1))], "it had the time that --grace gives"


def test_it_is_known_why_a_rank_was_killed() -> None:
    late, failed, impatient = (Policy(range(2), grace=10) for _ in range(3))
    late.signalled(SIGTERM, delivered=False, now=1.0)
    late.tick(11.0)
    late.signalled(SIGTERM, delivered=False, now=12.0)
    failed.exited(0, 1, at=1.0)
    failed.tick(2.0)
    impatient.signalled(SIGTERM, delivered=False, now=1.0)
    impatient.signalled(SIGTERM, delivered=False, now=2.0)
    told = [[each.killed_for for each in policy.states.values()] for policy in (late, failed, impatient)]
    assert told == [[KilledFor.GRACE] * 2, [None, KilledFor.FAILURE], [KilledFor.AT_ONCE] * 2]
