"""The doctor on real machines: this one with faults planted, two behind a real sshd, two in networks of their own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep._proc import children, descendants, read
from lockstep.tools.doctor import child
from tests.faults.machines import network, set_link
from tests.launching import (
    Finished,
    Running,
    environment,
    gone_within,
    killed_afterwards,
    own_mount,
    run,
    wait_for,
)
from tests.namespaces import skip_unless
from tests.schemas import holds
from tests.sshd import Sshd, sshd

pytestmark = pytest.mark.timeout(480)

#: Seconds for a look that imports torch some times: more than its own limits, which say what hangs.
LIMIT = 400.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


def _left_in(temporary: Path) -> list[str]:
    """What a command has left in the folder for temporary files; torch makes its cache there where it is imported."""
    return [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]


def _start(folder: Path, *words: str, before: str = "", **env: str) -> Running:
    """The command itself imports nothing large, so it starts cold."""
    job_env = environment(folder, torch=True) | env
    return Running(["lockstep", *words], cwd=folder, env=job_env, cold=True, before=before)


def _quick(folder: Path, *options: str, before: str = "", **env: str) -> dict[str, Any]:
    with _start(folder, "doctor", "--quick", "--json", *options, before=before, **env) as job:
        return _read(job.finish(LIMIT))


def _read(done: Finished) -> dict[str, Any]:
    assert done.err == "", done
    report: dict[str, Any] = holds(done.out, "lockstep.doctor/1")
    assert done.code == int("wrong" in report["verdict"]), done
    return report


def _bad(findings: list[dict[str, str]]) -> list[tuple[str, str, str, str]]:
    """What is not ok; how busy this machine is, is no matter here. Each says what to do."""
    found = [each for each in findings if each["level"] != "ok" and "in the last minute" not in each["what"]]
    assert all(each["advice"] for each in found)
    return [(each["level"], each["about"], each["what"], each["advice"]) for each in found]


# This machine --------------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path, temporary: Path) -> None:
    with _start(tmp_path, "doctor", "-n", "2", TMPDIR=str(temporary)) as job:
        done = job.finish(LIMIT)
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert re.match(r"this machine: (all is well|\d warnings?)$", lines[0])
    assert any(re.match(r"  ok      versions: lockstep \S+, torch \S+, Python \S+$", line) for line in lines), done.out
    assert any(
        re.match(r"  (ok     |warning) a job: two ranks average 16 MiB in .*, 8 bytes in .*, over \w+$", line)
        for line in lines
    ), done.out
    assert _left_in(temporary) == []
    assert not (tmp_path / "state").exists() or not any((tmp_path / "state").rglob("*.log"))


def test_a_small_dev_shm(tmp_path: Path) -> None:
    report = _quick(tmp_path, before=own_mount("/dev/shm", "size=16m"))
    ((level, about, what, advice),) = [bad for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "/dev/shm"]
    assert level == "warning", about
    assert what.startswith("/dev/shm has 16 MiB: DataLoader workers pass batches through it")
    assert "docker run --shm-size=8g" in advice


def test_too_few_open_files(tmp_path: Path) -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
    report = _quick(tmp_path, "-n", "8", before=before)
    ((level, _, what, advice),) = [bad for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "open files"]
    assert (level, what) == ("wrong", "ulimit -n is 64, and 8 ranks need about 88 to start")
    assert "raise the hard limit" in advice


def test_variables_that_are_left_over_or_misspelt(tmp_path: Path) -> None:
    report = _quick(tmp_path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCKSTEP_BACKENDS="gloo", LOCKSTEP_LATE="x")
    assert [bad[:3] for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "variables"] == [
        ("warning", "variables", "LOCKSTEP_BACKENDS is not a variable of lockstep, and has no effect"),
        ("wrong", "variables", "LOCKSTEP_LATE='x': expected a positive number of seconds, e.g. LOCKSTEP_LATE=5"),
        (
            "wrong",
            "variables",
            "RANK=1, WORLD_SIZE=2, LOCAL_RANK=1 are left over: python train.py would take itself for rank 1 of 2, and "
            "wait for the others",
        ),
    ]


#: Python for ``before``: a network of the job's own, where somebody listens at a port.
_TAKEN = """
import ctypes, socket
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):
    raise OSError(ctypes.get_errno(), "unshare")
socket.create_server(("", 29500)).detach()
"""


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    skip_unless("unshare --net true", "a network of the test's own")
    report = _quick(tmp_path, before=_TAKEN)
    ((level, _, what, advice),) = [bad for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "ports"]
    assert level == "warning", "jobs on one machine do without it"
    assert re.match(r"port 29500, which --node-rank takes, is in use by process \d+ \(", what)
    assert "--master-port 29501" in advice


def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    report = _quick(tmp_path, "--folder", "runs", before=own_mount(tmp_path / "runs", "size=8m"))
    first, second = [bad for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "folder"]
    assert first[:3] == ("wrong", "folder", f"{tmp_path}/runs has 8 MiB left")
    assert second[2].startswith(f"{tmp_path}/runs is in memory (tmpfs)")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    report = _quick(tmp_path, "--folder", "runs", before=own_mount(tmp_path / "runs", "size=64k"))
    ((level, _, what, _),) = [bad for bad in _bad(report["hosts"][0]["findings"]) if bad[1] == "folder"]
    assert (level, what) == ("wrong", f"nothing can be written to {tmp_path}/runs (No space left on device)")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["a,,b"], "'' is not a host; expected HOST, USER@HOST or HOST:RANKS"),
        (["a", "a"], "a is named twice"),
        (["-n", "many"], "-n many: expected a whole number of ranks"),
    ],
)
def test_what_makes_no_sense(tmp_path: Path, options: list[str], said: str) -> None:
    done = run(["lockstep", "doctor", *options], tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("lockstep doctor: ")
    assert said in done.err


def test_a_torch_that_can_not_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object')")
    ended = child.run("lockstep.tools.doctor.torch_facts", limit=60.0, env={"PYTHONPATH": _first(tmp_path)})
    assert ended.code == 1
    assert ended.last_words.endswith("ImportError: libcudart.so.13: cannot open shared object")


def test_what_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it does not listen."""
    monkeypatch.setattr(child, "_PATIENCE", 0.5)
    (tmp_path / "sticks.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    ended = child.run("sticks", limit=6.0, env={"PYTHONPATH": _first(tmp_path)})
    assert ended.code is None
    assert gone_within([int((tmp_path / "pid").read_text())], 10) == []


def _first(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def _in_a_job(pid: int) -> bool:
    """Whether a job has ranks: a launcher that is killed before its zygote is there leaves its folder behind."""
    launchers = [each for each in descendants(pid) if "lockstep.tools.doctor.trial" in read(each, "cmdline")]
    return any(children(zygote) for launcher in launchers for zygote in children(launcher))


def test_nothing_is_left_when_it_is_killed(tmp_path: Path, temporary: Path) -> None:
    with _start(tmp_path, "doctor", TMPDIR=str(temporary)) as job:
        wait_for(lambda: _in_a_job(job.pid), "the short job", limit=LIMIT)
        there = job.tree()
        job.process.kill()
        with killed_afterwards(there):
            assert gone_within(there, 30) == []
            # What has begun after this looked at the tree tidies up as well, a moment later.
            wait_for(lambda: _left_in(temporary) == [], "the end of temporary files", limit=30)


def test_what_looks_at_a_machine_is_killed(tmp_path: Path, temporary: Path) -> None:
    """By the kernel, for one, where memory is out."""
    with _start(tmp_path, "doctor", "--json", TMPDIR=str(temporary)) as job:
        wait_for(lambda: _in_a_job(job.pid), "the short job", limit=LIMIT)
        looks, *below = job.tree()
        with killed_afterwards(below):
            os.kill(looks, signal.SIGKILL)
            report = _read(job.finish(LIMIT))
            assert gone_within(below, 30) == []
    (bad,) = [each for each in _bad(report["hosts"][0]["findings"]) if each[0] == "wrong"]
    assert bad[2].startswith("it has ended while it looked at a job of two ranks")


def test_ctrl_c_ends_it(tmp_path: Path, temporary: Path) -> None:
    with _start(tmp_path, "doctor", TMPDIR=str(temporary)) as job:
        wait_for(lambda: len(job.tree()) >= 1, "a look", limit=LIMIT)
        there = job.tree()
        os.kill(job.pid, signal.SIGINT)
        done = job.finish(LIMIT)
        assert (done.code, done.out) == (130, ""), done
        assert gone_within(there, 30) == []
    assert _left_in(temporary) == []


# Two hosts, over a real ssh ------------------------------------------------------------------------------------------


def _over_ssh(server: Sshd, folder: Path, *options: str, **env: str) -> Running:
    env = {"LOCKSTEP_SSH": server.client, "LOCKSTEP_BACKEND": "gloo", **env}
    return _start(folder, "doctor", *options, **env)


def test_two_hosts(server: Sshd, tmp_path: Path) -> None:
    before = set(descendants(server.pid))
    with _over_ssh(server, tmp_path, "--json", "one:2", "two") as job:
        report = _read(job.finish(LIMIT))
    one, two = report["hosts"]
    assert (one["name"], two["name"]) == ("one", "two")
    assert one["facts"]["ranks"] == 2
    for host in (one, two):
        assert {each["about"] for each in host["findings"]} >= {"versions", "GPUs", "cores", "memory", "ports", "a job"}
    said = {each["about"]: each["what"] for each in report["between"] if each["level"] != "wrong"}
    assert said["versions"].startswith("the same everywhere")
    assert re.match(r"they agree to [\d.]+ (µs|ms)$", said["clocks"])
    assert said["folder"] == f"{tmp_path} is the same on all hosts"
    assert re.match(r"one and two reach each other, in [\d.]+ (µs|ms)$", said["ways"])
    assert re.match(r"(one and two|two and one) average .* over gloo", said["a job"])
    assert gone_within(list(set(descendants(server.pid)) - before), 10) == []
    assert [name for name in os.listdir(tmp_path) if name != "state"] == []


def test_a_host_that_can_not_be_reached(server: Sshd, tmp_path: Path) -> None:
    with _over_ssh(server, tmp_path, "--quick", "one", "nobody") as job:
        done = job.finish(LIMIT)
    assert done.code == 1, done
    one, nobody, between = done.out.split("\n\n")
    assert one.startswith("one: ")
    assert nobody.startswith(
        "nobody: 1 thing is wrong\n  wrong   ssh: it can't be reached: ssh: connect to host 127.0.0.1"
    )
    assert "\n          next: start sshd there" in nobody
    assert "too few hosts were reached" in between


def test_a_host_that_does_not_know_this_user(server: Sshd, tmp_path: Path) -> None:
    config = (Path(server.client.rpartition(" ")[2])).read_text()
    (tmp_path / "client").write_text(re.sub("(?m)^ *IdentityFile.*$", "", config))
    client = f"ssh -F {tmp_path / 'client'}"
    with _over_ssh(server, tmp_path, "--quick", "--json", "two", LOCKSTEP_SSH=client) as job:
        report = _read(job.finish(LIMIT))
    ((_, _, what, advice),) = _bad(report["hosts"][0]["findings"])
    assert what.startswith("it can't be reached: ")
    assert "Permission denied" in what
    assert "ssh-copy-id two" in advice


def test_variables_here_are_looked_at_as_well(server: Sshd, tmp_path: Path) -> None:
    """Those that ssh does not pass on."""
    with _over_ssh(server, tmp_path, "--quick", "--json", "one", LOCKSTEP_LOTE="1") as job:
        report = _read(job.finish(LIMIT))
    assert _bad(report["between"]) == [
        (
            "warning",
            "variables",
            "here: LOCKSTEP_LOTE is not a variable of lockstep, and has no effect",
            "say LOCKSTEP_LATE, or unset it",
        )
    ]


def test_nothing_is_left_on_hosts_when_it_is_killed(server: Sshd, tmp_path: Path) -> None:
    before = set(descendants(server.pid))
    with _over_ssh(server, tmp_path, "one", "two") as job:
        wait_for(lambda: _in_a_job(server.pid), "the short jobs", limit=LIMIT)
        there = list(set(descendants(server.pid)) - before)
        job.process.kill()
        with killed_afterwards(there):
            assert gone_within(there, 20) == [], "long before the hosts would take silence for the end"
    assert [name for name in os.listdir(tmp_path) if name != "state"] == []


# Two machines in networks of their own -------------------------------------------------------------------------------

#: In place of ssh: the shell of a machine in a network of its own, with its own name and its own /etc/hosts.
_SSH = """#!/bin/sh
if [ "$1" = -G ]; then echo "hostname $3"; exit; fi
while [ "$1" != -- ]; do shift; done
mount="mount --bind {folder}/hosts-$2 /etc/hosts && hostname $2"
exec nsenter --net=/run/netns/$2 unshare --mount --uts --propagation private sh -c "$mount && $3"
"""


class _Machines:
    """Two machines that find each other by /etc/hosts, each as Debian writes it."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder, self.names = folder, names
        self.write(0, f"127.0.1.1 {names[0]}", f"10.77.0.2 {names[1]}")
        self.write(1, f"10.77.0.1 {names[0]}", f"127.0.1.1 {names[1]}")
        self._ssh = folder / "ssh"
        self._ssh.write_text(_SSH.format(folder=folder))
        self._ssh.chmod(0o700)

    def write(self, number: int, *lines: str) -> None:
        """Write a machine's /etc/hosts."""
        text = "\n".join(["127.0.0.1 localhost", *lines, ""])
        (self.folder / f"hosts-{self.names[number]}").write_text(text)

    def look(self, *options: str) -> tuple[list[dict[str, Any]], list[tuple[str, str, str, str]]]:
        """Return what is between them, and what of it is not ok."""
        env = {"LOCKSTEP_SSH": str(self._ssh), "LOCKSTEP_BACKEND": "gloo"}
        with _start(self.folder, "doctor", "--json", *options, *self.names, **env) as job:
            report = _read(job.finish(LIMIT))
        self.report = report
        return report["between"], _bad(report["between"])


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[_Machines]:
    skip_unless("unshare --uts --net true", "machines of the test's own")
    with network(2, "doctor") as names:
        yield _Machines(tmp_path, names)


@pytest.mark.campaign  # two hosts are looked at by every run of the tests, these more quickly
def test_machines_as_debian_names_them(machines: _Machines) -> None:
    """The whole of it, with a job over their network."""
    between, bad = machines.look()
    assert [each for each in bad if each[0] == "wrong"] == []
    said = {each["about"]: each["what"] for each in between}
    assert re.match(r"doctor-1 and doctor-2 reach each other, in ", said["ways"])
    assert re.match(r"(doctor-1 and doctor-2|doctor-2 and doctor-1) average .* over gloo", said["a job"])
    for host in machines.report["hosts"]:
        ((level, _, what, _),) = [each for each in _bad(host["findings"]) if each[1] == "names"]
        assert level == "warning"
        assert what.startswith(f"this machine's own name, {host['name']}, resolves to 127.0.1.1")


def test_a_name_that_leads_back(machines: _Machines) -> None:
    machines.write(1, "127.0.1.1 doctor-2 doctor-1")
    _, bad = machines.look("--quick")
    ((level, _, what, advice),) = [each for each in bad if "own name" not in each[2]]
    assert (level, what) == (
        "wrong", "on doctor-2 the name doctor-1 resolves to 127.0.1.1, doctor-2 itself, not to doctor-1",
    )  # fmt: skip
    assert "/etc/hosts on doctor-2" in advice


def test_a_name_that_leads_back_where_nobody_meets(machines: _Machines) -> None:
    machines.write(0, "127.0.1.1 doctor-1 doctor-2")
    _, bad = machines.look("--quick")
    assert [each[:3] for each in bad] == [
        (
            "warning",
            "ways",
            "on doctor-1 the name doctor-2 resolves to 127.0.1.1, doctor-1 itself, not to doctor-2; another address of "
            "doctor-2 is reached, so that jobs run that do not meet there",
        )
    ]


def test_a_name_that_one_machine_does_not_know(machines: _Machines) -> None:
    machines.write(1)
    _, bad = machines.look("--quick")
    assert [each[2].partition(":")[0] for each in bad] == [
        "doctor-2 does not know the name doctor-1, which is doctor-1"
    ]


def test_a_network_that_is_cut(machines: _Machines) -> None:
    set_link(machines.names, 2, "down")
    _, bad = machines.look("--quick")
    assert {each[2] for each in bad} >= {
        "doctor-1 does not reach doctor-2 at doctor-2 (10.77.0.2) within 3 s",
        "doctor-2 does not reach doctor-1 at doctor-1 (10.77.0.1) within 3 s",
    }
    assert all("firewall" in each[3] for each in bad)


# What a bug report needs ---------------------------------------------------------------------------------------------


def test_env_has_what_a_report_needs_and_no_secret(tmp_path: Path) -> None:
    key = "0123456789abcdef" * 4
    secrets = {"LOCKSTEP_KEY": key, "RAY_TOKEN": "open-sesame", "TORCH_HOME": "https://me:pa55@host/hf_abcdefgh12345"}
    with _start(tmp_path, "doctor", "--env", NCCL_DEBUG="INFO", **secrets) as job:
        done = job.finish(LIMIT)
    assert (done.code, done.err) == (0, ""), done
    names = ("lockstep", "torch", "Python", "system", "processor", "cores", "topology", "binding", "memory", "GPUs")
    for name in (*names, "backends"):
        assert re.search(rf"^{name} +\S", done.out, re.MULTILINE), name
    assert "\n  NCCL_DEBUG=INFO\n" in done.out
    assert "\n  LOCKSTEP_KEY=(set; not shown)\n" in done.out
    with _start(tmp_path, "doctor", "--env", "--json", NCCL_DEBUG="INFO", **secrets) as job:
        as_json = job.finish(LIMIT)
    told = holds(as_json.out, "lockstep.doctor.env/1")
    assert (told["variables"]["NCCL_DEBUG"], told["variables"]["LOCKSTEP_KEY"]) == ("INFO", "(set; not shown)")
    assert "gloo" in told["torch"]["backends"]
    assert "hostname" not in told["facts"]
    for secret in (key, "open-sesame", "pa55", "hf_abcdefgh"):
        assert secret not in done.out
        assert secret not in as_json.out
