"""A sample in a few words: what is in it, of which kind and size, and whether its numbers are finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lockstep.trees import parts_of

#: The most characters of a text that are shown.
_MOST = 80


def describe(sample: Any) -> list[dict[str, Any]]:
    """Return the leaves of a sample, each in JSON's types.

    Each has ``path`` (keys with points between; empty: the sample itself), ``type``, and ``text`` (the value, cut
    off), or for tensors and arrays ``dtype``, ``shape``, and, if they hold numbers, ``low``, ``high``, ``mean`` of
    those that are finite and ``nonfinite``, the number of the others; null if there is none.
    """
    return [_leaf(path, value) for path, value in _leaves(sample, "")]


def in_words(value: Mapping[str, Any]) -> str:
    """Return a line for one of the things that :func:`describe` returns."""
    name = f"{value['path']}: " if value["path"] else ""
    if value["shape"] is None:
        return f"{name}{value['text']}"
    words = " ".join([f"{name}{value['dtype']}", *([str(value["shape"])] if value["shape"] else [])])
    low, high = value["low"], value["high"]
    if low is not None:
        between = f", {_figure(low)} to {_figure(high)}, mean {_figure(value['mean'])}"
        words += f"{',' if value['shape'] else ''} {_figure(low)}" if low == high else between
    return words + (f", {value['nonfinite']:,} NaN or infinite" if value["nonfinite"] else "")


def _figure(number: float) -> str:
    return str(int(number)) if number.is_integer() and abs(number) < 2**53 else f"{number:.4g}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    parts = parts_of(value)
    if parts is None:
        yield path, value
        return
    for key, part in parts.items():
        yield from _leaves(part, f"{path}.{key}" if path else str(key))


def _leaf(path: str, value: Any) -> dict[str, Any]:
    told: dict[str, Any] = {"path": path, "type": type(value).__name__}
    told |= dict.fromkeys(("text", "dtype", "shape", "low", "high", "mean", "nonfinite"))
    array = torch.from_numpy(np.ascontiguousarray(value)) if _is_array(value) else value
    if not isinstance(array, torch.Tensor):
        text = repr(value)
        return told | {"text": text if len(text) <= _MOST else f"{text[:_MOST]}…"}
    told |= {"dtype": str(array.dtype).removeprefix("torch."), "shape": list(array.shape)}
    if array.layout is not torch.strided or array.is_quantized or array.is_complex():
        return told
    numbers = array.detach().to("cpu", torch.float64)
    finite = numbers[numbers.isfinite()]
    told["nonfinite"] = numbers.numel() - finite.numel()
    if finite.numel():
        told |= {"low": finite.min().item(), "high": finite.max().item(), "mean": finite.mean().item()}
    return told


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative
