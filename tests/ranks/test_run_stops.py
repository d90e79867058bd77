"""SIGTERM, Ctrl-C and SIGUSR1 to a training with a Checkpointer: a step is finished, all is saved, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.job.files import EXIT_SAVED
from lockstep.launch.ports import free_port
from tests.faults import jobs
from tests.harness import collect_outcomes
from tests.launching import (
    LIMIT,
    Finished,
    Running,
    environment,
    gone_within,
    own_mount,
    python_path,
    run,
    start,
    wait_for,
)

#: Options of a training that comes to no second step, and times by which its ranks do not save from the side either.
_STUCK, _NOT_ASIDE = ("--slow", "1000"), "aside=1000"


def _strike(whom: str, signum: int, *, taken: int = 5, point: str = "backward", rank: int = 1) -> dict[str, Any]:
    return {"life": 0, "rank": rank, "point": point, "taken": taken, "signal": int(signum), "whom": whom}


def _stop(tmp_path: Path, whom: str, signum: int, says: str) -> None:
    """Stop a job in its first epoch, and see that it has saved and says so."""
    stopped = jobs.run_job(tmp_path, "--workers", "2", plan=[_strike(whom, signum)])
    assert stopped.code == EXIT_SAVED, stopped
    steps = [line["step"] for line in jobs.lines(tmp_path, 0) if "step" in line]
    words = f"lockstep: stopped by {says}; saved at step {steps[-1]} in {tmp_path}/run/step-{steps[-1]:08d}"
    assert words in stopped.err.splitlines()
    about = json.loads((tmp_path / "logs" / "run.json").read_text())
    assert about["end"] == {"code": "run-saved", "text": words.removeprefix("lockstep: ")}
    assert "Traceback" not in stopped.err
    assert "KeyboardInterrupt" not in (tmp_path / "logs" / "rank1.log").read_text()


@pytest.mark.parametrize(
    ("whom", "signum", "says"),
    [
        ("launcher", signal.SIGTERM, "SIGTERM"),
        ("group", signal.SIGINT, "SIGINT"),  # workers, zygote and all, as a terminal does
    ],
)
def test_a_run_that_is_asked_to_stop_goes_on_bit_for_bit(
    tmp_path: Path, calm: jobs.Calm, whom: str, signum: int, says: str
) -> None:
    _stop(tmp_path, whom, signum, says)
    resumed = jobs.run_job(tmp_path, "--workers", "2", "--life", "1", plan=[])
    assert resumed.code == 0, resumed
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    assert jobs.check_audit(tmp_path) == calm(jobs.EPOCHS)[0]["step"]


def test_a_signal_to_one_rank_stops_them_all(tmp_path: Path) -> None:
    _stop(tmp_path, "rank", signal.SIGTERM, "a signal to the ranks")


def test_sigusr1_saves_and_goes_on(tmp_path: Path, calm: jobs.Calm) -> None:
    slowly = tmp_path / "slowly"
    slowly.touch()
    options = ("--save-every", "1000", "--slow", "0.5", "--while", str(slowly))
    with jobs.start_job(tmp_path, *options, plan=[_strike("launcher", signal.SIGUSR1, taken=1)]) as job:
        said = _until(job, "lockstep: saved at step ")
        slowly.unlink()
        done = job.finish()
    assert done.code == 0, done
    assert 3 <= int(said.split()[4]) < 12, "in mid-epoch, before the script's own first save"
    assert "lockstep: saved at step " not in done.err
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)


def _until(job: Running, words: str) -> str:
    """The next line on a job's standard error that has these words."""
    while words not in (line := job.read_error()):
        assert line, f"it never said {words!r}"
    return line


def test_a_request_at_the_very_end_is_seen_to(tmp_path: Path) -> None:
    strike = _strike("rank", signal.SIGTERM, point="epoch", taken=36, rank=1)
    done = jobs.run_job(tmp_path, plan=[strike])
    assert done.code == EXIT_SAVED, done
    assert "saved at step 36" in done.err


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with jobs.start_job(tmp_path, *_STUCK, "--workers", "1", LOCKSTEP_TIMES=_NOT_ASIDE) as job:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 1, "training")
        everyone = job.tree()
        os.killpg(job.pid, signal.SIGINT)
        _until(job, "Ctrl-C: the ranks finish a step, save and leave")
        time.sleep(0.4)  # two signals within a quarter of a second are taken for one
        os.killpg(job.pid, signal.SIGINT)
        done = job.finish()
    assert done.code == 128 + signal.SIGINT
    assert gone_within(everyone, 1.0) == []


def test_a_run_saves_before_its_time_is_over(tmp_path: Path, calm: jobs.Calm) -> None:
    """The scheduler's signal, at a limit of its own, is no second one that stops at once."""
    with jobs.start_job(tmp_path, "--slow", "0.5", plan=[], max_time=18.0, grace=8.0) as job:
        asked = "lockstep: --max-time is over in 8 s: the ranks finish a step, save and leave (within --grace)"
        assert job.read_error() == asked
        job.process.send_signal(signal.SIGTERM)
        stopped = job.finish()
    assert stopped.code == EXIT_SAVED, stopped
    assert re.search(r"lockstep: stopped by (the end of --max-time|SIGTERM); saved at step \d+ in ", stopped.err), (
        stopped
    )
    resumed = jobs.run_job(tmp_path, "--life", "1", plan=[])
    assert resumed.code == 0, resumed
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)


def test_who_does_not_finish_the_step_within_the_grace_period_is_killed(tmp_path: Path) -> None:
    with jobs.start_job(tmp_path, *_STUCK, grace=0.5, LOCKSTEP_TIMES=_NOT_ASIDE) as job:
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 1, "training")
        os.kill(job.pid, signal.SIGTERM)
        done = job.finish()
    assert done.code == 128 + signal.SIGTERM
    assert "did not leave in time (--grace) and were killed" in done.err


_LEAVING = """
import atexit, os, signal, time
import torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)

itself = os.getpid()
zygote = os.getppid()
launcher = int(open(f"/proc/{{zygote}}/stat").read().rpartition(")")[2].split()[1])

def linger():
    time.sleep(600)

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

try:
    for epoch in saved.epochs(10**6):
        for step in range(20):
            saved.between_steps()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            if saved.step == 25 and world.is_main:
                os.kill({who}, signal.SIGTERM)
finally:
    {trouble}
"""


@pytest.mark.parametrize(
    ("who", "trouble", "words"),
    [
        ("launcher", "linger()", "ranks 0 and 1 did not leave in time (--grace) and were killed"),
        ("launcher", "world.rank == 1 and linger()", "rank 1 did not leave in time (--grace) and was killed"),
        ("itself", "world.rank == 1 and linger()", "rank 1 did not leave in time (--grace) and was killed"),
        ("itself", "linger()", "ranks 0 and 1 did not leave in time (--grace) and were killed"),
        ("launcher", "atexit.register(linger)", "ranks 0 and 1 did not leave in time (--grace) and were killed"),
        ("itself", "atexit.register(linger)", "ranks 0 and 1 did not leave in time (--grace) and were killed"),
        ("launcher", "world.rank == 1 and atexit.register(crash)", "rank 1 died on its way out: signal 11 (SIGSEGV)"),
        ("itself", "world.rank == 1 and atexit.register(crash)", "rank 1 died on its way out: signal 11 (SIGSEGV)"),
        ("launcher", "crash()", "ranks 0 and 1 died on their way out: signal 11 (SIGSEGV)"),
        ("itself", "world.rank == 1 and crash()", "rank 1 died on its way out: signal 11 (SIGSEGV)"),
        ("launcher", "world.rank == 1 and os._exit(3)", "rank 1 left with exit code 3"),
        ("itself", "os._exit(3)", "ranks 0 and 1 left with exit code 3"),
        ("itself", "world.rank == 1 and os._exit(0)", ""),
        ("launcher", "os._exit(0)", ""),
        ("launcher", "world.rank == 1 and int('x')", "rank 1 failed on its way out: ValueError: invalid literal"),
        (
            "itself",
            "int('x')",
            "ranks 0 and 1 failed on their way out: ValueError: invalid literal",
        ),
        ("itself", "world.rank == 1 and die()", "rank 1 was killed by signal 9 (SIGKILL), which lockstep did not send"),
    ],
)
def test_what_has_saved_has_saved_however_it_leaves(tmp_path: Path, who: str, trouble: str, words: str) -> None:
    (tmp_path / "train.py").write_text(_LEAVING.format(who=who, trouble=trouble))
    command = ["lockstep", "run", "--grace", _grace(trouble), "--max-restarts", "2", "-n", "2", "train.py"]
    done = run(command, tmp_path, torch=True)
    assert done.code == EXIT_SAVED, done
    assert re.search(r"stopped by (SIGTERM|a signal to the ranks); saved at step \d+ in ", done.err), done.err
    assert words in done.err
    assert "restart 1" not in done.err, "all have saved because they were asked to stop"


def _grace(trouble: str) -> str:
    """Seconds of ``--grace``: enough for ranks that are slow, and not for those that linger."""
    return "10" if "linger" in trouble else "120"


@pytest.mark.parametrize("who", ["launcher", "itself"])
def test_a_second_signal_stops_at_once_who_has_saved_and_does_not_leave(tmp_path: Path, who: str) -> None:
    (tmp_path / "train.py").write_text(_LEAVING.format(who=who, trouble="print('saved', flush=True); linger()"))
    with start(["lockstep", "run", "--grace", "1000", "-n", "2", "train.py"], tmp_path, torch=True) as job:
        assert job.read_line() == "saved"
        if who == "itself":  # the launcher has had none yet
            os.kill(job.pid, signal.SIGINT)
            _until(job, "the ranks have saved, and leave (within --grace); a second one stops them")
        time.sleep(0.4)  # two signals within a quarter of a second are taken for one
        everyone = job.tree()
        os.kill(job.pid, signal.SIGINT)
        done = job.finish()
    assert done.code == EXIT_SAVED, done
    assert "a second signal killed ranks 0 and 1 at once" in done.err
    assert gone_within(everyone, 1.0) == []


_OTHER_LOOPS = """
import os, signal, torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
for epoch in saved.epochs(2):
    for step in range(20):
        {boundary}
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        {trouble}
    saved.save()
world.print("done at", saved.step)
"""


def _other_loop(tmp_path: Path, trouble: str, boundary: str = "saved.between_steps()") -> Finished:
    (tmp_path / "train.py").write_text(_OTHER_LOOPS.format(boundary=boundary, trouble=trouble))
    return run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)


_TERM = "if saved.step == 25 and world.is_main: os.kill(os.getpid(), signal.SIGTERM)"


def test_a_loop_over_another_loader_says_itself_where_its_steps_end(tmp_path: Path) -> None:
    assert _other_loop(tmp_path, _TERM).code == EXIT_SAVED
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == [
        "step-00000020",
        "step-00000027",
    ]
    again = _other_loop(tmp_path, "")
    assert again.code == 0, again
    assert "done at 47" in again.out, "the second epoch began again behind step 27"


def test_without_a_loop_that_says_so_everything_is_as_under_python(tmp_path: Path) -> None:
    assert _other_loop(tmp_path, _TERM, boundary="pass").code == 128 + signal.SIGTERM


def test_a_save_that_fails_on_the_way_out_is_told(tmp_path: Path) -> None:
    trouble = "if saved.step == 25: saved.save = lambda **_: 1 / 0\n        " + _TERM.replace("getpid", "getppid")
    trouble = trouble.replace(
        "os.getppid()", "int(open(f'/proc/{os.getppid()}/status').read().split('PPid:')[1].split()[0])"
    )
    trouble += "\n        if saved.step >= 25: __import__('time').sleep(0.5)"  # so that it comes before the last step
    done = _other_loop(tmp_path, trouble)
    assert done.code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; ranks 0 and 1 failed on their way out: ZeroDivisionError: division by zero" in done.err


@pytest.mark.parametrize("parent", ["", "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)"])
def test_sigusr1_kills_nobody_who_has_no_use_for_it(tmp_path: Path, parent: str) -> None:
    """And is heard also where it is ignored: by a program whose training loop is over, which starts another job."""
    os.mkfifo(tmp_path / "go")
    (tmp_path / "train.py").write_text("print('here', flush=True)\nopen('go').read()\n")
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path, before=parent) as job:
        assert job.read_line() == "here"
        os.kill(job.pid, signal.SIGUSR1)
        assert job.read_error().startswith("lockstep: SIGUSR1: no rank can save now; only a Checkpointer")
        (tmp_path / "go").write_text("")
        done = job.finish()
    assert done.code == 0, done


def test_a_launcher_on_its_way_out_has_no_use_for_sigusr1(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    late = "import atexit, os, signal\natexit.register(os.kill, os.getpid(), signal.SIGUSR1)\n"
    done = run(["lockstep", "run", "-n", "1", "train.py"], tmp_path, before=late)
    assert done.code == 0, done


_SENDS_LATE = """
import os, signal, sys
import torch, lockstep
from torch import nn

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), signum=signal.SIGUSR1):
        kill(pid, signum)  # when Python has reset the handlers

lockstep.init()
model = nn.Linear(2, 1)
saved = lockstep.Checkpointer("run", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
saved.restore()
saved.between_steps()
assert signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
sys.late = Late()
"""


@pytest.mark.parametrize("launcher", [["-m", "lockstep", "run", "-n", "1"], []])
def test_a_rank_whose_loop_has_no_known_end_dies_of_no_late_sigusr1(tmp_path: Path, launcher: list[str]) -> None:
    """Which was sent a moment earlier, when it still was a request to save. Ranks of the warm process end otherwise."""
    (tmp_path / "train.py").write_text(_SENDS_LATE)
    argv, env = [sys.executable, *launcher, "train.py"], environment(tmp_path, torch=True)
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done


def _asked_under_another_launcher(folder: str) -> None:
    world = lockstep.init(seed=1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(40, 2)), batch_size=4))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    for _ in saved.epochs(1):
        for (batch,) in loader:
            if saved.step == 3 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            model(batch).sum().backward()
            for parameter in model.parameters():
                world.all_reduce(parameter.grad)  # type: ignore[type-var]  # a gradient is there
            optimizer.step()


def test_ranks_agree_through_the_groups_store_under_another_launcher(tmp_path: Path) -> None:
    outcomes = collect_outcomes(_asked_under_another_launcher, 2, str(tmp_path / "run"))
    assert [(outcome.error, outcome.message) for outcome in outcomes] == [("SystemExit", str(EXIT_SAVED))] * 2
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["step-00000006"]


def _start_machine(folder: Path, node: int, port: int, *options: str) -> Running:
    """Start one of two launchers of one job with a rank each."""
    meeting = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command = ["lockstep", "run", "-n", "1", *meeting, "--log-dir", str(folder / f"logs-{node}"), str(jobs.SCRIPT)]
    env = environment(folder, torch=True, PYTHONPATH=python_path(jobs.SCRIPT.parents[2]))
    return Running([*command, str(folder), *options], cwd=folder, env=env)


def _run_machines(folder: Path, *options: str) -> list[Finished]:
    port = free_port()
    with _start_machine(folder, 1, port, *options) as second, _start_machine(folder, 0, port, *options) as first:
        return [first.finish(), second.finish()]


@pytest.mark.parametrize("node", [0, 1])
def test_every_machine_of_a_run_that_was_asked_to_stop_says_that_it_saved(
    tmp_path: Path, calm: jobs.Calm, node: int
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps([_strike("launcher", signal.SIGTERM, rank=node)]))
    stopped = _run_machines(tmp_path, "--plan", str(tmp_path / "plan.json"))
    assert [each.code for each in stopped] == [EXIT_SAVED] * 2, stopped
    said = [each.err.partition("lockstep: stopped by ")[2].partition("\n")[0] for each in stopped]
    assert said[node].startswith("SIGTERM; saved at step ")
    assert said[1 - node].startswith("a signal to the ranks; saved at step ")
    assert said[0].partition("; ")[2] == said[1].partition("; ")[2]
    resumed = _run_machines(tmp_path, "--life", "1")
    assert [each.code for each in resumed] == [0, 0], resumed
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    jobs.check_audit(tmp_path)


@pytest.mark.parametrize("meeting", ["by hand", "rdzv"])
@pytest.mark.parametrize("trouble", ["os._exit(3)", "crash()", "linger()"])
def test_all_machines_have_saved_whichever_way_the_ranks_of_one_leave(
    tmp_path: Path, meeting: str, trouble: str
) -> None:
    port = free_port()
    (tmp_path / "train.py").write_text(_LEAVING.format(who="launcher", trouble=f"world.rank == 1 and {trouble}"))

    def machine(node: int) -> Running:
        options = ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        if meeting == "rdzv":
            options = ["--rdzv", f"127.0.0.1:{port}", "--max-restarts", "2"]
        command = ["lockstep", "run", "--nnodes", "2", "-n", "1", "--grace", _grace(trouble), *options, "train.py"]
        return start(command, tmp_path, torch=True)

    with machine(1) as second, machine(0) as first:
        done = [first.finish(), second.finish()]
    assert [each.code for each in done] == [EXIT_SAVED] * 2, done
    for each in done:
        assert re.search(r"stopped by (SIGTERM|a signal to the ranks); saved at step \d+ in ", each.err), done
    words = {"os._exit(3)": "left with exit code 3", "crash()": "(SIGSEGV)", "linger()": "(--grace) and was killed"}
    assert any(re.search(rf"rank 1 .*{re.escape(words[trouble])}", each.err) for each in done), done


_FILLS = """
import os, signal
import torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
for epoch in saved.epochs(2):
    for step in range(20):
        saved.between_steps()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if saved.step == 5 and world.is_main:
            try:
                for number in range(1000):
                    open(os.path.join(os.environ["TMPDIR"], str(number)), "x").close()
            except OSError:
                os.kill({whom}, signal.SIGTERM)
"""


@pytest.mark.parametrize("whom", ["launcher", "rank"])
def test_ranks_that_have_no_room_to_note_it_have_saved(tmp_path: Path, temporary: Path, whom: str) -> None:
    above = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"
    (tmp_path / "train.py").write_text(_FILLS.replace("{whom}", above if whom == "launcher" else "os.getpid()"))
    argv = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "train.py"]
    done = run(argv, tmp_path, torch=True, before=own_mount(temporary, "nr_inodes=100"), TMPDIR=str(temporary))
    assert done.code == EXIT_SAVED, done
    assert "has saved, and can't tell its launcher" in done.err
    by = "SIGTERM" if whom == "launcher" else "a signal to the ranks"
    assert f"lockstep: stopped by {by}; all ranks have saved, and could not note where" in done.err
    assert json.loads((tmp_path / "logs" / "run.json").read_text())["end"]["code"] == "run-saved"


_SPAWNED = """
import os, signal
import torch, lockstep
from torch import nn

def train(rank, trouble):
    world = lockstep.init()
    model = lockstep.replicate(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer)
    try:
        for epoch in saved.epochs(10):
            for step in range(20):
                saved.between_steps()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                if saved.step in (25, 65) and world.is_main:
                    os.kill(os.getpid(), signal.SIGTERM)
    finally:
        if trouble and rank == 1:
            raise ValueError("in finally")

if __name__ == "__main__":
    for trouble in (False, True):
        try:
            lockstep.spawn(train, (trouble,), nprocs=2)
        except lockstep.RankFailed as failed:
            print(failed.exit_code, failed)
"""


def test_a_function_on_ranks_that_was_asked_to_stop_has_saved(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SPAWNED)
    done = run(["train"], tmp_path, torch=True)
    assert done.code == 0, done
    first, second = done.out.splitlines()
    assert re.fullmatch(r"75 stopped by a signal to the ranks; saved at step \d+ in \S+", first), done
    assert re.fullmatch(r"75 stopped by .*; rank 1 failed on its way out: ValueError: in finally", second), done
