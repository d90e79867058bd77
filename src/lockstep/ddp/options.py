"""What a user can choose about a replica, checked in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

CheckFinite = Literal["off", "warn", "skip", "raise"]

_MIB = 1024 * 1024


@dataclass(frozen=True)
class ReplicaOptions:
    """The choices of :func:`lockstep.replicate`; see there for what each means."""

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    check_finite: CheckFinite = "off"
    gradient_as_bucket_view: bool = True
    overlap: bool | None = None
    init_sync: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_cap_mb", "first_bucket_mb"):
            size = getattr(self, name)
            if not 0 < size < float("inf"):
                raise ValueError(f"{name}={size!r}: expected a positive number of MiB")
        if self.check_finite not in get_args(CheckFinite):
            raise ValueError(f"check_finite={self.check_finite!r}: expected 'off', 'warn', 'skip' or 'raise'")

    @property
    def bucket_cap_bytes(self) -> int:
        """Bytes a bucket may hold."""
        return int(self.bucket_cap_mb * _MIB)

    @property
    def first_bucket_bytes(self) -> int:
        """Bytes the first bucket of each kind may hold: small, so that communication starts early."""
        return int(self.first_bucket_mb * _MIB)

    def agreement(self) -> dict[str, Any]:
        """**Local.** What must be the same on every rank, or the ranks' collectives would not match."""
        shared = asdict(self)
        del shared["find_unused_parameters"], shared["gradient_as_bucket_view"]
        shared["overlap"] = self.overlap is True  # over "shm" it decides where the buckets lie
        return shared
