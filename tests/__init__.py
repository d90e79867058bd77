"""The tests. Who imports them has simulated GPUs where the environment says so; see tests/device."""

import os

if "SIMULATED_DEVICES" in os.environ:  # before torch is imported anywhere
    from tests.device import start

    start.install()
