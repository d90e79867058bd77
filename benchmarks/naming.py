"""The name of the machine a figure was measured on: the same words in every table."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from lockstep import machine


def machine_name() -> str:
    """Processor, cores, system and versions, without loading torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else 'unknown processor'}, {machine.cores()} cores, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {version('torch')}"
    )
