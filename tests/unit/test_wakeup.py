"""A thread that hears of signals while the main thread runs no Python."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.launching import LIMIT, python_path

_BEGIN = """
import json, os, select, signal, socket, sys, threading, time
from lockstep.job.wakeup import Wakeup

signal.signal(signal.SIGUSR1, lambda *_: None)
"""


def _told(script: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + script],
        env={"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_thread_hears_of_a_signal_while_the_main_thread_is_in_compiled_code() -> None:
    told = _told("""
wakeup, heard = Wakeup(), []

def listen():
    heard.extend([*wakeup.wait(200), time.monotonic()])

thread = threading.Thread(target=listen)
thread.start()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
x = 3
while not heard:  # each turn is one long multiplication, in which no handler is called
    x = 7 ** 300_000 * 7 ** 300_000
thread.join()
wakeup.close()
print(json.dumps([heard[0], signal.set_wakeup_fd(-1)]))
""")
    assert told == [10, -1]


def test_what_was_there_before_hears_too_and_is_put_back() -> None:
    told = _told("""
reads, writes = socket.socketpair()
for end in (reads, writes):
    end.setblocking(False)
signal.set_wakeup_fd(writes.fileno())
wakeup = Wakeup()
os.kill(os.getpid(), signal.SIGUSR1)
heard = wakeup.wait(200)
wakeup.wake()
nothing = wakeup.wait(200)
passed_on = [*reads.recv(10)]
wakeup.close()
print(json.dumps([heard, nothing, passed_on, signal.set_wakeup_fd(-1) == writes.fileno()]))
""")
    assert told == [[10], [], [10], True]


def test_what_somebody_has_set_since_stays() -> None:
    told = _told("""
wakeup = Wakeup()
reads, writes = socket.socketpair()
writes.setblocking(False)
signal.set_wakeup_fd(writes.fileno())
wakeup.close()
print(json.dumps(signal.set_wakeup_fd(-1) == writes.fileno()))
""")
    assert told is True


def test_a_forked_child_is_not_its_parent() -> None:
    told = _told("""
wakeup = Wakeup()
pid = os.fork()
if not pid:
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(0)
os.waitpid(pid, 0)
print(json.dumps(wakeup.wait(0.2)))
""")
    assert told == []


def test_it_hears_signals_beyond_a_thousand_descriptors() -> None:
    told = _told("""
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
while os.open("/dev/null", os.O_RDONLY) <= 1100:
    pass
wakeup = Wakeup()
os.kill(os.getpid(), signal.SIGUSR1)
print(json.dumps(wakeup.wait(200)))
""")
    assert told == [10]


def test_what_was_there_before_and_is_closed_is_not_put_back() -> None:
    told = _told("""
ends = socket.socketpair()
for end in ends:
    end.setblocking(False)
signal.set_wakeup_fd(ends[1].fileno())
wakeup = Wakeup()
for end in ends:
    end.close()
wakeup.close()
print(json.dumps(signal.set_wakeup_fd(-1)))
""")
    assert told == -1


def test_a_signal_whose_handler_the_program_has_replaced_is_no_request() -> None:
    told = _told("""
from lockstep.job.stop import Requests
requests = Requests()
requests.listen()
signal.signal(signal.SIGTERM, lambda *_: None)
requests.noticed(signal.SIGTERM)
wanted = [requests.wanted]
requests.close()
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
requests.listen()
requests.noticed(signal.SIGUSR1)
print(json.dumps([*wanted, requests.wanted.name]))
""")
    assert told == [None, "SAVE"]
