"""Between two steps: save, or save and leave, if a signal asked for it.

Note [Stopping between steps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A run that is to end bit for bit as if it had never been interrupted can only be left between two steps, where all
changes of a step are complete. Two such moments are known without the user's help: when the training loop asks the
loader for its next batch, and when it asks :meth:`Checkpointer.epochs` for its next epoch. A third is
:meth:`Checkpointer.between_steps`, for loops over other loaders. Signals only leave a request, which is handled there,
or, where a loop does not come to such a moment, by a thread: Note [Saving from the side] in aside.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import PurePath
from typing import Protocol

from lockstep import _torch, callsite, knobs
from lockstep._files import describe
from lockstep.checkpoint.aside import SavesAside, SideSaver
from lockstep.checkpoint.rest import Rest
from lockstep.checkpoint.save import Saved
from lockstep.comm.calls import calling
from lockstep.comm.exchange import all_gather_records
from lockstep.comm.world import World
from lockstep.errors import CheckpointError
from lockstep.job import flight
from lockstep.job.files import EXIT_SAVED, StopNote
from lockstep.job.stop import Action, Agreement, Board, PageBoard, Requests, StoreBoard
from lockstep.step.local_training import LocalTraining, trained_apart


class Saver(SavesAside, Protocol):
    """The part of a Checkpointer that a boundary needs."""

    _last_is_sound: bool

    @property
    def _local_training(self) -> LocalTraining | None: ...

    def save(self, *, epoch_done: bool | None = None) -> PurePath: ...


class StepBoundary:
    """The signals' requests to one rank, and how the ranks fulfil them together. See Note [Stopping between steps]."""

    def __init__(self, saver: Saver, world: World, rest: Rest, *, counts_steps: bool) -> None:
        # The loader keeps this boundary alive, and must not keep the Checkpointer, which holds the folder's lock.
        self._saver = weakref.ref(saver)
        self._world = world
        self._requests = Requests()
        self._agreement: Agreement | None = None
        self._side = SideSaver(saver, rest, self._requests, world, leave_word=self._leave_word)
        #: True if an optimizer counts ``saver.step`` up; otherwise boundaries are counted here.
        self._counts_steps = counts_steps
        self._boundaries = 0
        self._acts_after_steps = counts_steps and world.world_size == 1
        #: True if a loop tells when it is between two steps.
        self._watched = False
        #: The loader that does so, the epoch of its pass and the steps taken before it, and at the last boundary.
        self._loader: Callable[[], object | None] = lambda: None
        self._pass: object = None
        self._before_pass: int | None = None
        self._steps = 0
        #: The steps taken at the last boundary of all.
        self._step_here = -1

    def watch(self, loader: object) -> None:
        """Register with ``loader`` to be called before its next batch, if it has such a hook."""
        register: Callable[[Callable[[], object]], object] | None
        register = getattr(loader, "_register_step_boundary_hook", None)
        if register is not None:
            self._watched = True
            self._loader = weakref.ref(loader)
            register(self._at_batch)

    def listen(self) -> None:
        """Take signals as requests from now on, if there is a loop that will handle them."""
        if self._watched and not self._requests.listening:
            self._requests.listen()
        if self._requests.listening:
            self._side.start()

    def close(self) -> None:
        """Stop taking signals as requests."""
        self._side.stop()
        asked, left = self._requests.stop, self._requests.leaving
        self._requests.close()
        if asked is not None and not left:
            print(
                f"lockstep: rank {self._world.rank}: {asked.name} came, but the training loop was left before the "
                "ranks had saved; a second signal stops this process",
                file=sys.stderr,
                flush=True,
            )

    def _at_batch(self) -> None:
        """**Collective.** Note that the loop asks the loader for its next batch."""
        saver = self._saver()
        if saver is not None and not self._is_beside_training(saver):
            self.reached()

    def _is_beside_training(self, saver: Saver) -> bool:
        """Return whether the loader's pass is another one than the last that was trained on, and has had no step.

        Such a pass measures something, say the statistics of an average. A resumed run would train on its rest.
        """
        if not self._counts_steps or (trained_apart and saver._trains_apart):
            return False
        epoch, steps = getattr(self._loader(), "epoch", None), saver.step
        if epoch != self._pass:
            self._before_pass = None if self._pass is None else self._steps
            self._pass = epoch
        self._steps = steps
        return steps == self._before_pass

    def between_steps(self, *, epoch_done: bool | None) -> None:
        """**Collective.** Note that the user's own loop is between two steps."""
        self._watched = True
        self.reached(epoch_done=epoch_done)

    def reached(self, *, epoch_done: bool | None = None, last: bool = False) -> None:
        """**Collective**, though nothing is sent unless a rank was asked. Note a moment between two steps.

        Args:
            epoch_done: as for ``save``.
            last: training is over: there is no later step to agree on.

        Raises:
            SystemExit: the ranks were asked to stop, and have saved; with code 75.
            CheckpointError: they were asked to stop and could not save.
        """
        saver = self._saver()
        if saver is None or not self._watched:
            return
        if not self._requests.listening:
            self.listen()
        self._side.rest(epoch_done, only_after_a_step=epoch_done is not True)
        self._boundaries += 1
        training = saver._local_training if trained_apart else None
        if training is not None:
            training.between_steps()
        agreement = self._agreement or self._agree(training)
        count = saver.step if self._counts_steps else self._boundaries
        if training is not None:
            count = training.rounds  # see Note [Rounds and agreements] in step/local_training.py
        asked = self._requests.stop is not None or self._requests.save
        before, self._step_here = self._step_here, count
        if self._acts_after_steps and count == before and epoch_done is not True and training is None:
            return  # gradients may be accumulated, and would be lost; several ranks act after a step, by its count
        due = agreement.due(count, wanted=self._requests.wanted if asked else None)
        if last and due is None:
            due = self._due_at_last()
        if due is Action.SAVE:
            self._save_and_continue(saver, epoch_done)
        elif due is Action.STOP:
            self._save_and_leave(saver, epoch_done)

    def at_end_of_pass(self) -> None:
        """Note a point of rest where the loader's pass is over, unless it was one beside training."""
        saver = self._saver()
        if saver is not None and not self._is_beside_training(saver):
            self.rest()

    def rest(self, epoch_done: bool | None = None) -> None:
        """Note a point of rest: see Note [Points of rest] in rest.py."""
        self._side.rest(epoch_done)

    def left(self) -> None:
        """Note that the loop was left early: a point of rest, if an optimizer has stepped since the last one."""
        self._side.left()

    def in_evaluation(self) -> None:
        """Note a moment in an evaluation, which other ranks need not reach.

        Raises:
            SystemExit: the ranks were asked to stop, and have saved; with code 75.
        """
        if self._saver() is None:
            return
        self._watched = True
        self.listen()
        self._side.pause()

    def _agree(self, training: LocalTraining | None) -> Agreement:
        """Begin to agree with the other ranks."""
        lead = None if training is None else training.lead
        self._agreement = Agreement(_board(self._world), world_size=self._world.world_size, lead=lead)
        return self._agreement

    def _due_at_last(self) -> Action | None:
        """Return the most urgent request to any rank, after asking all ranks."""
        assert self._agreement is not None, "made at the first boundary"
        wishes = [wish for wish in (self._requests.wanted, self._agreement.pending()) if wish is not None]
        wanted = [int(wish) for wish in wishes]
        with calling("Checkpointer.epochs()"):
            everyones = [wish for wishes in all_gather_records(wanted, self._world.group) for wish in wishes]
        return Action(min(everyones)) if everyones else None

    def _save_and_continue(self, saver: Saver, epoch_done: bool | None) -> None:
        self._requests.save = False
        try:
            folder = saver.save(epoch_done=epoch_done)
        except CheckpointError as error:  # the same on every rank
            if self._world.is_main:
                callsite.warn(f"could not save at step {saver.step}, as asked by a signal: {error}")
            return
        if self._world.is_main:
            print(f"lockstep: saved at step {saver.step} in {folder}", file=sys.stderr, flush=True)

    def _save_and_leave(self, saver: Saver, epoch_done: bool | None) -> None:
        folder = saver.save(epoch_done=epoch_done)
        self._requests.leave()
        self._leave_word(Saved(folder, is_sound=saver._last_is_sound), saver.step)
        raise SystemExit(EXIT_SAVED)

    def _leave_word(self, saved: Saved, step: int) -> None:
        """Tell each machine's launcher where the run can resume; without a launcher, rank 0 tells the user.

        Each rank sees to it before it leaves: whatever it does next, the launcher knows that it comes after the save.
        """
        job_folder = knobs.job_dir()
        if job_folder is not None and flight.current.pages is not None:
            try:
                StopNote(step, str(saved.folder), saved.is_sound).write_once(job_folder)
            except OSError as error:  # the save is there, and so is the exit code that says so
                why = f"rank {self._world.rank} has saved, and can't tell its launcher: {describe(error)}"
                print(f"lockstep: {why}", file=sys.stderr, flush=True)
            return
        if not self._world.is_main:
            return
        by = "a signal" if self._requests.stop is None else self._requests.stop.name
        where = StopNote(step, str(saved.folder), saved.is_sound).describe()
        print(f"lockstep: stopped by {by}; {where}", file=sys.stderr, flush=True)


def _board(world: World) -> Board:
    """Return a board in shared memory if one launcher of lockstep started all ranks, else in the group's store."""
    pages = flight.current.pages
    if pages is not None and knobs.store() is not None:
        return PageBoard(pages, rank=world.rank)
    return StoreBoard(_torch.default_store())
