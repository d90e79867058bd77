"""The cores and GPUs that this machine offers to a process, counted without torch, and its processor's name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lockstep import _proc, knobs

_CPUS = Path("/proc/cpuinfo")
_CGROUP_V2_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CGROUP_V1_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


def cores() -> int:
    """Count the CPU cores this process may use: its affinity mask, limited by a container's CPU quota."""
    allowed = visible_cores()
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cores_of_all_ranks() -> int:
    """Count the CPU cores of this rank and the others of its machine: more than its own where it is bound to those."""
    return knobs.cores() or cores()


def visible_cores() -> int:
    """Count the CPU cores as libraries do: this process's affinity mask, regardless of a quota."""
    return len(os.sched_getaffinity(0))


def share_of_cores(ranks: int) -> int:
    """Return the number of threads for each of ``ranks`` processes of this machine: equal parts, at least one.

    The remainder of an uneven division stays free: ranks in step are as fast as the slowest.
    """
    return max(1, cores() // ranks)


def gpus(env: Mapping[str, str] = os.environ) -> int:
    """Count the NVIDIA GPUs this process may use, from the driver's device files and ``CUDA_VISIBLE_DEVICES``.

    The driver is not opened, so counting costs nothing in the launcher.
    """
    present = len([name for name in _listdir("/dev") if re.fullmatch(r"nvidia\d+", name)])
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # CUDA stops reading at the first entry that is empty or negative: "0,-1,1" is one device.
    count = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, present)


def processor() -> str:
    """Return the processor's model name, or the machine's architecture if it has none."""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", _proc.text(_CPUS), re.MULTILINE)
    return found[1] if found else os.uname().machine


def cpu_quota() -> float | None:
    """Return the CPU quota of this process's cgroup in cores, or None if there is none."""
    try:
        quota, period = _CGROUP_V2_QUOTA.read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = _CGROUP_V1_QUOTA.read_text(), _CGROUP_V1_PERIOD.read_text()
        except OSError:
            return None
    if quota.strip() == "max" or float(quota) <= 0:
        return None
    return float(quota) / float(period)


def _listdir(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine in any network."""
    return host in ("localhost", "::1") or host.startswith("127.")
