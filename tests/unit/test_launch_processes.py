"""Which processes of a job are left to themselves for a while when it ends."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lockstep.launch.processes import _is_tracker
from tests.launching import wait_for

#: Starts a tracker, and tells its process; ends with standard input.
_START = "from {module} import _resource_tracker as t; t.ensure_running(); print(t._pid, flush=True); input()"


@pytest.mark.parametrize(
    "module", ["multiprocessing.resource_tracker", "joblib.externals.loky.backend.resource_tracker"]
)
def test_a_resource_tracker_is_known(module: str) -> None:
    if find_spec(module.partition(".")[0]) is None:
        pytest.skip("not installed here")
    argv = [sys.executable, "-c", _START.format(module=module)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        tracker = int(starter.stdout.readline())
        wait_for(lambda: _is_tracker(tracker), "the fork becomes the tracker")
        assert not _is_tracker(starter.pid)
        starter.stdin.write("\n")
    wait_for(lambda: not Path(f"/proc/{tracker}").exists(), "the tracker ends with who started it")
