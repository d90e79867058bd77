"""What a trace is made of: records in a file, slices, arrows, clocks of several machines."""

from __future__ import annotations

import errno
import gzip
import json
import random
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from lockstep import LaunchError, knobs
from lockstep.job import flight, tracing
from lockstep.job.files import JobFiles
from lockstep.job.flight import Flight
from lockstep.job.page import PAGE, Phase
from lockstep.job.trace import BatchTimes, EventKind, EventWriter, RankTrace, batches, is_over
from lockstep.launch.launcher import Launcher
from lockstep.launch.tracing import Tracer
from lockstep.rendezvous.clocks import ahead
from lockstep.rendezvous.messages import Round
from lockstep.runs import trace as traces
from lockstep.runs.timeline import Measured, events_of
from lockstep.runs.trace import BadTrace, Origin, Trace
from tests.devices import Stream
from tests.traces import Checked


@pytest.mark.parametrize(
    ("text", "asked"), [("20", (20, 10)), ("20:0", (20, 0)), ("1:7", (1, 7)), ("10000:5", (10_000, 5))]
)
def test_what_is_asked_for_is_read(text: str, asked: tuple[int, int]) -> None:
    assert knobs.parse_trace(text) == asked
    assert knobs.trace({"LOCKSTEP_TRACE": text}) == asked
    assert knobs.trace({}) is None


class _Eye:
    on_demand = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def open(self, recorder: EventWriter) -> None:  # noqa: ARG002
        self.seen.append("open")

    def close(self) -> None:
        self.seen.append("close")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process's page, at a rank's first step, and an eye that sees nothing."""
    monkeypatch.setattr(tracing, "_eyes", [])
    before = flight.current
    flight.use(Flight(memoryview(bytearray(PAGE)))).count()
    yield tmp_path
    flight.use(before)
    tracing._recorder = tracing._place = tracing._asked = None
    tracing._waits.clear()


def _step() -> None:
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        flight.current.enter(phase)
    flight.current.leave(Phase.BACKWARD)
    with flight.waiting("the others"):
        pass
    flight.current.enter(Phase.OPTIMIZER)
    flight.current.took_step()


def test_the_window_opens_and_closes_and_leaves_nothing_behind(rank: Path) -> None:
    eye = _Eye()
    tracing.look_with(eye)
    tracing.arm(rank, rank=3, steps=2, first=3)
    for taken in range(8):
        assert type(flight.current).__name__ == ("_Armed" if taken < 3 else "_Recording" if taken < 5 else "Flight")
        assert eye.seen == ([] if taken < 3 else ["open"] if taken < 5 else ["open", "close"])
        assert is_over(rank, 3) == (taken >= 5)
        _step()
    assert type(flight.current) is Flight
    part = RankTrace.read(rank, 3)
    assert part is not None
    assert (part.rank, part.steps, part.lost) == (3, 3, 0)
    assert [event.number for event in part.events if event.kind is EventKind.STEP] == [4, 5]
    assert (
        sum(event.kind is EventKind.BEGIN for event in part.events)
        == sum(event.kind is EventKind.END for event in part.events)
        == 2
    )
    slices = [event for event in events_of(part, {}) if event["ph"] == "X"]
    named = [each["name"] for each in slices if each["cat"] == "phase"]
    assert (
        named
        == ["your code", *["data", "forward", "backward", "your code", "optimizer", "your code"] * 2][: len(named)]
    )
    assert [each["name"] for each in slices if each["cat"] == "wait"] == ["wait: the others"] * 2


def test_a_window_that_nobody_has_asked_for_opens_what_every_run_is_seen_by(rank: Path) -> None:
    always, on_demand = _Eye(), _Eye()
    on_demand.on_demand = True
    tracing.look_with(always)
    tracing.look_with(on_demand)
    tracing.arm(rank, rank=0, steps=1, first=1, on_demand=False)
    for _ in range(3):
        _step()
    assert always.seen == ["open", "close"]
    assert "open" not in on_demand.seen


def test_where_there_is_no_room_for_events_the_rank_says_so_and_trains(
    rank: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eye = _Eye()
    tracing.look_with(eye)
    tracing.arm(rank, rank=3, steps=1, first=1)
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
        for _ in range(3):
            _step()
    assert "lockstep: rank 3 can't be traced: No space left on device" in capsys.readouterr().err
    assert (type(flight.current), eye.seen, RankTrace.read(rank, 3)) == (Flight, [], None)


def test_a_gpu_is_followed_from_where_it_is_known(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_device", None)
    stream = Stream()
    tracing.arm(rank, rank=0, steps=2, first=0)
    _step()
    tracing.watch(stream)
    stream.queued += 5
    flight.current.enter(Phase.OPTIMIZER)
    flight.current.took_step()
    part = RankTrace.read(rank, 0)
    assert part is not None
    known = [event for event in part.events if event.device]
    assert {event.kind for event in known} == {EventKind.PHASE, EventKind.STEP}
    assert 0 < len(known) < len(part.events), "of the first step nothing is known"
    assert all(event.device - known[0].device == 0 for event in known)
    assert stream.done == stream.queued, "it is waited for once, at the end"


def test_a_window_from_the_first_step_on(rank: Path) -> None:
    tracing.arm(rank, rank=0, steps=1, first=0)
    assert type(flight.current).__name__ == "_Recording"
    _step()
    assert type(flight.current) is Flight
    part = RankTrace.read(rank, 0)
    assert part is not None
    assert [event.number for event in part.events if event.kind is EventKind.STEP] == [1]


class _Other(Flight):
    """Another writer of the page, which takes its place while a trace is armed or under way, as a GPU's does."""

    def __init__(self, before: Flight) -> None:
        vars(self).update(vars(before))
        self.steps_seen = 0

    def took_step(self) -> None:
        super().took_step()
        self.steps_seen += 1


@pytest.mark.parametrize("first", [0, 2])
def test_a_trace_goes_on_with_another_writer_of_the_page(rank: Path, first: int) -> None:
    tracing.arm(rank, rank=0, steps=3, first=first)
    flight.use(_Other(flight.current))
    tracing.settle()
    for taken in range(6):
        assert isinstance(flight.current, _Other)
        assert flight.current.steps_seen == taken
        _step()
    assert type(flight.current) is _Other
    part = RankTrace.read(rank, 0)
    assert part is not None
    assert [event.number for event in part.events if event.kind is EventKind.STEP] == [first + 1, first + 2, first + 3]
    assert is_over(rank, 0)


def test_what_does_not_fit_is_counted(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.job.trace._LEAST", 8)
    monkeypatch.setattr("lockstep.job.trace._EVENTS_PER_STEP", 1)
    recorder = EventWriter(rank, rank=0, steps=1)
    recorder.open(steps=0)
    for number in range(20):
        recorder.add(EventKind.STEP, 0, number + 1)
    part = RankTrace.read(rank, 0)
    assert part is not None
    assert (len(part.events), part.lost) == (8, 13), "one of them is the thread's name"


def test_a_full_disk_costs_a_trace_names_and_nothing_else(rank: Path) -> None:
    recorder = EventWriter(rank, rank=0, steps=1)
    recorder.open(steps=0)
    recorder.begin(recorder.name("before", "wait"))
    names = JobFiles(rank).trace_names(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (names.stat().st_size + 10, hard))
    try:
        cut, refused = recorder.name("cut off in its middle", "wait"), recorder.name("refused", "wait")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (cut, refused) == (0, 0)
    assert not names.read_bytes().endswith(b"\n"), "a part of a name is there"
    recorder.begin(cut)
    recorder.begin(recorder.name("after", "wait"))
    part = RankTrace.read(rank, 0)
    assert part is not None
    begun = [event.about["name"] for event in part.events if event.kind is EventKind.BEGIN]
    assert begun == ["before", "…", "after"]


def test_a_name_that_comes_when_the_window_is_over_is_written_nowhere(rank: Path, tmp_path: Path) -> None:
    recorder = EventWriter(rank, rank=0, steps=1)
    recorder.close()
    with ExitStack() as opened:  # one of them has its file's number now
        others = [opened.enter_context(open(tmp_path / str(number), "wb")) for number in range(3)]
        assert recorder.name("too late", "wait") == 0
    assert [Path(other.name).read_bytes() for other in others] == [b"", b"", b""]


def test_a_part_that_was_cut_off_anywhere_is_read(rank: Path) -> None:
    recorder = EventWriter(rank, rank=0, steps=1)
    assert RankTrace.read(rank, 0) is None, "not opened yet"
    recorder.open(steps=5)
    for _ in range(3):
        recorder.begin(recorder.name("a", "wait"))
        recorder.end()
    recorder.begin(recorder.name("b", "wait"))
    files = JobFiles(rank)
    whole, names = files.trace(0).read_bytes(), files.trace_names(0).read_bytes()
    for cut in (*range(0, 600, 7), len(whole)):
        files.trace(0).write_bytes(whole[:cut])
        files.trace_names(0).write_bytes(names[: cut // 4])
        part = RankTrace.read(rank, 0)
        assert (part is None) == (cut < 64)
        if part is not None:
            made = [event for event in events_of(part, {}) if event["ph"] == "X" and event["cat"] != "user_annotation"]
            assert all(event["dur"] > 0 for event in made)


def test_batches_of_workers_are_kept_until_the_window_is_over(rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.job.trace._BATCHES", 4)
    recorder = EventWriter(rank, rank=2, steps=1)
    times = BatchTimes(rank, rank=2, name="0-1")
    for position in range(6):
        times.add(100 + position, position, 8)
    assert [batch.position for batch in next(iter(batches(rank, 2).values()))] == [2, 3, 4, 5], "the last ones"
    recorder.close()
    times.add(200, 9, 8)
    ((name, made),) = batches(rank, 2).items()
    assert name.startswith("worker 1 of loader 0 (")
    assert [batch.position for batch in made] == [2, 3, 4, 5]
    assert batches(rank, 1) == {}


def test_events_that_can_not_be_read_end_nothing_and_are_told(tmp_path: Path) -> None:
    JobFiles(tmp_path).trace(0).mkdir()
    tracer = Tracer(lambda: tmp_path, home=tmp_path, round_=Round(0, (1,), "", 0), asked=(20, 10))
    assert tracer.look() == []
    (told,) = tracer.conclude(steps=40)
    assert told.startswith("the trace can't be written: [Errno 21] Is a directory")


def test_clocks_of_machines_that_meet_are_told_with_their_error() -> None:
    draw = random.Random(3)
    for _ in range(200):
        offset = draw.randrange(-(10**12), 10**12)
        now, here, there = 10**15, [], []
        for number in range(4):
            said = [now + draw.randrange(10**9 if number == 0 else 10**6) for _ in range(2)]
            through = [max(said) + draw.randrange(10**5) for _ in range(2)]
            now = max(through)
            here.append((said[0], through[0]))
            there.append((said[1] + offset, through[1] + offset))
        found, error, at = ahead(there, here)
        assert abs(found - offset) <= error < 2 * 10**6, "known to what the later meetings took"
        assert at == there[-1][1]
        assert ahead(here, here) == (0, 0, here[-1][1])


def _machine(node: int, offset: int, *, late: dict[int, int], measured: Measured | None = None) -> Trace:
    """Two ranks of a machine, in ten collectives of all four, on a clock of its own; nanoseconds."""
    events: list[dict[str, Any]] = []
    ranks = {100 + number: 2 * node + number for number in range(2)}
    for pid, rank in ranks.items():
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "ts": 0, "args": {"name": "collectives"}},
        ]
        for number in range(1, 11):
            come = {
                each: number * 10_000_000 + (2_000_000 if late[number] == each else 50_000 * each) for each in range(4)
            }
            end = max(come.values()) + 30_000 + 1_000 * rank
            args = {"operation": "all_reduce", "group": "0", "ranks": 4, "backend": "shm", "number": number}
            common = {"pid": pid, "tid": 1, "args": args, "ts": come[rank] + offset, "dur": end - come[rank]}
            events.append({"ph": "X", "name": f"all_reduce #{number}", "cat": "collective", **common})
    about = {
        "trace": traces.VERSION,
        "node": node,
        "nodes": 2,
        "start": "job 0",
        "world_size": 4,
        "processes": {str(pid): rank for pid, rank in ranks.items()},
        "hosts": {str(rank): f"host{node}" for rank in ranks.values()},
        "steps": [3, 12],
        "cut_off": [],
        "lost_events": {},
        "missing_ranks": [],
        "profiles": {},
        "measured": None if measured is None else vars(measured),
        "at": 110_000_000 + offset,
        "clocks": {},
    }
    return Trace(about, traces._ordered(events), 10**18, [])


@pytest.mark.parametrize("offset", [0, 5_000_000_000_000, -70_000_000])
def test_machines_are_aligned_by_who_had_to_wait_for_whom(tmp_path: Path, offset: int) -> None:
    late = {number: number % 4 for number in range(1, 11)}
    paths = []
    for node, by in ((0, 0), (1, offset)):
        paths.append(tmp_path / f"trace-node{node}.json.gz")
        _machine(node, by, late=late).write(paths[-1])
    merged = traces.merge([traces.read(path) for path in reversed(paths)])
    clock = merged.about["clocks"]["1"]
    assert clock["by"] == "the collectives in the window"
    assert abs(clock["ahead_us"] * 1000 - offset) <= clock["error_us"] * 1000 <= 40_000
    merged.write(tmp_path / "trace.json.gz")
    whole = Checked(tmp_path / "trace.json.gz")
    whole.check_against_collectives(least=2 * clock["error_us"])
    assert sorted(whole.ranks.values()) == [0, 1, 2, 3]
    assert {(each["args"]["number"], each["args"]["late"]) for each in whole.arrows} == set(late.items())
    with pytest.raises(BadTrace, match="merged already"):
        traces.merge([traces.read(tmp_path / "trace.json.gz"), traces.read(paths[0])])


def test_where_one_machine_always_comes_last_what_was_measured_helps() -> None:
    late, offset = dict.fromkeys(range(1, 11), 3), 4_000_000
    alone = traces.merge([_machine(0, 0, late=late), _machine(1, offset, late=late)]).about["clocks"]["1"]
    assert abs(alone["ahead_us"] * 1000 - offset) <= alone["error_us"] * 1000
    assert alone["error_us"] > 900, "half of the wait"
    known = Measured(offset + 3_000, 5_000, 110_000_000)
    here = _machine(0, 0, late=late, measured=Measured(0, 0, 0))
    both = traces.merge([here, _machine(1, offset, late=late, measured=known)]).about["clocks"]["1"]
    assert abs(both["ahead_us"] * 1000 - offset) <= both["error_us"] * 1000 < 10_000
    assert both["by"] == "the collectives in the window and what was measured when the machines met"
    wrong = Measured(offset + 10**9, 5_000, 110_000_000)
    here = _machine(0, 0, late=late, measured=Measured(0, 0, 0))
    told = traces.merge([here, _machine(1, offset, late=late, measured=wrong)]).about["clocks"]["1"]
    assert told["by"] == "the collectives in the window", "a clock was set meanwhile"


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    late = dict.fromkeys(range(1, 11), 3)
    first, second = _machine(0, 0, late=late), _machine(1, 0, late=late)
    with pytest.raises(BadTrace, match="same machine"):
        traces.merge([first, _machine(0, 0, late=late)])
    second.about["start"] = "job 1"
    with pytest.raises(BadTrace, match="different jobs"):
        traces.merge([first, second])
    with pytest.raises(BadTrace, match="no such file"):
        traces.read(tmp_path / "none")
    (tmp_path / "text").write_text("{}")
    with pytest.raises(BadTrace, match="not a trace"):
        traces.read(tmp_path / "text")
    first.about["trace"] = 99
    first.write(tmp_path / "later.json.gz")
    with pytest.raises(BadTrace, match="can't read"):
        traces.read(tmp_path / "later.json.gz")
    whole = (tmp_path / "later.json.gz").read_bytes()
    (tmp_path / "cut.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTrace, match="not a trace"):
        traces.read(tmp_path / "cut.json.gz")


@pytest.mark.parametrize("wrong", [None, "../x"])
def test_a_trace_that_somebody_has_changed_is_refused_in_a_sentence(tmp_path: Path, wrong: str | None) -> None:
    late = dict.fromkeys(range(1, 11), 3)
    for key in ("processes", "steps", "node", "hosts", "cut_off", "lost_events", "profiles", "at", "clocks", "start"):
        trace = _machine(0, 0, late=late)
        path = tmp_path / f"{key}.json.gz"
        trace.write(path)
        data = json.loads(gzip.decompress(path.read_bytes()))
        data["lockstep"][key] = dict.fromkeys(data["lockstep"][key], wrong) if key == "processes" else wrong
        path.write_bytes(gzip.compress(json.dumps(data).encode()))
        if not (key == "start" and wrong):
            with pytest.raises(BadTrace, match="not a whole trace"):
                traces.read(path)
    for key in ("ts", "pid", "name", "ph"):
        data["lockstep"] = trace.about | {"base_ns": 0, "start": "job 0"}
        events = [{name: value for name, value in event.items() if name != key} for event in data["traceEvents"]]
        path.write_bytes(gzip.compress(json.dumps({**data, "traceEvents": events}).encode()))
        with pytest.raises(BadTrace, match="not a whole trace"):
            traces.read(path)


def test_a_merged_trace_that_cannot_be_written_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "nowhere" / "trace.json.gz"
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(out))}'$"):
        _machine(0, 0, late=dict.fromkeys(range(1, 11), 3)).write(out)


def test_a_profile_that_is_none_is_told(rank: Path) -> None:
    tracing.arm(rank, rank=0, steps=1, first=0)
    _step()
    JobFiles(rank).profile(0, 1).write_text('{"traceEvents": [{"ph": "X"')
    trace = traces.collect(rank, [0, 1], Origin(0, 1, "here", 2, ""))
    assert trace is not None
    assert "JSONDecodeError" in trace.about["profiles"]["0/1"]["trouble"]
    assert trace.about["missing_ranks"] == [1]


@pytest.fixture
def renewed(monkeypatch: pytest.MonkeyPatch) -> tuple[Launcher, list[str]]:
    """A launcher whose ranks have ended, and what it does as they start again; its processes are not needed here."""
    launcher, did = Launcher.__new__(Launcher), []
    launcher.attempt = SimpleNamespace(number=0, close=lambda: did.append("close"))  # type: ignore[assignment]

    def end_trace(_: Launcher) -> list[str]:
        did.append("trace")
        now.append(now[-1] + 60.0)
        return []

    now = [7.0]
    again = SimpleNamespace(number=1, began=now[0])
    monkeypatch.setattr("lockstep.launch.launcher.time", SimpleNamespace(monotonic=lambda: now[-1]))
    monkeypatch.setattr(Launcher, "_attempt", lambda *_, **__: again)
    monkeypatch.setattr(Launcher, "_end_trace", end_trace)
    monkeypatch.setattr(Launcher, "_end_start", lambda _: did.append(f"end at {now[-1]:g}"))
    monkeypatch.setattr(Launcher, "_record_start", lambda self: did.append(f"begin at {self.attempt.began:g}"))
    return launcher, did


def test_the_time_that_a_trace_takes_is_no_starts(renewed: tuple[Launcher, list[str]]) -> None:
    """A start ends with its ranks, and the next one begins when the trace is written."""
    launcher, did = renewed
    assert launcher.renew(Round(0, (1,), "", 0)).number == 1
    assert did == ["end at 7", "trace", "close", "begin at 67"]


def test_a_start_that_can_not_be_followed_stays_the_last(
    renewed: tuple[Launcher, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its trace, which is written at the end of the job."""
    launcher, did = renewed

    def attempt(*_: object, **__: object) -> NoReturn:
        raise LaunchError("the disk is full")

    monkeypatch.setattr(Launcher, "_attempt", attempt)
    with pytest.raises(LaunchError, match="the disk is full"):
        launcher.renew(Round(0, (1,), "", 0))
    assert (launcher.attempt.number, did) == (0, [])
