"""Classes of ours that extend torch's: none of our attributes has the name of one of torch's by accident.

torch gives its classes more names from version to version (``Work.timeout`` came with 2.14, read-only: every message
over "shm" failed). Here each class of ours is laid beside the class of torch's that it extends, of whatever torch is at
hand; what both have must be listed as meant.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

#: Names of torch's that a class of ours means to define; by class, ours or torch's.
MEANT = {
    "Work": "exception get_future is_completed is_success result source_rank _source_rank synchronize wait",
    "Future": "add_done_callback then",
    "ProcessGroup": """
        abort all_gather_single all_gather_single_coalesced all_to_all_single allgather _allgather_base
        allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier
        broadcast _device_types gather get_backend _get_backend get_group_store group_desc group_name recv
        recv_anysource reduce reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced
        reduce_scatter_tensor_coalesced scatter send set_timeout shutdown""",
    "Module": "forward",
    "_BatchNorm": "_check_input_dim",
    "Function": "forward backward",
    "Joinable": "join_device join_hook join_process_group",
    "JoinHook": "main_hook post_hook",
    "DistributedSampler": "set_epoch",
}

#: What every class has, and what Python's abc and torch's metaclass of functions put into each of theirs.
_PYTHONS = set(dir(object)) | {"_abc_impl", "_backward_cls"}


def _ours() -> list[type]:
    """Every class in lockstep that has a class of torch's among its bases."""
    found: dict[str, type] = {}
    for module in pkgutil.walk_packages(lockstep.__path__, "lockstep."):
        if module.name.endswith("__main__") or module.name.startswith("lockstep.integrations."):
            continue  # the latter need what they are named after, and extend its classes
        for value in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(value) and _is_ours(value) and _torchs(value):
                found[f"{value.__module__}.{value.__qualname__}"] = value
    return list(found.values())


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "lockstep"


def _source(cls: type) -> ast.ClassDef:
    home = lockstep._HOMES[cls.__name__] if cls.__module__ == "lockstep" else cls.__module__
    tree = ast.parse(inspect.getsource(importlib.import_module(home)))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)


def _torchs(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.split(".")[0] == "torch"]


def _own_names(cls: type) -> set[str]:
    """What the class and its bases of ours define, and what their methods set on self."""
    names: set[str] = set()
    for base in cls.__mro__:
        if _is_ours(base):
            names |= vars(base).keys() | set(getattr(base, "__annotations__", {}))
            for node in ast.walk(_source(base)):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    names |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return {name for name in names if not name.startswith("__")} - _PYTHONS


def _torchs_names(cls: type) -> set[str]:
    names = {name for base in _torchs(cls) for name in vars(base)}
    if issubclass(cls, nn.Module):
        names |= vars(nn.Module()).keys()
    if issubclass(cls, torch.optim.Optimizer):
        names |= vars(torch.optim.SGD([torch.zeros(1)])).keys()
    return {name for name in names if not name.startswith("__")} - _PYTHONS


@pytest.mark.parametrize("cls", _ours(), ids=lambda cls: f"{cls.__module__}.{cls.__qualname__}")
def test_names_that_torch_has_too_are_meant(cls: Any) -> None:
    meant = set[str]().union(*(MEANT.get(base.__qualname__, "").split() for base in cls.__mro__))
    by_accident = (_own_names(cls) & _torchs_names(cls)) - meant
    assert by_accident == set(), (
        f"torch {torch.__version__} has attributes of these names in {[base.__qualname__ for base in _torchs(cls)]}, "
        f"and so has {cls.__qualname__}: rename ours, or add them to MEANT if they stand for torch's"
    )


@pytest.mark.parametrize(
    "cls", [c for c in _ours() if issubclass(c, (dist.Work, dist.ProcessGroup, torch.futures.Future))]
)
def test_attributes_beside_torchs_in_c_have_a_prefix(cls: Any) -> None:
    """An attribute set on such an object is refused as soon as torch has one of its name."""
    nodes = [node for base in cls.__mro__ if _is_ours(base) for node in ast.walk(_source(base))]
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert {name for name in attributes if not name.lstrip("_").startswith("shm_")} == set()


def test_the_classes_are_found() -> None:
    found = {cls.__qualname__ for cls in _ours()}
    assert {
        "GroupWork",
        "MessageWork",
        "ProcessGroupLockstep",
        "DataParallel",
        "SyncBatchNorm",
        "DistributedSampler",
    } <= found
