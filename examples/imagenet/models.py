"""The model by its name, its norms, and weights to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

import lockstep
from examples.imagenet.cifar import ResNetCifar
from examples.imagenet.vision import require

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
#: Channels of a group: 16, since the small ResNet's narrowest layers have no more (Y. Wu and K. He, "Group
#: Normalization", 2018, found 16 as good as their 32 groups).
_GROUP = 16


def build(arch: str, num_classes: int, norm: str) -> nn.Module:
    """Return a new model with random weights, on the CPU.

    Args:
        arch: "resnet20-cifar", or torchvision's name of a classification model.
        num_classes: how many scores it gives.
        norm: "batch": as it is; "sync": every batch norm is one over all ranks; "group": it is a group norm.
    """
    model = ResNetCifar(3, num_classes) if arch == "resnet20-cifar" else _torchvision(arch, num_classes)
    return with_norm(model, norm, arch)


def with_norm(model: nn.Module, norm: str, arch: str) -> nn.Module:
    """Return a model with other norms than its batch norms; ``norm`` is as for :func:`build`, ``arch`` for errors."""
    if norm == "batch":
        return model
    if not any(isinstance(layer, _BATCH_NORMS) for layer in model.modules()):
        raise SystemExit(f"--norm {norm}: {arch} has no batch norms that could be replaced; leave --norm out")
    return lockstep.convert_sync_batchnorm(model) if norm == "sync" else _with_group_norms(model)


def _torchvision(arch: str, num_classes: int) -> nn.Module:
    models = require("torchvision.models")
    names = models.list_models(module=models)
    if arch not in names:
        near = [name for name in names if name.startswith(arch[:4])] or names
        raise SystemExit(
            f"-a {arch}: unknown. There are resnet20-cifar and torchvision's, such as {', '.join(near[:8])}"
        )
    arguments: dict[str, Any] = {"num_classes": num_classes}
    if arch in ("googlenet", "inception_v3"):
        # In training these give scores of auxiliary classifiers as well, for their own loss.
        arguments |= {"aux_logits": False, "init_weights": True}
    model: nn.Module = models.get_model(arch, weights=None, **arguments)
    return model


def _with_group_norms(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, _BATCH_NORMS):
                channels = layer.num_features
                setattr(parent, name, nn.GroupNorm(_groups(channels), channels, eps=layer.eps))
    return model


def _groups(channels: int) -> int:
    """As near as can be to _GROUP channels in each."""
    return max(count for count in range(1, max(1, channels // _GROUP) + 1) if channels % count == 0)


def load_pretrained(world: lockstep.World, path: Path, model: nn.Module, *, strict: bool) -> None:
    """Load a weight file; its names may begin with ``module.``, the model's do not.

    Args:
        world: says on rank 0 what was left out.
        path: whatever ``lockstep.load_weights`` reads.
        model: receives the weights.
        strict: False: a last layer for another number of classes keeps its new weights.

    Raises:
        lockstep.CheckpointMismatch: other names or shapes differ.
    """
    if not strict:
        loaded = lockstep.load_weights(path, model, strict=False)
        differing = {line.partition(":")[0] for line in loaded.mismatched}
        if not loaded.missing and not loaded.unexpected and differing <= _last_layer(model):
            world.print(f"began with the weights of {path}")
            if differing:
                world.print(f"  but not {', '.join(sorted(differing))}, which are for another number of classes")
            return
    lockstep.load_weights(path, model)
    world.print(f"loaded {path}")


def _last_layer(model: nn.Module) -> set[str]:
    """Return the names of the parameters of the last linear or convolutional layer."""
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    name, layer = layers[-1]
    return {f"{name}.{parameter}" for parameter, _ in layer.named_parameters()}
