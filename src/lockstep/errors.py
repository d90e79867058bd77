"""The exceptions lockstep raises, in one tree.

::

    LockstepError                  anything lockstep itself reports (a RuntimeError)
    ├── EnvironmentMismatch        the environment variables do not describe a world
    ├── RendezvousError            the ranks could not meet: port in use, peer missing, backend refused
    ├── CollectiveTimeout          a rank did not arrive in time; the late ranks are named (a TimeoutError)
    ├── CollectiveMismatch         the ranks are in different collectives, or in one with different arguments
    ├── PeerLost                   a rank is gone while others wait for it (a ConnectionError)
    ├── ReplicaMismatch            the replicas differ: in names, shapes or dtypes, or later in what they hold
    ├── NonFiniteGradient          a rank holds an infinite or NaN gradient before averaging
    ├── NoTerminal                 a rank is at a breakpoint, and nobody could give its debugger a command
    ├── LaunchError                a job could not be started
    │   └── RankFailed             a rank ended with an error; it carries the rank and its traceback
    ├── CellFailed                 a cell ended with an error on some rank, and the ranks live on
    └── CheckpointError            a checkpoint can't be written or used
        ├── CheckpointCorrupt      a digest, a size or the manifest does not match
        └── CheckpointMismatch     the checkpoint is of another model, optimizer or world

Wrong arguments are ``ValueError`` or ``TypeError``, as everywhere in Python; a cell that a user interrupts ends by a
``KeyboardInterrupt`` (:class:`CellInterrupted`).
"""

from __future__ import annotations

from typing import ClassVar


class LockstepError(RuntimeError):
    """The base class of all errors that lockstep itself reports."""

    #: The name of this kind of error for programs; see docs/codes.md. Every class has one of its own.
    code: ClassVar[str] = "lockstep-error"


class EnvironmentMismatch(LockstepError):
    """The environment variables do not describe a world."""

    code = "environment-mismatch"


class RendezvousError(LockstepError):
    """The ranks could not meet."""

    code = "rendezvous-error"


class CollectiveTimeout(LockstepError, TimeoutError):
    """A rank did not arrive at a collective in time."""

    code = "collective-timeout"


class CollectiveMismatch(LockstepError):
    """The ranks are in different collectives, or in one with different arguments."""

    code = "collective-mismatch"


class PeerLost(LockstepError, ConnectionError):
    """A rank is gone while others wait for it."""

    code = "peer-lost"


class ReplicaMismatch(LockstepError):
    """The replicas differ: in a parameter's name, shape or dtype, or in what they hold while they train."""

    code = "replica-mismatch"


class NonFiniteGradient(LockstepError):
    """A rank holds an infinite or NaN gradient before averaging."""

    code = "non-finite-gradient"


class NoTerminal(LockstepError):
    """A rank is at a breakpoint, and nobody could give its debugger a command."""

    code = "no-terminal"


class LaunchError(LockstepError):
    """A job could not be started."""

    code = "launch-error"


class RankFailed(LaunchError):
    """A rank of a job ended with an error."""

    code = "rank-failed"

    def __init__(self, message: str, *, rank: int, exit_code: int, traceback: str | None = None) -> None:
        super().__init__(message)
        #: The rank that ended.
        self.rank = rank
        #: The exit code as a shell reports it: for a signal, 128 + its number.
        self.exit_code = exit_code
        #: The rank's own traceback, or None if it ended without a Python exception.
        self.traceback = traceback


class CellFailed(LockstepError):
    """A cell ended with an error on some rank; the ranks live on, with their variables."""

    code = "cell-failed"

    def __init__(self, message: str, *, rank: int, errors: dict[int, str]) -> None:
        super().__init__(message)
        #: The rank whose error came first.
        self.rank = rank
        #: Rank -> its own traceback, for all ranks that raised an error.
        self.errors = errors


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted on its ranks, which live on, with their variables."""

    def __init__(self, message: str, *, traceback: str) -> None:
        super().__init__(message)
        #: Where the first rank that was interrupted was: its own traceback.
        self.traceback = traceback


class CheckpointError(LockstepError):
    """A checkpoint can't be written or used."""

    code = "checkpoint-error"


class CheckpointCorrupt(CheckpointError):
    """A digest, a size or the manifest of a checkpoint does not match."""

    code = "checkpoint-corrupt"


class CheckpointMismatch(CheckpointError):
    """A checkpoint is of another model, optimizer or world."""

    code = "checkpoint-mismatch"


def said(thing: object) -> str:
    """Return ``str(thing)``, in the words of Python's own tracebacks if that fails.

    An exception's ``__str__`` is code of the user's program; whatever it raises must not hide the exception itself.
    """
    try:
        return str(thing)
    except BaseException:  # noqa: BLE001  (see above)
        return f"<{type(thing).__name__} str() failed>"


def code_of(error: BaseException) -> str | None:
    """Return the code of an error of lockstep's; None: it is another's. A class of a user's that derives from one of
    ours, whatever ``code`` is there, has the code of ours."""
    if not isinstance(error, LockstepError):
        return None
    ours = next(each for each in type(error).__mro__ if each.__module__.partition(".")[0] == "lockstep")
    return str(vars(ours)["code"])


def named(error: BaseException) -> str:
    """Return an error's type and message: ``ValueError: bad batch``."""
    return f"{type(error).__name__}: {said(error)}"


for _error in [each for each in vars().values() if isinstance(each, type) and issubclass(each, LockstepError)]:
    _error.__module__ = "lockstep"  # tracebacks show the name that users import
CellInterrupted.__module__ = "lockstep"
