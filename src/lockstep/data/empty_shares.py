"""Explain an error that a share without samples has caused, which names no loader and no share.

A global batch of fewer samples than there are ranks leaves some of them a batch of zero samples. Most models take it as
any other; some code does not (``x.view(len(x), -1)``, the maximum of it, an index), and its error comes on these ranks
alone.
"""

from __future__ import annotations

from lockstep.comm.init import current_world
from lockstep.errors import LockstepError
from lockstep.step.share import Items

#: What code raises that was given nothing to compute with.
_CAUSED = (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AssertionError)


def explain(error: BaseException) -> str | None:
    """Say that this rank's share of the last batch has no sample, where an error of the script's may come from that."""
    world = current_world()
    if world is None or isinstance(error, LockstepError) or not isinstance(error, _CAUSED):
        return None
    in_hand = world._in_hand
    share = in_hand.left if in_hand.share is None else in_hand.share  # (an error that leaves the loop ends its pass)
    if share is None or isinstance(share, Items) or share.local_samples or not share.global_samples:
        return None
    return (
        f"the share of rank {world.rank} of {world.world_size} has no sample of this batch ({share.words()}), so that "
        "its tensors have 0 rows, which may be why. Let the code take these (x.flatten(1) instead of "
        "x.view(len(x), -1)), leave such a batch out (drop_last=True), or take another batch size"
    )
