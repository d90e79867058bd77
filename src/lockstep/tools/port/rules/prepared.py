"""What Accelerate and Fabric have in common: an object of which all is asked, and calls that make parts ready."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.rules.loaders import multiply_batch
from lockstep.tools.port.script import argument, method_of
from lockstep.tools.port.values import Kind

#: A rule for a method; it returns False if it does not cover these arguments.
MethodRule = Callable[[Porting, cst.Call, cst.BaseExpression], bool]


@dataclass(frozen=True)
class ForeignObject:
    """The object of another library whose place the World takes.

    Args:
        kind: its kind.
        attributes: attribute -> what stands for it, with ``{}`` for the object.
        methods: method -> its rule.
        advice: method or attribute without a rule -> what to write instead.
        classes: full names of its class, in annotations.
    """

    kind: Kind
    attributes: Mapping[str, str]
    methods: Mapping[str, MethodRule]
    advice: Mapping[str, str]
    classes: frozenset[str]


def only_call(porting: Porting, names: Collection[str], what: str) -> cst.Call | None:
    """Return the one call that makes the object, where ``lockstep.init`` is to stand; None: the script is refused.

    Args:
        porting: of the script, which has such a call.
        names: the full names of the object's class.
        what: the call in short, for people.
    """
    script = porting.script
    made = [each for each in script.all(cst.Call) if script.full_name(each.func) in names]
    if len(made) > 1:
        porting.refused(made[1], what, "there are several", "make one, and hand it on")
        return None
    if not isinstance(script.parent(made[0]), cst.Assign):
        porting.refused(made[0], what, "it is part of another expression", "assign it on a line of its own")
        return None
    porting.set_init([made[0]])
    return made[0]


def put_world(porting: Porting, made: cst.Call, init: str, kind: str) -> None:
    """Write a call of ``lockstep.init`` in the place of the call that made an object of a kind."""
    text = init.removeprefix("world = ")
    porting.script.replace(made, text)
    porting.changed(made, f"world = {text}", f"the World takes the place of the {kind}")


def port_object(porting: Porting, foreign: ForeignObject) -> None:
    """Let the World take the place of an object: each of its uses has a rule, or the script is refused."""
    script, values = porting.script, porting.values
    if script.has_name("world"):
        porting.refused(None, "world", "the script uses this name for something else", "give that another name")
        return
    for node in script.all(cst.Attribute):
        if not values.may(node.value, foreign.kind):
            continue
        name, outer = node.attr.value, script.parent(node)
        if isinstance(outer, cst.Call) and outer.func is node:
            rule = foreign.methods.get(name)
            done = rule is not None and rule(porting, outer, node.value)
        else:
            decided = isinstance(outer, cst.Comparison) and script.is_replaced(outer)
            done = decided or name in foreign.attributes
            if done and not decided:
                _take_attribute(porting, node, foreign.attributes[name])
        if not done:
            advice = foreign.advice.get(name, "write what it does in torch's or lockstep's words, then port again")
            porting.refused(
                node, porting.short(outer if isinstance(outer, cst.Call) else node), "there is no rule for it", advice
            )
    _rename(porting, foreign)


def _take_attribute(porting: Porting, node: cst.Attribute, text: str) -> None:
    script = porting.script
    script.replace(node, lambda: text.format(script.render(node.value)))
    if text.startswith("{}"):
        porting.changed(node, f"{text.format('world')} for .{node.attr.value}", "the same")


def _rename(porting: Porting, foreign: ForeignObject) -> None:
    """Call every variable that holds the object ``world``, and its class ``lockstep.World``."""
    script, values = porting.script, porting.values
    names = {
        each.value for each in script.all(cst.Name) if values.may(each, foreign.kind) and script.full_name(each) == ""
    }
    for node in script.all(cst.Name):
        outer = script.parent(node)
        if isinstance(outer, cst.Attribute) and outer.attr is node:
            continue
        if node.value in names:
            script.replace(node, "world")
        elif script.full_name(node) in foreign.classes and isinstance(outer, cst.Annotation):
            script.replace(node, "lockstep.World")


# Rules for methods.


def as_method(text: str) -> MethodRule:
    """Return a rule that writes a call; ``{}`` stands for the object, ``{args}`` for all arguments as they are."""

    def rule(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
        script = porting.script
        if "{args}" not in text and call.args:
            return False
        if text.endswith("({args})"):
            name = text.removesuffix("({args})")
            script.replace(call.func, lambda: name.format(script.render(owner)))
            porting.changed(call, name.format("world"), f"the same as .{method_of(call)}()")
            return True

        def make() -> str:
            given = ", ".join(script.render(each) for each in call.args)
            return text.format(script.render(owner), args=given)

        script.replace(call, make)
        porting.changed(call, text.format("world", args="..."), f"the same as .{method_of(call)}()")
        return True

    return rule


def removed(why: str) -> MethodRule:
    """Return a rule that removes the line of a call."""

    def rule(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
        statement = porting.expression_statement(call)
        if statement is None:
            return False
        porting.script.remove(statement)
        porting.changed(call, porting.short(call), why)
        return True

    return rule


def backward(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
    """Call the loss's own backward."""
    if len(call.args) != 1 or call.args[0].keyword is not None or call.args[0].star:
        return False
    loss, script = call.args[0].value, porting.script
    simple = isinstance(loss, (cst.Name, cst.Attribute, cst.Call))

    def make() -> str:
        text = script.render(loss)
        return f"{text}.backward()" if simple else f"({text}).backward()"

    script.replace(call, make)
    porting.changed(call, "the loss's own backward()", "a replica averages the gradients when it runs")
    return True


def only_argument(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
    """Put the only argument in the place of a call."""
    if len(call.args) != 1 or call.args[0].star:
        return False
    porting.script.replace(call, lambda: porting.script.render(call.args[0].value))
    porting.changed(call, porting.short(call.args[0].value), "a replica is the model itself")
    return True


def gather_rows(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    """Gather the rows of a batch on all ranks; there are no padded ones to cut off."""
    if len(call.args) != 1 or call.args[0].star:
        return False
    given, script = call.args[0].value, porting.script
    if isinstance(given, (cst.Dict, cst.DictComp, cst.ListComp, cst.GeneratorExp)):
        return False

    def make() -> str:
        world, text = script.render(owner), script.render(given)
        if isinstance(given, (cst.Tuple, cst.List)):
            return f"(torch.cat({world}.gather(each)) for each in ({text}))"
        return f"torch.cat({world}.gather({text}))"

    outer = script.parent(call)
    is_many = isinstance(given, (cst.Tuple, cst.List))
    if is_many and not (isinstance(outer, cst.Assign) and isinstance(outer.targets[0].target, cst.Tuple)):
        return False
    script.replace(call, make)
    porting.changed(call, "world.gather", "the rows of all ranks in their order; none is padded, so none is cut off")
    return True


def main_first(default_per_machine: bool) -> MethodRule:
    """Return a rule for ``with …_first():``."""

    def rule(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
        local = argument(call, "local", 0)
        if len(call.args) > (0 if local is None else 1):
            return False
        per_machine = default_per_machine if local is None else porting.script.source(local.value) == "True"
        if local is not None and porting.script.source(local.value) not in ("True", "False"):
            return False
        text = 'per="machine"' if per_machine else ""
        porting.script.replace(call, lambda: f"{porting.script.render(owner)}.main_first({text})")
        porting.changed(call, f"world.main_first({text})", "the same")
        return True

    return rule


def save_on_main(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    """Save on rank 0 by ``torch.save``."""
    statement = porting.expression_statement(call)
    target, path = argument(call, "obj", 0), argument(call, "f", 1)
    if statement is None or target is None or path is None or len(call.args) != 2:
        return False
    return save_in_guard(porting, call, owner, target.value, path.value)


def save_in_guard(
    porting: Porting, call: cst.Call, owner: cst.BaseExpression, what: cst.BaseExpression, path: cst.BaseExpression
) -> bool:
    """Write ``if world.is_main: torch.save(what, path)`` in the place of a statement."""
    statement, script = porting.expression_statement(call), porting.script
    if statement is None:
        return False
    indent = script.indent(statement) + script.module.default_indent

    def make() -> str:
        saved = f"torch.save({script.render(what)}, {script.render(path)})"
        return f"if {script.render(owner)}.is_main:\n{indent}{saved}"

    script.replace(call, make)
    porting.changed(call, "torch.save on rank 0", "the same")
    return True


# What is made ready.


def ready(*, per_rank: Callable[[Porting], bool], steps_each: bool) -> MethodRule:
    """Return a rule for ``prepare`` and ``setup``.

    Args:
        per_rank: returns whether the batch sizes of the script's loaders are those of each rank.
        steps_each: a scheduler that is made ready steps once for each rank, where batch sizes are those of each rank.
    """

    def rule(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
        script = porting.script
        assigned, statement = script.parent(call), script.statement(call)
        if not isinstance(assigned, cst.Assign) or any(each.keyword or each.star for each in call.args):
            return False
        target = assigned.targets[0].target
        targets = [each.value for each in target.elements] if isinstance(target, cst.Tuple) else [target]
        if len(targets) != len(call.args) or len(assigned.targets) != 1:
            return False
        pairs = []
        for into, given in zip(targets, call.args, strict=True):
            made = _made_ready(porting, given.value, per_rank(porting), steps_each)
            if made is None:
                return False
            pairs.append((into, given.value, made))
        indent = script.indent(statement)

        def make() -> str:
            lines = []
            for into, value, made in pairs:
                left, right = script.render(into), made.format(script.render(value), world=porting.world(call))
                if left != right:
                    lines.append(f"{left} = {right}")
            return f"\n{indent}".join(lines) or "pass"

        script.replace(assigned, make)
        porting.changed(
            call, "lockstep.replicate, lockstep.shard", "each part is made ready by itself; optimizers stay torch's own"
        )
        return True

    return rule


def _made_ready(porting: Porting, node: cst.BaseExpression, per_rank: bool, steps_each: bool) -> str | None:
    """Return what becomes of a part that is made ready, with ``{}`` for it; None where it is not known what it is."""
    values = porting.values
    if values.may(node, Kind.LOADER):
        if not values.alone(node, Kind.LOADER):
            return None
        for loader in values.sites(node, Kind.LOADER):
            if per_rank and not multiply_batch(porting, loader):
                return None
        if per_rank:
            _count_as_before(porting, node)
        _say_order(porting, node)
        return "lockstep.shard({})"
    called = _methods_called(porting, node)
    if values.alone(node, Kind.OPTIMIZER) or {"step", "zero_grad"} <= called:
        return "{}"
    if values.alone(node, Kind.SCHEDULER) or ("step" in called and "parameters" not in called):
        if steps_each and per_rank:
            _step_each(porting, node)
        return "{}"
    if called & {"parameters", "train", "eval"}:
        return "lockstep.replicate({}.to({world}.device))"
    return None


def _methods_called(porting: Porting, node: cst.BaseExpression) -> set[str]:
    """Return the methods that the script calls on what this expression names."""
    text, script = porting.script.source(node), porting.script
    return {
        call.func.attr.value
        for call in script.all(cst.Call)
        if isinstance(call.func, cst.Attribute)
        and script.source(call.func.value) == text
        and script.function(call) is script.function(node)
    } | {
        call.func.attr.value
        for call in script.all(cst.Call)
        if isinstance(call.func, cst.Attribute) and porting.values.of(call.func.value) & _told(porting, node)
    }


def _told(porting: Porting, node: cst.BaseExpression) -> frozenset[object]:
    return frozenset(each for each in porting.values.of(node) if each.kind not in (Kind.OTHER, Kind.NONE, Kind.CLASS))


def _count_as_before(porting: Porting, node: cst.BaseExpression) -> None:
    """Let ``len(loader)``, before the loader is made ready, count batches of one rank's size, as it did."""
    script, text = porting.script, porting.script.source(node)
    for call in script.all(cst.Call):
        counts = (
            script.full_name(call.func) == "len" and len(call.args) == 1 and script.source(call.args[0].value) == text
        )
        early = script.function(call) is script.function(node) and script.begin(call) < script.begin(node)
        if counts and early and not script.is_replaced(call):
            script.replace(call, lambda call=call: f"({script.inner(call)} * {porting.size(call)})")  # type: ignore[misc]
            porting.differs(
                call,
                porting.short(call),
                "it counted batches of one rank's size of all samples; times the number of ranks it does so again, but "
                "for the last ones: it may be larger by less than that number",
            )


def _say_order(porting: Porting, node: cst.BaseExpression) -> None:
    porting.differs(
        node,
        "lockstep.shard",
        "a shuffled order is another one, and no sample is repeated to give all ranks as many",
    )


def _step_each(porting: Porting, node: cst.BaseExpression) -> None:
    """Let a scheduler step once for each rank, as Accelerate's does."""
    script = porting.script
    text = script.source(node)
    for call in script.all(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value != "step" or call.args:
            continue
        if script.source(call.func.value) != text or script.function(call) is not script.function(node):
            continue
        statement = porting.expression_statement(call)
        if statement is None:
            continue
        indent = script.indent(statement) + script.module.default_indent
        script.replace(
            call,
            lambda call=call, indent=indent: f"for _ in range({porting.size(call)}):\n{indent}{script.inner(call)}",  # type: ignore[misc]
        )
        porting.differs(
            call,
            "the scheduler",
            "Accelerate lets a prepared scheduler step once for each process, and so does the port, for the same "
            "learning rates on as many ranks",
            "write the batch size of all ranks and let it step once, for the same training on any number of ranks",
        )
