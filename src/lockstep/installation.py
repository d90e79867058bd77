"""Whether other distributions have installed files among those of this package.

The package registry has other projects that install a top-level package ``lockstep``, too; this one is the distribution
``torch-lockstep``. pip lets the distribution that comes last replace the files of the one before.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lockstep.text import joined

#: The beginning of the names of distributions that are looked at; all of those that are known begin so.
_NAME = "lockstep"
_SUFFIX = ".dist-info"


def strangers() -> list[str]:
    """Return the other distributions, with their versions, that have installed files into this package's folder.

    It costs the listing of the folder that packages are installed into.
    """
    where = Path(__file__).parent.parent
    found = []
    for name in sorted(os.listdir(where)):
        if not (name.lower().startswith(_NAME) and name.endswith(_SUFFIX)):
            continue
        try:
            files = (where / name / "RECORD").read_text()
        except OSError:
            continue  # nobody knows what it has installed
        if any(line.startswith("lockstep/") for line in files.splitlines()):
            found.append(" ".join(name.removesuffix(_SUFFIX).rsplit("-", 1)).replace("_", "-"))
    return found


def is_replaced() -> bool:
    """Return whether ``import lockstep`` finds the ``__init__.py`` of another distribution."""
    return not hasattr(sys.modules["lockstep"], "_HOMES")


def named(found: list[str]) -> str:
    """Return :func:`strangers` as a message names them; there may be none that is known by name."""
    return joined(found) or "another distribution"


def advice(found: list[str]) -> str:
    """Return what to do about :func:`strangers`, or about an ``__init__.py`` that nobody has recorded."""
    names = " ".join(each.split()[0] for each in found)
    return (f"pip uninstall {names}, then " if names else "") + "pip install --force-reinstall --no-deps torch-lockstep"
