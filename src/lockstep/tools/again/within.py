"""``python -m lockstep.tools.again.within REQUEST [-m] PROGRAM ARGS…``: a process that runs a program again.

See Note [The program again] in program.py.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep._files import redirect
from lockstep.launch import rank as program


def main(words: list[str]) -> None:
    """Set the hooks that a request asks for, and become the program."""
    request = json.loads(Path(words[0]).read_text())
    if sys.path and sys.path[0] == os.getcwd():  # added for this module; the program is to search as without it
        del sys.path[0]
    _keep_apart(Path(request["folder"], "saved"))
    _be_all_ranks()
    run = functools.partial(_run, words[1:])
    if "replay" in request:
        from lockstep.tools.again import replayed

        replayed.run(request, run)
    else:
        from lockstep.tools.again import asked

        asked.listen(request)
        run()


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        program.run_module(words[1], words[2:])
    else:
        program.run_script(words[0], words[1:])


def _keep_apart(folder: Path) -> None:
    """Put checkpoints and logs of this process into a folder of its own."""
    from lockstep.checkpoint.api import Checkpointer
    from lockstep.metrics.api import Log

    for cls, name in ((Checkpointer, "folder"), (Log, "run")):
        redirect(cls, name, folder)


def _be_all_ranks() -> None:
    """Let one process do what a program asks of several: proportions of ranks, and ranks that it spawns."""
    import lockstep
    from lockstep.data import slicing, source
    from lockstep.launch import spawn

    def alone(shares: object, *, world_size: int) -> tuple[float, ...]:
        del shares
        return (1.0,) * world_size

    def call(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> list[Any]:
        return [fn(0, *args)]

    for module in (slicing, source):
        module.read_shares = alone  # type: ignore[attr-defined]  # in this process alone
    spawn.spawn = call  # type: ignore[assignment]
    lockstep.spawn = call  # type: ignore[assignment]


if __name__ == "__main__":
    main(sys.argv[1:])
