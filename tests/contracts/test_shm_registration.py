"""Who registers the backend "shm": torch itself where lockstep is installed, else lockstep; in either order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment, python_path

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

_ROOT = Path(__file__).parents[2]


def _installed(folder: Path, target: str | None = None) -> str:
    """A folder for the path that holds what an installation of lockstep tells of itself, whatever is installed here.

    (importlib.metadata takes the first distribution of a name that is on the path.)
    """
    table = re.search(
        r'^\[project\.entry-points\."(torch\.backends)"\]\n(\w+) = "(.+)"$',
        (_ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert table is not None
    group, name, named = table.groups()
    metadata = folder / "torch_lockstep-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-lockstep\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{name} = {target or named}\n")
    return str(folder)


def _not_installed(folder: Path) -> str:
    _installed(folder)
    (folder / "torch_lockstep-0.dist-info" / "entry_points.txt").unlink()
    return str(folder)


def _run(code: str, tmp_path: Path, first: str, **variables: str) -> str:
    env = {**environment(tmp_path), **variables, "PYTHONPATH": python_path(Path(first))}
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lockstep", "-c", code],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


#: Opens a world of one over the backend, and uses it.
_USE = """
import torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("before", ["import torch", "import torch, lockstep", "import lockstep, torch"])
def test_an_installed_backend_is_there_for_every_program(tmp_path: Path, before: str) -> None:
    _run(before + _USE, tmp_path, _installed(tmp_path))


@pytest.mark.parametrize(
    "before",
    [
        "import torch, lockstep",
        "import lockstep, torch; lockstep.DistributedDataParallel",
        "import lockstep, torch; lockstep.init(); lockstep.shutdown()",
    ],
)
@pytest.mark.parametrize("how", ["not installed", "switched off"])
def test_without_torchs_help_lockstep_registers_it(tmp_path: Path, before: str, how: str) -> None:
    if how == "not installed":
        _run(before + _USE, tmp_path, _not_installed(tmp_path))
    else:
        _run(before + _USE, tmp_path, _installed(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_lockstep_alone_loads_no_torch_and_hooks_into_no_import(tmp_path: Path) -> None:
    code = """
import sys
finders = list(sys.meta_path)
import lockstep
assert "torch" not in sys.modules
assert sys.meta_path == finders
"""
    _run(code, tmp_path, _not_installed(tmp_path))


def test_torch_alone_loads_little_of_lockstep_and_in_no_time(tmp_path: Path) -> None:
    code = """
import sys, time, torch
print(*sorted(name for name in sys.modules if name.split(".")[0] == "lockstep"))
times = []
for _ in range(5):
    for name in [name for name in sys.modules if name.split(".")[0] == "lockstep"]:
        del sys.modules[name]
    begun = time.perf_counter()
    from lockstep.comm.shm.register import register
    register()
    times.append(time.perf_counter() - begun)
print(min(times))
"""
    loaded, seconds = _run(code, tmp_path, _installed(tmp_path)).splitlines()
    expected = "lockstep lockstep.comm lockstep.comm.shm lockstep.comm.shm.register lockstep.version"
    assert loaded == expected
    assert float(seconds) < 0.005


def test_a_torch_that_refuses_is_a_warning_and_torch_is_loaded_all_the_same(tmp_path: Path) -> None:
    code = """
import warnings, torch
from torch.distributed import Backend
Backend.backend_list.remove("shm")
def refuse(*_, **__):
    raise TypeError("no such argument")
Backend.register_backend = refuse
from lockstep.comm.shm.register import register
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    register()
print(*(each.message for each in seen))
"""
    told = _run(code, tmp_path, _installed(tmp_path))
    assert told.startswith('lockstep\'s backend "shm" is not available: torch.distributed refuses to register it')
    assert "(TypeError: no such argument)" in told
