"""A URL where a path is expected is refused by all that take paths, and nothing is made on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path, PureWindowsPath

import pytest
from click.testing import CliRunner
from examples import digits
from examples.crnn import options as crnn
from examples.gpt import options as gpt
from examples.imagenet import options as imagenet
from examples.segmentation import options as segmentation

from lockstep._files import NoLocalPath, local_path, redirected, run_path
from lockstep.cli import main
from lockstep.cli.options import LocalPath, RunPath
from lockstep.launch.spec import JobSpec, NodeOptions, Program, node_place
from lockstep.runs import history

_URLS = ["s3://bucket/run", "gs://bucket", "hdfs://host:9000/run", "abfss://a@b.c/d", "dbfs:/run", "S3://B/x"]


@pytest.mark.parametrize("url", _URLS)
@pytest.mark.parametrize("make", [str, Path], ids=["text", "path"])  # pathlib makes s3:/bucket of it
def test_urls_are_no_paths(url: str, make: Callable[[str], str | Path]) -> None:
    with pytest.raises(
        NoLocalPath, match=r"^folder=.*: this is a URL, but lockstep reads .*: give the path of a folder"
    ):
        local_path(make(url), "folder")


@pytest.mark.parametrize("path", ["C:\\runs\\1", "c:/runs", str(PureWindowsPath("D:\\x"))])
def test_paths_of_windows_are_none_here(path: str) -> None:
    with pytest.raises(ValueError, match="this is a path of Windows"):
        local_path(path, "folder")


def test_a_url_of_a_file_is_refused_with_its_path() -> None:
    for url in ("file:///data/run", "file:/data/run"):
        with pytest.raises(NoLocalPath, match="expected a path, not a URL: give /data/run itself"):
            local_path(url, "path")


@pytest.mark.parametrize(
    "path",
    ["runs/1", "/data/s3://bucket", "./s3:/odd", "run:1/x", "12:/x", "a b:/c", "s3", "s3:", "", "-", "C:", "ü:/x"],
)
def test_other_paths_are_as_they_were(path: str) -> None:
    assert local_path(path, "folder") == Path(path)
    assert local_path(Path("a") / "b", "folder") == Path("a/b")


def test_the_home_folder_is_meant_by_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for given in ("~/runs/1", Path("~/runs/1")):
        assert local_path(given, "folder") == run_path(given, "folder") == Path("/home/me/runs/1")
        assert redirected(Path("/scratch"), given) == Path("/scratch/home/me/runs/1")
    for other in ("./~/runs", "runs/~", "~nobody-of-this-name/runs"):
        assert local_path(other, "folder") == Path(other)


@pytest.mark.parametrize("kind", [LocalPath(), RunPath()])
def test_options_know_the_sign_where_no_shell_does(kind: LocalPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves --log-dir=~/logs as it is."""
    monkeypatch.setenv("HOME", "/home/me")
    assert kind.convert("~/logs", None, None) == Path("/home/me/logs")


def _job(**options: object) -> JobSpec:
    return JobSpec(Program("train.py", ()), nproc=1, **options)  # type: ignore[arg-type]


_TAKERS: dict[str, Callable[[str], object]] = {
    "--log-dir": lambda url: _job(log_dir=Path(url)),
    "--rdzv": lambda url: node_place(NodeOptions(rdzv=f"file:{url}", nnodes="2"), {}),
    "a run": lambda url: history.find(url, []),
}


@pytest.mark.parametrize("taker", _TAKERS)
def test_functions_that_take_paths_refuse_urls(taker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"s3:/.*: this is a URL"):
        _TAKERS[taker]("s3://bucket/run")
    assert os.listdir() == []


@pytest.mark.parametrize(
    "command",
    [
        "checkpoint rewind URL --to 1",
        "checkpoint export here URL",
        "runs ls URL",
        "runs report URL",
        "runs report -o URL",
        "runs compare URL URL",
        "runs stack URL",
        "runs top URL --once",
        "runs plan URL",
        "runs trace URL",
        "runs trace x.json.gz -o URL",
        "runs trace x.json.gz --split URL",
        "doctor --quick --folder URL",
        "verify --json URL train.py",
        "run -n 1 --log-dir URL train.py",
        "run --nnodes 2 --rdzv file:URL train.py",
        "submit slurm -n 1 --time 1:00:00 --log-dir URL train.py",
    ],
)
def test_commands_refuse_urls_in_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    done = CliRunner().invoke(main, command.replace("URL", "s3://bucket/run").split())
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    assert "s3://bucket/run: this is a URL" in done.stderr.replace("=s3:/bucket", "=s3://bucket")
    assert os.listdir() == []


@pytest.mark.parametrize(
    "parse", [digits.parse, crnn.parse, gpt.parse, segmentation.parse, partial(imagenet.parse, launched=False)]
)
def test_examples_refuse_them_too(parse: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> None:
    data = ["DATA"] if isinstance(parse, partial) else []
    with pytest.raises(SystemExit):
        parse([*data, "--folder", "s3://bucket/run"])
    assert "--folder: s3://bucket/run is a URL" in capsys.readouterr().err
    parse([*data, "--folder", "runs/mine"])
