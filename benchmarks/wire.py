"""Two hosts and a wire between them, on one machine: network namespaces, and ``wire.c``, which carries the frames.

Needs root, a C compiler, ``ip`` and /dev/net/tun. Nothing touches the network of the machine itself, and everything is
gone when the context ends.

    with wire(mbit=10, delay_ms=100) as ends:
        subprocess.run([*ends[0].command, "ping", "-c1", ends[1].address])
"""

from __future__ import annotations

import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("wire.c")
#: The device in each namespace.
DEVICE = "wire0"
#: Seconds for a compiler, a namespace or a device.
_LIMIT = 60.0
#: The least room in each way's queue, in bytes: a home router's.
_LEAST_QUEUE = 256 * 1024


@dataclass(frozen=True)
class End:
    """One host at the wire."""

    namespace: str
    #: Its IPv4 address.
    address: str

    @property
    def command(self) -> list[str]:
        """What to put before a command so that it runs on this host."""
        return ["ip", "netns", "exec", self.namespace]


class NoWire(RuntimeError):
    """This machine can't make one."""


@contextmanager
def wire(*, mbit: float, delay_ms: float) -> Iterator[tuple[End, End]]:
    """Open a context with two hosts and a wire.

    Args:
        mbit: Mbit/s each way.
        delay_ms: milliseconds from one end to the other; an answer takes twice as long.

    Raises:
        NoWire: the machine has no compiler, no TAP devices, or no right to make namespaces; in its own words.
    """
    if mbit <= 0 or delay_ms < 0:
        raise ValueError(f"mbit={mbit}, delay_ms={delay_ms}: expected a positive rate and no negative delay")
    # What is on its way fills half of the queue, so that a single connection can fill the wire.
    queue = max(_LEAST_QUEUE, round(2 * mbit * 1e6 / 8 * delay_ms * 2e-3))
    ends = (End(f"wire-{os.getpid()}-a", "10.78.0.1"), End(f"wire-{os.getpid()}-b", "10.78.0.2"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wire-")))
        program = folder / "wire"
        _run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(_SOURCE)])
        for end in ends:
            _run(["ip", "netns", "add", end.namespace])
            stack.callback(_run, ["ip", "netns", "del", end.namespace])
        named = [word for end in ends for word in (end.namespace, f"{end.address}/24")]
        carrier = subprocess.Popen(
            [str(program), *named, f"{mbit:g}", str(round(delay_ms * 1000)), str(queue)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        stack.callback(_end, carrier)
        assert carrier.stdout is not None
        assert carrier.stderr is not None
        ready, _, _ = select.select([carrier.stdout], [], [], _LIMIT)
        if not ready or carrier.stdout.readline() != "up\n":
            carrier.kill()
            raise NoWire(f"the wire did not come up within {_LIMIT:g} s: {carrier.stderr.read().strip()}")
        yield ends


def sent_and_received() -> tuple[int, int]:
    """Return the bytes that this process's host has sent and received over the wire, headers included.

    Raises:
        NoWire: this process is on neither of its ends.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            fields = numbers.split()
            return int(fields[8]), int(fields[0])
    raise NoWire(f"process {os.getpid()} has no device {DEVICE}: it is on neither end of a wire")


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT)
    except FileNotFoundError as error:
        raise NoWire(f"there is no {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise NoWire(f"{' '.join(command)}: exit code {error.returncode}: {error.stderr.strip()}") from error


def _end(carrier: subprocess.Popen[str]) -> None:
    carrier.terminate()
    try:
        carrier.communicate(timeout=_LIMIT)
    except subprocess.TimeoutExpired:
        carrier.kill()
        carrier.communicate()
