"""The conformance suite: every collective, dtype and reduce op, sync and async, on 1 to 4 ranks, on shm and on gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import lockstep
from lockstep import knobs
from tests.harness import run_ranks
from tests.ranks.collectives import GLOO_DTYPES, MORE_DTYPES, MOVING, OPS, REDUCING, ROOTED, Case, issue, supported

#: Bytes of a stage that make a few hundred elements take several rounds.
SMALL_CHUNK = 512

#: gloo refuses complex numbers here ("Invalid scalar type"); shm moves them.
_NOT_COMPLEX_OVER_GLOO = ("gather", "scatter", "reduce", "reduce_scatter", "reduce_scatter_single")


def _cases(backend: str, size: int, counts: tuple[int, ...]) -> Iterator[Case]:
    dtypes = GLOO_DTYPES + (MORE_DTYPES if backend == "shm" else ())
    root = 0
    for asynchronous in (False, True):
        for dtype in dtypes:
            for count in counts:
                for name in REDUCING:
                    for op in OPS:
                        if not supported(dtype, op, collective=name):
                            continue
                        if backend == "gloo" and dtype.is_complex and name in _NOT_COMPLEX_OVER_GLOO:
                            continue
                        root = (root + 1) % size
                        yield Case(name, dtype, count, op, root if name in ROOTED else 0, asynchronous)
                for name in MOVING:
                    if backend == "gloo" and dtype.is_complex and name in _NOT_COMPLEX_OVER_GLOO:
                        continue
                    root = (root + 1) % size
                    yield Case(name, dtype, count, "SUM", root if name in ROOTED else 0, asynchronous)
        yield Case("barrier", torch.float32, 0, asynchronous=asynchronous)


def _conform(backend: str, chunk: int | None, counts: tuple[int, ...]) -> tuple[int, list[str]]:
    if chunk is not None:
        os.environ[knobs.SHM_CHUNK] = str(chunk)
    world = lockstep.init(backend, timeout=30)
    wrong = []
    done = 0
    for salt, case in enumerate(_cases(backend, world.world_size, counts)):
        try:
            issue(case, salt)()
        except lockstep.LockstepError:
            raise
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        done += 1
    return done, wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("backend", "chunk", "counts"),
    [("gloo", None, (5,)), ("shm", None, (0, 1, 257)), ("shm", SMALL_CHUNK, (3, 301))],
    ids=["gloo", "shm", "shm-small-chunks"],
)
def test_every_collective(backend: str, chunk: int | None, counts: tuple[int, ...], world_size: int) -> None:
    for done, wrong in run_ranks(_conform, world_size, backend, chunk, counts):
        assert not wrong, f"{len(wrong)} of {done} cases:\n" + "\n".join(wrong[:20])
        assert done > 300
