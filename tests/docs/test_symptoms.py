"""The pages by symptom: their programs are run, faulty and cured, and print the lines that the pages show.

A page is run from top to bottom in a folder of its own. A Python block is a file, named in its first line; a diff is
the cure, and changes the lines of the program above it. Of a text block, a line that begins with ``$`` is a command,
and the lines below it must be among those that the command prints, in this order. Figures may be others, but for those
that name ranks, epochs and lines of a program; ``…`` stands for anything. A comment above a block says more::

    <!-- exit code 1 -->  how its commands end; 0 without it
    <!-- timed -->        a verdict that holds where nothing else runs: of each command only the first line is
                          compared, and all of them by make faults
    <!-- any order -->    ranks print as they come
    <!-- own test -->     a test of its own runs it
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from lockstep.tools.doctor import checks
from tests import warm
from tests.launching import LIMIT, gone_within, killed_afterwards, python_path, run, start

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "symptoms").glob("*.md"))
BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^>]+) -->\n)?```(?P<language>python|diff|text)\n(?P<content>.*?)\n```$",
    re.MULTILINE | re.DOTALL,
)
#: A figure, and what stands before one that must be the page's own.
FIGURE = re.compile(r"((?:\b(?:ranks?|epoch|line|exit code) |\.py:)?)\d(?:[\d.,]*\d)?")
UNIT = re.compile(r"# (?:µs|ms|s|bytes|KiB|MiB|GiB)\b")

#: Where a page's program takes its time so that the launcher looks at it some times. A launcher that gets no processor
#: would not: there each fourth step waits until the run's series has another row.
_DECODED = "time.sleep(0.2)  # the batch is decoded"
_LOOKED_AT = """\
time.sleep(0.2)
    if len(after_the_step) % 4 == 3:
        import os, pathlib
        rows = lambda: sum(
            file.stat().st_size for file in pathlib.Path(os.environ["XDG_STATE_HOME"]).rglob("series-*.bin")
        )
        before = rows()
        while rows() == before:
            time.sleep(0.05)"""


@dataclass(frozen=True)
class Command:
    """A command that a page shows, and the lines that it prints there."""

    line: str
    shown: tuple[str, ...]
    notes: tuple[str, ...]
    #: What it printed when it was run, and its exit code.
    output: str = ""
    code: int = -1

    @property
    def is_timed(self) -> bool:
        return "timed" in self.notes


@dataclass
class Page:
    """A page, read and run as far as the tests have come."""

    path: Path
    folder: Path
    #: What stands in place of a text of the page, in its programs.
    instead: dict[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)

    def run(self) -> None:
        program = Path()
        for match in BLOCK.finditer(self.path.read_text()):
            notes, content = tuple((match["note"] or "").split(", ")), match["content"]
            named = re.match(r"# (\S+\.py)\n", content)
            if match["language"] == "python" and named:
                program = self.folder / named[1]
                program.write_text(self._with_instead(content) + "\n")
            elif match["language"] == "diff":
                program.write_text(cured(program.read_text(), self._with_instead(content)))
            elif content.startswith("$ "):
                self.commands += [
                    command if "own test" in notes else self._run(command) for command in commands(content, notes)
                ]

    def _with_instead(self, text: str) -> str:
        for old, new in self.instead.items():
            text = text.replace(old, new)
        return text

    def _run(self, command: Command) -> Command:
        done = subprocess.run(
            ["bash", "-c", command.line],
            cwd=self.folder,
            env=environment(self.folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
        )
        return Command(command.line, command.shown, command.notes, done.stdout, done.returncode)


def environment(folder: Path) -> dict[str, str]:
    """Where commands find ``lockstep``, ``python`` and an ``srun``; one thread a rank, as where there are few cores."""
    places = [warm.server().commands, ROOT / "tests" / "docs" / "bin", Path(sys.executable).parent]
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("LOCKSTEP_")},
        "PATH": os.pathsep.join([*map(str, places), os.environ["PATH"]]),
        "PYTHONPATH": python_path(ROOT / "tests" / "site"),
        "XDG_STATE_HOME": str(folder / "state"),
        "OMP_NUM_THREADS": "1",
    }


def commands(content: str, notes: tuple[str, ...]) -> Iterator[Command]:
    """The commands of a block, each with the lines below it."""
    for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield Command(line, tuple(each for each in shown if each.strip(" …")), notes)


def cured(program: str, diff: str) -> str:
    """The program with its lines changed; those of the diff stand in it in this order, others may lie in between."""
    rest, found = program.splitlines(), []
    for change in diff.splitlines():
        kind, line = change[:1], change[1:]
        if kind == "+":
            found.append(line)
            continue
        place = rest.index(line)
        found += rest[: place + (kind != "-")]
        rest = rest[place + 1 :]
    return "\n".join([*found, *rest]) + "\n"


def masked(line: str) -> str:
    """A line without its figures and the name of its rank in front, and with single blanks."""
    line = re.sub(r"^\[rank\d+\]: ", "", line)
    return UNIT.sub("#", FIGURE.sub(lambda match: match[0] if match[1] else "#", " ".join(line.split())))


def missing(shown: tuple[str, ...], printed: str, *, in_order: bool = True) -> list[str]:
    """The lines shown that were not printed, or not in this order."""
    lines, left = [masked(line) for line in printed.splitlines()], []
    for line in shown:
        pattern = re.compile(".*".join(re.escape(part) for part in masked(line).split("…")))
        place = next((number for number, each in enumerate(lines) if pattern.fullmatch(each)), None)
        if place is None:
            left.append(line)
        elif in_order:
            del lines[: place + 1]
    return left


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Page]:
    """Runs a page when it is first asked for."""

    @cache
    def ran(name: str) -> Page:
        with taken_port() as port:
            page = Page(ROOT / "docs" / "symptoms" / f"{name}.md", tmp_path_factory.mktemp(name))
            page.instead |= {"29500": str(port), _DECODED: _LOOKED_AT}
            page.run()
            return page

    return ran


@contextmanager
def taken_port() -> Iterator[int]:
    """A port at which another process listens: this one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def program_of(name: str, file: str, *, is_cured: bool = False) -> str:
    """A program of a page, as the page shows it first, or with the lines changed by the diff that follows it."""
    text = (ROOT / "docs" / "symptoms" / f"{name}.md").read_text()
    found = list(BLOCK.finditer(text))
    place = next(number for number, block in enumerate(found) if block["content"].startswith(f"# {file}\n"))
    program = found[place]["content"] + "\n"
    diff = next(block["content"] for block in found[place:] if block["language"] == "diff")
    return cured(program, diff) if is_cured else program


def shown_by(name: str, line: str) -> list[tuple[str, ...]]:
    """What a page shows of a command, each time that it comes."""
    text = (ROOT / "docs" / "symptoms" / f"{name}.md").read_text()
    found = (each for block in BLOCK.finditer(text) for each in commands(block["content"], ()))
    return [command.shown for command in found if command.line == line]


def test_there_are_pages_and_the_index_names_each() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert len(PAGES) == 11
    assert [page.name for page in PAGES if f"](symptoms/{page.name})" not in index] == []


@pytest.mark.parametrize("name", [page.stem for page in PAGES])
def test_each_page_shows_what_its_programs_print(name: str, page_of: Callable[[str], Page]) -> None:
    page = page_of(name)
    assert page.commands
    for command in page.commands:
        if "own test" in command.notes:
            continue
        code = next((int(note.split()[-1]) for note in command.notes if note.startswith("exit code")), 0)
        assert command.code == code, f"$ {command.line}\n{command.output}"
        shown = command.shown[:1] if command.is_timed else command.shown
        left = missing(shown, command.output, in_order="any order" not in command.notes)
        assert not left, f"$ {command.line}\n{command.output}"


@pytest.mark.timed
@pytest.mark.campaign
@pytest.mark.parametrize("name", [page.stem for page in PAGES if "<!-- timed" in page.read_text()])
def test_verdicts_of_a_quiet_machine(name: str, page_of: Callable[[str], Page]) -> None:
    for command in page_of(name).commands:
        left = missing(command.shown, command.output) if command.is_timed else []
        assert not left, f"$ {command.line}\n{command.output}"


def epochs(command: Command) -> list[str]:
    """What a program printed of its epochs, figures included."""
    return re.findall(r"^epoch .*", command.output, re.MULTILINE)


def test_the_cured_program_has_the_losses_of_one_rank_on_four(page_of: Callable[[str], Page]) -> None:
    one, four, cured_one, cured_four = (
        command for command in page_of("different-loss").commands if command.line.startswith("lockstep run")
    )
    assert epochs(one) != epochs(four)
    assert len(epochs(cured_one)) == 3
    assert epochs(cured_one) == epochs(cured_four)


def test_the_cured_program_resumes_as_if_it_had_not_been_stopped(page_of: Callable[[str], Page]) -> None:
    runs = [command for command in page_of("resume-is-not-the-same").commands if "lockstep run" in command.line]
    whole, _, resumed, cured_whole, _, cured_resumed = map(epochs, runs)
    assert len(whole) == 4
    assert resumed != whole[2:]
    assert cured_resumed == cured_whole[2:]


def test_the_cured_program_keeps_its_memory(page_of: Callable[[str], Page]) -> None:
    creeps, keeps = page_of("memory-creeps").commands
    assert "memory creeps" in creeps.output
    assert "memory creeps" not in keeps.output


def test_a_rank_that_the_others_wait_for_after_an_epoch(tmp_path: Path) -> None:
    page = "hangs-after-an-epoch"
    (tmp_path / "uploads.py").write_text(program_of(page, "uploads.py"))
    (report,), (stack,) = shown_by(page, "lockstep run -n 2 uploads.py"), shown_by(page, "lockstep runs stack")
    with start(["lockstep", "run", "-n", "2", "uploads.py"], tmp_path, torch=True, LOCKSTEP_LATE="1") as job:
        told: list[str] = []
        lines: list[str] = []
        while missing(report, "\n".join(lines)):  # a busy machine holds up ranks as well
            told.append(job.read_error())
            assert told[-1] or job.process.poll() is None, told
            lines = [*([] if told[-1].startswith("lockstep: ") else lines), told[-1]]
        asked = [run(["lockstep", "runs", "stack"], tmp_path)]
        while missing(stack, asked[-1].out) and job.process.poll() is None:  # one without a processor says nothing
            asked.append(run(["lockstep", "runs", "stack"], tmp_path))
    assert not missing(stack, asked[-1].out), asked


def test_a_rank_that_says_it_takes_its_time_is_not_reported(tmp_path: Path) -> None:
    program = program_of("hangs-after-an-epoch", "uploads.py", is_cured=True)
    (tmp_path / "uploads.py").write_text(program.replace("time.sleep(60)", "time.sleep(2)"))
    done = run(["lockstep", "run", "-n", "2", "uploads.py"], tmp_path, torch=True, LOCKSTEP_LATE="1")
    assert done.code == 0, done
    assert " in upload\n" not in done.err, "of a busy machine there may be others"


@pytest.mark.parametrize("is_cured", [False, True], ids=["multiprocessing", "lockstep.spawn"])
def test_ranks_whose_parent_is_killed(tmp_path: Path, is_cured: bool) -> None:
    (tmp_path / "trains.py").write_text(program_of("left-over-processes-and-ports", "trains.py", is_cured=is_cured))
    job = warm.Process(["trains.py"], cwd=tmp_path, env=environment(tmp_path))
    with job:
        lines = sorted(job.stdout.readline().strip() for _ in range(2))
        ranks = [int(line.split()[-1]) for line in lines]
        assert [masked(line) for line in lines] == [f"rank {rank} is process #" for rank in range(2)]
        with killed_afterwards(ranks):
            job.kill()
            job.wait()
            assert gone_within(ranks, 60.0 if is_cured else 0.2) == ([] if is_cured else ranks)


def test_the_doctor_names_who_listens_at_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = shown_by("left-over-processes-and-ports", "lockstep doctor --quick")
    with taken_port() as port:
        monkeypatch.setattr(checks, "DEFAULT_MASTER_PORT", port)
        found = [each for each in checks.check_ports(checks.CheckTask(2, Path())) if "--node-rank" in each.what]
    what, advice = (line.strip().removeprefix("warning ports: ").removeprefix("next: ") for line in shown)
    assert masked(found[0].what).partition("(")[0] == masked(what).partition("(")[0]
    assert masked(found[0].advice) == masked(advice)


def test_a_page_that_shows_what_is_not_printed_is_found() -> None:
    printed = "[rank1]: rank 1 of 2 took 3.5 ms at /tmp/a.py:12\nepoch 1: 20 samples"
    assert not missing(("rank 1 of 4 took 20 s at …/a.py:12", "epoch 1: 7 samples"), printed)
    for wrong in (
        "rank 0 of 2 took 3.5 ms at /tmp/a.py:12",
        "rank 1 of 2 took 3.5 ms at …/a.py:13",
        "epoch 0: 20 samples",
    ):
        assert missing((wrong,), printed) == [wrong]
    assert missing(("epoch 1: 20 samples", "rank 1 of 2 took …"), printed) == ["rank 1 of 2 took …"], "another order"
