"""What differs between the modes: who computes the scores and the loss of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import lockstep
from examples.crnn.lines import Batch
from examples.crnn.model import CRNN, ctc
from examples.crnn.options import Options


@dataclass(frozen=True)
class Computing:
    """A model, and what computes with it."""

    #: Holds the parameters; the same keys in every mode.
    model: CRNN
    #: The mean loss over this process's lines of a batch.
    loss: Callable[[Batch], Tensor]
    #: [time, lines, 11] of this process's lines.
    scores: Callable[[Batch], Tensor]
    #: For people.
    words: str


def prepare(world: lockstep.World, options: Options) -> Computing:
    """**Collective.** Return a new model, on the devices of the mode."""
    if options.mode == "dp":
        return _in_threads(CRNN().to(options.devices[0]), options.devices)
    model = CRNN().to(world.device)
    if options.mode == "single":
        return _plain(model, f"one device, {world.device}")
    lockstep.replicate(model)
    return _plain(model, f"{world.world_size} replica(s) in processes, on {world.device.type}")


def _plain(model: CRNN, words: str) -> Computing:
    """Compute with the model itself; if it is a replica, its gradients are averaged in backward."""

    def scores(batch: Batch) -> Tensor:
        read: Tensor = model(batch.images, batch.widths)
        return read

    return Computing(model, lambda batch: loss_of(scores(batch), batch), scores, words)


def _in_threads(model: CRNN, devices: tuple[str, ...]) -> Computing:
    """Compute with a replica on each device: scores and loss of its part of the batch."""
    on_cpu = devices.count("cpu")
    if on_cpu > 1 and "OMP_NUM_THREADS" not in os.environ:
        # The replicas work side by side, and each would use all cores: a third of the step is lost on two cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // on_cpu))
    # Joined along dimension 0, the scores of two replicas would have twice the time and half the lines.
    parallel = lockstep.DataParallel(model, devices, criterion=loss_of, output_dim=1)

    def loss(batch: Batch) -> Tensor:
        mean: Tensor = parallel(batch.images, batch.widths, target=batch)
        return mean

    def scores(batch: Batch) -> Tensor:
        read: Tensor = parallel(batch.images, batch.widths)
        return read

    return Computing(model, loss, scores, f"{len(devices)} replica(s) in threads, on {', '.join(devices)}")


def loss_of(scores: Tensor, batch: Batch) -> Tensor:
    """Return the mean CTC loss over the lines of a batch, from their scores."""
    return ctc(scores, batch.widths, batch.digits, batch.lengths)
