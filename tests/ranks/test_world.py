"""World on real ranks: its numbers, its small collectives, and what happens when ranks disagree."""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import socket
import subprocess
import sys
import traceback
import warnings
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import knobs, machine
from lockstep.comm import choose, tracing
from lockstep.comm.roll_call import call_roll
from lockstep.identity import Identity, place
from lockstep.job.trace import EventWriter
from lockstep.launch.ports import free_port
from tests.harness import collect_outcomes, run_ranks
from tests.launching import LIMIT, gone_within, start, wait_for

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


def _describe() -> tuple[int, int, int, int, int, str, bool]:
    w = lockstep.init()
    return w.rank, w.world_size, w.local_rank, w.local_world_size, w.node_rank, str(w.device), w.is_main


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_world_knows_its_place(world_size: int) -> None:
    described = run_ranks(_describe, world_size)
    assert described == [(r, world_size, r, world_size, 0, "cpu", r == 0) for r in range(world_size)]


def _reduce() -> dict[str, object]:
    w = lockstep.init()
    tensor = torch.arange(3) + 10 * w.rank
    return {
        "sum": w.all_reduce(w.rank + 1),
        "mean": w.all_reduce(w.rank + 1, "mean"),
        "min": w.all_reduce(float(w.rank), "min"),
        "max": w.all_reduce(float(w.rank), "max"),
        "tensor": w.all_reduce(tensor).tolist(),
        "untouched": tensor.tolist(),
        "precise": w.all_reduce(2.0**53 if w.rank == 0 else 2.0),
    }


def test_all_reduce_numbers_and_tensors() -> None:
    for rank, got in enumerate(run_ranks(_reduce, 3)):
        assert got == {
            "sum": 6,
            "mean": 2.0,
            "min": 0.0,
            "max": 2.0,
            "tensor": [30, 33, 36],
            "untouched": [10 * rank, 1 + 10 * rank, 2 + 10 * rank],
            "precise": 2.0**53 + 4.0,
        }


def _agree() -> list[bool]:
    w = lockstep.init()
    last = w.rank == w.world_size - 1
    given = [False, True, last, torch.tensor(last), torch.tensor([[last]]), np.float64(w.rank) >= w.world_size - 1]
    return [answer for flag in given for answer in (w.any(flag), w.all(flag))]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_and_all_are_the_same_on_every_rank(world_size: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_BACKEND", backend)
    on_the_last_rank = [True, world_size == 1]
    expected = [False, False, True, True, *on_the_last_rank * 4]
    assert run_ranks(_agree, world_size) == [expected] * world_size


def _flags_that_are_none() -> list[str]:
    w = lockstep.init()
    said = []
    for call, flag in itertools.product([w.any, w.all], [1, None, torch.tensor(2.5), torch.tensor([True, False])]):
        with pytest.raises(TypeError) as refused:
            call(flag)  # type: ignore[arg-type]
        said.append(str(refused.value))
    return said


def test_any_and_all_take_flags_alone() -> None:
    for rank, said in enumerate(run_ranks(_flags_that_are_none, 2)):
        given = ["1", "None", "a tensor of torch.float32 and shape ()", "a tensor of torch.bool and shape (2,)"]
        expected = itertools.product(["any", "all"], given)
        for text, (name, what) in zip(said, expected, strict=True):
            assert text.startswith(f"rank {rank} of 2: world.{name}() was given {what}: expected a bool")


def _stop_early() -> list[int]:
    w = lockstep.init()
    data = TensorDataset(torch.arange(24.0))
    seen = []
    for step, (batch,) in enumerate(lockstep.shard(DataLoader(data, batch_size=6))):
        seen.append(step)
        if w.any((batch == 13).any()):  # on one rank alone
            break
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_leave_a_loop_together_where_one_has_a_reason(world_size: int) -> None:
    assert run_ranks(_stop_early, world_size) == [[0, 1, 2]] * world_size


def _weighted_mean() -> tuple[float, float, float]:
    w = lockstep.init()
    explicit = w.mean([1.0, 4.0, math.nan][w.rank], samples=[3, 1, 0][w.rank])
    w.share = lockstep.BatchShare([2, 2, 1][w.rank], 5)
    from_share = w.mean(torch.tensor([1.0, 2.0, 4.0][w.rank]))
    w.share = None
    return explicit, from_share, w.mean(float(w.rank))


def test_mean_is_over_samples_not_over_ranks() -> None:
    assert run_ranks(_weighted_mean, 3) == [(7 / 4, 10 / 5, 1.0)] * 3


def _means_after_loops() -> tuple[list[float], list[str]]:
    w = lockstep.init()
    means, warned = [], []
    for samples in (3, 4):
        data = TensorDataset(torch.arange(samples, dtype=torch.float64))
        for (batch,) in lockstep.shard(DataLoader(data, batch_size=samples)):
            means.append(w.mean(batch.mean()))
        for _ in range(2):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                w.mean(1.0)
            warned += [str(each.message) for each in caught]
    return means, warned


def test_a_mean_after_the_end_of_a_loop_with_unequal_shares_is_warned_of() -> None:
    (means, warned), others = run_ranks(_means_after_loops, 2)
    assert means == [1.0, 1.5]
    assert others == (means, []), "one rank says it"
    assert len(warned) == 1, "of the loop with three samples alone, and once"
    assert "counts every rank once, but their shares of its last batch differ (rank 0 had 2 of 3 samples)" in warned[0]


def _mean_of_a_loss() -> float:
    w = lockstep.init()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when a tensor that requires grad becomes a number
        return float(w.mean(torch.tensor(w.rank + 1.0, requires_grad=True)))


def test_mean_takes_a_loss_as_it_is() -> None:
    assert run_ranks(_mean_of_a_loss, 2) == [1.5, 1.5]


def _mean_of_elements() -> None:
    w = lockstep.init()
    samples = [3, 1, 0][w.rank]
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64):
        values = [torch.arange(6).view(2, 3) * 4 + rank * 100 for rank in range(3)]
        own = values[w.rank].to(dtype)
        if w.rank == 2 and dtype.is_floating_point:
            own.fill_(math.nan)  # the mean over nothing
        before = own.clone()
        mean = w.mean(own, samples=samples)
        expected = (values[0] * 3 + values[1]).double() / 4
        assert mean.dtype == (torch.float64 if dtype is torch.int64 else dtype)
        assert torch.equal(mean, expected.to(mean.dtype))
        assert torch.equal(own.nan_to_num(), before.nan_to_num())
    w.share = lockstep.BatchShare([2, 2, 1][w.rank], 5)
    share = torch.tensor([[1.0, 2.0, 4.0][w.rank], w.rank], requires_grad=True)
    assert torch.equal(w.mean(share), torch.tensor([2.0, 0.8]))
    assert not w.mean(share).requires_grad
    w.share = None
    by_row = torch.arange(8.0).view(2, 4).t()  # not contiguous
    assert torch.equal(w.mean(by_row + w.rank), by_row + 1)
    assert w.mean(torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(ValueError, match="mean over no samples"):
        w.mean(torch.ones(2), samples=0)


def test_mean_of_several_elements_is_of_each() -> None:
    run_ranks(_mean_of_elements, 3)


def _main_first(path: str) -> str:
    w = lockstep.init()
    with w.main_first():
        if w.is_main:
            with open(path, "w") as file:
                file.write("prepared")
        with open(path) as file:
            return file.read()


def test_main_first_lets_rank_0_prepare(tmp_path: object) -> None:
    assert run_ranks(_main_first, 3, f"{tmp_path}/prepared") == ["prepared"] * 3


def _main_first_fails() -> None:
    w = lockstep.init()
    with w.main_first():
        raise OSError(f"disk full on rank {w.rank}")


def test_main_first_fails_everywhere_when_rank_0_fails() -> None:
    first, second = collect_outcomes(_main_first_fails, 2)
    assert (first.error, first.message) == ("OSError", "disk full on rank 0")
    assert second.error == "LockstepError"
    assert "rank 1 of 2: rank 0 failed in the main_first() block: OSError: disk full on rank 0" in str(second.message)


def _first_of_each_machine(path: str) -> str:
    node, local = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(LOCAL_RANK=str(local), GROUP_RANK=str(node), LOCAL_WORLD_SIZE="2")
    w = lockstep.init("gloo")
    mine = Path(path, str(w.node_rank))
    with w.main_first(per="machine"):
        if w.local_rank == 0:
            mine.write_text(f"by rank {w.rank}")
        return mine.read_text()


def test_main_first_lets_the_first_rank_of_each_machine_prepare(tmp_path: Path) -> None:
    by = run_ranks(_first_of_each_machine, 4, str(tmp_path))
    assert by == ["by rank 0", "by rank 0", "by rank 2", "by rank 2"]


def _first_of_a_machine_fails() -> None:
    w = lockstep.init()
    with pytest.raises(ValueError, match="per='host': expected 'job' or 'machine'"), w.main_first(per="host"):  # type: ignore[arg-type]
        pass
    with w.main_first(per="machine"):
        raise OSError(f"disk full on rank {w.rank}")


def test_main_first_fails_everywhere_when_a_machine_fails() -> None:
    outcomes = collect_outcomes(_first_of_a_machine_fails, 3)
    assert [outcome.error for outcome in outcomes] == ["OSError", "LockstepError", "LockstepError"]


def _gather_values(backend: str) -> list[Any]:
    w = lockstep.init(backend)
    ragged = w.gather(torch.full((w.rank, 2), float(w.rank), dtype=torch.float64, requires_grad=True))
    assert [tensor.shape for tensor in ragged] == [(rank, 2) for rank in range(w.world_size)]
    assert all(tensor.dtype == torch.float64 and not tensor.requires_grad for tensor in ragged)
    kinds = w.gather([torch.tensor(3 + 4j), torch.tensor([True, False]), torch.zeros(0, dtype=torch.bfloat16)][w.rank])
    assert [(each.dtype, each.shape) for each in kinds] == [
        (torch.complex64, ()),
        (torch.bool, (2,)),
        (torch.bfloat16, (0,)),
    ]
    mixed = w.gather(torch.arange(2) if w.rank == 1 else {"rank": (w.rank, None)})
    return [float(sum(tensor.sum() for tensor in ragged)), complex(kinds[0]), mixed[0], mixed[1].tolist(), mixed[2]]


def _views(backend: str) -> list[Any]:
    """Tensors whose memory is in another order on each rank, or says something else."""
    w = lockstep.init(backend, timeout=20)
    table = torch.arange(6.0).reshape(2, 3)
    table = table if w.rank == 0 else table.t().contiguous().t()
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    numbers = numbers if w.rank == 0 else numbers.conj()
    total = w.all_reduce(table), w.all_reduce(numbers), w.all_reduce(numbers.imag)
    gathered = w.gather(numbers), w.gather(numbers.imag)
    sent = w.broadcast(numbers, source=1), w.broadcast(numbers.imag, source=1)
    return [
        *(each.tolist() for each in total),
        *([each.tolist() for each in both] for both in gathered),
        *(each.tolist() for each in sent),
    ]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_views_are_taken_as_they_are_indexed(backend: str) -> None:
    one, two = [1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j]
    expected = [
        [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
        [2 + 0j, 6 + 0j],
        [0.0, 0.0],
        [one, two],
        [[2.0, -4.0], [-2.0, 4.0]],
        two,
        [-2.0, 4.0],
    ]
    assert run_ranks(_views, 2, backend) == [expected] * 2


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_gather_takes_tensors_of_any_size_and_what_json_can_say(backend: str) -> None:
    expected = [1 * 2 + 2 * 2 * 2, 3 + 4j, {"rank": [0, None]}, [0, 1], {"rank": [2, None]}]
    assert run_ranks(_gather_values, 3, backend) == [expected] * 3


def _broadcast_values() -> list[Any]:
    w = lockstep.init()
    weights = torch.arange(6.0).reshape(2, 3).t() if w.rank == 1 else None
    came = w.broadcast(weights, source=1)
    if w.rank == 1:
        came += 1  # it is nobody else's
        assert weights is not None
        assert weights[0, 1] == 3.0
        came -= 1
    with pytest.raises(ValueError, match="source=2: expected a rank, 0 to 1"):
        w.broadcast(1, source=2)
    return [came.tolist(), w.broadcast({"lr": 0.1} if w.is_main else object()), w.broadcast()]


def test_broadcast_hands_one_ranks_value_to_all() -> None:
    assert run_ranks(_broadcast_values, 2) == [[[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], {"lr": 0.1}, None]] * 2


def _gathers_what_json_cannot_say() -> None:
    w = lockstep.init(timeout=20)
    with pytest.raises(TypeError, match=r"gather\(\) takes tensors and what JSON can hold .*by pickle"):
        w.gather(object() if w.rank == 1 else 1)
    with pytest.raises(TypeError, match=r"broadcast\(\) takes dense tensors, not one of layout torch.sparse_coo"):
        w.broadcast(torch.eye(2).to_sparse())
    assert w.gather(w.rank) == [0, 1]


def test_what_json_cannot_say_is_an_error_on_every_rank() -> None:
    run_ranks(_gathers_what_json_cannot_say, 2)


def _leaves_generators_alone() -> list[float]:
    rank = int(os.environ["RANK"])
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    w = lockstep.init(seed=False)
    model = lockstep.replicate(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()))
    model(torch.ones(1, 2))
    return [w.seed, random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_seed_false_leaves_the_generators_alone() -> None:
    expected = []
    for rank in range(2):
        torch.manual_seed(rank)
        torch.nn.Linear(2, 2)
        torch.nn.functional.dropout(torch.ones(1, 2))
        drawn = float(torch.rand(()))
        expected.append([0, random.Random(rank).random(), float(np.random.RandomState(rank).rand()), drawn])
    assert run_ranks(_leaves_generators_alone, 2) == expected


def _seeds_with_true() -> None:
    lockstep.init(seed=True)


def test_seed_true_is_refused() -> None:
    assert collect_outcomes(_seeds_with_true, 1)[0].message == (
        "seed=True: expected 0 <= seed < 2**63, None to draw one, or False to seed nothing"
    )


def test_errors_are_those_that_python_has() -> None:
    assert issubclass(lockstep.CollectiveTimeout, TimeoutError)
    assert issubclass(lockstep.PeerLost, ConnectionError)
    assert "lockstep.PeerLost: gone" in "".join(traceback.format_exception_only(lockstep.PeerLost("gone")))


def _draws(seed: int | None) -> tuple[int, float, float, float]:
    w = lockstep.init(seed=seed)
    return w.seed, random.random(), float(np.random.rand()), float(torch.rand(()))


def test_every_rank_is_seeded_like_a_lone_process() -> None:
    alone = run_ranks(_draws, 1, 7)[0]
    assert alone[0] == 7
    assert run_ranks(_draws, 2, 7) == [alone, alone]


def test_an_unset_seed_is_drawn_once_for_all_ranks() -> None:
    (first, *_), (second, *_) = run_ranks(_draws, 2, None)
    assert first == second
    assert run_ranks(_draws, 2, None)[0][0] != first


def _different_seeds() -> None:
    lockstep.init(seed=int(os.environ["RANK"]))


def test_different_seeds_are_an_error_on_every_rank() -> None:
    for outcome in collect_outcomes(_different_seeds, 2):
        assert outcome.error == "LockstepError"
        assert "[0, 1]" in str(outcome.message)


def _late_at_barrier(backend: str, fifo: str) -> None:
    w = lockstep.init(backend)
    if w.rank == 1:
        with open(fifo) as wait_for_rank_0:
            wait_for_rank_0.read()
        return
    try:
        w.barrier(timeout=0.3)
    finally:
        with open(fifo, "w"):
            pass


@pytest.mark.parametrize(
    ("backend", "texts"),
    [
        ("gloo", ["rank 0 of 2: World.barrier(): rank 1 did not come within 0.3 s. gloo says: ", "Timed out"]),
        (
            "shm",
            [
                "rank 0 of 2: World.barrier(): rank 1 did not come: rank 0 timed out after 0.3 s in barrier #",
                "rank 1 (process ",
            ],
        ),
    ],
)
def test_a_barrier_names_the_late_rank(backend: str, texts: list[str], tmp_path: Path) -> None:
    fifo = tmp_path / "rank-0-is-done"
    os.mkfifo(fifo)
    outcome = collect_outcomes(_late_at_barrier, 2, backend, str(fifo))[0]
    assert outcome.error == "CollectiveTimeout"
    for text in texts:
        assert text in str(outcome.message)


def _leave_before_barrier(backend: str) -> None:
    w = lockstep.init(backend)
    if w.rank == 1:
        os._exit(0)
    w.barrier(timeout=30)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("gloo", "rank 0 of 2: World.barrier(): rank 1 ended, or can't be reached any more. gloo says: "),
        ("shm", "for rank 1, which ended"),
    ],
)
def test_a_barrier_after_a_rank_left_says_so_at_once(backend: str, text: str) -> None:
    outcome = collect_outcomes(_leave_before_barrier, 2, backend, timeout=20)[0]
    assert outcome.error == "PeerLost"
    assert text in str(outcome.message)


class _Names(EventWriter):
    """Keeps what is told of events, and no times."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def name(self, name: str, category: str, **about: Any) -> int:
        self.told.append((f"{category}: {name}", about["backend"]))
        return len(self.told)

    def begin(self, *_: Any) -> None: ...

    def end(self) -> None: ...


def _traced_barrier() -> list[tuple[str, str]]:
    w = lockstep.init("cpu:gloo")
    names, collectives = _Names(), tracing._Collectives()
    collectives.open(names)
    w.barrier()
    collectives.close()
    w.barrier()
    return names.told


def test_a_trace_has_a_barrier_that_is_made_of_messages() -> None:
    told = run_ranks(_traced_barrier, 2)
    assert told == 2 * [[("collective: barrier", "cpu:gloo (cpu)"), ("wait: wait for barrier", "cpu:gloo (cpu)")]]


def _late_and_gone(fifo: str, is_noticed: bool) -> str:
    w = lockstep.init("gloo")
    pids: list[Any] = [None] * 3
    torch.distributed.all_gather_object(pids, os.getpid())
    if w.rank == 2:
        os._exit(0)
    if w.rank == 1:
        with open(fifo) as wait_for_rank_0:
            wait_for_rank_0.read()
        return ""
    assert not gone_within([pids[2]], LIMIT)
    if is_noticed:
        with pytest.raises(RuntimeError):
            torch.distributed.recv(torch.zeros(1), 2)
    try:
        w.barrier(timeout=1)
    except lockstep.PeerLost as error:
        return str(error)
    finally:
        with open(fifo, "w"):
            pass
    return ""


@pytest.mark.parametrize("is_noticed", [False, True])
def test_a_rank_that_is_gone_counts_before_one_that_is_late(is_noticed: bool, tmp_path: Path) -> None:
    """By what gloo says of each rank: one that is late takes all of the time, so time does not tell."""
    fifo = tmp_path / "rank-0-is-done"
    os.mkfifo(fifo)
    said = str(collect_outcomes(_late_and_gone, 3, str(fifo), is_noticed)[0].value)
    assert said.startswith(
        "rank 0 of 3: World.barrier(): rank 2 ended, or can't be reached any more. And rank 1 did not"
    )


def _meet_at_barrier(backend: str) -> None:
    w = lockstep.init(backend)
    w.barrier(timeout=30)


@pytest.mark.parametrize("backend", ["cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_a_barrier_of_a_group_with_a_backend_for_each_kind_of_device(backend: str) -> None:
    run_ranks(_meet_at_barrier, 2, backend)


def _default_backend() -> str:
    lockstep.init()
    return torch.distributed.get_backend()


def test_the_cpu_takes_shared_memory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_ranks(_default_backend, 2) == ["shm", "shm"]
    assert run_ranks(_default_backend, 1) == ["shm"]
    monkeypatch.setenv("LOCKSTEP_BACKEND", "gloo")
    assert run_ranks(_default_backend, 2) == ["gloo", "gloo"]


#: Which rank breaks, and what: before the memory is shared, while it is, after it was, and when torch gets the group.
_BREAKS: dict[str, tuple[str, str]] = {
    "no memory": ("0", "os.memfd_create"),
    "no semaphores": ("0", "lockstep.comm.shm.semaphore.initialise"),
    "unreadable": ("1", "lockstep.comm.shm.rendezvous.Segment.open"),
    "no descriptor": ("1", "lockstep.comm.shm.memory_engine.Health"),
    "refused by torch": ("1", "lockstep.comm.group.process_group.ProcessGroupLockstep"),
    "refused by torch on rank 0": ("0", "lockstep.comm.group.process_group.ProcessGroupLockstep"),
    "refused by torch everywhere": ("01", "lockstep.comm.group.process_group.ProcessGroupLockstep"),
    "nothing": ("", ""),
}


def _keys_of_three_worlds() -> list[int]:
    store, keys = dist.HashStore(), [0]  # type: ignore[attr-defined]
    for _ in range(3):
        ours = call_roll(store, Identity(), where="", world="", is_agents=False, timeout=10.0)
        choose.open_fastest(ours, Identity(), 10.0)
        dist.destroy_process_group()
        keys.append(store.num_keys())
    return [after - before for before, after in itertools.pairwise(keys)]


def test_a_world_reads_nothing_of_an_earlier_one_in_a_store_that_lives_on() -> None:
    (first, second, third) = run_ranks(_keys_of_three_worlds, 1)[0]
    assert first - 1 == second == third  # all keys are new, but for the one that names the meeting


def _where_shm_fails() -> dict[str, tuple[str, list[str]]]:
    def fail(*_: object, **__: object) -> None:
        raise (OSError if "no " in case else RuntimeError)(f"{case} here")

    found: dict[str, tuple[str, list[str]]] = {}
    for case, (ranks, what) in _BREAKS.items():
        with warnings.catch_warnings(record=True) as seen, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            if os.environ["RANK"] in list(ranks):
                patch.setattr(what, fail)
            w = lockstep.init(timeout=10)
            assert w.all_reduce(1) == w.world_size
            found[case] = torch.distributed.get_backend(), [f"{each.filename}: {each.message}" for each in seen]
            lockstep.shutdown()
    return found


def test_where_shm_does_not_open_on_all_ranks_all_take_gloo_and_rank_0_says_why() -> None:
    first, second = run_ranks(_where_shm_fails, 2)
    assert first.pop("nothing") == second.pop("nothing") == ("shm", [])
    assert {case: backend for case, (backend, _) in first.items()} == dict.fromkeys(first, "gloo")
    assert second == dict.fromkeys(first, ("gloo", []))
    for case, (_, seen) in first.items():
        assert len(seen) == 1, case
        assert "test_world.py: the ranks can't share memory, so gradients go through the network, by gloo" in seen[0]
        for rank in _BREAKS[case][0]:
            assert re.search(rf"rank {rank}: .*{case} here", seen[0]), seen[0]
        assert 'lockstep.init("gloo") or LOCKSTEP_BACKEND=gloo does the same' in seen[0]


def _explicit_shm_fails() -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("nobody knows why")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.comm.group.process_group.ProcessGroupLockstep", fail)
        lockstep.init("shm")


def test_shm_that_was_asked_for_and_fails_names_the_way_around() -> None:
    (outcome,) = collect_outcomes(_explicit_shm_fails, 1)
    assert outcome.error == "RendezvousError"
    assert "nobody knows why" in (outcome.message or "")
    assert "LOCKSTEP_BACKEND=gloo goes through the network instead" in (outcome.message or "")


def _leave_before_mean(backend: str) -> None:
    w = lockstep.init(backend)
    if w.rank == 1:
        os._exit(0)
    w.mean(1.0)


def _late_for_all_reduce(backend: str, fifo: str) -> None:
    w = lockstep.init(backend, timeout=60)
    w.barrier()
    w.group.set_timeout(timedelta(seconds=1))
    if w.rank == 1:
        with open(fifo) as wait_for_rank_0:
            wait_for_rank_0.read()
        return
    try:
        w.all_reduce(1)
    finally:
        with open(fifo, "w"):
            pass


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_collectives_name_this_rank_and_what_it_was_doing(backend: str, tmp_path: Path) -> None:
    gone = collect_outcomes(_leave_before_mean, 2, backend, timeout=20)[0]
    assert gone.error == "PeerLost"
    assert "rank 0 of 2: World.mean(): " in str(gone.message)
    assert {"gloo": "a rank is gone", "shm": "for rank 1, which ended"}[backend] in str(gone.message)
    fifo = tmp_path / "rank-0-is-done"
    os.mkfifo(fifo)
    late = collect_outcomes(_late_for_all_reduce, 2, backend, str(fifo), timeout=20)[0]
    assert late.error == "CollectiveTimeout"
    assert "rank 0 of 2: World.all_reduce(): " in str(late.message)
    assert {"gloo": "a rank did not arrive in time", "shm": "rank 1 did not come"}[backend] in str(late.message)


def _init_with(backend: str) -> None:
    lockstep.init(backend)


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("carrier-pigeon", "unknown; torch knows"),
        ("nccl", "sees no CUDA device"),
        pytest.param(
            *("mpi", "comes without MPI, and mpi4py"),
            marks=pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is installed"),
        ),
    ],
)
def test_a_backend_that_can_not_be_is_refused_on_every_rank(backend: str, text: str) -> None:
    if (backend == "nccl" and torch.cuda.is_available()) or (backend == "mpi" and dist.is_mpi_available()):
        pytest.skip(f"{backend} is available here")
    for outcome in collect_outcomes(_init_with, 2, backend):
        assert outcome.error == "ValueError"
        assert text in str(outcome.message)


def _init_by_port(port: int) -> None:
    del os.environ[knobs.STORE]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    lockstep.init(timeout=3)


def test_a_port_in_use_is_named_and_no_rank_hangs() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first, second = collect_outcomes(_init_by_port, 2, port, timeout=40)
    assert first.error == "RendezvousError"
    assert f"Port {port} is taken by another process" in str(first.message)
    assert second.error == "RendezvousError"
    assert f"rank 1 of 2 could not join the world at 127.0.0.1:{port}" in str(second.message)


def _init_alone_of_two() -> None:
    if os.environ["RANK"] == "1":
        return
    lockstep.init(timeout=2)


def test_a_rank_that_never_comes_ends_the_wait_at_the_limit() -> None:
    outcome = collect_outcomes(_init_alone_of_two, 2, timeout=30)[0]
    assert outcome.error == "RendezvousError"
    assert "rank 0 of 2 could not join the world" in str(outcome.message)


def _init_twice() -> str:
    lockstep.init()
    with pytest.raises(lockstep.LockstepError, match="already called"):
        lockstep.init()
    lockstep.shutdown()
    with pytest.raises(lockstep.LockstepError, match="no world yet"):
        lockstep.world()
    return repr(lockstep.init())


def test_init_after_shutdown_makes_a_new_world() -> None:
    assert run_ranks(_init_twice, 2) == [f"World(rank={r}, world_size=2, device='cpu')" for r in (0, 1)]


def _take_the_open_group() -> tuple[int, int]:
    rank, world_size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ[knobs.STORE]}", rank=rank, world_size=world_size
    )
    w = lockstep.init()
    total = w.all_reduce(w.rank)
    lockstep.shutdown()
    assert torch.distributed.is_initialized(), "shutdown closes only what init opened"
    torch.distributed.destroy_process_group()
    return w.world_size, total


def test_a_group_that_the_script_opened_is_used_and_left_open() -> None:
    assert run_ranks(_take_the_open_group, 2) == [(2, 1)] * 2


def _threads() -> tuple[int, int]:
    del os.environ["OMP_NUM_THREADS"]
    torch.set_num_threads(machine.cores())
    w = lockstep.init()
    return torch.get_num_threads(), max(1, machine.cores() // w.local_world_size)


def test_cores_are_divided_among_local_ranks() -> None:
    for threads, expected in run_ranks(_threads, 2):
        assert threads == expected


def test_a_users_omp_num_threads_is_left_alone() -> None:
    assert run_ranks(_threads_as_set, 2, threads=3) == [3, 3]


def _threads_as_set() -> int:
    lockstep.init()
    return torch.get_num_threads()


def _more_gpu_ranks_than_gpus() -> None:
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")  # noqa: ARG005
    torch.cuda.device_count = lambda: 1  # a machine with one GPU, as far as counting goes
    torch.cuda.get_device_properties = lambda device: object()  # type: ignore[misc, assignment]  # noqa: ARG005
    dist.is_backend_available = lambda backend: True  # noqa: ARG005
    lockstep.init("nccl")


def test_more_gpu_ranks_than_gpus_are_refused_on_every_rank() -> None:
    for outcome in collect_outcomes(_more_gpu_ranks_than_gpus, 2):
        assert outcome.error == "EnvironmentMismatch"
        assert "2 ranks on this machine but 1 visible GPU (" in str(outcome.message)


def _without_an_address() -> None:
    del os.environ[knobs.STORE]
    lockstep.init(timeout=3)


def test_no_address_and_no_rendezvous_file_is_named() -> None:
    for outcome in collect_outcomes(_without_an_address, 2):
        assert outcome.error == "EnvironmentMismatch"
        assert "MASTER_ADDR and MASTER_PORT not set" in str(outcome.message)


def _init_as_task_of_srun(port: int) -> tuple[str, str, float, str]:
    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", knobs.STORE):
        os.environ.pop(name, None)
    os.environ |= {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    with pytest.raises(lockstep.EnvironmentMismatch) as refused:
        lockstep.init()
    os.environ |= {"SLURM_JOB_ID": "7", "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "MASTER_PORT": str(port)}
    os.environ |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "n1", "MASTER_ADDR": "127.0.0.1"}
    world = lockstep.init()
    found = repr(world), world.mean(float(rank))
    lockstep.shutdown()
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"):  # what is left is a batch script's
        del os.environ[name]
    return str(refused.value), *found, repr(lockstep.init())


def _meet_as(names: list[str], port: int) -> str:
    del os.environ[knobs.STORE]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ[knobs.WORLD] = names[int(os.environ["RANK"])]
    return repr(lockstep.init(timeout=5))


def test_ranks_of_two_jobs_at_one_port_are_no_world() -> None:
    """The rank 0 of one job has listened first, so a rank of the other one finds it."""
    waits, refused = collect_outcomes(_meet_as, 2, ["Slurm's job 7, step 0", "Slurm's job 8, step 3"], free_port())
    assert waits.error == "RendezvousError"
    assert "rank 1 did not come" in str(waits.message), "nothing was heard of the stranger"
    assert refused.error == "EnvironmentMismatch"
    assert "rank 1 of 2 belongs to Slurm's job 8, step 3, and found rank 0 of Slurm's job 7, step 0 at 127.0.0.1:" in (
        str(refused.message)
    )


def _meet_with_another_rank_1(told: str, port: int) -> str:
    """As rank 0, 1 and 1 of 2; rank 0 stays until one of the others has been refused."""
    rank = str(min(1, int(os.environ["RANK"])))
    del os.environ[knobs.STORE]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    try:
        world = lockstep.init(timeout=60)
    except lockstep.EnvironmentMismatch as error:
        Path(told).touch()
        return str(error)
    wait_for(Path(told).exists, "the other rank 1")
    return str(world.mean(float(world.rank)))


def test_of_two_processes_with_one_rank_the_second_is_refused(tmp_path: Path) -> None:
    """Nothing but the number says to which job a process belongs that was started by hand."""
    first, *others = run_ranks(_meet_with_another_rank_1, 3, str(tmp_path / "told"), free_port())
    refused, met = sorted(others, key=lambda said: said == "0.5")
    assert (first, met) == ("0.5", "0.5")
    assert re.match(r"rank 1 of 2 is there already at 127\.0\.0\.1:\d+, as process \d+ of this", refused), refused


def test_tasks_of_srun_are_one_world_and_batch_scripts_are_alone() -> None:
    for rank, (told, world, mean, alone) in enumerate(run_ranks(_init_as_task_of_srun, 2, free_port())):
        assert "SLURM_STEP_ID=0 is set but SLURM_JOB_ID, SLURM_LOCALID" in told
        assert world == f"World(rank={rank}, world_size=2, device='cpu')"
        assert mean == 0.5
        assert alone == "World(rank=0, world_size=1, device='cpu')"


def _guest_first(parents: list[int | None]) -> str:
    """Join as what the launcher started, or as a child of that: the process in ``parents``."""
    rank = int(os.environ["RANK"])
    os.environ[knobs.RANK_PROCESS] = f"{parents[rank] or os.getpid()} {place()}"
    lockstep.init()
    if rank:
        return ""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    program = [sys.executable, "-c", "import lockstep; print(lockstep.init())"]
    guest = subprocess.run(program, capture_output=True, text=True)
    alone = subprocess.run(program, capture_output=True, text=True, env=env)
    return f"{guest.returncode} {guest.stderr.splitlines()[-1]} {alone.stdout}"


def test_what_rank_0_alone_starts_is_told_at_once_that_it_is_no_rank() -> None:
    told = run_ranks(_guest_first, 2, [1, 1], timeout=60)[0]  # children of wrappers, all of them, are ranks
    assert told.startswith("1 ")
    assert "was started by rank 0 of 2" in told
    assert "which has joined the world already" in told
    assert "World(rank=0, world_size=1" in told
    for outcome in collect_outcomes(_guest_first, 2, [1, None], timeout=60):
        assert outcome.error == "EnvironmentMismatch"
        assert "rank 0 (process " in str(outcome.message)
        assert "is not the process that the launcher started but a child of it" in str(outcome.message)


_WHICH_BACKEND = """
import torch.distributed as dist
import lockstep
world = lockstep.init()
print(dist.get_backend(), world.all_reduce(1))
"""


def test_a_variable_that_asks_torch_for_torchcomms_leaves_shm_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_WHICH_BACKEND)
    argv = ["lockstep", "run", "-n", "2", "train.py"]
    # torch (2.14 and newer) reads it when it is imported.
    with start(argv, tmp_path, torch=True, cold=True, TORCH_DISTRIBUTED_USE_TORCHCOMMS="1") as job:
        done = job.finish()
    assert (done.code, done.out) == (0, "shm 2\n"), done
