"""Faults that somebody might make in saving from the side."""

from __future__ import annotations

from tests.faults.planting import Fault

_POINTS = ("tests/unit/test_rest.py",)
_PLACES = "tests/ranks/test_saved_aside.py"

ASIDE_FAULTS = [
    Fault(
        "an optimizer steps while the ranks hold",
        "checkpoint/rest.py",
        "    if gate is not None:\n",
        "    if False:\n",
        _POINTS,
    ),
    Fault(
        "what a forward has changed is saved",
        "checkpoint/rest.py",
        "        return {**state, **kept}\n",
        "        return {**state}\n",
        _POINTS,
    ),
    Fault(
        "the present random numbers are saved with an earlier step",
        "checkpoint/rest.py",
        "        return super().generators(device) if self.point is None else self.point.generators\n",
        "        return super().generators(device)\n",
        _POINTS,
    ),
    Fault(
        "a tensor that changes for the first time in a step is saved as it is",
        "checkpoint/rest.py",
        "            if unknown:\n",
        "            if False:\n",
        _POINTS,
    ),
    Fault(
        "points are kept though a step was taken since",
        "checkpoint/rest.py",
        "not rest._run.model.training\n        rest.points.clear()\n",
        "not rest._run.model.training\n",
        _POINTS,
    ),
    Fault(
        "a pass that is over draws once more when it is resumed",
        "data/loader.py",
        "            if not is_over:\n                self._ask(rank_stream)\n",
        "            self._ask(rank_stream)\n",
        (_PLACES, "-k", "any_place and evaluation-"),
    ),
    Fault(
        "each rank saves the latest point of its own",
        "checkpoint/aside.py",
        "points[_common_point(everyone) - everyone[rank].dropped - 1]",
        "rest.points[-1]",
        (f"{_PLACES}::test_a_signal_in_any_place_saves_the_last_step_and_the_bits[evaluation-1 of 2]",),
    ),
    Fault(
        "a rank that is a step behind does not take it",
        "checkpoint/aside.py",
        "            self._hold(target)\n",
        "",
        (_PLACES, "-k", "is_a_step_behind"),
    ),
]
