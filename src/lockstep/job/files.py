"""The files in the private folder of one start of a job: their names, and the notes that are left in them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import knobs
from lockstep._files import write_whole

#: The exit code of a run that was asked to stop and has saved: sysexits' EX_TEMPFAIL, "try again".
EXIT_SAVED = 75
#: The most characters kept of a message or traceback; a recursion's traceback can be megabytes.
_LONGEST = 50_000


class JobFiles:
    """The paths of all files through which the launcher and the ranks of one start of a job communicate."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def store(self) -> Path:
        """The file at which the ranks meet."""
        return self.folder / "store"

    @property
    def pages(self) -> Path:
        """The ranks' pages; see page.py."""
        return self.folder / "pages"

    @property
    def late(self) -> Path:
        """The launcher's report on the rank that holds up the others now."""
        return self.folder / "late"

    @property
    def notes(self) -> Path:
        """The ranks' notes for the run's record; see notes.py."""
        return self.folder / "notes"

    def failure(self, rank: int) -> Path:
        """Return the file of a rank's failure record."""
        return self.folder / f"failure-{rank}.json"

    def stack(self, rank: int) -> Path:
        """Return the file of a rank's Python stacks, written on request."""
        return self.folder / f"stack-{rank}"

    def worker(self, rank: int, name: str) -> Path:
        """Return the record of the sample that a loader's worker is fetching; see workers.py."""
        return self.folder / f"worker-{rank}-{name}"

    def workers(self) -> list[tuple[int, Path]]:
        """Return the files of all workers, with their ranks."""
        return [(int(path.name.split("-")[1]), path) for path in self.folder.glob("worker-*")]

    def trace(self, rank: int) -> Path:
        """Return the file of the events that a rank records while its steps are traced; see trace.py."""
        return self.folder / f"trace-{rank}"

    def trace_names(self, rank: int) -> Path:
        """Return the file of these events' names."""
        return self.folder / f"trace-{rank}.names"

    def trace_worker(self, rank: int, name: str, pid: int) -> Path:
        """Return the file of the times at which a loader's worker made its batches."""
        return self.folder / f"trace-{rank}-{name}-{pid}"

    def trace_workers(self, rank: int) -> list[Path]:
        """Return the files of batch times of all workers of a rank."""
        return [*self.folder.glob(f"trace-{rank}-*")]

    def profile(self, rank: int, number: int) -> Path:
        """Return the file of the ``number``-th export of torch.profiler in a rank."""
        return self.folder / f"profile-{rank}-{number}.json"

    def profiles(self, rank: int) -> list[Path]:
        """Return a rank's exports of torch.profiler, in order."""
        return sorted(self.folder.glob(f"profile-{rank}-*.json"), key=lambda path: int(path.stem.split("-")[2]))

    @property
    def flight_recorders(self) -> Path:
        """What the names of the files begin with that torch's flight recorders write, one a rank."""
        return self.folder / "flight-recorder-rank"

    def flight_recorder(self, rank: int) -> Path:
        """Return the file of a rank's flight recorder; see launch/watchdog.py."""
        return self.flight_recorders.with_name(f"{self.flight_recorders.name}{rank}")

    @property
    def flight_recorder_pipes(self) -> Path:
        """What the names of the pipes begin with by which flight recorders are asked to write, one a rank."""
        return self.folder / "flight-recorder-ask"

    def told(self) -> str:
        """Return the launcher's report on the rank that holds up the others now; empty if there is none."""
        try:
            return self.late.read_text()
        except OSError:
            return ""

    def mark_failed(self) -> None:
        """Tell the ranks that a signal to stop is not the user's: one of them failed, so no rank can finish a step."""
        # The folder was removed, which the launcher reports; or it is full. Then the ranks take the signal for the
        # user's, and try to save, in vain. How the job ends, and what is said of it, stays the same.
        with contextlib.suppress(OSError):
            self._failed.touch(mode=0o600)

    def mark_late(self, text: str) -> None:
        """Leave the launcher's report on the rank that holds up the others now; empty: none does any more."""
        with contextlib.suppress(OSError):  # as above: the user is told all the same, and errors of ranks lack it
            if text:
                write_whole(self.late, text)
            else:
                self.late.unlink()

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`mark_failed` was called for this start."""
        return self._failed.exists()

    @property
    def _failed(self) -> Path:
        return self.folder / "failed"


def told() -> str:
    """Return the launcher's report on the rank that holds up the others now, after a line break, or an empty text.

    It is for the errors of ranks that waited for the late one."""
    folder = knobs.job_dir()
    text = "" if folder is None else JobFiles(folder).told()
    return f"\n{text}" if text else ""


@dataclass(frozen=True)
class StopNote:
    """A note that the ranks saved and left on request, with the checkpoint from which the run can resume."""

    #: The number of optimizer steps taken.
    step: int
    #: The checkpoint's folder.
    folder: str
    #: True if the checkpoint is sound; a run does not resume by itself from one with NaN, or in which ranks differed.
    sound: bool = True

    def describe(self) -> str:
        """Return a phrase that tells where the run can resume."""
        where = f"saved at step {self.step} in {self.folder}"
        return where if self.sound else f"{where}, which is not sound: a run resumes from the newest one that is"

    def write_once(self, job_folder: str | Path) -> None:
        """Write the note, completely or not at all, unless another rank of this machine has."""
        path = Path(job_folder, "stopped.json")
        if not path.exists():
            write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, job_folder: str | Path) -> StopNote | None:
        """Return the note, if there is one."""
        try:
            return cls(**json.loads(Path(job_folder, "stopped.json").read_text()))
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class FailureRecord:
    """A rank's own account of its failure, written when an exception ends it."""

    rank: int
    #: Seconds on the monotonic clock, which all processes of a machine share.
    at: float
    exit_code: int
    #: The exception's type, as Python prints it.
    type: str
    message: str
    traceback: str
    #: The code of an error of lockstep's; None: it is another's.
    code: str | None = None
    #: The bytes of /dev/shm, in all and free, as the rank failed; later what its workers had is free, too.
    shared_memory: tuple[int, int] | None = None

    @property
    def summary(self) -> str:
        """The exception's type and the first line of its message."""
        first = self.message.strip().splitlines()[:1]
        return f"{self.type}: {first[0]}" if first else self.type

    def write(self, folder: str | Path) -> None:
        """Write the record, completely or not at all."""
        fields = asdict(self)
        fields["message"], fields["traceback"] = _shorten(self.message), _shorten(self.traceback)
        write_whole(JobFiles(folder).failure(self.rank), json.dumps(fields))

    @classmethod
    def read(cls, folder: str | Path, rank: int) -> FailureRecord | None:
        """Return the record of ``rank``, or None if it left none."""
        try:
            fields = json.loads(JobFiles(folder).failure(rank).read_text())
        except FileNotFoundError:
            return None
        fields["shared_memory"] = fields["shared_memory"] and tuple(fields["shared_memory"])
        return cls(**fields)


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
