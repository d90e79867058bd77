"""The parameters and optimizer state that a replica holds, cut into parts, and a digest of the bits of each part.

Note [What is compared]
~~~~~~~~~~~~~~~~~~~~~~~
All parameters of the replica are compared, frozen ones too, since ``replicate`` makes them equal and nothing changes
them. So is the optimizers' state: of every optimizer of this process that has taken a step, the dense tensors and the
numbers in its ``state[parameter]``. A tensor within a list or a dictionary there is not looked at.

Buffers are not compared: with ``broadcast_buffers`` rank 0's replace all others before and after every step, so they
can't drift, and without it each rank has its own.

A digest covers bytes as they lie in memory, in order of the addresses, so tensors with gaps are copied first. Ranks
have the same strides (they compare them when they begin). A digest of 64 bits (Note [Two digests] in ``bits.py``) is
folded to 32, so that one of 4·10⁹ differences is missed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from lockstep import _torch, bits
from lockstep.ddp.bucket import gapless

#: Bits of a digest.
BITS = 32
#: Bytes; a part ends within a tensor at a multiple of this, so that no element or 4-byte word is cut in two.
_GRAIN = 64

#: Every optimizer that has taken a step in this process, by id, in the order of their first steps.
_stepped: dict[int, weakref.ref[Optimizer]] = {}
_watches = False


def watch_optimizers() -> None:
    """Begin to note the optimizers that take steps in this process."""
    global _watches
    if not _watches:
        _watches = True
        optimizers.register_optimizer_step_post_hook(_has_stepped)


@_torch.mark_untraced
def _has_stepped(optimizer: Optimizer, *_: object) -> None:
    key = id(optimizer)
    if key not in _stepped:
        _stepped[key] = weakref.ref(optimizer, lambda _: _stepped.pop(key, None))


def known_optimizers() -> list[Optimizer]:
    """Return the optimizers that have taken a step, in the order of their first steps."""
    return [optimizer for ref in _stepped.values() if (optimizer := ref()) is not None]


class Item(NamedTuple):
    """One tensor or number that replicas hold alike."""

    #: The parameter's position in the replica's list.
    position: int
    #: Index of the optimizer that keeps the item under ``key``, among the known ones; -1: it is the parameter itself.
    optimizer: int
    key: str
    #: The item's name in messages, and its identity, which ranks compare: name, shape, dtype, strides and device type.
    name: str
    identity: str
    #: Size and device when the list was made.
    nbytes: int
    device: torch.device
    #: Strides, None if contiguous. The bytes of an item with gaps can't be cut.
    strides: tuple[int, ...] | None
    has_gaps: bool
    #: True if the item is a parameter, has its parameter's shape, or is one number: then it is expected to be equal
    #: on all ranks.
    is_like_parameter: bool


class ByteSpan(NamedTuple):
    """Some bytes of an item."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True)
class DigestPart:
    """The bytes, on one device, that one digest covers."""

    device: torch.device
    spans: tuple[ByteSpan, ...]


class Holdings:
    """The items of a replica.

    Args:
        named: all parameters of the replica, by name.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]]) -> None:
        self.names = [name for name, _ in named]
        self.params = [param for _, param in named]
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self.items: list[Item] = []
        #: A digest of all items' identities, in order; ranks with the same items have the same.
        self.signature = 0
        self._census: list[Any] = []

    def refresh(self, *, without: frozenset[str] = frozenset()) -> bool:
        """List the items anew if there may be others than before, leaving out those of the identities ``without``.

        Returns:
            Whether the list was made anew.
        """
        # The newest come first: an optimizer out of use may be gone on some ranks before it is on others.
        counted = [(owner, [_count(_state(owner, param)) for param in self.params]) for owner in known_optimizers()]
        owners = [owner for owner, counts in reversed(counted) if any(counts)]
        census: list[Any] = [without, *map(id, owners), *(counts for _, counts in counted)]
        if census == self._census:
            return False
        self._census = census
        self._optimizers = [*map(weakref.ref, owners)]
        self.items = [item for item in [*self._parameters(), *self._states(owners)] if item.identity not in without]
        self.signature = xxhash.xxh3_64_intdigest("\n".join(item.identity for item in self.items).encode())
        return True

    def _parameters(self) -> Iterable[Item]:
        for position, (name, param) in enumerate(zip(self.names, self.params, strict=True)):
            if _is_dense(param):
                yield _item(position, -1, "", f"parameter '{name}'", param, like=param)

    def _states(self, owners: Sequence[Optimizer]) -> Iterable[Item]:
        alike = [type(owner).__name__ for owner in owners]
        for number, owner in enumerate(owners):
            kind = alike[number]
            if kind in alike[:number]:
                kind += f" (the {alike[:number].count(kind) + 1}. from the newest)"
            for position, (name, param) in enumerate(zip(self.names, self.params, strict=True)):
                for key, value in _state(owner, param).items():
                    what = f"{kind}'s {key!r} of parameter '{name}'"
                    if isinstance(key, str) and (_is_number(value) or (isinstance(value, Tensor) and _is_dense(value))):
                        yield _item(position, number, key, what, value, like=param)

    def find(self, item: Item) -> Tensor | None:
        """Return the item's present value, a number as a tensor of 8 bytes; None if its kind is no longer as listed."""
        value: Any = self.params[item.position]
        if item.optimizer >= 0:
            owner = self._optimizers[item.optimizer]()
            value = None if owner is None else _state(owner, self.params[item.position]).get(item.key)
        if not isinstance(value, Tensor):
            return _as_tensor(value) if _is_number(value) and item.nbytes == 8 else None
        if value.nbytes != item.nbytes or value.device != item.device or not value.data_ptr():
            return None
        if not (value.is_contiguous() if item.strides is None else value.stride() == item.strides):
            return None
        return value.detach().contiguous() if item.has_gaps else value

    def owner(self, item: Item) -> Optimizer | None:
        """Return the optimizer that keeps an item; None: it is a parameter, or the optimizer no longer exists."""
        return None if item.optimizer < 0 else self._optimizers[item.optimizer]()

    def is_number(self, index: int) -> bool:
        """Return whether the item at ``index`` is a single number that an optimizer keeps."""
        item = self.items[index]
        value = None if item.optimizer < 0 else self.find(item)
        return value is not None and value.numel() == 1

    def cut(self, size: int) -> list[DigestPart]:
        """Cut the items into parts of at most ``size`` bytes, each on one device, in the items' order."""
        spans: dict[torch.device, list[list[ByteSpan]]] = {}
        room: dict[torch.device, int] = {}
        for index, item in enumerate(self.items):
            start = 0
            while start < item.nbytes:
                left = room.get(item.device, 0)
                if left < min(_GRAIN, item.nbytes - start) or (item.has_gaps and left < item.nbytes):
                    spans.setdefault(item.device, []).append([])
                    left = room[item.device] = size
                length = item.nbytes - start
                if length > left and not item.has_gaps:
                    length = left // _GRAIN * _GRAIN
                spans[item.device][-1].append(ByteSpan(index, start, start + length))
                room[item.device] = left - length
                start += length
        return [DigestPart(device, tuple(part)) for device, parts in spans.items() for part in parts]

    def digest(self, part: DigestPart, salt: int) -> int | Tensor:
        """Return the digest of a part: a number on CPUs, a tensor (0-dim, int64) elsewhere; see Note [Two digests]."""
        found = [(self.find(self.items[span.item]), span.start, span.stop) for span in part.spans]
        there = [(value, start, stop) for value, start, stop in found if value is not None]
        return fold(bits.digest(there, salt, part.device))

    def whole(self, item: int, *, block: int) -> list[str]:
        """Return digests of an item, one for every ``block`` bytes, as text; waits for its device."""
        value, nbytes = self.find(self.items[item]), self.items[item].nbytes
        device = torch.device("cpu") if value is None else value.device
        digests = []
        for start in range(0, nbytes, block):
            found = [(value, start, min(start + block, nbytes))] if value is not None else []
            digests.append(f"{bits.unsigned(bits.digest(found, 0, device)):016x}")
        return digests


def fold(digest: int | Tensor) -> int | Tensor:
    """Return 32 bits of a digest of 64."""
    return (digest ^ (digest >> BITS)) & ((1 << BITS) - 1)


def _state(owner: Optimizer, param: Parameter) -> Mapping[Any, Any]:
    """Return the optimizer's state of a parameter, without letting a defaultdict create it."""
    state: Any = owner.state.get(param) if isinstance(owner.state, Mapping) else None
    return state if isinstance(state, Mapping) else {}


def _count(state: Mapping[Any, Any]) -> Any:
    """Return a value that changes when an optimizer keeps other things for a parameter."""
    if not state:
        return 0
    return [len(state), sum(isinstance(value, Tensor) for value in state.values())]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _as_tensor(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64, device="cpu")


def _is_dense(value: Tensor) -> bool:
    return (
        value.layout == torch.strided
        and value.numel() > 0
        and not value.is_meta
        and not _torch.is_made_of_tensors(value)
    )


def _item(position: int, optimizer: int, key: str, name: str, value: Any, *, like: Tensor) -> Item:
    tensor = value if isinstance(value, Tensor) else _as_tensor(value)
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    kind = f"{list(tensor.shape)} {tensor.dtype} {strides} on {tensor.device.type}"
    return Item(
        position,
        optimizer,
        key,
        name,
        f"{name}: {kind}",
        tensor.nbytes,
        tensor.device,
        strides,
        strides is not None and not gapless(tensor),
        optimizer < 0 or tensor.dim() == 0 or tensor.shape == like.shape,
    )
