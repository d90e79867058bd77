"""Who registers the backend "shm": torch itself where lockstep is installed, else lockstep; in either order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
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


#: Imports what the programs on standard input begin with, forks a process for each, and tells how each ended. What is
#: looked at here happens while torch is imported, which takes seconds, or after that.
_FORKING = """
import json, os, sys, traceback
{first}
ended = {{}}
for program in json.load(sys.stdin):
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        status = 1
        try:
            exec(program, {{"__name__": "__main__"}})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(writing)
    with open(reading) as said:
        text = said.read()
    ended[program] = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text]
print(json.dumps(ended))
"""

#: Opens a world of one over the backend, and uses it.
_USE = """
import torch.distributed as dist
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
dist.destroy_process_group()
"""

_LOADED = """
import sys, time, torch
print(*sorted(name for name in sys.modules if name.split(".")[0] == "lockstep"))
times = []
for _ in range(5):
    for name in [name for name in sys.modules if name.split(".")[0] == "lockstep"]:
        del sys.modules[name]
    begun = time.perf_counter()
    from lockstep.comm.group.register import register
    register()
    times.append(time.perf_counter() - begun)
print(min(times))
"""

_REFUSED = """
import warnings, torch
from torch.distributed import Backend
Backend.backend_list.remove("shm")
def refuse(*_, **__):
    raise TypeError("no such argument")
Backend.register_backend = refuse
from lockstep.comm.group.register import register
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    register()
print(*(each.message for each in seen))
"""

_WITH_HELP = ("import torch", "import torch, lockstep", "import lockstep, torch")
_WITHOUT = (
    "import torch, lockstep",
    "import lockstep, torch; lockstep.DistributedDataParallel",
    "import lockstep, torch; lockstep.init(); lockstep.shutdown()",
)
#: How lockstep is there -> the programs that are run where it is so.
_PROGRAMS = {
    "installed": [*[before + _USE for before in _WITH_HELP], _LOADED, _REFUSED],
    "not installed": [before + _USE for before in _WITHOUT],
    "switched off": [before + _USE for before in _WITHOUT],
}

#: Runs one of the programs above: how lockstep is there, program -> what it printed.
Run = Callable[[str, str], str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    @cache
    def ended(how: str) -> dict[str, tuple[int, str]]:
        folder = tmp_path_factory.mktemp(how.replace(" ", "_"))
        first = _not_installed(folder) if how == "not installed" else _installed(folder)
        variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"} if how == "switched off" else {}
        results: dict[str, tuple[int, str]] = {}
        for imports in ("import torch", "import lockstep, torch"):
            lockstep_first = imports != "import torch"
            programs = [each for each in _PROGRAMS[how] if each.startswith("import lockstep") == lockstep_first]
            text = _python(_FORKING.format(first=imports), folder, first, stdin=json.dumps(programs), **variables)
            results |= json.loads(text)
        return results

    def output(how: str, program: str) -> str:
        status, text = ended(how)[program]
        assert status == 0, text
        return text

    return output


def _python(code: str, folder: Path, first: str, stdin: str = "", **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:lockstep", "-c", code],
        env={**environment(folder), **variables, "PYTHONPATH": python_path(Path(first))},
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("before", _WITH_HELP)
def test_an_installed_backend_is_there_for_every_program(run: Run, before: str) -> None:
    run("installed", before + _USE)


@pytest.mark.parametrize("before", _WITHOUT)
@pytest.mark.parametrize("how", ["not installed", "switched off"])
def test_without_torchs_help_lockstep_registers_it(run: Run, before: str, how: str) -> None:
    run(how, before + _USE)


def test_lockstep_alone_loads_no_torch_and_hooks_into_no_import(tmp_path: Path) -> None:
    code = """
import sys
finders = list(sys.meta_path)
import lockstep
assert "torch" not in sys.modules
assert sys.meta_path == finders
"""
    _python(code, tmp_path, _not_installed(tmp_path))


def test_torch_alone_loads_little_of_lockstep(run: Run) -> None:
    loaded, _ = run("installed", _LOADED).splitlines()
    expected = "lockstep lockstep.comm lockstep.comm.group lockstep.comm.group.register lockstep.version"
    assert loaded == expected


@pytest.mark.campaign  # where nothing else runs
def test_torch_alone_loads_it_in_no_time(run: Run) -> None:
    _, seconds = run("installed", _LOADED).splitlines()
    assert float(seconds) < 0.005


def test_a_torch_that_refuses_is_a_warning_and_torch_is_loaded_all_the_same(run: Run) -> None:
    told = run("installed", _REFUSED)
    assert told.startswith('lockstep\'s backend "shm" is not available: torch.distributed refuses to register it')
    assert "(TypeError: no such argument)" in told
