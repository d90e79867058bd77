"""Signals in places where a loop stays for long: the state of the last step is saved from the side, and resumes."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.files import EXIT_SAVED
from tests.launching import Finished, Running, own_mount, run, start, wait_for
from tests.schemas import holds
from tests.selection import each_value

#: Trains nine steps in three epochs, and stays in one place in the middle of it, where a signal comes.
_TRAIN = """
import hashlib, os, json, random, signal, sys, time
from pathlib import Path
import numpy as np, torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset

where, who, struck = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
world = lockstep.init()
armed = struck and not (Path("run").exists() and any(Path("run").glob("step-*")))

def stay(place, seconds=60.0):
    global armed
    if not armed or place != where:
        return
    armed = False
    if world.is_main:
        Path("struck at").write_text(str(time.time()))
        pid = os.getppid()
        if "LOCKSTEP_JOB_DIR" in os.environ:
            status = Path(f"/proc/{pid}/status").read_text()
            pid = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid:"))
        os.kill(os.getpid() if who == -2 else pid, struck)
    if who not in (-1, -2, world.rank):
        return
    if place == "compiled code":
        matrix, end = torch.ones(3000, 3000), time.monotonic() + seconds
        while time.monotonic() < end:
            matrix @ matrix
    until = time.monotonic() + seconds
    while time.monotonic() < until and not Path("go on").exists():
        time.sleep(0.02)

class Data(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        if where == "loader" and armed and step() == 4:
            stay("loader")
        return torch.full((4,), float(i)) + torch.rand(4) + random.random() + np.random.randn()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))
        self.register_buffer("table", torch.zeros(600_000))  # too large to be copied before it is seen to change
        self.slow = nn.Linear(4, 8).requires_grad_(False)
    def forward(self, x):
        if self.training:
            self.queue[int(self.at) % 4] = int(self.at)
            self.at += 1
            self.table[int(self.at)] = 1
            self.slow.weight.data = 0.9 * self.slow.weight.data + 0.1 * self.a.weight.data
            if step() == 0:
                stay("first forward")
            if step() == 4:
                stay("forward")
                stay("compiled code")
        return self.b(self.drop(torch.relu(self.norm(self.a(x) + self.slow(x)))))

class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if step() == 4:
            stay("backward")
        return grad

saved = None
def step():
    return 0 if saved is None else saved.step

model = lockstep.replicate(Net().to(world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
loader = lockstep.shard(DataLoader(Data(), batch_size=8, shuffle=True))
saved = lockstep.Checkpointer("run", model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

def evaluate(epoch):
    model.eval()
    random.random(), torch.rand(1), np.random.rand()
    if epoch == 1:
        stay("evaluation")
    with torch.no_grad():
        model(torch.ones(2, 4, device=world.device))
    model.train()

for epoch in saved.epochs(3):
    if epoch == 1:
        stay("epoch's beginning")
    for batch in loader:
        optimizer.zero_grad()
        if step() == 4:
            stay("sleep")
        loss = Pass.apply(model(batch)).square().mean() * (1 + 0.1 * random.random())
        loss.backward()
        if step() == 4:
            stay("before the step")
        optimizer.step()
        scheduler.step()
        if step() == 5:
            model.eval()
            stay("evaluation in the middle")
            model.train()
            stay("after the step")
    evaluate(epoch)
    if epoch == 0:
        saved.async_save()
        stay("background save")
        saved.save()
        stay("after a save")
digest = lambda tensor: hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest()
state = {name: digest(tensor) for name, tensor in model.state_dict().items()}
if world.is_main:
    Path("final").write_text(json.dumps([
        state, optimizer.param_groups[0]["lr"], random.random(), np.random.rand(), torch.rand(1).item(), saved.step,
    ]))
"""
PLACES = (
    "first forward",
    "forward",
    "loader",
    "sleep",
    "backward",
    "before the step",
    "compiled code",
    "evaluation",
    "evaluation in the middle",
    "epoch's beginning",
    "background save",
    "after a save",
)
#: Half of the pauses that users have.
_TIMES = "0.5"


def _train(
    folder: Path,
    where: str = "",
    who: int = -1,
    *,
    struck: int = 0,
    ranks: int = 2,
    times: str = _TIMES,
    script: str = _TRAIN,
) -> Finished:
    with _start(folder, where, who, struck=struck, ranks=ranks, times=times, script=script) as job:
        return job.finish()


def _start(
    folder: Path, where: str, who: int, *, struck: int, ranks: int = 2, times: str = _TIMES, script: str = _TRAIN
) -> Running:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(script)
    argv = ["lockstep", "run", "-n", str(ranks), "--grace", "120", "train.py", where, str(who), str(struck)]
    return start(argv, folder, torch=True, LOCKSTEP_TIMES=times)


#: Has who stays do so until the ranks hold to be saved from the side, or until they have been refused that; and
#: enough time to come to a step then.
_UNTIL_HELD = ('not Path("go on").exists()', "saved._boundary._side._limit is None")
_UNTIL_REFUSED = ('not Path("go on").exists()', "not saved._boundary._side._said")
_WITH_TIME = f"{_TIMES},aside_step=60,aside_answer=90"


def _refused_twice(folder: Path, where: str, who: int, *texts: str, times: str = _TIMES, script: str = _TRAIN) -> str:
    """Train with a signal where nothing may be saved, and stop the run when that was tried twice and ``texts`` were
    said. Returns standard error."""
    nap = "        time.sleep(0.02)\n"
    tells = nap + "        if saved._boundary._side._attempts > 1: Path('tried twice').touch()\n"
    script = script.replace(nap, tells)
    with _start(folder, where, who, struck=signal.SIGTERM, times=times, script=script) as job:
        wait_for((folder / "tried twice").exists, "another attempt")
        stopped = job.stop_once_it_has_said(*texts)
    assert stopped.code == 128 + signal.SIGTERM, stopped
    return stopped.err


def _final(folder: Path) -> Any:
    return json.loads((folder / "final").read_text())


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the undisturbed runs on one rank and on two end with."""
    found = {}
    for ranks in (1, 2):
        folder = tmp_path_factory.mktemp(f"calm-{ranks}")
        assert _train(folder, ranks=ranks).code == 0
        found[ranks] = _final(folder)
    return found


@each_value(place=PLACES, staying=["of 1", "of 2", "0 of 2", "1 of 2"])
def test_a_signal_in_any_place_saves_the_last_step_and_the_bits(
    tmp_path: Path, calm: dict[int, Any], place: str, staying: str
) -> None:
    ranks, who = int(staying[-1]), int(staying[0]) if staying[0].isdigit() else -1
    if place == "before the step" and who >= 0:
        pytest.skip("the other rank takes that step: see the test below")
    stopped = _train(tmp_path, place, who, struck=signal.SIGTERM, ranks=ranks)
    assert stopped.code == EXIT_SAVED, stopped
    assert "was saved from the side" in stopped.err, stopped
    assert not (tmp_path / "final").exists()
    resumed = _train(tmp_path, place, who, struck=signal.SIGTERM, ranks=ranks)
    assert resumed.code == 0, resumed
    assert _final(tmp_path) == calm[ranks]


@pytest.mark.gpu(2)
@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("place", ["first forward", "forward", "backward", "evaluation", "evaluation in the middle"])
def test_so_it_is_on_gpus(tmp_path: Path, place: str) -> None:
    assert _train(tmp_path / "calm").code == 0
    script = _TRAIN.replace("seconds=60.0", "seconds=600.0")  # longer than anybody would wait
    stopped = _train(tmp_path / "struck", place, 1, struck=signal.SIGTERM, script=script)
    assert stopped.code == EXIT_SAVED, stopped
    assert "was saved from the side" in stopped.err, stopped
    assert _train(tmp_path / "struck", place, 1, struck=signal.SIGTERM).code == 0
    assert _final(tmp_path / "struck") == _final(tmp_path / "calm")


@pytest.mark.campaign
@pytest.mark.timed
@pytest.mark.parametrize("place", PLACES)
def test_it_is_saved_within_two_seconds(tmp_path: Path, place: str) -> None:
    stopped = _train(tmp_path, place, struck=signal.SIGTERM, times="1")
    assert stopped.code == EXIT_SAVED, stopped
    newest = max(path.stat().st_mtime for path in (tmp_path / "run").glob("step-*/manifest.json"))
    assert newest - float((tmp_path / "struck at").read_text()) < 2.0


def test_what_is_half_done_is_not_saved_and_named(tmp_path: Path) -> None:
    times = f"{_TIMES},aside_step=1"
    words = "from the side yet, and once the ranks have come to a step: rank 1 of 2 is in the middle of step 5\n"
    said = _refused_twice(tmp_path / "before", "before the step", 1, words, times=times)
    assert said.count(words) == 1, said
    assert not [*(tmp_path / "before" / "run").glob("step-00000005*")]
    words = "rank 0 of 2 has taken step 5, and its loop is still at what follows the optimizer's step"
    told = "SIGTERM came outside of a training step: rank "
    said = _refused_twice(tmp_path / "after", "after the step", -1, words, told, times=times)
    assert said.count(words) == 1, said
    assert not [*(tmp_path / "after" / "run").glob("*.tmp-*")]


def test_what_comes_to_its_end_is_saved_there(tmp_path: Path, calm: dict[int, Any]) -> None:
    script = _TRAIN.replace(*_UNTIL_REFUSED)
    stopped = _train(tmp_path, "after the step", 1, struck=signal.SIGTERM, script=script, times="0.5,aside_step=1")
    assert stopped.code == EXIT_SAVED, stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]


def test_what_one_rank_can_not_tell_is_refused_by_all_at_once(tmp_path: Path) -> None:
    script = _TRAIN.replace("torch.zeros(600_000)", "torch.zeros(17_000_000)")  # more than is copied to begin with
    changes = "if (step(), world.rank) == (4, 1):\n                self.table[0] = 1"
    script = script.replace("self.table[int(self.at)] = 1", changes)
    words = "model: table has changed for the first time in the middle of a step or outside of steps, so what it held"
    said = _refused_twice(tmp_path, "forward", -1, words, script=script)
    assert said.count(words) == 1, said


def test_a_rank_that_is_a_step_behind_takes_it_first(tmp_path: Path, calm: dict[int, Any]) -> None:
    ahead = "if step() == 5:\n            world.is_main and stay('before the step')\n"  # which sends the signal there
    script = _TRAIN.replace('stay("before the step")', 'world.is_main or stay("before the step")')
    script = script.replace("if step() == 5:\n", ahead).replace(*_UNTIL_HELD)
    stopped = _train(tmp_path, "before the step", 1, struck=signal.SIGTERM, script=script, times=_WITH_TIME)
    assert stopped.code == EXIT_SAVED, stopped
    assert "saved at step 5" in stopped.err, stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]


def test_a_run_that_is_to_save_goes_on_after_it(tmp_path: Path, calm: dict[int, Any]) -> None:
    script = _TRAIN.replace('not Path("go on").exists()', 'not any(Path("run").glob("step-00000006*"))')
    finished = _train(tmp_path, "evaluation", struck=signal.SIGUSR1, script=script)
    assert finished.code == 0, finished
    assert "saved at step 6" in finished.err
    assert "from the side: the loop had not come to its next step" in finished.err
    assert _final(tmp_path) == calm[2]


def test_one_rank_alone_is_asked(tmp_path: Path, calm: dict[int, Any]) -> None:
    stopped = _train(tmp_path, "evaluation", -2, struck=signal.SIGTERM)
    assert stopped.code == EXIT_SAVED, stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]


def test_under_torchrun(tmp_path: Path, calm: dict[int, Any]) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    argv = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", "evaluation", "-2", "15"]
    stopped = run(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_TIMES)
    assert "was saved from the side" in stopped.err, stopped
    assert "exitcode  : 75" in stopped.err.replace("exitcode : ", "exitcode  : "), stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]


def test_a_command_has_the_job_save(tmp_path: Path, calm: dict[int, Any]) -> None:
    script = _TRAIN.replace('not Path("go on").exists()', 'not any(Path("run").glob("step-00000006*"))')
    (tmp_path / "train.py").write_text(script)
    argv = ["lockstep", "run", "-n", "2", "train.py", "evaluation", "-1", str(int(signal.SIGCONT))]
    save = ["lockstep", "checkpoint", "save", "run", "--json"]
    with start(argv, tmp_path, torch=True, LOCKSTEP_TIMES=_TIMES) as job:
        wait_for((tmp_path / "struck at").exists, "the place")
        asked = run(save, tmp_path)
        assert asked.code == 0, asked
        told = holds(asked.out, "lockstep.checkpoint.save/1")
        assert told == {"folder": "run", "name": "step-00000006"}
        assert job.finish().code == 0
    assert _final(tmp_path) == calm[2]
    asked = run(save[:-1], tmp_path)
    assert asked.code == 2
    assert "no job trains in run, so there is nothing to save" in asked.err


def test_a_job_that_takes_no_requests_is_not_ended_by_one(tmp_path: Path) -> None:
    script = """
import pathlib, time, torch, lockstep
lockstep.init()
saved = lockstep.Checkpointer("run", model=torch.nn.Linear(1, 1))
pathlib.Path("there").touch()
while not pathlib.Path("go on").exists():
    time.sleep(0.02)
"""
    (tmp_path / "train.py").write_text(script)
    with start(["lockstep", "run", "-n", "1", "train.py"], tmp_path, torch=True) as job:
        wait_for((tmp_path / "there").exists, "the place")
        asked = run(["lockstep", "checkpoint", "save", "run"], tmp_path)
        assert asked.code == 2
        assert "which takes no requests: only a loop over its Checkpointer's epochs does" in asked.err
        (tmp_path / "go on").touch()
        assert job.finish().code == 0


def test_a_nearly_full_disk_has_the_run_saved_while_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    script = _TRAIN.replace('not Path("go on").exists()', 'not any(Path("run").glob("step-00000006*"))')
    script = script.replace("os.kill(os.getpid() if", 'Path("run/filled").write_bytes(bytes(8_000_000)) #')
    (tmp_path / "train.py").write_text(script)
    argv = ["lockstep", "run", "-n", "2", "train.py", "evaluation", "-1", "1"]
    # A checkpoint takes 2.4 MB, and that of step 3 is there.
    finished = run(argv, tmp_path, torch=True, before=own_mount(tmp_path / "run", "size=14M"), LOCKSTEP_TIMES="0.1")
    assert finished.code == 0, finished
    words = "are left where the checkpoints go, and one takes 2.34 MiB: the run saves now, while there is room"
    assert words in finished.err, finished
    assert "saved at step 6" in finished.err
    assert "from the side" in finished.err


def test_a_disk_without_room_for_a_checkpoint_is_said_in_time(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    until = ("os.kill(os.getpid() if", 'Path("run/filled").write_bytes(bytes(11_500_000)) #')
    told = 'not Path("go on").exists()', "not saved._boundary._side._has_no_room"
    (tmp_path / "train.py").write_text(_TRAIN.replace(*until).replace(*told))
    argv = ["lockstep", "run", "-n", "1", "train.py", "evaluation", "-1", "1"]
    finished = run(argv, tmp_path, torch=True, before=own_mount(tmp_path / "run", "size=14M"), LOCKSTEP_TIMES="0.1")
    assert finished.code == 0, finished
    words = (
        r"only \d+ KiB are left where the checkpoints go, and one takes 2\.3\d MiB: the next save may fail: make room"
    )
    assert re.search(words, finished.err), finished
    assert "the run saves now" not in finished.err


_ALONE = """
import os, signal, sys, time, torch, lockstep
world = lockstep.init()
apart = {"sync": lockstep.LocalSteps(2)} if sys.argv[1] == "apart" else {}
model = lockstep.replicate(torch.nn.Linear(2, 2), **apart)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 2))
loader = lockstep.shard(torch.utils.data.DataLoader(data, batch_size=4))
saved = lockstep.Checkpointer(
    "run", model=model, loader=loader, **({} if sys.argv[1] == "without" else {"optimizer": optimizer})
)
for epoch in saved.epochs(2):
    for batch, in loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if sys.argv[1] == "without":
        saved.step += 1
    model.eval()
    if int(sys.argv[3]):
        if world.is_main:
            os.kill(os.getpid(), signal.SIGTERM)
        for turn in range(3000):
            time.sleep(0.02)
            if int(sys.argv[2]):
                saved.between_steps()
            elif saved._boundary._side._said:
                break
    model.train()
"""


@pytest.mark.parametrize("kind", ["apart", "without"])
def test_an_evaluation_that_is_not_known_is_left_in_between_steps(tmp_path: Path, kind: str) -> None:
    stopped = _train(tmp_path, kind, 1, struck=1, script=_ALONE)
    assert stopped.code == EXIT_SAVED, stopped
    resumed = _train(tmp_path, kind, 1, script=_ALONE)
    assert resumed.code == 0, resumed
    assert "resumed from step" in resumed.err


def test_an_evaluation_that_is_not_known_says_what_it_needs(tmp_path: Path) -> None:
    stopped = _train(tmp_path, "without", 0, struck=1, script=_ALONE, times="0.5,aside_step=1")
    assert stopped.code == EXIT_SAVED, stopped  # where the evaluation was over
    assert "has no optimizer= in its Checkpointer, so it can only be left in a step or in saved.between_steps()" in (
        stopped.err
    )


#: Has rank 0 in the optimizer's step and rank 1 before it, when they hold.
_ONE_IS_STEPPING = (
    _TRAIN.replace(*_UNTIL_HELD)
    .replace('stay("before the step")', 'world.rank == 1 and stay("a step")')
    .replace(
        "def evaluate",
        'in_step = lambda *_: stay("a step") if world.is_main and step() == 4 else None\n'
        "optimizer.register_step_pre_hook(in_step)\n\ndef evaluate",
    )
)


def test_a_rank_that_was_stepping_is_not_saved_with_one_that_was_not(tmp_path: Path, calm: dict[int, Any]) -> None:
    stopped = _train(tmp_path, "a step", struck=signal.SIGTERM, script=_ONE_IS_STEPPING, times=_WITH_TIME)
    assert stopped.code == EXIT_SAVED, stopped
    assert "rank 1 of 2 has taken step 4, while rank 0 was in the middle of step 5" in stopped.err, stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]


#: Has the loops begin to save between the ranks' agreement and their writing, which rank 0 is late with.
_BOTH_SAVE = _TRAIN.replace(
    "saved = None",
    """
from lockstep.checkpoint.aside import SideSaver
of_thread = SideSaver._save
def late(self, *args):
    Path("go on").touch()
    if world.is_main:
        time.sleep(1.0)
    return of_thread(self, *args)
SideSaver._save = late
saved = None""",
).replace("        saved.async_save()\n", "        stay('before a save')\n        saved.{}()\n")


@pytest.mark.parametrize("kind", ["save", "async_save"])
def test_a_loop_that_begins_to_save_meanwhile_waits(tmp_path: Path, calm: dict[int, Any], kind: str) -> None:
    script = _BOTH_SAVE.replace("saved.{}", f"saved.{kind}")
    finished = _train(tmp_path, "before a save", struck=signal.SIGUSR1, script=script)
    assert finished.code == 0, finished
    assert "from the side: the loop had not come to its next step" in finished.err, finished
    assert _final(tmp_path) == calm[2]


#: Has one rank call for a save and the other for leaving, in the same attempt.
_TWO_WISHES = (
    _TRAIN.replace(
        "saved = None",
        """
from lockstep.checkpoint.aside import SideSaver
is_due = SideSaver._is_due
def both(self, *args):
    Path(f"due {world.rank}").touch()
    until = time.monotonic() + 20
    while not Path(f"due {1 - world.rank}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return True
SideSaver._is_due = both
saved = None""",
    )
    .replace("os.kill(os.getpid() if", "(None) if")
    .replace(
        "    if who not in", "    os.kill(os.getpid(), (signal.SIGUSR1, signal.SIGTERM)[world.rank])\n    if who not in"
    )
    .replace("(None) if who == -2 else pid, struck)", "pass")
)


def test_ranks_that_are_asked_for_different_things_at_once_all_leave(tmp_path: Path, calm: dict[int, Any]) -> None:
    stopped = _train(tmp_path, "evaluation", struck=signal.SIGTERM, script=_TWO_WISHES)
    assert stopped.code == EXIT_SAVED, stopped
    assert _train(tmp_path).code == 0
    assert _final(tmp_path) == calm[2]
