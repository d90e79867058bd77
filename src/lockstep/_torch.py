"""Every private name of torch that lockstep uses: one function each, with the reason why no public name will do.

torch changes private names without notice, so each is looked up here and nowhere else, and ``tests/unit/test_torch.py``
has one test for each. Importing this module does not import torch: the launcher imports it as well.
A function whose caller is in a hot path returns torch's own function, for the caller to bind once.

Two kinds of names are listed in tables, since a function would only hide them: attributes that the code reads from
torch's objects (:data:`ATTRIBUTES`), and private methods that our subclasses define because torch calls them
(:data:`OVERRIDDEN`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from operator import attrgetter
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    import torch
    import torch.distributed as dist
    from torch import nn

#: Private attributes of torch's objects that lockstep reads where it needs them, by class.
ATTRIBUTES = {
    # A module's members in its own order and with repetitions, which the public iterators leave out.
    "torch.nn.Module": (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",  # the buffers that a state dict leaves out
        "_forward_pre_hooks",  # there is no public way to see a module's hooks
        "_replicate_for_data_parallel",  # defined by modules that customise their replicas, such as RNNs
        "_is_replica",  # set by _replicate_for_data_parallel
        "_call_impl",  # compile() compiles this, and stores the result in the next one
        "_compiled_call_impl",
    ),
    "torch.Tensor": (
        "_version",  # the only way to learn that a tensor was changed in place
        "_indices",  # the public methods refuse a sparse tensor that is not coalesced
        "_values",
    ),
}

#: Private methods and properties of torch's classes that ours define because torch asks for them.
OVERRIDDEN = {
    "torch.distributed.ProcessGroup": (
        "_allgather_base",
        "_reduce_scatter_base",
        "_device_types",
        "_get_backend",
    ),
    "torch.distributed.Work": ("_source_rank",),
}


def profiler_enabled() -> Callable[[], bool]:
    """Return the function that tells whether a profiler is recording.

    This is the only cheap check: ``record_function`` costs microseconds even if no profiler is recording.
    """
    import torch

    enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    return enabled


class _Nesting(dict[type, bool]):
    """Class of an optimizer -> whether its ``step`` may call one that torch has given hooks as well.

    A dict, since every hook of every step looks here.
    """

    def __missing__(self, of: type) -> bool:
        from torch.optim import Optimizer

        steps = set()
        for base in of.__mro__:
            if base is not Optimizer and "step" in vars(base):
                step = vars(base)["step"]
                while getattr(step, "hooked", False):  # torch puts its wrapper into the class of the first optimizer
                    step = step.__wrapped__
                steps.add(step)
        found = self[of] = len(steps) > 1
        return found


#: Asked by hooks of optimizers before :func:`is_inner_step`.
nesting = _Nesting()


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the hook that asks was called for ``super().step()`` in the step of a class derived from another
    optimizer's: torch calls hooks for each of the two, where both classes have been used, and only the outer one is a
    step. To be asked by the hook itself; where a call is much, after :data:`nesting`.

    What torch wraps around each ``step`` is looked for on the stack, since nothing tells of a step that failed.
    """
    if not nesting[type(optimizer)]:
        return False
    code = _code_around_steps()
    frame: FrameType | None = sys._getframe(1)
    under_way = 0
    while frame is not None and under_way < 2:
        under_way += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return under_way > 1


@cache
def _code_around_steps() -> CodeType:
    from torch.optim import Optimizer

    def step() -> None: ...

    return Optimizer.profile_hook_step(step).__code__


def is_in_bad_fork(module: ModuleType) -> Callable[[], bool] | None:
    """Return the function of a device's module that tells a process that torch refuses the device in it, because the
    process that it was forked from has opened its driver. None if the module has none.

    ``is_initialized`` does not tell: that ``torch.cuda.is_available`` was called is enough, and changes nothing else.
    """
    return getattr(module, "_is_in_bad_fork", None)


@contextmanager
def recorded(name: str, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record the block in the profiler as ``name``, with the sizes of ``inputs``.

    ``record_function`` takes no tensors; torch's own backends record themselves in C++.
    """
    import torch

    handle = torch.autograd._record_function_with_args_enter(name, *inputs)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._record_function_with_args_exit(handle)  # type: ignore[attr-defined]


def queue_callback() -> Callable[[Callable[[], None]], None]:
    """Return the function that has autograd call a callback when the backward under way has ended.

    This is the only way to run code at the end of a backward; FSDP2 ends its backward with it as well.
    """
    from torch.autograd import Variable

    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    return queue


def will_execute() -> Callable[[Any], bool]:
    """Return the function that tells whether the backward under way will execute a node of the graph.

    There is no public way; ``torch.autograd.graph.register_multi_grad_hook`` uses it too.
    """
    import torch

    execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
    return execute


def runs_plainly() -> Callable[[], bool]:
    """Return the function that tells whether operations are executed as they are written.

    They are not inside torch.func's transforms (vmap refuses to draw), in a trace, or under the modes that make fake
    tensors, record a graph or remove in-place changes (torch.export). Other dispatch modes, which count operations or
    keep their results, do execute them. Only tracing has a public name.
    """
    import torch

    dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    mode: Callable[[Any], object] = torch._C._get_dispatch_mode
    keys = torch._C._TorchDispatchModeKey
    others = (keys.FAKE, keys.PROXY, keys.FUNCTIONAL)
    transformed = transforms_active()
    tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

    def plainly() -> bool:
        if dispatch_modes() and any(mode(key) is not None for key in others):
            return False
        return not transformed() and not tracing()

    return plainly


def outside_dispatch_modes() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which no dispatch mode sees any operation; torch's own modes use it, and it has no public
    name."""
    import torch

    context: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch
    return context


def mode_that_sees(see: Callable[[Any, Any, Any], Any]) -> Any:
    """Return a dispatch mode in which each operation of this thread and its backwards goes to ``see``, which gets the
    operation, its arguments and its keyword arguments, must run it and return its result.

    ``torch.utils.flop_counter.FlopCounterMode`` is made of such a mode, whose class has no public name. As one of the
    infrastructure's (``is_infra_mode``) it lets torch.compile compile and run what it would without it; what is
    compiled it does not see.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seeing(TorchDispatchMode):
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    return cast("Any", Seeing)()


def innermost_mode() -> Any:
    """Return the dispatch mode that this thread entered last and has not left; None: it is in none."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None


def graphs_compiled() -> int:
    """Return how many graphs torch.compile has compiled in this process; the compiler keeps no public count."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Return torch's formulas for FLOPs, by operation, with those for attention on the CPU, which torch lacks.

    ``torch.utils.flop_counter`` has a public function to add to them, and none to read them.
    """
    import torch
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten
    return {
        **flop_registry,
        aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
            aten._scaled_dot_product_flash_attention_backward
        ],
    }


def multiplies_in_tf32(*, convolution: bool) -> bool:
    """Return whether CUDA's float32 convolutions, or its other products, may be made in TF32.

    Programs set it by any of torch's public names, of which only this one may be read whichever was used.
    """
    import torch

    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return str((conv if convolution else matmul).fp32_precision) == "tf32"


def gradient_hooks(param: torch.Tensor) -> int:
    """Count the hooks on ``param`` that see its accumulated gradient; there is no public way to count them."""
    hooks = param._post_accumulate_grad_hooks
    return 0 if hooks is None else len(hooks)


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd takes ``tensor`` for a view of another one."""
    return tensor._is_view()


def foreach_copy() -> Callable[[Any, Any], object]:
    """Return the function that copies a list of tensors into another one.

    FSDP2 and the optimizers use it too, and it is four times faster than a Python loop over small tensors. The public
    alternatives (``cat``, ``stack``) need as many views.
    """
    import torch

    copy: Callable[[Any, Any], object] = torch._foreach_copy_
    return copy


def foreach_add() -> Callable[[Any, Any], object]:
    """Return the function that adds the tensors of a list to those of another; as :func:`foreach_copy`."""
    import torch

    add: Callable[[Any, Any], object] = torch._foreach_add_
    return add


def foreach_mul() -> Callable[[Any, Any], object]:
    """Return the function that multiplies the tensors of a list by a number or a 0-dim tensor, in place; as
    :func:`foreach_copy`."""
    import torch

    mul: Callable[[Any, Any], object] = torch._foreach_mul_
    return mul


def foreach_zero() -> Callable[[Any], object]:
    """Return the function that makes the tensors of a list zero; as :func:`foreach_copy`."""
    import torch

    zero: Callable[[Any], object] = torch._foreach_zero_
    return zero


def foreach_norm() -> Callable[[Any, float], Any]:
    """Return the function that returns the norm of each tensor of a list; as :func:`foreach_copy`.

    torch.nn.utils.get_total_norm returns one for all of them.
    """
    import torch

    norm: Callable[[Any, float], Any] = torch._foreach_norm
    return norm


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object.

    ``data_ptr()`` is 0 for every storage of no bytes, and a tensor's storage may be swapped for one at the same place.
    """
    address: int = tensor.untyped_storage()._cdata
    return address


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the kinds of device that ``group`` serves ("cpu", "cuda"); there is no public way, FSDP2 does the same."""
    return [device.type for device in group._device_types]


def backend_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of ``group`` for tensors of ``device``: the only access to methods that only a backend has.

    Raises:
        RuntimeError: the group serves no tensors of this device.
    """
    return group._get_backend(device)


def default_store() -> Any:
    """Return the store of the default group, which torch keeps private even if the user's code opened the group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def all_gather_options() -> Any:
    """Return the class of an all-gather's options: torch.distributed exports all other option classes."""
    from torch.distributed import distributed_c10d

    return distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]


def batch_norm() -> type[nn.Module]:
    """Return the base class of all of torch's batch norms, which other libraries check for.

    The public classes, BatchNorm1d, 2d and 3d, each refuse inputs of other dimensions.
    """
    from torch.nn.modules import batchnorm

    return batchnorm._BatchNorm


def norm_base() -> type[nn.Module]:
    """Return the base class of torch's batch norms and instance norms: the layers with running statistics."""
    from torch.nn.modules import batchnorm

    return batchnorm._NormBase


#: The prefix that ``torch.compile(module)`` puts before every name in a state dict.
COMPILED_PREFIX = "_orig_mod."


def original_of(module: nn.Module) -> nn.Module | None:
    """Return the module that ``torch.compile(module)`` has wrapped, or None if this is not such a wrapper.

    The wrapper's class is private as well; its state dict carries this name.
    """
    return module._modules.get(COMPILED_PREFIX.rstrip("."))


def compile_callbacks() -> Any:
    """Return the module where torch.compile announces that it begins and ends, or None if it is not imported yet.

    ``torch.compiler`` has no such announcement. The module is looked up only: importing the compiler takes a second.
    """
    return sys.modules.get("torch._dynamo.callback")


def hook_name(hook: object) -> str:
    """Return the name of the tensor that a hook of torch.nn.utils.prune computes; weight norm's is public."""
    return str(getattr(hook, "_tensor_name", ""))


Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)


def mark_untraced(function: Function) -> Function:
    """Keep torch.compile from tracing ``function`` and its callees: compiled code breaks the graph and calls it.

    This is for code that must run at each call and not in a graph: collectives, hooks, callbacks at a backward's end.
    torch.compiler.disable does that with a wrapper, which costs a microsecond a call and imports the compiler, a second
    for every process even if nothing is compiled. The mark on the function keeps the compiler from tracing a call of
    it. The strategy set on its code, which costs nothing, keeps the compiler from compiling the function by itself when
    autograd's engine calls it, and its callees.
    """
    from torch._C._dynamo import eval_frame

    marked, skip = cast(Any, function), eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    marked._torchdynamo_disable = True
    #: The reason that fullgraph=True shows for the graph break that it forbids.
    marked._torchdynamo_disable_msg = (
        "lockstep does this again in each step, outside of graphs. With fullgraph=True compile the model first: "
        "lockstep.replicate(torch.compile(model, fullgraph=True))"
    )
    return function


def untraced(cls: Class) -> Class:
    """Decorate a class: apply :func:`mark_untraced` to all its methods and properties that lockstep defines."""
    for each in cls.__mro__:
        for member in vars(each).values():
            function: Any = member.fget if isinstance(member, property) else member
            # (A decorated function shares its code with all others of that decorator, so it is left out.)
            plain = inspect.isfunction(function) and not hasattr(function, "__wrapped__")
            if plain and function.__module__.startswith("lockstep."):
                mark_untraced(function)
    return cls


def collectives_issued(group: Any, device: Any) -> int | None:
    """Return the number of collectives that ``group`` has issued for tensors on ``device``, by torch's own count.

    It is the same on all ranks, and no public function returns it. None: the backend does not count.
    """
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def leave_out_of_flight_recorder(backend: str) -> None:
    """Tell torch, from 2.15 on, not to attach its flight recorder to groups of ``backend``.

    The recorder needs a C++ backend, and a group written in Python has none: torch would fail to open the group.
    """
    from torch.distributed import distributed_c10d

    recorders: set[str] | None = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorders is not None:  # torch 2.14 and before attach none
        recorders.add(backend)


def storage_use_count(storage: torch.UntypedStorage) -> Callable[[], int]:
    """Return the function that counts the tensors, and other owners, of ``storage``, which must outlive it.

    This is the only way to learn that an alias of a tensor (a slice, ``detach()``, a NumPy array) is still in use;
    torch's CUDA graph trees use it too. It takes the address of the storage, ``storage._cdata``.
    """
    import torch

    return partial(torch._C._storage_Use_Count, storage._cdata)


def tensor_use_count() -> Callable[[Any], int]:
    """Return the function that counts the owners of a tensor in C++, such as graphs; its Python object is one.

    This is the only way to learn that a graph or another library holds a tensor that no Python object refers to.
    """
    import torch

    count: Callable[[Any], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
    return count


def is_made_of_tensors(tensor: Any) -> bool:
    """Return whether ``tensor`` has no memory of its own but wraps other tensors (a DTensor, a quantised weight).

    There is no public way; FSDP2 and torch.compile use it too.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


def default_collate_by(tensors: Callable[[Sequence[torch.Tensor]], Any], samples: list[Any]) -> Any:
    """Collate samples as torch's ``default_collate`` does, but make of several tensors what ``tensors`` returns.

    torch's documentation has ``collate_fn_map`` for this, which no public function takes. A program that has extended
    ``default_collate`` for tensors itself is left its own.
    """
    import torch
    from torch.utils.data._utils import collate

    known = collate.default_collate_fn_map
    if known.get(torch.Tensor) is not collate.collate_tensor_fn:
        return collate.default_collate(samples)
    ours = {**known, torch.Tensor: lambda batch, *, collate_fn_map: tensors(batch)}  # noqa: ARG005  (as torch calls it)
    return collate.collate(samples, collate_fn_map=ours)


def workers_of(batches: object) -> list[BaseProcess]:
    """Return the worker processes of what ``iter()`` of a DataLoader has returned; none if it has none.

    torch raises an error if one of them dies, and has no public way to ask which has.
    """
    return [*getattr(batches, "_workers", ())]


#: The attribute in which a module names the parameters and buffers that DDP leaves alone.
#: Libraries set it for torch's DDP, through one of its static methods, and there is no public name for it.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
_NO_NAMES: frozenset[str] = frozenset()


def ignored_by_ddp(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the parameters and buffers of a module that DDP leaves alone."""
    # It is looked up where it is set; a missing attribute takes nn.Module's ``__getattr__`` ten times as long.
    names = module.__dict__.get(IGNORED_BY_DDP) or getattr(type(module), IGNORED_BY_DDP, None)
    return frozenset(names) if names else _NO_NAMES


def compiled_autograd() -> tuple[Callable[[], object], Callable[[Any], bool]]:
    """Return two functions: one returns compiled autograd's module if it is imported, the other takes that module and
    tells whether it runs the backward under way.

    Compiled autograd drops callbacks of :func:`queue_callback` without calling them, and torch has no public way to
    detect it. (This is checked in each backward, so neither function is written in Python.)
    """
    imported = partial(sys.modules.get, "torch._dynamo.compiled_autograd")
    return imported, attrgetter("in_compiled_autograd_region")


def traces_backward() -> bool:
    """Return whether torch.compile was told to trace backwards within compiled code.

    ``torch._dynamo.config`` is documented, but its experimental switch is not, and torch before 2.12 lacks it.
    """
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and bool(getattr(config, "trace_autograd_ops", False))


def transforms_active() -> Callable[[], bool]:
    """Return the function that tells whether a torch.func transform (grad, vmap, jvp, ...) is under way.

    Tensors are wrapped then, and no public function detects it.
    """
    import torch

    active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    return active


#: The attribute with which torch.nn.DataParallel marks its copies of a module; they have no other mark.
COPY_BY_DATA_PARALLEL = "_is_replica"


def ddp_in_forward() -> Callable[[], nn.Module | None]:
    """Return the function that returns torch's DistributedDataParallel whose forward is under way, if there is one.

    A module can't tell that torch has wrapped it. DDP keeps the instance whose forward is under way for
    torch.compile. (This is checked in each forward, so the function is not written in Python.)
    """
    from torch.nn.parallel import DistributedDataParallel

    return partial(attrgetter("_active_ddp_module"), DistributedDataParallel)
