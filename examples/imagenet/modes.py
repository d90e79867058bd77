"""What differs between the modes: where ranks come from, and who computes the scores and the loss of a batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from examples.imagenet.options import Options
from examples.imagenet.transforms import FromBytes

#: What a rank runs.
Main = Callable[[Options], None]

_AMP = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def start(options: Options, main: Main) -> None:
    """**Collective.** Call ``main(options)`` on every rank of the mode: here, or in new processes."""
    if options.mode != "spawn":
        if options.address is not None:
            _meet(options.address, rank=options.rank, world_size=options.world_size, local_rank=0, local_world_size=1)
        main(options)
        return
    if options.address is not None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = options.address[0], str(options.address[1])
    try:
        lockstep.spawn(_spawned, (options, main), nprocs=options.nprocs)
    except lockstep.RankFailed as error:
        raise SystemExit(str(error)) from error  # it holds the rank's traceback; this process's own says nothing


def _spawned(local_rank: int, options: Options, main: Main) -> None:
    if options.address is not None:
        _meet(
            options.address,
            rank=options.rank * options.nprocs + local_rank,
            world_size=options.world_size * options.nprocs,
            local_rank=local_rank,
            local_world_size=options.nprocs,
            node_rank=options.rank,
        )
    main(options)


def _meet(address: tuple[str, int], *, node_rank: int | None = None, **place: int) -> None:
    """Describe this rank's place among several machines to lockstep.init(), as a launcher does."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
    place["group_rank"] = place["rank"] if node_rank is None else node_rank
    os.environ.update({name.upper(): str(number) for name, number in place.items()})
    # The file in which the ranks of one machine meet; those of several meet at the address.
    os.environ.pop("LOCKSTEP_STORE", None)


@dataclass(frozen=True)
class Computing:
    """A model, and what computes with it."""

    #: Holds the parameters; the same keys in every mode.
    model: nn.Module
    #: (images, labels) -> the mean loss over this process's pictures.
    loss: Callable[[Tensor, Tensor], Tensor]
    #: images -> scores [n, classes], float32.
    scores: Callable[[Tensor], Tensor]
    #: For people.
    words: str
    #: Where labels must be for the scores to be compared with them.
    device: torch.device


def prepare(world: lockstep.World, options: Options, model: nn.Module) -> Computing:
    """**Collective.** Take a new model to the devices of the mode."""
    layout: Any = {"memory_format": torch.channels_last} if options.channels_last else {}
    device = torch.device(options.devices[0]) if options.devices else world.device
    model.to(device, **layout)
    criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    if options.mode in ("ddp", "spawn"):
        lockstep.replicate(model)
    network = from_bytes(model, options, device)
    if options.mode == "dp":
        parallel = lockstep.DataParallel(network, options.devices, criterion=criterion, output_dim=0)
        words = f"{len(options.devices)} replica(s) in threads, on {', '.join(options.devices)}"
        return Computing(model, lambda images, labels: parallel(images, target=labels), parallel, words, device)
    words = f"{world.world_size} replica(s) in processes, on {device.type}"
    return Computing(
        model,
        lambda images, labels: criterion(network(images), labels.to(device, non_blocking=True)),
        network,
        f"one device, {device}" if options.mode == "single" else words,
        device,
    )


def from_bytes(model: nn.Module, options: Options, device: torch.device) -> FromBytes:
    """Return the model as it computes: compiled, in half precision, in the layout, as the options say."""
    if options.compile is not None:
        compiled: Any = torch.compile(model, backend=options.compile)
        model = compiled
    return FromBytes(model, amp=_AMP[options.amp], channels_last=options.channels_last).to(device)
