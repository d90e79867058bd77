"""``lockstep doctor``: look at machines before a job, or print what a bug report needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lockstep.cli.options import AS_JSON, LocalPath, local_ranks
from lockstep.cli.terminal import errors, print_json, say
from lockstep.text import NEXT, counted, wrapped

if TYPE_CHECKING:
    from lockstep.tools.doctor.findings import Finding
    from lockstep.tools.doctor.visit import Report


@click.command(short_help="Check hosts before a job.")
@local_ranks("Number of ranks planned for each host, as for lockstep run. [default: auto]")
@click.option(
    "--folder", default=".", type=LocalPath(), help="Folder that the run will write to. [default: the current folder]"
)
@click.option("--quick", is_flag=True, help="Skip the checks that import torch: GPUs and the test jobs.")
@AS_JSON
@click.option(
    "--env",
    is_flag=True,
    help="Check nothing; print what a bug report needs: versions, hardware and relevant environment variables, without "
    "secrets.",
)
@click.option("--hosted", is_flag=True, hidden=True, help="Run as one of HOST, with orders from standard input.")
@click.argument("hosts", nargs=-1, metavar="[HOST[:N]]...")
def doctor(
    ranks: str | None, folder: Path, quick: bool, as_json: bool, env: bool, hosted: bool, hosts: tuple[str, ...]
) -> None:
    """Check this host, or each HOST by ssh, before a job: what is wrong and what to do about it.

    Checks versions, GPUs, cores, memory, /dev/shm, limits, environment variables, host names, ports and the folder, and
    times a job of two ranks. With several hosts it also compares their versions and clocks, finds out which hosts reach
    each other and whether the folder is shared, and times a job of one rank per host for each pair of hosts. HOST is
    written as for lockstep run --hosts.

    The exit code is 0 if nothing is wrong except for warnings, 1 if something is wrong, and 2 if the arguments are
    invalid.
    """
    if hosted:
        from lockstep.tools.doctor.hosted import serve

        serve()
    with errors(ValueError):
        if env:
            if hosts or quick or ranks is not None:
                raise ValueError("--env prints what there is on this host: leave out other options and HOST")
            if as_json:
                print_json("doctor.env", _environment_as_json())
            else:
                click.echo(_environment())
            return
        report = _look(ranks, folder, quick, hosts)
    if as_json:
        print_json("doctor", _as_json(report))
    else:
        click.echo(_as_text(report))
    sys.exit(1 if any(finding.level.value == "wrong" for finding in report.findings) else 0)


def _environment() -> str:
    from lockstep.tools.doctor.environment import describe

    return describe()


def _environment_as_json() -> dict[str, Any]:
    from lockstep.tools.doctor.environment import as_json

    return as_json()


def _look(ranks: str | None, folder: Path, quick: bool, hosts: tuple[str, ...]) -> Report:
    from lockstep import machine
    from lockstep.launch.spec import parse_ranks
    from lockstep.remote.ssh import parse_hosts
    from lockstep.tools.doctor.visit import VisitOptions, look_at

    if ranks is not None and not hosts:
        parse_ranks(ranks, cores=machine.cores(), gpus=machine.gpus())  # refuses what makes no sense
    if sys.stderr.isatty() and not quick:
        where = "this machine" if not hosts else counted(len(hosts), "host")
        say(f"checking {where}; this takes ten to thirty seconds")
    return look_at(parse_hosts(",".join(hosts)) if hosts else (), VisitOptions(ranks, str(folder), quick))


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
    lines = _in_lines(level + about + finding.what, indent)
    if finding.advice:
        lines += _in_lines(f"{indent}{NEXT} {finding.advice}", f"{indent}{' ' * len(NEXT)} ")
    return lines


def _in_lines(words: str, indent: str) -> list[str]:
    parts = enumerate(words.splitlines())
    return [line for number, part in parts for line in wrapped(part, indent if number else "", indent)]


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
