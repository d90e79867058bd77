"""The samples of each step of real jobs, told from their records, beside what their ranks had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs import history
from lockstep.tools.again import samples
from lockstep.tools.again.samples import RecordedBatch, UnknownBatch
from tests.launching import run
from tests.schemas import holds

_TRAINING = """
import json, os, sys
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, SequentialSampler, WeightedRandomSampler

class Numbers(Dataset):
    def __len__(self):
        return 41
    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item()])

class Buckets(Sampler):
    def __iter__(self):
        left = torch.randperm(41).tolist()
        while left:
            size = 3 + int(torch.randint(5, ()))
            yield left[:size]
            left = left[size:]
            if len(left) % 3 == 0:
                yield []

kind, stop = sys.argv[1], int(sys.argv[2])
world = lockstep.init()
torch.manual_seed(0)
model = lockstep.replicate(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
options, given = {}, {"batch_size": 6, "shuffle": True}
if kind == "sampler":
    given = {"batch_size": 6, "sampler": WeightedRandomSampler(torch.arange(1.0, 42.0), 41)}
elif kind == "batches":
    given, options = {"batch_sampler": Buckets()}, {"costs": lambda index: 1.0 + index % 7}
elif kind == "state":
    class Counting(Buckets):
        def state_dict(self):
            return {}
    given = {"batch_sampler": Counting()}
elif kind == "slices":
    options = {"slices": 5}
elif kind == "shares":
    options = {"shares": [2, 1, 1][: world.world_size]}
# The loader that is looked at is the second one.
lockstep.shard(DataLoader(Numbers(), batch_size=41, shuffle=kind == "second"))
loader = lockstep.shard(DataLoader(Numbers(), **given), **options)
saved = lockstep.Checkpointer("saved", model=model, optimizer=optimizer, loader=loader)

def note(parts):
    with open(f"had-{world.world_size}-{world.rank}.jsonl", "a") as file:
        parts = [part for part in parts if len(part)]
        told = {"step": saved.step, "had": [[part[:, 0].tolist(), part[:, 1].tolist()] for part in parts]}
        print(json.dumps(told), file=file)

def steps():
    if kind != "slices":
        for batch in loader:
            yield [batch]
        return
    for step in loader.steps():
        yield step

for epoch in saved.epochs(3):
    for parts in steps():
        had = []
        for part in parts:
            (model(part).sum() * 0.01).backward()
            had.append(part)
        optimizer.step()
        optimizer.zero_grad()
        note(had)
        if saved.step == stop:
            saved.save()
            sys.exit(0)
"""


def _train(tmp_path: Path, kind: str, ranks: int, stop: int) -> Path:
    (tmp_path / "train.py").write_text(_TRAINING)
    logs = tmp_path / f"logs-{ranks}"
    command = ["lockstep", "run", "-n", str(ranks), "--log-dir", str(logs), "train.py", kind, str(stop)]
    done = run(command, tmp_path, torch=True)
    assert done.code == 0, done
    return logs


def _had(tmp_path: Path, ranks: int, rank: int) -> dict[int, list[list[list[float]]]]:
    lines = (tmp_path / f"had-{ranks}-{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line["had"] for line in map(json.loads, lines)}


def _indices(batch: RecordedBatch, rank: int) -> list[list[int]]:
    return [part.indices for part in batch.parts if part.rank == rank and part.indices]


@pytest.mark.parametrize("kind", ["plain", "second", "slices", "shares"])
def test_each_step_of_a_run_and_of_its_resumes_on_other_ranks(tmp_path: Path, kind: str) -> None:
    first = {"plain": 10, "second": 10, "slices": 10, "shares": 10}[kind]
    runs = {ranks: _train(tmp_path, kind, ranks, stop) for ranks, stop in ((2, first), (3, 13), (1, -1))}
    steps = 0
    for ranks, logs in runs.items():
        record = history.read(logs)
        for rank in range(ranks):
            for step, had in _had(tmp_path, ranks, rank).items():
                question = samples.ask_step(record, step)
                (batch,) = samples.compute(question.wanted[0])
                assert batch.loader == 1
                assert _indices(batch, rank) == [[*map(int, indices)] for indices, _ in had], (ranks, step)
                steps += rank == 0
        assert question.remarks == []
    assert steps == 21
    with pytest.raises(UnknownBatch, match="begins at step 11: it was resumed there"):
        samples.ask_step(history.read(runs[3]), 10)


def _asked(tmp_path: Path, logs: Path, kind: str, step: int) -> list[RecordedBatch]:
    """Ask the program as the command does, in a process that has torch already."""
    home = tmp_path / f"asked-{step}"
    home.mkdir()
    request = {**samples.ask_step(history.read(logs), step).request(), "folder": str(home)}
    (home / "request.json").write_text(json.dumps(request))
    words = ["lockstep.tools.again.within", str(home / "request.json"), "train.py", kind, "-1"]
    done = run(words, tmp_path, torch=True)
    assert done.code == 0, done
    told = json.loads((home / "answer.json").read_text())
    return [RecordedBatch.from_json(each) for each in told["batches"]]


@pytest.mark.parametrize("kind", ["sampler", "batches", "plain"])
def test_the_program_draws_again_what_its_samplers_drew_and_gives_the_same_samples(tmp_path: Path, kind: str) -> None:
    logs = _train(tmp_path, kind, 2, -1)
    before = sorted(path.name for path in tmp_path.rglob("*") if "asked" not in str(path))
    steps = [*_had(tmp_path, 2, 0)]
    for step in (1, steps[len(steps) // 2], steps[-1]):
        (batch,) = _asked(tmp_path, logs, kind, step)
        for rank in range(2):
            had = _had(tmp_path, 2, rank)[step]
            assert _indices(batch, rank) == [[*map(int, indices)] for indices, _ in had], step
            (part,) = (part for part in batch.parts if part.rank == rank)
            shown = [[value["low"], value["high"]] for each in part.samples or [] for value in each["values"]]
            given = [sorted(both) for indices, draws in had for both in zip(indices, draws, strict=True)]
            assert shown == given, "and the same random numbers"
    after = sorted(path.name for path in tmp_path.rglob("*") if "asked" not in str(path))
    assert after == before, "neither checkpoints nor logs of the run were touched"


def test_the_command_shows_samples_and_says_why_it_can_t(tmp_path: Path) -> None:
    logs = _train(tmp_path, "plain", 2, 9)
    command = ["lockstep", "runs", "batch", str(logs), "--step", "9", "--show"]
    done = run([*command, "--json"], tmp_path, torch=True)
    (batch,) = holds(done.out, "lockstep.runs.batch/1")["batches"]
    assert [len(part["samples"]) for part in batch["parts"]] == [3, 3]
    train = tmp_path / "train.py"
    train.write_text(_TRAINING.replace("return 41\n", "return 40\n", 1))
    done = run(command, tmp_path, torch=True)
    assert done.code == 2
    assert "length 41 in the run, 40 now" in done.err
    train.write_text("raise ValueError('no data')")
    done = run(command, tmp_path, torch=True)
    assert (done.code, "ValueError: no data" in done.err) == (2, True)
    assert "run again in one process, failed with exit code 1" in done.err
    train.unlink()
    assert "train.py is not (or no longer) a file in" in run(command, tmp_path, torch=True).err


def test_a_batch_sampler_with_a_state_is_asked_for_its_first_epoch_alone(tmp_path: Path) -> None:
    logs = _train(tmp_path, "state", 1, -1)
    first, *_, last = _had(tmp_path, 1, 0)
    command = ["lockstep", "runs", "batch", str(logs), "--show", "--step"]
    assert run([*command, str(first)], tmp_path, torch=True).code == 0
    done = run([*command, str(last)], tmp_path, torch=True)
    assert done.code == 2, done
    assert "has a state of its own, which epochs before epoch 2 have changed" in done.err


def test_steps_of_ranks_that_were_started_again_are_those_of_the_last_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        _TRAINING.replace(
            "        if saved.step == stop:",
            "        if saved.step == 4:\n"
            "            saved.save()\n"
            "        if saved.step == 6 and world.rank == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
            "            raise ValueError('once')\n"
            "        if saved.step == stop:",
        )
    )
    command = ["lockstep", "run", "-n", "2", "--max-restarts", "1", "--log-dir", "logs", "train.py", "plain", "8"]
    done = run(command, tmp_path, torch=True)
    assert done.code == 0, done
    record: Any = history.read(tmp_path / "logs")
    asked = {step: samples.ask_step(record, step) for step in range(1, 9)}
    assert [asked[step].start for step in asked] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert "was taken in the starts 0, 1" in asked[5].remarks[0]
    for step, question in asked.items():
        (batch,) = samples.compute(question.wanted[0])
        had = _had(tmp_path, 2, 0)[step]
        assert _indices(batch, 0) == [[*map(int, indices)] for indices, _ in had]
