"""Make one 64-bit number from several, each bit depending on all of them; the same everywhere and always.

Source: the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(*numbers: int) -> int:
    """Return one number of 0 to 2**64 - 1 from several."""
    state = 0
    for number in numbers:
        state = (state + number + _STEP) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def mixed(key: int, numbers: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return ``mix(key, number)`` for each of ``numbers``, which are of 0 to 2**63 - 1: uint64 of their shape."""
    state = np.asarray(numbers, dtype=np.int64).astype(np.uint64)
    state += np.uint64((mix(key) + _STEP) & _MASK)  # (modulo 2**64, as all that follows)
    state ^= state >> np.uint64(30)
    state *= np.uint64(_FIRST)
    state ^= state >> np.uint64(27)
    state *= np.uint64(_SECOND)
    state ^= state >> np.uint64(31)
    return state
