"""What the commands that only look share: which run, a console, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

#: Columns where there is no terminal to ask.
_WIDTH = 160
#: Which run to look at: as :func:`lockstep.runs.history.find` takes it.
RUN = click.argument("run", required=False)


class LocalPath(click.Path):
    """A path on this machine's file systems; a URL is refused."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as pathlib's."""
        from lockstep._files import NoLocalPath, local_path

        try:
            local_path(value, "the path" if param is None else param.opts[0])
        except NoLocalPath as error:
            raise click.UsageError(str(error), ctx) from None
        return super().convert(value, param, ctx)


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


@contextmanager
def errors(command: str, *kinds: type[Exception]) -> Iterator[None]:
    """Show errors as one line, with exit code 2.

    Args:
        command: what stands before the error.
        kinds: those of them beside lockstep's own and the system's.
    """
    from lockstep.errors import LockstepError

    shown: tuple[type[Exception], ...] = (LockstepError, OSError, *kinds)
    try:
        yield
    except shown as error:
        click.echo(f"lockstep {command}: {error}", err=True)
        sys.exit(2)
