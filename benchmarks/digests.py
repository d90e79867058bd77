"""What the digests cost by which runs are compared: the part of the training time that a rank spends on them.

Two ranks train a model with AdamW by ``lockstep.replicate``, as any job does, and rank 0 takes digests of the
parameters and of the optimizer's state after some steps (Note [Digest chain] in ``lockstep/ddp/digest_chain.py``). The
time within these calls is taken by the clock, beside that of all steps, once it is settled how far apart digests are.
The other rank waits for as long at most, which is in the time of the steps.

    python -m benchmarks.digests [--seconds N] [--write]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import lockstep
from benchmarks.models import WORKLOADS
from benchmarks.naming import machine_name
from benchmarks.publishing import publish
from lockstep.ddp import digest_chain

_RANKS = 2
#: Seconds of training before the clock begins: by then the distance of digests has settled.
_BEFORE = 4.0
#: The part of the time that is allowed for.
_GOAL = 0.005


def _measure(_: int, which: int, seconds: float) -> tuple[float, float, int, float, int]:
    """A rank: return the seconds within digests, those of all steps, how many digests there were, the median of their
    milliseconds, and the number of parameters."""
    world, workload = lockstep.init(), WORKLOADS[which]
    torch.manual_seed(0)
    model = lockstep.replicate(workload.build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = workload.batch()
    targets = torch.zeros(len(batch), dtype=torch.int64)
    chain: Any = digest_chain._chain
    taken: list[float] = []
    take = chain._take

    def timed(step: int) -> None:
        begun = time.perf_counter()
        take(step)
        taken.append(time.perf_counter() - begun)

    chain._take = timed

    def train(limit: float) -> float:
        """Take steps for some seconds; all ranks take as many."""
        begun = time.perf_counter()
        while not world.any(time.perf_counter() - begun > limit):
            for _ in range(workload.steps):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(batch), targets).backward()
                optimizer.step()
        return time.perf_counter() - begun

    train(_BEFORE)
    taken.clear()
    whole = train(seconds)
    size = sum(param.numel() for param in model.parameters())
    return sum(taken), whole, len(taken), 1e3 * statistics.median(taken) if taken else 0.0, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training of each model")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows = []
    for which, workload in enumerate(WORKLOADS):
        if workload.accumulate > 1:
            continue
        within, whole, count, middle, size = lockstep.spawn(_measure, (which, options.seconds), _RANKS)[0]
        rows.append(f"| {workload.name} | {size / 1e6:.2f} | {count} | {middle:.2f} | **{within / whole:.2%}** |")
    report = f"""# What the digests cost by which runs are compared

{machine_name()}.
{_RANKS} ranks with shared memory, AdamW, {options.seconds:g} s of training of each model.
The goal is {_GOAL:.1%} of the time.

| model | parameters, millions | digests | ms each (median) | part of the time |
|---|---|---|---|---|
{chr(10).join(rows)}
"""
    publish(report, name="digests", write=options.write)


if __name__ == "__main__":
    main()
