"""What a checkpoint costs training: lockstep beside torch.save on rank 0 and torch.distributed.checkpoint (DCP).

Every way saves the same state, a model and its Adam, from the same ranks into the same folder. The ways take turns,
each round beginning with another one; medians are shown, with the fastest and slowest round.

*Stall*: how long the slowest rank's call takes, so how long training stands still. *Total*: until the checkpoint is
complete, and on the disk itself where the way has fsync. What a way left is removed before the next one's turn.

- ``torch.save``: rank 0 writes the state dicts into one file, the other ranks wait at a barrier. *With fsync*: into
  another name, fsynced, renamed, and the folder fsynced, which is what it takes to survive a power cut.
- ``DCP``: ``torch.distributed.checkpoint``, over a gloo group. It fsyncs its files unless told not to, but never the
  folder they are in. ``async_save`` once as it is, and once with a stager that keeps its memory for the next save.
- ``one memory copy``: rank 0 copies all tensors of the state into memory that it has used before.

Reading: every byte into memory of one's own, from the page cache. lockstep verifies every digest on the way;
``torch.load`` maps its file and copies each tensor. Alone: rank 0 reads while the others wait. Together: all ranks
restore model and optimizer at the same time.

    python -m benchmarks.checkpoint [--quick] [--write] [--folder FOLDER] [--megabytes 400] [--ranks 2]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

import lockstep
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep.checkpoint.read import read
from lockstep.checkpoint.storage import Storage


class NoSync(Storage):
    """Leaves it to the kernel when things reach the disk."""

    def sync(self, opened: int) -> None: ...


class State:
    """What is saved: a model and Adam's two moments, three numbers for each parameter."""

    def __init__(self, megabytes: int) -> None:
        width = 1024
        layers = max(1, round(megabytes * 1e6 / (3 * 4 * width * width)))
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def dicts(self) -> dict[str, Any]:
        """The state dicts."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        """All of it."""
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return [*self.model.parameters(), *moments]


@dataclass(frozen=True)
class Way:
    """One way to save. Called with a folder that does not exist yet; returns what is to be waited for."""

    name: str
    begin: Callable[[Path], Callable[[], object] | None]


class Lockstep:
    """lockstep's own ways, one Checkpointer for each, so that each is as in a run of its own."""

    def __init__(self, state: State, root: Path, *, sync: bool) -> None:
        self._state, self._root, self._sync = state, root, sync
        self._saved: lockstep.Checkpointer | None = None

    def _checkpointer(self) -> lockstep.Checkpointer:
        if self._saved is None:
            self._saved = lockstep.Checkpointer(
                self._root, model=self._state.model, optimizer=self._state.optimizer, keep=None
            )
            if not self._sync:
                self._saved._storage = NoSync()  # no public switch: a checkpoint without fsync is none
        return self._saved

    def save(self, _: Path) -> None:
        """**Collective.**"""
        self._checkpointer().save()

    def async_save(self, _: Path) -> Callable[[], object]:
        """**Collective.**"""
        saved = self._checkpointer()
        saved.async_save()
        return saved.wait


def _torch_save(state: State, path: Path, *, sync: bool) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
        with open(path / "state.tmp", "wb") as file:
            torch.save(state.dicts(), file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.rename(path / "state.tmp", path / "state.pt")
        if sync:
            for folder in (path, path.parent):
                opened = os.open(folder, os.O_RDONLY)
                os.fsync(opened)
                os.close(opened)
    dist.barrier()


def _dcp_ways(state: State, group: dist.ProcessGroup) -> list[Way]:
    def save(path: Path, sync: bool) -> None:
        dcp.save(state.dicts(), storage_writer=FileSystemWriter(path, sync_files=sync), process_group=group)

    def async_save(path: Path, stager: AsyncStager | None) -> Callable[[], object]:
        future: Any = dcp.async_save(
            state.dicts(), storage_writer=FileSystemWriter(path), process_group=group, async_stager=stager
        )
        return lambda: future.result()

    # Its other options need a GPU.
    keeping = DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
    )
    return [
        Way("DCP save, fsync", lambda path: save(path, True)),
        Way("DCP save, no fsync", lambda path: save(path, False)),
        Way("DCP async_save, fsync", lambda path: async_save(path, None)),
        Way("DCP async_save, kept memory, fsync", lambda path: async_save(path, keeping)),
    ]


def _ways(state: State, root: Path, group: dist.ProcessGroup) -> list[Way]:
    ours = {sync: Lockstep(state, root / f"lockstep-{sync}", sync=sync) for sync in (True, False)}
    return [
        Way("lockstep save, fsync", ours[True].save),
        Way("lockstep save, no fsync", ours[False].save),
        Way("lockstep async_save, fsync", ours[True].async_save),
        Way("torch.save, fsync", lambda path: _torch_save(state, path, sync=True)),
        Way("torch.save, no fsync", lambda path: _torch_save(state, path, sync=False)),
        *_dcp_ways(state, group),
    ]


def _slowest(seconds: float) -> float:
    return lockstep.world().all_reduce(seconds, "max")


def _measure_saves(state: State, root: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Stall and total of each way, in seconds, round by round."""
    world = lockstep.world()
    group = dist.new_group(backend="gloo")
    ways = _ways(state, root, group)
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    copies = found["one memory copy"] = []
    kept = [torch.empty_like(tensor) for tensor in state.tensors()]
    for number in range(-1, rounds):  # the first round warms up
        for turn in range(len(ways)):
            way, path = ways[(number + turn) % len(ways)], root / f"other-{number}-{turn}"
            world.barrier()
            begun = time.perf_counter()
            wait = way.begin(path)
            stall = _slowest(time.perf_counter() - begun)
            if wait is not None:
                wait()
            total = _slowest(time.perf_counter() - begun) if wait is not None else stall
            if number >= 0:
                found[way.name].append((stall, total))
            world.barrier()
            if world.is_main:
                for left in (path, *root.glob("lockstep-*/step-*")):
                    shutil.rmtree(left, ignore_errors=True)
        world.barrier()
        if world.is_main:
            begun = time.perf_counter()
            for mine, tensor in zip(kept, state.tensors(), strict=True):
                mine.copy_(tensor)
            if number >= 0:
                copies.append((time.perf_counter() - begun,) * 2)
        world.barrier()
    return found


def _measure_loads(state: State, root: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Alone and together, in seconds."""
    world = lockstep.world()
    saved = lockstep.Checkpointer(root / "load", model=state.model, optimizer=state.optimizer)
    folder, file = saved.save(), root / "state.pt"
    if world.is_main:
        torch.save(state.dicts(), file)
    world.barrier()

    def torch_read() -> Any:
        loaded = torch.load(file, mmap=True, weights_only=True)
        return _copied(loaded)

    def torch_restore() -> None:
        loaded = torch_read()
        state.model.load_state_dict(loaded["model"])
        state.optimizer.load_state_dict(loaded["optimizer"])

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "lockstep, verified": (lambda: read(folder), saved.restore),
        "torch.load(mmap=True) and a copy": (torch_read, torch_restore),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        names = list(ways)[:: 1 if number % 2 else -1]
        for name in names:
            alone, together = ways[name]
            world.barrier()
            begun = time.perf_counter()
            if world.is_main:
                result = alone()
                seconds = time.perf_counter() - begun
                del result
            world.barrier()
            begun = time.perf_counter()
            together()
            all_seconds = _slowest(time.perf_counter() - begun)
            if number >= 0 and world.is_main:
                found[name].append((seconds, all_seconds))
    return found


def _copied(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _rank(_: int, folder: str, megabytes: int, rounds: int) -> None:
    world = lockstep.init()
    root, state = Path(folder), State(megabytes)
    results = {
        "bytes": sum(tensor.nbytes for tensor in state.tensors()),
        "saves": _measure_saves(state, root, rounds),
        "loads": _measure_loads(state, root, rounds),
    }
    if world.is_main:
        (root / "results.json").write_text(json.dumps(results))


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def _report(results: dict[str, Any], ranks: int, rounds: int, where: str) -> str:
    saves, loads = results["saves"], results["loads"]
    copy = statistics.median(stall for stall, _ in saves["one memory copy"])
    lines = [
        "# Checkpoints",
        "",
        f"{machine_name()}.",
        f"{results['bytes'] / 1e6:.0f} MB of state (a model and Adam's moments), {ranks} ranks, {where}. "
        f"{rounds} rounds after one to warm up; seconds: median (fastest to slowest).",
        f"Load average of the machine at the end: {os.getloadavg()[0]:.1f} (ours is about {ranks}).",
        "",
        "| way | stall | total | stall / one memory copy |",
        "|---|---:|---:|---:|",
    ]
    for name, pairs in saves.items():
        stalls, totals = ([pair[part] for pair in pairs] for part in (0, 1))
        ratio = statistics.median(stalls) / copy
        lines.append(f"| {name} | {_spread(stalls)} | {_spread(totals)} | {ratio:.2f} |")
    lines += ["", "| reading | alone | together |", "|---|---:|---:|"]
    for name, pairs in loads.items():
        lines.append(f"| {name} | {_spread([one for one, _ in pairs])} | {_spread([both for _, both in pairs])} |")
    ours, theirs = loads.values()
    ratios = [
        statistics.median(one[part] / other[part] for one, other in zip(ours, theirs, strict=True)) for part in (0, 1)
    ]
    lines.append(f"| median of the rounds' ratios | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400, help="of state, in all")
    parser.add_argument(
        "--folder", type=Path, default=Path.cwd(), help="on the disk to measure; what is made is removed"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds of little state: does it run")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-checkpoint.md")
    options = parser.parse_args()
    rounds, megabytes = (2, 40) if options.quick else (options.rounds, options.megabytes)
    root = Path(tempfile.mkdtemp(prefix=".benchmark-", dir=options.folder))
    try:
        lockstep.spawn(_rank, args=(str(root), megabytes, rounds), nprocs=options.ranks)
        results = json.loads((root / "results.json").read_text())
    finally:
        shutil.rmtree(root)
    report = _report(results, options.ranks, rounds, f"on {_file_system(options.folder)}")
    explained = (__doc__ or "").partition("\n\n")[2].rpartition("\n\n")[0]
    report += f"\n{explained}\n"
    publish(report, name="checkpoint", write=options.write)


def _file_system(folder: Path) -> str:
    """The type of the file system and its device, from the longest mount point that holds the folder."""
    best = ("", "an unknown file system")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if folder.resolve().is_relative_to(point) and len(point) > len(best[0]):
            best = (point, f"{kind} ({device})")
    return best[1]


if __name__ == "__main__":
    main()
