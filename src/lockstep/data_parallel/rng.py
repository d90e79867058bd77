"""Random numbers in the replicas: different for each, and the same when a run is repeated.

Note [A replica's random numbers]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The first replica draws from torch's generators as the bare module does. Each other one draws from a stream whose seed
is a digest of the replica's number and of the state of the first device's generator before the forward. So masks
differ from replica to replica, ``torch.manual_seed`` repeats them, nothing is drawn that the bare module would not
draw, and a script's next draws are those that it would have made after the first replica alone.

An accelerator has its own generator, but all CPU replicas share one, and threads would take numbers from it in any
order. So replicas that draw from the CPU's generator run one after the other, each with the generator set to its own
stream. The generator shows whether they draw: the first forward with given training flags runs in turn, and if the
generator's state has not moved, later ones run side by side. If it moves after all, later forwards run in turn again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep import accelerator, callsite

Result = TypeVar("Result")


class Draws:
    """Learns whether the replicas draw from the CPU's generator, and gives each its stream."""

    def __init__(self) -> None:
        #: The training flags of all modules -> whether a forward with them draws.
        self._known: dict[tuple[bool, ...], bool] = {}

    def begin(self, flags: tuple[bool, ...], first: torch.device) -> Turn:
        """Begin a forward."""
        return Turn(flags, first, in_turn=self._known.get(flags, True))

    def end(self, turn: Turn) -> None:
        """End a forward, and learn from it whether the replicas draw."""
        drew = turn.drew()
        if drew and not turn.in_turn:
            callsite.warn(
                "the replicas drew random numbers on the CPU in this forward and had not before, so this forward can't "
                "be repeated exactly; later ones can, because the replicas run one after the other from now on"
            )
        self._known[turn.flags] = drew


class Turn:
    """The random streams of one forward."""

    def __init__(self, flags: tuple[bool, ...], first: torch.device, *, in_turn: bool) -> None:
        self.flags, self.in_turn = flags, in_turn
        self._before = torch.get_rng_state()
        self._drew = False
        of_device = accelerator.rng_state(first)
        # Both: a model may draw on one of them alone, and where that stands decides what comes.
        states = [self._before.numpy().tobytes(), b"" if of_device is None else of_device.numpy().tobytes()]
        self._root = hashlib.blake2b(b"".join(states), digest_size=16).digest()

    def seed(self, replica: int) -> int:
        """Return the seed of a replica's stream."""
        digest = hashlib.blake2b(self._root + replica.to_bytes(4, "little"), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def wrapped(self, replica: int, device: torch.device, call: Callable[[], Result]) -> Callable[[], Result]:
        """Return ``call`` with the replica's streams in the generators."""
        if replica == 0:
            return call

        def with_streams() -> Result:
            restore: list[Callable[[], Any]] = []
            try:
                if device.type != "cpu":
                    restore.append(_seeded_device(device, self.seed(replica)))
                if self.in_turn:
                    restore.append(self._seeded_cpu(self.seed(replica)))
                return call()
            finally:
                for undo in reversed(restore):
                    undo()

        return with_streams

    def _seeded_cpu(self, seed: int) -> Callable[[], None]:
        after_first = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        own: Tensor = torch.get_rng_state()

        def restore() -> None:
            self._drew = self._drew or not torch.equal(own, torch.get_rng_state())
            torch.set_rng_state(after_first)

        return restore

    def drew(self) -> bool:
        """Return whether any replica drew from the CPU's generator."""
        return self._drew or not torch.equal(self._before, torch.get_rng_state())


def _seeded_device(device: torch.device, seed: int) -> Callable[[], None]:
    before = accelerator.rng_state(device)
    assert before is not None  # it is no CPU
    accelerator.seed(seed, device)
    return lambda: accelerator.set_rng_state(before, device)
