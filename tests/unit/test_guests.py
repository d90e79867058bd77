"""Who may be a rank: not a process that another process of the same rank has started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep import EnvironmentMismatch, knobs
from lockstep.comm import guests
from lockstep.identity import Identity, place
from lockstep.job.page import Cell, Pages

_RANK = Identity(0, 2, 0, 2, 0, launched=True)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (knobs.JOINED, knobs.RANK_PROCESS, knobs.JOB_DIR, knobs.STORE, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (_RANK.to_environment() | {"MASTER_PORT": "1234"}).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_child_of_a_rank_in_the_world_is_refused_until_that_leaves(as_rank: pytest.MonkeyPatch) -> None:
    guests.refuse(_RANK)
    as_rank.setenv(knobs.JOINED, f"1 {place()}")
    with pytest.raises(
        EnvironmentMismatch, match=r"was started by rank 0 of 2 \(process 1\), which has joined the world"
    ):
        guests.refuse(_RANK)
    guests.unmark()
    assert knobs.JOINED in os.environ, "another process's mark"
    guests.mark(_RANK)
    guests.refuse(_RANK)
    guests.unmark()
    assert knobs.JOINED not in os.environ


def test_another_job_that_a_rank_starts_is_none_of_its_guests(as_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank.setenv(knobs.JOINED, f"1 {place()}")
    as_rank.setenv(knobs.RANK_PROCESS, f"1 {place()}")
    assert not guests.described_anew()
    as_rank.setenv("MASTER_PORT", "4321")
    assert guests.described_anew()
    _train(tmp_path, as_rank)
    guests.refuse(_RANK)


def test_a_child_of_ranks_that_train_without_init_is_refused(as_rank: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_rank.setenv(knobs.RANK_PROCESS, f"1 {place()}")
    as_rank.setenv(knobs.JOB_DIR, str(tmp_path))
    guests.refuse(_RANK)  # a wrapper's: its ranks take no steps of their own
    _train(tmp_path, as_rank)
    with pytest.raises(EnvironmentMismatch, match="the processes that the launcher started as its ranks already train"):
        guests.refuse(_RANK)
    guests.refuse(Identity(0, 1, 0, 1, 0, launched=True))  # it would wait for nobody
    as_rank.setenv(knobs.RANK_PROCESS, f"{os.getpid()} {place()}")
    guests.refuse(_RANK)


def _train(folder: Path, env: pytest.MonkeyPatch) -> None:
    env.setenv(knobs.JOB_DIR, str(folder))
    pages = Pages(folder, 2)
    pages.set(1, Cell.STEPS, 3)
    pages.close()
