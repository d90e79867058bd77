"""torch's switches for results that repeat, in one place.

Note [Deterministic algorithms]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The same numbers come out of the same inputs where an operation adds in one order. Some add in the order in which
threads happen to arrive (atomic additions on a GPU: an embedding's gradient, ``scatter_add``, ``index_add``), and some
libraries choose among algorithms by a measurement. :func:`switch_on` sets all that torch offers against it:

- ``torch.use_deterministic_algorithms``: operations take an algorithm with one order. One that has none raises
  RuntimeError with its name (or warns with ``warn_only``); torch's documentation of this function lists them, nearly
  all of them for GPUs. torch.compile measures no candidates either then.
- ``torch.backends.cudnn.deterministic`` and no ``torch.backends.cudnn.benchmark``: cuDNN takes an algorithm that
  repeats, the same one each time instead of the one that was fastest in a trial.
  ``torch.backends.mkldnn.deterministic`` is the same for oneDNN.
- ``CUBLAS_WORKSPACE_CONFIG``: cuBLAS shares its scratch memory out among streams, and by what is free it picks how it
  splits a product. ``:4096:8`` gives it eight buffers of 4 MiB, 32 MiB of a GPU's memory; what the user has set stays.
  cuBLAS reads it when it first computes, so the switch comes before that: in ``init``, or at least before anything is
  multiplied on a GPU. Where it comes too late, torch's error in the next product says so.
- ``torch.utils.deterministic.fill_uninitialized_memory`` off, which torch has on as soon as deterministic algorithms
  are. It fills the memory of every new tensor with NaN, one more pass over each. It changes only the results of an
  operation that reads what nobody has written, which is a mistake in any case; it finds such mistakes, and orders
  nothing.

They hold for the process, and none of it is undone when a world is closed. What is left: another CPU or GPU model,
another number of threads, another torch; and what a program draws or orders itself.
"""

from __future__ import annotations

import os

import torch

#: The variable that sets the scratch memory of cuBLAS's products, and its value for eight buffers of 4 MiB.
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_EIGHT_BUFFERS = ":4096:8"


def switch_on(*, warn_only: bool = False) -> None:
    """Have operations of this process give the same bits for the same inputs; see Note [Deterministic algorithms].

    Calling it again changes nothing, but that ``warn_only=False`` is stronger than what was said before, whoever said
    it: a switch that raises is not made to warn.

    Args:
        warn_only: what happens in an operation that has no deterministic algorithm: torch warns and names it, and
            otherwise raises RuntimeError with its name.
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, _EIGHT_BUFFERS)
    raises = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only and not raises)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]


def is_on() -> bool:
    """Return whether all that :func:`switch_on` sets for results is set, whoever has set it."""
    return (
        torch.are_deterministic_algorithms_enabled()
        and torch.backends.cudnn.deterministic
        and not torch.backends.cudnn.benchmark
        and bool(os.environ.get(CUBLAS_WORKSPACE))
    )
