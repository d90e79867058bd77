"""torchvision and Pillow, which this recipe needs and lockstep does not."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_REMEDY = "pip install 'torch-lockstep[vision]'"


def require_installed(*, tensorboard: bool) -> None:
    """End the program with a message if something is not installed; nothing is imported yet."""
    wanted = {"torchvision": "torchvision", "PIL": "pillow", **({"tensorboard": "tensorboard"} if tensorboard else {})}
    missing = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    if missing:
        without = "" if missing != ["tensorboard"] else ", or pass --no-tensorboard for CSV files alone"
        raise SystemExit(f"this recipe needs {' and '.join(missing)}, not installed here: {_REMEDY}{without}")


def require(name: str) -> Any:
    """Import a module of the ``vision`` extra; if it can't be used, end the program with the remedy."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(f"{name} can't be imported ({error}): {_REMEDY}") from error
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
        # What torchvision says where its compiled operators are built for another torch.
        raise SystemExit(
            f"the torchvision installed here does not fit the torch installed here ({error}): install them together, "
            f"from the same place: {_REMEDY}"
        ) from error
