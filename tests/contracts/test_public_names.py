"""What `import lockstep` offers, name by name: a change of it is a decision, not an accident."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
from pathlib import Path

import pytest

import lockstep

STUB = Path(lockstep.__file__).with_suffix(".pyi")


def test_python_loads_the_names_that_type_checkers_see() -> None:
    imports = [node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
    typed = {(alias.asname or alias.name): str(node.module) for node in imports for alias in node.names}
    assert typed == lockstep._HOMES | {"__version__": "lockstep.version"}


@pytest.mark.parametrize("name", sorted(lockstep._HOMES))
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(lockstep, name)
    assert value is getattr(importlib.import_module(lockstep._HOMES[name]), name)
    assert inspect.getdoc(value), f"lockstep.{name} has no docstring"
    assert value.__module__ == "lockstep"
    assert pickle.loads(pickle.dumps(value)) is value  # noqa: S301


#: Public functions that every rank must call. Of all others the docstring must not say so.
COLLECTIVE = {
    "bf16_compress_hook",
    "finish_round",
    "fp16_compress_hook",
    "gathered",
    "init",
    "join",
    "once_per_machine",
    "replicate",
    "shard",
    "split",
}


@pytest.mark.parametrize(
    "name", sorted(name for name in lockstep._HOMES if inspect.isfunction(getattr(lockstep, name)))
)
def test_docstrings_say_which_functions_every_rank_must_call(name: str) -> None:
    doc = inspect.getdoc(getattr(lockstep, name)) or ""
    assert ("**Collective.**" in doc) == (name in COLLECTIVE)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sharrd'"):
        lockstep.sharrd  # type: ignore[attr-defined]  # noqa: B018
    assert "init" in dir(lockstep)
