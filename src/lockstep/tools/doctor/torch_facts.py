"""Print what torch says of this machine, as JSON: a program of its own, since it imports torch and asks the driver."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from lockstep.comm.group.register import register


def main() -> None:
    """Print the facts."""
    register()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
        devices = [_device(index) for index in range(torch.cuda.device_count())] if available else []
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "available": available,
        "devices": devices,
        "architectures": torch.cuda.get_arch_list() if available else [],
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if available and dist.is_nccl_available() else "",
        "backends": sorted(
            name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)
        ),
        "threads": torch.get_num_threads(),
        "warnings": sorted({str(warning.message) for warning in caught}),
    }
    json.dump(found, sys.stdout)


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    found: dict[str, Any] = {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory": properties.total_memory,
        "error": "",
    }
    try:
        values = torch.arange(1000, device=f"cuda:{index}", dtype=torch.float32)
        found["free"] = torch.cuda.mem_get_info(index)[0]
        if float((values * 2).sum()) != 999000.0:
            found["error"] = "it computes a sum wrongly"
    except RuntimeError as error:  # what the driver says
        found["error"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    main()
