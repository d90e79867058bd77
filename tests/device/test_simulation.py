"""The simulated device keeps what it promises: late streams, memory that is gone, and hosts that wait are seen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from tests.device import build, simulation
from tests.device.simulation import Counting, Stress
from tests.harness import run_ranks

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning"),
]

_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def of_the_simulation(gpus: str) -> None:
    if gpus != "simulated":
        pytest.skip("about the simulation itself")
    simulation.stress(Stress())


# Streams.


def test_work_is_done_later_and_in_order() -> None:
    a = torch.zeros(1000, device="cuda")
    with simulation.held_back(torch.cuda.current_stream()):
        for step in range(10):
            a.mul_(2).add_(step)
        assert not torch.cuda.current_stream().query()
    expected = 0
    for step in range(10):
        expected = 2 * expected + step
    assert a.tolist() == [expected] * 1000
    assert torch.cuda.current_stream().query()


@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_for_another_sees_no_value_of_it(waits: bool) -> None:
    side, given = torch.cuda.Stream(), torch.arange(100.0).pin_memory()
    with torch.cuda.stream(side):
        simulation.delay(side, 200)
        moved = given.to("cuda", non_blocking=True)
        there = torch.cuda.Event()
        there.record(side)
    if waits:
        torch.cuda.current_stream().wait_event(there)
    copied = moved + 0
    assert torch.equal(copied.cpu(), given) is waits
    there.synchronize()


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_another_stream_still_reads_is_gone_unless_that_is_recorded(recorded: bool) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = torch.full((1000,), 7.0, device="cuda")
    torch.cuda.synchronize()
    with simulation.held_back(torch.cuda.current_stream()):
        read = made * 1
        if recorded:
            made.record_stream(torch.cuda.current_stream())
        del made
        side.synchronize()  # where it is poisoned
        with torch.cuda.stream(side):
            torch.full((1000,), 8.0, device="cuda")
        side.synchronize()
    assert (read.tolist() == [7.0] * 1000) is recorded


def test_memory_goes_at_once_to_the_next_tensor_of_its_stream_and_its_values_are_nan() -> None:
    first = torch.ones(1000, device="cuda")
    place = first.data_ptr()
    del first
    second = torch.empty(1000, device="cuda")
    assert second.data_ptr() == place
    assert bool(second.isnan().all())


def test_events_tell_a_time_that_is_the_same_at_any_load() -> None:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a = torch.ones(10, device="cuda")
    begin.record()
    for _ in range(25):
        a.add_(1)
    simulation.delay(torch.cuda.current_stream(), 3)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(25 * 0.01 + 3)


def test_late_streams_are_late() -> None:
    def seconds(how: Stress) -> float:
        simulation.stress(how)
        stream, a = torch.cuda.Stream(), torch.ones(10, device="cuda")
        torch.cuda.synchronize()
        begun = time.monotonic()
        with torch.cuda.stream(stream):
            for _ in range(20):
                a.add_(1)
        stream.synchronize()
        return time.monotonic() - begun

    assert seconds(Stress(seed=1, jitter=80_000)) > 0.05  # long pauses are of up to 80 ms, and some of 20 are long
    assert seconds(Stress(side=5_000)) > 0.1
    simulation.stress(Stress())


# What the host waits for.


def test_a_wait_for_a_stream_that_is_held_back_is_an_error_where_it_happens() -> None:
    a, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
    with simulation.held_back(torch.cuda.current_stream()):
        b = a + 1
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            c = b + 1
        for wait in (b.sum().item, b.cpu, torch.cuda.synchronize, c.tolist, side.synchronize, b.nonzero):
            with pytest.raises(RuntimeError, match="which a test holds back"):
                wait()
    side.synchronize()
    assert c.tolist() == [3, 3, 3]


def test_what_waits_is_counted_and_what_does_not_is_not() -> None:
    a, host = torch.ones(100, device="cuda"), torch.ones(100)
    cases: list[tuple[Callable[[], object], int]] = [
        (lambda: a.add_(1), 0),
        (lambda: a.to("cuda:1"), 0),
        (lambda: host.pin_memory().to("cuda", non_blocking=True), 0),
        (lambda: host.to("cuda"), 1),
        (a.cpu, 1),
        (lambda: a.sum().item(), 1),
        (lambda: bool((a > 0).all()), 1),
        (lambda: a[a > 0], 2),  # the index, and how long the result is
        (lambda: torch.equal(a, a), 1),
        (torch.cuda.synchronize, 1),
    ]
    for number, (call, waits) in enumerate(cases):
        counting = Counting()
        call()
        assert min(counting.so_far().waits, waits) == waits, number
        assert (counting.so_far().waits == 0) is (waits == 0), number


def test_sync_debug_mode_refuses_waits() -> None:
    a = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            a.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_list_of_tensors_is_one_launch() -> None:
    many = [torch.ones(10, device="cuda") for _ in range(50)]
    other = [torch.zeros(10, device="cuda") for _ in range(50)]
    counting = Counting()
    torch._foreach_copy_(other, many)
    torch._foreach_mul_(other, 3.0)
    assert counting.so_far().launches == 2
    assert other[49].tolist() == [3.0] * 10


@pytest.mark.parametrize(("spins", "state"), [(True, "R"), (False, "S")])
def test_a_host_that_spins_computes_while_it_waits(spins: bool, state: str) -> None:
    here, states, ended = threading.get_native_id(), [], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            states.append(Path(f"/proc/self/task/{here}/stat").read_text().rpartition(")")[2].split()[0])

    torch.ones(1, device="cuda")
    simulation.stress(Stress(spins=spins))
    simulation.delay(torch.cuda.current_stream(), 500)
    looking = threading.Thread(target=look)
    looking.start()
    torch.cuda.synchronize()
    ended.set()
    looking.join()
    simulation.stress(Stress())
    assert states.count(state) > 0.8 * len(states) > 0


# Graphs.


def test_a_captured_graph_is_replayed() -> None:
    given, graph = torch.ones(5, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert torch.cuda.is_current_stream_capturing()
        result = given * 2 + 1
    assert not torch.cuda.is_current_stream_capturing()
    for value in (3.0, 4.0):
        given.fill_(value)
        graph.replay()
        assert result.tolist() == [2 * value + 1] * 5


def test_a_graph_refuses_queries_and_waits_and_is_broken_by_them() -> None:
    a, event = torch.ones(5, device="cuda"), torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()
    for refused in (
        event.query,
        event.synchronize,
        a.tolist,
        torch.cuda.synchronize,
        torch.cuda.current_stream().query,
    ):
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        capture = torch.cuda.graph(graph)
        capture.__enter__()
        a + 1
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            refused()
        with pytest.raises(RuntimeError, match="due to a previous error during capture"):
            capture.__exit__(None, None, None)
        torch.cuda.set_stream(before)  # which torch leaves to who catches such an error


# Random numbers, storages, sparse tensors, memory.


def test_random_numbers_are_those_of_the_seed_in_the_order_of_the_host() -> None:
    def draw() -> list[Tensor]:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            simulation.delay(side, 50)
            first = torch.rand(5, device="cuda")
        second = torch.rand(5, device="cuda")
        torch.cuda.synchronize()
        return [first.cpu(), second.cpu()]

    torch.manual_seed(3)
    state = torch.cuda.get_rng_state()
    drawn = draw()
    torch.cuda.set_rng_state(state)
    assert all(map(torch.equal, drawn, draw()))
    assert not torch.equal(*drawn)
    own = torch.Generator("cuda").manual_seed(4)
    again = torch.Generator("cuda").manual_seed(4)
    assert torch.equal(*(torch.randn(4, device="cuda", generator=each) for each in (own, again)))


def test_storages() -> None:
    made = torch.UntypedStorage(12, device="cuda:1")
    assert (made.device, made.nbytes()) == (torch.device("cuda:1"), 12)
    three = torch.arange(3.0, device="cuda")
    copied = torch.empty(0, device="cuda").set_(three.untyped_storage().clone(), 0, (3,), (1,))
    three.zero_()
    assert copied.tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_tensors(layout: str) -> None:
    plain = torch.eye(4).roll(1, 0)
    there = plain.cuda().to_sparse() if layout == "coo" else plain.cuda().to_sparse_csr()
    assert there.is_cuda
    assert there.layout is not torch.strided
    assert torch.equal(there.to_dense().cpu(), plain)
    assert torch.equal(
        (there @ torch.arange(8.0, device="cuda").view(4, 2)).cpu(), plain @ torch.arange(8.0).view(4, 2)
    )
    moved = there.to("cuda:1")
    assert moved.device == torch.device("cuda:1")
    assert torch.equal(moved.to_dense().cpu(), plain)
    kept = there.clone()
    there.copy_((there.to_dense() * 2).to_sparse() if layout == "coo" else (there.to_dense() * 2).to_sparse_csr())
    assert torch.equal(there.to_dense().cpu(), 2 * kept.to_dense().cpu())


def test_sparse_gradients() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True, device="cuda")
    table(torch.tensor([1, 1, 4], device="cuda")).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    found = table.weight.grad.coalesce()
    assert found.indices().tolist() == [[1, 4]]
    assert found.values().tolist() == [[2.0] * 3, [1.0] * 3]


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda:0") + torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device="cuda:0").mul_(torch.ones(3))


def test_memory_ends() -> None:
    with simulation.memory_of(1 << 20), pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(1 << 20, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    before = torch.cuda.memory_allocated(1)
    torch.empty(1 << 18, device="cuda:1")
    assert torch.cuda.max_memory_allocated(1) == before + (1 << 20)
    assert torch.cuda.memory_allocated(1) == before


# Processes.


def _python(script: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(_ROOT)}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


def test_a_host_that_reads_device_memory_dies_and_the_line_is_told() -> None:
    done = _python("import tests, torch, ctypes\na = torch.ones(3, device='cuda')\nctypes.string_at(a.data_ptr(), 4)\n")
    assert done.returncode != 0
    assert "simulated: the host has read or written memory of a device" in done.stderr
    assert 'File "<string>", line 3 in <module>' in done.stderr


def test_a_forked_process_is_refused_as_cuda_refuses_it() -> None:
    done = _python(
        "import tests, torch, os\na = torch.ones(3, device='cuda')\nif os.fork() == 0:\n"
        "    try:\n        torch.ones(3, device='cuda')\n    except RuntimeError as error:\n"
        "        print(error, flush=True)\n    os._exit(0)\nos.wait()\nprint(a.tolist())\n"
    )
    assert done.stdout.startswith("Cannot re-initialize CUDA in forked subprocess"), done.stderr
    assert done.stdout.endswith("[1.0, 1.0, 1.0]\n")


def test_whoever_asks_the_runtime_spoils_its_forks_and_who_counts_does_not() -> None:
    fork = "print(torch.cuda._is_in_bad_fork(), flush=True) if os.fork() == 0 else os.wait()\n"
    counted = "import tests, torch, os\nassert torch.cuda.device_count() > 0\n"
    assert _python(counted + fork).stdout == "False\n"
    assert _python("import tests, torch, os\nassert torch.cuda.is_available()\n" + fork).stdout == "True\n"
    softly = "os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '1'\nassert torch.cuda.is_available()\n"
    assert _python("import tests, torch, os\n" + softly + fork).stdout == "False\n"


def test_visible_devices_are_fewer() -> None:
    script = "import tests, os, torch\nprint(torch.cuda.device_count())"
    for visible, count in (("", 0), ("1", 1), ("0,1", 2)):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": str(_ROOT), "CUDA_VISIBLE_DEVICES": visible},
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(done.stdout) == count


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    folder = build.libraries(plugin=False)
    assert (folder / build.DEVICE).exists()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.Unavailable, match=r"there is no C\+\+ compiler"):
        build.libraries(plugin=False)


# Collectives.


def _in_flight() -> list[float]:
    world = lockstep.init()
    simulation.stress(Stress(seed=world.rank, jitter=500, side=2000))
    pair, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)][world.rank]
    many = [torch.full((100,), float(world.rank + each), device=world.device) for each in range(6)]
    works = [
        dist.all_reduce(each, group=pair if number % 2 else None, async_op=True) for number, each in enumerate(many)
    ]
    gathered = torch.empty(4, device=world.device)
    works.append(
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(world.rank), device=world.device), async_op=True)
    )
    scattered = torch.empty(2, device=world.device)
    dist.reduce_scatter_tensor(scattered, torch.arange(4.0, device=world.device))
    dist.all_reduce(many[0].clone(), group=alone)
    for work in works:
        assert work is not None
        work.wait()
    dist.broadcast(many[1], src=1)
    dist.barrier()
    return [float(each.mean()) for each in many] + gathered.tolist() + scattered.tolist()


def test_several_collectives_are_in_flight_also_in_groups() -> None:
    for rank, found in enumerate(run_ranks(_in_flight, 2)):
        assert found == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 0, 0, 1, 1, 4.0 * rank, 4.0 * rank + 2]


def _does_not_wait(stashed: bool) -> tuple[bool, float]:
    world = lockstep.init()
    value = torch.full((1000,), float(world.rank), device=world.device)
    torch.cuda.synchronize()
    counting = Counting()
    with simulation.held_back(torch.cuda.current_stream()):
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        if stashed:
            work.wait()
        done = work.is_completed()
        assert counting.so_far().waits == 0
    if not stashed:
        work.wait()
    return done, float(value.mean())


@pytest.mark.parametrize("stashed", [False, True])
def test_a_collective_that_is_waited_for_holds_the_stream_and_not_the_host(stashed: bool) -> None:
    assert run_ranks(_does_not_wait, 2, stashed) == [(False, 1.0)] * 2
