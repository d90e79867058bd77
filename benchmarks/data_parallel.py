"""DataParallel: what a step costs, and what is copied for it, against the bare module and torch's class.

On the CPU, two replicas share the cores that the bare module has for itself, so a ratio of 1.00 means that replicas
cost nothing. On two or more GPUs, torch.nn.DataParallel runs beside lockstep's; without them its figures for copies are
reckoned: it sends every parameter and buffer to every other replica in each forward. The ways alternate in rounds;
medians are shown.

    python -m benchmarks.data_parallel [--quick] [--write] [--only TEXT]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from benchmarks.models import Transformer, mlp, resnet18
from benchmarks.naming import machine_name
from benchmarks.publishing import publish


@dataclass(frozen=True)
class Case:
    """A model and a batch for all its replicas."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    #: Samples for each replica.
    samples: int
    #: Steps of a round.
    steps: int


CASES = [
    Case("MLP, 6 M", lambda: mlp(784, 2048, 2048, 256, 10), lambda n: torch.randn(n, 784), 64, 3),
    Case("transformer, 7 M", Transformer, lambda n: torch.randint(2000, (n, 32)), 8, 1),
    Case("ResNet-18, 32x32", resnet18, lambda n: torch.randn(n, 3, 32, 32), 8, 1),
]


class Runner:
    """One way to run a model: training steps and evaluation batches."""

    def __init__(self, case: Case, way: str, devices: list[torch.device]) -> None:
        torch.manual_seed(0)
        self.net = case.build().to(devices[0])
        self.way = way
        self.x = case.batch(case.samples * len(devices)).to(devices[0])
        self.y = torch.zeros(len(self.x), dtype=torch.int64, device=devices[0])
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.model: nn.Module = self.net
        if way == "torch":
            self.model = nn.DataParallel(self.net, device_ids=[device.index for device in devices])
        elif way != "bare":
            criterion = F.cross_entropy if way == "loss on replicas" else None
            self.model = lockstep.DataParallel(self.net, devices, criterion=criterion, output_dim=0)

    def step(self) -> None:
        """Forward, backward, SGD."""
        self.model.train()
        self.optimizer.zero_grad()
        with_loss = self.way == "loss on replicas"
        loss = self.model(self.x, target=self.y) if with_loss else F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimizer.step()

    def evaluate(self) -> None:
        """A batch without a graph."""
        self.model.eval()
        with torch.no_grad():
            self.model(self.x)

    def copied(self, run: Callable[[], None]) -> float:
        """MiB that one more call copies to replicas."""
        if isinstance(self.model, nn.DataParallel):
            others = len(self.model.device_ids) - 1
            return others * sum(t.nbytes for t in (*self.net.parameters(), *self.net.buffers())) / 2**20
        if not isinstance(self.model, lockstep.DataParallel):
            return 0.0
        run()  # after a change of mode
        before = self.model.copies.bytes
        run()
        return (self.model.copies.bytes - before) / 2**20


def _seconds(runners: dict[str, Runner], kind: str, steps: int, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {way: [] for way in runners}
    runs = {way: (runner.step if kind == "train" else runner.evaluate) for way, runner in runners.items()}
    for run in runs.values():
        for _ in range(3):
            run()
    for number in range(rounds):
        ways = list(runs)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            _synchronize()
            begun = time.perf_counter()
            for _ in range(steps):
                runs[way]()
            _synchronize()
            seconds[way].append((time.perf_counter() - begun) / steps)
    return seconds


def _synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _times(cases: list[Case], devices: list[torch.device], ways: list[str], rounds: int) -> str:
    against = ways[0]
    lines = [
        "| model | | "
        + " | ".join(f"{way} (ms)" for way in ways)
        + " | "
        + " | ".join(f"{way} / {against}" for way in ways[1:])
        + " |",
        "|---|---|" + "---:|" * (2 * len(ways) - 1),
    ]
    for case in cases:
        runners = {way: Runner(case, way, devices) for way in ways}
        for kind in ("train", "evaluate"):
            seconds = _seconds(runners, kind, case.steps, rounds)
            cells = [f"{statistics.median(each) * 1e3:.1f}" for each in seconds.values()]
            for way in ways[1:]:
                pairs = zip(seconds[way], seconds[against], strict=True)
                cells.append(f"{statistics.median(one / other for one, other in pairs):.2f}")
            lines.append(f"| {case.name} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _copies(cases: list[Case], devices: list[torch.device]) -> str:
    lines = [
        "| model | torch, any forward (MiB) | training step (MiB) | accumulating step (MiB) | evaluation (MiB) |",
        "|---|---:|---:|---:|---:|",
    ]
    for case in cases:
        runner = Runner(case, "loss on replicas", devices)
        reckoned = (len(devices) - 1) * sum(t.nbytes for t in (*runner.net.parameters(), *runner.net.buffers())) / 2**20
        step = runner.copied(runner.step)
        evaluation = runner.copied(runner.evaluate)
        runner.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # no parameter is changed
        accumulating = runner.copied(runner.step)
        lines.append(f"| {case.name} | {reckoned:.2f} | {step:.2f} | {accumulating:.2f} | {evaluation:.2f} |")
    return "\n".join(lines)


def _memory(cases: list[Case], devices: list[torch.device], ways: list[str]) -> str:
    lines = ["| model | way | " + " | ".join(f"{device} (MiB)" for device in devices) + " |"]
    lines.append("|---|---|" + "---:|" * len(devices))
    for case in cases:
        for way in ways:
            runner = Runner(case, way, devices)
            runner.step()
            for device in devices:
                torch.cuda.reset_peak_memory_stats(device)
            runner.step()
            peaks = [torch.cuda.max_memory_allocated(device) / 2**20 for device in devices]
            lines.append(f"| {case.name} | {way} | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |")
            del runner
            torch.cuda.empty_cache()
    return "\n".join(lines)


def _on_gpus(cases: list[Case], rounds: int) -> str:
    count = torch.cuda.device_count()
    if count < 2:
        return f"## On GPUs\n\nNot measured: this needs two or more CUDA devices, and here are {count}.\n"
    devices = [torch.device("cuda", index) for index in range(count)]
    ways = ["torch", "gathered", "loss on replicas"]
    names = ", ".join(torch.cuda.get_device_name(device) for device in devices)
    return (
        f"## On GPUs\n\n{names}.\n\n{_times(cases, devices, ways, rounds)}\n\nPeak memory of a training step:\n\n"
        f"{_memory(cases, devices, ways)}\n\nCopied to the replicas:\n\n{_copies(cases, devices)}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run, roughly how fast")
    parser.add_argument("--only", default="", help="only models with this text in their name")
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-data-parallel.md")
    options = parser.parse_args()
    rounds = 3 if options.quick else options.rounds
    cases = [case for case in CASES if options.only in case.name]
    cpus = [torch.device("cpu")] * 2
    report = (
        f"# DataParallel\n\n{machine_name()}.\n{rounds} rounds; medians, and medians of the rounds' ratios.\n\n"
        "## Two replicas on the CPU\n\n"
        "Both share the cores that the bare module has for itself. `gathered`: the loss is computed in one place, from "
        "the gathered outputs; `loss on replicas`: `criterion=`.\n\n"
        f"{_times(cases, cpus, ['bare', 'gathered', 'loss on replicas'], rounds)}\n\n"
        "Copied to the second replica, beside what torch's class would copy (every parameter and buffer, in every "
        "forward; reckoned, because it makes no replicas on the CPU). In a training step with SGD all parameters "
        "change; in an accumulating one only batch statistics do.\n\n"
        f"{_copies(cases, cpus)}\n\n{_on_gpus(cases, rounds)}"
    )
    publish(report, name="data-parallel", write=options.write)


if __name__ == "__main__":
    main()
