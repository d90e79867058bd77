"""Check a machine for a job: versions, cores, memory, shared memory, limits, names, ports.

A check takes the :class:`CheckTask` and yields findings. It leaves nothing behind: files that it makes it removes at
once.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep import _proc, installation, machine
from lockstep.launch.binding import Bind, bind_ranks
from lockstep.launch.evidence import machine_memory, memory_group
from lockstep.launch.ports import is_free
from lockstep.launch.run import descriptors
from lockstep.launch.spec import DEFAULT_MASTER_PORT
from lockstep.machine import is_loopback
from lockstep.rendezvous.messages import DEFAULT_PORT
from lockstep.text import as_size, counted
from lockstep.tools.doctor import facts
from lockstep.tools.doctor.findings import Finding, Problem, ok, warning, wrong
from lockstep.version import __version__

_MIB, _GIB = 1 << 20, 1 << 30
#: The oldest versions that lockstep is tested with (docs/support.md).
_PYTHON, _TORCH = (3, 10), (2, 9)
#: Bytes that a rank takes before its program does anything: with little more it is killed.
_RANK = 300 * _MIB
#: Bytes of /dev/shm that loader workers need at least: what containers have by default is less.
_SHARED, _SHARED_FREE = 256 * _MIB, 64 * _MIB
#: Open files that a rank with loader workers needs: batches go from process to process by descriptors.
_FILES = 1024
#: Processes and threads of a rank, and of all else that a job starts.
_TASKS, _TASKS_BESIDE = 32, 64
#: Bytes that the place for temporary files needs.
_TEMPORARY = 64 * _MIB


@dataclass(frozen=True)
class CheckTask:
    """The job that a machine is checked for."""

    #: Ranks that are to run there.
    ranks: int
    #: The folder that the run goes to.
    folder: Path
    #: True if several machines will run the job.
    several: bool = False
    #: Leave out what takes longer than a second: torch's own words, and the short job.
    quick: bool = False


Check = Callable[[CheckTask], Iterator[Finding]]


def check_versions(task: CheckTask) -> Iterator[Finding]:
    """Look at the versions of Python, torch and lockstep. Nothing is imported."""
    del task
    python, torch = platform.python_version(), facts.versions().get("torch")
    if platform.python_version_tuple()[0] != "3" or int(platform.python_version_tuple()[1]) < _PYTHON[1]:
        yield wrong(Problem.PYTHON_TOO_OLD, "versions", f"Python {python} is too old", "install Python 3.10 or newer")
    if torch is None:
        yield wrong(
            Problem.TORCH_MISSING,
            "versions",
            f"torch is not installed for {os.path.realpath('/proc/self/exe')}",
            "pip install torch there, or start lockstep from the environment that has it",
        )
    elif tuple(int(part) for part in re.findall(r"\d+", torch)[:2]) < _TORCH:
        yield wrong(Problem.TORCH_TOO_OLD, "versions", f"torch {torch} is too old", "install torch 2.9 or newer")
    else:
        yield ok("versions", f"lockstep {__version__}, torch {torch}, Python {python}")
    found = installation.strangers()
    have = "have" if len(found) > 1 else "has"
    if installation.is_replaced() or found:
        level = wrong if installation.is_replaced() else warning
        yield level(
            Problem.PACKAGE_OVERWRITTEN,
            "versions",
            f"{installation.named(found)} {have} installed files into the package lockstep as well",
            installation.advice(found),
        )


def check_cores(task: CheckTask) -> Iterator[Finding]:
    """Look at the cores: affinity, the container's quota, other programs, threads for each rank."""
    cores, visible, everything = machine.cores(), machine.visible_cores(), os.cpu_count() or 1
    quota = machine.cpu_quota()
    words = [f"{counted(cores, 'core')} for {counted(task.ranks, 'rank')}"]
    if visible < everything:
        words.append(f"the affinity mask has {visible} of the machine's {everything}")
    if quota is not None:
        words.append(f"the container's quota is {quota:g}")
    binding = bind_ranks(Bind.AUTO, task.ranks)
    if binding.cpus:
        words.append(f"lockstep run binds {binding.describe()}")
    summary = "; ".join(words)
    on_cpu = not machine.gpus()
    if on_cpu and task.ranks > cores:
        yield warning(
            Problem.MORE_RANKS_THAN_CORES,
            "cores",
            f"{summary}: the ranks take turns",
            f"start {counted(cores, 'rank')}: lockstep run -n {cores}",
        )
    else:
        yield ok("cores", summary)
    load = os.getloadavg()[0]
    if load > 0.75 * everything:
        yield warning(
            Problem.CORES_BUSY,
            "cores",
            f"{load:.1f} of the machine's {everything} cores were in use in the last minute",
            "see with top which programs these are: ranks in step are as fast as the slowest of them",
        )
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text and not (text.isdecimal() and int(text)):
        yield warning(
            Problem.OMP_THREADS_INVALID,
            "cores",
            f"OMP_NUM_THREADS={text!r} is not a number of threads",
            "unset OMP_NUM_THREADS",
        )
    elif text and int(text) * task.ranks > cores and int(text) > 1:
        yield warning(
            Problem.TOO_MANY_THREADS,
            "cores",
            f"OMP_NUM_THREADS={text} with {counted(task.ranks, 'rank')} is {int(text) * task.ranks} threads for "
            f"{counted(cores, 'core')}",
            "unset it: each rank then takes its share of the cores",
        )
    elif text and on_cpu and cores // task.ranks >= 2 * int(text):
        yield warning(
            Problem.CORES_IDLE,
            "cores",
            f"OMP_NUM_THREADS={text} leaves {cores - int(text) * task.ranks} of {cores} cores idle",
            "unset it: each rank then takes its share of the cores",
        )


def check_memory(task: CheckTask) -> Iterator[Finding]:
    """Look at the memory: what is free, the container's limit, limits of address space."""
    total, group = machine_memory(), memory_group()
    limit = None if group is None else group.limit()
    available = _proc.counter("/proc/meminfo", "MemAvailable")
    words = [f"{as_size(total)} of memory" if total else "the kernel does not say how much memory there is"]
    free = available
    if available is not None:
        words.append(f"{as_size(available)} available")
    if limit is not None and (total is None or limit < total):
        used = _usage(group.folder) if group is not None else None
        words.append(f"the container's limit is {as_size(limit)}" + ("" if used is None else f", {as_size(used)} used"))
        free = min(value for value in (available, limit - (used or 0)) if value is not None)
    summary = ", ".join(words)
    if free is not None and free < task.ranks * _RANK:
        yield wrong(
            Problem.MEMORY_TOO_SMALL,
            "memory",
            f"{summary}: too little for {counted(task.ranks, 'rank')}, which take {as_size(task.ranks * _RANK)} before "
            "the program does anything",
            "end other programs, raise the container's limit, or start fewer ranks; else the kernel kills one",
        )
    else:
        yield ok("memory", summary)
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        yield warning(
            Problem.ADDRESS_SPACE_LIMITED,
            "memory",
            f"ulimit -v allows a process {as_size(space)} of address space",
            "ulimit -v unlimited: torch reserves much more than it uses, CUDA the more so",
        )


def check_shared_memory(task: CheckTask) -> Iterator[Finding]:
    """Look at /dev/shm, which loader workers use, and at memory without a name, which the backend "shm" uses."""
    del task
    advice = (
        "docker run --shm-size=8g; under Kubernetes an emptyDir with medium: Memory at /dev/shm (lockstep submit "
        "kubernetes writes it); else mount -o remount,size=8g /dev/shm"
    )
    try:
        there = os.statvfs("/dev/shm")
    except OSError as error:
        yield warning(
            Problem.DEV_SHM_MISSING,
            "/dev/shm",
            f"/dev/shm can't be used ({error.strerror}): DataLoader workers pass batches through it",
            advice,
        )
    else:
        total, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
        if not os.access("/dev/shm", os.W_OK):
            yield warning(
                Problem.DEV_SHM_NOT_WRITABLE,
                "/dev/shm",
                "/dev/shm is not writable: DataLoader workers pass batches through it",
                advice,
            )
        elif total and total < _SHARED:
            yield warning(
                Problem.DEV_SHM_TOO_SMALL,
                "/dev/shm",
                f"/dev/shm has {as_size(total)}: DataLoader workers pass batches through it, and crash when it is full",
                f"{advice}; or num_workers=0",
            )
        elif total and free < _SHARED_FREE:
            yield warning(
                Problem.DEV_SHM_FULL,
                "/dev/shm",
                f"/dev/shm has {as_size(free)} left of {as_size(total)}",
                "list what dead jobs have left there with ls -l /dev/shm, and remove it",
            )
        else:
            yield ok("/dev/shm", f"{as_size(free)} free of {as_size(total)}, for DataLoader workers")
    try:
        os.close(os.memfd_create("lockstep-doctor"))
    except OSError as error:
        yield warning(
            Problem.MEMFD_REFUSED,
            "shared memory",
            f'the kernel refuses memory without a name ({error.strerror}), so the backend "shm" can\'t be opened and '
            "gloo takes its place",
            "allow memfd_create in the container's seccomp profile",
        )


def check_limits(task: CheckTask) -> Iterator[Finding]:
    """Look at ulimit: open files, processes, core files, sizes of files, seconds."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors(task.ranks)
    raised = f"ulimit -n {max(65536, needed) if hard == resource.RLIM_INFINITY else min(hard, max(65536, needed))}"
    if hard != resource.RLIM_INFINITY and hard < max(_FILES, needed):
        raised = (
            "raise the hard limit (/etc/security/limits.conf, LimitNOFILE= of systemd, docker --ulimit nofile=65536)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        yield wrong(
            Problem.OPEN_FILES_TOO_FEW,
            "open files",
            f"ulimit -n is {soft}, and {counted(task.ranks, 'rank')} need about {needed} to start",
            raised,
        )
    elif soft != resource.RLIM_INFINITY and soft < _FILES:
        yield warning(
            Problem.OPEN_FILES_FEW,
            "open files",
            f"ulimit -n is {soft}: loaders with many workers pass batches through open files",
            raised,
        )
    else:
        yield ok(
            "open files", f"ulimit -n is {_limit(soft)}; the launcher of {counted(task.ranks, 'rank')} takes {needed}"
        )
    yield from _processes(task)
    yield from _core_files()
    bytes_ = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if bytes_ != resource.RLIM_INFINITY:
        yield wrong(
            Problem.FILE_SIZE_LIMITED,
            "file size",
            f"ulimit -f cuts files at {as_size(bytes_)}, shared memory and checkpoints as well",
            "ulimit -f unlimited",
        )
    seconds = resource.getrlimit(resource.RLIMIT_CPU)[0]
    if seconds != resource.RLIM_INFINITY:
        yield wrong(
            Problem.PROCESSOR_TIME_LIMITED,
            "processor time",
            f"ulimit -t ends a process after {seconds} s",
            "ulimit -t unlimited",
        )
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if os.path.isdir("/dev/infiniband") and locked != resource.RLIM_INFINITY:
        yield warning(
            Problem.LOCKED_MEMORY_LIMITED,
            "locked memory",
            f"ulimit -l is {as_size(locked)}, and InfiniBand needs memory that is locked",
            "ulimit -l unlimited (docker --ulimit memlock=-1)",
        )


def _processes(task: CheckTask) -> Iterator[Finding]:
    needed = task.ranks * _TASKS + _TASKS_BESIDE
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() and soft != resource.RLIM_INFINITY:  # the limit does not hold for root
        used = sum(len(_proc.threads(pid)) for pid in _own_processes())
        if soft - used < needed:
            yield wrong(
                Problem.PROCESSES_TOO_FEW,
                "processes",
                f"ulimit -u is {soft}, {used} are in use, and {counted(task.ranks, 'rank')} with loader workers need "
                f"about {needed}",
                f"ulimit -u {used + 4 * needed}, or end other programs of this user",
            )
            return
    allowed, used_here = _pids()
    if allowed is not None and allowed - used_here < needed:
        yield wrong(
            Problem.PROCESSES_TOO_FEW,
            "processes",
            f"the container allows {allowed} processes and threads, {used_here} are in use, and "
            f"{counted(task.ranks, 'rank')} with loader workers need about {needed}",
            "docker run --pids-limit=-1; pids.max of the cgroup",
        )
        return
    words = [] if soft == resource.RLIM_INFINITY else [f"ulimit -u is {soft}"]
    words += [] if allowed is None else [f"the container allows {allowed}"]
    yield ok("processes", ", ".join(words) or "no limit")


def _core_files() -> Iterator[Finding]:
    soft = resource.getrlimit(resource.RLIMIT_CORE)[0]
    pattern = _proc.text("/proc/sys/kernel/core_pattern").strip()
    if soft == 0:
        yield ok("core files", "none are written (ulimit -c 0)")
    elif pattern.startswith("|"):
        yield ok("core files", f"a crash goes to {pattern[1:].split()[0]}")
    else:
        yield warning(
            Problem.CORE_FILES_WRITTEN,
            "core files",
            f"a rank that crashes writes its memory to {pattern!r} (ulimit -c is {_limit(soft)})",
            "ulimit -c 0, unless you mean to look at it",
        )


def check_names(task: CheckTask) -> Iterator[Finding]:
    """Check to which address this machine's own name resolves, which gloo and jobs by --node-rank use."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        if task.several:
            yield warning(
                Problem.OWN_NAME_UNKNOWN,
                "names",
                f"this machine does not know its own name, {name} ({error.strerror}): gloo takes the loopback device",
                "write its address and name into /etc/hosts, or set GLOO_SOCKET_IFNAME (--rdzv and --hosts do it)",
            )
        else:
            yield ok("names", f"{name} has no address, which a job on one machine does not need")
        return
    if task.several and all(is_loopback(address) for address in found):
        yield warning(
            Problem.OWN_NAME_LOOPBACK,
            "names",
            f"this machine's own name, {name}, resolves to {', '.join(found)} (Debian and Ubuntu set it up so), where "
            "no other machine reaches it",
            "start with --rdzv or --hosts, which find the address by the route; for --node-rank and other launchers "
            "write its address in place of 127.0.1.1 into /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    else:
        yield ok("names", f"{name} is {', '.join(found)}")


def check_ports(task: CheckTask) -> Iterator[Finding]:
    """Look whether the ports are free that jobs on several machines take unless told otherwise."""
    for port, use, option in (
        (DEFAULT_PORT, "--rdzv", f"--rdzv HOST:{DEFAULT_PORT + 1}"),
        (DEFAULT_MASTER_PORT, "--node-rank", f"--master-port {DEFAULT_MASTER_PORT + 1}"),
    ):
        if is_free(port):
            yield ok("ports", f"{port} is free, for {use}")
            continue
        what = f"port {port}, which {use} takes, is in use{_listener(port)}"
        advice = f"end the process that uses it, or give {option}"
        yield (
            wrong(Problem.PORT_IN_USE, "ports", what, advice)
            if task.several
            else warning(Problem.PORT_IN_USE, "ports", what, advice)
        )


def check_temporary(task: CheckTask) -> Iterator[Finding]:
    """Look at the place for temporary files, where a job has its private folder."""
    del task
    try:
        folder = tempfile.gettempdir()
        there = os.statvfs(folder)
    except OSError as error:
        yield wrong(
            Problem.TEMPORARY_FOLDER_MISSING,
            "temporary files",
            f"no folder for them can be used: {error.strerror}",
            "name one with TMPDIR",
        )
        return
    free = there.f_bavail * there.f_frsize
    if free < _TEMPORARY:
        yield wrong(
            Problem.TEMPORARY_FOLDER_FULL,
            "temporary files",
            f"{folder} has {as_size(free)} left",
            "free space there, or name another with TMPDIR",
        )
    else:
        yield ok("temporary files", f"{as_size(free)} free in {folder}")


# What the kernel says ------------------------------------------------------------------------------------------------


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _usage(folder: Path) -> int | None:
    """Return the bytes that a memory cgroup uses and that the kernel can't take back by itself."""
    for name, cached in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        used = _proc.text(folder / name).strip()
        if used.isdecimal():
            return max(0, int(used) - (_proc.counter(folder / "memory.stat", cached) or 0))
    return None


def _own_processes() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                    yield int(name)
            except FileNotFoundError:
                continue  # it has just ended


def _pids() -> tuple[int | None, int]:
    """Return how many processes and threads the container allows (None: any number), and how many there are."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
        allowed, used = _proc.text(f"{folder}/pids.max").strip(), _proc.text(f"{folder}/pids.current").strip()
        if allowed.isdecimal() and used.isdecimal():
            return int(allowed), int(used)
    return None, 0


def _listener(port: int) -> str:
    """Return which process listens at a port, as far as this user may know: `` by process 12 (python train.py)``."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        for line in _proc.text(f"/proc/net/{name}").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":  # it listens
                sockets.add(f"socket:[{fields[9]}]")
    for pid in _own_processes() if sockets else ():
        with contextlib.suppress(OSError):  # it may not be looked at
            if sockets & set(_proc.open_files(pid)):
                command = _proc.read(pid, "cmdline").replace("\0", " ").strip()
                return f" by process {pid} ({command[:60]})"
    return ""
