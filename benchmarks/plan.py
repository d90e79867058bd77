"""What ``lockstep runs plan`` says of more ranks and hosts, against what they take.

    python -m benchmarks.plan [--only NAME…] [--rounds 3] [--write]

A model is recorded on one rank, and planned for more; then they are started. On this machine they share its cores, so
most models here compute by sleeping, in forward and in backward, layer by layer: as many ranks as one likes then
compute beside each other, as they would on machines of their own. The transformer computes in earnest; its plan is told
how many cores there are. The network is measured as ``lockstep doctor`` does it: an all-reduce of 8 bytes and one of
16 MiB between two ranks. Hosts are network namespaces whose links carry so many Mbit/s; they need root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from benchmarks.models import WORKLOADS
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import machine
from lockstep.runs import history
from lockstep.tools.plan.network import Link, Network
from lockstep.tools.plan.plan import INSIDE, Plan, Recorded, Setting

STEPS, WARM = 45, 8
#: Seconds for one start of the ranks.
_LIMIT = 300.0
_GOAL = 0.15


class _Sleep(torch.autograd.Function):
    """Takes its time, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Sleeping(nn.Module):
    """Layers of parameters (by default 1 MB each), which compute by sleeping.

    Args:
        seconds: that a layer takes in forward; in backward it takes twice as long.
        layers: how many.
        elements: of the parameters of each.
    """

    def __init__(self, seconds: float, *, layers: int = 8, elements: int = 2**18) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(elements)) for _ in range(layers)])
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        for weights in self.layers:
            x = _Sleep.apply(x + weights.mean(), self.seconds)  # type: ignore[no-untyped-call]
        return x


#: Seconds of a layer's forward, for all samples that a rank has at first.
_LAYER = 0.004


@dataclass(frozen=True)
class Case:
    """Ranks that are planned for, and then started."""

    model: str
    backend: str
    ranks: int
    hosts: int = 1
    #: Of each host's link; 0: one host.
    mbit: float = 0.0
    scaling: str = "weak"

    @property
    def words(self) -> str:
        where = "" if self.hosts == 1 else f", {self.hosts} hosts at {self.mbit:g} Mbit/s"
        scaling = "" if self.model == ALONE else f", {self.scaling}"
        return f"{self.model}, {self.backend}{where}{scaling}"


#: The group that is planned from a run of two ranks, and not of one.
FROM_TWO = "from-two"
#: No model: eight all-reduces of 1 MB one after the other.
ALONE = "all-reduces alone"

CASES = {
    "one-host": [
        *(Case("sleeping", "shm", ranks) for ranks in (2, 3, 4)),
        *(Case("sleeping", "gloo", ranks) for ranks in (2, 3, 4)),
        *(Case("sleeping", "shm", ranks, scaling="strong") for ranks in (2, 3, 4)),
    ],
    FROM_TWO: [Case("sleeping", "shm", ranks, scaling="strong") for ranks in (3, 4)],
    "slow-link": [Case("sleeping", "gloo", hosts, hosts, 200) for hosts in (2, 3, 4)],
    "fast-link": [Case("sleeping", "gloo", hosts, hosts, 400) for hosts in (2, 3, 4)],
    "alone": [Case(ALONE, "gloo", hosts, hosts, mbit) for mbit in (200, 400, 800) for hosts in (2, 4)],
    "two-tiers": [Case("sleeping", "hierarchical", 4, 2, mbit) for mbit in (200, 800)],
    "transformer": [Case("transformer", "shm", ranks) for ranks in (2, 3, 4)],
}


# In a rank.


def _train(case: Case) -> float:
    """Take steps, and return the seconds of the median one."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    world = lockstep.init(timeout=60)
    if case.model == ALONE:
        return _reduce_alone()
    model: nn.Module
    if case.model == "sleeping":
        part = 1 / world.world_size if case.scaling == "strong" else 1.0
        model, batch = Sleeping(_LAYER * part), torch.zeros(1)
    else:
        model, batch = WORKLOADS[2].build(), WORKLOADS[2].batch()
    lockstep.replicate(model, bucket_cap_mb=1, first_bucket_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    moments = []
    for _ in range(STEPS):
        moments.append(time.perf_counter())
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return statistics.median(later - before for before, later in zip(moments[WARM:], moments[WARM + 1 :], strict=False))


def _reduce_alone() -> float:
    tensors = [torch.zeros(2**18) for _ in range(8)]
    taken = []
    for _ in range(STEPS):
        dist.barrier()
        begun = time.perf_counter()
        works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[WARM:])


# The ranks of a case.


def run(case: Case, names: tuple[str, ...]) -> float:
    """Start a case's ranks, and return the seconds of the median step."""
    return float(_start(case, names, ["-m", "benchmarks.plan", "--job", json.dumps(asdict(case))]))


def measure(case: Case, names: tuple[str, ...]) -> Link:
    """Return the link between two of a case's ranks, as the doctor's short job times it."""
    hosts = min(2, case.hosts)
    pair = Case(case.model, "gloo" if case.hosts > 1 else case.backend, 2, hosts, case.mbit)
    found = json.loads(_start(pair, names, ["-m", "lockstep.tools.doctor.trial"]))["pairs"][0]
    # Between two ranks an all-reduce is two messages, each of half of the bytes.
    return Link(found["few"] / 2, found["bytes"] / (found["many"] - found["few"]))


def record(case: Case, folder: Path, *, ranks: int = 1) -> Recorded:
    """Record a case's model on one host."""
    backend = "gloo" if case.backend == "gloo" and ranks > 1 else "shm"
    _start(
        Case(case.model, backend, ranks), (),
        ["--log-dir", str(folder), "-m", "benchmarks.plan", "--job", json.dumps(asdict(case))],
    )  # fmt: skip
    return Recorded.of(history.read(folder))


def _start(case: Case, names: tuple[str, ...], words: list[str]) -> str:
    """Start the ranks of all hosts, and return the last line of rank 0."""
    each = case.ranks // case.hosts
    processes = []
    for host in range(case.hosts):
        command = [sys.executable, "-m", "lockstep", "run", "--quiet", "-n", str(each)]
        if case.hosts > 1:
            command = ["ip", "netns", "exec", names[host], *command, "--nnodes", str(case.hosts)]
            command += ["--node-rank", str(host), "--master-addr", "10.77.0.1"]
        environment = {**os.environ, "LOCKSTEP_BACKEND": case.backend, "GLOO_SOCKET_IFNAME": "eth0"}
        if case.hosts == 1:
            del environment["GLOO_SOCKET_IFNAME"]
        out = subprocess.PIPE if host == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen([*command, *words], env=environment, stdout=out, text=True))
    try:
        output = processes[0].communicate(timeout=_LIMIT)[0]
        codes = [process.wait(_LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise SystemExit(f"{case}: the launchers ended with {codes}")
    return output.strip().splitlines()[-1]


@contextmanager
def hosts(count: int, mbit: float) -> Iterator[tuple[str, ...]]:
    """Open a context with so many hosts, each at a link."""
    from tests.faults.machines import network, set_rate

    if count == 1:
        yield ()
        return
    with network(count, f"plan{os.getpid()}") as names:
        set_rate(names, mbit)
        yield names


# The comparison.


@dataclass(frozen=True)
class Compared:
    """What was planned, and what it took."""

    case: Case
    link: Link
    planned: float
    measured: float
    recorded: Recorded

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1


def compare(name: str, *, rounds: int) -> list[Compared]:
    """Plan and measure each case of a group."""
    found, cases = [], CASES[name]
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        model = cases[0] if cases[0].model != ALONE else CASES["one-host"][0]
        recorded = record(model, Path(folder), ranks=2 if name == FROM_TWO else 1)
        print(f"{name}: recorded, {recorded.step * 1e3:.1f} ms", file=sys.stderr, flush=True)
        inside: dict[str, Link] = {}
        for case in cases:
            with hosts(case.hosts, case.mbit) as names:
                link = measure(case, names)
                if case.hosts > 1 and case.ranks > case.hosts:
                    inside = inside or {"shm": measure(Case(case.model, "shm", 2), ())}
                plan = Plan(recorded, _setting(case, link, inside.get("shm", INSIDE)))
                measured = statistics.median(run(case, names) for _ in range(rounds))
            point = plan.at(case.ranks)
            planned = point.averaging if case.model == ALONE else point.step
            one = Compared(case, link, planned, measured, recorded)
            print(f"{case.words}, {case.ranks} ranks: {link.words()}; {one.planned * 1e3:.1f} ms planned, "
                  f"{measured * 1e3:.1f} ms taken, {one.off:+.1%}", file=sys.stderr, flush=True)  # fmt: skip
            found.append(one)
    return found


def _setting(case: Case, link: Link, inside: Link) -> Setting:
    each = case.ranks // case.hosts
    network = Network(link, link if case.hosts == 1 else inside, each)
    return Setting(
        network,
        algorithm="hierarchical" if case.backend == "hierarchical" else "ring",
        scaling=case.scaling,
        cores=machine.cores() if case.model == "transformer" else None,
        overlaps=case.backend == "gloo",
    )


def report(found: list[Compared], *, rounds: int) -> str:
    """Return the table, in Markdown."""
    starts = "One start" if rounds == 1 else f"{rounds} starts"
    lines = [
        "# What lockstep runs plan says, and what it takes", "",
        f"{machine_name()}. {starts} of the ranks for each, {STEPS} steps, their median. "
        "*Sleeping*: 8 layers of 1 MB of gradients, each of which sleeps 4 ms in forward and 8 ms in backward. The "
        "link: half an all-reduce of 8 bytes, and the rate of one of 16 MiB, between two of the ranks.", "",
        "| | ranks | link: latency and rate | recorded on | a step there | planned | taken | off |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for one in found:
        times = " | ".join(f"{seconds * 1e3:.1f} ms" for seconds in (one.recorded.step, one.planned, one.measured))
        times = f"{one.recorded.ranks} | {times}"
        lines.append(f"| {one.case.words} | {one.case.ranks} | {one.link.words()} | {times} | {one.off:+.0%} |")
    within = sum(abs(one.off) <= _GOAL for one in found)
    return "\n".join([*lines, "", f"Within {_GOAL:.0%}: {within} of {len(found)}.", ""])


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-plan.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        seconds = _train(Case(**json.loads(options.job)))
        if os.environ["RANK"] == "0":
            print(seconds)
        return
    found = [one for name in options.only for one in compare(name, rounds=options.rounds)]
    publish(report(found, rounds=options.rounds), name="plan", write=options.write)


if __name__ == "__main__":
    main()
