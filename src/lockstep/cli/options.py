"""Options and arguments that several commands take, each declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_Command = TypeVar("_Command", bound=Callable[..., Any])

#: Settings of a command that takes a program: what follows the program is not an option of ours.
PASSES_ON = {"allow_interspersed_args": False}

#: Help for the argument RUN, which :func:`lockstep.runs.history.find` takes.
_RUN = (
    "RUN is the name of a run, its number in the list that lockstep runs prints, or its folder; the newest by default."
)
_RUN_GOING_ON = _RUN.replace("the newest", "the newest that is running")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_MODULE = click.option("-m", "is_module", is_flag=True, help="Run PROGRAM as a module, like python -m.")


def _files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of files, which the shell does itself."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _runs(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete names of recorded runs, the newest first, and of folders."""
    from click.shell_completion import CompletionItem

    from lockstep.runs import history
    from lockstep.runs.homes import homes

    found = [run.name for run in history.runs(homes()) if run.name.startswith(incomplete)]
    # Folders first: where they come, click's function for bash drops what was there before.
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, found)]


class Commands(click.Group):
    """A group that shows its commands in the order in which they were added; click would sort them by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        """Return the names of the commands."""
        return list(self.commands)


class LocalPath(click.Path):
    """A path on this machine's file systems; a URL is refused."""

    def __init__(self, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(file_okay=file_okay, dir_okay=dir_okay, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as pathlib's."""
        from lockstep._files import NoLocalPath, local_path

        try:
            path = local_path(value, "the path" if param is None else param.opts[0])
        except NoLocalPath as error:
            raise click.UsageError(str(error), ctx) from None
        return super().convert(path, param, ctx)


class RunPath(LocalPath):
    """The path of a run's checkpoints: on this machine's file systems, or an address in an object store."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as pathlib's, or the address."""
        from lockstep._files import NoLocalPath, StorePath, run_path

        try:
            path = run_path(value, "the path" if param is None else param.opts[0])
        except NoLocalPath as error:
            raise click.UsageError(str(error), ctx) from None
        return path if isinstance(path, StorePath) else super().convert(path, param, ctx)


def takes_run(command: _Command, told: str = _RUN) -> _Command:
    """Add the argument RUN, and to the command's help what it is."""
    command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{told}"
    return click.argument("run", required=False, shell_complete=_runs)(command)


def takes_run_going_on(command: _Command) -> _Command:
    """Add the argument RUN of a command that looks at ranks, and to the command's help what it is."""
    return takes_run(command, _RUN_GOING_ON)


def takes_program(command: _Command) -> _Command:
    """Add PROGRAM with its arguments, and -m."""
    rest = click.argument("args", nargs=-1, type=click.UNPROCESSED, shell_complete=_files)
    return _MODULE(click.argument("program", shell_complete=_files)(rest(command)))


def local_ranks(help: str) -> Callable[[_Command], _Command]:
    """Return the option -n of a command that may count cores and GPUs itself."""
    return click.option("-n", "--nproc-per-node", "ranks", metavar="N|auto|gpu|cpu", help=help)


def fixed_local_ranks(help: str) -> Callable[[_Command], _Command]:
    """Return the option -n of a command that describes other machines, whose cores and GPUs it can't count."""
    return click.option(
        "-n", "--nproc-per-node", "ranks", type=click.IntRange(min=1), required=True, metavar="N", help=help
    )


def grace(default: float | None, *, more: str = "") -> Callable[[_Command], _Command]:
    """Return the option --grace.

    Args:
        default: in seconds; None: the command works it out and says how in ``more``.
        more: what follows the explanation.
    """
    text = "Time the ranks have to finish their step and save before they are killed." + (more and f" {more}")
    return click.option(
        "--grace", type=float, default=default, show_default=default is not None, metavar="SECONDS", help=text
    )


def max_restarts(default: str) -> Callable[[_Command], _Command]:
    """Return the option --max-restarts.

    Args:
        default: the default in words.
    """
    text = f"Maximum number of times that all ranks are restarted after a failure. [default: {default}]"
    return click.option("--max-restarts", type=click.IntRange(min=0), metavar="K", help=text)


class Figure(click.ParamType):  # type: ignore[type-arg]  # not generic in older versions of click
    """A number that is written in some way of its own.

    Args:
        name: what it is.
        parse: returns the number that a text says; imports what it needs when it is called.
    """

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        try:
            return value if isinstance(value, float) else self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _parse_price(text: str) -> float:
    from lockstep.job.useful import parse_price

    return parse_price(text)


def _parse_time_limit(text: str) -> float:
    from lockstep.text import parse_time_limit

    return parse_time_limit(text)


def _parse_peak(text: str) -> float:
    from lockstep.knobs import parse_peak

    try:
        return parse_peak(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


TIME_LIMIT = Figure("time", _parse_time_limit)
PEAK_FLOPS = Figure("peak", _parse_peak)


def price(help: str) -> Callable[[_Command], _Command]:
    """Return the option --price."""
    return click.option("--price", type=Figure("price", _parse_price), metavar="AMOUNT/h", help=help)


def log_dir(help: str, *, default: str | None = None) -> Callable[[_Command], _Command]:
    """Return the option --log-dir."""
    return click.option(
        "--log-dir", type=LocalPath(), default=default, show_default=default is not None, metavar="FOLDER", help=help
    )
