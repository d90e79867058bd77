"""Steps in slices: several passes over one, gradients that are cleared inside of them, small last batches."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import lockstep
from tests.backends import EACH_BACKEND
from tests.harness import collect_outcomes, run_ranks
from tests.ranks.test_slices import Net, Stream, build, digest, samples
from tests.selection import each_value

pytestmark = EACH_BACKEND


# Gradients that are cleared in slices --------------------------------------------------------------------------------


def _to_none(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


def _in_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.zero_()


CLEARING: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _: model.zero_grad(),
    "None": _to_none,
    "zero_": _in_data,
}


def _trains(clears: str, where: str, slices: int = 4) -> list[Any]:
    world = lockstep.init(timeout=20)
    net = build()
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    clear = CLEARING[clears]
    loader = lockstep.shard(DataLoader(samples(), 40, shuffle=True), slices=slices)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            for step in loader.steps():
                for number, (x, y) in enumerate(step):
                    if where == "first":
                        clear(net, optimizer)
                    out = model(x)
                    if where == "readme":  # after the loss, before the backward
                        clear(net, optimizer)
                    if where == "one rank" and world.rank == world.world_size - 1 and number == 0:
                        clear(net, optimizer)
                    cross_entropy(out, y).backward()
                optimizer.step()
                if where == "after":
                    clear(net, optimizer)
    return [digest(net.state_dict(), optimizer.state_dict())]


@each_value(clears=tuple(CLEARING), where=("readme", "first"))
def test_gradients_cleared_inside_the_loop_are_those_of_before_the_step(clears: str, where: str) -> None:
    expected = run_ranks(_trains, 1, clears, "after")
    assert run_ranks(_trains, 1, clears, where) == expected
    assert run_ranks(_trains, 3, clears, where) == expected * 3


def test_what_one_rank_has_cleared_is_cleared_on_all() -> None:
    expected = run_ranks(_trains, 1, "optimizer", "after")
    assert run_ranks(_trains, 2, "optimizer", "one rank") == expected * 2
    assert run_ranks(_trains, 3, "in place", "one rank") == expected * 3


def test_a_rank_without_slices_clears_what_the_others_do() -> None:
    for clears in ("optimizer", "in place"):  # (zeros in place of no gradient go on with the momentum)
        expected = run_ranks(_trains, 1, clears, "after", 2)
        assert run_ranks(_trains, 4, clears, "readme", 2) == expected * 4


class Penalised(nn.Module):
    """With a parameter that a loss has outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.own = nn.Linear(10, 5), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _accumulates(clears: bool) -> list[str]:
    """Add up two steps' gradients, and then clear them; one parameter has a backward of its own."""
    lockstep.init(timeout=20)
    net: Any = build(Penalised)
    model = lockstep.replicate(net)
    loader = lockstep.shard(DataLoader(samples(), 20), slices=4)
    seen = []
    for step in loader.steps():
        for number, (x, y) in enumerate(step):
            if clears and step.number % 2 == 0 and number == 0:
                net.zero_grad()
            cross_entropy(model(x), y).backward()
            net.own.square().sum().backward()
        seen.append(digest([param.grad for param in net.parameters()]))
        if step.number % 2 and not clears:
            net.zero_grad()
    return seen


def test_gradients_that_no_slice_clears_are_added_to() -> None:
    expected = run_ranks(_accumulates, 1, False)
    for world_size in (1, 2, 3):
        assert run_ranks(_accumulates, world_size, True) == expected * world_size
        assert run_ranks(_accumulates, world_size, False) == expected * world_size


def _throws_away(to_none: bool) -> list[str]:
    world = lockstep.init(timeout=20)
    model = lockstep.replicate(build())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in lockstep.shard(DataLoader(samples(), 40), slices=4).steps():
            for x, y in step:
                cross_entropy(model(x), y).backward()
                model.zero_grad(set_to_none=to_none)
    return [str(each.message) for each in caught] if world.is_main else []


@pytest.mark.parametrize(
    ("to_none", "words"), [(True, "none of its gradients is left"), (False, "all its gradients are zero")]
)
def test_what_is_cleared_after_each_backward_is_told_of_once(to_none: bool, words: str) -> None:
    (told,) = run_ranks(_throws_away, 2, to_none)[0]
    assert f"{words}: zero_grad() after backward() inside the inner loop discards" in told


# Several passes over a step ------------------------------------------------------------------------------------------


class Player(nn.Module):
    """With dropout and batch norm."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(wide, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, out)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


def _plays(slices: int) -> list[Any]:
    """A GAN: its two players each have a pass over the step, and an optimizer."""
    lockstep.init(timeout=20)
    torch.manual_seed(3)
    maker, judge = lockstep.replicate(Player(4, 10)), lockstep.replicate(Player(10, 1))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (maker, judge)]
    loss = nn.functional.softplus
    losses = []
    for step in lockstep.shard(DataLoader(samples(), 40, shuffle=True), slices=slices).steps():
        for x, _ in step:
            optimizers[1].zero_grad()
            with torch.no_grad():
                made = maker(torch.randn(len(x), 4))
            lost = loss(-judge(x)).mean() + loss(judge(made)).mean()
            step.add_loss(lost)
            lost.backward()
        optimizers[1].step()
        losses.append(step.loss)
        for x, _ in step:
            optimizers[0].zero_grad()
            lost = loss(-judge(maker(torch.randn(len(x), 4)))).mean()
            step.add_loss(lost)
            lost.backward()
        optimizers[0].step()
        losses.append(step.loss)
    count: Any = maker.net[1].num_batches_tracked
    return [
        digest(maker.state_dict(), judge.state_dict(), [each.state_dict() for each in optimizers]),
        losses,
        int(count),
    ]


def test_two_players_each_have_a_pass() -> None:
    (expected,) = run_ranks(_plays, 1, 4)
    assert expected[2] == 2 * 3
    for world_size in (2, 3, 4):
        assert run_ranks(_plays, world_size, 4) == [expected] * world_size


def _takes_two_steps_alone() -> list[Tensor]:
    """The same in plain torch, on one process: each pass goes through the slices of the batch, one after the other."""
    torch.manual_seed(1)
    net = nn.Linear(10, 5).double()
    optimizer, again = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    for begin in range(0, 107, 40):
        x, y = samples()[begin : begin + 40]
        for each in (optimizer, again):
            each.zero_grad()
            cross_entropy(net(x.double()), y).backward()
            each.step()
    return [param.detach() for param in net.parameters()]


def _takes_two_steps() -> list[list[float]]:
    lockstep.init(timeout=20)
    torch.manual_seed(1)
    net = lockstep.replicate(nn.Linear(10, 5).double())
    optimizer, again = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    for step in lockstep.shard(DataLoader(samples(), 40), slices=4).steps():
        for each in (optimizer, again):
            each.zero_grad()
            for x, y in step:
                cross_entropy(net(x.double()), y).backward()
            each.step()
    expected = _takes_two_steps_alone()
    assert all(
        torch.allclose(one, two, rtol=1e-12, atol=1e-12) for one, two in zip(net.parameters(), expected, strict=True)
    )
    return [param.detach().flatten().tolist() for param in net.parameters()]


def test_each_pass_has_an_exact_mean() -> None:
    (expected,) = run_ranks(_takes_two_steps, 1)
    for world_size in (2, 3):
        assert run_ranks(_takes_two_steps, world_size) == [expected] * world_size


def _sharpness_aware() -> list[Any]:
    lockstep.init(timeout=20)
    net = build()
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in lockstep.shard(DataLoader(samples(), 40, shuffle=True), slices=6).steps():
        for x, y in step:
            cross_entropy(model(x), y).backward()
        kept = [param.detach().clone() for param in net.parameters()]
        norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
        with torch.no_grad():
            for param in net.parameters():
                if param.grad is not None:
                    param.add_(param.grad, alpha=0.05 / float(norm))
        optimizer.zero_grad()
        for x, y in step:
            cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for param, before in zip(net.parameters(), kept, strict=True):
                param.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
    return [digest(net.state_dict(), optimizer.state_dict())]


def test_sharpness_aware_minimisation() -> None:
    (expected,) = run_ranks(_sharpness_aware, 1)
    for world_size in (2, 3, 4):
        assert run_ranks(_sharpness_aware, world_size) == [expected] * world_size


def _searches_lines() -> list[Any]:
    lockstep.init(timeout=20)
    torch.manual_seed(1)
    net: Any = nn.Sequential(nn.Linear(10, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    alone = copy.deepcopy(net)
    model = lockstep.replicate(net)
    optimizer: Any = torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    calls = 0
    for step in lockstep.shard(DataLoader(samples(), 107), slices=6).steps():

        def closure(step: lockstep.Step = step) -> float:
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            for x, y in step:
                loss = cross_entropy(model(x.double()), y)
                step.add_loss(loss)
                loss.backward()
            return step.loss

        optimizer.step(closure)
    own: Any = torch.optim.LBFGS(alone.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    x, y = samples()[:]

    def whole() -> Tensor:
        own.zero_grad()
        loss = cross_entropy(alone(x.double()), y)
        loss.backward()
        return loss

    own.step(whole)
    same = all(torch.allclose(*pair, rtol=1e-8) for pair in zip(net.parameters(), alone.parameters(), strict=True))
    return [digest(net.state_dict()), calls, same]


def test_a_closure_goes_through_the_step_each_time() -> None:
    (expected,) = run_ranks(_searches_lines, 1)
    assert expected[1] > 5
    assert expected[2]
    for world_size in (2, 3, 4):
        assert run_ranks(_searches_lines, world_size) == [expected] * world_size


def _draws() -> list[list[float]]:
    """What each pass draws in each slice."""
    world = lockstep.init(timeout=20)
    seen = []
    for step in lockstep.shard(DataLoader(samples(8), 8), slices=4).steps():
        seen = [[float(torch.rand(())) for _ in step] for _ in range(3)]
    between = float(torch.rand(()))
    return [*seen, [between, world.rank]]


def test_each_pass_draws_its_own_numbers() -> None:
    (alone,) = run_ranks(_draws, 1)
    assert len({number for numbers in alone[:3] for number in numbers}) == 12
    ranks = run_ranks(_draws, 2)
    for number in range(3):
        assert [*ranks[0][number], *ranks[1][number]] == alone[number]
    assert ranks[0][3][0] == ranks[1][3][0] == alone[3][0]


def _comes_late() -> None:
    """A backward in one pass, of a forward in another."""
    lockstep.init(timeout=20)
    model = lockstep.replicate(build())
    for step in lockstep.shard(DataLoader(samples(), 40), slices=4).steps():
        losses = [model(x).sum() for x, _ in step]
        for loss, _ in zip(losses, step, strict=False):
            loss.backward()


def _adds_some() -> None:
    world = lockstep.init(timeout=20)
    for step in lockstep.shard(DataLoader(samples(), 40), slices=4).steps():
        for _ in step:
            if world.rank == 0:
                step.add_loss(1.0)


def _asks_too_early() -> None:
    lockstep.init(timeout=20)
    for step in lockstep.shard(DataLoader(samples(), 40), slices=4).steps():
        print(step.loss)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (_comes_late, "comes through a forward of another slice"),
        (_adds_some, "add_loss() was called in slices [0, 1] and not in [2, 3]"),
        (_asks_too_early, "there is no loss of this step"),
    ],
)
def test_mistakes_with_passes_are_named_on_all_ranks(mistake: Callable[[], None], words: str) -> None:
    for outcome in collect_outcomes(mistake, 2):
        assert outcome.message is not None
        assert words in outcome.message, outcome


# Small last batches --------------------------------------------------------------------------------------------------


def _ends_small(count: int, workers: int, epochs: int = 1) -> list[Any]:
    lockstep.init(timeout=20)
    net = build()
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = lockstep.shard(DataLoader(samples(count), 40, num_workers=workers), slices=8)
        for _ in range(epochs):
            for step in loader.steps():
                seen = []
                for x, y in step:
                    seen.append(len(x))
                    cross_entropy(model(x), y).backward()
                sizes.append(seen)
                optimizer.step()
                optimizer.zero_grad()
    return [digest(net.state_dict()), sizes]


@pytest.mark.parametrize(
    ("left", "sizes"),
    [
        (15, [3, 2, 2, 2, 2, 2, 2]),
        pytest.param(9, [3, 2, 2, 2], marks=pytest.mark.campaign),
        pytest.param(3, [3], marks=pytest.mark.campaign),
        (2, [2]),
    ],
)
def test_a_small_last_batch_has_fewer_slices_on_any_number_of_ranks(left: int, sizes: list[int]) -> None:
    (alone,) = run_ranks(_ends_small, 1, 40 + left, 0)
    assert alone[1] == [[5] * 8, sizes]
    for world_size in (2, 3):
        ranks = run_ranks(_ends_small, world_size, 40 + left, world_size - 2)
        assert [bits for bits, _ in ranks] == [alone[0]] * world_size
        assert [size for _, seen in ranks for size in seen[1]] == sizes


def test_the_slices_of_a_small_last_batch_are_spread_over_the_ranks() -> None:
    ranks = run_ranks(_ends_small, 4, 48, 0)
    assert [seen[1] for _, seen in ranks] == [[2]] * 4


def _streams() -> str:
    lockstep.init(timeout=20)
    model = lockstep.replicate(build(lambda: nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4))))
    for step in lockstep.shard(DataLoader(Stream(), 40), slices=8).steps():  # 45 samples
        for x in step:
            model(x).square().mean().backward()
    return digest([param.grad for param in model.parameters()], model.state_dict())


def test_a_stream_ends_with_fewer_slices() -> None:
    expected = run_ranks(_streams, 1)
    assert run_ranks(_streams, 3) == expected * 3


def _is_warned(count: int, slices: int, batch: int, make: Callable[[], nn.Module]) -> list[str]:
    lockstep.init(timeout=20)
    model = lockstep.replicate(build(make))
    loader = lockstep.shard(DataLoader(samples(count), batch), slices=slices)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in loader.steps():
            if step.number == 0:
                for x, _ in step:
                    model(x.repeat(2, 1)).sum().backward()
            else:
                for _ in step:
                    pass
    return [str(each.message) for each in caught]


def _plain() -> nn.Module:
    return nn.Linear(10, 4)


@pytest.mark.parametrize(
    ("count", "slices", "batch", "make", "words"),
    [
        (41, 8, 40, Net, "1 sample"),  # a last batch of one
        (40, 8, 8, Net, "1 sample"),  # slices of one
        (43, 8, 40, Net, None),
        (41, 8, 40, _plain, None),
    ],
)
def test_a_batch_norm_that_will_meet_one_sample_is_told_of_at_once(
    count: int, slices: int, batch: int, make: Callable[[], nn.Module], words: str | None
) -> None:
    told, others = run_ranks(_is_warned, 2, count, slices, batch, make)
    assert others == []
    assert len(told) == (words is not None)
    assert all("batch norm" in text and str(words) in text for text in told)
