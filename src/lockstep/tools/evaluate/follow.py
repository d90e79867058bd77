"""Follow a run: evaluate its checkpoints one after the other, until it has ended. See Note [Beside training]."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from lockstep import knobs
from lockstep._files import StorePath, describe, make_folders
from lockstep.checkpoint import lineage
from lockstep.checkpoint.evaluations import FOLDER, TRIES, Evaluated, Evaluations
from lockstep.checkpoint.lineage import LineageRecord
from lockstep.checkpoint.locks import CheckpointGone
from lockstep.checkpoint.read import read_manifest_unheld
from lockstep.checkpoint.run_folder import Hold, RunFolder, run_folder
from lockstep.errors import CheckpointCorrupt, CheckpointError, LockstepError
from lockstep.launch.spec import Program, check_program
from lockstep.metrics.file import NAME, add_lines, evaluation_line
from lockstep.text import as_clock, counted, numbered
from lockstep.tools.evaluate import choice
from lockstep.tools.evaluate.attempt import EvaluationAttempt, EvaluationEnd, attempt, output_of
from lockstep.tools.evaluate.choice import Candidate

#: Seconds between two looks for the folder of a run that has not begun: a short training has ended in no time.
_LOOK = 0.1
#: The most steps that a sentence names.
_STEPS = 8


@dataclass(frozen=True)
class EvaluateOptions:
    """The request for evaluations."""

    program: Program
    #: The run's folder, or its address in a store.
    root: PurePath
    #: True: also those that the run will make, until it has ended.
    follows: bool = False
    ranks: int = 1
    #: The seconds that one evaluation may take.
    limit: float = 3600.0
    #: The seconds that the run may have no owner before it counts as ended.
    patience: float = 120.0
    #: The folder for what the script prints; None: below the results, or a temporary one if the run is in a store.
    log_dir: Path | None = None
    #: The file of the run's log; None: beside the checkpoints, which a store does not have.
    metrics: Path | None = None
    #: True: checkpoints whose evaluation has failed before are tried again.
    retries: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"-n {self.ranks}: expected 1 rank or more")
        if not (math.isfinite(self.patience) and self.patience >= 0):
            raise ValueError(f"--patience {self.patience:g}: expected 0 seconds or more")
        if self.program.text is not None:
            raise ValueError(
                f"{self.program.target} comes from a pipe, and the script is started again and again: save it to a file"
            )
        check_program(self.program)


@dataclass(frozen=True)
class EvaluationOutcome:
    """What became of one checkpoint, or of one attempt that failed."""

    checkpoint: str
    digest: str
    step: int
    end: EvaluationEnd
    #: What the script has reported; None: nothing.
    numbers: Mapping[str, float] | None = None
    #: The reason why it failed; empty: it did not.
    why: str = ""
    #: Number of tries so far; True if it will be tried again.
    tries: int = 0
    again: bool = False
    seconds: float | None = None
    exit_code: int | None = None
    #: The file with what the script has printed.
    log: Path | None = None

    def describe(self) -> str:
        """Return it in a sentence, for one that has no numbers."""
        if self.end in (EvaluationEnd.GONE, EvaluationEnd.LEFT_OUT):
            return f"step {self.step}: {self.checkpoint} was {self.end.value}, so it is left out"
        left = "" if self.again else ", the last one"
        return f"step {self.step}: {self.why} (try {self.tries} of {TRIES}{left}); what it printed is in {self.log}"


@dataclass
class EvaluationTally:
    """What came of all evaluations of a command."""

    done: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)
    #: The checkpoints that are there at the end and had failed too often before this command.
    marked: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """Return it in a sentence."""
        if not (self.done or self.failed or self.missed):
            words = ["nothing was left to evaluate"]
        else:
            words = [f"{counted(len(self.done), 'checkpoint')} evaluated"]
        if self.failed:
            words.append(f"{len(self.failed)} failed ({numbered('step', self.failed, most=_STEPS)})")
        if self.missed:
            words.append(
                f"{len(self.missed)} left out, removed before they could be evaluated "
                f"({numbered('step', self.missed, most=_STEPS)})"
            )
        if self.marked:
            words.append(f"{len(self.marked)} failed before ({numbered('step', self.marked, most=_STEPS)})")
        return ", ".join(words)


@dataclass(frozen=True)
class Telling:
    """What hears how it goes."""

    #: Takes the outcome of each evaluation as soon as there is one.
    outcome: Callable[[EvaluationOutcome], None]
    #: Prints a sentence.
    say: Callable[[str], None]
    #: The progress of the evaluation under way: its step, and the seconds so far; None: it has ended.
    progress: Callable[[int | None, float], None]


def evaluate(asked: EvaluateOptions, tell: Telling) -> EvaluationTally:
    """Evaluate the checkpoints of a run that have no result yet.

    Raises:
        CheckpointError: there is no such run, another evaluator is at work there, or the store fails.
        OSError: the results can't be written.
    """
    folder = run_folder(asked.root)
    _wait_for_folder(folder, asked, tell)
    with _held(folder) as hold:
        evaluator = _Evaluator(asked, folder, hold, tell)
        try:
            return evaluator.run()
        except FileNotFoundError as error:
            if folder.exists():
                raise
            raise CheckpointError(
                f"{folder.path} was moved or removed meanwhile: give its new path, and the checkpoints without a "
                "result are evaluated"
            ) from error
        finally:
            evaluator.tidy()


def _wait_for_folder(folder: RunFolder, asked: EvaluateOptions, tell: Telling) -> None:
    """Wait for the run to begin.

    Raises:
        CheckpointError: it does not, or the path is no run's.
    """
    if asked.follows and not folder.exists():
        tell.say(f"{folder.path} is not there yet; it has {as_clock(asked.patience)} to come (--patience)")
        deadline = time.monotonic() + asked.patience
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(min(_LOOK, _pause(asked.root)))
    if not folder.exists():
        raise CheckpointError(f"{folder.path}: no such folder: give the folder that the run gives to its Checkpointer")
    if folder.is_checkpoint():
        raise CheckpointError(f"{folder.path} is a checkpoint: give the folder of its run, {folder.path.parent}")
    if not asked.follows and not folder.checkpoints() and not Evaluations(folder.path).exists():
        raise _none_there(folder)


def _none_there(folder: RunFolder) -> CheckpointError:
    return CheckpointError(
        f"{folder.path} has no checkpoint: give the folder that the run gives to its Checkpointer, or --follow if it "
        "has not saved yet"
    )


@contextmanager
def _held(folder: RunFolder) -> Iterator[Hold]:
    """Keep other evaluators away; see Note [Results beside checkpoints]."""
    place = run_folder(folder.path / FOLDER)
    place.prepare()
    try:
        hold = place.hold()
    except CheckpointError as error:
        raise CheckpointError(f"another lockstep evaluate is at work on {folder.path}: {error}") from error
    try:
        yield hold
    finally:
        hold.release()


def _pause(root: PurePath) -> float:
    times = knobs.times()
    return times.evaluate_look_in_store if isinstance(root, StorePath) else times.evaluate_look


class _Evaluator:
    def __init__(self, asked: EvaluateOptions, folder: RunFolder, hold: Hold, tell: Telling) -> None:
        self._asked, self._folder, self._hold, self._tell = asked, folder, hold, tell
        self._evaluations = Evaluations(folder.path)
        self._tally = EvaluationTally()
        self._log_dir, self._is_temporary = _make_log_dir(asked, folder.path)
        #: Checkpoints that this evaluator has seen, or has told of; what their manifests say, by the folder itself.
        self._seen: set[Candidate] = set()
        self._told: set[Candidate] = set()
        #: Those that this command has tried without a result, and is to try again.
        self._failed: set[Candidate] = set()
        self._identities: dict[tuple[str, int], str] = {}
        #: The folders that are damaged, of which it was said.
        self._damaged: set[str] = set()
        listed = folder.checkpoints()
        #: The age of the newest checkpoint that was there at the beginning.
        self._newest = Candidate(listed[0].name, "").age if listed else (-1, 0)
        #: True if the run was ever seen to have an owner; the time since which it has had none, None: it has one.
        self._was_alive = False
        self._alone_since: float | None = None
        #: The owner's last sign of life, and when it was new.
        self._beat: tuple[tuple[str, int] | None, float] = (None, 0.0)
        #: What the run said of itself at the beginning.
        self._first = self._record()
        #: True if a script has failed, so that somebody may want to read what it printed.
        self._has_failed = False

    def run(self) -> EvaluationTally:
        """Evaluate until nothing is left to do."""
        if self._asked.retries:
            for each in self._evaluations.all():
                if each.numbers is None:
                    self._evaluations.forget(each)
        while True:
            goes_on = self._asked.follows and self._goes_on()  # before the look: Note [The end of a run]
            chosen = self._look()
            if chosen is not None:
                self._evaluate(chosen)
                self._write_lines()
            elif goes_on:
                time.sleep(_pause(self._asked.root))
            elif not (self._seen or self._record().checkpoints or self._evaluations.all()):
                raise _none_there(self._folder)
            else:
                self._write_lines(last=True)
                self._tally.marked = self._failed_before()
                return self._tally

    def tidy(self) -> None:
        """Remove what scripts have printed, if it was kept for this command alone and no script has failed."""
        if self._is_temporary and not self._has_failed:
            shutil.rmtree(self._log_dir)

    def _failed_before(self) -> list[int]:
        """Return the steps of the checkpoints that are there and had failed too often before this command."""
        here = {Candidate(name, digest) for (name, _), digest in self._identities.items()} - self._told
        failed = [each for each in self._evaluations.all() if each.numbers is None and each.is_final]
        return [each.step for each in failed if Candidate(each.checkpoint, each.digest) in here]

    def _goes_on(self) -> bool:
        """Return whether the run may make more checkpoints. See Note [The end of a run]."""
        now = time.monotonic()
        if self._has_owner():
            self._was_alive, self._alone_since = True, None
            return True
        record = self._record()
        if record.ended and (self._was_alive or record != self._first):
            return False
        if self._alone_since is None:
            self._alone_since = now
            has = f"has {as_clock(self._asked.patience)} to begin"
            self._tell.say(
                f"the run in {self._folder.path} had done all its epochs before; a job that continues it {has} "
                "(--patience)"
                if record.ended
                else f"no job trains in {self._folder.path}; one {has}, or to go on (--patience)"
            )
        return now - self._alone_since < self._asked.patience

    def _has_owner(self) -> bool:
        """Return whether a job owns the folder, and lives: one that gives signs of life has given one of late."""
        now = time.monotonic()  # before the look, as in Note [Lease]
        if self._folder.owner_now() is None:
            return False
        beat = self._folder.beat_now()
        if beat is None:
            return True
        if beat != self._beat[0]:
            self._beat = beat, time.monotonic()
        return now - self._beat[1] < knobs.times().lease

    def _record(self) -> LineageRecord:
        """Return what the run says of itself."""
        return LineageRecord.from_json(self._evaluations.read(lineage.FILE))

    def _look(self) -> Candidate | None:
        """Return the checkpoint to evaluate next, after a word on those that have gone."""
        told = self._record().checkpoints
        saved = {Candidate(*pair) for pair in told}
        there = self._there(dict(told))  # after the record, or what is saved in between would pass for removed
        results = {(each.checkpoint, each.digest): each for each in self._evaluations.all()}
        self._seen |= there
        known = (self._seen | saved) - self._told
        young = choice.left_out(known & self._seen, there, results, after=(-1, 0))
        young += choice.left_out(known - self._seen, there, results, after=self._newest)
        for each in sorted(young, key=lambda one: one.age):
            self._told.add(each)
            if each in self._failed:  # that it can't be tried again makes nothing of it good
                self._tally.failed.append(each.age[0])
                self._tell.say(f"step {each.age[0]}: {each.name} was removed before it could be tried again")
                continue
            self._tally.missed.append(each.age[0])
            self._tell.outcome(EvaluationOutcome(each.name, each.digest, each.age[0], EvaluationEnd.LEFT_OUT))
        return choice.next_one(there, results)

    def _there(self, told: Mapping[str, str]) -> set[Candidate]:
        """Return the checkpoints in the run's folder; those whose manifest can't be read are said once.

        Args:
            told: the identities that the run tells, by name. A manifest that was read is read again if they differ:
                there is another checkpoint of that name, in a store or with the number that a removed folder had.
        """
        found = set()
        identities = {}
        for path in self._folder.checkpoints():
            key = path.name, _number_of(path)
            known = self._identities.get(key)
            try:
                if known is None or told.get(path.name, known) != known:
                    known = read_manifest_unheld(path).identity
            except CheckpointGone:
                continue
            except CheckpointCorrupt as error:
                if path.name not in self._damaged:
                    self._damaged.add(path.name)
                    self._tell.say(f"{path.name} is left out: {error}")
                continue
            identities[key] = known
            found.add(Candidate(path.name, known))
        self._identities = identities
        return found

    def _evaluate(self, chosen: Candidate) -> None:
        """Evaluate one checkpoint, and write the result."""
        step, path = chosen.age[0], self._folder.path / chosen.name
        before = next((each for each in self._evaluations.of({chosen.name}) if each.digest == chosen.digest), None)
        tries = 1 + (0 if before is None else before.tries)
        home = _new_folder(self._log_dir, f"{chosen.name}-{chosen.digest[:8]}-{tries}")
        try:
            done = attempt(
                self._asked.program,
                path,
                chosen.digest,
                ranks=self._asked.ranks,
                limit=self._asked.limit,
                home=home,
                tick=lambda seconds: self._tell.progress(step, seconds),
            )
        finally:
            self._tell.progress(None, 0.0)
        result = Evaluated(
            chosen.name, chosen.digest, done.numbers, tries, done.why, round(done.seconds, 3), round(time.time(), 3)
        )
        if done.end is EvaluationEnd.GONE:
            self._identities = {}
            if lineage.lies_there(self._folder.path, result):
                done = replace(done, end=EvaluationEnd.FAILED, why="it did not find the checkpoint, which is there")
                result = replace(result, failure=done.why)
        if done.end is not EvaluationEnd.GONE:
            self._hold.check()
            self._evaluations.put(result)
        self._note(chosen, result, done, output_of(home))

    def _note(self, chosen: Candidate, result: Evaluated, done: EvaluationAttempt, log: Path) -> None:
        """Count what became of an attempt, and tell it."""
        has_failed = done.end in (EvaluationEnd.FAILED, EvaluationEnd.LIMIT)
        self._has_failed |= has_failed
        again = has_failed and not result.is_final and lineage.lies_there(self._folder.path, result)
        if again:
            self._failed.add(chosen)
        if done.end is EvaluationEnd.GONE:
            (self._tally.failed if chosen in self._failed else self._tally.missed).append(result.step)
        elif result.numbers is not None:
            self._tally.done.append(result.step)
        elif not again:
            self._tally.failed.append(result.step)
        if not again:
            self._told.add(chosen)
        self._tell.outcome(
            EvaluationOutcome(
                chosen.name,
                chosen.digest,
                result.step,
                done.end,
                done.numbers,
                done.why,
                result.tries,
                again=again,
                seconds=done.seconds,
                exit_code=done.exit_code,
                log=log,
            )
        )

    def _write_lines(self, *, last: bool = False) -> None:
        """Write the lines of results into metrics.jsonl where no job does. See Note [Lines of evaluations]."""
        root = self._folder.path
        path = self._asked.metrics or (None if isinstance(root, StorePath) else Path(root, NAME))
        if path is None or self._has_owner():
            return
        lines = [
            evaluation_line(each.name, step=each.step, time=each.time, numbers=each.numbers or {})
            for each in lineage.results_of_a_run_at_rest(root)
        ]
        try:
            done = add_lines(path, lines)
            words = "another process has it open, and takes the results if it is the run's log" if done is None else ""
        except (LockstepError, OSError) as error:  # the results are safe, and the other checkpoints are wanted as well
            words = describe(error) if isinstance(error, OSError) else str(error)
        if words and last:
            self._tell.say(f"{path} was not written: {words}; the results are in {self._evaluations.path}")


def _number_of(path: PurePath) -> int:
    """Return what tells a folder on a disk from a later one of the same name; in a store there is nothing."""
    try:
        return Path(path).stat().st_ino if not isinstance(path, StorePath) else 0
    except OSError:
        return 0


def _make_log_dir(asked: EvaluateOptions, root: PurePath) -> tuple[Path, bool]:
    """Return the folder for what scripts print, and whether it is a temporary one."""
    if asked.log_dir is None and isinstance(root, StorePath):
        return Path(tempfile.mkdtemp(prefix="lockstep-evaluate-")), True
    folder = asked.log_dir or Path(root, FOLDER, "logs")
    make_folders(folder)
    return folder.absolute(), False


def _new_folder(parent: Path, name: str) -> Path:
    """Make a folder (0700) of a name, or of that with a number: an evaluator that was killed may have left one."""
    for number in range(1, 10_000):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            continue
        return folder
    raise LockstepError(f"{parent} has {number} folders called {name}: remove some, or give another --log-dir")


def summary(tally: EvaluationTally, root: PurePath) -> str:
    """Return what came of a command in a sentence, with what to do about failures."""
    words = tally.describe()
    if tally.failed or tally.marked:
        words += (
            f". A checkpoint is tried {TRIES} times; once the script is right, --retry-failed tries those again that "
            f"are still in {root}"
        )
    return words
