"""Decide which signals to a job are one request to stop, and which is the second. Decisions only.

Note [One request]
~~~~~~~~~~~~~~~~~~
The first request to stop leaves the ranks time to save, and the second takes it away. So a signal is a second request
only if nobody but a user who wants an end at once can have sent it. These are none:

- SIGHUP: when a terminal goes, the shell sends it, the kernel sends it, and so may others.
- SIGTERM after SIGHUP, or after the end of ``--max-time``: what ends a lost session sends both, and a scheduler has a
  limit of its own. (A SIGTERM after that one is a second request.)
- A signal right after another: "timeout" signals its child and then the whole group.
"""

from __future__ import annotations

import signal

#: A number beside the signals' for the end of a job's time limit; it is never sent to a process.
TIME_LIMIT = signal.SIGALRM
#: Seconds within which two signals are one.
_SAME_SIGNAL = 0.25


def one_request(before: signal.Signals, signum: signal.Signals, *, after: float) -> signal.Signals | None:
    """Return which of two signals to stop stands for both from now on; None: the later one is a second request.

    Args:
        before: the signal that has asked.
        signum: the later one.
        after: the seconds since the last signal of all.
    """
    if signum == signal.SIGTERM and before in (signal.SIGHUP, TIME_LIMIT):
        return signum
    return before if signum == signal.SIGHUP or after < _SAME_SIGNAL else None
