"""Start training.py on machines that find each other: launchers on this one, or in networks of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lockstep._proc import children
from lockstep.launch.spec import free_port
from tests.faults import jobs
from tests.launching import Running, environment, python_path
from tests.namespaces import skip_unless

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
    """

    def __init__(self, folder: Path, nodes: str, *, endpoint: str | None = None, network: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._network = network
        self._options = ["--nnodes", nodes, "--rdzv", endpoint or f"127.0.0.1:{free_port()}", "--regroup-after", "0.5"]
        self._undo = ExitStack()
        self.running: list[Running] = []

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def start(
        self, *options: str, ranks: int = 1, restarts: int = 2, script: Path = jobs.SCRIPT, **env: str
    ) -> Running:
        """Start one more; ``options`` are the script's."""
        number = len(self.running)
        command = ["lockstep", "run", "-n", str(ranks), "--max-restarts", str(restarts), *self._options]
        command += ["--log-dir", str(self._folder / f"logs-{number}"), str(script), str(self._folder), *options]
        # Launchers on one machine would find that their ranks can share memory.
        env = {"LOCKSTEP_BACKEND": "gloo", "PYTHONPATH": python_path(jobs.SCRIPT.parents[2]), **env}
        before = _ENTER.format(name=self._network[number]) if self._network else ""
        job = Running(command, cwd=self._folder, env=environment(self._folder, torch=True, **env), before=before)
        self.running.append(self._undo.enter_context(job))
        return job


def zygote(machine: Running) -> int:
    """The process that forks a machine's ranks, once it has forked any."""
    return children(machine.pid)[0]


def client(machine: Running) -> int:
    """A machine's rendezvous client: the first process that the zygote has forked."""
    return min(children(zygote(machine)))


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
    hub = names[0].rpartition("-")[0] + "-hub"
    _ip(f"-n {hub} link set p{number} {state}")


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
