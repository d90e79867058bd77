"""In a rank of an observed run: random numbers that do not depend on which rank has a sample, or on how many there are.

Note [Random numbers made alike]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
By design, N ranks draw other masks and other noise than one rank. So if numbers are drawn in a step, N ranks differ
from one as they would by a mistake, and a real mistake is hidden. A second pair of runs, which differs from the first
only in these numbers, tells the two apart: a difference between them is not random, and if they are equal, the numbers
explain all of the first pair's difference.

In these runs dropout is off, since its masks have any layout, and may be drawn within an operation of torch's. All
other numbers are drawn once for one sample and repeated for all of them: of a tensor whose first dimension is that of
the batch, or a multiple of it, the first sample's part is drawn, from a generator of its own that is seeded by the
number of the step and the tensor's shape. So the same shape has the same numbers in a step, wherever it is drawn: also
where activation checkpointing runs a forward again. A tensor with another first dimension (a coin for a whole layer) is
drawn whole, and is the same on all ranks.

This holds from the moment a batch of a sharded loader is in hand, or a forward for training begins, and not while a
batch is fetched: what a dataset draws belongs to a sample already, or to a mistake. A generator that the script passes
itself is left alone. Numbers out of reach (``torch.multinomial``, ``torch.randperm``, generators of Python and NumPy,
kernels that draw by themselves) still differ, and the report says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook

Fill = Callable[[Tensor, torch.Generator], object]

_MASK = 2**63 - 1
#: Functions that return their input where nothing is dropped.
_DROPS = {
    functional: ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    torch: (
        "dropout",
        "dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    ),
}
#: Methods that fill a tensor, whose values do not depend on what it holds.
_FILLS = ("uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_")
#: The modules in which batches are fetched.
_FETCHING = ("lockstep.data.", "torch.utils.data.")


class Watched(Protocol):
    """The facts about the step under way."""

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""

    @property
    def samples_in_hand(self) -> int | None:
        """This rank's samples of the batch that is being computed; 0: not known how many; None: there is no batch."""


def make_alike(watched: Watched) -> None:
    """From now on draw the same numbers for every sample of a step. Called once, before the script begins."""
    alike = _Alike(watched)
    for home, names in _DROPS.items():
        for name in names:
            setattr(home, name, _undropped(getattr(home, name)))
    functional.scaled_dot_product_attention = _attending(functional.scaled_dot_product_attention)
    register_module_forward_pre_hook(_keep_all_of_rnn)
    for name in _FILLS:
        setattr(Tensor, name, alike.method(name))
    for name in ("bernoulli", "bernoulli_"):
        setattr(Tensor, name, alike.over(Tensor, name, alike.bernoulli, in_place=name[-1] == "_"))
    alike.replace("bernoulli", alike.bernoulli)
    alike.replace("rand", lambda *size, **options: alike.fill(torch.empty(*size, **options), _uniform))
    alike.replace("randn", lambda *size, **options: alike.fill(torch.empty(*size, **options), _normal))
    alike.replace("rand_like", lambda other, **options: alike.fill(torch.empty_like(other, **options), _uniform))
    alike.replace("randn_like", lambda other, **options: alike.fill(torch.empty_like(other, **options), _normal))
    alike.replace("randint", alike.randint)
    alike.replace("randint_like", alike.randint_like)
    alike.replace("normal", alike.normal)


_uniform_here, _normal_here, _random_here = Tensor.uniform_, Tensor.normal_, Tensor.random_


def _uniform(tensor: Tensor, generator: torch.Generator) -> None:
    _uniform_here(tensor, generator=generator)


def _normal(tensor: Tensor, generator: torch.Generator) -> None:
    _normal_here(tensor, generator=generator)


class _Alike:
    """Draws numbers that depend on the step and on a tensor's shape alone."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def _is_due(self) -> bool:
        """Return whether the numbers that the script draws now are for a batch that it computes."""
        if torch.compiler.is_compiling() or self._watched.samples_in_hand is None:
            return False
        frame = sys._getframe(2)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith(_FETCHING):
                return False
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return True

    def fill(self, tensor: Tensor, how: Fill) -> Tensor:
        """Fill a tensor with the numbers of one sample, repeated for all of them."""
        samples, rows = self._watched.samples_in_hand or 0, tensor.shape[0] if tensor.dim() else 0
        times = samples if samples and rows and rows % samples == 0 else 1
        shape = [rows // times, *tensor.shape[1:]] if tensor.dim() else []
        one = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        seed = xxhash.xxh3_64_intdigest(repr((self._watched.step, shape)).encode()) & _MASK
        with torch.no_grad():
            how(one, torch.Generator(one.device).manual_seed(seed))
            tensor.copy_(one.repeat(times, *[1] * (tensor.dim() - 1)) if times > 1 else one)
        return tensor

    def method(self, name: str) -> Callable[..., Tensor]:
        """Return a method of tensors in the place of ``name``, which fills them."""
        own = getattr(Tensor, name)

        @functools.wraps(own)
        def drawn(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if options.get("generator") is not None or not self._is_due():
                filled: Tensor = own(tensor, *args, **options)
                return filled
            options.pop("generator", None)
            return self.fill(tensor, lambda one, generator: own(one, *args, **options, generator=generator))

        return drawn

    def over(
        self, home: ModuleType | type, name: str, instead: Callable[..., Tensor], **fixed: Any
    ) -> Callable[..., Tensor]:
        """Return a function that calls ``instead`` while a batch is computed, and otherwise ``name`` of ``home``."""
        own = getattr(home, name)

        @functools.wraps(own)
        def drawn(*args: Any, **options: Any) -> Tensor:
            if options.get("generator") is not None or not self._is_due():
                returned: Tensor = own(*args, **options)
                return returned
            options.pop("generator", None)
            return instead(*args, **options, **fixed)

        return drawn

    def replace(self, name: str, instead: Callable[..., Tensor]) -> None:
        """Put ``instead`` into the place of a function of torch."""
        setattr(torch, name, self.over(torch, name, instead))

    # torch's signatures -----------------------------------------------------------------------------------------------

    def bernoulli(
        self, input: Tensor, p: float | Tensor | None = None, *, out: Tensor | None = None, in_place: bool = False
    ) -> Tensor:
        """Draw 0 or 1 with the probabilities ``p``, or those in ``input``."""
        uniform = self.fill(torch.empty(input.shape, device=input.device), _uniform)
        chance = (0.5 if in_place else input) if p is None else p
        with torch.no_grad():
            drawn = (uniform < chance).to(input.dtype)
            into = input if in_place else out
            return drawn if into is None else into.copy_(drawn)

    def randint(self, *args: Any, **options: Any) -> Tensor:
        """Draw integers: ``randint(high, size)`` or ``randint(low, high, size)``."""
        given = list(args)
        size = options.pop("size") if "size" in options else given.pop()
        bounds = _bounds(given, options)
        options.setdefault("dtype", torch.int64)
        return self.fill(torch.empty(size, **options), bounds)

    def randint_like(self, input: Tensor, *args: Any, **options: Any) -> Tensor:
        """Draw integers: ``randint_like(input, high)`` or ``randint_like(input, low, high)``."""
        bounds = _bounds(list(args), options)
        return self.fill(torch.empty_like(input, **options), bounds)

    def normal(
        self, mean: float | Tensor, std: float | Tensor = 1.0, size: Any = None, *, out: Any = None, **options: Any
    ) -> Tensor:
        """Draw from normal distributions."""
        given = [each for each in (mean, std) if isinstance(each, Tensor)]
        if given:
            shape = torch.broadcast_shapes(*(each.shape for each in given))
            options = {"dtype": given[0].dtype, "device": given[0].device}
        else:
            shape = size
        with torch.no_grad():
            drawn: Tensor = mean + std * self.fill(torch.empty(shape, **options), _normal)
            return drawn if out is None else out.copy_(drawn)


def _bounds(given: list[int], options: dict[str, Any]) -> Fill:
    high = options.pop("high") if "high" in options else given.pop()
    low = options.pop("low", given[0] if given else 0)
    return lambda one, generator: _random_here(one, low, high, generator=generator)


def _undropped(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(own)
    def kept(*args: Any, **options: Any) -> Tensor:
        found: Tensor = args[0] if args else options["input"]
        return found

    return kept


def _attending(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return attention without dropout."""

    @functools.wraps(own)
    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        del dropout_p
        return own(query, key, value, attn_mask, 0.0, *args, **options)

    return attend


def _keep_all_of_rnn(module: nn.Module, _args: Any) -> None:
    if isinstance(module, nn.RNNBase):
        module.dropout = 0.0
