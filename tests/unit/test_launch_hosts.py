"""Several hosts from one terminal: what the user may say, what goes over the connections, where the launchers meet."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lockstep import EnvironmentMismatch, LaunchError, knobs
from lockstep.launch import console, tracing
from lockstep.launch.console import MET
from lockstep.launch.hosted import Order, _Guard
from lockstep.launch.hosts import _FULL, _PATIENCE, Line, _Job, refuse_with_hosts
from lockstep.launch.output import OutputSink
from lockstep.launch.processes import SignalArrival
from lockstep.remote.frames import SILENT, FrameKind, Frames, Greeting, frame
from lockstep.remote.ssh import Host, meeting_place, parse_hosts, passed_on


def _guard(said: int, output: int) -> _Guard:
    """A guard that reads from two pipes. Its process, and what it is connected to, are not needed here."""
    for fd in (output, said):
        os.set_blocking(fd, False)
    guard = _Guard.__new__(_Guard)
    guard._connected, guard._outgoing = True, bytearray()
    guard._begun, guard._messages, guard._has_met = b"", [], False
    guard._readers = {said: FrameKind.SAID, output: FrameKind.OUTPUT}
    return guard


def test_a_guard_that_is_late_passes_on_what_was_said_in_order() -> None:
    """Of the machines before any output, and of ranks that failed after theirs, though all came by their own pipes."""
    output, said = os.pipe(), os.pipe()
    guard = _guard(said[0], output[0])
    os.write(said[1], b"machines\n" + MET + b"\n")
    os.write(output[1], b"from rank 0\n")
    os.write(said[1], b"rank 0 failed\n")
    guard._read({output[0], said[0]})
    told = [(FrameKind.SAID, b"machines"), (FrameKind.SAID, MET), (FrameKind.OUTPUT, b"from rank 0\n")]
    assert bytes(guard._outgoing) == b"".join(frame(*each) for each in [*told, (FrameKind.SAID, b"rank 0 failed")])
    for fd in (*output, *said):
        os.close(fd)


def test_a_message_is_passed_on_though_a_rank_writes_without_end() -> None:
    said, output = os.pipe(), os.open("/dev/zero", os.O_RDONLY)
    guard = _guard(said[0], output)
    os.write(said[1], b"rank 0 failed\n")
    guard._read({said[0]})
    assert guard._outgoing.endswith(frame(FrameKind.SAID, b"rank 0 failed"))
    for fd in (output, *said):
        os.close(fd)


def test_a_message_that_comes_in_parts_is_passed_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    output, said = os.pipe(), os.pipe()
    guard = _guard(said[0], output[0])
    monkeypatch.setattr(console, "_reader", console._Outlet(said[1]))
    text, written = "\N{SNOWMAN}\r\n" * 10_000, os.write

    def write_a_part(fd: int, data: bytes) -> int:
        assert not guard._outgoing, "not before it is whole"
        count = written(fd, data[:10_000])
        guard._read({said[0]})
        return count

    monkeypatch.setattr(os, "write", write_a_part)
    console.say(text, once="failed")
    frames = Frames()
    frames.greeting = Greeting("1", 4000)
    ((kind, message),) = frames.feed(bytes(guard._outgoing))
    assert (kind, json.loads(message)) == (FrameKind.SAID, {"text": text, "once": "failed", "later": False})
    for fd in (*output, *said):
        os.close(fd)


@pytest.fixture
def control() -> Iterator[int]:
    """Where to write what the guard in this process is to hear on its standard input."""
    kept, (reads, writes) = os.dup(0), os.pipe()
    os.dup2(reads, 0)
    os.set_blocking(0, False)
    try:
        yield writes
    finally:
        os.dup2(kept, 0)
        for fd in (kept, reads, writes):
            os.close(fd)


def test_a_guard_that_stood_still_hears_what_came_meanwhile(control: int) -> None:
    guard = _Guard.__new__(_Guard)
    guard._connected, guard._outgoing, guard._control, guard._code = True, bytearray(), bytearray(), 0
    now = time.monotonic()
    guard._beat, guard._kill_at, guard._grace = now, float("inf"), 1.0
    guard._heard = now - 2 * SILENT
    os.write(control, b"\n")  # after its poll()
    guard._keep_in_touch(now)
    assert guard._connected
    guard._heard = now - 2 * SILENT
    guard._keep_in_touch(now)
    assert not guard._connected, "nothing has come"


def test_a_host_is_not_silent_while_nobody_listens() -> None:
    """The output waits for a slow terminal, and what comes from the hosts waits for it."""
    (signals, unused), (terminal, shown) = os.pipe(), os.pipe()
    long_ago = time.monotonic() - 2 * SILENT
    quiet = SimpleNamespace(
        open=True, heard=long_ago, readable=[], process=SimpleNamespace(kill=lambda: None), words=""
    )
    job, sink = _Job.__new__(_Job), OutputSink(shown)  # its processes are not needed here
    job._connections, job._sinks = [quiet], {FrameKind.OUTPUT: sink}  # type: ignore[list-item]
    job._signals, job._looked, job._read_on_at = signals, long_ago, float("inf")  # type: ignore[assignment]
    sink.backlog += bytes(2 * _FULL)
    job._write(0.0)
    job._end_silent()
    assert quiet.open
    sink.backlog.clear()
    job._write(0.0)
    job._end_silent()
    assert not quiet.open, "it is listened to, and nothing has come"
    assert quiet.words == "no sign of life for 30 s"
    for fd in (signals, unused, terminal, shown):
        os.close(fd)


@pytest.mark.parametrize(("grace", "signals"), [(30.0, 2), (-_PATIENCE, 1)])
def test_a_signal_ends_a_job_whose_output_is_stuck(grace: float, signals: int) -> None:
    """The ends of the hosts are read behind it: once the time to stop is over, or at a second signal."""
    (queue, unused), (terminal, shown), (output, host) = os.pipe(), os.pipe(), os.pipe()
    told: list[bytes] = []
    stopped = SimpleNamespace(open=True, code=None, readable=[output], send=told.append)
    job, sink = _Job.__new__(_Job), OutputSink(shown)  # its processes are not needed here
    job._connections, job._sinks = [stopped], {FrameKind.OUTPUT: sink}  # type: ignore[list-item]
    job._signals, job._looked, job._stopped_by = queue, 0.0, None  # type: ignore[assignment]
    job._grace, job._read_on_at = grace, float("inf")
    sink.backlog += bytes(2 * _FULL)
    os.write(host, frame(FrameKind.ENDED, b"130"))
    for _ in range(signals):
        assert output not in job._write(0.0), "the host waits for the reader"
        job._on_signal(signal.SIGINT)
    assert output in job._write(0.0)
    assert told == [b"SIGINT\n"] * signals
    for fd in (queue, unused, terminal, shown, output, host):
        os.close(fd)


def test_a_signal_ends_the_wait_for_a_reader_that_takes_nothing() -> None:
    """After all hosts have ended, too."""
    (queue, arrives), (terminal, shown) = os.pipe(), os.pipe()
    job, sink = _Job.__new__(_Job), OutputSink(shown)  # its processes are not needed here
    job._connections, job._sinks, job._later, job._unfinished = [], {FrameKind.OUTPUT: sink}, [], {}
    job._codes, job._pressed_codes, job._stopped_by = [130], [], None
    job._looked, job._read_on_at = 0.0, float("inf")
    arrivals = [[SignalArrival(signal.SIGINT, True)], [SignalArrival(signal.SIGTSTP, True)], []]
    job._signals = SimpleNamespace(fileno=lambda: queue, read=arrivals.pop)  # type: ignore[assignment]
    sink.backlog += bytes(2 * _FULL)
    assert job.conclude() == 130
    assert not arrivals
    assert sink.backlog
    for fd in (queue, arrives, terminal, shown):
        os.close(fd)


def test_a_job_is_not_done_if_a_host_had_to_be_told_to_end() -> None:
    told: list[bytes] = []
    done = SimpleNamespace(host=Host("a"), open=False, code=0, met=True)
    goes_on = SimpleNamespace(host=Host("b"), open=True, code=None, met=True, send=told.append)
    job = _Job.__new__(_Job)  # its processes are not needed here
    job._connections, job._sinks, job._later, job._unfinished = [done, goes_on], {}, [], {}  # type: ignore[list-item]
    job._codes, job._pressed_codes, job._stopped_by, job._ended = [], [], None, set()
    job._grace, job._press_at, job._pressed = 7.0, float("inf"), 0
    job._note_ends(100.0)
    job._press(job._press_at)
    assert told == [b"SIGTERM\n"]
    goes_on.open, goes_on.code = False, 143
    job._note_ends(110.0)
    assert job.conclude() == 143


def test_a_host_that_writes_its_trace_and_tells_of_its_end_is_not_ended_before_it_can_be_done() -> None:
    """All of this has limits of its own, and one after the other they take longest."""
    job = _Job.__new__(_Job)  # its processes are not needed here
    job._connections, job._pressed, job._grace = [], 0, 7.0
    job._press(100.0)
    assert job._press_at - 100.0 > 7.0 + tracing.LIMIT + tracing.OTHERS + 2 * knobs.times().notify


def test_hosts_with_users_and_numbers() -> None:
    assert parse_hosts("a,b:4,user@c,me@d.example:2,[::1]:3,10.0.0.1") == (
        Host("a"),
        Host("b", "4"),
        Host("user@c"),
        Host("me@d.example", "2"),
        Host("::1", "3"),
        Host("10.0.0.1"),
    )


@pytest.mark.parametrize(
    "text", ["", "a,", "a,,b", "a b", "a:0", "a:x", "a:-1", "@a", "u@", "-oProxyCommand=x", "u@-x", "a:1:2", "[x]"]
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a host; expected HOST, USER@HOST or HOST:RANKS"):
        parse_hosts(text)


def test_a_host_that_is_there_twice() -> None:
    with pytest.raises(ValueError, match="a is named twice; write a:N for N ranks there"):
        parse_hosts("a,b,a:2")


def test_options_that_say_the_same_are_refused() -> None:
    refuse_with_hosts("a,b", {"--nnodes": None, "--standalone": False})
    with pytest.raises(ValueError, match="--node-rank with --hosts=a,b: the hosts are counted and find each other"):
        refuse_with_hosts("a,b", {"--nnodes": None, "--node-rank": 0})


def test_the_line_for_a_host_survives_its_shell() -> None:
    line = Line("2", ("--grace=5.0", "--", "it's.py", "$HOME", "a  b", ""), grace=5.0)
    command = line.command(Host("b", "4"), cwd="/a b/c", env={"PYTHONPATH": "/x y"})
    words = shlex.split(command)
    assert words[:5] == ["cd", "/a b/c", "&&", "exec", "env"]
    assert words[5] == "PYTHONPATH=/x y"
    assert words[words.index("run") :] == [
        *("run", "--hosted", "-n", "4", "--grace=5.0", "--", "it's.py", "$HOME", "a  b", "")
    ]
    assert "-n" not in shlex.split(Line(None, (), grace=1.0).command(Host("a"), cwd="/", env={}))


def test_variables_that_go_along() -> None:
    env = {"LOCKSTEP_BACKEND": "gloo", "LOCKSTEP_KEY": "ab" * 32, "HOME": "/root", "TERM": "xterm", "PYTHONPATH": "/x"}
    assert passed_on(env, terminal=False) == {"LOCKSTEP_BACKEND": "gloo", "PYTHONPATH": "/x"}
    assert passed_on(env, terminal=True) == {"LOCKSTEP_BACKEND": "gloo", "PYTHONPATH": "/x", "TERM": "xterm"}


def test_the_hosts_meet_at_the_first() -> None:
    hosts = parse_hosts("a,b")
    assert meeting_place(hosts, ["10.0.0.1", "b"], 4000) == "10.0.0.1:4000"
    assert meeting_place(hosts, ["fe80::1", "b"], 4000) == "[fe80::1]:4000"
    assert meeting_place(hosts, ["127.0.0.1", "127.0.0.2"], 4000) == "127.0.0.1:4000"
    with pytest.raises(LaunchError, match="a is localhost, which is b itself for b"):
        meeting_place(hosts, ["localhost", "b"], 4000)


def test_frames_come_in_any_pieces() -> None:
    said = b'lockstep is here: {"version": "1", "port": 4000}\n'
    stream = (
        b"Welcome!\n\n"
        + said
        + frame(FrameKind.OUTPUT, b"a\nb 3\n")
        + frame(FrameKind.ALIVE)
        + frame(FrameKind.ENDED, b"75")
    )
    for size in (1, 7, len(stream)):
        frames = Frames()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        found = [each for piece in pieces for each in frames.feed(piece)]
        assert frames.greeting == Greeting("1", 4000)
        assert found == [(FrameKind.OUTPUT, b"a\nb 3\n"), (FrameKind.ALIVE, b""), (FrameKind.ENDED, b"75")]


def test_an_order_is_a_line() -> None:
    order = Order("ab" * 32, 2, "a:1", "job", one_stream=True, terminal=(24, 80), grace=10.0)
    assert order.encode().count(b"\n") == 1
    assert Order.decode(order.encode()) == order


def test_the_ssh_client() -> None:
    assert knobs.ssh({}) == ["ssh"]
    assert knobs.ssh({"LOCKSTEP_SSH": "ssh -F 'a b'"}) == ["ssh", "-F", "a b"]
    with pytest.raises(EnvironmentMismatch, match="LOCKSTEP_SSH"):
        knobs.ssh({"LOCKSTEP_SSH": "ssh 'x"})
