"""Who writes which bytes, and that the checkpoint is the same whoever does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

import lockstep
from lockstep.checkpoint import blocks
from lockstep.checkpoint.blocks import TensorPart, count_blocks, cut, divide
from lockstep.checkpoint.chunks import Chunks
from lockstep.checkpoint.plan import StateLayout, plan_writes
from lockstep.checkpoint.read import read
from lockstep.checkpoint.state import Moment
from lockstep.comm.peers import OverStore
from tests.checkpoints import State, save, some_tensors, verify


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 6), st.integers(0, 100))
def test_every_byte_is_written_once_in_order_and_evenly(sizes: list[int], world_size: int, extra: int) -> None:
    parts, end = [], 0
    for number, size in enumerate(sizes):
        parts.append(TensorPart(str(number), end, end + size))
        end += size
    written = [extra] + [0] * (world_size - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", 8)
        divided = divide(parts, world_size=world_size, extra=extra)
        assert [replace(part, writers=()) for part in divided] == parts
        assert all(count_blocks(e.start, e.stop) == len(cut(e.start, e.stop)) for e in parts)
        for part in divided:
            for (start, stop), writer in zip(cut(part.start, part.stop), part.writers, strict=True):
                written[writer] += stop - start
    writers = [writer for part in divided for writer in part.writers]
    assert writers == sorted(writers), "one run of blocks for each rank"
    fair = max((end + extra) / world_size, extra)
    assert max(written) <= fair + 8, "one block too many at most"


def _states(world_size: int) -> list[State]:
    model = some_tensors(1, (3_000_000, 5, 0, 70_000, 2_200_000)) | {"running_mean": torch.arange(5.0)}
    moments = [*some_tensors(2, (3_000_000, 5, 0, 70_000, 2_200_000)).values()]
    parts = {"optimizer": {"state": moments}, "extra": {"average": torch.ones(1000)}}
    parameters = frozenset(model) - {"running_mean"}
    buffers = [{"running_mean": torch.arange(5.0) + rank} for rank in range(world_size)]
    return [State({**model, **buffers[rank]}, parameters, parts) for rank in range(world_size)]


def test_the_folder_is_the_same_whatever_the_world_size(tmp_path: Path) -> None:
    found = {}
    for world_size in (1, 2, 3, 5):
        root = tmp_path / str(world_size)
        root.mkdir()
        made = save(root, _states(world_size))
        assert set(made) == {root / "step-00000001"}
        found[world_size] = {file.name: file.read_bytes() for file in (root / "step-00000001").iterdir()}
        manifest = verify(root / "step-00000001")
        assert manifest.world_size == world_size
        assert len(manifest.files["model.safetensors"].parts) == 7
        del found[world_size]["manifest.json"]  # says the world size and the time
    assert found[1] == found[2] == found[3] == found[5]
    contents = read(tmp_path / "5" / "step-00000001")
    state = _states(1)[0]
    for name, tensor in load_file(tmp_path / "5" / "step-00000001" / "model.safetensors").items():
        assert torch.equal(tensor, state.model[name])
        assert torch.equal(contents.model[name], tensor)
    assert contents.parts["extra"]["average"].sum() == 1000


def test_every_rank_writes_about_as_much() -> None:
    states = _states(3)
    layouts = [
        StateLayout.of(state.model, state.parts, parameters=state.parameters or frozenset(), is_main=rank == 0)
        for rank, state in enumerate(states)
    ]
    outlines = [one.outline() for one in layouts]
    plans = [plan_writes(one, outlines, rank=rank, texts={}) for rank, one in enumerate(layouts)]
    assert max(plan.nbytes for plan in plans) - min(plan.nbytes for plan in plans) < 2 * blocks.BLOCK
    assert not plans[0].apart
    copied = plans[1].copied(Chunks(pinned=False))
    expected = [(name, offset, bytes(data)) for name, offset, data, _ in plans[1].contents()]
    for state in states:
        for tensor in state.model.values():
            tensor.zero_()
    assert [(name, offset, bytes(data)) for name, offset, data, _ in copied.contents()] == expected


@pytest.mark.parametrize("difference", ["value", "shape", "missing"])
def test_where_replicas_differ_rank_0_writes_alone(tmp_path: Path, difference: str) -> None:
    ours = some_tensors(1, (3_000_000, 500, 70_000))
    theirs = {name: tensor.clone() for name, tensor in ours.items()}
    if difference == "value":
        theirs["layer1.weight"][3] += 1
    elif difference == "shape":
        theirs["layer1.weight"] = theirs["layer1.weight"].reshape(5, 100)
    else:
        del theirs["layer1.weight"]
    made = save(tmp_path, [State(ours), State(theirs)])
    assert made == [tmp_path / "step-00000001"] * 2
    for name, tensor in load_file(tmp_path / "step-00000001" / "model.safetensors").items():
        assert torch.equal(tensor, ours[name])
    layouts = [
        StateLayout.of(state, {}, parameters=frozenset(state), is_main=state is ours) for state in (ours, theirs)
    ]
    outlines = [one.outline() for one in layouts]
    plans = [plan_writes(one, outlines, rank=rank, texts={}) for rank, one in enumerate(layouts)]
    assert [dict(plan.apart) for plan in plans] == [{"model.safetensors": (1,)}] * 2
    assert plans[1].writes == ()


def test_any_strides_are_shared_out(tmp_path: Path) -> None:
    state = {
        "channels_last": torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last),
        "transposed": torch.randn(1500, 1000).T,
        "large": torch.randn(1200, 1200, 2)[..., 0],
        "scalar": torch.tensor(2.5),
    }
    save(tmp_path, [State(state), State({name: tensor.clone() for name, tensor in state.items()})])
    for name, tensor in load_file(tmp_path / "step-00000001" / "model.safetensors").items():
        assert torch.equal(tensor, state[name])


def test_a_rank_that_does_not_hand_over_is_named() -> None:
    peers = OverStore(HashStore(), rank=0, world_size=3, key="k", timeout=0.05)
    with pytest.raises(lockstep.CollectiveTimeout, match=r"rank 0 of 3: ranks 1 and 2 did not hand over"):
        peers.gather({})


def test_one_rank_failing_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    states = [State({"w": torch.ones(4)}), State({"w": torch.ones(4)}), State({"w": torch.ones(4)})]
    (tmp_path / "file").touch()
    for error in save(tmp_path / "file", states, place=Moment(3, 0, False)):
        assert isinstance(error, lockstep.CheckpointError)
        assert "rank 0: " in str(error)


def test_a_file_that_rank_0_does_not_have_is_written_by_nobody(tmp_path: Path) -> None:
    ours = some_tensors(1, (1_500_000, 1_500_000, 1_500_000))
    none: dict[str, Any] = {"optimizer": {}}
    theirs = {"optimizer": {"momentum": torch.ones(6_000_000)}}
    made = save(tmp_path, [State(ours, parts=none), State(ours, parts=theirs)])
    assert made == [tmp_path / "step-00000001"] * 2
    assert "optimizer.safetensors" not in verify(tmp_path / "step-00000001").files
    contents = read(tmp_path / "step-00000001")
    assert all(torch.equal(contents.model[name], tensor) for name, tensor in ours.items())
    layouts = [
        StateLayout.of(ours, parts, parameters=frozenset(ours), is_main=parts is not theirs) for parts in (none, theirs)
    ]
    outlines = [one.outline() for one in layouts]
    plans = [plan_writes(one, outlines, rank=rank, texts={}) for rank, one in enumerate(layouts)]
    assert [dict(plan.apart) for plan in plans] == [{"optimizer.safetensors": (1,)}] * 2
