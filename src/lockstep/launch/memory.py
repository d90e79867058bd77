"""How often the kernel killed for want of memory, by the counters of this process's memory cgroup (version 1 or 2)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
#: What version 1 says for "no limit" is a little under this.
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class MemoryGroup:
    """The memory cgroup of a process."""

    folder: Path
    #: Where its hierarchy is mounted; an ancestor's limit holds, too.
    mount: Path
    version: int

    def kills(self) -> int | None:
        """**Local.** Processes of the group that the kernel killed because memory was out; None if it does not count
        them."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        return _counter(self.folder / name, "oom_kill")

    def limit(self) -> int | None:
        """**Local.** The bytes that the group may use, its ancestors' limits included; None: as many as there are."""
        if self.version == 1:
            limit = _counter(self.folder / "memory.stat", "hierarchical_memory_limit")
            return limit if limit is not None and limit < _UNLIMITED else None
        found: list[int] = []
        folder = self.folder
        while folder.is_relative_to(self.mount):
            text = _text(folder / "memory.max").strip()
            found += [int(text)] if text.isdecimal() else []
            folder = folder.parent
        return min(found, default=None)


def memory_group(proc: Path = _PROC / "self") -> MemoryGroup | None:
    """**Local.** The memory cgroup of a process, or None if it can't be seen.

    Args:
        proc: the process's folder in /proc.
    """
    paths = {}
    for line in _text(proc / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path  # version 2's has no name
    mounts = [_mount(line) for line in _text(proc / "mountinfo").splitlines()]
    for version, controller in ((1, "memory"), (2, "")):
        for kind, options, root, mount in mounts:
            if controller not in paths or kind != ("cgroup" if version == 1 else "cgroup2"):
                continue
            if version == 1 and "memory" not in options:
                continue
            # A container may see its own group as the root of the mount, and the path as the host sees it.
            inside = paths[controller].removeprefix(root) if root != "/" else paths[controller]
            for folder in (mount / inside.lstrip("/"), mount):
                group = MemoryGroup(folder, mount, version)
                if group.kills() is not None:
                    return group
    return None


def machine_memory() -> int | None:
    """**Local.** The machine's memory in bytes."""
    total = re.search(r"^MemTotal:\s+(\d+) kB", _text(_PROC / "meminfo"), re.MULTILINE)
    return int(total[1]) * 1024 if total else None


def _mount(line: str) -> tuple[str, list[str], str, Path]:
    """Kind, options, root and mount point of a line of mountinfo."""
    before, _, after = line.partition(" - ")
    root, point = before.split()[3:5]
    kind, _, options = after.split(" ", 2)
    return kind, options.split(","), root, Path(point.encode().decode("unicode_escape"))


def _counter(file: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", _text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
