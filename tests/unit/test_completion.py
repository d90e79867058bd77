"""Completion in bash: the script that click makes, sourced and asked by bash itself."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from lockstep.cli import main
from tests.launching import python_path
from tests.recorded import write_record

#: What is to be typed, and sourced, once.
_SOURCE = 'eval "$(_LOCKSTEP_COMPLETE=bash_source lockstep)"'
#: What bash does where TAB is pressed: it calls the function that is registered for the command.
_TAB = """
compopt() { :; }  # bash refuses it outside of a completion
function=$(complete -p lockstep | sed -E 's/.* -F ([^ ]+) .*/\\1/')
tab() { COMPREPLY=() COMP_WORDS=(lockstep "$@") COMP_CWORD=$#; "$function" lockstep; echo "${COMPREPLY[@]}"; }
"""


def _completed(folder: Path, lines: Sequence[Sequence[str]]) -> list[str]:
    """What bash offers for the last word of each of ``lines``."""
    command = folder / "bin" / "lockstep"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lockstep "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    script = "\n".join([_SOURCE, _TAB, *(f"tab {shlex.join(words)}" for words in lines)])
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": python_path(), "XDG_STATE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_values_and_runs(tmp_path: Path) -> None:
    write_record(tmp_path / "lockstep" / "logs" / "20261124-120000-train-abcdef")
    offered = {
        ("ru",): "run runs",
        ("run", "--max-re"): "--max-restarts",
        ("runs", "plan", "--scaling", ""): "strong weak",
        ("runs", "explain", "2026"): "20261124-120000-train-abcdef",
        ("run", "-n", "2", "tra"): "",  # files, which bash knows
    }
    assert _completed(tmp_path, [*offered]) == [*offered.values()]


def test_the_help_says_how_to_switch_it_on() -> None:
    assert _SOURCE in " ".join(CliRunner().invoke(main, ["--help"]).stdout.split())
