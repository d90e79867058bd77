"""The loaders of a run: global batches of pictures, each rank's slice of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch.utils.data import DataLoader

import lockstep
from examples.imagenet import transforms
from examples.imagenet.folders import Folders, Listing, find
from examples.imagenet.options import Options
from examples.imagenet.pictures import Batch, Collate, Pictures, Transform


@dataclass(frozen=True)
class Data:
    """What a run trains and tests on."""

    classes: tuple[str, ...]
    #: None with --evaluate.
    train: lockstep.ShardedLoader | None
    val: lockstep.ShardedLoader


def load(world: lockstep.World, options: Options) -> Data:
    """**Collective.** Find the pictures and share them among the ranks."""
    found = find(options.data, val_split=options.val_split, only_val=options.evaluate)
    _compare(world, found)
    testing = transforms.testing(options.augment, options.image_size)
    val = shared(options, found.val, testing, shuffle=False, at_least=world.world_size)
    train = None
    if found.train is not None:
        training = transforms.training(options.augment, options.image_size)
        train = shared(options, found.train, training, shuffle=True, at_least=1)
    return Data(found.classes, train, val)


def _compare(world: lockstep.World, found: Folders) -> None:
    """Ranks that see other files would train on other pictures, or with other labels."""
    counts = [len(found.classes), len(found.val), len(found.train or ())]
    for what, count in zip(("classes", "test pictures", "training pictures"), counts, strict=True):
        least, most = world.all_reduce(count, "min"), world.all_reduce(count, "max")
        if least != most:
            raise SystemExit(
                f"rank {world.rank} found {count} {what}, and other ranks {least} to {most}: the data's folder must be "
                "the same on all machines"
            )
    least, most = (world.all_reduce(found.digest(), op) for op in ("min", "max"))
    if least != most:
        raise SystemExit(
            f"rank {world.rank}: the ranks found as many classes and pictures, but under different names: the data's "
            "folder must be the same on all machines"
        )
    if len(found.classes) == 1 and found.train is not None:
        raise SystemExit(
            f"rank {world.rank}: there is one class only, {found.classes[0]}, and nothing to tell it from: is the "
            "folder that holds the classes' folders one further down?"
        )


def shared(
    options: Options, listing: Listing, transform: Transform, *, shuffle: bool, at_least: int
) -> lockstep.ShardedLoader:
    """**Collective.** Return a loader of this rank's slices of ``--batch-size`` pictures."""
    batches: DataLoader[Batch] = DataLoader(
        Pictures(listing, transform),  # type: ignore[arg-type]  # the collate_fn makes batches of its samples
        batch_size=max(options.batch_size, at_least),
        shuffle=shuffle,
        num_workers=options.workers,
        collate_fn=Collate(options.image_size),
        persistent_workers=shuffle and options.workers > 0,
    )
    # Replicas in threads each fetch their own part from the CPU's memory; a copy on one device would be in the way.
    return lockstep.shard(batches, to_device=options.mode != "dp")
