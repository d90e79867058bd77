"""Collect the facts about a machine without torch: versions, processor, memory, GPUs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep import _proc, machine
from lockstep.launch.binding import Bind, bind_ranks
from lockstep.launch.evidence import machine_memory, memory_group
from lockstep.launch.spec import parse_ranks
from lockstep.text import counted
from lockstep.topology import Topology, format_cpus
from lockstep.version import __version__

#: Packages whose versions decide what a job does.
PACKAGES = ("torch", "numpy", "safetensors", "xxhash", "click", "rich", "mpi4py", "ray")
_DRIVER = Path("/proc/driver/nvidia/version")


def collect() -> dict[str, Any]:
    """Return the facts about this machine, for comparisons and bug reports, in JSON's types."""
    group = memory_group()
    return {
        "hostname": socket.gethostname(),
        "lockstep": __version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": _system(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "architecture": platform.machine(),
        "packages": versions(),
        "processor": machine.processor(),
        "cores": machine.cores(),
        "cores_of_the_machine": os.cpu_count(),
        "quota": machine.cpu_quota(),
        "affinity": format_cpus(os.sched_getaffinity(0)),
        "topology": Topology.read().describe(),
        "binding": binding(),
        "memory": machine_memory(),
        "memory_limit": None if group is None else group.limit(),
        "gpus": machine.gpus({}),
        "visible_gpus": machine.gpus(),
        "driver": driver(),
        "place": place(),
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages of :data:`PACKAGES`. Nothing is imported."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def binding() -> str:
    """Return to which cores ``lockstep run`` binds ranks here without -n and --bind."""
    ranks = parse_ranks("auto", cores=machine.cores(), gpus=machine.gpus())
    return f"{bind_ranks(Bind.AUTO, ranks).describe()} (--bind auto, {counted(ranks, 'rank')})"


def driver() -> str:
    """Return the version of NVIDIA's driver; empty: none is loaded."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _proc.text(_DRIVER))
    return found[1] if found else ""


def place() -> list[str]:
    """Return the identity of this host among others with its name: the name, and the address at which ssh has reached
    it."""
    return [socket.gethostname(), *os.environ.get("SSH_CONNECTION", "").split()[2:3]]


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
