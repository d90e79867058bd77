"""What the bits of a result depend on besides the program: the machine, torch, threads and torch's switches.

Note [What bits depend on]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Libraries choose how they add by what the processor can do (wider vectors, other orders), torch splits sums among its
threads, a GPU has kernels of its own for its model, and another version of torch or of CUDA may have other ones. All of
them are right to rounding and none is wrong; but the same program gives the same bits only where these are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch

from lockstep import accelerator, machine
from lockstep.step import deterministic

#: Condition -> its name in messages.
NAMES = {
    "torch": "torch",
    "processor": "the processor",
    "vectors": "the vector instructions that torch uses",
    "gpu": "the GPU",
    "cuda": "CUDA",
    "threads": "the number of threads",
    "deterministic": "deterministic algorithms",
}

_processor = cache(machine.processor)


def conditions(device: torch.device) -> dict[str, str]:
    """Return what the bits depend on where this rank computes; see Note [What bits depend on].

    Args:
        device: this rank's.
    """
    found = {
        "torch": str(torch.__version__),
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "deterministic": "on" if deterministic.is_on() else "off",
        "gpu": "none",
    }
    if device.type != "cpu":
        found["gpu"] = accelerator.name_of(device)
    libraries = accelerator.cuda_libraries(device)
    return found if libraries is None else found | {"cuda": libraries}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the conditions that are others now, in words, and what they were and are; those that only one of the two
    knows are left out."""
    return [
        (words, before[name], now[name])
        for name, words in NAMES.items()
        if name in before and name in now and before[name] != now[name]
    ]
