"""A function and its arguments on their way to a rank: pickled into memory that the rank inherits."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import context, reduction, resource_tracker
from multiprocessing import spawn as multiprocessing_spawn
from typing import TYPE_CHECKING, Any

from lockstep.launch import by_value
from lockstep.launch.returned import Returned

if TYPE_CHECKING:
    from lockstep.launch.rank import SentDescriptor


def preparation_without_main(rank: int) -> dict[str, Any]:
    """Return what multiprocessing has a rank do before it unpacks anything, but for the caller's ``__main__``.

    That is a kernel's or a test runner's, and the rank has one of its own.
    """
    given = multiprocessing_spawn.get_preparation_data(f"rank-{rank}")
    return {key: value for key, value in given.items() if not key.startswith("init_main")}


class PackedCall:
    """The function and its arguments, pickled for one rank, with the descriptors that belong to them.

    It plays the part of multiprocessing's Popen while the arguments are pickled: tensors, queues and locks ask it to
    carry their descriptors over.
    """

    def __init__(
        self,
        preparation: dict[str, Any],
        fn: Callable[..., object],
        args: tuple[Any, ...],
        returned: Returned,
        *,
        output: tuple[int, int] = (1, 2),
        by_value: bool = False,
    ) -> None:
        """Pack them.

        Args:
            preparation: what multiprocessing has a process that it spawned do before it unpacks anything.
            fn: the function, called with the rank before ``args``.
            args: what multiprocessing can send.
            returned: where what it returns goes.
            output: the descriptors that become the rank's standard output and error; they stay the caller's.
            by_value: whether what was typed at a prompt is among them; see by_value.py.
        """
        self._returned, self._by_value = returned, by_value
        self._carried: list[int] = []
        self._streams = [os.open(os.devnull, os.O_RDONLY), *map(os.dup, output)]
        self._packed = os.memfd_create("lockstep-spawn")  # a memory file: has no name, blocks nobody, leaves no trace
        try:
            self._pack(preparation, (fn, tuple(args)))
        except BaseException:
            self.__exit__()
            raise
        # Not documented; multiprocessing's spawn hands its tracker on in the same way.
        self.tracker: int | None = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]

    def __enter__(self) -> PackedCall:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self._carried, *self._streams, self._packed):
            os.close(fd)

    @property
    def job(self) -> dict[str, Any]:
        """What the rank is asked to run; see rank.py."""
        return {"kind": "call", "shared_tracker": self.tracker is not None, "by_value": self._by_value}

    def descriptors(self) -> list[int]:
        """Return the rank's standard streams, and what the rank's ``_call`` takes."""
        tracker = [] if self.tracker is None else [self.tracker]
        return [*self._streams, self._packed, self._returned.descriptor, *tracker, *self._carried]

    def duplicate_for_child(self, fd: int) -> int:
        """Return a descriptor's place among those carried; called by multiprocessing.reduction.DupFd."""
        self._carried.append(os.dup(fd))
        return len(self._carried) - 1

    def DupFd(self, place: int) -> SentDescriptor:
        """Return what is pickled in place of a descriptor; called by multiprocessing.reduction.DupFd with its place."""
        from lockstep.launch.rank import SentDescriptor  # while the zygote imports torch, so that it costs no time

        return SentDescriptor(place)

    def _pack(self, *parts: object) -> None:
        if "torch" in sys.modules:  # else there are no tensors among the arguments
            importlib.import_module("torch.multiprocessing")  # teaches ForkingPickler to send them
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # it plays that part
        try:
            with os.fdopen(os.dup(self._packed), "wb") as file:
                for part in parts:
                    if self._by_value:
                        by_value.pickler(file, shares=True).dump(part)
                    else:
                        reduction.ForkingPickler(file, pickle.HIGHEST_PROTOCOL).dump(part)
        finally:
            context.set_spawning_popen(None)
