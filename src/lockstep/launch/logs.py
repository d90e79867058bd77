"""The folder of a job's logs: made when there is something to write, pruned when there are many.

The default folder keeps the logs of the newest jobs; those that still run hold their folder by a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import LaunchError
from lockstep.launch.folders import hold
from lockstep.runs.homes import default_home, make_spare_home

#: The number of jobs whose logs stay in the default folder.
KEPT = 20
_OURS = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")


class LogFolder:
    """The folder of one job's logs, and of the record of how it went. Made when there is something to write; removed at
    the end if it is empty.

    Args:
        given: the folder that the user named, which is used as it is. None: a new one in the default place.
        program: a word for the new folder's name.
    """

    def __init__(self, given: Path | None, *, program: str, env: Mapping[str, str] = os.environ) -> None:
        #: Absolute from the start: the folder in which the job runs may be gone by its end.
        self._given = None if given is None else given.absolute()
        self._env = env
        #: The reason, for the user, why the logs are not in the default folder; None: they are.
        self.moved: str | None = None
        self._program = program
        self._lock: int | None = None
        self.path: Path | None = None
        #: Restarts of the job so far; the ranks' logs after a restart are in a folder of their own.
        self.restart = 0
        #: Log -> its rank.
        self._opened: dict[Path, int] = {}

    def open(self, rank: int) -> int:
        """Open a new, empty log for ``rank`` for appending; the caller closes it.

        Raises:
            LaunchError: the folder or the file can't be made.
        """
        try:
            self.make()
            if self.restart:
                self.log(rank).parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._opened[self.log(rank)] = rank
            return os.open(self.log(rank), flags, 0o600)
        except OSError as error:
            raise LaunchError(
                f"the ranks' logs can't be written to {self._given or error.filename}: {error.strerror or error}; "
                "name another folder with --log-dir"
            ) from error

    def make(self) -> Path:
        """Return the folder; it is made the first time.

        Raises:
            OSError: it can't be made.
        """
        if self.path is None:
            self.path = self._make()
        return self.path

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log since the last restart."""
        assert self.path is not None, "no log was opened yet"
        return (self.path / f"restart-{self.restart}" if self.restart else self.path) / f"rank{rank}.log"

    def unseen(self) -> list[int]:
        """Return the ranks whose output is in a folder that the user did not choose."""
        if self._given is not None:
            return []
        return sorted({rank for log, rank in self._opened.items() if _has_text(log)})

    @property
    def lost(self) -> bool:
        """Whether the folder was made, and is gone."""
        return self.path is not None and not self.path.is_dir()

    def close(self) -> None:
        """Remove empty files from a folder of our own, and old jobs beyond the newest ones."""
        if self.path is not None and self._given is None:
            for log in self._opened:
                with contextlib.suppress(OSError):
                    if log.stat().st_size == 0:
                        log.unlink()
            for part in (*{log.parent for log in self._opened} - {self.path}, self.path):
                with contextlib.suppress(OSError):
                    part.rmdir()  # fails unless empty, as it should
            with contextlib.suppress(FileNotFoundError):  # all logs were removed meanwhile
                _prune(self.path.parent)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make(self) -> Path:
        if self._given is not None:
            self._given.mkdir(mode=0o700, parents=True, exist_ok=True)
            return self._given
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{self._program}-{secrets.token_hex(3)}"
        home = default_home(self._env)
        why = "this user has no home folder"
        if home is not None:
            try:
                return self._make_in(home, name)
            except OSError as error:
                why = f"nothing can be made in {home} ({error.strerror or error})"
        path = self._make_in(make_spare_home(), name)
        self.moved = f"{why}, so the ranks' logs are in {path}; --log-dir names another folder"
        return path

    def _make_in(self, home: Path, name: str) -> Path:
        """Make a folder, and hold it so that no other job prunes it; one that did so in between has it made again."""
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = home / name
        while True:
            path.mkdir(mode=0o700)
            self._lock = hold(path, fcntl.LOCK_SH)
            if self._lock is not None:
                return path


def _has_text(log: Path) -> bool:
    try:
        return log.stat().st_size > 0
    except OSError:
        return False  # removed while the job ran


def _prune(home: Path) -> None:
    jobs = sorted((folder.name for folder in home.iterdir() if _OURS.fullmatch(folder.name)), reverse=True)
    for name in jobs[KEPT:]:
        with contextlib.suppress(OSError):  # it is in use, or another job is removing it as well
            lock = hold(home / name, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                continue
            try:
                shutil.rmtree(home / name)
            finally:
                os.close(lock)
