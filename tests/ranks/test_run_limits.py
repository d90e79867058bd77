"""A job whose files reach the user's limit (``ulimit -f``): what is lost is named once, and nothing else is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launching import Finished, run


def _run(
    tmp_path: Path, script: str, *options: str, limit: int, torch: bool = False, args: Sequence[str] = ()
) -> Finished:
    (tmp_path / "train.py").write_text(script)
    return run(
        ["lockstep", "run", *options, str(tmp_path / "train.py"), *args],
        tmp_path,
        torch=torch,
        before=f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))",
    )


_TALKS = """
import os, sys
for number in range(200):
    print("x" * 400)
    print("y" * 400, file=sys.stderr)
open("ended-" + os.environ["RANK"], "w").close()
"""


@pytest.mark.parametrize("options", [[], ["--log-dir", "logs"], ["--log-dir", "logs", "--all-output"]])
def test_training_goes_on_when_a_log_reaches_the_limit(options: list[str], tmp_path: Path) -> None:
    done = _run(tmp_path, _TALKS, "-n", "2", *options, limit=50_000)
    assert done.code == 0, done
    assert all((tmp_path / f"ended-{rank}").exists() for rank in range(2))
    logged = range(2) if options else [1]
    # (Where much is shown at once, a word of the launcher's may come within a rank's line.)
    said = re.findall(
        r"lockstep: (rank \d)'s log can't be written any more, but the run continues: .*ulimit -f", done.err
    )
    assert sorted(said) == [f"rank {rank}" for rank in logged]
    assert {path.stat().st_size for path in tmp_path.rglob("rank*.log")} == {50_000}


def test_a_file_of_the_users_is_as_under_python(tmp_path: Path) -> None:
    script = _TALKS.replace("import os, sys", "import os, sys\nsys.stdout = sys.stderr = open('mine', 'w')")
    done = _run(tmp_path, script, "-n", "1", limit=50_000)
    assert done.code == 1, done
    assert "a file would be larger than this user's limit" in done.err


def test_a_limit_under_which_no_job_can_start(tmp_path: Path) -> None:
    done = _run(tmp_path, "", "-n", "2", limit=1000)
    assert done.code == 2, done
    assert "the job's files can't be written in" in done.err
    assert "ulimit -f" in done.err
    assert "Traceback" not in done.err


def test_a_trace_that_can_not_be_written_is_not_blamed_on_its_steps(tmp_path: Path) -> None:
    script = _SAVES.format(steps=30, save="pass").replace("time.sleep(0.05)", "pass")
    done = _run(tmp_path, script, "-n", "2", "--trace", "20", torch=True, limit=50_000)
    assert done.code == 0, done
    assert "lockstep: rank 0 can't be traced: File too large" in done.err
    assert "no trace: the ranks took 30 steps and could not write it" in done.err


_SAVES = """
import time
import torch, lockstep
world = lockstep.init("gloo")
model = lockstep.replicate(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
for _ in saved.epochs(1):
    for _ in range({steps}):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.05)
    {save}
"""


def test_a_checkpoint_that_reaches_the_limit_is_told_once(tmp_path: Path) -> None:
    done = _run(tmp_path, _SAVES.format(steps=2, save="saved.save()"), "-n", "2", limit=10_000, torch=True)
    assert done.code == 1, done
    assert "rng.json: File too large; the file is larger than" in done.err
    # (On a busy machine one rank may be stopped for the other's failure before it has met its own.)
    assert re.search(r"failed too, by the same error|stopped because rank \d failed", done.err)
    assert done.err.count("Traceback") == 1
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-")]


def test_a_record_that_reaches_the_limit_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    script = _SAVES.format(steps=30, save="print('trained', model.weight.sum().item())")
    whole = _run(tmp_path, script, "-n", "1", "--log-dir", "whole", limit=-1, torch=True, args=["x" * 4096])
    done = _run(tmp_path, script, "-n", "1", "--log-dir", "short", limit=4096, torch=True, args=["x" * 4096])
    assert (done.code, whole.code) == (0, 0), done
    assert done.out == whole.out
    assert "trained" in done.out
    assert done.err.count("the record of this run ends here, but the run continues: ") == 1
