"""Compare the machines' answers about themselves and each other: versions, clocks, connections, a common folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.launch.spec import DEFAULT_MASTER_PORT
from lockstep.machine import is_loopback
from lockstep.rendezvous.messages import DEFAULT_PORT, SKEW
from lockstep.text import as_duration, joined
from lockstep.tools.doctor.findings import Finding, Problem, ok, warning, wrong

#: Packages whose versions must be the same on all hosts, then those whose versions should be.
_SAME = ("torch",)
_ALIKE = ("numpy", "safetensors", "xxhash")


# Versions ------------------------------------------------------------------------------------------------------------


def compare_versions(machines: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the machines' hardware and versions.

    Args:
        machines: the result of ``facts.collect`` on each, by name.
    """
    found = list(_differing(machines))
    yield from found
    if not found:
        yield ok("versions", "the same everywhere: lockstep, torch, Python, NumPy")


def _differing(machines: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name in _SAME:
        versions = {host: facts["packages"].get(name, "none") for host, facts in machines.items()}
        if len(set(versions.values())) > 1:
            yield wrong(
                Problem.TORCH_DIFFERS,
                "versions",
                f"{name} differs: {_each(versions)}",
                "install the same version everywhere",
            )
    pythons = {host: ".".join(facts["python"].split(".")[:2]) for host, facts in machines.items()}
    if len(set(pythons.values())) > 1:
        yield wrong(
            Problem.PYTHON_DIFFERS,
            "versions",
            f"Python differs: {_each(pythons)}",
            "install the same version everywhere",
        )
    for name in _ALIKE:
        versions = {host: facts["packages"].get(name, "none") for host, facts in machines.items()}
        if len(set(versions.values())) > 1:
            yield warning(
                Problem.PACKAGE_DIFFERS,
                "versions",
                f"{name} differs: {_each(versions)}",
                "install the same version everywhere",
            )
    for key, what in (("processor", "processors"), ("cores", "cores for a process"), ("visible_gpus", "visible GPUs")):
        values = {host: str(facts[key]) for host, facts in machines.items()}
        if len(set(values.values())) > 1:
            yield warning(
                Problem.MACHINES_DIFFER, "machines", f"{what} differ: {_each(values)}",
                "ranks in step are as fast as the slowest; HOST:N says how many ranks a host has",
            )  # fmt: skip
    architectures = {host: str(facts["architecture"]) for host, facts in machines.items()}
    if len(set(architectures.values())) > 1:
        yield warning(
            Problem.ARCHITECTURES_DIFFER,
            "machines",
            f"architectures differ: {_each(architectures)}",
            "the ranks' last bits will; choose machines of one",
        )


def _each(values: Mapping[str, str]) -> str:
    """Return values with their hosts: ``2.9.0 on a and b, 2.13.0 on c``."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    return ", ".join(f"{value} on {joined(names)}" for value, names in hosts.items())


# Clocks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostClock:
    """How far a host's clock is ahead of this one's, in seconds, and by how much that may be wrong."""

    ahead: float
    error: float

    @classmethod
    def of(cls, looks: Sequence[tuple[float, float, float]]) -> HostClock:
        """Work out how far ahead a clock is, from some looks: when it was asked, its time, when that came. The quickest
        counts."""
        asked, said, heard = min(looks, key=lambda look: look[2] - look[0])
        return cls(said - (asked + heard) / 2, (heard - asked) / 2)


def compare_clocks(clocks: Mapping[str, HostClock]) -> Iterator[Finding]:
    """Compare the hosts' clocks with each other; this machine's does not matter."""
    fastest = max(clocks, key=lambda name: clocks[name].ahead)
    slowest = min(clocks, key=lambda name: clocks[name].ahead)
    apart = clocks[fastest].ahead - clocks[slowest].ahead
    error = clocks[fastest].error + clocks[slowest].error
    what = f"the clock of {fastest} is {as_duration(apart)} ahead of that of {slowest}"
    advice = "set the clocks: chronyd or systemd-timesyncd on all hosts"
    if apart - error > SKEW:
        yield warning(
            Problem.CLOCKS_DIFFER,
            "clocks",
            f"{what}: logs and files of the hosts can't be put in order by their times",
            advice,
        )
    else:
        yield ok("clocks", f"they agree to {as_duration(max(apart, error))}")


# Ways ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """One connection from a host to another."""

    source: str
    target: str
    #: The address that was asked for, the address that it resolved to, and the port.
    address: str
    resolved: str
    port: int
    #: ok; unknown: no such name; refused; silent: no answer in time; other: it was not the target that answered.
    how: str
    why: str
    seconds: float


def judge_ways(tries: Sequence[Try], *, first: str, limit: float) -> Iterator[Finding]:
    """Return findings about which hosts reach which.

    Args:
        tries: every connection that was tried.
        first: the host that the others meet at, which has to be reached under its name. Of the others one address is
            enough.
        limit: seconds that each connection had.
    """
    pairs: dict[tuple[str, str], list[Try]] = {}
    for each in tries:
        pairs.setdefault((each.source, each.target), []).append(each)
    bad = {pair for pair, found in pairs.items() if any(each.how != "ok" for each in found)}
    for source, target in pairs:
        if (source, target) in bad:
            yield from _judge_way(source, target, pairs[source, target], first, limit)
    good = [pair for pair in pairs if pair not in bad]
    if good:
        slowest = max(each.seconds for pair in good for each in pairs[pair])
        names = sorted({name for pair in good for name in pair})
        both = all((target, source) in good for source, target in good)
        if both and len(good) == len(names) * (len(names) - 1):
            yield ok("ways", f"{joined(names)} reach each other, in {as_duration(slowest)}")
        else:
            yield ok("ways", f"{', '.join(f'{source} reaches {target}' for source, target in good)}")


def _judge_way(source: str, target: str, tries: Sequence[Try], first: str, limit: float) -> Iterator[Finding]:
    by_address: dict[str, list[Try]] = {}
    for each in tries:
        by_address.setdefault(each.address, []).append(each)
    whole = any(all(each.how == "ok" for each in found) for found in by_address.values())
    for finding in _judge_addresses(source, target, by_address, limit):
        if whole and target != first:
            what = f"{finding.what}; another address of {target} is reached, so that jobs run that do not meet there"
            yield warning(finding.code, finding.about, what, finding.advice)
        else:
            yield finding


def _judge_addresses(
    source: str, target: str, by_address: Mapping[str, Sequence[Try]], limit: float
) -> Iterator[Finding]:
    for address, found in by_address.items():
        one, failed = found[0], [each for each in found if each.how != "ok"]
        if not failed:
            continue
        name = address if one.resolved in ("", address) else f"{address} ({one.resolved})"
        if one.how == "unknown":
            yield wrong(
                Problem.NAME_UNKNOWN, "ways",
                f"{source} does not know the name {address}, which is {target}: {one.why}",
                f"write it into /etc/hosts on {source}, or name the hosts by addresses",
            )  # fmt: skip
        elif is_loopback(one.resolved) and not is_loopback(address) and len(failed) == len(found):
            yield wrong(
                Problem.NAME_LEADS_TO_SELF, "ways",
                f"on {source} the name {address} resolves to {one.resolved}, {source} itself, not to {target}",
                f"correct /etc/hosts on {source}: Debian and Ubuntu write a machine's own name there with 127.0.1.1",
            )  # fmt: skip
        elif any(each.how == "other" for each in failed):
            yield wrong(
                Problem.ANOTHER_ANSWERS, "ways", f"the machine that answers {source} at {name} is not {target}",
                f"correct the name on {source} (/etc/hosts, DNS), or use another address of {target}; a proxy may be "
                "between them",
            )  # fmt: skip
        elif len(failed) == len(found):
            how = f"within {limit:g} s" if one.how == "silent" else f"({one.why})"
            yield wrong(
                Problem.HOST_UNREACHABLE, "ways", f"{source} does not reach {target} at {name} {how}",
                f"let the hosts connect to each other at all ports ({target}'s firewall or security group), or use "
                "addresses of a network that they share (HostName in ~/.ssh/config, --local-addr)",
            )  # fmt: skip
        else:
            ports = ", ".join(_port(each.port) for each in failed)
            opened = ", ".join(_port(each.port) for each in found if each.how == "ok")
            yield wrong(
                Problem.PORTS_BLOCKED, "ways",
                f"{source} reaches {target} at {name}, but not at the port {ports} (it does at {opened})",
                f"open all ports between the hosts in {target}'s firewall: the ranks listen at any free one",
            )  # fmt: skip


def _port(port: int) -> str:
    names = {DEFAULT_PORT: " (--rdzv)", DEFAULT_MASTER_PORT: " (--node-rank)"}
    return f"{port}{names.get(port, '')}"


# The folder ----------------------------------------------------------------------------------------------------------


def judge_folder(folder: str, owner: str, seen: Mapping[str, bool]) -> Iterator[Finding]:
    """Return findings about whether the hosts share the run's folder.

    Args:
        folder: its path.
        owner: the host that has made a file there.
        seen: for each other host, whether it sees that file.
    """
    blind = [name for name, sees in seen.items() if not sees]
    if blind:
        yield warning(
            Problem.FOLDER_NOT_SHARED, "folder",
            f"{folder} of {owner} is not that of {joined(blind)}: a Checkpointer needs one that all share",
            "name a folder on a disk that all hosts share, with --folder and in the program",
        )  # fmt: skip
    else:
        yield ok("folder", f"{folder} is the same on all hosts")


def name_ranks(places: Sequence[Sequence[str]], hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the name of each rank's host.

    Args:
        places: the place of each rank (``facts.place``).
        hosts: the answers of each host.
    """
    names = []
    for place in places:
        same = [name for name, theirs in hosts.items() if list(theirs) == list(place)]
        names.append(same[0] if len(same) == 1 else " at ".join(place))
    return names
