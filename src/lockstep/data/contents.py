"""Describe the contents of a dataset, briefly enough to compare between ranks, without fetching a sample.

Note [What ranks compare]
~~~~~~~~~~~~~~~~~~~~~~~~~
Two ranks that split the same data at random, each in its own way, have datasets of the same length and different
samples. ``shard`` would hand out some samples twice and others never. Samples themselves are not compared: fetching
one may be slow, random or have side effects. The ranks compare the data that determines them, wherever it can be read:

- the indices of each Subset, all of them;
- some elements of a TensorDataset's tensors, and of a list, array or tensor that is a dataset itself;
- some rows of a Hugging Face dataset, as they are stored;
- in a dataset of the user's own, every public attribute with one element for each sample: a list of plain values, an
  array, a tensor, a table. A leading underscore excludes an attribute from the data;
- all of these in nested datasets.

Of a path only the last part counts, since machines keep data in different folders. This holds in tables too, of which
the index and all columns are read. Positions are spread over the whole: two random splits differ nearly everywhere.

A dataset without a length (no ``__len__``, or one that raises), which a custom sampler may read, does not tell which
attributes have one element for each sample: unless it is of a kind named above, nothing of it is compared.
"""

from __future__ import annotations

import datetime
import decimal
import hashlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from lockstep.data.dead_workers import tells_of_a_death
from lockstep.trees import dense_parts, leaves

#: The most elements of a sequence that are compared.
_LOOKED_AT = 64
#: The most rows of a Hugging Face dataset that are compared; each is a search in a table.
_ROWS = 16
#: The greatest depth of nested datasets that are compared.
_DEEPEST = 6
_PLAIN = (str, bytes, int, float, bool, np.generic)
#: The layouts of tensors that dense_parts knows besides the dense one.
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
#: Types of table elements that are compared by their ``str()``.
_WORDED = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


def contents_of(dataset: Any, name: str = "dataset", *, depth: int = 0) -> dict[str, str]:
    """Return a description of each part of ``dataset`` that determines its samples, by the part's name; see
    Note [What ranks compare]."""
    if isinstance(dataset, Subset):
        return {f"{name}.indices": _indices(dataset.indices), **_within(dataset.dataset, f"{name}.dataset", depth)}
    if isinstance(dataset, TensorDataset):
        return {f"{name}.tensors[{i}]": _some_of(tensor) for i, tensor in enumerate(dataset.tensors)}
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets
        named = parts.items() if isinstance(parts, dict) else enumerate(parts)
        return {k: v for key, part in named for k, v in _within(part, f"{name}.datasets[{key!r}]", depth).items()}
    if is_hugging_face(dataset):
        return {name: _rows_of(dataset)}
    length = length_of_dataset(dataset)
    if length is None:
        return {}
    if _is_column(dataset, length):
        return {name: _some_of(dataset)}
    return _attributes(dataset, name, length, depth)


def is_hugging_face(dataset: object) -> bool:
    """Return whether ``dataset`` is a Hugging Face ``datasets.Dataset``, without importing that library."""
    library = sys.modules.get("datasets")
    return library is not None and type(dataset) is getattr(library, "Dataset", None)


def _within(dataset: Any, name: str, depth: int) -> dict[str, str]:
    return {} if depth == _DEEPEST else contents_of(dataset, name, depth=depth + 1)


def length_of_dataset(dataset: Any) -> int | None:
    """Return the number of samples by a dataset's own ``len()``; None: it has none."""
    try:
        return len(dataset)
    except Exception as error:  # (a __len__ that a base class demands, and that says that there is no length)
        if tells_of_a_death(error):
            raise
        return None


def _attributes(dataset: Any, name: str, length: int, depth: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in getattr(dataset, "__dict__", {}).items():
        if key.startswith("_"):
            continue
        if isinstance(value, Dataset) or is_hugging_face(value):
            found |= _within(value, f"{name}.{key}", depth)
        elif _is_column(value, length):
            found[f"{name}.{key}"] = _some_of(value)
    return found


def _is_column(value: Any, length: int) -> bool:
    """Return whether ``value`` has one plain element for each sample."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == length and value.layout == torch.strided and not value.is_meta
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) == length and value.dtype.kind in "biufcSUmM"
    if isinstance(value, (list, tuple)):
        return len(value) == length and all(_is_plain(value[position]) for position in _spread(length))
    table = all(_has(value, name) for name in ("iloc", "index", "to_numpy"))  # pandas and the like
    return table and len(value) == length


def _has(value: object, name: str) -> bool:
    """Return whether a value has an attribute itself. (``__getattr__`` may hand any name on to what it wraps.)"""
    return inspect.getattr_static(value, name, None) is not None


def _is_plain(element: Any) -> bool:
    if isinstance(element, (list, tuple)):
        return len(element) <= _LOOKED_AT and all(_is_plain(part) for part in element)
    return isinstance(element, (*_PLAIN, os.PathLike, torch.Tensor, np.ndarray))


def _spread(length: int, looks: int = _LOOKED_AT) -> list[int]:
    """Return positions spread over the entire length, including the first and the last."""
    if length <= looks:
        return list(range(length))
    return [position * (length - 1) // (looks - 1) for position in range(looks)]


def _some_of(values: Any) -> str:
    positions = _spread(len(values))
    if _has(values, "iloc"):
        table = values.iloc[positions]
        looked_at = _comparable([list(table.index), table.to_numpy().tolist()])
        return f"{len(values)} rows, digest {fingerprint(looked_at)[:8]}"
    looked_at = [_comparable(values[position]) for position in positions]
    kind = f" of {values.dtype}" if hasattr(values, "dtype") else ""
    return f"{len(values)} elements{kind}, digest {fingerprint(looked_at)[:8]}"


def _comparable(element: Any) -> Any:
    """Return ``element`` without the folders of its paths, in types that a fingerprint tells apart."""
    if isinstance(element, Mapping):
        return [[key, _comparable(part)] for key, part in element.items()]
    if isinstance(element, (list, tuple)):
        return [_comparable(part) for part in element]
    if isinstance(element, (str, os.PathLike)):
        return os.path.basename(os.fspath(element))
    return str(element) if isinstance(element, _WORDED) else element


def _indices(indices: Any) -> str:
    if isinstance(indices, torch.Tensor):
        indices = indices.cpu().numpy()
    if not isinstance(indices, np.ndarray):
        indices = list(indices)
        if not all(isinstance(each, (int, np.integer)) for each in indices):  # keys of a mapping, say
            return f"{len(indices)} keys, digest {fingerprint(_comparable(indices))[:8]}"
    positions = np.asarray(indices)
    if not positions.size:
        return "none"
    if positions.dtype.kind not in "biu":
        return f"{positions.size} keys, digest {fingerprint(_comparable(positions.tolist()))[:8]}"
    first = ", ".join(map(str, positions[:3].tolist()))
    return f"{positions.size} from {first}… (digest {fingerprint(positions.astype(np.int64))[:8]})"


def _rows_of(dataset: Any) -> str:
    # The stored form is read, so that no image is decoded and no transform called.
    stored = dataset.with_format("arrow")
    rows = [_comparable(stored[position].to_pydict()) for position in _spread(len(dataset), _ROWS)]
    return f"{len(dataset)} rows, digest {fingerprint(rows)[:8]}"


def fingerprint(tree: Any) -> str:
    """Return a digest of the contents of ``tree``: equal contents have equal fingerprints on every rank.

    An object that is neither data nor a container is identified by its pixels or elements if it can be converted to an
    array (images), and otherwise by its attributes. Empty: nothing is known of the contents, as of objects that have
    neither.
    """
    telling = _Telling()
    telling.add(tree)
    return telling.digest()


class _Telling:
    """Takes trees apart for their digest."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        #: True if anything was known of the contents.
        self._knows = False
        #: The objects whose attributes are looked at, from the outermost.
        self._within: list[object] = []

    def digest(self) -> str:
        """Return the digest of all that was added; empty if nothing is known of it."""
        return self._hash.hexdigest() if self._knows else ""

    def add(self, tree: Any) -> None:
        """Add the leaves of a tree."""
        for leaf in leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self._add_tensor(leaf)
            elif isinstance(leaf, np.ndarray):
                self._add_array(leaf)
            elif isinstance(leaf, (bytes, str, int, float, complex, np.generic, type(None), range)):
                self._tell(repr(leaf).encode())
            elif isinstance(leaf, os.PathLike):  # (the folder is another on another machine)
                self._tell(repr(_comparable(leaf)).encode())
            elif isinstance(leaf, _WORDED):
                self._tell(f"{type(leaf).__qualname__} {leaf}".encode())
            elif isinstance(leaf, (set, frozenset)):  # in no order that ranks share
                self._tell(repr(sorted(map(fingerprint, leaf))).encode())
            else:
                self._add_object(leaf)

    def _tell(self, *known: Any) -> None:
        self._knows = True
        for each in known:
            self._hash.update(each)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self._tell(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        if tensor.is_meta or tensor.is_quantized or not (tensor.layout == torch.strided or tensor.layout in _SPARSE):
            return
        for part in dense_parts(tensor):
            if part.numel():
                plain = part.detach().cpu().resolve_conj().resolve_neg()  # (bytes of a view by either can't be read)
                # (A dimension of one element may have any stride in what is contiguous, which view() refuses.)
                flat = plain.contiguous().as_strided((plain.numel(),), (1,))
                self._hash.update(flat.view(torch.uint8).numpy().data)

    def _add_array(self, array: np.ndarray[Any, Any]) -> None:
        if array.dtype.hasobject:
            self.add([array.shape, array.tolist()])
        else:
            self._tell(f"{array.dtype.str}{array.shape}".encode(), array.tobytes())

    def _add_object(self, thing: Any) -> None:
        self._hash.update(type(thing).__qualname__.encode())  # an address in a repr would differ from rank to rank
        if callable(thing) or isinstance(thing, Dataset):  # code, or a whole dataset that a sample refers to
            return
        elements = _elements_of(thing)
        if elements is not None:
            self._add_array(elements)
            return
        if len(self._within) == _DEEPEST or any(each is thing for each in self._within):
            return
        self._within.append(thing)
        for name, value in _attributes_of(thing):
            self._hash.update(name.encode())
            self.add(value)
        self._within.pop()


def _elements_of(thing: Any) -> np.ndarray[Any, Any] | None:
    """Return the elements of an object that can be converted to an array; None: it can't be."""
    try:
        if not hasattr(thing, "__array_interface__") and not hasattr(thing, "__array__"):
            return None
        elements = np.asarray(thing)
        return None if elements.dtype.hasobject else elements
    except Exception as error:  # (a damaged image, say: it is for who uses the sample to say so)
        if tells_of_a_death(error):
            raise
        return None


def _attributes_of(thing: Any) -> list[tuple[str, Any]]:
    slots = [vars(each).get("__slots__", ()) for each in type(thing).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    found = {name: getattr(thing, name) for name in names if hasattr(thing, name)}
    return [*(found | getattr(thing, "__dict__", {})).items()]
