"""The receivers of lines besides metrics.jsonl: Weights & Biases, trackio, comet, MLflow, TensorBoard and the like.

Note [Sinks that fail]
~~~~~~~~~~~~~~~~~~~~~~
A sink uses a disk or a network that training does not need, and only rank 0 calls it: if its error were raised there,
the other ranks would wait for a rank that is gone, or a night's training would end because a server was restarted.
Every line is in metrics.jsonl whatever happens to the sinks. So an error of a sink is a warning, once for each sink;
the sink still gets the next line, and closing the log reports how many lines it has missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep import callsite

#: The name of the step of an evaluated checkpoint, for a sink that takes no step that lies back.
LATE_STEP = "eval/step"
#: The type of a value in a line.
Value = float | str | None


class Sink:
    """**Rank 0.** A sink of the user's, or the one that a user's function without arguments makes.

    Raises:
        TypeError: it has no method that takes a line.
    """

    def __init__(self, given: Any) -> None:
        if isinstance(given, type) or (_way(given) is None and callable(given)):
            given = given()
        way = _way(given)
        if way is None:
            raise TypeError(
                f"sinks: a {_name(given)} takes no lines: expected an object or a module with log(dict, step=), "
                "log_metrics(dict, step=) or add_scalar(tag, value, step), or a function without arguments that makes "
                "one, which is called on rank 0 alone"
            )
        self._given, self._write = given, way
        self._name = _name(given)
        #: The number of lines at which the sink failed.
        self._missed = 0
        self._lines = 0

    def write(self, values: Mapping[str, Value], step: int) -> None:
        """Pass a line to the sink. See Note [Sinks that fail]."""
        self._lines += 1
        try:
            self._write({name: math.nan if value is None else value for name, value in values.items()}, step)
        except Exception as error:  # noqa: BLE001  (whatever a library of the user's raises)
            self._missed += 1
            if self._missed == 1:
                callsite.warn(
                    f"the sink {self._name} did not take the line of step {step} ({type(error).__name__}: {error}); "
                    "metrics.jsonl has it, and the sink gets the next one",
                    RuntimeWarning,
                )

    def write_late(self, values: Mapping[str, Value], step: int, *, now: int) -> None:
        """Pass a line of an earlier step than the last one to the sink.

        One with ``log(dict, step=)`` may take no step that lies back (Weights & Biases drops it), so it gets the line
        at the step of now, with the line's own step among the values.

        Args:
            values: by their names.
            step: the step of the values.
            now: the step of the last line.
        """
        if _takes_late(self._given):
            self.write(values, step)
        else:
            self.write({**values, LATE_STEP: step}, max(step, now))

    def flush(self) -> None:
        """Flush the sink, if it has such a method."""
        flush = getattr(self._given, "flush", None)
        try:
            if callable(flush):
                flush()
        except Exception as error:  # noqa: BLE001
            callsite.warn(
                f"the sink {self._name} could not be flushed: {type(error).__name__}: {error}", RuntimeWarning
            )

    def close(self) -> None:
        """Flush the sink, and warn of lines that it has missed. It is the user's own, and stays open."""
        self.flush()
        if self._missed > 1:
            callsite.warn(
                f"the sink {self._name} has missed {self._missed} of {self._lines} lines; metrics.jsonl has them all",
                RuntimeWarning,
            )


def _takes_late(given: Any) -> bool:
    """Return whether a sink takes lines in any order of their steps: MLflow, comet, TensorBoard."""
    return callable(getattr(given, "log_metrics", None)) or not callable(getattr(given, "log", None))


def _name(given: Any) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def _way(given: Any) -> Callable[[dict[str, float | str], int], object] | None:
    """Return the function that passes a line to ``given``, or None if it takes none."""
    metrics, log, scalar = (getattr(given, name, None) for name in ("log_metrics", "log", "add_scalar"))
    if callable(metrics):  # MLflow's module, comet's Experiment, Lightning's loggers: numbers only
        return lambda values, step: metrics(_numbers(values), step=step)
    if callable(log):
        return lambda values, step: log(values, step=step)
    if not callable(scalar):
        return None
    text = getattr(given, "add_text", None)

    def add(values: Mapping[str, float | str], step: int) -> None:
        for name, value in values.items():
            if not isinstance(value, str):
                scalar(name, value, step)
            elif callable(text):
                text(name, value, step)

    return add


def _numbers(values: Mapping[str, float | str]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not isinstance(value, str)}


def make(sinks: Sequence[Any]) -> list[Sink]:
    """**Rank 0.** Return the sinks; None in the list is skipped."""
    return [Sink(each) for each in sinks if each is not None]
