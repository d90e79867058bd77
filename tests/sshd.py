"""A real sshd for tests, at two loopback addresses: two hosts, as far as an ssh client can tell."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep.launch.ports import free_port
from tests.launching import LIMIT, closed_port, wait_for

_SERVER = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
MaxStartups 100
SetEnv XDG_STATE_HOME={folder}/state
"""

_CLIENT = """
Host one two
    Port {port}
Host nobody
    Port {closed}
Host one nobody
    HostName 127.0.0.1
Host two
    HostName 127.0.0.2
Host *
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile none
    StrictHostKeyChecking yes
"""

#: What the server says of a port that another program has.
_TAKEN = "Address already in use"


@dataclass(frozen=True)
class Sshd:
    """A server that knows the hosts ``one`` and ``two``; there is none at ``nobody``."""

    pid: int
    #: For LOCKSTEP_SSH.
    client: str


@contextmanager
def sshd(folder: Path) -> Iterator[Sshd]:
    """Run a server with keys and configuration in ``folder``; skips the test where there is none."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd, or no ssh (openssh-server, openssh-client)")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it is root's, it gives up its rights there
    with closed_port() as closed:
        process = None
        while process is None:
            process = _start(server, folder, free_port(), closed)
        try:
            yield Sshd(process.pid, f"ssh -F {folder / 'client'}")
        finally:
            _end(process)


def _start(server: str, folder: Path, port: int, closed: int) -> subprocess.Popen[bytes] | None:
    """Start it at a port; None: another program has taken the port meanwhile."""
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    names = {"folder": folder, "port": port, "closed": closed}
    (folder / "known_hosts").write_text("".join(f"[127.0.0.{number}]:{port} {key}\n" for number in (1, 2)))
    (folder / "server").write_text(_SERVER.format(**names))
    (folder / "client").write_text(_CLIENT.format(**names))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [server, "-D", "-e", "-f", str(folder / "server")],
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for(lambda: process.poll() is not None or _is_decided((folder / "log").read_text()), "sshd")
    except AssertionError:
        _end(process)
        raise
    said = (folder / "log").read_text().strip()
    if _TAKEN in said:
        _end(process)
        return None
    if process.poll() is not None:
        pytest.skip(f"sshd does not start here: {said}")
    return process


def _is_decided(said: str) -> bool:
    """Whether the server listens at both addresses, or can't."""
    return said.count("Server listening on") == 2 or _TAKEN in said


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(LIMIT)
