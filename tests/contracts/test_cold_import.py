"""What must not be loaded: torch and NumPy, in the process that watches and for the sake of a help text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment

_PROBE = """
import sys
from {module} import main
try:
    main({arguments!r})
finally:
    heavy = [name for name in ("torch", "numpy", "rich", "multiprocessing") if name in sys.modules]
    print("loaded:", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("lockstep.cli", ["--help"]),
        ("lockstep.cli", ["run", "--help"]),
        ("lockstep.cli", ["checkpoint", "--help"]),
        ("lockstep.cli", ["checkpoint", "prune", "--help"]),
        ("lockstep.cli", ["doctor", "--help"]),
        ("lockstep.cli", ["verify", "--help"]),
        ("lockstep.cli", ["port", "--help"]),
        ("lockstep.cli", ["doctor", "--quick"]),
        ("lockstep.cli", ["doctor", "--env"]),
        ("lockstep.cli", ["run", "-n", "2", "train.py"]),
        ("lockstep.launch.__main__", ["--nproc_per_node=2", "train.py"]),
    ],
)
def test_the_launcher_loads_no_torch(tmp_path: Path, module: str, arguments: list[str]) -> None:
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'])")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(module=module, arguments=arguments)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done
    assert done.stderr.splitlines()[-1] == "loaded: []"
    assert "rank 0" in done.stdout or "train.py" not in arguments
