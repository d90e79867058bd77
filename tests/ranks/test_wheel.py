"""What ``make wheel`` builds, installed into an environment that knows nothing of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.version import __version__

ROOT = Path(__file__).parents[2]
#: What an environment has that lockstep was not installed into.
_OURS = ("torch_lockstep-", "__editable__")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path) -> Iterator[Path]:
    """An environment with the wheel, and with links to what this one has of other distributions."""
    home = dist / "home" / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True, timeout=300)
    packages = _packages(home)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(_OURS):
            (packages / path.name).symlink_to(path)
    (wheel,) = dist.glob("*.whl")
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*command, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True, timeout=300)
    yield home
    shutil.rmtree(home)


def _packages(home: Path) -> Path:
    (found,) = (home / "lib").glob("python*/site-packages")
    return found


def _run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    folder = home.parent
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCKSTEP_QUIET")}
    env |= {"PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}", "XDG_STATE_HOME": str(folder / "state")}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)


def test_what_is_in_it(dist: Path) -> None:
    (wheel,), (source,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    assert source.name == f"torch_lockstep-{__version__}.tar.gz"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"lockstep/tools/report/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert {"lockstep/py.typed", "lockstep/__init__.pyi"} <= names
    assert {name.partition("/")[0] for name in names} == {"lockstep", f"torch_lockstep-{__version__}.dist-info"}


def test_the_readmes_script_trains_and_the_commands_work(installed: Path) -> None:
    shutil.copy(ROOT / "examples" / "train.py", installed.parent)
    where = _run(installed, "python", "-c", "import lockstep; print(lockstep.__file__)")
    assert Path(where.stdout.strip()).is_relative_to(installed), where
    done = _run(installed, "lockstep", "run", "-n", "2", "train.py")
    assert done.returncode == 0, done
    assert "samples/s on 2 ranks" in done.stderr, done
    assert "\nnext: " in done.stderr, done
    assert len(list((installed.parent / "runs" / "train").glob("step-*"))) > 0
    doctor = _run(installed, "lockstep", "doctor", "--quick")
    assert f"versions: lockstep {__version__}, torch " in doctor.stdout, doctor
    assert "installed files" not in doctor.stdout, doctor
    report = _run(installed, "lockstep", "runs", "report")
    assert report.returncode == 0, report
    assert "<html" in (installed.parent / "report.html").read_text()


@pytest.mark.parametrize("last", ["the other", "lockstep"])
def test_another_distribution_that_installs_the_package_too_is_named(installed: Path, last: str) -> None:
    packages = _packages(installed)
    ours = packages / "lockstep" / "__init__.py"
    other = packages / "lockstep_ml-0.0.2.dist-info"
    other.mkdir(exist_ok=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-ml\nVersion: 0.0.2\n")
    (other / "RECORD").write_text("lockstep/__init__.py,,\nlockstep_ml-0.0.2.dist-info/RECORD,,\n")
    text = ours.read_text()
    if last == "the other":
        ours.write_text('"""Something else."""\n')
    (installed.parent / "script.py").write_text("print('it runs')\n")
    advice = "pip uninstall lockstep-ml, then pip install --force-reinstall --no-deps torch-lockstep"
    doctor = _run(installed, "lockstep", "doctor", "--quick")
    level = "wrong  " if last == "the other" else "warning"
    said = f"  {level} versions: lockstep-ml 0.0.2 has installed files into the package lockstep as well\n"
    assert said in doctor.stdout, doctor
    assert advice in " ".join(doctor.stdout.split()), doctor
    done = _run(installed, "lockstep", "run", "-n", "1", "script.py")
    ours.write_text(text)
    shutil.rmtree(other)
    if last == "the other":
        assert done.returncode == 2, done
        assert done.stderr == (
            "lockstep run: import lockstep finds the package of lockstep-ml 0.0.2 instead of torch-lockstep\n"
            f"lockstep run: next: {advice}\n"
        )
    else:
        assert (done.returncode, done.stdout) == (0, "it runs\n"), done
