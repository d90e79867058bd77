"""Whatever changes on the disk is found, by file and tensor, and the checkpoint before it is used."""

from __future__ import annotations

import random
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.read import find_damage, read_manifest
from tests.harness import run_ranks

_PAGE = 4096
_SEED = 6


class Net(nn.Module):
    """Tensors of many sizes: one is more than a block, some are a few bytes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.body = nn.Sequential(nn.Linear(64, 90), nn.BatchNorm1d(90), nn.Linear(90, 7))


@dataclass(frozen=True)
class Damage:
    """What happens to a file: bytes from ``start`` on are replaced, or it ends there."""

    file: str
    start: int
    #: None: the file is cut off.
    replacement: bytes | None


def _make(folder: str, rows: int) -> lockstep.Checkpointer:
    torch.manual_seed(2)
    model = Net(rows)
    optimizer = torch.optim.AdamW(model.parameters())
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        saved.save()
    return saved


def _flips(folder: Path, count: int) -> Iterator[Damage]:
    """Single bits, in every file as often as its size says, and in each file at least sometimes."""
    draw = random.Random(_SEED)
    files = sorted(path for path in folder.iterdir())
    sizes = [path.stat().st_size for path in files]
    for number in range(count):
        path = files[number % len(files)] if number % 4 == 0 else draw.choices(files, sizes)[0]
        at = draw.randrange(path.stat().st_size)
        with open(path, "rb") as file:
            file.seek(at)
            (byte,) = file.read(1)
        yield Damage(path.name, at, bytes([byte ^ 1 << draw.randrange(8)]))


def _zeroed_pages(folder: Path, count: int) -> Iterator[Damage]:
    draw = random.Random(_SEED)
    files = sorted(path for path in folder.iterdir())
    while count:
        path = draw.choices(files, [file.stat().st_size for file in files])[0]
        content = path.read_bytes()
        start = draw.randrange(0, len(content), _PAGE)
        page = content[start : start + _PAGE]
        zeros = len(page) - len(page.lstrip(b"\0"))
        if zeros < len(page):  # else nothing changes
            count -= 1
            yield Damage(path.name, start + zeros, bytes(len(page) - zeros))


def _truncations(folder: Path, every: int) -> Iterator[Damage]:
    for path in sorted(folder.iterdir()):
        for end in range(0, path.stat().st_size, every):
            yield Damage(path.name, end, None)


def _apply(path: Path, damage: Damage) -> bytes:
    """Do it; the bytes that were there."""
    with open(path, "r+b") as file:
        file.seek(damage.start)
        before = file.read(None if damage.replacement is None else len(damage.replacement))
        file.seek(damage.start)
        if damage.replacement is None:
            file.truncate()
        else:
            file.write(damage.replacement)
    return before


def _undo(path: Path, damage: Damage, before: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(damage.start)
        file.write(before)


def _named(folder: Path, damage: Damage) -> set[str]:
    """What a message must say: the file, and the tensor if there is one at that place."""
    if damage.file == MANIFEST:
        return {MANIFEST}
    parts = read_manifest(folder).files[damage.file].parts
    name = parts[bisect_right([part.start for part in parts], damage.start) - 1].name
    return {damage.file, f"tensor {name}" if name else damage.file}


def _restore_all(folder: str, rows: int, kind: str, count: int) -> dict[str, int]:
    lockstep.init()
    saved = _make(folder, rows)
    newest = Path(saved.folder) / "step-00000002"
    cases = {"flips": _flips, "pages": _zeroed_pages, "truncations": _truncations}[kind](newest, count)
    found: Counter[str] = Counter()
    for damage in cases:
        words = _named(newest, damage)
        before = _apply(newest / damage.file, damage)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            restored = saved.restore()
        assert restored is not None
        assert restored.step == 1, f"not found: {damage}"
        (message,) = restored.skipped
        assert all(word in message for word in words), f"{damage}: {message}, expected {words}"
        _undo(newest / damage.file, damage, before)
        found["tensors" if any(word.startswith("tensor ") for word in words) else "headers, JSON"] += 1
    assert find_damage(newest) == []
    restored = saved.restore()
    assert restored is not None
    assert restored.step == 2
    return found


@pytest.mark.parametrize(("kind", "count"), [("flips", 15), ("pages", 10), ("truncations", 16 * _PAGE)])
def test_some_damage_is_found_and_the_older_one_used(tmp_path: Path, kind: str, count: int) -> None:
    (found,) = run_ranks(_restore_all, 1, str(tmp_path), 500, kind, count)
    assert found["tensors"] >= 5
    assert found["headers, JSON"] >= 1


@pytest.mark.campaign
@pytest.mark.parametrize(("kind", "count"), [("flips", 1000), ("pages", 200), ("truncations", _PAGE)])
def test_all_damage_is_found_and_the_older_one_used(tmp_path: Path, kind: str, count: int) -> None:
    rows = 4000 if kind == "truncations" else 18_000  # of 64 floats: with 18,000 one tensor is more than one block
    (found,) = run_ranks(_restore_all, 1, str(tmp_path), rows, kind, count, timeout=500)
    print(f"\n{kind}: {sum(found.values())} of {sum(found.values())} found and named, {dict(found)}")
    assert kind == "truncations" or sum(found.values()) == count


def _resume_with_two(folder: str, kind: str) -> tuple[int, str]:
    lockstep.init()
    saved = _make(folder, 500)
    newest = Path(saved.folder) / "step-00000002"
    damage = next(iter({"flips": _flips, "pages": _zeroed_pages}[kind](newest, 3)))
    lockstep.world().barrier()
    if lockstep.world().is_main:
        _apply(newest / damage.file, damage)
    lockstep.world().barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        restored = saved.restore()
    with pytest.raises(lockstep.CheckpointCorrupt):
        saved.restore(strict=True)
    assert restored is not None
    return restored.step, restored.skipped[0]


@pytest.mark.parametrize("kind", ["flips", "pages"])
def test_all_ranks_use_the_older_one(tmp_path: Path, kind: str) -> None:
    one, two = run_ranks(_resume_with_two, 2, str(tmp_path), kind)
    assert one == two
    assert one[0] == 1


def test_every_damaged_tensor_is_listed(tmp_path: Path) -> None:
    run_ranks(_restore_all, 1, str(tmp_path), 500, "pages", 1)
    newest = tmp_path / "step-00000002"
    content = bytearray((newest / "optimizer.safetensors").read_bytes())
    for part in read_manifest(newest).files["optimizer.safetensors"].parts:
        content[part.start] ^= 1
    (newest / "optimizer.safetensors").write_bytes(content)
    (newest / "rng.json").unlink()
    said = find_damage(newest)
    parts = read_manifest(newest).files["optimizer.safetensors"].parts
    assert len(said) == len(parts) + 1
    for part in parts:
        assert any(f"optimizer.safetensors: tensor {part.name}: its content" in line for line in said) or not part.name
    assert any("rng.json: No such file" in line for line in said)
