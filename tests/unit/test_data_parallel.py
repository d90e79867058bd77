"""DataParallel on CPU replicas: the same as the bare module, copied when changed, with errors that say where."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel
from lockstep.data_parallel import data_parallel

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

TWO = ["cpu", "cpu"]


def mlp(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(size: int = 7, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def grads(module: nn.Module) -> list[Tensor]:
    return [param.grad.clone() for param in module.parameters() if param.grad is not None]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


# The same as the bare module ------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(size=st.integers(1, 9), replicas=st.integers(1, 4), with_criterion=st.booleans(), sizes=st.booleans())
def test_outputs_loss_and_gradients_are_those_of_the_module(
    size: int, replicas: int, with_criterion: bool, sizes: bool
) -> None:
    net, bare = mlp(), mlp()
    x, y = batch(size)
    parallel = DataParallel(
        net,
        ["cpu"] * replicas,
        criterion=nn.CrossEntropyLoss() if with_criterion else None,
        chunk_sizes=range(1, replicas + 1) if sizes else None,
        output_dim=0,
    )
    expected = F.cross_entropy(bare(x), y)
    torch.testing.assert_close(parallel(x), bare(x))
    loss = parallel(x, target=y) if with_criterion else F.cross_entropy(parallel(x), y)
    assert loss.shape == ()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_close(grads(net), grads(bare))


def train(step: Callable[[Tensor, Tensor], Tensor], net: nn.Module, steps: int = 6) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    losses = []
    for number in range(steps):
        loss = step(*batch(7 + number % 2, seed=number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_follows_the_same_curve() -> None:
    net, bare, gathered = mlp(), mlp(), mlp()
    with_loss, without = DataParallel(net, ["cpu"] * 3, criterion=F.cross_entropy), DataParallel(gathered, TWO)
    expected = train(lambda x, y: F.cross_entropy(bare(x), y), bare)
    assert train(lambda x, y: with_loss(x, target=y), net) == pytest.approx(expected, rel=1e-5)
    assert train(lambda x, y: F.cross_entropy(without(x), y), gathered) == pytest.approx(expected, rel=1e-5)


def test_training_is_the_same_bits_when_repeated() -> None:
    runs = []
    for _ in range(2):
        net = mlp()
        parallel = DataParallel(net, ["cpu"] * 4, criterion=F.cross_entropy)
        train(lambda x, y, parallel=parallel: parallel(x, target=y), net)  # type: ignore[misc]
        runs.append([param.detach().clone() for param in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_gradients_accumulate_over_several_forwards_and_backwards() -> None:
    net, bare = mlp(), mlp()
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    (x, y), (v, w) = batch(7), batch(4, seed=2)
    (parallel(x, target=y) + parallel(v, target=w)).backward()
    parallel(x, target=y).backward()
    (F.cross_entropy(bare(x), y) * 2 + F.cross_entropy(bare(v), w)).backward()
    assert_close(grads(net), grads(bare))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("output_dim", [None, 1, "mean"])
def test_the_reduction_of_the_criterion_is_respected(reduction: str, output_dim: Any) -> None:
    net = mlp()
    x, y = batch()
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    loss = DataParallel(net, TWO, criterion=criterion, output_dim=output_dim)(x, target=y)
    torch.testing.assert_close(loss, F.cross_entropy(net(x), y, reduction=reduction))


def test_a_criterion_may_return_several_losses() -> None:
    net = mlp()
    x, y = batch()

    def losses(output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"class": F.cross_entropy(output, target), "each": output.square().mean(1)}

    found = DataParallel(net, TWO, criterion=losses)(x, target=y)
    torch.testing.assert_close(found, losses(net(x), y))
    found["class"].backward()
    assert len(grads(net)) == 4


def test_a_recogniser_that_puts_time_first_comes_out_right() -> None:
    class Recogniser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Conv1d(4, 6, 3)
            self.rnn = nn.LSTM(6, 5, bidirectional=True)

        def forward(self, lines: Tensor) -> Tensor:
            out: Tensor = self.rnn(self.features(lines).permute(2, 0, 1))[0]
            return out

    torch.manual_seed(0)
    net = Recogniser()
    lines = torch.randn(6, 4, 13)
    expected = net(lines)
    for output_dim in (None, 1):
        torch.testing.assert_close(DataParallel(net, TWO, output_dim=output_dim)(lines), expected)
    targets, lengths = torch.randint(1, 10, (6, 4)), torch.tensor([1, 4, 2, 3, 1, 4])

    def ctc(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        steps = torch.full((output.shape[1],), output.shape[0])
        return F.ctc_loss(output.log_softmax(2), target[0], steps, target[1])

    ctc(expected, (targets, lengths)).backward()
    wanted = grads(net)
    net.zero_grad()
    DataParallel(net, TWO, criterion=ctc)(lines, target=(targets, lengths)).backward()
    assert_close(grads(net), wanted)


def test_gather_false_leaves_the_outputs_and_one_device_has_one() -> None:
    net = mlp()
    x, _ = batch(5)
    outputs = DataParallel(net, TWO, gather=False)(x)
    assert [tuple(output.shape) for output in outputs] == [(3, 3), (2, 3)]
    assert len(DataParallel(net, ["cpu"], gather=False)(x)) == 1
    torch.testing.assert_close(DataParallel(net, ["cpu"])(x), net(x))


def test_a_module_without_tensors_or_parameters_works() -> None:
    class Constant(nn.Module):
        def forward(self, word: str = "x") -> str:
            return word

    assert DataParallel(Constant(), TWO)() == "x"
    assert DataParallel(Constant(), TWO)("y") == "y"
    assert torch.equal(DataParallel(nn.Flatten(), TWO)(torch.ones(4, 2, 2)), torch.ones(4, 4))


def test_gradients_of_inputs_and_gradients_of_gradients() -> None:
    net, bare = mlp(), mlp()
    x, y = batch()
    for criterion in (None, F.cross_entropy):
        parallel = DataParallel(net, TWO, criterion=criterion)
        results = []
        for module in (parallel, bare):
            leaf = x.clone().requires_grad_()
            params = list((module.module if module is parallel else module).parameters())
            loss = (
                parallel(leaf, target=y)
                if criterion is not None and module is parallel
                else F.cross_entropy(module(leaf), y)
            )
            first = torch.autograd.grad(loss, [leaf, *params], create_graph=True)
            penalty = sum((grad.square().sum() for grad in first), torch.zeros(()))
            results.append([*first, *torch.autograd.grad(penalty, [leaf, *params])])
        assert_close(*results)


def test_gradients_of_gradients_through_backward_threads() -> None:
    net, bare = mlp(), mlp()
    x, y = batch()
    parallel = DataParallel(net, ["cpu"] * 3, criterion=F.cross_entropy)
    results = []
    for module, loss in ((net, parallel(x, target=y)), (bare, F.cross_entropy(bare(x), y))):
        first = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
        sum((grad.square().sum() for grad in first), torch.zeros(())).backward()
        results.append(grads(module))
    assert_close(*results)


def test_a_graph_may_be_kept_and_used_again() -> None:
    net = mlp()
    x, y = batch()
    loss = DataParallel(net, TWO, criterion=F.cross_entropy)(x, target=y)
    loss.backward(retain_graph=True)
    once = grads(net)
    loss.backward()
    assert_close(grads(net), [2 * grad for grad in once])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_shared_frozen_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(5, 5)
            self.again = self.inner
            self.tied = nn.Linear(5, 5)
            self.tied.weight = self.inner.weight
            self.frozen = nn.Linear(5, 3).requires_grad_(False)
            self.unused = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.frozen(self.tied(self.again(self.inner(x))))
            return out

    torch.manual_seed(0)
    net = Tied()
    bare = copy.deepcopy(net)
    x, y = batch()
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    parallel(x, target=y).backward()
    F.cross_entropy(bare(x), y).backward()
    assert net.unused.weight.grad is None
    assert net.frozen.weight.grad is None
    assert_close(grads(net), grads(bare))
    net.frozen.requires_grad_(True)
    parallel(x, target=y).backward()
    assert net.frozen.weight.grad is not None


def test_sparse_gradients_sum() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    bare = copy.deepcopy(net)
    ids, y = torch.randint(0, 9, (6, 2)), torch.randint(0, 3, (6,))
    DataParallel(net, TWO, criterion=F.cross_entropy)(ids, target=y).backward()
    F.cross_entropy(bare(ids), y).backward()
    assert_close([grad.to_dense() for grad in grads(net)], [grad.to_dense() for grad in grads(bare)])


def test_hooks_on_parameters_fire_once_with_the_whole_gradient() -> None:
    net, bare = mlp(), mlp()
    x, y = batch()
    seen: list[Tensor] = []

    def doubled(grad: Tensor) -> Tensor:
        seen.append(grad.clone())
        return grad * 2

    net[0].weight.register_hook(doubled)
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    parallel(x, target=y).backward()
    F.cross_entropy(bare(x), y).backward()
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], bare[0].weight.grad)
    torch.testing.assert_close(net[0].weight.grad, 2 * bare[0].weight.grad)


# Copied when changed --------------------------------------------------------------------------------------------------


def _optimizer_step(net: Any) -> None:
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(net.parameters(), lr=0.1).step()


def _fused_step(net: Any) -> None:
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    torch.optim.SGD(net.parameters(), lr=0.1, fused=True).step()


def _in_place(net: Any) -> None:
    with torch.no_grad():
        net[0].weight.mul_(2)


def _one_element(net: Any) -> None:
    with torch.no_grad():
        net[0].weight[0, 0] = 5


def _through_data(net: Any) -> None:
    net[0].weight.data.mul_(2)


def _one_element_through_data(net: Any) -> None:
    net[2].bias.data[1] = 9.0


def _data_swap(net: Any) -> None:
    net[0].weight.data = torch.randn(8, 5)


def _two_data_swaps(net: Any) -> None:
    # The second may get the address of the first, which nobody holds any more.
    for _ in range(2):
        net[0].weight.data = net[0].weight.data + 1


def _transposed_data(net: Any) -> None:
    square = torch.randn(5, 5)
    net[0] = nn.Linear(5, 8)
    net[0].weight.data = torch.cat([square, square[:3]])


def _reassigned(net: Any) -> None:
    net[0].weight = nn.Parameter(torch.randn(8, 5))


def _state_dict(net: Any) -> None:
    net.load_state_dict(mlp(seed=9).state_dict())


def _state_dict_assigned(net: Any) -> None:
    net.load_state_dict(mlp(seed=9).state_dict(), assign=True)


def _dtype_and_back(net: Any) -> None:
    net.to(torch.float16).to(torch.float32)


def _replaced_submodule(net: Any) -> None:
    net[2] = nn.Linear(8, 3)


def _added_submodule(net: Any) -> None:
    net.append(nn.Linear(3, 3))


def _removed_submodule(net: Any) -> None:
    del net[1]


def _plain_attribute(net: Any) -> None:
    net[1] = nn.Hardtanh()
    net[1].min_val = -0.1


def _numpy(net: Any) -> None:
    net[0].weight.detach().numpy()[0] = 3


CHANGES = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and callable(value) and value.__module__ == __name__
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("grad", [True, False])
def test_every_change_of_the_module_is_noticed_and_nothing_else_is_copied(
    change: Callable[[Any], None], grad: bool
) -> None:
    net = mlp()
    parallel = DataParallel(net, TWO, output_dim=0)
    x, _ = batch()
    with torch.set_grad_enabled(grad):
        parallel(x)
        before = parallel.copies
        parallel(x)
        assert (parallel.copies.tensors, parallel.copies.bytes) == (before.tensors, before.bytes)
    change(net)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(parallel(x), net(x))
        after = parallel.copies
        assert change is _removed_submodule or after.bytes > before.bytes or change is _plain_attribute
        parallel(x)
        assert parallel.copies.bytes == after.bytes
        assert parallel.copies.forwards == after.forwards + 1


def test_copies_are_counted_in_tensors_and_bytes() -> None:
    net = mlp()
    parallel = DataParallel(net, ["cpu"] * 3, output_dim=0)
    assert parallel.copies.bytes == parallel.copies.forwards == 0
    x, _ = batch(9)
    parallel(x)
    total = sum(param.nbytes for param in net.parameters())
    assert (parallel.copies.tensors, parallel.copies.bytes, parallel.copies.refreshes) == (8, 2 * total, 1)
    _in_place(net)
    parallel(x)
    assert (parallel.copies.tensors, parallel.copies.bytes) == (10, 2 * total + 2 * net[0].weight.nbytes)
    with pytest.raises(AttributeError):
        parallel.copies = parallel.copies  # type: ignore[misc]


def test_a_replica_that_was_not_used_catches_up() -> None:
    net = mlp()
    parallel = DataParallel(net, ["cpu"] * 3, output_dim=0)
    parallel(batch(9)[0])
    for _ in range(2):
        _in_place(net)
        for size in (1, 2, 9):
            x, _ = batch(size)
            torch.testing.assert_close(parallel(x), net(x))


def test_without_check_contents_edits_through_data_are_the_callers_to_avoid() -> None:
    net = mlp()
    parallel = DataParallel(net, TWO, check_contents=False)
    x, _ = batch()
    parallel(x)
    _through_data(net)
    assert not torch.allclose(parallel(x), net(x))
    _in_place(net)
    torch.testing.assert_close(parallel(x), net(x))


def test_batch_statistics_are_those_of_the_first_replica_and_evaluation_copies_nothing() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    bare = copy.deepcopy(net)
    x, _ = batch(8)
    parallel = DataParallel(net, TWO)
    for _ in range(3):
        parallel(x)
        bare(x[:4])
    assert_close(list(net.buffers()), list(bare.buffers()))
    for check in (True, False):
        evaluated = DataParallel(net.eval(), TWO, check_contents=check)
        torch.testing.assert_close(evaluated(x), net(x))
        before = evaluated.copies
        for _ in range(3):
            evaluated(x)
        assert evaluated.copies.bytes == before.bytes
        net.train()
        evaluated(x)  # the statistics move inside a kernel, which counts no version
        net.eval()
        torch.testing.assert_close(evaluated(x), net(x))


def test_two_forwards_with_batch_norm_before_one_backward() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    (x, y), (v, w) = batch(8), batch(6, seed=3)
    (parallel(x, target=y) + parallel(v, target=w)).backward()
    assert all(torch.isfinite(grad).all() for grad in grads(net))


def test_a_buffer_that_the_forward_assigns_anew_persists_from_the_first_replica() -> None:
    class Counting(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.total = self.total + x.sum()
            return x * self.total

    net = Counting()
    parallel = DataParallel(net, TWO)
    x = torch.ones(5, 2)
    parallel(x)
    assert net.total.item() == 6
    assert parallel(x).tolist() == [[12, 12]] * 3 + [[10, 10]] * 2


def test_an_edit_between_forward_and_backward_is_the_error_it_is_without_replicas() -> None:
    net = mlp()
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    x, y = batch()
    loss = parallel(x, target=y)
    with torch.no_grad():
        net[2].weight.mul_(2)
    parallel(x, target=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_first_and_training_afterwards() -> None:
    net = mlp()
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    x, y = batch()
    with torch.inference_mode():
        output = parallel(x)
        assert output.is_inference()
    parallel(x, target=y).backward()
    assert len(grads(net)) == 4
    with torch.inference_mode():
        made_here = mlp()
        inside = DataParallel(made_here, TWO)
        inside(x)
        made_here[0].weight.zero_()
        torch.testing.assert_close(inside(x), made_here(x))


# Modules --------------------------------------------------------------------------------------------------------------


def test_training_flags_hooks_and_attributes_set_later_reach_the_replicas() -> None:
    net = mlp()
    net.append(nn.Dropout(0.5))
    parallel = DataParallel(net, TWO)
    x, _ = batch()
    parallel(x)
    parallel.eval()
    torch.testing.assert_close(parallel(x), net(x))
    seen: list[tuple[int, str]] = []
    lock = threading.Lock()

    def note(module: nn.Module, _: Any, output: Tensor) -> None:
        with lock:
            seen.append((len(output), type(module).__name__))

    handle = net[0].register_forward_hook(note)
    parallel(x)
    handle.remove()
    parallel(x)
    assert sorted(seen) == [(3, "Linear"), (4, "Linear")]
    backward: list[int] = []
    net[2].register_full_backward_hook(lambda *args: backward.append(len(args[2][0])))
    parallel(x).sum().backward()
    assert sorted(backward) == [3, 4]


def test_parameters_can_be_listed_inside_the_forward() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 2)
            self.list = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
            self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})

        def forward(self, x: Tensor) -> Tensor:
            assert next(self.parameters()).device == x.device
            assert [name for name, _ in self.named_parameters()][:2] == ["linear.weight", "linear.bias"]
            out: Tensor = self.linear(x) * self.list[0] + self.list[1] * self.table["a"]
            return out

    torch.manual_seed(0)
    net = Looking()
    bare = copy.deepcopy(net)
    x, _ = batch()
    DataParallel(net, TWO)(x).sum().backward()
    bare(x).sum().backward()
    assert_close(grads(net), grads(bare))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True),
        lambda: nn.GRU(5, 4, batch_first=True, bidirectional=True),
        lambda: nn.TransformerEncoderLayer(5, 1, 8, dropout=0.0, batch_first=True),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)),
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)),
    ],
    ids=["lstm", "gru", "transformer", "weight_norm", "orthogonal"],
)
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_keep_their_weights_in_ways_of_their_own(make: Callable[[], nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    net = make().train(training)
    bare = copy.deepcopy(net)
    x = torch.randn(6, 3, 5)

    def out(module: nn.Module) -> Tensor:
        result = module(x)
        first: Tensor = result[0] if isinstance(result, tuple) else result
        return first

    parallel = DataParallel(net, TWO, output_dim=(0, None) if isinstance(net, nn.LSTM | nn.GRU) else 0)
    if isinstance(net, nn.LSTM | nn.GRU):
        parallel = DataParallel(net, TWO, output_dim=(0, 1) if isinstance(net, nn.GRU) else (0, (1, 1)))
    for _ in range(2):
        net.zero_grad()
        bare.zero_grad()
        torch.testing.assert_close(out(parallel), out(bare))
        out(parallel).square().sum().backward()
        out(bare).square().sum().backward()
        assert_close(grads(net), grads(bare))
        for module in (net, bare):
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(0.5)


def test_checkpointed_modules() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.body, self.head, self.use_reentrant = mlp(), nn.Linear(3, 3), use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.use_reentrant)
            out: Tensor = self.head(hidden)
            return out

    x, y = batch()
    for use_reentrant in (True, False):
        torch.manual_seed(0)
        net = Checkpointed(use_reentrant)
        bare = copy.deepcopy(net)
        parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
        loss = parallel(x.clone(), target=y)
        with torch.no_grad():
            parallel(x.clone())  # an evaluation in between must not take the graph's parameters away
        loss.backward()
        F.cross_entropy(bare(x.clone()), y).backward()
        assert_close(grads(net), grads(bare))


def test_parameters_that_no_module_has_registered_get_their_gradients() -> None:
    secret = torch.ones(3, requires_grad=True)

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x) * secret
            return out

    torch.manual_seed(0)
    net = Hidden()
    x, y = batch()
    F.cross_entropy(net(x), y).backward()
    assert secret.grad is not None
    wanted, secret.grad = [*grads(net), secret.grad.clone()], None
    net.zero_grad()
    DataParallel(net, TWO, criterion=F.cross_entropy)(x, target=y).backward()
    assert secret.grad is not None
    assert_close([*grads(net), secret.grad], wanted)


def test_a_criterion_with_parameters_is_replicated_too() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output * self.scale, target)

    net, criterion = mlp(), Scaled()
    x, y = batch()
    criterion(net(x), y).backward()
    wanted = [*grads(net), *grads(criterion)]
    net.zero_grad()
    criterion.zero_grad()
    parallel = DataParallel(net, TWO, criterion=criterion)
    parallel(x, target=y).backward()
    assert_close([*grads(net), *grads(criterion)], wanted)
    assert all(key.startswith("module.") for key in parallel.state_dict())
    assert len(list(parallel.parameters())) == 4


class Remembering(nn.Module):
    """Sets attributes in its forward, one of them for itself."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.calls = self._own = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self._own += 1
        self.last = x
        out: Tensor = self.linear(x)
        return out


def test_a_forward_that_sets_an_attribute_is_warned_about_once_and_keeps_the_first_replicas() -> None:
    net = Remembering()
    parallel = DataParallel(net, TWO)
    x, _ = batch()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            parallel(x)
    assert sorted(str(each.message).split(":")[0] for each in caught) == [
        "the forward sets Remembering.calls",
        "the forward sets Remembering.last",
    ]
    assert net.calls == 3
    assert len(net.last) == 4
    assert caught[0].filename == __file__


@pytest.mark.parametrize("devices", [1, 2])
def test_attributes_are_the_whole_batchs_where_one_replica_had_it_and_nothing_warns(devices: int) -> None:
    net = Remembering()
    parallel = DataParallel(net, ["cpu"] * devices, output_dim=0)
    x, _ = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel(x[:1])
    assert torch.equal(net.last, x[:1])
    net.calls = net._own = 0
    if devices == 2:
        with pytest.warns(UserWarning, match=r"the forward sets Remembering\.(last|calls)") as caught:
            parallel(x)
        assert len(caught) == 2


# The compiler hides this warning when it looks, but not from a filter that makes it an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", ["wrapper", "in place", "outside"])
def test_compiled_modules(way: str) -> None:
    net, bare = mlp(), mlp()
    x, y = batch(8)
    module: nn.Module = net
    if way == "wrapper":
        module = torch.compile(net, backend="eager")  # type: ignore[assignment]
    elif way == "in place":
        net.compile(backend="eager")
    parallel: Any = DataParallel(module, TWO, criterion=F.cross_entropy)
    if way == "outside":
        parallel = torch.compile(parallel, backend="eager")
    told = pytest.warns(UserWarning, match="its replicas run uncompiled") if way == "in place" else nullcontext()
    with told:
        loss = parallel(x, target=y)
    for _ in range(2):
        net.zero_grad()
        bare.zero_grad()
        loss.backward()
        F.cross_entropy(bare(x), y).backward()
        assert_close(grads(net), grads(bare))
        _in_place(net)
        _in_place(bare)
        loss = parallel(x, target=y)
    replica = (parallel._orig_mod if way == "outside" else parallel).__dict__["_forward"]._replicas.module(0, 1)
    inner = replica._orig_mod if way == "wrapper" else replica
    assert inner is not net
    assert inner[0].weight.data_ptr() != net[0].weight.data_ptr()
    assert replica._compiled_call_impl is None
    with torch.no_grad():
        inner[2].bias.copy_(torch.full((3,), 100.0))  # only what runs on this replica sees it
        assert (replica(x) > 50).all()
    prefix = {"wrapper": "module._orig_mod.", "in place": "module.", "outside": "_orig_mod.module."}[way]
    assert next(iter(parallel.state_dict())).startswith(prefix)


# State ----------------------------------------------------------------------------------------------------------------


def test_attributes_set_on_the_wrapper_take_effect() -> None:
    net, other = mlp(), mlp(seed=4)
    parallel = DataParallel(net, TWO, output_dim=0)
    x, _ = batch()
    parallel(x)
    parallel.module = other
    torch.testing.assert_close(parallel(x), other(x))
    parallel.gather = False
    assert len(parallel(x)) == 2
    parallel.chunk_sizes = (6, 1)
    assert [len(output) for output in parallel(x)] == [6, 1]


def test_state_dict_pickle_and_copies_are_as_in_torch() -> None:
    net = mlp()
    parallel = DataParallel(net, TWO, criterion=nn.CrossEntropyLoss())
    x, y = batch()
    loss = parallel(x, target=y)
    assert parallel.module is net
    assert list(parallel.state_dict()) == [f"module.{key}" for key in net.state_dict()]
    for other in (copy.deepcopy(parallel), pickle.loads(pickle.dumps(parallel))):  # noqa: S301
        assert other.copies.bytes == 0
        torch.testing.assert_close(other(x, target=y), loss)
        other(x, target=y).backward()
        assert len(grads(other)) == 4
    assert grads(net) == []
    parallel.load_state_dict(DataParallel(mlp(seed=5), TWO).state_dict())
    torch.testing.assert_close(parallel(x), mlp(seed=5)(x))


def test_everything_goes_when_the_last_name_goes() -> None:
    gc.collect()
    gc.disable()
    try:
        net = mlp()
        parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
        x, y = batch()
        for _ in range(2):
            loss = parallel(x, target=y)
            loss.backward()
        replica = weakref.ref(parallel.__dict__["_forward"]._replicas.module(0, 1))
        del loss
        gone = weakref.ref(net[0].weight)
        del parallel, net
        assert replica() is None
        assert gone() is None
    finally:
        gc.enable()


def test_the_functional_form() -> None:
    net = mlp()
    x, _ = batch()
    torch.testing.assert_close(data_parallel(net, x, TWO), net(x))
    torch.testing.assert_close(data_parallel(net, (x,), TWO, "cpu", 0, {}), net(x))
    assert data_parallel(net, x).shape == (7, 3)


def test_without_an_accelerator_the_module_runs_as_it_is() -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    net = mlp()
    x, y = batch()
    parallel = DataParallel(net, criterion=F.cross_entropy)
    assert parallel.device_ids == []
    assert torch.equal(parallel(x), net(x))
    assert torch.equal(parallel(x, target=y), F.cross_entropy(net(x), y))
    assert len(DataParallel(net, gather=False)(x)) == 1


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_parameter_on_another_device_is_named() -> None:
    net = mlp()
    parallel = DataParallel(net, TWO)
    net[2].to("meta")
    with pytest.raises(RuntimeError, match=r"'module\.2\.weight' is on meta, but .* on cpu \(device_ids\[0\]\)"):
        parallel(batch()[0])


def test_modules_that_cannot_be_replicated_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'module\.0' has lazy parameters.*run one batch"):
        DataParallel(nn.Sequential(nn.LazyLinear(3)), TWO)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not function"):
        DataParallel(lambda x: x, TWO)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="criterion must be callable"):
        DataParallel(mlp(), TWO, criterion="mse")  # type: ignore[arg-type]


def test_a_target_that_is_not_named_is_explained() -> None:
    x, y = batch()
    with pytest.raises(TypeError, match=r"model\(inputs, target=labels\)"):
        DataParallel(mlp(), TWO, criterion=F.cross_entropy)(x, y)
