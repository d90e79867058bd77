"""Kill rank 1 after its 30th step of an optimizer, in the first of a job's lives: the program itself stays as it is.

A copy of this file is put somewhere as ``sitecustomize.py``: Python imports a module of that name at start, in every
process that has its folder on PYTHONPATH. That it has been done says a file beside it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

STEP = 30


def plant(done: Path) -> None:
    """Have it happen in this process, unless the file ``done`` says that it has."""
    steps = count(1)
    register_optimizer_step_post_hook(lambda *_: _strike(steps, done))


def _strike(steps: Iterator[int], done: Path) -> None:
    if next(steps) == STEP and dist.is_initialized() and dist.get_rank() == 1 and not done.exists():
        done.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "sitecustomize":
    plant(Path(__file__).with_name("struck"))
