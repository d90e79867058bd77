"""What tests plant in a machine's launcher and all its processes (``before`` of :class:`tests.launching.Running`): late
messages, another clock, names that are not known yet."""

from __future__ import annotations

import os
import random
import re
import socket
import time
from typing import Any

import torch.distributed as dist


def late_messages(pattern: str, seconds: float, *, seed: int | None = None) -> None:
    """Have whatever is written into a store, under a key that ``pattern`` is found in, come late, and the writer, too.

    Args:
        pattern: a regular expression.
        seconds: how late; at most, where there is a seed.
        seed: of how late each message is, a moment before it is written and another one after; None: all are, before.
    """
    draw = random.Random(seed)
    store: Any = dist.Store  # type: ignore[attr-defined]  # not in torch's stubs

    def late(plain: Any) -> Any:
        def write(self: Any, key: str, *values: Any) -> Any:
            is_late = re.search(pattern, key)
            if is_late:
                time.sleep(seconds if seed is None else draw.uniform(0.0, seconds))
            result = plain(self, key, *values)
            if is_late and seed is not None:
                time.sleep(draw.uniform(0.0, seconds))
            return result

        return write

    for name in ("set", "add", "compare_set"):
        setattr(store, name, late(getattr(store, name)))


def another_clock(ahead: float) -> None:
    """Have Python's clock of the day stand still at ``ahead`` of this day's beginning, or behind: how far two of these
    are apart does not depend on when each is looked at."""
    shows = time.time() // 86_400 * 86_400 + ahead
    time.time = lambda: shows


def unknown_until(path: str, name: str, address: str) -> None:
    """Have the host ``name`` be unknown until the file ``path`` is there, and then at ``address``."""
    plain = socket.getaddrinfo

    def look_up(host: Any, *rest: Any, **options: Any) -> Any:
        if host != name:
            return plain(host, *rest, **options)
        if not os.path.exists(path):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return plain(address, *rest, **options)

    socket.getaddrinfo = look_up
