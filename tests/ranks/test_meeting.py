"""Machines that meet: late messages, clocks that differ, machines that do not belong to the job, or come late."""

from __future__ import annotations

import os
import re
import signal
import socket
from pathlib import Path

import pytest

from lockstep._proc import children
from lockstep.launch.ports import free_port
from tests.faults.machines import SOON, Machines, client, sockets, zygote
from tests.launching import OWN_MOUNTS, Finished, Running, python_path, start, wait_for
from tests.namespaces import skip_unless

pytestmark = pytest.mark.timeout(150)

KEY, OTHER = "ab" * 32, "cd" * 32

_SHORT = """
import os, sys
import lockstep
world = lockstep.init()
open(f"{sys.argv[1]}/started-{world.rank}-of-{world.world_size}", "w").close()
assert world.mean(float(world.rank)) == (world.world_size - 1) / 2
while len(sys.argv) > 2 and world.mean(float(os.path.exists(sys.argv[2]))) < 1.0:
    pass
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A job that is over at once, or when the file is there that is its second argument."""
    path = tmp_path / "train.py"
    path.write_text(_SHORT)
    return path


def _ends(machines: Machines, limit: float = 60.0) -> list[Finished]:
    return [machine.finish(limit) for machine in machines.running]


def _serve(machine: Running) -> None:
    """Wait until a machine serves the store that all meet at."""
    wait_for(lambda: children(machine.pid) and children(zygote(machine)), "its client")
    wait_for(lambda: sockets(client(machine), "0A"), "its store")


def _started(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("started-*")}


_TWO = {"started-0-of-2", "started-1-of-2"}

#: Whatever is written while machines meet and leave.
_ALL = "tickets|card|attempt|proof|here|clock|fate|verdict|done|result|gone|left|waiting|refused|rank"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shared", [False, True], ids=["port", "file"])
def test_late_messages(tmp_path: Path, script: Path, seed: int, shared: bool) -> None:
    """Once as late as machines wait for each other where users have them; else both in a quarter of the time."""
    (tmp_path / "shared").mkdir()
    endpoint = f"file:{tmp_path / 'shared'}" if shared else None
    times, late = (SOON, 0.1) if seed or not shared else ("", 0.4)
    with Machines(tmp_path, "2", endpoint=endpoint, times=times) as machines:
        for number in range(2):
            machines.start(script=script, before=_late(_ALL, late, seed=2 * seed + number))
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done
    assert _started(tmp_path) == _TWO
    assert not any("start again" in each.err for each in done), done
    assert not any(re.search(r"^\[[WE]\d+ ", each.err, re.MULTILINE) for each in done), "no warnings of torch's C++"


def _late(pattern: str, seconds: float, *, seed: int | None = None) -> str:
    return f"from tests.ranks.planted import late_messages\nlate_messages({pattern!r}, {seconds}, seed={seed})\n"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("number", [0, 1])
def test_machines_without_the_jobs_key_are_refused_however_late_messages_are(
    tmp_path: Path, script: Path, number: int, seed: int
) -> None:
    times, late = (SOON, 0.15) if seed or number else ("", 0.6)
    with Machines(tmp_path, "2", times=times) as machines:
        for index in range(2):
            key = KEY if index == number else ""
            machines.start(script=script, before=_late(_ALL, late, seed=2 * seed + index), LOCKSTEP_KEY=key)
        done = _ends(machines)
    assert [each.code for each in done] == [1, 1], done
    assert "does not know the job's key that this machine has" in done[number].err
    assert "has a key for this job, and this machine has none" in done[1 - number].err
    assert not _started(tmp_path)


@pytest.mark.parametrize("ahead", [-30.0, -5.0, 3.0, 30.0])
def test_clocks_may_differ(tmp_path: Path, script: Path, ahead: float) -> None:
    with Machines(tmp_path, "2") as machines:
        for clock in (0.0, ahead):
            before = f"from tests.ranks.planted import another_clock\nanother_clock({clock})\n"
            machines.start(script=script, before=before)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done
    assert _started(tmp_path) == _TWO
    for each in done:
        assert f"is {abs(ahead):.0f} s ahead of that of machine " in each.err, each.err


@pytest.mark.parametrize(("message", "times"), [("proof", ""), ("clock", f"{SOON},silent=1.5")])
def test_a_machine_that_stalls_as_a_round_is_made(tmp_path: Path, script: Path, message: str, times: str) -> None:
    """It wakes up when the others have given it up, and all meet again: never one of them alone."""
    stalls = (
        "import os, signal, torch.distributed as dist\n"
        "plain = dist.Store.set\n"
        "def stall(self, key, value):\n"
        f"    if key.startswith({message!r}) and not os.path.exists('stalled'):\n"
        "        open('stalled', 'w').close()\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    plain(self, key, value)\n"
        "dist.Store.set = stall\n"
    )
    tells = (
        "import lockstep.rendezvous.client as client\n"
        "plain = client._Client._fail\n"
        "def fail(self, *what):\n"
        "    plain(self, *what)\n"
        "    open('failed', 'w').close()\n"
        "client._Client._fail = fail\n"
        "connect = client._Client._connect\n"
        "def connected(self, *what):\n"
        "    connect(self, *what)\n"
        "    open('connected', 'w').close()\n"
        "client._Client._connect = connected\n"
    )
    with Machines(tmp_path, "2", times=times) as machines:
        machines.start(script=script, before=tells)
        wait_for((tmp_path / "connected").exists, "the first machine's store")  # else the one that stalls may have it
        stalled = machines.start(script=script, before=stalls)
        wait_for((tmp_path / "failed").exists, "the end of the attempt", limit=30)
        assert not _started(tmp_path), "none starts with fewer machines than the minimum"
        os.kill(client(stalled), signal.SIGCONT)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done
    assert _started(tmp_path) == _TWO


@pytest.mark.parametrize(("key", "times"), [(OTHER, ""), ("", SOON)], ids=["wrong", "none"])
def test_a_stranger_does_not_disturb_a_running_job(tmp_path: Path, script: Path, key: str, times: str) -> None:
    with Machines(tmp_path, "2:3", times=times) as machines:
        for _ in range(2):
            machines.start(str(tmp_path / "go"), script=script, LOCKSTEP_KEY=KEY)
        wait_for(lambda: _started(tmp_path) == _TWO, "training")
        stranger = machines.start(script=script, LOCKSTEP_KEY=key)
        refused = stranger.finish()
        (tmp_path / "go").touch()
        done = [machine.finish() for machine in machines.running[:2]]
    assert refused.code == 1, refused
    assert ("has a key for this job" if not key else "does not know the job's key") in refused.err
    assert [each.code for each in done] == [0, 0], done
    named = [each.err for each in done if "a machine was not admitted" in each.err]
    assert len(named) == 1, done
    assert f"the machine {socket.gethostname()} (127.0.0.1) does not know the job's key" in named[0]
    assert not any("start again" in each.err for each in done)


def test_a_stranger_does_not_keep_the_others_from_meeting(tmp_path: Path, script: Path) -> None:
    with Machines(tmp_path, "2:4") as machines:
        _serve(machines.start(script=script, LOCKSTEP_KEY=KEY))
        second = machines.start(script=script, LOCKSTEP_KEY=KEY)
        wait_for(lambda: children(second.pid) and children(zygote(second)), "its client")
        wait_for(lambda: sockets(client(second), "01"), "its connection")
        machines.start(script=script, LOCKSTEP_KEY=OTHER)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0, 1], done
    assert _started(tmp_path) == _TWO


def test_a_stranger_that_has_left_is_named_and_does_not_end_the_others(tmp_path: Path, script: Path) -> None:
    """It comes again with the right key. Those that wait say so long after they would end if they counted it."""
    with Machines(tmp_path, "3", times="beat=0.1,last_call=0.2,searching=3") as machines:
        first = machines.start(script=script, LOCKSTEP_KEY=KEY)
        _serve(first)
        refused = machines.start(script=script, LOCKSTEP_KEY=OTHER).finish()
        second = machines.start(script=script, LOCKSTEP_KEY=KEY)
        said = [machine.read_errors_to("lockstep: 2 of 3 machines are here: ") for machine in (first, second)]
        machines.start(script=script, LOCKSTEP_KEY=KEY)
        done = [machine.finish() for machine in machines.running if machine is not machines.running[1]]
    assert refused.code == 1, refused
    assert [each.code for each in done] == [0, 0, 0], done
    assert _started(tmp_path) == {f"started-{rank}-of-3" for rank in range(3)}
    assert (said[0] + done[0].err).count("a machine was not admitted: ") == 1, done[0]
    assert (said[1] + done[1].err).count("a machine was not admitted: ") <= 1, done[1]


def test_all_end_where_too_few_of_those_that_are_here_fit(tmp_path: Path, script: Path) -> None:
    """One of them has not found that out when the others leave, and would wait for them."""
    with Machines(tmp_path, "3") as machines:
        _serve(machines.start(script=script, LOCKSTEP_KEY=KEY))
        second = machines.start(script=script, LOCKSTEP_KEY=KEY, LOCKSTEP_TIMES=f"{SOON},last_call=300,searching=0.5")
        said = second.read_errors_to("lockstep: 2 of 3 machines are here: ")
        machines.start(script=script, LOCKSTEP_KEY=OTHER)
        done = _ends(machines)
    assert [each.code for each in done] == [1, 1, 1], done
    why = r"lockstep: the rendezvous at \S+ failed: the machine .* does not know the job's key"
    for each in (done[0].err, said + done[1].err, done[2].err):
        assert re.search(why, each), each
    assert not _started(tmp_path)


def test_a_stranger_with_the_store(tmp_path: Path, script: Path) -> None:
    """Without it there is nowhere to meet, so all end, and none looks for it until its time is over."""
    with Machines(tmp_path, "2:4") as machines:
        _serve(machines.start(script=script, LOCKSTEP_KEY=OTHER))
        machines.start(script=script, LOCKSTEP_KEY=KEY)
        done = _ends(machines, limit=30)
    assert [each.code for each in done] == [1, 1], done
    assert all("does not know the job's key that this machine has" in each.err for each in done), done
    assert not _started(tmp_path)


@pytest.mark.parametrize(
    ("launcher", "backend", "said"),
    [
        (("--nnodes", "3"), "gloo", "was started with --nnodes 3, and this machine with --nnodes 2"),
        (
            (),
            "",
            "leaves the choice of a backend to lockstep, and this machine asks for the backend",
        ),
    ],
    ids=["nnodes", "backend"],
)
def test_machines_that_can_not_train_together_end_at_once(
    tmp_path: Path, script: Path, launcher: tuple[str, ...], backend: str, said: str
) -> None:
    with Machines(tmp_path, "2") as machines:
        machines.start(script=script)
        machines.start(script=script, launcher=launcher, LOCKSTEP_BACKEND=backend)
        done = _ends(machines, limit=30)
    assert [each.code for each in done] == [1, 1], done
    assert said in done[0].err, done
    assert not _started(tmp_path)


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
@pytest.mark.parametrize("other", ["", "# an older copy\n"], ids=["the same", "an older one"])
def test_another_text_of_the_program_is_told_and_no_other_folder(tmp_path: Path, other: str, as_module: bool) -> None:
    with Machines(tmp_path, "2") as machines:
        for folder, text in (("first", _SHORT), ("second", _SHORT + other)):
            script = tmp_path / folder / "program.py"
            script.parent.mkdir()
            script.write_text(text)
            if as_module:
                path = python_path(script.parent, Path(__file__).parents[2])
                machines.start(script=Path("program"), launcher=("-m",), PYTHONPATH=path)
            else:
                machines.start(script=script)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done
    name = "-m program" if as_module else "program\\.py"
    told = rf"the machines differ in what they run: {name} \(digest \w{{8}}\) on machine 0 \(.*\); {name} \(digest "
    assert [bool(re.search(told, each.err)) for each in done] == [bool(other)] * 2, done
    assert not other or all(each.err.count("the machines differ") == 1 for each in done)


def test_what_machines_bring_is_told(tmp_path: Path, script: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(_SHORT)
    with Machines(tmp_path, "2") as machines:
        machines.start(script=script, restarts=1)
        machines.start(script=other, restarts=3)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done
    for each in done:
        text = r"machines differ in what they run: (train|other)\.py \(digest \w{8}\) on machine 0 \(.*\); "
        assert re.search(text, each.err), each.err
        assert "the machines differ in --max-restarts: " in each.err
        assert re.search(r"lockstep: 2 machines, 2 ranks: rank 0 on \S+, 127\.0\.0\.1; rank 1 on ", each.err), each.err


def test_who_waits_says_who_is_here(tmp_path: Path, script: Path) -> None:
    with Machines(tmp_path, "2", options=("--join-timeout", "2.5"), times="searching=0.5") as machines:
        machines.start(script=script)
        (done,) = _ends(machines)
    assert done.code == 1
    assert f"lockstep: 1 of 2 machines is here: {socket.gethostname()}, 127.0.0.1\n" in done.err, done.err
    assert "too few machines came to 127.0.0.1:" in done.err


def test_a_name_that_is_known_only_later(tmp_path: Path, script: Path) -> None:
    endpoint = f"box-0.train:{free_port()}"
    known = tmp_path / "known"
    before = (
        f"from tests.ranks.planted import unknown_until\nunknown_until({str(known)!r}, 'box-0.train', '127.0.0.1')\n"
    )
    local = ("--local-addr", "127.0.0.1")
    with Machines(tmp_path, "2", endpoint=endpoint, options=local, times=f"{SOON},searching=0.5") as machines:
        first = machines.start(script=script, before=before)
        assert first.process.stderr is not None
        said = first.process.stderr.readline()
        assert said.startswith("lockstep: the name box-0.train can't be resolved: "), said
        known.touch()
        machines.start(script=script, before=before)
        done = _ends(machines)
    assert [each.code for each in done] == [0, 0], done


def test_another_program_at_the_port_is_told_by_what_it_does(tmp_path: Path, script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with Machines(tmp_path, "2", endpoint=endpoint, options=("--join-timeout", "2.5")) as machines:
            machines.start(script=script)
            (done,) = _ends(machines, limit=20)
    assert done.code == 1
    assert f"a program accepts connections at {endpoint}, but does not answer like a launcher's store" in done.err
    assert set(re.findall(r"\S+:\d{4,5}\b", done.err)) <= {endpoint}, "and no address of torch's"


def _fixed(
    folder: Path,
    script: Path,
    node: int,
    port: int,
    *,
    backend: str = "",
    host: str = "127.0.0.1",
    before: str = "",
    times: str = "",
) -> Running:
    """One of two machines that are known beforehand."""
    options = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", host, "--master-port", str(port)]
    options += ["--log-dir", str(folder / f"logs-{node}"), "--all-output"]
    command = ["lockstep", "run", "-n", "1", *options, str(script), str(folder)]
    return start(command, folder, torch=True, before=before, LOCKSTEP_BACKEND=backend, LOCKSTEP_TIMES=times)


def test_hosts_that_ask_for_different_backends(tmp_path: Path, script: Path) -> None:
    """All ranks say so, and at once: each would wait for the others in its own way."""
    port = free_port()
    with (
        _fixed(tmp_path, script, 0, port, backend="gloo") as first,
        _fixed(tmp_path, script, 1, port) as second,
    ):
        done = [first.finish(30), second.finish(30)]
    assert [each.code for each in done] == [1, 1], done
    host = socket.gethostname()
    for rank, each in enumerate(done):
        text = f"rank {rank} of 2: the ranks ask for different backends (rank 0 on {host}: gloo; rank 1 on {host}: not "
        assert text in each.out + each.err, each
    assert not _started(tmp_path)


def test_a_host_that_starts_before_the_first(tmp_path: Path, script: Path) -> None:
    """It says what it waits for, in a line of lockstep's, and after as long as for users."""
    port = free_port()
    with _fixed(tmp_path, script, 1, port, backend="gloo") as second:
        assert second.process.stderr is not None
        said = second.process.stderr.readline()
        assert f"waiting for rank 0, which does not listen yet at 127.0.0.1:{port}" in said
        with _fixed(tmp_path, script, 0, port, backend="gloo") as first:
            done = [first.finish(), second.finish()]
    assert [each.code for each in done] == [0, 0], done
    assert not any("c10d" in each.err for each in done), "torch's C++ has nothing to warn of"


def _own_hosts(file: Path) -> str:
    """Python for ``before``: the job, with torch's C++, finds in ``file`` what names mean."""
    skip_unless("mount --bind /etc/hosts /etc/hosts && umount /etc/hosts", "names of the job's own")
    return f"{OWN_MOUNTS}subprocess.run({['mount', '--bind', str(file), '/etc/hosts']!r}, check=True)\n"


def test_a_first_host_whose_own_name_is_known_only_later(tmp_path: Path, script: Path) -> None:
    port, hosts = free_port(), tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    before, name, soon = _own_hosts(hosts), "box-0.train.invalid", "searching=0.5"
    with _fixed(tmp_path, script, 0, port, backend="gloo", host=name, before=before, times=soon) as first:
        assert first.process.stderr is not None
        said = first.process.stderr.readline()
        assert f"waiting for rank 0, which has no address yet under {name}:{port}: " in said, said
        with hosts.open("a") as file:
            file.write(f"127.0.0.1 {name}\n")
        with _fixed(tmp_path, script, 1, port, backend="gloo", host=name, before=before, times=soon) as second:
            done = [first.finish(), second.finish()]
    assert [each.code for each in done] == [0, 0], done
    assert not any("c10d" in each.err for each in done), "torch's C++ has nothing to warn of"


def test_a_first_host_whose_own_name_stays_unknown_says_so(tmp_path: Path) -> None:
    script, port, name = tmp_path / "train.py", free_port(), "box-0.train.invalid"
    script.write_text("import lockstep\nlockstep.init('gloo', timeout=1)\n")
    with _fixed(tmp_path, script, 0, port, host=name) as first:
        done = first.finish()
    assert done.code == 1, done
    text = f"rank 0 of 2 could not join the world at {name}:{port} (backend gloo, timeout 1 s): "
    assert f"{text}rank 0 has no address under {name}:{port}: " in done.err
    assert "c10d" not in done.err


def test_a_file_that_is_not_the_launchers_is_told_at_once(tmp_path: Path, script: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "lockstep.rendezvous").write_text("a list of someone else's\n")
    with Machines(tmp_path, "2", endpoint=f"file:{tmp_path / 'shared'}") as machines:
        machines.start(script=script)
        (done,) = _ends(machines, limit=30)
    assert done.code == 1, done
    assert "the file in which the launchers meet, holds something else from byte 0 of 25 on" in done.err
    assert "remove the file and start again" in done.err
    assert "connection" not in done.err


_LEAVES = """
import lockstep.rendezvous.client as client
see_off = client._Client._see_off
def tell(self, *what):
    open("leaving", "w").close()
    return see_off(self, *what)
client._Client._see_off = tell
"""

_LOOKS_LATE = """
import os, time
import lockstep.rendezvous.client as client
plain = client._Client._end_if_over
def late(self, *what):
    open("waits", "w").close()
    until = time.monotonic() + 1.0
    while not os.path.exists("leaving") and time.monotonic() < until:
        time.sleep(0.01)
    if os.path.exists("leaving"):
        time.sleep(0.7)  # in which a machine that waits for nobody is gone
    return plain(self, *what)
client._Client._end_if_over = late
"""


def test_a_newcomer_that_looks_late_hears_how_the_job_has_ended(tmp_path: Path, script: Path) -> None:
    """The machine with the store waits for it, or it would look for the store until --join-timeout."""
    with Machines(tmp_path, "2") as machines:
        _serve(machines.start(str(tmp_path / "go"), script=script, before=_LEAVES))
        machines.start(str(tmp_path / "go"), script=script)
        wait_for(lambda: _started(tmp_path) == _TWO, "the job")
        machines.start(str(tmp_path / "go"), script=script, before=_LOOKS_LATE)
        wait_for((tmp_path / "waits").exists, "the newcomer")
        (tmp_path / "go").touch()
        done = _ends(machines, limit=40)
    assert [each.code for each in done] == [0, 0, 0], done
