"""What torch itself tells: when an optimizer steps, whoever's it is, and when torch.compile compiles.

torch is not imported here: it is handed over, or found where the program has imported it.
"""

from __future__ import annotations

from typing import Any

from lockstep import _torch
from lockstep.recorder import writer
from lockstep.recorder.layout import Phase

_OPTIMIZER = int(Phase.OPTIMIZER)
#: Whether this process's optimizers are watched, and torch.compile.
_optimizers = _compiler = False


def watch_optimizers(optimizers: Any) -> None:
    """**Local.** From now on every optimizer's steps are in this process's page. A second call does nothing.

    Args:
        optimizers: the module ``torch.optim.optimizer``.
    """
    global _optimizers
    if not _optimizers:
        _optimizers = True
        optimizers.register_optimizer_step_pre_hook(_before_step)
        optimizers.register_optimizer_step_post_hook(_after_step)


def _before_step(*_: object) -> None:
    writer.enter(_OPTIMIZER)


def _after_step(*_: object) -> None:
    writer.took_step()
    if not _compiler:
        _watch_compiler()


def _watch_compiler() -> None:
    """Behind the first step, because an optimizer has imported the compiler by then; until then a rank has a minute."""
    global _compiler
    _compiler = True
    callback = _torch.compile_callbacks()
    if callback is None:
        return
    compiling = writer.phase(Phase.COMPILE)
    callback.on_compile_start(lambda *_: compiling.__enter__())
    callback.on_compile_end(lambda *_: compiling.__exit__(None))
