"""Every private name of torch that lockstep uses: one function each, with why there is no public way.

torch changes private names without notice, so each is looked up here and nowhere else, and ``tests/unit/test_torch.py``
has one test for each. Nothing here imports torch when this module is imported: the watching process reads it as well.
A function whose caller is in a hot path returns torch's own function, for the caller to bind once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def profiler_enabled() -> Callable[[], bool]:
    """Return the function that says whether a profiler records.

    The one cheap way to ask: ``record_function`` costs microseconds also when nobody records.
    """
    import torch

    enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    return enabled


def queue_callback(callback: Callable[[], None]) -> None:
    """Let autograd call ``callback`` when the backward under way has ended.

    The only way to run code at the end of a backward; FSDP2 ends its backward with it as well.
    """
    from torch.autograd import Variable

    Variable._execution_engine.queue_callback(callback)


def will_execute() -> Callable[[Any], bool]:
    """Return the function that says whether the backward under way will execute a node of the graph.

    The only way to ask; ``torch.autograd.graph.register_multi_grad_hook`` rests on it.
    """
    import torch

    execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
    return execute


def run_eagerly(function: Function) -> Function:
    """Keep torch.compile from compiling ``function``, and whatever it calls; returns ``function`` itself.

    For what belongs to each call and not into a graph: collectives, hooks, what autograd calls at a backward's end. The
    public ``torch.compiler.disable`` imports the compiler, a second for processes that never compile, and wraps the
    function, a microsecond for each call of a parameter's hook. So the marks are set that it leaves in the end: one on
    the code, which the interpreter's hook reads when the function is called, from Python or from autograd's engine, and
    one on the function, for the compiler when it traces a caller.
    """
    import torch

    frames = torch._C._dynamo.eval_frame
    leave, marked = frames._FrameAction.SKIP, cast(Any, function)
    frames.set_code_exec_strategy(marked.__code__, frames._FrameExecStrategy(leave, leave))
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        "lockstep does this anew in every step, outside of graphs. Where fullgraph=True is wanted, compile the model "
        "first: lockstep.replicate(torch.compile(model, fullgraph=True))"
    )
    return function


def in_compiled_autograd() -> bool:
    """Say whether the backward under way is run by compiled autograd.

    It drops what :func:`queue_callback` was given without a call, and torch has no public way to ask.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return compiled is not None and bool(compiled.in_compiled_autograd_region)


def traces_backward() -> bool:
    """Say whether torch.compile was told to trace backwards within what it compiles.

    ``torch._dynamo.config`` is documented, this experimental switch of it is not, and torch before 2.12 lacks it.
    """
    config = sys.modules.get("torch._dynamo.config")
    return config is not None and bool(getattr(config, "trace_autograd_ops", False))


def transforms_active() -> Callable[[], bool]:
    """Return the function that says whether a torch.func transform (grad, vmap, jvp, ...) is under way.

    Tensors are wrapped then, and no public function tells.
    """
    import torch

    active: Callable[[], bool] = torch._C._are_functorch_transforms_active
    return active
