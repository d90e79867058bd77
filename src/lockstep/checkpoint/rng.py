"""The random number generators of one rank: Python's, NumPy's, torch's on the CPU and on this rank's GPU.

Of torch's on the CPU it is the stream that the ranks have in common, also in the middle of a step: what a rank draws of
its own follows from that one, see Note [Random numbers of a rank] in ``comm/streams.py``.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from lockstep.comm import streams
from lockstep.errors import CheckpointCorrupt


def capture(device: torch.device) -> dict[str, Any]:
    """**Local.** The state of every generator, as JSON can say it."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, np.array(words, dtype="<u4").tobytes().hex(), gauss],
        "numpy": [np.asarray(keys, dtype="<u4").tobytes().hex(), int(position), int(has_gauss), float(cached)],
        "torch": _hex(streams.current().state),
        "cuda": _hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def refuse_malformed(states: Any, *, count: int, where: str) -> None:
    """**Local.** Whether :func:`restore` can take each of ``count`` states; nothing is changed.

    Raises:
        CheckpointCorrupt: it can't.
    """
    try:
        if type(states) is not list or len(states) != count:
            raise ValueError(f"expected the states of {count} rank(s)")
        for state in states:
            random.Random().setstate(_python(state))
            np.random.RandomState().set_state(_numpy(state))
            torch.Generator().set_state(_bytes(state["torch"]))
            if state["cuda"] is not None:
                _bytes(state["cuda"])
    except (LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointCorrupt(f"{where}: no states of random number generators: {error}") from None


def restore(state: dict[str, Any], device: torch.device) -> None:
    """**Local.** Put every generator back; the GPU's only if the state has one and this rank has a GPU."""
    random.setstate(_python(state))
    np.random.set_state(_numpy(state))
    streams.current().state = _bytes(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


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
