"""Top-1 and top-5 accuracy, every picture counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lockstep
from examples.imagenet.unreadable import Unreadable


@dataclass(frozen=True)
class Score:
    """What a test found, over all ranks."""

    loss: float
    top1: float
    top5: float
    pictures: int

    def __str__(self) -> str:
        return f"top-1 {self.top1:.4f}, top-5 {self.top5:.4f}, loss {self.loss:.4f} on {self.pictures} pictures"


@torch.no_grad()
def evaluate(
    world: lockstep.World,
    scores_of: Callable[[Tensor], Tensor],
    loader: lockstep.ShardedLoader,
    unreadable: Unreadable,
    title: str = "test",
) -> Score:
    """**Collective.** Test a model in evaluation mode. Exact for any number of ranks: what is summed up are counts.

    The loss is the cross entropy without label smoothing.

    Raises:
        RuntimeError: pictures were lost or counted twice.
        SystemExit: too many pictures could not be read.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    missing: list[tuple[str, str]] = []
    for batch in lockstep.track(loader, title):
        missing += batch.unreadable
        if len(batch.labels):
            sums += counted(scores_of(batch.images), batch.labels)
    unread = world.all_reduce(len(missing))
    if unread:
        unreadable.note(missing)
    loss, top1, top5, pictures = world.all_reduce(sums).tolist()
    if pictures + unread != len(loader.dataset):
        raise RuntimeError(
            f"rank {world.rank}: {pictures:.0f} pictures were tested and {unread} could not be read, expected "
            f"{len(loader.dataset)} in all"
        )
    if not pictures:
        raise SystemExit(f"rank {world.rank}: none of the {unread} test pictures could be read")
    return Score(loss / pictures, top1 / pictures, top5 / pictures, int(pictures))


def counted(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of losses, hits among the first and the first five, pictures: float64 [4], on the CPU."""
    labels = labels.to(scores.device)
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels.unsqueeze(1)
    loss = nn.functional.cross_entropy(scores.float(), labels, reduction="sum")
    found = torch.stack([loss.double(), best[:, 0].sum().double(), best.any(dim=1).sum().double()]).cpu()
    return torch.cat([found, torch.tensor([len(labels)], dtype=torch.float64)])
