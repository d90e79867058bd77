"""The parts of a replica that need no other rank."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.comm.waiting import failure
from lockstep.ddp.accumulated import AccumulatedWeights
from lockstep.ddp.bucket import Bucket
from lockstep.ddp.compare import explain_difference, first_difference
from lockstep.ddp.hooks import MOST_PARTS, Forwards, tensors_in
from lockstep.ddp.options import ReplicaOptions
from lockstep.errors import CollectiveTimeout, PeerLost
from lockstep.trees import to_device

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

Pair = namedtuple("Pair", "left right")


@dataclass
class Nested:
    inner: Any
    number: int = 3


def test_tensors_are_found_in_whatever_a_module_returns() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    holder = type("Holder", (), {})()
    holder.tensor, holder.itself = d, holder
    found = list(tensors_in({"x": [a, None, "text"], "y": Pair(b, Nested((c,))), "z": holder, "n": 1.5}))
    assert {float(t) for t in found} == {0.0, 1.0, 2.0, 3.0}
    assert len(found) == 4
    assert list(tensors_in(None)) == []
    assert list(tensors_in("text")) == []


def test_large_and_deep_outputs_are_searched_for_a_while_and_level_by_level() -> None:
    deep: list[Any] = [torch.tensor(5.0)]
    for _ in range(3000):
        deep = [deep]
    loss, inner = torch.tensor(1.0), torch.tensor(2.0)
    words = [{"text": "word", "box": [1, 2, 3, 4]} for _ in range(20_000)]
    looked_at = 0

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            nonlocal looked_at
            for each in super().__iter__():
                looked_at += 1
                yield each

    output = {"words": Counted(words), "deep": deep, "loss": loss, "inner": [inner]}
    found = list(tensors_in(output))
    assert any(tensor is loss for tensor in found)
    assert any(tensor is inner for tensor in found)
    assert looked_at <= MOST_PARTS
    assert [float(tensor) for tensor in tensors_in([deep, [inner]])] == [2.0, 5.0]
    assert list(tensors_in([words[:10] for _ in range(100)])) == []
    # What is found does not depend on which ids Python gives to objects made on the way.
    slots = [type("Slots", (), {"__dict__": property(lambda _: {"a": [torch.tensor(1.0)]})})() for _ in range(50)]
    assert len(list(tensors_in(slots))) == 50


def test_to_device_keeps_the_form() -> None:
    meta = torch.device("meta")
    moved = to_device({"a": (torch.ones(2), [torch.ones(1), 3]), "b": Pair(torch.ones(1), "text")}, meta)
    assert moved["a"][0].device == moved["a"][1][0].device == moved["b"].left.device == meta
    assert moved["a"][1][1] == 3
    assert type(moved["b"]) is Pair
    assert type(to_device(OrderedDict(x=torch.ones(1)), meta)) is OrderedDict
    grouped: defaultdict[str, list[Any]] = defaultdict(list, x=[torch.ones(1)])
    regrouped = to_device(grouped, meta)
    assert regrouped["x"][0].device == meta
    assert regrouped["new"] == []
    assert "new" not in grouped
    nested = to_device(Nested(torch.ones(1), 7), meta)
    assert (nested.inner.device, nested.number) == (meta, 7)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    assert to_device([packed], meta)[0].data.device == meta


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([[1, 2], [1, 2]], None),
        ([[1, 2], [1, 3]], (1, 1)),
        ([[1, 2], [1, 2, 3]], (2, 1)),
        ([[1, 2, 3], [1, 2, 3], [1, 2], [9, 2, 3]], (0, 3)),
        ([[]], None),
        ([[], [1]], (0, 1)),
    ],
)
def test_first_difference(lists: list[list[int]], expected: tuple[int, int] | None) -> None:
    assert first_difference(lists) == expected


def test_parameters_on_different_devices_differ_in_words() -> None:
    # (A second device that every machine has would be the meta device, of which no replica can be made.)
    records = [{"parameters": [["1.weight", [3, 7], "torch.float32", place, True, None, False]]} for place in (0, 1)]
    assert first_difference([record["parameters"] for record in records]) == (0, 1)
    assert explain_difference("parameters", records, 0, 1).endswith(
        "rank 1 has '1.weight' of shape (3, 7), torch.float32, on the module's device 1 (counted from 0)"
    )


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="first_bucket_mb=-1: expected a positive number"):
        ReplicaOptions(first_bucket_mb=-1)
    with pytest.raises(ValueError, match="bucket_cap_mb_list=0: expected a positive number"):
        ReplicaOptions(bucket_cap_mb_list=(1, 0))
    assert ReplicaOptions(bucket_cap_mb=0.5).bucket_caps == [512 * 1024] * 2
    assert ReplicaOptions(bucket_cap_mb_list=(0.25, 1, 0.5)).bucket_caps == [n * 256 * 1024 for n in (1, 4, 2, 4)]
    assert "find_unused_parameters" not in ReplicaOptions().must_match()


def test_a_bucket_keeps_shapes_and_strides() -> None:
    params = [
        nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(())),
        nn.Parameter(torch.randn(6, 4)[:, ::2].detach()),
        nn.Parameter(torch.randn(4, 3).T.detach()),
    ]
    bucket = Bucket(0, range(4), params)
    assert [view.shape for view in bucket.views] == [param.shape for param in params]
    assert bucket.views[0].stride() == params[0].stride()
    assert bucket.views[3].stride() == params[3].stride()
    assert bucket.views[2].is_contiguous()  # its parameter has gaps, which a bucket has not
    grads = [torch.randn_like(param) for param in params]
    bucket.pack(grads, torch.tensor(0.5))
    for view, grad in zip(bucket.views, grads, strict=True):
        assert torch.equal(view, grad * 0.5)
    assert bucket.flat.numel() == bucket.values.numel() + 4


@pytest.mark.parametrize("numel", [4, 100_000])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_packing_and_unpacking(numel: int, scale: float | None) -> None:
    params = [nn.Parameter(torch.zeros(numel)) for _ in range(3)]
    factor = None if scale is None else torch.tensor(scale)
    grads = [torch.arange(float(numel)) + 1000 * slot for slot in range(3)]
    expected = [grad * (scale or 1.0) for grad in grads]
    bucket = Bucket(0, range(3), params)
    bucket.pack(grads, factor)
    assert all(torch.equal(view, grad) for view, grad in zip(bucket.views, expected, strict=True))
    params[1].grad = torch.zeros(numel)
    bucket.unpack_by_copy()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, expected, strict=True))  # type: ignore[arg-type]
    assert params[1].grad is not bucket.views[1]
    bucket.unpack_as_views()
    assert all(param.grad is view for param, view in zip(params, bucket.views, strict=True))
    bucket.pack(list(bucket.views), factor)  # in place
    assert all(torch.equal(v, g * (scale or 1.0)) for v, g in zip(bucket.views, expected, strict=True))
    bucket.pack_some([None, grads[1], None], factor)
    assert [float(view.abs().sum()) > 0 for view in bucket.views] == [False, True, False]


def _backward(param: nn.Parameter, value: float) -> None:
    (param * value).sum().backward()


def _accumulate(weights: AccumulatedWeights, param: nn.Parameter, weight: float, value: float, synced: bool) -> Tensor:
    bucket_weight, _ = weights.enter(weight, {0})
    _backward(param, value)
    weights.leave(synced=synced)
    return torch.zeros(2) if param.grad is None or bucket_weight == 0 else param.grad * bucket_weight


def test_accumulated_weights_are_those_of_each_backward() -> None:
    param = nn.Parameter(torch.ones(2))
    weights = AccumulatedWeights([param])
    _accumulate(weights, param, 1.5, 1.0, synced=False)
    _accumulate(weights, param, 1.5, 10.0, synced=False)
    _accumulate(weights, param, 0.0, float("nan"), synced=False)
    total = _accumulate(weights, param, 0.5, 100.0, synced=True)
    assert total.tolist() == [1.5 + 15.0 + 50.0] * 2
    param.grad = None
    assert _accumulate(weights, param, 2.0, 1.0, synced=True).tolist() == [2.0, 2.0]
    assert not param._backward_hooks


def test_an_empty_slice_leaves_grad_as_it_was() -> None:
    param = nn.Parameter(torch.ones(2))
    weights = AccumulatedWeights([param])
    _accumulate(weights, param, 0.0, float("nan"), synced=True)
    assert param.grad is None
    param.grad = torch.full((2,), 3.0)
    _accumulate(weights, param, 0.0, float("nan"), synced=True)
    assert param.grad.tolist() == [3.0, 3.0]


def test_failures_tell_late_from_lost() -> None:
    assert isinstance(failure(RuntimeError("Timed out waiting 1000ms for recv"), "here"), CollectiveTimeout)
    assert isinstance(failure(RuntimeError("Connection closed by peer"), "here"), PeerLost)


def _told(*backwards: str) -> list[int]:
    """What :class:`Forwards` tells of averaged backwards, each with its forwards: "u" for used, "-" for left out."""
    forwards, told, number = Forwards(), [], 0
    for backward in backwards:
        used = []
        for how in backward:
            number += 1
            forwards.expect(number)
            used += [number] if how == "u" else []
        for each in used:
            forwards.reached(each)
        told.append(forwards.settle())
    return told


def test_only_what_looks_like_a_whole_step_without_its_backward_is_told() -> None:
    assert _told("u", "u", "-u", "u") == [0, 0, 1, 0]
    assert _told("uu", "--uu", "----uu") == [0, 2, 4]
    assert _told("uuu", "uuuuu", "-----uuu") == [0, 0, 5]
    assert _told("u", "", "-u") == [0, 0, 1]  # in between, a backward that came through no forward
    # A forward that a loss has no use for.
    assert _told("uu", "-u", "u-", "-u") == [0, 0, 0, 0]
    assert _told("u", "u-", "--") == [0, 0, 0]
    assert _told("uu", "--", "---u") == [0, 0, 0]
    # The habit, from the beginning or later.
    assert _told("-u", "u", "-u") == [0, 0, 0]
    assert _told("uu", "u-", "u", "-u") == [0, 0, 0, 0]


def test_a_few_kept_gradients_are_put_aside_and_many_keep_the_memory() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(20)]
    bucket = Bucket(0, range(20), params)
    bucket.values.fill_(1)
    bucket.unpack_as_views()
    kept = [params[4].grad]
    home = bucket.flat
    for param in params:
        param.grad = None
    bucket.leave_to_holders()
    assert bucket.flat is home
    bucket.values.fill_(2)
    bucket.unpack_as_views()
    bucket.held.put_back()
    assert kept[0] is bucket.views[4]
    assert [float(param.grad.sum()) for param in params if param.grad is not None] == [6.0] * 20
    assert float(kept[0].sum()) == 3
    kept = [param.grad for param in params]
    for param in params:
        param.grad = None
    bucket.leave_to_holders()
    assert bucket.flat is not home


@pytest.mark.parametrize("attached", range(5))
def test_a_gradient_that_nobody_holds_is_not_put_aside(attached: int) -> None:
    """Whichever gradients the script has kept in their parameters."""
    params = [nn.Parameter(torch.zeros(3)) for _ in range(5)]
    for count in range(1, 6):
        bucket = Bucket(0, range(count), params[:count])
        bucket.unpack_as_views()
        for place, param in enumerate(params[:count]):
            if place != attached:
                param.grad = None
        assert bucket.held.find() == []
