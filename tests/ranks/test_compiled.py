"""What torch.compile, torch.func and torch.export make of a replica: one process's numbers, or an error in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, which sets an environment variable
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import lockstep
from tests.harness import run_ranks
from tests.ranks.ddp_cases import assert_averaged, averages, batch, differentiate, gradients, mlp, squares

Compile = Callable[..., Any]


class Checkpointed(nn.Module):
    """Under both kinds of activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.net[1:3].forward, self.net[0](x), use_reentrant=True)
        scores: Tensor = self.net[4](checkpoint(self.net[3].forward, x, use_reentrant=False))
        return scores


class PartlyUsed(nn.Module):
    """With batch norms, and a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = normalised(), nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores


def normalised() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def _tiny(model: nn.Module) -> nn.Module:
    """Buckets that are averaged while backward goes on."""
    return lockstep.replicate(model, first_bucket_mb=1e-5, bucket_cap_mb=3e-4, overlap=True)


def _off_by(
    model: nn.Module,
    *,
    build: Callable[[], nn.Module] = mlp,
    step: Callable[[Callable[[Tensor], None]], Callable[[Tensor], None]] = lambda plain: plain,
    samples: tuple[int, ...] = (4, 4, 4),
) -> float:
    """How far the parameters come from those of one process on the batches of all ranks, after some steps."""
    world, alone = lockstep.world(), build()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.3) for each in (model, alone)]

    def plain(inputs: Tensor) -> None:
        differentiate(model(inputs).square().mean())

    run = step(plain)
    for number, count in enumerate(samples):
        for optimizer in optimizers:
            optimizer.zero_grad()
        run(batch(world.rank, number, count, 5))
        whole = torch.cat([batch(rank, number, count, 5) for rank in range(world.world_size)])
        differentiate(alone(whole).square().mean())
        for optimizer in optimizers:
            optimizer.step()
    return _distance([*model.parameters()], [*alone.parameters()])


def _in_place(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(**options)
    return model


def _regional(model: nn.Sequential, compiled: Compile) -> nn.Sequential:
    for number in (0, 2):
        model[number] = compiled(model[number])
    return model


def _as_it_is(what: Any) -> Any:
    return what


def _with_optimizer(compiled: Compile) -> float:
    """The whole step in what is compiled, no_sync and optimizer too; how far it comes from the same that is not."""
    world, results = lockstep.world(), []
    for wrap in (compiled, _as_it_is):
        model = lockstep.replicate(mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

        def step(inputs: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            with lockstep.no_sync(model):
                differentiate(model(inputs[:2]).square().mean() / 2)
            differentiate(model(inputs[2:]).square().mean() / 2)
            optimizer.step()

        run = wrap(step)
        for number in range(3):
            run(batch(world.rank, number, 4, 5))
        results.append([*model.parameters()])
    return _distance(*results)


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(one, other, strict=True))


def _in_half_precision(compiled: Compile) -> float:
    """Under autocast, with a GradScaler; how far it comes from the same that is not compiled."""
    world, results = lockstep.world(), []
    for wrap in (compiled, _as_it_is):
        model = lockstep.replicate(mlp(torch.float32))
        run = wrap(model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.3), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(batch(world.rank, number, 4, 5, dtype=torch.float32)).float().square().mean()
            differentiate(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
        results.append([*model.parameters()])
    return _distance(*results)


def _compiled_cases(chosen: Sequence[str] | None) -> dict[str, float]:
    """How far the chosen cases are off, or all others than _COMMON."""
    lockstep.init()
    replicate, wrap = lockstep.replicate, lockstep.DistributedDataParallel
    compiled: Compile = lambda what: torch.compile(what, backend="aot_eager")  # noqa: E731
    in_one: Compile = lambda what: torch.compile(what, backend="aot_eager", fullgraph=True)  # noqa: E731
    cases: dict[str, Callable[[], float]] = {
        "step": lambda: _off_by(_tiny(mlp()), step=compiled),
        "step with no_sync and optimizer": lambda: _with_optimizer(compiled),
        "step, checkpoints": lambda: _off_by(replicate(Checkpointed()), build=Checkpointed, step=compiled),
        "step, batch norms, spare parameters": lambda: _off_by(
            replicate(lockstep.convert_sync_batchnorm(PartlyUsed()), find_unused_parameters=True),
            build=PartlyUsed,
            step=compiled,
        ),
        "replicate, compile": lambda: _off_by(compiled(replicate(mlp()))),
        "compile in one graph, replicate": lambda: _off_by(replicate(in_one(mlp()))),
        "replicate, compile in place": lambda: _off_by(_in_place(replicate(mlp()), backend="aot_eager")),
        "wrap, compile": lambda: _off_by(compiled(wrap(mlp()))),
        "layers": lambda: _off_by(replicate(_regional(mlp(), compiled))),
        "half precision": lambda: _in_half_precision(compiled),
    }
    results = {}
    for name in chosen or [name for name in cases if name not in _COMMON]:
        torch._dynamo.reset()
        results[name] = cases[name]()
    return results


#: What every run of the tests compiles: around a replica, with its backward, and inside of one.
_COMMON = ("step", "compile in one graph, replicate")


@pytest.mark.parametrize(
    "chosen", [pytest.param(_COMMON, id="common"), pytest.param(None, id="others", marks=pytest.mark.campaign)]
)
def test_whatever_is_compiled_trains_as_one_process_does(chosen: Sequence[str] | None) -> None:
    for results in run_ranks(_compiled_cases, 2, chosen, timeout=110):
        assert {name: off for name, off in results.items() if not off < (1e-3 if "half" in name else 1e-12)} == {}


def _one_graph() -> str:
    lockstep.init()
    compiled = torch.compile(lockstep.replicate(mlp()), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported) as refused:
        compiled(batch(0, 0, 4, 5))
    return str(refused.value)


def test_one_graph_around_a_replica_is_refused_with_what_to_do() -> None:
    (message,) = run_ranks(_one_graph, 1)
    assert "lockstep.replicate(torch.compile(model, fullgraph=True))" in message


# With a compiler in C++ ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


def _inductor_cases(cache: str, chosen: Sequence[str]) -> dict[str, float]:
    from torch._inductor import config

    config.compile_threads = 1  # no pool of workers for each rank
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", cache)
        lockstep.init()
        compiled: Compile = torch.compile
        cases: dict[str, Callable[[], float]] = {
            "step": lambda: _off_by(lockstep.replicate(mlp()), step=compiled),
            "replicate, compile for any number of samples": lambda: _off_by(
                compiled(lockstep.replicate(mlp()), dynamic=True),
                samples=(4, 2, 6, 3),
            ),
            "compile, replicate": lambda: _off_by(lockstep.replicate(compiled(mlp()))),
            "layers": lambda: _off_by(lockstep.replicate(_regional(mlp(), compiled))),
            "reduce-overhead": lambda: _off_by(compiled(lockstep.replicate(mlp()), mode="reduce-overhead")),
        }
        results = {name: cases[name]() for name in chosen}
        assert torch._dynamo.utils.counters["inductor"], "nothing was compiled"
        return results


@pytest.mark.campaign  # every run of the tests has what is traced around replicas, without the compiler behind it
@pytest.mark.internals  # run on other versions of torch and Python, too
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(["step", "replicate, compile for any number of samples"], id="common"),
        pytest.param(["compile, replicate", "layers", "reduce-overhead"], id="others"),
    ],
)
def test_inductor_compiles_replicas(compile_cache: str, chosen: list[str]) -> None:
    for results in run_ranks(_inductor_cases, 2, compile_cache, chosen, timeout=400):
        assert {name: off for name, off in results.items() if not off < 1e-12} == {}


# Compiled autograd --------------------------------------------------------------------------------------------------


@contextmanager
def _by_config() -> Iterator[None]:
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield


def _by_hand() -> AbstractContextManager[None]:
    return compiled_autograd._enable(_as_it_is)  # recorded and not compiled, which would take seconds


def _compiled_autograd() -> list[str]:
    world = lockstep.init(timeout=20)
    model, messages = lockstep.replicate(mlp()), []

    def step(number: int) -> None:
        differentiate(squares(model, world.rank, number))

    for switched_on, is_for_compiled in ((_by_config, True), (_by_hand, False)):
        with switched_on():
            run = torch.compile(step, backend="aot_eager") if is_for_compiled else step
            with pytest.raises(lockstep.LockstepError) as refused:
                run(0)
        messages.append(str(refused.value))
    model.zero_grad()
    differentiate(squares(model, world.rank, 1))
    assert_averaged(model, mlp, squares, [1])
    with _by_hand():
        threads = lockstep.DataParallel(mlp(), ["cpu", "cpu"])
        differentiate(squares(threads, 0, 0))
    expected = averages(mlp, squares, 1, [0])
    assert all(torch.allclose(got, expected[name]) for name, got in gradients(threads).items())  # type: ignore[arg-type]
    return messages


def test_compiled_autograd_is_refused_on_all_ranks() -> None:
    for rank, messages in enumerate(run_ranks(_compiled_autograd, 2)):
        assert len(messages) == 2
        for message in messages:
            assert message.startswith(f"rank {rank} of 2: compiled autograd runs this backward")
            assert "torch._dynamo.config.compiled_autograd" in message


def _traced_backward() -> None:
    lockstep.init()
    with (
        torch._dynamo.config.patch(trace_autograd_ops=True),
        pytest.raises(lockstep.LockstepError, match="trace_autograd_ops is on"),
    ):
        lockstep.replicate(mlp())


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch has no such switch")
def test_a_switch_that_leaves_out_backwards_is_refused() -> None:
    run_ranks(_traced_backward, 1)


# torch.func and torch.export ----------------------------------------------------------------------------------------


def _loss_with(model: nn.Module, params: Mapping[str, Tensor], rank: int, step: int) -> Tensor:
    loss: Tensor = functional_call(model, dict(params), (batch(rank, step, 4, 5),)).square().mean()
    return loss


def _own(model: nn.Module, rank: int, step: int) -> Tensor:
    return _loss_with(model, dict(model.named_parameters()), rank, step)


def _inner_step(model: nn.Module, rank: int, step: int) -> Tensor:
    """What MAML does: an inner step, and a loss whose gradient goes through it to the module's own parameters."""
    own = dict(model.named_parameters())
    slopes = torch.autograd.grad(_loss_with(model, own, rank, step), [*own.values()], create_graph=True)
    fast = {name: param - 0.1 * slope for (name, param), slope in zip(own.items(), slopes, strict=True)}
    return _loss_with(model, fast, rank, step + 100)


def _penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs = batch(rank, step, 4, 5)
    slopes: Tensor = grad(lambda values: model(values).sum())(inputs)
    loss: Tensor = slopes.square().sum() + model(inputs).square().mean()
    return loss


def _functional() -> list[str]:
    world = lockstep.init(timeout=20)
    model, alone = lockstep.replicate(mlp()), mlp()
    copies = {name: param.detach().clone() for name, param in model.named_parameters()}
    inputs = batch(world.rank, 0, 4, 5)

    def results(module: nn.Module) -> list[Tensor]:
        def loss(params: dict[str, Tensor], sample: Tensor) -> Tensor:
            value: Tensor = functional_call(module, params, (sample,)).square().mean()
            return value

        each = vmap(grad(loss), (None, 0))(copies, inputs)
        slope = jvp(lambda params: loss(params, inputs), (copies,), (copies,))[1]
        exported = [torch.export.export(module, (inputs,), strict=strict).module()(inputs) for strict in (False, True)]
        return [*each.values(), slope, *exported]

    for _ in range(2):
        for got, expected in zip(results(model), results(alone), strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    for step, loss in enumerate((_own, _inner_step, _penalty) * 2):
        model.zero_grad()
        differentiate(loss(model, world.rank, step))
        assert_averaged(model, mlp, loss, [step])

    # Of tensors that are not the module's own: this rank's, and said once.
    leaves = {name: value.requires_grad_() for name, value in copies.items()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            differentiate(_loss_with(model, leaves, world.rank, step))
    for step in range(3):
        differentiate(squares(alone, world.rank, step))
    for name, value in alone.named_parameters():
        assert torch.allclose(leaves[name].grad, value.grad, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]

    # Buffers are not sent for a function's sake, so that one rank may do this alone.
    module = mlp()
    module.register_buffer("counter", torch.zeros(1))
    lockstep.replicate(module)
    if world.is_main:
        grad(lambda params: _loss_with(module, params, 0, 0))(copies)
    model.zero_grad()
    differentiate(squares(model, world.rank, 9))
    assert_averaged(model, mlp, squares, [9])
    return [str(warning.message) for warning in told]


def test_functions_of_a_replica_are_right_where_gradients_reach_its_own_parameters() -> None:
    for rank, told in enumerate(run_ranks(_functional, 2)):
        assert len(told) == 1, told
        assert told[0].startswith(f"rank {rank} of 2: this backward gives gradients to tensors that replaced")


# Replaced parameters ------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def _written(model: Any) -> None:
    model[2]._parameters["weight"] = nn.Parameter(torch.ones(2, 4))


def _moved(model: Any) -> None:
    model.to("meta")


def _part_converted(model: Any) -> None:
    model[2] = model[2].double()
    model[1] = Cast()


def _grown(model: Any) -> None:
    head = nn.Sequential()
    model[2] = nn.Sequential(model[2], head)  # nothing new in it yet
    model[2][1].append(nn.Linear(2, 2))


def _replaced(model: Any) -> None:
    model[2] = nn.Linear(4, 2)


_CHANGES: dict[Callable[[Any], None], str] = {
    _written: "parameter '2.weight' was added or replaced",
    _moved: "parameter '0.weight' was added or replaced",
    _part_converted: "parameter '2.weight' was torch.float32 and is torch.float64: it was converted",
    _grown: "parameter '2.1.0.weight' was added or replaced",
    _replaced: "parameter '2.weight' was added or replaced",
}


def _small() -> Any:
    return nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 2))


def _changed_between_steps() -> dict[str, str]:
    world, messages = lockstep.init(timeout=20), {}
    for change in _CHANGES:
        model: Any = lockstep.replicate(_small())
        inputs = torch.full((2, 4), float(world.rank + 1))
        for _ in range(3):
            differentiate(model(inputs).sum())
        change(model)
        with torch.no_grad():
            model(inputs.to(model[0].weight.device))  # nothing is trained, so nothing is wrong
        with pytest.raises(lockstep.LockstepError) as found:
            differentiate(model(inputs.to(model[0].weight.device)).sum())
        messages[change.__name__] = str(found.value)
    model = lockstep.replicate(_small())
    head = model[2]
    model[2] = nn.Linear(4, 2)
    model[2] = head
    differentiate(model(torch.full((2, 4), float(world.rank + 1))).sum())
    assert model[2].weight.grad.norm() > 0
    messages["restored"] = str(model[2].weight.grad.tolist())
    return messages


def test_changed_parameters_are_found_at_once_on_all_ranks() -> None:
    results = run_ranks(_changed_between_steps, 2)
    assert len({messages["restored"] for messages in results}) == 1
    for rank, messages in enumerate(results):
        for change, text in _CHANGES.items():
            assert messages[change.__name__].startswith(f"rank {rank} of 2: {text} after replicate"), messages
