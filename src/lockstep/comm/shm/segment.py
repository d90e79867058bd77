"""One group's shared memory: made by its rank 0, opened by the others, with proof that all are on one host.

The memory is a ``memfd``: it has no name in any file system, so nothing is left when its processes end, however they
end, and no mount limits its size. Rank 0 publishes where it is (its process and descriptor number) in the rendezvous
store; the others open it through ``/proc`` and check a random nonce in it. Opening it *is* the proof that they share a
host and may share memory; the boot id and the namespace of process ids are compared first, to say why if not. Once
every rank has mapped the memory the descriptor is closed: an open group holds none.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import struct
from dataclasses import asdict, dataclass

import torch

from lockstep.comm.shm.mapping import Memory, map_shared
from lockstep.errors import RendezvousError

_REMEDY = 'use the backend "gloo" (or "nccl" for GPUs) for this group'
_IDENTITY = struct.Struct("<32sqq")


@dataclass(frozen=True)
class Whereabouts:
    """Where a process is, as it can be told to another one."""

    pid: int
    #: When it started, in clock ticks since boot: a process id is used again, the pair is not.
    started: int
    boot_id: str
    pid_namespace: int

    @classmethod
    def mine(cls) -> Whereabouts:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
        pid = os.getpid()
        return cls(pid, started(pid) or 0, boot_id, os.stat("/proc/self/ns/pid").st_ino)

    def why_apart(self, other: Whereabouts) -> str | None:
        """Why memory can't be shared with a process at ``other``, as far as that shows without trying; or None."""
        if self.boot_id != other.boot_id:
            return "they run on different hosts"
        if self.pid_namespace != other.pid_namespace:
            return "they run in containers that can't see each other's processes"
        return None


def started(pid: int) -> int | None:
    """**Local.** When the process started, in clock ticks since boot; None if it is gone or a zombie.

    Raises:
        OSError: it can't be told, for want of a descriptor.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; the fields follow the last one.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


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
        #: Every byte, uint8; whoever holds a view of it keeps the mapping alive.
        self.bytes: torch.Tensor = torch.frombuffer(memory, dtype=torch.uint8)
        #: For headers and words.
        self.view = memoryview(memory).cast("B")
        #: Address of the first byte in this process.
        self.address = self.bytes.data_ptr()

    def release(self) -> Memory:
        """**Local.** Let go of the mapping, and leave it to the tensors on it. The segment can't be used any more."""
        memory = self._memory
        self.view.release()
        del self._memory, self.bytes, self.view
        return memory

    @classmethod
    def create(cls, size: int, *, chunk: int) -> tuple[Segment, Offer]:
        """**Local.** Make a segment of zeros. The caller closes ``offer.descriptor`` once all have opened it.

        Raises:
            RendezvousError: this system has no memfd, or no memory.
        """
        nonce = secrets.token_hex(16)
        descriptor = -1
        try:
            where = Whereabouts.mine()
            descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, size)
            # Nobody can cut the memory short under a rank that uses it.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            memory = map_shared(descriptor, size)
        except (OSError, AttributeError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise RendezvousError(f"no shared memory of {size} bytes can be made here ({error}): {_REMEDY}") from error
        _IDENTITY.pack_into(memory, 0, nonce.encode(), size, chunk)
        return cls(memory), Offer(where, descriptor, nonce, size, chunk)

    @classmethod
    def open(cls, offer: Offer) -> Segment:
        """**Local.** Map the segment another process made.

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
                memory = map_shared(descriptor, offer.size)
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
