"""Hooks that a loader calls as a training loop goes through it: between two steps, and where the loop ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle


class LoopHooks:
    """The hooks of a loader's loops, in the order in which they were registered."""

    def __init__(self) -> None:
        self._boundary_hooks: dict[int, Callable[[], object]] = OrderedDict()
        self._end_hooks: dict[int, Callable[[], object]] = OrderedDict()
        self._early_end_hooks: dict[int, Callable[[], object]] = OrderedDict()

    def _register_step_boundary_hook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Register ``hook`` to be called between two steps: when the loop is done with a batch and asks for the next.

        The whole step is over then: the optimizer's step, the schedule, averages of weights. The loader's state counts
        the batch as done. The hook is also called after an epoch's last batch, but not when the loop is left early. An
        error of the hook ends the loop.

        Returns:
            a handle whose ``remove()`` removes the hook.
        """
        return _register(self._boundary_hooks, hook)

    def _register_end_of_pass_hook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Register ``hook`` to be called after an epoch's last batch, before the loader moves to the next epoch.

        The loader's state is then still that of the finished epoch. The hook is not called if the loop is left early.

        Returns:
            a handle whose ``remove()`` removes the hook.
        """
        return _register(self._end_hooks, hook)

    def _register_early_end_hook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Register ``hook`` to be called where a loop is left early, before the loader moves to the next epoch.

        The loader's state is then that of a finished epoch: a pass that continues from it has no more batches. What the
        hook raises is only printed, as Python does with errors in a generator that is closed.

        Returns:
            a handle whose ``remove()`` removes the hook.
        """
        return _register(self._early_end_hooks, hook)


def _register(hooks: dict[int, Callable[[], object]], hook: Callable[[], object]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
