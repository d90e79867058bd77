"""What tests above the process group run over: all of them over shm, some over gloo as well, some on GPUs as well.

What lies above the process group does the same over either, so every run of the tests takes its cases over gloo only
where they are about what is sent (``OVER_BOTH``); the others over gloo are run by ``make faults``. Tests with the mark
``ON_GPUS`` also run on GPUs, over NCCL and with streams that are late: their functions put models and batches on the
device of the world, as programs of users do. ``make simulated`` has one seed of them, the campaigns have all.
"""

from __future__ import annotations

import pytest

from tests.device.simulation import Stress

BOTH = ("gloo", "shm")

#: The parameters of tests on GPUs: a seed for every run and twenty for the campaigns, by which streams are late.
GPUS = [
    pytest.param(
        Stress(seed=seed, jitter=300, side=500 * (seed % 4)),
        id=f"gpus-{seed}",
        marks=[pytest.mark.gpu, *([pytest.mark.campaign] if seed > 1 else [])],
    )
    for seed in range(1, 21)
]

#: The mark of a module whose tests run over the backends; the fixture is in conftest.py.
EACH_BACKEND = pytest.mark.usefixtures("each_backend")

#: The mark of a test that every run of the tests has over both. Below its other marks, so that it comes first in ids.
OVER_BOTH = pytest.mark.parametrize("each_backend", BOTH, indirect=True)

#: The mark of a test of such a module that runs on GPUs as well; OVER_ALL where every run has it over both backends.
ON_GPUS = pytest.mark.parametrize(
    "each_backend", [pytest.param("gloo", marks=pytest.mark.campaign), "shm", *GPUS], indirect=True
)
OVER_ALL = pytest.mark.parametrize("each_backend", [*BOTH, *GPUS], indirect=True)
