"""The pages of the documentation site: where each comes from, and how links between them lead to other pages.

``docs/index.md`` lists the pages in their order of reading. Documents stay where they are and link to each other by
relative paths; here they are copied into one folder for Sphinx, under the names that they have in the site. A link to a
file that is no document leads to a page that stands for it: the list of public names for ``__init__.pyi``, say.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from scripts import site_reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
RESULTS = ROOT / "benchmarks" / "results"

#: File or folder -> the page that stands for it.
_NAMED = {
    ROOT / "README.md": "overview.md",
    ROOT / "ARCHITECTURE.md": "architecture.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "src" / "lockstep" / "__init__.pyi": "reference/names.rst",
    ROOT / "src" / "lockstep" / "cli": "reference/commands.rst",
    ROOT / "src" / "lockstep" / "knobs.py": "reference/environment.rst",
    ROOT / "src" / "lockstep" / "errors.py": "reference/errors.rst",
    RESULTS: "measurements/index.md",
}
_PICTURES = (".png", ".svg")
#: Of files that are shown as they are.
_LANGUAGES = {".py": "python", ".pyi": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
#: Section of the index -> the folder whose pages it takes where no section lists them.
_FOLDERS = {"Start": "guides", "Symptoms": "symptoms"}

_HEADING = re.compile(r"# (.+)")
_ITEM = re.compile(r"- \[(?P<title>[^\]]+)\]\([^)]+\): (?P<words>.+)")
_LINK = re.compile(r"\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
_IMAGE = re.compile(r"!\[(?P<words>[^\]]*)\]\((?P<path>[^)]+)-light\.png\)")
_FENCE = re.compile(r"^ *(```|~~~)")


class BrokenLink(ValueError):
    """A link of a document that leads nowhere."""


@dataclass(frozen=True)
class Item:
    """A page in the list of pages.

    Args:
        title: what the list calls it.
        page: its file in the site's sources.
        words: what it is about, in a line of Markdown.
        lead: what the list says before it.
    """

    title: str
    page: str
    words: str
    lead: str = ""

    @property
    def name(self) -> str:
        """Sphinx's name of the page."""
        return _without_suffix(self.page)


@dataclass(frozen=True)
class Section:
    """A section of the list of pages."""

    title: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class Contents:
    """What ``docs/index.md`` says."""

    title: str
    words: str
    sections: tuple[Section, ...]


def contents(index: Path = INDEX, pages: Mapping[Path, str] | None = None) -> Contents:
    """Return the list of pages.

    Args:
        index: the file that has it.
        pages: as :func:`all_pages` returns them.

    Raises:
        ValueError: a line of a list has no link.
        BrokenLink: a link leads nowhere.
    """
    pages = all_pages() if pages is None else pages
    head, *parts = re.split(r"^## ", index.read_text(), flags=re.MULTILINE)
    title, _, words = head.partition("\n")
    sections = [_section(index, part, pages) for part in parts]
    listed = {item.page for section in sections for item in section.items}  # anywhere, so that no page is there twice
    sections = [
        replace(section, items=(*section.items, *_unlisted(section.title, listed, pages))) for section in sections
    ]
    return Contents(title.removeprefix("# "), linked(words.strip(), index, pages), tuple(sections))


def _section(index: Path, part: str, pages: Mapping[Path, str]) -> Section:
    title, _, text = part.partition("\n")
    items: list[Item] = []
    lead: list[str] = []
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        if line.startswith("- "):
            first, *others = _items(index, line, pages)
            items += [replace(first, lead=linked(" ".join(lead).strip(), index, pages)), *others]
            lead = []
        else:
            lead.append(line)
    return Section(title, tuple(items))


def _unlisted(title: str, listed: Collection[str], pages: Mapping[Path, str]) -> Iterator[Item]:
    """Yield the pages of a section's folder that no section lists."""
    folder = _FOLDERS.get(title)
    if folder is not None:
        more = sorted(DOCS.glob(f"{folder}/*.md"), key=lambda path: (path.stem != "index", path.stem))
        yield from (_item(path, pages[path]) for path in more if pages[path] not in listed)


def _items(index: Path, line: str, pages: Mapping[Path, str]) -> Iterator[Item]:
    """Yield what a line of the list names: a page and what it is about, or several that say that themselves."""
    found = [_target(index, link["path"]) for link in _LINK.finditer(line)]
    for target in found:
        if target not in pages:
            raise BrokenLink(f"{index.name} links to {target}, which is no page of the site")
    one = _ITEM.fullmatch(line)
    if one is not None:
        yield Item(one["title"], pages[found[0]], linked(one["words"], index, pages))
    elif not found:
        raise ValueError(f"{index.name}: no page is linked in {line!r}")
    else:
        yield from (_item(target, pages[target]) for target in found)


def _item(path: Path, page: str) -> Item:
    """Describe a page by its heading and its first sentence."""
    text = path.read_text()
    title = heading(text, path.name)
    _, _, first = text.partition("\n\n")
    paragraph = "" if re.match(r"#|```|\||>|- |<!--", first) else " ".join(first.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?!])\s", paragraph)[0].rstrip(".:")
    return Item(title, page, re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence))


def heading(text: str, name: str) -> str:
    """Return the heading of a document.

    Raises:
        ValueError: it does not begin with one.
    """
    found = _HEADING.match(text)
    if found is None:
        raise ValueError(f"{name} does not begin with a heading")
    return found[1]


def all_pages() -> dict[Path, str]:
    """Return what the site has: a document, a picture or another file or folder -> its file in the site's sources."""
    documents = {
        path: path.relative_to(DOCS).as_posix()
        for path in sorted(DOCS.rglob("*"))
        if path.suffix in (".md", *_PICTURES)
    }
    results = {path: f"measurements/{path.name}" for path in sorted(RESULTS.glob("*.md"))}
    found = documents | results | _NAMED
    return _sources(path for path in found if path.suffix == ".md") | found


def _sources(documents: Iterable[Path]) -> dict[Path, str]:
    """Return the files and folders that documents link to, apart from pictures, with a page for each."""
    linked = {
        _target(document, found["path"]) for document in documents for found in _LINK.finditer(document.read_text())
    }
    shown = sorted(path for path in linked if path.exists() and path.suffix not in _PICTURES)
    return {path: f"sources/{path.relative_to(ROOT).with_suffix('.md').as_posix()}" for path in shown}


def stage(folder: Path) -> Contents:
    """Write the site's sources into a new ``folder``, and return the list of pages.

    Raises:
        BrokenLink: a link of a document leads nowhere.
        FileExistsError: the folder exists.
    """
    folder.mkdir(parents=True)
    pages = all_pages()
    found = contents(pages=pages)
    for path, page in pages.items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in _PICTURES:
            shutil.copyfile(path, folder / page)
    texts = {page: _text(path, pages) for path, page in pages.items() if page.endswith(".md") and path != RESULTS}
    texts |= {"index.md": front(found), _NAMED[RESULTS]: _measurements(pages)}
    texts |= site_reference.pages()
    for page, text in texts.items():
        (folder / page).write_text(text)
    return found


def _text(path: Path, pages: Mapping[Path, str]) -> str:
    if path.suffix == ".md":
        return linked(path.read_text(), path, pages)
    head = f"---\norphan: true\n---\n\n# {path.relative_to(ROOT).as_posix()}\n\n"
    if path.is_dir():
        return head + "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()) if each.name != "__pycache__")
    return f"{head}```{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"


def linked(text: str, path: Path, pages: Mapping[Path, str]) -> str:
    """Return the text of a document with its links as they are among the site's sources.

    Args:
        text: Markdown.
        path: the document's file, to which its links are relative.
        pages: as :func:`all_pages` returns them.

    Raises:
        BrokenLink: a link leads to a file that is not there, or that has no page.
    """
    here = os.path.dirname(pages[path])

    def replaced(found: re.Match[str]) -> str:
        if "://" in found["path"] or found["path"].startswith("mailto:"):
            return found[0]
        target = _target(path, found["path"])
        page = pages.get(target)
        if page is None:
            raise BrokenLink(f"{path.relative_to(ROOT)} links to {found['path']}, which is no page of the site")
        return f"]({os.path.relpath(page, here or '.')}{found['anchor'] or ''})"

    def in_both_themes(found: re.Match[str]) -> str:
        if not (path.parent / f"{found['path']}-dark.png").exists():
            return found[0]
        return "".join(
            f"![{found['words']}]({found['path']}-{theme}.png){{.only-{theme}}}" for theme in ("light", "dark")
        )

    lines = []
    for line, is_code in _lines(text):
        lines.append(line if is_code else _LINK.sub(replaced, _IMAGE.sub(in_both_themes, line)))
    return "".join(lines)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a block of code."""
    fence: str | None = None
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if fence is None:
            fence = found[1] if found else None
            yield line, fence is not None
        else:
            yield line, True
            fence = None if found and found[1] == fence else fence


def _target(path: Path, link: str) -> Path:
    return Path(os.path.normpath(path.parent / link.partition("#")[0]))


def front(found: Contents) -> str:
    """Return the site's front page: a card for each page, and the trees of the sidebar."""
    text = [f"# {found.title}\n", found.words, ""]
    for section in found.sections:
        text += [f"## {section.title}", ""]
        for number, item in enumerate(section.items):
            if item.lead or number == 0:
                text += [*(["::::", ""] if number else []), item.lead, "", "::::{grid} 1 1 2 2", ":gutter: 2", ""]
            text += [f":::{{grid-item-card}} {item.title}", f":link: /{item.name}", ":link-type: doc", ""]
            text += [item.words[:1].upper() + item.words[1:], ":::", ""]
        text += ["::::", "", "```{toctree}", ":hidden:", f":caption: {section.title}", ""]
        text += [f"{item.title} </{item.name}>" for item in section.items]
        text += ["```", ""]
    return "\n".join(text)


def _measurements(pages: Mapping[Path, str]) -> str:
    """Return the list of measurements, the newest first."""
    words = (
        "What was measured, on which machine, and by which script of `benchmarks/`. Each page is printed by such a "
        "script, or has the command that prints it."
    )
    results = sorted((path for path in pages if path.parent == RESULTS), reverse=True)
    lines = ["# Measurements\n", f"{words}\n"]
    names = {path: f"{heading(path.read_text(), path.name)} ({path.name[:10]})" for path in results}
    lines += [f"- [{names[path]}]({path.name})" for path in results]
    lines += ["", "```{toctree}", ":hidden:", ""]
    lines += [f"{names[path]} <{path.stem}>" for path in results]
    return "\n".join([*lines, "```", ""])


def llms(found: Contents) -> str:
    """Return ``llms.txt``: the title, a sentence, and the pages with a line each."""
    sentence = re.split(r"(?<=\.)\s", " ".join(found.words.split()))[0]
    lines = [f"# {found.title}", "", f"> {sentence}"]
    for section in found.sections:
        lines += ["", f"## {section.title}", ""]
        lines += [f"- [{item.title}]({item.name}.html): {item.words}" for item in section.items]
    return "\n".join([*lines, ""])


def _without_suffix(page: str) -> str:
    return page.rpartition(".")[0]
