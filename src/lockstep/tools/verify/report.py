"""Report the result of a verification, in words and as JSON."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.launch.spec import Program
from lockstep.text import NEXT, counted, joined, listed, wrapped
from lockstep.tools.verify.compare import Distance, FindingKind, Judgement, Stage, StepDifference
from lockstep.tools.verify.records import VERSION
from lockstep.tools.verify.runs import Contrast, Result

_INDENT = "  "
#: The call that advice gives for slices, and a loop over them.
_SLICES = "lockstep.shard(loader, slices=8)"
_SLICES_LOOP = f"""\
  slices  a loop over steps, and in it one over the slices of a step (docs/exactness.md):
              loader = {_SLICES}
              for step in loader.steps():
                  optimizer.zero_grad()
                  for inputs, targets in step:
                      loss_function(model(inputs), targets).backward()
                  optimizer.step()""".splitlines()


def describe(result: Result) -> str:
    """Return the report: the verdict on each number of ranks, how large differences are, and why."""
    program = " ".join(result.asked.program.words)
    ranks = joined(result.asked.ranks)
    # A script that went on is known up to there only.
    which = "the first " if result.steps == result.asked.steps > 1 else ""
    lines = [f"{program}: {which}{counted(result.steps, 'step')} on one rank and on {ranks}, {_threads(result)}"]
    for contrast in result.contrasts:
        lines += ["", *_contrast(contrast, result.rounding)]
        if contrast.judgement.kind is not FindingKind.DIFFERENT:
            lines += _wrapped(_then(contrast, result.asked.program), label=NEXT)
    if any(_SLICES in reason.advice for contrast in result.contrasts for reason in contrast.reasons):
        lines += ["", *_SLICES_LOOP]
    if result.put_back or result.left:
        lines.append("")
    if result.put_back:
        text = f"the script has written {_files(result.put_back)}, put back after each run as before it"
        lines += _wrapped(text, label="note")
    if result.left:
        text = (
            f"not as before: {_files(result.left)}, written by another program or by a library that is not Python's, "
            "so later runs began with what earlier ones left there"
        )
        lines += _wrapped(text, label="note")
    seconds = sum(each.seconds for each in result.runs)
    lines += ["", f"{len(result.runs)} runs took {seconds:.0f} s"]
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, Any]:
    """Return all of it, for programs; numbers that are infinite or NaN are None."""
    return {
        "version": VERSION,
        "verdict": result.kind.value,
        "code": result.kind.code,
        "program": result.asked.program.words,
        "steps": result.steps,
        "threads": result.threads,
        "contrasts": [_contrast_as_json(each) for each in result.contrasts],
        "files_put_back": result.put_back,
        "files_left": result.left,
        "rounding": None if result.rounding is None else _growth(result.rounding),
        "runs": [
            {"what": each.what, "ranks": each.ranks, "steps": each.steps, "seconds": round(each.seconds, 3)}
            for each in result.runs
        ],
    }


def _files(paths: Sequence[str]) -> str:
    here = os.getcwd()
    names = [os.path.relpath(path, here) if path.startswith(here + os.sep) else path for path in paths]
    return listed(names, most=3)


def _threads(result: Result) -> str:
    count = result.threads or "?"
    return f"{count} thread{'' if count == '1' else 's'} each"


# In words ------------------------------------------------------------------------------------------------------------


def _contrast(contrast: Contrast, rounding: Distance | None) -> Iterator[str]:
    judgement = contrast.judgement
    yield f"{contrast.ranks} ranks: {_verdict(judgement)}"
    if judgement.kind is FindingKind.BITS:
        yield from _wrapped("gradients and parameters have the same bits on all ranks after every step")
        yield from _inconclusive(contrast)
    elif judgement.kind is FindingKind.ROUNDING:
        yield from _growth_of(contrast, rounding)
    else:
        yield from _wrapped(_what(contrast), label="what")
        for number, reason in enumerate(contrast.reasons):
            label = ("why" if reason.sure else "likely") if number == 0 else "also"
            yield from _wrapped(f"{reason.cause.value}: {reason.evidence}", label=label)
            yield from _wrapped(reason.advice, label=NEXT)
        if contrast.beneath is not None:
            yield from _wrapped(
                f"{contrast.beneath.value}, compared in a second pair of runs, in which dropout was off and other "
                "numbers were the same for all samples, on any number of ranks",
                label="rest",
            )
            if contrast.beneath is FindingKind.ROUNDING:
                yield from _growth_of(contrast, rounding)
    for remark in contrast.remarks:
        yield from _wrapped(remark, label="note")


def _growth_of(contrast: Contrast, rounding: Distance | None) -> Iterator[str]:
    yield from _growth_in_words(contrast.difference, rounding)
    yield from _inconclusive(contrast)


def _inconclusive(contrast: Contrast) -> Iterator[str]:
    """Say from which step on nothing is known, and why."""
    conclusive, lost = contrast.judgement.conclusive, contrast.difference.not_numbers_from
    if conclusive is not None and lost == conclusive + 1:
        yield from _wrapped(f"from step {lost} on the gradients are NaN, so that nothing can be said of those steps")
    elif conclusive is not None:
        yield from _wrapped(
            f"after step {conclusive} rounding alone takes two runs so far apart that nothing can be said"
        )


def _then(contrast: Contrast, program: Program) -> str:
    """Return the next step for a script that trains the same on these ranks."""
    train = shlex.join(["lockstep", "run", "-n", str(contrast.ranks), *program.words])
    if contrast.judgement.kind is not FindingKind.ROUNDING:
        return train
    return f"{train}; lockstep.shard(loader, slices=8) has the same bits on any number of ranks"


def _verdict(judgement: Judgement) -> str:
    if judgement.kind is not FindingKind.DIFFERENT:
        return str(judgement.kind.value)
    if judgement.stage is Stage.START:
        return "different before the first step"
    if judgement.stage is Stage.LAYOUT:
        return "different"
    return f"different from step {judgement.step} on"


def _what(contrast: Contrast) -> str:
    judgement, difference = contrast.judgement, contrast.difference
    if judgement.stage is Stage.LAYOUT:
        return str(Stage.LAYOUT.value)
    if judgement.stage is Stage.COUNT:
        taken = difference.other.steps_of_ranks
        steps = joined(taken[:1] if len({*taken}) == 1 else taken)
        return f"{difference.first.steps} steps on one rank, {steps} on {contrast.ranks}"
    name = _name(contrast)
    if judgement.stage is Stage.APART:
        return f"parameter {name} is not the same on all ranks"
    size = f"differs by {_part(judgement.relative)}"
    if judgement.stage is Stage.START:
        return f"parameter {name} {size}"
    allowed = f"rounding explains {judgement.allowed:.1e}"
    if judgement.stage is Stage.GRADIENT:
        return f"the gradient of {name} {size} (an element by up to {judgement.most:.2g}); {allowed}"
    return (
        f"what the step adds to {name} {size} (an element by up to {judgement.most:.2g}), of equal gradients; {allowed}"
    )


def _name(contrast: Contrast) -> str:
    step = max(contrast.judgement.step or 1, 1)
    note = contrast.difference.first.optimizer(min(step, contrast.difference.first.steps))
    return note.names[contrast.judgement.tensor or 0]


def _part(relative: float) -> str:
    if relative < 1e-3:
        return f"{relative:.1e} of its size"
    return f"{relative:.1%} of its size" if relative < 10 else f"{relative:.0f} times its size"


def _growth_in_words(difference: Distance, rounding: Distance | None) -> Iterator[str]:
    alone = {} if rounding is None else {each.step: each for each in rounding.steps}
    yield f"{_INDENT}step   gradients differ by   parameters by   rounding alone: gradients   parameters"
    for each in _few(difference.steps):
        other = alone.get(each.step)
        beside = "" if other is None else f"{other.gradient:>27.1e}{other.parameter:>13.1e}"
        yield f"{_INDENT}{each.step:>4}{each.gradient:>22.1e}{each.parameter:>16.1e}{beside}"


def _few(steps: list[StepDifference]) -> list[StepDifference]:
    """Return the steps 1, 2, 5, 10, 20, 50, ... and the last."""
    chosen = {10**power * digit for power in range(7) for digit in (1, 2, 5)} | {len(steps)}
    return [each for each in steps if each.step in chosen]


def _wrapped(text: str, *, label: str = "") -> list[str]:
    """Break a sentence into lines, the first behind ``label``."""
    first = f"{_INDENT}{label:<8}" if label else _INDENT
    return wrapped(text, first, " " * len(first))


# As JSON -------------------------------------------------------------------------------------------------------------


def _contrast_as_json(contrast: Contrast) -> dict[str, Any]:
    judgement = contrast.judgement
    named = judgement.tensor is not None
    return {
        "ranks": contrast.ranks,
        "verdict": judgement.kind.value,
        "code": judgement.kind.code,
        "first_step": judgement.step,
        "stage": None if judgement.stage is None else judgement.stage.value,
        "stage_code": None if judgement.stage is None else judgement.stage.code,
        "parameter": _name(contrast) if named else None,
        "relative_difference": _finite(judgement.relative) if named else None,
        "largest_difference": _finite(judgement.most) if named else None,
        "explained_by_rounding": _finite(judgement.allowed) if named else None,
        "conclusive_until": judgement.conclusive,
        "all_but_random": None if contrast.beneath is None else contrast.beneath.code,
        "reasons": [
            {
                "cause": each.cause.value,
                "code": each.cause.code,
                "sure": each.sure,
                "evidence": each.evidence,
                "advice": each.advice,
            }
            for each in contrast.reasons
        ],
        "remarks": contrast.remarks,
        "growth": _growth(contrast.difference),
    }


def _growth(difference: Distance) -> list[dict[str, Any]]:
    return [
        {
            "step": each.step,
            "same_bits": each.same_bits,
            "gradients": _finite(each.gradient),
            "parameters": _finite(each.parameter),
            "loss": _finite(each.loss),
        }
        for each in difference.steps
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
