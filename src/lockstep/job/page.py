"""Every rank's page: a few numbers and texts in one mapped file of the job's folder, which say what the rank is doing.

Note [One writer a page]
~~~~~~~~~~~~~~~~~~~~~~~~
A page belongs to one rank, which alone writes to it. The page of a rank of another machine belongs to this machine's
launcher, which hears of that rank twice a second; and ``MEMORY``, ``SPENT``, ``GRANTED`` and ``LENDS`` are the
launcher's in every page.
Numbers are whole, aligned and of 8 bytes, stored in one instruction each (``memoryview.cast("q")`` copies them at
once). A reader sees the old number or the new one, never half of each, and no lock is needed that a killed rank could
leave locked. A rank may die at any instruction, and the page of one that is stopped stays readable.

What changes from event to event is one number, the *mark*: the phase, the last phase that was not the user's own code,
whether the rank waits, and a serial number that makes the mark differ from the one before it. So these four always fit
each other. Texts are written before the mark that goes with them; a reader that finds the same mark before and after
the texts has texts that fit, except on processors that reorder stores, and nothing is decided on one look.
"""

from __future__ import annotations

import enum
import mmap
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.job.files import JobFiles
from lockstep.job.throughput import StepFlops

#: The signal that asks a rank for its Python stacks. Not SIGUSR1 or SIGUSR2, which are the user's; far from both ends
#: of the range, which libraries take first.
STACK_SIGNAL = signal.SIGRTMIN + 11
#: The size of a rank's page, in bytes.
PAGE = 2048


class Phase(enum.IntEnum):
    """What a rank is doing, as lockstep sees it."""

    #: Before the first event: importing, building the model.
    START = 0
    #: The sharded loader fetches the next batch.
    DATA = 1
    #: From a replica's forward in training on, until its backward begins: the loss as well.
    FORWARD = 2
    BACKWARD = 3
    #: Sending gradients, and waiting for those of the other ranks.
    REDUCE = 4
    OPTIMIZER = 5
    SAVE = 6
    RESTORE = 7
    #: torch.compile compiles.
    COMPILE = 8
    #: A replica's forward in eval mode, and what follows it.
    EVALUATE = 9
    #: The user's own code, between the other phases.
    OWN = 10
    #: The program is over, and the interpreter is being taken down.
    LEAVING = 11
    #: Waiting for other ranks in a collective, in any phase. It is in no page, only among fractions of time.
    WAIT = 12


#: Phase -> its name in messages.
NAMES = {
    Phase.START: "start",
    Phase.DATA: "data",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.REDUCE: "reduce",
    Phase.OPTIMIZER: "optimizer",
    Phase.SAVE: "save",
    Phase.RESTORE: "restore",
    Phase.COMPILE: "compile",
    Phase.EVALUATE: "evaluation",
    Phase.OWN: "your code",
    Phase.LEAVING: "leaving",
    Phase.WAIT: "wait",
}


class Debugging(enum.IntEnum):
    """What a rank does in a debugger, the last three bits of its ``DEBUGGER``; see Note [A turn at the terminal] in
    debugger/lender.py."""

    #: It is in no debugger.
    NONE = 0
    #: It asks for the terminal at a breakpoint.
    ASKS = 1
    #: It asks for it since an error would end it.
    FAILED = 2
    #: It waits for a command.
    PROMPTS = 3
    #: It carries out a command that moves it nowhere.
    EVALUATES = 4
    #: It runs on to where it will prompt again.
    RUNS = 5
    #: Its user has ended the job.
    QUIT = 6

    @classmethod
    def of(cls, number: int) -> Debugging:
        """Take the state from a rank's ``DEBUGGER``."""
        return cls(number % REQUEST)


#: The unit in which a rank's ``DEBUGGER`` counts its requests for the terminal.
REQUEST = 8


class Cell(enum.IntEnum):
    """The numbers of a page, by their place in it.

    The first is written at every event, the next two at every step. The four from ``RUN_STEPS`` on have a cache line
    of their own, since other ranks read ``PROPOSAL`` or ``INTERRUPT`` at every step. The launcher's numbers, and those
    that are written rarely, lie behind the texts.
    """

    #: The rank's mark; see Note [One writer a page] and :class:`Mark`.
    MARK = 0
    #: Optimizer steps that this process has taken, plus one; 0: they are not counted.
    STEPS = 1
    #: Samples that the sharded loaders have handed out for these steps; 0: they are not counted.
    SAMPLES = 2
    #: Tokens that the script has counted for these steps (``World.count_tokens``); 0: it counts none.
    TOKENS = 3
    #: Optimizer steps of the whole run by a Checkpointer's count, those before a restart included, plus one; 0: no
    #: Checkpointer counts.
    RUN_STEPS = 8
    #: 1 while the rank saves and leaves by itself when it is asked to stop.
    LISTENS = 9
    #: This rank's proposal of a common act and its step; see stop.py. 0: none.
    PROPOSAL = 10
    #: The same of the step at which the ranks end a cell that is interrupted: see Note [An interrupt] in
    #: interactive/interrupt.py.
    INTERRUPT = 11
    #: Resident bytes, which the launcher notes about once a second.
    MEMORY = 192
    #: Milliseconds spent in the first phase since the rank was started; those of the other phases follow.
    SPENT = 193
    #: Peak bytes of this rank on its GPU, then the GPU's capacity; 0: there is no GPU, or they are not known yet.
    DEVICE_MEMORY = 208
    DEVICE_SIZE = 209
    #: Microseconds of GPU time spent in the first phase, in the steps that were timed (see device.py); those
    #: of the other phases follow.
    DEVICE_SPENT = 210
    #: Microseconds for which Python's garbage collector has paused this rank, and the number of pauses, those for the
    #: youngest generation left out; and 1 during any pause.
    COLLECTED = 226
    COLLECTIONS = 227
    COLLECTING = 228
    #: The rank's note on its last output to where the launcher's messages go: see Note [Begun lines] in terminal.py.
    LINES = 229
    #: Of the step whose FLOPs were counted (see step/flops.py): the FLOPs of this rank, 0: they are not known; its
    #: samples, 0: they are not counted; and the picoseconds that the FLOPs take at the device's peak, 0: not known.
    FLOPS = 230
    FLOPS_SAMPLES = 231
    FLOPS_AT_PEAK = 232
    #: The rank's mark at which its device was seen to be still in the latest backward; see device_wait.py. Where it is
    #: not the present mark it says nothing.
    ON_DEVICE = 233
    #: What the rank does in a debugger (:class:`Debugging`), with the number of its latest request for the terminal; 0:
    #: it is in none.
    DEBUGGER = 234
    #: The launcher's: the number of the request that it has granted, or minus the number of one that it refuses; and 1
    #: if it has a terminal to lend.
    GRANTED = 235
    LENDS = 236
    #: This rank's call to save from the side; see Note [Saving from the side] in checkpoint/aside.py. 0: none.
    ASIDE = 237


class Text(enum.Enum):
    """The texts of a page, by their place in it and how many bytes they have."""

    #: The call in which the rank waits, or last waited, and its line.
    WAITS_IN = (128, 640)
    #: The reason why the rank expects to be slow, inside ``expect_slow``.
    REASON = (768, 512)
    #: The line from which the optimizer took its last step.
    STEPPED_AT = (1280, 256)
    #: The line at which the rank is in a debugger.
    DEBUGGED_AT = (1920, 128)


#: The units of a mark's parts: the phase counts ones; the last phase that was not own code; waiting; the serial number.
ENTERED, WAITS, SERIAL = 1 << 4, 1 << 8, 1 << 9


@dataclass(frozen=True)
class Mark:
    """A mark, taken apart."""

    phase: Phase
    #: The last phase that was not own code.
    entered: Phase
    #: True if the rank waits for others.
    waiting: bool
    #: A number that differs from that of the mark before; 0: there was no event yet.
    serial: int

    @classmethod
    def of(cls, number: int) -> Mark:
        """Take a mark apart."""
        phase, entered = number % ENTERED, number // ENTERED % 16
        return cls(Phase(phase), Phase(entered), bool(number & WAITS), number // SERIAL)

    @property
    def spends(self) -> Phase:
        """The phase that the time counts for: that of the mark, or ``WAIT``."""
        return Phase.WAIT if self.waiting else self.phase


@dataclass(frozen=True)
class Look:
    """A rank's page at one moment."""

    mark: Mark
    #: Optimizer steps taken; None: they are not counted.
    steps: int | None
    waits_in: str
    reason: str
    stepped_at: str
    #: True if the rank's device is still in the latest backward, and the rank has come no further since that was seen.
    on_device: bool = False
    #: The rank's state in a debugger, and the line of the program.
    debugging: Debugging = Debugging.NONE
    debugged_at: str = ""
    #: True while Python's garbage collector pauses the rank.
    collects: bool = False

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others by its page, itself or with its device; see Note [Waiting for a device]."""
        return self.mark.waiting or self.on_device


class Pages:
    """The pages of all ranks of a job, by rank.

    The first process that needs the file (0600) makes it; all agree on its size.

    Args:
        folder: the job's.
        count: how many ranks there are, those of other machines included.
    """

    def __init__(self, folder: str | Path, count: int) -> None:
        self.count = count
        fd = os.open(JobFiles(folder).pages, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, count * PAGE)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(fd, count * PAGE)
        finally:
            os.close(fd)
        self._bytes = memoryview(self._memory)
        self._numbers = self._bytes.cast("q")
        #: Cell -> its values of all ranks: int64 [count], a view.
        self._columns = {cell: self._numbers[cell :: PAGE // 8] for cell in Cell}

    def page(self, rank: int) -> memoryview:
        """Return a rank's page (uint8 [PAGE]), for its owner, who releases it before :meth:`close`."""
        return self._bytes[rank * PAGE : (rank + 1) * PAGE]

    def all(self, cell: Cell) -> list[int]:
        """Return one number of every rank, in order of rank."""
        return self._columns[cell].tolist()

    def column(self, cell: Cell) -> memoryview:
        """Return one number of every rank, int64 [count], a view, to be released before :meth:`close`."""
        return self._columns[cell]

    def get(self, rank: int, cell: Cell) -> int:
        """Return one number of a rank."""
        return self._columns[cell][rank]

    @property
    def debugging(self) -> bool:
        """Whether a rank of the job is in a debugger, so that nobody is late."""
        return any(self._columns[Cell.DEBUGGER])

    def set(self, rank: int, cell: Cell, value: int) -> None:
        """Write one number; only the owner may."""
        self._columns[cell][rank] = value

    def spent(self, rank: int) -> list[float]:
        """Return the seconds by phase that the launcher has noted of a rank."""
        return [milliseconds / 1e3 for milliseconds in self._by_phase(rank, Cell.SPENT)]

    def device_spent(self, rank: int) -> list[float]:
        """Return the seconds of a rank's GPU by phase, in the steps that were timed; all 0: not known."""
        return [microseconds / 1e6 for microseconds in self._by_phase(rank, Cell.DEVICE_SPENT)]

    def step_flops(self, rank: int) -> StepFlops | None:
        """What a rank has counted of one step; None: nothing."""
        flops, samples, at_peak = (
            self.get(rank, cell) for cell in (Cell.FLOPS, Cell.FLOPS_SAMPLES, Cell.FLOPS_AT_PEAK)
        )
        return StepFlops(flops, samples, at_peak / 1e12) if flops else None

    def _by_phase(self, rank: int, first: Cell) -> list[int]:
        start = rank * (PAGE // 8) + first
        return self._numbers[start : start + len(Phase)].tolist()

    def note(self, rank: int, memory: int, seconds: Iterable[float]) -> None:
        """Note a rank's resident bytes, and its seconds by phase; for the launcher."""
        self.set(rank, Cell.MEMORY, memory)
        for place, each in enumerate(seconds, start=rank * (PAGE // 8) + Cell.SPENT):
            self._numbers[place] = round(each * 1e3)

    def copy(self, rank: int, mark: int, counts: Mapping[Cell, int], texts: Mapping[Text, str]) -> None:
        """Write what was heard of a rank of another machine; for the launcher."""
        for cell, value in counts.items():
            self.set(rank, cell, value)
        with self.page(rank) as page:
            for which, text in texts.items():
                encode(page, which, text)
        self.set(rank, Cell.MARK, mark)

    def look(self, rank: int) -> Look:
        """Return the whole page of a rank. (If it writes all the time, the texts may be newer than the mark.)"""
        for _ in range(20):
            mark = self.get(rank, Cell.MARK)
            with self.page(rank) as page:
                waits_in, reason, stepped_at, debugged_at = (_decode(page, text) for text in Text)
            if self.get(rank, Cell.MARK) == mark:
                break
        steps = self.get(rank, Cell.STEPS)
        on_device = mark != 0 and self.get(rank, Cell.ON_DEVICE) == mark
        return Look(
            Mark.of(mark),
            steps - 1 if steps else None,
            waits_in,
            reason,
            stepped_at,
            on_device=on_device,
            debugging=Debugging.of(self.get(rank, Cell.DEBUGGER)),
            debugged_at=debugged_at,
            collects=bool(self.get(rank, Cell.COLLECTING)),
        )

    def close(self) -> None:
        """Let go of the memory. A second call does nothing."""
        for view in (*self._columns.values(), self._numbers, self._bytes):
            view.release()
        self._memory.close()


def encode(page: memoryview, which: Text, text: str) -> None:
    """Write a text into its place in a page, cut to fit."""
    start, size = which.value
    page[start : start + size] = text.encode(errors="replace")[: size - 1].ljust(size, b"\0")


def _decode(page: memoryview, which: Text) -> str:
    start, size = which.value
    return bytes(page[start : start + size]).partition(b"\0")[0].decode(errors="replace")
