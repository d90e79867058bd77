"""The schemas of the commands' JSON, as docs/json.md has them in its tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "json.md"
_TABLE = re.compile(r"^\| key in `(.+)` \| type \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", re.MULTILINE)
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "list"}

Keys = dict[str, frozenset[str]]


@cache
def described() -> dict[str, Keys]:
    """Schema -> key, as the page writes it -> its types."""
    found: dict[str, Keys] = {}
    for schema, rows in _TABLE.findall(PAGE.read_text()):
        keys: Keys = {}
        for row in rows.splitlines():
            _, names, types, *_ = row.split("|")
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in keys, f"{schema}: {name} stands there twice"
                keys[name] = frozenset(types.strip().split(" or "))
        assert schema not in found, f"{schema} stands there twice"
        found[schema] = keys
    return found


def holds(text: str, schema: str) -> Any:
    """Assert that a command's output is one object of a schema, with all of its keys and no other; return it."""
    told = json.loads(text)
    assert told.pop("schema") == schema
    wrong = [*_differences(told, "", described()[schema])]
    assert not wrong, f"{schema}: {'; '.join(wrong)}"
    return told


def _differences(value: Any, path: str, keys: Keys) -> Iterator[str]:
    """Yield what is not as the page has it, at a path and below."""
    kind = "null" if value is None else _KINDS[type(value)]
    types = keys.get(path) or frozenset({"list" if any(key.startswith(f"{path}[") for key in keys) else "object"})
    if "open" in types and value is not None:
        return
    if kind not in types and not (kind == "integer" and "number" in types):
        yield f"{path} is of the type {kind}, and on the page {' or '.join(sorted(types))}"
    elif isinstance(value, list):
        for each in value:
            yield from _differences(each, f"{path}[]", keys)
    elif isinstance(value, dict):
        start = f"{path}." if path else ""
        names = {re.split(r"[.\[]", key[len(start) :])[0] for key in keys if key.startswith(start)}
        if names == {"*"}:
            names = {*value}
            keys = {**keys, **{f"{start}{name}": keys[f"{start}*"] for name in names}}
        yield from (f"{start}{name} is missing" for name in sorted(names - value.keys()))
        yield from (f"{start}{name} is not on the page" for name in sorted(value.keys() - names))
        for name in names & value.keys():
            yield from _differences(value[name], f"{start}{name}", keys)
