"""A port under way: the script, the values of its expressions, where lockstep is initialised, and the remarks."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from lockstep.text import in_one_line
from lockstep.tools.port.remarks import Remark, RemarkKind
from lockstep.tools.port.script import Script, Statement, argument, constant
from lockstep.tools.port.values import Kind, ScriptValues

#: Functions that seed generators, by their full names.
SEEDING = {
    "torch.manual_seed",
    "torch.random.manual_seed",
    "torch.cuda.manual_seed",
    "torch.cuda.manual_seed_all",
    "random.seed",
    "numpy.random.seed",
    "transformers.set_seed",
    "accelerate.utils.set_seed",
    "lightning.seed_everything",
    "lightning.fabric.seed_everything",
    "lightning_fabric.seed_everything",
}


@dataclass(frozen=True)
class InitSite:
    """Where ``lockstep.init()`` is called.

    Args:
        node: the statement that the call replaces, or before which it is inserted.
        named: its World is held by a variable ``world``.
        conditional: it runs only in some cases, or there are several.
        inserted: the call comes before ``node``, which stays.
    """

    node: cst.CSTNode
    named: bool
    conditional: bool
    inserted: bool = False


class Porting:
    """One port under way.

    Args:
        script: the script.
        ranks: the number of ranks that the script ran on, to be written where a number per rank becomes one of all
            ranks; None: the number of ranks that the port runs on.
    """

    def __init__(self, script: Script, *, ranks: int | None = None) -> None:
        self.script = script
        self.values = ScriptValues(script)
        self.ranks = ranks
        self.remarks: list[Remark] = []
        self.init: InitSite | None = None
        #: Loaders whose batch size is multiplied already.
        self.multiplied_loaders: set[int] = set()

    # What is said.

    def changed(self, node: cst.CSTNode, what: str, why: str) -> None:
        """Note that a line was rewritten and does the same."""
        self._say(node, RemarkKind.CHANGED, what, why, "")

    def differs(self, node: cst.CSTNode | None, what: str, why: str, advice: str = "") -> None:
        """Note that a line does something different by design of lockstep."""
        self._say(node, RemarkKind.DIFFERS, what, why, advice)

    def left(self, node: cst.CSTNode | None, what: str, why: str, advice: str) -> None:
        """Note that a line stays as it is, and what to do about it."""
        self._say(node, RemarkKind.LEFT, what, why, advice)

    def refused(self, node: cst.CSTNode | None, what: str, why: str, advice: str) -> None:
        """Note a reason why the script is not ported."""
        self._say(node, RemarkKind.REFUSED, what, why, advice)

    def _say(self, node: cst.CSTNode | None, kind: RemarkKind, what: str, why: str, advice: str) -> None:
        line = 0 if node is None else self.script.line(node)
        remark = Remark(line, kind, what, why, advice)
        if remark not in self.remarks:
            self.remarks.append(remark)

    def short(self, node: cst.CSTNode) -> str:
        """Return the text of a node in one line that is not long."""
        text = in_one_line(self.script.source(node))
        return text if len(text) <= 60 else f"{text[:57]}..."

    # The world.

    def set_init(self, nodes: list[cst.CSTNode], *, inserted: bool = False) -> None:
        """Note where ``lockstep.init()`` will be called; ``inserted``: before the first of ``nodes``."""
        first = nodes[0]
        inner = self.script.around(first, cst.If, cst.For, cst.While, cst.Try, cst.With)
        if len(nodes) == 2 and isinstance(inner, cst.If) and self._are_branches(inner, nodes):
            first = inner
            inner = self.script.around(first, cst.If, cst.For, cst.While, cst.Try, cst.With)
        function = self.script.function(first)
        guarded = inner is not None and (function is None or self.script.inside(inner, function))
        guarded = guarded and not (isinstance(inner, cst.If) and self.is_main_guard(inner))
        conditional = guarded or (len(nodes) > 1 and first is nodes[0])
        free = len(nodes) == 1 and not self.script.has_name("world")
        self.init = InitSite(first, named=free and not conditional, conditional=conditional, inserted=inserted)

    def _are_branches(self, inner: cst.If, nodes: list[cst.CSTNode]) -> bool:
        """Return whether one of two nodes is in the body of an ``if`` and the other in its ``else``."""
        other = inner.orelse
        return (
            isinstance(other, cst.Else)
            and self.script.inside(nodes[0], inner.body)
            and self.script.inside(nodes[1], other.body)
        )

    def is_main_guard(self, node: cst.If) -> bool:
        """Return whether it is ``if __name__ == "__main__"``."""
        return "__name__" in self.script.source(node.test)

    def runs_after_init(self, node: cst.CSTNode) -> bool:
        """Return whether lockstep is initialised where ``node`` runs.

        That is so after the call in the same function, and after the call of that function in functions that call it.
        In other functions it is taken for granted: otherwise ``lockstep.world()`` raises an error there.
        """
        init, script = self.init, self.script
        if init is None:
            return False
        mine, its = script.function(node), script.function(init.node)
        if mine is its:
            if init.inserted:
                return script.begin(node) >= script.begin(init.node)
            later = script.begin(node) > script.begin(init.node)
            return later and not (isinstance(init.node, cst.If) and script.inside(node, init.node))
        if its is None:
            return True
        calls = [each for each in script.all(cst.Call) if script.function(each) is mine and self._reaches(each, its)]
        if not calls:
            return mine is not None
        first = min(calls, key=script.begin)
        return script.begin(node) > script.begin(first) and not script.inside(node, first)

    def _reaches(self, call: cst.Call, wanted: cst.FunctionDef, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether a call runs a function, also through others."""
        for each in self.values.functions(call):
            if each is wanted:
                return True
            if id(each) not in seen:
                inner = self.script.all(cst.Call, each.body)
                if any(self._reaches(other, wanted, seen | {id(each)}) for other in inner):
                    return True
        return False

    def world(self, node: cst.CSTNode) -> str:
        """Return the name of the World at a place."""
        init = self.init
        if init is None or not init.named:
            return "lockstep.world()"
        its = self.script.function(init.node)
        visible = its is None or self.script.inside(node, its)
        return "world" if visible else "lockstep.world()"

    def size(self, node: cst.CSTNode) -> str:
        """Return the text for the number of ranks at a place."""
        return f"{self.world(node)}.world_size" if self.ranks is None else str(self.ranks)

    def size_of(self, node: cst.CSTNode) -> str:
        """Return the text for a number of ranks that the script uses: the number that it ran on, if that is given and a
        learning rate is scaled by it; otherwise the number of ranks at run time."""
        assigned = self.script.around(node, cst.Assign)
        names = self.script.source(assigned.targets[0].target) if isinstance(assigned, cst.Assign) else ""
        call = self.script.around(node, cst.Call)
        scales = isinstance(call, cst.Call) and self.values.may(call, Kind.OPTIMIZER)
        if scales or "lr" in names.lower() or "learning_rate" in names.lower():
            return self.size(node)
        return f"{self.world(node)}.world_size"

    def init_call(self, at: cst.CSTNode, *given: str, seed: str | None = None) -> str:
        """Return the statement that initialises lockstep, and note what happens to seeds.

        Args:
            at: the place of the statement.
            given: its arguments.
            seed: the text of its seed; None: it follows from the script's own seeding.
        """
        assert self.init is not None
        arguments = ", ".join([*given, *(self._seed(at) if seed is None else [f"seed={seed}"])])
        head = "world = " if self.init.named else ""
        return f"{head}lockstep.init({arguments})"

    def _seed(self, at: cst.CSTNode) -> list[str]:
        calls = [each for each in self.script.all(cst.Call) if self._seeds(each)]
        if not calls:
            self.differs(
                at,
                "random numbers",
                "the script seeds nothing; lockstep.init() seeds every rank with 0, as one process",
            )
            return []
        early = [each for each in calls if self._may_run_before(each, at)]
        if not early:
            return []
        texts = {self.script.source(each.args[0].value) if each.args else "" for each in early}
        text = texts.pop() if len(texts) == 1 else ""
        node = early[0].args[0].value if early[0].args else early[0]
        plain = isinstance(node, cst.Integer) or (isinstance(node, (cst.Name, cst.Attribute)) and "(" not in text)
        here = self.script.function(early[0]) is self.script.function(at) or isinstance(node, cst.Integer)
        depends = any(self.values.may(node, kind) for kind in (Kind.RANK, Kind.LOCAL_RANK))
        if text and plain and here and not depends:
            self.changed(
                at, f"seed={text}", "lockstep.init() seeds the generators as well, so it gets the script's seed"
            )
            return [f"seed={text}"]
        self.changed(
            at, "seed=False", "the script seeds its generators before this line, so lockstep.init() leaves them alone"
        )
        return ["seed=False"]

    def _seeds(self, call: cst.Call) -> bool:
        if self.script.full_name(call.func) in SEEDING:
            return True
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        return method == "seed_everything"

    def _may_run_before(self, call: cst.Call, at: cst.CSTNode, seen: frozenset[int] = frozenset()) -> bool:
        """Return whether a call may run before a place: it stands before it, or in a function that is called before."""
        mine, its = self.script.function(call), self.script.function(at)
        if mine is its:  # also where it is the statement itself, before which lockstep is initialised
            return self.script.begin(call) < self.script.begin(at) or self.script.statement(call) is at
        if mine is None:  # at the top level, and the place is in a function
            return not any(
                self.is_main_guard(each) for each in self.script.all(cst.If) if self.script.inside(call, each)
            )
        if id(mine) in seen:
            return False
        callers = self.values.calls[id(mine)]
        return any(self._may_run_before(each, at, seen | {id(mine)}) for each in callers)

    # Common edits.

    def wrap_call(self, call: cst.Call, name: str, *more: str) -> None:
        """Put a call into another one."""
        tail = "".join(f", {each}" for each in more)
        self.script.replace(call, lambda: f"{name}({self.script.inner(call)}{tail})")

    def multiplied(self, value: cst.BaseExpression) -> None:
        """Multiply a number per rank by the number of ranks."""
        simple = isinstance(value, (cst.Name, cst.Attribute, cst.Integer, cst.Call, cst.Subscript))

        def make() -> str:
            text = self.script.inner(value)
            return f"{text if simple else f'({text})'} * {self.size(value)}"

        self.script.replace(value, make)

    def expression_statement(self, node: cst.CSTNode) -> Statement | None:
        """Return the line that consists of a call, or assigns its result; None for any other call."""
        statement = self.script.statement(node)
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            return None
        small = statement.body[0]
        return statement if isinstance(small, cst.Expr) and small.value is node else None

    def keyword_text(self, call: cst.Call, keyword: str, position: int | None, default: str) -> str:
        """Return the text of an argument, or its default."""
        given = argument(call, keyword, position)
        return default if given is None else self.script.source(given.value)

    def is_constant(self, call: cst.Call, keyword: str, *values: str) -> bool:
        """Return whether an argument is not given, or one of these constants."""
        given = argument(call, keyword)
        return given is None or constant(given.value) in values
