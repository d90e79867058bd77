"""Show a plan as text: a table, a curve, and its assumptions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.job.useful import amount
from lockstep.text import as_duration, counted, in_columns, wrapped
from lockstep.tools.plan.plan import Plan, Point

#: Lines of the curve, and points that it has room for.
_HEIGHT, _MOST = 8, 20
_COLUMN = 6


def describe(plan: Plan, points: Sequence[Point]) -> str:
    """Describe a plan."""
    recorded = plan.recorded
    many = counted(recorded.ranks, "rank")
    head = f"{recorded.name}: recorded on {many} over {recorded.first.backend}, {as_duration(recorded.step)} a step"
    assumptions = [part for line in plan.assumptions() for part in wrapped(line, "- ", "  ")]
    return "\n".join([head, "", *_table(points), "", *_curve(points), "", "assumed:", *assumptions])


def _table(points: Sequence[Point]) -> list[str]:
    has_samples = any(point.samples_per_second for point in points)
    head = ["ranks", "hosts", "step", "computing", "stragglers", "copies", "network", "all-reduce", "efficiency"]
    has_price = any(point.cost_of_1000_steps is not None for point in points)
    rows = [[*head, *(["samples/s"] if has_samples else []), *(["1,000 steps cost"] if has_price else [])]]
    for point in points:
        row = [f"{point.ranks:,}", f"{point.hosts:,}", as_duration(point.step), as_duration(point.computing)]
        row += [as_duration(part) if part else "-" for part in (point.stragglers, point.handling, point.network)]
        row.append(f"{point.algorithm} {as_duration(point.averaging)}" if point.algorithm else "-")
        row.append(f"{point.efficiency:.0%}")
        if has_samples:
            row.append(f"{point.samples_per_second:,.0f}" if point.samples_per_second else "-")
        if has_price:
            row.append(amount(point.cost_of_1000_steps or 0.0))
        rows.append(row)
    return in_columns(rows)


def _curve(points: Sequence[Point]) -> list[str]:
    """Draw the efficiency over the ranks; of many points some are drawn."""
    if len(points) > _MOST:
        points = [points[round(place * (len(points) - 1) / (_MOST - 1))] for place in range(_MOST)]
    lines = ["efficiency"]
    for level in range(_HEIGHT, -1, -1):
        label = f"{level / _HEIGHT:.0%}" if level % 2 == 0 else ""
        marks = [
            ("●" if round(min(1.0, point.efficiency) * _HEIGHT) == level else "").rjust(_COLUMN) for point in points
        ]
        lines.append(f"{label:>5} {'┤' if label else '│'}{''.join(marks)}".rstrip())
    lines.append(f"{'':6}└{'─' * (_COLUMN * len(points) + 1)}")
    lines.append(f"{'ranks':>5}  {''.join(_short(point.ranks).rjust(_COLUMN) for point in points)}")
    return lines


def _short(count: int) -> str:
    return f"{count // 1024}k" if count >= 10_000 and count % 1024 == 0 else str(count)
