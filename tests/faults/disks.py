"""File systems for tests: one that writes down what is done to it, and one whose n-th operation fails.

What a crash can leave behind is computed from the record, by POSIX's rules alone, which are weaker than those of any
file system in use: a write that no fsync of its file followed may be there, or not, or in part, or as zeros; a name
that was made, changed or removed and that no fsync of its folder followed may be as before or as after; all of it in
any order and combination.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.checkpoint.storage import Storage

_SECTOR = 512


@dataclass(frozen=True)
class Op:
    """One operation that changes the disk. Files and folders are numbers, since their names change."""

    #: "write" of a file; "create" a file, "make" a folder, "rename" and "remove" either in a folder; "sync" both.
    kind: str
    #: The file, or the folder that has the name.
    node: int
    name: str = ""
    #: rename: the new name.
    new: str = ""
    #: create, make, rename: what the name leads to.
    target: int = -1
    offset: int = 0
    data: bytes = b""


@dataclass
class Tree:
    """Files and folders by number; 0 is the run's folder."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytes] = field(default_factory=dict)

    def copy(self) -> Tree:
        return Tree({node: dict(names) for node, names in self.folders.items()}, dict(self.files))

    def apply(self, op: Op) -> None:
        """Do one operation, as far as what it needs is there."""
        if op.kind == "write":
            content = self.files.get(op.node, b"").ljust(op.offset, b"\0")
            self.files[op.node] = content[: op.offset] + op.data + content[op.offset + len(op.data) :]
        elif op.kind in ("create", "make"):
            self.folders[op.node][op.name] = op.target
        elif op.kind == "remove":
            self.folders[op.node].pop(op.name, None)
        elif op.kind == "rename":
            self.folders[op.node].pop(op.name, None)
            self.folders[op.node][op.new] = op.target

    def listing(self, node: int = 0, path: str = "") -> dict[str, bytes | None]:
        """Content by path; None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, target in self.folders[node].items():
            if target in self.folders:
                found[path + name] = None
                found |= self.listing(target, f"{path}{name}/")
            else:
                found[path + name] = self.files.get(target, b"")
        return found


class Recording(Storage):
    """The file system itself, and a record of all that changes it below ``root``.

    Several ranks may share one. ``forget`` names calls of fsync that are left out, as a careless program would:
    "file", "folder" (of the draft), "root".
    """

    def __init__(self, root: Path, *, forget: str = "") -> None:
        self._root, self._forget = root, forget
        self._lock = threading.RLock()
        self.tree = Tree()
        self.ops: list[Op] = []
        self._open: dict[int, int] = {}
        self._scan(root, 0)
        #: What was there, and durable, at the beginning.
        self.before = self.tree.copy()

    def _scan(self, folder: Path, node: int) -> None:
        for path in sorted(folder.iterdir()):
            number = self._new(path.is_dir())
            self.tree.folders[node][path.name] = number
            if path.is_dir():
                self._scan(path, number)
            else:
                self.tree.files[number] = path.read_bytes()

    def _new(self, is_folder: bool) -> int:
        number = len(self.tree.folders) + len(self.tree.files)
        if is_folder:
            self.tree.folders[number] = {}
        else:
            self.tree.files[number] = b""
        return number

    def _node(self, path: Path) -> int:
        node = 0
        for name in path.relative_to(self._root).parts:
            node = self.tree.folders[node][name]
        return node

    def _record(self, op: Op) -> None:
        self.ops.append(op)
        self.tree.apply(op)

    def make_folder(self, path: Path) -> None:
        with self._lock:
            super().make_folder(path)
            self._record(Op("make", self._node(path.parent), path.name, target=self._new(True)))

    def open_folder(self, path: Path) -> int:
        with self._lock:
            opened = super().open_folder(path)
            self._open[opened] = self._node(path)
            return opened

    def create(self, folder: int, name: str) -> int:
        with self._lock:
            opened = super().create(folder, name)
            self._open[opened] = self._new(False)
            self._record(Op("create", self._open[folder], name, target=self._open[opened]))
            return opened

    def open(self, folder: int, name: str, *, write: bool = False) -> int:
        with self._lock:
            opened = super().open(folder, name, write=write)
            self._open[opened] = self.tree.folders[self._open[folder]][name]
            return opened

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        with self._lock:
            super().write(file, data, offset)
            self._record(Op("write", self._open[file], offset=offset, data=bytes(data)))

    def sync(self, opened: int) -> None:
        with self._lock:
            super().sync(opened)
            node = self._open[opened]
            kind = "file" if node in self.tree.files else "folder" if node else "root"
            if kind != self._forget:
                self._record(Op("sync", node))

    def close(self, opened: int) -> None:
        with self._lock:
            super().close(opened)
            del self._open[opened]

    def rename(self, old: Path, new: Path) -> None:
        with self._lock:
            super().rename(old, new)
            parent = self._node(old.parent)
            target = self.tree.folders[parent][old.name]
            self._record(Op("rename", parent, old.name, new.name, target))

    def remove(self, folder: int, name: str) -> None:
        with self._lock:
            super().remove(folder, name)
            self._record(Op("remove", self._open[folder], name))

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            super().remove_folder(path)
            self._record(Op("remove", self._node(path.parent), path.name))


def crashes(before: Tree, ops: list[Op], *, samples: int, seed: int) -> Iterator[tuple[int, Tree]]:
    """What may be on the disk after a crash: how many operations were under way before it, and the disk.

    After each operation: nothing pending arrived; all of it did; all but one; only one; and ``samples`` combinations
    drawn at random, with torn writes. The same disk may come more than once.
    """
    draw = random.Random(seed)
    for count in range(len(ops) + 1):
        durable, pending = _settled(before, ops[:count])
        last = [number for number, op in enumerate(pending) if op.kind != "sync"]
        choices = [set(), set(last)]
        choices += [set(last) - {number} for number in last] + [{number} for number in last]
        for chosen in choices:
            yield count, _after(durable, [pending[number] for number in sorted(chosen)])
        for _ in range(samples if last else 0):
            share, names = draw.random(), draw.choice([1.0, draw.random()])  # what has no name is not seen
            kept = [
                pending[number]
                for number in last
                if draw.random() < (share if pending[number].kind == "write" else names)
            ]
            yield count, _after(durable, [_torn(op, draw) for op in kept])


def _settled(before: Tree, ops: list[Op]) -> tuple[Tree, list[Op]]:
    """What is on the disk for certain, and what may be."""
    synced = {}
    for number, op in enumerate(ops):
        if op.kind == "sync":
            synced[op.node] = number
    durable = before.copy()
    for op in ops:  # a folder is there once a name leads to it
        if op.kind == "make":
            durable.folders.setdefault(op.target, {})
    pending = []
    for number, op in enumerate(ops):
        if op.kind == "sync":
            continue
        if number < synced.get(op.node, -1):
            durable.apply(op)
        else:
            pending.append(op)
    return durable, pending


def _after(durable: Tree, kept: list[Op]) -> Tree:
    disk = durable.copy()
    for op in kept:
        disk.apply(op)
    return disk


def _torn(op: Op, draw: random.Random) -> Op:
    """A write of which some sectors arrived, or only the beginning, while the others are zeros or not there."""
    if op.kind != "write" or draw.random() < 0.3:
        return op
    edge = draw.choice([len(op.data), draw.randrange(0, len(op.data) + 1, _SECTOR)])
    sectors = [op.data[start : start + _SECTOR] for start in range(0, edge, _SECTOR)]
    share = draw.choice([1.0, draw.random()])
    kept = [sector if draw.random() < share else bytes(len(sector)) for sector in sectors]
    return replace(op, data=b"".join(kept))


def lay_down(disk: Tree, root: Path) -> None:
    """Make the disk's files and folders below ``root``, which is empty."""
    for path, content in disk.listing().items():
        if content is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(content)


class Failing(Storage):
    """The file system itself, until the operation number ``at`` (from 0) fails with ``error``.

    With ``lasting`` all operations behind it that could change the disk fail as well, as on a full or broken one.
    """

    def __init__(self, *, at: int = -1, error: int = errno.EIO, lasting: bool = False) -> None:
        self._at, self._error, self._lasting = at, error, lasting
        #: The operations so far, by name.
        self.calls: list[str] = []
        #: Whether the failure came.
        self.failed = False

    def _pass(self, name: str, *, changes: bool = False) -> None:
        number = len(self.calls)
        self.calls.append(name)
        if number == self._at or (self._lasting and changes and self.failed):
            self.failed = True
            raise OSError(self._error, os.strerror(self._error))

    def make_folder(self, path: Path) -> None:
        self._pass("make_folder", changes=True)
        super().make_folder(path)

    def open_folder(self, path: Path) -> int:
        self._pass("open_folder")
        return super().open_folder(path)

    def folders(self, path: Path) -> list[str]:
        self._pass("folders")
        return super().folders(path)

    def names(self, folder: int) -> list[str]:
        self._pass("names")
        return super().names(folder)

    def create(self, folder: int, name: str) -> int:
        self._pass("create", changes=True)
        return super().create(folder, name)

    def open(self, folder: int, name: str, *, write: bool = False) -> int:
        self._pass("open")
        return super().open(folder, name, write=write)

    def size(self, file: int) -> int:
        self._pass("size")
        return super().size(file)

    def owner(self, opened: int) -> int:
        self._pass("owner")
        return super().owner(opened)

    def write(self, file: int, data: bytes | memoryview, offset: int) -> None:
        number = len(self.calls)
        if number == self._at:  # a disk that fills up takes some of it
            super().write(file, memoryview(data)[: len(data) // 2], offset)
        self._pass("write", changes=True)
        super().write(file, data, offset)

    def read(self, file: int, into: memoryview, offset: int) -> int:
        self._pass("read")
        return super().read(file, into, offset)

    def sync(self, opened: int) -> None:
        self._pass("sync", changes=True)
        super().sync(opened)

    def lock(self, opened: int) -> bool:
        self._pass("lock")
        return super().lock(opened)

    def rename(self, old: Path, new: Path) -> None:
        self._pass("rename", changes=True)
        super().rename(old, new)

    def remove(self, folder: int, name: str) -> None:
        self._pass("remove", changes=True)
        super().remove(folder, name)

    def remove_folder(self, path: Path) -> None:
        self._pass("remove_folder", changes=True)
        super().remove_folder(path)
