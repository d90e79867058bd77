"""Who is a rank of a meeting at a port: one process for each number, all of one world, and none of a meeting before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not in torch's stubs
    HashStore,
    Store,
)

from lockstep import EnvironmentMismatch, RendezvousError, _proc
from lockstep.comm import roll_call
from lockstep.comm.group import meeting
from lockstep.comm.group.meeting import Whereabouts
from lockstep.comm.roll_call import call_roll
from lockstep.identity import Identity
from tests.launching import LIMIT, wait_for


def _come(
    store: Store, rank: int, *, size: int = 2, world: str = "", is_agents: bool = False, timeout: float = LIMIT
) -> Store:
    identity = Identity(rank, size, rank, size, 0, launched=True)
    return call_roll(store, identity, where="n0:1234", world=world, is_agents=is_agents, timeout=timeout)


class _Coming:
    """A rank that comes on a thread of its own."""

    def __init__(self, come: Callable[[], Store]) -> None:
        pool = ThreadPoolExecutor(1)
        self._got = pool.submit(come)
        pool.shutdown(wait=False)  # the thread ends when the rank has come

    def result(self) -> Store:
        return self._got.result(2 * LIMIT)


class _ByHand:
    """In the place of ``time`` where ranks meet: the test says how late it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._looks = 0.0, 0
        for module in (roll_call, meeting):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, _: float) -> None:
        self._looks += 1
        time.sleep(0.001)

    def wait_for_looks(self, number: int) -> None:
        """Wait until who waits has looked so many more times."""
        before = self._looks
        wait_for(lambda: self._looks >= before + number, "more looks")


def _opened(store: Store, size: int = 2) -> str:
    """The name of the meeting, once there is one."""
    wait_for(lambda: store.check([roll_call._key(size)]), "a meeting")
    name: str = json.loads(store.get(roll_call._key(size)))["name"]
    return name


def _wait_for_another(store: Store, key: str, than: str = "") -> None:
    wait_for(lambda: store.check([key]) and store.get(key).decode() != than, f"another {key}")


def _together(store: Store, size: int = 2) -> list[Store]:
    ranks = [_Coming(lambda rank=rank: _come(store, rank, size=size)) for rank in range(size)]  # type: ignore[misc]
    return [rank.result() for rank in ranks]


def _is_shared(stores: list[Store]) -> bool:
    stores[0].set("a key of its own", "")
    return all(each.check(["a key of its own"]) for each in stores)


def _another(**changes: object) -> str:
    """What another process writes, here or elsewhere."""
    member = roll_call._Member(process=replace(Whereabouts.mine(), **changes))  # type: ignore[arg-type]
    return json.dumps(asdict(member))


def test_each_meeting_has_a_part_of_the_store_for_itself() -> None:
    store = HashStore()
    first = _together(store)
    second = _together(store, size=3)
    third = _together(store)
    assert all(map(_is_shared, (first, second)))
    assert not third[1].check(["a key of its own"])


def test_who_came_in_vain_to_a_meeting_before_comes_to_the_next() -> None:
    """As ranks that torchrun starts again in the same store: rank 0 had waited, and is started again as the second."""
    store = HashStore()
    with pytest.raises(RendezvousError, match="rank 0 of 2: rank 1 did not come"):
        _come(store, 0, timeout=0.05)
    early = _Coming(lambda: _come(store, 1))
    _wait_for_another(store, f"{_opened(store)}/here/1")
    late = _come(store, 0)
    assert _is_shared([late, early.result()])


def test_who_comes_in_place_of_a_process_that_has_gone_is_waited_for() -> None:
    """Rank 1 had come, and has gone before rank 2 came: the one in its place is of this meeting."""
    store = HashStore()
    waits = _Coming(lambda: _come(store, 0, size=3))
    name, failed = _opened(store, 3), _another(boot_id="of a machine that failed")
    store.set(f"{name}/here/1", failed)
    instead = _Coming(lambda: _come(store, 1, size=3))
    _wait_for_another(store, f"{name}/here/1", failed)
    assert _is_shared([_come(store, 2, size=3), instead.result(), waits.result()])


def _begun_with(told: str) -> HashStore:
    """A store in which rank 0 has begun with another process as rank 1."""
    store = HashStore()
    store.set(roll_call._key(2), json.dumps({"world": "", "name": "n"}))
    store.set("n/members", json.dumps({1: told}))
    return store


def test_a_second_process_of_one_rank_on_this_machine_is_refused_at_once() -> None:
    parent = os.getppid()
    store = _begun_with(_another(pid=parent, started=_proc.started(parent)))
    with pytest.raises(EnvironmentMismatch, match=rf"rank 1 of 2 is there already at n0:1234, as process {parent} of"):
        _come(store, 1)
    waits = _Coming(lambda: _come(store, 1, is_agents=True))  # there it may be left of a start before
    _wait_for_another(store, "n/here/1")
    assert _is_shared([_come(store, 0, is_agents=True), waits.result()])


def test_the_first_process_of_a_rank_has_the_place() -> None:
    """Also while rank 0 still waits for others."""
    store, parent = HashStore(), os.getppid()
    waits = _Coming(lambda: _come(store, 0, size=3))
    name, first = _opened(store, 3), _another(pid=parent, started=_proc.started(parent))
    store.set(f"{name}/here/1", first)
    with pytest.raises(EnvironmentMismatch, match="two jobs meet at one port, or two processes have RANK=1"):
        _come(store, 1, size=3)
    assert store.get(f"{name}/here/1").decode() == first
    assert _is_shared([_come(store, 2, size=3), waits.result()])


def test_a_rank_that_gives_up_is_not_counted_on() -> None:
    store = HashStore()
    waits = _Coming(lambda: _come(store, 0, size=3))
    name = _opened(store, 3)
    with pytest.raises(RendezvousError, match="rank 0 has opened a meeting at n0:1234, and not all ranks have come"):
        _come(store, 1, size=3, timeout=0.05)
    assert store.get(f"{name}/here/1") == b""
    other = _Coming(lambda: _come(store, 2, size=3))
    _wait_for_another(store, f"{name}/here/2")
    assert _is_shared([_come(store, 1, size=3), other.result(), waits.result()])


def test_a_rank_that_gives_up_leaves_the_place_to_who_has_taken_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match="rank 0 of 3: rank 1 did not come"):
        _come(store, 0, size=3, timeout=0.05)
    key, instead = f"{_opened(store, 3)}/here/1", _another(boot_id="another")
    clock = _ByHand(monkeypatch)
    gives_up = _Coming(lambda: _come(store, 1, size=3))
    _wait_for_another(store, key)
    store.set(key, instead)
    clock.now += 2 * LIMIT
    with pytest.raises(RendezvousError, match="not all ranks have come"):
        gives_up.result()
    assert store.get(key).decode() == instead


def test_rank_0_names_who_gave_up_and_did_not_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = HashStore(), _ByHand(monkeypatch)
    waits = _Coming(lambda: _come(store, 0))
    store.set(f"{_opened(store)}/here/1", "")
    clock.wait_for_looks(2)
    clock.now += 2 * LIMIT
    with pytest.raises(RendezvousError, match="rank 0 of 2: rank 1 came, and gave up before all were there"):
        waits.result()


def test_a_lone_child_of_a_rank_leaves_the_ranks_meeting_alone() -> None:
    store = HashStore()
    waits = _Coming(lambda: _come(store, 0))
    _opened(store)
    _come(store, 0, size=1)
    assert _is_shared([_come(store, 1), waits.result()])


@pytest.mark.parametrize("told", ["[]", "{}", "yes", '{"world": 3}'])
def test_what_another_program_has_written_is_named(told: str) -> None:
    store = HashStore()
    store.set(roll_call._key(2), told)
    with pytest.raises(RendezvousError, match="what the store at n0:1234 holds is of another program, or of another"):
        _come(store, 1)


@pytest.mark.parametrize("where", ["gone", "elsewhere"])
def test_who_finds_another_process_in_its_place_waits_for_the_next_meeting(where: str) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    store = _begun_with(_another(pid=gone.pid, started=1) if where == "gone" else _another(boot_id="another"))
    with pytest.raises(RendezvousError, match=r"has begun with another process in this one's place, .* start rank 0"):
        _come(store, 1, timeout=0.05)
    waits = _Coming(lambda: _come(store, 1))
    _wait_for_another(store, "n/here/1")
    assert _is_shared([_come(store, 0), waits.result()])


def test_rank_0_of_another_world_is_refused_and_one_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match="a store answers at n0:1234, but no rank 0 of a world of this size"):
        _come(store, 1, timeout=0.05)
    with pytest.raises(RendezvousError, match="rank 1 did not come"):
        _come(store, 0, world="Slurm's job 7, step 0", timeout=0.05)
    with pytest.raises(EnvironmentMismatch, match="belongs to a job without a name, and found rank 0 of Slurm's job 7"):
        _come(store, 1)
    with pytest.raises(RendezvousError, match="rank 0 has opened a meeting at n0:1234, and not"):
        _come(store, 1, world="Slurm's job 7, step 0", timeout=0.05)
