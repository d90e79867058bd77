"""The README's and the docs' code blocks are run as a reader would run them.

Blocks of one document run in order, in one folder that also holds ``examples/``. A Python block whose first line names
a file (``# train.py``) is saved under that name; if a command below starts it, it runs there and not before. A block
that can't be run here stands under a comment that says why: ``<!-- not run: the reason -->``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from lockstep import knobs
from tests import warm
from tests.launching import LIMIT, PATIENT, python_path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md"])
FENCE = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\n)?```(?P<language>python|bash)\n(?P<code>.*?)```", re.DOTALL
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    reason: str | None
    line: int

    @property
    def file(self) -> str | None:
        """The file that the first line names."""
        name = re.match(r"# (\S+\.py)\n", self.code)
        return name[1] if name else None


def blocks(document: Path) -> list[Block]:
    text = document.read_text()
    return [
        Block(m["language"], m["code"], m["reason"], text[: m.start("code")].count("\n") + 1)
        for m in FENCE.finditer(text)
    ]


#: What test_skill.py runs, and looks at what is left.
_ELSEWHERE = {ROOT / "docs" / "SKILL.md"}


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if each not in _ELSEWHERE], ids=lambda each: each.name)
def test_every_block_runs(document: Path, tmp_path: Path) -> None:
    run_document(document, tmp_path / document.name)


def run_document(document: Path, folder: Path) -> None:
    """Run the blocks of one document in ``folder``."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    chosen = [block for block in blocks(document) if block.reason is None]
    commands = "".join(block.code for block in chosen if block.language == "bash")
    for block in chosen:
        if block.language == "bash":
            run(["bash", "-euo", "pipefail", "-c", block.code], block, document, folder)
            continue
        script = folder / (block.file or f"block_{block.line}.py")
        script.write_text(block.code)
        if block.file is None or block.file not in commands:
            run(["python", str(script)], block, document, folder)


def run(command: list[str], block: Block, document: Path, folder: Path) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(warm.server().commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": python_path(ROOT / "tests" / "site"),
        "XDG_STATE_HOME": str(folder / "state"),
        knobs.TIMES: PATIENT,
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, (
        f"{document.name}, line {block.line}: exit code {done.returncode}\n{block.code}\n{done.stdout}\n{done.stderr}"
    )


def test_the_documents_have_blocks_and_every_one_not_run_says_why() -> None:
    assert blocks(ROOT / "README.md")
    for document in DOCUMENTS:
        fences = re.findall(r"^```(?:python|bash)$", document.read_text(), re.MULTILINE)
        assert len(fences) == len(blocks(document)), f"{document.name}: a block is not recognised"


def test_the_readme_shows_the_example_as_it_is() -> None:
    script = (ROOT / "examples" / "train.py").read_text().split('"""\n\n', 1)[1]
    assert script in [block.code for block in blocks(ROOT / "README.md")]
