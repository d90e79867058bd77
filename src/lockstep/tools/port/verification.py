"""Run ``lockstep verify`` on a script before and after it is ported, in separate processes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.launch import processes
from lockstep.tools.port.port import Port, port_text

#: The words that start lockstep's command.
COMMAND: Sequence[str] = (sys.executable, "-m", "lockstep")
_EQUAL = {"equal-bits", "equal-within-rounding", "equal-but-for-random-numbers"}


@dataclass(frozen=True)
class Verified:
    """The verdict of ``lockstep verify`` on a script.

    Args:
        which: ``before`` or ``after``.
        code: the verdict's code, or that of the error.
        words: the verdict, or the reason why there is none.
    """

    which: str
    code: str
    words: str

    @property
    def has_put_back(self) -> bool:
        """False if files are not as they were before the script ran; ``words`` is all that verify has said then."""
        return self.code != "not-put-back"

    @property
    def is_equal(self) -> bool:
        """True if N ranks train what one does."""
        return self.code in _EQUAL


@dataclass(frozen=True)
class VerifyRequest:
    """How scripts are verified.

    Args:
        ranks: the number of ranks that is compared with one, 2 or more.
        steps: optimizer steps that are compared.
        timeout: seconds for each of verify's runs.
        args: arguments of the script.
    """

    ranks: int
    steps: int
    timeout: float
    args: tuple[str, ...]


def verify_both(port: Port, request: VerifyRequest) -> list[Verified]:
    """Verify the script as it was, and a copy of the port beside it, which is removed afterwards.

    The copy is not run if what the script has changed could not be put back.

    In the copy, batch sizes that were per rank are those of ``request.ranks`` ranks: written as a multiple of the
    number of ranks, the global batch would differ between one rank and several, which verify compares.
    """
    after = port_text(port.before, port.path, ranks=request.ranks).after
    copy = port.path.with_name(f".{port.path.stem}-ported-{os.getpid()}.py")
    found = [_verify("before", port.path, request)]
    if not found[0].has_put_back:
        return found
    try:
        copy.write_text(after, encoding="utf-8")
        return [*found, _verify("after", copy, request)]
    finally:
        copy.unlink(missing_ok=True)


def _verify(which: str, script: Path, request: VerifyRequest) -> Verified:
    options = ["-n", request.ranks, "--steps", request.steps, "--timeout", request.timeout, "--json", "-"]
    command = [*COMMAND, "verify", *map(str, options), str(script), *request.args]
    # SIGTERM, also where this process is killed: verify puts back what the script has changed
    dies = functools.partial(processes.die_with_parent, os.getpid(), by=signal.SIGTERM)
    with subprocess.Popen(
        command,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=dies,
    ) as process:
        try:
            out, err = process.communicate()
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or another signal that ends the command
            _tell(_leave(process))
            raise
    try:
        told = json.loads(out)
    except json.JSONDecodeError:
        lines = (err.strip() or f"exit code {process.returncode}").splitlines()
        return Verified(which, "cannot-verify", f"could not be verified: {lines[-1]}")
    if "verdict" not in told:
        found = Verified(which, told["code"], f"could not be verified: {' '.join(told['message'].split())}")
        return found if found.has_put_back else replace(found, words=err.rstrip())  # with commands, a line each
    reasons = [reason["cause"] for each in told["contrasts"] for reason in each["reasons"]]
    more = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
    return Verified(which, told["code"], f"one rank and {request.ranks}: {told['verdict']}{more}")


def _leave(process: subprocess.Popen[str]) -> str:
    """End verify, and return what it has said: it puts back what the script has changed, or tells where copies are."""
    # (Another signal would end the command, and what verify says.)
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in processes.STOPPING}
    try:
        process.terminate()
        _tell("ending lockstep verify, which puts back the files that the script has changed\n")
        return process.communicate()[1]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _tell(text: str) -> None:
    with suppress(OSError):  # the terminal is gone, which has sent the signal
        print(text, end="", file=sys.stderr, flush=True)
