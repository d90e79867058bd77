"""``DataParallel``: one module, several devices, one process."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep import _torch
from lockstep.data_parallel.copies import Copier, Copies
from lockstep.data_parallel.devices import Device, as_device, refuse_shared, resolve_devices, warn_imbalance
from lockstep.data_parallel.gather import Gatherer, OutputDim, checked_output_dim
from lockstep.data_parallel.replicas import Replicas
from lockstep.data_parallel.rng import Draws
from lockstep.data_parallel.scatter import Piece, checked_chunk_sizes, scatter
from lockstep.data_parallel.threads import Location, Modes, run_here, run_replicas
from lockstep.identity import Identity
from lockstep.step import threaded
from lockstep.trees import to_device

Criterion = Callable[..., Any]

_NOT_GIVEN = object()


class DataParallel(nn.Module):
    """A module that runs on several devices of one process at once, each on its part of the batch.

    Takes torch's arguments with torch's meanings: inputs are cut along ``dim`` (in tuples, lists, dicts,
    dataclasses and packed sequences too), everything else is passed to every replica, outputs come back in order, and
    gradients are added up in the original module, whose buffers are those of the first replica. The module is
    ``.module``, and keys of ``state_dict()`` begin with ``module.``. Its parameters and buffers must be on
    ``device_ids[0]``.

    What differs from torch: replicas are kept, and unchanged tensors are not copied again (:attr:`copies` counts); the
    loss can be computed where the outputs are; and outputs are concatenated along the dimension that holds the samples
    (Note [Which dimension] in ``gather.py``), not always along the first one.

    With a ``criterion``, ``model(inputs, target=labels)`` returns the mean loss over all samples, a scalar on
    ``output_device``; ``model(inputs)`` still returns the outputs.

    Args:
        module: the module, on the first device.
        device_ids: one device for each replica, as indices of accelerators, strings or devices. None means all
            accelerators, or the bare module if there are none. ``["cpu", "cpu"]`` makes two replicas on the CPU.
        output_device: the device on which outputs are gathered; ``device_ids[0]`` if None.
        dim: the dimension of the inputs that holds the samples.
        criterion: ``criterion(output, target)``, computed on each device on that replica's samples. A scalar is taken
            for a mean over samples, or for a sum if ``criterion.reduction == "sum"``. A module is replicated as well.
        gather: False returns a list with each replica's output, on its device.
        output_dim: the dimension of the outputs that holds the samples: an int, or a tree of ints that follows the
            outputs. ``"mean"`` declares scalars to be means over samples: one mean comes back, where otherwise
            one value for each replica does. If None, the dimension is read off the sizes.
        chunk_sizes: samples for each replica, for devices that are unequal; batches of other sizes are cut in the same
            proportion.
        check_contents: also notice edits in place through ``.data``, which torch does not record. This reads parameters
            that seem unchanged once in every forward, on their devices; False saves that.

    Raises:
        ValueError, TypeError: an argument is invalid, or the module can't be replicated (it has lazy parameters, or is
            scripted).
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        criterion: Criterion | None = None,
        gather: bool = True,
        output_dim: OutputDim = None,
        chunk_sizes: Sequence[int] | None = None,
        check_contents: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected a torch.nn.Module, not {type(module).__name__}")
        if criterion is not None and not callable(criterion):
            raise TypeError(f"criterion must be callable as criterion(output, target), not {type(criterion).__name__}")
        #: The device of each replica; empty where the bare module runs.
        self.devices = resolve_devices(device_ids)
        if device_ids is None:
            refuse_shared(self.devices, Identity.from_environment())
        # Without a device the module runs as it is, wherever it is.
        first = self.devices[0] if self.devices else None
        self.output_device = first if output_device is None or first is None else as_device(output_device)
        self.dim, self.gather = dim, gather
        self.output_dim, self.chunk_sizes = output_dim, chunk_sizes
        self.check_contents = check_contents
        if len(self.devices) == 1:
            module.to(self.devices[0])
            if isinstance(criterion, nn.Module):
                criterion.to(self.devices[0])
        self.module = module
        # The criterion is no submodule, since a loss function is not part of the model's state.
        self.__dict__["criterion"] = criterion
        warn_imbalance(self.devices, self.chunk_sizes)
        self._begin()

    criterion: Criterion | None
    output_device: Device | None

    @property
    def device_ids(self) -> list[int | torch.device]:
        """Return the devices as torch's class has them: accelerators by index."""
        return [device if device.index is None else device.index for device in self.devices]

    def _begin(self) -> _ParallelForward:
        before: _ParallelForward | None = self.__dict__.get("_forward")
        # In a plain attribute: replicas are not part of the module's state.
        forward = self.__dict__["_forward"] = _ParallelForward(self._options())
        if before is not None:
            forward.copier.count = before.copier.count
        return forward

    def _options(self) -> _ForwardOptions:
        return _ForwardOptions(
            self.module,
            self.criterion,
            self.devices,
            self.output_device,
            self.dim,
            self.gather,
            self.output_dim,
            self.chunk_sizes,
            self.check_contents,
        )

    @property
    def copies(self) -> Copies:
        """What has been copied to the replicas so far. A forward that finds nothing changed adds nothing."""
        forward: _ParallelForward = self.__dict__["_forward"]
        return forward.copier.count

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward on all devices.

        Raises:
            LockstepError: a parameter or buffer is not on ``device_ids[0]``.
            ValueError: inputs or outputs don't fit together; the shapes are shown.
            Exception: what a replica's forward raised, with the replica and its device added to its message.
        """
        forward: _ParallelForward = self.__dict__["_forward"]
        if forward.options != self._options():
            forward = self._begin()  # an attribute was set, or .module is another one
        target = kwargs.pop("target", _NOT_GIVEN) if self.criterion is not None else _NOT_GIVEN
        return forward.run(inputs, kwargs, target)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()


class _ForwardOptions(NamedTuple):
    module: nn.Module
    criterion: Criterion | None
    devices: list[torch.device]
    output_device: Device | None
    dim: int
    gathers: bool
    output_dim: OutputDim
    chunk_sizes: Sequence[int] | None
    check_contents: bool


class _ParallelForward:
    """What a DataParallel keeps beside its options: replicas, what outputs have shown, random streams."""

    def __init__(self, options: _ForwardOptions) -> None:
        # No reference to the wrapper: it goes when the last name for it goes.
        self.options = options
        self._module, self._criterion = options.module, options.criterion
        self._devices = options.devices
        # The options are checked here, because they may be set at any time.
        named = options.output_device if self._devices else None
        self._output_device = as_device(named) if named is not None else self._devices[0] if self._devices else None
        self._chunk_sizes = checked_chunk_sizes(options.chunk_sizes, len(self._devices)) if self._devices else None
        self._gatherer = Gatherer(checked_output_dim(options.output_dim))
        #: Gathers losses: means, or one loss per sample along one dimension.
        self._losses = Gatherer("mean", what="loss", remedy="Let the criterion return a mean, or one loss per sample")
        self._draws = Draws()
        self._lock = threading.RLock()
        self.copier = Copier(self._devices, check_contents=options.check_contents)
        roots = [("module", self._module)]
        if isinstance(self._criterion, nn.Module):
            roots.append(("criterion", self._criterion))
        self._replicas = Replicas(roots, self._devices, self.copier)

    @_torch.mark_untraced
    def run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        self._check_arguments(inputs, kwargs, target)
        if not self._devices:
            output = self._call(self._module, self._criterion, (inputs, kwargs, target))
            return output if self.options.gathers or target is not _NOT_GIVEN else [output]
        with self._lock, threaded.replicas(len(self._devices)):  # the replicas serve one forward at a time
            trees, pieces = scatter((inputs, kwargs, target), self._devices, self.options.dim, self._chunk_sizes)
            outputs = self._outputs(trees, [piece.replica for piece in pieces])
            return self._put_together(outputs, pieces, has_target=target is not _NOT_GIVEN)

    def _outputs(self, trees: list[Any], used: list[int]) -> list[Any]:
        """Return the output, or the loss, of each replica."""
        self._replicas.align(used)
        first = self._devices[0]
        if len(used) == 1:
            # The first replica is the module itself, so there is nothing to copy and no thread to start.
            call = self._replica_call(0, trees[0])
            return [self._replicas.watched(lambda: run_here(call, self._location(0)), warn=False)]
        self._replicas.equip(used)
        turn = self._draws.begin(self._replicas.training_flags(), first)
        modes = Modes.of_this_thread(first.type, sharing=1 if turn.in_turn else len(used))
        locations = [self._location(replica) for replica in used]
        calls = [
            turn.wrapped(replica, self._devices[replica], self._replica_call(replica, tree))
            for replica, tree in zip(used, trees, strict=True)
        ]
        run = partial(run_replicas, calls, locations, modes, in_turn=turn.in_turn)
        outputs = self._replicas.watched(run, warn=True)
        self._draws.end(turn)
        return outputs

    def _location(self, replica: int) -> Location:
        return Location(replica, len(self._devices), self._devices[replica])

    def _replica_call(self, replica: int, tree: Any) -> Callable[[], Any]:
        module = self._replicas.module(0, replica)
        criterion = self._replicas.module(1, replica) if isinstance(self._criterion, nn.Module) else self._criterion
        return lambda: self._call(module, criterion, tree)

    @staticmethod
    def _call(module: nn.Module, criterion: Criterion | None, tree: Any) -> Any:
        inputs, kwargs, target = tree
        output = module(*inputs, **kwargs)
        if target is _NOT_GIVEN or criterion is None:
            return output
        return criterion(output, target)

    def _put_together(self, outputs: list[Any], pieces: list[Piece], *, has_target: bool) -> Any:
        device = self._output_device
        if device is None:
            raise AssertionError("devices without an output device")  # a mistake in this package
        sizes = [piece.size for piece in pieces]
        if has_target:
            if getattr(self._criterion, "reduction", None) == "sum":
                return torch.stack([output.to(device) for output in outputs]).sum()
            return self._losses.gather(outputs, sizes, device)
        if not self.options.gathers:
            return outputs
        if len(self._devices) == 1:
            return to_device(outputs[0], device)  # there is nothing to put together
        return self._gatherer.gather(outputs, sizes, device)

    def _check_arguments(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> None:
        """Explain how to pass the target if the forward does not take these arguments."""
        if self._criterion is None or target is not _NOT_GIVEN or len(inputs) < 2:
            return
        try:
            inspect.signature(self._module.forward).bind(*inputs, **kwargs)
        except TypeError as error:
            raise TypeError(
                f"{type(self._module).__name__}.forward does not take these arguments ({error}). What the criterion "
                "compares the output with is passed by name: model(inputs, target=labels)"
            ) from None


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run ``module(*inputs)`` on several devices, once: torch's function of this name.

    The module is copied for each call: for more than one, make a :class:`DataParallel`, which keeps its replicas.

    Args:
        module: the module, on the first device.
        inputs: a tuple of arguments, or one argument; None for none.
        device_ids, output_device, dim: see :class:`DataParallel`.
        module_kwargs: arguments by name.
    """
    arguments = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    return DataParallel(module, device_ids, output_device, dim)(*arguments, **(module_kwargs or {}))
