"""How this machine's cores lie: hyper-threads, caches, NUMA nodes and the GPUs beside them, read without torch.

All of it is in small files of the kernel and of NVIDIA's driver. A file that is not there, as in a sandbox, is read as
a machine that is all of one piece.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep import _proc
from lockstep.text import counted

#: The lowest level of a cache that cores share. Below are those of one core, or of two that are close anyway.
_SHARED_CACHE = 3


@dataclass(frozen=True, order=True)
class Core:
    """A physical core, with its place. Cores in order are those of a socket, of a node there, of a cache there."""

    socket: int
    node: int
    #: The first CPU of those that share its L3 cache; -1: the kernel tells of none that several cores share.
    cache: int
    #: Its hyper-threads by number, in order: what the kernel calls CPUs.
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class GpuPlace:
    """Where a GPU is attached."""

    #: Its PCI address, as ``0000:1b:00.0``.
    address: str
    model: str
    uuid: str
    #: The NUMA node that the kernel names; -1: none, as on machines with one node and in many virtual machines.
    node: int
    #: The CPUs beside it; empty: not known.
    cpus: frozenset[int]


@dataclass(frozen=True)
class Topology:
    """The cores of a machine that are online, and its NVIDIA GPUs."""

    #: The cores in the order of their numbers.
    cores: tuple[Core, ...]
    #: The CPUs that a process has where nobody has set its affinity: the cgroup's, without those that are isolated.
    given: frozenset[int]
    #: In the order of their PCI addresses; those that this container has device files of.
    gpus: tuple[GpuPlace, ...]

    @classmethod
    def read(cls, root: Path = Path("/")) -> Topology:
        """Read the topology of the machine whose ``/sys``, ``/proc`` and ``/dev`` are below ``root``."""
        system = root / "sys/devices/system"
        online = parse_cpus(_proc.text(system / "cpu/online")) or frozenset(range(os.cpu_count() or 1))
        nodes = _nodes(system / "node", online)
        cores = tuple(sorted(_cores(system / "cpu", online, nodes)))
        given = online & (_cpuset(root) or online)
        return cls(
            cores if any(len(each) > 1 for each in _by_cache(cores)) else tuple(map(_without_cache, cores)),
            (given - parse_cpus(_proc.text(system / "cpu/isolated"))) or given,
            tuple(_gpus(root, online, several_nodes=len(set(nodes.values())) > 1)),
        )

    def within(self, cpus: Collection[int]) -> tuple[Core, ...]:
        """Return the cores of which some hyper-threads are among ``cpus``, with those alone."""
        found = (
            Core(core.socket, core.node, core.cache, tuple(cpu for cpu in core.cpus if cpu in cpus))
            for core in self.cores
        )
        return tuple(core for core in found if core.cpus)

    def visible_gpus(self, env: Mapping[str, str] = os.environ) -> tuple[GpuPlace, ...] | None:
        """Return the GPUs in the order in which CUDA numbers them; None: which is which only CUDA can tell.

        CUDA puts the fastest first. So GPUs of several models are in an order that nobody else knows, unless
        ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
        """
        if len({gpu.model for gpu in self.gpus}) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            return None
        visible = env.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return self.gpus
        found: list[GpuPlace] = []
        for entry in map(str.strip, visible.split(",")):
            if entry.isdecimal() and int(entry) < len(self.gpus):
                found.append(self.gpus[int(entry)])
            elif (
                entry.startswith("GPU-") and len(same := [gpu for gpu in self.gpus if gpu.uuid.startswith(entry)]) == 1
            ):
                found += same
            elif entry.startswith(("GPU-", "MIG-")):
                return None
            else:
                break  # as CUDA does: it stops reading at the first entry that names none
        return tuple(found)

    def describe(self) -> str:
        """Return it in words: sockets, NUMA nodes, L3 caches, cores and hyper-threads."""
        threads = sum(len(core.cpus) for core in self.cores)
        caches = len({core.cache for core in self.cores} - {-1})
        words = [
            counted(len({core.socket for core in self.cores}), "socket"),
            counted(len({core.node for core in self.cores}), "NUMA node"),
            *([counted(caches, "L3 cache")] if caches else []),
            counted(len(self.cores), "core"),
        ]
        return ", ".join(words) + (f" with {threads} hyper-threads" if threads > len(self.cores) else "")


def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list as the kernel writes it, ``0-3,8``; a text that is no such list has none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            return frozenset()
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """Return numbers as the kernel and ``taskset -c`` write them: ``0-3,8``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _nodes(folder: Path, online: frozenset[int]) -> dict[int, int]:
    """Return the NUMA node of each CPU; 0 where the kernel has none."""
    found = dict.fromkeys(online, 0)
    for name in _names(folder):
        if re.fullmatch(r"node\d+", name):
            of_node = parse_cpus(_proc.text(folder / name / "cpulist"))
            found.update(dict.fromkeys(of_node & online, int(name.removeprefix("node"))))
    return found


def _cores(folder: Path, online: frozenset[int], nodes: Mapping[int, int]) -> Iterable[Core]:
    """Yield the cores; each core and each cache is looked at once, since a large machine has hundreds of CPUs."""
    cores: set[int] = set()
    caches: dict[int, int] = {}
    for cpu in sorted(online):
        if cpu in cores:
            continue
        own = folder / f"cpu{cpu}"
        siblings = (parse_cpus(_proc.text(own / "topology/thread_siblings_list")) & online) | {cpu}
        cores |= siblings
        if cpu not in caches:
            sharing = _sharing_cache(own / "cache") & online
            caches.update(dict.fromkeys(sharing, min(sharing, default=-1)))
        socket = _number(own / "topology/physical_package_id")
        yield Core(max(0, socket), nodes[cpu], caches.get(cpu, -1), tuple(sorted(siblings)))


def _sharing_cache(folder: Path) -> frozenset[int]:
    """Return the CPUs that share the last cache with that of which ``folder`` tells; none: no cache is shared."""
    found: tuple[int, frozenset[int]] = (_SHARED_CACHE - 1, frozenset())
    for name in _names(folder):
        level = _number(folder / name / "level") if name.startswith("index") else -1
        if level > found[0]:
            found = level, parse_cpus(_proc.text(folder / name / "shared_cpu_list"))
    return found[1]


def _by_cache(cores: Iterable[Core]) -> list[list[Core]]:
    found: dict[int, list[Core]] = {}
    for core in cores:
        found.setdefault(core.cache, []).append(core)
    return list(found.values())


def _without_cache(core: Core) -> Core:
    """Return a core of a machine on which each has an L3 cache of its own: what many virtual machines make up."""
    return Core(core.socket, core.node, -1, core.cpus)


def _cpuset(root: Path) -> frozenset[int]:
    """Return the CPUs of this process's cgroup, or of the next one above that tells; none: none does."""
    for folder, is_v1 in _proc.cgroup_folders("cpuset", root):
        for name in ("cpuset.effective_cpus", "cpuset.cpus") if is_v1 else ("cpuset.cpus.effective",):
            found = parse_cpus(_proc.text(folder / name))
            if found:
                return found
    return frozenset()


def _gpus(root: Path, online: frozenset[int], *, several_nodes: bool) -> Iterable[GpuPlace]:
    for address in sorted(_names(root / "proc/driver/nvidia/gpus")):
        said = _proc.text(root / "proc/driver/nvidia/gpus" / address / "information")
        facts: dict[str, str] = dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)[ \t]*$", said, re.MULTILINE))
        if not (root / f"dev/nvidia{facts.get('Device Minor', '')}").exists():
            continue  # the host's, and not this container's
        device = root / "sys/bus/pci/devices" / address.lower()
        node = _number(device / "numa_node")
        near = parse_cpus(_proc.text(device / "local_cpulist")) & online
        if node < 0 and several_nodes and near == online:
            near = frozenset()  # the kernel's word for not knowing
        yield GpuPlace(address.lower(), facts.get("Model", ""), facts.get("GPU UUID", ""), node, near)


def _number(path: Path) -> int:
    text = _proc.text(path).strip()
    return int(text) if text.isdecimal() else -1


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
