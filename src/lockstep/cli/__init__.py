"""The ``lockstep`` command. Every command imports what it needs when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import select
import signal
import sys
from typing import Any, TextIO

import click

from lockstep.cli.checkpoint import checkpoint
from lockstep.cli.doctor import doctor
from lockstep.cli.evaluate import evaluate
from lockstep.cli.options import Commands
from lockstep.cli.port import port
from lockstep.cli.replay import replay
from lockstep.cli.run import run
from lockstep.cli.runs import runs
from lockstep.cli.submit import submit
from lockstep.cli.verify import verify
from lockstep.version import __version__


class _Ending(Commands):
    """Ends a command as a shell expects it, where click would not.

    By Ctrl-C click says "Aborted!" and leaves with 1. A BrokenPipeError it takes for a reader of the output that has
    gone, as after ``| head``, and leaves without a word, also if it comes from a socket or a pipe to another process.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)
        except BrokenPipeError as error:
            if _nobody_reads(sys.__stdout__) or _nobody_reads(sys.__stderr__):
                raise
            raise RuntimeError("a process that this command talks to has closed its end of a pipe or socket") from error


def _nobody_reads(stream: TextIO | None) -> bool:
    """Return whether what is written there reaches nobody: it is a pipe or socket whose other end is closed."""
    if stream is None or stream.closed:
        return True
    poll = select.poll()
    poll.register(stream.fileno(), 0)  # errors are always told
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


#: For all commands; an option may be written with underscores, as torchrun has it (``--nproc_per_node``).
_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


@click.group(
    "lockstep",
    cls=_Ending,
    commands=[run, runs, replay, checkpoint, evaluate, verify, port, doctor, submit],
    context_settings=_SETTINGS,
    epilog='Completion in bash: eval "$(_LOCKSTEP_COMPLETE=bash_source lockstep)" (also zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="lockstep")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Data-parallel training for PyTorch: N replicas that train the same model as one."""
    started = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler)
    if ctx.invoked_subcommand != "run" and started:  # by __main__.py; these have something to undo
        signal.signal(signal.SIGINT, signal.default_int_handler)
