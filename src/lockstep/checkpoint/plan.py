"""The contents of a checkpoint on each rank: its files and tensors, and the bytes of them that this rank writes.

Nothing is copied here. A save that returns at once copies its :class:`WritePlan`, and writes the copy in a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from lockstep import accelerator
from lockstep.checkpoint.blocks import BLOCK, TensorPart, cut, divide
from lockstep.checkpoint.chunks import Chunks
from lockstep.checkpoint.encoding import PIECE, encode, new_digest
from lockstep.checkpoint.finite import NOTHING_MEANT, Bound, Judge, Meant
from lockstep.checkpoint.manifest import MODEL, FileEntry
from lockstep.checkpoint.safetensors import TensorFile, lay_out


def judge_optimizers(name: str) -> bool | None:
    """Judge what the optimizer and LocalSteps keep, which should be finite; see :data:`~finite.Judge`."""
    return False if name.startswith(("optimizer.", "local_steps.", "ranks.")) else None


@dataclass(frozen=True)
class StateLayout:
    """The state of a run on this rank, laid out in files."""

    #: The files of tensors: on rank 0 all of them; on other ranks those that all ranks have.
    files: tuple[TensorFile, ...]
    #: The contents of the JSON files by name; on rank 0 only.
    texts: Mapping[str, bytes]

    @classmethod
    def of(
        cls,
        model: Mapping[str, Any],
        parts: Mapping[str, Any],
        *,
        parameters: frozenset[str],
        is_main: bool,
        alike: frozenset[str] = frozenset({"optimizer"}),
        own: Any = None,
        world_size: int = 1,
        in_model: Mapping[str, bool] | None = None,
        judge: Judge = judge_optimizers,
        meant: Meant = NOTHING_MEANT,
        ignored: frozenset[str] = frozenset(),
        ignored_in_parts: tuple[str, ...] = (),
    ) -> StateLayout:
        """Lay a run's state out in files.

        ``model.safetensors`` holds the tensors of the model, ``model.json`` what else its state dict has. Every other
        part is a JSON file, with a safetensors file beside it if there are tensors in it. Parameters and the parts
        that are named as such are the same on all ranks; buffers and everything else may not be, and come from rank 0.
        What each rank holds alone is the list ``ranks``, of which each writes its own tensors.

        Args:
            model: the model's state dict, under the names of the bare model.
            parts: trees by the name of their file: optimizer, scheduler, extra, …; on other ranks than 0 only those
                in ``alike`` count.
            parameters: the names in ``model`` that are parameters.
            is_main: whether this is rank 0.
            alike: the parts that all ranks hold alike.
            own: the tree that this rank holds alone, of the same names, shapes and dtypes on all ranks; None: nothing.
            world_size: how many ranks hold such a tree.
            in_model: name in ``model`` of each tensor that should be finite -> whether infinities are meant in tensors
                of its kind; None: the parameters, and they are not.
            judge: says it of the tensors of the parts.
            meant: which of these need not be finite all the same.
            ignored: the parameters that replicas leave alone, so that each rank may hold its own.
            ignored_in_parts: what the names of the tensors begin with that an optimizer keeps for them.

        Raises:
            CheckpointError: something can't be written down.
        """
        tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
        bounded = meant.bounds(dict.fromkeys(parameters, False) if in_model is None else in_model)
        files = [lay_out(MODEL, tensors, where="model", alike=parameters - ignored, judged=bounded)]
        texts: dict[str, bytes] = {}
        others = {name: value for name, value in model.items() if name not in tensors}
        if others and is_main:
            texts["model.json"] = text(encode(others, None, where="model"))
        for part, tree in parts.items():
            if not is_main and part not in alike:
                continue
            kept: dict[str, torch.Tensor] = {}
            encoded = encode(tree, kept, where=part)
            if kept:
                same = (name for name in kept if part in alike and not name.startswith(ignored_in_parts))
                bounded = _judged(kept, judge, meant)
                files.append(lay_out(f"{part}.safetensors", kept, where=part, alike=frozenset(same), judged=bounded))
            if is_main:
                texts[f"{part}.json"] = text(encoded)
        if own is not None:
            file, encoded = _lay_out_ranks(own, world_size, judge)
            files += [file] if file.spans else []
            if is_main:
                texts["ranks.json"] = text(encoded)
        return cls(tuple(files), texts)

    def outline(self) -> Outline:
        """Return a summary of the files for the other ranks."""
        alike = {file.name: file.size_alike for file in self.files}
        everything = sum(file.size for file in self.files)
        digests = {file.name: file.fingerprints() for file in self.files}
        return Outline(
            layouts={name: layout for name, (layout, _) in digests.items()},
            contents={name: content for name, (_, content) in digests.items()},
            alike=alike,
            alone=everything - sum(alike.values()) + sum(map(len, self.texts.values())),
        )


def _judged(tensors: Mapping[str, torch.Tensor], judge: Judge, meant: Meant) -> dict[str, bool]:
    """Return the tensors that should be finite -> whether infinities are meant there; see Note [Finite]."""
    of_kinds = {name: judge(name) for name in tensors}
    bounds = meant.bounds({name: infinities for name, infinities in of_kinds.items() if infinities is not None})
    return {name: infinite or tensors[name].numel() == 1 for name, infinite in bounds.items()}


def _lay_out_ranks(own: Any, world_size: int, judge: Judge) -> tuple[TensorFile, list[Any]]:
    """Lay out what each rank holds alone: the layout is the same on all ranks; each puts its own tensors everywhere."""
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[str, int] = {}
    encoded: list[Any] = []
    for rank in range(world_size):
        kept: dict[str, torch.Tensor] = {}
        encoded.append(encode(own, kept, where=f"ranks.{rank}"))
        tensors.update(kept)
        owners.update(dict.fromkeys(kept, rank))
    bounded = _judged(tensors, judge, NOTHING_MEANT)
    file = lay_out("ranks.safetensors", tensors, where="ranks", alike=frozenset(), owners=owners, judged=bounded)
    return file, encoded


def text(encoded: Any) -> bytes:
    """Return the content of a JSON file."""
    return json.dumps(encoded, allow_nan=False).encode()


@dataclass(frozen=True)
class Outline:
    """The summary of a rank's layout that the ranks exchange before they divide the work."""

    #: File -> digest of its layout.
    layouts: dict[str, str]
    #: File -> digest of the tensors that all ranks should hold alike, and of the beginning of each.
    contents: dict[str, str]
    #: File -> number of its bytes that all ranks should hold alike.
    alike: dict[str, int]
    #: Number of all other bytes.
    alone: int

    def to_json(self) -> dict[str, Any]:
        """Return the outline in JSON types."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Outline:
        """Read back what :meth:`to_json` returned."""
        return cls(**record)

    def differs_in(self, file: str, other: Outline) -> bool:
        """Return whether two ranks hold different content in a file, where they should hold the same."""
        return self.contents.get(file) != other.contents.get(file)

    def fits(self, file: str, other: Outline) -> bool:
        """Return whether two ranks can write a file together: it has the same content, in the same places."""
        return not self.differs_in(file, other) and self.layouts.get(file) == other.layouts.get(file)


@dataclass(frozen=True)
class Write:
    """Successive blocks of a file, for one rank to write."""

    file: str
    start: int
    stop: int
    #: A tensor of any strides on any device, or the bytes themselves.
    source: torch.Tensor | bytes
    #: The position of the first of these bytes within the source.
    offset: int
    #: The bound of its elements; None: they are not judged.
    bound: Bound | None = None
    #: What has to be reached before the source may be read: copies from devices are on their way.
    ready: tuple[torch.Event, ...] = ()


class Block(NamedTuple):
    """The content of one block."""

    file: str
    #: The position in the file at which it begins.
    start: int
    content: memoryview
    bound: Bound | None = None


class _Ahead(NamedTuple):
    """A block that a device may still be copying."""

    file: str
    start: int
    content: memoryview
    bound: Bound | None
    #: Reached when the content is there; None: it is.
    copied: torch.Event | None = None

    def arrived(self) -> Block:
        """Return the block once its content is there."""
        if self.copied is not None:
            self.copied.synchronize()
        return Block(self.file, self.start, self.content, self.bound)


class Written(NamedTuple):
    """The record of what one rank has written, in JSON types."""

    #: The digest of each block, in order.
    digests: list[str]
    #: The indices of the blocks that are not within their bounds.
    beyond: list[int]

    def pieces(self, block: Block) -> Iterator[tuple[int, memoryview]]:
        """Yield a block's content in pieces, each after its position in the file, and record the block at its end."""
        digest, bound = new_digest(), block.bound
        for start in range(0, len(block.content), PIECE):
            piece = block.content[start : start + PIECE]
            digest.update(piece)
            if bound is not None and not bound.holds(piece):
                self.beyond.append(len(self.digests))
                bound = None
            yield block.start + start, piece
        self.digests.append(digest.hexdigest())


@dataclass(frozen=True)
class WritePlan:
    """The part of a checkpoint that one rank writes."""

    #: The writes, in the order of the files and of their bytes.
    writes: tuple[Write, ...]
    #: File -> the ranks that hold other content there than rank 0, which writes it alone.
    apart: Mapping[str, tuple[int, ...]]
    #: On rank 0, every file with its parts and their writers; None on other ranks.
    files: Mapping[str, tuple[TensorPart, ...]] | None

    @property
    def parameters_apart(self) -> tuple[int, ...]:
        """The ranks whose parameters are seen to differ from rank 0's."""
        return self.apart.get(MODEL, ())

    @property
    def nbytes(self) -> int:
        """Number of bytes of tensors that are to be written."""
        return sum(one.stop - one.start for one in self.writes if isinstance(one.source, torch.Tensor))

    def contents(self) -> Iterator[Block]:
        """Yield each block, in order; its content is valid until the next. Waits for what is copied, block by block."""
        before: _Ahead | None = None
        for block in self._ahead():  # a device copies the next block while the last one is written
            if before is not None:
                yield before.arrived()
            before = block
        if before is not None:
            yield before.arrived()

    def _ahead(self) -> Iterator[_Ahead]:
        """Yield each block, whose content a device may still be copying; valid until the one after the next."""
        turns: list[torch.Tensor] = []
        count = 0
        for one in self.writes:
            for event in one.ready:
                event.synchronize()
            source = memoryview(one.source) if isinstance(one.source, bytes) else flat_bytes(one.source)
            for start, stop in cut(one.start, one.stop):
                block = source[one.offset + start - one.start : one.offset + stop - one.start]
                if isinstance(block, memoryview):
                    yield _Ahead(one.file, start, block, one.bound)
                elif block.is_cpu:
                    yield _Ahead(one.file, start, block.numpy().data, one.bound)
                else:
                    turns = turns or [
                        torch.empty(BLOCK, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
                    ]
                    held, count = turns[count % 2][: stop - start], count + 1
                    held.copy_(block, non_blocking=True)
                    yield _Ahead(one.file, start, held.numpy().data, one.bound, accelerator.mark(block.device))

    def copied(self, into: Chunks) -> WritePlan:
        """Return the same plan, its tensors' bytes copied into memory of the host, which must outlive it.

        Copies from a device are only queued, on its current stream: the plan waits for each chunk where it is read.
        """
        into.rewind()
        left, chunk = self.nbytes, -1
        writes: list[Write] = []
        copying: list[Write] = []  # those in the present chunk
        devices: dict[torch.device, None] = {}

        def end_chunk() -> None:
            ready = tuple(map(accelerator.mark, devices))
            writes.extend(replace(one, ready=ready) for one in copying)
            copying.clear()
            devices.clear()

        for one in self.writes:
            if isinstance(one.source, bytes):
                copying.append(one)
                continue
            source, start = flat_bytes(one.source), one.start
            while start < one.stop:
                held = into.take(one.stop - start, left=left)
                if into.index != chunk:
                    end_chunk()
                    chunk = into.index
                place = one.offset + start - one.start
                held.copy_(source[place : place + len(held)], non_blocking=True)
                if not source.is_cpu:
                    devices[source.device] = None
                copying.append(replace(one, start=start, stop=start + len(held), source=held, offset=0))
                start, left = start + len(held), left - len(held)
        end_chunk()
        return replace(self, writes=tuple(writes))

    def entries(self, digests: Sequence[Sequence[str]]) -> dict[str, FileEntry]:
        """**Rank 0.** Record the digests that were taken while the files were written.

        Args:
            digests: for each rank, the digests of its blocks in order.

        Returns:
            The manifest's entries.
        """
        theirs = [iter(own) for own in digests]
        return {
            name: FileEntry.of(
                TensorPart(part.name, part.start, part.stop, tuple(next(theirs[rank]) for rank in part.writers))
                for part in parts
            )
            for name, parts in (self.files or {}).items()
        }

    def not_finite(self, beyond: Sequence[Sequence[int]]) -> dict[str, list[str]] | None:
        """**Rank 0.** Name the tensors, by their file, that are not within their bounds; None if all are.

        Args:
            beyond: for each rank, the indices of its blocks that are not.
        """
        numbers, passed = [set(own) for own in beyond], [0] * len(beyond)
        found: dict[str, list[str]] = {}
        for name, parts in (self.files or {}).items():
            for part in parts:
                begun = list(passed)
                for rank in part.writers:
                    passed[rank] += 1
                if any(not own.isdisjoint(range(*run)) for own, *run in zip(numbers, begun, passed, strict=True)):
                    found.setdefault(name, []).append(part.name)
        return found or None


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes as a flat uint8 tensor on its device; a copy only if it is not contiguous."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def plan_writes(
    layout: StateLayout, outlines: Sequence[Outline], *, rank: int, texts: Mapping[str, bytes]
) -> WritePlan:
    """Plan what this rank writes; every rank comes to the same division.

    A file whose layout, or the beginning of whose tensors, is not the same on all ranks is written by rank 0 alone:
    otherwise the checkpoint would be a mix of replicas that have drifted apart. If only its layout is another one, for
    what each rank may hold of its own, they have not.

    Args:
        layout: this rank's state.
        outlines: every rank's, in order of rank.
        rank: this rank.
        texts: more JSON files; they count on rank 0 only.
    """
    main = outlines[0]
    shared = {name: None for outline in outlines for name, alike in outline.alike.items() if alike}
    apart = {
        name: tuple(other for other, theirs in enumerate(outlines) if theirs.differs_in(name, main))
        for name in shared
        if any(theirs.differs_in(name, main) for theirs in outlines)
    }
    of_main = {name for name in shared if not all(theirs.fits(name, main) for theirs in outlines)}
    holders = [file for file in layout.files for _ in file.parts()]
    planned = divide(
        (part.written_by(0) if file.name in of_main else part for file in layout.files for part in file.parts()),
        world_size=len(outlines),
        extra=main.alone + sum(main.alike.get(name, 0) for name in of_main),
    )
    files: dict[str, list[TensorPart]] = {file.name: [] for file in layout.files}
    writes: list[Write] = []
    for file, part in zip(holders, planned, strict=True):
        files[file.name].append(part)
        start, stop = part.run_of(rank)
        if start < stop:
            bound = file.bounds.get(part.name)
            writes.append(Write(file.name, start, stop, file.source(part.name), start - part.start, bound))
    if rank:
        return WritePlan(tuple(writes), apart, None)
    for name, content in {**layout.texts, **texts}.items():
        files[name] = [TensorPart("", 0, len(content)).written_by(0)]
        writes.append(Write(name, 0, len(content), content, 0))
    return WritePlan(tuple(writes), apart, {name: tuple(those) for name, those in files.items()})
