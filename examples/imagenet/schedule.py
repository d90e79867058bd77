"""How large a step is, and when."""

from __future__ import annotations

import math
from collections.abc import Callable

from examples.imagenet.options import Options

#: The batch for which --lr is meant.
_REFERENCE = 256


def scaled_rate(options: Options) -> tuple[float, str]:
    """Return the learning rate of the global batch, and how it came about, for people.

    The linear scaling rule: a batch k times as large takes steps k times as long (P. Goyal et al., "Accurate, Large
    Minibatch SGD: Training ImageNet in 1 Hour", 2017, arXiv:1706.02677, section 2.1).
    """
    if not options.scale_lr:
        return options.lr, f"learning rate {options.lr:g}, not scaled with the batch"
    rate = options.lr * options.batch_size / _REFERENCE
    return rate, (
        f"learning rate {options.lr:g} x {options.batch_size} / {_REFERENCE} = {rate:g} for a global batch of "
        f"{options.batch_size} (linear scaling rule; --no-lr-scaling takes --lr as it is)"
    )


def factors(options: Options, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the factor of the learning rate at each step, from 0.

    It grows linearly to 1 over the warm-up (section 2.2 of the same paper); then it falls along a cosine to 0 at the
    end (I. Loshchilov and F. Hutter, "SGDR", 2016, arXiv:1608.03983) or drops by ``gamma`` every ``step_size`` epochs.
    """
    warmup = round(options.warmup_epochs * steps_per_epoch)
    total = options.epochs * steps_per_epoch

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if options.schedule == "step":
            return options.gamma ** (step // (options.step_size * steps_per_epoch))
        done = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor
