"""Start the training of training.py, read what it wrote, and compare it with a run that nobody disturbed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.faults.training import EPOCHS as EPOCHS
from tests.faults.training import LENGTH
from tests.launching import Finished, Running, environment, python_path

SCRIPT = Path(__file__).with_name("training.py")
_ROOT = SCRIPT.parents[2]
RANKS = 2


def start_job(
    folder: Path,
    *options: str,
    ranks: int = RANKS,
    restarts: int = 0,
    grace: float = 10.0,
    max_time: float | None = None,
    plan: list[dict[str, Any]] | None = None,
    cold: bool = False,
    **env: str,
) -> Running:
    """Start the training over ``folder``; what is there already is gone on from. ``cold`` as for :class:`Running`."""
    run = ["lockstep", "run", "-n", str(ranks), "--log-dir", str(folder / "logs"), "--grace", str(grace)]
    if max_time is not None:
        run += ["--max-time", str(max_time)]
    if restarts:
        run += ["--max-restarts", str(restarts)]
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
        options = (*options, "--plan", str(folder / "plan.json"))
    job_env = environment(folder, torch=True, PYTHONPATH=python_path(_ROOT), **env)
    return Running([*run, str(SCRIPT), str(folder), *options], cwd=folder, env=job_env, cold=cold)


def run_job(folder: Path, *options: str, limit: float = 100.0, **how: Any) -> Finished:
    """As :func:`start_job`, to its end."""
    with start_job(folder, *options, **how) as job:
        return job.finish(limit)


#: Epochs -> what each rank of a run of so many epochs ends with; see the fixture ``calm``. How often it saves, its
#: loader's workers and its pace change nothing of that.
Calm = Callable[[int], list[dict[str, Any]]]


def undisturbed(folder: Path, epochs: int) -> list[dict[str, Any]]:
    """What each rank of a run ends with that nobody disturbs."""
    folder.mkdir()
    done = run_job(folder, "--epochs", str(epochs))
    assert done.code == 0, done
    check_audit(folder)
    return final(folder)


def final(folder: Path, ranks: int = RANKS) -> list[dict[str, Any]]:
    """What each rank had at the end."""
    return [json.loads((folder / f"final-{rank}.json").read_text()) for rank in range(ranks)]


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's audit so far; none before it has begun."""
    file = folder / f"audit-{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_audit(folder: Path) -> int:
    """Every sample was used once an epoch, by the steps that count; their number.

    The steps behind the checkpoint that the next life went on from are void: they were done again.
    """
    used: Counter[tuple[int, int]] = Counter()
    steps = 0
    for rank in range(RANKS):
        counting: dict[int, dict[str, Any]] = {}
        for line in lines(folder, rank):
            if "resumed" in line:
                counting = {step: done for step, done in counting.items() if step <= line["resumed"]}
            else:
                assert line["step"] not in counting, f"rank {rank} took step {line['step']} twice: {line}"
                counting[line["step"]] = line
        assert sorted(counting) == list(range(1, len(counting) + 1)), f"rank {rank} left steps out"
        for line in counting.values():
            used.update((line["epoch"], index) for index in line["indices"])
        steps = len(counting)
    epochs = 1 + max(epoch for epoch, _ in used)
    wanted = Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(LENGTH)})
    assert used == wanted, f"samples not used exactly once: {(used - wanted) + (wanted - used)}"
    return steps


def lives(folder: Path) -> int:
    """How often the ranks were started."""
    return len({line["life"] for line in lines(folder, 0)})


def pids(folder: Path, life: int) -> list[int] | None:
    """The ranks of one life, once all have begun."""
    files = [folder / f"pid-{life}-{rank}" for rank in range(RANKS)]
    try:
        return [int(file.read_text()) for file in files]
    except (FileNotFoundError, ValueError):
        return None


def left_in_shared_memory(pids: Iterable[int]) -> list[str]:
    """What these processes left in /dev/shm. torch names its memory ``torch_<process>_…``."""
    owners = {str(pid) for pid in pids}
    return [name for name in os.listdir("/dev/shm") if owners & set(name.split("_"))]
