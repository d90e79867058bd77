"""The ``lockstep`` command. Every command imports what it needs when it is called, so that ``--help`` is quick."""

from __future__ import annotations

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


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lockstep")
def main() -> None:
    """Data-parallel training for PyTorch: N replicas that train the same model as one."""


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
