"""Streams that split themselves by rank, each against one process on the same global batches, and resumed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem import stream_rows
from tests.ecosystem.table import Row
from tests.harness import collect_outcomes, run_ranks

Begin = Callable[[str, str, str], Row]


def _joined(ranks: list[dict[str, Any]]) -> list[list[int]]:
    return [
        [*itertools.chain.from_iterable(shares)] for shares in zip(*[rank["batches"] for rank in ranks], strict=True)
    ]


def _written(library: str, folder: Path) -> str:
    run_ranks(stream_rows.write, 1, library, str(folder))  # in a process of its own: some libraries start threads
    return str(folder)


#: What a library leaves out or repeats of the 43 rows to make the parts equal: how often how many of them come.
_OTHERWISE = {"lancedb": {0: 1}, "mosaicml-streaming": {2: 1}}


@pytest.mark.parametrize(("backend", "workers"), [("shm", 0), ("gloo", 0), ("shm", 2)])
@pytest.mark.parametrize("library", [*stream_rows.PARTS])
def test_a_stream_in_parts(library: str, workers: int, backend: str, tmp_path: Path, row: Begin) -> None:
    line = row(library, f"a stream in parts, {workers} workers", f"2 ranks, {backend}")
    ranks = run_ranks(stream_rows.parts, 2, backend, library, _written(library, tmp_path / "rows"), "", workers)
    batches = _joined(ranks)
    times = Counter(itertools.chain(*batches))
    counts = Counter(times[number] for number in range(stream_rows.ROWS) if times[number] != 1)
    assert counts == Counter(_OTHERWISE.get(library, {}))
    line.same(run_ranks(stream_rows.alone, 1, batches)[0], [rank["weights"] for rank in ranks], limit=1e-12)


#: Those that have a state of their own, and why it can't be used, if it can't.
_STATES = {
    ("datasets", ""): "",
    ("datasets", "shuffled"): "led to other samples than came next before the interruption",  # it forgets the buffer
    ("grain", ""): "",
    ("lancedb", ""): "could not be used (TypeError: cannot pickle",  # the dataset can't be copied
}


@pytest.mark.parametrize(
    ("library", "option"), [*((library, "") for library in stream_rows.PARTS), ("datasets", "shuffled")]
)
def test_a_resume_of_a_stream_in_parts(library: str, option: str, tmp_path: Path, row: Begin) -> None:
    why = _STATES.get((library, option))
    line = row(library, f"a stream in parts{option and ', shuffled'}, resumed in mid-epoch", "2 ranks, shm")
    folder = _written(library, tmp_path / "rows")
    before = run_ranks(stream_rows.parts, 2, "shm", library, folder, option, 0, 4)
    states = [rank["state"] for rank in before]
    assert [bool(state.get("stream")) for state in states] == [why is not None] * 2
    after = run_ranks(stream_rows.parts, 2, "shm", library, folder, option, 0, 0, states)
    for one, two in zip(before, after, strict=True):
        assert two["batches"] == one["batches"][4:]
        assert bool(two["said"]) == bool(why)
        assert all((why or "") in each for each in two["said"])
    line.holds("same samples, " + ("by its own state" if why == "" else "by counting"), True, "")
    line.notes += [f"says that its state {why}"] if why else []


def test_a_rank_without_an_archive_is_named(tmp_path: Path, row: Begin) -> None:
    line = row("webdataset", "a stream in parts, one archive for two ranks", "2 ranks, shm")
    folder = _written("webdataset", tmp_path / "rows")
    for outcome in collect_outcomes(stream_rows.parts, 2, "shm", "webdataset", folder, "one"):
        words = "rank 1 has no sample of this stream, which webdataset.split_by_node splits"
        line.says(str(outcome.message), words)
