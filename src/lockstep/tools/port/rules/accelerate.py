"""Scripts for Accelerate."""

from __future__ import annotations

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.rules import prepared
from lockstep.tools.port.rules.prepared import ForeignObject, as_method, only_call, port_object, put_world, removed
from lockstep.tools.port.script import argument, constant, has_stars
from lockstep.tools.port.values import Kind

_CLASSES = frozenset({"accelerate.Accelerator", "accelerate.accelerator.Accelerator"})
_CHECKPOINTER = "save and resume by lockstep.Checkpointer (docs/guides/accelerate.md)"
_LOG = "log by lockstep.Log, or by the tracker's own library on rank 0"
_BY_HAND = "accumulate by lockstep.no_sync (docs/guides/accelerate.md), then port again"
#: Argument of Accelerator -> constants with which it may be left out.
_CONSTANTS = {
    "device_placement": ("True",),
    "gradient_accumulation_steps": ("1",),
    "even_batches": ("True", "False"),
    "step_scheduler_with_optimizer": ("True",),
    "split_batches": ("True", "False"),
}
#: Kinds of hardware and engines that lockstep never is.
_NEVER = {"XLA", "TPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "MULTI_NPU", "MULTI_XPU", "MULTI_MLU"}


class AccelerateScript:
    """Ports a script that makes an ``Accelerator``."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script is one of these."""
        return any(porting.script.full_name(each.func) in _CLASSES for each in porting.script.all(cst.Call))

    def port(self, porting: Porting) -> None:
        """Record the edits."""
        script = porting.script
        made = only_call(porting, _CLASSES, "Accelerator()")
        given = None if made is None else _options(porting, made)
        if made is None or given is None:
            return
        put_world(porting, made, porting.init_call(made, *given), "Accelerator")
        _compare(porting)
        port_object(porting, _ACCELERATOR)
        if any(script.full_name(each.func) == "accelerate.utils.set_seed" for each in script.all(cst.Call)):
            porting.differs(None, "set_seed", "it stays, and with it the import from accelerate: it seeds as before")


def _options(porting: Porting, call: cst.Call) -> list[str] | None:
    """Return the arguments of ``lockstep.init``; None if the Accelerator does what lockstep does not."""
    if has_stars(call):
        porting.refused(call, porting.short(call), "its arguments are not written out", "write them out")
        return None
    given: list[str] = []
    for each in call.args:
        name = each.keyword.value if each.keyword is not None else "device_placement"
        value, text = constant(each.value), porting.script.source(each.value)
        if name == "cpu":
            if value != "False":
                given.append('"gloo"' if value == "True" else f'"gloo" if {text} else None')
        elif name == "mixed_precision":
            if value not in ("no", "None"):
                _refuse_precision(porting, call, each)
        elif name not in _CONSTANTS or value not in _CONSTANTS[name]:
            advice = (
                _BY_HAND if "accumulation" in name else _LOG if name in ("log_with", "project_dir") else "leave it out"
            )
            porting.refused(each, porting.short(each), "there is no rule for this argument", advice)
            return None
    return given


def _refuse_precision(porting: Porting, call: cst.Call, given: cst.Arg) -> None:
    """Let the port refuse to train in another precision, since it leaves the precision as it is."""
    script, value = porting.script, given.value
    statement = script.statement(call)
    deeper = script.indent(statement) + script.module.default_indent
    if constant(value) is not None:
        porting.refused(
            given, porting.short(given), "the port would train in another precision", "train in torch.autocast"
        )
        return
    script.insert_before(
        statement,
        lambda: (
            f'if {script.source(value)} not in (None, "no"):\n'
            f'{deeper}raise ValueError("ported without mixed precision: use torch.autocast in the loop")'
        ),
    )
    porting.left(
        given,
        porting.short(given),
        "the port trains in the model's own precision, and refuses to run where another one is asked for",
        "put the forward into torch.autocast, with torch.amp.GradScaler for float16, and remove the check",
    )


def _splits(porting: Porting) -> bool:
    """Return whether a loader's batch size is that of each rank."""
    for call in porting.script.all(cst.Call):
        if porting.script.full_name(call.func) in _CLASSES:
            given = argument(call, "split_batches")
            return given is None or constant(given.value) != "True"
    return True


def _compare(porting: Porting) -> None:
    """Decide comparisons with kinds of hardware and precisions, of which the port has one."""
    script = porting.script
    for node in script.all(cst.Comparison):
        left = node.left
        if not isinstance(left, cst.Attribute) or not porting.values.may(left.value, Kind.ACCELERATOR):
            continue
        if len(node.comparisons) != 1:
            continue
        other, operator = node.comparisons[0].comparator, node.comparisons[0].operator
        decided: bool | None = None
        if left.attr.value == "mixed_precision" and constant(other) is not None:
            decided = constant(other) == "no"
        elif left.attr.value == "distributed_type" and script.full_name(other).rpartition(".")[2] in _NEVER:
            decided = False
        if decided is not None and isinstance(operator, (cst.Equal, cst.NotEqual)):
            result = decided if isinstance(operator, cst.Equal) else not decided
            script.replace(node, str(result))
            porting.changed(
                node, f"{result} for {porting.short(node)}", "the port has full precision and is none of these"
            )


def _clip(name: str) -> prepared.MethodRule:
    return as_method(f"torch.nn.utils.{name}({{args}})")


def _reduce(porting: Porting, call: cst.Call, owner: cst.BaseExpression) -> bool:
    value, kind = argument(call, "tensor", 0), argument(call, "reduction", 1)
    op = "sum" if kind is None else constant(kind.value)
    if (
        value is None
        or op not in ("sum", "mean")
        or len(call.args) > 2
        or isinstance(value.value, (cst.Tuple, cst.Dict))
    ):
        return False
    script = porting.script
    more = ', "mean"' if op == "mean" else ""
    script.replace(call, lambda: f"{script.render(owner)}.all_reduce({script.render(value.value)}{more})")
    porting.changed(call, f"world.all_reduce(...{more})", "the same")
    return True


_ACCELERATOR = ForeignObject(
    kind=Kind.ACCELERATOR,
    attributes={
        "device": "{}.device",
        "num_processes": "{}.world_size",
        "process_index": "{}.rank",
        "local_process_index": "{}.local_rank",
        "is_main_process": "{}.is_main",
        "is_local_main_process": "({}.local_rank == 0)",
        "mixed_precision": '"no"',
    },
    methods={
        "backward": prepared.backward,
        "print": as_method("{}.print({args})"),
        "wait_for_everyone": as_method("{}.barrier()"),
        "clip_grad_norm_": _clip("clip_grad_norm_"),
        "clip_grad_value_": _clip("clip_grad_value_"),
        "unwrap_model": prepared.only_argument,
        "gather_for_metrics": prepared.gather_rows,
        "gather": prepared.gather_rows,
        "reduce": _reduce,
        "main_process_first": prepared.main_first(False),
        "local_main_process_first": prepared.main_first(True),
        "save": prepared.save_on_main,
        "end_training": removed("there is nothing to end: lockstep closes the process group itself"),
        "no_sync": as_method("lockstep.no_sync({args})"),
        **dict.fromkeys(
            ("prepare", "prepare_model", "prepare_data_loader", "prepare_optimizer"),
            prepared.ready(per_rank=_splits, steps_each=True),
        ),
    },
    advice={
        **dict.fromkeys(
            ("save_state", "load_state", "register_for_checkpointing", "skip_first_batches"), _CHECKPOINTER
        ),
        **dict.fromkeys(("init_trackers", "log", "get_tracker"), _LOG),
        **dict.fromkeys(("accumulate", "sync_gradients", "gradient_accumulation_steps"), _BY_HAND),
        "split_between_processes": "lockstep.split(items) returns this rank's part",
    },
    classes=_CLASSES,
)
