"""Take 45 steps in one way; run by ``lockstep run``. Rank 0 prints the seconds of the median step, and waits until the
launcher, which looks once a second, has begun the run's record in FOLDER.

``planned.py WAY FOLDER``: ``plain``; ``sleeping``, which computes by sleeping, the less the more ranks there are;
``accumulated``, two backwards a step; ``compiled``; ``failing``, of which the thirteenth backward fails; ``local``,
with LocalSteps; ``several`` replicas; ``hooked``, by a comm hook; ``short``, of ten steps; ``sparse``, whose gradients
are; ``part``, where each rank's replica has a process group of its own; ``sliced``, in slices of the batch;
``unfrozen``, whose first layer is trained from the 20th step on; ``restarted``, which fails at the 20th step of its
first start; ``gone``, after which the model is given up, and nothing may keep it. Once the traced steps are over,
nothing of the trace may be left in the process.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import weakref
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.plan import Sleeping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.ddp.backward import Backward
from lockstep.ddp.reducer import Reducer
from lockstep.ddp.replica import Replica
from lockstep.job import flight

#: Seconds of a layer's forward on one rank, half of its backward.
LAYER = 0.02


def main() -> None:
    way = sys.argv[1]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = lockstep.init()
    model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    if way == "sleeping":
        model = Sleeping(LAYER / world.world_size, layers=2, elements=1000)
    if way == "sparse":
        model = nn.Sequential(nn.Embedding(64, 64, sparse=True), nn.Linear(64, 64))
    if way == "unfrozen":
        next(model.children()).requires_grad_(False)
    sync = lockstep.LocalSteps(every=5) if way == "local" else None
    groups = [dist.new_group([rank]) for rank in range(world.world_size)] if way == "part" else None
    group = None if groups is None else groups[world.rank]
    lockstep.replicate(model, bucket_cap_mb=0.03, first_bucket_mb=0.03, sync=sync, process_group=group)
    models = [model]
    if way == "several":
        models.append(lockstep.replicate(nn.Linear(64, 64)))
    if way == "hooked":
        lockstep.register_comm_hook(model, None, _hook)
    called = torch.compile(model, backend="aot_eager") if way == "compiled" else None
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    batch = torch.arange(4) if way == "sparse" else torch.ones(4, 64)
    data = DataLoader(TensorDataset(torch.ones(4 * 45, 64)), batch_size=4)
    sliced = iter(lockstep.shard(data, slices=2).steps()) if way == "sliced" else iter(())
    moments = []
    for step in range(10 if way == "short" else 45):
        moments.append(time.perf_counter())
        if way == "failing" and step == 12:
            _fail(model)
            continue
        if way == "restarted" and step == 20 and os.environ["LOCKSTEP_RESTART"] == "0":
            raise SystemExit(7)
        if way == "unfrozen" and step == 20:
            next(model.children()).requires_grad_(True)
        if way == "sliced":
            _take_step_in_slices(next(sliced), model, *optimizers)
            continue
        for each, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for last in (False, True) if way == "accumulated" else (True,):
                with nullcontext() if last else lockstep.no_sync(each):
                    if way == "accumulated":
                        time.sleep(0.005)
                    (called or each)(batch).square().mean().backward()
            optimizer.step()
    if way == "gone":
        param = weakref.ref(next(model.parameters()))
        del model, models, each, optimizers, optimizer
        gc.collect()
        assert param() is None
    if way != "short":
        _find_nothing_left()
    if world.is_main:
        print(statistics.median(later - before for before, later in pairwise(moments[8:])))
        end = time.monotonic() + 20
        while not Path(sys.argv[2], "run.json").exists() and time.monotonic() < end:
            time.sleep(0.01)


def _find_nothing_left() -> None:
    """Check that the methods that a trace replaces are back, and what writes the page is what it was."""
    assert type(flight.current) is flight.Flight
    methods = (Replica.backward_begins, Reducer.finish, Backward.issue_next, dist.Work.wait)
    assert not [method for method in methods if "recorded" in method.__name__]


def _take_step_in_slices(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for (inputs,) in step:
        model(inputs).square().mean().backward()
    optimizer.step()


def _fail(model: nn.Module) -> None:
    time.sleep(1)  # which is to be in no timed step
    output = model(torch.ones(4, 64))
    handle = next(model.parameters()).register_hook(lambda _: 1 / 0)
    try:
        output.sum().backward()
    except ZeroDivisionError:
        handle.remove()


def _hook(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    del state
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


if __name__ == "__main__":
    main()
