"""Zygotes for tests that start ranks from their own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lockstep import knobs
from lockstep.launch import channel
from tests import warm
from tests.launching import LIMIT


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zygote without torch, for tests of processes alone."""
    monkeypatch.setenv(knobs.PRELOAD, "")


@pytest.fixture
def warm_zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zygote with torch that need not import it."""
    started: list[warm.Zygote] = []

    def start(argv: list[str], control: int, env: dict[str, str]) -> int:
        started.append(warm.Zygote(argv, control, env))
        return started[-1].pid

    monkeypatch.setattr(channel, "start_zygote", start)
    yield
    for zygote in started:
        assert zygote.wait(LIMIT) == 0
