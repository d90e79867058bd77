"""Every private name of torch that lockstep uses does what it is used for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lockstep import _torch


def test_runs_plainly_is_false_inside_transforms_modes_and_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")  # fake tensors set it if it is not there
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
