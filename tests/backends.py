"""Run every test of a module once over each backend: import ``each_backend`` there."""

from __future__ import annotations

import pytest

from lockstep import knobs


@pytest.fixture(autouse=True, params=["gloo", "shm"])
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What ``lockstep.init()`` takes on the ranks of this test, unless it is told otherwise."""
    backend: str = request.param
    monkeypatch.setenv(knobs.BACKEND, backend)
    return backend
