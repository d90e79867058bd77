"""lockstep: data-parallel training for PyTorch.

The public names are loaded when first used (PEP 562), so that the launcher and ``lockstep --help`` never load torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

#: Public name -> the module that defines it. The type checker reads the block below; a test keeps the two equal.
_HOMES = {
    "BatchShare": "lockstep.step.share",
    "CheckpointCorrupt": "lockstep.errors",
    "CheckpointError": "lockstep.errors",
    "CheckpointMismatch": "lockstep.errors",
    "Checkpointer": "lockstep.checkpoint.api",
    "CollectiveMismatch": "lockstep.errors",
    "CollectiveTimeout": "lockstep.errors",
    "DataParallel": "lockstep.data_parallel.api",
    "DistributedDataParallel": "lockstep.ddp.wrapper",
    "DistributedSampler": "lockstep.data.sampler",
    "EnvironmentMismatch": "lockstep.errors",
    "GradNorms": "lockstep.ddp.norms",
    "LaunchError": "lockstep.errors",
    "LoadedWeights": "lockstep.checkpoint.weights",
    "LocalSteps": "lockstep.ddp.local_steps",
    "LockstepError": "lockstep.errors",
    "Log": "lockstep.metrics.api",
    "NonFiniteGradient": "lockstep.errors",
    "PeerLost": "lockstep.errors",
    "RankFailed": "lockstep.errors",
    "RendezvousError": "lockstep.errors",
    "ReplicaMismatch": "lockstep.errors",
    "Restored": "lockstep.checkpoint.restore",
    "Retention": "lockstep.checkpoint.retention",
    "ShardedLoader": "lockstep.data.loader",
    "Step": "lockstep.data.steps",
    "SyncBatchNorm": "lockstep.ddp.sync_batchnorm",
    "World": "lockstep.comm.world",
    "bf16_compress_hook": "lockstep.ddp.comm_hooks",
    "clip_grad_norm_": "lockstep.ddp.norms",
    "convert_sync_batchnorm": "lockstep.ddp.sync_batchnorm",
    "expect_slow": "lockstep.job.flight",
    "finish_round": "lockstep.ddp.api",
    "fp16_compress_hook": "lockstep.ddp.comm_hooks",
    "gathered": "lockstep.ddp.gathered",
    "grad_norms": "lockstep.ddp.norms",
    "init": "lockstep.comm.init",
    "join": "lockstep.ddp.api",
    "load_weights": "lockstep.checkpoint.weights",
    "no_sync": "lockstep.ddp.api",
    "register_comm_hook": "lockstep.ddp.api",
    "release": "lockstep.ddp.api",
    "replicate": "lockstep.ddp.api",
    "shard": "lockstep.data.loader",
    "shutdown": "lockstep.comm.init",
    "spawn": "lockstep.launch.spawn",
    "track": "lockstep.progress",
    "world": "lockstep.comm.init",
}

if TYPE_CHECKING:
    from lockstep.checkpoint.api import Checkpointer as Checkpointer
    from lockstep.checkpoint.restore import Restored as Restored
    from lockstep.checkpoint.retention import Retention as Retention
    from lockstep.checkpoint.weights import LoadedWeights as LoadedWeights
    from lockstep.checkpoint.weights import load_weights as load_weights
    from lockstep.comm.init import init as init
    from lockstep.comm.init import shutdown as shutdown
    from lockstep.comm.init import world as world
    from lockstep.comm.world import World as World
    from lockstep.data.loader import ShardedLoader as ShardedLoader
    from lockstep.data.loader import shard as shard
    from lockstep.data.sampler import DistributedSampler as DistributedSampler
    from lockstep.data.steps import Step as Step
    from lockstep.data_parallel.api import DataParallel as DataParallel
    from lockstep.ddp.api import finish_round as finish_round
    from lockstep.ddp.api import join as join
    from lockstep.ddp.api import no_sync as no_sync
    from lockstep.ddp.api import register_comm_hook as register_comm_hook
    from lockstep.ddp.api import release as release
    from lockstep.ddp.api import replicate as replicate
    from lockstep.ddp.comm_hooks import bf16_compress_hook as bf16_compress_hook
    from lockstep.ddp.comm_hooks import fp16_compress_hook as fp16_compress_hook
    from lockstep.ddp.gathered import gathered as gathered
    from lockstep.ddp.local_steps import LocalSteps as LocalSteps
    from lockstep.ddp.norms import GradNorms as GradNorms
    from lockstep.ddp.norms import clip_grad_norm_ as clip_grad_norm_
    from lockstep.ddp.norms import grad_norms as grad_norms
    from lockstep.ddp.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
    from lockstep.ddp.sync_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
    from lockstep.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
    from lockstep.errors import CheckpointCorrupt as CheckpointCorrupt
    from lockstep.errors import CheckpointError as CheckpointError
    from lockstep.errors import CheckpointMismatch as CheckpointMismatch
    from lockstep.errors import CollectiveMismatch as CollectiveMismatch
    from lockstep.errors import CollectiveTimeout as CollectiveTimeout
    from lockstep.errors import EnvironmentMismatch as EnvironmentMismatch
    from lockstep.errors import LaunchError as LaunchError
    from lockstep.errors import LockstepError as LockstepError
    from lockstep.errors import NonFiniteGradient as NonFiniteGradient
    from lockstep.errors import PeerLost as PeerLost
    from lockstep.errors import RankFailed as RankFailed
    from lockstep.errors import RendezvousError as RendezvousError
    from lockstep.errors import ReplicaMismatch as ReplicaMismatch
    from lockstep.job.flight import expect_slow as expect_slow
    from lockstep.launch.spawn import spawn as spawn
    from lockstep.metrics.api import Log as Log
    from lockstep.progress import track as track
    from lockstep.step.share import BatchShare as BatchShare

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 (the keys are strings; ruff does not see it)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    value.__module__ = __name__  # the name that users know it by, in what they print
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _register_backend() -> None:
    """Make torch know the backend "shm", if torch is there; an installed lockstep torch finds by itself."""
    if "torch" in sys.modules:
        importlib.import_module("lockstep.comm.group.register").register()


_register_backend()
