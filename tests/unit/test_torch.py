"""torch's private names: which versions have them, and that each does what lockstep relies on.

``VERSIONS`` was checked with torch 2.9, 2.13 and 2.15. A name that a newer torch lacks fails here, by its name, before
it fails somewhere in the middle of a step.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import math
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate
from torch.utils.data._utils import collate

import lockstep
from lockstep import _torch
from lockstep.comm.group.fingerprint import REDUCE_OPS
from lockstep.data.dead_workers import death_among, naming_dead_workers, tells_of_a_death
from tests.harness import run_ranks

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

SOURCE = Path(lockstep.__file__).parent

#: Where each function of _torch.py finds what it needs, and in which versions of torch that is so.
VERSIONS = {
    "torch.autograd._profiler_enabled": "2.9 to 2.15",
    "torch.autograd._record_function_with_args_enter": "2.9 to 2.15",
    "torch.autograd._record_function_with_args_exit": "2.9 to 2.15",
    "torch.autograd.Variable._execution_engine.queue_callback": "2.9 to 2.15",
    "torch._C._will_engine_execute_node": "2.9 to 2.15",
    "torch._C._autograd._get_current_graph_task_keep_graph": "2.9 to 2.15",
    "torch.Tensor._post_accumulate_grad_hooks": "2.9 to 2.15",
    "torch._C._len_torch_dispatch_stack": "2.9 to 2.15",
    "torch._C._get_dispatch_mode": "2.9 to 2.15",
    "torch._C._TorchDispatchModeKey": "2.9 to 2.15",
    "torch._C._DisableTorchDispatch": "2.9 to 2.15",
    "torch._C._are_functorch_transforms_active": "2.9 to 2.15",
    "torch._C._storage_Use_Count": "2.9 to 2.15",
    "torch.Tensor._use_count": "2.9 to 2.15",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": "2.9 to 2.15",
    "torch._dynamo.compiled_autograd.in_compiled_autograd_region": "2.9 to 2.15",
    "torch.cuda._is_in_bad_fork": "2.9 to 2.15",
    "torch.utils.data._utils.collate.collate": "2.9 to 2.15",
    "torch.utils.data._utils.collate.collate_tensor_fn": "2.9 to 2.15",
    "torch.utils.data._utils.collate.default_collate_fn_map": "2.9 to 2.15",
    "torch.optim.Optimizer.profile_hook_step": "2.9 to 2.15",
    "torch._foreach_copy_": "2.9 to 2.15",
    "torch._foreach_add_": "2.9 to 2.15",
    "torch._foreach_mul_": "2.9 to 2.15",
    "torch._foreach_zero_": "2.9 to 2.15",
    "torch._foreach_norm": "2.9 to 2.15",
    "torch.UntypedStorage._cdata": "2.9 to 2.15",
    "torch.distributed.ProcessGroup._device_types": "2.9 to 2.15",
    "torch.distributed.ProcessGroup._get_backend": "2.9 to 2.15",
    "torch.distributed.distributed_c10d._get_default_store": "2.9 to 2.15",
    "torch.distributed.distributed_c10d.AllgatherOptions": "2.9 to 2.15",
    "torch.nn.modules.batchnorm._BatchNorm": "2.9 to 2.15",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "2.9 to 2.15",
    "torch._C._dynamo.eval_frame._FrameAction": "2.9 to 2.15",
    "torch._C._dynamo.eval_frame._FrameExecStrategy": "2.9 to 2.15",
    "torch._dynamo.callback.on_compile_start": "2.9 to 2.15",
    "torch._dynamo.callback.on_compile_end": "2.9 to 2.15",
    "torch.nn.Module._parameters": "2.9 to 2.15",
    "torch.nn.Module._buffers": "2.9 to 2.15",
    "torch.nn.Module._modules": "2.9 to 2.15",
    "torch.nn.Module._non_persistent_buffers_set": "2.9 to 2.15",
    "torch.nn.Module._forward_pre_hooks": "2.9 to 2.15",
    "torch.nn.Module._replicate_for_data_parallel": "2.9 to 2.15",
    "torch.nn.Module._is_replica": "2.9 to 2.15",
    "torch.nn.Module._call_impl": "2.9 to 2.15",
    "torch.nn.Module._compiled_call_impl": "2.9 to 2.15",
    "torch.Tensor._version": "2.9 to 2.15",
    "torch.Tensor._indices": "2.9 to 2.15",
    "torch.Tensor._values": "2.9 to 2.15",
    "torch.distributed.ProcessGroup._allgather_base": "2.9 to 2.15",
    "torch.distributed.ProcessGroup._reduce_scatter_base": "2.9 to 2.15",
    "torch.distributed.Work._source_rank": "2.9 to 2.15",
    "torch.utils._python_dispatch.TorchDispatchMode.is_infra_mode": "2.13",
    "torch.utils._python_dispatch.TorchDispatchMode.supports_higher_order_operators": "2.13",
    "torch.utils._python_dispatch._get_current_dispatch_mode": "2.13",
    "torch.utils.flop_counter.flop_registry": "2.13",
    "torch._dynamo.utils.counters": "2.13",
    "torch.backends.cuda.matmul.fp32_precision": "2.13",
    "torch.backends.cudnn.conv.fp32_precision": "2.13",
}

#: Names of objects, which no class has: an instance shows them.
_INSTANCES: dict[str, Any] = {
    "torch.nn.Module": nn.Linear(1, 1)._replicate_for_data_parallel(),
    "torch.UntypedStorage": torch.zeros(1).untyped_storage(),
}


@pytest.mark.parametrize("name", VERSIONS)
def test_torch_has_the_name(name: str) -> None:
    owner, _, last = name.rpartition(".")
    if name.startswith(("torch._dynamo", "torch.utils.flop_counter")):
        importlib.import_module(owner)
    found = _INSTANCES.get(owner)
    if found is None:
        found = operator.attrgetter(owner.removeprefix("torch."))(torch)
    assert hasattr(found, last), f"torch {torch.__version__} has no {name}, versions {VERSIONS[name]} have"


def test_the_tables_are_among_the_names_that_are_tested() -> None:
    listed = {
        f"{owner}.{name}"
        for table in (_torch.ATTRIBUTES, _torch.OVERRIDDEN)
        for owner in table
        for name in table[owner]
    }
    assert listed <= VERSIONS.keys()


def test_profiler_enabled() -> None:
    enabled = _torch.profiler_enabled()
    assert not enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert enabled()


def test_the_hash_of_a_reduce_op_is_its_number() -> None:
    options: Any = dist.AllreduceOptions()
    for number, name in enumerate(REDUCE_OPS):
        options.reduceOp = (
            dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)  # type: ignore[attr-defined]
        )
        assert hash(options.reduceOp) == int(options.reduceOp.op) == number, name


def test_is_inner_step() -> None:
    class Derived(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    torch.optim.SGD(nn.Linear(1, 1).parameters())  # from here on torch calls hooks in the parent's step, too
    optimizer, found = Derived(nn.Linear(1, 1).parameters()), []
    optimizer.register_step_pre_hook(lambda one, *_: found.append(_torch.is_inner_step(one)))
    optimizer.step()
    assert found == [False, True]
    assert (_torch.nesting[Derived], _torch.nesting[torch.optim.AdamW]) == (True, False)


def test_is_in_bad_fork() -> None:
    is_refused = _torch.is_in_bad_fork(torch.cuda)
    assert is_refused is not None
    assert not is_refused()
    assert _torch.is_in_bad_fork(torch.cpu) is None


def test_default_collate_by(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[Any] = [
        {"x": torch.ones(2), "n": torch.zeros(3).numpy(), "of": (1, "a", 2.5)},
        {"x": torch.zeros(2), "n": torch.ones(3).numpy(), "of": (2, "b", 3.5)},
    ]
    seen: list[int] = []

    def stack(tensors: Any) -> torch.Tensor:
        seen.append(len(tensors))
        return torch.stack(tuple(tensors))

    assert str(_torch.default_collate_by(stack, samples)) == str(default_collate(samples))
    assert seen == [2, 2]
    monkeypatch.setitem(collate.default_collate_fn_map, torch.Tensor, lambda *_, **__: "the program's")
    assert _torch.default_collate_by(stack, samples)["x"] == "the program's"


def test_recorded() -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, record_shapes=True) as profile:
        with _torch.recorded("ours", [torch.ones(3, 4), torch.ones(5)]):
            torch.ones(1)
        with pytest.raises(KeyError), _torch.recorded("ours, broken", []):
            raise KeyError
    shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("ours")}
    assert shapes == {"ours": [[3, 4], [5]], "ours, broken": []}


def test_queue_callback_and_will_execute() -> None:
    will_execute = _torch.will_execute()
    weight, other = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    loss = (weight * 2).sum()
    nodes = [torch.autograd.graph.get_gradient_edge(each).node for each in (weight, other)]
    seen: list[Any] = []

    def during(_: torch.Tensor) -> None:
        seen.append(("executes", *(will_execute(node) for node in nodes)))
        _torch.queue_callback()(lambda: seen.append(("ended", weight.grad is not None)))

    loss.register_hook(during)
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [("executes", True, False), ("ended", True)] * 2


def test_mode_that_sees_and_innermost_mode() -> None:
    seen = []

    def see(operation: Any, args: Any, kwargs: Any) -> Any:
        seen.append(str(operation))
        return operation(*args, **kwargs)

    assert _torch.innermost_mode() is None
    weight = torch.ones(2, 3, requires_grad=True)
    with _torch.mode_that_sees(see) as mode:
        assert _torch.innermost_mode() is mode
        (torch.ones(4, 2) @ weight).sum().backward()
    assert _torch.innermost_mode() is None
    assert seen.count("aten.mm.default") == 2, "forward, and backward on autograd's side"


def test_a_mode_that_sees_lets_the_compiler_compile_the_same() -> None:
    """And compiled graphs are counted."""
    program = """
import torch
from lockstep import _torch

counts = [_torch.graphs_compiled()]
function = torch.compile(lambda x: x.sin().cos(), backend="eager")
with _torch.mode_that_sees(lambda operation, args, kwargs: operation(*args, **kwargs)):
    function(torch.ones(3))
    counts.append(_torch.graphs_compiled())
function(torch.ones(3))
print(*counts, _torch.graphs_compiled())
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=600
    ).stdout
    assert shown.split() == ["0", "1", "1"]


def test_flop_formulas() -> None:
    formulas = _torch.flop_formulas()
    aten = torch.ops.aten
    assert formulas[aten.mm](torch.ones(2, 3), torch.ones(3, 4), out_val=torch.ones(2, 4)) == 2 * 2 * 3 * 4
    for name in ("", "_backward"):
        on_cpu, anywhere = (getattr(aten, f"_scaled_dot_product_flash_attention{at}{name}") for at in ("_for_cpu", ""))
        assert formulas[on_cpu] is formulas[anywhere]


@pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9 says it of the older name
def test_multiplies_in_tf32() -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.allow_tf32, conv.fp32_precision
    try:
        matmul.allow_tf32 = True  # the older name
        assert _torch.multiplies_in_tf32(convolution=False)
        matmul.allow_tf32 = False
        assert not _torch.multiplies_in_tf32(convolution=False)
        conv.fp32_precision = "tf32"
        assert _torch.multiplies_in_tf32(convolution=True)
        conv.fp32_precision = "ieee"
        assert not _torch.multiplies_in_tf32(convolution=True)
    finally:
        matmul.allow_tf32, conv.fp32_precision = before


def test_gradient_hooks() -> None:
    weight = torch.ones(1, requires_grad=True)
    counts = [_torch.gradient_hooks(weight)]
    for _ in range(2):
        weight.register_post_accumulate_grad_hook(lambda _: None)
        counts.append(_torch.gradient_hooks(weight))
    assert counts == [0, 1, 2]


def test_a_new_gradient_is_no_view() -> None:
    """But a part of a bucket is: what :mod:`lockstep.ddp.accumulated` tells them apart by."""
    weight = torch.ones(3, requires_grad=True)
    (weight * 2).sum().backward()
    assert weight.grad is not None
    assert not _torch.is_view(weight.grad)
    assert _torch.is_view(torch.zeros(4).split([3, 1])[0])


def test_foreach_copy() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.float64)], [torch.ones(2), torch.full((3,), 2.0)]
    _torch.foreach_copy()(targets, sources)
    assert [target.tolist() for target in targets] == [[1, 1], [2, 2, 2]]


def test_foreach_add() -> None:
    targets, sources = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.full((3,), 3.0)]
    _torch.foreach_add()(targets, sources)
    assert [each.tolist() for each in targets] == [[3.0] * 2, [4.0] * 3]


def test_foreach_mul() -> None:
    targets = [torch.ones(2), torch.full((3,), 2.0)]
    _torch.foreach_mul()(targets, 0.5)
    assert [each.tolist() for each in targets] == [[0.5] * 2, [1.0] * 3]
    _torch.foreach_mul()(targets, torch.tensor(4.0))
    assert [each.tolist() for each in targets] == [[2.0] * 2, [4.0] * 3]


def test_foreach_zero() -> None:
    targets = [torch.ones(2), torch.full((3,), 2.0)]
    _torch.foreach_zero()(targets)
    assert [each.tolist() for each in targets] == [[0.0] * 2, [0.0] * 3]


def test_foreach_norm() -> None:
    tensors = [torch.tensor([1.0, -3.0]), torch.tensor([[2.0], [float("nan")]]), torch.tensor(-math.inf)]
    assert [float(each) for each in _torch.foreach_norm()(tensors, math.inf)] == pytest.approx(
        [3.0, math.nan, math.inf], nan_ok=True
    )


def test_storage_of() -> None:
    tensor = torch.zeros(4)
    assert _torch.storage_of(tensor) == _torch.storage_of(tensor[1:])
    empty, other = torch.zeros(0), torch.zeros(0)
    assert _torch.storage_of(empty) != _torch.storage_of(other)


def _ask_groups() -> dict[str, Any]:
    lockstep.init("gloo")
    group = dist.group.WORLD
    assert group is not None
    cpu = torch.device("cpu")
    inner = dist.new_group(backend="shm")
    facts = {
        "serves the CPU": "cpu" in _torch.device_types(group),
        "backend": type(_torch.backend_for(group, cpu)).__name__,
        "device types of shm": _torch.device_types(inner),
        "backend of shm": _torch.backend_for(inner, cpu) is inner,
    }
    try:
        _torch.backend_for(group, torch.device("meta"))
    except RuntimeError:
        facts["no such device"] = "RuntimeError"
    _torch.default_store().set("ours", "1")
    facts["store"] = dist.distributed_c10d._get_default_store().get("ours")
    return facts


def test_device_types_and_backend_for_and_default_store() -> None:
    assert run_ranks(_ask_groups, 1) == [
        {
            "serves the CPU": True,
            "backend": "ProcessGroupGloo",
            "device types of shm": ["cpu"],
            "backend of shm": True,
            "no such device": "RuntimeError",
            "store": b"1",
        }
    ]


def test_all_gather_options() -> None:
    options = _torch.all_gather_options()()
    assert options.asyncOp in (True, False)
    assert options.timeout.total_seconds() < 0  # not set: the group's own


def test_batch_norm() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, _torch.batch_norm()) for kind in kinds)


def test_norm_base() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm3d)
    assert all(issubclass(kind, _torch.norm_base()) for kind in kinds)
    assert not issubclass(nn.LayerNorm, _torch.norm_base())


def test_original_of_and_its_prefix() -> None:
    module = nn.Linear(2, 1)
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert _torch.original_of(compiled) is module
    assert _torch.original_of(module) is None
    assert set(compiled.state_dict()) == {f"{_torch.COMPILED_PREFIX}{name}" for name in module.state_dict()}


@pytest.mark.campaign  # and where torch is another one
def test_compile_callbacks() -> None:
    script = """
import torch
from lockstep import _torch
assert _torch.compile_callbacks() is None
torch.optim.SGD([torch.ones(1)], lr=1)  # imports the compiler
seen = []
callbacks = _torch.compile_callbacks()
callbacks.on_compile_start(lambda *_: seen.append("start"))
callbacks.on_compile_end(lambda *_: seen.append("end"))
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
assert seen == ["start", "end"], seen
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_hook_name() -> None:
    layer = nn.Linear(2, 1)
    prune.random_unstructured(layer, "weight", amount=1)
    assert [_torch.hook_name(hook) for hook in layer._forward_pre_hooks.values()] == ["weight"]
    assert _torch.hook_name(print) == ""


def _add(x: torch.Tensor) -> torch.Tensor:
    return x + (100 if torch.compiler.is_compiling() else 1)


def test_mark_untraced_and_untraced() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return _add(x)

    class Adder:
        def method(self, x: torch.Tensor) -> torch.Tensor:
            return _add(x)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return function(x * 2) + adder.method(x * 2)

    adder = Adder()
    assert torch.compile(twice, backend="eager")(torch.ones(1)).tolist() == [204]
    _torch.mark_untraced(function)
    Adder.method.__module__ = "lockstep.tests"  # as a method of lockstep's
    _torch.untraced(Adder)
    torch.compiler.reset()
    assert torch.compile(twice, backend="eager")(torch.ones(1)).tolist() == [6]


def _count_collectives() -> list[Any]:
    lockstep.init("gloo")
    group, cpu = dist.group.WORLD, torch.device("cpu")
    counts = [_torch.collectives_issued(group, cpu) or 0]
    for issue in (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda: dist.broadcast(torch.ones(3), 0),
        lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3)),
        dist.barrier,
    ):
        issue()  # type: ignore[no-untyped-call]
        counts.append(_torch.collectives_issued(group, cpu) or 0)
    return [count - counts[0] for count in counts] + [_torch.collectives_issued(group, torch.device("meta"))]


def test_collectives_issued() -> None:
    assert run_ranks(_count_collectives, 2) == [[0, 1, 2, 3, 4, 5, None]] * 2


def _record_flights() -> list[Any]:
    lockstep.init("shm")
    recorders = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    _torch.leave_out_of_flight_recorder("other")
    return [recorders is None, None if recorders is None else {"shm", "other"} <= recorders]


def test_leave_out_of_flight_recorder() -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert run_ranks(_record_flights, 1) == [[True, None] if version < (2, 15) else [False, True]]


# --- nothing private elsewhere ---------------------------------------------------------------------------------------


def test_ddp_in_forward() -> None:
    seen: list[object] = []
    in_forward = _torch.ddp_in_forward()

    class Seen(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            seen.append(in_forward())
            return super().forward(inputs)

    wrapper: Any = _Wrapped(Seen(2, 2))
    with torch.nn.parallel.DistributedDataParallel._inside_ddp_forward(wrapper):
        wrapper.module(torch.ones(1, 2))
    wrapper.module(torch.ones(1, 2))
    assert seen == [wrapper, None]


def test_copies_by_data_parallel_are_marked() -> None:
    module: Any = nn.Linear(2, 2)
    assert _torch.COPY_BY_DATA_PARALLEL not in module.__dict__
    assert _torch.COPY_BY_DATA_PARALLEL in module._replicate_for_data_parallel().__dict__  # one on each of several GPUs


def test_what_ddp_ignores() -> None:
    class Named(nn.Linear):
        _ddp_params_and_buffers_to_ignore = ("weight",)

    module = nn.Linear(2, 2)
    assert _torch.ignored_by_ddp(module) == frozenset()
    ddp = torch.nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["bias"])
    assert _torch.ignored_by_ddp(module) == {"bias"}
    assert _torch.ignored_by_ddp(Named(2, 2)) == {"weight"}


class _Wrapped:
    def __init__(self, module: nn.Module) -> None:
        self.module = module


def test_each_function_has_a_test() -> None:
    functions = [
        name
        for name, value in vars(_torch).items()
        if inspect.isfunction(value) and value.__module__ == _torch.__name__
    ]
    text = "".join(file.read_text() for file in Path(__file__).parent.glob("test_torch*.py"))
    assert [name for name in functions if f"_torch.{name}(" not in text] == []


def test_private_names_stand_in_one_file() -> None:
    """Every name with an underscore that lockstep's source reads is its own, Python's, or stands in _torch.py."""
    own, read = set[str](), dict[str, str]()
    for file in SOURCE.rglob("*.py"):
        if file.name == "_torch.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                    own.add(node.attr)
                read[node.attr] = f"{file}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                read |= {alias.name: f"{file}:{node.lineno}: {alias.name}" for alias in node.names}
    listed = {name for names in (_torch.ATTRIBUTES | _torch.OVERRIDDEN).values() for name in names}
    # Of Python's: named tuples, os, subprocess, multiprocessing, atexit, threading.
    pythons = {"_asdict", "_config", "_exit", "_args_from_interpreter_flags", "_inheriting", "_resource_tracker"}
    pythons |= {
        "_is_owned",
        "_run_exitfuncs",
        "_shutdown",
        "_register_atexit",
        "_SHM_NAME_PREFIX",
        "_SHM_SAFE_NAME_LENGTH",
    }
    cloudpickles = {"_DYNAMIC_CLASS_TRACKER_BY_CLASS", "_DYNAMIC_CLASS_TRACKER_BY_ID"}
    pytests = {"_ensure_unconfigure", "_fixtureinfo", "_tw"}  # which a plugin has no other way to
    private = {name for name in read if name.startswith("_") and not name.startswith("__")}
    stray = private - own - listed - pythons - pytests - cloudpickles - {"_torch"}
    assert {name: read[name] for name in stray} == {}


def test_runs_plainly_is_false_inside_transforms_modes_and_traces() -> None:
    plain = _torch.runs_plainly()
    seen: list[bool] = []

    def look(inputs: torch.Tensor) -> torch.Tensor:
        seen.append(plain())
        return inputs * 2

    torch.func.vmap(look)(torch.ones(3))
    torch.func.grad(lambda inputs: look(inputs).sum())(torch.ones(3))
    with FakeTensorMode():
        look(torch.ones(3))
    assert seen == [False] * 3
    look(torch.ones(3))
    assert seen.pop()
    with _Counting() as counting:
        look(torch.ones(3))
    assert seen.pop(), "a mode that counts carries out what it sees"
    assert counting.seen


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_outside_dispatch_modes_none_sees_what_is_done() -> None:
    outside, number = _torch.outside_dispatch_modes(), torch.zeros(())
    with _Counting() as counting:
        with outside():
            number.fill_(3)
        assert counting.seen == 0
        number.add_(1)
        assert counting.seen == 1
    assert number.item() == 4


class _Pids(IterableDataset[int]):
    def __iter__(self) -> Any:
        return repeat(os.getpid())


def _loses_a_worker() -> None:
    assert _torch.workers_of(None) == []
    assert _torch.workers_of(iter(DataLoader(TensorDataset(torch.ones(2))))) == []
    batches = iter(DataLoader(_Pids(), batch_size=1, num_workers=2))
    pids = [int(next(batches)) for _ in range(2)]
    assert [worker.pid for worker in _torch.workers_of(batches)] == pids
    assert death_among(_torch.workers_of(batches)) is None
    with pytest.raises(RuntimeError) as raised:
        _kill_and_wait(pids[1])
    assert tells_of_a_death(raised.value)
    ours = death_among(_torch.workers_of(batches))
    assert str(ours) == f"DataLoader worker (pid {pids[1]}) is killed by signal: Killed."
    assert str(raised.value).startswith(str(ours))


def _kill_and_wait(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    for _ in range(6000):
        time.sleep(0.01)  # until torch's handler raises the error in here


def test_the_workers_of_a_loader_and_what_torch_says_of_their_death() -> None:
    run_ranks(_loses_a_worker, 1)


class _LostIn:
    """Batches of workers of which one dies as it hands over the next; torch's handler raises its error in vain."""

    def __init__(self, batches: Iterator[Any], lost: Exception) -> None:
        self._batches, self._workers, self._lost = batches, _torch.workers_of(batches), lost

    def __iter__(self) -> Iterator[Any]:
        yield next(self._batches)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        os.kill(self._workers[1].pid or 0, signal.SIGKILL)
        raise self._lost


def _names_a_worker_that_was_lost(lost: Exception) -> None:
    batches = _LostIn(iter(DataLoader(_Pids(), batch_size=1, num_workers=2)), lost)
    with pytest.raises(RuntimeError, match="is killed by signal: Killed") as raised:
        list(naming_dead_workers(batches))
    assert tells_of_a_death(raised.value)
    assert raised.value.__cause__ is lost


@pytest.mark.parametrize(
    "lost", [ConnectionResetError(), EOFError(), RuntimeError("Pin memory thread exited unexpectedly")]
)
def test_a_worker_that_dies_is_named_though_torchs_error_is_lost(lost: Exception) -> None:
    run_ranks(_names_a_worker_that_was_lost, 1, lost)
