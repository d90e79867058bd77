"""Which streams split themselves by rank: told by what they say, or by the user, and never by a guess.

A stream that says nothing is taken for one that every rank reads whole. If it is not, or if one that says it is split
is not, the ranks find out when they compare their first batches: see Note [Streams] in ``passes.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class SplitByRank(NamedTuple):
    """What a stream says of how it is split."""

    #: The name of what splits the stream, for messages.
    by: str
    #: Whose part it gives, of how many ranks; None: that of whichever rank reads it.
    rank: int | None = None
    ranks: int | None = None


def read_stream_option(said: object, dataset: object, *, rank: int, world_size: int) -> str | None:
    """Return by whose word each rank reads a part of a stream; None: each reads all of it.

    Args:
        said: the user's argument ``stream=``.
        dataset: the stream.
        rank: this rank.
        world_size: the number of ranks.

    Raises:
        ValueError: ``said`` is another word, or the stream says that it is split for another rank or world.
    """
    if said not in (None, "whole", "parts"):
        raise ValueError(
            f'stream={said!r}: expected "whole" (every rank reads all of it) or "parts" (the dataset gives each rank a '
            "part of its own)"
        )
    if said is not None:
        return 'stream="parts"' if said == "parts" else None
    found = split_of(dataset)
    if found is None or found.ranks == 1:
        return None
    if found.ranks is not None and (found.rank, found.ranks) != (rank, world_size):
        raise ValueError(
            f"{found.by} has split this stream for rank {found.rank} of {found.ranks}, and this is rank {rank} of "
            f"{world_size}: some samples would come twice, or never. Split it with rank=world.rank and "
            "world_size=world.world_size, after lockstep.init(), or not at all: lockstep.shard cuts each batch of a "
            "stream that every rank reads"
        )
    return found.by


def split_of(dataset: object) -> SplitByRank | None:
    """Return how a stream of a known library says that it is split by rank; None: it does not say so.

    No library is imported for it.
    """
    for name, ask in _LIBRARIES.items():
        library = sys.modules.get(name)
        if library is not None:
            found = ask(library, dataset)
            if found is not None:
                return found
    return None


def _is_of(library: Any, name: str, dataset: object) -> bool:
    """Return whether a dataset is of a library's class; False where a module of the user's has the library's name."""
    kind = getattr(library, name, None)
    return isinstance(kind, type) and isinstance(dataset, kind)


def _by_hugging_face(library: Any, dataset: Any) -> SplitByRank | None:
    split = getattr(dataset, "_distributed", None) if _is_of(library, "IterableDataset", dataset) else None
    return None if split is None else SplitByRank("datasets.split_dataset_by_node", split.rank, split.world_size)


def _by_webdataset(library: Any, dataset: Any) -> SplitByRank | None:
    if not _is_of(library, "DataPipeline", dataset) or library.split_by_node not in dataset.pipeline:
        return None
    return SplitByRank("webdataset.split_by_node")


def _by_streaming(library: Any, dataset: Any) -> SplitByRank | None:
    asked = sys.modules.get("streaming.base.world")
    if asked is None or not _is_of(library, "StreamingDataset", dataset):
        return None
    world = asked.World.detect()  # as the dataset itself does when it is read
    return SplitByRank("streaming.StreamingDataset", world.rank, world.num_ranks)


def _by_litdata(library: Any, dataset: Any) -> SplitByRank | None:
    if not _is_of(library, "StreamingDataset", dataset):
        return None
    world = dataset.distributed_env  # as it was found when the dataset was made
    return SplitByRank("litdata.StreamingDataset", world.global_rank, world.world_size)


def _by_lancedb(library: Any, dataset: Any) -> SplitByRank | None:
    if not _is_of(library, "StreamingDataset", dataset):
        return None
    return SplitByRank("lancedb.streaming.StreamingDataset", dataset._rank, dataset._world_size)


#: The module of a library -> what asks its datasets.
_LIBRARIES: dict[str, Callable[[Any, Any], SplitByRank | None]] = {
    "datasets": _by_hugging_face,
    "webdataset": _by_webdataset,
    "streaming": _by_streaming,
    "litdata": _by_litdata,
    "lancedb.streaming": _by_lancedb,
}
