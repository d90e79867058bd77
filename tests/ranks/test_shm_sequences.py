"""Random sequences of collectives, sync and async, on several groups, against a single-process model."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.ranks.collectives import MOVING, OPS, REDUCING, ROOTED, Case, issue, supported

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

_DTYPES = (torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.complex64)


@st.composite
def _sequences(draw: st.DrawFn) -> tuple[int, int, list[tuple[Case, int]]]:
    size = draw(st.integers(1, 4))
    chunk = draw(st.sampled_from([256, 448, 1024, 65536]))
    cases = []
    for _ in range(draw(st.integers(5, 40))):
        name = draw(st.sampled_from((*REDUCING, *MOVING, "barrier")))
        dtype = draw(st.sampled_from(_DTYPES))
        usable = [op for op in OPS if supported(dtype, op, collective=name)]
        op = draw(st.sampled_from(usable or ["SUM"])) if name in REDUCING and usable else "SUM"
        if name in REDUCING and not usable:
            dtype = torch.float32
        root = draw(st.integers(0, size - 1)) if name in ROOTED else 0
        case = Case(name, dtype, draw(st.integers(0, 700)), op, root, draw(st.booleans()))
        cases.append((case, draw(st.integers(0, 2))))
    return size, chunk, cases


def _play(backend: str, chunk: int, cases: list[tuple[Case, int]]) -> None:
    os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init(backend, timeout=20)
    odd = [rank for rank in range(world.world_size) if rank % 2]
    groups: list[Any] = [dist.group.WORLD, dist.new_group(backend=backend), dist.new_group(odd or [0], backend=backend)]
    finishes = []
    for salt, (case, number) in enumerate(cases):
        if number == 2 and world.rank not in (odd or [0]):
            continue
        size = dist.get_world_size(groups[number])
        finishes.append(issue(replace(case, root=case.root % size), salt, groups[number]))
    for finish in reversed(finishes):
        finish()


@pytest.mark.parametrize(
    ("backend", "examples"),
    [("shm", 5), *[pytest.param(backend, 15, marks=pytest.mark.campaign) for backend in ("shm", "hierarchical")]],
)
def test_any_sequence_gives_what_one_process_computes(backend: str, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(_sequences())
    def check(sequence: tuple[int, int, list[tuple[Case, int]]]) -> None:
        size, chunk, cases = sequence
        hosts = [size - size // 2, size // 2] if backend == "hierarchical" and size > 1 else None
        run_ranks(_play, size, backend, chunk, cases, timeout=30, hosts=hosts)

    check()
