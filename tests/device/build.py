"""Compile the simulated device, once for each version of torch, Python and its own sources.

Compiling takes half a minute, linking a second. Libraries name the folder of the torch that they are linked to, so each
torch of a version has its own, of the same objects.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_SOURCES = Path(__file__).parent
#: Torch's headers ask for it; as few optimisations as make no test slow, since most of the time goes into the headers.
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-DUSE_C10D_GLOO", "-Wall", "-Werror")

#: With it the device has the key of plugins instead of CUDA's.
_PLUGIN = "-DSIMULATED_PLUGIN"

DEVICE, BINDINGS = "libsimulated.so", "simulated_bindings.so"


class Unavailable(Exception):
    """The simulated device can't be built here, and why."""


def libraries(*, plugin: bool) -> Path:
    """Return the folder with the compiled libraries, compiling them if nobody has yet.

    The folder is in the user's cache (``XDG_CACHE_HOME``). Several processes may ask at once: one compiles.

    Args:
        plugin: whether it is a plugin's device, instead of a CUDA device.

    Raises:
        Unavailable: there is no compiler, or torch is a build with CUDA.
        RuntimeError: the compiler has failed.
    """
    torch, options = _torch(), (*_OPTIONS, *([_PLUGIN] if plugin else []))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep-tests" / "simulated-device"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    objects = cache / _name(options)
    linked = objects / hashlib.sha256(str(torch).encode()).hexdigest()[:12]
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not linked.exists():
            compiler = shutil.which(os.environ.get("CXX") or "g++")
            if compiler is None:
                raise Unavailable("there is no C++ compiler (g++, or what CXX names)")
            if not objects.exists():
                print(f"compiling the simulated device in {cache}, once for this torch: half a minute", file=sys.stderr)
                _make(objects, lambda folder: _compile([compiler, *options], torch, folder))
            _make(linked, lambda folder: _link(compiler, torch, objects, folder))
    return linked


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder, completely or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        made = Path(place, "made")
        made.mkdir()
        fill(made)
        made.rename(folder)


def _torch() -> Path:
    """Where torch is installed, without importing it: the libraries must be there first."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise Unavailable("torch is not installed")
    place = Path(spec.origin).parent
    if (place / "lib" / "libtorch_cuda.so").exists():
        raise Unavailable(
            "this torch is a build with CUDA, whose key is taken; the simulation needs a build for the CPU"
        )
    return place


def _name(options: Sequence[str]) -> str:
    """A name for what is compiled from these sources for this torch and this Python."""
    digest = hashlib.sha256(" ".join(options).encode())
    for file in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(file.read_bytes())
    tag = sysconfig.get_config_var("SOABI")
    return f"torch-{importlib.metadata.version('torch')}-{tag}-{digest.hexdigest()[:12]}"


def _compile(command: Sequence[str], torch: Path, folder: Path) -> None:
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    for name in ("device", "bindings"):
        source, made = str(_SOURCES / f"{name}.cpp"), str(folder / f"{name}.o")
        _run([*command, *(f"-isystem{each}" for each in headers), "-c", source, "-o", made])


def _link(compiler: str, torch: Path, objects: Path, folder: Path) -> None:
    device, bindings = folder / DEVICE, folder / BINDINGS
    libraries = ["-ltorch_cpu", "-lc10", "-ltorch", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,-rpath,$ORIGIN"]
    common = [compiler, "-shared", f"-L{torch / 'lib'}"]
    _run([*common, str(objects / "device.o"), "-o", str(device), f"-Wl,-soname,{DEVICE}", *libraries])
    _run([*common, str(objects / "bindings.o"), "-o", str(bindings), str(device), "-ltorch_python", *libraries])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile: {' '.join(command)}\n{done.stderr[-8000:]}")
