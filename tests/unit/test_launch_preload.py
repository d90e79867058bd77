"""Environment that a program sets after the launcher's imports: threads are applied, the rest is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import machine
from lockstep.launch import channel, preload
from lockstep.launch.binding import Bind, bind_ranks


@pytest.mark.parametrize(
    ("env", "ranks", "expected"),
    [
        ({}, 2, "4"),
        ({}, 3, "2"),
        ({}, 100, "1"),
        ({}, 1, None),  # nothing to divide: as under python
        ({"OMP_NUM_THREADS": "7"}, 2, "7"),
        ({"OMP_NUM_THREADS": ""}, 2, "4"),
        ({"MKL_NUM_THREADS": "7"}, 2, "4"),  # MKL, and so torch, takes its own first
    ],
)
def test_each_rank_gets_its_share_of_the_cores(
    env: dict[str, str], ranks: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: None)
    found = channel._environment(bind_ranks(Bind.NONE, ranks).threads)
    assert found.get("OMP_NUM_THREADS") == expected
    assert found.get("MKL_NUM_THREADS") == env.get("MKL_NUM_THREADS")


def test_a_quota_counts_where_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(8)))
    monkeypatch.setattr(machine, "cpu_quota", lambda: 3.0)
    assert channel._environment(bind_ranks(Bind.NONE, 1).threads)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1,2"}, 1),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "100000"}, machine.visible_cores()),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({"OMP_NUM_THREADS": "0"}, None),
        ({}, None),
    ],
)
def test_the_number_of_threads_in_an_environment(env: dict[str, str], expected: int | None) -> None:
    assert preload._number(env, ("MKL_NUM_THREADS", "OMP_NUM_THREADS")) == expected


# As a rank does, in one process: the zygote's imports, then the program.
_PROGRAM = """
import json, os, sys, warnings
from lockstep.launch import preload
preload.load(["torch", "torch.distributed", "reader"])
preload.listen()

import torch, torch.distributed as dist, threadpoolctl, setter
os.environ["OMP_NUM_THREADS"] = "1"
report = {"threads": torch.get_num_threads()}
report |= {pool["internal_api"]: pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
report["debug"] = str(dist.get_debug_level())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    os.environ["TORCH_LOGS"] = "+dynamo"                    # the line of the first warning
    os.environ.update(TORCH_SHOW_CPP_STACKTRACES="1")
    os.environ.setdefault("READ_BY_READER", "1")
    os.environ["READ_BY_READER"] = "1"                      # no change
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"                # read when CUDA starts
    os.environ["ATEN_CPU_CAPABILITY"] = "default"           # read by the first computation
    os.environ["TMPDIR"] = "/tmp"                           # read by Python's own tempfile, and in vain
    setter.set("TORCH_LOGS", "")                            # a library knows what it does
report["warned"] = [(w.filename == __file__, w.lineno, str(w.message)) for w in caught]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ["OMP_NUM_THREADS"] = "2"                         # for what a program that trains starts
report["training"] = torch.get_num_threads()
dist.destroy_process_group()
torch.set_num_threads(2)                                    # the program's own word
os.environ["OMP_NUM_THREADS"] = "3"
report["kept"] = torch.get_num_threads()
if os.fork() == 0:
    os.environ["TORCH_LOGS"] = "in a child"
    os._exit(0)
report["child"] = os.waitstatus_to_exitcode(os.wait()[1])
print(json.dumps(report))
"""


def test_what_a_program_sets_after_the_imports(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "reader.py").write_text("import os, tempfile\nos.getenv('READ_BY_READER')\ntempfile.gettempdir()\n")
    (tmp_path / "site-packages" / "setter.py").write_text("import os\ndef set(k, v): os.environ[k] = v\n")
    (tmp_path / "train.py").write_text(_PROGRAM)
    env = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS") and k != "TORCH_LOGS"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(tmp_path / "site-packages"), env.get("PYTHONPATH", "")])
    env["PYTHONWARNINGS"] = "error"
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["threads"] == report["openmp"] == report["openblas"] == 1
    assert report["debug"] == "DebugLevel.DETAIL"
    assert [text.split()[0] for _, _, text in report["warned"]] == [
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "READ_BY_READER",
    ]
    assert all(here for here, _, _ in report["warned"])
    first = _PROGRAM[: _PROGRAM.index("# the line of")].count("\n") + 1
    assert report["warned"][0][1] == first
    assert "torch._logging._internal reads it" in report["warned"][0][2]
    assert "LOCKSTEP_PRELOAD= (empty" in report["warned"][0][2]
    assert "reader reads it" in report["warned"][2][2]
    assert report["training"] == 1
    assert report["kept"] == 2
    assert report["child"] == 0
