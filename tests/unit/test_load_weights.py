"""load_weights: the files people have, the names in them, and what it says when they do not fit."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from tests.checkpoints import save_alone

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


class Net(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(2, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)


class Wrapper(nn.Module):
    """As DistributedDataParallel keeps its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


DistributedDataParallel = type("DistributedDataParallel", (Wrapper,), {})


def _equal(one: nn.Module, two: nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def _checkpoint(root: Path, model: nn.Module, step: int = 1) -> Path:
    root.mkdir(exist_ok=True)
    return save_alone(root, model.state_dict(), step=step)


def _safetensors(path: Path, state: dict[str, torch.Tensor]) -> Path:
    safetensors.torch.save_file(state, path)
    return path


def _torch(path: Path, content: Any, **options: Any) -> Path:
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "run",
        "step",
        "safetensors",
        "no suffix",
        "torch",
        "old torch",
        "module.",
        "_orig_mod.module.",
        "nested",
        "model",
    ],
)
def test_every_kind_of_file_is_loaded(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    trained, model = Net(), Net()
    state = trained.state_dict()
    file = tmp_path / "weights.pt"
    sources: dict[str, Any] = {
        "run": lambda: _checkpoint(tmp_path / "run", trained).parent,
        "step": lambda: _checkpoint(tmp_path / "run", trained),
        "safetensors": lambda: _safetensors(tmp_path / "model.safetensors", state),
        "no suffix": lambda: _safetensors(file, state),
        "torch": lambda: _torch(file, state),
        "old torch": lambda: _torch(file, state, _use_new_zipfile_serialization=False),
        "module.": lambda: _torch(file, OrderedDict((f"module.{name}", value) for name, value in state.items())),
        "_orig_mod.module.": lambda: _torch(file, {f"_orig_mod.module.{name}": v for name, v in state.items()}),
        "nested": lambda: _torch(file, {"epoch": 3, "model_state_dict": DistributedDataParallel(trained).state_dict()}),
        "model": lambda: _torch(file, {"model": {"state_dict": state}, "optimizer": {}}),
    }
    source = sources[kind]()
    assert not _equal(trained, model)
    report = lockstep.load_weights(source, model)
    assert _equal(trained, model)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    wrapped = DistributedDataParallel(Net())
    lockstep.load_weights(str(source), wrapped, device="cpu")
    assert _equal(trained, wrapped.module)


def test_a_prefix_is_taken_off(tmp_path: Path) -> None:
    trained, model = Net(), Net()
    state = {f"backbone.{name}": value for name, value in trained.state_dict().items()}
    path = _torch(tmp_path / "w.pt", {**state, "other.weight": torch.ones(1)})
    lockstep.load_weights(path, model, prefix="backbone.")
    assert _equal(trained, model)


def test_differences_are_named_at_once_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = {name: torch.full_like(value, 9) for name, value in Net(4).state_dict().items()}
    del state["body.bias"]
    state["extra.weight"] = torch.ones(1)
    path = _torch(tmp_path / "w.pt", state)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(lockstep.CheckpointMismatch) as caught:
        lockstep.load_weights(path, model)
    message = str(caught.value)
    assert "the model has, the checkpoint lacks (1): body.bias" in message
    assert "the checkpoint has, the model lacks (1): extra.weight" in message
    assert "body.weight: shape [4, 2] in the checkpoint, [3, 2] in the model" in message
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    report = lockstep.load_weights(path, model, strict=False)
    assert report.missing == ("body.bias",)
    assert report.unexpected == ("extra.weight",)
    assert [line.split(":")[0] for line in report.mismatched][:2] == ["body.weight", "norm.weight"]
    assert model.head.bias.tolist() == [9.0, 9.0], "what fits is loaded"
    assert torch.equal(model.body.bias, before["body.bias"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_tied_parameters_may_be_in_the_file_once(tmp_path: Path) -> None:
    trained = Tied()
    for source in (
        _safetensors(tmp_path / "w.safetensors", {"embed.weight": trained.embed.weight.detach()}),
        _checkpoint(tmp_path / "run", trained),
    ):
        model = Tied()
        lockstep.load_weights(source, model)
        assert torch.equal(model.head.weight, trained.embed.weight)
        assert model.head.weight is model.embed.weight


def test_dtypes_follow_the_model(tmp_path: Path) -> None:
    trained = Net().half()
    model = Net()
    lockstep.load_weights(_checkpoint(tmp_path / "run", trained), model)
    assert model.body.weight.dtype == torch.float32
    assert torch.equal(model.body.weight.half(), trained.body.weight)


class Remembering(nn.Module):
    """A module with a state of its own beside its tensors."""

    def __init__(self, remembered: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.remembered = remembered

    def get_extra_state(self) -> Any:
        return self.remembered

    def set_extra_state(self, state: Any) -> None:
        self.remembered = state


def test_extra_state_comes_along(tmp_path: Path) -> None:
    model = Remembering(None)
    lockstep.load_weights(_checkpoint(tmp_path / "run", Remembering({"seen": (1, 2.5)})), model)
    assert model.remembered == {"seen": (1, 2.5)}


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_or_refused(tmp_path: Path) -> None:
    older, newer, model = Net(), Net(), Net()
    whole = _checkpoint(tmp_path, older, 1)
    damaged = _checkpoint(tmp_path, newer, 2)
    _flip(damaged / "model.safetensors")
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is loaded; skipped: .*step-00000002.*has changed") as said:
        assert lockstep.load_weights(tmp_path, model).source == whole
    assert said[0].filename == __file__
    assert _equal(older, model)
    with pytest.raises(lockstep.CheckpointCorrupt, match="has changed"):
        lockstep.load_weights(damaged, model)
    _flip(whole / "model.safetensors")
    with pytest.raises(lockstep.CheckpointCorrupt, match="no checkpoint there is complete"):
        lockstep.load_weights(tmp_path, model)


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("/dev/null",))


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("code", lockstep.CheckpointError, "would need to run code"),
        ("module", lockstep.CheckpointError, "would need to run code"),
        ("truncated", lockstep.CheckpointCorrupt, "not a valid file of torch.save"),
        ("text", lockstep.CheckpointCorrupt, "not a valid file of torch.save"),
        ("list", lockstep.CheckpointError, "no state dict in it.*found a list"),
        ("other dict", lockstep.CheckpointError, "no state dict in it.*'epoch', 'weights'"),
        ("empty folder", lockstep.CheckpointError, "no checkpoint there"),
        ("absent", lockstep.CheckpointError, "no such file or folder"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, content: str, error: type[Exception], message: str) -> None:
    path = tmp_path / "w.pt"
    match content:
        case "code":
            _torch(path, {"weight": Evil()})
        case "module":
            _torch(path, Net())
        case "truncated":
            _torch(path, Net().state_dict())
            path.write_bytes(path.read_bytes()[:-100])
        case "text":
            path.write_text("hello, this is no checkpoint")
        case "list":
            _torch(path, [torch.ones(1)])
        case "other dict":
            _torch(path, {"epoch": 1, "weights": [1]})
        case "empty folder":
            path.mkdir()
    with pytest.raises(error, match=message):
        lockstep.load_weights(path, Net())
