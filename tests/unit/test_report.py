"""A run in one file: its numbers, how they are drawn, what is escaped, how large it gets, and what is no run."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
import socket
import time
from base64 import b64decode, b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from PIL import Image

from lockstep._proc import started
from lockstep.cli import main
from lockstep.job.page import Phase
from lockstep.runs import history
from lockstep.runs.series import COLUMNS, Series, SeriesWriter
from lockstep.text import as_size
from lockstep.tools.report import drawing, numbers, page, pixels, scales
from lockstep.tools.report.numbers import Account
from tests.recorded import BEGAN, write_log, write_record, write_series

ROOT = Path(__file__).parents[2]


def _account(folder: Path) -> Account:
    return numbers.collect(history.read(folder))


def _known(values: list[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


# Numbers -------------------------------------------------------------------------------------------------------------


def test_an_account_has_what_was_recorded(tmp_path: Path) -> None:
    write_record(tmp_path, checkpoints=[{"at": 30.0, "step": 2900}])
    write_series(tmp_path / "series-0.bin", by=lambda second: 2.0 if second > 40 else 1.0)
    found = _account(tmp_path)
    assert (found.ranks, len(found.grid.begins), found.seconds) == ([0, 1], 60, 62.0)
    assert (found.grid.begins[0], found.grid.ends[-1]) == (0.0, 61.0)
    for rank in (0, 1):
        assert found.step[rank][1:40] == pytest.approx([0.01] * 39)
        assert found.step[rank][40:] == pytest.approx([0.02] * 20)
    assert found.work[1][1:40] == pytest.approx([0.01] * 39, rel=1e-3)
    assert found.work[0][1:40] == pytest.approx([0.008] * 39, rel=0.03)
    waits = found.phases[Phase.WAIT]
    assert waits[0][1:] == pytest.approx([0.19] * 59, abs=0.011)
    assert waits[1] == [0.0] * 60
    assert found.held is not None
    assert found.held[1][1:] == pytest.approx(waits[0][1:], abs=1e-3)
    assert found.held[0] == [0.0] * 60
    for bin_ in range(60):
        assert sum(table[0][bin_] for table in found.phases.values()) == pytest.approx(1.0)
    assert found.samples is not None
    assert found.samples[1:40] == pytest.approx([1600.0] * 39)
    assert found.memory[0][0] == pytest.approx(200.1 * 2**20, rel=1e-5)
    assert [mark.kind for mark in found.marks] == ["checkpoint"]
    total = found.totals[0]
    assert (total.host, total.steps) == ("here", 5000)
    assert total.share(Phase.WAIT) == pytest.approx(0.187, abs=0.005)
    assert found.verdict.split("\n")[1].startswith("compute straggler: rank 1, ")


def test_a_summary_is_the_verdict(tmp_path: Path) -> None:
    summary: dict[str, Any] = {
        "bottleneck": "balanced",
        "step": 0.5,
        "samples_per_second": None,
        "headline": "12 steps",
        "verdict": "balanced: data 15%",
        "remarks": ["on the GPUs: forward 90%"],
        "ranks": {},
        "watched": {"steps": 12, "seconds": 6.0},
        "straggler": None,
        "stretches": [],
    }
    write_series(write_record(tmp_path, summary=summary) / "series-0.bin")
    found = _account(tmp_path)
    assert (found.verdict, found.seconds_a_step) == ("12 steps\nbalanced: data 15%\non the GPUs: forward 90%", 0.5)
    assert '<p class="remark">on the GPUs: forward 90%</p>' in page.build(found)
    write_record(tmp_path, summary={"bottleneck": "balanced", "ranks": {}, "median": 0.5})
    words = _account(tmp_path).verdict
    assert "\ncompute straggler: rank 1, " in words, "that of an earlier version was about the last start alone"


@pytest.mark.parametrize("step", [0.3, 0.7, 3.0])
def test_steps_as_long_as_rows_are_not_torn_apart(tmp_path: Path, step: float) -> None:
    write_series(write_record(tmp_path, ended=BEGAN + 602) / "series-0.bin", seconds=600, step=step)
    known = _known(_account(tmp_path).step[0])
    assert len(known) > 550
    assert known == pytest.approx([step] * len(known), rel=0.12)


def test_a_restart_begins_anew(tmp_path: Path) -> None:
    second = {"number": 1, "at": 40.0, "world_size": 1, "series": "series-1.bin"}
    write_record(
        tmp_path,
        starts=[{}, second],
        events=[{"at": 32.0, "kind": "failed", "text": "rank 1 failed"}, {"at": 45.0, "kind": "late", "text": "so"}],
    )
    write_series(tmp_path / "series-0.bin", seconds=30)
    write_series(tmp_path / "series-1.bin", ranks=[0], first=40.0, seconds=20, slow=None)
    found = _account(tmp_path)
    assert [(start.number, start.at, start.bins) for start in found.grid.starts] == [
        (0, 0.0, range(30)),
        (1, 40.0, range(30, 50)),
    ]
    assert (found.grid.ends[29], found.grid.begins[30]) == (31.0, 40.0)
    assert found.step[0][31:] == pytest.approx([0.01] * 19)
    assert not _known(found.step[1][30:]), "rank 1 is not there any more"
    assert [(mark.at, mark.kind) for mark in found.marks] == [(32.0, "failed"), (40.0, "restart"), (45.0, "late")]
    assert found.totals[0].steps == 5000
    assert found.totals[1].steps == 3000


def test_what_has_happened_is_told_once_and_how_the_run_was_stopped(tmp_path: Path) -> None:
    late = {"kind": "late", "text": "rank 1 of 2 has held up the others for 5 s\nits stack", "over": False}
    write_record(
        tmp_path,
        starts=[{}, {"number": 1, "at": 40.0, "series": "series-1.bin"}],
        events=[{"at": 12.0, **late}, {"at": 19.0, "kind": "late", "text": "rank 1 has moved on", "over": True}],
        checkpoints=[{"at": 20.0, "step": 1900}],
        exit_code=75,
        end={"code": "run-saved", "text": "stopped by SIGTERM; saved at step 4900 in runs"},
    )
    write_series(tmp_path / "series-0.bin", seconds=30)
    write_series(tmp_path / "series-1.bin", first=40.0, seconds=20)
    found = _account(tmp_path)
    assert [(mark.at, mark.kind) for mark in found.marks] == [
        (12.0, "late"), (20.0, "checkpoint"), (40.0, "restart"), (62.0, "stopped"),
    ]  # fmt: skip
    words = page.build(found)
    listed = re.findall(r"<div>(?:<details><summary>)?<b>(.*?)</b> <span>(.*?)</span>", words)
    assert listed == [
        ("late rank:", "rank 1 of 2 has held up the others for 5 s"),
        ("checkpoint", "at step 1900"),
        ("restart", "1, on 2 ranks"),
        ("stopped", "by SIGTERM; saved at step 4900 in runs"),
    ]
    assert "<pre>its stack\nrank 1 has moved on</pre>" in words
    assert "late rank (1)" in words


@pytest.mark.parametrize(
    ("code", "exit_code", "kind"),
    [("run-failed", 1, "failed"), ("run-done", 0, "ended"), ("run-stopped", 143, "stopped")],
)
def test_what_was_said_at_the_end_is_a_mark(tmp_path: Path, code: str, exit_code: int, kind: str) -> None:
    write_series(write_record(tmp_path, exit_code=exit_code, end={"code": code, "text": "so it was"}) / "series-0.bin")
    assert [(mark.at, mark.kind, mark.text) for mark in _account(tmp_path).marks] == [(62.0, kind, "so it was")]
    write_record(tmp_path, exit_code=exit_code, end={"code": code, "text": ""})
    assert _account(tmp_path).marks == []


def test_a_start_without_its_series_is_left_out_and_said(tmp_path: Path) -> None:
    write_record(tmp_path, starts=[{}, {"number": 1, "at": 40.0, "series": "series-1.bin"}])
    write_series(tmp_path / "series-1.bin", first=40.0, seconds=20)
    found = _account(tmp_path)
    assert len(found.grid.starts) == 1
    assert found.notes == [
        f"{tmp_path}/series-0.bin does not exist, so what the ranks did in that start can't be shown"
    ]


def test_a_series_of_before_held_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.runs.series.COLUMNS", COLUMNS[:-3])
    writer = SeriesWriter(write_record(tmp_path) / "series-0.bin", [0])
    for second in range(1, 30):
        writer.add(second, [[100 * second, 0, 0, *([second / 13] * 13)]])
    found = _account(tmp_path)
    assert (found.held, found.verdict, found.samples) == (None, "", None)
    assert "Who is waited for" not in page.build(found)


def test_the_records_of_other_machines_are_put_beside(tmp_path: Path) -> None:
    start = {"world_size": 4, "machines": [["here", 2], ["there", 2]]}
    event = {"at": 12.0, "kind": "failed", "text": "rank 3 failed"}
    write_record(tmp_path, starts=[start], events=[event])
    os.rename(tmp_path / "run.json", tmp_path / "first")
    there: dict[str, Any] = {
        "host": "there",
        "node": 1,
        "began": BEGAN + 0.5,
        "starts": [{**start, "series": "series-0-node1.bin"}],
    }
    write_record(tmp_path, **there, events=[{**event, "at": 11.5}], checkpoints=[{"at": 9.5, "step": 7}])
    os.rename(tmp_path / "run.json", tmp_path / "run-node1.json")
    write_record(tmp_path, node=2, program=["other.py"])
    os.rename(tmp_path / "run.json", tmp_path / "run-node2.json")
    os.rename(tmp_path / "first", tmp_path / "run.json")
    write_series(tmp_path / "series-0.bin", ranks=[0, 1])
    write_series(tmp_path / "series-0-node1.bin", ranks=[2, 3], slow=None)
    found = _account(tmp_path)
    assert found.ranks == [0, 1, 2, 3]
    assert [total.host for total in found.totals] == ["here", "here", "there", "there"]
    assert found.step[3][2:-1] == pytest.approx([0.01] * 57, rel=0.01), "between its own rows"
    assert [(mark.at, mark.kind) for mark in found.marks] == [(10.0, "checkpoint"), (12.0, "failed")]
    words = page.build(found)
    assert "on here, there, in /home/somebody" in words
    assert "4 ranks: 2 on here, 2 on there" in words
    os.remove(tmp_path / "run-node1.json")
    assert "2 of 4 ranks were on other machines" in page.build(_account(tmp_path))


def test_a_launcher_that_has_heard_of_all_ranks_speaks_for_them(tmp_path: Path) -> None:
    start = {"world_size": 4, "machines": [["here", 2], ["there", 2]]}
    write_record(tmp_path, node=1, starts=[{**start, "series": "series-0-node1.bin"}])
    os.rename(tmp_path / "run.json", tmp_path / "run-node1.json")
    write_record(tmp_path, starts=[start])
    write_series(tmp_path / "series-0.bin", ranks=range(4))
    write_series(tmp_path / "series-0-node1.bin", ranks=[2, 3], slow=None)
    found = _account(tmp_path)
    assert [(total.rank, total.host, total.steps) for total in found.totals] == [
        (0, "here", 6000),
        (1, "here", 6000),
        (2, "there", 6000),
        (3, "there", 6000),
    ]
    assert "were on other machines" not in page.build(found)


# What was logged -----------------------------------------------------------------------------------------------------


def _with_log(folder: Path, log: Path, **about: Any) -> Path:
    write_series(write_record(folder, logs=[str(log)], **about) / "series-0.bin")
    return folder


def test_what_the_script_logged_is_found_where_it_was_written(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "metrics.jsonl", {"loss": lambda step: 1 / step, "note": lambda _: "a text", "acc": lambda _: None}
    )
    found = _account(_with_log(tmp_path / "run", log)).metrics
    assert [metric.name for metric in found] == ["loss"]
    assert (found[0].times[:2], found[0].steps[:2]) == ([1.0, 2.0], [100, 200])
    assert found[0].values[1] == 1 / 200


def test_what_evaluations_found_is_drawn_where_training_was(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl", {"loss": lambda step: step})
    with log.open("a") as file:
        for step in (900, 350, 50, 6100, 300):  # the newest first, later than the run, and two of other runs
            line = {"step": step, "time": BEGAN + 5000, "eval/acc": step, "evaluation": f"step-{step:08d}-0"}
            file.write(json.dumps(line) + "\n")
    loss, acc = _account(_with_log(tmp_path / "run", log)).metrics
    assert (acc.name, len(loss.steps)) == ("eval/acc", 60)
    assert (acc.steps, acc.times, acc.values) == ([300, 350, 900], [3.0, 3.0, 9.0], [300.0, 350.0, 900.0])


def test_lines_of_other_runs_and_of_none_are_left_out(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl", {"loss": lambda step: step}, seconds=200)
    lines = log.read_text().splitlines()
    early = json.dumps({"step": 1, "time": BEGAN - 100, "loss": 5})
    odd = ["no JSON", "[]", "null", '{"step": "1", "time": 1, "loss": 2}', '{"step": 3}', "[" * 100_000, "\x00"]
    log.write_text("\n".join([early, *odd, *lines]) + '\n{"step": 99, "ti')
    (metric,) = _account(_with_log(tmp_path / "run", log)).metrics
    assert len(metric.times) == 67, "those up to some seconds after its end"
    write_log(log, {"loss": lambda step: -step})
    os.rename(log, tmp_path / "metrics-1.jsonl")
    log.write_text(early + "\n")
    (metric,) = _account(_with_log(tmp_path / "run", log)).metrics
    assert metric.values[0] == -100, "a run that began anew has renamed the file"


def test_a_log_that_was_moved_beside_the_record_and_one_that_is_gone(tmp_path: Path) -> None:
    folder = _with_log(tmp_path / "run", Path("/nowhere/metrics.jsonl"))
    found = _account(folder)
    assert found.metrics == []
    assert "/nowhere/metrics.jsonl does not exist (any more), so" in found.notes[0]
    write_log(folder / "metrics.jsonl", {"loss": lambda step: step})
    assert [metric.name for metric in _account(folder).metrics] == ["loss"]


def test_many_lines_are_thinned_and_keep_their_extremes(tmp_path: Path) -> None:
    log = write_log(
        tmp_path / "metrics.jsonl", {"loss": lambda step: 1e6 if step == 300_000 else step % 700}, every=0.01
    )
    (metric,) = _account(_with_log(tmp_path / "run", log)).metrics
    assert len(metric.times) == 400
    assert max(metric.high) == 1e6
    assert metric.steps[-1] == 600_000
    names = {f"grad/{number}": lambda step: step for number in range(100)}
    write_log(log, {"loss": lambda _: 1e400, **names})
    found = _account(tmp_path / "run")
    assert len(found.metrics) == 60
    assert found.notes == ["101 names were logged; the first 60 are shown"]
    assert found.metrics[0].name == "loss"
    assert all(found.metrics[0].odd)


def test_a_name_that_is_nan_has_its_chart_and_a_word(tmp_path: Path) -> None:
    def acc(step: int) -> float | None:
        return 0.5 if step <= 3000 else None

    def odd(step: int) -> dict[str, int]:
        return {"gone": 2} if step <= 3000 else {"gone": 2, "acc": 1}

    log = write_log(
        tmp_path / "metrics.jsonl",
        {"gone": lambda _: None, "acc": acc, "none": lambda _: None, "nonfinite": odd, "inf": lambda _: math.inf},
    )
    noted = {"acc": {"first": 3042, "since": 3042}, "gone": {"first": 1, "since": 1}}
    found = _account(_with_log(tmp_path / "run", log, nonfinite=noted))
    assert [metric.name for metric in found.metrics] == ["gone", "acc", "inf"], "what counts nothing is not shown"
    words = page.build(found)
    assert words.count("NaN or infinite throughout</p>") == 2
    assert "0.5 to 0.5, the last of them 0.5; NaN or infinite from step 3,042 on</p>" in words
    assert '<p class="note">acc: NaN or infinite from step 3,042 on</p>' in words
    assert "5000 0H" in words, "the time in which it was is marked"


# Drawing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (0.01234, "seconds", "12.3 ms"),
        (1.5, "seconds", "1.5 s"),
        (0.0, "seconds", "0 ms"),
        (0.45, "share", "45%"),
        (0.0451, "share", "4.51%"),
        (276 * 2**20, "bytes", "276 MiB"),
        (1.25 * 2**30, "bytes", "1.25 GiB"),
        (8578.4, "rate", "8,578/s"),
        (1.25e-5, "number", "1.25e-05"),
        (-0.5, "number", "-0.5"),
        (math.nan, "number", "–"),
    ],
)
def test_values_are_shown_as_they_are_read(value: float, unit: str, words: str) -> None:
    assert scales.shown(value, unit) == words


def test_ticks_are_round() -> None:
    assert scales.ticks(0, 0.0333, 4, unit="seconds") == pytest.approx([0, 0.01, 0.02, 0.03])
    assert scales.ticks(-1.1, 2.1, 3, unit="number") == pytest.approx([0, 2])
    assert scales.ticks(0, 1, 5, unit="share") == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert scales.ticks(5, 5, 4, unit="number") == [5]
    assert scales.time_ticks(0, 62, 9) == [0, 10, 20, 30, 40, 50, 60]
    assert [scales.moment(each) for each in (0, 61.4, 3661)] == ["0:00", "1:01", "1:01:01"]
    assert scales.moment(61.44, 0.5) == "1:01.4"


def test_a_few_far_values_do_not_flatten_the_others() -> None:
    assert scales.top([1.0] * 99 + [50.0]) == pytest.approx(1.575)
    assert scales.top([1.0, 2.0]) == pytest.approx(2.1)
    assert scales.top([math.nan]) == 1.0


def test_curves_break_where_nothing_is_known() -> None:
    frame = drawing.Axes(10.0, 0.0, 1.0, "number")
    drawn = drawing.line(frame, [0, 1, 2, 3, 4], [0.0, 1.0, math.nan, 0.5, math.nan], "s0")
    assert 'd="M0 1000l1000 -1000M3000 500h0"' in drawn
    stairs = drawing.stack(frame, [0, 1, 5], [1, 2, 6], [("a", [0.5, 0.5, 0.25]), ("b", [0.5, 0.0, math.nan])])
    assert re.findall(r'd="([^"]+)"', stairs) == [
        "M0 1000V0H1000V500H2000V1000ZM5000 1000V750H6000V1000Z",
        "M0 1000V500H1000H2000V1000ZM5000 1000V750H6000V1000Z",
    ]


def test_a_heat_map_is_a_picture_of_its_values() -> None:
    address = pixels.heat_map([[0.0, 0.5], [1.0, math.nan], [2.0, -1.0]])
    picture = Image.open(io.BytesIO(b64decode(address.partition(",")[2]))).convert("RGBA")
    assert picture.size == (2, 3)
    assert [picture.getpixel((x, y)) for y in range(3) for x in range(2)] == [
        (0xD5, 0x5E, 0, alpha) for alpha in (0, 128, 255, 0, 255, 0)
    ]


# Colours -------------------------------------------------------------------------------------------------------------

#: How linear RGB is seen without one kind of cones, of Machado, Oliveira and Fernandes 2009, in full strength.
_SEEN_BY = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no L": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no M": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no S": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def _linear(colour: str) -> list[float]:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _contrast(one: str, other: str) -> float:
    low, high = sorted(
        sum(factor * part for factor, part in zip((0.2126, 0.7152, 0.0722), _linear(each), strict=True))
        for each in (one, other)
    )
    return (high + 0.05) / (low + 0.05)


def _lab(colour: str, cones: str) -> tuple[float, float, float]:
    linear = _linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(factor * part for factor, part in zip(row, linear, strict=True))))
        for row in _SEEN_BY[cones]
    )
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    x, y, z = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def _apart(one: str, other: str) -> float:
    return min(math.dist(_lab(one, cones), _lab(other, cones)) for cones in _SEEN_BY)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_told_apart_by_everybody_on_both_pages(theme: str) -> None:
    style = resources.files("lockstep.tools.report").joinpath("page.css").read_text()
    pairs = dict(re.findall(r"--([\w-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    colours = {name: pair.split(", ")[theme == "dark"] for name, pair in pairs.items()}
    paper = colours["page"]
    stacked = [phase.name.lower() for phase in page._ORDER]
    lines = [f"line-{number}" for number in range(drawing.LINES)]
    for name in (*stacked, *lines, "good", "bad"):
        assert _contrast(colours[name], paper) >= 3, f"{name} on a {theme} page (WCAG 1.4.11)"
    for name in ("ink", "quiet", "good", "bad", "focus"):
        for under in (paper, colours["card"]):
            assert _contrast(colours[name], under) >= 4.5, f"{name} as text on a {theme} page (WCAG 1.4.3)"
    assert _contrast("#d55e00", paper) >= 3, "the heat maps"
    for one, other in itertools.combinations(("own", "start", "leaving"), 2):  # a run may have nothing between them
        assert _apart(colours[one], colours[other]) >= 12, f"{one} and {other}, which are both grey"
    for one, other in itertools.pairwise(stacked):
        assert _apart(colours[one], colours[other]) >= 12, f"{one} under {other}"
    for one, other in itertools.combinations(lines[:4], 2):  # the next are dashed
        assert _apart(colours[one], colours[other]) >= 10, f"{one} and {other}"


# The page ------------------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    """The tags of a page, and whatever of it could load or run something."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(words)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


_EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"' onload='x' {{data}} &lt; \u2028"


def test_names_of_users_stay_text(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl", {_EVIL: lambda step: step, "loss": lambda step: step})
    evil = [{"at": 5.0, "kind": kind, "text": f"{_EVIL}\n{_EVIL}"} for kind in ("late", _EVIL)]
    variables = {"variables": {"LOCKSTEP_BACKEND": _EVIL}, "torch": _EVIL, "processor": _EVIL}
    about = {"program": [_EVIL], "directory": _EVIL, "host": _EVIL, "events": evil, "environment": variables}
    words = {"headline": _EVIL, "verdict": f"{_EVIL}: {_EVIL}", "remarks": [_EVIL]}
    summary: dict[str, Any] = {"bottleneck": _EVIL, "step": 0.1, "samples_per_second": None, "ranks": {}, **words}
    summary |= {"watched": {"steps": 1, "seconds": 0.1}, "straggler": None, "stretches": []}
    plain = _Tags(page.build(_account(_with_log(tmp_path / "plain", log))))
    built = page.build(_account(_with_log(tmp_path / "run", log, **about, summary=summary)))
    found = _Tags(built)
    assert plain.tags.count("script") == found.tags.count("script") == 2
    assert "img" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on") or name == "style"]
    assert {value for name, value in found.attributes if name in ("src", "action")} == set()
    assert all(str(value).startswith("data:image/png;") for name, value in found.attributes if name == "href")
    assert any(text.startswith(_EVIL) for text in found.texts)
    assert "://" not in re.sub(r'xmlns="[^"]*"|"http://www.w3.org/2000/svg"', "", built), "nothing from outside"


def test_words_that_are_no_utf8_are_written(tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9.py")
    log = write_log(tmp_path / "metrics.jsonl", {odd: lambda step: step})
    folder = _with_log(tmp_path / "run", log, program=[odd], directory=odd, host=odd)
    code, said = _command(str(folder), "-o", str(tmp_path / "out.html"))
    assert code == 0, said
    assert "caf?.py" in (tmp_path / "out.html").read_text()


def test_only_the_one_script_and_style_may_run(tmp_path: Path) -> None:
    write_series(write_record(tmp_path) / "series-0.bin")
    words = page.build(_account(tmp_path))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', words)
    assert policy is not None
    rules = policy[1].replace("&#x27;", "'").split("; ")
    assert rules[0] == "default-src 'none'"
    for kind, tag in (("script", "<script>"), ("style", "<style>")):
        content = words.split(tag)[1].split(f"</{kind}>")[0]
        digest = b64encode(sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in rules


def test_ten_minutes_of_64_ranks_are_under_two_megabytes_and_made_in_seconds(tmp_path: Path) -> None:
    log = write_log(tmp_path / "metrics.jsonl", {"loss": lambda step: step, "acc": lambda step: step}, seconds=600)
    ranks = range(64)
    write_record(tmp_path, starts=[{"world_size": 64, "ranks": dict.fromkeys(map(str, ranks), 1)}], logs=[str(log)])
    write_series(tmp_path / "series-0.bin", ranks=ranks, seconds=600)
    spent = []
    for _ in range(3):  # processor time, of the best of three: other work on the machine does not count
        begun = time.process_time()
        words = page.build(_account(tmp_path))
        spent.append(time.process_time() - begun)
    assert len(words.encode()) < 2e6
    assert min(spent) < 20.0  # a second; what is quadratic in the rows takes minutes


@pytest.mark.parametrize(("ranks", "rows"), [(512, 120), (2, 4000)])
def test_many_ranks_and_long_runs_make_a_page_as_well(tmp_path: Path, ranks: int, rows: int) -> None:
    start = {"world_size": ranks, "ranks": dict.fromkeys(map(str, range(ranks)), 1)}
    write_record(tmp_path, starts=[start], ended=BEGAN + rows + 2)
    write_series(tmp_path / "series-0.bin", ranks=range(ranks), seconds=rows)
    found = _account(tmp_path)
    assert len(found.grid.begins) == min(600, 40_960 // ranks)
    assert found.grid.ends[-1] == rows + 1, "the last row is always there"
    words = page.build(found)
    assert len(words.encode()) < 2e6
    assert words.count("<tr>") < 100


def test_chosen_rows_are_rows_of_the_series(tmp_path: Path) -> None:
    write_series(tmp_path / "series", seconds=100)
    everything, some = Series.read(tmp_path / "series"), Series.read(tmp_path / "series", most=7)
    assert some.times == tuple(everything.times[place * 99 // 6] for place in range(7))
    assert some.columns["steps"][-1] == everything.columns["steps"][-1]
    assert Series.read(tmp_path / "series", most=100) == everything


# The command ---------------------------------------------------------------------------------------------------------


def _command(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["runs", "report", *words])
    return done.exit_code, done.output


def test_a_report_is_written_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    write_series(write_record(tmp_path / "run") / "series-0.bin")
    out = tmp_path / "out.html"
    out.write_text("another")
    code, said = _command(str(tmp_path / "run"), "-o", str(out))
    assert (code, said) == (0, f"{out}: run, {as_size(len(out.read_bytes()))}\n")
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert out.read_text().endswith("</html>\n")
    assert out.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.html", "run"]


def test_a_run_that_goes_on_and_one_that_was_killed(tmp_path: Path) -> None:
    host = socket.gethostname()
    alive: dict[str, Any] = {
        "host": host,
        "launcher": os.getpid(),
        "launcher_began": started(os.getpid()),
        "ended": ...,
        "exit_code": ...,
    }
    write_series(write_record(tmp_path, **alive) / "series-0.bin")
    code, said = _command(str(tmp_path), "-o", str(tmp_path / "out.html"))
    assert code == 0
    assert ", so far, " in said
    words = (tmp_path / "out.html").read_text()
    assert "The run is still running: this is what was recorded up to 1:01." in words
    assert "The verdict is by what is recorded so far" in words
    write_record(tmp_path, ended=..., exit_code=...)
    assert _command(str(tmp_path), "-o", str(tmp_path / "out.html"))[0] == 0
    assert "Only its machine knows whether the run is still running" in (tmp_path / "out.html").read_text()
    write_record(tmp_path, host=host, ended=..., exit_code=...)
    series = tmp_path / "series-0.bin"
    series.write_bytes(series.read_bytes()[:-50])  # in the middle of a row
    assert _command(str(tmp_path), "-o", str(tmp_path / "out.html"))[0] == 0
    killed = "The run was killed, launcher and all: its record ends at 1:00."
    assert killed in (tmp_path / "out.html").read_text()


def _break(folder: Path, what: str) -> str:
    """Break a record; return what is said of it."""
    series, record = folder / "series-0.bin", folder / "run.json"
    about = json.loads(record.read_text())
    match what:
        case "none":
            record.unlink()
            return f"{folder}: no run was recorded there (there is no run.json)"
        case "later":
            record.write_text(json.dumps({**about, "run": 2, "lockstep": "9.0"}))
            return f"{record}: written by lockstep 9.0, which this lockstep can't read"
        case "earlier":
            record.write_text(json.dumps({**about, "run": 0, "lockstep": "0.0.1"}))
            return f"{record}: written by lockstep 0.0.1, which this lockstep can't read"
        case "later series":
            series.write_bytes(series.read_bytes().replace(b'{"series": 1', b'{"series": 2'))
            return f"{series}: a series of version 2, and this lockstep reads version 1"
        case "no series":
            series.unlink()
            return f"{series} does not exist, so what the ranks did in that start can't be shown"
        case "head only":
            series.write_bytes(series.read_bytes().partition(b"\n")[0] + b"\n\0\0")
            return f"{folder.name}: its ranks have taken no step: nothing to show"
        case "no starts":
            record.write_text(json.dumps({**about, "starts": []}))
            return f"{folder.name}: its ranks have taken no step: nothing to show"
        case "half a start":
            record.write_text(json.dumps({**about, "starts": [{"series": "series-0.bin"}]}))
            return f"{record}: the record is damaged: starts[0] at, number, world_size missing"
    raise AssertionError(what)


@pytest.mark.parametrize(
    "what", ["none", "later", "earlier", "later series", "no series", "head only", "no starts", "half a start"]
)
def test_what_is_no_run_is_one_sentence(tmp_path: Path, what: str) -> None:
    write_series(write_record(tmp_path / "run") / "series-0.bin")
    said = _break(tmp_path / "run", what)
    out = tmp_path / "out.html"
    assert _command(str(tmp_path / "run"), "-o", str(out)) == (2, f"lockstep runs report: {said}\n")
    assert not out.exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    run = write_record(tmp_path / "run")
    write_series(run / "series-0.bin")
    nowhere = tmp_path / "nowhere" / "out.html"
    code, said = _command(str(run), "-o", str(nowhere))
    assert (code, said) == (
        2,
        f"lockstep runs report: the report can't be written: {nowhere}: No such file or directory\n",
    )
    (tmp_path / "folder").mkdir()
    code, said = _command(str(run), "-o", str(tmp_path / "folder"))
    assert (code, said) == (
        2,
        f"lockstep runs report: the report can't be written: {tmp_path}/folder: Is a directory\n",
    )
    code, said = _command(str(run), "-o", str(run / "run.json" / "out.html"))
    assert said.endswith("Not a directory; part of the path is a file, not a folder: choose another folder\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "run"]


def test_records_that_are_damaged_are_an_error_or_a_page_and_never_a_crash(tmp_path: Path) -> None:
    record = write_record(tmp_path) / "run.json"
    write_series(tmp_path / "series-0.bin", seconds=10)
    whole = json.loads(record.read_text())
    for key in ("starts", "events", "checkpoints", "logs", "environment", "summary", "program", "directory", "host"):
        wrongs: tuple[Any, ...] = (None, 3, "word", [], {}, [None], [{}], {"a": 1})
        for wrong in wrongs:
            record.write_text(json.dumps({**whole, key: wrong}))
            code, said = _command(str(tmp_path), "-o", str(tmp_path / "out.html"))
            assert code in (0, 2), (key, wrong, said)
            assert said.count("\n") == 1, (key, wrong, said)
