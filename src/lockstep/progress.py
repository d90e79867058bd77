"""A progress bar on rank 0: ``for batch in lockstep.track(loader, "epoch 1")``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Generic, SupportsFloat, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lockstep.comm.init import current_world
from lockstep.step.share import Items

Item = TypeVar("Item")

#: Seconds between two redraws of the bar on a terminal, and between two plain lines elsewhere.
_REDRAW_EVERY = 0.1
_LINE_EVERY = 10.0


def track(iterable: Iterable[Item], description: str = "", *, file: TextIO | None = None) -> Track[Item]:
    """Iterate over ``iterable`` and show the progress: a bar on a terminal, plain lines elsewhere.

    Only rank 0 shows anything. The rate is in samples per second over all ranks if ``iterable`` is a sharded loader,
    otherwise in items per second.

    Args:
        iterable: anything to iterate over; without a ``len()``, only the count is shown.
        description: the text before the bar.
        file: the file to write to; standard error if None.

    Returns:
        An iterable over the same items. Its :meth:`~lockstep.progress.Track.show` puts numbers beside the bar.
    """
    return Track(iterable, description, file=file)


class Track(Generic[Item]):
    """The iterable that :func:`lockstep.track` returns."""

    def __init__(self, iterable: Iterable[Item], description: str, *, file: TextIO | None = None) -> None:
        self._iterable = iterable
        self._description = description
        self._file = file
        self._numbers: dict[str, SupportsFloat] = {}

    def show(self, **numbers: SupportsFloat) -> None:
        """Put numbers (a loss, a learning rate) beside the bar; rank 0 shows its own values.

        A tensor is read only when the display is drawn anew, so that passing one at every step does not make the
        CPU wait for a GPU.
        """
        self._numbers.update(numbers)

    def __len__(self) -> int:
        """Return the total number of items.

        Raises:
            TypeError: the iterable has no length.
        """
        if not isinstance(self._iterable, Sized):
            raise TypeError(f"a {type(self._iterable).__name__} has no length")
        return len(self._iterable)

    def __iter__(self) -> Iterator[Item]:
        world = current_world()
        if world is not None and not world.is_main:
            yield from self._iterable
            return
        try:
            total = len(self)
        except TypeError:
            total = None
        display = _display(self._description, total, self._file if self._file is not None else sys.stderr)
        done, samples = 0, 0.0
        begun = drawn = time.monotonic()
        try:
            for item in self._iterable:
                # The share is read before the item is used: the loader sets it for the item it has just handed out.
                share = world.share if world is not None else None
                samples += 0 if share is None or isinstance(share, Items) else share.global_samples
                yield item
                done += 1
                now = time.monotonic()
                if now - drawn >= display.every:
                    drawn = now
                    display.draw(done, self._status(done, samples, now - begun))
        finally:
            display.close(done, self._status(done, samples, time.monotonic() - begun))

    def _status(self, done: int, samples: float, seconds: float) -> str:
        count, unit = (samples, "samples/s") if samples else (done, "it/s")
        parts = [f"{count / seconds:,.0f} {unit}" if seconds > 0 else f"- {unit}"]
        parts += [f"{name} {_format(value)}" for name, value in self._numbers.items()]
        return "  ".join(parts)


class _Bar:
    """A bar on a terminal, redrawn in place by the loop itself, without a thread."""

    every = _REDRAW_EVERY

    def __init__(self, description: str, total: int | None, console: Console) -> None:
        columns = [
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
        ]
        self._progress = Progress(*columns, TextColumn("{task.fields[status]}"), console=console, auto_refresh=False)
        self._task: TaskID = self._progress.add_task(description, total=total, status="")
        self._progress.start()

    def draw(self, done: int, status: str) -> None:
        self._progress.update(self._task, completed=done, status=status)
        self._progress.refresh()

    def close(self, done: int, status: str) -> None:
        self.draw(done, status)
        self._progress.stop()


class _Lines:
    """Progress in plain lines, for a file or a pipe: one every ten seconds, and one at the end."""

    every = _LINE_EVERY

    def __init__(self, description: str, total: int | None, file: TextIO) -> None:
        self._description = description
        self._total = "?" if total is None else str(total)
        self._file = file

    def draw(self, done: int, status: str) -> None:
        print(f"{self._description}  {done}/{self._total}  {status}".lstrip(), file=self._file, flush=True)

    close = draw


def _display(description: str, total: int | None, file: TextIO) -> _Bar | _Lines:
    console = Console(file=file)
    return _Bar(description, total, console) if console.is_terminal else _Lines(description, total, file)


def _format(value: Any) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e6 else f"{number:.4g}"
