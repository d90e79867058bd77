"""Checkpointer: save a training run, find it again, and go on as if nothing had happened."""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lockstep.agreement import standing
from lockstep.checkpoint import folders, rng
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.boundary import StepBoundary
from lockstep.checkpoint.captured import Captured, Share, capture, divided, text
from lockstep.checkpoint.codec import encode
from lockstep.checkpoint.guard import reading
from lockstep.checkpoint.load import Contents, read
from lockstep.checkpoint.lock import RunLock
from lockstep.checkpoint.match import bare
from lockstep.checkpoint.peers import OverGroup, Peers
from lockstep.checkpoint.pruning import prune
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import together
from lockstep.checkpoint.training import Stateful, Training
from lockstep.checkpoint.write import Place, write
from lockstep.comm.init import current_world
from lockstep.errors import CheckpointCorrupt, CheckpointError, LockstepError
from lockstep.recorder import writer
from lockstep.recorder.layout import Phase

_APART = (
    "the replicas have drifted apart: other ranks hold other values, or other tensors, than rank 0, so rank 0's are "
    "saved, and a resumed run will not repeat this one bit for bit; files and ranks"
)


@dataclass(frozen=True)
class Restored:
    """The checkpoint that training goes on from."""

    #: Its folder.
    folder: Path
    #: Optimizer steps taken.
    step: int
    #: The epoch to go on with, and whether some of it is done.
    epoch: int
    in_epoch: bool
    #: Ranks of the job that wrote it.
    world_size: int
    #: Newer checkpoints that are damaged: file, what was expected and what was found.
    skipped: tuple[str, ...]


class Checkpointer:
    """**Collective.** The checkpoints of a run, in one folder: ``step-00000042/`` and so on.

    Each is a folder that appears whole or not at all: ``model.safetensors`` (which any tool opens), the optimizer, the
    scheduler, the loader's position, every rank's random number generators, and a manifest with a digest of each file.
    Nothing is pickled. A run that is interrupted and resumed at the same world size ends with the same bits as one
    that is not.

    All ranks share the writing, and all read, so they must see the same folder.

    Args:
        folder: where the checkpoints are; made (0700) if it is not there.
        model: the model; a wrapper around it (DistributedDataParallel, torch.compile) leaves no trace in the names.
        optimizer: its steps are counted: :attr:`step`.
        scheduler: a learning-rate scheduler.
        loader: the training loader, whose position is saved. :func:`lockstep.shard` makes one that resumes in
            mid-epoch; anything with ``state_dict`` and ``load_state_dict`` is taken.
        extra: more objects with a state, by name: ``{"scaler": scaler, "ema": ema}``. The same on all ranks.
        keep: how many checkpoints to keep; None keeps all. A :class:`lockstep.Retention` says more: every n-th, the
            best. Checkpoints that someone is reading are left for the next save to remove.

    The folder belongs to this job until its ranks have ended, or rank 0 has let go of every Checkpointer of the folder:
    another job that makes a Checkpointer of it is refused. See Note [Run lock] in ``checkpoint/lock.py``.

    Raises:
        CheckpointError: the folder can't be written, or belongs to another job, which is named; on every rank.
        LockstepError: ``lockstep.init()`` has not been called.
        TypeError, ValueError: an argument is of no use.
    """

    #: Where the operations on files go; tests put others in its place.
    _storage: Storage = POSIX

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        loader: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | Retention | None = 3,
    ) -> None:
        self._training = Training(model, optimizer, scheduler, loader, dict(extra or {}))
        self._rule = _rule(keep)
        world = current_world()
        if world is None:
            raise LockstepError("lockstep.Checkpointer: no world yet; call lockstep.init() first")
        self._world = world
        #: Where the checkpoints are.
        self.folder = Path(folder).absolute()
        #: Optimizer steps taken, which name the checkpoints. Without an optimizer it is yours to count up; a save at
        #: the step of the last one then counts one up by itself.
        self.step = 0
        self._last_saved: int | None = None
        #: The epoch to go on with, between epochs; within epochs(), the one under way.
        self._epoch = 0
        self._in_body = False
        self._said_apart = False
        #: True once this run owns the folder: it went on from what is there, or has saved.
        self._owns_folder = False
        #: Checkpoints that restore() found damaged.
        self._damaged: set[str] = set()
        (self._lock, _), owners = together(world, self._claim_folder, lambda claimed: claimed[1])
        #: The users whose checkpoints are taken: this one, and as whom the file system makes its files.
        self._owners = (os.geteuid(), int(owners[0]))
        self._background = Background(world)
        if optimizer is not None:
            _count_steps(optimizer, self)
        self._boundary = StepBoundary(self, world, counts_steps=optimizer is not None)
        self._boundary.watch(loader)
        weakref.finalize(self, self._boundary.close).atexit = False

    def _claim_folder(self) -> tuple[RunLock | None, int]:
        """Rank 0 makes the folder, and takes it for this job; whom what is made there belongs to."""
        if not self._world.is_main:
            return None, os.geteuid()
        owner = folders.prepare_root(self.folder, on=self._storage)
        return RunLock(self.folder), owner

    def _tell_step(self) -> None:
        own = standing.own()
        if own is not None:
            own.at_step(self.step)

    def epochs(self, count: int, *, resume: bool = True) -> Iterator[int]:
        """**Collective.** The epochs still to do out of ``count``: ``for epoch in saved.epochs(10)``.

        Restores the newest checkpoint first, unless :meth:`restore` or :meth:`save` was called before. An epoch that
        was interrupted (a save within the loader's loop) comes again, and the loader goes on inside it; one that
        was saved behind the loader's loop is over.

        Args:
            count: epochs of the whole run, those before the interruption included.
            resume: False: begin anew, in a folder that must hold no checkpoints.

        Raises:
            CheckpointError: as :meth:`restore`; or the folder holds checkpoints and ``resume`` is False.
        """
        if count < 0:
            raise ValueError(f"epochs({count}): expected 0 or more")
        self._boundary.listen()
        try:
            if not self._owns_folder and resume:
                self.restore()
            elif not self._owns_folder:
                together(self._world, self._refuse_foreign_folder, lambda _: None)
            while self._epoch < count:
                self._in_body = True
                yield self._epoch
                self._boundary.reached(epoch_done=True, last=self._epoch + 1 == count)
                self._in_body = False
                self._epoch += 1
            self.wait()
        finally:
            self._in_body = False
            self._boundary.close()

    def between_steps(self) -> None:
        """**Collective.** Say that this is a moment between two steps, where a run that is asked to stop can be left.

        Only needed in loops over other loaders than that of :func:`lockstep.shard`, which says so itself: call it once
        in each turn, before the step or behind it. Costs about a microsecond. A run that is left in the middle of an
        epoch begins that epoch again, unless the loader's state knows better.

        Raises:
            SystemExit: SIGTERM or Ctrl-C asked the run to stop, and all ranks have saved; with code 75.
            CheckpointError: they could not save.
        """
        loader_knows = isinstance(getattr(self._training.loader, "in_epoch", None), bool)
        self._boundary.between_steps(epoch_done=False if self._in_body and not loader_knows else None)

    # Saving.

    @writer.phase(Phase.SAVE)
    def save(self, *, metric: float | None = None, epoch_done: bool | None = None) -> Path:
        """**Collective.** Write a checkpoint to the disk itself; its folder. Older ones are pruned behind it.

        If it fails, the checkpoints before it are as they were, and training may go on.

        Args:
            metric: a number by which the best checkpoints are kept, if ``keep`` says so; the same on all ranks
                (rank 0's counts). NaN and infinities never are the best.
            epoch_done: within :meth:`epochs`: whether a resumed run goes on with the next epoch, or with this one.
                None: with the next one, unless the loader is in the middle of its pass. What your loop does *after*
                a save behind the loader's loop is not done again.

        Raises:
            CheckpointError: it could not be written (disk full, permissions, a value that can't be written down), or
                the ranks are at different steps, or the folder holds another run; the same error on every rank.
        """
        earlier: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            earlier = error
        share, place = self._capture(metric, epoch_done)
        folder = self._write(share, place, OverGroup(self._world))
        self._owns_folder = True
        self._last_saved = place.step
        if earlier is not None and self._world.is_main:
            warnings.warn(f"{earlier}; the save at step {place.step} succeeded", RuntimeWarning, stacklevel=2)
        return folder

    @writer.phase(Phase.SAVE)
    def async_save(self, *, metric: float | None = None, epoch_done: bool | None = None) -> None:
        """**Collective.** As :meth:`save`, but training goes on as soon as the state is copied in memory.

        A thread writes the copy. At most one save is under way: the next one waits for it. Memory: each rank keeps one
        buffer as large as what it writes, about the size of the state divided by the number of ranks (pinned on a
        CUDA rank), from the first call on until the Checkpointer goes. See Note [Saving in the background] in
        ``checkpoint/background.py``.

        A failure is said on rank 0's standard error when it happens, and raised on all ranks by the next of these:
        ``async_save`` (which then begins no save; call it again), :meth:`wait`, the end of :meth:`epochs`. A process
        that ends waits for the save, and if that failed and was not raised, ends with exit code 1. A following
        :meth:`save` that succeeds makes it a warning.

        Args:
            metric, epoch_done: as for :meth:`save`.

        Raises:
            CheckpointError: the save before this one failed; or as :meth:`save`, as far as it is known before anything
                is written. The same on every rank.
        """
        self.wait()
        share, place = self._capture(metric, epoch_done)
        self._background.forget_records()  # all ranks have waited, or they would not have met in the line above
        self._background.begin(share, step=place.step, write=lambda copied, peers: self._write(copied, place, peers))
        self._last_saved = place.step

    def wait(self) -> Path | None:
        """**Local.** Wait until the :meth:`async_save` that is under way is on the disk: its folder; None if there is
        none.

        Raises:
            CheckpointError: it failed; the same on every rank, and raised once.
        """
        folder = self._background.wait()
        self._owns_folder |= folder is not None
        return folder

    def _write(self, share: Share, place: Place, peers: Peers) -> Path:
        return write(
            self.folder,
            share,
            place,
            peers=peers,
            tidy=lambda newest: prune(self.folder, newest, self._rule, damaged=self._damaged, on=self._storage),
            on=self._storage,
        )

    def _capture(self, metric: float | None, epoch_done: bool | None) -> tuple[Share, Place]:
        """**Collective.** What this rank will write, copied nowhere yet, and where the run is."""
        if self._training.optimizer is None and self.step == self._last_saved:
            self.step += 1
        (captured, _), records = together(self._world, self._own_state, lambda state: state[1])
        steps = [record["step"] for record in records]
        if any(step != self.step for step in steps):
            raise CheckpointError(
                f"the ranks are not at the same step, so their states do not belong together; by rank: {steps}"
            )
        share = divided(captured, [record["outline"] for record in records], rank=self._world.rank)
        if share.whole is not None:
            loaders = [record["loader"] for record in records]
            texts = {"rng.json": text([record["rng"] for record in records])}
            if self._training.loader is not None:  # kept once if they are all the same
                texts["loader.json"] = text(loaders[:1] if all(state == loaders[0] for state in loaders) else loaders)
            share = share.with_texts(texts)
        if share.apart and self._world.is_main and not self._said_apart:
            self._said_apart = True
            warnings.warn(f"{_APART}: {share.apart}", RuntimeWarning, stacklevel=3)
        return share, Place(self.step, *self._place(epoch_done), metric=_finite(metric))

    def _own_state(self) -> tuple[Captured, dict[str, Any]]:
        """This rank's state, and what the other ranks need to know of it."""
        self._refuse_foreign_folder()
        model, loader, is_main = bare(self._training.model), self._training.loader, self._world.is_main
        parameters = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        parts = self._training.trees() if is_main else self._training.common_trees()
        captured = capture(model.state_dict(), parts, parameters=parameters, is_main=is_main)
        return captured, {
            "step": self.step,
            "rng": rng.capture(self._world.device),
            "loader": None if loader is None else encode(loader.state_dict(), None, where="loader"),
            "outline": captured.outline(),
        }

    def _place(self, epoch_done: bool | None) -> tuple[int, bool]:
        """The epoch to go on with, and whether some of it is done."""
        loader = self._training.loader
        in_epoch = bool(getattr(loader, "in_epoch", False)) if epoch_done is None else not epoch_done
        if self._in_body:
            return (self._epoch, True) if in_epoch else (self._epoch + 1, False)
        epoch = getattr(loader, "epoch", None)  # the user counts epochs; a sharded loader knows which one it is in
        return (epoch if isinstance(epoch, int) else self._epoch), in_epoch

    def _refuse_foreign_folder(self) -> None:
        """Rank 0 looks for checkpoints that this run has nothing to do with."""
        if self._owns_folder or not self._world.is_main:
            return
        there = folders.checkpoints(self.folder, on=self._storage)
        if there:
            raise CheckpointError(
                f"{self.folder} holds the checkpoints of an earlier run (the newest is {there[0].name}), which this "
                "run has not gone on from: call restore() or epochs() first to go on from it, or choose another folder"
            )

    # Restoring.

    @writer.phase(Phase.RESTORE)
    def restore(self, *, strict: bool = False) -> Restored | None:
        """**Collective.** Go on from the newest whole checkpoint; None if there is none.

        Everything is verified and compared on every rank before anything is changed on any. Damaged checkpoints are
        skipped with a warning on rank 0.

        Args:
            strict: refuse a damaged checkpoint instead of skipping it.

        Raises:
            CheckpointCorrupt: no checkpoint there is whole (with ``strict``: the newest is not).
            CheckpointMismatch: the checkpoint is of another model, optimizer, scheduler or dataset.
            CheckpointError: the ranks do not see the same folder.
        """
        self.wait()
        _, listings = together(self._world, self._listing, lambda names: names)
        damaged: list[str] = []
        for name in listings[0]:
            try:
                contents, digests = together(
                    self._world,
                    lambda name=name: self._read_and_compare(self.folder / name),  # type: ignore[misc]
                    lambda read_: read_.manifest.to_json().decode(),
                )
            except CheckpointCorrupt as error:
                if strict:
                    raise
                damaged.append(str(error))
                self._damaged.add(name)
                continue
            if any(digest != digests[0] for digest in digests):
                raise CheckpointError(f"the ranks see different checkpoints in {self.folder / name}: is it shared?")
            return self._apply(contents, tuple(damaged))
        if damaged:
            raise CheckpointCorrupt(f"{self.folder}: no checkpoint there is whole: {'; '.join(damaged)}")
        self._owns_folder = True
        return None

    def _listing(self) -> list[str]:
        """Rank 0's names of the checkpoints there, newest first."""
        return (
            [folder.name for folder in folders.checkpoints(self.folder, on=self._storage)]
            if self._world.is_main
            else []
        )

    def _read_and_compare(self, folder: Path) -> Contents:
        with reading(folder):
            contents = read(folder, owners=self._owners, on=self._storage)
        ranks = contents.manifest.world_size
        rng.refuse_malformed(contents.parts.get("rng"), count=ranks, where=str(folder / "rng.json"))
        self._training.refuse_other(contents, world_size=self._world.world_size)
        return contents

    def _apply(self, contents: Contents, damaged: tuple[str, ...]) -> Restored:
        manifest, parts = contents.manifest, contents.parts
        undo: list[tuple[Stateful, Any]] = []
        try:
            together(self._world, lambda: self._training.load_small(parts, undo), lambda _: None)
            together(self._world, lambda: self._training.load_loader(parts, self._world.rank), lambda _: None)
        except CheckpointError:
            for thing, before in reversed(undo):
                thing.load_state_dict(before)
            raise
        together(self._world, lambda: self._training.load_tensors(contents), lambda _: None)
        self.step = self._last_saved = manifest.step
        self._tell_step()
        self._epoch = manifest.epoch
        self._owns_folder = True
        if self._world.is_main:
            self._say_what_is_not_as_it_was(contents, damaged)
        if manifest.world_size == self._world.world_size:
            rng.restore(parts["rng"][self._world.rank], self._world.device)
        return Restored(
            folder=contents.folder,
            step=manifest.step,
            epoch=manifest.epoch,
            in_epoch=manifest.in_epoch,
            world_size=manifest.world_size,
            skipped=damaged,
        )

    def _say_what_is_not_as_it_was(self, contents: Contents, damaged: tuple[str, ...]) -> None:
        words = []
        if damaged:
            words.append(f"skipped damaged checkpoints: {'; '.join(damaged)}")
        saved, now = contents.manifest.world_size, self._world.world_size
        if saved != now:
            words.append(
                f"it was written by {saved} rank(s) and there are {now} now: everything is restored but the random "
                "number generators, so dropout will not repeat bit for bit"
            )
        elif (contents.parts["rng"][0]["cuda"] is None) != (self._world.device.type != "cuda"):
            words.append("it was written on another kind of device: the GPU's random number generator is not restored")
        unused = self._training.unused(contents)
        if unused:
            words.append(f"it also holds {', '.join(unused)}, for which nothing was given here")
        if words:
            warnings.warn(f"going on from {contents.folder}: " + "; ".join(words), RuntimeWarning, stacklevel=4)


def _rule(keep: int | Retention | None) -> Retention:
    if isinstance(keep, Retention):
        return keep
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int)):
        raise TypeError(f"keep={keep!r}: expected a number of checkpoints, None, or a lockstep.Retention")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1, or None to keep all checkpoints")
    return Retention(last=keep)


def _finite(metric: float | None) -> float | None:
    number = None if metric is None else float(metric)
    return number if number is None or math.isfinite(number) else None


def _count_steps(optimizer: torch.optim.Optimizer, saved: Checkpointer) -> None:
    """Count the optimizer's steps in ``saved.step``, for as long as someone has ``saved``: its end frees the folder."""
    weak = weakref.ref(saved)

    def count(*_: object) -> None:
        alive = weak()
        if alive is not None:
            alive.step += 1
            alive._tell_step()

    optimizer.register_step_post_hook(count)
