"""The documentation site: it is built without a network and without a warning, and has everything that is public."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from scripts import site_inventory, site_pages, site_reference

from lockstep import knobs
from lockstep.cli import main
from tests.browser import browser, needs_browser

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from pathlib import Path

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        raise OSError(f"the network was asked: {event}{arguments}")

sys.addaudithook(refuse)
from scripts import build_site
sys.exit(getattr(build_site, sys.argv[1])(*map(Path, sys.argv[2:])))
"""
#: All text of a page that can be seen and whose contrast to what lies behind it is less than this.
LEAST_CONTRAST = 4.5
FAINT = """
(() => {
  const context = Object.assign(document.createElement("canvas"), {width: 1, height: 1})
    .getContext("2d", {willReadFrequently: true})
  const known = new Map()
  const colour = text => {
    if (!known.has(text)) {
      context.clearRect(0, 0, 1, 1)
      context.fillStyle = text
      context.fillRect(0, 0, 1, 1)
      known.set(text, Array.from(context.getImageData(0, 0, 1, 1).data))
    }
    return known.get(text)
  }
  const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] / 255 + below[i] * (1 - top[3] / 255)).concat(255)
  const behind = element => {
    if (element === null) return [255, 255, 255, 255]
    const own = colour(getComputedStyle(element).backgroundColor)
    return own[3] === 255 ? own : over(own, behind(element.parentElement))
  }
  const light = ([r, g, b]) => [r, g, b].map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0)
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT)
  const found = new Set()
  let seen = 0
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, text = texts.currentNode.data.trim()
    if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue
    const {width, height} = element.getBoundingClientRect()
    if (width <= 1 || height <= 1) continue
    seen += 1
    const back = behind(element), front = over(colour(getComputedStyle(element).color), back)
    const [dark, bright] = [light(front), light(back)].sort((a, b) => a - b)
    const contrast = (bright + 0.05) / (dark + 0.05)
    if (contrast < LEAST) found.add(`${contrast.toFixed(2)}: ${text.slice(0, 40)} (${element.outerHTML.slice(0, 80)})`)
  }
  return [seen, Array.from(found)]
})()
""".replace("LEAST", str(LEAST_CONTRAST))


pytestmark = pytest.mark.timeout(1800)  # the first that needs the site also builds it: 15 s where nothing else runs

#: What reaches beyond the right edge of the window and is in no box of its own to be scrolled in, as tables are.
WIDE = """
Array.from(document.querySelectorAll("article *")).filter(element => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false
  for (let outer = element; outer.tagName !== "ARTICLE"; outer = outer.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(outer).overflowX)) return false
  return element.checkVisibility()
}).map(element => element.outerHTML.slice(0, 80))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site") / "site"
    done = call("build", folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return folder


def call(function: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    """Call a function of build_site.py in a process that can reach no network."""
    command = [sys.executable, "-c", BUILD, function, *map(str, folders)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, stdin=subprocess.DEVNULL)


def documented(site: Path) -> set[str]:
    """The names that the site explains, from the inventory that Sphinx writes for other projects."""
    *_, compressed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    return set(re.findall(r"^(\S+) (?:py|std):", zlib.decompress(compressed).decode(), re.MULTILINE))


def options(command: click.Command = main, path: str = "lockstep") -> Iterator[str]:
    """The options of all commands, under the names that Sphinx gives them."""
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            yield from (f"{path}.{name}" for name in option.opts)
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from options(below, f"{path}-{name}")


def test_every_public_name_and_member_is_explained(site: Path) -> None:
    names = list(site_reference.homes())
    expected = {f"lockstep.{name}" for name in names}
    expected |= {f"lockstep.{name}.{member}" for name in names for member in site_reference.members(name)}
    assert {"lockstep.World.device", "lockstep.Restored.folder", "lockstep.RankFailed.rank"} < expected
    assert sorted(expected - documented(site)) == []
    assert {"lockstep.__version__", "lockstep.Log.__call__", "lockstep.Step.__iter__"} <= documented(site)


def test_every_option_is_explained(site: Path) -> None:
    expected = set(options())
    assert {"lockstep-run.--grace", "lockstep-submit-slurm.--nnodes"} < expected
    assert sorted(expected - documented(site)) == []


def test_every_variable_is_explained(site: Path) -> None:
    assert sorted(knobs.names() - documented(site)) == []


def test_a_public_name_without_a_page_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**site_reference.homes(), "another": "lockstep.progress"}
    monkeypatch.setattr(site_reference, "homes", lambda: more)
    with pytest.raises(ValueError, match="another"):
        site_reference.pages()


def test_a_variable_without_words_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "ANOTHER", "LOCKSTEP_ANOTHER", raising=False)
    with pytest.raises(ValueError, match="LOCKSTEP_ANOTHER"):
        site_reference.pages()


def test_every_document_is_in_the_list_of_pages() -> None:
    listed = {item.page for section in site_pages.contents().sections for item in section.items}
    documents = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(documents - listed - {"index.md"}) == []
    assert [section.title for section in site_pages.contents().sections] == [
        "Start", "Tasks", "Symptoms", "Reference", "How it works",
    ]  # fmt: skip


def test_each_page_is_in_one_section() -> None:
    times = Counter(item.page for section in site_pages.contents().sections for item in section.items)
    assert {page: count for page, count in times.items() if count > 1} == {}


def test_the_list_of_pages_names_one_with_words_or_several_and_takes_whole_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_pages, "DOCS", tmp_path)
    (tmp_path / "symptoms").mkdir()
    for name, text in {
        "hangs": "# It hangs\n\n```text\nnothing\n```\n",
        "nan": "# NaN\n\nThe step\nis left out: on all ranks. More.\n\n```python\n# a\n\nb\n```\n",
        "slow": "# It is slow\n\nA step [takes](x.md) longer.\n",
    }.items():
        (tmp_path / "symptoms" / f"{name}.md").write_text(text)
    index = tmp_path / "index.md"
    lines = "- [Hangs](symptoms/hangs.md): what to\n  look at\n- Wrong: [not a number](symptoms/nan.md)\n"
    index.write_text(f"# lockstep\n\nWords.\n\n## Symptoms\n\nBy symptom:\n\n{lines}")
    pages = {path: path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    (section,) = site_pages.contents(index, pages).sections
    assert section.items == (
        site_pages.Item("Hangs", "symptoms/hangs.md", "what to look at", lead="By symptom:"),
        site_pages.Item("NaN", "symptoms/nan.md", "The step is left out: on all ranks"),
        site_pages.Item("It is slow", "symptoms/slow.md", "A step takes longer"),
    )
    index.write_text("# lockstep\n\nWords.\n\n## Symptoms\n\n- [Hangs](symptoms/hung.md): what to look at\n")
    with pytest.raises(site_pages.BrokenLink, match="hung"):
        site_pages.contents(index, pages)


def test_links_lead_to_pages_and_a_broken_one_is_an_error() -> None:
    document, pages = ROOT / "docs" / "guides" / "lightning.md", site_pages.all_pages()
    code = "\n```text\n[x](y.md)\n```\n"
    text = f"[a](../../README.md) [b](../weights.md#class-weights) [c](../../src/lockstep/knobs.py){code}"
    assert site_pages.linked(text, document, pages) == (
        f"[a](../overview.md) [b](../weights.md#class-weights) [c](../reference/environment.rst){code}"
    )
    with pytest.raises(site_pages.BrokenLink, match=r"lightning.md links to nowhere.md"):
        site_pages.linked("[a](nowhere.md)", document, pages)


def test_a_reference_that_leads_nowhere_ends_the_build(site: Path, tmp_path: Path) -> None:  # noqa: ARG001 - skips
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "index.md").write_text("# One\n\n[a](two.rst#nowhere) [b](two.rst)\n\n```{toctree}\ntwo\n```\n")
    (sources / "two.rst").write_text("Two\n===\n\n:class:`lockstep.Nobody` :func:`torch.nobody` :doc:`three`\n")
    done = call("run_sphinx", sources, tmp_path / "built")
    assert done.returncode == 1, done.stderr
    for target in ("nowhere", "lockstep.Nobody", "torch.nobody", "three"):
        assert len(re.findall(rf"^.*WARNING.*{target}.*$", done.stderr, re.MULTILINE)) == 1, done.stderr
    assert done.stderr.count("WARNING: ") == 4, done.stderr


def test_links_of_the_site_lead_to_files_of_it(site: Path) -> None:
    """Sphinx checks references and links of Markdown; this is about what the theme and we have put in."""
    broken = []
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', page.read_text()):
            if "://" not in link and not link.startswith(("mailto:", "data:")):
                target = page.parent / link
                broken += [] if target.is_file() else [f"{page.relative_to(site)}: {link}"]
    assert broken == []


def test_other_projects_are_linked_by_inventories_made_from_their_lists() -> None:
    for project in site_inventory.LISTS:
        kept = (site_inventory.FOLDER / f"{project}.inv").read_bytes()
        assert kept == site_inventory.inventory(project), "run: python scripts/site_inventory.py"


def links(page: Path) -> set[str]:
    return set(re.findall(r'href="([^"]+)"', page.read_text()))


def test_links_to_torch_and_python_lead_to_their_documentation(site: Path) -> None:
    assert {
        "https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html#torch.distributed.GradBucket",
        "https://docs.python.org/3/library/exceptions.html#ValueError",
    } <= links(site / "reference" / "replicas.html")


def test_code_that_names_something_public_is_a_link(site: Path) -> None:
    assert {
        "reference/world.html#lockstep.init",
        "reference/command-run.html#command-run",
        "reference/environment.html#envvar-LOCKSTEP_PRELOAD",
    } <= links(site / "guide.html")


def test_llms_txt_lists_the_pages(site: Path) -> None:
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[:3] == [
        "# lockstep", "", "> Data-parallel training for PyTorch: N replicas that train the same model as one.",
    ]  # fmt: skip
    found = [match for line in lines if (match := re.fullmatch(r"- \[[^\]]+\]\((\S+)\): .+", line))]
    assert len(found) == sum(len(section.items) for section in site_pages.contents().sections)
    assert [match[1] for match in found if not (site / match[1]).is_file()] == []


@needs_browser
def test_pages_fit_a_phone_can_be_read_and_ask_nobody(site: Path) -> None:
    pages = ["index.html", "overview.html", "guide.html", "reference/replicas.html", "reference/command-run.html"]
    with browser() as page:
        for name in pages:
            for theme in ("light", "dark"):
                page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
                page.open(site / name, width=390)
                assert page.ask("document.documentElement.scrollWidth") == 390, name
                assert page.ask(WIDE) == [], name
                assert page.ask("document.querySelectorAll('h1').length") == 1, name
                seen, faint = page.ask(FAINT)
                assert seen > 50, name
                assert faint == [], (name, theme)
        page.ask("document.querySelector('h1').style.color = 'rgb(120 120 120 / 60%)'")
        assert len(page.ask(FAINT)[1]) == 2  # two words: it would have been seen
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith((site.as_uri(), "data:"))] == []


@needs_browser
def test_the_search_finds_a_name_and_a_word(site: Path) -> None:
    with browser() as page:
        for word, target in (("all_reduce", "lockstep.World.all_reduce"), ("Perfetto", "trace.html")):
            page.open(site / "search.html", query=f"q={word}")
            page.until("document.querySelectorAll('ul.search li a').length > 0")
            links = page.ask("Array.from(document.querySelectorAll('ul.search li a')).map(link => link.href)")
            assert any(target in link for link in links), links
