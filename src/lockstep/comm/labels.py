"""Names for collectives, so that ranks in different ones can be told apart.

Two all-reduces of the same shape look alike, also if some rank issues them in the other order; labels tell them apart.
lockstep's own backends compare labels before any data moves, and show them in errors; gloo, NCCL and others ignore
them.
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist


def compares_labels(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the backend of ``group`` for ``device`` finds out that the ranks' labels differ."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # the group serves no tensors of this device
        return False
    return bool(getattr(backend, "compares_labels", False))


class _Current(threading.local):
    label = ""


_current = _Current()


def label() -> str:
    """Return the label of the collectives that this thread issues; empty without one."""
    return _current.label


class labelled:  # (used as a verb, like contextlib.suppress)
    """Return a context: the collectives that this thread issues in it carry ``text``, the same on every rank."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._before = ""

    def __enter__(self) -> None:
        self._before, _current.label = _current.label, self._text

    def __exit__(self, *_: object) -> None:
        _current.label = self._before
