"""Look for infinite or NaN gradients on the rank that has them, before the average spreads them to every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.ddp.bucket import Bucket
from lockstep.errors import NonFiniteGradient


class FiniteCheck:
    """What ``check_finite`` does. ``inspect`` runs on every bucket before it is sent, ``verdict`` after all have come.

    In mode "raise" a rank that stopped at its own bad gradient would leave the others waiting. So it sends the bucket
    all the same, with the flags of Note [Bucket layout] that name the parameters, and all ranks raise at the end. What
    a rank announces of a sparse gradient, before its rows are sent, has such a flag too.
    """

    def __init__(self, *, stops: bool) -> None:
        #: True for "raise", False for "warn".
        self.stops = stops
        self._mine: list[str] = []

    def inspect(self, bucket: Bucket, names: Sequence[str], whoami: Callable[[], str]) -> None:
        """**Local.** Flag, and in mode "warn" report, the parameters of ``bucket`` whose gradients are not finite."""
        if bool(torch.isfinite(bucket.values).all()):
            return
        bad = [slot for slot, view in enumerate(bucket.views) if not bool(torch.isfinite(view).all())]
        if self.stops:
            bucket.bad[bad] = 1
        self._note([names[slot] for slot in bad], whoami)

    def inspect_rows(self, rows: Tensor, name: str, whoami: Callable[[], str]) -> bool:
        """**Local.** As :meth:`inspect`, for a sparse gradient; whether to flag it."""
        if bool(torch.isfinite(rows).all()):
            return False
        self._note([name], whoami)
        return self.stops

    def _note(self, found: list[str], whoami: Callable[[], str]) -> None:
        if self.stops:
            self._mine += found
        else:
            warnings.warn(
                f"{whoami()}: the gradient of {_listed(found)} is infinite or NaN on this rank, and so will be the "
                "average on all ranks",
                RuntimeWarning,
                stacklevel=3,
            )

    def verdict(
        self, buckets: Sequence[Bucket], names: Sequence[str], sparse: Sequence[str], whoami: Callable[[], str]
    ) -> None:
        """**Local.** Raise if any rank flagged a parameter, in ``buckets`` or among the ``sparse`` ones (names).

        Raises:
            NonFiniteGradient: names this rank's parameters, or else those that other ranks flagged.
        """
        mine, self._mine = self._mine, []
        flagged = [
            names[position]
            for bucket in buckets
            for position, bad in zip(bucket.positions, (bucket.bad.abs() > 0).tolist(), strict=True)
            if bad
        ]
        flagged += sparse
        if mine:
            raise NonFiniteGradient(
                f"{whoami()}: the gradient of {_listed(mine)} is infinite or NaN on this rank. Every rank stops "
                "here, before the optimizer's step. Look at this rank's batch and loss, or lower the learning rate"
            )
        if flagged:
            raise NonFiniteGradient(
                f"{whoami()}: the gradient of {_listed(flagged)} is infinite or NaN on another rank, whose own message "
                "says so. Every rank stops here, before the optimizer's step"
            )


def _listed(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
