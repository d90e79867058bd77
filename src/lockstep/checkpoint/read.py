"""Read a checkpoint's folder, checking each byte on the way from the disk to memory.

A reader holds the checkpoint that it reads (Note [Readers and pruning] in ``locks.py``).

Note [Read once]
~~~~~~~~~~~~~~~~
A tensor's bytes are read into memory of their own and hashed there, and what was hashed is what is used: a file that
changes after the check can't matter. Nothing is mapped, so a file that is cut off meanwhile is an error and not a
SIGBUS.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Generic, TypeVar

import torch

from lockstep.checkpoint import finite, folders
from lockstep.checkpoint.blocks import BLOCK, TensorPart, cut
from lockstep.checkpoint.disk_folder import OpenDiskFile
from lockstep.checkpoint.encoding import PIECE, decode, new_digest, strict_json
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.locks import CheckpointGone
from lockstep.checkpoint.manifest import MAX_BYTES, MODEL, FileEntry, Manifest
from lockstep.checkpoint.run_folder import OpenCheckpoint, OpenFile, run_folder
from lockstep.checkpoint.safetensors import LENGTH, Header, TensorSpan, header_length, parse_header
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.errors import CheckpointCorrupt, CheckpointError
from lockstep.text import joined, which_ranks

Result = TypeVar("Result")

#: Folder of a checkpoint -> what is wrong with it, newest first.
Damage = dict[PurePath, str]

_DISAGREE = "its header and the manifest do not agree"
#: Failures of this process, not of the checkpoint: skipping it for an older one would be wrong.
_OURS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
#: The most times that a run's folder is listed, while checkpoints in it are removed as fast as they are listed.
_LISTINGS = 10


@dataclass(frozen=True)
class Search(Generic[Result]):
    """The result of a search among a run's checkpoints."""

    #: The newest checkpoint that can be taken, and what was read of it; None: there is none.
    found: tuple[PurePath, Result] | None
    #: The damaged checkpoints that are newer than ``found``; all damaged ones if that is None.
    damaged: Damage
    #: Likewise, the checkpoints that were passed over because they are not sound.
    unsound: Damage

    def nothing(self, root: PurePath, *, remedy: str) -> CheckpointError | None:
        """Return the error that none of a run's checkpoints can be taken; None if it has no checkpoints.

        Args:
            root: the run's folder.
            remedy: how to take one that is not sound all the same.
        """
        if self.unsound:
            words = "; ".join([*self.unsound.values(), *self.damaged.values()])
            return CheckpointError(f"no checkpoint in {root} is complete and sound: {words}; {remedy}")
        if self.damaged:
            return CheckpointCorrupt(f"no checkpoint there is complete: {'; '.join(self.damaged.values())}")
        return None


class Unsound(CheckpointError):
    """A checkpoint was passed over: it is not finite (Note [Finite] in ``finite.py``), or the ranks differed in it."""

    code = "checkpoint-unsound"

    def __init__(self, folder: PurePath, manifest: Manifest) -> None:
        super().__init__(why_unsound(folder, manifest))
        self.manifest = manifest


def why_unsound(folder: PurePath, manifest: Manifest) -> str:
    """Return which values of a checkpoint are not finite and which ranks differed, in words; empty if it is sound."""
    words = []
    if manifest.not_finite is not None:
        words.append(f"holds values that are NaN or infinite, in {finite.in_words(manifest.not_finite)}")
    if manifest.apart is not None:
        words.append(f"holds the parameters of rank 0, from which those of {which_ranks(manifest.apart)} differed")
    return f"{folder.name} {joined(words)}" if words else ""


@dataclass(frozen=True)
class Contents:
    """A verified checkpoint, in memory."""

    folder: PurePath
    manifest: Manifest
    #: The model's state dict.
    model: dict[str, Any]
    #: Trees by name: optimizer, scheduler, loader, extra, rng.
    parts: dict[str, Any]


def read(
    folder: PurePath, *, owners: Sequence[int] | None = None, only_sound: bool = False, on: Storage = POSIX
) -> Contents:
    """Read a complete checkpoint, verifying every byte.

    Args:
        folder: the checkpoint's folder, which must not be a link.
        owners: the users to whom the folder and its files may belong. None: any user.
        only_sound: read no further than the manifest if that says that it is not sound.
        on: the file system.

    Raises:
        Unsound: the manifest says that it is not sound, and ``only_sound`` is on.
        CheckpointCorrupt: a file is missing, is not a plain file, belongs to another user, or has another size or
            digest; the message names the file and the tensor, what was expected and what was found.
        CheckpointGone: it has just been removed.
    """
    with _opened(folder, owners, on) as reader:
        reader.refuse_other_step()
        if only_sound:
            reader.refuse_unsound()
        files = reader.manifest.files
        names = [name.removesuffix(".json") for name in files if name.endswith(".json") and name != "model.json"]
        parts = {name: reader.part(name) for name in names}
        return Contents(folder, reader.manifest, reader.model(), parts)


def read_model(folder: PurePath, *, only_sound: bool = False, on: Storage = POSIX) -> dict[str, Any]:
    """Read and verify the model alone.

    Raises:
        CheckpointCorrupt, Unsound: as :func:`read`.
    """
    with _opened(_resolved(folder), None, on) as reader:
        if only_sound:
            reader.refuse_unsound()
        return reader.model()


def read_model_unheld(folder: PurePath, *, on: Storage = POSIX) -> tuple[Manifest, dict[str, Any]]:
    """Read and verify the manifest and the model, without keeping anybody from removing the checkpoint meanwhile.

    Raises:
        CheckpointGone: it was removed before all of it was read.
        CheckpointCorrupt: as :func:`read`.
    """
    with _unheld(folder, on) as reader:
        return reader.manifest, reader.model()


def read_manifest_unheld(folder: PurePath, *, on: Storage = POSIX) -> Manifest:
    """Read the manifest of a checkpoint, without keeping anybody from removing the checkpoint meanwhile.

    Raises:
        CheckpointGone: it was removed.
        CheckpointCorrupt: as :func:`read_manifest`.
    """
    with _unheld(folder, on) as reader:
        return reader.manifest


def read_manifest(folder: PurePath, *, on: Storage = POSIX) -> Manifest:
    """Read the manifest of a checkpoint; nothing else is verified.

    Raises:
        CheckpointCorrupt: there is no valid manifest.
    """
    with _opened(_resolved(folder), None, on) as reader:
        return reader.manifest


def read_header(folder: PurePath, *, on: Storage = POSIX) -> tuple[TensorSpan, ...]:
    """Read and verify the header of a checkpoint's model: its tensors in the order of their bytes, complex ones as the
    pairs of reals that they are saved as.

    Raises:
        CheckpointCorrupt: the manifest or the header is damaged.
    """
    with _opened(_resolved(folder), None, on) as reader:
        return reader.header()


def find_damage(folder: PurePath, *, on: Storage = POSIX) -> list[str]:
    """Read every byte of a checkpoint; return a line for each damaged file or tensor, none if it is complete.

    Raises:
        CheckpointGone: it has just been removed.
    """
    try:
        with _opened(folder, None, on) as reader:
            return [str(damage) for damage in reader.damages()]
    except CheckpointCorrupt as error:
        return [str(error)]


def copy_to_disk(folder: PurePath, into: Path) -> None:
    """Copy a checkpoint, of a store or a disk, into a new folder on a disk, verifying every byte.

    What is written is not forced to the disk: for a copy that is used at once and then removed.

    Args:
        folder: the checkpoint's folder.
        into: the folder (0700) to make.

    Raises:
        CheckpointCorrupt: a file is damaged; there is no copy then.
        CheckpointGone: it was removed meanwhile; likewise.
        OSError: the copy can't be written.
    """
    with _unheld(folder, POSIX) as reader:
        into.mkdir(mode=0o700)
        try:
            reader.copy(into)
        except BaseException:
            shutil.rmtree(into)
            raise


def read_tensors(path: Path, *, on: Storage = POSIX) -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file into CPU memory of its own; aliases become the same tensor.

    Raises:
        CheckpointCorrupt: the file is truncated or no safetensors file.
        OSError: it can't be read.
    """
    folder = on.open_folder(path.resolve().parent)
    try:
        file = _File(path, OpenDiskFile(on.open(folder, path.resolve().name), on), None)
    finally:
        on.close(folder)
    try:
        return file.tensors()
    finally:
        file.close()


def newest_complete(
    listing: Callable[[], Sequence[PurePath]], read: Callable[[PurePath], Result], *, strict: bool = False
) -> Search[Result]:
    """Find the newest checkpoint that can be read; skip the damaged ones, and those that ``read`` finds unsound.

    Args:
        listing: returns the folders, newest first. It is called again if a folder was removed after it had been
            listed: there is a newer one then.
        read: reads what is wanted of a checkpoint.
        strict: raise the error of a damaged one instead of skipping it.

    Raises:
        CheckpointGone: they are removed faster than they are read.
        CheckpointCorrupt: one is damaged, and ``strict`` is on.
    """
    for _ in range(_LISTINGS - 1):
        try:
            return _first_complete(listing(), read, strict)
        except CheckpointGone:
            continue
    return _first_complete(listing(), read, strict)


def _first_complete(listed: Sequence[PurePath], read: Callable[[PurePath], Result], strict: bool) -> Search[Result]:
    damaged: Damage = {}
    unsound: Damage = {}
    for folder in listed:
        try:
            return Search((folder, read(folder)), damaged, unsound)
        except Unsound as error:
            unsound[folder] = str(error)
        except CheckpointCorrupt as error:
            if strict:
                raise
            damaged[folder] = str(error)
    return Search(None, damaged, unsound)


@contextmanager
def _opened(folder: PurePath, owners: Sequence[int] | None, on: Storage, *, held: bool = True) -> Iterator[_Reader]:
    root = run_folder(folder.parent, on)
    with root.holding(folder.name) if held else nullcontext():
        with _failing_is_damage(folder, "can't be opened ({})"):
            opened = root.open(folder.name)
        try:
            yield _Reader(folder, opened, owners)
        finally:
            opened.close()


@contextmanager
def _unheld(folder: PurePath, on: Storage) -> Iterator[_Reader]:
    """Open a checkpoint that may be removed within the block, which is CheckpointGone then."""
    folder = _resolved(folder)
    try:
        with _opened(folder, None, on, held=False) as reader:
            yield reader
    except CheckpointCorrupt:
        if run_folder(folder.parent, on).has_manifest(folder.name):
            raise
        raise CheckpointGone(f"{folder}: this checkpoint was removed while it was read") from None


def _resolved(folder: PurePath) -> PurePath:
    return run_folder(folder).resolved().path


@contextmanager
def _failing_is_damage(path: PurePath, words: str) -> Iterator[None]:
    """Report a failing operation as damage, in ``words``, unless the failure says nothing of the checkpoint."""
    try:
        yield
    except OSError as error:
        if error.errno in _OURS:
            raise
        raise CheckpointCorrupt(f"{path}: {words.format(error.strerror)}") from error


class _Reader:
    """An open checkpoint."""

    def __init__(self, path: PurePath, folder: OpenCheckpoint, owners: Sequence[int] | None) -> None:
        self._path, self._folder, self._owners = path, folder, owners
        #: The manifest; None while it is read.
        self._manifest: Manifest | None = None
        self._refuse_foreign(folder.owner, path)
        with self._file(MANIFEST, None) as file:
            if file.size > MAX_BYTES:
                raise CheckpointCorrupt(f"{file.path}: larger than {MAX_BYTES} bytes, so it is not a manifest")
            self.manifest = Manifest.from_json(bytes(file.content(0, file.size)), where=str(file.path))
        self._manifest = self.manifest

    def refuse_other_step(self) -> None:
        """Refuse a folder that was renamed: its name would promise another step than it holds."""
        step = folders.step_in(self._path.name)
        if step is not None and step != self.manifest.step:
            raise CheckpointCorrupt(f"{self._path}: holds step {self.manifest.step}: it has been renamed")

    def refuse_unsound(self) -> None:
        """Refuse a checkpoint whose manifest says that it is not sound."""
        if not self.manifest.is_sound:
            raise Unsound(self._path, self.manifest)

    def _refuse_foreign(self, owner: int | None, path: PurePath) -> None:
        if self._owners is not None and owner is not None and owner not in self._owners:
            raise CheckpointCorrupt(
                f"{path}: belongs to user {owner}, and this job runs as user {self._owners[0]}: if you trust it, "
                "copy it"
            )

    @contextmanager
    def _file(self, name: str, entry: FileEntry | None) -> Iterator[_File]:
        """Open a file of the folder, which must be a plain one: no link, no device, no pipe to wait on."""
        path = self._path / name
        with _failing_is_damage(path, "{}"):
            opened = self._folder.file(name, self._manifest)
        try:
            with _failing_is_damage(path, "can't be read ({})"):
                self._refuse_foreign(opened.owner, path)
                yield _File(path, opened, entry)
        finally:
            opened.close()

    def model(self) -> dict[str, Any]:
        """Read the model's state dict."""
        with self._file(MODEL, self.manifest.files[MODEL]) as file:
            state: dict[str, Any] = dict(file.tensors())
        if "model.json" in self.manifest.files:
            state.update(self._tree("model", {}))
        return state

    def header(self) -> tuple[TensorSpan, ...]:
        """Return where the model's tensors are in its file."""
        with self._file(MODEL, self.manifest.files[MODEL]) as file:
            return file.header().tensors

    def part(self, name: str) -> Any:
        """Read a tree, with its tensors."""
        beside, tensors = f"{name}.safetensors", {}
        if beside in self.manifest.files:
            with self._file(beside, self.manifest.files[beside]) as file:
                tensors = file.tensors()
        return self._tree(name, tensors)

    def _tree(self, name: str, tensors: dict[str, torch.Tensor]) -> Any:
        with self._file(f"{name}.json", self.manifest.files[f"{name}.json"]) as file:
            content = bytes(file.content(0, file.size))
        try:
            data = strict_json(content)
        except ValueError as error:
            raise CheckpointCorrupt(f"{file.path}: not JSON ({error})") from None
        return decode(data, tensors, where=str(file.path))

    def copy(self, into: Path) -> None:
        """Write the files into a folder on a disk, and then a manifest that is for one."""
        scratch = memoryview(bytearray(BLOCK))
        for name, entry in self.manifest.files.items():
            with self._file(name, entry) as file, _new_file(into / name) as copied:
                for part in sorted(entry.parts, key=lambda part: part.start):
                    for content in file.blocks(part, scratch):
                        copied.write(content)
        with _new_file(into / MANIFEST) as copied:
            copied.write(replace(self.manifest, stored=None).to_json())

    def damages(self) -> Iterator[CheckpointCorrupt]:
        """Yield the damage, file by file and tensor by tensor."""
        scratch = memoryview(bytearray(BLOCK))
        for name, entry in self.manifest.files.items():
            try:
                with self._file(name, entry) as file:
                    for part in entry.parts:
                        try:
                            file.check(part, scratch)
                        except CheckpointCorrupt as error:
                            yield error
            except CheckpointCorrupt as error:
                yield error


def _new_file(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


class _File:
    """An open file; with an entry of the manifest, every read is verified.

    Raises:
        CheckpointCorrupt: its size is not the entry's.
    """

    def __init__(self, path: PurePath, opened: OpenFile, entry: FileEntry | None) -> None:
        self.path, self._opened = path, opened
        self.size = opened.size
        self._parts: dict[str, TensorPart] | None = None
        if entry is not None:
            self._parts = {part.name: part for part in entry.parts}
            if self.size != entry.size:
                cut_off = next((part for part in entry.parts if part.stop > self.size), None)
                where = "" if cut_off is None else f"; it ends within {_name(cut_off.name)}"
                raise CheckpointCorrupt(f"{path}: {self.size} bytes found, {entry.size} expected{where}")

    def close(self) -> None:
        self._opened.close()

    def content(self, start: int, stop: int, name: str = "") -> memoryview:
        """Read a part; one without a name is the header, or the whole of a file without tensors."""
        into = memoryview(bytearray(stop - start))
        self._fill(into, start, name)
        return into

    def header(self) -> Header:
        """Read the header of a safetensors file."""
        with self._sense():
            header = parse_header(self._header(), self.size)
            if self._parts is not None:
                found = {one.name: (one.start, one.stop) for one in header.tensors}
                if found != {name: (part.start, part.stop) for name, part in self._parts.items() if name}:
                    raise ValueError(_DISAGREE)
            return header

    def tensors(self) -> dict[str, torch.Tensor]:
        """Read every tensor of a safetensors file."""
        header = self.header()
        with self._sense():
            return header.finish({one.name: self._tensor(one) for one in header.tensors})

    @contextmanager
    def _sense(self) -> Iterator[None]:
        """Raise errors of an invalid file as damage."""
        try:
            yield
        except (ValueError, RuntimeError) as error:
            if isinstance(error, CheckpointError):  # damage that is named already, or a store's failure, which is none
                raise
            raise CheckpointCorrupt(f"{self.path}: not a valid safetensors file ({error})") from error

    def _header(self) -> bytes:
        start = bytearray(LENGTH)
        if self._parts is None:
            count = self._opened.read(memoryview(start), 0)
            return bytes(self.content(0, header_length(bytes(start[:count]), self.size)))
        header = bytes(self.content(0, self._parts[""].stop if "" in self._parts else 0))
        if header_length(header[:LENGTH], self.size) != len(header):
            raise ValueError(_DISAGREE)
        return header

    def _tensor(self, described: TensorSpan) -> torch.Tensor:
        tensor = torch.empty(described.shape, dtype=described.dtype, device="cpu")
        if described.stop > described.start:
            self._fill(tensor.reshape(-1).view(torch.uint8).numpy().data, described.start, described.name)
        return tensor

    def _fill(self, into: memoryview, start: int, name: str) -> None:
        if self._parts is None:
            if self._opened.read(into, start) != len(into):
                raise CheckpointCorrupt(f"{self.path}: the file was truncated while it was read")
            return
        part = self._parts.get(name)
        if part is None or (part.start, part.stop) != (start, start + len(into)):
            raise ValueError(_DISAGREE)
        for (begin, stop), expected in zip(cut(part.start, part.stop), part.digests, strict=True):
            self._check(into[begin - start : stop - start], begin, expected, part)

    def check(self, part: TensorPart, scratch: memoryview) -> None:
        """Read a part and keep nothing.

        Raises:
            CheckpointCorrupt: it is not what was written.
        """
        for _ in self.blocks(part, scratch):
            pass

    def blocks(self, part: TensorPart, scratch: memoryview) -> Iterator[memoryview]:
        """Yield the blocks of a part, verified, in ``scratch``; each is there until the next one is asked for.

        Raises:
            CheckpointCorrupt: one is not what was written.
        """
        for (start, stop), expected in zip(cut(part.start, part.stop), part.digests, strict=True):
            into = scratch[: stop - start]
            self._check(into, start, expected, part)
            yield into

    def _check(self, into: memoryview, start: int, expected: str, part: TensorPart) -> None:
        digest = new_digest()
        for begin in range(0, len(into), PIECE):
            piece = into[begin : begin + PIECE]
            if self._opened.read(piece, start + begin) != len(piece):
                raise CheckpointCorrupt(f"{self.path}: {_name(part.name)}: the file was truncated while it was read")
            digest.update(piece)
        if digest.hexdigest() != expected:
            raise CheckpointCorrupt(
                f"{self.path}: {_name(part.name)}: its content has changed: digest {digest.hexdigest()} found, "
                f"{expected} expected, in the bytes from {start} to {start + len(into)}"
            )


def _name(tensor: str) -> str:
    if not tensor:
        return "outside of the tensors"
    return f"tensor {tensor if tensor.isprintable() else ascii(tensor)}"  # a name could hold a terminal's commands
