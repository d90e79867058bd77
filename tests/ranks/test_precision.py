"""Forwards in low precision: the bits of autocast and a GradScaler by hand, without their lines in the script."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.step.loss_scale import in_force
from tests.backends import BOTH, EACH_BACKEND, OVER_BOTH
from tests.digests import digest_of
from tests.harness import run_ranks
from tests.launching import run
from tests.ranks.ddp_cases import differentiate
from tests.selection import each_value

pytestmark = EACH_BACKEND

#: Ways to train, each also by hand.
WAYS = ("plain", "wrapped", "accumulation", "slices", "sparse", "clipped")
_CLASSES, _SAMPLES = 5, 44


class Words(nn.Module):
    """Of an embedding, a layer norm (which autocast computes in float32), and linear layers."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(13, 8, sparse=sparse), nn.LayerNorm(8)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(self.norm(self.embed(words).mean(1))).relu())
        return scores


def _words(way: str = "plain") -> Words:
    torch.manual_seed(4)
    return Words(sparse=way == "sparse").to(lockstep.world().device)


def _loader(way: str, *, batch_size: int = 11) -> Any:
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(0, 13, (_SAMPLES, 6), generator=generator)
    dataset = TensorDataset(words, torch.randint(0, _CLASSES, (_SAMPLES,), generator=generator))
    return lockstep.shard(DataLoader(dataset, batch_size=batch_size), slices=4 if way == "slices" else None)


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    state: str
    losses: list[float]
    scale: float
    skipped: int


def _optimizer(model: nn.Module, way: str) -> torch.optim.Optimizer:
    if way == "sparse":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(way: str, precision: Any, *, by_hand: bool, epochs: int = 3) -> Trained:
    world = lockstep.world()
    net, kind = _words(way), world.device.type
    mine = None if by_hand else precision
    model: Any
    if way == "wrapped":
        model = lockstep.DistributedDataParallel(net, precision=mine)
    else:
        model = lockstep.replicate(net, precision=mine)
    optimizer, loader = _optimizer(net, way), _loader(way)
    scaler = torch.amp.GradScaler(kind, enabled=by_hand and precision == "fp16")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    losses: list[float] = []
    skipped = 0

    def backward(words: Tensor, classes: Tensor) -> None:
        if by_hand:
            with torch.autocast(kind, dtype):
                scores = model(words)
            loss = 30 * cross_entropy(scores.float(), classes)
            differentiate(scaler.scale(loss))
        else:
            loss = 30 * cross_entropy(model(words), classes)
            differentiate(lockstep.scale_loss(loss))
        losses.append(loss.item())

    def step() -> None:
        nonlocal skipped
        if by_hand:
            scaler.unscale_(optimizer)
        if way == "clipped":
            losses.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5).nan_to_num(-1, -1, -1).item())
        if by_hand:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
        else:
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(epochs):
        if way == "slices":
            for sliced in loader.steps():
                for words, classes in sliced:
                    backward(words, classes)
                step()
            continue
        batches = list(loader)
        for number, (words, classes) in enumerate(loader, start=1):
            is_last = way != "accumulation" or number % 2 == 0 or number == len(batches)
            with nullcontext() if is_last else lockstep.no_sync(model):
                backward(words, classes)
            if is_last:
                step()
    scale = scaler.get_scale() if by_hand else 1.0
    mine_scale = lockstep.loss_scale()
    if mine_scale is not None:
        scale, skipped = mine_scale.scale, mine_scale.skipped
    state = digest_of((net.state_dict(), optimizer.state_dict()["state"]))
    lockstep.release(model)
    return Trained(state, losses, scale, skipped)


def _all(way: str) -> dict[str, list[Trained]]:
    """Train in each precision, by itself and by hand."""
    lockstep.init(timeout=60)
    found: dict[str, list[Trained]] = {}
    for precision in ("bf16", "fp16"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a step that the loss scale leaves out is no alarm
            warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly")  # said by torch 2.11 on GPUs
            mine = _train(way, precision, by_hand=False)
        found[precision] = [mine, _train(way, precision, by_hand=True)]
    found["full"] = [_train(way, None, by_hand=False)]
    return found


@each_value(on_gpus=True, each_backend=BOTH, way=WAYS, world_size=(3, 2, 1))
def test_bits_are_those_by_hand(each_backend: str, way: str, world_size: int) -> None:
    del each_backend
    ranks = run_ranks(_all, world_size, way)
    for found in ranks:
        for mine, by_hand in (found["bf16"], found["fp16"]):
            assert mine == by_hand
            assert mine.state != found["full"][0].state
        assert found["bf16"][0].scale == 1
        assert found["fp16"][0].skipped > 0
        assert found["fp16"][0].scale == 2.0 ** (16 - found["fp16"][0].skipped)
        assert [each[0].state for each in found.values()] == [each[0].state for each in ranks[0].values()]


def _resumed(folder: str, stop: int | None) -> tuple[int, str, lockstep.LossScale | None]:
    """Train to the end, or stop and save, or go on from there; return at which step it began, and what it came to."""
    lockstep.init()
    model = lockstep.replicate(_words(), precision="fp16")
    optimizer, loader = _optimizer(model, "plain"), _loader("plain")
    saved = lockstep.Checkpointer(folder, model=model, optimizer=optimizer, loader=loader)
    began = None
    for _ in saved.epochs(3):
        began = saved.step if began is None else began
        for words, classes in loader:
            differentiate(lockstep.scale_loss(30 * cross_entropy(model(words), classes)))
            optimizer.step()
            optimizer.zero_grad()
            if saved.step == stop:
                saved.save()
                return began, "", None
    assert began is not None
    return began, digest_of((model.state_dict(), optimizer.state_dict()["state"])), lockstep.loss_scale()


def test_a_resumed_run_has_the_scale_and_the_bits(tmp_path: Path) -> None:
    undisturbed = run_ranks(_resumed, 2, str(tmp_path / "one"), None)
    run_ranks(_resumed, 2, str(tmp_path / "two"), 5)
    resumed = run_ranks(_resumed, 2, str(tmp_path / "two"), None)
    assert undisturbed[0][0] == 0
    assert resumed[0][0] == 5
    assert undisturbed[0][2].skipped > 0
    assert [each[1:] for each in resumed] == [each[1:] for each in undisturbed]


class Holder(nn.Module):
    """Returns what it is told to make of the output of a layer; may fail, or call itself."""

    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.make, self.layer, self.outer = make, nn.Linear(3, 3), True

    def forward(self, x: Tensor) -> Any:
        return self.make(self, self.layer(x))


@dataclass
class Scores:
    """An output with a name."""

    logits: Tensor
    counts: Tensor


def _is_on() -> bool:
    return torch.is_autocast_enabled("cpu")


def _nested(model: Any, out: Tensor) -> Tensor:
    assert _is_on()
    if model.outer:
        model.outer = False
        inner = model(torch.ones(2, 3))
        assert inner.dtype is torch.float32
        assert _is_on()
        model.outer = True
        out = out + inner
    return out


def _raising(error: BaseException) -> Callable[[Any, Tensor], Any]:
    def fail(model: Any, out: Tensor) -> Any:
        del model
        assert out.dtype is torch.bfloat16
        raise error

    return fail


def _make_named(model: object, out: Tensor) -> Any:
    del model
    return {"scores": Scores(out, out.long()), "all": [out, (out.double(), "text")]}


def _dtype(model: object, out: Tensor) -> torch.dtype:
    del model
    return out.dtype


def _forwards() -> None:
    lockstep.init()
    x = torch.ones(2, 3)
    model = lockstep.replicate(Holder(_make_named), precision="bf16")
    found = model(x)
    assert found["scores"].logits.dtype is found["all"][0].dtype is torch.float32
    assert found["scores"].counts.dtype is torch.int64
    assert found["all"][1][0].dtype is torch.float64
    assert found["all"][1][1] == "text"
    with torch.no_grad():
        assert model.eval()(x)["all"][0].dtype is torch.float32
    assert not _is_on()
    for plain in (copy.deepcopy(model), lockstep.release(model)):  # nothing is left in a copy, nor after release
        plain.__dict__["make"] = _dtype
        assert plain(x) is torch.float32
    inner = nn.Linear(3, 3)
    assert pickle.loads(pickle.dumps(lockstep.replicate(inner, precision="bf16")))(x).dtype is torch.float32  # noqa: S301

    model = lockstep.replicate(Holder(_nested), precision="bf16")
    assert model(x).dtype is torch.float32
    assert not _is_on()

    model = lockstep.replicate(Holder(_raising(ValueError("failed"))), precision="bf16")
    with pytest.raises(ValueError, match="failed"):
        model(x)
    assert not _is_on()
    model.make = _raising(KeyboardInterrupt())  # after which torch runs no hooks
    with pytest.raises(KeyboardInterrupt):
        model(x)
    model.make = _nested
    assert model(x).dtype is torch.float32
    assert not _is_on()


def test_autocast_is_around_forward_alone() -> None:
    run_ranks(_forwards, 1)


def _compiled(inside: bool) -> None:
    world = lockstep.init()
    net = _words()
    model: Any
    if inside:
        compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
        model = lockstep.replicate(compiled, precision="fp16")
    else:
        model = torch.compile(lockstep.replicate(net, precision="fp16"), backend="aot_eager")
    words, classes = torch.arange(24).view(4, 6) % 13, torch.arange(4) + world.rank % 2
    scores = model(words)
    assert scores.dtype is torch.float32
    assert torch.equal(scores, scores.half().float())  # autocast was on: they are numbers of float16
    differentiate(lockstep.scale_loss(cross_entropy(scores, classes)))
    found = [param.grad.clone() for param in net.parameters() if param.grad is not None]
    lockstep.release(model)
    net.zero_grad()
    plain = lockstep.replicate(net, precision="fp16")
    loss = cross_entropy(plain(words), classes)
    differentiate(lockstep.scale_loss(loss))
    wanted = [param.grad for param in net.parameters() if param.grad is not None]
    assert len(found) == len(wanted) == 7
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=1e-4)
    assert not _is_on()


@pytest.mark.parametrize("inside", [True, False])
def test_compiled_models_compute_in_low_precision_too(inside: bool) -> None:
    run_ranks(_compiled, 2, inside)


def _backward(model: nn.Module, scale: bool = True) -> None:
    loss = model(torch.ones(2, 3)).square().mean()
    differentiate(lockstep.scale_loss(loss) if scale else loss)


def _largest(grad: Tensor | None) -> float:
    assert grad is not None
    return grad.abs().max().item()


def _scaled() -> None:
    lockstep.init()
    loss = torch.ones((), requires_grad=True)
    assert lockstep.scale_loss(loss) is loss  # no model has a loss scale
    assert lockstep.loss_scale() is None
    with pytest.raises(TypeError, match=r"not torch\.int64"):
        lockstep.scale_loss(torch.tensor(1))

    model = lockstep.replicate(nn.Linear(3, 3), precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert lockstep.loss_scale() == lockstep.LossScale(65536.0, 0)
    half = torch.ones((), dtype=torch.float16)
    assert lockstep.scale_loss(half).item() == 65536  # which float16 does not have
    with pytest.raises(
        lockstep.LockstepError, match=r"rank 0 of 1, step .* loss that was not scaled.*scale_loss\(loss\)"
    ):
        _backward(model, scale=False)
    _backward(model)
    assert model.bias.grad is not None
    grad = model.bias.grad.clone()
    assert 0 < grad.abs().max() < 10
    _backward(model)  # it accumulates
    torch.testing.assert_close(model.bias.grad, 2 * grad)
    with pytest.raises(lockstep.LockstepError, match="not scaled"):  # the backward before is over
        _backward(model, scale=False)
    penalty = lockstep.scale_loss(model.weight.square().sum())  # of parameters alone
    (direct,) = torch.autograd.grad(penalty, model.weight)
    torch.testing.assert_close(direct, 2 * model.weight.detach())

    scale = in_force()
    assert scale is not None
    early = lockstep.scale_loss(model(torch.ones(2, 3)).mean())
    scale.stepped(skipped=True)
    late = lockstep.scale_loss(model(torch.ones(2, 3)).mean())
    with pytest.raises(lockstep.LockstepError, match="scaled by 32768 and by 65536"):
        torch.autograd.backward([early, late])
    optimizer.zero_grad()
    _backward(model)  # and goes on
    torch.testing.assert_close(model.bias.grad, grad)

    head = nn.Linear(3, 1)
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    differentiate(lockstep.scale_loss(head(model(torch.ones(2, 3))).mean()))
    with pytest.raises(
        lockstep.LockstepError, match=r"SGD is about to step 2 parameters .* multiplied by the loss scale"
    ):
        both.step()
    head.zero_grad()
    both.step()

    model.bias.requires_grad_(False)
    frozen = lockstep.release(model)
    assert lockstep.loss_scale() is None
    lockstep.replicate(frozen, precision="fp16")
    assert lockstep.loss_scale() == lockstep.LossScale(65536.0, 0)  # it begins anew
    model.bias.requires_grad_(True)
    model.zero_grad()
    _backward(model)
    assert 0 < _largest(model.bias.grad) < 10
    lockstep.release(model)
    model.zero_grad()
    _backward(model)
    assert 0 < _largest(model.bias.grad) < 10


def test_a_gradient_has_its_true_size_or_there_is_an_error() -> None:
    run_ranks(_scaled, 1)


def _thawed_by_method(precision: Any) -> list[float]:
    """Train a model that is used by another method than forward, and its first layer from the second step on."""
    lockstep.init()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    lockstep.replicate(model, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        if step == 1:
            model[0].requires_grad_(True)
        lockstep.scale_loss(model.forward(torch.ones(2, 3)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    values: list[float] = nn.utils.parameters_to_vector(model.parameters()).tolist()
    return values


def test_layers_unfrozen_in_a_model_that_is_never_called_have_gradients_of_their_true_size() -> None:
    (plain,), (scaled,) = (run_ranks(_thawed_by_method, 1, precision) for precision in (None, "fp16"))
    assert scaled == pytest.approx(plain, rel=1e-5)


class PartlyAveraged(nn.Module):
    """With a bias that the replica leaves to each rank."""

    _ddp_params_and_buffers_to_ignore = ("layer.bias",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def _skips(bad: Iterable[int]) -> list[tuple[int, str]]:
    """Return for each of three steps how many were left out so far, and what the averaged parameters are."""
    world = lockstep.init()
    model = lockstep.replicate(PartlyAveraged(), precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for number in range(3):
        loss = 0.01 * model(torch.ones(2, 3) * (world.rank + 1)).square().mean()
        differentiate(lockstep.scale_loss(loss))
        assert model.layer.bias.grad is not None
        if number in bad and world.rank == 1:
            model.layer.bias.grad[0] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        scale = lockstep.loss_scale()
        assert scale is not None
        found.append((scale.skipped, digest_of((model.layer.weight, *optimizer.state[model.layer.weight].values()))))
    return found


@OVER_BOTH
def test_ranks_skip_together_where_one_alone_has_bad_gradients(each_backend: str) -> None:
    del each_backend
    one, other = run_ranks(_skips, 2, [1])
    assert one == other
    assert [skipped for skipped, _ in one] == [0, 1, 1]
    assert one[0][1] == one[1][1] != one[2][1]


def _always_nan() -> int:
    lockstep.init()
    model = lockstep.replicate(nn.Linear(3, 3), precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(200):
        differentiate(lockstep.scale_loss(model(torch.ones(2, 3)).mean() * float("nan")))
        try:
            optimizer.step()
        except lockstep.NonFiniteGradient as error:
            assert "after 100 steps that were left out" in str(error)  # noqa: PT017
            return number
    return -1


def test_gradients_that_no_scale_makes_finite_are_an_error() -> None:
    assert run_ranks(_always_nan, 2) == [99, 99]


def _refused() -> None:
    lockstep.init()
    with pytest.raises(ValueError, match="precision='fp8': expected 'bf16', 'fp16' or None"):
        lockstep.replicate(nn.Linear(3, 3), precision="fp8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="check_finite='raise' with precision='fp16'"):
        lockstep.replicate(nn.Linear(3, 3), precision="fp16", check_finite="raise")
    with pytest.raises(ValueError, match=r"with LocalSteps: .*bf16"):
        lockstep.replicate(nn.Linear(3, 3), precision="fp16", sync=lockstep.LocalSteps())
    with pytest.raises(ValueError, match=r"parameter 'weight' is float16.*model\.float\(\)"):
        lockstep.replicate(nn.Linear(3, 3).half(), precision="fp16")
    mine: Any = ("bf16", None)[lockstep.world().rank]
    with pytest.raises(lockstep.ReplicaMismatch, match="precision"):
        lockstep.replicate(nn.Linear(3, 3), precision=mine)


def test_what_can_not_be_is_refused_on_all_ranks() -> None:
    run_ranks(_refused, 2)


def _local_steps(precision: Any) -> list[float]:
    world = lockstep.init()
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(3, 3), sync=lockstep.LocalSteps(every=2), precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        with nullcontext() if precision else torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(2, 3) * (world.rank + 1))
        differentiate(out.float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    lockstep.finish_round(model)
    values: list[float] = model.weight.flatten().tolist()
    return values


def test_ranks_that_train_apart_compute_in_bfloat16() -> None:
    found = run_ranks(_local_steps, 2, "bf16")
    assert found == run_ranks(_local_steps, 2, None)
    assert found[0] == found[1]


_SCRIPT = """
import torch, lockstep
from torch import nn

world = lockstep.init()
model = lockstep.replicate(nn.Linear(3, 3), precision="fp16")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(12):
    lockstep.scale_loss(100 * model(torch.ones(2, 3) * (world.rank + 1)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
world.print("left out", lockstep.loss_scale().skipped)
"""


def test_the_summary_counts_the_steps_that_the_loss_scale_has_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True, LOCKSTEP_QUIET="0")
    assert done.code == 0, done.err
    found = re.search(r"left out (\d+)", done.out)
    assert found is not None
    assert int(found[1]) > 1
    told = (
        f"{found[1]} steps left out, since averaged gradients were infinite or NaN: the first was step 1 (with the loss"
    )
    assert f"{told} scale 65,536), the last step {found[1]}\n" in done.err
