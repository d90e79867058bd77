"""Who sits where ranks meet at a port: one process for each number, all of one world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep import EnvironmentMismatch, RendezvousError, _proc
from lockstep.comm import seats
from lockstep.comm.group.meeting import Whereabouts
from lockstep.comm.seats import Seat
from lockstep.identity import Identity

_RANKS = [Identity(rank, 2, rank, 2, 0, launched=True) for rank in range(2)]


def _take(store: HashStore, rank: int, world: str = "") -> None:
    seats.take(store, _RANKS[rank], where="n0:1234", world=world, timeout=0.1)


def _another(pid: int, started: int) -> Seat:
    return replace(Seat.mine(""), process=replace(Whereabouts.mine(), pid=pid, started=started))


def test_a_process_keeps_its_seat() -> None:
    store = HashStore()
    _take(store, 0)
    for _ in range(2):
        _take(store, 1)


def test_a_seat_is_written_and_read() -> None:
    seat = Seat.mine("Slurm's job 7, step 0")
    assert Seat.parse(seat.to_text()) == seat
    assert not seat.is_deserted()


def test_a_second_process_of_one_rank_is_refused() -> None:
    store = HashStore()
    _take(store, 0)
    parent = os.getppid()
    store.set("1", _another(parent, _proc.started(parent) or 0).to_text())
    with pytest.raises(EnvironmentMismatch, match=rf"rank 1 of 2 is there already at n0:1234: process {parent} on "):
        _take(store, 1)


def test_the_seat_of_a_process_that_has_gone_is_free() -> None:
    store = HashStore()
    _take(store, 0)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store.set("1", _another(gone.pid, 1).to_text())
    _take(store, 1)
    assert json.loads(store.get("1"))["process"] == asdict(Whereabouts.mine())


def test_the_seat_of_a_process_on_another_machine_is_not_free() -> None:
    store = HashStore()
    away = replace(Seat.mine(""), host="n1", process=replace(Whereabouts.mine(), boot_id="another"))
    store.set("0", away.to_text())
    with pytest.raises(EnvironmentMismatch, match=r"on n1\. Two jobs meet at one port, or two processes have RANK=0\."):
        _take(store, 0)


def test_rank_0_of_another_world_is_refused_and_one_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match="a store answers at n0:1234, but rank 0 wrote nothing there"):
        _take(store, 1)
    _take(store, 0, "Slurm's job 7, step 0")
    with pytest.raises(EnvironmentMismatch, match="belongs to a job without a name, and found rank 0 of Slurm's job 7"):
        _take(store, 1)
