"""Checkpoints that somebody made to do harm, with digests that fit: refused in words, whatever they say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.checkpoint.blocks import TensorPart, cut
from lockstep.checkpoint.encoding import digest_of
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.manifest import MODEL, FileEntry, Manifest, _digest_of
from lockstep.checkpoint.read import read
from lockstep.checkpoint.safetensors import parse_header
from lockstep.checkpoint.storage import Storage
from tests.checkpoints import State, save, save_alone, verify
from tests.harness import collect_outcomes, run_ranks

Header = dict[str, Any]


def _part(content: bytes, name: str = "", start: int = 0, stop: int | None = None) -> TensorPart:
    stop = len(content) if stop is None else stop
    return TensorPart(name, start, stop, tuple(digest_of(content[begin:end]) for begin, end in cut(start, stop)))


def _checkpoint(root: Path) -> Path:
    return save_alone(root, {"a": torch.arange(4.0), "b": torch.arange(6.0).reshape(2, 3)})


def _file(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _forge(folder: Path, name: str, content: bytes, parts: list[TensorPart] | None = None) -> None:
    """Put another file into a checkpoint, so that all digests fit."""
    path = folder / MANIFEST
    manifest = Manifest.from_json(path.read_bytes(), where=str(path))
    entry = FileEntry.of([_part(content)] if parts is None else parts)
    path.write_bytes(replace(manifest, files={**manifest.files, name: entry}).to_json())
    (folder / name).write_bytes(content)


def _forge_model(folder: Path, header: bytes, data: bytes = bytes(40)) -> None:
    content = _file(header, data)
    size = 8 + len(header)
    parts = [_part(content, "", 0, size), _part(content, "a", size, size + 16), _part(content, "b", size + 16)]
    _forge(folder, MODEL, content, [part for part in parts if part.stop <= len(content)])


def _header(**changes: Any) -> bytes:
    header: Header = {
        "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [2, 3], "data_offsets": [16, 40]},
    }
    for name, entry in changes.items():
        header[name] = {**header.get(name, {}), **entry} if isinstance(entry, dict) else entry
    return json.dumps(header).encode()


HEADERS: dict[str, tuple[bytes, str]] = {
    "the data overlap": (_header(b={"data_offsets": [8, 32]}), "begin at byte"),
    "the data leave a gap": (_header(b={"shape": [5], "data_offsets": [20, 40]}), "begin at byte"),
    "the data end early": (_header(b={"shape": [5], "data_offsets": [16, 36]}), "end at byte"),
    "the data end late": (_header(b={"shape": [500], "data_offsets": [16, 2016]}), "end at byte"),
    "an offset is negative": (_header(a={"data_offsets": [-16, 0]}), "malformed"),
    "an offset is no integer": (_header(a={"data_offsets": [0.0, 16]}), "malformed"),
    "an offset is a boolean": (_header(a={"data_offsets": [False, 16]}), "malformed"),
    "three offsets": (_header(a={"data_offsets": [0, 8, 16]}), "malformed"),
    "the end before the beginning": (_header(a={"data_offsets": [16, 0]}), "bytes, which is not"),
    "the shape is another": (_header(a={"shape": [5]}), "bytes, which is not F32 of shape"),
    "the shape is negative": (_header(a={"shape": [-2, -2]}), "malformed"),
    "the shape overflows": (_header(a={"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]}), "has the shape"),
    "the shape has many dimensions": (_header(a={"shape": [1] * 70 + [4]}), "has the shape"),
    "the dtype is unknown": (_header(a={"dtype": "Q4_K"}), "'Q4_K', which torch does not know"),
    "the dtype is a list": (_header(a={"dtype": ["F32"]}), "does not know"),
    "an entry is missing": (_header(a={"dtype": "F32"})[:-1] + b', "c": {}}', "malformed"),
    "an entry is a number": (_header(a=3), "malformed"),
    "a tensor occurs twice": (_header()[:-1] + b', "a": ' + json.dumps(
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}).encode() + b"}", "'a' occurs twice"),
    "another tensor is there": (_header()[:-1] + b', "c": {"dtype": "F32", "shape": [0], "data_offsets": [40, 40]}}',
                                "do not agree"),
    "the metadata are a list": (_header(__metadata__=[]), "metadata"),
    "the metadata are numbers": (_header(__metadata__={"x": 1}), "metadata"),
    "an alias of nothing": (_header(__metadata__={"lockstep.aliases": '{"c": "d"}'}), "metadata do not fit"),
    "an alias that hides a tensor": (_header(__metadata__={"lockstep.aliases": '{"a": "b"}'}), "another's alias"),
    "aliases that are a list": (_header(__metadata__={"lockstep.aliases": "[]"}), "metadata do not fit"),
    "complex but not in pairs": (_header(__metadata__={"lockstep.complex": '["b"]'}), "metadata do not fit"),
    "complex and not there": (_header(__metadata__={"lockstep.complex": '["q"]'}), "metadata do not fit"),
    "nested deep": (b"[" * 100_000, "nested too deep|not a valid safetensors file"),
    "a list": (b"[]", "not an object"),
    "not a number": (_header()[:-1] + b', "c": NaN}', "NaN is not JSON"),
    "not text": (b'{"\xff\xfe": 3}', "not a valid safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    header, message = HEADERS[case]
    folder = _checkpoint(tmp_path)
    _forge_model(folder, header)
    with pytest.raises(lockstep.CheckpointCorrupt, match=rf"model\.safetensors: .*({message})"):
        read(folder)
    lone = tmp_path / "lone.safetensors"
    lone.write_bytes((folder / MODEL).read_bytes())
    if message != "do not agree":  # with which manifest
        with pytest.raises(lockstep.CheckpointCorrupt, match=rf"lone\.safetensors: .*({message})"):
            lockstep.load_weights(lone, nn.Linear(1, 1))


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_of_an_impossible_length_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "huge.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        file.truncate(2**28)  # a hole: no space is used
    with pytest.raises(lockstep.CheckpointCorrupt, match="a header of"):
        lockstep.load_weights(path, nn.Linear(1, 1))


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {},
            optional={
                "dtype": st.sampled_from(["F32", "U8", "BOOL", "X", 3]),
                "shape": st.lists(st.integers(-1, 5), max_size=3) | st.none(),
                "data_offsets": st.lists(st.integers(-4, 40), max_size=3) | st.text(max_size=2),
            },
        )
        | st.none(),
        max_size=3,
    ),
    st.integers(0, 200),
)
def test_any_header_is_accepted_or_refused_and_nothing_else(header: dict[str, Any], size: int) -> None:
    content = _file(json.dumps(header).encode(), b"")
    try:
        parsed = parse_header(content, len(content) + size)
    except ValueError:
        return
    assert sum(one.stop - one.start for one in parsed.tensors) == size


def _change(body: dict[str, Any], path: str, value: Any) -> None:
    *way, last = path.split("/")
    place: Any = body
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value


_PARTS = f"files/{MODEL}/parts"
MANIFESTS: dict[str, tuple[str, Any, str]] = {
    "another format": ("format", 3, "not of format 2"),
    "a step that is text": ("step", "1", "step is '1'"),
    "a step that is true": ("step", True, "step is True"),
    "a negative epoch": ("epoch", -1, "epoch is -1"),
    "no step": ("step", ..., ""),
    "one field more": ("other", 1, ""),
    "no model": (f"files/{MODEL}", ..., "lists no model"),
    "a file elsewhere": ("files/..%evil", {"size": 0, "digest": "", "parts": []}, "is not a valid name for a file"),
    "itself": (f"files/{MANIFEST}", {"size": 0, "digest": "", "parts": []}, "is not a valid name for a file"),
    "parts with a gap": (f"{_PARTS}/1/start", 1, "gaps or overlap"),
    "a part that ends early": (f"{_PARTS}/1/stop", 1, "malformed|gaps or overlap"),
    "a part of petabytes": (f"{_PARTS}/2/stop", 2**60, "digests of b are malformed"),
    "a digest too few": (f"{_PARTS}/1/digests", [], "digests of a are malformed"),
    "a digest that is none": (f"{_PARTS}/1/digests", ["0" * 31], "digests of a are malformed"),
    "a digest that is a number": (f"{_PARTS}/1/digests", [3], ""),
    "a name that is a list": (f"{_PARTS}/1/name", [], "malformed"),
    "the same name twice": (f"{_PARTS}/1/name", "b", "same name"),
    "another size": (f"files/{MODEL}/size", 3, "not that of its parts"),
    "parts that are a number": (_PARTS, 3, ""),
    "files that are a list": ("files", [], ""),
    "versions that are text": ("versions", "x", "wrong types"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    path, value, message = MANIFESTS[case]
    file = _checkpoint(tmp_path) / MANIFEST
    body = json.loads(file.read_bytes())
    del body["digest"]
    _change(body, path, value)
    if "%" in path:
        body["files"] = {name.replace("%", "/"): entry for name, entry in body["files"].items()}
    file.write_text(json.dumps({**body, "digest": _digest_of(body)}))
    with pytest.raises(lockstep.CheckpointCorrupt, match=rf"manifest\.json: not a valid manifest: .*({message})"):
        read(file.parent)


@pytest.mark.parametrize("key", ["step", "files", MODEL, "digest"])
def test_a_key_that_occurs_twice_is_refused(tmp_path: Path, key: str) -> None:
    file = _checkpoint(tmp_path) / MANIFEST
    text = file.read_text()
    start = text.index(f'"{key}": ')
    value, _ = json.JSONDecoder().raw_decode(text[start + len(key) + 4 :])
    file.write_text(text[:start] + f'"{key}": {json.dumps(value)}, ' + text[start:])
    assert json.loads(file.read_text()) == json.loads(text)
    with pytest.raises(lockstep.CheckpointCorrupt, match=f"the key '{key}' occurs twice"):
        read(file.parent)


TREES: dict[str, bytes] = {
    "an unknown kind": b'{"$": "os.system", "items": []}',
    "a kind that is a list": b'{"$": ["dict"]}',
    "a tensor that is not there": b'{"$": "tensor", "name": "x"}',
    "a tensor with bytes too few": b'{"$": "tensor", "dtype": "float32", "shape": [4], "hex": "00000000"}',
    "a tensor with an enormous shape": b'{"$": "tensor", "dtype": "int8", "shape": [4611686018427387904], "hex": ""}',
    "a tensor of code": b'{"$": "tensor", "dtype": "__class__", "shape": [], "hex": ""}',
    "an array that is text": b'{"$": "ndarray", "value": "text"}',
    "a key that can't be one": b'{"$": "dict", "items": [[[1], 2]]}',
    "bytes that are none": b'{"$": "bytes", "hex": "zz"}',
    "nested deep": b"[" * 50_000 + b"]" * 50_000,
    "nested a little too deep": b"[" * 300 + b"]" * 300,
    "a key twice": b'{"a": 1, "a": 2}',
    "not a number": b"[NaN]",
    "not JSON": b"\x80\x04\x95.",
    "a float that is none": b'{"$": "float", "value": []}',
}


@pytest.mark.parametrize("case", TREES)
def test_a_tree_that_makes_no_sense_is_refused(tmp_path: Path, case: str) -> None:
    folder = _checkpoint(tmp_path)
    _forge(folder, "optimizer.json", TREES[case])
    with pytest.raises(lockstep.CheckpointCorrupt, match=r"optimizer\.json"):
        read(folder)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    renamed = _checkpoint(tmp_path).rename(tmp_path / "step-00000009")
    with pytest.raises(lockstep.CheckpointCorrupt, match="holds step 1: it has been renamed"):
        read(renamed)


def test_a_name_with_a_terminals_commands_is_shown_harmlessly(tmp_path: Path) -> None:
    folder = save_alone(tmp_path, {"\x1b[2Jw": torch.ones(3)})
    content = bytearray((folder / MODEL).read_bytes())
    content[-1] ^= 1
    (folder / MODEL).write_bytes(content)
    with pytest.raises(lockstep.CheckpointCorrupt) as caught:
        verify(folder)
    assert "\x1b" not in str(caught.value)
    assert "x1b[2Jw" in str(caught.value)


@pytest.mark.parametrize("way", ["file", "folder", "run"])
def test_links_are_not_followed(tmp_path: Path, way: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    whole = _checkpoint(outside)
    run = tmp_path / "run"
    run.mkdir()
    if way == "run":  # the user's own path may lead over links
        (tmp_path / "link").symlink_to(outside)
        assert lockstep.load_weights(tmp_path / "link", _two()).source.name == whole.name
        return
    if way == "folder":
        (run / whole.name).symlink_to(whole)
        with pytest.raises(lockstep.CheckpointError, match="no checkpoint there"):
            lockstep.load_weights(run, _two())
        with pytest.raises(lockstep.CheckpointCorrupt, match="can't be opened"):
            read(run / whole.name)
        return
    (run / whole.name).mkdir()
    for file in whole.iterdir():
        (run / whole.name / file.name).symlink_to(file)
    with pytest.raises(lockstep.CheckpointCorrupt, match="a link, expected a plain file"):
        read(run / whole.name)


def _two() -> nn.Module:
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(4))
    module.b = nn.Parameter(torch.zeros(2, 3))
    return module


def test_a_draft_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Somebody who may write into the folder guesses a file's name: the save fails, and nothing elsewhere changes."""
    secret = tmp_path / "secret"
    secret.write_text("mine")

    class Guessed(Storage):
        def make_folder(self, path: Path) -> None:
            super().make_folder(path)
            (path / MODEL).symlink_to(secret)

    (error,) = save(tmp_path, [State({"w": torch.ones(3)})], on=[Guessed()])
    assert isinstance(error, lockstep.CheckpointError)
    assert secret.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def _restore(folder: str) -> tuple[int, list[str]]:
    lockstep.init()
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    saved = lockstep.Checkpointer(folder, model=model)
    restored = saved.restore()
    assert restored is not None
    return restored.step, list(restored.skipped)


def _save_two(folder: str) -> None:
    lockstep.init()
    torch.manual_seed(1)
    saved = lockstep.Checkpointer(folder, model=nn.Linear(3, 2))
    for _ in range(2):
        saved.step += 1
        saved.save()


def _bad_rng(folder: Path) -> None:
    _forge(folder, "rng.json", b'[{"python": [3, "", null], "numpy": [], "torch": "", "cuda": null}, {}]')


def _bad_orders(folder: Path) -> None:
    _forge(folder, "gradients.json", b'{"orders": {"": ["weight", 3]}}')


def _bad_scale(folder: Path) -> None:
    _forge(folder, "precision.json", b'{"loss_scale": {"scale": 3.0, "taken": 0, "skipped": 0}}')


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "another user's folder": (lambda folder: os.chown(folder, 12345, -1), "belongs to user 12345"),
    "another user's manifest": (lambda folder: os.chown(folder / MANIFEST, 12345, -1), "belongs to user 12345"),
    "another user's file": (lambda folder: os.chown(folder / MODEL, 12345, -1), "belongs to user 12345"),
    "no random number generators": (_bad_rng, "not the states of random number generators"),
    "an order of numbers": (_bad_orders, "not the orders in which gradients come"),
    "a loss scale of 3": (_bad_scale, "not the state of a loss scale"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", HOSTILE)
def test_all_ranks_skip_a_hostile_checkpoint(tmp_path: Path, case: str) -> None:
    harm, message = HOSTILE[case]
    if "user" in case and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    run_ranks(_save_two, 2, str(tmp_path))
    harm(tmp_path / "step-00000002")
    outcomes = collect_outcomes(_restore, 2, str(tmp_path))
    for outcome in outcomes:
        assert outcome.ok, outcome.traceback
        step, skipped = outcome.value
        assert step == 1
        assert message in skipped[0]
