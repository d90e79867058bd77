"""Losses that are trained on, and those that are a mean over something else than samples."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.script import argument, constant
from lockstep.tools.port.values import Loop

#: Losses that leave targets out of their mean or weigh them -> the positions of their arguments ``weight`` and
#: ``ignore_index``.
_WEIGHING = {
    "torch.nn.CrossEntropyLoss": (0, 2),
    "torch.nn.NLLLoss": (0, 2),
    "torch.nn.functional.cross_entropy": (2, 4),
    "torch.nn.functional.nll_loss": (2, 4),
}


def makes_loss(porting: Porting, call: cst.Call) -> bool:
    """Return whether a call makes a module of ``torch.nn``, which may be called anywhere."""
    name = porting.script.full_name(call.func)
    return name.startswith("torch.nn.") and "functional" not in name


def in_training(porting: Porting, node: cst.CSTNode, training: Sequence[Loop]) -> bool:
    """Return whether a node runs in a loop that trains, also in a function that is called there."""
    function = porting.script.function(node)
    return any(porting.script.inside(node, each.node) or _reaches(porting, each.node, function) for each in training)


def _reaches(
    porting: Porting, node: cst.CSTNode, function: cst.FunctionDef | None, seen: frozenset[int] = frozenset()
) -> bool:
    """Return whether code calls a function, also through others."""
    for call in porting.script.all(cst.Call, node):
        for each in porting.values.functions(call):
            if each is function:
                return True
            if id(each) not in seen and _reaches(porting, each.body, function, seen | {id(each)}):
                return True
    return False


def say_weighed_losses(porting: Porting, training: Sequence[Loop]) -> None:
    """Say of each loss that is a mean over something else than samples that the ranks' means don't make it."""
    script = porting.script
    found: list[cst.CSTNode] = [
        call
        for call in script.all(cst.Call)
        if _weighs(porting, call) and (makes_loss(porting, call) or in_training(porting, call, training))
    ]
    found += [
        value
        for value in _losses(porting)
        if in_training(porting, value, training) and any(_is_masked(porting, each) for each in script.within(value))
    ]
    for each in found:
        porting.left(
            each,
            porting.short(each),
            "a mean over something else than samples: each rank's would count by its samples, and not by what it is a "
            "mean of",
            "call world.weigh with the number of those before the backward (docs/weights.md)",
        )


def _weighs(porting: Porting, call: cst.Call) -> bool:
    positions = _WEIGHING.get(porting.script.full_name(call.func))
    reduction = argument(call, "reduction")
    if (
        positions is None
        or isinstance(call.func, cst.Call)
        or (reduction is not None and constant(reduction.value) == "none")
    ):
        return False
    given = [argument(call, *each) for each in zip(("weight", "ignore_index"), positions, strict=True)]
    return any(each is not None and constant(each.value) != "None" for each in given)


def _losses(porting: Porting) -> list[cst.BaseExpression]:
    """Return what a backward begins at, or is assigned to the variables that it does, or returned by functions that are
    called for these."""
    script = porting.script
    backwards = [
        call
        for call in script.all(cst.Call)
        if isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
    ]
    names = {(id(script.function(name)), name.value) for call in backwards for name in script.all(cst.Name, call.func)}
    found: list[cst.BaseExpression] = [call.func.value for call in backwards if isinstance(call.func, cst.Attribute)]
    for node in script.all(cst.Assign):
        targets = [name for each in node.targets for name in script.all(cst.Name, each.target)]
        if any((id(script.function(each)), each.value) in names for each in targets):
            found.append(node.value)
    functions = {
        id(each) for value in found for call in script.all(cst.Call, value) for each in porting.values.functions(call)
    }
    for returned in script.all(cst.Return):
        if returned.value is not None and id(script.function(returned)) in functions:
            found.append(returned.value)
    return found


def _is_masked(porting: Porting, node: cst.CSTNode) -> bool:
    """Return whether it is a sum over a sum, ``(losses * mask).sum() / mask.sum()``, or ``losses[mask].mean()``."""
    script = porting.script
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
        return all(
            any(_method(call) == "sum" for call in script.all(cst.Call, each)) for each in (node.left, node.right)
        )
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and _method(node) == "mean":
        picked = node.func.value
        index = picked.slice[0].slice if isinstance(picked, cst.Subscript) and len(picked.slice) == 1 else None
        return isinstance(index, cst.Index) and isinstance(index.value, (cst.Name, cst.Comparison, cst.UnaryOperation))
    return False


def _method(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
