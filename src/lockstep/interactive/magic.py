"""``%load_ext lockstep``, and then ``%%ranks -n 2`` before a cell: run it on ranks that stay alive between cells.

The only file that imports IPython. All that is shown goes through IPython's own outputs, so nothing has to be installed
beside the kernel.
"""

from __future__ import annotations

import argparse
import html
import shlex
import sys
from typing import Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from lockstep import machine
from lockstep.errors import CellInterrupted, LockstepError
from lockstep.interactive.cell import RunningCell
from lockstep.interactive.output import CellFigure
from lockstep.interactive.ranks import InteractiveRanks, follow, show
from lockstep.launch.report import ranks_by_default
from lockstep.launch.spec import parse_ranks
from lockstep.text import counted, joined


class _Parser(argparse.ArgumentParser):
    """The options of the magic; a mistake is IPython's kind of error instead of the end of the kernel."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%ranks: {message}\n{self.format_usage().strip()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise UsageError(f"%%ranks: {message or f'exit {status}'}")


def _parser() -> _Parser:
    parser = _Parser(prog="%%ranks", add_help=False, allow_abbrev=False)
    parser.add_argument("-n", metavar="N|auto|gpu|cpu", help="number of ranks")
    parser.add_argument(
        "--new", action="store_true", help="end the present ranks with their variables, and start others"
    )
    parser.add_argument("--close", action="store_true", help="end the ranks, and start none")
    return parser


@magics_class
class RanksMagics(Magics):
    """The magic ``ranks`` of one shell, and its ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell)
        self._show = shell.display_pub.publish
        self._ranks: InteractiveRanks | None = None

    @line_cell_magic
    def ranks(self, line: str, cell: str | None = None) -> Any:
        """Run a cell on ranks that live on: %%ranks [-n N] [--new]

        Each rank has a namespace of its own, in which names stay from cell to cell. What rank 0 writes appears as it
        comes, the output of the others is folded below, and the value of the last line is rank 0's.

        -n N    how many ranks: a number, gpu or cpu (one for each), or auto (the default), as for "lockstep run".
                Afterwards it may be left out.
        --new   end the ranks that live, and with them their variables, and start others.

        %ranks (without a cell) says which ranks live; %ranks --close ends them.
        """
        try:
            options = _parser().parse_args(shlex.split(line))
        except ValueError as error:
            raise UsageError(f"%%ranks {line}: {error}") from None
        if cell is None:
            return self._say(options)
        try:
            ranks = self._ranks_for(options)
        except (LockstepError, ValueError) as error:
            raise UsageError(f"%%ranks: {error}") from None
        running = ranks.begin(cell)
        for each in follow(running):
            if isinstance(each, CellFigure):
                self._show(data={"image/png": each.png, "text/plain": "<Figure>"})
            else:
                show(each)
        self._show_others(running)
        try:
            return running.result()
        except (LockstepError, CellInterrupted) as error:
            _leave_out_frames(error)
            raise

    def close(self) -> None:
        """End the ranks, if there are some."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _say(self, options: argparse.Namespace) -> None:
        if options.close or options.new:
            self.close()
        if options.n is not None:
            raise UsageError('%ranks -n: ranks start with a cell: put "%%ranks -n N" above it')
        if self._ranks is None or not self._ranks.is_alive:
            print("no ranks; %%ranks -n N above a cell starts them")
        else:
            pids = self._ranks.pids()
            print(f"{counted(len(pids), 'rank')} (processes {joined(list(map(str, pids)))})")

    def _ranks_for(self, options: argparse.Namespace) -> InteractiveRanks:
        """Return the ranks that a cell runs on: those that live, if they are as many as it asks for, or new ones."""
        if options.close:
            raise ValueError("--close ends the ranks, so no cell can run on them: use the line %ranks --close")
        cores, gpus = machine.cores(), machine.gpus()
        asked = None if options.n is None else parse_ranks(options.n, cores=cores, gpus=gpus)
        count = asked
        if options.new:
            count = count or (self._ranks.nprocs if self._ranks is not None else None)
            self.close()
        if self._ranks is not None and not self._ranks.is_alive:
            said = self._ranks.ended()
            count = count or self._ranks.nprocs
            self.close()
            print(f"lockstep: these are new ranks, without the variables of the last ones: {said}", file=sys.stderr)
        if self._ranks is None:
            if count is None:
                count = parse_ranks("auto", cores=cores, gpus=gpus)
                print(f"lockstep: {ranks_by_default(count, cores=cores, gpus=gpus)}", file=sys.stderr)
            self._ranks = InteractiveRanks(count)
        elif asked not in (None, self._ranks.nprocs):
            raise ValueError(
                f"-n {options.n}: {counted(self._ranks.nprocs, 'rank')} live, and a world keeps its size. Add --new to "
                "end them, with all of their variables, and start others; or leave out -n to run the cell on them"
            )
        return self._ranks

    def _show_others(self, running: RunningCell) -> None:
        """Show what the other ranks have written, folded."""
        for rank, kept in sorted(running.output.items()):
            text = kept.text
            if rank == 0 or not text.strip():
                continue
            lines = counted(len(text.splitlines()), "line")
            folded = (
                f"<details><summary>rank {rank}: {lines}</summary>"
                f'<pre style="margin:0 0 0 1em">{html.escape(text)}</pre></details>'
            )
            data = {"text/plain": f"rank {rank}: {lines}\n{text}", "text/html": folded}
            self._show(data=data)


def _leave_out_frames(error: LockstepError | CellInterrupted) -> None:
    """Have IPython show only the ranks' frames: those of this process explain nothing."""
    lines = f"{type(error).__name__}: {error}".splitlines()
    if isinstance(error, CellInterrupted):
        lines = [*error.traceback.rstrip().splitlines(), *lines]
    vars(error)["_render_traceback_"] = lambda: lines  # the method that IPython asks an exception for
