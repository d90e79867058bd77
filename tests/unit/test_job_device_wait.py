"""What a rank's page says of a device that is still in the latest backward, on a device whose clock the test holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.job import device, device_wait, flight
from lockstep.job.page import Pages, Phase
from tests.devices import Stream, own_page


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[Pages]:
    with own_page(tmp_path) as pages:
        yield pages


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def watch(pages: Pages, stream: Stream) -> Iterator[device_wait.DeviceWatch]:  # noqa: ARG001
    latest = device_wait.LatestBackward(stream)
    device.watch(stream, backward_ended=latest.mark)
    watch = device_wait.DeviceWatch(latest, every=3600.0)  # the test looks itself
    yield watch
    watch.close()


def _backward(stream: Stream) -> None:
    flight.current.enter(Phase.BACKWARD)
    stream.queued += 10
    flight.current.leave(Phase.BACKWARD)


def _looks_twice(watch: device_wait.DeviceWatch) -> None:
    watch.look()
    watch.look()


def test_a_page_that_stands_still_says_whether_the_device_is_in_the_latest_backward(
    pages: Pages, stream: Stream, watch: device_wait.DeviceWatch
) -> None:
    _backward(stream)
    watch.look()
    assert not pages.look(1).on_device, "the rank has moved since the look before"
    watch.look()
    assert pages.look(1).on_device
    assert pages.look(1).waits
    assert not pages.look(0).on_device, "a page of which nothing is known"
    stream.done = stream.queued
    watch.look()
    assert not pages.look(1).on_device


def test_the_next_event_of_the_page_ends_it_without_a_look(
    pages: Pages, stream: Stream, watch: device_wait.DeviceWatch
) -> None:
    _backward(stream)
    _looks_twice(watch)
    flight.current.enter(Phase.OPTIMIZER)
    assert not pages.look(1).on_device


def test_what_comes_after_the_latest_backward_is_no_wait(
    pages: Pages, stream: Stream, watch: device_wait.DeviceWatch
) -> None:
    _backward(stream)
    stream.done = stream.queued
    stream.queued += 1000
    _looks_twice(watch)
    assert not pages.look(1).on_device
    _backward(stream)
    _looks_twice(watch)
    assert pages.look(1).on_device, "the same event, in another place of the stream"


def test_a_captured_backward_records_nothing_and_is_not_asked_for(
    pages: Pages, stream: Stream, watch: device_wait.DeviceWatch
) -> None:
    _backward(stream)
    stream.captures = True
    _backward(stream)
    _looks_twice(watch)
    assert not pages.look(1).on_device


@pytest.mark.usefixtures("watch")
def test_a_step_makes_no_event_and_records_one(stream: Stream) -> None:
    made, recorded = stream.made, stream.recorded
    for _ in range(device.EVERY - 1):
        _backward(stream)
        flight.current.took_step()
    assert stream.made == made
    assert stream.recorded == recorded + device.EVERY - 1
