"""Checkpoints that are not finite: found by their bytes, kept apart by retention, passed over by every reader."""

from __future__ import annotations

import math
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import lockstep
from lockstep.checkpoint import folders
from lockstep.checkpoint.blocks import BLOCK
from lockstep.checkpoint.finite import Bound, Meant, frozen_nan, in_words, infinite
from lockstep.checkpoint.plan import StateLayout, plan_writes
from lockstep.checkpoint.read import read, read_manifest
from lockstep.checkpoint.retention import Entry, Retention, entries, prune, superfluous
from lockstep.checkpoint.state import Moment
from lockstep.cli import main
from lockstep.errors import CheckpointError
from tests.checkpoints import State, save

pytestmark = pytest.mark.filterwarnings("ignore:the checkpoint step-.* holds values that are NaN:RuntimeWarning")

_NAN, _INF = math.nan, math.inf


# What is finite.


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(torch.bfloat16, 16), (torch.float16, 16), (torch.float8_e5m2, 8), (torch.float8_e4m3fn, 8)],
)
def test_every_value_of_a_small_dtype(dtype: torch.dtype, bits: int) -> None:
    patterns = np.arange(2**bits, dtype=f"u{bits // 8}")
    values = torch.from_numpy(patterns.view(f"i{bits // 8}")).view(dtype).float()
    finite, any_number = Bound.of(dtype), Bound.of(dtype, infinities=True)
    assert finite is not None
    assert any_number is not None
    for pattern, value in zip(patterns, values.tolist(), strict=True):
        content = np.array([0, pattern, 1], dtype=patterns.dtype).view(np.uint8).data
        assert finite.holds(content) == math.isfinite(value), hex(pattern)
        assert any_number.holds(content) == (not math.isnan(value)), hex(pattern)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(data=some.data())
@settings(max_examples=200)
def test_values_of_a_large_dtype(dtype: torch.dtype, data: some.DataObject) -> None:
    width = 8 * dtype.itemsize
    numbers = some.floats(width=64 if width == 64 else 32) | some.integers(
        0, 2**width - 1
    ).map(  # of any bits, NaNs of every kind too
        lambda pattern: float(np.array([pattern], dtype=f"u{width // 8}").view(f"f{width // 8}")[0])
    )
    values = np.array(data.draw(some.lists(numbers, min_size=1, max_size=20)), dtype=f"f{width // 8}")
    finite, any_number = Bound.of(dtype), Bound.of(dtype, infinities=True)
    assert finite is not None
    assert any_number is not None
    assert finite.holds(values.view(np.uint8).data) == bool(np.isfinite(values).all())
    assert any_number.holds(values.view(np.uint8).data) == (not np.isnan(values).any())


def test_other_dtypes_have_no_bound() -> None:
    assert Bound.of(torch.int64) is Bound.of(torch.bool) is Bound.of(torch.uint8) is None


def test_infinities_are_found_in_parameters_of_every_kind() -> None:
    tensors = {
        "plain": torch.tensor([1.0, -_INF]),
        "nan": torch.tensor([_NAN]),
        "half": torch.tensor([_INF]).bfloat16(),
        "small": torch.tensor([_INF]).to(torch.float8_e5m2),
        "numbers": torch.tensor([1]),
        "pairs": torch.tensor([complex(0.0, _INF)]),
        "none": torch.empty(0),
        "lazy": nn.parameter.UninitializedParameter(),
        "not saved": torch.full((2, 2), _INF).to_sparse(),
        "nowhere": torch.empty(2, device="meta"),
    }
    assert infinite(tensors.items()) == {"plain", "half", "small", "pairs"}
    assert infinite([]) == frozenset()


# Which tensors count.


def _save(root: Path, step: int, *states: State, keep: int | None = None) -> Path:
    root.mkdir(exist_ok=True)
    made = save(root, states, place=Moment(step, 0, False), keep=keep)
    assert isinstance(made[0], Path), made
    assert all(one == made[0] for one in made)
    return made[0]


def _with(value: float, size: int = 5) -> torch.Tensor:
    return torch.arange(float(size)).index_fill(0, torch.tensor([size - 1]), value)


@pytest.mark.parametrize("value", [_NAN, _INF, -_INF])
def test_what_is_judged_counts_parameters_and_an_optimizers_state_among_it(tmp_path: Path, value: float) -> None:
    state = State(
        {
            "weight": _with(value),
            "mask": _with(value),
            "fine": torch.ones(3),
            "pair": torch.tensor([complex(1, value)]),
        },
        parameters=frozenset({"weight", "fine", "pair"}),
        parts={
            "optimizer": {
                "state": {0: {"exp_avg": _with(value), "step": torch.tensor(3.0), "least": torch.tensor(_INF)}}
            },
            "scheduler": {"best": _with(value)},
            "extra": {"meter": _with(value)},
        },
    )
    named = read_manifest(_save(tmp_path, 1, state)).not_finite
    assert named == {"model.safetensors": ["pair", "weight"], "optimizer.safetensors": ["optimizer.state.0.exp_avg"]}
    assert in_words(named) == "pair, weight, optimizer.state.0.exp_avg", "the model's first"
    assert in_words(named, most=1) == "pair and 2 more"


def test_nan_counts_in_a_single_number_too(tmp_path: Path) -> None:
    state = State({"weight": torch.ones(1)}, parts={"optimizer": {"estimate": torch.tensor(_NAN)}})
    assert read_manifest(_save(tmp_path, 1, state)).not_finite == {"optimizer.safetensors": ["optimizer.estimate"]}


@pytest.mark.parametrize("value", [_NAN, _INF])
def test_infinities_are_meant_in_kinds_of_tensors(value: float) -> None:
    model = {"norm.running_var": _with(value), "mask": _with(value), "queue": torch.ones(2), "seed": torch.tensor([3])}
    in_model = {"norm.running_var": False, "mask": True, "queue": True, "seed": True, "not saved": False}
    layout = StateLayout.of(model, {}, parameters=frozenset(), is_main=True, in_model=in_model)
    bounds = layout.files[0].bounds
    assert bounds.keys() == {"norm.running_var", "mask", "queue"}
    held = {name: bound.holds(model[name].numpy().view(np.uint8).data) for name, bound in bounds.items()}
    assert held == {"norm.running_var": False, "mask": value == _INF, "queue": True}


def test_nan_counts_in_parameters_that_train_whatever_they_were_at_first() -> None:
    tensors = {
        name: nn.Parameter(torch.tensor([_NAN, 1.0]), requires_grad=name == "trained") for name in ("trained", "table")
    }
    assert frozen_nan([*tensors.items(), ("whole", torch.ones(2))]) == {"table"}
    assert Meant(nan=frozenset({"table"})).bounds(dict.fromkeys(tensors, False)) == {"trained": False}


def test_infinities_that_are_meant_do_not_count_but_nan_beside_them_does() -> None:
    for values, wrong in (([1.0, -_INF], False), ([_NAN, -_INF], True)):
        model = {"forbidden": torch.tensor(values), "scale": torch.ones(1)}
        layout = StateLayout.of(
            model, {}, parameters=frozenset(model), is_main=True, meant=Meant(frozenset({"forbidden"}))
        )
        plan = plan_writes(layout, [layout.outline()], rank=0, texts={})
        beyond = [
            number
            for number, block in enumerate(plan.contents())
            if block.bound is not None and not block.bound.holds(block.content)
        ]
        assert plan.not_finite([beyond]) == ({"model.safetensors": ["forbidden"]} if wrong else None)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("where", [0, BLOCK // 4 + 7, 3 * BLOCK // 4 - 1])
def test_one_rank_sees_what_is_not_finite_and_all_are_told(tmp_path: Path, world_size: int, where: int) -> None:
    large = torch.ones(3 * BLOCK // 4)
    large[where] = _NAN
    state = State({"a": torch.ones(9), "large": large, "z": torch.ones(BLOCK // 2)})
    folder = _save(tmp_path, 1, *[state] * world_size)
    assert read_manifest(folder).not_finite == {"model.safetensors": ["large"]}


def test_a_finite_checkpoint_says_nothing_so_that_its_manifest_is_as_ever(tmp_path: Path) -> None:
    folder = _save(tmp_path, 1, State({"weight": torch.ones(3)}))
    assert b"not_finite" not in (folder / "manifest.json").read_bytes()


# What is kept.

_RULES = some.builds(
    Retention,
    last=some.none() | some.integers(0, 4),
    every=some.none() | some.integers(1, 4),
    best=some.integers(0, 2),
    mode=some.sampled_from(["min", "max"]),
)
_METRICS = some.none() | some.sampled_from([0.1, 0.2, 0.3, _NAN, -_INF])
_SAVES = some.lists(some.tuples(some.booleans(), _METRICS, some.integers(0, 2)), min_size=1, max_size=14)


def _run(saves: list[tuple[bool, float | None, int]], rule: Retention, *, only: bool | None = None) -> list[set[str]]:
    """Save one after the other and prune after each; what is there after each. ``only``: leave the others out."""
    there: list[Entry] = []
    found, step, revisions = [], 0, {0: 0}
    for finite, metric, further in saves:
        step += further  # 0: once more at the same step
        revisions[step] = revisions.get(step, 0) + 1
        if only is None or finite is only:
            there.append(Entry(f"{step}-{revisions[step]}", step, revisions[step], metric, sound=finite))
            known = [Entry(**{**vars(entry), "good": entry is there[-1] or None}) for entry in there]
            gone = {entry.name for entry in superfluous(known, rule)}
            assert there[-1].name not in gone, "never the one just written"
            there = [entry for entry in there if entry.name not in gone]
        found.append({entry.name for entry in there})
    return found


@given(saves=_SAVES, rule=_RULES)
@settings(max_examples=500)
def test_finite_checkpoints_are_kept_as_if_the_others_were_not_there(
    saves: list[tuple[bool, float | None, int]], rule: Retention
) -> None:
    all_kept, finite_kept = _run(saves, rule), _run(saves, rule, only=True)
    finite, step, count = set[str](), 0, {0: 0}
    names = []
    for is_finite, _, further in saves:
        step += further
        count[step] = count.get(step, 0) + 1
        names.append(f"{step}-{count[step]}")
        finite |= {names[-1]} if is_finite else set()
    for number, (kept, alone) in enumerate(zip(all_kept, finite_kept, strict=True)):
        assert kept & finite == alone, "whatever comes between them"
        newest = [name for name in names[: number + 1] if name in finite][-1:]
        assert set(newest) <= kept, "the newest finite one is always there"
        lost = kept - finite
        if rule.last is not None and rule.every is None:
            assert len(lost) <= max(1, rule.last - len(alone)), "they take the places that are free, and one"


@given(saves=_SAVES, rule=_RULES)
@settings(max_examples=25)
def test_a_folder_is_pruned_by_the_rule_whatever_manifests_are_read(
    saves: list[tuple[bool, float | None, int]], rule: Retention
) -> None:
    with tempfile.TemporaryDirectory() as there, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        root, step = Path(there), 0
        for finite, metric, further in saves:
            step += further
            state = State({"weight": torch.tensor([1.0, 2.0 if finite else _NAN])})
            finite_metric = metric if metric is not None and math.isfinite(metric) else None
            (made,) = save(root, [state], place=Moment(step, 0, False, finite_metric))
            assert isinstance(made, Path)
            listed = entries(root, good=(made.name,))
            wanted = {entry.name for entry in listed} - {entry.name for entry in superfluous(listed, rule)}
            prune(root, made, rule)
            assert {folder.name for folder in folders.checkpoints(root)} == wanted


def test_the_last_sound_ones_outlive_any_number_of_lost_ones(tmp_path: Path) -> None:
    sound, lost = State({"weight": torch.ones(3)}), State({"weight": torch.full((3,), _NAN)})
    for step in (1, 2, 3, 4):
        _save(tmp_path, step, sound, keep=3)
    for step in (5, 6, 7, 8, 9):
        _save(tmp_path, step, lost, keep=3)
    assert _steps(tmp_path) == [2, 3, 4, 9]
    _save(tmp_path, 5, sound, keep=3)  # resumed from the step 4
    assert _steps(tmp_path) == [3, 4, 5, 9], "what is newer is left alone"
    for step in (9, 10, 11):
        _save(tmp_path, step, sound, keep=3)
    assert [folder.name for folder in folders.checkpoints(tmp_path)] == [
        "step-00000011",
        "step-00000010",
        "step-00000009-r2",
    ]


# What is read.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two sound checkpoints, and two that are lost."""
    for step, value in enumerate((1.0, 2.0, _NAN, _INF)):
        average = {"average": {"weight": torch.full((3,), float(step))}}
        _save(tmp_path / "run", step, State({"weight": torch.full((3,), value)}, parts={"extra": average}))
    return tmp_path / "run"


def _net(value: float = 0.0) -> nn.Module:
    net = nn.Module()
    net.weight = nn.Parameter(torch.full((3,), value))
    return net


def _lockstep(*arguments: object) -> Result:
    done = CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done


def test_load_weights_passes_over_what_is_not_finite_unless_it_is_named(run: Path) -> None:
    net = _net()
    with pytest.warns(RuntimeWarning, match=r"step-00000001 is loaded; skipped: step-00000003 holds values .* weight"):
        assert lockstep.load_weights(run, net).source.name == "step-00000001"
    assert net.state_dict()["weight"].tolist() == [2.0] * 3
    with pytest.warns(RuntimeWarning, match="step-00000003 is loaded, but step-00000003 holds values that are NaN"):
        lockstep.load_weights(run / "step-00000003", net)
    for step in (0, 1):
        shutil.rmtree(run / f"step-0000000{step}")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run is complete and sound: .*give the path of one"):
        lockstep.load_weights(run, _net())


def test_ls_show_and_verify_name_it(run: Path) -> None:
    words = "step-00000003 holds values that are NaN or infinite, in weight"
    shown = _lockstep("ls", run).output.splitlines()
    assert [line for line in shown if line.startswith("not sound: ")] == [
        f"not sound: {words}",
        f"not sound: {words.replace('3', '2', 1)}",
    ]
    assert f"no: {words}" in _lockstep("show", run).output
    assert "as far as known" in _lockstep("show", run, "--step", 1).output
    verified = _lockstep("verify", run)
    assert verified.exit_code == 0, "it is whole"
    assert verified.output.splitlines()[:2] == ["step-00000003: complete", f"  not sound: {words}"]


def test_prune_keeps_the_newest_finite_one(run: Path) -> None:
    said = _lockstep("prune", run, "--last", 0).output
    assert "not sound, kept: step-00000003 holds values" in said
    assert "removed step-00000000" in said
    assert _steps(run) == [1, 2, 3]
    shutil.rmtree(run / "step-00000001")
    assert "kept: step-00000003" in _lockstep("prune", run, "--last", 0).output
    assert _steps(run) == [3], "without a finite one the newest stays"


@pytest.mark.parametrize("extra", [(), ("--extra", "average")])
def test_export_takes_the_newest_finite_one_unless_a_step_is_named(run: Path, extra: tuple[str, ...]) -> None:
    done = _lockstep("export", run, run / "model.safetensors", *extra)
    assert done.exit_code == 0, done.output
    assert "skipped, not sound: step-00000003 holds" in done.stderr
    assert "of step-00000001" in done.stdout
    done = _lockstep("export", run, run / "lost.pt", "--step", 3, *extra)
    assert "exported, though step-00000003 holds values" in done.stderr
    assert "of step-00000003" in done.stdout
    for step in (0, 1):
        shutil.rmtree(run / f"step-0000000{step}")
    done = _lockstep("export", run, run / "none.pt", *extra)
    assert done.exit_code == 2
    assert "is complete and sound" in done.stderr
    assert not (run / "none.pt").exists()


def test_a_manifest_that_names_nothing_sensible_is_damaged(run: Path) -> None:
    folder = run / "step-00000003"
    manifest = read_manifest(folder)
    wrong: list[Any] = [{}, [], {"model.safetensors": []}, {"model.safetensors": "weight"}, {"model.safetensors": [1]}]
    for named in wrong:
        changed = type(manifest)(**{**vars(manifest), "not_finite": named})
        (folder / "manifest.json").write_bytes(changed.to_json())
        with pytest.raises(lockstep.CheckpointCorrupt, match="what is not finite is not named by file"):
            read_manifest(folder)
    no_ranks: list[Any] = [[], {}, "1", [1, "2"], [True]]
    for ranks in no_ranks:
        changed = type(manifest)(**{**vars(manifest), "apart": ranks})
        (folder / "manifest.json").write_bytes(changed.to_json())
        with pytest.raises(lockstep.CheckpointCorrupt, match="the ranks that differed are not a list of ranks"):
            read_manifest(folder)


def test_checkpoints_of_earlier_versions_are_taken_as_ever() -> None:
    earlier = sorted(Path("tests/fixtures").glob("run-*/step-*"))
    assert earlier
    for folder in earlier:
        assert read(folder, only_sound=True).manifest.not_finite is None


def _steps(root: Path) -> list[int]:
    return sorted(map(folders.step_of, folders.checkpoints(root)))
