"""One job on several machines that find each other: they start, fail, restart, change and end together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep._proc import children
from lockstep.job.files import EXIT_SAVED
from lockstep.launch.ports import free_port
from lockstep.runs.series import Series
from tests.faults import jobs
from tests.faults.machines import SOON, Machines, client, kill_all, sockets, stop_all, zygote
from tests.launching import LIMIT, ROOM, UNHURRIED, Finished, Running, python_path, wait_for
from tests.schemas import holds

pytestmark = pytest.mark.timeout(150)

#: Options of a training that is still under way when a test comes to disturb it; and while a file is there only.
_LASTS = ("--slow", "0.3", "--epochs", "12")


def _lasts_while(path: Path) -> tuple[str, ...]:
    path.touch()
    return (*_LASTS, "--while", str(path))


def _strike(point: str, *, whom: str = "rank", rank: int = 1, taken: int = 4, sig: int = signal.SIGKILL) -> str:
    return json.dumps([{"life": 0, "rank": rank, "point": point, "taken": taken, "signal": int(sig), "whom": whom}])


def _codes(machines: Machines, limit: float = LIMIT) -> tuple[list[int], list[Finished]]:
    done = [machine.finish(limit) for machine in machines.running]
    return [each.code for each in done], done


def test_all_machines_restart_together_with_the_same_bits(tmp_path: Path, calm: jobs.Calm) -> None:
    (tmp_path / "plan.json").write_text(_strike("optimizer"))
    with Machines(tmp_path, "2", times="") as machines:
        for _ in range(2):
            machines.start("--plan", str(tmp_path / "plan.json"))
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    jobs.check_audit(tmp_path)
    assert jobs.lives(tmp_path) == 2
    own, told = sorted((each.err for each in done), key=lambda err: "on machine 1" in err)
    for err in (own, told):
        assert "rank 1 of 2 failed: killed by signal 9 (SIGKILL)" in err
        assert err.count("restart 1 of 2: all ranks start again") == 1
    assert "lockstep: on machine 1 (" in told, told


def _told(done: Finished) -> str:
    """What the launcher says after the line with the machines."""
    return done.err.split("lockstep: ", 2)[2]


_RAISING = """
import sys
import torch
import lockstep
world = lockstep.init()
if world.rank == 1:
    raise RuntimeError("the wrong path")
world.mean(1.0)
"""


def test_the_first_failure_is_told_on_every_machine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RAISING)
    with Machines(tmp_path, "2") as machines:
        for _ in range(2):
            machines.start(script=script)
        codes, done = _codes(machines)
    assert codes == [1, 1], done
    for each in done:
        report = _told(each)
        assert "rank 1 of 2 failed: exit code 1" in report, each.err
        assert "RuntimeError: the wrong path" in report
        assert "PeerLost" not in report
        assert "not restarted: it failed before its first step" in report
    elsewhere = next(each.err for each in done if "on machine 1" in each.err)
    assert "line 7, in <module>" in elsewhere.split("lockstep: ", 2)[2], "with the traceback that is nowhere above"


def test_a_command_is_told_once_of_what_becomes_of_the_job(tmp_path: Path) -> None:
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(_RAISING)
    with Machines(tmp_path, "2", options=("--notify", f"cat >> {told}")) as machines:
        for _ in range(2):
            machines.start(script=script)
        codes, done = _codes(machines)
    assert codes == [1, 1], done  # it failed before its first step, so it is not tried again
    (failed,) = [holds(line, "lockstep.notify/1") for line in told.read_text().splitlines()]
    assert (failed["event"], failed["code"], failed["exit_code"], failed["ranks"]) == ("failed", "run-failed", 1, 2)
    assert "RuntimeError: the wrong path" in failed["text"]


def test_a_machine_that_comes_joins_without_a_step_lost(tmp_path: Path) -> None:
    """Two ranks more, on a job of one, in the middle of its first epoch."""
    with Machines(tmp_path, "1:2") as machines:
        machines.start(*_lasts_while(tmp_path / "slowly"))
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training")
        machines.start(*_lasts_while(tmp_path / "slowly"), ranks=2)
        wait_for(lambda: jobs.lives(tmp_path) == 2, "training of all")
        (tmp_path / "slowly").unlink()
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    taken = [line for line in jobs.lines(tmp_path, 0) if "step" in line]
    assert [line["step"] for line in taken] == list(range(1, 145)), "no step was lost, none was taken twice"
    assert {line["life"] for line in taken} == {0, 1}
    used = [
        (line["epoch"], index)
        for rank in range(3)
        for line in jobs.lines(tmp_path, rank)
        if "step" in line
        for index in line["indices"]
    ]
    assert sorted(used) == [(epoch, index) for epoch in range(12) for index in range(46)], "each sample once an epoch"
    assert "1 machine wants to join" in done[0].err


def test_a_signal_to_one_machine_stops_them_all(tmp_path: Path, calm: jobs.Calm) -> None:
    with Machines(tmp_path, "2") as machines:
        for _ in range(2):
            machines.start(*_LASTS)
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training")
        listening = [address for machine in machines.running for address in sockets(client(machine), "0A")]
        assert listening == ["0100007F"] * 2, "the store of the rendezvous and that of the round, at 127.0.0.1 alone"
        os.kill(machines.running[1].pid, signal.SIGTERM)
        codes, done = _codes(machines)
    assert codes == [EXIT_SAVED] * 2, done
    for each in done:
        assert "stopped by SIGTERM; saved at step" in each.err
    with Machines(tmp_path, "2") as machines:
        for _ in range(2):
            machines.start("--life", "1", "--epochs", "12")
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert jobs.final(tmp_path) == calm(12)


@pytest.mark.parametrize(("number", "times"), [(0, f"{SOON},silent=1.5"), (1, "")], ids=["0", "1"])
def test_the_job_goes_on_when_a_rendezvous_client_dies(
    tmp_path: Path, calm: jobs.Calm, number: int, times: str
) -> None:
    """One of them serves the store."""
    with Machines(tmp_path, "2", times=times) as machines:
        for _ in range(2):
            machines.start(*_lasts_while(tmp_path / "slowly"))
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 5, "training")
        os.kill(client(machines.running[number]), signal.SIGKILL)
        wait_for(lambda: jobs.lives(tmp_path) == 2, "the next life")
        (tmp_path / "slowly").unlink()
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert jobs.final(tmp_path) == calm(12)
    jobs.check_audit(tmp_path)
    assert "the rendezvous client of this machine has ended" in done[number].err
    for each in done:
        assert "Start the command again" not in each.err, "it goes on by itself"


def test_the_job_goes_on_when_a_rendezvous_client_stands_still(tmp_path: Path) -> None:
    with Machines(tmp_path, "1", times=f"{SOON},silent=2,cut_off=2.5,still=1") as machines:
        machine = machines.start(*_lasts_while(tmp_path / "slowly"))
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 5, "training")
        os.kill(client(machine), signal.SIGSTOP)
        wait_for(lambda: jobs.lives(tmp_path) == 2, "the next life")
        (tmp_path / "slowly").unlink()
        codes, done = _codes(machines)
    assert codes == [0], done
    assert jobs.lives(tmp_path) == 2
    assert "this machine has lost its connection to the others" in done[0].err
    assert "Traceback" not in done[0].err


_EARLY = """
import os, sys, time
import lockstep
world = lockstep.init()
life, folder, machine = os.environ["LOCKSTEP_RESTART"], sys.argv[1], sys.argv[2]
open(f"{folder}/rank-{life}-{world.rank}", "w").write(machine)
while life == "0" and world.rank == 1:
    time.sleep(0.01)
"""


def test_a_machine_whose_ranks_have_ended_starts_again_when_another_is_lost(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    script = tmp_path / "train.py"
    script.write_text(_EARLY)
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}", times=f"{SOON},silent=2") as machines:
        for number in range(3):  # one of them is spare
            machines.start(str(number), script=script)
        began = [tmp_path / f"rank-0-{rank}" for rank in range(2)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in began), "both ranks")
        ended, lost = (machines.running[int(file.read_text())] for file in began)
        wait_for(lambda: len(children(zygote(ended))) == 1, "the end of rank 0")
        lost.process.kill()
        codes = [machine.finish().code for machine in machines.running if machine is not lost]
    assert codes == [0, 0]
    assert {path.name for path in tmp_path.glob("rank-*")} == {f"rank-{life}-{rank}" for life in "01" for rank in "01"}


_ECHO = """
import os, sys, time
import lockstep
world = lockstep.init()
open(f"{sys.argv[1]}/began-{world.rank}", "w").write(sys.argv[2])
while world.rank == 1 and not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.01)
while world.rank == 0 and os.path.exists(f"{sys.argv[1]}/stay"):
    time.sleep(0.01)
if world.rank == 1:
    raise ConnectionError("Connection closed by peer")
"""


def _one_that_hears_an_echo(machines: Machines, folder: Path) -> tuple[Running, Running]:
    """Start a job of two machines; the one whose rank will fail as if it had lost the other, and the other one."""
    (folder / "shared").mkdir()
    script = folder / "train.py"
    script.write_text(_ECHO)
    for number in range(2):
        machines.start(str(number), script=script, restarts=0)
    began = [folder / f"began-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in began), "both ranks")
    other, fails = (machines.running[int(file.read_text())] for file in began)
    return fails, other


def test_a_consequence_does_not_wait_for_a_machine_that_is_done_and_silent(tmp_path: Path) -> None:
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}", times=f"{SOON},silent=2") as machines:
        fails, done = _one_that_hears_an_echo(machines, tmp_path)
        wait_for(lambda: any(b"done/0" in f.read_bytes() for f in (tmp_path / "shared").iterdir()), "the end of rank 0")
        kill_all(done)
        (tmp_path / "go").touch()
        ended = fails.finish(limit=60)
    assert ended.code == 1, ended
    assert "ConnectionError: Connection closed by peer" in ended.err


def test_a_signal_ends_the_wait_for_the_cause_of_a_consequence(tmp_path: Path) -> None:
    (tmp_path / "stay").touch()
    times = f"{SOON},silent=80,cut_off=90"
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}", times=times) as machines:
        fails, other = _one_that_hears_an_echo(machines, tmp_path)
        stopped, _ = stop_all(other)
        (tmp_path / "go").touch()
        temporary = machines.temporary[machines.running.index(fails)]
        wait_for(lambda: list(temporary.glob("lockstep-*/**/failed")), "its launcher knows that its rank has failed")
        os.kill(fails.pid, signal.SIGTERM)
        try:
            ended = fails.finish(limit=60)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        (tmp_path / "stay").unlink()
        other.finish()
    assert ended.code == 128 + signal.SIGTERM, ended
    assert "stopped by SIGTERM" in ended.err


def test_a_signal_while_the_machines_meet_again(tmp_path: Path) -> None:
    """Their ranks have saved, to let another one join; the second machine comes when the job has been stopped."""
    with Machines(tmp_path, "2:3") as machines:
        for _ in range(2):
            machines.start(*_LASTS)
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training")
        rank = int((tmp_path / "pid-0-0").read_text())
        here, there = sorted(machines.running, key=lambda machine: rank not in machine.tree())
        os.kill(there.pid, signal.SIGSTOP)
        machines.start(*_LASTS)
        wait_for(lambda: len(children(zygote(here))) == 1, "the end of its rank")
        os.kill(here.pid, signal.SIGTERM)
        os.kill(there.pid, signal.SIGCONT)
        codes, done = _codes(machines)
    assert codes == [EXIT_SAVED] * 3, done
    told = [each.err for each in done if "while the machines met again" in each.err]
    assert told, done
    assert all("lockstep: stopped by SIGTERM on " in each for each in told)


_STUBBORN = """
import os, signal, sys, time
import lockstep

#: This rank's launcher, and the process that has forked it.
zygote = os.getppid()
launcher = int(open(f"/proc/{zygote}/stat").read().rpartition(")")[2].split()[1])

def asked(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    {then}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # one that has come meanwhile is not lost

lockstep.init()
signal.signal(signal.SIGTERM, asked)
open(f"{sys.argv[1]}/began", "w").close()
while True:
    time.sleep(0.01)
"""


def test_a_signal_to_a_machine_that_is_about_to_start_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_STUBBORN.replace("{then}", "os.kill(launcher, signal.SIGTERM)"))
    with Machines(tmp_path, "1", options=("--grace", "15")) as machines:
        machine = machines.start(script=script, before=UNHURRIED)
        wait_for((tmp_path / "began").exists, "training")
        os.kill(client(machine), signal.SIGKILL)
        done = machine.finish()
    assert done.code == 128 + signal.SIGTERM, done
    assert "stopped by SIGTERM" in done.err


def test_the_end_of_the_process_that_forks_is_no_success_where_the_others_are_lost(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_STUBBORN.replace("{then}", "os.kill(zygote, signal.SIGKILL)"))
    with Machines(tmp_path, "1") as machines:
        machine = machines.start(script=script, before=UNHURRIED)
        wait_for((tmp_path / "began").exists, "training")
        os.kill(client(machine), signal.SIGKILL)
        done = machine.finish()
    assert done.code == 128 + signal.SIGKILL, done
    assert "the rendezvous client of this machine has ended" in done.err
    assert "the process that forks the ranks (process " in done.err
    assert "all ranks start again" not in done.err


@pytest.mark.parametrize("number", [0, 1])
def test_machines_meet_though_a_client_dies_while_they_wait(tmp_path: Path, number: int) -> None:
    """The first one serves the store. A third machine makes them enough."""
    with Machines(tmp_path, "3") as machines:
        for _ in range(2):
            waits = machines.start()
            wait_for(lambda: _has_client(waits), "its client")  # noqa: B023  (called before the next one)
            wait_for(lambda: sockets(client(waits), "01"), "its store")  # noqa: B023
        os.kill(client(machines.running[number]), signal.SIGKILL)
        machines.start()
        codes, done = _codes(machines)
    assert codes == [0, 0, 0], done


def _has_client(machine: Running) -> bool:
    return bool(children(machine.pid)) and bool(children(zygote(machine)))


def test_machines_meet_over_ipv6(tmp_path: Path) -> None:
    with Machines(tmp_path, "2", endpoint=f"[::1]:{free_port()}") as machines:
        for _ in range(2):
            machines.start()
        codes, done = _codes(machines)
    assert codes == [0, 0], done


def test_another_program_at_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        with Machines(tmp_path, "2", endpoint=endpoint) as machines:
            machines._options += ["--join-timeout", "1"]
            machine = machines.start()
            done = machine.finish()
    assert done.code == 1, done
    assert f"{endpoint}" in done.err


def _go_on_without_one(tmp_path: Path) -> float:
    """Have one of two machines die; returns the seconds from its death to the other's next life."""
    (tmp_path / "shared").mkdir()
    with Machines(tmp_path, "1:2", endpoint=f"file:{tmp_path / 'shared'}", times="") as machines:
        for _ in range(2):
            machines.start(*_lasts_while(tmp_path / "slowly"))
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 5, "training")
        machines.running[0].process.kill()
        died = time.monotonic()
        wait_for(lambda: jobs.lives(tmp_path) == 2, "the next life")
        passed = time.monotonic() - died
        (tmp_path / "slowly").unlink()
        codes, done = _codes(machines)
    assert codes == [-signal.SIGKILL, 0], done
    assert "gave no sign of life for 4 s" in done[1].err, "\n".join(
        line for line in done[1].err.splitlines() if "frame" not in line
    )
    assert not list((tmp_path / "shared").iterdir()), "nothing is left of the rendezvous"
    return passed


def test_the_job_goes_on_without_a_machine_that_dies(tmp_path: Path) -> None:
    """Over a shared folder, whichever machine it is; and the one that is left does not need it."""
    _go_on_without_one(tmp_path)


@pytest.mark.campaign
@pytest.mark.timed
def test_the_job_goes_on_within_seconds_of_a_machines_death(tmp_path: Path) -> None:
    assert _go_on_without_one(tmp_path) < 12


_LATE = """
import torch
import lockstep
world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    if step == 5 and world.rank == 1:
        open("go").close()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_late_rank_is_named_on_every_machine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_LATE)
    os.mkfifo(tmp_path / "go")  # whoever opens it to read waits for who writes
    with Machines(tmp_path, "2", times=f"{SOON},heartbeat=0.2,late=1") as machines:
        for _ in range(2):
            machines.start(script=script)
        said = [machine.read_errors_to("rank 1 of 2 has held up the others for") for machine in machines.running]
        (tmp_path / "go").write_text("")
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    told = [before + each.err for before, each in zip(said, done, strict=True)]
    for each in told:
        assert "  rank 0 waits in " in each, each
    here, there = sorted(told, key=lambda err: "rank 1 (on another machine" in err)
    assert "train.py:9 in <module>" in here, (here, "with its stack, where it is")
    assert "rank 1 (on another machine, whose launcher tells more)" in there


_STRAGGLES = """
import sys
from tests.ranks import stragglers
sys.argv[1:] = ["forward", "4", "0", "110"]
stragglers.main()
"""


def test_a_slow_rank_of_another_machine_is_seen_and_summed_up_by_the_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_STRAGGLES)
    top = [sys.executable, "-m", "lockstep", "runs", "top", "--once"]
    with Machines(tmp_path, "2") as machines:
        (tmp_path / "go-on").touch()
        for _ in range(2):
            machines.start(script=script, LOCKSTEP_QUIET="")
        wait_for(lambda: list(tmp_path.glob("logs-*/series-1.bin")), "the first rows")
        (folder,) = {series.parent for series in tmp_path.glob("logs-*/series-1.bin")}
        seen = subprocess.run([*top, str(folder)], capture_output=True, text=True, timeout=LIMIT, check=False).stdout
        (tmp_path / "go-on").unlink()
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert re.search(r"^ +0 +\d+ .*\n +1 +- +\d+ +\d+\.\d +\d+% +\d+% +\d+ MiB ", seen, re.MULTILINE), seen
    (summary,) = [each.err for each in done if " straggler" in each.err]
    assert "compute straggler: rank 1, in forward: " in summary, summary
    assert re.search(r" on 2 ranks(;.*)?\n", summary), summary
    assert "restart" not in summary, "the ranks were started once"
    assert not any("samples/s" in each.err for each in done if each.err != summary), "one speaks for all"
    last = Series.read(folder / "series-1.bin")
    assert last.ranks == (0, 1)
    assert min(last.columns["steps"][-1]) > 100
    # Of all rows: in the last ones a rank may have ended already.
    assert min(max(of_rank) for of_rank in zip(*last.columns["memory"], strict=True)) > 1 << 20


def test_machines_without_the_jobs_key_are_refused(tmp_path: Path) -> None:
    with Machines(tmp_path, "2") as machines:
        machines.start(LOCKSTEP_KEY="ab" * 32)
        machines.start()
        codes, done = _codes(machines)
    assert codes == [1, 1], done
    said = sorted(each.err.partition("lockstep: ")[2].split("(")[0] for each in done)
    texts = [each.err for each in done]
    assert any("does not know the job's key that this machine has" in text for text in texts), said
    assert any("has a key for this job, and this machine has none" in text for text in texts), said
    assert not list(tmp_path.glob("pid-*")), "no rank was started"


def test_too_few_machines(tmp_path: Path) -> None:
    with Machines(tmp_path, "2") as machines:
        machines._options += ["--join-timeout", "1"]
        machines.start()
        codes, done = _codes(machines)
    assert codes == [1], done
    assert "too few machines came to 127.0.0.1:" in done[0].err
    assert not list(tmp_path.glob("pid-*")), "no rank was started"


_PARTS = """
import os, sys, time
open(f"{sys.argv[1]}/began-{os.environ['RANK']}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.01)
"""


def test_a_machine_that_waits_for_a_place_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PARTS)
    with Machines(tmp_path, "1", times=f"{SOON},searching=0.5") as machines:
        machines.start(script=script)
        wait_for((tmp_path / "began-0").exists, "the job")
        spare = machines.start(script=script)
        said = spare.read_errors_to("this machine is spare")
        (tmp_path / "go").touch()
        codes, _ = _codes(machines)
    assert codes == [0, 0]
    assert "a job of 1 machine, as many as --nnodes allows, is running (" in said


def test_machines_that_run_the_same_with_other_arguments_are_told(tmp_path: Path) -> None:
    """Two jobs that meet at one place by mistake, most likely. The arguments themselves may be secret."""
    script = tmp_path / "train.py"
    script.write_text(_PARTS)
    (tmp_path / "go").touch()
    with Machines(tmp_path, "2") as machines:
        for name in ("one", "two"):
            machines.start("--output", name, script=script)
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    for each in done:
        assert each.err.count("the machines differ in the arguments of what they run: 3 of them (digest ") == 1
        assert "what they run: train.py" not in each.err


def _until_the_result(entries: bytes) -> bytes:
    """The entries of a file store up to that of a job's result: each a key and a value, after its length."""
    end, words = 0, list[bytes]()
    while len(words) % 2 or not words or not words[-2].endswith(b"/result"):
        begin = end + 4
        end = begin + int.from_bytes(entries[end:begin], "little")
        assert end <= len(entries), "the job has left no result"
        words.append(entries[begin:end])
    return entries[:end]


def test_what_an_earlier_job_has_left_in_the_file_does_not_end_the_next_one(tmp_path: Path) -> None:
    """Its launchers were killed as they left, with its result in the file."""
    shared, script = tmp_path / "shared", tmp_path / "train.py"
    shared.mkdir()
    script.write_text(_PARTS)
    kept, times = tmp_path / "kept", f"{SOON},silent=2"
    with Machines(tmp_path, "2", endpoint=f"file:{shared}", times=times) as machines:
        for _ in range(2):
            machines.start(script=script)
        wait_for(lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)), "the job")
        (file,) = shared.iterdir()
        kept.hardlink_to(file)  # the store only appends to it, and removes it in the end
        (tmp_path / "go").touch()
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    file.write_bytes(_until_the_result(kept.read_bytes()))
    for rank in range(2):
        (tmp_path / f"began-{rank}").unlink()
    with Machines(tmp_path, "2", endpoint=f"file:{shared}", times=times) as machines:
        for _ in range(2):
            machines.start(script=script)
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert all((tmp_path / f"began-{rank}").exists() for rank in range(2)), done
    assert not list(shared.iterdir()), "nothing is left of either"


def test_a_machine_that_stands_still_as_its_ranks_end_ends_with_the_others(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PARTS)
    with Machines(tmp_path, "2", times=f"{SOON},silent=1.5,cut_off=2.5,still=0.5") as machines:
        first = machines.start(script=script)
        wait_for(lambda: _has_client(first) and sockets(client(first), "0A"), "its store")
        second = machines.start(script=script)
        wait_for(lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)), "the job")
        stopped = stop_all(second)
        (tmp_path / "go").touch()
        first.read_errors_to("gave no sign of life for 1.5 s")
        # Beyond the moment at which a launcher that heard nothing would give its client up.
        wait_for(lambda: time.monotonic() > stopped[1] + 3.0, "a while")
        for pid in stopped[0]:
            os.kill(pid, signal.SIGCONT)
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert "lost its connection" not in done[1].err


def test_the_end_of_the_process_that_forks_is_told_while_machines_meet_again(tmp_path: Path) -> None:
    """What came before it is told once."""
    (tmp_path / "plan.json").write_text(_strike("optimizer", rank=0))
    with Machines(tmp_path, "1:2") as machines:  # which waits for a second one, each time
        machine = machines.start("--plan", str(tmp_path / "plan.json"))
        said = machine.read_errors_to("restart 1 of 2: all ranks start again")
        os.kill(zygote(machine), signal.SIGKILL)
        done = machine.finish()
    assert done.code == 128 + signal.SIGKILL, done
    assert "failed: killed by signal 9" in said
    assert "the process that forks the ranks (process " in done.err
    assert done.err.count("rank 0 of 1 failed") + said.count("rank 0 of 1 failed") == 1


#: What the machines have to end within, far less than --join-timeout; and what they say.
_AT_ONCE, _NO_PROCESS = 120.0, "no process could be forked for 1 s: Resource temporarily unavailable; "


@pytest.mark.parametrize("full", ["files", "processes"])
def test_a_machine_that_can_not_start_again_ends_the_job_on_all(tmp_path: Path, full: str) -> None:
    room = 2 if full == "processes" else 99  # for its client, and for its rank once
    (tmp_path / "full.py").write_text(ROOM.format(room=room))
    path = python_path(jobs.SCRIPT.parents[2], tmp_path)
    with Machines(tmp_path, "2") as machines:
        first = machines.start("--slow", "0.3", "--epochs", "6")
        wait_for(lambda: _has_client(first) and sockets(client(first), "0A"), "its store")
        machines.start("--slow", "0.3", "--epochs", "6", LOCKSTEP_PRELOAD="full", PYTHONPATH=path)
        wait_for(lambda: len(jobs.lines(tmp_path, 0)) > 3, "training")
        (home,) = (path.parent for path in machines.temporary[1].glob("lockstep-*/1"))
        if full == "files":
            (home / "2").touch()  # in the way of a folder
        os.kill(int((tmp_path / "pid-0-1").read_text()), signal.SIGKILL)
        codes, (here, there) = _codes(machines, _AT_ONCE)
    why = _NO_PROCESS if full == "processes" else f"the job's files can't be written in {home}: {home}/2: File exists; "
    assert codes == [128 + signal.SIGKILL] * 2, (here, there)
    assert f"\nlockstep: not restarted: {why}" in there.err
    assert re.search(r"\nlockstep: on machine 1 \(.*\): not restarted: " + re.escape(why), here.err), here.err
    assert all("restart 1 of 2: all ranks start again" in each.err for each in (here, there))


def test_a_machine_that_can_not_start_ends_the_job_on_all(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(ROOM.format(room=2))  # for its client, and for one rank
    with Machines(tmp_path, "2") as machines:
        first = machines.start()
        wait_for(lambda: _has_client(first) and sockets(client(first), "0A"), "its store")
        path = python_path(jobs.SCRIPT.parents[2], tmp_path)
        machines.start(ranks=2, LOCKSTEP_PRELOAD="full", PYTHONPATH=path)
        codes, (here, there) = _codes(machines, _AT_ONCE)
    assert codes == [1, 1], (here, there)
    assert f"\nlockstep: the ranks could not be started:\n{_NO_PROCESS}" in there.err
    assert re.search(r"\nlockstep: on machine 1 \(.*\): the ranks could not be started:\n" + _NO_PROCESS, here.err), (
        here
    )


#: Programs of a machine that comes to a job and can't take a step there.
_BROKEN = {
    "module": "import a_module_that_is_not_here",
    "path": "import lockstep\nlockstep.init(seed=3)\nopen('a-path-that-is-not-here')",
    "crash": "import lockstep, os, signal\nlockstep.init(seed=3)\nos.kill(os.getpid(), signal.SIGSEGV)",
    "seed": "import lockstep\nlockstep.init(seed=4)",
    "processes": "",
}
#: The failure of its ranks is written down before those of the others that it has caused, on a machine of any load.
_CAUSE_FIRST = f"{SOON},echo=60"


def _start_broken(machines: Machines, folder: Path, broken: str, restarts: int) -> Running:
    script = folder / "broken.py"
    script.write_text(_BROKEN[broken])
    if broken != "processes":
        return machines.start(script=script, restarts=restarts)
    (folder / "full.py").write_text(ROOM.format(room=1))  # for its client
    path = python_path(jobs.SCRIPT.parents[2], folder)
    return machines.start(script=script, restarts=restarts, LOCKSTEP_PRELOAD="full", PYTHONPATH=path)


def _steps(folder: Path, *, after: int = -1) -> list[int]:
    """The steps that rank 0 has taken, in lives after one."""
    return [line["step"] for line in jobs.lines(folder, 0) if "step" in line and line["life"] > after]


@pytest.mark.parametrize(
    ("broken", "restarts", "said"),
    [
        ("module", 3, "rank 1 of 2 failed: ModuleNotFoundError: No module named 'a_module_that_is_not_here'"),
        ("path", 0, "rank 1 of 2 failed: FileNotFoundError: [Errno 2] No such file or directory: "),
        ("crash", 3, "rank 1 of 2 failed: killed by signal 11 (SIGSEGV)"),
        ("seed", 3, ""),
        ("processes", 3, f"the ranks could not be started:\n{_NO_PROCESS}"),
    ],
    ids=["module", "path", "crash", "seed", "processes"],
)
def test_a_machine_that_comes_and_can_not_run_leaves_the_others_to_go_on(
    tmp_path: Path, broken: str, restarts: int, said: str
) -> None:
    """They have saved before, so no step is lost. A crash is given one more start; seeds that differ are an error of
    all ranks, whichever is first."""
    slowly = tmp_path / "slowly"
    with Machines(tmp_path, "1:2", times=_CAUSE_FIRST) as machines:
        first = machines.start(*_lasts_while(slowly), restarts=restarts)
        wait_for(lambda: len(_steps(tmp_path)) > 3, "training")
        left = _start_broken(machines, tmp_path, broken, restarts).finish()
        wait_for(lambda: _steps(tmp_path, after=0) or first.process.poll() is not None, "the others' steps")
        slowly.unlink()
        done = first.finish()
    assert (left.code, done.code) == (128 + signal.SIGSEGV if broken == "crash" else 1, 0), (left, done)
    assert _steps(tmp_path) == list(range(1, 145)), "no step was lost, none was taken twice"
    machine = f"machine 1 ({socket.gethostname()}, 127.0.0.1)"
    leaves = f"\nno step was taken with {machine}: it leaves, and the others start again without it\n"
    if not restarts:
        leaves += "no machine is let in any more while they are enough: this has happened 1 time (--max-restarts)\n"
    for each in (left, done):
        assert each.err.count(leaves) == 1, (left, done)
        assert each.err.partition(leaves)[0].count("all ranks start again") == (broken == "crash"), (left, done)
    if broken != "seed":
        (line,) = re.findall(rf"\nlockstep: on {re.escape(machine)}: (.*(?:\n.*)?){re.escape(leaves)}", done.err)
        assert line.startswith(said), done


def test_a_job_lets_no_machine_in_once_too_many_have_left_without_a_step(tmp_path: Path) -> None:
    """Something starts one of them again and again, which stops the others each time."""
    slowly = tmp_path / "slowly"
    with Machines(tmp_path, "1:2", times=f"{_CAUSE_FIRST},searching=0.5") as machines:
        first = machines.start(*_lasts_while(slowly), restarts=1)
        wait_for(lambda: len(_steps(tmp_path)) > 3, "training")
        left = [_start_broken(machines, tmp_path, "path", 1).finish() for _ in range(2)]
        heard = first.read_errors_to("this has happened 2 times (--max-restarts)")
        again = len(_steps(tmp_path))
        wait_for(lambda: len(_steps(tmp_path)) > again or first.process.poll() is not None, "the others' steps")
        spare = _start_broken(machines, tmp_path, "path", 1)
        said = spare.read_errors_to("this machine is spare: a job of 1 machine is running (")
        lives, steps = jobs.lives(tmp_path), len(_steps(tmp_path))
        more = "more steps than --regroup-after gives it time for"
        wait_for(lambda: len(_steps(tmp_path)) > steps + 5 or first.process.poll() is not None, more)
        slowly.unlink()
        done, last = first.finish(), spare.finish()
    assert [each.code for each in (*left, last, done)] == [1, 1, 0, 0], (left, last, done)
    assert "and lets none in while it has enough: too many have left without a step (--max-restarts)" in said
    assert jobs.lives(tmp_path) == lives
    heard += done.err
    assert heard.count("\nno step was taken with machine 1 (") == 2, heard
    assert heard.count("\nno machine is let in any more while they are enough: this has happened 2 times") == 1, heard
    assert _steps(tmp_path) == list(range(1, 145)), "no step was lost, none was taken twice"


@pytest.mark.parametrize("late", [0, 1])
def test_whichever_machine_tells_first_of_what_all_fail_of_those_that_came_leave(tmp_path: Path, late: int) -> None:
    """The machine that is late with its verdict finds the other's."""
    slowly, before = tmp_path / "slowly", "from tests.ranks.planted import late_messages\nlate_messages('verdict', 1)\n"
    script = tmp_path / "broken.py"
    script.write_text(_BROKEN["seed"])
    with Machines(tmp_path, "1:2", times=_CAUSE_FIRST) as machines:
        first = machines.start(*_lasts_while(slowly), before="" if late else before)
        wait_for(lambda: len(_steps(tmp_path)) > 3, "training")
        left = machines.start(script=script, before=before if late else "").finish()
        wait_for(lambda: _steps(tmp_path, after=0) or first.process.poll() is not None, "the others' steps")
        slowly.unlink()
        done = first.finish()
    assert (left.code, done.code) == (1, 0), (left, done)
    told = left if late else done
    assert f"\nlockstep: on machine {1 - late} (" in told.err, told
    assert _steps(tmp_path) == list(range(1, 145)), "no step was lost, none was taken twice"


def test_a_command_is_told_that_the_job_goes_on_without_the_machine_that_speaks_for_it(tmp_path: Path) -> None:
    """It is before the others, by its address, and has the store of the round."""
    slowly, told = tmp_path / "slowly", tmp_path / "told"
    with Machines(tmp_path, "1:2", times=_CAUSE_FIRST, options=("--notify", f"cat >> {told}")) as machines:
        first = machines.start(*_lasts_while(slowly), launcher=("--local-addr", "127.0.0.2"))
        wait_for(lambda: len(_steps(tmp_path)) > 3, "training")
        left = _start_broken(machines, tmp_path, "path", 2).finish()
        wait_for(lambda: _steps(tmp_path, after=0) or first.process.poll() is not None, "the others' steps")
        slowly.unlink()
        done = first.finish()
    assert (left.code, done.code) == (1, 0), (left, done)
    assert "\nno step was taken with machine 0 (" in left.err, left
    said = [holds(line, "lockstep.notify/1") for line in told.read_text().splitlines()]
    assert [(each["event"], each["exit_code"]) for each in said] == [("restart", None), ("restart", None), ("ended", 0)]
    (text,) = [each["text"] for each in said if each["code"] == "rank-raised"]
    assert text.endswith(": it leaves, and the others start again without it"), said


def test_a_machine_that_loses_the_others_when_it_is_done_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PARTS)
    with Machines(tmp_path, "2") as machines:
        first = machines.start(script=script)
        wait_for(lambda: _has_client(first) and sockets(client(first), "0A"), "its store")
        second = machines.start(script=script)
        wait_for(lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)), "the job")
        os.kill(first.pid, signal.SIGSTOP)  # it does not notice that its rank ends
        (tmp_path / "go").touch()
        wait_for(lambda: len(children(zygote(second))) == 1, "the end of its rank")
        kill_all(first)
        done = second.finish()
    assert done.code == 0, done
    assert "all ranks of this machine had succeeded by then" in done.err
    assert "Start the command again" not in done.err


_CAUSE = """
import os, sys, time
import lockstep
world = lockstep.init()
open(f"{sys.argv[1]}/began-{world.rank}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.01)
if world.rank == 1:
    raise RuntimeError("the wrong path")
world.mean(1.0)
"""


def test_the_cause_is_told_where_it_was_though_another_machine_was_first(tmp_path: Path) -> None:
    """Its launcher was busy, so that the consequence there was all that the others knew. They have left with the store
    when it comes to leave, and it does not wait for its client, which has nobody to tell."""
    script = tmp_path / "train.py"
    script.write_text(_CAUSE)
    with Machines(tmp_path, "2", times=f"{SOON},farewell=1.5,leaving=120") as machines:
        first, second = (machines.start(script=script, restarts=0) for _ in range(2))
        wait_for(lambda: all((tmp_path / f"began-{rank}").exists() for rank in range(2)), "the job")
        here = first if len(_ranks_log(tmp_path, 0, 1)) else second
        there = second if here is first else first
        os.kill(here.pid, signal.SIGSTOP)
        (tmp_path / "go").touch()
        there.read_errors_to("rank 0 of 2 failed")
        there.process.wait()
        os.kill(here.pid, signal.SIGCONT)
        codes, done = _codes(machines, limit=60)
    assert codes == [1, 1], done
    said = done[0 if here is first else 1].err.split("lockstep: ")[-1]
    assert said.startswith("rank 1 of 2 failed: exit code 1\nRuntimeError: the wrong path"), said
    assert "and its consequence on machine 0 (" in said


def _ranks_log(folder: Path, number: int, rank: int) -> list[Path]:
    return list(folder.glob(f"logs-{number}/rank{rank}.log"))


@pytest.mark.parametrize("offset", [-3, 5])
def test_a_machine_whose_clock_is_wrong_takes_part_and_is_told(tmp_path: Path, calm: jobs.Calm, offset: int) -> None:
    """Its clock is that of all Python there. (Under libfaketime a sleep may fail where others use the processors.)"""
    with Machines(tmp_path, "2") as machines:
        for clock in (0, offset):
            machines.start(before=f"from tests.ranks.planted import another_clock\nanother_clock({clock})\n")
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert jobs.final(tmp_path) == calm(jobs.EPOCHS)
    for each in done:
        assert each.err.count(f" is {abs(offset)} s ahead of that of machine ") == 1, each.err


def test_an_address_that_is_not_the_machines_own_is_told_on_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PARTS)
    (tmp_path / "shared").mkdir()
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}") as machines:
        machines.start(script=script, launcher=("--local-addr", "10.9.8.7"))
        wait_for(lambda: _holds(tmp_path / "shared", b"card/1"), "its card")
        machines.start(script=script, launcher=("--join-timeout", "1"))  # of which it waits for nobody at first
        codes, (wrong, right) = _codes(machines)
    assert codes == [1, 1]
    assert "this machine can't listen at 10.9.8.7: Cannot assign requested address; --local-addr says" in wrong.err
    assert "could not start together, and meet again: machine 0 (" in right.err
    assert "10.9.8.7) can't listen at 10.9.8.7" in right.err
    assert "too few machines came" in right.err, "it has left, which is known at once"


def test_a_name_without_an_address_is_what_a_machine_ends_with(tmp_path: Path) -> None:
    with Machines(tmp_path, "2", endpoint="box-0.invalid:7", options=("--join-timeout", "1")) as machines:
        machines.start()
        codes, (done,) = _codes(machines)
    assert codes == [1]
    assert "failed: the name box-0.invalid can't be resolved" in done.err


_WHOSE = """
import os, sys
import lockstep
world = lockstep.init()
open(f"{sys.argv[1]}/rank-{world.rank}-of-{os.getppid()}", "w").close()
world.barrier()
"""


def test_machines_on_one_host_are_in_the_order_of_their_starts_though_process_ids_begin_anew(tmp_path: Path) -> None:
    """The first one's are far ahead, so that no id is given out that a process had a moment ago, which others hold."""
    last_id = Path("/proc/sys/kernel/ns_last_pid")
    if not os.access(last_id, os.W_OK) or os.getuid():
        pytest.skip("only root may say where process ids go on, and only where the kernel lets it")
    script = tmp_path / "train.py"
    script.write_text(_WHOSE)
    last, most = int(last_id.read_text()), int(Path("/proc/sys/kernel/pid_max").read_text())
    with Machines(tmp_path, "2") as machines:
        last_id.write_text(str((last + most) // 2))
        first = machines.start(script=script)
        wait_for(lambda: _has_client(first) and sockets(client(first), "0A"), "its store")
        expected = f"rank-0-of-{zygote(first)}"
        last_id.write_text(str(last))
        machines.start(script=script)
        codes, done = _codes(machines)
    assert codes == [0, 0], done
    assert (tmp_path / expected).exists(), list(tmp_path.glob("rank-*"))


_LEAVES_LATE = """
import atexit, os, sys, time
import lockstep
world = lockstep.init()
def last():
    open(f"{sys.argv[1]}/leaves-{os.getpid()}", "w").close()
    while not os.path.exists(f"{sys.argv[1]}/end"):
        time.sleep(0.01)
if world.rank == 1:
    atexit.register(last)
world.mean(1.0)
"""


def _holds(folder: Path, text: bytes) -> bool:
    return any(text in file.read_bytes() for file in folder.iterdir())


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("shared", [False, True], ids=["port", "file"])
def test_a_machine_that_is_gone_when_the_others_leave_takes_nothing_with_it(
    tmp_path: Path, shared: bool, how: str
) -> None:
    """Its own ranks have ended well, as have the programs of all others."""
    script = tmp_path / "train.py"
    script.write_text(_LEAVES_LATE)
    (tmp_path / "shared").mkdir()
    endpoint = f"file:{tmp_path / 'shared'}" if shared else None
    with Machines(tmp_path, "2", endpoint=endpoint, times=f"{SOON},silent=1.5,cut_off=2.5") as machines:
        first = machines.start(script=script)
        wait_for(lambda: _has_client(first) and (shared or sockets(client(first), "0A")), "its store")
        wait_for(lambda: not shared or _holds(tmp_path / "shared", b"card/1"), "its card")
        second = machines.start(script=script)
        wait_for(lambda: list(tmp_path.glob("leaves-*")), "the last rank's end")
        wait_for(lambda: len(children(zygote(first))) == 1, "the end of the first machine's rank")
        wait_for(lambda: not shared or _holds(tmp_path / "shared", b"done/0"), "its word for that")
        (leaving,) = (int(path.name.partition("-")[2]) for path in tmp_path.glob("leaves-*"))
        beyond, watcher = time.monotonic() + 3.0, client(second)
        stopped = kill_all(first) if how == "killed" else stop_all(first)[0]
        wait_for(lambda: time.monotonic() > beyond or not Path(f"/proc/{leaving}").exists(), "a while")
        if not shared:
            wait_for(lambda: not Path(f"/proc/{watcher}").exists(), "the end of its client")
        (tmp_path / "end").touch()
        done = second.finish()
        if how == "stopped":
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
    assert done.code == 0, done
    assert ("gave no sign of life" in done.err) is False
