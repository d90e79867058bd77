"""The tests. Who imports them has simulated GPUs, or a part of a real one, where the environment says so; see
tests/device."""

import os

if "SIMULATED_DEVICES" in os.environ:  # before torch is imported anywhere
    from tests.device import start

    start.install()
elif "SHARED_GPU" in os.environ:
    from tests.device import shared

    shared.share()
