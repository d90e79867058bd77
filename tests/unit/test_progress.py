"""Progress: plain lines where there is no terminal, a bar where there is one."""

from __future__ import annotations

import io
import os
import pty

import pytest
import torch

import lockstep


def test_plain_lines_name_the_count_the_rate_and_the_numbers() -> None:
    out = io.StringIO()
    bar = lockstep.track([10, 20, 30], "epoch 1", file=out)
    for item in bar:
        bar.show(loss=torch.tensor(item / 8), step=item)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("epoch 1  3/3  ")
    assert "it/s" in line
    assert line.endswith("loss 3.75  step 30")


def test_an_abandoned_loop_says_how_far_it_came() -> None:
    out = io.StringIO()
    items = iter(lockstep.track(range(5), "part", file=out))
    next(items), next(items)
    items.close()  # type: ignore[attr-defined]
    assert out.getvalue().startswith("part  1/5  ")


def test_an_iterable_without_length_shows_the_count_alone() -> None:
    out = io.StringIO()
    tracked = lockstep.track((n for n in range(4)), file=out)
    assert list(tracked) == [0, 1, 2, 3]
    assert out.getvalue().startswith("4/?  ")
    with pytest.raises(TypeError, match="a generator has no length"):
        len(tracked)
    assert len(lockstep.track([1, 2])) == 2


def test_a_terminal_gets_a_bar_and_its_cursor_back() -> None:
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as terminal:
        assert list(lockstep.track([1, 2], "epoch 1", file=terminal)) == [1, 2]
    shown = b""
    while b"\x1b[?25h" not in shown:  # the code that shows the cursor again
        shown += os.read(reading, 65536)
    os.close(reading)
    assert b"epoch 1" in shown
    assert b"2/2" in shown
