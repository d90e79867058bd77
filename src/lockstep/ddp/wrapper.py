"""``DistributedDataParallel``: torch's interface over the same replica."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from lockstep import accelerator, callsite
from lockstep._torch import ignored_by_ddp
from lockstep.comm.calls import of_all_ranks
from lockstep.ddp import api
from lockstep.ddp.comm_hooks import CommHook, fp16_compress_hook
from lockstep.ddp.members import buffers_of, ignore, parameters_of
from lockstep.ddp.options import CheckFinite, CompareEvery, Precision, ReplicaOptions
from lockstep.ddp.replica import Replica
from lockstep.step import streams
from lockstep.text import joined
from lockstep.trees import to_device

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # loads most of a second, which few processes need

Device = int | str | torch.device


class DistributedDataParallel(nn.Module, Joinable):
    """A module whose gradients are averaged over the ranks: torch's class of this name, over a replica of lockstep's.

    **Collective** to construct. Takes torch's arguments in torch's order and with torch's meanings; the module is
    ``.module``, and keys of ``state_dict()`` begin with ``module.``. :func:`lockstep.replicate` does the same without
    wrapping. When the wrapper is gone the module is a plain one again, as after :func:`lockstep.release`.

    What differs from torch: parameters without a gradient work without ``find_unused_parameters``; gradients are
    weighted by the sharded loader's shares; a forward in evaluation mode sends nothing (see Note [Buffers]); a
    backward that reaches the parameters some other way than through ``forward`` is averaged as well.

    Args:
        module: the module, on its device or devices.
        device_ids: ``[device]`` moves the inputs there first; None leaves them alone. One process drives one device.
        output_device: as an int, a device or a list with one of these; must be ``device_ids[0]``, where the outputs
            already are.
        dim: has no effect (torch's uses it when it scatters to several devices, which it no longer does).
        broadcast_buffers: see Note [Buffers]; True if neither this nor ``forward_sync_buffers`` is given.
        init_sync: send rank 0's parameters and buffers to all ranks at construction.
        process_group: the ranks; the default group if None.
        bucket_cap_mb: MiB of gradients that are averaged at once; 25 if None.
        find_unused_parameters: True silences the warning that names parameters no rank used.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: let every ``grad`` be a view of its bucket.
        static_graph: has no effect: what torch needs it for (re-entrant checkpointing, a parameter used in several
            checkpointed parts) works without it.
        delay_all_reduce_named_params: has no effect: these are averaged with the others.
        param_to_hook_all_reduce: belongs to ``delay_all_reduce_named_params``.
        mixed_precision: must be None: ``precision`` computes in low precision, and
            ``register_comm_hook(None, lockstep.bf16_compress_hook)`` averages in it.
        device_mesh: a mesh of one dimension, instead of ``process_group``.
        skip_all_reduce_unused_params: has no effect: parameters that no rank uses are sent in their bucket at no extra
            cost.
        bucket_cap_mb_list: MiB of the first bucket, the second, and so on, instead of ``bucket_cap_mb``.
        batched_grad_copy: has no effect: small gradients are always copied together.
        forward_sync_buffers: replaces ``broadcast_buffers``, except that with False buffers are still sent at
            construction.
        lazy_bucket_allocation: has no effect: buckets are made at construction.
        overlap: see :func:`lockstep.replicate`.
        check_finite: see :func:`lockstep.replicate`.
        compare_every: see :func:`lockstep.replicate`.
        same_batches: see :func:`lockstep.replicate`.
        precision: see :func:`lockstep.replicate`.

    Raises:
        RuntimeError: no parameter of the module requires a gradient, so there is nothing to average.
        ValueError: ``device_ids`` has more than one entry or does not fit the module; arguments contradict each other.
        ReplicaMismatch, LockstepError: see :func:`lockstep.replicate`.
    """

    @of_all_ranks("lockstep.DistributedDataParallel()")
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | Sequence[Device] | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        overlap: bool | None = None,
        check_finite: CheckFinite = "step",
        compare_every: CompareEvery = "auto",
        same_batches: bool = False,
        precision: Precision | None = None,
    ) -> None:
        super().__init__()
        if not any(param.requires_grad for _, param in parameters_of(module)):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient; lockstep.replicate takes such a module as it is"
            )
        del (
            skip_all_reduce_unused_params,
            batched_grad_copy,
            lazy_bucket_allocation,
        )  # these change how torch works, not its results
        _warn_without_effect(dim=dim != 0, check_reduction=check_reduction)
        _refuse_mixed_precision(mixed_precision)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce: pass both or neither")
        self.device_ids, self.output_device = _resolve_devices(module, device_ids, output_device)
        self.dim, self.static_graph = dim, static_graph
        self.find_unused_parameters, self.gradient_as_bucket_view = find_unused_parameters, gradient_as_bucket_view
        #: The names of parameters and buffers that are left alone.
        self.parameters_to_ignore = set(ignored_by_ddp(module))
        if broadcast_buffers is None or forward_sync_buffers is not None:
            broadcast_buffers = forward_sync_buffers is not False
        self._options = ReplicaOptions(
            bucket_cap_mb=ReplicaOptions.bucket_cap_mb if bucket_cap_mb is None else bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            check_finite=check_finite,
            gradient_as_bucket_view=gradient_as_bucket_view,
            overlap=overlap,
            init_sync=init_sync,
            init_sync_buffers=None if forward_sync_buffers is None else True,
            bucket_cap_mb_list=tuple(bucket_cap_mb_list or ()),
            compare_every=compare_every,
            same_batches=same_batches,
            precision=precision,
        )
        self.module = module
        self._attach(_choose_group(process_group, device_mesh))

    def _attach(self, group: dist.ProcessGroup | None) -> None:
        replica = api.attach(self.module, group, self._options, wrapper=self)
        #: The ranks that hold replicas.
        self.process_group = replica.group
        # Not as an attribute of the module: replicas are not part of its state.
        object.__setattr__(self, "_replica", replica)

    _replica: Replica
    #: See ``_BeforeForward`` in ``ddp/api.py``.
    once_per_rank = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward, with its inputs on ``device_ids[0]`` if that was given."""
        if self.device_ids is not None:  # first: if it fails, no forward has begun
            inputs, kwargs = to_device(inputs, self.device_ids[0]), to_device(kwargs, self.device_ids[0])
        if torch.compiler.is_exporting():  # an exported program stands for the module alone
            return self.module(*inputs, **kwargs)
        self._replica.before_forward(self.module, (inputs, kwargs))
        try:
            output = self.module(*inputs, **kwargs)
            self._replica.after_forward(output)
        finally:
            streams.current.leave(self.module)
        return output

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(
                f"lockstep's DistributedDataParallel has no '{name}', which torch's class has: {_NOT_HERE[name]}"
            )
        return super().__getattr__(name)

    def no_sync(self) -> AbstractContextManager[None]:
        """See :func:`lockstep.no_sync`."""
        return self._replica.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """**Collective.** See :func:`lockstep.join`."""
        return api.join(
            self,
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """See :func:`lockstep.register_comm_hook`."""
        self._replica.synchroniser.register_comm_hook(state, hook)

    # Further members of torch's class that scripts and libraries use --------------------------------------------------

    @property
    def require_backward_grad_sync(self) -> bool:
        """Return whether backwards average. ``no_sync`` sets this for a while; set it before the forward."""
        return self._replica.syncs

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, syncs: bool) -> None:
        self._replica.syncs = bool(syncs)

    @property
    def broadcast_buffers(self) -> bool:
        """Return whether buffers are sent around training steps; see Note [Buffers]. The same on all ranks."""
        return self._replica.tensors.sends_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, sends: bool) -> None:
        self._replica.tensors.sends_buffers = bool(sends)

    #: Torch's other names of ``broadcast_buffers``.
    require_forward_param_sync = forward_sync_buffers = broadcast_buffers

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter."""
        return next(self.module.parameters()).device

    def will_sync_module_buffers(self) -> bool:
        """Return whether there are buffers, and they are sent around training steps."""
        return self.broadcast_buffers and any(True for _ in buffers_of(self.module))

    def _sync_buffers(self) -> None:
        """**Collective.** Send rank 0's buffers to all ranks."""
        self._replica.tensors.send_all(params=False)

    def _sync_params_and_buffers(self) -> None:
        """**Collective.** Send rank 0's parameters and buffers to all ranks."""
        self._replica.tensors.send_all(params=True)

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Do nothing: no times are measured; ``benchmarks/step.py`` shows how to measure them."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the data that torch's class logs, under the same names, without the times."""
        replica, options, reducer = self._replica, self._options, self._replica.reducer
        params = [param for _, param in parameters_of(self.module) if param.requires_grad]
        return {
            "world_size": dist.get_world_size(replica.group),
            "rank": dist.get_rank(replica.group),
            "module_name": type(self.module).__name__,
            "backend_name": dist.get_backend(replica.group),
            "iteration": reducer.step,
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(param.nbytes for param in params),
            "dtypes": ", ".join(sorted({str(param.dtype).removeprefix("torch.") for param in params})),
            "broadcast_buffers": int(replica.tensors.sends_buffers),
            "bucket_cap_bytes": options.bucket_caps[-1],
            "bucket_sizes": ", ".join(map(str, reducer.bucket_bytes())),
            "find_unused_parameters": int(options.find_unused_parameters),
            "gradient_as_bucket_view": int(options.gradient_as_bucket_view),
            "comm_hook": reducer.hook_name(),
            "can_set_static_graph": 1,
        }

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Register the counterpart of one of torch's hooks in C++: plain averages, or averages in float16."""
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name == "FP16_COMPRESS":
            self._replica.synchroniser.register_comm_hook(None, fp16_compress_hook)
        elif name != "ALLREDUCE":
            raise ValueError(f"comm_hook_type={comm_hook_type!r}: expected ALLREDUCE or FP16_COMPRESS")

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Iterable[str]
    ) -> None:
        """Name the members of ``module`` that DistributedDataParallel and replicate ignore; call it before them."""
        ignore(module, params_and_buffers_to_ignore)

    # torch's Join reads and sets these on the object it is given; the replica itself takes part.

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Serve :class:`torch.distributed.algorithms.Join`."""
        return self._replica.join_hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        """Return the device on which ranks tell each other that they have run out of data."""
        return self._replica.join_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Return the replicas' process group."""
        return self._replica.join_process_group

    @property
    def _join_config(self) -> Any:
        return self._replica._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._replica._join_config = config

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a DistributedDataParallel can be pickled or copied only if it uses the default process group: a "
                "process group can't travel. Pickle .module, or save its state_dict"
            )
        return {key: value for key, value in self.__dict__.items() if key not in ("_replica", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._attach(None)


_NO_REDUCER = (
    "a replica prepares itself in forward, so there is nothing to call; leave out what touches it, or use torch's "
    "class over the backend 'shm'"
)
#: Attribute of torch's class that this one lacks -> what to do instead.
_NOT_HERE = {
    "reducer": _NO_REDUCER,
    "logger": "_get_ddp_logging_data() returns what is known",
    "scatter": "forward moves its inputs itself",
    "gather": "outputs stay where they are",
    "to_kwargs": "forward moves its inputs itself",
    "_register_buffer_comm_hook": "buffers are rank 0's: pass broadcast_buffers=False and send them yourself",
    "_register_fused_optim": "step after backward: an optimizer inside it would use this rank's own gradients",
    "_update_process_group": "lockstep.release(wrapper), then wrap the module again with the other group",
    "finalize_backward": "each backward ends by itself",
    "require_manual_backward_finalization": "each backward ends by itself",
    "should_finalize_after_backward": "each backward ends by itself",
}


def _refuse_mixed_precision(mixed_precision: Any) -> None:
    if mixed_precision is not None:
        raise ValueError(
            f"mixed_precision={mixed_precision!r}: compute in low precision with precision='bf16' or 'fp16', average "
            "in it with register_comm_hook(None, lockstep.bf16_compress_hook), and leave this argument out"
        )


def _choose_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return group
    if group is not None:
        raise ValueError("process_group and device_mesh: pass one of them")
    if mesh.ndim != 1:
        raise ValueError(
            f"device_mesh={mesh}: expected one dimension, that of the ranks which hold replicas: pass mesh['dp'], or "
            "whatever it is called"
        )
    return mesh.get_group()


def _warn_without_effect(**given: bool) -> None:
    names = [name for name, passed in given.items() if passed]
    if names:
        callsite.warn(f"DistributedDataParallel: {joined(names)} without effect (kept for scripts that pass it)")


def _resolve_devices(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | Sequence[Device] | None
) -> tuple[list[torch.device] | None, torch.device | None]:
    """Return the device of inputs and of outputs, or None where the module decides."""
    if isinstance(output_device, Sequence) and not isinstance(output_device, str):
        if len(output_device) != 1:
            raise ValueError(f"output_device={list(output_device)!r}: expected one device")
        output_device = output_device[0]
    devices = sorted({str(param.device) for param in module.parameters()})
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)!r}: expected one device. One process drives one device: start a process for "
            "each (lockstep run -n 2 script.py) and pass its own, device_ids=[world.local_rank], or leave it out"
        )
    if not device_ids:
        if output_device is not None:
            raise ValueError(f"output_device={output_device!r} without device_ids: the module decides, so leave it out")
        return None, None
    if len(devices) > 1:
        raise ValueError(
            f"device_ids={list(device_ids)!r}, but the module's parameters are on {', '.join(devices)}: for a module "
            "that spans devices leave device_ids and output_device out"
        )
    if devices == ["cpu"]:
        raise ValueError(
            f"device_ids={list(device_ids)!r}, but the module is on the CPU: move it to the device first, or leave "
            "device_ids out"
        )
    kind = torch.device(devices[0]).type
    wanted = _as_device(device_ids[0], kind)
    if str(wanted) != devices[0]:
        raise ValueError(f"device_ids={list(device_ids)!r}, but the module is on {devices[0]}: they must be the same")
    if output_device is not None and _as_device(output_device, kind) != wanted:
        raise ValueError(f"output_device={output_device!r} is not device_ids[0]={device_ids[0]!r}: leave it out")
    return [wanted], wanted


def _as_device(device: Device, kind: str) -> torch.device:
    """Return the device; a number means that of the same kind as the module's."""
    return accelerator.with_index(torch.device(kind, device) if isinstance(device, int) else torch.device(device))
