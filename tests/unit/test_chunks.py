"""The copy of a state in chunks of memory, and what is read of it while a device is behind."""

from __future__ import annotations

import hashlib

import pytest
import torch

from lockstep.checkpoint import chunks
from lockstep.checkpoint.blocks import BLOCK, cut
from lockstep.checkpoint.chunks import Chunks
from lockstep.checkpoint.plan import Write, WritePlan
from tests.device import simulation
from tests.device.simulation import Counting


def _numbers(count: int, device: str = "cpu") -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).to(device)


def _plan(*tensors: torch.Tensor) -> WritePlan:
    """Return the plan of files with one tensor each, of which the last bytes are written, and of one with a text."""
    writes = [Write(f"{i}", 24, 24 + each.nbytes - 8, each, 8) for i, each in enumerate(tensors)]
    return WritePlan((*writes, Write("text", 0, 5, b"12345", 0)), {}, None)


def _digests(contents: dict[str, bytes]) -> dict[str, tuple[int, str]]:
    """Their lengths and digests: pytest would show the difference of megabytes for minutes."""
    return {name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()}


def _written(plan: WritePlan) -> dict[str, tuple[int, str]]:
    """Return what each file would hold, and check that the blocks are those of the whole."""
    found: dict[str, bytes] = {}
    blocks: dict[str, list[int]] = {}
    for block in plan.contents():
        found[block.file] = found.get(block.file, b"") + bytes(block.content)
        blocks.setdefault(block.file, []).append(block.start)
    for name, starts in blocks.items():
        first = 0 if name == "text" else 24
        assert starts == [start for start, _ in cut(first, first + len(found[name]))]
    return _digests(found)


def _expected(*tensors: torch.Tensor) -> dict[str, tuple[int, str]]:
    values = {f"{i}": bytes(each.cpu().numpy().data.cast("B")[8:]) for i, each in enumerate(tensors)}
    return _digests({**values, "text": b"12345"})


def test_a_copy_lies_in_chunks_and_no_block_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 2 * BLOCK)
    state = [_numbers(100), _numbers(5 * BLOCK // 4 + 3), _numbers(7), _numbers(3 * BLOCK // 4)]
    expected, memory = _expected(*state), Chunks(pinned=False)
    copied = _plan(*state).copied(memory)
    for each in state:
        each.zero_()
    assert _written(copied) == expected
    assert copied.nbytes <= memory.nbytes <= copied.nbytes + 3 * BLOCK
    size = memory.nbytes
    smaller = [_numbers(9), _numbers(BLOCK // 2)]
    assert _written(_plan(*smaller).copied(memory)) == _expected(*smaller)
    assert memory.nbytes == size
    larger = [*map(_numbers, (10, 6 * BLOCK, 11))]
    assert _written(_plan(*larger).copied(memory)) == _expected(*larger)
    assert memory.nbytes > size


def test_nine_gigabytes_take_nine() -> None:
    sizes, left, memory = [], 9 * 2**30 + 5, Chunks(pinned=False)
    while left:
        piece = memory.take(left, left=left)  # (of memory that nobody touches)
        sizes.append(len(piece))
        left -= len(piece)
    assert sum(sizes) == 9 * 2**30 + 5
    assert memory.nbytes < 9 * 2**30 + 2 * BLOCK
    assert max(sizes) == chunks.CHUNK


@pytest.mark.gpu
def test_a_copy_from_a_gpu_waits_where_it_is_read(gpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpus != "simulated":
        pytest.skip("only a simulated stream can be held back")
    monkeypatch.setattr(chunks, "CHUNK", 2 * BLOCK)
    state = [_numbers(100, "cuda"), _numbers(2 * BLOCK // 4 + 3, "cuda"), _numbers(7, "cuda")]
    expected = _expected(*state)
    torch.cuda.synchronize()
    counting = Counting()
    with simulation.held_back(torch.cuda.current_stream()):
        copied = _plan(*state).copied(Chunks(pinned=True))
        for each in state:
            each.zero_()  # as the next step would
        assert counting.so_far().waits == 0
        with pytest.raises(RuntimeError, match="which a test holds back"):
            next(iter(copied.contents()))
    assert _written(copied) == expected


@pytest.mark.gpu
def test_blocks_of_a_gpu_are_copied_ahead_of_who_writes_them(gpus: str) -> None:
    state = [_numbers(3 * BLOCK // 4 + 5, "cuda"), _numbers(2, "cuda").to(torch.float64), torch.arange(9.0)]
    expected, plan = _expected(*state), _plan(*state)
    found: dict[str, bytes] = {}
    for block in plan.contents():
        if gpus == "simulated":
            simulation.delay(torch.cuda.current_stream(), 20)
        found[block.file] = found.get(block.file, b"") + bytes(block.content)
    assert _digests(found) == expected
