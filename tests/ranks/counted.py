"""Train a small model of known FLOPs, for test_run_throughput.py: plainly, in slices, accumulated, or compiled."""

from __future__ import annotations

import sys

import torch
from torch import nn

import lockstep

WIDTHS, BATCH, STEPS, TOKENS = (32, 64, 8), 30, 12, 7


def main(kind: str) -> None:
    world = lockstep.init()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(BATCH * STEPS, WIDTHS[0]), torch.randn(BATCH * STEPS, WIDTHS[2]))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
    sharded = lockstep.shard(loader, slices=3 if kind == "slices" else None)
    net: nn.Module = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.ReLU(), nn.Linear(*WIDTHS[1:]))
    if kind == "compiled":
        net.compile(backend="aot_eager")
    model = lockstep.replicate(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        world.count_tokens(TOKENS * len(x))
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()

    for _ in range(40):  # long enough for a step to have a time
        for number, batch in enumerate(sharded.steps() if kind == "slices" else sharded):
            optimizer.zero_grad()
            if kind == "slices":
                for x, y in batch:
                    backward(x, y)
            elif kind == "accumulated" and number % 2 == 0:
                with lockstep.no_sync(model):
                    backward(*batch)
                continue
            else:
                backward(*batch)
            optimizer.step()
        with torch.no_grad():
            model.eval()(data[:60][0])
            model.train()
    world.print("bits", float(sum(param.double().sum().item() for param in model.parameters())).hex())


if __name__ == "__main__":
    main(sys.argv[1])
