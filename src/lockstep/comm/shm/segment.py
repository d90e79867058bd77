"""One group's shared memory: made by its rank 0, opened by the others, with proof that all are on one host.

The memory is a ``memfd``: it has no name in any file system, so nothing is left when its processes end, however they
end, and no mount limits its size. Rank 0 publishes where it is (its process and descriptor number) in the rendezvous
store; the others open it through ``/proc`` and check a random nonce in it. Opening it *is* the proof that they share a
host and may share memory; the boot id and the namespace of process ids are compared first, to say why if not. Once
every rank has mapped the memory the descriptor is closed: an open group holds none.

The mapping is made by ``mmap(2)`` itself: ``mmap.mmap`` keeps a copy of the descriptor as long as the memory is mapped
(before Python 3.13 always), one for each group and one per rank for each tensor that a group allocates, and a process
with many groups would run out of them.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import struct
import weakref
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch

from lockstep.comm.group.meeting import Whereabouts
from lockstep.errors import RendezvousError

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

_REMEDY = 'use the backend "gloo" (or "nccl" for GPUs) for this group'
_FILE_LIMIT = "the limit of this user's files holds for shared memory, too; raise it with ulimit -f"
_IDENTITY = struct.Struct("<32sqq")


@dataclass(frozen=True)
class Offer:
    """What the maker of a segment tells the others."""

    where: Whereabouts
    descriptor: int
    nonce: str
    size: int
    chunk: int

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Offer:
        fields = json.loads(text)
        return cls(**{**fields, "where": Whereabouts(**fields["where"])})


class Segment:
    """Shared memory mapped into this process. It is unmapped when the last tensor on it is gone."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        #: All bytes (uint8); a view of it keeps the mapping alive.
        with torch.inference_mode(False):  # else it could be written in inference mode only
            self.bytes: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        #: The same bytes as a memoryview, for headers and words.
        self.view = memoryview(memory).cast("B")
        #: Address of the first byte in this process.
        self.address = self.bytes.data_ptr()

    def release(self) -> Memory:
        """Let go of the mapping, and leave it to the tensors on it. The segment can't be used any more."""
        memory = self._memory
        self.view.release()
        del self._memory, self.bytes, self.view
        return memory

    @classmethod
    def create(cls, size: int, *, chunk: int) -> tuple[Segment, Offer]:
        """Make a segment of zeros. The caller closes ``offer.descriptor`` once all have opened it.

        Raises:
            RendezvousError: this system has no memfd, or no memory.
        """
        nonce = secrets.token_hex(16)
        descriptor = -1
        try:
            where = Whereabouts.mine()
            descriptor = make_file(size)
            memory = map_memory(descriptor, size)
        except (OSError, AttributeError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            why = f"{error}: {_FILE_LIMIT}" if getattr(error, "errno", None) == errno.EFBIG else str(error)
            raise RendezvousError(f"no shared memory of {size} bytes can be made here ({why}): {_REMEDY}") from error
        _IDENTITY.pack_into(memory, 0, nonce.encode(), size, chunk)
        return cls(memory), Offer(where, descriptor, nonce, size, chunk)

    @classmethod
    def open(cls, offer: Offer) -> Segment:
        """Map the segment another process made.

        Raises:
            RendezvousError: it can't be reached from here; the message says why and what to use instead.
        """
        here, there = Whereabouts.mine(), offer.where
        apart = here.why_apart(there)
        if apart:
            raise RendezvousError(f'the backend "shm" needs all ranks on one host, but {apart}: {_REMEDY}')
        path = f"/proc/{there.pid}/fd/{offer.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = map_memory(descriptor, offer.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise RendezvousError(
                f"the memory that process {there.pid} shares can't be opened through {path} ({error}); "
                f"do the ranks run as different users, or in different containers? {_REMEDY}"
            ) from error
        if _IDENTITY.unpack_from(memory, 0) != (offer.nonce.encode(), offer.size, offer.chunk):
            raise RendezvousError(f"{path} is not the memory that rank 0 shares: {_REMEDY}")
        return cls(memory)


def make_file(size: int | None) -> int:
    """Return the descriptor of a new file in memory, of zeros and without a name. The caller closes it.

    Args:
        size: bytes; None: it is empty, and grows as it is written, until it is given to :func:`seal`.

    Raises:
        OSError: there is no memory, or a limit on files is less.
        AttributeError: this system has no memfd.
    """
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        if size is not None:
            seal(descriptor, size)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int, size: int) -> None:
    """Give a file of :func:`make_file` the size that it keeps: nobody can cut the memory short under a rank that uses
    it."""
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def map_memory(descriptor: int, size: int, *, writable: bool = True) -> Memory:
    """Map the first ``size`` bytes of the file, to be read and written together with other processes.

    Args:
        descriptor: the file's; the mapping does without it.
        size: bytes.
        writable: if False, a write to the memory ends this process with SIGSEGV.

    Raises:
        OSError: the file is shorter (touching memory beyond its end would kill the process), or can't be mapped.
    """
    there = os.fstat(descriptor).st_size
    if there < size:
        raise OSError(f"the file has {there} bytes, expected at least {size}")
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * size).from_address(address)
    finalizer = weakref.finalize(memory, _munmap, address, size)
    finalizer.atexit = False  # threads may still use it; the kernel unmaps everything a moment later
    return memory
