"""Scripts for Horovod with torch."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.rules.devices import port_devices
from lockstep.tools.port.rules.loaders import shard_sampled
from lockstep.tools.port.script import argument, constant, has_stars
from lockstep.tools.port.values import Kind

_HVD = "horovod.torch."
_RANKS = {
    "rank": "rank",
    "size": "world_size",
    "local_rank": "local_rank",
    "local_size": "local_world_size",
    "cross_rank": "node_rank",
}
_ADVICE = {
    "join": "lockstep.join(model), or nothing where lockstep.shard divides the data",
    "allgather": "world.gather(x) returns a list, one entry for each rank",
    "broadcast": "world.broadcast(x)",
    "broadcast_object": "world.broadcast(x), which takes tensors and what JSON can hold",
    "Adasum": "there is no Adasum; average",
    "elastic": "lockstep run --rdzv, and lockstep.Checkpointer (docs/guides/horovod.md)",
    "SyncBatchNorm": "lockstep.convert_sync_batchnorm(model)",
    "run": "start the script with lockstep run -n N",
    "Compression": "lockstep.register_comm_hook(model, None, lockstep.fp16_compress_hook)",
}


class HorovodScript:
    """Ports a script that imports ``horovod.torch``."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script is one of these."""
        return any(porting.script.full_name(each.func).startswith("horovod.") for each in porting.script.all(cst.Call))

    def port(self, porting: Porting) -> None:
        """Record the edits."""
        script = porting.script
        opens = [each for each in script.all(cst.Call) if script.full_name(each.func) == f"{_HVD}init"]
        if len(opens) != 1 or porting.expression_statement(opens[0]) is None:
            porting.refused(
                opens[1] if len(opens) > 1 else None,
                "hvd.init()",
                "it is called once, on a line of its own",
                "call it so",
            )
            return
        porting.set_init([opens[0]])
        text = porting.init_call(opens[0])
        script.replace(opens[0], text)
        porting.changed(opens[0], text, "opens the process group and takes the rank's device; needs no address")
        _port_optimizers(porting)
        shard_sampled(porting)
        port_devices(porting)
        for node in list(script.all(cst.Attribute)):
            _port_name(porting, node)


def _port_name(porting: Porting, node: cst.Attribute) -> None:
    """Port one name of Horovod, or refuse the script."""
    script = porting.script
    full = script.full_name(node)
    outer = script.parent(node)
    longer = isinstance(outer, cst.Attribute) and script.full_name(outer).startswith("horovod.")
    if not full.startswith("horovod.") or longer:
        return
    if script.around(node, cst.Import, cst.ImportFrom) is not None or full in ("horovod.torch", f"{_HVD}init"):
        return
    name = full.removeprefix(_HVD)
    if isinstance(outer, cst.Call) and outer.func is node:
        if name in _RANKS and not outer.args:
            text = porting.size_of(outer) if name == "size" else f"{porting.world(outer)}.{_RANKS[name]}"
            script.replace(outer, text)
            porting.changed(outer, text, f"the same as {porting.short(outer)}")
            return
        rule = _CALLS.get(name)
        if rule is not None and rule(porting, outer):
            return
    elif name in ("Average", "Sum", "Compression.none") and _in_ported_call(porting, node):
        return
    shown = name.removeprefix("horovod.").split(".")[0]
    porting.refused(
        node,
        porting.short(node),
        "there is no rule for it here",
        _ADVICE.get(shown, "write what it does in lockstep's words"),
    )


def _in_ported_call(porting: Porting, node: cst.CSTNode) -> bool:
    """Return whether a constant is an argument of a call that has a rule, which reads it."""
    given = porting.script.parent(node)
    call = porting.script.parent(given)
    full = porting.script.full_name(call.func) if isinstance(call, cst.Call) else ""
    return isinstance(given, cst.Arg) and full.removeprefix(_HVD) in ("allreduce", "DistributedOptimizer")


def _allreduce(porting: Porting, call: cst.Call) -> bool:
    script = porting.script
    value, op, average = argument(call, "tensor", 0), argument(call, "op"), argument(call, "average", 1)
    known = {"tensor", "op", "average", "name"}
    if value is None or any(each.keyword is not None and each.keyword.value not in known for each in call.args):
        return False
    adds = op is not None and script.full_name(op.value) == f"{_HVD}Sum"
    if op is not None and not adds and script.full_name(op.value) != f"{_HVD}Average":
        return False
    if average is not None:
        if constant(average.value) not in ("True", "False"):
            return False
        adds = constant(average.value) == "False"
    more = "" if adds else ', "mean"'
    script.replace(call, lambda: f"{porting.world(call)}.all_reduce({script.render(value.value)}{more})")
    porting.changed(call, f"world.all_reduce(...{more})", "the same; it averages over ranks only where it is told to")
    return True


def _broadcast_parameters(porting: Porting, call: cst.Call) -> bool:
    """Make a replica where rank 0's parameters are sent: the two do the same, and the replica averages gradients."""
    script = porting.script
    given = call.args[0].value if call.args else None
    if not isinstance(given, cst.Call) or not isinstance(given.func, cst.Attribute) or not _from_main(porting, call):
        return False
    if given.func.attr.value not in ("state_dict", "named_parameters"):
        return False
    model = given.func.value
    if porting.values.alone(model, Kind.OPTIMIZER):
        return False
    script.replace(call, lambda: f"lockstep.replicate({script.render(model)})")
    porting.changed(
        call, "lockstep.replicate", "sends rank 0's parameters and buffers, and averages gradients from then on"
    )
    return True


def _broadcast_optimizer(porting: Porting, call: cst.Call) -> bool:
    """Remove the broadcast of an optimizer's state that is empty, as it is where nothing was loaded."""
    script = porting.script
    statement = porting.expression_statement(call)
    loads = [
        each
        for each in script.all(cst.Call)
        if isinstance(each.func, cst.Attribute) and each.func.attr.value == "load_state_dict"
    ]
    if statement is None or loads or not _from_main(porting, call):
        return False
    script.remove(statement)
    porting.differs(
        call,
        "broadcast_optimizer_state",
        "there is no state yet. Horovod fills it by a step with zero gradients, which lockstep does not take: an "
        "optimizer that counts its steps or decays weights (Adam, AdamW) differs from the first step on",
    )
    return True


def _from_main(porting: Porting, call: cst.Call) -> bool:
    root = argument(call, "root_rank", 1)
    return root is not None and porting.script.source(root.value) == "0"


def _port_optimizers(porting: Porting) -> None:
    """Leave ``DistributedOptimizer`` out, where the model is made a replica elsewhere."""
    script = porting.script
    replicated = any(
        script.full_name(each.func) == f"{_HVD}broadcast_parameters"
        and isinstance(each.args[0].value if each.args else None, cst.Call)
        for each in script.all(cst.Call)
    )
    for call in script.all(cst.Call):
        if script.full_name(call.func) != f"{_HVD}DistributedOptimizer":
            continue
        why = "" if replicated else "no broadcast_parameters(model.state_dict()) shows which model it is of"
        why = why or _why_not(porting, call)
        if why:
            porting.refused(call, "DistributedOptimizer", why, "average by lockstep.replicate (docs/guides/horovod.md)")
            continue
        given = argument(call, "optimizer", 0)
        assert given is not None
        statement, assigned = script.statement(call), script.parent(call)
        value = given.value
        if isinstance(assigned, cst.Assign) and script.source(assigned.targets[0].target) == script.source(value):
            script.remove(statement)
        else:
            script.replace(call, lambda value=value: script.render(value))  # type: ignore[misc]
        porting.changed(call, "DistributedOptimizer", "the replica averages gradients; the optimizer is torch's own")
        _port_synchronize(porting)


def _done_already(_porting: Porting, _call: cst.Call) -> bool:
    """Say that a call has been ported, or refused, with the others of its kind."""
    return True


def _why_not(porting: Porting, call: cst.Call) -> str:
    script = porting.script
    if argument(call, "optimizer", 0) is None or has_stars(call):
        return "its arguments are not written out"
    for each in call.args[1:]:
        name, text = each.keyword.value if each.keyword is not None else "", script.full_name(each.value)
        if name == "named_parameters":
            continue
        if name == "compression" and text == f"{_HVD}Compression.none":
            continue
        if name == "op" and text == f"{_HVD}Average":
            continue
        if name == "backward_passes_per_step" and constant(each.value) == "1":
            continue
        if name == "gradient_predivide_factor" and constant(each.value) in ("1.0", "1"):
            continue
        return f"there is no rule for `{porting.short(each)}`"
    return ""


def _port_synchronize(porting: Porting) -> None:
    """Remove ``optimizer.synchronize()`` and take the bodies of ``optimizer.skip_synchronize()`` out."""
    script = porting.script
    for call in script.all(cst.Call):
        name = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        owner = call.func.value if isinstance(call.func, cst.Attribute) else None
        if owner is None or not porting.values.may(owner, Kind.OPTIMIZER):
            continue
        if name == "synchronize":
            statement = porting.expression_statement(call)
            if statement is not None:
                script.remove(statement)
                porting.changed(call, "synchronize", "gradients are averaged when backward() has ended")
        elif name == "skip_synchronize":
            block = script.around(call, cst.With)
            if isinstance(block, cst.With) and len(block.items) == 1:
                script.unwrap(block)
                porting.changed(call, "skip_synchronize", "there is nothing to skip")


_CALLS: dict[str, Callable[[Porting, cst.Call], bool]] = {
    "allreduce": _allreduce,
    "broadcast_parameters": _broadcast_parameters,
    "broadcast_optimizer_state": _broadcast_optimizer,
    "DistributedOptimizer": _done_already,
}
