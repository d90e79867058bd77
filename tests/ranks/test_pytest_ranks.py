"""Tests on ranks, as users write them: pytest runs on small projects, and what it says of them is looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch  # noqa: F401  (what a project imports first is forgotten after its run, which torch does not bear)

import lockstep.testing.session  # noqa: F401  (as well)
from lockstep import knobs
from lockstep.launch import channel
from tests import warm
from tests.launching import LIMIT, gone_within, python_path, wait_for

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs pytest on a file with this text, and looks whether a process of the ranks is left."""
    zygotes: list[warm.Zygote] = []

    def start(argv: list[str], control: int, env: dict[str, str]) -> int:
        zygotes.append(warm.Zygote(argv, control, env))
        return zygotes[-1].pid

    def run(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=text)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)

    monkeypatch.setattr(channel, "start_zygote", start)
    monkeypatch.setenv(knobs.TIMES, "0.4")
    pytester.makeini("[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n")
    yield run
    for zygote in zygotes:
        zygote.wait(LIMIT)


_PLAIN = """
import os
import pytest
import torch
import torch.distributed as dist

@pytest.fixture
def tensor(world):
    yield torch.tensor([float(10 ** world.rank)])
    dist.barrier()  # fixtures end before the world does

@pytest.mark.ranks(1, 2, backends=("shm", "gloo"))
def test_sum(world, tensor, tmp_path):
    assert dist.get_backend() == os.environ["LOCKSTEP_BACKEND"]
    dist.all_reduce(tensor)
    assert tensor.item() == [1.0, 11.0][world.world_size - 1]
    (tmp_path / str(world.rank)).touch()
    dist.barrier()
    assert len(os.listdir(tmp_path)) == world.world_size

@pytest.mark.parametrize("change", [lambda x: x + 1, torch.neg], ids=["plus", "neg"])
class TestMethods:
    @pytest.mark.ranks(2)
    def test_method(self, change, monkeypatch):  # no world: the ranks are there all the same
        assert os.environ["WORLD_SIZE"] == "2"
        monkeypatch.setenv("OWN", os.environ["RANK"])
        assert change(torch.ones(1)).item() in (2.0, -1.0)

def test_without_ranks():
    assert "RANK" not in os.environ

@pytest.mark.ranks(2)
def test_skips(world):
    pytest.skip("not today")

@pytest.mark.ranks(2)
@pytest.mark.skipif(True, reason="never")
def test_is_not_started(world): ...

@pytest.mark.ranks(2)
class Base:
    sizes = {2}
    def test_size(self, world):
        assert world.world_size in self.sizes

@pytest.mark.ranks(1, 3)
class TestDerived(Base):
    sizes = {1, 3}

@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.ranks(size)) for size in (1, 2)])
def test_marked_parameters(size, world):
    assert world.world_size == size

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
def test_fails_as_expected(world):
    if world.rank == 1:
        1 / 0
    dist.barrier()
"""


def test_tests_run_on_their_ranks(run: Run) -> None:
    result = run(_PLAIN, "-rxs")
    result.assert_outcomes(passed=11, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines(["SKIPPED * not today", "SKIPPED * never"], consecutive=False)


_FAILURES = """
import os
import signal
import sys
import warnings
import pytest
import torch.distributed as dist

@pytest.mark.ranks(3)
def test_values(world):
    print("hello from", world.rank)
    value = [world.rank // 2, 5]
    assert value == [7, 5]

@pytest.fixture
def broken(world):
    raise RuntimeError(f"no model on {world.rank}")

@pytest.mark.ranks(2)
def test_setup(broken): ...

@pytest.mark.ranks(2)
def test_one_fails(world):
    if world.rank == 1:
        raise ValueError("only here")
    dist.barrier()

@pytest.mark.ranks(2)
def test_dies(world):
    if world.rank == 1:
        os._exit(7)
    dist.barrier()

@pytest.mark.ranks(1)
def test_crashes(world):
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.ranks(2)
def test_leaves(world):
    sys.exit("gone")

@pytest.mark.ranks(2)
def test_interrupted(world):
    pytest.exit("enough")

@pytest.mark.ranks(2)
def test_one_skips(world):
    if world.rank == 1:
        pytest.skip("only one")

@pytest.mark.ranks(1)
@pytest.mark.xfail(strict=True)
def test_passes_against_expectation(world): ...

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("default")
def test_warns(world):
    warnings.warn("mind the gap")
"""


def test_failures_are_told_by_rank(run: Run) -> None:
    result = run(_FAILURES, "-vv")
    result.assert_outcomes(failed=9, passed=1, warnings=2)
    result.stdout.fnmatch_lines_random(
        [
            "--- ranks 0 and 1 of 3",
            "E       assert [[]0, 5] == [[]7, 5]",
            "--- rank 2 of 3",
            "E       assert [[]1, 5] == [[]7, 5]",
            "*Captured stdout of rank 2 call*",
            "hello from 2",
            "--- rank 0 of 2, in setup",
            "E       RuntimeError: no model on 0",
            "E       RuntimeError: no model on 1",
            "E           ValueError: only here",
            "--- rank 0 of 2, as a consequence",
            "*PeerLost: rank 0 waits in barrier * for rank 1, which ended*",
            "--- rank 1 of 2 ended with exit code 7 in the test",
            "--- rank 0 of 1 was killed by signal 11 (SIGSEGV) in the test",
            "*Captured stderr of rank 0 call*",
            "Fatal Python error: Segmentation fault",
            "*test_it.py*line * in test_crashes",
            "E       SystemExit: gone",
            "the test was not run to its end on this rank (pytest's exit code there is 2)*",
            "--- rank 1 of 2 skipped the test (only one), and the others did not",
            "*XPASS(strict)*",
            "*UserWarning: mind the gap",
            "FAILED test_it.py::test_one_fails - rank 1 of 2: ValueError: only here",
        ]
    )
    text = result.stdout.str()
    assert "/lockstep/comm/" not in text.replace("last seen", ""), "frames are those of the test alone"
    assert text.count("E       SystemExit: gone") == 1, "said once for both ranks"


_JUDGED_ON_RANKS = """
import os
import pytest

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=AssertionError)
def test_another_error_than_expected(world):
    raise TypeError("not the one")

@pytest.mark.ranks(2)
@pytest.mark.xfail(raises=AssertionError)
def test_dies_instead_of_failing_as_expected(world):
    os._exit(3)

@pytest.mark.ranks(2)
def test_passes_against_what_it_expects_itself(request, world):
    if world.rank == 1:
        request.node.add_marker(pytest.mark.xfail(strict=True))

@pytest.mark.ranks(2)
@pytest.mark.xfail
def test_dies_as_expected(world):
    os._exit(3)

@pytest.mark.ranks(2)
def test_has_its_report_changed(world): ...

@pytest.mark.ranks(2)
def test_part(subtests, world):
    with subtests.test("skipped"):
        pytest.skip("only this part")
    with subtests.test("failed"):
        assert world.rank == 0

@pytest.mark.ranks(2)
def test_skips_a_part(subtests, world):
    with subtests.test("skipped"):
        pytest.skip("only this part")
"""
_REPORTS_CHANGED = """
import os
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.name == "test_has_its_report_changed" and call.when == "call" and os.environ.get("RANK") == "1":
        report.outcome, report.longrepr = "failed", "a hook has found something"
    return report
"""


def test_a_test_has_failed_where_a_rank_says_so_in_whatever_way(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_REPORTS_CHANGED)
    result = run(_JUDGED_ON_RANKS, "-vv")
    result.assert_outcomes(failed=5, passed=1, xfailed=1)
    result.stdout.fnmatch_lines_random(
        [
            "E       TypeError: not the one",
            "FAILED *::test_dies_instead_of_failing_as_expected - rank * of 2 ended with exit code 3 in the test",
            "FAILED * rank 1 of 2: [[]XPASS(strict)]*",
            "FAILED * rank 1 of 2: a hook has found something",
            "FAILED *::test_part - rank 1 of 2: *assert 1 == 0*",
        ]
    )


_SAID = """
import warnings
import pytest

@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("default")
def test_it(world, record_property):
    class OwnWarning(UserWarning): ...
    warnings.warn("known to this rank alone", OwnWarning)
    record_property("ranks", world.world_size)

@pytest.mark.ranks(2)
def test_skips(world):
    pytest.skip("not today")
"""


def test_what_a_test_warns_of_and_records_arrives(run: Run, pytester: pytest.Pytester) -> None:
    result = run(_SAID, "--junitxml=found.xml", "-rs")
    result.assert_outcomes(passed=1, skipped=1, warnings=2)
    result.stdout.fnmatch_lines(["*UserWarning: known to this rank alone", "SKIPPED [[]1] test_it.py:*: not today"])
    assert '<property name="ranks" value="2" />' in (pytester.path / "found.xml").read_text()


_AGAIN = """
import pytest

def pytest_addoption(parser):
    parser.addoption("--report-log", dest="report_log")

def pytest_configure(config):
    if config.option.report_log:
        with open(config.option.report_log, "a") as file:
            file.write("opened\\n")

def pytest_runtest_protocol(item, nextitem):  # as pytest-rerunfailures
    from _pytest.runner import runtestprotocol
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for last in (False, True):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if last or not any(report.failed for report in reports):
            break
        item._initrequest()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
"""
_FAILS_ONCE = """
import pytest
import torch.distributed as dist

@pytest.mark.ranks(2)
def test_it(world, pytestconfig):
    tried = len(list(pytestconfig.rootpath.glob(f"try-{world.rank}-*")))
    (pytestconfig.rootpath / f"try-{world.rank}-{tried}").touch()
    dist.barrier()
    assert world.rank == 0 or tried == 1
"""


def test_plugins_repeat_and_write_in_pytests_own_process_alone(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(_AGAIN)
    run(_FAILS_ONCE, "--report-log=log").assert_outcomes(passed=1)
    assert (pytester.path / "log").read_text() == "opened\n"


_STUCK = """
import threading
import torch
import torch.distributed as dist
import pytest

@pytest.mark.ranks(2)
def test_first(world):
    dist.barrier()

@pytest.mark.ranks(2, limit=10)
def test_waits_for_ever(world):
    if world.rank == 1:
        threading.Event().wait()
    dist.barrier()

@pytest.mark.ranks(2, backends=("gloo",))
def test_different_collectives(world):
    if world.rank == 1:
        dist.recv(torch.zeros(1), src=0)
    dist.barrier()

@pytest.mark.ranks(2)
def test_next(world):
    dist.barrier()
"""


def test_ranks_that_hang_are_named_with_their_stacks(run: Run) -> None:
    result = run(_STUCK)
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(
        [
            "--- the ranks had not ended after 10 s, the test's limit",
            "--- rank 0 of 2 was ended",
            "  it waits in barrier #* at */test_it.py:14 in test_waits_for_ever*",
            "--- rank 1 of 2 was ended",
            "    */threading.py:* in wait",
            "    */test_it.py:13 in test_waits_for_ever",
            "--- the ranks could make no more progress, and were ended",
            "all ranks have waited for * s, in different collectives: one of them has left one out",
            "--- rank 1 of 2 was ended",
            "    */test_it.py:19 in test_different_collectives",
        ]
    )
    text = result.stdout.str()
    assert "/_pytest/" not in text
    assert "Nothing was stopped" not in text


_LEAKS = """
import os
from multiprocessing import shared_memory
import pytest

@pytest.mark.ranks(2)
def test_leaves_a_process(world, tmp_path):
    if world.rank == 1:
        child = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
        (tmp_path.parent / "child").write_text(str(child))

@pytest.mark.ranks(2)
def test_leaves_memory(world, tmp_path):
    if world.rank == 1:
        memory = shared_memory.SharedMemory(create=True, size=64)
        (tmp_path.parent / "memory").write_text(memory.name)

@pytest.mark.ranks(2)
def test_leaves_nothing(world): ...
"""


def test_what_ranks_leave_is_found_and_ended(run: Run, pytester: pytest.Pytester) -> None:
    result = run(_LEAKS, "--basetemp", str(pytester.path / "temporary"))
    result.assert_outcomes(failed=2, passed=1)
    (child,) = pytester.path.rglob("child")
    (memory,) = pytester.path.rglob("memory")
    result.stdout.fnmatch_lines(
        [
            f"--- the test has left running what it started: process {child.read_text()}: sleep 1000",
            f"--- the test has left shared memory behind in /dev/shm: {memory.read_text()}",
        ]
    )
    assert not gone_within([int(child.read_text())], 5.0)
    assert not Path("/dev/shm", memory.read_text()).exists()


_BESIDE = """
import os
from multiprocessing import resource_tracker, shared_memory
import pytest
from lockstep.testing import leaks

@pytest.mark.ranks(2)
def test_runs_beside_one_that_leaves_memory(world, tmp_path):
    if world.rank == 1:
        leaks.sign(int(os.environ["ANOTHER_SESSION"]))
        memory = shared_memory.SharedMemory(create=True, size=64)
        resource_tracker.unregister("/" + memory.name, "shared_memory")
        (tmp_path.parent / "memory").write_text(memory.name)
"""


def test_what_the_tests_of_another_session_leave_is_left_to_it(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANOTHER_SESSION", str(os.getppid()))
    run(_BESIDE, "--basetemp", str(pytester.path / "temporary")).assert_outcomes(passed=1)
    (memory,) = pytester.path.rglob("memory")
    Path("/dev/shm", memory.read_text()).unlink()


_ABANDONED = """
import os
import signal
import pytest

@pytest.mark.ranks(2)
def test_loses_its_launcher(world):
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()

@pytest.mark.ranks(2)
def test_next(world): ...
"""


def test_tests_go_on_after_the_process_that_forks_the_ranks_has_died(run: Run) -> None:
    result = run(_ABANDONED)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E *LaunchError: the process that forks the ranks * ended*"])


def test_a_module_that_can_not_be_imported_beforehand_is_named(run: Run) -> None:
    test = "import pytest\n@pytest.mark.ranks(1)\ndef test_it(): ...\n"
    result = run(test, "-o", "ranks_preload=nothing_such")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *ModuleNotFoundError: No module named 'nothing_such'*"])


_SHARED = """
import os
import threading
import pytest

@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.getbasetemp()

@pytest.fixture(scope="session")
def server(folder):
    assert "RANK" not in os.environ, "only the one process can have it"
    yield threading.Lock()
    (folder / "ended").touch()

@pytest.fixture(scope="session", params=["a", "b"])
def corpus(server, folder, request):
    with (folder / "made").open("a") as file:
        file.write(request.param)
    return None if request.param == "b" else {"name": request.param, "folder": folder}

@pytest.fixture
def words(corpus, world):
    return corpus and (corpus["name"], world.rank)

@pytest.mark.ranks(2, shared=("corpus",))
def test_it(words, world, request):
    assert words == (("a", world.rank) if "[a]" in request.node.name else None)

@pytest.mark.ranks(2, shared=("server",))
def test_what_can_not_be_pickled(server, world): ...
"""


def test_fixtures_may_be_set_up_once_for_all_ranks(run: Run, pytester: pytest.Pytester) -> None:
    result = run(_SHARED, "--basetemp", str(pytester.path / "temporary"))
    result.assert_outcomes(passed=2, failed=1)
    assert (pytester.path / "temporary" / "made").read_text() == "ab"
    assert (pytester.path / "temporary" / "ended").exists()
    result.stdout.fnmatch_lines(
        ["*TypeError: the fixture 'server' is shared, and its value (lock) can't be pickled for the ranks: *"]
    )


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("@pytest.mark.ranks(0)\ndef test_it(): ...", "*@pytest.mark.ranks(0): expected world sizes*"),
        (
            "@pytest.mark.ranks(2, shared=('corpus',))\ndef test_it(): ...",
            "*names the fixture 'corpus', which the test does not use",
        ),
        (
            "class TestIt(unittest.TestCase):\n    @pytest.mark.ranks(2)\n    def test_it(self): ...",
            "*is for functions, and for methods of plain classes; this is a TestCaseFunction",
        ),
        (
            "@pytest.mark.ranks(2)\n@pytest.mark.ranks(3)\ndef test_it(): ...",
            "*@pytest.mark.ranks occurs twice*",
        ),
        (
            "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.ranks(2, 3))])\ndef test_it(x): ...",
            "*@pytest.mark.ranks that comes after the test was multiplied*",
        ),
        (
            "from hypothesis import given, strategies\n@pytest.mark.ranks(2)\n@given(strategies.integers())\n"
            "def test_it(world, x): ...",
            "*each rank would draw examples of its own for @given*",
        ),
        (
            "def test_it(world): ...",
            "the fixture 'world' exists on ranks only: mark the test with @pytest.mark.ranks(2)",
        ),
    ],
)
def test_what_can_not_be_is_said(run: Run, test: str, message: str) -> None:
    result = run(f"import pytest, unittest\n{test}\n")
    assert result.ret != 0
    lines = result.outlines + result.errlines
    assert any(fnmatch(line, message) for line in lines), "\n".join(lines)


_OPTIONS = {
    "conftest.py": """
        import pytest

        def pytest_addoption(parser):
            parser.addoption("--model", default="small")

        def pytest_collection_modifyitems(config, items):
            if config.getoption("model") == "none":
                items.clear()
        """,
    "test_options.py": """
        import pytest

        @pytest.mark.ranks(2)
        def test_option(world, pytestconfig):
            assert pytestconfig.getoption("model") == "large"
            assert pytestconfig.getoption("keyword") == ""
        """,
}


def test_the_ranks_have_the_options_that_pytest_was_given(run: Run, pytester: pytest.Pytester) -> None:
    for name, text in _OPTIONS.items():
        pytester.makefile("." + name.rpartition(".")[2], **{name.rpartition(".")[0]: text})
    result = run("def test_nothing(): ...", "--model=large", "-k", "option", "--maxfail=1", "--durations=3")
    result.assert_outcomes(passed=1, deselected=1)


_XDIST = """
import os
import pytest
import torch.distributed as dist

@pytest.mark.parametrize("case", range(4))
@pytest.mark.ranks(2)
def test_it(world, case, tmp_path, worker_id):
    assert worker_id == os.environ["PYTEST_XDIST_WORKER"]
    dist.barrier()
    assert case != 3, f"{world.rank} of {worker_id}"
"""


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Runs pytest in processes of its own, whose ranks are forked from this session's warm process."""
    pytester.makeconftest(
        f"""
        from lockstep.launch import channel
        from tests import warm

        warm.join({warm.server().path!r})
        channel.start_zygote = warm.start_zygote
        """
    )
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT))
    return pytester


def test_workers_of_xdist_share_nothing(elsewhere: pytest.Pytester) -> None:
    pytester = elsewhere
    pytester.makepyfile(test_it=_XDIST)
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "load", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines_random(
        ["--- rank 0 of 2", "E       AssertionError: 0 of gw*", "--- rank 1 of 2", "FAILED * - rank * of 2: *"]
    )


_ENDLESS = """
import os
import signal
import pytest

@pytest.mark.ranks(2)
def test_it(world, tmp_path):
    (tmp_path / f"begun-{os.getpid()}").touch()
    while True:
        signal.pause()
"""


def test_an_interrupt_ends_the_ranks(elsewhere: pytest.Pytester) -> None:
    elsewhere.makepyfile(test_it=_ENDLESS)
    command = [sys.executable, "-m", "pytest", "--basetemp", "temporary"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=elsewhere.path) as process:
        try:
            wait_for(lambda: len([*elsewhere.path.rglob("begun-*")]) == 2, "both ranks have begun")
            ranks = [int(path.name.partition("-")[2]) for path in elsewhere.path.rglob("begun-*")]
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert b"KeyboardInterrupt" in out
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert not gone_within(ranks, 1.0)


_SAYS = """
import pytest

@pytest.mark.ranks(2)
def test_it(world):
    print("hello from", world.rank)
"""


def test_what_ranks_print_is_not_kept_where_pytest_captures_nothing(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run(_SAYS, "-s").assert_outcomes(passed=1)
    printed = capfd.readouterr().out.splitlines()
    assert {"hello from 0", "hello from 1"} <= set(printed)


_PROBE = """
import sys
import pytest

code = pytest.main(["-q", "-p", "no:cacheprovider", "test_it.py"])
loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ("lockstep", "torch"))
print(code.value, loaded)
"""


def test_who_has_no_such_test_loads_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): ...\n")
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    loaded = ["lockstep", "lockstep.testing", "lockstep.testing.plugin", "lockstep.version"]
    assert done.stdout.splitlines()[-1] == f"0 {loaded}"
