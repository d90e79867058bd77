"""DataParallel's replicas after the module has changed: what is carried over, and what stays their own."""

from __future__ import annotations

import copy
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from lockstep import DataParallel

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

TWO = ["cpu", "cpu"]


def batch(size: int = 5) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


def linear(outputs: int = 4) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, outputs))


class Scaled(nn.Module):
    """Uses what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))
        self.shift = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        names = [name for name, _ in (*self.named_parameters(), *self.named_buffers())]
        for name in names:
            x = x * getattr(self, name) if name != "shift" else x + self.shift
        return x


def _without_parameter(net: Any) -> None:
    del net.shift


def _without_buffer(net: Any) -> None:
    del net.mask


def _parameter_becomes_buffer(net: Any) -> None:
    del net.weight
    net.register_buffer("weight", torch.full((4,), 3.0))


def _buffer_becomes_parameter(net: Any) -> None:
    del net.mask
    net.mask = nn.Parameter(torch.full((4,), 5.0))


def _none(net: Any) -> None:
    net.shift = None


def _new_first(net: Any) -> None:
    shift = net.shift
    del net.shift, net.weight
    net.weight = nn.Parameter(torch.full((4,), 7.0))
    net.shift = shift


@pytest.mark.parametrize(
    "change",
    [_without_parameter, _without_buffer, _parameter_becomes_buffer, _buffer_becomes_parameter, _none, _new_first],
)
def test_tensors_that_came_or_went_come_and_go_on_the_replicas(change: Callable[[Any], None]) -> None:
    net = Scaled()
    parallel = DataParallel(net, TWO, output_dim=0)
    parallel(batch())
    change(net)
    torch.testing.assert_close(parallel(batch()), net(batch()))


@pytest.mark.parametrize("add", [parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_parametrization_that_comes_and_goes_changes_the_replicas_class(
    add: Callable[[nn.Module], nn.Module],
) -> None:
    net = linear()
    parallel = DataParallel(net, TWO, output_dim=0)
    parallel(batch())
    add(net[0])
    torch.testing.assert_close(parallel(batch()), net(batch()))
    parallel(batch()).sum().backward()
    assert all(param.grad is not None for param in net.parameters())
    parametrize.remove_parametrizations(net[0], "weight")
    torch.testing.assert_close(parallel(batch()), net(batch()))


def test_pruning_that_comes_and_goes() -> None:
    net = linear()
    parallel = DataParallel(net, TWO, output_dim=0)
    parallel(batch())
    prune.l1_unstructured(net[0], "weight", 0.5)
    torch.testing.assert_close(parallel(batch()), net(batch()))
    prune.remove(net[0], "weight")
    with torch.no_grad():
        net[0].weight.mul_(2)
    torch.testing.assert_close(parallel(batch()), net(batch()))


def test_what_a_forward_builds_on_its_replica_stays_there_when_something_else_is_set() -> None:
    """A table that is built on first use is on the replica's own device, and the first replica's would be of no use."""
    built: list[int] = []
    used: list[tuple[int, int]] = []
    lock = threading.Lock()

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: tuple[int, Tensor] | None = None
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            with lock:
                if self.table is None:
                    built.append(len(x))
                    self.table = (len(x), torch.ones(4))
                used.append((len(x), self.table[0]))
            return x * self.table[1] * self.scale

    net = Table()
    parallel = DataParallel(net, TWO, output_dim=0)
    with pytest.warns(UserWarning, match=r"the forward sets Table\.table"):
        parallel(batch())
    net.eval()
    net.scale = 3.0
    net.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(parallel(batch()), 3 * batch())
    assert sorted(built) == [2, 3]
    assert all(samples == builder for samples, builder in used)
    net.table = None  # set from outside: that is carried over
    parallel(batch())
    assert sorted(built) == [2, 2, 3, 3]


def test_what_a_failed_forward_has_set_stays_where_it_was_set() -> None:
    class Failing(nn.Module):
        seen: int | None = None

        def __init__(self) -> None:
            super().__init__()
            self.fails = True

        def forward(self, x: Tensor) -> Tensor:
            mine, self.seen = self.seen, len(x)
            if self.fails:
                raise ValueError("no good")
            return x * 0 + (mine or 0)

    net = Failing()
    parallel = DataParallel(net, TWO, output_dim=0)
    with pytest.raises(ValueError, match="no good"):
        parallel(batch())
    net.fails = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert parallel(batch())[:, 0].tolist() == [3, 3, 3, 0, 0]  # the second had not begun


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_submodule_has_a_compiled_copy_on_each_replica() -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1] = torch.compile(net[1], backend="eager")
    parallel = DataParallel(net, TWO, output_dim=0)
    for training in (True, False, True):
        net.train(training)
        torch.testing.assert_close(parallel(batch()), net(batch()))
        copied = parallel.__dict__["_forward"]._replicas.module(0, 1)[1]
        assert copied is not net[1]
        assert copied._orig_mod is not net[1]._orig_mod
        assert copied._orig_mod.weight.data_ptr() != net[1]._orig_mod.weight.data_ptr()
        assert copied._orig_mod.training is training
    net[1] = torch.compile(nn.Linear(4, 3), backend="eager")
    torch.testing.assert_close(parallel(batch()), net(batch()))


def test_a_compiled_submodule_that_two_parents_share() -> None:
    torch.manual_seed(0)
    shared: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    net: Any = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    parallel = DataParallel(net, TWO, output_dim=0)
    torch.testing.assert_close(parallel(batch()), net(batch()))
    replica = parallel.__dict__["_forward"]._replicas.module(0, 1)
    assert replica[0][0] is replica[1][0] is not shared


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_buffers_are_copied_when_changed(kind: str) -> None:
    class Graph(nn.Module):
        adjacency: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("adjacency", SPARSE[kind](torch.eye(4).roll(1, 0)))

        def forward(self, x: Tensor) -> Tensor:
            return (self.adjacency @ x.t()).t()

    net: Any = Graph().eval()
    parallel = DataParallel(net, TWO, output_dim=0)
    torch.testing.assert_close(parallel(batch()), net(batch()))
    before = parallel.copies
    assert before.bytes > 4 * 4
    for _ in range(3):
        parallel(batch())
    assert parallel.copies.bytes == before.bytes
    (net.adjacency._values() if kind == "coo" else net.adjacency.values()).mul_(3)  # moves no counter of the whole
    torch.testing.assert_close(parallel(batch()), net(batch()))
    assert parallel.copies.bytes > before.bytes
    net.adjacency = SPARSE[kind](torch.ones(4, 4))
    torch.testing.assert_close(parallel(batch()), net(batch()))
    net.adjacency = torch.eye(4)
    torch.testing.assert_close(parallel(batch()), net(batch()))


# Options --------------------------------------------------------------------------------------------------------------


def test_options_that_are_set_later_are_checked_as_at_the_beginning() -> None:
    net = linear()
    parallel: Any = DataParallel(net, TWO, output_dim=0)
    parallel(batch())
    copied = parallel.copies.bytes
    parallel.chunk_sizes = [4, 1]
    torch.testing.assert_close(parallel(batch()), net(batch()))
    assert parallel.copies.bytes >= copied
    for name, wrong, message in (
        ("chunk_sizes", [1, 2, 3], "3 entries for 2 replicas"),
        ("output_dim", "sum", "output_dim='sum'"),
        ("output_device", 1.5, "expected a device"),
    ):
        before = getattr(parallel, name)
        setattr(parallel, name, wrong)
        with pytest.raises((ValueError, TypeError), match=message):
            parallel(batch())
        setattr(parallel, name, before)
    torch.testing.assert_close(parallel(batch()), net(batch()))
    with pytest.raises(AttributeError):
        parallel.device_ids = ["cpu"]


def test_one_device_is_the_module_as_it_is() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, adjacency: Tensor) -> tuple[Tensor, set[int], Tensor]:
            return x.mean(), {len(x)}, adjacency @ x

    x, adjacency = batch(6), torch.eye(6).to_sparse()
    mean, sizes, product = DataParallel(Odd(), ["cpu"])(x, adjacency)
    assert mean.shape == ()  # as in torch: one value for each replica is for several
    assert sizes == {6}
    torch.testing.assert_close(product, x)
    loss = DataParallel(linear(), ["cpu"], criterion=nn.CrossEntropyLoss(weight=torch.ones(4)))
    assert loss(x, target=torch.zeros(6, dtype=torch.int64)).shape == ()


def test_inputs_that_cannot_be_cut_are_refused() -> None:
    parallel = DataParallel(linear(), TWO)
    with pytest.raises(ValueError, match="a sparse_coo tensor among the inputs can't be cut"):
        parallel(batch().to_sparse())
    with pytest.raises(ValueError, match="a nested tensor among the inputs can't be cut"):
        parallel(torch.nested.as_nested_tensor([batch(2), batch(3)], layout=torch.jagged))


def test_copies_of_a_trained_wrapper_train_on_by_themselves() -> None:
    net = linear(3)
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    target = torch.tensor([0, 1, 2, 0, 1])
    parallel(batch(), target=target).backward()
    twin = copy.deepcopy(parallel)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(batch(), target=target), parallel(batch(), target=target))
    torch.testing.assert_close(parallel(batch(), target=target), F.cross_entropy(net(batch()), target))


def test_no_tensor_or_thread_piles_up_over_many_steps() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.1), nn.Linear(6, 3))
    parallel = DataParallel(net, TWO, criterion=F.cross_entropy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def alive_after(steps: int) -> tuple[int, int]:
        for _ in range(steps):
            optimizer.zero_grad()
            parallel(batch(), target=torch.tensor([0, 1, 2, 0, 1])).backward()
            optimizer.step()
        gc.collect()
        return sum(issubclass(type(each), Tensor) for each in gc.get_objects()), threading.active_count()

    assert alive_after(5) == alive_after(50)
