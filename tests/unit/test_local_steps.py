"""Rounds of local steps, as far as no ranks are needed: compression, options, agreements, the layout of own states."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs
from torch.nn import Parameter

import lockstep
from lockstep.checkpoint.plan import StateLayout, plan_writes
from lockstep.ddp.compression import BLOCK, decode, encode
from lockstep.ddp.options import ReplicaOptions
from lockstep.job.stop import Action, Agreement, StoreBoard


def _rows(*scales: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randn(len(scales), BLOCK, generator=generator) * torch.tensor(scales)[:, None]
    return blocks.view(2, -1)


def test_a_value_is_sent_as_one_byte_and_comes_within_half_a_step_of_its_block() -> None:
    rows = _rows(1.0, 1e-6, 300.0, 0.0)
    sent = encode(rows, "int8")
    assert (sent.dtype, tuple(sent.shape)) == (torch.uint8, (2, 2 * (BLOCK + 4)))
    assert sent.nbytes < 0.26 * rows.nbytes
    blocks, found = rows.view(-1, BLOCK), decode(sent, "int8").view(-1, BLOCK)
    steps = blocks.abs().amax(dim=1, keepdim=True) / 127
    assert ((found - blocks).abs() <= 0.5001 * steps).all()
    assert torch.equal(decode(encode(rows, "int8"), "int8"), decode(sent, "int8")), "the same bytes each time"


@pytest.mark.parametrize("smallest", [1e-45, 1e-40, 0.0])
def test_blocks_of_next_to_nothing_stay_finite(smallest: float) -> None:
    rows = torch.full((1, BLOCK), smallest)
    assert (decode(encode(rows, "int8"), "int8") - rows).abs().max() <= 1e-38


def test_without_compression_every_bit_comes() -> None:
    rows = _rows(1.0, 1e-30, 1e30, 0.0)
    assert torch.equal(decode(encode(rows, None), None), rows)
    assert encode(rows, None).shape[1] == 4 * rows.shape[1]


def test_what_is_rounded_away_arrives_in_later_rounds() -> None:
    values = torch.full((1, BLOCK), 0.001)
    values[0, 0] = 1.0  # beside it a thousandth is less than half a step
    assert decode(encode(values, "int8"), "int8")[0, 1] == 0
    arrived, error = torch.zeros_like(values), torch.zeros_like(values)
    for _ in range(200):
        sent = decode(encode(values + error, "int8"), "int8")
        error = values + error - sent
        arrived += sent
    assert (arrived - 200 * values).abs().max() < 0.02, "one round's rounding, not two hundred"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"every": 0}, ValueError, "at least one step"),
        ({"every": 2.0}, TypeError, "a number of steps"),
        ({"every": True}, TypeError, "a number of steps"),
        ({"outer": 0.7}, TypeError, "makes an optimizer"),
        ({"compress": "int4"}, ValueError, "'int8' or None"),
        ({"overlap": 1}, TypeError, "True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        lockstep.LocalSteps(**options)


def test_options_about_averaged_gradients_are_refused() -> None:
    with pytest.raises(ValueError, match="end of a round raises by itself"):
        ReplicaOptions(sync=lockstep.LocalSteps(), check_finite="skip")
    with pytest.raises(ValueError, match=r"LocalSteps\(overlap=True\)"):
        ReplicaOptions(sync=lockstep.LocalSteps(), overlap=True)
    with pytest.raises(TypeError, match=r"expected a lockstep.LocalSteps"):
        ReplicaOptions(sync=32)  # type: ignore[arg-type]


def test_an_outer_optimizer_must_have_what_it_was_given() -> None:
    anchors = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    outer = lockstep.LocalSteps()._make_outer(anchors)
    assert {key: outer.defaults[key] for key in ("lr", "momentum", "nesterov")} == {
        "lr": 0.7,
        "momentum": 0.9,
        "nesterov": True,
    }
    with pytest.raises(TypeError, match="outer returned a list"):
        lockstep.LocalSteps(outer=list)._make_outer(anchors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has 1 parameters, and was given 2"):
        lockstep.LocalSteps(outer=lambda params: torch.optim.SGD(params[:1]))._make_outer(anchors)


class _Rank:
    """Ends rounds of some steps as soon as the others' messages allow it, and asks between steps what is due."""

    def __init__(self, board: StoreBoard, *, overlap: bool, asks_at: int | None) -> None:
        self.agreement = Agreement(board, world_size=3, lead=2 if overlap else 1)
        self.overlap, self.asks_at = overlap, asks_at
        self.steps = self.begun = 0
        #: Step and rounds at which it acted.
        self.acted: tuple[int, int] | None = None

    def go_on(self, every: int, ranks: list[_Rank]) -> None:
        """Pass a boundary and take a step, unless it has to wait for others."""
        if self.acted is not None:
            return
        due = self.steps == every * (self.begun + 1)
        if self.overlap:
            # The result of the last exchange, which all must have begun, comes a quarter of a round after it.
            if self.steps == every * self.begun + every // 4 and any(rank.begun < self.begun for rank in ranks):
                return
        elif due and not all(rank.steps >= self.steps for rank in ranks):
            return
        self.begun += due
        wanted = Action.STOP if self.asks_at is not None and self.steps >= self.asks_at else None
        if self.agreement.due(self.begun, wanted=wanted) is not None:
            self.acted = (self.steps, self.begun)
        else:
            self.steps += 1


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_that_train_apart_stop_at_the_end_of_the_same_round(overlap: bool) -> None:
    every = 4
    for seed in range(300):
        chance = random.Random(seed)
        store = HashStore()
        asking = {chance.randrange(3): chance.randrange(30) for _ in range(chance.choice([1, 2]))}
        ranks = [_Rank(StoreBoard(store), overlap=overlap, asks_at=asking.get(rank)) for rank in range(3)]
        for _ in range(5000):
            if all(rank.acted for rank in ranks):
                break
            rank = chance.choice(ranks)
            rank.go_on(every, ranks)
        assert len({rank.acted for rank in ranks}) == 1, (seed, asking, [rank.acted for rank in ranks])
        step, _ = ranks[0].acted or (0, 0)
        assert step % every == 0
        assert step <= min(asking.values()) + every * (3 if overlap else 2)


def _layouts(owns: list[dict[str, Any]]) -> list[StateLayout]:
    model = {"weight": torch.arange(6.0)}
    return [
        StateLayout.of(
            model,
            {"local_steps": {"momentum": torch.ones(3)}},
            parameters=frozenset(model),
            is_main=rank == 0,
            alike=frozenset({"local_steps"}),
            own=own,
            world_size=len(owns),
        )
        for rank, own in enumerate(owns)
    ]


def _written(layouts: list[StateLayout]) -> tuple[dict[str, bytes], list[dict[str, tuple[int, ...]]]]:
    """What the ranks together write into ``ranks.safetensors``, by tensor; and what differs between them."""
    outlines = [layout.outline() for layout in layouts]
    plans = [plan_writes(one, outlines, rank=rank, texts={}) for rank, one in enumerate(layouts)]
    file = next(file for file in layouts[0].files if file.name == "ranks.safetensors")
    content = bytearray(file.size)
    for plan in plans:
        for name, offset, data, _ in plan.contents():
            if name == file.name:
                content[offset : offset + len(data)] = data
    return {one.name: bytes(content[one.start : one.stop]) for one in file.spans}, [dict(plan.apart) for plan in plans]


def test_each_rank_writes_what_it_holds_alone() -> None:
    owns = [{"state": {0: torch.full((4,), float(rank)), 1: torch.tensor(rank)}} for rank in range(3)]
    written, apart = _written(_layouts(owns))
    assert apart == [{}] * 3
    assert len(written) == 6
    for name, content in written.items():
        rank = int(name.split(".")[1])
        own = owns[rank]["state"][int(name[-1])]
        assert content == own.numpy().tobytes(), name


def test_where_the_own_states_are_not_of_one_shape_rank_0_stands_for_all() -> None:
    owns: list[dict[str, Any]] = [{"state": {0: torch.full((4,), 5.0)}}, {"state": {}}]
    written, apart = _written(_layouts(owns))
    assert [set(one) for one in apart] == [{"ranks.safetensors"}] * 2
    assert set(written.values()) == {torch.full((4,), 5.0).numpy().tobytes()}
