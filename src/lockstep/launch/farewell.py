"""What the watcher says, and the exit code that goes with it, when a job or one start of it has ended."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from lockstep.job.files import EXIT_SAVED
from lockstep.launch.attempt import Attempt
from lockstep.launch.handle import ZygoteHandle
from lockstep.launch.output import LogFolder, Streams
from lockstep.launch.processes import name


def saved(attempt: Attempt) -> int | None:
    """**Local.** If the ranks saved and left because they were asked to: say where the run goes on; the exit code."""
    note = attempt.stop_note()
    if note is None or any(state.exit_code != EXIT_SAVED for state in attempt.policy.states.values()):
        return None
    signum = attempt.policy.stopped_by
    say(f"stopped by {'a signal to the ranks' if signum is None else signum.name}; {_where(attempt)}")
    return EXIT_SAVED


def stopped(attempt: Attempt, signum: signal.Signals, *, listened: bool) -> int:
    """**Local.** Say how a job ended that a signal stopped; the exit code.

    Args:
        attempt: the ranks.
        signum: the signal.
        listened: the ranks were to save and leave by themselves.
    """
    states = attempt.policy.states
    if listened and all(state.exit_code == 0 for state in states.values()):
        say(f"{signum.name} came when training was over: all ranks ended by themselves")
        return 0
    words = [f"stopped by {signum.name}"]
    killed = [rank for rank, state in states.items() if state.exit_code == -signal.SIGKILL]
    if killed:
        words.append(f"rank {', '.join(map(str, killed))} did not leave in time (--grace) and was killed")
    if attempt.stop_note() is not None:
        words.append(_where(attempt))
    records = [record for record in map(attempt.record, states) if record is not None]
    failed = [record for record in records if record.type not in ("KeyboardInterrupt", "SystemExit")]
    if failed:
        words.append(f"rank {failed[0].rank} failed on the way out: {failed[0].summary}")
    say("; ".join(words))
    return 128 + signum


def without_zygote(zygote: ZygoteHandle) -> int:
    """**Local.** The process that forks ranks is gone, and they with it; the exit code."""
    code = zygote.wait(limit=1.0) or 0
    how = f"was killed by signal {-code} ({name(-code)})" if code < 0 else f"ended with exit code {code}"
    say(f"the process that starts the ranks (process {zygote.pid}) {how}; all ranks were stopped")
    return 128 - code if code < 0 else 1


def name_logs(attempt: Attempt, streams: Streams, logs: LogFolder) -> None:
    """**Local.** Output that nobody has seen must not be lost for want of knowing where it is."""
    hidden = [rank for rank, k in attempt.local_rank.items() if streams.logged(k) and not streams.shown(k)]
    unseen = logs.unseen(hidden)
    if unseen:
        ranks = f"rank {unseen[0]}" if len(unseen) == 1 else f"ranks {', '.join(map(str, unseen))}"
        say(f"what {ranks} wrote is in {logs.path}")


def show_cursor() -> None:
    """**Local.** A rank that a signal ends in the middle of a progress bar leaves the cursor hidden, at the end of the
    bar."""
    for fd in (2, 1):
        if os.isatty(fd):
            with suppress(OSError):
                os.write(fd, b"\x1b[?25h\n")
            return


def say(text: str) -> None:
    """**Local.** One message of lockstep's own, after everything the ranks wrote."""
    sys.stdout.flush()
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def _where(attempt: Attempt) -> str:
    note = attempt.stop_note()
    assert note is not None, "the caller has looked"
    return f"saved at step {note.step} in {note.folder}"
