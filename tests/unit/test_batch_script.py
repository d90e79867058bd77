"""``lockstep submit slurm``: the script it prints, what it refuses. tests/schedulers runs it on a real Slurm."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockstep.cli import main
from lockstep.job.files import EXIT_SAVED
from lockstep.schedulers.sbatch import default_grace, seconds
from lockstep.schedulers.start import SAVED
from tests.launching import LIMIT

DOCUMENT = Path(__file__).parents[2] / "docs" / "many_machines.md"


def _run(*arguments: str) -> Result:
    done = CliRunner().invoke(main, ["submit", "slurm", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def _directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)


def test_the_exit_code_is_the_launchers() -> None:
    assert SAVED == EXIT_SAVED


def test_the_script_asks_for_what_the_ranks_need() -> None:
    options = ["--nodes", "3", "-n", "4", "--time", "1-00:00:00", "--cpus-per-rank", "6", "--gpus-per-rank", "1"]
    more = ["--mem", "64G", "--partition", "long", "--account", "lab", "--grace", "600", "--sbatch=--constraint=a100"]
    script = _run(*options, *more, "--setup", "module load cuda", "train.py").stdout
    assert _directives(script) == [
        "--job-name=train",
        "--nodes=3",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--gpus-per-node=4",
        "--mem=64G",
        "--time=1-00:00:00",
        "--signal=TERM@660",
        "--requeue",
        "--open-mode=append",
        "--output=train-%j.out",
        "--partition=long",
        "--account=lab",
        "--constraint=a100",
    ]
    assert "\nmodule load cuda\n" in script
    assert " --ntasks-per-node=1 --cpus-per-task=24 \\\n    lockstep run -n 4 --grace 600 " in script


@pytest.mark.parametrize("requeue", ["script", "slurm", "never"])
def test_the_program_gets_its_arguments_unchanged(requeue: str, tmp_path: Path) -> None:
    arguments = ["--lr", "0.1", "two words", "it's", "$HOME", "*", "#", 'a"b', "back\\slash", "new\nline", "", "--time"]
    script = _run("-n", "2", "--time", "60", "--requeue", requeue, "-m", "the.program", *arguments).stdout
    (tmp_path / "srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > arguments\nexit 9\n')
    (tmp_path / "srun").chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=LIMIT, check=False)
    assert done.returncode == 9
    passed = (tmp_path / "arguments").read_text().split("\0")[:-1]
    own = ["--kill-on-bad-exit=0", "--wait=0", "--ntasks-per-node=1", "--cpus-per-task=2"]
    run = ["lockstep", "run", "-n", "2", "--grace", "240", "--log-dir", "logs/7/start-0", "-m", "the.program"]
    assert passed == [*own, *run, *arguments]


@pytest.mark.parametrize(
    ("code", "requeued"), [(75, True), (0, False), (1, False), (143, False)]
)  # fmt: skip
def test_only_a_job_that_has_saved_is_queued_again(code: int, requeued: bool, tmp_path: Path) -> None:
    script = _run("-n", "2", "--time", "60", "train.py").stdout
    for name, does in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" > requeued')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, timeout=LIMIT, check=False)
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    else:
        assert done.returncode == code


def test_who_queues_the_job_again() -> None:
    by_slurm = _run("-n", "2", "--time", "60", "--requeue", "slurm", "train.py").stdout
    never = _run("-n", "2", "--time", "60", "--requeue", "never", "train.py").stdout
    assert "--requeue" in _directives(by_slurm)
    assert "--no-requeue" in _directives(never)
    for script in (by_slurm, never):
        assert "\nexec srun " in script
        assert "scontrol" not in script


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--time", "1:2:3:4"], "--time 1:2:3:4: expected [DAYS-]HOURS:MINUTES:SECONDS"),
        (["--time", "x-1"], "--time x-1: expected"),
        (["--time", "00:02:00"], "which leaves no time to train"),
        (["--time", "60", "--grace", "3600"], "--time 60 is 3600 s, and 3660 s before its end"),
        (["--time", "60", "--grace", "0"], "--grace 0: the ranks need some seconds"),
        (["--time", "60", "--grace", "nan"], "--grace nan: the ranks need some seconds"),
        (["--time", "60", "--signal-before", "240"], "--signal-before 240 does not leave --grace 240 s and 30 s"),
        (["--time", "9-0", "--grace", "70000"], "asked to stop 70060 s before the limit; Slurm takes 65535"),
        (["--time", "60", "--name", "two words"], "--name 'two words': expected a word without spaces or quotes"),
        (["--time", "60", "--partition", ""], "--partition '': expected a word"),
        (["--time", "60", "--mem", "lots"], "--mem lots: expected a size for each machine"),
        (["--time", "60", "--sbatch", "constraint=a"], "expected an option of sbatch"),
        (["--time", "60", "--sbatch", "--exclusive\nrm -rf"], "expected an option of sbatch"),
        (["--time", "60", "--sbatch", "--signal=USR1@60"], "--sbatch --signal=USR1@60: the script sets this itself"),
        (["--time", "60", "--sbatch", "-N4"], "--sbatch -N4: the script sets this itself"),
        (["--time", "60", "--setup", "a\nb"], "expected one line of shell"),
    ],
)
def test_options_that_make_no_sense(options: list[str], text: str) -> None:
    done = _run("-n", "2", *options, "train.py")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("lockstep submit slurm: ")
    assert text in done.stderr


@pytest.mark.parametrize(
    ("time", "limit"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:00", 14400),
        ("1-4", 100800),
        ("1-04:30", 102600),
        ("1-04:30:15", 102615),
    ],
)
def test_the_forms_of_a_time_limit(time: str, limit: int) -> None:
    assert seconds(time) == limit


def test_the_time_to_save_suits_the_limit() -> None:
    assert default_grace("04:00:00") == 240.0
    assert default_grace("4") == 60.0


def test_the_document_shows_what_is_printed() -> None:
    command, script = re.findall(
        r"```bash\n(lockstep submit slurm [^\n]*) > \S+\n.*?```bash\n(#!/bin/bash\n.*?)```",
        DOCUMENT.read_text(),
        re.DOTALL,
    )[0]
    assert _run(*shlex.split(command)[3:]).stdout == script
