"""Which checkpoints a run keeps, held against the rule said plainly, over every small case."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from lockstep.checkpoint.retention import Entry, Retention, superfluous


def _entries(*steps: int, good: bool | None = True, **metrics: float) -> list[Entry]:
    return [Entry(f"step-{step}", step, metric=metrics.get(f"m{step}"), good=good) for step in steps]


def _kept(entries: list[Entry], rule: Retention) -> list[int]:
    gone = superfluous(entries, rule)
    assert gone == sorted(gone, key=lambda entry: (entry.step, entry.revision)), "oldest first"
    return [entry.step for entry in entries if entry not in gone]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(), [7, 8, 9]),
        (Retention(last=1), [9]),
        (Retention(last=0), [9]),
        (Retention(last=100), list(range(10))),
        (Retention(last=None), list(range(10))),
        (Retention(last=2, every=4), [0, 4, 8, 9]),
        (Retention(last=0, every=5), [0, 5, 9]),
        (Retention(last=1, best=1), [2, 9]),
        (Retention(last=1, best=2), [2, 6, 9]),
        (Retention(last=1, best=2, mode="max"), [3, 5, 9]),
        (Retention(last=2, every=9, best=1, mode="max"), [0, 3, 8, 9]),
        (Retention(last=None, every=3, best=1), list(range(10))),
    ],
)
def test_the_rule(rule: Retention, kept: list[int]) -> None:
    entries = _entries(*range(10), m2=0.1, m3=0.9, m5=0.8, m6=0.2, m7=0.5)
    assert _kept(entries, rule) == kept
    shuffled = random.Random(4).sample(entries, len(entries))
    assert {entry.name for entry in superfluous(shuffled, rule)} == {entry.name for entry in superfluous(entries, rule)}


def test_of_equal_metrics_the_newer_one_is_the_best() -> None:
    entries = _entries(1, 2, 3, 4, m1=0.5, m2=0.5, m3=0.6)
    assert _kept(entries, Retention(last=1, best=1)) == [2, 4]
    assert _kept(entries, Retention(last=1, best=1, mode="max")) == [3, 4]


def test_a_metric_that_is_not_finite_never_is_the_best() -> None:
    entries = _entries(1, 2, 3, 4, m1=math.nan, m2=-math.inf, m3=3.0)
    assert _kept(entries, Retention(last=1, best=1)) == [3, 4]
    assert _kept(entries, Retention(last=1, best=3)) == [3, 4]


def test_only_the_last_save_of_a_step_stays() -> None:
    entries = [Entry("a", 1), Entry("b", 1, 2), Entry("c", 2), Entry("d", 2, 2), Entry("e", 2, 10, good=True)]
    assert [entry.name for entry in superfluous(entries, Retention(last=None))] == ["a", "c", "d"]
    better = [Entry("a", 1, metric=0.1), Entry("b", 1, 2, metric=0.9), Entry("c", 2, good=True)]
    assert [entry.name for entry in superfluous(better, Retention(last=0, best=1))] == ["a"], "b replaced it"


def test_without_a_good_one_nothing_goes() -> None:
    for good in (None, False):
        assert superfluous(_entries(1, 2, 3, good=good), Retention(last=1)) == []
    assert superfluous([], Retention()) == []


def test_what_is_newer_than_the_last_good_one_is_left_alone() -> None:
    entries = [*_entries(1, 2, 3), Entry("later", 4, good=False), Entry("unknown", 5)]
    assert [entry.step for entry in superfluous(entries, Retention(last=1))] == [1, 2]


def test_a_damaged_one_takes_no_place_and_goes_when_it_is_old() -> None:
    damaged = Entry("damaged", 3, metric=0.0, good=False)
    entries = [*_entries(1, 2, m1=0.5), damaged, *_entries(4, 5)]
    assert _kept(entries, Retention(last=3)) == [2, 3, 4, 5], "three good ones stay beside it"
    assert _kept(entries, Retention(last=2)) == [4, 5]
    assert _kept(entries, Retention(last=2, best=1)) == [1, 4, 5], "it is not the best"
    assert _kept(entries, Retention(last=2, every=3)) == [4, 5], "nor one of every third"
    assert _kept(entries, Retention(last=None)) == [1, 2, 3, 4, 5]


def _reference(entries: list[Entry], rule: Retention) -> set[str]:
    """The names that stay, said as plainly as possible."""
    age = {entry.name: (entry.step, entry.revision) for entry in entries}
    good = [entry for entry in entries if entry.good]
    if not good:
        return set(age)
    newest = max(good, key=lambda entry: age[entry.name])
    stay = {entry.name for entry in entries if age[entry.name] >= age[newest.name]}
    pool = [newest]
    for entry in entries:
        replaced = any(
            other.step == entry.step and age[other.name] > age[entry.name] and other.good is not False
            and age[other.name] <= age[newest.name]
            for other in entries
        )  # fmt: skip
        if age[entry.name] < age[newest.name] and entry.good is not False and not replaced:
            pool.append(entry)
    for entry in pool:
        newer = sum(other.step > entry.step for other in pool)
        better = sum(
            other.metric is not None
            and entry.metric is not None
            and (
                (other.metric < entry.metric if rule.mode == "min" else other.metric > entry.metric)
                or (other.metric == entry.metric and other.step > entry.step)
            )
            for other in pool
        )
        if (
            rule.last is None
            or newer < rule.last
            or (rule.every and entry.step % rule.every == 0)
            or (entry.metric is not None and better < rule.best)
        ):
            stay.add(entry.name)
    last = sorted(entry.step for entry in pool)[-max(rule.last, 1) :][0] if rule.last is not None else -1
    return stay | {entry.name for entry in entries if entry.good is False and entry.step >= last}


def test_every_small_folder_under_every_small_rule() -> None:
    rules = [
        Retention(last=last, every=every, best=best, mode=mode)  # type: ignore[arg-type]
        for last, every, best, mode in itertools.product((None, 0, 1, 2), (None, 2), (0, 1), ("min", "max"))
    ]
    kinds: list[dict[str, Any]] = [
        {"good": good, "metric": metric} for good in (True, False, None) for metric in (None, 0.25, 0.5)
    ]
    checked = 0
    places = [(1, 1), (2, 1), (2, 2), (4, 1)]
    for combination in itertools.product(kinds, repeat=len(places)):
        entries = [
            Entry(f"{step}-{revision}", step, revision, **kind)
            for (step, revision), kind in zip(places, combination, strict=True)
        ]
        rule = rules[checked % len(rules)]
        gone = {entry.name for entry in superfluous(entries, rule)}
        assert {entry.name for entry in entries} - gone == _reference(entries, rule), (entries, rule)
        good = [entry.name for entry in entries if entry.good]
        assert not good or good[-1] not in gone, "never the last good one"
        checked += 1
    assert checked == 9**4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"last": -1}, "last=-1: expected 0 or more"),
        ({"every": 0}, "every=0: expected at least 1"),
        ({"best": -2}, "best=-2: expected 0 or more"),
        ({"mode": "least"}, "mode='least': expected 'min' or 'max'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Retention(**arguments)
