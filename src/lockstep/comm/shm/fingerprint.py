"""What a rank says about the collective it is in, so that the others can compare before any data moves."""

from __future__ import annotations

import struct
import sys
import zlib
from types import CodeType

import torch

from lockstep.caller import user_frame, words
from lockstep.comm import labels
from lockstep.comm.shm.layout import HEADER

#: What must be equal on every rank: sequence number, elements, digest of the rest, operation, reduce op, dtype, root.
_KEY = struct.Struct("<qqQHHHh")
KEY = _KEY.size
_TEXT = HEADER - KEY

OPERATIONS = (
    "barrier",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce of a sparse tensor",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "all_gather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allocate_tensor",
)
_OPERATION_CODE = {name: code for code, name in enumerate(OPERATIONS)}
#: By torch's numbers for reduce ops.
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
NO_REDUCE_OP = len(REDUCE_OPS)
_DTYPES = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=lambda dtype: str(dtype))
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NO_DTYPE = len(_DTYPES)


def dtype_code(dtype: torch.dtype) -> int:
    """**Local.** A number for the dtype, the same on all ranks (they run one version of torch)."""
    return _DTYPE_CODE[dtype]


def dtype_name(code: int) -> str:
    """**Local.** The dtype of a number that :func:`dtype_code` gave."""
    return str(_DTYPES[code]) if 0 <= code < len(_DTYPES) else "no dtype"


# The same few lines issue the same few collectives for hours: both halves are cached. The caches are cleared when they
# hold more than any training loop needs.
_CACHE_LIMIT = 4096
_keys: dict[tuple[object, ...], bytes] = {}
#: By file, function, line and label. (A code object's hash takes a microsecond, that of its names nothing.)
_places: dict[tuple[str, str, int, str], bytes] = {}


def take(
    operation: str,
    *,
    dtype: torch.dtype | None = None,
    numel: int = 0,
    reduce_op: int = NO_REDUCE_OP,
    root: int = -1,
    detail: object = None,
) -> bytes:
    """**Local.** The fingerprint of a collective that is being issued, with the line of the program that issues it.

    It is a header (see :func:`describe`) without its first 8 bytes, the sequence number, which is known when the
    collective runs.

    Args:
        detail: what else must be equal on every rank (shapes of a list of tensors, a factor); compared by digest.
    """
    label = labels.label()
    facts = (operation, dtype, numel, reduce_op, root, detail, label)
    key = _keys.get(facts)
    if key is None:
        if len(_keys) > _CACHE_LIMIT:
            _keys.clear()
        digest = zlib.crc32(repr((detail, label)).encode()) if detail is not None or label else 0
        code = _NO_DTYPE if dtype is None else _DTYPE_CODE[dtype]
        key = _KEY.pack(0, numel, digest, _OPERATION_CODE[operation], reduce_op, code, root)[8:]
        _keys[facts] = key
    return key + _place(label)


def place() -> str:
    """**Local.** The line of the program that is running, as text."""
    return _place("").rstrip(b"\0").decode(errors="replace")


def _place(label: str) -> bytes:
    """The innermost line of the caller's own program: the first frame outside torch and lockstep."""
    frame = user_frame(sys._getframe(2))
    if frame is None:
        return _render("torch's own thread (autograd or a reducer)", label)
    code = frame.f_code
    known = _places.get((code.co_filename, code.co_name, frame.f_lineno, label))
    return known or _remember(code, frame.f_lineno, label)


def _remember(code: CodeType, line: int, label: str) -> bytes:
    if len(_places) > _CACHE_LIMIT:
        _places.clear()
    text = _render(words(code, line), label)
    _places[code.co_filename, code.co_name, line, label] = text
    return text


def _render(place: str, label: str) -> bytes:
    text = f"{place} [{label}]" if label else place
    return text.encode()[:_TEXT].ljust(_TEXT, b"\0")


def describe(header: bytes) -> str:
    """A header in words: ``all_reduce #12 (SUM, torch.float32, 10 elements) at train.py:30 in step``."""
    sequence, numel, digest, operation, reduce_op, dtype, root = _KEY.unpack_from(header)
    if sequence == 0:
        return "nothing yet in this group"
    facts = []
    if reduce_op < len(REDUCE_OPS):
        facts.append(REDUCE_OPS[reduce_op])
    if dtype < len(_DTYPES):
        facts.append(str(_DTYPES[dtype]))
        facts.append(f"{numel} element{'' if numel == 1 else 's'}")
    if root >= 0:
        facts.append(f"root {root}")
    if digest:
        facts.append(f"detail {digest:08x}")
    place = header[KEY:].rstrip(b"\0").decode(errors="replace")
    name = OPERATIONS[operation] if operation < len(OPERATIONS) else f"operation {operation}"
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{name} #{sequence}{details} at {place}"
