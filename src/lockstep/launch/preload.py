"""What the zygote imports for the ranks, and what a program sets in an environment that those imports have read.

Note [Environment read at import]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A program that sets a variable at its top, before ``import torch``, means it to be read by that import. Under the
launcher torch is there already. So the zygote notes which variables the modules it imports look up (in Python; what
the libraries read when they are loaded is listed here), and a rank listens to what its program sets: numbers of threads
are applied then and there, and for anything else that has been read a warning says so and names the way out. The
listener replaces ``os.putenv``, which ``os.environ`` calls for each change: an audit hook would hear the same, and
cost 0.2 microseconds in every ``id()`` of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from lockstep import callsite, knobs, machine
from lockstep.errors import LaunchError

#: The variables from which torch and OpenBLAS take the number of threads: the first that is set counts.
_OF_TORCH = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
_OF_OPENBLAS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")

#: Module -> variables that its compiled libraries read once, when they are loaded (found by tracing getenv).
_READ_WHEN_LOADED: dict[str, tuple[str, ...]] = {
    "torch": (
        "GOMP_CPU_AFFINITY", "GOMP_DEBUG", "GOMP_SPINCOUNT", "GOMP_STACKSIZE",
        "MKL_DISABLE_FAST_MM", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_FAST_MEMORY_LIMIT",
        "OMP_DISPLAY_ENV", "OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS", "OMP_NESTED", "OMP_PLACES", "OMP_PROC_BIND",
        "OMP_SCHEDULE", "OMP_STACKSIZE", "OMP_THREAD_LIMIT", "OMP_WAIT_POLICY",
        "ONEDNN_DEFAULT_FPMATH_MODE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_CPP_LOG_LEVEL",
        "TORCH_CUSTOM_TERMINATE", "TORCH_LINALG_PREFER_CUSOLVER", "TORCH_SHOW_CPP_STACKTRACES",
    ),
    "numpy": ("NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES", "OPENBLAS_CORETYPE", "OPENBLAS_VERBOSE"),
}  # fmt: skip
#: Has torch.cuda.is_available() ask NVIDIA's management library instead of CUDA's runtime, which torch then refuses in
#: forked processes. Many modules ask as they are imported, torch's own compiler among them where Triton is installed.
_SOFTLY = "PYTORCH_NVML_BASED_CUDA_CHECK"
#: Variables that are read at import, and again whenever they are needed.
_READ_AGAIN = frozenset(["TORCHINDUCTOR_CACHE_DIR", _SOFTLY])

#: The files of the frames between a program's ``os.environ[…] = …`` or ``os.getenv(…)`` and this one.
_BETWEEN = (os.getenv.__code__.co_filename, Mapping.get.__code__.co_filename)

#: Variable -> the module whose import in this process has read it.
_read: dict[str, str] = {}


def load(modules: Iterable[str]) -> None:
    """Import ``modules`` without collecting garbage, then keep what is there out of the collector's sight.

    A collection would write to the memory of every object, and so un-share it from the ranks.

    Raises:
        LaunchError: one of them has opened CUDA or another accelerator, which no process that is forked from this one
            could use.
    """
    gc.disable()
    with asking_softly(), _noting_reads():
        for name in modules:
            if name not in sys.modules:
                importlib.import_module(name)
                _refuse_accelerator(name)
    for module, names in _READ_WHEN_LOADED.items():
        if module in sys.modules:
            _read.update(dict.fromkeys(names, module))
    gc.freeze()
    gc.enable()


def _refuse_accelerator(name: str) -> None:
    if "torch" not in sys.modules:
        return
    from lockstep import accelerator  # which imports torch

    kind = accelerator.refused_in_forks()
    if kind is not None:
        title = accelerator.title(kind)
        raise LaunchError(
            f"importing {name} has opened {title}'s driver. The ranks are forked from the process that imports it, and "
            f"torch refuses {title} in them then. Take {name} out of {knobs.PRELOAD}, so that the program imports it "
            f"itself; or let {name} use the {accelerator.noun(kind)} in a function, and not while it is imported"
        )


@contextlib.contextmanager
def asking_softly() -> Iterator[None]:
    """Let modules ask whether there is a GPU without opening its driver, unless the user has said how they ask."""
    if _SOFTLY in os.environ:
        yield
        return
    os.environ[_SOFTLY] = "1"
    try:
        yield
    finally:
        del os.environ[_SOFTLY]


@contextlib.contextmanager
def _noting_reads() -> Iterator[None]:
    """Note what Python modules look up in ``os.environ``, which asks ``encodekey`` for each name."""
    plain: Callable[[str], Any] = os.environ.encodekey

    def noting(name: str) -> Any:
        frame = _beyond_os(sys._getframe(1))[0]
        if frame is not None and not callsite.is_standard(frame.f_code.co_filename) and name not in _READ_AGAIN:
            _read.setdefault(name, str(frame.f_globals.get("__name__")))
        return plain(name)

    os.environ.encodekey = noting
    try:
        yield
    finally:
        os.environ.encodekey = plain


def listen() -> None:
    """Apply from now on what this process's program sets: see Note [Environment read at import]."""
    if _read:
        vars(os)["putenv"] = _Listener(os.putenv)


class _Listener:
    """Takes the place of ``os.putenv``."""

    def __init__(self, putenv: Callable[[Any, Any], None]) -> None:
        self._putenv = putenv
        #: The process that is watched; processes that the program forks are not.
        self._process = os.getpid()
        torch = sys.modules.get("torch")
        #: torch's number of threads, until the program calls torch.set_num_threads(); None: torch is not loaded.
        self._threads: int | None = None if torch is None else torch.get_num_threads()

    def __call__(self, key: Any, value: Any, /) -> None:
        self._putenv(key, value)
        name, text = os.fsdecode(key), os.fsdecode(value)
        if os.getpid() != self._process or os.environ.get(name) == text:
            return
        if name in _OF_TORCH or name in _OF_OPENBLAS:
            self._take_threads(name, {**os.environ, name: text})
        elif name == "TORCH_DISTRIBUTED_DEBUG" and "torch.distributed" in sys.modules:
            sys.modules["torch.distributed"].set_debug_level_from_env()
        elif name in _read:
            _warn(name)

    def _take_threads(self, name: str, env: Mapping[str, str]) -> None:
        torch, distributed = sys.modules.get("torch"), sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return  # a program that trains means what it starts, not itself
        wanted = _number(env, _OF_TORCH)
        if name in _OF_TORCH and torch is not None and wanted is not None and torch.get_num_threads() == self._threads:
            torch.set_num_threads(wanted)
            self._threads = wanted
        wanted = _number(env, _OF_OPENBLAS)
        if name in _OF_OPENBLAS and wanted is not None:
            _set_openblas_threads(wanted)


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the number of threads in the first of ``names`` that is set; the outermost of OpenMP's list of levels."""
    for name in names:
        text = env.get(name, "").split(",")[0].strip()
        if text.isdecimal() and int(text) > 0:
            return min(int(text), machine.visible_cores())  # as MKL and OpenBLAS take it
    return None


def _set_openblas_threads(count: int) -> None:
    """Tell every OpenBLAS that is loaded (NumPy's, SciPy's), under whichever name it was built."""
    maps = Path("/proc/self/maps").read_text()
    for path in set(re.findall(r"(/\S*openblas\S*\.so\S*)$", maps, re.MULTILINE)):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue  # its file was replaced since; an assignment to os.environ must not raise for that
        for prefix in ("scipy_", ""):
            for suffix in ("64_", "_64", ""):
                setter = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(ctypes.c_int(count))


def _warn(name: str) -> None:
    """Say that ``name`` was set too late, if it was the program that set it and not a library."""
    frame, depth = _beyond_os(sys._getframe(2))
    if frame is None or callsite.is_standard(frame.f_code.co_filename):
        return
    if callsite.is_installed(frame.f_code.co_filename):
        return
    warnings.warn(
        f"{name} is set too late: {_read[name]} reads it when it is imported, which lockstep's launcher does before "
        f"the program begins. Set it in front of the command ({name}=… lockstep run …); or start with "
        f"{knobs.PRELOAD}= (empty, or without that module), so that the program imports it itself",
        stacklevel=3 + depth,
    )


def _beyond_os(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the innermost of ``frame`` and its callers that is not ``os.environ``'s, and how many callers away."""
    depth = 0
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame, depth = frame.f_back, depth + 1
    return frame, depth
