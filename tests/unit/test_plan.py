"""The plan of buckets: every parameter once, one kind each, caps kept, the same everywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.ddp.bucket import ParameterSpec, plan_buckets

MIB = 1024 * 1024

specs = st.lists(
    st.builds(
        ParameterSpec,
        numel=st.integers(0, 5000),
        element_size=st.sampled_from([2, 4, 8]),
        kind=st.sampled_from([("float32", "cpu"), ("float16", "cpu"), ("float32", "cuda:0"), ("float32", "cuda:1")]),
    ),
    max_size=60,
)
caps = st.integers(1, 40_000)


@given(specs, caps, caps)
def test_every_parameter_is_in_one_bucket_of_its_kind(params: list[ParameterSpec], cap: int, first: int) -> None:
    plan = plan_buckets(params, caps=(min(first, cap), cap))
    assert sorted(itertools.chain(*plan)) == list(range(len(params)))
    for bucket in plan:
        assert len({params[i].kind for i in bucket}) == 1


@given(specs, caps, caps)
def test_a_bucket_is_closed_as_soon_as_it_holds_its_cap(params: list[ParameterSpec], cap: int, first: int) -> None:
    plan = plan_buckets(params, caps=(min(first, cap), cap))
    for kind in {param.kind for param in params}:
        buckets = sorted((bucket for bucket in plan if params[bucket[0]].kind == kind), key=max, reverse=True)
        for number, bucket in enumerate(buckets):
            limit = cap if number else min(first, cap)
            sizes = [params[i].nbytes for i in bucket]
            assert sum(sizes[:-1]) < limit
            assert sum(sizes) >= limit or number == len(buckets) - 1


@given(specs, caps, caps)
def test_parameters_and_buckets_are_in_reverse_order(params: list[ParameterSpec], cap: int, first: int) -> None:
    plan = plan_buckets(params, caps=(min(first, cap), cap))
    for bucket in plan:
        assert list(bucket) == sorted(bucket, reverse=True)
    completed = [min(bucket) for bucket in plan]
    assert completed == sorted(completed, reverse=True)


def test_the_first_bucket_is_small_and_the_others_are_full() -> None:
    quarter = ParameterSpec(MIB // 16, 4, "float32")  # 256 KiB
    plan = plan_buckets([quarter] * 209, caps=(MIB, 25 * MIB))
    assert [len(bucket) for bucket in plan] == [4, 100, 100, 5]
    assert plan[0] == (208, 207, 206, 205)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_module_on_several_devices_has_buckets_on_each(devices: int) -> None:
    params = [ParameterSpec(1000, 4, ("float32", f"cuda:{i % devices}")) for i in range(12)]
    plan = plan_buckets(params, caps=(MIB,))
    assert len(plan) == devices
    assert all(len({i % devices for i in bucket}) == 1 for bucket in plan)


def test_no_parameters_no_buckets() -> None:
    assert plan_buckets([], caps=(MIB,)) == []
