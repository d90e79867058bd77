"""Keep torch.compile out of what belongs to each call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from lockstep import _torch

Method = TypeVar("Method", bound=Callable[..., Any])


def run_eagerly(method: Method) -> Method:
    """**Local.** Keep torch.compile from tracing ``method``, and whatever it calls: what it does belongs to each call
    and not into a graph."""
    disabled: Callable[..., Any] | None = None

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            # torch.compiler.disable imports the compiler, a second for every process: not for those that never do.
            if "torch._dynamo" not in sys.modules:
                return method(*args, **kwargs)
            disabled = torch.compiler.disable(method)
        return disabled(*args, **kwargs)

    _torch.mark_untraced(call)
    return cast(Method, call)
