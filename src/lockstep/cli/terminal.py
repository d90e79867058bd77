"""What commands have in common: a console, JSON, errors as one line, and where to look for runs."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from lockstep.codes import CodedEnum

if TYPE_CHECKING:
    from rich.console import Console

#: The width in columns where standard output is no terminal.
_WIDTH = 1000


class OtherError(CodedEnum):
    """An error of a command that is none of lockstep's own classes."""

    SYSTEM = "the system refused", "system-error"
    ARGUMENT = "an argument makes no sense", "invalid-argument"


def open_console(*, soft_wrap: bool = False, markup: bool = True) -> Console:
    """Return a console for standard output, wide enough for a table where that is no terminal.

    Args:
        soft_wrap: leave it to the terminal to break long lines.
        markup: take words in brackets for rich's own.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, highlight=False, soft_wrap=soft_wrap, markup=markup)


def as_json(command: str, result: Mapping[str, Any], *, indent: int | None = 2) -> str:
    """Return what a command has found as JSON, in the one shape of all commands; docs/json.md describes each.

    Args:
        command: its name below ``lockstep``, with points between the words: ``runs.ls``.
        result: names of small letters and underscores; times in seconds and sizes in bytes, as numbers. A number that
            JSON does not have (NaN, infinite) becomes null.
        indent: spaces before what lies one deeper; None: all in one line.
    """
    return json.dumps({"schema": f"lockstep.{command}/1", **_plain(result)}, indent=indent, allow_nan=False)


def print_json(command: str, result: Mapping[str, Any]) -> None:
    """Print what a command has found as JSON; the arguments are those of :func:`as_json`."""
    click.echo(as_json(command, result))


def print_json_line(command: str, result: Mapping[str, Any]) -> None:
    """Print one of several results as a line of JSON, at once; the arguments are those of :func:`as_json`."""
    click.echo(as_json(command, result, indent=None))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, PurePath) else value


def say(text: object) -> None:
    """Write one line to standard error, after the name of the command that runs."""
    click.echo(f"{click.get_current_context().command_path}: {text}", err=True)


@contextmanager
def errors(*kinds: type[Exception], in_lines: bool = False) -> Iterator[None]:
    """Show errors as one line, after the command's name, with exit code 2; with --json also as JSON.

    Args:
        kinds: errors that are shown so beside lockstep's own and the system's.
        in_lines: True: the JSON of the command is objects in lines, and so is the error.
    """
    from lockstep import _files
    from lockstep.errors import LockstepError, code_of

    shown: tuple[type[Exception], ...] = (LockstepError, OSError, *kinds)
    try:
        yield
    except shown as error:
        of_system = isinstance(error, OSError) and not isinstance(error, LockstepError)
        text = _files.describe(error) if of_system else str(error)
        given = click.get_current_context().params
        if given.get("as_json") or str(given.get("json_file")) == "-":
            code = code_of(error) or (OtherError.SYSTEM if of_system else OtherError.ARGUMENT).code
            shows = print_json_line if in_lines else print_json
            shows("error", {"code": code, "type": type(error).__name__, "message": text, "exit_code": 2})
        say(text)
        sys.exit(2)


def exit_on(*signals: signal.Signals) -> None:
    """Let each of ``signals`` end the command by SystemExit, so that what is under way ends and is put back. Afterwards
    the signals have their earlier handlers again."""
    before = {signum: signal.getsignal(signum) for signum in signals}

    def give_back() -> None:
        for signum, handler in before.items():
            if signal.getsignal(signum) == _leave:
                signal.signal(signum, handler)

    click.get_current_context().call_on_close(give_back)
    for signum, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(signum, _leave)


def _leave(signum: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + signum)
