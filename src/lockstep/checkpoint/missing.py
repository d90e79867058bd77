"""What a training has and its Checkpointer was not given, so that a run that resumes would begin it anew.

Note [What was not given]
~~~~~~~~~~~~~~~~~~~~~~~~~
A Checkpointer of a model alone is right where a model is only evaluated, and a mistake where it is trained: the run
resumes with a fresh optimizer, and nothing fails. What tells the two apart is an optimizer of this model's parameters
in the process. Python knows all objects, so it is looked for once, when a run begins or resumes, and with it schedulers
of such an optimizer and loaders that could resume. Where there is none, nothing is said, whatever else is there.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from lockstep.checkpoint.state import RunState
from lockstep.text import counted, joined, listed

#: The method by which a loader shows that its position can be saved and listened to.
_LOADER_HOOK = "_register_end_of_pass_hook"


def words_on_missing(run: RunState, *, besides: Collection[str] = ()) -> str:
    """Say what of the training of ``run``'s model was not given to its Checkpointer; empty if nothing is missing.

    Args:
        run: what was given.
        besides: names of arguments that need not be looked for.
    """
    given = [run.optimizer, run.scheduler, run.loader, *run.extra.values()]
    optimizers, schedulers, loaders = _training_of(run)
    if not optimizers:
        return ""
    missing: list[tuple[str, str, str]] = []
    apart = [each for each in optimizers if not _is_among(each, given)]
    if apart and "optimizer" not in besides:
        names = listed([type(each).__name__ for each in apart])
        more = "" if run.optimizer is None else ", or, for a second one, extra={'optimizer2': …}"
        missing.append((f"{names} of its parameters", "with a fresh optimizer", f"optimizer=…{more}"))
    others = [each for each in schedulers if not _is_among(each, given)]
    if run.scheduler is None and others and "scheduler" not in besides:
        names = listed([type(each).__name__ for each in others])
        missing.append((names, "with the first learning rate of the schedule", "scheduler=…"))
    if (
        run.loader is None
        and loaders
        and "loader" not in besides
        and not any(_is_among(each, given) for each in loaders)
    ):
        missing.append((counted(len(loaders), "sharded loader"), "at the first batch of an epoch", "loader=…"))
    if not missing:
        return ""
    there, begins, arguments = ([each[i] for each in missing] for i in range(3))
    return (
        f"the model is trained here by what its Checkpointer was not given: {joined(there)}. So a run that resumes "
        f"begins {joined(begins)}: pass {joined(arguments)}. (A model that is only evaluated is loaded by "
        "lockstep.load_weights.)"
    )


def _training_of(run: RunState) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the optimizers of the model's parameters in this process, their schedulers, and loaders that resume."""
    parameters = {id(each) for each in run.model.parameters()}
    objects = gc.get_objects()
    # There are few types among some 300,000 objects, so only types are asked; type(), since __class__ may be anything.
    kinds = {kind for kind in set(map(type, objects)) if _is_wanted(kind)}
    found = [each for each in objects if type(each) in kinds]
    optimizers = [
        each
        for each in found
        if isinstance(each, torch.optim.Optimizer)
        and any(id(param) in parameters for group in each.param_groups for param in group["params"])
    ]
    schedulers = [each for each in found if isinstance(each, LRScheduler)]
    loaders = [each for each in found if hasattr(each, _LOADER_HOOK)]
    of_these = [each for each in schedulers if _is_among(getattr(each, "optimizer", None), optimizers)]
    chained = [inner for each in of_these for inner in getattr(each, "_schedulers", ())]
    return optimizers, [each for each in of_these if not _is_among(each, chained)], loaders


def _is_wanted(kind: type) -> bool:
    return issubclass(kind, (torch.optim.Optimizer, LRScheduler)) or any(
        _LOADER_HOOK in vars(base) for base in kind.__mro__
    )


def _is_among(thing: object, others: Collection[Any]) -> bool:
    return any(thing is each for each in others)
