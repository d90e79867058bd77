"""Devices of a rank: ``.cuda()``, ``torch.device("cuda", local_rank)`` and ``.to(rank)`` become ``world.device``."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.script import argument, constant, is_cuda
from lockstep.tools.port.values import Kind

#: Numbers that name a rank's device.
PLACES = (Kind.LOCAL_RANK, Kind.RANK, Kind.NUMBER)


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
    for assigned in script.all(cst.Assign):
        value = assigned.value
        chosen = value.body if isinstance(value, cst.IfExp) else value
        is_text = isinstance(chosen, (cst.SimpleString, cst.FormattedString))
        if is_text and values.may(chosen, Kind.DEVICE) and porting.runs_after_init(assigned):
            _replace(porting, value)


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
