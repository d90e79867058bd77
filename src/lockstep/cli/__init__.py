"""The ``lockstep`` command. Every command imports what it needs when it is called, so that ``--help`` is quick."""

from __future__ import annotations

import signal
from typing import Any

import click

from lockstep.cli.checkpoint import checkpoint
from lockstep.cli.doctor import doctor, env
from lockstep.cli.manifest import manifest
from lockstep.cli.plan import plan
from lockstep.cli.run import run
from lockstep.cli.runs import compare, report, runs, stack, top
from lockstep.cli.slurm import slurm
from lockstep.cli.trace import trace
from lockstep.cli.verify import verify
from lockstep.version import __version__


class _Commands(click.Group):
    """Ends a command by Ctrl-C as a shell expects it; click would say "Aborted!" and leave with 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(128 + signal.SIGINT)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lockstep")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Data-parallel training for PyTorch: N replicas that train the same model as one."""
    started = signal.getsignal(signal.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler)
    if ctx.invoked_subcommand != "run" and started:  # by __main__.py; these have something to undo
        signal.signal(signal.SIGINT, signal.default_int_handler)


main.add_command(run)
main.add_command(runs)
main.add_command(top)
main.add_command(stack)
main.add_command(compare)
main.add_command(trace)
main.add_command(report)
main.add_command(plan)
main.add_command(verify)
main.add_command(checkpoint)
main.add_command(slurm)
main.add_command(manifest)
main.add_command(doctor)
main.add_command(env)
