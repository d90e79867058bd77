"""``DistributedDataParallel``: torch's interface over the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook

from lockstep import caller
from lockstep.ddp import api
from lockstep.ddp.compress import CommHook
from lockstep.ddp.options import CheckFinite, ReplicaOptions
from lockstep.ddp.replica import Replica
from lockstep.ddp.transfer import move_to

Device = int | str | torch.device


class DistributedDataParallel(nn.Module, Joinable):
    """A module whose gradients are averaged over the ranks: torch's class of this name, over lockstep's engine.

    **Collective** to construct. Takes torch's arguments with torch's meanings; the module stands in ``.module``, and
    keys of ``state_dict()`` begin with ``module.``. :func:`lockstep.replicate` does the same without wrapping.

    What differs from torch: parameters without a gradient work without ``find_unused_parameters``; gradients are
    weighted by the sharded loader's slices; a forward in evaluation mode sends nothing (see Note [Buffers]); a
    backward that reaches the parameters some other way than through ``forward`` is averaged as well.

    Args:
        module: the module, on its device or devices.
        device_ids: ``[device]`` moves the inputs there first; None leaves them alone. One process drives one device.
        output_device: as an int, a device or a list with one of these; must be ``device_ids[0]``, where the outputs
            are anyway.
        dim: has no effect (torch's uses it when it scatters to several devices, which it no longer does).
        broadcast_buffers: see Note [Buffers].
        process_group: the ranks; the default group if None.
        bucket_cap_mb: MiB of gradients that are averaged at once; 25 if None.
        find_unused_parameters: True ends the warning that names parameters no rank used.
        check_reduction: has no effect, as in torch.
        gradient_as_bucket_view: let every ``grad`` be a view of its bucket.
        static_graph: has no effect: what torch needs it for (re-entrant checkpointing, a parameter used in several
            checkpointed parts) works without it.
        init_sync: send rank 0's parameters and buffers to all ranks at construction.
        overlap: see :func:`lockstep.replicate`.
        check_finite: see :func:`lockstep.replicate`.

    Raises:
        RuntimeError: no parameter of the module requires a gradient, so there is nothing to average.
        ValueError: ``device_ids`` has more than one entry or does not fit the module.
        ReplicaMismatch, LockstepError: see :func:`lockstep.replicate`.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | Sequence[Device] | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        init_sync: bool = True,
        overlap: bool | None = None,
        check_finite: CheckFinite = "off",
    ) -> None:
        super().__init__()
        if not any(param.requires_grad for param in module.parameters()):
            raise RuntimeError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                "gradient; lockstep.replicate takes such a module as it is"
            )
        _warn_without_effect(dim=dim != 0, check_reduction=check_reduction)
        self.device_ids, self.output_device = _resolve_devices(module, device_ids, output_device)
        self.dim, self.static_graph = dim, static_graph
        self._options = ReplicaOptions(
            bucket_cap_mb=25.0 if bucket_cap_mb is None else bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            check_finite=check_finite,
            gradient_as_bucket_view=gradient_as_bucket_view,
            overlap=overlap,
            init_sync=init_sync,
        )
        self.module = module
        self.process_group = process_group
        # Not as an attribute of the module: replicas are no part of its state.
        object.__setattr__(self, "_replica", api.attach(module, process_group, self._options))

    _replica: Replica
    #: See the hook of this name's owner in ``ddp/api.py``.
    once_per_rank = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, with its inputs on ``device_ids[0]`` if that was given."""
        exporting = torch.compiler.is_exporting()  # an exported program stands for the module alone
        if not exporting:
            self._replica.before_forward(self.module)
        if self.device_ids is not None:
            inputs, kwargs = move_to(self.device_ids[0], inputs), move_to(self.device_ids[0], kwargs)
        output = self.module(*inputs, **kwargs)
        if not exporting:
            self._replica.after_forward(output)
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """**Local.** See :func:`lockstep.no_sync`."""
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
        """**Local.** See :func:`lockstep.register_comm_hook`."""
        self._replica.register_comm_hook(state, hook)

    # torch's Join reads and sets these on whatever it is given; the replica is what takes part.

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """**Local.** Called by :class:`torch.distributed.algorithms.Join`."""
        return self._replica.join_hook(**kwargs)

    @property
    def join_device(self) -> torch.device:
        """The device on which ranks tell each other that they have run out of data."""
        return self._replica.join_device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The replicas' process group."""
        return self._replica.join_process_group

    @property
    def _join_config(self) -> Any:
        return self._replica._join_config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._replica._join_config = config

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None and self.process_group is not dist.group.WORLD:
            raise RuntimeError(
                "a DistributedDataParallel can be pickled or copied only if it uses the default process group: a "
                "process group can't travel. Pickle .module, or save its state_dict"
            )
        return {key: value for key, value in self.__dict__.items() if key not in ("_replica", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = None
        object.__setattr__(self, "_replica", api.attach(self.module, None, self._options))


def _warn_without_effect(**given: bool) -> None:
    names = [name for name, passed in given.items() if passed]
    if names:
        caller.warn(f"DistributedDataParallel: {' and '.join(names)} without effect (kept for scripts that pass it)")


def _resolve_devices(
    module: nn.Module, device_ids: Sequence[Device] | None, output_device: Device | Sequence[Device] | None
) -> tuple[list[torch.device] | None, torch.device | None]:
    """The device of inputs and of outputs, or None where the module decides."""
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
    wanted = _as_device(device_ids[0])
    if str(wanted) != devices[0]:
        raise ValueError(f"device_ids={list(device_ids)!r}, but the module is on {devices[0]}: they must be the same")
    if output_device is not None and _as_device(output_device) != wanted:
        raise ValueError(f"output_device={output_device!r} is not device_ids[0]={device_ids[0]!r}: leave it out")
    return [wanted], wanted


def _as_device(device: Device) -> torch.device:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
