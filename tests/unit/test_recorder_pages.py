"""A rank's page: what is written into it is what a reader finds, and never half of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep import expect_slow
from lockstep.recorder import writer
from lockstep.recorder.layout import NAMES, NUMBERS, PAGE, WORDS, Look, Phase, decode
from lockstep.recorder.reader import Pages
from lockstep.recorder.writer import Recorder


def _page() -> tuple[Recorder, memoryview]:
    memory = memoryview(bytearray(PAGE))
    return Recorder(memory), memory


def _look(memory: memoryview) -> Look:
    look = decode(memory)
    assert look is not None
    return look


def test_every_phase_has_a_name_and_a_line_of_its_own() -> None:
    recorder, memory = _page()
    assert set(NAMES) == set(Phase)
    for phase in Phase:
        recorder.enter(phase)
        look = _look(memory)
        assert (look.phase, look.entered) == (phase, phase)
        assert look.place.endswith(" in test_every_phase_has_a_name_and_a_line_of_its_own")
        assert f"{__file__}:" in look.place


def test_own_code_is_placed_behind_the_phase_before_it() -> None:
    recorder, memory = _page()
    recorder.enter(Phase.OPTIMIZER)
    before = _look(memory)
    recorder.took_step()
    after = _look(memory)
    assert (after.phase, after.entered, after.steps) == (Phase.OWN, Phase.OPTIMIZER, before.steps + 1)
    assert after.place == before.place
    assert after.events > before.events


def test_a_wait_tells_what_and_where_and_is_no_phase() -> None:
    recorder, memory = _page()
    recorder.enter(Phase.REDUCE)
    recorder.begin_wait("all_reduce #3")
    inner = _look(memory)
    recorder.begin_wait("round 7")
    innermost = _look(memory)
    recorder.end_wait()
    assert _look(memory).waiting, "the outer wait goes on"
    recorder.end_wait()
    assert inner.waiting
    assert inner.phase is Phase.REDUCE
    assert inner.waits_in.startswith(f"all_reduce #3 at {__file__}:")
    assert innermost.waits_in.startswith("round 7 at ")
    assert innermost.waiting_since == inner.waiting_since
    assert not _look(memory).waiting


def test_a_wait_that_failed_stays_in_the_page_until_the_rank_does_something_else() -> None:
    recorder, memory = _page()
    recorder.begin_wait("barrier")
    events = _look(memory).events
    recorder.end_wait(failed=True)
    assert _look(memory).waiting
    assert _look(memory).events == events
    recorder.enter(Phase.DATA)
    assert not _look(memory).waiting


def test_the_time_of_a_wait_is_not_the_phases() -> None:
    recorder, memory = _page()
    recorder.enter(Phase.FORWARD)
    recorder.begin_wait("statistics")
    begun = recorder._since
    while recorder._since < begun + 1:  # until the clock has moved
        recorder.end_wait()
        recorder.begin_wait("statistics")
    recorder.end_wait()
    recorder.enter(Phase.OWN)
    recorder.publish()
    seconds = _look(memory).seconds
    assert seconds[Phase.WAIT] > 0
    assert seconds[Phase.FORWARD] > 0
    assert sum(seconds) == pytest.approx(sum(recorder._sums) / 1e9)


def test_a_page_that_is_being_written_is_not_read() -> None:
    recorder, memory = _page()
    recorder.enter(Phase.DATA)
    numbers = list(NUMBERS.unpack_from(memory))
    NUMBERS.pack_into(memory, 0, numbers[0] + 1, *numbers[1:])
    assert decode(memory) is None


def test_long_texts_are_cut_and_others_stay_whole() -> None:
    recorder, memory = _page()
    recorder.begin_wait("ä" * WORDS)
    recorder.expect("r" * 2 * WORDS)
    look = _look(memory)
    assert look.waits_in.startswith("ä" * 200)
    assert look.reason == "r" * (WORDS - 1)
    recorder.expect("")
    assert _look(memory).reason == ""


@pytest.fixture
def own_page() -> Iterator[memoryview]:
    """The memory of what is this process's page while the test runs."""
    recorder, memory = _page()
    before = writer.current
    writer.use(recorder)
    yield memory
    writer.use(before)


def test_expecting_to_be_slow_nests(own_page: memoryview) -> None:
    memory = own_page
    with expect_slow("evaluation"):
        with expect_slow("upload"):
            assert _look(memory).reason == "upload"
        assert _look(memory).reason == "evaluation"
    assert _look(memory).reason == ""

    @expect_slow("a whole function")
    def slow() -> str:
        return _look(memory).reason

    assert slow() == "a whole function"
    assert _look(memory).reason == ""


def test_a_reason_must_be_words() -> None:
    with pytest.raises(ValueError, match="reason in words"):
        expect_slow(" ")
    with pytest.raises(TypeError, match="not int"):
        expect_slow(60)  # type: ignore[arg-type]


_RANK = """
import os, sys
from lockstep.recorder import writer
from lockstep.recorder.layout import Phase
writer.take(sys.argv[1], rank=int(sys.argv[2]), local_rank=int(sys.argv[2]))
writer.current.enter(Phase.BACKWARD)
if os.fork() == 0:
    writer.current.enter(Phase.SAVE)  # a loader's worker is no rank
    os._exit(0)
os.wait()
assert "torch" not in sys.modules
"""


def test_a_reader_sees_what_ranks_of_other_processes_write_and_not_their_children(tmp_path: Path) -> None:
    pages = Pages(tmp_path, 2)
    try:
        assert pages.look(0) is None
        subprocess.run([sys.executable, "-c", _RANK, str(tmp_path), "1"], check=True, timeout=30)
        look = pages.look(1)
        assert look is not None
        assert look.phase is Phase.BACKWARD
        assert pages.look(0) is None, "the other rank has not begun"
    finally:
        pages.close()
        pages.close()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


def test_without_a_watcher_nothing_is_written(tmp_path: Path) -> None:
    before = writer.current
    writer.take(tmp_path, rank=0, local_rank=0)
    assert writer.current is before
    assert os.listdir(tmp_path) == []


def _step(recorder: Recorder, memory: memoryview) -> list[Look]:
    """What the page says at each event of a step of no length."""
    looks = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        recorder.enter(phase)
        looks.append(_look(memory))
    recorder.took_step()
    return [*looks, _look(memory)]


def test_short_steps_are_noted_in_short_and_still_show_every_event() -> None:
    recorder, memory = _page()
    events, shorts = [], 0
    for step in range(200):
        looks = _step(recorder, memory)
        assert [look.phase for look in looks] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OWN]
        assert [look.entered for look in looks] == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OPTIMIZER]
        assert [look.steps for look in looks] == [step, step, step, step + 1]
        assert all(look.place.endswith(" in _step") for look in looks)
        events += [look.events for look in looks]
        shorts += recorder.short
    assert events == sorted(set(events)), "an event that leaves no trace looks like a rank that is stuck"
    assert shorts > 150


def test_the_time_of_short_steps_is_divided_among_the_phases_and_none_is_lost() -> None:
    recorder, memory = _page()
    begun = recorder._since
    while not recorder.short:
        _step(recorder, memory)
    _step(recorder, memory)
    recorder.record_in_full()
    assert sum(recorder._sums) == pytest.approx(recorder._since - begun, abs=len(Phase))
    assert recorder._sums[Phase.FORWARD] > 0
    assert recorder._sums[Phase.WAIT] == 0


def test_a_rank_that_sleeps_for_others_is_recorded_in_full_again() -> None:
    recorder, memory = _page()
    while not recorder.short:
        _step(recorder, memory)
    recorder.enter(Phase.BACKWARD)
    recorder.begin_wait("all_reduce #9")
    look = _look(memory)
    assert look.waiting
    assert (look.phase, look.entered) == (Phase.BACKWARD, Phase.BACKWARD)
    recorder.end_wait(failed=True)
    assert _look(memory).waiting
    recorder.enter(Phase.DATA)
    assert not _look(memory).waiting


def test_a_long_row_of_events_without_a_step_knows_when_its_phase_began() -> None:
    recorder, memory = _page()
    while not recorder.short:
        _step(recorder, memory)
    before = _look(memory).since
    for _ in range(writer._SHORT_EVENTS):
        recorder.enter(Phase.EVALUATE)
    assert _look(memory).since > before
