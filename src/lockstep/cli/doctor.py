"""``lockstep doctor``: look at machines before a job. ``lockstep env``: what a bug report needs."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.terminal import LocalPath
from lockstep.text import counted

if TYPE_CHECKING:
    from lockstep.tools.doctor.findings import Finding
    from lockstep.tools.doctor.visit import Report

_WIDTH = 120


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "--nproc-per-node", "ranks", metavar="N|auto|gpu|cpu", help="Ranks that a machine is to have.")
@click.option(
    "--folder", default=".", type=LocalPath(), help="The folder that the run goes to; the current one if not given."
)
@click.option("--quick", is_flag=True, help="Leave out what imports torch: the GPUs, and the short jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("--hosted", is_flag=True, hidden=True, help="This is one of the hosts; orders come over standard input.")
@click.argument("hosts", nargs=-1, metavar="[HOST[:N]]...")
def doctor(ranks: str | None, folder: Path, quick: bool, as_json: bool, hosted: bool, hosts: tuple[str, ...]) -> None:
    """Look at this machine, or at each HOST by ssh, before a job: what is wrong, and what to do about it.

    Looks at versions, GPUs, cores, memory, /dev/shm, limits, variables, names, ports and the folder, and times a job of
    two ranks. With several hosts also at what lies between them: versions that differ, clocks, who reaches whom, a
    folder that all share, and a job of one rank on each host, timed two by two. HOST is as after run --hosts.

    The exit code is 0 if nothing is wrong, warnings aside, 1 if something is, and 2 if the command makes no sense.
    """
    from lockstep.errors import LockstepError

    if hosted:
        from lockstep.tools.doctor.hosted import serve

        serve()
    try:
        from lockstep import machine
        from lockstep.launch.spec import parse_ranks
        from lockstep.remote.ssh import parse_hosts
        from lockstep.tools.doctor.visit import VisitOptions, look_at

        if ranks is not None and not hosts:
            parse_ranks(ranks, cores=machine.cores(), gpus=machine.gpus())  # refuses what makes no sense
        if sys.stderr.isatty() and not quick:
            where = "this machine" if not hosts else counted(len(hosts), "host")
            click.echo(f"lockstep doctor: looking at {where}; this takes some ten to thirty seconds", err=True)
        report = look_at(parse_hosts(",".join(hosts)) if hosts else (), VisitOptions(ranks, str(folder), quick))
    except (ValueError, LockstepError) as error:
        click.echo(f"lockstep doctor: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 1 says that something is wrong
    click.echo(json.dumps(_as_json(report), indent=2) if as_json else _as_text(report))
    sys.exit(1 if any(finding.level.value == "wrong" for finding in report.findings) else 0)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def env() -> None:
    """Print what a bug report needs: versions, the machine, GPUs, and the variables that matter.

    Secrets are left out: variables that are named like one, and what looks like a token or a password.
    """
    from lockstep.tools.doctor.environment import describe

    click.echo(describe())


def _as_text(report: Report) -> str:
    from lockstep.tools.doctor.findings import verdict

    parts = [(host.name, host.findings) for host in report.hosts]
    if report.between:
        parts.append(("between the hosts" if len(report.hosts) > 1 else "here", report.between))
    lines = []
    for name, findings in parts:
        lines += [f"{name}: {verdict(findings)}", *(line for finding in findings for line in _lines(finding)), ""]
    return "\n".join(lines).rstrip()


def _lines(finding: Finding) -> list[str]:
    """Return one finding, and below it what to do."""
    level, about = f"  {finding.level.value:<8}", f"{finding.about}: "
    indent = " " * len(level)
    lines = _wrapped(level + about + finding.what, indent)
    if finding.advice:
        lines += _wrapped(f"{indent}→ {finding.advice}", f"{indent}  ")
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines()):
        first = "" if number == 0 else indent
        found += textwrap.wrap(
            first + line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return found


def _as_json(report: Report) -> dict[str, Any]:
    from lockstep.tools.doctor.findings import verdict

    return {
        "verdict": verdict(report.findings),
        "hosts": [
            {
                "name": host.name,
                "verdict": verdict(host.findings),
                "findings": [finding.to_json() for finding in host.findings],
                "facts": host.facts,
            }
            for host in report.hosts
        ],
        "between": [finding.to_json() for finding in report.between],
    }
