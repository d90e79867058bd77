"""A script's text, its tree with full names, and the edits that make another text of it."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import (
    Assignment,
    ByteSpanPositionProvider,
    MetadataWrapper,
    ParentNodeProvider,
    QualifiedNameProvider,
    QualifiedNameSource,
    Scope,
    ScopeProvider,
)

from lockstep.tools.port.remarks import CannotPort

_Node = TypeVar("_Node", bound=cst.CSTNode)
#: A statement of a block: what stands on lines of its own.
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
#: The whitespace between words; edits never touch it alone.
_SPACE = (
    cst.BaseParenthesizableWhitespace,
    cst.TrailingWhitespace,
    cst.EmptyLine,
    cst.Newline,
    cst.Comma,
    cst.Comment,
    cst.LeftParen,
    cst.RightParen,
    cst.Dot,
    cst.AssignEqual,
)
#: Functions without side effects: a test of these may go with what it guards.
_PURE = {"is_available", "device_count", "is_initialized", "get_rank", "get_world_size", "len", "int", "get", "rank"}


@dataclass
class Edits:
    """Changes of a text, recorded by where they begin and end, and made all at once."""

    #: Beginning and end in bytes -> what stands there instead.
    replaced: dict[tuple[int, int], Callable[[], str]] = field(default_factory=dict)
    #: Place in bytes -> what is inserted there, in order.
    inserted: dict[int, list[Callable[[], str]]] = field(default_factory=dict)


class Script:
    """One file of Python: its tree, and edits of its text.

    Args:
        text: the whole file.

    Raises:
        CannotPort: it can't be parsed.
    """

    def __init__(self, text: str) -> None:
        try:
            wrapper = MetadataWrapper(cst.parse_module(text))
        except cst.ParserSyntaxError as error:
            raise CannotPort(
                f"line {error.raw_line}: not valid Python ({error.message}); correct it and port again"
            ) from None
        self.text = text
        self.module = wrapper.module
        self._bytes = text.encode()
        self._wrapper = wrapper
        self._scopes = wrapper.resolve(ScopeProvider)
        self._spans = wrapper.resolve(ByteSpanPositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._lines: list[int] = [0, *(place + 1 for place, each in enumerate(self._bytes) if each == ord("\n"))]
        self._removed: dict[int, Statement] = {}
        self._edits = Edits()
        #: All nodes but white space, in the order of the text, so that those within a node follow it.
        self.nodes: list[cst.CSTNode] = []
        self._places: dict[int, tuple[int, int]] = {}
        self._index(self.module)

    # What stands where.

    def all(self, kind: type[_Node], within: cst.CSTNode | None = None) -> Iterator[_Node]:
        """Yield the nodes of one class, in the order of the text."""
        first, last = (0, len(self.nodes)) if within is None else self._places[id(within)]
        for node in self.nodes[first:last]:
            if isinstance(node, kind):
                yield node

    def within(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return a node and all nodes in it, in the order of the text."""
        first, last = self._places[id(node)]
        return self.nodes[first:last]

    def children(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the nodes just below a node, without white space."""
        return [each for each in node.children if not isinstance(each, _SPACE)]

    def _index(self, node: cst.CSTNode) -> None:
        place = len(self.nodes)
        self.nodes.append(node)
        for child in node.children:
            if not isinstance(child, _SPACE):
                self._index(child)
        self._places[id(node)] = (place, len(self.nodes))

    def full_name(self, node: cst.CSTNode) -> str:
        """Return the name of what was imported, such as ``torch.utils.data.DataLoader``; empty for all else."""
        found = self._names.get(node, ())
        for name in found() if callable(found) else found:
            if name.source in (QualifiedNameSource.IMPORT, QualifiedNameSource.BUILTIN):
                return str(name.name).removeprefix("builtins.")
        return ""

    @functools.cached_property
    def _names(self) -> Mapping[cst.CSTNode, Any]:
        return self._wrapper.resolve(QualifiedNameProvider)

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """Return the scope that a node belongs to."""
        while node is not self.module:
            found = self._scopes.get(node)
            if found is not None:
                return found
            node = self._parents[node]
        return self._scopes.get(self.module)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node around a node; the module's own is the module."""
        return self.module if node is self.module else self._parents[node]

    def around(self, node: cst.CSTNode, *kinds: type[cst.CSTNode]) -> cst.CSTNode | None:
        """Return the nearest node around a node that is of one of these classes."""
        while node is not self.module:
            node = self._parents[node]
            if isinstance(node, kinds):
                return node
        return None

    def function(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the function that contains a node; None at the top level."""
        found = self.around(node, cst.FunctionDef)
        return found if isinstance(found, cst.FunctionDef) else None

    def statement(self, node: cst.CSTNode) -> Statement:
        """Return the statement that a node belongs to: its own line, or the compound statement whose head it is in."""
        while not isinstance(node, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
            node = self._parents[node]
        return node

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of the line on which a node begins, from 1."""
        return bisect.bisect_right(self._lines, self.begin(node))

    def begin(self, node: cst.CSTNode) -> int:
        """Return where a node begins, in bytes."""
        return int(self._spans[node].start)

    def source(self, node: cst.CSTNode) -> str:
        """Return the text of a node as it was."""
        span = self._spans[node]
        return self._bytes[span.start : span.start + span.length].decode()

    def inside(self, node: cst.CSTNode, outer: cst.CSTNode) -> bool:
        """Return whether ``node`` is ``outer`` or a part of it."""
        while node is not outer:
            if node is self.module:
                return False
            node = self._parents[node]
        return True

    def unused_imports(self) -> frozenset[str]:
        """Return the names that are imported at the top level and never used."""
        top = self._scopes.get(self.module)
        found = top.assignments if top is not None else ()
        return frozenset(
            each.name
            for each in found
            if isinstance(each, Assignment)
            and isinstance(each.node, (cst.Import, cst.ImportFrom))
            and not each.references
        )

    def unbound(self, name: str) -> bool:
        """Return whether a name is used that nothing binds."""
        scopes = {id(each): each for each in self._scopes.values() if each is not None}
        return any(
            isinstance(access.node, cst.Name) and access.node.value == name and not access.referents
            for scope in scopes.values()
            for access in scope.accesses
        )

    def has_name(self, name: str) -> bool:
        """Return whether the script uses this name for anything."""
        return any(each.value == name for each in self.all(cst.Name))

    # Edits.

    def render(self, node: cst.CSTNode) -> str:
        """Return the text of a node with its edits made; call it in an edit of a node around it.

        The text of an expression in parentheses is without these.
        """
        return self._made((self.begin(node), self._end(node)), without=None)

    def inner(self, node: cst.CSTNode) -> str:
        """Return the text of a node with the edits inside it made, and not its own; call it in its own edit."""
        own = (self.begin(node), self._end(node))
        return self._made(own, without=own)

    def replace(self, node: cst.CSTNode, make: Callable[[], str] | str) -> None:
        """Put another text in the place of a node; the first edit of a node holds."""
        span = self._spans[node]
        key = (int(span.start), int(span.start + span.length))
        self._edits.replaced.setdefault(key, (lambda: make) if isinstance(make, str) else make)

    def is_replaced(self, node: cst.CSTNode) -> bool:
        """Return whether a node, or one around it, was replaced or removed."""
        while node is not self.module:
            span = self._spans.get(node)
            if id(node) in self._removed or (
                span is not None and (int(span.start), int(span.start + span.length)) in self._edits.replaced
            ):
                return True
            node = self._parents[node]
        return False

    def remove_argument(self, call: cst.Call, given: cst.Arg) -> None:
        """Remove an argument of a call with its comma."""
        position = next(place for place, each in enumerate(call.args) if each is given)
        if position + 1 < len(call.args):
            key = (self.begin(given), self.begin(call.args[position + 1]))
        else:
            start = self._end(call.args[position - 1]) if position else self.begin(given)
            key = (start, self._end(given))
        self._edits.replaced[key] = lambda: ""

    def add_argument(self, call: cst.Call, make: Callable[[], str]) -> None:
        """Add an argument to a call, after its others."""
        if call.args:
            self._edits.inserted.setdefault(self._end(call.args[-1]), []).append(lambda: f", {make()}")
        else:
            self._edits.inserted.setdefault(self._end(call) - 1, []).append(make)

    def remove(self, statement: Statement) -> None:
        """Remove a statement with its line; a block that becomes empty is removed too, or gets a ``pass``."""
        self._removed[id(statement)] = statement

    def insert_before(self, statement: Statement, make: Callable[[], str]) -> None:
        """Insert a line before a statement, as deep as that."""
        place = self._line_start(statement)
        indent = self.indent(statement)
        self._edits.inserted.setdefault(place, []).append(lambda: f"{indent}{make()}\n")

    def wrap(self, statement: Statement, head: Callable[[], str]) -> None:
        """Put a statement into a block, whose head is ``head``."""
        indent = self.indent(statement)

        def make() -> str:
            deeper = self.inner(statement).replace("\n", "\n" + self.module.default_indent)
            return f"{head()}\n{indent}{self.module.default_indent}{deeper}"

        self.replace(statement, make)

    def unwrap(self, block: cst.With) -> None:
        """Put the body of a ``with`` in its place."""
        inner = block.body
        assert isinstance(inner, cst.IndentedBlock)
        indent = self.indent(block)

        def make() -> str:
            first, last = inner.body[0], inner.body[-1]
            start = (
                self._bytes.find(b"\n", self._end(block.items[-1])) + 1
            )  # with the comments before the first statement
            deep = self.indent(first)
            return (
                self._made((start, self._end(last)), without=None)
                .removeprefix(deep)
                .replace(f"\n{deep}", f"\n{indent}")
            )

        self.replace(block, make)

    def append_line(self, statement: Statement, text: str) -> None:
        """Insert a line after a statement of one line or more, at the left margin."""
        span = self._spans[statement]
        end = self._bytes.find(b"\n", int(span.start + span.length))
        place = len(self._bytes) if end < 0 else end + 1
        lead = "" if end >= 0 else "\n"
        self._edits.inserted.setdefault(place, []).append(lambda: f"{lead}{text}\n")

    def edited(self) -> str:
        """Return the text with all edits made."""
        self._settle_removed()
        return self._made((0, len(self._bytes)), without=None)

    def _settle_removed(self) -> None:
        """Remove the statements that are marked for removal, and the blocks that become empty."""
        settled = False
        while not settled:
            settled = True
            for block in self.all(cst.IndentedBlock):
                if not block.body or not all(id(each) in self._removed for each in block.body):
                    continue
                owner = self._parents[block]
                if id(owner) in self._removed:
                    continue
                if self._may_go(owner):
                    assert isinstance(owner, cst.If)
                    self._removed[id(owner)] = owner
                    settled = False
                else:
                    kept = block.body[0]
                    del self._removed[id(kept)]
                    self.replace(kept, "pass")
        for key in self._removed_lines():
            self._edits.replaced[key] = lambda: ""

    def _removed_lines(self) -> Iterator[tuple[int, int]]:
        """Yield the lines that are removed, with the empty lines before them."""
        runs: list[tuple[int, int]] = []
        for statement in sorted(self._removed.values(), key=self.begin):
            start, end = self._line_start(statement), self._bytes.find(b"\n", self._end(statement))
            stop = len(self._bytes) if end < 0 else end + 1
            if runs and not self._bytes[runs[-1][1] : start].strip(b" \t"):
                runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
            elif not runs or start >= runs[-1][1]:
                runs.append((start, stop))
        for start, stop in runs:
            following = self._bytes[stop : stop + 1]
            while following in (b"\n", b"") and self._bytes[:start].endswith(b"\n\n"):
                start -= 1
            yield start, stop

    def _may_go(self, owner: cst.CSTNode) -> bool:
        """Return whether an ``if`` that guards nothing any more may be removed: its condition has no effects."""
        if not isinstance(owner, cst.If) or owner.orelse is not None or isinstance(self._parents[owner], cst.If):
            return False
        called = [each.func for each in self.all(cst.Call, owner.test)]
        names = {each.attr.value if isinstance(each, cst.Attribute) else self.source(each) for each in called}
        return names <= _PURE

    def _made(self, outer: tuple[int, int], without: tuple[int, int] | None) -> str:
        """Return the text between two places with the outermost edits in it made."""
        start, end = outer
        keys = sorted(
            (key for key in self._edits.replaced if start <= key[0] and key[1] <= end and key != without),
            key=lambda key: (key[0], -key[1]),
        )
        # What is inserted at the end of the part belongs to what follows, but for the end of the text.
        places = sorted(
            each
            for each in self._edits.inserted
            if start <= each < end or (each == end == len(self._bytes)) or (start == end == each)
        )
        parts: list[str] = []
        at = start
        for place, stop in _outermost(keys, places):
            if place < at:
                continue
            parts.append(self._bytes[at:place].decode())
            if stop is None:
                parts += [make() for make in self._edits.inserted[place]]
                at = place
            else:
                parts.append(self._edits.replaced[place, stop]())
                at = stop
        parts.append(self._bytes[at:end].decode())
        return "".join(parts)

    def _end(self, node: cst.CSTNode) -> int:
        span = self._spans[node]
        return int(span.start + span.length)

    def _line_start(self, statement: cst.CSTNode) -> int:
        return self._bytes.rfind(b"\n", 0, self.begin(statement)) + 1

    def indent(self, statement: cst.CSTNode) -> str:
        """Return the white space before a statement."""
        text = self._bytes[self._line_start(statement) : self.begin(statement)].decode()
        return text[: len(text) - len(text.lstrip())]


def _outermost(keys: Sequence[tuple[int, int]], places: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Yield edits from left to right; insertions, which have no end, before what is replaced at the same place."""
    both: list[tuple[int, int, int | None]] = [(place, 0, None) for place in places]
    both += [(start, 1, stop) for start, stop in keys]
    for start, _, stop in sorted(both, key=lambda each: (each[0], each[1], -(each[2] or 0))):
        yield start, stop


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.Arg | None:
    """Return an argument of a call by its keyword, or by its position; None where it is not given."""
    for each in call.args:
        if each.keyword is not None and each.keyword.value == keyword:
            return each
    if position is not None and position < len(call.args):
        given = call.args[: position + 1]
        if all(each.keyword is None and not each.star for each in given):
            return given[position]
    return None


def method_of(call: cst.Call) -> str:
    """Return the name of the method that is called; empty for a function."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def is_cuda(call: cst.Call) -> bool:
    """Return whether a script calls ``x.cuda()``, which torch has for this kind of device alone."""
    return method_of(call) == "cuda"


def has_stars(call: cst.Call) -> bool:
    """Return whether some arguments of a call are not written out: ``*args``, ``**kwargs``."""
    return any(each.star for each in call.args)


def constant(node: cst.CSTNode | None) -> str | None:
    """Return the text of a string's value, or of True, False, None and numbers; None for all else."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.value
    return node.value if isinstance(node, cst.Name) and node.value in ("True", "False", "None") else None
