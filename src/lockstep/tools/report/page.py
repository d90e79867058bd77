"""Build the page of a report: one file, which loads nothing from a network.

Note [What the page may do]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A program's arguments, the names that it logs and the texts of its errors may be anything. They are escaped where they
become markup, and the data that page.js reads are JSON without a ``<``. Besides, a Content-Security-Policy lets nothing
be loaded but pictures inside the page, and nothing be run or styled but the one script and the one style sheet whose
digests it names: what was not escaped, by a mistake of ours, would still not run. So there are no style attributes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from lockstep.job.page import Phase
from lockstep.launch.binding import in_words
from lockstep.runs.history import Run
from lockstep.text import as_amount, as_duration, first_line
from lockstep.tools.report import drawing, pixels, scales
from lockstep.tools.report.bins import Start
from lockstep.tools.report.drawing import Axes, tag, text
from lockstep.tools.report.logged import Metric
from lockstep.tools.report.numbers import Account, Marker, Total, mean, median, phase_name
from lockstep.tools.report.scales import shown
from lockstep.version import __version__

#: Ranks with a row of their own in the table, and marks in the list of what has happened.
_ROWS, _LISTED = 64, 200
#: Phases from the bottom of the stack to its top.
_ORDER = (
    Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER, Phase.OWN, Phase.EVALUATE, Phase.COMPILE,
    Phase.SAVE, Phase.RESTORE, Phase.START, Phase.LEAVING, Phase.WAIT,
)  # fmt: skip


def build(account: Account) -> str:
    """Return the report as a whole HTML file."""
    style, script = _part("page.css"), _part("page.js")
    page = _Page(account)
    parts = {
        "policy": "; ".join(
            (
                "default-src 'none'",
                f"script-src '{_digest(script)}'",
                f"style-src '{_digest(style)}'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
            )
        ),
        "title": text(account.run.program),
        "style": style,
        "script": script,
        "head": page.head(),
        "choices": "".join(tag("option", text(f"rank {rank}"), value=rank) for rank in account.ranks),
        "charts": page.charts(),
        "metrics": page.metrics(),
        "ranks": page.ranks(),
        "events": page.events(),
        "machines": page.machines(),
        "data": page.data(),  # after the charts, which it describes
        "made": text(f"made by lockstep {__version__} from {account.run.path}"),
    }
    # In one pass, since a part could contain what looks like a placeholder.
    words = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))
    # An argument or a file's name that is not UTF-8 has characters that can't be encoded.
    return words.encode(errors="replace").decode()


def _part(name: str) -> str:
    return resources.files("lockstep.tools.report").joinpath(name).read_text()


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


class _Page:
    """Makes the parts of the page, and collects the data of each chart for the page's script."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._seconds = max(account.seconds, 1e-3)
        self._middle = [(begin + end) / 2 for begin, end in zip(account.grid.begins, account.grid.ends, strict=True)]
        self._bins = [start.bins for start in account.grid.starts]
        self._phases = [phase for phase in _ORDER if phase in account.phases]
        self._marks = [(mark.at, mark.kind) for mark in account.marks if mark.kind != "checkpoint"]
        self._told: dict[str, dict[str, Any]] = {}

    # The head ----------------------------------------------------------------------------------------------------

    def head(self) -> str:
        """Return the head: what ran, how it ended, and what limits it."""
        account, run = self._account, self._account.run
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began))
        where = f"{began} on {', '.join(_hosts(account))}, in {run.about.get('directory', '?')}"
        first, second, *remarks = f"{account.verdict}\n".split("\n")
        kind, _, why = second.partition(": ")
        verdict = tag("strong", text(kind)) + (tag("span", text(why)) if why else "")
        said = tag("p", verdict, class_="verdict " + _class_of(kind)) if kind else ""
        return (
            tag("h1", text(run.program))
            + tag("p", text(where), class_="where")
            + said
            + "".join(tag("p", text(each), class_="remark") for each in remarks if each)
            + tag(
                "dl", "".join(tag("div", tag("dt", name) + tag("dd", text(value))) for name, value in self._figures())
            )
            + "".join(tag("p", text(note), class_="note") for note in self._notes(first))
        )

    def _figures(self) -> Iterable[tuple[str, str]]:
        account = self._account
        yield "steps", f"{account.steps:,}"
        if account.seconds_a_step:
            yield "a step", as_duration(account.seconds_a_step)
        for name, key in (("samples", "samples_per_second"), ("tokens", "tokens_per_second")):
            if key in account.rates:
                yield name, f"{account.rates[key]:,.0f}/s"
        if "flops_per_second" in account.rates:
            yield "a device", as_amount(account.rates["flops_per_second"], "FLOP/s")
        if "mfu" in account.rates:
            yield "MFU", f"{100 * account.rates['mfu']:.3g}%"
        yield "ranks", str(len(account.ranks))
        yield "took", scales.moment(self._seconds)
        yield "ended", account.run.ending

    def _notes(self, headline: str) -> Iterable[str]:
        account = self._account
        until = scales.moment(account.grid.ends[-1])
        if account.run.is_alive:
            yield f"The run is still running: this is what was recorded up to {until}."
        elif account.run.ending == "killed":
            yield f"The run was killed, launcher and all: its record ends at {until}."
        elif "ended" not in account.run.about:
            yield f"Only its machine knows whether the run is still running; its record so far ends at {until}."
        if account.verdict and account.run.summary is None:
            yield f"The verdict is by what is recorded so far, without the last seconds ({headline})."
        missing = account.run.world_size - len({*account.ranks})
        if missing > 0:
            yield (
                f"{missing} of {account.run.world_size} ranks were on other machines: for theirs, copy run-node*.json "
                "and series-*-node*.bin of those machines' logs beside this record."
            )
        yield from account.run.remarks
        yield from account.notes

    # Charts ------------------------------------------------------------------------------------------------------

    def charts(self) -> str:
        """Return all charts over time except those of logged numbers."""
        account = self._account
        parts = [self._lane(), self._of_ranks("step", "Step time", account.step, "seconds", _STEP)]
        if Phase.WAIT in account.phases:
            words = (
                "what a rank itself works in a step, without waiting: the highest is the one that the others wait for"
            )
            parts.append(self._of_ranks("work", "Work in a step", account.work, "seconds", words))
        parts.append(self._stack())
        parts += self._waiting()
        for name, rates in (("samples", account.samples), ("tokens", account.tokens)):
            if rates is not None:
                title = f"{name.capitalize()} a second"
                parts.append(self._single(name, title, rates, "rate", "of all ranks together"))
        if any(value > 0 for row in account.memory for value in row):
            parts.append(
                self._of_ranks("memory", "Memory", account.memory, "bytes", "resident, of each rank's process")
            )
        return "".join(parts)

    def _lane(self) -> str:
        account = self._account
        marks = [(mark.at, mark.kind, f"{scales.moment(mark.at)} {first_line(mark.text)}") for mark in account.marks]
        spans = [(account.grid.begins[bins.start], account.grid.ends[bins.stop - 1]) for bins in self._bins if bins]
        kinds = dict.fromkeys(mark.kind for mark in account.marks)
        keys = "".join(
            tag("li", _sign(kind) + text(_WORDS.get(kind, kind)) + f" ({sum(m.kind == kind for m in account.marks)})")
            for kind in kinds
        )
        self._told["lane"] = {"kind": "lane", "width": 1000, "height": 26}
        return _figure("lane", "Timeline", "", keys, drawing.lane(self._seconds, marks, spans))

    def _of_ranks(self, name: str, title: str, table: Sequence[Sequence[float]], unit: str, words: str) -> str:
        """Return a chart with a line for each rank, or bands where there are many."""
        ranks = self._account.ranks
        frame = Axes(self._seconds, 0.0, scales.top([value for row in table for value in row]), unit)
        longest: int | None = None
        if len(ranks) <= drawing.LINES:
            curves = "".join(self._line(frame, row, f"s{place}") for place, row in enumerate(table))
            keys = "".join(_key(f"s{place}", f"rank {rank}") for place, rank in enumerate(ranks))
        else:
            curves = drawing.bands(frame, self._times(), [self._broken(row) for row in table])
            keys = _key("s0", "median") + _key("half", "middle half") + _key("all", "all ranks")
            if name == "work":
                place = max(range(len(ranks)), key=lambda place: _or_nothing(mean(table[place])))
                curves += self._line(frame, table[place], "s1")
                keys += _key("s1", f"rank {ranks[place]}, which works longest")
                longest = place
            keys += _key("most", "most")
        keys += _key("one", "rank", hidden=True)
        self._tell(name, "ranks", frame, table=_floats(table), longest=longest)
        lines = drawing.mark_lines(frame, self._marks)
        usual = shown(median([value for row in table for value in row]), unit)
        drawn = drawing.chart(frame, curves, marks=lines, label=f"{title} over time, {words}; median {usual}")
        return _figure(name, title, words, keys, drawn)

    def _line(self, frame: Axes, values: Sequence[float], class_: str) -> str:
        return drawing.line(frame, self._times(), self._broken(values), class_)

    def _times(self) -> list[float]:
        """Return the middle of each bin, and before those of a start the moment at which it begins."""
        return [
            time
            for bins in self._bins
            for time in (self._account.grid.begins[bins.start], *self._middle[bins.start : bins.stop])
        ]

    def _broken(self, values: Sequence[float]) -> list[float]:
        """Return the values at those moments; NaN where a start begins, so that curves break there."""
        return [value for bins in self._bins for value in (math.nan, *values[bins.start : bins.stop])]

    def _single(self, name: str, title: str, values: Sequence[float], unit: str, words: str) -> str:
        frame = Axes(self._seconds, 0.0, scales.top(list(values)), unit, height=110)
        curve = self._line(frame, values, "s0")
        self._tell(name, "single", frame, values=_rounded(values))
        drawn = drawing.chart(frame, curve, marks=drawing.mark_lines(frame, self._marks), label=f"{title} over time")
        return _figure(name, title, words, _key("s0", ""), drawn)

    def _stack(self) -> str:
        account = self._account
        frame = Axes(self._seconds, 0.0, 1.0, "share", height=190)
        layers = [(_layer(phase), account.mean(phase)) for phase in self._phases]
        curves = drawing.stack(frame, account.grid.begins, account.grid.ends, layers)
        keys = "".join(_key(_layer(phase), phase_name(phase)) for phase in self._phases)
        parts = [b"".join(pixels.levels(row) for row in account.phases[phase]) for phase in self._phases]
        names = [[_layer(phase), phase_name(phase)] for phase in self._phases]
        self._tell("phases", "stack", frame, parts=_bytes(b"".join(parts)), names=names)
        totals = ", ".join(
            f"{phase_name(phase)} {mean([total.share(phase) for total in account.totals]):.0%}"
            for phase in self._phases
        )
        drawn = drawing.chart(frame, curves, marks=drawing.mark_lines(frame, self._marks), label=f"Phases: {totals}")
        return _figure("phases", "Where the time goes", "the mean of all ranks", keys, drawn)

    def _waiting(self) -> Iterable[str]:
        """Yield the charts of which ranks wait, and for which."""
        account = self._account
        wait = account.phases.get(Phase.WAIT)
        if wait is None or len(account.ranks) < 2:
            return
        yield self._heat("waits", "Who waits", wait, "part of a rank's time that it waits for others")
        if account.held is not None:
            words = "part of the others' time that they wait while this rank works"
            yield self._heat("held", "Who is waited for", account.held, words)

    def _heat(self, name: str, title: str, table: Sequence[Sequence[float]], words: str) -> str:
        account = self._account
        count = len(account.ranks)
        frame = Axes(self._seconds, 0.0, 1.0, "share", height=max(28, min(320, count * (16 if count <= 16 else 5))))
        most = max((value for row in table for value in row if math.isfinite(value)), default=0.0)
        scale = min(1.0, max(most, 0.05))
        scaled = [[value / scale for value in row] for row in table]
        curves = drawing.heat(frame, account.grid.begins, account.grid.ends, self._bins, scaled)
        self._tell(name, "heat", frame, parts=_bytes(b"".join(pixels.levels(row) for row in table)))
        totals = [(_or_nothing(mean(row)), rank) for rank, row in zip(account.ranks, table, strict=True)]
        greatest, rank = max(totals)
        label = f"{title}, {words}: most in the mean rank {rank}, {shown(greatest, 'share')}"
        keys = _key("ramp", f"0 to {shown(scale, 'share')}") + _key("most", "most")
        return _figure(name, title, words, keys, drawing.chart(frame, curves, label=label, rows=account.ranks))

    # What the script has logged ----------------------------------------------------------------------------------

    def metrics(self) -> str:
        """Return a chart for each logged name."""
        drawn = [self._metric(number, metric) for number, metric in enumerate(self._account.metrics)]
        if not drawn:
            return ""
        choices = "".join(tag("option", words, value=words) for words in ("time", "steps"))
        tools = (
            tag("label", "over " + tag("select", choices, id="axis"))
            + tag("label", "smooth " + tag("input", type="range", id="smooth", min=0, max=0.99, step=0.01, value=0))
            + tag("label", tag("input", type="checkbox", id="powers") + " log scale")
        )
        bar = tag("div", tools, id="logged", hidden="", role="toolbar", aria_label="How logged numbers are shown")
        return tag("h2", "What the script logged") + bar + tag("div", "".join(drawn), class_="grid")

    def _metric(self, number: int, metric: Metric) -> str:
        known = [value for value in metric.values if math.isfinite(value)]
        low, high = scales.span(metric.values) if known else (0.0, 1.0)
        frame = Axes(self._seconds, low, high, "number" if known else "", width=440, height=130)
        curves = drawing.line(frame, metric.times, metric.values, "s0 raw")
        told: dict[str, Any] = {
            "times": _rounded(metric.times),
            "steps": metric.steps,
            "values": _rounded(metric.values),
        }
        if _rounded(metric.low) != _rounded(metric.high):
            curves = drawing.band(frame, metric.times, metric.low, metric.high, "band half") + curves
            told |= {"least": _rounded(metric.low), "greatest": _rounded(metric.high)}
        if any(metric.odd):
            curves = drawing.spans(frame, metric.times, metric.odd, "odd") + curves
            told["odd"] = [place for place, odd in enumerate(metric.odd) if odd]
        self._tell(f"metric-{number}", "metric", frame, **told)
        words = self._words(metric, known)
        drawn = drawing.chart(
            frame, curves, marks=drawing.mark_lines(frame, self._marks), label=f"{metric.name} over time: {words}"
        )
        return _figure(f"metric-{number}", metric.name, words, _key("s0", ""), drawn)

    def _words(self, metric: Metric, known: Sequence[float]) -> str:
        """Return a logged name's range and last value in words, and where it was not finite."""
        words = []
        if known:
            low, high = (min(filter(math.isfinite, metric.low)), max(filter(math.isfinite, metric.high)))
            words.append(f"{shown(low, 'number')} to {shown(high, 'number')}, at the end {shown(known[-1], 'number')}")
        if any(metric.odd):
            noted = self._account.run.about.get("nonfinite", {}).get(metric.name.rpartition(": ")[2], {})
            step = noted.get("since") or noted.get("first") or metric.steps[metric.odd.index(True)]
            if not known:
                words.append("NaN or infinite throughout")
            elif not math.isfinite(metric.values[-1]) and metric.odd[-1]:
                words[-1] = words[-1].replace("at the end", "the last of them")
                words.append(f"NaN or infinite from step {step:,} on")
            else:
                words.append(f"some NaN or infinite, first at step {noted.get('first') or step:,}")
        return "; ".join(words)

    # Tables ------------------------------------------------------------------------------------------------------

    def ranks(self) -> str:
        """Return a table with a row for each rank, or for those that the others waited for most."""
        account = self._account
        totals, note = account.totals, ""
        if len(totals) > _ROWS:
            totals = sorted(totals, key=lambda total: total.held or 0.0, reverse=True)[:_ROWS]
            totals = sorted(totals, key=lambda total: total.rank)
            note = tag("p", f"The {_ROWS} of {len(account.totals)} ranks that the others waited for longest.")
        head = ["rank", "machine", "steps", "its time", "waits", "is waited for", "memory"]
        rows = "".join(self._rank(total) for total in totals)
        heads = tag("tr", "".join(tag("th", name, scope="col") for name in head))
        return note + tag("table", tag("thead", heads) + tag("tbody", rows), class_="ranks")

    def _rank(self, total: Total) -> str:
        account = self._account
        bar = drawing.bar([(_layer(phase), total.share(phase)) for phase in self._phases])
        others = sum(other.host == total.host for other in account.totals) - 1
        whole = sum(total.seconds.values()) * others
        held = "–" if total.held is None or whole <= 0 else shown(total.held / whole, "share")
        cells = [
            tag("td", text(total.host)),
            tag("td", f"{total.steps:,.0f}", class_="n"),
            tag("td", bar, class_="wide"),
            tag("td", shown(total.share(Phase.WAIT), "share"), class_="n"),
            tag("td", held, class_="n"),
            tag("td", "–" if total.memory is None else shown(total.memory, "bytes"), class_="n"),
        ]
        return tag("tr", tag("th", str(total.rank), scope="row", class_="n") + "".join(cells))

    def events(self) -> str:
        """Return the list of what has happened, with the messages about it."""
        marks = self._account.marks
        if not marks:
            return tag("p", "Nothing: no checkpoint, no restart, no late rank.")
        shown_ = marks if len(marks) <= _LISTED else [mark for mark in marks if mark.kind != "checkpoint"]
        left = len(marks) - len(shown_[:_LISTED])
        rows = "".join(_event(mark) for mark in shown_[:_LISTED])
        return tag("ol", rows, class_="events") + (tag("p", f"(and {left} more)") if left else "")

    def machines(self) -> str:
        """Return a table of the job's machines and starts, and of what its figures depend on."""
        account = self._account
        rows = [(name, value) for machine in account.machines for name, value in _facts(machine)]
        rows += [
            (
                f"start {start.number}",
                f"at {scales.moment(start.at)}, {start.world_size} ranks{_on(account.run, start)}",
            )
            for start in account.grid.starts
        ]
        cells = (tag("th", text(name), scope="row") + tag("td", text(value)) for name, value in rows)
        return tag("table", tag("tbody", "".join(tag("tr", each) for each in cells)), class_="facts")

    # For the script ----------------------------------------------------------------------------------------------

    def data(self) -> str:
        """Return the data that page.js reads, as JSON that is safe inside a page."""
        account = self._account
        told = {
            "seconds": round(self._seconds, 3),
            "began": account.run.began,
            "begins": _rounded(account.grid.begins),
            "ends": _rounded(account.grid.ends),
            "ranks": account.ranks,
            "lines": drawing.LINES,
            "marks": [[round(at, 3), drawing.kind_class(kind)] for at, kind in self._marks],
            "charts": self._told,
        }
        words = json.dumps(told, separators=(",", ":"), allow_nan=False)
        return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

    def _tell(self, name: str, kind: str, frame: Axes, **more: object) -> None:
        self._told[name] = {
            "kind": kind,
            "unit": frame.unit,
            "low": frame.low,
            "high": frame.high,
            "width": frame.width,
            "height": frame.height,
            **more,
        }


# Pieces of markup ----------------------------------------------------------------------------------------------------

_STEP = "of each rank; ranks in step take equally long, whichever of them is slow"
_WORDS = {"late": "late rank", "failed": "failure", "lost": "machine lost", "joining": "machines join"}


def _figure(name: str, title: str, words: str, keys: str, drawn: str) -> str:
    caption = tag("h3", text(title)) + (tag("p", text(words)) if words else "") + tag("ul", keys, class_="keys")
    return tag("figure", tag("figcaption", caption) + drawn, id=name)


def _key(class_: str, words: str, *, hidden: bool = False) -> str:
    sign = tag("i", class_=class_) if words else ""
    return tag(
        "li",
        sign + tag("span", text(words)) + tag("output", data_key=class_),
        class_=f"key-{class_}",
        hidden="" if hidden else None,
    )


def _sign(kind: str) -> str:
    path = tag("path", d=drawing.SHAPES.get(kind, drawing.CIRCLE))
    class_ = f"sign {drawing.kind_class(kind)}"
    return tag("svg", path, class_=class_, viewBox="-8 -8 16 16", width=14, height=14, aria_hidden="true")


def _event(mark: Marker) -> str:
    first, _, rest = mark.text.strip().partition("\n")
    when = tag("time", scales.moment(mark.at))
    kind = _WORDS.get(mark.kind, mark.kind)
    more = first.removeprefix(f"{kind} ")
    label = f"{kind}:" if more == first else kind  # else the text itself begins with it
    words = tag("b", text(label)) + " " + tag("span", text(more))
    if rest:
        words = tag("details", tag("summary", words) + tag("pre", text(rest)))
    return tag("li", when + _sign(mark.kind) + tag("div", words), data_at=f"{mark.at:.3f}")


def _facts(machine: Run) -> Iterable[tuple[str, str]]:
    about = machine.about
    known = about.get("environment") or {}
    yield "machine", f"{about.get('host', '?')}, process {about['launcher']}"
    if known:
        gpus = f", {known.get('gpus')} GPUs" if known.get("gpus") else ""
        yield "processor", f"{known.get('processor', '?')}, {known.get('cores', '?')} cores{gpus}"
        bound = about["starts"][-1].get("bound") if about["starts"] else None
        if bound:
            yield "bound", in_words({int(rank): cpus for rank, cpus in bound.items()})
        yield "system", f"Linux {known.get('kernel', '?')}, {known.get('architecture', '?')}"
        yield (
            "versions",
            f"lockstep {about.get('lockstep')}, torch {known.get('torch') or '–'}, Python {known.get('python')}",
        )
        variables = known.get("variables") or {}
        if isinstance(variables, dict) and variables:
            yield "variables", " ".join(f"{name}={value}" for name, value in variables.items())
    else:
        yield "versions", f"lockstep {about.get('lockstep')}"


def _on(run: Run, start: Start) -> str:
    """Return the machines that took part in a start, in words, where several met."""
    met = next((each.get("machines") for each in run.about["starts"] if each["number"] == start.number), None) or ()
    return ": " + ", ".join(f"{ranks} on {host}" for host, ranks in met) if len(met) > 1 else ""


def _hosts(account: Account) -> list[str]:
    return list(dict.fromkeys(total.host for total in account.totals))


def _class_of(verdict: str) -> str:
    return {"balanced": "good", "too short to tell": "", "": ""}.get(verdict, "bad")


def _layer(phase: Phase) -> str:
    return f"p-{phase.name.lower()}"


def _or_nothing(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _rounded(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values]


def _floats(table: Sequence[Sequence[float]]) -> str:
    """Return a table as float32 [ranks][bins], little-endian, in base64."""
    values = array("f")
    for row in table:
        values.extend(row)
    if sys.byteorder == "big":
        values.byteswap()
    return _bytes(values.tobytes())


def _bytes(data: bytes) -> str:
    return base64.b64encode(data).decode()
