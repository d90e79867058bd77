"""Start the runs of a verification, one after the other, and compare their records.

Each run is ``lockstep run`` in a process of its own, with a limit, and with one number of threads for all: a rank that
has half the threads adds up in another order, which would be one more reason to differ. The script runs on one rank and
on each number of ranks that was asked for. More runs follow only where bits differ: a second run on one rank shows
whether the script repeats itself, a nudged one the effect of rounding (Note [Nudged runs] in compare.py).
"""

from __future__ import annotations

import functools
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep import _proc, knobs, machine
from lockstep.errors import LockstepError
from lockstep.launch import processes
from lockstep.launch.spec import Program, check_program
from lockstep.text import counted, joined, listed
from lockstep.tools.verify import compare
from lockstep.tools.verify.compare import Distance, FindingKind, Judgement, Nudged, Stage, judge, measure
from lockstep.tools.verify.putback import JOURNAL, Lookout, NotPutBack, journal_of, put_back
from lockstep.tools.verify.reasons import Reason, explain, whole_batch_each
from lockstep.tools.verify.records import Assignment, Observation

#: The words that start lockstep's command; tests replace them by a faster command.
COMMAND: Sequence[str] = (sys.executable, "-m", "lockstep")
#: Seconds that a launcher has to end its ranks and itself after SIGTERM.
_PATIENCE = 15.0
#: Seconds that the zygote of a launcher which is gone has to end the ranks: it takes less by itself.
_LEFTOVER_PATIENCE = 2.0
#: Seconds between two looks at a launcher.
_TICK = 0.05
#: Lines of a failed run's output that are repeated.
_LINES = 12
#: Runs that keep numbers beside those on several ranks: the first, a second one, two that are nudged. As many again
#: where random numbers are made alike.
_ALONE = 4
#: Bytes of a number that is kept.
_BYTES = 4


class CannotVerify(LockstepError):
    """A run failed, or took no step, so that there is nothing to compare."""

    code = "cannot-verify"


@dataclass(frozen=True)
class VerifyOptions:
    """The request for a verification."""

    program: Program
    #: Numbers of ranks that are compared with one.
    ranks: tuple[int, ...]
    steps: int = 20
    #: The time limit of each run, in seconds.
    timeout: float = 600.0
    #: Bytes of numbers that all runs may keep together.
    keep: int = 2**30
    #: True if the script's output is shown.
    shows: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 2:
            raise ValueError("-n: expected 2 ranks or more; they are compared with one")
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: expected 1 or more")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise ValueError(f"--timeout {self.timeout:g}: expected a positive number of seconds")
        if self.keep < 2**20:
            raise ValueError(f"--keep {self.keep / 2**20:g}: expected 1 MiB or more")


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    what: str
    ranks: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Contrast:
    """A run on several ranks, compared with that on one."""

    ranks: int
    difference: Distance
    judgement: Judgement
    #: The likeliest first; empty where nothing differs.
    reasons: list[Reason] = field(default_factory=list)
    #: Sentences about what differs without changing the verdict.
    remarks: list[str] = field(default_factory=list)
    #: The verdict on all but random numbers, of which ``difference`` is then, too; None: they were left as they are.
    beneath: FindingKind | None = None


@dataclass
class Result:
    """The result of a verification."""

    asked: VerifyOptions
    threads: str
    #: Steps of the run on one rank, which is the most that are compared.
    steps: int = 0
    contrasts: list[Contrast] = field(default_factory=list)
    #: How far rounding alone takes a run on one rank from another; None: all bits are equal.
    rounding: Distance | None = None
    runs: list[FinishedRun] = field(default_factory=list)
    #: Files that the script has written and that are again as they were before; and those that are not.
    put_back: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def kind(self) -> FindingKind:
        """The worst verdict of all contrasts."""
        order = [FindingKind.BITS, FindingKind.ROUNDING, FindingKind.RANDOM, FindingKind.DIFFERENT]
        return max((each.judgement.kind for each in self.contrasts), key=order.index)


@contextmanager
def own_folder(tell: Callable[[str], None]) -> Iterator[Path]:
    """Make an empty folder (0700) for a verification, and remove it in the end.

    A journal that is still there stays: it has the only copies of files that were not put back.

    Args:
        tell: shows a line.
    """
    folder = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
    try:
        yield folder
    finally:
        found = [*folder.iterdir()]
        has_copies = any(each.suffix == JOURNAL for each in found)
        for each in found:
            if each.suffix != JOURNAL:
                shutil.rmtree(each, ignore_errors=has_copies)  # the error that names them is worth more
        if has_copies:
            tell(f"{folder} has the copies of files that were not put back: remove it once they are")
        else:
            folder.rmdir()


def verify(asked: VerifyOptions, folder: Path, tell: Callable[[str], None]) -> Result:
    """Run the script as often as needed, and compare.

    Args:
        asked: what to verify.
        folder: an empty folder, 0700; the runs' files there are read as long as the result is used.
        tell: shows a line about the progress.

    Raises:
        ValueError: the program can't be run.
        CannotVerify: a run failed, took longer than its limit, or took no step.
        NotPutBack: files that a run has written can't be put back.
    """
    check_program(asked.program)
    processes.become_subreaper()  # ranks that have lost their launcher become this process's, which ends them
    runs = _Runs(asked, folder, tell)
    found = _compare(runs, asked, asked.ranks)
    random = [each.ranks for each in found if any(reason.is_random for reason in each.reasons)]
    beneath: dict[int, Contrast] = {}
    failure = ""
    if random:
        try:
            beneath = {each.ranks: each for each in _compare(runs, asked, random, alike=True)}
        except CannotVerify as error:
            failure = str(error).splitlines()[0].removesuffix("; its last lines:")
    for each in found:
        settled = each if each.ranks not in random else settle(each, beneath.get(each.ranks), failure)
        runs.result.contrasts.append(settled)
    return runs.result


def settle(found: Contrast, alike: Contrast | None, failure: str = "") -> Contrast:
    """Return the verdict on a script whose ranks draw random numbers of their own.

    Args:
        found: with these numbers; they are among the reasons.
        alike: with the same numbers for all samples, on one rank and on several; see Note [Random numbers made alike]
            in alike.py. None: it could not be compared.
        failure: the reason why not.
    """
    if alike is None:
        text = f"what else may differ is not known: with random numbers made alike {failure}"
        return replace(found, remarks=[*found.remarks, text])
    reasons = [each for each in found.reasons if each.is_random]
    if alike.judgement.kind is not FindingKind.DIFFERENT:
        return replace(
            alike,
            judgement=replace(found.judgement, kind=FindingKind.RANDOM, conclusive=alike.judgement.conclusive),
            reasons=reasons,
            beneath=alike.judgement.kind,
        )
    if any(each.is_random for each in alike.reasons):
        text = "these numbers could not be made alike for all samples, so what else may differ is not known"
        return replace(found, remarks=[*found.remarks, text])
    text = (
        f"found with random numbers made alike: with its own, the script differs from step {found.judgement.step} on "
        f"({joined(dict.fromkeys(each.cause.value for each in reasons))}), which is no mistake"
    )
    return replace(alike, remarks=[*alike.remarks, text])


def _compare(runs: _Runs, asked: VerifyOptions, ranks: Sequence[int], *, alike: bool = False) -> list[Contrast]:
    """Run the script on one rank and on each number of ``ranks``, and judge their differences.

    Args:
        runs: starts them.
        asked: what to verify.
        ranks: numbers of ranks.
        alike: True if random numbers are the same for all samples. The script repeats itself on one rank then, as it
            has shown with its own.
    """
    start = functools.partial(runs.start, alike=alike)
    one = start("one rank", 1)
    runs.result.steps = max(runs.result.steps, one.steps)
    differences = {count: measure(one, start(f"{count} ranks", count)) for count in ranks}
    repeat: Distance | None = None
    nudged: list[Nudged] = []
    operations: list[str] = []
    nudge = max(each.first.spacing for each in (one, *(found.other for found in differences.values())))
    if any(found.same_layout and not found.same_bits for found in differences.values()):
        if not alike:
            repeat = measure(one, start("one rank again, to see whether it repeats itself", 1))
        if repeat is None or compare.repeats_itself(repeat):
            away = measure(one, start("one rank, nudged, to see what rounding does", 1, nudge=nudge))
            nudged.append(Nudged(away, nudge, compare.FACTOR))
            runs.result.rounding = away
        if repeat is not None and not repeat.same_bits:
            name = "one rank, to name operations that are not deterministic"
            operations = start(name, 1, names_operations=True).first.operations
    contrasts = []
    for count, found in differences.items():
        judgement = judge(found, nudged)
        if _is_close(judgement) and nudged:
            if len(nudged) == 1:
                far = nudge * compare.FAR
                away = measure(one, start("one rank, nudged further, to see what crossing a 0 does", 1, nudge=far))
                nudged.append(Nudged(away, far, compare.FACTOR_FAR))
            judgement = judge(found, nudged)
        different = judgement.kind is FindingKind.DIFFERENT
        reasons = explain(judgement, found, repeat, operations, nudged=nudged) if different else []
        contrasts.append(Contrast(count, found, judgement, reasons, _remarks(asked, found, repeat, reasons)))
    return contrasts


def _is_close(judgement: Judgement) -> bool:
    return judgement.stage in (Stage.GRADIENT, Stage.UPDATE) and judgement.relative < compare.CLOSE


def _remarks(asked: VerifyOptions, found: Distance, repeat: Distance | None, reasons: Sequence[Reason]) -> list[str]:
    """Return the remarks beside the verdict."""
    texts = list(found.other.first.remarks)
    spawned = found.other.first.spawned
    if spawned:
        texts.append(f"the script starts ranks by itself ({listed(spawned)}), and these are not seen")
    texts += compare.untrained_parameters(found.first)
    taken = {found.first.steps, found.other.steps}
    if max(taken) < asked.steps:
        texts.append(f"the script ended by itself after {max(taken)} of {asked.steps} steps")
    if whole_batch_each(found.first, found.other):
        texts.append("every rank computed the whole batch, so more ranks save no time: nothing cuts the batch")
    if repeat is not None and not repeat.same_bits and not reasons:
        texts.append("two runs on one rank don't have the same bits either")
    spacing = max(found.first.first.spacing, found.other.first.spacing)
    limit = max(1e-3, compare.FACTOR * spacing)
    apart = [each.step for each in found.steps if each.loss is not None and each.loss > limit * (each.loss_size or 0.0)]
    if apart and not reasons:
        texts.append(
            f"the ranks' losses don't make that of one rank from step {apart[0]} on, whether added or averaged; the "
            "gradients do"
        )
    return texts


class _Runs:
    """Starts one run after the other."""

    def __init__(self, asked: VerifyOptions, folder: Path, tell: Callable[[str], None]) -> None:
        self._asked, self._folder, self._tell = asked, folder, tell
        self._env = {name: value for name, value in os.environ.items() if name != knobs.TRACE}
        if not any(self._env.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
            self._env["OMP_NUM_THREADS"] = str(machine.share_of_cores(max(asked.ranks)))
        threads = self._env.get("OMP_NUM_THREADS") or self._env.get("MKL_NUM_THREADS") or ""
        self.result = Result(asked, threads)
        self._lookout = Lookout(_folders(asked.program), folder)
        self._started = 0
        self._numbers = asked.keep // _BYTES // ((_ALONE + len(asked.ranks)) * 2 * asked.steps * 2)

    def start(
        self, what: str, ranks: int, *, nudge: float = 0.0, names_operations: bool = False, alike: bool = False
    ) -> Observation:
        """Run the script up to the last step that is compared, and return the ranks' records.

        Raises:
            CannotVerify: it failed, was too slow, or took no step.
        """
        what += ", random numbers made alike" if alike else ""
        home = self._folder / str(self._started)
        self._started += 1
        home.mkdir(mode=0o700)
        assignment = Assignment(str(home), self._asked.steps, max(1, self._numbers), nudge, names_operations, alike)
        assignment.write(home / "assignment.json")
        begun = time.monotonic()
        with _held_back() as signals:
            try:
                code = self._launch(home, ranks, what, signals)
            finally:
                self._put_back(home, what)
        seconds = time.monotonic() - begun
        found = Observation.read(home, ranks)
        why = self._why_useless(found, home, code, what)
        if why is not None:
            raise CannotVerify(why)
        self.result.runs.append(FinishedRun(what, ranks, found.steps, seconds))
        self._tell(f"{what}: {counted(found.steps, 'step')}, {seconds:.1f} s")
        return found

    def _put_back(self, home: Path, what: str) -> None:
        """Undo the script's changes to files; see Note [Put back] in putback.py."""
        done = put_back(journal_of(home))
        if not done.kept:
            shutil.rmtree(journal_of(home), ignore_errors=True)
        self.result.put_back += [path for path in done.files if path not in self.result.put_back]
        changed = [path for path in self._lookout.changed() if path not in done.left]
        for path in [*(f"{path} ({why})" for path, why in done.left.items()), *changed]:
            if path not in self.result.left:
                self.result.left.append(path)
                self._tell(f"{what}: not as it was before: {path}")
        if done.lost:
            text = (
                f"{counted(len(done.lost), 'path')} could not be put back after the run on {what}, so no other run can "
                "begin as it did:\n" + "\n".join(f"  {path}: {done.left[path]}" for path in done.lost)
            )
            if done.kept:
                copies = (shlex.join(["cp", "-p", str(copy), path]) for path, copy in done.kept.items())
                text += "\nOnce nothing is in the way, copy what was there before:"
                text += "".join(f"\n  {each}" for each in copies)
            raise NotPutBack(text)

    def _why_useless(self, found: Observation, home: Path, code: int, what: str) -> str | None:
        """Return why there is nothing to compare in a run, if so."""
        if code:
            taken = {rank.rank: len(rank.steps) for rank in found.ranks}
            steps = f"after {counted(found.steps, 'step')}"
            if len({*taken.values()}) > 1:
                apart = (f"rank {rank} took {counted(count, 'step')}" for rank, count in taken.items())
                steps = f"and its ranks did not end together: {listed([*apart])}"
            return f"the run on {what} failed with exit code {code}, {steps}; its last lines:\n{self._last_lines(home)}"
        if len(found.ranks) < found.world_size:
            return f"the run on {what} ended, but {found.world_size - len(found.ranks)} of its ranks left no record"
        if not found.steps:
            return f"the run on {what} ended without a step of any torch.optim optimizer{_why_no_step(found)}"
        if not any(each.names for each in found.first.optimizers):
            return "all parameters are held in parts, as FSDP does: there are no replicas to compare"
        if self.result.runs:
            return None
        untrained = compare.why_not_a_number(found) or compare.why_untrained(found)
        return None if untrained is None else f"the run on {what} trains nothing: {untrained}"

    def _launch(self, home: Path, ranks: int, what: str, signals: Sequence[int]) -> int:
        """Start a run, wait for its end or for a signal, and return the exit code; nothing is left running."""
        command = [
            *COMMAND,
            "run",
            "-n",
            str(ranks),
            "--standalone",
            "--quiet",
            f"--log-dir={home / 'logs'}",
            "-m",
            "lockstep.tools.verify.observed",
            str(home / "assignment.json"),
            *self._asked.program.words,
        ]
        with open(_output(home), "wb") as file:
            out = sys.stderr if self._asked.shows else file
            users = _proc.children(os.getpid())
            process = subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                preexec_fn=functools.partial(processes.die_with_parent, os.getpid()),
            )
            try:
                self._wait(process, home, ranks, what, signals)
            finally:
                _end(process, users)
            return process.returncode

    def _wait(
        self, process: subprocess.Popen[bytes], home: Path, ranks: int, what: str, signals: Sequence[int]
    ) -> None:
        """Wait for a launcher's end, or for a signal that comes into the list."""
        limit = time.monotonic() + self._asked.timeout
        while process.poll() is None and not signals:
            if time.monotonic() > limit:
                steps = counted(Observation.read(home, ranks).steps, "step")
                raise CannotVerify(
                    f"the run on {what} was stopped after {self._asked.timeout:g} s, the limit (--timeout), and "
                    f"{steps}; fewer steps (--steps) take less"
                )
            time.sleep(_TICK)
        if signals:
            with suppress(OSError):  # the terminal is gone, which has sent the signal
                self._tell(f"ending the run on {what}, and putting back the files that the script has changed")

    def _last_lines(self, home: Path) -> str:
        if self._asked.shows:
            return "  (see above)"
        lines = _output(home).read_text(errors="replace").splitlines()
        lines = [line for line in lines if str(home) not in line]  # this folder is about to be removed
        return "\n".join(f"  {line}" for line in lines[-_LINES:]) or "  (none)"


def _folders(program: Program) -> list[Path]:
    """Return where a script is likely to write."""
    here = Path.cwd()
    return [here] if program.is_module else [here, Path(program.target).resolve().parent]


def _why_no_step(found: Observation) -> str:
    spawned = list(dict.fromkeys(each for rank in found.ranks for each in rank.spawned))
    if spawned:
        return (
            f" of its own: it starts ranks by itself ({listed(spawned)}), and these are not seen. Here the command "
            "starts the ranks: have the script call that function once in its own process, with the rank and the "
            "number of ranks that lockstep.init() or the variables RANK and WORLD_SIZE tell"
        )
    if any(len(rank.steps) for rank in found.ranks):
        idle = [str(rank.rank) for rank in found.ranks if not rank.steps]
        return f" on rank {listed(idle)}, while the others took some: what does the script do on that rank?"
    processes = list(dict.fromkeys(each for rank in found.ranks for each in rank.processes))
    text = (
        ", so there is nothing to compare: does the script train, and with these arguments? One that resumes by itself "
        "and finds a training that is complete takes none"
    )
    if processes:
        text += f". It starts processes ({listed(processes, most=3)}); what they train is not seen"
    return text


@contextmanager
def _held_back() -> Iterator[list[int]]:
    """Hold back the signals that end the command: the first of them acts when this context is left without an error.

    From the start of a run until its files are put back an exception might come before the ranks have ended, or when a
    file is half written.

    Yields:
        the signals that have come so far.
    """
    came: list[int] = []
    ending = {*processes.STOPPING} - processes.ignored(processes.STOPPING)
    before = {signum: signal.signal(signum, lambda found, _frame: came.append(found)) for signum in ending}
    try:
        yield came
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    if came:
        signal.raise_signal(came[0])


def _end(process: subprocess.Popen[bytes], users: Sequence[int]) -> None:
    """End a launcher that runs, and wait for it and its ranks, which it takes with it if it has the time.

    Args:
        process: the launcher.
        users: children that this process had before, which are left alone; see Note [No orphans] in
            launch/processes.py.
    """
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.returncode < 0:  # a signal: else it has left nothing
        processes.sweep(patience=_LEFTOVER_PATIENCE, spare=users)


def _output(home: Path) -> Path:
    return home / "output"
