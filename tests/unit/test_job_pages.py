"""A rank's page: what is written into it is what a reader finds, and never half of it."""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep import expect_slow
from lockstep.job import flight
from lockstep.job.flight import Flight
from lockstep.job.page import NAMES, PAGE, Cell, Mark, Pages, Phase, Text
from tests.launching import LIMIT


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    """The pages of a job of two, as the launcher has them."""
    opened = Pages(tmp_path, 2)
    yield opened
    opened.close()
    opened.close()


@pytest.fixture
def own(pages: Pages) -> Iterator[Flight]:
    """The writer of rank 1's page, which is this process's page while the test runs."""
    before = flight.current
    writer = flight.use(Flight(pages.page(1), rank=1))
    yield writer
    flight.use(before)
    writer._cells.release()
    writer._page.release()


def test_every_phase_has_a_name_and_is_found_again(own: Flight, pages: Pages) -> None:
    assert set(NAMES) == set(Phase)
    assert pages.look(1).mark == Mark(Phase.START, Phase.START, waiting=False, serial=0)
    for phase in set(Phase) - {Phase.REDUCE}:
        own.enter(phase)
        mark = pages.look(1).mark
        assert (mark.phase, mark.entered, mark.waiting) == (phase, phase, False)
        assert own.phase is phase
        own.leave(phase)
        assert (pages.look(1).mark.phase, pages.look(1).mark.entered) == (Phase.OWN, phase)
    assert pages.look(0).mark.serial == 0, "the other rank has not begun"


def test_pauses_of_the_garbage_collector_are_counted_and_move_no_mark(own: Flight, pages: Pages) -> None:
    """A rank that collects and does nothing else gives no sign of life by that."""
    own.enter(Phase.FORWARD)
    mark = pages.get(1, Cell.MARK)
    gc.callbacks.append(flight._collects)
    try:
        for number in range(3):
            assert pages.get(1, Cell.COLLECTIONS) == number
            gc.collect()
        gc.collect(0)
    finally:
        gc.callbacks.remove(flight._collects)
    assert (pages.get(1, Cell.COLLECTIONS), pages.get(1, Cell.COLLECTING)) == (3, 0), "the youngest are left out"
    assert pages.get(1, Cell.COLLECTED) > 100, "microseconds"
    assert pages.get(1, Cell.MARK) == mark
    own.collects(begins=False)
    assert pages.get(1, Cell.COLLECTIONS) == 3, "one that began before anybody looked"
    flight._collects("start", {"generation": 0})
    assert pages.look(1).collects, "also one of the youngest generation, whose finalizers may hang"
    flight._collects("stop", {"generation": 0})
    assert not pages.look(1).collects
    assert pages.get(1, Cell.COLLECTIONS) == 3


def test_sending_gradients_belongs_to_the_backward(own: Flight, pages: Pages) -> None:
    own.enter(Phase.BACKWARD)
    own.enter(Phase.REDUCE)
    assert (pages.look(1).mark.phase, pages.look(1).mark.entered) == (Phase.REDUCE, Phase.BACKWARD)
    own.leave(Phase.BACKWARD)
    assert (pages.look(1).mark.phase, pages.look(1).mark.entered) == (Phase.OWN, Phase.BACKWARD)


def test_every_event_changes_the_page(own: Flight, pages: Pages) -> None:
    marks = [pages.get(1, Cell.MARK)]
    for _ in range(3):
        events: list[Callable[[], None]] = [partial(own.enter, phase) for phase in Phase]
        events += [partial(own.leave, Phase.DATA), partial(own.resume, Phase.FORWARD, after=Phase.SAVE), own.took_step]
        events += [partial(own.begin_wait, "a round"), own.end_wait] * 2
        for event in events:
            event()
            marks.append(pages.get(1, Cell.MARK))
    assert len(set(marks)) == len(marks)


def test_a_step_is_counted_with_its_line(own: Flight, pages: Pages) -> None:
    assert pages.look(1).steps is None, "nobody counts"
    own.count()
    assert pages.look(1).steps == 0
    for steps in (1, 2, 3):
        own.enter(Phase.OPTIMIZER)
        own.took_step()
        look = pages.look(1)
        assert (look.mark.phase, look.mark.entered, look.steps) == (Phase.OWN, Phase.OPTIMIZER, steps)
        assert look.stepped_at.startswith(f"{__file__}:")
        assert look.stepped_at.endswith(" in test_a_step_is_counted_with_its_line")
    before = look.stepped_at
    own.took_step()
    assert pages.look(1).stepped_at not in ("", before), "another line"


def test_the_steps_of_a_whole_run_are_told_apart(own: Flight, pages: Pages) -> None:
    own.count()
    assert pages.get(1, Cell.RUN_STEPS) == 0
    own.at_step(40)
    own.took_step()
    assert (pages.all(Cell.STEPS), pages.all(Cell.RUN_STEPS)) == ([0, 2], [0, 41])


def test_a_wait_tells_what_and_where_and_is_no_phase(own: Flight, pages: Pages) -> None:
    own.enter(Phase.REDUCE)
    own.begin_wait("all_reduce #3")
    inner = pages.look(1)
    own.begin_wait("round 7")
    innermost = pages.look(1)
    own.end_wait()
    assert pages.look(1).mark.waiting, "the outer wait goes on"
    own.end_wait()
    assert inner.mark.waiting
    assert inner.mark.phase is Phase.REDUCE
    assert inner.waits_in.startswith(f"all_reduce #3 at {__file__}:")
    assert innermost.waits_in.startswith("round 7 at ")
    assert not pages.look(1).mark.waiting


def test_a_wait_that_failed_stays_in_the_page_until_the_rank_does_something_else(own: Flight, pages: Pages) -> None:
    own.begin_wait("barrier")
    serial = pages.look(1).mark.serial
    own.end_wait(failed=True)
    mark = pages.look(1).mark
    assert (mark.waiting, mark.serial) == (True, serial)
    own.enter(Phase.DATA)
    assert not pages.look(1).mark.waiting


@pytest.mark.usefixtures("own")
def test_a_wait_in_the_background_is_none_of_the_ranks(pages: Pages) -> None:
    flight.in_background()
    try:
        with flight.waiting("a thread's own"):
            assert not pages.look(1).mark.waiting
    finally:
        flight._background.clear()


def test_texts_that_change_while_they_are_read_are_read_again(
    own: Flight, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.begin_wait("the first")
    get, calls = pages.get, []

    def get_and_go_on(rank: int, cell: Cell) -> int:
        number = get(rank, cell)
        calls.append(cell)
        if len(calls) == 1:
            own.end_wait()
            own.begin_wait("the second")
        return number

    monkeypatch.setattr(pages, "get", get_and_go_on)
    look = pages.look(1)
    assert look.waits_in.startswith("the second at ")


def test_long_texts_are_cut_and_others_stay_whole(own: Flight, pages: Pages) -> None:
    own.begin_wait("ä" * 2048)
    own.expect("r" * 2048)
    look = pages.look(1)
    assert look.waits_in.startswith("ä" * 200)
    assert look.reason == "r" * (Text.REASON.value[1] - 1)
    own.expect("")
    assert pages.look(1).reason == ""
    spans = sorted(text.value for text in Text)
    assert all(start + size <= following for (start, size), (following, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= PAGE
    assert all(cell * 8 + 8 <= start or cell * 8 >= start + size for start, size in spans for cell in Cell)
    assert all(place + len(Phase) <= cell for place in (Cell.SPENT, Cell.DEVICE_SPENT) for cell in Cell if cell > place)
    assert (Cell.SPENT + len(Phase)) * 8 <= PAGE


def test_a_rank_that_waits_awake_says_no_word(own: Flight, pages: Pages) -> None:
    own.begin_wait("one")
    own.end_wait()
    own.begin_wait("")
    look = pages.look(1)
    assert (look.mark.waiting, look.waits_in.partition(" at ")[0]) == (True, "one")
    own.end_wait()
    assert not pages.look(1).mark.waiting


@pytest.mark.usefixtures("own")
def test_expecting_to_be_slow_nests(pages: Pages) -> None:
    def reason() -> str:
        return pages.look(1).reason

    with expect_slow("evaluation"):
        with expect_slow("upload"):
            assert reason() == "upload"
        assert reason() == "evaluation"
    assert reason() == ""
    assert expect_slow("a whole function")(reason)() == "a whole function"
    assert reason() == ""


def test_a_reason_must_be_words() -> None:
    with pytest.raises(ValueError, match="reason in words"):
        expect_slow(" ")
    with pytest.raises(TypeError, match="not int"):
        expect_slow(60)  # type: ignore[arg-type]


def test_a_phase_that_fails_stays_in_the_page(own: Flight, pages: Pages) -> None:
    own.enter(Phase.FORWARD)
    with flight.phase(Phase.SAVE):
        assert pages.look(1).mark.phase is Phase.SAVE
    mark = pages.look(1).mark
    assert (mark.phase, mark.entered) == (Phase.FORWARD, Phase.SAVE)
    with pytest.raises(OSError, match="full"), flight.phase(Phase.SAVE):
        raise OSError("full")
    assert pages.look(1).mark.phase is Phase.SAVE


_RANK = """
import os, sys
from lockstep.job import flight
from lockstep.job.page import Phase
flight.take(sys.argv[1], rank=int(sys.argv[2]), world_size=2)
flight.current.enter(Phase.BACKWARD)
if os.fork() == 0:
    flight.current.enter(Phase.SAVE)  # a loader's worker is no rank
    flight.current.took_step()
    os._exit(0)
os.wait()
assert "torch" not in sys.modules
"""


def test_a_reader_sees_what_ranks_of_other_processes_write_and_not_their_children(tmp_path: Path, pages: Pages) -> None:
    subprocess.run([sys.executable, "-c", _RANK, str(tmp_path), "1"], check=True, timeout=LIMIT)
    look = pages.look(1)
    assert (look.mark.phase, look.mark.serial, look.steps) == (Phase.BACKWARD, 1, None)
    assert pages.look(0).mark.serial == 0, "the other rank has not begun"
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_a_process_that_nobody_started_as_a_rank_writes_where_nobody_reads(tmp_path: Path) -> None:
    assert flight.current.pages is None
    flight.current.enter(Phase.DATA)
    assert os.listdir(tmp_path) == []
