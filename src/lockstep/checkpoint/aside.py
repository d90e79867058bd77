"""Save from the side: a thread of each rank writes the state of the last completed step, wherever the loop is.

Note [Saving from the side]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A run that is asked to save does so between two steps, see ``boundary.py``. A loop that evaluates, compiles, waits for a
sample or for a rank that does so comes there too late, or never. Then, after a pause without a step, a thread of each
rank saves instead. The state is that of the latest point of rest (Note [Points of rest] in ``rest.py``); the ranks talk
by their store, since their main threads may be in a collective; and what they do is decided in two rounds of records.

1. Each rank *holds*: its main thread may go on, but not begin another optimizer step, nor pass the next boundary. It
   tells the number of steps that it has taken, and whether it was asked to leave or only to save: ranks may be asked
   for both at once, and leaving goes first. The all-reduce of gradients keeps ranks within one step of each other,
   and nobody can go back, so the largest number is where all must come to: a rank that has taken fewer lets its main
   thread take that step. Only where the ranks that have taken more have taken it on their hosts alone, the smallest
   number counts: Note [A host that is ahead of its device] in ``pending.py``.
2. Each rank that is there tells which points of rest it has; one that can't come there in time tells why. If all are
   there they save the latest point that all have. Otherwise nothing is saved, all go on, and they try again later. So
   they do where a rank was in an optimizer's step as it held, and has taken one more than it told.

Before a rank tells that it is there, it keeps its main thread from writing a checkpoint. If it did so later, one rank's
main thread and another rank's side could begin to write first, and each wait for the other rank's same thread. And what
it saves in an evaluation is noted then as well, since its main thread may leave the evaluation before all have told.

A rank may be late by itself, so the decision is one key of the store, written by compare-and-set: the first who has
heard of all writes "go", who has waited too long writes "off", and the first counts for all.

A nearly full disk is another reason to save: rank 0's thread asks for it when there is room for one checkpoint and not
for two.

Then the checkpoint is written as any other, from the live parameters, while the ranks hold. A run that was to stop
leaves after that. A signal to the main thread makes it raise SystemExit where it is; one that is in compiled code and
does not hear of it ends without it, before the others leave, since it may be in a collective with them.

Ranks that have come to an evaluation at different times may have drawn different numbers from generators that they have
in common. Those that were alike at the point of rest before are saved alike: as the first rank has them that is past
the evaluation, or rank 0 if none is.

How a signal reaches the thread while the main thread is in compiled code: Note [Woken by signals] in ``job/wakeup.py``.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from lockstep import _torch, callsite, knobs
from lockstep.checkpoint.at_exit import before_threads_end
from lockstep.checkpoint.calls import Calls, calls_of
from lockstep.checkpoint.encoding import digest_of
from lockstep.checkpoint.pending import PendingStep
from lockstep.checkpoint.rest import Rest, RunAtRest
from lockstep.checkpoint.rest_point import RestPoint
from lockstep.checkpoint.rng import COMMON
from lockstep.checkpoint.save import Saved
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.together import together
from lockstep.comm.peers import OverStore, Peers
from lockstep.comm.world import World
from lockstep.errors import CheckpointError, CollectiveTimeout, LockstepError
from lockstep.job.files import EXIT_SAVED
from lockstep.job.stop import Action, Requests
from lockstep.job.wakeup import Wakeup
from lockstep.text import as_size, which_ranks

#: Seconds between two looks at what the main thread does, while the ranks wait for it.
_NAP = 0.01
#: Seconds that a program's end waits for this thread, which may be at a store that does not answer.
_ENDING = 15.0
#: Seconds after which a process that is to end at once ends whatever its buffers do.
_FLUSH = 1.0


class SavesAside(Protocol):
    """The part of a Checkpointer that is needed."""

    @property
    def step(self) -> int: ...

    def _begin_aside(self) -> bool:
        """Keep the loop from writing a checkpoint until :meth:`_end_aside`. Return False if one is being written."""
        ...

    def _end_aside(self) -> None:
        """Let the loop write checkpoints again."""
        ...

    @property
    def _trains_apart(self) -> bool:
        """Whether the ranks train apart between rounds."""
        ...

    def _room(self) -> tuple[int, int] | None:
        """**Rank 0.** Return the bytes that are free where checkpoints go, and those of a checkpoint; None: unknown."""
        ...

    @property
    def _has_news(self) -> bool:
        """Whether there are steps that are in no checkpoint."""
        ...

    def _epoch_is_done(self) -> bool | None:
        """Return whether the epoch is done where a run is saved now, in an evaluation; None: the loader knows."""
        ...

    def _step_of_save(self, step: int) -> int:
        """Return the step of a checkpoint of ``step``, which is another one than the last's if nobody counts steps."""
        ...

    def _save_aside(self, run: RunAtRest, moment: Moment, peers: Peers, settle: Settle) -> Saved:
        """**Collective.** Write a checkpoint of a run at rest, by these peers alone, after :meth:`_begin_aside`."""
        ...


#: Makes of the states of all ranks' generators what is saved.
Settle = Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(frozen=True)
class _Agreed:
    """What the ranks have come to in an attempt."""

    action: Action
    #: The reason why nothing is saved; empty: all ranks save.
    refused: str = ""
    #: What each rank has told, if all save.
    everyone: tuple[_Ready, ...] = ()


@dataclass(frozen=True)
class _Ready:
    """What a rank tells when it has come to the step at which the ranks save, or has not, in JSON types."""

    #: The reason why the rank is not at rest; empty: it is.
    why: str
    step: int
    #: The points of rest that it has passed; 0: it is in an evaluation in the middle of a turn of the loop.
    points: int
    #: The points among these that it can't go back to, the first ones.
    dropped: int
    #: A digest of the random numbers that ranks have in common, at the last point of all.
    common: str


class SideSaver:
    """One rank's thread that saves from the side. See Note [Saving from the side].

    Args:
        saver: the Checkpointer, which is not kept alive.
        rest: the points of rest of its run.
        requests: the requests that signals make of this process.
        leave_word: tells the launcher, or the user, of a checkpoint after which the run is left.
    """

    #: Those whose thread has been started, in this process or the one that it was forked from.
    _started: ClassVar[weakref.WeakSet[SideSaver]] = weakref.WeakSet()

    def __init__(
        self,
        saver: SavesAside,
        rest: Rest,
        requests: Requests,
        world: World,
        *,
        leave_word: Callable[[Saved, int], None],
    ) -> None:
        self._saver = weakref.ref(saver)
        self._rest, self._requests, self._world = rest, requests, world
        self._leave_word = leave_word
        self._thread: threading.Thread | None = None
        self._wakeup: Wakeup | None = None
        self._calls: Calls | None = None
        self._closed = False
        #: True from when the program has ended, and the main thread waits for this one.
        self._is_ending = False
        #: The number of the last attempt that this rank took part in; the reason why the last one came to nothing.
        self._attempts, self._said = 0, ""
        #: The time at which the main thread last came to a boundary.
        self._came_at = 0.0
        #: The time at which the last attempt was over.
        self._tried_at = -math.inf
        #: The time at which the disk is looked at next; True once it had room for one checkpoint only, and for none.
        self._look_at_room, self._is_full, self._has_no_room = 0.0, False, False
        #: The number of steps beyond which the main thread may not go; None: any. Guarded by the condition.
        self._limit: int | None = None
        self._free = threading.Condition()
        #: True while the main thread waits in an evaluation for what the ranks decide.
        self._is_paused = False
        #: True when the main thread has heard that the run is left, and when it may leave. No events: a handler that
        #: interrupts the main thread while it sets one could not set it again.
        self._heard, self._may_leave = False, False
        #: The point of rest of the evaluation that this rank was in when it was ready; None: it was in none.
        self._in_evaluation: RestPoint | None = None
        #: The step that this rank's host has taken beyond the one that is saved; None: it has taken none.
        self._pending: PendingStep | None = None
        #: True from when this rank's main thread is kept from writing a checkpoint.
        self._keeps_others_out = False
        self._pid = os.getpid()

    @classmethod
    def stop_all(cls) -> None:
        """Stop those of this process: their threads ask the store, and must not do so while the interpreter ends."""
        for each in list(cls._started):
            each.stop(limit=_ENDING)

    # On the main thread.

    def start(self) -> None:
        """Begin to attend to requests."""
        if self._thread is not None or threading.current_thread() is not threading.main_thread():
            return
        self._calls = calls_of(self._world)
        self._attempts = self._calls.latest()[0]
        self._wakeup = Wakeup()
        self._closed = False
        before_threads_end(SideSaver.stop_all)
        self._started.add(self)
        self._thread = threading.Thread(target=self._run, name="lockstep-side", daemon=True)
        self._thread.start()

    def stop(self, *, limit: float | None = None) -> None:
        """Attend to no more requests. A save under way is waited for, but not where an error ends the program.

        Args:
            limit: the program ends, and this is the most seconds to wait for anything but a save; None: it goes on.
        """
        thread, self._thread = self._thread, None
        if thread is None or self._pid != os.getpid():
            return
        self._closed, self._is_ending = True, limit is not None
        if thread is threading.current_thread():  # it has let go of the Checkpointer as the last, and ends next
            if self._wakeup is not None:
                self._wakeup.close()
            return
        if self._wakeup is not None:
            self._wakeup.wake()
        thread.join(limit)
        while thread.is_alive() and self._keeps_others_out and getattr(sys, "last_value", None) is None:
            thread.join(_NAP)
        if self._wakeup is not None and not thread.is_alive():
            self._wakeup.close()

    def rest(self, epoch_done: bool | None, *, only_after_a_step: bool = False) -> None:
        """Note a point of rest, as :meth:`Rest.note` does. Returns when the ranks hold no longer."""
        if self._thread is None:
            return
        self._came_at = time.monotonic()
        with self._free:
            # Where they hold, they use the points that there are, or wait for the first.
            is_noted = self._limit is None or not self._rest.points
            if is_noted:
                self._rest.note(epoch_done, only_after_a_step=only_after_a_step)
            while self._limit is not None and not self._closed:
                self._nap()
            if not is_noted:
                self._rest.note(epoch_done, only_after_a_step=only_after_a_step)

    def left(self) -> None:
        """Note a point of rest where a loop is left early, if an optimizer has stepped since the last one.

        Returns at once: where a generator is closed nothing can be raised, not even to leave the run.
        """
        if self._thread is None or threading.current_thread() is not threading.main_thread():
            return
        with self._free:
            if self._rest.has_stepped:
                self._rest.note(None)

    def pause(self) -> None:
        """Wait, if this rank was asked to save or to leave, until the ranks have decided: they need not wait for it.

        For the main thread, in an evaluation.
        """
        if self._thread is None or (self._requests.wanted is None and self._limit is None):
            return
        attempts = self._attempts
        limit = time.monotonic() + knobs.times().aside_answer
        self._is_paused = True
        try:
            assert self._wakeup is not None  # made with the thread
            self._wakeup.wake()
            self._wait_while(
                lambda: self._limit is not None or (self._attempts == attempts and time.monotonic() < limit)
            )
        finally:
            self._is_paused = False

    def _at_step(self) -> None:
        """Wait before an optimizer's step that the ranks do not wait for, and say that it begins.

        Both under the lock: whoever holds the ranks next must see this one step.
        """
        with self._free:
            while self._limit is not None and self._step() >= self._limit and not self._closed:
                self._nap()
            self._rest.steps()

    def _wait_while(self, held: Callable[[], bool]) -> None:
        with self._free:
            while held() and not self._closed:
                self._nap()

    def _nap(self) -> None:
        self._free.wait(_NAP)
        if self._requests.saved is not None:
            self._requests.saved()

    def _leave_here(self) -> None:
        """Leave the run, which has been saved, from wherever the main thread is."""
        self._heard = True
        limit = time.monotonic() + 2 * knobs.times().aside_heard
        while not self._may_leave and time.monotonic() < limit:
            time.sleep(_NAP)
        self._requests.leave()
        raise SystemExit(EXIT_SAVED)

    def _step(self) -> int:
        saver = self._saver()
        return 0 if saver is None else saver.step

    # On the thread.

    def _run(self) -> None:
        times = knobs.times()
        asked_at = 0.0
        calls, wakeup = self._calls, self._wakeup
        assert calls is not None  # both are made before the thread
        assert wakeup is not None
        while not self._closed:
            for number in sorted({*wakeup.wait(times.aside_look)}):
                self._requests.noticed(number)
            now = time.monotonic()
            self._watch_room(now)
            wanted = self._requests.wanted
            asked_at = 0.0 if wanted is None else asked_at or now
            if self._closed or self._requests.leaving or self._requests.saved is not None:
                return
            try:
                latest, action = calls.latest()
                if latest > self._attempts:
                    self._attempt(latest, action)
                elif wanted is not None and self._is_due(asked_at, now):
                    calls.call(self._attempts + 1, wanted)
                    self._attempt(self._attempts + 1, wanted)
            except (RuntimeError, OSError) as error:  # the store has gone, and with it the job
                self._say(f"can't save from the side any more: {error}", everywhere=True)
                return

    def _watch_room(self, now: float) -> None:
        """**Rank 0.** Ask for a save while the disk has room for one, but not for two, and say when there is none."""
        saver = self._saver()
        if now < self._look_at_room or saver is None or not self._world.is_main:
            return
        self._look_at_room = now + knobs.times().aside_room
        found = saver._room()
        if found is None:
            return
        free, size = found
        if free >= 3 * size:
            self._is_full = self._has_no_room = False
        elif free < size and not self._has_no_room:
            self._has_no_room = True
            self._say(
                f"only {as_size(free)} are left where the checkpoints go, and one takes {as_size(size)}: the next save "
                "may fail: make room for it"
            )
        elif size <= free < 2 * size and not self._is_full and saver._has_news:
            self._is_full = True
            self._requests.save = True
            self._say(
                f"only {as_size(free)} are left where the checkpoints go, and one takes {as_size(size)}: the run saves "
                "now, while there is room"
            )

    def _is_due(self, asked_at: float, now: float) -> bool:
        """Return whether the main thread had its time to come to a boundary by itself."""
        pause = knobs.times().aside
        if now < self._tried_at + pause:
            return False
        if self._is_paused:
            return True
        return now >= min(max(asked_at, self._came_at) + pause, asked_at + 3 * pause)

    def _attempt(self, number: int, action: Action) -> None:
        """**Collective** of the ranks' threads. Save, and leave if that is what was asked for."""
        saver = self._saver()
        if saver is None:
            return
        try:
            self._hold(saver.step)
            agreed = self._agree(saver, number, action)
            if agreed.refused:
                self._say_refused(agreed.refused, agreed.action)
                return
            if agreed.action is not Action.STOP:  # what is asked for from here on is another save
                self._requests.save = False
            try:
                saved, step = self._save(saver, number, agreed.everyone)
            except CheckpointError as error:
                self._requests.save |= agreed.action is Action.SAVE
                self._say_refused(str(error), agreed.action)
                return
            callsite.tell_all(saved.warnings)
            self._said = ""
            if any(not each.points for each in agreed.everyone):
                self._say(
                    "it was saved in an evaluation in the middle of a pass, which a resumed run does not repeat: what "
                    "the rest of it would have drawn from generators of random numbers is drawn by what follows"
                )
            if agreed.action is Action.STOP:
                self._leave(saved, step, number)
                return
            self._say(f"saved at step {step} in {saved.folder}, from the side: the loop had not come to its next step")
        finally:
            self._attempts, self._tried_at = number, time.monotonic()
            if self._keeps_others_out:
                self._keeps_others_out = False
                saver._end_aside()
            if self._requests.saved is None:
                self._release()

    def _hold(self, limit: int) -> None:
        with self._free:
            self._limit = limit
            self._rest.gate = self._at_step
            self._free.notify_all()

    def _release(self) -> None:
        with self._free:
            self._limit = None
            self._rest.gate = None
            self._free.notify_all()

    def _agree(self, saver: SavesAside, number: int, action: Action) -> _Agreed:
        """Return what the ranks do: what they were called to, or were asked for since."""
        store, world = _torch.default_store(), self._world
        peers = self._peers(number, "agree", knobs.times().aside_answer)
        decision = f"lockstep/side/{number}/decision"
        late, why = "", ""
        everyone: tuple[_Ready, ...] = ()
        try:
            told = peers.gather([saver.step, self._rest.least(saver.step), action])
            steps = [step for step, _, _ in told]
            target = min(steps) if max(least for _, least, _ in told) <= min(steps) else max(steps)
            action = Action(min(wish for _, _, wish in told))
            self._hold(target)
            mine = self._come_to(saver, target)
            everyone = tuple(_Ready(**record) for record in peers.gather(vars(mine)))
            why = self._whats_missing(saver, everyone)
            if not why:
                store.compare_set(decision, "", "go")
        except CollectiveTimeout as error:
            late = str(error)
        if store.compare_set(decision, "", "off") != b"go":
            return _Agreed(action, late or why or f"rank {world.rank} of {world.world_size} has not waited for others")
        if late:  # all had told by then
            everyone = tuple(_Ready(**record) for record in self._peers(number, "agree", 0.0).read(2))
        return _Agreed(action, everyone=everyone)

    def _whats_missing(self, saver: SavesAside, everyone: Sequence[_Ready]) -> str:
        """Return why the ranks can't save, from what each has told; empty: they can. The same on every rank."""
        of_all = f"of {self._world.world_size}"
        whys = {rank: each.why for rank, each in enumerate(everyone) if each.why}
        if whys:
            rank = next(iter(whys))
            others = [other for other in whys if other != rank]
            more = f" (and {which_ranks(others)} likewise)" if others else ""
            return f"rank {rank} {of_all} {whys[rank]}{more}"
        common = _common_point(everyone)
        ahead = next((rank for rank, each in enumerate(everyone) if each.dropped >= common), None)
        if ahead is not None:
            behind = next(rank for rank, each in enumerate(everyone) if max(each.points, 1) == common)
            return (
                f"rank {ahead} {of_all} has gone on since the last step, and what its model or extra= holds has "
                f"changed since it was where rank {behind} is"
            )
        steps = [each.step for each in everyone]
        if saver._trains_apart or len(set(steps)) == 1:
            return ""
        least, most = min(steps), max(steps)
        return (
            f"rank {steps.index(least)} {of_all} has taken step {least}, while rank {steps.index(most)} was in the "
            f"middle of step {most}"
        )

    def _come_to(self, saver: SavesAside, target: int) -> _Ready:
        """Wait until the main thread has come to where the ranks save, or the time for that is over."""
        deadline = time.monotonic() + knobs.times().aside_step
        self._in_evaluation = self._pending = None
        while (why := self._why_not(saver, target)) and time.monotonic() < deadline and not self._closed:
            time.sleep(_NAP)
        last, of, step = self._rest.last_generators, self._pending or self._rest, saver.step
        if self._pending is not None:
            last, step = self._pending.points[-1].generators, target
        common = "" if last is None else _common_digest(last.to_json())
        dropped = 0 if self._in_evaluation else of.dropped
        points = 0 if self._in_evaluation else dropped + len(of.points)
        return _Ready(why, step, points, dropped, common)

    def _why_not(self, saver: SavesAside, target: int) -> str:
        """Return why this rank can't be saved now; empty: it can."""
        if self._closed:
            return "has left its loop"
        self._keeps_others_out = self._keeps_others_out or saver._begin_aside()
        if not self._keeps_others_out:
            return "is writing another checkpoint"
        if saver._trains_apart or not self._rest.knows_steps:
            kind = "is trained by LocalSteps" if saver._trains_apart else "has no optimizer= in its Checkpointer"
            paused = self._is_paused and (self._rest.points or self._note_evaluation(saver))
            return "" if paused else f"{kind}, so it can only be left in a step or in saved.between_steps()"
        if saver.step > target and self._rest.pending is not None:
            self._pending = self._rest.pending.before(target)
            if self._pending is not None:
                return ""
        if self._rest.is_stepping or saver.step < target:
            return f"is in the middle of step {target if saver.step < target else target + 1}"
        if self._rest.points:
            return ""
        if self._rest.evaluates or self._is_paused:
            missing = self._rest.missing_in_turn()
            if missing:
                return f"has taken step {saver.step} and evaluates in the middle of its pass, where {missing}"
        if self._note_evaluation(saver):
            return ""
        return (
            f"has taken step {saver.step}, and its loop is still at what follows the optimizer's step: it has not "
            "asked for its next batch"
        )

    def _note_evaluation(self, saver: SavesAside) -> bool:
        """Note the present as the point of rest of an evaluation, if the main thread is in one and still was then."""
        if self._rest.evaluates or self._is_paused:
            point = self._rest.evaluating(saver._epoch_is_done())
            if self._rest.evaluates or self._is_paused:
                self._in_evaluation = point
        return self._in_evaluation is not None

    def _save(self, saver: SavesAside, number: int, everyone: Sequence[_Ready]) -> tuple[Saved, int]:
        """**Collective.** Save the latest point that all ranks have. Return the checkpoint and its step."""
        rest, rank = self._rest, self._world.rank
        step = saver._step_of_save(max(each.step for each in everyone))
        points = (self._pending or rest).points
        point = self._in_evaluation or points[_common_point(everyone) - everyone[rank].dropped - 1]
        begun = rest.begun
        peers = self._peers(number, "write", self._world.timeout)
        # Together: where a state is not known on one rank, the others must not wait for its part.
        run, _ = together(peers, lambda: rest.at(point, self._pending), lambda _: None)
        saved = saver._save_aside(run, replace(point.moment, step=step), peers, _settle(everyone))
        if rest.begun != begun:
            raise LockstepError(f"rank {rank}: an optimizer has stepped while the ranks held for a save")
        return saved, step

    def _leave(self, saved: Saved, step: int, number: int) -> None:
        """Leave the run, on all ranks."""
        self._leave_word(saved, step)
        self._say("the loop had not come to its next step, so the state of its last one was saved from the side")
        self._requests.saved = self._leave_here
        limit = knobs.times().aside_heard
        told = not self._is_ending and self._requests.tell_main()
        deadline = time.monotonic() + limit
        while told and not self._heard and time.monotonic() < deadline:
            time.sleep(_NAP)
        heard = self._heard or not told  # else it hears of it at its next step
        try:
            peers = self._peers(number, "leave", 3 * limit)
            peers.gather(heard)
            peers.leave()
        except CollectiveTimeout as error:
            self._say(str(error), everywhere=True)
        self._may_leave = True
        if not heard:
            self._end_now()

    def _end_now(self) -> None:
        """End this process, whose main thread is in compiled code."""
        self._say("the main thread is in compiled code, so this rank ends without its finally: blocks", everywhere=True)
        timer = threading.Timer(_FLUSH, os._exit, (EXIT_SAVED,))
        timer.daemon = True
        timer.start()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_SAVED)

    def _peers(self, number: int, part: str, timeout: float) -> OverStore:
        return OverStore(
            _torch.default_store(),
            rank=self._world.rank,
            world_size=self._world.world_size,
            key=f"lockstep/side/{number}/{part}",
            timeout=timeout,
        )

    def _say_refused(self, why: str, action: Action) -> None:
        if why == self._said:
            return
        self._said = why
        what = "saved and left" if action is Action.STOP else "saved"
        self._say(f"this run can't be {what} from the side yet, and once the ranks have come to a step: {why}")

    def _say(self, text: str, *, everywhere: bool = False) -> None:
        if everywhere or self._world.is_main:
            who = f"rank {self._world.rank}: " if everywhere else ""
            print(f"lockstep: {who}{text}", file=sys.stderr, flush=True)


def _common_point(everyone: Sequence[_Ready]) -> int:
    """Return the number of the latest point of rest that all ranks have passed since their last step, from 1."""
    return min(max(each.points, 1) for each in everyone)


def _common_digest(states: dict[str, Any]) -> str:
    return digest_of(repr([states[name] for name in COMMON]).encode())


def _settle(everyone: Sequence[_Ready]) -> Settle:
    """Return how the states of the ranks' generators are saved; see Note [Saving from the side]."""

    def settle(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if len({each.common for each in everyone}) > 1:  # the script has seeded ranks differently
            return [*states]
        past = next((rank for rank, each in enumerate(everyone) if each.points), 0)
        common = {name: states[past][name] for name in COMMON}
        return [{**state, **common} for state in states]

    return settle
