"""The options of a replica, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from lockstep.ddp.local_steps import LocalSteps

CheckFinite = Literal["step", "off", "warn", "skip", "raise"]
CompareEvery = int | Literal["auto"] | None
Precision = Literal["bf16", "fp16"]

_MIB = 1024 * 1024


@dataclass(frozen=True)
class ReplicaOptions:
    """The choices of :func:`lockstep.replicate`; see there for what each means."""

    bucket_cap_mb: float = 25.0
    first_bucket_mb: float = 1.0
    broadcast_buffers: bool = True
    find_unused_parameters: bool = False
    check_finite: CheckFinite = "step"
    gradient_as_bucket_view: bool = True
    overlap: bool | None = None
    init_sync: bool = True
    #: True if ``init_sync`` is for buffers too; None: only if ``broadcast_buffers``.
    init_sync_buffers: bool | None = None
    #: MiB of the first buckets, one by one, instead of the two sizes above; torch's argument of this name.
    bucket_cap_mb_list: tuple[float, ...] = ()
    #: The rule by which ranks train apart between rounds; None: they average every gradient.
    sync: LocalSteps | None = None
    #: Within how many steps all that replicas hold is compared; None or 0: never.
    compare_every: CompareEvery = "auto"
    #: True if the ranks train on the same batches on purpose.
    same_batches: bool = False
    #: The dtype in which forwards compute; None: that of the parameters.
    precision: Precision | None = None

    def __post_init__(self) -> None:
        sizes = [("bucket_cap_mb", self.bucket_cap_mb), ("first_bucket_mb", self.first_bucket_mb)]
        for name, size in [*sizes, *(("bucket_cap_mb_list", size) for size in self.bucket_cap_mb_list)]:
            if not 0 < size < float("inf"):
                raise ValueError(f"{name}={size!r}: expected a positive number of MiB")
        if self.check_finite not in get_args(CheckFinite):
            raise ValueError(f"check_finite={self.check_finite!r}: expected 'step', 'off', 'warn', 'skip' or 'raise'")
        every = self.compare_every
        if every != "auto" and every is not None and (type(every) is not int or every < 0):
            raise ValueError(
                f"compare_every={every!r}: expected 'auto', a number of steps, or None (or 0) to compare nothing"
            )
        if self.precision is not None:
            self._refuse_imprecise()
        if self.sync is not None:
            self._refuse_what_averages()

    def _refuse_imprecise(self) -> None:
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r}: expected 'bf16', 'fp16' or None")
        if self.precision == "fp16" and self.check_finite not in ("step", "off"):
            raise ValueError(
                f"check_finite={self.check_finite!r} with precision='fp16': infinite gradients are how a loss scale is "
                "found, and such steps are left out on all ranks by themselves: leave check_finite out"
            )
        if self.precision == "fp16" and self.sync is not None:
            raise ValueError(
                "precision='fp16' with LocalSteps: the ranks would leave out different steps and have different loss "
                "scales: choose precision='bf16', which needs no loss scale, or average every gradient (without sync=)"
            )

    def _refuse_what_averages(self) -> None:
        if not isinstance(self.sync, LocalSteps):
            raise TypeError(f"sync={self.sync!r}: expected a lockstep.LocalSteps, or None")
        if self.check_finite not in ("step", "off"):
            raise ValueError(
                f"check_finite={self.check_finite!r} looks at gradients before they are averaged, and with LocalSteps "
                "none are: leave it out. The end of a round raises by itself if a parameter is infinite or NaN"
            )
        if self.compare_every not in ("auto", None, 0):
            raise ValueError(
                f"compare_every={self.compare_every!r} compares replicas after each step, and with LocalSteps they "
                "train apart between rounds: leave it out"
            )
        if self.overlap is True:
            raise ValueError(
                "overlap=True is for the averages of gradients, and with LocalSteps there are none: pass "
                "sync=LocalSteps(overlap=True)"
            )

    @property
    def bucket_caps(self) -> list[int]:
        """Return the caps in bytes of the first bucket of each kind, the second, and so on; the last repeats."""
        if self.bucket_cap_mb_list:
            sizes = [*self.bucket_cap_mb_list, max(self.bucket_cap_mb_list)]
        else:
            sizes = [min(self.first_bucket_mb, self.bucket_cap_mb), self.bucket_cap_mb]
        return [int(size * _MIB) for size in sizes]

    @property
    def sends_buffers(self) -> bool:
        """Return whether buffers are sent, at construction or later."""
        return self.broadcast_buffers or bool(self.init_sync_buffers)

    @property
    def compares(self) -> bool:
        """Return whether replicas are compared while they train."""
        return self.sync is None and self.compare_every not in (None, 0)

    @property
    def tells_same_batches(self) -> bool:
        """Return whether ranks that train on the same batches are told so."""
        return self.sync is None and not self.same_batches

    @property
    def compared_within(self) -> int | None:
        """Return the steps within which all that replicas hold is compared; None: chosen by the cost."""
        return self.compare_every if isinstance(self.compare_every, int) else None

    def must_match(self) -> dict[str, Any]:
        """Return the options that must match on every rank; otherwise the ranks' collectives would not match."""
        shared = {field.name: getattr(self, field.name) for field in fields(self)}
        del shared["find_unused_parameters"], shared["gradient_as_bucket_view"]
        shared["overlap"] = self.overlap is True  # over "shm" it decides the buckets' memory
        shared["sync"] = "the average of every gradient" if self.sync is None else self.sync._words()
        return shared
