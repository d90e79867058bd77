"""Random number generators as a checkpoint has them: Python's, NumPy's, torch's on the CPU and on this rank's
accelerator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lockstep import accelerator
from lockstep.errors import CheckpointCorrupt
from lockstep.step import generators, streams
from lockstep.text import counted

#: The generators that all ranks have in common, by their names in a state.
COMMON = ("python", "numpy", "torch")


class Generators(NamedTuple):
    """The states of a rank's generators at one moment.

    For torch's generator on the CPU this is the stream that the ranks have in common, also in the middle of a step: a
    rank's own draws follow from it, see Note [Random numbers of a rank] in ``step/streams.py``.
    """

    of_python: Any
    of_numpy: Any
    #: The stream of torch's that the ranks have in common (uint8).
    common: torch.Tensor
    #: The kind of this rank's accelerator and its generator's state; None: there is no accelerator.
    of_device: tuple[str, torch.Tensor] | None

    @classmethod
    def now(cls, device: torch.device) -> Generators:
        """Return the present states, in some microseconds; see Note [Where a generator's words lie] in
        ``step/generators.py``."""
        of_device = None if device.type == "cpu" else accelerator.rng_state(device)
        own = None if of_device is None else (device.type, of_device)
        return cls(generators.PYTHON.state(), generators.NUMPY.state(), streams.current.state, own)

    def to_json(self) -> dict[str, Any]:
        """Return the states in JSON types. An accelerator's generator has the name of its kind; a state without one has
        ``"cuda": None``, as it always had."""
        version, words, gauss = generators.PYTHON.legible(self.of_python)
        _, keys, position, has_gauss, cached = generators.NUMPY.legible(self.of_numpy)
        return {
            "python": [version, np.array(words, dtype="<u4").tobytes().hex(), gauss],
            "numpy": [np.asarray(keys, dtype="<u4").tobytes().hex(), int(position), int(has_gauss), float(cached)],
            "torch": _hex(self.common),
            **({"cuda": None} if self.of_device is None else {self.of_device[0]: _hex(self.of_device[1])}),
        }


def refuse_malformed_rng(states: Any, *, count: int, where: str) -> None:
    """Refuse states that :func:`restore_rng` can't take; nothing is changed.

    Raises:
        CheckpointCorrupt: these are not the states of ``count`` ranks.
    """
    try:
        if type(states) is not list or len(states) != count:
            raise ValueError(f"expected the states of {counted(count, 'rank')}")
        for state in states:
            random.Random().setstate(_python(state))
            np.random.RandomState().set_state(_numpy(state))
            torch.Generator().set_state(_bytes(state["torch"]))
            for value in _of_devices(state).values():
                _bytes(value)
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointCorrupt(f"{where}: not the states of random number generators: {error}") from None


def have_common_rng(states: Sequence[dict[str, Any]]) -> bool:
    """Return whether the generators that all ranks have in common, all but the accelerators', were at the same
    place."""
    return all(each[name] == states[0][name] for each in states for name in COMMON)


def has_rng_of(state: dict[str, Any], device: torch.device) -> bool:
    """Return whether a state is of a rank on the same kind of device."""
    return set(_of_devices(state)) == ({device.type} - {"cpu"})


def restore_common_rng(state: dict[str, Any]) -> None:
    """Put the generators back that all ranks have in common."""
    random.setstate(_python(state))
    np.random.set_state(_numpy(state))
    streams.current.state = _bytes(state["torch"])


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back; an accelerator's only if the state is of a rank on the same kind of device."""
    restore_common_rng(state)
    of_device = _of_devices(state).get(device.type)
    if of_device is not None:
        accelerator.set_rng_state(_bytes(of_device), device)


def _of_devices(state: dict[str, Any]) -> dict[str, Any]:
    """Return the states of accelerators' generators in ``state``, by kind: one, or none."""
    return {kind: value for kind, value in state.items() if kind not in COMMON and value is not None}


def _python(state: dict[str, Any]) -> tuple[Any, ...]:
    version, words, gauss = state["python"]
    return version, tuple(int(word) for word in np.frombuffer(bytes.fromhex(words), dtype="<u4")), gauss


def _numpy(state: dict[str, Any]) -> tuple[str, Any, int, int, float]:
    keys, position, has_gauss, cached = state["numpy"]
    return "MT19937", np.frombuffer(bytes.fromhex(keys), dtype="<u4"), position, has_gauss, cached


def _hex(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
