"""once_per_machine: one copy of what is loaded, for all ranks of a machine, that nobody can write to."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import lockstep
from lockstep import _proc
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.launching import run

pytestmark = EACH_BACKEND

_COUNT = 6 << 20


class Table(NamedTuple):
    images: np.ndarray[Any, Any]
    labels: torch.Tensor
    names: list[str]


def _inode(address: int) -> str:
    """The file in memory that is mapped at an address, and with which rights."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            words = line.split()
            return f"{words[4]} {words[1]}"
    raise AssertionError("it is not mapped")


def _shared(_: None = None) -> tuple[int, list[Any], str, int]:
    lockstep.init(timeout=60)
    calls = 0

    def load() -> Table:
        nonlocal calls
        calls += 1
        return Table(np.arange(_COUNT).reshape(-1, 2), torch.arange(3.0), ["ü", "b"])

    before = _proc.resident(os.getpid())[1]
    table = lockstep.once_per_machine(load)
    assert type(table) is Table
    assert int(table.images.sum()) == _COUNT * (_COUNT - 1) // 2
    place = _inode(table.images.ctypes.data)
    assert place == _inode(table.labels.data_ptr())
    grown = _proc.resident(os.getpid())[1] - before
    told = [table.images[-1].tolist(), table.labels.tolist(), table.names]
    with pytest.raises(ValueError, match="read-only"):
        table.images[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.images[3:4][0, 0] = 1
    del table
    assert "memfd:lockstep" not in "".join(
        line for line in Path("/proc/self/maps").read_text().splitlines() if place.split()[0] in line.split()
    )
    return calls, told, place, grown


@OVER_BOTH
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_machine_has_one_copy_to_read(world_size: int) -> None:
    ranks = run_ranks(_shared, world_size)
    assert [calls for calls, *_ in ranks] == [1] + [0] * (world_size - 1)
    assert all(told == [[_COUNT - 2, _COUNT - 1], [0, 1, 2], ["ü", "b"]] for _, told, *_ in ranks)
    assert len({place for *_, place, _ in ranks}) == 1
    assert ranks[0][2].endswith(" r--s")
    for _, _, _, grown in ranks[1:]:
        assert grown < 8 * _COUNT // 4, "none of it is the rank's own"


def test_each_machine_loads_once() -> None:
    ranks = run_ranks(_shared, 3, hosts=[2, 1])
    assert [calls for calls, *_ in ranks] == [1, 0, 1]
    assert ranks[0][2] == ranks[1][2] != ranks[2][2]


def _unreadable() -> Any:
    with open("/no/such/file") as file:
        return file.read()


def _broken() -> Any:
    raise ValueError("the table has no rows")


_LOADS: dict[str, Callable[[], Any]] = {
    "unreadable": _unreadable,
    "broken": _broken,
    "a set": lambda: {"rows": [np.zeros(3), {1, 2}]},
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
}


def _loaded(case: str) -> Any:
    lockstep.init(timeout=60)
    return lockstep.once_per_machine(_LOADS[case])


@pytest.mark.parametrize(
    ("case", "first", "others", "message"),
    [
        ("unreadable", "FileNotFoundError", "LockstepError", "/no/such/file"),
        ("broken", "ValueError", "ValueError", "the table has no rows"),
        ("a set", "TypeError", "TypeError", "load() has returned an object of builtins:set at ['rows'][1]"),
        ("a sparse tensor", "TypeError", "TypeError", "load() has returned a tensor of layout torch.sparse_coo, which"),
    ],
)
def test_what_goes_wrong_in_loading_is_an_error_on_every_rank(case: str, first: str, others: str, message: str) -> None:
    outcomes = collect_outcomes(_loaded, 3, case)
    assert [outcome.error for outcome in outcomes] == [first, others, others]
    assert all(message in str(outcome.message) for outcome in outcomes)
    assert all("rank 0" in str(outcome.message) for outcome in outcomes[1:])


def _within_another() -> tuple[int, Any, Any]:
    world = lockstep.init(timeout=60)
    calls = 0

    def words() -> np.ndarray[Any, Any]:
        nonlocal calls
        calls += 1
        return np.arange(4)

    def both() -> dict[str, Any]:
        return {"words": lockstep.once_per_machine(words), "size": 4}

    table = lockstep.once_per_machine(both)
    after = lockstep.once_per_machine(words)
    assert not table["words"].flags.writeable
    return calls, table["words"].tolist(), world.all_reduce(int(after.sum()))


def test_a_load_may_use_what_is_loaded_once_per_machine() -> None:
    assert run_ranks(_within_another, 3) == [(calls, [0, 1, 2, 3], 18) for calls in (2, 0, 0)]


def test_before_init_it_is_an_error() -> None:
    with pytest.raises(lockstep.LockstepError, match="once_per_machine: no world yet"):
        lockstep.once_per_machine(lambda: 1)


_WRITES = """
import lockstep, torch
world = lockstep.init()
table = lockstep.once_per_machine(lambda: torch.zeros(1000))
world.barrier()
if world.rank == 1:
    table[3].add_(1)  # the write
world.barrier()
"""


def test_a_write_to_a_tensor_ends_the_rank_and_shows_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WRITES)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert done.code == 128 + signal.SIGSEGV
    assert "Segmentation fault" in done.err
    assert re.search(r'train\.py", line 7 in <module>', done.err), done.err
    assert "wrote to what it may only read (such as a tensor of lockstep.once_per_machine)" in done.err
    assert "rank 1" in done.err


_KILLED = """
import os, signal
import lockstep, torch
world = lockstep.init()
table = lockstep.once_per_machine(lambda: torch.zeros(1000))
world.barrier()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_of_ranks_that_were_killed(tmp_path: Path) -> None:
    """The memory has no name, and no process that lives has it."""
    (tmp_path / "train.py").write_text(_KILLED)
    before = {*os.listdir("/dev/shm")}
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path)
    assert done.code == 128 + signal.SIGKILL
    assert {name for name in os.listdir("/dev/shm") if "lockstep" in name} <= before


_SUMMED = """
import time
import lockstep, torch
world = lockstep.init()
table = lockstep.once_per_machine(lambda: torch.ones(24 << 20))
assert table.sum() == 24 << 20  # all of it is in memory
model = lockstep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    until = time.monotonic() + 0.03
    while time.monotonic() < until:
        pass
"""


def test_the_summary_tells_shared_memory_from_a_ranks_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SUMMED)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, LOCKSTEP_QUIET="", LOCKSTEP_TIMES="0.1")
    assert done.code == 0, done.err
    found = re.search(
        r"of (\S+) MiB of memory of a rank, (\S+) MiB is shared: .*; (\S+) MiB is the rank's own", done.err
    )
    assert found is not None, done.err
    whole, shared, own = map(float, found.groups())
    assert 96 <= shared < 200
    assert own < 400
    assert shared + own < whole


_PRELOADED = """
import os
import table
import lockstep

world = lockstep.init()
total = int(table.NUMBERS.sum())  # read all of it
world.barrier()
own = shared = 0
with open("/proc/self/smaps") as lines:
    within = False
    for line in lines:
        word, *rest = line.split()
        if "-" in word:
            begin, end = (int(part, 16) for part in word.split("-"))
            within = begin <= table.NUMBERS.ctypes.data + table.NUMBERS.nbytes // 2 < end
        elif within and word.startswith("Private"):
            own += int(rest[0])
        elif within and word.startswith("Shared"):
            shared += int(rest[0])
print(world.rank, total, own < table.NUMBERS.nbytes / 1024 / 10, shared > table.NUMBERS.nbytes / 1024 * 0.9)
world.barrier()
"""


def test_what_a_preloaded_module_holds_is_in_memory_once(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("import numpy\nNUMBERS = numpy.arange(4 << 20)\n")
    (tmp_path / "train.py").write_text(_PRELOADED)
    done = run(
        ["lockstep", "run", "-n", "2", "--all-output", "train.py"],
        tmp_path,
        LOCKSTEP_PRELOAD="torch,lockstep.comm.init,table",
        PYTHONPATH=str(tmp_path),
    )
    assert done.code == 0, done.err
    total = (4 << 20) * ((4 << 20) - 1) // 2
    for rank in (0, 1):
        assert f"{rank} {total} True True" in done.out
