"""Write the model of a checkpoint in a form that tools read which know nothing of lockstep.

Each form is an object with the few things that differ from one to another. A file appears complete or not at all. In a
folder, what says which files there are comes last: the index of Hugging Face's form, and ``.metadata`` of torch's.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Protocol

import safetensors.torch
import torch

from lockstep.checkpoint.inspect import find, is_checkpoint
from lockstep.checkpoint.read import newest_complete, read, read_manifest, read_model, why_unsound
from lockstep.errors import CheckpointError
from lockstep.text import listed

State = dict[str, Any]

#: Bytes of a file of a model in several, as Hugging Face's libraries have it by default.
SHARD_BYTES = 5 * 10**9
#: The types that torch.load(weights_only=True) accepts besides tensors.
_PLAIN = (type(None), bool, int, float, str, bytes)
_INDEX = "model.safetensors.index.json"
#: The files of a model in Hugging Face's form.
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class Form(Protocol):
    """What is written."""

    @property
    def words(self) -> str:
        """Who reads it."""
        ...

    def refuse_unfit(self, state: State, where: str) -> None:
        """Check that it can hold ``state``.

        Raises:
            CheckpointError: it can't.
        """
        ...

    def present(self, output: Path) -> Sequence[Path]:
        """Return what there is that writing would replace."""
        ...

    def write(self, state: State, output: Path) -> Sequence[Path]:
        """Write ``state`` and return the files."""
        ...


@dataclass(frozen=True)
class Exported:
    """What :func:`export` wrote."""

    path: Path
    #: The checkpoint it came from.
    source: PurePath
    form: Form
    tensors: int
    size: int
    files: int
    #: Descriptions of newer checkpoints that are damaged.
    skipped: tuple[str, ...] = ()
    #: Descriptions of newer checkpoints that are not sound, or of the requested one if it is not.
    unsound: tuple[str, ...] = ()


def export(
    path: PurePath,
    output: Path,
    *,
    form: Form,
    step: int | None = None,
    extra: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the model of the newest complete and sound checkpoint.

    Tensors keep their dtypes. Tied ones, which the checkpoint holds once, are in files of safetensors under each name.

    Args:
        path: the folder of a run or of one checkpoint.
        output: the file or the folder.
        form: what to write.
        extra: the name of an object of ``Checkpointer(extra=…)`` to export instead of the model.
        step: export a checkpoint of this step, sound or not.
        overwrite: replace what is there.

    Raises:
        CheckpointCorrupt: none of them is complete.
        CheckpointError: there are no checkpoints, or none that is sound; there is something to be replaced; there is no
            such object; or its state does not fit the form.
        OSError: a file can't be written.
    """
    if not overwrite and (there := form.present(output)):
        raise CheckpointError(f"{there[0]} already exists: choose another name, or overwrite it")

    chosen = step is not None or is_checkpoint(path)

    def read_state(folder: PurePath) -> tuple[str, Mapping[str, Any]]:
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
    form.refuse_unfit(state, f"{source.name}: {'the model' if extra is None else f'extra {extra!r}'}")
    files = form.write(state, output)
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    damaged, lost = tuple(search.damaged.values()), (*search.unsound.values(), *([words] if words else []))
    size = sum(file.stat().st_size for file in files)
    return Exported(output, source, form, tensors, size, len(files), damaged, lost)


def _extra(folder: PurePath, name: str, *, only_sound: bool) -> Mapping[str, Any]:
    saved = read(folder, only_sound=only_sound).parts.get("extra", {})
    if name not in saved:
        there = f"it has {', '.join(map(repr, saved))}" if saved else "it has none"
        raise CheckpointError(f"{folder}: no extra object {name!r} was saved; {there}")
    state = saved[name]
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{folder}: extra {name!r} is a {type(state).__name__}, not a dict of tensors")
    return state


# Forms ---------------------------------------------------------------------------------------------------------------


class TorchFile:
    """A state dict in one file, which ``torch.load(…, weights_only=True)`` reads."""

    words = "torch"

    def refuse_unfit(self, state: State, where: str) -> None:
        """See :class:`Form`."""
        _refuse_what_needs_code(state, where)

    def present(self, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        return [output] if output.exists() else []

    def write(self, state: State, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        return [_written(output, lambda path: torch.save(state, path))]


class SafetensorsFile:
    """Tensors in one file of safetensors."""

    words = "safetensors"

    def refuse_unfit(self, state: State, where: str) -> None:
        """See :class:`Form`."""
        _refuse_all_but_tensors(state, where, "safetensors")

    def present(self, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        return [output] if output.exists() else []

    def write(self, state: State, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        return [_written_tensors(state, output)]


class SafetensorsShards:
    """A folder as ``from_pretrained`` of Hugging Face's libraries reads it: several files of safetensors and an index.

    A model that fits into one file has no index, as theirs.

    Args:
        most: bytes of a file; a tensor that is larger has one of its own.
    """

    words = "Hugging Face"

    def __init__(self, most: int = SHARD_BYTES) -> None:
        self._most = most

    def refuse_unfit(self, state: State, where: str) -> None:
        """See :class:`Form`."""
        _refuse_all_but_tensors(state, where, "safetensors")

    def present(self, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        # (Others of their files, an average of weights or an adapter, are none of this model's.)
        files = [file for file in sorted(output.glob("model*.safetensors")) if _MODEL_FILE.fullmatch(file.name)]
        return [*files, *output.glob(_INDEX)]

    def write(self, state: State, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        _make_folder(output)
        old, shards = self.present(output), [*self._shards(state)]
        count = len(shards)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        files = [output / name for name in (names if count > 1 else ["model.safetensors"])]
        (output / _INDEX).unlink(missing_ok=True)  # from here on nobody takes the old files for a whole
        for shard, file in zip(shards, files, strict=True):
            _written_tensors(shard, file)
        for file in {*old} - {*files, output / _INDEX}:
            file.unlink()
        if count > 1:
            size = sum(map(_size, state.values()))
            places = {name: file.name for shard, file in zip(shards, files, strict=True) for name in shard}
            index = {"metadata": {"total_size": size}, "weight_map": places}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            files.append(_written(output / _INDEX, lambda path: path.write_text(text)))
        return files

    def _shards(self, state: State) -> Iterator[State]:
        shard: State = {}
        for name, value in state.items():
            if shard and sum(map(_size, shard.values())) + _size(value) > self._most:
                yield shard
                shard = {}
            shard[name] = value
        yield shard


class DistributedCheckpoint:
    """A folder as ``torch.distributed.checkpoint`` reads it, on any number of ranks, with the model's names at the top.

    Its ``.metadata`` is a pickle of torch's, which only torch reads.
    """

    words = "torch.distributed.checkpoint"

    def refuse_unfit(self, state: State, where: str) -> None:
        """See :class:`Form`."""
        _refuse_what_needs_code(state, where)

    def present(self, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        return [*output.glob(".metadata"), *sorted(output.glob("*.distcp"))]

    def write(self, state: State, output: Path) -> Sequence[Path]:
        """See :class:`Form`."""
        from torch.distributed.checkpoint.state_dict_saver import save  # here: it loads for half a second

        _make_folder(output)
        for file in self.present(output):
            file.unlink()
        with warnings.catch_warnings():  # of its being used in one process
            warnings.simplefilter("ignore")
            save(state, checkpoint_id=output, no_dist=True)
        files = self.present(output)
        for file in files:
            file.chmod(0o600)
        return files


#: Form of a file -> the suffixes that ask for it.
_SUFFIXES: dict[TorchFile | SafetensorsFile, tuple[str, ...]] = {
    TorchFile(): (".pt", ".pth", ".bin", ".ckpt"),
    SafetensorsFile(): (".safetensors",),
}


def form_of(path: Path, *, named: str | None = None) -> Form | None:
    """Return the form of this name, or that a file's suffix asks for; None: there is none."""
    for form, suffixes in _SUFFIXES.items():
        if named == form.words or (named is None and path.suffix in suffixes):
            return form
    return None


def _refuse_all_but_tensors(state: State, where: str, form: str) -> None:
    others = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise CheckpointError(
            f"{where}: {listed(others)}: not tensors, and {form} holds nothing else; export to a torch file (.pt)"
        )


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


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _written_tensors(state: State, output: Path) -> Path:
    seen: set[int] = set()
    tensors = {}
    for name, value in state.items():
        pointer = value.untyped_storage().data_ptr()
        tensors[name] = value.clone() if pointer in seen else value.contiguous()
        seen.add(pointer)
    return _written(output, lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"}))


def _make_folder(output: Path) -> None:
    if not output.exists():
        output.mkdir(mode=0o700)
    elif not output.is_dir():
        raise CheckpointError(f"{output} is a file, and the model is written to a folder: choose another name")


def _written(output: Path, write: Callable[[Path], object]) -> Path:
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
    return output
