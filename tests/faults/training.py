"""A small training run that can be killed anywhere: run by ``lockstep run``, once or many times over the same folder.

Everything that must come out the same however often it is interrupted is in it: a model with batch statistics and
dropout, AdamW, a schedule, random augmentation from three generators, a loader that is resumed in mid-epoch. Each rank
writes down which samples each step used, and at the end the digests of what it has.

``--plan`` names a file of faults: ``[{"life": 0, "rank": 1, "point": "backward", "taken": 2, "signal": 9}, …]``. A
life is one start of the ranks: ``--life`` plus the restarts so far, by the launcher or by Slurm; ``taken`` counts the
steps of this life. The signal goes to the rank itself unless ``whom`` is ``"peer"`` (the next rank), ``"launcher"`` or
``"group"`` (all there are).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.comm.group.reduction import Reduction
from tests.digests import digest_of

#: Where a fault can strike, in the order of a run.
POINTS = ("restore", "started", "data", "forward", "backward", "reduce", "optimizer", "save", "commit", "epoch")
EPOCHS = 3
LENGTH = 46  # 11 batches of 4 and one of 2
BATCH = 4
WIDTH = 8


class Augmented(Dataset[tuple[torch.Tensor, int, int]]):
    """Random crops and noise, drawn from all three generators; each sample carries its index."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        image = torch.linspace(index, index + 1, 9)
        start = random.randrange(3)
        return image[start : start + 6] + 0.1 * torch.randn(6) + float(np.random.rand()), index % 3, index


class Faults:
    """The faults of the plan that concern this rank in this life."""

    def __init__(self, plan: Path | None, *, rank: int, life: int) -> None:
        entries = [] if plan is None else json.loads(plan.read_text())
        self.entries = [entry for entry in entries if (entry["life"], entry["rank"]) == (life, rank)]
        self._peer = f"pid-{life}-{(rank + 1) % 2}"
        self.folder = Path()
        #: Steps of this life.
        self.taken = 0
        self.backward = False

    def at(self, point: str) -> None:
        """Strike, if this is the place and the time."""
        assert point in POINTS
        for entry in [e for e in self.entries if e["point"] == point and e["taken"] <= self.taken]:
            self.entries.remove(entry)
            whom = entry.get("whom", "rank")
            if whom == "peer":
                os.kill(int((self.folder / self._peer).read_text()), entry["signal"])
            elif whom == "group":
                os.killpg(os.getpgrp(), entry["signal"])
            else:
                os.kill(os.getpid() if whom == "rank" else _launcher(), entry["signal"])

    def plant(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Make the places known that the loop below does not see."""
        model.register_forward_pre_hook(lambda *_: self.at("forward"))
        optimizer.register_step_pre_hook(lambda *_: self._stepping())
        load, over = type(model).load_state_dict, Reduction.over

        def loading(*args: Any, **kwargs: Any) -> Any:
            self.at("restore")
            return load(*args, **kwargs)

        def reducing(*args: Any, **kwargs: Any) -> None:
            if self.backward:
                self.at("reduce")
            over(*args, **kwargs)

        def before(call: Callable[..., None]) -> Callable[..., None]:
            def committing(*args: Any, **kwargs: Any) -> None:
                self.at("commit")
                call(*args, **kwargs)

            return committing

        model.load_state_dict = loading.__get__(model)  # type: ignore[method-assign]
        Reduction.over = reducing  # type: ignore[method-assign]
        os.rename, os.replace = before(os.rename), before(os.replace)

    def _stepping(self) -> None:
        self.backward = False
        self.at("optimizer")


def _launcher() -> int:
    """The grandparent: rank, zygote, launcher."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))


class Audit:
    """What this rank did, line by line, so that a kill loses nothing that was done."""

    def __init__(self, folder: Path, rank: int, life: int) -> None:
        self._fd = os.open(folder / f"audit-{rank}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._life = life

    def write(self, **fields: Any) -> None:
        os.write(self._fd, json.dumps({"life": self._life, **fields}).encode() + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--life", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each step takes longer")
    parser.add_argument("--while", type=Path, dest="slow_while", help="only while this file is there")
    parser.add_argument("--batch", type=int, default=BATCH, help="the global batch")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the hidden layer: a gradient has 12 times as many")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="no dropout, float64: the number of ranks changes roundings alone; losses and parameters are noted",
    )
    return parser.parse_args()


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    world = lockstep.init(seed=3)
    life = options.life + sum(int(os.environ.get(name) or 0) for name in ("LOCKSTEP_RESTART", "SLURM_RESTART_COUNT"))
    (options.folder / f"pid-{life}-{world.rank}").write_text(str(os.getpid()))
    audit = Audit(options.folder, world.rank, life)
    faults = Faults(options.plan, rank=world.rank, life=life)
    faults.folder = options.folder

    net = _net(options.width, exact=options.exact)
    model = lockstep.replicate(lockstep.convert_sync_batchnorm(net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    steps = options.epochs * -(-LENGTH // options.batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    loader = lockstep.shard(
        DataLoader(Augmented(), batch_size=options.batch, shuffle=True, num_workers=options.workers)
    )
    saved = lockstep.Checkpointer(
        options.folder / "run",
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        keep=options.keep,
    )
    faults.plant(model, optimizer)

    def save() -> None:
        faults.at("save")
        saved.save()

    begun = False
    for epoch in saved.epochs(options.epochs):
        if not begun:
            begun = True
            audit.write(resumed=saved.step, world=world.world_size)
            faults.at("started")
        for images, labels, indices in loader:
            faults.at("data")
            loss = nn.functional.cross_entropy(model(images.double() if options.exact else images), labels)
            loss.register_hook(lambda _: faults.at("backward"))
            optimizer.zero_grad()
            faults.backward = True
            loss.backward()
            optimizer.step()
            scheduler.step()
            faults.taken += 1
            noted = {"loss": world.mean(loss)} if options.exact else {}
            audit.write(epoch=epoch, step=saved.step, indices=indices.tolist(), **noted)
            if options.slow and (options.slow_while is None or options.slow_while.exists()):
                time.sleep(options.slow)
            if saved.step % options.save_every == 0:
                save()
        faults.at("epoch")
        torch.rand(2)  # whatever a script draws between epochs
        save()
    final: dict[str, Any] = {
        "step": saved.step,
        "model": digest_of(model.state_dict()),
        "optimizer": digest_of(optimizer.state_dict()),
        "scheduler": digest_of(scheduler.state_dict()),
        "loader": digest_of(loader.state_dict()),
        "generators": [
            digest_of(torch.get_rng_state()),
            digest_of(random.getstate()),
            digest_of([str(part) for part in np.random.get_state()]),
        ],
    }
    if options.exact:
        final["parameters"] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    (options.folder / f"final-{world.rank}.json").write_text(json.dumps(final))


def _net(width: int, *, exact: bool) -> nn.Module:
    net = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.0 if exact else 0.3), nn.ReLU(), nn.Linear(width, 3)
    )
    return net.double() if exact else net


if __name__ == "__main__":
    main()
