"""Write a file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a small file (0600) so that whoever opens it, at any moment, finds all of it or what was there before.

    Its bytes are not forced to the disk: this is for processes that read each other's files, not for what has to
    survive a loss of power.
    """
    temporary = f"{path}.tmp-{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
    os.rename(temporary, path)
