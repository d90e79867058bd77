"""Tensors of a run that may change although no optimizer steps: when they do is learned, and what they held is kept.

Note [Watched tensors]
~~~~~~~~~~~~~~~~~~~~~~
A checkpoint of a point of rest needs what tensors held at that point, so what changes between a point and the next
optimizer's step has to be copied at the point. Batch norms are known: they change their statistics in C++, where torch
counts no change. Of all others torch's counter of changes tells, and so does another tensor, or other memory, in the
same place. For writes that torch does not count (``buffer.data``) a few bytes are compared at every point, and at the
first three points the beginning of its bits. Of these three, those that follow no step teach nothing and do not count:
a run that resumes at the end of a pass has three at once.

- Buffers and frozen parameters of the model, and the tensors of small extra modules, are copied at every point once
  they have been seen to change.
- Parameters that optimizers step, and tensors of other extra modules (averages of weights), change with every step,
  mostly between the step and the point. They are copied only where they have been seen to change *after* a point: after
  one that follows a step (an embedding with ``max_norm``), or after one between two epochs (weights of an average that
  are put in for an evaluation, an average that is updated after the pass). On an accelerator they are copied only if
  they are small: a copy of all parameters could take the memory that the training needs.

What has changed since a point and was not copied is not known, and is named.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep import _torch, bits
from lockstep.checkpoint.match import bare, plain_names
from lockstep.checkpoint.state import RunState

_copy = _torch.foreach_copy()
_version, _is_trained = operator.attrgetter("_version"), operator.attrgetter("requires_grad")
_raw = operator.attrgetter("raw")

#: The number of points at which the bits of tensors are compared, to find those that change without a count, and the
#: bytes of each that are.
_LEARNS, _BEGINNING = 3, 2**16
#: Bytes of tensors that are copied at these points although they have not been seen to change, and bytes of what
#: changes with every step that are copied on an accelerator.
_SMALL = 64 * 2**20
#: The number of an extra module's tensors, and their bytes, that are copied whenever they have changed.
_FEW, _SMALL_EXTRA = 8, 2**20
#: Bytes that are compared of a tensor at every point, at its beginning and in its middle; the number of tensors of one
#: module of which this is done where all change with every step.
_PEEK, _PEEKED = 64, 4
#: The number of steps of an epoch after which it is asked whether parameters are frozen now.
_FREEZES = 2

#: The model itself, among the names of extra objects.
MODEL = ""
#: A tensor's place in the state: the extra module that has it, or MODEL, and its name in that module's state.
Place = tuple[str, str]


class After(enum.IntEnum):
    """What a point of rest follows."""

    STEP = 0
    #: A pass or an epoch, and no step. (No save: what follows the pass is done again, and the save with it.)
    OTHER = 1


@dataclass(eq=False, slots=True)
class _Tensor:
    """A tensor in the state of a module."""

    #: The module's dict that holds it, and its key there: modules may put another tensor in its place.
    holder: dict[str, torch.Tensor | None]
    key: str
    place: Place
    #: True if it is one of a norm's statistics, which change in C++.
    of_norm: bool
    #: True if it is copied at every point, since torch does not count its changes.
    always: bool
    #: After which points it was seen to change, for what changes with every step; one set for a norm's statistics, of
    #: which torch counts the changes of one.
    after: set[After]
    #: It, its version, its address, some of its bytes and a digest of its beginning at the last look; None: there was
    #: none.
    tensor: torch.Tensor | None = None
    version: int = -1
    address: int = 0
    bytes: bytes = b""
    digest: str = ""
    #: The bytes themselves, where they are.
    views: tuple[Any, ...] = ()

    def look(self, *, compare: bool) -> bool:
        """Return whether it was seen to change since the last look, and note what it is now.

        Args:
            compare: compare its bits as well.
        """
        before, version, address, some, digest = self.tensor, self.version, self.address, self.bytes, self.digest
        now = self.tensor = self.holder.get(self.key)
        if now is None:
            return False
        self.version = -1 if now.is_inference() else now._version
        self.peek(now, again=now is not before)
        self.digest = bits.hexdigest(now, _BEGINNING) if compare and not self.always else ""
        if now is not before:
            return before is not None
        if self.version != version or self.version == -1 or self.address != address:
            return True
        uncounted = self.bytes != some or bool(digest and self.digest and digest != self.digest)
        self.always |= uncounted
        return uncounted

    def peek(self, now: torch.Tensor, *, again: bool = False) -> None:
        """Note the address of the tensor that it is now, and some of its bytes on the CPU.

        Args:
            again: it is another one than before.
        """
        address = 0 if now.layout is not torch.strided else now.data_ptr()
        if again or address != self.address:
            self.address, self.views = address, _views(now) if address else ()
        self.bytes = b"".join(map(_raw, self.views))

    def has_moved(self) -> bool:
        """Return whether it is not what it was at the last look, as far as can be seen; for another thread."""
        now = self.holder.get(self.key)
        if now is not self.tensor or now is None:
            return now is not self.tensor
        if now.is_inference() or now._version != self.version:
            return True
        now = now.detach()  # its memory stays while it is read
        if self.address:
            if now.data_ptr() != self.address:
                return True
            if b"".join(map(_raw, self.views)) != self.bytes:
                return True
        return bool(self.digest and bits.hexdigest(now, _BEGINNING) != self.digest)


class Watch:
    """The tensors of a run that may change although no optimizer steps. See Note [Watched tensors].

    Args:
        run: the run.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._optimizers = run.optimizers()
        #: The statistics of the model's norms; what is copied once it has changed; what changes with every step.
        self._norms: list[_Tensor] = []
        self._eager: list[_Tensor] = []
        self._with_steps: list[_Tensor] = []
        #: The tensors of both kinds that are in the host's memory.
        self._on_host: list[_Tensor] = []
        #: The places of these, and what they were at the last look, with torch's counts of their changes.
        self._held: list[tuple[dict[str, Any], str]] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        #: Those of them that were seen to change after a point, by what it follows.
        self._moving: dict[After, list[_Tensor]] = {kind: [] for kind in After}
        #: Number of stepped parameters among the latter, which come first, and those of which some bytes are compared.
        self._params = 0
        self._peeked: list[_Tensor] = []
        self._samples = _Samples([])
        self._listed: frozenset[int] | None = None
        #: The extra modules that have changed between an optimizer's step and a point, and all of them.
        self.updated: set[str] = set()
        self.owners = {name for name, _ in _modules(run) if name != MODEL}
        self.copies: dict[Place, torch.Tensor] = {}
        #: What was copied at the present points.
        self._copied: list[list[_Tensor]] = []
        #: Points since the last one that followed no step.
        self._steps = 0
        #: The points that have taught something, and what the last one followed.
        self._notes = 0
        self._after: After | None = None
        #: True until an optimizer steps.
        self._is_at_rest = False

    def note(self, after: After, *, alone: bool, teaches: bool) -> bool:
        """Copy what changes after points, at one of them. Return whether what is copied is no longer that of the
        points before.

        Args:
            after: what the point follows.
            alone: there are no points before it with no step between.
            teaches: what has changed since the last point tells what steps change.
        """
        others = False
        self._steps = 0 if after is After.OTHER else self._steps + 1
        if self._steps <= _FREEZES or self._listed is None:
            others = self._list(after)
        compare = self._notes < _LEARNS
        self._notes += teaches
        changed: set[int] = set()
        wanted: list[_Tensor] = []
        if self._eager:
            changed, wanted = self._look(after, compare=compare)
        elif after is After.STEP and not self.updated >= self.owners:
            self.updated |= self._updated()
        if not alone:
            moved = self._learn()
            others |= bool(moved)
            changed |= moved
        for each in self._norms:
            each.tensor = each.holder.get(each.key)
        moving = self._moving[after]
        for each in moving:
            each.tensor = each.holder.get(each.key)
        if not moving or not self._may_copy(moving):
            moving = []
        self._refer()
        wanted += moving
        wanted += self._norms
        if wanted:
            others |= self._copy(wanted, changed, alone=alone)
        others &= not alone
        if alone or others:
            self._copied.clear()
        self._copied.append([*moving])
        self._after, self._is_at_rest = after, True
        return others

    def _look(self, after: After, *, compare: bool) -> tuple[set[int], list[_Tensor]]:
        """Look at what is copied once it has changed. Return the ids of what has, and what is to be copied."""
        changed = {id(each) for each in self._eager if each.look(compare=compare)}
        if after is After.STEP and not self.updated >= self.owners:
            self.updated |= {each.place[0] for each in self._eager if id(each) in changed} | self._updated()
            self.updated.discard(MODEL)
        small = compare and sum(each.tensor.nbytes for each in self._eager if each.tensor is not None) <= _SMALL
        held = self.copies
        return changed, [
            each
            for each in self._eager
            if each.always
            or id(each) in changed
            or ((small or not each.address) if each.place not in held else not each.views)
        ]

    def before_step(self) -> None:
        """Learn what has changed since the last point; an optimizer is about to step."""
        if not self._is_at_rest:
            return
        self._is_at_rest = False
        if self._after is After.OTHER or self._notes <= _LEARNS:
            self._learn()

    def after_step(self) -> None:
        """Note what parameters are now; an optimizer has stepped."""
        self._is_at_rest = False
        self._peek()

    def moved_since_step(self) -> list[str]:
        """Name parameters that have changed since an optimizer has stepped, as far as can be seen in a few of them; for
        another thread."""
        sampled = self._samples.changed()
        params = {id(each) for each in self._with_steps[: self._params]}
        return [each.place[1] for each in self._peeked if id(each) in params and (each in sampled or each.has_moved())]

    def updated_now(self) -> set[str]:
        """Return the extra modules that have changed since the last point; for another thread."""
        return {each.place[0] for each in self._eager if each.has_moved()} | self._updated()

    def _updated(self) -> set[str]:
        """Return those of the extra modules that change with every step."""
        return {each.place[0] for each in self._moved(self._params)}

    def unknown(self) -> list[Place]:
        """Return the places of what has changed since the last point and was not copied; for another thread."""
        listed = [*self._norms, *self._eager, *self._with_steps]
        known, fresh = {each.place for each in listed}, self.known().keys()
        late = [place for place in _places(self._run) if place not in known]
        moved = [*self._moved(), *self._samples.changed(), *(each for each in self._peeked if each.has_moved())]
        moved += [each for each in (*self._norms, *self._eager) if each.place not in fresh and each.has_moved()]
        return [*dict.fromkeys(each.place for each in moved if each.place not in fresh), *late]

    def kept_alone(self) -> dict[Place, torch.Tensor] | None:
        """Return what was copied at the present points and what the host holds, by its place: with it, the rest of what
        is on an accelerator is all that a checkpoint needs. For the main thread, in front of an optimizer's step.

        None: something has changed since the last point and was not copied, or the host holds too much.
        """
        listed = [*self._norms, *self._eager]
        known = self.known()
        if any(each.place not in known and each.has_moved() for each in listed):
            return None
        if any(each.place not in known for each in self._moved()):
            return None
        found = {place: copied for place, copied in known.items() if copied.is_cpu}
        for each in self._on_host:
            now = each.holder.get(each.key)
            if now is not None and each.place not in known:
                found[each.place] = now.detach()
        if sum(value.nbytes for value in found.values()) > _SMALL_EXTRA:
            return None
        return {**known, **{place: value.clone() for place, value in found.items()}}

    def known(self) -> dict[Place, torch.Tensor]:
        """Return what was copied at the present points, by its place."""
        fresh = {each.place for copied in (self._norms, self._eager, *self._copied) for each in copied}
        return {place: self.copies[place] for place in fresh if place in self.copies}

    def _refer(self) -> None:
        """Note what tensors are now that change with every step."""
        count = self._params if self._steps else 0  # parameters stay; who replaces them does so between two epochs
        if count < len(self._held):
            self._tensors[count:] = [holder[key] for holder, key in self._held[count:]]
        self._versions = [*map(_version, self._tensors)]
        self._peek()

    def _peek(self) -> None:
        """Note what some of these tensors are now, with some of their bytes."""
        for each in self._peeked:
            before, now = each.tensor, each.holder.get(each.key)
            each.tensor = now
            if now is None:
                continue
            each.version = now._version
            if now is before and now.data_ptr() == each.address:
                each.bytes = b"".join(map(_raw, each.views))
            else:
                each.peek(now, again=True)
        if self._samples.tensors:
            self._samples.take()

    def _learn(self) -> set[int]:
        """Note after which point what changes with every step has changed. Return the ids of what has."""
        moved, after = self._moved(), self._after
        if moved and after is not None:
            for each in moved:
                each.after.add(after)
            self._moving[after] = [each for each in self._with_steps if after in each.after]
        return {*map(id, moved)}

    def _moved(self, start: int = 0) -> list[_Tensor]:
        """Return what changes with every step, as far as it has changed since the last point by torch's count.

        Args:
            start: the first that is looked at.
        """
        tensors = [holder[key] for holder, key in self._held[start:]]
        versions = [*map(_version, tensors)]
        then, counts = self._tensors[start:], self._versions[start:]
        if versions == counts and all(map(operator.is_, tensors, then)):
            return []
        before = zip(self._with_steps[start:], tensors, versions, then, counts, strict=True)
        return [each for each, now, version, old, count in before if now is not old or version != count]

    def _copy(self, wanted: list[_Tensor], changed: set[int], *, alone: bool) -> bool:
        """Copy tensors. Return whether copies that were there before are other ones now."""
        into, of, others = [], [], False
        copies = self.copies
        for each in wanted:
            now, held = each.tensor, copies.get(each.place)
            if now is None:
                others |= copies.pop(each.place, None) is not None
            elif held is None or held.shape != now.shape or held.dtype != now.dtype or held.device != now.device:
                copies[each.place] = now.detach().clone()
                others |= id(each) in changed
            elif each.always or each.of_norm or each.after or id(each) in changed or not now.is_cpu:
                into.append(held)
                of.append(now)
                # Where an optimizer has stepped there is no point left that has the old copies. An accelerator would
                # have to be waited for: what it holds has changed if torch has counted it, as it counts the batches of
                # norms.
                if not alone:
                    others |= not bits.same(now, held) if now.is_cpu else self._is_counted(each, changed)
        if into:
            _copy_all(into, of)
        for each in self._norms:
            each.version = -1 if each.tensor is None or each.tensor.is_inference() else each.tensor._version
        return others

    def _is_counted(self, each: _Tensor, changed: set[int]) -> bool:
        return id(each) in changed or (
            each.of_norm and each.tensor is not None and each.tensor._version != each.version
        )

    def _may_copy(self, moving: list[_Tensor]) -> bool:
        held = [each.tensor for each in moving if each.tensor is not None]
        return all(each.is_cpu for each in held) or sum(each.nbytes for each in held) <= _SMALL

    def _list(self, after: After) -> bool:
        """List the tensors, anew if other parameters are stepped now. Return whether they are others."""
        if self._listed is not None and after is After.STEP and all(map(_is_trained, self._tensors[: self._params])):
            return False
        stepped = self._stepped()
        if stepped == self._listed:
            return False
        before = {each.place: each for each in (*self._norms, *self._eager, *self._with_steps)}
        self._listed = None if _has_lazy(self._run) else stepped
        self._norms, self._eager = [], []
        params: list[_Tensor] = []
        averages: list[_Tensor] = []
        for owner, module in _modules(self._run):
            listed = [before.get(each.place, each) for each in _tensors(owner, module)]
            held = [(each, each.holder.get(each.key)) for each in listed]
            few = len(held) <= _FEW and sum(t.nbytes for _, t in held if t is not None) <= _SMALL_EXTRA
            for each, tensor in held:
                if each.of_norm and owner == MODEL:
                    self._norms.append(each)
                elif tensor is None or tensor.is_inference():
                    self._eager.append(each)
                elif id(tensor) in stepped:
                    params.append(each)
                elif owner == MODEL or few:
                    self._eager.append(each)
                else:
                    averages.append(each)
        self._with_steps, self._params = [*params, *averages], len(params)
        self._held = [(each.holder, each.key) for each in self._with_steps]
        self._tensors = [holder[key] for holder, key in self._held]
        self._versions = [*map(_version, self._tensors)]
        for each in self._with_steps:
            self.copies.pop(each.place, None)
        self._moving = {kind: [each for each in self._with_steps if kind in each.after] for kind in After}
        everything = (*self._norms, *self._eager, *self._with_steps)
        self._on_host = [each for each in everything if (now := each.holder.get(each.key)) is not None and now.is_cpu]
        self._peeked = [*_some(params), *_some(averages)]
        self._samples = _Samples(self._peeked)
        return bool(before) and before.keys() != {
            each.place for each in (*self._norms, *self._eager, *self._with_steps)
        }

    def _stepped(self) -> frozenset[int]:
        """Return the ids of the parameters that optimizers step."""
        groups = [group for each in self._optimizers for group in each.param_groups]
        return frozenset(id(param) for group in groups for param in group["params"] if param.requires_grad)


@torch.no_grad()
def _copy_all(into: list[torch.Tensor], of: list[torch.Tensor]) -> None:
    """Copy tensors to others of their kinds, each on one device."""
    if len({each.device for each in into}) == 1:
        _copy(into, of)
        return
    for one, other in zip(into, of, strict=True):
        one.copy_(other)


class _Samples:
    """Some elements of tensors on an accelerator, which stay there."""

    def __init__(self, tensors: list[_Tensor]) -> None:
        self.tensors = [each for each in tensors if (now := each.holder.get(each.key)) is not None and not now.is_cpu]
        self._of: list[torch.Tensor] = []
        self._taken: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def take(self) -> None:
        """Copy the elements as they are now."""
        addresses = [each.address for each in self.tensors]
        if addresses != self._addresses:
            self._addresses, self._of = addresses, [_beginning(each) for each in self.tensors]
            self._taken = [each.clone() for each in self._of]
            return
        with torch.no_grad():
            _copy(self._taken, self._of)

    def changed(self) -> list[_Tensor]:
        """Return the tensors whose elements are others now; waits for the device."""
        if not self._taken:
            return []
        return [
            each
            for each, taken in zip(self.tensors, self._taken, strict=True)
            if not torch.equal(_beginning(each), taken)
        ]


def _beginning(each: _Tensor) -> torch.Tensor:
    tensor = each.holder[each.key]
    assert tensor is not None  # it was there when they were listed, and parameters stay
    return tensor.detach().reshape(-1)[:_PEEK]


def _modules(run: RunState) -> Iterator[tuple[str, nn.Module]]:
    yield MODEL, bare(run.model)
    for name, thing in run.extra.items():
        if isinstance(thing, nn.Module):
            yield name, thing


def _tensors(owner: str, module: nn.Module) -> Iterator[_Tensor]:
    """Yield the tensors in the state of a module."""
    plain, norms = plain_names(module), _torch.batch_norm()
    for path, part in module.named_modules(remove_duplicate=False):
        of_norm, after = isinstance(part, norms), set[After]()
        buffers = [key for key in part._buffers if key not in part._non_persistent_buffers_set]
        held: list[tuple[dict[str, torch.Tensor | None], str]] = [(part._buffers, key) for key in buffers]
        held += [(part._parameters, key) for key in part._parameters]
        for holder, key in held:
            tensor = holder[key]
            if tensor is not None and nn.parameter.is_lazy(tensor):
                continue  # it is there once a forward has given it a shape
            name = plain(f"{path}.{key}" if path else key)
            is_of_norm = of_norm and holder is part._buffers
            yield _Tensor(holder, key, (owner, name), is_of_norm, always=False, after=after if is_of_norm else set())


def _has_lazy(run: RunState) -> bool:
    """Return whether some tensors have no shape yet."""
    return any(
        each is not None and nn.parameter.is_lazy(each)
        for _, module in _modules(run)
        for part in module.modules()
        for each in (*part._parameters.values(), *part._buffers.values())
    )


def _places(run: RunState) -> list[Place]:
    return [each.place for owner, module in _modules(run) for each in _tensors(owner, module)]


def _some(tensors: list[_Tensor]) -> list[_Tensor]:
    """Choose a few tensors, evenly."""
    return tensors[:: max(1, len(tensors) // _PEEKED)]


def _views(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return some bytes of a tensor on the CPU, where they are."""
    size, address = tensor.nbytes, tensor.data_ptr()
    if not size or not tensor.is_cpu:
        return ()
    if not tensor.is_contiguous():
        return (bits.chars(tensor.element_size()).from_address(address),)
    if size <= 2 * _PEEK:
        return (bits.chars(size).from_address(address),)
    return (bits.chars(_PEEK).from_address(address), bits.chars(_PEEK).from_address(address + size // 2))
