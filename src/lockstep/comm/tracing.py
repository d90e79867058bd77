"""Record collectives for a trace while its window is open, by methods that are in place only then; and keep what
torch.profiler exports from the time when the window opens, which may be after it has closed.

Collectives have numbers that are the same on all of their group's ranks, so that a reader can tell when each rank came
to which. Over lockstep's own engines these are the numbers that errors name, and a collective is recorded where it
runs, on whichever thread. Of torch's own process groups (gloo, NCCL, …) the methods are recorded that Python calls: the
call that issues a collective, and the waits for its work, with torch's own count of the group's collectives. What C++
issues there by itself (torch's DistributedDataParallel) is not recorded.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lockstep import _torch
from lockstep.comm import waiting
from lockstep.comm.exchange import group_device
from lockstep.comm.group import group
from lockstep.comm.group.fingerprint import facts
from lockstep.job import tracing
from lockstep.job.files import JobFiles
from lockstep.job.trace import EventWriter
from lockstep.text import as_size

#: torch's methods -> their names here. ``runs/trace.py`` knows which ranks take part in each.
_METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
#: Barriers that consist of messages, which torch does not count.
_OF_MESSAGES = ("monitored_barrier", waiting.meet_over_gloo.__name__)
#: The most profiles of a rank that are kept, and the most bytes of one.
_PROFILES, _LARGEST = 4, 512 * 2**20


class Replacing:
    """Replaces methods, and puts the original ones back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        """Replace the method that ``owner`` itself, not a class above it, has by this name."""
        before = vars(owner)[name]
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, _torch.mark_untraced(method))

    def undo(self) -> None:
        """Put all original methods back."""
        while self._undo:
            self._undo.pop()()


class _Collectives:
    """Records collectives, in place of the methods that issue them."""

    on_demand = False

    def __init__(self) -> None:
        self._methods = Replacing()

    def open(self, recorder: EventWriter) -> None:
        """See :class:`~lockstep.job.tracing.Eye`."""
        replace = self._methods.replace
        replace(group.Group, "_run", _run_recorded(group.Group._run, recorder))
        waits: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
        for method, name in _METHODS.items():
            before = vars(dist.ProcessGroup).get(method)
            if before is not None:
                replace(dist.ProcessGroup, method, _issue_recorded(before, name, recorder, waits))
        met = _issue_recorded(waiting.meet_over_gloo, "barrier", recorder, waits)
        replace(waiting, waiting.meet_over_gloo.__name__, met)
        replace(dist.Work, "wait", _wait_recorded(dist.Work.wait, recorder, waits))

    def close(self) -> None:
        """See :class:`~lockstep.job.tracing.Eye`."""
        self._methods.undo()


def _run_recorded(run: Callable[..., None], recorder: EventWriter) -> Callable[..., None]:
    """Return a method that records a collective over one of lockstep's engines, from its turn to its end."""
    names: dict[tuple[str, bytes], int] = {}

    def recorded(self: group.Group, name: str, fingerprint: bytes, *rest: Any) -> None:
        engine = self.engine
        number = names.get((self.name, fingerprint))
        if number is None:
            about: dict[str, Any] = {"group": self.name, "ranks": engine.size, "backend": engine.backend}
            about |= facts(fingerprint)
            number = names[self.name, fingerprint] = recorder.name(about.pop("operation"), "collective", **about)
        recorder.begin(number, engine.number + 1)
        try:
            run(self, name, fingerprint, *rest)
        finally:
            recorder.end()

    return recorded


def _issue_recorded(
    issue: Callable[..., Any], name: str, recorder: EventWriter, waits: WeakKeyDictionary[Any, tuple[int, int]]
) -> Callable[..., Any]:
    """Return a method that records the call that issues a collective of torch's own, and remembers its work.

    The recorded number is 0 where torch has none.
    """
    is_uncounted = issue.__name__ in _OF_MESSAGES
    names: dict[tuple[object, ...], tuple[int, int]] = {}

    def names_of(group: Any, device: torch.device, elements: int | None, dtype: torch.dtype | None) -> tuple[int, int]:
        of = {"group": group.group_name, "ranks": group.size()}
        of["backend"] = f"{dist.get_backend_config(group)} ({device.type})"
        about = of if elements is None else {**of, "elements": elements, "dtype": str(dtype)}
        call = recorder.name(name, "collective", **about)
        return call, recorder.name(f"wait for {name}", "wait", **of)

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [*_tensors(args[0] if args else None)]
        device = tensors[0].device if tensors else group_device(self)
        elements = sum(each.numel() for each in tensors) if tensors else None
        dtype = tensors[0].dtype if tensors else None
        key = self.group_name, device.type, elements, dtype
        named = names.get(key)
        if named is None:
            named = names[key] = names_of(self, device, elements, dtype)
        issued = None if is_uncounted else _torch.collectives_issued(self, device)
        number = 0 if issued is None else issued + 1
        recorder.begin(named[0], number)
        try:
            work = issue(self, *args, **kwargs)
        finally:
            recorder.end()
        if work is not None:
            waits[work] = named[1], number
        return work

    return recorded


def _wait_recorded(
    wait: Callable[..., Any], recorder: EventWriter, waits: WeakKeyDictionary[Any, tuple[int, int]]
) -> Callable[..., Any]:
    """Return a method that records a wait for such a work; nothing else tells when the work was complete."""

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        of = waits.pop(self, None)
        if of is None:
            return wait(self, *args, **kwargs)
        recorder.begin(*of)
        try:
            return wait(self, *args, **kwargs)
        finally:
            recorder.end()

    return recorded


def _tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (list, tuple)):
        for each in thing:
            yield from _tensors(each)


class _Profiles:
    """Keeps a copy of what torch.profiler exports, for the launcher to merge."""

    on_demand = True

    def __init__(self) -> None:
        self._kept = itertools.count(1)
        self._is_here = False

    def open(self, recorder: EventWriter) -> None:  # noqa: ARG002  (what is exported has its own clock)
        """See :class:`~lockstep.job.tracing.Eye`. This is never undone: a profile may be exported after the window."""
        if self._is_here:
            return
        self._is_here = True
        profile = torch.profiler.profile
        export = profile.export_chrome_trace

        def export_chrome_trace(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
            result = export(self, path, *args, **kwargs)
            keep(path)
            return result

        keep = self._keep
        profile.export_chrome_trace = export_chrome_trace  # type: ignore[method-assign]

    def _keep(self, path: str) -> None:
        place, number = tracing.place(), next(self._kept)
        if place is None or number > _PROFILES:
            return
        try:
            size = os.path.getsize(path)
            if size <= _LARGEST:
                self._copy(Path(path), *place, number)
                return
            why = f"it has {as_size(size)}, and {as_size(_LARGEST)} are read: profile fewer steps"
        except OSError as error:
            why = str(error)
        print(f"lockstep: rank {place[1]}: the profile {path} is left out of the trace: {why}", file=sys.stderr)

    @staticmethod
    def _copy(path: Path, folder: Path, rank: int, number: int) -> None:
        target = JobFiles(folder).profile(rank, number)
        with open(path, "rb") as source, open(os.open(f"{target}.part", os.O_WRONLY | os.O_CREAT, 0o600), "wb") as copy:
            shutil.copyfileobj(source, copy)
        os.rename(f"{target}.part", target)

    def close(self) -> None:
        """See :class:`~lockstep.job.tracing.Eye`."""


tracing.look_with(_Collectives())
tracing.look_with(_Profiles())
