"""What lockstep relies on of torch's compilers, beside autograd's engine; true of every torch from 2.9 on."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, which sets an environment variable
from torch import Tensor
from torch._dynamo import compiled_autograd

from lockstep import _torch

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too


class _End:
    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __call__(self) -> None:
        self._seen.append("called")


class _Stumble(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *_: Tensor) -> Tensor:
        raise ArithmeticError("stumbled")


def _in_compiled_autograd() -> bool:
    imported, is_at_work = _torch.compiled_autograd()
    compiled = imported()
    return compiled is not None and is_at_work(compiled)


def _ends(weight: Tensor, output: Tensor) -> list[str]:
    """What becomes of a callback for the end of ``output``'s backward."""
    seen: list[str] = []

    @_torch.mark_untraced
    def on_output(_: Tensor) -> None:
        seen.append(f"compiled autograd: {_in_compiled_autograd()}")
        end = _End(seen)
        weakref.finalize(end, seen.append, "dropped")
        _torch.queue_callback()(end)

    output.register_hook(on_output)
    try:
        output.backward()
    except ArithmeticError:
        seen.append("failed")
    assert weight.grad is not None or "failed" in seen
    return seen


def test_a_callback_is_dropped_without_a_call_by_errors_and_by_compiled_autograd_alone() -> None:
    weight = torch.ones(3, requires_grad=True)
    assert _ends(weight, (weight * 2).sum()) == ["compiled autograd: False", "called", "dropped"]
    fails = _Stumble.apply(weight)  # type: ignore[no-untyped-call]
    assert _ends(weight, fails.sum()) == ["compiled autograd: False", "dropped", "failed"]
    with compiled_autograd._enable(torch.compile(backend="eager")):
        assert _ends(weight, (weight * 2).sum()) == ["compiled autograd: True", "dropped"]
    assert not _in_compiled_autograd()


@_torch.mark_untraced
def _asked(seen: list[Any]) -> None:
    seen.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())


# The compiler hides this warning when it looks, but not from a filter that makes it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_what_is_marked_runs_as_it_is_from_compiled_code_and_from_the_engine() -> None:
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    seen: list[Any] = []

    @_torch.mark_untraced
    def hook(_: Tensor) -> None:
        torch.zeros(3) + 1
        _asked(seen)

    weight = torch.ones(3, requires_grad=True)
    weight.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        loss = (weight * 2).sum()
        _asked(seen)
        loss.backward()

    torch.compile(step, backend=count)()
    assert seen == [None, None], "the compiler looks at what they call"
    assert len(graphs) == 1
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the model first"):
        torch.compile(lambda: _asked(seen), backend="eager", fullgraph=True)()


def test_transforms_active() -> None:
    active, seen = _torch.transforms_active(), []

    def look(value: Tensor) -> Tensor:
        seen.append(active())
        return value.sum()

    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    look(torch.ones(2))
    assert seen == [True, True, False]


def test_traces_backward() -> None:
    assert not _torch.traces_backward()
    if hasattr(torch._dynamo.config, "trace_autograd_ops"):  # from torch 2.12 on
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            assert _torch.traces_backward()
