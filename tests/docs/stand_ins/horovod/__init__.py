"""In place of Horovod where it is not installed; see :mod:`horovod.torch`."""
