"""Print torch's facts about this machine, as JSON: a separate program, since it imports torch and asks the driver."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from lockstep import accelerator
from lockstep.comm.group.register import register


def main() -> None:
    """Print the facts."""
    register()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = accelerator.is_usable()
        devices = [_device(device) for device in accelerator.devices()] if available else []
    kind = accelerator.kind()
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "kind": kind,
        "backend": None if kind is None else accelerator.backend_for(kind),
        "available": available,
        "devices": devices,
        "architectures": accelerator.cuda_architectures() if available else [],
        "nccl": accelerator.nccl_version() if available else "",
        "backends": sorted(
            name for name in dist.Backend.backend_list if name != "undefined" and dist.is_backend_available(name)
        ),
        "threads": torch.get_num_threads(),
        "warnings": sorted({str(warning.message) for warning in caught}),
    }
    json.dump(found, sys.stdout)


def _device(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": accelerator.name_of(device),
        "capability": accelerator.cuda_capability(device),
        "memory": accelerator.memory_size(device),
        "error": "",
    }
    try:
        values = torch.arange(1000, device=device, dtype=torch.float32)
        free = accelerator.free_memory(device)
        found |= {} if free is None else {"free": free}
        if float((values * 2).sum()) != 999000.0:
            found["error"] = "it computes a sum wrongly"
    except RuntimeError as error:  # what the driver says
        found["error"] = str(error).splitlines()[0]
    return found


if __name__ == "__main__":
    main()
