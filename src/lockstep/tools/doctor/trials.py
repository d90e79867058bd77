"""Ask torch about a machine, and run a short job of two ranks there, each in a process with a time limit."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep import knobs, machine
from lockstep.text import as_duration, as_size
from lockstep.tools.doctor import child, facts
from lockstep.tools.doctor.checks import CheckTask
from lockstep.tools.doctor.findings import Finding, Problem, ok, warning, wrong

#: Seconds for importing torch and asking the driver, and for a job of two ranks.
TORCH_LIMIT, JOB_LIMIT = 60.0, 90.0
#: Seconds that a few bytes may take between two processes of a machine, and bytes a second that many may.
_FEW, _RATE = 5e-3, 100e6
_TRIAL = "lockstep.tools.doctor.trial"


def check_torch(task: CheckTask) -> Iterator[Finding]:
    """Look at torch and the GPUs: import it, ask the driver, compute something on each."""
    if task.quick:
        return
    ended = child.run("lockstep.tools.doctor.torch_facts", limit=TORCH_LIMIT)
    if ended.code is None:
        yield wrong(
            Problem.TORCH_NO_ANSWER,
            "torch",
            f"torch was not imported, or the GPU's driver has not answered, within {TORCH_LIMIT:g} s",
            "try python -c 'import torch; print(torch.cuda.device_count())' there; see nvidia-smi for the driver",
        )
    elif ended.code:
        yield wrong(
            Problem.TORCH_IMPORT_FAILED,
            "torch",
            f"torch can't be imported: {ended.last_words}",
            "reinstall it for this Python",
        )
    else:
        yield from judge_torch(json.loads(ended.out), gpus=machine.gpus({}), visible=machine.gpus(), ranks=task.ranks)


def judge_torch(
    found: Mapping[str, Any], *, gpus: int, visible: int, ranks: int, env: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Return findings about torch and the GPUs.

    Args:
        found: the output of ``torch_facts.py``.
        gpus: device files of the driver.
        visible: those of them that CUDA_VISIBLE_DEVICES leaves.
        ranks: the number of ranks planned here.
        env: the environment, which may have LOCKSTEP_BACKEND.
    """
    build = f"torch {found['torch']} is built " + (f"for CUDA {found['cuda']}" if found["cuda"] else "without CUDA")
    devices = found["devices"]
    if not gpus and not found["available"]:
        yield ok("GPUs", "there are none: ranks train on the CPU")
    elif visible < gpus and not visible:
        yield warning(
            Problem.GPUS_HIDDEN, "GPUs",
            f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')!r} hides all {gpus}: ranks train on "
            "the CPU", "unset CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    elif gpus and not found["cuda"] and not found["rocm"]:
        yield wrong(
            Problem.TORCH_WITHOUT_CUDA,
            "GPUs",
            f"there are {gpus}, but {build}",
            "install a build of torch for CUDA (pytorch.org)",
        )
    elif not found["available"]:
        words = "; ".join(found["warnings"]) or "it does not say why"
        yield wrong(
            Problem.GPUS_UNUSABLE, "GPUs", f"there are {gpus}, but torch can't use them: {words}",
            f"compare nvidia-smi with {build}: an older driver needs a build for an older CUDA",
        )  # fmt: skip
    else:
        yield from _judge_devices(found, ranks=ranks)
        if gpus and len(devices) != visible:  # (The files of other drivers than NVIDIA's are not counted.)
            yield warning(
                Problem.GPUS_NOT_ALL_SEEN,
                "GPUs",
                f"torch sees {len(devices)} of {visible}",
                "check the others with nvidia-smi",
            )
    if devices and devices[0]["capability"] is None:
        own = found["backend"]
        yield ok("GPUs", f"they are of the kind {found['kind']!r}, " + (
            f"whose tensors go from rank to rank over {own}" if own else
            "for which this torch has no backend: ranks train on the CPU, and one process alone on a device"
        ))  # fmt: skip
    elif devices and not found["nccl"]:
        yield wrong(
            Problem.NCCL_MISSING,
            "NCCL",
            f"{build}, and comes without NCCL",
            "install a build with NCCL, or LOCKSTEP_BACKEND=gloo",
        )
    elif devices:
        yield ok("NCCL", f"NCCL {found['nccl']}, {build}")
    backend = knobs.backend(env)
    for name in [] if backend is None else [part.split(":")[-1] for part in backend.lower().split(",")]:
        if name not in found["backends"] and (name != "mpi" or "mpi4py" not in found["backends"]):
            yield wrong(
                Problem.BACKEND_UNKNOWN, "variables", f"{knobs.BACKEND}={backend}: this torch has no backend {name!r}",
                f"say one of {', '.join(each for each in found['backends'] if each != 'fake')}, or unset it",
            )  # fmt: skip


def _judge_devices(found: Mapping[str, Any], *, ranks: int) -> Iterator[Finding]:
    devices = found["devices"]
    for index, device in enumerate(devices):
        name = f"GPU {index}, {device['name']}"
        if device["error"]:
            yield wrong(
                Problem.GPU_FAILED, "GPUs",
                f"{name}: {device['error']}", "end the program that uses it (nvidia-smi), or leave the GPU out with "
                "CUDA_VISIBLE_DEVICES",
            )  # fmt: skip
        elif found["cuda"] and not _has_kernels(found["architectures"], device["capability"]):
            yield wrong(
                Problem.GPU_WITHOUT_KERNELS, "GPUs",
                f"{name} has {_capability(device)}, for which this torch has no kernels "
                f"({', '.join(found['architectures'])})", "install a build of torch that has them",
            )  # fmt: skip
        elif device.get("free", device["memory"]) < device["memory"] // 2:
            yield warning(
                Problem.GPU_MEMORY_IN_USE, "GPUs",
                f"{name}: {as_size(device['free'])} free of {as_size(device['memory'])}",
                "see with nvidia-smi which program uses it",
            )  # fmt: skip
        else:
            driver = facts.driver()
            told = (name, as_size(device["memory"]), _capability(device), f"driver {driver}" if driver else "")
            yield ok("GPUs", ", ".join(filter(None, told)))
    kinds = sorted({device["name"] for device in devices})
    if len(kinds) > 1:
        yield warning(
            Problem.GPUS_DIFFER, "GPUs",
            f"they differ: {', '.join(kinds)}", "ranks in step are as fast as the slowest: choose equal ones "
            "with CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    if ranks > len(devices):
        yield warning(
            Problem.MORE_RANKS_THAN_GPUS,
            "GPUs",
            f"{ranks} ranks for {len(devices)}",
            f"start {len(devices)}: lockstep run -n {len(devices)}",
        )


def _has_kernels(architectures: Sequence[str], capability: Sequence[int] | None) -> bool:
    """Return whether a torch with kernels for ``architectures`` has some for a GPU of CUDA's ``capability``."""
    built = [each.rstrip("af") for each in architectures]
    if capability is None or not built:
        return True
    major, minor = capability
    # Kernels run on later minor versions; compute_… is compiled for later ones when it is loaded.
    fits = [f"sm_{major}{least}" for least in range(minor + 1)]
    return any(each in built for each in fits) or any(
        each.startswith("compute_") and int(each.rpartition("_")[2]) <= 10 * major + minor for each in built
    )


def _capability(device: Mapping[str, Any]) -> str:
    """Return CUDA's capability of a device in words; empty if it is not CUDA's."""
    return "" if device["capability"] is None else "capability " + ".".join(map(str, device["capability"]))


def check_job(task: CheckTask) -> Iterator[Finding]:
    """Start a job of two ranks that average something, over the backend that ``lockstep.init()`` takes here."""
    if task.quick:
        return
    # NCCL takes one rank a GPU.
    env = {knobs.BACKEND: "shm"} if machine.gpus() == 1 and knobs.backend() is None else {}
    with tempfile.TemporaryDirectory(prefix="lockstep-doctor-") as logs:
        options = ["-n", "2", "--grace", "3", "--log-dir", logs]
        ended = child.run("lockstep", "run", *options, "-m", _TRIAL, limit=JOB_LIMIT, env=env)
    job = read_job(ended)
    if isinstance(job, str):
        yield wrong(
            Problem.JOB_FAILED,
            "a job",
            f"a job of two ranks on this machine fails: {job}",
            "fix this first; the rest may follow from it",
        )
    else:
        yield judge_own_job(job)


def judge_own_job(job: Mapping[str, Any]) -> Finding:
    """Return findings about how two ranks of this machine average with each other.

    Args:
        job: what ``trial.py`` has printed.
    """
    (pair,) = job["pairs"]
    what = f"two ranks average {_speed(pair)}, over {job['backend']}"
    if not pair["right"]:
        return wrong(Problem.WRONG_AVERAGE, "a job", f"two ranks average wrong numbers over {job['backend']}", _REPORT)
    if pair["few"] > _FEW or pair["bytes"] / pair["many"] < _RATE:
        return warning(
            Problem.JOB_SLOW,
            "a job",
            what,
            "see with top which other programs use the cores: ranks wait for each other in each step",
        )
    return ok("a job", what)


_REPORT = (
    "this must never happen: report an issue with the output of lockstep doctor --env, and test the machine's memory "
    "(memtest)"
)


def read_job(ended: child.ChildResult) -> dict[str, Any] | str:
    """Return the output of ``trial.py``, or the reason why there is none."""
    if ended.code is None:
        return f"it did not end in time; {ended.last_words}"
    try:
        if ended.code == 0:
            found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
            return found
    except (ValueError, IndexError):
        pass
    return ended.last_words


def _speed(pair: Mapping[str, Any]) -> str:
    return f"{as_size(pair['bytes'])} in {as_duration(pair['many'])}, 8 bytes in {as_duration(pair['few'])}"


# Between hosts -------------------------------------------------------------------------------------------------------

#: Seconds that a few bytes may take between hosts, and bytes a second that many have to reach.
_FAR, _LINK = 5e-3, 40e6
#: A pair is slow from this multiple of the median of all pairs on.
_ODD = 3.0
#: Seconds for all pairs of hosts beside that: 4 each, of eight hosts.
_PAIRS_LIMIT = 4.0 * 28


def job_on_hosts(hosts: str, *, logs: str) -> child.ChildResult:
    """Run a job of one rank on each host, as ``lockstep run --hosts`` does.

    Args:
        hosts: as after ``--hosts``, with ``:1`` each.
        logs: a folder on all of them.
    """
    options = ["--hosts", hosts, "--join-timeout", "30", "--grace", "3", "--log-dir", logs]
    return child.run("lockstep", "run", *options, "-m", _TRIAL, limit=JOB_LIMIT + _PAIRS_LIMIT)


def judge_job(job: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    """Return findings about how hosts average with each other, two by two.

    Args:
        job: what ``trial.py`` has printed.
        names: of the hosts, by rank.
    """
    pairs = job["pairs"]
    usual = sorted(pair["many"] / pair["bytes"] for pair in pairs)[len(pairs) // 2]
    for pair in pairs:
        first, second = (names[rank] for rank in pair["ranks"])
        what = f"{first} and {second} average {_speed(pair)}, over {job['backend']}"
        rate = pair["bytes"] / pair["many"]
        if not pair["right"]:
            yield wrong(
                Problem.WRONG_AVERAGE,
                "a job",
                f"{first} and {second} average wrong numbers over {job['backend']}",
                _REPORT,
            )
        elif rate < _LINK or pair["few"] > _FAR:
            yield warning(
                Problem.LINK_SLOW, "a job",
                what, "see which device and route they take (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME); for a "
                "link that is no faster, docs/local_steps.md",
            )  # fmt: skip
        elif usual * _ODD < 1 / rate:
            yield warning(
                Problem.LINK_SLOWER_THAN_OTHERS,
                "a job",
                f"{what}: slower than other pairs",
                "see which device and route these two take",
            )
        else:
            yield ok("a job", what)
