"""``torch.compile`` binds compiled code to one module object; each replica needs it bound to its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lockstep import caller


def is_compiled_wrapper(module: nn.Module) -> bool:
    """**Local.** Whether ``module`` is what ``torch.compile(module)`` returned."""
    # Looked up, not imported: importing the compiler takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def rewrapped(wrapper: Any, inner: nn.Module) -> nn.Module:
    """**Local.** What ``torch.compile`` with the same options makes of ``inner``."""
    # dynamo_ctx has no underscore but is no documented name; torch offers no other way to repeat a compile's options.
    module: nn.Module = type(wrapper)(inner, wrapper.dynamo_ctx)
    return module


def compile_as(source: nn.Module, replica: nn.Module) -> None:
    """**Local.** Compile ``replica`` in place if ``source`` was (``source.compile(...)``), with the same options."""
    compiled: Any = source._compiled_call_impl
    replica._compiled_call_impl = None
    if compiled is None:
        return
    # The compiling context is in the closure and nowhere else.
    names = compiled.__code__.co_freevars if hasattr(compiled, "__code__") else ()
    closure = dict(zip(names, compiled.__closure__ or (), strict=True)) if names else {}
    context = closure["self"].cell_contents if "self" in closure else None
    if callable(context):
        replica._compiled_call_impl = context(replica._call_impl)
        return
    caller.warn(
        f"this version of torch hides how {type(source).__name__}.compile() was called, so its replicas run "
        "uncompiled: use DataParallel(torch.compile(module)) instead"
    )
