"""What ``lockstep runs plan`` says of published scaling of torch's DDP, against what was published.

    python -m benchmarks.plan_published [--write]

The models' buckets, and which part of a backward is over when each is ready, are recorded here: one rank, on the
processor, with pictures of 64 x 64. How long a step computes is the published time on one GPU, so of this machine
nothing is left but these parts. Needs torchvision.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import lockstep
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep.runs import history
from lockstep.tools.plan.network import Link, Network
from lockstep.tools.plan.plan import Plan, Recorded, Setting
from lockstep.tools.plan.timetable import Timetable

#: Steps: ten to warm up, and twenty that are timed.
_STEPS, _SIDE, _LIMIT = 31, 64, 600.0
#: Part of a step that is backward, where nothing was published of it: twice the multiplications of forward.
_BACKWARD = 2 / 3


@dataclass(frozen=True)
class Published:
    """Seconds of the median step of a model with 32 pictures a GPU, by the number of GPUs."""

    model: str
    seconds: dict[int, float]


#: benchmarks/distributed/ddp/README.md of pytorch/pytorch, "Example output", p50: torch 1.4.0a0, NCCL, float32, DGX
#: machines with 8 V100 and "4x 100Gb InfiniBand per machine". 1 is "1M/1G", DDP on one GPU; 16 is two machines.
README = [
    Published("resnet50", {1: 0.100, 2: 0.103, 4: 0.103, 8: 0.104, 16: 0.104}),
    Published("resnet101", {1: 0.171, 2: 0.176, 4: 0.176, 8: 0.179, 16: 0.179}),
    Published("resnext50_32x4d", {1: 0.147, 2: 0.153, 4: 0.153, 8: 0.157, 16: 0.157}),
    Published("resnext101_32x8d", {1: 0.425, 2: 0.438, 4: 0.439, 8: 0.447, 16: 0.450}),
]
#: What these machines' makers promise: six NVLinks of 25 GB/s a GPU, and four times 100 Gbit/s a machine. The latencies
#: are guessed; they hardly matter at this size.
_DGX = Network(between=Link(1e-5, 50e9), inside=Link(5e-6, 150e9), ranks_per_host=8)
#: Li et al., arXiv:2006.15704: 8 V100 a server, and 100 Gbit/s.
_PAPER = Network(between=Link(2e-5, 12.5e9), inside=Link(5e-6, 150e9), ranks_per_host=8)


def record(model: str, folder: Path) -> Recorded:
    """Record a model's buckets on this machine."""
    command = [sys.executable, "-m", "lockstep", "run", "--quiet", "-n", "1", "--log-dir", str(folder)]
    subprocess.run([*command, "-m", "benchmarks.plan_published", "--job", model], check=True, timeout=_LIMIT)
    return Recorded.of(history.read(folder))


def _train(name: str) -> None:
    from torchvision import models  # type: ignore[import-untyped]

    lockstep.init()
    model: nn.Module = models.get_model(name)
    lockstep.replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(_STEPS):
        model(torch.randn(2, 3, _SIDE, _SIDE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_a_gpu(recorded: Recorded, seconds: float) -> Recorded:
    """Return what was recorded as if a step had computed so long."""
    table: Timetable = recorded.first
    return replace(
        recorded,
        tables=(
            replace(
                table,
                optimizer=(0.0,),
                before=((1 - _BACKWARD) * seconds,),
                backward=(_BACKWARD * seconds,),
                handling=(0.0,),
                averaging=(0.0,),
                waiting=(0.0,),
            ),
        ),
    )


def report(found: dict[str, Recorded]) -> str:
    """Return the tables, in Markdown."""
    lines = [
        "# What lockstep runs plan says of published scaling", "",
        f"Buckets recorded on {machine_name()}.", "",
        "## benchmarks/distributed/ddp/README.md of pytorch/pytorch", "",
        "Medians (p50) as printed there, to a millisecond: V100, 32 pictures each, float32, NCCL, torch 1.4. Computing "
        "is the time on one GPU, two thirds of it backward. 150 GB/s inside a machine, 50 GB/s between two, as built.",
        "",
        "| model | gradients | GPUs | planned | published | off |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for one in README:
        plan = Plan(on_a_gpu(found[one.model], one.seconds[1]), Setting(_DGX, "best", "weak", overlaps=True))
        for ranks, seconds in one.seconds.items():
            if ranks == 1:
                continue
            planned = plan.at(ranks).step
            lines.append(
                f"| {one.model} | {found[one.model].bytes / 1e6:.0f} MB | {ranks} | {planned * 1e3:.1f} ms | "
                f"{seconds * 1e3:.0f} ms | {planned / seconds - 1:+.1%} |"
            )
    lines += [
        "", "## Li et al. 2020 (arXiv:2006.15704), ResNet-50 on 256 GPUs", "",
        "Steps as multiples of one GPU's, for what one GPU may have taken: its time and batch are not known here.", "",
        "| one GPU | planned, 256 GPUs, 100 Gbit/s a server |", "|---:|---:|",
    ]  # fmt: skip
    for seconds in (0.05, 0.1, 0.2):
        plan = Plan(on_a_gpu(found["resnet50"], seconds), Setting(_PAPER, "best", "weak", overlaps=True))
        lines.append(f"| {seconds * 1e3:.0f} ms | {plan.at(256).step / seconds:.2f} x |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write to benchmarks/results/<date>-plan_published.md")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        _train(options.job)
        return
    found = {}
    for one in README:
        with tempfile.TemporaryDirectory(prefix="plan-") as folder:
            found[one.model] = record(one.model, Path(folder))
        print(f"{one.model}: {found[one.model].step * 1e3:.0f} ms here", file=sys.stderr, flush=True)
    publish(report(found), name="plan_published", write=options.write)


if __name__ == "__main__":
    main()
