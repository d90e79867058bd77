"""The reference of the documentation site: every public name, every command with its options, every variable.

Sphinx fills in the docstrings of the public names. Commands are read from click, variables from the docstring of
``knobs.py``. All of it is reStructuredText, since the docstrings are.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from lockstep import knobs
from lockstep.cli import main

PACKAGE = Path(__file__).parents[1] / "src" / "lockstep"


@dataclass(frozen=True)
class Group:
    """A page of public names.

    Args:
        page: its name in the site.
        title: its heading.
        words: what stands below the heading.
        listed: the public names, in the order of the page.
        more: classes that are no public names but returned or handed over by these, each with its module.
    """

    page: str
    title: str
    words: str
    listed: str
    more: str = ""

    @property
    def names(self) -> list[str]:
        """The public names."""
        return self.listed.split()


GROUPS = (
    Group(
        "world",
        "Ranks and the world",
        "How a process joins the job, what it is told there, and the small collectives of a script. "
        "See the :doc:`guide </guide>`.",
        "init world World shutdown expect_slow spawn",
        "lockstep.launch.spawn.SpawnContext",
    ),
    Group(
        "notebooks",
        "Notebooks",
        "Ranks that live on and run cells. See :doc:`notebooks </notebooks>`.",
        "InteractiveRanks load_ipython_extension unload_ipython_extension",
        "lockstep.interactive.cell.RunningCell lockstep.interactive.cell.RemoteValue",
    ),
    Group(
        "replicas",
        "Replicas and gradients",
        "Models that are the same on every rank, and gradients that are averaged over them. "
        "See the :doc:`guide </guide>`, :doc:`what the mean is a mean of </weights>` and "
        ":doc:`losses of the whole batch </gathered>`.",
        "replicate release no_sync join DistributedDataParallel gathered clip_grad_norm_ grad_norms GradNorms "
        "scale_loss loss_scale LossScale SyncBatchNorm convert_sync_batchnorm register_comm_hook bf16_compress_hook "
        "fp16_compress_hook LocalSteps finish_round DataParallel",
        "lockstep.ddp.comm_hooks.GradBucket lockstep.data_parallel.copies.Copies",
    ),
    Group(
        "data",
        "Data",
        "The global batch, each rank's share of it, slices, parts of lists, and data that ranks share. See the "
        ":doc:`guide </guide>` and :doc:`the same result on any number of ranks </exactness>`.",
        "shard ShardedLoader Slices Step BatchShare DistributedSampler split Split once_per_machine",
        "lockstep.data.steps.Steps",
    ),
    Group(
        "saving",
        "Checkpoints",
        "Saving, resuming, weights from other files, and evaluation beside training. See :doc:`checkpoints "
        "</checkpoints>` and :doc:`evaluation </evaluate>`.",
        "Checkpointer Restored Retention load_weights LoadedWeights Evaluation",
    ),
    Group(
        "numbers",
        "Numbers and progress",
        "What a loop logs and shows. See :doc:`metrics </metrics>`.",
        "Log track",
        "lockstep.progress.Track",
    ),
    Group(
        "errors",
        "Errors",
        "Wrong arguments are :exc:`ValueError` or :exc:`TypeError`, as everywhere in Python. "
        "Everything else that lockstep itself reports is a :exc:`LockstepError`.",
        "LockstepError EnvironmentMismatch RendezvousError CollectiveTimeout CollectiveMismatch PeerLost "
        "ReplicaMismatch NonFiniteGradient NoTerminal LaunchError RankFailed CellFailed CellInterrupted "
        "CheckpointError CheckpointCorrupt CheckpointMismatch",
    ),
)

#: What is shown of a class besides the members that have a name: calls, loops and lengths.
_SPECIAL = "__call__, __iter__, __len__"


@functools.cache
def homes() -> dict[str, str]:
    """Return the public names, each with the module that defines it."""
    lines = map(str.split, (PACKAGE / "__init__.pyi").read_text().splitlines())
    return {words[3]: words[1] for words in lines if words[4:5] == ["as"]}


def pages() -> dict[str, str]:
    """Return the pages of the reference: file -> text.

    Raises:
        ValueError: a public name is on no page or on several, or a variable has no explanation.
    """
    listed = [name for group in GROUPS for name in group.names]
    wrong = {name for name in {*listed, *homes()} if listed.count(name) != 1 or name not in homes()}
    if wrong:
        raise ValueError(f"scripts/site_reference.py: not on exactly one page of public names: {sorted(wrong)}")
    found = {f"reference/{group.page}.rst": _page_of(group) for group in GROUPS}
    found["reference/names.rst"] = _list_of_names()
    found["reference/environment.rst"] = _environment()
    return found | _commands()


# Public names.


def _page_of(group: Group) -> str:
    lines = [*_heading(group.title), ".. currentmodule:: lockstep", "", group.words, ""]
    if group.page == "errors":
        lines += ["::", "", *_tree_of_errors(), ""]
    for name in group.names:
        lines += _directive(name, definition(name))
    if group.more:
        lines += [*_heading("What these return or hand over", "-")]
        for full in group.more.split():
            lines += [f".. autoclass:: {full}()", "   :members:", f"   :special-members: {_SPECIAL}", ""]
    return "\n".join(lines)


def _directive(name: str, defined: ast.FunctionDef | ast.ClassDef) -> list[str]:
    if isinstance(defined, ast.FunctionDef):
        return [f".. autofunction:: {name}", ""]
    is_error = homes()[name] == "lockstep.errors"
    lines = [f".. {'autoexception' if is_error else 'autoclass'}:: {name}", "   :members:"]
    lines += ["   :show-inheritance:"] if defined.bases else []
    return [*lines, f"   :special-members: {_SPECIAL}", ""]


def definition(name: str) -> ast.FunctionDef | ast.ClassDef:
    """Return the statement that defines a public name."""
    path = PACKAGE.joinpath(*homes()[name].split(".")[1:]).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    raise ValueError(f"{path} does not define {name}")


def members(name: str) -> list[str]:
    """Return the public members that a class itself defines: methods, properties, and attributes of its instances.

    Attributes that the constructor takes are left out where the class explains them among its arguments.
    """
    found: dict[str, None] = {}
    defined = definition(name)
    for node in defined.body if isinstance(defined, ast.ClassDef) else ():
        if isinstance(node, ast.FunctionDef):
            found[node.name] = None
            if node.name == "__init__":
                found |= dict.fromkeys(_attributes(node))
        elif isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = None
    arguments = re.findall(r"^    (\w+(?:, \w+)*): ", ast.get_docstring(defined) or "", re.MULTILINE)
    explained = {each for names in arguments for each in names.split(", ")}
    return [member for member in found if not member.startswith("_") and member not in explained]


def _attributes(constructor: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(constructor):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else ()
        )
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
                    yield each.attr


def _tree_of_errors() -> list[str]:
    text = ast.get_docstring(ast.parse((PACKAGE / "errors.py").read_text())) or ""
    return [line for line in text.splitlines() if line.startswith("    ")]


def _list_of_names() -> str:
    lines = [*_heading("Public names"), "What ``import lockstep`` gives. Each name stands on one of these pages.", ""]
    for group in GROUPS:
        lines += [f":doc:`{group.title} <{group.page}>`", "", ".. list-table::", "   :widths: 30 70", ""]
        for name in group.names:
            lines += [f"   * - :py:obj:`~lockstep.{name}`", f"     - {_first_sentence(name)}"]
        lines.append("")
    lines += [".. py:data:: lockstep.__version__", "   :type: str", "", "   The version, such as ``0.1.0``.", ""]
    lines += [".. toctree::", "   :hidden:", "", *(f"   {group.page}" for group in GROUPS), ""]
    return "\n".join(lines)


def _first_sentence(name: str) -> str:
    paragraph = " ".join((ast.get_docstring(definition(name)) or "").partition("\n\n")[0].split())
    role = r":(?:class|func|meth|attr):`(?![~<])([^`<.]+(?:\.[^`<]+)?)`"
    full = re.sub(role, lambda found: f":py:obj:`{_full(found[1])}`", paragraph)
    return with_pages(re.split(r"(?<=[^.*]\.)\s", full)[0])


def with_pages(text: str) -> str:
    """Return the text of a docstring with a link for each document that it names, such as docs/weights.md."""
    return re.sub(r"(?<![\w/`])docs/(\w+)\.md", r":doc:`\1 </\1>`", text)


def _full(name: str) -> str:
    return name if name.startswith(("lockstep.", "torch.")) else f"lockstep.{name}"


# Commands.


@dataclass(frozen=True)
class Shown:
    """A command as the reference shows it.

    Args:
        path: its name, with the names of the groups that it belongs to.
        usage: what to write, in one line.
        help: its explanation, as click has it.
        options: each option as ``--help`` shows it, and its explanation.
        commands: the commands of a group.
    """

    path: str
    usage: str
    help: str
    options: tuple[tuple[str, str], ...]
    commands: tuple[Shown, ...]


def shown(command: click.Command = main, path: str = "lockstep", parent: click.Context | None = None) -> Shown:
    """Return a command and those below it; ``--help``, which all have, and hidden options are left out."""
    context = command.make_context(path, [], parent=parent, resilient_parsing=True)
    options = [
        record
        for each in command.get_params(context)
        if isinstance(each, click.Option) and "--help" not in each.opts and (record := each.get_help_record(context))
    ]
    below = command.list_commands(context) if isinstance(command, click.Group) else []
    return Shown(
        path,
        " ".join([path, *command.collect_usage_pieces(context)]),
        inspect.cleandoc(command.help or ""),
        tuple(options),
        tuple(shown(command.commands[name], f"{path} {name}", context) for name in below),  # type: ignore[attr-defined]
    )


@functools.cache
def labels() -> dict[str, tuple[str, str]]:
    """Return the page of each command, and its label there: ``lockstep runs ls`` -> its group's and its own."""
    return {
        each.path: (f"reference/{_page_name(command)}", _label(each))
        for command in shown().commands
        for each in (command, *command.commands)
    }


def _commands() -> dict[str, str]:
    top = shown()
    pages = {f"reference/{_page_name(command)}.rst": "\n".join(_of_command(command, "=")) for command in top.commands}
    lines = [*_heading("The command line"), *_of_command(top, None)]
    lines += ["An option may be written with underscores, as ``torchrun`` has it (``--nproc_per_node``).", ""]
    lines += [".. list-table::", "   :widths: 30 70", ""]
    for command in top.commands:
        for each in command.commands or [command]:
            first = each.help.partition("\n\n")[0]
            lines += [f"   * - :ref:`{each.path} <{_label(each)}>`", f"     - {_inline(first)}"]
    lines += ["", ".. toctree::", "   :hidden:", ""]
    lines += [f"   {command.path} <{_page_name(command)}>" for command in top.commands]
    return pages | {"reference/commands.rst": "\n".join([*lines, ""])}


def _page_name(command: Shown) -> str:
    return f"command-{command.path.split()[1]}"


def _label(command: Shown) -> str:
    return f"command-{'-'.join(command.path.split()[1:])}"


def _of_command(command: Shown, underline: str | None) -> list[str]:
    """Return the lines about a command; without a heading where ``underline`` is None, whose commands are elsewhere."""
    lines = []
    if underline is not None:
        lines = [f".. _{_label(command)}:", "", *_heading(f"``{command.path}``", underline)]
    lines += [".. code-block:: none", "", f"   {command.usage}", "", *_explanation(command.help)]
    if command.options:
        lines += [f".. program:: {command.path}", ""]
    for names, words in command.options:
        lines += [f".. option:: {names}", "", f"   {_inline(words)}", ""]
    if underline is not None:
        for below in command.commands:
            lines += _of_command(below, "-")
    return lines


def _explanation(help: str) -> list[str]:
    lines = []
    for paragraph in help.split("\n\n"):
        if paragraph.startswith("\b"):  # lines that click does not join
            lines += ["::", "", *(f"   {line}" for line in paragraph.splitlines()[1:]), ""]
        else:
            lines += [_inline(" ".join(paragraph.split())), ""]
    return lines


_WORDS = re.compile(
    r"(?<![\w`-])(?:(?P<option>--?[a-z][\w-]*(?:[ =](?=[\w:]*[A-Z])[\w:/.]+)?)|(?P<variable>LOCKSTEP_[A-Z_]+)(?:=\w+)?)"
)


def _inline(text: str) -> str:
    """Return plain text as reStructuredText, with options and variables set as such."""
    parts, end = [], 0
    for found in _WORDS.finditer(text):
        parts.append(_escaped(text[end : found.start()]))
        parts.append(f":envvar:`{found[0]} <{found['variable']}>`" if found["variable"] else f"``{found[0]}``")
        end = found.end()
        if text[end : end + 1].isalnum():
            parts.append("\\ ")
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return re.sub(r"([\\*`|:]|_\b)", r"\\\1", text)


# Environment variables.


def variables() -> dict[str, str]:
    """Return the explanation of each variable, from the table at the top of ``knobs.py``."""
    found: dict[str, list[str]] = {}
    rows: list[str] = []
    for line in inspect.cleandoc(knobs.__doc__ or "").splitlines():
        row = re.fullmatch(r"``(LOCKSTEP_\w+)`` +(.*)", line)
        if row:
            rows = found.setdefault(row[1], [])
            rows.append(row[2])
        elif line.startswith(" "):
            rows.append(line.strip())
    return {name: " ".join(words) for name, words in found.items()}


def _environment() -> str:
    explained = variables()
    if explained.keys() != knobs.names():
        raise ValueError(f"knobs.py explains other variables than it has: {sorted(explained.keys() ^ knobs.names())}")
    ours = [name for name in explained if name in knobs.OF_A_RANK]
    lines = [*_heading("Environment variables")]
    lines += ["What you can set for a program or a command.", ""]
    for name, words in explained.items():
        if name not in ours:
            lines += [f".. envvar:: {name}", "", f"   {words}", ""]
    lines += [*_heading("Set by lockstep itself", "-")]
    lines += ["The launcher sets these for its ranks, and a rank for its child processes. Leave them alone.", ""]
    for name in ours:
        lines += [f".. envvar:: {name}", "", f"   {explained[name]}", ""]
    return "\n".join(lines)


def _heading(text: str, underline: str = "=") -> list[str]:
    return [text, underline * len(text), ""]
