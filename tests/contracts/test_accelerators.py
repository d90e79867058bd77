"""Everything about an accelerator goes through one file, which no step on the CPU comes to."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.harness import run_ranks

_PACKAGE = Path(lockstep.__file__).parent
_ROOM = _PACKAGE / "accelerator.py"
#: Of torch, what only the room may ask: the neutral names, and the modules of single kinds.
_OF_TORCH = {"accelerator", "cuda", "get_device_module", "mps", "mtia", "npu", "xpu", "Event", "Stream"}
_KINDS = {"cuda", "hpu", "mps", "mtia", "npu", "xpu"}
_METHODS = {"cuda", "is_cuda", "is_mps", "is_xpu", "npu", "xpu"}
#: File and code that may name a kind all the same.
EXCEPTIONS = {
    # torch's DataParallel leaves a module as it is where there is an MPS device, and so does ours.
    ("data_parallel/devices.py", "accelerator.kind() == 'mps'"),
    # Scripts that are ported name kinds, and these are read as text.
    ("tools/port/script.py", "method_of(call) == 'cuda'"),
    ("tools/port/values.py", "text in ('cuda', 'cuda:0', 'mps', 'xpu')"),
}
#: Copies that a mark is made behind, and that are read after it.
MARKED = {
    ("accelerator.py", "pinned.copy_(values.detach(), non_blocking=True)"),
    ("checkpoint/plan.py", "held.copy_(block, non_blocking=True)"),
    ("checkpoint/plan.py", "held.copy_(source[place:place + len(held)], non_blocking=True)"),
}
_STEPS = 20


def _found(tree: ast.AST) -> Iterator[str]:
    """Yield the code that asks torch of an accelerator, or that names a kind where devices are told apart."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_of_kind(alias.name))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if _is_of_kind(name))
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            stray = _OF_TORCH - {"Event", "Stream"} if owner == "torch" else _METHODS
            if node.attr in stray and owner not in ("torch.version", "torch.backends"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            names_kind = called in ("torch.device", "sys.modules.get") and any(map(_is_literal, node.args))
            given = any(keyword.arg == "device" and _is_literal(keyword.value) for keyword in node.keywords)
            if called in ("torch.Event", "torch.Stream") or names_kind or given:
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare) and any(map(_is_literal, [node.left, *node.comparators])):
            yield ast.unparse(node)


def _is_of_kind(module: str) -> bool:
    return module.startswith("torch.") and module.split(".")[1] in _OF_TORCH


def _is_literal(node: ast.AST) -> bool:
    """Return whether ``node`` is text that names a kind of device, with or without an index, or a list with one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_literal, node.elts))
    if isinstance(node, ast.JoinedStr):
        return bool(node.values) and _is_literal(node.values[0])
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.removeprefix("torch.").split(":")[0] in _KINDS


def test_accelerators_are_asked_in_one_file() -> None:
    found = {
        (str(file.relative_to(_PACKAGE)), code)
        for file in _PACKAGE.rglob("*.py")
        if file != _ROOM
        for code in _found(ast.parse(file.read_text()))
    }
    assert found - EXCEPTIONS == set(), "ask lockstep.accelerator, or whether the device is the CPU"
    assert EXCEPTIONS - found == set(), "these exceptions are needed no more"


def test_the_search_finds_what_it_is_for() -> None:
    for code in (
        "torch.cuda.synchronize()",
        "torch.accelerator.current_stream(device)",
        "torch.get_device_module(device).manual_seed(1)",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import synchronize",
        "tensor.is_cuda",
        "tensor.cuda()",
        "device.type == 'cuda'",
        "'cuda' in served",
        "device.type in ('cuda', 'xpu')",
        "str(device) != 'cuda:0'",
        "torch.device('cuda', 0)",
        "torch.ones(3, device=f'cuda:{index}')",
        "sys.modules.get('torch.cuda')",
        "torch.Event(device)",
        "torch.Stream(device)",
    ):
        assert [*_found(ast.parse(code))], code
    for code in ("device.type == 'cpu'", "torch.version.cuda", "found['cuda']", "event: torch.Event", "'npu'"):
        assert not [*_found(ast.parse(code))], code


def _unconditional(tree: ast.AST) -> Iterator[str]:
    """Yield the copies that nothing waits for, wherever they go: those to the host are read too early."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = [keyword.value for keyword in node.keywords if keyword.arg == "non_blocking"]
        given += node.args[1:] if node.func.attr in ("to", "copy_") else []
        if any(isinstance(value, ast.Constant) and value.value is True for value in given):
            yield ast.unparse(node)


def test_a_copy_to_the_host_is_waited_for_unless_it_is_marked() -> None:
    found = {
        (str(file.relative_to(_PACKAGE)), code)
        for file in _PACKAGE.rglob("*.py")
        for code in _unconditional(ast.parse(file.read_text()))
    }
    assert found - MARKED == set(), "use lockstep.trees.moved, or non_blocking=not target.is_cpu"
    assert MARKED - found == set(), "these exceptions are needed no more"
    for code in ("one.to('cpu', non_blocking=True)", "one.copy_(other, True)", "one.to(device, dtype, True)"):
        assert [*_unconditional(ast.parse(code))], code


def _asked_in_steps() -> list[str]:
    """Return what the package calls, in steps on the CPU, in the room and in torch's modules for accelerators."""
    lockstep.init()
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(16 * _STEPS, 5), torch.randint(0, 3, (16 * _STEPS,)))
    places = [str(Path(module.__file__ or "").parent) for module in (torch.accelerator, torch.cuda)]
    asked = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or not caller.f_code.co_filename.startswith(str(_PACKAGE)):
            return
        if code.co_filename == str(_ROOM) or any(code.co_filename.startswith(place) for place in places):
            asked.append("/".join((*Path(code.co_filename).parts[-2:], code.co_name)))

    batches = iter(lockstep.shard(DataLoader(samples, batch_size=16)))
    for step, (inputs, targets) in enumerate(batches):
        if step == 2:  # (The first steps lay things out.)
            sys.setprofile(note)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sys.setprofile(None)
    return asked


def test_no_step_on_the_cpu_asks_for_an_accelerator() -> None:
    for asked in run_ranks(_asked_in_steps, 2):
        # Where the replicas are compared, the flags would be on their way from a device.
        assert set(asked) <= {f"lockstep/accelerator.py/{of_host_copy}" for of_host_copy in ("__init__", "read")}
