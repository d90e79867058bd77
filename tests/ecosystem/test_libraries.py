"""Metrics, models and data of other libraries, with lockstep's replicas and sharded loaders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.ecosystem import library_rows
from tests.ecosystem.table import Row
from tests.harness import run_ranks

Begin = Callable[[str, str, str], Row]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_torchmetrics_counts_each_sample_once(backend: str, row: Begin) -> None:
    line = row(
        "torchmetrics", "accuracy, AUROC, confusion, mean; unequal and empty last batches", f"3 ranks, {backend}"
    )
    line.same(run_ranks(library_rows.metrics, 1, None)[0], run_ranks(library_rows.metrics, 3, backend), limit=1e-12)


def test_peft(row: Begin) -> None:
    line = row("peft", "LoRA of a GPT-2 with lockstep.replicate", "2 ranks, shm")
    line.same(run_ranks(library_rows.lora, 1, None)[0], run_ranks(library_rows.lora, 2, "shm"), limit=1e-10)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny"])
def test_timm(name: str, row: Begin) -> None:
    line = row("timm", f"{name} and ModelEmaV2 with lockstep.replicate", "2 ranks, shm")
    one = run_ranks(library_rows.pictures, 1, None, name)[0]
    line.same(one, run_ranks(library_rows.pictures, 2, "shm", name), limit=1e-10)


def test_webdataset(tmp_path: Path, row: Begin) -> None:
    shards = library_rows.write_shards(tmp_path / "shards")
    line = row("webdataset", "a stream that every rank reads, through lockstep.shard", "3 ranks, shm")
    one = run_ranks(library_rows.stream, 1, None, shards)[0]
    line.same(one, run_ranks(library_rows.stream, 3, "shm", shards), limit=1e-12)


def test_datasets(row: Begin) -> None:
    line = row("datasets", "a table through lockstep.shard", "3 ranks, shm")
    one = run_ranks(library_rows.rows_of_a_table, 1, None)[0]
    line.same(one, run_ranks(library_rows.rows_of_a_table, 3, "shm"), limit=1e-12)


def test_datasets_are_read_as_fast_as_by_the_plain_loader(row: Begin) -> None:
    line = row("datasets", "time of a pass, against the plain loader", "1 rank")
    plain, sharded = run_ranks(library_rows.reading_times, 1, 5000)[0]
    ratio = sharded / plain
    line.notes.append(f"{ratio:.2f} times the plain loader's")
    line.holds("as fast", ratio <= 1.3, f"{sharded:.3f} s against {plain:.3f} s: {ratio:.1f} times")
