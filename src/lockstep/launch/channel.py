"""Messages between the launcher and the zygote, and the launcher's end of the socket that carries them.

The zygote's end is zygote.py, which runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import knobs, machine
from lockstep.errors import LaunchError
from lockstep.job.messages import Channel
from lockstep.launch.processes import SAVE, STOPPING, no_process

# Messages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fork:
    """Fork a rank. Three descriptors for its standard streams may come along, and more for its job."""

    rank: int
    #: Variable -> its value; None unsets it.
    env: dict[str, str | None]
    #: The program of the rank; see rank.py.
    job: dict[str, Any]
    #: The CPUs that it is bound to; None: it is not.
    cpus: list[int] | None = None


@dataclass(frozen=True)
class Signal:
    """Pass a signal on to some ranks."""

    ranks: list[int]
    signum: int


@dataclass(frozen=True)
class LetSave:
    """Should the launcher be gone before the ranks, ask them to stop, and give them time to save before they end."""

    #: The seconds that they have.
    grace: float


@dataclass(frozen=True)
class Clear:
    """End what is left below the zygote, except the processes in ``spare``; the answer is :class:`Cleared`."""

    spare: list[int]


@dataclass(frozen=True)
class Finish:
    """End what is left below the zygote, and leave."""


@dataclass(frozen=True)
class Ready:
    """The imports are done."""


@dataclass(frozen=True)
class Broken:
    """The imports failed, or there is no process for a rank. The zygote ends, once the rendezvous client has left."""

    #: A traceback, or the reason and what to do.
    error: str


@dataclass(frozen=True)
class Started:
    """A rank runs."""

    rank: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """A rank ended."""

    rank: int
    #: The exit code; negative for a signal.
    code: int
    #: The time of the end, in seconds on the monotonic clock.
    at: float
    #: The rank's peak memory, in bytes.
    peak: int


@dataclass(frozen=True)
class Cleared:
    """Nothing of the job is left below the zygote."""


Request = Fork | Signal | LetSave | Clear | Finish
Answer = Ready | Broken | Started | Exited | Cleared

# The launcher's end ---------------------------------------------------------------------------------------------------

#: The number of the rendezvous client among the zygote's children; the others are ranks.
CLIENT = -1

#: The modules that every rank needs; named, not imported, because the launcher never loads torch.
_PRELOAD = ("torch", "torch.distributed", "numpy.random", "lockstep.comm.init")
#: The modules that training needs soon after. Importing them takes a second and more, mostly for what a process's first
#: optimizer imports. That pays off where ranks are forked again, or where more ranks than cores would import in turn.
_TRAINING = (
    "torch._dynamo",
    "torch.utils.data",
    "lockstep.ddp.api",
    "lockstep.data.shard",
    "lockstep.checkpoint.api",
)

#: The zygote's program. It imports the copy of lockstep that runs here, which may lie in the current folder, but does
#: not search that folder itself, so that a random.py of the user's can't stand in for Python's.
_BOOT = """\
import sys
control, launcher, folder, modules, home = sys.argv[1:]
sys.path[: sys.path[:1] == [""]] = [home]
import lockstep
del sys.path[0]
from lockstep.launch.zygote import main
main(int(control), int(launcher), folder, [name for name in modules.split(",") if name])
"""


def _execute(argv: list[str], control: int, env: dict[str, str]) -> int:
    """Start a process that inherits ``control``, and return its pid."""
    return os.posix_spawn(
        sys.executable,
        argv,
        env,
        file_actions=[(os.POSIX_SPAWN_DUP2, control, control)],  # makes it inheritable
        setsigmask=(*STOPPING, SAVE),  # until the zygote ignores them
    )


#: Starts the zygote's process, given its command line, its end of the control socket and its environment. The project's
#: own tests fork it from a process that has torch already.
start_zygote: Callable[[list[str], int, dict[str, str]], int] = _execute


class ZygoteHandle:
    """Start the zygote, ask it to fork ranks, hear of their deaths, and end it. Its maker must :meth:`close` it."""

    def __init__(
        self, folder: str, *, ranks: int, threads: int, restarts: bool = False, also: Sequence[str] = ()
    ) -> None:
        """Start the zygote.

        Args:
            folder: the job's private folder.
            ranks: how many are to share this machine's cores.
            threads: for each of them, unless the user has said it.
            restarts: ranks may be forked again, and should then be back in training as soon as possible.
            also: modules that these ranks need besides; imported whatever the user has the launcher import.

        Raises:
            LaunchError: there is no process for it.
        """
        preload = knobs.preload()
        if preload is None:
            shared = restarts or ranks > machine.visible_cores()
            preload = (*_PRELOAD, *_TRAINING) if shared else _PRELOAD
        preload = (*preload, *also)
        ours, theirs = socket.socketpair()
        home = str(Path(knobs.__file__).parent.parent)
        # The interpreter's own options (-X, -W, -O …) as multiprocessing passes them on; it has no public name.
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        argv = [
            sys.executable,
            *flags,
            "-c",
            _BOOT,
            str(theirs.fileno()),
            str(os.getpid()),
            folder,
            ",".join(preload),
            home,
        ]
        try:
            self.pid = start_zygote(argv, theirs.fileno(), _environment(threads))
        except OSError as error:
            ours.close()
            raise LaunchError(f"the process that forks the ranks can't be started: {no_process(error)}") from error
        finally:
            theirs.close()
        self._channel: Channel[Answer] = Channel(ours, Answer.__args__)
        self._status: int | None = None

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._channel.fileno()

    def fork(self, fork: Fork, fds: Sequence[int] = ()) -> None:
        """Ask for a rank; the answer is :class:`Started`. The descriptors stay the caller's."""
        self._send(fork, fds)

    def signal(self, ranks: Iterable[int], signum: int) -> None:
        """Have a signal sent to ranks; those that ended meanwhile are left out."""
        self._send(Signal(list(ranks), int(signum)))

    def let_save(self, grace: float) -> None:
        """Have ranks that are still there when this process is gone asked to stop; they end ``grace`` seconds later."""
        self._send(LetSave(grace))

    def receive(self) -> list[Answer]:
        """Wait for answers. Raises EOFError if the zygote is gone."""
        return [answer for answer, _ in self._channel.receive()]

    def clear(self, spare: Iterable[int] = ()) -> None:
        """Ask the zygote to end what its ranks left behind, except ``spare``; the answer is :class:`Cleared`."""
        self._send(Clear(list(spare)))

    def finish(self) -> None:
        """Ask the zygote to end what its ranks left behind, and to leave."""
        self._send(Finish())

    def wait(self, limit: float) -> int | None:
        """Return the zygote's exit code (negative: a signal), or None if it is still there after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self._status = 0  # a waitpid(-1) elsewhere in this process has taken the status
                break
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.002)
        return self._status

    def kill(self) -> None:
        """Send the zygote SIGKILL. Its ranks die with it, but not what they started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self, limit: float = 3.0) -> None:
        """End the zygote and, through it, everything below it. Does nothing the second time."""
        self._channel.close()  # the zygote reads the end of the stream, ends its processes and leaves
        if self.wait(limit) is None:
            self.kill()
            self.wait(limit)

    def _send(self, message: Request, fds: Sequence[int] = ()) -> None:
        # If the zygote is gone, receive() raises EOFError: one place to learn of it is enough.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(message, fds)


def _environment(threads: int) -> dict[str, str]:
    """Return the zygote's environment, which ranks inherit: OMP_NUM_THREADS is ``threads``, unless it is set.

    The libraries in the zygote (OpenMP, MKL, OpenBLAS) read it there, once for all ranks, and so does what the ranks
    start or load later. A library's own variable (MKL_NUM_THREADS, OPENBLAS_NUM_THREADS) takes precedence in it.
    """
    env = dict(os.environ)
    if not env.get("OMP_NUM_THREADS") and threads < machine.visible_cores():
        env["OMP_NUM_THREADS"] = str(threads)
    return env
