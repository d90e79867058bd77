"""Let ``import torchvision`` work with a build of torch that its compiled operators do not fit.

Python imports a module of this name at start, in every process that has this folder on PYTHONPATH: ranks and workers
too. With the CPU build of torch that pip finds, torchvision's Python parts need no more than the schemas of two
operators, which its compiled part would declare. They are declared when torchvision is imported, and only if that part
can't be loaded.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any


class _BeforeTorchvision:
    """Sees the import of torchvision and leaves it to Python's own finders."""

    #: Declarations last as long as this object.
    library: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and not _loads(Path(spec.origin).parent):
            import torch

            _BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return spec


def _loads(package: Path) -> bool:
    import torch

    try:
        for compiled in package.glob("_C*.so"):
            torch.ops.load_library(str(compiled))
            return True
    except OSError:
        pass  # built for another torch
    return False


if not any(type(finder).__name__ == _BeforeTorchvision.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _BeforeTorchvision())
