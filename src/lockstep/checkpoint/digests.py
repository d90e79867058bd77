"""Digests, and JSON that means one thing only.

The digest is XXH3 with 128 bits: it finds every fault of disks, memory and networks that a file of this size will
ever see, at the speed of memory. It does not prove who wrote a file; nothing in a checkpoint is ever run, so nobody
gains by forging one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import xxhash

#: What a digest looks like.
DIGEST = re.compile(r"[0-9a-f]{32}")
#: Bytes hashed and then written, or read and then hashed, at a time: they are still in the cache the second time.
PIECE = 2**18


def new_digest() -> xxhash.xxh3_128:
    """**Local.** A digest to be fed."""
    return xxhash.xxh3_128()


def digest_of(data: bytes | memoryview) -> str:
    """**Local.** The digest of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_digests(digests: Iterable[str]) -> str:
    """**Local.** One digest for many, in their order."""
    return digest_of("".join(digests).encode())


def strict_json(content: bytes) -> Any:
    """**Local.** What JSON says, if it says one thing only: no key twice in an object, no NaN, no infinity.

    Raises:
        ValueError: it is no such JSON.
    """
    try:
        return json.loads(content, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} occurs twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
