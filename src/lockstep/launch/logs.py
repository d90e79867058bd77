"""One log file per rank: where they are, how many jobs are kept, and what is removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import LaunchError

#: Jobs whose logs stay in the default folder.
KEPT = 20
_OURS = re.compile(r"\d{8}-\d{6}-.+-[0-9a-f]{6}")


class LogFolder:
    """The logs of one job. Made when the first log is opened; an empty one is removed at the end.

    Args:
        given: the folder the user named; it is used as it is. None: a new one in the default place.
        program: a word for the default folder's name.
    """

    def __init__(self, given: Path | None, *, program: str, env: Mapping[str, str] = os.environ) -> None:
        self._given = given
        self._env = env
        #: Why the logs are not in the default place, for the user; None: they are.
        self.moved: str | None = None
        self._program = program
        self._lock: int | None = None
        self.path: Path | None = None
        #: Restarts of the job so far; the ranks' logs after a restart are in a folder of their own.
        self.restart = 0

    def open(self, rank: int) -> int:
        """A new, empty log for ``rank``, open for appending; the caller closes it.

        Raises:
            LaunchError: the folder or the file can't be made.
        """
        try:
            if self.path is None:
                self.path = self._make()
            if self.restart:
                self.log(rank).parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            return os.open(self.log(rank), flags, 0o600)
        except OSError as error:
            raise LaunchError(
                f"the ranks' logs can't be written to {self._given or error.filename}: {error.strerror or error}; "
                "name another folder with --log-dir"
            ) from error

    def log(self, rank: int, *, restart: int | None = None) -> Path:
        """The path of a rank's log: since the last restart, or after another one."""
        assert self.path is not None, "no log was opened yet"
        return self._part(self.restart if restart is None else restart) / f"rank{rank}.log"

    def _part(self, restart: int) -> Path:
        assert self.path is not None, "no log was opened yet"
        return self.path / f"restart-{restart}" if restart else self.path

    def unseen(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose output went into a folder that the user did not choose, and is there to read."""
        if self.path is None or self._given is not None:
            return []
        return [rank for rank in ranks if any(_has_text(log) for log in self._logs(rank))]

    def _logs(self, rank: int) -> list[Path]:
        return [self.log(rank, restart=restart) for restart in range(self.restart + 1)]

    def close(self, ranks: Iterable[int]) -> None:
        """Remove what stayed empty in a folder of our own, and old jobs beyond the newest ones."""
        if self.path is not None and self._given is None:
            for log in (log for rank in ranks for log in self._logs(rank)):
                with contextlib.suppress(OSError):
                    if log.stat().st_size == 0:
                        log.unlink()
            for restart in reversed(range(self.restart + 1)):
                with contextlib.suppress(OSError):
                    self._part(restart).rmdir()  # fails unless empty, as it should
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
        path = self._make_in(spare_home(), name)
        self.moved = f"{why}, so the ranks' logs are in {path}; --log-dir names another folder"
        return path

    def _make_in(self, home: Path, name: str) -> Path:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = home / name
        path.mkdir(mode=0o700)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # while it is held, another job does not prune this one
        return path


def _has_text(log: Path) -> bool:
    return log.exists() and log.stat().st_size > 0


def default_home(env: Mapping[str, str] = os.environ) -> Path | None:
    """**Local.** The folder for the logs of jobs that name none, by the XDG base directory specification; None: this
    user has no home."""
    state = env.get("XDG_STATE_HOME", "")
    if state.startswith("/"):
        return Path(state, "lockstep", "logs")
    home = env.get("HOME", "")
    if not home.startswith("/"):
        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container's user that no file names
            return None
    return Path(home, ".local", "state", "lockstep", "logs") if home.startswith("/") else None


def spare_home() -> Path:
    """**Local.** The folder for logs where the home can't be written: this user's own, for temporary files.

    Others may write there as well: a folder of that name that is another's, or open to others, is not taken.
    """
    home = Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    found = home.lstat()
    private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return Path(home if private else tempfile.mkdtemp(prefix=f"lockstep-{os.getuid()}-"), "logs")


def _prune(home: Path) -> None:
    jobs = sorted((folder.name for folder in home.iterdir() if _OURS.fullmatch(folder.name)), reverse=True)
    for name in jobs[KEPT:]:
        with contextlib.suppress(OSError):  # another job may be removing it as well
            if not _in_use(home / name):
                shutil.rmtree(home / name)


def _in_use(folder: Path) -> bool:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
