"""Where a benchmark's report goes: to standard output, and into the folder of results if that was asked for."""

from __future__ import annotations

import datetime
from pathlib import Path

_RESULTS = Path(__file__).parent / "results"


def publish(report: str, *, name: str, write: bool) -> None:
    """Show ``report`` (Markdown); with ``write`` also keep it as ``results/<date>-<name>.md``."""
    print(report)
    if write:
        _RESULTS.mkdir(exist_ok=True)
        path = _RESULTS / f"{datetime.date.today().isoformat()}-{name}.md"
        path.write_text(report)
        print(f"written to {path}")
