# The public names and the modules that define them, for type checkers, and for __init__.py, which reads these lines.
from lockstep.checkpoint.api import Checkpointer as Checkpointer
from lockstep.checkpoint.evaluation import Evaluation as Evaluation
from lockstep.checkpoint.restore import Restored as Restored
from lockstep.checkpoint.retention import Retention as Retention
from lockstep.checkpoint.weights import LoadedWeights as LoadedWeights
from lockstep.checkpoint.weights import load_weights as load_weights
from lockstep.comm.init import init as init
from lockstep.comm.init import shutdown as shutdown
from lockstep.comm.init import world as world
from lockstep.comm.world import World as World
from lockstep.data.loader import ShardedLoader as ShardedLoader
from lockstep.data.once import once_per_machine as once_per_machine
from lockstep.data.sampler import DistributedSampler as DistributedSampler
from lockstep.data.shard import shard as shard
from lockstep.data.slicing import Slices as Slices
from lockstep.data.split import Split as Split
from lockstep.data.split import split as split
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
from lockstep.ddp.loss_scaling import LossScale as LossScale
from lockstep.ddp.loss_scaling import loss_scale as loss_scale
from lockstep.ddp.loss_scaling import scale_loss as scale_loss
from lockstep.ddp.norms import GradNorms as GradNorms
from lockstep.ddp.norms import clip_grad_norm_ as clip_grad_norm_
from lockstep.ddp.norms import grad_norms as grad_norms
from lockstep.ddp.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from lockstep.ddp.sync_batchnorm import convert_sync_batchnorm as convert_sync_batchnorm
from lockstep.ddp.wrapper import DistributedDataParallel as DistributedDataParallel
from lockstep.errors import CellFailed as CellFailed
from lockstep.errors import CellInterrupted as CellInterrupted
from lockstep.errors import CheckpointCorrupt as CheckpointCorrupt
from lockstep.errors import CheckpointError as CheckpointError
from lockstep.errors import CheckpointMismatch as CheckpointMismatch
from lockstep.errors import CollectiveMismatch as CollectiveMismatch
from lockstep.errors import CollectiveTimeout as CollectiveTimeout
from lockstep.errors import EnvironmentMismatch as EnvironmentMismatch
from lockstep.errors import LaunchError as LaunchError
from lockstep.errors import LockstepError as LockstepError
from lockstep.errors import NonFiniteGradient as NonFiniteGradient
from lockstep.errors import NoTerminal as NoTerminal
from lockstep.errors import PeerLost as PeerLost
from lockstep.errors import RankFailed as RankFailed
from lockstep.errors import RendezvousError as RendezvousError
from lockstep.errors import ReplicaMismatch as ReplicaMismatch
from lockstep.interactive.extension import load_ipython_extension as load_ipython_extension
from lockstep.interactive.extension import unload_ipython_extension as unload_ipython_extension
from lockstep.interactive.ranks import InteractiveRanks as InteractiveRanks
from lockstep.job.flight import expect_slow as expect_slow
from lockstep.launch.spawn import spawn as spawn
from lockstep.metrics.api import Log as Log
from lockstep.progress import track as track
from lockstep.step.share import BatchShare as BatchShare
from lockstep.version import __version__

__all__ = ["__version__"]

_HOMES: dict[str, str]
