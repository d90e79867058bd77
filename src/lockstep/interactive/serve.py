"""Run cells on a rank, one after the other, in one namespace that lives as long as the rank.

A thread reads the program's requests; the main thread runs the cells, since only it can be interrupted, and since what
a user calls there (signals, matplotlib, asyncio) may need it.
"""

from __future__ import annotations
import __future__

import ast
import base64
import contextlib
import ctypes
import io
import linecache
import os
import queue
import re
import socket
import sys
import threading
import time
import tokenize
import types
from dataclasses import asdict
from types import CodeType
from typing import NoReturn

from lockstep import tracebacks
from lockstep.errors import named, said
from lockstep.interactive import sink
from lockstep.interactive.interrupt import CellInterrupts
from lockstep.interactive.messages import (
    CellEnded,
    CellError,
    FigureDrawn,
    FreeWaiting,
    GroupsDone,
    InterruptCell,
    RenewGroups,
    Report,
    Request,
    RunCell,
    StopGroups,
)
from lockstep.job import flight
from lockstep.job.messages import Channel
from lockstep.job.page import Phase
from lockstep.launch import by_value
from lockstep.launch.returned import send

#: The most characters of a value, a message or a traceback that are sent.
_LONGEST = 50_000
#: matplotlib's backend, which matplotlib imports.
_FIGURES = "lockstep.interactive.figures"
#: The compiler flags that ``from __future__ import …`` sets for the code that follows.
_FUTURES = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
#: Lines that only IPython understands.
_OF_IPYTHON = re.compile(r"\s*([\w, ]+=\s*)?[!%?]|.*\?\s*$")


def serve(rank: int, endpoint: socket.socket) -> None:
    """Carry out the program's requests until it closes its end of the socket.

    Args:
        rank: this rank.
        endpoint: this rank's end.
    """
    _CellRunner(rank, Channel(endpoint, Request.__args__)).run()


class _CellRunner:
    def __init__(self, rank: int, channel: Channel[Request]) -> None:
        self._rank = rank
        self._channel, self._sending = channel, threading.Lock()
        #: The next request for the main thread, with its descriptors; None: leave.
        self._tasks: queue.SimpleQueue[tuple[Request, list[int]] | None] = queue.SimpleQueue()
        self._interrupts = CellInterrupts()
        self._main = types.ModuleType("__main__")
        vars(self._main)["__builtins__"] = sys.modules["builtins"]
        #: The compiler flags of what the cells so far have imported from __future__.
        self._flags = 0

    def run(self) -> None:
        if self._rank == 0:
            sink.show_png = self._show_png
        os.environ["MPLBACKEND"] = f"module://{_FIGURES}"  # a kernel's own, which it hands on, needs the kernel
        sys.modules["__main__"] = self._main
        sys.argv[:] = [""]
        threading.Thread(target=self._listen, name="lockstep-cells", daemon=True).start()
        while (task := self._tasks.get()) is not None:
            request, fds = task
            match request:
                case RunCell():
                    self._tell(self._run_cell(request, fds))
                case StopGroups(reason):
                    self._tell(_stop_groups(reason))
                case RenewGroups():
                    self._tell(_renew_groups())

    def _listen(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                for request, fds in self._channel.receive():
                    match request:
                        case InterruptCell(number, at_once):
                            self._interrupts.ask(number, at_once=at_once)
                        case FreeWaiting(reason):
                            _free(reason)
                        case _:
                            self._tasks.put((request, fds))
        self._tasks.put(None)

    def _tell(self, report: Report) -> None:
        """Send a report as a whole: an interrupt waits meanwhile, and so do other threads of a cell."""
        with (
            contextlib.suppress(BrokenPipeError, ConnectionResetError),  # the program has gone: the zygote ends us
            self._interrupts.held(),
            self._sending,
        ):
            self._channel.send(report)

    def _show_png(self, png: bytes) -> None:
        self._tell(FigureDrawn(base64.b64encode(png).decode()))

    def _run_cell(self, cell: RunCell, fds: list[int]) -> CellEnded:
        shown: str | None = None
        error: CellError | None = None
        flight.current.enter(Phase.OWN)
        try:
            with self._interrupts.during(cell.number):
                value = self._execute(cell)
                _show_figures()
                if value is not None and fds:
                    shown = _shortened(_shown(value))
                    send(fds.pop(), value, by_value=by_value.is_available())
        except BaseException as raised:  # noqa: BLE001  (the program raises it, whatever it is)
            error, shown = _told(raised), None
        finally:
            for fd in fds:
                os.close(fd)
            _flush()
        return CellEnded(shown, None if error is None else asdict(error), _standing())

    def _execute(self, cell: RunCell) -> object:
        """Run a cell, and return the value of its last line if that is an expression."""
        name = f"<cell {cell.number}>"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)  # for tracebacks and inspect
        body, last = _compiled(cell.source, name, self._flags)
        self._flags = _futures(body, self._flags)
        namespace, pid = vars(self._main), os.getpid()
        try:
            exec(body, namespace)
            return None if last is None else eval(last, namespace)
        finally:
            if os.getpid() != pid:
                _end_fork(sys.exc_info()[1])


def _end_fork(error: BaseException | None) -> NoReturn:
    """End a process that a cell has forked, at the end of the cell, as it would have at the end of a script. It is not
    a rank, and only the rank reports the cell's value and end."""
    code = 0
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        sys.stderr.write(_told(error).traceback)
        code = 1
    _flush()
    os._exit(code)


def _compiled(source: str, name: str, flags: int = 0) -> tuple[CodeType, CodeType | None]:
    """Return the code of a cell, and that of its last line if that is an expression whose value is wanted; a semicolon
    behind it says that it is not, as in IPython.

    Args:
        source: the cell.
        name: the name that is used for its file.
        flags: the compiler's, of what was imported from ``__future__`` before.
    """
    try:
        tree = ast.parse(source, name)
        final = tree.body[-1] if tree.body else None
        wanted = isinstance(final, ast.Expr) and not _ends_with_semicolon(source)
        if wanted:
            tree.body.pop()
        body, last = compile(tree, name, "exec", flags, dont_inherit=True), None
        if isinstance(final, ast.Expr) and wanted:
            last = compile(ast.Expression(final.value), name, "eval", _futures(body, flags), dont_inherit=True)
        return body, last
    except SyntaxError as error:
        if _OF_IPYTHON.match(error.text or ""):
            error.msg += " (a cell on ranks is plain Python: no magics and no !commands; subprocess.run runs a command)"
        elif re.search(r"a(wait|sync).* outside ", error.msg):
            error.msg += " (a cell on ranks is plain Python: asyncio.run(…) runs a coroutine)"
        raise error.with_traceback(None) from None


def _futures(code: CodeType, flags: int) -> int:
    """Return the compiler's flags for code that follows."""
    for feature in _FUTURES:
        flags |= code.co_flags & feature
    return flags


def _ends_with_semicolon(source: str) -> bool:
    """Return whether the last token of a program is one."""
    left_out = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = [token.exact_type for token in tokens if token.type not in left_out]
    return said[-1:] == [tokenize.SEMI]


def _shown(value: object) -> str:
    """Return a value as Python shows it; that runs code of the user's, whose error must not lose the value."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001
        return f"<{type(value).__name__}, whose repr() raises {named(error)}>"


def _told(error: BaseException) -> CellError:
    at = time.monotonic()
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, contextlib.__file__):
        tb = tb.tb_next
    error.__traceback__ = tb
    if tb is not None:
        tracebacks.fold(error)
    kind, home = type(error).__qualname__, type(error).__module__
    name = kind if home in ("builtins", "__main__") else f"{home}.{kind}"
    return CellError(name, _shortened(said(error)), _shortened(tracebacks.text(error, in_memory=True)), at)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _show_figures() -> None:
    """Show the figures that are still open, if matplotlib has been used."""
    figures = sys.modules.get(_FIGURES)
    if figures is not None:
        figures.show_all()


def _flush() -> None:
    """Write out what Python and C still hold, so that the output comes before the cell's end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, None or the program's own
            stream.flush()
    ctypes.CDLL(None).fflush(None)


# The process groups, which only a rank with torch has -----------------------------------------------------------------


def _has_groups() -> bool:
    return "lockstep.comm.init" in sys.modules and "torch.distributed" in sys.modules


def _standing() -> dict[str, list[int]]:
    if not _has_groups():
        return {}
    from lockstep.comm import renewal

    return renewal.standing()


def _free(reason: str) -> None:
    if _has_groups():
        from lockstep.comm import renewal

        renewal.free(reason)


def _stop_groups(reason: str) -> GroupsDone:
    from lockstep.comm import renewal

    try:
        renewal.stop(reason)
    except Exception as error:  # noqa: BLE001  (the program is told, whatever it is)
        return GroupsDone("", named(error))
    return GroupsDone("", "")


def _renew_groups() -> GroupsDone:
    from lockstep.comm import renewal

    try:
        return GroupsDone(renewal.renew(), "")
    except Exception as error:  # noqa: BLE001  (the program is told, whatever it is)
        return GroupsDone("", named(error))
