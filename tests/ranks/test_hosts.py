"""Groups that span hosts: how they are chosen, what they promise, and what their ranks say when one dies or is late.

The hosts are one machine: what tells them apart is each rank's place, as launchers on several machines would set it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

import lockstep
from lockstep.checkpoint.manifest import FileEntry, Manifest
from lockstep.comm.group.meeting import Whereabouts, say_and_hear
from lockstep.comm.hosts import between
from lockstep.comm.hosts.engine import HostsEngine
from lockstep.comm.hosts.grouping import Hosts
from tests.harness import Outcome, collect_outcomes, run_ranks
from tests.ranks.standing import wait_until_it_is_over, wait_until_they_wait

#: From the moment an error can be seen on one host to the error on every rank of the others; and for busy machines.
SOON = 1.0
MARGIN = 20.0


# --- which ranks share a host ----------------------------------------------------------------------------------------


def test_ranks_are_grouped_by_host_in_the_order_of_the_first_ranks() -> None:
    hosts = Hosts.of(["b", "a", "b", "c", "a"], 4)
    assert hosts.members == ((0, 2), (1, 4), (3,))
    assert (hosts.host, hosts.local, hosts.leads, hosts.mine) == (1, 1, False, (1, 4))
    assert (hosts.leaders, hosts.other_leaders) == ((0, 1, 3), (0, 3))
    assert hosts.where(2) == (0, 1)


def _backend_of_machines_apart(backend: str | None) -> tuple[str, Any, list[str]]:
    """As on machines that share no memory: each says that it has booted by itself."""
    real = Whereabouts.mine()

    def mine() -> Whereabouts:
        return replace(real, boot_id=f"machine {os.environ['GROUP_RANK']}")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(Whereabouts, "mine", mine)
        world = lockstep.init(backend, timeout=30)
    assert world.all_reduce(1) == world.world_size
    return dist.get_backend(), world.hosts, [str(each.message) for each in seen]


@pytest.mark.parametrize(
    ("hosts", "backend", "expected"),
    [
        ([2, 2], None, ("hierarchical", [[0, 1], [2, 3]])),
        ([2, 1], None, ("hierarchical", [[0, 1], [2]])),
        ([1, 1], None, ("gloo", None)),
        ([2, 1], "gloo", ("gloo", None)),
    ],
)
def test_machines_with_several_ranks_share_memory_inside_each(
    hosts: list[int], backend: str | None, expected: tuple[str, Any]
) -> None:
    assert run_ranks(_backend_of_machines_apart, sum(hosts), backend, hosts=hosts) == [(*expected, [])] * sum(hosts)


def _no_memory_on_host_1() -> tuple[str, list[str]]:
    real = Whereabouts.mine()

    def mine() -> Whereabouts:
        return replace(real, boot_id=f"machine {max(1, int(os.environ['RANK']))}")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        patch.setattr(Whereabouts, "mine", mine)
        patch.setattr("lockstep.comm.hosts.grouping.my_host", lambda: os.environ["GROUP_RANK"])
        world = lockstep.init(timeout=30)
    assert world.all_reduce(1) == world.world_size
    return dist.get_backend(), [str(each.message) for each in seen]


def test_where_the_ranks_of_one_machine_can_not_share_memory_all_take_gloo_and_rank_0_says_why() -> None:
    first, *others = run_ranks(_no_memory_on_host_1, 4, hosts=[2, 2])
    assert others == [("gloo", [])] * 3
    backend, (said,) = first
    assert backend == "gloo"
    assert "ranks of one machine can't share memory" in said
    assert "rank 3" in said or "rank 2" in said
    assert 'lockstep.init("gloo")' in said


# --- the same bits ---------------------------------------------------------------------------------------------------

#: Elements: with the greeting; in one chunk; in more chunks than are on their way at once.
_COUNTS = (1, 1000, 100_003, 1_200_000)


def _sums(asynchronous: bool) -> list[str]:
    world = lockstep.init("hierarchical", timeout=60)
    found = []
    for _ in range(2):
        ours = [torch.randn(n, generator=torch.Generator().manual_seed(world.rank)) for n in _COUNTS]
        works = [dist.all_reduce(tensor, async_op=asynchronous) for tensor in ours]
        for work in works:
            if work is not None:
                work.wait()
        for tensor, count in zip(ours, _COUNTS, strict=True):
            parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(world.world_size)]
            torch.testing.assert_close(tensor, torch.stack(parts).sum(0), rtol=1e-5, atol=1e-5)
        found.append(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in ours)).hexdigest())
    assert len(set(found)) == 1
    return found


@pytest.mark.parametrize("hosts", [[2, 2], [1, 2, 1]])
def test_a_sum_has_the_same_bits_on_all_ranks_and_again(hosts: list[int]) -> None:
    one_by_one = run_ranks(_sums, sum(hosts), False, hosts=hosts)
    at_once = run_ranks(_sums, sum(hosts), True, hosts=hosts)
    assert len({digest for told in one_by_one + at_once for digest in told}) == 1


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).double()


def _gradients() -> list[list[float]]:
    world = lockstep.init("hierarchical", timeout=60)
    model = lockstep.replicate(_network(), bucket_cap_mb=1e-3)
    batch = torch.randn(12, 6, generator=torch.Generator().manual_seed(2)).double()
    model(batch[world.rank :: world.world_size]).square().mean().backward()
    return [param.grad.flatten().tolist() for param in model.parameters() if param.grad is not None]


def test_replicas_on_two_hosts_have_the_gradients_of_one_process() -> None:
    alone = _network()
    alone(torch.randn(12, 6, generator=torch.Generator().manual_seed(2)).double()).square().mean().backward()
    for found in run_ranks(_gradients, 3, hosts=[2, 1]):
        for got, param in zip(found, alone.parameters(), strict=True):
            assert param.grad is not None
            torch.testing.assert_close(torch.tensor(got).double(), param.grad.flatten(), rtol=1e-6, atol=1e-8)


def _groups() -> dict[str, list[float]]:
    world = lockstep.init("hierarchical", timeout=60)
    found = {}
    for ranks in ([0, 2, 3], [1, 3], [2], [0, 1]):
        group = dist.new_group(ranks)
        if world.rank in ranks:
            tensor = torch.full((3,), float(world.rank))
            dist.all_reduce(tensor, group=group)
            found[str(ranks)] = tensor.tolist()
            dist.destroy_process_group(group)
    return found


def test_groups_of_some_ranks_work_as_the_world_does() -> None:
    told = run_ranks(_groups, 4, hosts=[2, 2])
    for rank, found in enumerate(told):
        groups = [[0, 2, 3], [1, 3], [2], [0, 1]]
        assert found == {str(ranks): [float(sum(ranks))] * 3 for ranks in groups if rank in ranks}


# --- errors ----------------------------------------------------------------------------------------------------------


def _timed(action: Any) -> tuple[str, str, float]:
    begun = time.monotonic()
    try:
        action()
    except lockstep.LockstepError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("no error was raised")


def _value(outcome: Outcome) -> Any:
    assert outcome.ok, outcome.traceback or outcome.exit_code
    return outcome.value


def _die(dying: int, count: int) -> tuple[str, str, float]:
    world = lockstep.init("hierarchical", timeout=60)
    dist.barrier()
    if world.rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return _timed(lambda: dist.all_reduce(torch.ones(count)))


@pytest.mark.parametrize("dying", [2, 3])
@pytest.mark.parametrize("count", [1, 400_000])
def test_a_rank_that_dies_is_named_on_every_host(dying: int, count: int) -> None:
    outcomes = collect_outcomes(_die, 4, dying, count, hosts=[2, 2])
    for rank in {0, 1, 2, 3} - {dying}:
        kind, message, seconds = _value(outcomes[rank])
        assert kind == "PeerLost", message
        assert f"rank {dying}" in message.splitlines()[0]
        assert "all_reduce" in message
        assert seconds < SOON + MARGIN


def _late(late: int) -> tuple[str, str, float]:
    between._ANSWER = 30.0  # which comes at once, as soon as the rank that is asked runs
    world = lockstep.init("hierarchical", timeout=60)
    dist.barrier()
    group: Any = dist.group.WORLD
    if world.rank == late:
        wait_until_they_wait([3 - late])
        group.get_group_store().set("beside it", "")
        wait_until_it_is_over()  # (at work of its own)
    if world.rank == 0:
        group.get_group_store().wait(["beside it"], _seconds(60))
        wait_until_they_wait([1])
    options = dist.BarrierOptions()
    options.timeout, options.asyncOp = _seconds(30.0 if world.rank else 0.5), False
    return _timed(lambda: group.barrier(options))


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


@pytest.mark.parametrize("late", [2, 3])
def test_a_late_rank_is_named_on_the_host_whose_limit_comes_first(late: int) -> None:
    """The ranks beside the late one would wait for it much longer; they are asked."""
    told = run_ranks(_late, 4, late, hosts=[2, 2])
    for kind, message, seconds in told:
        assert kind == "CollectiveTimeout", message
        assert message.startswith(f"rank {late} did not come: rank {5 - late} timed out")
        assert f"rank {late} (process" in message
        assert seconds < 0.5 + 2 * SOON + MARGIN


def _host_late() -> tuple[str, str, float]:
    world = lockstep.init("hierarchical", timeout=60)
    dist.barrier()
    group: Any = dist.group.WORLD
    if world.rank >= 2:
        group.get_group_store().wait(["over"], _seconds(50))
        return _timed(lambda: [dist.barrier() for _ in range(2)])  # what the other host sent for the first is there
    if world.rank == 0:
        wait_until_they_wait([1])
    options = dist.BarrierOptions()
    options.timeout, options.asyncOp = _seconds(30.0 if world.rank else 0.5), False
    found = _timed(lambda: group.barrier(options))
    group.get_group_store().set("over", "")
    return found


def test_a_host_of_which_no_rank_comes_is_named() -> None:
    told = run_ranks(_host_late, 4, hosts=[2, 2])
    messages = {message for _, message, _ in told}
    assert {kind for kind, _, _ in told} == {"CollectiveTimeout"}
    assert len(messages) == 1
    assert messages.pop().startswith("rank 2 on another host did not come: rank 0 timed out after")


def _different(host: int) -> tuple[str, str, float]:
    """The ranks of one host, or one rank of it, have another number of elements than the others."""
    world = lockstep.init("hierarchical", timeout=60)
    odd = world.node_rank == 1 if host == 1 else world.rank == 3
    return _timed(lambda: dist.all_reduce(torch.ones(300_001 if odd else 300_000)))


@pytest.mark.parametrize("whole_host", [True, False])
def test_ranks_in_different_collectives_are_told_so_on_every_host(whole_host: bool) -> None:
    told = run_ranks(_different, 4, 1 if whole_host else 0, hosts=[2, 2])
    for kind, message, seconds in told:
        assert kind == "CollectiveMismatch", message
        assert "300001 elements" in message
        assert "300000 elements" in message
        assert "test_hosts.py:" in message
        assert ("  rank 2: " in message) or ("  rank 3: " in message)
        assert seconds < SOON + MARGIN


def _wrong_message() -> tuple[str, str, float]:
    world = lockstep.init("hierarchical", timeout=60)
    if world.rank == 0:
        dist.isend(torch.ones(3), 2, tag=4)
        return _timed(lambda: dist.barrier())
    if world.rank == 2:
        return _timed(lambda: dist.recv(torch.zeros(5), 0, tag=4))
    return _timed(lambda: dist.barrier())


def test_a_message_that_does_not_fit_is_an_error_on_every_rank() -> None:
    for kind, message, _ in run_ranks(_wrong_message, 3, hosts=[2, 1]):
        assert kind == "CollectiveMismatch"
        assert message.startswith("rank 0 sent 12 bytes of torch.float32 at ")
        assert "test_hosts.py:" in message
        assert "rank 2 receives 20 bytes (5 elements of torch.float32) in recv from rank 0 (tag 4)" in message


def _late_receiver() -> list[Any]:
    """A receive that is issued long before its message, from any rank; and a time limit for one that never comes."""
    world = lockstep.init("hierarchical", timeout=60)
    group: Any = dist.group.WORLD
    if world.rank == 2:
        first, second = torch.zeros(2), torch.zeros(2)
        works = [dist.irecv(first, 0), dist.irecv(second, 0)]
        dist.barrier()
        for work in works:
            assert work is not None
            work.wait()
        got = torch.zeros(1)
        source = dist.recv(got)
        group.set_timeout(_seconds(0.3))
        return [first.tolist(), second.tolist(), source, got.tolist(), _timed(lambda: dist.recv(got, 1, tag=9))[:2]]
    dist.barrier()
    if world.rank == 0:
        for number in (1.0, 2.0):
            dist.send(torch.full((2,), number), 2)
    if world.rank == 1:
        dist.send(torch.tensor([7.0]), 2)
    return [_timed(lambda: dist.barrier())[0]]


def test_messages_keep_their_order_and_their_limits() -> None:
    told = run_ranks(_late_receiver, 3, hosts=[2, 1])
    first, second, source, got, (kind, message) = told[2]
    assert (first, second, source, got) == ([1.0, 1.0], [2.0, 2.0], 1, [7.0])
    assert kind == "CollectiveTimeout"
    assert "rank 1 on another host did not come" in message
    assert "recv from rank 1 (tag 9)" in message
    assert told[:2] == [["CollectiveTimeout"]] * 2


def _of_odd_places() -> tuple[float, float]:
    """Under another default device, from a script whose path is no text; small and large, each with its messages."""
    world = lockstep.init("hierarchical", timeout=60)
    small, large = torch.full((3,), world.rank + 1.0), torch.full((5000,), world.rank + 1.0)
    lines = """with torch.device("meta"):
        dist.all_reduce(small)
        dist.all_reduce(large)
        dist.send(small, 2) if world.rank == 0 else dist.recv(small, 0) if world.rank == 2 else None
    """
    code = compile(lines, os.fsdecode(b"/home/caf\xe9.py"), "exec")
    exec(code, {**globals(), "world": world, "small": small, "large": large})
    dist.barrier()
    return float(small[0]), float(large[-1])


def test_neither_a_default_device_nor_the_path_of_a_script_matters() -> None:
    assert run_ranks(_of_odd_places, 3, hosts=[2, 1]) == [(6.0, 6.0)] * 3


def _without_a_thread() -> list[str]:
    world = lockstep.init("hierarchical", timeout=60)
    dist.barrier()
    if world.rank == 0:
        with pytest.MonkeyPatch.context() as patch:

            def refuse(_thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                dist.isend(torch.ones(3), 1)
        group: Any = dist.group.WORLD
        group._shm_group.engine._between.tell(group._shm_group.engine.known())
    kind, message, _ = _timed(lambda: dist.recv(torch.ones(4), 1 - world.rank, tag=3))
    return [kind, message.split(" at ")[0]]


def test_a_message_for_which_there_is_no_thread_ends_the_group() -> None:
    expected = ["LockstepError", "rank 0 can't start a thread for send to rank 1 (tag 0)"]
    assert run_ranks(_without_a_thread, 2, hosts=[1, 1]) == [expected] * 2


def _met_by_some(folder: str) -> list[bool]:
    """Rank 1 gives up while the hosts meet, when all connections are there."""
    made: list[between.Between] = []
    real = between.Between.__init__

    def noted(self: between.Between, *args: Any, **options: Any) -> None:
        made.append(self)
        real(self, *args, **options)

    def met(store: Any, key: str, *args: Any) -> Any:
        if key == "inside":
            raise lockstep.RendezvousError("some rank did not come")
        return say_and_hear(store, key, *args)

    store = FileStore(f"{folder}/store", 2)
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(between.Between, "__init__", noted)
        patch.setattr("lockstep.comm.hosts.engine.say_and_hear", met)
        with pytest.raises(lockstep.RendezvousError):
            HostsEngine(store, rank=rank, size=2, timeout=30, chunk=1024, host=str(rank))
    return [each._closed for each in made]


def test_hosts_that_do_not_meet_close_what_they_have_opened(tmp_path: Any) -> None:
    assert run_ranks(_met_by_some, 2, str(tmp_path), hosts=[1, 1]) == [[True]] * 2


# --- a group that is destroyed because of an error --------------------------------------------------------------------


def _destroy_with(backend: str, issued: str) -> tuple[str, float]:
    """Rank 0 fails with something on its way that no rank comes to; the others wait for it in a collective."""
    world = lockstep.init(backend, timeout=60)
    begun = time.monotonic()
    try:
        try:
            if world.rank == 0:
                if issued == "message":
                    dist.isend(torch.ones(3_000_000), world.world_size - 1)
                elif issued == "messages":
                    for tag in range(10):
                        dist.isend(torch.ones(3_000_000), world.world_size - 1, tag=tag)
                else:
                    dist.all_reduce(torch.ones(3_000_000), async_op=True)
                raise ValueError("the first error")
            dist.recv(torch.ones(3), 0, tag=9)
        finally:
            dist.destroy_process_group()
    except (ValueError, lockstep.LockstepError) as error:
        return str(error), time.monotonic() - begun
    raise AssertionError("all have failed")


@pytest.mark.parametrize("issued", ["message", "messages", "collective"])
@pytest.mark.parametrize(("backend", "hosts"), [("hierarchical", [2, 2]), ("shm", None)])
def test_an_error_does_not_wait_for_what_was_issued_before_it(
    backend: str, hosts: list[int] | None, issued: str
) -> None:
    (said, _), *others = told = run_ranks(_destroy_with, 4, backend, issued, hosts=hosts)
    assert said == "the first error"
    assert all("rank 0" in text for text, _ in others), others
    assert max(seconds for _, seconds in told) < 5.0 + MARGIN, "and not for the group's timeout"


# --- checkpoints -----------------------------------------------------------------------------------------------------


def _train(folder: str) -> tuple[int, list[str]]:
    lockstep.init("hierarchical", timeout=60)
    torch.manual_seed(1)
    model = lockstep.replicate(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        restored = checkpointer.restore()
    if restored is None:
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        checkpointer.save()
    return 0 if restored is None else restored.step, [str(each.message) for each in seen]


def test_a_manifest_says_how_ranks_were_spread_only_where_it_matters() -> None:
    files = {"model.safetensors": FileEntry.of([])}
    alone = Manifest(1, 0, False, 2, "now", {}, files)
    assert b"hosts" not in alone.to_json()
    spread = replace(alone, hosts=[[0], [1]])
    for manifest in (alone, spread):
        assert Manifest.from_json(manifest.to_json(), where="here") == manifest
    with pytest.raises(lockstep.CheckpointCorrupt, match="not lists of ranks"):
        Manifest.from_json(replace(alone, hosts=[0, 1]).to_json(), where="here")  # type: ignore[list-item]


def test_a_run_that_resumes_on_other_machines_is_told_that_its_bits_differ(tmp_path: Any) -> None:
    assert run_ranks(_train, 3, str(tmp_path), hosts=[2, 1]) == [(0, [])] * 3
    assert run_ranks(_train, 3, str(tmp_path), hosts=[2, 1]) == [(1, [])] * 3
    (step, (said,)), *others = run_ranks(_train, 3, str(tmp_path), hosts=[1, 2])
    assert step == 1
    assert others == [(1, [])] * 2
    assert "its ranks were on other machines, 0 1 | 2, than now, 0 | 1 2" in said
