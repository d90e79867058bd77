"""Make, lock and remove a job's private folder; where all of a job's processes were killed, the next job removes it.

Note [Abandoned folders]
~~~~~~~~~~~~~~~~~~~~~~~~
Launcher and zygote remove the folder, whichever is there in the end. If both are killed at once the folder stays, so
each job looks for folders whose lock no process holds any more, and removes what the loader workers noted in them have
left in /dev/shm, then the folder. A folder is held by a lock (``flock``) that goes with its owner. The maker of a
folder looks again once it holds the lock: another job may have found it in between, and removed it.
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
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return False
            undo.callback(os.close, self._lock)
            is_held = _locks(self._lock) and os.path.exists(self.path)
            if is_held:
                undo.pop_all()
            return is_held

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
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _locks(fd):
                    folders = [Path(path), *Path(path).glob("[0-9]*")]  # one for each start of its ranks
                    noted = {pid for each in folders for pid in workers.processes(each)}
                    remove_shared_memory(noted)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)


def _locks(fd: int) -> bool:
    """Take the folder's lock through ``fd``, and return whether that was possible: no other process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
