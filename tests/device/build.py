"""Compile the simulated device, once for each version of torch, Python and its own sources."""

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
from pathlib import Path

_SOURCES = Path(__file__).parent
#: Torch's headers ask for it; as few optimisations as make no test slow, since most of the time goes into the headers.
_OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DUSE_C10D_GLOO", "-Wall", "-Werror")

DEVICE, BINDINGS = "libsimulated.so", "simulated_bindings.so"


class Unavailable(Exception):
    """The simulated device can't be built here, and why."""


def libraries() -> Path:
    """Return the folder with the compiled libraries, compiling them if nobody has yet.

    The folder is in the user's cache (``XDG_CACHE_HOME``). Several processes may ask at once: one compiles.

    Raises:
        Unavailable: there is no compiler, or torch is a build with CUDA.
        RuntimeError: the compiler has failed.
    """
    torch = _torch()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lockstep-tests" / "simulated-device"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache / _name()
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            compiler = shutil.which(os.environ.get("CXX") or "g++")
            if compiler is None:
                raise Unavailable("there is no C++ compiler (g++, or what CXX names)")
            with tempfile.TemporaryDirectory(dir=cache) as place:
                made = Path(place, "made")
                made.mkdir()
                _compile(compiler, torch, made)
                made.rename(folder)
    return folder


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


def _name() -> str:
    """A name for what is compiled from these sources for this torch and this Python."""
    digest = hashlib.sha256(" ".join(_OPTIONS).encode())
    for file in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(file.read_bytes())
    tag = sysconfig.get_config_var("SOABI")
    return f"torch-{importlib.metadata.version('torch')}-{tag}-{digest.hexdigest()[:12]}"


def _compile(compiler: str, torch: Path, folder: Path) -> None:
    headers = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_path("include")]
    common = [compiler, *_OPTIONS, *(f"-isystem{each}" for each in headers), f"-L{torch / 'lib'}"]
    libraries = ["-ltorch_cpu", "-lc10", "-ltorch", f"-Wl,-rpath,{torch / 'lib'}", "-Wl,-rpath,$ORIGIN"]
    device, bindings = folder / DEVICE, folder / BINDINGS
    print(f"compiling the simulated device in {folder.parents[1]}, once for this torch: half a minute", file=sys.stderr)
    _run([*common, str(_SOURCES / "device.cpp"), "-o", str(device), f"-Wl,-soname,{DEVICE}", *libraries])
    source = str(_SOURCES / "bindings.cpp")
    _run([*common, source, "-o", str(bindings), str(device), "-ltorch_python", *libraries])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile: {' '.join(command)}\n{done.stderr[-8000:]}")
