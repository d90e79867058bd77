"""What surrounds a job and is none of its own: pipes that bring the program or take its output, folders, limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launching import LIMIT, environment, own_mount, run, start, wait_for

_PROGRAM = """
import os, sys
print("rank", os.environ["RANK"], sys.argv[1:], flush=True)
if "fail" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("line 5")
"""


def _shell(line: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which ``$RUN`` starts two ranks without torch."""
    env = environment(tmp_path) | {"RUN": f"{sys.executable} -m lockstep run -n 2"}
    line = f"set -o pipefail; {line}"
    return subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=LIMIT, check=False
    )


@pytest.mark.parametrize(
    "line",
    [
        "$RUN --all-output - a b < train.py",
        "$RUN --all-output /dev/stdin a b < train.py",
        "cat train.py | $RUN --all-output /dev/stdin a b",
        "$RUN --all-output <(cat train.py) a b",
        "mkfifo pipe; (cat train.py > pipe &); $RUN --all-output pipe a b",
        "${RUN/lockstep run -n/lockstep.launch --use_env --nproc_per_node} - a b < train.py",
    ],
)
def test_a_program_from_a_pipe_runs_on_all_ranks(line: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_PROGRAM)
    done = _shell(line, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(each.rpartition("] ")[2] if each.startswith("[") else each for each in done.stdout.splitlines()) == [
        "rank 0 ['a', 'b']",
        "rank 1 ['a', 'b']",
    ] or sorted(each[each.index("rank") :] for each in done.stdout.splitlines()) == [
        "rank 0 ['a', 'b']",
        "rank 1 ['a', 'b']",
    ]


def test_tracebacks_show_lines_of_a_program_from_a_pipe(tmp_path: Path) -> None:
    done = _shell(f"$RUN - fail <<'EOF'\n{_PROGRAM}\nEOF", tmp_path)
    assert done.returncode == 1
    assert '    raise ValueError("line 5")' in done.stderr.splitlines()


def test_what_needs_the_program_again_says_so(tmp_path: Path) -> None:
    done = _shell(f"echo 1 | {sys.executable} -m lockstep verify /dev/stdin", tmp_path)
    assert done.returncode == 2
    assert "save it to a file" in done.stderr
    done = _shell("$RUN /dev/zero", tmp_path)
    assert (done.returncode, done.stderr.count("longer than 64 MiB")) == (2, 1)


_TALKS = "import os\nfor i in range(200):\n    print('line', i, flush=True)\nopen(os.environ['RANK'], 'w').close()\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("option", ["", "--all-output"])
def test_a_job_ends_as_it_would_with_closed_streams(closed: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TALKS)
    done = _shell(f"$RUN {option} train.py {closed}", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "0").exists()
    (tmp_path / "bad.py").write_text("raise SystemExit(7)\n")
    assert _shell(f"$RUN {option} bad.py {closed}", tmp_path).returncode == 7


@pytest.mark.parametrize("option", ["", "--all-output"])
@pytest.mark.parametrize("both", ["", "2>&1"])
def test_a_job_outlives_the_reader_of_its_output(option: str, both: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TALKS)
    done = _shell(f"$RUN {option} train.py {both} | head -1", tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


_WAITS = """
import os, time
open({go!r} + "-" + os.environ["RANK"], "w").close()
print(os.environ["LOCKSTEP_JOB_DIR"] if os.environ["RANK"] == "0" else "", flush=True)
while not os.path.exists({go!r}):
    time.sleep(0.01)
raise SystemExit({code})
"""


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("what", ["job", "logs", "cwd"])
def test_a_folder_that_is_removed_meanwhile_changes_no_exit_code(what: str, code: int, tmp_path: Path) -> None:
    work, go = tmp_path / "work", tmp_path / "go"
    work.mkdir()
    (tmp_path / "train.py").write_text(_WAITS.format(go=str(go), code=code))
    with start(["lockstep", "run", "-n", "2", str(tmp_path / "train.py")], work, cold=True) as job:
        folder = Path(job.read_line())
        logs = work / "state" / "lockstep" / "logs"
        wait_for(lambda: logs.exists() and (tmp_path / "go-1").exists(), "a log, and a second rank that runs")
        gone = {"job": folder.parent, "logs": logs, "cwd": work}[what]
        subprocess.run(["rm", "-rf", str(gone)], check=True)
        go.touch()
        done = job.finish()
    assert (done.code, "Traceback" in done.err) == (code, False)
    if what == "job":
        assert done.err.count("was removed while the job runs") == 1


_TRAINS = """
import torch, lockstep
lockstep.init()
model = lockstep.replicate(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("what", ["logs", "cwd"])
def test_a_record_that_is_removed_meanwhile_changes_no_exit_code(what: str, code: int, tmp_path: Path) -> None:
    """The folder is named relative to the one that the job runs in, which may be gone by the time it is told of."""
    work, go, notice = tmp_path / "work", tmp_path / "go", tmp_path / "notice"
    work.mkdir()
    (tmp_path / "train.py").write_text(_TRAINS + _WAITS.format(go=str(go), code=code))
    command = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "--notify", f"cat > {notice}"]
    with start([*command, str(tmp_path / "train.py")], work, torch=True) as job:
        record = work / "logs" / "run.json"
        wait_for(lambda: record.exists() and (tmp_path / "go-1").exists(), "a record, and a second rank that runs")
        subprocess.run(["rm", "-rf", str({"logs": work / "logs", "cwd": work}[what])], check=True)
        go.touch()
        done = job.finish()
    assert (done.code, "Traceback" in done.err) == (code, False), done
    assert f"the folder of the ranks' logs, {work}/logs, was removed while the job ran" in done.err
    told = json.loads(notice.read_text())
    assert (told["exit_code"], told["folder"]) == (code, f"{work}/logs")


_FULL = """
import os, signal
if os.environ["RANK"] == "1":
    try:
        for number in range(1000):
            open(os.path.join(os.environ["TMPDIR"], str(number)), "x").close()
    except OSError:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_failure_is_reported_when_the_folder_for_temporary_files_is_full(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").write_text(_FULL)
    mounted = own_mount(temporary, "nr_inodes=100")
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, before=mounted, TMPDIR=str(temporary))
    assert (done.code, "Traceback" in done.err) == (128 + signal.SIGKILL, False), done
    assert "lockstep: rank 1 of 2 failed: killed by signal 9 (SIGKILL)" in done.err


_SHARES = """
import os, sys, time, signal
from multiprocessing import Process, util
def work():
    open("in-" + os.environ["RANK"], "w").write(util.get_temp_dir())
    time.sleep(600)
if __name__ == "__main__":
    for _ in range(2):
        Process(target=work).start()
    while not os.path.exists("in-" + os.environ["RANK"]):
        time.sleep(0.01)
    print(os.getpid(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["rank", "launcher", "zygote"])
def test_no_folder_of_a_killed_processes_workers_stays(killed: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SHARES)
    # (A socket's path has 107 characters, and pytest's folders take most of them.)
    with (
        tempfile.TemporaryDirectory() as temporary,
        start(["lockstep", "run", "-n", "2", "train.py"], tmp_path, cold=True, TMPDIR=temporary) as job,
    ):
        rank = int(job.read_line())
        wait_for((tmp_path / "in-1").exists, "a worker")
        zygote = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill({"rank": rank, "launcher": job.pid, "zygote": zygote}[killed], signal.SIGKILL)
        job.finish()
        wait_for(lambda: not os.listdir(temporary), "an empty folder for temporary files")


_ALONE = """
import lockstep
from lockstep.job import flight
w = lockstep.init({backend!r}, timeout=8)
w.barrier()
{before}
if w.is_main:
    {call}
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("name", "before", "call"),
    [
        ("World.mean()", "", "w.mean(1.0)"),
        ("World.barrier()", "", "w.barrier()"),
        ("World.gather()", "", "w.gather(1)"),
        ("World.gather_in_order()", "part = lockstep.split([1, 2])", "w.gather_in_order([*part], part)"),
        ("lockstep.split()", "", "lockstep.split([1, 2])"),
        ("World.main_first()", "", "list(w.main_first().gen)"),
        ("Checkpointer.save()", "c = lockstep.Checkpointer('saved', model=torch.nn.Linear(1, 1))", "c.save()"),
        ("lockstep.replicate()", "", "lockstep.replicate(torch.nn.Linear(1, 1))"),
    ],
)
def test_a_call_of_one_rank_alone_is_named(name: str, before: str, call: str, backend: str, tmp_path: Path) -> None:
    program = _ALONE.format(backend=backend, before=before, call=call)
    (tmp_path / "train.py").write_text("import torch\n" + program)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    assert f"{name} is for all ranks" in done.err
    assert "rank 1 ended the program without an error" in done.err


_EPOCHS = """
import torch, lockstep
w = lockstep.init({backend!r}, timeout={timeout})
model = lockstep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
for epoch in saved.epochs({epochs}):
    for batch in loader:
        model(batch).sum().backward()
        optimizer.step()
    if w.is_main:
        saved.save()
"""


@pytest.mark.parametrize(("epochs", "backend"), [(1, "shm"), (1, "gloo"), (2, "shm")])
def test_a_save_of_rank_0_alone_is_named_in_any_epoch(epochs: int, backend: str, tmp_path: Path) -> None:
    """After the last epoch the other rank asks whether somebody is to stop, which is an exchange of records, too."""
    (tmp_path / "train.py").write_text(_EPOCHS.format(backend=backend, epochs=epochs, timeout=8))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    assert "Checkpointer.save() is for all ranks" in done.err
    if epochs == 1:
        assert "CollectiveMismatch: rank 0 of 2: the ranks have made different calls" in done.err
        assert "rank 0 is in Checkpointer.save(); rank 1 is in Checkpointer.epochs()" in done.err


_STEPS = """
import torch, lockstep
w = lockstep.init({backend!r}, timeout=8)
m = lockstep.replicate(torch.nn.Linear(1, 1))
o = torch.optim.SGD(m.parameters(), lr=0.1)
for _ in range(3 if w.rank else 5):
    m(torch.ones(1, 1)).sum().backward()
    o.step()
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_with_fewer_steps_is_told_with_its_steps(backend: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_STEPS.format(backend=backend))
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    said = "rank 1 ended the program without an error after 3 steps, and this rank is in its step 4: the ranks took "
    assert f"{said}different numbers of steps." in done.err
    assert "look for" not in done.err


_DIFFERENT = "import torch, lockstep\nw = lockstep.init()\nlockstep.replicate(torch.nn.Linear(1 + w.rank, 1))\n"


@pytest.mark.parametrize("launcher", ["lockstep run -n", "lockstep.launch --use_env --nproc_per_node"])
def test_what_all_ranks_find_is_shown_once(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_DIFFERENT)
    done = run([*launcher.split(), "3", "train.py"], tmp_path, torch=True)
    assert done.code == 1
    assert done.err.count("Build the same model with the same options on every rank") == 1


@pytest.mark.parametrize("after", [1, 3, 6])
def test_an_early_ctrl_c_leaves_no_traceback(after: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    argv = [sys.executable, "-X", "importtime", "-m", "lockstep", "run", "-n", "2", "train.py"]
    # The interpreter tells of each import: the command's own begin with those of click, which are some ten modules.
    process = subprocess.Popen(
        argv, cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        after -= "click" in line
        if not after:
            break
    os.kill(process.pid, signal.SIGINT)
    rest = process.communicate(timeout=LIMIT)[1]
    assert (process.returncode, "Traceback" in rest) == (130, False)


def test_a_save_of_rank_0_alone_is_named_while_both_wait_over_gloo(tmp_path: Path) -> None:
    """Before the last epoch the other rank is in a backward. Neither wait ends; a save's minutes are for work."""
    (tmp_path / "train.py").write_text(_EPOCHS.format(backend="gloo", epochs=2, timeout=1800))
    with start(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True, LOCKSTEP_LATE="1") as job:
        said = ""
        while "next:" not in said and job.process.poll() is None:
            said += job.read_error()
        os.kill(job.pid, signal.SIGKILL)
    assert "all ranks have waited for" in said
    assert "it waits in averaging gradients at" in said
    assert "rank 0 waits in Checkpointer.save(): exchanging records" in said
    assert "Checkpointer.save() is for all ranks: every rank must call it" in said
