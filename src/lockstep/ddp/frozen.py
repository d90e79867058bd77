"""The parameters that were frozen when a replica was laid out, watched for the day on which they are trained.

Note [Thawed parameters]
~~~~~~~~~~~~~~~~~~~~~~~~
A parameter that is frozen at ``replicate`` is in no bucket, and when a script thaws it, the buckets have to be laid out
anew, on all ranks. A forward looks for such parameters before anything else. A backward that no forward has announced
(Note [Unannounced gradients] in ``accumulated.py``) looks as it begins, when its first gradient has come, which may be
that of a thawed parameter; there may even be no others. So frozen parameters have hooks as well, which cost nothing
while they are frozen. The old reducer then hands the gradient that has come over to the new one, which begins the
backward: no gradient of it was sent yet.

A thawed parameter that gets its gradient in a backward that has begun without it (it was thawed between a forward and
the backward through it, and another method used it in between) comes too late for that, and is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.nn import Parameter

from lockstep import _torch
from lockstep.ddp.parameters import may_be_trained, thawed


class FrozenParameters:
    """The parameters of a replica that are not averaged, since they were frozen; see Note [Thawed parameters].

    Args:
        named: their names and the parameters.
        came: is called in a backward with a parameter that has got its gradient.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], came: Callable[[Parameter], None]) -> None:
        #: The parameters, and their names.
        self.params, self._names = [param for _, param in named], [name for name, _ in named]

        @_torch.mark_untraced
        def on_gradient(param: Parameter) -> None:
            came(param)

        trainable = [param for param in self.params if may_be_trained(param)]
        with thawed(trainable):
            self._handles = [param.register_post_accumulate_grad_hook(on_gradient) for param in trainable]

    def name_of(self, param: Parameter) -> str | None:
        """Return the name of ``param``; None: it is none of them."""
        return next((name for name, each in zip(self._names, self.params, strict=True) if each is param), None)

    def close(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
