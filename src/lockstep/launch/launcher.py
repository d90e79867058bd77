"""The launcher: starts the ranks of one machine, watches them, and says which of them holds up the others.

It never imports torch. A command (run.py) and a program (called.py) each hold a :class:`Launcher`, and add what only
they need.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep import _proc, knobs
from lockstep._files import describe
from lockstep.debugger.lender import Lender, find_terminal
from lockstep.errors import LaunchError
from lockstep.job import workers
from lockstep.job.files import EXIT_SAVED, FailureRecord, JobFiles, StopNote
from lockstep.job.hang import WARMING_UP
from lockstep.job.page import Cell, Look, Pages
from lockstep.job.summary import RunSummary, Summary
from lockstep.launch import closing, console, watchdog
from lockstep.launch.binding import Binding, bind_ranks
from lockstep.launch.channel import Answer, Exited, Fork, Started, ZygoteHandle
from lockstep.launch.console import say
from lockstep.launch.evidence import MachineFacts, memory_group, read_crash
from lockstep.launch.hangs import HangWatch, ReportedHang
from lockstep.launch.notify import Notice, Notifier
from lockstep.launch.on_hang import HangAction, HangResponse, dump
from lockstep.launch.output import Streams
from lockstep.launch.policy import Ending, Order, Policy
from lockstep.launch.ras import RasAddress
from lockstep.launch.report import Outcome
from lockstep.launch.spec import JobSpec, rank_environment
from lockstep.launch.tracing import Tracer
from lockstep.machine import is_loopback
from lockstep.rendezvous.messages import EndKind, Round
from lockstep.runs.record import Recorder, RunEnd
from lockstep.text import NEXT, counted


class Attempt:
    """The ranks of this machine, started once: their policy, their private folder, and what they leave there.

    A restart is another attempt, in a folder of its own.

    Args:
        round_: the machines that start together, and this one's place among them.
        home: the job's private folder.
        number: the number of attempts before this one on this machine.
        grace: seconds between asking the ranks to stop and killing them.
        measures: what the ranks are to measure, as :attr:`JobSpec.measures` has it; None: nothing.
        binding: to which cores its ranks are bound.
        terminal: the descriptor of the terminal that ranks are lent at a breakpoint; None if there is none.
        warming_up: seconds that a rank which has taken fewer than two steps may hold up the others.
    """

    def __init__(
        self,
        round_: Round,
        *,
        home: str,
        number: int,
        grace: float,
        measures: Mapping[str, str | None] | None = None,
        binding: Binding,
        terminal: int | None = None,
        warming_up: float = WARMING_UP,
    ) -> None:
        self.round = round_
        self.binding = binding
        self._measures = measures
        self.number = number
        self.began = time.monotonic()
        #: The attempt's private folder, which has no rendezvous and no record of an earlier attempt.
        self.folder = Path(home) / str(number)
        try:
            self.folder.mkdir(mode=0o700)
            self._pages = Pages(self.folder, round_.world_size)
        except FileNotFoundError as error:
            raise LaunchError(f"the job's folder {home} was removed: the ranks can't start again") from error
        except OSError as error:
            raise LaunchError(f"the job's files can't be written in {home}: {describe(error)}") from error
        self.local_rank = {rank: local_rank for local_rank, rank in enumerate(round_.local_ranks)}
        self.policy = Policy(self.local_rank, grace=grace)
        self._files = JobFiles(self.folder)
        #: Lends the terminal to ranks at a breakpoint.
        self.lender = Lender(self._pages, round_.local_ranks, terminal=terminal)
        self._ras = RasAddress.of_job()
        #: Finds the rank that holds up the others.
        self.hangs = HangWatch(
            self._files,
            self._pages,
            round_.local_ranks,
            world_size=round_.world_size,
            shortest=knobs.late(),
            ras=self._ras,
            warming_up=warming_up,
        )
        #: The report on the hang for which this start's ranks were stopped; None: they were not stopped for one.
        self.stopped_for: ReportedHang | None = None
        #: Rank -> where its flight recorder's file is kept; of ranks that have left one.
        self.flight_recorders: dict[int, Path] = {}
        self._memory = memory_group()
        self._kills_before = self._memory.kills() if self._memory is not None else None
        self._told_of_failure = False
        self._outcome: Outcome | None = None

    def fork(self, rank: int, job: dict[str, Any]) -> Fork:
        """Return the request to the zygote to fork one rank of this machine, with its variables and cores.

        Args:
            rank: the rank to fork.
            job: the program that it runs; see rank.py.
        """
        local_rank = self.local_rank[rank]
        cpus = self.binding.of(local_rank)
        return Fork(rank, self._environment(local_rank), job, None if cpus is None else sorted(cpus))

    def _environment(self, local_rank: int) -> dict[str, str | None]:
        """Return the variables that one rank of this machine sees changed."""
        interface = None
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = "lo" if is_loopback(self.round.address) else self.round.interface
        env = rank_environment(
            self.round,
            local_rank,
            folder=str(self.folder),
            interface=interface,
            measures=self._measures,
            cores=self.binding.cores if self.binding.cpus else None,
        )
        return env | watchdog.variables(self.folder) | ({} if self._ras is None else self._ras.variables())

    def steps(self, rank: int) -> tuple[int | None, int | None]:
        """Return the optimizer steps of the whole run, and those that ``rank`` has taken since this start; None where
        they are not counted."""
        taken = self._pages.get(rank, Cell.STEPS)
        run = self._pages.get(rank, Cell.RUN_STEPS) or taken
        return (run - 1 if run else None), (taken - 1 if taken else None)

    @property
    def has_stepped(self) -> bool:
        """Whether a rank of this machine has taken an optimizer step since this start, as far as they are counted."""
        return any(self.steps(rank)[1] for rank in self.local_rank)

    def steps_before(self, rank: int) -> int | None:
        """Return the optimizer steps that the run had before this start; None where no Checkpointer counts them."""
        run, taken = (self._pages.get(rank, cell) for cell in (Cell.RUN_STEPS, Cell.STEPS))
        return max(0, run - taken) if run and taken else None

    def look(self, rank: int) -> Look:
        """Return a rank's page as it is now."""
        return self._pages.look(rank)

    def lines(self, rank: int) -> int:
        """Return a rank's note on the line that it wrote last; see Note [Begun lines] in job/terminal.py."""
        return self._pages.get(rank, Cell.LINES)

    @property
    def listening(self) -> bool:
        """Whether ranks save and leave by themselves when they are asked to stop."""
        return any(self._pages.all(Cell.LISTENS))

    def stop_note(self) -> StopNote | None:
        """Return where the run continues, if its ranks were asked to stop and have saved."""
        return StopNote.read(self.folder)

    def has_agreed(self, exit_code: int) -> bool:
        """Return whether a rank that has ended so has left because all have saved."""
        return self.stop_note() is not None or (exit_code == EXIT_SAVED and self.listening)

    def tell_of_failure(self) -> None:
        """Tell the ranks that the signal to stop which follows comes from a failure. Does nothing the second time."""
        if not self._told_of_failure:
            self._told_of_failure = True
            self._files.mark_failed()

    def record(self, rank: int) -> FailureRecord | None:
        """Return the record that a rank has left of its failure; None: it has left none."""
        return FailureRecord.read(self.folder, rank)

    def has_record(self, rank: int) -> bool:
        """Return whether there is one."""
        return os.path.lexists(self._files.failure(rank))

    def outcome(self, streams: Streams | None = None) -> Outcome:
        """Return how this attempt has ended. Records and counters are read at the first call only.

        Args:
            streams: where the ranks' output went; None: to the caller's own streams.
        """
        if self._outcome is None:
            endings = [self._ending(rank, local_rank, streams) for rank, local_rank in self.local_rank.items()]
            facts = MachineFacts.collect(
                self._memory, kills_before=self._kills_before, worker=lambda pid: workers.find(self.folder, pid)
            )
            self._outcome = Outcome(
                tuple(endings),
                facts,
                self.round.world_size,
                late=self.hangs.text,
                note=self.stop_note(),
                listened=self.listening,
                flight_recorders=self.flight_recorders,
                quit_by=self.lender.quit_by if self.policy.has_quit else None,
            )
        return self._outcome

    def dump(self, reported: ReportedHang, home: Path) -> Path:
        """Keep the evidence of a hang in the folder of the run's logs; see :func:`~lockstep.launch.on_hang.dump`."""
        watchdog.ask_flight_recorders(self._files)
        alive = {rank: state.pid for rank, state in self.policy.states.items() if state.exit_code is None}
        return dump(home, reported, self._files, alive)

    def keep_flight_recorder(self, rank: int, folder: Callable[[], Path]) -> None:
        """Put the file that a rank's flight recorder has written, if it has, where it outlives the job.

        Args:
            rank: which; it has ended.
            folder: makes the folder of the run's logs, or returns it.
        """
        written = self._files.flight_recorder(rank)
        if not written.is_file():
            return
        try:
            home = folder() / f"restart-{self.number}" if self.number else folder()
            home.mkdir(mode=0o700, exist_ok=True)
            kept = Path(shutil.move(written, home / written.name))
            kept.chmod(0o600)
        except OSError as error:
            say(f"the file of rank {rank}'s flight recorder can't be kept: {describe(error)}")
        else:
            self.flight_recorders[rank] = kept

    def close(self) -> None:
        """Unmap the ranks' pages; the folder stays until the job's is removed."""
        self.hangs.close()
        self.lender.close()
        self._pages.close()

    def _ending(self, rank: int, local_rank: int, streams: Streams | None) -> Ending:
        state, record, look = self.policy.states[rank], self.record(rank), self.look(rank)
        log = streams.log(local_rank) if streams is not None else None
        aborted = None
        if record is None:
            steps = counted(look.steps or 0, "step")
            aborted = watchdog.record(
                state,
                log=log,
                is_recorded=rank in self.flight_recorders,
                waited=self.hangs.has_waited(rank),
                about=f"rank {rank} of {self.round.world_size}, after {steps}",
                late=self.hangs.text,
            )
        return Ending(
            state,
            record or aborted,
            log=log,
            shown=streams is not None and streams.shown(local_rank),
            waited_in=look.waits_in if look.mark.waiting else "",
            was_aborted=aborted is not None,
            crash=read_crash(self.folder, rank) if record is None and (state.exit_code or 0) < 0 else "",
        )


class Launcher:
    """The zygote and its ranks on this machine, and the loop that hears of them and applies the policy.

    Whoever holds one calls :meth:`wait`, :meth:`hear` and :meth:`act` in turn, and :meth:`close` in the end.

    Args:
        spec: the job.
        round_: the machines that start together; where they have not met yet: this one alone.
        home: the job's private folder.
        recorder: writes down how the run goes.
        lends: whether this process's terminal, if it has one, is the job's.

    Raises:
        ValueError: the ranks can't be bound to cores as the job asks.
        LaunchError: the job's files can't be written.
    """

    def __init__(self, spec: JobSpec, round_: Round, *, home: str, recorder: Recorder, lends: bool = False) -> None:
        self.spec = spec
        self.recorder = recorder
        self._home = home
        self._binding = bind_ranks(spec.bind, spec.nproc)
        self._terminal = find_terminal() if lends else None
        self.attempt = self._attempt(round_, number=0)
        self._tracer: Tracer | None = None
        self.selector = selectors.PollSelector()  # epoll refuses regular files, which standard output may be
        self._next_look = 0.0
        self._on_hang = HangResponse(spec.on_hang)
        #: Runs the user's command at events of the job.
        self._notifier = Notifier(spec.notify)
        #: The last report that the command was run for.
        self._notified: ReportedHang | None = None
        #: The summaries of earlier starts, and the peak memory in them of each rank of this machine.
        self._summaries: list[Summary] = []
        self._peaks: dict[int, int | None] = {}
        self._told_of_loss = False
        try:
            self.zygote = ZygoteHandle(
                home,
                ranks=spec.nproc,
                threads=self._binding.threads,
                restarts=spec.max_restarts > 0 or spec.rendezvous is not None,
            )
        except BaseException:
            self.selector.close()
            self.attempt.close()
            raise
        self.selector.register(self.zygote, selectors.EVENT_READ)
        self._record_start()

    @property
    def policy(self) -> Policy:
        """The state of the ranks, and the rules by which they end."""
        return self.attempt.policy

    @property
    def lives(self) -> bool:
        """Whether the zygote runs, and with it what it has started."""
        return self.zygote in self.selector.get_map()

    def wait(self, *moments: float | None) -> set[object]:
        """Wait until there is something to read or to do; meanwhile look at the ranks' pages.

        Args:
            moments: times on the monotonic clock at which the caller has something to do; None: never.

        Returns:
            the files in :attr:`selector` that are ready.
        """
        hangs, select, clock = self.attempt.hangs, self.selector.select, time.monotonic
        deadline = self.policy.deadline if self.policy.alive else None
        end = min(moment for moment in (self._next_look, deadline, *moments) if moment is not None)
        while True:
            ready = select(max(0.0, min(end, hangs.due) - clock()))
            now = clock()
            asked = False
            if now >= hangs.due:
                hangs.glance(now)
                asked = self.attempt.lender.is_due(now)
            if ready or asked or now >= end:
                return {key.fileobj for key, _ in ready}

    def hear(self, ready: set[object]) -> list[Answer]:
        """Read the zygote's messages, act on those about ranks, and return them all."""
        if self.zygote not in ready:
            return []
        try:
            answers = self.zygote.receive()
        except EOFError:
            self.selector.unregister(self.zygote)
            return []
        for answer in answers:
            match answer:
                case Started(rank, pid) if rank >= 0:
                    self.policy.started(rank, pid)
                case Exited(rank, code, at, peak) if rank in self.policy.states:
                    self.attempt.keep_flight_recorder(rank, self.recorder.make_folder)
                    self.attempt.lender.ended(rank, self.policy.states[rank].pid)
                    agreed = self.attempt.has_agreed(code)
                    self.apply(self.policy.exited(rank, code, at, peak=peak, agreed=agreed))
        return answers

    def act(self, now: float) -> None:
        """Do what is due: compare the ranks once a second, lend the terminal, end ranks whose time is up, and show the
        messages that wait for their reader."""
        if self.attempt.lender.is_due(now):
            self._lend(now)
        if now >= self._next_look:
            self._next_look = now + knobs.times().heartbeat
            self._look(now)
        self.apply(self.policy.tick(now, telling=filter(self._is_telling, self.policy.alive)))
        for text in self._notifier.look(now):
            say(text)
        console.push()

    def notify(self, notice: Notice, text: str, *, code: str | None = None, exit_code: int | None = None) -> None:
        """Tell the command of ``--notify``, unless another machine's launcher does.

        Args:
            notice: the event.
            text: the event in words, for people.
            code: of the hang, the failure or the end.
            exit_code: the job's; None: it has not ended.
        """
        round_ = self.attempt.round
        if round_.node_rank:
            return
        folder = self.recorder.folder
        self._notifier.tell(
            notice,
            text,
            code=code,
            exit_code=exit_code,
            program=self.spec.program.words,
            folder=None if folder is None else str(folder),
            ranks=round_.world_size,
            restarts=round_.number,
            step=self.attempt.steps(round_.local_ranks[0])[0],
        )

    def finish_notices(self) -> None:
        """Wait until the command of ``--notify`` has been run for all events, each run within its limit."""
        for text in self._notifier.finish():
            say(text)

    def apply(self, orders: Iterable[Order]) -> None:
        """Have the zygote carry out what the policy says."""
        if self.policy.failing or self.policy.has_quit:
            self.attempt.tell_of_failure()
        for order in orders:
            self.zygote.signal(order.ranks, order.signum)

    def renew(self, round_: Round) -> Attempt:
        """Begin another attempt; the one before has ended.

        Raises:
            LaunchError: its files can't be written; the one before is still the last.
        """
        attempt = self._attempt(round_, number=self.attempt.number + 1)
        self._end_start()
        self._tell(self._end_trace())
        self.attempt.close()
        attempt.began = time.monotonic()  # the trace may have taken its time
        self.attempt = attempt
        self._record_start()
        return self.attempt

    def job_end(
        self, outcome: Outcome, kind: EndKind | None, *, failed_with: int, asked_listeners: bool
    ) -> closing.JobEnd:
        """Gather the facts that decide how the job ends here.

        Args:
            outcome: the last attempt's.
            kind: the reason why that is over, if it is known.
            failed_with: the exit code of the first rank that failed.
            asked_listeners: whether a signal to stop reached ranks that save and leave by themselves.
        """
        policy = self.policy
        return closing.JobEnd(
            kind=kind,
            failed_with=failed_with,
            stopped_by=policy.stopped_by,
            asked_listeners=asked_listeners,
            failing=policy.failing,
            saved=outcome.saved,
            completed=outcome.completed,
            done=policy.done,
        )

    def conclude(self, exit_code: int, *, end: RunEnd, word: str = "") -> list[str]:
        """End the record, and return what is left to say when all ranks have ended: that those who were late have moved
        on, and what the time went to if all is well, or how to go on from a checkpoint.

        Args:
            exit_code: the job's.
            end: how the job ended.
            word: the message about that end.
        """
        self._see_folder()
        said = self.attempt.hangs.ended(self.policy.states)
        for text in said:
            self.recorder.event("late", text, **self.attempt.hangs.facts())
        self._end_start()
        clock = self.recorder.clock
        summary = RunSummary.of(self._summaries, began=clock, lasted=time.monotonic() - clock)
        traced = self._end_trace()
        for text in traced:
            self.recorder.event("trace", text)
        said += traced
        alone = self.spec.rendezvous is None or (summary is not None and not summary.parts[-1].is_whole)
        speaks = self._speaks_for_all or alone
        if summary is not None and speaks and exit_code in (0, EXIT_SAVED) and not self.spec.quiet:
            told = summary.describe(self._peaks, price=self.spec.price, run=self.recorder.elsewhere)
            said.append("\n".join([told, *self.recorder.remarks()]))
        if end is RunEnd.FAILED and (step := self.recorder.last_checkpoint()) is not None:
            said.append(
                f"the last checkpoint is of step {step}\n{NEXT} run the same command again: with epochs() or restore() "
                "it resumes from the newest checkpoint that is sound"
            )
        self.recorder.end(exit_code=exit_code, summary=summary, peaks=self._peaks, end=end, word=word)
        return said

    def close(self) -> None:
        """End the zygote and everything below it, and release what was held."""
        self.selector.close()
        self.zygote.close()
        self.attempt.close()

    def _attempt(self, round_: Round, *, number: int) -> Attempt:
        spec = self.spec
        return Attempt(
            round_,
            home=self._home,
            number=number,
            grace=spec.grace,
            measures=spec.measures,
            binding=self._binding,
            terminal=self._terminal,
        )

    def _is_telling(self, rank: int) -> bool:
        """Return whether an exception has ended a rank's program, and is printed: it ignores SIGTERM meanwhile."""
        pid = self.policy.states[rank].pid
        return pid is not None and self.attempt.has_record(rank) and _proc.ignores(pid, signal.SIGTERM)

    def _respond(self, action: HangAction, now: float) -> None:
        """Do what ``--on-hang`` says about the report that stands."""
        attempt = self.attempt
        reported = attempt.hangs.reported
        assert reported is not None, "something is due about it"
        if action is HangAction.RESTART:
            attempt.stopped_for = reported
            self.apply(self.policy.failed(now))
            return
        try:
            text = self._on_hang.announce(attempt.dump(reported, self.recorder.make_folder()))
        except OSError as error:
            text = f"the report on the hang can't be written: {describe(error)}"
        say(text)
        self.recorder.event("hang", text)

    def _record_progress(self, now: float) -> None:
        hangs, states = self.attempt.hangs, self.policy.states
        progress = hangs.known(now) if self._speaks_for_all else hangs.progress()
        self.recorder.add(progress, {rank: state.pid for rank, state in states.items()})

    def _end_start(self) -> None:
        """Record what the ranks have done up to their end, and sum it up, also if they ended before their steps were
        ever looked at."""
        attempt, now = self.attempt, time.monotonic()
        before = attempt.steps_before(attempt.round.local_ranks[0])
        summary = attempt.hangs.summary(
            number=attempt.number,
            begin=attempt.began,
            machines=self._machines,
            restarts=attempt.round.number,
            before=before,
        )
        if summary is not None:
            self._summaries.append(summary)
        for rank, state in self.policy.states.items():
            self._peaks[rank] = max(self._peaks.get(rank) or 0, state.peak or 0) or None
        self._record_progress(now)
        self.recorder.end_start(attempt.hangs.taken, before=before)

    def _record_start(self) -> None:
        attempt = self.attempt
        self.recorder.begin(
            number=attempt.number,
            node=attempt.round.node_rank,
            world_size=attempt.round.world_size,
            ranks=range(attempt.round.world_size) if self._speaks_for_all else attempt.round.local_ranks,
            job_folder=attempt.folder,
            machines=self._machines,
            restarts=attempt.round.number,
            bound={
                rank: cpus
                for rank, local_rank in attempt.local_rank.items()
                if (cpus := attempt.binding.of(local_rank))
            },
        )
        self._tracer = Tracer(
            self.recorder.make_folder,
            home=attempt.folder,
            round_=attempt.round,
            asked=self.spec.trace,
        )

    def _end_trace(self) -> list[str]:
        """Write this start's trace, if a rank was started; return the messages for the user."""
        tracer, self._tracer = self._tracer, None
        states = self.policy.states.values()
        if tracer is None or all(state.pid is None for state in states):
            return []
        said = tracer.conclude(steps=min(self.attempt.steps(state.rank)[1] or 0 for state in states))
        self._note_trace(tracer)
        return said

    def _note_trace(self, tracer: Tracer) -> None:
        if tracer.written is not None:
            self.recorder.traced(tracer.written)
            tracer.written = None

    def _tell(self, texts: Iterable[str]) -> None:
        for text in texts:
            say(text)
            self.recorder.event("trace", text)

    @property
    def _machines(self) -> Sequence[tuple[str, int]]:
        """The machines of the job, and how many ranks each has; empty: this one is alone."""
        hosts, ranks = self.attempt.round.hosts, self.attempt.round.ranks
        return tuple(zip(hosts, ranks, strict=True)) if hosts else ()

    @property
    def _speaks_for_all(self) -> bool:
        """Whether this launcher hears of all ranks, and is the one that records them and sums up."""
        return self.spec.rendezvous is not None and self.attempt.round.node_rank == 0

    def _lend(self, now: float) -> None:
        """Say which rank is at a breakpoint, and lend it the terminal."""
        for text in self.attempt.lender.look(now):
            say(text)
            self.recorder.event("breakpoint", text)
        if (quit_by := self.attempt.lender.quit_by) is not None:
            self.apply(self.policy.quit(quit_by[0], now))
        self.attempt.lender.lend()

    def _see_folder(self) -> None:
        """Say once that the job's folder was removed. The job continues, but can report less about how it ends."""
        if not self._told_of_loss and not self.attempt.folder.is_dir():
            self._told_of_loss = True
            say(
                f"the job's folder {self.attempt.folder} was removed while the job runs. The job continues, but the "
                "files that its processes exchange there (errors of ranks, the rendezvous of groups) are lost"
            )

    def _look(self, now: float) -> None:
        """Say which rank is late, and end a job that is held up by a rank whose exception was recorded: that rank can't
        get out of a thread or a collective. Ranks that have saved have the grace period to leave."""
        if not self.policy.stopping and self.attempt.stop_note() is not None:
            self.policy.let_end(now)
        if not (self.policy.stopping or self.policy.done):
            hangs, states = self.attempt.hangs, self.policy.states
            for text in hangs.look(states, now, ask=self.zygote.signal):
                say(text)
                facts = hangs.facts()
                self.recorder.event("late", text, **facts)
                if hangs.reported is None or hangs.reported is not self._notified:
                    self.notify(Notice.MOVED_ON if facts["over"] else Notice.HANG, text, code=facts.get("code"))
                    self._notified = hangs.reported
            for action in self._on_hang.due(hangs.reported, now):
                self._respond(action, now)
            self._record_progress(now)
        if (holder := self.attempt.lender.holder) is not None:
            self.attempt.lender.give_again(self.policy.states[holder].pid)
        self._see_folder()
        if self._tracer is not None:
            self._tell(self._tracer.look())
            self._note_trace(self._tracer)
        for rank in self.policy.alive:
            record = self.attempt.record(rank)
            if record is not None and now - record.at > self.spec.grace:
                self.apply(self.policy.failed(now))
