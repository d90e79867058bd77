"""Random numbers: the same on every rank outside of a step, each rank's own where a model computes."""

from __future__ import annotations

import random
import threading
from contextlib import nullcontext
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torch.utils.flop_counter import FlopCounterMode

import lockstep
from lockstep.comm.exchange import all_gather_records
from lockstep.step import streams
from tests.harness import run_ranks
from tests.ranks.ddp_cases import differentiate


class Masked(nn.Module):
    """Its output is its weight where the mask is 1, times 2: so is the gradient of the output's sum, with weight 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.sum() < 0:
            raise ValueError("negative")
        return cast(torch.Tensor, self.drop(inputs * self.weight))


class Noisy(Dataset[float]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> float:
        return index + torch.rand(()).item()


def _loader(length: int = 10, batch_size: int = 4) -> lockstep.ShardedLoader:
    return lockstep.shard(DataLoader(TensorDataset(torch.arange(length)), batch_size))


def _common() -> list[float]:
    """The next number of each generator."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def _splits() -> dict[str, Any]:
    from sklearn.model_selection import train_test_split  # here: all that collect tests would import it for seconds

    lockstep.init(seed=5)
    return {
        "random_split": random_split(range(20), [15, 5])[1].indices,  # type: ignore[arg-type]
        "train_test_split": train_test_split(list(range(20)), test_size=5)[1],
        "weights": nn.Linear(2, 1).weight.tolist(),
        "rest": _common(),
    }


def test_splits_and_weights_made_after_init_are_those_of_a_lone_process() -> None:
    alone = run_ranks(_splits, 1)[0]
    assert run_ranks(_splits, 3) == [alone] * 3


def _stretches() -> dict[str, Any]:
    """What each rank drew where, and what the common stream gave after it."""
    world = lockstep.init(seed=1)
    model = lockstep.replicate(Masked())
    ones = torch.ones(64)
    own: dict[str, Any] = {}
    common: dict[str, Any] = {"begin": _common()}

    own["loop"] = [torch.rand(()).item() for _ in _loader()]
    common["loop"] = _common()

    own["bare forward"] = [model(ones).tolist() for _ in range(2)]
    common["bare forward"] = _common()
    model.eval()
    if world.is_main:
        model(ones)  # on one rank alone: an evaluation
    model.train()
    common["evaluation on rank 0"] = _common()

    try:
        model(-ones)
    except ValueError:
        common["failed forward"] = _common()

    for _ in _loader():
        own["break"] = torch.rand(()).item()
        break
    common["break"] = _common()
    try:
        for _ in _loader():
            raise KeyError
    except KeyError:
        common["exception"] = _common()

    outer, inner = [], []
    for _ in _loader():
        outer.append(torch.rand(()).item())
        inner += [torch.rand(()).item() for _ in _loader()]
        outer.append(torch.rand(()).item())
        model(ones)
        outer.append(torch.rand(()).item())
    own["nested"] = outer + inner
    common["nested"] = _common()
    own["zip"] = [torch.rand(()).item() for _ in zip(_loader(), _loader(16), strict=False)]
    common["zip"] = _common()

    held = iter(_loader())
    next(held)
    own["held"] = torch.rand(()).item()
    del held
    common["held"] = _common()

    ahead = iter(_loader())
    thread = threading.Thread(target=lambda: list(ahead))
    thread.start()
    thread.join()
    common["read in a thread"] = _common()

    unseeded = lockstep.shard(DataLoader(Noisy(), 5), seed_samples=False)
    own["unseeded samples"] = [value % 1 for batch in unseeded for value in batch.tolist()]
    common["unseeded samples"] = _common()

    torch.manual_seed(9)  # as scripts do, the same on every rank
    own["after a seed"] = model(ones).tolist()
    common["after a seed"] = _common()
    torch.manual_seed(9)
    own["after the same seed"] = model(ones).tolist()
    state = torch.get_rng_state()
    own["before a state"] = model(ones).tolist()
    torch.set_rng_state(state)
    own["after the same state"] = model(ones).tolist()

    compiled = torch.compile(model, backend="aot_eager")
    own["compiled"] = compiled(ones).tolist()
    common["compiled"] = _common()
    return {"own": own, "common": common}


def test_a_rank_leaves_the_common_stream_in_its_steps_and_comes_back() -> None:
    ranks = run_ranks(_stretches, 3)
    assert [rank["common"] for rank in ranks] == [ranks[0]["common"]] * 3
    assert len({str(numbers) for numbers in ranks[0]["common"].values()}) == len(ranks[0]["common"])
    for name, drawn in ranks[0]["own"].items():
        assert drawn != ranks[1]["own"][name], f"{name}: each rank draws its own"
    for rank in ranks:
        own = rank["own"]
        for several in ("loop", "nested", "zip", "unseeded samples"):
            assert len(set(own[several])) == len(own[several]), several
        assert own["bare forward"][0] != own["bare forward"][1]
        assert own["after a seed"] == own["after the same seed"] != own["bare forward"][0]
        assert own["before a state"] == own["after the same state"]


def _alone() -> bool:
    lockstep.init(seed=1)
    model = lockstep.replicate(Masked())
    drawn = [model(torch.ones(64)).tolist(), *[torch.rand(()).item() for _ in _loader()], *_common()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    return drawn == [nn.Dropout(0.5)(torch.ones(64)).tolist(), *[torch.rand(()).item() for _ in range(3)], *_common()]


def test_a_world_of_one_draws_what_a_lone_process_draws() -> None:
    assert run_ranks(_alone, 1) == [True]


def _repeated(wrapped: bool) -> list[str]:
    """Forwards that backward repeats; those whose masks were other ones then."""
    lockstep.init(seed=2)
    bare = Masked()
    model = lockstep.DistributedDataParallel(bare) if wrapped else lockstep.replicate(bare)
    wrong = []

    def compare(what: str, reentrant: bool, part: nn.Module) -> None:
        inputs = torch.ones(64, requires_grad=True)
        bare.weight.grad = None
        with lockstep.no_sync(model):
            output: torch.Tensor = (
                checkpoint(model, inputs, use_reentrant=reentrant)
                if part is model
                else checkpoint(part, inputs * bare.weight, use_reentrant=reentrant)
            )
            torch.rand(3)  # what comes between
            output.sum().backward()
        if not torch.equal(bare.weight.grad, output.detach()):  # type: ignore[arg-type]
            wrong.append(f"{what}, {reentrant=}")

    for reentrant in (False, True):
        compare("whole", reentrant, model)
        compare("part", reentrant, bare.drop)
        for _ in _loader():
            compare("whole, in a loop", reentrant, model)
            compare("part, in a loop", reentrant, bare.drop)
    return wrong


def test_a_forward_that_backward_repeats_draws_the_same_masks() -> None:
    assert run_ranks(_repeated, 2, False) == [[], []]
    assert run_ranks(_repeated, 2, True) == [[], []]


class Recursive(nn.Module):
    """Calls itself, and notes after each inner call whether the rank's own stream is still on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.on: list[bool] = []

    def forward(self, inputs: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth == 0:
            return inputs * self.weight
        outputs: torch.Tensor = self(inputs, depth - 1)
        self.on.append(_is_on())
        try:
            self(torch.ones(3), 0)
        except RuntimeError:
            self.on.append(_is_on())
        return outputs


def _is_on() -> bool:
    return not torch.equal(torch.get_rng_state(), streams.current.state)


def _ends_of_stretches() -> list[str]:
    """What went wrong with calls within calls, and with forwards that could not begin."""
    lockstep.init(seed=3)
    wrong = []
    for make in (lockstep.replicate, lockstep.DistributedDataParallel):
        bare = Recursive()
        model = make(bare)
        for _ in range(2):
            model(torch.ones(2))
            if bare.on != [True] * 4 or _is_on():
                wrong.append(f"{make.__name__}, called within itself: {bare.on}, after it {_is_on()}")
            bare.on.clear()
        bare.frozen.requires_grad_()
        failing = mock.Mock(side_effect=ZeroDivisionError)
        for broken in ("lockstep.ddp.replica.compare_replicas", "lockstep.ddp.wrapper.to_device"):
            if broken.endswith("to_device"):
                if not isinstance(model, lockstep.DistributedDataParallel):
                    continue
                model.device_ids = [torch.device("cpu")]
            try:
                with mock.patch(broken, failing):
                    model(torch.ones(2))
                wrong.append(f"{make.__name__}: {broken} was not called")
            except ZeroDivisionError:
                if _is_on():
                    wrong.append(f"{make.__name__}: on after {broken} failed")
    return wrong


def test_the_outermost_call_ends_a_stretch_and_one_that_can_not_begin_opens_none() -> None:
    assert run_ranks(_ends_of_stretches, 2) == [[], []]


def _others_than_usual() -> list[str]:
    """What went wrong with the common stream in steps that not all ranks take alike."""
    world = lockstep.init(seed=4)
    wrong = []

    def look(after: str) -> None:
        numbers = all_gather_records(torch.rand(()).item(), world.group)
        if len({*numbers}) > 1:
            wrong.append(f"after {after}: {numbers}")

    model = lockstep.replicate(Masked())
    with pytest.raises(KeyboardInterrupt), mock.patch.object(model.drop, "forward", side_effect=KeyboardInterrupt):
        model(torch.ones(64))
    differentiate(model(torch.ones(64)).sum())
    look("an interrupt in a forward")
    with FlopCounterMode(display=False) if world.is_main else nullcontext():
        differentiate(model(torch.ones(64)).sum())
    look("a step that rank 0 counted the operations of")
    with FlopCounterMode(display=False):
        masks = all_gather_records(model(torch.ones(64)).tolist(), world.group)
    if masks[0] == masks[1]:
        wrong.append("under a mode that counts: the same masks on all ranks")
    with lockstep.join(model):
        for _ in range(2 + world.rank):
            differentiate(model(torch.ones(64)).sum())
    look("join")
    with pytest.raises(KeyboardInterrupt), mock.patch.object(model.drop, "forward", side_effect=KeyboardInterrupt):
        model(torch.ones(64))
    lockstep.release(model)
    look("an interrupt, and release")
    return wrong


def test_the_common_stream_stays_common_after_steps_that_ranks_do_not_take_alike() -> None:
    assert run_ranks(_others_than_usual, 2) == [[], []]
