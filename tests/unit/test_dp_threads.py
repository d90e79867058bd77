"""DataParallel's threads: who runs where, under which modes, with which random numbers, and what errors say."""

from __future__ import annotations

import contextvars
import gc
import itertools
import os
import signal
import sys
import threading
import time
import warnings
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lockstep import DataParallel, accelerator
from lockstep.data_parallel import threads
from lockstep.data_parallel.rng import Draws
from lockstep.data_parallel.threads import Location, Modes, run_replicas
from tests.launching import LIMIT

TWO = ["cpu", "cpu"]


class Probe(nn.Module):
    """Calls a function on each forward and backward, under a lock, with the number of samples."""

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls = (forward, backward)
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        forward, backward = self.calls
        if forward is not None:
            with self.lock:
                forward(len(x))
        if backward is not None and out.requires_grad:
            size = len(x)
            out.register_hook(lambda _: backward(size))
        return out


def batch(size: int = 5) -> Tensor:
    return torch.arange(3.0 * size).reshape(size, 3) / 10


# Threads --------------------------------------------------------------------------------------------------------------


def test_replicas_run_side_by_side_and_autograd_uses_the_callers_thread() -> None:
    # With two parties each waits for the other: one after the other, neither would get past it.
    barriers = [threading.Barrier(1)]
    threads: dict[str, set[str]] = {"forward": set(), "backward": set()}

    def meet(kind: str) -> None:
        threads[kind].add(threading.current_thread().name)
        if kind == "forward":
            barriers[-1].wait(timeout=LIMIT)

    class Meeting(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            met: Tensor = _Meet.apply(value, meet)  # type: ignore[no-untyped-call]
            return met

    parallel = DataParallel(nn.Sequential(nn.Linear(3, 3), Meeting()), TWO, criterion=F.mse_loss)
    x, y = batch(), torch.ones(5, 3)
    parallel(x, target=y)  # the first forward runs in turn, to see whether random numbers are drawn
    barriers.append(threading.Barrier(2))
    parallel(x, target=y).backward()
    mine = threading.current_thread().name
    assert threads == {"forward": {mine, "lockstep replica 1 of 2 on cpu"}, "backward": {mine}}


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, meet: Any) -> Tensor:
        ctx.meet = meet
        meet("forward")
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.meet("backward")
        return grad, None


def test_modes_of_the_caller_hold_in_every_replica() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="none")
    seen: list[tuple[Any, ...]] = []

    def look(_: int) -> None:
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_autocast_cache_enabled(),
                word.get(),
            )
        )

    parallel = DataParallel(Probe(look), ["cpu"] * 3)
    word.set("said")
    with torch.no_grad():
        parallel(batch())
    with torch.inference_mode():
        assert parallel(batch()).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        assert parallel(batch()).dtype == torch.bfloat16
    parallel(batch())
    base = torch.get_autocast_dtype("cpu")
    assert seen == [
        *[(False, False, False, base, True, "said")] * 3,
        *[(False, True, False, base, True, "said")] * 3,
        *[(True, False, True, torch.bfloat16, False, "said")] * 3,
        *[(True, False, False, base, True, "said")] * 3,
    ]


def test_autocast_trains_as_the_module_does() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    parallel = DataParallel(net, TWO, criterion=F.mse_loss)
    x, y = batch(), torch.ones(5, 3)
    results = []
    for loss_of in (lambda: parallel(x, target=y), lambda: F.mse_loss(net(x), y)):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of()
        loss.backward()
        results.append([param.grad.clone() for param in net.parameters() if param.grad is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


# Errors ---------------------------------------------------------------------------------------------------------------


class Particular(Exception):
    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


@pytest.mark.parametrize("size", [3, 2], ids=["first", "second"])
def test_an_error_says_which_replica_and_keeps_its_type_and_attributes(size: int) -> None:
    def fail(found: int) -> None:
        if found == size:
            raise Particular("no good", code=7)

    parallel = DataParallel(Probe(fail), TWO)
    replica = 0 if size == 3 else 1
    for _ in range(2):  # in turn, and side by side
        with pytest.raises(Particular, match=rf"^no good \(in replica {replica} of 2 on cpu\)$") as caught:
            parallel(batch())
        assert caught.value.code == 7
        assert any(frame.name == "fail" for frame in caught.traceback)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep")]


def test_errors_without_a_text_get_a_note() -> None:
    def fail(_: int) -> None:
        raise KeyError("name")

    with pytest.raises(KeyError) as caught:
        DataParallel(Probe(fail), TWO)(batch())
    assert caught.value.args == ("name",)
    assert getattr(caught.value, "__notes__", ["(in replica 0 of 2 on cpu)"]) == ["(in replica 0 of 2 on cpu)"]


def test_an_error_in_a_backward_reaches_the_caller() -> None:
    def fail(size: int) -> None:
        if size == 2:
            raise ValueError("bad gradient")

    parallel = DataParallel(Probe(backward=fail), TWO, criterion=F.mse_loss)
    for _ in range(2):
        loss = parallel(batch(), target=torch.ones(5, 3))
        with pytest.raises(ValueError, match="bad gradient"):
            loss.backward()


def test_a_ctrl_c_is_raised_when_the_other_replicas_have_ended() -> None:
    goes_on, ended = threading.Event(), threading.Event()

    def interrupt(size: int) -> None:
        if size == 2:
            threading.Timer(0.3, goes_on.set).start()
            os.kill(os.getpid(), signal.SIGINT)  # it reaches the main thread, which waits for this one
            goes_on.wait(timeout=LIMIT)
            ended.set()

    probe = Probe()
    parallel = DataParallel(probe, TWO, criterion=F.mse_loss)
    before = torch.get_num_threads()
    for _ in range(2):
        probe.calls = (None, None)
        parallel(batch(), target=torch.ones(5, 3))
        probe.calls = (interrupt, None)
        goes_on.clear()
        ended.clear()
        with pytest.raises(KeyboardInterrupt):
            parallel(batch(), target=torch.ones(5, 3)).backward()
        gc.collect()
        assert ended.is_set()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep")]
        assert torch.get_num_threads() == before


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_ctrl_c_at_any_place_where_threads_are_started_loses_none(in_turn: bool) -> None:
    begun: list[int] = []
    ended: list[int] = []

    def work() -> None:
        begun.append(1)
        time.sleep(0.02)
        ended.append(1)

    calls, locations = [lambda: None, work, work], [Location(n, 3, torch.device("cpu")) for n in range(3)]
    before = torch.get_num_threads()
    for place in itertools.count():
        places = itertools.count()

        def interrupt(frame: FrameType, _event: str, _: Any, place: int = place, places: Any = places) -> Any:
            code = frame.f_code
            starts = code.co_filename == threads.__file__ and code.co_name in ("__init__", "start")
            if starts and next(places) == place:
                raise KeyboardInterrupt
            return interrupt

        traced = sys.gettrace()
        sys.settrace(interrupt)
        try:
            run_replicas(calls, locations, Modes.of_this_thread("cpu", sharing=3), in_turn=in_turn)
            break  # it has no more places
        except KeyboardInterrupt:
            there = (len(begun), len(ended))
        finally:
            sys.settrace(traced)
        for thread in threading.enumerate():
            if thread.name.startswith("lockstep"):
                thread.join()
        assert (len(begun), len(ended)) == there, f"a replica has worked on, place {place}"
        assert torch.get_num_threads() == before
    assert place > 20
    assert len(begun) == len(ended) > 2


def test_a_backward_inside_a_backward_loses_no_gradient() -> None:
    """As reversible layers do it: their backward runs the forward again, and backward through that."""
    lent: list[int] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, inner: nn.Module) -> Tensor:
            ctx.inner = inner
            ctx.save_for_backward(x)
            out: Tensor = inner(x).detach()
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
            lent.append(1)
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.inner(x)
            torch.autograd.backward(out, grad)
            return x.grad, None

    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.after(Again.apply(self.before(x), self.inner))  # type: ignore[no-untyped-call]
            return out

    torch.manual_seed(0)
    net = Reversible()
    F.mse_loss(net(batch()), torch.ones(5, 3)).backward()
    wanted = [param.grad for param in net.parameters()]
    parallel = DataParallel(net, TWO, criterion=F.mse_loss)
    for _ in range(2):  # forwards in turn, and side by side
        net.zero_grad()
        loss = parallel(batch(), target=torch.ones(5, 3))
        loss.backward()
        for param, each in zip(net.parameters(), wanted, strict=True):
            torch.testing.assert_close(param.grad, each)
    assert len(lent) == 5


def test_after_an_error_the_next_forward_works() -> None:
    fails = [True]

    def fail(size: int) -> None:
        if fails and size == 2:
            fails.clear()
            raise ValueError("once")

    probe = Probe(fail)
    parallel = DataParallel(probe, TWO)
    with pytest.raises(ValueError, match="once"):
        parallel(batch())
    torch.testing.assert_close(parallel(batch()), probe.linear(batch()))


# Random numbers -------------------------------------------------------------------------------------------------------


def dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))


@pytest.mark.parametrize("make", [dropout, lambda: nn.LSTM(3, 16, num_layers=3, dropout=0.5, batch_first=True)])
def test_dropout_differs_between_replicas_and_is_repeated_by_the_seed(make: Any) -> None:
    net = make()
    parallel = DataParallel(net, ["cpu"] * 3, gather=False)
    row = batch(1).expand(6, 3) if isinstance(net, nn.Sequential) else batch(4).expand(6, 4, 3)

    def run() -> list[Tensor]:
        torch.manual_seed(5)
        outputs = [out[0] if isinstance(out, tuple) else out for _ in range(3) for out in parallel(row)]
        return [output.detach().clone() for output in outputs]

    first = run()
    for _ in range(3):
        assert all(torch.equal(one, other) for one, other in zip(first, run(), strict=True))
    for i, one in enumerate(first):
        for other in first[:i]:
            assert not torch.equal(one, other)


def test_the_callers_random_numbers_are_those_after_the_first_replica() -> None:
    net = dropout()
    torch.manual_seed(3)
    net(batch(3))
    wanted = torch.rand(4)
    torch.manual_seed(3)
    DataParallel(net, TWO)(batch(6))
    assert torch.equal(torch.rand(4), wanted)
    before = torch.get_rng_state()
    DataParallel(nn.Linear(3, 3), TWO)
    quiet = DataParallel(net.eval(), TWO)
    after = torch.get_rng_state()
    quiet(batch())
    quiet(batch())
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(before, after)


def test_drawing_after_all_is_warned_about_once_and_repeatable_from_then_on() -> None:
    class Sometimes(nn.Module):
        draws = False

        def __init__(self) -> None:
            super().__init__()
            self.settings = {"draws": False}

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x) if self.settings["draws"] else x

    net = Sometimes()
    parallel = DataParallel(net, TWO, output_dim=0)
    parallel(batch())
    parallel(batch())
    net.settings["draws"] = True
    with pytest.warns(UserWarning, match="drew random numbers") as caught:
        parallel(batch())
    assert caught[0].filename == __file__
    torch.manual_seed(1)
    one = parallel(batch())
    torch.manual_seed(1)
    assert torch.equal(one, parallel(batch()))


def test_checkpointed_dropout_sees_the_same_masks_in_the_backward() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.5), nn.Linear(32, 3))

        def forward(self, x: Tensor, checkpointed: bool) -> Tensor:
            out: Tensor = checkpoint(self.inner, x, use_reentrant=False) if checkpointed else self.inner(x)
            return out

    torch.manual_seed(0)
    net = Body()
    parallel = DataParallel(net, TWO, criterion=F.mse_loss)
    results = []
    for checkpointed in (True, False):
        net.zero_grad()
        for seed in (2, 3):
            torch.manual_seed(seed)
            loss = parallel(batch(), checkpointed, target=torch.ones(5, 3))
            state = torch.get_rng_state()
            loss.backward()
            assert torch.equal(torch.get_rng_state(), state)
        results.append([param.grad.clone() for param in net.parameters() if param.grad is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_are_the_same_in_every_repetition() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 3))
    parallel = DataParallel(net, ["cpu"] * 4, criterion=F.mse_loss)
    x, y = torch.randn(9, 3), torch.randn(9, 3)
    results = []
    for _ in range(10):
        net.zero_grad()
        parallel(x, target=y).backward()
        results.append(torch.cat([param.grad.flatten() for param in net.parameters() if param.grad is not None]))
    assert all(torch.equal(results[0], other) for other in results)


def test_several_threads_may_call_one_wrapper() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    parallel = DataParallel(net, TWO, output_dim=0)
    inputs = [torch.randn(5, 3) for _ in range(8)]
    outputs: dict[int, Tensor] = {}

    def call(index: int) -> None:
        outputs[index] = parallel(inputs[index])

    callers = [threading.Thread(target=call, args=(index,)) for index in range(8)]
    with warnings.catch_warnings():
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    for index, x in enumerate(inputs):
        torch.testing.assert_close(outputs[index], net(x))


def test_a_replica_on_a_gpu_draws_other_numbers_on_the_cpu_in_each_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a model that never draws on the GPU, whose generator stands still."""
    monkeypatch.setattr(accelerator, "rng_state", lambda _: torch.zeros(16, dtype=torch.uint8))
    first, draws = torch.device("cpu"), Draws()
    seeds = []
    for _ in range(3):
        turn = draws.begin((True,), first)
        seeds.append(turn.seed(1))
        torch.rand(())
        draws.end(turn)
    assert len(set(seeds)) == 3
