"""Lists in messages are cut, and say how much of them is left out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import lockstep
from lockstep.errors import listed, sentence


@pytest.mark.parametrize(
    ("items", "text"),
    [([], ""), (["a"], "a"), (["a", "b"], "a or b"), (["a", "b", "c", "d"], "a or b and 2 more")],
)
def test_a_list_says_how_many_are_left_out(items: list[str], text: str) -> None:
    assert listed(items, most=2, between=" or ") == text


#: Names of values in messages that are sentences themselves, some with a full stop.
_SENTENCES = {"error", "text", "message", "why", "known", "trouble", "reason", "said"}


def test_no_message_puts_a_full_stop_behind_a_sentence() -> None:
    assert sentence("It ended.") == "It ended." == sentence("It ended")
    found = []
    for path in Path(lockstep.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.JoinedStr) or path.name == "errors.py":
                continue
            for value, after in zip(node.values, node.values[1:], strict=False):
                stops = isinstance(after, ast.Constant) and re.match(r"\.(\s|$)", str(after.value))
                if stops and isinstance(value, ast.FormattedValue) and ast.unparse(value.value) in _SENTENCES:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(value.value)}")
    assert not found
