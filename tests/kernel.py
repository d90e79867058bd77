"""Run cells in a real kernel: ``python -m tests.kernel`` reads steps as JSON, and writes what came of each as JSON.

A process of its own, since a kernel's client keeps threads and sockets that a test must not leave behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
#: Seconds that a cell, or the end of a kernel, may take.
_LIMIT = 200.0


@dataclass(frozen=True)
class Step:
    """A cell to execute, or what is to become of the kernel.

    Args:
        code: the cell; ``kill``, ``restart``, ``shutdown``: the kernel is killed, started anew or asked to end.
        interrupt_at: what the cell prints when it is to be interrupted, as by the button; empty: it is not.
    """

    code: str
    interrupt_at: str = ""


@dataclass
class Shown:
    """What a cell showed."""

    ok: bool
    stdout: str = ""
    stderr: str = ""
    #: The value of the last line as text, and what was displayed, by MIME type.
    value: str | None = None
    displayed: list[dict[str, str]] = field(default_factory=list)
    #: What the user sees of an error.
    error: str = ""


def execute(steps: list[Step | str], *, cwd: Path, **env: str) -> list[Shown]:
    """Execute cells in one kernel, one after the other, and end it."""
    asked = json.dumps([asdict(step if isinstance(step, Step) else Step(step)) for step in steps])
    return [Shown(**each) for each in json.loads(_run_here([], asked, cwd, env))]


def execute_notebook(notebook: Path, *, cwd: Path, **env: str) -> Any:
    """Execute a notebook that jupytext reads, as nbclient does, and return it as nbformat does.

    Raises AssertionError with the error if a cell fails that is not marked ``raises-exception``.
    """
    import nbformat

    return nbformat.reads(_run_here([str(notebook)], "", cwd, env), as_version=4)  # type: ignore[no-untyped-call]


def _run_here(arguments: list[str], given: str, cwd: Path, env: dict[str, str]) -> str:
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel", *arguments],
        input=given,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "IPYTHONDIR": str(cwd / "ipython")} | env,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _main(notebooks: list[str]) -> None:
    from jupyter_client.manager import KernelManager

    with tempfile.TemporaryDirectory() as folder:
        manager = KernelManager(transport="ipc", ip=f"{folder}/k", connection_file=f"{folder}/kernel.json")
        for notebook in notebooks:
            _print_executed(notebook, manager)
        if not notebooks:
            print(json.dumps(_found(json.load(sys.stdin), manager)))


def _print_executed(notebook: str, manager: Any) -> None:
    import jupytext
    import nbclient
    import nbformat

    read = jupytext.read(notebook)
    # (nbclient asks a manager for a client that it can await.)
    manager.client_factory = "jupyter_client.asynchronous.AsyncKernelClient"
    nbclient.NotebookClient(read, km=manager, timeout=int(_LIMIT)).execute()
    print(nbformat.writes(read))  # type: ignore[no-untyped-call]


def _found(steps: list[dict[str, str]], manager: Any) -> list[dict[str, Any]]:
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=_LIMIT)
    found = []
    try:
        for step in steps:
            if step["code"] in ("kill", "restart", "shutdown"):
                _end(step["code"], manager, client)
            else:
                found.append(asdict(_run(step, manager, client)))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return found


def _end(how: str, manager: Any, client: Any) -> None:
    if how == "kill":
        manager.provisioner.process.send_signal(signal.SIGKILL)
        manager.provisioner.process.wait(_LIMIT)
    elif how == "shutdown":
        client.shutdown(reply=True, timeout=_LIMIT)
        manager.provisioner.process.wait(_LIMIT)
    else:
        manager.restart_kernel()
        client.wait_for_ready(timeout=_LIMIT)


def _run(step: dict[str, str], manager: Any, client: Any) -> Shown:
    shown = Shown(ok=True)

    def hear(message: Any) -> None:
        content = message["content"]
        match message["msg_type"]:
            case "stream":
                vars(shown)[content["name"]] += content["text"]
                if step["interrupt_at"] and step["interrupt_at"] in shown.stdout:
                    step["interrupt_at"] = ""
                    manager.interrupt_kernel()
            case "execute_result":
                shown.value = content["data"]["text/plain"]
            case "display_data":
                shown.displayed.append(content["data"])
            case "error":
                shown.error = "\n".join(content["traceback"])

    reply = client.execute_interactive(step["code"], output_hook=hear, timeout=_LIMIT, stop_on_error=False)
    shown.ok = reply["content"]["status"] == "ok"
    return shown


if __name__ == "__main__":
    _main(sys.argv[1:])
