"""Find free ports, for scripts that open torch's process group themselves, and for several machines."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from lockstep.errors import LaunchError

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that is free now, below those that the kernel hands out for outgoing connections.

    The port is not held, so it could be taken before it is used; outside the kernel's own range that is unlikely.

    Raises:
        LaunchError: none of 100 ports drawn at random is free.
    """
    lowest = _lowest_ephemeral()
    choices = range(10000, lowest) if lowest > 11000 else range(1024, 65536)
    # Not the seeded generator: jobs that start with the same seed must not try the same ports.
    for port in random.SystemRandom().sample(choices, 100):
        if is_free(port):
            return port
    raise LaunchError(f"no free port found from {choices[0]} to {choices[-1]}: name one with --master_port")


def _lowest_ephemeral() -> int:
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:
        return 32768  # Linux's default; some containers hide the setting


def is_free(port: int) -> bool:
    """Return whether a server could listen on ``port`` on every address of this machine."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            if family == socket.AF_INET:
                raise  # without IPv6 there is nothing more to ask
    return True
