"""The destination of this rank's figures: set where its cells run (serve.py), used by matplotlib's backend
(figures.py)."""

from __future__ import annotations

from collections.abc import Callable

#: Shows a figure, given as a PNG; None: the figures of this rank are not shown.
show_png: Callable[[bytes], None] | None = None
