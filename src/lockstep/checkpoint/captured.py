"""What goes into a checkpoint, on each rank: which tensors and texts, and which of their bytes this rank writes.

Nothing is copied here. A save that returns at once copies its :class:`Share`, and writes the copy in the background.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.checkpoint.codec import encode
from lockstep.checkpoint.manifest import MODEL, FileEntry, Part
from lockstep.checkpoint.sharing import Block, Extent, blocks, cut, divide
from lockstep.checkpoint.tensors import TensorFile, lay_out


@dataclass(frozen=True)
class Captured:
    """The state of a run on this rank, laid out in files."""

    #: On rank 0 all files of tensors; on the others those that all ranks have.
    files: tuple[TensorFile, ...]
    #: JSON files by name; on rank 0 only.
    texts: Mapping[str, bytes]

    def outline(self) -> dict[str, Any]:
        """**Local.** What the ranks tell each other before they divide the work: see :func:`divided`."""
        alike = {file.name: sum(e.stop - e.start for e in file.extents() if e.alike) for file in self.files}
        everything = sum(e.stop - e.start for file in self.files for e in file.extents())
        return {
            "fingerprints": {file.name: file.fingerprint() for file in self.files},
            "alike": alike,
            "alone": everything - sum(alike.values()) + sum(map(len, self.texts.values())),
        }


def capture(
    model: Mapping[str, Any], parts: Mapping[str, Any], *, parameters: frozenset[str], is_main: bool
) -> Captured:
    """**Local.** Lay a run's state out in files.

    ``model.safetensors`` holds the tensors of the model, ``model.json`` what else its state dict has. Every other part
    is a JSON file, with a safetensors file beside it if there are tensors in it. Parameters and the optimizer's state
    are the same on all ranks; buffers and everything else may not be, and are taken from rank 0.

    Args:
        model: the model's state dict, under the names of the bare model.
        parts: trees by the name of their file: optimizer, scheduler, extra, …; on other ranks than 0 only
            ``optimizer`` counts.
        parameters: the names in ``model`` that are parameters.
        is_main: whether this is rank 0.

    Raises:
        CheckpointError: something can't be written down.
    """
    tensors = {name: value for name, value in model.items() if isinstance(value, torch.Tensor)}
    files = [lay_out(MODEL, tensors, where="model", alike=parameters)]
    texts: dict[str, bytes] = {}
    others = {name: value for name, value in model.items() if name not in tensors}
    if others and is_main:
        texts["model.json"] = text(encode(others, None, where="model"))
    for part, tree in parts.items():
        if not is_main and part != "optimizer":
            continue
        kept: dict[str, torch.Tensor] = {}
        encoded = encode(tree, kept, where=part)
        if kept:
            alike = None if part == "optimizer" else frozenset[str]()
            files.append(lay_out(f"{part}.safetensors", kept, where=part, alike=alike))
        if is_main:
            texts[f"{part}.json"] = text(encoded)
    return Captured(tuple(files), texts)


def text(encoded: Any) -> bytes:
    """**Local.** A JSON file."""
    return json.dumps(encoded, allow_nan=False).encode()


@dataclass(frozen=True)
class Piece:
    """A block that this rank writes, and where its bytes come from."""

    block: Block
    #: A tensor of any strides on any device, or the bytes themselves.
    source: torch.Tensor | bytes
    #: The block's first byte within the source.
    offset: int


@dataclass(frozen=True)
class Share:
    """What one rank writes of the files of tensors."""

    pieces: tuple[Piece, ...]
    #: Files that rank 0 writes alone because other ranks hold something else there, and these ranks.
    apart: Mapping[str, tuple[int, ...]]
    #: What rank 0 knows of all; None on the others.
    whole: Whole | None

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces of tensors together."""
        return sum(p.block.stop - p.block.start for p in self.pieces if isinstance(p.source, torch.Tensor))

    def contents(self) -> Iterator[tuple[str, int, memoryview]]:
        """**Local.** File, offset and content of each piece, in order; each is valid until the next."""
        flat, of = torch.empty(0), None
        for piece in self.pieces:
            length = piece.block.stop - piece.block.start
            if isinstance(piece.source, bytes):
                data = memoryview(piece.source)[piece.offset : piece.offset + length]
            else:
                if piece.source is not of:
                    flat, of = flat_bytes(piece.source), piece.source
                data = flat[piece.offset : piece.offset + length].cpu().numpy().data
            yield piece.block.extent.file, piece.block.start, data

    def with_texts(self, texts: Mapping[str, bytes]) -> Share:
        """**Rank 0.** The same share, with more JSON files."""
        if self.whole is None:
            raise ValueError("only rank 0 writes texts")
        return replace(self, whole=replace(self.whole, texts={**self.whole.texts, **texts}))

    def copied(self, into: torch.Tensor) -> Share:
        """**Local.** The same share, its tensors' bytes copied into a buffer, which must outlive it.

        Args:
            into: uint8 on the CPU, one dimension, at least :attr:`nbytes` long; may be pinned. Copies from a GPU are
                only queued, on its current stream: synchronize before the buffer is read.
        """
        pieces, end = [], 0
        flat, of = torch.empty(0), None
        for piece in self.pieces:
            if isinstance(piece.source, bytes):
                pieces.append(piece)
                continue
            if piece.source is not of:
                flat, of = flat_bytes(piece.source), piece.source
            start, end = end, end + piece.block.stop - piece.block.start
            held = into[start:end]
            held.copy_(flat[piece.offset : piece.offset + end - start], non_blocking=True)
            pieces.append(Piece(piece.block, held, 0))
        return replace(self, pieces=tuple(pieces))


@dataclass(frozen=True)
class Whole:
    """What rank 0 knows of a checkpoint that all ranks write."""

    #: JSON files by name.
    texts: Mapping[str, bytes]
    #: All bytes of the files of tensors, in order.
    extents: tuple[Extent, ...]
    #: Every rank's blocks, in the order in which it writes them.
    division: tuple[tuple[Block, ...], ...]

    @property
    def files(self) -> list[str]:
        """The files of tensors."""
        return list(dict.fromkeys(extent.file for extent in self.extents))

    def entries(self, digests: Sequence[Sequence[str]]) -> dict[str, FileEntry]:
        """**Local.** The manifest's entries of the files of tensors.

        Args:
            digests: of each rank's blocks, in order.
        """
        found: dict[tuple[str, int], str] = {}
        for own, values in zip(self.division, digests, strict=True):
            for block, digest in zip(own, values, strict=True):
                found[block.extent.file, block.start] = digest
        parts: dict[str, list[Part]] = {name: [] for name in self.files}
        for extent in self.extents:
            starts = [start for start, _ in cut(extent.start, extent.stop)]
            in_order = tuple(found[extent.file, start] for start in starts)
            parts[extent.file].append(Part(extent.name, extent.start, extent.stop, in_order))
        return {name: FileEntry.of(those) for name, those in parts.items()}


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """**Local.** A tensor's bytes as a flat uint8 tensor on its device; a copy only if it is not contiguous."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def divided(captured: Captured, outlines: Sequence[Mapping[str, Any]], *, rank: int) -> Share:
    """**Local.** This rank's share of the writing; every rank comes to the same division.

    A file whose layout, or the beginning of whose tensors, is not the same on all ranks is written by rank 0 alone:
    otherwise the checkpoint would be a mix of replicas that have drifted apart.

    Args:
        captured: this rank's state.
        outlines: every rank's :meth:`Captured.outline`, in order of rank.
        rank: this rank.
    """
    main = outlines[0]
    prints = [outline["fingerprints"] for outline in outlines]
    apart = {
        name: tuple(other for other, theirs in enumerate(prints) if theirs.get(name) != prints[0][name])
        for name, alike in main["alike"].items()
        if alike and any(theirs.get(name) != prints[0][name] for theirs in prints)
    }
    alone = main["alone"] + sum(main["alike"][name] for name in apart)
    extents = [extent for file in captured.files for extent in file.extents()]
    common = [extent for extent in extents if extent.alike and extent.file not in apart]
    division = divide(common, world_size=len(outlines), extra=alone)
    sources: dict[tuple[str, str], torch.Tensor | bytes] = {}
    for file in captured.files:
        sources[file.name, ""] = file.header
        sources |= {(file.name, one.name): one.tensor for one in file.tensors}
    whole = None
    if rank == 0:
        own = [extent for extent in extents if not extent.alike or extent.file in apart]
        order = {file.name: number for number, file in enumerate(captured.files)}
        division[0] = sorted(division[0] + blocks(own), key=lambda block: (order[block.extent.file], block.start))
        whole = Whole(captured.texts, tuple(extents), tuple(map(tuple, division)))
    pieces = [
        Piece(block, sources[block.extent.file, block.extent.name], block.start - block.extent.start)
        for block in division[rank]
    ]
    return Share(tuple(pieces), apart, whole)
