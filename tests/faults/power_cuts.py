"""Power cuts: ``python -m tests.faults.power_cuts FOLDER COUNT HOW`` in a mount namespace of its own.

A file system in a file is mounted, a checkpoint is saved, and the file system is shut down as by a power cut at the
very moment when ``save()`` has returned: what is not on the disk then is lost, the journal in memory as well. Then it
is mounted again and looked at. HOW is "careful", or "careless" for a program that never waits for the disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import lockstep
from lockstep.checkpoint.storage import Storage

#: ext4 without the final flush of its journal (linux/fs.h, fs/ext4/ext4.h).
_FS_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


class Careless(Storage):
    """Never waits for the disk: shows that the cut loses what nobody waited for."""

    def sync(self, opened: int) -> None:
        """Leave it in the cache."""


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cut(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(opened, _FS_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(opened)


def _one(run: Path, step: int, *, careless: bool) -> None:
    """Go on from what is there, and save the next step."""
    model = nn.Linear(2000, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = lockstep.Checkpointer(run, model=model, optimizer=optimizer, keep=2)
    restored = saved.restore(strict=True)
    assert (0 if restored is None else restored.step) == step - 1 or careless
    saved.step = step - 1
    with torch.no_grad():
        model.bias.fill_(step)
    model.bias.grad = torch.zeros_like(model.bias)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    if careless:
        saved._storage = Careless()
    saved.save()


def _found(run: Path) -> int:
    """The step that is loaded after the cut; -1 if none."""
    model = nn.Linear(2000, 100)
    try:
        source = lockstep.load_weights(run, model).source
    except (lockstep.CheckpointError, OSError):
        return -1
    assert torch.equal(model.bias, torch.full((100,), float(source.name.removeprefix("step-"))))
    return int(source.name.removeprefix("step-"))


def main() -> None:
    folder, count, careless = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "careless"
    lockstep.init()
    warnings.simplefilter("error")
    disk, mounted = folder / "disk", folder / "mounted"
    mounted.mkdir()
    with open(disk, "wb") as file:
        file.truncate(64 * 2**20)
    _run("mkfs.ext4", "-q", str(disk))
    device = _run("losetup", "--find", "--show", str(disk))
    try:
        loaded = []
        for step in range(1, count + 1):
            _run("mount", "-t", "ext4", device, str(mounted))
            _one(mounted / "run", step, careless=careless)
            _cut(mounted)
            _run("umount", str(mounted))
            _run("mount", "-t", "ext4", device, str(mounted))
            loaded.append(_found(mounted / "run"))
            _run("umount", str(mounted))
    finally:
        subprocess.run(["umount", "-q", str(mounted)], check=False)
        _run("losetup", "--detach", device)
    print(json.dumps(loaded))


if __name__ == "__main__":
    main()
