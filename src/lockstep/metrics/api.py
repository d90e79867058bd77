"""Log: numbers of the training loop, averaged over the ranks without making the loop wait."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Protocol

from lockstep import _torch
from lockstep._files import local_path
from lockstep.comm.calls import of_all_ranks
from lockstep.comm.init import current_world
from lockstep.errors import LockstepError
from lockstep.metrics.file import NAME
from lockstep.metrics.lines import EvaluationResult, Lines, Target
from lockstep.metrics.series import Weight, weight_of

#: Default number of steps between two lines.
_EVERY = 50


class LoggedRun(Protocol):
    """The part of a Checkpointer that a log needs."""

    @property
    def folder(self) -> PurePath: ...

    @property
    def step(self) -> int: ...

    @property
    def _trains_apart(self) -> bool: ...

    def _add_follower(self, follower: Any) -> None: ...

    def _refuse_foreign_folder(self) -> None: ...

    def _evaluated(self) -> Sequence[EvaluationResult]: ...


class Log:
    """The numbers of a run, one line of JSON every few steps: ``log(loss=loss, acc=acc)`` inside the loop.

    A call waits for no device and sends nothing: numbers on a GPU stay there until a line is due. Then the ranks
    combine them: each number of a line is the mean over all samples of all ranks since the line before, in float64,
    weighted as :meth:`World.mean <lockstep.World.mean>` does, so that unequal and empty shares are exact. Rank 0 writes
    the line to ``metrics.jsonl`` and hands it to the sinks. See docs/metrics.md.

    **Collective** to construct.

    A line is due at a fixed interval of steps or seconds (at the same call on every rank), before each save of the
    Checkpointer and at the end of its ``epochs``, when :meth:`line` asks for it, and at :meth:`close`.

    Args:
        run: a :class:`lockstep.Checkpointer`: the file is beside its checkpoints, since it is part of the same run, its
            steps are the Checkpointer's, and a run that resumes from a checkpoint cuts off the lines of later steps,
            which it takes again. Or a path: of a folder, or of the file itself if it ends with ``.jsonl``; each call is
            then a step, unless ``step=`` is given.
        every: steps between two lines; 50 if neither this nor ``seconds`` is given.
        seconds: seconds between two lines, by rank 0's clock.
        sinks: further receivers of the lines, on rank 0 alone: objects or modules with ``log(dict, step=)`` (Weights &
            Biases, trackio), ``log_metrics(dict, step=)`` (MLflow, comet) or ``add_scalar(tag, value, step)``
            (TensorBoard's SummaryWriter); or functions without arguments that make one, which only rank 0 calls, at the
            first call of the log. None in the list is skipped.
        after: for a path, the step that the run resumes from: later lines are cut off. None: the run begins; an
            existing file is renamed (``metrics-1.jsonl``).
        evaluated: for a path, the Checkpointer of this run, whose folder is in a store: what ``lockstep evaluate``
            finds of its checkpoints gets lines too, as it does without this where ``run`` is a Checkpointer.

    Raises:
        LockstepError: ``lockstep.init()`` has not been called.
        TypeError, ValueError: an argument is invalid.
    """

    @of_all_ranks("lockstep.Log()")
    def __init__(
        self,
        run: LoggedRun | str | PathLike[str],
        *,
        every: int | None = None,
        seconds: float | None = None,
        sinks: Sequence[Any] = (),
        after: int | None = None,
        evaluated: LoggedRun | None = None,
    ) -> None:
        world = current_world()
        if world is None:
            raise LockstepError("lockstep.Log: no world yet; call lockstep.init() first")
        for name, value in {"every": every, "after": after}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}: expected a number of steps")
        if every is not None and every < 1:
            raise ValueError(f"every={every}: expected at least 1")
        if after is not None and after < 0:
            raise ValueError(f"after={after}: expected a step, 0 or more")
        if seconds is not None and not seconds > 0:
            raise ValueError(f"seconds={seconds}: expected more than 0")
        if isinstance(sinks, (str, Mapping)) or not isinstance(sinks, Sequence):
            raise TypeError(f"sinks={type(sinks).__name__}: expected a list of sinks, also for one")
        self._world = world
        self._run: LoggedRun | None = None

        def check() -> None:
            return None

        if evaluated is not None and not hasattr(evaluated, "_evaluated"):
            raise TypeError(f"evaluated={type(evaluated).__name__}: expected a lockstep.Checkpointer")
        apart: Callable[[], bool] = bool
        results: Callable[[], Sequence[EvaluationResult]] = tuple if evaluated is None else _evaluated_of(evaluated)
        if isinstance(run, (str, PathLike)):
            path = local_path(run, "run").absolute()
            path = path if path.suffix == ".jsonl" else path / NAME
        elif hasattr(run, "_add_follower"):
            if after is not None:
                raise ValueError(f"after={after}: the Checkpointer knows which step the run resumes from")
            if evaluated is not None:
                raise ValueError("evaluated: a log of a Checkpointer has what is found of its checkpoints anyway")
            if not isinstance(run.folder, Path):
                raise ValueError(
                    f"run: the checkpoints are in a store, {run.folder}, and a log is a file of this machine: give "
                    "lockstep.Log a path"
                )
            self._run, path = run, run.folder / NAME
            check, results, apart = _check_of(run), _evaluated_of(run), _apart_of(run)
        else:
            raise TypeError(f"run={type(run).__name__}: expected a lockstep.Checkpointer or a path")
        if every is None and seconds is None:
            every = _EVERY
        #: The path of the file with the lines.
        self.path = path
        target = Target(path, every, seconds, tuple(sinks), check, results, apart)
        self._lines = Lines(world, target, after=after)
        if self._run is not None:
            self._run._add_follower(self._lines)
        # The lines of a Checkpointer live as long as it does: the ranks' garbage collectors may find an unused log at
        # different times.
        weakref.finalize(self._run or self, self._lines.leave)

    @property
    def step(self) -> int:
        """The step of the last call; before any call, the step that the run resumes from, or 0."""
        return self._lines.step

    @_torch.mark_untraced
    def __call__(
        self,
        values: Mapping[str, float | str | Any] | None = None,
        /,
        *,
        step: int | None = None,
        samples: float | Any | None = None,
        **named: float | str | Any,
    ) -> None:
        """**Collective**, though nothing is sent unless a line is due: call it on every rank equally often.

        Log this rank's values; those of an empty batch do not count, and may be NaN.

        Args:
            values: values by name, for names that are not identifiers (``{"train/loss": loss}``).
            step: the step of the values, the same on every rank; it may stay the same, but not go back. None: one
                more than the last. With a Checkpointer it is the Checkpointer's, and must not be given.
            samples: the number of this rank's samples that the values are means of: a number of Python or NumPy, or a
                tensor with one element (``(labels != -100).sum()``), which on a GPU is read when a line is due. None:
                this rank's share of the batch that the sharded loader handed out last, or 1 if there is none.
            named: values by name. Numbers of Python or NumPy and tensors with one element, of any real dtype and on any
                device: each is the mean over this rank's samples. Texts: a line has rank 0's last one.

        Raises:
            TypeError, ValueError: on every rank when the next line is due (at the first call: at once), if some rank
                was given a value that can't be logged: a tensor with several elements, another type, a text
                under a name that was a number's, a name that other ranks did not log. Everything else is in the line.
            LockstepError: the log is closed; the file can't be written (on every rank, at the line after), or belongs
                to another job or run; or several sharded loaders' batches are in hand, with different shares.
            CollectiveTimeout, PeerLost: another rank is late or gone, when a line is due.
        """
        lines, world = self._lines, self._world
        if values is not None:
            named = {**values, **named}
        if self._run is not None:
            given, step = step, self._run.step
            if given is not None:
                lines.find_wrong(ValueError(f"step={given}: the Checkpointer counts the steps; leave it out"), step)
        elif step is None:
            step = lines.step + (not lines.is_in_step)
        elif isinstance(step, bool) or not isinstance(step, int):
            lines.find_wrong(TypeError(f"step={step!r}: expected an int"), lines.step)
            step = lines.step
        weight: Weight
        if samples is None:
            counted = world._in_hand.samples()
            if counted is None:
                world._in_hand.refuse_contested("lockstep.Log without samples=")
                counted = 1.0 if world.share is None else world.share.local_samples
            weight = counted
        else:
            try:
                weight = weight_of(samples)
            except ValueError as unfit:
                lines.find_wrong(unfit, step)
                weight = 0.0
        lines.add(named, step, weight)

    @_torch.mark_untraced
    @of_all_ranks("Log.line()")
    def line(self) -> None:
        """**Collective.** Write a line now with the values since the last one, for instance after an evaluation.

        Raises:
            TypeError, ValueError, LockstepError, CollectiveTimeout, PeerLost: as a call at which a line is due.
        """
        self._lines.line_now()

    @_torch.mark_untraced
    @of_all_ranks("Log.close()")
    def close(self) -> None:
        """**Collective.** Write the values since the last line, force the file to the disk, and close it.

        A ``with`` statement does so at its end, unless an error leaves it: then the other ranks may not get there. The
        sinks are flushed and stay open. A second call does nothing.

        Raises:
            TypeError, ValueError, LockstepError, CollectiveTimeout, PeerLost: as a call at which a line is due.
        """
        self._lines.close()

    def __enter__(self) -> Log:
        """Return the log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the log, unless an error leaves the block."""
        del error, traceback
        if kind is None:
            self.close()


def _check_of(run: LoggedRun) -> Callable[[], None]:
    """Return a check that refuses a folder whose checkpoints ``run`` has not resumed, without keeping ``run`` alive."""
    weak = weakref.ref(run)

    def check() -> None:
        alive = weak()
        if alive is not None:
            alive._refuse_foreign_folder()

    return check


def _apart_of(run: LoggedRun) -> Callable[[], bool]:
    """Return a function that tells whether the ranks of the run train apart, without keeping ``run`` alive."""
    weak = weakref.ref(run)

    def apart() -> bool:
        alive = weak()
        return alive is not None and alive._trains_apart

    return apart


def _evaluated_of(run: LoggedRun) -> Callable[[], Sequence[EvaluationResult]]:
    """Return a function that tells what evaluations of the run have found, without keeping ``run`` alive."""
    weak = weakref.ref(run)

    def evaluated() -> Sequence[EvaluationResult]:
        alive = weak()
        return () if alive is None else alive._evaluated()

    return evaluated
