"""Which pictures there are and of which class: names of files alone, no picture is opened."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

#: Lower case. JPEG is what ImageNet has, whatever its files are called.
EXTENSIONS = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


@dataclass(frozen=True)
class Listing:
    """Pictures and their classes, in arrays: a million Python objects would be copied into every worker, since reading
    one changes its reference count."""

    root: Path
    #: Paths below ``root``, as the file system has them: bytes [n].
    names: np.ndarray
    #: Position of the class among the classes: int64 [n].
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Return the path below ``root`` of a picture."""
        return os.fsdecode(bytes(self.names[index]))

    def chosen(self, mask: np.ndarray) -> Listing:
        """Return the pictures where ``mask`` (bool [n]) is true."""
        return Listing(self.root, self.names[mask], self.labels[mask])


@dataclass(frozen=True)
class Folders:
    """What there is to train and to test on."""

    classes: tuple[str, ...]
    #: None if it was not asked for.
    train: Listing | None
    val: Listing

    def digest(self) -> int:
        """Return a number below 2^63 that two sets of folders share only if they have the same names in them."""
        found = hashlib.blake2b(repr(self.classes).encode(errors="surrogateescape"), digest_size=7)
        for listing in (self.val, self.train):
            if listing is not None:
                found.update(listing.names.tobytes())
                found.update(listing.labels.tobytes())
        return int.from_bytes(found.digest(), "little")


def find(data: Path, *, val_split: float, only_val: bool) -> Folders:
    """Return the pictures under ``data``, the same on every rank that sees the same files.

    Args:
        data: has ``train/<class>/`` and ``val/<class>/`` (or ``test/<class>/``). With a split, ``val/`` is not looked
            at, and ``data`` may hold the classes' folders itself.
        val_split: the part of the training pictures to test on instead, or 0.
        only_val: leave the training pictures out (their classes still count, if they are there).
    """
    train_root, val_root = data / "train", data / "val"
    if not val_root.is_dir() and (data / "test").is_dir():
        val_root = data / "test"
    if val_split and not train_root.is_dir():
        train_root = data
    if only_val and not val_split and not train_root.is_dir():
        classes = _classes(val_root)
        return Folders(classes, None, _listing(val_root, classes))
    classes = _classes(train_root)
    if val_split:
        everything = _training(train_root, classes)
        held_out = _held_out(everything, val_split)
        return Folders(classes, everything.chosen(~held_out), everything.chosen(held_out))
    if not val_root.is_dir():
        raise SystemExit(
            f"{val_root} is not there: put pictures to test on in {val_root}/<class>/, or use --val-split 0.1"
        )
    unknown = sorted(set(_classes(val_root)) - set(classes))
    if unknown:
        raise SystemExit(f"{val_root} has classes that {train_root} has not: {', '.join(unknown[:5])}")
    return Folders(classes, None if only_val else _training(train_root, classes), _listing(val_root, classes))


def _classes(root: Path) -> tuple[str, ...]:
    if not root.is_dir():
        raise SystemExit(f"{root} is not there: expected a folder for each class in it, with the pictures of the class")
    # Hidden ones are tools' own, such as .ipynb_checkpoints.
    classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."))
    if not classes:
        raise SystemExit(f"{root} holds no folders: expected one for each class, with the pictures of the class")
    return classes


def _listing(root: Path, classes: Sequence[str]) -> Listing:
    names: list[bytes] = []
    labels: list[int] = []
    for label, folder in enumerate(classes):
        if not (root / folder).is_dir():
            continue  # a class without pictures to test on
        # Below folders of folders as well, as torchvision's ImageFolder looks.
        found = sorted(
            os.path.relpath(os.path.join(parent, file), root)
            for parent, _, files in os.walk(root / folder, followlinks=True)
            for file in files
            if file.lower().endswith(EXTENSIONS) and file[0] != "."  # "._x.jpg" is macOS's note about x.jpg
        )
        names += [os.fsencode(name) for name in found]
        labels += [label] * len(found)
    if not names:
        raise SystemExit(f"{root}: no pictures in its classes' folders (looked for {', '.join(EXTENSIONS)})")
    return Listing(root, np.array(names, dtype=np.bytes_), np.array(labels, dtype=np.int64))


def _training(root: Path, classes: Sequence[str]) -> Listing:
    """List pictures to train on, some of each class."""
    listing = _listing(root, classes)
    counts = np.bincount(listing.labels, minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        raise SystemExit(
            f"{root} has no pictures of {len(empty)} of its {len(classes)} classes: {', '.join(empty[:5])}; put some "
            "into their folders, or remove these"
        )
    return listing


def _held_out(listing: Listing, fraction: float) -> np.ndarray:
    """Return the pictures with the smallest digests of their names: the same ones in every run, on every rank, with any
    seed, and nearly the same ones after pictures are added."""
    count = round(len(listing) * fraction)
    if not 0 < count < len(listing):
        raise SystemExit(f"--val-split {fraction}: of {len(listing)} pictures that leaves {count} to test on")
    digests = [hashlib.blake2b(bytes(name), digest_size=8).digest() for name in listing.names]
    mask = np.zeros(len(listing), dtype=bool)
    mask[sorted(range(len(listing)), key=lambda index: digests[index])[:count]] = True
    return mask
