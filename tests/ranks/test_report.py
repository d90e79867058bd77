"""Reports as they are looked at: in a real browser, and of a run that was."""

from __future__ import annotations

import json
import math
import operator
import re
import struct
from base64 import b64decode
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lockstep.job.page import Phase
from lockstep.runs import history
from lockstep.tools.report import numbers, page, scales
from lockstep.tools.report.numbers import Account
from tests.browser import Page, browser, needs_browser
from tests.launching import run
from tests.recorded import write_log, write_record, write_series

#: Pixels of the window, and units of a chart in the width that is left of it.
_WIDE, _UNITS = 1180, 1076


@pytest.fixture(scope="module")
def shown() -> Iterator[Page]:
    with browser() as found:
        yield found


def _write(folder: Path, *, ranks: int = 2, seconds: int = 60) -> tuple[Account, Path]:
    """Make the report of a run that has everything, and whose names are hostile."""
    log = write_log(
        folder / "metrics.jsonl",
        {"loss": lambda step: 3 * math.exp(-step / 2000), "<script>alert(1)</script>": lambda step: step},
        seconds=seconds,
    )
    events = [
        {"at": 20.0, "kind": "late", "text": "rank 1 is late <img src=x onerror=alert(2)>\nand where"},
        {"at": 31.0, "kind": "failed", "text": "rank 0 failed"},
    ]
    start = {"world_size": ranks, "ranks": dict.fromkeys(map(str, range(ranks)), 1)}
    checkpoints = [{"at": 10.0, "step": 900}, {"at": 40.0, "step": 3900}]
    write_record(folder / "run", starts=[start], events=events, checkpoints=checkpoints, logs=[str(log)])
    write_series(
        folder / "run" / "series-0.bin",
        ranks=range(ranks),
        seconds=seconds,
        by=lambda second: (20.0 if second == 50 else 1.0) + 0.02 * (second % 5),
    )
    account = numbers.collect(history.read(folder / "run"))
    path = folder / "report.html"
    path.write_text(page.build(account))
    return account, path


def _open(shown: Page, path: Path) -> None:
    shown.errors.clear()
    shown.requests.clear()
    shown.open(path, width=_WIDE)
    shown.until("document.documentElement.classList.contains('live')")


def _is_quiet(shown: Page) -> None:
    """Hold that nothing went wrong in the page, and that it asked for nothing but itself."""
    assert shown.errors == []
    assert {address.partition(":")[0] for address in shown.requests} <= {"file", "data"}
    assert sum(address.startswith("file:") for address in shown.requests) == 1


def _box(shown: Page, chart: str) -> dict[str, float]:
    """Scroll to a chart, and return where it is: left, top, and pixels of one of its units."""
    shown.ask(f"document.querySelector('#{chart} .chart').scrollIntoView({{block: 'center'}})")
    box = shown.ask(f"JSON.stringify(document.querySelector('#{chart} .chart').getBoundingClientRect())")
    found: dict[str, float] = json.loads(box)
    return {"left": found["left"], "top": found["top"], "scale": found["width"] / _UNITS}


def _place(box: dict[str, float], x: float, y: float) -> tuple[float, float]:
    """Return the pixel of a place in a chart's plot, given in its units."""
    return box["left"] + (64 + x) * box["scale"], box["top"] + (10 + y) * box["scale"]


def _values(shown: Page, figure: str) -> dict[str, str]:
    keys = f"[...document.querySelectorAll('#{figure} .keys output')]"
    found: list[tuple[str, str]] = json.loads(
        shown.ask(f"JSON.stringify({keys}.map(o => [o.dataset.key, o.textContent]))")
    )
    return dict(found)


def _ticks(shown: Page) -> Any:
    axes = "[...document.querySelectorAll('.chart > g:is(.values, .moments) text')]"
    return json.loads(shown.ask(f"JSON.stringify({axes}.map(t => [t.textContent, Number(t.getAttribute('x'))]))"))


def _view(shown: Page, figure: str) -> list[float]:
    view: str = shown.ask(f"document.querySelector('#{figure} .plot').getAttribute('viewBox')")
    return [float(each) for each in view.split()]


@needs_browser
def test_what_is_drawn_is_what_was_recorded_with_and_without_javascript(tmp_path: Path, shown: Page) -> None:
    account, path = _write(tmp_path)
    shown.call("Emulation.setScriptExecutionDisabled", value=True)
    shown.open(path, width=_WIDE)
    still = _ticks(shown)
    assert shown.ask("document.querySelector('#tools').hidden"), "controls that do nothing are not shown"
    shown.call("Emulation.setScriptExecutionDisabled", value=False)
    _open(shown, path)
    assert _ticks(shown) == still, "the script writes the same axes"
    assert len(still) > 60
    known = sum(map(math.isfinite, account.step[0]))
    for rank in (0, 1):
        drawn = shown.ask(f"document.querySelector('#step .line.s{rank}').getAttribute('d')")
        assert len(re.findall("[Ml]", drawn)) == known == 59
        assert shown.ask(f"document.querySelector('#step .line.s{rank}').getTotalLength()") > 1000
    assert shown.ask("document.querySelectorAll('#phases .layer').length") == 7
    assert shown.ask("document.querySelectorAll('#lane .sign').length") == 2 + 2 + 3, "and those of the legend"
    assert shown.ask("document.querySelectorAll('.plot image').length") == 2
    _is_quiet(shown)


@needs_browser
def test_the_pointer_reads_values(tmp_path: Path, shown: Page) -> None:
    account, path = _write(tmp_path)
    _open(shown, path)
    box = _box(shown, "step")
    for part in (0.3, 0.805):
        shown.mouse("mouseMoved", *_place(box, 1000 * part, 40))
        moment = part * account.seconds
        (bin_,) = (
            number
            for number, (begin, end) in enumerate(zip(account.grid.begins, account.grid.ends, strict=True))
            if begin <= moment < end
        )
        assert _values(shown, "step") == {
            "s0": scales.shown(account.step[0][bin_], "seconds"),
            "s1": scales.shown(account.step[1][bin_], "seconds"),
            "one": "",
        }
        waits = account.mean(Phase.WAIT)[bin_]
        assert _values(shown, "phases")["p-wait"].startswith(scales.shown(round(waits * 510) / 510, "share")[:3])
        assert _values(shown, "held")["most"].startswith("rank 1, 1")
        line = min(range(60), key=lambda place: abs(account.metrics[0].times[place] - moment))
        value, step = account.metrics[0].values[line], account.metrics[0].steps[line]
        assert _values(shown, "metric-0") == {"s0": f"{scales.shown(value, 'number')} at step {step:,}"}
    assert shown.ask("document.querySelector('#moment').textContent").startswith("0:49.9 (")
    heat = _box(shown, "waits")
    shown.mouse("mouseMoved", *_place(heat, 500, 8))
    assert _values(shown, "waits")["ramp"].startswith("rank 0: 1")
    shown.mouse("mouseMoved", *_place(heat, 500, 24))
    assert _values(shown, "waits")["ramp"] == "rank 1: 0%"
    shown.mouse("mouseMoved", 2, 2)
    assert set(_values(shown, "step").values()) == {""}
    _is_quiet(shown)


@needs_browser
def test_zoom_by_pointer_and_keyboard(tmp_path: Path, shown: Page) -> None:
    _, path = _write(tmp_path)
    _open(shown, path)
    before = _ticks(shown)
    box = _box(shown, "step")
    shown.drag(_place(box, 250, 40), _place(box, 500, 60))
    for chart in ("step", "phases", "held", "metric-0", "lane"):
        left, _, wide, _ = _view(shown, chart)
        assert (left, wide) == pytest.approx((2500, 2500), abs=15)
    _, top, _, tall = _view(shown, "step")
    assert top + tall == pytest.approx(1000, abs=1), "from 0"
    assert not shown.ask("document.querySelector('#reset').disabled")
    shown.mouse("mousePressed", *_place(box, 300, 40), button="left", buttons=1, clickCount=2)
    shown.mouse("mouseReleased", *_place(box, 300, 40), button="left", clickCount=2)
    shown.until("document.querySelector('#reset').disabled")
    assert _view(shown, "step")[::2] == [0, 10000]
    assert _ticks(shown) == before
    shown.mouse("mouseMoved", 2, 2)
    shown.ask("document.querySelector('#step .chart').focus()")
    assert shown.ask("document.activeElement.getAttribute('role')") == "img"
    shown.press("ArrowRight")
    shown.press("ArrowRight", modifiers=8)
    said = shown.ask("document.querySelector('#said').textContent")
    assert re.match(r"0:1\d\.\d, Step time: rank 0 10\.\d ms, rank 1 10\.\d ms$", said), said
    shown.press("+")
    shown.press("+")
    assert _view(shown, "work")[2] == pytest.approx(2500)
    for _ in range(10):
        shown.press("ArrowLeft", modifiers=8)
    assert _view(shown, "work")[0] <= 200, "what is read comes into view"
    shown.press("-")
    assert _view(shown, "work")[2] == pytest.approx(5000)
    shown.press("0")
    assert _view(shown, "work")[::2] == [0, 10000]
    _is_quiet(shown)


@needs_browser
@pytest.mark.parametrize("ranks", [2, 12])
def test_one_rank_at_choice(tmp_path: Path, shown: Page, ranks: int) -> None:
    account, path = _write(tmp_path, ranks=ranks)
    _open(shown, path)
    mean = shown.ask("document.querySelector('#phases .plot .p-data').getAttribute('d')")
    rank = "document.querySelector('#rank')"
    choose = f"{rank}.value = '{{}}'; {rank}.dispatchEvent(new Event('change'))"
    shown.ask(choose.format(1))
    wait = shown.ask("document.querySelector('#phases .plot .p-own').getAttribute('d')")
    heights = [int(each) for each in re.findall(r"V(-?\d+)", wait)]
    assert sum(height <= 8 for height in heights) >= 58, "rank 1 does not wait: its own code is at the top"
    assert shown.ask("document.querySelector('#phases figcaption p').textContent") == "rank 1"
    drawn = shown.ask("document.querySelector('#work .plot .one').getAttribute('d')")
    assert len(re.findall("[ML]", drawn)) == sum(map(math.isfinite, account.work[1]))
    shown.mouse("mouseMoved", *_place(_box(shown, "work"), 300, 40))
    work = scales.shown(account.work[1][17], "seconds")
    assert _values(shown, "work")["s1" if ranks == 2 else "one"] == work
    if ranks > 8:
        assert _values(shown, "work")["most"] == f"rank 1, {work}"
    shown.ask(choose.format(""))
    assert shown.ask("document.querySelector('#phases .plot .p-data').getAttribute('d')") == mean
    assert shown.ask("document.querySelector('#work .plot .one')") is None
    _is_quiet(shown)


@needs_browser
def test_light_dark_and_paper(tmp_path: Path, shown: Page) -> None:
    _, path = _write(tmp_path)
    _open(shown, path)
    paper = "getComputedStyle(document.body).backgroundColor"
    try:
        for scheme, colour, other in (
            ("light", "255, 255, 255", "20, 23, 28"),
            ("dark", "20, 23, 28", "255, 255, 255"),
        ):
            shown.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            shown.ask("delete document.documentElement.dataset.theme")
            assert colour in shown.ask(paper)
            shown.ask("document.querySelector('#theme').click()")
            assert other in shown.ask(paper)
            assert shown.ask("document.querySelector('#theme').ariaPressed") == str(scheme == "light").lower()
        shown.call("Emulation.setEmulatedMedia", media="print", features=[])
        assert "255, 255, 255" in shown.ask(paper)
        assert shown.ask("getComputedStyle(document.querySelector('#tools')).display") == "none"
        printed = b64decode(shown.call("Page.printToPDF", printBackground=True)["data"])
        assert 2 <= len(re.findall(rb"/Type ?/Page\b", printed)) <= 8
    finally:
        shown.call("Emulation.setEmulatedMedia", media="", features=[])
    assert shown.ask("document.querySelectorAll('svg[role=img]:not([aria-label])').length") == 0
    assert shown.ask("document.querySelectorAll('button:not([aria-label]):empty').length") == 0
    _is_quiet(shown)


@needs_browser
@pytest.mark.campaign  # every run of the tests makes this page, and opens smaller ones
def test_ten_minutes_of_64_ranks_open_quickly(tmp_path: Path, shown: Page) -> None:
    account, path = _write(tmp_path, ranks=64, seconds=600)
    _open(shown, path)
    table = shown.ask("JSON.parse(document.querySelector('#data').textContent).charts.step.table")
    values = struct.unpack(f"<{64 * len(account.grid.begins)}f", b64decode(table))
    assert values[300] == pytest.approx(account.step[0][300])
    shown.mouse("mouseMoved", *_place(_box(shown, "work"), 500, 40))
    assert _values(shown, "work")["most"].startswith("rank 1, ")
    begun = shown.ask("performance.now()")
    shown.ask("document.querySelector('#in').click()")
    assert shown.ask("performance.now()") - begun < 60_000, "milliseconds: it took some hundred"
    _is_quiet(shown)


def _set(shown: Page, control: str, value: str, event: str = "change") -> None:
    chosen = f"document.querySelector('#{control}')"
    what = f"{chosen}.checked = {value}" if control == "powers" else f"{chosen}.value = '{value}'"
    shown.ask(f"{what}; {chosen}.dispatchEvent(new Event('{event}'))")


@needs_browser
@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_page_has_charts_that_fit_with_words_that_can_be_read(tmp_path: Path, shown: Page, width: int) -> None:
    _, path = _write(tmp_path, ranks=3)
    shown.errors.clear()
    shown.requests.clear()
    shown.open(path, width=width)
    shown.until("document.documentElement.classList.contains('live')")
    assert shown.ask("document.documentElement.scrollWidth") <= width, "nothing is to be moved sideways"
    charts = "[...document.querySelectorAll('.chart')]"
    boxes = shown.ask(f"JSON.stringify({charts}.map(c => [c.getBoundingClientRect().width, c.viewBox.baseVal.width]))")
    for pixels, units in json.loads(boxes):
        assert pixels <= width
        assert pixels / units >= 0.97, "a unit is a pixel, so words have their size"
    words = f"{charts}.flatMap(c => [...c.querySelectorAll('text')].map(t => t.getBoundingClientRect()))"
    assert shown.ask(f"Math.min(...{words}.map(b => b.height))") >= 10
    assert shown.ask(f"Math.max(...{words}.map(b => b.right))") <= width + 1
    assert shown.ask(f"Math.min(...{words}.map(b => b.left))") >= -1
    edges = f"JSON.stringify({charts}.map(c => c.querySelector('.plot').getScreenCTM().e))"
    if width < 700:
        assert max(json.loads(shown.ask(edges))) - min(json.loads(shown.ask(edges))) < 1, "they share their axis"
    _is_quiet(shown)


@needs_browser
def test_what_was_logged_is_shown_over_steps_smoothed_and_on_a_log_scale(tmp_path: Path, shown: Page) -> None:
    account, path = _write(tmp_path)
    _open(shown, path)
    before = _ticks(shown)
    raw = "document.querySelector('#metric-0 .raw').getAttribute('d')"
    straight = shown.ask(raw)
    _set(shown, "axis", "steps")
    labels = "[...document.querySelectorAll('#metric-0 .moments text')].map(t => t.textContent).join(';')"
    assert shown.ask(labels) == "step 2,000;step 4,000;step 6,000"
    assert shown.ask("document.querySelector('#step .moments text').textContent") == "0:00", "ranks are shown over time"
    places = [int(x) for x in re.findall(r"[ML](-?\d+) ", shown.ask(raw))]
    steps = account.metrics[0].steps
    ends = steps[0], steps[-1]
    assert places == [round(10_000 * (step - ends[0]) / (ends[1] - ends[0])) for step in steps]
    box = _box(shown, "metric-0")
    scale = shown.ask("document.querySelector('#metric-0 .chart').getBoundingClientRect().width") / 516
    for place in (17, 29, 50):
        step, value = steps[place], scales.shown(account.metrics[0].values[place], "number")
        across = (516 - 64 - 12) * (step - ends[0]) / (ends[1] - ends[0])
        shown.mouse("mouseMoved", box["left"] + (64 + across) * scale, box["top"] + 60 * scale)
        assert _values(shown, "metric-0")["s0"] == f"{value} at step {step:,}"
    _set(shown, "powers", "true")
    heights = [int(y) for y in re.findall(r"[ML]-?\d+ (-?\d+)", shown.ask(raw))]
    falls = [later - earlier for earlier, later in pairwise(heights)]
    assert max(falls) - min(falls) <= 1, "what falls by the same part each time is a straight line"
    values = "[...document.querySelectorAll('#metric-0 .values text')].map(t => t.textContent).join(';')"
    assert "0.5;1;2" in shown.ask(values)
    _set(shown, "smooth", "0.9", "input")
    assert shown.ask("document.querySelector('#metric-0 .raw').classList.contains('faint')")
    drawn = re.findall(
        r"[ML](-?\d+) (-?\d+)", shown.ask("document.querySelector('#metric-0 .smooth').getAttribute('d')")
    )
    assert [int(x) for x, _ in drawn] == places
    # A mean of heights is the height of the mean. Each is rounded, before and after.
    assert [int(y) for _, y in drawn] == pytest.approx(_smoothed(heights, 0.9), abs=1.0)
    shown.drag(
        (box["left"] + 200 * scale, box["top"] + 40 * scale), (box["left"] + 300 * scale, box["top"] + 40 * scale)
    )
    assert not shown.ask("document.querySelector('#reset').disabled")
    shown.ask("document.querySelector('#reset').click()")
    _set(shown, "smooth", "0", "input")
    _set(shown, "powers", "false")
    _set(shown, "axis", "time")
    shown.mouse("mouseMoved", 2, 2)
    again = re.findall(r"-?\d+", shown.ask(raw).replace("h0", ""))
    assert len(again) == 2 * len(steps)
    assert straight.startswith(f"M{again[0]} {again[1]}l")
    assert _ticks(shown) == before
    _is_quiet(shown)


def _smoothed(values: Sequence[float], part: float) -> list[float]:
    """At each value the mean of those so far, of which each counts less by ``part`` than the one after it."""
    found = []
    for end in range(1, len(values) + 1):
        weights = [part ** (end - 1 - place) for place in range(end)]
        found.append(sum(map(operator.mul, weights, values[:end])) / sum(weights))
    return found


_TRAINS = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lockstep

world = lockstep.init()
model = lockstep.replicate(nn.Linear(4, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(400, 4), torch.randint(0, 3, (400,)))
loader = lockstep.shard(DataLoader(data, batch_size=8))
saved = lockstep.Checkpointer("saved", model=model, optimizer=optimizer, loader=loader)
log = lockstep.Log(saved, every=10)
for epoch in saved.epochs(3):
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss)
        time.sleep(0.03)
        if saved.step == 75 and world.rank == 1 and not open("failed", "a").tell():
            open("failed", "a").write("x")
            raise RuntimeError("planted")
    saved.save()
"""


def test_the_report_of_a_run_that_was_restarted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAINS)
    command = ["lockstep", "run", "-n", "2", "--max-restarts", "1", "--log-dir", "logs", "train.py"]
    done = run(command, tmp_path, torch=True)
    assert done.code == 0, done
    made = run(["lockstep", "runs", "report", "logs/", "-o", "report.html"], tmp_path)
    assert (made.code, made.err) == (0, ""), made
    account = numbers.collect(history.read(tmp_path / "logs"))
    assert [mark.text for mark in account.marks if mark.kind == "checkpoint"] == [
        f"checkpoint at step {step}" for step in (50, 100, 150)
    ]
    assert [mark.kind for mark in account.marks if mark.kind != "checkpoint"] == ["failed", "restart"]
    (metric,) = account.metrics
    assert metric.name == "loss"
    assert metric.steps == list(range(10, 151, 10)), "each step once, though some were taken twice"
    assert account.held is not None
    assert account.grid.starts[1].number == 1
    words = (tmp_path / "report.html").read_text()
    assert "RuntimeError: planted" in words
    assert f"torch {account.run.about['environment']['torch']}" in words
