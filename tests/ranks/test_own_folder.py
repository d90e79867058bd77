"""A run's first checkpoint makes its folder no other run's, also one that is written in the background."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.harness import run_ranks


def _in_background(folder: str, loop: str) -> list[int]:
    lockstep.init()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4))
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader, keep=None)
    log = lockstep.Log(saved, every=100)

    def train() -> None:
        for (batch,) in loader:
            model(batch).sum().backward()
            optimizer.step()
            if saved.step == 1:
                saved.async_save()
                while not [*Path(folder).glob("step-????????/manifest.json")]:
                    time.sleep(0.01)
                if loop == "side":
                    os.kill(os.getpid(), signal.SIGUSR1)
                continue
            while loop == "side" and saved._boundary._requests.wanted is not None:
                time.sleep(0.01)  # before its step, which the side waits for
            log(loss=1.0)

    if loop == "own":
        train()
    else:
        for _ in saved.epochs(1, resume=False):
            train()
    saved.save()
    log.close()
    return [json.loads(line)["step"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loop", ["own", "epochs", "side"])
def test_what_follows_the_first_save_in_the_background_is_of_this_run(tmp_path: Path, loop: str) -> None:
    assert run_ranks(_in_background, 1, str(tmp_path), loop) == [[4]]
