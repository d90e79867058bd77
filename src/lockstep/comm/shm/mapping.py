"""Shared memory mapped into this process, without a descriptor.

``mmap.mmap`` keeps a copy of the descriptor as long as the memory is mapped (before Python 3.13 always): one for each
group, and one per rank for each tensor that a group allocates. A process with many groups would run out of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TypeAlias

#: Bytes of memory; unmapped when the last object that refers to it is gone. Weak references to it are possible.
Memory: TypeAlias = "ctypes.Array[ctypes.c_ubyte]"

_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
# (off_t is a long on every 64-bit Linux.)
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_shared(descriptor: int, size: int) -> Memory:
    """**Local.** The first ``size`` bytes of the file, to be read and written together with other processes.

    Raises:
        OSError: the file is shorter (to touch what lies behind its end would kill the process), or can't be mapped.
    """
    there = os.fstat(descriptor).st_size
    if there < size:
        raise OSError(f"the file has {there} bytes, expected at least {size}")
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * size).from_address(address)
    finalizer = weakref.finalize(memory, _munmap, address, size)
    finalizer.atexit = False  # threads may still use it; the kernel unmaps everything a moment later
    return memory
