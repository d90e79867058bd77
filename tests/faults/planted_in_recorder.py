"""Faults to plant in what finds a rank that holds up the others."""

from __future__ import annotations

from tests.faults.planting import Fault

_STACKS = ("tests/unit/test_thread_stacks.py",)
_PAGES = ("tests/unit/test_job_pages.py",)

RECORDER_FAULTS = [
    Fault(
        "a rank is late as soon as the first of the others waits for it",
        "job/hang.py",
        "    since = max(waits.values())\n",
        "    since = min(waits.values())\n",
        ("tests/unit/test_job_hang.py",),
    ),
    Fault(
        "a wait that fails counts as one that ended",
        "job/flight.py",
        "        if self._depth == 0 and not failed:\n",
        "        if self._depth == 0:\n",
        _PAGES,
    ),
    Fault(
        "a loader's worker writes into its rank's page",
        "job/flight.py",
        "    use(Flight(memoryview(bytearray(PAGE))))\n",
        "",
        _PAGES,
    ),
    Fault(
        "a process without a handler is sent the signal that asks for its stack",
        "_proc.py",
        '    return "SigCgt" in signal_sets(pid, signum)\n',
        "    return True\n",
        ("tests/unit/test_launch_lateness.py",),
    ),
    Fault(
        "a rank without a handler is sent the signal that asks for its stack",
        "launch/processes.py",
        'thread=thread) & {"SigCgt", "SigBlk", "SigPnd"} != {"SigCgt"}:\n',
        'thread=thread) & {"SigBlk", "SigPnd"}:\n',
        _STACKS,
    ),
    Fault(
        "the threads of a rank write their stacks in one handler",
        "job/flight.py",
        "faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)",
        "faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)",
        _STACKS,
    ),
]
