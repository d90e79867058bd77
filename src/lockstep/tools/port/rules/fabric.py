"""Scripts for Lightning Fabric."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.rules import prepared
from lockstep.tools.port.rules.prepared import ForeignObject, as_method, only_call, port_object, put_world, removed
from lockstep.tools.port.script import argument, constant, has_stars
from lockstep.tools.port.values import FABRICS, Kind

_CHECKPOINTER = "save and resume by lockstep.Checkpointer (docs/guides/fabric.md)"
_LOG = "log by lockstep.Log (docs/guides/fabric.md)"
#: Argument of Fabric -> constants with which it may be left out.
_CONSTANTS = {
    "strategy": ("auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_find_unused_parameters_false"),
    "accelerator": ("auto", "gpu", "cuda"),
    "precision": ("32-true", "32", "None"),
}
#: Arguments that say how many processes there are: ``-n`` does.
_PLACES = {"devices", "num_nodes"}


class FabricScript:
    """Ports a script that makes a ``Fabric``."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script is one of these."""
        return any(porting.script.full_name(each.func) in FABRICS for each in porting.script.all(cst.Call))

    def port(self, porting: Porting) -> None:
        """Record the edits."""
        made = only_call(porting, FABRICS, "Fabric()")
        given = None if made is None else _options(porting, made)
        if made is None or given is None:
            return
        put_world(porting, made, porting.init_call(made, *given, seed=_seeds(porting, made)), "Fabric")
        port_object(porting, _FABRIC)


def _options(porting: Porting, call: cst.Call) -> list[str] | None:
    """Return the arguments of ``lockstep.init``; None if the Fabric does what lockstep does not."""
    if has_stars(call):
        porting.refused(call, porting.short(call), "its arguments are not written out", "write them out")
        return None
    given: list[str] = []
    for each in call.args:
        name = each.keyword.value if each.keyword is not None else "accelerator"
        value = constant(each.value)
        if name in _PLACES:
            porting.changed(each, porting.short(each), "lockstep run -n says how many ranks there are")
        elif name == "accelerator" and value == "cpu":
            given.append('"gloo"')
        elif name not in _CONSTANTS or value not in _CONSTANTS[name]:
            porting.refused(
                each,
                porting.short(each),
                "there is no rule for this argument",
                _LOG if name == "loggers" else "leave it out",
            )
            return None
    if not call.args:
        porting.differs(call, "Fabric()", "options on the command line of `fabric run` are no longer read")
    return given


def _all_reduce(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    value, kind = argument(call, "data", 0), argument(call, "reduce_op", 2)
    op = "mean" if kind is None else constant(kind.value)
    if value is None or op not in ("sum", "mean") or isinstance(value.value, (cst.Tuple, cst.Dict, cst.List)):
        return False
    script = porting.script
    more = ', "mean"' if op == "mean" else ""
    script.replace(call, lambda: f"{script.render(owner)}.all_reduce({script.render(value.value)}{more})")
    porting.changed(call, f"world.all_reduce(...{more})", "the same, in a new tensor")
    return porting.expression_statement(call) is None


def _all_gather(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    """Port ``all_gather(x).sum()``, which adds up over all ranks."""
    script, outer = porting.script, porting.script.parent(call)
    around = script.parent(outer)
    adds = isinstance(outer, cst.Attribute) and outer.attr.value == "sum" and isinstance(around, cst.Call)
    if not adds or not isinstance(around, cst.Call) or around.args or len(call.args) != 1:
        return False
    script.replace(around, lambda: f"{script.render(owner)}.all_reduce({script.render(call.args[0].value)})")
    porting.changed(
        around, "world.all_reduce", "the sum over all ranks; of a number, not of a tensor with several elements"
    )
    return True


def _clip(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
    model, norm, value = argument(call, "module", 0), argument(call, "max_norm"), argument(call, "clip_val")
    given = norm or value
    if model is None or given is None or len(call.args) > 3 or argument(call, "norm_type") is not None:
        return False
    script, name = porting.script, "clip_grad_norm_" if norm is not None else "clip_grad_value_"
    script.replace(
        call, lambda: f"torch.nn.utils.{name}({script.render(model.value)}.parameters(), {script.render(given.value)})"
    )
    porting.changed(call, f"torch.nn.utils.{name}", "gradients are averaged already when they are clipped")
    return True


def _save(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    path, state = argument(call, "path", 0), argument(call, "state", 1)
    if path is None or state is None or len(call.args) != 2:
        return False
    whole = state.value
    is_state = (
        isinstance(whole, cst.Call) and isinstance(whole.func, cst.Attribute) and whole.func.attr.value == "state_dict"
    )
    return is_state and prepared.save_in_guard(porting, call, owner, whole, path.value)


def _seeds(porting: Porting, made: cst.Call) -> str | None:
    """Remove ``fabric.seed_everything(…)`` where only other calls of the Fabric stand before it; return its seed."""
    script = porting.script
    block = script.parent(script.statement(made))
    if not isinstance(block, (cst.IndentedBlock, cst.Module)):
        return None
    after = block.body[block.body.index(script.statement(made)) + 1 :]
    for statement in after:
        small = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else None
        call = small.value if isinstance(small, cst.Expr) else None
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return None
        if not porting.values.may(call.func.value, Kind.FABRIC):
            return None
        if call.func.attr.value == "seed_everything" and len(call.args) == 1:
            script.remove(script.statement(call))
            text = script.source(call.args[0].value)
            porting.changed(call, f"seed={text}", "lockstep.init() seeds the generators, the same on every rank")
            return text
    return None


def _is_removed(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
    return porting.script.is_replaced(call)


def _launch(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    """Remove ``launch()``; one that is given a function becomes a call of it, with the Fabric first."""
    why = "`lockstep run -n N` starts the ranks"
    if not call.args:
        return removed(why)(porting, call, owner)
    script, values = porting.script, porting.values
    function, given = call.args[0], call.args[1:]
    if function.star or function.keyword is not None or not isinstance(function.value, (cst.Name, cst.Attribute)):
        return False
    # A function of the script is handed the Fabric, which has no name there that the analysis could follow otherwise.
    if not values.alone(function.value, Kind.FUNCTION):
        return False

    def make() -> str:
        return ", ".join([script.render(owner), *(script.render(each) for each in given)])

    script.replace(call, lambda: f"{script.render(function.value)}({make()})")
    porting.changed(call, porting.short(function.value), why)
    return True


def _no_sync(porting: Porting, call: cst.Call, _owner: cst.BaseExpression) -> bool:
    model, enabled = argument(call, "module", 0), argument(call, "enabled", 1)
    if model is None:
        return False
    script = porting.script

    def make() -> str:
        text = f"lockstep.no_sync({script.render(model.value)})"
        return text if enabled is None else f"{text} if {script.render(enabled.value)} else contextlib.nullcontext()"

    script.replace(call, make)
    porting.changed(call, "lockstep.no_sync", "the same")
    return True


def _per_rank(_porting: Porting) -> bool:
    return True


_READY = prepared.ready(per_rank=_per_rank, steps_each=False)
_FABRIC = ForeignObject(
    kind=Kind.FABRIC,
    attributes={
        "device": "{}.device",
        "world_size": "{}.world_size",
        "global_rank": "{}.rank",
        "local_rank": "{}.local_rank",
        "node_rank": "{}.node_rank",
        "is_global_zero": "{}.is_main",
    },
    methods={
        "launch": _launch,
        "seed_everything": _is_removed,
        "setup": _READY,
        "setup_module": _READY,
        "setup_optimizers": _READY,
        "setup_dataloaders": _READY,
        "backward": prepared.backward,
        "print": as_method("{}.print({args})"),
        "barrier": as_method("{}.barrier()"),
        "rank_zero_first": prepared.main_first(False),
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "clip_gradients": _clip,
        "no_backward_sync": _no_sync,
        "save": _save,
    },
    advice={
        **dict.fromkeys(("save", "load", "load_raw"), _CHECKPOINTER),
        **dict.fromkeys(("log", "log_dict", "logger", "loggers"), _LOG),
        "all_gather": "world.gather(x) returns a list, one entry for each rank",
        "autocast": "put the forward into torch.autocast",
    },
    classes=frozenset(FABRICS),
)
