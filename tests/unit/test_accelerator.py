"""What the room of accelerators answers: without one, and with one of which torch knows no more than its module."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

from lockstep import accelerator
from lockstep.accelerator import CPU
from tests.launching import LIMIT, environment

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

_BEGINNING = """
import json, os, sys, types, warnings
import torch
import torch.distributed as dist

class Toy(types.ModuleType):
    states = [torch.zeros(4, dtype=torch.uint8), torch.ones(4, dtype=torch.uint8)]
    used = False

    def device_count(self): return 2
    def is_available(self): return True
    def current_device(self): return 0
    def is_initialized(self): return self.used
    def _is_in_bad_fork(self): return False
    def manual_seed_all(self, seed): pass
    def manual_seed(self, seed): self.states[0] = torch.tensor([seed % 256] * 4, dtype=torch.uint8)
    def get_rng_state(self, device): return self.states[device.index].clone()
    def set_rng_state(self, state, device): self.states[device.index] = state.clone()
    def get_device_name(self, device): return f"Toy {device.index}"
    def get_device_properties(self, device): return types.SimpleNamespace(total_memory=1 << 30)

toy = Toy("torch.toy")
told = {}

def note(name, function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            told[name] = function()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    told[name + ", warned"] = [str(each.message) for each in caught]
"""
_BARE = """
torch.utils.rename_privateuse1_backend("toy")
torch._register_device_module("toy", toy)
import lockstep
from lockstep import accelerator
from lockstep.checkpoint import rng
from lockstep.step.conditions import conditions

device = torch.device("toy", 1)
told["kind"], told["count"] = accelerator.kind(), accelerator.count()
told["devices"] = [*map(str, accelerator.devices())]
told["words"] = [accelerator.title("toy"), accelerator.noun("toy"), [*accelerator.hiding_variables("toy")]]
told["initialised"] = accelerator.initialised()
toy.used = True
told["initialised later"] = accelerator.initialised()
told["backend"] = accelerator.backend_for("toy")
note("init without a backend", lambda: repr(lockstep.init()))
lockstep.shutdown()
dist.Backend.register_backend("toyccl", lambda *_: None, devices=["toy"])
told["backend later"], told["kind of it"] = accelerator.backend_for("toy"), accelerator.kind_of("toyccl")
os.environ |= dict(RANK="0", WORLD_SIZE="3", LOCAL_RANK="0", LOCAL_WORLD_SIZE="3", MASTER_ADDR="h", MASTER_PORT="1")
note("too many ranks", lockstep.init)
note("of another kind", lambda: lockstep.init("nccl"))
told["memory"], told["peak"] = accelerator.memory_size(device), accelerator.peak_memory(device)
told["times"], told["free"] = accelerator.has_times(device), accelerator.free_memory(device)
told["captures"] = accelerator.capture_test([accelerator.CPU, device])
toy.is_current_stream_capturing = lambda: True
told["captures later"] = accelerator.capture_test([accelerator.CPU, device])()
told["conditions"] = conditions(device)
saved = rng.Generators.now(device).to_json()
toy.states[1] = torch.full((4,), 7, dtype=torch.uint8)
rng.refuse_malformed_rng([saved], count=1, where="rng.json")
rng.restore_rng(saved, device)
told["generators"], told["restored"] = sorted(saved), toy.states[1].tolist()
told["of the same kind"] = [rng.has_rng_of(saved, device), rng.has_rng_of(saved, accelerator.CPU)]
told["of CUDA"] = [
    accelerator.cuda_libraries(device), accelerator.cudnn_rounds_to_tf32("toy"), accelerator.cuda_capability(device),
    accelerator.cuda_architectures(), accelerator.nccl_version(),
]
print(json.dumps(told))
"""
_WITH_GUARD = """
from datetime import timedelta
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("toy", backend_module=toy)
import lockstep
from lockstep import accelerator
from lockstep.comm.exchange import group_device
from lockstep.comm.gpu import Gpu

dist.Backend.register_backend("toyccl", dist.ProcessGroupGloo, devices=["toy"])
device = torch.device("toy", 0)
told["current"] = [str(accelerator.current("toy")), str(accelerator.with_index(torch.device("toy")))]
told["stream"] = [str(each.device) for each in (accelerator.new_stream(device), accelerator.current_stream(device))]
told["event"] = accelerator.mark(device).query()
told["times"] = accelerator.has_times(device)
gpu = Gpu(device)
event = gpu.event()
gpu.record(event)
told["page's device"] = [*gpu.memory(), gpu.can_record(), event.query()]
with accelerator.on(device):
    accelerator.seed(5, device)
told["seeded"] = toy.states[0].tolist()
world = lockstep.init()
told["world"], told["config"] = repr(world), dist.get_backend_config()
told["records go over"] = str(group_device(world.group))
world.barrier()
told["mean"] = world.mean(2.0)
lockstep.shutdown()
lockstep.init("gloo")
model = torch.nn.Linear(2, 2)
model.weight = torch.nn.Parameter(torch._C._acc.create_empty_tensor((2, 2), torch.float32))
note("a replica", lambda: lockstep.replicate(model))
lockstep.shutdown()
print(json.dumps(told))
"""


def _told(program: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", _BEGINNING + program],  # a process that aborts tells where
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.skipif(torch.accelerator.is_available(), reason="asks what is answered where there is none")
def test_without_an_accelerator() -> None:
    assert accelerator.kind() is None
    assert (accelerator.count(), accelerator.devices(), accelerator.is_usable()) == (0, [], False)
    assert accelerator.initialised() is None
    assert accelerator.cuda_architectures() == []
    assert accelerator.nccl_version() == ""


def test_the_cpu_is_no_accelerator() -> None:
    assert accelerator.rng_state(CPU) is None
    assert not accelerator.has_times(CPU)
    assert accelerator.capture_test([CPU, CPU]) is None
    assert accelerator.with_index(torch.device("cpu", 0)) == CPU
    assert accelerator.current("meta") == torch.device("meta")
    values = torch.ones(3)
    assert accelerator.HostCopy(values).read().data_ptr() == values.data_ptr()
    for wait in (accelerator.synchronize, accelerator.free_cached):
        wait(CPU)


def test_backends_are_those_of_torchs_table() -> None:
    assert [accelerator.backend_for(kind) for kind in ("cuda", "xpu", "mps", "npu")] == ["nccl", "xccl", None, None]
    assert [accelerator.kind_of(name) for name in ("nccl", "xccl", "gloo", "shm")] == ["cuda", "xpu", None, None]
    assert dist.Backend.default_device_backend_map["mps"] == "gloo", "which carries no tensors of MPS"


def test_words() -> None:
    assert [accelerator.noun(kind) for kind in ("cuda", "xpu")] == ["GPU", "XPU device"]
    assert accelerator.hiding_variables("cuda") == ("CUDA_VISIBLE_DEVICES",)


def test_hiding_variables_of_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert accelerator.hiding_variables("cuda")[:2] == ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    assert accelerator.hiding_variables("npu") == ("ASCEND_RT_VISIBLE_DEVICES",)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"uuid": "8932f937-d72c-4106-c12f-20bd9faed9f6"}, "8932f937-d72c-4106-c12f-20bd9faed9f6"),
        (
            {"uuid": "8932f937", "pci_domain_id": 0, "pci_bus_id": 0xC1, "pci_device_id": 0},
            "8932f937, PCI 0000:c1:00",
        ),
        (
            {"uuid": "00000000-0000-0000-0000-000000000000", "pci_domain_id": 1, "pci_bus_id": 3, "pci_device_id": 2},
            "PCI 0001:03:02",
        ),
        ({"uuid": "00000000-0000-0000-0000-000000000000"}, None),
        ({"name": "Toy"}, None),
    ],
)
def test_a_device_is_known_by_its_uuid_and_place(
    told: dict[str, Any], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "properties", lambda _device: SimpleNamespace(**told))
    assert accelerator.identity(torch.device("cuda", 0)) == expected


def test_of_a_plugins_device_nothing_says_cuda(tmp_path: Path) -> None:
    told = _told(_BARE, tmp_path)
    assert told.pop("of another kind").startswith("ValueError: backend='nccl' needs CUDA, and torch ")
    assert told.pop("generators") == ["numpy", "python", "torch", "toy"]
    assert told.pop("of CUDA") == [None, False, None, [], ""]
    conditions = told.pop("conditions")
    assert conditions["gpu"] == "Toy 1"
    assert "cuda" not in conditions
    assert "cuda" not in json.dumps(told).lower()
    assert [told[name] for name in ("kind", "count", "devices")] == ["toy", 2, ["toy:0", "toy:1"]]
    assert told["words"] == ["TOY", "TOY device", []]
    assert [told[name] for name in ("initialised", "initialised later")] == [None, "toy"]
    assert [told[name] for name in ("backend", "backend later", "kind of it")] == [None, "toyccl", "toy"]
    assert told["init without a backend"] == "World(rank=0, world_size=1, device='cpu')"
    (warned,) = told["init without a backend, warned"]
    assert "toy:0 and toy:1" in warned
    assert "no backend that carries TOY tensors from rank to rank: every rank trains on the CPU" in warned
    assert (
        "3 ranks on this machine but 2 visible TOY devices; TOYCCL needs one TOY device for" in told["too many ranks"]
    )
    assert [told[name] for name in ("memory", "peak", "times", "free")] == [1 << 30, None, False, None]
    assert [told[name] for name in ("captures", "captures later")] == [None, True]
    assert told["restored"] == [1] * 4
    assert told["of the same kind"] == [True, False]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch takes streams and events of a device from C++ alone",
)
def test_a_plugins_device_is_a_ranks_device(tmp_path: Path) -> None:
    told = _told(_WITH_GUARD, tmp_path)
    assert "cuda" not in json.dumps({**told, "a replica": ""}).lower()
    assert told["current"] == ["toy:0", "toy:0"]
    assert told["stream"] == ["toy:0", "toy:0"]
    assert told["event"] is True
    assert told["times"] is False, "its events have none, so nothing is timed by them"
    assert told["page's device"] == [0, 1 << 30, True, True]
    assert told["seeded"] == [5] * 4
    assert told["world"] == "World(rank=0, world_size=1, device='toy:0')"
    assert told["config"] == "cpu:gloo,toy:toyccl"
    assert told["records go over"] == "cpu"
    assert told["mean"] == 2.0
    assert told["a replica"].startswith("ValueError: parameter 'weight' is on toy:0, and this process group carries ")
    assert "model.to(lockstep.world().device)" in told["a replica"]


def test_a_build_for_gpus_refuses_nothing_in_forks_where_there_is_none(tmp_path: Path) -> None:
    asks = "import torch\ntorch.cuda.is_available()\nfrom lockstep import accelerator\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{asks}print(accelerator.refused_in_forks())"],
        env=environment(tmp_path, CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None\n"), done
