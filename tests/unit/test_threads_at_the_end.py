"""Threads that need the interpreter have finished before it ends: gloo's, and the one that saves from the side."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment

#: The collective takes a while, and has the last references to its tensors by then: a thread of gloo lets go of them,
#: and needs the interpreter's lock again and again to do that.
_PROGRAM = """
import hashlib, threading
import torch
import torch.distributed as dist
import lockstep
from lockstep.comm import gloo_threads

lockstep.init("gloo")
print("names", bool(gloo_threads._states()), flush=True)
group = dist.group.WORLD  # until the end, as a replica keeps it
begun, on_main = threading.Event(), []

class Slow:
    def __del__(self):
        on_main.append(threading.current_thread() is threading.main_thread())
        begun.set()
        digest, block = hashlib.sha256(), bytes(1 << 24)
        for _ in range(20):
            digest.update(block)
        print("let go", on_main[-1], flush=True)

def gather():
    begun.clear()
    gathered, own = [torch.zeros(1 << 25)], torch.ones(1 << 25)
    gathered[0].slow = Slow()
    dist.all_gather(gathered, own, async_op=True)
    del gathered, own
    assert begun.wait(200)
    return on_main[-1]

while gather():  # this thread was kept from its work for longer than the collective took, and let go as the last
    pass
"""


#: A loop of its own, and a Checkpointer that lives until the end. (``atexit`` comes before the interpreter ends.)
_SAVES = """
import atexit, threading
import lockstep, torch

lockstep.init()
model = torch.nn.Linear(2, 1)
saved = lockstep.Checkpointer("runs", model=lockstep.replicate(model))
saved.between_steps()
names = lambda: [each.name for each in threading.enumerate() if "lockstep" in each.name]
print(names())
atexit.register(lambda: print(names()))
"""


def _end(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_no_thread_asks_for_requests_after_the_program(tmp_path: Path) -> None:
    done = _end(_SAVES, tmp_path)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["['lockstep-side']", "[]"]), done


@pytest.mark.internals
def test_a_program_ends_after_gloos_threads_have_let_go(tmp_path: Path) -> None:
    done = _end(_PROGRAM, tmp_path)
    if "names False" in done.stdout:
        pytest.skip("this torch gives gloo's threads no names, so they are not waited for")
    assert (done.returncode, done.stdout.splitlines()[-1], done.stderr) == (0, "let go False", "")
