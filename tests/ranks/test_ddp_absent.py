"""Parameters that a backward leaves out hold up no bucket, and their gradients are what one process has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.ddp.api import replica_of
from lockstep.ddp.reducer import Reducer
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

_LAYERS = 4
#: The heads that are used, by step and rank.
_Plan = Sequence[Sequence[Sequence[int]]]


class _Heads(nn.Module):
    """A body and two heads, of which one call uses those named; a re-entrant checkpoint around them if asked."""

    def __init__(self, *, nested: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(6, 6) for _ in range(_LAYERS)))
        self.heads = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))  # registered last: their buckets are the first
        self.nested = nested

    def forward(self, inputs: Tensor, used: Sequence[int]) -> Tensor:
        hidden: Tensor = self.body(inputs)
        for head in used:
            if self.nested:
                added = checkpoint(self.heads[head], hidden, use_reentrant=True)
            else:
                added = self.heads[head](hidden)
            hidden = hidden + added
        return hidden.sum(dim=1)


def _inputs(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def _train(plan: _Plan, nested: bool) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """Train with the heads of ``plan[step][rank]``; return (sent during backward, all buckets) by step, and weights."""
    world = lockstep.init(backend="gloo")
    torch.manual_seed(0)
    model = _Heads(nested=nested)
    lockstep.replicate(model, bucket_cap_mb=1e-6)  # a bucket for each parameter
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = []
    for step, used in enumerate(plan):
        share = _inputs(step).chunk(world.world_size)[world.rank].clone().requires_grad_()
        reducer = replica_of(model).reducer
        seen: list[int] = []

        def note(_: Tensor, seen: list[int] = seen, reducer: Reducer = reducer) -> None:
            assert reducer.backward is not None
            seen.append(reducer.backward.next)

        share.register_hook(note)  # the gradient of the input comes after those of all parameters
        optimizer.zero_grad()
        model(share, used[world.rank]).mean().backward()
        optimizer.step()
        counts.append((seen[-1], len(reducer.buckets)))
    return counts, [param.detach().flatten().tolist() for param in model.parameters()]


def _train_alone(plan: _Plan) -> list[Tensor]:
    torch.manual_seed(0)
    model = _Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, used in enumerate(plan):
        optimizer.zero_grad()
        parts = _inputs(step).chunk(len(used))
        outputs = [model(part, heads) for part, heads in zip(parts, used, strict=True)]
        torch.cat(outputs).mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def _compare(plan: _Plan, *, nested: bool = False) -> list[list[tuple[int, int]]]:
    """Train by two ranks and by one process; return how many buckets each rank sent during its backwards."""
    ranks = run_ranks(_train, 2, plan, nested)
    alone = _train_alone(plan)
    for _, weights in ranks:
        for mine, expected in zip(weights, alone, strict=True):
            torch.testing.assert_close(torch.tensor(mine), expected.flatten(), rtol=1e-5, atol=1e-6)
    return [counts for counts, _ in ranks]


def test_a_head_that_is_not_used_holds_up_nothing() -> None:
    first, second = _compare([[[0], [0]]] * 4)
    assert first == second
    buckets = first[0][1]
    assert [sent for sent, _ in first] == [0, buckets - 1, buckets - 1, buckets - 1], "the first step only learns"


def test_heads_that_take_turns_and_differ_by_rank() -> None:
    plan: _Plan = [
        [[0], [0]],
        [[1], [1]],
        [[0], [1]],
        [[0, 1], [1]],
        [[1], [0, 1]],
        [[], [0]],
        [[], []],
        [[0, 1], [0, 1]],
    ]
    first, second = _compare(plan)
    buckets = first[0][1]
    # Rank 0 leaves head 1 out in step 0 and head 0 in step 1; where nothing is used, no backward reaches an input.
    for sent in ([sent for sent, _ in counts] for counts in (first, second)):
        assert sent[:2] == [0, 2], "the first step only learns, and the second leaves out what it has not before"
        assert sent[2:] == [buckets - 1] * (len(plan) - 2)


def test_a_gradient_of_a_nested_backward_is_never_taken_for_absent() -> None:
    plan = [[[0], [0]], [[0], [0]], [[1], [1]], [[0, 1], [0, 1]], [[0], [1]], [[1], [0]]]
    first, second = _compare(plan, nested=True)
    assert first[3] == second[3], "what comes from a nested backward was waited for"
    assert first[3][0] == first[3][1] - 1
    # Its buckets come first, so the head that is left out may come yet, and holds up all but those of the other.
    assert [sent for sent, _ in first][4:] == [0, 2]
    assert [sent for sent, _ in second][4:] == [2, 0]


def test_a_gradient_that_comes_although_the_graph_did_not_reach_it_is_learned_of() -> None:
    """The first averaged backward has no nested one; a later one has, for a head that the one before left out."""
    outcomes = run_ranks(_turns_nested, 2)
    assert outcomes == [["", "more of its gradient after its bucket was sent"]] * 2


def _turns_nested() -> list[str]:
    lockstep.init(backend="gloo")
    torch.manual_seed(0)
    model = _Heads()
    lockstep.replicate(model, bucket_cap_mb=1e-6)
    said = []
    for nested, used in ((False, [0]), (True, [0, 1])):
        model.nested = nested
        model.zero_grad()
        try:
            model(_inputs(0).requires_grad_(), used).mean().backward()
            said.append("")
        except lockstep.LockstepError as error:
            words = "more of its gradient after its bucket was sent"
            said.append(words if words in str(error) else str(error))
    return said
