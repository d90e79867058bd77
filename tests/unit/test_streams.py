"""A rank's own stretches of random numbers: how they begin and end, without ranks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lockstep import _torch
from lockstep.step.streams import RandomStreams


class Holder:
    pass


@pytest.fixture
def streams() -> Iterator[RandomStreams]:
    torch.manual_seed(4)
    of_rank_1 = RandomStreams(rank=1, world_size=2)
    yield of_rank_1
    of_rank_1.leave_all()


def _next() -> float:
    return torch.rand(()).item()


def test_a_stretch_ends_where_the_common_stream_stands(streams: RandomStreams) -> None:
    torch.empty((), dtype=torch.int64).random_()  # what a stretch takes
    after_one = _next()
    torch.manual_seed(4)
    loader, module = Holder(), Holder()
    streams.renew(loader)
    state = streams.state
    drawn = [_next()]
    streams.enter(module, draws=True)  # nothing new: a stretch is under way
    streams.leave(module)
    drawn.append(_next())
    assert torch.equal(streams.state, state), "the common stream waits"
    streams.finish(loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert _next() == after_one
    assert after_one not in drawn
    torch.manual_seed(4)
    streams.renew(loader)
    assert [_next(), _next()] == drawn, "from the common stream follows all else"
    streams.state = state
    streams.finish(loader)
    assert _next() == after_one


def test_who_goes_without_a_word_holds_nothing(streams: RandomStreams) -> None:
    lost, loader = Holder(), Holder()
    streams.enter(lost, draws=True)
    del lost
    gc.collect()
    streams.renew(loader)
    streams.finish(loader)
    assert torch.equal(torch.get_rng_state(), streams.state)
    before = streams.state
    streams.finish(loader)
    assert torch.equal(torch.get_rng_state(), before)
    lost, module = Holder(), Holder()
    streams.enter(lost, draws=True)
    common = streams.state
    del lost
    gc.collect()
    streams.enter(module, draws=False)
    assert torch.equal(torch.get_rng_state(), common)


def test_the_outermost_call_of_a_module_ends_its_stretch(streams: RandomStreams) -> None:
    module = Holder()
    before = torch.get_rng_state()
    streams.enter(module, draws=False)
    streams.leave(module)
    assert torch.equal(torch.get_rng_state(), before), "in evaluation nothing is drawn"
    streams.enter(module, draws=True)
    streams.enter(module, draws=False)  # a part of it in evaluation
    common = streams.state
    streams.leave(module)
    assert not torch.equal(torch.get_rng_state(), common)
    streams.leave(module)
    assert torch.equal(torch.get_rng_state(), common)


def test_where_nothing_is_drawn_no_stretch_begins(streams: RandomStreams) -> None:
    plain = _torch.runs_plainly()
    seen = []

    def look(inputs: torch.Tensor) -> torch.Tensor:
        streams.enter(look, draws=True)
        seen.append(plain())
        return inputs * 2

    before = torch.get_rng_state()
    torch.func.vmap(look)(torch.ones(3))
    with FakeTensorMode():
        look(torch.ones(3))
    assert seen == [False] * 2
    assert torch.equal(torch.get_rng_state(), before)
    assert plain()
    with torch.inference_mode():
        streams.enter(look, draws=True)
        streams.leave(look)
    assert not torch.equal(torch.get_rng_state(), before)


def _in_a_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_a_loader_opens_a_stretch_on_the_thread_that_trains() -> None:
    """The one that called ``init``, or the main one; any other reads ahead."""
    stretches = []

    def train(streams: RandomStreams) -> None:
        loader, common = Holder(), torch.get_rng_state()
        streams.renew(loader)
        stretches.append(not torch.equal(torch.get_rng_state(), common))
        streams.leave_all()

    made_here = RandomStreams(rank=1, world_size=2)
    train(made_here)
    _in_a_thread(lambda: train(made_here))
    _in_a_thread(lambda: train(RandomStreams(rank=1, world_size=2)))
    assert stretches == [True, False, True]


def test_of_several_threads_the_one_that_began_a_stretch_ends_it(streams: RandomStreams) -> None:
    module = Holder()

    def forward() -> None:
        streams.enter(module, draws=True)
        streams.leave(module)

    streams.enter(module, draws=True)
    common = streams.state
    _in_a_thread(forward)
    assert not torch.equal(torch.get_rng_state(), common)
    streams.leave(module)
    assert torch.equal(torch.get_rng_state(), common)


def test_threads_that_enter_at_once_begin_one_stretch(streams: RandomStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is let in while the first is about to begin."""
    module, begin, common = Holder(), streams._begin, torch.get_rng_state()
    second = threading.Thread(target=lambda: streams.enter(module, draws=True))
    begun = []

    def slow() -> None:
        begun.append(threading.current_thread())
        if len(begun) == 1:
            second.start()
            second.join(0.2)  # it waits for us, or is through
        begin()

    monkeypatch.setattr(streams, "_begin", slow)
    streams.enter(module, draws=True)
    second.join()
    assert begun == [threading.main_thread()]
    streams.leave(module)
    torch.set_rng_state(common)
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), streams.state)


def test_a_forward_that_was_interrupted_ends_with_the_next_batch(streams: RandomStreams) -> None:
    module, loader = Holder(), Holder()
    streams.enter(module, draws=True)  # and a KeyboardInterrupt
    streams.renew(loader)
    streams.finish(loader)
    assert torch.equal(torch.get_rng_state(), streams.state)
