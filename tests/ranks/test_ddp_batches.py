"""Ranks in different batches are found in the first backward that mixes them; loops that rightly differ are not."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.backends import EACH_BACKEND, OVER_BOTH
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.ddp_cases import differentiate, mlp, replicate_tiny

pytestmark = EACH_BACKEND


def _loader(samples: int = 24, batch_size: int = 4, **options: Any) -> lockstep.ShardedLoader:
    data = TensorDataset(torch.linspace(-1, 1, 5 * samples, dtype=torch.float64).view(samples, 5))
    return lockstep.shard(DataLoader(data, batch_size=batch_size), **options)


def _train(model: nn.Module, inputs: Tensor) -> None:
    model.zero_grad()
    differentiate(model(inputs).square().mean())


def _takes_other_batches(how: str, way: str) -> None:
    w = lockstep.init(timeout=20)
    dtype = torch.bfloat16 if way == "bfloat16" else torch.float64
    model = replicate_tiny(mlp()) if way == "buckets" else lockstep.replicate(mlp(dtype))
    if way == "hooked":
        lockstep.register_comm_hook(model, None, lockstep.bf16_compress_hook)
    loader, odd = _loader(), w.rank == 1
    for epoch in range(2):
        batches: Iterator[Any] = iter(loader)
        for number, (inputs,) in enumerate(batches):
            here = odd and epoch == 0 and number == 3
            if here and how == "break":
                break
            if here and how == "skips":
                continue
            if here and how == "repeats":
                _train(model, inputs.to(dtype))
            if here and how == "catches":
                try:
                    raise ValueError("a bad sample")
                except ValueError:
                    break
            _train(model, inputs.to(dtype))
    for _ in range(12):  # so that the totals would be equal: what follows is trained without a loader
        _train(model, torch.ones(2, 5, dtype=dtype))
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("way", ["plain", "buckets", "hooked", "bfloat16"])
@pytest.mark.parametrize("how", ["break", "skips", "repeats", "catches"])
@OVER_BOTH
def test_a_rank_in_another_batch_is_found_at_once(how: str, way: str) -> None:
    for rank, outcome in enumerate(collect_outcomes(_takes_other_batches, 2, how, way)):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        message = str(outcome.message)
        # (Repeated: the backward after the one that was twice of batch 3.)
        theirs = {"break": "epoch 1, batch 0", "catches": "epoch 1, batch 0", "skips": "epoch 0, batch 4"}
        expected = (
            "rank 0: epoch 0, batch 4; rank 1: epoch 0, batch 3"
            if how == "repeats"
            else f"rank 0: epoch 0, batch 3; rank 1: {theirs[how]}"
        )
        assert re.match(
            rf"rank {rank} of 2, step [45]: the ranks averaged the gradients of different batches: ", message
        )
        assert expected in message
        assert "`if world.any(stop): break`" in message


def _leaves_for_good() -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    for number, (inputs,) in enumerate(_loader()):
        if w.rank == 0 and number == 2:
            break
        _train(model, inputs)
    for _ in range(8 if w.rank == 0 else 4):
        _train(model, torch.ones(2, 5, dtype=torch.float64))


@OVER_BOTH
def test_a_rank_that_has_left_the_loop_for_a_phase_without_a_loader_is_found() -> None:
    for outcome in collect_outcomes(_leaves_for_good, 2):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert "rank 0: no batch in hand; rank 1: epoch 0, batch 2" in str(outcome.message)


def _one_of_two_loaders() -> None:
    w = lockstep.init(timeout=20)
    model, first, second = lockstep.replicate(mlp()), _loader(), _loader()
    pair = (first, second) if w.rank == 0 else (second, first)
    for loader in pair:
        for (inputs,) in loader:
            _train(model, inputs)


def test_the_batches_of_different_loaders_are_told_apart() -> None:
    for outcome in collect_outcomes(_one_of_two_loaders, 2):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        expected = "rank 0: epoch 0, batch 0 of sharded loader 0; rank 1: epoch 0, batch 0 of sharded loader 1"
        assert expected in str(outcome.message)


def _side_by_side(odd: str, one_backward: bool, weighs: bool) -> None:
    """Labelled batches and others in each step; rank 1 skips one of ``odd``, or takes one twice."""
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    unlabelled, labelled = _loader(), _loader()  # the second is the one with the higher number
    others = iter(unlabelled)
    for number, (inputs,) in enumerate(labelled):
        here = w.rank == 1 and number == 3
        if here and odd == "labelled":
            continue
        if here and odd == "unlabelled":
            next(others)
        (more,) = next(others)
        model.zero_grad()
        if weighs:
            w.weigh(len(inputs))
        if one_backward:
            differentiate(model(inputs).square().mean() + model(more).square().mean())
        else:
            differentiate(model(torch.cat([inputs, more])).square().mean())
            differentiate(model(more).square().mean())
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("one_backward", [False, True])
@pytest.mark.parametrize("odd", ["labelled", "unlabelled"])
@OVER_BOTH
def test_batches_of_loaders_side_by_side_are_all_compared(odd: str, one_backward: bool, weighs: bool) -> None:
    theirs = {"labelled": (3, 4), "unlabelled": (4, 3)}[odd]
    for outcome in collect_outcomes(_side_by_side, 2, odd, one_backward, weighs):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert (
            "rank 0: epoch 0, batch 3 of sharded loader 0 and epoch 0, batch 3 of sharded loader 1; "
            f"rank 1: epoch 0, batch {theirs[0]} of sharded loader 0 and epoch 0, batch {theirs[1]} of sharded loader 1"
        ) in str(outcome.message)


def _of_a_list(odd: str) -> None:
    w = lockstep.init(timeout=20)
    model = lockstep.replicate(mlp())
    batches = list(_loader())
    for number, (inputs,) in enumerate(reversed(batches) if odd == "order" and w.rank == 1 else batches):
        if odd == "skips" and w.rank == 1 and number == 2:
            continue
        _train(model, inputs)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("odd", ["skips", "order"])
@OVER_BOTH
def test_batches_of_a_list_are_compared(odd: str) -> None:
    words = {
        "skips": "rank 0: epoch 0, batch 2; rank 1: epoch 0, batch 3",
        "order": "rank 0: epoch 0, batch 0; rank 1: epoch 0, batch 5",
    }
    for outcome in collect_outcomes(_of_a_list, 2, odd):
        assert outcome.error == "CollectiveMismatch", outcome.traceback
        assert words[odd] in str(outcome.message)


class _Ahead:
    """Fetches in a thread, and gets as far as it gets."""

    def __init__(self, loader: Any, depth: int) -> None:
        self._loader, self._depth = loader, depth

    def __iter__(self) -> Iterator[Any]:
        queue: Queue[Any] = Queue(self._depth)

        def fetch() -> None:
            for each in self._loader:
                queue.put(each)
            queue.put(None)

        thread = threading.Thread(target=fetch)
        thread.start()
        while (each := queue.get()) is not None:
            yield each
        thread.join()


def _rightly_so() -> None:
    w = lockstep.init(timeout=20)

    def fresh() -> nn.Module:
        return lockstep.replicate(mlp())

    # An evaluation on one rank alone, with a loader of its own, in the midst of the training loop.
    model, loader, validation = fresh(), _loader(), _loader(8)
    for number, (inputs,) in enumerate(loader):
        if w.rank == 1 and number == 2:
            model.eval()
            with torch.no_grad():
                for (others,) in validation:
                    model(others)
            model.train()
        _train(model, inputs)

    # Two loaders side by side, the shorter one begun anew when it ends.
    model, others = fresh(), _loader(8)
    again = iter(others)
    for (inputs,) in loader:
        pair = next(again, None)
        if pair is None:
            again = iter(others)
            pair = next(again)
        _train(model, torch.cat([inputs, pair[0]]))
    for (inputs,), (more,) in zip(_loader(), _loader(), strict=True):
        model.zero_grad()
        differentiate(model(inputs).square().mean() + model(more).square().mean())

    # Two models, trained in turn with one batch, as adversaries are; one of them twice.
    model, other = fresh(), fresh()
    for (inputs,) in loader:
        _train(model, inputs)
        _train(model, inputs)
        _train(other, model(inputs).detach()[:, :1].expand(-1, 5).contiguous())

    # Fetched ahead: one batch in this thread, and several in another one, further on one rank than on the other.
    model, batches = fresh(), iter(_loader())
    following = next(batches, None)
    while following is not None:
        (inputs,), following = following, next(batches, None)
        _train(model, inputs)
    for (inputs,) in _Ahead(_loader(), depth=1 + 4 * w.rank):
        _train(model, inputs)

    # Accumulation, of more batches on one rank than on the other within the loader's batch.
    model = fresh()
    for (inputs,) in loader:
        model.zero_grad()
        with lockstep.no_sync(model):
            for _ in range(1 + w.rank):
                differentiate(model(inputs).square().mean())
        differentiate(model(inputs).square().mean())

    # No loader of ours, and an iterator that one rank alone has looked into and closed.
    model = fresh()
    for number in range(4):
        if w.rank == 0 and number == 1:
            shown = iter(validation)
            next(shown)
            del shown
        _train(model, torch.ones(2, 5, dtype=torch.float64))

    # One rank alone looks into another loader now and then, and keeps the iterator; in one loop begun anew, too.
    model = fresh()
    shown = iter(_loader(96))
    for _ in range(2):
        for number, (inputs,) in enumerate(loader):
            _train(model, inputs)
            if w.rank == 0 and number % 2:
                next(shown)
    del shown

    # A list of batches, of which one rank gives the model what it has made of them, the other the loader's own.
    model = fresh()
    for number, (inputs,) in enumerate(list(_loader())):
        _train(model, inputs if number % 2 == w.rank else inputs * 2)

    # In slices, of which the ranks have different numbers.
    model, sliced = fresh(), _loader(slices=3)
    for step in sliced.steps():
        for (inputs,) in step:
            differentiate(model(inputs).square().mean())
        model.zero_grad()

    # Unequal numbers of batches inside join.
    model = fresh()
    with lockstep.join(model):
        for number, (inputs,) in enumerate(loader):
            if w.rank == 1 and number == 3:
                break
            _train(model, inputs)

    # Ranks that train apart between rounds.
    model = lockstep.replicate(mlp(), sync=lockstep.LocalSteps(every=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (inputs,) in enumerate(loader):
        if w.rank == 1 and number == 5:
            break
        _train(model, inputs)
        optimizer.step()
    lockstep.finish_round(model)


@OVER_BOTH
def test_loops_that_rightly_differ_are_left_alone() -> None:
    run_ranks(_rightly_so, 2)


def _of_several_loaders() -> None:
    w = lockstep.init(timeout=20)
    chance = random.Random(w.rank)

    def augmented(inputs: Tensor) -> Tensor:
        """As a random flip gives it back: the same tensor, or another, as each rank draws."""
        return inputs if chance.random() < 0.5 else inputs.flip(1)

    # Beside a loader whose batches are kept after its end; and of one that was kept, with random augmentation.
    model = lockstep.replicate(mlp())
    for (inputs,), (more,) in zip(_loader(40), itertools.cycle(_loader(12)), strict=False):
        _train(model, torch.cat([inputs, more]))
    kept = itertools.cycle(_loader(12))
    for _ in range(12):
        _train(model, augmented(next(kept)[0]))

    # One batch ahead, with random augmentation, over several epochs; and one batch over and over again.
    for _ in range(2):
        batches = iter(_loader())
        following = next(batches, None)
        while following is not None:
            (inputs,), following = following, next(batches, None)
            _train(model, augmented(inputs))
    (inputs,) = next(iter(_loader()))
    for _ in range(6):
        _train(model, augmented(inputs))

    # A batch that one rank keeps for a picture.
    picture = None
    for _ in range(2):
        for number, (inputs,) in enumerate(_loader()):
            picture = inputs if w.rank == 0 and number == 2 else picture
            _train(model, inputs)
    for _ in range(3):
        _train(model, torch.ones(2, 5, dtype=torch.float64))
    del picture

    # A teacher without gradients on a loader that is begun anew; adversaries; a loader in every other step; a break.
    unlabelled = _loader(48)
    others = iter(unlabelled)
    for _ in range(3):
        for (inputs,) in _loader(20):
            pair = next(others, None)
            if pair is None:
                others = iter(unlabelled)
                pair = next(others)
            with torch.no_grad():
                taught = model(pair[0])
            model.zero_grad()
            differentiate(model(inputs).square().mean() + (model(pair[0]) - taught).square().mean())
    critic = lockstep.replicate(mlp())
    for (inputs,), (noise,) in zip(_loader(), _loader(), strict=True):
        critic.zero_grad()
        differentiate(critic(inputs).mean() - critic(noise).mean())
        _train(model, noise)
    others = iter(_loader(48))
    for number, (inputs,) in enumerate(_loader(48)):
        _train(model, torch.cat([inputs, next(others)[0]]) if number % 2 else inputs)
    for number, ((inputs,), (more,)) in enumerate(zip(_loader(), _loader(), strict=True)):
        if number == 3:
            break
        _train(model, inputs + more)
    for (inputs,) in _loader():
        _train(model, inputs)


@OVER_BOTH
def test_loops_over_several_loaders_and_kept_batches_are_left_alone() -> None:
    run_ranks(_of_several_loaders, 2)
