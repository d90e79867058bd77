"""``torch.compile`` binds compiled code to one module object; each replica needs it bound to its own."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from lockstep import callsite


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile(module)`` returned."""
    # Looked up, not imported: importing the compiler takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def rewrapped(wrapper: Any, inner: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` with the same options makes of ``inner``."""
    # dynamo_ctx has no underscore but is no documented name; torch offers no other way to repeat a compile's options.
    module: nn.Module = type(wrapper)(inner, wrapper.dynamo_ctx)
    return module


def leave_uncompiled(source: nn.Module, replica: nn.Module) -> None:
    """Let ``replica`` run as it is if ``source`` was compiled in place: that code is of ``source`` alone."""
    replica._compiled_call_impl = None
    if source._compiled_call_impl is not None:
        callsite.warn(
            f"{type(source).__name__}.compile() compiled that one module, so its replicas run uncompiled: use "
            "DataParallel(torch.compile(module)) instead"
        )
