"""What a rank says when a collective can't go on: pure text, from headers."""

from __future__ import annotations

from lockstep.comm.shm.fingerprint import describe


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


def late(rank: int, mine: bytes, seconds: float, ranks: dict[int, tuple[int, bytes]]) -> str:
    """Some ranks did not come in time. ``ranks``: process id and newest header of each."""
    return (
        f"rank {rank} waited {seconds:g} s in {describe(mine)} for {_names(ranks)}:\n"
        + "\n".join(_standing(each, *ranks[each]) for each in ranks)
        + "\nFind out what keeps the late rank, or allow more time (timeout=… of init_process_group or lockstep.init)."
    )


def lost(rank: int, mine: bytes, ranks: dict[int, tuple[int, bytes]], left: list[int]) -> str:
    """Some ranks ended, or (``left``) destroyed the group, while others wait for them."""
    return (
        f"rank {rank} waits in {describe(mine)} for {_names(ranks)}, which "
        + ("destroyed the group:\n" if set(ranks) <= set(left) else "ended:\n")
        + "\n".join(_standing(each, *ranks[each]) for each in ranks)
        + "\nThe error to look for is that rank's own; this group can't be used any more."
    )


def _names(ranks: dict[int, tuple[int, bytes]]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))


def _standing(rank: int, pid: int, header: bytes) -> str:
    return f"  rank {rank} (process {pid}): last seen at {describe(header)}"
