"""Two pods of Kubernetes on this machine: what their container's command finds around it, without a cluster.

Each has processes, a network, a host name, /etc/hosts, /dev/shm and mounts of its own (unshare), and its command is
process 1 there, as in a pod. A cable joins the two. What a kubelet does to a command before it starts it is done here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep._proc import children, descendants
from tests.launching import LIMIT, wait_for

#: What the machine must let us do; see tests/namespaces.py.
NEEDS = "unshare --net --uts --pid --fork sh -ec 'ip link add c0 type veth peer name c1; mount -t tmpfs tmpfs /mnt'"
_START = """
read go
ip link set lo up
ip address add "$ADDRESS"/24 dev eth0
ip link set eth0 up
hostname "$HOST"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$HOSTS" /etc/hosts
exec "$@"
"""
_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "--pid", "--fork"]


@dataclass(frozen=True)
class Container:
    """What a manifest and the controller say of a pod's one container."""

    #: The pod's host name, and the name of the service that knows it.
    host: str
    subdomain: str
    #: As the manifest has it, before it is expanded.
    command: Sequence[str]
    env: Mapping[str, str]


class Pods:
    """Two running pods, each with its container's output in a file; :meth:`close` them."""

    def __init__(self, containers: tuple[Container, Container], folder: Path, env: Mapping[str, str]) -> None:
        addresses = ["10.77.0.1", "10.77.0.2"]
        names = "".join(
            f"{address} {each.host}.{each.subdomain} {each.host}\n"
            for address, each in zip(addresses, containers, strict=True)
        )
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self.outputs = [folder / f"{each.host}.out" for each in containers]
        self._pods: list[subprocess.Popen[str]] = []
        for address, each, output in zip(addresses, containers, self.outputs, strict=True):
            own = {"ADDRESS": address, "HOST": each.host, "HOSTS": str(folder / "hosts")}
            with output.open("ab") as log:
                pod = subprocess.Popen(
                    [
                        *_UNSHARE,
                        "--kill-child=SIGKILL",
                        "sh",
                        "-ec",
                        _START,
                        "pod",
                        *(expand(word, each.env) for word in each.command),
                    ],
                    cwd=folder,
                    env={**env, **each.env, **own},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                )
            self._pods.append(pod)
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def terminate(self, index: int) -> None:
        """Do what a kubelet does to a pod that is to leave: SIGTERM to process 1."""
        os.kill(descendants(self._pods[index].pid)[0], signal.SIGTERM)

    def kill_rank(self, index: int) -> None:
        """Kill the last rank that a pod's launcher has started."""
        (launcher,) = children(self._pods[index].pid)
        os.kill(children(children(launcher)[0])[-1], signal.SIGKILL)

    @property
    def running(self) -> bool:
        """Whether both are."""
        return all(pod.poll() is None for pod in self._pods)

    def wait(self, limit: float) -> list[int]:
        """Wait until both have ended; return their exit codes."""
        return [pod.wait(limit) for pod in self._pods]

    def close(self) -> None:
        """End all that runs in them."""
        for pod in self._pods:
            pod.kill()
            pod.wait()
            if pod.stdin is not None:
                pod.stdin.close()

    def _join(self) -> None:
        first, second = (pod.pid for pod in self._pods)
        ours = os.readlink("/proc/self/ns/net")
        wait_for(lambda: all(_network(pid) not in (None, ours) for pid in (first, second)), "the pods' networks")
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second)]
        subprocess.run(["nsenter", f"--net=/proc/{first}/ns/net", *cable], check=True, timeout=LIMIT)
        for pod in self._pods:
            assert pod.stdin is not None
            pod.stdin.write("go\n")
            pod.stdin.flush()


def _network(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def expand(word: str, env: Mapping[str, str]) -> str:
    """Expand ``$(NAME)`` as a kubelet does; ``$$`` is a dollar sign, and unknown names stay as they are."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))",
        lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]),
        word,
    )
