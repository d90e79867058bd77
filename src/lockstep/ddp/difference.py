"""The difference between replicas: found by all ranks together once they know that there is one, and described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lockstep.comm.exchange import all_gather_records, broadcast_tensor
from lockstep.ddp.digest import Holdings
from lockstep.step.conditions import conditions, differences
from lockstep.text import counted, listed, which_ranks

#: Bytes that one digest covers: a piece, to find the tensor that differs, and a block, to find the element in it.
_PIECE, _BLOCK = 1 << 22, 1 << 16


@dataclass(frozen=True)
class Difference:
    """The items that ranks hold differently."""

    #: Indices of the items that differ, in order.
    items: Sequence[int]
    #: Groups of ranks that hold the same first differing item; the largest first, ties by lowest rank.
    groups: Sequence[Sequence[int]]
    #: A sentence about that item's first element that differs between the first ranks of the first two groups, or "".
    element: str
    #: True if one element of many is the only one of its parameter that differs, and nothing of any other parameter
    #: does. (For a single number: if exactly one bit of it differs.)
    is_alone: bool
    #: Descriptions of how another rank's machine or software differs from rank 0's.
    conditions: Sequence[str]
    #: Numbers of items that are equal on all ranks: (parameters, others).
    equal: tuple[int, int]

    @property
    def odd(self) -> list[int]:
        """Return the ranks that differ from the majority; empty if there is none."""
        world_size = sum(map(len, self.groups))
        if 2 * len(self.groups[0]) <= world_size:
            return []
        return sorted(rank for group in self.groups[1:] for rank in group)


def find_difference(holdings: Holdings, group: dist.ProcessGroup) -> Difference | None:
    """**Collective.** Compare the ranks' holdings item by item; return None if all are equal. Waits for the device.

    Args:
        holdings: this rank's holdings; all ranks have the same items.
        group: the ranks.
    """
    device = holdings.params[0].device
    digests = ["".join(holdings.whole(index, block=_PIECE)) for index in range(len(holdings.items))]
    mine = {
        "digests": [xxhash.xxh3_64_hexdigest(digest.encode()) for digest in digests],
        "conditions": _conditions(device),
    }
    records = all_gather_records(mine, group)
    differing = [
        index for index in range(len(holdings.items)) if len({record["digests"][index] for record in records}) > 1
    ]
    if not differing:
        return None
    first = differing[0]
    by_digest: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        by_digest.setdefault(record["digests"][first], []).append(rank)
    groups = sorted(by_digest.values(), key=lambda ranks: (-len(ranks), ranks))
    element, is_alone = _find_element(holdings, first, groups[0][0], groups[1][0], group)
    equal = [item.optimizer < 0 for index, item in enumerate(holdings.items) if index not in set(differing)]
    return Difference(
        differing,
        groups,
        element,
        is_alone and len({holdings.items[index].position for index in differing}) == 1,
        _compare_conditions([record["conditions"] for record in records]),
        (sum(equal), len(equal) - sum(equal)),
    )


def _conditions(device: torch.device) -> dict[str, str]:
    """Return the conditions that an optimizer's step may depend on; it sums nothing, so threads are left out."""
    found = conditions(device)
    return {name: found[name] for name in ("torch", "processor", "vectors", "gpu", "cuda") if name in found}


def _compare_conditions(of_ranks: Sequence[dict[str, str]]) -> list[str]:
    for rank, other in enumerate(of_ranks):
        different = differences(of_ranks[0], other)
        if different:
            return [f"{words}: {first} on rank 0, {own} on rank {rank}" for words, first, own in different]
    return []


def _find_element(holdings: Holdings, item: int, one: int, other: int, group: dist.ProcessGroup) -> tuple[str, bool]:
    """**Collective.** Describe the first element that two ranks hold differently; return whether it is the only one."""
    blocks = all_gather_records(holdings.whole(item, block=_BLOCK), group)
    differing = [index for index, pair in enumerate(zip(blocks[one], blocks[other], strict=True)) if len(set(pair)) > 1]
    value = holdings.find(holdings.items[item])
    if not differing or value is None:
        return "", False
    flat = value.detach().as_strided((value.numel(),), (1,), value.storage_offset())
    first = differing[0] * (_BLOCK // flat.element_size())
    own = flat[first : first + _BLOCK // flat.element_size()]
    rank = dist.get_rank(group)
    left = broadcast_tensor(own if rank == one else None, one, group).cpu()
    right = broadcast_tensor(own if rank == other else None, other, group).cpu()
    bits = (left.view(torch.uint8) ^ right.view(torch.uint8)).view(len(left), -1)
    offsets = bits.any(dim=1).nonzero().view(-1).tolist()
    flipped = sum(int(byte).bit_count() for byte in bits[offsets[0]].tolist())
    apart = f"{counted(flipped, 'bit')} apart"
    values = f"{left[offsets[0]].item()!r} on rank {one} and {right[offsets[0]].item()!r} on rank {other}"
    if value.numel() == 1:
        return f"It is {values}.", flipped == 1
    words = f"Element {_index(first + offsets[0], value)} is {values}, {apart}"
    is_alone = len(offsets) == len(differing) == 1
    return f"{words}{', and the only one of it that differs' if is_alone else ''}.", is_alone


def _index(offset: int, value: Tensor) -> str:
    if not value.is_contiguous():
        return f"{offset} (in the order of memory)"
    return str([int(each) for each in torch.unravel_index(torch.tensor(offset, device="cpu"), value.shape)])


def describe(difference: Difference, holdings: Holdings) -> str:
    """Return a description of the ranks and items that differ, and of how many items are equal."""
    items = [holdings.items[index] for index in difference.items]
    parameters = sum(item.optimizer < 0 for item in items)
    states = len(items) - parameters
    name = items[0].name
    return (
        f"{_who(difference, name)} {difference.element} In all, {_of(parameters, difference.equal[0], 'parameter')} "
        f"and {_of(states, difference.equal[1], 'tensor')} of optimizers differ{_more(items)}."
    ).replace("  ", " ")


def _of(different: int, equal: int, noun: str) -> str:
    return f"{different} of {counted(different + equal, noun)}"


def _more(items: Sequence[Any]) -> str:
    return f", also {listed([item.name for item in items[1:]], most=2)}" if len(items) > 1 else ""


def _who(difference: Difference, name: str) -> str:
    groups, odd = difference.groups, difference.odd
    if odd:
        verb = "differs" if len(odd) == 1 else "differ"
        return f"{which_ranks(odd).capitalize()} {verb} from the other {len(groups[0])} in {name}."
    if sum(map(len, groups)) == 2:
        return f"Ranks 0 and 1 differ in {name}; which of the two is right can't be told."
    return (
        f"The ranks hold {len(groups)} versions of {name}, and none has a majority: "
        f"{'; '.join(which_ranks(group) for group in groups[:8])}."
    )


def advise(difference: Difference, holdings: Holdings, *, since: str, has_joined: bool) -> str:
    """Return the likely reason, and what to do.

    Args:
        difference: the difference that was found.
        holdings: this rank's holdings, in which it was found.
        since: the time until which replicas were equal, for the sentence about the checkpoint.
        has_joined: whether ranks have left a loop before others, within :func:`lockstep.join`.
    """
    owners = [holdings.owner(holdings.items[index]) for index in difference.items]
    if any(isinstance(owner, torch.optim.LBFGS) for owner in owners):
        return (
            "LBFGS uses the loss that its closure returns, and each rank has returned that of its own samples: end "
            "the closure with `return world.mean(loss)`. Then all ranks take the same steps, those of one process."
        )
    if difference.is_alone:
        odd = difference.odd
        machines = f"the machine of rank {odd[0]}" if len(odd) == 1 else "the machines of these ranks"
        reason = (
            "A difference that began in one element is a bit that flipped in memory, or a line that writes to it on "
            "one rank alone: lockstep verify finds such a line; if there is none, have the memory of "
            f"{machines} tested, and look for its errors in the kernel's log."
        )
    elif difference.conditions:
        reason = (
            f"The ranks compute under different conditions ({'; '.join(difference.conditions)}), so the same step of "
            "an optimizer may round differently: use one kind of machine for all ranks."
        )
    elif has_joined:
        reason = (
            "Ranks have left a loop early within lockstep.join, which makes the parameters equal and leaves to each "
            "rank the optimizer's state that it had when it left: batches from lockstep.shard need no join."
        )
    elif all(holdings.is_number(index) for index in difference.items):
        reason = (
            f"{type(owners[0]).__name__} keeps this number. It differs between ranks if it is computed from the rank's "
            "own loss (let its closure return world.mean(loss)) or counts steps that not all ranks take."
        )
    else:
        reason = (
            "The program does something on some ranks alone: another learning rate, a step that is left out, a line "
            "under `if rank == 0` that writes to the model, or a step that draws random numbers (noise on gradients or "
            "parameters, stochastic rounding), which are each rank's own while a batch is in hand, and always on a "
            "GPU: draw them from a generator of their own, seeded alike on all ranks, "
            "torch.randn(..., generator=torch.Generator(device).manual_seed(step))."
        )
    return (
        f"{reason} Resume from a checkpoint that was saved {since}: `lockstep checkpoint rewind FOLDER --to STEP` sets "
        "the newer ones aside. Replicas that are to differ are made with compare_every=None."
    )
