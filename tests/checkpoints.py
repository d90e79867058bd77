"""Write checkpoints without a job: any number of ranks as threads, over any file system."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.checkpoint import folders
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.plan import Outline, StateLayout, plan_writes
from lockstep.checkpoint.read import find_damage, read_manifest
from lockstep.checkpoint.retention import Retention, prune
from lockstep.checkpoint.save import write
from lockstep.checkpoint.state import Moment
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.comm.peers import OverStore, Peers
from lockstep.errors import CheckpointCorrupt
from tests.launching import LIMIT


class _Turns:
    """Ranks as threads of which one runs at a time, from one exchange of records to the next: always the same order."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._turn = 0
        self._running = list(range(world_size))
        self._rounds: list[dict[int, Any]] = []

    def wait(self, rank: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == rank, timeout=LIMIT)

    def exchange(self, rank: int, number: int, record: Any) -> list[Any]:
        with self._changed:
            if len(self._rounds) == number:
                self._rounds.append({})
            records = self._rounds[number]
            records[rank] = json.loads(json.dumps(record))
            self._next(rank)
        self.wait(rank)
        return [records[other] for other in sorted(records)]

    def leave(self, rank: int) -> None:
        with self._changed:
            self._next(rank)
            self._running.remove(rank)

    def _next(self, rank: int) -> None:
        self._turn = self._running[(self._running.index(rank) + 1) % len(self._running)]
        self._changed.notify_all()


class InTurn:
    """One rank's peers in :class:`_Turns`."""

    def __init__(self, turns: _Turns, rank: int, world_size: int) -> None:
        self._turns, self.rank, self.world_size, self._round = turns, rank, world_size, 0

    def gather(self, record: Any) -> list[Any]:
        """Every rank's record."""
        self._round += 1
        return self._turns.exchange(self.rank, self._round - 1, record)


@dataclass(frozen=True)
class State:
    """What one rank has to save."""

    model: Mapping[str, Any]
    #: Names in ``model`` that are parameters. None: all.
    parameters: frozenset[str] | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    #: JSON files of rank 0.
    texts: Mapping[str, bytes] = field(default_factory=lambda: {"rng.json": b"[]"})


def save(
    root: PurePath,
    states: Sequence[State],
    *,
    place: Moment | None = None,
    on: Sequence[Storage] | None = None,
    keep: int | None = None,
    in_turn: bool = False,
) -> list[Any]:
    """Save as one rank for each state; what each returned or raised.

    With ``in_turn`` one rank runs at a time, so that what they do comes in the same order each time.
    """
    rule = Retention(last=keep)
    storages = on if on is not None else [POSIX] * len(states)
    where = place if place is not None else Moment(1, 0, False)
    size, store, turns = len(states), HashStore(), _Turns(len(states))

    def rank_main(rank: int) -> PurePath | BaseException:
        if not in_turn:
            return rank_saves(rank, OverStore(store, rank=rank, world_size=size, key="save", timeout=LIMIT))
        turns.wait(rank)
        try:
            return rank_saves(rank, InTurn(turns, rank, size))
        finally:
            turns.leave(rank)

    def rank_saves(rank: int, peers: Peers) -> PurePath | BaseException:
        state = states[rank]
        named = frozenset(state.model) if state.parameters is None else state.parameters
        layout = StateLayout.of(state.model, state.parts, parameters=named, is_main=rank == 0)
        outlines = [Outline.from_json(record) for record in peers.gather(layout.outline().to_json())]
        plan = plan_writes(layout, outlines, rank=rank, texts=state.texts)
        storage = storages[rank]
        try:
            return write(
                root,
                plan,
                where,
                peers=peers,
                check=lambda: None,
                tidy=lambda new, _manifest: prune(root, new, rule, on=storage),
                on=storage,
            ).folder
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            return error

    if len(states) == 1:  # in this thread: quicker, and what it does comes in one order
        return [rank_main(0)]
    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(rank_main, range(len(states))))


def save_alone(root: Path, model: Mapping[str, Any], *, step: int = 1, **options: Any) -> Path:
    """One whole checkpoint by one rank; its folder."""
    (made,) = save(root, [State(model)], place=Moment(step, 0, False), **options)
    if isinstance(made, BaseException):
        raise made
    return Path(made)


def remove_one(folder: Path) -> None:
    """Remove a checkpoint as pruning does, whoever reads it."""
    with folders.renamed(folder) as leftover:
        folders.remove_tree(leftover)


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is whole; raises the first damage there is."""
    for damage in find_damage(folder):
        raise CheckpointCorrupt(damage)
    return read_manifest(folder)


def some_tensors(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Float tensors of these many elements, no two alike."""
    made = torch.Generator().manual_seed(seed)
    return {f"layer{number}.weight": torch.randn(size, generator=made) for number, size in enumerate(sizes)}
