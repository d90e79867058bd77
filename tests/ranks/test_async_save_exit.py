"""The end of a process whose last save is still under way, or has failed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lockstep.checkpoint.background import Background
from lockstep.checkpoint.read import read
from tests.launching import run

_SCRIPT = """
import os, sys
import torch, lockstep
from torch import nn
from lockstep.checkpoint.storage import Storage

class Full(Storage):
    def write(self, file, data, offset):
        raise OSError(28, "No space left on device")

world = lockstep.init()
torch.manual_seed(0)  # else the replicas differ, and rank 0 writes all
model = nn.Linear(3, 3)
saved = lockstep.Checkpointer("run", model=model)
if sys.argv[1] == "full" and world.rank == 1:
    saved._storage = Full()
saved.async_save()
print("trained", flush=True)
if sys.argv[1] == "raise":
    raise KeyError("mine")
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("good", 0, []),
        (
            "full",
            1,
            ["saving step 0 in the background failed: rank 1: ", "the disk is full", "ends with exit code 1"],
        ),
        ("raise", 1, ["KeyError: 'mine'"]),
    ],
)
def test_a_process_that_ends_waits_and_does_not_end_well_if_the_save_failed(
    tmp_path: Path, how: str, code: int, words: list[str]
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    done = run(["lockstep", "run", "-n", "2", "train.py", how], tmp_path, torch=True)
    assert done.code == code, done
    assert "trained" in done.out
    for word in words:
        assert word in done.err
    whole = [path.name for path in (tmp_path / "run").glob("step-*")]
    assert whole == ([] if how == "full" else ["step-00000000"])
    if whole:
        assert read(tmp_path / "run" / whole[0]).manifest.step == 0


_SAVED_LATER = """
import os, signal, sys, time
import torch, lockstep
from lockstep.checkpoint.storage import Storage
from torch import nn

class Full(Storage):
    def write(self, file, data, offset):
        raise OSError(28, "No space left on device")

world = lockstep.init()
torch.manual_seed(0)
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(torch.utils.data.DataLoader(torch.ones(2, 3), batch_size=2))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
for epoch in saved.epochs(1):
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    disk, saved._storage = saved._storage, Full()
    saved.async_save()
    saved._background._thread.join()
    saved._storage = disk
    model.eval()
    if sys.argv[1] == "asked":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
"""


@pytest.mark.parametrize(("how", "code"), [("asked", 75), ("not asked", 1)])
def test_a_failed_save_does_not_count_once_the_run_was_saved_from_the_side(tmp_path: Path, how: str, code: int) -> None:
    (tmp_path / "train.py").write_text(_SAVED_LATER)
    done = run(["train", how], tmp_path, torch=True, LOCKSTEP_TIMES="0.3")  # no launcher has a word in it
    assert done.code == code, done
    assert "saving step 1 in the background failed" in done.err
    assert ("saved from the side" in done.err) == (how == "asked")


def test_a_forked_child_does_not_wait_for_its_parents_save() -> None:
    class Never(Background):
        def __init__(self) -> None:
            self._pid = os.getpid() + 1
            self._thread = threading.current_thread()

    assert not Never().failed_unheard()
