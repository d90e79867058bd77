"""Say which collective a rank is in, so that the others can compare before any data moves."""

from __future__ import annotations

import struct
import sys
import zlib
from types import FrameType

import torch

from lockstep.callsite import user_frame, user_frame_and_depth, words
from lockstep.comm import labels

#: The part that must be equal on all ranks: sequence number, elements, digest of the rest, operation, reduce op, dtype,
#: root.
_KEY = struct.Struct("<qqQHHHh")
KEY = _KEY.size
#: Bytes of a header: the part that must be equal, and the line of the program.
HEADER = 256
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
    "add_rows",
)
_OPERATION_CODE = {name: code for code, name in enumerate(OPERATIONS)}
#: The reduce ops' names in the order of torch's numbers for them.
REDUCE_OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
NO_REDUCE_OP = len(REDUCE_OPS)
_DTYPES = tuple(
    sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=lambda dtype: str(dtype))
)
_DTYPE_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}
_NO_DTYPE = len(_DTYPES)


def dtype_code(dtype: torch.dtype) -> int:
    """Return a number for the dtype, the same on all ranks (they run one version of torch)."""
    return _DTYPE_CODE[dtype]


def dtype_name(code: int) -> str:
    """Return the dtype of a number that :func:`dtype_code` gave."""
    return str(_DTYPES[code]) if 0 <= code < len(_DTYPES) else "no dtype"


# The same few lines issue the same few collectives for hours. Cleared when it holds more than any training loop needs.
_CACHE_LIMIT = 4096
_bodies: dict[tuple[object, ...], bytes] = {}


def take(
    operation: str,
    dtype: torch.dtype | None = None,
    numel: int = 0,
    *,
    reduce_op: int = NO_REDUCE_OP,
    root: int = -1,
    detail: object = None,
    label: str | None = None,
) -> bytes:
    """Make the fingerprint of a collective that is being issued, with the line of the program that issues it.

    It is a header (see :func:`describe`) without its first 8 bytes, the sequence number, which is known when the
    collective runs.

    Args:
        detail: further facts that must be equal on every rank (shapes of a list of tensors, a factor); compared by
            digest.
        label: its label (comm/labels.py), if that is not the one in force on this thread.
    """
    label = labels.label() if label is None else label
    frame = user_frame_and_depth(sys._getframe(1))[0]
    if frame is None:
        where: tuple[str, str, int, int] | None = None
    else:  # (hashing a code object would take a microsecond, and finding the line another; hashing names takes none)
        code = frame.f_code
        where = code.co_filename, code.co_name, code.co_firstlineno, frame.f_lasti
    facts = (operation, dtype, numel, reduce_op, root, detail, label, where)
    body = _bodies.get(facts)
    if body is None:
        if len(_bodies) > _CACHE_LIMIT:
            _bodies.clear()
        digest = zlib.crc32(repr((detail, label)).encode()) if detail is not None or label else 0
        code_ = _NO_DTYPE if dtype is None else _DTYPE_CODE[dtype]
        key = _KEY.pack(0, numel, digest, _OPERATION_CODE[operation], reduce_op, code_, root)[8:]
        place = f"{_words(frame)} [{label}]" if label else _words(frame)
        body = _bodies[facts] = key + encoded(place, _TEXT).ljust(_TEXT, b"\0")
    return body


def facts(body: bytes) -> dict[str, str | int]:
    """Return the facts in a fingerprint from :func:`take`: the ``operation``, and as far as it has them ``reduce_op``,
    ``dtype``, ``elements``, ``root``, and the line of the program, ``at``."""
    _, numel, _, operation, reduce_op, dtype, root = _KEY.unpack_from(bytes(8) + body)
    said: dict[str, str | int] = {"operation": OPERATIONS[operation]}
    if reduce_op < len(REDUCE_OPS):
        said["reduce_op"] = REDUCE_OPS[reduce_op]
    if dtype < len(_DTYPES):
        said |= {"dtype": str(_DTYPES[dtype]), "elements": numel}
    if root >= 0:
        said["root"] = root
    return said | {"at": body[KEY - 8 :].rstrip(b"\0").decode(errors="replace")}


def place() -> str:
    """Return the line of the program that is running: the first frame outside torch and lockstep."""
    return _words(user_frame(sys._getframe(1)))


def encoded(text: str, most: int) -> bytes:
    """Return the first ``most`` bytes of a text for the other ranks. Any file system path can be in it, and one that is
    not UTF-8 has characters that nothing else can encode."""
    return text.encode(errors="backslashreplace")[:most]


def _words(frame: FrameType | None) -> str:
    return "torch's own thread (autograd or a reducer)" if frame is None else words(frame.f_code, frame.f_lineno)


def describe(header: bytes | memoryview) -> str:
    """Put a header into words: ``all_reduce #12 (SUM, torch.float32, 10 elements) at train.py:30 in step``."""
    sequence, numel, digest, operation, reduce_op, dtype, root = _KEY.unpack_from(header)
    if sequence == 0:
        return "nothing yet in this group"
    facts = []
    if reduce_op < len(REDUCE_OPS):
        facts.append(REDUCE_OPS[reduce_op])
    if dtype < len(_DTYPES):
        facts.append(str(_DTYPES[dtype]))
        facts.append("1 element" if numel == 1 else f"{numel} elements")  # no commas: those part the facts
    if root >= 0:
        facts.append(f"root {root}")
    if digest:
        facts.append(f"detail {digest:08x}")
    place = bytes(header[KEY:]).rstrip(b"\0").decode(errors="replace")
    name = OPERATIONS[operation] if operation < len(OPERATIONS) else f"operation {operation}"
    details = f" ({', '.join(facts)})" if facts else ""
    return f"{name} #{sequence}{details} at {place}"
