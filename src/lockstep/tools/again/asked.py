"""In a program that runs again: answer which samples a loader's batches have and what they are, and end the program.

The loader answers as soon as the program has made it, so no pass has begun and nothing was trained.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep._files import write_whole
from lockstep.data.batches import BatchSamplerDrawing, GlobalBatch
from lockstep.data.fetch import BatchKey, FetchingDataset
from lockstep.data.loader import ShardedLoader
from lockstep.data.mixing import mix
from lockstep.data.order import draw_order, epoch_order, sequential_order
from lockstep.errors import LockstepError
from lockstep.tools.again.samples import Part, RecordedBatch, Wanted, cut, described
from lockstep.tools.again.shown import describe

#: The settings that must be as they were for a batch to have the same samples.
_SAME = ("order", "length", "batch_size", "drop_last", "costs")


def listen(request: Mapping[str, Any]) -> None:
    """Answer a request when the last of the loaders that it names is made.

    Args:
        request: ``wanted``, the fields of each :class:`~lockstep.tools.again.samples.Wanted`, and ``folder``.
    """
    wanted = [Wanted(**each) for each in request["wanted"]]
    missing = {each.settings["loader"] for each in wanted}
    answers: list[dict[str, Any]] = []
    begin = ShardedLoader.__init__

    @functools.wraps(begin)
    def init(self: ShardedLoader, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        if self._number not in missing:
            return
        missing.discard(self._number)
        try:
            mine = [each for each in wanted if each.settings["loader"] == self._number]
            answers.extend(batch.to_json() for each in mine for batch in _answered(self, each))
        except LockstepError as error:
            _leave(request, {"error": str(error)})
        if not missing:
            _leave(request, {"batches": answers})

    ShardedLoader.__init__ = init  # type: ignore[method-assign]  # in this process alone


def _leave(request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    write_whole(Path(request["folder"], "answer.json"), json.dumps(answer))
    raise SystemExit(0)


def _answered(loader: ShardedLoader, wanted: Wanted) -> list[RecordedBatch]:
    """Return the batches with what the dataset gives for their samples."""
    source, dataset, settings = loader._source, loader._inner.dataset, wanted.settings
    now = loader._settings(batch=0)
    other = [
        f"{name} {settings[name]!r} in the run, {now[name]!r} now" for name in _SAME if settings[name] != now[name]
    ]
    if other:
        raise LockstepError(
            f"loader {settings['loader']} is not the one that was recorded: {'; '.join(other)}. So its batches are not "
            "those of the run"
        )
    assert isinstance(dataset, FetchingDataset)  # streams are refused before the program is run
    batches = _drawn(loader, wanted) if source.order == "batches" else cut(_order(loader, wanted), wanted)
    if source.costs is not None and source.order != "batches":
        batches = [batch._replace(costs=source.costs.of(batch.indices)) for batch in batches]
    key = mix(settings["seed"], wanted.epoch)
    return [
        replace(each, parts=[_shown(dataset, part, each, epoch_key=key) for part in each.parts])
        for each in (described(batch, wanted) for batch in batches)
    ]


def _order(loader: ShardedLoader, wanted: Wanted) -> Any:
    source, seed, epoch = loader._source, wanted.settings["seed"], wanted.epoch
    if source.order == "sampler":
        return draw_order(source.sampler, loader._world, seed=seed, epoch=epoch)
    length = source.length or 0
    return epoch_order(length, seed=seed, epoch=epoch) if source.order == "shuffled" else sequential_order(length)


def _drawn(loader: ShardedLoader, wanted: Wanted) -> list[GlobalBatch]:
    """Return the batches that a batch sampler draws."""
    source = loader._source
    drawing = BatchSamplerDrawing(
        source.sampler, seed=wanted.settings["seed"], epoch=wanted.epoch, state=None, costs=source.costs
    )
    if wanted.epoch and hasattr(source.sampler, "state_dict"):
        raise LockstepError(
            f"{drawing.what} has a state of its own, which epochs before epoch {wanted.epoch} have changed: it can't "
            "be asked for the batches of that epoch alone"
        )
    found: list[GlobalBatch] = []
    number = position = 0
    while number < wanted.end:
        drawn = drawing.take(256)
        if not drawn:
            raise LockstepError(f"epoch {wanted.epoch} has no batch {wanted.first}: {drawing.what} drew {number}")
        for indices, costs in drawn:
            if not len(indices):
                continue  # the run left it out
            if number in wanted.batches:
                found.append(GlobalBatch(number, position, indices, costs))
            number, position = number + 1, position + len(indices)
    return found


def _shown(dataset: FetchingDataset, part: Part, batch: RecordedBatch, *, epoch_key: int) -> Part:
    """Return a part with what the dataset gives for each of its samples."""
    if not part.indices:
        return replace(part, samples=[])
    key = BatchKey(part.indices, part.positions, len(part.indices), batch.samples, epoch_key)
    return replace(part, samples=[{"values": describe(each)} for each in dataset.samples(key)])
