"""Plant one fault in a copy of the package, and see whether the tests notice."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.launching import python_path

_ROOT = Path(__file__).resolve().parents[2]
_OUTCOME = re.compile(r"(\d+) (failed|passed|error)")


@dataclass(frozen=True)
class Fault:
    """One change that somebody might make by mistake."""

    #: What it is, for the test's name.
    name: str
    #: The file, below ``src/lockstep``.
    file: str
    #: The text there, which must occur exactly once, and what comes in its place.
    before: str
    after: str
    #: pytest's arguments for tests that are to notice: files, or single tests.
    noticed_by: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a run of tests ended."""

    passed: int
    #: Failed, or with an error in their set-up or end.
    failed: int
    text: str


def plant(fault: Fault, folder: Path) -> Path:
    """A copy of the package with ``fault`` in it, below ``folder``; what to put first on the path.

    Raises:
        LookupError: the text is not there exactly once: the code has changed, and the fault must follow it.
    """
    planted = changed(fault)
    source = folder / "src"
    shutil.copytree(_ROOT / "src", source, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    (source / "lockstep" / fault.file).write_text(planted)
    return source


def changed(fault: Fault) -> str:
    """The fault's file with the fault in it.

    Raises:
        LookupError: as :func:`plant`.
    """
    text = (_ROOT / "src" / "lockstep" / fault.file).read_text()
    if text.count(fault.before) != 1:
        raise LookupError(f"{fault.name}: {fault.file} has {text.count(fault.before)} places like {fault.before!r}")
    return text.replace(fault.before, fault.after)


def run_tests(source: Path | None, tests: tuple[str, ...], *, limit: float) -> Outcome:
    """Run tests of this project over the package in ``source`` (None: over this one).

    Raises:
        RuntimeError: pytest could not run them, so the outcome says nothing.
    """
    env = dict(os.environ)
    env["PYTHONPATH"] = python_path(_ROOT) if source is None else python_path(source, _ROOT)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=limit, check=False)
    counts = {kind: int(count) for count, kind in _OUTCOME.findall("".join(done.stdout.splitlines()[-1:]))}
    if done.returncode not in (0, 1) or not counts:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Outcome(counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0), done.stdout)
