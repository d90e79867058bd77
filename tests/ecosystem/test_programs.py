"""Whole programs of transformers, accelerate and Lightning under lockstep run, against themselves alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ecosystem.jobs import Arrays, attempt, run
from tests.ecosystem.table import Row, difference

Begin = Callable[[str, str, str], Row]

_alone: dict[tuple[str, ...], Arrays] = {}


def alone(program: str, *options: str, folder: Path) -> Arrays:
    """What the program trains in one process, run once."""
    key = (program, *options)
    if key not in _alone:
        _alone[key] = run(program, *options, ranks=None, folder=folder / "alone").ranks[0]
    return _alone[key]


def compare(
    line: Row,
    program: str,
    *options: str,
    ranks: int,
    folder: Path,
    backend: str,
    like: tuple[str, ...] = (),
    limit: float,
) -> None:
    """The program on ranks, which must end over ``backend``, against itself alone with the options ``like``."""
    job = run(program, *options, ranks=ranks, folder=folder / "ranks")
    assert f"backend {backend}" in job.finished.out
    assert len(job.ranks) == ranks
    one = alone(program, *like, folder=folder)
    for rank in job.ranks:  # the Trainer adds its losses up in float32; and a language model's loss is computed in it
        assert difference(_losses(one), _losses(rank)) < 1e-5
    line.same(_others(one), [_others(rank) for rank in job.ranks], limit=limit)


def _losses(numbers: Arrays) -> Arrays:
    return {name: array for name, array in numbers.items() if name.startswith("loss ")}


def _others(numbers: Arrays) -> Arrays:
    return {name: array for name, array in numbers.items() if not name.startswith("loss ")}


@pytest.mark.parametrize(
    ("what", "options", "ranks", "backend"),
    [
        ("Trainer of a GPT-2, as it is", (), 2, "gloo"),
        ('Trainer of a GPT-2 after lockstep.init("shm")', ("--init", "lockstep"), 3, "shm"),
        ('Trainer of a BERT after dist.init_process_group("shm")', ("--init", "torch", "--model", "bert"), 2, "shm"),
    ],
    ids=["plain", "lockstep", "torch"],
)
def test_trainer(what: str, options: tuple[str, ...], ranks: int, backend: str, tmp_path: Path, row: Begin) -> None:
    line = row("transformers", what, f"{ranks} ranks, {backend}")
    like = options[2:]
    compare(line, "trainer", *options, ranks=ranks, folder=tmp_path, backend=backend, like=like, limit=1e-6)


def test_trainer_accumulates_and_resumes(tmp_path: Path, row: Begin) -> None:
    line = row("transformers", "Trainer, gradient_accumulation_steps=2", "2 ranks, shm")
    accumulate = ("--init", "lockstep", "--accumulate", "2")
    compare(line, "trainer", *accumulate, ranks=2, folder=tmp_path, backend="shm", limit=1e-6)
    line = row("transformers", "Trainer, resume_from_checkpoint", "2 ranks, shm")
    resumable = ("--init", "lockstep", "--checkpoints", str(tmp_path / "checkpoints"))
    run("trainer", *resumable, "--steps", "4", ranks=2, folder=tmp_path / "begun")
    compare(line, "trainer", *resumable, ranks=2, folder=tmp_path, backend="shm", limit=1e-6)


def test_trainer_takes_no_name_that_accelerate_does_not_know(tmp_path: Path, row: Begin) -> None:
    line = row("transformers", 'Trainer(ddp_backend="shm"); call lockstep.init("shm") first instead', "2 ranks")
    job = attempt("trainer", "--backend", "shm", ranks=2, folder=tmp_path)
    assert job.finished.code != 0
    line.says(job.finished.err, "Your assigned backend shm is not available, please use gloo")


@pytest.mark.parametrize(
    ("what", "options", "ranks", "backend"),
    [
        ("Accelerator(cpu=True), gather_for_metrics", (), 2, "gloo"),
        ('the same after lockstep.init("shm")', ("--init", "lockstep"), 3, "shm"),
        ("the same with accumulate()", ("--init", "lockstep", "--accumulate", "2"), 2, "shm"),
    ],
    ids=["plain", "lockstep", "accumulate"],
)
def test_accelerate(what: str, options: tuple[str, ...], ranks: int, backend: str, tmp_path: Path, row: Begin) -> None:
    line = row("accelerate", what, f"{ranks} ranks, {backend}")
    compare(line, "accelerated", *options, ranks=ranks, folder=tmp_path, backend=backend, limit=1e-12)


def test_accelerate_on_the_cpu_wants_to_be_told(tmp_path: Path, row: Begin) -> None:
    """Without cpu=True it makes worlds of one, under torchrun as well."""
    line = row("accelerate", "Accelerator() without cpu=True where there is no GPU", "2 ranks")
    for launcher in ("torchrun", "lockstep"):
        job = run("accelerated", "--default-device", ranks=2, folder=tmp_path / launcher, launcher=launcher)
        line.holds("each rank alone, as under torchrun", "processes 1" in job.finished.out, job.finished.out)


@pytest.mark.parametrize(
    ("what", "options", "ranks", "backend"),
    [
        ('Trainer(strategy="ddp")', (), 2, "gloo"),
        ('DDPStrategy(process_group_backend="shm")', ("--backend", "shm"), 3, "shm"),
        ('Trainer(strategy="ddp") after lockstep.init("shm")', ("--init", "lockstep"), 2, "shm"),
    ],
    ids=["plain", "shm", "lockstep"],
)
def test_lightning(what: str, options: tuple[str, ...], ranks: int, backend: str, tmp_path: Path, row: Begin) -> None:
    line = row("lightning", what, f"{ranks} ranks, {backend}")
    compare(line, "lightning_trainer", *options, ranks=ranks, folder=tmp_path, backend=backend, limit=1e-12)


@pytest.mark.parametrize(("options", "ranks", "backend"), [((), 2, "gloo"), (("--backend", "shm"), 3, "shm")])
def test_fabric(options: tuple[str, ...], ranks: int, backend: str, tmp_path: Path, row: Begin) -> None:
    what = 'Fabric with DDPStrategy(process_group_backend="shm")' if options else 'Fabric(strategy="ddp")'
    line = row("lightning", what, f"{ranks} ranks, {backend}")
    compare(line, "fabric", *options, ranks=ranks, folder=tmp_path, backend=backend, limit=1e-12)
