"""Run a Python function in a mount namespace of its own, where it may mount what it likes and nobody sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launching import python_path

_ROOT = Path(__file__).resolve().parents[2]
_REMOVED = {"PYTEST_CURRENT_TEST"}


@cache
def why_not(what: str) -> str | None:
    """Why this machine can't do it, in its own words; None if it can.

    Args:
        what: shell commands that try it and leave nothing behind.
    """
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return "there is no unshare"
    return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()}"


def skip_unless(what: str, purpose: str) -> None:
    """Skip the test where the machine can't do ``what``, and say why."""
    reason = why_not(what)
    if reason is not None:
        pytest.skip(f"{purpose} needs root and its own mounts here: {reason}")


def run_inside(module: str, *arguments: str, limit: float) -> Any:
    """What ``python -m module arguments`` prints on its last line, as JSON, in a mount namespace of its own.

    Raises:
        AssertionError: it failed.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _REMOVED}
    environment["PYTHONPATH"] = python_path(_ROOT)
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False
    )
    assert done.returncode == 0, f"{module} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return json.loads(done.stdout.strip().splitlines()[-1])
