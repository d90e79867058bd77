"""Replicas in threads of one process: ``DataParallel``, and ``data_parallel``, its functional form."""

from lockstep.data_parallel.api import DataParallel as DataParallel
from lockstep.data_parallel.api import data_parallel as data_parallel
