"""The loss scale of a rank: the factor that keeps gradients within the range of float16 while they are computed.

Note [Loss scale]
~~~~~~~~~~~~~~~~~
float16 has no numbers below 6e-8, where many gradients lie. So the loss is multiplied by a large factor before
backward, and the gradients are divided by it before anything else sees them. If one of them is infinite or NaN the
factor was too large: the step is left out and the factor halved. After 2000 steps in a row that were taken it is
doubled. Factor and rule are those of ``torch.amp.GradScaler``, with its defaults, so the same program comes to the
same bits with either. All factors are powers of two, which change no digit of a gradient.

There is one loss scale for all models of a process, since one loss may come through several of them. ``ddp`` uses it
and ``checkpoint`` keeps it, and neither knows the other. They meet here: a model with a scaled loss is entered as a
module.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakSet

from torch import nn

#: The first factor; what it is multiplied by after a step with infinite gradients, and after steps without.
_FIRST, _BACKOFF, _GROWTH = 2.0**16, 0.5, 2.0
#: Number of steps in a row without infinite gradients after which the factor grows.
_INTERVAL = 2000
#: The greatest factor, the greatest power of two in float32; the least, which is the first one halved a hundred times.
_GREATEST, _LEAST = 2.0**127, 2.0**-84


class DynamicScale:
    """The factor by which losses are multiplied before backward, and what became of the steps.

    Args:
        interval: number of steps in a row without infinite gradients after which the factor grows.
    """

    def __init__(self, *, interval: int = _INTERVAL) -> None:
        self._interval = interval
        self._scale = _FIRST
        #: Steps taken in a row since the scale changed.
        self._taken = 0
        #: Steps left out because gradients were infinite or NaN.
        self._skipped = 0
        #: True if there was a step since the last scaled loss, and if one was left out.
        self._has_stepped = self._has_skipped = False

    @property
    def scale(self) -> float:
        """The factor of the next loss; a power of two."""
        return self._next()[0]

    @property
    def skipped(self) -> int:
        """Number of optimizer steps so far that were left out because their gradients were infinite or NaN."""
        return self._skipped

    @property
    def is_exhausted(self) -> bool:
        """Whether it has been halved so often that float16's range can't be the reason."""
        return self.scale <= _LEAST

    def for_loss(self) -> float:
        """Return the factor of a loss whose backward is about to come."""
        self._scale, self._taken = self._next()
        self._has_stepped = self._has_skipped = False
        return self._scale

    def stepped(self, *, skipped: bool) -> None:
        """Note a step of an optimizer, and whether it was left out because gradients were infinite or NaN.

        Several optimizers may step after one backward: the scale changes once for all of them.
        """
        self._has_stepped = True
        self._has_skipped |= skipped
        self._skipped += skipped

    def _next(self) -> tuple[float, int]:
        """Return the scale and the count of steps as the steps since the last loss demand."""
        if self._has_skipped:
            return self._scale * _BACKOFF, 0
        taken = self._taken + self._has_stepped
        if taken < self._interval:
            return self._scale, taken
        return min(self._scale * _GROWTH, _GREATEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state; JSON."""
        scale, taken = self._next()
        return {"scale": scale, "taken": taken, "skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that :func:`is_state` accepts."""
        self._scale, self._taken, self._skipped = state["scale"], state["taken"], state["skipped"]
        self._has_stepped = self._has_skipped = False


def is_state(state: object) -> bool:
    """Return whether ``state`` is one that :meth:`DynamicScale.state_dict` may have returned."""
    if not isinstance(state, dict) or state.keys() != {"scale", "taken", "skipped"}:
        return False
    scale, counts = state["scale"], [state["taken"], state["skipped"]]
    if type(scale) is not float or not 0 < scale <= _GREATEST or math.frexp(scale)[0] != 0.5:
        return False
    return all(type(count) is int and count >= 0 for count in counts)


#: The models whose losses are scaled.
_scaled: WeakSet[nn.Module] = WeakSet()
_current = DynamicScale()


def enter(module: nn.Module) -> None:
    """Note that the losses of ``module`` are scaled from now on. Where no other model's are, the scale begins anew."""
    global _current
    if not _scaled:
        _current = DynamicScale()
    _scaled.add(module)


def leave(module: nn.Module) -> None:
    """Note that they are scaled no longer."""
    _scaled.discard(module)


def in_force() -> DynamicScale | None:
    """Return the loss scale; None: no model's losses are scaled."""
    return _current if _scaled else None


def scale_of(model: nn.Module) -> DynamicScale | None:
    """Return the loss scale of ``model``, be it wrapped or part of another; None: its losses are not scaled."""
    own = {id(param) for param in model.parameters()}
    return _current if any(id(param) in own for module in _scaled for param in module.parameters()) else None
