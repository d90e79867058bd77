"""To which cores the ranks of a machine are bound: decided in the launcher, done in each rank before it has threads.

Note [Where a rank is bound]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank is bound by ``sched_setaffinity`` right after it was forked, when it has one thread: OpenMP's, MKL's and
OpenBLAS's threads, those of autograd and of CUDA, and loader workers all come later and inherit it. (The zygote has
imported torch and computed nothing, so it has no threads to inherit from: Note [Fork before threads] in zygote.py.)
Memory follows by itself: the kernel takes a page from the node of the core that writes to it first.

By itself (``auto``) the launcher binds only where that can't take anything from a rank: the cores are given as the
machine or the cgroup has them, so that no other program has a plan for them; each rank gets as many as any other; and
together they have them all. Ranks that share a NUMA node, or without GPUs an L3 cache, share all cores of it, so that
the kernel still evens out what runs there. Cores of its own (``cores``) a rank gets only when the user asks: whatever
else runs on one of them holds up this rank, and with it all others.
"""

from __future__ import annotations

import enum
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from lockstep import machine
from lockstep.text import counted, joined, which_ranks
from lockstep.topology import Core, GpuPlace, Topology, format_cpus

#: Variables that have OpenMP bind its threads itself, to cores that it chose before a rank was forked.
_OF_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_OVERLAPPING = "what is beside one rank's GPU is a part of what is beside another's"


class Bind(enum.Enum):
    """What the user asks for."""

    #: A rank has a NUMA node or L3 cache where that takes nothing from any rank, else all cores.
    AUTO = "auto"
    NONE = "none"
    #: A rank has all cores of a NUMA node: that of the rank's GPU, or the nodes in turn.
    NUMA = "numa"
    #: A rank has cores that no other has, beside its GPU or on one NUMA node and L3 cache as far as that goes.
    CORES = "cores"


@dataclass(frozen=True)
class CoreFacts:
    """The facts by which binding is decided, on one machine."""

    topology: Topology
    #: This process's affinity: no rank is bound to another CPU.
    allowed: frozenset[int]
    #: The container's quota, in cores; None: there is none.
    quota: float | None = None
    #: The GPUs in the order of the local ranks; empty: there is none.
    gpus: tuple[GpuPlace, ...] = ()
    #: The reason why it is not known where the ranks' GPUs are, in words; empty: it is known.
    unknown: str = ""
    #: The variables that have OpenMP bind its threads itself.
    openmp: tuple[str, ...] = ()

    @classmethod
    def read(cls, env: Mapping[str, str] = os.environ, root: Path = Path("/")) -> CoreFacts:
        """Look at this machine, whose files are below ``root``."""
        topology = Topology.read(root)
        gpus, unknown = topology.visible_gpus(env), ""
        if gpus is None:
            unknown = "which of the GPUs is which only CUDA can tell"
        elif not topology.gpus and any((root / "dev").glob("nvidia[0-9]*")) and env.get("CUDA_VISIBLE_DEVICES") != "":
            unknown = "the driver does not tell where the GPUs are attached"
        elif (root / "dev/kfd").exists():
            unknown = "where AMD's GPUs are attached is not looked at"
        return cls(
            topology,
            frozenset(os.sched_getaffinity(0)),
            machine.cpu_quota(),
            gpus or (),
            unknown,
            tuple(name for name in _OF_OPENMP if env.get(name, "").strip().lower() not in ("", "false", "none")),
        )

    @property
    def cores(self) -> tuple[Core, ...]:
        """The cores that this process may use."""
        return self.topology.within(self.allowed)

    @property
    def count(self) -> int:
        """As ``machine.cores()``: CPUs, limited by the quota."""
        limit = len(self.allowed) if self.quota is None else math.ceil(self.quota)
        return max(1, min(len(self.allowed), limit))

    def near_gpus(self, ranks: int) -> list[frozenset[int]] | None:
        """Return the CPUs beside each rank's GPU, of those that are allowed; None: not every rank has a GPU."""
        if not 0 < ranks <= len(self.gpus):
            return None
        return [gpu.cpus & self.allowed for gpu in self.gpus[:ranks]]


@dataclass(frozen=True)
class Binding:
    """To which CPUs each rank of a machine is bound, and how many threads that leaves it."""

    #: The cores of each local rank; empty: no rank is bound.
    cpus: tuple[frozenset[int], ...]
    #: The number of threads for each rank.
    threads: int
    #: The cores that the ranks share, which none of them sees once it is bound.
    cores: int
    #: The reason why no rank is bound, in words; empty: ranks are.
    why_not: str = ""

    def of(self, local_rank: int) -> frozenset[int] | None:
        """Return the CPUs of a rank; None: it is not bound."""
        return self.cpus[local_rank] if self.cpus else None

    def describe(self) -> str:
        """Return it in words: ``rank 0 to 0-7, rank 1 to 8-15``, or why no rank is bound."""
        if not self.cpus:
            return f"no rank is bound: {self.why_not}"
        return in_words({rank: format_cpus(cpus) for rank, cpus in enumerate(self.cpus)})


def in_words(cpus: Mapping[int, str]) -> str:
    """Return which ranks are bound to which CPUs: ``ranks 0 to 3 to 0-31, ranks 4 to 7 to 32-63``."""
    ranks: dict[str, list[int]] = {}
    for rank, own in cpus.items():
        ranks.setdefault(own, []).append(rank)
    return ", ".join(f"{which_ranks(those)} to {own}" for own, those in ranks.items())


def bind_ranks(how: Bind, ranks: int, env: Mapping[str, str] = os.environ) -> Binding:
    """Decide for this machine.

    Args:
        how: what the user asks for.
        ranks: of this machine.
        env: this process's environment.

    Raises:
        ValueError: the ranks can't be bound as the user asks.
    """
    if how is Bind.NONE:
        return _unbound(ranks, machine.cores(), f"--bind {how.value}")
    return decide(how, ranks, CoreFacts.read(env))


def decide(how: Bind, ranks: int, found: CoreFacts) -> Binding:
    """Decide how ``ranks`` of a machine are bound.

    Raises:
        ValueError: they can't be bound as the user asks.
    """
    match how:
        case Bind.AUTO:
            places = _fair(ranks, found)
            return _unbound(ranks, found.count, places) if isinstance(places, str) else _bound(places, found.count)
        case Bind.NONE:
            return _unbound(ranks, found.count, f"--bind {how.value}")
        case _:
            _refuse(how, ranks, found)
            return _bound(_by_node(ranks, found) if how is Bind.NUMA else _apart(ranks, found), found.count)


def _bound(places: Sequence[frozenset[int]], count: int) -> Binding:
    """Return a binding with as many threads as the rank with the fewest cores of its own can use."""
    sharing = [sum(1 for other in places if other & place) for place in places]
    fewest = min(len(place) // ranks for place, ranks in zip(places, sharing, strict=True))
    return Binding(tuple(places), max(1, min(fewest, count // len(places))), count)


def _unbound(ranks: int, count: int, why: str) -> Binding:
    return Binding((), max(1, count // ranks), count, why)


# By itself ------------------------------------------------------------------------------------------------------------


def _fair(ranks: int, found: CoreFacts) -> list[frozenset[int]] | str:
    """Return places that take nothing from any rank; else why there are none. See Note [Where a rank is bound]."""
    given, allowed = found.topology.given, found.allowed
    if allowed != given:
        return f"the affinity is set already, to {format_cpus(allowed)} of {format_cpus(given)}"
    if found.quota is not None and found.quota < len(allowed):
        return f"the container's quota is the time of {found.quota:g} cores, not fixed ones"
    if found.openmp:
        return f"OpenMP binds its threads itself, by {joined(found.openmp)}"
    if found.unknown:
        return found.unknown
    places = found.near_gpus(ranks) or _deal(found.cores, ranks, (_node, _cache))
    if not all(places):
        return _far(places, found)
    if all(place == allowed for place in places):
        whole = "all of them" if ranks == 1 else "no part of them for each"
        return f"of {found.topology.describe()} {counted(ranks, 'rank')} can have {whole}"
    if frozenset().union(*places) != allowed:
        return f"no rank's GPU is beside {format_cpus(allowed.difference(*places))}, which would be idle"
    if any(a != b and a & b for a in places for b in places):
        return _OVERLAPPING
    if len({Fraction(len(place), places.count(place)) for place in places}) > 1:
        return "some ranks would have more cores than others"
    return places


# As the user asks -----------------------------------------------------------------------------------------------------


def _refuse(how: Bind, ranks: int, found: CoreFacts) -> None:
    """Raise ValueError if the ranks can't be bound as the user asks."""
    asked = f"--bind {how.value}"
    if found.openmp:
        raise ValueError(
            f"{asked}: {joined(found.openmp)} would have OpenMP bind its threads to other cores than their rank: "
            f"unset {'it' if len(found.openmp) == 1 else 'them'}, or say --bind none"
        )
    if found.unknown:
        raise ValueError(f"{asked}: {found.unknown}; say --bind none, or CUDA_VISIBLE_DEVICES= to train on the CPU")
    places = found.near_gpus(ranks)
    if places is not None and not all(places):
        raise ValueError(f"{asked}: {_far(places, found)}; say --bind none")


def _by_node(ranks: int, found: CoreFacts) -> list[frozenset[int]]:
    """Return all CPUs of a node for each rank: its GPU's, or the nodes in turn."""
    nodes = _grouped(found.cores, _node)
    return found.near_gpus(ranks) or [_cpus(_turn(nodes, rank, ranks)) for rank in range(ranks)]


def _apart(ranks: int, found: CoreFacts) -> list[frozenset[int]]:
    """Return cores that no other rank has: those beside each GPU are dealt to its ranks, or all to all.

    Raises:
        ValueError: there are fewer cores than ranks.
    """
    near = found.near_gpus(ranks) or [found.allowed] * ranks
    places = list(near)
    for place in dict.fromkeys(near):
        of_place = [rank for rank in range(ranks) if near[rank] == place]
        cores = found.topology.within(place)
        if len(cores) < len(of_place):
            raise ValueError(
                f"--bind cores: {counted(len(of_place), 'rank')} and {counted(len(cores), 'core')} for them "
                f"({format_cpus(place)}): start fewer ranks with -n, or say --bind none"
            )
        if any(place & other for other in near if other != place):
            raise ValueError(f"--bind cores: {_OVERLAPPING}; say --bind numa, or --bind none")
        for rank, own in zip(of_place, _deal(cores, len(of_place), (_node, _cache), apart=True), strict=True):
            places[rank] = own
    return places


def _far(places: Sequence[frozenset[int]], found: CoreFacts) -> str:
    """Return why a rank has no cores near its GPU."""
    rank = next(rank for rank, place in enumerate(places) if not place)
    gpu = found.gpus[rank]
    if not gpu.cpus:
        return f"the kernel does not know which cores are beside the GPU of rank {rank} ({gpu.address})"
    return (
        f"beside the GPU of rank {rank} ({gpu.address}) are the cores {format_cpus(gpu.cpus)}, and this process may "
        f"use {format_cpus(found.allowed)}"
    )


# Cores that are dealt out ---------------------------------------------------------------------------------------------


def _node(core: Core) -> tuple[int, ...]:
    return core.socket, core.node


def _cache(core: Core) -> tuple[int, ...]:
    return core.socket, core.node, core.cache


def _grouped(cores: Iterable[Core], key: Callable[[Core], tuple[int, ...]]) -> list[list[Core]]:
    """Return the cores in groups, without groups of which no core is allowed."""
    groups: dict[tuple[int, ...], list[Core]] = {}
    for core in cores:
        groups.setdefault(key(core), []).append(core)
    return list(groups.values())


def _deal(
    cores: Sequence[Core], ranks: int, levels: Sequence[Callable[[Core], tuple[int, ...]]], *, apart: bool = False
) -> list[frozenset[int]]:
    """Deal cores to ranks: level for level each group to as many ranks, or as many groups to each rank.

    Args:
        cores: those to deal.
        ranks: how many; with ``apart``, at most as many as cores.
        levels: what to keep together, the largest first.
        apart: no core goes to two ranks. Else the ranks share what does not divide by these levels.
    """
    if ranks == 1:
        return [_cpus(cores)]
    if not levels:
        each = len(cores) // ranks  # what is left over stays free: ranks in step are as fast as the slowest
        return [_cpus(cores[rank * each : (rank + 1) * each] if apart else cores) for rank in range(ranks)]
    groups = _grouped(cores, levels[0])
    together = ranks // len(groups)
    if together * len(groups) == ranks and (not apart or all(len(group) >= together for group in groups)):
        return [place for group in groups for place in _deal(group, together, levels[1:], apart=apart)]
    if len(groups) % ranks == 0:
        return [_cpus(_turn(groups, rank, ranks)) for rank in range(ranks)]
    return _deal(cores, ranks, levels[1:] if apart else (), apart=apart)


def _turn(groups: Sequence[list[Core]], rank: int, ranks: int) -> list[Core]:
    """Return the cores of the groups that a rank has where groups and ranks go side by side in order."""
    first = rank * len(groups) // ranks
    last = max(first + 1, (rank + 1) * len(groups) // ranks)
    return [core for group in groups[first:last] for core in group]


def _cpus(cores: Iterable[Core]) -> frozenset[int]:
    return frozenset(cpu for core in cores for cpu in core.cpus)
