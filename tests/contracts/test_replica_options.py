"""The options of replicas are written three times, with one name and one default each, but for those listed here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import pytest

import lockstep
from lockstep.ddp.options import ReplicaOptions

_Function = Callable[..., Any]

#: What is no option of a replica but says which module, or in which group.
_NO_OPTIONS = {"model", "process_group", "unknown"}
#: Options that a function does not take -> why not.
_NOT_TAKEN: Mapping[_Function, Mapping[str, str]] = {
    lockstep.replicate: {
        "init_sync_buffers": "torch's forward_sync_buffers decides it, and replicate has one option for buffers",
        "bucket_cap_mb_list": "torch's alone: replicate takes first_bucket_mb and bucket_cap_mb",
    },
    lockstep.DistributedDataParallel.__init__: {
        "first_bucket_mb": "torch's class takes bucket_cap_mb_list",
        "init_sync_buffers": "it follows from forward_sync_buffers",
        "sync": "an average of every gradient is what torch's class is",
    },
}
#: Options whose default differs from that of ReplicaOptions: the default, and why.
_OTHER_DEFAULT: Mapping[_Function, Mapping[str, tuple[object, str]]] = {
    lockstep.replicate: {"bucket_cap_mb": (None, "as in torch's class, for scripts that pass it on")},
    lockstep.DistributedDataParallel.__init__: {
        "bucket_cap_mb": (None, "torch's"),
        "bucket_cap_mb_list": (None, "torch's; None is the empty list"),
        "broadcast_buffers": (None, "torch's; None is True, unless forward_sync_buffers says otherwise"),
        "gradient_as_bucket_view": (False, "torch's: scripts that keep gradients of this class have copies"),
    },
}


def _options() -> dict[str, object]:
    defaults = {field.name: field.default for field in fields(ReplicaOptions)}
    assert MISSING not in defaults.values()
    return defaults


@pytest.mark.parametrize("function", _NOT_TAKEN, ids=lambda function: function.__qualname__)
def test_options_have_one_name_and_one_default(function: _Function) -> None:
    theirs, options = inspect.signature(function).parameters, _options()
    assert set(options) - set(theirs) == set(_NOT_TAKEN[function])
    others = _OTHER_DEFAULT[function]
    found = {name: theirs[name].default for name in options if name in theirs}
    expected = {name: others[name][0] if name in others else options[name] for name in found}
    assert found == expected
    assert [name for name in others if expected[name] == options[name]] == [], "no difference any more: not listed here"


def test_replicate_takes_nothing_but_options() -> None:
    assert set(inspect.signature(lockstep.replicate).parameters) - set(_options()) == _NO_OPTIONS


def test_what_both_functions_take_means_the_same() -> None:
    """Arguments of ours beside torch's are as in replicate (torch's: test_ddp_signature.py)."""
    replicate = inspect.signature(lockstep.replicate).parameters
    for name, parameter in inspect.signature(lockstep.DistributedDataParallel).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert (name, parameter.default) == (name, replicate[name].default)
            assert parameter.annotation == replicate[name].annotation, name
