"""Every private name of torch that lockstep uses: one function each, with why there is no public way.

torch changes private names without notice, so each is looked up here and nowhere else, and ``tests/unit/test_torch.py``
has one test for each. Nothing here imports torch when this module is imported: the watching process reads it as well.
A function whose caller is in a hot path returns torch's own function, for the caller to bind once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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


def runs_plainly() -> Callable[[], bool]:
    """Return the function that says whether operations are carried out as they are written.

    Not so inside torch.func's transforms (vmap refuses to draw), under a dispatch mode (fake tensors: torch.export) or
    in a trace. Only the last has a public name.
    """
    import torch

    dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    transforms: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
    tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]

    def plainly() -> bool:
        return dispatch_modes() == 0 and transforms() is None and not tracing()

    return plainly


def storage_use_count() -> Callable[[Any], int]:
    """Return the function that counts the tensors, and other owners, of an untyped storage.

    The only way to learn that an alias of a tensor (a slice, ``detach()``, a NumPy array) is still in use; torch's own
    trees of CUDA graphs rest on it. It takes the address of the storage, ``storage._cdata``.
    """
    import torch

    count: Callable[[int], int] = torch._C._storage_Use_Count
    return lambda storage: count(storage._cdata)


def tensor_use_count() -> Callable[[Any], int]:
    """Return the function that counts the owners of a tensor in C++, such as graphs; its Python object is one.

    The only way to learn that a graph or another library holds a tensor that no Python object refers to.
    """
    import torch

    count: Callable[[Any], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
    return count


def is_made_of_tensors(tensor: Any) -> bool:
    """Return whether ``tensor`` has no memory of its own but wraps other tensors (a DTensor, a quantised weight).

    The only way to ask; FSDP2 and torch.compile rest on it.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return bool(is_traceable_wrapper_subclass(tensor))


#: The attribute in which a module names the parameters and buffers that DDP leaves alone.
#: Libraries set it for torch's DDP, through one of its static methods, and there is no public name for it.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"
