"""Steps in slices: what is refused, memory that runs out, slow ranks, runs that stop and go on elsewhere."""

from __future__ import annotations

import contextlib
import json
import random
import re
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

import lockstep
from lockstep.job import flight
from lockstep.step import slicing
from tests.backends import EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.test_slices import BATCH, Net, build, digest, samples

pytestmark = EACH_BACKEND


def _loader(**options: Any) -> Any:
    return lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), **options)


def _model(make: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    return lockstep.replicate(build(make), **options)


def _leaves_early() -> None:
    model = _model()
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x).sum().backward()
            break


def _leaves_a_pass_early() -> None:
    for step in _loader(slices=4).steps():
        next(iter(step))
        list(step)


def _steps_inside() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x).sum().backward()
            optimizer.step()


def _is_late() -> None:
    model = _model()
    for step in _loader(slices=4).steps():
        losses = [model(x).sum() for x, _ in step]
        torch.stack(losses).sum().backward()


def _mixes_slices() -> None:
    model = _model()
    for step in _loader(slices=4).steps():
        before = None
        for x, _ in step:
            loss = model(x).sum()
            (loss if before is None else loss + before).backward()
            before = model(x).sum()


def _meets_inside() -> None:
    for step in _loader(slices=4).steps():
        for _ in step:
            lockstep.world().all_reduce(1.0)


def _clears(where: str) -> list[str]:
    world = lockstep.init(timeout=20)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in _loader(slices=4).steps():
            if where == "before":
                optimizer.zero_grad()
            for x, _ in step:
                if where == "inside":
                    optimizer.zero_grad()
                model(x).sum().backward()
            if where != "accumulated":
                optimizer.step()
            if where == "zeroed":
                optimizer.zero_grad(set_to_none=False)
    return [str(each.message) for each in caught if "were still there" in str(each.message)] if world.is_main else []


@pytest.mark.parametrize(
    ("where", "warned"), [("never", 1), ("inside", 0), ("before", 0), ("accumulated", 0), ("zeroed", 0)]
)
def test_gradients_that_pile_up_are_told_of_once(where: str, warned: int) -> None:
    assert len(run_ranks(_clears, 2, where)[0]) == warned


def _weighs_some() -> None:
    model = _model()
    for step in _loader(slices=4).steps():
        for number, (x, _) in enumerate(step):
            if number == 0:
                step.weigh(3)
            model(x).sum().backward()


def _weighs_nothing() -> None:
    for step in _loader(slices=4).steps():
        for _ in step:
            step.weigh(0)


def _iterates() -> None:
    list(_loader(slices=4))


def _asks_for_steps() -> None:
    _loader().steps()


def _norm_of_all_ranks() -> None:
    model = _model(lambda: nn.Sequential(nn.Linear(10, 4), lockstep.SyncBatchNorm(4)))
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x).sum().backward()


def _trains_apart() -> None:
    model = _model(lambda: nn.Linear(10, 4), sync=lockstep.LocalSteps())
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x)


def _has_a_hook() -> None:
    model = _model()
    lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x)


def _has_sparse_gradients() -> None:
    model = _model(lambda: nn.Embedding(4, 4, sparse=True))
    for step in _loader(slices=4).steps():
        for _, y in step:
            model.get_parameter("weight")[y % 4].sum().backward()  # not through a forward


def _weighs_outside() -> None:
    for step in _loader(slices=4).steps():
        step.weigh(4)


def _logs_apart() -> None:
    if lockstep.world().is_main:
        lockstep.Log("nowhere.jsonl")
    model = _model()
    for step in _loader(slices=4).steps():
        for x, _ in step:
            model(x).sum().backward()


def _others_are_there() -> None:
    """Models that could not take part, and do not: one has only been made, the others are asked without gradients."""
    others = [
        _model(lambda: nn.Embedding(4, 10, sparse=True)),
        _model(lambda: nn.Linear(10, 4), sync=lockstep.LocalSteps()).eval(),
        _model(lambda: nn.Sequential(nn.Linear(10, 4), lockstep.SyncBatchNorm(4))).eval(),
    ]
    model = _model()
    for step in _loader(slices=4).steps():
        for x, _ in step:
            with torch.no_grad():
                teachers = [other(x) for other in others[1:]]
            (model(x).sum() + sum(teacher.sum() for teacher in teachers)).backward()
        assert any(param.grad is not None for param in model.parameters())
        model.zero_grad()
    others[0](torch.arange(4)).sum().backward()


def test_only_models_that_take_part_are_asked_whether_they_can() -> None:
    run_ranks(_makes, 2, _others_are_there)


MISTAKES: list[tuple[Callable[[], None], str]] = [
    (_leaves_early, "the loop has left batch 0 of epoch 0 before its last slice"),
    (_leaves_a_pass_early, "the last one was left before its last slice"),
    (_steps_inside, "parameter 'first.weight' was changed inside slice"),
    (_is_late, "comes through a forward of another slice, or of none, or of a step that is over"),
    (_mixes_slices, "comes through a forward of another slice"),
    (_meets_inside, r"World.all_reduce\(\) needs all ranks, and was called inside a slice"),
    (_weighs_some, r"weigh\(\) was called in slices \[0, 2\] and not in \[1, 3\]"),
    (_weighs_nothing, "the slices weigh nothing together"),
    (_iterates, "this loader was sharded with slices=4, so its loop is over steps"),
    (_asks_for_steps, r"sharded without slices.*lockstep.shard\(loader, slices=8\)"),
    (_norm_of_all_ranks, "'1' is a SyncBatchNorm, which waits for all ranks"),
    (_trains_apart, "with LocalSteps none are averaged"),
    (_has_a_hook, r"a comm hook \(.*bf16_compress_hook\) averages its gradients"),
    (_has_sparse_gradients, "it has sparse gradients"),
    (_weighs_outside, "outside of the step's inner loop"),
    (_logs_apart, "have made different numbers of replicas and logs"),
]


def _makes(mistake: Callable[[], None]) -> None:
    lockstep.init(timeout=20)
    mistake()


@pytest.mark.parametrize(("mistake", "words"), MISTAKES, ids=lambda each: getattr(each, "__name__", ""))
def test_mistakes_are_named_on_all_ranks(mistake: Callable[[], None], words: str) -> None:
    for outcome in collect_outcomes(_makes, 2, mistake):
        assert outcome.message is not None
        assert re.search(words, outcome.message), outcome


def _public_collectives() -> set[str]:
    """The public names whose docstrings say that all ranks must call them."""
    found = set()
    for name in lockstep.__all__:
        thing = getattr(lockstep, name)
        if "**Collective" in (thing.__doc__ or ""):
            found.add(name)
        if isinstance(thing, type):
            named = ((member, value.__doc__ or "") for member, value in vars(thing).items() if member[0] != "_")
            found |= {f"{name}.{member}" for member, words in named if "**Collective" in words}
    return found


#: The first two are refused in words of their own, the third comes before any slice, and the others are no calls.
_NOT_REFUSED = {"SyncBatchNorm", "gathered", "init", "bf16_compress_hook", "fp16_compress_hook"}


def _calls_of_all_ranks(folder: str) -> set[str]:
    """Make each of these calls in a slice, on ranks with two slices and with one; return which were refused."""
    world = lockstep.world()
    model, apart = _model(), _model(sync=lockstep.LocalSteps())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, plain = _loader(slices=3), _loader()
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    log = lockstep.Log(saved)
    wrapped = lockstep.DistributedDataParallel(build(Net))
    calls: dict[str, Callable[[], Any]] = {
        "Checkpointer": lambda: lockstep.Checkpointer(f"{folder}-2", model=model),
        "Checkpointer.async_save": saved.async_save,
        "Checkpointer.between_steps": saved.between_steps,
        "Checkpointer.epochs": lambda: next(saved.epochs(1)),
        "Checkpointer.restore": saved.restore,
        "Checkpointer.save": saved.save,
        "DistributedDataParallel": lambda: lockstep.DistributedDataParallel(build(Net)),
        "DistributedDataParallel.join": wrapped.join,
        "Log": lambda: lockstep.Log(f"{folder}-2"),
        "Log.close": log.close,
        "Log.line": log.line,
        "ShardedLoader.load_state_dict": lambda: plain.load_state_dict(plain.state_dict()),
        "World.all": lambda: world.all(True),
        "World.all_reduce": lambda: world.all_reduce(1.0),
        "World.any": lambda: world.any(True),
        "World.barrier": world.barrier,
        "World.broadcast": lambda: world.broadcast(1),
        "World.gather": lambda: world.gather(1),
        "World.gather_in_order": lambda: world.gather_in_order([], plain),
        "World.main_first": lambda: world.main_first().__enter__(),
        "World.mean": lambda: world.mean(1.0),
        "a pass": lambda: iter(plain),
        "finish_round": lambda: lockstep.finish_round(apart),
        "join": lambda: lockstep.join(model),
        "once_per_machine": lambda: lockstep.once_per_machine(lambda: torch.ones(3)),
        "replicate": lambda: lockstep.replicate(build(Net)),
        "shard": lambda: _loader(slices=3),
        "split": lambda: lockstep.split(range(6)),
    }
    refused = set()
    for step in loader.steps():
        for x, y in step:
            for name, call in calls.items():
                with pytest.raises(lockstep.LockstepError, match="needs all ranks, and was called inside a slice"):
                    call()
                refused.add(name)
            log(loss=1.0)
            cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert world.all_reduce(saved.step, "max") == saved.step
    assert refused == set(calls)
    log.line()
    return refused


def _makes_the_calls(folder: str) -> set[str]:
    lockstep.init(timeout=20)
    return _calls_of_all_ranks(folder)


def test_every_call_for_all_ranks_is_refused_in_a_slice_and_sends_nothing(tmp_path: Path) -> None:
    for refused in run_ranks(_makes_the_calls, 2, str(tmp_path / "run")):
        assert _public_collectives() - refused <= _NOT_REFUSED
    assert not [each for each in (tmp_path / "run").iterdir() if each.name.startswith("step")], "no step is half saved"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0]


def _asks(options: dict[str, Any], stream: bool) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    lockstep.init(timeout=20)
    lockstep.shard(DataLoader(Stream() if stream else samples(), BATCH), **options)


@pytest.mark.parametrize(
    ("options", "stream", "words"),
    [
        ({"slices": 0}, False, "slices=0: expected at least one"),
        ({"slices": 2.5}, False, r'slices=2.5: expected a number of slices, "auto" or lockstep.Slices'),
        ({"slices": 41}, False, "batch_size=40 with slices=41"),
        ({"slices": lockstep.Slices(4, threads=0)}, False, "threads=0"),
        ({"slices": lockstep.Slices("four")}, False, "slices='four': expected a number of slices"),  # type: ignore[arg-type]
        ({"slices": lockstep.Slices(4, shares=[1, 1, 1])}, False, "expected one for each of the 2 ranks, not 3"),
        ({"slices": lockstep.Slices(4, shares=[1, 2], balance=True)}, False, "give one of them"),
        ({"slices": 4, "shares": [1, 2]}, False, r"slices=lockstep.Slices\(4, shares=\[1, 2\]\)"),
        ({"slices": "auto"}, True, "the workers that read a stream"),
    ],
)
def test_bad_options_are_refused_on_all_ranks(options: dict[str, Any], stream: bool, words: str) -> None:
    for outcome in collect_outcomes(_asks, 2, options, stream):
        assert outcome.message is not None
        assert re.search(words, outcome.message), outcome


# Memory --------------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Without batch norm, which takes no batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(10, 24), nn.Dropout(0.3), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.first(x)))  # type: ignore[no-any-return]


class Large(nn.Module):
    """Runs out of memory at more than so many samples, on one rank, as torch's allocator says it."""

    def __init__(self, most: int, inside: str) -> None:
        super().__init__()
        self.net, self.most, self.inside = build(Plain), most, inside

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        world = lockstep.world()
        if len(x) > self.most and (world.world_size == 1 or world.rank == 1):
            if self.inside == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            out.register_hook(_run_out)
        return out


def _run_out(_: Tensor) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried")


def _trained_in(slices: int | str, most: int, inside: str, epochs: int) -> list[Any]:
    world = lockstep.init(timeout=20)
    large = Large(most, inside)
    model = lockstep.replicate(large)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices=slices)  # type: ignore[arg-type]
    seen = []
    for _ in range(epochs):
        for step in loader.steps():
            for x, y in step:
                with step.attempt():
                    cross_entropy(model(x), y).backward()
            seen.append(step.slices)
            optimizer.step()
            optimizer.zero_grad()
    return [digest(model.state_dict(), optimizer.state_dict()), seen, loader.slices, world.all_reduce(1)]


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_a_step_that_does_not_fit_is_taken_again_in_twice_as_many_slices(inside: str) -> None:
    ((expected, *_),) = run_ranks(_trained_in, 1, 8, 100, inside, 2)
    for world_size in (1, 2, 3):
        outcomes = run_ranks(_trained_in, world_size, "auto", 5, inside, 2)
        assert outcomes == [[expected, [8] * 6, 8, world_size]] * world_size  # 40 samples, five fit


def _logged(folder: str) -> tuple[list[int], list[int]]:
    """The log has no Checkpointer to ask for the step: it counts, and a step that is taken again is no other step."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(Large(12, "forward"))
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices="auto")
    steps, tokens = [], []
    with lockstep.Log(folder, every=1) as log:
        for _ in range(2):
            for step in loader.steps():
                for x, y in step:
                    with step.attempt():
                        log(size=float(len(x)))
                        world.count_tokens(len(x))
                        cross_entropy(model(x), y).backward()
                steps.append(log.step)
                tokens.append(flight.current.tokens)
                flight.current.tokens = 0  # as an optimizer's step does
                model.zero_grad()
    return steps, tokens


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_taken_again_is_logged_and_counted_once(world_size: int, tmp_path: Path) -> None:
    of_ranks = run_ranks(_logged, world_size, str(tmp_path))
    assert [steps for steps, _ in of_ranks] == [[1, 2, 3, 4, 5, 6]] * world_size
    assert sum(sum(tokens) for _, tokens in of_ranks) == 2 * len(samples())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["size"] <= 12 for line in lines)


def test_a_step_that_can_not_be_cut_ends_the_run_on_all_ranks() -> None:
    for slices, most, words in (
        (2, 5, "Cut the batches into more slices than 2"),
        ("auto", 0, "the model itself does"),
    ):
        for outcome in collect_outcomes(_trained_in, 2, slices, most, "forward", 1):
            assert outcome.message is not None
            assert "memory ran out in a slice (rank 1: OutOfMemoryError: CUDA out of memory" in outcome.message
            assert words in outcome.message, outcome


class Short(nn.Module):
    """Takes 16 MiB for each sample while it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build(Plain)

    def forward(self, x: Tensor) -> Tensor:
        held = torch.empty(len(x) * (16 << 20), dtype=torch.uint8)
        out: Tensor = self.net(x)
        del held
        return out


def _address_space() -> int:
    (kilobytes,) = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kilobytes)


def _trained_in_short_memory(fills: bool) -> list[Any]:
    """Train with a limit of the kernel's on this process's memory: five samples fit, and ten do not."""
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(Short())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    # On all ranks: their first slices of twenty samples do not fit.
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices="auto")
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (120 << 20), most))
    seen = []
    for step in loader.steps():
        for x, y in step:
            kept: list[Any] = []  # what a script holds beyond the block in which memory ran out
            with step.attempt():
                if fills and len(x) > 5:
                    _fill(kept)
                cross_entropy(model(x), y).backward()
        seen.append(step.slices)
        optimizer.step()
        optimizer.zero_grad()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return [digest(model.state_dict(), optimizer.state_dict()), seen, world.world_size]


def _fill(kept: list[Any]) -> None:
    """Take all memory that there is, in pieces of all sizes, and fail."""
    for size in (1 << 20, 1 << 16, 1 << 12, 1 << 9):
        with contextlib.suppress(RuntimeError, MemoryError):
            while True:
                kept.append(torch.empty(size, dtype=torch.uint8))
    raise MemoryError("nothing is left")


@pytest.mark.parametrize("fills", [False, True])
def test_a_step_is_taken_again_where_memory_is_really_short(fills: bool) -> None:
    """With ``fills`` nothing is left on any rank when they meet, but for what was kept for that."""
    outcomes = run_ranks(_trained_in_short_memory, 2, fills, timeout=30)
    seen = outcomes[0][1]
    assert len(seen) == 3
    # Ten samples do not fit. Five do, unless the allocator has reserved much address space, now or in a later step.
    assert seen == sorted(seen)
    assert seen[0] >= 8
    assert outcomes[1][:2] == outcomes[0][:2]


# Pace ----------------------------------------------------------------------------------------------------------------


class PlantedClock:
    """A clock that goes on when it is told to, in place of this process's own: the product reads paces from it."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def _paced(slow: float, balance: bool) -> list[Any]:
    """Train with a clock that a slice takes so long by; return the bits, who had how many slices, and for how long."""
    clock = PlantedClock()
    setattr(slicing, "time", clock)  # noqa: B010  (the module that it imports)
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(build())
    loader = lockstep.shard(DataLoader(samples(640), 32), slices=lockstep.Slices(16, balance=balance))
    held, seconds = [], []
    for step in loader.steps():
        held.append(len(step))
        for x, y in step:
            clock.now += slow if world.rank == 1 else 1.0
            cross_entropy(model(x), y).backward()
        seconds.append([*step.seconds])
    return [digest([param.grad for param in model.parameters()], model.state_dict()), held, seconds]


def test_slices_move_from_a_slow_rank_to_a_fast_one() -> None:
    ((expected, _, _),) = run_ranks(_paced, 1, 1.0, False)
    fast, slow = run_ranks(_paced, 2, 2.0, True)
    assert (fast[0], slow[0]) == (expected, expected)
    # Three steps are looked at, and two batches were asked for ahead. 16 slices at paces 1 and 2.
    assert (fast[1], slow[1]) == ([8] * 5 + [11] * 15, [8] * 5 + [5] * 15)
    assert fast[2] == slow[2] == [[8.0, 16.0]] * 5 + [[11.0, 10.0]] * 15
    fast, slow = run_ranks(_paced, 2, 2.0, False)
    assert (fast[0], slow[0], fast[1], slow[1]) == (expected, expected, [8] * 20, [8] * 20)


def test_slices_stay_where_ranks_are_about_as_fast_as_each_other() -> None:
    fast, slow = run_ranks(_paced, 2, 1.05, True)
    assert (fast[1], slow[1]) == ([8] * 20, [8] * 20)


def _paced_in_time(balance: bool) -> float:
    """Return what a step takes once slices have moved, where a slice takes twice as long on one rank."""
    world = lockstep.init(timeout=60)
    model = lockstep.replicate(build())
    loader = lockstep.shard(DataLoader(samples(640), 32), slices=lockstep.Slices(16, balance=balance))
    took = []
    for step in loader.steps():
        begun = time.perf_counter()
        for x, y in step:
            time.sleep(0.04 * (1 + world.rank))
            cross_entropy(model(x), y).backward()
        took.append(time.perf_counter() - begun)
    return sorted(took[10:])[5]


@pytest.mark.campaign
@pytest.mark.timed
def test_steps_are_shorter_where_slices_have_moved() -> None:
    moved, _ = run_ranks(_paced_in_time, 2, True)
    even, _ = run_ranks(_paced_in_time, 2, False)
    # 16 slices at paces 1 and 2: at best 10.7 of them, where the even split takes 16.
    assert moved <= 1.2 * even * 10.67 / 16


# Runs that stop and go on --------------------------------------------------------------------------------------------


def _goes_on(folder: Path, slices: int, until: int, common: bool = True) -> list[Any]:
    world = lockstep.init(timeout=30)
    net: Any = build()
    net.register_buffer("noise", torch.zeros(()))
    model = lockstep.replicate(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    loader = lockstep.shard(DataLoader(samples(), BATCH, shuffle=True), slices=slices)
    run = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, scheduler=schedule, loader=loader)
    for _ in run.epochs(4):
        for step in loader.steps():
            for x, y in step:
                cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            with torch.no_grad():  # with numbers that the ranks have in common
                net.noise.copy_(torch.rand(()) + random.random() + float(np.random.rand()))
            if run.step == until:
                torch.rand(world.rank if not common else 0)
                run.save()
                return [world.world_size]
    return [digest(net.state_dict(), optimizer.state_dict())]


def _goes_on_in_silence(folder: Path, slices: int, until: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _goes_on(folder, slices, until)


def test_a_run_that_changes_its_size_in_mid_epoch_has_the_bits_of_one_rank(tmp_path: Path) -> None:
    expected = run_ranks(_goes_on, 1, tmp_path / "alone", 8, -1)
    for world_size, until in ((4, 2), (2, 4), (3, 7), (1, 8)):
        run_ranks(_goes_on_in_silence, world_size, tmp_path / "changing", 8, until)
    assert run_ranks(_goes_on_in_silence, 4, tmp_path / "changing", 8, -1) == expected * 4


def _goes_on_and_is_warned(folder: Path, slices: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _goes_on(folder, slices, -1)
    return [str(each.message) for each in caught]


def test_a_run_that_goes_on_in_other_slices_says_so(tmp_path: Path) -> None:
    run_ranks(_goes_on, 2, tmp_path, 8, 2)
    told, others = run_ranks(_goes_on_and_is_warned, 2, tmp_path, 4)
    assert [re.search("slices=8 before, slices=4 now", text) is not None for text in told] == [True]
    assert others == []


def test_a_run_whose_ranks_drew_different_numbers_says_so_on_another_number_of_them(tmp_path: Path) -> None:
    run_ranks(_goes_on, 2, tmp_path, 8, 2, False)
    told, *others = run_ranks(_goes_on_and_is_warned, 3, tmp_path, 8)
    assert len(told) == 1
    assert "used differently on each rank" in told[0]
    assert others == [[], []]


def _is_not_finite(set_to_none: bool) -> list[str]:
    """Catch the error of a step that is not finite in the first of two models, and train on in the next epoch."""
    lockstep.init(timeout=20)
    models = [_model(check_finite="raise"), _model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    params = [param for model in models for param in model.parameters()]
    loader, steps, seen = _loader(slices=4), 0, []
    for param in params:
        param.grad = torch.ones_like(param)

    def train() -> None:
        nonlocal steps
        for step in loader.steps():
            steps += 1
            for x, y in step:
                for place, model in enumerate(models):
                    loss = cross_entropy(model(x), y)
                    (loss * float("nan") if steps == 1 and not place else loss).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    with pytest.raises(lockstep.NonFiniteGradient):
        train()
    assert all(param.grad is not None and torch.equal(param.grad, torch.ones_like(param)) for param in params)
    seen.append(digest([param.grad for param in params]))
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
    train()
    assert steps > 3
    return [*seen, digest([model.state_dict() for model in models])]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_a_step_that_was_not_finite(set_to_none: bool) -> None:
    expected = run_ranks(_is_not_finite, 1, set_to_none)[0]
    for world_size in (2, 3):
        assert run_ranks(_is_not_finite, world_size, set_to_none) == [expected] * world_size
