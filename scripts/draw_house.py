"""Draw the house: rooms on their floors, and who imports whom, as docs/house.svg.

    python scripts/draw_house.py            writes the picture
    python scripts/draw_house.py --check    ends with 1 if the picture is not that of the imports

Floors and their order are those that import-linter holds (``pyproject.toml``); rooms and arrows are read from the
imports of ``src/lockstep``. What the two lowest floors hold is used nearly everywhere, so it is listed within each room
instead of being drawn as arrows.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
PICTURE = ROOT / "docs" / "house.svg"

#: So many floors, from below, are listed within the rooms that use them.
_GROUND = 3
_WIDTH, _MARGIN, _GAP, _STEP = 960, 24, 16, 56
#: Heights of a room above, and of one on the ground.
_HIGH, _LOW = 86, 64

_STYLE = """
  text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2933; text-anchor: middle }
  .name { font-weight: 600; font-size: 14px } .small { font-size: 10.5px; fill: #52606d }
  .floor { fill: #9aa5b1; font-size: 11px; text-anchor: start }
  rect { fill: #f5f7fa; stroke: #7b8794; rx: 6 } .ground rect { fill: #e4e7eb }
  path { fill: none; stroke: #3e4c59; stroke-width: 1.4; marker-end: url(#tip) }
  #tip path { fill: #3e4c59; stroke: none; marker-end: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #9aa5b1 } rect { fill: #323f4b } .ground rect { fill: #1f2933 }
    path { stroke: #cbd2d9 } #tip path { fill: #cbd2d9 }
  }
"""


@dataclass(frozen=True)
class Room:
    """A file or folder of the package, on its floor."""

    name: str
    floor: int
    files: int
    #: Names of the rooms it imports.
    imports: tuple[str, ...]


def floors() -> list[list[str]]:
    """Return the rooms' names by floor, from above, as import-linter holds them."""
    text = (ROOT / "pyproject.toml").read_text()
    contract = text[text.index('id = "floors"') :]
    found = re.search(r"^layers = \[\n(.*?)^\]", contract, re.MULTILINE | re.DOTALL)
    assert found is not None, "pyproject.toml has no layers"
    return [re.findall(r"\w+", line) for line in found[1].splitlines()]


def rooms() -> list[Room]:
    """Return all rooms, with what they import."""
    layers = floors()
    names = {name for layer in layers for name in layer}
    return [
        Room(name, len(layers) - 1 - i, len(_files(name)), tuple(sorted(_imported(name) & names)))
        for i, layer in enumerate(layers)
        for name in layer
    ]


def draw(rooms: Sequence[Room]) -> str:
    """Return the picture."""
    boxes: dict[str, _Box] = {}
    shown, y = [], _MARGIN
    for floor in sorted({room.floor for room in rooms}, reverse=True):
        row = [room for room in rooms if room.floor == floor]
        height = _LOW if floor < _GROUND else _HIGH
        width = min((_WIDTH - 2 * _MARGIN - _GAP * (len(row) - 1)) / len(row), 330.0)
        left = (_WIDTH - width * len(row) - _GAP * (len(row) - 1)) / 2
        lines = [f'<text class="floor" x="{_MARGIN / 4:g}" y="{y - 6:g}">floor {floor}</text>']
        for i, room in enumerate(row):
            box = boxes[room.name] = _Box(left + i * (width + _GAP), y, width, height)
            lines += _drawn(room, box, [each.name for each in rooms if each.floor < _GROUND])
        shown.append(f'<g class="{"ground" if floor < _GROUND else "above"}">' + "\n".join(lines) + "</g>")
        y += height + (_STEP if floor >= _GROUND else _STEP // 2)
    arrows = [
        _arrow(boxes[room.name], boxes[other], list(boxes.values()))
        for room in rooms
        for other in room.imports
        if boxes[room.name].height == boxes[other].height == _HIGH
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y - _STEP // 4}" role="img">',
            "<title>The rooms of lockstep on their floors: imports go down only</title>",
            f"<style>{_STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0,0 L8,4 L0,8 z"/></marker></defs>',
            *arrows,
            *shown,
            "</svg>\n",
        ]
    )


class _Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def _drawn(room: Room, box: _Box, ground: Sequence[str]) -> Iterator[str]:
    used = [name for name in room.imports if name in ground]
    lines = _wrapped(used, int(box.width / 5.6))
    yield f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"/>'
    yield f'<text class="name" x="{box.middle:g}" y="{box.y + 18:g}">{escape(room.name)}</text>'
    count = f"{room.files} file{'s' * (room.files != 1)}"
    for i, line in enumerate([count, *lines]):
        yield f'<text class="small" x="{box.middle:g}" y="{box.y + 32 + 12 * i:g}">{escape(line)}</text>'


def _wrapped(names: Sequence[str], columns: int) -> list[str]:
    lines = [""]
    for name in names:
        joined = f"{lines[-1]} · {name}" if lines[-1] else name
        if len(joined) > columns and lines[-1]:
            lines.append(name)
        else:
            lines[-1] = joined
    return [line for line in lines if line]


def _arrow(start: _Box, end: _Box, boxes: Sequence[_Box]) -> str:
    """From the lower edge of one to the upper edge of the other, through the gaps of the floors between them."""
    points = [(start.middle, start.y + start.height)]
    for y in sorted({box.y for box in boxes if start.y < box.y < end.y}):
        row = [box for box in boxes if box.y == y]
        gaps = [row[0].x - _GAP / 2, *(box.x + box.width + _GAP / 2 for box in row)]
        gap = min(gaps, key=lambda x: abs(x - points[-1][0]) + abs(x - end.middle))
        points += [(gap, y), (gap, y + row[0].height)]
    points.append((end.middle, end.y - 3))
    path = f"M{points[0][0]:g},{points[0][1]:g}"
    for (x, y), (to_x, to_y) in pairwise(points):
        bend = (y + to_y) / 2
        path += f" C{x:g},{bend:g} {to_x:g},{bend:g} {to_x:g},{to_y:g}"
    return f'<path d="{path}"/>'


def _files(name: str) -> list[Path]:
    folder = PACKAGE / name
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]


def _imported(name: str) -> set[str]:
    found: set[str] = set()
    for path in _files(name):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("lockstep.")}
            elif isinstance(node, ast.ImportFrom) and node.module == "lockstep":
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep."):
                found.add(str(node.module).split(".")[1])
    return found - {name}


if __name__ == "__main__":
    picture = draw(rooms())
    if "--check" in sys.argv[1:]:
        sys.exit(0 if PICTURE.read_text() == picture else f"{PICTURE} is out of date: run python {sys.argv[0]}")
    PICTURE.write_text(picture)
