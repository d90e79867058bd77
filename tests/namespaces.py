"""Whether this machine lets a test mount what it likes, in a mount namespace of its own, where nobody sees it."""

from __future__ import annotations

import subprocess
from functools import cache

import pytest


@cache
def why_not(what: str) -> str | None:
    """Why this machine can't do it, in its own words; None if it can.

    Args:
        what: shell commands that try it and leave nothing behind.
    """
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-ec", what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except FileNotFoundError:
        return "there is no unshare"
    return None if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr.strip()}"


def skip_unless(what: str, purpose: str) -> None:
    """Skip the test where the machine can't do ``what``, and say why."""
    reason = why_not(what)
    if reason is not None:
        pytest.skip(f"{purpose} needs root and its own mounts here: {reason}")
