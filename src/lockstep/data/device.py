"""Copy batches to the accelerator, one batch ahead of the one in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from lockstep import accelerator
from lockstep.data.fetch import Fetched
from lockstep.data.inner import passing_errors_on
from lockstep.trees import dense_parts, leaves, to_device


def on_device(fetched: Iterable[Fetched], device: torch.device) -> Iterator[Fetched]:
    """Return the same batches on ``device``: each is copied on a separate stream while the one before is used."""
    stream = accelerator.new_stream(device)
    ahead: tuple[Fetched, torch.Event] | None = None
    batches = iter(fetched)
    with passing_errors_on(batches):
        for item in batches:
            following = _send(item, device, stream)
            if ahead is not None:
                yield _receive(*ahead, device)
            ahead = following
    if ahead is not None:
        yield _receive(*ahead, device)


def _send(item: Fetched, device: torch.device, stream: torch.Stream) -> tuple[Fetched, torch.Event]:
    with stream:
        return item._replace(batch=to_device(item.batch, device)), accelerator.mark(device)


def _receive(item: Fetched, copied: torch.Event, device: torch.device) -> Fetched:
    current = accelerator.current_stream(device)
    current.wait_event(copied)  # the event, not the stream: the next copy is already queued after it
    for leaf in leaves(item.batch):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            # The memory was allocated on the copying stream; without this the allocator could reuse it while the user's
            # stream still reads it. A sparse tensor has no memory but its parts'.
            for part in dense_parts(leaf):
                part.record_stream(current)
    return item
