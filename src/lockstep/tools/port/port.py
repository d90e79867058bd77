"""Port one script: choose the rules for its kind, make the edits, and check the result."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import libcst as cst

from lockstep.tools.port.porting import Porting
from lockstep.tools.port.remarks import CannotPort, PortVerdict, Remark, RemarkKind, verdict_of
from lockstep.tools.port.rules.accelerate import AccelerateScript
from lockstep.tools.port.rules.fabric import FabricScript
from lockstep.tools.port.rules.horovod import HorovodScript
from lockstep.tools.port.rules.one_process import OneProcessScript
from lockstep.tools.port.rules.torch_ddp import TorchDdp
from lockstep.tools.port.script import Script


class ScriptKind(Protocol):
    """Rules for one kind of script."""

    def matches(self, porting: Porting) -> bool:
        """Return whether the script is one of these."""

    def port(self, porting: Porting) -> None:
        """Record the edits of the script, and a remark on each of its lines that they concern."""


#: The first that matches ports the script.
_KINDS: Sequence[ScriptKind] = (HorovodScript(), AccelerateScript(), FabricScript(), TorchDdp(), OneProcessScript())
#: What trains in another way than data-parallel, or hides the loop -> what to do instead.
_OUT_OF_REACH = {
    "torch.distributed.fsdp": "parameters in parts (FSDP): keep it, started by lockstep run",
    "torch.distributed._composable": "parameters in parts (FSDP): keep it, started by lockstep run",
    "torch.distributed.tensor": "tensor parallelism stays torch's own; start the script by lockstep run as it is",
    "torch.distributed.rpc": "torch's RPC does not train on equal batches",
    "torch.distributed.pipelining": "a pipeline is not data-parallel",
    "deepspeed": "keep DeepSpeed, or write the loop for torch first",
    "pytorch_lightning": "the loop is in Lightning's Trainer (docs/guides/lightning.md)",
    "lightning.pytorch": "the loop is in Lightning's Trainer (docs/guides/lightning.md)",
    "lightning.Trainer": "the loop is in Lightning's Trainer (docs/guides/lightning.md)",
    "transformers.Trainer": "its loop runs under lockstep run as it is (docs/ecosystem.md)",
    "composer": "the loop is in Composer's Trainer (docs/guides/composer.md)",
    "torch_xla": "lockstep does not run on TPUs",
}
#: Packages of which nothing may be left in a ported script.
_FOREIGN = ("horovod",)


@dataclass(frozen=True)
class Port:
    """A script that was ported, or the reasons why it was not."""

    path: Path
    verdict: PortVerdict
    before: str
    #: The same as ``before`` where nothing was ported.
    after: str
    #: The remarks in the order of their lines.
    remarks: list[Remark] = field(default_factory=list)

    @property
    def diff(self) -> str:
        """The unified diff; empty if nothing was changed."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), str(self.path), str(self.path)
        )
        return "".join(each if each.endswith("\n") else f"{each}\n\\ No newline at end of file\n" for each in lines)

    def count(self, kind: RemarkKind) -> int:
        """Return the number of remarks of one kind."""
        return sum(each.kind is kind for each in self.remarks)


def port(path: Path, *, ranks: int | None = None) -> Port:
    """Port the script in a file; the file stays as it is.

    Args:
        path: a file of Python, in UTF-8.
        ranks: the number of ranks that the script ran on, which is written where a number per rank becomes one of all
            ranks; None: the number of ranks that the port will run on.

    Raises:
        CannotPort: it is not valid Python.
        OSError: it can't be read.
    """
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise CannotPort(f"{path}: not in UTF-8 ({error}); convert the file, then port again") from None
    return port_text(text, path, ranks=ranks)


def port_text(text: str, path: Path, *, ranks: int | None = None) -> Port:
    """Port a script that is given as text; arguments and errors are those of :func:`port`."""
    script = Script(text)
    if _imports_lockstep(script):
        remark = Remark(
            0, RemarkKind.CHANGED, "import lockstep", "the script uses lockstep already, so nothing is changed"
        )
        return Port(path, PortVerdict.ALREADY, text, text, [remark])
    porting = Porting(script, ranks=ranks)
    _refuse_out_of_reach(porting)
    kind = next((each for each in _KINDS if each.matches(porting)), None)
    if kind is None:
        porting.refused(
            None, "no training", "there is no backward() in this file", "name the file that has the training loop"
        )
    elif not porting.remarks:
        kind.port(porting)
    after = text
    if verdict_of(porting.remarks) is not PortVerdict.REFUSED:
        after = _finished(script)
        _look_at(after, porting)
    remarks = sorted(porting.remarks, key=lambda each: (each.line, each.kind.code, each.what))
    verdict = verdict_of(remarks)
    if verdict is PortVerdict.REFUSED:
        return Port(path, verdict, text, text, [each for each in remarks if each.kind is RemarkKind.REFUSED])
    return Port(path, verdict, text, after, remarks)


def _imports_lockstep(script: Script) -> bool:
    names = [alias.name for node in script.all(cst.Import) for alias in node.names]
    names += [node.module for node in script.all(cst.ImportFrom) if node.module is not None]
    return any(script.source(each).split(".")[0] == "lockstep" for each in names)


def _refuse_out_of_reach(porting: Porting) -> None:
    script = porting.script
    imports: list[cst.Import | cst.ImportFrom] = [*script.all(cst.Import), *script.all(cst.ImportFrom)]
    for node in imports:
        for name in _imported(script, node):
            for reach, advice in _OUT_OF_REACH.items():
                if name == reach or name.startswith(f"{reach}."):
                    porting.refused(node, name, "this is not ported", advice)


def _imported(script: Script, node: cst.Import | cst.ImportFrom) -> list[str]:
    """Return the full names that a statement imports."""
    if isinstance(node, cst.Import):
        return [script.source(alias.name) for alias in node.names]
    module = "" if node.module is None or node.relative else script.source(node.module)
    if isinstance(node.names, cst.ImportStar):
        return [module]
    return [f"{module}.{script.source(alias.name)}" for alias in node.names]


def _finished(script: Script) -> str:
    """Return the edited text, with the imports that it needs and without those that it no longer does."""
    edited = script.edited()
    if edited == script.text:
        return edited
    after = Script(edited)
    if sum(each.value == "world" and not _is_attribute(after, each) for each in after.all(cst.Name)) == 1:
        after = Script(edited.replace("world = lockstep.init(", "lockstep.init("))  # the variable would not be used
    _drop_imports(after, script.unused_imports())
    _add_imports(after)
    return after.edited()


def _is_attribute(script: Script, name: cst.Name) -> bool:
    outer = script.parent(name)
    return isinstance(outer, cst.Attribute) and outer.attr is name


def _drop_imports(script: Script, unused_before: frozenset[str]) -> None:
    """Drop imports at the top level that the edits have made needless; those that nothing used before stay."""
    gone = script.unused_imports() - unused_before
    for statement in script.module.body:
        if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
            continue
        small = statement.body[0]
        if not isinstance(small, (cst.Import, cst.ImportFrom)) or isinstance(small.names, cst.ImportStar):
            continue
        kept = [alias for alias in small.names if _bound(alias) not in gone]
        if not kept:
            script.remove(statement)
        elif len(kept) < len(small.names):
            kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            script.replace(small, script.module.code_for_node(small.with_changes(names=kept)))


def _add_imports(script: Script) -> None:
    """Import lockstep, and other names that the edits use, after the script's imports that come before their use."""
    names = [*(name for name in ("contextlib", "torch") if script.unbound(name)), "lockstep"]
    body = script.module.body
    last = None
    for each in body:
        if isinstance(each, (cst.FunctionDef, cst.ClassDef, cst.If, cst.For, cst.While, cst.With)):
            break
        small = each.body[0] if isinstance(each, cst.SimpleStatementLine) and each.body else None
        if isinstance(small, (cst.Import, cst.ImportFrom)):
            last = each
        elif any(name.value in names for name in script.all(cst.Name, each)):
            break
    lines = "\n".join(f"import {name}" for name in names)
    if last is not None:
        script.append_line(last, lines)
        return
    first = body[1] if script.module.get_docstring() is not None and len(body) > 1 else body[0]
    if isinstance(first, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
        script.insert_before(first, lambda: lines)


def _bound(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds."""
    if alias.evaluated_alias is not None:
        return alias.evaluated_alias
    return alias.evaluated_name.split(".")[0]


def _look_at(after: str, porting: Porting) -> None:
    """Check that the ported text is valid Python and no longer uses the library that it was ported from."""
    for node in ast.walk(ast.parse(after)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in _FOREIGN:
                porting.refused(None, name, "a use of it would be left in the port", "remove that, then port again")
                return
