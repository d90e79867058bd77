"""Make, lock and remove a job's private folder; where all of a job's processes were killed, the next job removes it.

Note [Abandoned folders]
~~~~~~~~~~~~~~~~~~~~~~~~
Launcher and zygote remove the folder, whichever is there in the end. If both are killed at once the folder stays, so
each job looks for folders whose lock no process holds any more, and removes what the loader workers noted in them have
left in /dev/shm, then the folder. Launcher and zygote both hold a lock on it (``flock``, shared), which goes with the
process: where the launcher alone is killed, ranks may be saving still. The maker of a folder looks again once it holds
the lock: another job may have found it in between, and removed it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.job import workers
from lockstep.launch.processes import remove_shared_memory

_PREFIX = "lockstep-job-"
_OURS = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as tempfile makes them


class JobFolder:
    """A new folder (0700) in the place for temporary files, held until it is removed. See Note [Abandoned folders]."""

    def __init__(self) -> None:
        """Make the folder, and remove abandoned ones.

        Raises:
            LaunchError: no folder for temporary files can be written and locked.
        """
        try:
            _remove_abandoned(Path(tempfile.gettempdir()))
            while not self._make():
                pass
        except OSError as error:
            raise LaunchError(
                f"no folder for the job's files: {error.strerror or error}; name a writable one with TMPDIR"
            ) from error

    def _make(self) -> bool:
        """Make the folder, and return whether it is held: another job may have found it in between, and removed it."""
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self.path, ignore_errors=True)
            lock = hold(self.path, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if lock is None:
                return False
            undo.pop_all()
        self._lock = lock
        return True

    def remove(self) -> None:
        """Remove the folder with all that is in it. Does nothing the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_abandoned(home: Path) -> None:
    with os.scandir(home) as entries:
        found = [entry for entry in entries if _OURS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    for entry in found:
        path = entry.path
        with contextlib.suppress(OSError):  # another job may be removing it as well
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = hold(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                continue
            try:
                remove_shared_memory(workers.processes(path))
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def hold(folder: str | Path, how: int) -> int | None:
    """Lock a folder that other jobs may remove, and return the descriptor with which the lock goes; None: another
    process holds it, or has removed it in between.

    Args:
        folder: not a symbolic link.
        how: ``fcntl``'s ``LOCK_SH`` for many holders or ``LOCK_EX`` for one; with ``LOCK_NB`` nothing is waited for.

    Raises:
        OSError: it can't be opened or locked.
    """
    with contextlib.suppress(FileNotFoundError, BlockingIOError), contextlib.ExitStack() as undo:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        undo.callback(os.close, lock)
        fcntl.flock(lock, how)
        os.stat(folder)  # it is there
        undo.pop_all()
        return lock
    return None
