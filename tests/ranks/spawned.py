"""The steps of stragglers.py on ranks that ``lockstep.spawn`` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.launching import environment

_PROGRAM = """
import lockstep
from tests.ranks import stragglers

def train(local_rank):
    stragglers.main()

if __name__ == "__main__":
    lockstep.spawn(train, nprocs=2)
"""


def spawn_stragglers(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run them on two ranks; the arguments are those of stragglers.py."""
    (folder / "spawns.py").write_text(_PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path[1:]])
    return subprocess.run(
        [sys.executable, "spawns.py", *arguments],
        cwd=folder,
        env=environment(folder, torch=True, PYTHONPATH=path, **env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
