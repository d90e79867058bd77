"""The parameters that a module had when it was replicated, and the check that they are still its own.

Note [What was replaced]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter that comes after ``replicate`` is not in the buckets: every rank would train its own. A look at all
of them in every step would cost more than the step of a small model, and in the middle of a forward it would be wrong:
``torch.func.functional_call`` and ``torch.export`` put other tensors in the parameters' slots and take them back. So

- torch's hooks report when a module of ours registers a parameter or a module (assignment does). If it is still there
  at the next forward that records a graph, it is found, on every rank that did the same;
- a tensor put into a module's dictionaries behind torch's back takes the place of a parameter, which gets no gradient
  from then on. So all slots (entries of these dictionaries) are looked at, some 70 nanoseconds each, where a backward
  reaches the outputs and none of the parameters, and where an averaged one leaves some out. A tensor in a new slot is
  not found, nor one in a frozen parameter's slot while all others get gradients;
- a parameter that was converted or moved (``module.half()``) stays the same object, and its ``grad``, which may be a
  view of its bucket, is converted with it and silently stops being a view. So dtypes and devices are compared when a
  backward begins, some 80 nanoseconds for each parameter.

Note [Stand-ins]
~~~~~~~~~~~~~~~~
Stand-ins, which ``torch.func.functional_call`` puts in the parameters' slots, are there during the forward only. Until
the first averaged backward has ended all slots are looked at after a forward; from then on the first, the last and
those of parameters that some averaged backward has left out, since a parameter with a stand-in gets no gradient. So
stand-ins for a few parameters that come later are found at their second forward.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn import Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep import _torch, callsite
from lockstep.ddp.hooks import accumulates
from lockstep.ddp.members import Tree, parameters_of
from lockstep.errors import LockstepError

_dtype, _device = operator.attrgetter("dtype"), operator.attrgetter("device")

#: (dictionary of a module, name in it, object that is expected there).
_Slot = tuple[dict[str, Any], str, object]

#: Module within a replica -> the replica's parameters.
_owners: weakref.WeakKeyDictionary[nn.Module, OwnParameters] = weakref.WeakKeyDictionary()


@contextmanager
def thawed(params: Sequence[Parameter]) -> Iterator[None]:
    """A context in which none of ``params`` is frozen, since autograd takes hooks and gives nodes for no other ones.

    A parameter that a script freezes after ``replicate`` stays in the layout, whose order the ranks share, and is like
    one that a loss does not use.
    """
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def may_be_trained(param: Parameter) -> bool:
    """Return whether autograd would make a gradient for ``param``, were it not frozen: not for a quantised one, say."""
    if param.is_inference() or _torch.is_made_of_tensors(param):
        return False
    return param.is_floating_point() or param.is_complex()


class OwnParameters:
    """The parameters of one replicated module; see Note [What was replaced]."""

    def __init__(self, module: nn.Module, whoami: Callable[[], str]) -> None:
        self._module, self._whoami = weakref.ref(module), whoami
        #: All parameters, held so that their ids are not reused; ``_known``: id -> original dtype and device.
        self._params = [param for _, param in parameters_of(module)]
        self._known = {id(param): (param.dtype, param.device) for param in self._params}
        self._dtypes = [*map(_dtype, self._params)]
        #: Id of a parameter -> its slots; then all slots, and the modules within.
        self._slots = _find_slots(module, self._known)
        self._all_slots = _Slots(slot for slots in self._slots.values() for slot in slots)
        self._tree = Tree(module)
        trained = [id(param) for param in self._params if param.requires_grad and id(param) in self._slots]
        self._ends = [*trained[:1], *trained[-1:]]
        self._first_and_last = [param for param in self._params if id(param) in self._ends]
        self._devices = [*map(_device, self._first_and_last)]
        #: Places where stand-ins are looked for, and their parameters' ids (None: all); see Note [Stand-ins].
        self._watched = _Slots(slot for key in trained for slot in self._slots[key])
        self._watched_ids: set[int] | None = None
        #: True if all slots are looked at after a forward.
        self.watches_all = True
        #: (owner, name, value) of foreign parameters and modules registered since, for :meth:`find_registered`.
        self.registered: list[tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module | Tensor]]] = []
        #: True if the user was warned that gradients of stand-ins are not averaged.
        self._told = False
        _watch_registrations()
        self._adopt(module)

    def close(self) -> None:
        """Drop the parameters and the modules."""
        module = self._module()
        for part in () if module is None else module.modules():
            if _owners.get(part) is self:
                del _owners[part]
        self._params.clear()
        self._slots.clear()
        self._ends.clear()
        self._first_and_last.clear()
        self._all_slots = self._watched = _Slots([])
        self.registered.clear()

    def _adopt(self, module: nn.Module) -> None:
        for part in module.modules():
            _owners[part] = self

    def note(self, owner: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
        """Note that ``owner``, one of the modules within, registers ``value``."""
        if isinstance(value, nn.Module):
            if all(id(param) in self._known for param in value.parameters()):
                self._adopt(value)
                return
        elif value is None or id(value) in self._known:
            return
        self.registered.append((weakref.ref(owner), name, weakref.ref(value)))

    def find_registered(self) -> LockstepError | None:
        """Return the error to raise if a parameter was registered after ``replicate``, and is still there."""
        if any(_is_in_place(*entry) for entry in self.registered):
            error = self._look()
            if error is not None:
                return error
        self.registered.clear()  # gone, replaced once more, or ignored
        return None

    def find_changed(self) -> LockstepError | None:
        """Return the error to raise if a parameter of the module was replaced, converted or moved."""
        return None if self._are_in_place() and self.are_of_their_kinds() else self._look()

    def left_out(self, params: Sequence[nn.Parameter]) -> LockstepError | None:
        """Return the error to raise if some of ``params``, which an averaged backward left out, are not in place."""
        ids = {*map(id, params)}
        if not self._told and (self._watched_ids is None or not self._watched_ids >= ids):
            self.watches_all = False
            self._watched_ids = {*self._ends, *ids, *(self._watched_ids or ())}
            self._watched = _Slots(slot for key in self._watched_ids for slot in self._slots.get(key, ()))
        return None if not ids or self._are_in_place() else self._look()

    def _are_in_place(self) -> bool:
        return self._all_slots.are_kept() and self._tree.parts() is not None

    def _look(self) -> LockstepError | None:
        module = self._module()
        for name, param in () if module is None else parameters_of(module):
            known, kind = self._known.get(id(param)), (param.dtype, param.device)
            if known is None:
                return self._error(name, "was added or replaced")
            for before, now, verb in zip(known, kind, ("converted", "moved"), strict=True):
                if before != now:
                    return self._error(name, f"was {before} and is {now}: it was {verb}")
        return None

    def are_all(self, module: nn.Module) -> bool:
        """Return whether ``module`` holds only known parameters: it is not within a torch.func.functional_call."""
        return all(id(param) in self._known for _, param in parameters_of(module))

    def are_of_their_kinds(self) -> bool:
        """Return whether all dtypes are unchanged, and the devices of the first and the last parameter."""
        return [*map(_dtype, self._params)] == self._dtypes and [*map(_device, self._first_and_last)] == self._devices

    def _error(self, name: str, what: str) -> LockstepError:
        return LockstepError(
            f"{self._whoami()}: parameter '{name}' {what} after replicate, so its gradient would not be averaged over "
            "the ranks: change the model first, then replicate it"
        )

    @property
    def has_told(self) -> bool:
        """Return whether the user was warned that gradients of stand-ins are not averaged."""
        return self._told

    def tell_once(self) -> None:
        """Warn once that gradients of stand-ins are not averaged."""
        if not self._told:
            self._told = True
            callsite.warn(
                f"{self._whoami()}: this backward gives gradients to tensors that replaced parameters "
                "(torch.func.functional_call). They stay this rank's own: only gradients of the module's own "
                "parameters are averaged. If that is not intended, average them: tensor.grad = world.mean(tensor.grad)"
            )

    def stand_ins(self) -> StandIns | None:
        """Return the tensors in the parameters' slots during this forward, if they can get gradients themselves.

        See Note [Stand-ins].
        """
        if self._told or self._watched.are_kept():
            return None
        module = self._module()
        foreign = [] if module is None else [p for _, p in parameters_of(module) if id(p) not in self._known]
        leaves = [tensor for tensor in foreign if tensor.is_leaf and tensor.requires_grad]
        return StandIns([get_gradient_edge(leaf).node for leaf in leaves], self) if leaves else None


class _Slots:
    """Places in modules' dictionaries."""

    def __init__(self, slots: Iterable[_Slot]) -> None:
        listed = [*slots]
        self._dicts = [held for held, _, _ in listed]
        self._names = [name for _, name, _ in listed]
        self._things = [thing for _, _, thing in listed]

    def are_kept(self) -> bool:
        """Return whether each slot still holds its object."""
        return all(map(operator.is_, map(dict.get, self._dicts, self._names), self._things))


def _find_slots(module: nn.Module, known: Container[int]) -> dict[int, list[_Slot]]:
    """Return the slots of the parameters of the ids ``known``, by id."""
    slots: dict[int, list[_Slot]] = {}
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue  # it makes its dictionaries anew at each look, and nothing can be put into them
        for name, param in part._parameters.items():
            if param is not None and id(param) in known:
                slots.setdefault(id(param), []).append((part._parameters, name, param))
    return slots


def _is_in_place(owner_ref: weakref.ref[nn.Module], name: str, value_ref: weakref.ref[nn.Module | Tensor]) -> bool:
    owner, value = owner_ref(), value_ref()
    if owner is None or value is None:
        return False
    held = owner._modules.get(name) if isinstance(value, nn.Module) else owner._parameters.get(name)
    return held is value


class StandIns:
    """Leaves that one forward used instead of parameters, known by the nodes that accumulate their gradients."""

    def __init__(self, nodes: Sequence[Node], own: OwnParameters) -> None:
        self._nodes, self._own = nodes, own

    def reached(self) -> None:
        """Warn once if the backward under way brings these leaves gradients."""
        if accumulates(self._nodes):
            self._own.tell_once()


@cache
def _watch_registrations() -> None:
    """Register torch's hooks, once for all replicas; their cost is lost in that of constructing a module."""
    register_module_parameter_registration_hook(_on_registration)
    register_module_module_registration_hook(_on_registration)


@_torch.mark_untraced
def _on_registration(owner: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
    own = _owners.get(owner)
    if own is not None:
        own.note(owner, name, value)
