"""A run's folder in an object store: what a folder on a disk does by renaming, links and locks, by objects alone.

Note [Commit in a store]
~~~~~~~~~~~~~~~~~~~~~~~~
There is no rename. Every rank writes objects of its own under ``step-N/`` (Note [Objects of ranks] in ``stored.py``),
and what makes them a checkpoint is ``step-N/manifest.json``, which rank 0 creates last, if it is absent, and which
nobody replaces. Before that rank 0 lists the objects and compares their sizes: a rank that has written to another
store (a ``memory://`` of its own, another account) is found. A removal begins with the manifest: what is left of a
checkpoint that was half removed, or half written, is no checkpoint.

The objects of a save have names that no other save uses, so whatever a dead or displaced process still sends can't
change a checkpoint. What it can still do is to commit its own draft. So an owner that finds drafts (at the beginning
of its term, and before each of its saves) creates their manifests itself, *empty*, and removes their objects then: an
empty manifest marks no checkpoint, and a commit finds it there and fails. It stays, and takes the name: the next save
at this step is ``step-N-r2``.

Whether a commit succeeded is not known if the store stops answering at that moment. The save is reported as failed
then, and its objects are left as they are: if the manifest is there, it is a complete checkpoint, and a run resumes
from it; if not, the next save removes what there is.

Note [Readers in a store]
~~~~~~~~~~~~~~~~~~~~~~~~~
Nothing holds a checkpoint that is read: it can be removed meanwhile. A reader that finds an object missing looks for
the manifest; if that has gone, so has the checkpoint (``CheckpointGone``), and a search goes on with a newer one. It
never takes half a checkpoint for a whole one, because every byte has a digest."""

from __future__ import annotations

import bisect
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import PurePath
from typing import ClassVar

from lockstep._files import StorePath
from lockstep.checkpoint import folders, lease, stored
from lockstep.checkpoint.blocks import TensorPart
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.lease import Lease
from lockstep.checkpoint.locks import CheckpointGone, Owner
from lockstep.checkpoint.manifest import Manifest, manifest_bytes
from lockstep.checkpoint.object_store import AT_A_TIME, ObjectStore, StoreFailed
from lockstep.checkpoint.plan import Block, Written
from lockstep.checkpoint.stored import Extent, ObjectRange, Stored, object_name
from lockstep.errors import CheckpointCorrupt, CheckpointError
from lockstep.text import listed, sentence, which_ranks

#: Bytes that are read ahead by one request, of which as many as may are under way at a time.
_AHEAD = 4 * 2**20


class StoreFolder:
    """See :class:`lockstep.checkpoint.run_folder.RunFolder`."""

    def __init__(self, path: StorePath) -> None:
        self.path = path
        self._store = ObjectStore.opened(path.scheme)

    def resolved(self) -> StoreFolder:
        """See the protocol. There are no links."""
        return self

    def prepare(self) -> None:
        """See the protocol. Also make sure that the store creates an object only where there is none."""
        probe = f"{self.path.key}/.probe-{secrets.token_hex(8)}"
        contents = [secrets.token_bytes(8) for _ in range(2)]
        try:
            made = [self._store.create(probe, content) for content in contents]
            if made != [True, False] or self._store.get(probe) != contents[0]:
                raise StoreFailed(
                    f"{self.path}: this store does not refuse to create an object that is there already (S3: "
                    "If-None-Match), so a checkpoint could be written by two jobs at once: a newer version of the "
                    "store or of the fsspec package for it may do so; or mount it, and give the path"
                )
        except StoreFailed:
            with suppress(StoreFailed):  # the failure that led here is the one to report
                self._store.remove([probe], again=False)
            raise
        self._store.remove([probe])

    def hold(self) -> Lease:
        """See the protocol. What dead saves have left can't become a checkpoint from here on."""
        held = Lease(self.path)
        try:
            self._sweep()
        except BaseException:
            held.release()
            raise
        return held

    def witness(self, token: str) -> None:
        """See the protocol."""
        lease.witness(self._store, self.path, token)

    def owner_now(self) -> Owner | None:
        """See the protocol."""
        return lease.owner_now(self._store, self.path)

    def beat_now(self) -> tuple[str, int] | None:
        """See the protocol."""
        sign = lease.sign_now(self._store, self.path)
        return None if sign is None else (sign.nonce, sign.beat)

    def exists(self) -> bool:
        """See the protocol: a folder is there if something is in it."""
        return bool(self._store.sizes(self.path.key))

    def is_checkpoint(self) -> bool:
        """See the protocol."""
        is_named_so = folders.step_in(self.path.name) is not None
        return is_named_so and bool(self._store.sizes(self.path.key).get(MANIFEST))

    def checkpoints(self) -> list[PurePath]:
        """See the protocol."""
        return self._by_age(name for name, objects in self._prefixes().items() if objects.get(MANIFEST))

    def leftovers(self) -> list[PurePath]:
        """See the protocol."""
        return self._by_age(name for name, objects in self._prefixes().items() if objects and MANIFEST not in objects)

    def under_way(self) -> set[str]:
        """See the protocol. A dead save's is among them, and no checkpoint ever gets its name."""
        return {path.name for path in self.leftovers()}

    def has_manifest(self, name: str) -> bool:
        """See the protocol."""
        return bool(self._store.sizes(self._key(name)).get(MANIFEST))

    def draft(self, step: int, files: Iterable[str]) -> StoreDraft:  # noqa: ARG002 - they are no objects
        """See the protocol."""
        name = folders.unused_name([self.path / taken for taken in self._sweep()], step)
        return StoreDraft(self._store, self.path, name)

    def write(self, token: str, rank: int, blocks: Iterable[Block]) -> Written:
        """See the protocol."""
        name, prefix = token.split("/")
        written = Written([], [])
        objects = enumerate(_cut(blocks, written))

        def put(numbered: tuple[int, bytes]) -> None:
            number, content = numbered
            self._store.put(f"{self._key(name)}/{object_name(prefix, rank, number)}", content)

        for _ in self._store.side_by_side(put, objects):
            pass
        return written

    def holding(self, name: str) -> AbstractContextManager[None]:  # noqa: ARG002
        """See the protocol, and Note [Readers in a store]: nothing can be held."""
        return nullcontext()

    def open(self, name: str) -> _OpenObjects:
        """See the protocol."""
        return _OpenObjects(self._store, self.path / name)

    def remove(self, name: str) -> bool:
        """See the protocol."""
        objects = self._store.sizes(self._key(name))
        if not objects.get(MANIFEST):
            raise FileNotFoundError(str(self.path / name))
        self._store.remove([f"{self._key(name)}/{MANIFEST}"])
        self._store.remove(f"{self._key(name)}/{other}" for other in objects if other != MANIFEST)
        return True

    def _key(self, name: str) -> str:
        return f"{self.path.key}/{name}"

    def _by_age(self, names: Iterable[str]) -> list[PurePath]:
        return sorted((self.path / name for name in names), key=folders.age, reverse=True)

    def _prefixes(self) -> dict[str, dict[str, int]]:
        """List the names of checkpoints and drafts -> their objects and the bytes of those."""
        found: dict[str, dict[str, int]] = {}
        for key, size in self._store.sizes(self.path.key).items():
            name, slash, inner = key.partition("/")
            if slash and "/" not in inner and folders.step_in(name) is not None:
                found.setdefault(name, {})[inner] = size
        return found

    def _sweep(self) -> list[str]:
        """Make sure that the drafts of dead saves never become checkpoints, and remove their objects.

        Return the names that are taken.
        """
        found = self._prefixes()
        for name, objects in found.items():
            if objects.get(MANIFEST) or StoreDraft.is_alive(self.path / name):
                continue
            if MANIFEST not in objects and not self._store.create(f"{self._key(name)}/{MANIFEST}", b""):
                continue  # it has become a checkpoint
            self._store.remove(f"{self._key(name)}/{other}" for other in objects if other != MANIFEST)
        return [*found]


class StoreDraft:
    """**Rank 0.** The objects of a checkpoint to be; see Note [Commit in a store]."""

    #: The paths of this process's drafts: there is one at most for each Checkpointer.
    _alive: ClassVar[set[StorePath]] = set()

    def __init__(self, store: ObjectStore, root: StorePath, name: str) -> None:
        self._store, self._root, self._path = store, root, root / name
        self._prefix = secrets.token_hex(8)
        self._may_be_complete = False
        self._alive.add(self._path)

    @classmethod
    def is_alive(cls, path: StorePath) -> bool:
        """Return whether this process is writing a draft there."""
        return path in cls._alive

    @property
    def token(self) -> str:
        """The name of the checkpoint, and the beginning of the objects' names."""
        return f"{self._path.name}/{self._prefix}"

    def stored(self, files: Mapping[str, Sequence[TensorPart]]) -> Stored:
        """Return which rank wrote what."""
        return Stored.of(files, prefix=self._prefix, term=lease.term_here(self._root))

    def commit(self, manifest: Manifest) -> StorePath:
        """**Rank 0.** Create the manifest and return the checkpoint's path."""
        content = manifest_bytes(manifest, where=str(self._path))
        self._refuse_missing(manifest)
        self._may_be_complete = True
        try:
            is_ours = self._store.create(f"{self._path.key}/{MANIFEST}", content)
        except StoreFailed as error:
            raise StoreFailed(
                f"{sentence(str(error))} It is not known whether the checkpoint {self._path.name} is complete, so the "
                "save counts as failed: if it is, a run resumes from it, and else the next save removes it"
            ) from error
        finally:
            self._alive.discard(self._path)
        if not is_ours:
            raise CheckpointError(
                f"{self._path}: another owner of {self._root} has ended this save before its commit: this job gave no "
                "sign of life for too long, and nothing was saved"
            )
        return self._path

    def _refuse_missing(self, manifest: Manifest) -> None:
        there = self._store.sizes(self._path.key)
        expected = {} if manifest.stored is None else manifest.stored.objects(manifest.parts)
        missing = [name for name, size in expected.items() if there.get(name) != size]
        if missing:
            ranks = sorted({int(name.split("-")[1]) for name in missing})
            raise CheckpointError(
                f"{self._path}: objects that {which_ranks(ranks)} has to have written are not where rank 0 looks for "
                f"them ({listed(missing)}): do all ranks have the same store? A memory:// is one process's own"
            )

    def discard(self) -> None:
        """**Rank 0.** Remove the objects, unless they are or may be a checkpoint."""
        self._alive.discard(self._path)
        if self._may_be_complete:
            return
        try:
            names = [name for name in self._store.sizes(self._path.key, again=False) if name.startswith(self._prefix)]
            self._store.remove([f"{self._path.key}/{name}" for name in names], again=False)
        except StoreFailed:
            pass  # the failure that led here is the one to report, and a draft is not a checkpoint


def _cut(blocks: Iterable[Block], written: Written) -> Iterator[bytes]:
    """Yield a rank's bytes in objects."""
    held = bytearray()
    for block in blocks:
        for _, piece in written.pieces(block):
            while piece:
                room = stored.OBJECT - len(held)
                held += piece[:room]
                piece = piece[room:]
                if len(held) == stored.OBJECT:
                    content, held = bytes(held), bytearray()  # (no second copy of it while it is sent)
                    yield content
    if held:
        yield bytes(held)


class _OpenObjects:
    """A checkpoint in a store, and what there is of it.

    Raises:
        CheckpointGone: there is no manifest.
    """

    owner = None

    def __init__(self, store: ObjectStore, path: StorePath) -> None:
        self._store, self._path = store, path
        self._sizes = store.sizes(path.key)
        self._extents: dict[str, list[Extent]] = {}
        if not self._sizes.get(MANIFEST):
            raise gone(path)

    def file(self, name: str, manifest: Manifest | None) -> _OpenRanges:
        """Open a file.

        Raises:
            CheckpointCorrupt: an object with some of its bytes is missing, or has another size.
        """
        if manifest is None:
            return _OpenRanges(self, [Extent(0, self._sizes[MANIFEST], 0, 0)], None)
        if manifest.stored is None:
            raise CheckpointCorrupt(
                f"{self._path / MANIFEST}: it does not say where the bytes of {name} are: it was copied from a disk, "
                "and a run resumes from it there"
            )
        self._extents = self._extents or manifest.stored.extents(manifest.parts)
        opened = _OpenRanges(self, self._extents[name], manifest.stored)
        expected = manifest.stored.objects(manifest.parts)
        for part in opened.objects():
            found = self._sizes.get(part)
            if found != expected[part]:
                there = "it is missing" if found is None else f"{found} bytes found"
                raise CheckpointCorrupt(f"{self._path / part}: {there}, {expected[part]} expected, for {name}")
        return opened

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def read(self, spans: Iterable[ObjectRange]) -> list[bytes]:
        """Read some bytes of objects, side by side."""

        def one(span: ObjectRange) -> bytes:
            return self._store.get_range(f"{self._path.key}/{span.object}", span.start, span.stop)

        try:
            return [*self._store.side_by_side(one, spans)]
        except FileNotFoundError as error:
            if not self._store.sizes(self._path.key).get(MANIFEST):
                raise gone(self._path) from error
            raise CheckpointCorrupt(f"{self._path}: an object is missing: {error}") from error


def gone(path: StorePath) -> CheckpointGone:
    """Return the error that a checkpoint has been removed."""
    return CheckpointGone(f"{path}: this checkpoint has just been removed; look for a newer one")


class _OpenRanges:
    """A file whose bytes are in objects. What is read next is read ahead."""

    owner = None

    def __init__(self, folder: _OpenObjects, extents: Sequence[Extent], places: Stored | None) -> None:
        self._folder, self._extents, self._places = folder, extents, places
        self._starts = [extent.start for extent in extents]
        self.size = extents[-1].stop if extents else 0
        #: Bytes that were read ahead, and the position of the first.
        self._ahead, self._from = memoryview(b""), 0

    def objects(self) -> set[str]:
        """Return the names of the objects with its bytes."""
        parts = self._parts(0, self.size)
        return {span.object for rank, own in parts.items() for span in self._spans(rank, own[0].offset, _end(own[-1]))}

    def read(self, into: memoryview, offset: int) -> int:
        """Fill ``into`` from ``offset`` on. Return the number of bytes read."""
        filled, wanted = 0, min(len(into), max(0, self.size - offset))
        while filled < wanted:
            inside = offset + filled - self._from
            if not 0 <= inside < len(self._ahead):
                self._fetch(offset + filled, most=max(wanted - filled, 1))
                inside = 0
            piece = self._ahead[inside : inside + wanted - filled]
            into[filled : filled + len(piece)] = piece
            filled += len(piece)
        return filled

    def close(self) -> None:
        """Forget what was read ahead."""
        self._ahead = memoryview(b"")

    def _fetch(self, start: int, *, most: int) -> None:
        # A read that goes on where the last one ended will go on; one that does not is of a header, or of one tensor.
        goes_on = len(self._ahead) > 0 and start == self._from + len(self._ahead)
        stop = min(self.size, start + (AT_A_TIME * _AHEAD if goes_on else max(most, 2**16)))
        into = memoryview(bytearray(stop - start))
        parts = self._parts(start, stop)
        # What a rank wrote of a file is together, in order, though what other ranks wrote comes between in the file.
        spans = {rank: [*self._spans(rank, own[0].offset, _end(own[-1]))] for rank, own in parts.items()}
        read = iter(self._folder.read(span for own in spans.values() for span in own))
        for rank, own in parts.items():
            content = memoryview(b"".join(next(read) for _ in spans[rank]))
            for part in own:
                begin = part.offset - own[0].offset
                into[part.start - start : part.stop - start] = content[begin : begin + part.stop - part.start]
        self._ahead, self._from = into, start

    def _parts(self, start: int, stop: int) -> dict[int, list[Extent]]:
        """Return each rank -> what it wrote of some of the file's bytes, in order."""
        found: dict[int, list[Extent]] = {}
        for extent in self._extents[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            first, last = max(start, extent.start), min(stop, extent.stop)
            if extent.start >= stop:
                break
            if first < last:
                part = Extent(first, last, extent.rank, extent.offset + first - extent.start)
                found.setdefault(extent.rank, []).append(part)
        return found

    def _spans(self, rank: int, start: int, stop: int) -> Iterator[ObjectRange]:
        """Yield where some of a rank's bytes are, in pieces that are read at once."""
        for span in (
            [ObjectRange(MANIFEST, start, stop)] if self._places is None else self._places.spans(rank, start, stop)
        ):
            for begin in range(span.start, span.stop, _AHEAD):
                yield ObjectRange(span.object, begin, min(span.stop, begin + _AHEAD))


def _end(extent: Extent) -> int:
    """Return the position after the last byte of an extent among its rank's."""
    return extent.offset + extent.stop - extent.start
