import os

if "SIMULATED_DEVICES" in os.environ:  # before torch is imported anywhere
    from tests.device import start

    start.install()
