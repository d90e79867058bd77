"""Checkpointer: save a training run, find it again, and resume it as if nothing had happened."""

from __future__ import annotations

import math
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path, PurePath
from typing import Protocol

import torch
from torch import nn

from lockstep import accelerator, callsite
from lockstep._files import run_path
from lockstep.checkpoint.aside import Settle
from lockstep.checkpoint.background import Background
from lockstep.checkpoint.boundary import StepBoundary
from lockstep.checkpoint.evaluation import refuse_evaluated_run
from lockstep.checkpoint.evaluations import Evaluated
from lockstep.checkpoint.finite import NOTHING_MEANT
from lockstep.checkpoint.lineage import Lineage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.match import bare
from lockstep.checkpoint.missing import words_on_missing
from lockstep.checkpoint.plan import WritePlan
from lockstep.checkpoint.rest import Rest, RunAtRest
from lockstep.checkpoint.restore import Restored, find, load, load_generators, restored, words_on_differences
from lockstep.checkpoint.retention import Retention, prune, rule_of
from lockstep.checkpoint.run_folder import Hold, run_folder
from lockstep.checkpoint.save import Saved, prepare, words_on_drift, write
from lockstep.checkpoint.state import (
    LastMetric,
    Moment,
    Position,
    RunState,
    Stateful,
    parameters_in_short,
    refuse_parts,
)
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.together import together
from lockstep.comm.calls import of_all_ranks, refuse_apart
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.init import current_world
from lockstep.comm.peers import OverGroup, Peers
from lockstep.errors import CheckpointError, LockstepError
from lockstep.job import flight, notes
from lockstep.job.page import Phase
from lockstep.step.conditions import conditions
from lockstep.step.local_training import LocalTraining
from lockstep.text import counted


class Follower(Protocol):
    """An object that is told the run's position, on every rank in the same order; for instance a log."""

    def resumed(self, step: int | None) -> None:
        """**Collective.** The run resumes from ``step``; None: there is nothing to resume from."""

    def before_save(self, step: int) -> None:
        """**Collective.** A checkpoint at ``step`` is about to be made."""

    def at_end(self, step: int) -> None:
        """**Collective.** The last epoch is over."""


class Checkpointer:
    """**Collective.** The checkpoints of a run, in one folder: ``step-00000042/`` and so on.

    Each is a folder that appears complete or not at all: ``model.safetensors`` (which any tool opens), the optimizer,
    the scheduler, the loader's position, every rank's random number generators, and a manifest with a digest of each
    file. Nothing is pickled. A run that is interrupted and resumed at the same world size ends with the same bits as
    one that is not.

    All ranks share the writing, and all read, so they must see the same folder.

    Args:
        folder: the folder of the checkpoints; made (0700) if it is missing. Or an address in an object store, such as
            ``s3://bucket/run``, where the bucket must be there; see docs/checkpoints.md.
        model: the model; a wrapper around it (DistributedDataParallel, torch.compile) leaves no trace in the names.
        optimizer: its steps are counted: :attr:`step`.
        scheduler: a learning-rate scheduler.
        loader: the training loader, whose position is saved. :func:`lockstep.shard` makes one that resumes in
            mid-epoch; anything with ``state_dict`` and ``load_state_dict`` is taken.
        extra: more objects with a state, by name: ``{"scaler": scaler, "ema": ema}``. The same on all ranks.
        keep: the number of checkpoints to keep; None keeps all. A :class:`lockstep.Retention` has more rules: every
            n-th, the best, also by what ``lockstep evaluate`` finds. Checkpoints that are being read are left for
            the next save to remove.

    The folder belongs to this job until its ranks have ended, or rank 0 has dropped every Checkpointer of the folder:
    another job that makes a Checkpointer of it is refused. See Note [Run lock] in ``checkpoint/locks.py``, and for a
    store Note [Lease] in ``checkpoint/lease.py``.

    Raises:
        CheckpointError: the folder can't be written, or belongs to another job, which is named; or the model or the
            optimizer is of a kind that can't be saved here (FSDP, tensor parallelism, the stages of a pipeline, ZeRO,
            sparse buffers): the error names a remedy. On every rank.
        LockstepError: ``lockstep.init()`` has not been called.
        TypeError, ValueError: an argument is invalid.
    """

    #: The file system; tests replace it.
    _storage: Storage = POSIX

    @of_all_ranks("lockstep.Checkpointer()")
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
        root = run_path(folder, "folder")
        self._run = RunState(model, optimizer, scheduler, loader, dict(extra or {}))
        self._rule = rule_of(keep)
        world = current_world()
        if world is None:
            raise LockstepError("lockstep.Checkpointer: no world yet; call lockstep.init() first")
        self._world = world
        #: The absolute path of the checkpoints' folder, or its address in a store.
        self.folder: PurePath = root.absolute() if isinstance(root, Path) else root
        self._position = Position()
        self._said_apart = self._said_missing = False
        #: True once this run owns the folder: it has resumed from it, or found it empty and has begun or saved.
        self._owns_folder = False
        #: The checkpoints from which this run has come; used on rank 0.
        self._lineage = Lineage(self.folder, self._storage)
        #: The names of checkpoints that restore() found damaged.
        self._damaged: set[str] = set()
        #: The tensors that need not be finite; see Note [Finite] in ``finite.py``.
        self._meant = NOTHING_MEANT
        #: The followers to tell the run's position, and the step of the checkpoint that it resumed from.
        self._followers: list[Follower] = []
        self._resumed_from: int | None = None
        #: True if the last saved checkpoint is sound, so that a run resumes from it.
        self._last_is_sound = True
        self._last_metric = LastMetric()
        _, shorts = together(world, self._refuse_unsavable, lambda short: short)
        refuse_parts(shorts)
        (self._hold, _), claims = together(world, self._claim_folder, lambda claimed: claimed[1])
        owner, token = claims[0]
        if token:
            together(world, lambda: run_folder(self.folder, self._storage).witness(str(token)), lambda _: None)
        #: The user ids whose checkpoints are read: this user's, and the owner that the file system gives to its files.
        self._owners = (os.geteuid(), *([] if owner is None else [int(owner)]))
        self._background = Background(world)
        if optimizer is not None:
            self._position.count(optimizer)
        #: Held while a checkpoint is written in the foreground or from the side.
        self._writing = threading.Lock()
        self._rest = Rest(self._run, self._position, world.device)
        self._boundary = StepBoundary(self, world, self._rest, counts_steps=optimizer is not None)
        self._boundary.watch(loader)
        #: The step at which the epoch under way began.
        self._began_at = 0
        for name, hook in (
            ("_register_end_of_pass_hook", Checkpointer._note_end_of_pass),
            ("_register_early_end_hook", Checkpointer._note_early_end),
        ):
            register = getattr(loader, name, None)
            if register is not None:
                register(_through_weak(self, hook))
        weakref.finalize(self, self._boundary.close).atexit = False

    @property
    def step(self) -> int:
        """Optimizer steps taken, which name the checkpoints.

        Without an optimizer your code counts it up; a save at the step of the last save then adds one by itself.
        """
        return self._position.step

    @step.setter
    def step(self, step: int) -> None:
        self._position.step = step

    @property
    def _local_training(self) -> LocalTraining | None:
        return self._run.local_training

    def _refuse_unsavable(self) -> tuple[str, str]:
        """Refuse unsavable objects, and note tensors that need not be finite. Return the parameters in short."""
        self._run.refuse_unsavable()
        self._meant = self._run.meant()
        return parameters_in_short(self._run.model)

    def _claim_folder(self) -> tuple[Hold | None, tuple[int | None, str]]:
        """Make the folder on rank 0 and take it for this job. Return the hold, the owner of new files and a token."""
        if not self._world.is_main:
            return None, (None, "")
        folder = run_folder(self.folder, self._storage)
        refuse_evaluated_run(folder)
        owner = folder.prepare()
        hold = folder.hold()
        return hold, (owner, hold.token)

    def epochs(self, count: int, *, resume: bool = True) -> Iterator[int]:
        """**Collective.** Yield the remaining epochs out of ``count``: ``for epoch in saved.epochs(10)``.

        Restores the newest checkpoint first, unless :meth:`restore` or :meth:`save` was called before. An interrupted
        epoch (saved within the loader's loop) is repeated from where it stopped; one that was saved after the loader's
        loop counts as done. A run that has done all of them already trains nothing, and rank 0 says so.

        Args:
            count: the number of epochs of the entire run, including those before an interruption.
            resume: False: begin anew, in a folder that must hold no checkpoints.

        Raises:
            CheckpointError: as :meth:`restore`; or the folder holds checkpoints and ``resume`` is False.
        """
        refuse_apart("Checkpointer.epochs()")
        if count < 0:
            raise ValueError(f"epochs({count}): expected 0 or more")
        position = self._position
        self._boundary.listen()
        try:
            if not self._owns_folder and resume:
                self.restore()
            elif not self._owns_folder:
                together(self._world, self._refuse_foreign_folder, lambda _: None)
                self._owns_folder = True
            self._say_missing()
            if self._resumed_from == position.step and position.epoch >= count:
                self._say(
                    f"nothing is left to train: this run was finished, {counted(position.epoch, 'epoch')} at step "
                    f"{position.step}; epochs({position.epoch + 1}) or more trains on, and another folder begins anew"
                )
            while position.epoch < count:
                position.in_body, self._began_at = True, position.step
                self._boundary.rest(epoch_done=False)
                yield position.epoch
                self._boundary.reached(epoch_done=True, last=position.epoch + 1 == count)
                position.in_body = False
                position.epoch += 1
            self.wait()
            for follower in self._followers:
                follower.at_end(position.step)
            if self._world.is_main:
                self._lineage.end()
        finally:
            position.in_body = False
            self._boundary.close()

    def between_steps(self, *, evaluating: bool | None = None) -> None:
        """Mark a moment between two steps, at which a run that is asked to stop can be left.

        **Collective** in training, though nothing is sent unless a rank was asked. Only needed in loops over other
        loaders than that of :func:`lockstep.shard`, which marks it itself: call it once in each iteration, before the
        step or after it. Costs some ten microseconds, and what the ``state_dict`` of the Checkpointer's loader costs. A
        run that is left in the middle of an epoch begins that epoch again, unless the loader's state holds its
        position.

        Not collective in an evaluation, where a run that was asked to stop is saved from the side a second later
        (docs/checkpoints.md): with this call in each turn of its loop, at once. It is needed there only where an
        evaluation can't be told from a step: without an ``optimizer``, and with :class:`lockstep.LocalSteps`.

        Args:
            evaluating: whether this is an evaluation; None: if the model is in eval mode.

        Raises:
            SystemExit: SIGTERM, SIGHUP or Ctrl-C asked the run to stop, and all ranks have saved; with code 75.
            CheckpointError: they could not save.
        """
        if not self._run.model.training if evaluating is None else evaluating:
            self._boundary.in_evaluation()
            return
        refuse_apart("Checkpointer.between_steps()")
        loader_knows = isinstance(getattr(self._run.loader, "in_epoch", None), bool)
        self._boundary.between_steps(epoch_done=False if self._position.in_body and not loader_knows else None)

    def _note_end_of_pass(self) -> None:
        self._boundary.at_end_of_pass()

    def _note_early_end(self) -> None:
        self._boundary.left()

    # For the boundary, and for the thread that saves from the side.

    def _begin_aside(self) -> bool:
        """Keep the loop from writing a checkpoint until :meth:`_end_aside`. Return False if one is being written."""
        if not self._writing.acquire(blocking=False):
            return False
        if self._background.is_writing:
            self._writing.release()
            return False
        return True

    def _end_aside(self) -> None:
        """Let the loop write checkpoints again."""
        self._writing.release()

    @property
    def _trains_apart(self) -> bool:
        """Whether the ranks train apart between rounds."""
        return self._local_training is not None

    @property
    def _has_news(self) -> bool:
        """Whether there are steps that are in no checkpoint."""
        return self._position.step != (self._position.last_saved or 0)

    def _room(self) -> tuple[int, int] | None:
        """**Rank 0.** Return the bytes that are free where checkpoints go, and those of a checkpoint; None: unknown."""
        if not isinstance(self.folder, Path):
            return None
        try:
            free = shutil.disk_usage(self.folder).free
            newest = next(iter(run_folder(self.folder, self._storage).checkpoints()), None)
            if newest is not None:
                return free, sum(each.stat().st_size for each in Path(newest).iterdir())
        except OSError:  # a checkpoint that has just been removed, a disk that is gone: the next save says so
            return None
        state = bare(self._run.model).state_dict().values()
        # An optimizer mostly holds two numbers for each of the model's.
        return free, 3 * sum(
            each.nbytes for each in state if isinstance(each, torch.Tensor) and not nn.parameter.is_lazy(each)
        )

    def _epoch_is_done(self) -> bool | None:
        """Return whether the epoch is done where a run is saved now, in an evaluation; None: the loader knows."""
        position, loader = self._position, self._run.loader
        if getattr(loader, "in_epoch", False):
            return None
        begins = position.in_body and position.step == self._began_at
        knows = isinstance(getattr(loader, "in_epoch", None), bool)
        return False if begins or (position.in_body and not knows) else None

    def _save_aside(self, run: RunAtRest, moment: Moment, peers: Peers, settle: Settle) -> Saved:
        """**Collective.** Write a checkpoint of a run at rest, by these peers alone; for a thread that has begun it.

        Raises:
            CheckpointError: as :meth:`save`; the same on every rank.
        """
        world, device = self._world, self._world.device
        with accelerator.beside(device, after=None if run.point is None else run.point.queued):
            if run.local_training is not None:  # all ranks wait in between_steps(), so the process group is free
                run.local_training.finish_round()
                moment = replace(moment, step=max(peers.gather(moment.step)))
            begun = self._rest.begun if run.point is None else run.point.begun
            metric = self._last_metric.of(moment.step, begun)
            plan = prepare(
                run,
                world,
                step=moment.step,
                before=self._refuse_foreign_folder,
                meant=self._meant,
                peers=peers,
                settle=settle,
            )
            self._owns_folder = True
            moment = replace(moment, hosts=world.hosts, conditions=conditions(device), metric=metric, begun=begun)
            saved = self._write_files(plan, moment, peers, run.require_unchanged)
        self._background.made_good()
        self._position.last_saved = moment.step
        if run.optimizer is None:
            self._position.step = max(self._position.step, moment.step)
        return saved

    def _step_of_save(self, step: int) -> int:
        """Return the step of a checkpoint of ``step``, which is another one than the last's if nobody counts steps."""
        return step + (self._run.optimizer is None and step == self._position.last_saved)

    def _add_follower(self, follower: Follower) -> None:
        """Tell ``follower`` the run's position from now on, on every rank in the same order; it is kept alive."""
        self._followers.append(follower)
        if self._resumed_from is not None:
            follower.resumed(self._resumed_from)

    def _evaluated(self) -> list[Evaluated]:
        """**Rank 0.** Return what ``lockstep evaluate`` has found of this run's checkpoints so far."""
        return self._lineage.results()

    # Saving.

    @of_all_ranks("Checkpointer.save()")
    @flight.phase(Phase.SAVE)
    def save(self, *, metric: float | None = None, epoch_done: bool | None = None) -> PurePath:
        """**Collective.** Write a checkpoint to the disk itself and return its folder. Older ones are pruned after it.

        If it fails, the checkpoints before it are as they were, and training may continue. If parameters or the
        optimizer's state are NaN or infinite, or the parameters of the ranks differ, the checkpoint is not sound: rank
        0 warns, no sound one is removed for it, and a run does not resume from it by itself (docs/checkpoints.md).

        Args:
            metric: a number by which the best checkpoints are kept, if ``keep`` says so; the same on all ranks
                (rank 0's counts). NaN and infinities are never the best. None: that of the last save, if it was at this
                step and no optimizer has stepped since.
            epoch_done: within :meth:`epochs`: whether a resumed run begins with the next epoch, or resumes in this one.
                None: with the next one, unless the loader is in the middle of its pass. What your loop does *after*
                a save that follows the loader's loop is not done again.

        Raises:
            CheckpointError: it could not be written (disk full, permissions, a value that can't be written down), or
                the ranks are at different steps, or the folder holds another run; the same error on every rank.
        """
        earlier: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            earlier = error
        plan, moment = self._prepare(metric, epoch_done)
        with self._writing:
            saved = self._write_files(plan, moment, OverGroup(self._world))
        self._position.last_saved = moment.step
        self._warn_of_drift(plan)
        callsite.warn_all(saved.warnings)
        if earlier is not None and self._world.is_main:
            callsite.warn(f"{earlier}; the save at step {moment.step} succeeded", RuntimeWarning)
        return saved.folder

    @of_all_ranks("Checkpointer.async_save()")
    @flight.phase(Phase.SAVE)
    def async_save(self, *, metric: float | None = None, epoch_done: bool | None = None) -> None:
        """**Collective.** Do as :meth:`save`, but let training continue as soon as the state is copied in memory.

        A thread writes the copy. At most one save is under way: the next one waits for it. A GPU copies in its turn,
        and training goes on meanwhile. Memory: each rank keeps as much as it writes, about the size of the state
        divided by the number of ranks (page-locked where it trains on a GPU), from the first call on until the
        Checkpointer goes. See Note [Saving in the background] in
        ``checkpoint/background.py``.

        A failure is printed on rank 0's standard error when it happens, and raised on all ranks by the next of these:
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
        plan, moment = self._prepare(metric, epoch_done)
        self._background.forget_records()  # all ranks have waited, or they would not have met in the line above
        with self._writing:
            self._background.begin(
                plan, step=moment.step, write=lambda copied, peers: self._write_beside(copied, moment, peers)
            )
        self._position.last_saved = moment.step
        self._warn_of_drift(plan)

    @flight.phase(Phase.SAVE)
    def wait(self) -> PurePath | None:
        """Wait until the :meth:`async_save` under way is on the disk. Return its folder, or None if there is none.

        Raises:
            CheckpointError: it failed; the same on every rank, and raised once.
        """
        return self._background.wait()

    def _write_beside(self, plan: WritePlan, moment: Moment, peers: Peers) -> PurePath:
        saved = self._write_files(plan, moment, peers)
        callsite.tell_all(saved.warnings)
        return saved.folder

    def _warn_of_drift(self, plan: WritePlan) -> None:
        """Warn on rank 0, once, of replicas that differ; when nobody waits for it."""
        drift = words_on_drift(plan)
        if drift and self._world.is_main and not self._said_apart:
            self._said_apart = True
            callsite.warn(drift, RuntimeWarning)

    def _write_files(
        self, plan: WritePlan, moment: Moment, peers: Peers, after_reading: Callable[[], None] | None = None
    ) -> Saved:
        saved = write(
            self.folder,
            plan,
            moment,
            peers=peers,
            check=lambda: None if self._hold is None else self._hold.check(),
            tidy=self._tidy,
            on=self._storage,
            after_reading=after_reading,
        )
        if self._world.is_main:
            notes.tell(notes.CHECKPOINT, step=moment.step)
        self._last_is_sound = saved.is_sound
        self._last_metric.note(moment.step, moment.begun, moment.metric if saved.is_sound else None)
        return saved

    def _tidy(self, newest: PurePath, manifest: Manifest) -> None:
        """**Rank 0.** Do what follows the commit of a checkpoint."""
        self._lineage.add(newest, manifest)
        prune(self.folder, newest, self._rule, damaged=self._damaged, on=self._storage)

    def _prepare(self, metric: float | None, epoch_done: bool | None) -> tuple[WritePlan, Moment]:
        """**Collective.** Return the plan of this rank's writes, with nothing copied yet, and the run's position."""
        run, position = self._run, self._position
        if self._local_training is not None:
            self._local_training.finish_round()
            # A rank whose GradScaler left a step out, or that had fewer batches, has counted fewer.
            position.step = max(all_gather_records(position.step, self._world.group))
        position.step = self._step_of_save(position.step)
        try:
            for follower in self._followers:
                follower.before_save(position.step)
        except CheckpointError:
            raise
        except LockstepError as error:  # the same on every rank
            raise CheckpointError(f"data that belong to the checkpoint could not be written: {error}") from error
        plan = prepare(run, self._world, step=position.step, before=self._refuse_foreign_folder, meant=self._meant)
        self._owns_folder = True  # a save in the background may come to its end at any moment from here on
        begun = self._rest.begun
        kept = self._last_metric.of(position.step, begun) if metric is None else _finite(metric)
        moment = position.now().moment(run.loader, epoch_done=epoch_done, metric=kept)
        world = self._world
        return plan, replace(moment, hosts=world.hosts, conditions=conditions(world.device), begun=begun)

    def _refuse_foreign_folder(self) -> None:
        """Refuse, on rank 0, a folder with checkpoints that this run has not resumed."""
        if self._owns_folder or not self._world.is_main:
            return
        there = run_folder(self.folder, self._storage).checkpoints()
        if there:
            raise CheckpointError(
                f"{self.folder} holds the checkpoints of an earlier run (the newest is {there[0].name}), which this "
                "run has not resumed: call restore() or epochs() first to resume it, or choose another folder"
            )

    # Restoring.

    @of_all_ranks("Checkpointer.restore()")
    @flight.phase(Phase.RESTORE)
    def restore(self, *, strict: bool = False, only_sound: bool = True) -> Restored | None:
        """**Collective.** Resume from the newest complete and sound checkpoint; None if there is no checkpoint.

        Everything is verified and compared on every rank before anything is changed on any. Damaged checkpoints, and
        those that are not sound (see :meth:`save`), are skipped with a warning on rank 0. Rank 0 says on standard error
        from which step the run resumes, and warns of an optimizer of the model, its scheduler or a sharded loader that
        is there and was not given.

        Args:
            strict: refuse a damaged checkpoint instead of skipping it.
            only_sound: False: take the newest complete one even if it is not sound.

        Raises:
            CheckpointCorrupt: no checkpoint there is complete (with ``strict``: the newest is not).
            CheckpointMismatch: the checkpoint is of another model, optimizer, scheduler or dataset.
            CheckpointError: the ranks do not see the same folder; or no checkpoint there is both complete and sound.
        """
        self.wait()
        search = find(
            self.folder,
            self._run,
            self._world,
            owners=self._owners,
            strict=strict,
            only_sound=only_sound,
            on=self._storage,
        )
        self._damaged.update(folder.name for folder in search.damaged)
        if search.found is None:
            remedy = "restore(only_sound=False) resumes from the newest nevertheless; or begin in another folder"
            error = search.nothing(self.folder, remedy=remedy)
            if error is not None:
                raise error
            self._owns_folder = True
            if self._world.is_main:
                self._lineage.begin()
            for follower in self._followers:
                follower.resumed(None)
            return None
        folder, contents = search.found
        load(contents, self._run, self._world)
        self._meant = self._run.meant(since=self._meant)
        manifest = contents.manifest
        self._position.resume_from(manifest)
        self._last_metric.note(manifest.step, self._rest.begun, manifest.metric if manifest.is_sound else None)
        if self._world.is_main:
            self._lineage.resume_from(folder, manifest)
        self._owns_folder = True
        self._resumed_from = self._position.step
        for follower in self._followers:
            follower.resumed(self._resumed_from)
        load_generators(contents, self._world)
        differences = words_on_differences(contents, search, self._run, self._world)
        if differences and self._world.is_main:
            callsite.warn(differences, RuntimeWarning)
        found = restored(contents, search)
        part = ", some of it done" if found.in_epoch else ""
        self._say(f"resumed from step {found.step} in {folder} (epoch {found.epoch}{part})")
        self._say_missing(besides=self._run.unused(contents))
        return found

    def _say(self, text: str) -> None:
        if self._world.is_main:
            print(f"lockstep: {text}", file=sys.stderr, flush=True)

    def _say_missing(self, *, besides: Collection[str] = ()) -> None:
        """Warn once on rank 0 of what the training has and this object was not given."""
        if self._said_missing or not self._world.is_main:
            return
        self._said_missing = True
        text = words_on_missing(self._run, besides=besides)
        if text:
            callsite.warn(text, RuntimeWarning)


def _through_weak(saved: Checkpointer, method: Callable[[Checkpointer], None]) -> Callable[[], None]:
    """Return a hook that does not keep ``saved`` alive, since ``saved`` holds the folder's lock."""
    weak = weakref.ref(saved)

    def hook() -> None:
        alive = weak()
        if alive is not None:
            method(alive)

    return hook


def _finite(metric: float | None) -> float | None:
    number = None if metric is None else float(metric)
    return number if number is None or math.isfinite(number) else None
