"""A Slurm cluster of a few nodes on this machine: its controller and daemons, without privileges and without munge.

Debian's packages suffice: slurmctld, slurmd and slurm-client. The nodes are named 127.0.0.1, 127.0.0.2 and so on, which
resolve without a name server. Everything listens on the loopback device, on ports that are free when it starts. A
cluster's name and the numbers of its jobs are its own: steps of two clusters with the same number would have one port.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from pathlib import Path

from lockstep.launch.ports import free_port

#: Seconds for the nodes to come up.
_UP = 120.0
_CONFIGURATION = """\
ClusterName=lockstep-{port}
FirstJobId={port}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=batch_sched_delay=0,sched_interval=1
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
RequeueExit=75
SlurmdTimeout=300
MessageTimeout=60
TCPTimeout=60
"""


def missing() -> list[str]:
    """The programs that are not installed here."""
    return [name for name in ("slurmctld", "slurmd", "srun") if shutil.which(name) is None]


class Cluster:
    """A running cluster; :meth:`close` it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        for name in ("state", *(f"spool-127.0.0.{node}" for node in range(1, nodes + 1))):
            (folder / name).mkdir(mode=0o700)
        lines = [
            f"NodeName=127.0.0.{node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=4"
            for node in range(1, nodes + 1)
        ]
        lines.append(f"PartitionName=main Nodes=127.0.0.[1-{nodes}] Default=YES MaxTime=INFINITE State=UP")
        configuration = folder / "slurm.conf"
        text = _CONFIGURATION.format(port=free_port(), user=getpass.getuser(), folder=folder)
        configuration.write_text(text + "\n".join(lines) + "\n")
        self.folder = folder
        #: Of whoever talks to it.
        self.env = {**os.environ, "SLURM_CONF": str(configuration)}
        daemons = [["slurmctld", "-D", "-c"]]
        daemons += [["slurmd", "-D", "-N", f"127.0.0.{node}"] for node in range(1, nodes + 1)]
        with (folder / "daemons.log").open("wb") as log:
            self._daemons = [
                subprocess.Popen(self._found(command), env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for command in daemons
            ]
        try:
            self._wait(nodes)
        except BaseException:
            self.close()
            raise

    def run(self, *command: str, cwd: Path, limit: float = 200.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands to its end; after ``limit`` seconds fail, with all that it wrote."""
        try:
            return subprocess.run(
                command, cwd=cwd, env={**self.env, **env}, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as late:
            written = [b"" if each is None else each for each in (late.stdout, late.stderr)]
            raise AssertionError(
                f"{command} did not end within {limit:g} s and wrote:\n" + b"\n".join(written).decode(errors="replace")
            ) from None

    def start(self, *command: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
        """Start one of Slurm's commands, with pipes as its input and output."""
        return subprocess.Popen(
            command, cwd=cwd, env={**self.env, **env}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        """End all of its jobs and daemons."""
        if all(daemon.poll() is None for daemon in self._daemons):
            self.run("scancel", "--quiet", "--full", f"--user={getpass.getuser()}", cwd=self.folder)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10.0)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _found(self, command: list[str]) -> list[str]:
        path = shutil.which(command[0])
        assert path is not None, f"{command[0]} is not installed"
        return [path, *command[1:]]

    def _wait(self, nodes: int) -> None:
        deadline = time.monotonic() + _UP
        while True:
            idle = self.run("sinfo", "--noheader", "--Node", "--format=%T", cwd=self.folder).stdout.split()
            if idle == ["idle"] * nodes:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-1000:] for path in sorted(self.folder.glob("*.log")))
                raise RuntimeError(f"the nodes of the cluster did not come up within {_UP:g} s: {idle}\n{logs}")
            time.sleep(0.05)
