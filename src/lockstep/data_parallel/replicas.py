"""The replicas of a module: kept from forward to forward, and brought in line with the original before each.

Note [Replicas]
~~~~~~~~~~~~~~~
The first replica is the original module itself. So its buffers persist, and attributes that its forward sets stay set.
Each other replica is a tree of shallow copies of the original's modules: it has its own parameters and buffers (see
Note [When a copy is stale]), and shares all else with the original (hooks, plain attributes), as in torch. Before each
forward every module is compared with its state after the last one: attributes (training flags too) that were set or
deleted since, another class, submodules, parameters and buffers that came or went are carried over, and nothing else is
touched. So an attribute that a forward sets on its replica (a table that it builds on its device when first needed)
stays there and goes nowhere else; a change that the first replica's forward makes causes a warning.

Note [Lent parameters]
~~~~~~~~~~~~~~~~~~~~~~
A forward that records a graph lends the copies to the replicas through one autograd function: its inputs are the
original parameters, its outputs the copies, and its backward adds the replicas' gradients up, in the order of the
replicas. So ``backward``, ``torch.autograd.grad``, hooks on parameters and gradients of gradients work as they do
without replicas. The first replica is the original module; its gradients take the ordinary way, and autograd adds the
two, with the same result in either order. The first output is an empty tensor beside the originals: autograd runs a
backward in the stream of its first output, and there the originals' gradients are expected. (It knows nothing of other
devices' streams, so the backward returns to those of the forward by itself.) Autograd has a thread for each
accelerator, so replicas on accelerators go backward side by side; on the CPU it uses the caller's thread, and they
go one after the other.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lockstep import _torch, callsite
from lockstep.data_parallel.copies import Copier, Slot
from lockstep.data_parallel.devices import refuse_misplaced
from lockstep.data_parallel.threads import stream_of
from lockstep.errors import LockstepError

#: Names of the dicts in which a module holds its tensors.
_TENSORS = ("_parameters", "_buffers")

Result = TypeVar("Result")


#: Attributes of a replica that are its own and never carried over.
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_is_replica"})


class _Node:
    """One module of the original and its copies."""

    def __init__(self, source: nn.Module, replicas: int) -> None:
        self.source = source
        #: The copy for each replica; the first replica's entry is unused.
        self.copies: list[nn.Module] = [source] * replicas
        self.kind: type[nn.Module] | None = None
        self.keys: tuple[str, ...] = ()
        self.values: tuple[Any, ...] = ()
        self.children: list[tuple[str, nn.Module | None]] = []

    def changed(self) -> bool:
        """Return whether an attribute was set or deleted, or the class changed, since :meth:`look`."""
        source = self.source
        state = source.__dict__
        return (
            tuple(state) != self.keys
            or not all(map(operator.is_, state.values(), self.values))
            or type(source) is not self.kind
        )

    def look(self) -> None:
        """Remember the present attributes."""
        state = self.source.__dict__
        self.kind, self.keys, self.values = type(self.source), tuple(state), tuple(state.values())

    def known(self) -> dict[str, Any]:
        """Return the attributes as :meth:`look` remembered them."""
        return dict(zip(self.keys, self.values, strict=True))

    def carry(self, replica: int) -> None:
        """Set on a copy the attributes set on the original since :meth:`look`, and delete those deleted there."""
        copy, known, state = self.copies[replica], self.known(), self.source.__dict__
        # A module may choose what its replica gets: an RNN gives it a separate list of weights.
        fresh = self.source._replicate_for_data_parallel()
        if copy is self.source:
            copy = self.copies[replica] = fresh
        copy.__class__ = type(self.source)  # the class changes when a parametrization comes or goes
        for name in known.keys() - state.keys() - _OWN:
            copy.__dict__.pop(name, None)
        for name, value in state.items():
            if name not in _OWN and (name not in known or known[name] is not value):
                copy.__dict__[name] = fresh.__dict__[name]
                if name == "_compiled_call_impl":
                    leave_uncompiled(self.source, copy)


class Replicas:
    """The replicas of one or two modules (the second a loss function) on some devices."""

    def __init__(self, roots: Sequence[tuple[str, nn.Module]], devices: Sequence[torch.device], copier: Copier) -> None:
        self._roots, self._devices, self._copier = roots, devices, copier
        self._nodes: dict[int, _Node] = {}
        self._slots: dict[int, Slot] = {}
        self._warned: set[str] = set()
        for name, root in roots:
            _refuse_unfit(name, root)

    def align(self, used: Sequence[int]) -> None:
        """Bring the replicas that are ``used`` in line with the original, and copy the tensors that changed.

        Raises:
            LockstepError: a parameter or buffer is not on the first device.
        """
        modules = self._modules()
        for name, root in self._roots:
            refuse_averaged(name, root)
        self._align_modules(modules)
        self._align_slots(modules)
        if len(used) > 1:
            self._copier.renew(list(self._slots.values()), used[1:])

    def training_flags(self) -> tuple[bool, ...]:
        """Return the training flags of all modules."""
        return tuple(node.source.training for node in self._nodes.values())

    def equip(self, used: Sequence[int]) -> None:
        """Put the copies into the replicas; if a graph is recorded, as autograd lends them.

        Args:
            used: the replicas, the first among them.
        """
        slots, others = list(self._slots.values()), list(used[1:])
        if torch.is_grad_enabled():
            self._lend([slot for slot in slots if slot.source.requires_grad], others)
        for node in self._nodes.values():
            for replica in others:
                for kind in _TENSORS:
                    sources = node.source.__dict__[kind]
                    held = node.copies[replica].__dict__[kind]
                    if held.keys() != sources.keys():
                        held.clear()  # one was removed or inserted: names keep the original's order
                    for name, source in sources.items():
                        _hang(node.copies[replica], kind, name, self._tensor_for(source, replica))

    def module(self, root: int, replica: int) -> nn.Module:
        """Return a replica of a root."""
        return self._nodes[id(self._roots[root][1])].copies[replica]

    def watched(self, forward: Callable[[], Result], *, warn: bool) -> Result:
        """Call ``forward`` and return its result. Remember the new values of attributes that it set.

        Args:
            forward: runs the replicas.
            warn: also warn of these attributes, since other replicas have set theirs.
        """
        try:
            result = forward()
        except BaseException:
            self._after_forward(warn=False)
            raise
        self._after_forward(warn=warn)
        return result

    def _after_forward(self, *, warn: bool) -> None:
        changed = [(node, node.known()) for node in self._nodes.values() if node.changed()]
        for node, _ in changed:
            node.look()
        for node, before in changed if warn else ():
            self._warn_of(node.source, before)

    # Modules --------------------------------------------------------------------------------------------------------

    def _modules(self) -> list[nn.Module]:
        """Return every module of the original, once, in an order that depends on the tree alone."""
        found: dict[int, nn.Module] = {}
        todo = [root for _, root in reversed(self._roots)]
        while todo:
            module = todo.pop()
            if id(module) not in found:
                found[id(module)] = module
                todo.extend(child for child in reversed(module._modules.values()) if child is not None)
        return list(found.values())

    def _align_modules(self, modules: list[nn.Module]) -> None:
        before, self._nodes = self._nodes, {}
        unlinked = []
        for module in modules:
            node = before.get(id(module)) or _Node(module, len(self._devices))
            self._nodes[id(module)] = node
            children = list(module._modules.items())
            if (
                node.changed()
                or len(children) != len(node.children)
                or any(
                    name != known or child is not other
                    for (name, child), (known, other) in zip(children, node.children, strict=True)
                )
            ):
                node.children = children
                unlinked.append(node)
        for node in unlinked:
            for replica in range(1, len(self._devices)):
                if not is_compiled_wrapper(node.source):
                    node.carry(replica)
        wrappers = [node for node in unlinked if is_compiled_wrapper(node.source)]
        for node in reversed(wrappers):
            self._rewrap(node)
        for node in self._nodes.values() if wrappers else unlinked:
            self._link(node)
        for node in unlinked:
            node.look()

    def _rewrap(self, node: _Node) -> None:
        for replica in range(1, len(self._devices)):
            inner = self._nodes[id(_torch.original_of(node.source))].copies[replica]
            node.copies[replica] = rewrapped(node.source, inner)

    def _link(self, node: _Node) -> None:
        if is_compiled_wrapper(node.source):
            return  # it is built around its child
        for replica in range(1, len(self._devices)):
            node.copies[replica]._modules = {
                name: None if child is None else self._nodes[id(child)].copies[replica] for name, child in node.children
            }

    # Tensors --------------------------------------------------------------------------------------------------------

    def _named_tensors(self, modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in modules:
            for kind in _TENSORS:
                for tensor in module.__dict__[kind].values():
                    if tensor is not None:
                        yield module, kind, tensor

    def _align_slots(self, modules: Sequence[nn.Module]) -> None:
        before, self._slots = self._slots, {}
        for module, kind, tensor in self._named_tensors(modules):
            slot = self._slots.get(id(tensor))
            if slot is None:
                slot = before.get(id(tensor)) or Slot(tensor, len(self._devices), is_buffer=kind == "_buffers")
                slot.training = False
                self._slots[id(tensor)] = slot
            slot.training = slot.training or module.training
            if tensor.device != self._devices[0]:
                self._refuse_misplaced()

    def _refuse_misplaced(self) -> None:
        for prefix, root in self._roots:
            named = [*root.named_parameters(prefix=prefix), *root.named_buffers(prefix=prefix)]
            refuse_misplaced(named, self._devices[0])

    def _lend(self, slots: Sequence[Slot], others: Sequence[int]) -> None:
        for slot in self._slots.values():
            for replica in others:
                slot.lent[replica] = None
        if not slots:
            return
        origins = [(i, replica) for replica in others for i in range(len(slots))]
        copies = [slot.copy(replica) for replica in others for slot in slots]
        lent = lend(origins, [slot.source for slot in slots], copies)
        for (i, replica), tensor in zip(origins, lent, strict=True):
            slots[i].lent[replica] = tensor

    def _tensor_for(self, source: Tensor | None, replica: int) -> Tensor | None:
        if source is None:
            return None
        slot = self._slots[id(source)]
        # Without a graph, a tensor lent to an earlier forward will do as well: it is the same memory. And a checkpoint
        # of that forward may run again in its backward, and must find the graph then.
        lent = slot.lent[replica]
        return slot.copy(replica) if lent is None else lent

    def _warn_of(self, module: nn.Module, before: dict[str, Any]) -> None:
        derived = _derived_names(module)
        for name, value in module.__dict__.items():
            label = f"{type(module).__name__}.{name}"
            if name in derived or name.startswith("_") or label in self._warned:
                continue
            if name not in before or not _is_equal(before[name], value):
                self._warned.add(label)
                callsite.warn(
                    f"the forward sets {label}: with several replicas the module keeps what the first one "
                    "set, from its part of the batch, and the others' values are not seen. Return it from the forward, "
                    "or make it a buffer and change that in place"
                )


def refuse_averaged(path: str, module: nn.Module) -> None:
    """Refuse a module whose forward communicates with other ranks: it can't run in several threads of this one.

    Raises:
        LockstepError: it is a replica of :func:`lockstep.replicate`, or wrapped to be one.
    """
    if any(getattr(each, "once_per_rank", False) for each in (module, *module._forward_pre_hooks.values())):
        raise LockstepError(
            f"'{path}' averages its gradients over the ranks, which it does once for each forward of a rank, and here "
            "every replica would: wrap it in DataParallel first, and replicate that "
            "(lockstep.replicate(lockstep.DataParallel(module, ...)))"
        )


def _refuse_unfit(name: str, root: nn.Module) -> None:
    for path, module in root.named_modules(prefix=name):
        refuse_averaged(path, module)
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"'{path}' is a ScriptModule, which can't be replicated: pass the module it was made from")
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            raise ValueError(
                f"'{path}' has lazy parameters, which have no shape yet: run one batch through the module, then wrap it"
            )


def _hang(module: nn.Module, kind: str, name: str, tensor: Tensor | None) -> None:
    """Put a tensor where a parameter or buffer belongs."""
    tensors = module.__dict__[kind]
    if tensor is not None and type(module).__setattr__ is not nn.Module.__setattr__:
        # The class's own __setattr__ must see it: an RNN keeps its weights in a second list. nn.Module would refuse a
        # tensor under the name of a parameter, so the name is freed first, and the tensor put in its place afterwards.
        tensors.pop(name, None)
        setattr(module, name, tensor)
        tensor = module.__dict__.pop(name, tensor)
    tensors[name] = tensor


def _derived_names(module: nn.Module) -> set[str]:
    """Return the attributes that hooks compute anew before each forward (weight norm, spectral norm, pruning)."""
    hooks = module._forward_pre_hooks.values()
    return {name for hook in hooks for name in (str(getattr(hook, "name", "")), _torch.hook_name(hook))}


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether an attribute is unchanged; only plain values are compared by value."""
    plain = (bool, int, float, str, tuple, type(None))
    return one is other or (isinstance(one, plain) and type(one) is type(other) and repr(one) == repr(other))


# ``torch.compile`` binds compiled code to one module object; each replica needs it bound to its own.


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is what ``torch.compile(module)`` returned."""
    # The compiler is looked up, not imported: importing it takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def rewrapped(wrapper: Any, inner: nn.Module) -> nn.Module:
    """Return what ``torch.compile`` with the same options makes of ``inner``."""
    # dynamo_ctx has no underscore but is not documented; torch offers no other way to repeat a compile's options.
    module: nn.Module = type(wrapper)(inner, wrapper.dynamo_ctx)
    return module


def leave_uncompiled(source: nn.Module, replica: nn.Module) -> None:
    """Let ``replica`` run uncompiled if ``source`` was compiled in place: that code is bound to ``source`` alone."""
    replica._compiled_call_impl = None
    if source._compiled_call_impl is not None:
        callsite.warn(
            f"{type(source).__name__}.compile() compiled that one module, so its replicas run uncompiled: use "
            "DataParallel(torch.compile(module)) instead"
        )


def lend(origins: Sequence[tuple[int, int]], sources: Sequence[Tensor], copies: Sequence[Tensor]) -> list[Tensor]:
    """Return ``copies`` of ``sources`` as autograd knows them.

    Args:
        origins: for each copy, the position of its original among ``sources``, and the replica it is lent to.
        sources: the original parameters.
        copies: tensors like them, on the replicas' devices.
    """
    if not copies:
        return []
    return list(_Lend.apply(origins, copies, *sources)[1:])  # type: ignore[no-untyped-call]


class _Lend(torch.autograd.Function):
    @staticmethod
    @_torch.mark_untraced
    def forward(
        ctx: Any, origins: Sequence[tuple[int, int]], copies: Sequence[Tensor], *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.origins, ctx.devices = origins, [source.device for source in sources]
        ctx.streams = [stream_of(device) for device in dict.fromkeys(copy.device for copy in copies)]
        ctx.set_materialize_grads(False)
        return torch.empty(0, device=ctx.devices[0]), *(copy.detach() for copy in copies)

    @staticmethod
    @_torch.mark_untraced
    def backward(ctx: Any, _: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        totals: list[Tensor | None] = [None] * len(ctx.devices)
        with ExitStack() as stack:
            for stream in filter(None, ctx.streams):  # in which the replicas went backward
                stack.enter_context(stream)
            for (origin, _), grad in zip(ctx.origins, brought(ctx.origins, grads, ctx.devices), strict=True):
                totals[origin] = _plus(totals[origin], grad)
        return (None, None, *totals)


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


def brought(
    origins: Sequence[tuple[int, int]], grads: Sequence[Tensor | None], devices: Sequence[torch.device]
) -> list[Tensor | None]:
    """Return the gradients on the devices of the originals; small ones from one device travel in one piece."""
    brought = list(grads)
    together: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, ((origin, _), grad) in enumerate(zip(origins, grads, strict=True)):
        if grad is None or grad.device == devices[origin]:
            continue
        if torch.is_grad_enabled() or grad.layout != torch.strided or grad.nbytes >= 2**20:
            brought[i] = grad.to(devices[origin])
        else:
            together.setdefault((grad.device, grad.dtype), []).append(i)
    for positions in together.values():
        chosen = [grad for i in positions if (grad := grads[i]) is not None]
        flat = torch.cat([grad.reshape(-1) for grad in chosen]).to(devices[origins[positions[0]][0]])
        parts = flat.split([grad.numel() for grad in chosen])
        for i, part, grad in zip(positions, parts, chosen, strict=True):
            brought[i] = part.view(grad.shape)
    return brought
