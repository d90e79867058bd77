"""What a journal says is undone, line by line; what it does not know of stays."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from lockstep.tools.verify import putback
from lockstep.tools.verify.putback import Journal, Lookout, TooLarge, put_back


def test_ranks_share_a_journal_and_the_first_one_keeps_what_was_there(tmp_path: Path) -> None:
    ranks = [Journal(tmp_path / "journal") for _ in range(2)]
    path = tmp_path / "last.pt"
    path.write_text("mine")
    for rank, journal in enumerate(ranks):
        journal.will_write(path)
        path.write_text(f"of rank {rank}")
    assert put_back(tmp_path / "journal").files == [str(path)]
    assert path.read_text() == "mine"


def test_a_file_keeps_its_other_names_its_time_and_its_mode(tmp_path: Path) -> None:
    path, other = tmp_path / "last.pt", tmp_path / "other.pt"
    path.write_text("mine")
    path.chmod(0o640)
    os.utime(path, (1e9, 1e9))
    os.link(path, other)
    journal = Journal(tmp_path / "journal")
    journal.will_write(path)
    path.write_text("theirs, which is longer")
    put_back(tmp_path / "journal")
    assert (other.read_text(), path.stat().st_ino) == ("mine", other.stat().st_ino)
    assert (path.stat().st_mtime, path.stat().st_mode & 0o777) == (1e9, 0o640)


def test_what_was_moved_into_a_new_folder_by_another_program_is_left_and_told(tmp_path: Path) -> None:
    old, made = tmp_path / "old.pt", tmp_path / "made"
    old.write_text("mine")
    os.utime(old, (1e9, 1e9))
    journal = Journal(tmp_path / "journal")
    journal.will_make(str(made))
    made.mkdir()
    (made / "written.h5").write_text("by a library that is not Python's")
    old.rename(made / "old.pt")  # as `mv` does, of which nobody tells the journal
    (left,) = put_back(tmp_path / "journal").left
    assert left.startswith(str(made))
    assert (made / "old.pt").read_text() == "mine"
    assert not (made / "written.h5").exists()


def test_a_file_that_is_not_put_back_has_a_copy_until_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "first.pt", tmp_path / "last.pt"]
    journal = Journal(tmp_path / "journal")
    for path in paths:
        path.write_text(f"mine, {path.name}")
        journal.will_write(path)
        path.write_text("theirs")

    def fills_the_disk(source: BinaryIO, file: BinaryIO, *_: object) -> None:
        content = source.read()
        file.write(content[:4])
        if b"last" in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content[4:])

    with monkeypatch.context() as here:
        here.setattr(shutil, "copyfileobj", fills_the_disk)
        done = put_back(tmp_path / "journal")
    assert (done.files, done.left) == ([str(paths[0])], {str(paths[1]): "No space left on device"})
    assert paths[0].read_text() == "mine, first.pt"
    assert {path: copy.read_text() for path, copy in done.kept.items()} == {str(paths[1]): "mine, last.pt"}
    assert put_back(tmp_path / "journal").left[str(paths[0])] == "No such file or directory", "its copy is gone"
    assert paths[1].read_text() == "mine, last.pt"


def test_another_file_that_has_got_the_name_is_not_written_over(tmp_path: Path) -> None:
    best, last = tmp_path / "best.pt", tmp_path / "last.pt"
    for path in (best, last):
        path.write_text(f"mine, {path.name}")
        path.chmod(0o640)
    journal = Journal(tmp_path / "journal")
    journal.will_write(last)
    last.unlink()
    journal.will_link(best, last)
    os.link(best, last)
    assert put_back(tmp_path / "journal").files == [str(last)]
    assert [path.read_text() for path in (best, last)] == ["mine, best.pt", "mine, last.pt"]
    assert last.stat().st_mode & 0o777 == 0o640


def test_a_file_that_is_written_under_a_name_that_the_run_gave_it_is_put_back(tmp_path: Path) -> None:
    path, name = tmp_path / "last.pt", tmp_path / "name.pt"
    path.write_text("mine")
    journal = Journal(tmp_path / "journal")
    for _ in range(2):
        journal.will_link(path, name)
        os.link(path, name)
        journal.will_write(name)
        name.write_text("theirs")
        journal.will_write(name)
        name.unlink()
    put_back(tmp_path / "journal")
    assert (path.read_text(), name.exists()) == ("mine", False)


def _moved(path: Path, to: Path, *, other: Path) -> Journal:
    """Make a file of two names, ``path`` and ``other``, let a run move the first, and return the run's journal."""
    path.write_text("mine")
    os.link(path, other)
    journal = Journal(path.parent / "journal")
    journal.will_move(str(path), str(to))
    path.rename(to)
    return journal


def test_a_file_that_was_moved_and_written_keeps_its_other_names(tmp_path: Path) -> None:
    path, other, moved = (tmp_path / name for name in ("last.pt", "other.pt", "moved.pt"))
    journal = _moved(path, moved, other=other)
    journal.will_write(moved)
    moved.write_text("theirs")
    assert put_back(tmp_path / "journal").left == {}
    assert (other.read_text(), path.stat().st_ino, moved.exists()) == ("mine", other.stat().st_ino, False)


def test_a_file_that_is_written_where_another_was_moved_from_takes_no_content_along(tmp_path: Path) -> None:
    last, best, previous = (tmp_path / name for name in ("last.pt", "best.pt", "previous.pt"))
    journal = _moved(last, previous, other=best)
    for path in (last, previous):
        journal.will_write(path)
        path.write_text("theirs")
    assert put_back(tmp_path / "journal").left == {}
    assert (last.read_text(), best.read_text(), previous.exists()) == ("mine", "mine", False)
    assert last.stat().st_ino == best.stat().st_ino


@contextmanager
def _no_right_to_write_what_is_read_only() -> Iterator[None]:
    """Take CAP_DAC_OVERRIDE from this thread, if it has it: root is a user like others then."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # the third version, this thread
    assert libc.capget(header, words) == 0
    effective = words[0]
    words[0] = effective & ~(1 << 1)
    assert libc.capset(header, words) == 0
    try:
        yield
    finally:
        words[0] = effective
        assert libc.capset(header, words) == 0


def test_a_file_that_the_script_leaves_read_only_is_put_back(tmp_path: Path) -> None:
    path, other = tmp_path / "last.pt", tmp_path / "other.pt"
    path.write_text("mine")
    path.chmod(0o640)
    os.link(path, other)
    Journal(tmp_path / "journal").will_write(path)
    path.write_text("theirs")
    path.chmod(0o444)
    with _no_right_to_write_what_is_read_only():
        assert put_back(tmp_path / "journal").left == {}
    assert (other.read_text(), path.stat().st_mode & 0o777) == ("mine", 0o640)
    assert path.stat().st_ino == other.stat().st_ino


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("is_another", [False, True])
def test_a_file_that_the_script_gives_to_somebody_else_has_its_owner_again(tmp_path: Path, is_another: bool) -> None:
    path = tmp_path / "last.pt"
    path.write_text("mine")
    os.chown(path, 12, 34)
    path.chmod(0o640)
    Journal(tmp_path / "journal").will_write(path)
    if is_another:
        path.rename(tmp_path / "away.pt")
    path.write_text("theirs")
    os.chown(path, 56, 78)
    assert put_back(tmp_path / "journal").left == {}
    found = path.stat()
    assert (path.read_text(), found.st_uid, found.st_gid, found.st_mode & 0o777) == ("mine", 12, 34, 0o640)


def test_a_process_that_is_forked_while_a_file_is_copied_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "last.pt", tmp_path / "journal" / "lock"
    path.write_text("mine")
    copy2, inherited = shutil.copy2, list[int]()

    def forks_meanwhile(*args: str) -> None:
        """Keep what a forked process has of the lock: the same open file."""
        copy2(*args)
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        fds = [fd for fd in fds if os.path.realpath(f"/proc/self/fd/{fd}") == str(lock)]
        inherited.extend(os.dup(fd) for fd in fds)

    monkeypatch.setattr(shutil, "copy2", forks_meanwhile)
    Journal(tmp_path / "journal").will_write(path)
    (held,) = inherited
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(held)


def test_a_file_that_cannot_be_looked_at_is_not_taken_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    path.write_text("mine")

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    journal = Journal(tmp_path / "journal")
    with monkeypatch.context() as here:
        here.setattr(os, "lstat", fails)
        with pytest.raises(OSError, match="Input/output error"):
            journal.will_write(path)
    put_back(tmp_path / "journal")
    assert path.read_text() == "mine"


def test_a_removed_folder_has_its_mode_again(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o2777)
    Journal(tmp_path / "journal").will_remove(str(folder))
    folder.rmdir()
    put_back(tmp_path / "journal")
    assert folder.stat().st_mode & 0o7777 == 0o2777


@pytest.mark.parametrize("in_the_way", ["a folder", "a full folder", "a file"])
def test_a_folder_is_moved_back_or_it_is_told_where_it_is(tmp_path: Path, in_the_way: str) -> None:
    journal, before, away = Journal(tmp_path / "journal"), tmp_path / "run", tmp_path / "run.old"
    before.mkdir()
    (before / "last.pt").write_text("mine")
    journal.will_move(str(before), str(away))
    before.rename(away)
    if in_the_way == "a file":
        before.touch()  # by another program
    else:
        before.mkdir()
        if in_the_way == "a full folder":
            (before / "log").touch()
    done = put_back(tmp_path / "journal")
    if in_the_way == "a folder":
        assert (done.left, (before / "last.pt").read_text(), away.exists()) == ({}, "mine", False)
    else:
        why = "Directory not empty" if in_the_way == "a full folder" else "Not a directory"
        assert done.left == {str(before): f"{why}; it is now at {away}"}
        assert (done.lost, (away / "last.pt").read_text()) == ([str(before)], "mine")


def test_a_folder_whose_move_has_failed_stays_where_it_is(tmp_path: Path) -> None:
    journal, folder, full = Journal(tmp_path / "journal"), tmp_path / "run", tmp_path / "full"
    for each in (folder, full):
        each.mkdir()
        (each / "last.pt").write_text(f"mine, {each.name}")
    journal.will_move(str(folder), str(full))
    with pytest.raises(OSError, match="Directory not empty"):
        folder.rename(full)
    assert put_back(tmp_path / "journal") == putback.PutBack()
    assert [(each / "last.pt").read_text() for each in (folder, full)] == ["mine, run", "mine, full"]


def test_a_file_with_other_names_is_moved_back_over_what_another_program_has_put_there(tmp_path: Path) -> None:
    path, other, moved = (tmp_path / name for name in ("last.pt", "other.pt", "moved.pt"))
    path.write_text("mine")
    os.link(path, other)
    Journal(tmp_path / "journal").will_move(str(path), str(moved))
    path.rename(moved)
    path.write_text("by another program")
    assert put_back(tmp_path / "journal").left == {}
    assert (path.read_text(), path.stat().st_ino, moved.exists()) == ("mine", other.stat().st_ino, False)


def test_a_removed_folder_in_whose_place_a_file_is_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    Journal(tmp_path / "journal").will_remove(str(folder))
    folder.rmdir()
    folder.touch()  # by another program
    done = put_back(tmp_path / "journal")
    assert (done.left, done.lost) == ({str(folder): "File exists"}, [str(folder)])


def test_files_that_are_changed_after_a_folder_was_moved_have_copies_of_their_own(tmp_path: Path) -> None:
    journal, moved = Journal(tmp_path / "journal"), tmp_path / "moved"
    moved.mkdir()
    paths = [moved / "first.pt", tmp_path / "last.pt"]
    for path in paths:
        path.write_text(f"mine, {path.name}")
    journal.will_write(paths[0])
    paths[0].write_text("theirs")
    journal.will_move(str(moved), str(tmp_path / "away"))
    moved.rename(tmp_path / "away")
    journal.will_write(paths[1])
    paths[1].write_text("theirs")
    put_back(tmp_path / "journal")
    assert [path.read_text() for path in paths] == [f"mine, {path.name}" for path in paths]


@pytest.mark.parametrize("mover", [0, 1])
def test_a_folder_that_takes_the_place_of_another_brings_files_that_have_no_copy(tmp_path: Path, mover: int) -> None:
    ranks = [Journal(tmp_path / "journal") for _ in range(2)]
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "last.pt").write_text(f"mine, {folder.name}")
    ranks[0].will_write(here / "last.pt")
    (here / "last.pt").unlink()
    ranks[mover].will_remove(str(here))
    here.rmdir()
    ranks[mover].will_move(str(there), str(here))
    there.rename(here)
    ranks[0].will_write(here / "last.pt")
    (here / "last.pt").write_text("theirs")
    put_back(tmp_path / "journal")
    assert [(folder / "last.pt").read_text() for folder in (here, there)] == ["mine, here", "mine, there"]


def test_a_line_that_was_cut_off_belongs_to_a_file_that_was_not_changed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("first.pt", "second.pt", "third.pt")]
    ranks, lines = [Journal(tmp_path / "journal") for _ in range(2)], tmp_path / "journal" / "journal.jsonl"
    for path in paths:
        path.write_text(f"mine, {path.name}")
    ranks[0].will_write(paths[0])
    paths[0].write_text("theirs")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (lines.stat().st_size + 20, limits[1]))  # as on a disk that is full
    try:
        with pytest.raises(OSError, match="File too large"):
            ranks[0].will_write(paths[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ranks[1].will_write(paths[2])
    paths[2].write_text("theirs")
    with lines.open("a") as file:
        file.write('\n{"what": "changed", "pa')  # where a rank was killed
    assert put_back(tmp_path / "journal").files == [str(paths[0]), str(paths[2])]
    assert [path.read_text() for path in paths] == [f"mine, {path.name}" for path in paths]


def test_a_link_that_is_not_put_back_is_told_with_its_target(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.symlink_to("best.pt")
    Journal(tmp_path / "journal").will_write(path, follows=False)
    path.unlink()
    path.mkdir()  # by another program
    done = put_back(tmp_path / "journal")
    assert done.left == {str(path): "Is a directory; it was a link to best.pt"}
    assert done.lost == [str(path)]


def test_a_file_of_which_the_disk_holds_no_copy_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    path.write_text("mine")
    monkeypatch.setattr(putback, "_FREE", 1 << 60)
    with pytest.raises(TooLarge, match=r"last\.pt.*set TMPDIR to a larger disk"):
        Journal(tmp_path / "journal").will_write(path)


def test_caches_and_the_folders_that_are_spared_are_left_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", [tmp_path / "spared"])
    for name in ("spared", "__pycache__"):
        journal.will_make(str(tmp_path / name / "below"))
        journal.will_write(tmp_path / name / "file")
    assert put_back(tmp_path / "journal") == putback.PutBack()


def test_a_lookout_tells_each_change_once(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "kept").write_text("1")
    lookout = Lookout([tmp_path, tmp_path], tmp_path / "without")
    assert lookout.changed() == []
    (tmp_path / "kept").write_text("12")
    (tmp_path / "new").touch()
    (tmp_path / "without" / "new").touch()
    assert lookout.changed() == [str(tmp_path / "kept"), str(tmp_path / "new")]
    assert lookout.changed() == []


def test_a_line_for_which_the_disk_has_no_room_leaves_the_others_valid(tmp_path: Path) -> None:
    """The script gets the error before it has changed the file, and what it has changed before is undone."""
    kept, made = tmp_path / "kept.pt", tmp_path / "made.pt"
    kept.write_text("mine")
    ranks = [Journal(tmp_path / "journal") for _ in range(2)]
    ranks[0].will_write(kept)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "journal" / "journal.jsonl").stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            ranks[0].will_write(made)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept.write_text("theirs")
    ranks[1].will_write(made)
    made.touch()
    assert put_back(tmp_path / "journal").files == [str(kept), str(made)]
    assert (kept.read_text(), made.exists()) == ("mine", False)
