"""What ``lockstep port`` makes of a script trains as the script did."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.tools.port.port import port_text
from tests.launching import LIMIT, run, wait_for
from tests.port_forms import LAUNCH, ONE_DEVICE, SPAWN, TORCHRUN
from tests.schemas import holds


def sum_of(out: str) -> float:
    """What the script printed of its parameters at the end."""
    found = re.findall(r"\bsum ([\d.]+)", out)
    assert len(found) == 1, out
    return float(found[0])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_port_trains_what_the_script_trained_on_as_many_ranks(tmp_path: Path, ranks: int) -> None:
    """The sampler is not shuffled, and 96 samples are batches of 8 for each of 1, 2 and 3 ranks."""
    (tmp_path / "before.py").write_text(TORCHRUN)
    (tmp_path / "after.py").write_text(port_text(TORCHRUN, Path("before.py")).after)
    sums = []
    for script in ("before.py", "after.py"):
        done = run(["lockstep", "run", "-n", str(ranks), script], tmp_path, torch=True)
        assert done.code == 0, done.err
        sums.append(sum_of(done.out))
    assert sums[1] == pytest.approx(sums[0], rel=1e-6)


@pytest.mark.parametrize("form", [SPAWN, LAUNCH, ONE_DEVICE], ids=["spawn", "launch", "one_device"])
def test_a_port_runs_on_two_ranks_and_saves(tmp_path: Path, form: str) -> None:
    """On CPUs as well, where a script for GPUs alone could not."""
    (tmp_path / "after.py").write_text(port_text(form, Path("before.py")).after)
    done = run(["lockstep", "run", "-n", "2", "after.py"], tmp_path, torch=True)
    assert done.code == 0, done.err
    assert (tmp_path / "model.pt").exists()


def test_verify_is_asked_before_and_after(tmp_path: Path) -> None:
    """The script with a batch of each rank is another one on two ranks; the port for two ranks is not."""
    (tmp_path / "train.py").write_text(TORCHRUN)
    done = run(["lockstep", "port", "--verify", "--steps", "4", "--json", "train.py"], tmp_path, torch=True)
    assert done.code == 0, (done.out, done.err)
    before, after = holds(done.out, "lockstep.port/1")["verified"]
    assert (before["which"], before["code"]) == ("before", "different")
    assert "a batch size per rank" in before["words"]
    assert (after["which"], after["code"]) == ("after", "equal-within-rounding"), after
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".py"] == ["train.py"]
    assert (tmp_path / "train.py").read_text() == TORCHRUN


def test_a_script_that_cannot_run_is_said_so(tmp_path: Path) -> None:
    text = TORCHRUN.replace("data = make_data(96)", "data = no_such_function(96)")
    (tmp_path / "train.py").write_text(text)
    done = run(["lockstep", "port", "--verify", "--json", "train.py"], tmp_path, torch=True)
    assert done.code == 2
    found = holds(done.out, "lockstep.port/1")["verified"]
    assert {each["code"] for each in found} == {"cannot-verify"}
    assert "no_such_function" in found[0]["words"]


#: The command with another program for verify.
_COMMAND = """
import sys
from lockstep.cli import main
from lockstep.tools.port import verification
verification.COMMAND = (sys.executable, "-c", VERIFY)
main(["port", *sys.argv[1:], "train.py"], prog_name="lockstep")
"""


def _port_by(verify: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(TORCHRUN)
    words = [sys.executable, "-c", _COMMAND.replace("VERIFY", repr(verify)), *options]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT)


def test_a_port_ends_where_files_can_not_be_put_back(tmp_path: Path) -> None:
    verify = """
import json, sys
open("verified", "a").write(sys.argv[-1] + "\\n")
print("lockstep verify: no other run can begin:\\n  cp -p here there\\n  cp -p this that", file=sys.stderr)
print(json.dumps({"schema": "lockstep.error/1", "code": "not-put-back", "message": "no other run"}))
sys.exit(2)
"""
    done = _port_by(verify, tmp_path, "--verify", "--write", "--json")
    assert done.returncode == 2, done
    assert done.stderr.splitlines()[-2:] == ["  cp -p here there", "  cp -p this that"]
    assert holds(done.stdout, "lockstep.error/1")["code"] == "not-put-back"
    assert len((tmp_path / "verified").read_text().splitlines()) == 1, "the port was not run"
    assert (tmp_path / "train.py").read_text() == TORCHRUN


def test_an_interrupt_leaves_verify_the_time_to_put_files_back(tmp_path: Path) -> None:
    verify = """
import os, signal, sys
def leave(*_):
    os.kill(os.getppid(), signal.SIGINT)  # again
    open("put back", "w").close()
    print("lockstep verify: has the copies", file=sys.stderr)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
    done = _port_by(verify, tmp_path, "--verify")
    assert done.returncode == 128 + signal.SIGINT, done
    told = ["ending lockstep verify, which puts back the files that the script has changed"]
    assert done.stderr.splitlines()[1:3] == [*told, "lockstep verify: has the copies"], done
    assert sorted(each.name for each in tmp_path.iterdir()) == ["put back", "train.py"]


#: A verify that finds the script's runs equal, and then does something else with the port's.
_ON_THE_PORT = """
import json, os, signal, sys
def told(kind):
    print(json.dumps({"verdict": kind, "code": kind.replace(" ", "-"), "contrasts": []}))
    sys.exit(0)
if not os.path.exists("once"):
    open("once", "w").close()
    told("equal bits")
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_of_the_port_and_no_verify(tmp_path: Path, signum: signal.Signals) -> None:
    verify = f"""{_ON_THE_PORT}
def leave(*_):
    open("put back", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
os.kill(os.getppid(), {int(signum)})
while True:
    signal.pause()
"""
    done = _port_by(verify, tmp_path, "--verify", "--write")
    assert done.returncode == 128 + signum, done
    assert sorted(each.name for each in tmp_path.iterdir()) == ["once", "put back", "train.py"]
    assert (tmp_path / "train.py").read_text() == TORCHRUN


def test_a_verify_whose_command_is_killed_puts_files_back(tmp_path: Path) -> None:
    verify = """
import os, signal, sys
def leave(*_):
    open("put back", "w").close()
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
os.kill(os.getppid(), signal.SIGKILL)
signal.alarm(30)
while True:
    signal.pause()
"""
    done = _port_by(verify, tmp_path, "--verify")
    assert done.returncode == -signal.SIGKILL, done
    wait_for((tmp_path / "put back").exists, "the end of verify")


def test_a_port_that_differs_is_not_written(tmp_path: Path) -> None:
    done = _port_by(f'{_ON_THE_PORT}\ntold("different")', tmp_path, "--verify", "--write")
    assert done.returncode == 1, done
    assert "train.py is not changed" in done.stderr
    assert (tmp_path / "train.py").read_text() == TORCHRUN
    (tmp_path / "once").unlink()
    done = _port_by(f'{_ON_THE_PORT}\ntold("equal bits")', tmp_path, "--verify", "--write")
    assert done.returncode == 0, done
    assert "lockstep.replicate" in (tmp_path / "train.py").read_text()


def test_edits_that_are_made_meanwhile_stay(tmp_path: Path) -> None:
    verify = f'{_ON_THE_PORT}\nopen("train.py", "a").write("# mine")\ntold("equal bits")'
    done = _port_by(verify, tmp_path, "--verify", "--write")
    assert done.returncode == 2, done
    assert "was changed while it was ported" in done.stderr
    assert (tmp_path / "train.py").read_text() == f"{TORCHRUN}# mine"
