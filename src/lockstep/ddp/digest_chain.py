"""Digests of what replicas hold, in the record of the run: by them two runs are compared step by step.

Note [Digest chain]
~~~~~~~~~~~~~~~~~~~
Replicas are equal, so rank 0 takes the digests for all: one of the parameters of all replicas and one of the state
that optimizers keep for them, by the code with which replicas are compared (``digest.py``), and with nothing in them
that depends on the number of ranks or on time. Runs that compute the same bits have the same digests after the same
step, whichever they are: steps are counted over the whole run.

For two runs to have digests of the same steps, however fast each is, these are the powers of two and the multiples of a
power of two, which is the smallest that keeps the time for digests below a part of the steps' time; it changes as steps
do. The launcher keeps some hundreds of them, those of the largest powers, so a record stays short.

On an accelerator a digest stays there until the next one is due, so that nothing waits for the device. The first step
of a process has none: its optimizers are known after it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep import accelerator
from lockstep.ddp.digest import BITS, DigestPart, Holdings, watch_optimizers
from lockstep.job import flight, notes

#: The part of the time of a step that digests may take.
TARGET = 0.004
#: Seconds between two digests at least; the launcher writes the record for each.
_SECONDS = 0.25
#: The largest exponent of two for the steps between two digests.
_MOST = 16
_MASK = (1 << BITS) - 1


class DigestedReplica:
    """A replica whose digests are recorded for as long as this object lives; see Note [Digest chain].

    Args:
        named: its parameters, by name.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self._holdings = Holdings(named)
        self._parts: tuple[list[DigestPart], list[DigestPart]] = ([], [])
        self._captures = accelerator.capture_test(param.device for _, param in named)
        _chain.add(self)

    @property
    def is_captured(self) -> bool:
        """Whether a graph of device work is being captured, in which nothing may be read."""
        return self._captures is not None and self._captures()

    @torch.no_grad()
    def digests(self) -> tuple[list[int | Tensor], list[int | Tensor]]:
        """Return the digests of the parameters and of the optimizers' state, one for each device that has some."""
        holdings = self._holdings
        if holdings.refresh():
            whole = holdings.cut(max(1, sum(item.nbytes for item in holdings.items)))
            self._parts = tuple(  # type: ignore[assignment]  # two of them
                [
                    DigestPart(part.device, spans)
                    for part in whole
                    if (spans := tuple(s for s in part.spans if (holdings.items[s.item].optimizer >= 0) is is_state))
                ]
                for is_state in (False, True)
            )
        parameters, state = ([holdings.digest(part, salt=0) for part in parts] for parts in self._parts)
        return parameters, state


@dataclass(frozen=True)
class _Taken:
    """Digests that were taken, and may still be on their way to the host."""

    step: int
    every: int
    parameters: list[int | accelerator.HostCopy]
    state: list[int | accelerator.HostCopy]
    #: Seconds that the host has spent on them; what times the device's work, where there is one that does.
    seconds: float
    stopwatch: accelerator.Stopwatch | None

    @property
    def is_on_host(self) -> bool:
        return all(isinstance(each, int) for each in (*self.parameters, *self.state))


class DigestChain:
    """Takes the digests of all replicas of this process after some of its steps, and notes them."""

    def __init__(self) -> None:
        self._replicas: list[weakref.ref[DigestedReplica]] = []
        self._listens = False
        self._every = 1
        self._before: tuple[int, float] | None = None
        self._costs: deque[float] = deque(maxlen=3)
        self._steps: deque[float] = deque(maxlen=3)
        self._unread: _Taken | None = None

    def add(self, replica: DigestedReplica) -> None:
        """Record the digests of this replica as well, from the next step on."""
        if not self._listens:
            self._listens = True
            watch_optimizers()
            flight.at_steps(self._after_step)
        self._replicas.append(weakref.ref(replica))

    def _after_step(self, taken: int) -> int:
        """Take digests, if it is a step for that; return when to look again. See :func:`flight.at_steps`."""
        step = (flight.current.run_step or taken + 1) - 1
        # A Checkpointer counts the steps of one optimizer of several: its steps are no more than those of the process.
        if taken > 1 and self._is_due(step) and (self._before is None or self._before[0] != step):
            self._take(step)
        return taken + self._steps_to_next(step)

    def _is_due(self, step: int) -> bool:
        return step % self._every == 0 or step & (step - 1) == 0

    def _steps_to_next(self, step: int) -> int:
        return min(self._every - step % self._every, (1 << max(0, step).bit_length()) - step)

    def _take(self, step: int) -> None:
        begun = time.perf_counter()
        replicas = [replica for ref in self._replicas if (replica := ref()) is not None]
        self._replicas = [*map(weakref.ref, replicas)]
        if not replicas or any(replica.is_captured for replica in replicas):
            return
        self._tell()
        device = _first_device(replicas)
        stopwatch = None if device is None else accelerator.Stopwatch(device)
        found = [replica.digests() for replica in replicas]
        parameters, state = ([_on_its_way(each) for pair in found for each in pair[kind]] for kind in (0, 1))
        if stopwatch is not None:
            stopwatch.stop()
        self._unread = _Taken(step, self._every, parameters, state, time.perf_counter() - begun, stopwatch)
        if self._unread.is_on_host:
            self._tell()
        self._note_time(step, begun)

    def _tell(self) -> None:
        """Note the digests that were taken, if they were not yet."""
        found, self._unread = self._unread, None
        if found is None:
            return
        begun = time.perf_counter()
        parameters, state = _folded(found.parameters), _folded(found.state)
        notes.tell(notes.DIGESTS, step=found.step, every=found.every, parameters=parameters, state=state)
        on_device = 0.0 if found.stopwatch is None else found.stopwatch.seconds()
        self._costs.append(max(found.seconds, on_device) + time.perf_counter() - begun)

    def _note_time(self, step: int, begun: float) -> None:
        """Note how long steps take, and settle how many there are between two digests."""
        if self._before is not None and step > self._before[0]:
            self._steps.append((begun - self._before[1]) / (step - self._before[0]))
        self._before = step, begun
        if self._costs and self._steps:
            seconds = max(min(self._steps), 1e-9)  # the least: one that an evaluation has interrupted is longer
            wanted = max(sorted(self._costs)[len(self._costs) // 2] / TARGET, _SECONDS) / seconds
            self._every = 1 << min(_MOST, (max(1, math.ceil(wanted)) - 1).bit_length())


def _first_device(replicas: Iterable[DigestedReplica]) -> torch.device | None:
    """Return an accelerator that holds something of a replica and whose events tell times; None: none does."""
    for replica in replicas:
        for param in replica._holdings.params:
            if param.device != accelerator.CPU and accelerator.has_times(param.device):
                return param.device
    return None


def _on_its_way(digest: int | Tensor) -> int | accelerator.HostCopy:
    return digest if isinstance(digest, int) else accelerator.HostCopy(digest)


def _folded(digests: Sequence[int | accelerator.HostCopy]) -> str:
    """Return one digest for all, as hexadecimal digits; empty: there is nothing."""
    if not digests:
        return ""
    found = 0
    for each in digests:
        found = (found * 31 + (each if isinstance(each, int) else int(each.read().item()))) & _MASK
    return f"{found:08x}"


_chain = DigestChain()
