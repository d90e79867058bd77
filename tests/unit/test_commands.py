"""The command line as a whole: which commands there are, what every command and option says of itself."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lockstep.cli import main
from lockstep.launch.__main__ import main as launch


def _walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from _walk(below, (*path, name))


COMMANDS = dict(_walk(main))
OPTIONS = [
    pytest.param(option, id=f"{path} {option.opts[0]}")
    for path, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
]
#: Columns of help in a terminal of 80, which click's runner of tests would fill.
_WIDTH = 78


def test_there_are_nine_commands_three_of_them_groups() -> None:
    assert list(COMMANDS)[1:] == [
        "run",
        *(
            "runs",
            "runs ls",
            "runs explain",
            "runs top",
            "runs stack",
            "runs compare",
            "runs bisect",
            "runs batch",
            "runs report",
            "runs plan",
            "runs trace",
        ),
        "replay",
        "checkpoint",
        *(f"checkpoint {name}" for name in ("ls", "show", "verify", "prune", "save", "rewind", "export")),
        "evaluate",
        "verify",
        "port",
        "doctor",
        *("submit", "submit slurm", "submit kubernetes"),
    ]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_that_fits_the_list(path: str) -> None:
    shown = CliRunner().invoke(main, [*path.split(), "-h"], terminal_width=_WIDTH)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith(" ".join(["Usage: lockstep", *path.split()]) + " ")
    _, _, listed = shown.stdout.partition("Commands:\n")
    assert "..." not in listed, "click has cut off a line"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_says_what_it_is_in_a_sentence(option: click.Option) -> None:
    text = inspect.cleandoc(option.help or "")
    assert re.search(r"\.( \[default[^\]]*\])?$", text), text
    assert not any("_" in name for name in option.opts), "both spellings are taken, and one is shown"


@pytest.mark.parametrize("path", [*COMMANDS, "python -m lockstep.launch"])
def test_help_has_no_words_of_click_for_types_and_no_endings_of_floats(path: str) -> None:
    command = COMMANDS.get(path, launch)
    text = command.get_help(click.Context(command, info_name=path))
    assert not re.search(r"INTEGER|FLOAT|TEXT|BOOLEAN|RANGE|(?<![\d.])\d+\.0(?![\d.])", text), text


@pytest.mark.parametrize("words", [["--nproc_per_node", "0"], ["--nproc-per-node", "0"], ["-n", "0"]])
def test_options_may_be_written_as_torchrun_has_them(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["submit", "slurm", "--time", "60", *words, "train.py"])
    assert done.exit_code == 2
    assert "'-n' / '--nproc-per-node': 0 is not in the range x>=1" in done.stderr


@pytest.mark.parametrize("words", [["a"], ["--quick"], ["-n", "2"]])
def test_the_environment_is_that_of_this_host_alone(words: list[str]) -> None:
    done = CliRunner().invoke(main, ["doctor", "--env", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("lockstep doctor: --env prints ")


def test_without_a_command_runs_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    plain, listed = (CliRunner().invoke(main, words) for words in (["runs"], ["runs", "ls"]))
    assert plain.exit_code == listed.exit_code == 0
    assert plain.stdout == listed.stdout != ""


_BROKEN = """
import click, sys
from lockstep.cli import main
from lockstep.launch.__main__ import main as launch

@main.command()
@click.argument("of")
def broken(of):
    if of == "a process":
        raise BrokenPipeError(32, "Broken pipe")
    sys.stdin.read()  # until the reader has gone
    click.echo("lines")

main(["broken", sys.argv[1]])
"""


@pytest.mark.parametrize("of", ["a process", "its reader"])
def test_a_pipe_that_breaks_ends_a_command_in_silence_only_if_it_is_its_output(of: str) -> None:
    command, pipe = [sys.executable, "-c", _BROKEN, of], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if of == "its reader":
            process.stdout.close()
        assert process.stdin is not None
        process.stdin.close()
        said = process.stderr.read()
    assert process.returncode == 1
    if of == "its reader":
        assert said == ""
    else:
        assert said.endswith(
            "RuntimeError: a process that this command talks to has closed its end of a pipe or socket\n"
        )


@pytest.mark.parametrize("command", ["run -n 2 train.py", "run -n 2 -m train", "verify train.py", "doctor --quick"])
def test_a_command_in_a_folder_that_was_removed_says_so(tmp_path: Path, command: str) -> None:
    (folder := tmp_path / "here").mkdir()
    starts = f"rmdir '{folder}' && exec '{sys.executable}' -m lockstep {command}"
    done = subprocess.run(["sh", "-c", starts], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done
    said = "the folder in which this process runs has been removed: change to one that exists (cd)"
    assert done.stderr == f"lockstep {command.split()[0]}: {said}\n"
