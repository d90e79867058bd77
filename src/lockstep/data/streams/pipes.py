"""torch's datapipes, which leave it to the DataLoader to divide them among its workers and to seed their shuffling.

A ``sharding_filter()`` lets everything through until it is told how many read and which of them it is, and a
``shuffle()`` before it has to give all of them the same order. torch's DataLoader sees to both for a datapipe that it
is given itself; the one within a sharded loader is given a stream that holds it.
"""

from __future__ import annotations

import torch
from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding


def set_up(dataset: object, *, seed: int) -> None:
    """Divide a datapipe among the workers of this process's DataLoader, and seed it; leave other streams alone.

    Args:
        dataset: the stream.
        seed: the same for all workers and ranks: 0 to 2**64 - 1.
    """
    if isinstance(dataset, IterDataPipe):
        worker = get_worker_info()
        apply_sharding(dataset, *((worker.num_workers, worker.id) if worker else (1, 0)))
        apply_random_seed(dataset, torch.Generator().manual_seed(seed))
