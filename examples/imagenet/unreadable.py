"""Pictures that can't be read: named, counted, left out, and too many of them are an error.

Note [What remains]
~~~~~~~~~~~~~~~~~~~
A rank that leaves a picture out has fewer samples than the loader cut for it. The mean over what remains of the global
batch is exact if gradients are weighted with what remains on each rank, so the ranks add up what they have before
every step: two numbers, next to the megabytes of gradients. Every rank then knows the same of every picture left out,
counts the same ones, and gives up at the same step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import lockstep
from examples.imagenet.pictures import Batch


class Unreadable:
    """The pictures that could not be read so far, on any rank; the same on every rank."""

    def __init__(self, world: lockstep.World, *, most: int) -> None:
        self._world = world
        self._most = most
        self._reasons: dict[str, str] = {}

    @property
    def count(self) -> int:
        """How many different ones."""
        return len(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        """Their names and the reasons."""
        return {"reasons": dict(self._reasons)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` gave."""
        self._reasons = dict(state["reasons"])

    def what_remains(self, batch: Batch) -> lockstep.BatchShare:
        """**Collective.** Return this rank's share of the global batch, without what could not be read.

        Raises:
            SystemExit: on every rank, if there are too many such pictures by now.
        """
        readable, unreadable = self._world.all_reduce(torch.tensor([len(batch.labels), len(batch.unreadable)])).tolist()
        if unreadable:
            self.note(batch.unreadable)
        return lockstep.BatchShare(len(batch.labels), readable)

    def note(self, mine: Sequence[tuple[str, str]]) -> None:
        """**Collective.** Tell every rank which pictures this one could not read; rank 0 names them.

        Raises:
            SystemExit: on every rank, if there are too many by now.
        """
        for name, reason in self._everyones(mine):
            if name not in self._reasons:
                self._reasons[name] = reason
                self._world.print(
                    f"unreadable picture {name} is left out: {reason} ({self.count}, at most {self._most})",
                    file=sys.stderr,
                )
        if self.count > self._most:
            raise SystemExit(
                f"rank {self._world.rank}: {self.count} pictures could not be read, more than --max-bad-images "
                f"{self._most}, the last of them {list(self._reasons)[-1]}: repair or remove them, or allow more"
            )

    def _everyones(self, mine: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return all ranks' records, in order of rank: each writes its own into a row of zeros, and the rows are added
        up."""
        world = self._world
        # A label of the model or of a file system may be no valid text; JSON then escapes it.
        record = torch.frombuffer(bytearray(json.dumps(list(mine)).encode()), dtype=torch.uint8)
        sizes = torch.zeros(world.world_size, dtype=torch.int64)
        sizes[world.rank] = len(record)
        sizes = world.all_reduce(sizes)
        rows = torch.zeros(int(sizes.sum()), dtype=torch.uint8).split(sizes.tolist())
        rows[world.rank].copy_(record)
        records = world.all_reduce(torch.cat(rows)).split(sizes.tolist())
        return [(str(name), str(reason)) for row in records for name, reason in json.loads(row.numpy().tobytes())]
