"""Which global batch of which loader a step of a recorded run took. Pure.

The rank that tells of loaders leaves notes of them (Note [Passes in the record] in ``data/pass_notes.py``), which the
launcher adds to the start under way. A pass is an object with

- ``step``, ``epoch``, ``batch`` and ``samples``: the number of the step under way when it began, from 1, and the
  loader's position then;
- ``first``: the step that each of its first batches went to, if they were looked at;
- ``steps`` and ``batches``: how many it had, once it is over;
- ``again``: how many passes like it are known to have followed it.

What is known so is *certain*. Beyond it, in a pass that never ended and in those after the last note, a step's batch
is *inferred*: as many batches to a step as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

#: Passes of a loader that are kept of one start. Later ones are left out, which "until" says.
MOST = 1000
#: The keys of a pass that say which it is.
_PLACE = ("step", "epoch", "batch", "samples")
#: The most batches to a step, or steps to a batch, that are looked for.
_MOST_TO_ONE = 4096


def add_loader(loaders: list[dict[str, Any]], note: Mapping[str, Any]) -> None:
    """Add a note of a loader's settings to a start."""
    loaders.append({"loader": note["loader"], **note["settings"], "passes": []})


def add_pass(loaders: Sequence[dict[str, Any]], note: Mapping[str, Any]) -> None:
    """Add a note of a pass to a start."""
    loader = next((each for each in reversed(loaders) if each["loader"] == note["loader"]), None)
    if loader is None or "until" in loader:
        return
    passes = loader["passes"]
    facts = {name: value for name, value in note.items() if name not in ("is", "at", "loader")}
    known = next((each for each in reversed(passes) if all(each[name] == facts[name] for name in _PLACE)), None)
    if known is not None:
        known.update(facts)
    elif len(passes) < MOST:
        passes.append(facts)
    else:
        loader["until"] = facts["step"]


@dataclass(frozen=True)
class StepBatches:
    """The global batches of one loader that went to a step."""

    #: The loader's settings, as recorded.
    loader: Mapping[str, Any]
    epoch: int
    #: The numbers of the batches in their epoch. If ``is_one_of``, the step took one of these.
    batches: range
    #: The position in the epoch of the first sample of the first of them; None: their sizes are not known.
    position: int | None
    #: True if it is certain, False if it is inferred.
    is_certain: bool = True
    is_one_of: bool = False


def taken(loaders: Sequence[Mapping[str, Any]], step: int) -> list[StepBatches]:
    """Return what a step took, by loader; empty: nothing is known of it.

    Args:
        loaders: of one start, as recorded.
        step: its number, from 1.
    """
    found: list[tuple[int, StepBatches]] = []
    for place, loader in enumerate(loaders):
        is_last = all(later["loader"] != loader["loader"] for later in loaders[place + 1 :])
        each = _taken(loader, step, is_last=is_last)
        if each is not None:
            found.append(each)
    certain = [each for _, each in found if each.is_certain]
    if certain:
        return certain
    # Of loaders that may have gone on, those that did last: the others were left before.
    latest = max((end for end, _ in found), default=0)
    return [each for end, each in found if end == latest]


def at(loader: Mapping[str, Any], epoch: int, batch: int) -> StepBatches:
    """Return the batch of an epoch as :func:`taken` would, by the loader's settings alone.

    The position counts from the epoch's beginning, or, if a pass is known that began within the epoch and before the
    batch, from there.
    """
    began = [each for each in loader["passes"] if each["epoch"] == epoch and each["batch"] <= batch]
    return _at(loader, began[-1] if began else {"epoch": epoch, "batch": 0, "samples": 0}, epoch, batch, batch + 1)


def _taken(loader: Mapping[str, Any], step: int, *, is_last: bool) -> tuple[int, StepBatches] | None:
    """Return up to which step all is certain, and what this step took; None: nothing, as far as it is known."""
    passes = loader["passes"]
    place = next((place for place in reversed(range(len(passes))) if passes[place]["step"] <= step), None)
    if place is None or step >= loader.get("until", step + 1):
        return None
    found, is_newest = passes[place], is_last and place == len(passes) - 1
    rhythm = next((each["first"] for each in reversed(passes[: place + 1]) if each.get("first")), None)
    ended = found.get("steps")
    end = found["step"] + (ended or 0) * (1 + found.get("again", 0))
    if ended is None or step < found["step"] + ended:
        each = _within(loader, found, found["epoch"], step - found["step"], rhythm)
        # Before a later pass it was left, by an error for example, and nothing tells at which step.
        return (end, each) if each.is_certain or is_newest else None
    if not ended or (step >= end and not is_newest):
        return None
    later = _later(loader, found, step - found["step"] - ended, rhythm)
    if later is None:
        return None
    epoch, offset, like = later
    each = _within(loader, like, epoch, offset, rhythm)
    return end, replace(each, is_certain=each.is_certain and step < end)


def _later(
    loader: Mapping[str, Any], found: Mapping[str, Any], after: int, rhythm: Sequence[int] | None
) -> tuple[int, int, dict[str, Any]] | None:
    """Return which of the passes after one that ended a step is in: its epoch, the step's place in it, and a pass like
    it. None: it is not known how long they are.

    Args:
        after: steps from the end of the one that ended.
    """
    steps, batches = found["steps"], found["batches"]
    if found["batch"]:  # it began in the middle of an epoch, so the others are longer
        full, pace = _full(loader), _pace(found, rhythm)
        if full is None or pace is None:
            return None
        steps, batches = pace.steps(full), full
    like = {"step": 0, "epoch": 0, "batch": 0, "samples": 0, "steps": steps, "batches": batches}
    return found["epoch"] + 1 + after // steps, after % steps, like


@dataclass(frozen=True)
class _Pace:
    """How many batches go to a step, or how many steps to a batch; one of them is 1."""

    to_step: int = 1
    to_batch: int = 1
    #: True if batches at the end of a pass that are too few for a step are left out.
    drops: bool = False

    def steps(self, batches: int) -> int:
        """Return the steps of so many batches."""
        whole, rest = divmod(batches, self.to_step)
        return (whole + (rest > 0 and not self.drops)) * self.to_batch

    def batches(self, step: int) -> range:
        """Return the batches of a step, counted from 0."""
        first = step // self.to_batch * self.to_step
        return range(first, first + self.to_step)


def _pace(found: Mapping[str, Any], rhythm: Sequence[int] | None) -> _Pace | None:
    """Return the pace of a pass by its steps and batches, if it has ended, and by the steps of first batches; None: it
    has none, or nothing is known of it."""
    return next((pace for pace in _paces(found, rhythm) if _fits(pace, found, rhythm)), None)


def _paces(found: Mapping[str, Any], rhythm: Sequence[int] | None) -> Iterator[_Pace]:
    yield _Pace()
    if rhythm:
        moved = next((place for place, step in enumerate(rhythm) if step != rhythm[0]), len(rhythm))
        to_step, to_batch = moved, rhythm[moved] - rhythm[0] if moved < len(rhythm) else 1
    elif "steps" in found:
        steps, batches = found["steps"], found["batches"]
        to_step, to_batch = max(1, round(batches / steps)), max(1, round(steps / max(1, batches)))
    else:
        return
    if to_step <= _MOST_TO_ONE and to_batch <= _MOST_TO_ONE and 1 in (to_step, to_batch):
        yield _Pace(to_step, to_batch)
        yield _Pace(to_step, to_batch, drops=True)


def _fits(pace: _Pace, found: Mapping[str, Any], rhythm: Sequence[int] | None) -> bool:
    if "steps" in found and pace.steps(found["batches"]) != found["steps"]:
        return False
    return all(place in pace.batches(step - rhythm[0]) for place, step in enumerate(rhythm)) if rhythm else True


def _full(loader: Mapping[str, Any]) -> int | None:
    """Return the batches of a whole epoch; None: the settings don't tell."""
    length, size = loader["length"], loader["batch_size"]
    if length is None or not size or loader["order"] in ("batches", "stream"):
        return None
    return int(length // size if loader["drop_last"] else -(-length // size))


def _within(
    loader: Mapping[str, Any], found: Mapping[str, Any], epoch: int, offset: int, rhythm: Sequence[int] | None
) -> StepBatches:
    """Return what a step of a pass took.

    Args:
        found: the pass, or one that is like it.
        epoch: that of the pass.
        offset: the steps before this one in the pass.
        rhythm: the steps that the first batches of some pass went to.
    """
    own = found.get("first")
    if own and offset < own[-1] - own[0]:  # it was seen, up to the first batch of the step after it
        mine = [place for place, step in enumerate(own) if step - own[0] <= offset]
        same = [place for place in mine if own[place] - own[0] == offset] or mine[-1:]
        return _at(loader, found, epoch, found["batch"] + same[0], found["batch"] + same[-1] + 1)
    pace, has_ended = _pace(found, rhythm), "steps" in found
    if pace is not None:
        batches = pace.batches(offset)
        end = min(batches.stop, found["batches"]) if has_ended else batches.stop
        # What is left over where the batches of a pass make no whole number of steps may count in the next pass.
        certain = has_ended and found["batches"] % pace.to_step == 0
        return _at(loader, found, epoch, found["batch"] + batches.start, found["batch"] + end, is_certain=certain)
    if not has_ended:
        first = found["batch"] + offset
        return _at(loader, found, epoch, first, first + 1, is_certain=False)
    # So many batches more than steps, or fewer, lie anywhere in the pass.
    first, apart = found["batch"] + offset, found["batches"] - found["steps"]
    end = found["batch"] + found["batches"]
    low, high = max(found["batch"], first + min(0, apart)), min(end - 1, first + max(0, apart))
    return _at(loader, found, epoch, low, high + 1, is_one_of=True)


def _at(
    loader: Mapping[str, Any],
    found: Mapping[str, Any],
    epoch: int,
    first: int,
    end: int,
    *,
    is_certain: bool = True,
    is_one_of: bool = False,
) -> StepBatches:
    size = loader["batch_size"]
    position = None if size is None else found["samples"] + (first - found["batch"]) * size
    return StepBatches(loader, epoch, range(first, end), position, is_certain, is_one_of)
