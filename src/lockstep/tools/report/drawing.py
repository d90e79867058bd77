"""Draw the charts of a report, as SVG.

Note [Two kinds of coordinates]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A chart is an <svg> of fixed units with its axes, and in it a second one, class "plot", in which the curves are. There
x is the time, of which :data:`X` is the whole run, and y is the value, from :data:`Y` at the bottom of the axis to 0 at
its top. So page.js zooms by another ``viewBox`` of the inner one and new ticks outside, and draws no curve again;
strokes keep their width (``vector-effect``).

Text from a user goes through :func:`tag` and :func:`text`, which escape it.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.tools.report import pixels, scales

#: Units of the curves' coordinates; see Note [Two kinds of coordinates].
X, Y = 10_000, 1_000
#: Units of a chart's margins: left and right of the plot, above it and below.
LEFT, RIGHT, ABOVE, BELOW = 64, 12, 10, 22
#: Ranks that have a line each; more are a band.
LINES = 8
#: The distance by which a curve may leave its axis.
_FAR = 100 * Y


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return an element; ``content`` is markup already, attributes are escaped. None leaves an attribute out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{words}>{content}</{name}>"


def text(words: object) -> str:
    """Return words as markup."""
    return html.escape(str(words))


@dataclass(frozen=True)
class Axes:
    """The axes of a chart.

    Args:
        seconds: of the whole time axis.
        low, high: of the other axis.
        unit: what its values are; see scales.py.
        width, height: of the plot, in the chart's units.
    """

    seconds: float
    low: float
    high: float
    unit: str
    width: int = 1000
    height: int = 150

    def x(self, seconds: float) -> int:
        return round(X * seconds / self.seconds)

    def y(self, value: float) -> int:
        place = round(Y * (self.high - value) / ((self.high - self.low) or 1.0))
        return max(-_FAR, min(_FAR, place))


def chart(frame: Axes, curves: str, *, marks: str = "", over: str = "", label: str, rows: Sequence[int] = ()) -> str:
    """Return a chart.

    Args:
        frame: its axes.
        curves: the markup inside the plot.
        marks: lines in the plot, for events.
        over: the markup that is drawn over the whole chart.
        label: the content in words, for screen readers.
        rows: for a heat map, the ranks that its rows are of.
    """
    width, height = LEFT + frame.width + RIGHT, ABOVE + frame.height + BELOW
    axes = _rows(frame, rows) if rows else _values(frame)
    plot = tag(
        "svg",
        curves + marks,
        class_="plot",
        x=LEFT,
        y=ABOVE,
        width=frame.width,
        height=frame.height,
        viewBox=f"0 0 {X} {Y}",
        preserveAspectRatio="none",
    )
    over += tag("rect", class_="chosen", y=ABOVE, height=frame.height, width=0) + tag(
        "line", class_="cursor", y1=ABOVE, y2=ABOVE + frame.height, visibility="hidden"
    )
    return tag(
        "svg",
        tag("g", axes, class_="values") + tag("g", _moments(frame), class_="moments") + plot + over,
        class_="chart",
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label=label,
    )


def _values(frame: Axes) -> str:
    lines: list[str] = []
    if not frame.unit:
        return ""
    for value in scales.ticks(frame.low, frame.high, max(2, frame.height // 30), unit=frame.unit):
        y = ABOVE + frame.height * frame.y(value) / Y
        lines.append(tag("line", x1=LEFT, x2=LEFT + frame.width, y1=f"{y:.1f}", y2=f"{y:.1f}"))
        words = scales.shown(value, frame.unit)
        lines.append(tag("text", text(words), x=LEFT - 6, y=f"{y + 3.5:.1f}", text_anchor="end"))
    return "".join(lines)


def _rows(frame: Axes, ranks: Sequence[int]) -> str:
    high = frame.height / len(ranks)
    every = 1 << max(0, math.ceil(math.log2(12 / high)))
    return "".join(
        tag("text", f"rank {rank}" if len(ranks) <= 16 else str(rank), x=LEFT - 6, y=f"{y:.1f}", text_anchor="end")
        for place, rank in enumerate(ranks)
        if place % every == 0 and (y := ABOVE + high * (place + 0.5) + 3.5)
    )


def _moments(frame: Axes) -> str:
    moments = scales.time_ticks(0.0, frame.seconds, max(3, frame.width // 110))
    step = moments[1] - moments[0] if len(moments) > 1 else 1.0
    y = ABOVE + frame.height
    return "".join(
        tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=y, y2=y + 4)
        + tag("text", text(scales.moment(moment, step)), x=f"{x:.1f}", y=y + 16, text_anchor="middle")
        for moment in moments
        if (x := LEFT + frame.width * moment / frame.seconds) >= 0
    )


# Curves --------------------------------------------------------------------------------------------------------------


def line(frame: Axes, times: Sequence[float], values: Sequence[float], class_: str) -> str:
    """Return a line through points; it breaks where a value is not finite."""
    return tag("path", class_=f"line {class_}", d=_through(frame, times, values))


def _through(frame: Axes, times: Sequence[float], values: Sequence[float]) -> str:
    parts: list[str] = []
    before: tuple[int, int] | None = None
    alone = False
    for time, value in zip(times, values, strict=True):
        if not math.isfinite(value):
            parts += ["h0"] if alone else []
            before, alone = None, False
            continue
        x, y = frame.x(time), frame.y(value)
        parts.append(f"M{x} {y}" if before is None else f"l{x - before[0]} {y - before[1]}")
        alone = before is None
        before = x, y
    return "".join(parts) + ("h0" if alone else "")


def band(frame: Axes, times: Sequence[float], low: Sequence[float], high: Sequence[float], class_: str) -> str:
    """Return the area between two curves."""
    parts: list[str] = []
    run: list[tuple[int, int, int]] = []
    for time, least, most in [*zip(times, low, high, strict=True), (0.0, math.nan, math.nan)]:
        if math.isfinite(least) and math.isfinite(most):
            run.append((frame.x(time), frame.y(most), frame.y(least)))
            continue
        if len(run) > 1:
            there = "L".join(f"{x} {y}" for x, y, _ in run)
            back = "L".join(f"{x} {y}" for x, _, y in reversed(run))
            parts.append(f"M{there}L{back}Z")
        run = []
    return tag("path", class_=class_, d="".join(parts))


def spans(frame: Axes, times: Sequence[float], chosen: Sequence[bool], class_: str) -> str:
    """Return areas from top to bottom of the plot, each from the point before a chosen one to the chosen one."""
    parts = []
    for place, is_chosen in enumerate(chosen):
        if is_chosen:
            begin = frame.x(times[place - 1]) if place else min(0, frame.x(times[0]))
            parts.append(f"M{begin} 0H{frame.x(times[place]) + 20}V{Y}H{begin}Z")
    return tag("path", class_=class_, d="".join(parts))


def bands(frame: Axes, times: Sequence[float], table: Sequence[Sequence[float]]) -> str:
    """Return all ranks' values as bands: from the least to the greatest, the middle half, and the median."""
    quarters = [_quartiles(values) for values in zip(*table, strict=True)]
    least, first, median, third, most = zip(*quarters, strict=True) if quarters else ((), (), (), (), ())
    return (
        band(frame, times, least, most, "band all")
        + band(frame, times, first, third, "band half")
        + line(frame, times, median, "s0")
    )


def _quartiles(values: Iterable[float]) -> tuple[float, ...]:
    known = sorted(value for value in values if math.isfinite(value))
    if not known:
        return (math.nan,) * 5
    if len(known) == 1:
        return (known[0],) * 5
    return known[0], *statistics.quantiles(known, n=4, method="inclusive"), known[-1]


def stack(
    frame: Axes, begins: Sequence[float], ends: Sequence[float], layers: Sequence[tuple[str, Sequence[float]]]
) -> str:
    """Return layers on top of each other, the first at the bottom.

    Args:
        frame: the axes.
        begins, ends: when each bin begins and ends.
        layers: of each, a class and its part in each bin.
    """
    tops = [0.0] * len(begins)
    drawn: list[str] = []
    for class_, parts in layers:
        tops = [top + (part if math.isfinite(part) else 0.0) for top, part in zip(tops, parts, strict=True)]
        drawn.append(tag("path", class_=f"layer {class_}", d=_stairs(frame, begins, ends, tops)))
    return "".join(reversed(drawn))  # each layer reaches down to 0, and the lower ones are drawn over it


def _stairs(frame: Axes, begins: Sequence[float], ends: Sequence[float], tops: Sequence[float]) -> str:
    parts: list[str] = []
    x = y = -1
    floor = frame.y(0.0)
    for begin, end, top in zip(begins, ends, tops, strict=True):
        left, right, high = frame.x(begin), frame.x(end), frame.y(top)
        if left != x:
            parts.append(f"V{floor}Z" if parts else "")
            parts.append(f"M{left} {floor}V{high}H{right}")
        elif high != y:
            parts.append(f"V{high}H{right}")
        else:
            parts.append(f"H{right}")
        x, y = right, high
    return "".join(parts) + (f"V{floor}Z" if parts else "")


def heat(
    frame: Axes,
    begins: Sequence[float],
    ends: Sequence[float],
    starts: Sequence[range],
    table: Sequence[Sequence[float]],
) -> str:
    """Return a heat map: a row for each rank, from the top; values between 0 and 1.

    Args:
        frame: the axes.
        begins, ends: when each bin begins and ends.
        starts: the bins that follow each other without a gap.
        table: by rank and bin.
    """
    pictures = []
    for bins in starts:
        if not bins:
            continue
        first, last = begins[bins.start], ends[bins.stop - 1]
        columns = _columns(begins, ends, bins)
        picture = pixels.heat_map([[row[column] for column in columns] for row in table])
        x = frame.x(first)
        pictures.append(
            tag(
                "image",
                href=picture,
                x=x,
                y=0,
                width=max(1, frame.x(last) - x),
                height=Y,
                preserveAspectRatio="none",
            )
        )
    return "".join(pictures)


def _columns(begins: Sequence[float], ends: Sequence[float], bins: range) -> list[int]:
    """Return the bin of each pixel: pixels are equally wide, bins nearly."""
    first, last = begins[bins.start], ends[bins.stop - 1]
    found, bin_ = [], bins.start
    for pixel in range(len(bins)):
        at = first + (last - first) * (pixel + 0.5) / len(bins)
        while bin_ < bins.stop - 1 and ends[bin_] <= at:
            bin_ += 1
        found.append(bin_)
    return found


# What has happened ---------------------------------------------------------------------------------------------------

#: The shape of each kind of mark, around 0 0; others are a circle.
SHAPES = {
    "checkpoint": "M-4 4H4L0 -4Z",
    "restart": "M-5 -4L3 0L-5 4ZM3 -4H5V4H3Z",
    "late": "M0 -6L5 0L0 6L-5 0Z",
    "failed": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "lost": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z",
    "stopped": "M-4 -4H4V4H-4Z",
}
#: Marks that are drawn lower, so that a failure and the restart after it are both visible.
_BELOW = ("checkpoint", "restart")
CIRCLE = "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0 -4 0Z"


def mark_lines(frame: Axes, marks: Iterable[tuple[float, str]]) -> str:
    """Return vertical lines through a plot, from the moment and the kind of each mark."""
    paths: dict[str, list[str]] = {}
    for at, kind in marks:
        paths.setdefault(kind_class(kind), []).append(f"M{frame.x(at)} {-_FAR}V{_FAR}")
    return "".join(tag("path", class_=f"mark {class_}", d="".join(lines)) for class_, lines in paths.items())


def lane(seconds: float, marks: Sequence[tuple[float, str, str]], spans: Sequence[tuple[float, float]]) -> str:
    """Return the strip of events: marks with a text each, and when the ranks ran."""
    frame = Axes(seconds, 0.0, 1.0, "", height=26)
    signs = "".join(
        tag(
            "g",
            tag("title", text(words))
            + tag("path", d=SHAPES.get(kind, CIRCLE), transform=f"translate(0 {14 if kind in _BELOW else 4})"),
            class_=f"sign {kind_class(kind)}",
            data_at=f"{at:.3f}",
            transform=f"translate({LEFT + 1000 * at / seconds:.1f} {ABOVE})",
        )
        for at, kind, words in marks
    )
    ran = "".join(
        tag("rect", class_="ran", x=frame.x(begin), y=820, width=max(1, frame.x(end) - frame.x(begin)), height=120)
        for begin, end in spans
    )
    return chart(frame, ran, over=signs, label="What has happened, over time")


def kind_class(kind: str) -> str:
    """Return the CSS class of a kind of mark; unknown kinds share one."""
    return f"is-{kind}" if kind in SHAPES else "is-other"


def bar(parts: Sequence[tuple[str, float]]) -> str:
    """Return a bar of parts that add up to 1."""
    drawn, x = [], 0.0
    for class_, part in parts:
        drawn.append(tag("rect", class_=f"layer {class_}", x=f"{x:.1f}", y=0, width=f"{1000 * part:.1f}", height=10))
        x += 1000 * part
    return tag(
        "svg", "".join(drawn), class_="bar", viewBox="0 0 1000 10", preserveAspectRatio="none", aria_hidden="true"
    )
