"""A plain stream is read once a machine: the same batches as ever, from one reading; and what goes wrong in it."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import lockstep
from lockstep import knobs
from lockstep.comm import local_ranks
from lockstep.data.streams import passes
from lockstep.data.streams import shared as shared_stream
from lockstep.job import trace
from tests.backends import EACH_BACKEND, OVER_ALL, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks

pytestmark = EACH_BACKEND


class Pair(NamedTuple):
    number: Tensor
    text: str


@dataclass
class Sample:
    pair: Pair
    noise: np.ndarray[Any, Any]


class Counting(IterableDataset[Any]):
    """Samples with random numbers from all generators, split among its workers; counts those that are read."""

    def __init__(self, length: int, *, fails_at: int | None = None, kills: bool = False) -> None:
        self.length, self.fails_at, self.kills = length, fails_at, kills
        #: By worker, since two that add to one number may lose an addition.
        self.read = torch.zeros(2, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.length, step):
            self.read[first] += 1
            if number == self.fails_at:
                self.fail(number)
            noise = [torch.rand(()).item(), random.random(), float(np.random.rand())]
            yield {
                "number": torch.tensor(number),
                "noise": torch.tensor(noise),
                "text": f"ü{number}",
                "half": number / 2,
            }

    def fail(self, number: int) -> None:
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"sample {number} is broken")


def _plain(batch: dict[str, Any]) -> list[Any]:
    return [(name, part.tolist() if isinstance(part, Tensor) else part) for name, part in batch.items()]


def _passes(length: int, workers: int, persistent: bool = False) -> tuple[list[Any], list[int]]:
    """The batches of two passes, and how many samples this rank has read by the end of each."""
    lockstep.init(timeout=60)
    stream = Counting(length)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    loader = lockstep.shard(DataLoader(stream, batch_size=8, **options))
    seen, read = [], []
    for _ in range(2):
        seen.append([_plain(batch) for batch in loader])
        read.append(int(stream.read.sum()))
    return seen, read


def _joined(ranks: list[Any]) -> list[Any]:
    """Global batches of all passes: the ranks' shares behind each other."""
    return [
        [
            [
                (shares[0][part][0], [one for share in shares for one in share[part][1]])
                for part in range(len(shares[0]))
            ]
            for shares in zip(*[rank[epoch] for rank in ranks], strict=True)
        ]
        for epoch in range(2)
    ]


@OVER_ALL
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_stream_is_read_once_by_the_ranks_of_a_machine(workers: int, persistent: bool) -> None:
    length = 64
    (alone, read), *_ = run_ranks(_passes, 1, length, workers, persistent)
    assert read == [length, 2 * length]
    for world_size in (2, 3):
        ranks = run_ranks(_passes, world_size, length, workers, persistent)
        assert _joined([seen for seen, _ in ranks]) == alone
        first, second = ([read[epoch] for _, read in ranks] for epoch in range(2))
        assert first == [length] + [1] * (world_size - 1), "the others have looked at the first sample"
        assert second == [2 * length] + [1] * (world_size - 1), "once"


class Itself(IterableDataset[int]):
    """Its own iterator, which each iter() sets back, as litdata's is. In parts, every other sample is a rank's."""

    def __init__(self, first: int, step: int, draws: bool) -> None:
        self.first, self.step, self.draws, self.begun = first, step, draws, 0

    def __iter__(self) -> Itself:
        self.begun += 1
        self.next = self.first
        return self

    def __next__(self) -> int:
        number, self.next = self.next, self.next + self.step
        if number >= 61:
            raise StopIteration
        return number + (int(torch.randint(1, ())) if self.draws else 0)


def _from_itself(how: Any, draws: bool, seed_samples: bool) -> tuple[list[list[int]], int]:
    world = lockstep.init(timeout=60)
    stream = Itself(world.rank, world.world_size, draws) if how == "parts" else Itself(0, 1, draws)
    loader = lockstep.shard(DataLoader(stream, batch_size=8), stream=how, seed_samples=seed_samples)
    batches = [batch.tolist() for _ in range(2) for batch in loader]
    return batches, stream.begun


@pytest.mark.parametrize("seed_samples", [True, False])
@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("how", ["whole", "parts"])
def test_a_stream_that_is_its_own_iterator_is_begun_once_in_a_pass(how: str, draws: bool, seed_samples: bool) -> None:
    (ours, begun), (theirs, _) = run_ranks(_from_itself, 2, how, draws, seed_samples)
    assert sorted(number for batch in ours + theirs for number in batch) == sorted([*range(61)] * 2)
    assert begun == 2


class InOneBuffer:
    """Collates each batch into the memory of the one before."""

    def __init__(self) -> None:
        self.memory = torch.zeros(6)

    def __call__(self, samples: list[int]) -> Tensor:
        return self.memory[: len(samples)].copy_(torch.tensor(samples))


def _in_one_buffer() -> list[list[float]]:
    lockstep.init()
    loader = lockstep.shard(DataLoader(Itself(41, 1, False), batch_size=6, collate_fn=InOneBuffer()))
    return [batch.tolist() for batch in loader]


def test_a_collate_fn_may_use_the_memory_of_the_batch_before() -> None:
    """Rank 0 collates the shares of all ranks, and none is handed over with the samples of another."""
    ranks = run_ranks(_in_one_buffer, 3)
    joined = [[number for share in shares for number in share] for shares in zip(*ranks, strict=True)]
    assert joined == [[*range(41, 47)], [*range(47, 53)], [*range(53, 59)], [59, 60]]


def _held_in_one_buffer(what: str) -> list[list[float]]:
    world = lockstep.init()
    collate = InOneBuffer()
    if what == "parts":
        own = Itself(world.rank, world.world_size, False)
        parts = lockstep.shard(DataLoader(own, batch_size=6, collate_fn=collate), stream="parts")
        return [batch.tolist() for batch in parts]
    data: Any = Itself(0, 1, False) if what == "stream" else range(61)
    sliced = lockstep.shard(DataLoader(data, batch_size=12, collate_fn=collate), slices=4)
    return [batch.tolist() for step in sliced.steps() for batch in step]


@pytest.mark.parametrize("what", ["slices", "stream", "parts"])
def test_batches_that_wait_for_their_turn_keep_what_they_hold(what: str) -> None:
    """Slices are collated before the first is used, and parts are read ahead."""
    held = sorted(number for rank in run_ranks(_held_in_one_buffer, 2, what) for batch in rank for number in batch)
    assert held == [*range(61)]


def test_each_machine_reads_a_copy_of_its_own() -> None:
    (alone, _), *_ = run_ranks(_passes, 1, 61, 0)
    ranks = run_ranks(_passes, 3, 61, 0, hosts=[2, 1])
    assert _joined([seen for seen, _ in ranks]) == alone
    assert [read for _, read in ranks] == [[61, 122], [1, 1], [61, 122]]


def _sizes(length: int, drop_last: bool) -> list[Any]:
    world = lockstep.init(timeout=60)
    found = []
    for batch in lockstep.shard(DataLoader(Counting(length), batch_size=4, drop_last=drop_last)):
        assert world.share is not None
        assert len(batch["number"]) == world.share.local_samples
        found.append((len(batch["number"]), str(batch["noise"].dtype), tuple(batch["noise"].shape), batch["text"]))
        batch["noise"].mul_(2)  # the memory is this rank's own
    return found


def test_the_last_batch_may_be_small_or_empty_here() -> None:
    ranks = run_ranks(_sizes, 3, 9, False)
    assert [len(rank) for rank in ranks] == [3, 3, 3]
    assert ranks[0][-1] == (1, "torch.float32", (1, 3), ["ü8"])
    assert ranks[1][-1] == ranks[2][-1] == (0, "torch.float32", (0, 3), [])
    assert run_ranks(_sizes, 3, 9, True) == [rank[:2] for rank in ranks]
    assert run_ranks(_sizes, 2, 0, False) == [[], []]
    assert run_ranks(_sizes, 2, 3, True) == [[], []]


def _collated(samples: list[dict[str, Any]]) -> Any:
    numbers = torch.stack([sample["number"] for sample in samples])
    return Sample(Pair(numbers.double().to(torch.complex64).conj(), samples[0]["text"]), numbers.numpy() + 0.5)


def _in_classes() -> list[Any]:
    lockstep.init(timeout=60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none says that every rank reads
        batches = [*lockstep.shard(DataLoader(Counting(9), batch_size=4, collate_fn=_collated))]
    assert all(type(batch) is Sample and type(batch.pair) is Pair for batch in batches)
    return [(batch.pair.number.tolist(), batch.pair.text, batch.noise.tolist()) for batch in batches]


def test_batches_keep_their_classes() -> None:
    ranks = run_ranks(_in_classes, 2)
    assert ranks[0] == [([0, 1], "ü0", [0.5, 1.5]), ([4, 5], "ü4", [4.5, 5.5]), ([8], "ü8", [8.5])]
    assert ranks[1] == [([2, 3], "ü2", [2.5, 3.5]), ([6, 7], "ü6", [6.5, 7.5]), ([], "ü8", [])]


def _left(breaks: list[int]) -> list[list[int]]:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Counting(40), batch_size=4, num_workers=1))
    seen = []
    for most in breaks:
        numbers: list[int] = []
        for number, batch in enumerate(loader):
            numbers += batch["number"].tolist()
            if number == most:
                break
        seen.append(numbers)
    return seen


def test_a_loop_that_was_left_leaves_nothing_for_the_next() -> None:
    breaks = [0, 3, 1, 100, 2]
    alone = run_ranks(_left, 1, breaks)[0]
    ranks = run_ranks(_left, 2, breaks)
    assert [sorted(a + b) for a, b in zip(*ranks, strict=True)] == alone


def _resumed(workers: int, saved: Any) -> tuple[list[list[int]], list[Any]]:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Counting(30), batch_size=4, num_workers=workers))
    if saved is not None:
        loader.load_state_dict(saved)
    seen, states = [], []
    for batch in loader:
        seen.append(batch["number"].tolist())
        states.append(loader.state_dict())
    return seen, states


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_goes_on_where_it_was_on_another_number_of_ranks(workers: int) -> None:
    alone, states = run_ranks(_resumed, 1, workers, None)[0]
    ranks = run_ranks(_resumed, 3, workers, states[2])
    steps = zip(*[seen for seen, _ in ranks], strict=True)
    assert [[number for share in shares for number in share] for shares in steps] == alone[3:]
    assert ranks[0][1][-1] == states[-1]


def _traced(folder: str) -> None:
    os.environ |= {knobs.TRACE: "5:1", knobs.JOB_DIR: folder}
    lockstep.init(timeout=60)
    for _ in lockstep.shard(DataLoader(Counting(16), batch_size=4, num_workers=1)):
        pass


def test_the_workers_of_the_rank_that_reads_are_in_a_trace(tmp_path: Path) -> None:
    run_ranks(_traced, 2, str(tmp_path))
    ((_, made),) = trace.batches(tmp_path, 0).items()
    assert [batch.position for batch in made] == [0, 4, 8, 12]
    assert trace.batches(tmp_path, 1) == {}


def _fails(workers: int, kills: bool = False, at: int = 13) -> int:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Counting(40, fails_at=at, kills=kills), batch_size=4, num_workers=workers))
    return len([*loader])


@OVER_BOTH
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("at", [13, 0])
def test_an_error_of_the_stream_is_raised_on_every_rank_with_its_traceback(workers: int, at: int) -> None:
    for rank, outcome in enumerate(collect_outcomes(_fails, 3, workers, False, at)):
        assert outcome.error == "ValueError", outcome
        told = str(outcome.message if at and (rank or workers) else outcome.traceback)
        assert f"sample {at} is broken" in told
        assert "in fail" in told, "the user's own line"
        if rank and at:
            assert f"rank {rank}: rank 0, which reads the stream for this machine, failed to read batch 3" in told


@OVER_BOTH
def test_a_reading_rank_that_dies_is_named_on_the_others() -> None:
    reader, *others = collect_outcomes(_fails, 3, 0, True)
    assert reader.exit_code == -signal.SIGKILL
    for outcome in others:
        assert outcome.error == "PeerLost"
        assert "rank 0, which reads the stream for this machine, has not handed over batch 3" in str(outcome.message)


def test_a_reading_worker_that_dies_is_named_on_every_rank() -> None:
    for outcome in collect_outcomes(_fails, 2, 1, True):
        assert "DataLoader worker (pid" in str(outcome.message), outcome
        assert "killed by signal: Killed" in str(outcome.traceback), "torch says so there, or in its cause"


def _loses_a_worker_as_it_compares() -> int:
    world = lockstep.init(timeout=60)
    if world.rank == 0:
        compare = passes.WholePass._compare_first

        def compares(self: Any, fingerprint: str | None) -> None:
            compare(self, fingerprint)
            raise RuntimeError("DataLoader worker (pid 4711) is killed by signal: Killed. ")  # as torch's SIGCHLD does

        passes.WholePass._compare_first = compares  # type: ignore[method-assign]
    return len([*lockstep.shard(DataLoader(Counting(40), batch_size=4))])


@OVER_ALL
def test_a_worker_that_dies_while_first_batches_are_compared_is_named_on_every_rank() -> None:
    for outcome in collect_outcomes(_loses_a_worker_as_it_compares, 2):
        assert "DataLoader worker (pid 4711) is killed by signal" in str(outcome.message), outcome


def _goes_ahead() -> tuple[int, str]:
    """Rank 1 takes one batch, and asks for no other until rank 0 has given up."""
    world = lockstep.init(timeout=3)
    seen = 0
    try:
        for _ in lockstep.shard(DataLoader(Counting(400), batch_size=4)):
            seen += 1
            if world.rank == 1 and seen == 1:
                world.barrier(timeout=60)
    except lockstep.CollectiveTimeout as error:
        if world.rank == 0:
            world.barrier(timeout=60)
        return seen, str(error)
    raise AssertionError("nobody gave up")


def test_a_slow_rank_holds_up_the_reading_and_is_named() -> None:
    (ahead, why), (behind, told) = run_ranks(_goes_ahead, 2)
    assert ahead == 1 + shared_stream._AHEAD
    assert "rank 0: rank 1 has not taken its share of batch 1 of the stream within 3 s" in why
    assert behind == ahead, "what was handed over is not lost"
    assert why in told


def _leaves_early() -> int:
    world = lockstep.init(timeout=60)
    seen = 0
    for _ in lockstep.shard(DataLoader(Counting(40), batch_size=4)):
        seen += 1
        if world.is_main and seen == 2:
            break
    return seen


def test_a_reader_that_has_left_its_loop_is_named() -> None:
    reader, other = collect_outcomes(_leaves_early, 2)
    assert reader.value == 2
    assert other.error == "LockstepError"
    words = (
        "rank 1: rank 0, which reads the stream for this machine, has left its loop in batch 1, or an error has ended "
        "it there, and this rank asks for another one"
    )
    assert words in str(other.message)


class Pids(IterableDataset[int]):
    """After a first batch the process that reads, again and again."""

    def __iter__(self) -> Iterator[int]:
        return chain([0] * 4, repeat(os.getpid()))


def _loses_a_worker_in_its_step(how: str) -> int:
    world = lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(Pids(), batch_size=4, num_workers=2, persistent_workers=how == "persistent"))
    for number, batch in enumerate(loader):
        if world.is_main and number == 2:
            if how == "error":
                raise ZeroDivisionError("a mistake in the loop")
            os.kill(int(batch[0]), signal.SIGKILL)
            for _ in range(6000):
                time.sleep(0.01)  # until torch raises an error in here, where no loader is asked for anything
    raise AssertionError("nobody has raised an error")


@pytest.mark.parametrize("how", ["fresh", "persistent"])
def test_a_worker_that_dies_during_a_step_of_the_reader_is_named_on_every_rank(how: str) -> None:
    reader, other = collect_outcomes(_loses_a_worker_in_its_step, 2, how)
    for outcome, kind in ((reader, "RuntimeError"), (other, "LockstepError")):
        assert outcome.error == kind, outcome
        assert re.search(r"DataLoader worker \(pid \d+\) is killed by signal: Killed", str(outcome.message)), outcome
    assert "rank 1: rank 0, which reads the stream for this machine, failed to read batch 3. DataLoader worker" in str(
        other.message
    )


def test_an_error_in_a_step_of_the_reader_is_not_told_as_a_loop_that_was_left() -> None:
    reader, other = collect_outcomes(_loses_a_worker_in_its_step, 2, "error")
    assert reader.error == "ZeroDivisionError"
    assert "has left its loop in batch 2, or an error has ended it there" in str(other.message)


#: What is slept in a wait for a worker's death.
_LOOKS = 0.01


def _loses_a_connection() -> list[int]:
    """How often rank 0 has looked for the death of a worker when its connection was lost."""
    world = lockstep.init(timeout=60)
    looks: list[float] = []
    torchs, sleep, main = DataLoader.__iter__, time.sleep, threading.get_ident()

    def loses(loader: Any) -> Iterator[Any]:
        yield from islice(torchs(loader), 2)
        raise ConnectionResetError("by its peer")

    def sleeps(seconds: float) -> None:
        if seconds == _LOOKS and threading.get_ident() == main:
            looks.append(seconds)
        else:
            sleep(seconds)

    if world.is_main:
        DataLoader.__iter__ = loses  # type: ignore[method-assign, assignment]
        time.sleep = sleeps  # type: ignore[assignment]
    with pytest.raises((ConnectionResetError, lockstep.LockstepError), match="by its peer"):
        [*lockstep.shard(DataLoader(Counting(40), batch_size=4, num_workers=1))]
    return [len(looks)]


def test_a_workers_death_is_waited_for_once() -> None:
    assert run_ranks(_loses_a_connection, 2) == [[2000], [0]]


class Opaque:
    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers


def _opaque(after: int, samples: list[dict[str, Any]]) -> Any:
    numbers = [int(sample["number"]) for sample in samples]
    return [Opaque(numbers) if numbers[0] >= after else torch.tensor(numbers), samples[0]["noise"]]


class Opaquely:
    """A collate_fn whose batches hold an object of a class of the program's own from some sample on."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        return _opaque(self.after, samples)


def _by_all(after: int, workers: int) -> tuple[list[tuple[Any, Any]], int, list[str]]:
    lockstep.init(timeout=60)
    stream = Counting(32)
    loader = lockstep.shard(DataLoader(stream, batch_size=4, collate_fn=Opaquely(after), num_workers=workers))
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for part, noise in loader:
                seen.append((part.numbers if isinstance(part, Opaque) else part.tolist(), noise.tolist()))
    return seen, int(stream.read.sum()), [str(each.message) for each in told]


@pytest.mark.parametrize(("after", "workers"), [(0, 0), (0, 1), (12, 0), (12, 1)])
def test_every_rank_reads_what_can_not_be_handed_over_and_it_is_said_once(after: int, workers: int) -> None:
    alone = run_ranks(_by_all, 1, after, workers)[0][0]
    (main, read, told), (other, others, quiet) = run_ranks(_by_all, 2, after, workers)
    assert [a + b for (a, _), (b, _) in zip(main, other, strict=True)] == [numbers for numbers, _ in alone]
    assert [noise for _, noise in main] == [noise for _, noise in alone]
    assert (read, others) == (64, 65)
    assert len(told) == 1
    assert not quiet
    assert "every rank of this machine reads the whole stream" in told[0]
    assert f"an object of {__name__}:Opaque at [0]" in told[0]


class Unseeded(IterableDataset[int]):
    """Of 60 numbers those that are drawn; counts those that are read."""

    def __init__(self) -> None:
        self.read = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[int]:
        for number in range(60):
            self.read += 1
            if random.random() + float(np.random.rand()) + torch.rand(()).item() < 1.5:
                yield number


class DrawingCollate:
    """Draws for each sample, so that ranks draw differently often; its batches may be such as can't be handed over."""

    def __init__(self, opaque: bool) -> None:
        self.opaque = opaque

    def __call__(self, numbers: list[int]) -> Any:
        drawn = [random.random() + float(np.random.rand()) + torch.rand(()).item() for _ in numbers]
        return Opaque(numbers) if self.opaque else (numbers, drawn)


def _unseeded(workers: int, opaque: bool) -> tuple[list[Any], list[float], int, int]:
    lockstep.init(timeout=60)
    stream = Unseeded()
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": DrawingCollate(opaque)}
    loader = lockstep.shard(DataLoader(stream, batch_size=5, **options), seed_samples=False)
    seen, drawn = [], []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in loader:
                seen.append(batch.numbers if opaque else batch[0])
                drawn.append(random.random())  # by the script, between two batches
    return seen, [*drawn, random.random(), float(np.random.rand())], int(stream.read), len(told)


@pytest.mark.parametrize(("workers", "opaque"), [(0, False), (0, True), (1, False), (1, True)])
def test_without_seeds_the_ranks_have_the_parts_of_one_stream(workers: int, opaque: bool) -> None:
    (alone, drawn, read, _), *_ = run_ranks(_unseeded, 1, workers, opaque)
    assert read == 120
    assert 20 < sum(map(len, alone)) < 100
    ranks = run_ranks(_unseeded, 2, workers, opaque)
    assert [a + b for a, b in zip(*[seen for seen, *_ in ranks], strict=True)] == alone
    assert [rank[1] for rank in ranks] == [drawn, drawn], "what the script draws stays the same as well"
    looked = ranks[1][2] - (120 if opaque else 0)
    assert ranks[0][2] == 120
    assert 1 <= looked < 10, "rank 1 has looked for the first sample"
    assert [rank[3] for rank in ranks] == [int(opaque), 0], "that all read is said once"


def _piped(workers: int, saved: Any) -> tuple[list[list[list[int]]], Any]:
    lockstep.init(timeout=60)
    pipe = IterableWrapper(list(range(40))).shuffle().sharding_filter()
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = lockstep.shard(DataLoader(pipe, batch_size=6, shuffle=True, **options))
    if saved is not None:
        loader.load_state_dict(saved)
    epochs, state = [], None
    for _ in range(2):
        epochs.append([batch.tolist() for batch in loader])
        if state is None:
            for _ in zip(range(2), loader, strict=False):
                state = loader.state_dict()
    return epochs, state


@pytest.mark.parametrize("workers", [0, 2])
def test_a_datapipe_is_divided_among_its_workers_and_shuffled_alike_in_them(workers: int) -> None:
    (alone, _), *_ = run_ranks(_piped, 1, workers, None)
    ranks = run_ranks(_piped, 3, workers, None)
    for epoch, batches in enumerate(alone):
        assert sorted(number for batch in batches for number in batch) == list(range(40))
        parts = zip(*[seen[epoch] for seen, _ in ranks], strict=True)
        assert [[number for part in share for number in part] for share in parts] == batches
    assert alone[0] != alone[1], "each epoch is shuffled anew"
    again = run_ranks(_piped, 2, workers, ranks[0][1])
    rest = [a + b for a, b in zip(*[seen[0] for seen, _ in again], strict=True)]
    ((whole, _),) = run_ranks(_piped, 1, workers, {**ranks[0][1], "cursor": _beginning(ranks[0][1])})
    assert rest == whole[0][2:]


def _beginning(state: Any) -> Any:
    return {"epoch": state["cursor"]["epoch"], "samples": 0, "batches": 0, "in_epoch": False}


class CountsPasses(IterableDataset[int]):
    """Begins with another number in each pass, by its own count."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(100 * self.passes, 100 * self.passes + 40))


class OpaqueFrom:
    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, numbers: list[int]) -> Any:
        return torch.tensor(numbers) if numbers[0] < self.first else Opaque(numbers)


def _counted_passes(opaque_from: int) -> int:
    lockstep.init(timeout=60)
    loader = lockstep.shard(DataLoader(CountsPasses(), batch_size=4, collate_fn=OpaqueFrom(opaque_from)))
    return sum(len([*loader]) for _ in range(3))


def test_a_rank_that_would_go_on_with_another_pass_says_so() -> None:
    assert run_ranks(_counted_passes, 2, 1000) == [30, 30], "one reads, and counts"
    _, other = collect_outcomes(_counted_passes, 2, 320)
    assert other.error == "LockstepError"
    assert "rank 1: every rank reads the stream from batch 5 of this pass on" in str(other.message)
    assert "Give it a method set_epoch(epoch)" in str(other.message)


class ToldItsPass(CountsPasses):
    """Begins with another number in each epoch, by what it is told; nobody's count of passes leads there."""

    def set_epoch(self, epoch: int) -> None:
        self.passes = 2 * epoch


def _told_passes(opaque_from: int) -> int:
    lockstep.init(timeout=60)
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "collate_fn": OpaqueFrom(opaque_from)}
    loader = lockstep.shard(DataLoader(ToldItsPass(), batch_size=4, **options))
    return sum(len([*loader]) for _ in range(3))


def test_a_rank_goes_on_with_the_pass_that_its_dataset_was_told() -> None:
    assert run_ranks(_told_passes, 2, 320) == [30, 30]


class OfOneRank(IterableDataset[int]):
    """A stream that was told which part is its own."""

    def __init__(self, rank: int, ranks: int, length: int) -> None:
        self._numbers = range(rank, length, ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)


def _split(length: int, workers: int, drop_last: bool) -> int:
    world = lockstep.init(timeout=60)
    stream = OfOneRank(world.rank, world.world_size, length)
    return len([*lockstep.shard(DataLoader(stream, batch_size=4, num_workers=workers, drop_last=drop_last))])


@pytest.mark.parametrize(("length", "workers"), [(40, 0), (40, 1), (1, 0)])
def test_a_stream_of_one_rank_is_refused_on_every_rank(length: int, workers: int) -> None:
    for outcome in collect_outcomes(_split, 2, length, workers, False):
        assert outcome.error == "LockstepError"
        assert "the ranks read different streams" in str(outcome.message)


def _given_back() -> tuple[int, int, int]:
    """How much shared memory is mapped or open, before, while batches are held, and after it all."""
    lockstep.init("gloo", timeout=60)
    loader = lockstep.shard(DataLoader(Counting(80), batch_size=4, num_workers=1))
    before = _memory_now()
    kept = [*loader]
    held = _memory_now()
    for _ in loader:
        break
    del kept, _
    gc.collect()
    assert not [*local_ranks._lines]
    return before, held, _memory_now()


def _memory_now() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:lockstep")
        except FileNotFoundError:  # the listing's own
            continue
    with open("/proc/self/maps") as maps:
        return found + sum("memfd:lockstep" in line for line in maps)


def test_memory_and_descriptors_are_given_back() -> None:
    leader, other = run_ranks(_given_back, 2)
    assert leader[0] == leader[1] == leader[2]
    assert other[1] == other[0] + 20, "a mapping for each batch that is kept, and no descriptor"
    assert other[2] == other[0]
