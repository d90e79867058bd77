"""A run goes on from its newest whole checkpoint: found, compared and loaded by all ranks together, or by none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint import folders, rng
from lockstep.checkpoint.guard import reading
from lockstep.checkpoint.load import Contents, read
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.together import together
from lockstep.checkpoint.training import Stateful, Training
from lockstep.comm.world import World
from lockstep.errors import CheckpointCorrupt, CheckpointError


@dataclass(frozen=True)
class Restored:
    """The checkpoint that training goes on from."""

    #: Its folder.
    folder: Path
    #: Optimizer steps taken.
    step: int
    #: The epoch to go on with, and whether some of it is done.
    epoch: int
    in_epoch: bool
    #: Ranks of the job that wrote it.
    world_size: int
    #: Newer checkpoints that are damaged: file, what was expected and what was found.
    skipped: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint of a run, read and verified; and what is wrong with newer ones."""

    contents: Contents
    skipped: tuple[str, ...]

    def restored(self) -> Restored:
        """**Local.** What the user is told."""
        manifest = self.contents.manifest
        return Restored(
            folder=self.contents.folder,
            step=manifest.step,
            epoch=manifest.epoch,
            in_epoch=manifest.in_epoch,
            world_size=manifest.world_size,
            skipped=self.skipped,
        )


def find(
    root: Path,
    training: Training,
    world: World,
    *,
    owners: Sequence[int],
    strict: bool,
    damaged: set[str],
    on: Storage,
) -> Found | None:
    """**Collective.** The newest whole checkpoint in ``root``, or None if there is none at all. Changes nothing.

    Args:
        root: the run's folder.
        training: what is to go on.
        world: its ranks.
        owners: the users whose checkpoints are taken.
        strict: refuse a damaged checkpoint instead of looking for an older one.
        damaged: receives the names of those that were skipped, also if there is an error in the end.
        on: the file system.

    Raises:
        CheckpointCorrupt: no checkpoint there is whole (with ``strict``: the newest is not).
        CheckpointMismatch: it is of another model, optimizer or scheduler.
        CheckpointError: the ranks do not see the same folder.
    """

    def names() -> list[str]:
        return [folder.name for folder in folders.checkpoints(root, on=on)] if world.is_main else []

    def read_and_compare(folder: Path) -> Contents:
        with reading(folder):
            contents = read(folder, owners=owners, on=on)
        ranks = contents.manifest.world_size
        rng.refuse_malformed(contents.parts.get("rng"), count=ranks, where=str(folder / "rng.json"))
        training.refuse_other(contents, world_size=world.world_size)
        return contents

    _, listings = together(world, names, lambda found: found)
    skipped: list[str] = []
    for name in listings[0]:
        try:
            contents, digests = together(
                world,
                lambda name=name: read_and_compare(root / name),  # type: ignore[misc]
                lambda found: found.manifest.to_json().decode(),
            )
        except CheckpointCorrupt as error:
            if strict:
                raise
            damaged.add(name)
            skipped.append(str(error))
            continue
        if any(digest != digests[0] for digest in digests):
            raise CheckpointError(f"the ranks see different checkpoints in {root / name}: is it shared?")
        return Found(contents, tuple(skipped))
    if skipped:
        raise CheckpointCorrupt(f"{root}: no checkpoint there is whole: {'; '.join(skipped)}")
    return None


def load(contents: Contents, training: Training, world: World) -> None:
    """**Collective.** Put a checkpoint's states into the objects of a run, all but the random number generators'.

    Raises:
        CheckpointMismatch: the loader is of another dataset.
        CheckpointError: an object does not take its state; the scheduler and the extra objects are as they were, and
            the model and the optimizer unless it was one of them. The same on every rank.
    """
    parts = contents.parts
    undo: list[tuple[Stateful, Any]] = []
    try:
        together(world, lambda: training.load_small(parts, undo), lambda _: None)
        together(world, lambda: training.load_loader(parts, world.rank), lambda _: None)
    except CheckpointError:
        for thing, before in reversed(undo):
            thing.load_state_dict(before)
        raise
    together(world, lambda: training.load_tensors(contents), lambda _: None)


def load_generators(contents: Contents, world: World) -> None:
    """**Local.** This rank's random numbers go on as they were, if there are as many ranks as there were."""
    if contents.manifest.world_size == world.world_size:
        rng.restore(contents.parts["rng"][world.rank], world.device)


def words_on_differences(found: Found, training: Training, world: World) -> str:
    """**Local.** What to tell of a run that does not go on quite as it was; empty if it does."""
    contents, words = found.contents, []
    if found.skipped:
        words.append(f"skipped damaged checkpoints: {'; '.join(found.skipped)}")
    saved, now = contents.manifest.world_size, world.world_size
    if saved != now:
        words.append(
            f"it was written by {saved} rank(s) and there are {now} now: everything is restored but the random "
            "number generators, so dropout will not repeat bit for bit"
        )
    elif (contents.parts["rng"][0]["cuda"] is None) != (world.device.type != "cuda"):
        words.append("it was written on another kind of device: the GPU's random number generator is not restored")
    unused = training.unused(contents)
    if unused:
        words.append(f"it also holds {', '.join(unused)}, for which nothing was given here")
    return f"going on from {contents.folder}: {'; '.join(words)}" if words else ""
