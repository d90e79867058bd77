"""What ``%load_ext lockstep`` calls. It imports IPython; looking at lockstep's public names does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the magic ``%%ranks`` to IPython, for notebooks: ``%load_ext lockstep`` calls it.

    Args:
        shell: the running shell.
    """
    from lockstep.interactive.magic import RanksMagics

    shell.register_magics(RanksMagics(shell))


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """End the ranks: ``%unload_ext lockstep`` calls it, and ``%reload_ext lockstep`` before it loads anew.

    Args:
        shell: the running shell.
    """
    from lockstep.interactive.magic import RanksMagics

    for magics in shell.magics_manager.registry.values():
        if isinstance(magics, RanksMagics):
            magics.close()
