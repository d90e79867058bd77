"""What the documentation site needs of Sphinx besides its extensions: words of ours that become links, and docstrings
that are found although the public names stand in another module than their definitions.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode

import lockstep
from scripts import site_reference

#: ``lockstep.World.mean(…)``, ``LOCKSTEP_KEY=…`` and ``lockstep runs plan …`` in running text.
_NAME = re.compile(r"(lockstep\.\w+(?:\.\w+)?)(?:\(.*\))?")
_VARIABLE = re.compile(r"(LOCKSTEP_[A-Z_]+)(?:=.*)?")
_COMMAND = re.compile(r"lockstep ([a-z]+)(?: ([a-z]+))?(?: .*)?")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the functions of this module, as Sphinx asks."""
    app.connect("env-before-read-docs", _find_comments_of_attributes)
    app.connect("autodoc-process-docstring", _read_docstring)
    app.connect("autodoc-process-signature", _leave_out_constructor)
    app.connect("doctree-read", _link_words)
    app.connect("doctree-read", _write_dashes)
    app.connect("missing-reference", _find_command)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _find_comments_of_attributes(_app: Sphinx, _env: Any, pages: list[str]) -> None:
    """Let autodoc find comments ``#:`` where the public names are defined, though their ``__module__`` is lockstep."""
    if not any(page.startswith("reference/") for page in pages):
        return
    for name in site_reference.homes():
        getattr(lockstep, name)  # which sets it
    ours = ModuleAnalyzer.for_module("lockstep")
    ours.analyze()
    for home in sorted(set(site_reference.homes().values())):
        other = ModuleAnalyzer.for_module(home)
        other.analyze()
        ours.attr_docs |= {place: text for place, text in other.attr_docs.items() if place[0]}
        ours.annotations |= other.annotations
        ours.tagorder |= other.tagorder


def _read_docstring(_app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Read the sections of a docstring, and make links of the documents that it names.

    It is napoleon's reader, but properties are read as methods are: napoleon's own listener takes what stands before a
    colon there for a type.
    """
    kind: Any = "method" if what in ("attribute", "data", "property") else what
    linked = [site_reference.with_pages(line) for line in lines]
    read = GoogleDocstring(linked, what=kind, name=name, obj=obj, options=options).lines()
    lines[:] = [each for line in read for each in _split_parameters(line)]


def _split_parameters(line: str) -> list[str]:
    """Explain each of several parameters that one line explains: "metric, epoch_done: as for save"."""
    found = re.fullmatch(r":param (\w+(?:, \w+)+): (.*)", line)
    return [f":param {name}: {found[2]}" for name in found[1].split(", ")] if found else [line]


def _leave_out_constructor(
    _app: Sphinx, what: str, _name: str, obj: Any, _options: Any, _signature: str | None, _returned: str | None
) -> tuple[str | None, str | None] | None:
    """Show no arguments of a class that scripts do not construct."""
    if what == "class" and "Made by :" in (obj.__doc__ or ""):
        return "", None
    return None


def _link_words(app: Sphinx, doctree: nodes.document) -> None:
    """Make links of public names, variables and commands that stand as code in running text."""
    for literal in [each for each in doctree.findall(nodes.literal) if not _is_linked(each)]:
        found = _referred_to(literal.astext())
        if found is not None:
            domain, role, target = found
            link = addnodes.pending_xref(
                "", refdomain=domain, reftype=role, reftarget=target, refexplicit=True, refdoc=app.env.docname,
                refwarn=False,
            )  # fmt: skip
            literal.replace_self(link)
            link += literal


def _write_dashes(_app: Sphinx, doctree: nodes.document) -> None:
    """Write as a dash the two hyphens that Sphinx puts between a parameter and its explanation."""
    for text in [each for each in doctree.findall(nodes.Text) if each == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


def _referred_to(text: str) -> tuple[str, str, str] | None:
    """Return what a piece of code names: the domain, role and target of a reference to it. None: nothing of ours."""
    name = _NAME.fullmatch(text)
    if name and name[1].split(".")[1] in site_reference.homes():
        return "py", "obj", name[1]
    variable = _VARIABLE.fullmatch(text)
    if variable:
        return "std", "envvar", variable[1]
    command = _COMMAND.fullmatch(text)
    if command:
        labels = site_reference.labels()
        for path in (f"lockstep {command[1]} {command[2]}", f"lockstep {command[1]}"):
            if path in labels:
                return "", "command", path
    return None


def _find_command(app: Sphinx, _env: Any, node: Any, content: nodes.Element) -> nodes.Element | None:
    """Make the link to a command, whose label is no target of a role that keeps the code's font."""
    if node["reftype"] != "command":
        return None
    page, label = site_reference.labels()[node["reftarget"]]
    return make_refnode(app.builder, node["refdoc"], page, label, content)


def _is_linked(literal: nodes.literal) -> bool:
    parent: nodes.Node | None = literal.parent
    while parent is not None:
        if isinstance(parent, (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)):
            return True
        parent = parent.parent
    return False
