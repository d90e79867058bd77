"""The watcher's side: look at the pages of this machine's ranks."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from lockstep.recorder.layout import PAGE, Look, decode
from lockstep.recorder.writer import FILE

#: A page is written within a microsecond, so a second try nearly always finds it whole.
_TRIES = 20


class Pages:
    """The pages of a job's ranks on this machine, by local rank; made (0600) for the ranks to find."""

    def __init__(self, folder: str | Path, count: int) -> None:
        fd = os.open(Path(folder) / FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, count * PAGE)
            self._memory = mmap.mmap(fd, count * PAGE)
        finally:
            os.close(fd)

    def look(self, local_rank: int) -> Look | None:
        """**Local.** What a rank is doing, or None if it has written nothing yet (or is writing all the time)."""
        with memoryview(self._memory) as view, view[local_rank * PAGE : (local_rank + 1) * PAGE] as page:
            for _ in range(_TRIES):
                look = decode(page)
                if look is not None:
                    return look if look.events else None
        return None

    def close(self) -> None:
        """**Local.** Let go of the memory. A second call does nothing."""
        self._memory.close()
