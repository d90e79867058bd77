"""lockstep: data-parallel training for PyTorch.

The public names are loaded when first used (PEP 562), so that the launcher and ``lockstep --help`` never load torch.
``__init__.pyi`` lists them and the modules that define them, for type checkers and for this module.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from lockstep.version import __version__

_STUB = __spec__.loader.get_data(f"{__path__[0]}/__init__.pyi").decode()
#: Public name -> the module that defines it: of each line "from HOME import NAME as NAME".
_HOMES = {words[3]: words[1] for words in map(str.split, _STUB.splitlines()) if words[4:5] == ["as"]}

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604  (the keys are strings; ruff does not see it)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    value.__module__ = __name__  # the name that users know it by, in what they print
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_backend() -> None:
    """Register the backend "shm" if torch is imported already; else torch finds an installed lockstep by itself."""
    if "torch" in sys.modules:
        importlib.import_module("lockstep.comm.group.register").register()


_register_backend()
