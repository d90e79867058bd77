"""Devices of a rank: ``.cuda()``, ``torch.device("cuda", local_rank)`` and ``.to(rank)`` become ``world.device``."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.script import argument, constant, is_cuda
from lockstep.tools.port.values import Kind

#: Numbers that name a rank's device.
PLACES = (Kind.LOCAL_RANK, Kind.RANK, Kind.NUMBER)

#: Functions whose first argument is a device's type, and no device.
_TAKING_TYPES = {
    "torch.autocast",
    "torch.amp.autocast",
    "torch.amp.autocast_mode.autocast",
    "torch.amp.GradScaler",
    "torch.GradScaler",
    "torch.is_autocast_enabled",
    "torch.get_autocast_dtype",
}


def port_devices(porting: Porting) -> None:
    """Give every rank its own device, which lockstep has chosen, where the script names an accelerator."""
    script, values = porting.script, porting.values
    if porting.init is None or porting.init.conditional:
        return
    for call in script.all(cst.Call):
        if script.full_name(call.func) in ("torch.cuda.set_device", "torch.accelerator.set_device_index"):
            statement = porting.expression_statement(call)
            if statement is not None:
                script.remove(statement)
                porting.changed(call, "set_device", "lockstep.init() has made the rank's device the current one")
    for call in script.all(cst.Call):
        if not porting.runs_after_init(call) or script.is_replaced(call):
            continue
        name = script.full_name(call.func)
        if name in ("torch.device", "torch.accelerator.current_accelerator") and values.may(call, Kind.DEVICE):
            _replace(porting, call)
        elif isinstance(call.func, cst.Attribute) and is_cuda(call):
            _port_cuda(porting, call, call.func)
        elif isinstance(call.func, cst.Attribute) and call.func.attr.value == "to":
            given = argument(call, "device", 0)
            if given is not None and values.alone(given.value, *PLACES):
                _replace(porting, given.value)
    _port_texts(porting)


def _port_texts(porting: Porting) -> None:
    """Port devices that are written as text and kept in a variable: ``device = f"cuda:{local_rank}"``."""
    script, values = porting.script, porting.values
    texts: set[int] = set()
    for assigned in script.all(cst.Assign):
        value = assigned.value
        chosen = value.body if isinstance(value, cst.IfExp) else value
        is_text = isinstance(chosen, (cst.SimpleString, cst.FormattedString))
        if is_text and values.may(chosen, Kind.DEVICE) and porting.runs_after_init(assigned):
            _replace(porting, value)
            texts |= {id(each) for each in script.within(value)}
    for node in script.nodes:
        if isinstance(node, (cst.Name, cst.Attribute)) and any(id(each.site) in texts for each in values.of(node)):
            _use_as_text(porting, node, texts)


def _use_as_text(porting: Porting, node: cst.Name | cst.Attribute, texts: set[int]) -> None:
    """Take the device's type where a variable that held text is used as text: a device is equal to no text."""
    script = porting.script
    outer = script.parent(node)
    compared = outer if isinstance(outer, cst.Comparison) else script.parent(outer)
    if isinstance(outer, (cst.Comparison, cst.ComparisonTarget)) and isinstance(compared, cst.Comparison):
        others = [compared.left, *(each.comparator for each in compared.comparisons)]
        if any(constant(each) == "None" for each in others):
            return
        names_one = ":" in script.source(compared)
    else:
        is_method = isinstance(outer, cst.Attribute) and outer.value is node
        if not is_method and not (isinstance(outer, cst.Arg) and _takes_type(porting, outer)):
            return
        names_one = False
    if names_one or not all(id(each.site) in texts for each in porting.values.of(node)):
        porting.refused(
            node,
            porting.short(script.statement(node) if names_one else node),
            "the device was text that is used as such here, and would be a torch.device, which is equal to no text",
            "make it a torch.device and ask for its .type, then port again",
        )
        return
    script.replace(node, lambda: f"{script.source(node)}.type")
    porting.changed(node, f"{porting.short(node)}.type", "the device is no text any more, and its type is")


def _takes_type(porting: Porting, given: cst.Arg) -> bool:
    """Return whether an argument is a device's type, as text."""
    if given.keyword is not None and given.keyword.value == "device_type":
        return True
    call = porting.script.parent(given)
    if not isinstance(call, cst.Call) or porting.script.full_name(call.func) not in _TAKING_TYPES:
        return False
    return given is call.args[0] and (given.keyword is None or given.keyword.value == "device")


def _replace(porting: Porting, node: cst.BaseExpression) -> None:
    script = porting.script
    outer = script.parent(node)
    # torch.device("cuda" if torch.cuda.is_available() else "cpu"): world.device is either
    if isinstance(outer, cst.IfExp) and outer.body is node and _is_cpu(porting, outer.orelse):
        node = outer
    if not script.is_replaced(node):
        script.replace(node, lambda: f"{porting.world(node)}.device")
        porting.changed(node, f"world.device for {porting.short(node)}", "the device that lockstep gave this rank")


def _is_cpu(porting: Porting, node: cst.BaseExpression) -> bool:
    return constant(node) == "cpu" or porting.values.alone(node, Kind.CPU)


def _port_cuda(porting: Porting, call: cst.Call, function: cst.Attribute) -> None:
    script, values = porting.script, porting.values
    if script.full_name(call.func):
        return
    given = argument(call, "device", 0)
    if given is not None and not values.alone(given.value, *PLACES, Kind.DEVICE, Kind.NONE):
        return
    others = [each for each in call.args if each is not given]

    def make() -> str:
        more = "".join(f", {script.render(each)}" for each in others)
        return f"{script.render(function.value)}.to({porting.world(call)}.device{more})"

    script.replace(call, make)
    porting.changed(
        call, "`.to(world.device)`", "the device that lockstep gave this rank, where there are no GPUs as well"
    )
