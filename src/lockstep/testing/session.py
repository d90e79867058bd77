"""pytest's own process: it prepares a test on ranks, and reports it. See Note [A test on ranks]."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprEntryNative,
    ReprExceptionInfo,
    ReprFileLocation,
    ReprTraceback,
)
from _pytest.outcomes import Failed, Skipped

from lockstep import knobs
from lockstep.errors import LaunchError
from lockstep.testing import leaks, on_rank
from lockstep.testing.marks import DEFAULT_LIMIT, RankCase, RanksMark, seconds
from lockstep.testing.on_rank import ItemOrder, RankReport
from lockstep.testing.team import RankCall, RankEnd, Team
from lockstep.testing.verdicts import RanksVerdict, TestFate, Told, judge
from lockstep.text import listed

#: What a rank imports before it gets to the test.
_PRELOAD = (
    "pytest",
    "lockstep.testing.on_rank",
    "lockstep.testing.plugin",
    "lockstep.comm.group.process_group",
    "lockstep.comm.shm.memory_engine",
)
#: The fixtures that ranks always have in common.
_COMMON = ("tmp_path",)
#: Seconds for processes of others to have mapped, or removed, the shared memory that they make.
_OTHERS = 5.0


class RanksFailed(Failed):
    """A test has failed on its ranks; pytest shows the report of each.

    (No exception that a test could name: ``xfail(raises=AssertionError)`` is for the ranks to judge.)
    """

    def __init__(self, verdict: RanksVerdict) -> None:
        super().__init__(verdict.reason)
        self._verdict = verdict

    @property
    def is_judged(self) -> bool:
        """Whether a rank's pytest has said that ``xfail`` does not expect this failure."""
        return any(told.report is not None for told in self._verdict.told)

    def longrepr(self, item: pytest.Item) -> ReprExceptionInfo:
        """Return the text that pytest shows: for ranks with the same report, a heading and their traceback with its
        values."""
        entries: list[ReprEntry | ReprEntryNative] = []
        crash = None
        for told in self._verdict.told:
            entries.append(ReprEntryNative([f"--- {told.heading}\n", *([f"{told.text}\n"] if told.text else [])]))
            if told.report is None or told.report.report is None:
                continue
            report = item.config.hook.pytest_report_from_serializable(
                config=item.config, data=copy.deepcopy(told.report.report)
            )
            shown = report.longrepr
            if not isinstance(shown, (ExceptionChainRepr, ReprExceptionInfo)):
                entries.append(ReprEntryNative([f"{shown}\n"]))
                continue
            crash = crash or shown.reprcrash
            chain = shown.chain if isinstance(shown, ExceptionChainRepr) else [(shown.reprtraceback, None, None)]
            for traceback, _, between in chain:
                entries += traceback.reprentries
                if between:
                    entries.append(ReprEntryNative([f"{between}\n"]))
        # What the summary's line shows.
        if crash is None:
            crash = ReprFileLocation(str(item.path), (item.location[1] or 0) + 1, self._verdict.reason)
        else:
            crash = replace(crash, message=self._verdict.reason)
        return ReprExceptionInfo(reprtraceback=ReprTraceback(entries, None, "long"), reprcrash=crash)


class RanksSession:
    """The tests on ranks of one pytest process.

    Args:
        config: pytest's.

    Raises:
        pytest.UsageError: its configuration makes no sense.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._team: Team | None = None
        self._options: dict[str, Any] | None = None
        given = config.getini("ranks_limit")
        try:
            self._limit = seconds(given, "ranks_limit") if given else DEFAULT_LIMIT
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    def prepare(self, item: pytest.Item, mark: RanksMark) -> None:
        """Have nothing set up in this process for a test but the values that its ranks share.

        Raises:
            pytest.UsageError: the test is of a kind that can't run on ranks, or the mark names a fixture that it does
                not use.
        """
        if not isinstance(item, pytest.Function) or type(item).runtest is not pytest.Function.runtest:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.ranks is for functions, and for methods of plain classes; this is a "
                f"{type(item).__name__}"
            )
        if getattr(item.obj, "is_hypothesis_test", False):
            raise pytest.UsageError(
                f"{item.nodeid}: each rank would draw examples of its own for @given, and wait in the collectives of "
                "another one: draw them before, @pytest.mark.parametrize, or from a seed in the test"
            )
        unused = [name for name in mark.shared if name not in item.fixturenames]
        if unused:
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.ranks(…, shared=…) names the fixture {unused[0]!r}, which the test does "
                "not use"
            )
        common = dict.fromkeys((*mark.shared, *_COMMON))
        item.fixturenames = [name for name in common if name in item.fixturenames]

    def run(self, item: pytest.Function, mark: RanksMark, case: RankCase) -> None:
        """Run a test on its ranks. Raises what pytest takes for a failed, skipped or expectedly failed test."""
        limit = mark.limit or self._limit
        shared = _pickled(item.funcargs, item.fixturenames)
        worker = getattr(self._config, "workerinput", None)
        order = ItemOrder(os.getpid(), _argument(item), shared, self._parsed(), worker)
        call = RankCall(
            on_rank.run_item,
            (order,),
            case.world_size,
            limit=limit,
            is_failure=on_rank.is_failure,
            env={} if case.backend is None else {knobs.BACKEND: case.backend},
            captured=self._config.getoption("capture", "no") != "no",
        )
        before = leaks.files()
        try:
            self._team = self._team or Team((*_PRELOAD, *_plugins(self._config), *self._config.getini("ranks_preload")))
            result = self._team.run(call)
        except LaunchError:
            self.close()
            raise
        verdict = judge(result, limit=limit)
        for end in result.ranks:
            _show(item, end)
        left = leaks.left_since(before, is_ours=leaks.is_below_this_process, patience=_OTHERS)
        leaks.remove(left)
        if left and verdict.fate is not TestFate.FAILED:
            text = f"the test has left shared memory behind in /dev/shm: {listed(sorted(left), most=4)}"
            verdict = RanksVerdict(TestFate.FAILED, text, (Told(text, None, "it was removed"),))
        if verdict.fate is TestFate.FAILED:
            raise RanksFailed(verdict)
        if verdict.fate is TestFate.SKIPPED:
            raise Skipped(verdict.reason, _use_item_location=True)
        if verdict.fate is TestFate.EXPECTED:
            pytest.xfail(verdict.reason)

    def close(self) -> None:
        """End the process that forks the ranks."""
        if self._team is not None:
            self._team.close()
            self._team = None

    def _parsed(self) -> dict[str, Any]:
        """Return pytest's options for the ranks. (Options that can't be pickled are of no use in another process.)"""
        if self._options is None:
            self._options = {}
            for name, value in vars(self._config.option).items():
                try:
                    pickle.dumps(value)
                except Exception:  # noqa: BLE001  (whatever a plugin's own classes raise)
                    continue
                self._options[name] = value
            config = self._config
            self._options |= {
                "rootdir": str(config.rootpath),
                "inifilename": None if config.inipath is None else str(config.inipath),
            }
            del self._options["file_or_dir"]
        return self._options


def _plugins(config: pytest.Config) -> list[str]:
    """Return the modules of installed plugins, and the packages that they come with, as far as they are loaded here: a
    rank's pytest loads them as well. (Not conftest.py and plugins named by the user, which may do anything.)"""
    found: dict[str, None] = {}
    for plugin, distribution in config.pluginmanager.list_plugin_distinfo():
        module = getattr(plugin, "__name__", "")
        packages = (distribution.read_text("top_level.txt") or distribution.project_name.replace("-", "_")).split()
        found |= dict.fromkeys(name for name in (module, *packages) if name in sys.modules)
    return list(found)


def _argument(item: pytest.Function) -> str:
    """Return a test as it would be named on the command line."""
    names = [node.name for node in item.listchain() if isinstance(node, (pytest.Class, pytest.Function))]
    return "::".join([str(item.path), *names])


def _pickled(values: Mapping[str, object], names: Iterable[str]) -> dict[str, bytes]:
    """Pickle the values that the ranks share.

    Raises:
        TypeError: a value can't be pickled; the message names its fixture.
    """
    found = {}
    for name in names:
        try:
            found[name] = pickle.dumps(values[name])
        except Exception as error:  # whatever the value's own classes raise
            raise TypeError(
                f"the fixture {name!r} is shared, and its value ({type(values[name]).__name__}) can't be pickled for "
                f"the ranks: {type(error).__name__}: {error}\nleave it out of shared=…, and each rank sets it up itself"
            ) from error
    return found


def _show(item: pytest.Item, end: RankEnd) -> None:
    """Hand on a rank's output, log records and warnings."""
    for kind, text in (("stdout", end.out), ("stderr", end.err)):
        if text:
            item.add_report_section("call", f"{kind} of rank {end.rank}", text)
    report = end.value
    if not isinstance(report, RankReport):
        return
    item.user_properties += [each for each in report.properties if each not in item.user_properties]
    for title, text in report.sections:
        item.add_report_section("call", f"{title} of rank {end.rank}", text)
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # the ranks' filters have let them through
        for each in report.warned:
            warnings.warn_explicit(each.message, each.category, each.file, each.line)
