"""pytest's plugin: the mark ``ranks`` and the fixture ``world``.

It is loaded wherever lockstep is installed, so it loads nothing else of lockstep before a test has the mark, and is
written so that a pytest older than the extra asks for can load it as well.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lockstep.comm.world import World
    from lockstep.testing.marks import RankCase, RanksMark
    from lockstep.testing.session import RanksSession

_MARK = "ranks"
#: The parameter that tells a test's runs apart where its mark asks for several.
_CASE = "ranks_case"
#: The name under which what this process prepares and reports is registered with pytest.
_SESSION = "lockstep-ranks"


@pytest.fixture
def world(pytestconfig: pytest.Config) -> Iterator[World]:
    """The World that lockstep.init() returns on each rank of this test. For tests with the mark ranks."""
    from lockstep.testing.on_rank import world_of

    yield from world_of(pytestconfig.option)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the time limit of tests on ranks from pytest's configuration."""
    parser.addini("ranks_limit", "seconds that a test with the mark ranks may take (60)", default="")
    parser.addini("ranks_preload", "modules imported once, before the ranks are forked", type="linelist", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known."""
    config.addinivalue_line(
        "markers",
        "ranks(*world_sizes, backends=(), limit=60, shared=()): run the test on so many ranks, each a process; "
        "once for each world size and backend",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have a run of the test for each world size and backend."""
    mark = _mark(metafunc.definition)
    if mark is None:
        return
    cases = _read(metafunc.definition, mark).cases()
    if len(cases) > 1 or "" not in cases:
        metafunc.fixturenames.append(_CASE)
        metafunc.parametrize(_CASE, list(cases.values()), ids=list(cases))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the fixtures of tests on ranks to the ranks."""
    if _is_rank(config):
        return
    for item in items:
        mark = _mark(item)
        if mark is not None:
            wanted = _read(item, mark)
            _case(item, wanted)
            _session(config).prepare(item, wanted)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on ranks."""
    mark = _mark(pyfuncitem)
    if mark is None or _is_rank(pyfuncitem.config):
        return None
    wanted = _read(pyfuncitem, mark)
    _session(pyfuncitem.config).run(pyfuncitem, wanted, _case(pyfuncitem, wanted))
    return True


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Report a failure by rank."""
    report = (yield).get_result()
    if call.excinfo is None or _is_rank(item.config) or _mark(item) is None:
        return
    from lockstep.testing.session import RanksFailed

    failed = call.excinfo.value
    if not isinstance(failed, RanksFailed):
        return
    if failed.is_judged:  # else a mark xfail says whether ranks that died or hung were expected to
        report.outcome = "failed"
        vars(report).pop("wasxfail", None)
    if report.failed:
        report.longrepr = failed.longrepr(item)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process that forks the ranks."""
    session = config.pluginmanager.get_plugin(_SESSION)
    if session is not None:
        session.close()


def _is_rank(config: pytest.Config) -> bool:
    return getattr(config.option, "lockstep_rank", None) is not None


def _session(config: pytest.Config) -> RanksSession:
    session: RanksSession | None = config.pluginmanager.get_plugin(_SESSION)
    if session is None:
        from lockstep.testing.session import RanksSession

        session = RanksSession(config)
        config.pluginmanager.register(session, _SESSION)
    return session


def _mark(item: pytest.Item) -> pytest.Mark | None:
    """Return the mark of a test: its own, or that of the nearest class, module or package.

    Raises:
        pytest.UsageError: there are two in the same place.
    """
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name == _MARK]
        if len(marks) > 1 and not isinstance(node, pytest.Class):
            raise pytest.UsageError(
                f"{item.nodeid}: @pytest.mark.ranks occurs twice, on the same test or on it and its parameter, and "
                "one would be ignored: put all world sizes into one, @pytest.mark.ranks(2, 4)"
            )
        if marks:
            return marks[-1]  # of a class, which comes after those of its bases
    return None


def _case(item: pytest.Item, wanted: RanksMark) -> RankCase:
    """Return on which ranks a test runs.

    Raises:
        pytest.UsageError: its mark came after the test was multiplied, and asks for something else.
    """
    cases = [*wanted.cases().values()]
    callspec = getattr(item, "callspec", None)
    case: RankCase | None = callspec.params.get(_CASE) if callspec is not None else None
    if case not in cases and not (case is None and len(cases) == 1):
        raise pytest.UsageError(
            f"{item.nodeid}: a @pytest.mark.ranks that comes after the test was multiplied (on a parameter, or added "
            "by a hook) can't give it further runs: put it on the function, its class or its module, or have it be "
            "the only one and ask for one world size and at most one backend"
        )
    return case or cases[0]


def _read(node: pytest.Item, mark: pytest.Mark) -> RanksMark:
    from lockstep.testing.marks import RanksMark

    try:
        return RanksMark.read(mark.args, mark.kwargs)
    except ValueError as error:
        raise pytest.UsageError(f"{node.nodeid}: @pytest.mark.{error}") from None
