"""The findings of a check: how bad each is, what it is, what to do about it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.text import counted


class Level(str, enum.Enum):
    """The severity of a finding."""

    OK = "ok"
    #: A job runs, but slower than it could, or not in every form.
    WARNING = "warning"
    #: A job fails, or trains something else than is meant.
    WRONG = "wrong"


class Problem(enum.Enum):
    """The kind of a finding, for programs; docs/codes.md says what each of them means."""

    #: All is well.
    NONE = "ok"
    #: Versions and what differs between hosts.
    PYTHON_TOO_OLD = "python-too-old"
    TORCH_MISSING = "torch-missing"
    TORCH_TOO_OLD = "torch-too-old"
    PACKAGE_OVERWRITTEN = "package-overwritten"
    TORCH_NO_ANSWER = "torch-no-answer"
    TORCH_IMPORT_FAILED = "torch-import-failed"
    LOCKSTEP_DIFFERS = "lockstep-differs"
    TORCH_DIFFERS = "torch-differs"
    PYTHON_DIFFERS = "python-differs"
    PACKAGE_DIFFERS = "package-differs"
    MACHINES_DIFFER = "machines-differ"
    ARCHITECTURES_DIFFER = "architectures-differ"
    CLOCKS_DIFFER = "clocks-differ"
    #: Findings about GPUs.
    TORCH_WITHOUT_CUDA = "torch-without-cuda"
    GPUS_HIDDEN = "gpus-hidden"
    GPUS_UNUSABLE = "gpus-unusable"
    GPUS_NOT_ALL_SEEN = "gpus-not-all-seen"
    GPUS_DIFFER = "gpus-differ"
    GPU_FAILED = "gpu-failed"
    GPU_WITHOUT_KERNELS = "gpu-without-kernels"
    GPU_MEMORY_IN_USE = "gpu-memory-in-use"
    MORE_RANKS_THAN_GPUS = "more-ranks-than-gpus"
    NCCL_MISSING = "nccl-missing"
    BACKEND_UNKNOWN = "backend-unknown"
    #: Cores and memory.
    RANKS_INVALID = "ranks-invalid"
    MORE_RANKS_THAN_CORES = "more-ranks-than-cores"
    CORES_BUSY = "cores-busy"
    CORES_IDLE = "cores-idle"
    OMP_THREADS_INVALID = "omp-threads-invalid"
    TOO_MANY_THREADS = "too-many-threads"
    MEMORY_TOO_SMALL = "memory-too-small"
    ADDRESS_SPACE_LIMITED = "address-space-limited"
    DEV_SHM_MISSING = "dev-shm-missing"
    DEV_SHM_NOT_WRITABLE = "dev-shm-not-writable"
    DEV_SHM_TOO_SMALL = "dev-shm-too-small"
    DEV_SHM_FULL = "dev-shm-full"
    MEMFD_REFUSED = "memfd-refused"
    #: Findings about limits of processes.
    OPEN_FILES_TOO_FEW = "open-files-too-few"
    OPEN_FILES_FEW = "open-files-few"
    PROCESSES_TOO_FEW = "processes-too-few"
    FILE_SIZE_LIMITED = "file-size-limited"
    PROCESSOR_TIME_LIMITED = "processor-time-limited"
    LOCKED_MEMORY_LIMITED = "locked-memory-limited"
    CORE_FILES_WRITTEN = "core-files-written"
    #: Environment variables.
    VARIABLE_UNKNOWN = "variable-unknown"
    VARIABLE_INVALID = "variable-invalid"
    TIMEOUT_SHORT = "timeout-short"
    VARIABLES_OF_A_RANK = "variables-of-a-rank"
    SCHEDULER_VARIABLES_INVALID = "scheduler-variables-invalid"
    PLACE_VARIABLES_INVALID = "place-variables-invalid"
    PLACE_VARIABLES_LEFT = "place-variables-left"
    MASTER_VARIABLES_LEFT = "master-variables-left"
    NETWORK_DEVICE_MISSING = "network-device-missing"
    SWITCH_COSTLY = "switch-costly"
    #: Names, ports and ways between hosts.
    OWN_NAME_UNKNOWN = "own-name-unknown"
    OWN_NAME_LOOPBACK = "own-name-loopback"
    PORT_IN_USE = "port-in-use"
    NAME_UNKNOWN = "name-unknown"
    NAME_LEADS_TO_SELF = "name-leads-to-self"
    ANOTHER_ANSWERS = "another-answers"
    HOST_UNREACHABLE = "host-unreachable"
    PORTS_BLOCKED = "ports-blocked"
    NO_MEETING_PLACE = "no-meeting-place"
    HOSTS_TOO_FEW = "hosts-too-few"
    #: Findings about hosts that are reached by ssh.
    HOST_NAME_UNKNOWN = "host-name-unknown"
    HOST_NO_ANSWER = "host-no-answer"
    HOST_LOST = "host-lost"
    SSH_FAILED = "ssh-failed"
    LOCKSTEP_NOT_STARTED = "lockstep-not-started"
    #: Folders and disks.
    TEMPORARY_FOLDER_MISSING = "temporary-folder-missing"
    TEMPORARY_FOLDER_FULL = "temporary-folder-full"
    NOT_A_FOLDER = "not-a-folder"
    FOLDER_NOT_WRITABLE = "folder-not-writable"
    FOLDER_FULL = "folder-full"
    FOLDER_NEARLY_FULL = "folder-nearly-full"
    FOLDER_FEW_FILES_LEFT = "folder-few-files-left"
    FOLDER_IN_MEMORY = "folder-in-memory"
    FOLDER_WITHOUT_LOCKS = "folder-without-locks"
    FOLDER_NOT_SHARED = "folder-not-shared"
    DISK_SLOW = "disk-slow"
    #: Jobs that are tried.
    JOB_FAILED = "job-failed"
    JOB_NOT_TRIED = "job-not-tried"
    WRONG_AVERAGE = "wrong-average"
    JOB_SLOW = "job-slow"
    LINK_SLOW = "link-slow"
    LINK_SLOWER_THAN_OTHERS = "link-slower-than-others"
    #: Checks that did not come to an end.
    CHECK_FAILED = "check-failed"
    CHECK_NO_ANSWER = "check-no-answer"


@dataclass(frozen=True)
class Finding:
    """One thing that a check has found."""

    level: Level
    code: Problem
    #: A word or two for what was looked at.
    about: str
    #: The finding, as a sentence without a full stop.
    what: str
    #: The advice; empty: nothing needs to be done.
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return what :meth:`from_json` reads back."""
        return {**asdict(self), "level": self.level.value, "code": self.code.value}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Finding:
        """Read the finding of another process."""
        return cls(**{**fields, "level": Level(fields["level"]), "code": Problem(fields["code"])})


def ok(about: str, what: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(Level.OK, Problem.NONE, about, what)


def warning(code: Problem, about: str, what: str, advice: str) -> Finding:
    """Return a finding that makes jobs slower, or some of them impossible."""
    return Finding(Level.WARNING, code, about, what, advice)


def wrong(code: Problem, about: str, what: str, advice: str) -> Finding:
    """Return a finding that makes jobs fail."""
    return Finding(Level.WRONG, code, about, what, advice)


def verdict(findings: Iterable[Finding]) -> str:
    """Return all findings in a few words."""
    counts = Counter(finding.level for finding in findings)
    words = []
    if counts[Level.WRONG]:
        words.append(counted(counts[Level.WRONG], "thing is wrong", "things are wrong"))
    if counts[Level.WARNING]:
        words.append(counted(counts[Level.WARNING], "warning"))
    return ", ".join(words) or "all is well"
