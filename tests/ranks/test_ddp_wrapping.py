"""What can be wrapped and what can't, what a wrapper shows of itself, and how to undo it."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import lockstep
from lockstep.ddp.api import replica_of
from tests.harness import run_ranks
from tests.launching import run
from tests.ranks.ddp_cases import Attach, assert_averaged, batch, differentiate, local_gradients, mlp, squares


def _with_buffer(buffer: Tensor) -> Any:
    model = mlp()
    model.register_buffer("extra", buffer)
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(3, 3)


def _in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def _as_module(value: Any) -> nn.Module:
    """What torch types as something else."""
    module: nn.Module = value
    return module


def _refused() -> None:
    """Each on all ranks, before anything is sent: the next one finds the group as it was."""
    world = lockstep.init(timeout=20)
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    gloo = dist.new_group(backend="gloo")
    mesh = DeviceMesh.from_group(gloo, "cpu")
    linear = nn.Linear(4, 4)
    cases: list[tuple[Callable[[], nn.Module], str]] = [
        (
            lambda: nn.Sequential(_as_module(fully_shard(nn.Linear(4, 4), mesh=mesh))),
            r"'0' is sharded \(FSDP2\): it averages",
        ),
        (
            lambda: FullyShardedDataParallel(nn.Linear(4, 4), gloo, device_id=torch.device("cpu")),
            "is a FullyShardedDataParallel: it averages",
        ),
        (
            lambda: nn.Sequential(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())),
            r"'0.weight' is a DTensor: tensor parallelism .*fully_shard\(model, mesh=mesh\['dp'\]\)",
        ),
        (_on_meta, r"'weight' is on the meta device.*to_empty"),
        (lambda: torch.jit.script(linear), "is TorchScript.*wrap it in lockstep.DistributedDataParallel"),
        (lambda: torch.jit.trace(linear, torch.ones(2, 4)), "is TorchScript"),
        (
            lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=gloo),
            "is torch's DistributedDataParallel.*pass its .module",
        ),
        (_in_inference_mode, "'weight' was made under torch.inference_mode"),
        (lambda: _with_buffer(torch.eye(4).to_sparse()), "buffer 'extra' has layout.*pass broadcast_buffers=False"),
        (lambda: _on_meta() if world.rank == 1 else nn.Linear(3, 3), "'weight' is on the meta device"),
    ]
    for build, text in cases:
        model = build()
        with pytest.raises(ValueError, match=text):
            lockstep.replicate(model)
    if world.rank == 0:
        with pytest.raises(
            ValueError, match="rank 1 has a model that can't be a replica: parameter 'weight' is on the"
        ):
            lockstep.DistributedDataParallel(nn.Linear(3, 3))
    else:
        with pytest.raises(ValueError, match="'weight' is on the meta device"):
            lockstep.DistributedDataParallel(_on_meta())

    # Sparse buffers stay each rank's own, and TorchScript can be wrapped.
    sparse = lockstep.replicate(_with_buffer(torch.eye(4).to_sparse()), broadcast_buffers=False)
    differentiate(squares(sparse, world.rank, 0))
    assert_averaged(sparse, mlp, squares, [0])
    scripted = lockstep.DistributedDataParallel(torch.jit.script(mlp()))
    differentiate(squares(scripted, world.rank, 0))
    assert_averaged(scripted, mlp, squares, [0])


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_a_replica_is_refused_on_every_rank_with_what_to_do_instead() -> None:
    run_ranks(_refused, 2)


def _tables() -> nn.Module:
    torch.manual_seed(4)
    words = nn.Embedding(9, 3, max_norm=0.5, dtype=torch.float64)
    return nn.Sequential(words, nn.Flatten(), nn.Linear(6, 2, dtype=torch.float64))


def _rescaled_in_forward() -> None:
    world = lockstep.init(timeout=20)
    bag = nn.Sequential(nn.EmbeddingBag(9, 3, max_norm=2.0, norm_type=1.0))
    for attach in (lockstep.replicate, lockstep.DistributedDataParallel):
        with pytest.raises(ValueError, match=r"'0' has max_norm=0.5: .*layer.weight.renorm_\(2, 0, 0.5\)"):
            attach(_tables())
        with pytest.raises(ValueError, match=r"get_submodule\('0'\).*renorm_\(1, 0, 2\)"):
            attach(bag)
    # One that no replica holds, and replicas that may differ.
    ignoring = _tables()
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]
    lockstep.replicate(ignoring)
    lockstep.replicate(_tables(), compare_every=None)
    lockstep.replicate(_tables(), sync=lockstep.LocalSteps())

    # What the error says to do: the steps of one process.
    models = [_tables(), _tables()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    for model in models:
        layer = model.get_submodule("0")
        assert isinstance(layer, nn.Embedding)
        layer.max_norm = None
    lockstep.replicate(models[0], compare_every=1)
    for step in range(5):
        parts = [(batch(rank, step, 4, 2).abs() * 4).long().clamp(max=8) for rank in range(world.world_size)]
        for model, optimizer, words in zip(models, optimizers, (parts[world.rank], torch.cat(parts)), strict=True):
            optimizer.zero_grad()
            differentiate(model(words).square().mean())
            optimizer.step()
            with torch.no_grad():
                model.get_parameter("0.weight").renorm_(2, 0, 0.5)
        for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.allclose(own, other, rtol=1e-10, atol=1e-12)


def test_embeddings_that_rescale_rows_of_their_own_samples_are_refused() -> None:
    run_ranks(_rescaled_in_forward, 2)


def _rescaled_alone() -> None:
    lockstep.init()
    model = lockstep.replicate(_tables())
    differentiate(model(torch.tensor([[1, 2]])).square().mean())
    assert float(model.get_parameter("0.weight").norm(dim=1).max()) > 0.5  # (the rows that were not looked up)


def test_one_rank_may_rescale_rows_in_its_forwards() -> None:
    run_ranks(_rescaled_alone, 1)


def _ignored() -> None:
    world = lockstep.init(timeout=20)
    attaches: list[Attach] = [lockstep.replicate, lockstep.DistributedDataParallel]
    for attach in attaches:
        model: Any = mlp()
        shape = (world.rank + 1, 2)  # a part of a table that is spread over the ranks
        model.table = nn.Parameter(torch.full(shape, float(world.rank)))
        model.register_buffer("mine", torch.full(shape, float(world.rank)))
        lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["table", "mine"])
        assert model._ddp_params_and_buffers_to_ignore == ["table", "mine"]
        replica = attach(model)
        for step in range(2):
            model.zero_grad()
            differentiate(squares(replica, world.rank, step) + model.table.sum() * (world.rank + 1))
            assert torch.equal(model.table.grad, torch.full(shape, world.rank + 1.0))
            table, model.table = model.table, None
            del model._parameters["table"]
            assert_averaged(model, mlp, squares, [step])
            model.table = table
        assert torch.equal(model.table, torch.full(shape, float(world.rank)))
        assert torch.equal(model.mine, torch.full(shape, float(world.rank)))


def test_what_a_module_names_is_left_alone() -> None:
    run_ranks(_ignored, 2)


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:lockstep")


def _released() -> None:
    world = lockstep.init("shm", timeout=20)
    before = _mapped()
    model: Any = lockstep.replicate(mlp())
    differentiate(squares(model, world.rank, 0))
    averages = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    loss = squares(model, world.rank, 1)
    assert lockstep.release(model) is model
    with pytest.raises(lockstep.LockstepError, match="goes through a forward of a replica that was released"):
        differentiate(loss)
    world.all_reduce(1)
    assert _mapped() == before, "the buckets' memory is still there"
    grads: list[Any] = [param.grad for param in model.parameters()]
    assert all(torch.equal(grad, was) for grad, was in zip(grads, averages, strict=True))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match="is not a replica"):
        lockstep.release(model)

    def alone(net: nn.Module) -> None:
        net.zero_grad()
        differentiate(squares(net, world.rank, 2))
        mine = local_gradients(mlp, squares, world.rank, [2])
        for name, param in net.named_parameters():
            grad: Any = param.grad
            assert torch.equal(grad, mine[name])  # type: ignore[arg-type]

    alone(model)
    attaches: list[Attach] = [lockstep.DistributedDataParallel, lockstep.replicate]
    for attach in attaches:
        wrapped = attach(model)
        model.zero_grad()
        differentiate(squares(wrapped, world.rank, 3))
        assert_averaged(model, mlp, squares, [3])
        assert lockstep.release(wrapped) is model
        if wrapped is not model:
            with pytest.raises(lockstep.LockstepError, match="this Sequential was released"):
                wrapped(batch(0, 0, 4, 5))
    alone(model)

    # A wrapper that nobody uses any more leaves a plain module, even if it lies in a cycle.
    for cycle in (False, True):
        wrapped = lockstep.DistributedDataParallel(model)
        model.zero_grad()
        differentiate(squares(wrapped, world.rank, 4))
        assert_averaged(model, mlp, squares, [4])
        if cycle:
            wrapped.trainer = type("Trainer", (), {"wrapped": wrapped})()
        gone = weakref.ref(wrapped)
        del wrapped
        assert (gone() is None) == (not cycle)
        if not cycle:
            alone(model)
    wrapped = lockstep.DistributedDataParallel(model)
    model.zero_grad()
    differentiate(squares(wrapped, world.rank, 5))
    assert_averaged(model, mlp, squares, [5])
    with pytest.raises(ValueError, match=r"belongs to a replica already: lockstep\.release\(model\) makes it a plain"):
        lockstep.replicate(model)
    del wrapped
    gc.collect()

    def inside(_: Tensor) -> None:
        with pytest.raises(lockstep.LockstepError, match="release was called inside a backward"):
            lockstep.release(model)

    model = lockstep.replicate(model)
    model[4].weight.register_hook(inside)
    differentiate(squares(model, world.rank, 6))
    assert_averaged(model, mlp, squares, [5, 6])


def test_a_released_module_is_a_plain_one_and_can_be_wrapped_again() -> None:
    run_ranks(_released, 2)


def _as_scripts_use_it() -> None:
    world = lockstep.init(timeout=20)
    net = _with_buffer(torch.full((2,), float(world.rank)))
    model = lockstep.DistributedDataParallel(net, None, None, 0, True, True, None, 1)  # init_sync is the sixth
    assert model.process_group is dist.group.WORLD
    assert model.require_backward_grad_sync
    assert model.require_forward_param_sync
    assert model.broadcast_buffers
    assert model.will_sync_module_buffers()
    assert model.device == torch.device("cpu")
    assert model.parameters_to_ignore == set()

    # nanoGPT's way of accumulating.
    for micro_step in range(3):
        model.require_backward_grad_sync = micro_step == 2
        differentiate(squares(model, world.rank, micro_step))
    assert_averaged(model, mlp, squares, [0, 1, 2])

    net.extra.fill_(world.rank + 1.0)
    model.require_forward_param_sync = False
    assert not model.will_sync_module_buffers()
    differentiate(squares(model, world.rank, 3))
    assert net.extra.tolist() == [world.rank + 1.0] * 2
    model._sync_buffers()
    assert net.extra.tolist() == [1.0] * 2
    with torch.no_grad():
        net[0].weight.fill_(world.rank)
    model._sync_params_and_buffers()
    assert float(net[0].weight.sum()) == 0

    model._set_static_graph()
    assert model.static_graph
    model._set_ddp_runtime_logging_sample_rate(10)
    model._register_builtin_comm_hook(torch._C._distributed_c10d.BuiltinCommHookType.FP16_COMPRESS)
    logged = model._get_ddp_logging_data()
    theirs = nn.parallel.DistributedDataParallel(mlp(), process_group=dist.new_group(backend="gloo"))
    known = set(theirs._get_ddp_logging_data())
    assert {"world_size", "rank", "module_name", "bucket_sizes", "dtypes", "broadcast_buffers"} <= set(logged)
    assert set(logged) - known <= {"comm_hook", "can_set_static_graph"}  # those that torch adds later
    assert (logged["world_size"], logged["rank"], logged["comm_hook"]) == (2, world.rank, "fp16_compress_hook")
    for name, text in (("reducer", "leave out what touches it"), ("logger", "_get_ddp_logging_data"), ("nothing", "")):
        with pytest.raises(AttributeError, match=f"'{name}'.*{text}"):
            getattr(model, name)


def _arguments() -> None:
    world = lockstep.init(timeout=20)
    mesh = init_device_mesh("cpu", (world.world_size,))
    whole: dict[str, Any] = {
        "device_mesh": mesh,
        "skip_all_reduce_unused_params": True,
        "bucket_cap_mb_list": [1e-4, 3e-4],
        "batched_grad_copy": True,
        "lazy_bucket_allocation": True,
        "static_graph": True,
        "overlap": True,
    }
    net: Any = mlp()
    model = lockstep.DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("4.bias", net[4].bias)],
        param_to_hook_all_reduce=net[0].weight,
        **whole,
    )
    assert len(replica_of(model).reducer.buckets) > 2
    for step in range(2):
        model.zero_grad()
        differentiate(squares(model, world.rank, step))
        assert_averaged(model, mlp, squares, [step])
    # Buffers are sent at construction, and not later.
    other = _with_buffer(torch.full((2,), float(world.rank)))
    model = lockstep.DistributedDataParallel(other, forward_sync_buffers=False)
    assert other.extra.tolist() == [0.0] * 2
    assert not model.broadcast_buffers
    for wrong, text in (
        ({"mixed_precision": object()}, "compute in low precision with precision="),
        ({"device_mesh": mesh, "process_group": dist.group.WORLD}, "pass one of them"),
        ({"device_mesh": init_device_mesh("cpu", (1, world.world_size))}, r"expected one dimension.*mesh\['dp'\]"),
        ({"param_to_hook_all_reduce": net[0].weight}, "pass both or neither"),
    ):
        with pytest.raises(ValueError, match=text):
            lockstep.DistributedDataParallel(mlp(), **wrong)


def _replicated_with(arguments: dict[str, Any]) -> None:
    lockstep.init(timeout=20)
    lockstep.replicate(mlp(), **arguments)


def test_replicate_says_of_each_argument_of_torchs_class_what_becomes_of_it() -> None:
    replicate: Any = lockstep.replicate
    torchs = {*inspect.signature(nn.parallel.DistributedDataParallel).parameters} - {"module"}
    taken = {*inspect.signature(lockstep.replicate).parameters}
    for name in sorted(torchs - taken):
        with pytest.raises(TypeError, match=f"no argument '{name}', which torch's DistributedDataParallel takes: "):
            replicate(mlp(), **{name: None})
    assert torchs & taken == {
        "broadcast_buffers",
        "bucket_cap_mb",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "init_sync",
        "process_group",
    }
    with pytest.raises(TypeError, match=r"no argument 'brodcast_buffers'$"):
        replicate(mlp(), brodcast_buffers=True)
    run_ranks(_replicated_with, 2, {"find_unused_parameters": True, "gradient_as_bucket_view": False})


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (
            "model.module.state_dict()",
            "'Linear' object has no attribute 'module': lockstep.replicate returns the model",
        ),
        ("model.no_sync()", "'Linear' object has no attribute 'no_sync': accumulate within lockstep.no_sync(model)"),
        ("model.modul", "'Linear' object has no attribute 'modul'. Did you mean: "),
        ("torch.nn.Linear(1, 1).module", "'Linear' object has no attribute 'module'. Did you mean: "),
    ],
)
def test_what_torchs_wrapper_has_and_a_replica_has_not_is_explained(tmp_path: Path, use: str, words: str) -> None:
    text = f"import torch, lockstep\nlockstep.init()\nmodel = lockstep.replicate(torch.nn.Linear(2, 1))\n{use}\n"
    (tmp_path / "train.py").write_text(text)
    done = run(["lockstep", "run", "-n", "2", "train.py"], tmp_path, torch=True)
    assert done.code == 1, done
    assert words in done.err
    assert not hasattr(nn.Linear(2, 1), "module")


def test_what_scripts_and_libraries_touch_of_torchs_class_is_there_or_says_why_not() -> None:
    run_ranks(_as_scripts_use_it, 2)


def test_torchs_arguments_are_done_or_refused_in_words() -> None:
    run_ranks(_arguments, 2)


def _inside_torchs_own() -> None:
    """Torch's wrappers don't tell the module that they wrap, so it is the first forward that refuses."""
    lockstep.init("gloo", timeout=20)
    inputs = batch(0, 0, 4, 5)
    for whole in (lambda model: model, lambda model: nn.Sequential(model, nn.Linear(3, 1).double())):
        wrapped = nn.parallel.DistributedDataParallel(whole(lockstep.replicate(mlp())))
        with pytest.raises(lockstep.LockstepError, match="inside torch's DistributedDataParallel, and both would"):
            wrapped(inputs)
    copied: Any = lockstep.replicate(mlp())
    with pytest.raises(lockstep.LockstepError, match="inside torch's DataParallel, and both would"):
        copied._replicate_for_data_parallel()(inputs)
    # A replica that torch's module only calls, and one that was released, are nobody's part.
    teacher = lockstep.replicate(mlp())

    class Student(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            scores: Tensor = super().forward(inputs) - teacher(inputs)
            return scores

    for model in (Student(5, 3).double(), lockstep.release(lockstep.replicate(mlp()))):
        nn.parallel.DistributedDataParallel(model)(inputs).sum().backward()


def test_a_replica_is_refused_inside_torchs_own_wrappers() -> None:
    run_ranks(_inside_torchs_own, 2)
