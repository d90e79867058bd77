"""What kinds of models, optimizers and schedulers a Checkpointer saves, and which it refuses, in words."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lockstep
from lockstep.errors import CheckpointMismatch
from tests.digests import digest_of
from tests.harness import run_ranks


def _linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(4, 4)


# What is refused, on every rank, before the first step.


def _mesh() -> Any:
    return init_device_mesh("cpu", (lockstep.world().world_size,))


def _fsdp1() -> dict[str, Any]:
    return {"model": nn.Sequential(FullyShardedDataParallel(_linear(), device_id=torch.device("cpu")))}


def _fsdp2() -> dict[str, Any]:
    model = _linear()
    fully_shard(model, mesh=_mesh())
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def _tensor_parallel() -> dict[str, Any]:
    return {"model": parallelize_module(nn.Sequential(_linear()), _mesh(), {"0": ColwiseParallel()})}


def _meta() -> dict[str, Any]:
    return {"model": nn.Linear(4, 4, device="meta")}


def _buffer(tensor: torch.Tensor) -> dict[str, Any]:
    model = _linear()
    model.register_buffer("graph", tensor)
    return {"model": model}


def _zero() -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of TorchScript

    model = _linear()
    return {"model": model, "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam)}


def _stage() -> dict[str, Any]:
    return {"model": nn.ModuleDict({str(lockstep.world().rank): _linear()})}


class Doubled(torch.Tensor):
    """A tensor that keeps its data in another one, as quantized ones of torchao do."""

    kept: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Doubled:
        made: Doubled = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.kept = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["kept"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return Doubled(args[0].kept)
        raise NotImplementedError(function)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "FSDP": (_fsdp1, "model.0 is a FullyShardedDataParallel, of which .* with torch.distributed.checkpoint"),
    "FSDP2": (_fsdp2, "model: weight is a DTensor, of which each rank holds a part: .*distributed.checkpoint"),
    "tensor parallelism": (_tensor_parallel, "model: 0.weight is a DTensor, of which each rank holds a part"),
    "a meta model": (_meta, "model: weight is on the meta device.*model.to_empty"),
    "a sparse buffer": (
        lambda: _buffer(torch.eye(2).to_sparse()), "model: graph is torch.sparse_coo, and .*persistent=False",
    ),
    "a sparse buffer in rows": (lambda: _buffer(torch.eye(2).to_sparse_csr()), "model: graph is torch.sparse_csr"),
    "an extra meta model": (lambda: {**_buffer(torch.ones(1)), "extra": {"ema": _meta()["model"]}}, "ema: weight is"),
    "a nested buffer": (lambda: _buffer(torch.nested.nested_tensor([torch.ones(2)])), "graph is a nested tensor"),
    "a tensor of tensors": (lambda: _buffer(Doubled(torch.ones(2))), "graph is a .*Doubled, which keeps its data"),
    "a stage of a pipeline": (
        _stage,
        "rank 1 holds other parameters than rank 0.* 2 \\('1.weight' first\\) there and 2 \\('0.weight' first\\).*"
        "with torch.distributed.checkpoint",
    ),
    "ZeRO": (_zero, "optimizer is a ZeroRedundancyOptimizer, .*use its optimizer_class itself.*consolidate_state_dict"),
}  # fmt: skip


def _refusals(folder: str) -> dict[str, str]:
    lockstep.init()
    said = {}
    for number, (case, (make, _)) in enumerate(REFUSED.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse rows and nested tensors are in beta
            things = make()
        with pytest.raises(lockstep.CheckpointError) as caught:
            lockstep.Checkpointer(f"{folder}/{number}", **things)
        said[case] = str(caught.value)
    return said


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run_ranks(_refusals, 2, str(tmp_path_factory.mktemp("refused")))


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_checkpointer_cannot_save_is_refused_at_once_on_every_rank(
    refusals: list[dict[str, str]], case: str
) -> None:
    for said in refusals:
        assert re.search(REFUSED[case][1], said[case]), said[case]


# What is saved, and goes on with the bits of a run that was never interrupted.


class Eight(torch.optim.Optimizer):
    """As the optimizers with states of eight bits: bytes, a table and the largest values."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state["bytes"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state["blocks"] = [torch.ones(2, dtype=torch.float64), (torch.zeros(1, dtype=torch.int32),)]
            assert state["bytes"].dtype == torch.uint8
            assert [state["blocks"][0].dtype, state["blocks"][1][0].dtype] == [torch.float64, torch.int32]
            state["step"] += 1
            state["bytes"] += parameter.grad.float().abs().mul(40).to(torch.uint8)
            state["blocks"][0] += 1e-12
            parameter -= 0.01 * state["bytes"].to(parameter.dtype)


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], torch.dtype]] = {
    "LBFGS": (_lbfgs, torch.float32),
    "Adafactor": (torch.optim.Adafactor, torch.float32),
    "Adafactor in bfloat16": (torch.optim.Adafactor, torch.bfloat16),
    "a tensor as learning rate": (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), torch.float32),
    # These keep numbers in float32 beside parameters in bfloat16, which torch's load_state_dict rounds.
    "ASGD in bfloat16": (lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.3), torch.bfloat16),
    "NAdam in bfloat16": (lambda p: torch.optim.NAdam(p, lr=0.1), torch.bfloat16),
    "bytes": (Eight, torch.float32),
    "bytes in bfloat16": (Eight, torch.bfloat16),
}


class Decay:
    """A schedule with a state, as LambdaLR keeps it."""

    def __init__(self) -> None:
        self.factor = 0.9

    def __call__(self, epoch: int) -> float:
        return float(self.factor**epoch)


_lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: _lr.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda optimizer: _lr.LambdaLR(optimizer, Decay()),
    "SequentialLR": lambda optimizer: _lr.SequentialLR(
        optimizer, [_lr.LinearLR(optimizer), _lr.CosineAnnealingLR(optimizer, 9)], [2]
    ),
    "ChainedScheduler": lambda optimizer: _lr.ChainedScheduler(
        [_lr.ConstantLR(optimizer, 0.5, 3), _lr.ExponentialLR(optimizer, 0.9)]
    ),
    "CyclicLR": lambda optimizer: _lr.CyclicLR(
        optimizer, 0.1, 0.2, 3, scale_fn=lambda cycle: 1 / cycle, cycle_momentum=False
    ),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.05, 4),
}
_EMA = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)


def _run(
    folder: str,
    case: str,
    dtype: torch.dtype,
    make: Callable[..., Any],
    schedule: Any,
    *,
    interrupt: bool,
    as_extra: bool = False,
) -> str:
    """Four steps; with ``interrupt`` the last two by new objects that go on from a checkpoint."""

    def bench() -> tuple[Any, ...]:
        model = _linear().to(dtype)
        optimizer = make(model.parameters())
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=_EMA, use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        scheduler = None if schedule is None else schedule(optimizer)
        saved = lockstep.Checkpointer(
            f"{folder}/{case}-{interrupt}", model=model, optimizer=None if as_extra else optimizer, scheduler=scheduler,
            extra={"average": average, "scaler": scaler, **({"optimizer": optimizer} if as_extra else {})},
        )  # fmt: skip
        return model, optimizer, scheduler, average, scaler, saved

    def steps(numbers: range, things: tuple[Any, ...]) -> None:
        model, optimizer, scheduler, average, *_ = things
        for number in numbers:

            def closure(number: int = number) -> torch.Tensor:
                optimizer.zero_grad()
                inputs = torch.linspace(-1, number, 12).reshape(3, 4).to(dtype)
                loss: torch.Tensor = (model(inputs) - 1).square().sum()
                loss.backward()
                return loss

            closure()
            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
            if scheduler is not None:
                scheduler.step()
            average.update_parameters(model)

    things = bench()
    steps(range(2), things)
    if interrupt:
        things[-1].save()
        things = bench()
        things[-1].restore()
    steps(range(2, 4), things)
    model, optimizer, scheduler, average, scaler, _ = things
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("params")
    return digest_of([
        model.state_dict(), state, average.state_dict(), scaler.state_dict(), None if scheduler is None
        else [group["lr"] for group in optimizer.param_groups],
    ])  # fmt: skip


def _interrupted(folder: str, as_extra: bool) -> dict[str, bool]:
    lockstep.init()
    cases: dict[str, tuple[Any, Any, Any]] = {
        **{name: (dtype, make, None) for name, (make, dtype) in OPTIMIZERS.items()},
        **{
            name: (torch.float32, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), schedule)
            for name, schedule in SCHEDULERS.items()
        },
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR steps its schedulers in an order that torch warns of
        return {
            name: _run(folder, name, *case, interrupt=True, as_extra=as_extra)
            == _run(folder, name, *case, interrupt=False, as_extra=as_extra)
            for name, case in cases.items()
        }


@pytest.mark.parametrize("as_extra", [False, True])
def test_odd_states_go_on_with_the_same_bits(tmp_path: Path, as_extra: bool) -> None:
    for same in run_ranks(_interrupted, 2, str(tmp_path), as_extra):
        assert [name for name, equal in same.items() if not equal] == []
        assert same.keys() == {*OPTIMIZERS, *SCHEDULERS}


def _another_in_extra(folder: str) -> list[str]:
    lockstep.init()
    words = []

    def checkpointer(make: Callable[[Any], torch.optim.Optimizer], *, size: int = 4) -> lockstep.Checkpointer:
        other = nn.Linear(size, 4)
        return lockstep.Checkpointer(folder, model=_linear(), extra={"other": make(other.parameters())})

    checkpointer(torch.optim.SGD).save()
    for saved in (checkpointer(torch.optim.AdamW), checkpointer(torch.optim.SGD, size=3)):
        with pytest.raises(CheckpointMismatch) as refused:
            saved.restore()
        words.append(str(refused.value))
    return words


def test_another_optimizer_in_extra_is_refused(tmp_path: Path) -> None:
    for words in run_ranks(_another_in_extra, 2, str(tmp_path)):
        assert "extra 'other' is of the optimizer SGD, this one is AdamW" in words[0]
        assert "parameter 0 of the optimizer's group 0 has shape [4, 4], this one's has [4, 3]" in words[1]


class _Refusing:
    """An object that takes no state but its own."""

    def __init__(self, number: int) -> None:
        self._number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["number"] != self._number:
            raise ValueError("not mine")


def _failed_load(folder: str) -> list[str]:
    lockstep.init()
    dtypes: list[str] = []
    for number in range(2):
        model = _linear().to(torch.bfloat16)
        optimizer = torch.optim.NAdam(model.parameters())
        model(torch.ones(4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        saved = lockstep.Checkpointer(folder, model=model, extra={"inner": optimizer, "other": _Refusing(number)})
        if not number:
            saved.save()
            continue
        with pytest.raises(lockstep.CheckpointError, match="not mine"):
            saved.restore()
        dtypes += [str(state["mu_product"].dtype) for state in optimizer.state.values()]
    return dtypes


def test_an_optimizer_that_is_put_back_keeps_its_dtypes(tmp_path: Path) -> None:
    assert run_ranks(_failed_load, 2, str(tmp_path)) == [["torch.float32"] * 2] * 2


# Wrappers within the names.


class Deep(nn.Module):
    def __init__(self, wrap: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) for _ in range(2))
        self.head = wrap(nn.Linear(2, 2))


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _wrappers(folder: str) -> list[str]:
    world = lockstep.init()
    torch.manual_seed(world.rank)
    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: Deep(lambda module: module),
        "regional compile": lambda: Deep(_compiled),
        "all compiled": lambda: _compiled(Deep(_compiled)),
        "replicas inside": lambda: Deep(lockstep.DistributedDataParallel),
        "torch's replicas": lambda: nn.parallel.DistributedDataParallel(Deep(_compiled)),
        "scripted": lambda: torch.jit.trace_module(Deep(lambda module: module).head, {"forward": torch.ones(1, 2)}),
    }
    wrong = []

    def tensors(model: nn.Module) -> list[list[float]]:
        return [value.tolist() for value in model.state_dict().values()]

    for one, make in kinds.items():
        model = make()
        average = torch.optim.swa_utils.AveragedModel(model) if one != "scripted" else nn.Linear(1, 1)
        for parameter in average.parameters():
            parameter.data += 1
        at = f"{folder}/{one}"
        path = lockstep.Checkpointer(at, model=model, extra={"average": average}).save()
        manifest = Path(path / "manifest.json").read_text()
        wrong += [f"{one}: {word} is in the names" for word in ("_orig_mod", "layers.0.module") if word in manifest]
        expected = tensors(model)
        for other, make_other in kinds.items():
            if (one == "scripted") != (other == "scripted"):
                continue
            into = make_other()
            again = copy.deepcopy(average) if one == "scripted" else torch.optim.swa_utils.AveragedModel(into)
            for value in (*into.state_dict().values(), *again.state_dict().values()):
                value.fill_(7)
            lockstep.Checkpointer(at, model=into, extra={"average": again}).restore(only_sound=False)
            if world.is_main and tensors(into) != expected:
                wrong.append(f"{one} into {other}: the model")
            if world.is_main and tensors(again) != tensors(average):
                wrong.append(f"{one} into {other}: its average")
    return wrong


@pytest.mark.filterwarnings("ignore:`torch.jit")  # the category is not the same in all versions
def test_a_run_goes_on_with_other_wrappers_than_it_was_saved_with(tmp_path: Path) -> None:
    assert run_ranks(_wrappers, 2, str(tmp_path)) == [[], []]
