"""A checkpoint whose ``save()`` has returned survives a power cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import OWN_MOUNTS, Running, environment, python_path
from tests.namespaces import skip_unless

_ROOT = Path(__file__).parents[2]
#: A loop device, ext4 on it, and the mount, tried in a folder that goes away with its file system.
_TRY = """
mount -t tmpfs tmpfs /mnt
truncate -s 8M /mnt/disk
mkfs.ext4 -q /mnt/disk
mkdir /mnt/mounted
device=$(losetup --find --show /mnt/disk)
trap 'umount -q /mnt/mounted; losetup --detach $device' EXIT
mount -t ext4 $device /mnt/mounted
"""


def _loaded(folder: Path, count: int, how: str = "careful") -> list[int]:
    skip_unless(_TRY, "a file system whose power is cut")
    argv = ["tests.faults.power_cuts", str(folder), str(count), how]
    env = environment(folder, torch=True, PYTHONPATH=python_path(_ROOT))
    with Running(argv, cwd=folder, env=env, before=OWN_MOUNTS) as program:
        done = program.finish(limit=240)
    assert done.code == 0, done
    loaded: list[int] = json.loads(done.out.splitlines()[-1])
    return loaded


def test_a_power_cut_right_after_a_save_loses_nothing(tmp_path: Path) -> None:
    assert _loaded(tmp_path, 2) == [1, 2]


@pytest.mark.campaign
def test_fifty_power_cuts_lose_nothing(tmp_path: Path) -> None:
    loaded = _loaded(tmp_path, 50)
    survived = sum(step == number for number, step in enumerate(loaded, 1))
    print(f"\npower cuts: {survived} of {len(loaded)} new steps loaded")
    assert loaded == list(range(1, 51))


@pytest.mark.campaign
def test_the_cut_is_one(tmp_path: Path) -> None:
    """Or a save that waits for nothing would survive it as well."""
    assert _loaded(tmp_path, 2, "careless") == [-1, -1]
