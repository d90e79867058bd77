"""What the bits of a result depend on besides the program: the machine, torch, threads and torch's switches.

Note [What bits depend on]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Libraries choose how they add by what the processor can do (wider vectors, other orders), torch splits sums among its
threads, a GPU has kernels of its own for its model, and another version of torch or of CUDA may have other ones. All of
them are right to rounding and none is wrong; but the same program gives the same bits only where these are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep import machine
from lockstep.comm import deterministic

#: The conditions, and how they are called in a message.
NAMES = {
    "processor": "the processor",
    "vectors": "the vector instructions that torch uses",
    "gpu": "the GPU",
    "torch": "torch",
    "cuda": "CUDA",
    "threads": "the number of threads",
    "deterministic": "deterministic algorithms",
}


def conditions(device: torch.device) -> dict[str, Any]:
    """Return what the bits depend on where this rank computes, in JSON types; see Note [What bits depend on].

    Args:
        device: this rank's.
    """
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cudnn = torch.backends.cudnn.version() if gpu else None
    return {
        "processor": machine.processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "torch": str(torch.__version__),
        "cuda": f"{torch.version.cuda}, cuDNN {cudnn}" if gpu else None,
        "threads": torch.get_num_threads(),
        "deterministic": deterministic.is_on(),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in words which conditions are others now; those that only one of the two knows are left out."""
    return [
        f"{words}: {_said(before[name])} before, {_said(now[name])} now"
        for name, words in NAMES.items()
        if name in before and name in now and before[name] != now[name]
    ]


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
