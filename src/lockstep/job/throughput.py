"""Throughput as people count it: tokens and FLOPs a second, and the part of the devices' peak that they are. Pure.

Note [FLOPs of a run]
~~~~~~~~~~~~~~~~~~~~~
One step of each rank is counted (step/flops.py), and all others are taken to be like it. Where samples are counted,
"like it" means as many FLOPs for each sample: so a step with a smaller batch, the last one of an epoch, counts for
less, and if the step that was counted was such a one, that changes nothing. Where they are not, it means as many FLOPs
for each step.

MFU, model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311), is the time that the FLOPs would take at the
device's peak as a part of the time that they took. A step may have FLOPs in several dtypes, whose peaks differ, so
their times at the peak are added up. One rank is one device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.text import as_amount


class StepFlops(NamedTuple):
    """What a rank has counted of one step."""

    flops: int
    #: The rank's samples in it; 0: they are not counted.
    samples: int = 0
    #: Seconds that the FLOPs take at the device's peak; 0: no peak is known.
    at_peak: float = 0.0


@dataclass(frozen=True)
class Throughput:
    """What some ranks got done in some time; sums, so that those of several parts of a run are added up."""

    #: Seconds, and the same summed over the ranks.
    seconds: float
    device_seconds: float
    #: Samples and tokens of all ranks; 0: they are not counted.
    samples: int = 0
    tokens: int = 0
    #: FLOPs of all ranks, and the seconds that they take at the peak of one device; 0: not known.
    flops: float = 0.0
    at_peak: float = 0.0

    @classmethod
    def of(cls, seconds: float, ranks: Iterable[tuple[StepFlops | None, int, int]], *, steps: int) -> Throughput:
        """Reckon what ranks got done together; see Note [FLOPs of a run].

        Args:
            seconds: in which they did it.
            ranks: of each the FLOPs that it has counted of one step (None: none), its samples and its tokens.
            steps: of each.
        """
        rows = list(ranks)
        counted = [flops for flops, _, _ in rows if flops is not None]
        samples, tokens = sum(row[1] for row in rows), sum(row[2] for row in rows)
        flops = at_peak = 0.0
        if rows and len(counted) == len(rows):
            in_it = sum(each.samples for each in counted)
            times = samples / in_it if samples and in_it else steps
            flops = times * sum(each.flops for each in counted)
            if all(each.at_peak for each in counted):
                at_peak = times * sum(each.at_peak for each in counted)
        return cls(seconds, seconds * len(rows), samples, tokens, flops, at_peak)

    def plus(self, other: Throughput) -> Throughput:
        """Return the sum of both; what is not known of one is not known of both."""
        return Throughput(
            self.seconds + other.seconds,
            self.device_seconds + other.device_seconds,
            self.samples + other.samples,
            self.tokens + other.tokens,
            self.flops + other.flops if self.flops and other.flops else 0.0,
            self.at_peak + other.at_peak if self.at_peak and other.at_peak else 0.0,
        )

    @property
    def samples_per_second(self) -> float | None:
        """Of all ranks together; None: not known, as of the others."""
        return self.samples / self.seconds if self.samples and self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks together."""
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def flops_per_second(self) -> float | None:
        """Of one device, in the mean."""
        return self.flops / self.device_seconds if self.flops and self.device_seconds else None

    @property
    def mfu(self) -> float | None:
        """The part of the devices' peak, in the mean."""
        return self.at_peak / self.device_seconds if self.at_peak and self.device_seconds else None

    @property
    def rates(self) -> list[str]:
        """``8,578 samples/s`` and ``1,098,000 tokens/s``, as far as they are known."""
        told = (("samples", self.samples_per_second), ("tokens", self.tokens_per_second))
        return [f"{rate:,.0f} {what}/s" for what, rate in told if rate is not None]

    def describe_flops(self) -> str:
        """``45.6 TFLOP/s a device, 14.6% of its peak (MFU)``; empty: no FLOPs were counted."""
        if self.flops_per_second is None:
            return ""
        peak = "" if self.mfu is None else f", {100 * self.mfu:.3g}% of its peak (MFU)"
        return f"{as_amount(self.flops_per_second, 'FLOP/s')} a device{peak}"

    def to_json(self) -> dict[str, Any]:
        """Return the rates in JSON's types."""
        return {
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "flops_per_second": self.flops_per_second,
            "mfu": self.mfu,
        }
