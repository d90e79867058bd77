"""Where figures of this rank go: set by what runs its cells (serve.py), used by matplotlib's backend (figures.py)."""

from __future__ import annotations

from collections.abc import Callable

#: Shows a figure, given as a PNG; None: nobody watches this rank.
show_png: Callable[[bytes], None] | None = None
