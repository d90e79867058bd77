"""What a rank says when a collective can't go on: pure text, from headers."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.comm.shm.fingerprint import describe

#: Ranks that a message lists one by one; the failure record holds some more than that.
_LINES = 24


def mismatch(rank: int, headers: dict[int, bytes]) -> str:
    """The ranks are in different collectives. ``headers`` by rank, of those that arrived."""
    lines = [f"  rank {each}: {describe(header)}" for each, header in headers.items()]
    return (
        f"rank {rank}: the ranks are in different collectives, or in one with different arguments; nothing was moved:\n"
        + "\n".join(lines)
        + "\nEvery rank must issue the same collectives in the same order, with tensors of equal size and dtype."
    )


def disagreement(rank: int, mine: bytes, what: str) -> str:
    """The ranks are in one collective whose arguments do not fit together."""
    return f"rank {rank} in {describe(mine)}: {what}; nothing was moved"


def late(rank: int, what: str, seconds: float, missing: Sequence[int], standing: Sequence[str]) -> str:
    """Some ranks did not come in time. ``standing``: a line for each rank, those of ``missing`` first."""
    return (
        f"rank {rank} waited {seconds:g} s in {what} for {_names(missing)}:\n"
        + _lines(standing)
        + "\nFind out what keeps the late rank, or allow more time (timeout=… of init_process_group or lockstep.init)."
    )


def lost(rank: int, what: str, gone: Sequence[int], left: Sequence[int], standing: Sequence[str]) -> str:
    """Some ranks ended (``gone``), or destroyed the group (``left``), while others wait for them."""
    return (
        f"rank {rank} waits in {what} for {_names([*gone, *left])}, which "
        + ("ended:\n" if gone else "destroyed the group:\n")
        + _lines(standing)
        + "\nThe error to look for is that rank's own; this group can't be used any more."
    )


def standing(rank: int, pid: int, header: bytes, errand: str) -> str:
    """One rank's line in the above: its newest header, and the last message it waited for."""
    waited = f"; last waited in {errand}" if errand else ""
    return f"  rank {rank} (process {pid}): last seen at {describe(header)}{waited}"


def numbering(members: Sequence[int]) -> str:
    """What a group of some ranks adds to its errors; nothing where its numbers are the world's."""
    if list(members) == list(range(len(members))):
        return ""
    shown = ", ".join(map(str, members[:_LINES])) + (", …" if len(members) > _LINES else "")
    return f"These are the numbers of a group; in the world its ranks 0 to {len(members) - 1} are the ranks {shown}."


def _names(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _lines(standing: Sequence[str]) -> str:
    more = [f"  and {len(standing) - _LINES} more"] if len(standing) > _LINES else []
    return "\n".join([*standing[:_LINES], *more])
