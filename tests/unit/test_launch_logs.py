"""Where logs are, and how many jobs are kept."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import LaunchError
from lockstep.launch.logs import KEPT, LogFolder
from lockstep.runs.homes import default_home, homes, make_spare_home, reference


def _write(folder: LogFolder, rank: int, data: bytes) -> None:
    fd = folder.open(rank)
    os.write(fd, data)
    os.close(fd)


def test_the_default_place_follows_the_xdg_specification() -> None:
    assert default_home({"XDG_STATE_HOME": "/state"}) == Path("/state/lockstep/logs")
    assert default_home({"HOME": "/home/me"}) == Path("/home/me/.local/state/lockstep/logs")
    assert default_home({"HOME": "/home/me", "XDG_STATE_HOME": "relative"}) == Path(
        "/home/me/.local/state/lockstep/logs"
    )


def test_logs_are_private_and_empty_ones_vanish(tmp_path: Path) -> None:
    logs = LogFolder(None, program="train", env={"XDG_STATE_HOME": str(tmp_path)})
    _write(logs, 1, b"hello\n")
    _write(logs, 2, b"")
    assert logs.path is not None
    assert logs.path.stat().st_mode & 0o777 == 0o700
    assert logs.log(1).stat().st_mode & 0o777 == 0o600
    logs.close()
    assert [file.name for file in logs.path.iterdir()] == ["rank1.log"]


def test_a_job_that_wrote_nothing_leaves_no_folder(tmp_path: Path) -> None:
    logs = LogFolder(None, program="train", env={"XDG_STATE_HOME": str(tmp_path)})
    _write(logs, 1, b"")
    logs.close()
    assert list((tmp_path / "lockstep/logs").iterdir()) == []


def test_the_newest_jobs_are_kept_and_the_running_ones(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    home = default_home(env)
    assert home is not None
    for number in range(KEPT + 5):
        (home / f"20200101-0000{number:02}-old-abcdef").mkdir(parents=True)
    (home / "mine").mkdir()
    running = LogFolder(None, program="running", env=env)
    _write(running, 1, b"x")
    assert running.path is not None
    oldest = home / "20190101-000000-running-abcdef"
    running.path.rename(oldest)
    running.path = oldest
    new = LogFolder(None, program="new", env=env)
    _write(new, 1, b"x")
    new.close()
    left = sorted(folder.name for folder in home.iterdir())
    assert "20200101-000005-old-abcdef" not in left
    assert "20200101-000006-old-abcdef" in left
    assert "mine" in left
    assert oldest.name in left
    assert len(left) == KEPT + 2
    running.close()


@pytest.mark.parametrize("step", ["open", "flock"])
def test_a_folder_that_another_job_prunes_before_it_is_held_is_made_again(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned: list[Path] = []

    def prune_first(module: Any, name: str) -> None:
        original = getattr(module, name)

        def prune(*args: Any) -> Any:
            if not pruned:
                pruned.extend((tmp_path / "lockstep/logs").iterdir())
                pruned[0].rmdir()
            return original(*args)

        monkeypatch.setattr(module, name, prune)

    logs = LogFolder(None, program="train", env={"XDG_STATE_HOME": str(tmp_path)})
    prune_first(*{"open": (os, "open"), "flock": (fcntl, "flock")}[step])
    made = logs.make()
    monkeypatch.undo()
    _write(logs, 1, b"x")
    assert [made] == pruned
    assert _is_held(made)
    logs.close()
    assert not _is_held(made)


def test_a_folder_is_held_by_who_prunes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "lockstep/logs"
    for number in range(KEPT):
        (home / f"20200101-0000{number:02}-old-abcdef").mkdir(parents=True)
    remove, removed = shutil.rmtree, []

    def held(path: Path) -> None:
        assert _is_held(path)
        removed.append(path.name)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", held)
    logs = LogFolder(None, program="train", env={"XDG_STATE_HOME": str(tmp_path)})
    _write(logs, 1, b"x")
    logs.close()
    assert removed == ["20200101-000000-old-abcdef"]


def _is_held(folder: Path) -> bool:
    """Whether a job holds or prunes it, so that no other would prune it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def test_a_given_folder_is_used_as_it_is(tmp_path: Path) -> None:
    logs = LogFolder(tmp_path / "a" / "b", program="train")
    _write(logs, 0, b"")
    logs.close()
    assert (tmp_path / "a" / "b" / "rank0.log").exists()


def test_a_place_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LaunchError, match=f"logs can't be written to {tmp_path}/file/logs: .*--log-dir"):
        LogFolder(tmp_path / "file" / "logs", program="train").open(1)


def test_a_home_that_can_not_be_written_has_a_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("in the way")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    logs = LogFolder(None, program="train", env={"HOME": str(tmp_path / "home")})
    _write(logs, 1, b"x")
    spare = temporary / f"lockstep-{os.getuid()}"
    assert logs.path is not None
    assert logs.path.parent == spare / "logs"
    assert spare.stat().st_mode & 0o777 == 0o700
    assert logs.moved is not None
    assert logs.moved.startswith(f"nothing can be made in {tmp_path}/home/.local/state/lockstep/logs (Not a directory)")
    assert str(logs.path) in logs.moved
    logs.close()
    spare.chmod(0o777)  # another user's, it may be
    assert make_spare_home().parent.parent == temporary
    assert make_spare_home().parent != spare
    assert spare / "logs" not in homes()


def test_a_run_is_named_where_commands_look_and_else_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home = tmp_path / "lockstep/logs"
    assert homes() == [home]
    assert list(temporary.iterdir()) == [], "to look makes nothing"
    assert reference(home / "20260101-000000-train-aaaaaa") == "20260101-000000-train-aaaaaa"
    assert reference(Path("/scratch/my logs")) == "'/scratch/my logs'"
    assert reference(Path("logs")) == "./logs"
    spare = make_spare_home()
    assert homes() == [home, spare]
    assert reference(spare / "20260101-000000-train-aaaaaa") == "20260101-000000-train-aaaaaa"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_home({}) == Path(pwd.getpwuid(os.getuid()).pw_dir, ".local/state/lockstep/logs")
    assert default_home({"HOME": ""}) == default_home({"HOME": "relative"}) == default_home({})
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert default_home({}) is None
