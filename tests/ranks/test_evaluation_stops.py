"""A signal while a script evaluates: ``between_steps`` in its loop saves there, and the evaluation starts again."""

from __future__ import annotations

import json
import signal
import time
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
    for turn in range(turns if (int(struck) and epoch == 1) or how == "plain" else 3):
        if int(struck) and world.is_main and (epoch, turn) == (0 if how == "plain" else 1, 2):
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


@pytest.mark.parametrize("how", ["after", "before", "within", "collective", "lengths"])
def test_a_run_that_is_stopped_in_an_evaluation_resumes_with_the_same_bits(tmp_path: Path, how: str) -> None:
    calm, folder = tmp_path / "calm", tmp_path / "struck"
    for each in (calm, folder):
        each.mkdir()
    assert _train(calm, how).code == 0
    begun = time.monotonic()
    stopped = _train(folder, how, struck=signal.SIGTERM)
    assert stopped.code == EXIT_SAVED, stopped
    done = (folder / "evaluated").read_text().split()
    resumed = _train(folder, how)
    assert resumed.code == 0, resumed
    again = (folder / "evaluated").read_text().split()[len(done) :]
    assert _final(folder)[1:3] == _final(calm)[1:3], "the scheduler's step was taken once an epoch"
    if how == "lengths":  # one rank had finished, so both went on to the next step
        assert (done, again) == (["0", "1"], ["2"])
    elif how == "within":  # step 5, the second of epoch 1, is done, and its evaluation is not done again
        assert (done, again) == (["0"], ["2"])
        assert _final(folder)[4] == _final(calm)[4]
        return  # what it draws is not drawn again
    else:
        assert (done, again) == (["0"], ["1", "2"])
        assert time.monotonic() - begun < 60
    if how != "before":  # there was no end of a pass to go back to
        assert _final(folder) == _final(calm)


def test_a_signal_outside_of_a_step_says_what_will_happen(tmp_path: Path) -> None:
    stopped = _train(tmp_path, "plain", struck=signal.SIGTERM, grace="1")
    assert stopped.code == 128 + signal.SIGTERM, stopped
    said = next(line for line in stopped.err.splitlines() if "came outside of a training step" in line)
    assert said.startswith("lockstep: SIGTERM came outside of a training step: rank ")
    for words in ("is in evaluation", "not saved in 1 s are killed", "newest checkpoint", "saved.between_steps()"):
        assert words in said
