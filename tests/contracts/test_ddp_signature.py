"""``lockstep.DistributedDataParallel`` takes what torch's class takes, in torch's order, whichever torch there is."""

from __future__ import annotations

import inspect

from torch import nn

import lockstep


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(kind.__init__).parameters)  # type: ignore[misc]
    del parameters["self"]
    return parameters


def test_every_argument_of_torchs_class_has_its_place_and_its_default() -> None:
    theirs, ours = _parameters(nn.parallel.DistributedDataParallel), _parameters(lockstep.DistributedDataParallel)
    assert list(ours)[: len(theirs)] == list(theirs)
    assert list(ours)[5] == "init_sync"
    for name, parameter in theirs.items():
        assert ours[name].kind is parameter.kind, name
        # Until torch 2.10 broadcast_buffers was True by default: None means the same here.
        if name != "broadcast_buffers":
            assert ours[name].default == parameter.default, name
    documented = inspect.getdoc(lockstep.DistributedDataParallel) or ""
    assert [name for name in ours if f"{name}:" not in documented] == []


def test_what_else_differs_is_for_keywords_only() -> None:
    newest = "lazy_bucket_allocation"  # the last that torch has, in 2.15
    ours = _parameters(lockstep.DistributedDataParallel)
    extra = list(ours)[list(ours).index(newest) + 1 :]
    assert extra == ["overlap", "check_finite", "compare_every", "same_batches", "precision"]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in extra)
