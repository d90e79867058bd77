"""What differs between the modes: who computes the scores and the losses of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lockstep
from examples.segmentation.data import Batch
from examples.segmentation.models import FromBytes
from examples.segmentation.options import Options
from examples.segmentation.shapes import IGNORED

#: What the loss of the auxiliary classifier counts beside that of the other.
_AUX = 0.5


@dataclass(frozen=True)
class Computing:
    """A model, and what computes with it."""

    #: Holds the parameters; the same keys in every mode.
    model: nn.Module
    #: The sum of the losses of the pixels of each picture of this process's: [n].
    losses: Callable[[Batch], Tensor]
    #: The class of each pixel of this process's pictures: int64 [n, height, width].
    guesses: Callable[[Tensor], Tensor]
    #: For people.
    words: str
    device: torch.device


def prepare(world: lockstep.World, options: Options, model: nn.Module) -> Computing:
    """**Collective.** Take a new model to the devices of the mode."""
    device = torch.device(options.devices[0]) if options.devices else world.device
    model.to(device)
    if options.mode == "dp":
        return _in_threads(model, options.devices, device)
    words = f"one device, {device}"
    if options.mode == "ddp":
        lockstep.replicate(model)
        words = f"{world.world_size} replica(s) in processes, on {device.type}"
    network = FromBytes(model).to(device)
    return Computing(
        model,
        lambda batch: losses_of(network(batch.pictures), batch.masks.to(device)),
        lambda pictures: best(network(pictures)),
        words,
        device,
    )


def _in_threads(model: nn.Module, devices: tuple[str, ...], device: torch.device) -> Computing:
    """Compute with a replica on each device: scores and losses of its part of the batch."""
    on_cpu = devices.count("cpu")
    if on_cpu > 1 and "OMP_NUM_THREADS" not in os.environ:
        # The replicas work side by side, and each would use all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // on_cpu))
    parallel = lockstep.DataParallel(FromBytes(model).to(device), devices, criterion=losses_of, output_dim=0)
    return Computing(
        model,
        lambda batch: parallel(batch.pictures, target=batch.masks),
        lambda pictures: best(parallel(pictures)),
        f"{len(devices)} replica(s) in threads, on {', '.join(devices)}",
        device,
    )


def losses_of(scores: Mapping[str, Tensor], masks: Tensor) -> Tensor:
    """Return the cross entropies of the pixels of each picture, added up, with those of the auxiliary classifier: [n].

    A sum, because the mean over pixels that count is known only once all parts of a batch are together.
    """

    def added_up(each: Tensor) -> Tensor:
        return nn.functional.cross_entropy(each, masks, ignore_index=IGNORED, reduction="none").sum(dim=(1, 2))

    total = added_up(scores["out"])
    return total + _AUX * added_up(scores["aux"]) if "aux" in scores else total


def best(scores: Mapping[str, Tensor]) -> Tensor:
    """Return the likeliest class of each pixel."""
    return scores["out"].argmax(dim=1)
