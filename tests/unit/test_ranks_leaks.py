"""Shared memory that a test leaves is told from what others have."""

from __future__ import annotations

import os
import subprocess
import sys
from multiprocessing import shared_memory

import pytest

from lockstep.testing import leaks

_HOLDS = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(sys.argv[1])
resource_tracker.unregister(memory._name, "shared_memory")
print("holds it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sign what is left here, or tests with ranks beside these take it for theirs."""
    for private in ("_SHM_NAME_PREFIX", "_SHM_SAFE_NAME_LENGTH"):
        monkeypatch.setattr(shared_memory, private, getattr(shared_memory, private))
    leaks.sign(os.getpid())


def test_what_is_left_is_found_and_removed() -> None:
    before = leaks.files()
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.close()
    assert memory.name not in before
    left = leaks.left_since(before, is_ours=lambda _: True, patience=0.05)
    assert memory.name in left
    leaks.remove(frozenset([memory.name]))
    assert memory.name not in leaks.files()


def test_what_a_living_process_of_others_has_mapped_is_not_ours() -> None:
    before = leaks.files()
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.close()
    try:
        with subprocess.Popen(
            [sys.executable, "-c", _HOLDS, memory.name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "holds it\n"
            of_others = leaks.left_since(before, is_ours=lambda pid: pid != holder.pid, patience=0.05)
            assert memory.name not in of_others
            ours = leaks.left_since(before, is_ours=leaks.is_below_this_process, patience=0.05)
            assert memory.name in ours
            holder.communicate()
    finally:
        memory.unlink()


def test_memory_that_says_whose_it_is_is_found_by_that_session_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as ended:
        ended.kill()
    before = leaks.files()
    of_sessions = {}
    for session in (os.getpid(), os.getppid(), ended.pid):
        leaks.sign(session)
        memory = shared_memory.SharedMemory(create=True, size=16)
        memory.close()
        of_sessions[session] = memory.name
    try:
        left = leaks.left_since(before, is_ours=leaks.is_below_this_process, patience=0.05)
        assert left & set(of_sessions.values()) == {of_sessions[os.getpid()]}
    finally:
        leaks.remove(frozenset(of_sessions.values()))


def test_this_process_and_what_it_has_started_are_below_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert leaks.is_below_this_process(child.pid)
        child.kill()
    assert leaks.is_below_this_process(os.getpid())
    assert not leaks.is_below_this_process(os.getppid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_not_ours() -> None:
    before = leaks.files()
    memory = shared_memory.SharedMemory(create=True, size=16)
    memory.close()
    os.chown(f"/dev/shm/{memory.name}", 65534, 65534)
    try:
        assert memory.name not in leaks.left_since(before, is_ours=lambda _: True, patience=0.05)
    finally:
        memory.unlink()
