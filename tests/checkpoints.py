"""Write checkpoints without a job: any number of ranks as threads, over any file system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's stubs

from lockstep.checkpoint.captured import capture, divided
from lockstep.checkpoint.peers import OverStore
from lockstep.checkpoint.pruning import prune
from lockstep.checkpoint.retention import Retention
from lockstep.checkpoint.storage import POSIX, Storage
from lockstep.checkpoint.write import Place, write


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
    root: Path,
    states: Sequence[State],
    *,
    place: Place | None = None,
    on: Sequence[Storage] | None = None,
    keep: int | None = None,
    timeout: float = 20.0,
) -> list[Path | BaseException]:
    """Save as one rank for each state; what each returned or raised."""
    rule = Retention(last=keep)
    storages = on if on is not None else [POSIX] * len(states)
    where = place if place is not None else Place(1, 0, False)
    store = HashStore()

    def rank_main(rank: int) -> Path | BaseException:
        peers = OverStore(store, rank=rank, world_size=len(states), key="save", timeout=timeout)
        state = states[rank]
        named = frozenset(state.model) if state.parameters is None else state.parameters
        captured = capture(state.model, state.parts, parameters=named, is_main=rank == 0)
        share = divided(captured, peers.gather(captured.outline()), rank=rank)
        if share.whole is not None:
            share = share.with_texts(state.texts)
        storage = storages[rank]
        try:
            return write(
                root, share, where, peers=peers, tidy=lambda new: prune(root, new, rule, on=storage), on=storage
            )
        except BaseException as error:  # noqa: BLE001  (handed to the test)
            return error

    if len(states) == 1:  # in this thread: quicker, and what it does comes in one order
        return [rank_main(0)]
    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(rank_main, range(len(states))))


def save_alone(root: Path, model: Mapping[str, Any], *, step: int = 1, **options: Any) -> Path:
    """One whole checkpoint by one rank; its folder."""
    (made,) = save(root, [State(model)], place=Place(step, 0, False), **options)
    if isinstance(made, BaseException):
        raise made
    return made


def some_tensors(seed: int, sizes: Sequence[int]) -> dict[str, torch.Tensor]:
    """Float tensors of these many elements, no two alike."""
    made = torch.Generator().manual_seed(seed)
    return {f"layer{number}.weight": torch.randn(size, generator=made) for number, size in enumerate(sizes)}
