"""Start training.py on machines that find each other: launchers on this one, or in networks of their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from lockstep import knobs
from lockstep._proc import children
from lockstep.launch.ports import free_port
from tests.faults import jobs
from tests.launching import Running, environment, python_path
from tests.namespaces import skip_unless

#: Times for machines that hear of each other sooner. What is lost, or cut off, is so no sooner than for users.
SOON = "beat=0.1,last_call=0.5"

#: Python for ``before``: the job lives in a network of its own. (CLONE_NEWNET; os.setns came with Python 3.12.)
_ENTER = """
import ctypes, os
fd = os.open("/run/netns/{name}", os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(fd, 0x40000000):
    raise OSError(ctypes.get_errno(), "setns")
os.close(fd)
"""


class Machines:
    """Launchers of one job over ``folder``, started one after the other.

    Args:
        folder: of the training.
        nodes: as after ``--nnodes``.
        endpoint: as after ``--rdzv``; None: a free port of this machine.
        network: the names of network namespaces, one for each machine; none: all are on this machine.
        options: more of ``lockstep run``.
        times: how long they wait for what, as in ``LOCKSTEP_TIMES``; empty: as long as for users.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str,
        *,
        endpoint: str | None = None,
        network: tuple[str, ...] = (),
        options: tuple[str, ...] = (),
        times: str = SOON,
    ) -> None:
        self._folder = folder
        self._times = times
        self._network = network
        self._options = ["--nnodes", nodes, "--rdzv", endpoint or f"127.0.0.1:{free_port()}", "--regroup-after", "0.5"]
        self._options += options
        self._undo = ExitStack()
        self.running: list[Running] = []
        #: Where each machine's temporary files are.
        self.temporary: list[Path] = []

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def start(
        self,
        *options: str,
        ranks: int = 1,
        restarts: int = 2,
        script: Path = jobs.SCRIPT,
        place: int | None = None,
        launcher: tuple[str, ...] = (),
        before: str = "",
        **env: str,
    ) -> Running:
        """Start one more; ``options`` are the script's, ``launcher`` further ones of ``lockstep run``, ``before`` is as
        for :class:`Running`. ``place``: its network, counted from 0; None: the next one."""
        number = len(self.running)
        command = ["lockstep", "run", "-n", str(ranks), "--max-restarts", str(restarts), *self._options, *launcher]
        command += ["--log-dir", str(self._folder / f"logs-{number}"), str(script), str(self._folder), *options]
        # Launchers on one machine would find that their ranks can share memory.
        env = {
            "LOCKSTEP_BACKEND": "gloo",
            knobs.TIMES: self._times,
            "PYTHONPATH": python_path(jobs.SCRIPT.parents[2]),
            **env,
        }
        if self._network:
            before += _ENTER.format(name=self._network[number if place is None else place])
        self.temporary.append(Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="machine-"))))
        env.setdefault("TMPDIR", str(self.temporary[-1]))
        job = Running(command, cwd=self._folder, env=environment(self._folder, torch=True, **env), before=before)
        self.running.append(self._undo.enter_context(job))
        return job

    def left(self, *, lost: Running | None = None) -> list[str]:
        """What the job has left on any machine, now that all have ended: processes, and files of its own.

        A machine of which everything died at once can't remove its files; ``lost`` says which. (The next job does.)
        """
        found = [f"process {pid} in {name}" for name in self._network for pid in processes(name)]
        for machine, temporary in zip(self.running, self.temporary, strict=True):
            if machine is not lost:
                found += [str(path) for path in temporary.glob("lockstep-*")]
        return found


def zygote(machine: Running) -> int:
    """The process that forks a machine's ranks, once it has forked any."""
    return children(machine.pid)[0]


def client(machine: Running) -> int:
    """A machine's rendezvous client: the first process that the zygote has forked."""
    return children(zygote(machine))[0]


def sockets(pid: int, state: str) -> list[str]:
    """The own addresses of a process's TCP sockets in a state (``0A``: it listens, ``01``: it is connected), as /proc
    has them."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


def kill_all(machine: Running) -> list[int]:
    """Kill a machine's processes, all at once; they are returned."""
    everyone = [machine.pid, *machine.tree()]
    for pid in everyone:
        with suppress(ProcessLookupError):  # an end of its own
            os.kill(pid, signal.SIGKILL)
    return everyone


def stop_all(machine: Running) -> tuple[list[int], float]:
    """Have a machine's processes stand still, all at once; they and the moment are returned."""
    everyone = [machine.pid, *machine.tree()]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    return everyone, time.monotonic()


@contextmanager
def network(count: int, tag: str) -> Iterator[tuple[str, ...]]:
    """Machines in networks of their own, joined by a bridge that is in another: 10.77.0.1 and so on.

    Nothing of it touches this machine's own network. Skips the test where namespaces can't be made.

    Args:
        count: how many.
        tag: begins the namespaces' names.
    """
    if shutil.which("ip") is None:
        pytest.skip("there is no ip (iproute2)")
    skip_unless(f"ip netns add {tag}-try && ip netns del {tag}-try", "a network of the test's own")
    names = tuple(f"{tag}-{number}" for number in range(1, count + 1))
    hub = f"{tag}-hub"
    try:
        _ip(f"netns add {hub}", f"-n {hub} link add br0 type bridge", f"-n {hub} link set br0 up")
        for number, name in enumerate(names, start=1):
            _ip(
                f"netns add {name}",
                f"-n {name} link set lo up",
                f"-n {name} link add eth0 type veth peer name p{number} netns {hub}",
                f"-n {hub} link set p{number} master br0 up",
                f"-n {name} addr add 10.77.0.{number}/24 dev eth0",
                f"-n {name} link set eth0 up",
            )
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def set_link(names: tuple[str, ...], number: int, state: str) -> None:
    """Cut a machine off, or let it back: ``state`` is ``down`` or ``up``. Nobody gets a reset."""
    _ip(f"-n {_hub(names)} link set p{number} {state}")


def deafen(names: tuple[str, ...], number: int) -> None:
    """Drop all that is sent to a machine, while what it sends still arrives; until :func:`let_through`."""
    _run(f"tc -n {_hub(names)} qdisc add dev p{number} root blackhole")


def silence(names: tuple[str, ...], number: int) -> None:
    """Drop all that a machine sends, while what is sent to it still arrives; until :func:`let_through`."""
    _run(f"tc -n {names[number - 1]} qdisc add dev eth0 root blackhole")


def set_rate(names: tuple[str, ...], mbit: float) -> None:
    """Have each machine's link carry so many Mbit/s each way; a packet takes its time, the next one waits.

    The queue has room for a quarter of a second, and for some large packets in any case.
    """
    room = max(200_000, round(mbit * 1e6 / 8 / 4))
    for where, device in _ends(names):
        _run(f"tc -n {where} qdisc replace dev {device} root tbf rate {mbit}mbit burst 3000 limit {room}")


def let_through(names: tuple[str, ...]) -> None:
    """Undo whatever was done to the links."""
    for number in range(1, len(names) + 1):
        set_link(names, number, "up")
    for where, device in _ends(names):
        subprocess.run(["tc", "-n", where, "qdisc", "del", "dev", device, "root"], check=False, capture_output=True)


def processes(name: str) -> list[int]:
    """The processes in a network namespace."""
    done = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def _ends(names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Both ends of each machine's link: namespace and device."""
    hub = _hub(names)
    return [(name, "eth0") for name in names] + [(hub, f"p{number}") for number in range(1, len(names) + 1)]


def _hub(names: tuple[str, ...]) -> str:
    return names[0].rpartition("-")[0] + "-hub"


def _ip(*commands: str) -> None:
    for command in commands:
        _run(f"ip {command}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
