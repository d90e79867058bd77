"""Nothing that lockstep reads is ever unpickled: importing, saving, resuming, looking, loading weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import LIMIT

_GUARD = """
import pickle, sys

def refuse(event, arguments):
    if event in ("pickle.find_class", "marshal.load"):
        raise AssertionError(f"{event} {arguments}")

class Refusing:
    def __init__(self, *arguments, **options):
        raise AssertionError("something is unpickled")

sys.addaudithook(refuse)
# Data without classes raises no audit event: the doors themselves are shut as well.
pickle.load = pickle.loads = pickle._load = pickle._loads = Refusing
pickle.Unpickler = pickle._Unpickler = Refusing
folder = sys.argv[1]
"""

_USE = """
import lockstep, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def bench():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = lockstep.shard(DataLoader(TensorDataset(torch.randn(12, 3)), batch_size=4, shuffle=True))
    average = torch.optim.swa_utils.AveragedModel(model)
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader,
                                  extra={"average": average, "scaler": torch.amp.GradScaler("cpu")})
    return model, optimizer, loader, saved

lockstep.init()
model, optimizer, loader, saved = bench()
for epoch in saved.epochs(1):
    for (inputs,) in loader:
        model(inputs).sum().backward()
        optimizer.step()
        saved.save()
saved.async_save()
saved.wait()
again, *_, restored = bench()
assert restored.restore(strict=True).step == 3
assert torch.equal(again[0].weight, model[0].weight)
source = lockstep.load_weights(folder, bench()[0]).source
lockstep.load_weights(source, bench()[0])
lockstep.load_weights(source / "model.safetensors", bench()[0])

part = lockstep.split([1, 2])
predicted = [{"number": each, "tensor": torch.ones(each)} for each in part]
assert len(lockstep.world().gather_in_order(predicted, part)) == 2
lockstep.world().gather_in_order([torch.ones(2) for _ in part], part, path=folder + "/outputs.npy")

from lockstep.cli import main
for words in (["ls", folder], ["show", folder], ["verify", folder]):
    try:
        main(["checkpoint", *words], standalone_mode=False)
    except SystemExit as end:
        assert not end.code
print("nothing was unpickled")
"""

#: What the guard must notice.
_ATTACKS = {
    "a class": "import collections, io, _pickle; _pickle.loads(b'ccollections\\nOrderedDict\\n.')",
    "plain data": "pickle.loads(b'N.')",
}


def _run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", script, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    done = _run(_GUARD + _USE, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("nothing was unpickled\n")


@pytest.mark.parametrize("attack", _ATTACKS)
def test_the_guard_notices(tmp_path: Path, attack: str) -> None:
    done = _run(_GUARD + _ATTACKS[attack], tmp_path)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr
