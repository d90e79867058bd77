"""The shared segment's layout, and the small pure parts of the shm backend: no ranks, no memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from lockstep import knobs
from lockstep.comm.group import fingerprint
from lockstep.comm.group.fingerprint import HEADER
from lockstep.comm.group.reduction import reduction
from lockstep.comm.group.tensors import part
from lockstep.comm.labels import labelled
from lockstep.comm.shm.layout import BUFFERS, FAILURE_TEXT, MAIL_HEADER, MAIL_SLOTS, SEMAPHORE, Layout
from lockstep.errors import EnvironmentMismatch


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("chunk", [4096, 5 * 4096 + 64, 512 * 1024])
def test_nothing_overlaps(world_size: int, chunk: int) -> None:
    layout = Layout(world_size, chunk)
    ranks = range(world_size)
    spans = [(layout.identity, 64), (layout.failure_record, 8 + FAILURE_TEXT)]
    spans += [(offset, SEMAPHORE) for offset, _ in layout.semaphores()]
    spans += [(layout.presence(rank), 8) for rank in ranks]
    spans += [(layout.header(rank, buffer), HEADER) for rank in ranks for buffer in range(BUFFERS)]
    spans += [(layout.last_wait(rank), HEADER) for rank in ranks]
    spans += [(layout.stage(rank, buffer), chunk) for rank in ranks for buffer in range(BUFFERS)]
    boxes = [(s, d, slot) for s in ranks for d in ranks for slot in range(MAIL_SLOTS)]
    spans += [(layout.box(*box), MAIL_HEADER + chunk) for box in boxes]
    spans.sort()
    for (start, length), (following, _) in pairwise(spans):
        assert start + length <= following
    assert spans[-1][0] + spans[-1][1] <= layout.size
    assert all(layout.stage(rank, 0) % 4096 == 0 for rank in ranks)


@pytest.mark.parametrize(("world_size", "chunk"), [(0, 4096), (2, 100), (100, 64)])
def test_a_layout_that_can_not_be_is_refused(world_size: int, chunk: int) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        Layout(world_size, chunk)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 131072])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_parts_cover_all_elements_once(count: int, world_size: int) -> None:
    bounds = [part(count, rank, world_size) for rank in range(world_size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    for (_, end), (start, _) in pairwise(bounds):
        assert end == start


def test_a_fingerprint_says_what_and_where() -> None:
    with labelled("bucket 3"):
        body = fingerprint.take("all_reduce", dtype=torch.float32, numel=10, reduce_op=0)
    header = (12).to_bytes(8, "little") + body
    assert len(header) == HEADER
    text = fingerprint.describe(header)
    assert text.startswith("all_reduce #12 (SUM, torch.float32, 10 elements, detail ")
    assert "test_shm_layout.py:" in text
    assert text.endswith("in test_a_fingerprint_says_what_and_where [bucket 3]")
    other = fingerprint.take("all_reduce", dtype=torch.float32, numel=10, reduce_op=0)
    assert other[: fingerprint.KEY - 8] != body[: fingerprint.KEY - 8]


def test_every_dtype_has_a_number_of_its_own() -> None:
    codes = [fingerprint.dtype_code(value) for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert {fingerprint.dtype_name(code) for code in codes} >= {"torch.float32", "torch.bool", "torch.complex64"}


@pytest.mark.parametrize(
    ("op", "dtype"), [("BAND", torch.float32), ("AVG", torch.uint32), ("MIN", torch.complex64), ("MAX", torch.uint16)]
)
def test_reductions_that_make_no_sense_are_refused(op: str, dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=op):
        reduction(fingerprint.REDUCE_OPS.index(op), dtype, 2)


@pytest.mark.parametrize("text", ["", "-64", "100", "abc", "0"])
def test_a_chunk_that_is_no_multiple_of_64_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentMismatch, match=knobs.SHM_CHUNK):
        knobs.shm_chunk({knobs.SHM_CHUNK: text})
