"""The backends that tests above the process group run over: all of them over shm, and some over gloo as well.

What lies above the process group does the same over either, so every run of the tests takes its cases over gloo only
where they are about what is sent (``OVER_BOTH``); the others over gloo are run by ``make faults``.
"""

from __future__ import annotations

import pytest

BOTH = ("gloo", "shm")

#: The mark of a module whose tests run over the backends; the fixture is in conftest.py.
EACH_BACKEND = pytest.mark.usefixtures("each_backend")

#: The mark of a test that every run of the tests has over both. Below its other marks, so that it comes first in ids.
OVER_BOTH = pytest.mark.parametrize("each_backend", BOTH, indirect=True)
