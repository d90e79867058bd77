"""What commands share that print: a console, errors as one line, and where to look for runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where there is no terminal to ask.
_WIDTH = 160


def homes() -> list[Path]:
    """Return the folders in which runs leave their records unless they are told otherwise."""
    from lockstep.launch.output import default_home, spare_home

    home = default_home()
    return [*([] if home is None else [home]), spare_home()]


def open_console(*, soft_wrap: bool = False, markup: bool = True) -> Console:
    """Return a console for standard output, wide enough for a table where that is no terminal.

    Args:
        soft_wrap: leave it to the terminal to break long lines.
        markup: take words in brackets for rich's own.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, highlight=False, soft_wrap=soft_wrap, markup=markup)


def say(text: object) -> None:
    """Write one line to standard error, after the name of the command that runs."""
    click.echo(f"{click.get_current_context().command_path}: {text}", err=True)


@contextmanager
def errors(*kinds: type[Exception]) -> Iterator[None]:
    """Show errors as one line, after the command's name, with exit code 2.

    Args:
        kinds: those of them beside lockstep's own and the system's.
    """
    from lockstep import _files
    from lockstep.errors import LockstepError

    shown: tuple[type[Exception], ...] = (LockstepError, OSError, *kinds)
    try:
        yield
    except shown as error:
        of_system = isinstance(error, OSError) and not isinstance(error, LockstepError)
        say(_files.describe(error) if of_system else error)
        sys.exit(2)
