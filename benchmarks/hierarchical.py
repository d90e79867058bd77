"""Two hosts and a wire of 1 Gbit/s: all-reduce and steps over the backend "hierarchical", against gloo and torch's DDP.

``python -m benchmarks.hierarchical [--ranks 2 4] [--rounds 3] [--write]`` (root; see ``benchmarks.wire``)

Each host is a network namespace with as many ranks; both share this machine's cores, so that what the ranks compute
competes with what they send. The ways take turns, round by round, each in processes of its own, and a figure is the
median over all rounds of the slowest rank's median.

*The wire's floor*: the bytes of the tensor at the wire's rate. Each host has to send all of its sum once.

*Steps*: forward, backward and SGD of a replica, against ``torch.nn.parallel.DistributedDataParallel`` over gloo.
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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models import WORKLOADS
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from benchmarks.wire import DEVICE, End, NoWire, wire

MBIT, DELAY_MS = 1000.0, 1.0
SIZES = {"1KB": 2**10, "4MB": 2**22, "26MB": 26 * 2**20}
#: Calls of each size in a round.
CALLS = {"1KB": 60, "4MB": 15, "26MB": 7}
#: Steps of each model in a round.
STEPS = 8
MODELS = {"transformer": WORKLOADS[2], "resnet18": WORKLOADS[3]}
#: Seconds for one way in one round.
_LIMIT = 300.0
#: Bytes of headers and gaps for each packet of 1500 bytes: of these 1448 are the tensor's.
_PACKET, _PAYLOAD = 1538, 1448


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="on each host")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-hierarchical.md")
    parser.add_argument("--rank", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        way, folder = options.rank
        _measure(way, folder, options.models)
        return
    report = (
        f"# Two hosts and a wire\n\n{machine_name()}. Both hosts are on this machine; the wire carries {MBIT:g} Mbit/s "
        f"and takes {DELAY_MS:g} ms each way.\n"
    )
    try:
        for ranks in options.ranks:
            report += _table(ranks, _compare(ranks, options.rounds, options.models if ranks == 2 else []))
    except NoWire as error:
        print(f"nothing measured: {error}")
        return
    publish(report, name="hierarchical", write=options.write)


def _compare(ranks: int, rounds: int, names: list[str]) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by way and thing, one for each round."""
    figures: dict[str, dict[str, list[float]]] = {"gloo": {}, "hierarchical": {}}
    with wire(mbit=MBIT, delay_ms=DELAY_MS) as ends:
        for _ in range(rounds):
            for way, found in figures.items():
                for what, milliseconds in _run(way, ends, ranks, names).items():
                    found.setdefault(what, []).append(milliseconds)
    return figures


def _run(way: str, ends: tuple[End, End], ranks: int, names: list[str]) -> dict[str, float]:
    """Start the ranks of both hosts, and return the milliseconds of the slowest for each thing they do."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(2 * ranks):
            host, local = divmod(rank, ranks)
            place = {
                "RANK": rank,
                "WORLD_SIZE": 2 * ranks,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": ranks,
                "GROUP_RANK": host,
                "MASTER_ADDR": ends[0].address,
                "MASTER_PORT": 29711,
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": 1,
            }
            command = [*ends[host].command, sys.executable, "-m", "benchmarks.hierarchical", "--rank", way, folder]
            processes.append(
                subprocess.Popen(
                    [*command, "--models", *names], env={**os.environ, **{k: str(v) for k, v in place.items()}}
                )
            )
        codes = [process.wait(_LIMIT) for process in processes]
        if any(codes):
            raise RuntimeError(f"{way}: the ranks ended with {codes}")
        told = [json.loads(Path(folder, f"{rank}").read_text()) for rank in range(2 * ranks)]
    return {what: max(each[what] for each in told) for what in told[0]}


# --- in a rank -------------------------------------------------------------------------------------------------------


def _measure(way: str, folder: str, names: list[str]) -> None:
    import lockstep

    torch.set_num_threads(1)
    world = lockstep.init(way, timeout=60)
    found = {}
    for name, size in SIZES.items():
        tensor = torch.zeros(size // 4)
        found[name] = _milliseconds(partial(dist.all_reduce, tensor), CALLS[name])
    for name in names:
        found[name] = _milliseconds(_step(name, torchs=way == "gloo"), STEPS)
    Path(folder, str(world.rank)).write_text(json.dumps(found))
    world.barrier()


def _milliseconds(call: Callable[[], Any], times: int) -> float:
    taken = []
    for _ in range(times + 2):
        dist.barrier()
        begun = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[2:]) * 1e3


def _step(name: str, *, torchs: bool) -> Callable[[], None]:
    """Return a step of training: of torch's DDP, or of a replica."""
    import lockstep

    torch.manual_seed(0)
    model, inputs = MODELS[name].build(), MODELS[name].batch()
    targets = torch.zeros(len(inputs), dtype=torch.long)
    replica: nn.Module = nn.parallel.DistributedDataParallel(model) if torchs else lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss_of(replica(inputs), targets).backward()
        optimizer.step()

    return step


# --- the report ------------------------------------------------------------------------------------------------------


def _floor(name: str) -> float:
    """The milliseconds that the wire needs for a tensor."""
    return SIZES[name] * 8 / (MBIT * 1e3) * _PACKET / _PAYLOAD


def _table(ranks: int, figures: dict[str, dict[str, list[float]]]) -> str:
    lines = [
        f"\n## 2 hosts with {ranks} ranks each\n",
        "Medians in milliseconds, all-reduce of float32, and steps.\n",
        "| | gloo | hierarchical | ratio | the wire's floor | hierarchical / floor |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for what in figures["gloo"]:
        flat, tiers = (statistics.median(figures[way][what]) for way in ("gloo", "hierarchical"))
        floor = f"{_floor(what):.1f} | {tiers / _floor(what):.2f}" if what in SIZES and SIZES[what] > 2**20 else "- | -"
        lines.append(f"| {what} | {flat:.2f} | {tiers:.2f} | {tiers / flat:.2f} | {floor} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
