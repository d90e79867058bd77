"""DataParallel's pure parts: cutting, scattering, gathering, and comparing contents and devices."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from lockstep import DataParallel, bits
from lockstep.data_parallel import copies as contents
from lockstep.data_parallel.copies import send_together
from lockstep.data_parallel.devices import Capacity, as_device, imbalance, refuse_shared, resolve_devices, suggest_split
from lockstep.data_parallel.gather import Gatherer, checked_output_dim, fitting_dims
from lockstep.data_parallel.replicas import brought
from lockstep.data_parallel.scatter import Piece, batch_size, checked_chunk_sizes, cut, scatter
from lockstep.identity import Identity

pytestmark = pytest.mark.internals  # run on other versions of torch and Python, too

CPU = torch.device("cpu")
TWO = [CPU, CPU]


# Cut ------------------------------------------------------------------------------------------------------------------


def test_an_empty_batch_goes_to_the_first_replica() -> None:
    assert cut(0, 3) == [Piece(0, 0, 0)]
    assert cut(0, 2, [1, 2]) == [Piece(0, 0, 0)]


@given(st.integers(1, 40), st.integers(1, 9))
def test_pieces_are_those_of_torch_chunk(batch: int, replicas: int) -> None:
    chunks = torch.arange(batch).chunk(replicas)
    assert [piece.size for piece in cut(batch, replicas)] == [len(chunk) for chunk in chunks]


@given(st.integers(0, 60), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_given_sizes_cover_the_batch_in_proportion(batch: int, sizes: list[int]) -> None:
    pieces = cut(batch, len(sizes), sizes)
    assert [piece.start for piece in pieces] == [sum(p.size for p in pieces[:i]) for i in range(len(pieces))]
    assert sum(piece.size for piece in pieces) == batch
    assert pieces[0].replica == 0
    assert all(piece.size > 0 for piece in pieces) or batch == 0
    for piece in pieces:
        assert abs(piece.size - batch * sizes[piece.replica] / sum(sizes)) < 1


def test_a_full_batch_is_cut_as_given() -> None:
    assert cut(48, 2, [32, 16]) == [Piece(0, 0, 32), Piece(1, 32, 16)]


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], [0, 4], [True, 4], [1.5, 2]])
def test_sizes_that_make_no_sense_are_refused(sizes: list[Any]) -> None:
    with pytest.raises(ValueError, match="chunk_sizes="):
        checked_chunk_sizes(sizes, 2)


# Scatter --------------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Batch:
    images: Tensor
    name: str


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def test_containers_keep_their_kind_and_other_objects_go_to_all() -> None:
    shared = object()
    by_default: defaultdict[str, Tensor] = defaultdict(lambda: torch.zeros(0), {"d": numbers(5, 2)})
    tree: tuple[Any, ...] = (
        [numbers(5), {"a": numbers(5, 2), "n": 3}],
        Pair(numbers(5), "text"),
        Batch(numbers(5, 1), "b"),
        OrderedDict(o=numbers(5)),
        by_default,
        (),
        {},
        shared,
        None,
    )
    (left, right), pieces = scatter(tree, TWO, 0, None)
    assert [piece.size for piece in pieces] == [3, 2]
    for part, chunk in ((left, slice(0, 3)), (right, slice(3, 5))):
        assert torch.equal(part[0][0], numbers(5)[chunk])
        assert torch.equal(part[0][1]["a"], numbers(5, 2)[chunk])
        assert part[0][1]["n"] == 3
        assert isinstance(part[1], Pair)
        assert torch.equal(part[1].left, numbers(5)[chunk])
        assert part[1].right == "text"
        assert isinstance(part[2], Batch)
        assert torch.equal(part[2].images, numbers(5, 1)[chunk])
        assert type(part[3]) is OrderedDict
        assert type(part[4]) is defaultdict
        assert part[4]["missing"].numel() == 0
        assert part[5:7] == ((), {})
        assert part[7] is shared
        assert part[8] is None


def test_a_dataclass_whose_field_has_no_value_yet() -> None:
    @dataclass(kw_only=True)
    class Late:
        x: Tensor
        later: Tensor = field(init=False)

    (left, right), _ = scatter((Late(x=numbers(5)),), TWO, 0, None)
    assert torch.equal(torch.cat([left[0].x, right[0].x]), numbers(5))
    assert not hasattr(left[0], "later")


def test_another_dimension_and_tensors_without_it() -> None:
    tree = {"steps": numbers(3, 4, 2), "lengths": numbers(4), "last": numbers(4, 3)}
    parts, pieces = scatter({key: tree[key] for key in ("steps", "lengths")}, TWO, 1, None)
    assert [piece.size for piece in pieces] == [2, 2]
    assert torch.equal(parts[1]["steps"], tree["steps"][:, 2:])
    assert torch.equal(parts[1]["lengths"], tree["lengths"][2:])
    with pytest.raises(ValueError, match=r"shape \(3,\) has no dim 1"):
        scatter((tree["steps"], numbers(3)), TWO, 1, None)
    with pytest.raises(ValueError, match=r"differ in their number of samples along dim=1.*\(3, 4, 2\).*\(4, 3\)"):
        scatter(tree, TWO, 1, None)


def test_a_negative_dimension_counts_from_the_end() -> None:
    parts, _ = scatter((numbers(3, 4), numbers(4)), TWO, -1, None)
    assert torch.equal(parts[1][0], numbers(3, 4)[:, 2:])
    assert torch.equal(parts[1][1], numbers(4)[2:])


def test_single_rows_and_scalars_belong_to_all_samples() -> None:
    mask, scale = numbers(1, 3), torch.tensor(2.0)
    parts, _ = scatter((numbers(4, 3), mask, scale), TWO, 0, None)
    for part in parts:
        assert torch.equal(part[1], mask)
        assert torch.equal(part[2], scale)
    alone, pieces = scatter((mask,), TWO, 0, None)
    assert len(alone) == len(pieces) == 1


def test_tensors_of_different_lengths_are_an_error_that_shows_them() -> None:
    with pytest.raises(ValueError, match=r"input\[0\]\['x'\]: \(4, 2\), input\[1\]: \(6,\)"):
        batch_size(({"x": numbers(4, 2)}, numbers(6)), 0)


def test_without_tensors_the_first_replica_gets_all() -> None:
    trees, pieces = scatter((3, "text"), TWO, 0, None)
    assert trees == [(3, "text")]
    assert pieces == [Piece(0, 0, 1)]


@pytest.mark.parametrize("in_order", [True, False])
def test_packed_sequences_are_cut_by_sequence(in_order: bool) -> None:
    lengths = [5, 4, 2, 1, 1] if in_order else [2, 5, 1, 4, 1]
    rows = [torch.full((n, 2), float(i)) + numbers(n, 2) for i, n in enumerate(lengths)]
    packed = pack_sequence(rows, enforce_sorted=in_order)
    ids = torch.arange(5)
    parts, pieces = scatter((packed, ids), TWO, 0, None)
    assert [piece.size for piece in pieces] == [3, 2]
    for (part, own), piece in zip(parts, pieces, strict=True):
        padded, found = pad_packed_sequence(part, batch_first=True)
        assert found.tolist() == lengths[piece.start : piece.start + piece.size]
        assert (part.sorted_indices is None) is in_order
        for row, i, n in zip(padded, own.tolist(), found.tolist(), strict=True):
            assert torch.equal(row[:n], rows[i])
    together = Gatherer(None).gather([part for part, _ in parts], [3, 2], CPU)
    assert torch.equal(together.data, packed.data)
    assert torch.equal(together.batch_sizes, packed.batch_sizes)


def test_gradients_reach_the_inputs_and_replicas_may_change_them_in_place() -> None:
    x = numbers(5, 2).requires_grad_()
    parts, _ = scatter((x * 1,), TWO, 0, None)
    for i, part in enumerate(parts):
        part[0].mul_(i + 2)
    torch.cat([part[0] for part in parts]).sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [2, 2, 2, 3, 3]


# Gather ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "sizes", "dims"),
    [
        ([(3, 10), (2, 10)], [3, 2], [0]),
        ([(65, 16, 9), (65, 16, 9)], [16, 16], [1]),
        ([(16, 16, 9), (16, 16, 9)], [16, 16], [0, 1]),
        ([(16, 16), (16, 15)], [16, 15], [1]),
        ([(4, 3), (5, 3)], [2, 2], []),
        ([(2, 3), (2, 3, 1)], [2, 2], []),
        ([(7, 2), (8, 2)], [2, 2], []),
    ],
)
def test_the_dimension_of_the_samples_is_read_off_the_sizes(
    shapes: list[tuple[int, ...]], sizes: list[int], dims: list[int]
) -> None:
    assert fitting_dims(shapes, sizes) == dims


def test_outputs_of_a_recogniser_are_put_together_along_the_batch() -> None:
    halves = [torch.randn(65, 16, 9), torch.randn(65, 16, 9)]
    assert torch.equal(Gatherer(None).gather(halves, [16, 16], CPU), torch.cat(halves, 1))


def test_an_ambiguous_output_is_an_error_until_other_sizes_have_shown_it() -> None:
    gatherer = Gatherer(None)
    square = [torch.randn(4, 4), torch.randn(4, 4)]
    with pytest.raises(ValueError, match=r"dimension 0 or 1.*gave \(4, 4\).*output_dim=0"):
        gatherer.gather(square, [4, 4], CPU)
    gatherer.gather([torch.randn(4, 3), torch.randn(4, 3)], [3, 3], CPU)
    assert torch.equal(gatherer.gather(square, [4, 4], CPU), torch.cat(square, 1))
    assert torch.equal(Gatherer(0).gather(square, [4, 4], CPU), torch.cat(square))


def test_an_output_that_fits_nowhere_shows_shapes_and_remedies() -> None:
    views = [torch.randn(6, 2), torch.randn(4, 2)]
    with pytest.raises(ValueError, match=r"replica 1 had 2 samples and gave \(4, 2\).*output_dim=0.*gather=False"):
        Gatherer(None).gather(views, [3, 2], CPU)
    assert Gatherer(0).gather(views, [3, 2], CPU).shape == (10, 2)
    with pytest.raises(ValueError, match=r"can't be concatenated along output_dim=1.*\(6, 2\), \(4, 2\)"):
        Gatherer(1).gather(views, [3, 2], CPU)


def test_one_dimension_for_all_outputs_may_contradict_none_of_them() -> None:
    scores, hidden = torch.randn(7, 3, 5), torch.randn(3, 7)
    outputs = [(scores, hidden), (scores + 1, hidden + 1)]
    with pytest.raises(
        ValueError, match=r"output_dim=1 was given for all outputs.*output\[1\] are along dimension 0.*7\)"
    ):
        Gatherer(1).gather(outputs, [3, 3], CPU)
    right = Gatherer((1, 0)).gather(outputs, [3, 3], CPU)
    assert [tuple(each.shape) for each in right] == [(7, 6, 5), (6, 7)]
    # Said of one output, it holds: and where the sizes say nothing, it holds as well.
    assert Gatherer((1, 1)).gather(outputs, [3, 3], CPU)[1].shape == (3, 14)
    assert Gatherer(1).gather([hidden, hidden], [3, 3], CPU).shape == (3, 14)
    assert Gatherer(1).gather([(hidden,), (hidden,)], [2, 2], CPU)[0].shape == (3, 14)


def test_losses_whose_samples_cannot_be_found_name_a_remedy_that_helps() -> None:
    losses = Gatherer("mean", what="loss", remedy="Let the criterion return a mean")
    for size in (3, 2):
        with pytest.raises(ValueError, match=r"^loss.*\(3, 3\).*Let the criterion return a mean$"):
            losses.gather([torch.zeros(3, 3)] * 2, [size, size], CPU)


def test_scalars_become_one_value_for_each_replica_or_the_weighted_mean() -> None:
    scalars = [torch.tensor(1.0), torch.tensor(4.0)]
    assert Gatherer(None).gather(scalars, [2, 1], CPU).tolist() == [1, 4]
    assert Gatherer(0).gather(scalars, [2, 1], CPU).tolist() == [1, 4]
    assert Gatherer("mean").gather(scalars, [2, 1], CPU).item() == 2


def test_nested_outputs_and_a_tree_of_dimensions() -> None:
    def of(size: int) -> dict[str, Any]:
        return {
            "a": [torch.randn(size, 3), None],
            "b": Pair(torch.randn(7, size), "same"),
            "loss": torch.tensor(1.0 * size),
        }

    parts = [of(3), of(2)]
    done = Gatherer(None).gather(parts, [3, 2], CPU)
    assert done["a"][0].shape == (5, 3)
    assert done["a"][1] is None
    assert isinstance(done["b"], Pair)
    assert done["b"].left.shape == (7, 5)
    assert done["b"].right == "same"
    assert done["loss"].tolist() == [3, 2]
    chosen = Gatherer({"a": [0, None], "b": (1, None), "loss": "mean"}).gather(parts, [3, 2], CPU)
    assert chosen["loss"].item() == pytest.approx(13 / 5)


@pytest.mark.parametrize(
    "outputs",
    [[{"a": 1}, {"b": 1}], [(1, 2), (1,)], [[1], (1,)], [3, 4], [None, torch.ones(2)], [torch.ones(2), "x"]],
)
def test_replicas_that_return_different_things_are_an_error(outputs: list[Any]) -> None:
    with pytest.raises(ValueError, match="differ at output"):
        Gatherer(None).gather(outputs, [2, 2], CPU)


@pytest.mark.parametrize("wrong", ["sum", 1.5, True, ["x"], {"a": object()}])
def test_an_output_dim_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="output_dim="):
        checked_output_dim(wrong)


# Contents -------------------------------------------------------------------------------------------------------------

_DRAWN = torch.Generator().manual_seed(0)
TENSORS = [
    torch.randn(7, 5, generator=_DRAWN),
    torch.randn(7, 5, generator=_DRAWN).t(),
    torch.randn(4, 6, 3, 3, generator=_DRAWN).to(memory_format=torch.channels_last),
    torch.randn(9, dtype=torch.bfloat16, generator=_DRAWN),
    torch.randn(3, dtype=torch.complex64, generator=_DRAWN),
    torch.tensor(3),
    torch.tensor([True, False, True]),
    torch.full((3,), float("nan")),
    torch.tensor([0.5, -0.0, 0.25], dtype=torch.float16),
    torch.randn(5, 4, generator=_DRAWN)[:, ::2],
    torch.zeros(0, 3),
    torch.randn(3, generator=_DRAWN).expand(4, 3),
    torch.randn(3, dtype=torch.complex64, generator=_DRAWN).conj(),
]


def fingerprint(tensor: Tensor) -> Tensor:
    return contents._digests([[(tensor, torch.empty_like(tensor))]])


def _another(value: Tensor) -> Tensor | float:
    """A value with other bits."""
    if value.dtype == torch.bool:
        return ~value
    return 0.25 if value == 0.5 else 0.5 if value.is_floating_point() else 7


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.stride()}")
def test_a_single_changed_element_is_noticed_and_equal_bits_are_not(tensor: Tensor) -> None:
    other = torch.empty_like(tensor).copy_(tensor)
    assert contents.changed([(tensor, other)]) == []
    ours, theirs = fingerprint(tensor), fingerprint(other)
    assert torch.equal(ours, theirs)
    for index in range(tensor.numel()):
        edited = torch.empty_like(tensor).copy_(tensor)
        position = tuple(torch.unravel_index(torch.tensor(index), tensor.shape))
        edited[position] = _another(edited[position])
        assert contents.changed([(tensor, tensor), (tensor, edited)]) == [1]
        assert not torch.equal(ours, fingerprint(edited))


@pytest.mark.parametrize("seed", range(20, 40))
def test_fingerprints_see_what_a_plain_sum_does_not(seed: int) -> None:
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed))
    plain = fingerprint(tensor)
    for other in (tensor.t().contiguous(), tensor.flip(0), -tensor, tensor.roll(1)):
        assert not torch.equal(plain, fingerprint(other))


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_parts_of_a_larger_tensor_compare_as_equal_wherever_they_begin(start: int, dtype: torch.dtype) -> None:
    flat = torch.arange(40).to(dtype)
    for part in (flat[start : start + 8], flat[start : start + 16].view(4, 4).t(), flat[start : start + 24 : 3]):
        other = torch.empty_like(part).copy_(part)
        assert contents.changed([(part, other)]) == []
        assert torch.equal(bits.octets(part, other), bits.octets(other, other))
        assert torch.equal(
            contents._digests([[(part, other)]]),
            contents._digests([[(other, other)]]),
        )


def test_neighbours_share_a_fingerprint_until_they_fill_a_group() -> None:
    group = bits.GROUP
    assert bits.packed([1, 2, group, group + 5, 3]) == [[0, 1], [2], [3], [4]]
    large = torch.zeros(group + 3, dtype=torch.int32)
    moved = large.clone()
    moved[-1] = 1
    assert not torch.equal(fingerprint(large), fingerprint(moved))


# Between devices ------------------------------------------------------------------------------------------------------


def test_small_tensors_travel_in_one_piece_and_arrive_in_their_own_layout() -> None:
    sources = [numbers(3, 4), numbers(4, 3).t(), torch.tensor(7.0), numbers(0, 2), numbers(2, 3, 2, 2) + 5]
    targets = [torch.empty_like(source) for source in sources]
    targets[-1] = torch.empty_like(sources[-1]).to(memory_format=torch.channels_last)
    send_together(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source, target)


def test_gradients_of_one_device_travel_in_one_piece() -> None:
    # "cpu:0" is another name than "cpu" for the same device, so that they seem to travel.
    origins = [(1, 1), (0, 1), (2, 1), (0, 2)]
    elsewhere = [torch.device("cpu", 0)] * 3
    grads = [numbers(3, 2), numbers(4), None, numbers(2, 2).double()]
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled):
            for wanted, found in zip(grads, brought(origins, grads, elsewhere), strict=True):
                assert found is wanted is None or torch.equal(found, wanted)  # type: ignore[arg-type]


# Devices --------------------------------------------------------------------------------------------------------------


def test_the_split_follows_the_smaller_of_memory_and_speed() -> None:
    large, small = Capacity(80, 100), Capacity(40, 90)
    assert suggest_split([large, large]) is None
    assert suggest_split([large, Capacity(61, 76)]) is None
    assert suggest_split([large, small]) == (67, 33)
    assert suggest_split([large, large, Capacity(80, 10)]) == (47, 48, 5)
    assert suggest_split([Capacity(80, 100, 2000), Capacity(80, 100, 1000)]) == (67, 33)
    assert suggest_split([Capacity(80, 50, 2000), Capacity(80, 100, 1000)]) is None


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (Capacity(24 * 2**30, 132, 1_980_000), "unequal in memory (cuda:0"),
        (Capacity(80 * 2**30, 98, 1_980_000), "unequal in speed (cuda:0"),
        (Capacity(80 * 2**30, 132, 1_410_000), "132 multiprocessors at 1.41 GHz"),
        (Capacity(24 * 2**30, 80), "unequal in memory and speed"),
        (Capacity(24 * 2**30, 80), "cuda:1: 24 GiB, 80 multiprocessors), and"),
        (Capacity(40 * 2**30, 132, 1_980_000), "chunk_sizes=[67, 33]"),
        (Capacity(61 * 2**30, 100, 1_980_000), None),
    ],
)
def test_an_imbalance_names_what_is_unequal_and_the_split(second: Capacity, text: str | None) -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    found = imbalance(devices, [Capacity(80 * 2**30, 132, 1_980_000), second])
    assert found is text is None or (found is not None and text is not None and text in found)


def test_making_a_wrapper_warns_of_unequal_devices_unless_a_split_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([Capacity(2**30, 60), Capacity(2**30, 40)] * 2)
    monkeypatch.setattr("lockstep.data_parallel.devices.capacity_of", lambda _: next(found))
    with pytest.warns(UserWarning, match=r"unequal in speed.*chunk_sizes=\[60, 40\]") as caught:
        DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])
    assert caught[0].filename == __file__
    DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"], chunk_sizes=[60, 40])
    DataParallel(torch.nn.Linear(2, 2), ["cpu"])
    monkeypatch.undo()
    DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"])  # of CPUs there is nothing to compare


@pytest.mark.parametrize("wrong", [[], "cpu", torch.device("cpu")])
def test_device_ids_must_be_a_list(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected a list"):
        resolve_devices(wrong)


def test_devices_in_all_spellings() -> None:
    assert resolve_devices(["cpu", torch.device("cpu"), "cpu:0", -1]) == [CPU] * 4
    with pytest.raises(TypeError, match="expected a device"):
        as_device(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one kind"):
        resolve_devices(["cpu", "meta:0"])


def test_all_devices_cannot_be_meant_by_several_ranks() -> None:
    refuse_shared([], Identity(1, 2, 1, 2))
    refuse_shared(TWO, Identity(1, 2, 0, 1))
    with pytest.raises(ValueError, match=r"rank 1 is one of 2 on this machine.*all of its 2 accelerators"):
        refuse_shared(TWO, Identity(1, 2, 1, 2))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator() -> None:
    assert resolve_devices(None) == []
    with pytest.raises(ValueError, match=r"no accelerator.*\['cpu', 'cpu'\]"):
        resolve_devices([0, 1])
    with pytest.raises(ValueError, match="there is no cuda:3"):
        resolve_devices(["cuda:3"])
