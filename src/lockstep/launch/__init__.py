"""Start processes, watch them, and leave none behind.

::

    launcher (no torch)  ──control socket──  zygote (imported torch once)  ──fork──  rank 0, rank 1, …
    launcher.py             channel.py       zygote.py                               rank.py

The launcher decides (policy.py) and reports (report.py; lateness.py while ranks are late), for a command (run.py) or
for a program (called.py). The zygote does: it forks ranks, passes signals on, and tells of deaths. Whichever of the two
outlives the other ends what is left of the job (processes.py). hosts.py starts launchers on several hosts from one
terminal.
"""

from __future__ import annotations

import sys

from lockstep.errors import LaunchError

if sys.platform != "linux":
    raise LaunchError(
        f"lockstep's launcher needs Linux (pidfds, signalfd, child subreapers); this is {sys.platform}. Start the "
        "ranks with torchrun instead: lockstep.init() reads its environment"
    )
