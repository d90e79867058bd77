"""Make heat maps as pictures inside the page: a PNG of one colour, in which a pixel's value is its opacity.

So one picture is right on a light and on a dark page.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence

#: Vermilion of Okabe and Ito's palette: colour-blind readers see it, and it shows on white and on black.
_COLOUR = bytes((0xD5, 0x5E, 0x00))


def heat_map(rows: Sequence[Sequence[float]]) -> str:
    """Return a picture as a ``data:`` URL: a pixel for each value between 0 and 1; NaN counts as 0."""
    return "data:image/png;base64," + base64.b64encode(_png([levels(row) for row in rows])).decode()


def levels(row: Sequence[float]) -> bytes:
    """Return values as bytes, 0 to 255 for 0 to 1; values outside are cut off, and NaN is 0."""
    return bytes([int(255 * value + 0.5) if 0.0 <= value <= 1.0 else 255 * (value > 1.0) for value in row])


def _png(rows: Sequence[bytes]) -> bytes:
    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)  # 8 bits, of a palette
    lines = b"".join(b"\0" + row for row in rows)
    chunks = [
        (b"IHDR", head),
        (b"PLTE", _COLOUR * 256),
        (b"tRNS", bytes(range(256))),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
