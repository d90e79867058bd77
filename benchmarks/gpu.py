"""What a machine with GPUs shows in its first minutes, as tables to paste.

- Steps of a ResNet-50 and a GPT-2 in bfloat16 without a wrapper, under torch's DDP, and as a replica: on one GPU and on
  all of them, the ways in turn.
- How long ``async_save`` holds the steps up.
- A step in a CUDA graph against the same step without one.
- How soon a rank that is stopped, and one that is killed, is named, and the job is over.

``make gpu`` runs it after the tests. It has run on simulated GPUs only, where its times mean nothing.

    python -m benchmarks.gpu [--quick] [--ranks N] [--rounds N] [--write]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep import accelerator

#: Way -> seconds of a step in each round.
Timed = dict[str, list[float]]

_ALONE, _TORCH, _TORCH_VIEWS, _REPLICATE = WAYS = ("no wrapper", "torch DDP", "torch DDP, views", "replicate")
#: Seconds that a job of this benchmark may take.
_LIMIT = 300.0


class Gpt2(nn.Module):
    """A decoder of the shape of GPT-2 (Radford et al. 2019), with torch's own layers.

    Returns the mean loss of the next tokens (0-dim) for tokens of int64 [batch, length + 1].
    """

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, texts: Tensor) -> Tensor:
        given, wanted = texts[:, :-1], texts[:, 1:]
        x = self.tokens(given) + self.places.weight[: given.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1], device=x.device, dtype=x.dtype)
        x = self.norm(self.blocks(x, mask=mask, is_causal=True))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1).float(), wanted.flatten())


class Classifier(nn.Module):
    """A model of pictures with its loss: returns the mean loss (0-dim) for float32 [batch, 3, height, width]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pictures: Tensor) -> Tensor:
        scores = self.model(pictures).float()
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=scores.device))


@dataclass(frozen=True)
class GpuWorkload:
    """A model with its loss, a rank's batch, and the steps of a round."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Tensor]
    steps: int


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50  # type: ignore[import-untyped]  # only here: it takes seconds to import

    return Classifier(resnet50()).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _one_convolution() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return Classifier(nn.Sequential(*layers, nn.Linear(8, 10)))


def _pictures(count: int, size: int) -> Tensor:
    return torch.randn(count, 3, size, size).to(memory_format=torch.channels_last)


_GPT = {"layers": 12, "width": 768, "heads": 12, "tokens": 50257, "length": 1024}
_SMALL_GPT = {"layers": 2, "width": 32, "heads": 2, "tokens": 64, "length": 16}

FULL = [
    GpuWorkload("ResNet-50, bf16, channels_last, 64 pictures", _resnet50, lambda: _pictures(64, 224), 10),
    GpuWorkload("GPT-2, 124 M, bf16, 4 x 1024 tokens", lambda: Gpt2(**_GPT), lambda: _texts(4, _GPT), 5),
]
QUICK = [
    GpuWorkload("one convolution, bf16, 2 pictures of 8x8", _one_convolution, lambda: _pictures(2, 8), 2),
    GpuWorkload("GPT-2 of 2 layers, bf16, 2 x 16 tokens", lambda: Gpt2(**_SMALL_GPT), lambda: _texts(2, _SMALL_GPT), 2),
]


def _texts(count: int, shape: dict[str, int]) -> Tensor:
    return torch.randint(shape["tokens"], (count, shape["length"] + 1))


# On the ranks ---------------------------------------------------------------------------------------------------------


def _stepper(workload: GpuWorkload, way: str, device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    model = workload.build().to(device)
    if way == _REPLICATE:
        lockstep.replicate(model)
    elif way != _ALONE:
        model = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=way == _TORCH_VIEWS
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch().to(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()

    return step


def _seconds(step: Callable[[], None], steps: int, device: torch.device) -> float:
    accelerator.synchronize(device)
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    accelerator.synchronize(device)
    return (time.perf_counter() - begun) / steps


def steps_in_turn(_rank: int, rounds: int, quick: bool) -> list[Timed]:
    """Return the seconds of a step of each workload in each way and round, of this rank."""
    world = lockstep.init()
    return [_in_turn(workload, rounds, world) for workload in (QUICK if quick else FULL)]


def _in_turn(workload: GpuWorkload, rounds: int, world: lockstep.World) -> Timed:
    steppers = {way: _stepper(workload, way, world.device) for way in WAYS}
    for stepper in steppers.values():
        for _ in range(3):
            stepper()
    found: Timed = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
            world.barrier()
            found[way].append(_seconds(steppers[way], workload.steps, world.device))
    return found


def stalls_of_saves(_rank: int, folder: str, quick: bool) -> dict[str, float]:
    """Return the seconds of a usual step, of the steps with the first and second ``async_save``, and of the rest of the
    saves."""
    world = lockstep.init()
    torch.manual_seed(0)
    workload = (QUICK if quick else FULL)[1]
    model = lockstep.replicate(workload.build().to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch().to(world.device)
    saved = lockstep.Checkpointer(Path(folder) / "run", model=model, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(world.device.type, torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()

    found: dict[str, float] = {}
    for _ in saved.epochs(1):
        for _ in range(3):
            step()
        found["a usual step"] = _seconds(step, workload.steps, world.device)
        for which in ("first", "second"):

            def saving() -> None:
                step()
                saved.async_save()

            found[f"the step with the {which} save"] = _seconds(saving, 1, world.device)
            begun = time.perf_counter()
            saved.wait()
            found[f"until the {which} save was on the disk"] = time.perf_counter() - begun
    return found


def graphs(_rank: int, quick: bool) -> tuple[float, float]:
    """Return the seconds of a step, and of the same step in a CUDA graph."""
    world = lockstep.init()
    torch.manual_seed(0)
    width, steps = (32, 2) if quick else (1024, 20)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        model = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]).to(world.device)
        lockstep.replicate(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        inputs = torch.randn(64, width, device=world.device)

        def step() -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        for _ in range(4):
            step()
        plain = _seconds(step, steps, world.device)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    with torch.cuda.stream(side):
        captured = _seconds(graph.replay, steps, world.device)
    return plain, captured


# Jobs that go wrong ---------------------------------------------------------------------------------------------------

_JOB = """
import os, signal, sys, time
import torch, lockstep

world = lockstep.init()
model = lockstep.replicate(torch.nn.Linear(64, 64).to(world.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10**9):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64, device=world.device)).square().mean()
    if step == 20 and world.rank == world.world_size - 1:
        with open(sys.argv[1], "w") as file:
            file.write(f"{os.getpid()} {time.monotonic()}")
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    loss.backward()
    optimizer.step()
    loss.item()
"""


def trouble(signal_name: str, says: str, ranks: int, folder: str) -> tuple[float, float]:
    """Let the last rank of a job send itself a signal. Return the seconds from there to a message of the launcher, and
    to the end of the job, which is told to stop once it has said so, if it does not end by itself.

    Raises:
        RuntimeError: the message did not come.
    """
    script, note = Path(folder) / "train.py", Path(folder) / f"begun-{signal_name}"
    script.write_text(_JOB)
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(ranks), str(script), str(note), signal_name]
    with _started(command, folder) as job:
        assert job.stderr is not None
        lines, said = [], None
        for line in job.stderr:
            lines.append(line)
            if re.search(says, line):
                said = time.monotonic()
                break
        if said is None:
            raise RuntimeError(f"{signal_name}: the launcher did not say {says!r}:\n{''.join(lines)}")
        begun = float(note.read_text().split()[1])
        if signal_name == "SIGSTOP":
            job.terminate()
            job.terminate()
        job.stderr.read()
        job.wait(_LIMIT)
        return said - begun, time.monotonic() - begun


@contextmanager
def _started(command: list[str], folder: str) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        command, cwd=folder, env=dict(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        yield job
    finally:
        if job.poll() is None:
            job.kill()
        assert job.stderr is not None
        job.stderr.close()
        job.wait()


# The tables -----------------------------------------------------------------------------------------------------------


def step_table(rows: dict[tuple[str, int], Timed]) -> str:
    """Return the table of steps: milliseconds, and medians of the rounds' ratios.

    Args:
        rows: (workload, ranks) -> the seconds of the slowest rank.
    """
    lines = [
        f"| model | GPUs | {' | '.join(f'{way} (ms)' for way in WAYS)} | replicate / torch DDP, views | replicate / no "
        "wrapper |",
        f"|---|---:|{'---:|' * (len(WAYS) + 2)}",
    ]
    for (name, ranks), timed in rows.items():
        cells = [f"{1e3 * statistics.median(timed[way]):.2f}" for way in WAYS]
        cells += [f"{_ratio(timed[_REPLICATE], timed[other]):.3f}" for other in (_TORCH_VIEWS, _ALONE)]
        lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def _slowest(found: list[Timed]) -> Timed:
    return {way: [max(each) for each in zip(*(timed[way] for timed in found), strict=True)] for way in WAYS}


def _report(ranks: int, rounds: int, *, quick: bool) -> str:
    workloads = QUICK if quick else FULL
    rows: dict[tuple[str, int], Timed] = {}
    for count in dict.fromkeys((1, ranks)):
        of_ranks = lockstep.spawn(steps_in_turn, (rounds, quick), count)
        for number, each in enumerate(workloads):
            rows[each.name, count] = _slowest([found[number] for found in of_ranks])
    with tempfile.TemporaryDirectory(prefix="lockstep-gpu-") as folder:
        saves = lockstep.spawn(stalls_of_saves, (folder, quick), ranks)
        plain, captured = map(max, zip(*lockstep.spawn(graphs, (quick,), ranks), strict=True))
        jobs = []
        if ranks > 1:
            stopped = trouble("SIGSTOP", r"has held up the others", ranks, folder)
            killed = trouble("SIGKILL", r"failed: killed by signal 9", ranks, folder)
            jobs = [
                f"- a rank that is stopped: named after {stopped[0]:.1f} s",
                f"- a rank that is killed: named after {killed[0]:.2f} s, the job over after {killed[1]:.2f} s",
            ]
    waited = {name: max(each[name] for each in saves) for name in saves[0]}
    return "\n".join(
        [
            f"{machine_name()}.",
            f"{ranks} x {accelerator.name_of(accelerator.devices()[0])}, NCCL {accelerator.nccl_version() or 'none'}; "
            f"{rounds} rounds, the ways in turn; medians of the slowest rank.",
            "",
            step_table(rows),
            "",
            f"- a step in a CUDA graph: {1e3 * captured:.2f} ms, without {1e3 * plain:.2f} ms",
            f"- {workloads[1].name}: {', '.join(f'{name} {1e3 * seconds:.0f} ms' for name, seconds in waited.items())}",
            *jobs,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="GPUs to use (default: all)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: does it run")
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/results/<date>-gpu.md")
    options = parser.parse_args()
    if accelerator.kind() != "cuda":
        print(f"no GPU here that torch {torch.__version__} can use: nothing was measured", file=sys.stderr)
        return 2
    ranks = options.ranks or accelerator.count()
    report = _report(ranks, 2 if options.quick else options.rounds, quick=options.quick)
    publish(f"# GPUs\n\n{report}", name="gpu", write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
