"""Resume a run from its newest complete checkpoint, which all ranks find, compare and load together, or none does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from lockstep.checkpoint import rng, state
from lockstep.checkpoint.read import Contents, Search, Unsound, newest_complete, read, why_unsound
from lockstep.checkpoint.run_folder import run_folder
from lockstep.checkpoint.state import RunState
from lockstep.checkpoint.storage import Storage
from lockstep.checkpoint.together import together
from lockstep.comm.world import World
from lockstep.errors import CheckpointError
from lockstep.step.conditions import conditions, differences
from lockstep.text import counted


@dataclass(frozen=True)
class Restored:
    """The checkpoint that training resumes from."""

    #: The folder of the checkpoint.
    folder: PurePath
    #: Optimizer steps taken.
    step: int
    #: The epoch to resume in.
    epoch: int
    #: True if a part of that epoch is done.
    in_epoch: bool
    #: Number of ranks of the job that wrote it.
    world_size: int
    #: The damage to each newer checkpoint that is damaged: file, what was expected and what was found.
    skipped: tuple[str, ...]
    #: What is wrong with each newer checkpoint that is not sound: values that are not finite, ranks that differed.
    unsound: tuple[str, ...] = ()


def restored(contents: Contents, search: Search[Contents]) -> Restored:
    """Return the description of a checkpoint that the user gets."""
    manifest = contents.manifest
    return Restored(
        folder=contents.folder,
        step=manifest.step,
        epoch=manifest.epoch,
        in_epoch=manifest.in_epoch,
        world_size=manifest.world_size,
        skipped=tuple(search.damaged.values()),
        unsound=tuple(search.unsound.values()),
    )


def find(
    root: PurePath, run: RunState, world: World, *, owners: Sequence[int], strict: bool, only_sound: bool, on: Storage
) -> Search[Contents]:
    """**Collective.** Read the newest complete checkpoint that ``run`` can resume from. Changes nothing.

    Args:
        owners: the users to whom checkpoints may belong.
        strict: refuse a damaged checkpoint instead of looking for an older one.
        only_sound: pass over those that are not sound.

    Raises:
        CheckpointCorrupt: the newest is damaged, and ``strict`` is on.
        CheckpointMismatch: it is of another model, optimizer or scheduler.
        CheckpointError: the ranks do not see the same folder.
    """

    def names() -> list[str]:
        return [folder.name for folder in run_folder(root, on).checkpoints()] if world.is_main else []

    def listing() -> list[PurePath]:
        _, listings = together(world, names, lambda found: found)
        return [root / name for name in listings[0]]

    def read_and_compare(folder: PurePath) -> Contents:
        contents = read(folder, owners=owners, only_sound=only_sound, on=on)
        ranks = contents.manifest.world_size
        rng.refuse_malformed_rng(contents.parts.get("rng"), count=ranks, where=str(folder / "rng.json"))
        if "gradients" in contents.parts:
            state.refuse_malformed_orders(contents.parts["gradients"], where=str(folder / "gradients.json"))
        if "precision" in contents.parts:
            state.refuse_malformed_precision(contents.parts["precision"], where=str(folder / "precision.json"))
        run.refuse_other(contents, world_size=world.world_size)
        return contents

    def read_or_pass(folder: PurePath) -> Contents | Unsound:
        try:
            return read_and_compare(folder)
        except Unsound as passed:  # the manifest decides that, and is compared between the ranks below
            return passed

    def read_together(folder: PurePath) -> Contents:
        contents, manifests = together(
            world, lambda: read_or_pass(folder), lambda found: found.manifest.to_json().decode()
        )
        if any(manifest != manifests[0] for manifest in manifests):
            raise CheckpointError(f"the ranks see different checkpoints in {folder}: is it shared?")
        if isinstance(contents, Unsound):
            raise contents
        return contents

    return newest_complete(listing, read_together, strict=strict)


def load(contents: Contents, run: RunState, world: World) -> None:
    """**Collective.** Put a checkpoint's states into the objects of a run, all but the random number generators'.

    Raises:
        CheckpointMismatch: the loader is of another dataset.
        CheckpointError: an object does not take its state; the scheduler and the extra objects are as they were, and
            the model and the optimizer unless it was one of them. The same on every rank.
    """
    parts = contents.parts
    before, _ = together(world, run.small_states, lambda _: None)
    try:
        together(world, lambda: run.load_small(parts), lambda _: None)
        together(world, lambda: run.load_loader(parts, world.rank), lambda _: None)
    except CheckpointError:
        run.put_back(before)
        raise
    together(world, lambda: run.load_tensors(contents, world.rank), lambda _: None)


def load_generators(contents: Contents, world: World) -> None:
    """Restore this rank's random number generators; at another world size, what all ranks had in common."""
    states, world_size = contents.parts["rng"], contents.manifest.world_size
    if world_size == world.world_size:
        rng.restore_rng(states[world.rank], world.device)
    elif rng.have_common_rng(states):
        rng.restore_common_rng(states[0])


def words_on_differences(contents: Contents, search: Search[Contents], run: RunState, world: World) -> str:
    """Return the words on a run that does not resume exactly as it was; empty if it does."""
    words = []
    if search.unsound:
        words.append(f"skipped newer checkpoints: {'; '.join(search.unsound.values())}")
    if not contents.manifest.is_sound:
        words.append(why_unsound(contents.folder, contents.manifest))
    if search.damaged:
        words.append(f"skipped damaged checkpoints: {'; '.join(search.damaged.values())}")
    saved, now = contents.manifest.world_size, world.world_size
    in_slices = run.is_in_slices(contents)  # the sums and random numbers of slices do not depend on ranks
    if saved != now and not (in_slices and rng.have_common_rng(contents.parts["rng"])):
        words.append(
            f"it was written by {counted(saved, 'rank')} and there are {now} now: everything is restored but "
            + (
                "the random number generators, which the script has seeded or used differently on each rank, so what "
                "it draws between steps will not repeat"
                if in_slices
                else "the random number generators of each rank, so dropout will not repeat bit for bit"
            )
        )
    elif saved == now and not in_slices and contents.manifest.hosts not in (None, world.hosts):
        words.append(
            f"its ranks were on other machines, {_spread(contents.manifest.hosts)}, than now, {_spread(world.hosts)}: "
            "gradients are added in another order, so the run will not repeat bit for bit"
        )
    elif not rng.has_rng_of(contents.parts["rng"][0], world.device):
        words.append("it was written on another kind of device: the device's random number generator is not restored")
    others = differences(contents.manifest.versions, conditions(world.device))
    if others:
        told = "; ".join(f"{what}: {before} there, {after} here" for what, before, after in others)
        words.append(
            f"it was written under other conditions ({told}): the values are restored to the bit, but from here on "
            "results may differ in their last bits from those of an uninterrupted run, since the order in which "
            "libraries add up depends on these"
        )
    unused = run.unused(contents)
    if unused:
        words.append(
            f"it also holds {', '.join(unused)}, for which this Checkpointer has no object: pass the same objects to "
            "Checkpointer to train on, or load a model that is only evaluated by lockstep.load_weights"
        )
    return f"resuming from {contents.folder}: {'; '.join(words)}" if words else ""


def _spread(hosts: list[list[int]] | None) -> str:
    """Return which ranks were on one machine: ``0 1 | 2 3``."""
    return "all together" if hosts is None else " | ".join(" ".join(map(str, ranks)) for ranks in hosts)
