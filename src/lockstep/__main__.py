"""The ``lockstep`` command, and ``python -m lockstep``: Ctrl-C ends it without a traceback from the first line on."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

#: The exit code that a shell reports for a process that SIGINT ended.
_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the command.

    While modules are imported there is nothing to undo, so SIGINT ends the process at once: a KeyboardInterrupt would
    show a traceback into their files. ``lockstep run`` keeps this handler until the launcher reads signals itself.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise the shell has it ignored (``&``)
        signal.signal(signal.SIGINT, _leave)
    from lockstep.cli import main as command

    command(prog_name="lockstep")


def _leave(*_: object) -> NoReturn:
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
