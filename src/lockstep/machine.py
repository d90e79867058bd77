"""The cores and GPUs that this machine offers to a process, counted without torch, and its processor's name."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

from lockstep import _proc, knobs

_CPUS = Path("/proc/cpuinfo")


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


def gpus(env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> int:
    """Count the GPUs of NVIDIA or AMD this process may use, from the driver's files and the variables that hide them.

    The driver is not opened, so counting costs nothing in the launcher.

    Args:
        env: the process's variables.
        root: the folder with ``/dev``, ``/proc`` and ``/sys``.
    """
    cards = len([name for name in _listdir(root / "dev") if re.fullmatch(r"nvidia\d+", name)])
    return _of_nvidia(cards, env, root) if cards else _of_amd(env, root)


def _of_nvidia(cards: int, env: Mapping[str, str], root: Path) -> int:
    """Count the devices that CUDA shows of so many cards.

    Of cards that are cut into instances (MIG) it shows one instance, whatever the variable lists.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    entries = [str(card) for card in range(cards)] if visible is None else _listed(visible, cards)
    cut = {gpu.name for gpu in (root / "proc/driver/nvidia/capabilities").glob("gpu*") if any(gpu.glob("mig/gi*"))}
    if len(cut) >= cards or any(entry.startswith("MIG-") for entry in entries):
        return min(1, len(entries))
    return min(len(entries), cards)


def _of_amd(env: Mapping[str, str], root: Path) -> int:
    """Count the devices that HIP shows: those with a file of their own in ``/dev/dri``, and not hidden.

    ``ROCR_VISIBLE_DEVICES`` hides from all of ROCm, and the others number what it leaves (AMD's "GPU isolation").
    """
    count = 0
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        facts = dict(re.findall(r"^(\w+) (\d+)$", _proc.text(node), re.MULTILINE))
        render = root / f"dev/dri/renderD{facts.get('drm_render_minor', '')}"
        count += int(facts.get("simd_count", "0")) > 0 and render.exists()
    for names in (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")):
        visible = next((env[name] for name in names if name in env), None)
        if visible is not None:
            count = min(count, len(_listed(visible, count)))
    return count


def _listed(visible: str, count: int) -> list[str]:
    """Return the devices in a list of visible ones: numbers below ``count``, and names.

    Drivers stop reading at the first that is empty, negative, another word or not there: of "0,-1,1" they show one, and
    of "none" nothing. Nor do they show anything of a list that names a device twice.
    """
    found: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        is_number = entry.isdecimal() and int(entry) < count
        if not is_number and not entry.startswith(("GPU-", "MIG-")):
            break
        found.append(entry)
    return found if len(set(found)) == len(found) else []


def processor() -> str:
    """Return the processor's model name, or the machine's architecture if it has none."""
    found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", _proc.text(_CPUS), re.MULTILINE)
    return found[1] if found else os.uname().machine


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the CPU quota in cores of this process's cgroup, the least of its own and of those above; None: there is
    none.

    Args:
        root: the folder with ``/proc`` and ``/sys``.
    """
    found: list[float] = []
    for folder, is_v1 in [*_proc.cgroup_folders("cpu", root)] or [(root / "sys/fs/cgroup", False)]:
        if is_v1:
            said = [_proc.text(folder / "cpu.cfs_quota_us"), _proc.text(folder / "cpu.cfs_period_us")]
        else:
            said = _proc.text(folder / "cpu.max").split()
        if len(said) == 2 and said[0].strip() and said[0] != "max" and float(said[0]) > 0:
            found.append(float(said[0]) / float(said[1]))
    return min(found, default=None)


def shared_memory() -> tuple[int, int] | None:
    """Return the bytes of /dev/shm, in all and those that are free now; None: there is none."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return None
    return there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize


def _listdir(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine in any network."""
    return host in ("localhost", "::1") or host.startswith("127.")
