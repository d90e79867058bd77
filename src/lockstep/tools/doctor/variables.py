"""Check environment variables that would mislead a job, and hide those that a bug report must not show."""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Iterator, Mapping

from lockstep import knobs
from lockstep.errors import EnvironmentMismatch
from lockstep.identity import Identity
from lockstep.schedulers.place import node, rank_variables
from lockstep.text import joined
from lockstep.tools.doctor.findings import Finding, Problem, ok, warning, wrong

_OURS = "LOCKSTEP_"
#: Variables that describe a rank: a launcher sets them for its ranks, and a shell should not have them.
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
#: Seconds for a collective that ranks which load data, compile or save may take by themselves.
_SHORT = 20.0
#: Switches that cost much, the values that turn them on, and what they do.
_COSTLY = (
    ("CUDA_LAUNCH_BLOCKING", "1", "makes the GPU wait for each kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "has torch check every collective by another one"),
    ("NCCL_P2P_DISABLE", "1", "sends data between GPUs through the host's memory"),
    ("NCCL_SHM_DISABLE", "1", "sends data within this machine through the network"),
    ("NCCL_IB_DISABLE", "1", "has NCCL use TCP in place of InfiniBand"),
    ("NCCL_DEBUG", "TRACE", "writes a line for each of NCCL's operations"),
    ("PYTHONMALLOC", "debug", "checks every piece of Python's memory"),
)


def check_variables(env: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Look at the variables that a job would read."""
    findings = [*check_own(env), *_leftovers(env), *_devices(env), *_switches(env)]
    yield from findings
    if not findings:
        yield ok("variables", "none that would mislead a job")


def check_own(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look at the variables that are named like lockstep's."""
    known = knobs.names()
    theirs = sorted(known - set(knobs.OF_A_RANK))
    for name in sorted(name for name in env if name.startswith(_OURS) and name not in known):
        # Without what all names begin with, by which any two of them resemble each other.
        close = difflib.get_close_matches(
            name.removeprefix(_OURS), [each.removeprefix(_OURS) for each in theirs], 1, 0.7
        )
        advice = (
            f"say {_OURS}{close[0]}, or unset it" if close else f"unset it; lockstep's variables are {joined(theirs)}"
        )
        yield warning(
            Problem.VARIABLE_UNKNOWN, "variables", f"{name} is not a variable of lockstep, and has no effect", advice
        )
    for text in knobs.bad_values(env):
        yield wrong(Problem.VARIABLE_INVALID, "variables", text, "set it so, or unset it")
    try:
        limit = knobs.timeout(env)
    except EnvironmentMismatch:
        pass  # it is among the bad values
    else:
        if limit < _SHORT:
            yield warning(
                Problem.TIMEOUT_SHORT,
                "variables",
                f"{knobs.TIMEOUT}={env[knobs.TIMEOUT]} ends a job as soon as a rank is {limit:g} s late, as in a save "
                "or a first step",
                f"unset it: the default is {knobs.DEFAULT_TIMEOUT:g} s",
            )
    left = [name for name in knobs.OF_A_RANK if env.get(name)]
    if left:
        yield wrong(
            Problem.VARIABLES_OF_A_RANK,
            "variables",
            f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set, which the launcher sets for its ranks alone: "
            "this shell was started by a rank, or its environment was copied from one",
            f"unset {' '.join(left)}",
        )


def _leftovers(env: Mapping[str, str]) -> Iterator[Finding]:
    """Look for variables that give this process a place in a job, though nothing has started it as a rank."""
    try:
        scheduler = node(env)
        tasks = rank_variables(env)
    except EnvironmentMismatch as error:
        yield wrong(
            Problem.SCHEDULER_VARIABLES_INVALID,
            "variables",
            str(error),
            "see docs/many_machines.md for what is read of which scheduler",
        )
        return
    if scheduler is not None or tasks:
        return  # a scheduler has started this process
    left = [name for name in _OF_A_RANK if name in env]
    if not left:
        return
    said = ", ".join(f"{name}={env[name]}" for name in left)
    advice = f"unset {' '.join(left)}"
    try:
        place = Identity.from_environment(env)
    except EnvironmentMismatch as error:
        yield wrong(Problem.PLACE_VARIABLES_INVALID, "variables", f"{said}: {error}", advice)
        return
    if place.launched:
        yield wrong(
            Problem.PLACE_VARIABLES_LEFT,
            "variables",
            f"{said} are left over: python train.py would take itself for rank {place.rank} of {place.world_size}"
            + (", and wait for the others" if place.world_size > 1 else ""),
            advice,
        )
    else:
        yield warning(
            Problem.MASTER_VARIABLES_LEFT,
            "variables",
            f"{said}: left over, and read by programs that open a process group themselves",
            advice,
        )


def _devices(env: Mapping[str, str]) -> Iterator[Finding]:
    there = [name for _, name in socket.if_nameindex()]
    wanted = env.get("GLOO_SOCKET_IFNAME", "")
    missing = [name for name in wanted.split(",") if name and name not in there]
    if missing:
        yield wrong(
            Problem.NETWORK_DEVICE_MISSING,
            "variables",
            f"GLOO_SOCKET_IFNAME={wanted}: there is no network device {', '.join(missing)} here",
            f"name one of {', '.join(there)}, or unset it",
        )
    wanted = env.get("NCCL_SOCKET_IFNAME", "")
    names = [name for name in wanted.lstrip("^=").split(",") if name]
    if names and not wanted.startswith("^"):  # beginnings of names, or after = whole ones
        exact = wanted.startswith("=")
        if not any(device == name if exact else device.startswith(name) for device in there for name in names):
            yield wrong(
                Problem.NETWORK_DEVICE_MISSING,
                "variables",
                f"NCCL_SOCKET_IFNAME={wanted}: no network device here has that name",
                f"name one of {', '.join(there)}, or unset it",
            )


def _switches(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, value, what in _COSTLY:
        if env.get(name, "").upper() == value.upper():
            yield warning(
                Problem.SWITCH_COSTLY,
                "variables",
                f"{name}={env[name]} {what}",
                f"unset {name}, unless you are looking for a fault",
            )


# What may be shown ---------------------------------------------------------------------------------------------------

#: Beginnings of the names of variables that decide what a job does.
_TELLING = (
    "LOCKSTEP_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "KMP_",
    "GOMP_", "PET_", "OMPI_", "PMI_", "PMIX_", "MPI_", "SLURM_", "RAY_", "JOB_COMPLETION_INDEX", "PYTHON", "LD_",
    "MALLOC_", "TMPDIR", "XDG_STATE_HOME", *_OF_A_RANK,
)  # fmt: skip
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|PWD|CREDENTIAL|AUTH|COOKIE|CERT|SIGNATURE|DSN", re.IGNORECASE)
#: Values that look like tokens: known prefixes of services, signed ones, long runs of digits and letters.
_TOKEN = re.compile(
    r"\b(?:hf_|gh[a-z]_|github_pat_|glpat-|sk-|xox[a-z]-|AKIA|ASIA|AIza|ya29\.|npm_|pypi-|eyJ)[\w.-]{6,}"
    r"|\b[0-9a-fA-F]{32,}\b"
    r"|(?<![\w/+=-])(?=[\w+=-]*\d)(?=[\w+=-]*[A-Za-z])[A-Za-z0-9_+=-]{32,}(?![\w/+=-])"
)
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")
HIDDEN = "(set; not shown)"


def telling(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a bug report needs, without variables that are named like secrets or look like them."""
    return {name: shown(name, env[name]) for name in sorted(env) if name.startswith(_TELLING)}


def shown(name: str, value: str) -> str:
    """Return the part of a variable's value that may be shown."""
    if _SECRET_NAME.search(name):
        return HIDDEN
    return without_secrets(value)


def without_secrets(text: str) -> str:
    """Return a text without tokens and passwords, as far as they are recognised, and with the home folder as ``~``."""
    text = _PASSWORD.sub("…@", _TOKEN.sub("…", text))
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?=/|$|:)", "~", text) if len(home) > 1 else text
