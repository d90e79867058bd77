"""The three generators of random numbers that every process has: read, set and seeded at little cost.

Note [Where a generator's words lie]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Around each batch that a process fetches for itself, its generators are read twice and set twice. By Python's and
NumPy's own functions that takes a third of a millisecond: both turn 624 words into objects, one by one, and back. So
the words are copied where they lie. Neither library says where that is (NumPy does for the words, but not for the
normal number that it keeps for the next call), so the place is found, once a process: in a generator of our own, put
into a known state, the bytes of that state are looked for, and found in exactly one place, or else the libraries'
functions are used, whose results are the same. A generator that was put in the place of NumPy's own is read and set by
its functions, too.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

#: A number that no memory holds by chance.
_MARK = 1.2345678901234567


class Generator(Protocol):
    """A generator of the process's. States are compared by :meth:`is_at` only."""

    @property
    def seed(self) -> Callable[[int], object]:
        """Seed it from a 64-bit number."""
        ...

    @property
    def state(self) -> Callable[[], Any]:
        """Return the state that it is in."""
        ...

    @property
    def set_state(self) -> Callable[[Any], object]:
        """Put it into a state that it has been in."""
        ...

    def is_at(self, state: Any) -> bool:
        """Return whether it is in this state: nothing was drawn since, nor was it seeded."""
        ...

    def legible(self, state: Any) -> Any:
        """Return a state as the library's own function returns it."""
        ...


class _OfTorch:
    """torch's for the CPU."""

    def __init__(self) -> None:
        generator = torch.default_generator
        self.seed: Callable[[int], object] = generator.manual_seed
        self.state: Callable[[], torch.Tensor] = generator.get_state
        self.set_state: Callable[[torch.Tensor], object] = generator.set_state

    def is_at(self, state: torch.Tensor) -> bool:
        return bool(self.state().numpy().tobytes() == state.numpy().tobytes())

    def legible(self, state: torch.Tensor) -> torch.Tensor:
        return state


class _OfPython:
    """That of the module ``random``."""

    def __init__(self) -> None:
        self._random: Any = random.getstate.__self__  # type: ignore[attr-defined]  # (a bound method)
        self.seed = random.seed
        #: The memory of the words and of the index of the next, and where in it the index is.
        self._words, self._index_at = _words_of_python(self._random)

    def state(self) -> Any:
        if self._words is None:
            return self._random.getstate()
        return bytes(self._words), self._random.gauss_next

    def set_state(self, state: Any) -> None:
        if self._words is None:
            self._random.setstate(state)
        else:
            self._words[:], self._random.gauss_next = state

    def is_at(self, state: Any) -> bool:
        return bool(self.state() == state)

    def legible(self, state: Any) -> Any:
        if self._words is None:
            return state
        numbers = np.frombuffer(state[0], dtype=np.uint32).tolist()
        index = numbers.pop(self._index_at // 4)
        return random.Random.VERSION, (*numbers, index), state[1]


class _OfNumpy:
    """That of NumPy's legacy functions, ``numpy.random.rand`` and the like."""

    def __init__(self) -> None:
        self._random: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]  # (likewise)
        self._normal = _normal_of_numpy(self._random)
        self._bits: Any = None
        self._words: memoryview | None = None

    def seed(self, number: int) -> None:
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # (not in NumPy's stubs)
        if type(bits) is np.random.MT19937:
            self._random.seed(number >> 32)
        else:  # NumPy seeds no other by itself
            self._random.set_state(type(bits)(number).state)

    def state(self) -> Any:
        words = self._found()
        if words is None or self._normal is None:
            return self._random.get_state(legacy=False)
        with self._bits.lock:  # NumPy draws without the interpreter's lock
            return bytes(words), bytes(self._normal)

    def set_state(self, state: Any) -> None:
        words = self._found()
        if isinstance(state, dict) or words is None or self._normal is None:
            self._random.set_state(state)
        else:
            with self._bits.lock:
                words[:], self._normal[:] = state

    def is_at(self, state: Any) -> bool:
        now = self.state()
        if isinstance(now, tuple) and isinstance(state, tuple):
            return now == state
        return bool(_texts(now) == _texts(state))

    def legible(self, state: Any) -> Any:
        if isinstance(state, dict):
            if state["bit_generator"] != "MT19937":
                return state
            words, position = state["state"]["key"], state["state"]["pos"]
            return "MT19937", words, position, state["has_gauss"], state["gauss"]
        words, normal = state
        flag, number = int.from_bytes(normal[:4], "little"), float(np.frombuffer(normal, dtype=np.float64)[1])
        numbers = np.frombuffer(words, dtype=np.uint32)
        return "MT19937", numbers[:-1], int(numbers[-1]), flag, number if flag else 0.0

    def _found(self) -> memoryview | None:
        """Return the words of the bit generator, which ``numpy.random.set_bit_generator`` may have replaced."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # (not in NumPy's stubs)
        if bits is not self._bits:
            self._bits, self._words = bits, None
            if type(bits) is np.random.MT19937:
                self._words = _memory(bits.ctypes.state_address, _BYTES_OF_WORDS + 4)
        return self._words


_BYTES_OF_WORDS = 624 * 4


def _words_of_python(of: random.Random) -> tuple[memoryview | None, int]:
    """Return the memory of a generator's words and of the index of the next, and where in it the index is; None: it was
    not found."""
    ours = random.Random(20261125)
    ours.random()
    *words, index = ours.getstate()[1]
    place = _find(ours, random.Random, np.array(words, dtype=np.uint32).tobytes())
    if place is None:
        return None, 0
    for begins, at in ((place - 4, 0), (place, _BYTES_OF_WORDS)):  # the index is before the words, or after them
        memory = _memory(id(ours) + begins, _BYTES_OF_WORDS + 4)
        if int.from_bytes(memory[at : at + 4], "little") == index and _is_whole(ours, memory):
            return _memory(id(of) + begins, _BYTES_OF_WORDS + 4), at
    return None, 0


def _is_whole(ours: random.Random, memory: memoryview) -> bool:
    """Return whether ``memory`` is all that a draw changes."""
    before = bytes(memory)
    drawn = [ours.random() for _ in range(700)]
    memory[:] = before
    return drawn == [ours.random() for _ in range(700)]


def _normal_of_numpy(of: np.random.RandomState) -> memoryview | None:
    """Return the memory of the normal number that is kept for the next call, and whether there is one; None: it was not
    found."""
    ours = np.random.RandomState(20261125)
    state = ours.get_state(legacy=False)
    state["has_gauss"], state["gauss"] = 1, _MARK
    ours.set_state(state)
    place = _find(ours, np.random.RandomState, np.float64(_MARK).tobytes())
    if place is None or place < 8:
        return None
    memory = _memory(id(ours) + place - 8, 16)  # the flag, an int that is filled up to eight bytes, and the number
    kept = bytes(memory)
    if int.from_bytes(kept[:4], "little") != 1 or ours.standard_normal() != _MARK:
        return None
    if int.from_bytes(memory[:4], "little") != 0:
        return None
    memory[:] = kept
    if ours.standard_normal() != _MARK:
        return None
    return _memory(id(of) + place - 8, 16)


def _find(thing: object, kind: type, searched: bytes) -> int | None:
    """Return where in an object's own memory these bytes are, if exactly once."""
    held = bytes(_memory(id(thing), kind.__basicsize__))
    place = held.find(searched)
    return place if place >= 0 and held.find(searched, place + 1) < 0 else None


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def _texts(state: Any) -> Any:
    """Return a state, which may hold arrays, as what can be compared."""
    if isinstance(state, dict):
        return {key: _texts(value) for key, value in state.items()}
    return str(np.asarray(state).tolist())


#: Those of torch (CPU), Python and NumPy's legacy interface.
TORCH: Generator = _OfTorch()
PYTHON: Generator = _OfPython()
NUMPY: Generator = _OfNumpy()
GENERATORS = (TORCH, PYTHON, NUMPY)
