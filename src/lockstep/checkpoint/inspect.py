"""Inspect a run's checkpoints from outside: list, verify, prune, and export a model as one file.

``lockstep checkpoint`` is made of these functions, which need no world.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch

from lockstep.checkpoint import folders
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.read import (
    Unsound,
    find_damage,
    newest_complete,
    read,
    read_manifest,
    read_model,
    why_unsound,
)
from lockstep.checkpoint.retention import Entry, Retention, entries, superfluous
from lockstep.errors import CheckpointCorrupt, CheckpointError
from lockstep.text import listed

Format = Literal["torch", "safetensors"]

_SUFFIXES: dict[str, Format] = {
    ".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch",
}  # fmt: skip
#: The types that torch.load(weights_only=True) accepts besides tensors.
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint's manifest, or the damage to it."""

    folder: Path
    manifest: Manifest | None
    damage: str | None = None

    @property
    def unsound(self) -> str:
        """Why no run resumes from it by itself, as its manifest says; empty if it is sound."""
        return "" if self.manifest is None else why_unsound(self.folder, self.manifest)

    @property
    def size(self) -> int:
        """The total bytes of its files, from its manifest."""
        return 0 if self.manifest is None else sum(entry.size for entry in self.manifest.files.values())


def find(path: Path, *, step: int | None = None) -> list[Path]:
    """List the checkpoints at a path, newest first: those in a run's folder, or the one whose folder it is.

    Args:
        path: the folder of a run or of one checkpoint.
        step: list only checkpoints of this step.

    Raises:
        CheckpointError: there are none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    path = path.resolve()
    found = [path] if _is_checkpoint(path) else folders.checkpoints(path)
    wanted = [folder for folder in found if step is None or folders.step_of(folder) == step]
    if not wanted:
        steps = listed([str(folders.step_of(folder)) for folder in found])
        others = f"; there are checkpoints of the steps {steps}" if found else ""
        raise CheckpointError(f"{path}: no checkpoint there{'' if step is None else f' of step {step}'}{others}")
    return wanted


def _is_checkpoint(path: Path) -> bool:
    is_named_so = folders.step_in(path.name) is not None
    return is_named_so and (not folders.checkpoints(path) or (path / MANIFEST).exists())


def glance(folder: Path) -> CheckpointSummary:
    """Read the manifest of a checkpoint, and nothing else.

    Raises:
        CheckpointGone: it has just been removed.
    """
    try:
        return CheckpointSummary(folder, read_manifest(folder))
    except CheckpointCorrupt as error:
        return CheckpointSummary(folder, None, str(error))


@dataclass(frozen=True)
class PruningPlan:
    """The checkpoints that a pruning keeps and removes."""

    #: The newest checkpoint that is complete, and sound if one is, which stays whatever the rule says.
    newest: Path
    #: Descriptions of newer checkpoints, which are damaged or not sound and stay as well.
    damaged: tuple[str, ...]
    unsound: tuple[str, ...]
    #: The checkpoints that stay.
    kept: tuple[Entry, ...]
    superfluous: tuple[Entry, ...]


def plan_pruning(root: Path, rule: Retention) -> PruningPlan:
    """Plan a pruning, after finding the newest complete checkpoint by reading every byte of it.

    Raises:
        CheckpointError: there are no checkpoints, or none is complete, so that none may be removed.
    """

    def refuse_damage(folder: Path) -> None:
        found = find_damage(folder)
        if found:
            raise CheckpointCorrupt("; ".join(found))

    def refuse_unsound(folder: Path) -> None:
        manifest = read_manifest(folder)
        if not manifest.is_sound:
            raise Unsound(folder, manifest)
        refuse_damage(folder)

    search = newest_complete(lambda: find(root), refuse_unsound)
    if search.found is None and search.unsound:
        search = newest_complete(lambda: find(root), refuse_damage)
    wrong = tuple(search.damaged.values())
    if search.found is None:
        raise CheckpointError(f"{root}: no checkpoint there is complete, so nothing is removed: {'; '.join(wrong)}")
    folder = search.found[0]
    listed = entries(folder.parent, good=(folder.name,), damaged=[other.name for other in search.damaged])
    gone = superfluous(listed, rule)
    kept = tuple(entry for entry in listed if entry not in gone)
    return PruningPlan(folder, wrong, tuple(search.unsound.values()), kept, tuple(gone))


def leftovers(root: Path) -> Iterator[Path]:
    """List the drafts that a save is writing or a killed save has left; the next save removes the latter."""
    return (path for path in sorted(root.glob("step-*.tmp-*")) if path.is_dir())


# One file out of a checkpoint, for tools that know nothing of lockstep.


@dataclass(frozen=True)
class Exported:
    """The file that :func:`export` wrote."""

    path: Path
    #: The checkpoint it came from.
    source: Path
    format: Format
    tensors: int
    size: int
    #: Descriptions of newer checkpoints that are damaged.
    skipped: tuple[str, ...] = ()
    #: Descriptions of newer checkpoints that are not sound, or of the requested one if it is not.
    unsound: tuple[str, ...] = ()


def format_of(path: Path) -> Format | None:
    """Return the format that a file's name asks for, or None."""
    return _SUFFIXES.get(path.suffix)


def export(
    path: Path,
    output: Path,
    *,
    format: Format,
    step: int | None = None,
    extra: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the model of the newest complete and sound checkpoint into one file, which appears complete or not at all.

    Tensors keep their dtypes. Tied ones, which the checkpoint holds once, are in a safetensors file under each name.

    Args:
        path: the folder of a run or of one checkpoint.
        output: the file.
        format: ``"torch"``: a state dict that ``torch.load(…, weights_only=True)`` reads; ``"safetensors"``.
        extra: the name of an object of ``Checkpointer(extra=…)`` to export instead of the model.
        step: export a checkpoint of this step, sound or not.
        overwrite: replace an existing file.

    Raises:
        CheckpointCorrupt: none of them is complete.
        CheckpointError: there are no checkpoints, or none that is sound; the file exists; there is no such
            object; or its state does not fit the format.
        OSError: the file can't be written.
    """
    if output.exists() and not overwrite:
        raise CheckpointError(f"{output} already exists: choose another name, or overwrite it")

    chosen = step is not None or _is_checkpoint(path.resolve())

    def read_state(folder: Path) -> tuple[str, Mapping[str, Any]]:
        words = why_unsound(folder, read_manifest(folder))
        if extra is None:
            return words, read_model(folder, only_sound=not chosen)
        return words, _extra(folder, extra, only_sound=not chosen)

    search = newest_complete(lambda: find(path, step=step), read_state)
    if search.found is None:
        gone = CheckpointError(f"{path}: its checkpoints have just been removed")
        raise search.nothing(path, remedy="give the path of one of them, or its step, to take it all the same") or gone
    source, (words, read_of_it) = search.found
    state = dict(read_of_it)
    _refuse_what_needs_code(state, f"{source.name}: {'the model' if extra is None else f'extra {extra!r}'}")
    if format == "safetensors":
        others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
        if others:
            raise CheckpointError(
                f"{source.name}: {listed(others)}: not tensors, and safetensors holds nothing else; export to "
                "a torch file (.pt)"
            )
    _write_whole(output, lambda path: _write(state, path, format))
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    damaged, lost = tuple(search.damaged.values()), (*search.unsound.values(), *([words] if words else []))
    return Exported(output, source, format, tensors, output.stat().st_size, damaged, lost)


def _extra(folder: Path, name: str, *, only_sound: bool) -> Mapping[str, Any]:
    saved = read(folder, only_sound=only_sound).parts.get("extra", {})
    if name not in saved:
        there = f"it has {', '.join(map(repr, saved))}" if saved else "it has none"
        raise CheckpointError(f"{folder}: no extra object {name!r} was saved; {there}")
    state = saved[name]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{folder}: extra {name!r} is a {type(state).__name__}, not a dict of tensors")
    return state


def _refuse_what_needs_code(value: Any, where: str) -> None:
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _refuse_what_needs_code(key, f"{where}, a key")
            _refuse_what_needs_code(item, f"{where}, {key}")
    elif type(value) in (list, tuple):
        for item in value:
            _refuse_what_needs_code(item, where)
    else:
        kind = type(value)
        raise CheckpointError(
            f"{where}: a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) would refuse"
        )


def _write(state: dict[str, Any], path: Path, format: Format) -> None:
    if format == "torch":
        torch.save(state, path)
    else:
        seen: set[int] = set()
        tensors = {}
        for name, value in state.items():
            pointer = value.untyped_storage().data_ptr()
            tensors[name] = value.clone() if pointer in seen else value.contiguous()
            seen.add(pointer)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def _write_whole(output: Path, write: Callable[[Path], None]) -> None:
    temporary = output.with_name(f".{output.name}.tmp-{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        write(temporary)
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
