"""What a rank's time goes to on its GPU: on a device whose clock the test holds, and on a real one if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.job import device, flight
from lockstep.job.account import Progress
from lockstep.job.page import Cell, Pages, Phase
from lockstep.job.summary import RunSummary, Summary
from tests.device import simulation
from tests.devices import Stream, own_page

_STEPS = 3 * device.EVERY


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    with own_page(tmp_path) as pages:
        yield pages


def _step(stream: Stream) -> None:
    """Ten milliseconds of forward, twenty of backward with two of reduce in it, five of optimizer."""
    flight.current.enter(Phase.FORWARD)
    stream.queued += 10
    flight.current.enter(Phase.BACKWARD)
    stream.queued += 15
    flight.current.enter(Phase.REDUCE)
    stream.queued += 2
    flight.current.resume(Phase.BACKWARD, after=Phase.REDUCE)
    stream.queued += 5
    flight.current.leave(Phase.BACKWARD)
    flight.current.enter(Phase.OPTIMIZER)
    stream.queued += 5
    flight.current.took_step()


def test_phases_have_the_devices_time_of_some_steps(pages: Pages) -> None:
    stream = Stream()
    device.watch(stream)
    device.watch(stream)
    flight.current.count()
    for _ in range(_STEPS):
        _step(stream)
        stream.done = stream.queued
    spent = pages.device_spent(1)
    timed = spent[Phase.FORWARD] / 0.010
    assert timed == 2.0, "of the first EVERY steps none, of the next two times EVERY one each, but the last is not read"
    wanted = {Phase.FORWARD: 0.02, Phase.BACKWARD: 0.04, Phase.REDUCE: 0.004, Phase.OPTIMIZER: 0.01}
    assert spent == [wanted.get(phase, 0.0) for phase in Phase]
    assert (pages.get(1, Cell.DEVICE_MEMORY), pages.get(1, Cell.DEVICE_SIZE)) == (3 << 30, 80 << 30)
    assert pages.get(1, Cell.STEPS) == _STEPS + 1, "and the page says all that it says without a device"
    assert stream.made <= 2 * 7, "events are used again"


def test_a_device_that_is_behind_is_not_waited_for(pages: Pages) -> None:
    stream = Stream()
    device.watch(stream)
    for _ in range(20 * device.EVERY):
        _step(stream)
    assert sum(pages.device_spent(1)) == 0
    made = stream.made
    assert made <= 5 * 7, "only so many steps are under way"
    stream.done = stream.queued
    for _ in range(device.EVERY):
        _step(stream)
    assert pages.device_spent(1)[Phase.FORWARD] == pytest.approx(4 * 0.010)


def test_nothing_is_recorded_while_a_graph_is_captured(pages: Pages) -> None:
    stream = Stream()
    device.watch(stream)
    for step in range(_STEPS):
        stream.captures = step % 2 == 0
        _step(stream)
        stream.done = stream.queued
    assert sum(pages.device_spent(1)) == 0
    assert stream.made == 1, "the one before the capture began"


def test_the_summary_says_it() -> None:
    seconds = [0.0] * len(Phase)
    seconds[Phase.FORWARD], seconds[Phase.OWN] = 2.0, 18.0
    spent = [0.0] * len(Phase)
    spent[Phase.FORWARD], spent[Phase.BACKWARD] = 0.3, 0.7
    rank = Progress(1000, tuple(seconds), device=tuple(spent), device_memory=(3 << 30, 80 << 30))
    summary = Summary(20.0, 1000, {0: rank, 1: rank}, here=range(2), taken=1000, world_size=2)
    line = "on the GPUs: forward 30%, backward 70%; at most 3 GiB of 80 GiB a rank"
    assert RunSummary((summary,)).describe({}).splitlines()[2] == line
    assert RunSummary((summary,)).to_json({})["ranks"]["1"]["device"]["backward"] == 0.7
    uncounted = replace(rank, device_memory=(0, 80 << 30))  # as of an allocator that keeps no count
    summary = Summary(20.0, 1000, {0: uncounted}, here=range(1), taken=1000, world_size=1)
    assert RunSummary((summary,)).describe({}).splitlines()[2] == "on the GPUs: forward 30%, backward 70%"


@pytest.mark.gpu
def test_a_gpu(pages: Pages) -> None:
    from lockstep.comm.gpu import Gpu

    device.watch(Gpu(torch.device("cuda", torch.cuda.current_device())))
    size = 64 if simulation.is_on() else 4096  # a simulated kernel takes the same time whatever it computes
    a = torch.randn(size, size, device="cuda")
    torch.cuda.synchronize()
    with simulation.refused_waits():
        for _ in range(_STEPS):
            flight.current.enter(Phase.FORWARD)
            b = a @ a
            flight.current.enter(Phase.BACKWARD)
            b = b @ a @ a @ a
            flight.current.took_step()
    torch.cuda.synchronize()
    for _ in range(device.EVERY):
        flight.current.took_step()
    spent = pages.device_spent(1)
    assert spent[Phase.BACKWARD] / spent[Phase.FORWARD] == pytest.approx(3.0, rel=0.2)
    assert pages.get(1, Cell.DEVICE_MEMORY) >= 2 * 4 * size**2


@pytest.mark.gpu
def test_a_graph_may_be_captured_in_any_step(pages: Pages) -> None:
    from lockstep.comm.gpu import Gpu

    device.watch(Gpu(torch.device("cuda", torch.cuda.current_device())))
    a = torch.ones(8, device="cuda")

    def one_step() -> None:
        flight.current.enter(Phase.FORWARD)
        a.add_(1)
        flight.current.took_step()

    for _ in range(device.EVERY + 2):  # a timed step is on its way
        one_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(device.EVERY):
            one_step()
    graph.replay()
    assert a.tolist() == [1.0 + 2 * device.EVERY + 2] * 8
    for _ in range(device.EVERY):
        one_step()
    assert pages.device_spent(1)[Phase.FORWARD] > 0
