"""Training over a slow link: rounds of local steps against the average of every gradient, by loss, bytes and time.

Two hosts of one rank each, joined by a wire (``benchmarks.wire``), train a small GPT on bytes of English text: the
language reference that Python's own ``help()`` prints. Both ways see the same samples in the same order, and are tested
on the same text that neither has trained on. Bytes are those that the wire's device has sent, from the first step to
the last, headers and all.

The average of every gradient trains over a wire of 1 Gbit/s, since its loss and its bytes do not depend on the rate;
how long its steps take over the slow wire is measured with a few of them. Needs root; see ``benchmarks.wire``.

    python -m benchmarks.slow_link [--quick] [--write] [--mbit 10] [--delay-ms 100] [--steps 1024]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from benchmarks.wire import End, sent_and_received, wire

#: Bytes of a sample, and samples of the global batch.
_CONTEXT, _BATCH = 64, 32
#: Of the text, what is kept for the test; and how many samples it is tested on.
_TEST_PART, _TEST_SAMPLES = 0.1, 512
_LR, _WARM_UP = 3e-3, 40
#: The goals: loss at most so much higher, and at most so much of the bytes.
LOSS_GOAL, BYTES_GOAL = 0.02, 1 / 50
#: Seconds for one run.
_LIMIT = 3600.0
#: A wire so fast that the average of every gradient is no burden.
_FAST_MBIT, _FAST_DELAY_MS = 1000.0, 0.1


def _outer(anchors: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an outer optimizer with less momentum than the default, whose 0.9 is for more rounds than there are here."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.5, nesterov=True)


#: What is compared, and how the ranks train apart in it.
WAYS = {
    "every gradient": None,
    "rounds of 16 steps": lockstep.LocalSteps(every=16, outer=_outer),
    "rounds of 32 steps": lockstep.LocalSteps(every=32, outer=_outer),
    "the same, overlapped": lockstep.LocalSteps(every=32, outer=_outer, overlap=True),
    "the same, default outer optimizer": lockstep.LocalSteps(every=32),
}


class SmallGPT(nn.Module):
    """A decoder over bytes."""

    def __init__(self, *, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(0.02 * torch.randn(_CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.layers(self.bytes(text) + self.places[: text.shape[1]], mask=mask, is_causal=True)
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    #: One of WAYS.
    way: str
    steps: int
    #: Whether the loss on the text for the test is wanted.
    tests: bool = True


@dataclass(frozen=True)
class Found:
    """What came of it, on rank 0."""

    parameters: int
    #: Nats for a byte of the text for the test.
    loss: float
    #: Bytes that the device has sent.
    sent: int
    seconds: float


def train(job: Job, world: lockstep.World) -> Found:
    """**Collective.** Train and test one way."""
    train_text, test_text = _texts()
    torch.manual_seed(0)
    model = SmallGPT()
    sync = WAYS[job.way]
    lockstep.replicate(model, sync=sync)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, job.steps))
    world.barrier()
    (before, _), begun = sent_and_received(), time.monotonic()
    for step in range(job.steps):
        # The same samples whatever the way, and each rank's part of them.
        drawn = torch.Generator().manual_seed(step)
        starts = torch.randint(len(train_text) - _CONTEXT - 1, (_BATCH,), generator=drawn)
        loss = _loss(model, train_text, starts[world.rank :: world.world_size])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if sync is not None:
        lockstep.finish_round(model)
    seconds, (after, _) = time.monotonic() - begun, sent_and_received()
    tested = _test(model, test_text) if job.tests else math.nan
    return Found(sum(param.numel() for param in model.parameters()), tested, after - before, seconds)


def _rate(step: int, steps: int) -> float:
    """Return the part of the learning rate at a step: a warm-up, then half a cosine down to a tenth."""
    if step < _WARM_UP:
        return (step + 1) / _WARM_UP
    done = (step - _WARM_UP) / max(1, steps - _WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _texts() -> tuple[Tensor, Tensor]:
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = round(len(whole) * (1 - _TEST_PART))
    return whole[:cut], whole[cut:]


def _loss(model: nn.Module, text: Tensor, starts: Tensor) -> Tensor:
    windows = torch.stack([text[start : start + _CONTEXT + 1] for start in starts.tolist()])
    scores = model(windows[:, :-1])
    return F.cross_entropy(scores.reshape(-1, 256), windows[:, 1:].reshape(-1))


@torch.no_grad()
def _test(model: nn.Module, text: Tensor) -> float:
    model.eval()
    starts = torch.linspace(0, len(text) - _CONTEXT - 2, _TEST_SAMPLES).long()
    losses = [_loss(model, text, part).item() * len(part) for part in starts.split(64)]
    return sum(losses) / _TEST_SAMPLES


# The two hosts.


def run(job: Job, *, mbit: float, delay_ms: float) -> Found:
    """Run a job on two hosts at a wire, and return what rank 0 found."""
    with wire(mbit=mbit, delay_ms=delay_ms) as ends:
        ranks = [_start(job, rank, ends) for rank in range(len(ends))]
        try:
            outputs = [rank.communicate(timeout=_LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")
    found = Found(**json.loads(outputs[0].splitlines()[-1]))
    print(f"{job.way}, {job.steps} steps over {mbit:g} Mbit/s: {found}", file=sys.stderr, flush=True)
    return found


def _start(job: Job, rank: int, ends: tuple[End, ...]) -> subprocess.Popen[str]:
    place = {
        "RANK": rank,
        "WORLD_SIZE": len(ends),
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
        "GROUP_RANK": rank,
        "MASTER_ADDR": ends[0].address,
        "MASTER_PORT": 29500,
        "GLOO_SOCKET_IFNAME": "wire0",
        "OMP_NUM_THREADS": 1,
    }
    command = [*ends[rank].command, sys.executable, "-m", "benchmarks.slow_link", "--job", json.dumps(asdict(job))]
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _be_rank(job: Job) -> None:
    world = lockstep.init("gloo")
    found = train(job, world)
    world.print(json.dumps(asdict(found)))


# The report.


def report(found: dict[str, Found], job: Job, *, seconds_for_each: float, mbit: float, delay_ms: float) -> str:
    """Return the table, in Markdown."""
    reference = found["every gradient"]
    lines = [
        "# Training over a slow link",
        "",
        machine_name(),
        "",
        f"A GPT of {reference.parameters:,} parameters, {job.steps} steps of {_BATCH} samples of {_CONTEXT} bytes, two "
        f"hosts of one rank with one thread; the wire carries {mbit:g} Mbit/s each way, and a packet takes "
        f"{delay_ms:g} ms from one end to the other. The outer optimizer is SGD with lr 0.7 and Nesterov's momentum of "
        "0.5, where it is not the default with its 0.9. Bytes are those that rank 0's device sent in training, headers "
        "and acknowledgements included; seconds are those of training.",
        "",
        "| | loss, nats a byte | against every gradient | MB sent | of every gradient's | seconds |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way, one in found.items():
        seconds = f"{one.seconds:.0f}"
        if one is reference:
            seconds = f"{seconds_for_each * job.steps:.0f} (reckoned from {seconds_for_each:.1f} a step)"
        lines.append(
            f"| {way} | {one.loss:.4f} | {one.loss / reference.loss - 1:+.1%} | {one.sent / 1e6:.1f} | "
            f"1/{reference.sent / one.sent:.0f} | {seconds} |"
        )
    lines += [
        "",
        f"Goals: a loss at most {LOSS_GOAL:.0%} higher, at most 1/{1 / BYTES_GOAL:.0f} of the bytes.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run as the module's docstring says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: shows that it runs, and no result")
    parser.add_argument("--write", action="store_true", help="keep the table under benchmarks/results")
    parser.add_argument("--mbit", type=float, default=10.0, help="of the slow wire")
    parser.add_argument("--delay-ms", type=float, default=100.0, help="of the slow wire, one way")
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        _be_rank(Job(**json.loads(options.job)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the wire and its hosts go then, too
    job = Job("every gradient", 64 if options.quick else options.steps)
    slow: dict[str, Any] = {"mbit": options.mbit, "delay_ms": options.delay_ms}
    few = replace(job, steps=4, tests=False)
    seconds_for_each = run(few, **slow).seconds / few.steps
    found = {"every gradient": run(job, mbit=_FAST_MBIT, delay_ms=_FAST_DELAY_MS)}
    for way in [way for way, sync in WAYS.items() if sync is not None]:
        found[way] = run(replace(job, way=way), **slow)
    publish(report(found, job, seconds_for_each=seconds_for_each, **slow), name="slow-link", write=options.write)


if __name__ == "__main__":
    main()
