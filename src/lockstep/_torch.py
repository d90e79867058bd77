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


def mark_untraced(function: Function) -> Function:
    """Keep torch.compile from tracing ``function`` and what it calls: compiled code breaks off and calls it as it is.

    For what belongs to each call and not into a graph: collectives, hooks, what autograd calls at a backward's end.
    torch.compiler.disable does that with a wrapper, which costs a microsecond a call and, where nobody compiles, the
    import of the compiler, a second for every process. The mark that it leaves on a function keeps the compiler from
    tracing a call of it; what the interpreter is told of its code, which costs nothing, keeps it from compiling it by
    itself when autograd's engine calls it, and its callees.
    """
    from torch._C._dynamo import eval_frame

    marked, skip = cast(Any, function), eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(marked.__code__, eval_frame._FrameExecStrategy(skip, skip))
    marked._torchdynamo_disable = True
    #: What fullgraph=True shows as the reason of the break that it does not allow.
    marked._torchdynamo_disable_msg = (
        "lockstep does this anew in each step, outside of graphs. With fullgraph=True compile the model first: "
        "lockstep.replicate(torch.compile(model, fullgraph=True))"
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
