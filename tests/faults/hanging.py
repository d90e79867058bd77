"""A small training in which one rank gets stuck at a chosen place, or is only slow: run by ``lockstep run``.

Lines that end in ``# stuck: KIND`` are where a rank gets stuck; the tests look for their numbers in this file. (So the
busy loop is one line: a loop of two is found in either.)
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lockstep


def stuck(kind: str, folder: Path) -> None:
    """Get stuck for good, and leave the time at which it happened."""
    (folder / "stuck").write_text(f"{os.getpid()} {time.monotonic()}")
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)  # stuck: stop
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # stuck: lock
    elif kind == "loop":
        sum(1 for _ in iter(int, 1))  # stuck: loop
    elif kind == "read":
        os.mkfifo(folder / "never-written")
        pipe = os.open(folder / "never-written", os.O_RDWR)
        os.read(pipe, 1)  # stuck: read
    elif kind == "disk":
        (folder / "disk" / "file").write_text("the disk does not answer")  # stuck: disk
    raise AssertionError(f"{kind}: nobody comes here before the job is ended")


class Trouble:
    """What is to happen, when and where."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._kind = options.kind if rank == options.rank else ""
        self._place, self._step, self._folder = options.place, options.step, options.folder
        self.step = 0

    def at(self, place: str) -> None:
        """Get stuck, if this is the time and the place."""
        if self._kind in ("stop", "lock", "loop", "read", "disk") and (place, self.step) == (self._place, self._step):
            stuck(self._kind, self._folder)

    def leaves(self) -> bool:
        """Whether this rank leaves the loop now."""
        return self._kind == "leave" and self._note()

    def misses(self) -> bool:
        """Whether this rank leaves a collective out now."""
        return self._kind == "miss" and self._note()

    def _note(self) -> bool:
        if self.step == self._step:
            (self._folder / "stuck").write_text(f"{os.getpid()} {time.monotonic()}")
        return bool(self.step == self._step)


class Samples(Dataset[Tensor]):
    """Numbers; the trouble may come while one is fetched."""

    def __init__(self, trouble: Trouble) -> None:
        self._trouble = trouble

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Tensor:
        self._trouble.at("data")
        return torch.full((4,), float(index % 7))


class Net(nn.Module):
    """A layer; the trouble may come in its forward and in its backward."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self._trouble = trouble

    def forward(self, batch: Tensor) -> Tensor:
        self._trouble.at("forward")
        out: Tensor = self.layer(batch)
        out.register_hook(lambda _: self._trouble.at("backward"))
        return out


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="")
    parser.add_argument("--place", default="own")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--step", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to train")
    parser.add_argument("--work", type=float, default=0.003, help="seconds of the loop's own in each step")
    parser.add_argument("--slow", type=float, default=1.0, help="how many times longer it takes on the rank")
    parser.add_argument("--torch", action="store_true", help="without lockstep's replica and process group")
    return parser.parse_args()


def with_torch_alone(options: argparse.Namespace) -> None:
    """The same with torch's own process group and its own DistributedDataParallel."""
    dist.init_process_group("gloo")
    trouble = Trouble(options, dist.get_rank())
    model = nn.parallel.DistributedDataParallel(Net(trouble))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Samples(trouble), batch_size=4):
        trouble.step += 1
        trouble.at("own")
        optimizer.zero_grad()
        model(batch).square().mean().backward()  # waits: torch
        optimizer.step()


def train(options: argparse.Namespace) -> None:
    """Train until the time is over."""
    world = lockstep.init()
    trouble = Trouble(options, world.rank)
    model = lockstep.replicate(Net(trouble))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = lockstep.shard(DataLoader(Samples(trouble), batch_size=4 * world.world_size), seed_samples=False)
    work = options.work * (options.slow if world.rank == options.rank else 1.0)
    end = time.monotonic() + options.seconds
    for batch in loader:
        trouble.step += 1
        trouble.at("own")
        if trouble.leaves():
            break
        optimizer.zero_grad()
        model(batch).square().mean().backward()  # waits: backward
        optimizer.step()
        if not trouble.misses():
            world.barrier()  # waits: barrier
        time.sleep(work)
        if world.all_reduce(time.monotonic() > end, "max"):  # goes on
            break
    print(f"rank {world.rank} took {trouble.step} steps", flush=True)


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    (with_torch_alone if options.torch else train)(options)


def line_of(mark: str) -> int:
    """The number of the line that ends in ``# mark``."""
    lines: list[Any] = Path(__file__).read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return int(number)


if __name__ == "__main__":
    main()
