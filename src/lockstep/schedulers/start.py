"""The command that a scheduler starts on each machine: one launcher, ``lockstep run``, with ranks and program."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

#: The exit code of every launcher of a job that was asked to stop and has saved (EXIT_SAVED in ``job/files.py``).
SAVED = os.EX_TEMPFAIL


@dataclass(frozen=True)
class StartCommand:
    """The same command on each of several machines."""

    program: str
    args: tuple[str, ...]
    is_module: bool
    machines: int
    #: Ranks on each machine.
    ranks: int
    #: Seconds that the ranks have to finish a step and save.
    grace: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.grace) and self.grace > 0):
            raise ValueError(f"--grace {self.grace:g}: the ranks need some seconds to finish a step and save")

    def options(self) -> list[str]:
        """Return the options of ``lockstep run`` that do not depend on the scheduler."""
        return ["-n", str(self.ranks), "--grace", f"{self.grace:g}"]

    def target(self) -> list[str]:
        """Return the program and what is passed to it."""
        return [*(["-m"] if self.is_module else []), self.program, *self.args]
