"""Run the workers of Ray Train as the ranks of one job. Needs the extra ``ray``.

::

from lockstep.integrations.ray import LockstepTrainer, report, save_if_preempted

    def train(config):
        world = lockstep.init()
        ...
        run = Path(ray.train.get_context().get_storage().experiment_fs_path) / "checkpoints"
        checkpointer = lockstep.Checkpointer(run, model=model, optimizer=optimizer, loader=loader)
        for epoch in checkpointer.epochs(90):
            for images, labels in loader:
                ...
                save_if_preempted(checkpointer)
            report({"loss": world.mean(loss)}, checkpointer.save())

    LockstepTrainer(train, scaling_config=ScalingConfig(num_workers=8), run_config=RunConfig(...)).fit()

Ray starts the workers, counts failures (``FailureConfig``) and starts all anew after one; the Checkpointer then resumes
from its own folder, which has to be on a disk that all nodes share. Ray's BackendConfig and Backend are for developers
of such backends and may change between its minor releases; tested with 2.60.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lockstep._files import StorePath

try:
    import ray.train
    import ray.util
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
except ImportError as error:
    raise ImportError(
        f"{error}: lockstep.integrations.ray needs Ray Train: pip install 'torch-lockstep[ray]'"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lockstep.checkpoint.api import Checkpointer

#: Steps between two checks for preemption; each check is a round trip of all workers to a Ray actor.
_STEPS_BETWEEN_LOOKS = 10


class _LockstepBackend(Backend):  # type: ignore[misc]  # (Any where ray is not installed)
    """Tells each worker its rank and the address where the ranks meet; ``lockstep.init()`` does the rest."""

    #: True: each worker sees the GPUs of all workers on its node, so that the local rank is the device, as elsewhere.
    share_cuda_visible_devices = True

    def on_training_start(self, worker_group: Any, backend_config: BackendConfig) -> None:  # noqa: ARG002
        """Set the variables of all workers; Ray calls this each time it has started them."""
        address, port = worker_group.execute_single(0, _meeting_place)
        worker_group.execute(_describe, address=address, port=port)


@dataclass
class LockstepConfig(BackendConfig):  # type: ignore[misc]
    """The backend of a Ray trainer whose workers call :func:`lockstep.init`.

    The process group is lockstep's: ``shm`` where all workers are on one machine, with its limits and errors.
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """Return the class that prepares the workers."""
        return _LockstepBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the context in which each worker runs its training function."""
        return _leaving


class LockstepTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Ray's ``DataParallelTrainer``, with its arguments and the backend of this file."""

    def __init__(
        self, train_loop_per_worker: Callable[..., Any], *, backend_config: LockstepConfig | None = None, **options: Any
    ) -> None:
        super().__init__(train_loop_per_worker, backend_config=backend_config or LockstepConfig(), **options)


def report(metrics: Mapping[str, Any], folder: str | PurePath | None = None) -> None:
    """**Collective.** Report metrics to Ray, with a checkpoint that stays in place.

    Nothing is copied: Ray notes the folder, and ``Result.checkpoint`` leads to it. Ray accepts only folders within its
    own for this run (``ray.train.get_context().get_storage().experiment_fs_path``). Leave ``CheckpointConfig``
    alone, and let the Checkpointer's ``keep`` decide what stays.

    Args:
        metrics: the values for Ray to show and keep; only rank 0's count.
        folder: the result of ``Checkpointer.save()``, if it was called.

    Raises:
        ValueError: the folder is in an object store, of which Ray has a notion of its own.
        LockstepError: a slice is in hand.
    """
    from lockstep.comm.calls import refuse_apart  # brings torch, which only the workers need

    refuse_apart("lockstep.integrations.ray.report()")
    if isinstance(folder, StorePath):
        raise ValueError(
            f"folder={folder}: Ray takes folders on file systems only: give it the metrics alone, and let the "
            "Checkpointer find its checkpoints itself"
        )
    checkpoint = None
    if folder is not None and ray.train.get_context().get_world_rank() == 0:
        checkpoint = ray.train.Checkpoint.from_directory(str(folder))
    mode = ray.train.CheckpointUploadMode.NO_UPLOAD
    ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=mode)


def save_if_preempted(checkpointer: Checkpointer, *, metrics: Mapping[str, Any] | None = None) -> PurePath | None:
    """**Collective.** Save once when Ray says that a node is about to be taken away; call it after each step.

    All ranks learn of it at the same step: at every tenth they ask Ray, which tells all workers the same. Training
    continues until the node is gone; Ray then restarts all workers if it has nodes for them, and does not count it as a
    failure (``FailureConfig.max_preemption_failures``).

    Args:
        checkpointer: the run's Checkpointer.
        metrics: the values to report with the checkpoint; None: the step.

    Returns:
        The checkpoint's folder if one was saved now.

    Raises:
        LockstepError: a slice is in hand.
    """
    from lockstep.comm.calls import refuse_apart  # as in report()

    refuse_apart("lockstep.integrations.ray.save_if_preempted()")
    if checkpointer.step % _STEPS_BETWEEN_LOOKS or checkpointer in _SAVED:
        return None
    if ray.train.get_preemption_info() is None:
        return None
    _SAVED.add(checkpointer)
    folder = checkpointer.save()
    report({"step": checkpointer.step} if metrics is None else metrics, folder)
    return folder


#: Checkpointers of this worker that have saved because of a preemption. After it, Ray starts another worker.
_SAVED: weakref.WeakSet[Checkpointer] = weakref.WeakSet()


@contextmanager
def _leaving() -> Iterator[None]:
    """Leave the world when the training function returns; after an error the worker ends, and the others notice."""
    import lockstep

    yield
    lockstep.shutdown()


def _meeting_place() -> tuple[str, int]:
    """Return this node's address and a port that is free there now; called on rank 0."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def _describe(address: str, port: int) -> None:
    context = ray.train.get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        GROUP_RANK=str(context.get_node_rank()),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
    )
