"""The ``lockstep`` command. Every command imports what it needs when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import signal
from typing import Any

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


class _Interruptible(Commands):
    """Ends a command by Ctrl-C as a shell expects it; click would say "Aborted!" and leave with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)


#: For all commands; an option may be written with underscores, as torchrun has it (``--nproc_per_node``).
_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("_", "-"),
}


@click.group(
    "lockstep",
    cls=_Interruptible,
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
