"""``python -m lockstep.tools.verify.observed ASSIGNMENT [-m] PROGRAM ARGS…``: run a program in a rank, observed.

``lockstep run`` starts it in the program's place, so that neither the launcher nor the ranks of other runs know of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lockstep import knobs
from lockstep._files import redirect
from lockstep.identity import Identity
from lockstep.launch import rank as program
from lockstep.tools.verify.putback import Journal, journal_of
from lockstep.tools.verify.records import Assignment


def main(words: list[str]) -> None:
    """Run the program in this process, under the observer."""
    assignment = Assignment.read(words[0])
    if sys.path and sys.path[0] == os.getcwd():  # added for this module; the program is to search as without it
        del sys.path[0]
    from lockstep.tools.verify.observe import observe

    identity = Identity.from_environment()
    observe(assignment, rank=identity.rank, world_size=identity.world_size)
    _keep_apart(Path(assignment.folder))
    _compare_nothing()
    _keep_what_is_changed(Path(assignment.folder))
    if words[1] == "-m":
        program.run_module(words[2], words[3:])
    else:
        program.run_script(words[1], words[2:])


def _keep_apart(folder: Path) -> None:
    """Put checkpoints and logs of this run into a folder of its own: it does not resume, and the checkpoints of other
    runs of the script are not touched."""
    from lockstep.checkpoint.api import Checkpointer
    from lockstep.metrics.api import Log

    for cls, name in ((Checkpointer, "folder"), (Log, "run")):
        redirect(cls, name, folder / "saved")


def _compare_nothing() -> None:
    """Let replicas that differ continue to train: the verdict says which parameters differ, and from which step on."""
    from lockstep.ddp.drift import DriftCheck

    def count(self: DriftCheck) -> bool:
        del self
        return False

    DriftCheck.count = count  # type: ignore[method-assign]


def _keep_what_is_changed(folder: Path) -> None:
    """Keep a copy of each file that the script changes from now on: see Note [Put back] in putback.py."""
    import safetensors
    import torch

    job = knobs.job_dir()
    journal = Journal(journal_of(folder), [folder] if job is None else [folder, job])
    journal.announce(torch, "save", 1, "f")
    journal.announce(torch.jit, "save", 1, "f")
    for module in (safetensors, *filter(None, map(sys.modules.get, ("safetensors.torch", "safetensors.numpy")))):
        journal.announce(module, "serialize_file", 1, "filename")
    journal.listen()


if __name__ == "__main__":
    main(sys.argv[1:])
