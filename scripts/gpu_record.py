"""Run on a machine with GPUs what nobody could run without one, and write down what came of it.

    python -m scripts.gpu_record [--quick] [--ranks N] [--out FILE] [TEST …]

It runs the tests marked ``gpu``, in this environment, then ``benchmarks.gpu``, and writes one page of
Markdown: the machine and its versions, the tests that passed, failed and were left out, and the benchmark's tables. The
page is what to send us, whole, when something fails. ``make gpu`` is the same in an environment of its own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
#: What a file has whose tests need GPUs, as the Makefile looks for them.
_NEEDS_GPUS = re.compile(r"mark\.gpu|ON_GPUS|OVER_ALL|on_gpus")
#: A line of pytest's summary of what did not pass.
_NOT_PASSED = re.compile(r"^(FAILED|ERROR) (\S+)(?: - (.*))?$", re.MULTILINE)
#: Its last line, with how many of which outcome.
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)")
#: Lines of output that are kept of what failed to run at all.
_LAST_LINES = 30


@dataclass(frozen=True)
class Outcomes:
    """What pytest has said of the tests."""

    #: pytest's exit code: 0 if all is well, 1 if tests failed; others mean that they were not run to the end.
    code: int
    #: Outcome -> how many tests.
    counts: dict[str, int]
    #: Each test that did not pass, with the first line of why.
    not_passed: tuple[tuple[str, str], ...]
    #: The end of the output, if the tests were not run to the end.
    trouble: str = ""

    @classmethod
    def of(cls, code: int, text: str) -> Outcomes:
        """Read pytest's output."""
        lines = text.rstrip().splitlines()
        counts = {kind.rstrip("s") if kind.startswith("error") else kind: int(n) for n, kind in _found(lines[-1:])}
        found = tuple((name, why.strip()) for _, name, why in _NOT_PASSED.findall(text))
        return cls(code, counts, found, "" if code in (0, 1) and counts else "\n".join(lines[-_LAST_LINES:]))

    def describe(self) -> list[str]:
        """Return lines of Markdown."""
        said = ", ".join(f"{count} {kind}" for kind, count in self.counts.items() if kind != "deselected")
        lines = [f"{said or 'none was run'} (pytest ended with {self.code})"]
        if self.not_passed:
            lines += ["", *(f"- `{name}`" + (f": {why}" if why else "") for name, why in self.not_passed)]
        if self.trouble:
            lines += ["", "```text", self.trouble, "```"]
        return lines


def _found(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [found for line in lines for found in _COUNTS.findall(line)]


def needing_gpus(tests: Path) -> list[str]:
    """Return the test files below ``tests`` with tests that need GPUs, in order."""
    return sorted(str(file) for file in tests.rglob("test_*.py") if _NEEDS_GPUS.search(file.read_text()))


def run_tests(files: Sequence[str], gpus: int) -> Outcomes:
    """Run the tests marked ``gpu`` in some files, in four processes.

    Args:
        files: paths.
        gpus: how many this machine has. Where it is one, ranks share it (tests/device/shared.py).
    """
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "gpu and not campaign"]
    command += ["-n", "4", "--dist", "load"]
    env = {**os.environ, **({"SHARED_GPU": "1"} if gpus == 1 else {})}
    done = subprocess.run([*command, *files], cwd=_ROOT, env=env, capture_output=True, text=True, check=False)
    return Outcomes.of(done.returncode, done.stdout)


def run_benchmark(options: Sequence[str]) -> tuple[int, str]:
    """Run ``benchmarks.gpu``; return its exit code and its tables, or the end of what it said if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu", *options]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return 0, done.stdout.partition("\n\n")[2].strip()
    lines = (done.stdout + done.stderr).rstrip().splitlines()
    return done.returncode, "\n".join(["```text", *lines[-_LAST_LINES:], "```"])


def machine_facts() -> list[tuple[str, str]]:
    """Return what the figures depend on, by name. Empty: torch sees no GPU of CUDA's or ROCm's."""
    import torch

    from lockstep import accelerator
    from lockstep.text import as_size
    from lockstep.version import __version__

    if accelerator.kind() != "cuda":
        return []
    device = accelerator.devices()[0]
    names = [accelerator.name_of(each) for each in accelerator.devices()]
    return [
        ("GPUs", "; ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))),
        ("memory", as_size(accelerator.memory_size(device))),
        ("driver", _driver() or "not known"),
        ("libraries", torch.version.hip or accelerator.cuda_libraries(device) or "not known"),
        ("NCCL", accelerator.nccl_version() or "none"),
        ("torch", torch.__version__),
        ("Python", sys.version.split()[0]),
        ("lockstep", __version__),
    ]


def _driver() -> str:
    """Return the driver's version, by NVIDIA's own tool; empty where that is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout.split() or [""])[0]


def page(facts: Sequence[tuple[str, str]], tests: Outcomes, tables: str) -> str:
    """Return the record, in Markdown."""
    day = datetime.date.today().isoformat()
    lines = [
        f"# On a machine with GPUs, {day}",
        "",
        *(f"- {name}: {fact}" for name, fact in facts),
        "",
        "## Tests marked gpu",
        "",
        *tests.describe(),
        "",
        "## Benchmark",
        "",
        tables,
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run all of it. The exit code is 0 if all is well, 1 if something failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small models and few rounds in the benchmark")
    parser.add_argument("--ranks", type=int, default=None, help="GPUs that the benchmark uses (default: all)")
    parser.add_argument(
        "--out", type=Path, default=None, help="the record (default: benchmarks/results/<date>-gpus.md)"
    )
    parser.add_argument("tests", nargs="*", metavar="TEST", help="test files (default: all with tests that need GPUs)")
    options = parser.parse_args()
    from lockstep import accelerator

    facts = machine_facts()
    if not facts:
        print(
            "no GPU here that torch can use, so nothing was run: `lockstep doctor` says what is wrong with a driver or "
            "a build of torch, and `make simulated` runs the same tests on simulated GPUs",
            file=sys.stderr,
        )
        return 2
    print(f"{facts[0][1]}: the tests marked gpu, then the benchmark; about ten minutes", file=sys.stderr)
    count = accelerator.count()
    tests = run_tests(options.tests or needing_gpus(_ROOT / "tests"), count)
    given = (["--quick"] if options.quick else []) + ([] if options.ranks is None else ["--ranks", str(options.ranks)])
    code, tables = run_benchmark(given)
    if count == 1:
        facts.append(("one GPU", "the ranks of a test share it; tests that need several in one process are left out"))
    text = page(facts, tests, tables)
    out = options.out or _RESULTS / f"{datetime.date.today().isoformat()}-gpus.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(text)
    print(f"written to {os.path.relpath(out)}: what to send us, if something failed", file=sys.stderr)
    return 0 if tests.code == 0 and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
