"""What linters do not hold: no circle of files, one class for a name, one value for a constant, one note."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import lockstep

grimp = pytest.importorskip("grimp", reason="not in the environments of other versions of torch")

_PACKAGE = Path(lockstep.__file__).parent
_ROOT = Path(__file__).parents[2]


def _circles() -> set[frozenset[str]]:
    """Return the strongly connected components of more than one file, after Tarjan, "Depth-First Search and Linear
    Graph Algorithms", SIAM J. Comput. 1 (1972)."""
    graph = grimp.build_graph("lockstep", exclude_type_checking_imports=False, cache_dir=None)
    imported = {module: sorted(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        path.append(module)
        for other in imported[module]:
            if other not in index:
                visit(other)
            if other in path:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            start = path.index(module)
            found.add(frozenset(name.removeprefix("lockstep.") for name in path[start:]))
            del path[start:]

    for module in sorted(imported):
        if module not in index:
            visit(module)
    return {circle for circle in found if len(circle) > 1}


def _rooms_of_names() -> dict[str, set[str]]:
    """Return the rooms in which classes of each name are, for names that occur in several."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for file in _PACKAGE.rglob("*.py"):
        parts = file.relative_to(_PACKAGE).parts
        room = parts[parts[0] == "tools"].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                rooms[node.name].add(room)
    return {name: where for name, where in rooms.items() if len(where) > 1}


def test_no_files_import_each_other() -> None:
    assert _circles() == set()


def test_classes_of_different_rooms_have_different_names() -> None:
    assert _rooms_of_names() == {}


def _given_twice(source: str) -> list[str]:
    """Return the constants of a file, names in capitals at its top, that are given a value more than once."""
    given: Counter[str] = Counter()
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        given.update(target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper())
    return [name for name, times in given.items() if times > 1]


def test_a_constant_is_given_one_value() -> None:
    """Two changes that each add a constant of one name merge without a conflict, and the second value wins."""
    assert _given_twice("PATIENT = 1\nother: int = 2\nother = 3\nPATIENT: int = 2\n") == ["PATIENT"]
    files = [file for folder in ("src", "tests", "benchmarks", "examples") for file in (_ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    twice = {str(file): _given_twice(file.read_text()) for file in files}
    assert {file: names for file, names in twice.items() if names} == {}


#: A note where it is written: its name on a line of its own, underlined.
_WRITTEN = re.compile(r"^ *(?:# )?Note \[([^\]\n]+)\]\n *(?:# )?~{3,}$", re.MULTILINE)
#: Citations, which may go over the end of a line and name several: Notes [A] in `a.py`, [B] and [C].
_CITED = re.compile(r"\bNotes? \[[^\]]+\](?:(?: in `+[\w./]+`+)?(?:,| and|, and) \[[^\]]+\])*")


def _notes(text: str) -> tuple[list[str], list[str]]:
    """Return the notes that a text has, and those that it cites."""
    unfolded = re.sub(r"\n[ #]*", " ", _WRITTEN.sub("", text))
    cited = [name for each in _CITED.findall(unfolded) for name in re.findall(r"\[([^\]]+)\]", each)]
    return _WRITTEN.findall(text), cited


def test_a_note_that_is_cited_is_written_once() -> None:
    text = "Note [A]\n~~~~~~~~\nAs\nNotes [B] in `b.py`, [C\n  d] in `c.py` and [E]: [f](g)\n    # Note\n    # [H]\n"
    assert _notes(text) == (["A"], ["B", "C d", "E", "H"])
    folders = ("src", "tests", "benchmarks", "examples", "scripts", "docs")
    files = [file for folder in folders for file in (_ROOT / folder).rglob("*") if file.suffix in (".py", ".md")]
    files = [file for file in files if file != Path(__file__)]
    written: dict[str, list[str]] = defaultdict(list)
    cited: dict[str, list[str]] = defaultdict(list)
    for file in [*files, *_ROOT.glob("*.md")]:
        own, others = _notes(file.read_text())
        for name in own:
            written[name].append(str(file.relative_to(_ROOT)))
        for name in others:
            cited[name].append(str(file.relative_to(_ROOT)))
    assert len(cited) > 150
    assert {name: where for name, where in written.items() if len(where) > 1} == {}, "written more than once"
    assert {name: where for name, where in cited.items() if name not in written} == {}, "written nowhere"
    assert all(where[0].startswith(("src/", "examples/")) for where in written.values())
