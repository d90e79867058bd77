"""Save a run as a checkpoint: one folder that all ranks write into, and that is published in one rename.

Note [Commit]
~~~~~~~~~~~~~
A checkpoint is written into ``step-N.tmp-<random>``. Rank 0 makes the folder and the files; every rank writes its
blocks into them (``plan.py`` says which) and fsyncs each file that it wrote to. When all ranks have reported that, the
manifest is written and fsynced, then the folder is fsynced, renamed to ``step-N``, and the parent is fsynced. Up to
the rename there is no checkpoint; after it there is a complete one, and after the last fsync it survives a power cut.
Only then are older ones removed. A checkpoint is never overwritten: a second save at the same step is ``step-N-r2``,
and the first is removed after it.

Rank 0 locks a draft's folder (``flock``), so that a later save can tell the leftovers of a dead save from the work of a
living one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep import callsite, knobs
from lockstep._torch import ignored_by_ddp
from lockstep.checkpoint import finite, folders, state
from lockstep.checkpoint.encoding import PIECE, encode, new_digest
from lockstep.checkpoint.folders import MANIFEST
from lockstep.checkpoint.manifest import MAX_BYTES, FileEntry, Manifest
from lockstep.checkpoint.match import bare, plain_names, under_plain_names
from lockstep.checkpoint.plan import Block, Outline, StateLayout, WritePlan, Written, plan_writes, text
from lockstep.checkpoint.state import Moment, RunState
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import together
from lockstep.comm.peers import Peers
from lockstep.comm.world import World
from lockstep.errors import CheckpointError
from lockstep.text import which_ranks
from lockstep.version import __version__

# First all ranks agree on what to write, and on which rank writes it.


@dataclass(frozen=True)
class Announcement:
    """The record that each rank sends to the others before a save."""

    step: int
    #: The states of its random number generators.
    rng: dict[str, Any]
    #: The state of its loader, encoded; None: it has no loader.
    loader: Any
    outline: Outline

    def to_json(self) -> dict[str, Any]:
        """Return the announcement in JSON types."""
        return {**vars(self), "outline": self.outline.to_json()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Announcement:
        """Read back what :meth:`to_json` returned."""
        return cls(**{**record, "outline": Outline.from_json(record["outline"])})


def prepare(
    run: RunState, world: World, *, step: int, before: Callable[[], None], meant: finite.Meant = finite.NOTHING_MEANT
) -> WritePlan:
    """**Collective.** Decide what this rank is to write of a checkpoint at ``step``; nothing is copied yet.

    ``before`` is run on each rank first; what it raises is raised on all. ``meant`` names the tensors that need
    not be finite (:meth:`RunState.meant`).

    Raises:
        CheckpointError: a rank's state can't be written down, or the ranks are not at the same step.
    """

    def announce() -> tuple[StateLayout, Announcement]:
        before()
        layout = _lay_out(run, world, meant)
        loader = None if run.loader is None else encode(run.loader.state_dict(), None, where="loader")
        return layout, Announcement(step, state.capture_rng(world.device), loader, layout.outline())

    (layout, _), records = together(world, announce, lambda both: both[1].to_json())
    ranks = [Announcement.from_json(record) for record in records]
    if any(rank.step != step for rank in ranks):
        raise CheckpointError(
            "the ranks are not at the same step, so their states do not belong together; by rank: "
            f"{[rank.step for rank in ranks]}"
        )
    texts = {}
    if world.is_main:
        texts["rng.json"] = text([rank.rng for rank in ranks])
        if run.loader is not None:  # the states are kept once if they are all the same
            loaders = [rank.loader for rank in ranks]
            texts["loader.json"] = text(loaders[:1] if all(one == loaders[0] for one in loaders) else loaders)
    return plan_writes(layout, [rank.outline for rank in ranks], rank=world.rank, texts=texts)


def _lay_out(run: RunState, world: World, meant: finite.Meant) -> StateLayout:
    model = bare(run.model)
    plain = plain_names(model)
    parameters = frozenset(plain(name) for name, _ in model.named_parameters(remove_duplicate=False))
    common = run.common_trees()
    return StateLayout.of(
        under_plain_names(model, model.state_dict()),
        run.trees() if world.is_main else common,
        parameters=parameters,
        is_main=world.is_main,
        alike=frozenset(common),
        own=run.own_tree(),
        world_size=world.world_size,
        judged=run.judges(),
        meant=run.without_trained(meant),
        ignored=_ignored(model, plain),
    )


def _ignored(model: nn.Module, plain: Callable[[str], str]) -> frozenset[str]:
    """Return what replicas leave alone: of the model, or of a part of it that is replicated by itself."""
    return frozenset(
        plain(f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name in ignored_by_ddp(module)
    )


def words_on_drift(plan: WritePlan) -> str:
    """Return a warning if replicas differ; empty if they do not."""
    if not plan.apart:
        return ""
    then = (
        "No checkpoint in which no difference was seen is removed for this one, and a run resumes from the newest of "
        "those: stop this run and start it again to do so"
        if plan.parameters_apart
        else "An earlier checkpoint may hold what all ranks had: lockstep checkpoint rewind goes back to it"
    )
    where = "; ".join(f"{file} on {which_ranks(ranks)}" for file, ranks in plan.apart.items())
    return (
        "the replicas have drifted apart: other ranks hold other values, or other tensors, than rank 0, so rank 0's "
        f"are saved, and a resumed run will not repeat this one bit for bit ({where}). {then}"
    )


# Then the ranks write it, at once or in the background.


def write(
    root: Path,
    plan: WritePlan,
    moment: Moment,
    *,
    peers: Peers,
    check: Callable[[], None],
    tidy: Callable[[Path], None],
    on: Storage = POSIX,
) -> Saved:
    """**Collective.** Write a checkpoint into ``root``, completely or not at all.

    It talks to the other ranks by ``peers`` alone and touches no live state if ``plan`` was copied, so it may run in a
    thread beside training. Before the commit, rank 0 calls ``check``, which raises if the folder is not this job's any
    more; when the checkpoint is safe, it calls ``tidy`` to remove older ones, and warns if it is not finite.

    Raises:
        CheckpointError: it could not be written; the same error on every rank, and nothing is left of it.
    """
    draft: Draft | None = None

    def begin() -> str:
        nonlocal draft
        if plan.files is None:
            return ""
        folders.sweep(root, on=on)
        draft = Draft(root, moment.step, on=on)
        for name in plan.files:
            draft.create(name)
        return draft.path.name

    def finish(written: list[Written]) -> tuple[str, bool]:
        if draft is None:
            return "", False
        check()
        entries = plan.entries([own.digests for own in written])
        not_finite = plan.not_finite([own.beyond for own in written])
        apart = list(plan.parameters_apart) or None
        manifest = _manifest(moment, peers.world_size, entries, not_finite=not_finite, apart=apart)
        path = draft.commit(manifest)
        tidy(path)
        if not_finite:
            callsite.warn(_words_on_not_finite(path, not_finite), RuntimeWarning)
        return path.name, manifest.is_sound

    try:
        _, drafts = together(peers, begin, lambda name: name)
        _, written = together(
            peers, lambda: write_blocks(root / str(drafts[0]), plan.contents(), on=on), lambda own: own
        )
        _, told = together(peers, lambda: finish([Written(*own) for own in written]), lambda saved: saved)
    except CheckpointError:  # on every rank: none continues, and reads the folder, before rank 0 has cleaned up
        if draft is not None:
            draft.discard()
        peers.gather(None)
        raise
    except BaseException:  # an interrupt must not leave a draft either
        if draft is not None:
            draft.discard()
        raise
    name, is_sound = told[0]
    return Saved(root / str(name), is_sound=bool(is_sound))


@dataclass(frozen=True)
class Saved:
    """A checkpoint that has been written; the same on every rank."""

    folder: Path
    #: The ``is_sound`` of its manifest.
    is_sound: bool


def _words_on_not_finite(path: Path, not_finite: dict[str, list[str]]) -> str:
    return (
        f"the checkpoint {path.name} holds values that are NaN or infinite, in {finite.in_words(not_finite)}: no "
        f"sound checkpoint in {path.parent} is removed for it, and a run resumes from the newest sound one; stop "
        "this run and start it again to do so (with check_finite='step', the default of lockstep.replicate, a gradient "
        "that is not finite is named by rank and parameter)"
    )


def _manifest(
    moment: Moment,
    world_size: int,
    files: dict[str, FileEntry],
    *,
    not_finite: dict[str, list[str]] | None,
    apart: list[int] | None,
) -> Manifest:
    return Manifest(
        step=moment.step,
        epoch=moment.epoch,
        in_epoch=moment.in_epoch,
        world_size=world_size,
        metric=moment.metric,
        round=None if (found := knobs.round_()) is None else found[1],
        hosts=moment.hosts,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={
            "lockstep": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **moment.conditions,
        },
        files=dict(sorted(files.items())),
        not_finite=not_finite,
        apart=apart,
    )


class Draft:
    """**Rank 0.** The folder of a checkpoint to be; see Note [Commit].

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, root: Path, step: int, *, on: Storage = POSIX) -> None:
        self._root, self._on = root, on
        self._committed = False
        self._name = folders.next_name(root, step, on=on)
        self.path = root / folders.draft_name(self._name)
        on.make_folder(self.path)
        try:
            self._folder = on.open_folder(self.path)
        except BaseException:
            on.remove_folder(self.path)
            raise
        try:
            # Where there are no locks, leftovers can't be told from living drafts, and none is removed.
            on.lock(self._folder)
        except BaseException:
            self.discard()
            raise

    def create(self, name: str) -> None:
        """**Rank 0.** Make an empty file for ranks to write into."""
        with named(self.path / name):
            self._on.close(self._on.create(self._folder, name))

    def commit(self, manifest: Manifest) -> Path:
        """**Rank 0.** Publish the draft atomically and return the checkpoint's path."""
        content = manifest.to_json()
        if len(content) > MAX_BYTES:
            raise CheckpointError(f"{self.path}: the manifest would have {len(content)} bytes, at most {MAX_BYTES} fit")
        self._write_manifest(content)
        with named(self.path):
            self._on.sync(self._folder)
        whole = self._root / self._name
        self._on.rename(self.path, whole)
        try:
            with named(self._root):
                folders.sync_folder(self._root, on=self._on)
        except OSError:  # a save that fails leaves no checkpoint; if the rename fails too, it leaves a complete one
            self._on.rename(whole, self.path)
            raise
        self._on.close(self._folder)
        self._committed = True  # from here on no failure may remove it
        return whole

    def _write_manifest(self, content: bytes) -> None:
        with named(self.path / MANIFEST):
            file = self._on.create(self._folder, MANIFEST)
            try:
                self._on.write(file, content, 0)
                self._on.sync(file)
            finally:
                self._on.close(file)

    def discard(self) -> None:
        """**Rank 0.** Give the draft up, unless it is a checkpoint. What can't be removed is swept by a later save."""
        if self._committed:
            return
        try:
            folders.remove_tree(self.path, on=self._on)
        except OSError:
            pass  # the failure that led here is the one to report, and a draft is not a checkpoint
        finally:
            self._on.close(self._folder)


def write_blocks(folder: Path, blocks: Iterable[Block], *, on: Storage = POSIX) -> Written:
    """Write blocks, one file after the other, to the disk itself. Return their digests and which are out of bounds.

    Raises:
        OSError: it could not be written.
    """
    written = Written([], [])
    with named(folder):
        opened = on.open_folder(folder)
    current, file = "", -1
    try:
        for name, offset, data, bound in blocks:
            with named(folder / name):
                if name != current:
                    file = _finish(file, on)
                    file, current = on.open(opened, name, write=True), name
                digest = new_digest()
                for start in range(0, len(data), PIECE):
                    piece = data[start : start + PIECE]
                    digest.update(piece)
                    if bound is not None and not bound.holds(piece):
                        written.beyond.append(len(written.digests))
                        bound = None
                    on.write(file, piece, offset + start)
                written.digests.append(digest.hexdigest())
        with named(folder / current):
            file = _finish(file, on)
    finally:
        if file >= 0:
            on.close(file)
        on.close(opened)
    return written


def _finish(file: int, on: Storage) -> int:
    """Bring a file to the disk and close it, if one is open; return the descriptor of none, -1."""
    if file >= 0:
        on.sync(file)
        on.close(file)
    return -1


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the file in an error of an operation on a descriptor, which does not name it by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            error.filename = str(path)
        raise
