"""The locks around checkpoints: on a run's folder, on a checkpoint that is read, on a draft that is written.

Note [Run lock]
~~~~~~~~~~~~~~~
A run's folder belongs to one job: rank 0 holds a lock in it as long as the job may write there. The lock is the
kernel's (``fcntl.lockf`` on ``run.lock``): it goes with the process that holds it, however that ends, so a lock is
never stale where the kernel is asked, and it holds from host to host over NFS. Unlike ``flock``, it is not inherited by
forked processes: a DataLoader's worker that outlives a killed rank by a moment does not keep it. It is lost when the
process closes *any* descriptor of that file, so a process that holds a lock does not open the file again: a second
Checkpointer of the same process shares the first one's lock.

What the user's program does in that process is another matter: a copy of the run's folder, or an upload of it, opens
and closes this file as well. A lock of the open file (``F_OFD_SETLK``) would not be lost then, but forked processes
share it. So the owner takes the lock once more before each commit, which does nothing if it still has it, and reads by
its own descriptor who has written the record: if another job has come meanwhile, it is that job's folder.

The file names the owner, for the job that is refused. It is removed when the lock is released, while it is still held;
a process that opened it before that finds, once it has the lock, that the name leads elsewhere, and begins anew.

Where the file system has no locks, the record itself is the lock: it counts until its owner is known to be gone, which
can be known on the same host only (the machine has been started anew, or the process is not there any more).

Note [Rounds of a job]
~~~~~~~~~~~~~~~~~~~~~~
A job over several machines goes on in a new round when one of them is cut off. The processes left there may still hold
the lock, take themselves for the owner, and finish a save when the machine is back. So the record names the owner's job
and round (``LOCKSTEP_ROUND``), and the number of the round is the fencing token: an owner of a later round of the same
job waits some seconds for the one before, which its launcher is about to end, and then displaces it. It puts a new lock
file in the place of the old one, and removes every draft. Before a writer commits, it checks that the file in that
place is still its own, and refuses otherwise; one that is stopped between that check and the commit finds its draft
gone.

Note [Readers and pruning]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A reader of a checkpoint holds a shared lock (``flock``) on its manifest; a process that removes one takes that lock
exclusively first, without waiting, and leaves the checkpoint to the next pruning if it can't have it. The lock belongs
to the file and not to its name, so between opening the manifest and locking it the folder may have been renamed away:
a reader checks once more that the name still leads to the file that it holds, and otherwise raises
:class:`CheckpointGone`. After that check nothing can be removed before the reader releases the lock. The kernel
releases it for a reader that dies.

The manifest is locked and not the folder, because only files can be locked from several hosts over NFS, and because a
folder's own lock marks a draft that is being written, or a leftover that is being removed (Note [Commit] in
``disk_folder.py``).
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

from lockstep import _proc, knobs
from lockstep.checkpoint.folders import MANIFEST, drafts, remove_tree
from lockstep.checkpoint.storage import NO_LOCKS_HERE, try_flock
from lockstep.errors import CheckpointError

LOCK_FILE = "run.lock"

_MAX_RECORD = 64 * 1024
#: Seconds that an owner may take to write its record once it has the lock.
_RECORD_LIMIT = 2.0
#: Seconds that an earlier round of the same job has to let go of a folder before it is displaced: a launcher that is
#: cut off ends its ranks within this time.
SUCCESSION = 12.0
#: Seconds after which it is settled which of several jobs took a folder last that took it at the same moment.
_SETTLING = 0.5
_COMMAND_LENGTH = 300


class CheckpointGone(CheckpointError):
    """A checkpoint was removed between being listed and being opened."""

    code = "checkpoint-gone"


def _is_named(fd: int, path: Path) -> bool:
    """Return whether a path still leads to the file that is held."""
    held = os.fstat(fd)
    try:
        named = path.lstat()
    except FileNotFoundError:
        return False
    return (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)


# Reading a checkpoint, and removing one.


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Hold a checkpoint, so that no process removes it within the block. See Note [Readers and pruning].

    A checkpoint whose manifest can't be opened is damaged, and is not held: the reader will find that out.

    Raises:
        CheckpointGone: it has just been removed, or there was none.
    """
    fd = _open_manifest(folder, os.O_RDONLY)
    if fd is None:
        if not folder.is_dir():
            raise _gone(folder)
        yield
        return
    try:
        if try_flock(fd, fcntl.LOCK_SH) is False or not _is_named(fd, folder / MANIFEST):
            raise _gone(folder)
        yield
    finally:
        os.close(fd)


@contextmanager
def taken(folder: Path) -> Iterator[bool]:
    """Take a checkpoint for removal; yield whether it may be removed within the block: no process reads it then.

    Raises:
        OSError: its manifest can't be opened for writing.
    """
    fd = _open_manifest(folder, os.O_RDWR)  # over NFS an exclusive lock needs a file that is open for writing
    if fd is None:
        yield folder.is_dir()
        return
    try:
        yield try_flock(fd, fcntl.LOCK_EX) is not False and _is_named(fd, folder / MANIFEST)
    finally:
        os.close(fd)


def _gone(folder: Path) -> CheckpointGone:
    return CheckpointGone(f"{folder}: this checkpoint has just been removed; look for a newer one")


def _open_manifest(folder: Path, mode: int) -> int | None:
    """Open a checkpoint's manifest; None if it is missing or is not a plain file."""
    try:
        return os.open(folder / MANIFEST, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return None
        if mode == os.O_RDONLY and error.errno in (errno.EACCES, errno.EPERM):
            return None  # reading it will fail with a message of its own
        raise


# The owner of a run's folder.


@dataclass(frozen=True)
class Owner:
    """The process that holds a run's folder."""

    host: str
    pid: int
    user: str
    #: The time at which the lock was taken, as ISO 8601 in UTC.
    since: str
    #: The command line, shortened.
    command: str
    #: The identity of this process among those with the same number: the machine's boot, its process namespace, and
    #: the process's start in clock ticks after the boot.
    boot: str
    namespace: str
    start: int
    #: The job and its round, where several machines have met; see Note [Rounds of a job].
    job: str = ""
    round: int = 0

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (user {self.user}, since {self.since}): {self.command}"

    @classmethod
    def this_process(cls) -> Owner:
        """Describe the calling process."""
        command = " ".join([*sys.orig_argv][:64])
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=_user_name(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=command if len(command) <= _COMMAND_LENGTH else f"{command[:_COMMAND_LENGTH]}…",
            boot=_proc.boot_id(),
            namespace=_proc.pid_namespace(),
            start=_start_of(os.getpid()) or 0,
            **_round(),
        )

    @classmethod
    def from_json(cls, content: bytes) -> Owner | None:
        """Read the record of a lock file; None if it holds none."""
        try:
            fields = json.loads(content)
            owner = cls(**fields)
        except (ValueError, TypeError, RecursionError):
            return None
        kinds = {name: int if name in ("pid", "start", "round") else str for name in asdict(owner)}
        return owner if all(type(value) is kinds[name] for name, value in asdict(owner).items()) else None

    @property
    def is_superseded(self) -> bool:
        """True if the calling process belongs to a later round of the owner's job."""
        here = _round()
        return bool(self.job) and self.job == here.get("job") and self.round < here["round"]

    @property
    def is_gone(self) -> bool:
        """True if the owner is known to have ended; False where this can't be known from here."""
        if self.host != socket.gethostname():
            return False
        if self.boot != _proc.boot_id():
            return True
        return self.namespace == _proc.pid_namespace() and _start_of(self.pid) != self.start


class RunLock:
    """One job's hold on a run's folder. :meth:`release` it, or drop the object. See Note [Run lock].

    Raises:
        CheckpointError: another job has the folder; the message says which.
        OSError: the lock file can't be written.
    """

    def __init__(self, root: Path) -> None:
        self._held = _Held.shared(root)
        self._release = weakref.finalize(self, _Held.let_go, self._held, os.getpid())

    #: Other ranks see by what they find in the folder that it is the same.
    token = ""

    def release(self) -> None:
        """Let another job have the folder; a second call does nothing."""
        self._release()

    def check(self) -> None:
        """Make sure that the folder is still this job's: to be called right before a commit.

        Raises:
            CheckpointError: the job has gone on without this process, in a later round; or this process has lost its
                lock, and another job has taken it.
        """
        self._held.check()


class _Held:
    """The lock of this process on one folder, shared by its RunLocks."""

    _all: ClassVar[dict[tuple[int, int], _Held]] = {}
    _guard = threading.RLock()

    def __init__(self, key: tuple[int, int], path: Path) -> None:
        self._key, self._path, self._users, self._pid = key, path, 0, os.getpid()
        self._fd: int | None = _take(path)

    @classmethod
    def here(cls, root: Path) -> _Held | None:
        """Return this process's hold on the folder, or None."""
        held = cls._all.get(_key_of(root))
        return held if held is not None and held._pid == os.getpid() else None  # a forked process inherits the table

    @classmethod
    def shared(cls, root: Path) -> _Held:
        with cls._guard:
            held = cls.here(root)
            if held is None:
                held = cls._all[_key_of(root)] = cls(_key_of(root), root / LOCK_FILE)
            held._users += 1
            return held

    def check(self) -> None:
        displaced = _displaced(self._path, self._fd)
        if displaced:
            raise CheckpointError(
                f"{self._path.parent} has another owner by now, {displaced}, and nothing was saved here"
            )

    def let_go(self, pid: int) -> None:
        if os.getpid() != pid:
            return
        with self._guard:
            self._users -= 1
            if self._users:
                return
            del self._all[self._key]
            _let_go(self._path, self._fd)


def _key_of(root: Path) -> tuple[int, int]:
    status = root.stat()
    return status.st_dev, status.st_ino


def _take(path: Path) -> int | None:
    """Take the lock. Return its descriptor, or None where the file system has no locks and the record alone counts."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            try:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    owner = _owner_in(fd, wait=True)
                    if owner is not None and owner.is_superseded:
                        _succeed(path, fd)
                        continue
                    raise _refusal(path, owner) from None
                if error.errno not in NO_LOCKS_HERE:
                    raise
                _take_by_record(path, fd)
                return None
            finally:
                os.close(fd)
        if _is_named(fd, path):
            _write_record(fd)
            return fd
        os.close(fd)  # its owner has just released it


def _succeed(path: Path, fd: int) -> None:
    """Wait until an earlier round of this job lets go of the lock, or displace it; see Note [Rounds of a job].

    It returns when the lock may be tried again.
    """
    deadline = time.monotonic() + SUCCESSION
    while time.monotonic() < deadline:
        if not _is_named(fd, path):
            return
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        if struct.unpack("hhqqi", answer)[0] == fcntl.F_UNLCK:
            return
        time.sleep(0.02)
    path.unlink(missing_ok=True)
    for draft in drafts(path.parent):
        remove_tree(draft)


def _displaced(path: Path, fd: int | None) -> str:
    """Return the words on the owner that has the folder now, and how it came to it; empty: it is this process's."""
    if fd is not None and _is_named(fd, path):
        return _lost(fd)  # the path is not opened again: that would lose the lock
    try:
        other = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""  # it was removed, and no other owner has come
    try:
        owner = _owner_in(other, wait=True)
    finally:
        os.close(other)
    if owner is None or _is_this_process(owner):
        return ""
    return f"{owner}: the job has continued without this machine, in round {owner.round}"


def _lost(fd: int) -> str:
    """Take the lock again, which may have been lost; see Note [Run lock]. Return the words on another job that has
    taken it meanwhile, or empty."""
    who = "a job that left no record of itself"
    limit = time.monotonic() + _RECORD_LIMIT
    while True:
        is_held = _is_still_held(fd)
        owner = _owner_in(fd, wait=not is_held)
        if owner is not None and not _is_this_process(owner):
            who = str(owner)
            break
        if is_held:
            if owner is None:
                _write_record(fd)
            return ""
        if time.monotonic() >= limit:
            break
        time.sleep(0.01)  # the other one has just taken it, and is about to write its record
    return (
        f"{who}: this process has lost its lock by closing another descriptor of {LOCK_FILE}, as a copy or an upload "
        "of the folder from within the program does (leave that file out)"
    )


def _is_still_held(fd: int) -> bool:
    """Take a lock that this process should have. Return False if another process has it."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # a file system that fails says so in the save
    return True


def _is_this_process(owner: Owner) -> bool:
    # (What else describes it may change while it runs: the host's name, the user's in the environment.)
    mine = Owner.this_process()
    return (owner.boot, owner.namespace, owner.pid, owner.start) == (mine.boot, mine.namespace, mine.pid, mine.start)


def _round() -> dict[str, Any]:
    """Return the job and the round of this process as fields of an Owner; none outside of such a job."""
    found = knobs.round_()
    return {} if found is None else {"job": found[0], "round": found[1]}


def _let_go(path: Path, fd: int | None) -> None:
    if _displaced(path, fd):
        if fd is not None:
            os.close(fd)
        return
    try:
        path.unlink(missing_ok=True)  # while it is held: see Note [Run lock]
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):  # then it stays, and counts for nothing
            raise
    finally:
        if fd is not None:
            os.close(fd)


def _take_by_record(path: Path, fd: int) -> None:
    owner = _owner_in(fd, wait=False)
    if owner is not None and not owner.is_gone and not owner.is_superseded:
        raise _refusal(path, owner, by_record=True)
    # Two jobs that find the same stale record both put their own in its place; the last one stays, and after a while
    # both see which one that is. A file system without locks allows no more.
    _write_record(fd)
    time.sleep(_SETTLING)
    now = _owner_in(fd, wait=False)
    if now is None or (now.host, now.namespace, now.pid) != (socket.gethostname(), _proc.pid_namespace(), os.getpid()):
        raise _refusal(path, now, by_record=True)


def owner_of(root: Path) -> Owner | None:
    """Return the owner that holds a run's folder now, as far as can be known, or None. Takes no lock."""
    try:
        if _Held.here(root):
            return Owner.this_process()
        fd = os.open(root / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        owner = _owner_in(fd, wait=False)
        try:
            # The kernel is asked and the lock not tried: taking it would block a job that begins at this moment.
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError:
            return None if owner is None or owner.is_gone else owner
        return None if struct.unpack("hhqqi", answer)[0] == fcntl.F_UNLCK else owner
    finally:
        os.close(fd)


def _refusal(path: Path, owner: Owner | None, *, by_record: bool = False) -> CheckpointError:
    who = "a job that left no record of itself" if owner is None else str(owner)
    advice = "wait for it, stop it, or choose another folder"
    if by_record:
        advice += f". If it is gone, remove {path}: this file system has no locks that could show it"
    return CheckpointError(f"{path.parent} belongs to another job, {who}: {advice}")


def _owner_in(fd: int, *, wait: bool) -> Owner | None:
    """Read a lock file's record; an owner that has only just taken the lock gets a moment to write it."""
    limit = time.monotonic() + (_RECORD_LIMIT if wait else 0.0)
    while True:
        owner = Owner.from_json(os.pread(fd, _MAX_RECORD, 0))
        if owner is not None or time.monotonic() >= limit:
            return owner
        time.sleep(0.01)


def _write_record(fd: int) -> Owner:
    owner = Owner.this_process()
    content = json.dumps(asdict(owner)).encode() + b"\n"
    os.ftruncate(fd, 0)
    os.pwrite(fd, content, 0)
    return owner


# The identity of a process.


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in many containers; OSError since Python 3.13
        return str(os.getuid())


def _start_of(pid: int) -> int | None:
    """Read when a process started, in clock ticks after the boot; None if there is no such process."""
    found = _proc.stat(pid)
    return None if found is None or found.is_dead else found.started
