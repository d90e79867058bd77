"""What scripts change outside of an optimizer's step, and a signal there: the resumed run has the same bits."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.files import EXIT_SAVED
from tests.launching import Finished, Running, start

#: What the scripts below begin with: ``stay`` sends the signal in one place, once, and stays there until it is over.
_BEGIN = """
import hashlib, json, os, random, sys, time
from pathlib import Path
import numpy as np, torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset

where, struck = sys.argv[1], int(sys.argv[2])
world = lockstep.init()
armed = struck and not any(Path("run").glob("step-*"))
saved = None

def asked():
    return saved._boundary._requests.stop is not None

def stay(place, at=None, over=lambda: False):
    global armed
    if not armed or place != where or (at is not None and saved.step != at):
        return
    armed = False
    if world.is_main:
        status = Path(f"/proc/{os.getppid()}/status").read_text()
        os.kill(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:")), struck)
    until = time.monotonic() + 60.0
    while time.monotonic() < until and not over():
        time.sleep(0.02)

class Data(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((4,), i / 24) + 0.1 * torch.rand(4)

def loader_of():
    return lockstep.shard(DataLoader(Data(), batch_size=4, shuffle=True))

def made(net, **options):
    global saved, loader
    loader = loader_of()
    saved = lockstep.Checkpointer("run", model=net, loader=loader, **options)
    return saved

def take(model, batch, optimizer):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()

def finish(net, *others):
    digest = lambda tensor: hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
    tensors = {name: digest(tensor) for name, tensor in net.state_dict().items()}
    if world.is_main:
        final = [tensors, repr(others), random.random(), np.random.rand(), torch.rand(1).item(), saved.step]
        Path("final").write_text(json.dumps(final))
"""


def _train(
    folder: Path,
    script: str,
    place: str = "",
    *,
    struck: int = 0,
    ranks: int = 1,
    times: str = "0.5",
) -> Finished:
    with _start(folder, script, place, struck=struck, ranks=ranks, times=times) as job:
        return job.finish()


def _start(folder: Path, script: str, place: str, *, struck: int, ranks: int, times: str) -> Running:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(_BEGIN + script)
    argv = ["lockstep", "run", "-n", str(ranks), "--grace", "60", "train.py", place, str(struck)]
    return start(argv, folder, torch=True, LOCKSTEP_TIMES=times)


def _final(folder: Path) -> Any:
    return json.loads((folder / "final").read_text())


#: The pause of a run that comes to a step before anybody saves from the side.
_LONG = "60"


def _resumes_with_the_bits(
    folder: Path, script: str, place: str, *, ranks: int = 1, side: bool = True, times: str = "0.5"
) -> Finished:
    """Train once undisturbed, and once with a signal at ``place``; compare, and return what was stopped."""
    calm = _train(folder / "calm", script, ranks=ranks)
    assert calm.code == 0, calm
    stopped = _train(folder / "struck", script, place, struck=signal.SIGTERM, ranks=ranks, times=times)
    assert stopped.code == EXIT_SAVED, stopped
    assert ("was saved from the side" in stopped.err) == side, stopped
    resumed = _train(folder / "struck", script, place, struck=signal.SIGTERM, ranks=ranks)
    assert resumed.code == 0, resumed
    assert _final(folder / "struck") == _final(folder / "calm")
    return stopped


def _is_refused(folder: Path, script: str, place: str, words: str, *, ranks: int = 1) -> None:
    """Train with a signal at ``place``, where nothing may be saved, wait for the words, and stop the run by another."""
    times = "0.5,aside_step=0.5"
    with _start(folder, script, place, struck=signal.SIGTERM, ranks=ranks, times=times) as job:
        stopped = job.stop_once_it_has_said(words)
    assert stopped.code == 128 + signal.SIGTERM, stopped
    assert not [*(folder / "run").glob("step-*/manifest.json")]


#: Two optimizers with their schedulers, one with a learning rate in a tensor; a scheduler whose state is its own list;
#: an early stopper; and a parameter group that is added between two epochs.
_SMALL_STATES = """
class History:
    def __init__(self):
        self.values, self.best = [], {"value": 9.0, "bad": 0}
    def step(self, value):
        self.values.append(value)
        self.best["bad"] += 1
    def state_dict(self):
        return {"values": self.values, "best": self.best}
    def load_state_dict(self, state):
        self.values, self.best = list(state["values"]), dict(state["best"])

class Stopper(History):
    def state_dict(self):
        return dict(vars(self))

net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
a, b = lockstep.replicate(net["a"]), lockstep.replicate(net["b"])
first = torch.optim.Adam([{"params": [net["a"].weight]}], lr=torch.tensor(0.1), foreach=False)
second = torch.optim.SGD(net["b"].parameters(), lr=0.1)
falls, stopper = torch.optim.lr_scheduler.ExponentialLR(second, 0.7), Stopper()
also = torch.optim.lr_scheduler.ExponentialLR(first, 0.7)
extra = {"second": second, "falls": falls, "stopper": stopper, "also": also}
history = History()
for epoch in made(net, optimizer=first, scheduler=history, extra=extra).epochs(4):
    if where == "before a step" and epoch == 1 and armed:
        first.add_param_group({"params": [net["a"].bias]})
    for batch in loader:
        stay("before a step", 6)
        for model, optimizer in ((a, first), (b, second)):
            take(model, batch, optimizer)
    falls.step()
    also.step()
    stopper.step(epoch)
    history.step(epoch)
    second.param_groups[0]["weight_decay"] = 0.1 * len(history.values)
    if epoch == 1:
        stay("after a pass")
finish(net, [each.param_groups[0]["lr"] for each in (first, second)], vars(stopper), vars(history))
"""


@pytest.mark.parametrize("place", ["after a pass", "before a step"])
def test_small_states_are_those_of_the_point(tmp_path: Path, place: str) -> None:
    _resumes_with_the_bits(tmp_path, _SMALL_STATES, place, ranks=2 if place == "after a pass" else 1)


#: A scaler that leaves a step out: the point of rest is that of the step before it.
_SCALED = """
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=3)
for epoch in made(model, optimizer=optimizer, extra={"scaler": scaler}).epochs(2):
    for batch in loader:
        if scaler.get_scale() < 2.0**120:
            stay("a forward", 3)
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean() * (1e4 if saved.step == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
finish(model, scaler.state_dict())
"""


def test_a_scaler_that_has_left_a_step_out_is_as_it_was(tmp_path: Path) -> None:
    _resumes_with_the_bits(tmp_path, _SCALED, "a forward")


#: An average that is updated after each pass, with statistics of its own, whose weights are put in for evaluations; a
#: loss with a buffer that each step moves.
_AVERAGED = """
class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
    def forward(self, outputs):
        self.center = 0.9 * self.center + 0.1 * world.mean(outputs.detach().mean(0), samples=len(outputs))
        if epoch == 1:
            stay("a forward", 9)
        return (outputs - self.center).square().mean()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    def forward(self, x):
        return self.b(self.norm(self.a(x)))

net, loss = Net(), Loss()
model = lockstep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = torch.optim.swa_utils.AveragedModel(net)
average.register_buffer("large", torch.zeros(400_000))
plain = [torch.rand(4, 4) for _ in range(3)]
for epoch in made(model, optimizer=optimizer, extra={"average": average, "loss": loss}).epochs(3):
    for batch in loader:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()
    average.update_parameters(net)
    torch.optim.swa_utils.update_bn(plain, average)
    model.eval()
    own = [each.clone() for each in net.parameters()]
    with torch.no_grad():
        for each, mean in zip(net.parameters(), average.module.parameters()):
            (each.data if where == "put in" else each).copy_(mean)
        if epoch == 1:
            stay("an evaluation")
            stay("put in")
        for each, mine in zip(net.parameters(), own):
            (each.data if where == "put in" else each).copy_(mine)
    model.train()
finish(net, [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in average.state_dict().values()], loss.center)
"""


@pytest.mark.parametrize("place", ["a forward", "an evaluation"])
def test_averages_and_weights_of_an_evaluation_are_not_taken_for_those_of_the_step(tmp_path: Path, place: str) -> None:
    _resumes_with_the_bits(tmp_path, _AVERAGED, place, ranks=2 if place == "an evaluation" else 1)


def test_weights_that_were_put_in_uncounted_are_named(tmp_path: Path) -> None:
    words = (
        "norm.weight, norm.bias, b.weight, b.bias have changed for the first time in the middle of a step or outside"
    )
    _is_refused(tmp_path, _AVERAGED, "put in", words)


#: Loops that are left early: epochs of so many steps, and a batch that is taken alone.
_LEFT_EARLY = """
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
for epoch in made(model, optimizer=optimizer, scheduler=scheduler).epochs(4):
    if epoch == 2:
        batch = next(iter(loader))
        stay("a batch alone")
        take(model, batch, optimizer)
    for number, batch in enumerate(loader):
        take(model, batch, optimizer)
        if loader.batches_left == 2:
            break
    model.eval()
    if epoch == 1:
        stay("an evaluation")
    model.train()
    scheduler.step()
finish(model, optimizer.param_groups[0]["lr"])
"""


@pytest.mark.parametrize("place", ["an evaluation", "a batch alone"])
def test_a_loop_that_is_left_early_is_at_rest(tmp_path: Path, place: str) -> None:
    _resumes_with_the_bits(tmp_path, _LEFT_EARLY, place, ranks=2 if place == "an evaluation" else 1)


#: Evaluations in the middle of a pass, which a scheduler's step follows, or in which numbers are drawn.
_EVALUATED = """
net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
model = lockstep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
falls = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
scheduler = {"waits": plateau, "each turn": falls, "draws": None}[where or "draws"]
for epoch in made(model, optimizer=optimizer, scheduler=scheduler).epochs(3):
    for batch in loader:
        take(model, batch, optimizer)
        if saved.step % 3 == 0:
            model.eval()
            net[1].train()
            stay(where, 9)
            value = model(torch.ones(2, 4)).sum().item()
            model.train()
            if where == "waits":
                plateau.step(value)
        if where == "each turn":
            falls.step()
finish(net)
"""


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("waits", "its scheduler (ReduceLROnPlateau) mostly steps after an evaluation, and has not since"),
        ("each turn", "its scheduler (ExponentialLR) has changed in other turns of the loop, and has not since"),
    ],
)
def test_a_step_of_a_scheduler_that_an_evaluation_would_lose_is_named(tmp_path: Path, place: str, words: str) -> None:
    _is_refused(tmp_path, _EVALUATED, place, words)


def test_an_evaluation_that_is_not_repeated_is_told(tmp_path: Path) -> None:
    stopped = _train(tmp_path, _EVALUATED, "draws", struck=signal.SIGTERM)
    assert stopped.code == EXIT_SAVED, stopped
    assert "in an evaluation in the middle of a pass, which a resumed run does not repeat" in stopped.err, stopped


#: Statistics that are gathered anew after each pass, where one rank stays.
_GATHERED_ANEW = """
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
model = lockstep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in made(model, optimizer=optimizer).epochs(3):
    for batch in loader:
        take(model, batch, optimizer)
    with torch.no_grad():
        net(torch.arange(16.0).view(4, 4))
    if epoch == 1:
        stay("rank 1", over=lambda: world.rank == 0 or "has gone on since" in saved._boundary._side._said)
finish(net)
"""


def test_a_rank_that_can_not_go_back_waits_for_the_others(tmp_path: Path) -> None:
    stopped = _resumes_with_the_bits(tmp_path, _GATHERED_ANEW, "rank 1", ranks=2, side=False)
    words = "rank 0 of 2 has gone on since the last step, and what its model or extra= holds has changed since it was"
    assert words in stopped.err, stopped


#: An average whose statistics come from a pass over the training data itself, in the same epoch.
_MEASURED = """
net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
model = lockstep.replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = torch.optim.swa_utils.AveragedModel(net)
def batches():
    for number, batch in enumerate(loader):
        if epoch == 1 and number == 1:
            stay("a second pass")
            stay("shortly", over=asked)
        yield batch
for epoch in made(model, optimizer=optimizer, extra={"average": average}).epochs(3):
    for batch in loader:
        take(model, batch, optimizer)
    average.update_parameters(net)
    torch.optim.swa_utils.update_bn(batches(), average)
finish(net, loader.epoch, [each.tolist() for each in average.state_dict().values()])
"""


@pytest.mark.parametrize("place", ["a second pass", "shortly"])
def test_a_pass_beside_training_is_not_continued_as_training(tmp_path: Path, place: str) -> None:
    side = place != "shortly"
    _resumes_with_the_bits(tmp_path, _MEASURED, place, side=side, times="0.5" if side else _LONG)


#: Gradients of two batches for a step.
_ACCUMULATED = """
model = lockstep.replicate(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in made(model, optimizer=optimizer).epochs(3):
    for batch in loader:
        if loader.batches_left % 2:
            stay("shortly", 4, over=asked)
        model(batch).square().mean().backward()
        if loader.batches_left % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
finish(model)
"""


def test_one_rank_is_not_left_while_it_accumulates(tmp_path: Path) -> None:
    _resumes_with_the_bits(tmp_path, _ACCUMULATED, "shortly", side=False, times=_LONG)
