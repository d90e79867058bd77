"""How long the product waits: in which order, and how the tests shorten it."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from lockstep import EnvironmentMismatch, knobs
from lockstep.remote.ssh import passed_on
from lockstep.times import Times


def test_nothing_is_changed_unless_somebody_asks() -> None:
    assert knobs.times({}) == Times()
    assert knobs.times({knobs.TIMES: ""}) == Times()
    assert Times().scaled(1.0) == Times()


def test_a_number_shortens_pauses_and_leaves_limits_alone() -> None:
    plain, short = asdict(Times()), asdict(knobs.times({knobs.TIMES: "0.25"}))
    pauses = {each.name for each in fields(Times) if each.metadata["pause"]}
    assert {"late", "heartbeat", "beat", "echo", "last_call"} <= pauses
    assert not {"silent", "cut_off", "stuck", "forming"} & pauses
    assert short == {name: seconds / 4 if name in pauses else seconds for name, seconds in plain.items()}


def test_single_times_come_by_name() -> None:
    assert knobs.times({knobs.TIMES: "silent=1.5"}) == Times(silent=1.5)
    both = knobs.times({knobs.TIMES: "0.2, silent=1.5,echo=0.7"})
    assert (both.silent, both.echo) == (1.5, 0.7)
    assert both.last_call == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("soon", "'soon': expected a positive number"),
        ("0", "'0': expected a positive number"),
        ("silent=-1", "'-1': expected a positive number"),
        ("0.2,", "'': expected NAME=SECONDS"),
        ("silent=1,0.2", "'0.2': expected NAME=SECONDS, NAME one of late, "),
        ("silence=1", "'silence=1': expected NAME=SECONDS, NAME one of late, "),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(EnvironmentMismatch) as error:
        knobs.times({knobs.TIMES: text})
    assert str(error.value).startswith(f"{knobs.TIMES}={text}: {said}")
    assert knobs.bad_values({knobs.TIMES: text}) != []


def test_late_is_the_users_own_where_it_is_set() -> None:
    assert knobs.late({}) == Times().late
    assert knobs.late({knobs.TIMES: "0.2"}) == pytest.approx(1.0)
    assert knobs.late({knobs.TIMES: "0.2", knobs.LATE: "3"}) == 3.0


@pytest.mark.parametrize("text", ["", "0.2", "0.1"])
def test_what_has_to_be_longer_is_longer(text: str) -> None:
    """Also where the pauses are short."""
    times = knobs.times({knobs.TIMES: text})
    assert times.beat < times.echo, "a failure that reads like an echo waits for a sign of life"
    assert 2 * times.beat < times.heard
    assert 4 * times.beat < times.silent < times.cut_off < times.stuck
    assert times.still < times.cut_off
    assert times.farewell < times.leaving
    assert times.answer < times.stuck


def test_the_other_hosts_of_a_job_wait_as_long() -> None:
    assert passed_on({knobs.TIMES: "0.2"}, terminal=False) == {knobs.TIMES: "0.2"}
