"""The version, in one place: checkpoints record it, ``pyproject.toml`` and ``lockstep --version`` read it."""

__version__ = "0.1.0"
