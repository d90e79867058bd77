"""What a launcher does about ranks that hold up the others, besides the report: ``--on-hang``.

``report`` does no more. ``dump`` keeps the evidence of the hang with the run's logs while it still exists. ``restart``
does that too, and if the report has stood for some seconds it stops the ranks, which is a failure like any other: it
counts as a restart, and the same hang at the same step twice in a row is not tried a third time.

A report stands from when it was made until the late ranks move on. Ranks in a debugger are not reported, so nothing is
done about them.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep._files import write_whole
from lockstep.job.files import JobFiles
from lockstep.launch.hangs import ReportedHang
from lockstep.launch.thread_stacks import whole_stacks

#: Seconds for the threads besides the ranks' main ones to answer: the launcher does nothing else meanwhile.
_OTHER_THREADS = 1.0
#: Seconds that a report stands before the ranks are started again, where the user does not say.
_SECONDS = 60.0


class HangAction(enum.Enum):
    """What is to be done about a reported hang."""

    REPORT = "report"
    DUMP = "dump"
    RESTART = "restart"


@dataclass(frozen=True)
class OnHang:
    """What the user has asked for."""

    action: HangAction = HangAction.REPORT
    #: Seconds from the report until the ranks are started again.
    seconds: float = _SECONDS

    @classmethod
    def parse(cls, text: str) -> OnHang:
        """Return what ``text`` asks for: ``report``, ``dump``, ``restart`` or ``restart:SECONDS``.

        Raises:
            ValueError: it is none of these.
        """
        word, colon, seconds = text.partition(":")
        try:
            action = HangAction(word)
            after = float(seconds) if colon else _SECONDS
            if (colon and action is not HangAction.RESTART) or not 0 <= after < float("inf"):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"--on-hang={text}: expected 'report', 'dump', 'restart' or 'restart:SECONDS', the seconds from the "
                "report until all ranks start again"
            ) from None
        return cls(action, after)


class HangResponse:
    """Decides what is due: each action once for a report.

    Args:
        wanted: what the user has asked for.
    """

    def __init__(self, wanted: OnHang) -> None:
        self._wanted = wanted
        self._dumped: ReportedHang | None = None
        self._stopped: ReportedHang | None = None

    def due(self, reported: ReportedHang | None, now: float) -> list[HangAction]:
        """Return what is to be done now.

        Args:
            reported: the report that still holds; None if there is none.
            now: on the monotonic clock.
        """
        wanted, due = self._wanted, []
        if reported is None or wanted.action is HangAction.REPORT:
            return []
        if reported is not self._dumped:
            self._dumped = reported
            due.append(HangAction.DUMP)
        is_over = now - reported.at >= wanted.seconds
        if wanted.action is HangAction.RESTART and is_over and reported is not self._stopped:
            self._stopped = reported
            due.append(HangAction.RESTART)
        return due

    def announce(self, folder: Path) -> str:
        """Say where the dump is, and what comes next."""
        text = f"the report and all Python stacks of this machine's ranks are in {folder}"
        if self._wanted.action is HangAction.RESTART:
            text += f"; if nothing moves for {self._wanted.seconds:g} s, all ranks start again (--on-hang)"
        return text


def dump(home: Path, reported: ReportedHang, files: JobFiles, pids: Mapping[int, int | None]) -> Path:
    """Write the report, and the stacks of all threads of each rank of this machine, into a new folder.

    Args:
        home: the folder of the run's logs.
        reported: the report.
        files: of this start of the job; the ranks' main threads have written their stacks there when the ranks were
            suspected, and the others are asked now.
        pids: rank -> its process.

    Returns:
        The folder: ``hang-1``, then ``hang-2``, and so on.

    Raises:
        OSError: it can't be written.
    """
    folder = _new_folder(home)
    write_whole(folder / "report.txt", reported.text + "\n")
    for rank, text in whole_stacks(files, reported.stacks, pids, limit=_OTHER_THREADS).items():
        told = text or f"rank {rank} has not answered: it is stopped, leaving, or has not begun"
        write_whole(folder / f"stacks-rank{rank}.txt", told + "\n")
    return folder


def _new_folder(home: Path) -> Path:
    number = 1
    while True:
        folder = home / f"hang-{number}"
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            number += 1
        else:
            return folder
