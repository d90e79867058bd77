"""Replicas in threads of one process: ``DataParallel``, its functional form, and ``Copies``, its counter."""

from lockstep.data_parallel.api import DataParallel as DataParallel
from lockstep.data_parallel.api import data_parallel as data_parallel
from lockstep.data_parallel.copies import Copies as Copies
