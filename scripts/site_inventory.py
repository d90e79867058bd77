"""Make the inventories of names that the documentation links to elsewhere: docs/site/torch.inv and python.inv.

    python scripts/site_inventory.py

They are made from torch.txt and python.txt beside them, so that building the site asks no network. A line of these has
a page of torch's or Python's documentation, a role of Sphinx's Python domain, and names that the page explains. In the
page's address ``$`` is the name; ``a=b`` is the name ``a`` that the page explains under ``b``. The format of an
inventory is that of https://sphobjinv.readthedocs.io/en/stable/syntax.html.
"""

from __future__ import annotations

import zlib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs" / "site"
LISTS = ("python", "torch")
_HEAD = """\
# Sphinx inventory version 2
# Project: {}
# Version: stable
# The remainder of this file is compressed using zlib.
"""


def inventory(project: str) -> bytes:
    """Return the inventory of a project's names, from its list.

    Raises:
        ValueError: a line of the list has no names.
    """
    lines = []
    for line in (FOLDER / f"{project}.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        page, role, *names = line.split()
        if not names:
            raise ValueError(f"{project}.txt: no names in {line!r}")
        for each in names:
            name, _, there = each.partition("=")
            there = there or name
            lines.append(f"{name} py:{role} 1 {page.replace('$', there)}#{there} -\n")
    return _HEAD.format(project).encode() + zlib.compress("".join(lines).encode(), 9)


def main() -> None:
    """Write the inventories."""
    for project in LISTS:
        (FOLDER / f"{project}.inv").write_bytes(inventory(project))


if __name__ == "__main__":
    main()
