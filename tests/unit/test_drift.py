"""Parts, digests and schedules of replicas that are compared while they train, without ranks."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import bits as bits_of
from lockstep.ddp.difference import Difference
from lockstep.ddp.digest import ByteSpan, Holdings, watch_optimizers
from lockstep.ddp.drift import MOST_STEPS, Costs, Schedule
from lockstep.ddp.options import ReplicaOptions
from lockstep.step.conditions import conditions, differences

_CPU = torch.device("cpu")


def _holdings(*params: Tensor) -> Holdings:
    made = Holdings([(f"p{index}", nn.Parameter(param, requires_grad=False)) for index, param in enumerate(params)])
    made.refresh()
    return made


# Parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [64, 100, 1000, 4096, 1 << 20])
def test_parts_cover_every_byte_once_and_keep_to_the_size(size: int) -> None:
    generator = random.Random(size)
    holdings = _holdings(*(torch.zeros(generator.choice([1, 3, 17, 300, 5000])) for _ in range(40)))
    seen: Counter[tuple[int, int]] = Counter()
    for part in holdings.cut(size):
        assert sum(span.stop - span.start for span in part.spans) <= size
        for span in part.spans:
            assert span.start < span.stop
            seen.update((span.item, byte) for byte in range(span.start, span.stop))
    expected = {(index, byte) for index, item in enumerate(holdings.items) for byte in range(item.nbytes)}
    assert set(seen) == expected
    assert set(seen.values()) == {1}


def test_a_tensor_with_gaps_is_one_piece_and_strides_are_kept() -> None:
    wide = torch.arange(600.0).view(20, 30)
    holdings = _holdings(wide[:, ::2], torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(50))
    assert [item.has_gaps for item in holdings.items] == [True, False, False]
    pieces = [span for part in holdings.cut(128) for span in part.spans if span.item == 0]
    assert pieces == [ByteSpan(0, 0, 20 * 15 * 4)]


# Digests ------------------------------------------------------------------------------------------------------------


def _digests(holdings: Holdings) -> list[tuple[int, int]]:
    """Each part's digest as CPUs take it, and as devices do."""
    return [
        (
            int(holdings.digest(part, 5)),
            int(bits_of.on_device([(holdings.params[s.item].detach(), s.start, s.stop) for s in part.spans], 5, _CPU)),
        )
        for part in holdings.cut(512)
    ]


def _flip(tensor: Tensor, bit: int) -> None:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
    flat[bit // 8] ^= 1 << (bit % 8)


_TENSORS = {
    "float32": lambda: torch.randn(200),
    "one": lambda: torch.randn(()),
    "bfloat16, odd": lambda: torch.randn(33).to(torch.bfloat16),
    "float64": lambda: torch.randn(7, 9, dtype=torch.float64),
    "complex": lambda: torch.randn(11, dtype=torch.complex64),
    "bool": lambda: torch.randn(13) > 0,
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "not at a word's beginning": lambda: torch.zeros(64, dtype=torch.uint8)[3:50],
    "in the middle of another": lambda: torch.randn(500)[7:300],
}


@pytest.mark.parametrize("kind", _TENSORS)
def test_every_bit_counts_in_both_digests(kind: str) -> None:
    torch.manual_seed(3)
    tensor: Tensor = _TENSORS[kind]()
    holdings = _holdings(torch.zeros(5), tensor, torch.ones(3))
    before, bits = _digests(holdings), 8 * tensor.nbytes
    assert before == _digests(holdings)
    for bit in random.Random(1).sample(range(bits), min(bits, 60)):
        _flip(holdings.params[1], bit)
        after = _digests(holdings)
        changed = [(a[0] != b[0], a[1] != b[1]) for a, b in zip(before, after, strict=True)]
        assert changed.count((True, True)) == 1
        assert changed.count((False, False)) == len(changed) - 1
        _flip(holdings.params[1], bit)
    assert before == _digests(holdings)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", _TENSORS)
def test_a_gpu_takes_the_digest_that_a_cpu_takes_in_its_way(kind: str) -> None:
    torch.manual_seed(3)
    tensor: Tensor = _TENSORS[kind]()
    there = torch.empty_like(tensor, device="cuda").copy_(tensor)
    expected = bits_of.on_device([(tensor, 0, tensor.nbytes)], 7, _CPU)
    for _ in range(20):
        assert int(bits_of.on_device([(there, 0, tensor.nbytes)], 7, there.device)) == int(expected)


def test_order_counts_too_and_so_does_the_salt() -> None:
    values = torch.randn(100)
    swapped = values.clone()
    swapped[[3, 90]] = values[[90, 3]]
    one, other = _digests(_holdings(values)), _digests(_holdings(swapped))
    assert one[0][0] != other[0][0]
    assert one[0][1] != other[0][1]
    holdings = _holdings(values)
    assert len({int(holdings.digest(holdings.cut(512)[0], salt)) for salt in range(100)}) == 100


def test_whole_items_are_digested_alike_whoever_cuts_them() -> None:
    holdings = _holdings(torch.arange(1000.0))
    assert len(holdings.whole(0, block=512)) == 8
    assert holdings.whole(0, block=1 << 20) == _holdings(torch.arange(1000.0)).whole(0, block=1 << 20)


# Items --------------------------------------------------------------------------------------------------------------


def test_items_are_parameters_and_what_optimizers_keep_for_them() -> None:
    watch_optimizers()
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    model.bias.requires_grad = False
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    holdings = Holdings(list(model.named_parameters()))
    assert holdings.refresh()
    assert not holdings.refresh()
    assert [item.name for item in holdings.items] == ["parameter 'weight'", "parameter 'bias'"]
    for each in (model, other):
        each(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["counted"] = 3
    optimizer.state[model.weight]["list"] = [torch.zeros(3)]
    assert holdings.refresh()
    states = [f"AdamW's {key!r} of parameter 'weight'" for key in ("step", "exp_avg", "exp_avg_sq", "counted")]
    assert [item.name for item in holdings.items][2:] == states
    assert all(holdings.find(item) is not None for item in holdings.items)
    signature = holdings.signature
    before = [int(holdings.digest(part, 0)) for part in holdings.cut(1 << 20)]
    optimizer.state[model.weight]["counted"] = 4
    assert before != [int(holdings.digest(part, 0)) for part in holdings.cut(1 << 20)]
    assert holdings.refresh(without=frozenset([holdings.items[-1].identity]))
    assert len(holdings.items) == 5
    assert holdings.signature != signature


def test_what_is_not_as_it_was_is_not_read() -> None:
    watch_optimizers()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    holdings = Holdings(list(model.named_parameters()))
    holdings.refresh()
    item = next(item for item in holdings.items if "momentum" in item.name)
    state: dict[str, Any] = optimizer.state[model.weight]
    for other in (None, torch.zeros(2), torch.zeros(4, 4).t()[::1], torch.zeros(4, 8)[:, ::2], 3.0):
        state["momentum_buffer"] = other
        found = holdings.find(item)
        assert found is None or (found.is_contiguous() and found.nbytes == item.nbytes)
    del state["momentum_buffer"]
    assert holdings.find(item) is None


# When ---------------------------------------------------------------------------------------------------------------


def _longest_wait(schedule: Schedule, parts: int, *, steps: int, vary: random.Random | None = None) -> int:
    """Return the most steps that a part has waited for its next turn."""
    last, longest = dict.fromkeys(range(parts), 0), 0
    for step in range(1, steps + 1):
        if not schedule.count():
            continue
        if schedule.begins_round:
            schedule.begin_round(parts)
        taken = schedule.take()
        assert len(taken) > 0
        for part in taken:
            if last[part]:
                longest = max(longest, step - last[part])
            last[part] = step
        if vary is not None:
            schedule.exponent = vary.randint(-10, 10)
    assert all(last.values())
    return longest


@pytest.mark.parametrize("every", [1, 2, 3, 7, 50, 1000])
@pytest.mark.parametrize("parts", [1, 2, 5, 7, 60, 333])
def test_every_part_has_its_turn_within_the_steps_asked_for(every: int, parts: int) -> None:
    assert _longest_wait(Schedule(every), parts, steps=5 * every + 20) <= every


@pytest.mark.parametrize("parts", [1, 3, 100, 1024, 1030])
def test_every_part_has_its_turn_however_slow_comparing_is(parts: int) -> None:
    slowest = Schedule(None)
    slowest.exponent = 10
    assert _longest_wait(slowest, parts, steps=6000) <= MOST_STEPS
    assert _longest_wait(Schedule(None), parts, steps=6000, vary=random.Random(parts)) <= MOST_STEPS


def test_a_rank_asks_for_as_many_steps_as_the_cost_demands() -> None:
    costs = Costs()
    costs.add(1e-4, parts=1, step=None)
    assert costs.wanted() is None
    costs.add(1e-4, parts=1, step=1e-3)
    assert costs.wanted() == math.ceil(math.log2(1e-4 / 4e-6))
    costs.add(5.0, parts=1, step=60.0)  # one comparison that was interrupted, one step in which there was an evaluation
    assert costs.wanted() == math.ceil(math.log2(1e-4 / 4e-6))
    slow = Costs()
    for _ in range(3):
        slow.add(8e-4, parts=8, step=1.0)
    assert slow.wanted() == math.ceil(math.log2(1e-4 / 4e-3)) == -5


# Words and options ----------------------------------------------------------------------------------------------------


def _difference(*groups: list[int]) -> Difference:
    return Difference([0], groups, "", False, [], (1, 0))


def test_the_odd_ranks_are_those_outside_a_majority() -> None:
    assert _difference([0, 2, 3], [1]).odd == [1]
    assert _difference([0, 2, 3], [4], [1]).odd == [1, 4]
    assert _difference([0], [1]).odd == []
    assert _difference([0, 1], [2, 3]).odd == []
    assert _difference([1, 2], [0]).odd == [0]


def test_conditions_are_compared_by_what_both_know() -> None:
    now = conditions(_CPU)
    assert differences(now, now) == []
    other = {**now, "threads": "77", "deterministic": "unknown", "another": "1"}
    del other["torch"]
    assert differences(other, now) == [
        ("the number of threads", "77", now["threads"]),
        ("deterministic algorithms", "unknown", now["deterministic"]),
    ]


@pytest.mark.parametrize("every", [-1, 1.5, True, "often"])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="compare_every"):
        ReplicaOptions(compare_every=every)


def test_none_and_zero_compare_nothing() -> None:
    assert [ReplicaOptions(compare_every=every).compares for every in ("auto", 5, 0, None)] == [
        True,
        True,
        False,
        False,
    ]
