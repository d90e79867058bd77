"""A captured state becomes a checkpoint: written by all ranks together, wholly or not at all."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from lockstep.checkpoint import folders
from lockstep.checkpoint.captured import Share
from lockstep.checkpoint.draft import Draft, write_blocks
from lockstep.checkpoint.manifest import FileEntry, Manifest
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import together
from lockstep.comm.peers import Peers
from lockstep.errors import CheckpointError
from lockstep.version import __version__


@dataclass(frozen=True)
class Place:
    """Where in the run a checkpoint is."""

    step: int
    epoch: int
    in_epoch: bool
    #: By which the best are kept.
    metric: float | None = None


def write(
    root: Path, share: Share, place: Place, *, peers: Peers, tidy: Callable[[Path], None], on: Storage = POSIX
) -> Path:
    """**Collective.** Write a checkpoint into ``root``, wholly or not at all; its folder.

    It talks to the other ranks by ``peers`` alone and touches no live state if ``share`` was copied, so that it may
    run in a thread beside training.

    Args:
        root: the run's folder.
        share: this rank's share.
        place: where the run is.
        peers: the ranks.
        tidy: what rank 0 does when the checkpoint is safe: remove older ones.
        on: the file system.

    Raises:
        CheckpointError: it could not be written; the same error on every rank, and nothing is left of it.
    """
    writing = _Writing(root, share, place, peers.world_size, tidy, on)
    try:
        _, drafts = together(peers, writing.begin, lambda name: name)
        _, digests = together(peers, lambda: writing.write_mine(str(drafts[0])), lambda own: own)
        _, names = together(peers, lambda: writing.finish(digests), lambda name: name)
    except CheckpointError:  # on every rank: none goes on, and looks at the folder, before rank 0 has cleaned up
        writing.give_up()
        peers.gather(None)
        raise
    except BaseException:  # an interrupt as well must not leave a draft behind
        writing.give_up()
        raise
    return root / str(names[0])


class _Writing:
    """The steps of one rank. Rank 0 has the draft."""

    def __init__(
        self, root: Path, share: Share, place: Place, world_size: int, tidy: Callable[[Path], None], on: Storage
    ) -> None:
        self._root, self._share, self._place, self._world_size = root, share, place, world_size
        self._tidy, self._on = tidy, on
        self._draft: Draft | None = None
        self._texts: dict[str, FileEntry] = {}

    def begin(self) -> str:
        """The draft's name, from rank 0."""
        whole = self._share.whole
        if whole is None:
            return ""
        folders.sweep(self._root, on=self._on)
        self._draft = Draft(self._root, self._place.step, on=self._on)
        for name in whole.files:
            self._draft.create(name)
        return self._draft.path.name

    def write_mine(self, draft: str) -> list[str]:
        """This rank's bytes, on the disk; their digests."""
        if self._draft is not None and self._share.whole is not None:
            texts = self._share.whole.texts
            self._texts = {name: self._draft.write(name, content) for name, content in texts.items()}
        return write_blocks(self._root / draft, self._share.contents(), on=self._on)

    def finish(self, digests: Sequence[Sequence[str]]) -> str:
        """The checkpoint's name, from rank 0."""
        if self._draft is None or self._share.whole is None:
            return ""
        files = {**self._share.whole.entries(digests), **self._texts}
        path = self._draft.commit(_manifest(self._place, self._world_size, files))
        self._draft = None  # from here on it is a checkpoint, and nothing that fails may take it away
        self._tidy(path)
        return path.name

    def give_up(self) -> None:
        """Leave nothing behind."""
        if self._draft is not None:
            self._draft.discard()
            self._draft = None


def _manifest(place: Place, world_size: int, files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        step=place.step,
        epoch=place.epoch,
        in_epoch=place.in_epoch,
        world_size=world_size,
        metric=place.metric,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"lockstep": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        files=dict(sorted(files.items())),
    )
