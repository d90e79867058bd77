"""Parcels: what is packed comes out as it was, on shared memory, and what can't be packed is named."""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import signal
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lockstep.comm.parcels import Parcel, Rows, Unpackable, opened, stacked
from lockstep.errors import LockstepError

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: torch.Tensor
    name: str = "frozen"


class Encoded(UserDict[str, Any]):
    def __init__(self, data: dict[str, Any], more: Any) -> None:
        super().__init__(data)
        self.more = more


class WithAttribute(OrderedDict[str, Any]):
    extra: Any = None


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def _round(tree: Any, *, writable: bool = True) -> Any:
    parcel = Parcel.of(["before", tree, "after"])
    return opened(parcel.descriptor, parcel.size, parcel.places[1], writable=writable)


_TENSORS = {
    "plain": lambda: torch.arange(6.0).reshape(2, 3),
    "transposed": lambda: torch.arange(6).reshape(2, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a view": lambda: torch.arange(20)[3:15:4],
    "expanded": lambda: torch.tensor([1, 2]).expand(3, 2),
    "one number": lambda: torch.tensor(3, dtype=torch.int8),
    "empty": lambda: torch.zeros(0, 3, dtype=torch.float16),
    "conjugated": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "bfloat16": lambda: torch.randn(3).bfloat16(),
    "float8": lambda: torch.randn(4).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "uint64": lambda: torch.tensor([2**63], dtype=torch.uint64),
    "nan": lambda: torch.tensor([float("nan"), -0.0]),
}


_ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "large": lambda _: torch.randn(3, 32, 32),
    "small": lambda _: torch.randn(3),
    "bfloat16": lambda _: torch.randn(90, 90).bfloat16(),
    "views of one": lambda number: torch.arange(2_000_000).reshape(200, 10_000)[number],
    "transposed": lambda _: torch.randn(90, 100).t(),
    "conjugated": lambda _: torch.randn(90, 90, dtype=torch.complex64).conj(),
    "of two dtypes": lambda number: torch.full((90, 90), number, dtype=torch.int32 if number else torch.int64),
    "empty": lambda _: torch.zeros(0, 5),
}


@pytest.mark.parametrize("name", _ROWS)
@pytest.mark.parametrize("count", [1, 3, 200])
def test_rows_come_out_as_the_tensor_that_torch_stacks(name: str, count: int) -> None:
    rows = [_ROWS[name](number) for number in range(count)]
    expected = torch.stack(rows)
    found = _round({"x": stacked(rows)})["x"]
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert torch.equal(found, expected)


def test_large_rows_are_not_put_together_before() -> None:
    rows = [torch.randn(3, 32, 32) for _ in range(4)]
    assert isinstance(stacked(rows), Rows)
    assert isinstance(stacked([*rows, rows[0].clone().requires_grad_()]), torch.Tensor)
    with pytest.raises(RuntimeError, match="equal size"):
        stacked([*rows, torch.randn(3, 32, 33)])


def test_each_tree_may_be_made_in_the_memory_of_the_last() -> None:
    buffer = torch.zeros(3)
    parcel = Parcel.of(buffer.fill_(number) for number in range(3))
    trees = [opened(parcel.descriptor, parcel.size, place) for place in parcel.places]
    assert [each.tolist() for each in trees] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_more_rows_than_one_write_takes() -> None:
    rows = [torch.full((2048,), float(number)) for number in range(1100)]
    found = _round(stacked(rows))
    assert torch.equal(found, torch.stack(rows))


@pytest.mark.parametrize("name", _TENSORS)
def test_tensors_come_out_bit_for_bit(name: str) -> None:
    tensor = _TENSORS[name]()
    found = _round([tensor])[0]
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert found.stride() == tensor.clone().stride(), "as in a clone"
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (found, tensor.resolve_conj().resolve_neg())]
    assert torch.equal(*bits)


_ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.arange(6, dtype=">f8").reshape(2, 3).T,
    np.arange(20)[::3],
    np.array(["a", "üx"]),
    np.array([b"a", b"bc"]),
    np.array(""),
    np.zeros((2, 0)),
    np.array(["2026-11-25"], dtype="datetime64[D]"),
    np.array([1 + 2j]),
    np.float32(2.5),
    np.str_("text"),
    np.bool_(True),
]


@pytest.mark.parametrize("array", _ARRAYS, ids=repr)
def test_arrays_come_out_as_they_were(array: Any) -> None:
    found = _round((array,))[0]
    assert type(found) is type(array)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.all(found == array)
    if isinstance(array, np.ndarray):
        assert found.flags.f_contiguous == np.copy(array, order="K").flags.f_contiguous


def test_containers_and_plain_values_come_out_as_they_were() -> None:
    tree = {
        "plain": [None, True, 3, 2**80, -0.0, float("inf"), "ü\ud800", b"\0bytes", 1 - 2j, ()],
        ("a", 1): (1, [2, {3: 4}]),
        "point": Point(1, Point(2.5, None)),
        "frozen": Frozen(torch.ones(2)),
        "ordered": OrderedDict(b=1, a=2),
    }
    found = _round(tree)
    assert repr(found) == repr(tree)
    assert type(found["point"]) is Point
    assert type(found["frozen"]) is Frozen
    assert list(found["ordered"]) == ["b", "a"]
    weights = torch.nn.BatchNorm1d(3).state_dict()
    found = _round(weights)
    assert (type(found), [*found]) == (OrderedDict, [*weights])
    assert found._metadata == weights._metadata != {}, "what tells load_state_dict the versions"  # type: ignore[attr-defined]
    encoded = _round(Encoded({"ids": torch.arange(3)}, more=("x", None)))
    assert type(encoded) is Encoded
    assert (encoded["ids"].tolist(), encoded.more) == ([0, 1, 2], ("x", None))
    kept = WithAttribute(z=1, a=2)
    kept.extra = [3]
    found = _round(kept)
    assert (type(found), [*found.items()], found.extra) == (WithAttribute, [("z", 1), ("a", 2)], [3])
    found = _round(Attributes(x=1))
    assert (type(found), found.x, found["x"]) == (Attributes, 1, 1)
    found.y = 2
    assert found["y"] == 2
    packed = _round(pack_sequence([torch.ones(3), torch.zeros(2)]))
    assert isinstance(packed, PackedSequence)
    assert packed.data.tolist() == [1, 0, 1, 0, 1]


class Level(IntEnum):
    ONE = 1


@dataclasses.dataclass
class Slotted:
    __slots__ = ("a",)
    a: int


_UNPACKABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.ones(2, requires_grad=True), "a tensor that requires gradients"),
    (lambda: torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
    (lambda: torch.ones(2, device="meta"), "a tensor on meta"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "a quantized tensor"),
    (lambda: torch.nn.Parameter(torch.ones(2)), "an object of torch.nn.parameter:Parameter"),
    (lambda: np.array([object()]), "an array of object"),
    (lambda: np.zeros(1, dtype=[("a", "f4")]), "an array of [('a', '<f4')]"),
    (lambda: {1, 2}, "an object of builtins:set"),
    (lambda: Level.ONE, f"an object of {__name__}:Level"),
    (lambda: Slotted(1), f"an object of {__name__}:Slotted"),
    (lambda: defaultdict(list), "an object of collections:defaultdict"),
    (lambda: type("Local", (dict,), {})(), f"an object of {__name__}:Local"),
    (lambda: len, "an object of builtins:builtin_function_or_method"),
]


@pytest.mark.parametrize(("make", "what"), _UNPACKABLE, ids=[what for _, what in _UNPACKABLE])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_what_can_not_be_packed_is_named_with_its_place(make: Callable[[], Any], what: str) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(Unpackable) as caught:
        Parcel.of([{"a": [torch.ones(2), make()]}])
    assert str(caught.value) == f"{what} at ['a'][1]"
    assert os.listdir("/proc/self/fd") == before


def test_a_class_that_is_not_loaded_is_named_and_none_is_called() -> None:
    parcel = Parcel.of([Frozen(torch.ones(1))])
    place, size = parcel.places[0], parcel.size
    content = os.pread(parcel.descriptor, size, 0)
    for name in (b"no_such_module:Frozen", b"os:system", b"builtins:eval"):
        told = content[place[0] : place[1]].replace(f"{__name__}:Frozen".encode(), name)
        os.pwrite(parcel.descriptor, told.ljust(place[1] - place[0]), place[0])
        with pytest.raises(LockstepError, match=f"the class {name.decode()}, which is not loaded in this process"):
            opened(parcel.descriptor, size, place)


def test_all_who_open_a_parcel_share_its_memory_and_keep_it() -> None:
    parcel = Parcel.of([torch.zeros(3)])
    one, other = (opened(parcel.descriptor, parcel.size, parcel.places[0]) for _ in range(2))
    del parcel
    one[1] = 5
    assert other.tolist() == [0, 5, 0]
    assert _mapped() == 2
    del one, other
    assert _mapped() == 0


def _mapped() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd:lockstep" in line for line in maps)


def test_arrays_that_may_not_be_written_to_refuse_it() -> None:
    found = _round({"array": np.arange(3), "tensor": torch.arange(3)}, writable=False)
    with pytest.raises(ValueError, match="read-only"):
        found["array"][0] = 1
    assert (found["tensor"] + 1).tolist() == [1, 2, 3]


def _write(parcel: Parcel) -> None:
    faulthandler.disable()  # which would show the stack of all this
    tensor = opened(parcel.descriptor, parcel.size, parcel.places[0], writable=False)
    tensor[0] = 1


def test_a_write_to_a_tensor_that_may_not_be_written_to_ends_the_process() -> None:
    parcel = Parcel.of([torch.arange(3)])
    process = multiprocessing.get_context("fork").Process(target=_write, args=(parcel,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGSEGV
    process.close()
