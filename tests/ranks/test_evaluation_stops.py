"""A signal while a script evaluates: the run is saved from the side, and the evaluation starts again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.files import EXIT_SAVED
from tests.launching import Finished, run

_TRAIN = """
import json, os, random, sys, time
from pathlib import Path
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how, struck = sys.argv[1:]
world = lockstep.init()
model = lockstep.replicate(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
data = TensorDataset(torch.arange(40.0).reshape(10, 4))
loader = lockstep.shard(DataLoader(data, batch_size=4, shuffle=True))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

def strike():
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    launcher = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
    os.kill(launcher, int(struck))

def evaluate(epoch):
    model.eval()
    random.random(), torch.rand(1)
    turns = 40 if how != "lengths" or world.is_main else 0
    for turn in range((400 if how == "plain" else turns) if int(struck) and epoch == 1 else 3):
        if int(struck) and world.is_main and (epoch, turn) == (1, 2):
            strike()
        model(torch.ones(2, 4))
        if how == "collective":
            world.mean(1.0)
        time.sleep(0.05)
        if how != "plain":
            saved.between_steps()
    model.train()
    if world.is_main:
        with open("evaluated", "a") as file: file.write(f"{epoch} ")
    return world.mean(float(epoch))

for epoch in saved.epochs(3):
    if how == "before":
        evaluate(epoch)
    for batch, in loader:
        optimizer.zero_grad()
        (model(batch).square().mean() * random.random()).backward()
        optimizer.step()
        if how == "within" and saved.step % 3 == 2:
            evaluate(epoch)
    scheduler.step()
    if how not in ("before", "within"):
        evaluate(epoch)
if world.is_main:
    Path("final").write_text(json.dumps([
        [parameter.tolist() for parameter in model.parameters()],
        scheduler.get_last_lr(), [group["lr"] for group in optimizer.param_groups], random.random(), saved.step,
    ]))
"""


def _train(tmp_path: Path, how: str, *, struck: int = 0, grace: str = "60") -> Finished:
    (tmp_path / "train.py").write_text(_TRAIN)
    return run(["lockstep", "run", "-n", "2", "--grace", grace, "train.py", how, str(struck)], tmp_path, torch=True)


def _final(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "final").read_text())


@pytest.mark.parametrize("how", ["after", "before", "within", "collective", "lengths", "plain"])
def test_a_run_that_is_stopped_in_an_evaluation_resumes_with_the_same_bits(tmp_path: Path, how: str) -> None:
    calm, folder = tmp_path / "calm", tmp_path / "struck"
    for each in (calm, folder):
        each.mkdir()
    assert _train(calm, how).code == 0
    stopped = _train(folder, how, struck=signal.SIGTERM)
    assert stopped.code == EXIT_SAVED, stopped
    done = (folder / "evaluated").read_text().split()
    resumed = _train(folder, how)
    assert resumed.code == 0, resumed
    again = (folder / "evaluated").read_text().split()[len(done) :]
    if how == "within":  # step 5, the second of epoch 1, is done, and its evaluation is not done again
        assert (done, again) == (["0"], ["2"])
    else:
        assert (done, again) == (["0"], ["1", "2"])
    assert _final(folder) == _final(calm)
