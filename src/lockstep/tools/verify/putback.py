"""Undo after each run the changes to files that the script has made: the user's files are as they were, and every run
starts from the same files.

Note [Put back]
~~~~~~~~~~~~~~~
A script saves its weights, resumes from those that it finds, and makes folders that must not exist before. A scratch
folder to run in would have to be a copy of everything that the script reads, wherever that is. So the script works
where it always does, and each file is copied before the script changes it. Python tells an audit hook of each file that
is opened for writing, removed or moved, before that happens, whether by the script, its libraries, or the worker
processes that it forks. The hook adds a line to a journal that the ranks of a run share (under a lock, so that the
first of them copies what the others would overwrite), and the command undoes the lines from the last to the first when
the run is over, however it ended: no rank writes any more then, and signals that end the command wait until it is done.

A copy goes once its content is back in the file, and the journal's folder only when all of them have gone: a disk may
be full, or a folder may be where the file was. Then the user is told what to copy back, and nothing else runs.

The hook does not see writes outside of Python: by libraries in other languages (those of torch and safetensors are
wrapped by name), and by programs that the script starts. So the command also scans the script's folder before and
after, and reports files that have changed. Caches are left: files that were compiled or downloaded there help the next
run.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.text import as_size

_LINES, _LOCK = "journal.jsonl", "lock"
#: The suffix of a journal's folder.
JOURNAL = ".journal"
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
#: Bytes of the disk that copies leave free.
_FREE = 1 << 28
#: Seconds by which a file system's clock may be behind.
_TICK = 0.02
#: Names of folders that are caches, or that a look over a folder leaves out.
_CACHES = ("__pycache__",)
_UNSEEN = (*_CACHES, ".git", ".hg", ".venv", "node_modules")
#: The most files that are looked over.
_MOST = 20_000


class TooLarge(LockstepError):
    """The script is about to change a file of which no copy fits on the disk."""

    code = "too-large-to-put-back"


class NotPutBack(LockstepError):
    """Files, links or folders that the script has changed can't be put back as they were before."""

    code = "not-put-back"


# In a rank ------------------------------------------------------------------------------------------------------------


class Journal:
    """Copies what is about to be changed, and writes down how to undo it; see Note [Put back].

    Args:
        folder: the folder of this run's journal, which the ranks share.
        spared: folders whose changes are not undone.
    """

    def __init__(self, folder: str | Path, spared: Sequence[str | Path] = ()) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._spared = tuple(_real(each) + os.sep for each in (self._folder, *spared, *_caches()))
        self._here = threading.local()
        self._read = 0
        #: Paths that need no further line: made in this run, or copied.
        self._known: set[str] = set()
        #: Names that the run has given to files -> the name that such a file had before.
        self._names: dict[str, str] = {}

    def listen(self) -> None:
        """Follow from now on all files that Python is about to write, also in forked processes."""
        actions: dict[str, Callable[..., None]] = {
            "open": self._opens,
            "os.truncate": lambda path, *_: self.will_write(path),
            "os.remove": lambda path, at=-1: self.will_write(path, at=at, follows=False),
            "os.rename": lambda source, to, at=-1, to_at=-1: self.will_move(_below(source, at), _below(to, to_at)),
            "os.mkdir": lambda path, _mode=0, at=-1: self.will_make(_below(path, at)),
            "os.rmdir": lambda path, at=-1: self.will_remove(_below(path, at)),
            "os.symlink": lambda _, path, at=-1: self.will_write(path, at=at, follows=False),
            "os.link": lambda source, to, at=-1, to_at=-1: self.will_link(_below(source, at), _below(to, to_at)),
            "sqlite3.connect": lambda path, *_: self.will_write(path),
        }

        def heard(event: str, args: tuple[Any, ...]) -> None:
            action = actions.get(event)
            if action is not None and not getattr(self._here, "is_busy", False) and not sys.is_finalizing():
                self._here.is_busy = True
                try:
                    action(*args)
                finally:
                    self._here.is_busy = False

        sys.addaudithook(heard)

    def announce(self, owner: Any, name: str, place: int, keyword: str) -> None:
        """Have a function that writes without Python announce the file that it is about to write.

        Args:
            owner: the module or class that holds the function.
            name: the function's name there.
            place: the position of the path among its arguments.
            keyword: the path's name as a keyword.
        """
        function = getattr(owner, name)

        @functools.wraps(function)
        def announced(*args: Any, **options: Any) -> Any:
            path = args[place] if len(args) > place else options.get(keyword)
            if isinstance(path, (str, bytes, os.PathLike)):
                self.will_write(path)
            return function(*args, **options)

        setattr(owner, name, announced)

    def _opens(self, path: Any, _mode: Any = None, flags: Any = 0, *_: Any) -> None:
        if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int):
            self.will_write(path)

    def will_write(self, path: Any, *, at: int = -1, follows: bool = True) -> None:
        """Copy the file at a path, as it is about to be written, replaced or removed."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        where = _real(_below(path, at)) if follows else _place(_below(path, at))
        if self._is_spared(where):
            return
        with self._alone():
            self._keep(where)

    def will_move(self, source: str, to: str) -> None:
        """Copy the files at both ends of a move."""
        first, second = _place(source), _place(to)
        if self._is_spared(first) and self._is_spared(second):
            return
        with self._alone():
            if os.path.isdir(first) and not os.path.islink(first):
                if os.path.lexists(second):
                    self._keep_folder(second)
                self._add({"what": "moved", "path": second, "from": first, "id": _id(os.lstat(first))})
            elif os.path.lexists(first):
                self._keep(first)
                self._keep(second)
                found = os.lstat(first)
                if found.st_nlink > 1:  # moved back it keeps its other names
                    self._add({"what": "moved", "path": second, "from": first, "id": _id(found)})

    def will_link(self, source: str | Path, to: str | Path) -> None:
        """Note that a file is about to have another name: what is written under it is written to the file."""
        first, second = _place(str(source)), _place(str(to))
        if not self._is_spared(second):
            with self._alone():
                self._keep(second)
                if not self._is_spared(first):
                    self._add({"what": "linked", "path": second, "from": self._names.get(first, first)})

    def will_make(self, path: str) -> None:
        """Note that a folder is about to be made."""
        where = _place(path)
        if not self._is_spared(where):
            with self._alone():
                if not os.path.lexists(where):
                    self._add({"what": "folder", "path": where, "time": time.time()})

    def will_remove(self, path: str) -> None:
        """Note that an empty folder is about to be removed."""
        where = _place(path)
        if not self._is_spared(where):
            with self._alone():
                self._keep_folder(where)

    def _keep_folder(self, where: str) -> None:
        if os.path.isdir(where) and not os.listdir(where):
            self._add({"what": "removed folder", "path": where, "mode": stat.S_IMODE(os.stat(where).st_mode)})

    def _keep(self, where: str) -> None:
        first = self._names.pop(where, None)
        if first is not None:
            self._keep(first)
        if where in self._known:
            return
        try:
            found = os.lstat(where)
        except (FileNotFoundError, NotADirectoryError):
            self._add({"what": "made", "path": where})
            return
        if stat.S_ISLNK(found.st_mode):
            self._add({"what": "link", "path": where, "target": os.readlink(where), "ns": found.st_mtime_ns})
        elif stat.S_ISREG(found.st_mode):
            free = shutil.disk_usage(self._folder).free - _FREE
            if found.st_size > free:
                raise TooLarge(
                    f"the script is about to change {where} ({as_size(found.st_size)}), of which a copy is kept "
                    f"while it is verified, and {self._folder} has no room for it ({as_size(max(free, 0))}): "
                    "set TMPDIR to a larger disk, or let the script write elsewhere"
                )
            copy = str(self._read)  # where its line begins
            shutil.copy2(where, self._folder / copy)
            owner = [found.st_uid, found.st_gid]
            self._add({"what": "changed", "path": where, "copy": copy, "owner": owner, "id": _id(found)})

    def _is_spared(self, where: str) -> bool:
        parts = where.split(os.sep)
        return where.startswith(self._spared) or any(each in parts for each in _CACHES)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other ranks and workers from writing to the journal, and read what they have written."""
        was_busy, self._here.is_busy = getattr(self._here, "is_busy", False), True
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._catch_up()
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process that another thread has forked meanwhile has it, too
            os.close(fd)
            self._here.is_busy = was_busy

    def _catch_up(self) -> None:
        lines = self._folder / _LINES
        if lines.exists() and lines.stat().st_size > self._read:
            with open(lines) as file:
                file.seek(self._read)
                for line in _complete(file.read()):
                    self._learn(line)
            self._read = lines.stat().st_size

    def _learn(self, line: dict[str, Any]) -> None:
        if line["what"] in ("made", "changed", "link"):
            self._known.add(line["path"])
        elif line["what"] == "linked":
            self._names[line["path"]] = line["from"]
        elif line["what"] == "moved":  # other files may be there now
            ends = (line["from"], line["path"])
            below = tuple(each + os.sep for each in ends)
            self._known = {each for each in self._known if each not in ends and not each.startswith(below)}

    def _add(self, line: dict[str, Any]) -> None:
        with open(self._folder / _LINES, "ab", opener=_private) as file:
            file.write(b"\n" + json.dumps(line).encode())  # (after what may be half a line)
        self._learn(line)
        self._read = os.stat(self._folder / _LINES).st_size


def _complete(text: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal.

    One may be cut off, by a full disk or because its process was killed: then the file was not changed.
    """
    for line in text.splitlines():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def _id(found: os.stat_result) -> list[int]:
    """Return what a file keeps while it has another name or other content."""
    return [found.st_dev, found.st_ino]


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _caches() -> list[str]:
    """Return folders that are caches, and those that hold no files."""
    found = ["/dev", "/proc", "/sys", os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")]
    found += [os.environ[name] for name in ("HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR") if os.environ.get(name)]
    triton = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton")
    return [*found, triton, *(str(each) for each in Path(tempfile.gettempdir()).glob("torchinductor_*"))]


def _below(path: Any, folder: int) -> str:
    """Return a path that may be relative to an open folder (-1: to the working folder)."""
    text = os.fsdecode(path)
    if folder is None or folder < 0 or os.path.isabs(text):
        return text
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)


def _real(path: Any) -> str:
    return os.path.realpath(os.fsdecode(path))


def _place(path: str) -> str:
    """Return a path with the links in its folder resolved; its last part may be a link itself."""
    head, tail = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(head), tail)


# In the command -------------------------------------------------------------------------------------------------------


@dataclass
class PutBack:
    """The files that a run has written, and whether they were restored."""

    #: Files that are as they were before the run.
    files: list[str] = field(default_factory=list)
    #: Files that are not as they were, with the reason.
    left: dict[str, str] = field(default_factory=dict)
    #: Those of them that were there before the run, without which no other run can begin as it did.
    lost: list[str] = field(default_factory=list)
    #: The copies of files whose former content is nowhere else.
    kept: dict[str, Path] = field(default_factory=dict)


def journal_of(home: Path) -> Path:
    """Return the folder of the journal of the run in the folder ``home``, beside it."""
    return home.with_suffix(JOURNAL)


def put_back(folder: str | Path) -> PutBack:
    """Undo the changes in the journal of ``folder``, the last line first; copies go as soon as their files are back."""
    result, home = PutBack(), Path(folder)
    lines = home / _LINES
    entries = _complete(lines.read_text()) if lines.exists() else ()
    for entry in reversed([*entries]):
        path = entry["path"]
        try:
            was_there = _undo(entry, home)
        except OSError as error:
            _note_failure(result, entry, home, error.strerror or str(error))
            continue
        if was_there and entry["what"] != "folder" and path not in result.files:
            result.files.append(path)
    result.files.reverse()
    return result


def _note_failure(result: PutBack, entry: dict[str, Any], home: Path, why: str) -> None:
    """Note a line that could not be undone, and where what it was about is now."""
    what, path = entry["what"], entry["path"]
    is_lost = what in ("link", "moved", "removed folder")
    if what == "link":
        why += f"; it was a link to {entry['target']}"
    elif what == "moved":
        if not os.path.isdir(path):  # a file: a copy of it was kept before it was moved
            return
        path, why = entry["from"], f"{why}; it is now at {path}"
    elif what == "changed" and (copy := home / entry["copy"]).exists():
        result.kept[path] = copy
        is_lost = True
    result.left[path] = why
    if is_lost and path not in result.lost:
        result.lost.append(path)


def _undo(entry: dict[str, Any], home: Path) -> bool:
    """Undo one line. Return whether there was anything to undo."""
    what, path = entry["what"], entry["path"]
    if what == "moved":
        if not os.path.lexists(path) or _has(entry["from"], entry["id"]):  # (the latter was not moved)
            return False
        os.rename(path, entry["from"])
    elif what == "removed folder":
        if os.path.isdir(path):
            return False
        os.makedirs(path, entry["mode"])
        os.chmod(path, entry["mode"])  # whatever the umask
    elif what == "folder":
        if not os.path.isdir(path):
            return False
        _clear(path, entry["time"])
    elif what == "changed":
        _restore(home / entry["copy"], path, entry)
    elif what == "linked":
        return False
    else:
        is_there = os.path.lexists(path)
        if is_there:
            os.unlink(path)
        if what == "link":
            os.symlink(entry["target"], path)
            os.utime(path, ns=(entry["ns"], entry["ns"]), follow_symlinks=False)
        return is_there
    return True


def _clear(folder: str, made: float) -> None:
    """Remove a folder that the run made, with files that programs outside of Python have written there since.

    Older files have been moved there, so they stay, and the folder with them.

    Raises:
        OSError: the folder is not empty.
    """
    for home, folders, files in os.walk(folder, topdown=False):
        for name in [*files, *(each for each in folders if os.path.islink(os.path.join(home, each)))]:
            path = os.path.join(home, name)
            if os.lstat(path).st_mtime >= made - _TICK:
                os.unlink(path)
        for name in folders:
            path = os.path.join(home, name)
            if not os.path.islink(path) and not os.listdir(path):
                os.rmdir(path)
    os.rmdir(folder)


def _restore(copy: Path, path: str, entry: dict[str, Any]) -> None:
    """Write a file's former content into it: it stays the same file, with its owner and its other names.

    Another file that is there now goes without being written: it may be one of the user's, which has other names. The
    copy is removed once the content is back.
    """
    with open(copy, "rb") as source:
        if not (is_there := _has(path, entry["id"], is_file=True)):
            with suppress(FileNotFoundError):
                os.unlink(path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
        else:
            with suppress(PermissionError):  # somebody else's, which may be writable all the same
                os.chmod(path, 0o600)  # the script may have left it read-only
        with open(path, "r+b" if is_there else "xb", opener=_private) as file:
            shutil.copyfileobj(source, file, 1 << 20)
            file.truncate()
    try:
        found = os.stat(path)
        if entry["owner"] != [found.st_uid, found.st_gid]:
            os.chown(path, *entry["owner"])
    finally:
        try:
            shutil.copystat(copy, path)  # after its owner, with whom some modes go
        finally:
            os.unlink(copy)


def _has(path: str, wanted: list[int], *, is_file: bool = False) -> bool:
    """Return whether what has been known by its id has this name now."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    return _id(found) == wanted and (stat.S_ISREG(found.st_mode) or not is_file)


class Lookout:
    """Notices which files in some folders change, whoever changes them: see Note [Put back].

    Args:
        folders: the folders to scan.
        without: a folder that is left out.
    """

    def __init__(self, folders: Sequence[str | Path], without: str | Path) -> None:
        self._folders = [*dict.fromkeys(_real(each) for each in folders)]
        self._without = _real(without)
        self._found = self._look()

    def changed(self) -> list[str]:
        """Return the files that have changed since the last call, as far as they were looked over."""
        found = self._look()
        before, self._found = self._found, found
        if len(before) >= _MOST or len(found) >= _MOST:  # not all of them were seen
            return sorted(path for path in {*before} & {*found} if before[path] != found[path])
        return sorted(path for path in {*before} | {*found} if before.get(path) != found.get(path))

    def _look(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for folder in self._folders:
            for home, folders, files in os.walk(folder):
                folders[:] = [each for each in folders if each not in _UNSEEN]
                if home == self._without or home.startswith(self._without + os.sep):
                    folders[:] = []
                    continue
                for name in files:
                    path = os.path.join(home, name)
                    try:
                        status = os.lstat(path)
                    except FileNotFoundError:  # gone meanwhile
                        continue
                    found[path] = (status.st_size, status.st_mtime_ns)
                    if len(found) >= _MOST:
                        return found
        return found
