"""Steps of real jobs, computed again in one process: what several ranks had computed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.runs import history
from lockstep.tools.again import samples
from lockstep.tools.again.replay import Replay, in_words
from tests.launching import Finished, run
from tests.schemas import holds
from tests.stores import s3

_TRAINING = """
import json, sys
import torch, lockstep
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Points(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, index):
        bad = index == 17 and "bad-input" in sys.argv
        numbers = torch.rand(3, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.rand(())
        return numbers * float("nan") if bad else numbers, torch.tensor(float(index))

class Logarithms(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.log, self.last = nn.Linear(3, 8), Log(), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.0 if "still" in sys.argv else 0.3)
    def forward(self, points, index):
        return self.last(self.drop(self.log(self.first(points), index)))

class Log(nn.Module):
    def forward(self, hidden, index):
        positive = 1.0 + hidden.square()
        if "bad-output" in sys.argv:
            positive = torch.where(index[:, None] == 17.0, -positive, positive)
        return positive.log()

world = lockstep.init()
torch.manual_seed(0)
model = lockstep.replicate(Logarithms(), precision="fp16" if "fp16" in sys.argv else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
sliced = "sliced" in sys.argv
loader = lockstep.shard(DataLoader(Points(), batch_size=8, shuffle=True), **({"slices": 4} if sliced else {}))
in_store = "store" in sys.argv
folder = "s3://bucket/run" if in_store else "saved"
saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader, keep=None)
log = lockstep.Log("logged" if in_store else saved, every=1)

def steps():
    if sliced:
        yield from loader.steps()
    else:
        for batch in loader:
            yield [batch]

for epoch in saved.epochs(3):
    for parts in steps():
        losses, own = [], None
        for points, index in parts:
            outputs = model(points, index)
            loss = outputs.square().mean()
            lockstep.scale_loss(loss).backward()
            losses.append(loss.item())
        norm = torch.linalg.vector_norm(model.last.weight.grad.double()).item()
        optimizer.step()
        optimizer.zero_grad()
        if "kept" in sys.argv:
            print(json.dumps({"step": saved.step, "losses": losses, "norm": norm}), file=open(f"had-{world.rank}", "a"))
        log(loss=losses[0] if losses else 0.0)
        if saved.step in (5, 9):
            saved.save()
"""


def _train(tmp_path: Path, ranks: int, *words: str, **env: str) -> Path:
    (tmp_path / "train.py").write_text(_TRAINING)
    command = ["lockstep", "run", "-n", str(ranks), "--log-dir", "logs", "train.py", "kept", *words]
    done = run(command, tmp_path, torch=True, **env)
    assert done.code == 0, done
    return tmp_path / "logs"


def _had(tmp_path: Path, rank: int) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in map(json.loads, (tmp_path / f"had-{rank}").read_text().splitlines())}


def _digests(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files}


def _asked(
    tmp_path: Path, step: int, *words: str, rank: int | None = None, env: dict[str, str] | None = None, **more: Any
) -> tuple[Any, Finished]:
    """Replay as the command does, in a process that has torch already."""
    home = tmp_path / f"asked-{step}-{rank}"
    home.mkdir()
    question = samples.ask_step(history.read(tmp_path / "logs"), step)
    asked = {"step": step, "rank": rank, "world_size": question.wanted[0].world_size, "debug": False, **more}
    request = {"replay": {**asked, **question.request()}, "folder": str(home)}
    (home / "request.json").write_text(json.dumps(request))
    arguments = ["lockstep.tools.again.within", str(home / "request.json"), "train.py", *words]
    stdin = "p losses\np saved.step\np loader\nq\n" if more.get("debug") else None
    done = run(arguments, tmp_path, torch=True, stdin=stdin, **(env or {}))
    assert (home / "answer.json").exists(), done
    return json.loads((home / "answer.json").read_text()), done


def test_a_step_in_slices_is_what_the_ranks_did_bit_by_bit_and_the_run_stays_as_it_is(tmp_path: Path) -> None:
    logs = _train(tmp_path, 3, "sliced")
    before = _digests(tmp_path / "saved")
    for step, resumed in ((3, None), (8, 5), (10, 9)):
        told, done = _asked(tmp_path, step, "sliced")
        assert done.code == 0, done
        assert told["resumed_from"] == resumed
        of_ranks = [loss for rank in range(3) for loss in _had(tmp_path, rank)[step]["losses"]]
        assert told["losses"] == of_ranks, "each slice has the same loss"
        (last,) = (each["norm"] for each in told["gradients"] if each["name"] == "last.weight")
        assert last == _had(tmp_path, 0)[step]["norm"]
        assert told["findings"] == []
        found = Replay(history.read(logs), step, 3, None, True, told)
        assert "bit by bit what 3 ranks did" in found.describe()
    assert _digests(tmp_path / "saved") == before, "neither a checkpoint nor a line of the log was touched"


def test_losses_in_half_precision_are_told_as_the_script_logs_them(tmp_path: Path) -> None:
    _train(tmp_path, 2, "sliced", "fp16")
    told, done = _asked(tmp_path, 8, "sliced", "fp16")
    assert done.code == 0, done
    assert told["losses"] == [loss for rank in range(2) for loss in _had(tmp_path, rank)[8]["losses"]]


def test_a_run_whose_checkpoints_are_in_a_store(tmp_path: Path) -> None:
    with s3(tmp_path) as server:
        _train(tmp_path, 2, "sliced", "store", **server.environment)
        before = server.objects()
        for step, resumed in ((3, None), (8, 5), (10, 9)):
            told, done = _asked(tmp_path, step, "sliced", "store", env=server.environment)
            assert (done.code, told["resumed_from"]) == (0, resumed), done
            assert told["losses"] == [loss for rank in range(2) for loss in _had(tmp_path, rank)[step]["losses"]]
        assert server.objects() == before, "a replay takes no part in the run"


def test_the_step_after_a_checkpoint_on_one_rank_s_part_is_that_rank_s_own(tmp_path: Path) -> None:
    _train(tmp_path, 3)
    for rank in range(3):
        told, _ = _asked(tmp_path, 6, rank=rank)
        assert told["resumed_from"] == 5
        assert told["losses"] == _had(tmp_path, rank)[6]["losses"], "with the same dropout"


def test_later_steps_are_what_the_ranks_did_up_to_rounding(tmp_path: Path) -> None:
    _train(tmp_path, 3, "still")
    told, _ = _asked(tmp_path, 8, "still", rank=1)
    assert told["losses"] == pytest.approx(_had(tmp_path, 1)[8]["losses"], rel=1e-5)
    told, _ = _asked(tmp_path, 8, "still")
    of_ranks = [_had(tmp_path, rank)[8]["losses"][0] for rank in range(3)]
    assert told["losses"] == pytest.approx([(3 * of_ranks[0] + 3 * of_ranks[1] + 2 * of_ranks[2]) / 8], rel=1e-5)


@pytest.mark.parametrize("kind", ["sliced", "plain"])
@pytest.mark.parametrize(("bad", "what"), [("bad-input", "the batch (0)"), ("bad-output", "the output of log (Log)")])
def test_a_nan_of_four_ranks_is_found_at_its_sample(tmp_path: Path, kind: str, bad: str, what: str) -> None:
    logs = _train(tmp_path, 4, kind, bad)
    record = history.read(logs)
    step = next(step for step in range(1, 7) if 17 in _indices(record, step))
    told, _ = _asked(tmp_path, step, kind, bad)
    first = told["findings"][0]
    assert first["what"] == what
    (sample,) = first["samples"]
    (owner,) = (part.rank for batch in _batches(record, step) for part in batch.parts if 17 in part.indices)
    assert (sample["index"], sample["rank"]) == (17, owner)
    assert {"loss", "gradient"} <= {each["kind"] for each in told["findings"]}
    assert f"{what}, " in in_words(told)
    assert f"sample 17 (position {sample['position']}" in in_words(told)
    told, _ = _asked(tmp_path, step - 1, kind, bad) if step > 1 else ({"findings": []}, None)
    assert told["findings"] == []


def _batches(record: history.Run, step: int) -> list[samples.RecordedBatch]:
    return [batch for wanted in samples.ask_step(record, step).wanted for batch in samples.compute(wanted)]


def _indices(record: history.Run, step: int) -> list[int]:
    return [index for batch in _batches(record, step) for part in batch.parts for index in part.indices]


def test_the_debugger_opens_in_the_step(tmp_path: Path) -> None:
    _train(tmp_path, 2)
    told, done = _asked(tmp_path, 7, debug=True)
    assert str(told["losses"]) in done.out, "what the user's loop holds"
    assert "(Pdb) 6\n" in done.out, "the optimizer has not taken the step"
    assert "<sharded loader of Points" in done.out


def test_a_run_without_a_checkpointer_begins_anew(tmp_path: Path) -> None:
    plain = _TRAINING.replace(
        "saved = lockstep.Checkpointer(", "class Plain:\n    step = 0\nsaved = Plain()\nPlain.unused = ("
    )
    plain = plain.replace(
        "unused = (folder, model=model, optimizer=optimizer, loader=loader, keep=None)", "unused = ()"
    )
    plain = plain.replace('"logged" if in_store else saved', "'plain'").replace("saved.epochs(3)", "range(2)")
    plain = plain.replace("        optimizer.step()", "        optimizer.step()\n        saved.step += 1")
    (tmp_path / "train.py").write_text(plain.replace("saved.step in (5, 9)", "False"))
    command = ["lockstep", "run", "-n", "2", "--log-dir", "logs", "train.py", "kept", "sliced"]
    done = run(command, tmp_path, torch=True)
    assert done.code == 0, done
    told, _ = _asked(tmp_path, 9, "sliced")
    assert told["resumed_from"] is None
    assert told["losses"] == [loss for rank in range(2) for loss in _had(tmp_path, rank)[9]["losses"]]


def test_an_error_in_the_step_is_answered_as_well(tmp_path: Path) -> None:
    _train(tmp_path, 2)
    train = tmp_path / "train.py"
    train.write_text(
        _TRAINING.replace("(loss).backward()", "(loss).backward()\n            assert saved.step != 6, 'six'")
    )
    told, done = _asked(tmp_path, 7)
    assert (told["raised"], done.code) == ("AssertionError: six", 1)
    assert len(told["losses"]) == 1
    assert "six" in done.err


def test_the_command(tmp_path: Path) -> None:
    logs = _train(tmp_path, 2)
    command = ["lockstep", "replay", str(logs), "--step", "7"]
    told = holds(run([*command, "--json"], tmp_path, torch=True).out, "lockstep.replay/1")
    assert (told["ranks"], told["resumed_from"], told["raised"]) == (2, 5, None)
    assert "up to rounding" in told["exactness"]
    for words, why in (
        (["--rank", "2"], "had the ranks 0 to 1"),
        (["--pdb", "--json"], "give one of them"),
    ):
        done = run([*command, *words], tmp_path, torch=True)
        assert (done.code, why in done.err) == (2, True), done
    shown = run([*command, "--rank", "1"], tmp_path, torch=True)
    assert "the gradients of rank 0 are missing" in shown.out
