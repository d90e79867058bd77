"""Every ``LOCKSTEP_*`` environment variable: its name, its meaning, and the one place that reads it.

====================== ==========================================================================
``LOCKSTEP_STORE``     path of the rendezvous file; set by the launcher on one host, so that no
                       port is opened. Absent: ``MASTER_ADDR`` and ``MASTER_PORT`` are used.
``LOCKSTEP_JOB_DIR``   the job's private folder (0700), where a rank leaves its failure record.
``LOCKSTEP_RANK_PROCESS`` the process that the launcher started as this rank, and the rank's place; inherited by
                       its child processes.
``LOCKSTEP_JOINED``    the process that has joined the world as this rank, and the rank's place: set by
                       ``lockstep.init()`` for its child processes, which can't be this rank as well.
``LOCKSTEP_RESTART``   the number of times that the launcher has restarted the ranks of this job.
``LOCKSTEP_ROUND``     the job, and the number of its round, where several machines have met; set by the launcher.
``LOCKSTEP_WORLD``     the scheduler's name for the ranks that are one world, where it has one (Slurm's step):
                       ranks of another world, which meet at the same port, are refused.
``LOCKSTEP_PRELOAD``   modules, with commas between, that the launcher imports once before it forks
                       the ranks, in place of torch and lockstep; for programs that always need
                       more (``torch,torchvision``), or less. Empty: none.
``LOCKSTEP_BACKEND``   the backend for a ``lockstep.init()`` that does not name one, in place of the
                       one that fits the machine.
``LOCKSTEP_TIMEOUT``   seconds a collective may wait; overrides the default of ``lockstep.init``
                       (an explicit ``timeout=`` argument wins).
``LOCKSTEP_KEEP_MEMORY`` 0: leave the C library's allocator alone. By default a rank that trains on
                       the CPU keeps the memory that it frees, up to a GiB.
``LOCKSTEP_SHM_CHUNK`` bytes that a rank shares at a time over the backend "shm" (three such
                       stages per rank); for tests, and for machines whose caches differ much.
``LOCKSTEP_LATE``      seconds that a rank may hold up the others before ``lockstep run`` says so, where ten
                       steps take less. 5 by default.
``LOCKSTEP_TIMES``     for tests: how long the product waits, as ``lockstep/times.py`` says; ``0.2`` shortens every
                       pause, ``silent=1.5`` is one time by its name.
``LOCKSTEP_QUIET``     1: leave out the summary at the end of ``lockstep.spawn``, and of ``lockstep run``, which
                       also has ``--quiet``.
``LOCKSTEP_TRACE``     STEPS or STEPS:FROM, e.g. 20:100: trace the ranks for STEPS steps, after FROM (10) steps
                       of a start, as ``lockstep run --trace`` does; for ``lockstep.spawn``.
``LOCKSTEP_BIND``      auto, none, numa or cores: the cores that ranks are bound to, as by ``lockstep run --bind``; for
                       ``lockstep.spawn``.
``LOCKSTEP_CORES``     the number of cores that the ranks of a machine share, set by the launcher for ranks that it
                       has bound: each of them sees only its own.
``LOCKSTEP_FLOPS``     1: count the FLOPs of one step of each rank, as ``lockstep run --flops`` does. By default 0.
``LOCKSTEP_PEAK_FLOPS`` FLOPs a second of one rank's device at its peak, e.g. 989T: count the FLOPs of a step, and say
                       which part of this peak they are, as ``lockstep run --peak-flops`` does.
``LOCKSTEP_EVALUATION`` the file that names the checkpoint which this process evaluates; set by ``lockstep evaluate``,
                       and read by ``lockstep.Evaluation``.
``LOCKSTEP_KEY``       32 random bytes as hexadecimal digits, or the path of a file (0600) that holds them: machines
                       that meet by ``--rdzv`` prove to each other that they know it.
``LOCKSTEP_SSH``       the ssh client for ``lockstep run --hosts``, with options if need be (``ssh -F FILE``). By
                       default ssh.
``LOCKSTEP_TRACEBACK`` full: the traceback of a rank's error has the frames of lockstep and torch
                       too, and its chained errors. By default only the user's own.
====================== ==========================================================================
"""

from __future__ import annotations

import functools
import os
import re
import shlex
from collections.abc import Mapping

from lockstep.errors import EnvironmentMismatch
from lockstep.text import parse_amount
from lockstep.times import Times, positive

STORE = "LOCKSTEP_STORE"
JOB_DIR = "LOCKSTEP_JOB_DIR"
RANK_PROCESS = "LOCKSTEP_RANK_PROCESS"
JOINED = "LOCKSTEP_JOINED"
RESTART = "LOCKSTEP_RESTART"
ROUND = "LOCKSTEP_ROUND"
WORLD = "LOCKSTEP_WORLD"
PRELOAD = "LOCKSTEP_PRELOAD"
BACKEND = "LOCKSTEP_BACKEND"
TIMEOUT = "LOCKSTEP_TIMEOUT"
KEEP_MEMORY = "LOCKSTEP_KEEP_MEMORY"
SHM_CHUNK = "LOCKSTEP_SHM_CHUNK"
LATE = "LOCKSTEP_LATE"
TIMES = "LOCKSTEP_TIMES"
QUIET = "LOCKSTEP_QUIET"
TRACE = "LOCKSTEP_TRACE"
BIND = "LOCKSTEP_BIND"
CORES = "LOCKSTEP_CORES"
FLOPS = "LOCKSTEP_FLOPS"
PEAK_FLOPS = "LOCKSTEP_PEAK_FLOPS"
EVALUATION = "LOCKSTEP_EVALUATION"
KEY = "LOCKSTEP_KEY"
SSH = "LOCKSTEP_SSH"
TRACEBACK = "LOCKSTEP_TRACEBACK"

#: The variables that the user sets and that mean the same on every machine.
PASSED_ON = (
    PRELOAD,
    BACKEND,
    TIMEOUT,
    KEEP_MEMORY,
    SHM_CHUNK,
    LATE,
    TIMES,
    QUIET,
    TRACE,
    BIND,
    FLOPS,
    PEAK_FLOPS,
    TRACEBACK,
)

#: The variables that the launcher sets for its ranks, and a rank for its child processes.
OF_A_RANK = (STORE, JOB_DIR, RANK_PROCESS, JOINED, RESTART, ROUND, WORLD, CORES)

_DIGITS = re.compile("[0-9a-fA-F]{64}")

#: What ``LOCKSTEP_BIND`` may be.
BINDS = ("auto", "none", "numa", "cores")

#: Default of the seconds that a collective may wait before it is an error.
DEFAULT_TIMEOUT = 600.0

#: Default number of steps that a rank takes before the traced ones.
DEFAULT_TRACE_FROM = 10

#: STEPS and FROM for a run without a requested trace: ``lockstep runs plan`` needs the 20 steps between 21 averages.
TRACED_ANYWAY = 21, DEFAULT_TRACE_FROM

#: The most steps that can be traced: no viewer opens a larger file.
MOST_TRACED = 10_000

#: Default bytes of a stage of the backend "shm": three per rank fit into the L2 cache of common machines.
DEFAULT_SHM_CHUNK = 512 * 1024


def names() -> frozenset[str]:
    """Return the names of all variables in this file."""
    prefix = "LOCKSTEP_"
    return frozenset(value for value in globals().values() if isinstance(value, str) and value.startswith(prefix))


def bad_values(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that has an invalid value."""
    found = []
    for read in (keep_memory, timeout, times, late, trace, bind, flops, peak_flops, key, ssh, shm_chunk):
        try:
            read(env)
        except EnvironmentMismatch as error:
            found.append(str(error))
    return found


def chosen(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that the user has set and that affect a job, with their values; none is a secret."""
    return {name: env[name] for name in PASSED_ON if name in env}


def store(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the rendezvous file, or None."""
    return env.get(STORE) or None


def world(env: Mapping[str, str] = os.environ) -> str:
    """Return the scheduler's name for this rank's world, or the empty string."""
    return env.get(WORLD, "")


def job_dir(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the job's private folder, or None if the launcher gave none."""
    return env.get(JOB_DIR) or None


def rank_process(env: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the process that lockstep's launcher started as this rank, and the rank's identity, or None."""
    return _process(env, RANK_PROCESS)


def joined(env: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """Return the process that has joined a world as this rank, and its identity there; None if none has."""
    return _process(env, JOINED)


def _process(env: Mapping[str, str], name: str) -> tuple[int, str] | None:
    process, _, place = env.get(name, "").partition(" ")
    return (int(process), place) if process.isdecimal() else None


def round_(env: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the job and the number of its round if several machines have met, otherwise None."""
    job, _, number = env.get(ROUND, "").partition(" ")
    return (job, int(number)) if number.isdecimal() else None


def preload(env: Mapping[str, str] = os.environ) -> tuple[str, ...] | None:
    """Return the modules that the launcher imports before it forks, or None if the user has not set them."""
    text = env.get(PRELOAD)
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def backend(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the default backend, or None."""
    return env.get(BACKEND) or None


def keep_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether to keep freed memory.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_KEEP_MEMORY`` is neither 0 nor 1.
    """
    text = env.get(KEEP_MEMORY, "1")
    if text not in ("0", "1"):
        raise EnvironmentMismatch(f"{KEEP_MEMORY}={text!r}: expected 0 or 1")
    return text == "1"


def timeout(env: Mapping[str, str] = os.environ) -> float:
    """Return the seconds a collective may wait.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_TIMEOUT`` is not a positive number.
    """
    return _seconds(env, TIMEOUT, DEFAULT_TIMEOUT)


def late(env: Mapping[str, str] = os.environ) -> float:
    """Return the seconds that a rank may hold up the others before the launcher reports it.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_LATE`` is not a positive number, or ``LOCKSTEP_TIMES`` is invalid.
    """
    return _seconds(env, LATE, times(env).late)


def times(env: Mapping[str, str] = os.environ) -> Times:
    """Return the product's pauses and limits. A call costs a microsecond: make it where the process is about to wait.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_TIMES`` is invalid.
    """
    return _times(env.get(TIMES, ""))


@functools.lru_cache(maxsize=4)
def _times(text: str) -> Times:
    try:
        return Times.parse(text)
    except ValueError as error:
        raise EnvironmentMismatch(f"{TIMES}={text}: {error}") from None


def quiet(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether to leave out the summary at the end: ``LOCKSTEP_QUIET`` is neither empty nor 0."""
    return env.get(QUIET, "") not in ("", "0")


def trace(env: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the number of steps to trace and the number of steps before them; None if there is no trace.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_TRACE`` is invalid.
    """
    text = env.get(TRACE, "")
    try:
        return parse_trace(text) if text else None
    except ValueError as error:
        raise EnvironmentMismatch(f"{TRACE}={text}: {error}") from None


def parse_trace(text: str) -> tuple[int, int]:
    """Return the number of steps that ``STEPS[:FROM]`` asks for, and the number of steps before them.

    Raises:
        ValueError: ``text`` is not of this form; the message says what is expected.
    """
    steps, colon, first = text.partition(":")
    if not (steps.isdecimal() and (first.isdecimal() or not colon) and 0 < int(steps) <= MOST_TRACED):
        raise ValueError(
            f"expected STEPS or STEPS:FROM, whole numbers, STEPS from 1 to {MOST_TRACED}, e.g. 20:100 for the 20 steps "
            "that follow the first 100"
        )
    return int(steps), int(first) if colon else DEFAULT_TRACE_FROM


def bind(env: Mapping[str, str] = os.environ) -> str:
    """Return to which cores the launcher binds the ranks: one of :data:`BINDS`.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_BIND`` is another.
    """
    text = env.get(BIND) or BINDS[0]
    if text not in BINDS:
        raise EnvironmentMismatch(f"{BIND}={text!r}: expected {', '.join(BINDS[:-1])} or {BINDS[-1]}")
    return text


def cores(env: Mapping[str, str] = os.environ) -> int | None:
    """Return how many cores the ranks of this machine share, if the launcher has bound this one to some of them."""
    text = env.get(CORES, "")
    return int(text) if text.isdecimal() else None


def flops(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether to count the FLOPs of a step.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_FLOPS`` is neither 0 nor 1.
    """
    text = env.get(FLOPS) or "0"
    if text not in ("0", "1"):
        raise EnvironmentMismatch(f"{FLOPS}={text!r}: expected 0 or 1")
    return text == "1" or peak_flops(env) is not None


def peak_flops(env: Mapping[str, str] = os.environ) -> float | None:
    """Return the FLOPs a second of one rank's device at its peak; None: the user has not said.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_PEAK_FLOPS`` is no such number.
    """
    text = env.get(PEAK_FLOPS, "")
    try:
        return parse_peak(text) if text else None
    except ValueError as error:
        raise EnvironmentMismatch(f"{PEAK_FLOPS}={text}: {error}") from None


def parse_peak(text: str) -> float:
    """Return the FLOPs a second that ``989T``, ``1.5P`` or ``312e12`` says.

    Raises:
        ValueError: it says none.
    """
    found = parse_amount(text)
    if found is None:
        raise ValueError("expected the FLOPs a second of one rank's device at its peak, such as 989T or 1.5P")
    return found


def evaluation(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the file that names the checkpoint which this process evaluates, or None."""
    return env.get(EVALUATION) or None


def key(env: Mapping[str, str] = os.environ) -> str:
    """Return the job's key as hexadecimal digits; empty if there is none.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_KEY`` is neither 64 hexadecimal digits nor a file that holds them and that
            only its owner can read.
    """
    text = env.get(KEY, "")
    if not text or _DIGITS.fullmatch(text):
        return text
    try:
        with open(text) as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise EnvironmentMismatch(f"{KEY}={text}: others can read it; chmod 600 {text}, and make a new key")
            digits = file.read(100).strip()
    except OSError as error:
        raise EnvironmentMismatch(
            f"{KEY} is neither 64 hexadecimal digits nor a file that can be read ({error.strerror}): make one with "
            "openssl rand -hex 32"
        ) from None
    if not _DIGITS.fullmatch(digits):
        raise EnvironmentMismatch(f"{KEY}={text}: expected a file of 64 hexadecimal digits (openssl rand -hex 32)")
    return digits


def ssh(env: Mapping[str, str] = os.environ) -> list[str]:
    """Return the command line of the ssh client, to which options may be appended.

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_SSH`` has an unclosed quote.
    """
    try:
        return shlex.split(env.get(SSH, "")) or ["ssh"]
    except ValueError as error:
        raise EnvironmentMismatch(
            f"{SSH}={env[SSH]!r}: {error}; expected a command, e.g. {SSH}='ssh -F FILE'"
        ) from None


def full_traceback(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether tracebacks keep the frames of lockstep and torch."""
    return env.get(TRACEBACK) == "full"


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        return positive(text)
    except ValueError:
        raise EnvironmentMismatch(
            f"{name}={text!r}: expected a positive number of seconds, e.g. {name}={default:g}"
        ) from None


def shm_chunk(env: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of a stage of the backend "shm".

    Raises:
        EnvironmentMismatch: ``LOCKSTEP_SHM_CHUNK`` is not a positive multiple of 64.
    """
    text = env.get(SHM_CHUNK)
    if text is None:
        return DEFAULT_SHM_CHUNK
    if not text.isdecimal() or int(text) <= 0 or int(text) % 64:
        raise EnvironmentMismatch(f"{SHM_CHUNK}={text!r}: expected a positive multiple of 64, e.g. {SHM_CHUNK}=524288")
    return int(text)
