"""DistributedDataParallel: ``lockstep.replicate``, or lockstep's own wrapper where the script looks into it."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.script import argument, has_stars
from lockstep.tools.port.values import DATA_PARALLEL, Kind

#: Arguments of torch's class that replicate takes as well.
_KEPT = {
    "find_unused_parameters",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_cap_mb",
    "init_sync",
    "process_group",
}
#: Arguments that a replica does not need: the device is world.device, the others only tune torch's own class.
_NEEDLESS = {"device_ids", "output_device", "static_graph", "delay_all_reduce_named_params", "batched_grad_copy"}
#: The attributes that a replica has like the wrapper, and that do not show names of parameters.
_ALIKE = {"module", "train", "eval", "parameters", "zero_grad", "no_sync", "join", "register_comm_hook", "training"}
#: Methods of the wrapper that are functions for a replica.
_FUNCTIONS = {"no_sync", "join", "register_comm_hook"}


def port_replicas(porting: Porting) -> None:
    """Port every DistributedDataParallel of the script."""
    script = porting.script
    calls = [
        each
        for each in script.all(cst.Call)
        if script.full_name(each.func) not in DATA_PARALLEL and porting.values.sites(each, Kind.REPLICA) == [each]
    ]
    if not calls:
        return
    why = _why_wrapped(porting, calls)
    for call in calls:
        if why:
            script.replace(call.func, "lockstep.DistributedDataParallel")
            _place_inputs(porting, call)
            porting.changed(
                call, "lockstep.DistributedDataParallel", f"the same wrapper with the same arguments, since {why}"
            )
        else:
            _replicate(porting, call)
    if not why:
        _unwrap_uses(porting)
    _port_names(porting, bool(why))


def _why_wrapped(porting: Porting, calls: list[cst.Call]) -> str:
    """Return why the script needs a wrapper; empty where a replica in place is the same."""
    script, values = porting.script, porting.values
    for call in calls:
        for given in call.args[1:]:
            if given.keyword is None or given.keyword.value not in _KEPT | _NEEDLESS:
                return f"line {script.line(call)} gives it arguments that are for a wrapper"
        if has_stars(call):
            return f"the arguments in line {script.line(call)} are not seen"
    moved = _takes_made_inputs(porting)
    if moved is not None and any(argument(each, "device_ids") is not None for each in calls):
        return f"line {script.line(moved)} leaves it to the wrapper to move the inputs to the device"
    for node in script.all(cst.Attribute):
        if values.may(node.value, Kind.REPLICA) and node.attr.value not in _ALIKE:
            return f"line {script.line(node)} uses `.{node.attr.value}` of it, which shows the wrapper's names"
    for call in script.all(cst.Call):
        name = script.full_name(call.func)
        if name == "isinstance" and any(_names_wrapper(porting, each.value) for each in call.args):
            return f"line {script.line(call)} asks whether it is one"
        known = name.startswith(("torch.", "builtins.")) or name in ("print", "hasattr", "id", "len", "getattr")
        if not known and not values.functions(call) and call not in calls and not _is_method_of_replica(porting, call):
            for given in call.args:
                if values.may(given.value, Kind.REPLICA):
                    return f"line {script.line(call)} hands it to `{porting.short(call.func)}`, which is not seen"
    return ""


def _place_inputs(porting: Porting, call: cst.Call) -> None:
    """Give the wrapper its device where the rank has one: on a CPU it takes none."""
    if porting.init is None or porting.init.conditional:
        return
    for given in call.args:
        if given.keyword is not None and given.keyword.value in ("device_ids", "output_device"):
            world, many = porting.world(call), given.keyword.value == "device_ids"
            place = f"[{world}.device]" if many else f"{world}.device"
            porting.script.replace(given.value, f'None if {world}.device.type == "cpu" else {place}')


def _takes_made_inputs(porting: Porting) -> cst.Call | None:
    """Return a call of a replica whose inputs are made where it is called; torch's class moves them to the device."""
    script, values = porting.script, porting.values
    for call in script.all(cst.Call):
        if not values.may(call.func, Kind.REPLICA) or values.sites(call, Kind.REPLICA) == [call]:
            continue
        for given in call.args:
            made = [
                each
                for each in values.sites(given.value, Kind.CALL)
                if script.full_name(each.func).startswith("torch.")
            ]
            if any(argument(each, "device") is None for each in made):
                return call
    return None


def _is_method_of_replica(porting: Porting, call: cst.Call) -> bool:
    return porting.values.may(call.func, Kind.REPLICA)


def _names_wrapper(porting: Porting, node: cst.BaseExpression) -> bool:
    return porting.script.full_name(node).endswith("DistributedDataParallel")


def _replicate(porting: Porting, call: cst.Call) -> None:
    script = porting.script
    model = argument(call, "module", 0)
    if model is None:
        return
    for given in call.args:
        if given.keyword is not None and given.keyword.value in _NEEDLESS:
            script.remove_argument(call, given)
        elif given.keyword is not None and given.keyword.value == "module":
            script.replace(given, lambda: script.render(model.value))
    script.replace(call.func, "lockstep.replicate")
    porting.changed(
        call, "lockstep.replicate", "the model itself averages its gradients: no wrapper, no `.module`, no device_ids"
    )


def _unwrap_uses(porting: Porting) -> None:
    """Leave ``.module`` out, and turn methods of the wrapper into lockstep's functions."""
    script, values = porting.script, porting.values
    for node in script.all(cst.Attribute):
        if not values.may(node.value, Kind.REPLICA):
            continue
        if node.attr.value == "module":
            script.replace(node, lambda node=node: script.render(node.value))  # type: ignore[misc]
            porting.changed(node, f"`.module` of {porting.short(node.value)}", "a replica is its own module")
    for call in script.all(cst.Call):
        if not isinstance(call.func, cst.Attribute) or call.func.attr.value not in _FUNCTIONS:
            continue
        owner = call.func.value
        if values.may(owner, Kind.REPLICA):
            name = f"lockstep.{call.func.attr.value}"
            script.replace(call, lambda call=call, name=name, owner=owner: _as_function(porting, call, name, owner))  # type: ignore[misc]
            porting.changed(call, name, "a function for a replica in place of the wrapper's method")


def _as_function(porting: Porting, call: cst.Call, name: str, owner: cst.BaseExpression) -> str:
    parts = [porting.script.render(owner), *(porting.script.render(each) for each in call.args)]
    return f"{name}({', '.join(parts)})"


def _port_names(porting: Porting, wrapped: bool) -> None:
    """Port what else goes by torch's names: SyncBatchNorm, and the class itself where the script asks for it."""
    script = porting.script
    for call in script.all(cst.Call):
        if script.full_name(call.func) == "torch.nn.SyncBatchNorm.convert_sync_batchnorm":
            script.replace(call.func, "lockstep.convert_sync_batchnorm")
            porting.changed(call, "lockstep.convert_sync_batchnorm", "the same, on CPUs as well")
    if wrapped:
        for node in [*script.all(cst.Name), *script.all(cst.Attribute)]:
            in_import = script.around(node, cst.Import, cst.ImportFrom) is not None
            if not in_import and _names_wrapper(porting, node) and not script.is_replaced(node):
                script.replace(node, "lockstep.DistributedDataParallel")
