"""The rank's side of a test: a pytest session of its own for the one test. See Note [A test on ranks]."""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import pytest
from _pytest.config import create_terminal_writer
from _pytest.runner import pytest_runtest_protocol

from lockstep import knobs, tracebacks
from lockstep.launch.policy import is_echo
from lockstep.testing import leaks

if TYPE_CHECKING:
    import warnings

    from lockstep.comm.world import World

#: Options of pytest and of its plugins that choose among tests, or that are for the process with the terminal. A rank
#: has one test, and reports it to that process.
_OF_THE_SESSION: dict[str, Any] = {
    "keyword": "", "markexpr": "", "deselect": None, "ignore": None, "ignore_glob": None, "collectonly": False,
    "pyargs": False, "maxfail": 0, "lf": False, "failedfirst": False, "newfirst": False, "stepwise": False,
    "stepwise_skip": False, "cacheclear": False, "cacheshow": None, "usepdb": False, "trace": False, "xmlpath": None,
    "pastebin": None, "log_file": None, "setuponly": False, "setupplan": False, "setupshow": False, "capture": "no",
    "debug": None, "dist": "no", "distload": False, "numprocesses": None, "maxprocesses": None, "tx": [],
    "looponfail": False, "cov_source": [], "no_cov": True, "report_log": None, "htmlpath": None, "json_report": False,
    "allure_report_dir": None, "csv_path": None,
}  # fmt: skip
#: The zygote has imported plugins before there was a pytest that would have rewritten their assertions.
_IMPORTED = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"
#: Plugins that keep for the next session what has failed in this one.
_REMEMBER = ("lfplugin", "nfplugin", "stepwiseplugin")


@dataclass(frozen=True)
class ItemOrder:
    """The test that the ranks run, and what their pytest must know of the pytest that was started."""

    #: The process id of that pytest.
    session: int
    #: As on pytest's command line: the file, and the names in it.
    argument: str
    #: Fixture -> its pickled value, which the ranks have in common.
    shared: dict[str, bytes]
    #: pytest's options as they were parsed.
    options: dict[str, Any]
    #: What pytest-xdist has told this worker; None: it is none.
    worker: dict[str, Any] | None = None


@dataclass(frozen=True)
class RankWarning:
    """A warning of the test."""

    #: The category and its bases, the nearest first: module, name. A category may be known to its rank alone.
    categories: tuple[tuple[str, str], ...]
    message: str
    file: str
    line: int

    @property
    def category(self) -> type[Warning]:
        """The nearest of the categories that this process has."""
        for module, name in self.categories:
            found = vars(sys.modules[module]).get(name) if module in sys.modules else None
            if isinstance(found, type) and issubclass(found, Warning):
                return found
        return Warning


#: "passed" and "skipped" as for pytest; "expected": failed as ``xfail`` said.
Kind = Literal["passed", "skipped", "expected", "failed"]


@dataclass(frozen=True)
class RankReport:
    """One rank's report on the test."""

    kind: Kind = "passed"
    #: The reason why it was skipped, or was expected to fail.
    reason: str = ""
    #: The phase of a failure (setup, call or teardown), pytest's report in JSON's types, and True if it reads like the
    #: consequence of another rank's.
    phase: str = "call"
    report: dict[str, Any] | None = None
    #: The same in words, where pytest has made no report of it.
    text: str = ""
    echo: bool = False
    #: The time of the report, on the monotonic clock.
    at: float = 0.0
    #: What was captured of the test's logs: its kind, text.
    sections: tuple[tuple[str, str], ...] = ()
    #: The warnings that the test has caused.
    warned: tuple[RankWarning, ...] = ()
    #: What the test has recorded (``record_property``): name, value.
    properties: tuple[tuple[str, str | int | float | bool | None], ...] = ()

    @property
    def failed(self) -> bool:
        return self.kind == "failed"


def is_failure(report: RankReport | None) -> bool:
    """Return whether a rank has failed, by what it has returned."""
    return report is None or report.failed


def run_item(rank: int, order: ItemOrder) -> RankReport:
    """Run a test on this rank, and return the report on it; called in the rank."""
    leaks.sign(order.session)
    observer = _Observer(rank, order)
    try:
        code = _run(observer, order)
        report = observer.report(code)
    except (Exception, SystemExit):  # noqa: BLE001  (pytest's own: a conftest.py that can't be imported, a usage error)
        report = RankReport("failed", text=traceback.format_exc(), at=time.monotonic())
    if not report.failed:
        import lockstep

        lockstep.shutdown()  # one that has failed may have left others in a collective, and ends without them
    sys.stdout.flush()
    sys.stderr.flush()
    return report


def world_of(options: object) -> Iterator[World]:
    """Join the ranks of the test, for the fixture ``world``."""
    if getattr(options, "lockstep_rank", None) is None:
        pytest.fail("the fixture 'world' exists on ranks only: mark the test with @pytest.mark.ranks(2)", pytrace=False)
    import lockstep

    yield lockstep.init()


def _run(observer: _Observer, order: ItemOrder) -> int:
    taken = {name: value for name, value in _OF_THE_SESSION.items() if name in order.options}
    basetemp = os.path.join(knobs.job_dir() or ".", f"basetemp-{observer.rank}")
    options = {**order.options, **taken, "basetemp": basetemp, "lockstep_rank": observer.rank}
    options["pythonwarnings"] = [*(options.get("pythonwarnings") or []), _IMPORTED]
    config = pytest.Config.fromdictargs(options, [order.argument])  # documented as "usable for subprocesses"
    if order.worker is not None:
        config.workerinput = order.worker  # type: ignore[attr-defined]  # (pytest-xdist's; plugins look for it)
    config.pluginmanager.register(observer, "lockstep-rank")
    try:
        return int(config.hook.pytest_cmdline_main(config=config))
    finally:
        config._ensure_unconfigure()  # as pytest.main does


class _Observer:
    """A plugin of the rank's pytest: gives the test the values that the ranks share, and notes its outcome."""

    def __init__(self, rank: int, order: ItemOrder) -> None:
        self.rank, self._order = rank, order
        self._ended = False
        self._problem = ""
        self._found = RankReport()
        self._sections: dict[tuple[str, str], None] = {}
        self._warned: dict[RankWarning, None] = {}
        self._properties: dict[tuple[str, str | int | float | bool | None], None] = {}
        #: What has ended the phase that is reported next.
        self._raised: BaseException | None = None
        self._nothing = open(os.devnull, "w")  # noqa: SIM115  (for as long as the process lives)

    def report(self, exit_code: int) -> RankReport:
        """Return the report, once the session has ended."""
        found = self._found
        if not found.failed and not self._ended:
            problem = self._problem or (
                f"the test was not run to its end on this rank (pytest's exit code there is {exit_code}): was it "
                "interrupted, or do its parameters, or the options that deselect tests, differ from process to process?"
            )
            found = RankReport("failed", text=problem, phase="collection", at=time.monotonic())
        return replace(
            found, sections=tuple(self._sections), warned=tuple(self._warned), properties=tuple(self._properties)
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._config = session.config
        plugins = session.config.pluginmanager
        for name in _REMEMBER:
            if plugins.has_plugin(name):
                plugins.unregister(name=name)
        reporter = plugins.get_plugin("terminalreporter")
        if reporter is not None:  # what it says of the session would be among what the test prints
            reporter._tw = create_terminal_writer(session.config, self._nothing)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Have no summary made for a terminal, for which plugins would collect and load what it needs."""
        done = yield
        plugins = session.config.pluginmanager
        if plugins.has_plugin("terminalreporter"):
            plugins.unregister(name="terminalreporter")
        return done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Put the shared values in the place of their fixtures, whose own fixtures are then not set up here."""
        info = item._fixtureinfo  # type: ignore[attr-defined]
        for name, packed in self._order.shared.items():
            fixture = info.name2fixturedefs[name][-1]
            value = pickle.loads(packed)  # noqa: S301  (through a pipe of the process that has forked this one)
            fixture.func, fixture.argnames = (lambda value=value: value), ()
        info.prune_dependency_tree()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run the test once, as pytest itself does: who repeats tests (pytest-rerunfailures) does it in pytest's own
        process, on all ranks at once."""
        return pytest_runtest_protocol(item, nextitem)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        if call.excinfo is not None:
            tracebacks.fold(call.excinfo.value)  # to the frames of the test and of what it tests
            call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
        report = yield
        self._raised = None if call.excinfo is None else call.excinfo.value
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase by its report alone, as pytest does: hooks may have changed it, and one that has
        failed need not have raised (``xfail(strict=True)``)."""
        part_of_a_test = hasattr(report, "context")  # of a subtest; what it skips is not the test
        self._ended |= report.when == "teardown" and not part_of_a_test
        for name, value in report.user_properties:
            self._properties[name, value if isinstance(value, (str, int, float, bool)) else str(value)] = None
        if report.failed and not self._found.failed:
            self._found = self._failure(report)
        elif report.skipped and not part_of_a_test and not self._found.failed:
            self._found = self._skip(report)

    def _skip(self, report: pytest.TestReport) -> RankReport:
        at = time.monotonic()
        expected = getattr(report, "wasxfail", None)
        if expected is not None:
            return RankReport("expected", reason=expected.removeprefix("reason: "), phase=report.when or "", at=at)
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(self._raised or report.longrepr)
        return RankReport("skipped", reason=reason.removeprefix("Skipped: "), phase=report.when or "", at=at)

    def _failure(self, report: pytest.TestReport) -> RankReport:
        at = time.monotonic()
        for title, text in report.sections:
            kind = title.split()[1]  # "Captured log call"
            if kind == "log":
                self._sections[kind, text] = None
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        echo = self._raised is not None and is_echo(type(self._raised).__name__, str(self._raised))
        return RankReport("failed", phase=report.when or "", report=data, echo=echo, at=at)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._problem = str(report.longrepr)

    @pytest.hookimpl
    def pytest_internalerror(self, excrepr: object) -> None:
        self._problem = f"an error inside pytest:\n{excrepr}"

    @pytest.hookimpl
    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        each = warning_message
        if when == "runtest":
            kinds = tuple((kind.__module__, kind.__qualname__) for kind in each.category.__mro__)
            self._warned[RankWarning(kinds, str(each.message), each.filename, each.lineno)] = None

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        """Leave a limit of pytest-timeout to the process with the terminal: here it would end the rank without a
        message."""
        return True
