"""Where runs leave their logs and records unless they are told otherwise, and what commands take for a run that lies
there or elsewhere."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path


def default_home(env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder for the logs of jobs that name none, by the XDG base directory specification; None: this user
    has no home."""
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


def make_spare_home() -> Path:
    """Make the folder for logs where the home can't be written: this user's own, for temporary files.

    Others may write there as well: a folder of that name that is another's, or open to others, is not taken.
    """
    import tempfile  # here and below: commands that need neither are to begin without it

    home = _spare()
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    return Path(home if _is_private(home) else tempfile.mkdtemp(prefix=f"{home.name}-"), "logs")


def homes() -> list[Path]:
    """Return the folders that hold the records of runs that named no other."""
    home, spare = default_home(), _spare()
    return [*([] if home is None else [home]), *([spare / "logs"] if _is_private(spare) else [])]


def reference(folder: Path) -> str:
    """Return what commands take, as RUN, for the run whose record is in ``folder``: its name where they look for names,
    else the folder, quoted for a shell."""
    if folder.parent in homes():
        return folder.name
    words = str(folder)
    return shlex.quote(words if os.sep in words else os.path.join(os.curdir, words))


def _spare() -> Path:
    import tempfile

    return Path(tempfile.gettempdir(), f"lockstep-{os.getuid()}")


def _is_private(folder: Path) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not stat.S_IMODE(found.st_mode) & 0o077
