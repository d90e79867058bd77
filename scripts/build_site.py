"""Build the documentation site.

    python -m scripts.build_site build/site

Nothing is asked of a network. A broken link, a reference that leads nowhere and every other warning ends it with 1,
after all have been shown.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import build_main

from scripts import site_pages

SETTINGS = site_pages.DOCS / "site"


def build(folder: Path) -> int:
    """Build the site into ``folder``, in the place of an older one, and return the exit code.

    Args:
        folder: new, empty, or an older site.

    Raises:
        FileExistsError: the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "llms.txt").exists():
        raise FileExistsError(f"{folder} holds something else than the site")
    with tempfile.TemporaryDirectory(prefix="site-") as temporary:
        sources, built = Path(temporary) / "docs", Path(temporary) / "site"
        contents = site_pages.stage(sources)
        code = run_sphinx(sources, built)
        (built / "llms.txt").write_text(site_pages.llms(contents))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(built, folder)
    return code


def run_sphinx(sources: Path, built: Path) -> int:
    """Build the pages that are in ``sources``, and return the exit code: 1 if there was any warning."""
    return build_main(["--quiet", "--fail-on-warning", "-c", str(SETTINGS), str(sources), str(built)])


if __name__ == "__main__":
    code = build(Path(sys.argv[1]))
    print(f"{'not complete' if code else 'complete'}: {sys.argv[1]}/index.html")
    sys.exit(code)
