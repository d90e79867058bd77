"""load_weights: the folders and files that other libraries write, in their layouts; and hostile ones."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)


State = dict[str, torch.Tensor]


def _equal(one: nn.Module, two: nn.Module) -> bool:
    first, second = one.state_dict(), two.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def _state(seed: int = 1) -> tuple[Net, State]:
    torch.manual_seed(seed)
    trained = Net()
    return trained, trained.state_dict()


def _shards(folder: Path, state: State, kind: str) -> Path:
    """Three files and an index, as ``save_pretrained`` writes them."""
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    folder.mkdir(exist_ok=True)
    places: dict[str, str] = {}
    for number in range(3):
        name = f"{stem}-{number + 1:05d}-of-00003.{suffix}"
        part = {key: value for at, (key, value) in enumerate(state.items()) if at % 3 == number}
        if suffix == "bin":
            torch.save(part, folder / name)
        else:
            safetensors.torch.save_file(part, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(part, name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def _beside(folder: Path) -> Path:
    """What else lies in such folders."""
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md"):
        (folder / name).write_text("{}")
    return folder


def _accelerate(folder: Path, state: State) -> Path:
    """``accelerator.save_state`` of a replica."""
    _one(folder / "model.safetensors", {f"module.{name}": value for name, value in state.items()})
    torch.save({}, folder / "optimizer.bin")
    (folder / "random_states_0.pkl").write_bytes(b"never read")
    return folder


def _cache(root: Path, state: State) -> Path:
    """``~/.cache/huggingface/hub/models--…``: links to files that are named by their content."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    _shards(blobs, state, "safetensors")
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def _one(path: Path, state: State) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        torch.save(state, path)
    return path.parent


def _both(folder: Path, state: State) -> Path:
    wrong = {name: torch.zeros_like(value) for name, value in state.items()}
    _one(folder / "pytorch_model.bin", wrong)
    return _one(folder / "model.safetensors", state)


LAYOUTS: dict[str, Callable[[Path, State], Path]] = {
    "model.safetensors": lambda at, state: _one(_beside(at) / "model.safetensors", state),
    "pytorch_model.bin": lambda at, state: _one(_beside(at) / "pytorch_model.bin", state),
    "safetensors goes before bin": _both,
    "shards of safetensors": lambda at, state: _shards(_beside(at), state, "safetensors").parent,
    "shards of torch": lambda at, state: _shards(_beside(at), state, "bin").parent,
    "the index itself": lambda at, state: _shards(at, state, "safetensors"),
    "the index of torch's itself": lambda at, state: _shards(at, state, "bin"),
    "accelerate": lambda at, state: _accelerate(at / "state", state),
    "a snapshot in the cache": _cache,
    "a link to a folder": lambda at, state: _linked(at, _one(at / "m" / "model.safetensors", state)),
    "diffusers": lambda at, state: _one(_beside(at) / "diffusion_pytorch_model.safetensors", state),
}


def _linked(at: Path, folder: Path) -> Path:
    (at / "link").symlink_to(folder, target_is_directory=True)
    return at / "link"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_another_library_is_loaded(tmp_path: Path, layout: str) -> None:
    trained, state = _state()
    source = LAYOUTS[layout](tmp_path, state)
    model = Net()
    report = lockstep.load_weights(source, model)
    assert _equal(trained, model)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())


def test_the_position_in_a_file_is_said_by_key(tmp_path: Path) -> None:
    trained, state = _state()
    path = tmp_path / "w.pt"
    nested = {"net": state, "acc": 93.1, "ema": {"params": state, "decay": 0.9}, "a.b": {"c": state}}
    torch.save(nested, path)
    for key in ("net", "ema.params", "a.b.c"):
        model = Net()
        lockstep.load_weights(path, model, key=key)
        assert _equal(trained, model)
    with pytest.raises(lockstep.CheckpointError, match=r"choose one: key='net' or key='ema.params' or key='a.b.c'"):
        lockstep.load_weights(path, Net())
    with pytest.raises(lockstep.CheckpointError, match=r"no value under key='nett'.*'net', 'ema.params', 'a.b.c'"):
        lockstep.load_weights(path, Net(), key="nett")
    with pytest.raises(lockstep.CheckpointError, match=r"no state dict in it.*found a float"):
        lockstep.load_weights(path, Net(), key="acc")
    with pytest.raises(lockstep.CheckpointError, match=r"key='net' has no meaning here.*prefix="):
        lockstep.load_weights(_one(tmp_path / "model.safetensors", state) / "model.safetensors", Net(), key="net")


def test_a_prefix_that_would_fit_is_named(tmp_path: Path) -> None:
    trained, state = _state()
    lightning = {f"model.{name}": value for name, value in state.items()} | {"loss.weight": torch.ones(2)}
    path = tmp_path / "epoch=1.ckpt"
    torch.save({"state_dict": lightning, "hyper_parameters": {"lr": 0.1}}, path)
    model = Net()
    with pytest.raises(lockstep.CheckpointMismatch, match=r"prefix='model\.' would make all names of the model fit"):
        lockstep.load_weights(path, model)
    lockstep.load_weights(path, model, prefix="model.")
    assert _equal(trained, model)


class Deep(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda module: module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(Net()) for _ in range(2))
        self.head = wrap(nn.Linear(2, 2))


class _Compiled(nn.Module):
    """As ``torch.compile`` keeps a module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_wrappers_anywhere_in_the_names_make_no_difference(tmp_path: Path) -> None:
    torch.manual_seed(3)
    wrapped = {
        "plain": Deep(),
        "regional compile": Deep(_Compiled),
        "all of it": _Compiled(Deep(_Compiled)),
        "replicas inside": nn.DataParallel(Deep(nn.DataParallel)),
        "both": nn.DataParallel(Deep(lambda module: nn.DataParallel(_Compiled(module)))),
    }
    names = list(Deep().state_dict())
    for one, trained in wrapped.items():
        path = tmp_path / f"{one}.pt"
        torch.save(trained.state_dict(), path)
        for other, into in wrapped.items():
            for old in into.state_dict().values():
                old.fill_(9)
            before = list(into.state_dict())
            lockstep.load_weights(path, into)
            saved = torch.load(path, weights_only=True)
            assert list(into.state_dict()) == before
            assert len(before) == len(names)
            for mine, value in zip(into.state_dict().values(), saved.values(), strict=True):
                assert torch.equal(mine, value), (one, other)


class Inside(nn.Module):
    """A module of the user's own with the wrapper's word in its names."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))


def test_a_submodule_that_is_called_module_is_no_wrapper(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    for trained, model in (
        (Inside(), Inside()),  # here module.weight and weight are two tensors
        (nn.DataParallel(Inside()), Inside()),
        (nn.ModuleDict({"module": nn.Linear(2, 2)}), nn.ModuleDict({"module": nn.Linear(2, 2)})),
    ):
        torch.save(trained.state_dict(), path)
        lockstep.load_weights(path, model)
        assert all(map(torch.equal, model.state_dict().values(), trained.state_dict().values()))


class Text(nn.Module):
    """As transformers' models: a tied head, a buffer that older versions saved, another dtype in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.lm_head = nn.Linear(3, 4, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("position_ids", torch.arange(8), persistent=False)


def test_tied_heads_old_buffers_and_half_precision(tmp_path: Path) -> None:
    file = {"embed.weight": torch.randn(4, 3, dtype=torch.float16), "position_ids": torch.arange(16)}
    model = Text()
    report = lockstep.load_weights(_one(tmp_path / "model.safetensors", file), model)
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    assert torch.equal(model.lm_head.weight, file["embed.weight"].float())
    assert model.lm_head.weight is model.embed.weight
    assert dict(model.named_buffers())["position_ids"].tolist() == list(range(8)), "the model's own"


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.15 says that it does
def test_sparse_buffers_are_loaded_as_torch_loads_them(tmp_path: Path) -> None:
    def make(scale: float) -> nn.Linear:
        model = nn.Linear(3, 3)
        model.register_buffer("graph", (torch.eye(3) * scale).to_sparse())
        return model

    trained, model = make(3.0), make(1.0)
    torch.save(trained.state_dict(), tmp_path / "w.pt")
    lockstep.load_weights(tmp_path / "w.pt", model)
    assert torch.equal(model.state_dict()["graph"].to_dense(), torch.eye(3) * 3)
    assert torch.equal(model.weight, trained.weight)


def test_torch_says_in_full_why_it_refuses_a_class_and_how_to_allow_it(tmp_path: Path) -> None:
    trained, state = _state()
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": state, "args": argparse.Namespace(lr=0.1)}, path)
    model = Net()
    with pytest.raises(lockstep.CheckpointError, match="would need to run code") as caught:
        lockstep.load_weights(path, model)
    assert isinstance(caught.value.__cause__, Exception)
    assert str(caught.value.__cause__) in str(caught.value)
    assert "argparse.Namespace" in str(caught.value)
    with torch.serialization.safe_globals([argparse.Namespace]):
        lockstep.load_weights(path, model)
    assert _equal(trained, model)


def _index(at: Path, change: Callable[[dict[str, str]], Any]) -> Path:
    index = _shards(at, _state()[1], "safetensors")
    content = json.loads(index.read_text())
    changed = change(content["weight_map"])
    if isinstance(changed, str):
        index.write_text(changed)
    else:
        index.write_text(json.dumps(content))
    return index


def _empty(at: Path, *names: str) -> Path:
    for name in names:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(b"")
    return at


def _script(at: Path) -> Path:
    module = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    torch.jit.save(module, at / "w.pt")
    return at / "w.pt"


def _fifo(at: Path) -> Path:
    os.mkfifo(at / "w.pt")
    return at / "w.pt"


def _without(at: Path, shard: str) -> Path:
    index = _shards(at, _state()[1], "safetensors")
    (at / shard).unlink()
    return index


def _other_shape(at: Path) -> Path:
    state = _state()[1]
    return _shards(at, {**state, "head.bias": torch.zeros(7)}, "bin")


def _sparse_file(at: Path) -> Path:
    index = at / "model.safetensors.index.json"
    with open(index, "wb") as file:
        file.truncate(2**40)
    return index


REFUSED: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a shard is missing": (
        lambda at: _without(at, "model-00002-of-00003.safetensors"),
        "CheckpointError",
        r"index.json: 1 of its 3 shards are missing: model-00002-of-00003.safetensors; fetch them again",
    ),
    "a shape differs": (
        _other_shape, "CheckpointMismatch", r"head.bias: shape \[7\] in the checkpoint, \[2\] in the model",
    ),
    "a tensor in another shard": (
        lambda at: _index(at, lambda places: places.update({"head.bias": places["body.weight"]})),
        "CheckpointCorrupt",
        r"model-00001-of-00003.safetensors: model.safetensors.index.json lists head.bias, which it lacks",
    ),
    "a name twice": (
        lambda at: _index(at, lambda _: '{"weight_map": {"a": "x.bin", "a": "y.bin"}}'),
        "CheckpointCorrupt",
        "not an index of shards: the key 'a' occurs twice",
    ),
    "a way out of the folder": (
        lambda at: _index(at, lambda places: places.update({"head.bias": "../../etc/passwd"})),
        "CheckpointCorrupt",
        r"'head.bias' is listed as in '../../etc/passwd', which is not a file beside the index",
    ),
    "an absolute path": (
        lambda at: _index(at, lambda places: places.update({"head.bias": "/etc/passwd"})),
        "CheckpointCorrupt",
        "not a file beside the index",
    ),
    "the folder above": (
        lambda at: _index(at, lambda places: places.update({"head.bias": ".."})),
        "CheckpointCorrupt",
        "not a file beside",
    ),
    "an index of an index": (
        lambda at: _index(at, lambda places: places.update({"head.bias": "model.safetensors.index.json"})),
        "CheckpointCorrupt",
        "not a file beside the index",
    ),
    "no weight map": (lambda at: _index(at, lambda _: "[1]"), "CheckpointCorrupt", "expected {.weight_map"),
    "no file names": (
        lambda at: _index(at, lambda _: '{"weight_map": {"a": 3}}'), "CheckpointCorrupt", "expected {.weight_map",
    ),
    "no JSON": (lambda at: _index(at, lambda _: "{"), "CheckpointCorrupt", "not an index of shards"),
    "deep JSON": (lambda at: _index(at, lambda _: "[" * 10**6), "CheckpointCorrupt", "nested too deep"),
    "a terabyte of JSON": (_sparse_file, "CheckpointCorrupt", "no index has more than"),
    "several models": (
        lambda at: _empty(at, "model.safetensors", "model_1.safetensors"), "CheckpointError", "of several models",
    ),
    "shards without an index": (
        lambda at: _empty(at, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        "CheckpointError",
        "if these are shards, add their index",
    ),
    "torch's sharded files": (lambda at: _empty(at, ".metadata", "__0_0.distcp"), "CheckpointError", "dcp_to_torch"),
    "the cache's folder": (
        lambda at: _empty(at, "blobs/0", "refs/main", "snapshots/abc/x"), "CheckpointError", r"its snapshots \(abc\)",
    ),
    "TensorFlow's": (lambda at: _empty(at, "tf_model.h5", "config.json"), "CheckpointError", "found config.json, tf_m"),
    "TorchScript": (_script, "CheckpointError", "a TorchScript archive"),
    "a pipe": (_fifo, "CheckpointError", "not a plain file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore:`torch.jit")  # the category is not the same in all versions
def test_what_does_not_fit_is_refused_by_file_and_name(tmp_path: Path, case: str) -> None:
    make, error, message = REFUSED[case]
    with pytest.raises(lockstep.CheckpointError, match=message) as caught:
        lockstep.load_weights(make(tmp_path), Net())
    assert caught.type.__name__ == error
    assert str(tmp_path) in str(caught.value), "it says which file"


def test_a_model_that_cannot_take_weights_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(lockstep.CheckpointError, match=r"body.weight is on the meta device.*to_empty"):
        lockstep.load_weights(tmp_path / "absent", model)
